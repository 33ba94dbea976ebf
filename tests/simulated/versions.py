"""Other versions of accelerate for one process: a folder with it alone, to be put before the
installed one.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

UNREACHABLE = ("ConnectionError", "NewConnectionError", "Temporary failure", "from versions: none")
"""What pip says where there is no package registry."""


def accelerate_folder(version: str, folder: Path) -> Path:
    """Fill this folder, unless it was filled before, and return it.

    Skips, with pip's words, where no registry can be reached.
    """
    if (folder / "ready").exists():
        return folder
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        made = Path(name) / folder.name
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(made),
        ]
        done = subprocess.run(
            [*command, f"accelerate=={version}"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            assert any(sign in done.stderr for sign in UNREACHABLE), done.stderr
            pytest.skip(
                f"no package registry, so no accelerate {version}: {done.stderr.strip()[-200:]}"
            )
        (made / "ready").touch()
        shutil.rmtree(folder)
        made.replace(folder)
    return folder
