"""Digests of plans: ``repair --expect`` does what the dry run showed, or refuses and touches
nothing.
"""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfix import RepairPlan, RepairReceipt, check, plan_repair, repair, undo
from ckptfix.cli import run
from tests.repairs.builders import snapshot
from tests.storage.crash import Fault, Outcome, points, strike

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(
        FIXTURES / "student-teacher-wrapper-safetensors" / "checkpoint", tmp_path / "the save"
    )


def content(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in snapshot(folder).items() if ".ckptfix" not in name}


def shown(capsys: Capture, *arguments: str) -> list[str]:
    """Return the words of the command that a dry run ends with."""
    assert run(["repair", *arguments, "--dry-run"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    words, _, command = last.partition(": ")
    assert words == "to apply exactly this plan"
    return shlex.split(command)[1:]


def test_a_plan_changes_nothing_before_it_is_executed(folder: Path) -> None:
    before = snapshot(folder)
    plan = plan_repair(folder)
    assert isinstance(plan, RepairPlan)
    assert str(plan).startswith(f"plan for {folder}:")
    assert plan.preview().dry_run
    assert plan.preview().digest == plan.digest
    assert snapshot(folder) == before
    receipt = plan.execute()
    assert isinstance(receipt, RepairReceipt)
    assert receipt.steps == plan.steps != ()
    assert receipt.status == 0
    undo(folder)
    assert content(folder) == before


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--models", "2", "--keep", "optimizers=1", "--keys", "bare", "--allow", "entry-gap"],
        ["--only", "doubled-model", "--atomic", "-v"],
    ],
)
def test_the_command_of_the_dry_run_applies_its_plan_once(
    folder: Path, options: list[str], capsys: Capture
) -> None:
    before = snapshot(folder)
    command = shown(capsys, *options, str(folder))
    assert shown(capsys, *options, str(folder)) == command
    assert snapshot(folder) == before
    assert run([*command, "--dry-run"]) == 1
    assert snapshot(folder) == before
    assert run(command) == 0
    assert "done and verified" in capsys.readouterr().out
    after = snapshot(folder)
    assert run(command) == 3
    assert "nothing was changed; next: ckptfix repair " in capsys.readouterr().err
    assert snapshot(folder) == after


def test_a_plan_for_a_copy(folder: Path, capsys: Capture) -> None:
    before, copy = snapshot(folder), folder.parent / "a copy"
    command = shown(capsys, str(folder), "--output", str(copy))
    assert run(command) == 0
    assert snapshot(folder) == before
    assert check(copy).status == 0


def grow(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")


def save_again(folder: Path) -> None:
    os.utime(folder / "model_1.safetensors", ns=(1, 1))


def add(folder: Path) -> None:
    shutil.copy2(folder / "model.safetensors", folder / "model_3.safetensors")


def remove(folder: Path) -> None:
    (folder / "model_1.safetensors").unlink()


@pytest.mark.parametrize("change", [grow, save_again, add, remove])
def test_a_folder_that_changed_is_refused(
    folder: Path, change: Callable[[Path], None], capsys: Capture
) -> None:
    command = shown(capsys, str(folder), "--models", "2")
    change(folder)
    before = snapshot(folder)
    assert run(command) == 3
    error = capsys.readouterr().err
    assert f"{folder}: the folder or the plan has changed since the dry run (expected" in error
    following = error.partition("nothing was changed; next: ")[2]
    again = shlex.split(following)
    assert again == ["ckptfix", "repair", str(folder), "--models", "2", "--dry-run"]
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    "options", [["--atomic"], ["--keys", "bare"], ["--only", "doubled-model"], ["--output", "copy"]]
)
def test_other_options_make_another_plan(
    folder: Path, options: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    command = shown(capsys, folder.name)
    before = snapshot(folder.parent)
    assert run([*command, *options]) == 3
    assert snapshot(folder.parent) == before


def test_a_folder_without_damage_has_a_digest_and_no_command(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = shutil.copytree(FIXTURES / "clean-safetensors" / "checkpoint", tmp_path / "c")
    assert run(["repair", str(folder), "--dry-run"]) == 0
    assert "to apply" not in capsys.readouterr().out
    assert run(["repair", str(folder), "--dry-run", "--json"]) == 0
    digest = json.loads(capsys.readouterr().out)["digest"]
    assert run(["repair", str(folder), "--expect", digest]) == 0
    copy = str(tmp_path / "copy")
    assert run(["repair", str(folder), "--dry-run", "--output", copy]) == 0
    assert "to apply exactly this plan: " in capsys.readouterr().out


def test_of_several_checkpoints_json_alone_has_the_digests(folder: Path, capsys: Capture) -> None:
    second = shutil.copytree(folder, folder.parent / "second")
    assert run(["repair", str(folder), str(second), "--dry-run"]) == 1
    assert "to apply" not in capsys.readouterr().out
    assert run(["repair", str(folder), str(second), "--dry-run", "--json"]) == 1
    reports = json.loads(capsys.readouterr().out)["reports"]
    for path, report in zip((folder, second), reports, strict=True):
        assert run(["repair", str(path), "--expect", report["digest"]]) == 0


def repairing(folder: Path) -> Callable[[], None]:
    def repair_it() -> None:
        repair(folder)

    return repair_it


def test_a_killed_run_is_rolled_back_and_its_plan_applied(folder: Path, capsys: Capture) -> None:
    command = shown(capsys, str(folder))
    before = content(folder)
    copy = shutil.copytree(folder, folder.parent / "copy")
    calls = points(repairing(copy))
    # The journal begins, model_1 is kept aside, and model_2 is moved.
    moved = [at for at, call in enumerate(calls) if call == "rename"][2]
    assert strike(repairing(folder), moved, Fault.KILL_AFTER)[0] is Outcome.KILLED
    assert content(folder) != before
    assert run(["repair", str(folder), "--dry-run"]) == 1
    assert "to apply" not in capsys.readouterr().out
    assert run(command) == 0
    assert "an interrupted earlier run was rolled back first" in capsys.readouterr().out
    undo(folder)
    assert content(folder) == before
    assert shown(capsys, str(folder)) == command, "after an undo"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["c", "--expect", "3f2a"], "--expect 3f2a: not the digest of a plan"),
        (["c", "--expect", ""], "not the digest of a plan"),
        (["c", "d", "--expect", "0123456789ab"], "a plan covers one checkpoint, not 2"),
        (["--expect", "0123456789ab"], "Missing argument"),
        (["--plan", "plan.json"], "--expect DIGEST"),
        (["c", "--plan-out", "plan.json"], "--expect DIGEST"),
    ],
)
def test_wrong_usage(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["repair", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
