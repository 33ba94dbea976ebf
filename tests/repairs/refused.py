"""Files that may not be read, for root too: the tests run as somebody else meanwhile."""

import difflib
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534
NEEDED = (difflib, pwd)
"""What click and ckptfix import when they need it, from a Python that nobody may be unable to read."""


@contextmanager
def nobody_may_read(*paths: Path) -> Iterator[None]:
    """Take every permission off these files and folders, and run as somebody who is not root."""
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    is_root = os.geteuid() == 0
    for path in paths:
        for above in path.parents:
            if is_root and stat.S_IMODE(above.stat().st_mode) & 0o055 != 0o055 and above not in modes:
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
