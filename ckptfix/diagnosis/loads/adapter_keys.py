"""Keys of an adapter of PEFT against those that it looks for: wrappers, names of adapters and parts
of the prefix.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

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
    ForeignAdapter,
    NamedAdapter,
    SeveralAdapters,
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
            "reason": (
                f"a script that adds {prefix!r} itself, or loads into an adapted model, needs "
                "these keys"
            ),
        }
        if all(key.startswith(prefix * 2) for key in keys):
            expected = keys[0].removeprefix(prefix)
            yield ForeignAdapter(
                **facts, key=keys[0], expected=expected, remove=BASE * 2, insert=BASE
            )
            return
        key = next(filter(is_of_adapter, keys), "")
        if key and not any(each.startswith(dotted(BASE[:1])) for each in keys):
            module = key.removesuffix(".weight").rpartition(".")[0]
            expected = f"{prefix}MODULE{key.removeprefix(module)}"
            yield UnplacedAdapter(**facts, key=key, expected=expected)


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
