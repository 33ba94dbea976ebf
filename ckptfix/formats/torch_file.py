"""torch.save files, whatever their container: the common interface. (Being filled in; the signatures stand.)"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ckptfix.formats.pickle_stream import PickleTree
from ckptfix.formats.torch_pickle import PickledStateDict, PickledTensor
from ckptfix.storage.reading import FileReader


class NameMap(Protocol):
    """A rule for renaming: called with an fqn, or ``module`` with a module's name in ``_metadata``."""

    def __call__(self, fqn: str) -> str:
        """Return the new name of a tensor."""

    def module(self, name: str) -> str:
        """Return the new name of a module."""


@dataclass(frozen=True, slots=True)
class Patched:
    """Overwrite ``old`` at ``offset`` by ``new`` of the same length."""

    offset: int
    old: bytes
    new: bytes


@dataclass(frozen=True, slots=True)
class Appended:
    """Add ``data`` where the file ends, without its trailing bytes; the last ``tail`` bytes in a second write."""

    data: bytes
    tail: int


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A parsed torch.save file."""

    tree: PickleTree
    state_dicts: tuple[PickledStateDict, ...]
    storage_ranges: Mapping[str, tuple[int, int]]
    trailing: int

    def tensors_of(self, storage_key: str) -> tuple[PickledTensor, ...]:
        """Return the tensors that lie in a storage."""
        raise NotImplementedError

    def edit(self, reader: FileReader, new_names: Mapping[int, str]) -> Patched | Appended:
        """Return the edit that puts these strings at these push sites."""
        raise NotImplementedError


def read_torch_file(reader: FileReader) -> TorchFile:
    """Parse a torch.save file."""
    raise NotImplementedError


def crc_mismatches(
    file: TorchFile, reader: FileReader, *, every_record: bool, progress: Callable[[int], None] | None = None
) -> Iterator[tuple[str, str | None]]:
    """Yield (record name, storage key or None) of every record whose CRC is not the one written."""
    raise NotImplementedError


def same_storages(
    one: TorchFile, other: TorchFile, rename_one: NameMap, rename_other: NameMap
) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...] | None:
    """Return pairs of (offset, length) of the storages that must agree, or None when the structures differ."""
    raise NotImplementedError
