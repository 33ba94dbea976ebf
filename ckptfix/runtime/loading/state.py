"""``load_state_tolerant``: look at everything, read everything, agree, and only then modify."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.latest import mixed
from ckptfix.checkpoint.manifest import Manifest, read_manifest
from ckptfix.checkpoint.scan import scan_folder
from ckptfix.runtime.loading.agreeing import agree, outline
from ckptfix.runtime.loading.checking import optimizer_problem, scheduler_problem
from ckptfix.runtime.loading.commit import commit
from ckptfix.runtime.loading.delegated import load_delegated
from ckptfix.runtime.loading.draft import Draft
from ckptfix.runtime.loading.entries import changed_files, model_entries, state_entries
from ckptfix.runtime.loading.hooks import Undo, run_hooks
from ckptfix.runtime.loading.models import plan_models
from ckptfix.runtime.loading.policy import LoadPolicy, Need, Part
from ckptfix.runtime.loading.randomness import plan_random
from ckptfix.runtime.loading.report import LoadError, LoadReport
from ckptfix.runtime.loading.states import plan_dataloaders, plan_scaler, plan_states
from ckptfix.runtime.loading.targets import distinct, model_targets

DELEGATED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""Where models are sharded over ranks: accelerate loads these itself, after the files were looked at."""


def load_state_tolerant(
    accelerator: Any, path: str | os.PathLike[str], *, policy: LoadPolicy | None = None
) -> LoadReport:
    """Load a checkpoint folder of ``save_state`` into everything an accelerator holds; the folder is not changed.

    Takes what ``Accelerator.load_state`` takes, and folders it fails on or loads wrongly: doubled or moved entries,
    nested names, other containers, sharded weights, another number of ranks, missing and extra components. On a healthy
    folder the result is that of ``load_state``, bit for bit. On a distributed run every rank must call it.

    Raises LoadError, on every rank, when a part that the policy requires is missing or wrong on any rank. Nothing was
    modified then, unless ``error.modified``: an object of the script refused its own state during the commit.
    ValueError for a policy that is none.
    """
    policy = policy or LoadPolicy()
    if accelerator.distributed_type is DistributedType.XLA and accelerator.num_processes > 1:
        raise LoadError(
            "several XLA processes cannot agree on a load here; next: accelerator.load_state(path)"
        )
    root = Path(path).expanduser()
    if accelerator.distributed_type in DELEGATED:
        return load_delegated(accelerator, root, policy)
    draft = Draft(path=root, policy=policy)
    error: Exception | None = None
    folder: CheckpointFolder | None = None
    manifest: Manifest | None = None
    has_hooks = bool(accelerator._load_model_state_pre_hook)
    try:
        folder, manifest = look(root)
        if not has_hooks:
            _plan_models(draft, accelerator, accelerator._models, folder, manifest)
        _plan_states(draft, accelerator, folder, manifest)
        stop_if_failed(draft, root)
    except Exception as problem:  # told to the other ranks, then raised: a rank that leaves alone hangs them
        error = as_load_error(problem, draft)
    agree(accelerator, error)
    assert folder is not None
    undo: Undo | None = None
    try:  # a rank without hooks goes the same way, as one with hooks will wait for it
        if has_hooks:
            undo = Undo(accelerator._models)
            _plan_models(draft, accelerator, run_hooks(accelerator, str(root), draft), folder, manifest)
            stop_if_failed(draft, root)
    except Exception as problem:
        error = as_load_error(problem, draft)
    try:
        agree(accelerator, error, outline(draft))
    except Exception:
        if undo is not None:
            undo.restore()
        raise
    try:
        commit(draft, accelerator)
    except Exception as problem:
        error = problem
    agree(accelerator, error)
    warn_of(draft, is_main=accelerator.is_main_process)
    return draft.report()


def look(root: Path) -> tuple[CheckpointFolder, Manifest | None]:
    """Return what a folder holds, by headers and opcodes. Raises LoadError, OSError, FormatError."""
    if not root.is_dir():
        kind = "is a file; next: load_checkpoint_tolerant(model, path)" if root.exists() else "does not exist"
        raise LoadError(f"{root} {kind}")
    if problem := mixed(root):
        raise LoadError(problem)
    folder = scan_folder(root)
    if not folder.components:
        numbered = sorted(str(name) for name in folder.subfolders if str(name).startswith("checkpoint_"))
        hint = f"; it holds checkpoints: {', '.join(numbered[:3])}" if numbered else ""
        others = ", ".join(f"{name} is {what}" for name, what in list(folder.subfolders.items())[:3])
        raise LoadError(
            f"{root} is no checkpoint: no file of save_state is there{hint or (others and f'; {others}')}"
        )
    return folder, read_manifest(root)


def as_load_error(problem: Exception, draft: Draft) -> LoadError:
    """Return any failure before the commit as a LoadError with the report so far."""
    if isinstance(problem, LoadError):
        return problem
    found = LoadError(f"{draft.path}: {type(problem).__name__}: {problem}", report=draft.report())
    found.__cause__ = problem
    return found


def warn_of(draft: Draft, *, is_main: bool) -> None:
    """Emit one UserWarning for each object that was left as it was; those all ranks share, on the main one alone."""
    for report in draft.to_warn_of():
        if is_main or report.part in (Part.RNG, Part.STEP, Part.DATALOADERS):
            warnings.warn(f"{draft.path}: {report}", UserWarning, stacklevel=3)


def _plan_models(
    draft: Draft, accelerator: Any, models: Sequence[Any], folder: CheckpointFolder, manifest: Manifest | None
) -> None:
    if draft.policy.models is Need.IGNORE:
        for target in distinct(models):
            draft.ignore(Part.MODELS, target)
        return
    entries = model_entries(folder, manifest)
    plan_models(draft, folder.root, entries, model_targets(models), accelerator.device)


def _plan_states(draft: Draft, accelerator: Any, folder: CheckpointFolder, manifest: Manifest | None) -> None:
    root = folder.root
    optimizers = state_entries(folder, Role.OPTIMIZER, manifest.optimizers if manifest else ())
    schedulers = state_entries(folder, Role.SCHEDULER, manifest.schedulers if manifest else ())
    custom = state_entries(folder, Role.CUSTOM, manifest.custom if manifest else ())
    plan_states(
        draft, Part.OPTIMIZERS, root, optimizers, distinct(accelerator._optimizers), optimizer_problem
    )
    plan_states(
        draft, Part.SCHEDULERS, root, schedulers, distinct(accelerator._schedulers), scheduler_problem
    )
    plan_dataloaders(draft, folder, accelerator._dataloaders)
    plan_scaler(draft, folder, accelerator.scaler)
    plan_random(draft, folder, manifest, accelerator.process_index, accelerator.num_processes)
    plan_states(draft, Part.CUSTOM, root, custom, distinct(accelerator._custom_objects))


def stop_if_failed(draft: Draft, root: Path) -> None:
    """Raise LoadError when something required is not there, or a file is not what was scanned."""
    if draft.failures:
        lines = [f"{', '.join(names)}: {reason}" for reason, names in draft.failures.items()]
        raise LoadError(
            f"{draft.path} was not loaded, nothing was modified:\n  " + "\n  ".join(lines),
            report=draft.report(),
        )
    changed = changed_files(root, draft.used)
    if changed:
        raise LoadError(f"{draft.path}: {', '.join(changed)} changed while it was read; load it again")
