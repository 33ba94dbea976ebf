"""Plan of a migration of the complete training state to another strategy and number of processes.

The loaders that the new checkpoint is for, and the names they look for: stock accelerate 1.15
(``checkpointing.py``, ``utils/fsdp_utils.py``) and transformers' Trainer 5 (``trainer.py``). What
they share is by fqn: models, moments and hyperparameters. What belongs to a process (random states,
data positions) goes on only where the same processes do.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec.structs import replace

from ckptfix.checkpoint.filenames import TRAINER_STATE, parse_file_name
from ckptfix.checkpoint.manifest import usable_manifest
from ckptfix.checkpoint.roles import Role
from ckptfix.conversion.migration_plan import (
    MigrationPlan,
    Options,
    Planned,
    PlannedExtra,
    PlannedModel,
    PlannedState,
    as_in_one_file,
    lost_variants,
    planned_model,
    source_of,
)
from ckptfix.conversion.other_states import (
    into_engine,
    last_rates,
    other_states,
    out_of_engines,
)
from ckptfix.conversion.streaming import Source
from ckptfix.conversion.target_names import StateNames, is_lone, other_files, read_config
from ckptfix.conversion.tied_weights import with_lost_ties, with_ties_joined
from ckptfix.errors import OperationError, UnsupportedFormat, UsageError
from ckptfix.storage.files import AnyPath, names_in
from ckptfix.storage.paths import command
from ckptfix.tensors.deepspeed import deepspeed_weights
from ckptfix.tensors.joined import Converted
from ckptfix.tensors.new_files import NewStates
from ckptfix.tensors.new_optimizers import dcp_optimizer, ddp_optimizer, fsdp_full_optimizer
from ckptfix.tensors.new_zero import module_dtype, zero_files
from ckptfix.tensors.optimizer_opening import open_optimizers
from ckptfix.tensors.optimizers import (
    BY_TORCH,
    STEP,
    ZERO_AT_FIRST,
    OptimizerState,
    ParamGroup,
    StateValue,
    Strategy,
    moments_of,
)
from ckptfix.tensors.parameter_names import (
    RunGroup,
    SpreadOptimizer,
    first_out_of_order,
    names_of_model,
    ordered_as,
)
from ckptfix.tensors.parameter_sources import (
    ModelsOfRun,
    frozen_pattern,
    name_optimizers,
    recorded_names,
    run_of,
    too_many,
)
from ckptfix.tensors.stored import Format, StoredCheckpoint, StoredTensor, Weights
from ckptfix.tensors.zero_states import BUFFERS, MODEL_STATES
from ckptfix.wording import count_of, list_names

_BY_POSITION = (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3)
_NEEDED_BY = {"momentum_decay": "mu_product", "amsgrad": "max_exp_avg_sq"}
"""Hyperparameter, of NAdam and of Adam -> the state that it needs."""

_WEIGHTS_ALONE = "next, to migrate only the models: --state weights --to dcp (or safetensors, bin)"


def plan_states(
    source: StoredCheckpoint, path: AnyPath, output: Path, options: Options
) -> MigrationPlan:
    """Plan the migration of a complete state; reads only headers and small values.

    Raises OperationError for what the new strategy cannot hold, by name, UsageError for a path that
    is not a folder of ``save_state`` or the Trainer.
    """
    strategy = options.strategy
    assert strategy is not None
    if is_lone(source) or output.suffix in (".safetensors", ".bin"):
        raise UsageError(
            f"{path}: --state all needs a folder written by save_state or by the Trainer, and a "
            "folder as its output"
        )
    source = replace(source, weights=tuple(one for one in source.weights if not one.home.parts))
    optimizers = open_optimizers(source.root)
    if not optimizers:
        to = Format.SAFETENSORS if options.to is Format.DEEPSPEED else options.to
        raise OperationError(
            f"{path}: no optimizer found (expected optimizer.bin, optimizer_0/ or DeepSpeed "
            "states); next, to migrate only the models: "
            f"{command('migrate', path, '', '--to', to.value)} {output}"
        )
    source = _with_masters(source, optimizers)
    names = StateNames(strategy, is_trainer=(source.root / TRAINER_STATE).exists())
    before = _processes_of(source.root, optimizers)
    processes = options.processes or before
    if processes is None:
        raise UsageError(
            f"{path}: no file shows how many processes saved the checkpoint; add --processes N"
        )
    planning = _Planning(source, options, strategy, names, processes)
    models, states = planning.of(optimizers)
    parts: tuple[Planned, ...] = (*models, *states, *planning.extras)
    new = frozenset(file.path for one in parts for file in one.files)
    replaced = {file for one in states for file in one.old_files}
    others = other_states(
        source.root,
        other_files(source, new),
        optimizers,
        replaced=replaced,
        names=names,
        before=before,
        processes=processes,
    )
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
        left_out=(*lost_variants(models), *others.left_out),
        not_checked=tuple(planning.assumed(optimizers)),
        warnings=(*planning.warnings, *others.warnings),
    )


def _with_masters(
    source: StoredCheckpoint, optimizers: Sequence[OptimizerState]
) -> StoredCheckpoint:
    """Return a checkpoint with the weights that DeepSpeed trains: the Trainer saves rounded ones
    next to its folder.
    """
    weights = {one.index: one for one in source.weights}
    rivals = list(source.rivals)
    for state in optimizers:
        model = weights.get(state.index)
        if (
            state.strategy not in BY_TORCH
            and model is not None
            and model.format is not Format.DEEPSPEED
        ):
            rivals += model.files
            where = PurePosixPath(state.files[0].parts[0])
            weights[state.index] = deepspeed_weights(source.root, where, state.index)
    mine = frozenset(file for one in weights.values() for file in one.files)
    return replace(
        source,
        weights=tuple(weights[index] for index in sorted(weights)),
        rivals=tuple(path for path in rivals if path not in mine),
    )


class _Planning:
    """The models and optimizers of one plan. ``warnings``: what is said of them, in words.
    ``extras``: other files.
    """

    def __init__(
        self,
        source: StoredCheckpoint,
        options: Options,
        strategy: Strategy,
        names: StateNames,
        processes: int,
    ) -> None:
        self._source, self._options, self._strategy, self._names = source, options, strategy, names
        self._processes = processes
        self._weights = source.weights
        self._built: ModelsOfRun | None = None
        self._run = run_of(source.root, source.weights, options.model)
        self.warnings: list[str] = []
        self.extras: list[PlannedExtra] = []
        self._unordered: list[str] = []

    def of(
        self, optimizers: Sequence[OptimizerState]
    ) -> tuple[tuple[PlannedModel, ...], tuple[PlannedState, ...]]:
        """Plan the models, and the optimizers whose files change."""
        changed = [one for one in optimizers if not self._is_kept(one)]
        _ensure_listed(changed)
        named: Sequence[OptimizerState] = changed
        if self._strategy is not Strategy.DDP:
            if shared := too_many(self._source.root, changed, self._weights):
                raise OperationError(self._refusal(shared))
            try:
                named = name_optimizers(
                    self._source.root,
                    changed,
                    weights=self._weights,
                    frozen=self._options.frozen,
                    run=self._noted_run,
                )
            except SpreadOptimizer as error:
                raise OperationError(self._refusal(error.problem)) from None
            self._ensure_own_model(named)
        if self._options.model is not None:
            self._noted_run()
        named = [self._in_order(one) for one in named]
        if self._strategy is not Strategy.DDP:
            ties = self._built.ties if self._built is not None else ()
            self._weights = tuple(with_lost_ties(one, ties) for one in self._weights)
        if self._strategy not in (Strategy.FSDP, Strategy.FSDP_FULL):
            known = self._built.ties if self._built is not None else None
            joined = [with_ties_joined(one, named, known) for one in self._weights]
            self._weights = tuple(weights for weights, _ in joined)
            self.warnings += [words for _, words in joined if words]
        if self._strategy not in BY_TORCH:
            return self._of_deepspeed(changed, named)
        states = tuple(map(self._state, changed, named))
        if self._strategy is Strategy.FSDP and any(one.states for one in changed):
            folders = list_names(str(self._names.optimizer(one.index)) for one in changed)
            self.warnings.append(
                f"{folders}: FSDP1 (fsdp_version 1, Accelerate's default) silently loads no "
                "moments from such a folder into an optimizer that has not taken a step; next, "
                "for FSDP1: --to fsdp-full"
            )
        moved = out_of_engines(self._source.root, changed, self._names, self._processes)
        self.extras += moved.extras
        self.warnings += moved.warnings
        config = read_config(self._source, PurePosixPath())
        suffix = ".bin" if self._strategy is Strategy.FSDP_FULL else ""
        models = tuple(
            planned_model(
                as_in_one_file(weights, self._options.dtype),
                self._names.model_stem(weights.index),
                self._options,
                config,
                None,
                suffix,
            )
            for weights in self._weights
        )
        return models, states

    def _refusal(self, problem: str) -> str:
        """Return why the library that loads the new checkpoint could not load these optimizers."""
        library = "accelerate with FSDP" if self._strategy in BY_TORCH else "DeepSpeed"
        return f"{problem}, but {library} has one optimizer per model; {_WEIGHTS_ALONE}"

    def _ensure_own_model(self, optimizers: Sequence[OptimizerState]) -> None:
        """Raise OperationError for an optimizer of another model than that of its position: FSDP
        and DeepSpeed find it by that.
        """
        for state in optimizers:
            if state.model in (None, state.index):
                continue
            rivals = [one.label for one in optimizers if one.model == state.model]
            # Accelerate takes optimizer N for that of model N, without one: IndexError.
            if len(rivals) > 1:
                problem = f"{list_names(rivals)}: optimizers of one model ({state.model})"
                raise OperationError(self._refusal(problem))
            raise OperationError(
                f"{state.label}: it has the parameters of model {state.model}, but the loader "
                f"expects those of model {state.index}; next: prepare() models and optimizers in "
                "the same order, and save again"
            )

    def _noted_run(self) -> ModelsOfRun:
        self._built = self._run()
        return self._built

    def assumed(self, optimizers: Sequence[OptimizerState]) -> Iterator[str]:
        """Yield in words what the names of numbered parameters rest on, where a model alone gives
        them.
        """
        if self._unordered:
            yield (
                f"whether the parameters of {list_names(self._unordered)} are in the model's "
                "order: FSDP1 without use_orig_params uses a different one, the loader of "
                f"{self._strategy.value} matches by position, and weights sorted by name do not "
                "show the order; next, to be sure: --model MODULE:FACTORY with a factory that "
                "returns (model, optimizer) of the new run"
            )
        if self._strategy is Strategy.DDP or self._built is None or self._built.optimizers:
            return
        root = self._source.root
        counted = [
            one.label
            for one in optimizers
            if not one.is_named and recorded_names(root, one) is None
        ]
        if counted:
            yield (
                f"whether the script passed parameters to {list_names(counted)} in the model's "
                "order, as ckptfix assumed to name them; next, to be sure: --model "
                "MODULE:FACTORY with a factory that returns (model, optimizer)"
            )

    def _in_order(self, state: OptimizerState) -> OptimizerState:
        """Return an optimizer of FSDP or DeepSpeed with its parameters where the new loader looks
        for them.

        FSDP1 without ``use_orig_params``, Accelerate's default, lists the parameters of each
        wrapped module together. DeepSpeed leaves frozen parameters out of param groups, and a
        script may list them.
        """
        is_of_engine = state.strategy not in BY_TORCH
        if state.strategy is Strategy.DDP or not (is_of_engine or self._strategy in _BY_POSITION):
            return state
        if self._built is not None:
            groups = self._built.optimizers
            if state.index < len(groups):
                ties = {
                    other: first for model, other, first in self._built.ties if model == state.index
                }
                return self._in_order_of(state, groups[state.index], ties)
        of_run = self._built.parameters if self._built is not None else ()
        known = [one.name for one in of_run if one.model == state.index]
        if is_of_engine:
            self._note_left_out(state)
            return state
        weights = next((model for model in self._weights if model.index == state.index), None)
        names = known or (names_of_model(weights) if weights is not None else ())
        if names is None:
            sorted_names = sorted(name for group in state.groups for name in group.names)
            if first_out_of_order(state, sorted_names):
                self._unordered.append(state.label)
        elif found := first_out_of_order(state, names):
            raise OperationError(
                f"{state.label}: lists {found[0]!r} before {found[1]!r}, but the model has them in "
                "the opposite order, as with FSDP1 without use_orig_params; the loader of "
                f"{self._strategy.value} matches by position; help: --model MODULE:FACTORY with a "
                "factory that returns (model, optimizer) of the new run"
            )
        return state

    def _in_order_of(
        self, state: OptimizerState, groups: Sequence[RunGroup], ties: Mapping[str, str]
    ) -> OptimizerState:
        """Return an optimizer with the param groups of the run's optimizer, in its order."""
        pattern = frozen_pattern(self._options.frozen)
        if pattern is not None:
            groups = [
                replace(
                    group,
                    parameters=tuple(
                        parameter._replace(trainable=False)
                        if pattern.search(parameter.name)
                        else parameter
                        for parameter in group.parameters
                    ),
                )
                for group in groups
            ]
        rates = last_rates(self._source.root, state, self._names.scheduler(state.index))
        state, restored = _with_untrained_groups(state, groups, rates)
        self.warnings += restored
        return ordered_as(state, groups, ties)

    def _note_left_out(self, state: OptimizerState) -> None:
        """Say that an optimizer of DeepSpeed lists no frozen parameters, where another loader may
        ask for them.
        """
        if self._strategy not in BY_TORCH:
            return
        listed = {name for group in state.groups for name in group.names}
        buffers = state.extra.get(MODEL_STATES, {}).get(BUFFERS, ())
        tensors = [
            one.fqn
            for weights in self._weights
            if weights.index == state.index
            for one in weights.tensors
        ]
        if frozen := [name for name in tensors if name not in listed and name not in buffers]:
            self.warnings.append(
                f"{state.label}: {count_of(len(frozen), 'frozen parameter')} "
                f"({list_names(frozen)}): DeepSpeed leaves frozen parameters out of its param "
                "groups; if the script passes them to its optimizer, loading fails, or FSDP "
                "assigns moments to the wrong parameters; next, in that case: --model "
                "MODULE:FACTORY with a factory that returns (model, optimizer)"
            )

    def _frozen(self, state: OptimizerState, tensors: Mapping[str, StoredTensor]) -> set[str]:
        """Return the parameters in the param groups of an optimizer that are known not to be
        trained.
        """
        listed = {name for group in state.groups for name in group.names}
        known = self._built.parameters if self._built is not None else ()
        frozen = {one.name for one in known if one.model == state.index and one.trainable is False}
        return frozen & listed | self._told_frozen(state, tensors)

    def _is_kept(self, state: OptimizerState) -> bool:
        """Return whether the files of an optimizer are those that the new loader looks for."""
        home = self._names.optimizer(state.index)
        return state.strategy is self._strategy and all(
            file == home or (self._strategy is Strategy.FSDP and file.parent == home)
            for file in state.files
        )

    def _state(self, before: OptimizerState, state: OptimizerState) -> PlannedState:
        """Plan one optimizer. ``state``: ``before`` under fqns."""
        mine = [one for one in self._weights if one.index == state.index] or self._weights
        tensors = {name: tensor for one in mine for name, tensor in one.named().items()}
        if state.masters and self._options.dtype not in (None, "F32", "F64"):
            self.warnings.append(
                f"{state.label}: its fp32 masters are rounded to {self._options.dtype} because of "
                "--dtype; without --dtype, the new weights are these masters"
            )
        state = replace(state, masters={})  # they are the weights
        if self._strategy is not Strategy.DDP or state.is_named:
            _ensure_fit(state, tensors)
        if self._strategy is not Strategy.DDP:
            frozen = self._frozen(state, tensors)
            state = self._started(state, tensors, frozen)
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

    def _started(
        self,
        state: OptimizerState,
        tensors: Mapping[str, StoredTensor],
        frozen: Collection[str],
    ) -> OptimizerState:
        """Return an optimizer with zeros for trained parameters that have no states, and warn about
        these.
        """
        lacking = state.lacking(frozen)
        if lacking and any(state.states.values()):
            self.warnings.append(
                f"{state.label}: {count_of(len(lacking), 'parameter')} without moments "
                f"({list_names(lacking)}): written with zeros and step 0, as torch initializes "
                "them at the first gradient; next, if the script freezes any of these: "
                "--frozen REGEX"
            )
        return state.started({name: tensor.shape for name, tensor in tensors.items()}, frozen)

    def _of_deepspeed(
        self, changed: Sequence[OptimizerState], named: Sequence[OptimizerState]
    ) -> tuple[tuple[PlannedModel, ...], tuple[PlannedState, ...]]:
        """Plan the files of DeepSpeed, which keeps a model and its optimizer together."""
        positions = [one.index for one in self._weights]
        if positions != [one.index for one in named]:
            raise OperationError(
                f"{self._source.root}: {count_of(len(self._weights), 'model')} and "
                f"{count_of(len(named), 'optimizer')}, but DeepSpeed has one optimizer per model; "
                "next: migrate to ddp, fsdp or fsdp-full"
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
        frozen = self._frozen(state, tensors)
        rates = last_rates(self._source.root, state, self._names.scheduler(state.index))
        state, left_out = _without_untrained_groups(state, frozen, rates)
        self.warnings += left_out
        state = self._with_idle_groups_started(state, tensors, frozen)
        buffers = (
            tensors.keys() - {one.name for one in known} - weights.ties.keys() - listed
            if known
            else None
        )
        folder = self._names.engine(weights.index, self._source.root)
        scheduler = self._names.scheduler(weights.index)
        state, unused = into_engine(self._source.root, state, scheduler, self._options.dtype)
        self.warnings += unused
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
            name: source_of(tensor._replace(fqn=name), "F32", label)
            for name, tensor in state.masters.items()
        }
        others = {
            tensor.fqn: source_of(tensor, module_dtype(new, tensor.fqn), label)
            for tensor in weights.tensors
            if tensor.fqn not in trained
        }
        if frozen_ones := [name for name, source in others.items() if source.convert is not None]:
            self.warnings.append(
                f"{label}: {list_names(frozen_ones)}: converted to "
                f"{others[frozen_ones[0]].new.dtype}, the training dtype; DeepSpeed keeps no other "
                "copy of an untrained parameter"
            )
        rounded = {tensors[name].dtype for name in state.masters.keys() - before.masters.keys()} - {
            "F32",
            "F64",
        }
        if rounded and not before.masters:
            self.warnings.append(
                f"{label}: the fp32 masters are made from {', '.join(sorted(rounded))} weights, so "
                f"they have only the precision of {', '.join(sorted(rounded))}"
            )
        model = PlannedModel(
            label=weights.label,
            before=weights,
            weights=weights,
            files=files,
            sources=trained | others,
            parts=data,
            modules=new.modules,
        )
        return model, PlannedState(label=state.label, before=before, state=state, files=(), data={})

    def _with_idle_groups_started(
        self,
        state: OptimizerState,
        tensors: Mapping[str, StoredTensor],
        frozen: Collection[str],
    ) -> OptimizerState:
        """Return an optimizer with zeros for param groups in which no parameter has states.

        DeepSpeed gives moments to every param group. In a group with some states, the parameters
        without any share the step of the others, so ``zero_files`` fills those in.
        """
        idle = tuple(group for group in state.groups if not any(map(state.states.get, group.names)))
        started = self._started(replace(state, groups=idle), tensors, frozen)
        return replace(started, groups=state.groups)

    def _told_frozen(self, state: OptimizerState, tensors: Mapping[str, StoredTensor]) -> set[str]:
        """Return the parameters of an optimizer that ``--frozen`` matches."""
        pattern = frozen_pattern(self._options.frozen)
        found = {name for name in tensors if pattern is not None and pattern.search(name)}
        every = {name for one in self._weights for name in one.named()}
        if pattern is not None and not any(map(pattern.search, every)):
            raise UsageError(f"--frozen {pattern.pattern!r} matches no parameter of the model")
        if trained := sorted(name for name in found if state.states.get(name)):
            raise UsageError(
                f"--frozen {self._options.frozen!r} matches parameters that were trained (they "
                f"have moments in {state.label}): {list_names(trained)}"
            )
        return found & {name for group in state.groups for name in group.names}


