"""Assignment of saved entries to the objects of a run.

Models come first: what fits what decides, strict fits first, then proven duplicates are set aside;
order decides only among equals. Optimizers go where their models went, and schedulers where their
optimizers went (``follow``).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.entries import Entry, doubles
from ckptfix.training.loading.load_report import Part
from ckptfix.training.loading.targets import Fit, Target
from ckptfix.wording import Brief, count_of

Relation = Sequence[Sequence[bool]]
"""``relation[entry][target]``: whether this entry fits this target."""


class Assignment(Struct, frozen=True, kw_only=True):
    """``pairs``: target -> entry. ``by_position``: targets that others fit as well. ``left``:
    entries without target.

    ``refusal``: why some targets got nothing although entries fit them, in terms of (targets,
    entries) that cannot be told apart; None when the assignment is valid.
    """

    pairs: dict[int, int]
    by_position: frozenset[int]
    left: tuple[int, ...]
    refusal: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def is_whole(self, targets: int) -> bool:
        """Return whether every target got an entry."""
        return self.refusal is None and len(self.pairs) == targets


def assign(relation: Relation, targets: int) -> Assignment:
    """Give entries to targets where the relation leaves no doubt.

    Entries that fit the same targets form a block with them. A block of as many entries as targets
    goes by position; one with more or fewer entries is refused, unless it has no entries at all.
    Where blocks overlap, every entry must fit the target of its own position.
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
        return Assignment(
            pairs={}, by_position=frozenset(), left=left, refusal=(everything, tuple(fitting))
        )
    for block in dict.fromkeys(rows[number] for number in fitting):
        entries = [number for number in fitting if rows[number] == block]
        wanted = sorted(block)
        if len(entries) != len(wanted):
            return Assignment(
                pairs={},
                by_position=frozenset(),
                left=left,
                refusal=(tuple(wanted), tuple(entries)),
            )
        pairs.update(zip(wanted, entries, strict=True))
        if len(wanted) > 1:
            by_position.update(wanted)
    return Assignment(pairs=pairs, by_position=frozenset(by_position), left=left)


def best(relations: Sequence[Relation], loosest: Relation, targets: int) -> Assignment | None:
    """Return the first whole assignment, strictest relation first, whose left entries fit no target
    even loosely.
    """
    for relation in relations:
        found = assign(relation, targets)
        if found.is_whole(targets) and not any(any(loosest[entry]) for entry in found.left):
            return found
    return None


Reasons = Sequence[Sequence[str]]
"""``reasons[entry][target]``: why the entry does not fit the target, "" when it does."""


class Settlement(Struct, frozen=True, kw_only=True):
    """``assignment`` counts among all entries. ``aside``: entry -> the entry it is a proven double
    of.
    """

    assignment: Assignment
    aside: dict[int, int]


def settle(
    root: Path,
    entries: Sequence[Entry],
    targets: Sequence[Target],
    reasons: Reasons,
    *,
    exact: Relation | None = None,
) -> Settlement:
    """Decide which entry goes to which target.

    ``exact``: for models, where the names of an entry are the target's own; what the manifest says
    of classes is heeded as long as that gives every target an entry. Without a complete assignment,
    proven duplicates with more wrappers are set aside, and then entries equal to another where
    there are too many for their targets. Raises OSError.
    """
    fits = [[not reason for reason in row] for row in reasons]
    count = len(targets)
    modes = [_both(fits, mode) for mode in _type_modes(entries, targets)]
    strict = [_both(mode, exact) for mode in modes] if exact is not None else list(modes)
    for relation, loosest in zip(strict, modes, strict=True):
        if (found := best([relation], loosest, count)) is not None:
            return Settlement(assignment=found, aside={})
    aside = doubles(root, entries, wrapped=True) if exact is not None else {}
    while True:
        for relation, loosest in [
            *zip(strict, modes, strict=True),
            *((mode, mode) for mode in modes),
        ]:
            found = best([_without(relation, aside)], _without(loosest, aside), count)
            if found is not None:
                return Settlement(assignment=_trimmed(found, aside), aside=aside)
        found = _trimmed(assign(_without(fits, aside), count), aside)
        more = _surplus(root, entries, found)
        if not more:
            return Settlement(assignment=found, aside=aside)
        aside = {**aside, **more}


