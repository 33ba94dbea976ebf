"""What the user asks of a migration, in values that make sense."""

import re
from dataclasses import dataclass

from ckptfix.errors import UsageError
from ckptfix.operations.policy import Keys
from ckptfix.weights.stored import Format

TARGETS = (Format.SAFETENSORS, Format.TORCH, Format.DCP)
"""The formats that are written."""

FLOATS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp64": "F64"} | {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64",
}  # fmt: skip
"""Words for ``--dtype`` -> dtype in safetensors' nouns."""

ORIGINAL = "original"
"""The word for the dtype of training, of DeepSpeed checkpoints, whose weights are otherwise those of the optimizer."""

CONVERTIBLE = frozenset(FLOATS.values()) | {
    "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0",
}  # fmt: skip
"""The dtypes that ``--dtype`` converts."""

PACKED = frozenset({"F4", "F6_E2M3", "F6_E3M2"})
"""Floating point dtypes that it does not: several numbers share a byte."""

DEFAULT_SHARD_SIZE = 5 * 10**9
"""Bytes of tensors in a file of a from_pretrained folder, as ``save_pretrained`` had them until transformers 5."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``most``: bytes of tensors in a file (None: as the kind of folder asks). ``keys``: None leaves names alone.

    ``dtype``: of all floating point tensors, in safetensors' nouns; None leaves them as they are. ``original``: of
    DeepSpeed, those in the dtype of training. ``drop_opaque``: leave out values that are no tensors. ``verify``: read
    everything back. ``overwrite``: replace what is at DST.
    """

    to: Format
    most: int | None = None
    keys: Keys | None = None
    dtype: str | None = None
    original: bool = False
    drop_opaque: bool = False
    verify: bool = True
    overwrite: bool = False


def parse_size(text: str) -> int:
    """Return the bytes of ``5GB`` (10**9 each, as save_pretrained has it), ``500MiB`` or ``1000``.

    Raises UsageError for anything else, and for nothing at all.
    """
    match = re.fullmatch(r"([0-9]{1,15})(\.[0-9]{1,6})?\s*([KMGT]i?B|B|)", text.strip(), re.IGNORECASE)
    size = int(float(match[1] + (match[2] or "")) * _UNITS[match[3].upper()]) if match else 0
    if size < 1:
        raise UsageError(f"--max-shard-size {text}: write a size as 5GB, 500MiB, or a number of bytes")
    return size


def make_options(
    *,
    to: str | Format,
    max_shard_size: int | str | None,
    keys: str | Keys | None,
    dtype: str | None,
    drop_opaque: bool,
    verify: bool,
    overwrite: bool,
) -> Options:
    """Return the options that these words mean. Raises UsageError for a word that means nothing."""
    words = [target.value for target in TARGETS]
    if (to.value if isinstance(to, Format) else to) not in words:
        raise UsageError(f"--to {to}: write one of {', '.join(words)}")
    if dtype is not None and dtype not in (*FLOATS, ORIGINAL):
        raise UsageError(f"--dtype {dtype}: write one of {', '.join((*FLOATS, ORIGINAL))}")
    if keys is not None and keys not in [*Keys, *(one.value for one in Keys)]:
        raise UsageError(f"--keys {keys}: write one of {', '.join(one.value for one in Keys)}")
    return Options(
        to=Format(to),
        most=parse_size(str(max_shard_size)) if max_shard_size is not None else None,
        keys=Keys(keys) if keys is not None else None,
        dtype=FLOATS.get(dtype or ""),
        original=dtype == ORIGINAL,
        drop_opaque=drop_opaque,
        verify=verify,
        overwrite=overwrite,
    )
