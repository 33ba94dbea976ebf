"""The folder of one transaction: its files, its notes about progress, and errors about unexpected
files.

Edit number 3 has ``3.new`` (the new file until its rename), ``3.kept`` (a previous file kept until
the undo), ``3.trash`` (one deleted at the commit, whose recipe stays), ``3.moved`` (a file on its
way to its new name, then its second name until the commit) and ``3.tail``; while it is undone also
``3.part`` and ``3.copy``. Only the owner may read them: they hold bytes of files that others may
not be allowed to read.

``steps`` has one JSON line before each edit. ``after.json`` has a fingerprint of every file that
the transaction left; ``samples.json``, which 0.4.0 did not write, the digest of pages between its
ends, so that a newer save differs from a copy whose time alone is new.
"""

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct, to_builtins

from ckptfix.errors import JournalError
from ckptfix.storage.atomic import create_file, read_file, sync_folder, write_all
from ckptfix.storage.comparing import Fingerprint
from ckptfix.storage.paths import command, forget, locate
from ckptfix.storage.recipes import Kept, Recipe
from ckptfix.storage.transaction_plan import (
    Metadata,
    damaged,
    fingerprint_of,
    journal_errors,
    metadata_of,
    path_of,
    sha256_of,
    text,
)
from ckptfix.wording import moment


class Workspace(Struct, frozen=True):
    """A checkpoint folder, and the folder of one transaction in its journal."""

    root: Path
    folder: Path

    def at(self, path: PurePosixPath) -> Path:
        """Return the full path of a file of the checkpoint. Raises OperationError below a symbolic
        link.
        """
        return locate(self.root, path)

    def new(self, index: int) -> Path:
        """Return the path of the new file of a Replace until its rename."""
        return self.folder / f"{index}.new"

    def old(self, index: int, previous: Recipe | Kept) -> Path:
        """Return the path of the previous file of a Replace or Remove."""
        return self.folder / f"{index}.{'kept' if isinstance(previous, Kept) else 'trash'}"

    def moved(self, index: int) -> Path:
        """Return the path of the file of a Move in the journal, which no save writes."""
        return self.folder / f"{index}.moved"

    def tail(self, index: int) -> Path:
        """Return the path of the bytes that a Truncate cuts off."""
        return self.folder / f"{index}.tail"

    def copy(self, index: int) -> Path:
        """Return the path of the copy of a file that got a second name; the copy is changed in its
        place.
        """
        return self.folder / f"{index}.copy"

    @property
    def was_committed(self) -> bool:
        """True when every edit was applied: this is an undo, not the roll-back of an interrupted
        run.
        """
        return os.path.lexists(self.folder / "after.json")

    @property
    def any_time(self) -> bool:
        """True when files may have other modification times than the journal says (``undo
        --force``).
        """
        return os.path.lexists(self.folder / "any-time")

    def accept_any_time(self, accept: bool = True) -> None:
        """Make durable that modification times prove nothing: an interrupted ``undo --force`` goes
        on as one.
        """
        if accept and not self.any_time:
            create_file(self.folder / "any-time", b"", mode=0o600)
            sync_folder(self.folder)
        elif not accept:
            with suppress(FileNotFoundError):
                os.unlink(self.folder / "any-time")

    def is_the(self, found: Fingerprint | None, expected: Fingerprint | None) -> bool:
        """Return True when ``found`` is the journal's file: the same time, size and ends."""
        if found is None or expected is None or not found.same_content(expected):
            return False
        return self.any_time or found.mtime_ns == expected.mtime_ns

    def unexplained(self, path: Path, why: str) -> JournalError:
        """Return the error for a file that no interruption explains."""
        return JournalError(
            f"{path}: {why}. Something else changed it after ckptfix did, so it was left alone; "
            f"bring back the version that ckptfix left, then: {command('undo', self.root)}; or "
            f"{forget(self.root)} (its *.kept and *.trash are previous files)"
        )

    def not_the(
        self, path: Path, found: Fingerprint | None, expected: Fingerprint | None
    ) -> JournalError:
        """Return the error for a file at ``path`` that ``is_the`` refused."""
        if found is None or expected is None:
            return self.unexplained(path, "is missing")
        if not found.same_content(expected):
            return self.unexplained(
                path,
                f"has {found.size} bytes and is not the file of {expected.size} bytes that it was",
            )
        times = f"its time is {moment(found.mtime_ns)}, was {moment(expected.mtime_ns)}"
        again = command("undo", self.root, "", "--force")
        return self.unexplained(path, f"was written to: {times} (if it is only the time: {again})")


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file of the checkpoint that is to be changed in place; a symbolic link is an
    OSError.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


_STEPS = "steps"
_AFTER = "after.json"
_SAMPLES = "samples.json"


