"""New checkpoints of DeepSpeed: the files of ZeRO-1, 2 and 3 for any number of ranks, and universal
checkpoints.

The files are those of DeepSpeed 0.18 and 0.19 (``runtime/engine.py``, ``_get_zero_ckpt_name``;
``runtime/zero/stage_1_and_2.py`` and ``stage3.py``, ``state_dict``;
``checkpoint/ds_to_universal.py``), so that stock DeepSpeed and accelerate's ``load_state`` load
them. A flat partition is joined from stretches of the source's files: no tensor is held in memory.
Objects of DeepSpeed are written by their names, and DeepSpeed is never imported.

What the target's configuration must be, as the files cannot say it: ``round_robin_gradients`` off,
and for ZeRO-3 the default ``sub_group_size``. ``clip_grad`` is left out on purpose: DeepSpeed would
take the old run's for the new one's.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from math import prod
from pathlib import PurePosixPath
from typing import Any

from msgspec import Struct

from ckptfix.checkpoint.deepspeed_files import LATEST, LATEST_UNIVERSAL, UNIVERSAL
from ckptfix.checkpoint.rank_names import DeepSpeedName, DeepSpeedPart
from ckptfix.errors import OperationError
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.storage.reading import OpenFiles
from ckptfix.storage.recipes import Literal
from ckptfix.tensors.joined import Converted, Stretch, Zeros, joined
from ckptfix.tensors.new_files import NewStates, NewTensor, OutputFile
from ckptfix.tensors.new_torch_files import Call, Global, torch_file, with_new_tensors
from ckptfix.tensors.optimizer_files import PARAMS, note_unread
from ckptfix.tensors.optimizers import (
    STEP,
    ZERO_AT_FIRST,
    OptimizerState,
    ParamGroup,
    StateValue,
    Strategy,
    moments_of,
    number_in,
)
from ckptfix.tensors.stored import Contiguous, Layout, StoredTensor, Weights
from ckptfix.tensors.universal import GLOBAL_STATE, WEIGHT
from ckptfix.tensors.zero_shares import (
    ORDERED_DICT,
    STAGES,
    SUB_GROUP_SIZE,
    WIDTH,
    FlatShare,
    Shape,
    Span,
    fragments_of,
    ordered,
    sizes_of,
    stage_of,
    stretch_of,
)
from ckptfix.tensors.zero_states import BUFFERS, DTYPE, MODEL_STATES
from ckptfix.wording import count_of, list_names

_VERSION = "0.18.2"
_LONGEST = 255  # bytes of a name that file systems take
_MASTER = "F32"
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_EXACT = frozenset({"F32", "F16", "BF16"})
_PREFIX = {"BF16": "bf16_"}
_CONFIGS = {"BF16": "bf16", "F16": "fp16"}
_SCALER = Call(
    function=Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    state={"cur_scale": 1.0, "dynamic": False},
    new=True,
)
_BUFFER_NAMES = ("running_mean", "running_var", "num_batches_tracked")
_OF_THE_SAVE = frozenset(
    [
        "optimizer",
        "module",
        "ds_config",
        "ds_version",
        "dp_world_size",
        "mp_world_size",
        "data_sampler",
        "random_ltd",
    ]
)
LOSS_SCALER, DYNAMIC_SCALE = _SCALERS = "loss_scaler", "dynamic_loss_scale"
"""The entries of an optimizer's file of DeepSpeed about the scale of the loss."""


def dynamic_scaler(
    scale: float = 65536,
    *,
    done: int = 0,
    factor: float = 2.0,
    window: int = 1000,
    hysteresis: int = 2,
) -> Call:
    """Return DeepSpeed's scaler of the loss in fp16, by default as a configuration that says
    nothing makes it.

    ``done``: steps that it counts since the scale changed. It looks at them before it counts a
    step: the scale grows by ``factor`` in the step that begins with ``window`` of them.
    """
    state = {
        "cur_scale": scale,
        "dynamic": True,
        "cur_iter": done,
        "last_overflow_iter": -1,
        "scale_factor": factor,
        "scale_window": window,
        "min_scale": 1,
        "delayed_shift": hysteresis,
        "cur_hysteresis": hysteresis,
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True,
        "dtype": Global("torch", "float16"),
    }
    function = Global("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")
    return Call(function=function, state=state, new=True)


