"""Files of a folder that ``torch.load`` refuses, or loads without a check. Pickles are read by their opcodes alone."""

from collections.abc import Iterator
from itertools import groupby

from ckptfix.diagnosis.findings.base import Severity
from ckptfix.diagnosis.findings.damaged import UnloadablePickle, UnsafePickle
from ckptfix.environment.advice import Advice, Topic
from ckptfix.environment.facts import Facts
from ckptfix.environment.facts.script_prepares import Place
from ckptfix.storage.paths import shell_path
from ckptfix.wording import list_names

UNLOADABLE = Topic(
    code=UnloadablePickle.code,
    severities=(UnloadablePickle.severity, Severity.NOTE),
    meaning=UnloadablePickle.meaning,
)
UNSAFE = Topic(code=UnsafePickle.code, severities=(UnsafePickle.severity,), meaning=UnsafePickle.meaning)
WITH_CLASSES = Topic(
    code="pickle-with-classes",
    severities=(Severity.NOTE,),
    meaning="a custom object, sampler or dataloader is pickled with its class; plain `torch.load` refuses it",
)
FORCED = Topic(
    code="weights-only-forced",
    severities=(Severity.WARNING,),
    meaning="a variable turns `weights_only` on or off for every `torch.load` of the process",
)
TRUSTING = Topic(
    code="trusting-load",
    severities=(Severity.NOTE,),
    meaning="the script calls `torch.load(weights_only=False)`: it runs whatever the file refers to",
)
TOPICS = (UNLOADABLE, UNSAFE, WITH_CLASSES, FORCED, TRUSTING)

_SINCE = (2, 6)  # torch.load's default; accelerate passes weights_only=True itself for all but custom objects
_TRUE = ("1", "y", "yes", "true")


def unloadable(facts: Facts) -> Iterator[Advice]:
    """The same line for the files of all ranks is said once."""
    if facts.folder is None:
        return
    torch = facts.software.version("torch")
    older = bool(torch) and torch < _SINCE
    found = [item for item in facts.folder.refused if isinstance(item, UnloadablePickle)]
    for advice, same in groupby(
        found, key=lambda item: item.advice_at(facts.folder.path if facts.folder else "")
    ):
        files = list(same)
        yield UNLOADABLE.advice(
            str(files[0]) if len(files) == 1 else f"{files[0]}; {len(files) - 1} more files need the same",
            severity=Severity.NOTE if older else None,
            evidence=(
                *(
                    f"{item.path}: {', '.join((*item.globals, *item.opcodes)) or 'a plain pickle'}"
                    for item in files
                ),
                f"torch {facts.software.packages['torch'].version if torch else '?'}: weights_only "
                f"{'is not the default yet' if older else 'is the default'}",
            ),
            fix=advice,
        )


def unsafe(facts: Facts) -> Iterator[Advice]:
    """Never to be allowed."""
    for item in facts.folder.refused if facts.folder is not None else ():
        if isinstance(item, UnsafePickle):
            yield UNSAFE.advice(
                str(item),
                evidence=(f"{item.path}: {', '.join(item.globals)}",),
                fix=f"do not load it; ckptfix check {shell_path(facts.folder.path if facts.folder else '')}",
            )


def with_classes(facts: Facts) -> Iterator[Advice]:
    """accelerate loads custom objects with ``weights_only=False``, so there they are run, and not refused."""
    for item in facts.folder.with_classes if facts.folder is not None else ():
        yield WITH_CLASSES.advice(
            f"{item.path} is pickled with {list_names(item.globals)}: torch.load(weights_only=True) refuses it",
            evidence=(*item.globals, "accelerate loads custom objects with weights_only=False"),
            fix=f"to load it yourself, if you trust it: {item.line}"
            if item.line
            else "load it only if you trust it",
        )


def forced(facts: Facts) -> Iterator[Advice]:
    """Read by ``torch/serialization.py`` (2.6 to 2.13); FORCE_WEIGHTS_ONLY goes before what a caller says."""
    for name, effect in (
        ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "accelerate cannot load custom objects that hold a class"),
        (
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
            "every torch.load that does not say otherwise runs what the file names",
        ),
    ):
        if facts.variables.get(name, "").lower() in _TRUE:
            yield FORCED.advice(
                f"{name}={facts.variables[name]}: {effect}",
                evidence=(f"{name}={facts.variables[name]} in the environment",),
                fix=f"unset {name}, and allow single classes: torch.serialization.add_safe_globals([...])",
            )


def trusting(facts: Facts) -> Iterator[Advice]:
    """Said with what the folder holds, where one was given."""
    places: tuple[Place, ...] = facts.script.uses.trusting_loads if facts.script is not None else ()
    if places:
        yield TRUSTING.advice(
            "torch.load(weights_only=False) runs whatever the file names",
            evidence=tuple(str(place) for place in places),
            fix="leave weights_only out; ckptfix doctor DIR prints the add_safe_globals line that the files need",
        )


CHECKS = (unloadable, unsafe, with_classes, forced, trusting)
