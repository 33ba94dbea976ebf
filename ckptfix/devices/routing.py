"""The router of copies between two devices: directly, or by way of the host; and their counts."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from msgspec import Struct

from ckptfix.devices.staged_copies import release_slots, staged_copy
from ckptfix.devices.torch_devices import device, device_count, device_type
from ckptfix.errors import CkptfixError
from ckptfix.hardware import Pair
from ckptfix.wording import human_size


class TransferError(CkptfixError, RuntimeError):
    """A copy between two devices that must not be made directly, and cannot be staged."""


class Count(Struct, frozen=True, kw_only=True):
    """Copies of one ordered pair, and their bytes at the source: those by way of the host, and
    direct ones.
    """

    staged: int = 0
    staged_bytes: int = 0
    direct: int = 0
    direct_bytes: int = 0

    def __sub__(self, other: "Count") -> "Count":
        return Count(
            staged=self.staged - other.staged,
            staged_bytes=self.staged_bytes - other.staged_bytes,
            direct=self.direct - other.direct,
            direct_bytes=self.direct_bytes - other.direct_bytes,
        )


class Counts:
    """A count for each pair that made a copy. Threads may add at the same time, and so may
    finalizers in any of them.

    The collector may run a finalizer, which may copy, wherever something is made. So nothing is
    made while the lock is held, and where the interpreter itself lets one run there, it finds no
    count half changed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._of: dict[Pair, list[int]] = {}  # the fields of Count, in their order

    def add(self, pair: Pair, size: int, *, staged: bool) -> None:
        """Count one copy of ``size`` bytes."""
        count = self._of.get(pair) or self._of.setdefault(pair, [0, 0, 0, 0])
        copies = 0 if staged else 2
        with self._lock:
            count[copies] += 1
            count[copies + 1] += size

    def all(self) -> Mapping[Pair, Count]:
        """Return the counts as they are now; a pair without a copy is not in it."""
        return {pair: self._now(self._of[pair]) for pair in list(self._of)}

    def _now(self, count: list[int]) -> Count:
        with self._lock:
            staged, staged_bytes, direct, direct_bytes = count
        return Count(
            staged=staged, staged_bytes=staged_bytes, direct=direct, direct_bytes=direct_bytes
        )


class _Thread(threading.local):
    direct: frozenset[Pair] | None = frozenset()
    """Pairs whose copies by this thread go directly; None: all of them."""
    is_counted = True


class Router:
    """Sends each copy its way. ``staged``: the pairs whose copies go by way of the host; replaced
    as a whole, while other threads copy.
    """

    def __init__(self) -> None:
        self.staged: frozenset[Pair] = frozenset()
        self.counts = Counts()
        self._thread = _Thread()

    @contextmanager
    def bypassed(self, pair: Pair | None = None, *, counted: bool = True) -> Iterator[None]:
        """Let copies that this thread makes go directly, those of one pair or all, for code that has
        to see what the direct way does.

        A backward pass runs in threads of torch's own: its copies stay staged. ``counted=False``:
        these copies are nobody's but the caller's own, and no counter shows them.
        """
        thread = self._thread
        before = thread.direct, thread.is_counted
        thread.direct = None if pair is None or thread.direct is None else thread.direct | {pair}
        thread.is_counted = counted and thread.is_counted
        try:
            yield
        finally:
            thread.direct, thread.is_counted = before

    def carry(self, pair: Pair, destination: torch.Tensor, source: torch.Tensor) -> bool:
        """Make a copy by way of the host and return True; False, and nothing done, for one that
        goes directly.

        Raises TransferError while a CUDA graph is captured: a graph cannot wait for the host.
        """
        if not self._is_staged(pair):
            self._count(pair, source, staged=False)
            return False
        if any(_is_capturing(index) for index in {*pair, *_devices_in_use()}):
            raise _in_a_capture(pair, source)
        try:
            staged_copy(destination, source)
        except RuntimeError as error:
            # A capture on a stream that is current nowhere cannot be asked for: CUDA itself objects
            # to the waiting.
            if "captur" in str(error):
                raise _in_a_capture(pair, source) from error
            raise
        self._count(pair, source, staged=True)
        # Staging ended during this copy, which may have taken its memory since.
        if not self.staged:
            release_slots()
        return True

    def takes_host(self, pair: Pair, source: torch.Tensor, *, back: bool = False) -> bool:
        """Return whether a copy takes the way through the host, and count it.

        ``back``: a gradient will take the same way in the other direction.
        """
        staged = self._is_staged(pair) or (back and self._is_staged(pair[::-1]))
        self._count(pair, source, staged=staged)
        return staged

    def _is_staged(self, pair: Pair) -> bool:
        direct = self._thread.direct
        return pair in self.staged and direct is not None and pair not in direct

    def _count(self, pair: Pair, source: torch.Tensor, *, staged: bool) -> None:
        # Staging may have ended during a staged copy.
        if (staged or self.staged) and self._thread.is_counted:
            self.counts.add(pair, source.nbytes, staged=staged)


def _described(pair: Pair, source: torch.Tensor) -> str:
    start, end = (device(index) for index in pair)
    shape = " x ".join(str(length) for length in source.shape) or "1"
    return f"copy of {human_size(source.nbytes)} ({shape}, {source.dtype}) from {start} to {end}"


def _in_a_capture(pair: Pair, source: torch.Tensor) -> TransferError:
    return TransferError(
        f"{_described(pair, source)} inside a CUDA graph capture: it must go through the host, and "
        "a graph cannot wait for the host. Keep copies between devices out of the graph"
    )


def _devices_in_use() -> Iterator[int]:
    """Yield the devices whose current stream may be asked whether a graph is captured.

    A capture on any device of the process forbids what staging does on every other. A device that
    this process does not use is left alone: making it the current one would begin to use it, for
    some 300 MB of its memory.
    """
    in_use = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if in_use is not None and device_type() == "cuda":
        yield from (index for index in range(device_count()) if in_use(index))


def _is_capturing(index: int) -> bool:
    where = device(index)
    module = torch.get_device_module(where)
    query = getattr(module, "is_current_stream_capturing", None)
    if query is None:
        return False
    with module.device(where):
        return bool(query())


ROUTER = Router()
"""The one router of the process: staging is on or off for all of its threads."""


bypassed = ROUTER.bypassed
