"""The files of one transaction: ``plan.json`` with ``literals`` (written first) and ``steps`` (as it goes).

``plan.json`` is a line with the sha256 of all that follows, then JSON. Binary data lies in ``literals`` in the
order in which decoding the plan needs it; the plan holds only lengths and one sha256 over all. ``steps`` gets one
JSON line per edit, durable before the edit begins: how many lines there are is how far the transaction got.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from typing_extensions import assert_never

from ckptfix.errors import JournalError
from ckptfix.storage.atomic import create_file, read_file, write_all
from ckptfix.storage.edits import Appended, Move, Patch, Record, Remove, Replaced, Truncate
from ckptfix.storage.fingerprints import Fingerprint
from ckptfix.storage.recipes import ABSENT, KEPT, Absent, Kept, Literal, Range, Recipe

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What an undo restores besides bytes. Times are in nanoseconds since 1970."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionRecord:
    """What ``plan.json`` and ``literals`` hold. ``before``: the edited files that existed before the first edit."""

    target: str
    summary: object
    created: float
    edits: tuple[Record, ...]
    before: dict[PurePosixPath, Metadata]
    watched: tuple[PurePosixPath, ...]


def write_record(folder: Path, record: TransactionRecord) -> None:
    """Write and sync ``plan.json``, ``literals`` and an empty ``steps`` in the new folder of a transaction."""
    literals = bytearray()
    edits = [_encode(edit, literals) for edit in record.edits]
    body = {
        "version": VERSION,
        "target": record.target,
        "summary": record.summary,
        "created": record.created,
        "edits": edits,
        "before": {str(path): asdict(metadata) for path, metadata in record.before.items()},
        "watched": [str(path) for path in record.watched],
        "literals": {"length": len(literals), "sha256": hashlib.sha256(literals).hexdigest()},
    }
    text = json.dumps(body, separators=(",", ":")).encode()
    create_file(folder / "literals", memoryview(literals))
    create_file(folder / "plan.json", hashlib.sha256(text).hexdigest().encode() + b"\n" + text + b"\n")
    create_file(folder / "steps", b"")


def read_record(folder: Path) -> TransactionRecord:
    """Read back what ``write_record`` wrote. Raises JournalError when a byte of it changed."""
    try:
        digest, _, text = read_file(folder / "plan.json").partition(b"\n")
        text = text.removesuffix(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            raise JournalError(f"{folder / 'plan.json'}: damaged: its bytes do not match its own sha256")
        body = json.loads(text)
        if body["version"] != VERSION:
            raise JournalError(
                f"{folder / 'plan.json'}: written by another version (format {body['version']}, this one reads "
                f"{VERSION}); use that version of ckptfix"
            )
        literals = read_file(folder / "literals")
        if hashlib.sha256(literals).hexdigest() != body["literals"]["sha256"]:
            raise JournalError(
                f"{folder / 'literals'}: damaged: its bytes do not match the sha256 in plan.json"
            )
    except (OSError, ValueError, KeyError) as error:
        raise JournalError(f"{folder}: this journal cannot be read: {error}") from error
    take = _taker(literals)
    return TransactionRecord(
        target=body["target"],
        summary=body["summary"],
        created=body["created"],
        edits=tuple(_decode(edit, take) for edit in body["edits"]),
        before={PurePosixPath(path): Metadata(**metadata) for path, metadata in body["before"].items()},
        watched=tuple(PurePosixPath(path) for path in body["watched"]),
    )


def _taker(literals: bytes) -> Callable[[int], bytes]:
    view, position = memoryview(literals), 0

    def take(length: int) -> bytes:
        nonlocal position
        position += length
        return bytes(view[position - length : position])

    return take


def _encode(edit: Record, literals: bytearray) -> list[Any]:
    match edit:
        case Patch():
            literals += edit.old
            literals += edit.new
            return ["patch", str(edit.path), edit.offset, len(edit.old)]
        case Appended():
            return ["append", str(edit.path), edit.old_size, edit.length, edit.sha256]
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


def _decode(edit: list[Any], take: Callable[[int], bytes]) -> Record:
    path = PurePosixPath(edit[1])
    match edit:
        case ["patch", _, offset, length]:
            return Patch(path=path, offset=offset, old=take(length), new=take(length))
        case ["append", _, old_size, length, sha256]:
            return Appended(path=path, old_size=old_size, length=length, sha256=sha256)
        case ["truncate", _, new_size, old_size]:
            return Truncate(path=path, new_size=new_size, old_size=old_size)
        case ["replace", _, previous]:
            return Replaced(path=path, previous=_decode_previous(previous, take))
        case ["remove", _, previous]:
            decoded = _decode_previous(previous, take)
            assert not isinstance(decoded, Absent)
            return Remove(path=path, previous=decoded)
        case ["move", _, target]:
            return Move(source=path, target=PurePosixPath(target))
        case _:
            raise JournalError(f"the journal holds an edit that this version does not know: {edit[0]!r}")


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
    return {
        "paths": [str(path) for path in names],
        "pieces": pieces,
        "mode": previous.mode,
        "uid": previous.uid,
        "gid": previous.gid,
    }


def _decode_previous(previous: Any, take: Callable[[int], bytes]) -> Recipe | Kept | Absent:
    if previous in ("kept", "absent"):
        return KEPT if previous == "kept" else ABSENT
    paths = [PurePosixPath(path) for path in previous["paths"]]
    pieces = tuple(
        Literal(take(piece)) if isinstance(piece, int) else Range(paths[piece[0]], piece[1], piece[2])
        for piece in previous["pieces"]
    )
    return Recipe(pieces=pieces, mode=previous["mode"], uid=previous["uid"], gid=previous["gid"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What is known of the files when an edit begins.

    ``old``: what the edit takes away or moves; ``new``: the new file of a Replace; ``size``: of a patched file;
    ``digest``: of the bytes before the place where an Append or Truncate begins; ``tail``: sha256 of what a
    Truncate cuts off.
    """

    old: Fingerprint | None = None
    new: Fingerprint | None = None
    size: int = 0
    digest: str = ""
    tail: str = ""


