"""The plan of one transaction: ``plan.json`` and ``literals``, written before anything else.

``plan.json`` is a line with the sha256 of all that follows, then JSON. Binary data lies in ``literals`` in the
order in which decoding the plan needs it; the plan holds only lengths and one sha256 over all.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from typing_extensions import assert_never

from ckptfix.errors import JournalError
from ckptfix.storage.atomic import create_file, read_file
from ckptfix.storage.decoding import damaged, journal_errors, owner_of, path_of, sha256_of, text, whole
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
from ckptfix.storage.recipes import ABSENT, KEPT, Absent, Kept, Literal, Range, Recipe

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionRecord:
    """What ``plan.json`` and ``literals`` hold. ``watched``: every path whose change makes an undo refuse."""

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
    """Read back what ``write_record`` wrote. Raises JournalError when a byte of it changed, or it makes no sense."""
    plan, literals = folder / "plan.json", folder / "literals"
    with journal_errors(plan):
        digest, _, body_text = read_file(plan).partition(b"\n")
        body_text = body_text.removesuffix(b"\n")
        if hashlib.sha256(body_text).hexdigest().encode() != digest:
            raise damaged(plan, "its own sha256")
        body = json.loads(body_text)
        if body["version"] != VERSION:
            raise JournalError(
                f"{plan}: written by another version (format {body['version']!r:.20}, this one reads {VERSION}); use "
                f"that version of ckptfix"
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
            return Patch(path=path_of(path), offset=whole(offset), old=take(length), new=take(length))
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
        uid=owner_of(previous["uid"]),
        gid=owner_of(previous["gid"]),
        digests=tuple(sorted(zip(paths, digests, strict=False))),
    )
