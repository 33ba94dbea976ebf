"""The files of DeepSpeed's ZeRO: the states of all ranks, and the partitions that it cuts weights
and moments into.

Facts from DeepSpeed 0.18 and 0.19 (``utils/zero_to_fp32.py``, key names
``checkpoint/constants.py``). The fp32 weights are in the optimizer states, cut into a partition for
each rank; buffers and frozen parameters are in the model states, under ZeRO-1 and 2 next to a
complete copy of the weights in the dtype of training. ZeRO-1 and 2 lay the parameters of a group
end to end, pad that and cut it into one partition a rank; the padding of the last rank is not
saved, but that of its moments is. ZeRO-3 cuts each parameter by itself, so that rank r has elements
``r * share`` to ``(r + 1) * share``, with ``share = ceil(n / ranks)``; a rank lays its shares end
to end, over one flat partition for each sub-group.

Values are read by opcodes and never executed: instances of classes, such as the configuration, stay
inert.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct

from ckptfix.checkpoint.deepspeed_files import AGAIN, DeepSpeedFiles, other_kind
from ckptfix.checkpoint.rank_names import DeepSpeedPart, parse_deepspeed_name
from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.pickle_kinds import kind_of, members
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.pickle_tree import (
    CALLS,
    Kind,
    Node,
    Text,
    Visits,
    attribute,
    child,
    is_dict_like,
    items_of,
    pairs,
    text_keys,
)
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_file import TorchFile, read_torch_file
from ckptfix.formats.torch_tensors import storages
from ckptfix.formats.torch_zip import TorchZip
from ckptfix.storage.files import AnyPath
from ckptfix.storage.paths import leads_nowhere
from ckptfix.storage.reading import Piece, open_reader
from ckptfix.tensors.single_files import (
    bounded_layout,
    module_versions,
    record_checksums,
    tensor_of,
)
from ckptfix.tensors.stored import Contiguous, StoredTensor
from ckptfix.tensors.zero_shares import partition_spans
from ckptfix.wording import Brief, list_names

Shapes = Mapping[str, tuple[int, ...]]
"""Name -> shape."""

Fragments = tuple[tuple[tuple[str, int | None], ...], ...]
"""For each parameter group the names in a partition, and how many elements of each are in it."""

_READ_TEXT = """
    module buffer_names param_shapes frozen_param_shapes frozen_param_fragments shared_params ds_config ds_version
    dp_world_size mp_world_size sparse_tensor_module_names"""
_READ_HERE = frozenset(_READ_TEXT.split())
_MODULE, _FRAGMENTS = ("module",), ("frozen_param_fragments",)
_HALF = ("fp16", "bf16")
_SIZE = ("torch.Size",)
_SIZES = (*_SIZE, "tuple", "list")
_FIRST_WITH_SHARED = (0, 9)
"""The version of DeepSpeed whose model states list tied parameters as ``shared_params``."""

_MANY, _MAX_DIMENSIONS = 1 << 62, 64
_TELLING = 1024
"""Bytes of a partition that are equal on two ranks in a copy alone."""

T = TypeVar("T")


class Flat(NamedTuple):
    """A flat tensor, as ranks store their part of something: its dtype, and where its elements
    are.
    """

    dtype: str
    piece: Piece

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return DTYPE_BITS[self.dtype] // 8

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return self.piece.length // self.width


class ModelStates(Brief, Struct, frozen=True, kw_only=True):
    """A file of model states.

    ``module``: the module's own state dict, with empty tensors in place of those that ZeRO-3
    partitions. ``ties``: names in it that share a storage -> the first of them. ``groups``: for
    each parameter group the shapes in the order of the flat partitions, None without ZeRO.
    ``frozen``: shapes of parameters that are not trained, and ``fragments`` of them.
    ``leaves_frozen_out``: the save has no place for them. ``shared``: other name -> name of a tied
    parameter. ``ranks`` and ``parallel``: numbers of processes that data and model were divided
    among. ``is_dealt``: the shapes of a group are in the order in which ``round_robin_gradients``
    dealt them to the ranks. ``has_fp32_masters``: the configuration leaves the weights that the
    optimizer updates in fp32; False where unknown. ``optimizer_prefix``: how the names of the
    optimizer's files begin, None unless every save of this configuration has such files.
    ``left``: its other contents. ``saved_rank``:
    the rank in the name that the file was saved under. ``checksums``: record of a storage -> its
    CRC-32.
    """

    path: AnyPath
    module: Mapping[str, StoredTensor]
    ties: Mapping[str, str]
    opaque: tuple[str, ...]
    versions: Mapping[str, int]
    buffers: frozenset[str]
    groups: tuple[Shapes, ...] | None
    frozen: Shapes
    fragments: Mapping[str, Flat]
    leaves_frozen_out: bool
    shared: Mapping[str, str]
    ranks: int | None
    parallel: int | None
    is_dealt: bool
    has_fp32_masters: bool
    optimizer_prefix: str | None
    left: tuple[str, ...]
    saved_rank: int | None
    checksums: Mapping[Piece, int]


class OptimizerStates(Brief, Struct, frozen=True, kw_only=True):
    """A file of one rank's optimizer: its flat partitions, of each parameter group or,
    ``by_parameter``, of sub-groups.

    ``ranks``: how many partitions there are, None where that is not said. ``is_aligned``: padding
    follows parameters (``parameter_alignment`` of DeepSpeed 0.19). ``fragments``: () in files of
    ZeRO-3 and before DeepSpeed 0.7. ``saved_rank``: the rank in the name that the file was saved
    under. ``checksums``: record of a storage -> its CRC-32.
    """

    path: AnyPath
    by_parameter: bool
    ranks: int | None
    stage: int | None
    is_aligned: bool
    flats: tuple[Flat, ...]
    fragments: Fragments
    saved_rank: int | None
    checksums: Mapping[Piece, int]


def read_model_states(path: AnyPath) -> ModelStates:
    """Read a file of model states. Raises OperationError when it is none, or is damaged;
    OSError.
    """
    return read_states_file(path, _model_states)


def read_optimizer_states(path: AnyPath) -> OptimizerStates:
    """Read a file of optimizer states. Raises OperationError when it is none, or is damaged;
    OSError.
    """
    return read_states_file(path, optimizer_states)


@paused_gc()
def read_states_file(path: AnyPath, understand: Callable[[AnyPath, TorchFile], T]) -> T:
    """Return what ``understand`` makes of a file. Raises OperationError when it is damaged, another
    file, a folder or a broken link; OSError.
    """
    try:
        with open_reader(path) as reader:
            file = read_torch_file(reader)
        return understand(path, file)
    except FormatError as error:
        raise _damaged(path, str(error)) from error
    except OSError as error:
        # A folder opens like a file: only its bytes cannot be read, an error without a path.
        if nowhere := leads_nowhere(path):
            raise _damaged(path, nowhere) from error
        raise


def _damaged(path: AnyPath, why: str) -> OperationError:
    return OperationError(
        f"{path}: {why}; next: copy it again from where the run saved it, or use another checkpoint"
    )


def _model_states(path: AnyPath, file: TorchFile) -> ModelStates:
    root = file.tree.root
    if child(root, "buffer_names") is None or child(root, "module") is None:
        raise FormatError("it holds no DeepSpeed model states: buffer_names or module is missing")
    _ensure_loadable(root)
    module: dict[str, StoredTensor] = {}
    ties: dict[str, str] = {}
    fragments: dict[str, Flat] = {}
    opaque: tuple[str, ...] = ()
    first: dict[object, str] = {}
    for state_dict in file.state_dicts:
        if state_dict.path == _MODULE:
            opaque = state_dict.opaque_keys
        for one in state_dict.tensors if state_dict.path in (_MODULE, _FRAGMENTS) else ():
            stored = StoredTensor(one.fqn, one.dtype, one.shape, bounded_layout(path, file, one))
            if state_dict.path == _FRAGMENTS:
                fragments[one.fqn] = flat_of(stored)
                continue
            module[one.fqn] = stored
            if 0 not in one.shape and (kept := first.setdefault(one.view, one.fqn)) != one.fqn:
                ties[one.fqn] = kept
    groups = child(root, "param_shapes")
    # zero_to_fp32 takes any sizes for the trained parameters of ZeRO-1 and 2, and asks the others
    # for their numel().
    name = parse_deepspeed_name(path.name)
    is_cut = name is not None and name.rank is not None
    kinds = _SIZE if is_cut else _SIZES
    return ModelStates(
        path=path,
        module=module,
        ties=ties,
        opaque=opaque,
        versions=module_versions(file, _MODULE),
        buffers=frozenset(
            one.value for one in items_of(child(root, "buffer_names")) if type(one) is Text
        ),
        groups=None if groups is None else tuple(_groups(groups, kinds)),
        frozen=_shapes(child(root, "frozen_param_shapes"), _SIZE),
        fragments=fragments,
        leaves_frozen_out=child(root, "frozen_param_shapes") is None,
        shared={
            name.value: kept.value
            for name, kept in pairs(child(root, "shared_params"))
            if type(name) is Text and type(kept) is Text
        },
        ranks=_count(child(root, "dp_world_size")),
        parallel=_count(child(root, "mp_world_size")),
        is_dealt=_is_dealt(child(root, "ds_config")),
        has_fp32_masters=_has_fp32_masters(child(root, "ds_config")),
        optimizer_prefix=None if groups is None else _optimizer_prefix(child(root, "ds_config")),
        left=tuple(
            key.value
            for key, value in pairs(root)
            if type(key) is Text and key.value not in _READ_HERE and value is not None
        ),
        saved_rank=_saved_rank(file, DeepSpeedPart.MODEL),
        checksums=dict(record_checksums(path, file)),
    )


def _ensure_loadable(root: object) -> None:
    """Raise FormatError for model states that ``zero_to_fp32`` refuses, or of which it loses a part
    in silence.
    """
    for key in ("module", "shared_params", "frozen_param_shapes", "frozen_param_fragments"):
        value = child(root, key)
        if value is not None and not is_dict_like(value):
            raise FormatError(f"{key} is not a dict")
    names = child(root, "buffer_names")
    if type(names) is not Node or names.kind is not Kind.LIST:
        raise FormatError("buffer_names is not a list")
    if any(type(name) is not Text for name in items_of(names)):
        raise FormatError("buffer_names has a name that is not a string")
    buffers = {name.value for name in items_of(names)}
    module, shapes, fragments = (
        {key.value: value for key, value in pairs(child(root, name)) if type(key) is Text}
        for name in ("module", "frozen_param_shapes", "frozen_param_fragments")
    )
    # A module may leave some of its buffers out of its state dict, by a hook.
    if buffers and not buffers & module.keys():
        raise FormatError(
            f"buffer_names lists {list_names(sorted(buffers))}, but module has none of them"
        )
    tensors = {name: module[name] for name in sorted(buffers & module.keys())} | fragments
    for name, value in tensors.items():
        if type(value) is not Node or value.kind not in CALLS:
            raise FormatError(f"{name!r:.200} is not a tensor")
    if child(root, "param_shapes") is None:
        return
    keys = text_keys(root)
    shared = child(root, "shared_params")
    if "shared_params" not in keys and _version(child(root, "ds_version")) >= _FIRST_WITH_SHARED:
        raise FormatError("shared_params is missing")
    if "shared_params" in keys and (
        shared is None or any(type(kept) is not Text for _, kept in pairs(shared))
    ):
        raise FormatError("shared_params is not a dict of names")
    if lone := sorted(shapes.keys() ^ fragments.keys()):
        raise FormatError(
            f"only one of frozen_param_shapes and frozen_param_fragments has {lone[0]!r:.200}"
        )


def _version(value: object) -> tuple[int, ...]:
    """Return the numbers of a version of DeepSpeed, () where it is not said."""
    parts = value.value.split(".")[:2] if type(value) is Text else []
    return tuple(int(part[:9]) for part in parts if part.isdecimal())


def optimizer_states(path: AnyPath, file: TorchFile) -> OptimizerStates:
    """Return the partitions in a file of a rank's optimizer. Raises FormatError when it has
    none.
    """
    states = child(file.tree.root, "optimizer_state_dict")
    if states is file.tree.root:
        # zero_to_fp32 takes a second optimizer_state_dict out of the first, and then looks for the
        # first.
        raise FormatError("its optimizer_state_dict refers to itself")
    by_group, by_parameter = (
        child(states, "single_partition_of_fp32_groups"),
        child(states, "fp32_flat_groups"),
    )
    if by_group is None and by_parameter is None:
        raise FormatError(
            "it holds no ZeRO optimizer states: single_partition_of_fp32_groups and "
            "fp32_flat_groups are both missing"
        )
    known = storages(file.tree)
    flats = []
    for number, node in enumerate(items_of(by_parameter if by_group is None else by_group)):
        name = f"fp32 partition {number}"
        tensor = tensor_of(path, file, node, name, known)
        if tensor is None or len(tensor.shape) != 1:
            raise FormatError(f"{name} is not a plain one-dimensional tensor")
        flats.append(flat_of(tensor))
    return OptimizerStates(
        path=path,
        by_parameter=by_group is None,
        ranks=partition_count(file),
        stage=_stage(child(states, "zero_stage")),
        is_aligned=any(
            padding != 0
            for group in items_of(child(states, "param_alignment_paddings"))
            for padding in items_of(group)
        ),
        flats=tuple(flats),
        fragments=tuple(_fragments(child(states, "param_slice_mappings"))),
        saved_rank=_saved_rank(file, DeepSpeedPart.OPTIMIZER),
        checksums=dict(record_checksums(path, file)),
    )


def partition_count(file: TorchFile) -> int | None:
    """Return the number of ranks among which the optimizer in a file was partitioned, None where
    the file does not say it. Raises FormatError.
    """
    counts = child(child(file.tree.root, "optimizer_state_dict"), "partition_count")
    every = [_count(one) for one in items_of(counts)] if type(counts) is Node else [_count(counts)]
    if counts is not None and (not every or None in every):
        raise FormatError("partition_count is not a number of ranks")
    return max((count for count in every if count is not None), default=None)


def _fragments(mappings: object) -> Iterator[tuple[tuple[str, int | None], ...]]:
    visits = Visits()
    known: dict[int, Any] = {}
    for group in items_of(mappings):
        if not visits.first(
            group
        ):  # a million references to one dict, as for ``_groups``: they prove nothing
            return
        yield tuple(
            (name.value, _count(attribute(address, "numel", known)))
            for name, address in pairs(group)
            if type(name) is Text
        )


def _stage(value: object) -> int | None:
    """Return the ZeRO stage: a number, or DeepSpeed's enum of one."""
    if (
        type(value) is Node
        and kind_of(value) == "ZeroStageEnum"
        and type(value.args) is tuple
        and len(value.args) == 1
    ):
        value = value.args[0]
    return value if type(value) is int else None


