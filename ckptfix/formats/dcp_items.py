"""The items inside of DCP's ``.distcp`` files (tensors and other objects), and whether they cover
every tensor.

Facts from torch 2.13, ``torch/distributed/checkpoint/filesystem.py`` (``_write_item``): each item
is a file of torch.save, one after the other; a chunk of a tensor is saved alone, with its own
strides; with ``SerializationFormat.SAFETENSORS`` the tensors of a file follow together as one
safetensors file, and all have its offset.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from ckptfix.errors import BeyondLimits, FormatError, TruncatedError, UnsupportedFormat
from ckptfix.formats.dcp_metadata import GROUPS_KEY, DcpMetadata, DcpTensor
from ckptfix.formats.dcp_stream import Chunk, StoredItem, words_for
from ckptfix.formats.pickle_stream import parse
from ckptfix.formats.pickle_tree import Kind, Node, Text, child, is_dict_like
from ckptfix.formats.safetensors_file import looks_like_safetensors, read_safetensors
from ckptfix.formats.tensor import TensorInfo
from ckptfix.formats.torch_file import Appended, TorchFile, crc_mismatches, read_torch_file
from ckptfix.formats.torch_tensors import read_tensor, storages
from ckptfix.formats.torch_zip import TorchZip, ZipRecord, read_record, read_zip, storage_records
from ckptfix.storage.files import FileReader

_HEAD = 4096  # longest part of an item before its data, or behind them, that is compared at once
_CRC_IN_DESCRIPTOR, _CRC_IN_ENTRY = 4, 16
_MAX_SHAPES = 4096


class SavedTensor(NamedTuple):
    """A tensor that was saved alone. Offsets count from the start of its item.

    ``storage``: offset and length of its storage. ``first`` and ``stride`` count elements. ``run``:
    first and end offset of its bytes when they are one run, else None. ``record``: the length of
    the record that its storage is, and the CRC-32 that the item has for it; (0, 0) where it has
    none.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    storage: tuple[int, int]
    run: tuple[int, int] | None
    record: tuple[int, int] = (0, 0)


class KnownItem(NamedTuple):
    """An item that was read in full: the bytes and offsets that an equal item must have.

    ``crc``: where in the tail the CRC-32 of its storage is. ``save_id``: where in the tail the id
    of the save is.
    """

    head: bytes
    tail_start: int
    tail: tuple[tuple[int, bytes], ...]
    crc: int
    saved: SavedTensor
    save_id: slice


class ItemReader:
    """Reader of the tensors of one ``.distcp`` file.

    An item that holds the same bytes as an earlier one but for its data and their checksums is not
    parsed again: ranks save chunks of the same shape by the thousand.
    """

    def __init__(self, reader: FileReader, known: dict[object, KnownItem]) -> None:
        """Prepare to read an open file; ``known``: what was learned, from other files too, empty in
        the beginning.
        """
        self._reader = reader
        self._known = known
        self._safetensors: dict[int, dict[str, TensorInfo]] = {}

    def tensor(self, item: StoredItem, shape: tuple[int, ...]) -> SavedTensor:
        """Return where the tensor of an item lies, a chunk that should have this shape.

        Raises UnsupportedFormat for unsupported kinds, TruncatedError or FormatError for anything
        but an item of torch's.
        """
        if item.transforms:
            raise UnsupportedFormat(
                "it was saved through extensions that ckptfix does not read "
                f"({', '.join(item.transforms)}); load it with torch.distributed.checkpoint and "
                "save it again without extensions"
            )
        in_front = min(8 + 1, self._reader.size - item.offset)
        if in_front > 0 and looks_like_safetensors(self._reader.read(item.offset, in_front)):
            return self._of_safetensors(item)
        end = item.offset + item.length
        if end > self._reader.size:
            raise TruncatedError(
                f"it ends at byte {end}, but the file has only {self._reader.size} bytes",
                have=self._reader.size,
                need=end,
            )
        window = self._reader.window(item.offset, item.length)
        key = (item.length, shape)
        known = self._known.get(key)
        tail = _tail_but_data(known, window) if known is not None else None
        if known is not None and tail is not None:
            crc = int.from_bytes(tail[known.crc : known.crc + 4], "little")
            size = known.tail_start - known.saved.storage[0]
            return known.saved._replace(record=(size, crc) if crc else (0, 0))
        archive, record, saved = _saved_tensor(window)
        learned = _learned(window, archive, record, saved)
        if learned is not None and len(self._known) < _MAX_SHAPES:
            self._known[key] = learned
        return saved

    def _of_safetensors(self, item: StoredItem) -> SavedTensor:
        tensors = self._safetensors.get(item.offset)
        if tensors is None:
            file = read_safetensors(
                self._reader.window(item.offset, self._reader.size - item.offset)
            )
            tensors = self._safetensors[item.offset] = {one.fqn: one for one in file.tensors}
        one = tensors.get(item.fqn)
        if one is None or one.data_offsets is None:
            raise FormatError(f"the safetensors file at byte {item.offset} does not contain it")
        begin, end = one.data_offsets
        if end - begin != item.length:
            raise FormatError(
                f"it has {end - begin} bytes in the file, but the metadata says {item.length}"
            )
        return SavedTensor(one.dtype, one.shape, (), 0, (begin, end - begin), (begin, end))


