"""What makes an undo refuse before it touches anything."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from ckptfix.errors import ChangedError, JournalError
from ckptfix.storage.edits import Append, Edit, Move, Patch, Remove, Replace, Truncate
from ckptfix.storage.journal import transactions
from ckptfix.storage.lock import folder_lock
from ckptfix.storage.recipes import ABSENT, KEPT, Literal, Range, Recipe
from tests.storage.folders import (
    BODY,
    P,
    commit,
    do,
    make_folder,
    snapshot,
    undo,
    undo_last,
    without_journal,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "folder")


def drop_double(root: Path) -> Remove:
    pieces = (Literal(b"another header"), Range(P("model"), 10, len(BODY)), Literal(b"end"))
    return Remove(path=P("model_1"), previous=Recipe.like(root / "model_1", pieces))


def test_a_file_that_a_later_recipe_reads_stays_as_it_is(root: Path) -> None:
    old = snapshot(root)
    do(root, (Patch(path=P("model"), offset=0, old=b"old", new=b"NEW"),))
    with folder_lock(root):
        commit(root, (drop_double(root),), target="", summary=None, verify=lambda: None)
    assert transactions(root)[1].watched == (P("model_1"), P("model"))
    before = snapshot(root)
    with pytest.raises(
        ChangedError, match=rf"needs the current model; undo 2 first: ckptfix undo {root}$"
    ):
        undo_last(root, 1)
    assert snapshot(root) == before
    undo_last(root, 2)
    undo_last(root, 1)
    assert snapshot(root) == old


def test_an_earlier_recipe_does_not_bind_a_later_undo(root: Path) -> None:
    old = snapshot(root)
    do(root, (drop_double(root),))
    do(root, (Patch(path=P("model"), offset=0, old=b"old", new=b"NEW"),))
    with pytest.raises(
        ChangedError, match=rf"also changed model; undo 2 first: ckptfix undo {root}/model$"
    ):
        undo_last(root, 1)
    undo_last(root, 2)
    undo_last(root, 1)
    assert snapshot(root) == old


def test_a_later_transaction_that_cannot_be_read_is_in_the_way(root: Path) -> None:
    do(root, (drop_double(root),))
    do(root, (Patch(path=P("zip"), offset=0, old=b"zip", new=b"ZIP"),))
    (root / ".ckptfix" / "0002.done" / "plan.json").write_bytes(b"")
    with pytest.raises(ChangedError, match="undo 2 first"):
        undo_last(root, 1)


@pytest.mark.parametrize(
    "change", [{}, {"etc/passwd": None}, {"model": {"kind": "file"}}, {"../up": None}, [5]]
)
def test_what_was_left_must_be_told_of_every_file(root: Path, change: object) -> None:
    do(root, (Patch(path=P("model"), offset=0, old=b"old", new=b"NEW"),))
    (root / ".ckptfix" / "0001.done" / "after.json").write_text(json.dumps(change))
    before = snapshot(root)
    with pytest.raises(JournalError, match=r"after\.json"):
        undo_last(root)
    assert snapshot(root) == before


LONG = bytes(range(251)) * 20_000
MIDDLE = 2_500_000
KEPT_MODEL, DOUBLE = b"old header" + LONG, b"another header" + LONG + b"end"


def make_long(root: Path) -> Path:
    """A double whose middle no digest of its ends covers."""
    root.mkdir()
    (root / "model").write_bytes(KEPT_MODEL)
    (root / "model_1").write_bytes(DOUBLE)
    (root / "model_2").write_bytes(b"third" + LONG)
    return root


def drop_long(root: Path) -> Remove:
    pieces = (Literal(b"another header"), Range(P("model"), 10, len(LONG)), Literal(b"end"))
    return Remove(path=P("model_1"), previous=Recipe.like(root / "model_1", pieces))


def flip(path: Path, offset: int = MIDDLE) -> None:
    """Change one byte, and set the time back: nothing but the content tells."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


THEN = ("nothing", "patch", "patch inside", "append", "truncate", "replace", "move", "new")


def later_edits(root: Path) -> dict[str, tuple[Edit, ...]]:
    """What a repair does to the file that stays after it dropped the double."""
    head = Literal(b"a new, longer header")
    back = (Literal(b"old header"), Range(P("model"), 20, len(LONG)))
    content = Recipe.like(root / "model", (head, Range(P("model"), 10, len(LONG))))
    return {
        "nothing": (),
        "patch": (Patch(path=P("model"), offset=0, old=b"old", new=b"NEW"),),
        "patch inside": (
            Patch(path=P("model"), offset=MIDDLE, old=KEPT_MODEL[MIDDLE : MIDDLE + 2], new=b"##"),
        ),
        "append": (Append(path=P("model"), old_size=len(KEPT_MODEL), data=b"directory"),),
        "truncate": (
            Truncate(path=P("model"), new_size=MIDDLE + 200_009, old_size=len(KEPT_MODEL)),
        ),
        "replace": (
            Replace(path=P("model"), content=content, previous=Recipe.like(root / "model", back)),
        ),
        "move": (
            Move(source=P("model_2"), target=P("model_1")),
            Move(source=P("model"), target=P("moved")),
        ),
        "new": (Replace(path=P("new"), content=Recipe(pieces=(head,)), previous=ABSENT),),
    }


