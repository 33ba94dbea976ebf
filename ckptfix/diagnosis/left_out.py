"""Checks that are left out, in words: files and folders that it does not read, and what no file of a
save records.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

from ckptfix.checkpoint.dcp import is_empty, is_of_checkpoint
from ckptfix.checkpoint.deepspeed_files import BESIDE
from ckptfix.checkpoint.downloads import is_of_client
from ckptfix.checkpoint.filenames import TRAINER_STATE
from ckptfix.checkpoint.folder import PLAIN_FOLDER, ProblemKind, is_unreadable
from ckptfix.checkpoint.manifest import REPORT
from ckptfix.checkpoint.model_configs import PIPELINE
from ckptfix.checkpoint.neighbours import parts_of
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.state_contents import (
    content_of,
    holds_no_tensor,
    is_of_torchdata,
    state_problem,
)
from ckptfix.diagnosis import bundled_optimizers
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.base import Unreadable
from ckptfix.diagnosis.findings.interrupted import InterruptedSave
from ckptfix.diagnosis.findings.sharded import MissingShard
from ckptfix.diagnosis.unresumable import paths_of_states
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_zip import TorchZip
from ckptfix.storage.files import AnyPath, folder_entries, walk
from ckptfix.storage.paths import command, unreadable
from ckptfix.wording import count_of, list_names

OF_ONE_SAVE = "whether all files belong to one save"
"""Beginning of the sentence about what few files show: most have no number of their save."""

_OF_ONE_SAVE = frozenset((Role.MODEL, Role.OPTIMIZER, Role.SCHEDULER, Role.RNG_STATE))


def unreadable_files(case: Case) -> Iterator[Unreadable]:
    """Yield the files and folders that may not be read, which may be healthy or damaged."""
    folder = case.folder
    for component in folder.components:
        if component.problem is not None and is_unreadable(component):
            yield Unreadable(f"{component.path}: {component.problem.message}")
    for dcp in case.sharded:
        for path, why in dcp.unreadable.items():
            yield Unreadable(f"{path}: {why}")
        if dcp.problem is not None and dcp.problem.kind is ProblemKind.UNREADABLE:
            yield Unreadable(f"{dcp.metadata_path}: {dcp.problem.message}")
    for state in case.deepspeed:
        yield from map(Unreadable, state.unfinished)
    for path, kind in folder.subfolders.items():
        try:
            with folder_entries(folder.root / path):
                pass
        except OSError as error:
            if str(path) != "lost+found":  # a folder of the file system's own, closed to everybody
                yield Unreadable(f"{path}/ ({kind}): {unreadable(folder.root / path, error)}")


def unchecked_folders(case: Case) -> Iterator[str]:
    """Yield the sub-folders that are not looked into, with the reason."""
    checked = {state.path for state in case.sharded} | {state.path for state in case.deepspeed}
    checked |= {finding.path for finding in case.findings}
    root = case.folder.root
    for path, kind in case.folder.subfolders.items():
        if path not in checked and not is_of_client(root / path):
            yield f"{path}/ ({kind}): {_why_not(root / path, kind)}"


def _why_not(path: AnyPath, kind: str) -> str:
    """Return why nothing in a folder was checked, and the command that checks it, if there is
    one.
    """
    if is_empty(path):
        return "empty"
    is_walked = kind == PLAIN_FOLDER and not path.is_symlink() and _may_hold_checkpoint(path)
    return f"not looked into{'; ckptfix check --recursive looks into it' if is_walked else ''}"


def _may_hold_checkpoint(path: AnyPath) -> bool:
    """Return whether ``check --recursive`` can find a checkpoint at or below a path: files that are
    none and no folder are passed over there, too.
    """
    try:
        _, folders, names = next(walk(path))
    except (OSError, StopIteration):
        return True
    return bool(folders) or any(map(is_of_checkpoint, names))


def unchecked_dcp(case: Case) -> Iterator[str]:
    """Yield the folders that could not be read, with the reasons."""
    for state in case.sharded:
        if state.problem is not None and state.problem.is_only_unchecked:
            yield f"{state.metadata_path}: {state.problem.message}"
        elif state.metadata is None and state.own_ranks:
            yield f"{state.own_ranks[0]}: per-rank metadata, from a save without collectives"
        packed = (
            [one for one in state.metadata.stored.values() if one.transforms]
            if state.metadata
            else []
        )
        if packed:
            extensions = list_names(
                dict.fromkeys(name for one in packed for name in one.transforms)
            )
            yield (
                f"{state.metadata_path}: {count_of(len(packed), 'item')} saved through {extensions}"
            )
        alike: dict[str, list[str]] = {}
        for fqn, why in state.unread.items():
            alike.setdefault(why, []).append(fqn)
        for why, names in alike.items():
            yield f"{state.metadata_path}: keys inside {list_names(names)}: {why}"


def unchecked_files(case: Case) -> Iterator[str]:
    """Yield the files of a kind that is not read."""
    for state in case.deepspeed:
        yield from state.unread
    for component in case.folder.components:
        if component.problem is not None and component.problem.is_only_unchecked:
            yield f"{component.path}: {component.problem.message}"


def unread_bytes(case: Case) -> Iterator[str]:
    """Yield what only a check that reads every byte compares, and what a check of one file leaves
    out.
    """
    folder = case.folder
    of_pairs = [finding for finding in case.findings if finding.code != "untrained-adapter"]
    sampled = sum(1 for finding in of_pairs if getattr(finding, "sampled", False))
    if sampled:
        pairs = count_of(sampled, "pair")
        yield (
            f"{pairs} of equal files in full: only samples were compared; ckptfix check "
            "--data reads all"
        )
    if case.is_file:
        compares = f"{command('check', folder.root)} compares them"
        yield (
            "other files of the folder (duplicates, missing files, moments that fit no weights); "
            f"{compares}"
        )
    yield (
        "values of tensors (NaN, zeros, flipped bits); ckptfix verify --data reads them, but not "
        "other values in states (counters, random states)"
    )
    if not case.is_file and any(one.role is Role.MODEL for one in folder.components):
        # Names that ``check`` passes: it prints what a config says, and compares none of it.
        for path in folder.strays:
            if path.name in case.looked_at and path.name not in case.compared:
                yield f"{path.name} against the weights: its sizes are read but not compared"
    if case.data:
        return
    files = (one.content for one in folder.components if isinstance(one.content, TorchFile))
    has_checksums = any(isinstance(file.container, TorchZip) for file in files)
    if has_checksums or any(state.has_checksums for state in case.deepspeed):
        yield "checksums of tensor records in torch zip files; ckptfix check --data checks them"
    if any(state.metadata is not None and state.metadata.stored for state in case.sharded):
        yield "checksums of the items in .distcp files; ckptfix check --data checks them"


def unchecked_of_save(case: Case) -> Iterator[str]:
    """Yield that the files of a folder may be of several saves, where none of them records its
    save, and that the last of a kind may be missing, where no checkpoint next to it shows how many
    there are.
    """
    components = case.folder.components
    is_sharded = any(one.name.shard is not None for one in components)
    has_several = len(_OF_ONE_SAVE & {one.role for one in components}) > 1 or is_sharded
    # With checksums, another sentence names the command that compares them.
    is_listed = case.manifest is not None and bool(case.manifest.digests)
    if case.is_file or is_listed or not (case.sharded or case.deepspeed or has_several):
        return
    if case.folder.processes and not any(case.neighbours.saves()):
        yield (
            f"{OF_ONE_SAVE} and none is missing: no file records which save it is from, and "
            "without another checkpoint of the run nothing shows how many ranks, models and states "
            "the run has; only a seal right after each save proves it"
        )
        yield from _odd_counts(case)
        return
    is_compared = not (case.sharded or case.deepspeed or is_sharded)
    compared = "check -r RUN compares the checkpoint with its neighbours; " * is_compared
    yield (
        f"{OF_ONE_SAVE}: no file records which save it is from, and most saves do not list their "
        f"files; {compared}only a seal right after each save proves it"
    )


def _odd_counts(case: Case) -> Iterator[str]:
    """Yield that the schedulers do not fit the optimizers.

    This proves nothing: a script need not prepare its scheduler, or has two for one optimizer. The
    numbers are in the topic, which is printed without -v, too.
    """
    counts = Counter(role for role, _ in parts_of(paths_of_states(case.folder)))
    optimizers, schedulers = counts[Role.OPTIMIZER], counts[Role.SCHEDULER]
    scheduled = sum("initial_lr" in saved.options for saved in case.optimizers)
    there = count_of(schedulers, "scheduler")
    if scheduled > schedulers:
        many = count_of(scheduled, "optimizer")
        yield (
            f"whether {there} {_are(schedulers)} enough for {many} that had one: a script may "
            "prepare its optimizer alone"
        )
    elif schedulers > optimizers > 0:
        many = count_of(optimizers, "optimizer")
        yield (
            f"whether {many} {_are(optimizers)} enough for {there}: a script may use several "
            "schedulers for one optimizer"
        )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def unknown_files(case: Case) -> Iterator[str]:
    """Yield the files next to a checkpoint that are none of it."""
    known = {path for state in case.sharded for path in state.files}
    known |= set(BESIDE if case.deepspeed else ())
    known |= {PurePosixPath(name) for name in (REPORT, TRAINER_STATE)}
    known |= case.paths(InterruptedSave)
    known |= {
        shard.path
        for finding in case.findings
        if isinstance(finding, MissingShard)
        for shard in finding.renamed
    }
    strays = [
        str(path)
        for path in case.folder.strays
        if path not in known and path.name not in case.looked_at
    ]
    if strays and not case.is_file:
        yield f"other files next to it: {list_names(strays)}"


def unchecked_bundles(case: Case) -> Iterator[str]:
    """Yield what the optimizers in files of scripts are not judged by."""
    return bundled_optimizers.unchecked_bundles(case.bundles)


def unchecked_objects(case: Case) -> Iterator[str]:
    """Yield that only the script knows what its custom objects hold."""
    if any(component.role is Role.CUSTOM for component in case.folder.components):
        yield "contents of custom objects; only the script can read them"


def unchecked_loaders(case: Case) -> Iterator[str]:
    """Yield in words the states that only a data loader of the script can read.

    A loader of torchdata refuses a state of another number of workers, which no other file shows
    (torchdata 0.11).
    """
    has_torchdata = False
    for component in case.folder.components:
        content = component.content
        if component.role is not Role.DATALOADER or not isinstance(content, TorchFile):
            continue
        if is_of_torchdata(content.tree.root):
            has_torchdata = True
        elif content_of(content) is None and state_problem(component.name, content) is None:
            yield (
                f"{component.path}: not a state of torchdata's StatefulDataLoader; a load of it "
                "fails at its first batch"
            )
    if has_torchdata:
        yield (
            "number of workers of each data loader; the first batch fails in a loader with "
            "another number than its state"
        )


def unchecked_scalers(case: Case) -> Iterator[str]:
    """Yield in words the states of gradient scalers that were off: one that is on refuses them
    (``GradScaler.load_state_dict``, torch 2.13).
    """
    for component in case.folder.components:
        content = component.content
        if component.role is not Role.GRAD_SCALER or not isinstance(content, TorchFile):
            continue
        if holds_no_tensor(content):
            yield (
                f"{component.path}: empty, like the state of a disabled gradient scaler; "
                "load_state fails in a run that enables the scaler"
            )


def unchecked_pipeline(case: Case) -> Iterator[str]:
    """Yield that only diffusers knows what a class of its pipelines takes."""
    if not case.is_file and case.folder.has_file(PIPELINE):
        yield (
            f"whether the class that {PIPELINE} names accepts the components that it lists; "
            "ckptfix check --load asks diffusers"
        )
