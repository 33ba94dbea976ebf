"""What a verb says of a checkpoint in a store is what it says of the same folder here.

Each test is of a place where a path of a store was taken for one of this machine.
"""

import io
import json
import os
import pickle
import shutil
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from ckptfix import check, latest_checkpoint
from ckptfix.checkpoint.latest import UNFINISHED
from ckptfix.cli import run
from ckptfix.diagnosis.resumable import instead_of
from ckptfix.errors import CkptfixError, ClosedError, StoreError
from ckptfix.storage import store_files, stores
from ckptfix.storage.files import Shown
from ckptfix.storage.parallel import in_turn
from ckptfix.storage.paths import JOURNAL
from ckptfix.storage.reading import open_reader
from ckptfix.storage.store_files import open_prefix
from ckptfix.storage.stores import ObjectInfo, Store, open_store
from tests.stores.servers import QUICK
from tests.stores.simulated_s3 import Cloud, cloud, open_simulated

__all__ = ["cloud"]

FIXTURES = Path(__file__).parents[2] / "fixtures"
GOLDEN = FIXTURES / "golden"
CLEAN = FIXTURES / "accelerate-1.15.0" / "clean-single-process" / "checkpoint"
DCP = FIXTURES / "dcp-2.13.0" / "fsdp2-clean" / "checkpoint"

Said = Callable[..., tuple[int, str]]


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new prefix in the memory of this process."""
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    return f"memory://{os.urandom(6).hex()}/run"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Return the exit status of a command and all that it wrote."""

    def say(*words: object) -> tuple[int, str]:
        status = run([str(word) for word in words])
        written = capsys.readouterr()
        return status, written.out + written.err

    return say


def put(url: str, objects: Path | Mapping[str, bytes]) -> str:
    if isinstance(objects, Path):
        top = objects
        objects = {
            str(path.relative_to(top)): path.read_bytes()
            for path in top.rglob("*")
            if path.is_file()
        }
    store = open_store(url)
    for key, data in objects.items():
        store.put(key, data)
    return url


def codes(document: str) -> list[list[str]]:
    """Return the codes of the findings of each checkpoint that a command found."""
    lines = [json.loads(text) for text in document.splitlines() if text.startswith("{")]
    return [[each["code"] for each in line["findings"]] for line in lines if "findings" in line]


def weights(seed: int, size: int = 4) -> bytes:
    torch.manual_seed(seed)
    written = io.BytesIO()
    torch.save({f"model.l{at}.weight": torch.randn(size, size) for at in range(12)}, written)
    return written.getvalue()


