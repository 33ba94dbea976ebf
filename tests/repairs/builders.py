"""Small safetensors checkpoints, written by hand so that no test needs torch for them."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path


def write_safetensors(
    path: Path, tensors: Mapping[str, bytes], *, metadata: Mapping[str, str] | None = None, tail: bytes = b""
) -> Path:
    """Write U8 tensors with these bytes, in this order."""
    header: dict[str, object] = {"__metadata__": dict(metadata if metadata is not None else {"format": "pt"})}
    position = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [position, position + len(data)]}
        position += len(data)
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(tensors.values()) + tail)
    return path


def read_safetensors_bytes(path: Path) -> dict[str, bytes]:
    """Read a file back, without the package under test."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: data[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]]
        for name, entry in header.items()
    }


def snapshot(root: Path) -> dict[str, bytes]:
    """Return every file below a folder with its bytes."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }
