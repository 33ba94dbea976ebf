"""The parts of a model that a forward pass uses: a text model's vision tower gets no input, and proves nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ckptfix.runtime.devices.reload.dispatching import run
from ckptfix.runtime.devices.reload.inputs import Inputs
from ckptfix.runtime.devices.reload.raising import ANYTHING


def unreached_parts(model: Any, inputs: Inputs, where: torch.device) -> tuple[str, ...] | None:
    """Return the outermost modules, or the parameters, that a forward pass does not use; None where it cannot be told.

    Runs the model once more: what watches it must not take part in a run that is compared.
    """
    watch = _Watch()
    try:
        with _called(model, watch), watch:
            run(model, inputs, where)
    except ANYTHING:  # a model that does not run while it is watched, as a compiled one may
        return None
    reached = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in watch.used or name.rpartition(".")[0] in watch.called
    }
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    touched = {part for name in reached for part in _around(name)}
    parts = {
        next(part for part in (*_around(name), name) if part not in touched)
        for name in every
        if name not in reached
    }
    return tuple(sorted(parts))


class _Watch(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed, so its classes are Any
    """Notes every parameter that a function of torch is given, and every module that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[int] = set()
        self.called: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # a look at its dtype or device is no use of it
            self.used.update(
                id(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.nn.Parameter)
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _called(model: Any, watch: _Watch) -> Iterator[None]:
    handles = [
        module.register_forward_pre_hook(_noting(watch.called, name))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _noting(called: set[str], name: str) -> Callable[..., None]:
    def note(module: Any, args: Any) -> None:
        called.add(name)

    return note


def _around(name: str) -> list[str]:
    """Return the modules around a parameter, the outermost first."""
    steps = name.split(".")
    return [".".join(steps[:depth]) for depth in range(1, len(steps))]
