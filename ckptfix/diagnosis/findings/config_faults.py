"""Findings about a config that contradicts the weights: ties, heads, methods of quantization, and
an adapter that is gone.
"""

from typing import ClassVar

from ckptfix.checkpoint.model_configs import ADAPTER
from ckptfix.diagnosis.findings.base import Action, Finding, Resume, Severity
from ckptfix.diagnosis.findings.incomplete import IncompleteCheckpoint
from ckptfix.diagnosis.findings.weight_faults import MismatchedConfig
from ckptfix.wording import count_of, list_names


class LostAdapter(IncompleteCheckpoint, frozen=True):
    """The config of an adapter without its weights, next to a model: ``from_pretrained`` of
    transformers 5.23 puts the adapter on the model.
    """

    # The model is complete.
    resume = Resume.SUCCEEDS

    @property
    def advice(self) -> str:
        """Advice to complete the adapter, or to remove its config."""
        return (
            "from_pretrained of the model also loads this adapter, and fails; copy the file "
            f"again, or move {ADAPTER} out of the folder if the adapter was merged into the model"
        )


class UntiedWeights(Finding, frozen=True, kw_only=True):
    """Two tensors with other values that the config ties.

    ``key``: the one that a tie leaves out, ``source``: the one that has its values. ``flag``: the
    setting of the config. ``model``, ``version``: the class of transformers that has the tie.
    """

    code = "untied-weights"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "`config.json` ties two weights, such as the head and the embedding, but the file has "
        "different values for them; whether a load keeps both depends on the version of "
        "transformers"
    )

    key: str
    source: str
    flag: str
    model: str
    version: str

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.key!r} and {self.source!r} differ, but {self.flag} ties them; "
            f"{self.model} of transformers {self.version} loads both, transformers 4.57 "
            f"overwrites {self.key!r}"
        )

    @property
    def advice(self) -> str:
        """Advice for each of the two that may be right."""
        return (
            f"if {self.key!r} was trained separately, set {self.flag} to false in config.json\n"
            f"if it is a leftover, load the model, assign {self.source!r} to {self.key!r}, and "
            "call save_pretrained"
        )


class MissingHead(Finding, frozen=True, kw_only=True):
    """A head that nothing ties, and that the files lack. ``model``, ``version``: as in
    ``UntiedWeights``.

    ``key``: of its weight. ``flag``: the setting of the config that does not tie it, "" where no
    setting does.
    """

    code = "missing-head"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "a language model has no weights for its head, and its config does not tie the head to the "
        "embedding; `from_pretrained` of transformers leaves the head random"
    )
    # It loads into the model of the script, which may tie the head.
    resume = Resume.FAILS_IF_NEW

    key: str
    flag: str
    model: str
    version: str

    def __str__(self) -> str:
        why = f"{self.flag} is false" if self.flag else "nothing ties it to another weight"
        return (
            f"{self.path}: {self.key!r} is missing, and {why}; {self.model} of transformers "
            f"{self.version} leaves the head random"
        )

    @property
    def advice(self) -> str:
        """Advice for a head that is tied and for one that is lost."""
        if not self.flag:
            return "copy the weights again from their source"
        return (
            f"if the head was tied during training, set {self.flag} to true in config.json; "
            "otherwise copy the weights again from their source"
        )


class UnneededHead(MissingHead, frozen=True):
    """The same where a ``save_state`` wrote the folder: the script's model may tie its head,
    whatever a config says.
    """

    severity = Severity.WARNING


class HeadOfAnother(MissingHead, frozen=True, kw_only=True):
    """The same where the files have the ``head`` of another class: the config may name the class
    that the weights began as.
    """

    severity = Severity.NOTE
    # It loads into the model of the script.
    resume = Resume.SUCCEEDS

    head: str

    def __str__(self) -> str:
        return (
            f"{self.path}: config.json names the architecture {self.model}, but {self.head!r} is "
            "the head of a different class"
        )

    @property
    def advice(self) -> str:
        """Advice for either class, of which only the user knows the right one."""
        is_of_answers = self.head.startswith("qa_outputs")
        trained = "QuestionAnswering" if is_of_answers else "SequenceClassification"
        return (
            f"load it with the class that was trained, such as AutoModelFor{trained}; "
            f"{self.model} leaves {self.key!r} random\nto record the right class, set "
            "architectures in config.json, or save with model.save_pretrained"
        )


class HeadOfBase(MissingHead, frozen=True):
    """The same where the keys are those of the base model, for which a load needs no head."""

    severity = Severity.NOTE
    # It loads into the model of the script.
    resume = Resume.SUCCEEDS
    advice = "if you need the head, copy the weights again from their source"

    def __str__(self) -> str:
        return (
            f"{self.path}: the keys are those of a base model; AutoModel of transformers loads "
            f"them, but {self.model}, the architecture in config.json, leaves {self.key!r} random"
        )


