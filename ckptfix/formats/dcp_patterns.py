"""What torch's classes look like in the pickle of a ``.metadata``, and a memo that finds in it what was passed over.

A reference is BINGET or LONG_BINGET, a number one of BININT1, BININT2, BININT and LONG1, a size the call of
``torch.Size``, or a reference to an earlier one. Facts from CPython's ``Modules/_pickle.c``: how protocol 4 writes
instances, tuples and numbers.
"""

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from ckptfix.errors import FormatError
from ckptfix.formats.pickle_literals import MAX_TEXT
from ckptfix.formats.pickle_tree import Text

_REF = rb"(h.|j.{4})"
_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_TUPLE = rb"(?:\)|(?:%b\x85|%b{2}\x86|%b{3}\x87|\((?:%b){4,64}t)\x94)" % ((_INT,) * 4)
_SIZE = rb"((?:h.|j.{4})(?:%b\x85\x94R\x94)?)" % _TUPLE
_OBJECT = rb"\x81\x94\}\x94\("


def _pattern(*parts: bytes) -> Callable[[bytes, int], "re.Match[bytes] | None"]:
    return re.compile(b"".join(parts), re.DOTALL).match


# Each begins at the NEWOBJ of an instance, and is cut where a string may be pushed: a pattern cannot count its bytes.
CHUNK = _pattern(_OBJECT, _REF, _SIZE, _REF, _SIZE, b"ub")
TENSOR = _pattern(
    _OBJECT, _REF, _REF, rb"\)\x81\x94\(", _REF, _REF, rb"([\x88\x89])", _REF, rb"([\x88\x89])", rb"t\x94b",
    _REF, _SIZE, _REF, rb"\]\x94",
)  # fmt: skip
NEXT = _pattern(_REF, rb"\)(?=\x81)")
INDEX = _pattern(_OBJECT, _REF)
INDEX_END = _pattern(_REF, b"(N|", _INT, b")", _REF, _SIZE, b"ub", _REF, rb"\)", _OBJECT, _REF)
INFO_END = _pattern(_REF, b"(", _INT, b")", _REF, b"(", _INT, b")", b"(?:", _REF, b"N)?ub")
_INTS = re.compile(_INT, re.DOTALL).finditer


class Unknown(FormatError):
    """Something that only the machine that reads every opcode can tell."""


class Memo(dict[int, Any]):
    """The memo of a pickle in which nothing but MEMOIZE writes.

    ``count``: how many entries it has; those of what was matched are found again when they are asked for: ``starts``
    has the first entry of each match, ``positions`` where it is.
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
    """Goes over a match again, for one of the entries that it wrote."""

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
    """Return a string that is pushed by its bytes, where that ends, and whether MEMOIZE follows."""
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
    """Return how many entries a size writes: of its tuple, unless that is empty, of the arguments and the result."""
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
