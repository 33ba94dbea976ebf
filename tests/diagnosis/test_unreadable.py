"""A file that may not be read is not damage: who may change that is named, and the other files are
still checked.
"""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptfix import check
from ckptfix.checkpoint.latest import incomplete
from ckptfix.cli import run
from ckptfix.errors import OperationError
from ckptfix.storage.lock import folder_lock
from tests.repairs.builders import write_safetensors
from tests.repairs.refused import nobody_may_read

FIXTURES = Path("fixtures")
WRAPPED = FIXTURES / "accelerate-1.15.0/wrapper-safetensors/checkpoint"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoint"
    shutil.copytree(WRAPPED, root)
    return root


def said(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_1.pkl"])
def test_check_is_not_finished_and_names_the_command(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model_1.safetensors").unlink()
    with nobody_may_read(folder / name):
        assert run(["check", str(folder)]) == 3
        words = said(capsys)
        assert f"{name}: cannot be read: permission denied (owner " in words
        assert "mode 0000" in words
        assert f"chmod a+r {folder / name}" in words
        assert "malformed" not in words
        assert "no error found" not in words
        assert run(["check", str(folder), "--json"]) == 3
        (document,) = json.loads(capsys.readouterr().out)["checkpoints"]
        assert document["status"] == 3
        assert document["findings"] == []
        assert document["unfinished"][0].startswith(f"{name}: cannot be read")


def test_other_files_are_still_checked(folder: Path) -> None:
    (folder / "optimizer.bin").write_bytes(b"")
    with nobody_may_read(folder / "random_states_0.pkl"):
        report = check(folder)
    assert {"identical-models", "not-a-tensor-file"} <= {
        finding.code for finding in report.findings
    }
    assert len(report.unfinished) == 1
    assert report.status == 3


def test_a_shard_and_an_index(tmp_path: Path) -> None:
    source = FIXTURES / "accelerate-1.15.0/sharded-gpt2/checkpoint"
    folder = tmp_path / "checkpoint"
    shutil.copytree(source, folder)
    shard = next(folder.glob("*-00001-of-*.safetensors"))
    for path in (shard, next(folder.glob("*.index.json"))):
        with nobody_may_read(path):
            report = check(folder)
        assert report.findings == ()
        assert report.unfinished[0].startswith(f"{path.name}: cannot be read")


@pytest.mark.parametrize("kind", ["dcp-2.13.0", "deepspeed-0.18.2"])
def test_files_of_dcp_and_deepspeed_folders(tmp_path: Path, kind: str) -> None:
    source = next(
        path for path in sorted((FIXTURES / kind).iterdir()) if "doubled" not in path.name
    )
    folder = tmp_path / "checkpoint"
    shutil.copytree(source, folder)
    suffixes = (".distcp", ".metadata", "_states.pt")
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name.endswith(suffixes)
    ]
    for path in files[:4]:
        parent = path.parent
        root = next(
            above for above in (parent.parent, parent) if above == folder or folder in above.parents
        )
        before = check(root)
        with nobody_may_read(path):
            report = check(root)
        assert {finding.code for finding in report.findings} <= {
            one.code for one in before.findings
        }
        assert any(f"{path.name}: cannot be read" in words for words in report.unfinished), path
        assert report.status in (1, 3)


def test_a_folder_that_may_hold_a_model_and_may_not_be_listed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shutil.copy(WRAPPED / "random_states_0.pkl", folder)
    for name in ("pytorch_model_fsdp_0", "unet"):
        hidden = folder / name
        hidden.mkdir()
        with nobody_may_read(hidden):
            report = check(folder)
        assert report.status == 3
        assert f"chmod a+rx {hidden}" in report.unfinished[0]


def test_a_file_of_a_model_below(folder: Path) -> None:
    (folder / "model_1.safetensors").unlink()
    (folder / "unet").mkdir()
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    shutil.copy(folder / "model.safetensors", weights)
    config = {"_class_name": "UNet2DModel", "_diffusers_version": "0.30"}
    (weights.parent / "config.json").write_text(json.dumps(config))
    assert check(folder).status == 0
    with nobody_may_read(weights):
        report = check(folder)
    assert report.status == 3
    assert report.unfinished == ()
    assert f"chmod a+r {weights}" in report.all_unfinished[0]


def test_recursive_names_folders_that_may_not_be_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        shutil.copytree(WRAPPED, tmp_path / f"checkpoint_{number}")
        (tmp_path / f"checkpoint_{number}" / "model_1.safetensors").unlink()
    assert run(["check", "-r", str(tmp_path)]) == 0
    said(capsys)
    with nobody_may_read(tmp_path / "checkpoint_1"):
        assert run(["check", "-r", str(tmp_path)]) == 3
        words = said(capsys)
    assert f"{tmp_path / 'checkpoint_0'}: no error found (4 files" in words
    assert f"chmod a+rx {tmp_path / 'checkpoint_1'}" in words


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        *((verb, "model.safetensors") for verb in (
            "repair", "repair --dry-run", "verify", "verify --data", "seal", "seal --force",
            "salvage", "migrate",
        )),
        *((verb, "optimizer.bin") for verb in ("repair", "verify", "salvage")),
    ],
)  # fmt: skip
def test_no_verb_calls_it_damage(
    folder: Path, tmp_path: Path, verb: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not verb.startswith("repair"):
        (folder / "model_1.safetensors").unlink()
        run(["seal", str(folder)])
    arguments = [*verb.split(), str(folder)]
    if verb in ("salvage", "migrate"):
        (tmp_path / "to").mkdir()
        os.chmod(tmp_path / "to", 0o777)
        arguments += [
            str(tmp_path / "to" / "new"),
            *(["--to", "bin"] if verb == "migrate" else []),
        ]
    said(capsys)
    with nobody_may_read(folder / name):
        assert run(arguments) == 3
    words = said(capsys)
    assert f"chmod a+r {folder / name}" in words
    assert "malformed" not in words
    assert not (tmp_path / "to" / "new").exists()


@pytest.mark.parametrize(
    "command",
    [
        "check {}", "check -r {}", "check --json {}", "repair {}", "undo {}", "seal {}",
        "verify {}", "verify --device-map auto {}", "salvage {} new", "diff {} {}",
        "migrate {} new --to bin",
    ],
)  # fmt: skip
def test_a_folder_that_may_not_be_read_is_no_wrong_usage(
    folder: Path,
    tmp_path: Path,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """click printed "Path 'checkpoint' is not readable" below the usage, and nothing that helps."""
    monkeypatch.chdir(tmp_path)  # `new` lies below a folder that nobody may search
    with nobody_may_read(folder):
        assert run(command.format(folder, folder).split()) == 3
    words = said(capsys)
    assert "cannot be read: permission denied" in words
    assert f"chmod a+rx {folder}" in words
    assert "Usage" not in words


def test_a_disk_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def failing(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("optimizer.bin"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *arguments, **options)

    (folder / "model_1.safetensors").unlink()
    monkeypatch.setattr(os, "open", failing)
    report = check(folder)
    assert report.findings == ()
    assert report.unfinished == ("optimizer.bin: cannot be read: Input/output error",)
    assert report.status == 3


def test_a_folder_with_a_journal_that_is_not_ours_to_write(folder: Path) -> None:
    """It was tried for ever: the lock file could not be made, and was not there to be opened."""
    (folder / ".ckptfix").mkdir()
    (folder / ".ckptfix" / "manifest.json").write_text("{}")
    os.chmod(folder / ".ckptfix", 0o555)
    with (
        nobody_may_read(folder / "optimizer.bin"),
        pytest.raises(
            OperationError,
            match=r"cannot lock this folder.*; next: ckptfix repair .* --output COPY$",
        ),
        folder_lock(folder),
    ):
        pass


def test_the_weights_of_a_folder_that_may_not_be_listed_are_not_missing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(WRAPPED, folder)
    hidden = folder / "unet"
    hidden.mkdir()
    for model in folder.glob("model*"):
        model.unlink()
    with nobody_may_read(hidden):
        assert "missing-model" not in [finding.code for finding in check(folder).findings]


def test_the_newest_complete_checkpoint_is_not_one_that_may_not_be_read(folder: Path) -> None:
    (folder / "model_1.safetensors").unlink()
    write_safetensors(folder / "model.safetensors", {"a": b"1"})
    with nobody_may_read(folder / "model.safetensors"):
        assert "permission denied" in str(incomplete(folder))


def test_a_closed_cache_of_the_hub_hides_no_damage(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only "Permission denied" was said, for a folder that no loader reads, and the truncated model
    was lost.
    """
    cache = folder / ".cache"
    cache.mkdir()
    with nobody_may_read(cache):
        run(["check", str(folder), "--json"])
        (whole,) = json.loads(capsys.readouterr().out)["checkpoints"]
    os.truncate(folder / "model.safetensors", 600)
    with nobody_may_read(cache):
        run(["check", str(folder), "--json"])
        (cut,) = json.loads(capsys.readouterr().out)["checkpoints"]
    codes = {finding["code"] for finding in cut["findings"]}
    assert "truncated-file" not in {finding["code"] for finding in whole["findings"]}
    assert "truncated-file" in codes
    assert any(
        words.startswith(".cache/") and "permission denied" in words for words in cut["unfinished"]
    )
