"""Findings about optimizers that do not agree with themselves, or with the weights of the checkpoint."""

from ckptfix.dataclass import dataclass
from ckptfix.diagnosis.findings.base import Action, Finding, Severity
from ckptfix.wording import count_of, list_names

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InconsistentGroups(Finding):
    """Param groups that no optimizer of torch can have. ``shared``: parameters that two of them have.

    ``unlisted``: parameters with moments that none of them has.
    """

    code = "inconsistent-groups"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "two param groups of an optimizer have the same parameter, or moments belong to a parameter that no param "
        "group has"
    )

    shared: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = []
        if self.shared:
            said.append(f"two param groups have {_parameters(self.shared)}")
        if self.unlisted:
            said.append(f"it has moments of {_parameters(self.unlisted)}, which no param group has")
        return f"{self.path}: {'; '.join(said)}"

    @property
    def advice(self) -> str:
        """Advice to use another file: a load gives moments to other parameters, or drops them."""
        return (
            "torch saves no such optimizer, and a load gives moments to the wrong parameters: copy the file again from "
            "where it came, or resume from an older checkpoint"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchedMoments(Finding):
    """Moments of another shape than their parameter. ``shape``, ``expected``: those of the first parameter."""

    code = "mismatched-moments"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = "moments of an optimizer have another shape than the weights of their parameter: they are of another run"

    parameters: tuple[str, ...]
    shape: Shape
    expected: Shape

    def __str__(self) -> str:
        more = len(self.parameters) - 1
        others = f"; {count_of(more, 'parameter')} more" if more else ""
        return (
            f"{self.path}: the moments of {self.parameters[0]!r} have shape {list(self.shape)} (expected "
            f"{list(self.expected)}, as its weights have{others})"
        )

    @property
    def advice(self) -> str:
        """Advice to bring files of one save together."""
        return (
            "the load or the next optimizer step fails: copy model and optimizer of one save again, or resume without "
            "this optimizer"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsavedParameters(Finding):
    """Parameters of an optimizer without weights in the checkpoint.

    ``names``: of them; ``shapes``: of the moments, where the parameters are numbered and no weights have such a shape.
    ``parameters`` and ``tensors``: their numbers in the optimizer and in the checkpoint.
    """

    code = "unsaved-parameters"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = "an optimizer has parameters for which the checkpoint has no weights"

    parameters: int
    tensors: int
    names: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()

    def __str__(self) -> str:
        if self.names:
            many = f"{len(self.names)} of {count_of(self.parameters, 'parameter')}"
            have = "has" if len(self.names) == 1 else "have"
            return f"{self.path}: {many} {have} no weights in the checkpoint: {list_names(self.names)}"
        if self.shapes:
            shapes = ", ".join(str(list(shape)) for shape in self.shapes[:3])
            more = f" and {len(self.shapes) - 3} more" if len(self.shapes) > 3 else ""
            return f"{self.path}: it has moments of shape {shapes}{more}, and no weights in the checkpoint have it"
        have = count_of(self.tensors, "tensor")
        return f"{self.path}: it has {count_of(self.parameters, 'parameter')}, and the checkpoint {have} of weights"

    @property
    def advice(self) -> str:
        """Advice to save the module that is left out, or to find its weights."""
        return (
            "after a load these parameters go on with new weights and old moments: prepare() the module that has them, "
            "or copy all files of the save again; where their weights are kept elsewhere, all is well"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingMoments(Finding):
    """Parameters without moments, of an optimizer that has moments of others. ``parameters``: the number of all."""

    code = "missing-moments"
    severity = Severity.NOTE
    action = Action.TELL
    meaning = "some parameters of an optimizer have no moments: they never got a gradient, or their moments are lost"

    names: tuple[str, ...]
    parameters: int

    def __str__(self) -> str:
        many = f"{len(self.names)} of {count_of(self.parameters, 'parameter')}"
        have = "has" if len(self.names) == 1 else "have"
        return f"{self.path}: {many} {have} no moments: {_listed(self.names)}"

    @property
    def advice(self) -> str:
        """Advice about both reasons: the file does not tell them apart."""
        return "frozen and unused parameters have none; where these were trained, resume from an older checkpoint"


def _parameters(names: tuple[str, ...]) -> str:
    return f"{'parameter' if len(names) == 1 else 'parameters'} {_listed(names)}"


def _listed(names: tuple[str, ...]) -> str:
    """Return names in short, numbers without quotes."""
    if all(map(str.isdecimal, names)):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more
    return list_names(names)