def _saved_rank(file: TorchFile, part: DeepSpeedPart) -> int | None:
    """Return the rank in the name of the file at its save: torch.save names the archive's folder
    after the file.
    """
    name = (
        parse_deepspeed_name(f"{file.container.root}.pt")
        if isinstance(file.container, TorchZip)
        else None
    )
    return name.rank if name is not None and name.part is part else None


def flat_of(tensor: StoredTensor) -> Flat:
    """Return a tensor as the run of the file that it is. Raises FormatError when its elements lie
    apart.
    """
    if not isinstance(tensor.layout, Contiguous) or len(tensor.layout.pieces) > 1:
        raise FormatError(f"the elements of {tensor.fqn!r:.200} are not contiguous")
    return Flat(tensor.dtype, *(tensor.layout.pieces or (Piece(Path(), 0, 0),)))


def _is_dealt(config: object) -> bool:
    zero = child(config, "zero_optimization")
    return child(zero, "round_robin_gradients") is True and child(zero, "stage") in (1, 2)


def _has_fp32_masters(config: object) -> bool:
    """DeepSpeed 0.19 keeps others only by ``fp16_master_weights_and_grads``, or the same of
    ``bf16``.
    """
    lower = (
        child(section, f"{kind}_master_weights_and_grads")
        for _, section in pairs(config)
        for kind in _HALF
    )
    return is_dict_like(config) and not any(value not in (None, False) for value in lower)


