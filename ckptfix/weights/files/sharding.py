"""Which tensors go into which file, and the index that says so."""

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from ckptfix.checkpoint.filenames import index_name
from ckptfix.weights.files.parts import Literal, NewTensor, OutputFile

NO_WORDS: Mapping[str, Any] = {}


def in_shards(tensors: Sequence[NewTensor], most: int | None) -> list[list[NewTensor]]:
    """Split tensors in their order into shards of at most ``most`` bytes; a larger tensor gets a shard to itself."""
    shards: list[list[NewTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if most is not None and shards[-1] and filled + tensor.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    return shards


def shard_names(stem: str, suffix: str, count: int) -> list[PurePosixPath]:
    """Return the names of the files of a model, as accelerate and transformers call them."""
    if count == 1:
        return [PurePosixPath(stem + suffix)]
    return [PurePosixPath(f"{stem}-{number:05}-of-{count:05}{suffix}") for number in range(1, count + 1)]


def index_file(
    stem: str, suffix: str, shards: Sequence[Sequence[NewTensor]], words: Mapping[str, Any] = NO_WORDS
) -> OutputFile:
    """Return the index of a model in several files, as ``save_pretrained`` writes it.

    ``words``: what it says besides, as an old index did; the size in its metadata is set right. That of a variant has
    its word elsewhere: shards of ``model.fp16`` are of ``model.safetensors.index.fp16.json``.
    """
    names = shard_names(stem, suffix, len(shards))
    metadata = words.get("metadata")
    document = {
        **words,
        "metadata": {
            **(metadata if isinstance(metadata, Mapping) else {}),
            "total_size": sum(tensor.nbytes for shard in shards for tensor in shard),
        },
        "weight_map": {
            tensor.fqn: str(name) for name, shard in zip(names, shards, strict=True) for tensor in shard
        },
    }
    data = json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"
    return OutputFile(path=PurePosixPath(index_name(stem, suffix)), parts=(Literal(data),))
