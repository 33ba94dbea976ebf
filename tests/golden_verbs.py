"""What every verb prints, its JSON and its exit status, of a folder and of S3, frozen as
transcripts: ``python -m tests.golden_verbs [VERB...]`` writes them anew.

A case is a script. Lines that begin with ``ckptfix`` run the command line in this process; the
others make folders and damage (see ``Bench``). ``DIGEST`` is that of the last dry run. ``@/`` is a
place that is a folder first, and a prefix of a simulated S3 bucket in a second run, where ``only
folder`` or ``only s3`` does not stand first. Each run is done twice, from nothing: as it is
written, and with ``--json``. A transcript has

    === NAME of the case
    # a line that makes folders
    $ a command
    > a line of stdout; "as: COMMAND" is what that one printed
    ! a line of stderr
    status N
    now FOLDER: the names in it at the end; "now: the same files" as before the last commands
    --- json: the same script with --json; a document is broken into lines
    --- on S3: the same but for these lines (- in the folder, + on S3)

``tests/test_golden_verbs.py`` compares. What differs from run to run and from machine to machine is
in ``REPLACED``.
"""

import difflib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from unittest.mock import patch

from ckptfix import hardware
from ckptfix.cli import run
from ckptfix.devices import environment_of_torch
from ckptfix.environment import doctor
from ckptfix.storage import s3, stores
from ckptfix.storage.stores import Patience
from fixtures.frozen import JOURNALS, thaw, thaw_bucket, timeline
from tests.golden_cases import CASES
from tests.stores.simulated_s3 import Cloud, open_simulated, read, refusal

FIXTURES = Path(__file__).parents[1] / "fixtures"
TRANSCRIPTS = FIXTURES / "transcripts"
FOLDER, BUCKET = "runs", "s3://simulated/runs"
CLOCK = 1_000_000_000
"""Seconds since 1970 of the first file that a script makes; each next one is a second younger."""

MEMORY = Path("/dev/shm")
WIDTH = 100
WITHOUT_JSON = {"--help", "--version", "explain", "help", "run"}

REPLACED = (
    ("the temporary folder of the case", "{here}", "<here>"),
    ("times", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+]00:00", "<time>"),
    ("times, as people write them", r"(?<=checked after )\d{4}-\d\d-\d\d \d\d:\d\d", "<time>"),
    ("durations", r"(?<=held this lock for )\d+ \w+", "<duration>"),
    ("days", r"(?<=since )\d{4}-\d\d-\d\d", "<day>"),
    (
        "digests of plans",
        r"(expected digest )[0-9a-f]{12}, found [0-9a-f]{12}",
        r"\1<digest>, found <digest>",
    ),
    ("digests of plans", r"(--expect |\"digest\": \")[0-9a-f]{12}\b", r"\1<digest>"),
    ("versions", r"(Python|version|torch|accelerate) \d+\.\d+\.\d+[^,\s\"]*", r"\1 <version>"),
    (
        "libraries of this machine",
        r'"python": "[^"]+", "executable": "[^"]+", "packages": {[^}]*}',
        '"python": "<version>", "executable": "<python>", "packages": {}',
    ),
    ("host, process and chance in a name", r"[\w.-]+-\d+-[0-9a-f]{8}(?=\.results)", "<process>"),
)
"""What differs between runs and machines: what it is, its pattern, and what stands for it."""


