"""The requirements of a load, and its results: a policy for each part of a checkpoint, a report of
each object.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from msgspec import Struct
from msgspec.structs import force_setattr

from ckptfix.errors import OperationError
from ckptfix.reports import Serialized

Word = TypeVar("Word", bound=Enum)


class Part(Enum):
    """A part of a checkpoint. The value is the name of its field in ``LoadPolicy``, and the word
    used in reports.
    """

    MODELS = "models"
    OPTIMIZERS = "optimizers"
    SCHEDULERS = "schedulers"
    DATALOADERS = "dataloaders"
    SCALER = "scaler"
    RNG = "rng"
    STEP = "step"
    CUSTOM = "custom"


class Requirement(Enum):
    """REQUIRE: missing or wrong, nothing is loaded at all. WARN: then it is left as it was, with
    one UserWarning.

    IGNORE: its files are not read and its objects are left as they are. PARTIAL: for models only;
    each key that matches in name and shape is loaded, the others are listed in one UserWarning.
    Without any match nothing is loaded at all.
    """

    REQUIRE = "require"
    WARN = "warn"
    PARTIAL = "partial"
    IGNORE = "ignore"


class LoadPolicy(Struct, frozen=True, kw_only=True):
    """The strictness of a load, part by part; strings such as ``"warn"`` are taken as well.

    The defaults require what stock ``load_state`` fails without. An optimizer is loaded only when
    the weights of its models are, unless ``models`` says ignore; with ``models="partial"`` it gets
    the moments of the parameters that are loaded. ``trust``: a pickle that holds globals outside
    the allow-list is unpickled in full, which can run any code in it; a UserWarning says so. Raises
    ValueError for any other word.
    """

    models: Requirement = Requirement.REQUIRE
    optimizers: Requirement = Requirement.REQUIRE
    schedulers: Requirement = Requirement.REQUIRE
    dataloaders: Requirement = Requirement.WARN
    scaler: Requirement = Requirement.REQUIRE
    rng: Requirement = Requirement.WARN
    step: Requirement = Requirement.WARN
    custom: Requirement = Requirement.REQUIRE
    trust: bool = False

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            where = f"LoadPolicy({name}={value!r})"
            if name != "trust":
                words = [
                    one for one in Requirement if one is not Requirement.PARTIAL or name == "models"
                ]
                force_setattr(self, name, _member(words, value, where))
            elif not isinstance(value, bool):  # "False" is true
                raise ValueError(f"{where}: expected True or False")

    def requirement(self, part: Part) -> Requirement:
        """Return the requirement of a part."""
        value = getattr(self, part.value)
        assert isinstance(value, Requirement)
        return value


class Status(Enum):
    """The result of loading one component.

    RESTORED: exactly as ``Accelerator.load_state`` would. ADAPTED: restored, but names, positions
    or dtypes were mapped; the reason says which. SKIPPED: left as it was, because there is nothing
    for it or the policy says so. FAILED: left as it was, because what is there is wrong. PARTIAL:
    some of its keys or moments were loaded, the others are as they were; the report lists them.
    """

    RESTORED = "restored"
    ADAPTED = "adapted"
    PARTIAL = "partial"
    SKIPPED = "skipped"
    FAILED = "failed"


class _Plain(Serialized):
    """Base of a report and its components."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return ``as_json()``, which was called so until 0.4."""
        return self.as_json()


class Mismatch(_Plain, Struct, frozen=True, kw_only=True):
    """A tensor in both the file and the model that does not fit: another shape, or numbers of
    another kind.

    ``key``: its key in the model. ``name``: its key in the file, which may have a wrapper's prefix.
    """

    json_keys: ClassVar = "key name file_shape model_shape reason"

    key: str
    name: str
    file_shape: tuple[int, ...]
    model_shape: tuple[int, ...]
    reason: str = ""

    def __str__(self) -> str:
        shapes = f"{list(self.file_shape)} in the file, {list(self.model_shape)} in the model"
        return f"{self.key!r} ({self.reason or shapes})"


