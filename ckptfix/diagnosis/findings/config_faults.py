"""Findings about a config that contradicts the weights: ties, heads, methods of quantization, and
an adapter that is gone.
"""

from ckptfix.checkpoint.model_configs import ADAPTER
from ckptfix.diagnosis.findings.base import Action, Finding, Resume, Severity
from ckptfix.diagnosis.findings.incomplete import IncompleteCheckpoint
from ckptfix.wording import count_of


class LostAdapter(IncompleteCheckpoint, frozen=True):
    """The config of an adapter without its weights, next to a model: ``from_pretrained`` of
    transformers 5.23 puts the adapter on the model.
    """

    @property
    def resume(self) -> Resume:
        """It succeeds: the model is complete."""
        return Resume.SUCCEEDS

    @property
    def advice(self) -> str:
        """Advice to complete the adapter, or to remove its config."""
        return (
            "from_pretrained of the model looks for it, too, and fails: copy it again, or move "
            f"{ADAPTER} out of the folder if the model is merged with that adapter"
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
        "`config.json` ties two weights, such as the head and the embedding, and the file has both "
        "with other values: versions of transformers differ in what they make of them"
    )

    key: str
    source: str
    flag: str
    model: str
    version: str

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.key!r} and {self.source!r} differ, and {self.flag} ties them; "
            f"{self.model} of transformers {self.version} loads both, transformers 4.57 "
            f"overwrites {self.key!r}"
        )

    @property
    def advice(self) -> str:
        """Advice for each of the two that may be right."""
        return (
            f"if {self.key!r} was trained on its own: set {self.flag} to false in config.json\nif "
            f"it is left over: load the model, assign {self.source!r} to {self.key!r}, and call "
            "save_pretrained"
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
        "a language model has no weights of its head, and its config does not tie the head to the "
        "embedding: `from_pretrained` of transformers leaves the head random"
    )

    key: str
    flag: str
    model: str
    version: str

    def __str__(self) -> str:
        why = f"{self.flag} is false" if self.flag else "nothing ties it"
        return (
            f"{self.path}: {self.key!r} is missing, and {why}; {self.model} of transformers "
            f"{self.version} leaves the head random"
        )

    @property
    def resume(self) -> Resume:
        """The outcome of a resume: it loads into the model of the script, which may tie the
        head.
        """
        return Resume.FAILS_IF_NEW

    @property
    def advice(self) -> str:
        """Advice for a head that is tied and for one that is lost."""
        if not self.flag:
            return "copy the weights again from where they came"
        return (
            f"if the head was tied in the training: set {self.flag} to true in config.json; else "
            "copy the weights again from where they came"
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

    head: str

    @property
    def resume(self) -> Resume:
        """The outcome of a resume: it loads into the model of the script."""
        return Resume.SUCCEEDS

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.head!r} is the head of another class than {self.model}, which "
            "config.json names as its architecture"
        )

    @property
    def advice(self) -> str:
        """Advice for either class, of which only the user knows the right one."""
        is_of_answers = self.head.startswith("qa_outputs")
        trained = "QuestionAnswering" if is_of_answers else "SequenceClassification"
        return (
            f"the class that was trained loads it, such as AutoModelFor{trained}; "
            f"{self.model} leaves {self.key!r} random; to name the right class, write "
            "architectures in config.json, or save with model.save_pretrained"
        )


class HeadOfBase(MissingHead, frozen=True):
    """The same where the keys are those of the base model, for which a load needs no head."""

    severity = Severity.NOTE

    @property
    def resume(self) -> Resume:
        """The outcome of a resume: it loads into the model of the script."""
        return Resume.SUCCEEDS

    def __str__(self) -> str:
        return (
            f"{self.path}: the keys are those of a base model, which AutoModel of transformers loads; "
            f"{self.model}, which config.json names, leaves {self.key!r} random"
        )

    @property
    def advice(self) -> str:
        """Advice for a head that is needed."""
        return "if the model needs its head: copy the weights again from where they came"


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
        "`config.json` names a method of quantization, and no tensor is in its format, or a weight "
        "lacks a part of it, or tensors are, and the config names none: `from_pretrained` of "
        "transformers fails, or takes numbers for weights that are none"
    )

    method: str
    tensors: int
    key: str
    effect: str

    def __str__(self) -> str:
        if self.tensors:
            tensors = count_of(self.tensors, "tensor")
            return (
                f"{self.path}: {tensors} in the format of {self.method} (such as {self.key!r}), "
                f"and config.json has no quantization_config; {self.effect}"
            )
        return (
            f"{self.path}: config.json says {self.method}, and no tensor is in this format "
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
                "copy config.json from the save that quantized the weights, with its "
                "quantization_config"
            )
        return (
            "if the weights are not quantized: delete quantization_config from config.json; else "
            "copy them again"
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

    def __str__(self) -> str:
        return (
            f"{self.path}: {count_of(self.tensors, 'weight')} without a part of the format of "
            f"{self.method} (expected keys like {self.key!r}); {self.effect}"
        )

    @property
    def advice(self) -> str:
        """Advice to get the lost tensors again."""
        return (
            "copy the weights again from where they came, or quantize the model again and save it "
            "as a whole"
        )


class UnnamedMethod(Finding, frozen=True):
    """A ``quantization_config`` that names no method."""

    code = QuantizationMismatch.code
    severity = Severity.ERROR
    action = Action.TELL
    meaning = QuantizationMismatch.meaning

    def __str__(self) -> str:
        return (
            f"{self.path}: quantization_config has no quant_method, and from_pretrained of "
            "transformers fails on it"
        )

    @property
    def resume(self) -> Resume:
        """The outcome of a resume: the Trainer and load_state read no config."""
        return Resume.SUCCEEDS

    @property
    def advice(self) -> str:
        """Advice to complete or to delete it."""
        return (
            "copy config.json again from where it came; if the weights are not quantized: delete "
            "quantization_config"
        )
