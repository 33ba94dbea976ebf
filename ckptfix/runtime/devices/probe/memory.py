"""Memory for payloads. That of large ones is kept and used again: to map and clear 64 MiB takes longer than to fill it.

Nothing of what it held is ever relied on: every block is filled anew before a copy.
"""

from typing import Any

import torch

from ckptfix.runtime.devices.pairs import device

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
    reserved, allocated = (getattr(module, f"memory_{word}", None) for word in ("reserved", "allocated"))
    if reserved is None or allocated is None:
        return free
    return free + max(int(reserved(index)) - int(allocated(index)), 0)


class Memory:
    """Blocks of bytes on the host and on devices. ``role``: what for; a block serves one role at a time."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, str], Any] = {}

    def on_host(self, size: int, role: str) -> Any:
        """Return a block of ``size`` bytes on the host; what it holds is not defined."""
        return self._block(size, role, torch.device("cpu"))

    def on_device(self, size: int, where: Any, role: str) -> Any:
        """Return a block of ``size`` bytes on a device; what it holds is not defined."""
        return self._block(size, role, where)

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
