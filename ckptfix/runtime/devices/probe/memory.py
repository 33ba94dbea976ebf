"""Memory for payloads. That of large ones is kept and used again: to map and clear 64 MiB takes longer than to fill it.

Nothing of what it held is ever relied on: every block is filled anew before a copy.
"""

from typing import Any

import torch

_LARGE = 4 << 20
"""Bytes. Smaller blocks are made anew, as a program would make them."""

_STEP = 8 << 20
"""Bytes. Kept blocks have a multiple of it, so that payloads of nearly one size share one."""


class Memory:
    """Blocks of bytes on the host and on devices. ``role``: what for; a block serves one role at a time."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, str], Any] = {}

    def on_host(self, size: int, role: str) -> Any:
        """Return a block of ``size`` bytes on the host; what it holds is not defined."""
        return self._block(size, role, torch.device("cpu"))

    def upload(self, block: Any, device: Any, role: str) -> Any:
        """Return a block on a device, filled from one on the host."""
        return self._block(block.numel(), role, device).copy_(block)

    def clear(self) -> None:
        """Let go of all blocks."""
        self._blocks.clear()

    def _block(self, size: int, role: str, device: Any) -> Any:
        if size < _LARGE:
            return torch.empty(size, dtype=torch.uint8, device=device)
        key = (str(device), role)
        if key not in self._blocks or self._blocks[key].numel() < size:
            self._blocks.pop(key, None)  # not both at once
            kept = size + -size % _STEP
            self._blocks[key] = torch.empty(kept, dtype=torch.uint8, device=device)
        return self._blocks[key][:size]
