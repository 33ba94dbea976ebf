"""The side that asks, with workers that answer what a test wants. No torch in them, and no device
is needed.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfix.devices.probe import measuring as watching
from ckptfix.devices.probe.measuring import Watched, worker_command
from ckptfix.devices.probe.worker import Ending, Task, Work
from ckptfix.errors import OperationError

pytestmark = pytest.mark.slow

TASK = Task(work=Work.PAIR, pairs=((0, 1),), seed=1)

READY = """
import json, os, sys, time
def tell(answer): print(json.dumps(answer), flush=True)
tell({"ready": {"names": ["a", "b"], "pci": ["", ""], "peer_access": [[0, 1, True], [1, 0, None]], "identity": {}}})
DONE = {"ending": "done", "steps": 3, "failures": [], "unusable": -1, "stage": "", "message": "", "left_out": []}
for line in sys.stdin:
    asked = json.loads(line)
"""


@pytest.fixture
def started() -> Iterator[list[Watched]]:
    every: list[Watched] = []
    yield every
    for watched in every:
        watched.close()


def watched(
    started: list[Watched], body: str, patience: float = 1.0, before: str = READY
) -> Watched:
    program = before + textwrap.indent(textwrap.dedent(body), "    " if before else "")
    made = Watched(patience, [sys.executable, "-c", program])
    started.append(made)
    return made


def pid_of(bench: Watched) -> int:
    assert bench._process is not None
    return bench._process.pid


def test_a_task_is_done_and_the_machine_described(started: list[Watched]) -> None:
    bench = watched(started, 'tell({"stage": "x"}); tell({"stage": None}); tell({"result": DONE})')
    machine = bench.machine()
    assert machine.names == ("a", "b")
    assert machine.peer_access == {(0, 1): True, (1, 0): None}
    pid = pid_of(bench)
    for _ in range(3):
        outcome = bench.run(TASK, 5.0)
        assert (outcome.ending, outcome.steps) == (Ending.DONE, 3)
    assert pid_of(bench) == pid, "one worker does all while nothing goes wrong"
    assert 0 < bench.starting < 60


def test_a_copy_that_hangs_is_ended_and_the_next_task_gets_a_new_worker(
    started: list[Watched],
) -> None:
    bench = watched(
        started,
        'tell({"stage": "copy"})\ntime.sleep(600 if asked["seconds"] == 1.0 else '
        '0)\ntell({"result": DONE})',
    )
    bench.machine()
    first = pid_of(bench)
    outcome = bench.run(TASK, 1.0)
    assert (outcome.ending, outcome.stage) == (Ending.HUNG, "copy")
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert bench.run(TASK, 60.0).ending is Ending.DONE
    assert pid_of(bench) != first


def test_work_between_copies_may_take_longer(started: list[Watched]) -> None:
    bench = watched(started, 'tell({"stage": None}); time.sleep(1.5); tell({"result": DONE})')
    bench.machine()
    assert bench.run(TASK, 1.0).ending is Ending.DONE


def test_a_worker_that_dies_is_told_with_its_signal_and_stage(started: list[Watched]) -> None:
    bench = watched(
        started, f'tell({{"stage": "copy"}}); os.kill(os.getpid(), {int(signal.SIGABRT)})'
    )
    bench.machine()
    outcome = bench.run(TASK, 1.0)
    assert (outcome.ending, outcome.stage, outcome.message) == (
        Ending.DIED,
        "copy",
        "killed by SIGABRT",
    )
    assert bench.run(TASK, 1.0).ending is Ending.DIED


def test_a_worker_that_leaves_is_told_with_its_last_words(started: list[Watched]) -> None:
    bench = watched(started, 'sys.exit("what went wrong")')
    bench.machine()
    outcome = bench.run(TASK, 1.0)
    assert (outcome.ending, outcome.stage) == (Ending.DIED, "")
    assert outcome.message == "exit status 1 (what went wrong)"


def test_half_a_line_and_foreign_lines_are_no_answers(started: list[Watched]) -> None:
    bench = watched(started, 'print("{\\"result\\": ", flush=True); tell({"result": DONE})')
    bench.machine()
    assert bench.run(TASK, 1.0).ending is Ending.DONE


def test_after_an_error_the_worker_is_not_asked_again(started: list[Watched]) -> None:
    bench = watched(started, 'tell({"result": {**DONE, "ending": "raised"}})')
    bench.machine()
    first = pid_of(bench)
    assert bench.run(TASK, 1.0).ending is Ending.RAISED
    bench.run(TASK, 1.0)
    assert first not in (None, bench._process and bench._process.pid)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('no driver')", "no driver"),
        ("import os; os.abort()", "killed by SIGABRT"),
        ("print('{}', flush=True); import time; time.sleep(60)", "exit status"),
    ],
)
def test_a_worker_that_does_not_start_is_an_error_with_its_words(
    started: list[Watched], program: str, said: str
) -> None:
    bench = watched(started, program, before="")
    with pytest.raises(OperationError, match="before it was ready") as caught:
        bench.machine()
    assert said in str(caught.value)


def test_a_worker_that_is_never_ready_is_given_up(
    started: list[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "STARTING", 0.5)
    bench = watched(started, "import time; time.sleep(60)", before="")
    with pytest.raises(OperationError, match="not ready"):
        bench.machine()


def test_a_program_that_is_not_there_is_an_error(started: list[Watched]) -> None:
    bench = Watched(1.0, ["/no/such/python"])
    with pytest.raises(OperationError, match="could not be started"):
        bench.machine()


def test_the_worker_imports_what_this_process_would_and_nothing_of_the_current_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('the torch.py of a checkpoint was run')\n")
    command = list(worker_command())
    done = subprocess.run(
        command, cwd=tmp_path, input="", capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert '"ready"' in done.stdout
    assert command[3:] == sys.path


def test_variables_that_hide_faults_do_not_reach_the_worker(
    started: list[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("KEPT", "1")
    body = (
        'tell({"result": {**DONE, "message": str(sorted({"CUDA_LAUNCH_BLOCKING", "KEPT"} & '
        "set(os.environ)))}})"
    )
    bench = watched(started, body)
    bench.machine()
    assert bench.run(TASK, 1.0).message == "['KEPT']"


def test_a_worker_ends_when_its_parent_is_killed() -> None:
    # It holds the other end of its own input, so that only the death of its parent can end it, as
    # if a copy hung.
    parent = (
        "import os, subprocess, time\nfrom ckptfix.devices.probe.measuring import "
        "worker_command\nend, other = os.pipe()\nchild = subprocess.Popen(worker_command(), "
        "stdin=end, stdout=subprocess.PIPE, "
        "pass_fds=(other,))\nchild.stdout.readline()\nprint(child.pid, "
        "flush=True)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        child = int(process.stdout.readline())
    os.kill(child, 0)
    process.kill()
    process.wait()
    for _ in range(200):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError(f"the worker {child} outlived its parent")


@pytest.mark.parametrize(
    ("end", "ending"), [("sys.exit()", Ending.DIED), ("time.sleep(600)", Ending.HUNG)]
)
def test_what_was_done_before_a_bad_end_is_counted(
    started: list[Watched], end: str, ending: Ending
) -> None:
    body = f"""
    for _ in range(3):
        tell({{"stage": "copy"}}); tell({{"stage": None}})
    tell({{"stage": "copy"}}); {end}
    """
    bench = watched(started, body)
    bench.machine()
    outcome = bench.run(TASK, 1.0)
    assert (outcome.ending, outcome.steps, outcome.stage) == (ending, 3, "copy")
