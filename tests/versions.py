"""Install the wheel with other versions of Python and the libraries, and use it.

    python -m tests.versions [--python 3.13] [--pythons DIR] [--write]

Each row of ``ROWS`` gets an environment of its own in a temporary folder, with the wheel and
without the sources. ``tests/version_steps.py`` is run in it. The table that is printed is in
``ckptfix/manual/limits.md``, where ``--write`` puts the rows that were run. PyPI's builds of torch
for CUDA take up to 7 GB of disk each, one at a time.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "ckptfix" / "manual" / "limits.md"
FIXTURE = (
    ROOT / "fixtures" / "accelerate-1.15.0" / "student-teacher-wrapper-safetensors" / "checkpoint"
)
LIBRARIES = ("torch", "accelerate", "safetensors", "transformers", "peft", "numpy")


class Row(NamedTuple):
    """One environment; a library without a version is not installed."""

    python: str
    torch: str = ""
    accelerate: str = ""
    safetensors: str = ""
    transformers: str = ""
    peft: str = ""
    numpy: str = ""
    is_oldest: bool = False
    """All other requirements in their oldest version, not in the newest."""

    @property
    def cells(self) -> str:
        """The row's part of the table that does not depend on its result."""
        versions = (self.python, *(getattr(self, name) or "-" for name in LIBRARIES))
        return f"| {' | '.join(versions)} |"

    @property
    def pins(self) -> list[str]:
        """The libraries as pip's requirements."""
        named = {name: getattr(self, name) for name in LIBRARIES}
        pins = {name: version for name, version in named.items() if version}
        if self.is_oldest:
            pins = {**oldest(), **pins}
        return [f"{name}=={version}" for name, version in pins.items()]


ROWS = (
    Row("3.10", "2.4.0", "1.0.0", "0.4.3", "4.44.0", "0.15.0", "1.24.0", is_oldest=True),
    Row("3.11", "2.13.0", "1.6.0", "0.5.3", "4.51.3", "0.15.2", "1.26.4"),
    Row("3.11", "2.13.0", "1.12.0", "0.7.0", "5.0.0", "0.18.1", "2.2.6"),
    Row("3.11", "2.13.0", "1.15.0", "0.8.0", "5.23.0", "0.21.2", "2.4.6"),
    Row("3.12", "2.13.0", "1.15.0", "0.8.0", "5.24.0", "0.21.2", "2.4.6"),
    Row("3.13", "2.14.1", "1.15.0", "0.8.0", "5.24.0", "0.21.2", "2.4.6"),
    Row("3.14", "2.15.0", "1.15.0", "0.8.0", "5.24.0", "0.21.2", "2.4.6"),
    Row("3.10"),
    Row("3.12"),
    Row("3.13"),
    Row("3.14"),
)

STEPS: Mapping[str, tuple[str, ...]] = {
    "repair": (),
    "seal": (),
    "save": ("accelerate",),
    "load": ("accelerate",),
    "guard": ("accelerate",),
    "migrate": ("torch",),
    "weights": ("transformers", "peft"),
    "trainer": ("transformers",),
}
"""The functions of ``version_steps``, and the libraries that each needs."""

HEAD = (
    "| Python | torch | accelerate | safetensors | transformers | PEFT | NumPy | passed |\n"
    "|---|---|---|---|---|---|---|---|\n"
)
_TABLE = re.compile(r"(<!-- versions -->\n)(.*?)(<!-- end -->)", re.DOTALL)


class Impossible(Exception):
    """A row that cannot be tested here; its text says why."""


class Failed(Exception):
    """A step that failed, with its output."""

    def __init__(self, step: str, output: str) -> None:
        super().__init__(f"FAILED: {step}")
        self.output = output


def oldest() -> dict[str, str]:
    """Return the oldest versions that ``pyproject.toml`` allows of what ckptfix always needs."""
    text = (ROOT / "pyproject.toml").read_text()
    block = text.partition("\ndependencies = [\n")[2].partition("\n]")[0]
    return dict(re.findall(r'"([\w-]+)>=([\d.]+)"', block))


def interpreter(version: str, folder: Path | None) -> Path:
    """Return the Python of this version from a folder, or from PATH."""
    name = f"python{version}"
    for candidate in (folder and folder / name, shutil.which(name)):
        # A shim of pyenv exists for versions that are not installed, too. And an environment needs
        # the real file: a link to it may lie far from the standard library.
        ask = "import os, sys; print(os.path.realpath(sys.executable))"
        if candidate and Path(candidate).exists():
            done = subprocess.run([candidate, "-c", ask], capture_output=True, text=True)
            if done.returncode == 0:
                return Path(done.stdout.strip())
    raise Impossible(f"no {name} on this machine")


