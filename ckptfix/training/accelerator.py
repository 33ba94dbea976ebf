"""The guarded Accelerator, and the patch that guards every Accelerator of a process."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import accelerate

from ckptfix.devices.dispatching import patch_dispatch, unpatch_dispatch
from ckptfix.devices.patching import Patch, Patches
from ckptfix.devices.transfers import Mode, mode_named
from ckptfix.training import guard
from ckptfix.training.guard import OnReprepare, Settings, guard_of
from ckptfix.training.loading.load_report import LoadPolicy, Requirement
from ckptfix.training.ranks import timeout_of
from ckptfix.training.resuming import loader_positions, positions, run_state
from ckptfix.training.resuming.guarded_load import load_state
from ckptfix.training.saving.checked_saves import checks_saves, forget
from ckptfix.training.saving.save_state import save_model, save_state
from ckptfix.training.trainer.trainer_patch import patch_trainer, unpatch_trainer
from ckptfix.training.trainer.trainer_resumes import require_states

_GUARDED: dict[str, Callable[..., Any]] = {
    "prepare": guard.prepare,
    "prepare_model": guard.prepare_model,
    "prepare_optimizer": guard.prepare_other,
    "prepare_scheduler": guard.prepare_other,
    "prepare_data_loader": guard.prepare_other,
    "register_for_checkpointing": guard.register_for_checkpointing,
    "free_memory": guard.free_memory,
    "clear": guard.free_memory,
    "backward": guard.backward,
    "save_state": save_state,
    "load_state": load_state,
    "save_model": save_model,
}
"""Method of ``accelerate.Accelerator`` -> the function that guards it."""


def _in_front(
    name: str,
    signature_of: Callable[..., Any],
    find: Callable[[accelerate.Accelerator], Callable[..., Any]],
) -> Callable[..., Any]:
    """Return a method of this name with its guard in front of the method that ``find`` gives."""
    stand_in = _GUARDED[name]
    first = list(inspect.signature(signature_of).parameters.values())[1]
    takes_one = first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD

    @functools.wraps(signature_of)
    def method(self: accelerate.Accelerator, *args: Any, **kwargs: Any) -> Any:
        original = find(self)
        if takes_one and not args:
            if first.name in kwargs:
                args = (kwargs.pop(first.name),)
            elif first.default is inspect.Parameter.empty:
                return original(**kwargs)  # its own error names what is missing
        return stand_in(self, original, *args, **kwargs)

    return method


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """A drop-in ``accelerate.Accelerator`` that cannot register an object twice.

    Takes what the stock one takes, and ``on_reprepare`` ("warn", "raise" or "allow"): what to do
    with an object that it holds already. ``check_backward``: warn when gradients came from
    ``loss.backward()`` although gradients are accumulated or scaled. ``tensor_digests``: record the
    sha256 of tensors and files of each save. ``save_together``: every process calls ``save_state``,
    and all of them save as one, or none does; False for a script that calls it on the main process
    alone. ``save_timeout``: seconds after which a save that waits for other processes ends with
    OperationError; by default what CKPTFIX_SAVE_TIMEOUT says, else 540. ``check_saves``: warn once
    of each kind of fault that makes a save load as something else; by default what
    CKPTFIX_CHECK_SAVES says (0 or 1), else 1.
    """

    def __init__(
        self,
        *args: Any,
        on_reprepare: OnReprepare | str = OnReprepare.WARN,
        check_backward: bool = True,
        tensor_digests: bool = False,
        save_together: bool = True,
        save_timeout: float | None = None,
        check_saves: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Make an accelerator; other arguments go to ``accelerate.Accelerator``."""
        # A wrong value is said now, not at the first save.
        timeout_of(save_timeout)
        checks_saves(check_saves)
        guard_of(
            self,
            Settings(
                OnReprepare(on_reprepare),
                check_backward,
                tensor_digests,
                save_together,
                save_timeout,
                check_saves,
            ),
        )
        super().__init__(*args, **kwargs)

    def resume_dataloader(self, dataloader: Any) -> Any:
        """Return what is left of the epoch in which the loaded checkpoint was saved; iterate it in
        that epoch.

        Between epochs, and for a loader with ``use_stateful_dataloader``, it is the loader itself.
        If the script left that epoch by ``break``, its rest is returned too, with a warning.
        ``dataloader``: what ``prepare`` returned. Its ``iteration`` is the number of that epoch.
        """
        return loader_positions.resume_dataloader(self, dataloader)


