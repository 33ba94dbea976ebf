"""Accelerate's ``dispatch_model`` and ``load_checkpoint_and_dispatch`` where P2P copies may be
broken.

A dispatched model holds one reference to the staging of this process, forward and backward passes
included, until ``remove_safe_transfers`` or until it is collected: keep the model until its last
backward pass has run. A deep copy of it holds none of its own.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any

import accelerate
import accelerate.big_modeling
import torch
from torch import nn

from ckptfix.devices.callers import warn_caller
from ckptfix.devices.patching import Patch, Patches
from ckptfix.devices.torch_devices import device_type
from ckptfix.devices.transfers import Mode, Transfers, acquire, mode_meant, release


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


class _Origin(Enum):
    """The dispatch that a model's reference comes from."""

    ASKED = "dispatch_model"
    PATCHED = "the patch of accelerate"


_Ends = dict[_Origin, "weakref.finalize[..., Any]"]

_ends: "weakref.WeakKeyDictionary[nn.Module, _Ends]" = weakref.WeakKeyDictionary()
"""Dispatched model -> origin of a reference -> function that gives it back."""

_under_way: list[nn.Module] = []
"""Models that are being dispatched by this module, which the patch of accelerate must leave alone.
"""


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, int | str | torch.device],
    *more: Any,
    safe_transfers: Mode | str = Mode.AUTO,
    **accelerate_arguments: Any,
) -> nn.Module:
    """Do ``accelerate.dispatch_model`` with safe copies between devices.

    ``safe_transfers``: "auto" stages the pairs of devices that are not proven healthy, and measures
    for up to 30 s when nothing is known of this hardware; only a model on two or more accelerators
    asks for that. "always" stages every pair, "never" none. Other arguments are accelerate's, by
    name or, as there, by place.

    Dispatched again, the model holds what the last call says. Raises UsageError for another word,
    and what accelerate raises; the model then holds what it held before.
    """
    mode = mode_meant(safe_transfers)
    given = _by_name(
        accelerate.dispatch_model, model, dict(device_map), *more, **accelerate_arguments
    )
    places = (
        *device_map.values(),
        given.arguments.get("main_device"),
        *_places(model, given.arguments.get("state_dict")),
    )
    with _dispatching(model, mode, several=_are_several(places)):
        dispatched: nn.Module = accelerate.dispatch_model(*given.args, **given.kwargs)
    return dispatched


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Any,
    device_map: str | Mapping[str, int | str | torch.device] | None = None,
    *more: Any,
    safe_transfers: Mode | str = Mode.AUTO,
    **accelerate_arguments: Any,
) -> nn.Module:
    """Do ``accelerate.load_checkpoint_and_dispatch`` with safe copies between devices, also while
    loading.

    The arguments are those of ``dispatch_model`` above; others are accelerate's. With a map in one
    word ("auto", "balanced", ...) a machine with two or more devices counts as used.
    """
    mode = mode_meant(safe_transfers)
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
    with _dispatching(model, mode, several=several):
        dispatched: nn.Module = accelerate.load_checkpoint_and_dispatch(*given.args, **given.kwargs)
    return dispatched


def remove_safe_transfers(model: nn.Module) -> None:
    """End what ``dispatch_model`` began with a model, or with a model inside of it; where nothing
    was, do nothing.

    Its reference is given back. Accelerate's hooks stay: they are accelerate's to remove. Other
    references of this process keep staging on.
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
    it.
    """
    if any(model is other for other in _under_way):
        return
    meant = mode_meant(mode)
    _replace(
        model,
        meant,
        _Origin.PATCHED,
        _reference(model, meant, _are_several((*places, *_places(model)))),
    )


@contextmanager
def _dispatching(model: nn.Module, mode: Mode, *, several: bool) -> Iterator[None]:
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
    _replace(model, mode, _Origin.ASKED, reference)


