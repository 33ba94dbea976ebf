"""Objects that some accelerator prepared before, brought back to what they were, to be prepared in earnest."""

import gc
import weakref
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckptfix.runtime.held import innermost, levels

_PREPARED = "_is_accelerate_prepared"
_MADE: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def made_here(wrapper: object) -> None:
    """Remember that an accelerator made this: older versions of accelerate leave no flag."""
    _MADE[id(wrapper)] = wrapper


def as_new(accelerator: Accelerator, thing: Any) -> Any:
    """Return an object as if it had never been prepared: a flag that came from elsewhere proves nothing.

    Set by another accelerator, or copied along by deepcopy, accelerate takes the flag for its own, skips the
    preparation, and leaves a model without autocast or gradient synchronisation.
    """
    if isinstance(thing, torch.nn.Module):
        return _model_as_new(accelerator, thing)
    if type(thing) in (AcceleratedOptimizer, AcceleratedScheduler):
        return innermost(thing)
    return thing  # a data loader that was sharded stays so: sharded again it would lose data


def wrapper_of(model: torch.nn.Module) -> Any:
    """Return the DistributedDataParallel that lives around a model; the model itself where none does."""
    return next(
        (
            thing
            for thing in gc.get_objects()
            if type(thing) is DistributedDataParallel and any(level is model for level in levels(thing))
        ),
        model,
    )


def _model_as_new(accelerator: Accelerator, model: torch.nn.Module) -> Any:
    around = list(levels(model))
    stale = _MADE.get(id(model)) is model
    for level in around:
        stale |= vars(level).pop(_PREPARED, False)
        stale |= _strip_autocast(level)
    if not stale:
        return model
    data_parallel = [
        i for i, level in enumerate(around) if isinstance(level, DataParallel | DistributedDataParallel)
    ]
    first = data_parallel[-1] + 1 if data_parallel else 0
    if accelerator.state.dynamo_plugin.backend.value != "NO":
        first = max(first, next((i for i, level in enumerate(around) if not _is_compiled(level)), 0))
    return around[first]


def _is_compiled(level: object) -> bool:
    return "_orig_mod" in {**vars(level), **vars(level).get("_modules", {})}


def _strip_autocast(model: Any) -> bool:
    """Take accelerate's autocast off ``forward`` and return whether it was there; leave what others put in front."""
    original = getattr(model, "_original_forward", None)
    forward = vars(model).get("forward")
    if original is None or forward is None:
        return False
    wanted = getattr(original, "__func__", original)
    inner = getattr(forward, "__func__", forward)
    while inner is not wanted:
        inner = getattr(inner, "__wrapped__", None)
        if inner is None:
            return False
    if wanted is getattr(type(model), "forward", None):
        del model.__dict__["forward"]
    else:
        model.forward = original
    for level in levels(model):
        vars(level).pop("_original_forward", None)
    return True
