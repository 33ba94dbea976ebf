"""``load_state_tolerant`` and ``load_checkpoint_tolerant``: look at everything, read everything,
agree, then modify.

A load restores what ``load_report.Part`` lists, in the order of ``commit``.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from ckptfix.checkpoint.entries import (
    Entry,
    all_state_dicts,
    believed,
    model_entries,
    state_entries,
)
from ckptfix.checkpoint.filenames import parse_file_name, run_state_name
from ckptfix.checkpoint.folder import CheckpointFolder, scan_folder
from ckptfix.checkpoint.manifest import Manifest, read_manifest
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.resumable import mixed
from ckptfix.storage.files import on_disk
from ckptfix.storage.stores import is_url
from ckptfix.training.loading.assignment import Owners, Placement
from ckptfix.training.loading.checking import custom_problem, optimizer_problem, scheduler_problem
from ckptfix.training.loading.commit import Tensors, agree, commit_on_all, go_on_numbering, outline
from ckptfix.training.loading.delegated import load_delegated
from ckptfix.training.loading.draft import Draft, as_load_error, stop_if_failed, warn_of
from ckptfix.training.loading.fetching import fetched
from ckptfix.training.loading.load_report import (
    ComponentReport,
    LoadError,
    LoadPolicy,
    LoadReport,
    Part,
    Requirement,
    Status,
)
from ckptfix.training.loading.models import plan_models, run_hooks
from ckptfix.training.loading.states import (
    SavedStates,
    after_models,
    by_names,
    is_hopeless,
    not_of_a_rank,
    plan_dataloaders,
    plan_random,
    plan_scaler,
    plan_states,
    ranks_in,
    read_states,
    tell_of_rates,
)
from ckptfix.training.loading.targets import distinct, model_targets
from ckptfix.training.ranks import SHARDED, Ranks, cannot_agree
from ckptfix.training.resuming import run_state
from ckptfix.training.saving.save_manifest import driven_optimizer, held_models


def load_state_tolerant(
    accelerator: Any, path: str | os.PathLike[str], *, policy: LoadPolicy | None = None
) -> LoadReport:
    """Load a checkpoint folder of ``save_state`` into everything an accelerator holds; the folder
    is not changed.

    Takes what ``Accelerator.load_state`` takes, and folders it fails on or loads wrongly: doubled
    or moved entries, nested names, other containers, sharded weights, another number of ranks,
    missing and extra components. On a healthy folder the result is that of ``load_state``, bit for
    bit. On a distributed run every rank must call it.

    Raises LoadError, on every rank, when a part that the policy requires is missing or wrong on any
    rank, or when an object refuses its own state. Nothing is modified then, unless
    ``error.modified``: the error names what could not be undone. ValueError for a policy that is
    none.

    For the way back the weights are copied to the CPU, if objects with a ``load_state_dict`` that
    is not torch's are to be loaded. With automatic naming, numbers go on after the checkpoint.
    """
    policy = policy or LoadPolicy()
    if cannot_agree(accelerator):
        raise LoadError(
            "load_state_tolerant cannot coordinate several XLA processes; next: "
            "accelerator.load_state(path)"
        )
    with fetched(path, Ranks(accelerator)) as root:
        if accelerator.distributed_type in SHARDED:
            report = load_delegated(accelerator, root, policy)
        else:
            report = _load(accelerator, root, policy, Ranks(accelerator))
            go_on_numbering(accelerator, root)
        inexact = run_state.go_on_and_report(accelerator, root, loaded_by(report))
        missing = (str(one) for one in report.components if is_left(one))
        return replace(report, inexact=(*missing, *inexact))


def loaded_by(report: LoadReport) -> run_state.Loaded:
    """Return the outcome of a load for the run state."""
    return run_state.Loaded(_left_by(report), _restored_models(report))


def _left_by(report: LoadReport) -> frozenset[str]:
    """Return the parts that a run state must leave as a load made them.

    A run state lists states by number. Where a load gave them to objects with other numbers, it
    would undo that. The order of moments is that of this run already: another one would mix them.
    """
    left = {one.part.value for one in report.components if is_left(one)} | {Part.OPTIMIZERS.value}
    for one in report.components:
        numbers = {
            parsed.index for name in one.files if (parsed := parse_file_name(name)) is not None
        }
        is_numbered = (
            one.part in (Part.OPTIMIZERS, Part.SCHEDULERS, Part.CUSTOM) and one.index is not None
        )
        if is_numbered and numbers and numbers != {one.index}:
            left.add(one.part.value)
    return frozenset(left)


def _restored_models(report: LoadReport) -> dict[int, int]:
    """Return the models that a load restored in full: number in the checkpoint -> number in this
    run.
    """
    restored: dict[int, int] = {}
    for component in report.of(Part.MODELS):
        if component.index is not None and component.status in (Status.RESTORED, Status.ADAPTED):
            names = map(parse_file_name, component.files)
            saved = next((name.index for name in names if name is not None), component.index)
            restored[saved] = component.index
    return restored


def is_left(component: ComponentReport) -> bool:
    """Return whether an object of the run was left as it was."""
    return component.status in (Status.SKIPPED, Status.FAILED) and bool(
        component.what or component.index is not None
    )


def load_here(accelerator: Any, root: Path, policy: LoadPolicy) -> LoadReport:
    """Load as ``load_state_tolerant`` does, and wait for no other process: some scripts load on
    some of them only.

    Raises LoadError; what was modified until then is undone.
    """
    return _load(accelerator, root, policy, Ranks(accelerator, together=False))


def _load(accelerator: Any, root: Path, policy: LoadPolicy, ranks: Ranks) -> LoadReport:
    draft = Draft(path=root, policy=policy)
    before: Tensors | None = None
    error: Exception | None = None
    try:
        folder, manifest = _look(root)
        offers = _plan_before_hooks(draft, accelerator, folder, manifest)
    # Told to the other ranks, then raised: a rank that leaves alone hangs them.
    except Exception as problem:
        error = as_load_error(problem, draft)
    agree(ranks, error)
    try:  # a rank without hooks goes the same way, as one with hooks will wait for it
        models = accelerator._models
        if accelerator._load_model_state_pre_hook:
            before = Tensors(models)
            models = run_hooks(accelerator, str(root), draft)
        _plan(draft, accelerator, models, folder, manifest, offers)
        stop_if_failed(draft, root)
    except Exception as problem:
        error = as_load_error(problem, draft)
    try:
        agree(ranks, error, outline(draft))
    except Exception:
        if before is not None:
            before.restore()
        raise
    commit_on_all(ranks, draft, accelerator, before)
    warn_of(draft, is_main=accelerator.is_main_process)
    return draft.report()


def _look(root: Path) -> tuple[CheckpointFolder, Manifest | None]:
    """Return what a folder holds, by headers and opcodes. Raises LoadError, OSError,
    FormatError.
    """
    if not root.is_dir():
        kind = (
            "is a file; next: load_checkpoint_tolerant(model, path)"
            if root.exists()
            else "does not exist"
        )
        raise LoadError(f"{root} {kind}")
    if problem := mixed(root):
        raise LoadError(problem)
    folder = scan_folder(root, wanted=not_of_a_rank)
    if not folder.components and not ranks_in(root):
        numbered = sorted(
            str(name) for name in folder.subfolders if str(name).startswith("checkpoint_")
        )
        hint = f"; it contains checkpoints: {', '.join(numbered[:3])}" if numbered else ""
        others = ", ".join(
            f"{name} is {what}" for name, what in list(folder.subfolders.items())[:3]
        )
        raise LoadError(
            f"{root} is not a checkpoint: it contains no file of "
            f"save_state{hint or (others and f'; {others}')}"
        )
    return folder, read_manifest(root)


def _plan_before_hooks(
    draft: Draft, accelerator: Any, folder: CheckpointFolder, manifest: Manifest | None
) -> tuple[SavedStates, SavedStates, SavedStates]:
    """Plan what does not depend on where models go; return what optimizers, schedulers and custom
    objects may get.

    Hooks of the script may modify anything, so with hooks LoadError is raised now for all that can
    be known.
    """
    root = on_disk(folder.root)
    said = believed(manifest, folder) or Manifest(versions={}, world_size=0, step=0)
    parts = (
        (
            Part.OPTIMIZERS,
            Role.OPTIMIZER,
            said.optimizers,
            accelerator._optimizers,
            optimizer_problem,
        ),
        (
            Part.SCHEDULERS,
            Role.SCHEDULER,
            said.schedulers,
            accelerator._schedulers,
            scheduler_problem,
        ),
        (Part.CUSTOM, Role.CUSTOM, said.custom, accelerator._custom_objects, custom_problem),
    )
    optimizers, schedulers, custom = (
        read_states(
            draft, part, root, state_entries(folder, role, recorded), distinct(things), check
        )
        for part, role, recorded, things, check in parts
    )
    plan_dataloaders(draft, folder, accelerator._dataloaders)
    plan_scaler(draft, folder, accelerator.scaler)
    plan_random(draft, root, manifest, accelerator.process_index, accelerator.num_processes)
    if accelerator._load_model_state_pre_hook:
        trial = Draft(path=root, policy=draft.policy, failures=dict(draft.failures))
        for offer in (optimizers, schedulers, custom):
            # Which moments a model that is loaded in part leaves in use, and which names parameters
            # have, is known only after the hooks.
            depends = offer.part is Part.OPTIMIZERS and (
                draft.policy.models is Requirement.PARTIAL or (root / run_state_name(0)).exists()
            )
            if not depends and is_hopeless(trial, offer):
                plan_states(trial, root, offer)
        stop_if_failed(trial, root)
    return optimizers, schedulers, custom


def _plan(
    draft: Draft, accelerator: Any, left: Sequence[Any], folder: CheckpointFolder,
    manifest: Manifest | None, offers: tuple[SavedStates, SavedStates, SavedStates],
) -> None:  # fmt: skip
    """Add to the draft what models get, and what follows them. ``left``: the models that hooks left
    to load.
    """
    root = on_disk(folder.root)
    optimizers, schedulers, custom = offers
    if draft.policy.models is Requirement.IGNORE:
        for target in distinct(left):
            draft.ignore(Part.MODELS, target)
        placed = Placement(part=Part.MODELS)
        named = [(target.index, target.thing) for target in distinct(accelerator._models)]
    else:
        entries, targets = model_entries(folder, manifest), model_targets(left, accelerator._models)
        placed = plan_models(draft, root, entries, targets, accelerator.device)
        named = [
            (placed.entries[position].index, placed.targets[number].thing)
            for number, position in placed.pairs.items()
        ]

    def models_of() -> Owners:
        models = [target.thing for target in placed.targets]
        return held_models([target.thing for target in optimizers.targets], models)

    optimizers = by_names(root, optimizers, named)
    optimizers = after_models(draft, root, optimizers, placed, models_of)
    driving = plan_states(draft, root, optimizers, placed, models_of)

    def optimizers_of() -> Owners:
        things = [target.thing for target in driving.targets]
        driven = (driven_optimizer(target.thing, things) for target in schedulers.targets)
        return [() if number is None else (number,) for number in driven]

    plan_states(draft, root, schedulers, driving, optimizers_of)
    plan_states(draft, root, custom)
    tell_of_rates(draft, optimizers, (schedulers, custom))


def load_checkpoint_tolerant(
    model: Any, path: str | os.PathLike[str], *, policy: LoadPolicy | None = None
) -> LoadReport:
    """Load the weights of one model from a file, an index, a folder, or a training dict that holds
    a state dict.

    All names must be found, and none be left over; wrappers are taken off and put back as the model
    has them. Of a folder the one entry that fits is taken; of several that fit, equal ones count
    once, others are refused by name. Only ``models`` and ``trust`` of the policy count. No rank
    speaks with another.

    Raises LoadError when nothing fits or can be read; the model is then as it was, unless
    ``error.modified``.
    """
    if is_url(path):
        with fetched(path) as copy:
            return load_checkpoint_tolerant(model, copy, policy=policy)
    policy = policy or LoadPolicy()
    path = Path(path).expanduser()
    draft = Draft(path=path, policy=policy, advice="pass the path of one file")
    try:
        entries, folder = _entries(path)
        if policy.models is not Requirement.IGNORE:
            plan_models(
                draft, on_disk(folder.root), entries, model_targets([model]), _device(model)
            )
        stop_if_failed(draft, on_disk(folder.root))
    except Exception as problem:
        error = as_load_error(problem, draft)
        raise error from error.__cause__
    commit_on_all(Ranks(None), draft)
    warn_of(draft, is_main=True)
    return draft.report()


def _entries(path: Path) -> tuple[list[Entry], CheckpointFolder]:
    """Return the state dicts at a path. An index brings the shards that it names."""
    if not path.exists():
        raise LoadError(f"{path} does not exist")
    if path.is_dir():
        folder = scan_folder(path)
        return list(all_state_dicts(folder)), folder
    if path.name.endswith(".json"):
        folder = scan_folder(path.parent)
        wanted = [entry for entry in all_state_dicts(folder) if entry.label == path.name]
        return wanted, folder
    folder = scan_folder(path.parent, path.name)
    return list(all_state_dicts(folder)), folder


def _device(model: Any) -> torch.device:
    """Return where the model is: the device of its first parameter that is anywhere."""
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            return torch.device(parameter.device)
    return torch.device("cpu")
