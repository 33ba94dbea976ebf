"""A file that is to be written, as what it consists of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

from ckptfix.storage.recipes import Literal

__all__ = ["Computed", "Data", "Literal", "NewTensor", "OutputFile", "Part"]


class NewTensor(NamedTuple):
    """A tensor to be written: its name, its dtype in safetensors' nouns, its shape and its size in bytes."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Data:
    """Here go the ``length`` bytes of the tensor ``fqn``."""

    fqn: str
    length: int


@dataclass(frozen=True, slots=True)
class Computed:
    """``length`` bytes that need the CRC-32 of the tensors written before them in this file: ``make(crcs)``."""

    length: int
    make: Callable[[Mapping[str, int]], bytes] = field(repr=False)


Part = Literal | Data | Computed


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """A file to be written: its path relative to the new checkpoint, and its parts in order."""

    path: PurePosixPath
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return sum(part.length for part in self.parts)

    @property
    def needs_crc(self) -> bool:
        """Whether the CRC-32 of its tensors must be computed while they are written."""
        return any(isinstance(part, Computed) for part in self.parts)
