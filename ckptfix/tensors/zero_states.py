"""Optimizer states of DeepSpeed by fqn: those that ZeRO-1, 2 and 3 cut among ranks, and those of
universal checkpoints.

Facts from DeepSpeed 0.18 and 0.19 (``runtime/zero/stage_1_and_2.py``, ``stage3.py``): the optimizer
sees one flat parameter for each param group (ZeRO-1 and 2) or for each sub-group of one (ZeRO-3,
``sub_group_size``), so its states are flat tensors, cut as the fp32 weights are; a step belongs to
all parameters of a flat one. Frozen parameters are in none. Under ``round_robin_gradients`` the
parameters of a group are dealt to the ranks like cards before they are laid end to end, so their
order is not the optimizer's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ckptfix.checkpoint.deepspeed_files import AGAIN, DeepSpeedFiles, deepspeed_paths, list_files
from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.pickle_tree import Text, child, is_dict_like, items_of, pairs
from ckptfix.formats.torch_file import TorchFile
from ckptfix.storage.files import AnyPath
from ckptfix.storage.reading import OpenFiles, Piece
from ckptfix.tensors.optimizer_files import GROUPS, PARAMS, PickledValues, Unread, note_unread
from ckptfix.tensors.optimizers import STEP, OptimizerState, ParamGroup, StateValue, Strategy
from ckptfix.tensors.single_files import record_checksums
from ckptfix.tensors.stored import StoredTensor
from ckptfix.tensors.universal import GLOBAL_STATE, WEIGHT, universal_files
from ckptfix.tensors.zero_partitions import (
    Flat,
    ModelStates,
    OptimizerStates,
    Shapes,
    ensure_one_save,
    flat_of,
    optimizer_states,
    read_models,
    read_states_file,
    undealt,
)
from ckptfix.tensors.zero_shares import STAGES
from ckptfix.tensors.zero_tensors import cut_group, cut_shares, from_groups, state_fqn

MODEL_STATES = "model_states"
"""The entry of ``OptimizerState.extra`` for what DeepSpeed's model states hold next to the model.
"""

BUFFERS, DTYPE = "buffer_names", "dtype"

_COUNTERS = (
    "skipped_steps global_steps global_samples checkpoint_parallel_dimensions "
    "csr_tensor_module_names"
)
OF_ENGINE = frozenset(
    f"{BUFFERS} {DTYPE} optimizer lr_scheduler data_sampler random_ltd {_COUNTERS}".split()
)
"""The entries of the model states that DeepSpeed itself writes; any other is the script's
``client_state``.
"""

_STRATEGIES = {stage.number: strategy for strategy, stage in STAGES.items()}
_OPTIMIZER = "optimizer"
_GLOBAL = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
Values = Mapping[str, Any]


class _Rank(NamedTuple):
    """One rank's optimizer. ``states``: of each flat parameter; ``groups``: options and flat
    parameters of each.
    """

    partitions: OptimizerStates
    states: Mapping[int, Values]
    groups: tuple[tuple[Values, tuple[int, ...]], ...]
    extra: Values


def zero_optimizer(root: AnyPath, where: PurePosixPath, index: int) -> OptimizerState | None:
    """Return the optimizer of a DeepSpeed checkpoint of any ZeRO stage, or of a universal one, None
    without any.

    Raises MissingRankError, OtherKindError for tensor, pipeline and expert parallel checkpoints,
    OperationError for an optimizer without ZeRO, which lies in the model states, when its states
    cannot be cut into parameters, or the files contradict one another; OSError.
    """
    files = list_files(root / where)
    if files.is_universal:
        return universal_optimizer(root, where, index)
    models = read_models(files)
    if not files.optimizers and not files.by_rank:
        if _OPTIMIZER in models[0].left:
            raise OperationError(
                f"{models[0].path}: without ZeRO, DeepSpeed keeps the optimizer in the model "
                "states, where ckptfix does not read it; next: save with ZeRO-1, which has the "
                "same optimizer"
            )
        ensure_one_save(files, models, ())
        return None
    ranks = [
        read_states_file(files.folder / name, _rank) for _, name in sorted(files.optimizers.items())
    ]
    ensure_one_save(files, models, [one.partitions for one in ranks])
    masters, states = (_by_share if files.by_rank else _by_group)(files.folder, models[0], ranks)
    names = [*files.models.values(), *files.optimizers.values()]
    shapes = {name: shape for group in models[0].groups or () for name, shape in group.items()}
    return OptimizerState(
        label=_label(root, where),
        strategy=_STRATEGIES.get(
            ranks[0].partitions.stage or 0, Strategy.ZERO3 if files.by_rank else Strategy.ZERO2
        ),
        index=index,
        files=tuple(where / name for name in sorted(set(names))),
        groups=tuple(_groups(ranks[0].partitions.path, models[0], ranks[0].groups)),
        states=states,
        masters=masters,
        shapes=shapes,
        world_size=len(ranks),
        extra={**ranks[0].extra, MODEL_STATES: _model_extra(files, models[0])},
        unfit=_unread_options(ranks[0].groups),
        checksums={piece: crc for one in ranks for piece, crc in one.partitions.checksums.items()},
    )


def universal_optimizer(root: AnyPath, where: PurePosixPath, index: int) -> OptimizerState:
    """Return the optimizer of a universal checkpoint. Raises as ``zero_optimizer`` does."""
    files = list_files(root / where)
    models = read_models(files)
    ensure_one_save(files, models, ())
    shapes = {name: shape for group in models[0].groups or () for name, shape in group.items()}
    found = universal_files(root, where, shapes)
    shared = read_states_file(root / where / GLOBAL_STATE, _shared)
    states: dict[str, dict[str, StateValue]] = {}
    for name, held in found.items():
        states[name] = {state: one.value for state, one in held.items() if state != WEIGHT}
        if states[name] and STEP not in states[name] and shared.step is not None:
            states[name] = {STEP: _shared_by([name], STEP, shared.step)[name], **states[name]}
    every = [one for held in found.values() for one in held.values()]
    checksums = [*(one.checksums for one in every), shared.checksums]
    return OptimizerState(
        label=_label(root, where),
        strategy=Strategy.UNIVERSAL,
        index=index,
        files=tuple(deepspeed_paths(root, where)),
        groups=tuple(_groups(root / where / GLOBAL_STATE, models[0], shared.groups)),
        states={name: held for name, held in states.items() if held},
        masters={name: _tensor(held[WEIGHT].value) for name, held in found.items()},
        shapes=shapes,
        world_size=models[0].ranks,
        extra={**shared.extra, MODEL_STATES: _model_extra(files, models[0])},
        unfit=_unread_options(shared.groups),
        checksums={piece: crc for one in checksums for piece, crc in one.items()},
    )


def _tensor(value: StateValue) -> StoredTensor:
    assert isinstance(value, StoredTensor), "universal_files reads a weight as a tensor"
    return value


def _label(root: AnyPath, where: PurePosixPath) -> str:
    return str(where) if where.parts else root.name


def _rank(path: AnyPath, file: TorchFile) -> _Rank:
    partitions = optimizer_states(path, file)
    states = child(file.tree.root, "optimizer_state_dict")
    base = child(
        states, "optimizer_state_dict" if partitions.by_parameter else "base_optimizer_state"
    )
    if not is_dict_like(base):
        raise FormatError(
            "its base_optimizer_state is not an optimizer's state dict: ckptfix does not read "
            "elastic checkpoints"
        )
    if child(states, "ds_zero_partition_groups") is not None:
        raise FormatError(
            "the MoE experts are partitioned across different ranks than the rest, which ckptfix "
            "does not read"
        )
    values = PickledValues(path, file)
    found: dict[int, dict[str, Any]] = {
        number: {
            key.value: values.value(value, f"{key.value} of flat parameter {number}")
            for key, value in pairs(held)
            if type(key) is Text
        }
        for number, held in pairs(child(base, "state"))
        if type(number) is int
    }
    groups = _group_options(values, base)
    for options, members in groups:
        if type(options.get(STEP)) is int:  # DeepSpeed's FusedAdam counted there once
            for member in members:
                if found.get(member):
                    found[member].setdefault(STEP, options[STEP])
    return _Rank(
        partitions=partitions,
        states=found,
        groups=groups,
        extra=_shared_values(values, states),
    )


def _group_options(
    values: PickledValues, optimizer: object
) -> tuple[tuple[Values, tuple[int, ...]], ...]:
    found = []
    for number, group in enumerate(items_of(child(optimizer, GROUPS))):
        options = values.value(group, f"param group {number}")
        if not isinstance(options, dict):
            raise FormatError(f"param group {number} is not a dict")
        members = options.pop(PARAMS, [])
        if not isinstance(members, list) or not all(type(member) is int for member in members):
            raise FormatError(f"the params of param group {number} are not a list of numbers")
        options.pop("_ds_source_param_group_id", None)  # ZeRO-3's own note, not a hyperparameter
        found.append((options, tuple(members)))
    return tuple(found)


def _unread_options(groups: Iterable[tuple[Values, tuple[int, ...]]]) -> dict[str, str]:
    """Return the hyperparameters that were not read, as ``OptimizerState.unfit`` has them."""
    unfit: dict[str, str] = {}
    for number, (options, _) in enumerate(groups):
        note_unread(f"{GROUPS}.{number}", options, unfit)
    return unfit


def _shared_values(values: PickledValues, states: object) -> dict[str, Any]:
    """Return the loss scaler and what goes with it."""
    return {
        key.value: values.value(value, key.value)
        for key, value in pairs(states)
        if type(key) is Text and key.value in _GLOBAL
    }


def _by_group(
    folder: AnyPath, model: ModelStates, ranks: Sequence[_Rank]
) -> tuple[dict[str, StoredTensor], dict[str, dict[str, StateValue]]]:
    """Return masters and states of ZeRO-1 and 2."""

    def cut(
        shapes: Shapes, state: str, held: Sequence[Any], label: str
    ) -> Mapping[str, StateValue]:
        return cut_group(shapes, [_flat(one, label) for one in held], label, state)

    masters = from_groups(model, [one.partitions for one in ranks])
    return masters, _states(folder, "parameter group", model, ranks, cut)


def _by_share(
    folder: AnyPath, model: ModelStates, ranks: Sequence[_Rank]
) -> tuple[dict[str, StoredTensor], dict[str, dict[str, StateValue]]]:
    """Return masters and states of ZeRO-3; sub-groups are cut one by one, as their steps may
    differ.
    """
    many = len(model.groups or ())
    for one in ranks:
        if len(one.partitions.flats) != many:
            raise OperationError(
                f"{one.partitions.path}: it has partitions of {len(one.partitions.flats)} "
                f"sub-groups, but {model.path.name} has {many}; {AGAIN}"
            )

    def cut(
        shapes: Shapes, state: str, held: Sequence[Any], label: str
    ) -> Mapping[str, StateValue]:
        shares = [
            (one.partitions.path, [_flat(value, label)])
            for one, value in zip(ranks, held, strict=True)
        ]
        return cut_shares(shapes, shares, state)

    masters: dict[str, StoredTensor] = {}
    for number, shapes in enumerate(model.groups or ()):
        masters |= cut_shares(
            shapes, [(one.partitions.path, [one.partitions.flats[number]]) for one in ranks]
        )
    return masters, _states(folder, "sub-group", model, ranks, cut)


_Cut = Callable[[Shapes, str, Sequence[Any], str], Mapping[str, StateValue]]
"""Cuts the flat tensors of a state, one of each rank, into those of parameters: shapes, state,
tensors, label.
"""


def _states(
    folder: AnyPath, group: str, model: ModelStates, ranks: Sequence[_Rank], cut: _Cut
) -> dict[str, dict[str, StateValue]]:
    """Return the states of all parameters. ``group``: what a flat tensor is of, in messages."""
    found: dict[str, dict[str, StateValue]] = {}
    for number, shapes in enumerate(model.groups or ()):
        for state, held in _held(ranks, number).items():
            label = f"{folder}: the partitions of {state!r} of {group} {number}"
            values: Mapping[str, StateValue]
            if _is_shared(held[0]):
                values = _shared_by(shapes, state, _shared_value(held, label))
            else:
                values = cut(shapes, state, held, label)
            for name, value in values.items():
                found.setdefault(name, {})[state] = value
    return found


def _held(ranks: Sequence[_Rank], number: int) -> dict[str, list[Any]]:
    """Return state -> the value that each rank has for a flat parameter."""
    first = ranks[0].states.get(number, {})
    for one in ranks:
        if one.states.get(number, {}).keys() != first.keys():
            raise OperationError(
                f"{one.partitions.path}: its states of flat parameter {number} differ from those "
                f"of rank 0; {AGAIN}"
            )
    return {state: [one.states[number][state] for one in ranks] for state in first}


def _is_shared(value: object) -> bool:
    """Return whether a state belongs to all parameters of a flat one: a number, or a tensor of no
    dimension.
    """
    return not isinstance(value, StoredTensor) or value.shape == ()


def _flat(value: object, label: str) -> Flat:
    if not isinstance(value, StoredTensor):
        raise OperationError(f"{label} are tensors on some ranks only; {AGAIN}")
    try:
        return flat_of(value)
    except FormatError as error:
        raise OperationError(f"{label}: {error}; {AGAIN}") from error


def _shared_value(held: Sequence[Any], label: str) -> StateValue:
    """Return the value that all ranks agree on. Raises OperationError when they do not, or for an
    object.
    """
    if not isinstance(held[0], StateValue):
        kind = held[0].kind if isinstance(held[0], Unread) else "neither a tensor nor a number"
        raise OperationError(
            f"{label}: {kind}, which other strategies cannot store in a param group; {AGAIN}"
        )
    with OpenFiles() as files:
        read = [_comparable(value, files) for value in held]
    if any(value != read[0] for value in read):
        raise OperationError(f"{label} differ between ranks; {AGAIN}")
    return held[0]


def _shared_by(names: Iterable[str], state: str, value: StateValue) -> dict[str, StateValue]:
    if not isinstance(value, StoredTensor):
        return dict.fromkeys(names, value)
    return {name: value._replace(fqn=state_fqn(name, state)) for name in names}


def _comparable(value: Any, files: OpenFiles) -> object:
    if not isinstance(value, StoredTensor):
        return value
    buffer = memoryview(bytearray(1 << 16))
    return value.dtype, b"".join(bytes(block) for block in value.blocks(files, buffer))


def _groups(
    path: AnyPath, model: ModelStates, groups: Iterable[tuple[Values, tuple[int, ...]]]
) -> Iterator[ParamGroup]:
    """Yield the param groups with the parameters of their flat ones, in the optimizer's order."""
    shapes = model.groups or ()
    for options, members in groups:
        if any(not 0 <= member < len(shapes) for member in members):
            raise OperationError(
                f"{path}: a param group lists flat parameter {max(members)}, but "
                f"{model.path.name} has only {len(shapes)}; {AGAIN}"
            )
        names = [name for member in members for name in shapes[member]]
        yield ParamGroup(
            names=tuple(undealt(names, model.ranks or 1) if model.is_dealt else names),
            options=options,
        )