def _optimizer_prefix(config: object) -> str | None:
    """Return how the names of the optimizer's files begin (``ModelStates``)."""
    stage = child(child(config, "zero_optimization"), "stage")
    # DeepSpeed 0.18.2 gives bf16 with this dtype an optimizer of fp16 under ZeRO-1, which saves no
    # states.
    accumulates = child(child(config, "data_types"), "grad_accum_dtype")
    if stage not in (1, 2, 3) or (stage == 1 and accumulates is not None):
        return None
    is_bf16 = any(child(child(config, key), "enabled") is True for key in ("bf16", "bfloat16"))
    return "bf16_" if is_bf16 else ""


def _groups(node: object, kinds: Collection[str]) -> Iterator[Shapes]:
    visits = Visits()
    for group in items_of(node):
        # A million references to one dict of a million names would never end.
        if not (is_dict_like(group) and visits.first(group)):
            raise FormatError(
                "param_shapes is not a list of dicts, or two of its groups are the same dict"
            )
        yield _shapes(group, kinds)


def _shapes(node: object, kinds: Collection[str]) -> dict[str, tuple[int, ...]]:
    return {
        name.value: _shape(name.value, size, kinds)
        for name, size in pairs(node)
        if type(name) is Text
    }


def _shape(name: str, value: Any, kinds: Collection[str]) -> tuple[int, ...]:
    sizes = members(value)
    if (
        kind_of(value) not in kinds
        or len(sizes) > _MAX_DIMENSIONS
        or not all(type(size) is int and 0 <= size <= _MANY for size in sizes)
        or prod(sizes) > _MANY
    ):
        raise FormatError(f"the shape of {name!r:.200} is invalid")
    return sizes


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 < value <= _MANY else None


