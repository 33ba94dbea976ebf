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
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import checkpointing
from torch.optim.lr_scheduler import LRScheduler

from ckptfix.checkpoint.filenames import parse_file_name, run_state_name
from ckptfix.checkpoint.manifest import is_repaired
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.run_states import digest_of_end
from ckptfix.devices.callers import warn_caller
from ckptfix.devices.nested_values import fingerprint, first_difference, from_plain, leaves, plain
from ckptfix.devices.patching import Method, Patch, Patches, replaced
from ckptfix.storage.paths import RECEIPT
from ckptfix.training.loading.moments import first_step, in_own_order, own_names
from ckptfix.training.prepared import innermost
from ckptfix.training.ranks import SHARDED
from ckptfix.training.resuming import loader_positions, positions
from ckptfix.training.resuming.generators import GeneratorStates, capture, restore
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
            loaders.append(position if isinstance(position, str) else position.described())
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
    """Return the number of steps of an optimizer, nothing without one."""
    step = first_step(getattr(optimizer, "state", None))
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


def _size(state: Any) -> int:
    """Return about how many bytes a state takes."""
    return sum(_size_of_leaf(value) + 8 for _, value in leaves(state))


def _size_of_leaf(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        # Sparse tensors have no nbytes.
        return int(value.numel() * value.element_size())
    if isinstance(value, str | bytes):
        return len(value)
    return int(getattr(value, "nbytes", 8))


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


class Loaded(NamedTuple):
    """The outcome of a load, as far as it decides what a run state may restore.

    ``left``: the parts that are left as the load made them, by the words of ``LoadPolicy``.
    ``models``: those that were restored in full, as number in the checkpoint -> number in this run;
    None for all, each under its own number.
    """

    left: frozenset[str] = frozenset()
    models: Mapping[int, int] | None = None


BY_STOCK = Loaded()
"""The outcome of a load by accelerate: everything was restored under its own number."""


def go_on(accelerator: Any, folder: Path, loaded: Loaded = BY_STOCK) -> list[str]:
    """Restore the run state of this rank after a load; return why the run does not continue bit for
    bit.

    Whatever is wrong with the file, the load itself stays as it is: nothing is raised.
    """
    watch(accelerator)
    rank = accelerator.process_index
    try:
        state = read(folder, rank)
    except FileNotFoundError:
        return _go_on_without(accelerator, folder, loaded)
    except (OSError, ValueError) as error:
        return [f"{error}; data order and random numbers within an epoch are not restored"]
    return _restore(accelerator, folder, state, loaded)


_OF_STOCK = (
    "data order and random numbers within an epoch are not restored: the checkpoint was "
    "saved without ckptfix, so it has no run state"
)


def _go_on_without(accelerator: Any, folder: Path, loaded: Loaded) -> list[str]:
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
    return _restore(accelerator, folder, main, loaded)


def _restore(accelerator: Any, folder: Path, state: State, loaded: Loaded) -> list[str]:
    try:
        return _restore_run(accelerator, folder, state, loaded)
    # Of the script's own code, or of a file that does not hold what it should.
    except Exception as error:
        return [f"{run_state_name(accelerator.process_index)}: {type(error).__name__}: {error}"]


Check = tuple[str, Any, Callable[[], Any]]
"""The name of a state, what the file says it is, and what returns what it is now."""


def _restore_run(accelerator: Any, folder: Path, state: State, loaded: Loaded) -> list[str]:
    """Restore everything, the random generators last; return what is not as it was."""
    left, models = loaded
    name, random = run_state_name(state["rank"]), GeneratorStates.from_plain(state["random"])
    main = state
    if state["rank"] != 0:
        # It may be on the disk of another node.
        with suppress(OSError, ValueError):
            main = read(folder, 0)
    if changed := _saved_over(folder, state) or _saved_over(folder, main):
        return [
            f"{changed} has changed since {name} was written, for example by a save without "
            f"ckptfix or a copy; {name} was ignored, so data order and random numbers within an "
            "epoch are not restored"
        ]
    problems: list[str] = []
    checks: list[Check] = []
    is_same_world = state["world"] == accelerator.num_processes
    is_same_accumulation = state["accumulation"] == accelerator.gradient_accumulation_steps
    gradients = state["gradients"] or {}
    has_gradients = False
    if not is_same_world:
        problems.append(
            f"saved with {count_of(state['world'], 'process')}, now {accelerator.num_processes}"
        )
    elif main["progress"] != state["progress"]:
        # This rank saved alone, and was stopped before it could in the save of rank 0.
        return [f"{name} and {run_state_name(0)} are from different saves"]
    else:
        if state["is_cut"]:
            problems.append(
                "the checkpoint was saved during gradient accumulation, and the gradients, "
                "which are sharded across ranks, were not saved"
            )
        if "step" not in left:
            said, has_gradients = _restore_gradients(accelerator, gradients, models)
            problems += said
        scalers = [] if accelerator.scaler is None else [accelerator.scaler]
        for part, what, things, saved in (
            ("schedulers", "scheduler", accelerator._schedulers, state["schedulers"]),
            ("scaler", "gradient scaler", scalers, [state["scaler"]]),
            ("custom", "custom object", accelerator._custom_objects, state["custom"]),
        ):
            if part not in left:
                said, made = _restore_each(what, things, saved)
                problems, checks = problems + said, checks + made
    if not is_same_accumulation:
        problems.append(
            f"saved with gradient_accumulation_steps={state['accumulation']}, "
            f"now {accelerator.gradient_accumulation_steps}"
        )
    if "step" not in left:
        # With other accumulation a complete one begins. The symptom: saved after 5 steps of 2
        # batches, the first step of a run with 4 batches had 2, scaled by 1/4.
        # The same where the gradients of the one that the save cut were left out.
        goes_on = is_same_world and (has_gradients or (is_same_accumulation and not gradients))
        step = accelerator.step = state["step"] if goes_on else 0
        checks.append(("accelerator.step", step, lambda: accelerator.step))
    if "optimizers" not in left and accelerator.distributed_type not in SHARDED:
        problems += _order_moments(accelerator, main["parameters"])
    if "schedulers" not in left:
        saved, there = state["unprepared"], _unprepared_schedulers(accelerator)
        wanted = [(one["optimizer"], one["type"]) for one in saved]
        if wanted and wanted != [(number, type(one).__name__) for number, one in there]:
            problems.append(
                f"scheduler {saved[0]['type']} was not prepared, so the checkpoint does not "
                "contain it; pass it to prepare()"
            )
        elif wanted and is_same_world:
            said, made = _restore_each("unprepared scheduler", [one for _, one in there], saved)
            problems, checks = problems + said, checks + made
    if "dataloaders" not in left:
        positions = _positions(state, random)
        if is_same_world:
            problems += loader_positions.go_on_from(accelerator, positions)
        else:
            positions = loader_positions.for_other_world(accelerator, positions, state["world"])
            loader_positions.go_on_from(accelerator, positions)
    left_as_loaded = capture()
    problems += _first_problem(checks)
    # Last, as states of custom objects may draw from the generators when they are read back.
    if "rng" in left:
        restore(left_as_loaded)
    elif is_same_world:
        restore(random)
        problems += _first_problem([("random generators", random, capture)])
    else:
        _seed_anew(random, accelerator.process_index, state)
    return problems


def _restore_each(
    what: str, things: Sequence[Any], saved: Sequence[State | None]
) -> tuple[list[str], list[Check]]:
    """Restore objects that have a ``state_dict``; return what is not as it was, and what to compare
    in the end.
    """
    problems: list[str] = []
    checks: list[Check] = []
    for number, (thing, described) in enumerate(zip(things, saved, strict=False)):
        name = f"{what} {number}" if len(things) > 1 else what
        if described is None:
            continue
        if "state" in described:
            wanted = from_plain(described["state"])
            if first_difference(wanted, _comparable(thing)) is not None:
                thing.load_state_dict(wanted)
            checks.append((name, wanted, partial(_comparable, thing)))
            continue
        state = thing.state_dict()
        if described["fingerprint"] not in (fingerprint(state), fingerprint(_sampled(state))):
            problems.append(
                f"{name}: the state of this rank was different, but the run state could not store "
                "it (too large, or not plain values)"
            )
    return problems, checks


def _restore_gradients(
    accelerator: Any, gradients: Mapping[str, torch.Tensor], models: Mapping[int, int] | None
) -> tuple[list[str], bool]:
    """Restore the gradients of an accumulation that the save cut, of each model all or none.

    Return why some were left out, and whether any were restored.
    """
    parameters = dict(_named_parameters(accelerator))
    restored: dict[str, torch.Tensor] = {}
    left_out: dict[str, str] = {}
    for number, names in itertools.groupby(gradients, lambda name: name.partition(".")[0]):
        here = int(number) if models is None else models.get(int(number))
        own = {f"{here}.{name.partition('.')[2]}": gradients[name] for name in names}
        # Added to other weights, they would be a part of the next step that nobody computed.
        problem = "the model was not restored in full" if here is None else _misfit(own, parameters)
        if problem:
            left_out[number] = problem
        else:
            restored |= {name: own[name].to(parameters[name].device, copy=True) for name in own}
    for name, gradient in restored.items():
        parameters[name].grad = gradient
    if restored:
        accelerator.gradient_state._set_sync_gradients(False)
    effect = "its next step uses fewer batches" if restored else "a new accumulation starts"
    return [
        f"model {number}: the accumulated gradients were not restored, so {effect}: {problem}"
        for number, problem in left_out.items()
    ], bool(restored)


def _misfit(
    gradients: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.nn.Parameter]
) -> str:
    """Return why a model cannot have these gradients, "" where it can."""
    if unknown := [name.partition(".")[2] for name in gradients if name not in parameters]:
        return f"this run has no such parameter: {list_names(unknown)}"
    for name, gradient in gradients.items():
        parameter = parameters[name]
        # torch 2.10 lets a parameter have gradients of another dtype; None is any.
        dtype = getattr(parameter, "grad_dtype", parameter.dtype)
        if gradient.shape != parameter.shape:
            saved, now = f"shape {list(gradient.shape)}", str(list(parameter.shape))
        elif dtype not in (None, gradient.dtype):
            saved, now = f"dtype {gradient.dtype}", str(dtype)
        elif parameter.is_meta:
            saved, now = "values", "none, as it is on the meta device"
        else:
            continue
        key = name.partition(".")[2]
        return f"the gradient of {key!r} has {saved} in the checkpoint, expected {now}"
    return ""


