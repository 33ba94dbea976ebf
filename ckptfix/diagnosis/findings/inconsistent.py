"""Findings about optimizers and schedulers that disagree with themselves or with the weights."""

from math import prod

from ckptfix.diagnosis.findings.base import Action, Finding, Resume, Severity
from ckptfix.wording import count_of, first_few, list_names

Shape = tuple[int, ...]


class OptimizerFinding(Finding, frozen=True, kw_only=True):
    """Base of findings about an optimizer. ``key``: the keys that lead to it in a file that holds
    more, else "".
    """

    key: str = ""

    @property
    def place(self) -> str:
        """The file or folder of the optimizer, and its key in a file that holds more."""
        return f"{self.path}: {self.key}" if self.key else str(self.path)


class InconsistentGroups(OptimizerFinding, frozen=True, kw_only=True):
    """Base of findings about param groups: their options, or the learning rates of a scheduler."""

    code = "inconsistent-groups"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "a param group of an optimizer lacks an option that the next step reads, or a scheduler "
        "has learning rates for a different number of param groups"
    )


class LackingGroups(InconsistentGroups, frozen=True, kw_only=True):
    """Param groups without usable ``options`` that torch's optimizer reads, or with one that is NaN
    or infinite: an error. ``groups``: their positions.
    """

    severity = Severity.ERROR
    # Only the options of the run would do.
    advice = (
        "the load succeeds, but the first optimizer step fails or makes every weight NaN: "
        "copy the file again from its source, or resume from an older checkpoint"
    )

    groups: tuple[int, ...]
    options: tuple[str, ...]

    def __str__(self) -> str:
        groups = "param group" if len(self.groups) == 1 else "param groups"
        have = "has" if len(self.groups) == 1 else "have"
        numbers = _listed(tuple(map(str, self.groups)))
        return f"{self.place}: {groups} {numbers} {have} no usable {list_names(self.options)}"


class MismatchedRates(InconsistentGroups, frozen=True, kw_only=True):
    """A scheduler with another number of base learning rates than the ``optimizer`` has param
    groups.
    """

    # But every save of a script may have a MultiplicativeLR.
    resume = Resume.FAILS_IF_NEW
    advice = (
        "the load or the next scheduler.step() fails, unless this is a MultiplicativeLR: "
        "copy optimizer and scheduler again from one save. If the script adds a param group "
        "after it creates the scheduler, swap the two lines"
    )

    rates: int
    optimizer: str
    param_groups: int

    def __str__(self) -> str:
        return (
            f"{self.path}: {count_of(self.rates, 'base learning rate')} (expected "
            f"{self.param_groups}, one for each param group of {self.optimizer})"
        )


class UnusableRates(InconsistentGroups, frozen=True, kw_only=True):
    """A scheduler whose base learning rates are None, text or not finite: an error."""

    severity = Severity.ERROR
    # Only the rates of the run would do.
    advice = (
        "the load succeeds, but the next scheduler.step() fails or makes the learning rate "
        "NaN: copy the file again from its source, or resume from an older checkpoint"
    )

    def __str__(self) -> str:
        return f"{self.path}: 'base_lrs' has no usable learning rate for a param group"


class MismatchedMoments(OptimizerFinding, frozen=True, kw_only=True):
    """Moments of another shape than their parameter. ``shape``, ``expected``: those of the first
    parameter.
    """

    code = "mismatched-moments"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "the moments of a parameter and its weights have different shapes: they come from "
        "different runs"
    )

    # torch takes moments of one shape with their parameter, but a class of the script may not.
    resume = Resume.FAILS_IF_NEW
    advice = (
        "the load or the next optimizer step fails: copy model and optimizer again from one "
        "save, or resume without this optimizer"
    )

    parameters: tuple[str, ...]
    shape: Shape
    expected: Shape

    def __str__(self) -> str:
        more = len(self.parameters) - 1
        others = f"; {count_of(more, 'more parameter')}" if more else ""
        return (
            f"{self.place}: the moments of {self.parameters[0]!r} have shape {list(self.shape)} "
            f"(expected {list(self.expected)}, the shape of its weights{others})"
        )