def read_models(files: DeepSpeedFiles) -> tuple[ModelStates, ...]:
    """Return the model states of a checkpoint: of the first rank, and of all where each has a share
    of what is frozen.

    Raises OperationError as ``read_model_states`` does, OSError.
    """
    names = [name for _, name in sorted(files.models.items())]
    first = read_model_states(files.folder / names[0])
    others = (read_model_states(files.folder / name) for name in names[1:])
    kept = [first]
    for model in others:
        # Without frozen parameters they repeat the first, but loads read each of them.
        # zero_to_fp32 cuts by those of the first file, in their order.
        if _in_order(model) != _in_order(first):
            raise OperationError(
                f"{model.path}: its param_shapes differ from those of {first.path.name}; {AGAIN}"
            )
        if first.frozen:
            kept.append(model)
    return tuple(kept)


def _in_order(model: ModelStates) -> list[list[tuple[str, tuple[int, ...]]]] | None:
    return None if model.groups is None else [list(shapes.items()) for shapes in model.groups]


def ensure_one_save(
    files: DeepSpeedFiles, models: Sequence[ModelStates], optimizers: Sequence[OptimizerStates]
) -> None:
    """Raise OperationError unless there is a file of every rank, of one kind; MissingRankError,
    OtherKindError.
    """
    if (models[0].parallel or 1) > 1:
        raise other_kind(
            files.folder,
            f"the model is split into {models[0].parallel} parts for tensor parallelism",
        )
    if files.is_universal and not models[0].frozen:
        return  # the parameters themselves are in no file of a rank
    # Loads take the number of ranks and the stage of all files from the first.
    said = [one.ranks for one in optimizers if one.ranks is not None]
    files.ensure_ranks(said[0] if said else models[0].ranks, models[0].optimizer_prefix)
    names = [parse_deepspeed_name(one.path.name) for one in optimizers[:1]]
    # The name has had "_" before "optim_states" since DeepSpeed 0.3.14, and every file its number
    # of ranks since 0.3.0.
    if optimizers and optimizers[0].ranks is None and names[0] is not None and names[0].between:
        raise OperationError(f"{optimizers[0].path}: partition_count is missing; {AGAIN}")
    for one in optimizers:
        if one.by_parameter != files.by_rank:
            mode, other = (
                ("ZeRO-3", "ZeRO-1 or ZeRO-2")
                if one.by_parameter
                else ("ZeRO-1 or ZeRO-2", "ZeRO-3")
            )
            raise OperationError(
                f"{one.path}: it is from {mode}, but {models[0].path.name} is from {other}: the "
                f"files come from two saves; {AGAIN}"
            )
    if optimizers and optimizers[0].stage not in ((3,) if files.by_rank else (0, 1, 2)):
        raise OperationError(
            f"{optimizers[0].path}: its zero_stage does not match its partitions; {AGAIN}"
        )
    if any(states.is_aligned for states in optimizers):
        raise other_kind(files.folder, "each parameter is padded for parameter_alignment")
    for rank, model in enumerate(models if files.by_rank else ()):
        if model.saved_rank not in (None, rank):
            raise OperationError(
                f"{model.path}: it holds the model states of rank {model.saved_rank} (expected rank "
                f"{rank}); {AGAIN}"
            )
    for name, shape in models[0].frozen.items() if not files.by_rank else ():
        fragment = models[0].fragments.get(name)
        if fragment is not None and fragment.numel != prod(shape):
            raise OperationError(
                f"{models[0].path}: the frozen {name!r} has {fragment.numel} elements, but its "
                f"shape has {prod(shape)}; {AGAIN}"
            )
    for one in optimizers if models[0].has_fp32_masters else ():
        if dtypes := sorted({flat.dtype for flat in one.flats} - {"F32"}):
            raise OperationError(
                f"{one.path}: its partitions are {dtypes[0]}, but the run kept its trained weights "
                f"in F32; {AGAIN}"
            )
    if optimizers:
        _ensure_order(models[0], optimizers)
        _ensure_shapes(models[0], optimizers)


