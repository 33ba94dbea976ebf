"""Tensors against bytes: after a load, after a placement, after one hop from an accelerator to another."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy
import torch

from ckptfix.runtime.devices.routing import bypassed

CHUNK = 64 << 20
"""Bytes compared at a time. Some faults begin at 32 MiB a copy, so hops must not be cut smaller than that."""

Bytes = Any
"""A one-dimensional numpy array of uint8."""


class Mismatch(NamedTuple):
    """The first byte that differs: its offset in the tensor, what is there and what should be; None: other lengths."""

    offset: int
    have: int | None
    want: int | None

    def __str__(self) -> str:
        if self.have is None or self.want is None:
            return f"it ends at byte {self.offset}"
        return f"byte {self.offset} is {self.have:#04x}, should be {self.want:#04x}"


def host_bytes(tensor: torch.Tensor, chunk: int = CHUNK) -> Iterator[Bytes]:
    """Yield the bytes of a tensor's elements in order, read back to the host, at most ``chunk`` at a time."""
    raw = _flat(tensor).view(torch.uint8)
    for begin in range(0, len(raw), chunk):
        yield raw[begin : begin + chunk].cpu().numpy()


def first_mismatch(tensor: torch.Tensor, expected: Iterable[Bytes]) -> Mismatch | None:
    """Return the first byte in which a tensor differs from ``expected``, None when it is equal in every byte."""
    raw = _flat(tensor).view(torch.uint8)
    position = 0
    for want in expected:
        got = raw[position : position + len(want)].cpu().numpy()
        if not numpy.array_equal(got, want):
            shared = min(len(got), len(want))
            different = numpy.flatnonzero(got[:shared] != want[:shared])
            if not len(different):
                return Mismatch(position + shared, None, None)
            first = int(different[0])
            return Mismatch(position + first, int(got[first]), int(want[first]))
        position += len(want)
    return Mismatch(position, None, None) if position != len(raw) else None


def hop(
    tensor: torch.Tensor, expected: Iterable[Bytes], destination: torch.device,
) -> Mismatch | None:  # fmt: skip
    """Copy a tensor to another accelerator, directly, and return the first byte that arrived wrong; None for none.

    What the destination holds before is the complement of what should arrive: a caching allocator hands back blocks
    that still hold the right bytes, and a copy that writes nothing would pass (pytorch #87363).
    """
    flat = _flat(tensor)
    step = max(1, CHUNK // max(1, flat.element_size()))
    position = 0
    for begin, want in zip(range(0, flat.numel(), step), expected, strict=True):
        part = flat[begin : begin + step]
        there = torch.empty(part.shape, dtype=part.dtype, device=destination)
        there.view(torch.uint8).copy_(torch.from_numpy(numpy.bitwise_not(want)))
        with bypassed():
            there.copy_(part)
        if (found := first_mismatch(there, (want,))) is not None:
            return found._replace(offset=position + found.offset)
        position += len(want)
    return None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