class UnsavedParameters(OptimizerFinding, frozen=True, kw_only=True):
    """Parameters of an optimizer without weights in the checkpoint.

    ``names``: of them. ``shapes``: those of moments that no weights have, where names decide
    nothing. ``parameters`` and ``tensors``: the numbers of parameters in the optimizer, and of
    tensors in the checkpoint. ``moments`` and ``weights``: all shapes of either. ``is_foreign``:
    some of the weights have no moments of their shape, so that the optimizer is likelier to belong
    to another model than to one module more. ``surplus``: shapes of which more parameters have
    moments than there are weights, with both numbers. ``is_of_trainer``: the Trainer loads it, and
    not ``load_state``. ``empty``: the file of the only model, if it has no tensor.
    """

    code = "unsaved-parameters"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "an optimizer has parameters for which the checkpoint has no weights: it belongs to "
        "another run, or a module was not saved"
    )

    parameters: int
    tensors: int
    names: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    moments: tuple[Shape, ...] = ()
    weights: tuple[Shape, ...] = ()
    is_foreign: bool = False
    surplus: tuple[tuple[Shape, int, int], ...] = ()
    is_of_trainer: bool = False
    empty: str = ""

    @property
    def resume(self) -> Resume:
        """It fails, but a script may train a module that it saves elsewhere.

        Where all weights are empty, and the optimizer has moments, the model of the script has
        parameters.
        """
        return Resume.FAILS if self.tensors == 0 and not self.is_bare else Resume.FAILS_IF_NEW

    def __str__(self) -> str:
        parameters, tensors = (
            count_of(self.parameters, "parameter"),
            count_of(self.tensors, "weight tensor"),
        )
        if self.empty:
            return f"{self.place}: {parameters}, but {self.empty} has no tensors"
        if self.surplus:
            shape, moments, weights = self.surplus[0]
            more = (
                f"; {count_of(len(self.surplus) - 1, 'more shape')}"
                if len(self.surplus) > 1
                else ""
            )
            return (
                f"{self.place}: {count_of(moments, 'parameter')} with moments of shape "
                f"{list(shape)} (expected at most {weights}, the number of weights with that "
                f"shape{more})"
            )
        if self.is_foreign:
            expected, present = (
                f"{tensors}{_of_shapes(self.weights)}",
                f"{parameters}{_of_shapes(self.moments)}",
            )
            return (
                f"{self.place}: does not match the weights (expected parameters for {expected}; "
                f"found {present})"
            )
        if self.names:
            have = "has" if len(self.names) == 1 else "have"
            lost = f"{len(self.names)} of {parameters} {have} no weights in the checkpoint"
            return f"{self.place}: {lost}: {list_names(self.names)}"
        if self.shapes:
            return (
                f"{self.place}: moments{_of_shapes(self.shapes)}, which no weights have "
                f"({parameters} in the optimizer, {tensors})"
            )
        return f"{self.place}: {parameters}, but the checkpoint has {tensors}"

    @property
    def is_bare(self) -> bool:
        """Return whether the parameters without weights are single numbers, as a bare
        ``nn.Parameter`` often is.
        """
        shapes = self.shapes or self.moments
        return bool(shapes) and not self.names and all(prod(shape) == 1 for shape in shapes)

    @property
    def advice(self) -> str:
        """Advice for both explanations, the likelier one first."""
        other_run = "copy all files again from one save"
        if self.is_of_trainer:
            return (
                "the resume or the next optimizer step fails, or weights silently start from "
                f"scratch: {other_run}, or resume from another checkpoint. If the script passes "
                "extra parameters to the optimizer that are not in the model, and saves them "
                "itself, ignore this"
            )
        if self.is_bare:
            return (
                "this may be a bare nn.Parameter, such as SAC's log_alpha. It belongs to no "
                "model, so save_state does not save its value, and a load restores only its "
                "moments. Put it into a module, and pass the module to prepare() or to "
                "accelerator.register_for_checkpointing(). If instead the file belongs to "
                f"another run, {other_run}"
            )
        module = "pass that module to prepare(). If its weights are kept elsewhere, ignore this"
        if self.empty:
            return (
                f"the weights are lost, and load_state fails: copy {self.empty} again, or resume "
                "from another checkpoint. If that model has no parameters (a loss, for example), "
                f"the optimizer trains a module that was not prepared: {module}"
            )
        if self.may_be_tied:
            return (
                "nothing is lost if the parameters share their memory, as after head.weight.data "
                "= emb.weight.data: safetensors stores shared memory once. In that case write "
                "head.weight = emb.weight, or ignore this. Otherwise the optimizer trains a "
                f"module that was not prepared, and a load leaves its weights random: {module}. "
                f"If instead the file belongs to another run, {other_run}"
            )
        if not self.is_foreign and not self.surplus:
            return (
                "the optimizer may train a module that was not prepared; a load restores its "
                f"moments but leaves its weights random: {module}. If instead the file belongs "
                f"to another run, {other_run}"
            )
        if self.surplus or self.parameters == self.tensors:
            fails = "the first optimizer step after the load then fails"
        elif self.parameters > self.tensors:
            fails = "load_state then fails with a ValueError"
        else:
            # Buffers and frozen weights are tensors, too: the numbers of parameters may agree.
            fails = "load_state or the next optimizer step then fails"
        return (
            f"the optimizer may belong to another run, and {fails}: {other_run}. If instead it "
            f"trains a module that was not prepared, {module}"
        )

    @property
    def may_be_tied(self) -> bool:
        """Return whether the parameters without weights may share their memory with others, which
        have weights.
        """
        return self.parameters > self.tensors and not (
            self.names or self.shapes or self.is_foreign or self.is_of_trainer
        )


