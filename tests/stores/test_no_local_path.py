"""Verbs on a URL touch no file of this machine but temporary ones, their state and their output."""

import builtins
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptfix.cli import run
from ckptfix.storage import object_copies, store_files, stores
from tests.repairs.test_object_stores import URL, put
from tests.stores.simulated_s3 import Cloud, cloud, open_simulated

__all__ = ["cloud"]

FIXTURES = Path(__file__).parents[2] / "fixtures"
DOUBLED = FIXTURES / "golden" / "doubled-model" / "checkpoint"
CLEAN = FIXTURES / "accelerate-1.15.0" / "clean-safetensors" / "checkpoint"

_OF_THE_SYSTEM = ("/dev/null", "/proc", "/sys", "/etc")
_OWN = [
    os.path.realpath(place)
    for place in {
        sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), str(Path(__file__).parents[2])
    }
]  # fmt: skip

VERBS: dict[str, tuple[Path, list[list[str]]]] = {
    "check": (DOUBLED, [["check", "AT"], ["check", "--data", "AT"], ["check", "-r", "ABOVE"]]),
    "check one object": (DOUBLED, [["check", "AT/model.safetensors"]]),
    "repair": (DOUBLED, [["repair", "--dry-run", "AT"], ["repair", "AT"], ["undo", "AT"]]),
    "repair a copy": (DOUBLED, [["repair", "AT", "--output", f"{URL}-repaired"]]),
    "seal": (CLEAN, [["seal", "AT"], ["verify", "AT"], ["verify", "--data", "AT"]]),
    "diff": (CLEAN, [["diff", "AT", "AT"]]),
    "scrub": (CLEAN, [["scrub", "ABOVE", "--state", "OUT/state"]]),
    "migrate": (CLEAN, [["migrate", "AT", "OUT/new", "--to", "bin"]]),
    "migrate to a URL": (CLEAN, [["migrate", "AT", f"{URL}-new", "--to", "bin"]]),
    "salvage": (CLEAN, [["salvage", "AT", "OUT/saved"]]),
}


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Refuse every look at a path that is neither temporary nor of Python and this project."""
    asked: list[str] = []
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    own = (*_OWN, str(tmp_path / "out"), *_OF_THE_SYSTEM)
    temporary = (os.path.realpath(tempfile.gettempdir()), "/dev/shm")

    def is_known(path: Any) -> bool:
        if isinstance(path, int):
            return True
        full = os.path.abspath(os.fsdecode(path))
        is_working = full.startswith(str(tmp_path / "work"))
        is_above = any(place.startswith(f"{full.rstrip('/')}/") for place in (*own, *temporary))
        # A new checkpoint may be listed by a seal of a folder that it is written into.
        is_above |= full.endswith("/.ckptfix/manifest.json")
        return not is_working and (is_above or full.startswith((*own, *temporary)))

    def watching(original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if not (kwargs.get("dir_fd") is not None or is_known(path)):
                asked.append(os.fsdecode(path))
                raise AssertionError(f"{path} was looked at")
            return original(path, *args, **kwargs)

        return watched

    with monkeypatch.context() as patch:
        for module, name in (
            (os, "stat"), (os, "lstat"), (os, "open"), (os, "listdir"), (os, "scandir"),
            (os, "access"), (os, "readlink"), (builtins, "open"),
        ):  # fmt: skip
            patch.setattr(module, name, watching(getattr(module, name)))
        yield asked


@pytest.mark.parametrize("verb", VERBS)
def test_no_path_of_this_machine_is_looked_at(
    verb: str,
    cloud: Cloud,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refused: list[str],
) -> None:
    for module in (stores, store_files, object_copies):
        monkeypatch.setattr(module, "open_store", lambda url: open_simulated(cloud, url))
    source, commands = VERBS[verb]
    put(cloud, source)
    for words in commands:
        above = URL.rpartition("/")[0]
        given = [
            word.replace("AT", URL) if word.startswith("AT")
            else above if word == "ABOVE" else word.replace("OUT", str(tmp_path / "out"))
            for word in words
        ]  # fmt: skip
        (tmp_path / "out").mkdir(exist_ok=True)
        status = run(given)
        captured = capsys.readouterr()
        assert status in (0, 1), captured.err
        assert refused == [], captured.err
        assert "bug in ckptfix" not in captured.err


def test_the_refusal_refuses(refused: list[str]) -> None:
    """Or the test above would pass whatever a verb does."""
    for look in (os.stat, os.listdir, os.path.exists, lambda path: Path(path).is_file(), open):
        with pytest.raises(AssertionError, match="was looked at"):
            look("s3:")
    assert len(refused) == 5
