"""Random number generators of a process, and of the objects that draw from their own."""

import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import asdict

from ckptfix.devices.nested_values import (
    KINDS_OF_GENERATOR,
    Generator,
    attributes,
    from_plain,
    plain,
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

_OBJECTS, _DEPTH = 400, 8


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
        for name, value in attributes(holder) if depth <= _DEPTH else ():
            if value is None or id(value) in seen or isinstance(value, _CLOSED):
                continue
            seen.add(id(value))
            inside = f"{path}.{name}" if path else str(name)
            if not isinstance(value, KINDS_OF_GENERATOR):
                if len(seen) <= _OBJECTS:
                    waiting.append((inside, value, depth + 1))
            elif not isinstance(value, random.SystemRandom):  # it has no state
                found.append((inside, value))
    return found
