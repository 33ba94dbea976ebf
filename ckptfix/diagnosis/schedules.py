"""Schedules that disagree with the optimizer next to them, by headers alone.

Facts from torch 2.13 (``torch/optim/lr_scheduler.py``), and from runs of every schedule of torch
and transformers: most compute the next learning rate of a param group from its present one.
LambdaLR, CosineAnnealingWarmRestarts and CyclicLR compute it from ``base_lrs``, one for each group.

A scheduler records as ``_last_lr`` the learning rates that it gave to its optimizer. Nothing else
in torch sets rates, so both files of a save have the same. Measured in runs of accelerate and of
the Trainer with one and two processes, gradient accumulation, ``split_batches``, warm-up, schedules
per step and per epoch, and resumes. A script may set rates itself, once before a save or at every
step, or go back to an older optimizer: rates alone prove no mix of two saves. The Trainer moves its
schedule once for each of its steps, but for those that fp16 skips. Nothing counts the steps of a
run of accelerate: ``step`` in its random states counts batches, and begins again with each epoch.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from math import isfinite
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.neighbours import (
    Neighbour,
    Neighbours,
    are_on_both_sides,
    next_to_it,
    scanned,
)
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.second_prepare import KEYS_OF_EVERY_SCHEDULE
from ckptfix.checkpoint.trainer_folders import trainer_progress
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.inconsistent import MismatchedRates, UnusableRates
from ckptfix.diagnosis.findings.misplaced import (
    ChangedEntry,
    MisplacedEntry,
    MixedCounts,
    MixedRates,
    MixedSteps,
)
from ckptfix.diagnosis.optimizer_values import steps_of
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, saved_optimizers
from ckptfix.errors import CkptfixError, FormatError
from ckptfix.formats.pickle_tree import Text, child, is_dict_like, items_of, text_keys
from ckptfix.formats.torch_file import TorchFile
from ckptfix.wording import list_names

_BY_FUNCTION = "lr_lambdas"
_FROM_BASE_RATES = {
    _BY_FUNCTION: frozenset((_BY_FUNCTION,)),
    "T_cur": frozenset(("T_0", "T_i", "T_mult", "T_cur", "eta_min")),
    "max_lrs": frozenset(
        {
            *("max_lrs", "mode", "gamma", "scale_mode", "total_size", "step_ratio"),
            *("cycle_momentum", "use_beta1", "base_momentums", "max_momentums"),
            *("_scale_fn_ref", "_scale_fn_custom"),
        }
    ),
}
"""A key that only this schedule has -> all keys of its own. These schedules read ``base_lrs`` in
each step.
"""

_MOST_NESTED = 16

_MOST_MOVES = 1 << 53
"""Python refuses to print the largest numbers that a pickle can hold."""


def diagnose_schedules(case: Case) -> Iterator[Finding]:
    """Yield the schedules that fit none of the folder's optimizers.

    Nothing is judged where an optimizer cannot be read, or where there are more schedulers than
    optimizers: then one may belong to an optimizer that is not saved.
    """
    if case.is_file:
        return
    folder, damaged = case.folder, case.damaged
    files = [one for one in folder.components if one.role is Role.OPTIMIZER]
    schedulers = [one for one in folder.components if one.role is Role.SCHEDULER]
    for scheduler in schedulers:
        if isinstance(scheduler.content, TorchFile) and scheduler.path not in damaged:
            with suppress(FormatError):
                if _has_unusable_rates(scheduler.content.tree.root):
                    yield UnusableRates(path=scheduler.path)
    read = {one.path: one for one in case.optimizers}
    if {one.path for one in files} != read.keys() - damaged or len(schedulers) > len(files):
        return
    groups = {one.name.index: len(read[one.path].groups) for one in files}
    for scheduler in schedulers:
        if not isinstance(scheduler.content, TorchFile) or scheduler.path in damaged:
            continue
        try:
            rates = list(_read_in_each_step(scheduler.content.tree.root))
        except FormatError:
            continue
        wrong = [count for count in rates if count not in groups.values()]
        if wrong:
            partner = next(
                (one for one in files if one.name.index == scheduler.name.index), files[0]
            )
            yield MismatchedRates(
                path=scheduler.path,
                rates=wrong[0],
                optimizer=str(partner.path),
                param_groups=len(read[partner.path].groups),
            )


def _moved_by(state: Any) -> Iterator[Any]:
    """Yield the states of the schedules that the next steps of a scheduler move, and that read
    their base rates.
    """
    if not is_dict_like(state):
        return
    nested = [
        one for one in items_of(child(state, "_schedulers"))[:_MOST_NESTED] if is_dict_like(one)
    ]
    if nested:
        # SequentialLR is done with the schedules before the current one. ChainedScheduler has no
        # milestones.
        milestones = [one for one in items_of(child(state, "_milestones")) if type(one) is int]
        moves = child(state, "last_epoch")
        done = bisect_right(milestones, moves + 1) if type(moves) is int else 0
        for part in nested[done:]:
            if child(part, "_schedulers") is None:
                yield from _moved_by(part)
        return
    own = text_keys(state) - KEYS_OF_EVERY_SCHEDULE
    if any(key in own and own <= every for key, every in _FROM_BASE_RATES.items()):
        yield state


def _read_in_each_step(state: Any) -> Iterator[int]:
    """Yield the numbers of base rates that the next steps of a scheduler take for all param groups.

    A MultiplicativeLR steps without base rates, and its file looks like that of a LambdaLR. With
    the state of another run it has a last rate for each group, and still the base rates of that
    run.
    """
    for part in _moved_by(state):
        saved, last = child(part, "base_lrs"), items_of(child(part, "_last_lr"))
        rates = items_of(saved)
        if saved is not None and (_BY_FUNCTION not in text_keys(part) or len(rates) == len(last)):
            yield len(rates)


def _has_unusable_rates(state: Any) -> bool:
    """Return whether a next step takes a base rate that is None, text or not finite: it fails, or
    the learning rate is NaN.
    """
    for part in _moved_by(state):
        if "base_lrs" not in text_keys(part):
            continue
        saved = child(part, "base_lrs")
        rates = items_of(saved) if saved is not None else (None,)
        if any(
            rate is None or type(rate) is Text or (isinstance(rate, float) and not isfinite(rate))
            for rate in rates
        ):
            return True
    return False


class _Progress(NamedTuple):
    """The progress that the files of a folder record: by position, and that of the Trainer's
    scheduler.

    ``rates``: of the param groups of optimizers. ``held``: all of these, so that each of 1,000
    schedulers need not look at 1,000 optimizers. ``last``: rates that schedulers gave last.
    ``given``: all of these, where each optimizer has a scheduler, else none. ``moves``: of the
    scheduler, None for one whose moves are not the Trainer's steps.
    """

    rates: Mapping[int, tuple[float, ...]]
    held: Collection[tuple[float, ...]]
    last: Mapping[int, tuple[float, ...]]
    given: Collection[tuple[float, ...]]
    moves: int | None

    def disagrees(self, index: int) -> bool | None:
        """Return whether a scheduler gave its optimizer other rates, None where that is not known.

        The order of schedulers may not be that of optimizers: no optimizer has the rates that this
        one gave, or no scheduler gave those of this position's optimizer.
        """
        rates, last = self.rates.get(index, ()), self.last.get(index, ())
        if not rates or len(rates) != len(last):
            return None
        return last not in self.held or (bool(self.given) and rates not in self.given)


class _Neighbour(NamedTuple):
    """A checkpoint next to one. ``paces``: as of ``_paces``."""

    name: str
    progress: _Progress
    paces: Mapping[int, Fraction]
    is_earlier: bool


def diagnose_progress(case: Case) -> Iterator[Finding]:
    """Yield the files that are of another save than those next to them.

    The checkpoints next to this one are read only where two files disagree.
    """
    if case.is_file:
        return
    folder, damaged, neighbours = case.folder, case.damaged, case.neighbours
    schedulers = {
        one.name.index: one.path for one in folder.components if one.role is Role.SCHEDULER
    }
    files = {one.name.index: one.path for one in folder.components if one.role is Role.OPTIMIZER}
    if not schedulers or not damaged.isdisjoint((*schedulers.values(), *files.values())):
        return
    own = _progress(folder, case.optimizers)
    # Of two schedulers of one optimizer the first does not know the rates that the second gave.
    compared = schedulers if len(schedulers) <= len(files) else {}
    apart = [index for index in compared if own.disagrees(index)]
    if own.moves is not None and case.step is not None and own.moves != case.step:
        # A count that the Trainer wrote proves more than rates, which a script can set.
        mixed = [*_mixed_steps(own.moves, case.step, neighbours, schedulers[0])]
        yield from mixed
        if mixed:
            return
    if apart:
        near: list[_Neighbour] = []
        for neighbour in neighbours.spread():
            with suppress(CkptfixError, OSError), neighbour.opened() as root:
                there = neighbour.scan(Role.OPTIMIZER, Role.SCHEDULER, root=root)
                saved = list(saved_optimizers(there, ()))
                progress, paces = _progress(there, saved), _paces(there, saved)
                near.append(_Neighbour(neighbour.name, progress, paces, neighbour.is_earlier))
        paces = _paces(folder, case.optimizers)
        for index in apart:
            yield from _mixed_rates(
                own, paces.get(index), near, index, files[index], schedulers[index]
            )


def _mixed_rates(
    own: _Progress,
    pace: Fraction | None,
    near: Sequence[_Neighbour],
    index: int,
    optimizer: PurePosixPath,
    scheduler: PurePosixPath,
) -> Iterator[MixedRates]:
    """Yield that an optimizer has other rates than its scheduler gave it, unless the script seems
    to set them.

    Then the two files of another checkpoint differ, too, but for two checkpoints that exchanged a
    file. A script that sets the rates once changes no count: where the schedule makes the same
    moves for each step in the saves on either side, another ``pace`` is of a mix.
    """
    rates, last = own.rates[index], own.last[index]
    of_optimizer, of_scheduler, agreeing = "", "", 0
    for name, other, _, _ in near:
        is_exchanged = other.last.get(index) == rates and other.rates.get(index) == last
        if other.disagrees(index) and not is_exchanged:
            return
        if other.disagrees(index) is False or is_exchanged:
            agreeing += 1
            of_optimizer = of_optimizer or (name if other.last[index] == rates else "")
            of_scheduler = of_scheduler or (name if other.rates[index] == last else "")
    if not agreeing and last in own.held:
        return
    is_of_scheduler = bool(of_scheduler) and not of_optimizer
    path, partner = (scheduler, optimizer) if is_of_scheduler else (optimizer, scheduler)
    have, expected = (last, rates) if is_of_scheduler else (rates, last)
    group = next(number for number, rate in enumerate(have) if rate != expected[number])
    counted = [save for save in near if index in save.paces]
    paces = {save.paces[index] for save in counted}
    # A schedule of epochs makes no move for most steps.
    is_mixed = (
        are_on_both_sides(save.is_earlier for save in counted)
        and len(paces) == 1
        and pace is not None
        and pace not in paces
        and all(each.denominator == 1 for each in paces)
    )
    yield (MixedCounts if is_mixed else MixedRates)(
        path=path,
        partner=str(partner),
        group=group if len(have) > 1 else None,
        rate=have[group],
        expected=expected[group],
        save=of_optimizer or of_scheduler,
    )


def diagnose_other_schedules(case: Case) -> Iterator[MisplacedEntry]:
    """Yield the schedulers that are of another class than in all checkpoints next to this one, which
    agree, or lost their state.

    Each class of torch has its own keys. Where the nearest checkpoint has those of this one, no
    more is read.
    """
    if case.is_file:
        return
    own = {path: keys for path, keys in _keys_of(case.folder).items() if path not in case.damaged}
    near: list[tuple[bool, Mapping[PurePosixPath, frozenset[str]]]] = []
    for neighbour, there in scanned(case.neighbours.nearest(), Role.SCHEDULER) if own else ():
        files = _keys_of(there)
        own = {path: keys for path, keys in own.items() if files.get(path) != keys}
        if not own:
            return
        near.append((neighbour.is_earlier, files))
    for path, keys in own.items():
        known = [(is_earlier, files[path]) for is_earlier, files in near if path in files]
        expected = {keys_there for _, keys_there in known}
        if not expected or len(expected) > 1 or (len(known) == 1 and keys):
            continue
        (wanted,) = expected
        # No script goes on with a schedule that has no state any more.
        is_wrong = not keys or are_on_both_sides(is_earlier for is_earlier, _ in known)
        more, fewer = list_names(sorted(keys - wanted)), list_names(sorted(wanted - keys))
        yield (MisplacedEntry if is_wrong else ChangedEntry)(
            path=path,
            holds=f"a schedule with {more or f'no {fewer}'}" if keys else "an empty dict",
            expected=f"{fewer or f'no {more}'}, as in {next_to_it(len(known))}",
            effect="load_state fails, or the run continues with another schedule",
        )


def unread_schedules(case: Case) -> Iterator[str]:
    """Yield in words the empty states of schedulers, which a class of a script may save."""
    for path, keys in _keys_of(case.folder).items():
        if not keys:
            yield f"whether {path} lost its state: it is an empty dict"


def _keys_of(folder: CheckpointFolder) -> Mapping[PurePosixPath, frozenset[str]]:
    keys = {}
    for component, state in _states(folder):
        with suppress(FormatError):
            if is_dict_like(state):
                keys[component.path] = text_keys(state)
    return keys


def _states(folder: CheckpointFolder) -> Iterator[tuple[Component, object]]:
    """Yield the readable files of schedulers, each with the root of its state."""
    for component in folder.components:
        if component.role is Role.SCHEDULER and isinstance(component.content, TorchFile):
            yield component, component.content.tree.root


def _paces(
    folder: CheckpointFolder, optimizers: Iterable[SavedOptimizer]
) -> Mapping[int, Fraction]:
    """Return the moves that schedulers made for each step of their optimizers, by position, where
    both are counted.
    """
    moves = {
        component.name.index: child(state, "last_epoch") for component, state in _states(folder)
    }
    return {
        saved.index: Fraction(moved, steps)
        for saved in optimizers
        if type(moved := moves.get(saved.index)) is int
        and 0 < moved < _MOST_MOVES
        and (steps := steps_of(folder.root, saved)) > 0
    }


def _mixed_steps(
    moves: int, step: int, neighbours: Neighbours, scheduler: PurePosixPath
) -> Iterator[MixedSteps]:
    """Yield that the Trainer's schedule moved as often as that of another save.

    Another number alone shows nothing: fp16 skips steps, and a second ``train()`` goes on with the
    schedule.
    """
    for neighbour, there in scanned(neighbours.spread(), Role.SCHEDULER):
        if _progress(there, ()).moves == _step_of(neighbour) == moves:
            yield MixedSteps(path=scheduler, moves=moves, step=step, save=neighbour.name)
            return


def _step_of(neighbour: Neighbour) -> int | None:
    """Return the step in the ``trainer_state.json`` of a checkpoint, None where it cannot be
    read.
    """
    with suppress(CkptfixError, OSError), neighbour.opened() as root:
        return trainer_progress(root).step
    return None


def _progress(folder: CheckpointFolder, optimizers: Iterable[SavedOptimizer]) -> _Progress:
    states = {component.name.index: state for component, state in _states(folder)}
    optimizers = list(optimizers)
    with suppress(FormatError):
        rates = {
            saved.index: numbers_of([group.get("lr") for group in saved.values])
            for saved in optimizers
        }
        last = {
            index: numbers_of(items_of(child(state, "_last_lr")))
            for index, state in states.items()
            if _has_moved(state)
        }
        # A scheduler records this rate in its optimizer.
        initial = [
            numbers_of([group.get("initial_lr") for group in saved.values]) for saved in optimizers
        ]
        is_each_scheduled = last.keys() == rates.keys() and all((*last.values(), *initial))
        return _Progress(
            rates=rates,
            held=frozenset(rates.values()),
            last=last,
            given=frozenset(last.values()) if is_each_scheduled else (),
            moves=moves_of(states.get(0)) if len(states) == 1 else None,
        )
    return _Progress({}, (), {}, (), None)


def _has_moved(state: Any) -> bool:
    """Return whether a schedule has left its beginning, during which scripts set rates for a
    warm-up of their own.
    """
    nested = items_of(child(state, "_schedulers"))[:_MOST_NESTED]
    return any(child(part, "last_epoch") not in (None, 0) for part in (state, *nested))


def numbers_of(values: Sequence[object]) -> tuple[float, ...]:
    """Return learning rates, () where one is not a plain number, as of a capturable optimizer."""
    numbers = tuple(
        value
        for value in values
        if isinstance(value, float) or (type(value) is int and abs(value) < _MOST_MOVES)
    )
    return numbers if len(numbers) == len(values) else ()


def moves_of(state: Any) -> int | None:
    """Return how often a schedule of torch was moved, None for one that does not move with each
    step.

    ReduceLROnPlateau moves with each evaluation. A schedule that a script began at a later epoch
    has another ``_step_count``.
    """
    if not is_dict_like(state):
        return None
    keys = text_keys(state)
    moves, count = child(state, "last_epoch"), child(state, "_step_count")
    is_whole = "_milestones" in keys or (type(moves) is int and count == moves + 1)
    return (
        moves
        if is_whole and type(moves) is int and 0 <= moves < _MOST_MOVES and "_last_lr" in keys
        else None
    )
