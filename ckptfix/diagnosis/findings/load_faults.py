"""Findings about what a loader makes of a folder: tensors that it leaves out, configs that
contradict the tensors.
"""

from typing import ClassVar

from ckptfix.checkpoint.keys import KeyMap
from ckptfix.diagnosis.findings.base import Action, Finding, Resume, Severity
from ckptfix.wording import count_of, list_names

_SAVE_UNWRAPPED = (
    "for the next save, call accelerator.unwrap_model(model, keep_torch_compile=False) before "
    "get_peft_model_state_dict, and pass its result to save_lora_weights of the pipeline"
)


class UnusedKeys(Finding, frozen=True, kw_only=True):
    """Keys that a loader does not look for.

    ``tensors``: those that stay unused, ``total``: all of the file. ``key``: one that the file has,
    ``expected``: the same as the loader looks for it. ``remove``, ``insert``: the segments before
    the keys, as they are and as they should be. ``inner``: private wrappers are inside of the keys,
    too. ``names``: the names of adapters in the keys.
    """

    tensors: int
    total: int
    key: str
    expected: str
    remove: tuple[str, ...] = ()
    insert: tuple[str, ...] = ()
    inner: bool = False
    names: tuple[str, ...] = ()

    effect: ClassVar[str]

    def __str__(self) -> str:
        tensors = f"{self.tensors} of {count_of(self.total, 'tensor')}"
        return (
            f"{self.path}: {self.effect.format(tensors=tensors)} (expected keys like "
            f"{self.expected!r}, found {self.key!r})"
        )

    @property
    def advice(self) -> str:
        """Advice to rename them, with the script that needs them: no folder tells what is loaded."""
        return (
            "ckptfix repair DIR renames them; a script that loads the file itself with "
            "load_state_dict needs the old keys, and ckptfix undo DIR restores them"
        )

    def key_map(self, adapter: str) -> KeyMap:
        """Return the map to the keys that the loader looks for.

        ``adapter``: the name of an adapter to take out of them, "" for none.
        """
        return KeyMap(remove=self.remove, insert=self.insert, inner=self.inner, adapter=adapter)


class DeadAdapter(UnusedKeys, frozen=True):
    """An adapter with keys that PEFT does not look for: it loads without them, and warns at
    most.
    """

    code = "dead-adapter"
    severity = Severity.ERROR
    action = Action.FIX
    meaning = (
        "PEFT or diffusers loads none of the adapter's tensors, because their keys have a wrapper "
        "(`_orig_mod.`, `module.`), the adapter's name or the wrong component. The model behaves "
        "like its base"
    )

    effect: ClassVar[str] = "PEFT leaves {tensors} unused"


class NamedAdapter(DeadAdapter, frozen=True):
    """An adapter with the name ``default`` in its keys, which PEFT 0.21 loads by luck: it looks for
    that name.
    """

    severity = Severity.WARNING
    effect = "PEFT before 0.21 and transformers leave {tensors} unused"


class SeveralAdapters(DeadAdapter, frozen=True):
    """The tensors of several adapters in one file, each with the name of its adapter."""

    action = Action.ASK
    option = "--adapter NAME"

    @property
    def advice(self) -> str:
        """Advice to name the adapter that the file is for."""
        return (
            f"the file has the adapters {list_names(self.names)}, but PEFT loads only one per "
            "file; to keep one: ckptfix repair DIR --adapter NAME"
        )


class DoubtfulAdapter(DeadAdapter, frozen=True, kw_only=True):
    """Keys that PEFT does not look for, where something else than PEFT may load them. ``reason``:
    what that is.
    """

    severity = Severity.WARNING
    action = Action.ASK
    option = "--allow dead-adapter"
    reason: str

    @property
    def advice(self) -> str:
        """Advice to rename the keys if PEFT is to load them."""
        return (
            f"{self.reason}; if PEFT should load the adapter: ckptfix repair DIR --allow "
            "dead-adapter"
        )


