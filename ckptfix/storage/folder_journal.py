"""The files of one transaction in a folder's journal, as they are written and read.

``plan.json`` is a line with the sha256 of all that follows, then JSON. Binary data lies in
``literals`` in the order in which decoding the plan needs it; the plan holds only lengths and one
sha256 over all. Nothing read from a journal is trusted unchecked: a checkpoint from elsewhere may
bring one along.

Edit number 3 has ``3.new`` (the new file until its rename), ``3.kept`` (a previous file kept until
the undo), ``3.trash`` (one deleted at the commit, whose recipe stays), ``3.moved`` (a file on its
way to its new name, then its second name until the commit) and ``3.tail``; while it is undone also
``3.part`` and ``3.copy``. Only the owner may read them: they hold bytes of files that others may
not be allowed to read.

``steps`` has one JSON line before each edit. ``after.json`` has a fingerprint of every file that
the transaction left; ``samples.json``, which 0.4.0 did not write, the digest of pages between its
ends, so that a newer save differs from a copy whose time alone is new.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from msgspec import Meta, Struct, convert, to_builtins
from typing_extensions import assert_never

from ckptfix.errors import JournalError, OperationError
from ckptfix.storage.atomic import create_file, read_file, sync_folder, write_all
from ckptfix.storage.comparing import Fingerprint, Sha256, Time
from ckptfix.storage.edits import (
    Appended,
    Move,
    Patch,
    Record,
    Remove,
    Replaced,
    Truncate,
    check_edit,
    edited_paths,
    read_paths,
)
from ckptfix.storage.paths import check_path, command, forget, locate
from ckptfix.storage.recipes import ABSENT, KEPT, Absent, Kept, Literal, Range, Recipe
from ckptfix.wording import moment

_BITS = 0o1777


_Owner = Annotated[int, Meta(ge=-1, le=(1 << 32) - 2)]
"""The number of a user or group, -1 for any."""


class Metadata(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Permissions, owner and modification time (nanoseconds since 1970): restored by an undo with
    the bytes.

    Never the set-uid and set-gid bits: a journal written by another user must not get them from
    root.
    """

    mode: Annotated[int, Meta(ge=0, le=_BITS)]
    uid: _Owner
    gid: _Owner
    mtime_ns: Time

    @staticmethod
    def of(status: os.stat_result) -> "Metadata":
        """Return the metadata in ``status``."""
        return Metadata(
            mode=status.st_mode & _BITS,
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
        )

    def restore(self, fd: int) -> bool:
        """Restore what differs and may be changed; return False when the time may not."""
        current = os.fstat(fd)
        moved = (current.st_uid, current.st_gid) != (self.uid, self.gid)
        if moved:
            with suppress(PermissionError):
                os.fchown(fd, self.uid, self.gid)
        if moved or current.st_mode & _BITS != self.mode:  # chown may clear bits
            with suppress(PermissionError):
                os.fchmod(fd, self.mode & _BITS | stat.S_IMODE(current.st_mode) & ~_BITS)
        if current.st_mtime_ns != self.mtime_ns:
            try:
                os.utime(fd, ns=(current.st_atime_ns, self.mtime_ns))
            except PermissionError:
                return False
        return True


LARGEST = (1 << 63) - 1