def _saved_tensor(window: FileReader) -> tuple[TorchZip, ZipRecord, SavedTensor]:
    """Read an item in full: its archive, the record of its storage, its tensor."""
    archive = read_zip(window)
    tree = parse(read_record(window, archive.pickle))
    known = storages(tree)
    if archive.big_endian:
        raise UnsupportedFormat("it was written on a big-endian machine")
    if type(tree.root) is not Node or tree.root.kind in (Kind.LIST, Kind.DICT):
        raise FormatError(f"it is {words_for(tree.root)}, but the metadata lists a tensor")
    tensor = read_tensor(Text("", 0, 0), tree.root, known)
    if tensor is None:
        raise UnsupportedFormat(
            "it is not a plain tensor (of a known dtype, neither conjugated nor negated)"
        )
    nbytes = known[tensor.storage_key].nbytes
    record = storage_records(archive).get(tensor.storage_key)
    if record is None or record.size < nbytes:
        have = "no record" if record is None else f"a record of {record.size} bytes"
        raise FormatError(f"its storage needs {nbytes} bytes but has {have}")
    if not record.is_stored:
        raise UnsupportedFormat("its record is compressed, which torch.save never does")
    begin = record.data_offset
    run = None
    if tensor.begin is not None and tensor.end is not None:
        run = (begin + tensor.begin, begin + tensor.end)
    checked = (record.size, record.crc) if record.crc else (0, 0)
    saved = SavedTensor(
        tensor.dtype,
        tensor.shape,
        tensor.stride,
        tensor.storage_offset,
        (begin, nbytes),
        run,
        checked,
    )
    return archive, record, saved


def _learned(
    window: FileReader, archive: TorchZip, record: ZipRecord, saved: SavedTensor
) -> KnownItem | None:
    """Return the bytes shared by items that differ from this one in their data alone.

    None when data other than the tensor's are large. These items differ in the CRC-32 of the
    storage, in its descriptor and in the directory, and the id that torch makes of all checksums,
    with its own CRC-32.
    """
    end = record.data_offset + record.packed
    if record.data_offset > _HEAD or window.size - end > _HEAD:
        return None
    tail = window.read(end, window.size - end)
    directory = tail.rfind(archive.directory)
    if directory < 0:
        return None
    free = []
    save_id = slice(0, 0)
    for one in archive.records:
        if one is record or one.name.endswith("/.data/serialization_id"):
            behind = one.data_offset + one.packed - end
            if one is not record:
                free.append((one.data_offset - end, behind))
                save_id = slice(*free[-1])
            if one.size:  # a record without bytes has no descriptor
                free.append((behind + _CRC_IN_DESCRIPTOR, behind + _CRC_IN_DESCRIPTOR + 4))
            free.append(
                (directory + one.entry + _CRC_IN_ENTRY, directory + one.entry + _CRC_IN_ENTRY + 4)
            )
    kept = []
    position = 0
    for begin, stop in [*sorted(free), (len(tail), len(tail))]:
        if begin < position:
            return None
        kept.append((position, tail[position:begin]))
        position = stop
    crc = directory + record.entry + _CRC_IN_ENTRY
    return KnownItem(window.read(0, record.data_offset), end, tuple(kept), crc, saved, save_id)


