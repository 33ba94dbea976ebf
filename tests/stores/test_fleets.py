"""Fleets in stores: a listing is as good as the folders, and what lies unchanged is neither opened
nor made.
"""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix.storage import stores
from ckptfix.storage.store_files import StoreFiles
from ckptfix.storage.stores import TRAFFIC, Store, open_store
from ckptfix.verification.seal import seal
from tests.commanding import Said, said
from tests.stores.servers import QUICK, upload_folder

__all__ = ["said"]

FIXTURES = Path(__file__).parents[2] / "fixtures"
CLEAN = FIXTURES / "accelerate-1.15.0" / "clean-single-process" / "checkpoint"


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(stores, "PATIENCE", QUICK)


@pytest.fixture
def url() -> str:
    """URL of a new prefix in the memory of this process."""
    return f"memory://{os.urandom(6).hex()}/runs"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs of checkpoints: sealed ones, one in another, and one that lacks what its neighbours
    have.
    """
    for number in range(1, 5):
        folder = shutil.copytree(CLEAN, tmp_path / "runs" / "one" / f"checkpoint_{number}")
        weights = bytearray((folder / "model.safetensors").read_bytes())
        weights[-1] ^= number
        (folder / "model.safetensors").write_bytes(weights)
        optimizer = torch.load(folder / "optimizer.bin")
        for state in optimizer["state"].values():
            state["exp_avg"] += number
        torch.save(optimizer, folder / "optimizer.bin")
    (tmp_path / "runs" / "one" / "checkpoint_3" / "optimizer.bin").unlink()
    for number in (1, 2):
        assert seal(tmp_path / "runs" / "one" / f"checkpoint_{number}").status == 0
    shutil.copytree(CLEAN, tmp_path / "runs" / "two")
    shutil.copytree(CLEAN, tmp_path / "runs" / "two" / "more" / "checkpoint_1")
    return tmp_path / "runs"


def documents(said: Said, *arguments: object) -> list[dict[str, Any]]:
    _, out, _ = said(*arguments, "--format", "jsonl")
    return [json.loads(line) for line in out.splitlines()]


def test_a_listing_is_looked_through_as_folders_are(
    runs: Path, url: str, said: Said, tmp_path: Path
) -> None:
    for name in (
        "interrupted-save-mixed",
        "staging-folder",
        "doubled-model",
        "truncated-file-dcp",
    ):
        shutil.copytree(FIXTURES / "golden" / name, runs / name)
    # A save counts as running for a day, and an upload is new in a checkout that is older.
    for path in (runs / "staging-folder").rglob("*"):
        os.utime(path)
    zero = next((FIXTURES / "deepspeed-0.18.2").glob("*/checkpoint"))
    shutil.copytree(zero / "pytorch_model", runs / "engine" / "global_step5")
    (runs / "engine" / "latest").write_text("global_step5")
    (runs / "notes").mkdir()
    (runs / "notes" / "latest").write_text("nothing of DeepSpeed")
    upload_folder(runs, url)
    here, there = (documents(said, "check", "-r", where) for where in (runs, url))
    for one in (*here, *there):  # a store is spared the local headers, and says so
        words = one.get("not_checked", [])
        one["not_checked"] = [
            text for text in words if not text.startswith("local headers of records")
        ]
        if "counts" in one:
            one["counts"]["not_checked"] = len(one["not_checked"])
            one["counts"]["notes"] = sum(each["severity"] == "note" for each in one["findings"])
    assert json.loads(json.dumps(here).replace(str(runs), url)) == there
    assert len(there) == 12
    missing = next(one for one in there if one["path"].endswith("one/checkpoint_3"))
    assert [one["code"] for one in missing["findings"]] == ["incomplete-checkpoint"]


def test_each_object_is_read_once_and_one_listing_serves_all(
    runs: Path, url: str, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = upload_folder(runs, url).list().keys()
    read: Counter[str] = Counter()
    real = Store.read

    def counting(store: Store, key: str, *arguments: Any, **options: Any) -> bytes:
        read[f"{store.url}/{key}".removeprefix(f"{url}/")] += 1
        return real(store, key, *arguments, **options)

    monkeypatch.setattr(Store, "read", counting)
    for verb in (["check", "-r"], ["scrub"]):
        read.clear()
        assert said(*verb, url)[0] == 1
        assert read == Counter(keys)


def test_what_is_unchanged_is_known_by_the_listing_alone(
    runs: Path, url: str, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_folder(runs, url)
    first = documents(said, "scrub", url)
    with monkeypatch.context() as patch:
        patch.setattr(StoreFiles, "below", None)
        before = TRAFFIC.requests
        again = documents(said, "scrub", url, "--max-age", "1d")
        assert TRAFFIC.requests == before + 1
    assert [one["verdict"] for one in again[:-1]] == [one["verdict"] for one in first[:-1]]
    assert again[-1]["summary"]["kept"] == 6
    assert again[-1]["summary"]["data"]["before"] == again[-1]["summary"]["data"]["files"] == 6


def test_what_is_due_is_read_of_what_is_unchanged(runs: Path, said: Said) -> None:
    """A unit that no run has read yet is known, so that the listing and the state alone say that it
    is due.
    """
    first = documents(said, "scrub", runs, "--read-data-subset", "0/3")[-1]["summary"]["data"]
    assert (first["files"], first["read"] + first["never"]) == (6, 6)
    left = [
        documents(said, "scrub", runs, "--read-data-subset", f"{number}/3", "--max-age", "1d")[-1][
            "summary"
        ]
        for number in (1, 2)
    ]
    assert first["read"] + sum(one["data"]["read"] for one in left) == 6
    assert (left[-1]["data"]["never"], left[-1]["data"]["before"]) == (
        0,
        6 - left[-1]["data"]["read"],
    )
    last = documents(said, "scrub", runs, "--max-age", "1d")[-1]["summary"]
    assert (last["kept"], last["data"]["read"], last["data"]["before"]) == (6, 0, 6)


def test_damage_of_what_is_unchanged_counts_again(runs: Path, url: str, said: Said) -> None:
    store = upload_folder(runs, url)
    data = bytearray(store.read("one/checkpoint_2/model.safetensors", 0, 604))
    data[-1] ^= 1
    store.put("one/checkpoint_2/model.safetensors", bytes(data))
    store.delete("one/checkpoint_1/random_states_0.pkl")
    found = [
        {
            one["path"].removeprefix(f"{url}/one/"): one["differences"]
            for one in documents(said, "scrub", url, *options)[:-1]
        }
        for options in ((), ("--max-age", "1d"), ("--read-data-subset", "0%"))
    ]
    assert found[0] == found[1] == found[2]
    assert list(found[0]["checkpoint_2"]) == ["model.safetensors"]
    assert "is missing" in str(found[0]["checkpoint_1"])


def test_a_checkpoint_that_is_removed_meanwhile_is_counted(
    runs: Path, url: str, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run keeps its last checkpoints, and removes the others: in a store as on a disk."""
    store = upload_folder(runs, url)
    keys = [key for key in store.list() if key.startswith(("one/checkpoint_1/", "two/optimizer"))]

    def rotated(*arguments: Any, **options: Any) -> Any:
        for key in keys:
            store.delete(key)
        return below(*arguments, **options)

    below = StoreFiles.below
    monkeypatch.setattr("ckptfix.cli.scrub.threads_for", lambda paths: 1)
    monkeypatch.setattr(StoreFiles, "below", rotated)
    *ones, last = documents(said, "scrub", url)
    verdicts = {
        one["path"].removeprefix(f"{url}/"): one.get("verdict", one.get("error", ""))
        for one in ones
    }
    assert verdicts["one/checkpoint_1"] == "removed"
    assert verdicts["one/checkpoint_2"] == "clean"
    assert "optimizer.bin changed while it was read" in verdicts["two"]
    assert (last["summary"]["removed"], last["summary"]["failed"], last["status"]) == (1, 1, 3)


def test_an_object_that_no_folder_can_hold_is_of_its_checkpoint(url: str, said: Said) -> None:
    upload_folder(CLEAN, f"{url}/one")
    upload_folder(CLEAN, f"{url}/two")
    store = open_store(url)
    store._files.store[f"{store._base}/two//model.bin"] = store._files.store[
        f"{store._base}/two/optimizer.bin"
    ]
    for verb in (["check", "-r"], ["scrub"]):
        status, out, err = said(*verb, url)
        assert (status, err) == (3, "")
        assert out.count("'/model.bin': an object of") == 1
        assert "could not finish: '/model.bin'" in out
