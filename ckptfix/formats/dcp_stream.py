"""The pickle of a ``.metadata``, in which each chunk of a tensor is read at once instead of by its forty opcodes.

A checkpoint of 400 ranks and 3,000 tensors has 1.2 million chunks. What torch's classes pickle (protocol 4, which is
``pickle.dump``'s own since Python 3.8) is alike for all of them, so two patterns find nearly everything:
``ChunkStorageMetadata`` in the lists of ``state_dict_metadata``, and a ``MetadataIndex`` with its ``_StorageInfo`` in
``storage_data``. Both are matched from their NEWOBJ on, where the class is known; every reference is resolved through
the memo. What does not fit is left to the machine of ``pickle_stream``, opcode by opcode, and when that meets what it
cannot know here (a part of a chunk that is used again elsewhere, a memo written by PUT), the whole pickle is.
"""

from itertools import repeat
from pathlib import PurePosixPath
from typing import Any

from ckptfix.errors import FormatError, UnsupportedFormat
from ckptfix.formats.dcp_patterns import (
    CHUNK,
    INDEX,
    INDEX_END,
    INFO_END,
    NEXT,
    TENSOR,
    Memo,
    literal,
    memoized,
    number,
    numbers,
)
from ckptfix.formats.dcp_places import PACKED, Chunk, StoredItem
from ckptfix.formats.dcp_values import is_count, path_inside
from ckptfix.formats.pickle_machine import MISSING, Machine
from ckptfix.formats.pickle_opcodes import HANDLERS
from ckptfix.formats.pickle_stream import parse, paused_gc, run
from ckptfix.formats.pickle_tree import Kind, Node, PickleTree, Text

MAX_PLACES = 6_000_000
"""Most chunks of ``storage_data`` that are read. Each takes about 600 bytes of memory."""


_SIZE_GROUP = 9  # of TENSOR
_TensorParts = tuple[Node, tuple[Any, ...], tuple[tuple[str, int], ...]]
_MAX_KEPT = 1 << 16  # of what is decoded once and met again


def read_stream(data: bytes) -> PickleTree:
    """Read the pickle of a ``.metadata``, as ``pickle_stream.parse`` does and with the same errors.

    In the lists of chunks a ``Chunk`` may stand for the instance of torch's class, and in ``storage_data`` a
    ``StoredItem`` for a key, followed by ``PACKED``. Time and memory grow with the number of bytes.
    """
    if data[:2] in (b"\x80\x04", b"\x80\x05"):
        with paused_gc():
            try:
                return _Reader(data).read()
            except UnsupportedFormat:
                raise
            except FormatError:
                pass
    return parse(data)


