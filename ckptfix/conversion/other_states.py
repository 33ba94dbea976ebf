"""The states of a run next to its models and optimizers: schedulers, scale of the loss, random
states, data positions.

Accelerate and the Trainer keep each in a file of its own. DeepSpeed's engine has a scheduler and
the scale of the loss in its own files, and looks for them there. What belongs to a process goes on
only where the same process does.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from msgspec.structs import replace

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.roles import Role
from ckptfix.conversion.migration_plan import PlannedExtra, source_of
from ckptfix.conversion.target_names import LeftOut, OtherFiles, StateNames
from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.pickle_tree import child
from ckptfix.formats.torch_file import read_torch_file
from ckptfix.storage.files import AnyPath
from ckptfix.storage.reading import OpenFiles, Piece, open_reader
from ckptfix.tensors.new_torch_files import Call, torch_file, with_new_tensors
from ckptfix.tensors.new_zero import DYNAMIC_SCALE, LOSS_SCALER, dynamic_scaler
from ckptfix.tensors.optimizer_files import PickledValues, Unread
from ckptfix.tensors.optimizers import BY_TORCH, STEP, OptimizerState, Strategy, number_in
from ckptfix.tensors.single_files import record_checksums
from ckptfix.tensors.stored import StoredTensor
from ckptfix.tensors.zero_states import DTYPE, MODEL_STATES, OF_ENGINE
from ckptfix.wording import count_of, list_names

_LR_SCHEDULER, _SCALER = "lr_scheduler", "scaler.pt"
_NEVER = 2**31 - 1
"""Steps after which a scale grows that does not: the most that fit into GradScaler's counter."""
_ONCE_PER_PROCESS = (
    "unless the script has split_batches=True or step_scheduler_with_optimizer=False"
)
_NEW_CYCLE = (
    "it counts batches within gradient accumulation; the new run starts with a complete cycle, "
    "whatever its gradient_accumulation_steps"
)
_STEP_STAYS = (
    "random_states_*.pkl: copied unchanged, with accelerator.step = {step}, which counts batches "
    "within gradient accumulation; unless it is a multiple of gradient_accumulation_steps, the "
    "first step uses fewer batches; next, unless the guard of ckptfix resumes the run: set "
    "accelerator.step = 0 after load_state"
)
_BY_HAND = (
    "use Accelerator(step_scheduler_with_optimizer=False), and when accelerator.sync_gradients is "
    "true, call scheduler.step()"
)


