"""A journal that somebody else wrote: it reaches nothing outside its folder, and it never crashes a
reader.
"""

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ckptfix.errors import JournalError, OperationError
from ckptfix.storage.journal import State, transactions
from ckptfix.storage.lock import folder_lock
from tests.storage.folders import run_recovery, snapshot, undo

NOTE: dict[str, Any] = {"old": None, "metadata": None, "new": None, "digest": "", "tail": ""}
DATA = b"not the user's"


def file_print(data: bytes, kind: str = "file") -> dict[str, Any]:
    return {
        "kind": kind,
        "size": len(data),
        "mtime_ns": 0,
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def recipe(*pieces: object, paths: tuple[str, ...] = (), mode: int = 0o644) -> dict[str, Any]:
    return {"paths": list(paths), "pieces": list(pieces), "mode": mode, "uid": -1, "gid": -1}


def plant(
    root: Path,
    edits: list[Any],
    notes: list[Any],
    *,
    watched: tuple[str, ...],
    state: str = "pending",
    literals: bytes = b"",
    changes: dict[str, object] | None = None,
) -> Path:
    """Write a journal as an attacker would: well formed, with correct checksums."""
    folder = root / ".ckptfix" / f"0001.{state}"
    folder.mkdir(parents=True)
    body: dict[str, object] = {
        "version": 1,
        "target": "",
        "summary": [],
        "created": 0,
        "edits": edits,
        "watched": list(watched),
        "literals": {"length": len(literals), "sha256": hashlib.sha256(literals).hexdigest()},
    }
    write_plan(folder, json.dumps(body | (changes or {})).encode())
    (folder / "literals").write_bytes(literals)
    (folder / "steps").write_bytes(b"".join(json.dumps(note).encode() + b"\n" for note in notes))
    return folder


def write_plan(folder: Path, body: bytes) -> None:
    digest = hashlib.sha256(body).hexdigest().encode()
    (folder / "plan.json").write_bytes(digest + b"\n" + body + b"\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder beside things that no journal in it may touch."""
    root = tmp_path / "folder"
    (root / "sub" / ".ckptfix").mkdir(parents=True)
    (root / "file").write_bytes(b"mine")
    (root / "sub" / ".ckptfix" / "lock").write_bytes(b"")
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis").write_bytes(b"years of work")
    (tmp_path / "secret").write_bytes(b"a key")
    (root / "way out").symlink_to(victim)
    return root


def attacks(base: Path) -> dict[str, tuple[list[Any], list[Any]]]:
    made = {**NOTE, "old": file_print(DATA)}
    folder = {**NOTE, "new": file_print(b"", "folder")}
    out = "way out/new"
    return {
        "delete a folder": (["replace", "../victim", "absent"], [folder]),
        "delete a folder inside": (["replace", "sub", "absent"], [folder]),
        "write at an absolute path": (["remove", str(base / "new"), recipe(len(DATA))], [made]),
        "write above": (["remove", "../new", recipe(len(DATA))], [made]),
        "write behind a link": (["remove", out, recipe(len(DATA))], [made]),
        "write into a journal": (["remove", "sub/.ckptfix/new", recipe(len(DATA))], [made]),
        "the same folder in capitals": (["remove", ".CKPTFIX/new", recipe(len(DATA))], [made]),
        "read above": (["remove", "new", recipe([0, 0, 5], paths=("../secret",))], [made]),
        "read behind a link": (
            ["remove", "new", recipe([0, 0, 13], paths=("way out/thesis",))],
            [made],
        ),
        "patch above": (["patch", "../secret", 0, 5], [NOTE]),
        "cut above": (["append", "../secret", 0, 5], [NOTE]),
        "move from above": (["move", "new", "../secret"], [{**NOTE, "old": file_print(b"a key")}]),
        "a name that cannot be": (["remove", "a\0b", recipe(len(DATA))], [made]),
        "a name that no system has": (["remove", "\ud800", recipe(len(DATA))], [made]),
    }


@pytest.mark.parametrize("attack", attacks(Path("/")))
def test_a_planted_journal_reaches_nothing_outside(root: Path, attack: str) -> None:
    edit, notes = attacks(root.parent)[attack]
    names = [edit[1], *edit[2:3]] if edit[0] == "move" else [edit[1]]
    paths = edit[2]["paths"] if isinstance(edit[2], dict) else []
    plant(
        root,
        [edit],
        notes,
        watched=(*names, *paths),
        literals=DATA if attack != "patch above" else b"a" * 10,
    )
    # The attacker need not know the times either.
    (root / ".ckptfix" / "0001.pending" / "any-time").touch()
    before = snapshot(root.parent)
    with pytest.raises(
        OperationError,
        match=r"stay inside|below the symbolic link|not a valid file name|'folder' is not one of",
    ):
        run_recovery(root)
    assert snapshot(root.parent) == before


@pytest.mark.parametrize("state", ["building", "pending", "done"])
def test_a_transaction_that_is_a_link_is_refused(root: Path, state: str) -> None:
    (root / ".ckptfix").mkdir()
    (root / ".ckptfix" / f"0001.{state}").symlink_to(root.parent / "victim")
    before = snapshot(root.parent)
    assert "symbolic link" in str(transactions(root)[0].problem)
    with pytest.raises(JournalError, match="rm "):
        run_recovery(root)
    with folder_lock(root), pytest.raises(JournalError, match="symbolic link"):
        undo(root, 1)
    assert snapshot(root.parent) == before


def test_what_is_removed_as_garbage_is_never_followed(root: Path) -> None:
    """Links in it go, where they lead stays; a folder in it was not made by this package."""
    building = root / ".ckptfix" / "0001.building"
    building.mkdir(parents=True)
    (building / "0.new").symlink_to(root.parent / "victim")
    (building / "inner").symlink_to(root.parent / "secret")
    run_recovery(root)
    assert (root.parent / "victim" / "thesis").read_bytes() == b"years of work"
    assert not (root / ".ckptfix").exists()
    (building / "deep").mkdir(parents=True)
    with pytest.raises(JournalError):
        run_recovery(root)
    assert (building / "deep").is_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root could be made to set these bits")
def test_no_set_uid_bit_comes_from_a_journal(root: Path) -> None:
    metadata = {"mode": 0o755, "uid": os.getuid(), "gid": os.getgid(), "mtime_ns": 0}
    note = {**NOTE, "old": file_print(DATA), "metadata": metadata}
    edit = ["remove", "new", recipe(len(DATA), mode=0o6755)]
    folder = plant(
        root,
        [edit],
        [{**note, "metadata": {**metadata, "mode": 0o4755}}],
        watched=("new",),
        literals=DATA,
    )
    with pytest.raises(JournalError, match=r"Expected `int` <= 1023 - at `\$\.metadata\.mode`"):
        run_recovery(root)
    (folder / "steps").write_text(json.dumps(note) + "\n")
    run_recovery(root)
    assert stat.S_IMODE((root / "new").stat().st_mode) == 0o755


REMOVE = ["remove", "new", recipe(len(DATA))]
SENSELESS: dict[str, list[Any]] = {
    "a number": [5],
    "an empty edit": [[]],
    "an unknown edit": [["explode", "file"]],
    "remove what never was": [["remove", "new", "absent"]],
    "no recipe": [["remove", "new", 5]],
    "a piece of text": [["remove", "new", recipe("a")]],
    "a negative literal": [["remove", "new", recipe(-1)]],
    "a literal too long": [["remove", "new", recipe(len(DATA) + 1)]],
    "a path that is not listed": [["remove", "new", recipe([7, 0, 1])]],
    "a path from the end": [["remove", "new", recipe([-1, 0, 1], paths=("file",))]],
    "a range before the start": [["remove", "new", recipe([0, -1, 1], paths=("file",))]],
    "a size beyond all": [["remove", "new", recipe([0, 0, 1 << 63], paths=("file",))]],
    "two sizes beyond all": [
        ["remove", "new", recipe(*[[0, 0, (1 << 63) - 1]] * 2, paths=("file",))]
    ],
    "a mode beyond all": [["remove", "new", recipe(1, mode=1 << 40)]],
    "a patch before the start": [["patch", "new", -5, 1]],
    "a cut that grows": [["truncate", "new", 5, 1]],
    "a name that is a number": [["truncate", 5, 1, 5]],
    "a move onto itself": [["move", "new", "./new"]],
}


@pytest.mark.parametrize("why", SENSELESS)
def test_a_senseless_plan_is_a_journal_error(root: Path, why: str) -> None:
    plant(root, SENSELESS[why], [], watched=("new", "file"), literals=DATA)
    (info,) = transactions(root)
    assert "plan.json: cannot be read" in str(info.problem)
    with pytest.raises(JournalError, match=r"plan\.json: cannot be read.*rm -r"):
        run_recovery(root)


@pytest.mark.parametrize(
    "changes",
    [
        {"target": 5},
        {"target": "../elsewhere"},
        {"created": "now"},
        {"created": 10**400},
        {"edits": None},
        {"edits": {"a": 1}},
        {"watched": ["/etc/passwd"]},
        {"watched": []},
        {"watched": [5]},
        {"literals": []},
        {"literals": {}},
        {"version": [1]},
    ],
)
def test_senseless_fields_are_a_journal_error(root: Path, changes: dict[str, object]) -> None:
    plant(root, [REMOVE], [], watched=("new",), literals=DATA, changes=changes)
    assert transactions(root)[0].problem
    with pytest.raises(JournalError):
        run_recovery(root)


@pytest.mark.parametrize(
    "body", [b"[]", b"5", b"{}", b'{"version":1}', b"[" * 100_000, b"\xff", b"", b"NaN"]
)
def test_a_plan_of_another_shape_is_a_journal_error(root: Path, body: bytes) -> None:
    write_plan(plant(root, [], [], watched=()), body)
    assert transactions(root)[0].problem
    with pytest.raises(JournalError, match=r"plan\.json"):
        run_recovery(root)


@pytest.mark.parametrize(
    "notes",
    [
        [NOTE, NOTE],
        [5],
        [[]],
        [{"x": 1}],
        [{**NOTE, "old": 5}],
        [{**NOTE, "old": {"kind": "file"}}],
        [{**NOTE, "old": {**file_print(b""), "size": "1"}}],
        [{**NOTE, "old": {**file_print(b""), "kind": "folder"}}],
        [{**NOTE, "new": {**file_print(b""), "kind": "link"}}],
        [{**NOTE, "old": {**file_print(b""), "sha256": "x"}}],
        [{**NOTE, "old": {**file_print(b""), "sha256": ""}}],
        [{**NOTE, "old": {**file_print(b""), "size": True}}],
        [{**NOTE, "old": {**file_print(b""), "mtime_ns": float("nan")}}],
        [{**NOTE, "old": {**file_print(b""), "kind": "\ud800"}}],
        [{**NOTE, "old": {**file_print(b""), "x": 1}}],
        [{**NOTE, "\ud800": 1}],
        [{**NOTE, "metadata": {"mode": 1}}],
        [{**NOTE, "metadata": {"mode": 1 << 70, "uid": 0, "gid": 0, "mtime_ns": 0}}],
        [{**NOTE, "metadata": {"mode": 0, "uid": 0, "gid": 0, "mtime_ns": 1 << 70}}],
        [{**NOTE, "tail": 5}],
    ],
)
def test_senseless_steps_are_a_journal_error(root: Path, notes: list[Any]) -> None:
    plant(root, [["move", "file", "b"]], notes, watched=("file", "b"))
    before = snapshot(root)
    with pytest.raises(JournalError, match="steps"):
        run_recovery(root)
    assert snapshot(root) == before


@pytest.mark.parametrize("name", ["plan.json", "literals", "steps"])
def test_a_journal_of_pipes_hangs_nobody(root: Path, name: str) -> None:
    folder = plant(root, [REMOVE], [], watched=("new",), literals=DATA)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    transactions(root)
    with pytest.raises(JournalError, match="not a regular file"):
        run_recovery(root)


def test_a_planted_recipe_may_not_wait_for_a_pipe(root: Path) -> None:
    os.mkfifo(root / "pipe")
    edit = ["remove", "new", recipe([0, 0, 5], paths=("pipe",))]
    plant(root, [edit], [{**NOTE, "old": file_print(b"12345")}], watched=("new", "pipe"))
    with pytest.raises(JournalError):
        run_recovery(root)


def test_names_that_are_not_this_package_s_are_left_alone(root: Path) -> None:
    for name in ("00001.building", "٠٠٠١.building", "1.building", "0001.Building"):
        (root / ".ckptfix" / name).mkdir(parents=True)
    run_recovery(root)
    assert len(list((root / ".ckptfix").iterdir())) == 4
    assert transactions(root) == ()


def test_garbage_beside_a_pending_transaction_is_not_in_the_way(root: Path) -> None:
    plant(root, [], [], watched=())
    (root / ".ckptfix" / "0001.building").mkdir()
    (root / ".ckptfix" / "0001.building" / "0.new").write_bytes(b"")
    assert {info.state for info in transactions(root)} == {State.PENDING, State.BUILDING}
    run_recovery(root)
    assert not (root / ".ckptfix").exists()