class Bench:
    """A temporary folder, which is the working folder, and a bucket; makes files for a script."""

    def __init__(self, here: Path, *, on_s3: bool) -> None:
        self.here, self.on_s3 = here, on_s3
        self.root = BUCKET if on_s3 else FOLDER
        self.cloud = Cloud(1 << 10)
        self.cloud.clock = CLOCK
        self.clock = CLOCK

    def place(self, word: str) -> str:
        """Return a word of a script with its ``@/`` as the path or the URL that it stands for."""
        return re.sub(r"@(?=/|$)", self.root, word)

    def make(self, line: str) -> None:
        """Do a line of a script that is no command."""
        verb, *words = shlex.split(line)
        getattr(self, f"_{verb}")(*words)
        for folder in [path for path in (self.here / FOLDER).rglob("*") if path.is_dir()]:
            os.utime(folder, (CLOCK, CLOCK))

    def files(self) -> list[str]:
        """Return all that is there: a line for each folder, with the names in it."""
        names = [
            path.relative_to(self.here)
            for path in self.here.rglob("*")
            if not path.is_dir() or path.is_symlink()
        ] + [PurePosixPath(key) for key in self.cloud.objects]
        return [
            replaced(
                f"now {folder}: {' '.join(shlex.quote(path.name) for path in paths)}", self.here
            )
            for folder, paths in groupby(sorted(names), lambda path: path.parent.as_posix())
        ]

    def _put(self, fixture: str, target: str) -> None:
        """Copy a fixture, a folder or a file."""
        source = FIXTURES / fixture
        if source.is_file():
            self._save(target, source.read_bytes())
            return
        for path in sorted(source.rglob("*")):
            if path.is_file():
                self._save(f"{target}/{path.relative_to(source).as_posix()}", path.read_bytes())

    def _write(self, target: str, text: str) -> None:
        self._save(target, text.encode().decode("unicode_escape").encode())

    def _flip(self, target: str, offset: str) -> None:
        """Change all bits of the byte at an offset."""
        data = bytearray(self._load(target))
        data[int(offset)] ^= 0xFF
        self._save(target, bytes(data))

    def _cut(self, target: str, length: str) -> None:
        self._save(target, self._load(target)[: int(length)])

    def _remove(self, target: str) -> None:
        if self._is_object(target):
            del self.cloud.objects[self._key(target)]
        else:
            Path(self.place(target)).unlink()

    def _folder(self, target: str) -> None:
        Path(self.place(target)).mkdir(parents=True)

    def _link(self, target: str, to: str) -> None:
        path = Path(self.place(target))
        path.unlink(missing_ok=True)
        path.symlink_to(to)

    def _refuse(self, target: str) -> None:
        """Let the store answer 403 for an object."""

        def strike(method: str, key: str, is_after: bool) -> None:
            if key == self._key(target):
                raise refusal(403, "AccessDenied", method)

        self.cloud.strike = strike

    def _thaw(self, case: str, moment: str) -> None:
        """Take a state of the corpus of journals: what a repair or an undo left when it was killed
        after this call.
        """
        body = json.loads((JOURNALS / f"{case}.json").read_text())
        states = timeline({}, (change for _, change, *_ in body["states"]))
        tree = dict(zip([name for name, *_ in body["states"]], states, strict=True))[moment]
        if self.on_s3:
            self.cloud.objects |= thaw_bucket(tree, body["bucket"]).objects
        else:
            (self.here / FOLDER).rmdir()
            thaw(tree, self.here / FOLDER)

    def _is_object(self, target: str) -> bool:
        return self.on_s3 and target.startswith("@")

    def _key(self, target: str) -> str:
        return self.place(target).removeprefix("s3://simulated/")

    def _load(self, target: str) -> bytes:
        if self._is_object(target):
            return read(self.cloud.objects[self._key(target)].body)
        return Path(self.place(target)).read_bytes()

    def _save(self, target: str, data: bytes) -> None:
        if self._is_object(target):
            self.cloud.write(self._key(target), data)
            return
        path = Path(self.place(target))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.clock += 1
        os.utime(path, (self.clock, self.clock))


class Said(NamedTuple):
    """What a run of the command line said."""

    status: int
    out: str
    err: str

    def at(self, bench: Bench) -> "Said":
        """Return it with the name that the place has in a folder, and without what differs from run
        to run.
        """
        quoted = BUCKET.replace(":", "%3A")
        out, err = (
            replaced(text.replace(BUCKET, FOLDER).replace(quoted, FOLDER), bench.here)
            for text in (self.out, self.err)
        )
        return Said(self.status, out, err)


@contextmanager
def surroundings(bench: Bench) -> Iterator[None]:
    """Let the bucket answer for all stores, and keep settings and devices of this machine out."""
    torch: dict[str, Any] = {
        "version": "0.0.0", "builds": [], "kind": None, "devices": [], "warnings": [],
        "stage": "done", "problem": "", "verdicts": None,
    }  # fmt: skip
    kept = {
        name: os.environ[name]
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
        if name in os.environ
    }
    own = {
        "HOME": str(bench.here / "home"),
        "HF_HOME": str(bench.here / "home"),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "COLUMNS": "80",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
    }
    with ExitStack() as stack:
        enter = stack.enter_context
        # Last of all, when the environment is again what it was.
        stack.callback(time.tzset)
        enter(patch.object(s3, "S3Store", type(open_simulated(bench.cloud, BUCKET))))
        enter(patch.object(stores, "PATIENCE", Patience(3, 0, 0)))
        enter(patch.object(doctor, "read_machine", hardware.Machine))
        enter(patch.object(environment_of_torch, "look", lambda *, in_process: torch))
        enter(patch.dict(os.environ, kept | own, clear=True))
        stack.callback(os.chdir, os.getcwd())
        os.chdir(bench.here)
        time.tzset()
        yield


