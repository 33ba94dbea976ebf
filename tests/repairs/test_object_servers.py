"""Repair and undo on real S3 servers: parts that the server copies, conditions, and the sizes of
parts.
"""

import hashlib
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckptfix import CkptfixError, Policy, check, repair, undo
from ckptfix.errors import LockedError, UsageError
from ckptfix.storage.s3 import S3Store
from ckptfix.storage.stores import Store, open_store
from tests.sampling import is_exhaustive, one_of
from tests.stores.servers import (
    Server,
    bucket,
    ministack,
    ministack_process,
    moto,
    moto_process,
    objects_of,
    upload_folder,
)
from tests.stores.simulated_s3 import KillAt, Killed
from tests.stores.weights import write_model

__all__ = ["bucket", "ministack", "ministack_process", "moto", "moto_process"]

pytestmark = pytest.mark.slow
FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"
SCENARIOS = {
    "drop and renumber": ("student-teacher-wrapper-safetensors", Policy()),
    "rename shards and index": ("sharded-gpt2-nested", Policy()),
    "a zip": ("lone-nested-train", Policy()),
}
MIB = 1 << 20


def names(store: Store) -> Mapping[str, bytes]:
    """Return every object but those of the journal."""
    return {
        key: data
        for key, data in objects_of(store).items()
        if not key.startswith(".ckptfix/") or key.endswith("manifest.json")
    }


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_byte_comes_back_on_a_server(bucket: str, name: str) -> None:
    fixture, policy = SCENARIOS[name]
    store = upload_folder(FIXTURES / fixture / "checkpoint", f"{bucket}/run/checkpoint_7")
    before = names(store)
    receipt = repair(store.url, policy=policy)
    assert receipt.steps
    assert receipt.status == check(store.url).status
    assert names(store) != before
    undo(store.url)
    assert objects_of(store) == before


@pytest.mark.parametrize("server", ["ministack", "moto"])
def test_parts_have_5_mib_and_only_they_travel(
    server: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    running: Server = request.getfixturevalue(server)
    write_model(tmp_path / "model.safetensors", 23 * MIB)
    url = f"{running.bucket()}/checkpoint"
    store = open_store(url)
    store.upload("model.safetensors", tmp_path / "model.safetensors")
    sha256 = hashlib.sha256(
        store.read("model.safetensors", 0, store.list()["model.safetensors"].size)
    )
    traffic = open_store(url).traffic
    is_moto = server == "moto"  # a server that would replace what another program writes meanwhile
    if is_moto:
        with pytest.raises(
            UsageError, match=r"ignores conditions.*nothing was changed.*--transfer$"
        ):
            repair(url)
        assert list(store.list()) == ["model.safetensors"]
    opened: list[Store] = []
    original = S3Store.__init__

    def remembered(self: S3Store, url: str) -> None:
        original(self, url)
        opened.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Store, "__init__", remembered)
        assert len(repair(url, transfer=is_moto).steps) == 1
        assert sum(one.traffic.up for one in opened) < 5.2 * MIB
        assert sum(one.traffic.down for one in opened) < 5.5 * MIB
        opened.clear()
        undo(url, transfer=is_moto)
        assert sum(one.traffic.up for one in opened) < 5.2 * MIB
        assert sum(one.traffic.down for one in opened) < 5.5 * MIB
    assert traffic.up == 0
    assert list(store.list()) == ["model.safetensors"]
    data = store.read("model.safetensors", 0, store.list()["model.safetensors"].size)
    assert hashlib.sha256(data).digest() == sha256.digest()


