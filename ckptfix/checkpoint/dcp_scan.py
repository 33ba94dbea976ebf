"""Read the DCP folders of a checkpoint: metadata and small items, no tensor bytes, nothing unpickled.

A folder that is damaged becomes a value with a problem, as a file does; none stops the scan.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.dcp import (
    NamesInItem,
    ShardedState,
    ShardFile,
    belongs,
    holds_dcp,
    name_scope,
    name_scopes,
    optimizers_in,
    unmatched_keys,
)
from ckptfix.checkpoint.filenames import parse_folder_name
from ckptfix.checkpoint.folder import CheckpointFolder, Fingerprint, NameScope, Problem, ProblemKind
from ckptfix.errors import BeyondLimits, FormatError, JournalError, TruncatedError, UnsupportedFormat
from ckptfix.formats.dcp_items import NAME_KEYS, grouped_names, listed_names, read_item
from ckptfix.formats.dcp_metadata import MAX_METADATA, METADATA_NAME, DcpMetadata, read_dcp_metadata
from ckptfix.formats.dcp_names import GROUPS_KEY
from ckptfix.formats.dcp_rewrite import Steps, paths_of
from ckptfix.formats.dcp_stream import StoredItem
from ckptfix.formats.pickle_globals import GlobalSafety, classify
from ckptfix.formats.pickle_stream import parse, paused_gc
from ckptfix.formats.pickle_tree import PickleTree, Text
from ckptfix.formats.sniff import describe_content
from ckptfix.formats.torch_file import TorchFile
from ckptfix.storage.paths import JOURNAL, unreadable
from ckptfix.storage.reading import FileReader, open_reader
from ckptfix.storage.transactions import journal_folders


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
        problem = Problem(kind=ProblemKind.NOT_A_TENSOR_FILE, message="not a regular file")
    if metadata is None:
        return ShardedState(
            path=path, name=name, is_linked=is_linked, files=files, problem=problem, unsafe=unsafe
        )
    for named in metadata.files:  # those in folders below it, too
        if path / named not in files and (file := _file(root / path / named)) is not None:
            files[path / named] = file
    items = _Items(root, path, metadata, files)
    for fqn, key in unmatched_keys(metadata):
        items.unread[fqn] = (
            f"{key!r:.200} has no name of a parameter group, so where its name ends is not known"
        )
    return ShardedState(
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
        return None, Problem(kind=ProblemKind.UNREADABLE, message=unreadable(full, error)), ()
    return metadata, None, _unsafe(metadata.tree)


def _problem(reader: FileReader, error: FormatError) -> Problem:
    words = describe_content(reader, json=True)
    if words is not None:
        return Problem(kind=ProblemKind.NOT_A_TENSOR_FILE, message=words, have=reader.size)
    if isinstance(error, TruncatedError):
        return Problem(kind=ProblemKind.TRUNCATED, message=str(error), have=error.have, need=error.need)
    kind = ProblemKind.UNSUPPORTED if isinstance(error, UnsupportedFormat) else ProblemKind.MALFORMED
    is_limit = isinstance(error, BeyondLimits)
    return Problem(kind=kind, message=str(error), have=reader.size, is_limit=is_limit)


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
                self.unread[one.fqn] = "the metadata has no place of it"
            else:
                self.unread[one.fqn] = "the file that holds it is missing"
        for file, items in by_file.items():
            try:
                with open_reader(root / path / file) as reader:
                    left = reader.size
                    for number, item in enumerate(items):
                        left -= item.length
                        if left < 0 and item.offset + item.length <= reader.size:
                            # No writer does that; and a few bytes could make a scan read terabytes.
                            self.broken[path / file] = (
                                f"its items lie over each other, {item.fqn!r:.200} among them"
                            )
                            why = "it lies over other items, or behind one that does"
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
            self.unread[item.fqn] = str(error)  # whatever it is called: any object may hold names
            if not isinstance(error, UnsupportedFormat) and item.offset + item.length <= reader.size:
                self.broken[file] = f"the item {item.fqn!r:.200} at byte {item.offset}: {error}"
            return
        if names := _unsafe(found.tree):
            self.unsafe.setdefault(file, []).extend(names)
        listed = self._lists(item.fqn, found)
        taken = {text.site for _, _, texts in listed for text in texts}
        self.said.update(text.value for text in found.tree.texts if text.site not in taken)
        unknown = [".".join(pair) for pair in found.tree.globals if classify(*pair) is not GlobalSafety.SAFE]
        if listed and unknown:
            # What such an object makes of names that it holds, nobody can tell without running it.
            self.unread[item.fqn] = (
                f"its pickle makes an object of {unknown[0]:.200}, which is never done to look"
            )
        for path, kind, texts in listed:
            scope = name_scope(path, kind, (text.value for text in texts))
            self.scopes.append(scope)
            self.listed[scope.path, kind] = NamesInItem(
                item.fqn, tuple((text.site, text.value) for text in texts)
            )

    def _lists(self, fqn: str, file: TorchFile) -> list[tuple[Steps, str, tuple[Text, ...]]]:
        """Return the lists of names in an item: the keys that lead there, which kind they are, and the names."""
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
        """Return "params" or "param_names" for an item that lists the names of a group of parameters."""
        path = self._paths[fqn]
        if len(path) < 3 or path[-1] not in NAME_KEYS or path[-3] != GROUPS_KEY:
            return None
        return str(path[-1]) if path[:-3] in self._optimizers else None
