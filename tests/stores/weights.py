"""Large safetensors files whose model was wrapped twice, made without numpy."""

import json
import struct
from pathlib import Path
from typing import Any

_TENSORS = 400
MIB = 1 << 20


def header_of(size: int) -> bytes:
    """Return the length and the header of a file with ``size`` bytes of tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for number in range(_TENSORS):
        begin, end = number * size // _TENSORS, (number + 1) * size // _TENSORS
        header[f"module.module.layers.{number}.weight"] = {
            "dtype": "U8",
            "shape": [end - begin],
            "data_offsets": [begin, end],
        }
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return struct.pack("<Q", len(data)) + data


def write_model(path: Path, size: int) -> None:
    """Write a file with ``size`` bytes of tensors."""
    with path.open("wb") as file:
        file.write(header_of(size))
        block = b"".join(
            struct.pack("<I", number * 2654435761 % 2**32) for number in range(MIB // 4)
        )
        done = 0
        while done < size:
            done += file.write(block[: size - done])
            block = block[7:] + block[:7]
