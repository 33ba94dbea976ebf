"""Problems of a training script, and of the command that starts it. Their text is read, nothing is
executed.

An option before the script's name belongs to the launcher, one after it to the script.
"""

import difflib
import shlex
from collections import defaultdict
from collections.abc import Iterator

from ckptfix.diagnosis.findings.base import Severity
from ckptfix.environment.advice import Advice, Topic
from ckptfix.environment.facts import Facts
from ckptfix.environment.facts.launch import Launch, Option
from ckptfix.environment.facts.script_prepares import Prepared, SourceLine, Uses
from ckptfix.storage.paths import shell_path

NO_PYTHON = Topic(
    code="script-not-python",
    severities=(Severity.ERROR,),
    meaning="the script, or a cell of the notebook, is not Python that this version can read",
)
UNKNOWN_NAME = Topic(
    code="unknown-accelerate-name",
    severities=(Severity.ERROR,),
    meaning="the script imports a name that accelerate does not have (`PartialSate`): ImportError",
)
MADE_EARLY = Topic(
    code="accelerator-before-notebook-launcher",
    severities=(Severity.ERROR,),
    meaning="an Accelerator is made at module level before `notebook_launcher`: ValueError",
)
TOUCHED_EARLY = Topic(
    code="device-before-notebook-launcher",
    severities=(Severity.WARNING,),
    meaning=(
        "a device is used at module level before `notebook_launcher`: processes cannot be forked "
        "afterwards"
    ),
)
PLAIN_BACKWARD = Topic(
    code="plain-backward",
    severities=(Severity.WARNING,),
    meaning=(
        "`loss.backward()` instead of `accelerator.backward(loss)`: gradients are neither scaled "
        "nor divided"
    ),
)
DEEPSPEED_MODELS = Topic(
    code="deepspeed-several-models",
    severities=(Severity.WARNING,),
    meaning=(
        "several models or optimizers for one Accelerator under DeepSpeed, which takes one of each"
    ),
)
MAP_IN_TRAINING = Topic(
    code="device-map-in-training",
    severities=(Severity.WARNING,),
    meaning=(
        "a model is loaded with `device_map` and prepared for training: refused in more than one "
        "process"
    ),
)
SKIP_KEYS = Topic(
    code="skip-keys-given",
    severities=(Severity.NOTE,),
    meaning="`skip_keys` leaves the arguments with these names on the device where they are",
)
PREPARED_TWICE = Topic(
    code="prepared-twice",
    severities=(Severity.WARNING, Severity.NOTE),
    meaning=(
        "the script gives a model to `prepare()` twice: in several processes `save_state` writes "
        "it twice"
    ),
)
WRAPPED_EARLY = Topic(
    code="wrapped-before-prepare",
    severities=(Severity.WARNING,),
    meaning=(
        "a model is wrapped in DDP or DataParallel before `prepare()`, which wraps it again: keys "
        "get `module.`"
    ),
)
BEFORE = Topic(
    code="flags-before-script",
    severities=(Severity.ERROR, Severity.WARNING, Severity.NOTE),
    meaning="options before the script's name are taken, or refused, by `accelerate launch`",
)
BEHIND = Topic(
    code="launch-flags-behind-script",
    severities=(Severity.WARNING,),
    meaning=(
        "options of `accelerate launch` after the script's name go to the script, and have no "
        "effect"
    ),
)
MISSING = Topic(
    code="script-missing",
    severities=(Severity.ERROR,),
    meaning="the command starts a script that does not exist",
)
TOPICS = (
    PREPARED_TWICE,
    WRAPPED_EARLY,
    NO_PYTHON,
    UNKNOWN_NAME,
    MADE_EARLY,
    TOUCHED_EARLY,
    PLAIN_BACKWARD,
    DEEPSPEED_MODELS,
    MAP_IN_TRAINING,
    SKIP_KEYS,
    BEFORE,
    BEHIND,
    MISSING,
)


def not_python(facts: Facts) -> Iterator[Advice]:
    """Python would end with it before the first line runs."""
    if facts.script is not None and facts.script.problem:
        path = shell_path(facts.script.path)
        # py_compile takes the JSON of a notebook for Python, and finds no fault in it.
        is_notebook = facts.script.path.endswith(".ipynb")
        yield NO_PYTHON.advice(
            f"{facts.script.path} cannot be read as Python: {facts.script.problem}",
            evidence=(facts.script.problem,),
            fix=(
                f"open {path} in Jupyter and correct it"
                if is_notebook
                else f"python -m py_compile {path}"
            ),
        )