_WRITERS = {
    Strategy.DDP: ddp_optimizer,
    Strategy.FSDP: dcp_optimizer,
    Strategy.FSDP_FULL: fsdp_full_optimizer,
}


def _ensure_listed(optimizers: Iterable[OptimizerState]) -> None:
    """Raise OperationError for moments of a parameter in no param group: no loader takes them."""
    for one in optimizers:
        listed = {name for group in one.groups for name in group.names}
        if strays := [name for name in one.states if name not in listed]:
            names = list_names(strays if one.is_named else [f"parameter {name}" for name in strays])
            raise OperationError(
                f"{one.label}: {names}: moments without a param group, so no optimizer would "
                f"load them; {_WEIGHTS_ALONE}"
            )


def _as_kept(
    state: OptimizerState, tensors: Mapping[str, StoredTensor], frozen: Collection[str]
) -> OptimizerState:
    """Return the state that DeepSpeed keeps: moments of every trained parameter, and masters, all
    in fp32.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    moments = moments_of(state, shapes)

    def in_fp32(value: StateValue, key: str) -> StateValue:
        return _in_fp32(value) if isinstance(value, StoredTensor) and key in moments else value

    groups = tuple(
        replace(group, names=tuple(name for name in group.names if name not in frozen))
        for group in state.groups
    )
    states: dict[str, Mapping[str, StateValue]] = {}
    for group in groups:
        shared = next((state.states[name] for name in group.names if state.states.get(name)), {})
        own = replace(state, groups=(group,)).started(shapes)
        for name in group.names:
            found = own.states.get(name, {})
            if not state.states.get(name) and STEP in shared:
                found = {**found, STEP: shared[STEP]}  # ZeRO keeps one for a group
            states[name] = {key: in_fp32(value, key) for key, value in found.items()}
    masters = {
        name: state.masters.get(name, tensors[name]) for group in groups for name in group.names
    }
    return replace(
        state,
        groups=groups,
        states={name: found for name, found in states.items() if found},
        masters={name: _in_fp32(tensor) for name, tensor in masters.items()},
    )


def _in_fp32(tensor: StoredTensor) -> StoredTensor:
    if tensor.dtype == "F32":
        return tensor
    return tensor._replace(dtype="F32", layout=Converted(tensor.layout, tensor.dtype, "F32"))


def _data(new: NewStates, state: OptimizerState) -> Mapping[str, Source]:
    return {
        key: source_of(tensor._replace(fqn=key), new.dtypes.get(key), state.label)
        for key, tensor in new.sources.items()
    }


def _ensure_fit(state: OptimizerState, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise OperationError for states that no other strategy can hold, by name."""
    for name, why in state.unfit.items():
        raise OperationError(
            f"{state.label}: {name}: {why}, which only the optimizer itself can load; "
            f"{_WEIGHTS_ALONE}"
        )
    held = {key for values in state.states.values() for key in values}
    for option, key in _NEEDED_BY.items():
        if held and key not in held and any(group.options.get(option) for group in state.groups):
            raise OperationError(
                f"{state.label}: {key} is missing, and an optimizer with {option} cannot take a "
                "step without it: DeepSpeed's ds_to_universal.py leaves it out; next: migrate the "
                "ZeRO checkpoint that was converted to this one"
            )
    for name, values in state.states.items():
        if state.is_named and name not in tensors:
            raise OperationError(
                f"{state.label}: {name!r} has moments, but no model has a parameter with this "
                f"name; {_WEIGHTS_ALONE}"
            )
        shape = tensors[name].shape if name in tensors else None
        for key, value in values.items():
            if (
                isinstance(value, StoredTensor)
                and shape is not None
                and value.shape not in (shape, (), (1,))
            ):
                why = (
                    "states of Adafactor, Shampoo and 8-bit optimizers cannot be split among ranks"
                )
                # Torch's own optimizers give these the shape of the weight.
                if key in ZERO_AT_FIRST:
                    why = (
                        "the weights and the optimizer come from two runs, or the optimizer keeps "
                        "projections, as GaLore does"
                    )
                raise OperationError(
                    f"{state.label}: {key!r} of {name!r} has the shape {list(value.shape)} "
                    f"(expected {list(shape)}, the shape of its parameter): {why}; "
                    f"{_WEIGHTS_ALONE}"
                )


