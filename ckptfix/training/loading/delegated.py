"""Loads of FSDP, DeepSpeed and Megatron-LM runs: accelerate loads, after every file was checked."""

from pathlib import Path
from typing import Any

from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder, scan_folder
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.checkpoint.roles import Role
from ckptfix.devices.callers import warn_caller
from ckptfix.devices.torch_reading import resolve
from ckptfix.diagnosis.resumable import mixed
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_globals import unsafe_globals
from ckptfix.formats.torch_file import TorchFile, read_torch_file
from ckptfix.storage.files import on_disk
from ckptfix.storage.reading import open_reader
from ckptfix.training.loading.commit import agree, go_on_numbering, perform
from ckptfix.training.loading.draft import (
    Draft,
    SetRandom,
    SetStep,
    as_load_error,
    stop_if_failed,
    warn_of,
)
from ckptfix.training.loading.load_report import (
    LoadError,
    LoadPolicy,
    LoadReport,
    Part,
    Requirement,
)
from ckptfix.training.loading.states import (
    current_random,
    has_sampler,
    is_stateful,
    not_of_a_rank,
    plan_random,
    set_random,
)
from ckptfix.training.loading.targets import Target, distinct
from ckptfix.training.ranks import Ranks

_PICKLES = (".pt", ".bin", ".pkl", ".pth", ".metadata")


class _Step(int):
    """The step before a load: equal to it, and told from any step that accelerate sets."""


def load_delegated(accelerator: Any, root: Path, policy: LoadPolicy) -> LoadReport:
    """Refuse damaged files and pickles that can run code, on all ranks alike; then call
    ``accelerator.load_state``.

    Of the policy ``trust``, ``rng`` and ``step`` count. What sharded loading itself does cannot be
    staged: when it fails, parts may be modified. Raises LoadError.
    """
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    ranks = Ranks(accelerator)
    error: Exception | None = None
    draft = Draft(path=root, policy=policy)
    try:
        if policy.models is Requirement.PARTIAL:
            raise LoadError(
                f"{root}: LoadPolicy(models='partial') is not supported with {kind}, where "
                "accelerate's own load_state loads either all keys of the models or none; next: "
                "call load_checkpoint_tolerant(model, path, policy=LoadPolicy(models='partial')) "
                "before accelerator.prepare(model)"
            )
        _check(draft, root)
        plan_random(draft, root, read_manifest(root), ranks.rank, accelerator.num_processes)
        stop_if_failed(draft, root)
    except Exception as problem:  # told to the other ranks first: they would wait for ever
        error = as_load_error(problem, draft)
    agree(ranks, error)
    before, step = current_random(), _Step(accelerator.step)
    accelerator.step = step
    try:
        accelerator.load_state(str(root))
    except Exception as problem:  # whatever the engine raises; parts of it may be loaded
        error = LoadError(
            f"{root}: {kind} could not load this checkpoint: {problem}", modified=True
        )
        error.__cause__ = problem
    _set_random_and_step(draft, accelerator, before, step, failed=error is not None)
    agree(ranks, error)
    go_on_numbering(accelerator, root)
    _report(draft, accelerator, kind)
    warn_of(draft, is_main=accelerator.is_main_process)
    return draft.report()


def _check(draft: Draft, root: Path) -> None:
    """Raise LoadError for a folder that must not be loaded; warn of code in a pickle that the
    policy trusts.
    """
    if not root.is_dir():
        raise LoadError(f"{root} is not a folder")
    if problem := mixed(root):
        raise LoadError(problem)
    damage, code = _look(scan_folder(root, wanted=not_of_a_rank))
    if wrong := damage + ([] if draft.policy.trust else code):
        raise LoadError(f"{root} was not loaded; nothing was modified:\n  " + "\n  ".join(wrong))
    for text in code:
        warn_caller(f"running code from a pickle, because trust=True: {text}")


def _set_random_and_step(
    draft: Draft, accelerator: Any, before: Any, step: _Step, *, failed: bool
) -> None:
    """Set what accelerate lost, and put back what the policy ignores or what is wrong.

    It swallows what goes wrong with the generators, and with a file that it cannot read it loses
    the step, too (accelerate#4283).
    """
    is_lost = accelerator.step is step
    if is_lost:
        accelerator.step = int(step)
    if failed:
        return
    actions = [action for _, action in draft.planned]
    for action in actions:
        if is_lost or isinstance(
            action, SetStep
        ):  # an object of the script may have drawn random numbers since
            perform(action, accelerator)
    if not any(isinstance(action, SetRandom) for action in actions):
        set_random(before)
    if not any(isinstance(action, SetStep) for action in actions):
        accelerator.step = int(step)


def _report(draft: Draft, accelerator: Any, kind: str) -> None:
    reason = (
        f"by accelerator.load_state ({kind}); its files were checked, but its keys were not mapped"
    )

    registries = (
        (Part.MODELS, accelerator._models),
        (Part.OPTIMIZERS, accelerator._optimizers),
        (Part.SCHEDULERS, accelerator._schedulers),
        (Part.CUSTOM, accelerator._custom_objects),
    )
    for part, things in registries:
        for target in distinct(things):
            draft.restored_by_others(part, target, "", reason)
    for index, dataloader in enumerate(accelerator._dataloaders):
        name = f"dl_state_dict_{index}.bin" if index else "dl_state_dict.bin"
        target = Target(index=index, thing=dataloader, inner=dataloader)
        # Which accelerate passes over.
        if is_stateful(dataloader) and not (draft.path / name).exists():
            draft.cannot(
                Part.DATALOADERS, f"{draft.path / name} is missing", target=target, missing=True
            )
        elif is_stateful(dataloader) or has_sampler(dataloader):
            draft.restored_by_others(Part.DATALOADERS, target, "", reason)
    if accelerator.scaler is not None:
        draft.restored_by_others(Part.SCALER, None, type(accelerator.scaler).__name__, reason)


def _look(folder: CheckpointFolder) -> tuple[list[str], list[str]]:
    """Return in words which files are damaged, and which need code: stock accelerate unpickles some
    of them in full.
    """
    damage, code = [], []
    for component in folder.components:
        if component.role is Role.UNKNOWN or component.name.is_of_trainer:
            continue  # a file that load_state never reads
        if component.problem is not None:
            damage.append(
                f"{component.path}: {component.problem.kind.value}: {component.problem.message}"
            )
        elif isinstance(component.content, TorchFile):
            _, refused = resolve(component.content.tree.globals)
            named = ", ".join(f"{module}.{name}" for module, name in sorted(refused))
            if named:
                code.append(
                    f"{component.path} needs {named}; next, if you trust it: LoadPolicy(trust=True)"
                )
    for name, what in folder.subfolders.items():
        if what == PLAIN_FOLDER:
            continue
        for file in sorted(on_disk(folder.root / name).rglob("*")):
            if file.is_file() and file.name.endswith(_PICKLES):
                try:
                    code += _unsafe(file)
                except FormatError as error:
                    damage.append(f"{file}: {error}")
    return damage, code


def _unsafe(file: Path) -> list[str]:
    """Look for code in a file of DCP or DeepSpeed, whose own classes are fine. Raises
    FormatError.
    """
    with open_reader(file) as reader:
        tree = read_torch_file(reader).tree
    unsafe = [f"{module}.{name}" for module, name in unsafe_globals(tree)]
    return [f"{file} calls {', '.join(unsafe)}, which can run arbitrary code"] if unsafe else []
