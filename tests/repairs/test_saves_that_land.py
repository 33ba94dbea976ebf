"""A save that lands while `repair` reads: its bytes stay, nothing is called fine, and the words
name the file.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckptfix.cli import run
from tests.repairs.builders import snapshot
from tests.sampling import sampled

CHECKPOINT = (
    Path(__file__).parents[2]
    / "fixtures/accelerate-1.15.0/student-teacher-wrapper-safetensors/checkpoint"
)


def _saves() -> dict[str, dict[str, bytes]]:
    """Return the bytes of the files that the next save wrote so far, or opened."""
    done = {
        # Only the values of the last tensor differ, so that the save has the same damage as the one
        # before.
        name: data[:-1] + bytes([data[-1] ^ 1]) if name.endswith(".safetensors") else data
        for name, data in snapshot(CHECKPOINT).items()
    }
    return {
        "done": done,
        "at its first file": {**done, "model.safetensors": b""},
        "all files opened": dict.fromkeys(done, b""),
        # A save writes one file after the other: the others are still those of the save before.
        "only the file that stays": {"model.safetensors": done["model.safetensors"]},
        "only the file that is moved": {"model_2.safetensors": done["model_2.safetensors"]},
        "only the file at the new name": {"model_1.safetensors": done["model_1.safetensors"]},
    }


SAVES = _saves()


class Struck(NamedTuple):
    """One repair: its exit status, what it printed, and how often it read or opened a file of the
    checkpoint.
    """

    status: int
    said: str
    looks: int


def strike(folder: Path, at: int, save: Mapping[str, bytes], *, renames: bool = False) -> Struck:
    """Repair in a child process; the save lands right before one of the reads and openings of
    files.

    ``renames``: as safetensors 0.8 does, the bytes are written to a temporary file that replaces
    the one of that name.
    """
    printed, counted = folder.with_name("printed"), folder.with_name("counted")
    child = os.fork()
    if child == 0:
        code = 99
        looks = 0

        def look() -> None:
            nonlocal looks
            looks += 1
            if looks == at:
                for name, data in save.items():
                    # As torch.save and safetensors up to 0.7 do: the file of that name is emptied,
                    # then written.
                    place = folder.with_name("temporary") if renames else folder / name
                    place.write_bytes(data)
                    place.rename(folder / name)

        def look_at(event: str, arguments: tuple[Any, ...]) -> None:
            if (
                event == "open"
                and isinstance(arguments[0], str)
                and Path(arguments[0]).parent == folder
            ):
                look()

        def looking(read: Callable[..., Any]) -> Callable[..., Any]:
            def looked(*arguments: Any) -> Any:
                look()
                return read(*arguments)

            return looked

        try:
            os.pread, os.preadv = looking(os.pread), looking(os.preadv)
            sys.addaudithook(look_at)
            with (
                printed.open("w", encoding="utf-8") as file,
                redirect_stdout(file),
                redirect_stderr(file),
            ):
                code = run(["repair", str(folder)])
            counted.write_text(str(looks))
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Struck(status, printed.read_text(encoding="utf-8"), int(counted.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "renames"),
    [*((name, False) for name in SAVES), ("done", True), ("only the file at the new name", True)],
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_save_that_lands_while_repair_reads(tmp_path: Path, name: str, renames: bool) -> None:
    save = SAVES[name]
    folder, before = tmp_path / "checkpoint", snapshot(CHECKPOINT)
    shutil.copytree(CHECKPOINT, folder)
    total = strike(folder, 0, save).looks
    assert total > 100
    for at in sampled(range(1, total + 1)):
        shutil.rmtree(folder)
        shutil.copytree(CHECKPOINT, folder)
        struck = strike(folder, at, save, renames=renames)
        assert struck.status in (0, 1, 3), (at, struck)
        assert "Traceback" not in struck.said, (at, struck)
        if struck.status == 0:
            # Before the save and after it the folder is doubled: only a mixture of both is not.
            assert "done and verified" in struck.said, (at, struck)
        if list(folder.glob(".ckptfix/*.pending")):
            # The save emptied the file that was moved there, and its old name is still missing.
            assert (name, renames) == ("only the file at the new name", False), (at, struck)
            assert struck.status == 3, (at, struck)
            lost = (
                f"cannot be rolled back: {folder / 'model_2.safetensors'}: its bytes are lost: it "
                "was moved to "
            )
            assert lost in struck.said, (at, struck)
            without = {path: data for path, data in before.items() if path != "model_2.safetensors"}
            assert _files(folder) == {**without, **save}, (at, struck)
            continue
        if struck.status == 3:
            (problem,) = (line for line in struck.said.splitlines() if line.startswith("ckptfix: "))
            files = "|".join(re.escape(str(folder / name)) for name in save)
            assert re.match(
                rf"ckptfix: ({files}) changed while it was read: a save may be running", problem
            ), (
                at,
                struck,
            )
            assert "; next: wait until the save has ended, then" in problem, (at, struck)
        if struck.status != 0:
            assert _files(folder) == {**before, **save}, (at, struck)


def _files(folder: Path) -> dict[str, bytes]:
    return {
        name: data for name, data in snapshot(folder).items() if not name.startswith(".ckptfix")
    }
