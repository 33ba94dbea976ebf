"""Transactions on Azure, of which every byte travels, in a simulated store: killed, refused and
raced at requests.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ckptfix.errors import ChangedError, JournalError, RolledBackError
from tests.sampling import sampled
from tests.storage import test_object_transactions as transactions
from tests.storage.objects import recover, undo
from tests.storage.test_object_transactions import (
    PREFIX,
    SHARDS,
    anew,
    commit,
    names_are_old_or_new,
    old_names,
    stage_of,
)
from tests.stores.simulated_azure import Refusal, SimulatedAzure, open_simulated
from tests.stores.simulated_s3 import Cloud, KillAt, Killed, cloud, digest

__all__ = ["cloud"]

URL = "az://simulated/run/checkpoint_7"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the objects of the checkpoint small, and some of them of several blocks all the same."""
    monkeypatch.setattr(transactions, "MIB", 1 << 10)
    monkeypatch.setattr("ckptfix.storage.azure._BLOCK", 16 << 10)


def fresh(cloud: Cloud) -> SimulatedAzure:
    anew(cloud, is_encrypted=True)  # each write has another ETag, as on Azure
    return open_simulated(cloud, URL)


@pytest.fixture
def new(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the names after a transaction that nothing disturbs."""
    commit(fresh(cloud))
    names = cloud.names()
    monkeypatch.setattr(transactions, "NEW", names)
    return names


def test_all_names_change_and_an_undo_restores_every_byte(cloud: Cloud) -> None:
    store = fresh(cloud)
    before = cloud.names()
    commit(store)
    assert cloud.names() != before
    undo(store)
    assert cloud.names() == before == old_names()
    assert cloud.journal() == []


@pytest.mark.parametrize("verb", ["repair", "undo"])
def test_killed_at_any_request_the_next_run_finishes_or_rolls_back(
    cloud: Cloud, new: dict[str, str], verb: str
) -> None:
    undoing = verb == "undo"
    action: Callable[[SimulatedAzure], object] = undo if undoing else commit
    old = old_names()

    def prepared() -> SimulatedAzure:
        store = fresh(cloud)
        if undoing:
            commit(store)
        return store

    store = prepared()
    before = cloud.requests
    action(store)
    for at in sampled(range(1, cloud.requests - before + 1)):
        for is_after in (False, True):
            store = prepared()
            cloud.strike = KillAt(at, is_after=is_after)
            with suppress(Killed):
                action(store)
            cloud.strike = lambda method, key, is_after: None
            names_are_old_or_new(cloud, old)
            stage = stage_of(store, 2 if undoing else 1)
            recover(store)
            assert cloud.names() in (old, new)
            if not undoing:
                assert (cloud.names() == new) == (stage in ("commit", "done"))


def test_a_lost_answer_to_any_request_is_no_failure(cloud: Cloud, new: dict[str, str]) -> None:
    store = fresh(cloud)
    before = cloud.requests
    commit(store)
    for at in sampled(range(1, cloud.requests - before + 1)):
        store = fresh(cloud)
        struck = KillAt(at, is_after=True)

        def strike(method: str, key: str, is_after: bool, struck: KillAt = struck) -> None:
            if not struck.is_dead:
                try:
                    struck(method, key, is_after)
                except Killed:
                    raise Refusal(503, "ServerBusy") from None

        cloud.strike = strike
        commit(store)
        cloud.strike = lambda method, key, is_after: None
        assert cloud.names() == new


def test_another_writer_is_never_overwritten(cloud: Cloud) -> None:
    """It writes the last name right before any write, or deletion, of the transaction."""
    changing = ("upload_blob", "commit_block_list", "delete_blob")
    store = fresh(cloud)
    writes = 0

    def count(method: str, key: str, is_after: bool) -> None:
        nonlocal writes
        writes += method in changing and is_after

    cloud.strike = count
    commit(store)
    met = 0
    for at in sampled(range(1, writes + 1)):
        store = fresh(cloud)
        seen = 0

        def strike(method: str, key: str, is_after: bool, at: int = at) -> None:
            nonlocal seen
            if method in changing and not is_after:
                seen += 1
                if seen == at:
                    cloud.write(PREFIX + SHARDS[1], b"of another program")

        cloud.strike = strike
        with suppress(ChangedError, JournalError, RolledBackError):
            commit(store)
        cloud.strike = lambda method, key, is_after: None
        assert cloud.names()[PREFIX + SHARDS[1]] == digest((b"of another program",))
        met += 1
    assert met


def test_blocks_that_another_writer_threw_away(cloud: Cloud, tmp_path: Path) -> None:
    store = fresh(cloud)
    path = tmp_path / "large"
    path.write_bytes(bytes(40 << 10))

    def strike(method: str, key: str, is_after: bool) -> None:
        if method == "commit_block_list" and not is_after:
            cloud.uploads.clear()

    cloud.strike = strike
    with pytest.raises(ChangedError, match="another program wrote"):
        store.upload("optimizer.bin", path, expected=store.list()["optimizer.bin"].etag)


def test_a_file_that_becomes_shorter_replaces_nothing(cloud: Cloud, tmp_path: Path) -> None:
    """The end of it was committed as it was read, and only then was its size compared."""
    store, path = fresh(cloud), tmp_path / "model.safetensors"
    path.write_bytes(bytes(100 << 10))
    before = cloud.names()

    def strike(method: str, key: str, is_after: bool) -> None:
        if method == "stage_block" and is_after:
            os.truncate(path, 40 << 10)

    cloud.strike = strike
    with pytest.raises(ChangedError, match="became shorter while it was uploaded"):
        store.upload(SHARDS[0], path)
    assert cloud.names() == before
