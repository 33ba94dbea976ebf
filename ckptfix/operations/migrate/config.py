"""The config.json of a ``from_pretrained`` folder: what it says of ties, dtypes and quantized weights."""

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ckptfix.operations.migrate.naming import is_lone
from ckptfix.weights.stored import StoredCheckpoint

NAME = PurePosixPath("config.json")

_LONGEST = 16 << 20
_DTYPE = re.compile(rb'("(?:torch_)?dtype"\s*:\s*")(?:float64|float32|float16|bfloat16|float8_\w+)(")')
_WORDS = {"BF16": b"bfloat16", "F16": b"float16", "F32": b"float32", "F64": b"float64"}


@dataclass(frozen=True, slots=True)
class Config:
    """``data``: the file, empty when there is none that can be understood; ``values``: what it says."""

    data: bytes = field(default=b"", repr=False)
    values: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def ties_nothing(self) -> bool:
        """Whether the model looks for both names of shared weights: transformers ties them only when told to.

        Without a word it ties (``PretrainedConfig.tie_word_embeddings``, True until transformers 5 writes it always).
        """
        return self.values.get("tie_word_embeddings") is False

    @property
    def is_quantized(self) -> bool:
        """Whether weights are codes that need their scales."""
        return bool(self.values.get("quantization_config"))

    def with_dtype(self, dtype: str) -> bytes:
        """Return the file with another dtype of its weights, in safetensors' nouns; every other byte stays."""
        return _DTYPE.sub(lambda match: match[1] + _WORDS[dtype] + match[2], self.data)


def read_config(source: StoredCheckpoint, home: PurePosixPath) -> Config:
    """Return the config of a folder, or of a model in its sub-folder. Raises OSError when it cannot be read."""
    if source.only is not None or is_lone(source):
        return Config()
    try:
        found = json_object(source.root / home / NAME)
    except FileNotFoundError:
        return Config()
    return Config(*found) if found is not None else Config()


def library_stem(source: StoredCheckpoint, home: PurePosixPath, config: Config) -> str | None:
    """Return what the library that wrote a config calls the weights next to it; None for what ``load_state`` finds.

    None also where other weights have that name: the Trainer saves an adapter next to the folder of DeepSpeed.
    """
    folder = source.root / home
    if "_diffusers_version" in config.values:
        stem = "diffusion_pytorch_model"
    elif not config.data and (folder / "adapter_config.json").exists():
        stem = "adapter_model"
    else:
        return None
    return None if any((folder / f"{stem}{suffix}").exists() for suffix in (".safetensors", ".bin")) else stem


def json_object(path: Path) -> tuple[bytes, dict[str, Any]] | None:
    """Return a small JSON file and what it says; None for what is no regular file, too long, or no object of JSON.

    Raises OSError when it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        data = file.read(_LONGEST + 1)
    try:
        values = json.loads(data) if len(data) <= _LONGEST else None
    except (ValueError, RecursionError):
        return None
    return (data, values) if isinstance(values, dict) else None
