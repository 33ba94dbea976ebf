"""Plan of a migration of the complete training state to another strategy and number of processes.

The loaders that the new checkpoint is for, and the names they look for: stock accelerate 1.15 (``checkpointing.py``,
``utils/fsdp_utils.py``) and transformers' Trainer 5 (``trainer.py``). What they share is by fqn: models, moments and
hyperparameters. What belongs to a process (random states, data positions) goes on only where the same processes do.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ckptfix.checkpoint.filenames import (
    TRAINER_STATE,
    Role,
    dcp_model_folder,
    model_file,
    parse_file_name,
    random_states_name,
)
from ckptfix.checkpoint.manifest import usable_manifest
from ckptfix.checkpoint.trainer_folders import trainer_step
from ckptfix.conversion.migration_plan import (
    MigrationPlan,
    Options,
    Planned,
    PlannedExtra,
    PlannedModel,
    PlannedState,
    planned_model,
    source_of,
)
from ckptfix.conversion.streaming import Source
from ckptfix.conversion.target_names import LeftOut, OtherFiles, is_lone, other_files, read_config
from ckptfix.errors import FormatError, OperationError, UnsupportedFormat, UsageError
from ckptfix.formats.pickle_tree import child
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_file import read_torch_file
from ckptfix.storage.paths import command
from ckptfix.storage.reading import OpenFiles, open_reader
from ckptfix.tensors.deepspeed import deepspeed_weights
from ckptfix.tensors.hashing import TensorJob, hash_all
from ckptfix.tensors.joined import Converted
from ckptfix.tensors.new_files import NewStates
from ckptfix.tensors.new_optimizers import dcp_optimizer, ddp_optimizer, fsdp_full_optimizer
from ckptfix.tensors.new_torch_files import Call, Global, torch_file
from ckptfix.tensors.new_zero import module_dtype, zero_files
from ckptfix.tensors.optimizer_files import PickledValues, Unread
from ckptfix.tensors.optimizer_opening import open_optimizers
from ckptfix.tensors.optimizers import BY_TORCH, STEP, OptimizerState, StateValue, Strategy
from ckptfix.tensors.parameter_names import first_out_of_order, ordered_as
from ckptfix.tensors.parameter_sources import (
    ModelsOfRun,
    frozen_pattern,
    name_optimizers,
    recorded_names,
    run_of,
)
from ckptfix.tensors.stored import Format, StoredCheckpoint, StoredTensor, Weights
from ckptfix.tensors.zero_states import DTYPE, MODEL_STATES
from ckptfix.wording import count_of, list_names

_LR_SCHEDULER, _LOSS_SCALER, _SCALER = "lr_scheduler", "loss_scaler", "scaler.pt"
_ONE_FILE = (Strategy.DDP, Strategy.FSDP_FULL)
_BY_POSITION = (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3)


def plan_states(source: StoredCheckpoint, path: Path, output: Path, options: Options) -> MigrationPlan:
    """Plan the migration of a complete state; reads only headers and small values.

    Raises OperationError for what the new strategy cannot hold, by name, UsageError for a path that is not a folder of
    ``save_state`` or the Trainer.
    """
    strategy = options.strategy
    assert strategy is not None
    if is_lone(source) or output.suffix in (".safetensors", ".bin"):
        raise UsageError(
            f"{path}: --state all takes the folder of a save_state or of a checkpoint of the Trainer, and writes one"
        )
    source = replace(source, weights=tuple(one for one in source.weights if not one.home.parts))
    optimizers = open_optimizers(source.root)
    if not optimizers:
        raise OperationError(
            f"{path}: no optimizer in it (expected optimizer.bin, optimizer_0/ or the states of DeepSpeed); next: "
            f"{command('migrate', path, '', '--to', options.to.value)} {output} writes its models alone"
        )
    source = _with_masters(source, optimizers)
    names = _Names(strategy, is_trainer=(source.root / TRAINER_STATE).exists())
    before = _processes_of(source.root, optimizers)
    processes = options.processes or before
    if processes is None:
        raise UsageError(f"{path}: nothing in it shows how many processes saved it; give --processes N")
    planning = _Planning(source, options, strategy, names, processes)
    models, states = planning.of(optimizers)
    parts: tuple[Planned, ...] = (*models, *states, *planning.extras)
    new = frozenset(file.path for one in parts for file in one.files)
    replaced = {file for one in states for file in one.old_files}
    others = _others(source.root, other_files(source, new), replaced, names, before, processes)
    return MigrationPlan(
        source=source,
        path=path,
        output=output,
        options=options,
        is_file=False,
        models=models,
        states=states,
        extras=(*planning.extras, *others.extras),
        processes=processes,
        carried=others.carried,
        empty=others.empty,
        left_out=others.left_out,
        not_checked=tuple(planning.assumed(optimizers)),
        warnings=(*planning.warnings, *_scheduler_words(others.carried, names, before, processes)),
    )


def _with_masters(source: StoredCheckpoint, optimizers: Sequence[OptimizerState]) -> StoredCheckpoint:
    """Return a checkpoint with the weights that DeepSpeed trains: the Trainer saves rounded ones next to its folder."""
    weights = {one.index: one for one in source.weights}
    rivals = list(source.rivals)
    for state in optimizers:
        model = weights.get(state.index)
        if state.strategy not in BY_TORCH and model is not None and model.format is not Format.DEEPSPEED:
            rivals += model.files
            where = PurePosixPath(state.files[0].parts[0])
            weights[state.index] = deepspeed_weights(source.root, where, state.index)
    mine = frozenset(file for one in weights.values() for file in one.files)
    return replace(
        source,
        weights=tuple(weights[index] for index in sorted(weights)),
        rivals=tuple(path for path in rivals if path not in mine),
    )


class _Names(NamedTuple):
    """The names of the files that the loader of a strategy looks for."""

    strategy: Strategy
    is_trainer: bool

    def model_stem(self, index: int) -> str:
        """Return the name of a model's file without its suffix, or of its folder."""
        if self.strategy is Strategy.FSDP:
            return str(dcp_model_folder(index))
        if self.strategy is Strategy.FSDP_FULL:
            return str(dcp_model_folder(0).at(index)) if index else dcp_model_folder(0).stem
        return str(model_file(".safetensors", index)).removesuffix(".safetensors")

    def optimizer(self, index: int) -> PurePosixPath:
        """Return the path of an optimizer's file or folder."""
        if self.strategy is Strategy.FSDP:
            return PurePosixPath(f"optimizer_{index}")
        if self.is_trainer and self.strategy is Strategy.DDP:
            return PurePosixPath("optimizer.pt")
        return PurePosixPath(f"optimizer_{index}.bin" if index else "optimizer.bin")

    def engine(self, index: int, root: Path) -> PurePosixPath:
        """Return the folder of a model and its optimizer of DeepSpeed."""
        if self.is_trainer:
            return PurePosixPath(f"global_step{trainer_step(root)}")
        return PurePosixPath(f"pytorch_model_{index}" if index else "pytorch_model")

    def scheduler(self, index: int) -> str:
        """Return the name of a scheduler's file."""
        if self.is_trainer:
            return "scheduler.pt"
        return f"scheduler_{index}.bin" if index else "scheduler.bin"

    def random_states(self, processes: int) -> list[str]:
        """Return the names of the files in which each rank looks for its random states."""
        if not self.is_trainer:
            return [random_states_name(rank) for rank in range(processes)]
        return ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]


