"""Every golden folder, and every real one: check, repair, check again, repair again, undo."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix import check
from ckptfix.cli import run

FIXTURES = Path(__file__).parents[1] / "fixtures"
GOLDEN = sorted((FIXTURES / "golden").iterdir())
REAL = sorted(path for version in FIXTURES.glob("accelerate-*") for path in version.iterdir())
HEALTHY = [
    path
    for path in REAL
    if path.name.startswith(("clean-", "lone-bare", "single-level", "sharded-"))
]
HEALTHY = [
    path for path in HEALTHY if "nested" not in path.name and "distinct-equal" not in path.name
]


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(root)): (
            path.read_bytes() if path.is_file() else b"",
            path.stat().st_mode,
        )
        for path in sorted(root.rglob("*"))
    }


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_golden(tmp_path: Path, golden: Path) -> None:
    case: dict[str, Any] = json.loads((golden / "case.json").read_text())
    folder = tmp_path / "checkpoint"
    shutil.copytree(golden / "checkpoint", folder)
    before = snapshot(folder)
    arguments = case["check_args"]
    data = "--data" in arguments
    findings = check(folder, data=data).findings
    found = [finding.code for finding in findings]
    assert case["code"] in found
    assert "DIR" not in " ".join(finding.advice_at("checkpoint") for finding in findings)
    assert run(["check", str(folder), *arguments]) == case["check_status"]
    assert snapshot(folder) == before, "check changed something"

    if case["repair_args"] is None:
        # A repair reads no more than a plain check does, so what only --data finds changes no
        # status.
        assert run(["repair", str(folder)]) == (0 if data else case["after_status"])
        assert snapshot(folder) == before, "there was nothing to repair"
        return
    assert run(["repair", str(folder), "--dry-run", *case["repair_args"]]) == case["check_status"]
    assert snapshot(folder) == before, "a dry run changed something"
    assert run(["repair", str(folder), *case["repair_args"]]) == case["after_status"]
    repaired = snapshot(folder)
    assert repaired != before
    assert run(["check", str(folder), *arguments]) == case["after_status"]
    left = [finding.code for finding in check(folder, data=data).findings]
    assert left.count(case["code"]) < found.count(case["code"])
    # Which names one role, and other roles may have the same finding.
    if "--keep" not in case["repair_args"]:
        assert case["code"] not in left
    run(["repair", str(folder), *case["repair_args"]])
    assert snapshot(folder) == repaired, "a second repair found something to do"
    assert run(["undo", str(folder)]) == 0
    assert snapshot(folder) == before


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
@pytest.mark.parametrize("how", ["--atomic", "--output"])
def test_other_ways_give_the_same_checkpoint(tmp_path: Path, golden: Path, how: str) -> None:
    case: dict[str, Any] = json.loads((golden / "case.json").read_text())
    arguments = case["repair_args"] or []
    folder, other, target = tmp_path / "checkpoint", tmp_path / "other", tmp_path / "target"
    shutil.copytree(golden / "checkpoint", folder)
    shutil.copytree(golden / "checkpoint", other)
    before = snapshot(other)
    status = run(["repair", str(folder), *arguments])
    if how == "--output":
        assert run(["repair", str(other), *arguments, "--output", str(target)]) == status
        assert snapshot(other) == before
        own = [path.name for path in (golden / "checkpoint").glob(".ckptfix/*") if path.is_file()]
        assert [path.name for path in target.glob(".ckptfix/*")] == own
        assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "other", "target"}
    else:
        target = other
        assert run(["repair", str(other), *arguments, "--atomic"]) == status
    assert described(target) == described(folder)


@pytest.mark.parametrize(
    "golden", sorted((FIXTURES / "golden-verbs").iterdir()), ids=lambda path: path.name
)
def test_what_verbs_other_than_check_find(
    golden: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case: dict[str, Any] = json.loads((golden / "case.json").read_text())
    monkeypatch.chdir(golden)
    assert run([*case["command"], "checkpoint"]) == case["status"]
    assert case["words"] in capsys.readouterr().out
    assert run([*case["command"], "twin"]) == case["status_of_twin"]
    assert case["words"] not in capsys.readouterr().out


@pytest.mark.parametrize("real", HEALTHY, ids=lambda path: f"{path.parent.name[11:]}-{path.name}")
def test_a_healthy_folder_has_no_error_and_no_warning(real: Path) -> None:
    report = check(real / "checkpoint", data=True)
    assert {finding.code for finding in report.findings} <= {"wrapper-prefix", "identical-states"}
    assert report.status == 0


@pytest.mark.parametrize("real", REAL, ids=lambda path: f"{path.parent.name[11:]}-{path.name}")
def test_every_real_folder_comes_back(tmp_path: Path, real: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(real / "checkpoint", folder)
    before = snapshot(folder)
    run(["repair", str(folder)])
    changed = snapshot(folder) != before
    assert not any(finding.action.value == "fix" for finding in check(folder).findings)
    assert run(["undo", str(folder)]) == (0 if changed else 2)
    assert snapshot(folder) == before


def described(folder: Path) -> list[tuple[object, ...]]:
    """Name, role, and every tensor with its bytes, of every component."""
    result: list[tuple[object, ...]] = []
    for component in check(folder).folder.components:
        data = (folder / component.path).read_bytes()
        tensors = tuple(
            (
                tensor.fqn,
                tensor.dtype,
                tensor.shape,
                tensor.data_offsets and data[slice(*tensor.data_offsets)],
            )
            for tensor in component.tensors
        )
        result.append((component.path, component.scopes, tensors))
    for state in check(folder).sharded:
        files = {path: (folder / path).read_bytes() for path in state.files}
        result.append((state.path, state.scopes, files))
    return result


SAID = [
    # The first pattern that matches the name of a scenario: what check must say, and (in turn) may
    # say as well.
    ("clean-distinct-equal", ["identical-models"], set()),
    ("clean-submodule-*", [], {"wrapper-prefix"}),
    ("clean-*", [], set()),
    ("lone-bare-*", [], set()),
    ("lone-nested-*", ["nested-prefix"], set()),
    ("sharded-*-nested*", ["nested-prefix"], set()),
    ("sharded-*", [], set()),
    ("single-level-*", ["wrapper-prefix"], set()),
    ("raw-*", ["identical-models", "surplus-states"], set()),
    ("student-teacher-raw-*", ["identical-models"], {"identical-states"}),
    ("student-teacher-wrapper-*", ["doubled-model", "shifted-entries"], {"identical-states"}),
    ("states-twice", ["surplus-states", "identical-states"], set()),
    ("pairs-twice", ["doubled-model", "doubled-states", "shifted-entries"], {"identical-states"}),
    ("compiled-first", [], {"wrapper-prefix"}),
    ("own-ddp-first", [], {"wrapper-prefix"}),
    ("*", ["doubled-model"], {"wrapper-prefix", "identical-states"}),
]


@pytest.mark.parametrize("data", [False, True], ids=["sampled", "data"])
@pytest.mark.parametrize("real", REAL, ids=lambda path: f"{path.parent.name[11:]}-{path.name}")
def test_check_says_what_the_run_did(real: Path, data: bool) -> None:
    wanted, also = next((want, more) for glob, want, more in SAID if Path(real.name).match(glob))
    found = {finding.code for finding in check(real / "checkpoint", data=data).findings}
    assert set(wanted) <= found <= {*wanted, *also}


def test_a_third_prepare_is_a_third_entry_in_1_12_only() -> None:
    for version, doubles in (("1.12.0", 2), ("1.15.0", 1)):
        for kind in ("bin", "safetensors"):
            findings = check(
                FIXTURES / f"accelerate-{version}" / f"triple-{kind}" / "checkpoint"
            ).findings
            assert [finding.code for finding in findings] == ["doubled-model"] * doubles


@pytest.mark.slow
def test_a_golden_folder_is_what_salvage_writes_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds words of ckptfix, which change: ``python -m fixtures.golden`` makes it anew."""
    golden: Any = importlib.import_module("fixtures.golden")

    (tmp_path / "accelerate-1.15.0").symlink_to(FIXTURES / "accelerate-1.15.0")
    monkeypatch.setattr(golden, "FIXTURES", tmp_path)
    golden.make(next(case for case in golden.CASES if case.code == "salvaged"))
    assert snapshot(tmp_path / "golden" / "salvaged") == snapshot(FIXTURES / "golden" / "salvaged")


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_an_unrelated_note_silences_no_other_finding(tmp_path: Path, golden: Path) -> None:
    """Two custom objects in equal state get the note ``identical-states``: they say nothing about
    other files.
    """
    folder = tmp_path / "checkpoint"
    shutil.copytree(golden / "checkpoint", folder)

    def found() -> set[tuple[str, str]]:
        return {(finding.code, str(finding)) for finding in check(folder).all_findings}

    before = found()
    number = len(list(folder.glob("custom_checkpoint_*.pkl")))
    for index in (number, number + 1):
        torch.save({"tokens": 7}, folder / f"custom_checkpoint_{index}.pkl")
    after = found()
    assert before <= after
    assert ("identical-states", f"custom_checkpoint_{number + 1}.pkl") in {
        (code, words.split(" ")[0]) for code, words in after
    }
