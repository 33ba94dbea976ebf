"""The transactions of a checkpoint as its journal describes them, in a folder and in a store.

The journal of a folder is its sub-folder ``.ckptfix``; transaction 7 is a folder in it::

    0007.building   the plan and the new files are being written; garbage after a crash
    0007.pending    edits happen, one note in ``steps`` before each; rolled back by the next run
    0007.done       committed by the rename to this name; an undo renames back and rolls back

A store cannot rename: there transaction 7 is ``.ckptfix/0007.objects`` with an object that names
its state (``object_journal``), and what is pending is finished by the next run.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.errors import ChangedError, JournalError, StoreError
from ckptfix.storage.edits import edited_paths, gone_after
from ckptfix.storage.files import AnyPath, StorePath, names_in
from ckptfix.storage.folder_journal import read_record
from ckptfix.storage.paths import JOURNAL, command, shell_path

if TYPE_CHECKING:
    from ckptfix.storage.stores import ObjectInfo, Store

_NAME = re.compile(r"([0-9]{4}|[1-9][0-9]{4,})\.(building|pending|done)")


class State(Enum):
    """State of a transaction, the end of its folder's name."""

    BUILDING = "building"  # garbage: no name was changed yet, or an undo restored all
    PENDING = "pending"  # rolled back by the next run, or in a store finished
    DONE = "done"  # committed; can be undone


class TransactionInfo(Struct, frozen=True, kw_only=True):
    """One transaction as the journal describes it.

    ``summary`` is the JSON value that the caller of ``commit`` gave; ``created`` is in seconds
    since 1970; ``paths`` are the edited files, ``gone`` those of them that it took away, and
    ``watched`` all of them and the files that an undo reads.
    ``problem`` says why the journal cannot be read (None: it can). ``foreign``: a repair by another
    user, who alone can read it; that is not a problem, but its contents are unknown. ``in_store``:
    of objects.
    """

    number: int
    state: State
    target: str = ""
    summary: object = None
    created: float = 0.0
    paths: tuple[PurePosixPath, ...] = ()
    gone: tuple[PurePosixPath, ...] = ()
    watched: tuple[PurePosixPath, ...] = ()
    problem: str | None = None
    foreign: bool = False
    in_store: bool = False

    @property
    def is_interrupted(self) -> bool:
        """True where a run was killed or runs, and where that cannot be read.

        What is done stays done without its records: then only an undo is refused.
        """
        is_unknown = self.problem is not None and self.state is not State.DONE
        return self.state is State.PENDING or is_unknown


def transactions(root: AnyPath) -> tuple[TransactionInfo, ...]:
    """Return the transactions in the journal of ``root``, oldest first, before them those of the
    place where the checkpoint comes from. Reads only; needs no lock.

    Raises JournalError when ``.ckptfix`` is a symbolic link or no directory, OSError when it cannot
    be listed.
    """
    if isinstance(root, StorePath):
        return _transactions_in(root) if (root / JOURNAL).is_dir() else ()
    own = (describe(folder, number, state) for number, state, folder in journal_folders(root))
    return (*downloaded(root), *own)


def is_elsewhere(root: AnyPath, info: TransactionInfo) -> bool:
    """Return whether a transaction was made where the checkpoint came from, to be undone there."""
    return info.in_store != isinstance(root, StorePath)


def is_partly_changed(root: AnyPath) -> bool:
    """Return whether a repair or an undo has changed some files and others not yet: it runs, or was
    killed.

    Reads less than ``transactions``, and of a store what was listed. Raises OSError, and of a store
    StoreError.
    """
    if not isinstance(root, StorePath):
        try:
            return any(state is State.PENDING for _, state, _ in journal_folders(root)) or any(
                info.state is State.PENDING for info in downloaded(root)
            )
        except JournalError:  # a link or a file, which is no journal of ours
            return False
    if root.key is None or not (root / JOURNAL).is_dir():
        return False
    from ckptfix.storage.object_journal import is_replacing

    store = root.files.store.below(root.key)
    return is_replacing(store, root.files.objects_below(root.key))


def check_later(root: AnyPath, every: Sequence[TransactionInfo], number: int) -> None:
    """Raise ChangedError where a later transaction has to be undone first."""
    # Those of the place where the checkpoint comes from have numbers of their own.
    own = [info for info in every if not is_elsewhere(root, info)]
    undone = next(info for info in own if info.number == number)
    for info in own:
        if info.number <= number:
            continue
        if info.foreign or info.problem:
            why = (
                info.problem
                or "it belongs to another user, and only that user can read and undo it"
            )
            raise ChangedError(
                f"{root}: transaction {info.number} came later; undo {info.number} first ({why})"
            )
        changed = set(undone.watched).intersection(info.paths)
        needed = set(undone.paths).intersection(info.watched)
        if changed or needed:
            what = f"also changed {min(changed)}" if changed else f"needs the current {min(needed)}"
            raise ChangedError(
                f"{root}: transaction {info.number} came later and {what}; undo {info.number} "
                f"first: {command('undo', root, info.target)}"
            )


