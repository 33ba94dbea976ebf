"""The pickle of a DCP ``.metadata`` file, in which each chunk of a tensor is read at once instead
of by its forty opcodes.

A checkpoint of 400 ranks and 3,000 tensors has 1.2 million chunks. What torch's classes pickle
(protocol 4, which is ``pickle.dump``'s own since Python 3.8) is alike for all of them, so two
patterns find nearly everything: ``ChunkStorageMetadata`` in the lists of ``state_dict_metadata``,
and a ``MetadataIndex`` with its ``_StorageInfo`` in ``storage_data``. Both are matched from their
NEWOBJ on, where the class is known; every reference is resolved through the memo. What does not fit
is left to the machine of ``pickle_stream``, opcode by opcode, and when that meets what it cannot
know here (a part of a chunk that is used again elsewhere, a memo written by PUT), the whole pickle
is.

A reference is BINGET or LONG_BINGET, a number one of BININT1, BININT2, BININT and LONG1, a size the
call of ``torch.Size``, or a reference to an earlier one. Facts from CPython's
``Modules/_pickle.c``: how protocol 4 writes instances, tuples and numbers.
"""

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeGuard

from ckptfix.errors import FormatError, UnsupportedFormat
from ckptfix.formats.pickle_globals import DTYPES, LAYOUTS
from ckptfix.formats.pickle_opcodes import HANDLERS, MAX_TEXT, MISSING, Machine
from ckptfix.formats.pickle_stream import parse, paused_gc, run
from ckptfix.formats.pickle_tree import CALLS, Kind, Node, PickleTree, Text

_REF = rb"(h.|j.{4})"
_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_TUPLE = rb"(?:\)|(?:%b\x85|%b{2}\x86|%b{3}\x87|\((?:%b){4,64}t)\x94)" % ((_INT,) * 4)
_SIZE = rb"((?:h.|j.{4})(?:%b\x85\x94R\x94)?)" % _TUPLE
_OBJECT = rb"\x81\x94\}\x94\("


def _pattern(*parts: bytes) -> Callable[[bytes, int], "re.Match[bytes] | None"]:
    return re.compile(b"".join(parts), re.DOTALL).match


# Each begins at the NEWOBJ of an instance, and is cut where a string may be pushed: a pattern
# cannot count its bytes.
CHUNK = _pattern(_OBJECT, _REF, _SIZE, _REF, _SIZE, b"ub")
TENSOR = _pattern(
    _OBJECT, _REF, _REF, rb"\)\x81\x94\(", _REF, _REF, rb"([\x88\x89])", _REF, rb"([\x88\x89])",
    rb"t\x94b", _REF, _SIZE, _REF, rb"\]\x94",
)  # fmt: skip
NEXT = _pattern(_REF, rb"\)(?=\x81)")
INDEX = _pattern(_OBJECT, _REF)
INDEX_END = _pattern(_REF, b"(N|", _INT, b")", _REF, _SIZE, b"ub", _REF, rb"\)", _OBJECT, _REF)
INFO_END = _pattern(_REF, b"(", _INT, b")", _REF, b"(", _INT, b")", b"(?:", _REF, b"N)?ub")
_INTS = re.compile(_INT, re.DOTALL).finditer


class Unknown(FormatError):
    """Error for a pickle that only the machine for every opcode can read."""


