"""Which saved entry goes to which object of the run, decided by what fits what; order decides only among equals."""

from collections.abc import Sequence
from dataclasses import dataclass

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
