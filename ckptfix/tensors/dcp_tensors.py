"""The weights in folders of torch.distributed.checkpoint (DCP), of Accelerate's FSDP and of
anybody.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from pathlib import PurePosixPath

from msgspec.structs import replace

from ckptfix.checkpoint.dcp import (
    DATA_SUFFIX,
    METADATA_UNFINISHED,
    belongs,
    is_metadata_renamed,
    lost_metadata,
)
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.folder_names import parse_folder_name
from ckptfix.checkpoint.roles import Role
from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.dcp_items import ItemReader, KnownItem, SavedTensor, dcp_problems
from ckptfix.formats.dcp_metadata import (
    METADATA_NAME,
    DcpMetadata,
    DcpTensor,
    keys_beside,
    model_names,
    read_dcp_metadata,
)
from ckptfix.formats.dcp_stream import Chunk, StoredItem
from ckptfix.formats.pickle_stream import parse, paused_gc
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.storage.files import AnyPath
from ckptfix.storage.paths import command, unreadable
from ckptfix.storage.reading import Piece, open_reader
from ckptfix.tensors.stored import (
    Contiguous,
    Format,
    Layout,
    StoredTensor,
    Strided,
    Tile,
    Tiled,
    Weights,
)
from ckptfix.wording import count_of, list_names

_NOTHING = b"N."  # the shortest pickle


def dcp_folders(folder: CheckpointFolder) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield position and path of each DCP checkpoint of a model in a scanned folder, or of the
    folder itself as ``.``.

    Unfinished ones, of which only the data is there, are among them: ``dcp_weights`` refuses those.
    """
    if folder.only is not None:
        return
    if _holds_dcp(folder.root):
        yield 0, PurePosixPath(".")
    for path in folder.subfolders:
        name = parse_folder_name(path.name)
        if name is not None and name.role is Role.MODEL and _holds_dcp(folder.root / path):
            yield name.index, path