@contextmanager
def journal_errors(file: Path) -> Iterator[None]:
    """Turn errors of reading and decoding ``file`` into a JournalError."""
    try:
        yield
    except JournalError:
        raise
    except (
        OperationError,
        OSError,
        ValueError,
        ArithmeticError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        if isinstance(error, PermissionError):  # known to the reader by this cause
            raise JournalError(
                f"{file}: cannot be read: {error.strerror}; only the user who ran ckptfix on "
                "this folder can continue"
            ) from error
        raise JournalError(f"{file}: cannot be read: {error}; {_advice(file)}") from error
    except RecursionError as error:
        raise JournalError(f"{file}: cannot be read: nested too deeply; {_advice(file)}") from error


def damaged(file: Path, against: str) -> JournalError:
    """Return the error for a file of a journal whose bytes are not those that were written."""
    return JournalError(f"{file}: damaged: its bytes do not match {against}; {_advice(file)}")


def _advice(file: Path) -> str:
    return forget(file.parent.parent.parent)


def whole(value: object, most: int = LARGEST) -> int:
    """Return a whole number within bounds. Raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is not a whole number from 0 to {most}")
    return value


def text(value: object) -> str:
    """Return a string. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not a string")
    return value


def time_of(value: object) -> float:
    """Return seconds since 1970. Raises ValueError, ArithmeticError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise ValueError(f"{value!r:.40} is not a time")
    return float(value)


def path_of(value: object) -> PurePosixPath:
    """Return a path that stays inside the folder. Raises ValueError, OperationError."""
    path = PurePosixPath(text(value))
    check_path(path)
    return path


def _of_kinds(fingerprint: Fingerprint | None, *kinds: str) -> Fingerprint | None:
    """Return a fingerprint, which must be one of these kinds. Raises ValueError."""
    if fingerprint is not None and fingerprint.kind not in kinds:
        raise ValueError(f"{fingerprint.kind!r} is not one of {', '.join(kinds)}")
    if fingerprint is not None and fingerprint.kind != "folder" and not fingerprint.sha256:
        raise ValueError(f"a {fingerprint.kind} without a sha256")
    return fingerprint


VERSION = 1


class TransactionRecord(Struct, frozen=True, kw_only=True):
    """Contents of ``plan.json`` and ``literals``. ``watched``: as of TransactionInfo."""

    target: str
    summary: object
    created: float
    edits: tuple[Record, ...]
    watched: tuple[PurePosixPath, ...]


def write_record(folder: Path, record: TransactionRecord) -> None:
    """Write and sync ``plan.json`` and ``literals`` in the new folder of a transaction."""
    literals = bytearray()
    edits = [_encode(edit, literals) for edit in record.edits]
    body = {
        "version": VERSION,
        "target": record.target,
        "summary": record.summary,
        "created": record.created,
        "edits": edits,
        "watched": [str(path) for path in record.watched],
        "literals": {"length": len(literals), "sha256": hashlib.sha256(literals).hexdigest()},
    }
    plan = json.dumps(body, separators=(",", ":")).encode()
    digest = hashlib.sha256(plan).hexdigest().encode()
    create_file(folder / "literals", memoryview(literals), mode=0o600)
    create_file(folder / "plan.json", digest + b"\n" + plan + b"\n", mode=0o600)


def read_record(folder: Path) -> TransactionRecord:
    """Read what ``write_record`` wrote. Raises JournalError for any other contents."""
    plan, literals = folder / "plan.json", folder / "literals"
    with journal_errors(plan):
        digest, _, body_text = read_file(plan).partition(b"\n")
        body_text = body_text.removesuffix(b"\n")
        if hashlib.sha256(body_text).hexdigest().encode() != digest:
            raise damaged(plan, "its own sha256")
        body = json.loads(body_text)
        if body["version"] != VERSION:
            raise JournalError(
                f"{plan}: written by another version of ckptfix (format {body['version']!r:.20}, "
                f"this version reads {VERSION}); use that version"
            )
        expected = body["literals"]["sha256"]
    with journal_errors(literals):
        data = read_file(literals)
        if hashlib.sha256(data).hexdigest() != expected:
            raise damaged(literals, "the sha256 in plan.json")
    view, position = memoryview(data), 0

    def take(length: object) -> bytes:
        nonlocal position
        start, position = position, position + whole(length)
        if position > len(view):
            raise ValueError(
                f"the edits need {position} bytes of literals, but there are {len(view)}"
            )
        return bytes(view[start:position])

    with journal_errors(plan):
        record = TransactionRecord(
            target=text(body["target"]),
            summary=body["summary"],
            created=time_of(body["created"]),
            edits=tuple(_decode(edit, take) for edit in body["edits"]),
            watched=tuple(path_of(path) for path in body["watched"]),
        )
        if record.target:
            path_of(record.target)
        needed: set[PurePosixPath] = set()
        for edit in record.edits:
            check_edit(edit)
            needed.update(edited_paths(edit))
            needed.update(read_paths(edit))
        if not needed <= set(record.watched):
            raise ValueError(f"{min(needed - set(record.watched))} is not among the watched files")
        return record


def _encode(edit: Record, literals: bytearray) -> list[Any]:
    match edit:
        case Patch():
            literals += edit.old
            literals += edit.new
            return ["patch", str(edit.path), edit.offset, len(edit.old)]
        case Appended():
            return ["append", str(edit.path), edit.old_size, edit.length]
        case Truncate():
            return ["truncate", str(edit.path), edit.new_size, edit.old_size]
        case Replaced():
            return ["replace", str(edit.path), _encode_previous(edit.previous, literals)]
        case Remove():
            return ["remove", str(edit.path), _encode_previous(edit.previous, literals)]
        case Move():
            return ["move", str(edit.source), str(edit.target)]
        case _:
            assert_never(edit)


def _decode(edit: Any, take: Callable[[object], bytes]) -> Record:
    match edit:
        case ["patch", path, offset, length]:
            return Patch(
                path=path_of(path), offset=whole(offset), old=take(length), new=take(length)
            )
        case ["append", path, old_size, length]:
            return Appended(path=path_of(path), old_size=whole(old_size), length=whole(length))
        case ["truncate", path, new_size, old_size]:
            return Truncate(path=path_of(path), new_size=whole(new_size), old_size=whole(old_size))
        case ["replace", path, previous]:
            return Replaced(path=path_of(path), previous=_decode_previous(previous, take))
        case ["remove", path, previous] if previous != "absent":
            decoded = _decode_previous(previous, take)
            assert not isinstance(decoded, Absent)
            return Remove(path=path_of(path), previous=decoded)
        case ["move", path, target]:
            return Move(source=path_of(path), target=path_of(target))
        case _:
            raise ValueError(f"it has an edit that this version does not support: {edit!r:.80}")


def _encode_previous(previous: Recipe | Kept | Absent, literals: bytearray) -> Any:
    if not isinstance(previous, Recipe):
        return "kept" if isinstance(previous, Kept) else "absent"
    names: dict[PurePosixPath, int] = {}
    pieces: list[
        int | list[int]
    ] = []  # a literal is its length; a range is [number of the path, offset, length]
    for piece in previous.pieces:
        if isinstance(piece, Literal):
            literals += piece.data
            pieces.append(len(piece.data))
        else:
            pieces.append([names.setdefault(piece.path, len(names)), piece.offset, piece.length])
    encoded = {
        "paths": [str(path) for path in names],
        "pieces": pieces,
        "mode": previous.mode,
        "uid": previous.uid,
        "gid": previous.gid,
    }
    if previous.digests:  # a key of its own, which 0.4.0 does not look for
        digests = dict(previous.digests)
        encoded["digests"] = [digests[path] for path in names]
    return encoded


def _decode_previous(previous: Any, take: Callable[[object], bytes]) -> Recipe | Kept | Absent:
    if previous in ("kept", "absent"):
        return KEPT if previous == "kept" else ABSENT
    paths = [path_of(path) for path in previous["paths"]]

    def decode_piece(piece: Any) -> Literal | Range:
        if isinstance(piece, int):
            return Literal(take(piece))
        number, offset, length = piece
        return Range(paths[whole(number)], whole(offset), whole(length))

    digests = convert(previous.get("digests", []), list[Sha256])
    if len(digests) not in (0, len(paths)) or not all(digests):
        count = sum(map(bool, digests))
        raise ValueError(f"a recipe lists {len(paths)} files but {count} digests")
    return Recipe(
        pieces=tuple(decode_piece(piece) for piece in previous["pieces"]),
        mode=whole(previous["mode"], 0o7777),
        uid=convert(previous["uid"], _Owner),
        gid=convert(previous["gid"], _Owner),
        digests=tuple(sorted(zip(paths, digests, strict=False))),
    )


class Workspace(Struct, frozen=True):
    """A checkpoint folder, and the folder of one transaction in its journal."""

    root: Path
    folder: Path

    def at(self, path: PurePosixPath) -> Path:
        """Return the full path of a file. Raises OperationError below a symbolic link."""
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
        """Return the path of the copy that replaces a file with a second name."""
        return self.folder / f"{index}.copy"

    @property
    def was_committed(self) -> bool:
        """True when every edit was applied: this is an undo, not a roll-back."""
        return os.path.lexists(self.folder / "after.json")

    @property
    def any_time(self) -> bool:
        """True when files may have other times than the journal says (``--force``)."""
        return os.path.lexists(self.folder / "any-time")

    def accept_any_time(self, accept: bool = True) -> None:
        """Make durable that times prove nothing: a killed ``--force`` goes on as one."""
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
            f"restore the version that ckptfix left, then: {command('undo', self.root)}; or "
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
                f"is a different file (expected {expected.size} bytes, found {found.size})",
            )
        times = f"its time changed from {moment(expected.mtime_ns)} to {moment(found.mtime_ns)}"
        again = command("undo", self.root, "", "--force")
        return self.unexplained(
            path, f"was written to: {times} (if only the time changed: {again})"
        )


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file that is to be changed in place; a symbolic link is an OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


_STEPS = "steps"
_AFTER = "after.json"
_SAMPLES = "samples.json"


class Note(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """State of the files when an edit begins.

    ``old`` and ``metadata``: of the file that the edit changes, removes or moves; ``new``: the new
    file of a Replace; ``digest``: of the bytes before the place where a Truncate cuts; ``tail``:
    sha256 of what it cuts off.
    """

    old: Fingerprint | None = None
    metadata: Metadata | None = None
    new: Fingerprint | None = None
    digest: Sha256 = ""
    tail: Sha256 = ""


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


def read_all_notes(folder: Path, edits: Sequence[Record]) -> tuple[Note, ...]:
    """Return the notes of a committed transaction. Raises JournalError when there is not one for
    each edit, with the files that this edit needs.
    """
    notes = read_notes(folder, len(edits))
    if len(notes) != len(edits):
        raise damaged(folder / _STEPS, f"the plan: {len(notes)} lines for {len(edits)} edits")
    for number, (edit, note) in enumerate(zip(edits, notes, strict=True), 1):
        if not _is_note_of(edit, note):
            raise damaged(folder / _STEPS, f"the plan: line {number} belongs to a different edit")
    return notes


def _is_note_of(edit: Record, note: Note) -> bool:
    """Return whether a note names the files that the edit met and left."""
    if isinstance(edit, Replaced) and note.new is None:
        return False
    previous = edit.previous if isinstance(edit, Replaced | Remove) else KEPT
    if isinstance(previous, Absent) or note.old is None:
        return isinstance(previous, Absent) and note.old is None
    return not isinstance(previous, Recipe) or (note.old.kind, note.old.size) == (
        "file",
        previous.size,
    )


def _note(fields: object) -> Note:
    note = convert(fields, Note)
    _of_kinds(note.old, "file", "link")
    _of_kinds(note.new, "file")
    return note


def write_after(
    folder: Path, after: dict[PurePosixPath, Fingerprint | None], samples: dict[PurePosixPath, str]
) -> None:
    """Write a fingerprint for each path (None: absent), and ``samples_digest``."""
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
        body = convert(json.loads(read_file(folder / _AFTER)), dict[str, Fingerprint | None])
        after = {
            path_of(path): _of_kinds(fingerprint, "file", "link", "folder")
            for path, fingerprint in body.items()
        }
        if set(after) != set(watched):
            raise damaged(folder / _AFTER, "the plan: it lists different files")
        return after


def read_samples(folder: Path) -> dict[PurePosixPath, str]:
    """Return digests of pages between the ends; none of 0.4.0. Raises JournalError."""
    if not os.path.lexists(folder / _SAMPLES):
        return {}
    with journal_errors(folder / _SAMPLES):
        body = convert(json.loads(read_file(folder / _SAMPLES)), dict[str, Sha256])
        return {path_of(path): digest for path, digest in body.items()}