def settle_by_score(
    root: Path, entries: Sequence[Entry], targets: Sequence[Target],
    scores: Sequence[Sequence[int]], aside: dict[int, int],
) -> Settlement:  # fmt: skip
    """Decide which entry goes to which target where none fits in full.

    ``scores[entry][target]``: how many of their keys match. An entry goes to the target that
    matches it best of all, when that target has no better one; otherwise entries that match the
    same targets go by position. ``aside``: proven duplicates that are known already. Raises
    OSError.
    """
    count = len(targets)
    modes = _type_modes(entries, targets)
    while True:
        left = [
            [0 if number in aside else score for score in row] for number, row in enumerate(scores)
        ]
        columns = [max(column, default=0) for column in zip(*left, strict=True)]
        any_match = [[score > 0 for score in row] for row in left]
        best_match = [
            [score == max(row) == most > 0 for score, most in zip(row, columns, strict=True)]
            for row in left
        ]
        for relation in (best_match, any_match):
            for mode in modes:
                found = assign(_both(relation, mode), count)
                if found.is_whole(count):
                    return Settlement(assignment=_trimmed(found, aside), aside=aside)
        found = _trimmed(assign(any_match, count), aside)
        more = _surplus(root, entries, found)
        if not more:
            return Settlement(assignment=found, aside=aside)
        aside = {**aside, **more}


def _surplus(root: Path, entries: Sequence[Entry], found: Assignment) -> dict[int, int]:
    """Return the duplicates to set aside where more entries than targets fit, {} when bytes do not
    say which.
    """
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
    """Return relations of what the manifest says of classes: full names, last names, and no word on
    it.
    """
    everything = [[True] * len(targets) for _ in entries]
    if not any(entry.recorded is not None and entry.recorded.type for entry in entries):
        return [everything]
    # student.Net and teacher.Net of one shape, prepared in another order.
    full = [[same_class(entry, target, full=True) for target in targets] for entry in entries]
    last = [[same_class(entry, target) for target in targets] for entry in entries]
    return [full, last, everything]


def same_class(entry: Entry, target: Target, *, full: bool = False) -> bool:
    """Return whether the manifest allows that an entry was saved from an object of this class; True
    where it is silent.

    ``full``: the module must agree as well, which a script that became a module loses
    (``__main__.Net``).
    """
    recorded = entry.recorded.type if entry.recorded is not None else ""
    if not recorded or recorded in target.types:
        return True
    last = {name.rpartition(".")[2] for name in target.types}
    return not full and recorded.rpartition(".")[2] in last


def undecided(
    entries: Sequence[Entry],
    refusal: tuple[tuple[int, ...], tuple[int, ...]],
    wanted: str,
    others: str,
) -> str:
    """Say which entries fit which targets in unequal numbers. ``wanted``: the targets in words."""
    targets, fitting = refusal
    names = ", ".join(entries[index].label for index in fitting)
    count = "1 entry" if len(fitting) == 1 else f"{len(fitting)} entries"
    return (
        f"{count} {'fits' if len(fitting) == 1 else 'fit'} "
        f"{count_of(len(targets), 'object')}, and nothing shows which belongs to which: "
        f"{names} for {wanted}" + (f" ({others})" if others else "")
    )


def misfits(entries: Sequence[Entry], reasons: Sequence[str]) -> str:
    """Say why entries do not fit one target, the first three of them."""
    texts = [
        f"{entry.label}: {reason}" for entry, reason in zip(entries, reasons, strict=True) if reason
    ]
    return "; ".join(texts[:3])


def hidden_by(entries: Sequence[Entry], position: int, number: int, problems: Sequence[str]) -> str:
    """Return why a target may not get an entry of another position: the one at its own cannot be
    read, else "".
    """
    if position == number or number >= len(entries) or not problems[number]:
        return ""
    return (
        f"{entries[number].label} is at this position but cannot be read ({problems[number]}); "
        f"{entries[position].label} would fit but may belong to another object"
    )


def _both(one: Relation, other: Relation) -> Relation:
    return [
        [a and b for a, b in zip(left, right, strict=True)]
        for left, right in zip(one, other, strict=True)
    ]


def _without(relation: Relation, aside: dict[int, int]) -> Relation:
    return [[fits and number not in aside for fits in row] for number, row in enumerate(relation)]


