"""From a scanned folder to findings. Reads tensor bytes only where two entries agree in names, dtypes and shapes."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.doubling import Evidence
from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder, ProblemKind, is_unreadable
from ckptfix.checkpoint.groups import ModelFiles, group_files
from ckptfix.checkpoint.links import links_below
from ckptfix.checkpoint.manifest import usable_manifest
from ckptfix.checkpoint.pairing import Pairing, Progress, first_unequal
from ckptfix.checkpoint.salvaged import REPORT
from ckptfix.checkpoint.sharded import ShardedState, is_empty
from ckptfix.checkpoint.sharded_pairing import ShardedPairing, first_unequal_item
from ckptfix.checkpoint.sharded_scan import scan_sharded
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_zip import TorchZip
from ckptfix.operations.diagnose.deepspeed import DeepSpeedState, diagnose_deepspeed, without_deepspeed
from ckptfix.operations.diagnose.entries import Numbered, Verdict, diagnose_gaps, diagnose_models
from ckptfix.operations.diagnose.files import diagnose_files
from ckptfix.operations.diagnose.names import diagnose_names
from ckptfix.operations.diagnose.saves import diagnose_save
from ckptfix.operations.diagnose.sharded import (
    diagnose_shard_files,
    diagnose_sharded_models,
    sharded_entries,
    unchecked_sharded,
)
from ckptfix.operations.diagnose.sharded_items import diagnose_items
from ckptfix.operations.diagnose.sharded_names import diagnose_sharded_names
from ckptfix.operations.diagnose.shards import diagnose_shards
from ckptfix.operations.diagnose.states import diagnose_states
from ckptfix.operations.findings import (
    CATALOGUE,
    CrcMismatch,
    DoubledModel,
    EntryGap,
    Finding,
    IdenticalModels,
    IdenticalStates,
    IndexMismatch,
    InterruptedSave,
    MalformedFile,
    MissingRank,
    MissingShard,
    NotATensorFile,
    TrailingBytes,
    TruncatedFile,
)
from ckptfix.storage.comparing import Digests
from ckptfix.storage.permission import unreadable
from ckptfix.weights.deepspeed_files import BESIDE
from ckptfix.wording import list_names

_OF_CONTENT = (MalformedFile, MissingRank, MissingShard, NotATensorFile, TrailingBytes, TruncatedFile)
"""The findings that say why a file is not there, or not of the size that it was saved with."""

_OF_ENTRIES = (DoubledModel, IdenticalModels, IdenticalStates, EntryGap)
"""The findings for which a file may be dropped or moved."""

Verdicts = Mapping[tuple[PurePosixPath, PurePosixPath], Verdict]
"""(kept file or folder, other one) -> how they compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found in a folder, most severe first, and what was not looked at, in words.

    ``unfinished``: what may not be read, each with its path, the reason, and what to type.

    ``digests``: of the bytes that were read to prove a duplicate, by file that is kept, for the journal.
    ``links``: the symbolic links of a folder of which a file may go or move, and what each leads to (``links_below``).
    """

    folder: CheckpointFolder
    sharded: tuple[ShardedState, ...]
    deepspeed: tuple[DeepSpeedState, ...]
    groups: tuple[ModelFiles, ...]
    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...]
    unfinished: tuple[str, ...]
    verdicts: Verdicts
    digests: Mapping[PurePosixPath, Digests]
    links: Mapping[PurePosixPath, frozenset[PurePosixPath]]

    def entries(self, role: Role) -> tuple[Sequence[Numbered], ...]:
        """Return the lists of numbered entries of a role: of files, a list a family, and of DCP folders."""
        folders = sharded_entries(self.sharded, role)
        return (*self.folder.entries(role), *([folders] if folders else []))


def diagnose(
    folder: CheckpointFolder,
    *,
    prove: bool = False,
    data: bool = False,
    drops: Iterable[Role] = (),
    known: Verdicts | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Find every kind of damage in a scanned folder.

    By default bytes of look-alikes are sampled. ``prove`` reads every byte of what would be dropped, and hashes it on
    the way (``repair``), ``data`` every byte of every look-alike and of every record with a CRC (``check --data``).
    ``drops`` names the roles of which equal entries are to be dropped. ``known``: comparisons made already, which hold
    still. ``progress`` is called with byte counts.

    Raises OSError when a file that could be scanned can no longer be read.
    """

    verdicts: dict[tuple[PurePosixPath, PurePosixPath], Verdict] = {}
    digests: dict[PurePosixPath, Digests] = {}

    def compare(pairing: Pairing | ShardedPairing, must_prove: bool) -> Verdict:
        pair, full = (pairing.kept.path, pairing.other.path), data or (prove and must_prove)
        verdict = (known or {}).get(pair)
        if verdict is None or (full and not verdict.full and verdict.difference is None):
            hashed = digests if prove and full else None
            if isinstance(pairing, ShardedPairing):
                difference = first_unequal_item(
                    folder.root, pairing, full=full, progress=progress, digests=hashed
                )
            else:
                of_file = None if hashed is None else hashed.setdefault(pairing.kept.path, {})
                difference = first_unequal(
                    folder.root, pairing, full=full, progress=progress, digests=of_file
                )
            verdict = Verdict(difference, full)
        verdicts[pair] = verdict
        return verdict

    drops = frozenset(drops)
    sharded = scan_sharded(folder)
    deepspeed = diagnose_deepspeed(folder, data=data, progress=progress)
    named = without_deepspeed(folder)
    groups = group_files(named)
    findings: list[Finding] = diagnose_shards(groups) if folder.only is None else []
    rebuilt = {
        finding.path for finding in findings if isinstance(finding, IndexMismatch) and finding.is_fixable
    }
    findings += diagnose_files(folder, data=data, progress=progress, explained=frozenset(rebuilt))
    damaged = frozenset(
        finding.path
        for finding in findings
        if isinstance(finding, (*_OF_CONTENT, CrcMismatch)) and not isinstance(finding, TrailingBytes)
    )
    evidence = Evidence(named, usable_manifest(folder.root) if folder.only is None else None)
    findings += diagnose_models(evidence, compare, drops=Role.MODEL in drops, damaged=damaged)
    findings += diagnose_sharded_models(evidence, sharded, compare, Role.MODEL in drops)
    doubled = frozenset(finding.path for finding in findings if isinstance(finding, DoubledModel))
    findings += diagnose_states(evidence, compare, drops, doubled)
    findings += diagnose_gaps(evidence)
    findings += diagnose_names(evidence, groups, doubled)
    findings += diagnose_sharded_names(sharded, folder.processes)
    findings += diagnose_shard_files(sharded)
    findings += (finding for state in deepspeed for finding in state.findings)
    of_items, refused = diagnose_items(folder.root, sharded, data=data, progress=progress)
    findings += of_items
    damaged = frozenset(finding.path for finding in findings if isinstance(finding, _OF_CONTENT))
    of_save = diagnose_save(folder, sharded, damaged, has_deepspeed=bool(deepspeed))
    findings += of_save.findings
    order = {kind: position for position, kind in enumerate(CATALOGUE)}
    severities = ("error", "warning", "note")
    findings.sort(
        key=lambda finding: (
            severities.index(finding.severity.value),
            order[type(finding)],
            str(finding.path),
        )
    )
    return Diagnosis(
        folder=folder,
        sharded=sharded,
        deepspeed=deepspeed,
        groups=groups,
        findings=tuple(findings),
        not_checked=(*_not_checked(folder, sharded, deepspeed, findings, data=data), *of_save.unchecked),
        unfinished=(*_unfinished(folder, sharded, deepspeed, refused), *of_save.unfinished),
        verdicts=verdicts,
        digests=digests,
        links=links_below(folder.root) if any(isinstance(one, _OF_ENTRIES) for one in findings) else {},
    )


