"""Errors of verbs whose folder another process deletes, such as a job that rotates checkpoints."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptfix import check, diff, migrate, repair, salvage, seal, undo, verify
from ckptfix.errors import ChangedError, CkptfixError, UsageError
from ckptfix.storage.opened import takes_urls

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
DOUBLED = FIXTURES / "accelerate-1.15.0" / "student-teacher-wrapper-safetensors" / "checkpoint"
VERBS: dict[str, Callable[..., Any]] = {
    "check": check,
    "repair": repair,
    "seal": seal,
    "verify": verify,
    "undo": undo,
    "diff": partial(diff, b=DOUBLED),
    "migrate": partial(migrate, to="bin", allow_damage=True),
    "salvage": salvage,
}
WRITES_ANEW = ("migrate", "salvage")


@pytest.mark.parametrize("name", VERBS)
def test_a_folder_that_is_deleted_meanwhile(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each opening of one of its files."""
    open_file = os.open
    root = tmp_path / "saved"
    opened = 0

    def open_or_delete(path: Any, *args: Any, **kwargs: Any) -> int:
        nonlocal opened
        if isinstance(path, str | os.PathLike) and str(path).startswith(f"{root}{os.sep}"):
            opened -= 1
            if opened == 0:
                shutil.rmtree(root)
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_or_delete)
    for number in range(1, 1000):
        shutil.copytree(DOUBLED, root)
        if name == "undo":
            repair(root)
        opened = number
        try:
            VERBS[name](root, *([tmp_path / f"new{number}"] if name in WRITES_ANEW else []))
        except CkptfixError:
            assert opened <= 0, "the folder was there"
        if opened > 0:
            break
        shutil.rmtree(root, ignore_errors=True)
    assert number > 5


def test_the_error_names_the_file_that_is_gone(tmp_path: Path) -> None:
    @takes_urls("path")
    def read(path: Path, name: str) -> bytes:
        return (path / name).read_bytes()

    with pytest.raises(ChangedError, match=r"gone\.bin disappeared: .*; next: "):
        read(tmp_path, "gone.bin")
    # These are no changes: a link to nothing, and a file elsewhere.
    (tmp_path / "link.bin").symlink_to("nothing")
    for name in ("link.bin", "../gone.bin"):
        with pytest.raises(FileNotFoundError):
            read(tmp_path, name)


@pytest.mark.parametrize("name", VERBS)
def test_a_folder_that_never_was(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        VERBS[name](tmp_path / "saved", *([tmp_path / "new"] if name in WRITES_ANEW else []))