def _tail_but_data(known: KnownItem, window: FileReader) -> bytes | None:
    """Return the bytes behind the data of an item of the same length, None when more than its data
    and their checksums differ from the known one.
    """
    tail = window.read(known.tail_start, window.size - known.tail_start)
    is_same = window.read(0, len(known.head)) == known.head and all(
        tail.startswith(part, begin) for begin, part in known.tail
    )
    return tail if is_same else None


class ItemProblem(NamedTuple):
    """A fault of an item, in words, with the name of a record whose bytes do not have their CRC."""

    detail: str
    record: str = ""


class ItemCheck:
    """Check of items by all but the numbers of tensors: DCP loads each by ``torch.load`` of its
    bytes alone.

    An item that equals an earlier one but for its numbers is compared with it: a save of 400 ranks
    has a million items.
    """

    def __init__(self) -> None:
        """Start without any known item."""
        self._known: dict[tuple[int, Chunk | None, str | None], KnownItem] = {}
        self._seen: set[bytes] = set()

    def problem(
        self,
        reader: FileReader,
        item: StoredItem,
        chunk: Chunk | None = None,
        dtype: str | None = None,
    ) -> ItemProblem | None:
        """Return what is wrong with an item. ``chunk``, ``dtype``: of a tensor, by the metadata."""
        key = (item.length, chunk, dtype)
        known = self._known.get(key)
        window = reader.window(item.offset, item.length)
        tail = _tail_but_data(known, window) if known is not None else None
        # torch.load reads the id of the save as UTF-8.
        if known is not None and tail is not None and tail[known.save_id].isascii():
            return None
        raw = b""
        try:
            if chunk is None and item.length <= _SMALL_ITEM:
                raw = window.read(0, item.length)
                if raw in self._seen:
                    return None
            file = read_item(reader, item)
            if file.trailing:
                return ItemProblem(f"{file.trailing} bytes follow its end")
            for name, _ in crc_mismatches(file, window, every_record=False):
                return ItemProblem(f"CRC-32 mismatch in its record {name!r:.80}", name)
            if chunk is not None:
                return self._tensor_problem(window, chunk, dtype)
            root = file.tree.root
            if (
                item.offsets is None
                and type(root) is Node
                and read_tensor(Text("", 0, 0), root, storages(file.tree))
            ):
                return ItemProblem("it is a tensor, but the metadata does not list a tensor")
        except FormatError as error:
            if isinstance(error, UnsupportedFormat) and not isinstance(error, BeyondLimits):
                return None  # an intact object that only torch reads
            return ItemProblem(str(error))
        if raw and len(self._seen) < _MAX_SHAPES:
            self._seen.add(raw)
        return None

    def _tensor_problem(
        self, window: FileReader, chunk: Chunk, dtype: str | None
    ) -> ItemProblem | None:
        archive, record, saved = _saved_tensor(window)
        if saved.shape != chunk.lengths:
            return ItemProblem(
                f"it has shape {list(saved.shape)}, but the metadata says {list(chunk.lengths)}"
            )
        if dtype is not None and saved.dtype != dtype:
            return ItemProblem(f"it has dtype {saved.dtype}, but the metadata says {dtype}")
        learned = _learned(window, archive, record, saved)
        if learned is not None and len(self._known) < _MAX_SHAPES:
            self._known[window.size, chunk, dtype] = learned
        return None


_SMALL_ITEM = 1 << 14
"""Longest item of an object whose bytes are remembered: an option of a group is saved once for each
parameter.
"""

MAX_ITEM = 1 << 26
"""Longest item that is read, in bytes. The names of a million parameters take about 40 million."""

