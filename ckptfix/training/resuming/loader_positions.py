"""Positions of an accelerator's data loaders, as saves record them and loads continue from them."""

from collections.abc import Sequence
from typing import Any

from accelerate import data_loader as accelerate_loaders
from accelerate.data_loader import DataLoaderShard
from msgspec.structs import replace

from ckptfix.errors import UsageError
from ckptfix.training.resuming.positions import EXPECTING, UNCLAIMED, follow, followed_of
from ckptfix.training.resuming.prepared_loaders import (
    in_words,
    is_followable,
    is_stateful,
    per_batch,
    signature,
)
from ckptfix.training.resuming.saved_positions import Position

# What saves and loads ask for.


def positions_of(accelerator: Any) -> list[Position | str]:
    """Return the positions of the loaders that an accelerator holds; for one that is not followed,
    why.
    """
    found: list[Position | str] = []
    for loader in accelerator._dataloaders:
        if not is_followable(loader):
            found.append(
                f"position not recorded: ckptfix cannot follow how {type(loader).__name__} iterates"
            )
            continue
        try:
            found.append(follow(loader).position())
        # Of the script's sampler or dataset: a save must not fail for it.
        except Exception as error:
            found.append(f"position not recorded: {type(error).__name__}: {error}")
    return found


def is_going_on(accelerator: Any) -> bool:
    """Return whether a pass that goes on from a position of the checkpoint is under way: it sets the
    generators itself.
    """
    return any(one.goes_on for followed in followed_of(accelerator) for one in followed.passes)


def go_on_from(accelerator: Any, saved: Sequence[Position | str]) -> list[str]:
    """Let the loaders of an accelerator go on from these positions; return in words what is not as
    it was.

    Loaders are matched by number. Where there are more or fewer of them, as in a script that
    prepares one for every epoch, a position within a pass goes to the loader of its kind that
    begins a pass first.
    """
    loaders = list(accelerator._dataloaders)
    problems = []
    UNCLAIMED.pop(accelerator, None)
    for followed in [one for one in EXPECTING if any(one.loader is loader for loader in loaders)]:
        EXPECTING.discard(followed)
        followed.resumed = None
    for followed in followed_of(accelerator):
        followed.left = followed.left_at_save = None
        followed.left_before = False
        for running in followed.passes:
            running.is_before_load = True
    pairs, waiting = _paired(loaders, saved)
    for number, loader in enumerate(loaders):
        name = f"data loader {number}" if len(loaders) > 1 else "the data loader"
        position = pairs.get(number)
        if position is None:
            problems.append(f"{name}: its position is not in the checkpoint")
        elif isinstance(position, str):
            problems.append(f"{name}: {position}")
        elif not is_followable(loader):
            problems.append(f"{name}: ckptfix cannot follow how {type(loader).__name__} iterates")
        else:
            followed = follow(loader)
            followed.name = name
            problems += [f"{name}: {problem}" for problem in followed.go_on_from(position)]
    if waiting:
        UNCLAIMED[accelerator] = waiting
    return problems


def _paired(
    loaders: Sequence[Any], saved: Sequence[Position | str]
) -> tuple[dict[int, Position | str], list[Position]]:
    pairs: dict[int, Position | str] = {}
    if len(loaders) == len(saved):
        for number, (loader, position) in enumerate(zip(loaders, saved, strict=True)):
            if (
                isinstance(position, str)
                or not is_followable(loader)
                or position.signature == signature(loader)
            ):
                pairs[number] = position
            else:
                pairs[number] = (
                    "position not restored: the data do not match (expected "
                    f"{in_words(position.signature)}, found {in_words(signature(loader))})"
                )
        return pairs, []
    found = [one for one in saved if isinstance(one, Position)]
    for number, loader in enumerate(loaders):
        alike = [
            one for one in found if is_followable(loader) and one.signature == signature(loader)
        ]
        if alike:
            last = alike[-1]
            pairs[number] = (
                last if last.fetched is None else replace(last, fetched=None, workers=None)
            )
    waiting = [one for one in found if one.fetched is not None]
    if not any(isinstance(one, Position) and one.left is not None for one in pairs.values()):
        waiting += [one for one in found if one.left is not None][-1:]
    return pairs, waiting


def for_other_world(
    accelerator: Any, saved: Sequence[Position | str], world: int
) -> list[Position | str]:
    """Return positions saved by ``world`` processes as those of a run with another number: samples
    stay used.

    Where the processes now use more samples at a time, the last of them may be used again.
    """
    found: list[Position | str] = []
    for loader, position in zip(accelerator._dataloaders, saved, strict=False):
        if isinstance(position, str) or not is_followable(loader):
            found.append(position)
            continue
        here = _for_other_world(accelerator, loader, position, world)
        if position.left is not None:
            left = _for_other_world(accelerator, loader, position.left, world)
            here.left = None if left.fetched is None else left
        found.append(here)
    return found


def _for_other_world(accelerator: Any, loader: Any, position: Position, world: int) -> Position:
    now, fetched = per_batch(loader), position.fetched
    is_of_each = isinstance(loader, DataLoaderShard) and not getattr(
        loader.batch_sampler, "split_batches", False
    )
    if fetched is not None and is_of_each:
        fetched = fetched * world // accelerator.num_processes
    elif fetched is not None:
        fetched = fetched // now * now
    stateful = None if is_stateful(loader) else position.stateful
    return replace(
        position,
        signature=signature(loader),
        per_batch=now,
        fetched=None if stateful is None and is_stateful(loader) else fetched,
        ahead=None,
        save=None,
        stateful=stateful,
        workers=None,
    )


def resume_dataloader(accelerator: Any, loader: Any) -> Any:
    """Return what is left of the pass that a loader was in at the save, or that the saved run left
    last by ``break``; the loader itself between passes.
    """
    if not any(one is loader for one in accelerator._dataloaders):
        raise UsageError(
            "resume_dataloader(): expected a data loader that this Accelerator has prepared, "
            f"found {type(loader).__name__}; help: pass the loader that prepare() returned"
        )
    if not is_followable(loader):
        return loader
    followed = follow(loader)
    position = followed.expected()
    if position is None and (left := followed.ask_for_left()) is not None:
        # The script may count its epochs from the one that it left at its last batch: no batch is
        # left of it.
        if left.is_at_end or left.stateful is None or not is_stateful(loader):
            return accelerate_loaders.skip_first_batches(loader, left.yielded)
        return loader
    if position is None or position.is_at_end or is_stateful(loader):
        return loader
    return accelerate_loaders.skip_first_batches(loader, position.yielded)
