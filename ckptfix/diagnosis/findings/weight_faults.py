"""Findings about models whose weights are missing, and about what ``from_pretrained`` of
transformers makes of weights that their config contradicts.
"""

from typing import ClassVar

from ckptfix.checkpoint.model_configs import MODULES, PIPELINE
from ckptfix.diagnosis.findings.base import Action, Finding, Resume, Severity
from ckptfix.diagnosis.findings.load_faults import UnusedKeys
from ckptfix.wording import series


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
        "of layers or experts, or with its own `layer_types`, or a config disagrees with those "
        "of the neighbouring checkpoints: `from_pretrained` fails, leaves layers random, or loads a "
        "different model"
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