def _processes_of(root: AnyPath, optimizers: Sequence[OptimizerState]) -> int | None:
    """Return how many processes saved a checkpoint, None where nothing shows it."""
    manifest = usable_manifest(root)
    if manifest is not None and manifest.is_of_a_save:
        return manifest.world_size
    known = next((one.world_size for one in optimizers if one.world_size is not None), None)
    if known is not None:
        return known
    parsed = [one for one in map(parse_file_name, names_in(root)) if one is not None]
    ranks = [one.rank or 0 for one in parsed if one.role in (Role.RNG_STATE, Role.RUN_STATE)]
    return max(ranks) + 1 if ranks else None


# Param groups without trained parameters: ZeRO-3 drops them from its own optimizer, and ZeRO-1 and 2
# do not start with them. Torch loads no state dict with fewer groups than its optimizer has.

_RATE, _FIRST_RATE = "lr", "initial_lr"
_NAMES = "param_names"


def _without_untrained_groups(
    state: OptimizerState, frozen: Collection[str], rates: Sequence[float]
) -> tuple[OptimizerState, tuple[str, ...]]:
    """Return an optimizer with the param groups that DeepSpeed has, those with a trained parameter,
    and warnings about the others.

    ``rates``: the learning rate that a scheduler last gave to each group, empty where none did.
    """
    kept = tuple(group for group in state.groups if set(group.names).difference(frozen))
    empty = [str(number) for number, group in enumerate(state.groups) if group not in kept]
    if not kept or not empty:
        return state, ()
    words = (
        f"{state.label}: param groups without trained parameters are left out: "
        f"{', '.join(empty)}; ZeRO-3 leaves them out too, and ZeRO-1 and ZeRO-2 do not start "
        "with them; next: remove them from the script"
    )
    # Older versions of torch give the first rates to the groups that remain, without an error.
    if len(rates) == len(state.groups):
        words += (
            ", and start its scheduler anew at this step: the saved one has learning rates for "
            f"{count_of(len(rates), 'param group')}"
        )
    return replace(state, groups=kept), (words,)


