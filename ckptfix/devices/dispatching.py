"""Accelerate's ``dispatch_model`` and ``load_checkpoint_and_dispatch`` where P2P copies may be
broken.

A dispatched model holds one reference to the staging of this process, forward and backward passes
included, until ``remove_safe_transfers`` or until it is collected: keep the model until its last
backward pass has run. A deep copy of it holds none of its own.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import accelerate
import accelerate.big_modeling
import torch
from torch import nn

from ckptfix.devices.patching import Patch, Patches
from ckptfix.devices.torch_devices import device_type
from ckptfix.devices.transfers import (
    Mode,
    Transfers,
    acquire,
    mode_meant,
    mode_named,
    release,
    say,
)
from ckptfix.errors import UsageError


def follow_devices(model: nn.Module) -> Callable[[], None]:
    """Make the device of each block current inside its forward, and restore the former one
    afterwards, whatever ends it.

    Accelerate moves tensors and never sets the current device: a kernel that does not look where
    its tensors are launches on device 0 from a block on device 1 (unsloth #6831). The blocks are
    those to which accelerate gave a device other than that of what holds them. Returns what ends
    it.
    """
    name = device_type()
    # Weakly: the function that ends the guards must not keep the model alive.
    guards = [
        weakref.ref(_Guard(block, name, index))
        for block, index in _blocks(model, name, None)
        if name is not None
    ]

    def end() -> None:
        for reference in guards:
            guard = reference()
            if guard is not None:
                guard.end()

    return end


class _Guard:
    """A block's own forward, which accelerate's hooks call, on its device.

    torch's hooks behind a forward are left out when it is interrupted from the keyboard: this one
    ends in any case. It lies below accelerate's hooks, so that those may be replaced, and copies of
    the model have copies of it.
    """

    def __init__(self, block: nn.Module, name: str, index: int) -> None:
        at = "_old_forward" if "_old_forward" in vars(block) else "forward"
        forward = getattr(block, at)
        functools.update_wrapper(self, forward)  # which may bring attributes along
        self._block = block
        self._name = name
        self._index = index
        self._forward = forward
        setattr(block, at, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        devices = torch.get_device_module(self._name)
        before = devices.current_device()
        try:
            devices.set_device(self._index)
            return self._forward(*args, **kwargs)
        finally:
            devices.set_device(before)

    def end(self) -> None:
        """Restore the old forward, unless somebody replaced this one since."""
        for at in ("_old_forward", "forward"):  # accelerate's hook may have been taken off
            if vars(self._block).get(at) is self:
                setattr(self._block, at, self._forward)


def _blocks(
    module: nn.Module, name: str | None, outer: int | None
) -> Iterator[tuple[nn.Module, int]]:
    index = _index(getattr(module, "_hf_hook", None), name)
    if index is not None and index != outer:
        yield module, index
    for child in module.children():
        yield from _blocks(child, name, outer if index is None else index)


def _index(hook: Any, name: str | None) -> int | None:
    for inner in getattr(hook, "hooks", (hook,)):
        where = getattr(inner, "execution_device", None)
        if where is not None and where not in ("meta", "disk"):
            found = torch.device(where)
            if found.type == name:
                return 0 if found.index is None else int(found.index)
    return None


def forget_freed_weights(model: nn.Module) -> None:
    """Drop the addresses of tied weights that are not held in memory; call it right after a
    dispatch.

    ``dispatch_model`` notes the address of each tied weight, moves the weight, and keeps the note.
    Once the old memory is freed, a weight that is read from disk may get the same address, and is
    then replaced by the tied weight: 6 of 20 trials with accelerate 1.15.0, without an error where
    the shapes agree.

    Tied weights offloaded to the disk are then read once for each use, where accelerate shares them
    if two of them are on the device at a time. Those offloaded to the host keep their entries:
    their memory lives.
    """
    hooks = [
        hook for module in model.modules() for hook in _flat(getattr(module, "_hf_hook", None))
    ]
    live = {
        tensor.data_ptr()
        for state in {id(state): state for hook in hooks for state in _states(hook)}.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    }
    for hook in hooks:
        tied = getattr(hook, "tied_params_map", None) or {}
        for address in set(tied) - live:
            del tied[address]
        # Names whose addresses accelerate would note anew at every read.
        getattr(hook, "tied_params_names", set()).clear()


def _flat(hook: Any) -> Iterator[Any]:
    if hook is not None:
        yield hook
        for inner in getattr(hook, "hooks", ()):
            yield from _flat(inner)


def _states(hook: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the offloaded weights of a hook that are held in memory, by name."""
    weights = getattr(hook, "weights_map", None)
    weights = getattr(weights, "dataset", weights)
    state = getattr(weights, "state_dict", weights)
    if isinstance(state, Mapping):
        yield state


class _Effect(Enum):
    """Effect of a dispatch on a model."""

    ASKED = "a reference from dispatch_model"
    PATCHED = "a reference from the patch of accelerate"
    GUARD = "device guards"


_Ends = dict[_Effect, "weakref.finalize[..., Any]"]

_ends: "weakref.WeakKeyDictionary[nn.Module, _Ends]" = weakref.WeakKeyDictionary()
"""Dispatched model -> effect of its dispatch -> function that ends it."""

_under_way: list[nn.Module] = []
"""Models that are being dispatched by this module, which the patch of accelerate must leave alone.
"""


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, int | str | torch.device],
    *more: Any,
    safe_transfers: Mode | str = Mode.AUTO,
    force_cuda_to_cuda_via_cpu: bool = False,
    device_guard: bool = False,
    **accelerate_arguments: Any,
) -> nn.Module:
    """Do ``accelerate.dispatch_model`` with safe copies between devices.

    ``safe_transfers``: "auto" stages the pairs of devices that are not proven healthy, and measures
    for up to 3 s when nothing is known of this hardware; only a model on two or more accelerators
    asks for that. "always" stages every pair, "never" none. ``force_cuda_to_cuda_via_cpu=True`` is
    another name of "always". ``device_guard``: make the device of each block the current one inside
    its forward, for kernels that launch on the current device whatever their tensors are on. Other
    arguments are accelerate's, by name or, as there, by place.

    Dispatched again, the model holds what the last call says. Raises UsageError when the arguments
    contradict each other, and what accelerate raises; the model then holds what it held before.
    """
    mode = _mode(safe_transfers, force_cuda_to_cuda_via_cpu)
    given = _by_name(
        accelerate.dispatch_model, model, dict(device_map), *more, **accelerate_arguments
    )
    places = (
        *device_map.values(),
        given.arguments.get("main_device"),
        *_places(model, given.arguments.get("state_dict")),
    )
    with _dispatching(model, mode, several=_are_several(places), device_guard=device_guard):
        dispatched: nn.Module = accelerate.dispatch_model(*given.args, **given.kwargs)
    return dispatched


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Any,
    device_map: str | Mapping[str, int | str | torch.device] | None = None,
    *more: Any,
    safe_transfers: Mode | str = Mode.AUTO,
    force_cuda_to_cuda_via_cpu: bool = False,
    device_guard: bool = False,
    **accelerate_arguments: Any,
) -> nn.Module:
    """Do ``accelerate.load_checkpoint_and_dispatch`` with safe copies between devices, also while
    loading.

    The arguments are those of ``dispatch_model`` above; others are accelerate's. With a map in one
    word ("auto", "balanced", ...) a machine with two or more devices counts as used.
    """
    mode = _mode(safe_transfers, force_cuda_to_cuda_via_cpu)
    if isinstance(device_map, str) or device_map is None:
        several = device_map is not None
        wanted: Any = device_map
    else:
        several = _are_several((*device_map.values(), *_places(model)))
        wanted = dict(device_map)
    given = _by_name(
        accelerate.load_checkpoint_and_dispatch,
        model,
        checkpoint,
        wanted,
        *more,
        **accelerate_arguments,
    )
    with _dispatching(model, mode, several=several, device_guard=device_guard):
        dispatched: nn.Module = accelerate.load_checkpoint_and_dispatch(*given.args, **given.kwargs)
    return dispatched


