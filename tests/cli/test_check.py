"""The words of ``check`` and ``repair``: what to type next, and what is said of files that are no
part of it.
"""

import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from ckptfix.cli import run
from fixtures.models import RunSettings
from tests.commanding import Said, said
from tests.repairs.builders import write_safetensors
from tests.tensors.dcp_making import save

__all__ = ["said"]

FIXTURES = Path(__file__).parents[2] / "fixtures"
CLEAN = FIXTURES / "accelerate-1.15.0" / "clean-single-process" / "checkpoint"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CLEAN, tmp_path / "c"))


def shorten(path: Path, count: int) -> None:
    os.truncate(path, path.stat().st_size - count)


def test_what_is_whole_of_a_cut_file_is_to_be_salvaged(
    folder: Path, said: Said, tmp_path: Path
) -> None:
    assert "salvage" not in said("check", folder)[1]
    shorten(folder / "model.safetensors", 5)
    next_line = f"next, to recover what is intact: ckptfix salvage {folder} NEW_FOLDER\n"
    for command in (
        ["check"],
        ["repair"],
        ["repair", "--dry-run"],
        ["repair", "--output", tmp_path / "copy"],
    ):
        status, out, _ = said(*command, folder)
        assert status == 1
        assert "truncated-file" in out
        assert next_line in out
    assert run(["salvage", str(folder), str(tmp_path / "new")]) == 1


@pytest.mark.parametrize(
    ("golden", "is_salvageable"),
    [
        ("truncated-file", True),
        ("truncated-file-header", False),
        ("truncated-file-zip", True),
        ("truncated-file-dcp", True),
        ("missing-shard", True),
        ("missing-rank", False),
        ("incomplete-tensor", True),
        ("index-mismatch-lost", True),
        ("index-mismatch", False),
        ("not-a-tensor-file-html", False),
        ("malformed-file-overlap", False),
        ("interrupted-save", False),
    ],
)
def test_salvage_is_named_where_it_helps(
    golden: str, is_salvageable: bool, said: Said, tmp_path: Path
) -> None:
    damaged = FIXTURES / "golden" / golden / "checkpoint"
    assert ("to recover what is intact" in said("check", damaged)[1]) is is_salvageable
    if is_salvageable:
        assert run(["salvage", str(damaged), str(tmp_path / "new")]) == 1
        assert sum(path.stat().st_size for path in (tmp_path / "new").rglob("*")) > 0


def test_salvage_is_named_where_other_ranks_hold_whole_tensors(tmp_path: Path, said: Said) -> None:
    folder = tmp_path / "two ranks"
    save(folder, {"model": {"a": torch.ones(4), "b": torch.ones(4)}})
    content = pickle.loads((folder / ".metadata").read_bytes())
    for key, place in content.storage_data.items():
        if key.fqn == "model.b":
            place.relative_path = "__1_0.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(content, 4))
    out = said("check", folder)[1]
    assert "error missing-rank: __1_0.distcp" in out
    assert f"next, to recover what is intact: ckptfix salvage '{folder}' NEW_FOLDER" in out
    assert run(["salvage", str(folder), str(tmp_path / "new")]) == 1


def test_a_truncated_original_is_compared_with_its_duplicate(said: Said, tmp_path: Path) -> None:
    folder, new = tmp_path / "c", tmp_path / "new"
    shutil.copytree(FIXTURES / "accelerate-1.15.0" / "wrapper-bin" / "checkpoint", folder)
    shorten(folder / "pytorch_model.bin", 500)
    advice = next(one for one in said("check", folder)[1].splitlines() if "nothing is lost" in one)
    said("salvage", folder, new)
    verb, *paths = advice.partition("then: ckptfix ")[2].replace("NEW_FOLDER", str(new)).split()
    assert said(verb, *paths)[0] == 0


