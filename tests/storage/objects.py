"""Recover and undo in a store, as ``folders`` does in a folder."""

from ckptfix.storage.object_journal import store_lock
from ckptfix.storage.object_transactions import recover_objects, undo_objects
from ckptfix.storage.stores import Store


def undo(store: Store, number: int = 1) -> None:
    """Undo a transaction, after what was cut short."""
    with store_lock(store, "undo") as lock:
        recover_objects(store)
        undo_objects(store, number, lock=lock, transfer=not store.abilities.composes)


def recover(store: Store) -> int | None:
    """Go on with what was cut short, whoever has the lock; return the number of what was
    finished.
    """
    with store_lock(store, "repair", break_lock=True):
        finished = recover_objects(store).finished
        return None if finished is None else finished[0]