def _why_not(path: Path, kind: str) -> str:
    """Say why nothing in a folder was checked, and what checks it where something does."""
    if is_empty(path):
        return "empty"
    is_walked = kind == PLAIN_FOLDER and not path.is_symlink()
    return f"not looked into{'; ckptfix check --recursive looks into it' if is_walked else ''}"


def _unfinished(
    folder: CheckpointFolder,
    sharded: Iterable[ShardedState],
    deepspeed: Iterable[DeepSpeedState],
    refused: Mapping[PurePosixPath, str],
) -> Iterator[str]:
    """Yield what may not be read: it may be healthy or damaged, and nobody can tell."""
    of_states = dict(refused)
    for state in sharded:
        of_states |= state.unreadable
        if state.problem is not None and state.problem.kind is ProblemKind.UNREADABLE:
            of_states[state.metadata_path] = state.problem.message
    for component in folder.components:
        if component.problem is not None and is_unreadable(component):
            yield f"{component.path}: {component.problem.message}"
    yield from (f"{path}: {why}" for path, why in of_states.items())
    yield from (words for state in deepspeed for words in state.unfinished)
    for path, kind in folder.subfolders.items():
        try:
            with os.scandir(folder.root / path):
                pass
        except OSError as error:
            if str(path) != "lost+found":  # of the file system, and closed to everybody
                yield f"{path}/ ({kind}): {unreadable(folder.root / path, error)}"


def _not_checked(
    folder: CheckpointFolder,
    sharded: Iterable[ShardedState],
    deepspeed: Sequence[DeepSpeedState],
    findings: list[Finding],
    *,
    data: bool,
) -> tuple[str, ...]:
    checked = {state.path for state in sharded} | {state.path for state in deepspeed}
    words = [
        f"{path}/ ({kind}): {_why_not(folder.root / path, kind)}"
        for path, kind in folder.subfolders.items()
        if path not in checked
    ]
    words += unchecked_sharded(sharded)
    words += (unread for state in deepspeed for unread in state.unread)
    words += [
        f"{component.path}: {component.problem.message}"
        for component in folder.components
        if component.problem is not None and component.problem.is_only_unchecked
    ]
    sampled = sum(1 for finding in findings if getattr(finding, "sampled", False))
    if sampled:
        comparisons = "1 comparison" if sampled == 1 else f"{sampled} comparisons"
        words.append(f"{comparisons} read samples only; ckptfix check --data reads every byte")
    words.append("values of tensors (NaN, zeros, flipped bits); ckptfix verify --data reads them")
    files = (one.content for one in folder.components if isinstance(one.content, TorchFile))
    has_checksums = any(isinstance(file.container, TorchZip) for file in files)
    if not data and (has_checksums or any(state.has_checksums for state in deepspeed)):
        words.append("checksums of tensor records in torch zip files; ckptfix check --data checks them")
    if not data and any(state.metadata is not None and state.metadata.stored for state in sharded):
        words.append("checksums of the items in .distcp files; ckptfix check --data checks them")
    known = {path for state in sharded for path in state.files} | set(BESIDE if deepspeed else ())
    known |= {PurePosixPath(REPORT), *(one.path for one in findings if isinstance(one, InterruptedSave))}
    strays = [str(path) for path in folder.strays if path not in known]
    if strays and folder.only is None:
        words.append(f"other files next to it: {list_names(strays)}")
    return tuple(words)


__all__ = ["Diagnosis", "diagnose"]
