"""Models and tensors of one checkpoint matched with those of another."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar

from msgspec import Struct

from ckptfix.checkpoint.filenames import ModelName, parse_file_name
from ckptfix.checkpoint.keys import (
    KeyMap,
    collisions,
    common_wrappers,
    dotted,
    inner_wrappers,
    without_private_wrappers,
)
from ckptfix.checkpoint.rank_names import parse_rank_file_name
from ckptfix.reports import Serialized
from ckptfix.tensors.stored import Format, StoredTensor, Weights
from ckptfix.wording import list_names

_SHOWN = 3
BARE = KeyMap(remove=())
"""The map that leaves every key as it is."""


def pair_models(
    left: Sequence[Weights], right: Sequence[Weights]
) -> Iterator[tuple[Weights | None, Weights | None]]:
    """Yield models that belong together, in the order of their positions, and what is left of each
    side with None.

    Models belong together if they have the same path in their files; else the same keys and shapes,
    at one position or where each side has them once; else the same position; else if one model is
    left on each side.
    """
    one, other = list(left), list(right)
    kinds = (
        {}
        if len(one) == len(other) == 1
        else {id(weights): _kind(weights) for weights in (*one, *other)}
    )
    pairs: list[tuple[Weights | None, Weights | None]] = []
    for by in (_paths, partial(_same, kinds), partial(_moved, kinds), _positions, _only):
        places, others = by(one), by(other)
        for key in places.keys() & others.keys():
            pairs.append((places[key], others[key]))
            one = [weights for weights in one if weights is not places[key]]
            other = [weights for weights in other if weights is not others[key]]
    pairs += [(weights, None) for weights in one] + [(None, weights) for weights in other]
    yield from sorted(pairs, key=lambda pair: next(one.position for one in pair if one is not None))


def moved(
    pairs: Iterable[tuple[Weights | None, Weights | None]],
) -> Iterator[tuple[Weights, Weights]]:
    """Yield the pairs at different positions: a script that loads one side would mix up the
    other.
    """
    for one, other in pairs:
        if one is None or other is None or (one.path and one.path == other.path):
            continue
        if one.position != other.position:
            yield one, other


def crossed(
    pairs: Iterable[tuple[Weights | None, Weights | None]],
) -> Iterator[tuple[Weights, Weights]]:
    """Yield those of ``moved`` where both positions are taken on both sides: loading B for A gives
    the wrong models.

    Where one side has no such position it is a model less, which shows in its tensors.
    """
    every = list(pairs)
    ours = {_slot(one) for one, _ in every if one is not None}
    theirs = {_slot(other) for _, other in every if other is not None}
    for one, other in moved(every):
        here, there = _slot(one), _slot(other)
        if here != there and here in theirs and there in ours:
            yield one, other


def uncrossed(
    pairs: Iterable[tuple[Weights | None, Weights | None]],
) -> Iterator[tuple[Weights, Weights]]:
    """Yield those of ``moved`` that are not crossed: worth a note, but no difference in itself."""
    every = list(pairs)
    known = {id(one) for one, _ in crossed(every)}
    yield from (pair for pair in moved(every) if id(pair[0]) not in known)


def crossing(pairs: Sequence[tuple[Weights, Weights]], a: str = "A", b: str = "B") -> str:
    """Say in one sentence that models are crossed, "" for none. ``a``, ``b``: what the sides are
    called.
    """
    shown = [f"{one.label} in {a} matches {other.label} in {b}" for one, other in pairs[:_SHOWN]]
    more = [f"and {len(pairs) - _SHOWN} more"] if len(pairs) > _SHOWN else []
    return f"{', '.join(shown + more)}: a load would mix up the models" if pairs else ""


def _slot(weights: Weights) -> object:
    """Return what a loader finds a model by: its position, or the name of its file where that has
    none.
    """
    is_of_ranks = bool(weights.files) and parse_rank_file_name(weights.files[0].name) is not None
    if weights.format in (Format.DCP, Format.DEEPSPEED) or is_of_ranks:
        return weights.position
    name = parse_file_name(weights.files[0].name) if weights.files and not weights.path else None
    if name is None or not name.is_of_library or name.model is None:
        return weights.label
    is_numbered = name.model == ModelName("model")
    return weights.position if is_numbered else (weights.home, name.model)


_Kind = frozenset[tuple[str, tuple[int, ...]]]
"""Keys of a model without wrappers, with their shapes."""


def _kind(weights: Weights) -> _Kind:
    named = weights.named()
    bare = unwrapping(named)
    return frozenset((bare(name), tensor.shape) for name, tensor in named.items())


def _same(kinds: Mapping[int, _Kind], side: Sequence[Weights]) -> dict[object, Weights]:
    return {(one.position, kinds[id(one)]): one for one in side if id(one) in kinds}


def _moved(kinds: Mapping[int, _Kind], side: Sequence[Weights]) -> dict[object, Weights]:
    """Return the models by what they are, where one alone is so."""
    counts = Counter(kinds.get(id(one)) for one in side)
    return {kinds[id(one)]: one for one in side if id(one) in kinds and counts[kinds[id(one)]] == 1}


def _paths(side: Sequence[Weights]) -> dict[object, Weights]:
    """Return the models in training dicts by the keys that lead to them, where one alone has
    these.
    """
    counts = Counter(weights.path for weights in side)
    return {weights.path: weights for weights in side if weights.path and counts[weights.path] == 1}


def _positions(side: Sequence[Weights]) -> dict[object, Weights]:
    return {weights.position: weights for weights in side}


def _only(side: Sequence[Weights]) -> dict[object, Weights]:
    return {None: side[0]} if len(side) == 1 else {}


def unwrapping(names: Iterable[str]) -> KeyMap:
    """Return the map that removes all wrappers, as ``repair --keys bare`` does; none where two keys
    would be equal.
    """
    names = list(names)
    outer = KeyMap(remove=common_wrappers(names))
    candidates = [outer]
    if inner_wrappers(map(outer, names)):
        # Private wrappers go first: what they hid may be a wrapper that every name carries.
        hidden = common_wrappers(map(without_private_wrappers, names))
        candidates.insert(0, KeyMap(remove=hidden, inner=True))
    return next((found for found in candidates if not collisions(names, found)), BARE)


class Matched(Struct, frozen=True, kw_only=True):
    """A tensor by the key to show, and its key on each side, None where a side does not have it."""

    name: str
    a: str | None = None
    b: str | None = None


def match_names(
    left: Mapping[str, StoredTensor], right: Mapping[str, StoredTensor]
) -> tuple[tuple[Matched, ...], str]:
    """Return every key of both sides once, in order, and in words how keys were changed ("" when
    none was).

    Keys match as they are. Where more match without the wrappers that ``prepare`` and others put
    around a model, these wrappers are removed from the keys of each side that has them.
    """
    maps = unwrapping(left), unwrapping(right)
    as_they_are = _matched(left, right, (BARE, BARE))
    if maps == (BARE, BARE) or left.keys() == right.keys():
        return as_they_are, ""
    unwrapped = _matched(left, right, maps)
    if _pairs(unwrapped) > _pairs(as_they_are):
        return unwrapped, _in_words(maps)
    return as_they_are, ""


class TiedKey(Serialized, Struct, frozen=True, kw_only=True):
    """A key that only one side has, of a tensor that both have under ``tied_to``.

    ``side``: "A" or "B", the one that has the key.
    """

    json_keys: ClassVar = "name side tied_to"

    name: str
    side: str
    tied_to: str


def tied_keys(
    matched: Sequence[Matched], a: Weights | None, b: Weights | None
) -> tuple[TiedKey, ...]:
    """Return the keys of tied weights that only one side has, because the safetensors files of the
    other side store one key of a tie.

    Such a key does not count as a difference. ``Weights.ties`` proves it: both keys have the same
    elements of one storage or of one place in a DCP folder, or DeepSpeed or a safetensors header
    records the tie. Stock Accelerate records nothing. Equal bytes prove nothing. Files of other
    formats store every key: a load fails if one is missing.
    """
    if a is None or b is None:
        return ()
    ties = []
    for side, weights, absent in (("A", a, b), ("B", b, a)):
        if absent.format is not Format.SAFETENSORS or not weights.ties:
            continue
        keys = [(pair, pair.a if side == "A" else pair.b) for pair in matched]
        in_both: dict[str, str] = {}
        for pair, key in keys:
            if pair.a is not None and pair.b is not None and key is not None:
                in_both.setdefault(weights.ties.get(key, key), pair.name)
        for pair, key in keys:
            if (pair.a is None or pair.b is None) and key is not None:
                tied_to = in_both.get(weights.ties.get(key, key))
                if tied_to is not None:
                    ties.append(TiedKey(name=pair.name, side=side, tied_to=tied_to))
    return tuple(ties)


def without_ties(matched: Sequence[Matched], ties: Iterable[TiedKey]) -> tuple[Matched, ...]:
    """Return the keys to compare: each tensor under the keys that both sides have."""
    names = {tie.name for tie in ties}
    return tuple(pair for pair in matched if pair.name not in names)


def ties_in_words(ties: Sequence[TiedKey], labels: Sequence[str | None]) -> Iterator[str]:
    """Yield a sentence for each side that alone has keys of tied weights.

    ``labels``: of the model on each side.
    """
    for side, label in zip("AB", labels, strict=True):
        keys = [tie.name for tie in ties if tie.side == side]
        partners = dict.fromkeys(tie.tied_to for tie in ties if tie.side == side)
        if keys:
            verb, same = (
                ("is", "it is the same tensor as")
                if len(keys) == 1
                else ("are", "they are the same tensors as")
            )
            yield (
                f"tied weights in {label}: {list_names(keys)} {verb} only in {side}, where {same} "
                f"{list_names(partners)}; safetensors files store only one key of tied weights"
            )


def _matched(
    left: Iterable[str], right: Iterable[str], maps: tuple[KeyMap, KeyMap]
) -> tuple[Matched, ...]:
    a, b = (
        {key_map(name): name for name in side}
        for side, key_map in zip((left, right), maps, strict=True)
    )
    names = dict.fromkeys([*a, *b])
    return tuple(Matched(name=name, a=a.get(name), b=b.get(name)) for name in names)


def _pairs(matched: Iterable[Matched]) -> int:
    return sum(one.a is not None and one.b is not None for one in matched)


def _in_words(maps: tuple[KeyMap, KeyMap]) -> str:
    """Say what was taken off: "without 'module.' in A, without '_orig_mod.' in B"."""
    said = []
    for side, key_map in zip("AB", maps, strict=True):
        if key_map.inner:
            before = f"the prefix {dotted(key_map.remove)!r} and " if key_map.remove else ""
            said.append(f"without {before}the wrappers inside keys in {side}")
        elif key_map.remove:
            said.append(f"without {dotted(key_map.remove)!r} in {side}")
    return ", ".join(said)
