"""The patch that puts the guards of saves and resumes into transformers and PEFT, once a script has
imported them.

Neither transformers nor torch is imported from here: a script that does without them pays nothing,
and what it sets before it imports them counts.
"""

import functools
import importlib
import inspect
from typing import Any

from ckptfix.devices.patching import Method, Patch, Patches

_SAVES, _RESUMES = (f"{__package__}.trainer_{what}" for what in ("saves", "resumes"))
_CHECKS = "ckptfix.training.saving.checked_saves"


def patch_trainer() -> None:
    """Guard every Trainer and ``save_pretrained``, now or when their libraries are imported.

    A second call changes nothing.
    """
    _TRAINER.install()


def unpatch_trainer() -> None:
    """Undo the patch, and leave in place what others patched since."""
    _TRAINER.remove()


def _function(module: str, name: str) -> Method:
    """Return a function of a module that imports transformers, when it is called first."""
    function: Method = getattr(importlib.import_module(module), name)
    return function


def _in_front(original: Method, *, module: str, guard: str) -> Method:
    """Return a method with its guard in front, which gets its own arguments by position and the
    others by name.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = _function(module, guard)
        given = list(args)
        for name in list(inspect.signature(function).parameters)[2 + len(given) :]:
            if name not in kwargs:
                break
            given.append(kwargs.pop(name))
        return function(self, functools.partial(original, self), *given, **kwargs)

    return method


def _in_its_place(_: Method, *, module: str, name: str) -> Method:
    return lambda *args, **kwargs: _function(module, name)(*args, **kwargs)


def _guarded(where: str, module: str, guard: str) -> Patch:
    return Patch(where, functools.partial(_in_front, module=module, guard=guard))


_TRAINER = Patches(
    Patch(
        "transformers.trainer_utils:get_last_checkpoint",
        functools.partial(_in_its_place, module=_RESUMES, name="get_last_checkpoint"),
        everywhere=True,
    ),
    _guarded("transformers.trainer:Trainer._save_checkpoint", _SAVES, "save_checkpoint"),
    _guarded("transformers.trainer:Trainer.train", _RESUMES, "train"),
    _guarded("transformers.trainer:Trainer._load_optimizer_and_scheduler", _RESUMES, "load_states"),
    _guarded("transformers.trainer:Trainer._load_rng_state", _RESUMES, "load_random_states"),
    _guarded(
        "transformers.modeling_utils:PreTrainedModel.save_pretrained", _CHECKS, "save_pretrained"
    ),
    _guarded("peft.peft_model:PeftModel.save_pretrained", _CHECKS, "save_pretrained"),
)
