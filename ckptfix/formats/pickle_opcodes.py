"""The symbolic pickle machine: its state, its errors, and one small function for each opcode.

The fast loop of ``pickle_stream`` handles the opcodes that torch.save writes for every tensor; the
others are here. Each function is called with ``machine.position`` on its opcode and leaves it on
the next one. An opcode's effect on the stack and the memo follows CPython's ``Lib/pickle.py`` and
``Lib/pickletools.py``.
"""

import codecs
import pickletools
import warnings
from collections.abc import Callable, Iterable, Mapping
from struct import unpack_from
from types import NoneType
from typing import Any

from ckptfix.errors import BeyondLimits, FormatError, TruncatedError
from ckptfix.formats.pickle_kinds import MAPPINGS, OTHER_GLOBAL, kind_of, noun
from ckptfix.formats.pickle_tree import CALLS, UNRESOLVABLE, Kind, Node, PickleTree, Text

PADDING = bytes(16)
"""Padding after the data, so that reading a fixed-size operand never runs out; 0 is not an opcode.
"""

MAX_DEPTH = 1_000_000
"""Most open marks. A real pickle has as many as its objects nest."""

MAX_LINE = 1 << 20
"""Longest line, in bytes. Only strings and bytes of protocol 0 come near it."""

MAX_GLOBALS = 10_000
"""Most different globals. A pickled model names some hundred classes."""

MAX_GLOBAL_NAME = 1024
"""Longest name of a global, in characters, with its module."""

_PLAIN_KEYS = frozenset({Text, int, float, bool, NoneType, bytes})

MISSING = object()
"""The value of an entry of the memo before it is written."""


