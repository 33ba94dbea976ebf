"""Files that a commit deletes: only what the recipe in the journal rebuilds, to the last byte, is
ever deleted.
"""

import json
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptfix.errors import ChangedError, RolledBackError
from ckptfix.storage.comparing import Run, first_difference
from ckptfix.storage.edits import Edit, Move, Remove, Replace
from ckptfix.storage.lock import folder_lock
from ckptfix.storage.reading import identity, open_reader
from ckptfix.storage.recipes import Literal, Range, Recipe
from tests.storage.folders import P, commit, snapshot, undo, undo_last, without_journal

LONG = bytes(range(251)) * 4_000
MIDDLE = 500_000
HEAD, END = b"another header", b"end"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model").write_bytes(b"old header" + LONG)
    (folder / "model_1").write_bytes(HEAD + LONG + END)
    (folder / "model_2").write_bytes(b"third")
    return folder


def planned(root: Path) -> tuple[tuple[Edit, ...], dict[str, object]]:
    """What a repair plans: the duplicate goes, and its digests are of the bytes that were
    compared.
    """
    pieces = (Literal(HEAD), Range(P("model"), 10, len(LONG)), Literal(END))
    digests: dict[tuple[int, int], bytes] = {}
    with open_reader(root / "model") as kept, open_reader(root / "model_1") as dropped:
        assert (
            first_difference(kept, dropped, [Run(10, len(HEAD), len(LONG))], digests=digests)
            is None
        )
    edits = (
        Remove(path=P("model_1"), previous=Recipe.like(root / "model_1", pieces)),
        Move(source=P("model_2"), target=P("model_1")),
    )
    known = {P(path.name): identity(path) for path in root.iterdir()}
    return edits, {"digests": {P("model"): digests}, "known": known}


def rewritten(root: Path) -> tuple[tuple[Edit, ...], dict[str, object]]:
    """A new file with the bytes of the old one behind another header."""
    content = Recipe.like(
        root / "model_1", (Literal(b"new"), Range(P("model_1"), len(HEAD), len(LONG) + len(END)))
    )
    previous = Recipe.like(
        root / "model_1", (Literal(HEAD), Range(P("model_1"), 3, len(LONG) + len(END)))
    )
    return (Replace(path=P("model_1"), content=content, previous=previous),), {}


def replace(path: Path, offset: int) -> None:
    """Give a file that is there by a rename, as ``tar`` and ``rsync -t`` do: only its inode and a
    byte are others.
    """
    data, times = bytearray(path.read_bytes()), path.stat()
    data[offset] ^= 1
    new = path.with_name("new")
    new.write_bytes(data)
    os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
    new.rename(path)


@contextmanager
def mapped(path: Path) -> Iterator[Callable[[int], None]]:
    """Yield a writer through a memory map whose page was dirty before: the kernel sets no new
    time.
    """
    times = path.stat()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:

        def write(offset: int) -> None:
            memory[offset] ^= 1

        memory[:] = memory[:]
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        yield write


def refuse(
    root: Path,
    edits: tuple[Edit, ...],
    options: dict[str, object],
    verify: Callable[[], None],
    name: str,
) -> None:
    words = rf"{root / name} changed while it was read.*everything was rolled back"
    with folder_lock(root), pytest.raises(RolledBackError, match=words):
        commit(root, edits, target="", summary=None, verify=verify, **options)


@pytest.mark.parametrize("offset", [0, MIDDLE, -1], ids=["header", "middle", "end"])
@pytest.mark.parametrize("name", ["model", "model_1"])
def test_a_file_that_was_replaced_since_the_plan_stays(root: Path, name: str, offset: int) -> None:
    edits, options = planned(root)
    if name == "model" and offset == 0:
        pytest.skip("the header of the file that stays is not in the recipe")
    replace(root / name, offset)
    before = without_journal(snapshot(root))
    refuse(root, edits, options, lambda: None, name)
    assert without_journal(snapshot(root)) == before


@pytest.mark.parametrize("offset", [0, MIDDLE, -1], ids=["header", "middle", "end"])
@pytest.mark.parametrize("plan", [planned, rewritten])
def test_a_file_that_is_written_through_a_map_stays(
    root: Path, plan: Callable[[Path], tuple[tuple[Edit, ...], dict[str, object]]], offset: int
) -> None:
    """The map follows the file into the journal, and writes there after all other checks of the
    edit.
    """
    with mapped(root / "model_1") as write:
        edits, options = plan(root)
        refuse(root, edits, options, lambda: write(offset), "model_1")
        expected = bytearray(HEAD + LONG + END)
        expected[offset] ^= 1
        assert (root / "model_1").read_bytes() == expected
    assert (root / "model_2").read_bytes() == b"third"


@pytest.mark.parametrize("plan", [planned, rewritten])
def test_the_same_edits_of_untouched_files_are_committed(
    root: Path, plan: Callable[[Path], tuple[tuple[Edit, ...], dict[str, object]]]
) -> None:
    before = without_journal(snapshot(root))
    edits, options = plan(root)
    with folder_lock(root):
        commit(root, edits, target="", summary=None, verify=lambda: None, **options)
    assert without_journal(snapshot(root)) != before
    undo_last(root)
    assert without_journal(snapshot(root)) == before


def test_an_undo_decides_before_it_moves_a_file(root: Path) -> None:
    """0.5.0 deleted such a file, and its undo moved the others before it refused: the folder was
    stuck.
    """
    edits, options = planned(root)
    with folder_lock(root):
        commit(root, edits, target="", summary=None, verify=lambda: None, **options)
    steps = root / ".ckptfix/0001.done/steps"
    notes = [json.loads(line) for line in steps.read_bytes().splitlines()]
    notes[0]["old"]["sha256"] = "0" * 64  # the file that was deleted had other bytes
    steps.write_text("".join(json.dumps(note) + "\n" for note in notes), encoding="utf-8")
    before = snapshot(root)
    words = r"model_1: cannot be rebuilt: .*nothing was undone; .*rm -r"
    with folder_lock(root), pytest.raises(ChangedError, match=words):
        undo(root, 1)
    assert snapshot(root) == before
