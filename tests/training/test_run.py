"""``ckptfix run``: the script runs as under python, with the guard on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptfix.checkpoint.latest import incomplete
from tests.sampling import one_of

ROOT = Path(__file__).resolve().parents[2]
BINARIES = Path(sys.executable).parent
RUN = (sys.executable, "-m", "ckptfix", "run")

pytestmark = pytest.mark.slow


def run(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **variables},
        timeout=200,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder from which a script of a sub-folder is started."""
    (tmp_path / "scripts").mkdir()
    return tmp_path


def script(project: Path, text: str) -> str:
    (project / "scripts" / "train.py").write_text(text)
    return "scripts/train.py"


LOOKS_AROUND = """
import gc, json, sys
import beside
module = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "name": __name__, "path": sys.path[0], "file": __file__, "doc": __doc__, "spec": __spec__,
    "package": __package__, "cached": __cached__, "main": module.__dict__ is globals(), "gc": gc.isenabled(),
    "builtins": type(__builtins__).__name__,
    "heavy": [name for name in ("torch", "accelerate") if name in sys.modules], "beside": beside.__file__,
}))
"""


@pytest.mark.parametrize(
    "launcher", [RUN, (str(BINARIES / "ckptfix"), "run")], ids=["-m", "console"]
)
def test_the_script_sees_what_it_sees_under_python(
    launcher: tuple[str, ...], project: Path
) -> None:
    name = script(project, LOOKS_AROUND)
    (project / "scripts" / "beside.py").write_text("")
    arguments = ["--json", "--help", "-x", "--", "a b", "--on-reprepare", "run"]
    expected = run(sys.executable, name, *arguments, cwd=project)
    found = run(*launcher, name, *arguments, cwd=project)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == expected.stdout
    assert json.loads(found.stdout)["argv"] == [name, *arguments]
    assert not list((project / "scripts" / "__pycache__").glob("train*")), (
        "python leaves no compiled script"
    )


def test_a_script_behind_a_link(project: Path) -> None:
    name = script(project, "import beside, sys; print(sys.path[0], __file__)")
    (project / "scripts" / "beside.py").write_text("")
    (project / "link.py").symlink_to(name)
    expected = run(sys.executable, "link.py", cwd=project)
    assert run(*RUN, "link.py", cwd=project).stdout == expected.stdout != ""


CHAINED = """
try:
    1 / 0
except ZeroDivisionError as error:
    raise ValueError('chained') from error
"""
INNER = """
def inner():
    raise OSError
try:
    inner()
except OSError:
    raise TypeError
"""
HOOK = "import sys; sys.excepthook = lambda *a: print(a[0], a[2].tb_lineno)\n\nraise KeyError"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("import sys; sys.exit(7)", 7),
        ("raise SystemExit('said so')", 1),
        ("raise FileNotFoundError('gone')", 1),
        ("raise MemoryError", 1),
        ("from ckptfix import LockedError; raise LockedError('busy')", 1),
        ("import click; raise click.UsageError('no')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("this is no python", 1),
        (CHAINED, 1),
        (INNER, 1),
        (HOOK, 1),
        ("pass", 0),
    ],
)
def test_exceptions_and_statuses_go_through(text: str, status: int, project: Path) -> None:
    if "python" not in text:
        text = f"import atexit; atexit.register(print, 'ended', flush=True)\n{text}"
    name = script(project, text)
    expected, found = run(sys.executable, name, cwd=project), run(*RUN, name, cwd=project)
    assert found.returncode == expected.returncode == status
    assert found.stdout == expected.stdout
    assert found.stderr == expected.stderr, "a traceback begins with the script"


def test_no_script() -> None:
    for arguments in (["nowhere.py"], [], ["--no-such-option", "train.py"], ["."]):
        found = run(*RUN, *arguments, cwd=ROOT)
        assert found.returncode == 2
        assert "Usage: ckptfix run" in found.stderr
    assert "SCRIPT" in run(*RUN, "--help", cwd=ROOT).stdout


