"""The ``.metadata`` file of torch.distributed.checkpoint (DCP), read by its opcodes; torch itself unpickles it.

Facts from torch 2.13, ``torch/distributed/checkpoint``: ``metadata.py`` (the classes that are pickled, by protocol 4),
``filesystem.py`` (``_StorageInfo``), ``_nested_dict.py`` (``planner_data``), ``planner_helpers.py`` (a rank without a
part of a tensor may still write a chunk without elements). Older versions leave out ``version``, ``storage_meta`` and
``transform_descriptors``, and those before 2.3 had ``TensorProperties`` in ``torch.distributed._shard``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol

from ckptfix.errors import BeyondLimits, FormatError, UnsupportedFormat
from ckptfix.formats.dcp_stream import (
    PACKED,
    Chunk,
    StoredItem,
    fields_of,
    is_count,
    is_instance,
    path_inside,
    read_stream,
    size_of,
    text_of,
    torch_dtype_of,
    words_for,
)
from ckptfix.formats.pickle_stream import parse, paused_gc
from ckptfix.formats.pickle_tree import Kind, Node, PickleTree, Text, pairs
from ckptfix.formats.torch_tensors import TORCH_DTYPES
from ckptfix.storage.reading import FileReader

METADATA_NAME = ".metadata"
"""The name of the file; torch writes ``.metadata.tmp`` first, when all data is on disk, and renames it."""

MAX_METADATA = 1 << 29
"""Longest file that is read, in bytes. A chunk of a tensor takes about 200."""

_MAX_DESCRIPTORS = 16
_RETOLD = 1 << 22  # longest file, in bytes, that is certain to have fewer opcodes than are read one by one


class DcpTensor(NamedTuple):
    """A tensor of the checkpoint. ``site`` is where its name was pushed (``Text.site``).

    ``dtype``: in safetensors' nouns, None for a ``torch_dtype`` without one. ``chunks``: as they are listed; they lie
    inside of the tensor, but may overlap or leave gaps (``dcp_chunks``).
    """

    fqn: str
    dtype: str | None
    torch_dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    site: int


class DcpBytes(NamedTuple):
    """An item that is no tensor: any object, pickled by torch.save. ``site`` as in ``DcpTensor``."""

    fqn: str
    site: int


class PlannedPath(NamedTuple):
    """The keys that lead to an item in the state dict that was saved: ``("model", "fc.weight")``.

    ``sites``: where each key was pushed, None for the index of a list. ``site`` is where the name was pushed.
    """

    fqn: str
    path: tuple[str | int, ...]
    sites: tuple[int | None, ...]
    site: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpMetadata:
    """A parsed ``.metadata``; every tuple is in the order of the file, and no name is twice in one.

    ``planned``: None when the planner left no paths, as with ``flatten_state_dict=False``; then the names are the keys
    of the state dict. ``stored``: by name and first index, as torch looks it up. ``save_id``: a UUID of the save,
    None of older ones. ``tree`` is what names are rewritten in (``pickle_rewrite``), at the sites that all parts have.
    """

    tree: PickleTree = field(repr=False)
    tensors: tuple[DcpTensor, ...] = field(repr=False)
    items: tuple[DcpBytes, ...] = field(repr=False)
    planned: tuple[PlannedPath, ...] | None = field(repr=False)
    stored: Mapping[tuple[str, tuple[int, ...] | None], StoredItem] = field(repr=False)
    version: str | None
    save_id: str | None

    @property
    def files(self) -> tuple[PurePosixPath, ...]:
        """Every file that holds an item, once."""
        return tuple(dict.fromkeys(item.path for item in self.stored.values()))

    def items_by_file(self) -> dict[PurePosixPath, list[StoredItem]]:
        """Return what each file holds, in the order of the metadata."""
        found: dict[PurePosixPath, list[StoredItem]] = {}
        for item in self.stored.values():
            found.setdefault(item.path, []).append(item)
        return found


def read_dcp_metadata(reader: FileReader) -> DcpMetadata:
    """Parse an open ``.metadata``. Raises as ``parse_dcp_metadata`` does, UnsupportedFormat when it is too long."""
    if reader.size > MAX_METADATA:
        raise BeyondLimits(f"it has {reader.size} bytes, at most {MAX_METADATA} are read")
    return parse_dcp_metadata(reader.read(0, reader.size))


@paused_gc()
def parse_dcp_metadata(data: bytes, *, opcode_by_opcode: bool = False) -> DcpMetadata:
    """Parse the bytes of a ``.metadata``; ``opcode_by_opcode``: its tree says where every single string was pushed.

    Raises TruncatedError when they end too early, UnsupportedFormat for what was written by no planner or writer that
    is known here, FormatError for a chunk that is not inside of its tensor, a path that leaves the folder, and
    everything else that torch's writers do not make.
    """
    if not opcode_by_opcode:
        tree = read_stream(data)
        try:
            return _metadata(tree)
        except FormatError:
            if len(data) > _RETOLD:
                raise  # else the tree of every opcode has better words for it
    return _metadata(parse(data))


def _metadata(tree: PickleTree) -> DcpMetadata:
    if not is_instance(tree.root, "Metadata"):
        raise FormatError("a pickle, but none of torch.distributed.checkpoint: no Metadata at its root")
    return _Reading(tree).metadata()


class _Reading:
    """One walk over a tree. ``_left`` bounds it: a few bytes can refer to a long list again and again."""

    def __init__(self, tree: PickleTree) -> None:
        self._tree = tree
        self._left = len(tree.data)
        self._paths: dict[str, PurePosixPath] = {}

    def metadata(self) -> DcpMetadata:
        root = fields_of(self._tree.root)
        tensors: list[DcpTensor] = []
        items: list[DcpBytes] = []
        for name, value in self._dict(root, "state_dict_metadata"):
            if is_instance(value, "TensorStorageMetadata"):
                tensors.append(self._tensor(name, value))
            elif is_instance(value, "BytesStorageMetadata"):
                items.append(DcpBytes(name.value, name.site))
            else:
                raise UnsupportedFormat(
                    f"{name.value!r:.200} is neither a tensor nor bytes, but {words_for(value)}"
                )
        _check_unique([*tensors, *items])
        stored = self._stored(root)
        meta = root.get("storage_meta")
        save_id = fields_of(meta).get("save_id") if is_instance(meta, "StorageMeta") else None
        return DcpMetadata(
            tree=self._tree,
            tensors=tuple(tensors),
            items=tuple(items),
            planned=None if root.get("planner_data") is None else self._planned(root),
            stored=stored,
            version=text_of(root.get("version")),
            save_id=text_of(save_id),
        )

    def _dict(self, root: Mapping[str, Any], name: str) -> Iterator[tuple[Text, Any]]:
        """Yield the pairs of a dict with strings as keys."""
        for key, value in self._pairs(root, name):
            if type(key) is not Text:
                raise FormatError(f"{name} has {words_for(key)} where a name belongs")
            yield key, value

    def _pairs(self, root: Mapping[str, Any], name: str) -> Iterator[tuple[Any, Any]]:
        value = root.get(name)
        if type(value) is not Node or value.kind is not Kind.DICT:
            raise UnsupportedFormat(
                f"{name} is {words_for(value)}, where torch's own planner and writer put a dict"
            )
        yield from pairs(value)

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise FormatError("the metadata refers to the same lists again and again, as no torch writes it")

    def _tensor(self, name: Text, node: Node) -> DcpTensor:
        values = fields_of(node)
        torch_dtype = torch_dtype_of(values.get("properties"))
        shape = size_of(values.get("size"), name.value)
        listed = values.get("chunks")
        if type(listed) is not Node or listed.kind is not Kind.LIST:
            raise FormatError(f"the chunks of {name.value!r:.200} are not a list, but {words_for(listed)}")
        found = listed.items or []
        self._spend(len(found))
        chunks = tuple([_chunk(chunk, name.value, shape) for chunk in found])
        return DcpTensor(name.value, TORCH_DTYPES.get(torch_dtype), torch_dtype, shape, chunks, name.site)

    def _stored(self, root: Mapping[str, Any]) -> dict[tuple[str, tuple[int, ...] | None], StoredItem]:
        found: dict[tuple[str, tuple[int, ...] | None], StoredItem] = {}
        for key, value in self._pairs(root, "storage_data"):
            if value is PACKED and type(key) is StoredItem:
                item = key
            elif not is_instance(key, "MetadataIndex") or not is_instance(value, "_StorageInfo"):
                raise UnsupportedFormat(
                    f"storage_data leads from {words_for(key)} to {words_for(value)}: no file writer of torch's made it"
                )
            else:
                item = self._stored_item(fields_of(key), fields_of(value))
            if found.setdefault((item.fqn, item.offsets), item) is not item:
                raise FormatError(f"storage_data has {item.fqn!r:.200} at {item.offsets} twice")
        return found

    def _stored_item(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> StoredItem:
        name, index = key.get("fqn"), key.get("index")
        path, offset, length = value.get("relative_path"), value.get("offset"), value.get("length")
        if type(name) is not Text or type(path) is not Text:
            raise FormatError(
                f"storage_data leads from {words_for(name)} to {words_for(path)}, where names belong"
            )
        if not is_count(offset) or not is_count(length):
            raise FormatError(
                f"{name.value!r:.200} is said to be {length!r:.40} bytes from {offset!r:.40} of its file"
            )
        where = self._paths.get(path.value)
        if where is None:
            where = self._paths[path.value] = path_inside(path.value)
        offsets = key.get("offset")
        return StoredItem(
            name.value,
            None if offsets is None else size_of(offsets, name.value),
            index if type(index) is int else None,
            where,
            offset,
            length,
            self._descriptors(value.get("transform_descriptors")),
            name.site,
        )

    def _descriptors(self, value: object) -> tuple[str, ...]:
        if value is None:
            return ()
        found = value.items or () if type(value) is Node and value.kind is Kind.LIST else value
        if not isinstance(found, list | tuple) or len(found) > _MAX_DESCRIPTORS:
            raise FormatError("the transform_descriptors of an item are not a short list")
        return tuple(one.value if type(one) is Text else words_for(one) for one in found)

    def _planned(self, root: Mapping[str, Any]) -> tuple[PlannedPath, ...]:
        found = []
        for name, steps in self._dict(root, "planner_data"):
            if type(steps) is not tuple or not all(type(step) is Text or type(step) is int for step in steps):
                raise UnsupportedFormat(
                    f"planner_data has {words_for(steps)} as the path of {name.value!r:.200}"
                )
            self._spend(len(steps))
            path = tuple([step.value if type(step) is Text else step for step in steps])
            sites = tuple([step.site if type(step) is Text else None for step in steps])
            found.append(PlannedPath(name.value, path, sites, name.site))
        _check_unique(found)
        return tuple(found)


class _Named(Protocol):
    @property
    def fqn(self) -> str: ...


def _check_unique(named: Sequence[_Named]) -> None:
    if len({one.fqn for one in named}) == len(named):
        return
    seen: set[str] = set()
    for one in named:
        if one.fqn in seen:
            raise FormatError(f"the metadata has {one.fqn!r:.200} twice")
        seen.add(one.fqn)


def _chunk(node: object, name: str, shape: tuple[int, ...]) -> Chunk:
    if type(node) is Chunk:
        chunk = node
    elif is_instance(node, "ChunkStorageMetadata"):
        values = fields_of(node)
        chunk = Chunk(size_of(values.get("offsets"), name), size_of(values.get("sizes"), name))
    else:
        raise FormatError(f"the chunks of {name!r:.200} hold {words_for(node)}")
    offsets, lengths = chunk
    if len(offsets) != len(shape) or len(lengths) != len(shape):
        raise FormatError(
            f"a chunk of {name!r:.200} has {len(offsets)} dimensions, the tensor has {len(shape)}"
        )
    for offset, length, whole in zip(offsets, lengths, shape, strict=True):
        if offset + length > whole:
            raise FormatError(
                f"the chunk of {name!r:.200} at {offsets} of {lengths} is not inside of {shape}"
            )
    return chunk
