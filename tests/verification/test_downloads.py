"""Downloads of the real client of the Hugging Face hub, from a small hub on this machine, verified
without a seal.
"""

import importlib
import json
import os
import random
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfix import CheckReport, VerifyReport, check, seal, verify
from ckptfix.checkpoint.downloads import read_download
from ckptfix.storage import stores
from ckptfix.tensors.hashing import GIT, FileJob, hash_all
from ckptfix.verification.verify_report import Change, Outcome
from tests.commanding import Said, said
from tests.stores.servers import QUICK, upload_folder
from tests.stores.simulated_hub import REPO, Hub, hub

__all__ = ["hub", "said"]

huggingface_hub: Any = pytest.importorskip("huggingface_hub")

CONFIG = json.dumps(
    {"architectures": ["LlamaModel"], "model_type": "llama", "hidden_size": 8}
).encode()
TOKENIZER = json.dumps({"vocab": {str(number): number for number in range(500)}}).encode()

SHARD, OTHER = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

Download = Callable[[], Path]


def weights(layers: range, seed: int = 0) -> bytes:
    """Return a safetensors file with one weight for each layer."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for number, layer in enumerate(layers):
        place = {
            "dtype": "F32",
            "shape": [16, 16],
            "data_offsets": [number * 1024, number * 1024 + 1024],
        }
        header[f"layers.{layer}.mlp.up_proj.weight"] = place
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    numbers = random.Random(f"{layers} {seed}")
    values = struct.pack(
        f"<{256 * len(layers)}f", *(numbers.uniform(-1, 1) for _ in range(256 * len(layers)))
    )
    return struct.pack("<Q", len(head)) + head + values


@pytest.fixture
def repo(hub: Hub) -> Hub:
    """A repository with a model in two shards, a head below it, and a long tokenizer, which is in
    LFS.
    """
    shards = {SHARD: weights(range(4)), OTHER: weights(range(4, 10))}
    places = {
        f"layers.{layer}.mlp.up_proj.weight": SHARD if layer < 4 else OTHER for layer in range(10)
    }
    index = {"metadata": {"total_size": 10240}, "weight_map": places}
    hub.write(
        {
            ".gitattributes": b"*.safetensors filter=lfs\n",
            "README.md": b"# a model\n",
            "config.json": CONFIG,
            "tokenizer.json": TOKENIZER,
            **shards,
            "model.safetensors.index.json": json.dumps(index).encode(),
            "extra/value_head.safetensors": weights(range(1), 1),
        }
    )
    return hub


@pytest.fixture(params=["local", "cache"])
def download(request: pytest.FixtureRequest, repo: Hub, tmp_path: Path) -> Download:
    """Download the repository into a folder, or into the cache."""
    return (lambda: local(tmp_path)) if request.param == "local" else (lambda: cached(tmp_path))


def local(tmp_path: Path, **words: Any) -> Path:
    return Path(huggingface_hub.snapshot_download(REPO, local_dir=tmp_path / "local", **words))


def cached(tmp_path: Path, **words: Any) -> Path:
    return Path(huggingface_hub.snapshot_download(REPO, cache_dir=tmp_path / "cache", **words))


def flip(path: Path, at: int = -100) -> None:
    """Change a byte as a disk does: the time of the file stays."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.resolve().write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def outcomes(report: VerifyReport, outcome: Outcome) -> set[str]:
    return {item.name for item in report.items if item.outcome is outcome}


def words_of(report: VerifyReport | CheckReport) -> str:
    return "\n".join(map(str, report.lines()))


def type_in(command: str) -> None:
    """Run a command as a user types it, with the hub that this process knows."""
    endpoint = importlib.import_module("huggingface_hub.constants").ENDPOINT
    variables = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
    subprocess.run(command, shell=True, check=True, env=variables, capture_output=True)


