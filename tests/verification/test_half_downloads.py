"""Downloads of the hub's client that did not end: into a folder, and into its cache with a listing
or without.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ckptfix import check, seal, verify
from ckptfix.checkpoint import downloads
from ckptfix.diagnosis import unfinished_copies
from tests.commanding import Said, said
from tests.stores.simulated_hub import REPO, Hub, hub
from tests.verification.test_downloads import (
    CONFIG,
    OTHER,
    SHARD,
    TOKENIZER,
    cached,
    local,
    repo,
    type_in,
    weights,
)

__all__ = ["hub", "repo", "said"]

pytest.importorskip("huggingface_hub")


def half(folder: Path, name: str, etag: str, size: int = 1000, process: str = ".1a2b3c4d") -> Path:
    """Leave a half file as a killed client does, under the name that the client itself gives it."""
    client = importlib.import_module("huggingface_hub._local_folder")
    paths = client.get_local_download_paths(folder, name)
    paths.lock_path.touch()
    path = paths.incomplete_path(etag)
    path = Path(path.with_name(f"{path.stem}{process}.incomplete"))
    path.write_bytes(bytes(size))
    return path


@pytest.mark.parametrize("process", ["", ".1a2b3c4d"], ids=["before 2.0", "2.4"])
def test_a_download_that_was_killed_and_resumed(repo: Hub, tmp_path: Path, process: str) -> None:
    folder = local(tmp_path, ignore_patterns=[SHARD])
    left = half(folder, SHARD, repo.commits[repo.head][SHARD].etag, process=process)
    report = check(folder)
    assert report.status == 1
    (finding,) = (finding for finding in report.findings if finding.code == "interrupted-save")
    text = f"{SHARD} was not downloaded completely: {left.relative_to(folder)} has 1000 B of it"
    assert str(finding) == text
    again = f"hf download REPO {SHARD} --revision {repo.head} --local-dir {folder}"
    assert again in finding.advice
    assert not seal(folder).written
    assert verify(folder).status == 1
    type_in(again.replace("REPO", REPO))
    assert left.exists()
    assert check(folder).status == 0
    assert not [one for one in check(folder).findings if one.code == "interrupted-save"]
    assert verify(folder).status == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "cache"])
def test_a_client_that_was_really_killed(repo: Hub, tmp_path: Path, kind: str) -> None:
    etag = repo.commits[repo.head][SHARD].etag
    killed = threading.Event()

    def strike(method: str, path: str) -> str | None:
        if method == "GET" and path == f"/cdn/{etag}":
            killed.wait(60)
            return "cut"
        return None

    repo.strike = strike
    words = (
        f"local_dir={str(tmp_path / 'local')!r}"
        if kind == "local"
        else f"cache_dir={str(tmp_path / 'cache')!r}"
    )
    code = f"import huggingface_hub; huggingface_hub.snapshot_download({REPO!r}, {words})"
    endpoint = importlib.import_module("huggingface_hub.constants").ENDPOINT
    variables = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    client = subprocess.Popen([sys.executable, "-c", code], env=variables)
    until = time.monotonic() + 60
    while not [*tmp_path.rglob("*.incomplete")] or not [*tmp_path.rglob(OTHER)]:
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(1)  # the other files of its threads
    client.kill()
    client.wait()
    killed.set()
    repo.strike = lambda method, path: None
    folder = (
        tmp_path / "local" if kind == "local" else next((tmp_path / "cache").glob("*/snapshots/*"))
    )
    report = check(folder)
    assert report.status == 1
    # Other files may be on their way, too.
    (finding,) = (
        each
        for each in report.findings
        if str(each).startswith(f"{SHARD} was not downloaded completely")
    )
    assert finding.code == "interrupted-save"
    type_in(finding.advice.partition(": ")[2].partition("; ")[0].replace("REPO", REPO))
    assert check(folder).status == 0
    assert verify(folder).status == 0


def test_nothing_but_a_half_file(repo: Hub, tmp_path: Path, said: Said) -> None:
    """The first file was never complete: it was a wrong usage, as if nothing was there."""
    half(tmp_path / "local", "model.safetensors", "ab" * 32)
    report = check(tmp_path / "local")
    assert [finding.code for finding in report.findings] == ["interrupted-save"]
    assert report.status == 1
    status, out, _ = said("check", "-r", tmp_path)
    assert (status, "was not downloaded completely" in out) == (1, True)
    status, out, _ = said("verify", tmp_path / "local")
    assert status == 1, out
    assert not seal(tmp_path / "local").written


@pytest.mark.parametrize("name", ["optimizer.pt", "model-00003-of-00003.safetensors", "vocab.txt"])
def test_a_part_that_was_stopped_is_a_warning(repo: Hub, tmp_path: Path, name: str) -> None:
    folder = local(tmp_path)
    half(folder, name, "ab" * 32)
    report = check(folder)
    assert report.status == 1
    assert [one.severity.value for one in report.findings if one.code == "interrupted-save"] == [
        "warning"
    ]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "onnx/model.onnx", "model.gguf"])
def test_a_second_format_that_was_stopped_is_a_note(repo: Hub, tmp_path: Path, name: str) -> None:
    folder = local(tmp_path)
    half(folder, name, "ab" * 32)
    report = check(folder)
    assert report.status == 0
    assert [one.severity.value for one in report.findings if one.code == "interrupted-save"] == [
        "note"
    ]
    assert verify(folder).status == 0
    assert seal(folder).written


def test_a_half_file_of_the_cache(repo: Hub, tmp_path: Path) -> None:
    folder = cached(tmp_path, ignore_patterns=["tokenizer.json"])
    etag = repo.commits[repo.head]["tokenizer.json"].etag
    blobs = folder.parents[1] / "blobs"
    (blobs / f"{etag}.1a2b3c4d.incomplete").write_bytes(bytes(10))
    (blobs / f"{'cd' * 32}.incomplete").write_bytes(
        bytes(10)
    )  # of another revision, by the listing of this one
    report = check(folder)
    assert report.status == 1
    (finding,) = (finding for finding in report.findings if finding.code == "interrupted-save")
    assert str(finding).startswith("tokenizer.json was not downloaded completely: ../../blobs/")
    type_in(finding.advice.partition(": ")[2])
    assert check(folder).status == 0
    shutil.rmtree(folder.parents[1] / "trees")
    assert halves_in(folder) == [], "a file came since, and it may be of another revision"
    os.utime(blobs / f"{'cd' * 32}.incomplete")
    report = check(folder)
    assert report.status == 0, (
        "without the listing it may be of another revision, and the weights are complete"
    )
    assert [one.severity.value for one in report.findings if one.code == "interrupted-save"] == [
        "note"
    ]


def without_listing(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> tuple[Path, Path]:
    """Return a snapshot in the cache of a client before 2.0, and a half file of an unknown one,
    newer than it.
    """
    hub.write({".gitattributes": b"*.safetensors filter=lfs\n", **files})
    folder = cached(tmp_path)
    shutil.rmtree(folder.parents[1] / "trees")
    part = folder.parents[1] / "blobs" / f"{'cd' * 32}.incomplete"
    part.write_bytes(bytes(10))
    return folder, part


def halves_in(folder: Path) -> list[str]:
    return [
        each.severity.value
        for each in check(folder).all_findings
        if each.code == "interrupted-save"
    ]


def test_a_half_file_of_a_pipeline_is_told_once(hub: Hub, tmp_path: Path) -> None:
    """It was told again for each model below, with a path through its folder."""
    listed = {"_class_name": "P", "unet": ["diffusers", "U"], "vae": ["diffusers", "V"]}
    of_model = json.dumps({"_class_name": "U", "_diffusers_version": "0.42.0"}).encode()
    files = {"model_index.json": json.dumps({**listed, "_diffusers_version": "0.42.0"}).encode()}
    for name in ("unet", "vae"):
        files |= {
            f"{name}/config.json": of_model,
            f"{name}/diffusion_pytorch_model.safetensors": weights(range(2), len(name)),
        }
    folder, part = without_listing(hub, tmp_path, files)
    assert halves_in(folder) == ["note"]
    part.unlink()
    assert halves_in(folder) == []


def test_an_older_half_file_is_of_no_file_here(hub: Hub, tmp_path: Path, said: Said) -> None:
    """A snapshot with a config alone got a warning for a download that was given up before, of
    whatever file.
    """
    folder, part = without_listing(
        hub, tmp_path, {"config.json": CONFIG, "tokenizer.json": TOKENIZER}
    )
    assert halves_in(folder) == ["warning"], "the client was killed at its first file of weights"
    os.utime(part, (1e9, 1e9))
    assert said("check", folder)[0] == 2, "as without the half file"
    assert said("check", "-r", tmp_path)[0] == 2
    os.utime(part)
    assert halves_in(folder) == ["warning"]
    later = folder.parent / ("e" * 40)
    shutil.copytree(folder, later, symlinks=True)
    times = (part.stat().st_mtime_ns + 1,) * 2
    os.utime(part, ns=times)
    os.utime(later, ns=times)
    assert said("check", folder)[0] == 2, "files of another revision came since"
    assert halves_in(later) == ["warning"]


def test_each_record_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All records were read for each folder with a half file: 200 folders took 4 seconds."""
    for number in range(20):
        part = half(tmp_path, f"d{number}/model.safetensors", "ab" * 32)
        part.with_name("config.json.metadata").write_text(f"{'a' * 40}\n{'b' * 40}\n1.0\n")
    read: list[Path] = []

    def read_start(path: Path, size: int) -> bytes:
        read.append(path)
        return path.read_bytes()[:size]

    monkeypatch.setattr(downloads, "read_start", read_start)
    assert len([*downloads.half_downloads(tmp_path)]) == 20
    assert len(read) == 20


