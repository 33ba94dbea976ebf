"""The weights in safetensors files and files of torch.save, alone or as shards; their ties, and
their other contents.

Ties in the metadata of a safetensors file are name left out -> name kept, as ``save_model`` records
them. Metadata is also where users keep words of their own, and a word can be the name of a tensor:
``{"best": "w"}``. Only words that end as the name of a tensor does are read as ties; other ties
that ckptfix writes are listed under a key of its own.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckptfix.checkpoint.entries import Entry
from ckptfix.checkpoint.folder import Component
from ckptfix.checkpoint.rank_parts import joined_parts
from ckptfix.errors import OperationError
from ckptfix.formats.pickle_tree import (
    Kind,
    Node,
    PickleTree,
    Text,
    Visits,
    attribute,
    child,
    is_dict_like,
    pairs,
)
from ckptfix.formats.safetensors_file import DCP_SHARDING_INFO, SafetensorsFile
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_tensors import (
    PickledStorage,
    PickledTensor,
    is_tensor,
    kind_of_tensor,
    read_tensor,
)
from ckptfix.formats.torch_zip import TorchZip, storage_records
from ckptfix.storage.files import AnyPath
from ckptfix.storage.paths import command
from ckptfix.storage.reading import Piece
from ckptfix.tensors.dcp_tensors import layout_of_chunks
from ckptfix.tensors.stored import Contiguous, Format, Layout, StoredTensor, Strided, Weights

_LONGEST_NUMBER = 64  # bits; a pickle can hold a number that takes minutes to print
KeyPath = tuple[str, ...]


def held_beside(tree: PickleTree, taken: Collection[KeyPath]) -> tuple[str, ...]:
    """Return everything that is not a part of the state dicts at the paths in ``taken``, each once.

    A value is named by the keys that lead to it, with dots between. The values of a state dict
    under string keys are its own affair (``PickledStateDict.opaque_keys``), those under other keys
    are none of its tensors.
    """
    return tuple(_beside((), tree.root, frozenset(taken), _steps(taken)))


def holds_tensors(value: Any, visits: Visits) -> bool:
    """Return whether a tensor lies in a value, a dict or list, at any depth: a state dict, an
    optimizer's state.

    Nodes that ``visits`` has met are not searched again. Raises FormatError for a pickle that a
    pickler never writes.
    """
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if not visits.first(node):
            continue
        if node is not value and is_tensor(node):
            return True
        waiting += (one for _, one in pairs(node))
        if node.kind is Kind.LIST:
            waiting += node.items or ()
    return False


def leads_to(path: KeyPath, taken: Collection[KeyPath]) -> bool:
    """Return whether one of the paths in ``taken`` begins with this one."""
    return any(one[: len(path)] == path for one in taken)


def _steps(taken: Collection[KeyPath]) -> frozenset[KeyPath]:
    """Return every path on the way to one of ``taken``, those included."""
    return frozenset(path[:length] for path in taken for length in range(len(path) + 1))


def _beside(
    path: KeyPath, node: Any, taken: frozenset[KeyPath], steps: frozenset[KeyPath]
) -> Iterator[str]:
    """Yield the other contents of a value on the way; each step on the way is its own node, and so
    met once.
    """
    is_state_dict = path in taken
    for is_name, word, value in _members(node):
        inner = (*path, word)
        if is_name and inner in steps:
            yield from _beside(inner, value, taken, steps)
        elif not (is_name and is_state_dict):
            yield ".".join(inner)


def _members(node: Any) -> Iterator[tuple[bool, str, Any]]:
    """Yield whether a key can be a step of a path, the word for it, and its value."""
    if type(node) is Node and node.kind is Kind.LIST and not is_dict_like(node):
        yield from ((True, str(index), value) for index, value in enumerate(node.items or ()))
        return
    for key, value in pairs(node):
        yield type(key) is Text, _word(key), value


def _word(key: Any) -> str:
    if type(key) is Text:
        return key.value
    if type(key) is int and key.bit_length() > _LONGEST_NUMBER:
        return "<a long number>"
    if key is None or type(key) in (int, float, bool):
        return str(key)
    if type(key) is bytes:
        return repr(key[:40])
    return "<a tuple>" if type(key) is tuple else repr(key)


LISTED = "ckptfix.ties"
"""Metadata key: a JSON list of the names left out that do not look like names of tensors."""


def ties_in(metadata: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Return the ties that a file records. ``names``: of its tensors."""
    endings = _endings(names)
    listed = _listed(metadata)
    return {
        other: kept
        for other, kept in metadata.items()
        if kept in names
        and other not in names
        and (other in listed or _looks_tied(other, kept, endings))
    }


