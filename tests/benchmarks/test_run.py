"""The folder of the benchmarks' files."""

import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from tests.benchmarks import run


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders in which the part ``rename`` would measure, on a disk with room for it."""
    folders: list[Path] = []
    monkeypatch.setattr(run, "rename", lambda folder, size: folders.append(folder))
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(Path(path).stat() and 1 << 40))
    return folders


def test_a_missing_folder_is_made(
    used: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "folder"
    monkeypatch.setattr(sys, "argv", ["run", "--part", "rename", "--folder", str(folder)])
    run.main()
    assert [path.parent for path in used] == [folder]
    assert list(folder.iterdir()) == [], "the files of the benchmark are deleted"


def test_a_folder_that_cannot_be_made_is_a_usage_error(
    used: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(
        sys, "argv", ["run", "--part", "rename", "--folder", str(tmp_path / "file")]
    )
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2
    assert not used
    assert "File exists" in capsys.readouterr().err
