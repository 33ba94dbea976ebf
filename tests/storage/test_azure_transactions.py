"""Transactions on Azure's blocks, in a simulated store: killed and refused at requests, and few
bytes travel.
"""

from collections.abc import Callable
from contextlib import suppress

import pytest

from ckptfix.errors import ChangedError
from ckptfix.storage.stores import ABSENT, ObjectRange
from tests.sampling import sampled
from tests.storage.objects import recover, undo
from tests.storage.test_object_transactions import (
    MIB,
    NEW,
    PREFIX,
    SHARDS,
    anew,
    commit,
    failure_of,
    names_are_old_or_new,
    old_names,
    stage_of,
)
from tests.stores.simulated_azure import Refusal, SimulatedAzure, open_simulated
from tests.stores.simulated_s3 import Cloud, KillAt, Killed, Stretch, cloud, digest

__all__ = ["cloud"]

URL = "az://simulated/run/checkpoint_7"


def fresh(cloud: Cloud) -> SimulatedAzure:
    anew(cloud, is_encrypted=True)  # each write has another ETag, as on Azure
    return open_simulated(cloud, URL)


def test_all_names_change_and_an_undo_restores_every_byte(cloud: Cloud) -> None:
    store = fresh(cloud)
    before = cloud.names()
    commit(store)
    assert cloud.names() == NEW
    assert cloud.objects[PREFIX + SHARDS[0]].metadata["owner"] == "a user"
    undo(store)
    assert cloud.names() == before
    assert cloud.journal() == []
    assert cloud.objects[PREFIX + SHARDS[0]].metadata["owner"] == "a user"
    assert store.traffic.down < 1 << 17
    assert store.traffic.up < 1 << 17


@pytest.mark.slow
def test_an_object_of_1_tb_costs_its_header(cloud: Cloud) -> None:
    cloud.write("run/checkpoint_7/model", (b"header", Stretch(1, 0, 10**12)))
    store = open_simulated(cloud, URL)
    etag = store.list()["model"].etag
    info = store.compose(
        "new", [b"longer header", ObjectRange("model", 6, 10**12, etag)], expected=ABSENT
    )
    assert info.size == 10**12 + 13
    assert (store.traffic.up, store.traffic.down) == (13, 0)
    assert digest(cloud.objects["run/checkpoint_7/new"].body) == digest(
        (b"longer header", Stretch(1, 0, 10**12))
    )


@pytest.mark.parametrize("verb", ["repair", "undo"])
def test_killed_at_any_request_the_next_run_finishes_or_rolls_back(cloud: Cloud, verb: str) -> None:
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
            assert cloud.names() in (old, NEW)
            if not undoing:
                assert (cloud.names() == NEW) == (stage in ("commit", "done"))


def test_a_lost_answer_to_any_request_is_no_failure(cloud: Cloud) -> None:
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
        assert cloud.names() == NEW


def test_another_writer_is_never_overwritten(cloud: Cloud) -> None:
    """It writes the last name right before any list of blocks is committed."""
    store = fresh(cloud)
    lists = 0

    def count(method: str, key: str, is_after: bool) -> None:
        nonlocal lists
        lists += method == "commit_block_list" and is_after

    cloud.strike = count
    commit(store)
    for at in range(1, lists + 1):
        store = fresh(cloud)
        seen = 0

        def strike(method: str, key: str, is_after: bool, at: int = at) -> None:
            nonlocal seen
            if method == "commit_block_list" and not is_after:
                seen += 1
                if seen == at:
                    cloud.write(PREFIX + SHARDS[1], b"of another program")

        cloud.strike = strike
        failure_of(lambda store=store: commit(store))  # type: ignore[misc]
        cloud.strike = lambda method, key, is_after: None
        assert cloud.names()[PREFIX + SHARDS[1]] == digest((b"of another program",))


def test_blocks_that_another_writer_threw_away(cloud: Cloud) -> None:
    store = fresh(cloud)
    key = "optimizer.bin"

    def strike(method: str, path: str, is_after: bool) -> None:
        if method == "commit_block_list" and not is_after:
            cloud.uploads.clear()

    cloud.strike = strike
    with pytest.raises(ChangedError, match="another program wrote"):
        store.compose(
            key, [b"x", ObjectRange(key, 0, MIB, "")], expected=store.list()[key].etag, mark="m"
        )
