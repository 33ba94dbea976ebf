"""After `repair`, a correct script under stock accelerate has exactly the state of the run that
made the fixture.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What `repair` is told, by scenario. Where the bytes alone decide, nothing.
REPAIR_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "wrapper-safetensors": (),
    "wrapper-bin": (),
    "triple-safetensors": (),
    "triple-bin": (),
    "student-teacher-wrapper-safetensors": (),
    "student-teacher-wrapper-bin": (),
    "tied-weights-safetensors": (),
    "tied-weights-bin": (),
    "batchnorm": (),
    "submodule-named-module": (),
    "submodule-named-module-bin": (),
    "submodule-beside": (),
    "pairs-twice": (),
    "custom-object": ("--keep", "custom=1"),
    "states-twice": ("--keep", "optimizers=1", "--keep", "custom=1"),
    "raw-safetensors": ("--models", "1", "--keep", "optimizers=1"),
    "raw-bin": ("--models", "1", "--keep", "optimizers=1"),
    "student-teacher-raw-safetensors": ("--models", "2"),
    "student-teacher-raw-bin": ("--models", "2"),
    "own-ddp-first": ("--keys", "bare"),
    "compiled-first": ("--keys", "bare"),
    "compiled-first-wrapper": ("--keys", "bare"),
}
# What a correct script gets from the folder before the repair, where that is not the right state: a
# part of the error message. The other folders load (entry 0 is right) and hold an entry too many.
FAILS_BEFORE = {
    "student-teacher-wrapper-safetensors": "Missing key(s)",
    "student-teacher-wrapper-bin": "Missing key(s)",
    "custom-object": "Number of custom checkpoints",
    "states-twice": "Number of custom checkpoints",
    "pairs-twice": "Missing key(s)",
    "own-ddp-first": "Missing key(s)",
    "compiled-first": "Missing key(s)",
    "compiled-first-wrapper": "Missing key(s)",
}
SILENTLY_WRONG_BEFORE = ("student-teacher-raw-safetensors", "student-teacher-raw-bin")
CASES = [
    f"{version.name}/{scenario}"
    for version in sorted((ROOT / "fixtures").glob("accelerate-*"))
    for scenario in REPAIR_ARGUMENTS
    if (version / scenario).is_dir()  # some runs were made with one version only
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One fixture: its record, the repair, and what a stock script loads before and after it."""

    run: dict[str, Any]
    repair: subprocess.CompletedProcess[str]
    files: tuple[str, ...]
    before: dict[str, Any]
    after: dict[str, Any]

    def count(self, *stems: str) -> int:
        """Return how many entries of one role the repaired folder has."""
        return sum(name.split(".")[0].rstrip("_0123456789") in stems for name in self.files)


def load_with_stock(jobs: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Run the loading script once for all jobs."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.real.load_with_stock"],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Repair a copy of every fixture, then load all of them in one process."""
    folder = tmp_path_factory.mktemp("repaired")
    repairs, jobs = {}, []
    for case in CASES:
        source, copy = ROOT / "fixtures" / case, folder / case / "checkpoint"
        shutil.copytree(source / "checkpoint", copy)
        command = [
            sys.executable,
            "-m",
            "ckptfix",
            "repair",
            str(copy),
            *REPAIR_ARGUMENTS[Path(case).name],
        ]
        repairs[case] = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, timeout=60
        )
        for checkpoint in (source / "checkpoint", copy):
            jobs.append({"checkpoint": str(checkpoint), "run": str(source / "run.json")})
    results = load_with_stock(jobs)
    return {
        case: Outcome(
            run=json.loads((ROOT / "fixtures" / case / "run.json").read_text(encoding="utf-8")),
            repair=repairs[case],
            files=tuple(sorted(path.name for path in (folder / case / "checkpoint").iterdir())),
            before=results[2 * number],
            after=results[2 * number + 1],
        )
        for number, case in enumerate(CASES)
    }


def recorded(run: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a run in the form of the loading script's result."""
    return {
        "error": None,
        "models": [entry["tensors"] for entry in run["models"]],
        "optimizers": [entry["digest"] for entry in run["optimizers"]],
        "schedulers": [entry["state"] for entry in run["schedulers"]],
        "custom": [entry["state"] for entry in run["custom"]],
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_before_the_repair_something_is_wrong(case: str, outcomes: dict[str, Outcome]) -> None:
    outcome, scenario = outcomes[case], Path(case).name
    before = outcome.before
    if scenario in FAILS_BEFORE:
        assert FAILS_BEFORE[scenario] in before["error"]
    elif scenario in SILENTLY_WRONG_BEFORE:
        student, teacher = (entry["tensors"] for entry in outcome.run["models"])
        assert student != teacher
        assert before["error"] is None
        assert before["models"] == [student, student]  # the teacher has become a second student
    else:
        assert before == recorded(outcome.run)
        entries = list((ROOT / "fixtures" / case / "checkpoint").glob("*model*"))
        assert len(entries) > len(outcome.run["models"])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_after_the_repair_the_state_is_that_of_the_run(
    case: str, outcomes: dict[str, Outcome]
) -> None:
    outcome = outcomes[case]
    assert outcome.repair.returncode == 0, outcome.repair.stdout + outcome.repair.stderr
    assert outcome.after == recorded(outcome.run)
    assert outcome.count("model", "pytorch_model") == len(outcome.run["models"])
    assert outcome.count("scheduler") == len(outcome.run["schedulers"])
    assert outcome.count("optimizer") == len(outcome.run["optimizers"])
    assert outcome.count("custom_checkpoint") == len(outcome.run["custom"])


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.12.0", "1.15.0"])
def test_a_repair_of_the_models_alone_would_mix_up_the_optimizers(
    tmp_path: Path, version: str
) -> None:
    """Why ``doubled-states`` is an error: the second optimizer silently gets the state of the
    first.
    """
    source = ROOT / "fixtures" / f"accelerate-{version}" / "pairs-twice"
    shutil.copytree(source / "checkpoint", tmp_path / "checkpoint")
    command = [
        sys.executable,
        "-m",
        "ckptfix",
        "repair",
        str(tmp_path / "checkpoint"),
        "--only",
        "doubled-model",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1
    assert "optimizer 1 from optimizer_1.bin" in done.stdout
    run = json.loads((source / "run.json").read_text(encoding="utf-8"))
    (loaded,) = load_with_stock(
        [{"checkpoint": str(tmp_path / "checkpoint"), "run": str(source / "run.json")}]
    )
    first, second = (entry["digest"] for entry in run["optimizers"])
    assert first != second
    assert (loaded["error"], loaded["optimizers"]) == (None, [first, first])