PARAMS_KEY = "params"
NAME_KEYS = (PARAMS_KEY, "param_names")
"""Keys of a parameter group whose value is a list of names."""


def read_item(reader: FileReader, item: StoredItem) -> TorchFile:
    """Parse an item of an open ``.distcp``; nothing is unpickled.

    Raises FormatError when it is none, TruncatedError or UnsupportedFormat with the reason when it
    cannot be read.
    """
    if item.transforms:
        raise UnsupportedFormat(
            "it was saved through extensions that ckptfix does not read "
            f"({', '.join(item.transforms)})"
        )
    if item.length > MAX_ITEM:
        raise UnsupportedFormat(f"it has {item.length} bytes, over the limit of {MAX_ITEM}")
    return read_torch_file(reader.window(item.offset, item.length))


def listed_names(file: TorchFile) -> tuple[Text, ...] | None:
    """Return the strings of an item that is a list of nothing else, None for any other."""
    root = file.tree.root
    values = root.items or [] if type(root) is Node and root.kind is Kind.LIST else root
    if not isinstance(values, list | tuple) or not all(type(value) is Text for value in values):
        return None
    return tuple(values)


def grouped_names(file: TorchFile) -> dict[str, tuple[Text, ...]]:
    """Return the names in all groups of an optimizer that is one item, by the key that holds them;
    empty for any other.

    A planner saves it so that takes an object without tensors as one, such as that of torch before
    2.4 (``_traverse.traverse_state_dict_v_2_3`` of 2.13): the list of the groups, or the dict that
    holds it.
    """
    root = file.tree.root
    groups = child(root, GROUPS_KEY) if is_dict_like(root) else root
    if type(groups) is not Node or groups.kind is not Kind.LIST:
        return {}
    found: dict[str, list[Text]] = {}
    met: set[int] = set()
    for group in groups.items or ():
        for key in NAME_KEYS if is_dict_like(group) and id(group) not in met else ():
            names = child(group, key)
            listed = names.items or [] if type(names) is Node and names.kind is Kind.LIST else ()
            if listed and id(names) not in met and all(type(value) is Text for value in listed):
                met.add(id(names))
                found.setdefault(key, []).extend(listed)
        met.add(id(group))
    return {key: tuple(names) for key, names in found.items()}


def renamed_item(reader: FileReader, item: StoredItem, new_names: Mapping[int, str]) -> bytes:
    """Return the bytes of an item with these strings at these push sites. Raises as ``read_item``
    does.
    """
    window = reader.window(item.offset, item.length)
    edit = read_item(reader, item).edit(window, new_names)
    old = window.read(0, window.size)
    if isinstance(edit, Appended):
        return old + edit.data
    return old[: edit.offset] + edit.new + old[edit.offset + len(edit.new) :]


MAX_COMPARISONS = 10_000_000
"""Most pairs of chunks of one checkpoint that are compared; a grid of 32 x 32 chunks takes 32,000.
"""


class DcpProblem(NamedTuple):
    """A fault of one item of a checkpoint, in words."""

    fqn: str
    message: str


def dcp_problems(metadata: DcpMetadata) -> Iterator[DcpProblem]:
    """Yield every item that is incomplete or saved twice by the metadata alone."""
    budget = _Budget()
    for tensor in metadata.tensors:
        absent = [
            chunk for chunk in tensor.chunks if (tensor.fqn, chunk.offsets) not in metadata.stored
        ]
        if absent:
            yield DcpProblem(
                tensor.fqn,
                f"{len(absent)} of its {len(tensor.chunks)} chunks "
                f"{'is' if len(absent) == 1 else 'are'} not stored in any file, starting with the "
                f"one at {list(absent[0].offsets)}",
            )
        problem = _coverage_problem(tensor, budget)
        if problem:
            yield DcpProblem(tensor.fqn, problem)
    for item in metadata.items:
        if (item.fqn, None) not in metadata.stored:
            yield DcpProblem(item.fqn, "it is not stored in any file")
    listed = {tensor.fqn for tensor in metadata.tensors} | {item.fqn for item in metadata.items}
    for fqn in dict.fromkeys(item.fqn for item in metadata.stored.values()):
        if fqn not in listed:
            yield DcpProblem(
                fqn, "it is stored in a file, but state_dict_metadata does not list it"
            )