def unknown_name(facts: Facts) -> Iterator[Advice]:
    """Compared with the names of the installed accelerate."""
    source = facts.software.accelerate
    places: dict[str, list[SourceLine]] = defaultdict(list)
    for name, place in _uses(facts).taken:
        if (missing := source.missing(name)) and place not in places[missing]:
            places[missing].append(place)
    for name, where in places.items():
        parent, _, last = name.rpartition(".")
        near = difflib.get_close_matches(last, sorted(source.known_beside(name)), n=1, cutoff=0.7)
        instead = f"; did you mean {near[0]}?" if near else ""
        owner = f"accelerate.{parent}" if parent else "accelerate"
        yield UNKNOWN_NAME.advice(
            f"{owner} has no {last}{instead}",
            evidence=_shown(where),
            fix=(
                f"write {near[0]}"
                if near
                else f"look for its new place: python -c 'import {owner}; help({owner})'"
            ),
        )


def made_early(facts: Facts) -> Iterator[Advice]:
    """``notebook_launcher`` refuses when an Accelerator's state is there already
    (``accelerate/launchers.py``).
    """
    early = _before_launch(facts, _uses(facts).made_early)
    if early:
        yield MADE_EARLY.advice(
            "an Accelerator is made before notebook_launcher starts its processes: ValueError",
            evidence=_shown(early),
            fix=(
                "make the Accelerator inside the function that is launched, then restart the "
                "notebook"
            ),
        )


def touched_early(facts: Facts) -> Iterator[Advice]:
    """A process that has used CUDA cannot be forked and use it again."""
    early = _before_launch(facts, _uses(facts).touched_early)
    if early:
        yield TOUCHED_EARLY.advice(
            "a device is used before notebook_launcher forks: Cannot re-initialize CUDA in forked "
            "subprocess",
            evidence=_shown(early),
            fix="move it into the function that is launched, then restart the notebook",
        )


def plain_backward(facts: Facts) -> Iterator[Advice]:
    """Yield advice for scripts that make an Accelerator."""
    uses = _uses(facts)
    if uses.accelerators and uses.backwards:
        yield PLAIN_BACKWARD.advice(
            "loss.backward() instead of accelerator.backward(loss): with accumulation gradients "
            "are too large, with fp16 the updates vanish; nothing is raised",
            evidence=_shown(uses.backwards),
            fix="accelerator.backward(loss); at run time: ckptfix run SCRIPT warns of it",
        )


def prepared_twice(facts: Facts) -> Iterator[Advice]:
    """The damage that ``ckptfix repair`` mends, before it is done. ckptfix's own Accelerator does
    not do it.
    """
    uses = _uses(facts)
    if not uses.twice:
        return
    names = ", ".join(dict.fromkeys(one.name for one in uses.twice))
    guard = "the Accelerator of ckptfix returns the model of the first call"
    yield PREPARED_TWICE.advice(
        f"{names} is given to prepare() twice: "
        + (guard if facts.is_guarded else "in several processes save_state writes it twice"),
        severity=Severity.NOTE if facts.is_guarded else Severity.WARNING,
        evidence=_shown(
            [place for one in uses.twice for place in dict.fromkeys((one.first, one.second))]
        ),
        fix=(
            "call prepare() once for each model and keep what it returns; or start it with: "
            "ckptfix run SCRIPT"
        ),
    )


def wrapped_early(facts: Facts) -> Iterator[Advice]:
    """``prepare`` does not look whether a model is wrapped already."""
    found = _uses(facts).wrapped
    if found:
        names = ", ".join(dict.fromkeys(one.name for one in found))
        yield WRAPPED_EARLY.advice(
            f"{names} is wrapped before prepare(), which wraps it again: the keys that save_state "
            "writes begin with 'module.', and another script does not load them",
            evidence=_shown([place for one in found for place in (one.wrapped, one.prepared)]),
            fix="give prepare() the bare model: it wraps it in DDP by itself",
        )


def deepspeed_models(facts: Facts) -> Iterator[Advice]:
    """``Accelerator.prepare`` raises AssertionError for two models in one call; of optimizers it
    keeps the last.

    Of models in several calls ``accelerator.backward`` uses the first one only. That is meant where
    the script chooses a plugin for each (``select_deepspeed_plugin``).
    """
    uses, reasons = _uses(facts), _deepspeed(facts)
    if not reasons:
        return
    calls: list[tuple[Prepared, ...]] = [(call,) for call in uses.prepared]
    if not uses.plugin_choices:
        names = dict.fromkeys(call.accelerator for call in uses.prepared)
        calls = [
            tuple(call for call in uses.prepared if call.accelerator == name) for name in names
        ]
    for same in calls:
        models = dict.fromkeys(name for call in same for name in call.models)
        optimizers = dict.fromkeys(name for call in same for name in call.optimizers)
        several = [", ".join(names) for names in (models, optimizers) if len(names) > 1]
        if several:
            yield DEEPSPEED_MODELS.advice(
                f"{same[0].accelerator}.prepare is given {' and '.join(several)} under DeepSpeed, "
                "which takes one model and one optimizer for each Accelerator",
                evidence=(*_shown([call.place for call in same]), *reasons),
                fix=(
                    "one Accelerator with its own DeepSpeedPlugin for each model (accelerate's "
                    "guide: Using multiple models with DeepSpeed)"
                ),
            )


