"""Saved plans: ``repair --plan`` does what ``--plan-out`` showed, or refuses and touches
nothing.
"""

import json
import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from ckptfix import (
    ChangedError,
    Policy,
    RepairPlan,
    RepairReceipt,
    UsageError,
    check,
    plan_repair,
    repair,
    undo,
)
from ckptfix.checkpoint.roles import Role
from ckptfix.cli import run
from ckptfix.diagnosis.policy import Keys
from ckptfix.repairs.saved_plans import read_plan, save_plan
from tests.repairs.builders import snapshot
from tests.sampling import sampled
from tests.storage.crash import Fault, Outcome, points, strike

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(
        FIXTURES / "student-teacher-wrapper-safetensors" / "checkpoint", tmp_path / "c"
    )


def content(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in snapshot(folder).items() if ".ckptfix" not in name}


def test_a_plan_changes_nothing_before_it_is_executed(folder: Path) -> None:
    before = snapshot(folder)
    plan = plan_repair(folder)
    assert isinstance(plan, RepairPlan)
    assert str(plan).startswith(f"plan for {folder}:")
    assert plan.preview().dry_run
    assert snapshot(folder) == before
    receipt = plan.execute()
    assert isinstance(receipt, RepairReceipt)
    assert receipt.steps == plan.steps != ()
    assert receipt.status == 0
    undo(folder)
    assert content(folder) == before


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(
            keep={Role.MODEL: 2, Role.OPTIMIZER: 1}, keys=Keys.BARE, allow=frozenset({"entry-gap"})
        ),
        Policy(only=frozenset({"doubled-model"}), atomic=True),
    ],
)
def test_a_saved_plan_is_applied_as_it_was_shown(folder: Path, policy: Policy) -> None:
    other = shutil.copytree(folder, folder.parent / "other")
    file = folder.parent / "plan.json"
    plan = plan_repair(folder, policy)
    save_plan(plan, file)
    saved = read_plan(file)
    assert saved.policy == policy
    assert saved.path == folder
    receipt = saved.plan().execute()
    assert list(map(str, receipt.steps)) == list(map(str, plan.steps))
    repair(other, policy=policy)
    assert content(folder) == content(other)


