"""Equal entries: models saved twice, and the states of optimizers, schedulers and custom objects
that go with them.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import PurePosixPath
from typing import Protocol

from msgspec.structs import replace

from ckptfix.checkpoint.dcp import numbered_folders, rank_of
from ckptfix.checkpoint.filenames import FORMATS_OF_MODELS
from ckptfix.checkpoint.folder import Component
from ckptfix.checkpoint.keys import KeyMap, common_wrappers, prepared
from ckptfix.checkpoint.pairing import (
    STRUCTURE,
    Pairing,
    Saved,
    differing_tensors,
    equal_entries,
    pair_up,
    signature,
)
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.second_prepare import Evidence
from ckptfix.diagnosis.case import Case, Verdict
from ckptfix.diagnosis.findings.base import Finding, as_kind
from ckptfix.diagnosis.findings.duplicates import (
    ConflictingModels,
    DoubledModel,
    DoubledStates,
    EntryGap,
    EqualAtFirst,
    IdenticalModels,
    IdenticalStates,
    NearlyEqualModels,
    RecordedCopies,
    RelatedModels,
    ShiftedEntries,
    SurplusStates,
)

GAPLESS_ROLES = (Role.MODEL, Role.OPTIMIZER, Role.SCHEDULER, Role.CUSTOM)
"""Roles whose entries Accelerate saves without a gap; samplers and dataloaders may rightly skip
numbers.
"""


Shapes = Mapping[str, tuple[int, ...]]
"""Key -> shape of the tensors of one model."""


def diagnose_models(case: Case) -> list[Finding]:
    """Find models that were saved twice, and related models, in files and in DCP folders.

    Where the user asked to drop equal models, their equality is proven in full. A file that lost
    bytes counts as different from any other.
    """
    findings: list[Finding] = []
    evidence = case.evidence
    is_alone = evidence.folder.processes == 1
    for entries in evidence.folder.entries(Role.MODEL):
        of_entries = _decided(_duplicates(case, entries, is_alone))
        of_entries += _cut_short(evidence, entries)
        doubled = frozenset(
            finding.path for finding in of_entries if isinstance(finding, DoubledModel)
        )
        shifted = _shifted(entries, doubled)
        findings += (
            (
                replace(finding, shifts=True)
                if shifted and isinstance(finding, DoubledModel)
                else finding
            )
            for finding in of_entries
        )
        findings += shifted
    folders = [entry.state for entry in numbered_folders(case.sharded, Role.MODEL)]
    ranks = {rank_of(path) for state in folders for path in state.data}
    findings += _duplicates(case, folders, len(ranks) == 1)
    return findings


def diagnose_gaps(case: Case) -> list[Finding]:
    """Find numbers that are missing in the list of a role."""
    folder = case.evidence.folder
    if not folder.is_save_state or folder.only is not None:
        return []
    findings: list[Finding] = []
    for role in GAPLESS_ROLES:
        of_formats = [
            entries
            for entries in folder.entries(role)
            if entries[0].name.family[1:] in FORMATS_OF_MODELS
        ]
        known = {entry.name.index for entries in of_formats for entry in entries}
        for entries in folder.entries(role):
            findings += _gap(entries, known if entries in of_formats else ())
    return findings


class Number(Protocol):
    """Protocol of a name with a position."""

    @property
    def index(self) -> int:
        """Its position."""

    def at(self, index: int) -> "Number":
        """Return the name of another entry of the same family."""


class Numbered(Protocol):
    """Protocol of a file or a folder that Accelerate finds by its number."""

    @property
    def path(self) -> PurePosixPath:
        """The path of the entry from the checkpoint."""

    @property
    def name(self) -> Number:
        """The parsed name."""


def renumbered(
    entries: Iterable[Numbered], dropped: frozenset[PurePosixPath]
) -> dict[PurePosixPath, int]:
    """Return the new position of every entry that stays: each drop moves the later ones down by
    one.
    """
    positions = {}
    removed = 0
    for entry in entries:
        if entry.path in dropped:
            removed += 1
        else:
            positions[entry.path] = entry.name.index - removed
    return positions


def _duplicates(case: Case, entries: Iterable[Saved], is_alone: bool) -> list[Finding]:
    """Compare the models of one list. ``is_alone``: one process saved them."""
    findings: list[Finding] = []
    doubles: dict[PurePosixPath, list[Component]] = {}  # by the original
    alike: dict[Hashable, list[Saved]] = {}
    # Least wrapped first: of two equal entries the one with fewer wrappers is the original.
    for entry in sorted(entries, key=lambda entry: len(prepared(entry.chain))):
        if entry.model is None or not entry.tensors:
            continue  # equality of two models without a parameter means nothing
        originals = alike.setdefault(signature(entry), [])
        finding = _match(case, entry, originals, doubles, is_alone)
        if finding is not None:
            findings.append(finding)
        if isinstance(finding, DoubledModel) and isinstance(entry, Component):
            doubles.setdefault(finding.original, []).append(entry)
        elif not isinstance(finding, IdenticalModels):
            originals.append(entry)
    return findings


def _decided(findings: list[Finding]) -> list[Finding]:
    """Turn several duplicates of one original with the same keys into copies, as ``prepare``
    registers a wrapper once.

    One of them is another model, such as an average, and nothing shows which one.
    """
    known = Counter(
        (finding.original, finding.chain)
        for finding in findings
        if isinstance(finding, DoubledModel)
    )
    unclear = {original for (original, _), count in known.items() if count > 1}
    return [
        (
            IdenticalModels(
                path=finding.path,
                original=finding.original,
                tensors=finding.tensors,
                bytes=finding.bytes,
                sampled=finding.sampled,
                chains=(finding.chain, ()),
                doubt="several entries are equal to it, but a second prepare() adds only one",
            )
            if isinstance(finding, DoubledModel) and finding.original in unclear
            else finding
        )
        for finding in findings
    ]


def _match(
    case: Case,
    entry: Saved,
    originals: list[Saved],
    doubles: Mapping[PurePosixPath, list[Component]],
    is_alone: bool,
) -> Finding | None:
    """Compare an entry with every distinct one that has as many wrappers or fewer."""
    related: Finding | None = None
    for original in originals:
        pairing = pair_up(original, entry)
        if pairing is None:
            continue
        difference, full = case.compare(pairing, Role.MODEL in case.drops)
        doubt = "the keys in DCP folders do not show a second prepare()"
        if difference is None and isinstance(original, Component) and isinstance(entry, Component):
            known = doubles.get(original.path, ())
            doubt = next(case.evidence.doubts(original, known, entry, pairing.size), "")
            if not doubt:
                difference, full = case.compare(pairing, True)
        if difference is None and not doubt:
            return DoubledModel(
                path=entry.path,
                original=original.path,
                chain=entry.chain,
                tensors=len(entry.tensors),
                bytes=pairing.size,
                sampled=not full,
            )
        if difference is None:
            identical = IdenticalModels(
                path=entry.path,
                original=original.path,
                tensors=len(entry.tensors),
                bytes=pairing.size,
                sampled=not full,
                chains=(entry.chain, original.chain),
                doubt=doubt,
            )
            if isinstance(original, Component) and isinstance(entry, Component):
                earlier, later = case.evidence.parted(original, entry)
                if later:
                    return as_kind(EqualAtFirst, identical, known_by=later)
                are_recorded = all(map(case.evidence.is_registered, (original, entry)))
                # Models that differed before may be equal because a file was copied.
                if are_recorded and entry.chain == original.chain and not earlier:
                    return as_kind(RecordedCopies, identical)
            return identical
        if related is None and len(prepared(entry.chain)) > len(prepared(original.chain)):
            related = _related(case, pairing, difference, is_alone, full=full)
    return related


def _related(
    case: Case, pairing: Pairing, difference: str, is_alone: bool, *, full: bool
) -> Finding | None:
    """Return how two models with the same keys and other values are related; a single process adds
    no wrapper.
    """
    original, entry = pair = pairing.kept, pairing.other
    tensor = None if difference == STRUCTURE else difference
    harmed = tuple(model.path for model in pair if model.path in case.corrupt)
    proof = (
        next(filter(None, (_foreign(case.evidence, model) for model in pair)), "")
        if not harmed
        else ""
    )
    if proof:
        return ConflictingModels(
            path=entry.path, original=original.path, chain=entry.chain, tensor=tensor, proof=proof
        )
    if is_alone and not harmed:
        return None
    total = len(entry.tensors)
    # An average of a trained model differs in nearly every tensor; bit rot, or an edit by hand, in
    # a few.
    few = max(1, total // 10)
    if not harmed and tensor is not None and 2 * few <= total:
        differing = [*islice(differing_tensors(case.folder.root, pairing, full=full), few + 1)]
        if 0 < len(differing) <= few:
            return NearlyEqualModels(
                path=entry.path,
                original=original.path,
                chain=entry.chain,
                tensor=differing[0],
                tensors=total,
                differing=len(differing),
                sampled=not full,
            )
    return RelatedModels(
        path=entry.path, original=original.path, chain=entry.chain, tensor=tensor, damaged=harmed
    )


def _foreign(evidence: Evidence, entry: Saved) -> str:
    return (
        evidence.foreign(entry)
        if isinstance(entry, Component)
        else evidence.unlisted(entry.metadata_path)
    )


def _cut_short(evidence: Evidence, entries: Sequence[Component]) -> list[Finding]:
    """Return the relation of a damaged model with a readable header to another entry with the same
    keys.
    """
    findings: list[Finding] = []
    intact = [entry for entry in entries if entry.whole is not None and entry.tensors]
    for damaged in (entry for entry in entries if entry.problem is not None and intact):
        names = evidence.names_left(damaged)
        chain = common_wrappers(names)
        for entry in intact:
            shapes = {tensor.fqn: tensor.shape for tensor in entry.tensors}
            if (
                not names
                or _bare(shapes, entry.chain) != _bare(names, chain)
                or chain == entry.chain
            ):
                continue
            pair = (
                (damaged.path, entry.path)
                if len(chain) > len(entry.chain)
                else (entry.path, damaged.path)
            )
            longer = max(chain, entry.chain, key=len)
            findings.append(
                RelatedModels(
                    path=pair[0],
                    original=pair[1],
                    chain=longer,
                    tensor=None,
                    damaged=(damaged.path,),
                )
            )
            break
    return findings


def _bare(shapes: Shapes, chain: tuple[str, ...]) -> Shapes:
    strip = KeyMap(remove=chain)
    return {strip(name): shape for name, shape in shapes.items()}


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


def _gap(entries: tuple[Component, ...], known: Collection[int]) -> list[Finding]:
    """Return the gaps in a list of entries. ``known``: the positions that other lists have, too."""
    findings: list[Finding] = []
    expected = 0
    for entry in entries:
        while expected in known and expected < entry.name.index:
            expected += 1
        if entry.name.index != expected:
            missing = PurePosixPath(str(entry.name.at(expected)))
            findings.append(EntryGap(path=entry.path, missing=missing))
        expected = entry.name.index + 1
    return findings


_INDEPENDENT = (Role.SAMPLER, Role.DATALOADER, Role.CUSTOM)
"""Roles whose intentional entries are often equal, and do not belong to a model."""


def diagnose_states(case: Case) -> list[IdenticalStates]:
    """Find equal states.

    Next to a duplicate model, an optimizer with exactly the moments of another one was saved twice,
    where the models that remain do not need it; otherwise the user decides.
    """
    findings: list[IdenticalStates] = []
    evidence, doubled = case.evidence, case.paths(DoubledModel)
    for role in _INDEPENDENT:
        for entries in evidence.folder.entries(role):
            findings += _identical(case, entries, role in case.drops).values()
    models = [
        model
        for entries in evidence.folder.entries(Role.MODEL)
        for model in entries
        if model.path not in doubled and model.tensors
    ]
    optimizers = _only_family(evidence, Role.OPTIMIZER)
    prove = bool(doubled)
    equal = _identical(case, optimizers, prove or Role.OPTIMIZER in case.drops)
    surplus = _surplus_optimizers(evidence, optimizers, equal, models, is_doubled=bool(doubled))
    findings += surplus.values()
    schedulers = _only_family(evidence, Role.SCHEDULER)
    equal = _identical(case, schedulers, prove or Role.SCHEDULER in case.drops)
    findings += _surplus_schedulers(schedulers, equal, optimizers, surplus, bool(doubled)).values()
    return findings


def _only_family(evidence: Evidence, role: Role) -> tuple[Component, ...]:
    families = evidence.folder.entries(role)
    return families[0] if families else ()


def _identical(
    case: Case, entries: Sequence[Component], prove: bool
) -> dict[PurePosixPath, IdenticalStates]:
    """Return a finding for each entry that equals an earlier one, by its path."""

    def equality(pairing: Pairing) -> Verdict | None:
        verdict = case.compare(pairing, prove)
        return verdict if verdict.difference is None else None

    return {
        entry.path: IdenticalStates(
            path=entry.path, original=original.path, role=entry.role, sampled=not verdict.full
        )
        for original, entry, verdict in equal_entries(entries, equality)
    }


def _surplus_optimizers(
    evidence: Evidence,
    optimizers: Sequence[Component],
    equal: Mapping[PurePosixPath, IdenticalStates],
    models: Sequence[Component],
    *,
    is_doubled: bool,
) -> dict[PurePosixPath, IdenticalStates]:
    """Judge equal optimizers. ``models``: the remaining ones, without duplicates.

    Those with moments of gradients are dropped next to a duplicate model, if there are more
    optimizers than models, and those that stay train every parameter that all of them do. Two
    towers of a model can have equal optimizers.
    """
    if not equal:
        return {}
    trained = {path for path in equal if evidence.has_moments(path)}
    kept = [optimizer for optimizer in optimizers if optimizer.path not in trained]
    # Optimizers without moments are all equal, so that only their number can show a second
    # prepare().
    is_surplus = len(kept) > len(models) > 0 and len(trained) < len(equal)
    if (
        is_doubled
        and not is_surplus
        and len(optimizers) > len(models)
        and evidence.is_trained_alike(kept, optimizers, models)
    ):
        return {
            path: _doubled(state) if path in trained else state for path, state in equal.items()
        }
    loads = tuple(optimizer.path for optimizer in optimizers)
    return {
        path: _surplus(state, loads) if is_surplus or path in trained else state
        for path, state in equal.items()
    }


def _surplus_schedulers(
    schedulers: Sequence[Component],
    equal: Mapping[PurePosixPath, IdenticalStates],
    optimizers: Sequence[Component],
    surplus: Mapping[PurePosixPath, IdenticalStates],
    is_doubled: bool,
) -> dict[PurePosixPath, IdenticalStates]:
    """Judge equal schedulers next to a duplicate model by the optimizers, with which they are
    prepared.
    """
    numbers = {entry.path: number for number, entry in enumerate(optimizers)}
    doubles = {
        numbers[path]: numbers[state.original]
        for path, state in surplus.items()
        if isinstance(state, DoubledStates)
    }
    paths = [entry.path for entry in schedulers]
    has_duplicates = any(
        isinstance(state, DoubledStates | SurplusStates) for state in surplus.values()
    )
    if len(paths) <= len(optimizers) and not has_duplicates:
        return {path: replace(state, is_of_own_optimizer=True) for path, state in equal.items()}
    if not is_doubled and not doubles and not has_duplicates:
        return {
            path: replace(state, lost_optimizer=path.name.replace("scheduler", "optimizer"))
            if paths.index(path) >= len(optimizers)
            else state
            for path, state in equal.items()
        }
    if not is_doubled or (not doubles and len(paths) <= len(optimizers)):
        return dict(equal)
    if len(equal) == len(paths) - 1 and len(paths) <= len(optimizers) - len(doubles):
        return dict(equal)
    first = {path: equal[path].original if path in equal else path for path in paths}
    is_clear = len(paths) == len(optimizers) and all(
        first[paths[number]] == first[paths[original]] for number, original in doubles.items()
    )
    if is_clear and doubles:
        return {
            path: _doubled(state) if number in doubles else state
            for number, path in enumerate(paths)
            if (state := equal.get(path)) is not None
        }
    return {path: _surplus(state, tuple(paths)) for path, state in equal.items()}


def _doubled(state: IdenticalStates) -> DoubledStates:
    return DoubledStates(
        path=state.path, original=state.original, role=state.role, sampled=state.sampled
    )


def _surplus(state: IdenticalStates, loads: tuple[PurePosixPath, ...]) -> SurplusStates:
    return SurplusStates(
        path=state.path,
        original=state.original,
        role=state.role,
        sampled=state.sampled,
        loads=loads,
    )
