"""An interrupt at any moment is reported, and one that comes while cleaning up does not cut that
short.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptfix import migrate

DURING_THE_IMPORTS = """
import builtins, signal, sys
real = builtins.__import__
def interrupting(name, *args, **kwargs):
    if name == "click":
        builtins.__import__ = real
        signal.raise_signal(signal.SIGINT)
    return real(name, *args, **kwargs)
from ckptfix.__main__ import main
builtins.__import__ = interrupting
main()
"""

WHILE_CLEANING_UP = """
import signal
import shutil
from ckptfix.conversion import producing
real = shutil.rmtree
def clean(*args, **kwargs):
    signal.raise_signal(signal.SIGINT)
    real(*args, **kwargs)
shutil.rmtree = clean
producing.ensure_space = lambda *args: signal.raise_signal(signal.SIGINT)
from ckptfix.__main__ import main
main()
"""


@pytest.fixture
def lone(tmp_path: Path) -> Path:
    path = tmp_path / "a.bin"
    torch.save({"w": torch.ones(3)}, path)
    return path


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (DURING_THE_IMPORTS, "interrupted: nothing was changed"),
        (
            WHILE_CLEANING_UP,
            "interrupted: {0}/a.bin is unchanged, and nothing was written to {0}/b.safetensors",
        ),
    ],
    ids=["during-the-imports", "while-cleaning-up"],
)
def test_one_object_and_nothing_left(lone: Path, code: str, words: str) -> None:
    arguments = [
        "migrate",
        str(lone),
        str(lone.parent / "b.safetensors"),
        "--to",
        "safetensors",
        "--json",
    ]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True
    )
    document = json.loads(result.stdout)
    assert result.returncode == document["status"] == 130
    assert document["error"] == words.format(lone.parent)
    assert "Traceback" not in result.stderr
    assert ("still cleaning up after the first interrupt" in result.stderr) == (
        code == WHILE_CLEANING_UP
    )
    assert os.listdir(lone.parent) == ["a.bin"]


def test_a_second_interrupt_of_a_caller_leaves_nothing_either(
    lone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.rmtree
    calls: list[Path] = []

    def clean(path: Path, *, ignore_errors: bool) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(path, ignore_errors=ignore_errors)

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", clean)
    with pytest.raises(KeyboardInterrupt):
        migrate(lone, lone.parent / "b.safetensors", to="safetensors", progress=interrupt)
    assert len(calls) == 2
    assert os.listdir(lone.parent) == ["a.bin"]
