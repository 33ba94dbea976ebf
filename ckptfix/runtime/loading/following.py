"""Optimizers go where their models went, and schedulers where their optimizers went."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptfix.checkpoint.entries import Entry
from ckptfix.runtime.loading.report import Part
from ckptfix.runtime.loading.targets import Fit, Target

Owners = Sequence[tuple[int, ...]]
"""``owners[number]``: the objects of the part before (its numbers) that an object holds; () when none is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where the entries of a part went. ``pairs``: target -> entry, of those that get one. ``aside``: as in Settled.

    ``is_moved``: entries went to other positions than they were saved at, doubles not counted. ``fits``: of models,
    target -> how its names lead to those of its entry.
    """

    part: Part
    entries: Sequence[Entry] = ()
    targets: Sequence[Target] = ()
    pairs: Mapping[int, int] = field(default_factory=dict)
    aside: Mapping[int, int] = field(default_factory=dict)
    is_moved: bool = False
    fits: Mapping[int, Fit] = field(default_factory=dict, repr=False)

    def name(self, number: int) -> str:
        """Return what a target is called in messages."""
        target = self.targets[number]
        return f"{self.part.value} {target.index} ({target.what})"

    def got(self) -> dict[int, int]:
        """Return entry -> target, a double like the one it doubles."""
        found = {entry: number for number, entry in self.pairs.items()}
        return found | {double: found[one] for double, one in self.aside.items() if one in found}


def went_elsewhere(
    entries: Sequence[Entry], targets: Sequence[Target], pairs: Mapping[int, int], aside: Mapping[int, int]
) -> bool:
    """Whether entries go to other positions than they were saved at.

    Counted among those that a hook left, and among all that are registered: a hook of the script may have taken the
    same ones away when it saved, or not.
    """
    kept = {entry: rank for rank, entry in enumerate(n for n in range(len(entries)) if n not in aside)}
    among_kept = all(kept.get(entry) == number for number, entry in pairs.items())
    among_all = all(entries[entry].index == targets[number].index for number, entry in pairs.items())
    return not (among_kept or among_all)


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """``reasons``: why an entry does not fit a target, with what its place says. ``by_order``: no manifest said it."""

    reasons: list[list[str]]
    held: Owners = ()
    by_order: frozenset[int] = frozenset()

    def why(self, before: Placed, number: int, entry: int) -> str:
        """Return in words why a target gets the entry of another position."""
        names = ", ".join(before.name(owned) for owned in (self.held[number] if self.held else ()))
        how = ", by the order in which both were saved" if entry in self.by_order else ""
        return "from another position" + (f", with {names}{how}" if names else "")


def follow(
    reasons: list[list[str]], entries: Sequence[Entry], before: Placed, owners: Callable[[], Owners]
) -> Followed:
    """Let entries fit only where the objects that they belong to went.

    The manifest says what belongs together. Without it, and where the part before moved, entries that fit several
    targets go by the order of both parts; where that says nothing, they fit none. ``owners`` is asked for only then.
    """
    recorded = [_recorded(entry, before) for entry in entries]
    if not before.is_moved and not any(recorded):
        return Followed(reasons=reasons)
    held = owners()
    result = [
        [
            reason or _apart(before, belongs, held[number]) for number, reason in enumerate(row)
        ]
        for row, belongs in zip(reasons, recorded, strict=True)
    ]  # fmt: skip
    doubtful = [
        number
        for number, row in enumerate(result)
        if row.count("") > 1 and not (recorded[number] and all(held))
    ]
    if not before.is_moved or not doubtful:
        return Followed(reasons=result, held=held)
    place = _by_order(entries, before, held)
    for number in doubtful:
        text = _not_here(before, None if place is None else place[number])
        meant = None if place is None else _holder(before.got().get(place[number]), held)
        result[number] = [
            reason or ("" if target == meant else text) for target, reason in enumerate(result[number])
        ]
    by_order = frozenset(doubtful if place is not None else ())
    return Followed(reasons=result, held=held, by_order=by_order)


def _recorded(entry: Entry, before: Placed) -> frozenset[int]:
    """Return the entries of the part before that an entry belongs to, as the manifest says."""
    if entry.recorded is None:
        return frozenset()
    driven = entry.recorded.optimizer
    positions = {*entry.recorded.models, *(() if driven is None else (driven,))}
    return frozenset(n for n, one in enumerate(before.entries) if one.index in positions)


def _apart(before: Placed, belongs: frozenset[int], held: tuple[int, ...]) -> str:
    """Return why an entry does not belong to a target that holds these; what went nowhere is no reason."""
    if not belongs or not held:
        return ""
    got = before.got()
    for entry in sorted(belongs):
        if entry in got and got[entry] not in held:
            return _not_here(before, entry)
    for number in held:
        entry = before.pairs.get(number, -1)
        if entry >= 0 and not {entry, *(d for d, one in before.aside.items() if one == entry)} & belongs:
            return f"it does not belong to {before.entries[entry].label}, which {before.name(number)} gets"
    return ""


def _by_order(entries: Sequence[Entry], before: Placed, held: Owners) -> list[int] | None:
    """Return for each entry the one of the part before that was saved at its position, None when that says nothing.

    It does when there are as many of both, in the folder and in the run, and each object holds one of the other part.
    """
    if sorted(held) != [(number,) for number in range(len(before.targets))]:
        return None
    everything = list(range(len(before.entries)))
    if [entry.index for entry in before.entries] != everything:
        return None
    alone = [number for number in everything if number not in before.aside]
    positions = [entry.index for entry in entries]
    return next((place for place in (everything, alone) if positions == list(range(len(place)))), None)


def _holder(number: int | None, held: Owners) -> int | None:
    return next((target for target, owned in enumerate(held) if owned == (number,)), None)


def _not_here(before: Placed, entry: int | None) -> str:
    """Return why an entry fits only another target, or none because nothing says which."""
    word = before.part.value
    if entry is None:
        return (
            f"the {word} are in another order here than in the folder, and nothing shows which of them it belongs to; "
            f"next: prepare the {word} in the order of the run that saved"
        )
    number = before.got().get(entry)
    where = "nothing of this run gets" if number is None else f"{before.name(number)} gets"
    return f"it belongs to {before.entries[entry].label}, which {where}"
