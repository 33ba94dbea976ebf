"""Numbered entries: doubles, identical copies, conflicts, entries moved by doubles, and gaps."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.keys import collapse
from ckptfix.checkpoint.pairing import Pairing, pair_up
from ckptfix.operations.findings import (
    ConflictingModels,
    DoubledModel,
    EntryGap,
    Finding,
    IdenticalModels,
    IdenticalStates,
    ShiftedEntries,
)

STATE_ROLES = (Role.OPTIMIZER, Role.SCHEDULER, Role.SAMPLER, Role.DATALOADER, Role.CUSTOM)
"""Roles whose honest entries often are equal, so that equality alone says nothing."""

GAPLESS_ROLES = (Role.MODEL, Role.OPTIMIZER, Role.SCHEDULER, Role.CUSTOM)
"""Roles of which Accelerate saves every entry; samplers and dataloaders may rightly skip numbers."""


@dataclass(frozen=True, slots=True)
class Proof:
    """How equality of bytes is established.

    ``differs`` returns the first differing tensor of a pairing, or None. Its second argument says whether the
    answer will be used to drop something: then every byte must be read. ``reads_all``: whether it is anyway.
    """

    differs: Callable[[Pairing, bool], str | None]
    reads_all: Callable[[bool], bool]


def diagnose_entries(folder: CheckpointFolder, proof: Proof, drops: frozenset[Role]) -> list[Finding]:
    """Find what is wrong with every list of numbered entries.

    ``drops`` are the roles of which the user asked to drop equal entries; those are proven in full.
    """
    findings: list[Finding] = []
    for entries in folder.entries(Role.MODEL):
        findings += _models(entries, proof, Role.MODEL in drops)
    for role in STATE_ROLES:
        for entries in folder.entries(role):
            findings += _states(entries, proof, role in drops)
    if folder.is_save_state and folder.only is None:
        for role in GAPLESS_ROLES:
            for entries in folder.entries(role):
                findings += _gap(entries)
    return findings


def renumbered(entries: tuple[Component, ...], dropped: frozenset[PurePosixPath]) -> dict[PurePosixPath, int]:
    """Return the new position of every entry that stays: each drop moves the later ones down by one."""
    positions = {}
    removed = 0
    for entry in entries:
        if entry.path in dropped:
            removed += 1
        else:
            positions[entry.path] = entry.name.index - removed
    return positions


def _models(entries: tuple[Component, ...], proof: Proof, drop: bool) -> list[Finding]:
    findings: list[Finding] = []
    doubled: set[PurePosixPath] = set()
    # Least wrapped first: of two equal entries the one with fewer wrappers is the original.
    ranked = sorted(entries, key=lambda entry: (_depth(entry), entry.name.index))
    originals: list[Component] = []
    for entry in ranked:
        if entry.whole is None:
            continue
        finding = _match(entry, originals, proof, drop)
        if finding is not None:
            findings.append(finding)
        if isinstance(finding, DoubledModel):
            doubled.add(entry.path)
        if not isinstance(finding, DoubledModel | IdenticalModels):
            originals.append(entry)
    findings.sort(key=lambda finding: str(finding.path))
    return findings + _shifted(entries, frozenset(doubled))


def _match(entry: Component, originals: list[Component], proof: Proof, drop: bool) -> Finding | None:
    """Compare an entry with every distinct one that is wrapped as much or less."""
    conflict: Finding | None = None
    for original in originals:
        pairing = pair_up(original, entry)
        if pairing is None:
            continue
        is_wrapped = _depth(entry) > _depth(original)
        must_prove = is_wrapped or drop
        difference = proof.differs(pairing, must_prove)
        sampled = not proof.reads_all(must_prove)
        size = sum(run.length for run in pairing.runs or ())
        if difference is None and is_wrapped:
            return DoubledModel(
                path=entry.path,
                original=original.path,
                chain=_chain(entry),
                tensors=len(entry.tensors),
                bytes=size,
                sampled=sampled,
            )
        if difference is None:
            return IdenticalModels(
                path=entry.path,
                original=original.path,
                tensors=len(entry.tensors),
                bytes=size,
                sampled=sampled,
            )
        if is_wrapped and conflict is None:
            conflict = ConflictingModels(
                path=entry.path, original=original.path, chain=_chain(entry), tensor=difference
            )
    return conflict


def _shifted(entries: tuple[Component, ...], doubled: frozenset[PurePosixPath]) -> list[Finding]:
    positions = renumbered(entries, doubled)
    return [
        ShiftedEntries(
            path=entry.path,
            belongs=PurePosixPath(str(entry.name.at(positions[entry.path]))),
            positions=entry.name.index - positions[entry.path],
        )
        for entry in entries
        if entry.path in positions and positions[entry.path] != entry.name.index
    ]


def _states(entries: tuple[Component, ...], proof: Proof, drop: bool) -> list[Finding]:
    findings: list[Finding] = []
    originals: list[Component] = []
    for entry in entries:
        for original in originals:
            pairing = pair_up(original, entry)
            if pairing is not None and proof.differs(pairing, drop) is None:
                findings.append(
                    IdenticalStates(
                        path=entry.path,
                        original=original.path,
                        role=entry.role,
                        sampled=not proof.reads_all(drop),
                    )
                )
                break
        else:
            originals.append(entry)
    return findings


def _gap(entries: tuple[Component, ...]) -> list[Finding]:
    findings: list[Finding] = []
    expected = 0
    for entry in entries:
        if entry.name.index != expected:
            missing = PurePosixPath(str(entry.name.at(expected)))
            findings.append(EntryGap(path=entry.path, missing=missing))
        expected = entry.name.index + 1
    return findings


def _depth(entry: Component) -> tuple[int, int]:
    """How wrapped an entry is: by what a repair of its names would leave first, so that a second repair agrees."""
    return len(collapse(_chain(entry))), len(_chain(entry))


def _chain(entry: Component) -> tuple[str, ...]:
    return entry.whole.chain if entry.whole else ()
