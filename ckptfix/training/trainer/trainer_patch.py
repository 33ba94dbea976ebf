"""The patch that puts the guards of saves and resumes into transformers, as soon as a script has imported it.

Neither transformers nor torch is imported from here: a script that does without them pays nothing, and what it sets
before it imports them counts.
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
_GUARDED = {
    "_save_checkpoint": (_SAVES, "save_checkpoint"),
    "train": (_RESUMES, "train"),
    "_load_optimizer_and_scheduler": (_RESUMES, "load_states"),
    "_load_rng_state": (_RESUMES, "load_random_states"),
}
"""Method of ``transformers.Trainer`` -> the module and the name of the function that guards it."""

_MODULES = ("transformers.trainer_utils", "transformers.trainer")
_LAST = "get_last_checkpoint"

_originals: dict[str, Callable[..., Any]] = {}
_is_watched, _is_on = False, False


def patch_trainer() -> None:
    """Guard every Trainer of this process, now or when transformers is imported. A second call changes nothing."""
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
    last = _originals.pop(_LAST, None)
    if last is not None:
        _replace_everywhere(get_last_checkpoint, last)
    for name, original in _originals.items():
        trainer = sys.modules[_MODULES[1]].Trainer
        if getattr(getattr(trainer, name), "__wrapped__", None) is original:
            setattr(trainer, name, original)
    _originals.clear()


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint in a folder, in the place of transformers' function of this name."""
    found: str | None = _function(_RESUMES, _LAST)(folder)
    return found


def _patch() -> None:
    """Patch what is there: transformers imports one of its modules after the other."""
    if not _is_on:
        return
    utilities, module = (sys.modules.get(name) for name in _MODULES)
    last = vars(utilities).get(_LAST) if utilities is not None else None
    if last is not None and last is not get_last_checkpoint:
        _originals[_LAST] = last
        _replace_everywhere(last, get_last_checkpoint)
    trainer = vars(module).get("Trainer") if module is not None else None
    for name, (where, guard) in _GUARDED.items() if trainer is not None else ():
        if name not in _originals:
            _originals[name] = getattr(trainer, name)
            setattr(trainer, name, _in_front(_originals[name], where, guard))


def _replace_everywhere(old: Any, new: Any) -> None:
    """Put a function in the place of another in every module that has imported it, under whatever name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and names is not globals():
            for name in [name for name, value in list(names.items()) if value is old]:
                names[name] = new


def _function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _in_front(original: Callable[..., Any], module: str, guard: str) -> Callable[..., Any]:
    """Return a method with its guard in front, which gets its own arguments by position and the others by name."""

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
