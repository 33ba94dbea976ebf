"""What transactions the journal of a folder holds."""

import os
import re
import stat
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath

from ckptfix.errors import JournalError
from ckptfix.storage.edits import edited_paths
from ckptfix.storage.paths import JOURNAL, shell_path
from ckptfix.storage.records import read_record

_NAME = re.compile(r"([0-9]{4}|[1-9][0-9]{4,})\.(building|pending|done)")


class State(Enum):
    """Where a transaction stands."""

    BUILDING = "building"  # garbage: nothing of the folder was touched yet
    PENDING = "pending"  # to be rolled back by the next run
    DONE = "done"  # committed; can be undone


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionInfo:
    """One transaction as the journal describes it.

    ``summary`` is the JSON value that the caller of ``commit`` gave; ``created`` is in seconds since 1970;
    ``paths`` are the edited files, ``watched`` those and the files that an undo reads. ``problem`` says why the
    journal cannot be read (None: it can). ``foreign``: a repair by another user, who alone can read it; that is no
    problem, but nothing is known of it.
    """

    number: int
    state: State
    target: str = ""
    summary: object = None
    created: float = 0.0
    paths: tuple[PurePosixPath, ...] = ()
    watched: tuple[PurePosixPath, ...] = ()
    problem: str | None = None
    foreign: bool = False


def transactions(root: Path) -> tuple[TransactionInfo, ...]:
    """Return the transactions in the journal of ``root``, oldest first. Reads only; needs no lock.

    Raises JournalError when ``.ckptfix`` is a symbolic link or no directory, OSError when it cannot be listed.
    """
    return tuple(describe(folder, number, state) for number, state, folder in journal_folders(root))


def journal_folders(root: Path) -> list[tuple[int, State, Path]]:
    """Return number, state and folder of each transaction, oldest first. Raises as ``transactions`` does."""
    journal = root / JOURNAL
    try:
        if not stat.S_ISDIR(os.lstat(journal).st_mode):
            raise JournalError(f"{journal}: is a symbolic link or no directory; move it away first")
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = [match for name in os.listdir(journal) if (match := _NAME.fullmatch(name))]
    return sorted(
        ((int(match[1]), State(match[2]), journal / match[0]) for match in matches),
        key=lambda found: (found[0], found[1] is State.BUILDING),  # garbage is in the way of a roll-back
    )


def check_real(folder: Path) -> None:
    """Raise JournalError when a transaction is a symbolic link, which would lead out of the journal, or a file."""
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise JournalError(
            f"{folder}: is a symbolic link or no directory, which ckptfix never makes; to remove it: "
            f"rm {shell_path(folder)}"
        )


def describe(folder: Path, number: int, state: State) -> TransactionInfo:
    """Read what the journal says of one transaction."""
    try:
        check_real(folder)
        if state is State.BUILDING:
            return TransactionInfo(number=number, state=state)
        record = read_record(folder)
    except JournalError as error:
        if state is State.DONE and isinstance(error.__cause__, PermissionError):
            return TransactionInfo(number=number, state=state, foreign=True)
        return TransactionInfo(number=number, state=state, problem=str(error))
    edited = dict.fromkeys(path for edit in record.edits for path in edited_paths(edit))
    return TransactionInfo(
        number=number,
        state=state,
        target=record.target,
        summary=record.summary,
        created=record.created,
        paths=tuple(edited),
        watched=record.watched,
    )