def dcp_paths(root: AnyPath, where: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yield the files that a save leaves in a DCP folder, listed in its metadata or not."""
    yield from (where / name for name in _names(root / where) if belongs(name))


def _holds_dcp(folder: AnyPath) -> bool:
    return any(map(belongs, _names(folder)))


def _names(folder: AnyPath) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir()))


@paused_gc()
def dcp_weights(root: AnyPath, where: PurePosixPath, index: int) -> Weights:
    """Return the weights of the model in a DCP checkpoint, by its metadata and the headers of its
    items.

    ``{"model": state_dict}``, which Accelerate saves, gives the names of the state dict; the
    planner's paths show which part of a name is a key of a dict above it. Raises OperationError
    when one byte of it is missing (a chunk that is stored nowhere, a missing or short file, an
    unfinished save), and for unsupported kinds.
    """
    folder = root / where
    metadata = read_metadata_of(folder)
    model = model_names(metadata)
    if model is None:
        others = ", ".join(keys_beside(metadata, {}))
        only = f", only {others}" if others else ""
        raise OperationError(
            f"{folder}: the DCP checkpoint has no model weights{only}; next: {_check(folder)}"
        )
    for problem in dcp_problems(metadata):
        if problem.fqn in model.names:
            raise OperationError(
                f"{folder}: {problem.fqn!r}: {problem.message}; next: {_check(folder)}"
            )
    tensors = [
        tensor
        for tensor in metadata.tensors
        if tensor.fqn in model.names and tensor.dtype is not None
    ]
    layouts = DcpLayouts(folder, metadata, tensors)
    found: list[StoredTensor] = []
    ties: dict[str, str] = {}
    places: dict[object, str] = {}
    for tensor in sorted(tensors, key=layouts.place):
        name = model.names[tensor.fqn]
        place = layouts.places(tensor)
        if place and places.setdefault((tensor.dtype, tensor.shape, place), name) != name:
            ties[name] = places[tensor.dtype, tensor.shape, place]
            continue
        found.append(StoredTensor(name, tensor.dtype or "", tensor.shape, layouts.layout(tensor)))
    read = {tensor.fqn for tensor in tensors}
    names = _names(folder)
    used = {METADATA_NAME, *(name for name in names if name.endswith(DATA_SUFFIX))}
    left = keys_beside(metadata, model.names)
    return Weights(
        label=_label(root, where)
        + ("".join(f"[{step!r}]" for step in model.prefix) if left else ""),
        format=Format.DCP,
        index=index,
        files=tuple(where / name for name in sorted(used | {str(path) for path in metadata.files})),
        tensors=tuple(found),
        ties=ties,
        unread={
            model.names[tensor.fqn]: f"a tensor of torch.{tensor.torch_dtype}"
            for tensor in metadata.tensors
            if tensor.dtype is None and tensor.fqn in model.names
        },
        opaque=tuple(name for fqn, name in model.names.items() if fqn not in read),
        left=left,
        checksums=layouts.checksums(),
        # With a GPU, torch writes the smallest tensors first.
        names_in_order=tuple(model.names[tensor.fqn] for tensor in tensors),
    )


def read_metadata_of(folder: AnyPath) -> DcpMetadata:
    """Parse the ``.metadata`` of a folder; its tree is let go.

    Raises OperationError when there is none that can be used, saying why.
    """
    path = folder / METADATA_NAME
    try:
        with open_reader(path) as reader:
            # The tree is what names are rewritten in; of 100,000 tensors it takes 150 MB.
            return replace(read_dcp_metadata(reader), tree=parse(_NOTHING))
    except FormatError as error:
        raise OperationError(f"{path}: {error}; next: {_check(folder)}") from error
    except FileNotFoundError:
        raise OperationError(f"{folder}: {_without_metadata(folder)}") from None
    except OSError as error:
        raise OperationError(f"{path}: {unreadable(path, error)}") from error


def _without_metadata(folder: AnyPath) -> str:
    """Return the problem of a folder without ``.metadata``, and the next step. The file is written
    last (``finish`` in filesystem.py).
    """
    names = _names(folder)
    data = sum(name.endswith(DATA_SUFFIX) for name in names)
    if any(name.endswith(METADATA_NAME) for name in names):
        return (
            "each rank has its own metadata "
            f"({next(n for n in names if n.endswith(METADATA_NAME))}), as after a save without "
            "collectives; ckptfix does not read such a checkpoint: load it with "
            f"torch.distributed.checkpoint; next: {_check(folder)}"
        )
    unfinished = METADATA_UNFINISHED in names
    state = "unfinished" if unfinished else "missing"
    cause, advice = lost_metadata(unfinished=unfinished, renamed=is_metadata_renamed(folder))
    return (
        f"{METADATA_NAME}, which is written last, is {state} (found "
        f"{count_of(data, f'{DATA_SUFFIX} file')}): {cause}; next: {advice}"
    )


def _check(folder: AnyPath) -> str:
    return command("check", folder)


def _label(root: AnyPath, where: PurePosixPath) -> str:
    return str(where) if where.parts else root.resolve().name


class DcpLayouts:
    """The layouts of the tensors; every item is looked into once, file after file."""

    def __init__(self, folder: AnyPath, metadata: DcpMetadata, tensors: list[DcpTensor]) -> None:
        """Read the headers of the items of these tensors.

        Raises OperationError when one is missing, or is not what the metadata says.
        """
        self._folder = folder
        self._stored = metadata.stored
        self._paths: dict[PurePosixPath, AnyPath] = {}
        self._saved = self._read(tensors)

    def _file(self, name: PurePosixPath) -> AnyPath:
        """Return the path of a file: one object for 100,000 tensors."""
        path = self._paths.get(name)
        if path is None:
            path = self._paths[name] = self._folder / name
        return path

    def checksums(self) -> dict[Piece, int]:
        """Return the records of the items, with the CRC-32 that each has for it."""
        return {
            Piece(
                self._file(item.path), item.offset + saved.storage[0], saved.record[0]
            ): saved.record[1]
            for place, saved in self._saved.items()
            if saved.record[0]
            for item in (self._stored[place],)
        }

    def places(self, tensor: DcpTensor) -> tuple[tuple[PurePosixPath, int], ...]:
        """Return a key that two names of one tensor share; () for a tensor without elements."""
        items = [self._stored[tensor.fqn, chunk.offsets] for chunk in _filled(tensor)]
        return tuple((item.path, item.offset) for item in items)

    def place(self, tensor: DcpTensor) -> tuple[str, int]:
        """Return where a tensor comes in the order of the files."""
        for path, offset in self.places(tensor):
            return str(path), offset
        return "", 0

    def layout(self, tensor: DcpTensor) -> Layout:
        """Return where the bytes of a tensor are."""
        chunks = _filled(tensor)
        width = DTYPE_BITS[tensor.dtype or ""] // 8
        parts = [(chunk, self._part(tensor.fqn, chunk, width)) for chunk in chunks]
        if len(parts) > 1:
            self._ensure_apart(tensor, parts)
        return layout_of_chunks(tensor.shape, parts, width)

    def _ensure_apart(
        self, tensor: DcpTensor, parts: list[tuple[Chunk, Contiguous | Strided]]
    ) -> None:
        """Raise OperationError when two chunks lie in the same bytes: a small file would become any
        number of them.
        """
        places = sorted(
            (str(piece.path), piece.offset, piece.length, chunk.offsets)
            for chunk, part in parts
            for piece in (part.pieces if isinstance(part, Contiguous) else (part.storage,))
        )
        for (path, offset, length, one), (other_path, other_offset, _, other) in pairwise(places):
            if path == other_path and offset + length > other_offset:
                raise OperationError(
                    f"{path}: the chunks of {tensor.fqn!r} at {list(one)} and {list(other)} share "
                    f"bytes of the file, starting at byte {other_offset}; next: "
                    f"{_check(self._folder)}"
                )

    def _part(self, fqn: str, chunk: Chunk, width: int) -> Contiguous | Strided:
        item = self._stored[fqn, chunk.offsets]
        saved = self._saved[fqn, chunk.offsets]
        path = self._file(item.path)
        if saved.run is not None:
            begin, end = saved.run
            return Contiguous((Piece(path, item.offset + begin, end - begin),))
        begin, length = saved.storage
        return Strided(
            storage=Piece(path, item.offset + begin, length - length % width),
            first=saved.first,
            shape=saved.shape,
            stride=saved.stride,
            width=width,
        )

    def _read(self, tensors: list[DcpTensor]) -> dict[tuple[str, tuple[int, ...]], SavedTensor]:
        """Read the headers of the items of tensors. Raises OperationError for a missing file or
        place, and for any other content.
        """
        wanted: dict[PurePosixPath, list[tuple[StoredItem, DcpTensor, Chunk]]] = {}
        for tensor in tensors:
            for chunk in _filled(tensor):
                item = self._stored.get((tensor.fqn, chunk.offsets))
                if item is None:
                    raise OperationError(
                        f"{self._folder}: no location is recorded for a chunk of "
                        f"{tensor.fqn!r:.200}; next: {_check(self._folder)}"
                    )
                wanted.setdefault(item.path, []).append((item, tensor, chunk))
        saved: dict[tuple[str, tuple[int, ...]], SavedTensor] = {}
        known: dict[object, KnownItem] = {}
        for name in sorted(wanted):
            group = sorted(wanted[name], key=lambda one: one[0].offset)
            path = self._folder / name
            try:
                with open_reader(path) as reader:
                    items = ItemReader(reader, known)
                    for item, tensor, chunk in group:
                        saved[tensor.fqn, chunk.offsets] = self._checked(
                            items, path, item, tensor, chunk
                        )
            except FileNotFoundError:
                raise OperationError(
                    f"{path} is missing, with {count_of(len(group), 'chunk')} of the model: "
                    f"{list_names(dict.fromkeys(tensor.fqn for _, tensor, _ in group))}; next: "
                    f"{_check(self._folder)}"
                ) from None
            except OSError as error:
                raise OperationError(f"{path}: {unreadable(path, error)}") from error
        return saved

    def _checked(
        self, items: ItemReader, path: AnyPath, item: StoredItem, tensor: DcpTensor, chunk: Chunk
    ) -> SavedTensor:
        try:
            saved = items.tensor(item, chunk.lengths)
        except FormatError as error:
            raise OperationError(
                f"{path}: the chunk of {tensor.fqn!r} at {list(chunk.offsets)} ({item.length} "
                f"bytes from byte {item.offset}): {error}; next: {_check(self._folder)}"
            ) from error
        if (saved.dtype, saved.shape) != (tensor.dtype, chunk.lengths):
            raise OperationError(
                f"{path}: the chunk of {tensor.fqn!r} at byte {item.offset} differs from the "
                f"metadata (expected {tensor.dtype} {list(chunk.lengths)}, found {saved.dtype} "
                f"{list(saved.shape)}); next: {_check(self._folder)}"
            )
        if (
            saved.run is None
            and prod(saved.shape) * DTYPE_BITS[saved.dtype] // 8 > saved.storage[1]
        ):
            raise OperationError(
                f"{path}: the chunk of {tensor.fqn!r} at byte {item.offset} has "
                f"{prod(saved.shape)} elements in a storage of {saved.storage[1]} bytes, which no "
                f"DCP writer produces; next: {_check(self._folder)}"
            )
        return saved


def _filled(tensor: DcpTensor) -> list[Chunk]:
    """Return the chunks with elements, in the order of their first index."""
    return sorted(chunk for chunk in tensor.chunks if 0 not in chunk.lengths)


def layout_of_chunks(
    shape: tuple[int, ...], parts: Sequence[tuple[Chunk, Contiguous | Strided]], width: int
) -> Layout:
    """Return the layout of a tensor whose chunks, in the order of their first indexes, cover it
    once.
    """
    if len(parts) == 1:
        return parts[0][1]
    pieces = [part.pieces for _, part in parts if isinstance(part, Contiguous)]
    if len(pieces) == len(parts) and _is_cut_in_order(shape, [chunk for chunk, _ in parts]):
        return Contiguous(tuple(piece for run in pieces for piece in run))
    tiles = tuple(Tile(chunk.offsets, chunk.lengths, part) for chunk, part in parts)
    return Tiled(shape=shape, tiles=tiles, width=width)


def _is_cut_in_order(shape: tuple[int, ...], chunks: list[Chunk]) -> bool:
    """Return whether chunks hold the bytes of their tensor in order: it is cut along its first real
    dimension.
    """
    axis = next((number for number, length in enumerate(shape) if length > 1), 0)
    return all(chunk.lengths[axis + 1 :] == shape[axis + 1 :] for chunk in chunks)


@paused_gc()
def intact_tensors(folder: AnyPath) -> tuple[tuple[StoredTensor, ...], dict[str, str]]:
    """Return the tensors of the model in a damaged DCP folder that are all there, and why each
    other one is not.

    Raises OperationError when the metadata cannot be read, or has no model.
    """
    metadata = read_metadata_of(folder)
    model = model_names(metadata)
    if model is None:
        raise OperationError(f"{folder}: the DCP checkpoint has no model weights")
    reasons = {problem.fqn: problem.message for problem in dcp_problems(metadata)}
    found: list[StoredTensor] = []
    lost = dict.fromkeys(model.names.values(), "it is not a tensor")
    for tensor in metadata.tensors:
        name = model.names.get(tensor.fqn)
        if name is None:
            continue
        if tensor.fqn in reasons or tensor.dtype is None:
            lost[name] = reasons.get(
                tensor.fqn, f"ckptfix does not read its dtype, torch.{tensor.torch_dtype}"
            )
            continue
        try:
            layout = DcpLayouts(folder, metadata, [tensor]).layout(tensor)
        except OperationError as error:
            lost[name] = str(error).partition("; next:")[0]
        else:
            found.append(StoredTensor(name, tensor.dtype, tensor.shape, layout))
            del lost[name]
    return tuple(found), lost
