"""The weights in a DeepSpeed checkpoint: the states of all ranks, and the partitions that ZeRO cuts them into.

Facts from DeepSpeed 0.18 (``utils/zero_to_fp32.py``, key names ``checkpoint/constants.py``). The fp32 weights
are in the optimizer states, cut into a partition for each rank; buffers and frozen parameters are in the
model states, under ZeRO-1 and 2 next to a complete copy of the weights in the dtype of training. ZeRO-1 and 2
lay the parameters of a group end to end, pad that and cut it into one partition a rank; the padding of the
last rank is not saved. ZeRO-3 cuts each parameter by itself, so that rank r has elements ``r * share`` to
``(r + 1) * share``, with ``share = ceil(n / ranks)``; a rank lays its shares end to end, over one flat
partition for each sub-group.

Values are read by opcodes and never executed: instances of classes, such as the configuration, stay inert.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import accumulate
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from ckptfix.checkpoint.deepspeed_files import AGAIN, DeepSpeedFiles, list_files, other_kind
from ckptfix.dataclass import dataclass
from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.pickle_tree import Kind, Node, Text, Visits, child, items_of, pairs
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_file import TorchFile, read_torch_file
from ckptfix.formats.torch_tensors import read_tensor, storages
from ckptfix.storage.reading import Piece, open_reader
from ckptfix.tensors.single_files import bounded_layout, module_versions, record_checksums
from ckptfix.tensors.stored import Contiguous, Format, StoredTensor, Strided, Weights

Shapes = Mapping[str, tuple[int, ...]]
"""Name -> shape."""

_READ_TEXT = """
    module buffer_names param_shapes frozen_param_shapes frozen_param_fragments shared_params ds_config ds_version
    dp_world_size mp_world_size sparse_tensor_module_names"""
_READ_HERE = frozenset(_READ_TEXT.split())
_MODULE, _FRAGMENTS = ("module",), ("frozen_param_fragments",)
_MANY, _MAX_DIMENSIONS = 1 << 62, 64
T = TypeVar("T")


class Flat(NamedTuple):
    """A flat tensor, as ranks store their part of something: its dtype, and where its elements are."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """A file of model states.

    ``module``: the module's own state dict, with empty tensors in place of those that ZeRO-3 partitions.
    ``ties``: names in it that share a storage -> the first of them. ``groups``: for each parameter group the
    shapes in the order of the flat partitions, None without ZeRO. ``frozen``: shapes of parameters that are
    not trained, and ``fragments`` of them. ``shared``: other name -> name of a tied parameter. ``ranks`` and
    ``parallel``: numbers of processes that data and model were divided among. ``left``: its other contents.
    ``checksums``: record of a storage -> its CRC-32.
    """

    path: Path
    module: Mapping[str, StoredTensor] = field(repr=False)
    ties: Mapping[str, str]
    opaque: tuple[str, ...]
    versions: Mapping[str, int] = field(repr=False)
    buffers: frozenset[str]
    groups: tuple[Shapes, ...] | None
    frozen: Shapes
    fragments: Mapping[str, Flat]
    shared: Mapping[str, str]
    ranks: int | None
    parallel: int | None
    left: tuple[str, ...]
    checksums: Mapping[Piece, int] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStates:
    """A file of one rank's optimizer: its flat partitions, of each parameter group or, ``by_parameter``, of sub-groups.

    ``ranks``: how many partitions there are, None where that is not said. ``checksums``: record of a storage -> its
    CRC-32.
    """

    path: Path
    by_parameter: bool
    ranks: int | None
    flats: tuple[Flat, ...]
    checksums: Mapping[Piece, int] = field(repr=False)


def read_model_states(path: Path) -> ModelStates:
    """Read a file of model states. Raises OperationError when it is none, or is damaged; OSError."""
    return _read(path, _model_states)


def read_optimizer_states(path: Path) -> OptimizerStates:
    """Read a file of optimizer states. Raises OperationError when it is none, or is damaged; OSError."""
    return _read(path, _optimizer_states)


@paused_gc()
def _read(path: Path, understand: Callable[[Path, TorchFile], T]) -> T:
    try:
        with open_reader(path) as reader:
            file = read_torch_file(reader)
        return understand(path, file)
    except FormatError as error:
        raise OperationError(
            f"{path}: {error}; next: copy it again from where the run saved it, or use another checkpoint"
        ) from error


def _model_states(path: Path, file: TorchFile) -> ModelStates:
    root = file.tree.root
    if child(root, "buffer_names") is None or child(root, "module") is None:
        raise FormatError("it holds no model states of DeepSpeed: buffer_names or module is missing")
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
                fragments[one.fqn] = _flat(path, file, one.storage_key, one.dtype, one.begin, one.end)
                continue
            module[one.fqn] = stored
            if 0 not in one.shape and (kept := first.setdefault(one.view, one.fqn)) != one.fqn:
                ties[one.fqn] = kept
    groups = child(root, "param_shapes")
    return ModelStates(
        path=path,
        module=module,
        ties=ties,
        opaque=opaque,
        versions=module_versions(file, _MODULE),
        buffers=frozenset(one.value for one in items_of(child(root, "buffer_names")) if type(one) is Text),
        groups=None if groups is None else tuple(_groups(groups)),
        frozen=_shapes(child(root, "frozen_param_shapes")),
        fragments=fragments,
        shared={
            name.value: kept.value
            for name, kept in pairs(child(root, "shared_params"))
            if type(name) is Text and type(kept) is Text
        },
        ranks=_count(child(root, "dp_world_size")),
        parallel=_count(child(root, "mp_world_size")),
        left=tuple(
            key.value
            for key, value in pairs(root)
            if type(key) is Text and key.value not in _READ_HERE and value is not None
        ),
        checksums=dict(record_checksums(path, file)),
    )


def _optimizer_states(path: Path, file: TorchFile) -> OptimizerStates:
    states = child(file.tree.root, "optimizer_state_dict")
    by_group, by_parameter = (
        child(states, "single_partition_of_fp32_groups"),
        child(states, "fp32_flat_groups"),
    )
    if by_group is None and by_parameter is None:
        raise FormatError(
            "it holds no optimizer states of ZeRO: neither single_partition_of_fp32_groups nor fp32_flat_groups"
        )
    known = storages(file.tree)
    flats = []
    for number, node in enumerate(items_of(by_parameter if by_group is None else by_group)):
        name = f"fp32 partition {number}"
        tensor = read_tensor(Text(name, 0, 0), node, known) if type(node) is Node else None
        if tensor is None:
            raise FormatError(f"{name} is not a plain tensor")
        flats.append(_flat(path, file, tensor.storage_key, tensor.dtype, tensor.begin, tensor.end))
    counts = child(states, "partition_count")
    every = [_count(one) for one in items_of(counts)] if type(counts) is Node else [_count(counts)]
    return OptimizerStates(
        path=path,
        by_parameter=by_group is None,
        ranks=max((one for one in every if one is not None), default=None),
        flats=tuple(flats),
        checksums=dict(record_checksums(path, file)),
    )


def _flat(path: Path, file: TorchFile, key: str, dtype: str, begin: int | None, end: int | None) -> Flat:
    """Return a tensor that lies in one run of the file."""
    storage = file.storage_ranges.get(key)
    if storage is None or begin is None or end is None:
        raise FormatError(f"the storage {key!r:.80} is compressed, or its elements do not follow one another")
    return Flat(dtype, Piece(path, storage[0] + begin, end - begin))


def _groups(node: object) -> Iterator[Shapes]:
    visits = Visits()
    for group in items_of(node):
        if not visits.first(group):  # a million references to one dict of a million names would never end
            raise FormatError("param_shapes is not a list of dicts, or two of its groups are one dict")
        yield _shapes(group)


def _shapes(node: object) -> dict[str, tuple[int, ...]]:
    return {name.value: _shape(name.value, size) for name, size in pairs(node) if type(name) is Text}


def _shape(name: str, value: Any) -> tuple[int, ...]:
    """Return a shape: a ``torch.Size``, a tuple or a list of sizes."""
    if type(value) is Node and value.kind is Kind.CALL and type(value.args) is tuple and len(value.args) == 1:
        value = value.args[0]
    sizes = items_of(value)
    sound = (value == () or sizes) and len(sizes) <= _MAX_DIMENSIONS
    if (
        not sound
        or not all(type(size) is int and 0 <= size <= _MANY for size in sizes)
        or prod(sizes) > _MANY
    ):
        raise FormatError(f"the shape of {name!r:.200} is not a shape")
    return sizes


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 < value <= _MANY else None


class _Run:
    """Flat tensors of one dtype, end to end. Offsets count elements."""

    def __init__(self, flats: Sequence[Flat]) -> None:
        self._flats = flats
        self._starts = [0, *accumulate(flat.numel for flat in flats)]
        self.dtype = _dtype(flats)

    @property
    def numel(self) -> int:
        """All elements."""
        return self._starts[-1]

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield where these elements are."""
        number = bisect_right(self._starts, begin) - 1
        while begin < end:
            flat, start = self._flats[number], self._starts[number]
            stop = min(end, self._starts[number + 1])
            if begin < stop:
                path, offset, _ = flat.piece
                yield Piece(path, offset + (begin - start) * flat.width, (stop - begin) * flat.width)
                begin = stop
            number += 1


