"""The backend of a path, with its lock held: the way to every change of a checkpoint."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckptfix.errors import UsageError
from ckptfix.storage.edits import Edit
from ckptfix.storage.files import AnyPath, StorePath
from ckptfix.storage.folder_backend import FolderBackend
from ckptfix.storage.journal import transactions
from ckptfix.storage.lock import folder_lock
from ckptfix.storage.transactions import Backend


@contextmanager
def locked(root: AnyPath, verb: str, *, break_lock: bool = False) -> Iterator[Backend]:
    """Yield the backend of a checkpoint, whose lock is held in this block; readers do not need it.

    In a store the lock says ``verb``, and ``break_lock`` takes it over from a run that was killed;
    in a folder it dies with its process. Raises LockedError when another run holds it, JournalError
    when ``.ckptfix`` is not a folder, OperationError when nothing can be written there, UsageError
    as ``ensure_in_place`` does.
    """
    if not isinstance(root, StorePath):
        with folder_lock(root, verb=verb):
            yield FolderBackend(root)
        return
    from ckptfix.storage.object_backend import ObjectBackend
    from ckptfix.storage.object_journal import store_lock

    ensure_in_place(root, verb)
    if not root.files.store.abilities.in_place:
        # Each write there names the state that it expects, and no other is made.
        yield ObjectBackend(root.files, None)
        return
    with store_lock(root.files.store, verb, break_lock=break_lock) as lock:
        yield ObjectBackend(root.files, lock)


def ensure_in_place(root: AnyPath, verb: str) -> None:
    """Raise UsageError where objects cannot be changed one by one: every change on the hub is a
    commit, whose history is the way back. A manifest (``seal``) is one new file.
    """
    if not isinstance(root, StorePath) or root.files.store.abilities.in_place:
        return
    if verb == "seal" and not transactions(root):
        return
    raise UsageError(
        f"{root}: {verb} does not change files on the hub; next: hf download the repository into a "
        f"folder, run ckptfix {verb} on it, and hf upload it; the commits on the hub keep the "
        "previous files"
    )


def carriage(root: AnyPath, edits: Sequence[Edit], *, is_copy: bool) -> str | None:
    """Return in words the bytes that the edits send to the store, None for a folder on this
    machine.

    ``is_copy``: they are made in a copy of the whole checkpoint.
    """
    if not isinstance(root, StorePath) or not (edits or is_copy):
        return None
    from ckptfix.storage.object_copies import carriage_of_copy
    from ckptfix.storage.object_drafts import carriage_of_edits

    cost = carriage_of_copy if is_copy else carriage_of_edits
    return str(cost(root.files.store, edits, root.files.objects_below("")))
