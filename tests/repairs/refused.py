"""Files that may not be read, for root too: the tests run as somebody else meanwhile."""

import difflib
import importlib
import os
import pkgutil
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import ckptfix
from ckptfix.storage.results import own_version

NOBODY = 65534
NEEDED = (difflib, pwd)
"""Modules that click imports at their first use."""


@cache
def import_ckptfix() -> None:
    """Import every module of ckptfix, and torch with them.

    A clone below a folder of mode 0700 cannot be imported as nobody: "No module named
    'ckptfix.cli.merge'" came from whichever test was the first one of its process to use a command.
    """
    for module in pkgutil.walk_packages(ckptfix.__path__, "ckptfix."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):  # an extra that is not installed
                importlib.import_module(module.name)
    # Nobody reads the METADATA there either: "partial results of another command".
    own_version()


@contextmanager
def nobody_may_read(*paths: Path) -> Iterator[None]:
    """Take every permission off these files and folders, and run as somebody who is not root."""
    import_ckptfix()
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    is_root = os.geteuid() == 0
    for path in paths:
        for above in path.parents:
            if (
                is_root
                and stat.S_IMODE(above.stat().st_mode) & 0o055 != 0o055
                and above not in modes
            ):
                modes[above] = stat.S_IMODE(above.stat().st_mode)
                os.chmod(above, modes[above] | 0o055)
    for path in paths:
        os.chmod(path, 0)
    if is_root:
        # The real user, too: click asked os.access(), which goes by it.
        os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        if is_root:
            os.setresuid(0, 0, 0)
        for path, mode in modes.items():
            os.chmod(path, mode)
