"""Remembered verdicts for each set of devices, in the user's cache folder. Free of torch.

They are believed only when the file is the user's own and nobody else could have written it, and
when hardware, driver, boot, torch and allocator are those of now. Anything else is as good as no
file: the worst is a probe more.

One file for each set of devices, replaced as a whole by whoever holds its lock.
"""

import fcntl
import json
import os
import stat
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from ckptfix.devices.probe.probe_report import ProbeReport
from ckptfix.storage.atomic import create_file, read_file
from ckptfix.storage.paths import shell_path

_VERSION = 5
"""Of the file's content and of what the plan exercises: raise it when the plan becomes stricter."""

_LARGEST = 4 << 20
"""Bytes. Ours have a few thousand, and some 100,000 for 16 devices."""

_PATIENCE = 300.0
"""Seconds to wait for another process: longer than it starts a worker and measures."""

_PASSING = ("boot", "drivers")
"""Parts of an identity that never come back once they have changed."""


def location(identity: Mapping[str, Any]) -> Path | None:
    """Return the path of what is kept for these devices; None without a home folder.

    A new boot or driver takes the same one, so that old files do not pile up. What may differ from
    process to process, as torch and its allocator, has another: two jobs with other settings do not
    delete what the other one knows.
    """
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # which the standard says to ignore
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            return None
        folder = os.path.join(home, ".cache")
    lasting = json.dumps(
        {key: value for key, value in identity.items() if key not in _PASSING}, sort_keys=True
    )
    name = f"peer-copies-{sha256(lasting.encode()).hexdigest()[:16]}.json"
    return Path(folder) / "ckptfix" / name


def load(identity: Mapping[str, Any]) -> ProbeReport | None:
    """Return the report that holds for exactly this identity, or None."""
    path = location(identity) if identity else None
    try:
        if path is None or not _is_ours(path):
            return None
        document = json.loads(read_file(path))
        if document["version"] != _VERSION:
            return None
        report = ProbeReport.from_json(document["report"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
    same = json.dumps(report.identity, sort_keys=True) == json.dumps(identity, sort_keys=True)
    return report if same else None


def store(report: ProbeReport) -> None:
    """Add a report to what is kept: whole or not at all, and readable for the user alone. The
    caller holds the lock.

    Not one without an identity, and of the pairs what ``PairReport.over`` makes of what is known of
    them. A folder that cannot be written to, or that others can write to, gives a UserWarning;
    nothing else depends on it.
    """
    path = location(report.identity) if report.identity else None
    if path is None:
        return
    known = load(report.identity) or ProbeReport(pairs={}, seed=report.seed)
    merged = known.renewed_by(report)
    document = json.dumps({"version": _VERSION, "report": merged.to_json()})
    try:
        os.makedirs(path.parent, mode=0o700, exist_ok=True)
        written = path.with_suffix(".new")
        written.unlink(missing_ok=True)  # of a process that was killed
        create_file(written, document.encode(), mode=0o600)
        os.replace(written, path)
        believed = _is_ours(path)
    except OSError as error:
        warnings.warn(
            f"{path.parent}: cannot save the probe's verdicts: {error.strerror}", stacklevel=3
        )
        return
    if not believed:
        warnings.warn(
            f"{path.parent}: the probe's saved verdicts are ignored, because other users can write "
            f"to this folder. To fix this: chmod go-w {shell_path(path.parent)}",
            stacklevel=3,
        )


@contextmanager
def locked(identity: Mapping[str, Any]) -> Iterator[None]:
    """Hold the lock of these devices: other processes of this user wait. It ends with the process.

    Without one where the folder has no locks, or whoever holds it hangs: then ranks of a job may
    measure one after the other.
    """
    path = location(identity) if identity else None
    descriptor = -1
    try:
        if path is not None:
            with suppress(OSError):
                os.makedirs(path.parent, mode=0o700, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                descriptor = os.open(path.with_suffix(".lock"), flags, 0o600)
                _wait_for(descriptor)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _wait_for(descriptor: int) -> None:
    """Take the lock of a file, or go on without it in the end. Raises OSError without locks."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.1)


def _is_ours(path: Path) -> bool:
    """Return whether nobody but this user can have written the file, nor put it there. Raises
    OSError.
    """
    file, folder = os.lstat(path), os.stat(path.parent)
    theirs = stat.S_IWGRP | stat.S_IWOTH
    return (
        stat.S_ISREG(file.st_mode)
        and file.st_size <= _LARGEST
        and not file.st_mode & (theirs | stat.S_IRGRP | stat.S_IROTH)
        and not folder.st_mode & theirs
        and {file.st_uid, folder.st_uid} == {os.geteuid()}
    )
