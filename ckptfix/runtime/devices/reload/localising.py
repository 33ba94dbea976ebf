"""After a direct run gave another output than a staged one: which ordered pair, and where in the model.

Reading tensors back synchronises, and a race does not happen while one looks. So the pairs are told apart first without
looking, by letting one alone copy directly; only then are copies traced.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckptfix.runtime.devices.pairs import Pair
from ckptfix.runtime.devices.reload.comparing import first_mismatch, host_bytes
from ckptfix.runtime.devices.reload.dispatching import Outputs
from ckptfix.runtime.devices.reload.outputs import equal_bits
from ckptfix.runtime.devices.reload.raising import ANYTHING
from ckptfix.runtime.devices.reload.report import Divergence
from ckptfix.runtime.devices.routing import bypassed
from ckptfix.runtime.devices.transfers import safe_transfers


class Moved(NamedTuple):
    """One tensor that an operation moves from an accelerator to another."""

    source: torch.Tensor
    pair: Pair
    place: int


def alone(run: Callable[[], Outputs], reference: Outputs, pair: Pair, repeats: int) -> int:
    """Return how many of ``repeats`` runs differ from ``reference`` when only this pair copies directly."""
    wrong = 0
    with safe_transfers("always"):
        for _ in range(repeats):
            try:
                with _OneDirect(pair):
                    wrong += not equal_bits(run(), reference)
            except ANYTHING:  # of what the model makes of wrong bytes, no staged run raises it
                wrong += 1
    return wrong


def localise(
    model: Any, run: Callable[[], Outputs], wrong_runs: int, repeats: int, suspects: Sequence[Pair]
) -> Divergence:
    """Trace direct runs until a copy is seen to deliver other bytes, at most ``repeats`` of them."""
    ended_well = True
    for _ in range(repeats):
        trace = _Trace()
        try:
            with bypassed(), _blocks(model, trace), trace:
                run()
        except ANYTHING:  # the copy itself, or what the model makes of wrong bytes
            ended_well = False
        if trace.first is not None:
            return Divergence(runs=repeats, wrong_runs=wrong_runs, suspects=tuple(suspects), **trace.first)
    return Divergence(
        runs=repeats,
        wrong_runs=wrong_runs,
        suspects=tuple(suspects),
        vanishes_when_traced=ended_well,
        pair=suspects[0] if len(suspects) == 1 else None,
    )


class _OneDirect(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed, so its classes are Any
    """Copies of one pair pass the staging; nothing is read back."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(moved.pair == self.pair for moved in _moves(func, args, kwargs)):
            with bypassed():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class _Trace(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed, so its classes are Any
    """Every copy between accelerators is compared on the host with what was sent; the first wrong one is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] | None = None
        self.modules: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for moved in () if self.first is not None else _moves(func, args, kwargs):
            there = _destination(func, args, result, moved.place)
            sent = moved.source.cpu().to(there.dtype).expand(there.shape)
            found = first_mismatch(there, host_bytes(sent))
            if found is not None:
                self.first = {
                    "pair": (moved.pair[0], int(there.device.index or 0)),
                    "block": self.modules[-1] if self.modules else "",
                    "operation": str(func),
                    "dtype": str(there.dtype).removeprefix("torch."),
                    "shape": tuple(there.shape),
                    "first_offset": found.offset,
                }
                break
        return result


def _moves(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Moved]:
    """Yield what an operation moves between accelerators: ``.to``, ``copy_`` and ``_foreach_copy_``."""
    name = func.overloadpacket if hasattr(func, "overloadpacket") else func
    if name is torch.ops.aten._to_copy:
        yield from _move(args[0], kwargs.get("device"), 0)
    elif name is torch.ops.aten.copy_:
        yield from _move(args[1], args[0].device, 0)
    elif name is torch.ops.aten._foreach_copy_:
        for place, (into, source) in enumerate(zip(args[0], args[1], strict=True)):
            yield from _move(source, into.device, place)


def _move(source: torch.Tensor, target: torch.device | None, place: int) -> Iterator[Moved]:
    start = source.device
    if target is None or start.type != target.type or start.type in ("cpu", "meta"):
        return
    end = target.index
    if end is None:
        end = torch.get_device_module(target).current_device()
    if start.index != end:
        yield Moved(source, (int(start.index or 0), int(end)), place)


def _destination(func: Any, args: Sequence[Any], result: Any, place: int) -> torch.Tensor:
    if func.overloadpacket is torch.ops.aten._foreach_copy_:
        return args[0][place]
    return result


@contextmanager
def _blocks(model: Any, trace: _Trace) -> Iterator[None]:
    """Have the trace know the module that runs: accelerate moves a block's arguments inside of the block's forward."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(_entering(trace.modules, name)))
        handles.append(module.register_forward_hook(_leaving(trace.modules)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _entering(modules: list[str], name: str) -> Callable[..., None]:
    def enter(module: Any, args: Any) -> None:
        modules.append(name)

    return enter


def _leaving(modules: list[str]) -> Callable[..., None]:
    def leave(module: Any, args: Any, output: Any) -> None:
        modules.pop()

    return leave


def exercised(moves: Mapping[Pair, int]) -> Iterable[Pair]:
    """Return the pairs that a forward pass copies over."""
    return [pair for pair, count in moves.items() if count]
