"""Keys of an adapter of PEFT against those that it looks for: wrappers, names of adapters and parts
of the prefix.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from ckptfix.checkpoint.architectures import Architecture, architecture_of, pattern_of
from ckptfix.checkpoint.keys import (
    PRIVATE_WRAPPERS,
    WRAPPERS,
    KeyMap,
    adapter_name,
    dotted,
    is_of_adapter,
    without_adapter_name,
)
from ckptfix.checkpoint.load_inputs import Config, Load
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.load_faults import (
    AdapterOfWrapped,
    DeadAdapter,
    DoubtfulAdapter,
    DroppedAdapter,
    ForeignAdapter,
    NamedAdapter,
    PerhapsForeignAdapter,
    SeveralAdapters,
    StrayAdapter,
    UnplacedAdapter,
    UnusedAdapter,
)

BASE: tuple[str, ...] = ("base_model", "model")
"""Segments before every key of an adapter: the attributes of ``PeftModel`` and of its tuner."""

_WRAPPERS = WRAPPERS | {"_forward_module"}
"""Segments that wrappers add to keys, Lightning's ``_FabricModule`` too."""

_CLASSES_OF_MODULE = (
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "DeepSpeedEngine",
)
"""Wrappers whose segment is ``module``, a name that a script's own class may use, too."""