def _order_moments(accelerator: Any, saved: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    """Give each parameter the moments of its name: optimizer.bin has them in the order of the
    saving rank 0. ``saved``: the names in that order, by optimizer and group. Return the optimizers
    where nothing mends what the load mixed: options and rates go with the param groups.
    """
    problems: list[str] = []
    own = own_names(list(enumerate(accelerator._models)))
    optimizers = [
        one
        for one in map(innermost, accelerator._optimizers)
        if isinstance(one, torch.optim.Optimizer)
    ]
    if len(saved) != len(optimizers):
        return problems
    for number, (optimizer, groups) in enumerate(zip(optimizers, saved, strict=True)):
        if "" in chain(*groups):
            continue  # of no model: the position alone says whose moments they are
        names = {
            (group, place): (int(model), name)
            for group, fqns in enumerate(groups)
            for place, (model, _, name) in enumerate(fqn.partition(".") for fqn in fqns)
        }
        # The load gave moments to parameters by their numbers: each now stands for those it got.
        ordered, problem = in_own_order(
            {"param_groups": optimizer.param_groups}, names, optimizer, own
        )
        if problem:
            problems.append(
                f"optimizer {number}: its parameters have changed their param groups or names "
                "since the save, so moments and options went to other parameters"
            )
        loaded = dict(optimizer.state)
        for group, sources in zip(optimizer.param_groups, ordered["param_groups"], strict=True):
            for parameter, source in zip(group["params"], sources["params"], strict=True):
                optimizer.state.pop(parameter, None)
                if source in loaded:
                    optimizer.state[parameter] = loaded[source]
            if "param_names" in group:
                group["param_names"] = sources["param_names"]
    return problems


def _positions(state: State, random: GeneratorStates) -> list[Position | str]:
    """Return the positions of loaders, which share the moment of the save.

    Those that were saved again before a pass went on share the moment of the first save.
    """
    moment = SaveMoment(random)
    earlier: SaveMoment | None = None
    saved: list[Position | str] = []
    for value in state["loaders"]:
        if isinstance(value, str):
            saved.append(value)
        else:
            position = Position.from_plain(value)
            if position.save is None:
                position.save = moment
            else:
                earlier = position.save = earlier or position.save
            saved.append(position)
    return saved


def _first_problem(checks: Sequence[Check]) -> list[str]:
    """Read back: name the first state that is not what the file says."""
    for name, wanted, current in checks:
        difference = first_difference(wanted, current())
        if difference is not None:
            at = f" ({difference})" if difference else ""
            return [f"{name}: after loading, it differs from the checkpoint{at}"]
    return []


def _comparable(thing: Any) -> Any:
    state = thing.state_dict()
    try:
        return from_plain(plain(state))
    except TypeError:
        return state


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


def go_on_and_report(accelerator: Any, folder: Path, loaded: Loaded = BY_STOCK) -> tuple[str, ...]:
    """Restore the run state of this rank; say in one line why a run does not continue bit for bit,
    and return it.
    """
    problems = go_on(accelerator, folder, loaded)
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
