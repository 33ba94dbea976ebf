"""Findings about weights and their config that contradict each other, and what ``from_pretrained``
of transformers makes of them: keys, sizes, ties, heads, methods of quantization, and weights that
are missing.
"""

from typing import ClassVar

from ckptfix.checkpoint.model_configs import ADAPTER, MODULES, PIPELINE
from ckptfix.diagnosis.findings.base import Action, Finding, Resume, Severity
from ckptfix.diagnosis.findings.incomplete import IncompleteCheckpoint
from ckptfix.diagnosis.findings.load_faults import UnusedKeys
from ckptfix.wording import count_of, series


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
        "`config.json` and the tensors disagree about quantization: `from_pretrained` fails or "
        "loads wrong weights"
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


class OtherQuantization(QuantizationMismatch, frozen=True, kw_only=True):
    """Weights in the format of another method than that which the config names: ``named``."""

    named: str

    def __str__(self) -> str:
        return (
            f"{self.path}: {count_of(self.tensors, 'tensor')} "
            f"{'is' if self.tensors == 1 else 'are'} in the format of {self.method} (such as "
            f"{self.key!r}), but config.json specifies {self.named}; {self.effect}"
        )


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


class DeadWeights(UnusedKeys, frozen=True, kw_only=True):
    """Weights behind a prefix that their class does not have.

    ``model``: that class, ``version``: of transformers. ``reason``: what else may load the keys, ""
    for nothing.
    """

    code = "dead-weights"
    severity = Severity.ERROR
    action = Action.FIX
    meaning = (
        "the keys of a model start with a wrapper (`module.`, `_orig_mod.`, "
        "`base_model.model.`), or none of them belongs to its class: `from_pretrained` of "
        "transformers finds none of these tensors and leaves the weights random"
    )

    model: str
    version: str
    reason: str = ""

    effect: ClassVar[str] = "from_pretrained ignores {tensors} and leaves the weights random"

    def __str__(self) -> str:
        return (
            f"{UnusedKeys.__str__(self)}, according to the keys of {self.model} in transformers "
            f"{self.version}"
        )


class DoubtfulWeights(DeadWeights, frozen=True):
    """The same where something else than ``from_pretrained`` may load the keys."""

    severity = Severity.NOTE
    action = Action.ASK
    option = "--allow dead-weights"

    @property
    def advice(self) -> str:
        """Advice to rename the keys if from_pretrained is to load them."""
        return (
            f"{self.reason}; if from_pretrained should load the folder: ckptfix repair DIR "
            "--allow dead-weights"
        )


class MixedWeights(DoubtfulWeights, frozen=True):
    """Weights behind several prefixes: no load finds all of them."""

    severity = Severity.ERROR


class WrappedWeights(DoubtfulWeights, frozen=True):
    """Weights behind a prefix that the Trainer does not add: its resume leaves them out, too."""

    severity = Severity.ERROR
    # A script that gives its Trainer a wrapped model finds them.
    resume = Resume.FAILS_IF_NEW


class ForeignWeights(DeadWeights, frozen=True):
    """Weights of which no key, or hardly one, is a key of their class, whatever is before them."""

    action = Action.TELL
    advice = (
        "the keys belong to a module around the model, such as a LightningModule or a "
        "PeftModel, or to another model: write the folder again with save_pretrained() of "
        "the inner model (PEFT: after merge_and_unload()), or correct architectures in "
        "config.json"
    )


class ForeignWeightsOfState(ForeignWeights, frozen=True):
    """The same in a folder from which a run resumes: they are loaded into the model of its
    script.
    """

    severity = Severity.NOTE


class MismatchedConfig(Finding, frozen=True, kw_only=True):
    """Weights of other sizes than the config says.

    ``setting``: the attribute of the config, ``value``: what it says. ``tensors``: what the file
    has. ``effect``: of a load. ``version``: of transformers, whose class ``model`` the table
    describes. ``lists``: of the config, with an item for each layer.
    """

    code = "mismatched-config"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "`config.json` disagrees with the tensors on the vocabulary, the hidden size or the number "
        "of layers or experts, or with its own `layer_types`: `from_pretrained` fails, leaves layers "
        "random, or drops layers"
    )
    # It loads into the model of the script, which may have the sizes of the file.
    resume = Resume.FAILS_IF_NEW

    model: str
    version: str
    setting: str
    value: int
    tensors: str
    effect: str
    lists: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.tensors} (expected {self.value}, as set by {self.setting} in "
            f"config.json); {self.model} of transformers {self.version} {self.effect}"
        )

    @property
    def advice(self) -> str:
        """Advice to bring config and weights of one save together."""
        return (
            "config and weights come from two saves, or part of the weights is lost: copy both "
            f"again from one save, or correct {self._settings()} in config.json if the tensors "
            "are complete"
        )

    def _settings(self) -> str:
        """Return what is to be corrected: transformers refuses a list of another length."""
        each = " (one item per layer)" if self.lists else ""
        return series([self.setting, *self.lists]) + each


class DroppedLayers(MismatchedConfig, frozen=True):
    """More layers than the config says: a load leaves the last ones out."""

    severity = Severity.WARNING


class ConfigOfState(MismatchedConfig, frozen=True):
    """The same next to the states of a training: a resume loads into the model of the script, which
    may have removed layers of it.
    """

    severity = Severity.NOTE
    resume = Resume.SUCCEEDS

    @property
    def advice(self) -> str:
        """Advice for a load by the config."""
        return (
            "a resume loads into the script's model; if from_pretrained should load the folder, "
            f"correct {self._settings()} in config.json"
        )


class MissingModel(Finding, frozen=True, kw_only=True):
    """States of an optimizer without weights of any model; or the config of a ``model`` without its
    weights.

    ``wanted``: the names that a loader looks for. ``component``: a sub-folder that a pipeline or a
    list of modules has, and that is missing, or ``is_empty``, or ``lacks`` its config or weights.
    """

    code = "missing-model"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "an optimizer has no model weights in its folder or below it, or there are no weights "
        "for a model's config, a component of a diffusers pipeline, or a module of "
        "sentence-transformers: the copy or save stopped early"
    )

    model: str = ""
    wanted: str = ""
    component: str = ""
    is_empty: bool = False
    lacks: str = ""

    def __str__(self) -> str:
        if self.component:
            whole = "pipeline" if self.path.name == PIPELINE else "model"
            effect = f"so the {whole} cannot be loaded"
            if "Tokenizer" in self.model:
                effect = "and diffusers silently loads an empty vocabulary instead"
            is_there = "is empty" if self.is_empty else "is missing"
            state = f"has no {self.lacks}" if self.lacks else is_there
            return f"{self.component}/ {state}: {self.path} lists it as {self.model}, {effect}"
        if self.model:
            where = f"{self.path.parent}/" if self.path.parent.parts else "this folder"
            is_of = "lists a" if self.path.name == MODULES else "describes"
            return (
                f"{where} has no weights: {self.path.name} {is_of} {self.model}, which cannot be "
                f"loaded (expected {self.wanted})"
            )
        return f"{self.path} exists, but there are no model weights in this folder or below it"

    @property
    def advice(self) -> str:
        """Advice to copy again: ``save_state`` writes the model first, but a copy may reach it
        last.
        """
        if self.component and self.path.name == PIPELINE:
            return (
                f"copy the folder again; if the script passes {self.component}= to "
                "from_pretrained, or the pipeline class works without it, ignore this"
            )
        return (
            "copy the complete checkpoint again; if the model is kept elsewhere on purpose, ignore "
            "this"
        )
