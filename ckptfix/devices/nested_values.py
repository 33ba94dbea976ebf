"""Nested values of a script and of its states: looked through, compared by their bits, and written
as plain ones.

Two runs that draw one number differently go separate ways from there on, so that a generator inside
a value counts by its state.
"""

import hashlib
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import asdict

Generator: TypeAlias = (
    "torch.Generator | np.random.Generator | np.random.RandomState | random.Random"
)

KINDS_OF_GENERATOR = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

_MOST_ITEMS = 64
"""Items of a list that are looked through: ten transforms are, a million samples are data."""


def state_of(generator: Generator) -> Any:
    """Return the state of a generator of torch, numpy or Python."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def set_state(generator: Generator, state: Any) -> None:
    """Set a generator to what ``state_of`` returned for it, or for another of its kind."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what mappings, lists and tuples hold in the end, each value with its path:
    ``"images[0].pixels"``.
    """
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield from leaves(inside, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for at, inside in enumerate(value):
            yield from leaves(inside, f"{path}[{at}]")
    else:
        yield path, value


def attributes(holder: object) -> Iterator[tuple[object, object]]:
    """Yield what an object holds, each value with its name or number, without calling anything:
    nothing of a mapping or a sequence with more than 64 items.
    """
    if isinstance(holder, Mapping):
        if type(holder) is dict and len(holder) <= _MOST_ITEMS:
            yield from list(holder.items())
    elif isinstance(holder, list | tuple):
        if len(holder) <= _MOST_ITEMS:
            yield from enumerate(holder)
    else:
        yield from list(getattr(holder, "__dict__", {}).items())
        for kind in type(holder).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                member = kind.__dict__.get(name)
                if isinstance(member, types.MemberDescriptorType) and hasattr(holder, name):
                    yield name, getattr(holder, name)


_ARRAY = "numpy array"


def plain(value: Any) -> Any:
    """Return a nested value as one that ``torch.load(weights_only=True)`` accepts; raises TypeError
    for other types.
    """
    if value is None or type(value) in (
        bool,
        int,
        float,
        str,
        torch.Tensor,
        torch.Size,
        torch.dtype,
        torch.device,
    ):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        data = torch.frombuffer(bytearray(value.tobytes()) or bytearray(1), dtype=torch.uint8)[
            : value.nbytes
        ]
        return {_ARRAY: value.dtype.str, "shape": list(value.shape), "data": data}
    if isinstance(value, np.generic):
        return plain(value.item())
    # A Struct of the script's would come back as a dictionary. States of generators write themselves.
    if isinstance(value, Struct) and type(value).__module__.startswith("ckptfix."):
        own = getattr(value, "as_plain", None)
        return own() if own else {name: plain(part) for name, part in asdict(value).items()}
    if isinstance(value, Mapping) and _ARRAY not in value:
        return {plain(key): plain(inside) for key, inside in value.items()}
    if type(value) is tuple:
        return tuple(map(plain, value))
    if type(value) is list or isinstance(value, deque):
        return list(map(plain, value))
    if type(value) is set:
        return set(map(plain, value))
    raise TypeError(
        f"{type(value).__module__}.{type(value).__qualname__} cannot be written as plain values"
    )


def from_plain(value: Any) -> Any:
    """Return the value of which ``plain`` made this one; raises ValueError or TypeError for what it
    never makes.
    """
    if isinstance(value, dict):
        if _ARRAY in value:
            data = bytearray(value["data"].numpy().tobytes())
            return np.frombuffer(data, dtype=np.dtype(value[_ARRAY])).reshape(value["shape"])
        return {key: from_plain(inside) for key, inside in value.items()}
    if type(value) is tuple:
        return tuple(map(from_plain, value))
    if isinstance(value, list):
        return list(map(from_plain, value))
    return value


_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
"""Types that are compared by name: their representation has an address of this process."""


def fingerprint(value: Any) -> str:
    """Return 16 hexadecimal digits of a nested value: equal for equal bits, whatever the order of a
    dict's keys.
    """
    return _digest(value, ()).hex()[:16]


def _digest(value: Any, around: tuple[int, ...]) -> bytes:
    digest = hashlib.sha1(usedforsecurity=False)

    def add(*parts: Any) -> None:
        digest.update(repr(parts).encode())

    if isinstance(value, torch.Tensor):
        local = value.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        add("tensor", local.dtype, tuple(local.shape))
        if local.layout is torch.strided and not local.is_meta:
            flat = local.cpu().contiguous().reshape(-1)
            digest.update(memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b"")
        elif not local.is_meta:
            digest.update(_digest(local.to_dense(), around))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        add("array", value.dtype.str, value.shape)
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, np.generic):
        add(type(value.item()).__name__, value.item())
    elif isinstance(value, _NAMED):
        add("name", value.__module__, value.__qualname__)
    elif id(value) in around:
        add("itself", len(around) - around.index(id(value)))
    else:
        inner = (*around, id(value))
        parts = _parts(value)
        if parts is None:
            add(type(value).__name__, value)
        else:
            add(_kind(value), len(parts))
            for item in sorted(
                _digest(key, inner) + _digest(inside, inner) for key, inside in parts
            ):
                digest.update(item)
    return digest.digest()


def _parts(value: Any) -> Sequence[tuple[Any, Any]] | None:
    """Return what is inside a value, each with its key; None for a value that has nothing
    inside.
    """
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple | deque | np.ndarray):
        return list(enumerate(value))
    if isinstance(value, Set):
        return [(item, None) for item in value]
    if isinstance(value, KINDS_OF_GENERATOR):
        return [("state", state_of(value))] if not isinstance(value, random.SystemRandom) else []
    if isinstance(value, (*_NAMED, types.ModuleType)):
        return None
    shows_an_address = "__repr__" not in {
        name for kind in type(value).__mro__[:-1] for name in vars(kind)
    }
    return list(attributes(value)) if shows_an_address or hasattr(value, "__dict__") else None


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "mapping"  # an OrderedDict that was written as a dict holds the same
    if isinstance(value, list | deque):
        return "list"
    return type(value).__qualname__


def first_difference(a: Any, b: Any) -> str | None:
    """Return the path of the first value that two nested values do not share bit for bit, None
    where they agree.

    The path of the values themselves is "".
    """
    if fingerprint(a) == fingerprint(b):
        return None
    inside_a, inside_b = (
        None if isinstance(value, torch.Tensor | np.ndarray | np.generic | Set) else _parts(value)
        for value in (a, b)
    )
    if inside_a is None or inside_b is None or _kind(a) != _kind(b):
        return ""
    others = dict(inside_b)
    for key, value in inside_a:
        if key not in others:
            return str(key)
        below = first_difference(value, others[key])
        if below is not None:
            return f"{key}.{below}" if below else str(key)
    known = {key for key, _ in inside_a}
    return next((str(key) for key, _ in inside_b if key not in known), "")
