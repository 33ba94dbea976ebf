"""The digest of a tensor: the same through a rename, other shards, a tie, another format."""

import hashlib
import json

from ckptfix.storage.pieces import OpenFiles
from ckptfix.weights.stored import StoredTensor

BLOCK = 1 << 20
"""Bytes that are read and hashed at a time: hashlib lets other threads run meanwhile."""


def digest_head(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return what the digest of a tensor begins with, before its bytes."""
    return json.dumps([dtype, list(shape)]).encode() + b"\n"


def tensor_digest(tensor: StoredTensor, files: OpenFiles, buffer: memoryview) -> str:
    """Return the sha256 over dtype, shape and bytes. Raises as ``StoredTensor.blocks`` does."""
    digest = hashlib.sha256(digest_head(tensor.dtype, tensor.shape))
    for block in tensor.blocks(files, buffer):
        digest.update(block)
    return digest.hexdigest()
