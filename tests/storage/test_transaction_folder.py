"""The list of steps is all or nothing: a short one, a long one or a shared one is never taken for
the whole.
"""

import os
import shutil
from pathlib import Path

import pytest

from ckptfix.errors import JournalError
from ckptfix.storage.edits import Move, Patch
from ckptfix.storage.folder_journal import Note, add_note, cut_notes, read_notes, start_notes
from tests.storage.folders import P, do, killed, make_folder, run_recovery, snapshot, undo_last

EDITS = (
    Patch(path=P("model"), offset=0, old=b"old", new=b"NEW"),
    Move(source=P("zip"), target=P("moved")),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "folder")


@pytest.mark.parametrize("lines", [0, 1, 3])
def test_an_undo_needs_a_line_for_each_edit(root: Path, lines: int) -> None:
    old = snapshot(root)
    do(root, EDITS)
    steps = root / ".ckptfix" / "0001.done" / "steps"
    whole = steps.read_bytes()
    steps.write_bytes(b"".join((whole * 2).splitlines(keepends=True)[:lines]))
    before = snapshot(root)
    with pytest.raises(JournalError, match=f"{lines} lines for 2 edits.*rm -r"):
        undo_last(root)
    assert snapshot(root) == before
    steps.write_bytes(whole)
    undo_last(root)
    assert snapshot(root) == old


def test_a_roll_back_refuses_more_lines_than_edits(root: Path) -> None:
    killed(root, *EDITS)
    steps = root / ".ckptfix" / "0001.pending" / "steps"
    steps.write_bytes(steps.read_bytes() * 2)
    before = snapshot(root)
    with pytest.raises(JournalError, match="4 lines for 2 edits"):
        run_recovery(root)
    assert snapshot(root) == before


def test_a_snapshot_of_hard_links_has_a_journal_of_its_own(root: Path) -> None:
    """As ``cp -al`` makes them: an undo in one of the two must leave the journal of the other
    whole.
    """
    old = snapshot(root)
    do(root, EDITS)
    copy = root.parent / "snapshot"
    shutil.copytree(root, copy, copy_function=os.link, symlinks=True)
    new = snapshot(copy)
    undo_last(root)
    assert without_links(snapshot(copy)) == without_links(new)
    undo_last(copy)
    assert without_links(snapshot(copy)) == without_links(old)
    assert without_links(snapshot(root)) == without_links(old)


def without_links(found: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    return {name: value for name, value in found.items() if name != "(links)"}


def test_cutting_needs_no_room_unless_the_file_is_shared(tmp_path: Path) -> None:
    start_notes(tmp_path)
    for tail in ("", "ab" * 32):
        add_note(tmp_path, Note(tail=tail))
    inode = (tmp_path / "steps").stat().st_ino
    cut_notes(tmp_path, 1)
    assert (tmp_path / "steps").stat().st_ino == inode
    add_note(tmp_path, Note())
    os.link(tmp_path / "steps", tmp_path / "shared")
    (tmp_path / "steps.new").write_bytes(b"left by a killed run")
    cut_notes(tmp_path, 1)
    assert read_notes(tmp_path, 2) == (Note(),)
    assert (tmp_path / "shared").read_bytes().count(b"\n") == 2
    assert (tmp_path / "steps").stat().st_mode & 0o777 == 0o600
