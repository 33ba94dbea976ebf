"""LoRA of diffusers: which of its tensors ``load_lora_weights`` of a pipeline brings to life.

Facts from diffusers 0.42 (``loaders/lora_pipeline.py``, ``loaders/peft.py``): each component takes
the keys behind its own name, and the rest is left out without a word. It makes its LoRA from these
keys. Where no module has their names PEFT raises an error, but it ignores ``_orig_mod`` in front,
so that nothing is loaded then. Each class of pipelines converts keys of other programs in its own
way (``lora_conversion_utils.py``): a key that one of them may convert is listed as not checked.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptfix.checkpoint.keys import (
    WRAPPERS,
    KeyMap,
    adapter_name,
    collisions,
    without_adapter_name,
    without_private_wrappers,
)
from ckptfix.checkpoint.load_inputs import Load
from ckptfix.diagnosis.findings.base import Explained, Finding, Told
from ckptfix.diagnosis.findings.duplicates import WrapperPrefix
from ckptfix.diagnosis.findings.load_faults import (
    DeadLora,
    DoubtfulLora,
    IncompleteAdapter,
    LoraOfComponent,
    LoraOfSeveral,
)
from ckptfix.wording import count_of, series

_COMPONENTS = frozenset(
    {
        "unet", "transformer", "transformer_2", "transformer_ref", "text_encoder",
        "text_encoder_2", "text_encoder_3", "prior", "connectors", "text_conditioner",
    }
)  # fmt: skip
"""Components that pipelines load LoRA into (``_lora_loadable_modules``)."""

_OF_BLOCKS = frozenset(
    {"unet", "transformer", "transformer_2", "text_encoder", "text_encoder_2", "text_encoder_3"}
)
"""Components whose first modules are known."""

_COMPONENT_OF = {
    **dict.fromkeys(("down_blocks", "mid_block", "up_blocks"), "unet"),
    **dict.fromkeys(("transformer_blocks", "single_transformer_blocks"), "transformer"),
    "text_model": "text_encoder",
}
"""First module of a key -> the component that has it. No transformer of diffusers has the modules
of a UNet, and no UNet has blocks of a transformer at its top.
"""

_OF_CONVERTERS = (".alpha", "default.", ".lora_down.", ".lora_up.", "lokr_", "processor")
"""Parts of keys by which pipelines with a transformer recognise those of other programs."""

_BASE = ("base_model", "model")

_UNCLEAR = "does not load {tensors}"

_METADATA = "lora_adapter_metadata"
"""Entry of the header with the settings of LoRA, as JSON. ``save_lora_weights`` writes the
component before each of their names, ``save_lora_adapter`` of a model does not.
"""

_HALF = re.compile(
    r"(.+[._]lora(?:_linear_layer|\d+)?[._](?:embedding_)?)(A|B|down|up)((?:\.\w+)?\.weight|)",
    re.DOTALL,
)
"""Key of one of the two matrices, by the names of PEFT, diffusers, kohya's scripts and xlabs."""

_OTHER_HALF = {"A": "B", "B": "A", "down": "up", "up": "down"}

_KOHYA = ("lora_unet_", "lora_te")

_AGAIN = "copy the file again from its source, use another checkpoint, or train again"


class _Key(NamedTuple):
    """A key, split. ``component``: as the key has it, "" for none. ``wrappers``: before and behind
    it. ``is_of_peft``: so is ``base_model.model``. ``rest``: what follows them.
    """

    key: str
    component: str
    wrappers: tuple[str, ...]
    is_of_peft: bool
    rest: str

    @property
    def is_wrapped(self) -> bool:
        """True for a key with a wrapper anywhere."""
        return bool(self.wrappers) or self.rest != without_private_wrappers(self.rest)

    @property
    def adapter(self) -> str:
        """The adapter's name in a key of a UNet, "" for none.

        A UNet takes such keys for unexpected ones: ``state_dict()`` has the name, and PEFT adds it
        again. Pipelines with a transformer convert some.
        """
        return adapter_name(self.rest) if self.component == "unet" else ""

    @property
    def inferred(self) -> str:
        """The component that has the first module, "" for an unknown module."""
        return _COMPONENT_OF.get(self.rest.partition(".")[0], "")

    @property
    def is_misplaced(self) -> bool:
        """True for modules of a UNet behind another component, and for the reverse."""
        # A prior of Stable Cascade has down_blocks, too.
        if self.component not in _OF_BLOCKS or self.inferred not in ("unet", "transformer"):
            return False
        return (self.inferred == "unet") != (self.component == "unet")

    @property
    def expected(self) -> str:
        """The key that a component has. Of modules that only a conversion knows it has none."""
        bare = without_adapter_name(without_private_wrappers(self.rest), self.adapter)
        if self.component and not self.is_misplaced:
            return f"{self.component}.{bare}"
        if self.inferred:
            return f"{self.inferred}.{bare}"
        return f"COMPONENT.{bare}" if self.wrappers or self.is_of_peft else bare


