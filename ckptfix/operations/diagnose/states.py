"""Equal states of optimizers, schedulers and custom objects: which of them were saved twice, and how sure that is."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import PurePosixPath

from ckptfix.checkpoint.doubling import Evidence, fits
from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import Component
from ckptfix.checkpoint.pairing import pair_up, signature
from ckptfix.operations.diagnose.entries import Compare
from ckptfix.operations.findings import DoubledStates, IdenticalStates, SurplusStates

_INDEPENDENT = (Role.SAMPLER, Role.DATALOADER, Role.CUSTOM)
"""Roles whose intentional entries often are equal, and that belong to no model."""


def diagnose_states(
    evidence: Evidence, compare: Compare, drops: Collection[Role], doubled: Collection[PurePosixPath]
) -> list[IdenticalStates]:
    """Find equal states. ``drops``: roles of which the user asked to drop equal ones. ``doubled``: the doubled models.

    Next to a doubled model, an optimizer with the very moments of another is that optimizer saved twice: it goes where
    every optimizer that remains is one of a model that remains. Where nothing decides it, the user is asked.
    """
    findings: list[IdenticalStates] = []
    for role in _INDEPENDENT:
        for entries in evidence.folder.entries(role):
            findings += _identical(entries, compare, role in drops).values()
    models = [
        model
        for entries in evidence.folder.entries(Role.MODEL)
        for model in entries
        if model.path not in doubled and model.tensors
    ]
    optimizers = _only_family(evidence, Role.OPTIMIZER)
    prove = bool(doubled)
    equal = _identical(optimizers, compare, prove or Role.OPTIMIZER in drops)
    surplus = _surplus_optimizers(evidence, optimizers, equal, models, is_doubled=bool(doubled))
    findings += surplus.values()
    schedulers = _only_family(evidence, Role.SCHEDULER)
    equal = _identical(schedulers, compare, prove or Role.SCHEDULER in drops)
    findings += _surplus_schedulers(schedulers, equal, optimizers, surplus, bool(doubled)).values()
    return findings


def _only_family(evidence: Evidence, role: Role) -> tuple[Component, ...]:
    families = evidence.folder.entries(role)
    return families[0] if families else ()


def _identical(
    entries: Sequence[Component], compare: Compare, prove: bool
) -> dict[PurePosixPath, IdenticalStates]:
    """Return a finding for each entry that equals an earlier one, by its path."""
    found: dict[PurePosixPath, IdenticalStates] = {}
    alike: dict[Hashable, list[Component]] = {}
    for entry in entries:
        originals = alike.setdefault(signature(entry), [])
        for original in originals:
            pairing = pair_up(original, entry)
            if pairing is None:
                continue
            difference, full = compare(pairing, prove)
            if difference is None:
                found[entry.path] = IdenticalStates(
                    path=entry.path, original=original.path, role=entry.role, sampled=not full
                )
                break
        else:
            originals.append(entry)
    return found


def _surplus_optimizers(
    evidence: Evidence,
    optimizers: Sequence[Component],
    equal: Mapping[PurePosixPath, IdenticalStates],
    models: Sequence[Component],
    *,
    is_doubled: bool,
) -> dict[PurePosixPath, IdenticalStates]:
    """Judge equal optimizers. ``models``: those that remain, without doubles."""
    if not equal:
        return {}
    facts = evidence.optimizers
    trained = {path for path in equal if (own := facts.get(path)) is not None and own.has_stepped}
    kept = [entry.path for entry in optimizers if entry.path not in trained]
    # What keeps no moments equals any other, so that nothing but their number can show a second prepare().
    plain = [path for path in equal if path not in trained]
    if plain and (len(kept) > len(models) > 0 or (is_doubled and len(plain) < len(kept) - 1)):
        trained = set(equal)
    elif is_doubled and all(path in facts and fits(facts[path], models) for path in kept):
        return {path: _doubled(one) if path in trained else one for path, one in equal.items()}
    loads = tuple(entry.path for entry in optimizers)
    return {path: _surplus(one, loads) if path in trained else one for path, one in equal.items()}


def _surplus_schedulers(
    schedulers: Sequence[Component],
    equal: Mapping[PurePosixPath, IdenticalStates],
    optimizers: Sequence[Component],
    surplus: Mapping[PurePosixPath, IdenticalStates],
    is_doubled: bool,
) -> dict[PurePosixPath, IdenticalStates]:
    """Judge equal schedulers next to a doubled model by the optimizers, with which they are prepared."""
    if not is_doubled:
        return dict(equal)
    numbers = {entry.path: number for number, entry in enumerate(optimizers)}
    doubles = {
        numbers[path]: numbers[one.original]
        for path, one in surplus.items()
        if isinstance(one, DoubledStates)
    }
    paths = [entry.path for entry in schedulers]
    all_equal = len(equal) == len(paths) - 1
    if all_equal and len(paths) <= len(optimizers) - len(doubles):
        return dict(equal)
    first = {path: equal[path].original if path in equal else path for path in paths}
    is_clear = len(paths) == len(optimizers) and all(
        first[paths[number]] == first[paths[original]] for number, original in doubles.items()
    )
    if is_clear and doubles:
        return {
            path: _doubled(one) if number in doubles else one
            for number, path in enumerate(paths)
            if (one := equal.get(path)) is not None
        }
    return {path: _surplus(one, tuple(paths)) for path, one in equal.items()}


def _doubled(one: IdenticalStates) -> DoubledStates:
    return DoubledStates(path=one.path, original=one.original, role=one.role, sampled=one.sampled)


def _surplus(one: IdenticalStates, loads: tuple[PurePosixPath, ...]) -> SurplusStates:
    return SurplusStates(
        path=one.path, original=one.original, role=one.role, sampled=one.sampled, loads=loads
    )