_TASKS_OF_HEADS = ("CAUSAL_LM", "SEQ_2_SEQ_LM", "SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
"""Tasks whose models have the layers in a module of their own, such as ``model.layers``."""

PROMPTS = ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING")
PROMPT = "prompt_embeddings"
"""The one key of an adapter that trains prompts. It has no prefix."""


class AdapterKeys:
    """The keys of an adapter as they are and as PEFT looks for them.

    ``expected``: key -> the key that PEFT looks for; without the tensors of another adapter.
    ``are_several``: the file has several adapters, and none of them is the one to load.
    """

    def __init__(self, load: Load, kind: str) -> None:
        self._load = load
        self._is_prompt = kind in PROMPTS
        is_module = _may_module_be_a_wrapper(load.config)
        self._maps = {
            key: key_map
            for key in load.tensors
            if (key_map := _without_wrappers(key, is_module)) is not None
        }
        self._bare = {
            key: self._maps[key](key) if key in self._maps else key for key in load.tensors
        }
        self._names = {
            key: name
            for key, bare in self._bare.items()
            if not self._is_prompt and (name := adapter_name(bare))
        }
        unnamed = {key: bare for key, bare in self._bare.items() if key not in self._names}
        named = {
            key: without_adapter_name(self._bare[key], name) for key, name in self._names.items()
        }
        self._has_unnamed = any(map(is_of_adapter, unnamed.values()))
        self._collides = not set(unnamed.values()).isdisjoint(named.values())
        self.are_several = len(set(self._names.values())) > 1 and not self._collides
        self.expected = unnamed if self._collides or self.are_several else {**unnamed, **named}

    def findings(self) -> Iterator[Finding]:
        """Yield the findings about keys that PEFT does not look for."""
        if not self._maps and not self._names:
            yield from self._foreign()
            return
        maps = Counter(self._maps.values())
        key_map = maps.most_common(1)[0][0] if maps else KeyMap(remove=())
        names = tuple(sorted(set(self._names.values())))
        dead = [key for key in self._load.tensors if key in self._maps or key in self._names]
        facts: dict[str, Any] = {
            "path": self._load.path,
            "tensors": len(dead),
            "total": len(self._load.tensors),
            "key": dead[0],
            "expected": without_adapter_name(self._bare[dead[0]], self._names.get(dead[0], "")),
            "remove": key_map.remove,
            "insert": key_map.insert,
            "inner": key_map.inner,
            "names": names,
        }
        if self._collides and not maps:
            yield UnusedAdapter(**facts)
        elif self.are_several:
            yield SeveralAdapters(**facts)
        elif len(maps) > 1:
            reason = "its keys begin with different wrappers, and a repair removes only one of them"
            yield DoubtfulAdapter(**facts, reason=reason)
        elif key_map.inner or (
            key_map.insert
            and key_map.remove[-1] in _WRAPPERS
            and not self._load.config.get("base_model_name_or_path")
        ):
            # PEFT records the name of a base that is not wrapped itself when it is adapted.
            reason = "a script that wraps its base before it adds the adapter needs these keys"
            yield AdapterOfWrapped(**facts, reason=reason)
        elif self._load.states_of in ("save_state", "script"):
            reason = (
                "the load hook of the script may look for these keys"
                if self._load.states_of == "save_state"
                else "the script may look for these keys when it resumes"
            )
            yield DoubtfulAdapter(**facts, reason=reason)
        elif self._names and self._has_unnamed:
            reason = "only some of the keys contain a name, so the file may hold two adapters"
            yield DoubtfulAdapter(**facts, reason=reason)
        elif names == ("default",) and not maps:
            yield NamedAdapter(**facts)
        else:
            yield DeadAdapter(**facts)

    def _foreign(self) -> Iterator[Finding]:
        """Yield the finding about keys that lack the prefix of PEFT or have it twice: transformers
        loads some of them.
        """
        keys = list(self._load.tensors)
        prefix = dotted(BASE)
        if self._is_prompt or not keys:
            return
        facts: dict[str, Any] = {
            "path": self._load.path,
            "tensors": len(keys),
            "total": len(keys),
            "key": keys[0],
            "reason": (
                f"a script that adds {prefix!r} itself, or loads into an adapted model, needs "
                "these keys"
            ),
        }
        if all(key.startswith(prefix * 2) for key in keys):
            expected = keys[0].removeprefix(prefix)
            yield ForeignAdapter(**facts, expected=expected, remove=BASE * 2, insert=BASE)
            return
        key = next(filter(is_of_adapter, keys), "")
        if not key or any(each.startswith("base_model.") for each in keys):
            return
        kind, lost = _lost_prefix(key, self._load.config)
        expected = dotted(lost) + keys[0] if lost else f"{prefix}MODULE.lora_A.weight"
        yield kind(**facts, expected=expected, insert=lost)


def _lost_prefix(key: str, config: Config) -> tuple[type[ForeignAdapter], tuple[str, ...]]:
    """Return what a key without the prefix of PEFT is told as, and the segments that it lost.

    ``model.layers`` may be of a base whose keys begin so, or of one whose keys begin with
    ``layers``, and then ``base_model.`` alone is lost. With the wrong prefix PEFT loads nothing,
    and no later check sees it.
    """
    base = _class_of_base(config)
    is_of_model = key.startswith("model.")
    if base is not None:
        if _is_key_of(base, key):
            return ForeignAdapter, BASE
        if is_of_model and _is_key_of(base, key.removeprefix("model.")):
            # transformers takes off the prefix of the class: of GPT-2 it is ``transformer``.
            return ForeignAdapter if base.prefix == "model" else DroppedAdapter, BASE[:1]
        if base.prefix and _is_key_of(base, f"{base.prefix}.{key}"):
            # load_adapter of transformers adds the prefix of the class, too.
            return ForeignAdapter, (*BASE, base.prefix)
        return UnplacedAdapter if base.is_renamed else StrayAdapter, ()
    has_head = config.get("task_type") in _TASKS_OF_HEADS
    is_sure = key.startswith("model.layers.") and has_head if is_of_model else True
    if not is_sure or "base_model" in key.partition(".")[0]:
        return UnplacedAdapter, ()
    return PerhapsForeignAdapter, BASE


def _class_of_base(config: Config) -> Architecture | None:
    """Return the class of transformers that PEFT recorded for the base, None without one."""
    of_base = config.get("auto_mapping")
    if not isinstance(of_base, dict):
        return None
    library = str(of_base.get("parent_library")).split(".")
    if library[:2] != ["transformers", "models"]:
        return None
    name = of_base.get("base_model_class")
    known = architecture_of({"architectures": [name], "model_type": ".".join(library[2:3])})
    return known if isinstance(known, Architecture) else None


def _is_key_of(base: Architecture, key: str) -> bool:
    module = pattern_of(".".join(key.split(".")[:-2])) + "."
    return any(own.startswith(module) for own in base.keys)


def _may_module_be_a_wrapper(config: Config) -> bool:
    """Return whether ``module`` before every module of the base is a wrapper, as far as PEFT tells
    about the base; True where it does not.

    PEFT records the name of a model of transformers, of which no class has such a module, or else
    the class: one of a script may have it.
    """
    of_base = config.get("auto_mapping")
    if isinstance(of_base, dict):
        is_of_transformers = str(of_base.get("parent_library")).startswith("transformers.")
        return is_of_transformers or of_base.get("base_model_class") in _CLASSES_OF_MODULE
    return True


def _without_wrappers(key: str, is_module: bool) -> KeyMap | None:
    """Return what takes the wrappers off a key of PEFT, and out of it; None where it has none.

    ``is_module``: ``module`` is a wrapper where the base begins, too. Elsewhere a module of the
    base may have the name. Between ``base_model`` and ``model`` no base has a module of its own.
    """
    segments = key.split(".")
    if _WRAPPERS.isdisjoint(segments):
        return None
    at = next((at for at, segment in enumerate(segments) if segment not in _WRAPPERS), 0)
    before, rest = tuple(segments[:at]), segments[at:]
    if rest[0] != "base_model":
        return KeyMap(remove=before) if before and rest == [PROMPT] else None
    between = tuple(takewhile(_WRAPPERS.__contains__, rest[1:-1]))
    if rest[1 + len(between) :][:1] == ["model"]:
        del rest[1 : 1 + len(between)]
    else:
        between = ()
    wrappers = _WRAPPERS if is_module else _WRAPPERS - {"module"}
    inside = (
        tuple(takewhile(wrappers.__contains__, rest[len(BASE) : -1]))
        if tuple(rest[:2]) == BASE
        else ()
    )
    is_inner = not PRIVATE_WRAPPERS.isdisjoint(rest[len(BASE) + len(inside) : -1])
    if not (before or between or inside or is_inner):
        return None
    if is_inner:
        before, between, inside = (
            tuple(segment for segment in chain if segment not in PRIVATE_WRAPPERS)
            for chain in (before, between, inside)
        )
    if not (between or inside):
        return KeyMap(remove=before, inner=is_inner)
    return KeyMap(
        remove=(*before, BASE[0], *between, BASE[1], *inside), insert=BASE, inner=is_inner
    )