def judge_lora(load: Load) -> Iterator[Told]:
    """Yield the verdict on LoRA of a pipeline. Its class is not recorded, nor are its modules."""
    keys = [_split(key) for key in load.tensors]
    is_converted = any(part in key for key in load.tensors for part in _OF_CONVERTERS)
    dead = [key for key in keys if _is_dead(key, is_converted=is_converted)]
    of_others = [key.key for key in set(keys).difference(dead) if not _is_plain(key)]
    questions = [
        "whether it has these components, modules and shapes",
        "whether every module has tensors",
    ]
    if of_others:
        questions.append(f"whether it converts keys such as {min(of_others)!r}")
    leaves_out = ""
    # save_lora_adapter of a model writes no component, and neither do hooks of some scripts.
    is_of_model = not any(key.component or key.is_wrapped or key.is_of_peft for key in dead)
    if dead and is_of_model and (load.states_of or _is_of_model(load.metadata)):
        questions.append(
            "whether a script loads these keys without a component (load_lora_adapter with "
            "prefix=None)"
        )
        leaves_out = "; load_lora_weights of a pipeline leaves them out"
    elif dead:
        # Settings of a pipeline show that a pipeline is to load the file.
        may_be_of_model = is_of_model and _METADATA not in load.metadata
        yield _finding(load, keys, dead, may_be_of_model=may_be_of_model)
        yield from (Explained(WrapperPrefix, file) for file in load.files)
    if load.is_whole:
        yield from _lone_halves(load)
    # Next to states the optimizer shows that trained weights are missing.
    if load.is_whole and not load.tensors and not load.states_of:
        yield IncompleteAdapter(
            path=load.path,
            lacks="it holds no tensors",
            effect="load_lora_weights of diffusers loads nothing, without an error",
            remedy=_AGAIN,
        )
    yield f"{load.path} against its pipeline: {series(questions)}{leaves_out}"


def _split(key: str) -> _Key:
    wrappers, is_of_peft, rest = _without_wrappers(key.split("."))
    component = rest[0] if rest[0] in _COMPONENTS and rest[1:] else ""
    if component:
        behind, is_of_peft_behind, rest = _without_wrappers(rest[1:])
        wrappers, is_of_peft = (*wrappers, *behind), is_of_peft or is_of_peft_behind
    return _Key(key, component, wrappers, is_of_peft, ".".join(rest))


def _without_wrappers(segments: Sequence[str]) -> tuple[tuple[str, ...], bool, Sequence[str]]:
    """Return the wrappers in front, whether PEFT's own segments are among them, and the rest."""
    wrappers: list[str] = []
    is_of_peft = False
    while segments[1:]:
        if segments[0] in WRAPPERS:
            wrappers.append(segments[0])
            segments = segments[1:]
        elif tuple(segments[:2]) == _BASE and segments[2:]:
            is_of_peft = True
            segments = segments[2:]
        else:
            break
    return tuple(wrappers), is_of_peft, segments


def _is_dead(key: _Key, *, is_converted: bool) -> bool:
    """Return whether no pipeline loads a key. ``is_converted``: the file has keys of another
    program.
    """
    if key.is_wrapped or key.is_misplaced or key.adapter:
        return True
    if key.component:
        return key.is_of_peft
    # load_attn_procs of a UNet reads these: LoRA in diffusers of 2023, custom diffusion in 0.42.
    if ".processor." in key.rest:
        return False
    # Pipelines with a UNet convert keys of kohya's scripts alone. Flux.2 takes base_model.model
    # before blocks of a transformer, Krea 2 and ERNIE before modules of other names.
    if is_converted or (key.is_of_peft and key.inferred == "transformer"):
        return key.inferred == "unet"
    return bool(key.inferred)


def _is_plain(key: _Key) -> bool:
    """Return whether a key is as ``save_lora_weights`` writes it, or as kohya's scripts do."""
    is_named = bool(key.component) and not adapter_name(key.rest)
    return is_named or key.key.startswith(_KOHYA)


