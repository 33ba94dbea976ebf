"""A repaired copy: the checkpoint is copied under a temporary name, repaired there, and renamed when it is whole."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.latest import UNFINISHED, outside_checkpoints
from ckptfix.checkpoint.pairing import Progress
from ckptfix.diagnosis.target import Target
from ckptfix.errors import OperationError, UsageError
from ckptfix.storage.atomic import sync_folder, sync_tree
from ckptfix.storage.paths import JOURNAL, MANIFEST, ensure_folder
from ckptfix.storage.recipes import Range, Recipe, build
from ckptfix.storage.transactions import transactions
from ckptfix.wording import human_size


@contextmanager
def copy_checkpoint(target: Target, output: Path, progress: Progress | None) -> Iterator[Target]:
    """Copy ``target``, yield the copy to be repaired, then move it to ``output``.

    Links become files of their own. The manifest is copied, the journal of the source is not, and that of the copy is
    removed. Whatever fails, ``output`` is there whole or not at all.

    Raises UsageError when something stands at ``output``, OperationError when there is too little space.
    """
    check_output(target, output)
    _check_space(target, output)
    staging = _staging_folder(output)
    try:
        staging.mkdir()
        _copy_tree(target, staging, progress)
        copy = Target(staging, target.only)
        yield copy
        for transaction in transactions(staging):
            shutil.rmtree(staging / JOURNAL / f"{transaction.number:04}.{transaction.state.value}")
        with suppress(OSError):  # it holds the manifest, or is not there
            os.rmdir(staging / JOURNAL)
        sync_tree(staging)
        os.rename(copy.path, output)
        sync_folder(output.absolute().parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_output(target: Target, output: Path) -> None:
    """Raise UsageError when a copy of ``target`` cannot be made at ``output``."""
    if os.path.lexists(output):
        raise UsageError(f"{output} exists; name a folder that does not")
    ensure_folder(output.absolute().parent)
    if output.resolve().is_relative_to(target.root.resolve()) and target.only is None:
        raise UsageError(f"{output} lies inside {target.root}, which is to be copied")


def _staging_folder(output: Path) -> Path:
    """Return a new name beside ``output``; never inside ``checkpoints/``, where Accelerate reads every name."""
    return outside_checkpoints(output.absolute()) / f".{output.name}.ckptfix-{os.getpid()}"


def _check_space(target: Target, output: Path) -> None:
    if target.only is not None:
        need = os.stat(target.path).st_size
    else:
        need = sum(
            os.stat(Path(root) / name).st_size
            for root, _, names in os.walk(target.root)
            for name in names
            if os.path.exists(Path(root) / name)
        )
    status = os.statvfs(output.absolute().parent)
    free = status.f_bavail * status.f_frsize
    if need > free:
        raise OperationError(
            f"{output}: the copy needs {human_size(need)} of free space, {human_size(free)} are free on this disk"
        )


def _copy_tree(target: Target, staging: Path, progress: Progress | None) -> None:
    names = [target.only] if target.only is not None else sorted(os.listdir(target.root))
    for record in (MANIFEST, f"{JOURNAL}/{UNFINISHED}"):  # a mix of two saves stays one in a copy
        if target.only is None and (target.root / record).is_file():
            (staging / JOURNAL).mkdir(exist_ok=True)
            shutil.copyfile(target.root / record, staging / record)
    for name in names:
        source = target.root / name
        if name == JOURNAL:
            continue
        if source.is_dir():
            shutil.copytree(source, staging / name)
        elif source.is_file():
            pieces = (Range(PurePosixPath(name), 0, source.stat().st_size),) if source.stat().st_size else ()
            build(Recipe.like(source, pieces), target.root, staging / name, progress=progress)
        elif source.is_symlink():
            os.symlink(os.readlink(source), staging / name)
