"""Change strings in a pickle and nothing else, and prove it.

A string is pushed by a literal or out of the memo, and each push has a site of its own. A new
string replaces the literal there; the PUT behind it stays, so the memo then holds the new string,
and every later GET that must still give the old one becomes a literal. No POP, DUP or newer opcode
is added: ``torch.load(weights_only=True)`` reads few.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import accumulate
from struct import pack
from types import MappingProxyType
from typing import NamedTuple

from ckptfix.errors import FormatError, UnsupportedFormat
from ckptfix.formats.pickle_stream import parse, paused_gc
from ckptfix.formats.pickle_tree import PickleTree, same_tree

_FRAME_HEAD = 9  # the opcode and eight bytes of length
_MAX_ADDED = 1 << 28  # a million references to one long name become a million literals
# Bytes of length behind these opcodes.
_LENGTH_WIDTH = {b"X": 4, b"\x8c": 1, b"\x8d": 8, b"U": 1, b"T": 4}
# Opcodes between a key and its number.
_SKIPPED = {b"\x94": 1, b"q": 2, b"r": 5, b"\x95": _FRAME_HEAD}
# Width of BININT1, BININT2, BININT; LONG1 has its own.
_NUMBERS = {b"K": 2, b"M": 3, b"J": 5, b"\x8a": 0}


class _Change(NamedTuple):
    """Replacement of the ``old`` bytes at ``offset`` by ``new``."""

    offset: int
    old: int
    new: bytes


def rewrite(
    tree: PickleTree,
    new_names: Mapping[int, str],
    new_numbers: Mapping[int, int] = MappingProxyType({}),
    *,
    is_right: Callable[[bytes], bool] | None = None,
) -> bytes:
    """Return the pickle with new strings at these push sites, and every other string as it was.

    ``new_numbers``: others, at least 0, by site (``number_behind``). ``is_right``: a check of the
    result that replaces the comparison here; needed for numbers, which the comparison does not
    expect.

    Raises UnsupportedFormat when a string cannot be changed alone, or not be written as the old one
    was. Raises FormatError when the result, read again, is not the same tree up to these strings: a
    fault of this module.
    """
    if tree.leftover:
        raise UnsupportedFormat("the pickle leaves unused values on its stack")
    with paused_gc():
        changes = sorted([*_changes(tree, new_names), *_number_changes(tree, new_numbers)])
        data = _apply(tree, changes)
        if not (is_right(data) if is_right is not None else _is_right(tree, data, new_names)):
            raise FormatError(
                "the rewritten pickle differs in more than its names; nothing was changed"
            )
    return data


def _is_right(tree: PickleTree, data: bytes, new_names: Mapping[int, str]) -> bool:
    again = parse(data)
    return again.end == len(data) and same_tree(tree, again, new_names)


def number_behind(tree: PickleTree, site: int) -> int:
    """Return the site of the number that is pushed right behind the string at ``site``: the value
    to its key.

    Raises UnsupportedFormat when no number that ``rewrite`` can change follows.
    """
    data, position = tree.data, site + _width(tree.data, site)
    while data[position : position + 1] in _SKIPPED:
        position += _SKIPPED[data[position : position + 1]]
    if data[position : position + 1] not in _NUMBERS:
        raise UnsupportedFormat(f"no number follows the string at byte {site} of the pickle")
    return position


def _number_changes(tree: PickleTree, new_numbers: Mapping[int, int]) -> list[_Change]:
    return [
        _Change(
            site,
            _NUMBERS[tree.data[site : site + 1]] or 2 + tree.data[site + 1],
            _encode_number(number),
        )
        for site, number in new_numbers.items()
    ]


def _encode_number(number: int) -> bytes:
    """Return a push of a number as the pickler writes it."""
    if number < 1 << 31:
        return b"J" + pack("<i", number)
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(raw)]) + raw


def _changes(tree: PickleTree, new_names: Mapping[int, str]) -> list[_Change]:
    changes = []
    added = 0
    # Site -> the string that it pushes from now on, where that is a new one.
    held: dict[int, str] = {}
    # Site of a GET -> site of the literal that first pushed its string.
    literal: dict[int, int] = {}
    sites = set()
    for value, site, source in tree.texts:
        sites.add(site)
        if source != site:
            literal[site] = literal.get(source, source)
        wanted = new_names.get(site, value)
        if wanted != value:
            held[site] = wanted
        unchanged_opcode_gives = value if source == site else held.get(source, value)
        if wanted != unchanged_opcode_gives:
            family = tree.data[literal.get(site, site)]
            changes.append(_Change(site, _width(tree.data, site), _encode(family, wanted)))
            added += len(changes[-1].new)
            if added > _MAX_ADDED:
                raise UnsupportedFormat(f"the new names would take more than {_MAX_ADDED} bytes")
    unknown = new_names.keys() - sites
    if unknown:
        raise FormatError(f"no string is pushed at byte {min(unknown)} of the pickle")
    shared = tree.duplicated & held.keys()
    if shared:
        raise UnsupportedFormat(
            f"the string at byte {min(shared)} of the pickle is used twice by a DUP opcode"
        )
    return changes


def _width(data: bytes, site: int) -> int:
    """Return the length in bytes of the string push at ``site``."""
    code = data[site : site + 1]
    if code in _LENGTH_WIDTH:
        width = _LENGTH_WIDTH[code]
        return 1 + width + int.from_bytes(data[site + 1 : site + 1 + width], "little")
    return {b"h": 2, b"j": 5}.get(code) or data.index(b"\n", site) + 1 - site


def _encode(family: int, value: str) -> bytes:
    """Return a literal in the family of the old one: a protocol 2 stream stays one, a str of Python
    2, too.
    """
    try:
        match bytes([family]):
            case b"V":
                line = value.replace("\\", "\\u005c")
                # Pickle escapes these by hand: the codec leaves them as they are.
                for char in "\0\n\r\x1a":
                    line = line.replace(char, f"\\u{ord(char):04x}")
                return b"V" + line.encode("raw-unicode-escape") + b"\n"
            case b"S":
                return (
                    b"S"
                    + repr(value.encode("utf-8", "surrogateescape"))[1:].encode("ascii")
                    + b"\n"
                )
            case b"U" | b"T":
                raw = value.encode("utf-8", "surrogateescape")
                return _sized(b"U", b"T", raw)
            case b"\x8c" | b"\x8d":
                return _sized(b"\x8c", b"X", value.encode("utf-8", "surrogatepass"))
            case _:
                raw = value.encode("utf-8", "surrogatepass")
                return b"X" + pack("<I", len(raw)) + raw
    except UnicodeEncodeError:
        raise UnsupportedFormat(
            f"{value!r} cannot be written in the encoding of the old name"
        ) from None


def _sized(short: bytes, long: bytes, raw: bytes) -> bytes:
    return short + bytes([len(raw)]) + raw if len(raw) < 256 else long + pack("<I", len(raw)) + raw


def _apply(tree: PickleTree, changes: list[_Change]) -> bytes:
    """Return the stream with the changes made and the lengths of its frames set right."""
    offsets = [change.offset for change in changes]
    grown = [0, *accumulate(len(change.new) - change.old for change in changes)]
    every = list(changes)
    for offset, length in tree.frames:
        begin, end = offset + _FRAME_HEAD, offset + _FRAME_HEAD + length
        first, last = bisect_left(offsets, begin), bisect_left(offsets, end)
        if first < last and offsets[last - 1] + changes[last - 1].old > end:
            raise UnsupportedFormat(
                f"the frame at byte {offset} of the pickle ends inside a string"
            )
        every.append(
            _Change(offset, _FRAME_HEAD, b"\x95" + pack("<Q", length + grown[last] - grown[first]))
        )
    parts = []
    position = 0
    for change in sorted(every, key=lambda change: change.offset):
        parts += [tree.data[position : change.offset], change.new]
        position = change.offset + change.old
    return b"".join([*parts, tree.data[position:]])