def _finding(
    load: Load, keys: Sequence[_Key], dead: Sequence[_Key], *, may_be_of_model: bool
) -> Finding:
    """Return the finding about keys that no component has. ``may_be_of_model``: they are as
    ``save_lora_adapter`` writes them, and a ``.bin`` does not say what wrote it.
    """
    first = dead[0]
    key_map = _key_map(keys, dead)
    facts: dict[str, Any] = {
        "path": load.path,
        "tensors": len(dead),
        "total": len(keys),
        "key": first.key,
        "expected": first.expected,
        "outcome": _outcome(keys, dead),
        "remove": key_map.remove if key_map else (),
        "insert": key_map.insert if key_map else (),
        "inner": key_map is not None and key_map.inner,
        "names": (key_map.adapter,) if key_map is not None and key_map.adapter else (),
    }
    if load.states_of in ("save_state", "script"):
        reason = (
            "the load hook of the script may look for these keys"
            if load.states_of == "save_state"
            else "the script may look for these keys when it resumes"
        )
        return DoubtfulLora(**facts, reason=reason)
    if may_be_of_model and key_map is not None:
        reason = "a script that calls model.load_lora_adapter with prefix=None loads them"
        return DoubtfulLora(**facts, reason=reason)
    if key_map is None or collisions(load.tensors, key_map):
        return LoraOfSeveral(**facts)
    is_inferred = any(key.inferred and (key.is_misplaced or not key.component) for key in dead)
    return (LoraOfComponent if is_inferred else DeadLora)(**facts)


def _outcome(keys: Iterable[_Key], dead: Sequence[_Key]) -> str:
    """Return what ``load_lora_weights`` does with the keys, in words."""
    unused, fails = "leaves {tensors} unused without an error", "fails on {tensors}"
    if not all(key.component for key in dead) or any(key.is_misplaced for key in dead):
        # Some pipelines with a transformer fail in their conversion of keys.
        return unused if all(key.inferred == "unet" for key in dead) else _UNCLEAR
    if all(key.adapter and not key.is_wrapped for key in dead):
        return unused
    is_first = {key.key.startswith(f"{key.component}.") for key in dead}
    live = {key.component for key in set(keys).difference(dead)}
    if is_first == {False} or all(key.component in live for key in dead):
        return unused
    if is_first == {True, False} or any(key.component in live for key in dead):
        return _UNCLEAR
    if any(key.component.startswith("text_encoder") for key in dead):
        return fails
    chains = {(key.wrappers[:1], key.wrappers[1:], key.is_of_peft) for key in dead}
    if all(first != ("_orig_mod",) for first, _, _ in chains):
        return fails
    is_plain = all(key.rest == without_private_wrappers(key.rest) for key in dead)
    return unused if is_plain and chains == {(("_orig_mod",), (), False)} else _UNCLEAR


def _key_map(keys: Iterable[_Key], dead: Sequence[_Key]) -> KeyMap | None:
    """Return the map that gives each key what a component has; None where no single map does."""
    first = dead[0]
    if first.expected.startswith("COMPONENT."):
        return None
    before = first.key.removesuffix(first.rest).rstrip(".")
    maps = (
        KeyMap(remove=(), inner=True, adapter=first.adapter),
        KeyMap(
            remove=tuple(before.split(".")) if before else (),
            insert=(first.expected.partition(".")[0],),
            adapter=first.adapter,
        ),
    )
    expected = {key.key: key.expected for key in dead}
    return next(
        (
            key_map
            for key_map in maps
            if all(key_map(key.key) == expected.get(key.key, key.key) for key in keys)
        ),
        None,
    )


def _is_of_model(metadata: Mapping[str, str]) -> bool:
    """Return whether ``save_lora_adapter`` of a model wrote the file, by its settings."""
    return re.search(r'"peft_type"\s*:', metadata.get(_METADATA, "")) is not None


def _lone_halves(load: Load) -> Iterator[IncompleteAdapter]:
    """Yield the finding about modules with one of the two matrices, or with an ``alpha`` alone."""
    halves: dict[tuple[str, str], set[str]] = {}
    for key in load.tensors:
        if match := _HALF.fullmatch(key):
            halves.setdefault((match[1], match[3]), set()).add(match[2])
    lone = {
        f"{before}{half}{after}": f"{before}{_OTHER_HALF[half]}{after}"
        for (before, after), names in halves.items()
        for half in names
        if _OTHER_HALF[half] not in names
    }
    modules = {key.partition(".")[0] for key in load.tensors if not key.endswith(".alpha")}
    for key in load.tensors:
        module, _, ending = key.partition(".")
        # Only kohya's scripts have the module in one segment, so that its keys are known.
        if ending == "alpha" and key.startswith(_KOHYA) and module not in modules:
            lone[key] = f"{module}.lora_down.weight"
    if not lone:
        return
    key, absent = next(iter(lone.items()))
    with_b = {
        before.partition(".")[0]
        for (before, _), names in halves.items()
        if not names.isdisjoint(("B", "up"))
    }
    fails = any(key.startswith(_KOHYA) or key.partition(".")[0] not in with_b for key in lone)
    effect = (
        "load_lora_weights of diffusers fails"
        if fails
        else "diffusers initializes the missing ones without an error, so the training of these "
        "modules is lost"
    )
    yield IncompleteAdapter(
        path=load.path,
        lacks=(
            f"{count_of(len(lone), 'LoRA tensor')} without the second matrix of the module, such "
            f"as {key} (expected {absent} as well)"
        ),
        effect=effect,
        remedy=_AGAIN,
    )
