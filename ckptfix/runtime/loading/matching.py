"""Which saved entry goes to which object of the run.

What fits what decides, strict fits first, then proven doubles are set aside; order decides only among equals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptfix.checkpoint.entries import Entry, doubles
from ckptfix.runtime.loading.targets import Target
from ckptfix.wording import count_of

Relation = Sequence[Sequence[bool]]
"""``relation[entry][target]``: whether this entry fits this target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """``pairs``: target -> entry. ``by_position``: targets that others fit as well. ``left``: entries without target.

    ``refusal``: why some targets got nothing although entries fit them, in terms of (targets, entries) that cannot be
    told apart; None when the assignment stands.
    """

    pairs: dict[int, int]
    by_position: frozenset[int]
    left: tuple[int, ...]
    refusal: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def is_whole(self, targets: int) -> bool:
        """Whether every target got an entry."""
        return self.refusal is None and len(self.pairs) == targets


def assign(relation: Relation, targets: int) -> Assignment:
    """Give entries to targets where the relation leaves no doubt.

    Entries that fit the same targets form a block with them. A block of as many entries as targets goes by position;
    one with more or fewer entries is refused, unless it has no entries at all. Where blocks overlap, every entry must
    fit the target of its own position.
    """
    rows = [frozenset(t for t in range(targets) if row[t]) for row in relation]
    pairs: dict[int, int] = {}
    by_position: set[int] = set()
    fitting = [number for number, row in enumerate(rows) if row]
    left = tuple(number for number, row in enumerate(rows) if not row)
    if any(rows[one] != rows[two] and rows[one] & rows[two] for one in fitting for two in fitting):
        if len(rows) == targets and all(number in row for number, row in enumerate(rows)):
            return Assignment(
                pairs={number: number for number in range(targets)},
                by_position=frozenset(range(targets)),
                left=(),
            )
        everything = tuple(sorted(frozenset[int]().union(*rows)))
        return Assignment(pairs={}, by_position=frozenset(), left=left, refusal=(everything, tuple(fitting)))
    for block in dict.fromkeys(rows[number] for number in fitting):
        entries = [number for number in fitting if rows[number] == block]
        wanted = sorted(block)
        if len(entries) != len(wanted):
            return Assignment(
                pairs={}, by_position=frozenset(), left=left, refusal=(tuple(wanted), tuple(entries))
            )
        pairs.update(zip(wanted, entries, strict=True))
        if len(wanted) > 1:
            by_position.update(wanted)
    return Assignment(pairs=pairs, by_position=frozenset(by_position), left=left)


def best(relations: Sequence[Relation], loosest: Relation, targets: int) -> Assignment | None:
    """Return the first whole assignment, strictest relation first, whose left entries fit no target even loosely."""
    for relation in relations:
        found = assign(relation, targets)
        if found.is_whole(targets) and not any(any(loosest[entry]) for entry in found.left):
            return found
    return None


