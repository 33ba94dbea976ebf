"""Which model, and which tensor of it, is which on the other side."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptfix.checkpoint.keys import (
    KeyMap,
    collisions,
    common_wrappers,
    dotted,
    inner_wrappers,
    without_private_wrappers,
)
from ckptfix.weights.stored import StoredTensor, Weights

BARE = KeyMap(remove=())
"""The map that leaves every name as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A tensor by the name to show, and what it is called on each side: None where it is not there."""

    name: str
    a: str | None = None
    b: str | None = None


def pair_models(
    left: Sequence[Weights], right: Sequence[Weights]
) -> Iterator[tuple[Weights | None, Weights | None]]:
    """Yield models that belong together: of one path in their files, then of one position, then what is left of each.

    A path counts when each side has it once; what is left belongs together when it is one model on each side.
    """
    one, other = list(left), list(right)
    pairs: list[tuple[Weights | None, Weights | None]] = []
    for by in (_paths, _positions, _only):
        places, others = by(one), by(other)
        for key in places.keys() & others.keys():
            pairs.append((places[key], others[key]))
            one = [weights for weights in one if weights is not places[key]]
            other = [weights for weights in other if weights is not others[key]]
    pairs += [(weights, None) for weights in one] + [(None, weights) for weights in other]
    yield from sorted(pairs, key=lambda pair: next(weights.index for weights in pair if weights is not None))


def _paths(side: Sequence[Weights]) -> dict[object, Weights]:
    """Return the models in training dicts by the keys that lead to them, where one alone has these."""
    counts = Counter(weights.path for weights in side)
    return {weights.path: weights for weights in side if weights.path and counts[weights.path] == 1}


def _positions(side: Sequence[Weights]) -> dict[object, Weights]:
    return {weights.index: weights for weights in side}


def _only(side: Sequence[Weights]) -> dict[object, Weights]:
    return {None: side[0]} if len(side) == 1 else {}


def match_names(
    left: Mapping[str, StoredTensor], right: Mapping[str, StoredTensor]
) -> tuple[tuple[Matched, ...], str]:
    """Return every name of both sides once, in order, and in words what was done to names ("" when nothing was).

    Names match as they are; where more match without the wrappers that ``prepare`` and others put around a model, those
    are taken off the names of each side that has them.
    """
    maps = unwrapping(left), unwrapping(right)
    as_they_are = _matched(left, right, (BARE, BARE))
    if maps == (BARE, BARE) or left.keys() == right.keys():
        return as_they_are, ""
    unwrapped = _matched(left, right, maps)
    if _pairs(unwrapped) > _pairs(as_they_are):
        return unwrapped, _in_words(maps)
    return as_they_are, ""


def unwrapping(names: Iterable[str]) -> KeyMap:
    """Return the map that takes all wrappers off, as ``repair --keys bare`` does; none where two names would meet."""
    names = list(names)
    outer = KeyMap(remove=common_wrappers(names))
    candidates = [outer]
    if inner_wrappers(map(outer, names)):
        # Private wrappers go first: what they hid may be a wrapper that every name carries.
        hidden = common_wrappers(map(without_private_wrappers, names))
        candidates.insert(0, KeyMap(remove=hidden, inner=True))
    return next((found for found in candidates if not collisions(names, found)), BARE)


def _matched(left: Iterable[str], right: Iterable[str], maps: tuple[KeyMap, KeyMap]) -> tuple[Matched, ...]:
    a, b = ({key_map(name): name for name in side} for side, key_map in zip((left, right), maps, strict=True))
    names = dict.fromkeys([*a, *b])
    return tuple(Matched(name=name, a=a.get(name), b=b.get(name)) for name in names)


def _pairs(matched: Iterable[Matched]) -> int:
    return sum(one.a is not None and one.b is not None for one in matched)


def _in_words(maps: tuple[KeyMap, KeyMap]) -> str:
    """Say what was taken off: "without 'module.' in A, without '_orig_mod.' in B"."""
    said = []
    for side, key_map in zip("AB", maps, strict=True):
        if key_map.inner:
            before = f" and {dotted(key_map.remove)!r} before them" if key_map.remove else ""
            said.append(f"without the wrappers inside of names{before} in {side}")
        elif key_map.remove:
            said.append(f"without {dotted(key_map.remove)!r} in {side}")
    return ", ".join(said)