def _model_extra(files: DeepSpeedFiles, model: ModelStates) -> dict[str, Any]:
    """Return what the model states hold next to the model: names of buffers, counters, a scheduler,
    a script's own.
    """

    def understand(path: AnyPath, file: TorchFile) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs(file.tree.root):
            if type(key) is Text and key.value in model.left:
                found[key.value] = PickledValues(path, file).value(value, key.value)
        return found

    dtypes = {
        one.dtype
        for name, one in model.module.items()
        if name not in model.buffers and one.dtype.startswith(("F", "BF"))
    }
    return {
        **read_states_file(files.folder / files.models[min(files.models)], understand),
        BUFFERS: sorted(model.buffers),
        DTYPE: dtypes.pop() if len(dtypes) == 1 else None,
    }


class _Shared(NamedTuple):
    """The content of ``optimizer_state.pt``. ``step``: that of ZeRO-3, for all parameters."""

    groups: tuple[tuple[Values, tuple[int, ...]], ...]
    step: StateValue
    extra: Values
    checksums: Mapping[Piece, int]


def _shared(path: AnyPath, file: TorchFile) -> _Shared:
    root = file.tree.root
    values = PickledValues(path, file)
    groups = _group_options(values, root)
    if not groups:
        raise FormatError("it holds no param groups")
    first = [held for _, held in pairs(child(child(root, "optimizer_state_dict"), "state"))]
    step = child(first[0], STEP) if first else None
    return _Shared(
        groups=groups,
        step=None if step is None else values.value(step, STEP),
        extra=_shared_values(values, root),
        checksums=dict(record_checksums(path, file)),
    )