class _Reader:
    """One pass. ``machine`` calls ``_newobj`` at each NEWOBJ, which matches as many as follow one another."""

    def __init__(self, data: bytes) -> None:
        handlers = HANDLERS | {0x94: _memoize, 0x81: self._newobj}
        self.machine = Machine(data, Memo(data), handlers)
        self._memo: Memo = self.machine.memo
        self._known: dict[bytes, Any] = {}
        self._sizes: dict[bytes, tuple[int, ...]] = {}
        self._names: dict[str, str] = {}
        self._paths: dict[str, PurePosixPath] = {}
        self._tensors: dict[tuple[bytes, ...], _TensorParts] = {}
        self._keys: set[tuple[bytes | None, ...]] = set()
        self._places = 0

    def read(self) -> PickleTree:
        try:
            return run(self.machine)
        finally:
            self.machine.handlers = {}  # this and the machine hold each other, and all that was read

    def _newobj(self, machine: Machine) -> None:
        args = machine.stack.pop()
        head = machine.stack[-1]
        one = None
        if args == () and type(head) is Node and head.kind is Kind.GLOBAL:
            if _is_class(head, "TensorStorageMetadata") and self._tensor(head):
                return
            if _is_class(head, "ChunkStorageMetadata"):
                one = self._chunk
            elif _is_class(head, "MetadataIndex"):
                one = self._place
        if one is None or not one():
            machine.stack[-1] = Node(Kind.NEW, head, args)
            machine.refused.add(0x81)
            machine.position += 1
            return
        stack, data = machine.stack, machine.data
        for _ in repeat(None, len(data)):
            following = NEXT(data, machine.position)
            if following is None or self._value(following[1]) is not head:
                return
            before = machine.position
            machine.position = following.end()
            stack.append(head)
            if not one():
                stack.pop()
                machine.position = before
                return

    def _value(self, ref: bytes) -> Any:
        """Return what the memo holds, MISSING when nothing; entries are written once, so that it stays true."""
        known = self._known
        value = known.get(ref, MISSING)
        if value is MISSING:
            index = int.from_bytes(ref[1:], "little")
            try:
                value = self._memo[index]
            except KeyError:
                return MISSING
            if len(known) >= _MAX_KEPT:
                known.clear()
            known[ref] = value
        return value

    def _says(self, ref: bytes, word: str) -> bool:
        value = self._value(ref)
        return type(value) is Text and value[0] == word

    def _tensor(self, head: Node) -> bool:
        """Read a tensor up to the begin of its list of chunks, as the machine itself would; False for another one."""
        machine = self.machine
        match = TENSOR(machine.data, machine.position)
        if match is None:
            return False
        raw = match[_SIZE_GROUP]
        size = self._size(raw)
        refs = (*match.groups()[: _SIZE_GROUP - 1], match[_SIZE_GROUP + 1])
        known = self._tensors.get(refs) or self._tensor_parts(*refs)
        if size is None or known is None:
            return False
        kind, parts, keys = known
        tensor, state, chunks = Node(Kind.NEW, head, ()), Node(Kind.DICT), Node(Kind.LIST)
        properties = Node(Kind.NEW, kind, ())
        properties.states = [parts]
        passed = [*[MISSING] * (memoized(raw) - 1), size] if memoized(raw) else []
        self._memo.memoize_all((tensor, state, properties, parts, *passed, chunks))
        first, second, third = (
            Text(word, match.start(group), source)
            for group, (word, source) in zip((1, _SIZE_GROUP - 1, _SIZE_GROUP + 1), keys, strict=True)
        )
        machine.texts += (first, second, third)
        machine.stack[-1] = tensor
        machine.stack.append(state)
        machine.meta.append(machine.stack)
        machine.stack = [first, properties, second, size, third, chunks]
        machine.containers += 2
        machine.position = match.end()
        return True

    def _tensor_parts(
        self,
        properties: bytes,
        kind: bytes,
        dtype: bytes,
        layout: bytes,
        grad: bytes,
        memory: bytes,
        pinned: bytes,
        size: bytes,
        chunks: bytes,
    ) -> _TensorParts | None:
        """Return what these refer to: the class and the state of the properties, and the keys with their sources."""
        value = self._value
        words = {properties: "properties", size: "size", chunks: "chunks"}
        parts = (value(dtype), value(layout), grad == b"\x88", value(memory), pinned == b"\x88")
        keys = tuple((value(ref)[0], value(ref)[1]) for ref, word in words.items() if self._says(ref, word))
        if len(keys) < 3 or MISSING in parts or not _is_class(value(kind), "TensorProperties"):
            return None
        if len(self._tensors) >= _MAX_KEPT:
            self._tensors.clear()
        found = self._tensors[properties, kind, dtype, layout, grad, memory, pinned, size, chunks] = (
            value(kind),
            parts,
            keys,
        )
        return found

    def _chunk(self) -> bool:
        """Put a chunk in the place of its class on the stack. False when no such chunk begins here."""
        machine = self.machine
        match = CHUNK(machine.data, machine.position)
        if match is None:
            return False
        one, offsets, other, lengths = match.groups()
        if (one, other) not in self._keys:
            if not self._says(one, "offsets") or not self._says(other, "sizes"):
                return False
            self._keys.add((one, other))
        first, last = self._size(offsets), self._size(lengths)
        if first is None or last is None:
            return False
        self._memo.skip(machine.position, 2 + memoized(offsets) + memoized(lengths))
        machine.stack[-1] = Chunk(first, last)
        machine.position = match.end()
        return True

    def _place(self) -> bool:
        """Put a chunk's key of ``storage_data``, and the value to it, in the place of the class of the key."""
        machine = self.machine
        data, start = machine.data, machine.position
        begin = INDEX(data, start)
        name = self._name(data, begin.end()) if begin is not None else None
        middle = INDEX_END(data, name[1]) if name is not None else None
        file = self._name(data, middle.end()) if middle is not None else None
        end = INFO_END(data, file[1]) if file is not None else None
        if begin is None or name is None or middle is None or file is None or end is None:
            return False
        hint_key, hint, offset_key, raw, info, path_key = middle.groups()
        begin_key, offset, length_key, length, transforms_key = end.groups()
        keys = (begin[1], hint_key, offset_key, info, path_key, begin_key, length_key, transforms_key)
        is_one = keys in self._keys or self._are_keys(*keys)
        first = self._size(raw) if is_one else None
        path = self._path(file[0].value) if is_one else None
        from_byte, count = number(offset), number(length)
        if first is None or path is None or not is_count(from_byte) or not is_count(count):
            return False
        self._places += 1
        if self._places > MAX_PLACES:
            raise UnsupportedFormat(f"it has more than {MAX_PLACES} chunks")
        self._memo.skip(start, 4 + name[2] + memoized(raw) + file[2])
        machine.texts += (name[0], file[0])
        fqn, site, _ = name[0]
        place = None if hint == b"N" else number(hint)
        machine.stack[-1] = StoredItem(fqn, first, place, path, from_byte, count, (), site)
        machine.stack.append(PACKED)
        machine.position = end.end()
        return True

    def _are_keys(
        self,
        fqn: bytes,
        index: bytes,
        first: bytes,
        info: bytes,
        path: bytes,
        offset: bytes,
        length: bytes,
        transforms: bytes | None,
    ) -> bool:
        """Whether these refer to the names of the attributes of ``MetadataIndex`` and ``_StorageInfo``."""
        words = {fqn: "fqn", index: "index", first: "offset", path: "relative_path", length: "length"}
        is_one = (
            len(words) == 5
            and all(self._says(ref, word) for ref, word in words.items())
            and self._says(offset, "offset")
            and (transforms is None or self._says(transforms, "transform_descriptors"))
            and _is_class(self._value(info), "_StorageInfo")
        )
        if is_one and len(self._keys) < _MAX_KEPT:
            self._keys.add((fqn, index, first, info, path, offset, length, transforms))
        return is_one

    def _name(self, data: bytes, position: int) -> tuple[Text, int, int] | None:
        """Return the string that is pushed at a position, where the push ends, and how many entries it wrote."""
        code = data[position : position + 1]
        if code in (b"h", b"j"):
            end = position + (2 if code == b"h" else 5)
            value = self._value(data[position:end])
            return (Text(value[0], position, value[1]), end, 0) if type(value) is Text else None
        if code not in (b"\x8c", b"X"):
            return None
        text, end, is_memoized = literal(data, position)
        return Text(self._names.setdefault(text, text), position, position), end, int(is_memoized)

    def _size(self, raw: bytes) -> tuple[int, ...] | None:
        size = self._sizes.get(raw)
        if size is not None:
            return size
        is_ref = len(raw) in (2, 5)
        value = self._value(raw if is_ref else raw[: 2 if raw[:1] == b"h" else 5])
        if not is_ref:
            is_size = type(value) is Node and value.is_global("torch", "Size")
            value = numbers(raw) if is_size else None
        if type(value) is not tuple or not all(map(is_count, value)):
            return None
        if len(self._sizes) >= _MAX_KEPT:
            self._sizes.clear()
        self._sizes[raw] = value
        return value

    def _path(self, text: str) -> PurePosixPath | None:
        path = self._paths.get(text)
        if path is None:
            try:
                path = self._paths[text] = path_inside(text)
            except FormatError:
                return None
        return path


def _memoize(machine: Machine) -> None:
    machine.memo.memoize(machine.stack[-1])
    machine.refused.add(0x94)
    machine.position += 1


def _is_class(head: Any, name: str) -> bool:
    if type(head) is not Node or head.kind is not Kind.GLOBAL:
        return False
    return bool(head.head[1] == name and head.head[0].startswith("torch.distributed."))
