"""The conditions under which a committed transaction of a folder can be undone: every byte that
comes back is proven first.
"""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.errors import ChangedError, FileChangedError, OperationError
from ckptfix.storage.comparing import ends_digest, fingerprint, samples_digest
from ckptfix.storage.copying import supports_reflink
from ckptfix.storage.edits import (
    Appended,
    Patch,
    Pieces,
    Remove,
    Replaced,
    Truncate,
    WayBack,
    edited_paths,
)
from ckptfix.storage.folder_journal import (
    TransactionRecord,
    Workspace,
    read_after,
    read_all_notes,
    read_samples,
)
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import command, forget, locate
from ckptfix.storage.reading import Piece
from ckptfix.storage.recipes import (
    Bytes,
    Kept,
    Part,
    Recipe,
    differing,
    is_made,
    parts_of,
    read_bytes,
)
from ckptfix.wording import human_size, moment


class Rebuilt(NamedTuple):
    """A deleted file that an undo rebuilds: the place of its edit, its path and its recipe.

    ``bytes_of``: the current location of a part's bytes; ``cut``: of a stretch of the file, from
    its offset and length. Both raise ChangedError where bytes are missing.
    """

    place: int
    path: PurePosixPath
    recipe: Recipe
    bytes_of: Callable[[Part], Bytes]
    cut: Callable[[int, int], Bytes]


def rebuilt_files(work: Workspace, record: TransactionRecord) -> Iterator[Rebuilt]:
    """Yield every file that an undo rebuilds from ranges of other files; each is valid until the
    next one.

    The current location of the bytes is computed as if edits were undone; nothing is changed.

    Raises ChangedError, OperationError, OSError.
    """

    def find(path: PurePosixPath) -> Pieces[Piece] | None:
        return _file(locate(work.root, path))

    def kept(index: int) -> Pieces[Piece] | None:
        edit = record.edits[index]
        if isinstance(edit, Truncate):
            return Pieces((Piece(work.tail(index), 0, edit.old_size - edit.new_size),))
        assert isinstance(edit, Remove | Replaced)
        assert isinstance(edit.previous, Kept)
        return _file(work.old(index, edit.previous))

    def missing(path: PurePosixPath) -> ChangedError:
        return ChangedError(f"{work.root / path} is missing, and the undo needs its bytes")

    back = WayBack(find, kept, missing)

    def bytes_of(part: Part) -> Bytes:
        return back.cut(part.source, part.offset, part.length)

    recipes = {
        index: edit.previous
        for index, edit in enumerate(record.edits)
        if isinstance(edit, Remove | Replaced) and isinstance(edit.previous, Recipe)
    }
    for index in range(len(record.edits) - 1, min(recipes, default=len(record.edits)) - 1, -1):
        edit = record.edits[index]
        if (recipe := recipes.get(index)) is not None:
            [path] = edited_paths(edit)
            yield Rebuilt(index, path, recipe, bytes_of, back.made(recipe).cut)
        back.undo(index, edit)


def _file(path: Path) -> Pieces[Piece] | None:
    try:
        return Pieces((Piece(path, 0, os.stat(path).st_size),))
    except (FileNotFoundError, NotADirectoryError):
        return None


class Allowed(NamedTuple):
    """Accepted differences in an undo.

    ``any_time``: times of files differ and their content was proven, or ``--force`` accepts it.
    ``unproven``: the files of which ``--force`` accepts it.
    """

    any_time: bool
    unproven: tuple[PurePosixPath, ...]


def check_undoable(
    root: Path, done: Path, number: int, record: TransactionRecord, *, force: bool
) -> Allowed:
    """Raise ChangedError, JournalError or OperationError when an undo would lose bytes."""
    _check_kept(root, done, record)
    allowed = _check_unchanged(root, done, number, record, force)
    _check_space(root, record)
    _check_restored(root, done, number, record)
    return allowed


def _check_unchanged(
    root: Path, done: Path, number: int, record: TransactionRecord, force: bool
) -> Allowed:
    """Compare every file with its fingerprint; a copy and ``touch`` change times."""
    samples = read_samples(done)
    any_time, unproven = False, dict[PurePosixPath, str]()
    for path, left in read_after(done, record.watched).items():
        full = locate(root, path)
        now = fingerprint(full)
        if left is None or now is None:
            if left is not now:
                what = "appeared" if now else "disappeared"
                raise ChangedError(f"{root / path}: {what} since repair {number}; {_advice(root)}")
            continue
        if not left.same_content(now):
            sizes = (
                f"expected {left.size} bytes, found {now.size}; " if now.size != left.size else ""
            )
            raise ChangedError(
                f"{root / path}: changed since repair {number} ({sizes}sha256 of its first and "
                f"last bytes: expected {left.sha256[:12]}, found {now.sha256[:12]}); "
                f"{_advice(root)}"
            )
        digest = samples_digest(full) if now.kind == "file" else ""
        if samples.get(path, digest) != digest:
            raise ChangedError(
                f"{root / path}: changed since repair {number} (sha256 of sampled pages in its "
                f"middle: expected {samples[path][:12]}, found {digest[:12]}); {_advice(root)}"
            )
        if now != left:
            any_time = True
            if digest and path not in samples:
                unproven[path] = (
                    f"its time changed from {moment(left.mtime_ns)} to {moment(now.mtime_ns)}"
                )
    if unproven and not force:
        path, why = next(iter(unproven.items()))
        raise ChangedError(
            f"{root / path}: cannot be proven unchanged since repair {number}: {why}, and the "
            "journal, written by ckptfix 0.4.0 or older, has no digest of its bytes; nothing was "
            "undone; if you know that only its time changed, as after a copy: "
            f"{command('undo', root, record.target, '--force')}"
        )
    return Allowed(any_time, tuple(unproven))


