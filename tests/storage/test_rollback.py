"""What a roll-back may not destroy: a newer save that looks like the file before it."""

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfix.errors import JournalError, OperationError
from ckptfix.storage.edits import Edit, Move, Patch, Remove, Replace
from ckptfix.storage.lock import folder_lock
from ckptfix.storage.recipes import ABSENT, KEPT, Literal, Range, Recipe
from tests.storage.crash import Fault, Outcome, in_child, intercepted, points, strike
from tests.storage.folders import (
    P,
    commit,
    do,
    killed,
    recover,
    run_recovery,
    snapshot,
    undo,
    undo_last,
)

pytestmark = pytest.mark.alone(timeout=1800)

SIZE = 400_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make(tmp_path / "folder")


def make(root: Path) -> Path:
    root.mkdir()
    (root / "model").write_bytes(b"old head" + bytes(SIZE))
    (root / "other").write_bytes(b"other" + bytes(SIZE))
    for path in root.iterdir():
        os.utime(path, ns=(10**18, 10**18))
    return root


def whole_file_edits(root: Path) -> dict[str, tuple[str, Edit]]:
    """Edits by name, with the path where the new file is afterwards."""
    longer = Recipe.like(
        root / "model", (Literal(b"a new, longer head"), Range(P("model"), 8, SIZE))
    )
    back = Recipe.like(root / "model", (Literal(b"old head"), Range(P("model"), 18, SIZE)))
    return {
        "replace by recipe": ("model", Replace(path=P("model"), content=longer, previous=back)),
        "replace and keep": ("model", Replace(path=P("model"), content=longer, previous=KEPT)),
        "new": ("new", Replace(path=P("new"), content=longer, previous=ABSENT)),
        "move": ("new", Move(source=P("model"), target=P("new"))),
    }


KINDS = ("replace by recipe", "replace and keep", "new", "move")