class Note(Struct, frozen=True, kw_only=True):
    """State of the files when an edit begins.

    ``old`` and ``metadata``: of the file that the edit changes, removes or moves; ``new``: the new
    file of a Replace; ``digest``: of the bytes before the place where a Truncate cuts; ``tail``:
    sha256 of what it cuts off.
    """

    old: Fingerprint | None = None
    metadata: Metadata | None = None
    new: Fingerprint | None = None
    digest: str = ""
    tail: str = ""


def start_notes(folder: Path) -> None:
    """Write and sync the empty list of notes."""
    create_file(folder / _STEPS, b"", mode=0o600)


def add_note(folder: Path, note: Note) -> None:
    """Make durable that the next edit begins."""
    line = json.dumps(to_builtins(note), separators=(",", ":")).encode() + b"\n"
    fd = os.open(folder / _STEPS, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        write_all(fd, line, os.fstat(fd).st_size)
        os.fsync(fd)
    finally:
        os.close(fd)


def cut_notes(folder: Path, count: int) -> None:
    """Make durable that only the first ``count`` edits are still in effect."""
    file = folder / _STEPS
    left = b"".join(line + b"\n" for line in read_file(file).split(b"\n")[:count])
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # In place: a roll-back on a full disk must not need another block.
        if os.fstat(fd).st_nlink == 1:
            os.ftruncate(fd, len(left))
            os.fsync(fd)
            return
    finally:
        os.close(fd)
    new = (
        folder / f"{_STEPS}.new"
    )  # a snapshot of hard links (cp -al) shares the file, and must keep its notes
    if os.path.lexists(new):
        os.unlink(new)
    create_file(new, left, mode=0o600)
    os.rename(new, file)
    sync_folder(folder)


def read_notes(folder: Path, edits: int) -> tuple[Note, ...]:
    """Return the notes of the edits begun, of ``edits`` in all. Raises JournalError.

    A last line cut short by a crash belongs to an edit that never began.
    """
    with journal_errors(folder / _STEPS):
        lines = read_file(folder / _STEPS).split(b"\n")[:-1]
        if len(lines) > edits:
            raise damaged(folder / _STEPS, f"the plan: {len(lines)} lines for {edits} edits")
        return tuple(_note(json.loads(line)) for line in lines)


def read_all_notes(folder: Path, edits: int) -> tuple[Note, ...]:
    """Return the notes of a committed transaction. Raises JournalError when there is not one for
    each edit.
    """
    notes = read_notes(folder, edits)
    if len(notes) != edits:
        raise damaged(folder / _STEPS, f"the plan: {len(notes)} lines for {edits} edits")
    return notes


def _note(fields: Any) -> Note:
    note = Note(**fields)
    for digest in (note.digest, note.tail):
        if text(digest):
            sha256_of(digest)
    return Note(
        old=fingerprint_of(note.old, "file", "link"),
        metadata=metadata_of(note.metadata),
        new=fingerprint_of(note.new, "file"),
        digest=note.digest,
        tail=note.tail,
    )


def write_after(
    folder: Path, after: dict[PurePosixPath, Fingerprint | None], samples: dict[PurePosixPath, str]
) -> None:
    """Write the transaction's result: one fingerprint per path, None for an absent file, and
    ``samples_digest``.
    """
    listed = {str(path): digest for path, digest in samples.items()}
    create_file(
        folder / _SAMPLES, json.dumps(listed, separators=(",", ":")).encode() + b"\n", mode=0o600
    )
    body = {str(path): to_builtins(value) for path, value in after.items()}
    create_file(
        folder / _AFTER, json.dumps(body, separators=(",", ":")).encode() + b"\n", mode=0o600
    )


def read_after(
    folder: Path, watched: Collection[PurePosixPath]
) -> dict[PurePosixPath, Fingerprint | None]:
    """Read the fingerprints that ``write_after`` wrote for these paths. Raises JournalError."""
    with journal_errors(folder / _AFTER):
        body = json.loads(read_file(folder / _AFTER))
        after = {
            path_of(path): fingerprint_of(value, "file", "link", "folder")
            for path, value in body.items()
        }
        if set(after) != set(watched):
            raise damaged(folder / _AFTER, "the plan: it lists other files")
        return after


def read_samples(folder: Path) -> dict[PurePosixPath, str]:
    """Return the digests of pages between the ends of files, empty for a journal of 0.4.0. Raises
    JournalError.
    """
    if not os.path.lexists(folder / _SAMPLES):
        return {}
    with journal_errors(folder / _SAMPLES):
        body = json.loads(read_file(folder / _SAMPLES))
        return {path_of(path): digest and sha256_of(digest) for path, digest in body.items()}
