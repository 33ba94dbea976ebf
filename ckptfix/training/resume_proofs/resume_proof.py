"""Runs of a training script that prove its resume: one that is killed after a save, one without,
and the resumed one.

The script stays as it is. Each run is the user's own command with a recorder in every python of it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckptfix.errors import OperationError, UsageError
from ckptfix.training.resume_proofs.certificate import Certificate, certificate_of
from ckptfix.training.resume_proofs.recorded_runs import (
    SETTINGS,
    RankRun,
    RankRuns,
    Save,
    Settings,
    read_run,
)
from ckptfix.training.resume_proofs.resume_verdict import compare, control
from ckptfix.wording import count_of

DIR, CHECKPOINT = "{dir}", "{checkpoint}"
"""Places in the arguments of a script: the output folder of this run, and the checkpoint that is
resumed.
"""

RUN_DIR = "CKPTFIX_RUN_DIR"
"""Environment variable with the output folder of a run, for scripts that have no option for it."""

_PLACES = ("interrupted", "reference", "again")
_WORDS = {"reference": "uninterrupted", "again": "second uninterrupted"}
"""Runs with an output folder of their own; the resumed run goes on in that of the interrupted one.
"""

_STARTUP = Path(__file__).parent / "startup"
_GRACE = 5.0
"""Seconds that ranks have after one of them is done: one that waits for a collective of the others
never will be.
"""

_LONGEST_SAVE = 600.0
_RANK = re.compile(r"^\[(?:rank)?\d+\]: ?")
_RAISED = re.compile(
    r"(?!torch\.distributed\.elastic)[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b(?:: |$)"
)


@dataclass(frozen=True)
class Request:
    """Command to prove, and how.

    ``resume_arguments``: what the resumed run gets in addition. ``save_at``: the first save after
    this step counts. ``last_step``: where the runs end, None for the script's own end. ``output``:
    the folder that the script writes where no argument names it. ``keep``: a folder for what the
    runs write, None to delete it. ``timeout``: seconds a run.
    """

    command: Sequence[str]
    resume_arguments: Sequence[str] = ()
    save_at: int = 1
    last_step: int | None = None
    output: Path | None = None
    keep: Path | None = None
    guard: bool = False
    timeout: float | None = None

    @property
    def script(self) -> str:
        """Return the name of the script, or the command where none is named."""
        return next((one for one in self.command if one.endswith(".py")), self.command[0])


def prove_resume(
    request: Request, announce: Callable[[str], None] = lambda words: None
) -> Certificate:
    """Run a script with and without a kill, and compare the runs. Deletes what they wrote, unless
    asked to keep it.

    Raises UsageError when the script does not save, resumes nothing or ends too early,
    OperationError when it fails.
    """
    _check(request)
    with _workspace(request) as work:
        return _Proof(request, work, announce).certificate()


def _check(request: Request) -> None:
    if not request.command:
        raise UsageError(
            "the command is missing; next: ckptfix prove-resume -- train.py --output_dir {dir}"
        )
    names_folder = any(DIR in one for one in request.command) or RUN_DIR in _text_of(request.script)
    if request.output is None and not names_folder:
        raise UsageError(
            f"{request.script}: each run needs its own output folder; write {DIR} where the "
            f"command names the folder (-- {request.script} --output_dir {DIR}), or name a "
            "fixed output folder with --output"
        )
    if request.output is not None:
        for path in (request.output, *(_aside(request.output, name) for name in _PLACES)):
            if os.path.lexists(path):
                raise UsageError(
                    f"--output: {path} already exists, and the runs would write into it; move "
                    "it or choose another folder"
                )
    if request.last_step is not None and request.last_step <= request.save_at:
        raise UsageError(
            f"--steps {request.last_step}: expected more than --save-at {request.save_at}, "
            "otherwise nothing would be compared"
        )


def _text_of(script: str) -> str:
    try:
        return Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _aside(output: Path, name: str) -> Path:
    return output.with_name(f"{output.name}.{name}")


@contextmanager
def _workspace(request: Request) -> Iterator[Path]:
    if request.keep is not None:
        if request.keep.exists() and (not request.keep.is_dir() or any(request.keep.iterdir())):
            raise UsageError(
                f"--keep: {request.keep} exists and is not an empty folder; choose another path"
            )
        if request.output is not None and request.keep.resolve().is_relative_to(
            request.output.resolve()
        ):
            raise UsageError(
                f"--keep: {request.keep} is inside the --output folder, which must not exist "
                "when a run starts; choose another path"
            )
        request.keep.mkdir(parents=True, exist_ok=True)
        yield request.keep.resolve()
        return
    work = Path(tempfile.mkdtemp(prefix="ckptfix-proof-"))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@dataclass
class _Proof:
    request: Request
    work: Path
    announce: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)

    def certificate(self) -> Certificate:
        """Return the certificate of the request."""
        try:
            return self._certificate()
        finally:
            self._clear_output()

    def _certificate(self) -> Certificate:
        request = self.request
        interrupted = self._run(
            "interrupted", "interrupted", kill_at=request.save_at, last_step=request.last_step
        )
        save = self._save_of(interrupted)
        resumed = self._run(
            "resumed", "interrupted", base=save.number, last_step=request.last_step,
            extra=[one.replace(CHECKPOINT, save.folder) for one in request.resume_arguments],
        )  # fmt: skip
        self._check_resumed(interrupted, resumed, save)
        reference = self._run(
            "reference", "reference", entry_at=save.number, last_step=request.last_step
        )
        if not reference or all(step.number <= save.number for step in reference[0].steps):
            raise UsageError(
                f"{request.script}: no step follows the save after step {save.number}; save "
                "earlier or train longer"
            )
        files = self._files_of(save)
        found = compare(interrupted, reference, resumed, files=files)
        if found.control is None and found.differences:
            # A difference that two uninterrupted runs have as well is not the resume's.
            last = found.differences[0].step
            again = self._run("again", "again", last_step=last)
            control_difference, ignored = control(reference, again, last)
            found = compare(interrupted, reference, resumed, files=files, also_ignored=ignored)
            if control_difference is not None:
                found = type(found)(save.number, (), len(reference), control=control_difference)
        return certificate_of(
            request.script, found, reference, checkpoint=save.folder, guarded=request.guard,
            stopped=any(one.end == "last step" for one in reference), seconds=dict(self.seconds),
            kept=str(request.keep) if request.keep is not None else None,
            commands=dict(self.commands),
        )  # fmt: skip

    def _save_of(self, interrupted: RankRuns) -> Save:
        """Return the save after which the run was killed."""
        request = self.request
        steps = max((step.number for one in interrupted for step in one.steps), default=0)
        if not interrupted:
            raise UsageError(
                f"{request.script}: no optimizer step of an Accelerator was recorded; "
                "prove-resume needs a script that trains with accelerate or "
                "transformers.Trainer, in an environment where ckptfix is installed"
            )
        saves = [one for run in interrupted for one in run.saves]
        late = [one for one in saves if one.number >= max(request.save_at, 1)]
        if not late:
            earlier = sorted({one.number for one in saves})
            seen = (
                f"it saves after step {', '.join(map(str, earlier))}"
                if earlier
                else "it never saves"
            )
            raise UsageError(
                f"{request.script}: no save at step {request.save_at} or later in "
                f"{count_of(steps, 'step')} ({seen}); make the script save more often, or "
                "change --save-at or --steps"
            )
        if not any(one.end == "saved" for one in interrupted):
            raise UsageError(
                f"{request.script}: the script ends after the save at step {late[0].number}, "
                "so nothing is left to compare; save earlier or train longer"
            )
        return late[0]

    def _check_resumed(self, interrupted: RankRuns, resumed: RankRuns, save: Save) -> None:
        request = self.request
        how = (
            "pass the script's option that resumes: "
            f"--resume-args '--resume_from_checkpoint {CHECKPOINT}'"
        )
        if request.resume_arguments:
            how = f"check that {' '.join(request.resume_arguments)} makes it resume {save.folder}"
        if not resumed or not any(one.entries for one in resumed):
            raise UsageError(
                f"{request.script}: the resumed run took no step after the save at step "
                f"{save.number}; {how}, or train longer"
            )
        was_loaded = any(one.loads for one in resumed)
        weights = [one.entries[0].states.get("weights") for one in (interrupted[0], resumed[0])]
        if not was_loaded and weights[0] == weights[1]:
            raise UsageError(
                f"{request.script}: the resumed run started from scratch and loaded no checkpoint; "
                f"{how}"
            )

    def _files_of(self, save: Save) -> frozenset[str] | None:
        folder = Path(save.folder)
        if self.request.output is not None:
            output = Path(os.path.abspath(self.request.output))
            if folder.is_relative_to(output):
                folder = _aside(output, "interrupted") / folder.relative_to(output)
        try:
            return frozenset(os.listdir(folder))
        except OSError:
            return None

    # One run.

    def _run(
        self, name: str, place: str, *, extra: Sequence[str] = (), base: int = 0,
        kill_at: int | None = None, entry_at: int | None = None, last_step: int | None = None,
    ) -> list[RankRun]:  # fmt: skip
        """Run the command and return what it recorded. ``place``: the run whose output folder it
        writes.
        """
        request = self.request
        records = self.work / f"records-{name}"
        records.mkdir()
        folder = self._output(place)
        settings = Settings(
            str(records), os.getpid(), base=base, kill_at=kill_at, entry_at=entry_at,
            last_step=last_step, guard=request.guard,
        )  # fmt: skip
        command = [one.replace(DIR, str(folder)) for one in (*_executable(request.command), *extra)]
        self.commands[name] = " ".join(command)
        self.announce(f"{_WORDS.get(name, name)} run: {' '.join(command)}")
        environment = {
            **os.environ,
            SETTINGS: settings.as_variable(),
            RUN_DIR: str(folder),
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(_STARTUP), os.environ.get("PYTHONPATH")))
            ),
        }
        begin = time.monotonic()
        log = records / "output.log"
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    env=environment, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise UsageError(f"{command[0]}: cannot be run ({error.strerror})") from error
            try:
                was_stopped = self._watch(process, records)
            finally:
                _end(process, str(records))
        self.seconds[name] = round(time.monotonic() - begin, 2)
        self._put_aside(place)
        runs = read_run(records)
        if not was_stopped and process.returncode and not (runs and all(one.end for one in runs)):
            raise OperationError(
                f"{request.script}: the {_WORDS.get(name, name)} run failed with status "
                f"{process.returncode}: {self._said(log)}"
            )
        return runs

    def _watch(self, process: "subprocess.Popen[bytes]", records: Path) -> bool:
        """Wait for the end of a run; return whether its recorders asked for it, and not the script
        itself.
        """
        begin = changed = time.monotonic()
        ended = 0
        while process.poll() is None:
            now = time.monotonic()
            if self.request.timeout is not None and now - begin > self.request.timeout:
                raise OperationError(
                    f"{self.request.script}: a run took longer than {self.request.timeout:g} "
                    f"seconds (--timeout): {self._said(records / 'output.log')}"
                )
            names = os.listdir(records)
            count = sum(one.startswith("ended-") for one in names)
            if count != ended or any(one.startswith("saving-") for one in names):
                ended = count
                changed = min(now, changed + _LONGEST_SAVE)
            if ended and (ended >= _world(records) or now - changed > _GRACE):
                return True
            time.sleep(0.05)
        return False

    def _said(self, log: Path) -> str:
        """Return what a failed run said: its exceptions, which torchrun prints above a summary, or
        its last lines.
        """
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        raised = list(
            dict.fromkeys(one for line in lines if _RAISED.match(one := _RANK.sub("", line)))
        )
        where = (
            f"full output: {log}"
            if self.request.keep is not None
            else f"full output with --keep DIR: DIR/{log.parent.name}/{log.name}"
        )
        return f"{' / '.join(raised[-3:] or lines[-3:]) or 'it printed nothing'} ({where})"

    # Output folders.

    def _output(self, place: str) -> Path:
        """Return the output folder of a run; where the script always writes the same, put back what
        it wrote before.
        """
        if self.request.output is None:
            folder = self.work / place
            folder.mkdir(exist_ok=True)
            return folder
        output = Path(os.path.abspath(self.request.output))
        if _aside(output, place).exists():
            _aside(output, place).rename(output)
        return output

    def _put_aside(self, place: str) -> None:
        if self.request.output is not None:
            output = Path(os.path.abspath(self.request.output))
            if output.exists():
                output.rename(_aside(output, place))

    def _clear_output(self) -> None:
        if self.request.output is None or self.request.keep is not None:
            return
        output = Path(os.path.abspath(self.request.output))
        for folder in (output, *(_aside(output, name) for name in _PLACES)):
            shutil.rmtree(folder, ignore_errors=True)


def _executable(command: Sequence[str]) -> list[str]:
    """Return a command that can be started: a script gets this python; a program may lie next to
    this python.
    """
    if command[0].endswith(".py"):
        return [sys.executable, *command]
    beside = Path(sys.executable).parent / command[0]
    if shutil.which(command[0]) is None and beside.is_file():
        return [str(beside), *command[1:]]
    return list(command)


def _world(records: Path) -> int:
    """Return the number of ranks of a run, as one of them has written it."""
    return max(
        (one.world for path in records.glob("rank-*.jsonl") if (one := _header(path))), default=1
    )


def _header(path: Path) -> RankRun | None:

    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
    except ValueError:
        return None
    return RankRun(rank=first["rank"], world=first["world"], pid=first["pid"])


def _end(process: "subprocess.Popen[bytes]", token: str) -> None:
    """Kill every process of a run, and wait until none is left; torchrun's ranks have sessions of
    their own.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while (left := _processes_with(token)) and time.monotonic() < end:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    process.wait()


def _processes_with(token: str) -> list[int]:
    """Return the processes that inherited the settings of a run: its records' folder has a name of
    its own.
    """
    wanted = os.fsencode(token)
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError), open(f"/proc/{entry.name}/environ", "rb") as file:
                variables = file.read().split(b"\0")
                if any(
                    one.startswith(SETTINGS.encode() + b"=") and wanted in one for one in variables
                ):
                    found.append(int(entry.name))
    return found