def _trimmed(found: Assignment, aside: dict[int, int]) -> Assignment:
    return replace(found, left=tuple(number for number in found.left if number not in aside))


Owners = Sequence[tuple[int, ...]]
"""``owners[number]``: the objects of the part before (its numbers) that an object holds; () when
none is known.
"""


class Placement(Brief, Struct, frozen=True, kw_only=True):
    """The targets of the entries of a part. ``pairs``: target -> entry, of those that get one.

    ``aside``: as in ``Settlement``. ``is_moved``: entries went to other positions than they were
    saved at, without duplicates. ``fits``: of models, target -> the map of its keys to those of its
    entry.
    """

    part: Part
    entries: Sequence[Entry] = ()
    targets: Sequence[Target] = ()
    pairs: Mapping[int, int] = field(default_factory=dict)
    aside: Mapping[int, int] = field(default_factory=dict)
    is_moved: bool = False
    fits: Mapping[int, Fit] = field(default_factory=dict)

    def name(self, number: int) -> str:
        """Return what a target is called in messages."""
        target = self.targets[number]
        return f"{self.part.value} {target.index} ({target.what})"

    def got(self) -> dict[int, int]:
        """Return entry -> target, a double like the one it doubles."""
        found = {entry: number for number, entry in self.pairs.items()}
        return found | {double: found[one] for double, one in self.aside.items() if one in found}


def went_elsewhere(
    entries: Sequence[Entry],
    targets: Sequence[Target],
    pairs: Mapping[int, int],
    aside: Mapping[int, int],
) -> bool:
    """Return whether entries go to other positions than they were saved at.

    Counted among those that a hook left, and among all that are registered: a hook of the script
    may have taken the same ones away when it saved, or not.
    """
    kept = {
        entry: rank for rank, entry in enumerate(n for n in range(len(entries)) if n not in aside)
    }
    among_kept = all(kept.get(entry) == number for number, entry in pairs.items())
    among_all = all(
        entries[entry].index == targets[number].index for number, entry in pairs.items()
    )
    return not (among_kept or among_all)


def follow(
    reasons: list[list[str]],
    entries: Sequence[Entry],
    before: Placement,
    owners: Callable[[], Owners],
) -> tuple[list[list[str]], Owners]:
    """Let entries fit only where the objects that they belong to went: return why they do not fit,
    and what each target holds, () where nobody asked.

    The manifest says what belongs together. Without it, and where the part before moved, entries
    that fit several targets fit none: the position no longer says which. ``owners`` is asked for
    only then.
    """
    recorded = [_recorded(entry, before) for entry in entries]
    if not before.is_moved and not any(recorded):
        return reasons, ()
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
    word = before.part.value
    for number in doubtful if before.is_moved else ():
        result[number] = [
            reason
            or f"the {word} of this run are in a different order than in the folder, so ckptfix "
            f"cannot tell which of them it belongs to; next: prepare the {word} in the same order "
            "as the run that saved the checkpoint"
            for reason in result[number]
        ]
    return result, held


def _recorded(entry: Entry, before: Placement) -> frozenset[int]:
    """Return the entries of the part before that an entry belongs to, as the manifest says."""
    if entry.recorded is None:
        return frozenset()
    driven = entry.recorded.optimizer
    positions = {*entry.recorded.models, *(() if driven is None else (driven,))}
    return frozenset(n for n, one in enumerate(before.entries) if one.index in positions)


def _apart(before: Placement, belongs: frozenset[int], held: tuple[int, ...]) -> str:
    """Return why an entry does not belong to a target that holds these; an entry without a target
    never is a reason.
    """
    if not belongs or not held:
        return ""
    got = before.got()
    for entry in sorted(belongs):
        if entry in got and got[entry] not in held:
            return (
                f"it belongs to {before.entries[entry].label}, which is loaded into "
                f"{before.name(got[entry])}"
            )
    for number in held:
        entry = before.pairs.get(number, -1)
        if (
            entry >= 0
            and not {entry, *(d for d, one in before.aside.items() if one == entry)} & belongs
        ):
            return (
                f"it does not belong to {before.entries[entry].label}, which is loaded into "
                f"{before.name(number)}"
            )
    return ""