def test_a_range_of_several_parts_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a file of gigabytes, whose parts of 64 MiB have digests of their own."""
    monkeypatch.setattr("ckptfix.storage.recipes.SEGMENT", 1 << 20)
    root = make_long(tmp_path / "folder")
    old = snapshot(root)
    do(root, (drop_long(root),))
    undo_last(root)
    assert snapshot(root) == old


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("then", THEN)
def test_undo_refuses_when_a_byte_changed_that_it_would_restore(
    tmp_path: Path, then: str, force: bool
) -> None:
    root = make_long(tmp_path / "folder")
    do(root, (drop_long(root), *later_edits(root)[then]))
    kept = root / ("moved" if then == "move" else "model")
    flip(kept, MIDDLE - 100_000)
    before = snapshot(root)
    words = (
        rf"{kept}: changed since repair 1: .* restore model_1 with wrong bytes.*ckptfix undo"
        rf" {root}"
    )
    with folder_lock(root), pytest.raises(ChangedError, match=words):
        undo(root, 1, force=force)
    assert snapshot(root) == before


@pytest.mark.parametrize("then", THEN)
def test_undo_of_a_copied_and_touched_folder_needs_no_force(tmp_path: Path, then: str) -> None:
    root = make_long(tmp_path / "folder")
    old = without_journal(snapshot(root, times=False))
    do(root, (drop_long(root), *later_edits(root)[then]))
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, copy_function=shutil.copy)  # cp -r: new times, new inode numbers
    for path in copy.iterdir():
        os.utime(path)
    undo_last(copy)
    assert without_journal(snapshot(copy, times=False)) == old


def test_a_newer_save_with_frozen_ends_is_no_copy(tmp_path: Path) -> None:
    """A training step later: every layer between the ends differs. Nothing of a move has a
    digest.
    """
    root = make_long(tmp_path / "folder")
    do(root, (Move(source=P("model_2"), target=P("moved")),))
    body = (root / "moved").read_bytes()
    (root / "moved").write_bytes(body[:70_000] + bytes(len(body) - 140_000) + body[-70_000:])
    before = snapshot(root)
    with (
        folder_lock(root),
        pytest.raises(ChangedError, match="sha256 of sampled pages in its middle: expected"),
    ):
        undo(root, 1, force=True)
    assert snapshot(root) == before


def as_of_0_4_0(root: Path) -> None:
    """Take out of the journal what 0.4.0 did not write."""
    done = root / ".ckptfix" / "0001.done"
    (done / "samples.json").unlink()
    body = json.loads((done / "plan.json").read_bytes().partition(b"\n")[2])
    for edit in body["edits"]:
        if isinstance(edit[-1], dict):
            edit[-1].pop("digests", None)
    plan = json.dumps(body, separators=(",", ":")).encode()
    (done / "plan.json").write_bytes(
        hashlib.sha256(plan).hexdigest().encode() + b"\n" + plan + b"\n"
    )


def test_a_journal_of_0_4_0_is_undone(tmp_path: Path) -> None:
    root = make_long(tmp_path / "folder")
    old = without_journal(snapshot(root))
    do(root, (drop_long(root),))
    as_of_0_4_0(root)
    undo_last(root)
    assert without_journal(snapshot(root)) == old


def test_what_a_journal_of_0_4_0_cannot_prove_needs_force(tmp_path: Path) -> None:
    root = make_long(tmp_path / "folder")
    do(root, (drop_long(root),))
    as_of_0_4_0(root)
    os.utime(root / "model", ns=(5, 5))
    before = snapshot(root)
    with pytest.raises(
        ChangedError, match=r"cannot be proven .* 0\.4\.0 or older.*ckptfix undo --force"
    ):
        undo_last(root)
    assert snapshot(root) == before
    with folder_lock(root):
        assert undo(root, 1, force=True) == (P("model"),)
    assert (root / "model_1").read_bytes() == DOUBLE


def test_force_never_accepts_other_ends_in_a_journal_of_0_4_0(tmp_path: Path) -> None:
    root = make_long(tmp_path / "folder")
    do(root, (drop_long(root),))
    as_of_0_4_0(root)
    flip(root / "model", 20)
    with (
        folder_lock(root),
        pytest.raises(ChangedError, match="sha256 of its first and last bytes: expected"),
    ):
        undo(root, 1, force=True)


def test_a_file_that_comes_back_from_a_kept_one(tmp_path: Path) -> None:
    """The file that stays has a second name, so its old self is in the journal and gives the
    bytes.
    """
    root = make_long(tmp_path / "folder")
    os.link(root / "model", root / "second name")
    old = without_journal(snapshot(root))
    content = Recipe(pieces=(Literal(b"another file"),))
    do(root, (drop_long(root), Replace(path=P("model"), content=content, previous=KEPT)))
    undo_last(root)
    assert without_journal(snapshot(root)) == old


@pytest.mark.parametrize("kept", ["0.kept", "1.kept", "2.tail"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_nothing_is_undone_without_all_that_the_journal_kept(
    root: Path, kept: str, damage: str
) -> None:
    """``cp -rL`` leaves out a kept link to a neighbour: an undo moved two files back, and could not
    go on.
    """
    size = (root / "zip").stat().st_size
    edits = (
        Remove(path=P("model_1"), previous=KEPT),
        Replace(path=P("model"), content=Recipe(pieces=(Literal(b"new"),)), previous=KEPT),
        Truncate(path=P("zip"), old_size=size, new_size=size - 4),
    )
    do(root, edits)
    path = root / ".ckptfix/0001.done" / kept
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[:-1])
    left = snapshot(root)
    with pytest.raises(
        ChangedError, match=rf"{kept}: .*nothing was undone; undo the repair in the folder that"
    ):
        undo_last(root)
    assert snapshot(root) == left