def _dtype(flats: Sequence[Flat]) -> str:
    """Return the dtype that all have. Raises OperationError when they differ."""
    dtypes = sorted({flat.dtype for flat in flats})
    if len(dtypes) > 1:
        raise OperationError(
            f"{flats[0].piece.path.parent}: partitions of several dtypes ({', '.join(dtypes)}); {AGAIN}"
        )
    return dtypes[0] if dtypes else "F32"


def from_groups(model: ModelStates, optimizers: Sequence[OptimizerStates]) -> dict[str, StoredTensor]:
    """Return the trained parameters of ZeRO-1 and 2, in fp32.

    Raises OperationError when the partitions do not have the elements that the shapes need.
    """
    groups = model.groups or ()
    for one in optimizers:
        if len(one.flats) != len(groups):
            raise OperationError(
                f"{one.path}: partitions of {len(one.flats)} parameter groups, {model.path.name} has {len(groups)}; "
                f"{AGAIN}"
            )
    found: dict[str, StoredTensor] = {}
    for number, shapes in enumerate(groups):
        run = _Run([one.flats[number] for one in optimizers])
        wanted = sum(prod(shape) for shape in shapes.values())
        step = 2 * len(optimizers)  # both are padded to a multiple of this, or not at all
        if wanted > run.numel or -(-wanted // step) != -(-run.numel // step):
            raise OperationError(
                f"{model.path.parent}: the partitions of parameter group {number} have {run.numel} elements, its "
                f"{len(shapes)} parameters take {wanted}; {AGAIN}"
            )
        offset = 0
        for name, shape in shapes.items():
            end = offset + prod(shape)
            found[name] = StoredTensor(name, run.dtype, shape, Contiguous(tuple(run.pieces(offset, end))))
            offset = end
    return found


def from_shares(
    models: Sequence[ModelStates], optimizers: Sequence[OptimizerStates]
) -> dict[str, StoredTensor]:
    """Return the parameters of ZeRO-3: the trained ones in fp32, and the frozen ones as they are.

    Raises OperationError when the partitions do not have the elements that the shapes need.
    """
    ranks = len(optimizers)
    shapes = {name: shape for group in models[0].groups or () for name, shape in group.items()}
    runs = [_Run(one.flats) for one in optimizers]
    _dtype([flat for one in optimizers for flat in one.flats])
    wanted = sum(-(-prod(shape) // ranks) for shape in shapes.values())
    for run, one in zip(runs, optimizers, strict=True):
        if run.numel != wanted:
            raise OperationError(
                f"{one.path}: partitions of {run.numel} elements, the shares of {len(shapes)} parameters take "
                f"{wanted}; {AGAIN}"
            )
    found: dict[str, StoredTensor] = {}
    offset = 0
    for name, shape in shapes.items():
        found[name] = _gathered(name, shape, runs, offset)
        offset += -(-prod(shape) // ranks)
    for name, shape in models[0].frozen.items():
        fragments = [one.fragments.get(name) for one in models]
        share = -(-prod(shape) // ranks)
        for states, fragment in zip(models, fragments, strict=True):
            have = fragment.numel if fragment is not None else 0
            if have != share:
                raise OperationError(
                    f"{states.path}: {have} of the {share} elements that its share of {name!r} has; {AGAIN}"
                )
        flats = [one for one in fragments if one is not None]
        _dtype(flats)
        found[name] = _gathered(name, shape, [_Run([one]) for one in flats], 0)
    return found


def _gathered(name: str, shape: tuple[int, ...], runs: Sequence[_Run], offset: int) -> StoredTensor:
    """Return a parameter whose share begins at ``offset`` of every rank's run."""
    numel = prod(shape)
    share = -(-numel // len(runs))
    pieces: list[Piece] = []
    for rank, run in enumerate(runs):
        take = min(share, numel - rank * share)  # the last shares can be shorter, or of nothing but padding
        pieces += run.pieces(offset, offset + max(take, 0))
    return StoredTensor(name, runs[0].dtype, shape, Contiguous(tuple(pieces)))


def deepspeed_weights(root: Path, where: PurePosixPath, index: int, *, original: bool = False) -> Weights:
    """Return the weights of a DeepSpeed checkpoint: the fp32 ones that the optimizer keeps.

    Buffers and frozen parameters are as the model had them. Where no rank saved an optimizer, and with ``original``,
    the weights are in the dtype of training. Raises MissingRankError, OtherKindError for tensor, pipeline and expert
    parallel and universal checkpoints, OperationError when a tensor is missing, when the numbers contradict one
    another, and under ZeRO-3 for ``original``, as only fp32 is stored there; OSError.
    """
    files = list_files(root / where)
    optimizers = [read_optimizer_states(files.folder / name) for _, name in sorted(files.optimizers.items())]
    names = [name for _, name in sorted(files.models.items())]
    models = [read_model_states(files.folder / names[0])]
    if models[0].frozen:  # else the others repeat the first
        models += [read_model_states(files.folder / name) for name in names[1:]]
    _check(files, models, optimizers)
    placed: Mapping[str, StoredTensor] = {}
    if files.by_rank and original:
        dtypes = sorted({one.dtype for one in models[0].module.values() if one.dtype.startswith(("F", "BF"))})
        raise OperationError(
            f"{files.folder}: ZeRO-3 stores its weights in fp32 alone (the training had them in {', '.join(dtypes)}); "
            "next: name the dtype, as in --dtype bf16"
        )
    if files.by_rank:
        placed = from_shares(models, optimizers)
    elif optimizers and not original:
        placed = from_groups(models[0], optimizers)
    tensors, ties = _named(models[0], placed, by_rank=files.by_rank)
    return Weights(
        label=str(where) if where.parts else root.name,
        format=Format.DEEPSPEED,
        index=index,
        files=tuple(where / name for name in sorted({*files.models.values(), *files.optimizers.values()})),
        tensors=tensors,
        ties=ties,
        opaque=tuple(name for name in models[0].opaque if name not in ties),
        left=(*(["optimizer_state_dict"] if optimizers else []), *models[0].left),
        versions=models[0].versions,
        checksums=_checksums(tensors, [*models, *optimizers]),
    )


def _checksums(
    tensors: Iterable[StoredTensor], states: Iterable[ModelStates | OptimizerStates]
) -> dict[Piece, int]:
    """Return the records that tensors lie in, most of them in a part of one, with their CRC-32."""
    starts = {one.path: sorted(one.checksums) for one in states}
    offsets = {path: [record.offset for record in records] for path, records in starts.items()}
    used: set[Piece] = set()
    for tensor in tensors:
        layout = tensor.layout
        pieces = (layout.storage,) if isinstance(layout, Strided) else ()
        for path, offset, _ in layout.pieces if isinstance(layout, Contiguous) else pieces:
            number = bisect_right(offsets[path], offset) - 1
            if number >= 0 and offset < sum(starts[path][number][1:]):
                used.add(starts[path][number])
    return {piece: crc for one in states for piece, crc in one.checksums.items() if piece in used}


def _check(
    files: DeepSpeedFiles, models: Sequence[ModelStates], optimizers: Sequence[OptimizerStates]
) -> None:
    """Raise OperationError unless there is a file of every rank, of one kind."""
    if (models[0].parallel or 1) > 1:
        raise other_kind(
            files.folder, f"the model is cut into {models[0].parallel} parts, for tensor parallelism"
        )
    said = [one.ranks for one in optimizers if one.ranks is not None]
    files.ensure_ranks(max(said) if said else models[0].ranks)
    for one in optimizers:
        if one.by_parameter != files.by_rank:
            mode, other = ("ZeRO-3", "ZeRO-1 or 2") if one.by_parameter else ("ZeRO-1 or 2", "ZeRO-3")
            raise OperationError(
                f"{one.path}: it is of {mode}, and {models[0].path.name} of {other}: two saves are mixed; {AGAIN}"
            )


def _named(
    model: ModelStates, placed: Mapping[str, StoredTensor], *, by_rank: bool
) -> tuple[tuple[StoredTensor, ...], dict[str, str]]:
    """Return the tensors in the order of the module, and the ties: placed tensors, and the module's own for
    the others.
    """
    found: dict[str, StoredTensor] = {}
    ties: dict[str, str] = {}
    for name, stored in model.module.items():
        tied = model.shared.get(name) or model.ties.get(name)
        if name in placed:
            found[name] = placed[name]
        elif tied is not None and tied != name:
            ties[name] = tied
        elif by_rank and 0 in stored.shape and name not in model.buffers:
            raise OperationError(
                f"{model.path}: the parameter {name!r} is in no partition: it was frozen, and left out of the save; "
                "next: take it from the model that the training began with"
            )
        else:
            found[name] = stored
    found.update((name, tensor) for name, tensor in placed.items() if name not in found)
    for name, kept in ties.items():
        if kept not in found:
            raise OperationError(f"{model.path}: {name!r} is tied to {kept!r}, which is not there; {AGAIN}")
    return tuple(found.values()), ties
