"""The patch of accelerate's own dispatch, for code that calls it by itself: transformers' ``from_pretrained``, PEFT.

Whoever dispatches, under whatever name they imported the function, ``accelerate.big_modeling`` looks up two functions
at each call: the one that checks the map, and the one that attaches the hooks. Both get a stand-in. A model that goes
to one device as a whole gets no hooks, and is moved behind the first.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import accelerate.big_modeling
from torch import nn

from ckptfix.runtime.devices.dispatching import hold
from ckptfix.runtime.devices.transfers import Mode
from ckptfix.runtime.devices.tying import forget_freed_weights

_CHECK, _ATTACH = "check_device_map", "attach_align_device_hook_on_blocks"

_mode: Mode | None = None
"""What models get that accelerate dispatches; None: nothing, the patch is off."""

_originals: dict[str, Callable[..., Any]] = {}


def patch_dispatch(mode: Mode) -> None:
    """Let every model that accelerate dispatches from now on hold a reference to safe transfers.

    A second call changes the mode. It is the dispatch of a model on two or more accelerators that makes "auto" measure.
    """
    global _mode
    _mode = mode
    if not _originals:
        for name, in_front_of in ((_CHECK, _in_front_of_check), (_ATTACH, _in_front_of_attach)):
            _originals[name] = getattr(accelerate.big_modeling, name)
            setattr(accelerate.big_modeling, name, in_front_of(_originals[name]))


def unpatch_dispatch() -> None:
    """Take the patch back, and leave in place what others patched since.

    Models that were dispatched keep their references: taking those away would let their next forward copy directly.
    ``remove_safe_transfers(model)`` does that.
    """
    global _mode
    _mode = None
    while _originals:
        name, original = _originals.popitem()
        if getattr(getattr(accelerate.big_modeling, name), "__wrapped__", None) is original:
            setattr(accelerate.big_modeling, name, original)


def _in_front_of_check(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def check(model: nn.Module, device_map: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        done = original(model, device_map, *args, **kwargs)
        places = set(device_map.values())
        if _mode is not None and len(places) == 1:
            hold(model, places, _mode)
        return done

    return check


def _in_front_of_attach(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attach(module: nn.Module, execution_device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _mode is None:
            return original(module, execution_device, *args, **kwargs)
        places = execution_device.values() if isinstance(execution_device, Mapping) else (execution_device,)
        hold(module, places, _mode)
        done = original(module, execution_device, *args, **kwargs)
        forget_freed_weights(module)
        return done

    return attach