Reasons = Sequence[Sequence[str]]
"""``reasons[entry][target]``: why the entry does not fit the target, "" when it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """``assignment`` counts among all entries. ``aside``: entry -> the entry it is a proven double of."""

    assignment: Assignment
    aside: dict[int, int]


def settle(
    root: Path,
    entries: Sequence[Entry],
    targets: Sequence[Target],
    reasons: Reasons,
    *,
    exact: Relation | None = None,
) -> Settled:
    """Decide which entry goes to which target.

    ``exact``: for models, where the names of an entry are the target's own; what the manifest says of classes is heeded
    as long as that gives every target an entry. Without a whole assignment, proven doubles whose names are wrapped more
    are set aside, and then entries equal to another where there are too many for their targets. Raises OSError.
    """
    fits = [[not reason for reason in row] for row in reasons]
    count = len(targets)
    modes = [_both(fits, mode) for mode in _type_modes(entries, targets)]
    strict = [_both(mode, exact) for mode in modes] if exact is not None else list(modes)
    for relation, loosest in zip(strict, modes, strict=True):
        if (found := best([relation], loosest, count)) is not None:
            return Settled(assignment=found, aside={})
    aside = doubles(root, entries, wrapped=True) if exact is not None else {}
    while True:
        for relation, loosest in [*zip(strict, modes, strict=True), *((mode, mode) for mode in modes)]:
            found = best([_without(relation, aside)], _without(loosest, aside), count)
            if found is not None:
                return Settled(assignment=_trimmed(found, aside), aside=aside)
        found = _trimmed(assign(_without(fits, aside), count), aside)
        more = _surplus(root, entries, found)
        if not more:
            return Settled(assignment=found, aside=aside)
        aside = {**aside, **more}


def settle_by_score(
    root: Path, entries: Sequence[Entry], targets: Sequence[Target], scores: Sequence[Sequence[int]],
    aside: dict[int, int],
) -> Settled:  # fmt: skip
    """Decide which entry goes to which target where none fits in full.

    ``scores[entry][target]``: how many of their keys match. An entry goes to the target that matches it best of all,
    when that target has no better one; otherwise entries that match the same targets go by position. ``aside``: proven
    doubles that are known already. Raises OSError.
    """
    count = len(targets)
    modes = _type_modes(entries, targets)
    while True:
        left = [[0 if number in aside else score for score in row] for number, row in enumerate(scores)]
        columns = [max(column, default=0) for column in zip(*left, strict=True)]
        any_match = [[score > 0 for score in row] for row in left]
        best_match = [
            [score == max(row) == most > 0 for score, most in zip(row, columns, strict=True)] for row in left
        ]
        for relation in (best_match, any_match):
            for mode in modes:
                found = assign(_both(relation, mode), count)
                if found.is_whole(count):
                    return Settled(assignment=_trimmed(found, aside), aside=aside)
        found = _trimmed(assign(any_match, count), aside)
        more = _surplus(root, entries, found)
        if not more:
            return Settled(assignment=found, aside=aside)
        aside = {**aside, **more}


def _surplus(root: Path, entries: Sequence[Entry], found: Assignment) -> dict[int, int]:
    """Return the doubles to set aside where more entries than targets fit, {} when bytes do not say which."""
    if found.refusal is None or len(found.refusal[1]) <= len(found.refusal[0]):
        return {}
    wanted, block = found.refusal
    surplus = len(block) - len(wanted)
    local = doubles(root, [entries[number] for number in block], wrapped=False)
    equal = {block[double]: block[original] for double, original in local.items()}
    all_equal = len(equal) == len(block) - 1
    if len(equal) < surplus or (len(equal) > surplus and not all_equal):
        return {}
    return dict(sorted(equal.items())[-surplus:])


def _type_modes(entries: Sequence[Entry], targets: Sequence[Target]) -> list[Relation]:
    """Return relations of what the manifest says of classes: full names, last names, and no word on it."""
    everything = [[True] * len(targets) for _ in entries]
    if not any(entry.recorded is not None and entry.recorded.type for entry in entries):
        return [everything]
    full = [[same_class(entry, target, full=True) for target in targets] for entry in entries]
    last = [[same_class(entry, target, full=False) for target in targets] for entry in entries]
    return [full, last, everything]


def same_class(entry: Entry, target: Target, *, full: bool) -> bool:
    """Whether the manifest allows that an entry was saved from an object of this class; True where it is silent.

    ``full``: the module must agree as well, which a script that became a module loses (``__main__.Net``).
    """
    recorded = entry.recorded.type if entry.recorded is not None else ""
    if not recorded:
        return True
    if full:
        return recorded in target.types
    return recorded.rpartition(".")[2] in {name.rpartition(".")[2] for name in target.types}


def undecided(
    entries: Sequence[Entry], refusal: tuple[tuple[int, ...], tuple[int, ...]], wanted: str, others: str
) -> str:
    """Say which entries fit which targets in unequal numbers. ``wanted``: the targets in words."""
    targets, fitting = refusal
    names = ", ".join(entries[index].label for index in fitting)
    count = "1 entry" if len(fitting) == 1 else f"{len(fitting)} entries"
    return (
        f"{count} for {count_of(len(targets), 'object')}, and nothing shows which belongs to which: "
        f"{names} for {wanted}" + (f" ({others})" if others else "")
    )


def misfits(entries: Sequence[Entry], reasons: Sequence[str]) -> str:
    """Say why entries do not fit one target, the first three of them."""
    texts = [f"{entry.label}: {reason}" for entry, reason in zip(entries, reasons, strict=True) if reason]
    return "; ".join(texts[:3])


def hidden_by(entries: Sequence[Entry], position: int, number: int, problems: Sequence[str]) -> str:
    """Return why a target may not get an entry of another position: the one at its own cannot be read, else ""."""
    if position == number or number >= len(entries) or not problems[number]:
        return ""
    return (
        f"{entries[number].label} is at its position and cannot be read ({problems[number]}); "
        f"{entries[position].label} would fit, which may be another object's"
    )


def _both(one: Relation, other: Relation) -> Relation:
    return [
        [a and b for a, b in zip(left, right, strict=True)] for left, right in zip(one, other, strict=True)
    ]


def _without(relation: Relation, aside: dict[int, int]) -> Relation:
    return [[fits and number not in aside for fits in row] for number, row in enumerate(relation)]


def _trimmed(found: Assignment, aside: dict[int, int]) -> Assignment:
    left = tuple(number for number in found.left if number not in aside)
    return Assignment(pairs=found.pairs, by_position=found.by_position, left=left, refusal=found.refusal)
