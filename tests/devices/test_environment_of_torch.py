"""What torch is asked, in a process of its own: a torch or a driver that fails, crashes or hangs
takes nobody along.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckptfix.devices import environment_of_torch
from ckptfix.devices.environment_of_torch import look

pytestmark = pytest.mark.slow


@pytest.fixture
def torch_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module named torch that the other process finds first; the file to write it in."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "torch.py"


def test_this_machine() -> None:
    import torch

    said = look()
    assert (said["stage"], said["problem"]) == ("done", "")
    assert said["version"] == torch.__version__
    json.dumps(said)


def test_in_this_process_it_says_the_same() -> None:
    assert look(in_process=True) == look()


@pytest.mark.parametrize(
    ("text", "stage", "words"),
    [
        (
            "raise ImportError('libcuda.so.1: cannot open shared object file')",
            "import",
            "ImportError: libcuda",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "import", "SIGSEGV"),
        ("raise SystemExit(7)", "import", "status 7"),
        ("import time; time.sleep(600)", "import", "no answer in 2 s"),
        ("import os; os._exit(0)", "import", "the process ended early (while torch was imported)"),
    ],
)
def test_a_torch_that_cannot_be_imported(
    torch_says: Path, text: str, stage: str, words: str
) -> None:
    torch_says.write_text(text)
    said = look(patience=2.0 if "no answer" in words else 60.0)
    assert said["stage"] == stage
    assert words in said["problem"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "raise RuntimeError('CUDA driver initialization failed\\n  for 2 lines')",
            "initialization failed for 2 lines",
        ),
        ("import os; os.abort()", "SIGABRT"),
        ("import time; time.sleep(600)", "no answer in 5 s"),
    ],
)
def test_a_driver_that_cannot_be_asked(torch_says: Path, text: str, words: str) -> None:
    """What was said before it broke is kept."""
    torch_says.write_text(
        "class version: cuda = '12.8'\n"
        "__version__ = '2.9.0'\n"
        "import warnings\n"
        "warnings.warn('the driver is odd')\n"
        f"def __getattr__(name):\n    {text}\n"
    )
    said = look(patience=5.0)
    assert (said["version"], said["builds"], said["stage"]) == ("2.9.0", ["cuda 12.8"], "devices")
    assert words in said["problem"]


def test_warnings_of_torch_are_evidence(torch_says: Path) -> None:
    torch_says.write_text(
        "import warnings\nwarnings.warn('CUDA initialization:\\n unknown error')\nraise "
        "ImportError('x')"
    )
    assert look()["warnings"] == ["CUDA initialization: unknown error"]


def test_noise_on_the_standard_output_is_no_answer(torch_says: Path) -> None:
    torch_says.write_text(
        "print('{\"stage\": 3'); print('[1]'); print('hello')\nraise ImportError('gone')"
    )
    assert look()["problem"] == "ImportError: gone"


def test_the_current_folder_is_no_place_for_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    assert look()["stage"] == "done"
    assert not (tmp_path / "ran").exists()


def test_the_one_who_asks_imports_no_torch() -> None:
    code = (
        "import sys; from ckptfix.devices.environment_of_torch import look; look(); print('torch' "
        "in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_steps_are_all_named() -> None:
    stages = [stage for stage, _ in environment_of_torch._steps()]
    assert stages[-1] == "done"
    assert set(stages) - {"done"} | {"start"} == set(environment_of_torch._DOING)