class OtherStates(NamedTuple):
    """The files of these states. ``extras``: those that are made; ``warnings``: what goes on
    otherwise, in words.
    """

    carried: tuple[PurePosixPath, ...] = ()
    empty: tuple[PurePosixPath, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    extras: tuple[PlannedExtra, ...] = ()
    warnings: tuple[str, ...] = ()


def other_states(
    root: AnyPath,
    found: OtherFiles,
    optimizers: Sequence[OptimizerState],
    *,
    replaced: set[PurePosixPath],
    names: StateNames,
    before: int | None,
    processes: int,
) -> OtherStates:
    """Sort the files that are neither weights nor optimizers, and plan those of new ranks.

    ``optimizers``: as they were saved. ``replaced``: files of optimizers that change. ``before``:
    number of the processes that saved, None if unknown.
    """
    wanted = names.random_states(processes)
    carried: list[PurePosixPath] = []
    left = [one for one in found.left_out if PurePosixPath(one.what) not in replaced]
    random_states: list[str] = []
    is_guarded = False
    schedulers: dict[str, int] = {}
    for path in found.carried:
        if path in replaced:
            continue
        parsed = parse_file_name(str(path))
        role = parsed.role if parsed is not None else None
        rank = parsed.rank or 0 if parsed is not None else 0
        is_guarded |= role is Role.RUN_STATE
        why = ""
        if role is Role.RNG_STATE:
            random_states.append(str(path))
        elif role is Role.SCHEDULER:
            schedulers[str(path)] = parsed.index if parsed is not None else 0
        if (role is Role.RNG_STATE and str(path) not in wanted) or (
            role is Role.RUN_STATE and rank >= processes
        ):
            why = f"a run with {count_of(processes, 'process')} does not look for it"
        elif role is Role.DATALOADER and before != processes:
            saved = (
                count_of(before, "process")
                if before is not None
                else "an unknown number of processes"
            )
            why = f"its batch counts belong to a run with {saved}; the epoch starts over"
        if why:
            left.append(LeftOut(str(path), why))
        else:
            carried.append(path)
    extras: list[PlannedExtra] = []
    warnings: list[str] = []
    step = None if names.is_trainer or not random_states else _count(root / random_states[0], STEP)
    if step and before != processes:
        own = [PurePosixPath(name) for name in random_states if name in wanted]
        anew = [] if is_guarded else [_of_new_cycle(root, path) for path in own]
        if None in anew or is_guarded:
            warnings.append(_STEP_STAYS.format(step=step))
        else:
            extras += [one for one in anew if one is not None]
            carried = [path for path in carried if path not in own]
            left.append(LeftOut(f"accelerator.step = {step} in the random states", _NEW_CYCLE))
            step = 0
    lacking = [name for name in wanted if name not in random_states] if random_states else []
    if lacking:
        if step is not None:
            files = tuple(torch_file(PurePosixPath(name), {STEP: step}) for name in lacking)
            extras.append(PlannedExtra(files=files, old_files=(PurePosixPath(random_states[0]),)))
        only = f" (only accelerator.step = {step} is written)" if step is not None else ""
        left.append(
            LeftOut(
                f"random states in {list_names(lacking)}",
                f"no rank saved them{only}; with a copy of another rank's states, both ranks would "
                "use the same dropout",
            )
        )
    if before is not None and not names.is_trainer:
        for name, index in schedulers.items():
            state = next((one for one in optimizers if one.index == index), None)
            warnings += _other_paces(root / name, state, names.strategy, before, processes)
    return OtherStates(tuple(carried), found.empty, tuple(left), tuple(extras), tuple(warnings))


def _of_new_cycle(root: AnyPath, path: PurePosixPath) -> PlannedExtra | None:
    """Plan the random states of a rank with ``accelerator.step`` 0; None where they cannot be
    written anew.
    """
    values, checksums = _plain_values(root / path)
    if not isinstance(values, dict):
        return None
    sources: dict[str, StoredTensor] = {}
    content = with_new_tensors({**values, STEP: 0}, str(path), sources)
    return PlannedExtra(
        files=(torch_file(path, content),),
        old_files=(path,),
        data={
            key: source_of(tensor._replace(fqn=key), None, str(path))
            for key, tensor in sources.items()
        },
        checksums=checksums,
    )


def _other_paces(
    path: AnyPath, state: OptimizerState | None, strategy: Strategy, before: int, processes: int
) -> Iterator[str]:
    """Yield in words where a scheduler of Accelerate advances faster or slower from now on.

    Accelerate advances it once per process at each step, unless the script says otherwise: where it
    is now, and how many steps the optimizer took, shows which. ``state``: the optimizer of its
    position, as it was saved.
    """
    position, steps = _count(path, "last_epoch"), _steps_of(state)
    if position is not None and steps and position == steps and before > 1:
        return  # the script has it advanced by 1 at each step
    shown = (
        f"at {'an unknown scheduler step' if position is None else f'scheduler step {position}'}"
    )
    if steps:
        shown += f" after {count_of(steps, 'optimizer step')}"
    is_known = position is not None and steps and position == steps * before and before > 1
    unless = "" if is_known else f", {_ONCE_PER_PROCESS}"
    if position and steps and not is_known and position % steps == 0:
        unless += (
            f" (the saved steps suggest that the script advances it by {position // steps} each "
            "time)"
        )
    if before != processes:
        yield (
            f"{path.name}: copied unchanged, {shown}; Accelerate advances it once per process at "
            f"each step (by {before} so far, by {processes} from now on){unless}; next, if the "
            f"total batch size of a step does not change: {_BY_HAND}"
            f"{f' {before} times' if before > 1 else ''}"
        )
    if strategy not in BY_TORCH and before > 1 and not (state and _has_scheduler(state)):
        yield (
            f"{path.name}: {shown}; Accelerate advanced it by {before} at each "
            f"step{unless}; a scheduler owned by DeepSpeed's engine (from ds_config, or a "
            "DummyScheduler) would continue from there, but advance by only 1 at each step; next: "
            "prepare() a torch scheduler in the script; it continues as before"
        )


def _steps_of(state: OptimizerState | None) -> int | None:
    """Return how many steps an optimizer took, None where it does not count them."""
    counts = [values[STEP] for values in state.states.values() if STEP in values] if state else []
    with OpenFiles() as files:
        found = {number_in(one, files) if isinstance(one, StoredTensor) else one for one in counts}
    return max((int(one) for one in found if isinstance(one, int | float)), default=None)


def _has_scheduler(state: OptimizerState) -> bool:
    """Return whether DeepSpeed's files have a scheduler of the engine."""
    return state.extra.get(MODEL_STATES, {}).get(_LR_SCHEDULER) is not None


def last_rates(root: AnyPath, state: OptimizerState, scheduler: str) -> Sequence[float]:
    """Return the learning rate that a scheduler last gave to each param group, nothing where no
    file has them. ``scheduler``: the name of its file.
    """
    held = _plain_values(root / scheduler)[0]
    if held is None:
        held = state.extra.get(MODEL_STATES, {}).get(_LR_SCHEDULER)
    rates = held.get("_last_lr") if isinstance(held, dict) else None
    if isinstance(rates, list) and all(type(rate) is float for rate in rates):
        return rates
    return ()


def _count(path: AnyPath, key: str) -> int | None:
    """Return a whole number from a file of torch, None where it has none."""
    try:
        with open_reader(path) as reader:
            count = child(read_torch_file(reader).tree.root, key)
    except (FormatError, OSError):
        return None
    return count if type(count) is int else None


def out_of_engines(
    root: AnyPath, optimizers: Sequence[OptimizerState], names: StateNames, processes: int
) -> OtherStates:
    """Plan the files of what only DeepSpeed's files have, which others look for in files of their
    own.
    """
    extras: list[PlannedExtra] = []
    warnings: list[str] = []
    for state in optimizers:
        inside = state.extra.get(MODEL_STATES, {})
        if of_script := sorted(key for key in inside if key not in OF_ENGINE):
            warnings.append(
                f"{state.label}: the client_state that the script passed to save_checkpoint "
                f"({list_names(of_script)}) is left out: only DeepSpeed's files can store it; "
                "next, if the script needs it: torch.load it from the old checkpoint"
            )
        held = inside.get(_LR_SCHEDULER)
        name = names.scheduler(state.index)
        if held is None or (root / name).exists():
            continue
        if (
            isinstance(held, dict)
            and "last_epoch" in held
            and not _has(held, (Unread, StoredTensor))
        ):
            files = (torch_file(PurePosixPath(name), held),)
            extras.append(PlannedExtra(files=files, old_files=state.files[:1]))
            if processes > 1 and not names.is_trainer:
                warnings.append(
                    f"{name}: DeepSpeed's engine advanced this scheduler by 1 at each step, but "
                    f"Accelerate will advance it by {processes} (once per process), "
                    f"{_ONCE_PER_PROCESS}; next, if the total batch size of a step does not "
                    f"change: {_BY_HAND}"
                )
            continue
        shown = f" ({held})" if isinstance(held, dict) and len(held) < 4 else ""
        warnings.append(
            f"{state.label}: the state of DeepSpeed's own scheduler{shown} is left out: no torch "
            "scheduler can load it; next: start the script's scheduler at this step"
        )
    scaler = _scaler_of(optimizers)
    if scaler and not (root / _SCALER).exists():
        files = (torch_file(PurePosixPath(_SCALER), scaler),)
        extras.append(PlannedExtra(files=files, old_files=optimizers[0].files[:1]))
        if scaler["growth_interval"] == _NEVER:
            warnings.append(
                f"{optimizers[0].label}: its loss scale, {scaler['scale']:g}, is static, but "
                f"torch's GradScaler is always dynamic: with {_SCALER} it starts at this scale, "
                "never grows it, and halves it after an overflow"
            )
    return OtherStates(extras=tuple(extras), warnings=tuple(warnings))


def _scaler_of(optimizers: Sequence[OptimizerState]) -> Mapping[str, Any]:
    """Return what ``scaler.pt`` has, without which ``load_state`` of a run in fp16 fails; nothing
    without a scale.
    """
    held = next((one.extra.get(LOSS_SCALER) for one in optimizers), None)
    state = held.state if isinstance(held, Call) else None
    is_fp16 = optimizers and optimizers[0].extra.get(MODEL_STATES, {}).get(DTYPE) == "F16"
    if not isinstance(state, dict) or not (is_fp16 or state.get("dynamic")):
        return {}
    try:
        if not state.get("dynamic"):
            return _grad_scaler(float(state["cur_scale"]), done=0, factor=2.0, window=_NEVER)
        window = int(state["scale_window"])
        done = int(state["cur_iter"]) - int(state["last_overflow_iter"]) - 1
        # GradScaler counts a step before it looks, and DeepSpeed after: one that it has not counted
        # yet is -1.
        return _grad_scaler(
            float(state["cur_scale"]),
            done=(done - 1) % window if done else -1,
            factor=float(state["scale_factor"]),
            window=window,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return {}


def _grad_scaler(scale: float, *, done: int, factor: float, window: int) -> dict[str, Any]:
    """Return the state of a ``GradScaler``, which grows by ``factor`` once ``done`` steps are
    ``window``.
    """
    return {
        "scale": scale,
        "growth_factor": factor,
        "backoff_factor": 1 / factor,
        "growth_interval": window,
        "_growth_tracker": done,
    }


def into_engine(
    root: AnyPath, state: OptimizerState, scheduler: str, dtype: str | None
) -> tuple[OptimizerState, tuple[str, ...]]:
    """Return an optimizer with what DeepSpeed's engine looks for in its own files, and in words
    what it does not find.

    ``scheduler``: the name of its file. ``dtype``: of the new training, None for that of the
    source's.
    """
    inside = state.extra.get(MODEL_STATES, {})
    scaler: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()
    if not _has_scheduler(state):
        inside = {**inside, _LR_SCHEDULER: _plain_values(root / scheduler)[0]}
    saved = _plain_values(root / _SCALER)[0] if LOSS_SCALER not in state.extra else None
    if not isinstance(saved, dict) or "scale" not in saved:
        pass
    elif dtype == "F16":
        inside = {**inside, DTYPE: "F16"}
        scaler = {
            LOSS_SCALER: dynamic_scaler(
                saved["scale"],
                done=saved.get("_growth_tracker", 0) + 1,
                factor=saved.get("growth_factor", 2.0),
                window=saved.get("growth_interval", 2000),
                hysteresis=1,
            ),
            DYNAMIC_SCALE: True,
        }
    elif dtype is None:
        warnings = (
            (
                f"{_SCALER}: the run trained in fp16, but the new DeepSpeed files are not for "
                "fp16: an fp16 run would load the loss scale 1 from them and keep it; next: "
                "--dtype fp16, or --dtype bf16 if the new run uses bf16"
            ),
        )
    return replace(state, extra={**state.extra, **scaler, MODEL_STATES: inside}), warnings


def _plain_values(path: AnyPath) -> tuple[Any, Mapping[Piece, int]]:
    """Return the plain values in a file of torch, None where there are others, or no such file; and
    its checksums.
    """
    try:
        with open_reader(path) as reader:
            file = read_torch_file(reader)
        value = PickledValues(path, file).value(file.tree.root)
        return (None if _has(value, (Unread,)) else value), dict(record_checksums(path, file))
    except (FormatError, OperationError, OSError):
        return None, {}


def _has(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a value of one of these types is in a value."""
    if isinstance(value, kinds):
        return True
    if isinstance(value, Call):
        value = (value.args, value.items, value.state)
    inner = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if type(value) in (list, tuple)
        else ()
    )
    return any(_has(one, kinds) for one in inner)
