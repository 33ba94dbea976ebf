"""Repaired copies: the checkpoint is copied under a temporary name, repaired there, and renamed
when it is complete.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.latest import UNFINISHED, cut_upload
from ckptfix.diagnosis.target import Target
from ckptfix.errors import UsageError
from ckptfix.storage.atomic import sync_tree
from ckptfix.storage.journal import transactions
from ckptfix.storage.markers import UPLOAD
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import JOURNAL, MANIFEST, ensure_folder
from ckptfix.storage.recipes import Range, Recipe, build
from ckptfix.storage.staged import ensure_space, put_in_place, staging_for


@contextmanager
def copy_checkpoint(target: Target, output: Path, progress: Progress | None) -> Iterator[Target]:
    """Copy ``target``, yield the copy to be repaired, then move it to ``output``.

    Links become files of their own. The manifest is copied, the journal of the source is not, and
    that of the copy is removed. Whatever fails, ``output`` is complete or absent.

    Raises UsageError when something exists at ``output``, OperationError when there is too little
    space.
    """
    root = target.root
    assert isinstance(root, Path), "a store copies by itself"
    check_output(target, output)
    ensure_space(output, _size_of(root, target.only))
    with staging_for(output, name=target.only) as staging:
        _copy_tree(root, target.only, staging.new, progress)
        yield Target(staging.new, target.only)
        journal = staging.new / JOURNAL
        for transaction in transactions(staging.new):
            shutil.rmtree(journal / f"{transaction.number:04}.{transaction.state.value}")
        with suppress(OSError):  # it holds the manifest, or does not exist
            os.rmdir(journal)
        sync_tree(staging.new)
        put_in_place(staging)


def check_output(target: Target, output: Path) -> None:
    """Raise UsageError when a copy of ``target`` cannot be made at ``output``."""
    if os.path.lexists(output):
        raise UsageError(f"{output} exists; choose a folder that does not exist")
    ensure_folder(output.absolute().parent)
    root = target.root
    is_inside = isinstance(root, Path) and output.resolve().is_relative_to(root.resolve())
    if is_inside and target.only is None:
        raise UsageError(f"{output} is inside {target.root}, the folder to copy")


def _size_of(top: Path, only: str | None) -> int:
    if only is not None:
        return os.stat(top / only).st_size
    paths = (Path(root, name) for root, _, names in os.walk(top) for name in names)
    return sum(path.stat().st_size for path in paths if path.exists())


def _copy_tree(root: Path, only: str | None, staging: Path, progress: Progress | None) -> None:
    names = [only] if only is not None else sorted(os.listdir(root))
    # A mix of two saves, or an upload that was cut short, stays one in a copy.
    cut = (UPLOAD,) if only is None and cut_upload(root) else ()
    for record in (MANIFEST, f"{JOURNAL}/{UNFINISHED}", *cut):
        if only is None and (root / record).is_file():
            (staging / JOURNAL).mkdir(exist_ok=True)
            shutil.copyfile(root / record, staging / record)
    for name in names:
        source = root / name
        if name == JOURNAL:
            continue
        if source.is_dir():
            shutil.copytree(source, staging / name)
        elif source.is_file():
            pieces = (
                (Range(PurePosixPath(name), 0, source.stat().st_size),)
                if source.stat().st_size
                else ()
            )
            build(Recipe.like(source, pieces), root, staging / name, progress=progress)
        elif source.is_symlink():
            os.symlink(os.readlink(source), staging / name)