def zero_files(
    strategy: Strategy,
    folder: PurePosixPath,
    weights: Weights,
    state: OptimizerState,
    *,
    processes: int,
    dtype: str | None = None,
    frozen: Collection[str] = (),
    buffers: Collection[str] | None = None,
) -> NewStates:
    """Return all files of a DeepSpeed checkpoint in ``folder``, whose name is the tag, and
    ``latest`` next to it.

    ``dtype``: of the module in safetensors' nouns; None for that of the source's training. The fp32
    masters are the state's own, else the weights converted. ``frozen``: parameters that are not
    trained although a param group lists them; others without moments get zeros where their group
    has moments. ``buffers``: tensors of the model that are not parameters, None where that is not
    known. Raises OperationError for what the strategy cannot hold, by name; UnsupportedFormat as
    ``torch_file`` does.
    """
    with OpenFiles() as opened:
        plan = _Plan(
            strategy, folder, weights, state, processes, dtype, frozenset(frozen), buffers, opened
        )
        files = tuple(plan.files())
    return NewStates(files, plan.sources, plan.dtypes, tuple(plan.notes), plan.modules)


class _Group(Struct, frozen=True, kw_only=True):
    """A param group as DeepSpeed has it: its trained parameters, and what the flat tensor of all of
    them has.

    ``moments``: states with a flat tensor; ``shared``: values that all parameters have in common,
    such as a step.
    """

    options: Mapping[str, Any]
    shapes: Mapping[str, Shape]
    moments: tuple[str, ...]
    shared: Mapping[str, StateValue]


def module_dtype(new: NewStates, fqn: str) -> str | None:
    """Return the dtype that ``zero_files`` converts a tensor of the module to, None where it stays
    as it is.
    """
    # ZeRO-3 cuts frozen parameters into shares; all have one dtype.
    return new.dtypes.get(f"module/{fqn}", new.dtypes.get(f"rank0/frozen/{fqn}"))


