"""The exception tree. Damage in a checkpoint is a value (``diagnosis.findings``), never an
exception.

::

    CkptfixError                 everything this package raises on purpose
    ├── UsageError               the request makes no sense for this path (exit status 2)
    ├── FormatError              bytes that are not what their format says; a scan turns it into a finding
    │   ├── TruncatedError       the file ends before its format says it does; holds both sizes
    │   └── UnsupportedFormat    well formed, but nothing this version edits; says why
    │       ├── OtherArchive     an archive of torch that is not a state dict
    │       └── BeyondLimits     larger or nested deeper than what is read, encrypted, or packed by a rare method
    ├── TransferError            a copy between two devices was refused (devices.routing)
    └── OperationError           could not finish; the folder is as it was, or the next run takes it back (exit 3)
        ├── LockedError          another process works on the folder
        ├── ChangedError         a file is not what it was when it was read, or when the repair ended
        │   └── FileChangedError a file changed while it was read
        ├── StoreError           an object store does not answer or refuses (storage.stores)
        ├── RemoteOSError        another process of the run had an OSError (training.ranks)
        ├── TeamError            another process of a team failed, or sees another folder (storage.launched_ranks)
        ├── JournalError         the journal in .ckptfix/ cannot be used
        ├── MissingRankError     ranks of a DeepSpeed checkpoint have no file (checkpoint.deepspeed_files); holds which
        ├── OtherKindError       a DeepSpeed checkpoint of a kind that is not put together (checkpoint.deepspeed_files)
        ├── SpreadOptimizer  an optimizer has parameters of several models (tensors.parameter_names)
        ├── LoadError            a checkpoint could not be loaded as required (training.loading); says what was changed
        └── RolledBackError      a step failed; every step before it was undone
    ClosedError                  a path below a URL was used after its block: a fault of the caller
"""


class CkptfixError(Exception):
    """Base of everything this package raises on purpose."""


class UsageError(CkptfixError):
    """The request makes no sense for this path, for instance an option for a role that is not
    there.
    """


class FormatError(CkptfixError, ValueError):
    """Bytes that are not what their format says. The message holds both numbers where there are
    two.
    """


class TruncatedError(FormatError):
    """A file that ends too early: ``have`` bytes are there, ``need`` would be (None: not known).

    ``in_header``: it ends before what says where tensors are, so that none of them can be told.
    """

    def __init__(
        self, message: str, *, have: int, need: int | None = None, in_header: bool = False
    ) -> None:
        super().__init__(message)
        self.have = have
        self.need = need
        self.in_header = in_header


class UnsupportedFormat(FormatError):
    """A well-formed file of a kind that is not read or not edited; the message says why."""


class OtherArchive(UnsupportedFormat):
    """An intact archive of torch that the loaders of state dicts refuse: TorchScript, or a tar of
    before 0.4.
    """


class BeyondLimits(UnsupportedFormat):
    """A file larger or nested deeper than what is read, encrypted, or packed by a rare method: no
    library writes it.
    """


class OperationError(CkptfixError):
    """An operation could not finish.

    The folder is as it was before it. Only after a JournalError a transaction may still be
    unfinished: then the next repair or undo goes on with it first, or says what is in the
    way.
    """


class RemoteOSError(OperationError, OSError):
    """Another process of the run had an OSError: scripts that go on after a full disk catch it on
    every process.
    """


class TeamError(OperationError):
    """Another process of a team failed or was lost, or sees another folder: none of them goes
    on.
    """


class LockedError(OperationError):
    """Another process holds the lock of the folder."""


class ChangedError(OperationError):
    """A file differs from what was read before, so a step or an undo would write onto something
    unknown.
    """


class FileChangedError(ChangedError):
    """A file or an object changed while it was read, as by a save. ``problem``: the message without
    the next step.
    """

    def __init__(self, path: object, states: str = "") -> None:
        """``states``: the expected and the found state, in words."""
        self.problem = (
            f"{path} changed while it was read: a save may be "
            f"running{f' ({states})' if states else ''}"
        )
        super().__init__(
            f"{self.problem}; next: wait until the save has ended, then run the same command again"
        )


class StoreError(OperationError):
    """An object store did not answer, refused a request, or did not keep what it was given."""


class JournalError(OperationError):
    """The journal is damaged or cannot be read, or a roll-back met a file that the journal does not
    explain.
    """


class RolledBackError(OperationError):
    """A step failed and every step before it was undone; ``__cause__`` is the failure."""


class ClosedError(RuntimeError):
    """A path below a URL was used after the block that opened it.

    No CkptfixError: whoever passes over a checkpoint that cannot be read must not pass over this.
    """