def coverage_problem(tensor: DcpTensor) -> str | None:
    """Return the fault of the chunks of a tensor: a gap, an overlap; None for a complete tensor."""
    return _coverage_problem(tensor, _Budget())


class _Budget:
    """Number of pairs that may still be compared."""

    def __init__(self) -> None:
        self.left = MAX_COMPARISONS


def _coverage_problem(tensor: DcpTensor, budget: _Budget) -> str | None:
    # A rank without a part of a tensor may have written a chunk without elements, several ranks the
    # same one.
    chunks = [chunk for chunk in tensor.chunks if 0 not in chunk.lengths]
    whole = prod(tensor.shape)
    axis = _cut(tensor.shape, chunks)
    chunks.sort(key=lambda chunk: chunk.offsets[axis : axis + 1])
    both = _overlap(chunks, axis, budget)
    if both is not None:
        one, other = both
        # Of elements that are in two chunks at least one is counted twice.
        lost = whole - sum(prod(chunk.lengths) for chunk in chunks) + 1
        verb = "is" if lost == 1 else "are"
        gap = (
            f", and at least {lost} of its {whole} elements {verb} not in any chunk"
            if lost > 0
            else ""
        )
        return (
            f"its chunks at {list(one.offsets)} (size {list(one.lengths)}) and at "
            f"{list(other.offsets)} (size {list(other.lengths)}) overlap{gap}"
        )
    if budget.left < 0:
        return (
            f"its {len(tensor.chunks)} chunks were not compared with each other: torch never lays "
            "them out this way"
        )
    covered = sum(prod(chunk.lengths) for chunk in chunks)
    if covered == whole:
        return None
    return (
        f"{whole - covered} of its {whole} elements {'is' if whole - covered == 1 else 'are'} not "
        f"in any chunk{_gap(tensor.shape, chunks, axis)}"
    )


def _cut(shape: tuple[int, ...], chunks: list[Chunk]) -> int:
    """Return the dimension along which the chunks begin at most places."""
    counts = [len({chunk.offsets[axis] for chunk in chunks}) for axis in range(len(shape))]
    return counts.index(max(counts)) if counts else 0


def _overlap(chunks: list[Chunk], axis: int, budget: _Budget) -> tuple[Chunk, Chunk] | None:
    """Return two chunks, sorted along an axis, that have an element in common."""
    for number, one in enumerate(chunks):
        end = one.offsets[axis] + one.lengths[axis] if one.offsets else 1
        for following in range(number + 1, len(chunks)):
            other = chunks[following]
            if other.offsets and other.offsets[axis] >= end:
                break
            budget.left -= 1
            if budget.left < 0:
                return None
            if _meet(one, other):
                return one, other
    return None


def _meet(one: Chunk, other: Chunk) -> bool:
    return all(
        begin < other_begin + other_length and other_begin < begin + length
        for begin, length, other_begin, other_length in zip(*one, *other, strict=True)
    )


def _gap(shape: tuple[int, ...], chunks: list[Chunk], axis: int) -> str:
    """Return the first gap of a tensor that is cut along one dimension; "" for any other."""
    full = (*shape[:axis], *shape[axis + 1 :])
    if (
        any((*chunk.lengths[:axis], *chunk.lengths[axis + 1 :]) != full for chunk in chunks)
        or not shape
    ):
        return ""
    end = 0
    for chunk in chunks:
        if chunk.offsets[axis] > end:
            break
        end = chunk.offsets[axis] + chunk.lengths[axis]
    following = min(
        (chunk.offsets[axis] for chunk in chunks if chunk.offsets[axis] > end), default=shape[axis]
    )
    indices = f"indices {end} to {following - 1}" if following > end + 1 else f"index {end}"
    return f": {indices} of {shape[axis]} along dimension {axis}"