class Machine:
    """The state of a symbolic unpickler."""

    def __init__(
        self, data: bytes, memo: Any, handlers: "Mapping[int, Callable[[Machine], None]]"
    ) -> None:
        """Start at the first byte of ``data``; ``memo`` is a dict, or a list filled with
        ``MISSING``.
        """
        self.handlers = handlers
        self.data = data
        self.position = 0
        self.protocol = 0
        self.stack: list[Any] = []
        self.meta: list[list[Any]] = []
        self.memo = memo
        self.globals: dict[tuple[str, str], int] = {}
        self.texts: list[Text] = []
        self.persistent: list[Node] = []
        self.frames: list[tuple[int, int]] = []
        self.duplicated: set[int] = set()
        self.heads: dict[tuple[str, str], tuple[str, str]] = {}
        self.refused: set[int] = set()
        self.refused_targets: set[str] = set()
        self.impossible: set[str] = set()
        self.built: set[tuple[str, str]] = set()
        self.containers = 0
        self.forgiven = 0
        self.calls: list[Node] = []
        self.keys: list[Any] = []

    def step(self) -> None:
        """Run the opcode at the present position."""
        position = self.position
        handler = self.handlers.get(self.data[position]) if position < len(self.data) else None
        if handler is None:
            raise self.truncated() if position >= len(self.data) else self.malformed("is unknown")
        handler(self)

    def call(self, kind: Kind, head: Any, args: Any) -> Node:
        """Return the node of a call, and note it."""
        node = Node(kind, head, args)
        self.calls.append(node)
        return node

    def note_keys(self, keys: Iterable[Any]) -> None:
        """Note keys or members of which it does not go without saying that they can be some."""
        self.keys += [key for key in keys if type(key) not in _PLAIN_KEYS]

    def recall(self, index: int) -> Any:
        """Return the value of an entry of the memo. Raises KeyError or IndexError when that was
        never written.
        """
        value = self.memo[index] if index >= 0 else MISSING
        if value is MISSING:
            raise KeyError(index)
        return value

    def truncated(self) -> TruncatedError:
        """Return the error for data that ends inside the pickle."""
        size = len(self.data)
        return TruncatedError(f"the pickle does not end within its {size} bytes", have=size)

    def malformed(self, problem: str) -> FormatError:
        """Return the error for the opcode at the present position."""
        code = self.data[self.position] if self.position < len(self.data) else 0
        return FormatError(
            f"the pickle opcode {opcode_name(code)} at byte {self.position} {problem}"
        )

    def tree(self, start: int) -> PickleTree:
        """Return the tree, once STOP was reached."""
        if not self.stack:
            raise FormatError(f"the pickle ends at byte {self.position} without a value")
        root = self.stack.pop()
        return PickleTree(
            root=root,
            data=self.data[: self.position],
            end=start + self.position,
            protocol=self.protocol,
            globals=self.globals,
            texts=tuple(self.texts),
            persistent=tuple(self.persistent),
            frames=tuple(self.frames),
            duplicated=frozenset(self.duplicated),
            refused_opcodes=(
                *sorted(opcode_name(code) for code in self.refused),
                *sorted(self.refused_targets),
            ),
            impossible=tuple(sorted(self.impossible)),
            built=frozenset(self.built),
            leftover=bool(self.stack or self.meta),
            calls=tuple(self.calls),
            keys=tuple(self.keys),
            last_memo=max(self.memo, default=0) if type(self.memo) is dict else 0,
        )

    def weight(self) -> int:
        """Return the number of objects held outside the stack, each of about 100 bytes, less the
        opcodes whose objects are gone.
        """
        numbered = len(self.memo) if type(self.memo) is dict else 0
        return len(self.texts) + len(self.frames) + numbered - self.forgiven

    def name_global(self, offset: int, module: str, name: str) -> Node:
        """Note that the opcode at ``offset`` refers to a global, and return its node."""
        head = (module, name)
        if head not in self.heads:
            if len(module) + len(name) > MAX_GLOBAL_NAME:
                raise self.malformed(f"names a global with {len(module) + len(name)} characters")
            if len(self.heads) >= MAX_GLOBALS:
                raise FormatError(f"the pickle names more than {MAX_GLOBALS} globals")
            self.heads[head] = head
            self.globals[head] = offset
        return Node(Kind.GLOBAL, self.heads[head])

    def pop_mark(self) -> list[Any]:
        """Return what was pushed since the last mark, and go back to the stack below it."""
        items = self.stack
        self.stack = self.meta.pop()
        return items

    def operand(self, length: int, width: int) -> bytes:
        """Return ``length`` bytes that follow an opcode and ``width`` bytes of length, and step
        over them.
        """
        begin = self.skip(length, width)
        return self.data[begin : begin + length]

    def skip(self, length: int, width: int) -> int:
        """Step over an opcode, ``width`` bytes of length and ``length`` bytes; return where these
        begin.
        """
        begin = self.position + 1 + width
        if length > len(self.data) - begin:
            raise self.truncated()
        self.position = begin + length
        return begin

    def line(self) -> bytes:
        """Return the line that follows an opcode, without its end, and step over it."""
        end = self.data.find(b"\n", self.position + 1)
        if end < 0:
            raise self.truncated()
        length = end - self.position - 1
        if length > MAX_LINE:
            raise BeyondLimits(
                f"the pickle has a line of {length} bytes, over the limit of {MAX_LINE}"
            )
        line = self.data[self.position + 1 : end]
        self.position = end + 1
        return line


_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}


def opcode_name(code: int) -> str:
    """Return the name of an opcode as pickletools has it, or its number in hexadecimal."""
    return _NAMES.get(code, f"0x{code:02x}")


MAX_TEXT = 1 << 20
"""Longest string that becomes a Text, in bytes: a name of a tensor has no bound in torch, and a
numpy array in a pickle of protocol 2 is one string, too. All strings of a pickle together take no
more than its length allows.
"""

_AT_ONCE = 1 << 16
"""Bytes of a longer string that are decoded at a time."""

MAX_INTEGER = 4096
"""Longest integer in bytes or digits; torch's own magic number has 10 bytes."""


