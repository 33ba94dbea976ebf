"""``undo``: undo the last repair of a folder or file, byte for byte."""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import ClassVar

from msgspec import Struct

from ckptfix.diagnosis.target import commands_for, find_target
from ckptfix.errors import UsageError
from ckptfix.reports import Serialized
from ckptfix.storage import transactions as engine
from ckptfix.storage.backends import ensure_in_place, locked
from ckptfix.storage.files import AnyPath, Openable, walk
from ckptfix.storage.journal import State, TransactionInfo, is_elsewhere, transactions
from ckptfix.storage.opened import takes_urls
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import JOURNAL, command
from ckptfix.wording import Line, Printable, count_of, few, line, list_names


class UndoReceipt(Printable, Serialized, Struct, frozen=True, kw_only=True):
    """Receipt of an undo: the transaction's number and its steps in words; ``remaining`` can be
    undone next.

    ``recovered``: an interrupted run was rolled back, and nothing else needed an undo.
    ``unproven``: the files that ``force`` accepted without proof that they are unchanged since the
    repair.
    """

    json_keys: ClassVar = "path status transaction steps remaining recovered unproven"

    path: AnyPath
    transaction: int
    steps: tuple[str, ...]
    remaining: int
    recovered: bool = False
    unproven: tuple[PurePosixPath, ...] = ()

    @property
    def status(self) -> int:
        """Exit status: always 0, as a failure raises."""
        return 0

    def lines(self) -> Iterator[Line]:
        """Yield the steps that were undone, and the transaction that can be undone next."""
        what = "an interrupted run" if self.recovered else "the last change"
        yield line(f"undid {what} of {self.path}:", bold=True)
        yield from few([f"  undone: {step}" for step in self.steps], "steps")
        if self.unproven:
            files = list_names(map(str, self.unproven))
            yield line(
                f"not verified: the content of {files}, because the journal of ckptfix 0.4.0 has "
                "no digests"
            )
        if self.remaining:
            earlier = count_of(self.remaining, "earlier change")
            yield line(f"{earlier} can be undone: {command('undo', self.path)}")


@takes_urls("path")
def undo(
    path: Openable,
    *,
    force: bool = False,
    transfer: bool = False,
    break_lock: bool = False,
    progress: Progress | None = None,
) -> UndoReceipt:
    """Undo the last repair of a folder, or of a lone file.

    A repair that was killed is rolled back instead, and in a store finished and then undone; one
    that had changed nothing yet does not count. In a folder every byte that comes back is compared
    with its digest in the journal first, and times of files do not matter; in a store the ETags of
    all objects are compared. ``force``, for a journal of 0.4.0, which has no digests, and for a
    repair that was killed: accept files whose time changed while their size and their ends did not.
    ``transfer`` lets bytes go through this machine where the store cannot compose, ``break_lock``
    takes over the lock of a run that was killed.

    Raises UsageError when there is nothing to undo, ChangedError when a file changed since the
    repair or cannot be proven the same, LockedError and JournalError as ``repair`` does. Nothing is
    touched then.
    """
    target = find_target(path)
    ensure_in_place(target.root, "undo")
    wanted = target.only or ""
    if not transactions(target.root):
        below = commands_for(_repaired_below(target.root), "undo") if target.only is None else ""
        why = f" in this folder, only in folders below it; {below}" if below else ""
        raise UsageError(f"{target.path}: there is no repair to undo{why}")
    with locked(target.root, "undo", break_lock=break_lock) as backend:
        recovered = backend.recover(force=force, progress=progress)
        if recovered is not None and recovered.rolled_back is not None:
            return _receipt(
                target.path, recovered.rolled_back, len(_done(target.root, wanted)), recovered=True
            )
        done = _done(target.root, wanted)
        if not done:
            others = sorted(
                {
                    info.target or "the folder"
                    for info in transactions(target.root)
                    if info.state is State.DONE
                }
            )
            # A run was killed before it touched anything, and what it left is gone now.
            if not others:
                raise UsageError(f"{target.path}: there is no repair to undo")
            raise UsageError(
                f"{target.path}: there is no repair of this path to undo; its journal has a repair "
                f"of {', '.join(others)}; name that path instead"
            )
        last = done[-1]
        if is_elsewhere(target.root, last):
            where, again = (
                ("objects in a store before the download", "URL, then download it again")
                if last.in_store
                else ("the folder before the upload", "FOLDER, then upload it again")
            )
            raise UsageError(
                f"{target.path}: repair {last.number} changed {where}, and can only be undone "
                f"there; next: ckptfix undo {again}"
            )
        unproven = engine.undo(
            backend, last.number, force=force, transfer=transfer, progress=progress
        )
    return _receipt(target.path, last, len(done) - 1, recovered=False, unproven=unproven)


def _repaired_below(root: AnyPath) -> Iterator[AnyPath]:
    """Yield the folders below ``root`` with a repair that can be undone."""
    for where, folders, _ in walk(root):
        folders.sort()
        if JOURNAL in folders:
            folders.remove(JOURNAL)
            if any(info.state in (State.DONE, State.PENDING) for info in transactions(where)):
                yield where


def _done(root: AnyPath, target: str) -> list[TransactionInfo]:
    done = [
        info for info in transactions(root) if info.state is State.DONE and info.target == target
    ]
    # Those of the place where the checkpoint comes from have numbers of their own.
    return [info for info in done if not is_elsewhere(root, info)] or done


def _receipt(
    path: AnyPath,
    info: TransactionInfo,
    remaining: int,
    *,
    recovered: bool,
    unproven: tuple[PurePosixPath, ...] = (),
) -> UndoReceipt:
    steps = info.summary if isinstance(info.summary, list) else []
    return UndoReceipt(
        path=path,
        transaction=info.number,
        steps=tuple(str(step) for step in steps),
        remaining=remaining,
        recovered=recovered,
        unproven=unproven,
    )
