"""Compare digests that were recorded with those that were found, and say what happened to each thing."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
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
    MOVED = "moved"  # by its own name it is in another file now
    MISSING = "missing"
    EXTRA = "extra"


class Judgement(NamedTuple, Generic[Key]):
    """The outcome for one key. ``other``: the thing that it was swapped with, replaced by, or is now."""

    key: Key
    outcome: Outcome
    change: Change | None = None
    other: Key | None = None


def judge(
    recorded: Mapping[Key, str],
    found: Mapping[Key, str],
    *,
    name_of: Callable[[Key], str] = str,
    plain: Collection[str] = (),
) -> list[Judgement[Key]]:
    """Return an outcome for every key of either. A digest of "" in ``found``: it is there and could not be read.

    ``name_of``: what a thing is called wherever it is. ``plain``: digests of nothing but zeros. Those, and any that was
    recorded or found of several things, tell nothing of where one of them went, but for a thing of the same name.
    """
    owners: dict[str, list[Key]] = {}
    for key, digest in recorded.items():
        owners.setdefault(digest, []).append(key)
    common = {*plain, *(digest for digest, keys in owners.items() if len(keys) > 1)}
    gone = [key for key in recorded if key not in found]
    extra = [key for key in found if key not in recorded]
    now = _renamed({key: recorded[key] for key in gone}, {key: found[key] for key in extra}, name_of, common)
    taken = set(now.values())
    is_equal = all(found.get(key, "") in ("", want) for key, want in recorded.items())
    alike = {} if is_equal else {(digest, name_of(key)): key for key, digest in recorded.items()}
    judgements: list[Judgement[Key]] = []
    for key, want in recorded.items():
        have = found.get(key)
        if key in now:
            change = Change.MOVED if name_of(key) == name_of(now[key]) else Change.RENAMED
            judgements.append(Judgement(key, Outcome.DIFFER, change, now[key]))
        elif have is None:
            judgements.append(Judgement(key, Outcome.DIFFER, Change.MISSING))
        elif have in ("", want):
            judgements.append(Judgement(key, Outcome.MATCH if have == want else Outcome.NOT_CHECKED))
        else:
            owner = owners[have][0] if have in owners and have not in common else None
            other = owner if want not in common else None
            other = alike.get((have, name_of(key))) if other is None else other
            if other is not None and found.get(other) == want:
                judgements.append(Judgement(key, Outcome.DIFFER, Change.SWAPPED, other))
            elif owner is not None:
                judgements.append(Judgement(key, Outcome.DIFFER, Change.REPLACED, owner))
            else:
                judgements.append(Judgement(key, Outcome.DIFFER, Change.CHANGED))
    left = (key for key in extra if key not in taken)
    return judgements + [Judgement(key, Outcome.DIFFER, Change.EXTRA) for key in left]


def _renamed(
    gone: Mapping[Key, str], extra: Mapping[Key, str], name_of: Callable[[Key], str], common: Collection[str]
) -> dict[Key, Key]:
    """Return what is gone -> what it is now: of one name, or alone with the digest, or with it and a wrapper."""
    now: dict[Key, Key] = {}
    named = {(digest, name_of(key)): key for key, digest in extra.items()}
    for key, digest in gone.items():
        if (other := named.pop((digest, name_of(key)), None)) is not None:
            now[key] = other
    left: dict[str, list[Key]] = {}
    wrapped: dict[tuple[str, str], list[Key]] = {}  # digest and name without what may be a wrapper -> things
    for (digest, name), key in named.items():
        left.setdefault(digest, []).append(key)
        for inner in _inner_names(name):
            wrapped.setdefault((digest, inner), []).append(key)
    counts = Counter(digest for key, digest in gone.items() if key not in now)
    for key, digest in gone.items():
        if key in now or digest not in left:
            continue
        name = name_of(key)
        if digest not in common and len(left[digest]) == counts[digest] == 1:
            now[key] = left[digest][0]
            continue
        others = [*wrapped.get((digest, name), ())]
        others += (named[digest, inner] for inner in _inner_names(name) if (digest, inner) in named)
        if len(others) == 1 and (digest, name_of(others[0])) in named:
            now[key] = named.pop((digest, name_of(others[0])))
    return now


def _inner_names(name: str) -> Iterator[str]:
    """Yield a name without its first segment, without two, and so on, as without wrappers around the model."""
    while "." in name:
        name = name.partition(".")[2]
        yield name
