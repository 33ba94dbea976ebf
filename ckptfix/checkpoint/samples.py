"""Samples of the tensors of a save, by which two saves of a run are compared after a few reads.

The first page of each tensor is read, and less of each where there are many, so that a folder costs
1 MiB at most. Two healthy saves differ in their first sample or soon after. Nothing here knows
which tensors are trained: weights count as equal only where a sample of each tensor is, so that a
frozen base with a changing adapter is another save. Tensors that are too many are not compared.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, groupby
from math import prod
from operator import attrgetter
from pathlib import PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.dcp import DcpFolder, scan_dcp_folders
from ckptfix.checkpoint.deepspeed_files import deepspeed_folders
from ckptfix.checkpoint.folder import CheckpointFolder, Component, scan_folder
from ckptfix.checkpoint.load_inputs import SAMPLE, SAMPLED
from ckptfix.checkpoint.model_configs import OTHER_WEIGHTS, may_hold_weights
from ckptfix.checkpoint.roles import NOT_STATES, Role
from ckptfix.checkpoint.second_prepare import LEAST_RATE
from ckptfix.formats.safetensors_file import WeightsIndex
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_file import TorchFile
from ckptfix.storage.comparing import Run, first_difference
from ckptfix.storage.files import AnyPath, etag_of
from ckptfix.storage.reading import open_reader

_SCALAR = 8
"""Bytes of the longest number."""

_LEAST = 64
"""Bytes of the shortest sample: fewer may not change where a tensor does."""

_NARROW = ("F16", "BF16", "F8", "F6", "F4")
"""Beginnings of dtypes in which a usual step may change no weight: in bfloat16 1 + 1e-3 is 1."""


class Piece(NamedTuple):
    """``length`` bytes of a tensor, or of a part of one, from ``offset`` of the file ``path`` of a
    folder.

    ``frame``: those of them that are not the tensor's. An item of DCP is a zip file of torch: of
    2.13 its tensor begins at byte 704, and 870 bytes follow. ``dtype``: of the tensor, "" where it
    is not known. ``shape``: of a weight in a file that holds it whole, None of any other tensor.
    """

    path: PurePosixPath
    offset: int
    length: int
    frame: int = 0
    dtype: str = ""
    shape: tuple[int, ...] | None = None

    @property
    def is_framed(self) -> bool:
        """True where the frame is about as long as the tensor: no place is surely of the tensor."""
        return self.frame > 0 and self.length < 2 * self.frame + _LEAST

    def sample(self, size: int) -> "Piece":
        """Return ``size`` bytes of the tensor, wherever in the piece it begins."""
        if self.is_framed:
            return self._replace(frame=0)
        length = min(size, self.length - 2 * self.frame)
        return Piece(self.path, self.offset + self.frame, length)


def weights_in(folder: CheckpointFolder, sharded: Sequence[DcpFolder]) -> tuple[Piece, ...] | None:
    """Return the bytes of all weights in a folder and in its sub-folders, in the order of the
    files.

    None where a file that may hold weights cannot be read, or is of a kind that is not compared, as
    DeepSpeed's: then equal samples show nothing. Objects of ``register_for_checkpointing`` may be
    what is trained: their tensors follow the weights. Raises OSError.
    """
    if any(deepspeed_folders(folder)) or any(
        path.name.endswith(OTHER_WEIGHTS) for path in folder.strays
    ):
        return None
    pieces: list[Piece] = []
    for component in folder.components:
        if component.role in NOT_STATES and not isinstance(component.content, WeightsIndex):
            if component.content is None or component.problem is not None:
                return None
            pieces += _pieces_of(component)
    for state in sharded:
        if state.name is None or state.name.role is Role.MODEL:
            if state.metadata is None:
                return None
            pieces += _items_of(state)
    known = {state.path for state in sharded}
    for where in folder.plain_subfolders:
        if where not in known and may_hold_weights(folder.root / where):
            below = scan_folder(folder.root / where)
            inside = weights_in(below, scan_dcp_folders(below))
            if inside is None:
                return None
            pieces += (piece._replace(path=where / piece.path) for piece in inside)
    for component in folder.components if pieces else ():
        if component.role is Role.CUSTOM:
            if component.content is None or component.problem is not None:
                return None
            pieces += (piece._replace(shape=None) for piece in _pieces_of(component))
    return tuple(pieces)


def dtypes_of(pieces: Iterable[Piece]) -> set[str]:
    """Return the dtypes of tensors as far as they are known."""
    return {piece.dtype for piece in pieces if piece.dtype}


def must_change(rate: float | None, dtypes: Collection[str]) -> bool:
    """Return whether steps at this learning rate change weights that are all of these dtypes."""
    return (
        rate is not None
        and rate > LEAST_RATE
        and bool(dtypes)
        and not any(dtype.startswith(_NARROW) for dtype in dtypes)
    )


def is_table(shape: Sequence[int]) -> bool:
    """Return whether a parameter may be an embedding, of which a step changes some rows.

    Textual inversion sets back all rows but those of the new tokens, though they have moments.
    """
    return len(shape) == 2 and shape[0] > shape[1]


def optimizers_in(
    folder: CheckpointFolder, sharded: Sequence[DcpFolder]
) -> tuple[Piece, ...] | None:
    """Return the bytes of all tensors of the optimizers in a folder, as of ``weights_in``."""
    if any(deepspeed_folders(folder)):
        return None
    pieces: list[Piece] = []
    for component in folder.components:
        if component.role is Role.OPTIMIZER:
            if not isinstance(component.content, TorchFile) or component.problem is not None:
                return None
            pieces += _pieces_of(component)
    for state in sharded:
        if state.name is not None and state.name.role is Role.OPTIMIZER:
            if state.metadata is None:
                return None
            # Each step is an item of 1.5 KB, and the moments show as much.
            pieces += _items_of(state, shortest=_SCALAR + 1)
    return tuple(pieces)


def samples_of(pieces: Sequence[Piece], most: int = SAMPLED) -> tuple[Piece, ...] | None:
    """Return a sample of each piece, ``most`` bytes in all; None where they are too many for that.

    None may be left out: of a mixture of 9,216 frozen experts only the head may be trained.
    """
    pieces = [piece for piece in pieces if piece.length]
    framed = [piece.length for piece in pieces if piece.is_framed]
    size = min(SAMPLE, (most - sum(framed)) // max(1, len(pieces) - len(framed)))
    return tuple(piece.sample(size) for piece in pieces) if size >= _LEAST else None


def are_equal(root: AnyPath, other: AnyPath, pieces: Sequence[Piece]) -> bool:
    """Return whether two folders have the same bytes at these places, in files of the same sizes.
    Raises OSError.

    The first piece of each file is compared before the rest: of a healthy save nothing else is
    read. Objects of a store are compared by their ETags, which S3 and the Hub make from the bytes:
    to read one sample costs as many requests as a whole check of a small folder.
    """
    files = _by_file(pieces)
    by_etags = are_equal_by_etags(root, other, [path for path, _ in files])
    if by_etags is not None:
        return by_etags
    for is_first in (True, False):
        for path, runs in files:
            with open_reader(root / path) as reader, open_reader(other / path) as reader_of_other:
                some = runs[:1] if is_first else runs[1:]
                if reader.size != reader_of_other.size:
                    return False
                if first_difference(reader, reader_of_other, some) is not None:
                    return False
    return True


def are_equal_by_etags(
    root: AnyPath, other: AnyPath, paths: Iterable[PurePosixPath]
) -> bool | None:
    """Return whether two folders of a store have the same files at these paths, None without an
    ETag of any.
    """
    etags = [(etag_of(root / path), etag_of(other / path)) for path in paths]
    if not any(chain.from_iterable(etags)):
        return None
    return all(ours == theirs for ours, theirs in etags)


def digest_of(root: AnyPath, pieces: Sequence[Piece]) -> str:
    """Return a digest of the bytes of pieces and of their places: equal for saves with equal bytes.
    Raises OSError.
    """
    digest = hashlib.sha1(usedforsecurity=False)
    for path, of_file in groupby(pieces, key=attrgetter("path")):
        with open_reader(root / path) as reader:
            places = [(piece.offset, piece.length) for piece in of_file]
            digest.update(f"{path}\0{reader.size}\0{places}\0".encode())
            # Just written, as by a save, they are in memory: the calls take a third of the time.
            if not reader.is_cached(places[0][0]):
                reader.expect(places)
            for offset, length in places:
                digest.update(reader.read(offset, length))
    return digest.hexdigest()


def _by_file(pieces: Iterable[Piece]) -> list[tuple[PurePosixPath, list[Run]]]:
    return [
        (path, [Run(piece.offset, piece.offset, piece.length) for piece in of_file])
        for path, of_file in groupby(pieces, key=attrgetter("path"))
    ]


def _pieces_of(component: Component) -> Iterator[Piece]:
    """Yield the tensors of a file; of a torch file its storages, as those of an optimizer have no
    key.

    torch before 1.6 wrote them in the order of their places in memory: such files count as
    different.
    """
    tensors = {tensor.data_offsets: tensor for tensor in component.tensors if tensor.data_offsets}
    ranges: Iterable[tuple[int, int]] = tensors
    if isinstance(component.content, TorchFile):
        storages = component.content.storage_ranges.values()
        ranges = ((offset, offset + length) for offset, length in storages)
    for begin, end in ranges:
        tensor = tensors.get((begin, end))
        dtype, shape = (tensor.dtype, tensor.shape) if tensor is not None else ("", None)
        yield Piece(component.path, begin, end - begin, dtype=dtype, shape=shape)


def _items_of(state: DcpFolder, shortest: int = 1) -> Iterator[Piece]:
    """Yield the items of a DCP folder but for tensors of fewer bytes."""
    if state.metadata is None:
        return
    sizes: dict[tuple[str, tuple[int, ...] | None], int] = {
        (tensor.fqn, chunk.offsets): prod(chunk.lengths) * DTYPE_BITS[tensor.dtype] // 8
        for tensor in state.metadata.tensors
        for chunk in tensor.chunks
        if tensor.dtype in DTYPE_BITS
    }
    dtypes = {tensor.fqn: str(tensor.dtype) for tensor in state.metadata.tensors}
    for item in sorted(state.metadata.stored.values(), key=lambda item: (item.path, item.offset)):
        size = sizes.get((item.fqn, item.offsets), shortest)
        # A compressed item may be shorter than its tensor.
        frame = item.length - size if shortest <= size < item.length else item.length
        if size >= shortest:
            where = state.path / item.path
            own_frame = 0 if item.offsets is None else frame
            yield Piece(where, item.offset, item.length, own_frame, dtypes.get(item.fqn, ""))
