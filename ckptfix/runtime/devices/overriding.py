"""The one place in torch that every copy between two devices of an accelerator passes: ``aten::copy_`` below autograd.

``Tensor.to``, ``Module.to``, slices, storages, ``load_state_dict``, ``_foreach_copy_``, compiled code, backward passes
and all threads end there (measured with torch 2.13). What does not: NCCL, CUDA IPC, kernels that read another device's
memory, and quantized tensors, which have a dispatch key of their own.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ckptfix.runtime.devices.pairs import Pair, device_type

Carry = Callable[[Pair, torch.Tensor, torch.Tensor], bool]
"""(pair, destination, source) -> whether the copy was done; if not, torch's own copy does it."""

NOT_COVERED = (
    "NCCL and other collectives",
    "torch.nn.DataParallel, replicate, comm.broadcast and comm.reduce_add (NCCL)",
    "CUDA IPC (torch.multiprocessing)",
    "kernels that read another device's memory themselves",
    "quantized tensors (QuantizedCUDA)",
    "replays of CUDA graphs captured before",
)
"""What goes from device to device and does not pass ``aten::copy_`` at the accelerator's key."""

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}

_removed: deque[Any] = deque(maxlen=64)
"""Kernels of overrides that were taken back.

A model may be collected, and its reference given back, inside of the very copy that the kernel answers: it must not be
freed before that copy has left it.
"""


def can_override() -> bool:
    """Return whether this torch hands out the kernel that an override has to call on."""
    return hasattr(torch.library, "get_kernel")


class Override:
    """``carry`` put in front of every copy between two devices of the current accelerator, until ``remove``."""

    def __init__(self, carry: Carry) -> None:
        """Install it. Raises RuntimeError without an accelerator, or where ``can_override`` says no."""
        name = device_type()
        if name is None or not can_override():
            raise RuntimeError(
                f"torch {torch.__version__} with accelerator {name}: aten::copy_ cannot be overridden"
            )
        key = torch._C._dispatch_key_for_device(name)
        original = torch.library.get_kernel("aten::copy_", key)
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("copy_", _in_front_of(original, carry), key, with_keyset=True)
        self._kernel = torch.library.get_kernel("aten::copy_", key)

    def remove(self) -> bool:
        """Let torch's own kernel answer again, without a trace of this one; return whether that was done.

        It is not while other threads run: torch changes its table of kernels without a lock, and a copy that looks its
        kernel up meanwhile ends the process (a segmentation fault, measured with torch 2.13). A backward pass counts:
        the thread that asked for it waits in Python. Installing has no such moment, as the old kernel stays valid.
        """
        if len(sys._current_frames()) > 1:
            return False
        _removed.append(self._kernel)
        self._library._destroy()
        return True


class _Thread(threading.local):
    direct: Pair | None = None
    """The pair of the direct copy that this thread is making."""


def _in_front_of(original: Any, carry: Carry) -> Callable[..., Any]:
    copied = original.call_boxed
    thread = _Thread()

    def copy_(keyset: Any, destination: Any, source: Any, non_blocking: bool = False) -> Any:
        # Every copy to, from and on an accelerator comes here; those on one device leave by the shortest way.
        try:
            start, end = source.get_device(), destination.get_device()  # -1 for the host
        except AttributeError:
            # The 0 of `tensor.ne(0)` comes as a number, not as the tensor of C++; the original takes tensors.
            number = torch.scalar_tensor(source, dtype=_DTYPES[type(source)], device="cpu")
            return copied(keyset, destination, number, non_blocking)
        if start == end or start < 0 or end < 0 or source.device.type != destination.device.type:
            return copied(keyset, destination, source, non_blocking)
        pair = (start, end)
        if (
            thread.direct == pair
        ):  # torch gathers a strided copy without P2P, and copies once more from inside
            return copied(keyset, destination, source, non_blocking)
        # Subclasses and modes must not see what carries their bytes; autograd has recorded the copy already.
        with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
            if carry(pair, destination, source):
                return destination
        before, thread.direct = thread.direct, pair
        try:
            return copied(keyset, destination, source, non_blocking)
        finally:
            thread.direct = before

    return copy_
