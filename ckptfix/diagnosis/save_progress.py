"""The progress that the files of a save record: steps of optimizers, moves of schedules, rates and
the scale of fp16.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from math import nan
from typing import NamedTuple

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

OWN_STEP = "step in "
MOVES = "last_epoch in "
"""Beginnings of the names of counters in messages."""

_GLOBAL_STEP = f"global_step in {TRAINER_STATE}"


class Progress(NamedTuple):
    """The progress that a checkpoint records.

    ``counters``: by their names in messages; those that prove a step of the optimizer first.
    ``rate``: the highest learning rate of a param group with states, None where it is not known.
    ``scale``: of the gradients in fp16; None in a run without, NaN where it cannot be read.
    ``backoff``: its factor for a skipped step. ``is_without_states``: there is no optimizer, or it
    is SGD without momentum.
    """

    counters: Mapping[str, float]
    rate: float | None
    scale: float | None
    backoff: float
    is_without_states: bool

    @property
    def own_steps(self) -> list[float]:
        """The steps that the optimizers count."""
        return [self.counters[name] for name in self.counters if name.startswith(OWN_STEP)]

    def moved_since(self, then: "Progress", *, may_be_same: bool) -> str:
        """Return the first counter that moved since then, "" where none did.

        ``may_be_same``: nothing else is new. A script may move its schedule after each epoch, and
        save again: so a schedule shows a step if it moves with each.
        """
        return next(
            (
                name
                for name, value in self.counters.items()
                if name in then.counters
                and value > then.counters[name]
                and not (
                    may_be_same
                    and name.startswith(MOVES)
                    and then.counters[name] < max(then.own_steps or [0])
                )
            ),
            "",
        )

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
        both = [(name, self.counters[name], then.counters.get(name, 0)) for name in self.counters]
        return any(
            0 < before < moves and moves * steps_before == steps * before
            for schedule, moves, before in both
            if schedule.startswith(MOVES)
            for name, steps, steps_before in both
            if not name.startswith(MOVES)
        )


def progress_of(folder: CheckpointFolder, sharded: Sequence[DcpFolder]) -> Progress:
    """Return the progress that a checkpoint records."""
    saved = list(saved_optimizers(folder, sharded))
    counters: dict[str, float] = {
        f"{OWN_STEP}{optimizer.path}": step
        for optimizer in saved
        if (step := steps_of(folder.root, optimizer))
    }
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
                counters[f"{MOVES}{component.path}"] = moves
            last_rates += numbers_of(items_of(child(root, "_last_lr")))
        elif component.role is Role.GRAD_SCALER and is_dict_like(root):
            value = child(root, "scale")
            scale = value if isinstance(value, float) else nan
            factor = child(root, "backoff_factor")
            backoff = factor if isinstance(factor, float) and 0 < factor < 1 else backoff
    step_of_trainer = trainer_progress(folder.root).step
    if step_of_trainer is not None:
        counters[_GLOBAL_STEP] = step_of_trainer
    rates = [rate for optimizer in saved for rate in _rates_of(optimizer)] or last_rates
    return Progress(
        counters=counters,
        rate=max(rates, default=None),
        scale=scale,
        backoff=backoff,
        is_without_states=all(
            not optimizer.states and _is_plain_sgd(optimizer) for optimizer in saved
        ),
    )


def _rates_of(optimizer: SavedOptimizer) -> Iterator[float]:
    """Yield the learning rates of the param groups whose parameters have states; of all groups
    without any states.
    """
    for group, values in zip(optimizer.groups, optimizer.values, strict=False):
        if not optimizer.states or not optimizer.states.keys().isdisjoint(group):
            yield from numbers_of([values.get("lr")])


def _is_plain_sgd(optimizer: SavedOptimizer) -> bool:
    return name_of(optimizer.options, ()) == "SGD" and not any(map(_has_momentum, optimizer.values))


def _has_momentum(values: Mapping[str, object]) -> bool:
    return values.get("momentum") not in (0, 0.0)


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
