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

    ``names``: of them. ``shapes``: those of moments that no weights have, where names decide nothing.
    ``parameters`` and ``tensors``: the numbers of parameters in the optimizer, and of tensors in the checkpoint.
    ``moments`` and ``weights``: all shapes of either. ``is_foreign``: some of the weights have no moments of their
    shape, so that the optimizer is likelier to belong to another model than to one module more.
    """

    code = "unsaved-parameters"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "an optimizer has parameters for which the checkpoint has no weights: it belongs to another run, or a module "
        "was not saved"
    )

    parameters: int
    tensors: int
    names: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    moments: tuple[Shape, ...] = ()
    weights: tuple[Shape, ...] = ()
    is_foreign: bool = False

    def __str__(self) -> str:
        parameters, tensors = count_of(self.parameters, "parameter"), count_of(self.tensors, "tensor")
        if self.is_foreign:
            expected, present = (
                f"{tensors}{_of_shapes(self.weights)}",
                f"{parameters}{_of_shapes(self.moments)}",
            )
            return f"{self.path}: does not fit the weights (expected the parameters of {expected}; found {present})"
        if self.names:
            have = "has" if len(self.names) == 1 else "have"
            lost = f"{len(self.names)} of {parameters} {have} no weights in the checkpoint"
            return f"{self.path}: {lost}: {list_names(self.names)}"
        if self.shapes:
            return (
                f"{self.path}: it has moments{_of_shapes(self.shapes)}, and no weights have such a shape ({parameters} "
                f"in the optimizer, {tensors} of weights)"
            )
        return f"{self.path}: it has {parameters}, and the checkpoint has {tensors} of weights"

    @property
    def advice(self) -> str:
        """Advice for both explanations, the likelier one first."""
        other_run = "copy all files of one save again"
        module = "pass that module to prepare(). Where its weights are kept elsewhere, ignore this"
        if not self.is_foreign:
            return (
                "the optimizer may have a module that was not prepared; a load leaves its weights random and its "
                f"moments old: {module}. If the file belongs to another run instead, {other_run}"
            )
        fails = "load_state then fails with a ValueError"
        if self.parameters == self.tensors:
            fails = "the first optimizer step after the load then fails"
        return (
            f"it may belong to another run, and {fails}: {other_run}. If the optimizer has a module that was not "
            f"prepared instead, {module}"
        )


def _of_shapes(shapes: tuple[Shape, ...]) -> str:
    """Return at most three shapes in words, each once."""
    if not shapes:
        return ""
    more = f" and {len(shapes) - 3} more" if len(shapes) > 3 else ""
    noun = "shape" if len(shapes) == 1 else "shapes"
    return f" of {noun} {', '.join(str(list(shape)) for shape in shapes[:3])}{more}"


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
