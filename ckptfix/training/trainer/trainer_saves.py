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
from collections.abc import Callable
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
    save = _TrainerSave(trainer, trial, lambda: method(model, trial, *args, **kwargs))
    return save.run()


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


class _TrainerSave:
    """One save. ``write`` is the Trainer's part of it: all files of this process, into the folder
    it asks for.
    """

    def __init__(self, trainer: Any, trial: Any, write: Callable[[], Any]) -> None:
        self._trainer = trainer
        self._write = write
        self._run = str(trainer._get_output_dir(trial=trial))
        self._name = TRAINER.replace("{}", str(trainer.state.global_step))
        self._best = trainer.state.best_model_checkpoint
        self._random = capture()
        """The generators where the Trainer's part leaves them: the run goes on from there, as
        without the guard.
        """
        self._result: Any = None
        self._pushes = 0

    def run(self) -> Any:
        trainer = self._trainer
        hidden = _NEVER_PUSHED if trainer.args.push_to_hub else ""
        target = Path(self._run) / self._name
        save = JointSave(
            trainer.accelerator,
            WHAT,
            write=self._write_all,
            describe=self._describe,
            rotate=self._rotate,
            undo=self._restore_best,
        )
        names = save.meet(self._name)
        if len(set(names)) > 1:
            others = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
            raise OperationError(
                f"{WHAT}: the processes save different steps ({others}); nothing was written"
            )
        try:
            save.run(lambda: plan_staging(target, hidden=hidden, trainer=True))
        finally:
            restore(self._random)
        for _ in range(self._pushes):
            trainer._push_from_checkpoint(os.path.join(self._run, self._name))
        return self._result

    def _write_all(self, staging: StagedSave) -> None:
        def count(folder: object) -> None:
            self._pushes += 1

        folder = str(staging.folder)
        with replaced(
            self._trainer,
            _get_output_dir=lambda trial=None: folder,
            _push_from_checkpoint=count,
        ):
            try:
                self._result = self._write()
            finally:
                self._random = capture()
        if not self._trainer.args.save_only_model:
            made = staging.folder / self._name
            made.mkdir(exist_ok=True)
            run_state.save(self._trainer.accelerator, made, self._random, {})
        self._set_best(staging)

    def _set_best(self, staging: StagedSave) -> None:
        """Point the state to where the best model will lie: the Trainer found it in the staging
        folder, or not.
        """
        state = self._trainer.state
        found = state.best_model_checkpoint
        if found is not None and Path(found).is_relative_to(staging.folder):
            state.best_model_checkpoint = os.path.join(self._run, self._name)
        elif step := getattr(state, "best_global_step", None):  # not in 4.44
            best = os.path.join(self._run, TRAINER.replace("{}", str(step)))
            if os.path.exists(best):
                state.best_model_checkpoint = best

    def _restore_best(self) -> None:
        self._trainer.state.best_model_checkpoint = self._best

    def _describe(self, staging: StagedSave) -> bytes | None:
        if not (staging.folder / self._name).is_dir():
            return None
        lift(staging)
        trainer, step = self._trainer, self._trainer.state.global_step
        settings = guard_of(trainer.accelerator).settings
        check_save(
            settings,
            staging.folder,
            staging.url or staging.target,
            trainer,
            [trainer.model],
            step=step,
        )
        state = staging.folder / TRAINER_STATE
        if state.exists():
            trainer.state.save_to_json(str(state))  # with the best model where it will lie
        return make_manifest(trainer.accelerator, staging.folder, ()).to_bytes()

    def _rotate(self, staging: StagedSave) -> None:
        """Remove old checkpoints. As in the Trainer itself, one that cannot be removed does not end
        the training.
        """
        trainer, limit = self._trainer, self._trainer.args.save_total_limit
        _warn_of_later(staging.target)
        if limit is None or limit <= 0:
            return
        own = getattr(type(trainer), "_rotate_checkpoints", None)
        if own is not None and not own.__module__.startswith("transformers."):
            trainer._rotate_checkpoints(
                use_mtime=False, output_dir=self._run
            )  # of a subclass, by its own rules
            return
        best = trainer.state.best_model_checkpoint
        try:
            rotate_steps(staging.target, limit, best=None if best is None else Path(best))
        except OSError as error:
            _log.warning("%s: could not remove all old checkpoints: %s", self._run, error)


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
