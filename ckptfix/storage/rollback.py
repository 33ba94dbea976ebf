"""Undo one edit, whether it is done, half done or not begun, and whether its undo was itself interrupted.

Each case looks at the folder, decides how far things got, and goes back from there; so it can be killed and
repeated at any point. It syncs even what it finds in order: the run before may have been killed ahead of its sync.
Anything that no interruption explains (somebody saved the file again) is a JournalError, and that file is left
alone. A newer file where nothing has to be put is nobody's business.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ckptfix.errors import JournalError, OperationError
from ckptfix.storage.atomic import create_file, keep, sync_folder
from ckptfix.storage.building import build
from ckptfix.storage.edits import Move, Record, Remove, Replaced
from ckptfix.storage.fingerprints import fingerprint
from ckptfix.storage.in_place import undo_in_place
from ckptfix.storage.notes import Note
from ckptfix.storage.paths import forget
from ckptfix.storage.pieces import Piece
from ckptfix.storage.recipe_digests import differing
from ckptfix.storage.recipes import Absent, Recipe
from ckptfix.storage.renaming import move, put_back
from ckptfix.storage.workspace import Workspace, opened

Progress = Callable[[int], None]


def undo_edit(
    work: Workspace, index: int, edit: Record, note: Note, progress: Progress | None = None
) -> None:
    """Bring the files of ``edit`` durably back to what they were before it. Raises OperationError and OSError."""
    match edit:
        case Move():
            _undo_move(work, edit, note)
        case Remove():
            _undo_remove(work, index, edit, note, progress)
        case Replaced(previous=Absent()):
            _undo_new_file(work, index, edit, note)
        case Replaced():
            _undo_replace(work, index, edit, note, progress)
        case _:
            undo_in_place(work, index, edit, note)


def _undo_move(work: Workspace, edit: Move, note: Note) -> None:
    source, target = work.at(edit.source), work.at(edit.target)
    at_source, at_target = fingerprint(source), fingerprint(target)
    if at_source is None:
        if not work.is_the(at_target, note.old):
            raise work.not_the(target, at_target, note.old)
        _make_folder(source.parent)
        move(target, source)
    elif not work.is_the(at_source, note.old) and work.is_the(at_target, note.old):
        raise work.unexplained(source, f"is there again, and what was there is now {edit.target}")
    for folder in dict.fromkeys((source.parent, target.parent)):
        sync_folder(folder)


def _undo_new_file(work: Workspace, index: int, edit: Replaced, note: Note) -> None:
    path, new = work.at(edit.path), work.new(index)
    if not os.path.lexists(new) and os.path.lexists(path):
        found = fingerprint(path)
        if not work.is_the(found, note.new):
            raise work.not_the(path, found, note.new)
        move(path, new)
    sync_folder(work.folder)
    sync_folder(path.parent)


def _undo_replace(work: Workspace, index: int, edit: Replaced, note: Note, progress: Progress | None) -> None:
    """``N.new`` is there exactly while the new file is not at its place, or a second name of it is kept here."""
    assert not isinstance(edit.previous, Absent)
    path, new, old = work.at(edit.path), work.new(index), work.old(index, edit.previous)
    if not os.path.lexists(new):
        found = fingerprint(path)
        if found is not None and not work.is_the(found, note.new):
            raise work.not_the(path, found, note.new)
        if not os.path.lexists(old):
            _rebuild(work, index, edit.path, edit.previous, old, note, progress)
        if found is None:  # moved away by hand; the rule above needs a stand-in
            create_file(new, b"", mode=0o600)
        else:
            keep(path, new)
        sync_folder(work.folder)
    if os.path.lexists(old):
        _check_place(work, path, (old, new), note)
        put_back(old, path)
    sync_folder(path.parent)
    sync_folder(work.folder)


def _check_place(work: Workspace, path: Path, ours: tuple[Path, ...], note: Note) -> None:
    """Raise JournalError when a file is at ``path`` that is neither the previous nor the new one."""
    if not os.path.lexists(path):
        return
    status = os.lstat(path)
    if any(os.path.lexists(one) and os.path.samestat(status, os.lstat(one)) for one in ours):
        return
    found = fingerprint(path)
    if not work.is_the(found, note.old) and not work.is_the(found, note.new):
        raise work.not_the(path, found, note.new)


def _undo_remove(work: Workspace, index: int, edit: Remove, note: Note, progress: Progress | None) -> None:
    path, old = work.at(edit.path), work.old(index, edit.previous)
    if os.path.lexists(path):
        if os.path.lexists(old):
            raise work.unexplained(path, "is there again")
        # The file was never taken away, or is back. Not so when the commit deleted it, and it must be built again.
        if work.was_committed and not work.is_the(found := fingerprint(path), note.old):
            raise work.not_the(path, found, note.old)
        sync_folder(path.parent)
        return
    if not os.path.lexists(old):
        _rebuild(work, index, edit.path, edit.previous, old, note, progress)
    _make_folder(path.parent)
    move(old, path)


def _make_folder(folder: Path) -> None:
    """Make the folder of a file that comes back, which somebody may have deleted when it was empty."""
    if not os.path.lexists(folder):
        os.mkdir(folder)
        sync_folder(folder.parent)


def _rebuild(
    work: Workspace,
    index: int,
    path: PurePosixPath,
    previous: object,
    old: Path,
    note: Note,
    progress: Progress | None,
) -> None:
    """Make the previous file at ``old``, complete or not at all, and check that it is the one that was there."""
    if not isinstance(previous, Recipe):
        raise JournalError(
            f"{old}: the previous version of {path} is no longer in the journal; {forget(work.root)}"
        )
    part = old.with_suffix(".part")
    with suppress(FileNotFoundError):
        os.unlink(part)
    try:
        # for nobody else to read before it is known to be what was there
        build(replace(previous, mode=0o600, uid=-1, gid=-1), work.root, part, progress=progress)
        made, why = fingerprint(part), "the files that hold its bytes are no longer what they were"
        if any(differing(previous, lambda one: (Piece(part, one.position, one.length),))):
            made = None
    except (OperationError, FileNotFoundError) as error:  # a source is shorter than it was, or gone
        made, why = None, str(error)
    if made is None or not made.same_content(note.old):
        with suppress(FileNotFoundError):
            os.unlink(part)
        raise JournalError(
            f"{work.root / path}: cannot be rebuilt: {why}; bring them back, or {forget(work.root)}"
        )
    if note.metadata is not None:
        with opened(part, os.O_RDWR) as fd:
            note.metadata.restore(fd)
            os.fsync(fd)
    os.rename(part, old)
    sync_folder(work.folder)
