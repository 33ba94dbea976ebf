"""Transactions on the files of one checkpoint: all edits happen, or none, and a committed one can be
undone.

One engine over two backends, which go in the direction that suits them. A folder is changed file by
file, with a note before each, and goes back. A store has no rename: every new object is made aside
and proven there, and once names are being replaced, it goes on to the end::

    state      a folder                      a store                        the next run
    building   plan and new files are made   new objects are made aside     deletes it
                                             ("staging" in its state.json)
    pending    edits happen                  names are replaced ("commit")  rolls back | finishes
    done       committed                     committed                      clears what is left

Who looks at a checkpoint in between reports the second state, and only that, as an interrupted
repair. Each state is durable before the step that it announces begins, so that no reader of a journal has
to guess.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import PurePosixPath
from typing import NoReturn, Protocol

from msgspec import Struct

from ckptfix.errors import UsageError
from ckptfix.storage.comparing import Digests
from ckptfix.storage.edits import Edit
from ckptfix.storage.files import AnyPath
from ckptfix.storage.journal import TransactionInfo, check_later, is_elsewhere
from ckptfix.storage.parallel import Progress
from ckptfix.storage.reading import FileIdentity


class TransactionPlan(Struct, frozen=True, kw_only=True):
    """Edits of a transaction, in their order, and what they were planned for.

    ``target`` is the path that the user named, ``summary`` any JSON value; ``watched`` are further
    files (besides edited ones and those that recipes read) whose change makes an undo refuse.
    ``known``: the files that the edits were planned for. ``digests``: of parts of files that
    recipes read, where they were read already. ``indexes``: the files that list others, which
    change after them.
    """

    edits: Sequence[Edit]
    target: str
    summary: object
    watched: Iterable[PurePosixPath] = ()
    known: Mapping[PurePosixPath, FileIdentity] = {}
    digests: Mapping[PurePosixPath, Digests] = {}
    indexes: Iterable[PurePosixPath] = ()


class RecoveryReport(Struct, frozen=True, kw_only=True):
    """Result of a recovery: the transaction rolled back (None: none), and the number of left-overs
    removed.

    ``finished``: the transaction that was finished instead, in a store. An undo that was finished
    there counts as a repair that was rolled back.
    """

    rolled_back: TransactionInfo | None
    leftovers: int
    finished: TransactionInfo | None = None

    @property
    def has_changed(self) -> bool:
        """True where names changed, so that what was planned before does not hold."""
        return self.rolled_back is not None or self.finished is not None


class Attempt(Protocol):
    """A transaction under way. ``number``: its number in the journal."""

    number: int

    def made(self) -> AbstractContextManager[None]:
        """Make every edit, and let the checkpoint be read as it is then, in a block.

        At its end all is as it was made, or FileChangedError is raised: a save came between.
        """

    def commit(self) -> None:
        """Announce that the transaction happens, durably."""

    def roll_back(self, error: BaseException) -> NoReturn:
        """Go back from wherever ``error`` stopped it, and raise what the caller is told.

        RolledBackError or ChangedError: everything is as before; JournalError: the next recovery
        goes on; interrupts are raised as they are.
        """

    def finish(self) -> None:
        """Do what follows a commit. JournalError: the next recovery goes on."""


class Backend(Protocol):
    """A checkpoint at its place, for whoever holds its lock."""

    @property
    def root(self) -> AnyPath:
        """The path of the checkpoint."""

    def transactions(self) -> tuple[TransactionInfo, ...]:
        """Return the transactions in its journal, oldest first."""

    def begin(self, plan: TransactionPlan, *, transfer: bool, progress: Progress | None) -> Attempt:
        """Return an attempt. Raises OperationError where it cannot be made; nothing is changed."""

    def recover(
        self, *, force: bool = False, progress: Progress | None = None
    ) -> RecoveryReport | None:
        """Go on with what was cut short, and clean up; None when there was nothing to do.

        Raises JournalError when the journal is damaged, or a file is neither as before nor as the
        transaction left it; that file is then not touched. ``force`` accepts other modification
        times of files whose size and ends are right.
        """

    def undo(
        self, number: int, *, force: bool, transfer: bool, progress: Progress | None
    ) -> tuple[PurePosixPath, ...]:
        """Undo a committed transaction that no later one needs, as ``undo`` says."""


def commit(
    backend: Backend,
    plan: TransactionPlan,
    prove: Callable[[], None],
    *,
    transfer: bool = False,
    progress: Progress | None = None,
) -> int:
    """Make all edits in order, call ``prove``, and return the number of the committed transaction.

    The caller holds the lock and has recovered. When a save wrote a file of the plan by the time
    that an edit takes it, or until the end, all is undone, and the save's files stay. ``transfer``
    lets bytes go through this machine where a store cannot compose. ``progress`` gets the bytes
    copied since its last call.

    Raises OperationError when it failed before anything was touched, RolledBackError when an edit
    or ``prove`` failed (``__cause__``) and all was undone, JournalError when the undoing failed
    too: the next recovery finishes it. KeyboardInterrupt and the like are raised again after the
    roll-back.
    """
    attempt = backend.begin(plan, transfer=transfer, progress=progress)
    carry_out(attempt, prove)
    return attempt.number


def carry_out(attempt: Attempt, prove: Callable[[], None]) -> None:
    """Take an attempt through its states. Raises as ``commit`` does."""
    try:
        with attempt.made():
            prove()
        attempt.commit()
    except BaseException as error:
        attempt.roll_back(error)
    attempt.finish()


def undo(
    backend: Backend,
    number: int,
    *,
    force: bool = False,
    transfer: bool = False,
    progress: Progress | None = None,
) -> tuple[PurePosixPath, ...]:
    """Undo a committed transaction byte for byte, and forget it; return what ``force`` accepted
    without a proof.

    In a folder every byte that comes back is compared with the digests in the journal first; of bytes
    that stay in place, the size, both ends and pages between them. Times prove nothing. In a store
    the ETags of all objects are compared, and nothing is read. ``force`` accepts
    another time of files of which a journal of 0.4.0 or older has no digest, and nothing else.

    The caller holds the lock and has recovered. Raises UsageError when there is no such
    transaction; ChangedError when a later transaction needs the current files, or when a file
    differs from the transaction's result, or cannot be proven the same; JournalError when it could
    not finish: the next recovery does.
    """
    every = backend.transactions()
    numbers = [info.number for info in every if not is_elsewhere(backend.root, info)]
    if number not in numbers:
        known = ", ".join(map(str, numbers)) or "none"
        raise UsageError(
            f"{backend.root}: there is no transaction {number} to undo (known: {known})"
        )
    check_later(backend.root, every, number)
    return backend.undo(number, force=force, transfer=transfer, progress=progress)
