"""A checkpoint folder: components with a role, a position and a parsed header; and the scan that
finds them.

The scan reads every header and no tensor bytes. Nothing is unpickled, and no bad file stops the
scan.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import PurePosixPath
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.checkpoint.filenames import FORMATS_OF_MODELS, FileName, parse_file_name
from ckptfix.checkpoint.folder_names import describe_folder_name
from ckptfix.checkpoint.keys import common_wrappers
from ckptfix.checkpoint.roles import OF_ONE_RANK, Role
from ckptfix.errors import (
    BeyondLimits,
    FormatError,
    OtherArchive,
    TruncatedError,
    UnsupportedFormat,
)
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.safetensors_file import (
    MAX_INDEX,
    ListsPaths,
    SafetensorsFile,
    WeightsIndex,
    looks_like_safetensors,
    parse_index,
    read_safetensors,
)
from ckptfix.formats.sniff import describe_content, may_be_of_torch, other_format, text_format
from ckptfix.formats.tensor import TensorInfo
from ckptfix.formats.torch_file import TorchFile, read_torch_file
from ckptfix.formats.torch_pickle import name_lists, tensor_infos
from ckptfix.storage.files import (
    AnyPath,
    FileReader,
    folder_entries,
    is_dir,
    is_listed,
    same_place,
    stat_of,
)
from ckptfix.storage.paths import JOURNAL, leads_nowhere, unreadable
from ckptfix.storage.reading import ABSENT, FileIdentity, open_reader
from ckptfix.wording import count_of, list_names

PLAIN_FOLDER = "a folder"
"""The kind of a sub-folder that Accelerate did not write."""


class ProblemKind(Enum):
    """Reason why a component could not be read."""

    TRUNCATED = "truncated"
    NOT_A_TENSOR_FILE = "not a tensor file"
    MALFORMED = "malformed"
    UNSUPPORTED = "unsupported"
    UNREADABLE = "unreadable"


class Problem(Struct, frozen=True, kw_only=True):
    """A component that could not be read: a value, so that one bad file never stops a scan.

    ``in_header``: a truncated file without the complete list of its tensors. ``is_foreign``: an
    intact file in a format that ckptfix never reads. ``is_limit``: a file beyond the limits of
    ckptfix, which no library writes. ``is_elsewhere``: an index of shards that exist in other
    folders.
    """

    kind: ProblemKind
    message: str
    have: int = 0
    need: int | None = None
    in_header: bool = False
    is_foreign: bool = False
    is_limit: bool = False
    is_elsewhere: bool = False

    @property
    def is_only_unchecked(self) -> bool:
        """Return whether the file is of a known kind that ckptfix does not read, without any sign
        of damage.
        """
        return self.kind is ProblemKind.UNSUPPORTED and not self.is_limit


def as_damage(problem: Problem | None) -> Problem | None:
    """Return the problem of a file of another program as that of a file that a loader wants to
    read.
    """
    if problem is None or not problem.is_foreign:
        return problem
    return replace(problem, kind=ProblemKind.NOT_A_TENSOR_FILE, is_foreign=False)


def is_unreadable(component: "Component") -> bool:
    """Return whether a component could not be read without being damaged, so that its contents are
    unknown.

    Permission to read it is denied, or it is an index of shards in other folders.
    """
    return component.problem is not None and component.problem.kind is ProblemKind.UNREADABLE


class NameScope(NamedTuple):
    """One dict or list of keys in a file, and the wrapper chain of all of them.

    ``path`` leads to the dict in a pickle (``("model",)``), () is the file itself. ``kind`` is
    "state dict" or, for optimizers, "param_names", "params" or "optimizer state". ``is_model``: a
    module's state dict by its looks, and not any dict in which a tensor lies.
    """

    path: tuple[str, ...]
    kind: str
    names: tuple[str, ...]
    chain: tuple[str, ...]
    is_model: bool = False

    def __str__(self) -> str:
        kind = "" if self.kind == "state dict" else self.kind
        where = "".join(f"[{step!r}]" for step in self.path)
        return where if not kind else f"the {kind} at {where}" if where else f"the {kind}"


class Component(Struct, frozen=True, kw_only=True):
    """One file of a checkpoint, or one sub-folder that is not scanned.

    ``content`` is the parsed header, None for an unread one. ``tensors``: the tensors of every
    state dict in it. ``is_linked``: reached through a symbolic link, or one of several hard links,
    so never patched in place.
    """

    path: PurePosixPath
    name: FileName
    size: int
    fingerprint: FileIdentity
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
        """Return whether it shows no damage, and is of a kind that ckptfix does not read."""
        return self.problem is not None and self.problem.kind is ProblemKind.UNSUPPORTED

    @property
    def whole(self) -> NameScope | None:
        """The names of a file that is one state dict, None for any other."""
        return next(
            (scope for scope in self.scopes if scope.path == () and scope.kind == "state dict"),
            None,
        )

    @property
    def model(self) -> NameScope | None:
        """The keys of a file that is one state dict, as a DCP folder has those of its model."""
        return self.whole

    @property
    def chain(self) -> tuple[str, ...]:
        """The wrappers that every key carries of a file that is one state dict, () for any
        other.
        """
        return self.whole.chain if self.whole is not None else ()

    @property
    def files(self) -> "Mapping[PurePosixPath, Component]":
        """The file by its path, as a DCP folder has its files."""
        return {self.path: self}


class CheckpointFolder(Struct, frozen=True, kw_only=True):
    """A scanned folder. ``only`` names the one requested file; ``strays`` are never touched.

    ``subfolders`` maps the name of a sub-folder to what it is; ``scan_dcp_folders`` reads those of
    DCP. ``ranks``: those whose random states are in the folder, even when only one file is scanned.
    ``unscanned``: then the names of the other entries, which show what kind of folder the file is
    in.
    """

    root: AnyPath
    only: str | None
    components: tuple[Component, ...]
    strays: tuple[PurePosixPath, ...]
    subfolders: Mapping[PurePosixPath, str]
    ranks: frozenset[int] = frozenset()
    unscanned: tuple[str, ...] = ()

    @property
    def file_names(self) -> Iterator[FileName]:
        """The parsed names of all components of the folder, even when only one is scanned."""
        yield from (component.name for component in self.components)
        yield from (name for name in map(parse_file_name, self.unscanned) if name is not None)

    def has_file(self, name: str) -> bool:
        """Return whether a file that is not scanned is in the folder, even when only one file is
        asked for.
        """
        return PurePosixPath(name) in self.strays or name in self.unscanned

    @property
    def plain_subfolders(self) -> Iterator[PurePosixPath]:
        """The sub-folders that no library uses for states."""
        return (path for path, kind in self.subfolders.items() if kind == PLAIN_FOLDER)

    @property
    def instead(self) -> str:
        """Other files of a folder that holds no checkpoint, in words."""
        return f"only {list_names(map(str, self.strays))}" if self.strays else "the folder is empty"

    @property
    def is_save_state(self) -> bool:
        """Return whether ``save_state`` wrote it: it always leaves the RNG state of every rank."""
        return any(name.is_of_save_state for name in self.file_names)

    @property
    def processes(self) -> int | None:
        """The number of processes of the saving run, by the random states in the folder; None
        without any. A missing state proves nothing: the highest rank counts.
        """
        return max(self.ranks) + 1 if self.ranks else None

    def entries(self, role: Role) -> tuple[tuple[Component, ...], ...]:
        """Return the lists of numbered entries of a role, one a family, each ordered by position.

        Models in two formats are one list, unless both formats have one of the positions.
        """
        found: dict[tuple[Role, str, str], list[Component]] = {}
        for component in self.components:
            if component.role is role and component.name.is_numbered:
                found.setdefault(component.name.family, []).append(component)
        formats = [family for family in found if family[1:] in FORMATS_OF_MODELS]
        positions = [entry.name.index for family in formats for entry in found[family]]
        if len(formats) == 2 and len(positions) == len(set(positions)):
            found[formats[0]] += found.pop(formats[1])
        return tuple(
            tuple(sorted(entries, key=lambda entry: entry.name.index)) for entries in found.values()
        )


Content = SafetensorsFile | TorchFile | WeightsIndex


def scan_folder(
    root: AnyPath,
    only: str | None = None,
    *,
    wanted: Callable[[FileName], bool] = lambda name: True,
) -> CheckpointFolder:
    """Scan the folder ``root``, or just the file ``only`` in it.

    ``wanted``: selects files by name; others are neither opened nor returned. Raises OSError when
    the folder itself cannot be listed; an unreadable file becomes a component with a problem.
    """
    components, strays, subfolders, unscanned = [], [], {}, []
    ranks: set[int] = set()
    with folder_entries(root) as listing, paused_gc():
        for entry in sorted(listing, key=lambda entry: entry.name):
            path, name = PurePosixPath(entry.name), parse_file_name(entry.name)
            if name is not None and name.rank is not None and name.role in OF_ONE_RANK:
                ranks.add(name.rank)
            if entry.name == JOURNAL:
                continue
            if only is not None and entry.name != only:
                unscanned.append(entry.name)
                continue
            if name is not None and not wanted(name):
                continue
            # And not entry.is_dir(), which raises for a link that leads to itself.
            if is_dir(root / entry.name):
                subfolders[path] = describe_folder_name(entry.name) or PLAIN_FOLDER
            elif name is not None or only is not None:
                components.append(scan_file(root, path, name or _unknown(entry.name)))
            else:
                strays.append(path)
    return CheckpointFolder(
        root=root,
        only=only,
        components=tuple(components),
        strays=tuple(strays),
        subfolders=subfolders,
        ranks=frozenset(ranks),
        unscanned=tuple(unscanned),
    )


def scan_file(root: AnyPath, path: PurePosixPath, name: FileName) -> Component:
    """Read a file of a folder as one of this name, whatever its own is; a problem says why it
    cannot be read.
    """
    full = root / path
    content: Content | None = None
    problem: Problem | None = None
    status: os.stat_result | None = None
    is_link = False
    try:
        is_link = full.is_symlink()
        status = stat_of(full)
        content, problem = _read(full, status, name)
    except OSError as error:
        problem = Problem(kind=ProblemKind.UNREADABLE, message=unreadable(full, error))
        if is_link and (lost := leads_nowhere(full)):
            # As in the cache of the hub.
            problem = replace(problem, kind=ProblemKind.NOT_A_TENSOR_FILE, message=lost)
    try:
        tensors, scopes = _names(content)
    except FormatError as error:  # dicts are looked into here alone
        content, tensors, scopes = None, (), ()
        problem = Problem(
            kind=ProblemKind.MALFORMED, message=str(error), have=status.st_size if status else 0
        )
    return Component(
        path=path,
        name=name,
        size=status.st_size if status else 0,
        fingerprint=FileIdentity.of(status) if status else ABSENT,
        is_linked=is_link or (status is not None and status.st_nlink > 1),
        content=content,
        tensors=tensors,
        scopes=scopes,
        problem=problem,
    )


def _read(
    full: AnyPath, status: os.stat_result, name: FileName
) -> tuple[Content | None, Problem | None]:
    if not stat.S_ISREG(status.st_mode):
        return None, Problem(kind=ProblemKind.NOT_A_TENSOR_FILE, message="not a regular file")
    with open_reader(full) as reader:
        try:
            return _parser(name)(reader), None
        except ListsPaths as error:
            return _located(full.parent, name, error.index)
        except TruncatedError as error:
            have, need, in_header = error.have, error.need, error.in_header
            kind = ProblemKind.TRUNCATED
            problem = Problem(
                kind=kind, message=str(error), have=have, need=need, in_header=in_header
            )
        except UnsupportedFormat as error:
            is_limit = isinstance(error, BeyondLimits)
            # torch.load(weights_only=True) refuses it.
            is_refused = isinstance(error, OtherArchive) and not name.is_of_script
            kind = ProblemKind.NOT_A_TENSOR_FILE if is_refused else ProblemKind.UNSUPPORTED
            problem = Problem(kind=kind, message=str(error), have=reader.size, is_limit=is_limit)
        except FormatError as error:
            problem = Problem(kind=ProblemKind.MALFORMED, message=str(error), have=reader.size)
        return None, _judged(reader, name, problem)


_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def _is_lost(folder: AnyPath, path: str) -> bool:
    """Return whether no file is at a path from a folder; False where that cannot be found out, as
    next to a prefix that was opened, or in a folder of another user.
    """
    there = folder / path
    if not is_listed(there):
        return False
    try:
        return not stat.S_ISREG(stat_of(there).st_mode)
    except OSError as error:
        return error.errno in _NOT_THERE
    except ValueError:  # a zero byte
        return True


def _located(
    folder: AnyPath, name: FileName, index: WeightsIndex
) -> tuple[Content | None, Problem | None]:
    """Return an index that lists paths with file names in their place, where all of them lead to
    files in the folder.

    Else its problem: unknown where all files exist, because files of other folders are not read,
    and malformed where one does not. transformers and accelerate join the folder and the path.
    diffusers refuses a path in its own index (0.42, ``hub_utils.py``), and one that leads to a file
    in the folder has a finding of its own.
    """
    paths = sorted(set(index.weight_map.values()))
    here = {where for where in set(map(os.path.dirname, paths)) if _is_same(folder, folder / where)}
    elsewhere = [path for path in paths if os.path.dirname(path) not in here]
    if not elsewhere:
        names = {key: os.path.basename(path) for key, path in index.weight_map.items()}
        spelled = tuple(path for path in paths if "/" in path)
        return replace(index, weight_map=names, spelled=spelled), None
    lost = [path for path in paths if _is_lost(folder, path)]
    if lost:
        more = (
            f" and {count_of(len(lost) - 1, 'more shard')}, which do"
            if lost[1:]
            else ", which does"
        )
        return None, Problem(
            kind=ProblemKind.MALFORMED, message=f"it lists {lost[0]!r}{more} not exist"
        )
    folders = sorted({str(PurePosixPath(path).parent) for path in elsewhere})
    is_below = not any(
        where.startswith("/") or ".." in PurePosixPath(where).parts for where in folders
    )
    words = (
        f"it lists {count_of(len(elsewhere), 'shard')} in "
        f"{'a sub-folder' if is_below else 'another folder'}"
    )
    words = f"{words} ({list_names(folders)})"
    if name.model is not None and name.model.stem == "diffusion_pytorch_model":
        return None, Problem(
            kind=ProblemKind.MALFORMED, message=f"{words}, which diffusers refuses to load"
        )
    message = (
        f"{words}: ckptfix does not read these shards, but transformers and accelerate load them"
    )
    return None, Problem(kind=ProblemKind.UNREADABLE, message=message, is_elsewhere=True)


def _is_same(folder: AnyPath, where: AnyPath) -> bool:
    try:
        # And not by os.path.realpath, to which absent/.. is the folder; opening a file by such a
        # path fails.
        return same_place(folder, where)
    except OSError:
        return False


def _parser(name: FileName) -> Callable[[FileReader], Content]:
    if name.role is Role.WEIGHTS_INDEX:
        return _read_index
    return read_safetensors if name.suffix == ".safetensors" else read_torch_file


def _read_index(reader: FileReader) -> WeightsIndex:
    if reader.size > MAX_INDEX:
        raise FormatError(f"the index is too large: {reader.size} bytes (limit: {MAX_INDEX})")
    return parse_index(reader.read(0, reader.size))


def _judged(reader: FileReader, name: FileName, problem: Problem) -> Problem:
    """Distinguish a broken file of the right kind from a file of another kind.

    A script may name a file of another program freely; under a name that a loader reads, it counts
    as damage.
    """
    if problem.kind in (ProblemKind.UNSUPPORTED, ProblemKind.NOT_A_TENSOR_FILE):
        return problem
    head = reader.read(0, min(16, reader.size))
    wants_safetensors = name.suffix == ".safetensors"
    is_scripts_own = name.is_of_script and not wants_safetensors
    # A name without a suffix that is known was asked for: a check of the folder passes such a file.
    words = other_format(reader) if is_scripts_own else None
    if words is None and is_scripts_own and not name.suffix:
        words = text_format(reader)
    if words is not None:
        message = f"{words}, not a format that ckptfix reads"
        return replace(problem, kind=ProblemKind.UNSUPPORTED, message=message, is_foreign=True)
    words = describe_content(reader, json=name.role is not Role.WEIGHTS_INDEX)
    # Raw numbers often begin with zeros; in a file of torch they are a lost block.
    has_lost_start = name.suffix != ".bin" and not any(head)
    is_of_other = is_scripts_own and name.suffix and not (has_lost_start or may_be_of_torch(reader))
    if is_of_other and words is None:
        # Many programs write such names: tokens in ``train.bin``, weights of OpenVINO and of
        # mindspore.
        message = "not a torch file, and no library looks for this name"
        return replace(problem, kind=ProblemKind.UNSUPPORTED, message=message, is_foreign=True)
    if words == "a zip archive":
        words = "a torch zip file" if wants_safetensors else None
    elif looks_like_safetensors(head):
        words = None if wants_safetensors else "a safetensors file"
    elif words is None and wants_safetensors:
        words = f"not a safetensors file: {problem.message}"
    elif words is None and name.role is not Role.WEIGHTS_INDEX and head[:1] != b"\x80":
        words = "not a torch file: it is neither a zip archive nor a pickle"
    return (
        problem
        if words is None
        else replace(problem, kind=ProblemKind.NOT_A_TENSOR_FILE, message=words)
    )


def _names(content: Content | None) -> tuple[tuple[TensorInfo, ...], tuple[NameScope, ...]]:
    if isinstance(content, SafetensorsFile):
        names = tuple(tensor.fqn for tensor in content.tensors)
        return content.tensors, (
            NameScope((), "state dict", names, common_wrappers(names), is_model=True),
        )
    if isinstance(content, TorchFile):
        scopes = tuple(
            NameScope(names.path, names.kind, fqns, common_wrappers(fqns), names.is_model)
            for names in name_lists(content.tree)
            if names.kind != "metadata"  # belongs to the state dict of the same path and follows it
            for fqns in (tuple(fqn for fqn, _ in names.names),)
        )
        return tensor_infos(content), scopes
    return (), ()


def _unknown(file_name: str) -> FileName:
    return FileName(role=Role.UNKNOWN, stem=file_name, suffix="")
