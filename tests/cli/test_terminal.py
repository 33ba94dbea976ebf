"""Colours and progress bars: when they are drawn, and when they are not."""

import io
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from ckptfix.cli import run
from ckptfix.cli.report import Report, wants_colour

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "fixtures" / "accelerate-1.15.0" / "wrapper-safetensors" / "checkpoint"
VERBS = ("check", "diff", "doctor", "migrate", "repair", "salvage", "seal", "undo", "verify")


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, None),
        ({"TERM": "xterm-256color", "CLICOLOR": "1"}, None),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, None),  # no-color.org: "when present and not an empty string"
        ({"TERM": "dumb"}, False),
        ({"CLICOLOR": "0"}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "0"}, None),
        ({"CLICOLOR_FORCE": "1", "CLICOLOR": "0", "TERM": "dumb"}, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ],
)
def test_the_environment_asks_for_colours_or_against_them(
    variables: dict[str, str], wanted: bool | None
) -> None:
    assert wants_colour(variables) is wanted


def on_a_terminal(*arguments: object, **variables: str) -> str:
    """All that the command writes to a terminal, stdout and stderr together."""
    master, slave = pty.openpty()
    plain = {name: value for name, value in os.environ.items() if "COLOR" not in name}
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptfix", *map(str, arguments)],
        stdout=slave, stderr=slave, cwd=ROOT, env={**plain, "TERM": "xterm", **variables},
    )  # fmt: skip
    os.close(slave)
    written = b""
    while select.select([master], [], [], 60)[0]:
        try:
            written += os.read(master, 65536)
        except OSError:  # the other end is closed
            break
    process.wait(60)
    os.close(master)
    return written.decode()


@pytest.mark.slow
def test_a_terminal_gets_colours_unless_it_is_told_not_to() -> None:
    assert "\x1b[31m" in on_a_terminal("check", FIXTURE)
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {"CLICOLOR": "0"}):
        assert "\x1b" not in on_a_terminal("check", FIXTURE, **variables)
    assert "\x1b" not in on_a_terminal("check", FIXTURE, "--color=never")
    assert "\x1b[31m" in on_a_terminal("check", FIXTURE, "--color", "always", NO_COLOR="1")


@pytest.mark.parametrize(
    ("is_terminal", "term", "drawn"),
    [(True, "xterm", True), (True, "dumb", False), (False, "xterm", False)],
)
def test_a_bar_is_drawn_only_where_it_can_be_drawn_again(
    is_terminal: bool, term: str, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", term)
    with Report().progress("reading") as advance:
        advance(1024)
    assert ("reading" in stderr.getvalue()) is drawn


def test_colours_can_be_asked_for_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["check", str(FIXTURE), "--color", "always"]) == 1
    coloured = capsys.readouterr().out
    assert "\x1b[31m\x1b[1m  error\x1b[0m" in coloured
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(["check", str(FIXTURE)]) == 1
    assert capsys.readouterr().out == coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(["check", str(FIXTURE)]) == 1
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_that_reports_takes_the_option(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run([verb, "--help", "--all"])
    assert "--color [auto|always|never]" in capsys.readouterr().out
    assert run([verb, "--color", "sometimes", "x"]) == 2


def test_the_script_of_run_keeps_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    run(["run", "--help"])
    assert "--color" not in capsys.readouterr().out