def _check_kept(root: Path, done: Path, record: TransactionRecord) -> None:
    """Raise ChangedError when the journal lacks a byte that the repair kept in it.

    ``cp -rL`` leaves out a kept link that leads to a neighbour, as it leads nowhere from within the
    journal.
    """
    work = Workspace(root, done)
    notes = read_all_notes(done, record.edits)
    for index, (edit, note) in enumerate(zip(record.edits, notes, strict=True)):
        if isinstance(edit, Remove | Replaced) and isinstance(edit.previous, Kept):
            path = work.old(index, edit.previous)
            now = fingerprint(path)
            is_whole = now is not None and now.same_content(note.old)
        elif isinstance(edit, Truncate):
            path = work.tail(index)
            now = fingerprint(path)
            is_whole = now is not None and now.size == edit.old_size - edit.new_size
        else:
            continue
        if not is_whole:
            raise ChangedError(
                f"{path}: {'is missing' if now is None else 'changed'}, and the undo needs it for "
                f"{edit.path}: a copy may have left it out; nothing was undone; undo the repair in "
                f"the folder that this one was copied from, or {forget(root)}"
            )


def check_dropped(work: Workspace, record: TransactionRecord, progress: Progress | None) -> None:
    """Compare every byte of the files that the commit deletes with what their recipes make.

    A file that was written through a memory map, or replaced by one of its size and time (``tar``,
    ``rsync -t``), looks as it was planned for. It was deleted, and no undo could rebuild it.

    Raises ChangedError, OSError.
    """
    for rebuilt in rebuilt_files(work, record):
        old = work.old(rebuilt.place, rebuilt.recipe)
        if not is_made(rebuilt.recipe, old, rebuilt.bytes_of, progress):
            raise FileChangedError(
                work.root / next(differing(rebuilt.recipe, rebuilt.bytes_of), rebuilt.path)
            )


def _check_restored(root: Path, done: Path, number: int, record: TransactionRecord) -> None:
    """Hash every byte of other files that goes into a restored file."""
    work = Workspace(root, done)
    notes = read_all_notes(done, record.edits)
    for rebuilt in rebuilt_files(work, record):
        path, recipe = rebuilt.path, rebuilt.recipe
        for source in differing(recipe, rebuilt.bytes_of):
            now = {
                piece.path
                for part in parts_of(recipe)
                if part.source == source
                for piece in rebuilt.bytes_of(part)
                if isinstance(piece, Piece)
            }
            names = ", ".join(sorted(map(str, now)))
            raise ChangedError(
                f"{names}: changed since repair {number}: the sha256 of the bytes shared with "
                f"{path} differs, so an undo would restore {path} with wrong bytes; nothing "
                f"was undone; restore {names} as the repair left it, then: "
                f"{command('undo', root, record.target)}; or {forget(root)}"
            )
        old = notes[rebuilt.place].old
        if old is not None and _ends_of(rebuilt) != old.sha256:
            raise ChangedError(
                f"{root / path}: cannot be rebuilt: it was written during repair {number}, and "
                f"ckptfix older than 0.6.0 then deleted it; nothing was undone; {forget(root)}"
            )


def _ends_of(rebuilt: Rebuilt) -> str:
    def read(offset: int, length: int) -> bytes:
        return read_bytes(rebuilt.cut(offset, length))

    return ends_digest(read, rebuilt.recipe.size)


def _check_space(root: Path, record: TransactionRecord) -> None:
    """Raise an error before any change: an undo must not stop halfway."""
    needed = 1 << 16
    in_place = any(isinstance(edit, Patch | Appended | Truncate) for edit in record.edits)
    if in_place:
        needed += sum(_linked_size(root, path) for path in record.watched)
    for edit in record.edits:
        if isinstance(edit, Truncate):
            needed += edit.old_size - edit.new_size + 4096
        elif isinstance(edit, Remove | Replaced) and isinstance(edit.previous, Recipe):
            needed += edit.previous.size + 4096
    status = os.statvfs(root)
    free = status.f_bavail * status.f_frsize
    if needed > free and not supports_reflink(
        root
    ):  # where blocks are shared, a rebuilt file takes almost none
        raise OperationError(
            f"{root}: the undo needs {human_size(needed)} of free space, but only "
            f"{human_size(free)} is free on this disk; free up space, then: "
            f"{command('undo', root, record.target)}"
        )


def _advice(root: Path) -> str:
    return f"nothing was undone; restore what the repair left and undo again, or {forget(root)}"


def _linked_size(root: Path, path: PurePosixPath) -> int:
    """Return the size of a file with a second name, which is copied before a change."""
    try:
        status = os.lstat(locate(root, path))
    except FileNotFoundError:
        return 0
    return status.st_size + 4096 if stat.S_ISREG(status.st_mode) and status.st_nlink > 1 else 0
