"""``salvage``: out of a damaged checkpoint what is whole, into a new folder, and a list of what is lost.

``sorting`` says what is whole, ``writing`` puts it beside and proves it, ``receipt`` is the answer.
"""

import os
from pathlib import Path

from ckptfix.checkpoint.pairing import Progress
from ckptfix.checkpoint.salvaged import REPORT
from ckptfix.errors import OperationError
from ckptfix.operations.output import check_output
from ckptfix.operations.salvage.found import Sorted
from ckptfix.operations.salvage.receipt import SalvageReceipt, SavedFile
from ckptfix.operations.salvage.sorting import sort_out
from ckptfix.operations.salvage.writing import plan_file, write_all_beside
from ckptfix.operations.target import find_target
from ckptfix.storage.listing import listed_files
from ckptfix.storage.paths import command
from ckptfix.storage.permission import refused_files

__all__ = ["REPORT", "SalvageReceipt", "salvage"]


def salvage(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    keep_damaged: bool = False,
    progress: Progress | None = None,
) -> SalvageReceipt:
    """Write what is whole of a damaged file or folder into the new folder ``output``, with ``salvage.json`` beside.

    A tensor is whole when all its bytes are in the file where its header says, and have the digest that the manifest of
    the source has for them, if it has one; none is guessed. Files that are whole are copied untouched.
    ``keep_damaged``: keep what is all there but does not have its checksum or digest, too. ``progress`` gets bytes read
    and written. The new folder is there whole, and proved, or not at all.

    Raises UsageError for paths that make no sense, OperationError when nothing can be saved or too little space is
    left, OSError.
    """
    target, new = find_target(source), Path(output)
    check_output(target, new)
    names = listed_files(target.root) if target.only is None else (target.only,)
    for why in refused_files(target.root / name for name in names):
        raise OperationError(f"{why}; a file that may not be read is not lost; nothing was written")
    found = sort_out(target, keep_damaged=keep_damaged, progress=progress)
    if not found.parts and not found.components:
        raise OperationError(_nothing(target.path, found))
    files = [plan_file(part) for part in found.parts]
    receipt = SalvageReceipt(
        source=os.fspath(source),
        output=os.fspath(output),
        saved=tuple(
            SavedFile(
                path=str(file.output.path),
                source=part.source,
                names=(*(tensor.fqn for tensor in part.found.tensors), *part.found.ties),
                nbytes=sum(tensor.nbytes for tensor in part.found.tensors),
            )
            for part, file in zip(found.parts, files, strict=True)
        ),
        copied=tuple(map(str, found.copied)),
        lost=tuple(found.lost),
        doubtful=tuple(found.doubtful),
        damaged=tuple(found.damaged),
        left_out=tuple(found.left_out),
        notes=tuple(found.notes),
        unindexed=tuple(dict.fromkeys(str(index.parent) for index in found.unindexed)),
        not_checked=tuple(found.not_checked),
    )
    write_all_beside(found, files, new, receipt, progress)
    return receipt


def _nothing(path: Path, found: Sorted) -> str:
    """Say why nothing can be saved."""
    reasons = [str(lost) for lost in found.lost[:3]]
    more = f"; and {len(found.lost) - 3} more" if len(found.lost) > 3 else ""
    return f"{path}: nothing can be saved: {'; '.join(reasons) or 'it holds no tensor'}{more}; next: " + (
        found.advice or command("check", path)
    )
