"""Run the tutorial as a reader does; ``python -m tests.manual.tutorial`` prints it with the output
of today.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.manual.pages import ROOT, matches, split_commands

TUTORIAL = ROOT / "ckptfix" / "manual" / "tutorial.md"
_FILE = re.compile(r"<!-- file: (\S+) -->\n```python\n(.*?)```\n", re.DOTALL)
_CONSOLE = re.compile(r"(```console\n)(.*?)(```\n)", re.DOTALL)


def played(folder: Path) -> str:
    """Run every command of the tutorial in a folder, and return the tutorial with what they
    print.
    """
    text = TUTORIAL.read_text()
    for name, content in _FILE.findall(text):
        (folder / name).write_text(content)
    return _CONSOLE.sub(lambda part: part[1] + _played(part[2], folder) + part[3], text)


def _played(script: str, folder: Path) -> str:
    parts = []
    for command, written in split_commands(script):
        said = _said(command, folder)
        parts.append(f"$ {command}\n{written if matches(written, said) else said}")
    return "".join(parts)


def _said(command: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={
            **os.environ,
            "PATH": path,
            "OMP_NUM_THREADS": "1",
            "LC_ALL": "C",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.stdout


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as here:
        TUTORIAL.write_text(played(Path(here)))
