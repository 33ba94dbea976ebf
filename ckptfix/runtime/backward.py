"""Gradients that did not come from ``accelerator.backward`` although it had to scale or divide them.

Nothing of torch is patched: ``accelerator.backward`` is counted, and a hook of the optimizer looks at the count when it
steps. The count is one for all accelerators, so that a second one that shares an optimizer raises no false alarm.
"""

import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator

from ckptfix.runtime.callers import calling_line
from ckptfix.runtime.running import as_given

_calls = itertools.count(1)
_latest = 0


def count_backward() -> None:
    """Take note that some accelerator's ``backward`` was called."""
    global _latest
    _latest = next(_calls)


class BackwardCheck:
    """Watches the optimizers of one Accelerator, and warns once."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.warned = False
        self._accelerator = weakref.ref(accelerator)
        self._handles: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def watch(self, optimizer: Any) -> None:
        """Look at the count whenever this optimizer, the one inside accelerate's wrapper, steps."""
        register = getattr(optimizer, "register_step_pre_hook", None)
        if register is None or optimizer in self._handles:
            return
        self._handles[optimizer] = register(_hook(weakref.ref(self)))

    def stop(self) -> None:
        """Watch no optimizer any more."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def stepped(self, optimizer: Any) -> None:
        """Warn when gradients are there that need ``accelerator.backward`` and none was called since the last step."""
        accelerator = self._accelerator()
        if accelerator is None or self.warned:
            return
        reason = _reason(accelerator)
        if reason is None or not _has_gradients(optimizer):
            return
        self.warned = True
        line = calling_line()
        switch = as_given("check_backward=False", "ckptfix run --no-check-backward SCRIPT")
        warnings.warn_explicit(
            f"{type(optimizer).__name__}.step() at {line} uses gradients that did not come from "
            f"accelerator.backward(loss): {reason} Call it instead of loss.backward(). If this is "
            f"meant, {switch} ends the warning.",
            UserWarning,
            line.path,
            line.number,
        )


def _hook(check: "weakref.ref[BackwardCheck]") -> Callable[..., None]:
    seen = _latest  # at the optimizer's last step

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal seen
        watching = check()
        if watching is not None and seen == _latest:
            watching.stepped(optimizer)
        seen = _latest

    hook: Callable[..., None] = torch.compiler.disable(before_step)
    return hook


def _reason(accelerator: Accelerator) -> str | None:
    """Return what loss.backward() leaves out here; None when it leaves nothing out."""
    if accelerator.distributed_type.value in ("DEEPSPEED", "MEGATRON_LM"):
        return None  # their engines divide and scale, whoever calls them
    if accelerator.scaler is not None and accelerator.scaler.is_enabled():
        return "the loss was not scaled, so dividing by the scale makes the updates vanish."
    steps = accelerator.gradient_accumulation_steps
    if steps > 1:
        return f"over {steps} accumulated batches they are {steps} times too large."
    return None


def _has_gradients(optimizer: Any) -> bool:
    return any(
        parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]
    )
