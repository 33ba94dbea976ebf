"""What one Accelerator holds: every object that it prepared, by identity, with what it became."""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

_INNER = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "module",
    "XlaFullyShardedDataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
}
"""Class names of wrappers -> where they keep what they wrap. Names, because not all can be imported everywhere."""


def levels(thing: object) -> Iterator[object]:
    """Iterate over an object and what is inside the wrappers around it, outermost first.

    Only wrappers that training puts around a model count; a module that merely has a child called ``module`` is a
    model of its own.
    """
    seen: set[int] = set()
    while thing is not None and id(thing) not in seen:
        seen.add(id(thing))
        yield thing
        inner = next((_INNER[kind.__name__] for kind in type(thing).__mro__ if kind.__name__ in _INNER), None)
        # accelerate's regional compilation copies the model and keeps the original in the copy's __dict__.
        thing = getattr(thing, inner, None) if inner else getattr(thing, "__dict__", {}).get("_orig_mod")


def innermost(thing: object) -> Any:
    """Return what is inside all wrappers of an object; the object itself where there are none."""
    return list(levels(thing))[-1]


def level_ids(things: Iterable[object]) -> set[int]:
    """Return the ids of objects and of all that is inside their wrappers."""
    return {id(level) for thing in things for level in levels(thing)}


@dataclass(eq=False, slots=True)
class Entry:
    """One prepared object: what ``prepare`` returned, the line that called, and whether it was for evaluation only.

    ``prepared`` is a strong reference: collected at another time on another rank, a wrapper would be made anew there
    alone, and the ranks would wait for each other. All else is weak.
    """

    prepared: Any
    where: str
    evaluation: bool = False
    members: dict[int, "weakref.ref[Any]"] = field(default_factory=dict)


class Held:
    """The entries of one Accelerator."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def find(self, thing: object) -> Entry | None:
        """Return the entry that this very object belongs to: as given, as prepared, inside, or wrapped around it."""
        for level in levels(thing):
            for entry in self.entries:
                known = entry.members.get(id(level))
                if known is not None and known() is level:
                    return entry
        return None

    def add(
        self, things: Iterable[object], prepared: object, where: str, *, evaluation: bool = False
    ) -> Entry:
        """Remember what these objects became; each of them, and what is inside it, stands for the entry."""
        entry = Entry(prepared, where, evaluation)
        for thing in (*things, prepared):
            for level in levels(thing):
                entry.members[id(level)] = weakref.ref(level)
        self.entries.append(entry)
        return entry

    def forget(self, entry: Entry) -> None:
        """Forget one entry."""
        self.entries.remove(entry)

    def keep_only(self, registered: set[int]) -> None:
        """Forget entries of which nothing is registered any more, so that their memory can go."""
        self.entries = [
            entry
            for entry in self.entries
            if any(key in registered and known() is not None for key, known in entry.members.items())
        ]

    def clear(self) -> None:
        """Forget everything, as ``free_memory()`` does."""
        self.entries.clear()