def remove_safe_transfers(model: nn.Module) -> None:
    """End what ``dispatch_model`` began with a model, or with a model inside of it; where nothing
    was, do nothing.

    Its reference is given back and its device guards are taken off. Accelerate's hooks stay: they
    are accelerate's to remove. Other references of this process keep staging on.
    """
    for module in model.modules():
        for end in _ends.pop(module, {}).values():
            end()


def hold(model: nn.Module, places: Iterable[Any], mode: Mode) -> None:
    """Let a model hold a reference that accelerate is about to dispatch by itself; for the patch of
    accelerate.

    ``places``: where accelerate will run its blocks. A model that ``dispatch_model`` above
    dispatches is left alone, and so is one on fewer than two accelerators, unless the mode is
    ALWAYS. A reference that the model holds from ``dispatch_model`` stays, as somebody asked for
    it; device guards end, as their blocks may go elsewhere now.
    """
    if any(model is other for other in _under_way):
        return
    meant = mode_meant(mode)
    _replace(
        model,
        meant,
        _Effect.PATCHED,
        _reference(model, meant, _are_several((*places, *_places(model)))),
    )


@contextmanager
def _dispatching(
    model: nn.Module, mode: Mode, *, several: bool, device_guard: bool
) -> Iterator[None]:
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
    _replace(model, mode, _Effect.ASKED, reference)
    if device_guard:
        _ends.setdefault(model, {})[_Effect.GUARD] = weakref.finalize(model, follow_devices(model))


