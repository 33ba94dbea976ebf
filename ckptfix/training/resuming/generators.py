"""Random number generators of a process and of the objects that draw from their own, and the
comparison of states.

A state is compared by its bits: two runs that draw one number differently go separate ways from
there on.
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

_BACKENDS = ("cuda", "xpu", "npu", "mlu", "musa", "hpu", "sdaa", "mps")
"""Modules of torch for accelerators, in the order in which accelerate looks for them."""


class GeneratorStates(Struct, frozen=True):
    """States of the global generators of a process.

    ``device``: the state of the current accelerator device and the name of its backend, None where
    none is in use.
    """

    python: tuple[Any, ...]
    numpy: Mapping[str, Any]
    torch: torch.Tensor
    device: tuple[str, torch.Tensor] | None = None

    def as_plain(self) -> dict[str, Any]:
        """Return the states as values that ``torch.load(weights_only=True)`` accepts."""
        version, numbers, gauss = self.python
        # As an array: torch takes 4 ms to write the five times 625 integers of a run state one by
        # one.
        python = (version, np.array(numbers, np.uint32), gauss)
        values = asdict(self)
        return {name: plain(value) for name, value in {**values, "python": python}.items()}

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> "GeneratorStates":
        """Return the states of which ``as_plain`` made this value; raises ValueError for any other
        value.
        """
        try:
            values = {name: from_plain(value[name]) for name in cls.__struct_fields__}
            version, numbers, gauss = values["python"]
            # Run states of 0.5.0 have a tuple of integers.
            values["python"] = (version, tuple(np.asarray(numbers).tolist()), gauss)
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the states of random number generators: {error!r}") from error


def capture() -> GeneratorStates:
    """Return the states of Python's, numpy's and torch's global generators. Takes about 0.1 ms, and
    draws nothing.
    """
    return GeneratorStates(
        random.getstate(),
        np.random.get_state(legacy=False),
        torch.get_rng_state(),
        _device_state(),
    )


def restore(states: GeneratorStates) -> None:
    """Set the global generators; the state of an accelerator device that this process does not have
    is left out.
    """
    random.setstate(states.python)
    np.random.set_state(dict(states.numpy))
    torch.set_rng_state(states.torch)
    if states.device is not None:
        backend = getattr(torch, states.device[0], None)
        if backend is not None and _is_in_use(states.device[0], backend):
            backend.set_rng_state(states.device[1])


def _device_state() -> tuple[str, torch.Tensor] | None:
    for name in _BACKENDS:
        backend = getattr(torch, name, None)
        if backend is not None and _is_in_use(name, backend):
            return name, backend.get_rng_state()
    return None


def _is_in_use(name: str, backend: Any) -> bool:
    """Return whether a process has initialized an accelerator; asking must not initialize it."""
    if name == "mps":
        return bool(torch.backends.mps.is_available())
    is_initialized = getattr(backend, "is_initialized", None)
    return bool(is_initialized is not None and is_initialized())


# Generators that objects hold as attributes.


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


_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_CLOSED = (
    *(
        str,
        bytes,
        bytearray,
        int,
        float,
        complex,
        type,
        types.ModuleType,
        types.FunctionType,
        types.MethodType,
    ),
    *(
        types.BuiltinFunctionType,
        np.ndarray,
        torch.Tensor,
        torch.nn.Module,
        torch.optim.Optimizer,
        Iterator,
    ),
)
"""Types without generators of a dataset inside, or with too much of other things to look through.
"""

_OBJECTS, _DEPTH, _ITEMS = (
    400,
    8,
    64,
)  # a list of a million samples is data, one of ten transforms is looked through


def generators_in(thing: object) -> list[tuple[str, Generator]]:
    """Return the generators that an object and what it wraps hold as attributes, each with its
    path.

    Looks at attributes, lists and dicts without calling anything, and into no more than 400
    objects.
    """
    found: list[tuple[str, Generator]] = []
    seen = {id(thing)}
    waiting: deque[tuple[str, object, int]] = deque([("", thing, 0)])
    while waiting:
        path, holder, depth = waiting.popleft()
        for name, value in _inside(holder) if depth <= _DEPTH else ():
            if value is None or id(value) in seen or isinstance(value, _CLOSED):
                continue
            seen.add(id(value))
            inside = f"{path}.{name}" if path else str(name)
            if not isinstance(value, _KINDS):
                if len(seen) <= _OBJECTS:
                    waiting.append((inside, value, depth + 1))
            elif not isinstance(value, random.SystemRandom):  # it has no state
                found.append((inside, value))
    return found


def _inside(holder: object) -> Iterator[tuple[object, object]]:
    if isinstance(holder, Mapping):
        if type(holder) is dict and len(holder) <= _ITEMS:
            yield from list(holder.items())
    elif isinstance(holder, list | tuple):
        if len(holder) <= _ITEMS:
            yield from enumerate(holder)
    else:
        yield from list(getattr(holder, "__dict__", {}).items())
        for kind in type(holder).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                member = kind.__dict__.get(name)
                if isinstance(member, types.MemberDescriptorType) and hasattr(holder, name):
                    yield name, getattr(holder, name)


# Values that torch.load accepts without unpickling anything else.

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
    if isinstance(value, GeneratorStates):
        return value.as_plain()
    # A Struct of the script's would come back as a dictionary.
    if isinstance(value, Struct) and type(value).__module__.startswith("ckptfix."):
        return {name: plain(inside) for name, inside in asdict(value).items()}
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


# Comparison.

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
    if isinstance(value, _KINDS):
        return [("state", state_of(value))] if not isinstance(value, random.SystemRandom) else []
    if isinstance(value, (*_NAMED, types.ModuleType)):
        return None
    shows_an_address = "__repr__" not in {
        name for kind in type(value).__mro__[:-1] for name in vars(kind)
    }
    return list(_inside(value)) if shows_an_address or hasattr(value, "__dict__") else None


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
