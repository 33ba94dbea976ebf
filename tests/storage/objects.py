"""Transactions in a store, as ``folders`` makes them in a folder."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from ckptfix.storage import transactions
from ckptfix.storage.edits import Edit
from ckptfix.storage.listings import Listing
from ckptfix.storage.object_backend import ObjectBackend
from ckptfix.storage.object_journal import StoreLock, store_lock
from ckptfix.storage.store_files import StoreFiles
from ckptfix.storage.stores import ObjectInfo, Store
from ckptfix.storage.transactions import TransactionPlan


def backend_of(
    store: Store, lock: StoreLock, listed: Mapping[str, ObjectInfo] | None = None
) -> ObjectBackend:
    """Return the backend of a store. ``listed``: its objects, which are listed now otherwise."""
    objects = store.list() if listed is None else listed
    return ObjectBackend(StoreFiles(store, Listing(objects.items(), len(store.url))), lock)


def commit_edits(
    store: Store,
    lock: StoreLock,
    edits: Sequence[Edit],
    *,
    listed: Mapping[str, ObjectInfo] | None = None,
    target: str = "",
    indexes: Iterable[PurePosixPath] = (),
    prove: Callable[[], None] = lambda: None,
) -> int:
    """Make the edits in one transaction, planned for ``listed``."""
    plan = TransactionPlan(edits=edits, target=target, summary=["steps"], indexes=tuple(indexes))
    backend = backend_of(store, lock, listed)
    return transactions.commit(backend, plan, prove, transfer=not store.abilities.composes)


def undo(store: Store, number: int = 1) -> None:
    """Undo a transaction, after what was cut short."""
    with store_lock(store, "undo") as lock:
        backend_of(store, lock).recover()
        backend = backend_of(store, lock)
        transactions.undo(backend, number, transfer=not store.abilities.composes)


def recover(store: Store) -> int | None:
    """Go on with what was cut short, whoever has the lock; return the number of what was
    finished.
    """
    with store_lock(store, "repair", break_lock=True) as lock:
        report = backend_of(store, lock).recover()
    if report is None:
        return None
    info = report.finished or report.rolled_back
    return None if info is None else info.number
