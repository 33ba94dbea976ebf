"""The command line: an option before the script's name belongs to the launcher, one after it to the script."""

import shlex
from collections.abc import Iterator

from ckptfix.diagnosis.findings.base import Severity
from ckptfix.environment.advice import Advice, Topic
from ckptfix.environment.facts import Facts
from ckptfix.environment.facts.launch import Launch, Option

BEFORE = Topic(
    code="flags-before-script",
    severities=(Severity.ERROR, Severity.WARNING, Severity.NOTE),
    meaning="options before the script's name are taken, or refused, by `accelerate launch`",
)
BEHIND = Topic(
    code="launch-flags-behind-script",
    severities=(Severity.WARNING,),
    meaning="options of `accelerate launch` after the script's name go to the script, and have no effect",
)
MISSING = Topic(
    code="script-missing",
    severities=(Severity.ERROR,),
    meaning="the command starts a script that does not exist",
)
TOPICS = (BEFORE, BEHIND, MISSING)


def script_missing(facts: Facts) -> Iterator[Advice]:
    """Python ends with status 2, in every process."""
    if facts.launch is not None and facts.missing_script:
        yield MISSING.advice(
            f'{facts.missing_script} does not exist: the command ends with "can\'t open file"',
            evidence=(" ".join(facts.launch.words), "a relative name is looked for in the current folder"),
            fix="correct the name, or change to the folder of the script first",
        )


def refused_before(facts: Facts) -> Iterator[Advice]:
    """``accelerate launch`` ends with "unrecognized arguments"."""
    launch = facts.launch
    if launch is not None and launch.unknown:
        names = ", ".join(option.text for option in launch.unknown)
        yield BEFORE.advice(
            f"{names} is before the script's name, and accelerate launch has no such option: it refuses",
            evidence=(" ".join(launch.words),),
            fix=f"put the script's options behind its name: {_reordered(launch, launch.unknown)}",
        )


def taken_before(facts: Facts) -> Iterator[Advice]:
    """Both know the option; the launcher takes it, and the script keeps its default."""
    own = _own_options(facts)
    if facts.launch is None or own is None:
        return
    taken = tuple(option for option in facts.launch.before if option.name in own)
    if taken:
        names = ", ".join(option.text for option in taken)
        yield BEFORE.advice(
            f"{names} is before the script's name: accelerate launch takes it, the script never sees it",
            severity=Severity.WARNING,
            evidence=(" ".join(facts.launch.words), f"the script has its own {names}"),
            fix=f"where it is meant for the script: {_reordered(facts.launch, taken)}",
        )


def shared_options(facts: Facts) -> Iterator[Advice]:
    """Known before anybody types a command."""
    own = _own_options(facts)
    if facts.launch is not None or not own:
        return
    shared = sorted(own & facts.software.accelerate.options.keys())
    if shared:
        names = ", ".join(f"--{name}" for name in shared)
        yield BEFORE.advice(
            f"the script and accelerate launch both have {names}: before the script's name it is accelerate's",
            severity=Severity.NOTE,
            evidence=(f"{facts.script.path if facts.script else ''} defines {names}",),
            fix="accelerate launch [its options] SCRIPT [the script's options]",
        )


def behind(facts: Facts) -> Iterator[Advice]:
    """Unless the script has the option, too."""
    launch, own = facts.launch, _own_options(facts)
    if launch is None or own is None:
        return
    lost = tuple(
        option
        for option in launch.after
        if len(option.name) > 1
        and option.name in facts.software.accelerate.options
        and option.name not in own
    )
    if lost:
        names = ", ".join(option.text for option in lost)
        yield BEHIND.advice(
            f"{names} is after the script's name: it goes to the script, and accelerate launch does not see it",
            evidence=(" ".join(launch.words), "the script defines no such option"),
            fix=f"put it before: accelerate launch {names} ... {launch.script}",
        )


def _own_options(facts: Facts) -> frozenset[str] | None:
    """Return the script's own options, None when they are not known."""
    return facts.script.uses.options if facts.script is not None and not facts.script.problem else None


def _reordered(launch: Launch, moved: tuple[Option, ...]) -> str:
    """Return the command with these options, and the value behind each, moved behind the script's name."""
    words = list(launch.words)
    at = words.index(launch.script) if launch.script in words else len(words)
    front, back = words[:at], words[at:]
    texts = {option.text for option in moved}
    stays: list[str] = []
    goes: list[str] = []
    following = stays
    for word in front:
        if word.startswith("-"):
            following = goes if word.partition("=")[0] in texts else stays
        following.append(word)
    return " ".join(map(_quoted, [*launch.prefix, *stays, *back[:1], *goes, *back[1:]]))


def _quoted(word: str) -> str:
    """Quote a word for the shell; of a variable that is set, quote the value alone: a quoted name sets nothing."""
    name, equals, value = word.partition("=")
    return f"{name}={shlex.quote(value)}" if equals and name.isidentifier() else shlex.quote(word)


CHECKS = (script_missing, refused_before, taken_before, shared_options, behind)
