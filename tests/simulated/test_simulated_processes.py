"""Building the simulator, and running code in processes that have it."""

import inspect
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.simulated import building, requires_simulator
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


def test_no_grandchild_is_left_over() -> None:
    code = """
        import subprocess, sys
        command = [sys.executable, "-c", "import time; time.sleep(99)"]
        print(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
    """
    status = Path(f"/proc/{int(start_simulated(['-c', inspect.cleandoc(code)]).stdout)}/stat")
    deadline = time.monotonic() + 60
    while status.exists() and status.read_text().rsplit(")")[1].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


def test_many_processes_build_once(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\nsleep 0.05\nfor last; do :; done\ncase "$*" in *-shared*) last="$4";; esac\n'
        f'[ "$1" = -shared ] && last="$3"\n: > "$last"\nmktemp {made}/XXXXXX > /dev/null\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "CXX": str(compiler), "TMPDIR": str(tmp_path)}
    code = "from tests.simulated import building; print(building.built())"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    libraries = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(libraries) == 1
    library = Path(libraries.pop().decode().strip())
    assert library.exists()
    assert len(list(made.iterdir())) == len(list(building.SOURCES.glob("*.cpp"))) + 1
    assert {path.name for path in library.parent.iterdir()} == {library.name, "lock"}


def test_a_folder_that_others_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"ckptfix-simulated-{os.getuid()}").mkdir()
    (tmp_path / f"ckptfix-simulated-{os.getuid()}").chmod(0o777)
    with pytest.raises(RuntimeError, match="others can write here"):
        building.built()


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no room left >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RuntimeError, match="no room left"):
        building.built()


def test_the_reason_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert building.why_not().startswith("no C++ compiler")


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


def test_settings_are_json() -> None:
    code = f"import os; print(os.environ['{VARIABLE}'])"
    told = json.loads(run_simulated(["-c", code], count=2, faults={(0, 1): "late"}))
    assert told["devices"] == 2
    assert told["faults"] == [[0, 1, {"kind": "late"}]]