def test_a_download_is_verified_without_a_seal(download: Download, repo: Hub) -> None:
    folder = download()
    asked = len(repo.asked)
    report = verify(folder)
    assert (report.status, report.no_digest) == (0, "")
    assert outcomes(report, Outcome.MATCH) == {*repo.tree}, (
        "the files of the client are none of the folder"
    )
    assert report.hub is not None
    assert dict(report.hub.revisions) == {repo.head: len(repo.tree)}
    assert f"revision {repo.head}" in words_of(report)
    assert report.hub.repo == (REPO if "cache" in folder.parts else "")
    assert not report.hub.unvouched
    assert len(repo.asked) == asked, "nothing is asked of a network"
    assert check(folder).status == 0


def test_the_id_of_git_is_that_of_the_client(tmp_path: Path) -> None:
    sha = importlib.import_module("huggingface_hub.utils.sha")
    for size in (0, 1, 3 << 20):
        file = tmp_path / str(size)
        file.write_bytes(bytes(range(251)) * (size // 251) + b"x" * (size % 251))
        assert hash_all([FileJob(file, size, algorithm=GIT)])[0].digest == sha.git_hash(
            file.read_bytes()
        )


def test_the_damaged_file_alone_is_downloaded_again(download: Download, repo: Hub) -> None:
    folder = download()
    flip(folder / SHARD)
    report = verify(folder)
    assert report.status == 1
    assert outcomes(report, Outcome.DIFFER) == {SHARD}
    assert report.hub is not None
    (again,) = report.hub.again
    assert again in words_of(report)
    assert [word for word in shlex.split(again) if word.endswith((".safetensors", ".json"))] == [
        SHARD
    ]
    asked = len(repo.asked)
    type_in(again.replace("REPO", REPO))
    assert not [path for _, path in repo.asked[asked:] if "resolve" in path and SHARD not in path]
    assert verify(folder).status == 0


def test_a_file_of_a_snapshot_that_is_no_link_is_downloaded_again(
    repo: Hub, tmp_path: Path
) -> None:
    folder = cached(tmp_path)
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).unlink()
    (folder / SHARD).write_bytes(data[:-1] + b"!")
    report = verify(folder)
    assert outcomes(report, Outcome.DIFFER) == {SHARD}
    assert report.hub is not None
    (again,) = report.hub.again
    type_in(again)
    assert verify(folder).status == 0


def test_shards_in_each_others_place_are_told(download: Download, tmp_path: Path) -> None:
    folder = download()
    other = folder / OTHER
    (folder / SHARD).rename(tmp_path / "aside")
    other.rename(folder / SHARD)
    (tmp_path / "aside").rename(other)
    report = verify(folder)
    if "local" in folder.parts:
        assert {item.change for item in report.items if item.outcome is Outcome.DIFFER} == {
            Change.SWAPPED
        }
    else:
        assert report.status == 1, (
            "the links go with the files, and the shards are not those of the index"
        )


@pytest.mark.parametrize("name", ["config.json", "README.md", "tokenizer.json"])
def test_an_edited_text_is_listed_and_no_damage(download: Download, name: str) -> None:
    folder = download()
    text = (folder / name).read_text()
    (folder / name).resolve().write_text(
        text.replace("{", '{"mine": 1, ', 1) if name.endswith("json") else "mine"
    )
    os.utime(folder / name, (4e9, 4e9))
    report = verify(folder)
    assert (report.status, outcomes(report, Outcome.EDITED)) == (0, {name})
    assert outcomes(report, Outcome.DIFFER) == set()
    assert f" edited {name}: " in words_of(report)
    assert (": newer than its download" in words_of(report)) is ("local" in folder.parts)
    assert "no difference found in what was checked except 1 edited text" in words_of(report)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-40] + bytes(40),
        lambda data: b"\xff" + data,
        lambda data: b"",
        lambda data: b"version https://git-lfs.github.com/spec/v1\n",
    ],
    ids=["cut", "zeros", "no text", "empty", "pointer"],
)
def test_a_text_that_no_user_writes_is_damage(
    download: Download, damage: Callable[[bytes], bytes]
) -> None:
    folder = download()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).resolve().write_bytes(damage((folder / name).read_bytes()))
    report = verify(folder)
    assert report.status == 1
    assert outcomes(report, Outcome.DIFFER) == {"config.json", "tokenizer.json"}