def _ensure_order(model: ModelStates, optimizers: Sequence[OptimizerStates]) -> None:
    """Raise OperationError for a file with the partition of another rank, which a load takes
    without an error.

    Fragments prove the rank, unless several ranks have nothing but a part of one large parameter.
    Else the name that the file was saved under proves it, or tensors whose checksums equal those of
    another rank.
    """
    expected = _expected_fragments(model, optimizers)
    first_with: dict[object, int] = {}
    for rank, states in enumerate(optimizers):
        possible = expected.get(states.fragments, range(len(optimizers)))
        tensors = sorted((piece.length, crc) for piece, crc in states.checksums.items())
        # Ranks with nothing but padding are equal: of a few elements, or parameters and moments are
        # zeros.
        largest = tensors[-1][0] if tensors else 0
        is_telling = (
            largest >= _TELLING and len({crc for length, crc in tensors if length == largest}) > 1
        )
        equal = first_with.setdefault(tuple(tensors), rank) if is_telling else rank
        if rank not in possible:
            held = possible[0]
        elif len(possible) == 1:
            held = rank
        else:
            held = equal if states.saved_rank is None else states.saved_rank
        if held != rank:
            raise OperationError(
                f"{states.path}: it holds the partition of rank {held} (expected rank {rank}); "
                f"{AGAIN}"
            )


