"""The plan of one transaction on disk, written before anything else: ``plan.json`` and
``literals``.

``plan.json`` is a line with the sha256 of all that follows, then JSON. Binary data lies in
``literals`` in the order in which decoding the plan needs it; the plan holds only lengths and one
sha256 over all. Nothing read from a journal is trusted unchecked: a checkpoint from elsewhere may
bring one along.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct
from typing_extensions import assert_never

from ckptfix.errors import JournalError, OperationError
from ckptfix.storage.atomic import create_file, read_file
from ckptfix.storage.comparing import Fingerprint
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
from ckptfix.storage.paths import check_path, forget
from ckptfix.storage.recipes import ABSENT, KEPT, Absent, Kept, Literal, Range, Recipe

_BITS = 0o1777


class Metadata(Struct, frozen=True, kw_only=True):
    """Permissions, owner and modification time (nanoseconds since 1970): restored by an undo with
    the bytes.

    Never the set-uid and set-gid bits: a journal written by another user must not get them from
    root.
    """

    mode: int
    uid: int
    gid: int
    mtime_ns: int

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
        """Restore each field that differs and may be changed; return False when the time may not
        (not the owner).
        """
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
_SHA256 = re.compile(r"[0-9a-f]{64}")


@contextmanager
def journal_errors(file: Path) -> Iterator[None]:
    """Turn errors in reading and decoding ``file`` into a JournalError:
    ROOT/.ckptfix/NUMBER.STATE/NAME.
    """
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
                f"{file}: cannot be read: {error.strerror}; only the user who ran ckptfix here can "
                "go on with it"
            ) from error
        raise JournalError(f"{file}: cannot be read: {error}; {_advice(file)}") from error
    except RecursionError as error:
        raise JournalError(f"{file}: cannot be read: nested too deeply; {_advice(file)}") from error


def damaged(file: Path, against: str) -> JournalError:
    """Return the error for a file of a journal whose bytes are not those that were written."""
    return JournalError(f"{file}: damaged: its bytes do not match {against}; {_advice(file)}")


def _advice(file: Path) -> str:
    return forget(file.parent.parent.parent)


def whole(value: object, most: int = LARGEST, least: int = 0) -> int:
    """Return a whole number within bounds. Raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is not a whole number from {least} to {most}")
    return value


def text(value: object) -> str:
    """Return a string. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not a string")
    return value


def path_of(value: object) -> PurePosixPath:
    """Return a path that stays inside the folder. Raises ValueError, OperationError."""
    path = PurePosixPath(text(value))
    check_path(path)
    return path


def fingerprint_of(value: Any, *kinds: str) -> Fingerprint | None:
    """Return a fingerprint of one of these kinds, None for null. Raises ValueError, TypeError."""
    if value is None:
        return None
    found = Fingerprint(**value)
    if found.kind not in kinds:
        raise ValueError(f"{found.kind!r:.40} is none of {', '.join(kinds)}")
    whole(found.size)
    whole(found.mtime_ns, least=-LARGEST)
    if found.kind != "folder":
        sha256_of(found.sha256)
    return found


def metadata_of(value: Any) -> Metadata | None:
    """Return metadata, None for null. Raises ValueError, TypeError."""
    if value is None:
        return None
    found = Metadata(**value)
    whole(found.mode, 0o1777)
    owner_number(found.uid)
    owner_number(found.gid)
    whole(found.mtime_ns, least=-LARGEST)
    return found


def owner_number(value: object) -> int:
    """Return the number of a user or group, -1 for any. Raises ValueError."""
    return whole(value, (1 << 32) - 2, -1)


def sha256_of(value: object) -> str:
    """Return a sha256 in hexadecimal. Raises ValueError."""
    if not _SHA256.fullmatch(text(value)):
        raise ValueError(f"{value!r:.40} is not a sha256")
    return text(value)


VERSION = 1


class TransactionRecord(Struct, frozen=True, kw_only=True):
    """Contents of ``plan.json`` and ``literals``. ``watched``: every path whose change makes an
    undo refuse.
    """

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
    """Read a record of ``write_record``. Raises JournalError when a byte changed or the contents
    are invalid.
    """
    plan, literals = folder / "plan.json", folder / "literals"
    with journal_errors(plan):
        digest, _, body_text = read_file(plan).partition(b"\n")
        body_text = body_text.removesuffix(b"\n")
        if hashlib.sha256(body_text).hexdigest().encode() != digest:
            raise damaged(plan, "its own sha256")
        body = json.loads(body_text)
        if body["version"] != VERSION:
            raise JournalError(
                f"{plan}: written by another version (format {body['version']!r:.20}, this one "
                f"reads {VERSION}); use that version of ckptfix"
            )
        expected = body["literals"]["sha256"]
    with journal_errors(literals):
        data = read_file(literals)
        if hashlib.sha256(data).hexdigest() != expected:
            raise damaged(literals, "the sha256 in plan.json")
    with journal_errors(plan):
        return _decode_body(body, data)


def _decode_body(body: dict[str, Any], literals: bytes) -> TransactionRecord:
    take = _taker(literals)
    record = TransactionRecord(
        target=text(body["target"]),
        summary=body["summary"],
        created=float(body["created"]),
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


def _taker(literals: bytes) -> Callable[[object], bytes]:
    view, position = memoryview(literals), 0

    def take(length: object) -> bytes:
        nonlocal position
        start, position = position, position + whole(length)
        if position > len(view):
            raise ValueError(f"the edits need {position} bytes of literals, there are {len(view)}")
        return bytes(view[start:position])

    return take


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
            raise ValueError(f"it holds an edit that this version does not know: {edit!r:.80}")


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

    digests = [sha256_of(digest) for digest in previous.get("digests", [])]
    if len(digests) not in (0, len(paths)):
        raise ValueError(f"a recipe names {len(paths)} files and has {len(digests)} digests")
    return Recipe(
        pieces=tuple(decode_piece(piece) for piece in previous["pieces"]),
        mode=whole(previous["mode"], 0o7777),
        uid=owner_number(previous["uid"]),
        gid=owner_number(previous["gid"]),
        digests=tuple(sorted(zip(paths, digests, strict=False))),
    )
