"""A reader of the output that goes away early, as ``| head -1`` does: no verb that writes is
stopped by it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"
VERBS = ["repair", "undo", "migrate", "salvage", "seal"]


def ckptfix(*arguments: object, lines: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command with a pipe at its stdout, whose reader takes some lines and closes it."""
    read, write = os.pipe()
    if not lines:
        os.close(read)  # before the command begins: what it prints first fails
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptfix", *map(str, arguments)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    if lines:
        with os.fdopen(read) as reader:
            for _ in range(lines):
                reader.readline()
    _, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, "", errors)


def prepared(folder: Path, verb: str) -> list[object]:
    """Make what a verb shall work on, and return its arguments."""
    fixture = "clean-safetensors" if verb in ("migrate", "seal") else "wrapper-safetensors"
    shutil.copytree(FIXTURES / fixture / "checkpoint", folder / "c")
    if verb == "undo":
        subprocess.run(
            [sys.executable, "-m", "ckptfix", "repair", folder / "c"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    if verb == "salvage":
        os.truncate(folder / "c" / "model.safetensors", 600)
    more: dict[str, list[object]] = {
        "migrate": [folder / "new", "--to", "bin"],
        "salvage": [folder / "new"],
    }
    return [verb, folder / "c", *more.get(verb, [])]


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def outcome(folder: Path) -> dict[str, bytes]:
    """Return the names of all files, with the bytes of those that hold no times and paths."""
    return {
        name: b"" if ".ckptfix" in name or name.endswith(".json") else data
        for name, data in files_of(folder).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_writes_ends_as_with_a_reader(tmp_path: Path, verb: str) -> None:
    results: list[tuple[int, str, dict[str, bytes]]] = []
    for case, lines in (("read", 1000), ("head", 1), ("closed", 0)):
        folder = tmp_path / case
        folder.mkdir()
        arguments = prepared(folder, verb)
        before = files_of(folder)
        result = ckptfix(*arguments, lines=lines)
        assert files_of(folder) != before, "the verb did nothing"
        results.append((result.returncode, result.stderr.replace(str(folder), ""), outcome(folder)))
    read, head, closed = results
    assert head == read
    assert closed == read
    assert "Traceback" not in read[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["check", FIXTURES / "wrapper-safetensors" / "checkpoint"], 1),
        (["check", FIXTURES / "clean-safetensors" / "checkpoint"], 0),
        (["check", FIXTURES / "clean-safetensors" / "checkpoint", "--json"], 0),
        (["check", "/nonexistent", "--json"], 2),
        (["--help"], 0),
        (["repair", "--help"], 0),
    ],
)  # fmt: skip
def test_the_exit_status_does_not_depend_on_the_reader(
    arguments: list[object], status: int
) -> None:
    result = ckptfix(*arguments)
    assert (result.returncode, result.stderr) == (status, "")


@pytest.mark.slow
def test_a_full_disk_under_the_output_is_reported_and_stops_no_repair(tmp_path: Path) -> None:
    arguments = prepared(tmp_path, "repair")
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "ckptfix", *map(str, arguments)]
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert result.returncode == 0
    assert result.stderr.count("No space left on device") == 1
    assert "the result is not printed" in result.stderr
    assert not (tmp_path / "c" / "model_1.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_from_the_start(tmp_path: Path, closed: str) -> None:
    """The number of a closed stream goes to the next file that is opened: nothing may be printed
    into that.
    """
    arguments = prepared(tmp_path, "repair")
    line = f'"$0" "$@" {closed}'
    command = ["sh", "-c", line, sys.executable, "-m", "ckptfix", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    check = [sys.executable, "-m", "ckptfix", "check", str(tmp_path / "c"), "--json"]
    report = subprocess.run(check, capture_output=True, text=True, timeout=120)
    assert json.loads(report.stdout)["status"] == 0