def test_metadata_is_passed_on_and_comes_back(bucket: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model.safetensors", MIB)
    store = open_store(f"{bucket}/checkpoint")
    assert isinstance(store, S3Store)
    data = (tmp_path / "model.safetensors").read_bytes()
    key = "checkpoint/model.safetensors"
    store.ask(
        "put_object",
        Key=key,
        Body=data,
        Metadata={"run": "seven"},
        ContentType="application/x-weights",
    )
    for verb in (repair, undo):
        verb(store.url)
        head = store.ask("head_object", Key=key)
        assert head["Metadata"]["run"] == "seven"
        assert head["ContentType"] == "application/x-weights"
    assert objects_of(store) == {"model.safetensors": data}


def strikes(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[str, str, bool], None]]:
    """Let what is in the list strike before and after every request."""
    hooks: list[Callable[[str, str, bool], None]] = []
    original = S3Store.ask

    def ask(self: S3Store, method: str, **words: Any) -> Any:
        for hook in hooks:
            hook(method, words.get("Key", ""), False)
        answer = original(self, method, **words)
        for hook in hooks:
            hook(method, words.get("Key", ""), True)
        return answer

    monkeypatch.setattr(S3Store, "ask", ask)
    return hooks


@pytest.mark.parametrize(
    ("name", "verb"), one_of((name, verb) for name in SCENARIOS for verb in (repair, undo))
)
def test_killed_at_a_request_the_next_run_finishes_or_rolls_back(
    bucket: str, monkeypatch: pytest.MonkeyPatch, name: str, verb: Callable[..., object]
) -> None:
    fixture, policy = SCENARIOS[name]
    hooks = strikes(monkeypatch)
    url = f"{bucket}/run"
    number = 0

    def fresh() -> Store:
        nonlocal number
        number += 1
        store = upload_folder(FIXTURES / fixture / "checkpoint", f"{url}/checkpoint_{number}")
        if verb is undo:
            repair(store.url, policy=policy)
        return store

    seen = 0

    def count(method: str, key: str, is_after: bool) -> None:
        nonlocal seen
        seen += is_after

    store = upload_folder(FIXTURES / fixture / "checkpoint", f"{url}/first")
    old = names(store)
    repair(store.url, policy=policy)
    new = names(store)
    store = fresh()
    hooks.append(count)
    verb(store.url)
    hooks.clear()
    step = 1 if is_exhaustive() else max(1, seen // 2)
    for at in range(1, seen + 1, step):
        store = fresh()
        hooks.append(KillAt(at, is_after=bool(at % 2)))
        with suppress(Killed):
            verb(store.url)
        hooks.clear()
        for key, data in names(store).items():
            assert data in (old.get(key), new.get(key)), f"{key} is half new"
        with suppress(CkptfixError):
            check(store.url)
        repair(store.url, break_lock=True)
        assert names(store) == new
        undo(store.url)
        assert objects_of(store) == old, f"killed at request {at}"


def test_a_writer_in_between_is_named_and_keeps_its_bytes(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = upload_folder(FIXTURES / "sharded-gpt2-nested" / "checkpoint", f"{bucket}/checkpoint")
    before = names(store)
    hooks = strikes(monkeypatch)
    name = next(name for name in before if name.endswith(".safetensors"))

    def write(method: str, key: str, is_after: bool) -> None:
        if method == "create_multipart_upload" and is_after:
            hooks.clear()
            store.put(name, b"a new save")

    hooks.append(write)
    with pytest.raises(CkptfixError, match="nothing was changed") as caught:
        repair(store.url)
    assert name in str(caught.value)
    assert objects_of(store) == {**before, name: b"a new save"}


def test_two_repairs_at_once(bucket: str) -> None:
    store = upload_folder(FIXTURES / "sharded-gpt2-nested" / "checkpoint", f"{bucket}/checkpoint")
    before = names(store)
    failures: list[CkptfixError] = []
    numbers: list[int | None] = []

    def work() -> None:
        try:
            numbers.append(repair(store.url).transaction)
        except CkptfixError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers.count(1) == 1, failures
    assert all(isinstance(one, LockedError) or "next" in str(one) for one in failures), failures
    undo(store.url)
    assert objects_of(store) == before