def build_wheel(folder: Path, *options: str) -> Path:
    """Build the wheel from a copy of the sources, because a build writes into them."""
    sources = folder / "sources"
    shutil.copytree(ROOT / "ckptfix", sources / "ckptfix", ignore=lambda *_: {"__pycache__"})
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, sources)
    pip = [sys.executable, "-m", "pip", "-q", "wheel", "--no-deps", *options]
    subprocess.run([*pip, "-w", folder, sources], check=True, stdout=sys.stderr)
    shutil.rmtree(sources)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(row: Row, wheel: Path, python: Path, environment: Path) -> Path:
    """Make the row's environment; return its Python."""
    subprocess.run([python, "-m", "venv", "--without-pip", environment], check=True)
    inside = environment / "bin" / "python"
    if row.torch:
        arguments = [str(wheel), *row.pins]
    else:
        # What the commands import that need no torch; an installed ckptfix would ask for torch.
        arguments = ["--no-deps", str(wheel), "click", "msgspec", "tqdm", "typing-extensions"]
    pip = [sys.executable, "-m", "pip", "--python", str(inside), "-q", "install", *arguments]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode == 0:
        return inside
    if missing := re.search(r"No matching distribution found for (\S+)", done.stderr):
        raise Impossible(f"no {missing[1]} for Python {row.python}")
    raise Failed("install", done.stderr)


def take_steps(row: Row, python: Path, folder: Path) -> str:
    """Take each step that the row's libraries allow; return the names of the steps."""
    script = folder / "version_steps.py"
    shutil.copy(ROOT / "tests" / "version_steps.py", script)
    shutil.copytree(FIXTURE, folder / "damaged")
    steps = [step for step, needs in STEPS.items() if all(getattr(row, name) for name in needs)]
    # Nothing of the sources or of this environment may help, and nothing may ask the hub.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "OMP_NUM_THREADS": "1"}
    for step in steps:
        done = subprocess.run(
            [python, script, step, folder],
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise Failed(step, done.stdout)
    return "all" if len(steps) == len(STEPS) else ", ".join(steps)


def result(row: Row, wheel: Path, pythons: Path | None) -> str:
    """Try one row; return the last cell of its line in the table."""
    with tempfile.TemporaryDirectory(prefix="ckptfix-versions-") as name:
        folder = Path(name)
        try:
            python = interpreter(row.python, pythons)
            inside = install(row, wheel, python, folder / "environment")
            work = folder / "work"
            work.mkdir()
            return take_steps(row, inside, work)
        except Impossible as error:
            return f"not tested: {error}"
        except Failed as error:
            print(error.output, file=sys.stderr)
            return str(error)


def table() -> str:
    """Return the table of the manual."""
    part = _TABLE.search(PAGE.read_text())
    assert part, f"{PAGE} has no table of versions"
    return part[2]


def write(lines: Iterable[str]) -> None:
    """Put these lines into the table of the manual, in the order of ``ROWS``."""
    known = [*lines, *table().splitlines()]
    rows = [next((line for line in known if line.startswith(row.cells)), "") for row in ROWS]
    text = HEAD + "".join(f"{line}\n" for line in rows if line)
    PAGE.write_text(_TABLE.sub(lambda part: part[1] + text + part[3], PAGE.read_text()))


def main() -> int:
    """Print the table; return 1 if a step of a row failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--python", action="append", help="only the rows of this Python")
    parser.add_argument("--pythons", type=Path, help="a folder with python3.10 and others")
    parser.add_argument("--write", action="store_true", help="write the table into the manual")
    options = parser.parse_args()
    lines: list[str] = []
    print(HEAD, end="")
    with tempfile.TemporaryDirectory(prefix="ckptfix-wheel-") as folder:
        wheel = build_wheel(Path(folder))
        for row in ROWS:
            if options.python and row.python not in options.python:
                continue
            start = time.monotonic()
            lines.append(f"{row.cells} {result(row, wheel, options.pythons)} |")
            print(lines[-1], f"{time.monotonic() - start:.0f} s", flush=True)
    if options.write:
        write(lines)
    return any("FAILED: " in line for line in lines)


if __name__ == "__main__":
    sys.exit(main())
