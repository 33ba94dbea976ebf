"""Files to measure on, and how a measurement is taken: in a process of its own, imports before the
clock.
"""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

LAYERS = 32
PARTS = (
    "attn.q",
    "attn.k",
    "attn.v",
    "attn.o",
    "mlp.up",
    "mlp.gate",
    "mlp.down",
    "norm1",
    "norm2",
)


def names(prefix: str) -> list[str]:
    """Names of 288 tensors, as a model with 32 layers has."""
    return [
        f"{prefix}model.layers.{layer}.{part}.weight" for layer in range(LAYERS) for part in PARTS
    ]


def write_safetensors(path: Path, size: int, prefix: str, *, sparse: bool = False) -> int:
    """Write a file with ``size`` bytes of tensors and return the length of its header."""
    keys = names(prefix)
    each = size // len(keys)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for number, key in enumerate(keys):
        offsets = [number * each, (number + 1) * each]
        header[key] = {"dtype": "U8", "shape": [each], "data_offsets": offsets}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        if not sparse:
            block = os.urandom(8 << 20)
            left = each * len(keys)
            while left:
                file.write(block[: min(left, len(block))])
                left -= min(left, len(block))
        file.truncate(8 + len(raw) + each * len(keys))
        file.flush()
        os.fsync(file.fileno())
    return len(raw)


def drop_from_cache(*paths: Path) -> None:
    """Make the next read of these files a cold one, as far as this system's own cache goes."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


MEASURE = """
import json, resource, sys, time
{imports}
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
def written():
    with open("/proc/self/io") as io:
        return next(int(line.split()[1]) for line in io if line.startswith("wchar"))
before, start = written(), peak()
begin, cpu = time.perf_counter(), time.process_time()
{body}
seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
print(json.dumps(dict(
    seconds=seconds, cpu=cpu, peak=peak() << 10, start=start << 10, written=written() - before
)))
"""


def measure(imports: str, body: str) -> dict[str, float]:
    """Run ``body`` in a new process after ``imports``.

    Seconds, those of processors, peak memory and bytes written, in bytes.
    """
    code = MEASURE.format(imports=imports, body=body)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    values: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return values
