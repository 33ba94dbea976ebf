"""Prepared objects: the wrappers around them, those that one Accelerator holds, and their way back
to new.
"""

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from msgspec import Struct, field
from torch.nn.parallel import DataParallel, DistributedDataParallel

MARK = "_is_accelerate_prepared"
"""The attribute by which accelerate knows what it prepared."""

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
"""Class names of wrappers -> where they keep what they wrap. Names, because not all can be imported
everywhere.
"""


def levels(thing: object) -> Iterator[object]:
    """Iterate over an object and what is inside the wrappers around it, outermost first.

    Only wrappers that training puts around a model count; a module that merely has a child called
    ``module`` is a model of its own.
    """
    seen: set[int] = set()
    while thing is not None and id(thing) not in seen:
        seen.add(id(thing))
        yield thing
        inner = next(
            (_INNER[kind.__name__] for kind in type(thing).__mro__ if kind.__name__ in _INNER),
            None,
        )
        # accelerate's regional compilation copies the model and keeps the original in the copy's
        # __dict__.
        thing = (
            getattr(thing, inner, None)
            if inner
            else getattr(thing, "__dict__", {}).get("_orig_mod")
        )


def innermost(thing: object) -> Any:
    """Return what is inside all wrappers of an object; the object itself where there are none."""
    return list(levels(thing))[-1]


def level_ids(things: Iterable[object]) -> set[int]:
    """Return the ids of objects and of all that is inside their wrappers."""
    return {id(level) for thing in things for level in levels(thing)}


class PreparedObject(Struct, eq=False):
    """One prepared object: what ``prepare`` returned, the line that called, and whether it was for
    evaluation only.

    ``prepared`` is a strong reference: collected at another time on another rank, a wrapper would
    be made anew there alone, and the ranks would wait for each other. All else is weak.
    """

    prepared: Any
    where: str
    evaluation: bool = False
    members: dict[int, "weakref.ref[Any]"] = field(default_factory=dict)


class PreparedObjects:
    """The entries of one Accelerator."""

    def __init__(self) -> None:
        self.entries: list[PreparedObject] = []

    def find(self, thing: object) -> PreparedObject | None:
        """Return the entry that this very object belongs to: as given, as prepared, inside, or
        wrapped around it.
        """
        for level in levels(thing):
            for entry in self.entries:
                known = entry.members.get(id(level))
                if known is not None and known() is level:
                    return entry
        return None

    def add(
        self, things: Iterable[object], prepared: object, where: str, *, evaluation: bool = False
    ) -> PreparedObject:
        """Remember what these objects became; each of them, and what is inside it, leads to the
        entry.
        """
        entry = PreparedObject(prepared, where, evaluation)
        for thing in (*things, prepared):
            for level in levels(thing):
                entry.members[id(level)] = weakref.ref(level)
        self.entries.append(entry)
        return entry

    def forget(self, entry: PreparedObject) -> None:
        """Forget one entry."""
        self.entries.remove(entry)

    def keep_only(self, registered: set[int]) -> None:
        """Forget entries of which nothing is registered any more, so that their memory can go."""
        self.entries = [
            entry
            for entry in self.entries
            if any(
                key in registered and known() is not None for key, known in entry.members.items()
            )
        ]

    def clear(self) -> None:
        """Forget everything, as ``free_memory()`` does."""
        self.entries.clear()


_MADE: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def made_here(wrapper: object) -> None:
    """Remember that an accelerator made this: older versions of accelerate leave no flag."""
    _MADE[id(wrapper)] = wrapper


def as_new(accelerator: Accelerator, thing: Any) -> Any:
    """Return an object as if it had never been prepared: a flag that came from elsewhere proves
    nothing.

    Set by another accelerator, or copied along by deepcopy, accelerate takes the flag for its own,
    skips the preparation, and leaves a model without autocast or gradient synchronisation.
    """
    if isinstance(thing, torch.nn.Module):
        return _model_as_new(accelerator, thing)
    if type(thing) in (AcceleratedOptimizer, AcceleratedScheduler):
        return innermost(thing)
    return thing  # a data loader that was sharded stays so: sharded again it would lose data


def wrapper_of(model: torch.nn.Module) -> Any:
    """Return the DistributedDataParallel that lives around a model; the model itself where none
    does.
    """
    return next(
        (
            thing
            for thing in gc.get_objects()
            if type(thing) is DistributedDataParallel
            and any(level is model for level in levels(thing))
        ),
        model,
    )


def _model_as_new(accelerator: Accelerator, model: torch.nn.Module) -> Any:
    around = list(levels(model))
    stale = _MADE.get(id(model)) is model
    for level in around:
        stale |= vars(level).pop(MARK, False)
        stale |= _strip_autocast(level)
    if not stale:
        return model
    data_parallel = [
        i
        for i, level in enumerate(around)
        if isinstance(level, DataParallel | DistributedDataParallel)
    ]
    first = data_parallel[-1] + 1 if data_parallel else 0
    if accelerator.state.dynamo_plugin.backend.value != "NO":
        first = max(
            first, next((i for i, level in enumerate(around) if not _is_compiled(level)), 0)
        )
    return around[first]


def _is_compiled(level: object) -> bool:
    return "_orig_mod" in {**vars(level), **vars(level).get("_modules", {})}


def _strip_autocast(model: Any) -> bool:
    """Take accelerate's autocast off ``forward`` and return whether it was there; leave what others
    put in front.
    """
    original = getattr(model, "_original_forward", None)
    forward = vars(model).get("forward")
    if original is None or forward is None:
        return False
    wanted = getattr(original, "__func__", original)
    inner = getattr(forward, "__func__", forward)
    while inner is not wanted:
        inner = getattr(inner, "__wrapped__", None)
        if inner is None:
            return False
    if wanted is getattr(type(model), "forward", None):
        del model.__dict__["forward"]
    else:
        model.forward = original
    for level in levels(model):
        vars(level).pop("_original_forward", None)
    return True
