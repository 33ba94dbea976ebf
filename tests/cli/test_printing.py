"""``str()`` of every report and receipt is what the terminal prints for it; ``repr()`` is one short
line.
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptfix import check, diff, migrate, repair, salvage, seal, undo, verify
from ckptfix.cli import run
from ckptfix.cli.report import ending_of
from ckptfix.environment.doctor import diagnose_environment
from ckptfix.storage.staged import release, temporary_name
from tests.environment.building import facts
from tests.repairs.builders import write_safetensors

FIXTURES = Path(__file__).parents[2] / "fixtures"
DOUBLED = FIXTURES / "accelerate-1.15.0" / "student-teacher-wrapper-safetensors" / "checkpoint"
CUT = FIXTURES / "golden" / "truncated-file" / "checkpoint"
Call = Callable[[Path, Path], object]

CASES: dict[str, tuple[list[str], Call]] = {
    "check": (["check", "{}"], lambda folder, new: check(folder)),
    "check-clean": (["check", "{}/model.safetensors"], lambda folder, new: check(folder / "model.safetensors")),
    "repair-dry": (["repair", "{}", "--dry-run"], lambda folder, new: repair(folder, dry_run=True)),
    "repair": (["repair", "{}"], lambda folder, new: repair(folder)),
    "verify": (["verify", "{}"], lambda folder, new: verify(folder)),
    "verify-data": (["verify", "{}", "--data"], lambda folder, new: verify(folder, data=True)),
    "seal-refused": (["seal", "{}"], lambda folder, new: seal(folder)),
    "seal": (["seal", "{}", "--force"], lambda folder, new: seal(folder, force=True)),
    "diff": (
        ["diff", "{}/model.safetensors", "{}/model_2.safetensors"],
        lambda folder, new: diff(folder / "model.safetensors", folder / "model_2.safetensors"),
    ),
    "migrate-dry": (
        ["migrate", "{}", "{}-new", "--to", "bin", "--dry-run", "--allow-damage"], lambda folder,
        new: migrate(folder, f"{folder}-new", to="bin", dry_run=True, allow_damage=True),
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DOUBLED, tmp_path / "checkpoint"))


@pytest.mark.parametrize("case", CASES)
def test_str_is_what_the_terminal_prints(
    case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, call = CASES[case]
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    run([word.replace("{}", str(folder)) for word in arguments])
    printed = capsys.readouterr().out
    if case == "repair-dry":
        # The command to apply the plan has the options of the command line.
        printed = printed[: printed.index("to apply exactly this plan: ckptfix repair ")]
    assert printed == f"{call(copy, tmp_path)}\n".replace(str(copy), str(folder))
    assert len(printed.splitlines()) >= 3


def test_str_of_an_undo_and_of_a_salvage(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        repair(folder)
        undone = undo(folder)
    repair(folder)
    run(["undo", str(folder)])
    assert capsys.readouterr().out == f"{undone}\n"
    assert str(undone).startswith(f"undid the last change of {folder}:\n  undone: ")
    receipt = salvage(CUT, tmp_path / "a")
    run(["salvage", str(CUT), str(tmp_path / "b")])
    assert capsys.readouterr().out == f"{receipt}\n".replace(
        str(tmp_path / "a"), str(tmp_path / "b")
    )


def test_str_of_a_diagnosis_names_the_problems_and_what_was_not_checked() -> None:
    diagnosis = diagnose_environment(facts())
    text = str(diagnosis)
    assert text.splitlines()[0] == diagnosis.summary
    assert all(f"{advice.code}: {advice.sentence}" in text for advice in diagnosis.advice)
    assert all(f"not checked: {words}" in text for words in diagnosis.not_checked)


def test_a_report_of_many_tensors_is_short_in_a_notebook(tmp_path: Path) -> None:
    names = {f"layers.{number}.w": os.urandom(4) for number in range(1000)}
    write_safetensors(tmp_path / "model.safetensors", names)
    (tmp_path / "other").mkdir()
    write_safetensors(tmp_path / "other" / "model.safetensors", dict.fromkeys(names, b"1234"))
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.bin")
    checked = check(tmp_path)
    results = [
        checked,
        verify(tmp_path, data=True),
        seal(tmp_path),
        verify(tmp_path),
        diff(tmp_path, tmp_path / "other"),
        repair(tmp_path),
        migrate(tmp_path, tmp_path.parent / "migrated", to="bin"),
    ]
    for result in results:
        assert "\n" not in repr(result)
        assert type(result).__name__ in repr(result)
        assert len(repr(result)) < 100 + 2 * len(str(tmp_path))
        assert len(str(result)) < 3000
    assert repr(checked) == f"<CheckReport {checked.headline()}; status 0>"


def test_text_of_a_report_moves_no_cursor(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"module.module.\x1b[2J\u202eevil": b"1"})
    assert "\\x1b[2J\\u202eevil" in str(repair(tmp_path, dry_run=True))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (
            errno.ENOSPC,
            "No space left on device; next: free up space on that disk, then run the command again",
        ),
        (
            errno.EROFS,
            "Read-only file system; next: choose a folder on a writable disk",
        ),
    ],
)
def test_an_error_of_a_disk_names_what_was_to_be_written_and_not_the_temporary_name(
    tmp_path: Path, number: int, words: str
) -> None:
    temporary = tmp_path / temporary_name(tmp_path / "new")
    try:
        for path, named in (
            (temporary, "new"),
            (temporary / "below" / "a.bin", "new/below/a.bin"),
        ):
            said = ending_of(OSError(number, os.strerror(number), str(path))).message
            assert said == f"{tmp_path / named}: {words}"
    finally:
        release(temporary)