def _transactions_in(root: StorePath) -> tuple[TransactionInfo, ...]:
    """Return the transactions in a store; those of an uploaded folder are foreign there."""
    files, key = root.files, root.key or ""
    uploaded = (
        TransactionInfo(number=number, state=state, foreign=True)
        for number, state, _ in journal_folders(root)
        if state is not State.BUILDING
    )
    # A fleet is listed once, and nothing in it is changed.
    known = files.objects_below(key) if files.whole is not None else None
    return (*uploaded, *_in_store(files.store.below(key), known))


def downloaded(root: Path) -> Iterator[TransactionInfo]:
    """Yield the transactions of the store from which a folder was downloaded or mounted."""
    try:
        names = names_in(root / JOURNAL)
    except (FileNotFoundError, NotADirectoryError):
        return
    if not any(name.endswith(".objects") for name in names):
        return
    from ckptfix.storage.uploads import MountedFolder

    try:
        infos = _in_store(MountedFolder(str(root)))
    except (OSError, StoreError) as error:
        why = f"{root / JOURNAL}: the journal of a store cannot be read: {error}"
        infos = [TransactionInfo(number=0, state=State.PENDING, problem=why, in_store=True)]
    for info in infos:
        # Complete in the store; which files it changed is not known here.
        is_done = info.state is State.DONE and info.problem is not None
        yield replace(info, foreign=True, problem=None) if is_done else info


def _in_store(
    store: "Store", listed: "Mapping[str, ObjectInfo] | None" = None
) -> list[TransactionInfo]:
    """Return the transactions of a checkpoint in a store, oldest first.

    ``listed``: its objects, which are listed anew otherwise. An undo that is done, and the repair
    that it undid, are garbage that the next run deletes.
    """
    from ckptfix.storage.object_journal import Stage, found_transactions, read_plan, read_state

    infos: dict[int, TransactionInfo] = {}
    undone: set[int] = set()
    for found in found_transactions(store.list(JOURNAL) if listed is None else listed):
        garbage = TransactionInfo(number=found.number, state=State.BUILDING, in_store=True)
        infos[found.number] = garbage
        if not found.has_begun:
            continue
        state = State.PENDING
        try:
            written = read_state(store, found)
            if written.stage is Stage.STAGING:
                continue
            if written.stage is Stage.DONE:
                state = State.DONE
                if written.undoes is not None:
                    undone.add(written.undoes)
                    continue
            plan = read_plan(store, found, written)
        except JournalError as error:
            infos[found.number] = replace(garbage, state=state, problem=str(error))
            continue
        infos[found.number] = TransactionInfo(
            number=found.number,
            state=state,
            target=plan.target,
            summary=plan.summary,
            created=plan.created,
            paths=tuple(change.path for change in plan.changes),
            gone=tuple(change.path for change in plan.changes if change.size is None),
            watched=plan.watched,
            in_store=True,
        )
    for number in undone & infos.keys():
        infos[number] = TransactionInfo(number=number, state=State.BUILDING, in_store=True)
    return list(infos.values())


_Root = TypeVar("_Root", Path, StorePath, AnyPath)


def journal_folders(root: _Root) -> list[tuple[int, State, _Root]]:
    """Return number, state and folder of each transaction, oldest first. Raises as ``transactions``
    does.
    """
    journal = root / JOURNAL
    try:
        if not stat.S_ISDIR(journal.lstat().st_mode):
            raise JournalError(
                f"{journal}: is a symbolic link or not a directory; move it away first"
            )
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = [match for name in names_in(journal) if (match := _NAME.fullmatch(name))]
    return sorted(
        ((int(match[1]), State(match[2]), journal / match[0]) for match in matches),
        # garbage blocks a roll-back
        key=lambda folder: (folder[0], folder[1] is State.BUILDING),
    )


def check_real(folder: Path) -> None:
    """Raise JournalError when a transaction is a link, which may lead out, or a file."""
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise JournalError(
            f"{folder}: is a symbolic link or not a directory, and ckptfix never creates those; to "
            f"remove it: rm {shell_path(folder)}"
        )


def describe(folder: Path, number: int, state: State) -> TransactionInfo:
    """Read the description of one transaction from the journal."""
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
        gone=gone_after(record.edits),
        watched=record.watched,
    )