def call(arguments: list[str]) -> Said:
    """Run the command line in this process, and ``run`` in its own: it ends python as a script
    does.
    """
    if arguments[:1] == ["run"]:
        done = subprocess.run(
            [sys.executable, "-m", "ckptfix", *arguments],
            env={**os.environ, "PYTHONPATH": str(FIXTURES.parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        return Said(done.returncode, done.stdout, done.stderr)
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        status = run(arguments)
    said = (stream.buffer.getvalue().decode() for stream in (out, err))
    return Said(status, *said)


def with_json(arguments: list[str]) -> list[str] | None:
    """Return the arguments with ``--json``, or None for a verb without, and a line that names its
    form.
    """
    if (
        not arguments
        or arguments[0] in WITHOUT_JSON
        or "--format" in arguments
        or "-0" in arguments
    ):
        return None
    return [arguments[0], "--json", *arguments[1:]]


def laid_out(value: Any, margin: str = "") -> str:
    """Return a value as JSON with its keys in their order: broken where a line is too long, and
    lines are filled.
    """
    whole = json.dumps(value)
    if len(margin) + len(whole) <= WIDTH or not isinstance(value, dict | list) or not value:
        return whole
    below = margin + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {laid_out(part, below)}" for key, part in value.items()]
    else:
        parts = [laid_out(part, below) for part in value]
    lines = [""]
    for part in parts:
        if lines[-1] and "\n" not in lines[-1] + part and len(lines[-1]) + len(part) < WIDTH:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{below}" + f",\n{below}".join(lines[1:]) + last


def written(out: str) -> str:
    """Return stdout as it stands in a transcript: lines that are JSON documents in several lines,
    where they are in the form of ``json.dumps``.
    """
    lines = []
    for line in out.splitlines(keepends=True):
        is_document = line.startswith("{") and line == json.dumps(json.loads(line)) + "\n"
        lines.append(laid_out(json.loads(line)) + "\n" if is_document else line)
    return "".join(lines)


def marked(mark: str, text: str) -> Iterator[str]:
    """Yield the lines of a text behind a mark; one says so where the last has no end."""
    for line in text.splitlines(keepends=True):
        yield f"{mark} {line.rstrip(chr(10))}".rstrip(" ").replace("\0", "\\0")
    if text and not text.endswith("\n"):
        yield f"{mark} (no end of line)"


def play(script: str, *, on_s3: bool, is_json: bool) -> list[str]:
    """Run a script in a new folder; return its part of the transcript, line by line."""
    lines: list[str] = []
    printed: dict[str, str] = {}
    digest = "0" * 12
    files: list[str] = []
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        bench = Bench(Path(folder).resolve(), on_s3=on_s3)
        (bench.here / FOLDER).mkdir()
        with surroundings(bench):
            for line in map(str.strip, script.strip().splitlines()):
                if not line.startswith("ckptfix"):
                    bench.make(line)
                    files = bench.files()
                    lines += [] if is_json else [f"# {line}"]
                    continue
                command = line.replace("DIGEST", digest)
                arguments = [bench.place(word) for word in shlex.split(command)[1:]]
                asked = with_json(arguments) if is_json else arguments
                raw = call(arguments if asked is None else asked)
                if plan := re.search(r"(?:--expect |\"digest\": \")([0-9a-f]{12})\b", raw.out):
                    digest = plan[1]
                said = raw.at(bench)
                if asked is None:
                    continue
                command = replaced(
                    shlex.join(["ckptfix", *asked]).replace(BUCKET, FOLDER), bench.here
                )
                lines.append(f"$ {command}")
                # What is printed again is not written again.
                if said.out.count("\n") > 3 or len(said.out) > WIDTH:
                    first = printed.setdefault(said.out, command)
                    said = said if first is command else said._replace(out=f"as: {first}\n")
                lines += marked(">", written(said.out))
                lines += marked("!", said.err)
                lines.append(f"status {said.status}")
        now = bench.files()
        if not is_json:
            lines += ["now: the same files"] if now == files else now
    return lines


def replaced(text: str, here: Path) -> str:
    """Return a text with what differs from run to run replaced."""
    for _, pattern, words in REPLACED:
        text = re.sub(pattern.replace("{here}", re.escape(str(here))), words, text)
    return text


def differing(folder: list[str], s3: list[str]) -> list[str]:
    """Return the lines in which the run on S3 differs."""
    compared = list(difflib.unified_diff(folder, s3, lineterm="", n=0))[2:]
    return [line for line in compared if not line.startswith("@@")]


def transcript(script: str) -> str:
    """Return what a case says in all its ways."""
    first, _, rest = script.strip().partition("\n")
    only, script = (first, rest) if first.startswith("only ") else ("", script)
    parts: list[str] = []
    stored: list[str] = []
    for is_json in (False, True):
        here = play(script, on_s3=only == "only s3", is_json=is_json)
        if here:
            parts += ["--- json", *here] if is_json else here
        if not only and "@" in script:
            stored += differing(here, play(script, on_s3=True, is_json=is_json))
    if only:
        parts.insert(0, f"--- {only}")
    elif "@" in script:
        parts += ["--- on S3", *stored]
    return "\n".join(parts) + "\n"


def page_of(verb: str) -> Path:
    """Return the file with the transcripts of a verb."""
    return TRANSCRIPTS / f"{verb}.txt"


def frozen(verb: str) -> Mapping[str, str]:
    """Return the transcripts of a verb by the name of the case, as they are in its file."""
    parts = page_of(verb).read_text().split("=== ")[1:]
    return dict(part.split("\n", 1) for part in parts)


def main(verbs: list[str]) -> None:
    """Write the transcripts of these verbs, or of all."""
    TRANSCRIPTS.mkdir(exist_ok=True)
    for verb in verbs or CASES:
        parts = [f"=== {name}\n{transcript(script)}" for name, script in CASES[verb].items()]
        page_of(verb).write_text("".join(parts))
    for path in set(TRANSCRIPTS.iterdir()) - set(map(page_of, CASES)):
        path.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
