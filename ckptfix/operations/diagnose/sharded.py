"""DCP folders: what is missing of them, and which are the same model again."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.doubling import Evidence
from ckptfix.checkpoint.filenames import FolderName, Role
from ckptfix.checkpoint.keys import prepared
from ckptfix.checkpoint.sharded import UNFINISHED, ShardedState, rank_of
from ckptfix.checkpoint.sharded_pairing import ShardedPairing, pair_sharded, signature
from ckptfix.formats.dcp_coverage import dcp_problems
from ckptfix.formats.dcp_metadata import DcpMetadata, StoredItem
from ckptfix.operations.diagnose.entries import Verdict
from ckptfix.operations.diagnose.files import problem_finding
from ckptfix.operations.findings import (
    ConflictingModels,
    Finding,
    IdenticalModels,
    IncompleteTensor,
    InterruptedSave,
    MalformedFile,
    MissingRank,
    MissingShard,
    RelatedModels,
    StrayShard,
    TruncatedFile,
    UnsafePickle,
)
from ckptfix.wording import count_of, list_names

CompareSharded = Callable[[ShardedPairing, bool], Verdict]
"""Compares two paired folders. The second argument says whether the answer will be used to drop one."""


def diagnose_shard_files(states: Iterable[ShardedState]) -> list[Finding]:
    """Find what is wrong with the files of each folder: missing, short, cut short, hostile."""
    findings: list[Finding] = []
    for state in states:
        findings += [UnsafePickle(path=path, globals=names) for path, names in state.unsafe.items()]
        findings += [MalformedFile(path=path, detail=why) for path, why in state.broken.items()]
        if state.problem is not None:
            findings += problem_finding(state.metadata_path, state.problem)
        elif state.metadata is None:
            findings += _interrupted(state)
        else:
            findings += _stored(state, state.metadata)
    return findings


def unchecked_sharded(states: Iterable[ShardedState]) -> Iterator[str]:
    """Say which folders could not be looked into, and why."""
    for state in states:
        if state.problem is not None and state.problem.is_only_unchecked:
            yield f"{state.metadata_path}: {state.problem.message}"
        elif state.metadata is None and state.own_ranks:
            yield f"{state.own_ranks[0]}: per-rank metadata, of a save without collectives"
        alike: dict[str, list[str]] = {}
        for fqn, why in state.unread.items():
            alike.setdefault(why, []).append(fqn)
        for why, names in alike.items():
            yield f"{state.metadata_path}: names may be in {list_names(names)}: {why}"


def _interrupted(state: ShardedState) -> list[Finding]:
    if state.own_ranks:
        return []
    ranks = {rank for path in state.data if (rank := rank_of(path)) is not None}
    finding = InterruptedSave(
        path=state.metadata_path,
        files=len(state.data),
        unfinished=state.path / UNFINISHED in state.files,
        over_another=False,
        ranks=tuple(sorted(ranks)),
    )
    return [finding]


def _stored(state: ShardedState, metadata: DcpMetadata) -> Iterator[Finding]:
    items = {state.path / path: held for path, held in metadata.items_by_file().items()}
    yield from _missing(state, items)
    for path, held in items.items():
        file = state.files.get(path)
        cut = [item for item in held if file is not None and item.offset + item.length > file.size]
        if file is not None and cut:
            need = max(item.offset + item.length for item in cut)
            names = list_names(dict.fromkeys(item.fqn for item in cut))
            detail = (
                f"it has {file.size} bytes, .metadata lists {need}; {count_of(len(cut), 'item')} cut: {names}"
            )
            yield TruncatedFile(path=path, have=file.size, need=need, detail=detail)
    for problem in dcp_problems(metadata):
        yield IncompleteTensor(path=state.metadata_path, tensor=problem.fqn, detail=problem.message)
    yield from (StrayShard(path=path) for path in state.data if path not in items)
    unfinished = state.path / UNFINISHED
    if unfinished in state.files:
        yield InterruptedSave(
            path=unfinished, files=len(state.data), unfinished=True, over_another=True, ranks=()
        )


def _missing(state: ShardedState, items: dict[PurePosixPath, list[StoredItem]]) -> Iterator[Finding]:
    """Yield a finding for each rank of which nothing is there, and for each other file that is missing."""
    tensors = {item.fqn for held in items.values() for item in held if item.offsets is not None}
    of_rank: dict[int | PurePosixPath, list[PurePosixPath]] = {}
    for path in items:
        rank = rank_of(path)
        of_rank.setdefault(path if rank is None else rank, []).append(path)
    for key, paths in of_rank.items():
        absent = [path for path in paths if path not in state.files]
        if isinstance(key, int) and len(absent) == len(paths):
            held = [item for path in absent for item in items[path]]
            names = tuple(dict.fromkeys(item.fqn for item in held))
            elsewhere = len(tensors.difference(names))
            yield MissingRank(
                path=absent[0], rank=key, files=len(absent), items=len(held), holds=names, elsewhere=elsewhere
            )
            continue
        for path in absent:
            names = tuple(dict.fromkeys(item.fqn for item in items[path]))
            yield MissingShard(path=path, named_by=str(state.metadata_path), tensors=len(names), holds=names)


def diagnose_sharded_models(
    evidence: Evidence, states: Iterable[ShardedState], compare: CompareSharded, drop: bool
) -> list[Finding]:
    """Find models that are there twice, and those that are related to another (``diagnose.entries``).

    FSDP adds no wrapper to names, so that none of two equal models shows itself as a second ``prepare``.
    """
    models = sharded_entries(states, Role.MODEL)
    ranks = {rank_of(path) for entry in models for path in entry.state.data}
    findings: list[Finding] = []
    alike: dict[Hashable, list[ShardedState]] = {}
    # Least wrapped first: of two equal entries the one with fewer wrappers is the original.
    for state, _ in sorted(models, key=lambda entry: (len(prepared(_chain(entry.state))), entry.name.index)):
        if state.model is None or state.metadata is None or not state.metadata.tensors:
            continue
        originals = alike.setdefault(signature(state), [])
        finding = _match(evidence, state, originals, compare, drop, len(ranks) != 1)
        if finding is not None:
            findings.append(finding)
        if not isinstance(finding, IdenticalModels):
            originals.append(state)
    return sorted(findings, key=lambda finding: str(finding.path))


class Entry(NamedTuple):
    """A DCP folder that Accelerate finds by its number."""

    state: ShardedState
    name: FolderName

    @property
    def path(self) -> PurePosixPath:
        """Where it is."""
        return self.state.path


def sharded_entries(states: Iterable[ShardedState], role: Role) -> tuple[Entry, ...]:
    """Return the folders of a role that Accelerate finds by their number, in order."""
    found = [
        Entry(state, state.name) for state in states if state.name is not None and state.name.role is role
    ]
    return tuple(sorted(found, key=lambda entry: entry.name.index))


def _match(
    evidence: Evidence,
    state: ShardedState,
    originals: list[ShardedState],
    compare: CompareSharded,
    drop: bool,
    has_ranks: bool,
) -> Finding | None:
    related: Finding | None = None
    for original in originals:
        pairing = pair_sharded(original, state)
        if pairing is None:
            continue
        difference, full = compare(pairing, drop)
        assert state.metadata is not None
        if difference is None:
            return IdenticalModels(
                path=state.path,
                original=original.path,
                tensors=len(state.metadata.tensors),
                bytes=pairing.size,
                sampled=not full,
                chains=(_chain(state), _chain(original)),
            )
        if related is None and len(prepared(_chain(state))) > len(prepared(_chain(original))):
            proof = evidence.unlisted(state.metadata_path) or evidence.unlisted(original.metadata_path)
            if proof:
                related = ConflictingModels(
                    path=state.path,
                    original=original.path,
                    chain=_chain(state),
                    tensor=difference,
                    proof=proof,
                )
            elif has_ranks:
                related = RelatedModels(
                    path=state.path, original=original.path, chain=_chain(state), tensor=difference
                )
    return related


def _chain(state: ShardedState) -> tuple[str, ...]:
    return state.model.chain if state.model is not None else ()