class _Plan:
    """The files of one checkpoint. ``sources``, ``dtypes``, ``notes``, ``modules``: as
    ``NewStates`` has them.
    """

    def __init__(
        self,
        strategy: Strategy,
        folder: PurePosixPath,
        weights: Weights,
        state: OptimizerState,
        processes: int,
        dtype: str | None,
        frozen: frozenset[str],
        buffers: Collection[str] | None,
        opened: OpenFiles,
    ) -> None:
        self._opened = opened
        self.sources: dict[str, StoredTensor] = {}
        self.dtypes: dict[str, str] = {}
        self.notes: list[str] = []
        self.modules: dict[PurePosixPath, Mapping[str, str]] = {}
        self._strategy, self._folder, self._weights, self._state = strategy, folder, weights, state
        self._ranks = processes
        self._model_states = self._readable(state.extra.get(MODEL_STATES, {}))
        self._named = weights.named()
        groups = self._ensured_groups()
        self._moments = moments_of(
            state, {name: tensor.shape for name, tensor in self._named.items()}
        )
        self._groups = [self._group(number, group, frozen) for number, group in enumerate(groups)]
        self._trained = {
            name: shape for group in self._groups for name, shape in group.shapes.items()
        }
        self._ties = self._tied()
        self._dtype = dtype or self._model_states.get(DTYPE) or self._dtype_of_weights()
        self._buffers = self._known_buffers(buffers)
        self._frozen = {
            name: tensor.shape
            for name, tensor in self._named.items()
            if name not in self._trained and name not in self._ties and name not in self._buffers
        }
        guessed = sorted(self._frozen.keys() - frozen)
        if (
            strategy is Strategy.ZERO3
            and buffers is None
            and BUFFERS not in self._model_states
            and guessed
        ):
            self.notes.append(
                f"{weights.label}: {list_names(guessed)}: in no param group, so treated as frozen "
                "parameters; if any is really a buffer, ZeRO-3 does not load it; next, in that "
                "case: --model MODULE:FACTORY"
            )

    # What is refused, and what is said

    def _ensured_groups(self) -> tuple[ParamGroup, ...]:
        names = [name for group in self._state.groups for name in group.names]
        unknown = sorted(set(names) - set(self._named))
        if unknown:
            raise OperationError(
                f"{self._state.label}: {list_names(unknown)}: in the optimizer but not in the "
                "model; next: take both from the same checkpoint"
            )
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise OperationError(f"{self._state.label}: {list_names(twice)}: in two param groups")
        return self._state.groups

    def _readable(self, model_states: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of model states but those with values that are not read, which are
        named.
        """
        found = {}
        for key, value in model_states.items():
            unread: dict[str, str] = {}
            note_unread(key, value, unread)
            if not unread:
                found[key] = value
            self.notes += [
                f"{self._state.label}: {name!r} of its model states ({kind}) is left out: only "
                "unpickling can rebuild it; next, if the script needs it: torch.load it from the "
                "old checkpoint"
                for name, kind in unread.items()
            ]
        return found

    def _group(self, number: int, group: ParamGroup, frozen: frozenset[str]) -> _Group:
        """Return a param group with its trained parameters. Raises OperationError where it has no
        flat form.
        """
        names = [name for name in group.names if name not in frozen]
        shapes = {name: self._named[name].shape for name in names}
        held = {name: dict(self._state.states.get(name, {})) for name in names}
        keys = dict.fromkeys(key for states in held.values() for key in states)
        moments = [key for key in keys if key in self._moments]
        shared: dict[str, StateValue] = {}
        for key in keys:
            if key in moments:
                self._ensure_moments(key, held, shapes)
            else:
                shared[key] = self._common(number, key, held)
        if self._strategy is Strategy.UNIVERSAL and (homeless := sorted(shared.keys() - {STEP})):
            raise OperationError(
                f"{self._state.label}: {list_names(homeless)}: one number per parameter, but step "
                "is the only such state that a universal checkpoint can store; next: --to zero1, "
                "zero2, zero3, ddp, fsdp or fsdp-full"
            )
        without = [name for name in names if keys and not held[name]]
        if without:
            self.notes.append(
                f"{self._state.label}: {count_of(len(without), 'parameter')} without moments "
                f"({list_names(without)}): ZeRO stores the moments of a param group together, so "
                "these get zeros and the step of the others; next, if the script freezes any of "
                "these: --frozen REGEX"
            )
        if not names and self._strategy in (Strategy.ZERO1, Strategy.ZERO2):
            raise OperationError(
                f"{self._state.label}: param group {number} has no trained parameters, so "
                "DeepSpeed does not start; next: remove the group from the script"
            )
        return _Group(options=group.options, shapes=shapes, moments=tuple(moments), shared=shared)

    def _ensure_moments(
        self, key: str, held: Mapping[str, Mapping[str, StateValue]], shapes: Mapping[str, Shape]
    ) -> None:
        for name, states in held.items():
            value = states.get(key)
            label = f"{self._state.label}: {name}.{key}"
            if value is None and key not in states:
                if key not in ZERO_AT_FIRST:
                    raise OperationError(
                        f"{label}: missing from the optimizer, and its initial value is not zero; "
                        "ZeRO needs it for every parameter of a group"
                    )
            elif not isinstance(value, StoredTensor) or value.shape != shapes[name]:
                have = list(value.shape) if isinstance(value, StoredTensor) else "no tensor"
                raise OperationError(
                    f"{label}: its shape differs from that of its parameter (expected "
                    f"{list(shapes[name])}, found {have}); ZeRO partitions states like parameters, "
                    "but 8-bit optimizers, Adafactor and Shampoo have other shapes; next: --to "
                    "ddp, fsdp or fsdp-full"
                )
            elif value.dtype not in _EXACT:
                raise OperationError(
                    f"{label}: its dtype is {value.dtype}, but ZeRO keeps states in fp32; next: "
                    "--to ddp, fsdp or fsdp-full"
                )

    def _common(
        self, number: int, key: str, held: Mapping[str, Mapping[str, StateValue]]
    ) -> StateValue:
        """Return a state that ZeRO keeps once for a group. Raises OperationError where parameters
        differ in it.
        """
        named = [(name, states[key]) for name, states in held.items() if key in states]
        (first, value), *others = named
        for name, other in others:
            if self._scalar(other) != self._scalar(value):
                raise OperationError(
                    f"{self._state.label}: param group {number}: {key} is {self._scalar(value)} "
                    f"for {first} and {self._scalar(other)} for {name}, but ZeRO keeps one {key} "
                    "per group; next: --to ddp, fsdp or fsdp-full"
                )
        if key == STEP and isinstance(value, StoredTensor) and prod(value.shape) == 1:
            return value._replace(shape=())  # torch 1 counted in a tensor of one dimension
        return value

    def _dtype_of_weights(self) -> str:
        dtypes = sorted({self._named[name].dtype for name in self._trained} & _FLOATS)
        if len(dtypes) > 1:
            raise OperationError(
                f"{self._weights.label}: its weights have several dtypes ({', '.join(dtypes)}), "
                "but DeepSpeed trains in one; next: name the dtype, for example --dtype bf16"
            )
        return dtypes[0] if dtypes else _MASTER

    def _known_buffers(self, given: Collection[str] | None) -> frozenset[str]:
        """Return the tensors that are not parameters: as said, else those of other dtypes, and
        those of batch norm.
        """
        if given is None:
            given = self._model_states.get(BUFFERS)
        if given is not None:
            return frozenset(given) & self._named.keys()
        return frozenset(
            name
            for name, tensor in self._named.items()
            if name not in self._trained
            and (tensor.dtype not in _FLOATS or name.rpartition(".")[2] in _BUFFER_NAMES)
        )

    def _tied(self) -> dict[str, str]:
        """Return other name -> name, where the optimizer's own name of a tied parameter is the one
        that is kept.
        """
        found: dict[str, str] = {}
        members: dict[str, list[str]] = {}
        for other, kept in self._weights.ties.items():
            members.setdefault(kept, [kept]).append(other)
        for kept, names in members.items():
            first = next((name for name in names if name in self._trained), kept)
            found |= {name: first for name in names if name != first and name not in self._trained}
        return found

    # The files

    def files(self) -> Iterator[OutputFile]:
        """Yield them all."""
        if self._strategy is Strategy.UNIVERSAL:
            yield from self._universal()
            latest = LATEST_UNIVERSAL
        else:
            for rank in range(self._ranks):
                yield self._optimizer_file(rank)
            by_rank = self._strategy is Strategy.ZERO3
            for rank in range(self._ranks if by_rank else 1):
                yield self._model_file(rank if by_rank else None)
            latest = LATEST
        yield OutputFile(
            path=self._folder.parent / latest, parts=(Literal(self._folder.name.encode()),)
        )

    def _path(self, part: DeepSpeedPart, rank: int | None) -> PurePosixPath:
        before = _PREFIX.get(self._dtype, "") if part is DeepSpeedPart.OPTIMIZER else ""
        return self._folder / str(DeepSpeedName(part=part, rank=rank, before=before))

    def _model_file(self, rank: int | None) -> OutputFile:
        """Return a file of model states. ``rank``: None for those of all ranks, which have the
        complete module.
        """
        path = self._path(DeepSpeedPart.MODEL, rank)
        module: dict[str, NewTensor] = {}
        for name in (*(tensor.fqn for tensor in self._weights.tensors), *self._weights.ties):
            kept = self._ties.get(name, name)
            is_empty = rank is not None and kept not in self._buffers
            module[name] = self._empty(kept) if is_empty else self._module_tensor(kept)
        self.modules[path] = {name: tensor.fqn for name, tensor in module.items()}
        versions = {
            module: {"version": version} for module, version in self._weights.versions.items()
        }
        metadata = {"_metadata": ordered(versions)} if versions else None
        has_frozen = self._strategy is not Strategy.ZERO1 and (
            rank is None or self._strategy is Strategy.ZERO3
        )
        content = {
            "module": Call(function=ORDERED_DICT, items=module, state=metadata),
            "buffer_names": [name for name in module if name in self._buffers],
            "optimizer": None,
            "param_shapes": [
                sizes_of(flat) for group in self._groups for flat in self._flats(group)
            ],
            "frozen_param_shapes": sizes_of(self._frozen) if has_frozen else None,
            "shared_params": dict(self._ties) if not rank else {},
            "frozen_param_fragments": self._fragments(rank) if has_frozen else None,
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": Call(function=Global("__builtin__", "set"), args=([],)),
            "skipped_steps": 0,
            "global_steps": self._steps(),
            "dp_world_size": self._ranks,
            "mp_world_size": 1,
            "ds_config": self._config(),
            "ds_version": _VERSION,
        }
        return torch_file(path, content | self._kept_model_states())

    def _module_tensor(self, name: str) -> NewTensor:
        stored = self._named[name]
        converts = stored.dtype in _FLOATS and name not in self._buffers
        return self._tensor(f"module/{name}", stored, self._dtype if converts else stored.dtype)

    def _empty(self, name: str) -> NewTensor:
        dtype = self._dtype if self._named[name].dtype in _FLOATS else self._named[name].dtype
        return self._tensor(
            f"empty/{dtype}/{name}", StoredTensor(name, dtype, (0,), Contiguous(())), dtype
        )

    def _fragments(self, rank: int | None) -> Call:
        """Return the frozen parameters, or a rank's shares of them."""
        items: dict[str, NewTensor] = {}
        for name, shape in self._frozen.items():
            if rank is None:
                items[name] = self._module_tensor(name)
                continue
            stored = self._named[name]
            dtype = self._dtype if stored.dtype in _FLOATS else stored.dtype
            (span,) = STAGES[Strategy.ZERO3].spans({name: shape}, rank, self._ranks)
            parts = _parts(span, stored.layout, DTYPE_BITS[stored.dtype] // 8)
            cut_out = StoredTensor(name, stored.dtype, (span.size,), joined(parts))
            items[name] = self._tensor(f"rank{rank}/frozen/{name}", cut_out, dtype)
        return ordered(items)

    def _kept_model_states(self) -> dict[str, Any]:
        """Return the entries of the source's own model states that go on: counters, a scheduler,
        the script's own.
        """
        left = {BUFFERS, DTYPE, *_OF_THE_SAVE}
        return {
            key: self._placed(value, f"model_states/{key}")
            for key, value in self._model_states.items()
            if key not in left
        }

    def _steps(self) -> int:
        steps = (self._scalar(group.shared[STEP]) for group in self._groups if STEP in group.shared)
        return max((int(step) for step in steps if isinstance(step, int | float)), default=0)

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {}
        if self._strategy in STAGES:
            config["zero_optimization"] = {"stage": STAGES[self._strategy].number}
        if self._dtype in _CONFIGS:
            config[_CONFIGS[self._dtype]] = {"enabled": True}
        return config

    def _optimizer_file(self, rank: int) -> OutputFile:
        """Return the states of one rank's optimizer."""
        states: dict[int, Any] = {}
        masters: list[NewTensor] = []
        listed: list[Any] = []
        paddings: list[int] = []
        mappings: list[Any] = []
        for number, group in enumerate(self._groups):
            members = []
            for shapes in self._flats(group):
                key = f"rank{rank}/{len(masters)}"
                size = STAGES[self._strategy].size(shapes, self._ranks)
                master = self._flat(WEIGHT, shapes, rank)
                held = {
                    name: self._value(value, f"{key}/{name}")
                    for name, value in group.shared.items()
                }
                for moment in group.moments:
                    flat = self._flat(moment, shapes, rank).padded(size)
                    held[moment] = self._flat_tensor(f"{key}/{moment}", flat)
                if held:
                    states[len(masters)] = held
                members.append(len(masters))
                masters.append(self._flat_tensor(f"{key}/{WEIGHT}", master))
                paddings.append(size - master.numel)
                mappings.append(fragments_of(shapes, rank, size))
            listed.append(self._options(number, group, members))
        base = {"state": states, "param_groups": listed}
        optimizer: dict[str, Any] = {**self._global(), "zero_stage": stage_of(self._strategy)}
        if self._strategy is Strategy.ZERO3:
            optimizer |= {
                "partition_count": self._ranks,
                "optimizer_state_dict": base,
                "fp32_flat_groups": masters,
            }
        else:
            optimizer |= {
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": masters,
                "group_paddings": paddings,
                "partition_count": [self._ranks] * len(self._groups),
                "ds_version": _VERSION,
                "param_slice_mappings": mappings,
            }
        content = {
            "optimizer_state_dict": optimizer,
            "ds_config": self._config(),
            "ds_version": _VERSION,
        }
        return torch_file(self._path(DeepSpeedPart.OPTIMIZER, rank), content)

    def _flats(self, group: _Group) -> list[Mapping[str, Shape]]:
        """Return the parameters of each flat tensor of a group; of a universal checkpoint of all."""
        stage = STAGES.get(self._strategy)
        return [group.shapes] if stage is None else stage.flats(group.shapes, self._ranks)

    def _flat(self, state: str, shapes: Mapping[str, Shape], rank: int) -> FlatShare:
        """Return the part that a rank has of the masters or moments of parameters."""
        spans = [*STAGES[self._strategy].spans(shapes, rank, self._ranks)]
        parts = (_parts(span, self._in_fp32(span.name, state), WIDTH) for span in spans)
        return FlatShare(sum(span.size for span in spans), tuple(chain.from_iterable(parts)))

    def _in_fp32(self, name: str, state: str) -> Layout | None:
        """Return a parameter's master or moment, None where it has no such moment, which is zeros
        then.
        """
        if state == WEIGHT:
            stored: StateValue = self._state.masters.get(name, self._named[name])
        else:
            stored = self._state.states.get(name, {}).get(state)
        if not isinstance(stored, StoredTensor):
            return None
        if stored.dtype == _MASTER:
            return stored.layout
        if stored.dtype not in _FLOATS:
            raise OperationError(
                f"{self._weights.label}: {name!r} has dtype {stored.dtype}, which ZeRO cannot "
                "train; next: --to ddp, fsdp or fsdp-full"
            )
        return Converted(stored.layout, stored.dtype, _MASTER)

    def _flat_tensor(self, key: str, flat: FlatShare) -> NewTensor:
        stored = StoredTensor(key, _MASTER, (flat.numel,), joined(flat.parts))
        return self._tensor(key, stored, _MASTER)

    def _options(self, number: int, group: _Group, members: list[int]) -> dict[str, Any]:
        options = {
            key: self._placed(value, f"param_groups/{number}/{key}")
            for key, value in group.options.items()
        }
        return {**options, PARAMS: members}

    def _global(self) -> dict[str, Any]:
        """Return the loss scaler: the source's where it trains in the same dtype, else a new
        one.
        """
        extra, before = self._state.extra, self._model_states.get(DTYPE)
        if before == self._dtype and all(key in extra for key in _SCALERS):
            scaler = {key: self._placed(extra[key], key) for key in _SCALERS}
        elif self._dtype == "F16":
            self.notes.append(f"{self._state.label}: fp16 starts with a new loss scale of 65536")
            scaler = {LOSS_SCALER: dynamic_scaler(), DYNAMIC_SCALE: True}
        else:
            scaler = {LOSS_SCALER: _SCALER, DYNAMIC_SCALE: False}
        return {**scaler, "overflow": False}

    def _universal(self) -> Iterator[OutputFile]:
        below = self._folder / UNIVERSAL
        self._ensure_folders()
        for group in self._groups:
            for name in group.shapes:
                for state in (WEIGHT, *group.moments):
                    tensor = self._parameter_tensor(name, state)
                    yield torch_file(below / name / f"{state}.pt", {"param": tensor, "cat_dim": 0})
                if STEP in group.shared:
                    step = self._value(group.shared[STEP], f"{name}/{STEP}")
                    yield torch_file(below / name / f"{STEP}.pt", step)
        listed = [
            self._options(number, group, [number]) for number, group in enumerate(self._groups)
        ]
        content = {**self._global(), "ds_version": _VERSION, "param_groups": listed}
        why = self._not_for_zero3()
        if why:
            self.notes.append(
                f"{self._state.label}: {why}: the universal checkpoint works with ZeRO-1 and "
                "ZeRO-2 only; ZeRO-3 fails with KeyError: 'optimizer_state_dict'; for ZeRO-3, use "
                "--to zero3"
            )
        else:
            first = {
                key: self._value(value, f"shared/{key}")
                for key, value in self._groups[0].shared.items()
            }
            content["optimizer_state_dict"] = {"state": {0: first}, "param_groups": listed}
        yield torch_file(self._folder / GLOBAL_STATE, content)
        yield self._model_file(None)
        # Where ZeRO-3 looks for counters, which is all that it takes out of it.
        yield self._model_file(0)
        kept = [*self._frozen, *sorted(self._buffers)]
        if kept:
            self.notes.append(
                f"{self._weights.label}: DeepSpeed loads no buffers or frozen parameters from a "
                f"universal checkpoint ({list_names(kept)}); the script must load them itself "
                "before it prepares the model"
            )

    def _ensure_folders(self) -> None:
        """Raise OperationError for parameters whose names cannot be those of folders, each of its
        own.
        """
        for name in self._trained:
            if not _is_folder(name):
                raise OperationError(
                    f"{self._state.label}: {name!r:.200}: a universal checkpoint has a folder per "
                    "parameter, but no folder can have this name; next: --to zero1, zero2, zero3, "
                    "ddp, fsdp or fsdp-full"
                )

    def _not_for_zero3(self) -> str | None:
        """Return why ZeRO-3 would load the universal checkpoint wrongly, without an error; None
        where it would not.
        """
        first, *others = ({**group.options, **group.shared} for group in self._groups)
        for one in others:
            for key in {**first, **one}:
                if self._scalar(first.get(key)) != self._scalar(one.get(key)):
                    return (
                        f"{key} differs between param groups, but ZeRO-3 would use the value of "
                        "group 0 for all"
                    )
        if isinstance(self._groups[0].shared.get(STEP), StoredTensor) and (
            others or sum(map(prod, self._trained.values())) > SUB_GROUP_SIZE
        ):
            return (
                "all sub-groups of ZeRO-3 would share one step tensor, and each would increment it"
            )
        return None

    def _parameter_tensor(self, name: str, state: str) -> NewTensor:
        layout = self._in_fp32(name, state)
        shape = self._trained[name]
        if layout is None:
            layout = joined([Zeros(prod(shape) * WIDTH)])
        key = f"{name}/{state}"
        return self._tensor(key, StoredTensor(key, _MASTER, shape, layout), _MASTER)

    def _scalar(self, value: Any) -> Any:
        """Return the number in a tensor of one element; any other value as it is."""
        if not isinstance(value, StoredTensor) or prod(value.shape) != 1:
            return value
        return number_in(value, self._opened)

    # Tensors in the pickles

    def _tensor(self, key: str, stored: StoredTensor, dtype: str) -> NewTensor:
        self.sources[key] = stored
        if dtype != stored.dtype:
            self.dtypes[key] = dtype
        return NewTensor(key, dtype, stored.shape, prod(stored.shape) * DTYPE_BITS[dtype] // 8)

    def _value(self, value: StateValue, key: str) -> Any:
        """Return a value of a state in a pickle."""
        return self._tensor(key, value, value.dtype) if isinstance(value, StoredTensor) else value

    def _placed(self, value: Any, key: str) -> Any:
        """Return a value with ``NewTensor`` for the tensors in it."""
        return with_new_tensors(value, key, self.sources)


def _parts(span: Span, layout: Layout | None, width: int) -> tuple[Stretch | Zeros, Zeros]:
    """Return a rank's part of a parameter and its padding. ``layout``: None for zeros."""
    padding = span.size - (span.last - span.first)
    return stretch_of(layout, span.first * width, span.last * width), Zeros(padding * width)


def _is_folder(name: str) -> bool:
    """Return whether a name leads to a folder below another one, and no other name leads to the
    same one.
    """
    path = PurePosixPath(name)
    if str(path) != name or name == "." or path.is_absolute() or ".." in path.parts or "\0" in name:
        return False
    try:
        return all(len(part.encode()) <= _LONGEST for part in path.parts)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