def test_weights_that_became_text_are_damage(download: Download) -> None:
    folder = download()
    (folder / SHARD).resolve().write_text("<html>503</html>")
    assert outcomes(verify(folder), Outcome.DIFFER) == {SHARD}


def test_files_of_the_user_are_listed(download: Download) -> None:
    folder = download()
    (folder / "notes.txt").write_text("mine")
    shutil.copy(folder / SHARD, folder / "extra" / "model.safetensors")
    report = verify(folder)
    assert report.status == 0
    assert report.hub is not None
    assert report.hub.unvouched == ("extra/model.safetensors", "notes.txt")
    assert (
        "2 files ('extra/model.safetensors', 'notes.txt'): each has no digest from the hub, so "
        "it cannot be verified" in words_of(report)
    )


def test_a_folder_that_moved_or_was_copied(download: Download, tmp_path: Path) -> None:
    folder = download()
    home = folder if "local" in folder.parts else folder.parents[2]
    inside = folder.relative_to(home)
    (tmp_path / "elsewhere").mkdir()
    for name, how in (("moved", shutil.move), ("copied", copy_as_new)):
        shutil.copytree(home, tmp_path / "again", symlinks=True)
        how(tmp_path / "again", tmp_path / "elsewhere" / name)
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        report = verify(tmp_path / "elsewhere" / name / inside)
        assert (report.status, outcomes(report, Outcome.NOT_CHECKED)) == (0, set())


def copy_as_new(source: Path, target: Path) -> None:
    """Copy a folder as ``cp -r`` does: with links, and with new times."""
    subprocess.run(["cp", "-r", source, target], check=True)


def test_a_part_of_a_download(download: Download, repo: Hub) -> None:
    """A folder below, and a single file: they are compared with the same records."""
    folder = download()
    for path, number in ((folder / "extra", 1), (folder / SHARD, 1)):
        report = verify(path)
        assert report.hub is not None
        assert dict(report.hub.revisions) == {repo.head: number}
        assert outcomes(report, Outcome.MATCH)
        assert report.status == 0
    flip(folder / "extra" / "value_head.safetensors")
    report = verify(folder / "extra")
    assert report.status == 1
    assert report.hub is not None
    type_in(report.hub.again[0].replace("REPO", REPO))
    assert verify(folder / "extra").status == 0


def test_a_fine_tune_saved_over_a_download(repo: Hub, tmp_path: Path) -> None:
    """Weights and config are new: nothing is compared, as without records, and a seal takes the
    folder.
    """
    folder = local(tmp_path)
    for name in (SHARD, OTHER):
        flip(folder / name)
        os.utime(folder / name, (4e9, 4e9))
    alone = verify(folder)
    assert alone.status == 1, "all shards can be damaged, too"
    assert "a save overwrote them, or all of them are damaged" in words_of(alone)
    (folder / "config.json").write_text(
        json.dumps(json.loads(CONFIG) | {"transformers_version": "4.46.0"})
    )
    os.utime(folder / "config.json", (4e9, 4e9))
    report = verify(folder)
    assert report.status == 3
    assert f"config.json of revision {repo.head}; next: ckptfix seal" in report.no_digest
    assert verify(folder, data=True).status == 0
    receipt = seal(folder)
    assert receipt.written
    assert "not compared: a save overwrote the downloaded weights and config.json of" in "\n".join(
        map(str, receipt.lines())
    )
    assert verify(folder).status == 0


