"""Pickles as bytes, opcode by opcode, in the form that CPython's pickler gives protocol 2 or 4.

Protocol 2 is what ``torch.save`` writes; ``torch.load(weights_only=True)`` reads no opcode of a newer one. Protocol 4
is what DCP has for its metadata. The order of opcodes, the memo and the batches follow CPython 3.11,
``Modules/_pickle.c``, so that the same values give the same bytes. Nothing of Python's own pickle module takes part:
classes are names here, and are never imported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any, TypeVar

from ckptfix.errors import UnsupportedFormat
from ckptfix.formats.pickle_literals import MAX_TEXT

MARK, EMPTY_TUPLE, TUPLE, REDUCE, NEWOBJ, BUILD, BINPERSID = b"(", b")", b"t", b"R", b"\x81", b"b", b"Q"
NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"
_SHORT_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}
_BATCH = 1000  # entries that one SETITEMS or APPENDS takes
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """A function or a class by its name: ``Global("collections", "OrderedDict")``."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Call:
    """What a call returns: ``function(*args)``, then its dict ``items`` are set, then ``state`` is given to BUILD.

    ``new``: ``function.__new__(function, *args)`` is called, as for most classes, and not the function itself.
    """

    function: Global
    args: tuple[Any, ...] = ()
    items: Mapping[Any, Any] | None = None
    state: Any = None
    new: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """An object that the reader finds by an id, as torch finds storages."""

    id: Any


