"""Models and optimizers that each rank saved alone: accelerate's FSDP with ``use_dcp=False``,
without any metadata.

Each rank has its part of every tensor in a file of its own (``pytorch_model_fsdp_0_rank1.bin``).
The pickle says where that part lies: a ``DTensor`` (FSDP2) has its shape, the device mesh with the
rank's coordinate, and one placement for each dimension of the mesh; a ``ShardedTensor`` (FSDP1) has
offsets and lengths. They are read as opcodes, never made.

Facts from torch 2.13: ``distributed/tensor/_dtensor_spec.py``, ``placement_types.py`` (a dimension
is cut as ``torch.chunk`` does), ``distributed/device_mesh.py``, ``distributed/_shard``. Up to 2.8 a
mesh pickled its ranks as a tensor ``mesh`` instead of a layout.
"""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.checkpoint.deepspeed_files import AGAIN, MissingRankError
from ckptfix.checkpoint.rank_names import parse_rank_file_name
from ckptfix.checkpoint.roles import Role
from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.dcp_items import coverage_problem
from ckptfix.formats.dcp_metadata import DcpTensor
from ckptfix.formats.dcp_stream import Chunk
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.pickle_tree import Kind, Node, attribute, items_of
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_file import read_torch_file
from ckptfix.formats.torch_tensors import TORCH_DTYPES, is_tensor
from ckptfix.storage.files import AnyPath
from ckptfix.storage.paths import command
from ckptfix.storage.reading import Piece, open_reader
from ckptfix.tensors.dcp_tensors import layout_of_chunks
from ckptfix.tensors.optimizer_files import (
    FLAT,
    PickledValues,
    Unread,
    flat_parameter,
    optimizer_state,
)
from ckptfix.tensors.optimizers import OptimizerState, Strategy
from ckptfix.tensors.single_files import module_versions, record_checksums
from ckptfix.tensors.stored import Contiguous, Format, StoredTensor, Strided, Weights

_WRAPPED = "_rebuild_from_type_v2"
_MANY = 1 << 40
_MOST_DIMENSIONS = 64