def test_the_command_line_saves_and_applies(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(folder)
    file = folder.parent / "the plan.json"
    assert run(["repair", str(folder), "--plan-out", str(file)]) == 1
    out = capsys.readouterr().out
    assert f"ckptfix repair --plan '{file}'" in out
    assert "dry run: nothing was changed" in out
    assert snapshot(folder) == before
    assert run(["repair", "--plan", str(file), "--dry-run"]) == 1
    assert snapshot(folder) == before
    assert run(["repair", "--plan", str(file)]) == 0
    assert "done and verified" in capsys.readouterr().out
    assert check(folder).status == 0
    after = snapshot(folder)
    assert run(["repair", "--plan", str(file)]) == 3, "applied twice"
    told = capsys.readouterr().err
    assert "the plan was already applied: repair 1 of" in told
    assert f"to undo that repair: ckptfix undo {folder}" in told
    assert snapshot(folder) == after
    (folder / "model.safetensors").write_bytes((folder / "model_1.safetensors").read_bytes())
    assert run(["repair", "--plan", str(file)]) == 3, "applied, and saved again since"
    told = capsys.readouterr().err
    assert "already applied" not in told
    assert "changed" in told
    assert (
        f"next, with the options of that plan: ckptfix repair {folder} --plan-out NEW_FILE" in told
    )


def test_no_plan_is_written_where_there_is_nothing_to_repair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "c", tmp_path / "plan.json"
    shutil.copytree(FIXTURES / "clean-safetensors" / "checkpoint", folder)
    assert run(["repair", str(folder), "--plan-out", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"nothing to repair in {folder}" in out
    assert f"{file} was not written: the plan has no steps" in out
    assert "--plan " not in out
    assert not file.exists()
    assert (
        run(["repair", str(folder), "--output", str(tmp_path / "copy"), "--plan-out", str(file)])
        == 0
    )
    assert run(["repair", "--plan", str(file)]) == 0, "the plan of an unchanged copy"
    assert (tmp_path / "copy").exists()


def test_a_plan_for_a_copy(folder: Path) -> None:
    before = snapshot(folder)
    file = folder.parent / "plan.json"
    assert (
        run(
            [
                "repair",
                str(folder),
                "--output",
                str(folder.parent / "copy"),
                "--plan-out",
                str(file),
            ]
        )
        == 1
    )
    assert run(["repair", "--plan", str(file)]) == 0
    assert snapshot(folder) == before
    assert check(folder.parent / "copy").status == 0


def grow(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")


def save_again(folder: Path) -> None:
    os.utime(folder / "model_1.safetensors", ns=(1, 1))


def add(folder: Path) -> None:
    shutil.copy2(folder / "model.safetensors", folder / "model_3.safetensors")


def remove(folder: Path) -> None:
    (folder / "model_1.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (grow, "model.safetensors changed .expected .* bytes, found"),
        (save_again, "model_1.safetensors was rewritten"),
        (add, "model_3.safetensors is new"),
        (remove, "model_1.safetensors is missing"),
    ],
)
def test_a_folder_that_changed_is_refused(
    folder: Path, change: Callable[[Path], None], words: str
) -> None:
    file = folder.parent / "plan.json"
    save_plan(plan_repair(folder), file)
    change(folder)
    before = snapshot(folder)
    with pytest.raises(ChangedError, match=f"{words}.*nothing was changed; next, with the options"):
        read_plan(file).plan(recover=True)
    assert snapshot(folder) == before


def test_a_folder_that_needs_another_plan_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same files, and another release that plans otherwise."""
    file = folder.parent / "plan.json"
    save_plan(plan_repair(folder), file)
    monkeypatch.setattr("ckptfix.repairs.saved_plans._steps", lambda plan: [])
    with pytest.raises(ChangedError, match="now needs a different plan"):
        read_plan(file).plan()


def test_a_reason_in_the_words_of_another_release_is_no_other_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder.parent / "plan.json"
    left = {"code": "truncated-file", "path": "model.safetensors", "reason": "old words"}
    monkeypatch.setattr("ckptfix.repairs.saved_plans._unplanned", lambda plan: [left])
    save_plan(plan_repair(folder), file)
    left = {**left, "reason": "new words"}
    assert read_plan(file).plan().steps
    left = {**left, "path": "model_1.safetensors"}
    with pytest.raises(ChangedError, match="now needs a different plan"):
        read_plan(file).plan()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda data: b"", "is not a ckptfix plan"),
        (lambda data: b"[" * 100_000, "is not a ckptfix plan"),
        (lambda data: b"{}", "is not a ckptfix plan"),
        (lambda data: data[:-40], "is not a ckptfix plan"),
        (
            lambda data: data.replace(b'"keys": "auto"', b'"keys": "bare"'),
            "was changed after ckptfix wrote it",
        ),
        (
            lambda data: data.replace(b'"plan_version": 1', b'"plan_version": 2'),
            "belongs to another version of ckptfix",
        ),
    ],
)
def test_a_plan_that_changed_is_refused(
    folder: Path, edit: Callable[[bytes], bytes], words: str
) -> None:
    file = folder.parent / "plan.json"
    save_plan(plan_repair(folder), file)
    file.write_bytes(edit(file.read_bytes()))
    with pytest.raises(UsageError, match=words):
        read_plan(file)


def test_a_forged_plan_does_nothing_that_a_repair_would_not_do(folder: Path) -> None:
    file = folder.parent / "plan.json"
    save_plan(plan_repair(folder), file)
    document = json.loads(file.read_bytes())
    del document["sha256"]
    document["steps"][0]["files"] = ["model.safetensors"]
    from ckptfix.repairs.saved_plans import _digest

    file.write_text(json.dumps({**document, "sha256": _digest(document)}))
    before = snapshot(folder)
    with pytest.raises(ChangedError, match=r"now needs a different plan \(step 1 differs\)"):
        read_plan(file).plan()
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    "forged",
    [
        {"policy": None},
        {"policy": {"keep": {"x": 1}, "keys": "auto", "only": [], "allow": [], "atomic": False}},
        {"policy": {"keep": {}, "keys": "x", "only": [], "allow": [], "atomic": False}},
        {"path": None},
        {"files": {"model.safetensors": []}},
        {"files": []},
        {"steps": None},
    ],
)
def test_a_forged_plan_that_makes_no_sense_is_refused(
    folder: Path, forged: dict[str, object]
) -> None:
    file = folder.parent / "plan.json"
    save_plan(plan_repair(folder), file)
    document = {**json.loads(file.read_bytes()), **forged}
    del document["sha256"]
    from ckptfix.repairs.saved_plans import _digest

    file.write_text(json.dumps({**document, "sha256": _digest(document)}))
    with pytest.raises(UsageError, match="was not written by ckptfix"):
        read_plan(file)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--plan", "FILE", "c"],
        ["--plan", "FILE", "--models", "2"],
        ["--plan", "FILE", "--output", "copy"],
        ["--plan", "FILE", "--plan-out", "other"],
        ["--plan", "nowhere"],
        ["c", "--plan-out", "FILE"],
        ["c", "--plan-out", "c/plan.json"],
        ["c", "--plan-out", "nowhere/plan.json"],
        ["c", "c", "--plan-out", "new"],
        [],
    ],
)
def test_wrong_usage(folder: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    save_plan(plan_repair(folder), folder.parent / "FILE")
    monkeypatch.chdir(folder.parent)
    before = snapshot(folder.parent)
    assert run(["repair", *arguments]) == 2
    assert snapshot(folder.parent) == before


@pytest.mark.slow
def test_killed_anywhere_the_plan_can_be_applied_again(tmp_path: Path) -> None:
    source = FIXTURES / "student-teacher-wrapper-safetensors" / "checkpoint"

    def fresh(name: str) -> tuple[Path, Callable[[], None]]:
        folder = shutil.copytree(source, tmp_path / name / "c")
        file = tmp_path / name / "plan.json"
        save_plan(plan_repair(folder), file)

        def apply() -> None:
            read_plan(file).plan(recover=True).execute()

        return folder, apply

    folder, apply = fresh("points")
    before = content(folder)
    total = len(points(apply))
    folder, apply = fresh("applied")
    apply()
    after = content(folder)
    assert total > 10
    for at, fault in sampled(
        product(range(total), (Fault.KILL_BEFORE, Fault.KILL_AFTER, Fault.TORN))
    ):
        folder, apply = fresh(f"{at} {fault.name}")
        assert strike(apply, at, fault)[0] is Outcome.KILLED
        try:
            apply()
        except ChangedError:  # it was committed before it was killed
            assert content(folder) == after
        assert content(folder) == after, at
        undo(folder)
        assert content(folder) == before, at
