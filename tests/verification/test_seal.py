"""What ``seal`` writes, keeps and refuses."""

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptfix import OperationError, UsageError, check, repair, seal, undo, verify
from ckptfix.checkpoint.manifest import Manifest, ManifestEntry, read_manifest
from ckptfix.storage.lock import folder_lock
from ckptfix.storage.paths import MANIFEST, UNSIGNED
from ckptfix.verification.verify_report import Kind, Outcome
from tests.storage.crash import Fault, points, strike
from tests.storage.folders import recover
from tests.verification.sealed import KINDS, flip, place, sealed, wrong

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"


def manifest_of(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def test_file_digests_are_those_of_sha256sum(tmp_path: Path) -> None:
    folder = sealed(tmp_path, "sharded")
    digests = manifest_of(folder).sha256
    assert set(digests) == {path.name for path in folder.iterdir() if path.is_file()}
    for name, digest in digests.items():
        assert digest == hashlib.sha256((folder / name).read_bytes()).hexdigest()


def test_a_manifest_that_no_save_wrote_claims_no_files(tmp_path: Path) -> None:
    manifest = manifest_of(sealed(tmp_path, "safetensors"))
    assert not manifest.is_of_a_save
    assert (manifest.world_size, manifest.step) == (0, 0)
    assert manifest.models[0].file == "model.safetensors"


def test_what_a_save_recorded_stays(tmp_path: Path) -> None:
    KINDS["safetensors"](tmp_path)
    entry = ManifestEntry(index=0, file="model.safetensors", type="my.Model")
    other = ManifestEntry(index=0, file="optimizer.bin", type="torch.optim.AdamW", models=(0,))
    size = (tmp_path / "model.safetensors").stat().st_size
    saved = Manifest(
        versions={"torch": "2"}, world_size=3, step=9, models=(entry,), optimizers=(other,),
        files={"model.safetensors": size},
    )  # fmt: skip
    (tmp_path / ".ckptfix").mkdir()
    (tmp_path / MANIFEST).write_bytes(saved.to_bytes())
    (tmp_path / "mine.txt").write_text("a file of the user's")
    before = verify(tmp_path)
    assert (before.status, before.is_verified) == (3, False)
    assert {item.outcome for item in before.items} == {Outcome.NOT_CHECKED}
    seal(tmp_path)
    manifest = manifest_of(tmp_path)
    assert (manifest.versions, manifest.world_size, manifest.step) == ({"torch": "2"}, 3, 9)
    assert manifest.optimizers == (other,)
    assert (manifest.models[0].type, len(manifest.models[0].digests)) == ("my.Model", 4)
    assert manifest.files == saved.files, "a later save takes the files in here for its own"
    assert set(manifest.sha256) == {"mine.txt", "model.safetensors"}
    assert verify(tmp_path).status == 0


def test_sealing_again_changes_nothing(tmp_path: Path) -> None:
    folder = sealed(tmp_path, "bin")
    status = (folder / MANIFEST).stat()
    assert seal(folder).written
    assert (folder / MANIFEST).stat() == status
    assert [path.name for path in (folder / ".ckptfix").iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_can_be_left_out_unless_the_manifest_has_them(tmp_path: Path, kind: str) -> None:
    folder = KINDS[kind](tmp_path)
    receipt = seal(folder, oms=True, tensors=False)
    assert (receipt.tensors, receipt.statements) == (0, UNSIGNED[:1])
    assert manifest_of(folder).models == ()
    report = verify(folder)
    assert report.status == 0
    assert report.count(Kind.FILE)[Outcome.MATCH] == len(manifest_of(folder).sha256)
    assert report.count(Kind.TENSOR)[Outcome.DIFFER] == 0
    piece = place(folder, "layers.1.weight")
    flip(piece.path, piece.offset)
    assert wrong(verify(folder))[piece.path.name][0] == "changed"
    assert not seal(folder, tensors=False).written
    flip(piece.path, piece.offset)
    assert seal(folder).tensors == 4
    assert seal(folder, tensors=False).tensors == 4, "what is there is compared, and stays"
    assert verify(folder).count(Kind.TENSOR)[Outcome.MATCH] == 4


def test_new_files_can_be_sealed_changed_ones_only_by_force(tmp_path: Path) -> None:
    folder = sealed(tmp_path, "safetensors")
    (folder / "more.txt").write_text("more")
    assert seal(folder).status == 0
    before = (folder / MANIFEST).read_bytes()
    flip(place(folder, "layers.1.weight").path, place(folder, "layers.1.weight").offset)
    receipt = seal(folder)
    assert (receipt.status, receipt.written) == (1, False)
    assert {item.name for item in receipt.differing} == {"layers.1.weight", "model.safetensors"}
    assert (folder / MANIFEST).read_bytes() == before
    assert seal(folder, force=True).status == 0
    assert verify(folder).status == 0


def test_a_damaged_folder_is_sealed_only_by_force(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(FIXTURES / "wrapper-safetensors" / "checkpoint", folder)
    receipt = seal(folder)
    assert receipt.status == 1
    assert [finding.code for finding in receipt.findings] == ["doubled-model"]
    assert not (folder / ".ckptfix").exists()
    assert seal(folder, force=True).status == 0


def test_what_is_unreadable_is_sealed_as_a_file_by_force(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model_1.safetensors"):
        save_file({"w": torch.full((900,), float(len(name)))}, tmp_path / name, {"format": "pt"})
    os.truncate(tmp_path / "model_1.safetensors", 500)
    receipt = seal(tmp_path, force=True)
    assert (receipt.files, receipt.tensors) == (2, 1)
    assert "model_1.safetensors" in receipt.unreadable[0]


def test_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    blob, folder = tmp_path / "blob", tmp_path / "snapshot"
    folder.mkdir()
    save_file({"w": torch.ones(4)}, blob, {"format": "pt"})
    (folder / "model.safetensors").symlink_to("../blob")
    seal(folder)
    assert manifest_of(folder).sha256 == {
        "model.safetensors": hashlib.sha256(blob.read_bytes()).hexdigest()
    }
    assert verify(folder).status == 0


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    KINDS["safetensors"](tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert seal(tmp_path).files == 1
    assert wrong(verify(tmp_path)) == {"pipe": ("not checked", None)}


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_mode_follows_the_umask(tmp_path: Path, umask: int) -> None:
    KINDS["safetensors"](tmp_path)
    before = os.umask(umask)
    try:
        seal(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / MANIFEST).stat().st_mode) == 0o666 & ~umask


def test_wrong_usage_and_another_process(tmp_path: Path) -> None:
    KINDS["safetensors"](tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        seal(tmp_path / "model.safetensors")
    with folder_lock(tmp_path), pytest.raises(OperationError, match="working on this folder"):
        seal(tmp_path)
    (tmp_path / ".ckptfix").mkdir()
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(OperationError, match="to continue without it: rm"):
        seal(tmp_path)


def sealing(folder: Path) -> Callable[[], None]:
    def run() -> None:
        seal(folder)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("repaired", [False, True])
def test_killed_anywhere_the_manifest_is_old_or_new(tmp_path: Path, repaired: bool) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "wrapper-safetensors" / "checkpoint", source)
    if repaired:
        repair(source)
    else:
        (source / "model_1.safetensors").unlink()
    old = None
    if not repaired:
        seal(source)
        (source / "new.txt").write_text("new")
        old = (source / MANIFEST).read_bytes()

    def fresh(name: str) -> Path:
        shutil.copytree(source, tmp_path / name)
        return tmp_path / name

    whole = fresh("whole")
    total = len(points(sealing(whole)))
    new = (whole / MANIFEST).read_bytes()
    assert total > 3
    seen = set()
    for at in range(total):
        for fault in (Fault.TORN,) if at % 2 else (Fault.KILL_BEFORE,):
            folder = fresh(f"{at}-{fault.name}")
            strike(sealing(folder), at, fault)
            if any(finding.code == "interrupted-repair" for finding in check(folder).findings):
                with folder_lock(folder):
                    recover(folder)
            data = (folder / MANIFEST).read_bytes() if (folder / MANIFEST).exists() else None
            assert data in (old, new), (at, fault)
            seen.add(data)
            assert seal(folder).status == 0
            assert verify(folder).status == 0
            shutil.rmtree(folder)
    assert seen == {old, new}


def test_a_seal_after_a_repair_is_taken_back_first(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(FIXTURES / "wrapper-safetensors" / "checkpoint", folder)
    repair(folder)
    receipt = seal(folder)
    assert receipt.transaction == 2
    assert verify(folder).status == 0
    assert undo(folder).remaining == 1
    assert not (folder / MANIFEST).exists()
    assert undo(folder).remaining == 0
    assert (folder / "model_1.safetensors").exists()


@pytest.mark.slow
def test_no_torch_and_no_numpy_is_needed(tmp_path: Path) -> None:
    folder = sealed(tmp_path, "safetensors")
    for verb in ("seal", "verify"):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "ckptfix", verb, str(folder), "--json"],
            capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert json.loads(done.stdout)["status"] == 0
        loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert not loaded & {"torch", "accelerate", "numpy"}


def test_tensors_in_a_report_are_counted(tmp_path: Path) -> None:
    assert verify(sealed(tmp_path, "dict")).count(Kind.TENSOR)[Outcome.MATCH] == 4
