"""The run state of a rank: what ``save_state`` leaves out and a run needs to go on bit for bit, in
one small file.

``save`` writes it next to accelerate's own files, where stock ``load_state`` ignores it. ``go_on``
restores it after everything else, the random generators last, and then compares what is there with
the file.
"""

import gc
import itertools
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import checkpointing
from torch.optim.lr_scheduler import LRScheduler

from ckptfix.checkpoint.filenames import parse_file_name, run_state_name
from ckptfix.checkpoint.manifest import is_repaired
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.run_states import digest_of_end
from ckptfix.devices.callers import warn_caller
from ckptfix.devices.patching import Method, Patch, Patches, replaced
from ckptfix.storage.paths import RECEIPT
from ckptfix.training.prepared import innermost
from ckptfix.training.ranks import SHARDED
from ckptfix.training.resuming import loader_positions, positions
from ckptfix.training.resuming.generators import (
    GeneratorStates,
    capture,
    fingerprint,
    first_difference,
    from_plain,
    plain,
    restore,
)
from ckptfix.training.resuming.saved_positions import Position, SaveMoment
from ckptfix.wording import count_of, human_size, list_names

VERSION = 2
READABLE = (1, VERSION)
"""Versions of run states that are read. 1, of 0.5.0, has the state of Python's generator as a tuple
of integers.
"""

SMALL = 1 << 20
"""Bytes up to which the state of a custom object is kept for every rank."""

_log = logging.getLogger("ckptfix")

_SCHEDULERS: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
"""Every LR scheduler of this process, and its number: one that is not prepared is in no file of
accelerate's.
"""

_numbers = itertools.count()

State = dict[str, Any]


def watch(accelerator: Any) -> None:
    """Follow what an accelerator holds, so that its saves can record it."""
    positions.watch(accelerator)
    if not _MADE.is_installed:
        # Most scripts make their schedulers before the first call that is guarded. The older
        # generations of the collector have what was made earlier, each in its order.
        for generation in (2, 1, 0):
            for made in gc.get_objects(generation):
                if issubclass(type(made), LRScheduler):
                    _number(made)
        _MADE.install()


def release_classes() -> None:
    """Undo the changes of classes of accelerate and torch, unless an accelerator still needs
    them.
    """
    if not positions.WATCHED:
        positions.LOADERS.remove()
        _MADE.remove()


def _number(scheduler: Any) -> None:
    with suppress(TypeError):  # a class that cannot be hashed
        if scheduler not in _SCHEDULERS:
            _SCHEDULERS[scheduler] = next(_numbers)


def _numbering(original: Method) -> Method:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _number(self)

    return __init__


_MADE = Patches(Patch("torch.optim.lr_scheduler:LRScheduler.__init__", _numbering))


