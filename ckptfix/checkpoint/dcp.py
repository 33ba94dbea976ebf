"""DCP folders: their ``.metadata``, their files, and the places where keys of parameters appear.

Accelerate's FSDP saves ``pytorch_model_fsdp_<i>/`` and ``optimizer_<i>/`` (``utils/fsdp_utils.py``,
1.0 to 1.15) by ``torch.distributed.checkpoint``. Any other folder that holds such files counts as
well, the checkpoint itself too. Headers and small items are read, no tensor bytes; nothing is
unpickled. A damaged folder becomes a value with a problem, as a file does, and does not stop the
scan.
"""

import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from msgspec import Struct, field

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.folder import CheckpointFolder, NameScope, Problem, ProblemKind
from ckptfix.checkpoint.folder_names import FolderName, parse_folder_name
from ckptfix.checkpoint.keys import (
    KeyMap,
    common_wrappers,
    dotted,
    leading_wrappers,
    without_private_wrappers,
)
from ckptfix.checkpoint.rank_names import DcpPart, parse_dcp_name
from ckptfix.checkpoint.roles import Role
from ckptfix.errors import (
    BeyondLimits,
    FormatError,
    JournalError,
    TruncatedError,
    UnsupportedFormat,
)
from ckptfix.formats.dcp_items import NAME_KEYS, grouped_names, listed_names, read_item
from ckptfix.formats.dcp_metadata import (
    GROUPS_KEY,
    MAX_METADATA,
    METADATA_NAME,
    STATE_KEY,
    DcpMetadata,
    DcpTensor,
    flattened_keys,
    flattened_names,
    flattened_parts,
    model_names,
    read_dcp_metadata,
)
from ckptfix.formats.dcp_rewrite import Steps, paths_of
from ckptfix.formats.dcp_stream import StoredItem
from ckptfix.formats.pickle_globals import GlobalSafety, classify, unsafe_globals
from ckptfix.formats.pickle_stream import parse, paused_gc
from ckptfix.formats.pickle_tree import PickleTree, Text
from ckptfix.formats.sniff import describe_content
from ckptfix.formats.torch_file import TorchFile
from ckptfix.storage.files import (
    AnyPath,
    FileReader,
    folder_entries,
    is_file,
    is_listed,
    is_symlink,
    lexists,
    names_in,
    real_path,
    stat_of,
)
from ckptfix.storage.journal import transactions
from ckptfix.storage.paths import JOURNAL, unreadable
from ckptfix.storage.reading import FileIdentity, open_reader
from ckptfix.wording import Brief

METADATA_UNFINISHED = DcpPart.UNFINISHED_METADATA.value
"""Name of the file that torch writes when all data is on disk, and renames to ``.metadata``."""

DATA_SUFFIX = DcpPart.DATA.value


class ShardFile(NamedTuple):
    """A file of a DCP folder. ``is_linked``: reached through a link, or one of several hard
    links.
    """

    fingerprint: FileIdentity
    is_linked: bool

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.fingerprint.size


class NamesInItem(NamedTuple):
    """Keys that a bytes item contains as values: DCP's name of the item, and the site (``Text``)
    and value of each key.
    """

    fqn: str
    names: tuple[tuple[int, str], ...]


