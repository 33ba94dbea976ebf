"""The ``.metadata`` file of torch.distributed.checkpoint (DCP): read by its opcodes, and the
meaning of its names.

torch itself unpickles it. Facts from torch 2.13, ``torch/distributed/checkpoint``: ``metadata.py``
(the classes that are pickled, by protocol 4), ``filesystem.py`` (``_StorageInfo``),
``_nested_dict.py`` (``planner_data``; nested dicts are flattened to names that are their keys with
dots between, and it keeps the keys of each), ``planner_helpers.py`` (a rank without a part of a
tensor may still write a chunk without elements). Older versions leave out ``version``,
``storage_meta`` and ``transform_descriptors``, and those before 2.3 had ``TensorProperties`` in
``torch.distributed._shard``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from math import prod
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from ckptfix.errors import BeyondLimits, FormatError, UnsupportedFormat
from ckptfix.formats.dcp_stream import (
    PACKED,
    Chunk,
    ChunkIndex,
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
from ckptfix.formats.pickle_globals import DTYPES
from ckptfix.formats.pickle_stream import parse, paused_gc
from ckptfix.formats.pickle_tree import (
    CALLS,
    Kind,
    Node,
    PickleTree,
    Text,
    every_node,
    is_dict_like,
    pairs,
)
from ckptfix.formats.torch_tensors import TORCH_DTYPES
from ckptfix.storage.files import FileReader
from ckptfix.wording import Brief

METADATA_NAME = ".metadata"
"""The name of the file; torch writes ``.metadata.tmp`` first, when all data is on disk, and renames
it.
"""

MAX_METADATA = 1 << 29
"""Longest file that is read, in bytes. A chunk of a tensor takes about 200."""

_MAX_DESCRIPTORS = 16
# Longest file, in bytes, that is certain to have fewer opcodes than are read one by one.
_RETOLD = 1 << 22


class DcpTensor(NamedTuple):
    """A tensor of the checkpoint. ``site`` is where its name was pushed (``Text.site``).

    ``dtype``: in safetensors' nouns, None for a ``torch_dtype`` without one. ``chunks``: in the
    order of the file; they lie inside the tensor, but may overlap or leave gaps (``dcp_chunks``).
    """

    fqn: str
    dtype: str | None
    torch_dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    site: int


class DcpBytes(NamedTuple):
    """An item that is not a tensor: any object, pickled by torch.save. ``site`` as in
    ``DcpTensor``.
    """

    fqn: str
    site: int


class PlannedPath(NamedTuple):
    """The keys that lead to an item in the state dict that was saved: ``("model", "fc.weight")``.

    ``sites``: where each key was pushed, None for the index of a list. ``site`` is where the name
    was pushed.
    """

    fqn: str
    path: tuple[str | int, ...]
    sites: tuple[int | None, ...]
    site: int


class DcpMetadata(Brief, Struct, frozen=True, kw_only=True):
    """A parsed ``.metadata``; every tuple is in the order of the file, and no name is twice in one.

    ``planned``: None when the planner left no paths, as with ``flatten_state_dict=False``; then the
    names are the keys of the state dict. ``stored``: by name and first index, as torch looks it up.
    ``save_id``: a UUID of the save, None of older ones. ``tree``: the tree in which names are
    rewritten (``pickle_rewrite``), at the sites of all parts.
    """

    tree: PickleTree
    tensors: tuple[DcpTensor, ...]
    items: tuple[DcpBytes, ...]
    planned: tuple[PlannedPath, ...] | None
    stored: Mapping[tuple[str, tuple[int, ...] | None], StoredItem]
    version: str | None
    save_id: str | None

    @property
    def files(self) -> tuple[PurePosixPath, ...]:
        """Every file that holds an item, once."""
        return tuple(dict.fromkeys(item.path for item in self.stored.values()))

    def items_by_file(self) -> dict[PurePosixPath, list[StoredItem]]:
        """Return the items of each file, in the order of the metadata."""
        found: dict[PurePosixPath, list[StoredItem]] = {}
        for item in self.stored.values():
            found.setdefault(item.path, []).append(item)
        return found


def read_dcp_metadata(reader: FileReader) -> DcpMetadata:
    """Parse an open ``.metadata``. Raises as ``parse_dcp_metadata`` does, UnsupportedFormat when it
    is too long.
    """
    if reader.size > MAX_METADATA:
        raise BeyondLimits(f"it has {reader.size} bytes, over the limit of {MAX_METADATA}")
    return parse_dcp_metadata(reader.read(0, reader.size))


@paused_gc()
def parse_dcp_metadata(data: bytes) -> DcpMetadata:
    """Parse the bytes of a ``.metadata``.

    Raises TruncatedError when they end too early, UnsupportedFormat for what was written by no
    planner or writer that is known here, FormatError for a chunk that is not inside of its tensor,
    a path that leaves the folder, and everything else that torch's writers do not make.
    """
    tree = read_stream(data)
    try:
        return _metadata(tree)
    except FormatError:
        if len(data) > _RETOLD:
            raise
    return _metadata(parse(data))  # the tree of every object gives a better message


_CHECKPOINT = "torch.distributed.checkpoint"
_NAMES = {
    f"{_CHECKPOINT}.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
        "TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"
    ),
    f"{_CHECKPOINT}.filesystem": "_StorageInfo",
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
    "torch.distributed._shard.metadata": "TensorProperties MEM_FORMAT_ENCODING",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "pathlib": "Path PurePath PosixPath PurePosixPath WindowsPath PureWindowsPath",
    "pathlib._local": "Path PurePath PosixPath PurePosixPath WindowsPath PureWindowsPath",
    "collections": "OrderedDict",
}
"""Module -> what the planners and writers of torch 2.0 to 2.13 name of it."""


_NEVER_READ = frozenset({"NEXT_BUFFER", "READONLY_BUFFER", "EXT1", "EXT2", "EXT4"})
"""Opcodes that need what ``pickle.load`` of a file alone does not have: buffers, a registry of
extensions.
"""


def _metadata(tree: PickleTree) -> DcpMetadata:
    if tree.persistent or tree.leftover or not _NEVER_READ.isdisjoint(tree.refused_opcodes):
        raise FormatError("the pickle has values that pickle.load cannot build from a file alone")
    if not _frames_fit(tree):
        raise FormatError(
            "a frame of the pickle ends inside a value, so pickle.load of a file misreads it"
        )
    if tree.last_memo > len(tree.data):
        # CPython keeps the memo in an array as long as its highest entry: a MemoryError for
        # 0x65616368.
        raise FormatError(
            f"the pickle writes memo entry {tree.last_memo}; no pickler numbers entries so high"
        )
    for node in tree.calls:
        # Such as True: an EMPTY_TUPLE with one changed bit or byte.
        args, keywords = node.args if node.kind is Kind.NEW_EX else (node.args, None)
        if type(args) is not tuple or not (keywords is None or is_dict_like(keywords)):
            raise FormatError(
                "the pickle makes a call with arguments that are not a tuple, so pickle.load fails"
            )
        # A MEMOIZE differs from a NEWOBJ_EX in two bits, and then takes what was pushed before.
        if type(node.head) is not Node or node.head.kind is not Kind.GLOBAL:
            raise FormatError(
                "the pickle calls something that is not a class, so pickle.load fails"
            )
    unknown = next((pair for pair in tree.globals if not _is_known(*pair)), None)
    if unknown is not None:
        # FileSystemReader.read_metadata unpickles all of it, and fails where a class does not
        # exist. A planner or a writer of another package may write one; two changed letters of
        # pathlib look the same.
        raise BeyondLimits(
            f"it refers to {'.'.join(unknown)!r:.200}, which torch up to 2.13 never writes to DCP "
            "metadata"
        )
    if tree.impossible:
        # SETITEMS and APPENDS differ in one bit, and lie next to each other in each record.
        raise FormatError(f"the pickle {tree.impossible[0]}, so pickle.load fails")
    for words in tree.refused_opcodes:
        opcode, _, target = words.partition(" on ")
        module, _, name = target.rpartition(".")
        if _is_known(module, name):
            # Such as APPEND on a StorageMeta: no class of torch takes items there.
            raise FormatError(f"the pickle applies {opcode} to {target}, so pickle.load fails")
    if not is_instance(tree.root, "Metadata"):
        raise FormatError(
            "a pickle, but not from torch.distributed.checkpoint: its root is not a Metadata object"
        )
    try:
        return _Reading(tree).metadata()
    except BeyondLimits:
        raise
    except UnsupportedFormat as error:
        raise FormatError(str(error)) from None


_UNFRAMED = 4
"""A pickler writes fewer bytes than this without a frame (``Lib/pickle.py``,
``_Framer._FRAME_SIZE_MIN``).
"""

_LARGE = {b"X": 4, b"B": 4, b"\x8d": 8, b"\x8e": 8, b"\x96": 8}
"""Opcode -> bytes of its length: what a pickler writes between frames from 64 KiB on
(``_FRAME_SIZE_TARGET``).
"""


def _frames_fit(tree: PickleTree) -> bool:
    """Return whether each frame ends where a pickler ends one.

    CPython drops the rest of a frame that is too short for the next value, and goes on in the file
    behind it.
    """
    data, starts = tree.data, {offset for offset, _ in tree.frames}
    end = 0
    for offset, length in tree.frames:
        if offset < end:
            return False
        end = offset + 9 + length
        if end in starts or end + _UNFRAMED > len(data):
            continue
        payloads = [(data[at : at + 1], at + 1) for at in range(end, end + _UNFRAMED)]
        lengths = [
            int.from_bytes(data[at : at + _LARGE[code]], "little")
            for code, at in payloads
            if code in _LARGE
        ]
        if not any(length >= 1 << 16 for length in lengths):
            return False
    return True


def _is_known(module: str, name: str) -> bool:
    return name in _NAMES.get(module, "").split() or (module == "torch" and name in DTYPES)


class _Reading:
    """One walk over a tree. ``_left`` bounds it: a few bytes can refer to a long list again and
    again.
    """

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
                    f"{name.value!r:.200} is {words_for(value)} (expected a tensor or bytes)"
                )
        _check_unique([*tensors, *items])
        stored = self._stored(root)
        planned = None if root.get("planner_data") is None else self._planned(root)
        if planned is not None:
            names = [*(tensor.fqn for tensor in tensors), *(item.fqn for item in items)]
            _ensure_nested({one.fqn: one.path for one in planned}, names)
        meta = root.get("storage_meta")
        if meta is not None and not is_instance(meta, "StorageMeta"):
            raise UnsupportedFormat(
                f"storage_meta is {words_for(meta)} (expected a StorageMeta, as torch's writer "
                "writes)"
            )
        for node in every_node(meta):
            # The path of the save: pathlib raises a TypeError for a number among its parts.
            is_path = (
                node.kind in CALLS
                and type(node.head) is Node
                and node.head.head[0].startswith("pathlib")
            )
            if is_path and (
                type(node.args) is not tuple or not all(type(part) is Text for part in node.args)
            ):
                raise FormatError(
                    f"storage_meta calls {words_for(node)} with something other than text"
                )
        save_id = fields_of(meta).get("save_id") if meta is not None else None
        return DcpMetadata(
            tree=self._tree,
            tensors=tuple(tensors),
            items=tuple(items),
            planned=planned,
            stored=stored,
            version=text_of(root.get("version")),
            save_id=text_of(save_id),
        )

    def _dict(self, root: Mapping[str, Any], name: str) -> Iterator[tuple[Text, Any]]:
        """Yield the pairs of a dict with strings as keys."""
        for key, value in self._pairs(root, name):
            if type(key) is not Text:
                raise FormatError(f"a key of {name} is {words_for(key)} (expected a string)")
            yield key, value

    def _pairs(self, root: Mapping[str, Any], name: str) -> Iterator[tuple[Any, Any]]:
        value = root.get(name)
        if type(value) is not Node or value.kind is not Kind.DICT:
            raise UnsupportedFormat(
                f"{name} is {words_for(value)} (expected a dict, as torch's planner and writer "
                "write)"
            )
        yield from pairs(value)

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise FormatError(
                "the metadata refers to the same lists over and over, which torch never does"
            )

    def _tensor(self, name: Text, node: Node) -> DcpTensor:
        values = fields_of(node)
        torch_dtype = torch_dtype_of(values.get("properties"))
        shape = size_of(values.get("size"), name.value)
        listed = values.get("chunks")
        if type(listed) is not Node or listed.kind is not Kind.LIST:
            raise FormatError(
                f"the chunks of {name.value!r:.200} are {words_for(listed)} (expected a list)"
            )
        found = listed.items or []
        self._spend(len(found))
        chunks = tuple([_chunk(chunk, name.value, shape) for chunk in found])
        return DcpTensor(
            name.value, TORCH_DTYPES.get(torch_dtype), torch_dtype, shape, chunks, name.site
        )

    def _stored(
        self, root: Mapping[str, Any]
    ) -> dict[tuple[str, tuple[int, ...] | None], StoredItem]:
        found: dict[tuple[str, tuple[int, ...] | None], StoredItem] = {}
        for key, value in self._pairs(root, "storage_data"):
            if value is PACKED and type(key) is StoredItem:
                item = key
            elif type(key) is ChunkIndex and is_instance(value, "_StorageInfo"):
                fields = {"fqn": key.fqn, "offset": key.offsets, "index": key.hint}
                item = self._stored_item(fields, fields_of(value))
            elif not is_instance(key, "MetadataIndex") or not is_instance(value, "_StorageInfo"):
                raise UnsupportedFormat(
                    f"storage_data maps {words_for(key)} to {words_for(value)}, which torch's "
                    "file writers never do"
                )
            else:
                item = self._stored_item(fields_of(key), fields_of(value))
            if found.setdefault((item.fqn, item.offsets), item) is not item:
                place = "" if item.offsets is None else f" at {list(item.offsets)}"
                raise FormatError(f"storage_data lists {item.fqn!r:.200}{place} twice")
        return found

    def _stored_item(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> StoredItem:
        name, index = key.get("fqn"), key.get("index")
        path, offset, length = value.get("relative_path"), value.get("offset"), value.get("length")
        if type(name) is not Text or type(path) is not Text:
            raise FormatError(
                f"storage_data maps {words_for(name)} to {words_for(path)} (expected a key and a "
                "file name)"
            )
        if not is_count(offset) or not is_count(length):
            raise FormatError(
                f"{name.value!r:.200} has an invalid location: {length!r:.40} bytes at offset "
                f"{offset!r:.40}"
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
        # A text is a NamedTuple.
        if (
            not isinstance(found, list | tuple)
            or type(found) is Text
            or len(found) > _MAX_DESCRIPTORS
        ):
            raise FormatError("the transform_descriptors of an item are not a short list")
        if not all(type(one) is Text for one in found):
            raise FormatError("the transform_descriptors of an item are not names")
        return tuple(one.value for one in found)

    def _planned(self, root: Mapping[str, Any]) -> tuple[PlannedPath, ...]:
        found = []
        for name, steps in self._dict(root, "planner_data"):
            if type(steps) is not tuple or not all(
                type(step) is Text or type(step) is int for step in steps
            ):
                raise UnsupportedFormat(
                    f"planner_data has an invalid path for {name.value!r:.200}: {words_for(steps)}"
                )
            self._spend(len(steps))
            path = tuple([step.value if type(step) is Text else step for step in steps])
            if (flat := ".".join(map(str, path))) != name.value:
                # Loads go by the name, and names here by the path: a tensor would be verified as
                # another one.
                raise UnsupportedFormat(
                    f"planner_data gives {name.value!r:.200} the path {flat!r:.200}, but torch "
                    "loads the item by its name"
                )
            sites = tuple([step.site if type(step) is Text else None for step in steps])
            found.append(PlannedPath(name.value, path, sites, name.site))
        _check_unique(found)
        return tuple(found)


def _ensure_nested(paths: Mapping[str, tuple[str | int, ...]], names: Sequence[str]) -> None:
    """Raise FormatError where the paths do not make the state dict that was saved.

    ``set_element`` of ``_traverse.py`` puts every item at its path, and ``flatten_state_dict``
    makes its name of that again: a list has every index from 0, a dict no numbers, and nothing is
    both an item and a container.
    """
    inside: dict[tuple[str | int, ...], set[str | int]] = {}
    for name in names:
        path = paths.get(name, (name,))
        for depth in range(len(path)):
            inside.setdefault(path[:depth], set()).add(path[depth])
    for where, steps in inside.items():
        numbers = [step for step in steps if type(step) is int]
        if numbers and (not where or sorted(numbers) != list(range(len(steps)))):
            raise FormatError(
                "planner_data does not number the items of "
                f"{'.'.join(map(str, where))!r:.200} consecutively"
            )
    for name in names:
        if paths.get(name, (name,)) in inside:
            raise FormatError(f"planner_data has {name!r:.200} both as an item and as a dict")


class _Named(Protocol):
    @property
    def fqn(self) -> str: ...


def _check_unique(named: Sequence[_Named]) -> None:
    if len({one.fqn for one in named}) == len(named):
        return
    seen: set[str] = set()
    for one in named:
        if one.fqn in seen:
            raise FormatError(f"the metadata lists {one.fqn!r:.200} twice")
        seen.add(one.fqn)


def _chunk(node: object, name: str, shape: tuple[int, ...]) -> Chunk:
    if type(node) is Chunk:
        chunk = node
    elif is_instance(node, "ChunkStorageMetadata"):
        values = fields_of(node)
        chunk = Chunk(size_of(values.get("offsets"), name), size_of(values.get("sizes"), name))
    else:
        raise FormatError(
            f"a chunk of {name!r:.200} is {words_for(node)} (expected ChunkStorageMetadata)"
        )
    offsets, lengths = chunk
    if len(offsets) != len(shape) or len(lengths) != len(shape):
        raise FormatError(
            f"a chunk of {name!r:.200} has {len(offsets)} dimensions, but the tensor has "
            f"{len(shape)}"
        )
    for offset, length, whole in zip(offsets, lengths, shape, strict=True):
        if offset + length > whole:
            raise FormatError(
                f"the chunk of {name!r:.200} at {list(offsets)} (size {list(lengths)}) does not "
                f"fit in the tensor's shape {list(shape)}"
            )
    return chunk


MODEL_KEY = "model"
"""The key under which Accelerate saves a model's state dict (1.0 to 1.15, ``utils/fsdp_utils.py``).
"""

STATE_KEY, GROUPS_KEY = "state", "param_groups"
"""The keys of ``Optimizer.state_dict()``."""

_OPTIMIZER_KEYS = frozenset({STATE_KEY, GROUPS_KEY})
_FLATTENED = (f"{STATE_KEY}.", f"{GROUPS_KEY}.")


class ModelNames(NamedTuple):
    """The part of a checkpoint that is a model: the keys that lead to it, and DCP's name -> name in
    its state dict.
    """

    prefix: tuple[str | int, ...]
    names: dict[str, str]


def model_names(metadata: DcpMetadata) -> ModelNames | None:
    """Return the model in a checkpoint, None when it has only an optimizer or nothing.

    Goes down through dicts whose values are dicts: into ``model`` where there is one, else into the
    only one outside of optimizers. Where several are left, all are the model, and the names keep
    the keys. Tensors of a single number next to a dict ``model`` are a script's own, such as its
    step.
    """
    tensors = {tensor.fqn: tensor.shape for tensor in metadata.tensors}
    if metadata.planned is None:
        every = [*tensors, *(item.fqn for item in metadata.items)]
        return ModelNames((), {fqn: fqn for fqn in every}) if tensors else None
    paths = {one.fqn: one.path for one in metadata.planned}
    known = {
        fqn: paths.get(fqn, (fqn,)) for fqn in (*tensors, *(item.fqn for item in metadata.items))
    }
    prefix: tuple[str | int, ...] = ()
    skipped: frozenset[str | int]
    while True:
        depth = len(prefix)
        inside = {
            fqn: path for fqn, path in known.items() if path[:depth] == prefix and len(path) > depth
        }
        skipped = _optimizers(inside, depth)
        flattened = flattened_keys(path[depth] for path in inside.values())
        steps = (
            {path[depth] for fqn, path in inside.items() if fqn in tensors} - skipped - flattened
        )
        if not steps:
            return None
        by_name = {
            path[depth]: tensors[fqn]
            for fqn, path in inside.items()
            if fqn in tensors and len(path) == depth + 1
        }
        is_above_model = MODEL_KEY in steps - by_name.keys() and all(
            prod(shape) == 1 for shape in by_name.values()
        )
        if by_name and not is_above_model:
            break  # tensors by name: here is the state dict
        if MODEL_KEY not in steps and len(steps) > 1:
            break
        prefix += (MODEL_KEY if MODEL_KEY in steps else steps.pop(),)
    return ModelNames(
        prefix,
        {
            fqn: ".".join(map(str, path[depth:]))
            for fqn, path in inside.items()
            if path[depth] not in skipped or len(path) == depth + 1
        },
    )


def _optimizers(paths: Mapping[str, tuple[str | int, ...]], depth: int) -> frozenset[str | int]:
    """Return the keys at a depth that lead to an ``Optimizer.state_dict()``."""
    below: dict[str | int, set[str | int]] = {}
    for path in paths.values():
        if len(path) > depth + 1:
            below.setdefault(path[depth], set()).add(path[depth + 1])
    return frozenset(
        step
        for step, keys in below.items()
        if keys and (keys <= _OPTIMIZER_KEYS or keys <= flattened_keys(keys))
    )


def flattened_keys(keys: Iterable[str | int]) -> frozenset[str | int]:
    """Return those keys of a dict that are an optimizer's in one string: ``state.<fqn>.exp_avg``.

    So does ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict`` (torch 2.4 to 2.13,
    ``distributed/checkpoint/state_dict.py``), which always leaves ``param_groups.<fqn>.<option>``;
    without one of those the dict is a model's with a module called "state".
    """
    found = frozenset(key for key in keys if isinstance(key, str) and key.startswith(_FLATTENED))
    return found if any(str(key).startswith(_FLATTENED[1]) for key in found) else frozenset()


def flattened_names(keys: Iterable[str | int]) -> tuple[str, ...]:
    """Return the names of the parameters that the flattened keys of a dict refer to: each has
    options in a group.
    """
    begin = _FLATTENED[1]
    names = (
        str(key)[len(begin) :].rpartition(".")[0] for key in keys if str(key).startswith(begin)
    )
    return tuple(dict.fromkeys(name for name in names if name))


def flattened_parts(key: str, names: Set[str]) -> tuple[str, str, str] | None:
    """Cut ``state.<fqn>.exp_avg`` in front of and behind its name, the longest of ``names`` that
    fits, else None.
    """
    begin = next((begin for begin in _FLATTENED if key.startswith(begin)), None)
    name = key[len(begin) :].rpartition(".")[0] if begin is not None else ""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return (begin, name, key[len(begin) + len(name) :]) if begin is not None and name else None


def keys_beside(metadata: DcpMetadata, names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the first key of everything that is not a part of the model."""
    paths = {one.fqn: one.path for one in metadata.planned or ()}
    every = (*(tensor.fqn for tensor in metadata.tensors), *(item.fqn for item in metadata.items))
    others = (fqn for fqn in every if fqn not in names)
    return tuple(dict.fromkeys(str(paths.get(fqn, (fqn,))[0]) for fqn in others))