class ChangedConfig(Finding, frozen=True, kw_only=True):
    """A config with another ``value`` of a ``setting`` than in the checkpoints next to it, whose
    tensors have the same shapes.

    ``more``: further settings that differ. ``known_by``: these checkpoints, in words; ``nearest``:
    the name of the first. ``is_of_hook``: a load hook of the script reads the config.
    """

    code = MismatchedConfig.code
    severity = Severity.WARNING
    action = Action.TELL
    meaning = MismatchedConfig.meaning

    setting: str
    value: str
    expected: str
    more: tuple[str, ...]
    known_by: str
    nearest: str
    is_of_hook: bool

    effect: ClassVar[str] = "fails or loads a different model"

    def __str__(self) -> str:
        verb = "differs" if len(self.more) == 1 else "differ"
        more = f"; {list_names(self.more)} {verb} too" if self.more else ""
        return (
            f"{self.path}: {self.setting} is {self.value} (expected {self.expected}, as in "
            f"{self.known_by}, whose tensors have the same shapes{more}); from_pretrained "
            f"{self.effect}"
        )

    @property
    def resume(self) -> Resume:
        """The outcome of a resume: it loads into the model of the script, unless a hook builds the
        model.
        """
        is_needed = self.is_of_hook and self.severity is Severity.WARNING
        return Resume.FAILS if is_needed else Resume.SUCCEEDS

    @property
    def advice(self) -> str:
        """Advice to bring the config of the run back."""
        effect = (
            "a load hook of the script may build the model from this file"
            if self.is_of_hook
            else "a resume loads into the script's model, but from_pretrained reads this file"
        )
        return f"{effect}: copy it from {self.nearest}, or correct it"


class ChangedSetting(ChangedConfig, frozen=True):
    """The same at an end of a run for a setting that the script may have changed."""

    severity = Severity.NOTE
    differs = True
    effect = "loads a different model"

    @property
    def advice(self) -> str:
        """Advice to correct it, unless the script explains the difference."""
        return (
            f"if the script did not change it after {self.nearest}, copy the file from there: "
            "from_pretrained reads it, while a resume loads into the script's model"
        )


class QuantizationMismatch(Finding, frozen=True, kw_only=True):
    """Weights in the format of a method of quantization that the config does not name, or the other
    way round.

    ``method``: that method, "" where the config names none. ``tensors``: how many are in its
    format, ``key``: the first of them, or a key as the method has it. ``problem``: of the config,
    in words. ``effect``: of a load.
    """

    code = "quantization-mismatch"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "`config.json` names a quantization method, but no tensor has its format or some weights "
        "are incomplete; or tensors are quantized, but the config does not say so. "
        "`from_pretrained` of transformers fails or loads wrong weights"
    )

    method: str
    tensors: int
    key: str
    effect: str

    def __str__(self) -> str:
        if self.tensors:
            tensors = count_of(self.tensors, "tensor")
            are = "is" if self.tensors == 1 else "are"
            return (
                f"{self.path}: {tensors} {are} in the format of {self.method} (such as "
                f"{self.key!r}), but config.json has no quantization_config; {self.effect}"
            )
        return (
            f"{self.path}: config.json specifies {self.method}, but no tensor is in this format "
            f"(expected keys like {self.key!r}); {self.effect}"
        )

    @property
    def resume(self) -> Resume:
        """The outcome of a resume: it loads into the model of the script, which quantizes as the
        script says.
        """
        return Resume.FAILS_IF_NEW if self.severity is Severity.ERROR else Resume.SUCCEEDS

    @property
    def advice(self) -> str:
        """Advice to bring config and weights of one save together."""
        if self.tensors:
            return (
                "copy config.json, with its quantization_config, from the save that quantized the "
                "weights"
            )
        return (
            "if the weights are not quantized, delete quantization_config from config.json; "
            "otherwise copy the weights again"
        )


class DoubtfulQuantization(QuantizationMismatch, frozen=True):
    """The same where it depends on the version of transformers, or on the device, what a load makes
    of it.
    """

    severity = Severity.WARNING


class ForeignQuantization(QuantizationMismatch, frozen=True):
    """The same where the current transformers loads it, or a script does."""

    severity = Severity.NOTE


class IncompleteQuantization(QuantizationMismatch, frozen=True):
    """Weights in the format that the config names, without one of its parts. ``key``: the first
    that is missing.
    """

    advice = (
        "copy the weights again from their source, or quantize the model again and save all of it"
    )

    def __str__(self) -> str:
        return (
            f"{self.path}: {count_of(self.tensors, 'weight')} in the format of {self.method} "
            f"{'is' if self.tensors == 1 else 'are'} incomplete (first missing key: "
            f"{self.key!r}); {self.effect}"
        )


class UnnamedMethod(Finding, frozen=True):
    """A ``quantization_config`` that names no method."""

    code = QuantizationMismatch.code
    severity = Severity.ERROR
    action = Action.TELL
    meaning = QuantizationMismatch.meaning
    # The Trainer and load_state read no config.
    resume = Resume.SUCCEEDS
    advice = (
        "copy config.json again from its source, or delete quantization_config if the "
        "weights are not quantized"
    )

    def __str__(self) -> str:
        return (
            f"{self.path}: quantization_config has no quant_method, so from_pretrained of "
            "transformers fails"
        )
