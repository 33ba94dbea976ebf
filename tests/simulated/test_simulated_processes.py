"""Building the simulator, and running code in processes that have it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated import requires_simulator
from tests.simulated.processes import Faults, run_simulated, start_simulated
from tests.simulated.simulator import ROOT, VARIABLE

pytestmark = [requires_simulator, pytest.mark.slow]

MOVE = """
    import torch
    from tests.simulated import simulate
    torch.randn(4, device="cuda:0").to("cuda:1")
    print(torch.initial_seed(), [(pair, len(copies)) for pair, copies in simulate(2).log().items()])
"""


def called_by_name() -> None:
    import torch

    print(torch.ones(2, device="cuda:1").to("cuda:0").sum().item())


def test_code_runs_with_devices_and_a_fixed_seed() -> None:
    assert run_simulated(MOVE, count=2) == "0 [((0, 1), 1)]\n"


def test_a_function_runs_with_faults() -> None:
    faults: Faults = {(1, 0): {"kind": "zeros", "dtype": "float32"}, (0, 1): "bitflip"}
    assert run_simulated(called_by_name, count=2, faults=faults) == "0.0\n"


def test_a_failure_shows_what_was_written() -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)status 1.*--- stdout\nbefore.*ZeroDivisionError"
    ):
        run_simulated("print('before'); 1 / 0")


def test_an_endless_process_is_ended() -> None:
    with pytest.raises(AssertionError, match=r"(?s)no end after 5 s; it wrote:\nbefore"):
        start_simulated(
            ["-c", "import time; print('before', flush=True); time.sleep(99)"], timeout=5
        )


def test_a_name_that_hides_the_simulation_is_refused(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_real.py").write_text(
        "import pytest\n@pytest.mark.simulated(2)\ndef test_it(): pass\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--rootdir={tmp_path}",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert (
        "test_real.py::test_it: its name must say that its devices are simulated"
        in done.stderr + done.stdout
    )


def test_a_process_that_imports_no_torch_pays_nothing() -> None:
    code = "import sys; print('torch' in sys.modules, 'tests.simulated' in sys.modules)"
    assert run_simulated(["-c", code]) == "False False\n"


def test_this_process_has_no_devices() -> None:
    import torch

    assert VARIABLE not in os.environ
    assert not torch.cuda.is_available()


def in_pytest(folder: Path, body: str, **environment: str) -> tuple[str, str]:
    """Run a module of simulated tests with pytest; return what it printed and its last line."""
    module = folder / "test_inner_simulated.py"
    module.write_text(f"import os, pytest, torch\npytestmark = pytest.mark.simulated(2)\n{body}")
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow: -\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-ra",
        f"--rootdir={folder}",
        str(module),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout, done.stdout.strip().splitlines()[-1]


def test_reports_of_the_other_process_are_repeated(tmp_path: Path) -> None:
    body = """
def test_good(simulator): assert torch.cuda.device_count() == 2
def test_bad(simulator): print("seen"); assert simulator.count() == 7
def test_left_out(): pytest.skip("for a reason")
@pytest.mark.xfail(strict=True)
def test_known(): assert False
@pytest.fixture
def broken(): raise OSError("in the fixture")
def test_broken(broken): pass
"""
    printed, last = in_pytest(tmp_path, body)
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error" in last, printed
    for words in ("assert 0 == 7", "seen", "for a reason", "OSError: in the fixture"):
        assert words in printed


def test_a_crash_fails_the_tests_it_took_along(tmp_path: Path) -> None:
    body = """
def test_before(): pass
def test_crash(): os.kill(os.getpid(), 11)
def test_after(): pass
"""
    printed, last = in_pytest(tmp_path, body)
    assert "2 failed, 1 passed" in last, printed
    assert "the process of these tests ended with status -11" in printed
    assert "Fatal Python error: Segmentation fault" in printed


def test_without_a_compiler_its_tests_are_skipped(tmp_path: Path) -> None:
    printed, last = in_pytest(tmp_path, "def test_it(simulator): pass\n", PATH="")
    assert "1 skipped" in last, printed
    assert "no C++ compiler" in printed


def test_without_a_registry_other_versions_are_skipped(tmp_path: Path) -> None:
    body = "@pytest.mark.accelerate('1.6.0')\ndef test_it(simulator): pass\n"
    printed, last = in_pytest(tmp_path, body, PIP_NO_INDEX="1")
    assert "1 skipped" in last, printed
    assert "no package registry, so no accelerate 1.6.0" in printed


def test_a_build_that_fails_fails_its_tests(tmp_path: Path) -> None:
    printed, last = in_pytest(
        tmp_path, "def test_it(simulator): pass\n", CXX="/bin/false", TMPDIR=str(tmp_path)
    )
    assert "1 failed" in last, printed
    assert "/bin/false -std=c++20" in printed
