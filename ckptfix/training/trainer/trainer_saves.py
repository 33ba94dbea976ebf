"""Saves of transformers' Trainer: ``checkpoint-N`` is complete or absent.

transformers merged such saves twice and dropped them twice (#27820; #35580, reverted by #36112).
None of the causes applies here. One process of each disk renames (#27925, #28119), when all have
said that they have written, and none goes on before (#28015). They tell each other instead of
asking a network file system (#28364). Nodes with disks of their own commit what is on them
(#28848). The main process chooses one temporary name for all (#36076). A folder of the same step
changes places with the new one (#36099).
"""

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckptfix.checkpoint.filenames import TRAINER_STATE
from ckptfix.checkpoint.folder_names import TRAINER, checkpoint_number
from ckptfix.devices.callers import warn_caller
from ckptfix.devices.patching import Method, replaced
from ckptfix.errors import OperationError
from ckptfix.training.guard import guard_of
from ckptfix.training.ranks import cannot_agree
from ckptfix.training.resuming import run_state
from ckptfix.training.resuming.generators import capture, restore
from ckptfix.training.saving.checked_saves import check_save
from ckptfix.training.saving.joint_saves import JointSave
from ckptfix.training.saving.save_manifest import make_manifest
from ckptfix.training.saving.staged_saves import StagedSave, lift, plan_staging, rotate_steps

WHAT = "Trainer's save"

_NEVER_PUSHED = ".cache/huggingface"
"""Folder that ``huggingface_hub`` leaves out of every upload: a push in the background meets no
half-written files.
"""

_log = logging.getLogger("ckptfix")
_warned: set[str] = set()


def save_checkpoint(
    trainer: Any, method: Method, model: Any, trial: Any, *args: Any, **kwargs: Any
) -> Any:
    """Guard ``Trainer._save_checkpoint``: write to a staging folder, make durable, rename, then
    rotate.

    Raises what the method raises, on every process; nothing of that save is left then. A push to
    the hub begins, and ``on_save`` is called, when the checkpoint is in its place.
    """
    if _is_left_to_transformers(trainer):
        return method(model, trial, *args, **kwargs)
    accelerator = trainer.accelerator
    run = str(trainer._get_output_dir(trial=trial))
    name = TRAINER.replace("{}", str(trainer.state.global_step))
    best = trainer.state.best_model_checkpoint
    # The generators where the Trainer's part leaves them: the run goes on from there, as without
    # the guard.
    random = capture()
    pushes: list[object] = []

    def restore_best() -> None:
        trainer.state.best_model_checkpoint = best

    save = JointSave(accelerator, WHAT, undo=restore_best)
    names = save.meet(name)
    if len(set(names)) > 1:
        others = ", ".join(f"rank {rank}: {own}" for rank, own in enumerate(names))
        raise OperationError(
            f"{WHAT}: the processes save different steps ({others}); nothing was written"
        )
    hidden = _NEVER_PUSHED if trainer.args.push_to_hub else ""
    try:
        with save.staged(
            lambda: plan_staging(Path(run) / name, hidden=hidden, trainer=True)
        ) as staging:
            folder = str(staging.folder)
            with replaced(
                trainer,
                _get_output_dir=lambda trial=None: folder,
                _push_from_checkpoint=pushes.append,
            ):
                try:
                    result = method(model, trial, *args, **kwargs)
                finally:
                    random = capture()
            if not trainer.args.save_only_model:
                made = staging.folder / name
                made.mkdir(exist_ok=True)
                run_state.save(accelerator, made, random, {})
            _set_best(trainer.state, staging.folder, run, name)
        save.put_in_place(
            partial(_describe, trainer, staging, name), partial(_rotate, trainer, run, staging)
        )
    finally:
        restore(random)
    for _ in pushes:
        trainer._push_from_checkpoint(os.path.join(run, name))
    return result


def _is_left_to_transformers(trainer: Any) -> bool:
    """Return whether a save goes through as it is: its processes are not accelerate's, or cannot
    agree.
    """
    accelerator = trainer.accelerator
    several = accelerator.num_processes > 1
    return (
        cannot_agree(accelerator)
        or trainer.args.world_size != accelerator.num_processes
        or (several and not torch.distributed.is_initialized())
    )


def _set_best(state: Any, staged: Path, run: str, name: str) -> None:
    """Point the state to where the best model will lie: the Trainer found it in the staging folder,
    or not.
    """
    found = state.best_model_checkpoint
    if found is not None and Path(found).is_relative_to(staged):
        state.best_model_checkpoint = os.path.join(run, name)
    elif step := getattr(state, "best_global_step", None):  # not in 4.44
        best = os.path.join(run, TRAINER.replace("{}", str(step)))
        if os.path.exists(best):
            state.best_model_checkpoint = best


def _describe(trainer: Any, staging: StagedSave, name: str) -> bytes | None:
    if not (staging.folder / name).is_dir():
        return None
    lift(staging)
    step, settings = trainer.state.global_step, guard_of(trainer.accelerator).settings
    where = staging.url or staging.target
    check_save(settings, staging.folder, where, trainer, [trainer.model], step=step)
    state = staging.folder / TRAINER_STATE
    if state.exists():
        trainer.state.save_to_json(str(state))  # with the best model where it will lie
    return make_manifest(trainer.accelerator, staging.folder, ()).to_bytes()


def _rotate(trainer: Any, run: str, staging: StagedSave) -> None:
    """Remove old checkpoints. As in the Trainer itself, one that cannot be removed does not end the
    training.
    """
    limit = trainer.args.save_total_limit
    _warn_of_later(staging.target)
    if limit is None or limit <= 0:
        return
    own = getattr(type(trainer), "_rotate_checkpoints", None)
    if own is not None and not own.__module__.startswith("transformers."):
        # Of a subclass, by its own rules.
        trainer._rotate_checkpoints(use_mtime=False, output_dir=run)
        return
    best = trainer.state.best_model_checkpoint
    try:
        rotate_steps(staging.target, limit, best=None if best is None else Path(best))
    except OSError as error:
        _log.warning("%s: could not remove all old checkpoints: %s", run, error)


def _warn_of_later(saved: Path) -> None:
    """Warn once of a folder whose step is later than the one just saved: another run's, which a
    resume would take.
    """
    step = checkpoint_number(saved.name, TRAINER) or 0
    numbers = (checkpoint_number(name, TRAINER) for name in os.listdir(saved.parent))
    later = max(
        (number for number in numbers if number is not None and number > step), default=None
    )
    if later is not None and str(saved.parent) not in _warned:
        _warned.add(str(saved.parent))
        name = TRAINER.replace("{}", str(later))
        warn_caller(
            f"{saved.parent} contains {name} from another run: resume_from_checkpoint=True "
            f"picks it over {saved.name}, which was just saved, and save_total_limit does not "
            "count it; help: move it away"
        )