class DcpFolder(Brief, Struct, frozen=True, kw_only=True, eq=False):
    """One DCP folder. ``path`` is relative to the checkpoint; ``.`` is the checkpoint itself.

    ``name``: its number and role when it has a name of Accelerate's. ``metadata``: None when it is
    missing or cannot be read (``problem``). ``files``: all regular files, by path from the
    checkpoint. ``scopes``: the dicts and lists that contain keys of parameters; the path of a scope
    leads there in the saved state dict. ``listed``: the scopes that are a bytes item, by path and
    kind. ``unsafe``: file -> what its pickles can run. ``unread``: the bytes items that could not
    be read, each of which may contain keys, and why. ``said``: all other strings in the readable
    bytes items. ``broken``: file -> what is wrong with an item in it, ``unreadable``: file -> why
    it may not be read. ``siblings``: the DCP folders next to the checkpoint when it is one folder
    of Accelerate's itself. ``journals``: it has its own journal, of repairs of this folder alone.
    """

    path: PurePosixPath
    name: FolderName | None
    is_linked: bool
    files: Mapping[PurePosixPath, ShardFile]
    metadata: DcpMetadata | None = None
    problem: Problem | None = None
    scopes: tuple[NameScope, ...] = ()
    listed: Mapping[tuple[tuple[str, ...], str], NamesInItem] = field(default_factory=dict)
    unsafe: Mapping[PurePosixPath, tuple[str, ...]] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    said: frozenset[str] = frozenset()
    siblings: tuple[str, ...] = ()
    journals: bool = False
    broken: Mapping[PurePosixPath, str] = field(default_factory=dict)
    unreadable: Mapping[PurePosixPath, str] = field(default_factory=dict)

    @property
    def metadata_path(self) -> PurePosixPath:
        """The path at which its ``.metadata`` is, or should be."""
        return self.path / METADATA_NAME

    @property
    def size(self) -> int:
        """The bytes of all its files."""
        return sum(file.size for file in self.files.values())

    @property
    def model(self) -> NameScope | None:
        """The scope of the model's keys, None where no model is saved."""
        return next((scope for scope in self.scopes if scope.is_model), None)

    @property
    def tensors(self) -> tuple[DcpTensor, ...]:
        """The tensors that ``.metadata`` lists."""
        return tuple(self.metadata.tensors) if self.metadata is not None else ()

    @property
    def chain(self) -> tuple[str, ...]:
        """The wrappers of all keys of the model, () without a model."""
        return self.model.chain if self.model is not None else ()

    @property
    def own_ranks(self) -> tuple[PurePosixPath, ...]:
        """The metadata files of single ranks, as a save without collectives leaves them."""
        return tuple(
            path
            for path in self.files
            if path.name.endswith(METADATA_NAME) and path.name != METADATA_NAME
        )

    @property
    def named(self) -> tuple[PurePosixPath, ...]:
        """The files that ``.metadata`` lists, relative to the checkpoint."""
        return tuple(self.path / path for path in self.metadata.files) if self.metadata else ()

    @property
    def data(self) -> tuple[PurePosixPath, ...]:
        """The existing data files, listed in ``.metadata`` or not."""
        return tuple(path for path in self.files if path.name.endswith(DATA_SUFFIX))


@paused_gc()
def scan_dcp_folders(folder: CheckpointFolder) -> tuple[DcpFolder, ...]:
    """Return every DCP folder of a scanned checkpoint: headers and small items are read, nothing is
    unpickled.
    """
    if folder.only is not None:
        return ()
    paths = (PurePosixPath("."), *sorted(folder.subfolders))
    return tuple(_scan(folder.root, path) for path in paths if holds_dcp(folder.root / path))


class NumberedFolder(NamedTuple):
    """A DCP folder that Accelerate finds by its number."""

    state: DcpFolder
    name: FolderName

    @property
    def path(self) -> PurePosixPath:
        """The path of the entry from the checkpoint."""
        return self.state.path


def numbered_folders(states: Iterable[DcpFolder], role: Role) -> tuple[NumberedFolder, ...]:
    """Return the folders of a role that Accelerate finds by their number, in order."""
    found = [
        NumberedFolder(state, state.name)
        for state in states
        if state.name is not None and state.name.role is role
    ]
    return tuple(sorted(found, key=lambda entry: entry.name.index))


def rank_of(path: PurePosixPath) -> int | None:
    """Return the rank that wrote a data file, by the file's name; None for another kind of name."""
    name = parse_dcp_name(path.name)
    return name.rank if name is not None and name.part is DcpPart.DATA else None


def holds_dcp(folder: AnyPath) -> bool:
    """Return whether a folder holds files of a DCP save. False for one that cannot be listed."""
    try:
        return any(map(belongs, names_in(folder)))
    except OSError:
        return False


