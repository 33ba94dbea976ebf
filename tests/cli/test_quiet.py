"""``--quiet`` prints no line of a result, no bar and no remark; failures, documents and the exit
status stay.
"""

import json
import shutil
from pathlib import Path

import pytest

from ckptfix.cli import run

FIXTURES = Path(__file__).parents[2] / "fixtures"
DOUBLED = FIXTURES / "accelerate-1.15.0" / "student-teacher-wrapper-safetensors" / "checkpoint"
STEPS: dict[str, tuple[list[str], int]] = {
    "verify": (["verify", "{}"], 1),
    "seal": (["seal", "{}", "--force"], 0),
    "diff": (["diff", "{}/model.safetensors", "{}/model_2.safetensors"], 1),
    "repair": (["repair", "{}"], 0),
    "undo": (["undo", "{}"], 0),
    "migrate": (["migrate", "{}", "{}-new", "--to", "bin", "--dry-run", "--allow-damage"], 0),
    "salvage": (["salvage", "{}", "{}-saved"], 0),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DOUBLED, tmp_path / "checkpoint"))


@pytest.mark.parametrize("verb", STEPS)
def test_a_quiet_verb_prints_nothing_and_ends_as_the_loud_one(
    verb: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if verb == "undo":
        run(["repair", str(folder)])
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    arguments, status = STEPS[verb]
    assert run([word.replace("{}", str(other)) for word in arguments]) == status
    assert capsys.readouterr().out
    assert run([word.replace("{}", str(folder)) for word in arguments] + ["-q"]) == status
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("verb", ["check", "repair", "seal", "undo", "verify"])
def test_of_several_paths_only_failures_are_printed(
    verb: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    assert run([verb, "-q", str(folder), missing]) >= 2
    printed = capsys.readouterr()
    assert printed.out in ("", f"{folder}\n")  # check names what is not clean
    assert missing in printed.err
    assert all(missing in line or str(folder) in line for line in printed.err.splitlines())


def test_a_quiet_verb_prints_the_document_that_was_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", "--json", "-q", str(folder)]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == 1


@pytest.mark.parametrize(
    "asked", [["--json"], ["--format", "json"], ["--format=json"], ["--json", "--format", "json"]]
)
def test_json_is_an_alias_of_a_format(
    asked: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", str(folder), *asked]) == 1
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["path"] == str(folder)
    assert run(["check", str(folder), *asked, "--no-such-option"]) == 2
    assert json.loads(capsys.readouterr().out)["status"] == 2