def test_salvage_comes_before_a_repair_that_brings_nothing_back(said: Said, tmp_path: Path) -> None:
    """A truncated original, its duplicate, and another duplicate that a repair would delete."""
    folder = tmp_path / "c"
    shutil.copytree(FIXTURES / "accelerate-1.15.0" / "pairs-twice" / "checkpoint", folder)
    shorten(folder / "model.safetensors", 20)
    salvage, repair = f"ckptfix salvage {folder} NEW_FOLDER", f"ckptfix repair {folder}"
    status, out, _ = said("check", folder)
    assert status == 1
    assert f"next, to recover what is intact: {salvage}\nthen: {repair}\n" in out
    assert f"; next: {salvage}\n" in said("verify", folder)[1]
    assert f"next: {salvage}, to recover what is intact\n" in said("seal", folder)[1]
    compare = next(one for one in out.splitlines() if "nothing is lost" in one).partition(
        "then: ckptfix "
    )[2]
    new = tmp_path / "new"
    assert said("salvage", folder, new)[0] == 1
    verb, *paths = compare.replace("NEW_FOLDER", str(new)).split()
    assert "1 only in A" in said(verb, *paths)[1]


def test_a_dry_run_shows_what_it_does_not_repair(folder: Path, said: Said) -> None:
    shorten(folder / "model.safetensors", 5)
    status, out, _ = said("repair", folder, "--dry-run")
    assert status == 1
    assert f"nothing to repair in {folder}" in out
    assert "error truncated-file: model.safetensors" in out


def test_what_recursive_looks_into_is_not_called_unchecked(folder: Path, said: Said) -> None:
    write_safetensors(folder.parent / "lone.safetensors", {"a": b"1"})
    (folder.parent / "elsewhere").symlink_to(folder)
    words = "c/ (a folder): not looked into; ckptfix check --recursive looks into it\n"
    assert words in said("check", "-v", folder.parent)[1]
    out = said("check", "-v", "--recursive", folder.parent)[1]
    assert "c/ (a folder): not looked into" not in out
    assert "elsewhere/ (a folder): not looked into" in out


def test_a_broken_link_is_called_one(folder: Path, said: Said) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/abc")
    assert (
        "model.safetensors is a broken link: ../../blobs/abc does not exist"
        in said("check", folder)[1]
    )


def test_checksums_are_left_unchecked_only_where_there_are_any(tmp_path: Path, said: Said) -> None:
    for name, new in (("new.pt", True), ("legacy.pt", False)):
        torch.save({"a": torch.ones(2)}, tmp_path / name, _use_new_zipfile_serialization=new)
        assert ("checksums of tensor records" in said("check", tmp_path / name)[1]) is new


def test_other_files_are_named(folder: Path, said: Said) -> None:
    for name in ("config.json", "vocab.json", "README.md"):
        (folder / name).write_text("{}")
    words = "not checked: other files next to it: 'README.md', 'vocab.json'\n"
    assert words in said("check", "-v", folder)[1], "config.json was read"
    assert "other files" not in said("verify", folder)[1]


def test_what_the_trainer_pickles_is_a_note(folder: Path, said: Said) -> None:
    states = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    for name in ("rng_state.pth", "rng_state_1.pth"):
        torch.save(states, folder / name)
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    torch.save({"last_epoch": 1, "_last_lr": [0.1]}, folder / "scheduler.pt")
    torch.save(RunSettings(0.01), folder / "training_args.bin")
    for path in folder.glob("random_states_*"):
        path.unlink()
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    (folder / "trainer_state.json").write_text('{"global_step": 1}')
    status, out, _ = said("check", folder)
    assert status == 0
    assert out.count("note trainer-pickle") == 3
    assert said("verify", folder, "--data")[0] == 0
    torch.save(RunSettings(0.01), folder / "training.bin")
    assert "unloadable-pickle: training.bin" in said("check", folder)[1]


