"""A checkpoint folder as it was scanned: components with a role, a position and what their headers say."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.filenames import FileName, Role
from ckptfix.formats.safetensors_file import SafetensorsFile, WeightsIndex
from ckptfix.formats.tensor import TensorInfo
from ckptfix.formats.torch_file import TorchFile

PLAIN_FOLDER = "a folder"
"""The kind of a sub-folder that Accelerate did not write."""


class Fingerprint(NamedTuple):
    """Facts that tell a file from another or from itself before a change: sizes in bytes, times in nanoseconds."""

    size: int
    mtime_ns: int
    inode: int


class ProblemKind(Enum):
    """Why a component could not be read."""

    TRUNCATED = "truncated"
    NOT_A_TENSOR_FILE = "not a tensor file"
    MALFORMED = "malformed"
    UNSUPPORTED = "unsupported"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A component that could not be read: a value, so that one bad file never stops a scan.

    ``in_header``: a truncated one that ends before what says where its tensors are. ``is_foreign``: an unsupported one
    that is sound, and of a format that nothing here reads. ``is_limit``: an unsupported one beyond what is read, which
    no library writes.
    """

    kind: ProblemKind
    message: str
    have: int = 0
    need: int | None = None
    in_header: bool = False
    is_foreign: bool = False
    is_limit: bool = False

    @property
    def is_only_unchecked(self) -> bool:
        """Return whether the file is of a known kind that is not read here, and nothing is wrong with that."""
        return self.kind is ProblemKind.UNSUPPORTED and not self.is_limit


def is_unreadable(component: "Component") -> bool:
    """Return whether a component may not be read, so that nothing is known of what it holds."""
    return component.problem is not None and component.problem.kind is ProblemKind.UNREADABLE


class NameScope(NamedTuple):
    """One place in a file where names live, and the wrapper chain that all of them begin with.

    ``path`` leads to the dict in a pickle (``("model",)``), () is the file itself. ``kind`` is "state dict" or,
    for optimizers, "param_names", "params" or "optimizer state". ``is_model``: a module's state dict by its looks, and
    not any dict in which a tensor lies.
    """

    path: tuple[str, ...]
    kind: str
    names: tuple[str, ...]
    chain: tuple[str, ...]
    is_model: bool = False

    def __str__(self) -> str:
        kind = "" if self.kind == "state dict" else self.kind
        where = "".join(f"[{step!r}]" for step in self.path)
        return f"{where} {kind}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One file of a checkpoint, or one sub-folder that is not looked into.

    ``content`` is the parsed header, None for an unread one. ``tensors`` are those of every state dict in it.
    ``is_linked``: reached through a symbolic link, or one of several hard links, so never patched in place.
    """

    path: PurePosixPath
    name: FileName
    size: int
    fingerprint: Fingerprint
    is_linked: bool
    content: SafetensorsFile | TorchFile | WeightsIndex | None
    tensors: tuple[TensorInfo, ...] = ()
    scopes: tuple[NameScope, ...] = ()
    problem: Problem | None = None

    @property
    def role(self) -> Role:
        """The purpose of the component, by its name."""
        return self.name.role

    @property
    def is_unsupported(self) -> bool:
        """Return whether it is sound as far as can be seen, and of a kind that is not read."""
        return self.problem is not None and self.problem.kind is ProblemKind.UNSUPPORTED

    @property
    def whole(self) -> NameScope | None:
        """The names of a file that is one state dict, None for any other."""
        return next((scope for scope in self.scopes if scope.path == () and scope.kind == "state dict"), None)

    @property
    def model(self) -> NameScope | None:
        """The keys of a file that is one state dict, as a DCP folder has those of its model."""
        return self.whole

    @property
    def chain(self) -> tuple[str, ...]:
        """The wrappers that every key carries of a file that is one state dict, () for any other."""
        return self.whole.chain if self.whole is not None else ()

    @property
    def files(self) -> "Mapping[PurePosixPath, Component]":
        """The file by its path, as a DCP folder has its files."""
        return {self.path: self}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFolder:
    """A scanned folder. ``only`` names the one file that was asked for; ``strays`` are never touched.

    ``subfolders`` maps the name of a sub-folder to what it is; ``scan_dcp_folders`` reads those of DCP.
    ``ranks``: those whose random states are in the folder, also where only one file is looked at.
    """

    root: Path
    only: str | None
    components: tuple[Component, ...]
    strays: tuple[PurePosixPath, ...]
    subfolders: Mapping[PurePosixPath, str]
    ranks: frozenset[int] = frozenset()

    @property
    def is_save_state(self) -> bool:
        """Return whether ``save_state`` wrote it: it always leaves the RNG state of every rank."""
        return any(one.role is Role.RNG_STATE and not one.name.is_of_trainer for one in self.components)

    @property
    def processes(self) -> int | None:
        """The processes of the run that saved the folder, as far as its random states show; None without any.

        A state that is missing is no evidence: the highest rank counts.
        """
        return max(self.ranks) + 1 if self.ranks else None

    def entries(self, role: Role) -> tuple[tuple[Component, ...], ...]:
        """Return the lists of numbered entries of a role, one a family, each ordered by position."""
        found: dict[tuple[Role, str, str], list[Component]] = {}
        for component in self.components:
            if component.role is role and component.name.is_numbered:
                found.setdefault(component.name.family, []).append(component)
        return tuple(tuple(sorted(entries, key=lambda entry: entry.name.index)) for entries in found.values())