def _with_untrained_groups(
    state: OptimizerState, groups: Sequence[RunGroup], rates: Sequence[float]
) -> tuple[OptimizerState, tuple[str, ...]]:
    """Return an optimizer with the param groups of the run that DeepSpeed left out, without
    parameters yet, and warnings about these groups.

    ``groups``: of the run's optimizer, whose hyperparameters the groups get. ``rates``: the
    learning rate that a scheduler last gave to each of the run's groups, empty where none did. An
    optimizer that has other groups missing is returned unchanged.
    """
    missing = [number for number, group in enumerate(groups) if not group.is_trained]
    if not missing or not state.groups or len(state.groups) + len(missing) != len(groups):
        return state, ()
    is_scheduled = len(rates) == len(groups)
    like = state.groups[0].options
    saved = iter(state.groups)
    restored: list[ParamGroup] = []
    lacking: set[str] = set()
    for number, group in enumerate(groups):
        if group.is_trained:
            restored.append(next(saved))
            continue
        options: dict[str, Any] = dict(group.options)
        # A scheduler begins with the learning rate that the script gave to the group.
        if _FIRST_RATE in like and _RATE in options:
            options.setdefault(_FIRST_RATE, options[_RATE])
        if is_scheduled:
            options[_RATE] = rates[number]
        if _NAMES in like:
            options.setdefault(_NAMES, [parameter.name for parameter in group.parameters])
        # OneCycleLR reads max_lr of every group, and fails without.
        lacking |= like.keys() - options.keys()
        restored.append(ParamGroup(names=(), options={**like, **options}))
    words = (
        f"{state.label}: param groups without trained parameters are restored: "
        f"{', '.join(map(str, missing))}; DeepSpeed leaves them out, so their hyperparameters are "
        "those of the optimizer from --model"
    )
    if is_scheduled:
        words += ", and their learning rates those of the scheduler"
    if lacking:
        words += (
            f"; that optimizer lacks {list_names(sorted(lacking))}, taken from the first trained "
            "group; next, if a scheduler adds these: create the scheduler in the factory, too"
        )
    return replace(state, groups=tuple(restored)), (words,)