SAVED_OVER = {
    "an adapter": ({"adapter_model.safetensors": "adapter_config.json"}, {}),
    "a part of a pipeline": (
        {"unet/diffusion_pytorch_model.safetensors": "unet/config.json"},
        {"vae/diffusion_pytorch_model.safetensors": "vae/config.json"},
    ),
    "a part with the config above": (
        {"model.safetensors": "config.json", "2_Dense/model.safetensors": "config.json"},
        {},
    ),
}
"""Name -> weights that were saved over and those that were not -> the config of each."""


@pytest.mark.parametrize("name", SAVED_OVER)
def test_a_model_saved_over_its_download_is_not_downloaded_again(
    name: str, hub: Hub, tmp_path: Path
) -> None:
    """The command to download it again, over the fine-tune, came first: only ``config.json`` was
    looked at.
    """
    saved, kept = SAVED_OVER[name]
    models = {**saved, **kept}
    content = b'{"peft_type": "POLY"}' if name == "an adapter" else CONFIG
    hub.write(
        {
            ".gitattributes": b"*.safetensors filter=lfs\n",
            **dict.fromkeys(models.values(), content),
            **{file: weights(range(number + 1)) for number, file in enumerate(models)},
        }
    )
    folder = local(tmp_path)
    assert verify(folder).status == 0
    for file, config in saved.items():
        flip(folder / file)
        (folder / config).write_bytes(content[:-1] + b', "by": "a save"}')
        for each in (file, config):
            os.utime(folder / each, (4e9, 4e9))
    report = verify(folder)
    assert report.status == 3
    configs = " and ".join(sorted({*saved.values()}))
    assert f"a save overwrote the downloaded weights and {configs} of " in report.no_digest
    assert "--force-download" not in words_of(report)
    for file in kept:
        flip(folder / file)
        report = verify(folder)
        assert report.status == 1
        (again,) = report.hub.again if report.hub is not None else ()
        assert f"{file} " in again
        assert not any(each in again for each in saved)
    for file in saved:
        flip(folder / file, -200)
        os.utime(folder / file, (1, 1))
    assert verify(folder).status == 1, "a disk keeps the time"


def test_records_without_weights_verify_nothing(repo: Hub, tmp_path: Path) -> None:
    """The config was downloaded, and the model trained here."""
    folder = local(tmp_path, allow_patterns=["*.json", "*.md"])
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").write_bytes(weights(range(2)))
    report = verify(folder)
    assert (report.status, report.hub) == (3, None)
    assert "there is no manifest; next: ckptfix seal" in report.no_digest


