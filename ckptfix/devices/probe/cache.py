"""Remembered verdicts for each set of devices, in the user's cache folder. Free of torch.

They are believed only when the file is the user's own and nobody else could have written it, and
when hardware, driver, boot, torch and allocator are those of now. Anything else is as good as no
file: the worst is a probe more.

Every report gets a file with a name of its own, which holds what older ones said too, and takes
their place. Where two processes do that at once, both files stay and are read as one, so that
neither loses what the other found: taking in a report twice, or in another order, changes nothing.
No lock is needed, which home folders on a network may not have, and a process that is killed at any
moment leaves either its file or none.
"""

import fcntl
import json
import os
import secrets
import stat
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from ckptfix.devices.probe.probe_report import ProbeReport
from ckptfix.storage.atomic import read_file, write_all
from ckptfix.storage.paths import shell_path

_VERSION = 4
"""Of the file's content and of what the plans exercise: raise it when a plan becomes stricter."""

_LARGEST = 4 << 20
"""Bytes. Ours have a few thousand, and some 100,000 for 16 devices that many processes measured."""

_PASSING = ("boot", "drivers")
"""Parts of an identity that never come back once they have changed."""

_TRIES = 5
"""Times to look for files anew, when one was replaced between finding and reading it."""


def location(identity: Mapping[str, Any]) -> Path | None:
    """Return the beginning of the paths of what is kept for these devices; None without a home
    folder.

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
    return Path(folder) / "ckptfix" / f"peer-copies-{sha256(lasting.encode()).hexdigest()[:16]}"


def load(identity: Mapping[str, Any]) -> ProbeReport | None:
    """Return the report that holds for exactly this identity, or None."""
    path = location(identity) if identity else None
    return None if path is None else _kept(path, identity)[1]


def store(report: ProbeReport) -> None:
    """Add a report to what is kept: whole or not at all, and readable for the user alone.

    Not one without an identity, and of the pairs what ``PairReport.over`` makes of what is known of
    them. A folder that cannot be written to, or that others can write to, gives a UserWarning;
    nothing else depends on it.
    """
    path = location(report.identity) if report.identity else None
    if path is None:
        return
    former, known = _kept(path, report.identity)
    merged = (known or report.only(())).renewed_by(report)
    if not merged.pairs and not merged.hosts:
        return
    document = json.dumps({"version": _VERSION, "report": merged.to_json()})
    try:
        os.makedirs(path.parent, mode=0o700, exist_ok=True)
        believed = _is_ours(_write(path, document.encode()))
    except OSError as error:
        warnings.warn(
            f"{path.parent}: cannot save the probe's verdicts: {error.strerror}", stacklevel=3
        )
        return
    for other in former:
        with suppress(OSError):
            os.unlink(other)
    if not believed:
        warnings.warn(
            f"{path.parent}: the probe's saved verdicts are ignored, because other users can write "
            f"to this folder. To fix this: chmod go-w {shell_path(path.parent)}",
            stacklevel=3,
        )


def _kept(path: Path, identity: Mapping[str, Any]) -> tuple[tuple[Path, ...], ProbeReport | None]:
    """Return the files under this beginning of a path, and their joint report for this very
    identity.
    """
    for tries_left in reversed(range(_TRIES)):
        files = _files(path)
        known: ProbeReport | None = None
        gone = False
        for file in files:
            try:
                told = _report(file, identity)
            except FileNotFoundError:
                gone = True  # another process has put a file in its place
                continue
            if told is not None:
                known = told if known is None else known.renewed_by(told)
        if not gone or not tries_left:
            break
    return files, known


@contextmanager
def only_one(identity: Mapping[str, Any]) -> Iterator[bool]:
    """Give True to one process at a time for these devices, False to others; True where the folder
    has no locks.

    For what should not be done by all ranks of a job at once, and harms nobody when it is.
    """
    path = location(identity) if identity else None
    try:
        descriptor = (
            -1
            if path is None
            else os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        )
    except OSError:
        descriptor = -1
    try:
        first = True
        if descriptor >= 0:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                first = False
            except OSError:
                first = True
        yield first
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _files(path: Path) -> tuple[Path, ...]:
    """Return the files under this beginning of a path, the oldest first."""
    found = []
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.startswith(path.name) and entry.name.endswith(".json"):
                with suppress(OSError):
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path))
    return tuple(Path(name) for _, name in sorted(found))


def _report(path: Path, identity: Mapping[str, Any]) -> ProbeReport | None:
    """Return the report of one file for this identity, or None. Raises FileNotFoundError when it is
    gone.
    """
    try:
        if not _is_ours(path):
            return None
        document = json.loads(read_file(path))
        report = (
            ProbeReport.from_json(document["report"]) if document["version"] == _VERSION else None
        )
    except FileNotFoundError:
        raise
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
    ):
        return None
    same = report is not None and _plain(report.identity) == _plain(identity)
    return report if same else None


def _write(path: Path, data: bytes) -> Path:
    """Write a new file under this beginning of a path, whole or not at all, and return its path."""
    written = path.with_name(f"{path.name}-{secrets.token_hex(8)}.json")
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".peer-copies-")  # mode 0600
    try:
        try:
            write_all(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(name, written)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    return written


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


def _plain(identity: Mapping[str, Any]) -> str:
    return json.dumps(identity, sort_keys=True)