def is_empty(folder: AnyPath) -> bool:
    """Return whether a folder is empty, as one whose files were deleted or moved. False when it
    cannot be listed.
    """
    try:
        return not names_in(folder)
    except OSError:
        return False


def belongs(name: str) -> bool:
    """Return whether a DCP save leaves a file of this name."""
    return parse_dcp_name(name) is not None


def is_metadata_renamed(folder: AnyPath) -> bool:
    """Return whether the ``.metadata`` of a folder without one is its file ``metadata``, as some
    download tools store it.
    """
    path = folder / METADATA_NAME.removeprefix(".")
    return is_file(path) and _read_metadata(path)[0] is not None


def lost_metadata(*, unfinished: bool, renamed: bool) -> tuple[str, str]:
    """Return why a folder has no ``.metadata``, and the advice. ``unfinished``: it still has its
    temporary name; ``renamed``: see ``is_metadata_renamed``.
    """
    older = "use an older checkpoint: only .metadata records where each chunk is"
    if unfinished:
        return "the save was interrupted", older
    if renamed:
        return "the file metadata in the folder is this file", "rename metadata to .metadata"
    # torch writes it last. The shell's * passes over names that begin with a dot.
    return (
        "a copy left it out, or the save was interrupted",
        "copy .metadata again from the source, with cp -a SRC/. DST (cp SRC/* DST skips it); if "
        f"the source lacks it, too, {older}",
    )


def is_of_checkpoint(name: str) -> bool:
    """Return whether a save of accelerate, the Trainer or DCP leaves a file of this name."""
    return parse_file_name(name) is not None or belongs(name)


FLATTENED = "flattened optimizer"
"""Kind of a scope whose keys contain the fqn of a parameter: ``state.<fqn>.exp_avg``."""

_OPTIMIZER_KEYS = (STATE_KEY, GROUPS_KEY)

_EXTRA_STATE = "_extra_state"
"""Last segment of the key of a module's extra state (``Module.get_extra_state``), which can be any
object.
"""


OPTIMIZER_STATE = "optimizer state"
"""The kind of a place with the keys of an optimizer's state."""


def name_scopes(metadata: DcpMetadata) -> Iterator[NameScope]:
    """Yield the scopes in the metadata: each dict of tensors, and the state of each optimizer."""
    paths = paths_of(metadata)
    optimizers = optimizers_in(paths.values())
    yield from _state_dicts(metadata, paths, optimizers)
    for prefix in optimizers:
        depth = len(prefix) + 1
        below = (
            path
            for path in paths.values()
            if len(path) > depth and path[:depth] == (*prefix, STATE_KEY)
        )
        yield _name_scope((*prefix, STATE_KEY), OPTIMIZER_STATE, (path[depth] for path in below))
    for prefix, keys in flattened_optimizers(paths.values()).items():
        yield _name_scope(prefix, FLATTENED, flattened_names(keys))


def _unmatched_keys(metadata: DcpMetadata) -> Iterator[tuple[str, str]]:
    """Yield each item of a flattened optimizer whose key contains no fqn of a group: DCP's name,
    and the key.
    """
    paths = paths_of(metadata)
    for prefix, keys in flattened_optimizers(paths.values()).items():
        known = frozenset(flattened_names(keys))
        unmatched = {key for key in keys if flattened_parts(key, known) is None}
        for fqn, path in paths.items() if unmatched else ():
            step = path[len(prefix)] if len(path) > len(prefix) else None
            if isinstance(step, str) and step in unmatched and path[: len(prefix)] == prefix:
                yield fqn, step


def flattened_optimizers(paths: Iterable[Steps]) -> dict[Steps, list[str]]:
    """Return the keys of each flattened optimizer, by the keys that lead to the dict that it
    is in.
    """
    every: dict[Steps, dict[str, None]] = {}
    for path in paths:
        for depth, step in enumerate(path):
            if isinstance(step, str) and "." in step:
                every.setdefault(path[:depth], {})[step] = None
    found = {prefix: flattened_keys(keys) for prefix, keys in every.items()}
    return {
        prefix: [key for key in every[prefix] if key in own] for prefix, own in found.items() if own
    }


