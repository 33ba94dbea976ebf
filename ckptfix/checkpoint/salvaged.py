"""What ``ckptfix salvage`` says is lost, in the ``salvage.json`` of a folder that it wrote."""

import json
import os
import stat
from pathlib import Path
from typing import NamedTuple

from ckptfix.storage.reading import open_reader
from ckptfix.wording import count_of

REPORT = "salvage.json"
"""Where the new folder says what was lost."""

_VERSION = 1
_MAX_REPORT = 128 << 20
"""Longest report that is read, in bytes; the name of a tensor takes about 60."""


class Losses(NamedTuple):
    """What a salvaged folder lacks: ``tensors`` (or other values) of files, whole ``files``; and what is ``damaged``
    in it, kept all the same."""

    tensors: int
    files: int
    damaged: int

    def __str__(self) -> str:
        counts = [(self.tensors, "tensor"), (self.files, "file")]
        lost = " and ".join(count_of(number, noun) for number, noun in counts if number)
        kept = f"{count_of(self.damaged, 'tensor or file')} kept though damaged" if self.damaged else ""
        return ", ".join(filter(None, (f"{lost} lost" if lost else "", kept)))


def read_losses(folder: Path) -> Losses | None:
    """Return what a salvage lost of a folder; None when nothing is, or the folder was not salvaged.

    A ``salvage.json`` that is none of ckptfix says nothing. Raises OSError when there is one that cannot be read.
    """
    path = folder / REPORT
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_REPORT:
        return None
    with open_reader(path) as reader:
        data = reader.read(0, reader.size) if reader.size <= _MAX_REPORT else b""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        return None
    lost, damaged = document.get("lost"), document.get("damaged")
    if not isinstance(lost, list) or not isinstance(damaged, list) or not (lost or damaged):
        return None
    files = sum(isinstance(one, dict) and one.get("name") is None for one in lost)
    return Losses(tensors=len(lost) - files, files=files, damaged=len(damaged))