class ComponentReport(_Plain, Struct, frozen=True, kw_only=True):
    """One object of the run, or one file of the checkpoint that no object got.

    ``index``: position of the object in its registry; None for a file left aside, and for parts of
    which there is one. ``what``: the class of the object, "" where there is none. ``files``: what
    was read for it, relative to the folder. ``by_position``: several objects fitted equally, so the
    order alone decided. ``is_duplicate``: the file was left aside because it repeats another one.

    Of a partial load: ``fresh`` are keys of a model that the file lacks, or parameters whose
    moments start empty; ``unused`` are keys, or moments, that only the file has; ``mismatched`` are
    keys in both that were not loaded. ``is_told``: a UserWarning has the reason.
    """

    json_keys: ClassVar = "part index what status files by_position reason fresh unused mismatched"

    part: Part
    status: Status
    index: int | None = None
    what: str = ""
    files: tuple[str, ...] = ()
    reason: str = ""
    by_position: bool = False
    fresh: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    is_duplicate: bool = False
    is_told: bool = False

    @property
    def is_in_full(self) -> bool:
        """Return whether nothing was left over on either side."""
        return not (self.fresh or self.unused or self.mismatched)

    @property
    def name(self) -> str:
        """The name of the component in messages: ``models 0 (Net)``, ``rng``, or a file's name."""
        if self.index is None:
            return self.part.value if self.what or not self.files else ", ".join(self.files)
        return f"{self.part.value} {self.index}" + (f" ({self.what})" if self.what else "")

    def __str__(self) -> str:
        source = (
            f" from {', '.join(self.files)}"
            if self.files and self.name != ", ".join(self.files)
            else ""
        )
        position = " by position" if self.by_position else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.name} {self.status.value}{source}{position}{reason}"


class LoadReport(_Plain, Struct, frozen=True, kw_only=True):
    """The components that one process loaded. ``str()`` is one line for each component.

    ``inexact``: why the run does not continue bit for bit; empty where it does.
    """

    json_keys: ClassVar = "path complete=is_complete components inexact"

    path: Path
    components: tuple[ComponentReport, ...]
    inexact: tuple[str, ...] = ()

    def of(self, part: Part | str) -> tuple[ComponentReport, ...]:
        """Return the components of one part, for instance ``report.of("models")``."""
        wanted = _member(Part, part, f"of({part!r})")
        return tuple(component for component in self.components if component.part is wanted)

    def with_status(self, status: Status | str) -> tuple[ComponentReport, ...]:
        """Return the components that ended so, for instance ``report.with_status("skipped")``."""
        wanted = _member(Status, status, f"with_status({status!r})")
        return tuple(component for component in self.components if component.status is wanted)

    @property
    def is_complete(self) -> bool:
        """Return whether every object of the run was restored or adapted; files left aside do not
        count.
        """
        done = (Status.RESTORED, Status.ADAPTED)
        return all(
            component.status in done for component in self.components if not _is_file(component)
        )

    def __iter__(self) -> Iterator[ComponentReport]:
        return iter(self.components)

    def __repr__(self) -> str:
        counts = Counter(component.status.value for component in self.components)
        return f"<LoadReport {self.path}: {', '.join(f'{counts[one]} {one}' for one in counts)}>"

    def __str__(self) -> str:
        inexact = [f"  not bit-exact: {'; '.join(self.inexact)}"] if self.inexact else []
        return "\n".join(
            [f"{self.path}:", *(f"  {component}" for component in self.components), *inexact]
        )


class LoadError(OperationError):
    """A checkpoint could not be loaded as the policy requires.

    ``modified``: whether anything in memory is changed; False unless an object itself refused its
    state and something could not be undone. ``report``: what was found until then, None when the
    folder could not be looked at.
    """

    def __init__(
        self, message: str, *, report: LoadReport | None = None, modified: bool = False
    ) -> None:
        super().__init__(message)
        self.report = report
        self.modified = modified


def _member(words: Iterable[Word], given: object, where: str) -> Word:
    """Return the member that is given, by itself or by its value. Raises ValueError, which lists
    the values.
    """
    known = list(words)
    for word in known:
        if given is word or given == word.value:
            return word
    *others, last = (repr(word.value) for word in known)
    raise ValueError(f"{where}: expected {', '.join(others)} or {last}")


def _is_file(component: ComponentReport) -> bool:
    return component.index is None and not component.what and bool(component.files)