def _state_dicts(
    metadata: DcpMetadata, paths: Mapping[str, Steps], optimizers: Iterable[Steps]
) -> Iterator[NameScope]:
    """Yield every dict of tensors outside of optimizers, the model first.

    The keys of tensors and of module states show the wrappers. Any other object next to them, such
    as a step count, belongs to the model only with the same wrappers: a script may put its own keys
    between those of a model.
    """
    model = model_names(metadata)
    own = {(*prefix, key) for prefix in optimizers for key in _OPTIMIZER_KEYS}
    tensors: dict[Steps, list[str]] = {}
    others: dict[Steps, list[str]] = {}
    for fqns, found in (
        ([one.fqn for one in metadata.tensors], tensors),
        ([one.fqn for one in metadata.items], others),
    ):
        for fqn in fqns:
            path = paths[fqn]
            step = path[-1] if path else None
            if isinstance(step, str) and not any(
                path[:depth] in own for depth in range(1, len(path) + 1)
            ):
                found.setdefault(path[:-1], []).append(step)
    first = model.prefix if model is not None else None
    for prefix in sorted(tensors, key=lambda prefix: prefix != first):
        beside = others.get(prefix, [])
        flattened = flattened_keys([*tensors[prefix], *beside])
        names = [name for name in tensors[prefix] if name not in flattened]
        objects = [name for name in beside if name not in flattened]
        names += [name for name in objects if name.rpartition(".")[2] == _EXTRA_STATE]
        begin = dotted(common_wrappers(names))
        names += [name for name in objects if begin and name.startswith(begin)]
        if names:
            yield _name_scope(prefix, "state dict", names, is_model=prefix == first)


def _name_scope(
    prefix: Steps, kind: str, steps: Iterable[str | int], *, is_model: bool = False
) -> NameScope:
    """Return the scope of these keys, each once, without numbers."""
    names = tuple(dict.fromkeys(step for step in steps if type(step) is str))
    if kind != "state dict" and all(map(str.isdecimal, names)):
        names = ()  # the numbers of Optimizer.state_dict(), which DCP makes strings of
    return NameScope(tuple(map(str, prefix)), kind, names, common_wrappers(names), is_model)


def optimizers_in(paths: Iterable[Steps]) -> tuple[Steps, ...]:
    """Return the keys that lead to each optimizer's state dict: a dict with ``state`` and a list of
    param groups.

    Some optimizers have more keys in it, such as a loss scaler. Scripts use the key ``state`` for
    other objects too: a dict of models, the state of a sampler. So without a list of groups next to
    it, ``state`` must be the only key and contain a dict per key, and these keys must be those of a
    model, or look like them.
    """
    every = list(paths)
    found: dict[Steps, list[Steps]] = {}
    for path in every:
        for depth, step in enumerate(path):
            if step == GROUPS_KEY or (step == STATE_KEY and depth < len(path) - 1):
                found[path[:depth]] = []
    for path in every if found else ():
        for depth in range(len(path)):
            if (below := found.get(path[:depth])) is not None:
                below.append(path)
    known = _Leaves(every)
    accepted: dict[Steps, None] = {}
    for prefix in sorted(found, key=len):
        depth, below = len(prefix), found[prefix]
        keys = {path[depth] for path in below}
        if any(prefix[:end] in accepted and prefix[end] in _OPTIMIZER_KEYS for end in range(depth)):
            continue  # in an optimizer this key is the name of a parameter
        if has_groups(below, depth):
            is_optimizer = STATE_KEY in keys or keys == {GROUPS_KEY}
        else:
            is_optimizer = keys == {STATE_KEY} and known.is_state(below, depth + 1)
        if is_optimizer:
            accepted[prefix] = None
    return tuple(prefix for prefix in found if prefix in accepted)


def has_groups(below: Iterable[Steps], depth: int) -> bool:
    """Return whether the dict at ``depth`` has a list of param groups, or one item with all of
    them.
    """
    return any(
        path[depth] == GROUPS_KEY and (len(path) == depth + 1 or type(path[depth + 1]) is int)
        for path in below
    )


