"""One tensor as a file describes it, in safetensors' own nouns."""

from typing import NamedTuple

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "C128": 128,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element of each dtype name (safetensors 0.8, ``Dtype`` in tensor.rs; C128 is torch's
alone).
"""


class TensorInfo(NamedTuple):
    """A tensor in a file. A NamedTuple, because a folder can hold 100,000 of them and must scan in
    a second.

    ``data_offsets`` are the begin and the end of the tensor's bytes counted from the start of the
    file (a safetensors header counts from the end of the header), or None where they are not one
    contiguous run.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int] | None
