"""Between looking and writing a job may save: what it saved is never written into, and never
renamed over.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfix.errors import JournalError, OperationError, RolledBackError
from ckptfix.storage.edits import Append, Edit, Move, Patch, Remove, Replace, Truncate
from ckptfix.storage.folder_journal import Note
from ckptfix.storage.folder_journal import add_note as real_add_note
from ckptfix.storage.recipes import ABSENT, KEPT, Literal, Recipe
from tests.storage.folders import P, do, make_folder, snapshot


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "folder")


FIRST = Patch(path=P("model_2"), offset=0, old=b"third", new=b"THIRD")
EDITS: dict[str, tuple[str, Callable[[Path], Edit]]] = {
    "patch": ("zip", lambda root: Patch(path=P("zip"), offset=0, old=b"zip", new=b"ZIP")),
    "append": ("zip", lambda root: Append(path=P("zip"), old_size=300, data=b"tail")),
    "truncate": ("zip", lambda root: Truncate(path=P("zip"), old_size=300, new_size=3)),
    "move": ("zip", lambda root: Move(source=P("zip"), target=P("moved"))),
    "remove": (
        "zip",
        lambda root: Remove(
            path=P("zip"), previous=Recipe.like(root / "zip", (Literal(b"zip" * 100),))
        ),
    ),
    "remove and keep": ("zip", lambda root: Remove(path=P("zip"), previous=KEPT)),
    "replace": (
        "zip",
        lambda root: Replace(path=P("zip"), content=Recipe(pieces=()), previous=KEPT),
    ),
    "new": (
        "fresh",
        lambda root: Replace(path=P("fresh"), content=Recipe(pieces=()), previous=ABSENT),
    ),
    "move onto": ("fresh", lambda root: Move(source=P("zip"), target=P("fresh"))),
}
SAVES = {"another file": b"a new save", "the same bytes": b"zip" * 100}


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("links", [True, False])
def test_a_save_between_looking_and_writing_is_kept(
    root: Path, kind: str, save: str, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, edit = EDITS[kind]
    edits = (FIRST, edit(root))
    old = snapshot(root)
    notes: list[Note] = []

    def add_note(folder: Path, note: Note) -> None:
        real_add_note(folder, note)
        notes.append(note)
        if len(notes) == 2:
            (root / "part").write_bytes(SAVES[save])
            os.rename(root / "part", root / name)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr("ckptfix.storage.folder_backend.add_note", add_note)
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(RolledBackError):
        do(root, edits)
    now = snapshot(root)
    assert now.pop(name)[2] == SAVES[save]
    old.pop(name, None)
    assert now == old


def test_a_link_made_between_looking_and_writing_is_respected(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_note(folder: Path, note: Note) -> None:
        real_add_note(folder, note)
        os.link(root / "zip", root.parent / "snapshot")

    monkeypatch.setattr("ckptfix.storage.folder_backend.add_note", add_note)
    with pytest.raises(RolledBackError, match="zip"):
        do(root, (EDITS["patch"][1](root),))
    assert (root.parent / "snapshot").read_bytes() == b"zip" * 100


@pytest.mark.parametrize("kind", ["replace", "remove"])
def test_a_save_while_the_old_file_is_taken_away_is_kept(
    root: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The narrowest gap: after the last look, before the new file gets the name."""
    from ckptfix.storage import applying

    name, edit = EDITS[kind]
    real = applying._check_still

    def check_still(*args: object) -> None:
        real(*args)  # type: ignore[arg-type]
        (root / "part").write_bytes(b"a new save")
        os.rename(root / "part", root / name)

    monkeypatch.setattr(applying, "_check_still", check_still)
    with pytest.raises(OperationError, match="changed while it was read"):
        do(root, (edit(root),))
    assert (root / name).read_bytes() == b"a new save"


def test_a_save_after_the_old_file_was_kept_is_kept_beside_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptfix.storage import applying

    real = applying._check_taken

    def check_taken(*args: object) -> None:
        real(*args)  # type: ignore[arg-type]
        (root / "part").write_bytes(b"a new save")
        os.rename(root / "part", root / "zip")

    monkeypatch.setattr(applying, "_check_taken", check_taken)
    with pytest.raises(JournalError, match="saved again"):
        do(root, (EDITS["replace"][1](root),))
    assert (root / "zip").read_bytes() == b"a new save"
    assert (root / ".ckptfix" / "0001.pending" / "0.kept").read_bytes() == b"zip" * 100


def test_folders_and_pipes_are_not_edited(root: Path) -> None:
    os.mkfifo(root / "pipe")
    old = snapshot_without_pipe(root)
    for edit in (
        Move(source=P("sub"), target=P("new")),
        Remove(path=P("sub"), previous=KEPT),
        Replace(path=P("sub"), content=Recipe(pieces=()), previous=KEPT),
        Remove(path=P("pipe"), previous=KEPT),
        Move(source=P("pipe"), target=P("new")),
    ):
        with pytest.raises(OperationError):
            do(root, (edit,))
        assert snapshot_without_pipe(root) == old


def snapshot_without_pipe(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))