class ForeignAdapter(DoubtfulAdapter, frozen=True):
    """Keys with the prefix of PEFT twice, which transformers loads and PEFT does not."""

    severity = Severity.NOTE
    effect = (
        "PeftModel.from_pretrained leaves {tensors} unused, but load_adapter of transformers "
        "loads them"
    )


class UnplacedAdapter(ForeignAdapter, frozen=True):
    """Keys without the prefix of PEFT. Nothing shows how much of it they lost, so a repair could
    write keys that PEFT does not find either.
    """

    action = Action.TELL
    option = ""
    effect = (
        "PeftModel.from_pretrained leaves {tensors} unused, but load_adapter of transformers may "
        "load them"
    )

    @property
    def advice(self) -> str:
        """Advice to save again, as the keys of the base are not known."""
        return (
            f"{self.reason}; it cannot be repaired automatically, because the folder does not "
            "show the module names of the base: save the adapter again with save_pretrained, or "
            "rename the keys to 'base_model.model.' plus the base's names"
        )


class AdapterOfWrapped(DoubtfulAdapter, frozen=True):
    """Keys with wrappers inside, as of a base that was wrapped before it was adapted."""

    severity = Severity.NOTE
    effect = "PEFT leaves {tensors} unused if its base is not wrapped"


class UnusedAdapter(DeadAdapter, frozen=True):
    """Tensors of another adapter next to those that PEFT loads."""

    severity = Severity.NOTE
    action = Action.TELL

    @property
    def advice(self) -> str:
        """Advice about the adapter that stays unused."""
        return (
            "PEFT loads only the tensors whose keys have no adapter name; if "
            f"{list_names(self.names)} is the right adapter, use a file that contains only that "
            "adapter"
        )


class DeadLora(DeadAdapter, frozen=True, kw_only=True):
    """LoRA of diffusers with keys that no component of a pipeline has. ``outcome``: of the load, in
    words with a place for ``{tensors}``.
    """

    outcome: str

    def __str__(self) -> str:
        tensors = f"{self.tensors} of {count_of(self.total, 'tensor')}"
        return (
            f"{self.path}: load_lora_weights of diffusers {self.outcome.format(tensors=tensors)} "
            f"(expected keys like {self.expected!r}, found {self.key!r})"
        )

    @property
    def advice(self) -> str:
        """Advice to rename the keys, and to save the next ones without wrappers."""
        return f"ckptfix repair DIR renames them; {_SAVE_UNWRAPPED}"


class LoraOfSeveral(DeadLora, frozen=True):
    """Such keys that no single rule renames."""

    action = Action.TELL

    @property
    def advice(self) -> str:
        """Advice to save again."""
        return (
            "a repair renames all keys of a file by one rule, but these need several: save the "
            f"LoRA again; {_SAVE_UNWRAPPED}"
        )


class LoraOfComponent(DeadLora, frozen=True):
    """Such keys whose component follows from the names of their modules alone."""

    action = Action.ASK
    option = "--allow dead-adapter"

    @property
    def advice(self) -> str:
        """Advice to rename the keys if a pipeline is to load them."""
        component = self.expected.partition(".")[0]
        by_model = (
            "; a script that calls load_lora_adapter with prefix=None needs these keys"
            if not self.remove
            else ""
        )
        return (
            f"if they belong to the {component} of a pipeline: ckptfix repair DIR --allow "
            "dead-adapter; for the next save, call save_lora_weights of the pipeline" + by_model
        )


class DoubtfulLora(LoraOfComponent, frozen=True, kw_only=True):
    """Such keys where the script that saved them may load them. ``reason``: what loads them."""

    severity = Severity.WARNING
    reason: str

    @property
    def advice(self) -> str:
        """Advice to rename the keys if a pipeline is to load them."""
        return (
            f"{self.reason}; if a diffusers pipeline should load them: ckptfix repair DIR "
            "--allow dead-adapter"
        )


