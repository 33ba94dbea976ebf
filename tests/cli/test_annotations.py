"""SARIF and the commands of GitHub workflows: the same findings and sentences as in text, in the
form of each.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import pytest

from ckptfix.cli import run
from ckptfix.cli.annotations import Annotation, github_line, sarif
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.diagnosis.findings.catalogue import CODES

FIXTURES = Path(__file__).parents[2] / "fixtures"
DOUBLED = FIXTURES / "accelerate-1.15.0" / "student-teacher-wrapper-safetensors" / "checkpoint"
GOLDEN = sorted(folder.parent for folder in (FIXTURES / "golden").glob("*/checkpoint"))
LINE = re.compile(r"::(error|warning|notice) ((?:\w+=[^,:\n]*)(?:,\w+=[^,:\n]*)*)::([^\r\n]*)")

OBJECTS: dict[str, tuple[set[str], dict[str, str]]] = {
    "log": ({"version", "runs"}, {"$schema": "text", "version": "text", "runs": "run[]"}),
    "run": ({"tool"}, {"tool": "tool", "invocations": "invocation[]", "results": "result[]", "columnKind": "text"}),
    "tool": ({"driver"}, {"driver": "component"}),
    "component": ({"name"}, {"name": "text", "version": "text", "rules": "rule[]"}),
    "rule": ({"id"}, {"id": "text", "shortDescription": "message", "defaultConfiguration": "configuration"}),
    "configuration": (set(), {"level": "level"}),
    "invocation": (
        {"executionSuccessful"},
        {"executionSuccessful": "flag", "exitCode": "number", "toolExecutionNotifications": "notification[]"},
    ),
    "notification": ({"message"}, {"level": "level", "message": "message", "locations": "location[]"}),
    "result": (
        {"message"},
        {"ruleId": "text", "ruleIndex": "number", "level": "level", "message": "message", "locations": "location[]"},
    ),
    "message": ({"text"}, {"text": "text"}),
    "location": (set(), {"physicalLocation": "place"}),
    "place": ({"artifactLocation"}, {"artifactLocation": "artifact"}),
    "artifact": (set(), {"uri": "uri"}),
}  # fmt: skip
"""Of SARIF 2.1.0 (sections 3.13 to 3.58), what a log of ours may have: object -> (required,
property -> kind).
"""


def ensure_valid(value: Any, kind: str) -> None:
    if kind.endswith("[]"):
        assert isinstance(value, list)
        assert (
            len({json.dumps(one, sort_keys=True) for one in value}) == len(value)
            or kind == "result[]"
        )
        for one in value:
            ensure_valid(one, kind.removesuffix("[]"))
    elif kind in OBJECTS:
        required, properties = OBJECTS[kind]
        assert required <= value.keys() <= properties.keys(), kind
        for name, one in value.items():
            ensure_valid(one, properties[name])
    elif kind == "level":
        assert value in ("none", "note", "warning", "error")
    elif kind == "uri":
        assert re.fullmatch(r"[A-Za-z0-9._~%/:-]+", value), "a reference by RFC 3986"
        assert urlsplit(value).scheme in ("", "file")
    else:
        assert type(value) is {"text": str, "flag": bool, "number": int}[kind]


def log_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    printed = capsys.readouterr()
    assert printed.err == ""
    log: dict[str, Any] = json.loads(printed.out)
    ensure_valid(log, "log")
    assert log["version"] == "2.1.0"
    only: dict[str, Any]
    (only,) = log["runs"]
    for result in only["results"]:
        assert only["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    return only


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_check_says_the_same_in_every_form(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(folder / "checkpoint")
    status = run(["check", path, "--json"])
    (document,) = json.loads(capsys.readouterr().out)["checkpoints"]
    below = [one for report in document.get("below", ()) for one in report["findings"]]
    expected = sorted((one["severity"], one["code"]) for one in document["findings"] + below)

    assert run(["check", path, "--format", "sarif"]) == status
    only = log_of(capsys)
    assert sorted((one["level"], one["ruleId"]) for one in only["results"]) == expected
    messages = [one["message"]["text"] for one in only["results"]]
    assert all(one["message"] in "\n".join(messages) for one in document["findings"])
    for rule in only["tool"]["driver"]["rules"]:
        assert rule["shortDescription"]["text"] == CODES[rule["id"]].meaning
    assert only["invocations"][0]["exitCode"] == status
    said = [one["message"]["text"] for one in only["invocations"][0]["toolExecutionNotifications"]]
    assert {f"not checked: {words}" for words in document["not_checked"]} <= set(said)

    assert run(["check", path, "--format", "github"]) == status
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::")]
    matches = [match for match in map(LINE.fullmatch, lines) if match]
    assert len(matches) == len(lines)
    levels = {"error": "error", "warning": "warning", "notice": "note"}
    found = [
        (levels[match[1]], match[2].rpartition("title=ckptfix")[2].strip()) for match in matches
    ]
    assert sorted(one for one in found if one[1]) == expected


def test_a_finding_is_at_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = os.fsdecode("a b:c,ö\n%".encode() + b"\xff")
    folder = Path(shutil.copytree(DOUBLED, tmp_path / name))
    monkeypatch.chdir(tmp_path)
    for path in (folder, Path(name)):
        assert run(["check", str(path), "--format", "sarif"]) == 1
        result, *_ = log_of(capsys)["results"]
        uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert unquote_to_bytes(uri.removeprefix("file://")) == os.fsencode(
            path / "model_1.safetensors"
        )
        assert uri.startswith("file:///") is path.is_absolute()
        assert run(["check", str(path), "--format", "github"]) == 1
        line, *_ = capsys.readouterr().out.split("\n")
        match = LINE.fullmatch(line)
        assert match is not None
        assert r"a b%3Ac%2Cö\n%25\xff/model_1.safetensors" in match[2]


def test_what_github_would_take_for_its_own_is_escaped() -> None:
    line = github_line(Annotation(Severity.WARNING, "50%\r\n::stop", Path("a,b:c%"), "x"))
    assert line == r"::warning file=a%2Cb%3Ac%25,title=ckptfix x::50%25\r\n::stop"


def test_several_checkpoints_are_one_run_and_a_failure_is_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    assert run(["check", str(DOUBLED), str(missing), "--format", "sarif"]) == 2
    only = log_of(capsys)
    assert {one["ruleId"] for one in only["results"]} == {"doubled-model", "shifted-entries"}
    (invocation,) = only["invocations"]
    assert not invocation["executionSuccessful"]
    errors = [one for one in invocation["toolExecutionNotifications"] if one["level"] == "error"]
    assert [one["message"]["text"] for one in errors] == [f"{missing} does not exist"]


@pytest.mark.parametrize(
    "arguments", [["check", "missing"], ["check", "--no-such", "x"], ["verify", "missing"]]
)
def test_a_run_that_failed_prints_its_form_still(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--format", "sarif"]) == 2
    only = log_of(capsys)
    assert not only["results"]
    assert [one["level"] for one in only["invocations"][0]["toolExecutionNotifications"]] == [
        "error"
    ]
    assert run([*arguments, "--format=github"]) == 2
    printed = capsys.readouterr()
    assert printed.err == ""
    assert LINE.fullmatch(printed.out.rstrip("\n"))


def test_verify_annotates_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(DOUBLED, tmp_path / "checkpoint"))
    assert run(["repair", str(folder)]) == 0
    assert run(["seal", str(folder)]) == 0
    capsys.readouterr()
    assert run(["verify", str(folder), "--format", "sarif"]) == 0
    assert log_of(capsys)["results"] == []
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert run(["verify", str(folder), "--format", "sarif"]) == 1
    results = log_of(capsys)["results"]
    assert {one["ruleId"] for one in results} == {"digest-changed"}
    assert {one["level"] for one in results} == {"error"}
    uris = {one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for one in results}
    assert uris == {weights.as_uri()}
    assert run(["verify", str(folder), "--format", "github"]) == 1
    assert (
        f"::error file={weights},title=ckptfix digest-changed::model.safetensors: "
        in capsys.readouterr().out
    )


def test_verify_says_that_nothing_was_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(DOUBLED), "--format", "github"]) == 1, "check finds damage"
    assert "::nothing was verified: there is no manifest" in capsys.readouterr().out
    folder = Path(shutil.copytree(DOUBLED, tmp_path / "checkpoint"))
    assert run(["repair", str(folder)]) == 0
    capsys.readouterr()
    assert run(["verify", str(folder), "--format", "github"]) == 3
    words = f"nothing was verified: there is no manifest; next: ckptfix seal {folder}"
    assert f"::error file={folder},title=ckptfix::{words}" in capsys.readouterr().out
    assert run(["verify", str(folder), "--format", "sarif"]) == 3
    (invocation,) = log_of(capsys)["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 3)
    assert words in [one["message"]["text"] for one in invocation["toolExecutionNotifications"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "x", "--json", "--format", "github"], "contradict"),
        (["verify", "x", "--device-map", "auto", "--format", "github"], "text or json"),
        (["repair", "x", "--format", "github"], "is not one of 'text', 'json'"),
    ],
)
def test_forms_that_a_verb_does_not_have_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert words in printed.out + printed.err


def test_a_run_without_findings_has_its_lists() -> None:
    log = sarif([], 0)
    ensure_valid(log, "log")
    assert json.loads(json.dumps(log))["runs"][0]["results"] == []
