"""What makes an undo refuse before it touches anything."""

import json
from pathlib import Path

import pytest

from ckptfix.errors import ChangedError, JournalError
from ckptfix.storage.edits import Patch, Remove
from ckptfix.storage.journal import commit, transactions
from ckptfix.storage.lock import folder_lock
from ckptfix.storage.recipes import Literal, Range, Recipe
from tests.storage.folders import BODY, P, do, make_folder, snapshot, undo_last


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
    with pytest.raises(ChangedError, match=rf"needs model as it is now; undo 2 first: ckptfix undo {root}$"):
        undo_last(root, 1)
    assert snapshot(root) == before
    undo_last(root, 2)
    undo_last(root, 1)
    assert snapshot(root) == old


def test_an_earlier_recipe_does_not_bind_a_later_undo(root: Path) -> None:
    old = snapshot(root)
    do(root, (drop_double(root),))
    do(root, (Patch(path=P("model"), offset=0, old=b"old", new=b"NEW"),))
    with pytest.raises(ChangedError, match=rf"changed model too; undo 2 first: ckptfix undo {root}/model$"):
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