def text(width: int, errors: str) -> Callable[[Machine], None]:
    """Push a str whose length is in ``width`` bytes (0: the signed four of Python 2)."""

    def push(machine: Machine) -> None:
        site = machine.position
        length = _length(machine, width)
        begin = machine.skip(length, width or 4)
        if length > MAX_TEXT:
            machine.stack.append(
                _long_text(memoryview(machine.data)[begin : begin + length], errors)
            )
        else:
            value = machine.data[begin : begin + length].decode("utf-8", errors)
            if errors == "surrogateescape" and not value.isascii() and _has_escapes(value):
                # torch.load decodes the strings of Python 2 as UTF-8, strictly.
                machine.refused_targets.add(
                    f"{opcode_name(machine.data[site])} of bytes that are not UTF-8"
                )
            _push_text(machine, site, value)

    return push


def _has_escapes(value: str) -> bool:
    return any("\udc80" <= char <= "\udcff" for char in value)


def _long_text(raw: memoryview, errors: str) -> Node:
    """Return a string as a view of its bytes: decoded, it would take up to four times as many."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    for begin in range(0, len(raw), _AT_ONCE):
        decoder.decode(raw[begin : begin + _AT_ONCE].tobytes(), final=begin + _AT_ONCE >= len(raw))
    return Node(Kind.LONG_TEXT, raw)


def _push_text(machine: Machine, site: int, value: str) -> None:
    text = Text(value, site, site)
    machine.texts.append(text)
    machine.stack.append(text)


def unicode_line(machine: Machine) -> None:
    """Push the str on the line, with its escapes undone."""
    site = machine.position
    _push_text(machine, site, machine.line().decode("raw-unicode-escape"))


def string_line(machine: Machine) -> None:
    """Push the quoted str of Python 2 on the line: bytes, which torch.load reads as UTF-8."""
    site = machine.position
    line = machine.line().strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise machine.malformed("has a string without quotes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pickle, too, keeps an unknown escape as it is
        raw: bytes = codecs.escape_decode(line[1:-1])[0]
    _push_text(machine, site, raw.decode("utf-8", "surrogateescape"))


def byte_string(width: int) -> Callable[[Machine], None]:
    """Push bytes whose length is in ``width`` bytes."""
    return lambda machine: machine.stack.append(_sized(machine, width))


def byte_array(machine: Machine) -> None:
    """Push a bytearray."""
    machine.stack.append(Node(Kind.BYTEARRAY, _sized(machine, 8)))


def _sized(machine: Machine, width: int) -> bytes:
    """Return the bytes whose length is in ``width`` bytes; 0 is the signed 4-byte length of Python
    2.
    """
    return machine.operand(_length(machine, width), width or 4)


def _length(machine: Machine, width: int) -> int:
    raw = machine.data[machine.position + 1 : machine.position + 1 + (width or 4)]
    if len(raw) < (width or 4):
        raise machine.truncated()
    length = int.from_bytes(raw, "little", signed=width == 0)
    if length < 0:
        raise machine.malformed(f"has a negative length: {length}")
    return length


def binary_float(machine: Machine) -> None:
    """Push a float of eight bytes."""
    machine.stack.append(unpack_from(">d", machine.operand(8, 0))[0])


def float_line(machine: Machine) -> None:
    """Push the float on the line."""
    machine.stack.append(float(machine.line()))


def binary_long(width: int) -> Callable[[Machine], None]:
    """Push an int whose length is in ``width`` bytes (0: the signed four)."""

    def push(machine: Machine) -> None:
        raw = _sized(machine, width)
        if len(raw) > MAX_INTEGER:
            raise BeyondLimits(
                f"the pickle has an integer of {len(raw)} bytes, over the limit of {MAX_INTEGER}"
            )
        machine.stack.append(int.from_bytes(raw, "little", signed=True))

    return push


def int_line(machine: Machine) -> None:
    """Push the int, or the bool, on the line."""
    line = machine.line()
    booleans = {b"00": False, b"01": True}
    machine.stack.append(booleans[line] if line in booleans else integer(line))


def long_line(machine: Machine) -> None:
    """Push the int on the line, which ends in L."""
    machine.stack.append(integer(machine.line().removesuffix(b"L")))


def integer(line: bytes) -> int:
    """Return the int that a line spells."""
    if len(line) > MAX_INTEGER:  # int() takes time that grows with the square of the digits
        raise BeyondLimits(
            f"the pickle has an integer of {len(line)} digits, over the limit of {MAX_INTEGER}"
        )
    return int(line)


MAX_CONTAINERS = 4_000_000
"""Most empty lists, dicts and sets in one pickle: one byte each in the file, 100 bytes in memory.
"""

U32 = 0xFFFFFFFF
_DICTS = frozenset({("collections", "OrderedDict"), ("collections", "Counter")})
_SETS = frozenset({"set"})

WEIGHTS_ONLY_OPCODES = frozenset(b"c\x81Rbaesu(t\x85\x86\x87N\x89\x88)]}\x8fGJKMXUQhjqr\x8a\x80.")
"""The opcodes of ``torch/_weights_only_unpickler.py`` of torch 2.13; it refuses a file with any
other opcode.
"""


def _constant(value: Any) -> Callable[[Machine], None]:
    def push(machine: Machine) -> None:
        machine.stack.append(value)
        machine.position += 1

    return push


def _container(kind: Kind) -> Callable[[Machine], None]:
    def push(machine: Machine) -> None:
        machine.containers += 1
        if machine.containers > MAX_CONTAINERS:
            raise BeyondLimits(f"the pickle has more than {MAX_CONTAINERS} lists and dicts")
        machine.stack.append(Node(kind))
        machine.position += 1

    return push


def _filled(kind: Kind) -> Callable[[Machine], None]:
    def push(machine: Machine) -> None:
        items = machine.pop_mark()
        node = Node(kind)
        if kind is Kind.DICT:
            _add_entries(machine, node, items)
        else:
            node.items = items
            if kind is Kind.FROZENSET:
                machine.note_keys(items)
        machine.stack.append(node)
        machine.position += 1

    return push


def _add_entries(machine: Machine, node: Node, entries: list[Any]) -> None:
    if len(entries) % 2:
        raise machine.malformed("sets a key without a value")
    machine.note_keys(entries[::2])
    if node.entries is None:
        node.entries = entries
    else:
        node.entries += entries


def _setitem(machine: Machine) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    _check_target(machine, Kind.DICT, MAPPINGS, _DICTS)
    _add_entries(machine, machine.stack[-1], [key, value])
    machine.position += 1


def _setitems(machine: Machine) -> None:
    entries = machine.pop_mark()
    _check_target(machine, Kind.DICT, MAPPINGS, _DICTS)
    _add_entries(machine, machine.stack[-1], entries)
    machine.position += 1


def _append(machine: Machine) -> None:
    item = machine.stack.pop()
    _check_target(machine, Kind.LIST)
    _add_items(machine.stack[-1], [item])
    machine.position += 1


def _appends(machine: Machine) -> None:
    items = machine.pop_mark()
    _check_target(machine, Kind.LIST)
    _add_items(machine.stack[-1], items)
    machine.position += 1


def _additems(machine: Machine) -> None:
    items = machine.pop_mark()
    _check_target(machine, Kind.SET, _SETS)
    machine.note_keys(items)
    _add_items(machine.stack[-1], items)
    machine.position += 1


def _check_target(
    machine: Machine,
    kind: Kind,
    fitting: frozenset[str] = frozenset(),
    makers: frozenset[tuple[str, str]] = frozenset(),
) -> None:
    """Note an object that torch refuses to fill even when its class is allowed: all but lists,
    dicts and these classes.

    ``fitting``: the kinds that an unpickler fills. A class of the user's can be filled, too, and
    nothing else.
    """
    node: Node = machine.stack[-1]
    if node.kind is kind:
        return
    target = kind_of(node)
    if target not in ("", OTHER_GLOBAL, *fitting):
        opcode = opcode_name(machine.data[machine.position])
        machine.impossible.add(f"applies {opcode} to {noun(target)}")
    head = node.head
    is_made = node.kind in CALLS and type(head) is Node and head.kind is Kind.GLOBAL
    if not is_made:
        _refuse_target(machine, node.kind.value)
    elif head.head not in makers:
        _refuse_target(machine, ".".join(head.head))


def _refuse_target(machine: Machine, target: str) -> None:
    machine.refused_targets.add(f"{opcode_name(machine.data[machine.position])} on {target}")


def _add_items(node: Node, items: list[Any]) -> None:
    if node.items is None:
        node.items = items
    else:
        node.items += items


def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    node: Node = machine.stack[-1]
    if node.kind not in CALLS:
        if node.kind not in (Kind.GLOBAL, Kind.BUFFER):
            machine.impossible.add(f"applies BUILD to {noun(kind_of(node))}")
        _refuse_target(machine, node.kind.value)
    elif type(node.head) is Node and node.head.kind is Kind.GLOBAL:
        machine.built.add(node.head.head)
    if node.states is None:
        node.states = []
    node.states.append(state)
    machine.position += 1


def _tuple3(machine: Machine) -> None:
    stack = machine.stack
    stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
    machine.position += 1


def _newobj(machine: Machine) -> None:
    args = machine.stack.pop()
    machine.stack[-1] = machine.call(Kind.NEW, machine.stack[-1], args)
    machine.position += 1


def _newobj_ex(machine: Machine) -> None:
    keywords = machine.stack.pop()
    args = machine.stack.pop()
    machine.stack[-1] = machine.call(Kind.NEW_EX, machine.stack[-1], (args, keywords))
    machine.position += 1


def _obj(machine: Machine) -> None:
    head, *args = machine.pop_mark()
    machine.stack.append(machine.call(Kind.CALL, head, tuple(args)))
    machine.position += 1


def _inst(machine: Machine) -> None:
    head = _read_global(machine)
    args = tuple(machine.pop_mark())
    machine.stack.append(machine.call(Kind.CALL, head, args))


def _global_line(machine: Machine) -> None:
    machine.stack.append(_read_global(machine))


def _read_global(machine: Machine) -> Node:
    offset = machine.position
    module = machine.line().decode()
    machine.position -= 1  # the second line has no opcode in front
    name = machine.line().decode()
    return machine.name_global(offset, module, name)


def _stack_global(machine: Machine) -> None:
    name = machine.stack.pop()
    module = machine.stack.pop()
    # A name that is computed, or read out of another object, is unknown without executing it.
    known = type(name) is Text and type(module) is Text
    head = (module.value, name.value) if known else UNRESOLVABLE
    machine.stack.append(machine.name_global(machine.position, *head))
    machine.position += 1


def _extension(width: int) -> Callable[[Machine], None]:
    def push(machine: Machine) -> None:
        node = machine.name_global(machine.position, *UNRESOLVABLE)
        node.args = int.from_bytes(machine.operand(width, 0), "little")
        machine.stack.append(node)

    return push


def _persid(machine: Machine) -> None:
    node = Node(Kind.PERSISTENT, machine.line().decode("ascii"))
    machine.persistent.append(node)
    machine.stack.append(node)


def _long_binput(machine: Machine) -> None:
    machine.memo[unpack_from("<I", machine.operand(4, 0))[0]] = machine.stack[-1]


def _put(machine: Machine) -> None:
    index = integer(machine.line())
    # Pickle counts from 0; a dict of chosen huge numbers takes quadratic time.
    if not 0 <= index <= U32:
        raise machine.malformed("writes a memo entry that no pickler writes")
    machine.memo[index] = machine.stack[-1]


def _memoize(machine: Machine) -> None:
    if type(machine.memo) is not dict:
        raise machine.malformed("relies on the memo of protocol 4")
    machine.memo[len(machine.memo)] = machine.stack[-1]
    machine.position += 1


def _get(machine: Machine) -> None:
    site = machine.position
    value = machine.recall(integer(machine.line()))
    if type(value) is Text:
        value = Text(value.value, site, value.site)
        machine.texts.append(value)
    machine.stack.append(value)


def _pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()  # POP of a mark drops the mark
    machine.position += 1


def _pop_mark(machine: Machine) -> None:
    machine.pop_mark()
    machine.position += 1


def _dup(machine: Machine) -> None:
    value = machine.stack[-1]
    if type(value) is Text:
        machine.duplicated.add(value.site)
    machine.stack.append(value)
    machine.position += 1


def _proto(machine: Machine) -> None:
    (machine.protocol,) = machine.operand(1, 0)
    if machine.protocol > 5:
        raise FormatError(f"unknown pickle protocol {machine.protocol} (the newest known is 5)")


def _frame(machine: Machine) -> None:
    offset = machine.position
    (length,) = unpack_from("<Q", machine.operand(8, 0))
    if length > len(machine.data) - machine.position:
        raise machine.truncated()
    machine.frames.append((offset, length))


def _buffer(machine: Machine) -> None:
    machine.stack.append(Node(Kind.BUFFER))
    machine.position += 1


def _readonly_buffer(machine: Machine) -> None:
    machine.stack[-1] = Node(Kind.CALL, Node(Kind.BUFFER), (machine.stack[-1],))
    machine.position += 1


_ALL: dict[bytes, Callable[[Machine], None]] = {
    b"N": _constant(None), b"\x88": _constant(True), b"}": _container(Kind.DICT), b"]": _container(Kind.LIST),
    b"\x8f": _container(Kind.SET), b"d": _filled(Kind.DICT), b"l": _filled(Kind.LIST),
    b"\x91": _filled(Kind.FROZENSET), b"s": _setitem, b"u": _setitems, b"a": _append, b"e": _appends,
    b"\x90": _additems, b"b": _build, b"\x87": _tuple3, b"\x81": _newobj, b"\x92": _newobj_ex, b"o": _obj,
    b"i": _inst, b"c": _global_line, b"\x93": _stack_global, b"\x82": _extension(1), b"\x83": _extension(2),
    b"\x84": _extension(4), b"P": _persid, b"r": _long_binput, b"p": _put, b"\x94": _memoize, b"g": _get,
    b"0": _pop, b"1": _pop_mark, b"2": _dup, b"\x80": _proto, b"\x95": _frame,
    b"X": text(4, "surrogatepass"),
    b"\x8c": text(1, "surrogatepass"), b"\x8d": text(8, "surrogatepass"), b"V": unicode_line,
    # A str of Python 2: bytes, which torch.load reads as UTF-8.
    b"U": text(1, "surrogateescape"), b"T": text(0, "surrogateescape"), b"S": string_line,
    b"C": byte_string(1), b"B": byte_string(4), b"\x8e": byte_string(8), b"\x96": byte_array,
    b"G": binary_float, b"F": float_line,
    b"\x8a": binary_long(1), b"\x8b": binary_long(0), b"I": int_line, b"L": long_line, b"\x97": _buffer,
    b"\x98": _readonly_buffer,
}  # fmt: skip


def _recording_refusal(code: int, handler: Callable[[Machine], None]) -> Callable[[Machine], None]:
    def handle(machine: Machine) -> None:
        machine.refused.add(code)
        handler(machine)

    return handle


HANDLERS = {
    code[0]: handler if code[0] in WEIGHTS_ONLY_OPCODES else _recording_refusal(code[0], handler)
    for code, handler in _ALL.items()
}
"""Every opcode that the fast loop leaves out -> its function."""