class _Leaves:
    """Counts of each item's key, without wrappers, over all dicts."""

    def __init__(self, every: Iterable[Steps]) -> None:
        self._every = every
        self._count: Counter[str] | None = None  # few folders need it

    def is_state(self, state: list[Steps], depth: int) -> bool:
        """Return whether these paths, with the key of a parameter at ``depth``, are an optimizer's,
        without groups.
        """
        if any(len(path) < depth + 2 or path[depth - 1] != STATE_KEY for path in state):
            return False  # a value by itself, as the epoch of a sampler
        names = {str(path[depth]) for path in state}
        if all(map(str.isdecimal, names)):
            return True
        if self._count is None:
            self._count = self._counted(self._every)
        every, own = self._count, self._counted(state)
        if any("." in key and count > own[key] for key, count in every.items()):
            # Of a model next to it.
            return all(every[real] > own[real] for real in map(_real, names))
        return all("." in name for name in names) and all(
            len(path) == depth + 2 and "." not in str(path[-1]) for path in state
        )

    @staticmethod
    def _counted(paths: Iterable[Steps]) -> Counter[str]:
        return Counter(_real(path[-1]) for path in paths if path and isinstance(path[-1], str))


def _real(name: str) -> str:
    """Return a key without wrappers, as far as the key alone shows them."""
    name = without_private_wrappers(name)
    return name[len(dotted(leading_wrappers(name))) :]


def new_paths(
    state: DcpFolder, metadata: DcpMetadata, maps: Mapping[tuple[tuple[str, ...], str], KeyMap]
) -> dict[str, Steps]:
    """Return the paths of items that a rename changes: in each place of keys one step is the key of
    a parameter, or holds one.

    Other keys next to those of a model stay: they belong to the user.
    """
    places = [
        (scope, len(scope.path), _new_steps(scope, maps[scope.path, scope.kind]))
        for scope in state.scopes
        if (scope.path, scope.kind) in maps and (scope.path, scope.kind) not in state.listed
    ]
    found: dict[str, Steps] = {}
    for fqn, path in paths_of(metadata).items():
        for scope, depth, new_step in places:
            step = path[depth] if len(path) > depth else None
            if isinstance(step, str) and tuple(map(str, path[:depth])) == scope.path:
                new = new_step(step)
                if new is not None:
                    if new != step:
                        found[fqn] = (*path[:depth], new, *path[depth + 1 :])
                    break
    return found


def _new_steps(scope: NameScope, key_map: KeyMap) -> Callable[[str], str | None]:
    """Return a function from old to new keys in a scope; it returns None for a key of another
    object.
    """
    names = frozenset(scope.names)

    def of_name(step: str) -> str | None:
        return key_map(step) if step in names else None

    def of_flattened(step: str) -> str | None:
        parts = flattened_parts(step, names)
        return None if parts is None else parts[0] + key_map(parts[1]) + parts[2]

    return of_flattened if scope.kind == FLATTENED else of_name


def _scan(root: AnyPath, path: PurePosixPath) -> DcpFolder:
    files = dict(_files(root, path))
    is_linked = is_symlink(root / path)
    name = parse_folder_name(path.name) if path.parts else None
    metadata: DcpMetadata | None = None
    problem: Problem | None = None
    unsafe: dict[PurePosixPath, tuple[str, ...]] = {}
    where = path / METADATA_NAME
    if where in files:
        metadata, problem, found = _read_metadata(root / where)
        if found:
            unsafe[where] = found
    elif lexists(root / where):
        problem = Problem(kind=ProblemKind.NOT_A_TENSOR_FILE, message="not a regular file")
    if metadata is None:
        return DcpFolder(
            path=path, name=name, is_linked=is_linked, files=files, problem=problem, unsafe=unsafe
        )
    for named in metadata.files:  # those in folders below it, too
        if path / named not in files and (file := _file(root / path / named)) is not None:
            files[path / named] = file
    items = _Items(root, path, metadata, files)
    for fqn, key in _unmatched_keys(metadata):
        items.unread[fqn] = (
            f"{key!r:.200} contains no parameter name from the param groups, so it is not "
            "clear which part of the key is the name"
        )
    return DcpFolder(
        path=path,
        name=name,
        is_linked=is_linked,
        files=files,
        metadata=metadata,
        scopes=(*name_scopes(metadata), *items.scopes),
        listed=items.listed,
        unsafe=unsafe | {file: tuple(dict.fromkeys(names)) for file, names in items.unsafe.items()},
        unread=items.unread,
        said=frozenset(items.said),
        siblings=_siblings(root) if not path.parts else (),
        journals=bool(path.parts) and _has_journal(root / path),
        broken=items.broken,
        unreadable=items.unreadable,
    )