class UnsavedFrozen(UnsavedParameters, frozen=True, kw_only=True):
    """More parameters than weights, of which so many have no moments that each of the others has
    weights: a note.
    """

    severity = Severity.NOTE
    # The files do not tell them apart.
    advice = (
        "if the model's state_dict() leaves out a frozen part, such as the network of a "
        "loss, ignore this. Otherwise copy all files again from one save"
    )

    without_moments: int

    def __str__(self) -> str:
        return (
            f"{self.place}: {count_of(self.parameters, 'parameter')}, {self.without_moments} of "
            "them without moments, but the checkpoint has "
            f"{count_of(self.tensors, 'weight tensor')}"
        )


def _of_shapes(shapes: tuple[Shape, ...]) -> str:
    """Return at most three shapes in words, each once."""
    if not shapes:
        return ""
    noun = "shape" if len(shapes) == 1 else "shapes"
    return f" of {noun} {first_few(list(map(list, shapes)))}"


class MissingMoments(OptimizerFinding, frozen=True, kw_only=True):
    """Parameters without moments, of an optimizer that has moments of others. ``parameters``: the
    number of all.
    """

    code = "missing-moments"
    severity = Severity.NOTE
    action = Action.TELL
    meaning = (
        "some parameters of an optimizer have no moments: they never received a gradient, or "
        "their moments are lost"
    )

    names: tuple[str, ...]
    parameters: int

    def __str__(self) -> str:
        return self._without("moments")

    def _without(self, what: str) -> str:
        many = f"{len(self.names)} of {count_of(self.parameters, 'parameter')}"
        have = "has" if len(self.names) == 1 else "have"
        return f"{self.place}: {many} {have} no {what} ({_parameters(self.names)})"

    @property
    def advice(self) -> str:
        """Advice about both reasons: the file does not tell them apart."""
        return (
            "frozen and unused parameters have none; if these were trained, resume from an older "
            "checkpoint"
        )


class LackingMoments(MissingMoments, frozen=True, kw_only=True):
    """Parameters with some of the ``states`` that torch's optimizer needs, which others of it have:
    an error.
    """

    severity = Severity.ERROR
    # A step cannot begin one of several states anew.
    advice = (
        "the load or the first optimizer step fails: copy the file again from its source, "
        "or resume from an older checkpoint"
    )

    states: tuple[str, ...]

    def __str__(self) -> str:
        return self._without(f"usable {list_names(self.states)}")


class AbsentMoments(LackingMoments, frozen=True):
    """Parameters without ``states`` that torch's optimizer needs and no parameter has: a subclass
    may need none.
    """

    severity = Severity.WARNING
    # But a class of the script may need none.
    resume = Resume.FAILS_IF_NEW
    advice = (
        "the load or the first step of torch's optimizer fails: copy the file again from "
        "its source, or resume from an older checkpoint. If your own optimizer class "
        "keeps other states, ignore this"
    )


