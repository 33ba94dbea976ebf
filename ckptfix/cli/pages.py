"""Where ``--html`` may write: a new file, or an older page of ours, never into what is looked at."""

import os
from collections.abc import Sequence
from pathlib import Path

from ckptfix.errors import UsageError
from ckptfix.storage.atomic import create_file, sync_folder
from ckptfix.storage.permission import cause

_BEGINS = b"<!DOCTYPE html>\n"
_TITLE = b"<title>ckptfix "
_HEAD = 1024  # bytes within which every page has its title


def ensure_writable(html: str, inputs: Sequence[str]) -> None:
    """Find out before the work of minutes whether the page can be written; an existing file stays as it is.

    ``inputs``: files and folders that it must not change. Raises UsageError when it cannot be written.
    """
    page = Path(os.path.realpath(html))
    for given in inputs:
        if page.is_relative_to(os.path.realpath(given)):
            raise UsageError(f"--html {html} would change {given}; name a file outside of it")
    try:
        if os.path.lexists(page) and not _is_ours(page):
            raise UsageError(f"--html: {html} exists and is not a ckptfix report; choose another path")
        create_file(_beside(page), b"")
        os.unlink(_beside(page))
    except OSError as error:
        raise UsageError(f"--html {html} cannot be written: {cause(Path(html), error)}") from error


def write_page(html: str, text: str) -> None:
    """Write a page under another name, and put it in its place when it is whole. Raises OSError."""
    page = Path(os.path.realpath(html))
    new = _beside(page)
    try:
        create_file(new, text.encode("utf-8"))
        os.replace(new, page)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(page.parent)


def _is_ours(page: Path) -> bool:
    """Whether a file begins as our pages do, or is empty, as mktemp makes it."""
    if not page.is_file():
        return False
    with page.open("rb") as file:
        head = file.read(_HEAD)
    return not head or (head.startswith(_BEGINS) and _TITLE in head)


def _beside(page: Path) -> Path:
    return page.with_name(f".{page.name}.ckptfix-{os.getpid()}")