@contextmanager
def seen_states() -> Iterator[dict[str, Any]]:
    """Yield the states that accelerate saves meanwhile, by file name: asking an object twice may
    take long.
    """
    states: dict[str, Any] = {}
    original = checkpointing.save

    def save(state: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        states[os.path.basename(path)] = state
        return original(state, path, *args, **kwargs)

    with replaced(checkpointing, save=save):
        yield states


def collect(accelerator: Any, random: GeneratorStates, states: Mapping[str, Any]) -> State:
    """Return the run state of this rank. ``random``: the generators with which the run goes on
    after the save.

    ``states``: of what accelerate saved, by file name. What cannot be described is left out, and a
    load says so.
    """
    loaders = []
    for position in loader_positions.positions_of(accelerator):
        try:
            loaders.append(position if isinstance(position, str) else position.as_plain())
        except TypeError as error:
            loaders.append(f"position not recorded: {error}")
    return {
        "version": VERSION,
        "world": accelerator.num_processes,
        "rank": accelerator.process_index,
        "step": accelerator.step,
        "progress": _progress(accelerator, loaders),
        "accumulation": accelerator.gradient_accumulation_steps,
        "random": random.as_plain(),
        "loaders": loaders,
        "schedulers": [_described(one.state_dict()) for one in accelerator._schedulers],
        "unprepared": _unprepared(accelerator),
        "scaler": (
            None if accelerator.scaler is None else _described(accelerator.scaler.state_dict())
        ),
        "custom": _custom(accelerator, states),
        "parameters": _parameter_names(accelerator),
        "gradients": _gradients(accelerator),
        "is_cut": not accelerator.sync_gradients and accelerator.distributed_type in SHARDED,
    }


def save(
    accelerator: Any, folder: Path, random: GeneratorStates, states: Mapping[str, Any]
) -> None:
    """Write the run state of this rank into the folder of a save; see ``collect``.

    Code of the script runs in it, of custom objects and datasets. When that fails, the save is
    complete without it.
    """
    try:
        state = collect(accelerator, random, states)
    except Exception as error:
        warn_caller(
            f"{run_state_name(accelerator.process_index)} was not saved, so a run from this "
            f"checkpoint will not be bit-exact: {type(error).__name__}: {error}"
        )
        return
    state["beside"] = _beside(folder, accelerator.process_index)
    torch.save(state, folder / run_state_name(accelerator.process_index))


def read(folder: Path, rank: int) -> State:
    """Return the run state of a rank. Raises OSError where there is none, ValueError where it
    cannot be used.
    """
    path = folder / run_state_name(rank)
    with path.open("rb") as file:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(f"{path.name} cannot be read ({type(error).__name__})") from error
    if not isinstance(state, dict) or state.get("version") not in READABLE:
        raise ValueError(f"{path.name} is not a run state of this version of ckptfix")
    return state


# The files next to a run state: accelerate alone saves over them and leaves the run state where it
# is.


def _beside(folder: Path, rank: int) -> dict[str, str]:
    """Return digests of what a rank has written next to its run state: its random states; the main
    one, states of all.

    Of another rank's files one may not be complete yet. A save is known again by them wherever the
    folder is copied.
    """
    roles = {Role.RNG_STATE, Role.OPTIMIZER, Role.SCHEDULER} if rank == 0 else {Role.RNG_STATE}
    return {
        name: digest_of_end(folder / name)
        for name in sorted(os.listdir(folder))
        if (parsed := parse_file_name(name)) is not None
        and parsed.role in roles
        and (parsed.role is not Role.RNG_STATE or parsed.rank in (rank, None))
        and (folder / name).is_file()
    }


def _saved_over(folder: Path, state: State) -> str:
    """Return the name of a file that another save has written over since, "" where there is
    none.
    """
    for name, digest in state.get("beside", {}).items():
        parsed = parse_file_name(name)
        with suppress(OSError):  # removed: the load itself says what it lacks
            if parsed is None or (parsed.role is not Role.RNG_STATE and _is_written_anew(folder)):
                # A repair may have renamed keys in it, migrate has written it for another strategy.
                continue
            if digest_of_end(folder / name) != digest:
                return str(name)
    return ""


def _is_written_anew(folder: Path) -> bool:
    return is_repaired(folder) or (folder / RECEIPT).is_file()


# What a run state holds.


def _progress(accelerator: Any, loaders: Sequence[Any]) -> list[Any]:
    """Return how far a run has come, the same on every rank."""
    positions_now = [
        [one["iteration"], one["fetched"]] if isinstance(one, dict) else [] for one in loaders
    ]
    epochs = [getattr(innermost(one), "last_epoch", None) for one in accelerator._schedulers]
    steps = [_steps_of(innermost(optimizer)) for optimizer in accelerator._optimizers]
    return [accelerator.step, positions_now, plain(epochs), steps]


def _steps_of(optimizer: Any) -> list[int]:
    """Return the number of steps of the first parameter that has one; optimizers of others keep
    what they like.
    """
    states = getattr(optimizer, "state", None)
    first = next(iter(states.values()), None) if isinstance(states, Mapping) else None
    step = first.get("step") if isinstance(first, Mapping) else None
    return [] if step is None else [int(step)]


def _described(state: Any, limit: float = math.inf) -> State:
    """Return a state in plain values; a fingerprint of one that has others, or takes more than
    ``limit`` bytes.
    """
    if _size(state) <= limit:
        with suppress(TypeError):
            return {"state": plain(state)}
    return {"fingerprint": fingerprint(_sampled(state))}


def _unprepared(accelerator: Any) -> list[State]:
    """Return the schedulers that the script has not prepared, of optimizers that it has."""
    return [
        {"type": type(one).__name__, "optimizer": number, **_described(one.state_dict())}
        for number, one in _unprepared_schedulers(accelerator)
    ]


def _unprepared_schedulers(accelerator: Any) -> list[tuple[int, Any]]:
    numbers = {id(innermost(one)): number for number, one in enumerate(accelerator._optimizers)}
    known = {id(innermost(one)) for one in accelerator._schedulers}
    inside = {id(part) for one in list(_SCHEDULERS) for part in getattr(one, "_schedulers", ())}
    found = [
        (numbers[id(innermost(one.optimizer))], one)
        for one in list(_SCHEDULERS)
        if id(one) not in known | inside
        and id(innermost(getattr(one, "optimizer", None))) in numbers
    ]
    # Two of one type drive one optimizer in the order in which the script made them, which is the
    # same in every run.
    return sorted(
        found, key=lambda pair: (pair[0], type(pair[1]).__name__, _SCHEDULERS.get(pair[1], 0))
    )


def _custom(accelerator: Any, states: Mapping[str, Any]) -> list[State | None]:
    names = (
        f"custom_checkpoint_{number}.pkl" for number in range(len(accelerator._custom_objects))
    )
    return [
        _described(states[name], SMALL) if states.get(name) is not None else None for name in names
    ]


def _size(value: Any) -> int:
    """Return about how many bytes a state takes."""
    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    if isinstance(value, Mapping):
        return sum(map(_size, value.values())) + 16 * len(value)
    if isinstance(value, list | tuple):
        return sum(map(_size, value)) + 8 * len(value)
    return int(
        getattr(value, "nbytes", None) or (len(value) if isinstance(value, str | bytes) else 8)
    )


def _sampled(value: Any) -> Any:
    """Return a state with the first and last elements of each tensor in its place."""
    if isinstance(value, torch.Tensor) and value.numel() > 2048:
        flat = value.detach().reshape(-1)
        return [str(value.dtype), list(value.shape), flat[:1024].cpu(), flat[-1024:].cpu()]
    if isinstance(value, Mapping):
        return {key: _sampled(inside) for key, inside in value.items()}
    return [_sampled(inside) for inside in value] if isinstance(value, list | tuple) else value


def _named_parameters(accelerator: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of all models, each with the number of its model before its name."""
    for number, model in enumerate(accelerator._models):
        for name, parameter in model.named_parameters():
            yield f"{number}.{name}", parameter


def _parameter_names(accelerator: Any) -> list[list[list[str]]]:
    """Return the names of the parameters of each optimizer by group, in its order."""
    names = {id(parameter): name for name, parameter in _named_parameters(accelerator)}
    return [
        [
            [names.get(id(parameter), "") for parameter in group["params"]]
            for group in one.param_groups
        ]
        for one in map(innermost, accelerator._optimizers)
        if isinstance(one, torch.optim.Optimizer)
    ]


def _gradients(accelerator: Any) -> dict[str, torch.Tensor] | None:
    """Return the gradients of an accumulation that the save cuts, None between two optimizer
    steps.
    """
    if accelerator.sync_gradients or accelerator.distributed_type in SHARDED:
        return None
    found = {
        name: parameter.grad.detach()
        for name, parameter in _named_parameters(accelerator)
        if parameter.grad is not None
    }
    if found:
        size = sum(one.numel() * one.element_size() for one in found.values())
        _log.info(
            "save_state was called during gradient accumulation: the accumulated gradients "
            "are saved too (%s)",
            human_size(size),
        )
    return found or None


# The load.


def go_on(accelerator: Any, folder: Path, left: frozenset[str] = frozenset()) -> list[str]:
    """Restore the run state of this rank after a load; return why the run does not continue bit for
    bit.

    ``left``: the parts that are left as the load made them, by the words of ``LoadPolicy``.
    Whatever is wrong with the file, the load itself stays as it is: nothing is raised.
    """
    watch(accelerator)
    rank = accelerator.process_index
    try:
        state = read(folder, rank)
    except FileNotFoundError:
        return _go_on_without(accelerator, folder, left)
    except (OSError, ValueError) as error:
        return [f"{error}; data order and random numbers within an epoch are not restored"]
    return _restored(accelerator, folder, state, left)


def _restored(accelerator: Any, folder: Path, state: State, left: frozenset[str]) -> list[str]:
    try:
        return _Restoring(accelerator, folder, state, left).run()
    # Of the script's own code, or of a file that does not hold what it should.
    except Exception as error:
        return [f"{run_state_name(accelerator.process_index)}: {type(error).__name__}: {error}"]


_OF_STOCK = (
    "data order and random numbers within an epoch are not restored: the checkpoint was "
    "saved without ckptfix, so it has no run state"
)


def _go_on_without(accelerator: Any, folder: Path, left: frozenset[str]) -> list[str]:
    """Return why a rank without a run state cannot go on exactly, and do what has a right
    answer.
    """
    try:
        main = read(folder, 0)
    except FileNotFoundError:
        return [_OF_STOCK]
    except (OSError, ValueError) as error:
        return [str(error)]
    if main["world"] == accelerator.num_processes:
        return [
            f"rank {accelerator.process_index} did not take part in the save, so it has "
            "no run state"
        ]
    return _restored(accelerator, folder, main, left)


class _Restoring:
    """One restoration of a run state."""

    def __init__(self, accelerator: Any, folder: Path, state: State, left: frozenset[str]) -> None:
        self._accelerator = accelerator
        self._left = left
        self._folder = folder
        self._state = state
        self._problems: list[str] = []
        self._checks: list[tuple[str, Any, Callable[[], Any]]] = []
        self._is_same_world = state["world"] == accelerator.num_processes

    def run(self) -> list[str]:
        """Restore everything, the random generators last; return what is not as it was."""
        accelerator, state = self._accelerator, self._state
        random = GeneratorStates.from_plain(state["random"])
        if name := _saved_over(self._folder, state) or self._saved_over_main():
            return [
                f"{name} has changed since {run_state_name(state['rank'])} was written, for "
                "example by a save without ckptfix or a copy; "
                f"{run_state_name(state['rank'])} was ignored, so data order and random "
                "numbers within an epoch are not restored"
            ]
        if not self._is_same_world:
            self._problems.append(
                f"saved with {count_of(state['world'], 'process')}, now {accelerator.num_processes}"
            )
        elif self._is_of_another_save():
            return [
                f"{run_state_name(accelerator.process_index)} and {run_state_name(0)} are "
                "from different saves"
            ]
        else:
            self._restore_own()
        if state["accumulation"] != accelerator.gradient_accumulation_steps:
            self._problems.append(
                f"saved with gradient_accumulation_steps={state['accumulation']}, "
                f"now {accelerator.gradient_accumulation_steps}"
            )
        if "step" not in self._left:
            self._restore_step()
        if "optimizers" not in self._left:
            self._order_moments()
        if "schedulers" not in self._left:
            self._restore_unprepared()
        if "dataloaders" not in self._left:
            self._restore_loaders(random)
        left_as_loaded = capture()
        self._compare()
        # Last, as states of custom objects may draw from the generators when they are read back.
        if "rng" in self._left:
            restore(left_as_loaded)
        elif self._is_same_world:
            restore(random)
            self._checks = [("random generators", random, capture)]
            self._compare()
        else:
            _seed_anew(random, accelerator.process_index, state)
        return self._problems

    def _saved_over_main(self) -> str:
        """Return the name of a file of the main process that another save has written over, as
        ``_saved_over``.
        """
        if self._state["rank"] == 0:
            return ""
        try:
            return _saved_over(self._folder, read(self._folder, 0))
        except (OSError, ValueError):  # on the disk of another node
            return ""

    def _is_of_another_save(self) -> bool:
        """Return whether this rank saved alone, and was stopped before it could in the save of rank
        0.
        """
        if self._state["rank"] == 0:
            return False
        try:
            return bool(read(self._folder, 0)["progress"] != self._state["progress"])
        except (OSError, ValueError):  # on the disk of another node
            return False

    def _restore_own(self) -> None:
        """Restore what each rank has for itself."""
        accelerator, state = self._accelerator, self._state
        if state["is_cut"]:
            self._problems.append(
                "the checkpoint was saved during gradient accumulation, and the gradients, "
                "which are sharded across ranks, were not saved"
            )
        if "step" not in self._left:
            self._restore_gradients(state["gradients"] or {})
        if "schedulers" not in self._left:
            self._restore_each("scheduler", accelerator._schedulers, state["schedulers"])
        if (
            "scaler" not in self._left
            and accelerator.scaler is not None
            and state["scaler"] is not None
        ):
            self._restore_each("gradient scaler", [accelerator.scaler], [state["scaler"]])
        if "custom" not in self._left:
            self._restore_each("custom object", accelerator._custom_objects, state["custom"])

    def _restore_step(self) -> None:
        """Restore the count of batches within an accumulation, or begin a complete one where it is
        another one.

        The symptom: saved after 5 steps of 2 batches, the first step of a run with 4 batches had 2,
        scaled by 1/4.
        """
        accelerator, state = self._accelerator, self._state
        step = state["step"]
        if not self._is_same_world or (
            state["accumulation"] != accelerator.gradient_accumulation_steps
            and not state["gradients"]
        ):
            step = 0
        accelerator.step = step
        self._checks.append(("accelerator.step", step, lambda: accelerator.step))

    def _restore_each(
        self, what: str, things: Sequence[Any], saved: Sequence[State | None]
    ) -> None:
        for number, (thing, described) in enumerate(zip(things, saved, strict=False)):
            name = f"{what} {number}" if len(things) > 1 else what
            if described is None:
                continue
            if "state" not in described:
                self._compare_fingerprint(name, thing, described["fingerprint"])
                continue
            wanted = from_plain(described["state"])
            if first_difference(wanted, _comparable(thing.state_dict())) is not None:
                thing.load_state_dict(wanted)
            self._checks.append((name, wanted, lambda thing=thing: _comparable(thing.state_dict())))  # type: ignore[misc]

    def _compare_fingerprint(self, name: str, thing: Any, wanted: str) -> None:
        state = thing.state_dict()
        if wanted not in (fingerprint(state), fingerprint(_sampled(state))):
            self._problems.append(
                f"{name}: the state of this rank was different, but the run state could not store "
                "it (too large, or not plain values)"
            )

    def _restore_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        parameters = dict(_named_parameters(self._accelerator))
        unknown = [name for name in gradients if name not in parameters]
        if unknown:
            self._problems.append(
                f"gradients of {list_names(unknown)}: this run has no such parameter"
            )
        for name, gradient in gradients.items():
            if name in parameters:
                parameter = parameters[name]
                parameter.grad = gradient.to(parameter.device, copy=True)
        if gradients:
            self._accelerator.gradient_state._set_sync_gradients(False)

    def _order_moments(self) -> None:
        """Give each parameter the moments of its name: optimizer.bin has them in the order of the
        saving rank 0.
        """
        accelerator = self._accelerator
        if accelerator.distributed_type in SHARDED:
            return
        try:
            saved = (
                self._state["parameters"]
                if self._state["rank"] == 0
                else read(self._folder, 0)["parameters"]
            )
        except (OSError, ValueError):
            saved = self._state["parameters"]
        now = _parameter_names(accelerator)
        optimizers = [
            one
            for one in map(innermost, accelerator._optimizers)
            if isinstance(one, torch.optim.Optimizer)
        ]
        if len(saved) != len(now):
            return
        for optimizer, before, after in zip(optimizers, saved, now, strict=True):
            is_same = [sorted(group) for group in before] == [sorted(group) for group in after]
            is_named = all("" not in group and len(set(group)) == len(group) for group in before)
            if (
                before != after and is_same and is_named
            ):  # under other names, the position alone says whose they are
                _reorder(optimizer, before, after)

    def _restore_unprepared(self) -> None:
        saved, there = self._state["unprepared"], _unprepared_schedulers(self._accelerator)
        wanted = [(one["optimizer"], one["type"]) for one in saved]
        if wanted and wanted != [(number, type(one).__name__) for number, one in there]:
            self._problems.append(
                f"scheduler {saved[0]['type']} was not prepared, so the checkpoint does not "
                "contain it; pass it to prepare()"
            )
        elif wanted and self._is_same_world:
            self._restore_each("unprepared scheduler", [one for _, one in there], saved)

    def _restore_loaders(self, random: GeneratorStates) -> None:
        saved: list[Position | str] = []
        moment = SaveMoment(random)
        for value in self._state["loaders"]:
            position = value if isinstance(value, str) else Position.from_plain(value)
            if not isinstance(position, str):
                position.save = moment
            saved.append(position)
        if not self._is_same_world:
            saved = loader_positions.for_other_world(self._accelerator, saved, self._state["world"])
        found = loader_positions.go_on_from(self._accelerator, saved)
        if self._is_same_world:
            self._problems += found

    def _compare(self) -> None:
        """Read back: name the first state that is not what the file says."""
        for name, wanted, current in self._checks:
            difference = first_difference(wanted, current())
            if difference is not None:
                at = f" ({difference})" if difference else ""
                self._problems.append(f"{name}: after loading, it differs from the checkpoint{at}")
                return


def _comparable(state: Any) -> Any:
    try:
        return from_plain(plain(state))
    except TypeError:
        return state


def _reorder(
    optimizer: Any, before: Sequence[Sequence[str]], after: Sequence[Sequence[str]]
) -> None:
    """Move moments that were loaded by position to the parameters whose names they belong to."""
    for group, saved, now in zip(optimizer.param_groups, before, after, strict=True):
        loaded = {
            name: optimizer.state.pop(one, None)
            for name, one in zip(saved, group["params"], strict=True)
        }
        for name, parameter in zip(now, group["params"], strict=True):
            if loaded[name] is not None:
                optimizer.state[parameter] = loaded[name]


def _seed_anew(random: GeneratorStates, rank: int, state: State) -> None:
    """Give a rank of a run with another number of processes generators that the same load gives it
    again.
    """
    restore(random)
    if rank == state["rank"]:
        return
    seed = int(fingerprint([random, rank])[:8], 16)
    import random as python

    import numpy as np

    python.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def go_on_and_report(
    accelerator: Any, folder: Path, *, left: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """Restore the run state of this rank; say in one line why a run does not continue bit for bit,
    and return it.
    """
    problems = go_on(accelerator, folder, left)
    if not problems:
        return ()
    is_of_stock = problems[0] == _OF_STOCK
    is_of_all = is_of_stock or problems[0].startswith("saved with")
    if accelerator.is_main_process or not is_of_all:
        words = "; ".join(problems[:3]) + (
            f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        )
        if is_of_stock:
            _log.warning("%s: not bit-exact: %s", folder, words)
        else:
            warn_caller(f"{folder}: not bit-exact: {words}")
    return tuple(problems)