class EmptyOptimizer(MissingMoments, frozen=True, kw_only=True):
    """An optimizer without moments in a run that seems to have made steps. ``evidence``: of them,
    in words.
    """

    evidence: str
    is_in_dcp: bool = False

    def __str__(self) -> str:
        return (
            f"{self.place}: none of {count_of(self.parameters, 'parameter')} has moments, but "
            f"{self.evidence}"
        )

    @property
    def advice(self) -> str:
        """Advice to use another file, and the explanations of a script."""
        return (
            "the load succeeds, but the moments start at zero: resume from another checkpoint. "
            "If the optimizer has not taken a step yet (fp16 may have skipped all of them), ignore "
            "this"
        )


class LostMoments(EmptyOptimizer, frozen=True):
    """An optimizer without moments that surely made steps, unless the script began another one."""

    severity = Severity.WARNING
    # A run would continue with moments of zero.
    resume = Resume.FAILS

    @property
    def advice(self) -> str:
        """Advice to use another file, and the explanation of a script."""
        effect = "the load succeeds, but the moments start at zero"
        if self.is_in_dcp:
            # dcp.load into the state of get_state_dict() asks for every moment, and into an empty
            # one for none.
            effect = "dcp.load fails, or the moments start at zero"
        return (
            f"{effect}: copy the file again from its source, or resume from another "
            "checkpoint. If the script created a new optimizer just before this save, ignore this"
        )


class RoundedSteps(OptimizerFinding, frozen=True, kw_only=True):
    """Steps in a ``dtype`` that counts to ``last`` alone, and that got there.

    ``parameters``: the number of those with such a step. ``steps``: the largest. ``effect``: of a
    load.
    """

    code = "rounded-steps"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "an optimizer stores its `step` in bf16 or fp16, which cannot count past 256 or 2,048: "
        "after a load, its updates have the wrong size. The finding is a note while the count "
        "still increases"
    )
    advice = (
        "the save converted the steps along with the moments: save the optimizer without "
        "converting it. To fix this checkpoint, load the file with torch, set each "
        'state["step"] = torch.tensor(float(STEP)), and save it again'
    )

    parameters: int
    dtype: str
    steps: int
    last: int
    effect: str

    def __str__(self) -> str:
        return (
            f"{self.place}: 'step' of {count_of(self.parameters, 'parameter')} is {self.steps} "
            f"in {self.dtype}, which cannot count past {self.last} (expected F32); {self.effect}"
        )


class RoundedStepsSoFar(RoundedSteps, frozen=True):
    """The same below the last number, or where a load or the optimizer itself leaves no effect of
    it.
    """

    severity = Severity.NOTE


class DeadScaler(Finding, frozen=True, kw_only=True):
    """A gradient scaler whose scale is useless, or will be. ``name``: of the ``value``."""

    code = "dead-scaler"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "the scale in `scaler.pt` is 0, NaN or infinite, or a factor will make it so: an fp16 "
        "run resumes without an error, then skips every step or makes its weights NaN"
    )
    # ``load_state`` fails without one.
    advice = (
        "the load reports no error: copy the file from an older checkpoint, or write a new "
        'one: torch.save(torch.amp.GradScaler("cpu").state_dict(), "scaler.pt"). If '
        "gradients were NaN or infinite, the weights may be, too"
    )

    name: str
    value: float

    def __str__(self) -> str:
        when = _CHANGES_OF_SCALE.get(self.name, "in an fp16 run")
        effect = (
            "the next step makes the weights NaN" if self.value == 0 else "every step is skipped"
        )
        return (
            f"{self.path}: {self.name!r} is {self.value!r} (expected a finite number above 0); "
            f"{when}, {effect}"
        )


_CHANGES_OF_SCALE = {
    "backoff_factor": "after the first overflow",
    "growth_factor": "once the scale grows",
}
"""Moments at which ``GradScaler`` multiplies its scale by a factor."""


def _parameters(names: tuple[str, ...]) -> str:
    return f"{'parameter' if len(names) == 1 else 'parameters'} {_listed(names)}"


def _listed(names: tuple[str, ...]) -> str:
    """Return names in short, numbers without quotes."""
    if all(map(str.isdecimal, names)):
        return first_few(names)
    return list_names(names)