class IncompleteAdapter(Finding, frozen=True, kw_only=True):
    """An adapter that lacks tensors. ``lacks``: what is missing, in words. ``effect``: of a load,
    ``remedy``: the next step.
    """

    code = "incomplete-adapter"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "an adapter lacks tensors, or has tensors that its config does not cover: PEFT or "
        "diffusers fails, or runs without them. Or the Trainer ignores an adapter and loads the "
        "weights next to it"
    )

    lacks: str
    effect: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.lacks}; {self.effect}"

    @property
    def advice(self) -> str:
        """The next step."""
        return self.remedy


class DoubtfulParts(IncompleteAdapter, frozen=True):
    """An adapter that may lack tensors: only the base model shows that."""

    severity = Severity.WARNING


class PassedOver(DoubtfulParts, frozen=True):
    """An adapter that PEFT loads, and the Trainer does not."""


class UnneededParts(IncompleteAdapter, frozen=True):
    """Missing tensors that a healthy run leaves out: the base has no such module, or DeepSpeed has
    the weights.
    """

    severity = Severity.NOTE


class UngatheredParts(UnneededParts, frozen=True):
    """Tensors that ZeRO-3 left in its ranks: a resume reads them from DeepSpeed's folder, PEFT
    finds none.
    """


class MismatchedAdapter(Finding, frozen=True, kw_only=True):
    """An adapter whose tensors have another rank than its config says. ``module``: the first of
    ``modules``.
    """

    code = "mismatched-adapter"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "PEFT cannot load the adapter: its tensors do not have the rank in `adapter_config.json` "
        "(`size mismatch`), or `bias` in that file has a value that PEFT does not know"
    )
    advice = (
        "config and weights come from two runs: copy both again from one save, or write the "
        "tensors' rank into adapter_config.json (r, or rank_pattern for single modules)"
    )

    modules: int
    module: str
    rank: int
    expected: int
    setting: str = "r"

    def __str__(self) -> str:
        return (
            f"{self.path}: rank {self.rank} in {count_of(self.modules, 'module')}, such as "
            f"{self.module} (expected {self.expected}, as set by {self.setting} in "
            "adapter_config.json); PEFT fails with 'size mismatch'"
        )


class UnknownBias(Finding, frozen=True, kw_only=True):
    """A ``bias`` in the config of a LoRA that PEFT does not know. ``value``: as JSON has it."""

    code = MismatchedAdapter.code
    severity = Severity.ERROR
    action = Action.TELL
    meaning = MismatchedAdapter.meaning
    # It loads into the adapter of the script.
    resume = Resume.SUCCEEDS
    advice = "copy adapter_config.json again from its source, or set bias as in the training run"

    value: str

    def __str__(self) -> str:
        return (
            f"{self.path}: bias is {self.value} in adapter_config.json (expected none, all or "
            "lora_only); PEFT fails to load the adapter"
        )


class UntrainedAdapter(Finding, frozen=True, kw_only=True):
    """An adapter whose matrices are as PEFT made them: it changes nothing. ``steps``: of the
    optimizer.

    ``sampled``: the first bytes of each tensor were read.
    """

    code = "untrained-adapter"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "every `lora_B` of an adapter is zero, as before the first step: the adapter has no "
        "effect. The finding is a note if no step count shows that the adapter was trained"
    )
    advice = (
        "the optimizer trains other parameters, or the adapter was saved from another model "
        "object: print model.print_trainable_parameters() and the gradient of one lora_B "
        "after backward(), then train again"
    )

    parameter: str
    modules: int
    steps: int
    sampled: bool

    def __str__(self) -> str:
        read = " in its first bytes" if self.sampled else ""
        after = f" after {count_of(self.steps, 'step')}" if self.steps else ""
        return (
            f"{self.path}: every {self.parameter} is zero{read}{after} "
            f"({count_of(self.modules, 'module')}); the model behaves like its base"
        )


class NewAdapter(UntrainedAdapter, frozen=True):
    """The same without a counter that shows a step."""

    severity = Severity.NOTE
    advice = (
        "normal for an adapter that has not been trained yet; if it was trained, it was "
        "saved from another model object"
    )
