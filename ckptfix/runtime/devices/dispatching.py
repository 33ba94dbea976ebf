"""Accelerate's ``dispatch_model`` and ``load_checkpoint_and_dispatch`` for machines whose peer copies may be broken.

A dispatched model holds one reference to the staging of this process, forward and backward passes included, until
``remove_safe_transfers`` or until it is collected: keep the model until its last backward pass has run. A deep copy of
it holds none of its own.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
from torch import nn

from ckptfix.errors import UsageError
from ckptfix.runtime.devices.current import follow_devices
from ckptfix.runtime.devices.pairs import device_type
from ckptfix.runtime.devices.transfers import Mode, Transfers, acquire, mode_named, release
from ckptfix.runtime.devices.tying import forget_freed_weights

_ends: "weakref.WeakKeyDictionary[nn.Module, list[weakref.finalize[..., Any]]]" = weakref.WeakKeyDictionary()
"""For each dispatched model, what ends that which its dispatch began."""

_under_way: list[nn.Module] = []
"""Models that are being dispatched by this module, which the patch of accelerate must leave alone."""


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, int | str | torch.device],
    *,
    safe_transfers: Mode | str = Mode.AUTO,
    force_cuda_to_cuda_via_cpu: bool = False,
    device_guard: bool = False,
    **accelerate_arguments: Any,
) -> nn.Module:
    """Do ``accelerate.dispatch_model`` with copies between devices that arrive.

    ``safe_transfers``: "auto" stages the pairs of devices that are not proven healthy, and measures for up to 3 s when
    nothing is known of this hardware; only a model on two or more accelerators asks for that. "always" stages every
    pair, "never" none. ``force_cuda_to_cuda_via_cpu=True`` is another name of "always". ``device_guard``: make the
    device of each block the current one inside its forward, for kernels that launch on the current device whatever
    their tensors are on. Other arguments go to accelerate.

    Dispatched again, the model holds what the last call says. Raises UsageError when the arguments contradict each
    other, and what accelerate raises; the model then holds what it held before.
    """
    mode = _mode(safe_transfers, force_cuda_to_cuda_via_cpu)
    spread = _accelerators(device_map.values()) | _accelerators(_places(model))
    with _dispatching(model, mode, several=len(spread) > 1, device_guard=device_guard):
        dispatched: nn.Module = accelerate.dispatch_model(
            model, dict(device_map), **_with_lists(accelerate_arguments)
        )
    return dispatched


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Any,
    device_map: str | Mapping[str, int | str | torch.device] | None = None,
    *,
    safe_transfers: Mode | str = Mode.AUTO,
    force_cuda_to_cuda_via_cpu: bool = False,
    device_guard: bool = False,
    **accelerate_arguments: Any,
) -> nn.Module:
    """Do ``accelerate.load_checkpoint_and_dispatch`` with copies between devices that arrive, those of loading too.

    The arguments are those of ``dispatch_model`` above; others go to accelerate. With a map in one word ("auto",
    "balanced", ...) a machine with two or more devices counts as used.
    """
    mode = _mode(safe_transfers, force_cuda_to_cuda_via_cpu)
    if isinstance(device_map, str) or device_map is None:
        several = device_map is not None
        given: Any = device_map
    else:
        several = len(_accelerators(device_map.values()) | _accelerators(_places(model))) > 1
        given = dict(device_map)
    with _dispatching(model, mode, several=several, device_guard=device_guard):
        dispatched: nn.Module = accelerate.load_checkpoint_and_dispatch(
            model, checkpoint, given, **_with_lists(accelerate_arguments)
        )
    return dispatched


def remove_safe_transfers(model: nn.Module) -> None:
    """End what ``dispatch_model`` began with a model, or with a model inside of it; where nothing was, do nothing.

    Its reference is given back and its device guards are taken off. Accelerate's hooks stay: they are accelerate's
    to remove. Other references of this process keep staging on.
    """
    for module in model.modules():
        for end in _ends.pop(module, ()):
            end()


def hold(model: nn.Module, places: Iterable[Any], mode: Mode) -> None:
    """Let a model hold a reference that accelerate is about to dispatch by itself; for the patch of accelerate.

    ``places``: where accelerate will run its blocks. A model that comes from ``dispatch_model`` above is left alone,
    and so is one on fewer than two accelerators, unless the mode is ALWAYS.
    """
    if any(model is other for other in _under_way):
        return
    several = len(_accelerators(places) | _accelerators(_places(model))) > 1
    _replace(model, mode, _reference(model, mode, several))


@contextmanager
def _dispatching(model: nn.Module, mode: Mode, *, several: bool, device_guard: bool) -> Iterator[None]:
    reference = _reference(model, mode, several)
    _under_way.append(model)
    try:
        yield
        forget_freed_weights(model)
    except BaseException:
        if reference is not None:
            release(reference)
        raise
    finally:
        _under_way.remove(model)
    _replace(model, mode, reference)
    if device_guard:
        _ends.setdefault(model, []).append(weakref.finalize(model, follow_devices(model)))


def _replace(model: nn.Module, mode: Mode, reference: Transfers | None) -> None:
    """Let the model hold this reference in place of all that its last dispatch began."""
    former = _ends.pop(model, [])
    if reference is not None:
        _ends[model] = [weakref.finalize(model, release, reference)]
    for end in former:
        end()
    if mode is Mode.NEVER:
        acquire(mode, holder="")  # which holds nothing, and says what others hold


def _reference(model: nn.Module, mode: Mode, several: bool) -> Transfers | None:
    if mode is Mode.NEVER or (mode is Mode.AUTO and not several):
        return None
    return acquire(mode, holder=f"a dispatched {type(model).__name__}")


def _mode(safe_transfers: Mode | str, force_cuda_to_cuda_via_cpu: bool) -> Mode:
    mode = mode_named(safe_transfers)
    if force_cuda_to_cuda_via_cpu and mode is Mode.NEVER:
        raise UsageError(
            "force_cuda_to_cuda_via_cpu=True asks for staging and safe_transfers='never' for none: leave one out"
        )
    return Mode.ALWAYS if force_cuda_to_cuda_via_cpu else mode


def _with_lists(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with lists for sets and tuples of names.

    transformers keeps its classes that must not be split in a set, which accelerate 1.6.0 takes for the name of one.
    """
    names = ("skip_keys", "no_split_module_classes", "preload_module_classes")
    return {
        key: sorted(value) if key in names and isinstance(value, (set, frozenset, tuple)) else value
        for key, value in arguments.items()
    }


def _places(model: nn.Module) -> Iterator[torch.device]:
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor.device


def _accelerators(places: Iterable[Any]) -> set[int]:
    """Return the devices of the accelerator among these places, which may be "cpu", "disk" and "meta" too."""
    name = device_type()
    found = set()
    for place in places:
        if name is None or place is None or place == "disk":
            continue
        where = torch.device(place)
        if where.type == name:
            current = torch.get_device_module(name).current_device
            found.add(int(current() if where.index is None else where.index))
    return found