@pytest.mark.parametrize("way", ["by the listing", "of an older client"])
def test_a_cache_without_links(
    repo: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    monkeypatch.setattr(
        importlib.import_module("huggingface_hub.file_download"),
        "are_symlinks_supported",
        lambda folder=None: False,
    )
    folder = cached(tmp_path)
    assert not (folder / SHARD).is_symlink()
    if way == "of an older client":
        shutil.rmtree(folder.parents[1] / "trees")
        assert (verify(folder).status, verify(folder).hub) == (3, None)
        return
    assert verify(folder).status == 0
    assert check(folder).status == 0
    flip(folder / SHARD)
    assert outcomes(verify(folder), Outcome.DIFFER) == {SHARD}


def test_the_name_of_a_xet_blob_is_no_sha256(repo: Hub, tmp_path: Path) -> None:
    """Caches of version 2 share the blobs of xet by another hash of 64 digits, behind the link with
    the sha256.
    """
    folder = cached(tmp_path)
    shared = importlib.import_module("huggingface_hub.utils._shared_blobs")
    blob = folder.parents[1] / "blobs" / os.readlink(folder / SHARD).rpartition("/")[2]
    assert shared.publish_blob_to_shared_store(
        blob_path=str(blob),
        xet_hash="ab" * 32,
        cache_dir=tmp_path / "cache",
        expected_size=blob.stat().st_size,
    )
    assert (folder / SHARD).resolve().name == "ab" * 32
    assert verify(folder).status == 0
    assert check(folder).status == 0
    # A link that leads there at once says nothing: nobody vouches for the file.
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(tmp_path / "cache" / "blobs" / "ab" / ("ab" * 32))
    shutil.rmtree(folder.parents[1] / "trees")
    report = verify(folder)
    assert (report.status, outcomes(report, Outcome.NOT_CHECKED)) == (0, {SHARD})


BAD: dict[str, Callable[[str, str], str | bytes]] = {
    "cut in the commit": lambda commit, etag: commit[:20],
    "cut in the etag": lambda commit, etag: f"{commit}\n{etag[:30]}",
    "cut before the time": lambda commit, etag: f"{commit}\n{etag}\n",
    "no number": lambda commit, etag: f"{commit}\n{etag}\nyesterday\n",
    "no time": lambda commit, etag: f"{commit}\n{etag}\nnan\n",
    "in quotes": lambda commit, etag: f'{commit}\n"{etag}"\n1.5\n',
    "weak": lambda commit, etag: f'{commit}\nW/"{etag}"\n1.5\n',
    "md5": lambda commit, etag: f"{commit}\n{etag[:32]}\n1.5\n",
    "of parts": lambda commit, etag: f"{commit}\n{etag[:32]}-7\n1.5\n",
    "not hexadecimal": lambda commit, etag: f"{commit}\n{'g' * 64}\n1.5\n",
    "a branch": lambda commit, etag: f"main\n{etag}\n1.5\n",
    "empty": lambda commit, etag: "",
    "no text": lambda commit, etag: b"\xff\x00" * 100,
    "huge": lambda commit, etag: f"{commit}\n{etag}\n1.5\n" + "x" * (1 << 20),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_record_that_is_none_vouches_for_nothing(repo: Hub, tmp_path: Path, bad: str) -> None:
    folder = local(tmp_path)
    record = folder / ".cache" / "huggingface" / "download" / f"{SHARD}.metadata"
    commit, etag, _ = record.read_text().splitlines()
    data = BAD[bad](commit, etag)
    record.write_bytes(data if isinstance(data, bytes) else data.encode())
    flip(folder / SHARD)
    report = verify(folder)
    assert (report.status, outcomes(report, Outcome.NOT_CHECKED)) == (0, {SHARD})
    assert f"{SHARD}: cannot be verified: its download record {SHARD}.metadata " in words_of(report)
    assert check(folder).status == 0


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a broken link", "no permission"])
def test_a_record_that_is_no_file(repo: Hub, tmp_path: Path, kind: str) -> None:
    folder = local(tmp_path)
    record = folder / ".cache" / "huggingface" / "download" / f"{SHARD}.metadata"
    record.unlink()
    if kind == "a folder":
        record.mkdir()
    elif kind == "a pipe":
        os.mkfifo(record)
    elif kind == "a broken link":
        record.symlink_to("nowhere")
    elif os.geteuid() == 0:
        pytest.skip("root may read everything")
    else:
        record.touch(mode=0)
    report = verify(folder)
    assert (report.status, outcomes(report, Outcome.NOT_CHECKED)) == (0, {SHARD})


@pytest.mark.parametrize(
    "listing",
    [
        b"",
        b"[]",
        b"{}",
        b'{"format_version": 1, "files": []}',
        b"[" * 100_000,
        b'{"files": {"a": 1}}',
    ],
)
def test_a_listing_that_is_none(repo: Hub, tmp_path: Path, listing: bytes) -> None:
    folder = cached(tmp_path)
    (folder.parents[1] / "trees" / f"{folder.name}.json").write_bytes(listing)
    (folder / "README.md").unlink()
    (folder / "README.md").write_text("mine")
    report = verify(folder)
    assert (report.status, outcomes(report, Outcome.NOT_CHECKED)) == (0, {"README.md"})


def test_a_blob_with_another_name(repo: Hub, tmp_path: Path) -> None:
    folder = cached(tmp_path)
    blob = folder.parents[1] / "blobs" / "W-not-a-digest"
    (folder / SHARD).resolve().rename(blob)
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(blob)
    report = verify(folder)
    assert (report.status, outcomes(report, Outcome.NOT_CHECKED)) == (0, {SHARD})
    assert "'W-not-a-digest', which is neither a sha256 nor a git object id" in words_of(report)


def test_two_revisions_are_named(repo: Hub, tmp_path: Path) -> None:
    folder = local(tmp_path)
    first = repo.head
    repo.write({"README.md": b"# a better model\n"})
    huggingface_hub.hf_hub_download(REPO, "README.md", local_dir=folder)
    report = verify(folder)
    assert report.status == 0
    assert report.hub is not None
    assert dict(report.hub.revisions) == {first: 7, repo.head: 1}
    assert f"revisions {first} and {repo.head}" in words_of(report)
    for name in ("README.md", SHARD):
        (folder / name).write_bytes(b"\xff")
    again = verify(folder).hub
    assert again is not None
    assert sorted(again.again) == sorted(
        f"hf download REPO {name} --revision {commit} --force-download --local-dir {folder}"
        for name, commit in ((SHARD, first), ("README.md", repo.head))
    )


def test_a_file_that_the_user_deleted(repo: Hub, tmp_path: Path) -> None:
    folder = local(tmp_path)
    shutil.rmtree(folder / "extra")
    (folder / "README.md").unlink()
    report = verify(folder)
    assert report.status == 0
    assert report.hub is not None
    assert report.hub.gone == ("README.md", "extra/value_head.safetensors")
    assert (
        "files deleted since the download: 'README.md', 'extra/value_head.safetensors'"
        in words_of(report)
    )
    for shard in folder.glob("model*"):
        shard.unlink()
    report = verify(folder)
    assert report.status == 1
    assert SHARD in outcomes(report, Outcome.DIFFER)
    for path in [one for one in folder.iterdir() if one.is_file()]:
        path.unlink()
    report = verify(folder)
    assert report.status == 1
    assert f"of revision {repo.head}" in words_of(report)


def test_a_clone_with_pointers_of_lfs(repo: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    (folder / ".git" / "lfs" / "objects").mkdir(parents=True)
    for name, file in repo.commits[repo.head].items():
        (folder / name).parent.mkdir(exist_ok=True)
        pointer = (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{file.etag}\nsize "
            f"{len(file.data)}\n"
        )
        (folder / name).write_bytes(pointer.encode() if file.is_large else file.data)
    assert verify(folder).hub is None
    assert "not-a-tensor-file" in {finding.code for finding in check(folder).findings}
    assert "interrupted-save" not in {finding.code for finding in check(folder).findings}


def test_a_seal_says_what_is_proven(download: Download, repo: Hub) -> None:
    folder = download()
    (folder / "notes.txt").write_text("mine")
    receipt = seal(folder)
    assert (receipt.written, receipt.proven) == (True, len(repo.tree))
    revision = f"revision {repo.head}{'' if 'local' in folder.parts else f' of {REPO}'}"
    assert f"proven by the hub's digests of {revision}: {len(repo.tree)} files" in "\n".join(
        map(str, receipt.lines())
    )
    report = verify(folder)
    assert (report.status, report.hub) == (0, None)
    manifest = json.loads((folder / ".ckptfix" / "manifest.json").read_text())
    assert {*manifest["sha256"]} == {*repo.tree, "notes.txt"}
    etags = {name: file.etag for name, file in repo.commits[repo.head].items() if file.is_large}
    assert etags.items() <= manifest["sha256"].items()


def test_a_sealed_folder_may_be_downloaded_again(repo: Hub, tmp_path: Path) -> None:
    """The client writes its records anew, and adds some: they are no part of the folder."""
    folder = local(tmp_path)
    seal(folder)
    repo.write({"README.md": b"# a better model\n"})
    local(tmp_path, allow_patterns=["config.json"])
    assert verify(folder).status == 0


def test_a_seal_of_version_0_5_has_the_records_of_the_client(repo: Hub, tmp_path: Path) -> None:
    folder = local(tmp_path)
    seal(folder)
    manifest = folder / ".ckptfix" / "manifest.json"
    document = json.loads(manifest.read_text())
    record = ".cache/huggingface/download/README.md.metadata"
    document["sha256"][record] = "0" * 64
    manifest.write_text(json.dumps(document))
    assert seal(folder).written
    assert record not in json.loads(manifest.read_text())["sha256"]


def test_a_seal_refuses_what_is_not_the_download(download: Download) -> None:
    folder = download()
    flip(folder / SHARD)
    receipt = seal(folder)
    assert not receipt.written
    assert [item.name for item in receipt.differing] == [SHARD]
    assert "differs from revision" in "\n".join(map(str, receipt.lines()))
    assert seal(folder, force=True).written
    assert verify(folder).status == 0


def test_ranges_keep_the_digest_of_the_hub(
    repo: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("ckptfix.verification.seal")
    monkeypatch.setattr(module, "RANGE", 1000)
    folder = local(tmp_path)
    assert seal(folder, ranges=True).ranges
    manifest = json.loads((folder / ".ckptfix" / "manifest.json").read_text())
    assert manifest["sha256"][SHARD] == repo.commits[repo.head][SHARD].etag
    assert manifest["ranges"][SHARD]


def test_a_download_that_was_uploaded_to_a_store(
    repo: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    folder, url = local(tmp_path), f"memory://{os.urandom(6).hex()}/run"
    upload_folder(folder, url)
    report = verify(url)
    assert report.status == 0
    assert outcomes(report, Outcome.MATCH) == {*repo.tree}
    flip(folder / SHARD)
    (folder / "README.md").write_text("mine")
    url = f"memory://{os.urandom(6).hex()}/run"
    upload_folder(folder, url)
    report = verify(url)
    assert (report.status, outcomes(report, Outcome.DIFFER)) == (1, {SHARD})
    assert report.hub is not None
    assert report.hub.again == (
        f"hf download REPO {SHARD} --revision {repo.head} --force-download",
    )
    assert "newer than" not in words_of(report), "the times are those of the upload"


def test_what_json_has(repo: Hub, tmp_path: Path, said: Said) -> None:
    folder = local(tmp_path)
    (folder / "notes.txt").write_text("mine")
    flip(folder / SHARD)
    document = json.loads(said("verify", "--json", folder)[1])
    assert document["hub"] == {
        "repo": "",
        "type": "model",
        "revisions": {repo.head: 8},
        "unvouched": ["notes.txt"],
        "gone": [],
        "next": [
            f"hf download REPO {SHARD} --revision {repo.head} --force-download --local-dir {folder}"
        ],
    }
    shutil.rmtree(folder / ".cache")
    assert "hub" not in json.loads(said("verify", "--json", folder)[1])


@pytest.mark.parametrize(
    ("name", "repo_id", "kind"),
    [
        ("models--gpt2", "gpt2", "model"),
        ("datasets--me--x.y", "me/x.y", "dataset"),
        ("spaces--a--b", "a/b", "space"),
    ],
)
def test_the_repository_is_that_of_the_cache(
    tmp_path: Path, name: str, repo_id: str, kind: str
) -> None:
    client = importlib.import_module("huggingface_hub.file_download")
    assert client.repo_folder_name(repo_id=repo_id, repo_type=kind) == name
    folder = tmp_path / name / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    found = read_download(folder, [])
    assert found is not None
    assert (found.place.repo, found.place.kind) == (repo_id, kind)
    again = found.place.again(["a b.bin"], "0" * 40)
    option = f" --repo-type {kind}" if kind != "model" else ""
    assert (
        again == f"hf download {repo_id} 'a b.bin'{option} --revision {'0' * 40} --force-download "
        f"--cache-dir {tmp_path}"
    )


def test_checkpoints_of_training_are_no_downloads(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(weights(range(2)))
    assert read_download(tmp_path, ["model.safetensors"]) is None
    assert verify(tmp_path).status == 3