def _siblings(folder: AnyPath) -> tuple[str, ...]:
    """Return the DCP folders next to one when all have Accelerate's names for one checkpoint."""
    real = real_path(folder)
    if parse_folder_name(real.name) is None or not is_listed(real.parent):
        return ()
    try:
        names = sorted(names_in(real.parent))
    except OSError:
        return ()
    return tuple(
        name
        for name in names
        if name != real.name
        and parse_folder_name(name) is not None
        and holds_dcp(real.parent / name)
    )


def _has_journal(folder: AnyPath) -> bool:
    try:
        return bool(transactions(folder))
    except (JournalError, OSError):
        return True  # the contents of the parent folder are unknown


def _files(root: AnyPath, path: PurePosixPath) -> Iterator[tuple[PurePosixPath, ShardFile]]:
    with folder_entries(root / path) as listing:
        names = sorted(entry.name for entry in listing)
    for name in names:
        if (
            name != JOURNAL
            and (path.parts or belongs(name))
            and (file := _file(root / path / name)) is not None
        ):
            yield path / name, file


def _file(full: AnyPath) -> ShardFile | None:
    try:
        status = stat_of(full)
        is_link = is_symlink(full)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return ShardFile(FileIdentity.of(status), is_link or status.st_nlink > 1)


def _read_metadata(full: AnyPath) -> tuple[DcpMetadata | None, Problem | None, tuple[str, ...]]:
    """Return the contents of a ``.metadata``, or why it is unusable, and the code that torch's
    unpickling would run.
    """
    try:
        with open_reader(full) as reader:
            try:
                metadata = read_dcp_metadata(reader)
            except FormatError as error:
                return None, _problem(reader, error), _unsafe_bytes(reader)
    except OSError as error:
        return None, Problem(kind=ProblemKind.UNREADABLE, message=unreadable(full, error)), ()
    return metadata, None, _unsafe(metadata.tree)


def _problem(reader: FileReader, error: FormatError) -> Problem:
    words = describe_content(reader, json=True)
    if words is not None:
        return Problem(kind=ProblemKind.NOT_A_TENSOR_FILE, message=words, have=reader.size)
    if isinstance(error, TruncatedError):
        return Problem(
            kind=ProblemKind.TRUNCATED, message=str(error), have=error.have, need=error.need
        )
    kind = (
        ProblemKind.UNSUPPORTED if isinstance(error, UnsupportedFormat) else ProblemKind.MALFORMED
    )
    is_limit = isinstance(error, BeyondLimits)
    return Problem(kind=kind, message=str(error), have=reader.size, is_limit=is_limit)


def _unsafe_bytes(reader: FileReader) -> tuple[str, ...]:
    """Find code that a pickle other than DCP metadata could run: torch would unpickle it all the
    same.
    """
    try:
        return _unsafe(parse(reader.read(0, reader.size))) if reader.size <= MAX_METADATA else ()
    except FormatError:
        return ()


def _unsafe(tree: PickleTree) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for module, name in unsafe_globals(tree))