def _replace(model: nn.Module, mode: Mode, origin: _Origin, reference: Transfers | None) -> None:
    """Let the model hold this reference in place of its former ones. What the patch gives never
    takes the place of what somebody asked for.
    """
    ends = _ends.setdefault(model, {})
    replaced = _Origin if origin is _Origin.ASKED else (_Origin.PATCHED,)
    former = [ends.pop(each) for each in replaced if each in ends]
    if reference is not None:
        ends[origin] = weakref.finalize(model, release, reference)
    for end in former:
        end()
    if mode is Mode.NEVER:
        acquire(mode, holder="")  # which holds nothing, and says what others hold


def _reference(model: nn.Module, mode: Mode, several: bool) -> Transfers | None:
    if mode is Mode.NEVER or (mode is Mode.AUTO and not several):
        return None
    reference = acquire(mode, holder=f"a dispatched {type(model).__name__}")
    if reference.pairs and any(isinstance(module, nn.DataParallel) for module in model.modules()):
        warn_caller(
            f"{type(model).__name__} contains a torch.nn.DataParallel: it copies weights and sums "
            "gradients with NCCL, which safe transfers do not stage. Remove it, or train with "
            "accelerate launch"
        )
    return reference


def _by_name(function: Callable[..., Any], *given: Any, **named: Any) -> inspect.BoundArguments:
    """Return the arguments of a function of accelerate with their names. Raises TypeError for what
    it does not take.
    """
    bound = inspect.signature(function).bind(*given, **named)
    for key in ("skip_keys", "no_split_module_classes", "preload_module_classes"):
        # transformers keeps its classes that must not be split in a set, which accelerate 1.6.0
        # takes for the name of one.
        if isinstance(names := bound.arguments.get(key), set | frozenset | tuple):
            bound.arguments[key] = sorted(names)
    return bound


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
    """Return whether there are two devices of the accelerator among these places, which may be
    "cpu", "disk" and "meta" too.
    """
    name = device_type()
    accelerators = set()
    for place in places:
        if name is None or place is None or place == "disk":
            continue
        where = torch.device(place)
        if where.type == name:
            current = torch.get_device_module(name).current_device
            accelerators.add(int(current() if where.index is None else where.index))
    return len(accelerators) > 1


_patch = Patches()
"""The patch of accelerate that is on, or was last."""


def patch_dispatch(mode: Mode) -> None:
    """Let every model that accelerate dispatches from now on hold a reference to safe transfers.

    This is for code that calls accelerate by itself: transformers' ``from_pretrained``, PEFT. Under
    whatever name they imported the function, ``accelerate.big_modeling`` looks up two functions at
    each call: the one that checks the map, and the one that attaches the hooks. Both are replaced.
    A model that goes to one device as a whole gets no hooks, and is moved behind the first.

    A second call changes the mode. It is the dispatch of a model on two or more accelerators that
    makes "auto" measure.
    """
    global _patch
    _patch.remove()
    where = "accelerate.big_modeling:"
    _patch = Patches(
        Patch(f"{where}check_device_map", partial(_in_front_of_check, mode=mode)),
        Patch(
            f"{where}attach_align_device_hook_on_blocks", partial(_in_front_of_attach, mode=mode)
        ),
    )
    _patch.install()


def unpatch_dispatch() -> None:
    """Undo the patch, and leave later patches of others in place.

    Models that were dispatched keep their references: taking those away would let their next
    forward copy directly. ``remove_safe_transfers(model)`` does that.
    """
    _patch.remove()


def _in_front_of_check(original: Callable[..., Any], mode: Mode) -> Callable[..., Any]:
    def check(model: nn.Module, device_map: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        done = original(model, device_map, *args, **kwargs)
        places = set(device_map.values())
        if len(places) == 1:
            hold(model, places, mode)
        return done

    return check


def _in_front_of_attach(original: Callable[..., Any], mode: Mode) -> Callable[..., Any]:
    def attach(module: nn.Module, execution_device: Any = None, *args: Any, **kwargs: Any) -> Any:
        places = (
            execution_device.values()
            if isinstance(execution_device, Mapping)
            else (execution_device,)
        )
        hold(module, places, mode)
        done = original(module, execution_device, *args, **kwargs)
        forget_freed_weights(module)
        return done

    return attach
