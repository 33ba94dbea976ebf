"""Small folders with every kind of file, and edits for them."""

import os
import signal
import stat
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ckptfix.storage import transactions
from ckptfix.storage.edits import Append, Edit, Move, Patch, Remove, Replace, Truncate
from ckptfix.storage.folder_backend import FolderBackend
from ckptfix.storage.lock import folder_lock
from ckptfix.storage.recipes import ABSENT, KEPT, Literal, Range, Recipe
from ckptfix.storage.transactions import RecoveryReport, TransactionPlan
from tests.storage.crash import Outcome, in_child

P = PurePosixPath
LINK = os.link  # the folders have linked files even where a test takes hard links away
Snapshot = dict[str, tuple[object, ...]]
BODY = bytes(range(256)) * 40


def make_folder(root: Path) -> Path:
    """Two weight files with one body, a zip, a symbolic link to a file outside, a hard-linked pair,
    a sub-folder.
    """
    root.mkdir()
    outside = root.parent / "blob"
    outside.write_bytes(b"blob")
    (root / "model").write_bytes(b"old header" + BODY)
    (root / "model_1").write_bytes(b"another header" + BODY + b"end")
    (root / "model_2").write_bytes(b"third")
    (root / "zip").write_bytes(b"zip" * 100)
    (root / "index").write_text("{}")
    (root / "linked").symlink_to(outside)
    (root / "hard").write_bytes(b"hard")
    LINK(root / "hard", root / "other name")
    (root / "sub").mkdir()
    (root / "sub" / "file").write_bytes(b"in a folder")
    os.chmod(root / "model_1", 0o600)
    os.chmod(root / "index", 0o640)
    for number, path in enumerate(sorted(root.rglob("*"))):
        if not path.is_symlink():
            os.utime(path, ns=(10**18, 10**18 + number))
    return root


def all_edits(root: Path) -> tuple[Edit, ...]:
    """One edit of every kind, chained through one another as a repair does."""
    double = (Literal(b"another header"), Range(P("model"), 10, len(BODY)), Literal(b"end"))
    return (
        Remove(path=P("model_1"), previous=Recipe.like(root / "model_1", double)),
        Patch(path=P("model"), offset=0, old=b"old header", new=b"NEW HEADER"),
        Move(source=P("model_2"), target=P("model_1")),
        Truncate(path=P("zip"), new_size=200, old_size=300),
        Append(path=P("zip"), old_size=200, data=b"directory and tail", tail=4),
        Replace(
            path=P("index"),
            content=Recipe(pieces=(Literal(b'{"a": 1}'),), mode=0o640),
            previous=Recipe.like(root / "index", (Literal(b"{}"),)),
        ),
        Replace(path=P("sub/new"), content=Recipe(pieces=(Literal(b"new"),)), previous=ABSENT),
        Replace(path=P("linked"), content=Recipe(pieces=(Literal(b"a file"),)), previous=KEPT),
        Remove(path=P("hard"), previous=KEPT),
    )


def snapshot(root: Path, *, times: bool = True) -> Snapshot:
    """Everything about a folder that an undo restores; with ``times=False`` only what a repair
    decides.
    """
    names: dict[int, list[str]] = {}
    found: Snapshot = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            status = path.lstat()
            inside = str(path.relative_to(root))
            names.setdefault(status.st_ino, []).append(inside)
            if path.is_symlink():
                found[inside] = ("link", os.readlink(path))
            elif path.is_dir():
                found[inside] = ("folder", stat.S_IMODE(status.st_mode))
            else:
                time = status.st_mtime_ns if times else 0
                found[inside] = ("file", stat.S_IMODE(status.st_mode), path.read_bytes(), time)
    found["(links)"] = tuple(
        sorted(tuple(sorted(group)) for group in names.values() if len(group) > 1)
    )
    return found


def without_journal(folder: Snapshot) -> Snapshot:
    return {name: value for name, value in folder.items() if not name.startswith(".ckptfix")}


def commit(
    root: Path,
    edits: Sequence[Edit],
    *,
    target: str = "",
    summary: object = None,
    verify: Callable[[], None] = lambda: None,
    **options: Any,
) -> int:
    """Make the edits in one transaction; the caller holds the lock."""
    plan = TransactionPlan(edits=edits, target=target, summary=summary, **options)
    return transactions.commit(FolderBackend(root), plan, verify)


def recover(root: Path, *, force: bool = False) -> RecoveryReport | None:
    """Go on with what was cut short; the caller holds the lock."""
    return FolderBackend(root).recover(force=force)


def undo(root: Path, number: int, *, force: bool = False) -> tuple[PurePosixPath, ...]:
    """Undo a transaction; the caller holds the lock."""
    return transactions.undo(FolderBackend(root), number, force=force)


def do(root: Path, edits: Sequence[Edit]) -> int:
    with folder_lock(root):
        recover(root)
        return commit(root, edits, target="model", summary={"steps": 1}, verify=lambda: None)


def undo_last(root: Path, number: int = 1) -> None:
    with folder_lock(root):
        recover(root)
        undo(root, number)


def run_recovery(root: Path) -> None:
    with folder_lock(root):
        recover(root)


def killed(root: Path, *edits: Edit) -> None:
    """Do the edits in a child that is killed before the commit."""

    def run() -> None:
        with folder_lock(root):
            commit(
                root,
                edits,
                target="",
                summary=None,
                verify=lambda: os.kill(os.getpid(), signal.SIGKILL),
            )

    assert in_child(run)[0] is Outcome.KILLED
    (root / ".ckptfix" / "lock").unlink()  # left by the child; tests compare what else there is