def metadata_of(ties: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Return the metadata that records ties, so that ``ties_in`` finds them again."""
    endings = _endings(names)
    odd = [other for other, kept in ties.items() if not _looks_tied(other, kept, endings)]
    return {**ties, **({LISTED: json.dumps(odd)} if odd else {})}


def unwritable(
    metadata: Mapping[str, str], ties: Mapping[str, str], names: Collection[str]
) -> set[str]:
    """Return the words that cannot be written here: they would be read as ties, or a tie has their
    key.
    """
    return {
        *ties_in(metadata, names),
        *(key for key, text in metadata.items() if ties.get(key, text) != text),
    }


def _endings(names: Collection[str]) -> set[str]:
    return {_ending(name) for name in names}


def _ending(name: str) -> str:
    return name.rpartition(".")[2]


def _looks_tied(other: str, kept: str, endings: Collection[str]) -> bool:
    return _ending(other) == _ending(kept) or ("." in other and _ending(other) in endings)


def _listed(metadata: Mapping[str, str]) -> set[str]:
    try:
        found = json.loads(metadata.get(LISTED, "[]"))
    except (ValueError, RecursionError):
        return set()
    return {name for name in found if type(name) is str} if isinstance(found, list) else set()


_MOST_REPEATED = 1 << 30
"""Bytes that a tensor may claim beyond its storage: a mask made by ``expand`` is read, a petabyte
of one number not.
"""


def file_weights(root: AnyPath, entry: Entry, others: Collection[tuple[str, ...]] = ()) -> Weights:
    """Return the weights of a readable entry. ``others``: the paths of the other entries that are
    in its file.

    Raises OperationError for a tensor whose bytes cannot be found, or that claims far more than
    there are, and for a name that two shards hold.
    """
    if entry.members and entry.members[0].name.is_of_parts:
        return _weights_in_parts(root, entry)
    _ensure_once(root, entry)
    found: list[StoredTensor] = []
    ties = dict(entry.aliases)
    versions: dict[str, int] = {}
    checksums: dict[Piece, int] = {}
    words: dict[str, str] = {}
    disputed: set[str] = set()
    views: list[str] = []
    names = _names_in_safetensors(entry.members)
    for member in entry.members:
        path = root / member.path  # one object for 100,000 tensors
        if isinstance(member.content, SafetensorsFile):
            metadata = member.content.metadata
            recorded = ties_in(metadata, names) if metadata else {}
            ties.update(recorded)
            own = {
                key: text
                for key, text in metadata.items()
                if key not in recorded and key not in (LISTED, *_PLACES)
            }
            disputed.update(key for key, text in own.items() if words.get(key, text) != text)
            words |= own
            found += (
                StoredTensor(one.fqn, one.dtype, one.shape, run(path, one.data_offsets))
                for one in member.content.tensors
            )
        elif isinstance(member.content, TorchFile):
            mine = list(_of_torch(path, member.content, entry.path, ties))
            found += mine
            views += _views(mine, member.content, entry.path)
            versions.update(module_versions(member.content, entry.path))
            checksums.update(record_checksums(path, member.content, entry.path))
    names = {tensor.fqn for tensor in found}  # of torch files, too
    is_torch = any(isinstance(member.content, TorchFile) for member in entry.members)
    indexed = entry.label.endswith(".json")
    opaque = tuple(
        name
        for name in entry.shapes
        if name not in names and name not in ties and not leads_to((*entry.path, name), others)
    )
    return Weights(
        label=entry.label,
        format=Format.TORCH if is_torch else Format.SAFETENSORS,
        index=entry.index,
        files=tuple(member.path for member in entry.members)
        + ((entry.members[0].path.with_name(entry.label),) if indexed else ()),
        tensors=tuple(found),
        ties={name: kept for name, kept in ties.items() if kept in names and name not in names},
        opaque=opaque,
        unread=dict(_unread(entry, opaque)) if opaque else {},
        nested=tuple(_nested(entry, opaque)) if opaque else (),
        left=_left(entry.members, (entry.path, *others)),
        path=entry.path,
        versions=versions,
        checksums=checksums,
        metadata={key: text for key, text in words.items() if key not in disputed},
        disputed=tuple(sorted(disputed)),
        index_words=entry.index_words,
        views=tuple(views),
    )


def _weights_in_parts(root: AnyPath, entry: Entry) -> Weights:
    """Return the weights whose parts are in the files of several ranks, which cover every tensor
    once.
    """
    tensors = []
    for tensor in joined_parts(entry.members):
        parts = sorted(
            (part.chunk, run(root / part.file.path, part.tensor.data_offsets))
            for part in tensor.parts
            if 0 not in part.chunk.lengths
        )
        width = DTYPE_BITS[tensor.dtype] // 8
        if len(parts) > 1 and not width:
            raise OperationError(
                f"{root / entry.label}: the parts of {tensor.fqn!r} have dtype {tensor.dtype}, "
                "whose elements are smaller than a byte; next: join them with torch's "
                "consolidate_safetensors_files"
            )
        layout = layout_of_chunks(tensor.shape, parts, width) if parts else Contiguous(())
        tensors.append(StoredTensor(tensor.fqn, tensor.dtype, tensor.shape, layout))
    return Weights(
        label=entry.label,
        format=Format.SAFETENSORS,
        index=entry.index,
        files=tuple(member.path for member in entry.members),
        tensors=tuple(tensors),
    )


_PLACES = ("DCP_VERSION", DCP_SHARDING_INFO)
"""Metadata of torch's ``HuggingFaceStorageWriter``, true only of the files that it wrote itself."""


def _names_in_safetensors(members: Iterable[Component]) -> set[str]:
    """Return the names in the safetensors files of a model: the tensor of a tie may lie in another
    shard.
    """
    return {
        tensor.fqn
        for member in members
        if isinstance(member.content, SafetensorsFile)
        for tensor in member.content.tensors
    }


def _ensure_once(root: AnyPath, entry: Entry) -> None:
    """Raise OperationError when two files of one model hold a name, as either may be the right
    one.
    """
    holders: dict[str, AnyPath] = {}
    for member in entry.members if len(entry.members) > 1 else ():
        path = root / member.path
        for name in _names(member):
            if holders.setdefault(name, path) is not path:
                raise OperationError(
                    f"{root / entry.label}: {name!r} is in both {holders[name].name} and "
                    f"{path.name}; next: {command('check', root)}"
                )


def _names(member: Component) -> Iterable[str]:
    if isinstance(member.content, SafetensorsFile):
        return (tensor.fqn for tensor in member.content.tensors)
    return (name for scope in member.scopes if scope.path == () for name in scope.names)


def run(path: AnyPath, offsets: tuple[int, int] | None) -> Contiguous:
    """Return the layout of a tensor that is one run of bytes, from the first offset in its file to
    the second.
    """
    assert offsets is not None, "a tensor of safetensors is one run"
    begin, end = offsets
    return Contiguous((Piece(path, begin, end - begin),) if end > begin else ())


def recorded_ties(file: SafetensorsFile) -> dict[str, str]:
    """Return the ties that ``safetensors.torch.save_model`` records: the name left out -> the name
    kept.
    """
    return ties_in(file.metadata, {tensor.fqn for tensor in file.tensors}) if file.metadata else {}


def _of_torch(
    path: AnyPath, file: TorchFile, at: tuple[str, ...], ties: dict[str, str]
) -> Iterator[StoredTensor]:
    """Yield the tensors of one state dict, and note in ``ties`` the names of those that came
    before.
    """
    first: dict[object, str] = {}
    for state_dict in file.state_dicts:
        for one in state_dict.tensors if state_dict.path == at else ():
            if 0 not in one.shape and (kept := first.setdefault(one.view, one.fqn)) != one.fqn:
                ties[one.fqn] = kept
                continue
            yield StoredTensor(one.fqn, one.dtype, one.shape, bounded_layout(path, file, one))


def _views(tensors: Iterable[StoredTensor], file: TorchFile, at: tuple[str, ...]) -> list[str]:
    """Return the tensors that have a storage with others, each of which has another part of it."""
    kept = {tensor.fqn for tensor in tensors if 0 not in tensor.shape}
    storages: dict[str, list[str]] = {}
    for state_dict in file.state_dicts:
        for one in state_dict.tensors if state_dict.path == at else ():
            if one.fqn in kept:
                storages.setdefault(one.storage_key, []).append(one.fqn)
    return [name for names in storages.values() if len(names) > 1 for name in names]


def tensor_of(
    path: AnyPath, file: TorchFile, node: object, fqn: str, known: Mapping[str, PickledStorage]
) -> StoredTensor | None:
    """Return a plain tensor of a pickle under the name ``fqn``, None for any other value.

    ``known``: what ``storages`` returns. Raises FormatError for a tensor that is not inside its
    storage, OperationError as ``bounded_layout`` does.
    """
    if type(node) is not Node or not is_tensor(node):
        return None
    tensor = read_tensor(Text(fqn, 0, 0), node, known)
    if tensor is None:
        return None
    return StoredTensor(fqn, tensor.dtype, tensor.shape, bounded_layout(path, file, tensor))


def bounded_layout(path: AnyPath, file: TorchFile, tensor: PickledTensor) -> Layout:
    """Return ``torch_layout`` of a tensor that may be written out.

    Raises OperationError as that does, and for one that repeats its storage beyond a gigabyte.
    """
    layout = torch_layout(path, file, tensor)
    if isinstance(layout, Strided):
        have = layout.storage.length
        if layout.nbytes - have > _MOST_REPEATED:
            claim = (
                f"{tensor.fqn!r} claims {layout.nbytes} bytes of a storage of {have}, as an "
                "expanded tensor does"
            )
            raise OperationError(
                f"{path}: {claim}; next: load it with torch, and save it without that tensor"
            )
    return layout


def torch_layout(path: AnyPath, file: TorchFile, tensor: PickledTensor) -> Layout:
    """Return the location of a tensor of a torch file. Raises OperationError for one in a
    compressed record.
    """
    storage = file.storage_ranges.get(tensor.storage_key)
    if storage is None:
        raise OperationError(
            f"{path}: the record of {tensor.fqn!r} is compressed, which torch.save never does; "
            "next: load it with torch and save it again"
        )
    offset, length = storage
    if tensor.begin is not None and tensor.end is not None:
        return run(path, (offset + tensor.begin, offset + tensor.end))
    width = DTYPE_BITS[tensor.dtype] // 8
    return Strided(
        storage=Piece(path, offset, length - length % width),
        first=tensor.storage_offset,
        shape=tensor.shape,
        stride=tensor.stride,
        width=width,
    )


def record_checksums(
    path: AnyPath, file: TorchFile, at: tuple[str, ...] | None = None
) -> Iterator[tuple[Piece, int]]:
    """Yield the records that the tensors of one state dict lie in, of all storages for None, with
    their CRC-32.

    One of 0 was never written (torch can leave them out).
    """
    if not isinstance(file.container, TorchZip):
        return
    records = storage_records(file.container)
    used = set(records)
    if at is not None:
        used &= {
            one.storage_key for held in file.state_dicts if held.path == at for one in held.tensors
        }
    for key in used:
        record = records[key]
        if record.crc and record.is_stored and record.size:
            yield Piece(path, record.data_offset, record.size), record.crc


def module_versions(file: TorchFile, at: tuple[str, ...]) -> dict[str, int]:
    """Return module -> version out of the ``_metadata`` that torch gives a module's state dict."""
    found = {}
    for name, value in pairs(attribute(_reached(file, at), "_metadata")):
        version = child(value, "version")
        if type(name) is Text and type(version) is int:
            found[name.value] = version
    return found


def _left(members: Sequence[Component], taken: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the contents of the files other than the state dicts at these paths."""
    return tuple(
        name
        for member in members
        if isinstance(member.content, TorchFile)
        for name in held_beside(member.content.tree, taken)
    )


def _nested(entry: Entry, opaque: Iterable[str]) -> Iterator[str]:
    """Yield the opaque names under which tensors lie. The content of an extra state belongs to its
    module.
    """
    wanted = {name for name in opaque if not name.endswith("_extra_state")}
    visits = Visits()
    for member in entry.members:
        if isinstance(member.content, TorchFile):
            for key, value in pairs(_reached(member.content, entry.path)):
                if type(key) is Text and key.value in wanted and holds_tensors(value, visits):
                    yield key.value


def _unread(entry: Entry, opaque: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the opaque names that are tensors, with their kinds; an extra state belongs to its
    module.
    """
    wanted = {name for name in opaque if not name.endswith("_extra_state")}
    for member in entry.members:
        if isinstance(member.content, TorchFile):
            for key, value in pairs(_reached(member.content, entry.path)):
                if type(key) is Text and key.value in wanted and is_tensor(value):
                    yield key.value, kind_of_tensor(value)


def _reached(file: TorchFile, at: tuple[str, ...]) -> object:
    node: object = file.tree.root
    for step in at:
        if type(node) is Node and node.kind is Kind.LIST and step.isdigit():
            node = (node.items or [])[int(step)]
        else:
            node = child(node, step)
    return node


def is_expanded(layout: Layout) -> bool:
    """Return whether a tensor claims more bytes than its storage has, as ``expand`` makes it."""
    return isinstance(layout, Strided) and layout.nbytes > layout.storage.length