def test_folders_and_listings_are_read_once_for_all_half_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing of the revision and the folder were gone through for each blob: 800 took
    seconds.
    """

    class Listing(dict[str, str]):
        times = 0

        def items(self) -> Any:
            Listing.times += 1
            return super().items()

    storage = tmp_path / "models--o--n"
    folder = storage / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    (storage / "blobs").mkdir()
    etags = {f"f{number}.msgpack": f"{number:064x}" for number in range(20)}
    for etag in etags.values():
        (storage / "blobs" / f"{etag}.incomplete").write_bytes(b"x")
    monkeypatch.setattr(downloads, "_tree", lambda place: Listing(etags))
    halves = [*downloads.half_downloads(folder)]
    assert (len(halves), Listing.times) == (20, 1)
    listed: list[Path] = []

    def names_in(path: Path) -> list[str]:
        listed.append(path)
        return []

    monkeypatch.setattr(unfinished_copies, "names_in", names_in)
    assert len([*unfinished_copies.half_downloaded(folder, halves, [])]) == 20
    assert listed == [folder]


def test_a_missing_blob_is_named(repo: Hub, tmp_path: Path) -> None:
    folder = cached(tmp_path)
    for name in ("tokenizer.json", "extra/value_head.safetensors"):
        (folder / name).resolve().unlink()
    report = check(folder)
    assert report.status == 1
    (finding,) = (one for one in report.findings if one.code == "interrupted-save")
    assert str(finding).startswith(
        "extra/value_head.safetensors and 1 more file are links to blobs that do not exist"
    )
    type_in(finding.advice.partition(": ")[2])
    assert check(folder).status == 0
    assert verify(folder).status == 0


def test_a_snapshot_that_was_copied_without_its_blobs(repo: Hub, tmp_path: Path) -> None:
    shutil.copytree(cached(tmp_path), tmp_path / "alone", symlinks=True)
    report = check(tmp_path / "alone")
    assert report.status == 1
    (finding,) = (one for one in report.findings if one.code == "interrupted-save")
    assert (
        str(finding)
        == ".gitattributes and 6 more files are links to blobs that do not exist: the blobs were "
        "deleted, or the snapshot was copied without its blobs/"
    )
    assert "cp -rL" in finding.advice
    shutil.copytree(cached(tmp_path), tmp_path / "whole", symlinks=False)
    assert check(tmp_path / "whole").status == 0
    assert (verify(tmp_path / "whole").status, verify(tmp_path / "whole").hub) == (3, None)