class _Planning:
    """The models and optimizers of one plan. ``warnings``: what is said of them, in words. ``extras``: other files."""

    def __init__(
        self,
        source: StoredCheckpoint,
        options: Options,
        strategy: Strategy,
        names: _Names,
        processes: int,
    ) -> None:
        self._source, self._options, self._strategy, self._names = source, options, strategy, names
        self._processes = processes
        self._weights = source.weights
        self._built: ModelsOfRun | None = None
        self._run = run_of(source.root, source.weights, options.model)
        self.warnings: list[str] = []
        self.extras: list[PlannedExtra] = []

    def of(
        self, optimizers: Sequence[OptimizerState]
    ) -> tuple[tuple[PlannedModel, ...], tuple[PlannedState, ...]]:
        """Plan the models, and the optimizers whose files change."""
        changed = [one for one in optimizers if not self._is_kept(one)]
        named: Sequence[OptimizerState] = changed
        if self._strategy is not Strategy.DDP:
            named = name_optimizers(
                self._source.root,
                changed,
                weights=self._weights,
                frozen=self._options.frozen,
                run=self._noted_run,
            )
            _ensure_own_model(named)
        if self._options.model is not None:
            self._noted_run()
        if self._strategy in _BY_POSITION:
            named = [self._in_order(one) for one in named]
        if self._strategy is not Strategy.DDP:
            ties = self._built.ties if self._built is not None else ()
            self._weights = tuple(_with_lost_ties(one, ties) for one in self._weights)
        if self._strategy not in (Strategy.FSDP, Strategy.FSDP_FULL):
            self._weights = tuple(self._tied(one, named) for one in self._weights)
        if self._strategy not in BY_TORCH:
            return self._of_deepspeed(changed, named)
        states = tuple(map(self._state, changed, named))
        self._take_schedulers(changed)
        self._take_scaler(changed)
        config = read_config(self._source, PurePosixPath())
        suffix = ".bin" if self._strategy is Strategy.FSDP_FULL else ""
        models = tuple(
            planned_model(one, self._names.model_stem(one.index), self._options, config, None, suffix)
            for one in self._weights
        )
        return models, states

    def _noted_run(self) -> ModelsOfRun:
        self._built = self._run()
        return self._built

    def assumed(self, optimizers: Sequence[OptimizerState]) -> Iterator[str]:
        """Yield in words what the names of numbered parameters rest on, where a model alone gives them."""
        if self._strategy is Strategy.DDP or self._built is None or self._built.optimizers:
            return
        root = self._source.root
        counted = [one.label for one in optimizers if not one.is_named and recorded_names(root, one) is None]
        if counted:
            yield (
                f"that the script gave parameters to {list_names(counted)} in the model's order, by which they are "
                "named; next, to be sure: --model MODULE:FACTORY with a factory that returns (model, optimizer)"
            )

    def _in_order(self, state: OptimizerState) -> OptimizerState:
        """Return an optimizer of FSDP with its parameters where a loader that goes by position looks for them.

        FSDP1 without ``use_orig_params``, Accelerate's default, lists the parameters of each wrapped module together.
        """
        if state.strategy not in (Strategy.FSDP, Strategy.FSDP_FULL):
            return state
        names = [tensor.fqn for one in self._weights if one.index == state.index for tensor in one.tensors]
        if self._built is not None:
            groups = self._built.optimizers
            if state.index < len(groups):
                ties = {other: first for model, other, first in self._built.ties if model == state.index}
                return ordered_as(state, [[one.name for one in group] for group in groups[state.index]], ties)
            names = [one.name for one in self._built.parameters if one.model == state.index] or names
        if found := first_out_of_order(state, names):
            raise OperationError(
                f"{state.label}: {found[0]!r} comes before {found[1]!r} in it, and behind it in the model, as FSDP1 "
                f"without use_orig_params has them; the loader of {self._strategy.value} goes by position; help: "
                "--model MODULE:FACTORY with a factory that returns (model, optimizer) of the new run"
            )
        return state

    def _tied(self, weights: Weights, named: Sequence[OptimizerState]) -> Weights:
        """Return weights in which ties are one tensor again, and say where no model shows that they are ties."""
        trained = {
            name
            for one in named
            if one.model in (None, weights.index)
            for group in one.groups
            for name in group.names
        }
        if self._built is not None:
            return _with_ties(weights, _equal(weights, trained, self._built.ties))
        found = {
            name: kept for name, kept in _equal(weights, trained).items() if not _is_constant(weights, name)
        }
        if found:
            self.warnings.append(
                f"{weights.label}: {list_names(sorted(found))}: in no optimizer, and equal in every byte to "
                f"{list_names(sorted(set(found.values())))}: written once, as a tie; next, where the script does not "
                "tie them: --model MODULE:FACTORY"
            )
        return _with_ties(weights, found)

    def _is_kept(self, state: OptimizerState) -> bool:
        """Return whether the files of an optimizer are those that the new loader looks for."""
        home = self._names.optimizer(state.index)
        return state.strategy is self._strategy and all(
            file == home or (self._strategy is Strategy.FSDP and file.parent == home) for file in state.files
        )

    def _state(self, before: OptimizerState, state: OptimizerState) -> PlannedState:
        """Plan one optimizer. ``state``: ``before`` under fqns."""
        mine = [one for one in self._weights if one.index == state.index] or self._weights
        tensors = {name: tensor for one in mine for name, tensor in one.named().items()}
        if state.masters and self._options.dtype not in (None, "F32", "F64"):
            self.warnings.append(
                f"{state.label}: its fp32 masters are rounded to {self._options.dtype}, as --dtype asks; without it "
                "they are the weights"
            )
        state = replace(state, masters={})  # they are the weights
        if self._strategy is not Strategy.DDP or state.is_named:
            _ensure_fit(state, tensors)
        if self._strategy is not Strategy.DDP:
            lacking = [name for group in state.groups for name in group.names if not state.states.get(name)]
            state = state.started({name: tensor.shape for name, tensor in tensors.items()})
            if lacking and state.states:
                self.warnings.append(
                    f"{state.label}: {count_of(len(lacking), 'parameter')} without moments, {list_names(lacking)}: "
                    "they get zeros and step 0, with which torch starts them at their first gradient"
                )
        home = self._names.optimizer(state.index)
        try:
            new = _WRITERS[self._strategy](home, state)
        except UnsupportedFormat as error:
            raise OperationError(f"{state.label}: {error}") from error
        return PlannedState(
            label=state.label,
            before=before,
            state=state,
            files=new.files,
            data=_data(new, state),
        )

    def _of_deepspeed(
        self, changed: Sequence[OptimizerState], named: Sequence[OptimizerState]
    ) -> tuple[tuple[PlannedModel, ...], tuple[PlannedState, ...]]:
        """Plan the files of DeepSpeed, which keeps a model and its optimizer together."""
        positions = [one.index for one in self._weights]
        if positions != [one.index for one in named]:
            raise OperationError(
                f"{self._source.root}: {count_of(len(self._weights), 'model')} and "
                f"{count_of(len(named), 'optimizer')}: DeepSpeed has an optimizer for each model; next: migrate to "
                "ddp, fsdp or fsdp-full"
            )
        models, states = [], []
        for weights, before, state in zip(self._weights, changed, named, strict=True):
            planned = self._engine(weights, before, state, is_last=weights is self._weights[-1])
            models.append(planned[0])
            states.append(planned[1])
        return tuple(models), tuple(states)

    def _engine(
        self, weights: Weights, before: OptimizerState, state: OptimizerState, *, is_last: bool
    ) -> tuple[PlannedModel, PlannedState]:
        """Plan a model with its optimizer. ``is_last``: DeepSpeed's file ``latest`` leads to it."""
        tensors = weights.named()
        _ensure_fit(state, tensors)
        known = (
            ()
            if self._built is None
            else [one for one in self._built.parameters if one.model == weights.index]
        )
        listed = {name for group in state.groups for name in group.names}
        frozen = {one.name for one in known if one.trainable is False} & listed | self._told_frozen(
            state, tensors
        )
        buffers = (
            tensors.keys() - {one.name for one in known} - weights.ties.keys() - listed if known else None
        )
        folder = self._names.engine(weights.index, self._source.root)
        inside = state.extra.get(MODEL_STATES, {})
        if inside.get(_LR_SCHEDULER) is None:  # an engine that has a scheduler looks for it in its own files
            inside = {**inside, _LR_SCHEDULER: self._small(self._names.scheduler(weights.index))}
        scaler = {} if _LOSS_SCALER in state.extra else self._loss_scaler()
        if scaler:
            inside = {**inside, DTYPE: "F16"}
        state = replace(state, extra={**state.extra, **scaler, MODEL_STATES: inside})
        try:
            new = zero_files(
                self._strategy,
                folder,
                weights,
                state,
                processes=self._processes,
                dtype=self._options.dtype,
                frozen=frozen,
                buffers=buffers,
            )
        except UnsupportedFormat as error:
            raise OperationError(f"{state.label}: {error}") from error
        self.warnings += new.notes
        data = _data(new, state)
        files = tuple(file for file in new.files if is_last or file.path.is_relative_to(folder))
        state = _as_kept(state, tensors, frozen)
        label = weights.label
        trained = {
            name: source_of(tensor._replace(fqn=name), "F32", label) for name, tensor in state.masters.items()
        }
        others = {
            tensor.fqn: source_of(tensor, module_dtype(new, tensor.fqn), label)
            for tensor in weights.tensors
            if tensor.fqn not in trained
        }
        if frozen_ones := [name for name, source in others.items() if source.convert is not None]:
            self.warnings.append(
                f"{label}: {list_names(frozen_ones)}: converted to {others[frozen_ones[0]].new.dtype}, the dtype of "
                "training, of which DeepSpeed keeps no other copy where a parameter is not trained"
            )
        rounded = {tensors[name].dtype for name in state.masters.keys() - before.masters.keys()} - {
            "F32",
            "F64",
        }
        if rounded and not before.masters:
            self.warnings.append(
                f"{label}: masters in fp32 are made of weights in {', '.join(sorted(rounded))}, without the digits "
                "that these lack"
            )
        model = PlannedModel(
            label=weights.label,
            before=weights,
            weights=weights,
            files=files,
            sources=trained | others,
            parts=data,
        )
        return model, PlannedState(label=state.label, before=before, state=state, files=(), data={})

    def _told_frozen(self, state: OptimizerState, tensors: Mapping[str, StoredTensor]) -> set[str]:
        """Return the parameters of an optimizer that ``--frozen`` matches: DeepSpeed's own leaves them out."""
        pattern = frozen_pattern(self._options.frozen)
        found = {name for name in tensors if pattern is not None and pattern.search(name)}
        every = {name for one in self._weights for name in one.named()}
        if pattern is not None and not any(map(pattern.search, every)):
            raise UsageError(f"--frozen {pattern.pattern!r}: no parameter of the model has such a name")
        if trained := sorted(name for name in found if state.states.get(name)):
            raise UsageError(
                f"--frozen {self._options.frozen!r} matches {list_names(trained)} with moments in {state.label}, so "
                "it was trained"
            )
        return found & {name for group in state.groups for name in group.names}

    def _take_schedulers(self, optimizers: Sequence[OptimizerState]) -> None:
        """Plan files of the schedulers that only DeepSpeed's files have."""
        for state in optimizers:
            held = state.extra.get(MODEL_STATES, {}).get(_LR_SCHEDULER)
            name = self._names.scheduler(state.index)
            if held is None or (self._source.root / name).exists():
                continue
            if isinstance(held, dict) and "last_epoch" in held and not _has(held, (Unread, StoredTensor)):
                files = (torch_file(PurePosixPath(name), held),)
                self.extras.append(PlannedExtra(files=files, old_files=state.files[:1]))
                continue
            shown = f", {held}" if isinstance(held, dict) and len(held) < 4 else ""
            self.warnings.append(
                f"{state.label}: the state of DeepSpeed's own scheduler{shown} is left out: no scheduler of torch "
                "takes it; next: let the script's scheduler begin at this step"
            )

    def _take_scaler(self, optimizers: Sequence[OptimizerState]) -> None:
        """Plan ``scaler.pt``, without which ``load_state`` of a run in fp16 fails, from DeepSpeed's loss scaler."""
        held = next((one.extra.get(_LOSS_SCALER) for one in optimizers), None)
        state = held.state if isinstance(held, Call) else None
        if not isinstance(state, dict) or not state.get("dynamic") or (self._source.root / _SCALER).exists():
            return
        try:
            window = int(state["scale_window"])
            content = {
                "scale": float(state["cur_scale"]),
                "growth_factor": float(state["scale_factor"]),
                "backoff_factor": 1 / float(state["scale_factor"]),
                "growth_interval": window,
                "_growth_tracker": (int(state["cur_iter"]) - int(state["last_overflow_iter"]) - 1) % window,
            }
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return
        files = (torch_file(PurePosixPath(_SCALER), content),)
        self.extras.append(PlannedExtra(files=files, old_files=optimizers[0].files[:1]))

    def _loss_scaler(self) -> dict[str, Any]:
        """Return what DeepSpeed keeps about the scale of the loss in fp16, from ``scaler.pt``."""
        saved = self._small(_SCALER)
        if self._options.dtype != "F16" or not isinstance(saved, dict) or "scale" not in saved:
            return {}
        state = {
            "cur_scale": saved["scale"],
            "dynamic": True,
            "cur_iter": saved.get("_growth_tracker", 0),
            "last_overflow_iter": -1,
            "scale_factor": saved.get("growth_factor", 2.0),
            "scale_window": saved.get("growth_interval", 2000),
            "min_scale": 1,
            "delayed_shift": 1,
            "cur_hysteresis": 1,
            "consecutive_hysteresis": False,
            "raise_error_at_min_scale": True,
            "dtype": Global("torch", "float16"),
        }
        function = Global("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")
        return {_LOSS_SCALER: Call(function=function, state=state, new=True), "dynamic_loss_scale": True}

    def _small(self, name: str) -> Any:
        """Return the plain values in a file of torch, None where there are others, or no such file."""
        path = self._source.root / name
        try:
            with open_reader(path) as reader:
                file = read_torch_file(reader)
            value = PickledValues(path, file).value(file.tree.root)
        except (FormatError, OperationError, OSError):
            return None
        return None if _has(value, (Unread,)) else value