def add_note(folder: Path, note: Note) -> None:
    """Make durable that the next edit begins."""
    text = json.dumps(asdict(note), separators=(",", ":")).encode() + b"\n"
    fd = os.open(folder / "steps", os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        write_all(fd, text, os.fstat(fd).st_size)
        os.fsync(fd)
    finally:
        os.close(fd)


def cut_notes(folder: Path, count: int) -> None:
    """Make durable that only the first ``count`` edits are still in effect."""
    lines = read_file(folder / "steps").split(b"\n")
    fd = os.open(folder / "steps", os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.ftruncate(fd, sum(len(line) + 1 for line in lines[:count]))
        os.fsync(fd)
    finally:
        os.close(fd)


def read_notes(folder: Path) -> tuple[Note, ...]:
    """Return the notes of the edits begun. A last line cut short by a crash belongs to an edit that never began."""
    try:
        lines = read_file(folder / "steps").split(b"\n")
        return tuple(_note(json.loads(line)) for line in lines[:-1])
    except (OSError, ValueError, TypeError) as error:
        raise JournalError(f"{folder / 'steps'}: cannot be read: {error}") from error


def _note(fields: dict[str, Any]) -> Note:
    for name in ("old", "new"):
        if fields[name] is not None:
            fields[name] = Fingerprint(**fields[name])
    return Note(**fields)


def write_after(folder: Path, after: dict[PurePosixPath, Fingerprint | None]) -> None:
    """Write what the transaction leaves: one fingerprint per path, None where nothing is."""
    body = {str(path): None if value is None else asdict(value) for path, value in after.items()}
    create_file(folder / "after.json", json.dumps(body, separators=(",", ":")).encode() + b"\n")


def read_after(folder: Path) -> dict[PurePosixPath, Fingerprint | None]:
    """Read back what ``write_after`` wrote. Raises JournalError."""
    try:
        body = json.loads(read_file(folder / "after.json"))
        return {PurePosixPath(path): value and Fingerprint(**value) for path, value in body.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise JournalError(f"{folder / 'after.json'}: cannot be read: {error}") from error