class Shard(NamedTuple):
    """A rank's part of a tensor: its first index in every dimension, and where its bytes are."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    part: StoredTensor


Files = Mapping[int, str]
"""Rank -> name of its file."""


def rank_files(folder: AnyPath, names: Collection[str]) -> dict[tuple[Role, int], dict[int, str]]:
    """Return the files that ranks saved alone among the names in a folder, by role and position."""
    found: dict[tuple[Role, int], dict[int, str]] = {}
    for name in sorted(names):
        parsed = parse_rank_file_name(name)
        if parsed is not None and (folder / name).is_file():
            found.setdefault((parsed.role, parsed.index), {})[parsed.rank] = name
    return found


class _RankValues(PickledValues):
    """The values in the file of one rank; a part of a tensor is a ``Shard``. ``ranks``: at least so
    many saved it.
    """

    ranks = 1

    def tensor(self, name: str, node: Node) -> Any:
        """Return a tensor, or the shard that this rank has of one. Raises as
        ``PickledValues.tensor`` does.
        """
        head, args = node.head.head[1], node.args
        if head != _WRAPPED or type(args) is not tuple or len(args) != 4:
            return super().tensor(name, node)
        _, cls, made, state = args
        kind = cls.head[1] if type(cls) is Node and cls.kind is Kind.GLOBAL else ""
        if kind == "DTensor":
            return self._placed(name, made, state)
        return (
            self._cut(name, made, state) if kind == "ShardedTensor" else super().tensor(name, node)
        )

    def _local(self, name: str, made: Any, node: Any) -> tuple[tuple[int, ...], StoredTensor]:
        """Return the shape of the complete tensor, and the part that this rank has."""
        shape = _sizes(made[2]) if type(made) is tuple and len(made) > 2 else None
        dtype = (
            made[1].head[1]
            if shape is not None and type(made[1]) is Node and made[1].kind is Kind.GLOBAL
            else ""
        )
        local = super().tensor(name, node) if type(node) is Node and is_tensor(node) else None
        if (
            shape is None
            or not isinstance(local, StoredTensor)
            or local.dtype != TORCH_DTYPES.get(dtype)
        ):
            raise FormatError(f"this rank's part of {name!r:.200} cannot be read")
        return shape, local

    def _placed(self, name: str, made: Any, state: Any) -> Any:
        """Return the shard of a DTensor."""
        attributes = Node(Kind.NEW)
        attributes.states = [state]
        shape, local = self._local(name, made, attribute(attributes, "_local_tensor"))
        spec = attribute(attributes, "_spec")
        mesh, placements = attribute(spec, "mesh"), items_of(attribute(spec, "placements"))
        sizes, place = self._mesh(name, mesh)
        if len(placements) != len(sizes):
            raise FormatError(
                f"{name!r:.200} has {len(placements)} placements on a mesh of {len(sizes)} "
                "dimensions"
            )
        offsets, lengths = [0] * len(shape), list(shape)
        for placement, size, coordinate in zip(placements, sizes, place, strict=True):
            head = (
                placement.head if type(placement) is Node and placement.kind is Kind.NEW else None
            )
            kind = head.head[1] if type(head) is Node and head.kind is Kind.GLOBAL else ""
            dimension = attribute(placement, "dim")
            if kind == "Replicate" or (size == 1 and kind in ("Shard", "_StridedShard")):
                continue
            if kind != "Shard" or type(dimension) is not int or not 0 <= dimension < len(shape):
                return Unread(
                    "a tensor that is split in a way that ckptfix does not read "
                    f"({kind or 'unknown'}), as in tensor parallelism"
                )
            share = -(-lengths[dimension] // size)
            begin = min(coordinate * share, lengths[dimension])
            offsets[dimension] += begin
            lengths[dimension] = min(share, lengths[dimension] - begin)
        if tuple(lengths) != local.shape:
            raise FormatError(
                f"this rank's part of {name!r:.200} has shape {list(local.shape)}, but its "
                f"placements say {lengths} of {list(shape)}"
            )
        return Shard(shape, tuple(offsets), local)

    def _mesh(self, name: str, mesh: Any) -> tuple[list[int], tuple[Any, ...]]:
        """Return the lengths of a device mesh, and the coordinate of this rank in it."""
        axes = attribute(attribute(mesh, "_layout"), "axes")
        if type(axes) is tuple:
            sizes = [_product(attribute(axis, "shape")) for axis in axes]
        # Torch 2.9 and 2.10.
        elif (shape := attribute(attribute(mesh, "_layout"), "shape")) is not None:
            sizes = [_product(one) for one in (shape if type(shape) is tuple else (shape,))]
        else:
            sizes = list(self._sizes_of(attribute(mesh, "mesh")))
        place = items_of(attribute(mesh, "_coordinate_on_dim"))
        is_inside = len(place) == len(sizes) and all(
            type(one) is int and 0 <= one < size for one, size in zip(place, sizes, strict=True)
        )
        if not sizes or not is_inside or prod(sizes) > _MANY:
            raise FormatError(
                f"the device mesh of {name!r:.200} cannot be read, or this rank is not in it"
            )
        self.ranks = max(
            self.ranks, prod(sizes), prod(self._sizes_of(attribute(mesh, "_rank_map")) or (1,))
        )
        return sizes, place

    def _sizes_of(self, node: Any) -> tuple[int, ...]:
        """Return the shape of a tensor of ranks, whose numbers are not needed."""
        args = node.args if type(node) is Node and is_tensor(node) else None
        sizes = _sizes(args[2]) if type(args) is tuple and len(args) > 2 else None
        return sizes or ()

    def _cut(self, name: str, made: Any, state: Any) -> Shard:
        """Return the shard of a ShardedTensor; one without elements where this rank has none."""
        shards = items_of(state[0]) if type(state) is tuple and len(state) == 5 else (None, None)
        every = items_of(attribute(state[1], "shards_metadata")) if len(shards) < 2 else ()
        for one in every:
            rank = attribute(attribute(one, "placement"), "_rank")
            self.ranks = max(self.ranks, rank + 1 if type(rank) is int and 0 <= rank < _MANY else 1)
        if not shards:
            shape = _sizes(made[2]) if type(made) is tuple and len(made) > 2 else None
            if shape is not None:
                return Shard(
                    shape,
                    (0,) * len(shape),
                    StoredTensor(name, "", (0, *shape[1:]), Contiguous(())),
                )
        shape, local = self._local(
            name, made, attribute(shards[0], "tensor") if len(shards) == 1 else None
        )
        metadata = attribute(shards[0], "metadata")
        offsets = _sizes(items_of(attribute(metadata, "shard_offsets")))
        lengths = _sizes(items_of(attribute(metadata, "shard_sizes")))
        if offsets is None or lengths != local.shape or len(offsets) != len(shape):
            raise FormatError(
                f"this rank's part of {name!r:.200} has shape {list(local.shape)}, but its "
                f"metadata says {lengths}"
            )
        return Shard(shape, offsets, local)


def _sizes(value: Any) -> tuple[int, ...] | None:
    """Return a tuple of lengths, also out of a ``torch.Size``; None for anything else."""
    if (
        type(value) is Node
        and value.kind is Kind.CALL
        and type(value.args) is tuple
        and len(value.args) == 1
    ):
        value = value.args[0]
    if type(value) is not tuple or len(value) > _MOST_DIMENSIONS:
        return None
    return value if all(type(one) is int and 0 <= one <= _MANY for one in value) else None


def _product(shape: Any) -> int:
    """Return the number of elements of a length, or of lengths in tuples, of a mesh's layout."""
    values = shape if type(shape) is tuple else (shape,)
    return prod(
        _product(one) if type(one) is tuple else one if type(one) is int else 0
        for one in values[:8]
    )


