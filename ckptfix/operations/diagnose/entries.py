"""Numbered entries: doubles, identical copies, conflicts, entries moved by doubles, and gaps."""

from collections.abc import Callable, Hashable, Iterable
from pathlib import PurePosixPath
from typing import NamedTuple, Protocol

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.keys import PREPARE_WRAPPERS, collapse
from ckptfix.checkpoint.pairing import STRUCTURE, Pairing, pair_up, signature
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


class Verdict(NamedTuple):
    """Where two paired entries first differ, None when they are equal; ``full``: every byte was read for it."""

    difference: str | None
    full: bool


Compare = Callable[[Pairing, bool], Verdict]
"""Compares two paired entries. The second argument says whether the answer will be used to drop something."""


def diagnose_entries(folder: CheckpointFolder, compare: Compare, drops: frozenset[Role]) -> list[Finding]:
    """Find what is wrong with every list of numbered entries.

    ``drops`` are the roles of which the user asked to drop equal entries; those are proven in full.
    """
    findings: list[Finding] = []
    ranks = sum(1 for component in folder.components if component.role is Role.RNG_STATE)
    for entries in folder.entries(Role.MODEL):
        findings += _models(entries, compare, Role.MODEL in drops, ranks != 1)
    for role in STATE_ROLES:
        for entries in folder.entries(role):
            findings += _states(entries, compare, role in drops)
    if folder.is_save_state and folder.only is None:
        for role in GAPLESS_ROLES:
            for entries in folder.entries(role):
                findings += _gap(entries)
    return findings


class Number(Protocol):
    """What is said by the name of such a one."""

    @property
    def index(self) -> int:
        """Its position."""

    def at(self, index: int) -> "Number":
        """Return the name of another entry of the same family."""


class Numbered(Protocol):
    """A file or a folder that Accelerate finds by its number."""

    @property
    def path(self) -> PurePosixPath:
        """Where it is."""

    @property
    def name(self) -> Number:
        """What its name says."""


def renumbered(entries: Iterable[Numbered], dropped: frozenset[PurePosixPath]) -> dict[PurePosixPath, int]:
    """Return the new position of every entry that stays: each drop moves the later ones down by one."""
    positions = {}
    removed = 0
    for entry in entries:
        if entry.path in dropped:
            removed += 1
        else:
            positions[entry.path] = entry.name.index - removed
    return positions


def _models(entries: tuple[Component, ...], compare: Compare, drop: bool, has_ranks: bool) -> list[Finding]:
    findings: list[Finding] = []
    doubled: set[PurePosixPath] = set()
    # Least wrapped first: of two equal entries the one with fewer wrappers is the original.
    ranked = sorted(entries, key=lambda entry: (_depth(entry), entry.name.index))
    alike: dict[Hashable, list[Component]] = {}
    for entry in ranked:
        if entry.whole is None or not entry.tensors:
            continue  # two models without a parameter are equal, and it means nothing
        originals = alike.setdefault(signature(entry), [])
        finding = _match(entry, originals, compare, drop, has_ranks)
        if finding is not None:
            findings.append(finding)
        if isinstance(finding, DoubledModel):
            doubled.add(entry.path)
        if not isinstance(finding, DoubledModel | IdenticalModels):
            originals.append(entry)
    findings.sort(key=lambda finding: str(finding.path))
    return findings + _shifted(entries, frozenset(doubled))


def _match(
    entry: Component, originals: list[Component], compare: Compare, drop: bool, has_ranks: bool
) -> Finding | None:
    """Compare an entry with every distinct one that is wrapped as much or less."""
    conflict: Finding | None = None
    for original in originals:
        pairing = pair_up(original, entry)
        if pairing is None:
            continue
        is_wrapped = _depth(entry) > _depth(original)
        difference, full = compare(pairing, is_wrapped or drop)
        sampled = not full
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
                chains=(_chain(entry), _chain(original)),
            )
        if conflict is None and _is_odd(entry, original, has_ranks):
            conflict = ConflictingModels(
                path=entry.path,
                original=original.path,
                chain=_chain(entry),
                tensor=None if difference == STRUCTURE else difference,
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


def _states(entries: tuple[Component, ...], compare: Compare, drop: bool) -> list[Finding]:
    findings: list[Finding] = []
    alike: dict[Hashable, list[Component]] = {}
    for entry in entries:
        originals = alike.setdefault(signature(entry), [])
        for original in originals:
            pairing = pair_up(original, entry)
            if pairing is None:
                continue
            difference, full = compare(pairing, drop)
            if difference is None:
                findings.append(
                    IdenticalStates(
                        path=entry.path, original=original.path, role=entry.role, sampled=not full
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
    """How often an entry was prepared: by what a repair of its names would leave first, so that a second one agrees.

    ``torch.compile`` and activation checkpointing do not count. A script that compiles a model, but not the copy it
    keeps as a target network, saves two honest entries with equal bytes.
    """
    chain = tuple(segment for segment in _chain(entry) if segment in PREPARE_WRAPPERS)
    return len(collapse(chain)), len(chain)


def _is_odd(entry: Component, original: Component, has_ranks: bool) -> bool:
    """Whether no honest pair of models would differ like this in their wrappers.

    What a repair of the names would even out does not count. One process alone (one RNG state) never wraps for training
    with others: a ``module.`` is then the model's own, of an EMA for instance.
    """
    return has_ranks and _depth(entry)[0] > _depth(original)[0]


def _chain(entry: Component) -> tuple[str, ...]:
    return entry.whole.chain if entry.whole else ()
