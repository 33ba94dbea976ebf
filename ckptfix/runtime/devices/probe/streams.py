"""Side streams on any accelerator."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def side_streams_exist() -> bool:
    """Return whether this torch can put work on another stream of any accelerator (from 2.6 on)."""
    return hasattr(torch, "accelerator") and hasattr(torch.Stream, "wait_stream")


@contextmanager
def on_side_streams(*devices: Any) -> Iterator[None]:
    """Put what is queued on these devices in the block on a stream of its own for each.

    It waits for what was queued before, and what is queued afterwards waits for it.
    """
    accelerator = torch.accelerator
    current = accelerator.current_device_index()
    usual = [accelerator.current_stream(device) for device in devices]
    aside = [torch.Stream(device=device) for device in devices]
    try:
        for before, stream in zip(usual, aside, strict=True):
            stream.wait_stream(before)
            accelerator.set_stream(stream)  # makes its device the current one
        accelerator.set_device_index(current)
        yield
    finally:
        for before, stream in zip(usual, aside, strict=True):
            before.wait_stream(stream)
            accelerator.set_stream(before)
        accelerator.set_device_index(current)