class Memo(dict[int, Any]):
    """The memo of a pickle in which nothing but MEMOIZE writes.

    ``count``: how many entries it has; those of what was matched are found again when they are
    asked for: ``starts`` has the first entry of each match, ``positions`` where it is.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data
        self.count = 0
        self.starts = array("Q")
        self.positions = array("Q")

    def __setitem__(self, index: int, value: Any) -> None:
        raise Unknown("a PUT in a pickle of protocol 4")

    def memoize(self, value: Any) -> None:
        """Write the next entry."""
        super().__setitem__(self.count, value)
        self.count += 1

    def memoize_all(self, values: Sequence[Any]) -> None:
        """Write the next entries."""
        self.update(zip(range(self.count, self.count + len(values)), values, strict=True))
        self.count += len(values)

    def skip(self, position: int, count: int) -> None:
        """Note that what was matched at a position wrote so many entries."""
        self.starts.append(self.count)
        self.positions.append(position)
        self.count += count

    def __missing__(self, index: int) -> Any:
        match = bisect_right(self.starts, index) - 1
        if match < 0 or index >= self.count:
            raise KeyError(index)
        value = _Finder(self, self.positions[match], self.starts[match]).entry(index)
        super().__setitem__(index, value)
        return value


class _Finder:
    """Second pass over a match, for one of the entries that it wrote."""

    def __init__(self, memo: Memo, position: int, start: int) -> None:
        self._memo = memo
        self._position = position
        self._next = start
        self._found: dict[int, Any] = {}

    def entry(self, index: int) -> Any:
        data, position = self._memo.data, self._position
        chunk = CHUNK(data, position)
        if chunk is not None:
            self._next += 2
            self._size(chunk[2])
            self._size(chunk[4])
        else:
            begin = INDEX(data, position)
            assert begin is not None
            self._next += 2
            position = self._name(begin.end())
            middle = INDEX_END(data, position)
            assert middle is not None
            self._size(middle[4])
            self._next += 2
            self._name(middle.end())
        if index not in self._found:
            raise Unknown("a part of a chunk is used again")
        return self._found[index]

    def _size(self, raw: bytes) -> None:
        count = memoized(raw)
        if count:
            self._next += count
            self._found[self._next - 1] = numbers(raw)

    def _name(self, position: int) -> int:
        if self._memo.data[position] in b"hj":
            return position + (2 if self._memo.data[position : position + 1] == b"h" else 5)
        value, end, is_memoized = literal(self._memo.data, position)
        if is_memoized:
            self._found[self._next] = Text(value, position, position)
            self._next += 1
        return end


def literal(data: bytes, position: int) -> tuple[str, int, bool]:
    """Return a string that is pushed by its bytes, the end of the push, and whether MEMOIZE
    follows.
    """
    width = 1 if data[position] == 0x8C else 4
    begin = position + 1 + width
    end = begin + int.from_bytes(data[position + 1 : begin], "little")
    if end > len(data) or end - begin > MAX_TEXT:
        raise Unknown("a string that is not a name")
    try:
        value = str(data[begin:end], "utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Unknown("a string that is not UTF-8") from None
    is_memoized = data[end : end + 1] == b"\x94"
    return value, end + is_memoized, is_memoized


def memoized(raw: bytes) -> int:
    """Return the number of entries that a size writes: of its tuple, unless that is empty, of the
    arguments and the result.
    """
    if len(raw) in (2, 5):
        return 0
    return 2 if raw.endswith(b")\x85\x94R\x94") and len(raw) in (7, 10) else 3


def numbers(raw: bytes) -> tuple[int, ...]:
    """Return the numbers of a size that is written out."""
    begin = 2 if raw[:1] == b"h" else 5
    body = raw[begin : -len(b"\x85\x94R\x94")]
    if body == b")":
        return ()
    body = body[1:] if body[:1] == b"(" else body
    return tuple(number(one[0]) for one in _INTS(body[: -len(b"t\x94")]))


def number(raw: bytes) -> int:
    """Return the number that one of the four opcodes pushes."""
    if raw[:1] == b"J":
        return int.from_bytes(raw[1:], "little", signed=True)
    if raw[:1] == b"\x8a":
        return int.from_bytes(raw[2:], "little", signed=True)
    return int.from_bytes(raw[1:], "little")


_MANY = 1 << 62
_MAX_DIMENSIONS = 64
_MAX_FIELDS = 16  # of an instance; torch's classes have five at most
_WORDS = {"Text": "a string", "int": "an int", "NoneType": "None"}


def is_instance(node: object, name: str) -> TypeGuard[Node]:
    """Return whether a value is an instance of the class of torch.distributed with this name."""
    if type(node) is not Node or node.kind is not Kind.NEW:
        return False
    head = node.head
    if type(head) is not Node or head.kind is not Kind.GLOBAL:
        return False
    return bool(head.head[1] == name and head.head[0].startswith("torch.distributed."))


def fields_of(node: Node) -> dict[str, Any]:
    """Return the attributes of an instance. Raises FormatError when there are many, or other state
    than a dict.
    """
    states = node.states or []
    if not states:
        return {}
    state = states[0]
    if len(states) > 1 or type(state) is not Node or state.kind is not Kind.DICT:
        raise FormatError(f"the state of {words_for(node)} is not a dict")
    entries = state.entries or []
    if len(entries) > 2 * _MAX_FIELDS:
        raise FormatError(
            f"{words_for(node)} has {len(entries) // 2} attributes (expected at most {_MAX_FIELDS})"
        )
    if any(type(key) is not Text for key in entries[::2]):
        raise FormatError(f"{words_for(node)} has an attribute whose name is not a string")
    return {key[0]: value for key, value in zip(entries[::2], entries[1::2], strict=True)}


def torch_dtype_of(properties: object) -> str:
    """Return the name of a dtype, the first value of ``TensorProperties.__getstate__``.

    Raises FormatError for a state that its ``__setstate__`` refuses: dtype, layout, whether it has
    gradients, the memory format as a number of an enum, whether it is pinned.
    """
    if is_instance(properties, "TensorProperties"):
        states = properties.states or [None]
        state = states[0] if len(states) == 1 else None
        dtype, layout, _, memory, _ = (
            state if type(state) is tuple and len(state) == 5 else (None,) * 5
        )
        is_format = (
            type(memory) is Node and memory.kind is Kind.CALL and memory.args in ((0,), (1,), (2,))
        )
        names = layout.args if type(layout) is Node and layout.kind is Kind.CALL else ()
        is_layout = type(names) is tuple and len(names) == 1 and text_of(names[0]) in LAYOUTS
        if type(dtype) is Node and dtype.kind is Kind.GLOBAL and is_format and is_layout:
            module, name = dtype.head
            if module == "torch" and name in DTYPES:
                return str(name)
    raise FormatError(
        f"the properties of a tensor do not name a torch dtype: {words_for(properties)}"
    )


def size_of(value: object, name: str) -> tuple[int, ...]:
    """Return the numbers of a ``torch.Size``. Raises FormatError for anything else, or a number
    below 0.
    """
    if type(value) is Node and value.kind is Kind.CALL and type(value.head) is Node:
        args = value.args
        if value.head.is_global("torch", "Size") and type(args) is tuple and len(args) == 1:
            value = args[0]
    if type(value) is not tuple or len(value) > _MAX_DIMENSIONS:
        raise FormatError(
            f"a size of {name!r:.200} is {words_for(value)} (expected a torch.Size of at most "
            f"{_MAX_DIMENSIONS} dimensions)"
        )
    for number in value:
        if not is_count(number):
            raise FormatError(f"a size of {name!r:.200} contains an invalid value: {number!r:.40}")
    return value


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is a number that an offset or a length can be."""
    return type(value) is int and 0 <= value < _MANY