REPREPARES = """
import os, sys
os.environ["HF_HOME"] = "/set/by/the/script"
from accelerate import Accelerator
from huggingface_hub import constants
import torch

def square(number):
    return number * number

if __name__ == "__main__":
    assert constants.HF_HOME == "/set/by/the/script", "imported before the script could say"
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    prepared = accelerator.prepare(model, optimizer)
    again = accelerator.prepare(model, optimizer)
    count = len(accelerator._models), len(accelerator._optimizers)
    line = f"{accelerator.num_processes} {sys.argv[1:]} {count} {prepared[0] is again[0]}\\n"
    os.write(1, line.encode())  # at once: the other process writes there, too
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        os._exit(0)  # at a usual exit gloo's threads abort now and then, with ckptfix and without
"""


def test_the_guard_is_on(project: Path) -> None:
    name = script(project, REPREPARES)
    found = run(*RUN, name, "--lr", "1", cwd=project)
    assert found.stdout == "1 ['--lr', '1'] (1, 1) True\n", found.stderr
    assert f"UserWarning: prepare() at {project / name}:" in found.stderr
    found = run(*RUN, "--on-reprepare", "raise", name, cwd=project)
    assert found.returncode == 1
    assert "UsageError: prepare()" in found.stderr
    assert "(1, 2)" in run(sys.executable, name, cwd=project).stdout, (
        "without the guard the optimizer doubles"
    )


LAUNCHERS = (
    "torchrun --standalone --nproc_per_node 2 --module",
    # accelerate starts several processes for GPUs alone (or through MPI); what it starts may still
    # use the CPU.
    "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 -m",
)


@pytest.mark.parametrize("launcher", one_of(LAUNCHERS), ids=lambda launcher: launcher.split()[0])
def test_two_processes(launcher: str, project: Path) -> None:
    name = script(project, REPREPARES)
    command = [str(BINARIES / launcher), "ckptfix run", name, "--lr 1"]
    found = run(*" ".join(command).split(), cwd=project)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "2 ['--lr', '1'] (1, 1) True\n" * 2, found.stderr
    assert found.stderr.count("UserWarning: prepare()") == 2


ACCUMULATES = """
from accelerate import Accelerator
import torch

accelerator = Accelerator(gradient_accumulation_steps=2)
model = torch.nn.Linear(2, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


def test_the_warning_of_backward_names_what_can_be_typed(project: Path) -> None:
    name = script(project, ACCUMULATES)
    found = run(*RUN, name, cwd=project)
    assert "ckptfix run --no-check-backward SCRIPT silences this warning" in found.stderr
    assert "check_backward=" not in found.stderr
    assert run(*RUN, "--no-check-backward", name, cwd=project).stderr == ""


SAVES_ALONE = """
import os, sys
from accelerate import Accelerator
import torch

accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(2, 2))
for step in range(2):
    accelerator.backward(model(torch.ones(1, 2)).sum())
    if accelerator.is_main_process:
        accelerator.save_state(f"step-{step}")
    accelerator.backward(model(torch.ones(1, 2)).sum())
accelerator.save_state("all")
accelerator.wait_for_everyone()
accelerator.load_state("all")
accelerator.wait_for_everyone()
os._exit(0)
"""


def test_a_script_that_saves_on_the_main_process_alone(project: Path) -> None:
    name = script(project, SAVES_ALONE)
    launcher = str(BINARIES / "torchrun"), "--standalone", "--nproc_per_node", "2", "--module"
    found = run(*launcher, "ckptfix", "run", name, cwd=project)
    assert found.returncode == 0, found.stderr
    saved = [path for path in project.iterdir() if path.name != "scripts"]
    assert {path.name for path in saved} == {"step-0", "step-1", "all"}
    for path in saved:
        assert (path / ".ckptfix" / "manifest.json").exists()
        assert incomplete(path) is None
    assert (project / "all" / "random_states_1.pkl").exists()


SPAWNS = """
import multiprocessing

def square(number):
    return number * number

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [2, 3]))
"""


def test_spawned_processes_find_the_script(project: Path) -> None:
    found = run(*RUN, script(project, SPAWNS), cwd=project)
    assert found.stdout == "[4, 9]\n", found.stderr
