"""The patch that puts the guards of saves and resumes into transformers and PEFT, once a script has
imported them.

Neither transformers nor torch is imported from here: a script that does without them pays nothing,
and what it sets before it imports them counts.
"""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from ckptfix.training.running import when_imported

_SAVES, _RESUMES = (f"{__package__}.trainer_{what}" for what in ("saves", "resumes"))
_CHECKS = "ckptfix.training.saving.checked_saves"
_GUARDED = {
    ("transformers.trainer", "Trainer", "_save_checkpoint"): (_SAVES, "save_checkpoint"),
    ("transformers.trainer", "Trainer", "train"): (_RESUMES, "train"),
    ("transformers.trainer", "Trainer", "_load_optimizer_and_scheduler"): (
        _RESUMES,
        "load_states",
    ),
    ("transformers.trainer", "Trainer", "_load_rng_state"): (_RESUMES, "load_random_states"),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"): (
        _CHECKS,
        "save_pretrained",
    ),
    ("peft.peft_model", "PeftModel", "save_pretrained"): (_CHECKS, "save_pretrained"),
}
"""Module, class and method -> the module and the name of the function that guards it."""

_UTILITIES = "transformers.trainer_utils"
_MODULES = (_UTILITIES, *dict.fromkeys(module for module, _, _ in _GUARDED))
_LAST = "get_last_checkpoint"

_originals: dict[tuple[str, str, str], Callable[..., Any]] = {}
_last: list[Callable[..., Any]] = []
"""transformers' own ``get_last_checkpoint``, while the patch is on."""

_is_watched, _is_on = False, False


def patch_trainer() -> None:
    """Guard every Trainer and ``save_pretrained``, now or when their libraries are imported.

    A second call changes nothing.
    """
    global _is_watched, _is_on
    _is_on = True
    if _is_watched:
        _patch()
        return
    _is_watched = True
    for name in _MODULES:
        when_imported(name, _patch)


def unpatch_trainer() -> None:
    """Undo the patch, and leave in place what others patched since."""
    global _is_on
    _is_on = False
    while _last:
        _replace_everywhere(get_last_checkpoint, _last.pop())
    for (module, kind, name), original in _originals.items():
        patched = getattr(sys.modules[module], kind)
        if getattr(getattr(patched, name), "__wrapped__", None) is original:
            setattr(patched, name, original)
    _originals.clear()


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint in a folder, in the place of transformers' function of
    this name.
    """
    found: str | None = _function(_RESUMES, _LAST)(folder)
    return found


def _patch() -> None:
    """Patch what is there: transformers imports one of its modules after the other."""
    if not _is_on:
        return
    last = vars(sys.modules[_UTILITIES]).get(_LAST) if _UTILITIES in sys.modules else None
    if last is not None and last is not get_last_checkpoint:
        _last[:] = [last]
        _replace_everywhere(last, get_last_checkpoint)
    for method, (where, guard) in _GUARDED.items():
        module, kind, name = method
        # Not by getattr: transformers imports what it does not have yet.
        patched = vars(sys.modules[module]).get(kind) if module in sys.modules else None
        if patched is not None and method not in _originals:
            _originals[method] = getattr(patched, name)
            setattr(patched, name, _in_front(_originals[method], where, guard))


def _replace_everywhere(old: Any, new: Any) -> None:
    """Put a function in the place of another in every module that has imported it, under whatever
    name.
    """
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and names is not globals():
            for name in [name for name, value in list(names.items()) if value is old]:
                names[name] = new


def _function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _in_front(original: Callable[..., Any], module: str, guard: str) -> Callable[..., Any]:
    """Return a method with its guard in front, which gets its own arguments by position and the
    others by name.
    """

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_on:
            return original(self, *args, **kwargs)
        function = _function(module, guard)
        given = list(args)
        for name in list(inspect.signature(function).parameters)[2 + len(given) :]:
            if name not in kwargs:
                break
            given.append(kwargs.pop(name))
        return function(self, functools.partial(original, self), *given, **kwargs)

    return method