def save_again(path: Path) -> None:
    """A training step later: the layers in the middle differ, the frozen ends do not."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    time.sleep(0.02)  # the clock of a file system ticks every 4 to 10 ms
    path.write_bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_recovery_keeps_a_newer_save_with_the_same_size_and_ends(root: Path, kind: str) -> None:
    name, edit = whole_file_edits(root)[kind]
    killed(root, edit)
    save_again(root / name)
    before = snapshot(root)
    with pytest.raises(
        JournalError, match=r"was written to: its time changed .*ckptfix undo --force .*rm -r"
    ):
        run_recovery(root)
    assert snapshot(root) == before


@pytest.mark.parametrize("kind", KINDS)
def test_recovery_with_force_accepts_another_time(root: Path, kind: str) -> None:
    old = snapshot(root)
    name, edit = whole_file_edits(root)[kind]
    killed(root, edit)
    os.utime(root / name, ns=(5, 5))
    with pytest.raises(JournalError, match="its time changed from"):
        run_recovery(root)
    with folder_lock(root):
        assert recover(root, force=True) is not None
    assert {k: v[:3] for k, v in snapshot(root).items()} == {k: v[:3] for k, v in old.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_undo_of_a_touched_file_goes_on_as_one(tmp_path: Path, kind: str) -> None:
    number = 0

    def fresh() -> Path:
        nonlocal number
        number += 1
        folder = make(tmp_path / str(number))
        name, edit = whole_file_edits(folder)[kind]
        do(folder, (edit,))
        os.utime(folder / name, ns=(5, 5))
        return folder

    def undoing(folder: Path) -> Callable[[], None]:
        def run() -> None:
            with folder_lock(folder):
                undo(folder, 1)

        return run

    old = snapshot(make(tmp_path / "old"), times=False)
    folder = fresh()
    total = len(points(undoing(folder)))
    assert snapshot(folder, times=False) == old
    undone = 0
    for at in range(total):
        folder = fresh()
        strike(undoing(folder), at, Fault.KILL_AFTER)
        run_recovery(folder)
        undone += snapshot(folder, times=False) == old
        if (folder / ".ckptfix").exists():
            undoing(folder)()
        assert snapshot(folder, times=False) == old, at
    assert undone > 5


def test_force_once_is_not_force_for_ever(root: Path) -> None:
    """Killed between the flag and the rename: the next undo, without force, is strict again."""
    do(root, (whole_file_edits(root)["move"][1],))
    (root / ".ckptfix" / "0001.done" / "any-time").touch()

    def save(
        name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        done = real(*args, **kwargs)
        if name == "rename" and str(args[1]).endswith(".pending"):
            save_again(root / "new")
        return done

    with intercepted(save), pytest.raises(JournalError, match="was written to"):
        undo_last(root)


def test_a_save_onto_a_name_that_was_moved_away_is_kept(root: Path) -> None:
    killed(root, Move(source=P("model"), target=P("new")))
    (root / "model").write_bytes(b"a new save")
    before = snapshot(root)
    with pytest.raises(JournalError, match="exists again"):
        run_recovery(root)
    assert snapshot(root) == before


def save_during(root: Path, save: Callable[[], object]) -> str:
    """Move ``model`` to ``new``, and save before the commit; return why it failed."""

    def verify() -> None:
        save()
        raise OperationError("the proof failed")

    edits = (Move(source=P("model"), target=P("new")),)
    with folder_lock(root), pytest.raises(OperationError) as failed:
        commit(root, edits, target="", summary=None, verify=verify)
    return str(failed.value)


def test_a_save_that_replaces_a_moved_file_leaves_both_files(root: Path) -> None:
    """safetensors 0.8 writes a temporary file, and renames it."""
    old = snapshot(root)
    (root / "save").write_bytes(b"a new save")
    save_during(root, lambda: (root / "save").rename(root / "new"))
    assert (root / "new").read_bytes() == b"a new save"
    (root / "new").unlink()
    assert snapshot(root) == old
    assert not (root / ".ckptfix").exists()


def test_a_killed_run_whose_moved_file_was_replaced_goes_back(root: Path) -> None:
    old = snapshot(root)
    killed(root, Move(source=P("model"), target=P("new")))
    (root / "save").write_bytes(b"a new save")
    (root / "save").rename(root / "new")
    run_recovery(root)
    assert (root / "new").read_bytes() == b"a new save"
    (root / "new").unlink()
    assert snapshot(root) == old


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_save_of_both_names_after_a_kill_is_all_that_is_left(
    root: Path, is_renamed: bool
) -> None:
    killed(root, Move(source=P("model"), target=P("new")))
    for name in ("model", "new"):
        if is_renamed:
            (root / "save").write_bytes(f"a new save of {name}".encode())
            (root / "save").rename(root / name)
        else:
            (root / name).write_bytes(f"a new save of {name}".encode())
    run_recovery(root)
    for name in ("model", "new"):
        assert (root / name).read_bytes() == f"a new save of {name}".encode()
    assert not (root / ".ckptfix").exists()


def test_a_save_that_overwrites_a_moved_file_is_named_until_it_wrote_the_old_name_too(
    root: Path,
) -> None:
    """torch.save and safetensors 0.7 empty the file at a name. A save that ends writes all names
    again.
    """
    said = save_during(root, lambda: (root / "new").write_bytes(b"a new save"))
    lost = (
        rf"{root / 'model'}: its bytes are lost: it was moved to {root / 'new'}, and a save"
        r" overwrote it there; "
    )
    assert re.search(
        rf"new changed while it was read: .*, and cannot be rolled back: {lost}.*next: wait"
        r" .*ckptfix undo",
        said,
    )
    with pytest.raises(JournalError, match=lost):
        run_recovery(root)
    (root / "model").write_bytes(b"a new save, too")
    run_recovery(root)
    assert (root / "new").read_bytes() == b"a new save"
    assert (root / "model").read_bytes() == b"a new save, too"
    assert not (root / ".ckptfix").exists()


@pytest.mark.parametrize("keeps_times", [False, True])
def test_a_copy_of_a_killed_run_goes_back_without_links(root: Path, keeps_times: bool) -> None:
    """In a copy of the folder the second name of the moved file is a file of its own."""
    old = snapshot(root, times=False)
    killed(root, Move(source=P("model"), target=P("new")))
    copy = root.with_name("copy")
    shutil.copytree(root, copy, copy_function=shutil.copy2 if keeps_times else shutil.copy)
    with folder_lock(copy):
        if not keeps_times:
            with pytest.raises(JournalError, match="its time changed from"):
                recover(copy)
        recover(copy, force=not keeps_times)
    assert snapshot(copy, times=False) == old


@pytest.mark.parametrize("target", ["other", "../blob", "nowhere"])
def test_a_moved_link_goes_back_and_forth(root: Path, target: str) -> None:
    """From within the journal, where its second name lies, a relative link leads nowhere."""
    (root.parent / "blob").write_bytes(b"weights")
    (root / "link").symlink_to(target)
    old = snapshot(root, times=False)
    killed(root, Move(source=P("link"), target=P("new")))
    run_recovery(root)
    assert snapshot(root, times=False) == old
    do(root, (Move(source=P("link"), target=P("new")),))
    assert (root / "new").readlink() == Path(target)
    assert not os.path.lexists(root / "link")


def test_a_moved_file_has_one_name_after_the_commit(root: Path) -> None:
    do(root, (Move(source=P("model"), target=P("new")),))
    assert (root / "new").stat().st_nlink == 1


def test_a_save_while_a_replaced_file_is_put_back_is_kept(root: Path) -> None:
    """Killed with the previous file beside the new one; then a job saves at their name."""
    _, edit = whole_file_edits(root)["replace and keep"]

    def crash(
        name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name == "rename" and str(args[1]).endswith("model"):
            os.kill(os.getpid(), 9)
        return real(*args, **kwargs)

    def run() -> None:
        with intercepted(crash):
            do(root, (edit,))

    assert in_child(run)[0] is Outcome.KILLED
    (root / ".ckptfix" / "lock").unlink()
    (root / "new save").write_bytes(b"a new save")
    (root / "new save").rename(root / "model")
    before = snapshot(root)
    with pytest.raises(JournalError, match="left alone"):
        run_recovery(root)
    assert snapshot(root) == before


def test_a_save_onto_the_name_of_a_dropped_file_is_kept(root: Path) -> None:
    """The undo was killed before it built the file again; what a job saves there meanwhile
    stays.
    """
    recipe = Recipe.like(root / "other", (Literal(b"other"), Range(P("model"), 8, SIZE)))
    do(root, (Remove(path=P("other"), previous=recipe),))
    (root / ".ckptfix" / "0001.done").rename(root / ".ckptfix" / "0001.pending")
    (root / "other").write_bytes(b"a new save")
    before = snapshot(root)
    with pytest.raises(JournalError, match="left alone"):
        run_recovery(root)
    assert snapshot(root) == before


def test_nothing_begun_nothing_touched(root: Path) -> None:
    """Killed before the first edit: a newer save keeps its time."""

    def patch() -> None:
        do(root, (Patch(path=P("model"), offset=0, old=b"old", new=b"NEW"),))

    total = points(patch)
    undo_last(root)
    struck = 0
    for at in range(len(total)):
        strike(patch, at, Fault.KILL_AFTER)
        pending = root / ".ckptfix" / "0001.pending"
        if pending.exists() and not (pending / "steps").read_bytes():
            save_again(root / "model")
            before = (root / "model").stat().st_mtime_ns
            run_recovery(root)
            assert (root / "model").stat().st_mtime_ns == before
            struck += 1
            continue
        run_recovery(root)
        if (root / ".ckptfix").exists():
            undo_last(root)
    assert struck > 0


def test_a_new_file_taken_away_by_hand_is_not_missed(root: Path) -> None:
    """Its maker moved the newer save out of the folder, as the message asks: the previous file
    comes back.
    """
    for kind in ("replace and keep", "new"):
        old = snapshot(root)
        name, edit = whole_file_edits(root)[kind]
        killed(root, edit)
        (root / name).unlink()
        run_recovery(root)
        assert snapshot(root) == old


def test_a_chain_of_edits_on_one_file_goes_back_by_time_too(root: Path) -> None:
    old = snapshot(root)
    content = Recipe.like(root / "model", (Literal(b"12345"),))
    edits = (
        Move(source=P("other"), target=P("moved")),
        Patch(path=P("moved"), offset=0, old=b"other", new=b"OTHER"),
        Replace(path=P("model"), content=content, previous=KEPT),
        Patch(path=P("model"), offset=0, old=b"1", new=b"2"),
        Move(source=P("model"), target=P("new")),
    )
    killed(root, *edits)
    run_recovery(root)
    assert snapshot(root) == old
    do(root, edits)
    undo_last(root)
    assert snapshot(root) == old


def test_a_file_whose_time_may_not_be_set_goes_back_nevertheless(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of somebody else in a group folder: it may be written, its time is the kernel's."""
    edits = (
        Move(source=P("other"), target=P("moved")),
        Patch(path=P("moved"), offset=0, old=b"other", new=b"OTHER"),
    )
    old = snapshot(root, times=False)
    killed(root, *edits)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "not yours")

    monkeypatch.setattr(os, "utime", refuse)
    run_recovery(root)
    assert snapshot(root, times=False) == old


def test_the_repeat_of_a_killed_roll_back_syncs_the_folder(root: Path) -> None:
    """A new file goes by a rename; killed right after it, only the next run can make it durable."""
    do(root, (whole_file_edits(root)["new"][1],))

    def crash(
        name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        done = real(*args, **kwargs)
        if name == "rename" and str(args[1]).endswith(".new"):
            os.kill(os.getpid(), 9)
        return done

    def run() -> None:
        with intercepted(crash):
            undo_last(root)

    assert in_child(run)[0] is Outcome.KILLED
    assert not (root / "new").exists()
    synced: list[int] = []

    def note(
        name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name == "fsync":
            synced.append(os.fstat(args[0]).st_ino)
        return real(*args, **kwargs)

    folder = (root / ".ckptfix" / "0001.pending").stat().st_ino
    with intercepted(note):
        run_recovery(root)
    assert {root.stat().st_ino, folder} <= set(synced)
