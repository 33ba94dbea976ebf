"""Grammar of keys of tensors (fqns): wrapper segments, evidence for them, and maps from old keys to
new.

A wrapper adds one *segment* to every name below it: DistributedDataParallel and DataParallel
``module``, torch.compile ``_orig_mod``, FSDP1 ``_fsdp_wrapped_module``, activation checkpointing
``_checkpoint_wrapped_module``. A user's own submodule may be called ``module``, so a segment counts
as a wrapper only where every name of a state dict begins with it; a name's last segment never
counts.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from msgspec import Struct

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
PRIVATE_WRAPPERS = WRAPPERS - {"module"}
"""Segments that no user writes by accident: these are wrappers in the middle of a name, too."""

PREPARE_WRAPPERS = frozenset({"module", "_fsdp_wrapped_module"})
"""The wrappers of ``prepare``. The script itself adds the others: it may compile one of two equal
models.
"""

DDP_CHAIN = ("module",)
"""The wrapper chain of a correctly prepared model's own ``state_dict()``."""


_FLAT = "_flat_param"
"""The name of FSDP1's flattened parameters (torch/distributed/fsdp/_flat_param.py)."""

_COMPUTED = frozenset({"inv_freq", "masked_bias", "position_ids"})
"""Last parts of the keys of buffers that transformers computes, and that its older versions saved
and listed.
"""


_OF_ADAPTER = re.compile(
    "lora_(?:A|B|E|embedding_A|embedding_B|magnitude_vector)|hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2)|ia3_l"
    "|vera_lambda_[bd]|trainable_tokens_delta"
)
"""Segments of the parameters of PEFT's adapters: in a model the adapter's name follows, in a file
it does not.
"""

_SAVED_WHOLE = "modules_to_save"
"""Segment of a module that PEFT trains as a whole: in a model it and the adapter's name follow the
module's name.
"""


def is_of_adapter(key: str) -> bool:
    """Return whether a key is of a parameter of one of PEFT's adapters, as PEFT saves it."""
    return any(map(_OF_ADAPTER.fullmatch, key.split(".")[-2:]))


def adapter_name(key: str) -> str:
    """Return the adapter's name in a key of a model with adapters, "" for a key as PEFT saves it.

    PEFT takes it out of every key when it saves, and adds it again when it loads (0.21).
    """
    path = key.split(".")
    if _SAVED_WHOLE in path[1:-2]:
        return path[path.index(_SAVED_WHOLE, 1) + 1]
    if path[-1] not in ("weight", "bias"):
        return path[-1] if len(path) > 2 and _OF_ADAPTER.fullmatch(path[-2]) else ""
    return path[-2] if len(path) > 3 and _OF_ADAPTER.fullmatch(path[-3]) else ""


def without_adapter_name(key: str, name: str) -> str:
    """Return a key of a model with adapters as PEFT saves it, if its adapter has this name; else
    the key.
    """
    if not name or adapter_name(key) != name:
        return key
    path = key.split(".")
    if _SAVED_WHOLE in path[1:-2]:
        at = path.index(_SAVED_WHOLE, 1)
        return ".".join(path[:at] + path[at + 2 :])
    if path[-1] == name:
        return ".".join(path[:-1])
    # A module since 0.13, and saved as the parameter that it was before.
    is_of_dora = path[-3] == "lora_magnitude_vector"
    return ".".join(path[:-2] if is_of_dora else [*path[:-2], path[-1]])


def is_computed(key: str) -> bool:
    """Return whether a key is of a buffer that its model computes, so that no load needs it."""
    return key.rpartition(".")[2] in _COMPUTED


def is_flat_name(name: str) -> bool:
    """Return whether a name is one of FSDP's flattened parameters."""
    return _FLAT in name and any(segment.startswith(_FLAT) for segment in name.split("."))


def leading_wrappers(fqn: str) -> tuple[str, ...]:
    """Return the wrapper segments that ``fqn`` begins with, never the last segment of all."""
    segments = fqn.split(".")
    chain = []
    for segment in segments[:-1]:
        if segment not in WRAPPERS:
            break
        chain.append(segment)
    return tuple(chain)


def common_wrappers(names: Iterable[str]) -> tuple[str, ...]:
    """Return the longest chain of leading wrapper segments of all names; () for no names."""
    chain: tuple[str, ...] | None = None
    prefix = ""
    for fqn in names:
        if chain is not None and fqn.startswith(prefix):
            continue
        own = leading_wrappers(fqn)
        chain = own if chain is None else _common(chain, own)
        prefix = "".join(f"{segment}." for segment in chain)
        if not chain:
            return ()
    return chain or ()


