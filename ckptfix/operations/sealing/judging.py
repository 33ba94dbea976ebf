"""Compare digests that were recorded with those that were found, and say what happened to each thing."""

from collections.abc import Hashable, Mapping
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Outcome(Enum):
    """What is known of one file or tensor. "Not checked" is never "match"."""

    MATCH = "match"
    DIFFER = "differ"
    NOT_CHECKED = "not checked"


class Change(Enum):
    """What happened to a thing that does not match."""

    CHANGED = "changed"
    ZERO_TAIL = "zero-tail"
    SWAPPED = "swapped"
    REPLACED = "replaced"  # it holds what was recorded of another one, which holds something else
    RENAMED = "renamed"
    MISSING = "missing"
    EXTRA = "extra"


class Judgement(NamedTuple, Generic[Key]):
    """The outcome for one key. ``other``: the thing that it was swapped with, replaced by, or is called now."""

    key: Key
    outcome: Outcome
    change: Change | None = None
    other: Key | None = None


def judge(recorded: Mapping[Key, str], found: Mapping[Key, str]) -> list[Judgement[Key]]:
    """Return an outcome for every key of either. A digest of "" in ``found``: it is there and could not be read."""
    owners: dict[str, list[Key]] = {}
    for key, digest in recorded.items():
        owners.setdefault(digest, []).append(key)
    extra: dict[str, list[Key]] = {}
    for key, digest in found.items():
        if key not in recorded:
            extra.setdefault(digest, []).append(key)
    judgements: list[Judgement[Key]] = []
    renamed: set[Key] = set()
    for key, want in recorded.items():
        have = found.get(key)
        if have == want:
            judgements.append(Judgement(key, Outcome.MATCH))
        elif have == "":
            judgements.append(Judgement(key, Outcome.NOT_CHECKED))
        elif have is not None:
            judgements.append(_changed(key, want, owners.get(have, []), found))
        elif extra.get(want):
            now = extra[want].pop(0)
            renamed.add(now)
            judgements.append(Judgement(key, Outcome.DIFFER, Change.RENAMED, now))
        else:
            judgements.append(Judgement(key, Outcome.DIFFER, Change.MISSING))
    left = (key for keys in extra.values() for key in keys if key not in renamed)
    return judgements + [Judgement(key, Outcome.DIFFER, Change.EXTRA) for key in left]


def _changed(key: Key, want: str, owners: list[Key], found: Mapping[Key, str]) -> Judgement[Key]:
    """Judge a thing with another digest. ``owners``: those of which its present one was recorded."""
    swapped = next((other for other in owners if found.get(other) == want), None)
    if swapped is not None:
        return Judgement(key, Outcome.DIFFER, Change.SWAPPED, swapped)
    if owners:
        return Judgement(key, Outcome.DIFFER, Change.REPLACED, owners[0])
    return Judgement(key, Outcome.DIFFER, Change.CHANGED)
