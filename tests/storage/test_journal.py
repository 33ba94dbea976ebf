"""Each edit and its undo, what is refused, and the law that an undo is the identity."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.errors import ChangedError, JournalError, OperationError, RolledBackError, UsageError
from ckptfix.storage.edits import Append, Edit, Move, Patch, Remove, Replace, Truncate
from ckptfix.storage.journal import State, transactions
from ckptfix.storage.lock import folder_lock
from ckptfix.storage.recipes import ABSENT, KEPT, Literal, Range, Recipe
from tests.sampling import examples
from tests.storage.crash import Outcome, in_child, intercepted
from tests.storage.folders import (
    BODY,
    P,
    all_edits,
    commit,
    do,
    make_folder,
    recover,
    run_recovery,
    snapshot,
    undo,
    undo_last,
    without_journal,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "folder")


PATCH = Patch(path=P("model"), offset=4, old=b"header", new=b"HEADER")


def interrupt(root: Path, *edits: Edit) -> Path:
    """Leave a transaction pending, as a crash right after the last edit does."""
    pending = root / ".ckptfix" / "0001.pending"

    def crash() -> None:
        shutil.copytree(pending, root / "saved", symlinks=True)
        raise OSError("the machine stops here")

    contents: dict[str, tuple[bytes, int]] = {}

    def crash_and_note() -> None:
        contents.update(
            {
                path.name: (path.read_bytes(), path.stat().st_mtime_ns)
                for path in root.iterdir()
                if path.is_file()
            }
        )
        crash()

    with folder_lock(root), pytest.raises(RolledBackError):
        commit(root, edits, target="", summary=None, verify=crash_and_note)
    for name in {path.name for path in root.iterdir() if path.is_file()} - contents.keys():
        (root / name).unlink()
    for name, (data, time) in contents.items():
        (root / name).write_bytes(data)
        os.utime(root / name, ns=(time, time))
    (root / ".ckptfix").mkdir()
    (root / "saved").rename(pending)
    return pending


def test_every_edit_does_what_it_says(root: Path) -> None:
    outside = root.parent / "blob"
    do(root, all_edits(root))
    assert (root / "model").read_bytes() == b"NEW HEADER" + BODY
    assert (root / "model_1").read_bytes() == b"third"
    assert not (root / "model_2").exists()
    assert (root / "zip").read_bytes() == (b"zip" * 100)[:200] + b"directory and tail"
    assert (root / "index").read_bytes() == b'{"a": 1}'
    assert (root / "index").stat().st_mode & 0o777 == 0o640
    assert (root / "sub" / "new").read_bytes() == b"new"
    assert not (root / "linked").is_symlink()
    assert (root / "linked").read_bytes() == b"a file"
    assert outside.read_bytes() == b"blob"
    assert not (root / "hard").exists()
    assert (root / "other name").read_bytes() == b"hard"


@pytest.mark.parametrize("number", range(9))
def test_one_edit_and_back(root: Path, number: int) -> None:
    old = snapshot(root)
    edit = all_edits(root)[number]
    if isinstance(edit, Move):
        edit = Move(source=edit.source, target=P("model_9"))
    if isinstance(edit, Append):
        edit = Append(path=edit.path, old_size=300, data=edit.data, tail=edit.tail)
    do(root, (edit,))
    assert snapshot(root) != old
    undo_last(root)
    assert snapshot(root) == old


def test_the_tail_of_an_append_is_written_when_the_rest_is_on_disk(root: Path) -> None:
    calls: list[object] = []

    def note(
        name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        calls.append((name, bytes(args[1]), args[2]) if name == "pwrite" else name)
        return real(*args, **kwargs)

    edit = Append(path=P("zip"), old_size=300, data=b"directory and tail", tail=4)
    with intercepted(note):
        do(root, (edit,))
    start = calls.index(("pwrite", b"directory and ", 300))
    assert calls[start + 1 : start + 4] == ["fsync", ("pwrite", b"tail", 314), "fsync"]


def test_replace_with_a_recipe_rebuilds_the_old_file_from_the_new_one(root: Path) -> None:
    old = snapshot(root)
    content = Recipe.like(
        root / "model", (Literal(b"longer header!"), Range(P("model"), 10, len(BODY)))
    )
    back = Recipe.like(root / "model", (Literal(b"old header"), Range(P("model"), 14, len(BODY))))
    do(root, (Replace(path=P("model"), content=content, previous=back),))
    assert (root / "model").read_bytes() == b"longer header!" + BODY
    journal = sum(path.stat().st_size for path in (root / ".ckptfix").rglob("*") if path.is_file())
    assert journal < 4000  # the recipe, not the file
    undo_last(root)
    assert snapshot(root) == old


def test_the_space_of_a_removed_double_is_free_after_the_commit(root: Path) -> None:
    do(root, all_edits(root)[:1])
    sizes = {path.name: path.stat().st_size for path in (root / ".ckptfix" / "0001.done").iterdir()}
    assert sum(sizes.values()) < len(BODY)


def test_the_journal_lists_its_transactions(root: Path) -> None:
    do(root, (PATCH,))
    do(root, (Move(source=P("zip"), target=P("moved")),))
    first, second = transactions(root)
    assert (first.number, first.state, first.summary, first.paths) == (
        1,
        State.DONE,
        {"steps": 1},
        (P("model"),),
    )
    assert (second.number, second.paths) == (2, (P("zip"), P("moved")))
    undo_last(root, 1)  # other files: any order
    undo_last(root, 2)
    assert not (root / ".ckptfix").exists()


def test_transactions_on_the_same_files_are_undone_in_reverse(root: Path) -> None:
    old = snapshot(root)
    do(root, (PATCH,))
    do(root, (Patch(path=P("model"), offset=0, old=b"old", new=b"NEW"),))
    with pytest.raises(ChangedError, match="undo 2 first"):
        undo_last(root, 1)
    undo_last(root, 2)
    undo_last(root, 1)
    assert snapshot(root) == old


def test_undo_of_what_is_not_there(root: Path) -> None:
    with pytest.raises(UsageError, match="no transaction 4"):
        undo_last(root, 4)


def test_a_failed_verify_rolls_back(root: Path) -> None:
    old = snapshot(root)

    def verify() -> None:
        raise ValueError("not as planned")

    with folder_lock(root), pytest.raises(RolledBackError, match="not as planned") as caught:
        commit(root, all_edits(root), target="", summary=None, verify=verify)
    assert isinstance(caught.value.__cause__, ValueError)
    assert snapshot(root) == old


def test_an_interrupt_rolls_back_and_stays_an_interrupt(root: Path) -> None:
    old = snapshot(root)

    def verify() -> None:
        raise KeyboardInterrupt

    with folder_lock(root), pytest.raises(KeyboardInterrupt):
        commit(root, all_edits(root), target="", summary=None, verify=verify)
    assert snapshot(root) == old


WRONG: dict[str, Callable[[Path], Edit]] = {
    "other bytes": lambda root: Patch(path=P("model"), offset=0, old=b"OTHER", new=b"12345"),
    "other size": lambda root: Append(path=P("zip"), old_size=299, data=b"x"),
    "cut of another size": lambda root: Truncate(path=P("zip"), old_size=301, new_size=1),
    "hard link in place": lambda root: Patch(path=P("hard"), offset=0, old=b"h", new=b"H"),
    "symbolic link in place": lambda root: Patch(path=P("linked"), offset=0, old=b"b", new=b"B"),
    "taken name": lambda root: Move(source=P("zip"), target=P("index")),
    "nothing to move": lambda root: Move(source=P("none"), target=P("some")),
    "nothing to remove": lambda root: Remove(path=P("none"), previous=KEPT),
    "not new": lambda root: Replace(path=P("zip"), content=Recipe(pieces=()), previous=ABSENT),
    "recipe of another size": lambda root: Remove(
        path=P("zip"), previous=Recipe(pieces=(Literal(b"1"),))
    ),
    "range beyond the end": lambda root: Replace(
        path=P("new"), content=Recipe(pieces=(Range(P("zip"), 299, 2),)), previous=ABSENT
    ),
    "long range beyond the end": lambda root: Replace(
        path=P("new"), content=Recipe(pieces=(Range(P("zip"), 0, 1 << 20),)), previous=ABSENT
    ),
    "upwards": lambda root: Remove(path=P("../blob"), previous=KEPT),
    "absolute": lambda root: Remove(path=P("/etc/passwd"), previous=KEPT),
    "the journal": lambda root: Remove(path=P(".ckptfix/lock"), previous=KEPT),
    "lengths differ": lambda root: Patch(path=P("model"), offset=0, old=b"ab", new=b"a"),
}


@pytest.mark.parametrize("why", WRONG)
def test_what_does_not_fit_changes_nothing(root: Path, why: str) -> None:
    old = snapshot(root)
    with pytest.raises(OperationError):
        do(root, (PATCH, WRONG[why](root)))
    assert snapshot(root) == old


def test_no_edit_behind_a_symbolic_link_to_a_folder(root: Path) -> None:
    (root.parent / "elsewhere").mkdir()
    (root.parent / "elsewhere" / "file").write_bytes(b"12")
    (root / "way out").symlink_to(root.parent / "elsewhere")
    with pytest.raises(OperationError, match="symbolic link"):
        do(root, (Patch(path=P("way out/file"), offset=0, old=b"1", new=b"2"),))
    assert (root.parent / "elsewhere" / "file").read_bytes() == b"12"


@pytest.mark.parametrize("name", ["model", "model_1", "index", "sub/new", "linked"])
def test_undo_refuses_a_file_that_changed_since(root: Path, name: str) -> None:
    do(root, all_edits(root))
    (root / name).write_bytes(b"saved again")
    new = snapshot(root)
    with pytest.raises(ChangedError, match=name), folder_lock(root):
        undo(root, 1, force=True)
    assert snapshot(root) == new


def test_undo_refuses_when_a_file_it_reads_changed_or_one_came_back(root: Path) -> None:
    do(root, all_edits(root)[:1])
    (root / "model_1").write_bytes(b"came back")
    with pytest.raises(ChangedError, match="appeared"):
        undo_last(root)
    (root / "model_1").unlink()
    os.utime(root / "model", ns=(1, 1))
    undo_last(root)
    assert (root / "model_1").read_bytes() == b"another header" + BODY + b"end"


def test_a_recipe_of_another_file_deletes_nothing(root: Path) -> None:
    """A recipe that does not make the file that was dropped is found before the commit."""
    (root / "model").write_bytes(b"old header" + bytes(300_000))
    (root / "model_1").write_bytes(b"X" + bytes(300_000))
    # A wrong one.
    recipe = Recipe.like(root / "model_1", (Literal(b"X"), Range(P("model"), 0, 300_000)))
    before = without_journal(snapshot(root))
    with pytest.raises(RolledBackError, match="everything was rolled back"):
        do(root, (Remove(path=P("model_1"), previous=recipe),))
    assert without_journal(snapshot(root)) == before


RESAVED: dict[str, Callable[[Path], tuple[Edit, ...]]] = {
    "model": lambda root: (PATCH,),
    "zip": lambda root: (Append(path=P("zip"), old_size=300, data=b"1234"),),
    "index": lambda root: (Truncate(path=P("index"), old_size=2, new_size=1),),
    "model_2": lambda root: (
        Replace(path=P("model_2"), content=Recipe(pieces=(Literal(b"new"),)), previous=KEPT),
    ),
    "hard": lambda root: (Remove(path=P("hard"), previous=KEPT),),
    "new": lambda root: (Replace(path=P("new"), content=Recipe(pieces=()), previous=ABSENT),),
}


@pytest.mark.parametrize("name", RESAVED)
def test_recovery_leaves_a_file_alone_that_was_saved_again(root: Path, name: str) -> None:
    interrupt(root, *RESAVED[name](root))
    (root / name).write_bytes(b"saved again, something else altogether")
    before = snapshot(root)
    with pytest.raises(JournalError):
        run_recovery(root)
    assert snapshot(root) == before


@pytest.mark.parametrize("name", ["model", "zip", "index"])
def test_recovery_leaves_a_file_of_the_same_size_alone(root: Path, name: str) -> None:
    interrupt(root, *RESAVED[name](root))
    (root / name).write_bytes(b"?" * (root / name).stat().st_size)
    before = snapshot(root)
    with pytest.raises(JournalError, match="left alone"):
        run_recovery(root)
    assert snapshot(root) == before


def test_recovery_reports_what_it_did(root: Path) -> None:
    old = snapshot(root, times=False)
    interrupt(root, PATCH, Move(source=P("zip"), target=P("moved")))
    (found,) = transactions(root)
    assert found.state is State.PENDING
    with folder_lock(root):
        report = recover(root)
        assert report is not None
        assert report.rolled_back == found
        assert recover(root) is None
    assert snapshot(root, times=False) == old


def test_an_unfinished_transaction_stops_new_ones(root: Path) -> None:
    interrupt(root, PATCH)
    with folder_lock(root), pytest.raises(JournalError, match="unfinished"):
        commit(root, (PATCH,), target="", summary=None, verify=lambda: None)
    with folder_lock(root), pytest.raises(JournalError, match="unfinished"):
        undo(root, 1)


@pytest.mark.parametrize("name", ["plan.json", "literals", "steps"])
def test_a_damaged_journal_touches_nothing(root: Path, name: str) -> None:
    """Every byte of the plan and of the literals flipped, one at a time; of the steps, the line
    breaks removed.
    """
    pending = interrupt(root, PATCH)
    data = (pending / name).read_bytes()
    before = snapshot(root)["model"]
    positions = range(len(data) - 1) if name != "steps" else [0]
    for position in positions:
        damaged = bytearray(data)
        damaged[position] ^= 0x41
        (pending / name).write_bytes(damaged)
        with pytest.raises(JournalError, match=name):
            run_recovery(root)
    assert snapshot(root)["model"] == before
    if name != "steps":
        assert name in str(transactions(root)[0].problem)
    (pending / name).write_bytes(data)
    run_recovery(root)
    assert (root / "model").read_bytes() == b"old header" + BODY


def test_a_journal_of_another_version_is_refused(root: Path) -> None:
    import hashlib

    pending = interrupt(root, PATCH)
    body = json.loads((pending / "plan.json").read_bytes().partition(b"\n")[2])
    text = json.dumps(body | {"version": 2}).encode()
    (pending / "plan.json").write_bytes(
        hashlib.sha256(text).hexdigest().encode() + b"\n" + text + b"\n"
    )
    with pytest.raises(JournalError, match="another version"):
        run_recovery(root)


def test_a_torn_header_is_recovered_whatever_sectors_landed(root: Path) -> None:
    old_bytes, new_bytes = os.urandom(4096), os.urandom(4096)
    (root / "model").write_bytes(b"8 bytes." + old_bytes + b"rest")
    pending = interrupt(root, Patch(path=P("model"), offset=8, old=old_bytes, new=new_bytes))
    shutil.copytree(root / ".ckptfix", root.parent / "journal")
    for subset in range(256):
        torn = b"".join(
            (new_bytes if subset >> sector & 1 else old_bytes)[sector * 512 : sector * 512 + 512]
            for sector in range(8)
        )
        (root / "model").write_bytes(b"8 bytes." + torn + b"rest")
        run_recovery(root)
        assert (root / "model").read_bytes() == b"8 bytes." + old_bytes + b"rest"
        shutil.copytree(root.parent / "journal", root / ".ckptfix")
    assert pending.exists()


def test_names_that_are_no_text_survive(root: Path) -> None:
    odd = os.fsdecode(b"model\xff\n.bin")
    (root / odd).write_bytes(b"12")
    old = snapshot(root)
    do(
        root,
        (Patch(path=P(odd), offset=0, old=b"1", new=b"2"), Move(source=P(odd), target=P("m"))),
    )
    undo_last(root)
    assert snapshot(root) == old


def test_a_checkpoint_copied_with_its_journal_can_be_undone(root: Path) -> None:
    old = snapshot(root)
    do(root, all_edits(root)[:6])
    copy = root.parent / "copy"
    shutil.copytree(root, copy, symlinks=True)
    undo_last(copy)
    new = snapshot(copy)
    assert {k: v for k, v in new.items() if k != "(links)"} == {
        k: v for k, v in old.items() if k != "(links)"
    }


def test_many_pieces_are_fast_and_exact(root: Path) -> None:
    """A zip file of 5,000 records; one write per MiB, not one per piece."""
    pieces = tuple(
        piece
        for number in range(5000)
        for piece in (Literal(f"record {number}".encode()), Range(P("model"), number, 100))
    )
    body = (root / "model").read_bytes()
    expected = b"".join(
        (
            piece.data
            if isinstance(piece, Literal)
            else body[piece.offset : piece.offset + piece.length]
        )
        for piece in pieces
    )
    (root / "many").write_bytes(expected)
    old = snapshot(root)
    do(root, (Remove(path=P("many"), previous=Recipe.like(root / "many", pieces)),))
    assert not (root / "many").exists()
    undo_last(root)
    assert snapshot(root) == old


def test_a_commit_that_is_taken_back_is_durably_pending_first(root: Path) -> None:
    """Else a crash may leave half undone what the disk still calls committed."""
    calls: list[str] = []
    failed: list[bool] = []

    def at_call(
        name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path = (
            os.readlink(f"/proc/self/fd/{args[0]}")
            if name in ("fsync", "pwrite")
            else str(args[-1])
        )
        if calls and calls[-1].endswith("0001.done") and not failed:
            failed.append(True)
            raise OSError(errno.EIO, "the disk is ill")
        calls.append(f"{name} {path.removeprefix(str(root))}")
        return real(*args, **kwargs)

    with intercepted(at_call), pytest.raises(RolledBackError, match="ill"):
        do(root, (PATCH,))
    after = calls[calls.index("rename /.ckptfix/0001.done") + 1 :]
    assert after[:3] == ["rename /.ckptfix/0001.pending", "fsync /.ckptfix", "pwrite /model"]


def test_nobody_else_reads_the_journal(root: Path) -> None:
    """It holds bytes of files that others may not read, and of files in folders that they may not
    enter.
    """
    os.chmod(root / "zip", 0o600)
    modes = set()

    def look() -> None:
        pending = root / ".ckptfix" / "0001.pending"
        modes.add(pending.stat().st_mode & 0o777)
        modes.update(
            path.lstat().st_mode & 0o077
            for path in pending.iterdir()
            if path.suffix in ("", ".tail")
        )

    umask = os.umask(0)
    try:
        with folder_lock(root):
            commit(root, all_edits(root), target="", summary=None, verify=look)
    finally:
        os.umask(umask)
    assert modes == {0o700, 0}
    done = root / ".ckptfix" / "0001.done"
    ours = [path for path in done.iterdir() if path.suffix != ".kept"]
    assert {path.name: path.stat().st_mode & 0o777 for path in ours} == dict.fromkeys(
        ("plan.json", "literals", "steps", "after.json", "samples.json", "3.tail"), 0o600
    )


def open_the_way_to(root: Path) -> None:
    """Let others pass the folders that pytest made for this user alone."""
    disks = {Path(tempfile.gettempdir()), Path("/dev/shm")}
    for path in root.parents:
        if path not in disks and not disks.isdisjoint(path.parents):
            os.chmod(path, 0o755)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_may_check_and_edit_but_not_undo(root: Path) -> None:
    """A group folder: a repair by one user is no damage to the next, who repairs other things in
    it.
    """
    do(root, (PATCH,))
    open_the_way_to(root)
    for path in (root.parent, root, root / ".ckptfix", root / "zip"):
        os.chmod(path, 0o777)

    def other() -> None:
        os.setgid(65534)
        os.setuid(65534)
        (info,) = transactions(root)
        assert (info.foreign, info.problem, info.state) == (True, None, State.DONE)
        run_recovery(root)
        with pytest.raises(JournalError, match="only the user who ran ckptfix on this folder"):
            undo_last(root)
        assert do(root, (Patch(path=P("zip"), offset=0, old=b"zip", new=b"ZIP"),)) == 2
        with pytest.raises(JournalError, match="only the user"):
            undo_last(root, 1)
        undo_last(root, 2)

    assert in_child(other) == (Outcome.FINISHED, "")
    undo_last(root)
    assert (root / "model").read_bytes() == b"old header" + BODY


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_what_another_user_did_later_is_in_the_way_of_an_undo(root: Path) -> None:
    os.chmod(root, 0o777)
    os.chown(root / "model", 65534, 65534)
    os.chown(root / "zip", 65534, 65534)
    open_the_way_to(root)
    do(root, (Patch(path=P("zip"), offset=0, old=b"zip", new=b"ZIP"),))

    def other() -> None:
        os.setgid(65534)
        os.setuid(65534)
        with (
            folder_lock(root),
            pytest.raises(ChangedError, match=r"undo 2 first \(it belongs to another user"),
        ):
            undo(root, 1)

    do(root, (PATCH,))
    os.chown(root / ".ckptfix", 65534, 65534)
    done = root / ".ckptfix" / "0001.done"
    for path in (done, *done.iterdir()):
        os.chown(path, 65534, 65534)
    assert in_child(other) == (Outcome.FINISHED, "")


NAMES = ("a", "b", "c", "d", "e")


@st.composite
def folders_and_choices(
    draw: st.DrawFn,
) -> tuple[dict[str, tuple[str, bytes]], list[tuple[int, int, int, bytes]]]:
    kinds = st.tuples(st.sampled_from(["file", "file", "link", "hard"]), st.binary(max_size=40))
    folder = draw(st.dictionaries(st.sampled_from(NAMES), kinds, min_size=1))
    choice = st.tuples(
        st.integers(0, 5), st.integers(0, 99), st.integers(0, 99), st.binary(max_size=20)
    )
    return folder, draw(st.lists(choice, max_size=8))


def _edit(root: Path, choice: tuple[int, int, int, bytes]) -> Edit | None:
    """Turn numbers into an edit that fits the folder as it is now; None when there is no such
    edit.
    """
    kind, first, second, data = choice
    there = sorted(path.name for path in root.iterdir() if path.name != ".ckptfix")
    free = [name for name in NAMES if name not in there]
    if not there:
        return None
    name = there[first % len(there)]
    path, full = P(name), root / name
    in_place = not full.is_symlink() and full.lstat().st_nlink == 1
    if kind == 0 and in_place:
        body = full.read_bytes()
        start = second % (len(body) + 1)
        old = body[start : start + len(data)]
        return Patch(path=path, offset=start, old=old, new=data[: len(old)])
    if kind == 1 and in_place:
        return Append(
            path=path, old_size=full.stat().st_size, data=data, tail=second % (len(data) + 1)
        )
    if kind == 2 and in_place:
        size = full.stat().st_size
        return Truncate(path=path, old_size=size, new_size=second % (size + 1))
    if kind == 3:
        content = Recipe(pieces=(Literal(data),), mode=0o600 + second % 0o100)
        if free and second % 3 == 0:
            return Replace(path=P(free[0]), content=content, previous=ABSENT)
        if in_place and second % 3 == 1:
            body = full.read_bytes()
            return Replace(path=path, content=content, previous=Recipe.like(full, (Literal(body),)))
        return Replace(path=path, content=content, previous=KEPT)
    if kind == 4:
        others = [other for other in there if other != name and not (root / other).is_symlink()]
        if in_place and others:
            other = root / others[second % len(others)]
            body, twin = full.read_bytes(), other.read_bytes()
            shared = next(
                (n for n in range(len(body)) if body[n : n + 1] != twin[n : n + 1]), len(body)
            )
            pieces = (Range(P(other.name), 0, shared), Literal(body[shared:]))
            return Remove(path=path, previous=Recipe.like(full, pieces))
        return Remove(path=path, previous=KEPT)
    if kind == 5 and free:
        return Move(source=path, target=P(free[second % len(free)]))
    return None


@settings(max_examples=examples(150), deadline=None)
@given(folders_and_choices(), st.integers(0, 8))
def test_undo_after_commit_is_the_identity(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[dict[str, tuple[str, bytes]], list[tuple[int, int, int, bytes]]],
    split: int,
) -> None:
    """Random folders and edits, in two transactions; a twin that is edited step by step tells what
    fits next.
    """
    folder, choices = drawn
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as base:
        root, twin = Path(base, "root"), Path(base, "twin")
        for place in (root, twin):
            place.mkdir()
            for name, (kind, data) in folder.items():
                if kind == "link":
                    (place / name).symlink_to("target of a link")
                else:
                    (place / name).write_bytes(data)
                    if kind == "hard":
                        os.link(place / name, place.parent / f"{place.name}-{name}")
        edits: list[Edit] = []
        for choice in choices:
            edit = _edit(twin, choice)
            if edit is not None:
                do(twin, (edit,))
                edits.append(edit)
        # a twin's modes are those of the edits, and its links end where a Replace begins: compare
        # bytes only
        states = [snapshot(root)]
        for part in (edits[:split], edits[split:]):
            do(root, part)
            states.append(snapshot(root))
        assert _bytes(root) == _bytes(twin)
        undo_last(root, 2)
        assert _visible(root) == {k: v for k, v in states[1].items() if ".ckptfix" not in k}
        undo_last(root, 1)
        assert snapshot(root) == states[0]


def _bytes(root: Path) -> dict[str, object]:
    return {
        path.name: os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in root.iterdir()
        if path.name != ".ckptfix"
    }


def _visible(root: Path) -> dict[str, tuple[object, ...]]:
    return {name: value for name, value in snapshot(root).items() if ".ckptfix" not in name}
