"""What happened to bytes on their way, told from the bytes that arrived.

All tensors here are uint8, of one dimension and on the host. Random payloads make the answers unambiguous from some
dozens of bytes on: a piece of one is found at another place only if it was moved there.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class Kind(Enum):
    """A kind of damage. The value is the word used in reports."""

    ZEROS = "zeros"
    UNWRITTEN = "not written"  # the destination still holds what it held before
    STALE = "stale"  # what an earlier copy of this pair carried
    PARTIAL = "partial"  # one part is missing
    HOLES = "holes"  # several parts are missing
    BIT_FLIP = "bit flip"
    SHIFT = "shift"  # the right bytes at a displaced address
    SWAP = "swap"  # the two halves in each other's place
    LATE = "late"  # right after the host has waited, wrong for the kernel queued behind the copy
    OUTSIDE = "outside"  # memory beside the destination was written
    GARBAGE = "garbage"
    ERROR = "error"  # the copy raised
    CRASH = "crash"  # the process died in the copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A kind of damage; ``first_offset``: the first wrong byte, counted from the start of the payload.

    None where no byte of the payload is wrong in the end: it came late, or the memory beside it was written.
    """

    kind: Kind
    first_offset: int | None
    wrong_bytes: int


_FLIPPED_BITS = 8
"""At most so many wrong bits count as flipped ones."""

_BLOCK = 64
"""Bytes. Two wrong bytes this near belong to one run: a lost byte is right by chance once in 256."""

_NEEDLE = 32
"""Bytes of the payload that are looked for at another place."""

_REACH = 1 << 20
"""Bytes to either side within which a displaced payload is looked for."""


def classify(
    arrived: Any, sent: Any, *, held: Any | None = None, earlier: Sequence[Any] = ()
) -> Damage | None:
    """Return what is wrong with ``arrived``, or None when it equals ``sent``.

    ``held``: what the destination held before. ``earlier``: payloads, or their beginnings, that the same pair carried.
    """
    wrong = arrived != sent
    count = int(wrong.sum())
    if not count:
        return None
    first = int(wrong.to(torch.uint8).argmax())
    return Damage(
        kind=_kind(arrived, sent, held, earlier, wrong, first, count), first_offset=first, wrong_bytes=count
    )


def _kind(
    arrived: Any, sent: Any, held: Any | None, earlier: Sequence[Any], wrong: Any, first: int, count: int
) -> Kind:
    if held is not None and torch.equal(arrived, held):
        return Kind.UNWRITTEN
    if not bool(arrived.any()):
        return Kind.ZEROS
    if any(_repeats(arrived, payload) for payload in earlier):
        return Kind.STALE
    if count <= _FLIPPED_BITS and _bits(arrived[wrong] ^ sent[wrong]) <= _FLIPPED_BITS:
        return Kind.BIT_FLIP
    if _swapped(arrived, sent):
        return Kind.SWAP
    if _displaced(arrived, sent, wrong, first, count):
        return Kind.SHIFT
    return _by_extent(wrong, first, count)


def _bits(flipped: Any) -> int:
    return sum(value.bit_count() for value in flipped.tolist())


def _repeats(arrived: Any, payload: Any) -> bool:
    size = min(arrived.numel(), payload.numel())
    return size >= 8 and bool(torch.equal(arrived[:size], payload[:size]))


def _swapped(arrived: Any, sent: Any) -> bool:
    half = sent.numel() // 2
    exchanged = ((arrived[:half], sent[-half:]), (arrived[-half:], sent[:half]))
    return half > 0 and all(bool(torch.equal(one, other)) for one, other in exchanged)


def _displaced(arrived: Any, sent: Any, wrong: Any, first: int, count: int) -> bool:
    """Return whether nearly all wrong bytes are right ones from one other distance."""
    size = sent.numel()
    for ahead in (0, 16, 256, 4096, 65536):
        at = first + ahead
        needle = _bytes(arrived[at : at + _NEEDLE])
        if len(needle) < _NEEDLE or len(set(needle)) < 4:
            continue
        start = max(0, at - _REACH)
        found = _bytes(sent[start : at + _REACH]).find(needle)
        distance = at - (start + found)
        if found < 0 or not distance:
            continue
        inside = slice(max(distance, 0), size + min(distance, 0))
        moved = arrived[inside] == sent[inside.start - distance : inside.stop - distance]
        if int((moved & wrong[inside]).sum()) >= 0.9 * (count - abs(distance)) > 0:
            return True
    return False


def _bytes(tensor: Any) -> bytes:
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


def _by_extent(wrong: Any, first: int, count: int) -> Kind:
    size = wrong.numel()
    block = _BLOCK if size >= 8 * _BLOCK else 8 if size >= 64 else 1
    padded = torch.nn.functional.pad(wrong, (0, -size % block))
    blocks = padded.view(-1, block).any(dim=1)
    runs = int(blocks[0]) + int((blocks[1:] & ~blocks[:-1]).sum())
    if runs > 1:
        return Kind.HOLES
    return Kind.GARBAGE if bool(blocks.all()) and count > size // 2 else Kind.PARTIAL