def path_inside(text: str) -> PurePosixPath:
    """Return a relative path. Raises FormatError when it leaves the folder or cannot be a name."""
    path = PurePosixPath(text)
    try:
        sound = b"\0" not in text.encode()
    except UnicodeEncodeError:
        sound = False
    if not sound or not path.parts or path.is_absolute() or ".." in path.parts:
        raise FormatError(
            f"an item is recorded in {text!r:.200}, which is not a path inside the folder"
        )
    return path


def text_of(value: object) -> str | None:
    """Return a string, None for every other value."""
    return value.value if type(value) is Text else None


def words_for(value: object) -> str:
    """Return a value in a few words; a class by its name."""
    if type(value) is not Node:
        name = type(value).__name__
        return _WORDS.get(name, f"a {name}")
    head = value.head if value.kind in CALLS else value
    if type(head) is Node and head.kind is Kind.GLOBAL:
        return ".".join(head.head)[:200]
    return f"a {value.kind.value}"


class Chunk(NamedTuple):
    """A part of a tensor that was saved in one piece: its first index and its length in every
    dimension.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class StoredItem(NamedTuple):
    """The position of a chunk or of a bytes item: ``length`` bytes from ``offset`` of the file
    ``path`` of the folder.

    ``offsets``: the first index of the chunk, None for a bytes item. ``hint``: the place in the
    list of chunks, which torch looks at first. ``transforms``: the stream extensions its bytes went
    through, such as ``zstd``. ``site`` is where the name was pushed.
    """

    fqn: str
    offsets: tuple[int, ...] | None
    hint: int | None
    path: PurePosixPath
    offset: int
    length: int
    transforms: tuple[str, ...]
    site: int


class _Packed:
    """The type of ``PACKED``."""


PACKED = _Packed()
"""The value of a ``StoredItem`` in ``storage_data``: the key says all of key and value."""

MATCHED = frozenset({Chunk, StoredItem, _Packed})
"""The types of what was matched at once in a tree of ``dcp_stream``."""


MAX_PLACES = 6_000_000
"""Most chunks of ``storage_data`` that are read. Each takes about 600 bytes of memory."""


_SIZE_GROUP = 9  # of TENSOR
_TensorParts = tuple[Node, tuple[Any, ...], tuple[tuple[str, int], ...]]
_MAX_KEPT = 1 << 16  # of what is decoded once and met again


def read_stream(data: bytes) -> PickleTree:
    """Read the pickle of a ``.metadata``, as ``pickle_stream.parse`` does and with the same errors.

    In the lists of chunks a ``Chunk`` may replace the instance of torch's class, and in
    ``storage_data`` a ``StoredItem`` for a key, followed by ``PACKED``. Time and memory grow with
    the number of bytes.
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
    """One pass. ``machine`` calls ``_newobj`` at each NEWOBJ, which matches as many as follow one
    another.
    """

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
            # This object and the machine refer to each other, and to all values read.
            self.machine.handlers = {}

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
            machine.stack[-1] = machine.call(Kind.NEW, head, args)
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
        """Return what the memo holds, MISSING when nothing; entries are written once, so that it
        stays true.
        """
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
        """Read a tensor up to the begin of its list of chunks, as the machine itself would; False
        for another one.
        """
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
            for group, (word, source) in zip(
                (1, _SIZE_GROUP - 1, _SIZE_GROUP + 1), keys, strict=True
            )
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
        """Return what these refer to: the class and the state of the properties, and the keys with
        their sources.
        """
        value = self._value
        words = {properties: "properties", size: "size", chunks: "chunks"}
        parts = (value(dtype), value(layout), grad == b"\x88", value(memory), pinned == b"\x88")
        keys = tuple(
            (value(ref)[0], value(ref)[1]) for ref, word in words.items() if self._says(ref, word)
        )
        if len(keys) < 3 or MISSING in parts or not _is_class(value(kind), "TensorProperties"):
            return None
        if len(self._tensors) >= _MAX_KEPT:
            self._tensors.clear()
        found = self._tensors[
            properties, kind, dtype, layout, grad, memory, pinned, size, chunks
        ] = (
            value(kind),
            parts,
            keys,
        )
        return found

    def _chunk(self) -> bool:
        """Put a chunk in the place of its class on the stack. False when no such chunk begins
        here.
        """
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
        """Put a chunk's key of ``storage_data``, and the value to it, in the place of the class of
        the key.
        """
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
        keys = (
            begin[1],
            hint_key,
            offset_key,
            info,
            path_key,
            begin_key,
            length_key,
            transforms_key,
        )
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
        """Return whether these refer to the names of the attributes of ``MetadataIndex`` and
        ``_StorageInfo``.
        """
        words = {
            fqn: "fqn",
            index: "index",
            first: "offset",
            path: "relative_path",
            length: "length",
        }
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
        """Return the string that is pushed at a position, where the push ends, and how many entries
        it wrote.
        """
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