_WRITERS = {
    Strategy.DDP: ddp_optimizer,
    Strategy.FSDP: dcp_optimizer,
    Strategy.FSDP_FULL: fsdp_full_optimizer,
}


def _ensure_own_model(optimizers: Iterable[OptimizerState]) -> None:
    """Raise OperationError for an optimizer of another model than that of its position, by which FSDP finds it."""
    for one in optimizers:
        if one.model not in (None, one.index):
            raise OperationError(
                f"{one.label}: it has the parameters of model {one.model}, and the loader looks for those of model "
                f"{one.index} in it; next: prepare() models and optimizers in the same order, and save again"
            )


def _with_lost_ties(weights: Weights, ties: Sequence[tuple[int, str, str]]) -> Weights:
    """Return weights with the names of tied tensors that safetensors files leave out, which FSDP and ZeRO look for."""
    held = weights.named()
    kept = {tensor.fqn for tensor in weights.tensors}
    lost = {}
    for model, *pair in ties:
        there = [name for name in pair if name in held]
        if model == weights.index and len(there) == 1:
            lost[next(name for name in pair if name not in held)] = (
                there[0] if there[0] in kept else weights.ties[there[0]]
            )
    return replace(weights, ties={**weights.ties, **lost}) if lost else weights


def _equal(
    weights: Weights, trained: Collection[str], ties: Sequence[tuple[int, str, str]] | None = None
) -> dict[str, str]:
    """Return the names that may be ties of trained parameters -> those, with equal bytes.

    FSDP saves each tie twice, and optimizers have one of the two names. ``ties``: those of the run's model, which
    decide where they are known.
    """
    pairs = {frozenset(pair) for model, *pair in ties or () if model == weights.index}
    candidates: dict[tuple[str, tuple[int, ...]], list[StoredTensor]] = {}
    for tensor in weights.tensors:
        if tensor.fqn in trained and tensor.nbytes:
            candidates.setdefault((tensor.dtype, tensor.shape), []).append(tensor)
    doubtful = [
        tensor
        for tensor in weights.tensors
        if tensor.fqn not in trained
        and (ties is None or any(tensor.fqn in pair for pair in pairs))
        and (tensor.dtype, tensor.shape) in candidates
    ]
    kinds = {(tensor.dtype, tensor.shape) for tensor in doubtful}
    others = [tensor for kind in kinds for tensor in candidates[kind]]
    read = hash_all([TensorJob(one) for one in (*doubtful, *others)])
    digests = [one.digest for one in read]
    same: dict[str, list[str]] = {}
    for digest, tensor in zip(digests[len(doubtful) :], others, strict=True):
        same.setdefault(digest, []).append(tensor.fqn)
    found = {}
    for tensor, digest in zip(doubtful, digests, strict=False):
        equal = same.get(digest, []) if digest else []
        if ties is not None:
            equal = [name for name in equal if frozenset((name, tensor.fqn)) in pairs]
        if equal:
            found[tensor.fqn] = equal[0]
    return found


