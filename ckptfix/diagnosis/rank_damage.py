"""Damage that only the files of several ranks show together: a rank without its file, and tensors
whose parts leave a hole.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import PurePosixPath

from ckptfix.checkpoint.deepspeed_files import MissingRankError
from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.model_files import ModelFiles
from ckptfix.checkpoint.rank_names import WorldRankName, parse_world_rank_name
from ckptfix.checkpoint.rank_parts import absent_files, begins_inside, parts_problem
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.case import DAMAGED_HEADERS, Case
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.damaged import MalformedFile, UnloadablePickle, UnsafePickle
from ckptfix.diagnosis.findings.incomplete import IncompleteTensor, MissingRank
from ckptfix.errors import OperationError
from ckptfix.tensors.rank_files import rank_files, rank_optimizer, rank_weights
from ckptfix.wording import count_of, list_names, series

_OF_RANK_FILES = (*DAMAGED_HEADERS, UnloadablePickle, UnsafePickle)
"""Findings that explain why the files of all ranks cannot be read together."""


def diagnose_rank_files(case: Case) -> Iterator[Finding]:
    """Find what is wrong with the files that each rank of FSDP saved alone, taken together."""
    folder, damaged = case.folder, case.paths(*_OF_RANK_FILES)
    names = [] if case.is_file else [str(component.path) for component in folder.components]
    for (role, index), files in rank_files(folder.root, names).items():
        paths = [PurePosixPath(name) for name in files.values()]
        try:
            (rank_weights if role is Role.MODEL else rank_optimizer)(folder.root, index, files)
        except MissingRankError as error:
            why = (
                f"{len(files) + error.files} ranks saved the checkpoint, each its own part of "
                "every tensor"
            )
            yield MissingRank(
                path=PurePosixPath(error.path.name),
                rank=error.rank,
                files=error.files,
                items=0,
                holds=(),
                detail=why,
            )
        except OperationError as error:
            if not any(path in damaged for path in paths):
                text = str(error).partition("; next: ")[0]
                yield MalformedFile(
                    path=paths[0], detail=text.removeprefix(f"{folder.root / paths[0]}: ")
                )


def diagnose_world_ranks(case: Case) -> Iterator[MissingRank]:
    """Yield the ranks that lack a file which other ranks have, by the ``world_size`` in its name.

    Of two world sizes in a folder one may be left over: a kind of file that is complete with one of
    them is not missing.
    """
    ranks: dict[tuple[int, str, str], set[int]] = {}
    for component in () if case.is_file else case.folder.components:
        if (name := parse_world_rank_name(component.path.name)) is not None:
            ranks.setdefault((name.world_size, name.stem, name.suffix), set()).add(name.rank)
    complete = {kind[1:] for kind, present in ranks.items() if len(present) == kind[0]}
    lacking: dict[int, list[WorldRankName]] = {}
    for (world_size, stem, suffix), present in ranks.items():
        if (stem, suffix) not in complete:
            absent = (rank for rank in range(world_size) if rank not in present)
            lacking.setdefault(world_size, []).extend(
                WorldRankName(stem, world_size, rank, suffix)
                for rank in islice(absent, _MOST_RANKS)
            )
    for world_size, names in lacking.items():
        names.sort(key=lambda name: (name.rank, name.stem != "model", name.stem))
        numbers = sorted({name.rank for name in names})
        which = f"rank{'s' * (len(numbers) > 1)} {series(list(map(str, numbers)))}"
        if len(numbers) > _NAMED_RANKS:
            which = count_of(len(numbers), "rank")
        others = f"; also missing: {list_names(map(str, names[1:]))}" if names[1:] else ""
        yield MissingRank(
            path=PurePosixPath(str(names[0])),
            rank=names[0].rank,
            files=len(names),
            items=0,
            holds=(),
            detail=(
                f"each of {world_size} ranks saved its own part, and files of {which} are "
                f"missing{others}"
            ),
        )


_MOST_RANKS = 1 << 16
_NAMED_RANKS = 8


def diagnose_parts(case: Case) -> Iterator[Finding]:
    """Find files without the places of their parts, and tensors with a hole or an overlap, whose
    loads are silent.
    """
    for group in case.groups:
        if group.is_in_parts:
            misplaced = [
                MalformedFile(path=member.path, detail=why)
                for member in group.members
                if member.problem is None and (why := parts_problem(member))
            ]
            yield from misplaced
            # A file that cannot be read explains every hole.
            if not (
                case.is_file
                or misplaced
                or any(member.problem is not None for member in group.members)
            ):
                yield from _incomplete_parts(group)
            continue
        for member in group.members:
            if (tensor := begins_inside(member)) is not None:
                detail = (
                    "the file has only one rank's part, which starts in the middle of the tensor"
                )
                yield IncompleteTensor(path=member.path, tensor=tensor.fqn, detail=detail)


def _incomplete_parts(group: ModelFiles) -> Iterator[Finding]:
    tensors = group.parted_tensors
    incomplete = [tensor for tensor in tensors if tensor.problem]
    gaps = [tensor for tensor in incomplete if tensor.has_gap]
    # The other ranks have the parts of these tensors in files of the same number.
    numbers = {part.file.name.shard for tensor in gaps for part in tensor.parts}
    lost: dict[int, list[str]] = {}
    for path in absent_files(group.members):
        name = parse_file_name(path.name)
        if name is not None and name.rank is not None and name.shard in numbers:
            lost.setdefault(name.rank, []).append(path.name)
    if lost:
        others = f", likewise {count_of(len(gaps) - 1, 'other tensor')}" if len(gaps) > 1 else ""
        rank, names = next(iter(lost.items()))
        yield MissingRank(
            path=group.members[0].path.with_name(names[0]),
            rank=rank,
            files=sum(map(len, lost.values())),
            items=0,
            holds=tuple(tensor.fqn for tensor in gaps),
            detail=(
                f"{gaps[0].fqn!r} has a gap ({gaps[0].problem}){others}; torch's reader leaves "
                "uninitialized memory there"
            ),
            elsewhere=len(tensors) - len(gaps),
            ranks=len(lost),
        )
    explained = {tensor.fqn for tensor in gaps if not tensor.has_overlap} if lost else set()
    for tensor in incomplete:
        if tensor.fqn not in explained:
            yield IncompleteTensor(
                path=tensor.parts[0].file.path, tensor=tensor.fqn, detail=tensor.problem
            )


def unchecked_parts(case: Case) -> Iterator[str]:
    """Yield in words what the files do not record."""
    processes = case.folder.processes
    for group in () if case.is_file else case.groups:
        if not group.is_in_parts:
            continue
        last = max(member.name.rank or 0 for member in group.members)
        if processes != last + 1:
            yield (
                f"ranks after rank {last}: {group.label} does not record how many ranks saved it; "
                "if the files of the last ranks are missing, tensors are smaller than in the "
                "model, and torch refuses to load them"
            )
        has_hole = any(tensor.problem for tensor in group.parted_tensors)
        if not has_hole and (absent := absent_files(group.members)):
            yield (
                f"whether {list_names(map(str, absent))} should exist: other ranks have such "
                "files, but no tensor has a gap, and a rank without parts saves no file"
            )
