"""The patch of accelerate's own dispatch, for code that calls it by itself: transformers' ``from_pretrained``, PEFT.

Whoever dispatches, under whatever name they imported the function, ``accelerate.big_modeling`` looks up the function
that attaches the hooks at each call. That one gets a stand-in.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import accelerate.big_modeling
from torch import nn

from ckptfix.runtime.devices.dispatching import hold
from ckptfix.runtime.devices.transfers import Mode
from ckptfix.runtime.devices.tying import forget_freed_weights

_NAME = "attach_align_device_hook_on_blocks"

_mode: Mode | None = None
"""What models get that accelerate dispatches; None: nothing, the patch is off."""

_original: Callable[..., Any] | None = None


def patch_dispatch(mode: Mode) -> None:
    """Let every model that accelerate dispatches from now on hold a reference to safe transfers.

    A second call changes the mode. It is the dispatch of a model on two or more accelerators that makes "auto" measure.
    """
    global _mode, _original
    _mode = mode
    if _original is None:
        _original = getattr(accelerate.big_modeling, _NAME)
        setattr(accelerate.big_modeling, _NAME, _in_front_of(_original))


def unpatch_dispatch() -> None:
    """Take the patch back, and leave in place what others patched since.

    Models that were dispatched keep their references: taking those away would let their next forward copy directly.
    ``remove_safe_transfers(model)`` does that.
    """
    global _mode, _original
    _mode = None
    current = getattr(accelerate.big_modeling, _NAME)
    if _original is not None and getattr(current, "__wrapped__", None) is _original:
        setattr(accelerate.big_modeling, _NAME, _original)
    _original = None


def _in_front_of(original: Callable[..., Any]) -> Callable[..., Any]:
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