def _is_constant(weights: Weights, name: str) -> bool:
    """Return whether all elements of a tensor are the same, as in norms and biases that no step changed yet."""
    tensor = weights.named()[name]
    width = max(DTYPE_BITS[tensor.dtype] // 8, 1)
    first = b""
    with OpenFiles() as files:
        for block in tensor.blocks(files, memoryview(bytearray(1 << 16))):
            first = first or bytes(block[:width])
            if bytes(block) != first * (len(block) // width):
                return False
    return True


def _with_ties(weights: Weights, found: Mapping[str, str]) -> Weights:
    """Return weights in which each of these names is a tie of its other name, and no tensor."""
    if not found:
        return weights
    return replace(
        weights,
        tensors=tuple(tensor for tensor in weights.tensors if tensor.fqn not in found),
        ties={**{other: found.get(kept, kept) for other, kept in weights.ties.items()}, **found},
    )


def _has(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a value of one of these types is in a value."""
    if isinstance(value, kinds):
        return True
    inner = value.values() if isinstance(value, Mapping) else value if type(value) in (list, tuple) else ()
    return any(_has(one, kinds) for one in inner)


def _as_kept(
    state: OptimizerState, tensors: Mapping[str, StoredTensor], frozen: Collection[str]
) -> OptimizerState:
    """Return the state that DeepSpeed keeps: moments of every trained parameter, and masters, all in fp32."""

    def in_fp32(value: StateValue, key: str) -> StateValue:
        if not isinstance(value, StoredTensor) or key == STEP or value.dtype == "F32" or not value.shape:
            return value
        return value._replace(dtype="F32", layout=Converted(value.layout, value.dtype, "F32"))

    groups = tuple(
        replace(group, names=tuple(name for name in group.names if name not in frozen))
        for group in state.groups
    )
    states: dict[str, Mapping[str, StateValue]] = {}
    for group in groups:
        shared = next((state.states[name] for name in group.names if state.states.get(name)), {})
        own = replace(state, groups=(group,)).started({name: tensors[name].shape for name in group.names})
        for name in group.names:
            found = own.states.get(name, {})
            if not state.states.get(name) and STEP in shared:
                found = {**found, STEP: shared[STEP]}  # ZeRO keeps one for a group
            states[name] = {key: in_fp32(value, key) for key, value in found.items()}
    masters = {name: state.masters.get(name, tensors[name]) for group in groups for name in group.names}
    fp32 = {name: in_fp32(tensor, "") for name, tensor in masters.items()}
    return replace(
        state,
        groups=groups,
        states={name: found for name, found in states.items() if found},
        masters={name: tensor for name, tensor in fp32.items() if isinstance(tensor, StoredTensor)},
    )


def _data(new: NewStates, state: OptimizerState) -> Mapping[str, Source]:
    return {
        key: source_of(tensor._replace(fqn=key), new.dtypes.get(key), state.label)
        for key, tensor in new.sources.items()
    }


def _ensure_fit(state: OptimizerState, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise OperationError for states that no other strategy can hold, by name."""
    weights = "next: --state weights carries the models alone"
    for name, why in state.unfit.items():
        raise OperationError(
            f"{state.label}: {name}: {why}, which only the optimizer itself can load; {weights}"
        )
    for name, values in state.states.items():
        if state.is_named and name not in tensors:
            raise OperationError(
                f"{state.label}: {name!r} has moments, and no model has such a parameter; {weights}"
            )
        shape = tensors[name].shape if name in tensors else None
        for key, value in values.items():
            if isinstance(value, StoredTensor) and shape is not None and value.shape not in (shape, (), (1,)):
                raise OperationError(
                    f"{state.label}: {key!r} of {name!r} has the shape {list(value.shape)} (expected {list(shape)}, "
                    "as its parameter): states of Adafactor, Shampoo and 8-bit optimizers cannot be cut among ranks; "
                    f"{weights}"
                )


class _Others(NamedTuple):
    """Files without weights and optimizers. ``extras``: those that are made for new ranks."""

    carried: tuple[PurePosixPath, ...]
    empty: tuple[PurePosixPath, ...]
    left_out: tuple[LeftOut, ...]
    extras: tuple[PlannedExtra, ...] = ()


def _others(
    root: Path,
    found: OtherFiles,
    replaced: set[PurePosixPath],
    names: _Names,
    before: int | None,
    processes: int,
) -> _Others:
    """Sort the files that are neither weights nor optimizers. ``replaced``: files of optimizers that change."""
    wanted = names.random_states(processes)
    carried: list[PurePosixPath] = []
    left = [one for one in found.left_out if PurePosixPath(one.what) not in replaced]
    had: list[str] = []
    for path in found.carried:
        parsed = parse_file_name(str(path))
        if path in replaced:
            continue
        why = ""
        if parsed is not None and parsed.role is Role.RNG_STATE:
            had.append(str(path))
            why = "" if str(path) in wanted else f"no rank of {count_of(processes, 'process')} looks for it"
        elif parsed is not None and parsed.role is Role.RUN_STATE and (parsed.rank or 0) >= processes:
            why = f"no rank of {count_of(processes, 'process')} looks for it"
        elif parsed is not None and parsed.role is Role.DATALOADER and before != processes:
            why = f"it counts the batches of one of {before} processes; the epoch begins anew"
        if why:
            left.append(LeftOut(str(path), why))
        else:
            carried.append(path)
    extras: tuple[PlannedExtra, ...] = ()
    lacking = [name for name in wanted if name not in had] if had else []
    if lacking:
        step = None if names.is_trainer else _step(root / had[0])
        if step is not None:
            files = tuple(torch_file(PurePosixPath(name), {"step": step}) for name in lacking)
            extras = (PlannedExtra(files=files, old_files=(PurePosixPath(had[0]),)),)
        only = f": only accelerator.step, {step}, is in it" if extras else ""
        left.append(
            LeftOut(
                f"random states in {list_names(lacking)}",
                f"no such rank saved any{only}; a copy of another rank's would give both the same dropout",
            )
        )
    return _Others(tuple(carried), found.empty, tuple(left), extras)


def _step(path: Path) -> int | None:
    """Return ``accelerator.step`` from a file of random states, None where it has none."""
    try:
        with open_reader(path) as reader:
            step = child(read_torch_file(reader).tree.root, "step")
    except (FormatError, OSError):
        return None
    return step if type(step) is int else None


def _scheduler_words(
    carried: Sequence[PurePosixPath], names: _Names, before: int | None, processes: int
) -> Iterator[str]:
    """Yield the sentence about schedulers that count every process."""
    found = [
        str(path)
        for path in carried
        if (parsed := parse_file_name(str(path))) is not None and parsed.role is Role.SCHEDULER
    ]
    if found and before not in (None, processes) and not names.is_trainer:
        yield (
            f"{list_names(found)}: copied unchanged; Accelerate advances a scheduler once per process at each step "
            f"(by {before} so far, by {processes} from now on), unless the script has split_batches=True or "
            "step_scheduler_with_optimizer=False"
        )


def _processes_of(root: Path, optimizers: Sequence[OptimizerState]) -> int | None:
    """Return how many processes saved a checkpoint, None where nothing shows it."""
    manifest = usable_manifest(root)
    if manifest is not None and manifest.is_of_a_save:
        return manifest.world_size
    known = next((one.world_size for one in optimizers if one.world_size is not None), None)
    if known is not None:
        return known
    parsed = [one for one in map(parse_file_name, os.listdir(root)) if one is not None]
    ranks = [one.rank or 0 for one in parsed if one.role in (Role.RNG_STATE, Role.RUN_STATE)]
    return max(ranks) + 1 if ranks else None