def _of_the_base(name: str) -> Callable[[accelerate.Accelerator], Callable[..., Any]]:
    # Looked up at each call: a patch of the base class, ours or another's, stays in the chain.
    return lambda self: getattr(super(Accelerator, self), name)


for _name in _GUARDED:
    setattr(
        Accelerator,
        _name,
        _in_front(_name, getattr(accelerate.Accelerator, _name), _of_the_base(_name)),
    )


def _guarded(name: str) -> Patch:
    return Patch(
        f"accelerate.accelerator:Accelerator.{name}",
        lambda original: _in_front(name, original, lambda self: original.__get__(self)),
    )


_GUARD = Patches(
    *map(_guarded, _GUARDED),
    Patch(
        "accelerate.accelerator:Accelerator.resume_dataloader",
        lambda _: loader_positions.resume_dataloader,
        is_new=True,
    ),
)


def patch_accelerate(
    *,
    on_reprepare: OnReprepare | str = OnReprepare.WARN,
    check_backward: bool = True,
    tensor_digests: bool = False,
    save_together: bool = False,
    save_timeout: float | None = None,
    check_saves: bool | None = None,
    safe_transfers: Mode | str = Mode.AUTO,
    missing_states: Requirement | str | LoadPolicy | None = None,
) -> None:
    """Guard every ``accelerate.Accelerator`` of this process, those made earlier too. A second call
    changes settings.

    So are every ``transformers.Trainer`` and ``save_pretrained`` of transformers and PEFT, whether
    these have been imported or are imported later.

    For code that makes its own Accelerator: transformers' Trainer, third-party loops. The settings
    are those of ``Accelerator``, but ``save_together`` is off: code that knows nothing of it may
    save on some processes only. ``unpatch_accelerate`` ends it.

    ``safe_transfers``: "auto", "always" or "never", as ``ckptfix.devices.dispatch_model`` takes it,
    for every model that accelerate dispatches from now on, transformers'
    ``from_pretrained(device_map="auto")`` included. The environment variable CKPTFIX_SAFE_TRANSFERS
    says what "auto" means.

    ``missing_states``: "require", "warn" or "ignore", what a Trainer does that resumes from a
    checkpoint without its optimizer, scheduler or random states; a ``LoadPolicy`` says it for each.
    By default what CKPTFIX_MISSING_STATES says, else "require".
    """
    mode = mode_named(safe_transfers)
    require_states(missing_states)
    timeout_of(save_timeout)
    checks_saves(check_saves)
    guard.DEFAULTS.on_reprepare = OnReprepare(on_reprepare)
    guard.DEFAULTS.check_backward = check_backward
    guard.DEFAULTS.tensor_digests = tensor_digests
    guard.DEFAULTS.save_together = save_together
    guard.DEFAULTS.save_timeout = save_timeout
    guard.DEFAULTS.check_saves = check_saves
    _GUARD.install()
    patch_dispatch(mode)
    patch_trainer()


def unpatch_accelerate() -> None:
    """Undo the patch, and leave in place what others patched since.

    Models that were dispatched meanwhile keep their safe transfers until ``remove_safe_transfers``
    or their end.
    """
    unpatch_trainer()
    unpatch_dispatch()
    forget()
    _GUARD.remove()
    for accelerator, its_guard in list(guard.GUARDS.items()):
        if not isinstance(accelerator, Accelerator):
            its_guard.backward.stop()
            positions.forget(accelerator)
            del guard.GUARDS[accelerator]
    run_state.release_classes()