def test_a_run_in_a_store_has_the_findings_of_the_same_run_here(
    cloud: Cloud, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stale-save` reads weights of the save before: they were looked up in a listing that was
    closed, and the error was swallowed. Simulated: of S3, whose ETags are of the bytes.
    """
    for module in (stores, store_files):
        monkeypatch.setattr(module, "open_store", lambda url: open_simulated(cloud, url))
    for number in (1, 2, 3):
        save_folder = tmp_path / f"checkpoint_{number}"
        shutil.copytree(GOLDEN / "mixed-saves" / "checkpoint", save_folder)
        states = torch.load(save_folder / "optimizer.bin", weights_only=False)
        for state in states["state"].values():
            state["step"] = torch.full_like(state["step"], 3 * number)
            state["exp_avg"] = state["exp_avg"] + 0.1 * number
        torch.save(states, save_folder / "optimizer.bin")
    local = codes(said("check", "-r", tmp_path, "--format", "jsonl")[1])
    assert any("stale-save" in of_save for of_save in local)
    for path in tmp_path.rglob("*.*"):
        cloud.write(f"run/{path.relative_to(tmp_path)}", path.read_bytes())
    url = "s3://simulated/run"
    assert codes(said("check", "-r", url, "--format", "jsonl")[1]) == local


def test_a_closed_url_is_no_error_of_a_checkpoint(url: str) -> None:
    """Comparisons with other saves pass over a checkpoint that cannot be read: this fault of ours
    must not look like that.
    """
    place = open_prefix(put(url, CLEAN))
    place.files.close()
    with pytest.raises(ClosedError, match="no longer open"):
        (place / "optimizer.bin").is_file()
    assert not issubclass(ClosedError, (CkptfixError, OSError, ValueError))


def test_no_damaged_checkpoint_is_the_one_to_resume_from(url: str, said: Said) -> None:
    """`check -r` without `--data` leaves out the local headers of the records, each a request; the
    advice reads them as it always did.
    """
    good = weights(1, 300)
    entries = [
        entry
        for entry in zipfile.ZipFile(io.BytesIO(good)).infolist()
        if "/data/" in entry.filename and entry.file_size > 1000
    ]
    bad = bytearray(good)
    bad[entries[5].header_offset + 32] ^= 1
    others = {path.name: path.read_bytes() for path in CLEAN.iterdir()}
    del others["model.safetensors"]
    put(f"{url}/checkpoint_1", others | {"pytorch_model.bin": good})
    put(f"{url}/checkpoint_2", others | {"pytorch_model.bin": bytes(bad)})
    _, document = said("check", "-r", url, "--format", "jsonl")
    last = json.loads(document.splitlines()[-1])
    assert last["resume"][0]["checkpoint"] == f"{url}/checkpoint_1"
    with pytest.warns(UserWarning, match="passed over checkpoint_2"):
        assert latest_checkpoint(url) == f"{url}/checkpoint_1"


@pytest.mark.parametrize(
    "written",
    ["./model-00001-of-00002.safetensors", ".//model-00001-of-00002.safetensors",
     "sub/../model-00001-of-00002.safetensors", "sub/./a.safetensors", "none/../a.safetensors"],
)  # fmt: skip
def test_a_weight_map_leads_to_the_object_that_the_system_would_open(
    url: str, tmp_path: Path, said: Said, written: str
) -> None:
    shard = {"format": "pt"}
    objects = {
        "model-00001-of-00002.safetensors": save({"a.weight": torch.ones(4)}, shard),
        "model-00002-of-00002.safetensors": save({"b.weight": torch.ones(4)}, shard),
        "sub/a.safetensors": save({"a.weight": torch.ones(4)}, shard),
        "model.safetensors.index.json": json.dumps(
            {
                "metadata": {"total_size": 32},
                "weight_map": {
                    "a.weight": written,
                    "b.weight": "model-00002-of-00002.safetensors",
                },
            }
        ).encode(),
    }
    for key, data in objects.items():
        (tmp_path / key).parent.mkdir(exist_ok=True)
        (tmp_path / key).write_bytes(data)
    put(url, objects)
    place = open_prefix(url)
    assert (place / written).is_file() == (tmp_path / written).is_file()
    for verb in (["check"], ["verify"], ["repair", "--dry-run"]):
        here = said(*verb, tmp_path, "--format", "json")
        there = said(*verb, url, "--format", "json")
        assert there[0] == here[0]
    assert codes(said("check", url, "--format", "jsonl")[1]) == codes(
        said("check", tmp_path, "--format", "jsonl")[1]
    )


def test_paths_are_cut_as_those_of_the_system(url: str) -> None:
    place = open_prefix(put(url, {"sub/a": b"1", "b": b"1"}))
    sub = place / "sub"
    assert (sub / ".." / "b", sub / "." / "a", place / ".") == (place / "b", sub / "a", place)
    assert not (place / "none" / ".." / "b").exists()
    assert sorted([place / "b", sub]) == [place / "b", sub]
    with pytest.raises(TypeError):
        sorted([place, Path("a")])  # type: ignore[type-var]


def test_nothing_next_to_a_dcp_folder_is_listed(
    url: str, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may read one prefix may not be allowed to list the one above it."""
    folder = next(DCP.parent.rglob(".metadata")).parent
    put(f"{url}/checkpoint_1/{folder.name}", folder)
    children = Store.children

    def denied(self: Store, below: str = "") -> Any:
        if self.url == f"{url}/checkpoint_1":
            raise StoreError(f"{self.url}: AccessDenied")
        return children(self, below)

    monkeypatch.setattr(Store, "children", denied)
    for verb in ("check", "seal"):
        status, text = said(verb, f"{url}/checkpoint_1/{folder.name}")
        assert (status, "AccessDenied" in text) == (0, False), text


@pytest.mark.parametrize("form", ["sarif", "github"])
def test_verify_annotates_a_single_object(url: str, said: Said, form: str) -> None:
    """Asked whether it is a file after the URL was closed, it ended with status 3."""
    put(url, GOLDEN / "truncated-file" / "checkpoint")
    plain = said("verify", f"{url}/model.safetensors")
    status, text = said("verify", f"{url}/model.safetensors", "--format", form)
    assert status == plain[0] == 1
    assert "model.safetensors" in text
    assert "no longer open" not in text


def test_a_path_in_the_metadata_of_a_dcp_is_known(url: str, said: Said) -> None:
    class Written:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path, ("a", "b")

    source = next(DCP.parent.rglob(".metadata"))
    metadata = pickle.loads(source.read_bytes())
    metadata.storage_meta.checkpoint_id = Written()
    put(url, source.parent)
    open_store(url).put(".metadata", pickle.dumps(metadata))
    assert said("check", url)[0] == 0


def test_salvage_into_a_store_names_the_url_in_its_next_step(url: str, said: Said) -> None:
    put(
        f"{url}/old",
        {
            "model-00001-of-00002.safetensors": save({"a.weight": torch.ones(4)}),
            "model-00002-of-00002.safetensors": save({"b.weight": torch.ones(4)}),
            "model.safetensors.index.json": b'{"weight_map": {"a.we',
        },
    )
    _, text = said("salvage", f"{url}/old", f"{url}/new")
    assert f"ckptfix repair {url}/new" in text


def test_no_staging_folder_is_looked_for_next_to_a_url(url: str) -> None:
    put(f"{url}/checkpoint_1", CLEAN)
    put(f"{url}/checkpoint_2", CLEAN)
    put(f"{url}/checkpoint_2", {f"{JOURNAL}/{UNFINISHED}": b'["optimizer.bin"]'})
    place = open_prefix(url, lists=True)
    assert "checkpoint_1" in instead_of(place / "checkpoint_2")
    assert place.files.failures == []


def test_an_object_that_no_folder_can_hold_stays_known_while_a_repair_is_shown(url: str) -> None:
    store = open_store(put(url, CLEAN))
    store._files.store[f"{store._base}/empty/"] = store._files.store[f"{store._base}/optimizer.bin"]
    place = open_prefix(url, complete=False)
    before = place.files.unheld
    assert len(before) == 1
    info = place.files.info("optimizer.bin")
    assert isinstance(info, ObjectInfo)
    with place.files.showing("", {"optimizer.bin": Shown("optimizer.bin", info)}):
        assert place.files.unheld == before
    assert place.files.unheld == before


def test_a_bucket_is_not_next_to_itself(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    """A bucket can be named as a checkpoint is; what lies in it are no saves of its run."""
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    bucket = f"memory://checkpoint_{int.from_bytes(os.urandom(6), 'big')}"
    put(bucket, CLEAN)
    assert check(bucket).findings == ()
    surplus = {"custom_checkpoint_0.pkl": (CLEAN / "optimizer.bin").read_bytes()}
    for number in (8, 9):
        put(f"{bucket}/checkpoint_{number}", CLEAN)
        put(f"{bucket}/checkpoint_{number}", surplus)
    assert [finding.code for finding in check(bucket).findings] == []


def test_a_slash_after_a_broken_link_changes_nothing(tmp_path: Path, said: Said) -> None:
    os.symlink("nowhere", tmp_path / "broken.safetensors")
    plain = said("check", f"{tmp_path}/broken.safetensors")
    slashed = said("check", f"{tmp_path}/broken.safetensors/")
    assert plain == slashed
    assert plain[0] == 1


def test_threads_that_wait_for_a_store_hold_no_lock(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of `in_turn` waited for each other: one for its turn with the lock, one for the lock."""
    put(url, {f"d{number}/f.bin": b"1" * 100 for number in range(8)})
    place = open_prefix(url, lists=True)
    reading = Store.read_many

    def slow(self: Store, ranges: Any) -> list[bytes]:
        threading.Event().wait(0.01)
        return reading(self, ranges)

    monkeypatch.setattr(Store, "read_many", slow)

    def work(number: int) -> bytes:
        with open_reader(place / f"d{number}" / "f.bin") as reader:
            return reader.read(0, 10)

    results: list[bytes] = []

    def all_of_them() -> None:
        results.extend(data for _, data in in_turn(range(8), work, threads=4, of_store=True))

    thread = threading.Thread(target=all_of_them, daemon=True)
    thread.start()
    thread.join(30)
    assert results == [b"1" * 10] * 8