class _Items:
    """Contents of the bytes items: their keys, and the code that they would run."""

    def __init__(
        self,
        root: AnyPath,
        path: PurePosixPath,
        metadata: DcpMetadata,
        files: Mapping[PurePosixPath, ShardFile],
    ) -> None:
        self.scopes: list[NameScope] = []
        self.listed: dict[tuple[tuple[str, ...], str], NamesInItem] = {}
        self.unsafe: dict[PurePosixPath, list[str]] = {}
        self.unread: dict[str, str] = {}
        self.broken: dict[PurePosixPath, str] = {}
        self.unreadable: dict[PurePosixPath, str] = {}
        self.said: set[str] = set()
        self._paths = paths_of(metadata)
        self._optimizers = optimizers_in(self._paths.values())
        by_file: dict[PurePosixPath, list[StoredItem]] = {}
        for one in metadata.items:
            item = metadata.stored.get((one.fqn, None))
            if item is not None and path / item.path in files:
                by_file.setdefault(item.path, []).append(item)
            elif item is None:
                self.unread[one.fqn] = "the metadata has no storage location"
            else:
                self.unread[one.fqn] = "the file is missing"
        for file, items in by_file.items():
            try:
                with open_reader(root / path / file) as reader:
                    left = reader.size
                    for number, item in enumerate(items):
                        left -= item.length
                        if left < 0 and item.offset + item.length <= reader.size:
                            # No writer does that; and a few bytes could make a scan read terabytes.
                            self.broken[path / file] = (
                                f"its items overlap, such as {item.fqn!r:.200}"
                            )
                            why = "items overlap at or before this place in the file"
                            self.unread |= dict.fromkeys((one.fqn for one in items[number:]), why)
                            break
                        self._read(reader, path / file, item)
            except OSError as error:
                self.unread |= {one.fqn: error.strerror or str(error) for one in items}
                self.unreadable[path / file] = unreadable(root / path / file, error)

    def _read(self, reader: FileReader, file: PurePosixPath, item: StoredItem) -> None:
        try:
            found = read_item(reader, item)
        except FormatError as error:
            self.unread[item.fqn] = str(error)  # under any name: every object may contain keys
            if (
                not isinstance(error, UnsupportedFormat)
                and item.offset + item.length <= reader.size
            ):
                self.broken[file] = f"item {item.fqn!r:.200} at byte {item.offset}: {error}"
            return
        if names := _unsafe(found.tree):
            self.unsafe.setdefault(file, []).extend(names)
        listed = self._lists(item.fqn, found)
        taken = {text.site for _, _, texts in listed for text in texts}
        self.said.update(text.value for text in found.tree.texts if text.site not in taken)
        unknown = [
            ".".join(pair)
            for pair in found.tree.globals
            if classify(*pair) is not GlobalSafety.SAFE
        ]
        if listed and unknown:
            # What such an object does with the keys in it is unknown without running it.
            self.unread[item.fqn] = (
                f"the pickle creates an object of class {unknown[0]:.200}, and ckptfix never runs "
                "pickles"
            )
        for path, kind, texts in listed:
            scope = _name_scope(path, kind, (text.value for text in texts))
            self.scopes.append(scope)
            self.listed[scope.path, kind] = NamesInItem(
                item.fqn, tuple((text.site, text.value) for text in texts)
            )

    def _lists(self, fqn: str, file: TorchFile) -> list[tuple[Steps, str, tuple[Text, ...]]]:
        """Return the lists of keys in an item: the path to each list, its kind, and the keys."""
        path = self._paths[fqn]
        kind = self._names_kind(fqn)
        if kind is not None:
            texts = listed_names(file)
            return [] if texts is None else [(path[:-1], kind, texts)]
        if not path or GROUPS_KEY in path[:-1]:
            return []
        whole = path if path[-1] == GROUPS_KEY else (*path, GROUPS_KEY)
        return [(whole, kind, texts) for kind, texts in grouped_names(file).items()]

    def _names_kind(self, fqn: str) -> str | None:
        """Return "params" or "param_names" for an item that lists the keys of a parameter group."""
        path = self._paths[fqn]
        if len(path) < 3 or path[-1] not in NAME_KEYS or path[-3] != GROUPS_KEY:
            return None
        return str(path[-1]) if path[:-3] in self._optimizers else None
