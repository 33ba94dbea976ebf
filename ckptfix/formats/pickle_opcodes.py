"""The pickle opcodes that the fast loop of ``pickle_stream`` leaves out, one small function each.

Each is called with ``machine.position`` on its opcode and leaves it on the next one. What an opcode does to the stack
and the memo follows CPython's ``Lib/pickle.py`` and ``Lib/pickletools.py``.
"""

from collections.abc import Callable
from struct import unpack_from
from typing import Any

from ckptfix.errors import BeyondLimits, FormatError
from ckptfix.formats.pickle_literals import (
    binary_float,
    binary_long,
    byte_array,
    byte_string,
    float_line,
    int_line,
    integer,
    long_line,
    string_line,
    text,
    unicode_line,
)
from ckptfix.formats.pickle_machine import Machine, opcode_name
from ckptfix.formats.pickle_tree import CALLS, UNRESOLVABLE, Kind, Node, Text

MAX_CONTAINERS = 4_000_000
"""Most empty lists, dicts and sets in one pickle: one byte each in the file, 100 bytes in memory."""

U32 = 0xFFFFFFFF
_DICTS = frozenset({("collections", "OrderedDict"), ("collections", "Counter")})

WEIGHTS_ONLY_OPCODES = frozenset(b"c\x81Rbaesu(t\x85\x86\x87N\x89\x88)]}\x8fGJKMXUQhjqr\x8a\x80.")
"""What ``torch/_weights_only_unpickler.py`` of torch 2.13 reads; it refuses a file with any other opcode."""


def _constant(value: Any) -> Callable[[Machine], None]:
    def push(machine: Machine) -> None:
        machine.stack.append(value)
        machine.position += 1

    return push


def _container(kind: Kind) -> Callable[[Machine], None]:
    def push(machine: Machine) -> None:
        machine.containers += 1
        if machine.containers > MAX_CONTAINERS:
            raise BeyondLimits(f"the pickle holds more than {MAX_CONTAINERS} lists and dicts")
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
        machine.stack.append(node)
        machine.position += 1

    return push


def _add_entries(machine: Machine, node: Node, entries: list[Any]) -> None:
    if len(entries) % 2:
        raise machine.malformed("sets a key without a value")
    if node.entries is None:
        node.entries = entries
    else:
        node.entries += entries


def _setitem(machine: Machine) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    _check_target(machine, Kind.DICT, _DICTS)
    _add_entries(machine, machine.stack[-1], [key, value])
    machine.position += 1


def _setitems(machine: Machine) -> None:
    entries = machine.pop_mark()
    _check_target(machine, Kind.DICT, _DICTS)
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


def _check_target(machine: Machine, kind: Kind, makers: frozenset[tuple[str, str]] = frozenset()) -> None:
    """Note what torch refuses to fill even when its class is allowed: all but lists, dicts and these classes."""
    node: Node = machine.stack[-1]
    if node.kind is kind:
        return
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
        _refuse_target(machine, node.kind.value)
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
    machine.stack[-1] = Node(Kind.NEW, machine.stack[-1], args)
    machine.position += 1


def _newobj_ex(machine: Machine) -> None:
    keywords = machine.stack.pop()
    args = machine.stack.pop()
    machine.stack[-1] = Node(Kind.NEW_EX, machine.stack[-1], (args, keywords))
    machine.position += 1


def _obj(machine: Machine) -> None:
    head, *args = machine.pop_mark()
    machine.stack.append(Node(Kind.CALL, head, tuple(args)))
    machine.position += 1


def _inst(machine: Machine) -> None:
    head = _read_global(machine)
    args = tuple(machine.pop_mark())
    machine.stack.append(Node(Kind.CALL, head, args))


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
    # A name that is computed, or read out of another object, is known only to who executes it.
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
    if not 0 <= index <= U32:  # pickle counts from 0; a dict of chosen huge numbers takes quadratic time
        raise machine.malformed("writes a memo entry that no pickler would")
    machine.memo[index] = machine.stack[-1]


def _memoize(machine: Machine) -> None:
    if type(machine.memo) is not dict:
        raise machine.malformed("counts on the memo of protocol 4")
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
        raise FormatError(f"pickle protocol {machine.protocol}; 5 is the newest that is known")


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
    b"\x90": _appends, b"b": _build, b"\x87": _tuple3, b"\x81": _newobj, b"\x92": _newobj_ex, b"o": _obj,
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
"""Every opcode that the fast loop leaves out -> what it does."""