def test_names_that_could_not_be_read_for_one_reason_are_said_once(
    tmp_path: Path, said: Said
) -> None:
    groups = [{"params": [f"{number}.w"], "lr": 0.1} for number in range(9)]
    state = {"optimizer": {"state": {}, "param_groups": groups}}
    save(tmp_path / "optimizer_0", state)
    save(
        tmp_path / "pytorch_model_fsdp_0",
        {"model": {f"{number}.w": torch.ones(1) for number in range(9)}},
    )
    for path in (tmp_path / "optimizer_0").glob("*.distcp"):
        path.unlink()
    out = said("check", "-v", tmp_path)[1]
    assert out.count("keys inside") == 1


def test_a_dcp_folder_is_not_called_a_dot(tmp_path: Path, said: Said) -> None:
    model = {name: torch.arange(4000.0) for name in ("0.weight", "1.weight")}
    save(tmp_path / "whole", {"model": model})
    (path,) = (tmp_path / "whole").glob("*.distcp")
    shorten(path, 2000)
    out = said("salvage", tmp_path / "whole", tmp_path / "new")[1]
    assert "model.safetensors: 1 tensor" in out
    assert "from ." not in out
    assert ".: '" not in out


@pytest.mark.slow
def test_a_small_folder_is_checked_without_what_takes_longer_to_import_than_it_to_read(
    folder: Path,
) -> None:
    """One module each that drags in many: concurrent.futures logging, shutil bz2 and lzma, secrets
    random.
    """
    code = (
        "import sys; from ckptfix.cli import run; run(['check', sys.argv[1]]); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        cwd=FIXTURES.parent,
        check=True,
    )
    imported = set(done.stdout.splitlines()[-1].split())
    assert "ckptfix.diagnosis.check" in imported
    heavy = {
        "concurrent.futures",
        "logging",
        "random",
        "secrets",
        "shutil",
        "socket",
        "subprocess",
        "torch",
    }
    assert not imported & heavy
    assert "ckptfix.storage.transactions" not in imported, "what writes a repair"


@pytest.mark.parametrize(
    ("names", "cut", "helps"), [("unet.", 5, "salvage"), ("module.module.", 0, "repair")]
)
@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--output", "COPY")])
def test_a_repair_names_the_command_for_a_model_below(
    folder: Path, said: Said, names: str, cut: int, helps: str, options: tuple[str, ...]
) -> None:
    (folder / "unet").mkdir()
    weights = write_safetensors(folder / "unet" / "model.safetensors", {f"{names}a": b"12345678"})
    (folder / "unet" / "config.json").write_text("{}")
    if cut:
        shorten(weights, cut)
    copy = folder.parent / "copy"
    given = [str(copy) if option == "COPY" else option for option in options]
    status, out, _ = said("repair", folder, *given)
    assert status == 1
    where = copy if copy.exists() else folder
    assert f"ckptfix {helps} {where / 'unet'}" in out
    assert "unet/ (a folder): not looked into" not in out
    assert f"ckptfix {helps} {where / 'unet'}" in said("check", where)[1]


@pytest.mark.parametrize("verb", ["check", "verify", "seal", "undo", "diff"])
def test_a_link_that_leads_to_itself_is_called_one(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    arguments = [str(loop / "c"), str(CLEAN)] if verb == "diff" else [str(loop / "c")]
    assert run([verb, *arguments]) == 3
    words = capsys.readouterr().err
    assert f"{loop} is a symbolic link that leads to itself" in words
    assert "Errno" not in words


def test_a_file_that_is_a_link_to_itself(
    folder: Path, said: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "optimizer.bin").unlink()
    (folder / "optimizer.bin").symlink_to("optimizer.bin")
    assert "optimizer.bin is a symbolic link that leads to itself" in said("check", folder)[1]
    page = folder / "optimizer.bin" / "page.html"
    assert run(["diff", str(CLEAN), str(CLEAN), "--html", str(page)]) == 2
    assert (
        f"{folder / 'optimizer.bin'} is a symbolic link that leads to itself"
        in capsys.readouterr().err
    )
