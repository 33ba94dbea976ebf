"""What a DCP folder is: what ``.metadata`` says, which files are there, and where names of parameters stand.

Accelerate's FSDP saves ``pytorch_model_fsdp_<i>/`` and ``optimizer_<i>/`` (``utils/fsdp_utils.py``, 1.0 to 1.15), each
by ``torch.distributed.checkpoint``. Any other folder that holds such files counts as well, the checkpoint itself too.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.filenames import FolderName
from ckptfix.checkpoint.folder import Fingerprint, NameScope, Problem
from ckptfix.formats.dcp_metadata import METADATA_NAME, DcpMetadata

UNFINISHED = METADATA_NAME + ".tmp"
"""What torch writes first, when all data is on disk, and renames to ``.metadata``."""

DATA_SUFFIX = ".distcp"
_OF_A_SAVE = re.compile(r"(__[0-9]+)?\.metadata(\.tmp)?|.+\.distcp", re.DOTALL)
_RANK_FILE = re.compile(r"__(0|[1-9][0-9]{0,8})_[0-9]+\.distcp")


class ShardFile(NamedTuple):
    """A file of a DCP folder. ``is_linked``: reached through a link, or one of several hard links."""

    fingerprint: Fingerprint
    is_linked: bool

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.fingerprint.size


class NamesInItem(NamedTuple):
    """Names that stand as values in a bytes item: DCP's name of the item, and each one's site (``Text``) and value."""

    fqn: str
    names: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedState:
    """One DCP folder. ``path`` is relative to the checkpoint; ``.`` is the checkpoint itself.

    ``name``: its number and role when it is called as Accelerate calls it. ``metadata``: None when it is not there or
    cannot be read (``problem``). ``files``: all regular files, by path from the checkpoint. ``scopes``: where names of
    parameters stand; the path of one leads there in the state dict that was saved. ``listed``: those of them that are a
    bytes item, by path and kind. ``unsafe``: file -> what its pickles can run. ``unread``: the bytes items that could
    not be read, any of which may hold names, and why. ``said``: every string in the other bytes items. ``broken``:
    file -> what is wrong with an item in it, ``unreadable``: file -> why it may not be read. ``siblings``: the DCP
    folders beside the checkpoint when it is one folder of Accelerate's itself.
    ``journals``: it has a journal of its own, of repairs that were made of it alone.
    """

    path: PurePosixPath
    name: FolderName | None
    is_linked: bool
    files: Mapping[PurePosixPath, ShardFile] = field(repr=False)
    metadata: DcpMetadata | None = field(default=None, repr=False)
    problem: Problem | None = None
    scopes: tuple[NameScope, ...] = ()
    listed: Mapping[tuple[tuple[str, ...], str], NamesInItem] = field(default_factory=dict, repr=False)
    unsafe: Mapping[PurePosixPath, tuple[str, ...]] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    said: frozenset[str] = field(default=frozenset(), repr=False)
    siblings: tuple[str, ...] = ()
    journals: bool = False
    broken: Mapping[PurePosixPath, str] = field(default_factory=dict)
    unreadable: Mapping[PurePosixPath, str] = field(default_factory=dict)

    @property
    def metadata_path(self) -> PurePosixPath:
        """Where its ``.metadata`` is, or should be."""
        return self.path / METADATA_NAME

    @property
    def size(self) -> int:
        """The bytes of all its files."""
        return sum(file.size for file in self.files.values())

    @property
    def model(self) -> NameScope | None:
        """The place of a model's names, None where no model is saved."""
        return next((scope for scope in self.scopes if scope.is_model), None)

    @property
    def own_ranks(self) -> tuple[PurePosixPath, ...]:
        """The metadata of single ranks, as a save without collectives leaves it."""
        return tuple(
            path for path in self.files if path.name.endswith(METADATA_NAME) and path.name != METADATA_NAME
        )

    @property
    def named(self) -> tuple[PurePosixPath, ...]:
        """Every file that ``.metadata`` says items are in, from the checkpoint."""
        return tuple(self.path / path for path in self.metadata.files) if self.metadata else ()

    @property
    def data(self) -> tuple[PurePosixPath, ...]:
        """Every file with data that is there, named or not."""
        return tuple(path for path in self.files if path.name.endswith(DATA_SUFFIX))


def rank_of(path: PurePosixPath) -> int | None:
    """Return the rank that wrote a file of data, by its name; None for a name of another kind."""
    match = _RANK_FILE.fullmatch(path.name)
    return int(match[1]) if match else None


def holds_dcp(folder: Path) -> bool:
    """Whether a folder holds files of a DCP save. False for one that cannot be listed."""
    try:
        with os.scandir(folder) as listing:
            return any(belongs(entry.name) for entry in listing)
    except OSError:
        return False


def is_empty(folder: Path) -> bool:
    """Whether a folder holds nothing, as one whose files were dropped or moved. False for one that cannot be listed."""
    try:
        return not os.listdir(folder)
    except OSError:
        return False


def belongs(name: str) -> bool:
    """Whether a file of this name is one that a DCP save leaves."""
    return _OF_A_SAVE.fullmatch(name) is not None