def _expected_fragments(
    model: ModelStates, optimizers: Sequence[OptimizerStates]
) -> Mapping[Fragments, Sequence[int]]:
    """Return the fragments that a rank must have -> the ranks that must have these."""
    groups = model.groups or ()
    if any(len(states.flats) != len(groups) for states in optimizers):
        return {}
    ordered: list[tuple[Shapes, int]] = []
    for number, shapes in enumerate(groups):
        # DeepSpeed lists them in the order of the param group, also where it dealt them.
        names = undealt(list(shapes), len(optimizers)) if model.is_dealt else shapes
        size = max((states.flats[number].numel for states in optimizers), default=0)
        ordered.append(({name: shapes[name] for name in names}, size))
    expected: dict[Fragments, list[int]] = {}
    for rank in range(len(optimizers)):
        spans = (partition_spans(shapes, rank, size) for shapes, size in ordered)
        fragments = tuple(tuple((span.name, span.size) for span in of_one) for of_one in spans)
        expected.setdefault(fragments, []).append(rank)
    return expected


def _ensure_shapes(model: ModelStates, optimizers: Sequence[OptimizerStates]) -> None:
    """Raise OperationError for shapes in another order than the fragments of all ranks, or of other
    sizes.

    ``zero_to_fp32`` cuts the partitions by the shapes alone: other weights get the values, without
    an error.
    """
    groups = model.groups or ()
    if any(len(states.fragments) != len(groups) for states in optimizers):
        return
    for number, shapes in enumerate(groups):
        held: dict[str, int] = {}
        for states in optimizers:
            for name, numel in states.fragments[number]:
                if numel is None:
                    return
                held[name] = held.get(name, 0) + numel
        wanted = {name: prod(shape) for name, shape in shapes.items() if prod(shape)}
        names = list(wanted)
        # Former versions dealt nothing under ZeRO-1, whatever the configuration says.
        orders = (names, undealt(names, len(optimizers)) if model.is_dealt else names)
        if held and (held != wanted or list(held) not in orders):
            raise OperationError(
                f"{model.path}: its param_shapes of group {number} differ in order or size from "
                f"the parameters in the optimizer states; {AGAIN}"
            )


def undealt(names: Sequence[str], ranks: int) -> list[str]:
    """Return the order that names had before every ``ranks``-th of them, from the first on, went to
    one rank.
    """
    dealt = [number for first in range(ranks) for number in range(first, len(names), ranks)]
    found = [""] * len(names)
    for name, number in zip(names, dealt, strict=True):
        found[number] = name
    return found
