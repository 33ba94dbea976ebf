"""Which tensor of a model is which on the other side."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptfix.checkpoint.keys import KeyMap, dotted
from ckptfix.weights.pairing import BARE, unwrapping
from ckptfix.weights.stored import StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A tensor by the name to show, and what it is called on each side: None where it is not there."""

    name: str
    a: str | None = None
    b: str | None = None


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