class _Read(Struct, frozen=True, kw_only=True):
    """The files of all ranks. ``values``: of each rank, in their order. ``ranks``: how many saved
    it.

    ``versions``: as ``Weights`` has them, of the first file.
    """

    paths: tuple[PurePosixPath, ...]
    values: tuple[Any, ...]
    ranks: int
    versions: Mapping[str, int]
    checksums: Mapping[Piece, int]


def _read(root: AnyPath, files: Files) -> _Read:
    """Read the files of all ranks. Raises MissingRankError when one is missing, OperationError."""
    values: list[Any] = []
    checksums: dict[Piece, int] = {}
    versions: dict[str, int] = {}
    ranks = max(files) + 1
    for _, name in sorted(files.items()):
        path = root / name
        try:
            with open_reader(path) as reader:
                file = read_torch_file(reader)
            reading = _RankValues(path, file)
            values.append(reading.value(file.tree.root))
        except FormatError as error:
            raise OperationError(f"{path}: {error}; next: {command('check', root)}") from error
        checksums |= dict(record_checksums(path, file))
        versions = versions or module_versions(file, ())
        ranks = max(ranks, reading.ranks)
    missing = next((rank for rank in range(ranks) if rank not in files), None)
    if missing is not None:
        parsed = parse_rank_file_name(next(iter(files.values())))
        assert parsed is not None, "listed by its name"
        name = str(replace(parsed, rank=missing))
        raise MissingRankError(
            f"{root}: {name}, the file of rank {missing}, is missing: {ranks} ranks saved the "
            f"checkpoint, and each has its own part of every tensor; {AGAIN}",
            path=root / name,
            rank=missing,
            files=ranks - len(files),
        )
    paths = tuple(PurePosixPath(name) for _, name in sorted(files.items()))
    return _Read(
        paths=paths, values=tuple(values), ranks=ranks, versions=versions, checksums=checksums
    )


