"""The command line as a function, for tests that read what it prints."""

from collections.abc import Callable

import pytest

from ckptfix.cli import run

Said = Callable[..., tuple[int, str, str]]
"""Runs ckptfix in this process with these arguments; returns the status, and what it printed to
stdout and stderr.
"""


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Run ckptfix here; what was printed before is not part of what it says."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call
