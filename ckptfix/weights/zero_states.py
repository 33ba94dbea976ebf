"""What one file of a DeepSpeed checkpoint says: the states of a model, or those of one rank's optimizer.

Key names from DeepSpeed 0.18, ``checkpoint/constants.py``. Values are read by opcodes and never executed: what is of a
class, as the configuration is, stays as inert as the rest.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.pickle_tree import Kind, Node, Text, Visits, child, pairs
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_file import TorchFile, read_torch_file
from ckptfix.formats.torch_tensors import read_tensor, storages
from ckptfix.formats.torch_zip import TorchZip, storage_records
from ckptfix.storage.pieces import Piece
from ckptfix.storage.reading import open_reader
from ckptfix.weights.single import bounded_layout, module_versions
from ckptfix.weights.stored import StoredTensor

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
        """How many elements it has."""
        return self.piece.length // self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """A file of model states.

    ``module``: the module's own state dict, with empty tensors in place of what ZeRO-3 partitions. ``ties``: names in
    it that share a storage -> the first of them. ``groups``: for each parameter group the shapes in the order of the
    flat partitions, None without ZeRO. ``frozen``: shapes of what is not trained, and ``fragments`` of it. ``shared``:
    other name -> name of a tied parameter. ``ranks`` and ``parallel``: how many processes data and model were divided
    among. ``left``: what else is in it. ``checksums``: record of a storage -> its CRC-32.
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
            place = (one.storage_key, one.storage_offset, one.dtype, one.shape, one.stride)
            if 0 not in one.shape and first.setdefault(place, one.fqn) != one.fqn:
                ties[one.fqn] = first[place]
    groups = child(root, "param_shapes")
    return ModelStates(
        path=path,
        module=module,
        ties=ties,
        opaque=opaque,
        versions=module_versions(file, _MODULE),
        buffers=frozenset(one.value for one in _items(child(root, "buffer_names")) if type(one) is Text),
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
        checksums=_checksums(path, file),
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
    for number, node in enumerate(_items(by_parameter if by_group is None else by_group)):
        name = f"fp32 partition {number}"
        tensor = read_tensor(Text(name, 0, 0), node, known) if type(node) is Node else None
        if tensor is None:
            raise FormatError(f"{name} is not a plain tensor")
        flats.append(_flat(path, file, tensor.storage_key, tensor.dtype, tensor.begin, tensor.end))
    counts = child(states, "partition_count")
    every = [_count(one) for one in _items(counts)] if type(counts) is Node else [_count(counts)]
    return OptimizerStates(
        path=path,
        by_parameter=by_group is None,
        ranks=max((one for one in every if one is not None), default=None),
        flats=tuple(flats),
        checksums=_checksums(path, file),
    )


def _checksums(path: Path, file: TorchFile) -> dict[Piece, int]:
    """Return the records of all storages with their CRC-32. One of 0 was never written (torch can leave them out)."""
    if not isinstance(file.container, TorchZip):
        return {}
    return {
        Piece(path, record.data_offset, record.size): record.crc
        for record in storage_records(file.container).values()
        if record.crc and record.is_stored and record.size
    }


def _flat(path: Path, file: TorchFile, key: str, dtype: str, begin: int | None, end: int | None) -> Flat:
    """Return a tensor that lies in one run of the file."""
    storage = file.storage_ranges.get(key)
    if storage is None or begin is None or end is None:
        raise FormatError(f"the storage {key!r:.80} is compressed, or its elements do not follow one another")
    return Flat(dtype, Piece(path, storage[0] + begin, end - begin))


def _items(node: object) -> tuple[Any, ...]:
    """Return the values of a list or a tuple."""
    if type(node) is Node and node.kind is Kind.LIST:
        return tuple(node.items or ())
    return node if type(node) is tuple else ()


def _groups(node: object) -> Iterator[Shapes]:
    visits = Visits()
    for group in _items(node):
        if not visits.first(group):  # a million references to one dict of a million names would never end
            raise FormatError("param_shapes is not a list of dicts, or two of its groups are one dict")
        yield _shapes(group)


def _shapes(node: object) -> dict[str, tuple[int, ...]]:
    return {name.value: _shape(name.value, size) for name, size in pairs(node) if type(name) is Text}


def _shape(name: str, value: Any) -> tuple[int, ...]:
    """Return a shape: a ``torch.Size``, a tuple or a list of sizes."""
    if type(value) is Node and value.kind is Kind.CALL and type(value.args) is tuple and len(value.args) == 1:
        value = value.args[0]
    sizes = _items(value)
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