def _replace(model: nn.Module, mode: Mode, what: _Effect, reference: Transfers | None) -> None:
    """Let the model hold this reference in place of what earlier dispatches of less standing began,
    and of its own.
    """
    ends = _ends.setdefault(model, {})
    former = [
        ends.pop(other)
        for other in _Effect
        if other in ends and (other, what) != (_Effect.ASKED, _Effect.PATCHED)
    ]
    if reference is not None:
        ends[what] = weakref.finalize(model, release, reference)
    for end in former:
        end()
    if mode is Mode.NEVER:
        acquire(mode, holder="")  # which holds nothing, and says what others hold


def _reference(model: nn.Module, mode: Mode, several: bool) -> Transfers | None:
    if mode is Mode.NEVER or (mode is Mode.AUTO and not several):
        return None
    reference = acquire(mode, holder=f"a dispatched {type(model).__name__}")
    if reference.pairs and any(isinstance(module, nn.DataParallel) for module in model.modules()):
        say(
            f"{type(model).__name__} contains a torch.nn.DataParallel: it copies weights and sums "
            "gradients with NCCL, which safe transfers do not stage. Remove it, or train with "
            "accelerate launch"
        )
    return reference


def _mode(safe_transfers: Mode | str, force_cuda_to_cuda_via_cpu: bool) -> Mode:
    mode = mode_named(safe_transfers)
    if force_cuda_to_cuda_via_cpu and mode is Mode.NEVER:
        raise UsageError(
            "force_cuda_to_cuda_via_cpu=True turns staging on and safe_transfers='never' turns it "
            "off: remove one of them"
        )
    return mode_meant(Mode.ALWAYS if force_cuda_to_cuda_via_cpu else mode)


def _by_name(function: Callable[..., Any], *given: Any, **named: Any) -> inspect.BoundArguments:
    """Return the arguments of a function of accelerate with their names. Raises TypeError for what
    it does not take.
    """
    bound = inspect.signature(function).bind(*given, **named)
    bound.arguments.update(_with_lists(bound.arguments))
    return bound


def _with_lists(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with lists for sets and tuples of names.

    transformers keeps its classes that must not be split in a set, which accelerate 1.6.0 takes for
    the name of one.
    """
    names = ("skip_keys", "no_split_module_classes", "preload_module_classes")
    return {
        key: (
            sorted(value) if key in names and isinstance(value, (set, frozenset, tuple)) else value
        )
        for key, value in arguments.items()
    }


def _places(model: nn.Module, others: Any = None) -> Iterator[torch.device]:
    """Yield where the tensors of a model are, and those of ``others``, a dict of tensors or
    nothing.
    """
    for tensor in (
        *model.parameters(),
        *model.buffers(),
        *(others.values() if isinstance(others, dict) else ()),
    ):
        yield tensor.device


def _are_several(places: Iterable[Any]) -> bool:
    return len(_accelerators(places)) > 1


def _accelerators(places: Iterable[Any]) -> set[int]:
    """Return the devices of the accelerator among these places, which may be "cpu", "disk" and
    "meta" too.
    """
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


_patched_mode = Mode.AUTO
"""The mode of models that accelerate dispatches while the patch is on."""


def patch_dispatch(mode: Mode) -> None:
    """Let every model that accelerate dispatches from now on hold a reference to safe transfers.

    This is for code that calls accelerate by itself: transformers' ``from_pretrained``, PEFT. Under
    whatever name they imported the function, ``accelerate.big_modeling`` looks up two functions at
    each call: the one that checks the map, and the one that attaches the hooks. Both are replaced.
    A model that goes to one device as a whole gets no hooks, and is moved behind the first.

    A second call changes the mode. It is the dispatch of a model on two or more accelerators that
    makes "auto" measure.
    """
    global _patched_mode
    _patched_mode = mode
    _DISPATCH.install()


def unpatch_dispatch() -> None:
    """Undo the patch, and leave later patches of others in place.

    Models that were dispatched keep their references: taking those away would let their next
    forward copy directly. ``remove_safe_transfers(model)`` does that.
    """
    _DISPATCH.remove()


def _in_front_of_check(original: Callable[..., Any]) -> Callable[..., Any]:
    def check(model: nn.Module, device_map: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        done = original(model, device_map, *args, **kwargs)
        places = set(device_map.values())
        if len(places) == 1:
            hold(model, places, _patched_mode)
        return done

    return check


def _in_front_of_attach(original: Callable[..., Any]) -> Callable[..., Any]:
    def attach(module: nn.Module, execution_device: Any = None, *args: Any, **kwargs: Any) -> Any:
        places = (
            execution_device.values()
            if isinstance(execution_device, Mapping)
            else (execution_device,)
        )
        hold(module, places, _patched_mode)
        done = original(module, execution_device, *args, **kwargs)
        forget_freed_weights(module)
        return done

    return attach


_DISPATCH = Patches(
    Patch("accelerate.big_modeling:check_device_map", _in_front_of_check),
    Patch("accelerate.big_modeling:attach_align_device_hook_on_blocks", _in_front_of_attach),
)
