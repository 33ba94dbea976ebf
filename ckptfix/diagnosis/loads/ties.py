"""Ties and heads of models for ``from_pretrained`` of transformers, by the table of its classes.

A tie is a setting of the config, and a save leaves one of the two weights out. Measured: where the
file has both and they differ, transformers 5.23.0 leaves them untied with a warning, 4.57.3
overwrites the head with the embedding. Where nothing ties the head and the file lacks it, each of
them leaves it random, and says so in a report.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ckptfix.checkpoint.architectures import (
    Architecture,
    Unknown,
    architecture_of,
    knows_defaults,
    pattern_of,
    table_version,
)
from ckptfix.checkpoint.keys import PRIVATE_WRAPPERS, WRAPPERS
from ckptfix.checkpoint.load_inputs import Load
from ckptfix.checkpoint.model_configs import ADAPTER
from ckptfix.diagnosis.findings.config_faults import (
    HeadOfAnother,
    HeadOfBase,
    MissingHead,
    UnneededHead,
    UntiedWeights,
)

_FLAG = "tie_word_embeddings"
_OTHER_HEADS = frozenset(
    ("classification_head", "classifier", "pre_classifier", "qa_outputs", "score")
)
"""Modules that classes of transformers put in the place of the head of a language model. The value
head of TRL (``v_head``) is one more.
"""

_ADDED = frozenset((*WRAPPERS, *PRIVATE_WRAPPERS, "base_model", "model"))
"""Segments that wrappers and PEFT add before keys."""

_NOT_LOADED = (".modules_to_save.", ".base_layer.", ".original_module.")
"""Parts of keys of a module that PEFT wraps: a load does not look for them."""

_MOST_BYTES = 1 << 28
"""Most bytes of a weight that are compared in full: both are in memory."""


def judge_ties(load: Load) -> Iterator[UntiedWeights | MissingHead]:
    """Yield the verdict on weights that the config ties, and on a head that it does not tie."""
    if not load.config or ADAPTER in load.configs or not load.is_whole or not load.tensors:
        return
    if load.config.get("transformers_weights"):
        return
    known = architecture_of(load.config)
    if not isinstance(known, Unknown):
        yield from _untied(load, known)
        yield from _head(load, known)


def _untied(load: Load, known: Architecture) -> Iterator[UntiedWeights]:
    """Yield the first two weights of each setting that it ties and that differ."""
    keys = _keys(load, known)
    for flag, ties in known.ties.items():
        if not known.is_tied(load.config, flag):
            continue
        for target, source in ties.items():
            pair = next(
                (
                    (key, source_key)
                    for numbers, key in keys.get(target, {}).items()
                    if (source_key := keys.get(source, {}).get(numbers)) is not None
                    and _differ(load, key, source_key)
                ),
                None,
            )
            if pair is not None:
                yield UntiedWeights(
                    path=load.path,
                    key=pair[0],
                    source=pair[1],
                    flag=_setting(flag),
                    model=known.name,
                    version=table_version(),
                )
                break


def _keys(load: Load, known: Architecture) -> Mapping[str, Mapping[tuple[str, ...], str]]:
    """Return pattern of the class -> the numbers in a key -> that key, also of keys of its base
    model.
    """
    keys: dict[str, dict[tuple[str, ...], str]] = defaultdict(dict)
    for key in load.tensors:
        for name in (key, f"{known.prefix}.{key}", key.removeprefix(f"{known.prefix}.")):
            if (pattern := pattern_of(name)) in known.keys:
                keys[pattern][tuple(filter(str.isdecimal, name.split(".")))] = key
                break
    return keys


def _differ(load: Load, key: str, source: str) -> bool:
    """Return whether two weights have other values; False where their bytes cannot be compared."""
    first, second = load.tensors[key], load.tensors[source]
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.data_offsets == second.data_offsets and len(load.files) == 1:
        return False
    size = min(load.size, _MOST_BYTES)
    bytes_of_key, bytes_of_source = load.sample(key, size), load.sample(source, size)
    return None not in (bytes_of_key, bytes_of_source) and bytes_of_key != bytes_of_source


def _head(load: Load, known: Architecture) -> Iterator[MissingHead]:
    """Yield the finding about a head that the class looks for, that nothing ties, and that no file
    has.
    """
    module = known.head.rpartition(".")[0]
    if not module or "*" in module or _has_head(load, known, module):
        return
    if (
        any(re.search(pattern, known.head) for pattern in known.missing)
        or known.head in known.unsaved
    ):
        return
    # Without the embedding, too, the head may be there under another name: in memory keys of Llava,
    # Mllama and Inkling2 differ from those on the disk. Of a base model the keys lack its name.
    of_base = not any(pattern_of(key) == known.embedding for key in load.tensors)
    if of_base and not any(
        pattern_of(f"{known.prefix}.{key}") == known.embedding for key in load.tensors
    ):
        return
    flags = [
        flag
        for flag, ties in known.ties.items()
        if known.head in ties or known.head in ties.values()
    ]
    if any(known.is_tied(load.config, flag) is not False for flag in flags):
        return
    # A part of a config that the table does not connect with the head: configs of GLM-4V take the
    # flag of their text_config. Without any the default of another version may tie it: 4.44.2 ties
    # the head of BigBirdPegasusForCausalLM, 5.23.0 does not.
    parts = [load.config, *(part for part in load.config.values() if isinstance(part, Mapping))]
    said = [part[_FLAG] for part in parts if _FLAG in part]
    if any(said) or not (said or knows_defaults(load.config)):
        return
    facts: dict[str, Any] = {
        "path": load.path,
        "key": known.head,
        "flag": _setting(flags[0]) if flags else "",
        "model": known.name,
        "version": table_version(),
    }
    # config.save_pretrained keeps the architectures of the model that the weights began as; only
    # the model's own save_pretrained writes its class.
    heads = [key for key in load.tensors if key.partition(".")[0] in _OTHER_HEADS]
    if of_base:
        yield HeadOfBase(**facts)
    elif heads and not any(map(known.fits, heads)):
        yield HeadOfAnother(**facts, head=heads[0])
    else:
        yield (UnneededHead if load.states_of == "save_state" else MissingHead)(**facts)


def _has_head(load: Load, known: Architecture, module: str) -> bool:
    """Return whether a file has the weight of a head, also behind a prefix, quantized, or under its
    name in memory.

    GPT-NeoX calls it ``embed_out`` on the disk and ``lm_head`` in memory, and a load takes both.
    """
    heads: dict[str, str] = {}
    for key in load.tensors:
        before, there, after = f".{key}".partition(f".{module}.")
        if there and after != "bias":
            heads[key] = before[1:]
    # A script that adapts the model loads what PEFT wraps.
    is_adapted = load.states_of == "save_state"
    keys = sorted(load.tensors)
    for key, prefix in heads.items():
        if not is_adapted and any(part in f".{key}" for part in _NOT_LOADED):
            continue
        # Prefixes of wrappers have a finding of their own. Behind one that no other key has, as
        # after a rename of the others, no load finds the head.
        at = bisect_left(keys, f"{prefix}.")
        is_shared = all(each.startswith(f"{prefix}.") for each in keys[at : at + 2])
        if not prefix or {*prefix.split(".")} <= _ADDED or (is_shared and at + 1 < len(keys)):
            return True
    embeddings = _keys(load, known).get(known.embedding, {}).values()
    shapes = {load.tensors[key].shape for key in embeddings}
    return any(
        each.shape in shapes
        and key not in embeddings
        and key not in heads
        and "*" not in pattern_of(key)
        and "embed" not in key
        for key, each in load.tensors.items()
    )


def _setting(flag: str) -> str:
    return f"{flag}.{_FLAG}" if flag else _FLAG
