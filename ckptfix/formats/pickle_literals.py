"""The pickle opcodes that push strings, bytes and numbers, beyond those in the fast loop of ``pickle_stream``."""

import codecs
import warnings
from collections.abc import Callable
from struct import unpack_from

from ckptfix.errors import BeyondLimits
from ckptfix.formats.pickle_machine import Machine
from ckptfix.formats.pickle_tree import Kind, Node, Text

MAX_TEXT = 1 << 20
"""Longest string that becomes a Text, in bytes: a name of a tensor has no bound in torch, and a numpy array in a pickle
of protocol 2 is one string, too. All strings of a pickle together take no more than its length allows."""

_AT_ONCE = 1 << 16
"""Bytes of a longer string that are decoded at a time."""

MAX_INTEGER = 4096
"""Longest integer in bytes or digits; torch's own magic number has 10 bytes."""


def text(width: int, errors: str) -> Callable[[Machine], None]:
    """Push a str whose length stands in ``width`` bytes (0: the signed four of Python 2)."""

    def push(machine: Machine) -> None:
        site = machine.position
        length = _length(machine, width)
        begin = machine.skip(length, width or 4)
        if length > MAX_TEXT:
            machine.stack.append(_long_text(memoryview(machine.data)[begin : begin + length], errors))
        else:
            _push_text(machine, site, machine.data[begin : begin + length].decode("utf-8", errors))

    return push


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
        raise machine.malformed("holds a string without quotes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pickle, too, reads an unknown escape as it stands
        raw: bytes = codecs.escape_decode(line[1:-1])[0]
    _push_text(machine, site, raw.decode("utf-8", "surrogateescape"))


def byte_string(width: int) -> Callable[[Machine], None]:
    """Push bytes whose length stands in ``width`` bytes."""
    return lambda machine: machine.stack.append(_sized(machine, width))


def byte_array(machine: Machine) -> None:
    """Push a bytearray."""
    machine.stack.append(Node(Kind.BYTEARRAY, _sized(machine, 8)))


def _sized(machine: Machine, width: int) -> bytes:
    """Return the bytes whose length stands in ``width`` bytes; 0 is the signed 4-byte length of Python 2."""
    return machine.operand(_length(machine, width), width or 4)


def _length(machine: Machine, width: int) -> int:
    raw = machine.data[machine.position + 1 : machine.position + 1 + (width or 4)]
    if len(raw) < (width or 4):
        raise machine.truncated()
    length = int.from_bytes(raw, "little", signed=width == 0)
    if length < 0:
        raise machine.malformed(f"has length {length}")
    return length


def binary_float(machine: Machine) -> None:
    """Push a float of eight bytes."""
    machine.stack.append(unpack_from(">d", machine.operand(8, 0))[0])


def float_line(machine: Machine) -> None:
    """Push the float on the line."""
    machine.stack.append(float(machine.line()))


def binary_long(width: int) -> Callable[[Machine], None]:
    """Push an int whose length stands in ``width`` bytes (0: the signed four)."""

    def push(machine: Machine) -> None:
        raw = _sized(machine, width)
        if len(raw) > MAX_INTEGER:
            raise BeyondLimits(f"the pickle holds an integer of {len(raw)} bytes")
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
        raise BeyondLimits(f"the pickle holds an integer of {len(line)} digits")
    return int(line)