def _together(values: Sequence[Any], name: str = "") -> Any:
    """Return the value that the ranks hold together: shards become one tensor, anything else is
    rank 0's.
    """
    first = values[0]
    if isinstance(first, Shard):
        if not all(isinstance(one, Shard) and one.shape == first.shape for one in values):
            raise FormatError(f"{name!r:.200} does not have the same shape on every rank")
        return _joined(name, values)
    if isinstance(first, dict):
        if not all(isinstance(one, dict) and one.keys() == first.keys() for one in values):
            raise FormatError(
                f"the ranks do not have the same keys{f' below {name!r:.200}' if name else ''}"
            )
        return {
            key: _together([one[key] for one in values], f"{name}.{key}" if name else str(key))
            for key in first
        }
    if isinstance(first, list):
        if not all(isinstance(one, list) and len(one) == len(first) for one in values):
            raise FormatError(f"{name!r:.200} does not have the same length on every rank")
        return [
            _together(list(one), f"{name}.{place}")
            for place, one in enumerate(zip(*values, strict=True))
        ]
    return first


def _joined(name: str, shards: Sequence[Shard]) -> StoredTensor:
    """Return the tensor whose parts these are; of parts that several ranks have, the first."""
    parts: dict[Chunk, Contiguous | Strided] = {}
    for _, offsets, part in shards:
        if 0 not in part.shape:
            assert isinstance(part.layout, Contiguous | Strided), "as bounded_layout makes them"
            parts.setdefault(Chunk(offsets, part.shape), part.layout)
    dtypes = {one.part.dtype for one in shards if one.part.dtype}
    if len(dtypes) != 1:
        raise FormatError(f"{name!r:.200} has several dtypes: {', '.join(sorted(dtypes))}")
    (dtype,) = dtypes
    shape = shards[0].shape
    problem = coverage_problem(DcpTensor(name, dtype, "", shape, tuple(parts), 0))
    if problem is not None:
        raise FormatError(f"{name!r:.200}: {problem}")
    return StoredTensor(
        name, dtype, shape, layout_of_chunks(shape, sorted(parts.items()), DTYPE_BITS[dtype] // 8)
    )


@paused_gc()
def rank_optimizer(root: AnyPath, index: int, files: Files) -> OptimizerState:
    """Return the optimizer in the files of all ranks.

    Raises MissingRankError with the first rank that has none, OperationError when a file cannot be
    read, OSError.
    """
    read = _read(root, files)
    try:
        return optimizer_state(
            _together(read.values),
            label=_label(files),
            index=index,
            files=read.paths,
            strategy=Strategy.FSDP,
            world_size=read.ranks,
            checksums=read.checksums,
        )
    except FormatError as error:
        raise OperationError(
            f"{root / read.paths[0]}: {error}; next: {command('check', root)}"
        ) from error


@paused_gc()
def rank_weights(root: AnyPath, index: int, files: Files) -> Weights:
    """Return the weights in the files of all ranks. Raises as ``rank_optimizer`` does, and for flat
    parameters.
    """
    read = _read(root, files)
    try:
        state = _together(read.values)
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise FormatError("it is not a state dict")
        if flat := next((name for name in state if name.rpartition(".")[2].startswith(FLAT)), None):
            raise FormatError(flat_parameter(flat))
    except FormatError as error:
        raise OperationError(
            f"{root / read.paths[0]}: {error}; next: {command('check', root)}"
        ) from error
    tensors: dict[tuple[object, ...], StoredTensor] = {}
    ties: dict[str, str] = {}
    for name, value in state.items():
        if isinstance(value, StoredTensor):
            place = (value.dtype, value.shape, value.layout) if value.nbytes else (name,)
            if tensors.setdefault(place, value) is not value:
                ties[name] = tensors[place].fqn
    opaque = tuple(name for name, value in state.items() if not isinstance(value, StoredTensor))
    return Weights(
        label=_label(files),
        format=Format.TORCH,
        index=index,
        files=read.paths,
        tensors=tuple(tensors.values()),
        ties=ties,
        opaque=opaque,
        unread={name: state[name].kind for name in opaque if isinstance(state[name], Unread)},
        versions=read.versions,
        checksums=read.checksums,
    )


def _label(files: Files) -> str:
    """Return the name of all files together: ``optimizer_0_rank*.bin``."""
    parsed = parse_rank_file_name(next(iter(files.values())))
    assert parsed is not None, "listed by its name"
    return str(parsed).replace(f"_rank{parsed.rank}.", "_rank*.")
