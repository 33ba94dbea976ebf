"""Checkpoints that are all a folder holds, as archives and ``cp -r`` leave them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ckptfix import check, latest_checkpoint
from ckptfix.cli import run
from ckptfix.errors import UsageError
from tests.diagnosis.test_misnamed import Small
from tests.stores.servers import upload_folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Small().saved(tmp_path_factory.mktemp("saved") / "checkpoint_10")


def _with_files_of_macos(outer: Path) -> None:
    (outer / ".DS_Store").write_bytes(b"\0")
    (outer / "__MACOSX/checkpoint_10").mkdir(parents=True)
    (outer / "__MACOSX/checkpoint_10/._model.safetensors").write_bytes(b"\0\5\x16\7")


@pytest.mark.parametrize("is_of_macos", [False, True])
def test_a_checkpoint_in_a_folder_of_its_name(
    saved: Path, tmp_path: Path, is_of_macos: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    outer = tmp_path / "run/checkpoint_10"
    inner = Path(shutil.copytree(saved, outer / "checkpoint_10"))
    if is_of_macos:
        _with_files_of_macos(outer)
    with pytest.raises(FileNotFoundError):
        Small().accelerator.load_state(str(outer))
    Small().accelerator.load_state(str(inner))
    report = check(outer)
    assert report.path == inner
    assert [(finding.code, finding.severity.value) for finding in report.findings] == [
        ("incomplete-checkpoint", "warning")
    ]
    assert (
        str(report.findings[0])
        == f"{outer} has no checkpoint files of its own, only this folder of the same name"
    )
    assert check(inner).findings == ()
    assert run(["check", str(outer)]) == 1
    assert f"{inner}: 1 warning" in capsys.readouterr().out
    with pytest.raises(
        UsageError, match="all its files are in checkpoint_10/, where no run looks for them; move"
    ):
        latest_checkpoint(outer.parent)


@pytest.mark.parametrize("name", ["checkpoint_10", "run"])
def test_a_checkpoint_in_a_folder_of_a_store(saved: Path, tmp_path: Path, name: str) -> None:
    outer = tmp_path / name
    shutil.copytree(saved, outer / "checkpoint_10")
    url = f"memory://{os.urandom(6).hex()}/{name}"
    upload_folder(outer, url)
    codes = [finding.code for finding in check(outer).findings]
    assert [finding.code for finding in check(url).findings] == codes
    assert codes == (["incomplete-checkpoint"] if name == "checkpoint_10" else [])


def test_damage_inside_is_found(saved: Path, tmp_path: Path) -> None:
    inner = Path(shutil.copytree(saved, tmp_path / "checkpoint_10/checkpoint_10"))
    (inner / "optimizer.bin").write_bytes(b"")
    codes = [finding.code for finding in check(inner.parent).findings]
    assert codes == ["incomplete-checkpoint", "not-a-tensor-file"]


def test_a_checkpoint_in_a_folder_of_another_name_is_checked(saved: Path, tmp_path: Path) -> None:
    """As the folder of a run with one checkpoint."""
    inner = Path(shutil.copytree(saved, tmp_path / "run/checkpoint_10"))
    report = check(inner.parent)
    assert (report.path, report.findings) == (inner, ())


@pytest.mark.parametrize("name", ["notes.txt", "second/model.safetensors"])
def test_a_folder_that_holds_more_is_named(saved: Path, tmp_path: Path, name: str) -> None:
    inner = Path(shutil.copytree(saved, tmp_path / "run/checkpoint_10"))
    (inner.parent / name).parent.mkdir(exist_ok=True)
    (inner.parent / name).write_bytes(b"x")
    with pytest.raises(UsageError, match="name the one that is a checkpoint"):
        check(inner.parent)


def test_a_copy_inside_of_the_same_checkpoint_changes_nothing(saved: Path, tmp_path: Path) -> None:
    """As ``cp -r`` leaves it that ran twice: the outer folder holds all files."""
    outer = Path(shutil.copytree(saved, tmp_path / "checkpoint_10"))
    shutil.copytree(saved, outer / "checkpoint_10")
    Small().accelerator.load_state(str(outer))
    report = check(outer)
    assert (report.path, report.status) == (outer, 0)


@pytest.mark.parametrize("ending", ["~", ".1", ".bak"])
def test_a_folder_in_which_every_name_has_one_ending_more(
    saved: Path, tmp_path: Path, ending: str
) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "a run/checkpoint_10"))
    for file in [*path.iterdir()]:
        file.rename(file.with_name(file.name + ending))
    with pytest.raises(FileNotFoundError):
        Small().accelerator.load_state(str(path))
    with pytest.raises(
        UsageError, match=f"; to remove the ending '{ending}' from their names: "
    ) as caught:
        check(path)
    subprocess.run(
        str(caught.value).partition(f"{ending!r} from their names: ")[2], shell=True, check=True
    )
    Small().accelerator.load_state(str(path))
    assert check(path).findings == ()


@pytest.mark.parametrize(
    "names", [("optimizer.bin~", "model.safetensors.bak"), ("notes.txt~", "x.py~")], ids=str
)
def test_no_rename_of_other_files_is_offered(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UsageError) as caught:
        check(tmp_path)
    assert "; to remove the ending" not in str(caught.value)