class PickleWriter:
    """One pickle that grows at its end.

    ``value`` writes any value whole; the other methods write single opcodes, for what is written 100,000 times.
    """

    def __init__(self, protocol: int = 2) -> None:
        """Begin a pickle of protocol 2, or of 4, without its frames, which no reader needs."""
        self._data = bytearray(b"\x80" + pack("<B", protocol))
        self._is_new = protocol >= 4
        self._words: dict[str, int] = {}  # of names of modules, which protocol 4 pushes as strings
        self._puts = 0
        self._globals: dict[tuple[str, str], int] = {}
        self._met: dict[int, tuple[int, Any]] = {}  # the object is kept, lest another gets its id

    def finish(self) -> bytes:
        """Return the pickle; its value is what was pushed last."""
        return bytes(self._data + b".")

    def opcodes(self, data: bytes) -> None:
        """Write opcodes as they stand."""
        self._data += data

    def put(self) -> int:
        """Keep the value on top of the stack in the memo, and return its number there."""
        number = self._puts
        if self._is_new:
            self._data += b"\x94"
        else:
            self._data += b"q" + pack("<B", number) if number < 256 else b"r" + pack("<I", number)
        self._puts = number + 1
        return number

    def get(self, number: int) -> None:
        """Push the value of the memo with this number."""
        self._data += b"h" + pack("<B", number) if number < 256 else b"j" + pack("<I", number)

    def text(self, value: str) -> int:
        """Push a string and keep it; half of a surrogate pair is written as pickle writes it. Returns its number.

        Raises UnsupportedFormat for one that is longer than what is read back.
        """
        data = value.encode("utf-8", "surrogatepass")
        if len(data) > MAX_TEXT:
            raise UnsupportedFormat(
                f"the name {value!r:.80}... takes {len(data)} bytes in a pickle, {MAX_TEXT} are read back at most"
            )
        is_short = self._is_new and len(data) < 256
        self._data += b"\x8c" + pack("<B", len(data)) if is_short else b"X" + pack("<I", len(data))
        self._data += data
        return self.put()

    def integer(self, value: int) -> None:
        """Push an integer in the shortest form."""
        if 0 <= value <= 0xFF:
            self._data += b"K" + pack("<B", value)
        elif 0 <= value <= 0xFFFF:
            self._data += b"M" + pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self._data += b"J" + pack("<i", value)
        else:
            length = (value if value >= 0 else ~value).bit_length() // 8 + 1
            if length > 0xFF:
                raise UnsupportedFormat(f"an integer of {length} bytes in a pickle")
            self._data += b"\x8a" + pack("<B", length) + value.to_bytes(length, "little", signed=True)

    def sizes(self, values: tuple[int, ...]) -> None:
        """Push a tuple of integers: a shape or a stride."""
        if not values:
            self._data += EMPTY_TUPLE
            return
        short = _SHORT_TUPLES.get(len(values))
        if short is None:
            self._data += MARK
        for value in values:
            self.integer(value)
        self._data += short or TUPLE
        self.put()

    def named(self, module: str, name: str) -> None:
        """Push a function or a class by its name; from the second time on out of the memo."""
        number = self._globals.get((module, name))
        if number is not None:
            self.get(number)
            return
        if self._is_new:
            self._word(module)
            self._word(name)
            self._data += b"\x93"
        else:
            self._data += b"c" + module.encode("ascii") + b"\n" + name.encode("ascii") + b"\n"
        self._globals[module, name] = self.put()

    def _word(self, word: str) -> None:
        if word in self._words:
            self.get(self._words[word])
        else:
            self._words[word] = self.text(word)

    def value(self, value: Any) -> None:
        """Push a value: None, bool, int, float, str, tuple, list, mapping, Global, Call or Persistent.

        An object that was pushed before, the same one and not an equal one, is taken out of the memo, as pickle does.
        Raises TypeError for anything else: that is the caller's mistake.
        """
        if value is None or value is True or value is False:
            self._data += NONE if value is None else TRUE if value else FALSE
        elif isinstance(value, int):
            self.integer(value)
        elif isinstance(value, float):
            self._data += b"G" + pack(">d", value)
        elif isinstance(value, Global):
            self.named(value.module, value.name)
        elif isinstance(value, Persistent):
            self.value(value.id)
            self._data += BINPERSID
        elif value == ():
            self._data += EMPTY_TUPLE
        elif id(value) in self._met:
            self.get(self._met[id(value)][0])
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        """Push an object that is kept in the memo."""
        if isinstance(value, str):
            self._keep(value, self.text(value))
        elif isinstance(value, tuple):
            short = _SHORT_TUPLES.get(len(value))
            self._data += b"" if short else MARK
            for item in value:
                self.value(item)
            self._data += short or TUPLE
            self._keep(value, self.put())
        elif isinstance(value, list):
            self._data += b"]"
            self._keep(value, self.put())
            self.batches(value, self.value, exact=True, opcodes=(b"a", b"e"))
        elif isinstance(value, Mapping):
            self._data += b"}"
            self._keep(value, self.put())
            self._entries(value, exact=True)
        elif isinstance(value, Call):
            self.named(value.function.module, value.function.name)
            self.value(value.args)
            self._data += NEWOBJ if value.new else REDUCE
            self._keep(value, self.put())
            self._entries(value.items or {}, exact=False)
            if value.state is not None:
                self.value(value.state)
                self._data += BUILD
        else:
            raise TypeError(f"a {type(value).__name__} has no place in a pickle that is written here")

    def _entries(self, items: Mapping[Any, Any], *, exact: bool) -> None:
        def pair(entry: tuple[Any, Any]) -> None:
            self.value(entry[0])
            self.value(entry[1])

        self.batches(list(items.items()), pair, exact=exact)

    def batches(
        self,
        groups: Sequence[T],
        write: Callable[[T], None],
        *,
        exact: bool = False,
        opcodes: tuple[bytes, bytes] = (b"s", b"u"),
    ) -> None:
        """Have ``write`` push each key with its value, and set them in the dict below: 1,000 at a time, as pickle does.

        ``exact``: it is a plain dict or list, no OrderedDict; then a last batch of one gets a mark, too. ``opcodes``:
        what takes one entry, and what takes all since the mark.
        """
        one, many = opcodes
        for begin in range(0, len(groups), _BATCH):
            batch = groups[begin : begin + _BATCH]
            alone = len(groups if exact else batch) == 1
            self._data += b"" if alone else MARK
            for group in batch:
                write(group)
            self._data += one if alone else many

    def _keep(self, value: Any, number: int) -> None:
        self._met[id(value)] = (number, value)