def map_in_training(facts: Facts) -> Iterator[Advice]:
    """``Accelerator.prepare`` raises ValueError on such a model in any distributed mode."""
    uses = _uses(facts)
    if uses.device_maps and uses.prepared:
        yield MAP_IN_TRAINING.advice(
            "a model is loaded with device_map, and models are prepared for training: ValueError "
            "in several processes",
            evidence=_shown([*uses.device_maps, *(call.place for call in uses.prepared)]),
            fix=(
                "load it without device_map, or start one process: accelerate launch "
                "--num_processes 1 SCRIPT"
            ),
        )


def skip_keys(facts: Facts) -> Iterator[Advice]:
    """accelerate documents a string or a list; transformers passes a set, which works for lookups
    alone.
    """
    uses = _uses(facts)
    if uses.skip_keys:
        yield SKIP_KEYS.advice(
            "skip_keys is given: arguments of these names are not moved between devices, at any "
            "depth",
            evidence=_shown(uses.skip_keys),
            fix="name only what the model moves itself (a key-value cache), as a list",
        )


def _uses(facts: Facts) -> Uses:
    return facts.script.uses if facts.script is not None else Uses()


def _before_launch(facts: Facts, places: tuple[SourceLine, ...]) -> tuple[SourceLine, ...]:
    """Return the places that come before the last launch, and that launch; () when none does."""
    last = max(_uses(facts).launches, key=lambda place: place.order, default=None)
    if last is None:
        return ()
    before = tuple(place for place in places if place.order < last.order)
    return (*before, last) if before else ()


def _deepspeed(facts: Facts) -> tuple[str, ...]:
    """Return the reasons to believe that DeepSpeed is on, () without one."""
    reasons = [str(place) for place in _uses(facts).deepspeed]
    if facts.config.exists and facts.config.distributed_type == "DEEPSPEED":
        reasons.append(f"{facts.config.path}: distributed_type: DEEPSPEED")
    if facts.launch is not None and facts.launch.given("use_deepspeed") is not None:
        reasons.append("accelerate launch --use_deepspeed")
    if facts.variables.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("1", "true", "yes"):
        reasons.append("ACCELERATE_USE_DEEPSPEED is set")
    return tuple(reasons)


def _shown(places: "list[SourceLine] | tuple[SourceLine, ...]") -> tuple[str, ...]:
    return tuple(str(place) for place in places)


def script_missing(facts: Facts) -> Iterator[Advice]:
    """Python ends with status 2, in every process."""
    if facts.launch is not None and facts.missing_script:
        yield MISSING.advice(
            f'{facts.missing_script} does not exist: the command ends with "can\'t open file"',
            evidence=(
                " ".join(facts.launch.words),
                "a relative name is looked for in the current folder",
            ),
            fix="correct the name, or change to the folder of the script first",
        )


def refused_before(facts: Facts) -> Iterator[Advice]:
    """``accelerate launch`` ends with "unrecognized arguments"."""
    launch = facts.launch
    if launch is not None and launch.unknown:
        names = ", ".join(option.text for option in launch.unknown)
        yield BEFORE.advice(
            f"{names} is before the script's name, and accelerate launch has no such option: it "
            "refuses",
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
            f"{names} is before the script's name: accelerate launch takes it, the script never "
            "sees it",
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
            f"the script and accelerate launch both have {names}: before the script's name it is "
            "accelerate's",
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
            f"{names} is after the script's name: it goes to the script, and accelerate launch "
            "does not see it",
            evidence=(" ".join(launch.words), "the script defines no such option"),
            fix=f"put it before: accelerate launch {names} ... {launch.script}",
        )


def _own_options(facts: Facts) -> frozenset[str] | None:
    """Return the script's own options, None when they are not known."""
    return (
        facts.script.uses.options if facts.script is not None and not facts.script.problem else None
    )


def _reordered(launch: Launch, moved: tuple[Option, ...]) -> str:
    """Return the command with these options, and the value behind each, moved behind the script's
    name.
    """
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
    """Quote a word for the shell; of a variable that is set, quote the value alone: a quoted name
    sets nothing.
    """
    name, equals, value = word.partition("=")
    return f"{name}={shlex.quote(value)}" if equals and name.isidentifier() else shlex.quote(word)


CHECKS = (
    prepared_twice,
    wrapped_early,
    not_python,
    unknown_name,
    made_early,
    touched_early,
    plain_backward,
    deepspeed_models,
    map_in_training,
    skip_keys,
    script_missing,
    refused_before,
    taken_before,
    shared_options,
    behind,
)