def shared_chain(chains: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the longest chain that all of these begin with; () for none."""
    shared: tuple[str, ...] | None = None
    for chain in chains:
        shared = chain if shared is None else _common(shared, chain)
    return shared or ()


def collapse(chain: tuple[str, ...]) -> tuple[str, ...]:
    """Keep the first of each wrapper: ``module.module.`` becomes ``module.``."""
    return tuple(dict.fromkeys(chain))


def is_nested(chain: tuple[str, ...]) -> bool:
    """Return whether a wrapper is applied more than once."""
    return len(set(chain)) < len(chain)


def prepared(chain: tuple[str, ...]) -> tuple[str, ...]:
    """Return the wrappers of a chain that ``prepare`` can have added."""
    return tuple(segment for segment in chain if segment in PREPARE_WRAPPERS)


def is_wrapped_again(chain: tuple[str, ...], before: tuple[str, ...]) -> bool:
    """Return whether ``chain`` is ``before`` in exactly one DistributedDataParallel more, as
    ``prepare`` returns it.

    A script may have compiled the model in between. An average of the prepared model is two
    wrappers away, its own and that of ``prepare``.
    """
    begin = chain[: len(chain) - len(before)]
    return begin + before == chain and prepared(begin) == DDP_CHAIN


def inner_wrappers(names: Iterable[str]) -> bool:
    """Return whether any name has a private wrapper segment, at its front or further inside."""
    return any(not PRIVATE_WRAPPERS.isdisjoint(fqn.split(".")[:-1]) for fqn in names if "_" in fqn)


class KeyMap(Struct, frozen=True, kw_only=True):
    """A rule for renaming every fqn of one state dict: a leading chain is replaced by another.

    ``inner``: first remove private wrapper segments anywhere in a name. ``remove``: the leading
    wrapper chain of every name after that. ``insert``: the replacement of that chain. ``adapter``:
    name of the adapter to take out of the keys of its parameters, "" for none.
    """

    remove: tuple[str, ...]
    insert: tuple[str, ...] = ()
    inner: bool = False
    adapter: str = ""

    def __call__(self, fqn: str) -> str:
        """Return the new name of a tensor; a name without the chain keeps its beginning."""
        if self.inner:
            fqn = without_private_wrappers(fqn)
        if self.adapter:
            fqn = without_adapter_name(fqn, self.adapter)
        prefix = dotted(self.remove)
        if not fqn.startswith(prefix):
            return fqn
        return dotted(self.insert) + fqn[len(prefix) :]

    def module(self, name: str) -> str:
        """Return the new name of a module, as ``_metadata`` of a state dict holds it: "" is the
        root.

        Modules above the chain's end have no counterpart of their own. They map onto the modules of
        the new chain, and onto its end when that is shorter; torch then lets the later entry win,
        which is the innermost module, the right one.
        """
        segments = tuple(name.split(".")) if name else ()
        if self.inner:
            segments = tuple(segment for segment in segments if segment not in PRIVATE_WRAPPERS)
        if self.adapter and adapter_name(name) == self.adapter:
            segments = segments[:-1]
        depth = len(self.remove)
        if segments[:depth] == self.remove:
            return ".".join(self.insert + segments[depth:])
        if segments == self.remove[: len(segments)]:
            return ".".join(self.insert[: len(segments)])
        return ".".join(segments)


def without_private_wrappers(fqn: str) -> str:
    """Return a name without its private wrapper segments; the last segment stays."""
    *path, last = fqn.split(".")
    if PRIVATE_WRAPPERS.isdisjoint(path):
        return fqn
    return ".".join([segment for segment in path if segment not in PRIVATE_WRAPPERS] + [last])


def collisions(names: Iterable[str], key_map: KeyMap) -> tuple[tuple[str, str, str], ...]:
    """Return (first old name, second old name, new name) for each two names that would become
    one.
    """
    origin: dict[str, str] = {}
    clashes = []
    for fqn in names:
        new = key_map(fqn)
        if new in origin:
            clashes.append((origin[new], fqn, new))
        origin[new] = fqn
    return tuple(clashes)


@lru_cache(maxsize=64)
def dotted(chain: tuple[str, ...]) -> str:
    """Return a wrapper chain as the prefix of names."""
    return "".join(f"{segment}." for segment in chain)


def fitting(chain: tuple[str, ...]) -> str:
    """Return the words for the model whose keys have a chain of wrappers."""
    if not chain:
        return "the bare model"
    return (
        "a model wrapped once in DistributedDataParallel"
        if chain == DDP_CHAIN
        else f"a model with keys that begin with '{dotted(chain)}'"
    )


def _common(left: tuple[str, ...], right: tuple[str, ...]) -> tuple[str, ...]:
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return left[:length]
