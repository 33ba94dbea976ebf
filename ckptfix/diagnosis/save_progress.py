"""The progress that the files of a save record: steps of optimizers, moves of schedules, rates and
the scale of fp16.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from math import nan
from typing import Any, NamedTuple

from ckptfix.checkpoint.dcp import DcpFolder, scan_dcp_folders
from ckptfix.checkpoint.filenames import TRAINER_STATE
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.folder_names import split_number
from ckptfix.checkpoint.neighbours import Neighbour
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.trainer_folders import trainer_progress
from ckptfix.diagnosis.optimizer_kinds import name_of
from ckptfix.diagnosis.optimizer_values import steps_of
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, saved_optimizers
from ckptfix.diagnosis.schedules import moves_of, numbers_of
from ckptfix.errors import CkptfixError
from ckptfix.formats.pickle_tree import child, is_dict_like, items_of
from ckptfix.formats.torch_file import TorchFile

_OWN_STEP = "step in "
_MOVES = "last_epoch in "
"""Beginnings of the names of counters in messages."""

_GLOBAL_STEP = f"global_step in {TRAINER_STATE}"


class Progress(NamedTuple):
    """The progress that a checkpoint records.

    ``counters``: by their names in messages; those that prove a step of the optimizer first.
    ``rates``: learning rates of param groups with states, none where they are not known.
    ``scale``: of the gradients in fp16; None in a run without, NaN where it cannot be read.
    ``backoff``: its factor for a skipped step. ``made_no_step``: its optimizers keep states, and
    have none.
    """

    counters: Mapping[str, float]
    rates: tuple[float, ...]
    scale: float | None
    backoff: float
    made_no_step: bool

    def is_at(self, then: "Progress") -> bool:
        """Return whether all counters of both are equal."""
        both = self.counters.keys() & then.counters.keys()
        return all(self.counters[name] == then.counters[name] for name in both)

    def may_have_skipped(self, steps: float, then: "Progress") -> bool:
        """Return whether fp16 may have skipped all of these steps since then: each skipped one
        lowers the scale.
        """
        if self.scale is None:
            return False
        return then.scale is None or not self.scale > 1.01 * then.scale * self.backoff**steps

    def has_rate_of_next_step(self, then: "Progress") -> bool:
        """Return whether a schedule moved before each of two saves, so that its rates are those of
        the steps after it.

        Its moves are then in proportion to the steps. In a script that saves first they are behind:
        0 moves at step 1, 1 at step 2.
        """
        moves, steps = (
            {
                self.counters[name] / value
                for name, value in then.counters.items()
                if value and self.counters.get(name, 0) > value
                if name.startswith(_MOVES) == is_of_schedule
            }
            for is_of_schedule in (True, False)
        )
        return not moves.isdisjoint(steps)


class Steps(NamedTuple):
    """Steps of the optimizer from one save to the next, as ``counter`` shows them.

    ``rate``: the highest learning rate of a param group in both saves, ``lowest_rate`` the lowest;
    None where they are not known. ``is_doubtful``: a schedule alone moved, which a script can do
    without a step.
    """

    counter: str
    begin: float
    end: float
    rate: float | None
    lowest_rate: float | None
    is_doubtful: bool

    @property
    def shown(self) -> dict[str, Any]:
        """The steps as a message has them."""
        return {"counter": self.counter, "begin": self.begin, "end": self.end, "rate": self.rate}


def steps_between(then: Progress, now: Progress, *, has_new_weights: bool) -> Steps | None:
    """Return the steps between two saves, None where nothing shows one that changes weights.

    ``has_new_weights``: or else nothing but a schedule may be new. A script may move it after each
    epoch, and save again: then it shows a step only if it moves with each.
    """
    own_steps = [value for name, value in then.counters.items() if name.startswith(_OWN_STEP)]
    for counter, begin in then.counters.items():
        is_of_schedule = counter.startswith(_MOVES) and not has_new_weights
        is_of_epochs = is_of_schedule and begin < max(own_steps, default=0)
        if now.counters.get(counter, 0) > begin and not is_of_epochs:
            break
    else:
        return None
    end = now.counters[counter]
    if now.made_no_step or (
        not counter.startswith(_OWN_STEP) and now.may_have_skipped(end - begin, then)
    ):
        return None
    # The rate of the later save may be that of a step after it: 0 where a schedule ends.
    saves = (then,) if now.has_rate_of_next_step(then) else (then, now)
    highest = [max(save.rates) for save in saves if save.rates]
    lowest = [min(save.rates) for save in saves if save.rates]
    if 0 in highest:
        return None
    are_known = len(highest) == len(saves)
    return Steps(
        counter=counter,
        begin=begin,
        end=end,
        rate=min(highest) if are_known else None,
        lowest_rate=min(lowest) if are_known else None,
        is_doubtful=is_of_schedule,
    )


def progress_of(folder: CheckpointFolder, sharded: Sequence[DcpFolder]) -> Progress:
    """Return the progress that a checkpoint records."""
    saved = list(saved_optimizers(folder, sharded))
    counters: dict[str, float] = {
        f"{_OWN_STEP}{optimizer.path}": step
        for optimizer in saved
        if (step := steps_of(folder.root, optimizer))
    }
    step_of_trainer = trainer_progress(folder.root).step
    if step_of_trainer is not None:
        counters[_GLOBAL_STEP] = step_of_trainer
    last_rates: list[float] = []
    scale: float | None = None
    backoff = 0.5
    for component in folder.components:
        content = component.content
        if not isinstance(content, TorchFile):
            continue
        root = content.tree.root
        if component.role is Role.SCHEDULER:
            if (moves := moves_of(root)) is not None:
                counters[f"{_MOVES}{component.path}"] = moves
            last_rates += numbers_of(items_of(child(root, "_last_lr")))
        elif component.role is Role.GRAD_SCALER and is_dict_like(root):
            value = child(root, "scale")
            scale = value if isinstance(value, float) else nan
            factor = child(root, "backoff_factor")
            backoff = factor if isinstance(factor, float) and 0 < factor < 1 else backoff
    rates = [rate for optimizer in saved for rate in _rates_of(optimizer)] or last_rates
    has_states = any(optimizer.states for optimizer in saved)
    return Progress(
        counters=counters,
        rates=tuple(rates),
        scale=scale,
        backoff=backoff,
        made_no_step=not has_states and not all(map(_is_plain_sgd, saved)),
    )


def _rates_of(optimizer: SavedOptimizer) -> Iterator[float]:
    """Yield the learning rates of the param groups whose parameters have states; of all groups
    without any states.
    """
    for group, values in zip(optimizer.groups, optimizer.values, strict=False):
        if not optimizer.states or not optimizer.states.keys().isdisjoint(group):
            yield from numbers_of([values.get("lr")])


def _is_plain_sgd(optimizer: SavedOptimizer) -> bool:
    """Return whether an optimizer keeps no states: SGD without momentum."""
    return name_of(optimizer.options, ()) == "SGD" and all(
        values.get("momentum") in (0, 0.0) for values in optimizer.values
    )


_MOST_SAVES = 3


def are_saves_of_one_run(folders: Iterable[Neighbour]) -> bool:
    """Return whether numbered folders are saves of one run, as a counter in them keeps pace with the
    numbers in their names: steps 5, 10 and 15 in ``e0``, ``e1`` and ``e2``.

    Runs of a sweep or of a cross-validation make equal numbers of steps, or any. Reads the headers
    of the first three saves.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    saves = (folder for folder in folders if folder.names.is_save)
    for save in islice(saves, _MOST_SAVES):
        _, number = split_number(save.name) or ("", 0)
        with suppress(CkptfixError, OSError), save.opened() as root:
            there = save.scan(*_COUNTING, root=root)
            for name, value in progress_of(there, scan_dcp_folders(there)).counters.items():
                points.setdefault(name, []).append((number, value))
    # A counter whose file one of them lost shows less.
    most = max(map(len, points.values()), default=0)
    return any(_keeps_pace(values) for values in points.values() if len(values) == most)


_COUNTING = (Role.OPTIMIZER, Role.SCHEDULER, Role.GRAD_SCALER)


def _keeps_pace(points: Sequence[tuple[int, float]]) -> bool:
    """Return whether values rise in proportion to numbers. Two are enough where both are in
    proportion from 0 on, as with numbers that count epochs from 0 or 1.
    """
    if len(points) < 2 or any(
        number >= later or value >= value_then
        for (number, value), (later, value_then) in pairwise(points)
    ):
        return False
    (first, begin), (second, middle), *more = points
    if not more:
        return any(begin * (second + at) == middle * (first + at) for at in (0, 1))
    last, end = more[-1]
    return (middle - begin) * (last - second) == (end - middle) * (second - first)
