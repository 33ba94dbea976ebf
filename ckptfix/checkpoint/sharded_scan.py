"""Read the DCP folders of a checkpoint: metadata and small items, no tensor bytes, nothing unpickled.

A folder that is damaged becomes a value with a problem, as a file does; none stops the scan.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.filenames import parse_folder_name
from ckptfix.checkpoint.folder import CheckpointFolder, Fingerprint, NameScope, Problem, ProblemKind
from ckptfix.checkpoint.keys import common_wrappers, dotted
from ckptfix.checkpoint.sharded import NamesInItem, ShardedState, ShardFile, belongs, holds_dcp
from ckptfix.errors import FormatError, JournalError, TruncatedError, UnsupportedFormat
from ckptfix.formats.dcp_bytes import listed_names, read_item
from ckptfix.formats.dcp_metadata import (
    MAX_METADATA,
    METADATA_NAME,
    DcpMetadata,
    StoredItem,
    read_dcp_metadata,
)
from ckptfix.formats.dcp_names import GROUPS_KEY, STATE_KEY, flattened_keys, model_names
from ckptfix.formats.dcp_rewrite import Steps, paths_of
from ckptfix.formats.pickle_globals import GlobalSafety, classify
from ckptfix.formats.pickle_stream import parse, paused_gc
from ckptfix.formats.pickle_tree import PickleTree
from ckptfix.formats.sniff import describe_content
from ckptfix.storage.paths import JOURNAL
from ckptfix.storage.reading import FileReader, open_reader
from ckptfix.storage.transaction import journal_folders

_EXTRA_STATE = "_extra_state"
"""The last segment of what ``Module.get_extra_state`` gives, any object, in a state dict."""

_NAME_KEYS = frozenset({"params", "param_names"})
"""Keys of a parameter group whose value is a list of names."""


@paused_gc()
def scan_sharded(folder: CheckpointFolder) -> tuple[ShardedState, ...]:
    """Return every DCP folder of a scanned checkpoint: headers and small items are read, nothing is unpickled."""
    if folder.only is not None:
        return ()
    paths = (PurePosixPath("."), *sorted(folder.subfolders))
    return tuple(_scan(folder.root, path) for path in paths if holds_dcp(folder.root / path))


def _scan(root: Path, path: PurePosixPath) -> ShardedState:
    files = dict(_files(root, path))
    is_linked = os.path.islink(root / path)
    name = parse_folder_name(path.name) if path.parts else None
    metadata: DcpMetadata | None = None
    problem: Problem | None = None
    unsafe: dict[PurePosixPath, tuple[str, ...]] = {}
    where = path / METADATA_NAME
    if where in files:
        metadata, problem, found = _read_metadata(root / where)
        if found:
            unsafe[where] = found
    elif os.path.lexists(root / where):
        problem = Problem(kind=ProblemKind.NOT_A_TENSOR_FILE, message="no regular file")
    if metadata is None:
        return ShardedState(
            path=path, name=name, is_linked=is_linked, files=files, problem=problem, unsafe=unsafe
        )
    for named in metadata.files:  # those in folders below it, too
        if path / named not in files and (file := _file(root / path / named)) is not None:
            files[path / named] = file
    items = _Items(root, path, metadata, files)
    return ShardedState(
        path=path,
        name=name,
        is_linked=is_linked,
        files=files,
        metadata=metadata,
        scopes=(*_scopes(metadata), *items.scopes),
        listed=items.listed,
        unsafe=unsafe | {file: tuple(dict.fromkeys(names)) for file, names in items.unsafe.items()},
        unread=items.unread,
        said=frozenset(items.said),
        siblings=_siblings(root) if not path.parts else (),
        journals=bool(path.parts) and _has_journal(root / path),
        broken=items.broken,
    )


def _siblings(folder: Path) -> tuple[str, ...]:
    """Return the DCP folders beside one when all are called as Accelerate calls those of one checkpoint."""
    real = Path(os.path.realpath(folder))
    if parse_folder_name(real.name) is None:
        return ()
    try:
        names = sorted(os.listdir(real.parent))
    except OSError:
        return ()
    return tuple(
        name
        for name in names
        if name != real.name and parse_folder_name(name) is not None and holds_dcp(real.parent / name)
    )


def _has_journal(folder: Path) -> bool:
    try:
        return bool(journal_folders(folder))
    except (JournalError, OSError):
        return True  # what is there is not known


def _files(root: Path, path: PurePosixPath) -> Iterator[tuple[PurePosixPath, ShardFile]]:
    with os.scandir(root / path) as listing:
        names = sorted(entry.name for entry in listing)
    for name in names:
        if (
            name != JOURNAL
            and (path.parts or belongs(name))
            and (file := _file(root / path / name)) is not None
        ):
            yield path / name, file


def _file(full: Path) -> ShardFile | None:
    try:
        status = os.stat(full)
        is_link = os.path.islink(full)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return ShardFile(
        Fingerprint(status.st_size, status.st_mtime_ns, status.st_ino), is_link or status.st_nlink > 1
    )


def _read_metadata(full: Path) -> tuple[DcpMetadata | None, Problem | None, tuple[str, ...]]:
    """Return what a ``.metadata`` says, or why it cannot be used, and what it would run when torch unpickles it."""
    try:
        with open_reader(full) as reader:
            try:
                metadata = read_dcp_metadata(reader)
            except FormatError as error:
                return None, _problem(reader, error), _unsafe_bytes(reader)
    except OSError as error:
        return None, Problem(kind=ProblemKind.UNREADABLE, message=error.strerror or str(error)), ()
    return metadata, None, _unsafe(metadata.tree)


def _problem(reader: FileReader, error: FormatError) -> Problem:
    words = describe_content(reader, json=True)
    if words is not None:
        return Problem(kind=ProblemKind.NOT_A_TENSOR_FILE, message=words, have=reader.size)
    if isinstance(error, TruncatedError):
        return Problem(kind=ProblemKind.TRUNCATED, message=str(error), have=error.have, need=error.need)
    kind = ProblemKind.UNSUPPORTED if isinstance(error, UnsupportedFormat) else ProblemKind.MALFORMED
    return Problem(kind=kind, message=str(error), have=reader.size)


def _unsafe_bytes(reader: FileReader) -> tuple[str, ...]:
    """Look for what could run code in a pickle that is no metadata: torch would unpickle it all the same."""
    try:
        return _unsafe(parse(reader.read(0, reader.size))) if reader.size <= MAX_METADATA else ()
    except FormatError:
        return ()


def _unsafe(tree: PickleTree) -> tuple[str, ...]:
    return tuple(
        f"{module}.{name}" for module, name in tree.globals if classify(module, name) is GlobalSafety.UNSAFE
    )


def _scopes(metadata: DcpMetadata) -> Iterator[NameScope]:
    """Yield the places of names in the metadata: each dict of tensors, and the state of each optimizer."""
    paths = paths_of(metadata)
    optimizers = optimizers_in(paths.values())
    yield from _state_dicts(metadata, paths, optimizers)
    for prefix in optimizers:
        depth = len(prefix) + 1
        below = (
            path for path in paths.values() if len(path) > depth and path[:depth] == (*prefix, STATE_KEY)
        )
        yield _scope((*prefix, STATE_KEY), "optimizer state", (path[depth] for path in below))


def _state_dicts(
    metadata: DcpMetadata, paths: Mapping[str, Steps], optimizers: Iterable[Steps]
) -> Iterator[NameScope]:
    """Yield every dict with tensors in it that is no optimizer's, the model first.

    Tensors tell the wrappers, and the state of modules. Any other object beside them, such as a number of steps, is
    a name of the model only with the same wrappers: a script may put its own keys between those of a model.
    """
    model = model_names(metadata)
    own = {(*prefix, key) for prefix in optimizers for key in (STATE_KEY, GROUPS_KEY)}
    tensors: dict[Steps, list[str]] = {}
    others: dict[Steps, list[str]] = {}
    for fqns, found in (
        ([one.fqn for one in metadata.tensors], tensors),
        ([one.fqn for one in metadata.items], others),
    ):
        for fqn in fqns:
            path = paths[fqn]
            step = path[-1] if path else None
            if isinstance(step, str) and not any(path[:depth] in own for depth in range(1, len(path) + 1)):
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
            yield _scope(prefix, "state dict", names, is_model=prefix == first)


def _scope(prefix: Steps, kind: str, steps: Iterable[str | int], *, is_model: bool = False) -> NameScope:
    names = tuple(dict.fromkeys(step for step in steps if type(step) is str))
    if kind != "state dict" and all(map(str.isdecimal, names)):
        names = ()  # the numbers of Optimizer.state_dict(), which DCP makes strings of
    return NameScope(tuple(map(str, prefix)), kind, names, common_wrappers(names), is_model)


def optimizers_in(paths: Iterable[Steps]) -> tuple[Steps, ...]:
    """Return the keys that lead to each state dict of an optimizer: where nothing but its two keys is."""
    every = list(paths)
    found: dict[Steps, None] = {}
    for path in every:
        depth = next(
            (number for number, step in enumerate(path[:-1]) if step in (STATE_KEY, GROUPS_KEY)), None
        )
        if depth is not None:
            found[path[:depth]] = None
    if not found:
        return ()
    others = {
        path[:depth]
        for path in every
        for depth in range(len(path))
        if path[:depth] in found and path[depth] not in (STATE_KEY, GROUPS_KEY)
    }
    return tuple(prefix for prefix in found if prefix not in others)


class _Items:
    """What the bytes items say: the names in them, and what they would run."""

    def __init__(
        self, root: Path, path: PurePosixPath, metadata: DcpMetadata, files: Mapping[PurePosixPath, ShardFile]
    ) -> None:
        self.scopes: list[NameScope] = []
        self.listed: dict[tuple[tuple[str, ...], str], NamesInItem] = {}
        self.unsafe: dict[PurePosixPath, list[str]] = {}
        self.unread: dict[str, str] = {}
        self.broken: dict[PurePosixPath, str] = {}
        self.said: set[str] = set()
        self._paths = paths_of(metadata)
        self._optimizers = optimizers_in(self._paths.values())
        by_file: dict[PurePosixPath, list[StoredItem]] = {}
        for one in metadata.items:
            item = metadata.stored.get((one.fqn, None))
            if item is not None and path / item.path in files:
                by_file.setdefault(item.path, []).append(item)
            elif self._may_hold_names(one.fqn):
                self.unread[one.fqn] = "the file that holds it is missing"
        for file, items in by_file.items():
            try:
                with open_reader(root / path / file) as reader:
                    left = reader.size
                    for item in items:
                        left -= item.length
                        if left < 0 and item.offset + item.length <= reader.size:
                            # No writer does that; and a few bytes could make a scan read terabytes.
                            self.broken[path / file] = (
                                f"its items lie over each other, {item.fqn!r:.200} among them"
                            )
                            break
                        self._read(reader, path / file, item)
            except OSError as error:
                why = error.strerror or str(error)
                self.unread |= {one.fqn: why for one in items if self._may_hold_names(one.fqn)}
                self.broken[path / file] = f"it cannot be read: {why}"

    def _read(self, reader: FileReader, file: PurePosixPath, item: StoredItem) -> None:
        try:
            found = read_item(reader, item)
        except FormatError as error:
            if self._may_hold_names(item.fqn):
                self.unread[item.fqn] = str(error)
            if not isinstance(error, UnsupportedFormat) and item.offset + item.length <= reader.size:
                self.broken[file] = f"the item {item.fqn!r:.200} at byte {item.offset}: {error}"
            return
        if names := _unsafe(found.tree):
            self.unsafe.setdefault(file, []).extend(names)
        kind = self._names_kind(item.fqn)
        texts = listed_names(found) if kind is not None else None
        if kind is None or texts is None:
            self.said.update(text.value for text in found.tree.texts)
            return
        scope = _scope(self._paths[item.fqn][:-1], kind, (text.value for text in texts))
        self.scopes.append(scope)
        self.listed[scope.path, kind] = NamesInItem(
            item.fqn, tuple((text.site, text.value) for text in texts)
        )

    def _may_hold_names(self, fqn: str) -> bool:
        """Whether an item is of the groups of parameters of an optimizer, or all of them in one."""
        begin = f"{GROUPS_KEY}."
        return any(step == GROUPS_KEY or str(step).startswith(begin) for step in self._paths[fqn])

    def _names_kind(self, fqn: str) -> str | None:
        """Return "params" or "param_names" for an item that lists the names of a group of parameters."""
        path = self._paths[fqn]
        if len(path) < 3 or path[-1] not in _NAME_KEYS or path[-3] != GROUPS_KEY:
            return None
        return str(path[-1]) if path[:-3] in self._optimizers else None
