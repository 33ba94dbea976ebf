"""Known bits, the memory that holds them, and the damage to those that arrived.

Bits are made on the host by a seeded generator, anew for every copy, and never taken from a device.
"""

import ctypes
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from msgspec import Struct

from ckptfix.devices.probe.probe_report import Kind
from ckptfix.devices.torch_devices import device

DTYPES = (
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "bool",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)
"""Names of what a copy may carry. Older torch lacks some, and a device may not take all: see
``known``.
"""


_COMPARED = 2 << 20
"""Words (16 MiB) that are compared at a time."""


def known(name: str) -> bool:
    """Return whether this torch has the dtype."""
    return isinstance(getattr(torch, name, None), torch.dtype)


def dtype_of(name: str) -> Any:
    """Return the ``torch.dtype`` of this name."""
    return getattr(torch, name)


def seed_of(seed: int, *where: object) -> int:
    """Return the seed of one copy: of 63 bits, from the probe's seed and the copy's place in the
    plan.
    """
    text = repr((seed, *where)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


def random_bytes(size: int, seed: int) -> Any:
    """Return ``size`` random bytes on the host, each of 256 values, as uint8."""
    return fill(torch.empty(size, dtype=torch.uint8, device="cpu"), seed)


def fill(block: Any, seed: int) -> Any:
    """Fill a block of bytes on the host with random ones, and return it."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    whole = block.numel() // 8 * 8
    block[:whole].view(torch.int64).random_(-(2**63), None, generator=generator)
    block[whole:].random_(0, 256, generator=generator)
    return block


def make_values(elements: Any) -> None:
    """Turn random bits into values of their dtype, in place, where not all bits are one.

    A bool is 0 or 1. A float is finite: hardware may rewrite the bits of a NaN that passes a
    kernel.
    """
    if elements.dtype is torch.bool:
        elements.view(torch.uint8).bitwise_and_(1)
    elif elements.is_complex():
        make_values(torch.view_as_real(elements))
    elif elements.is_floating_point() and elements.element_size() > 1:
        elements.masked_fill_(~torch.isfinite(elements), 1.0)


def small_integers(block: Any, dtype: str, seed: int) -> Any:
    """Return as many whole numbers from 0 to 127 as the block has bytes; every dtype but bool holds
    them exactly.
    """
    return fill(block, seed).bitwise_and_(127).to(dtype_of(dtype))


def bits(tensor: Any) -> Any:
    """Return the bytes of a tensor in the order of its elements, as uint8 of one dimension."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _parts(one: Any, other: Any) -> tuple[tuple[Any, Any], ...]:
    """Return two blocks of bytes piece by piece: as 64-bit words, which compare six times as fast,
    then the rest.
    """
    aligned = one.storage_offset() % 8 == other.storage_offset() % 8 == 0
    whole = one.numel() // 8 * 8 if aligned else 0
    rest = (one[whole:], other[whole:])
    return (
        ((one[:whole].view(torch.int64), other[:whole].view(torch.int64)), rest)
        if whole
        else (rest,)
    )


def same(one: Any, other: Any) -> bool:
    """Return whether two blocks of bytes on the host are equal."""
    return all(bool(torch.equal(part, its)) for part, its in _parts(one, other))


def compared(one: Any, other: Any) -> Any:
    """Queue a comparison of two blocks on their device, and return what it will give: a tensor of
    one bool.

    Large blocks are compared in parts, which keeps what a comparison needs next to them small.
    """
    equal = [
        (part == its).all()
        for whole, its_whole in _parts(one, other)
        for part, its in zip(whole.split(_COMPARED), its_whole.split(_COMPARED), strict=True)
        if part.numel()
    ]
    return equal[0] if len(equal) == 1 else torch.stack(equal).all()


_LARGE = 4 << 20
"""Bytes. Smaller blocks are made anew, as a program would make them."""

_STEP = 8 << 20
"""Bytes. Kept blocks have a multiple of it, so that payloads of nearly one size share one."""


def free_memory(index: int) -> int | None:
    """Return the bytes that this process may still take on a device; None where it does not say."""
    module = torch.get_device_module(device(index))
    query = getattr(module, "mem_get_info", None)
    if query is None:
        return None
    free = int(query(index)[0])
    reserved, allocated = (
        getattr(module, f"memory_{word}", None) for word in ("reserved", "allocated")
    )
    if reserved is None or allocated is None:
        return free
    return free + max(int(reserved(index)) - int(allocated(index)), 0)


class Memory:
    """Blocks of bytes on the host and on devices. ``role``: their purpose; a block serves one role
    at a time.

    Large ones are kept and used again: to map and clear 64 MiB takes longer than to fill it.
    Nothing of what they held is ever relied on: every block is filled anew before a copy.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, str], Any] = {}

    def on_host(self, size: int, role: str) -> Any:
        """Return a block of ``size`` bytes on the host; what it holds is not defined."""
        return self._block(size, role, torch.device("cpu"))

    def upload(self, block: Any, where: Any, role: str) -> Any:
        """Return a block on a device, filled from one on the host."""
        return self._block(block.numel(), role, where).copy_(block)

    def clear(self) -> None:
        """Let go of all blocks."""
        self._blocks.clear()

    def _block(self, size: int, role: str, where: Any) -> Any:
        if size < _LARGE:
            return torch.empty(size, dtype=torch.uint8, device=where)
        key = (str(where), role)
        if key not in self._blocks or self._blocks[key].numel() < size:
            self._blocks.pop(key, None)  # not both at once
            kept = size + -size % _STEP
            self._blocks[key] = torch.empty(kept, dtype=torch.uint8, device=where)
        return self._blocks[key][:size]


class Damage(Struct, frozen=True, kw_only=True):
    """A kind of damage; ``first_offset``: the first wrong byte, counted from the start of the
    payload.

    None where no byte of the payload is wrong in the end: it came late, or the memory next to it
    was written.
    """

    kind: Kind
    first_offset: int | None
    wrong_bytes: int


_FLIPPED_BITS = 8
"""At most so many wrong bits count as flipped ones."""

_BLOCK = 64
"""Bytes. Two wrong bytes this near belong to one run: a lost byte is right by chance once in 256.
"""

_NEEDLE = 32
"""Bytes of the payload that are looked for at another place."""

_REACH = 1 << 20
"""Bytes to either side within which a displaced payload is looked for."""


def classify(
    arrived: Any, sent: Any, *, held: Any | None = None, earlier: Sequence[Any] = ()
) -> Damage | None:
    """Return what is wrong with ``arrived``, or None when it equals ``sent``. All are uint8, flat
    and on the host.

    Random payloads make the answer unambiguous from some dozens of bytes on: a piece of one is
    found at another place only if it was moved there.

    ``held``: what the destination held before. ``earlier``: payloads, or their beginnings, that the
    same pair carried.
    """
    wrong = arrived != sent
    count = int(wrong.sum())
    if not count:
        return None
    first = int(wrong.to(torch.uint8).argmax())
    return Damage(
        kind=_kind(arrived, sent, held, earlier, wrong, first, count),
        first_offset=first,
        wrong_bytes=count,
    )


def _kind(
    arrived: Any,
    sent: Any,
    held: Any | None,
    earlier: Sequence[Any],
    wrong: Any,
    first: int,
    count: int,
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
    return _by_extent(wrong, count)


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


def _by_extent(wrong: Any, count: int) -> Kind:
    size = wrong.numel()
    block = _BLOCK if size >= 8 * _BLOCK else 8 if size >= 64 else 1
    padded = torch.nn.functional.pad(wrong, (0, -size % block))
    blocks = padded.view(-1, block).any(dim=1)
    runs = int(blocks[0]) + int((blocks[1:] & ~blocks[:-1]).sum())
    if runs > 1:
        return Kind.HOLES
    return Kind.GARBAGE if bool(blocks.all()) and count > size // 2 else Kind.PARTIAL
