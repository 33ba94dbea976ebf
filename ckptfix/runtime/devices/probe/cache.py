"""The last report for each set of devices, in the user's cache folder. Free of torch.

It is believed only when it is the user's own and nobody else could have written it, and when hardware, driver, boot,
torch and allocator are those of now. Anything else is as good as no file: the worst is a probe more.
"""

import json
import os
import stat
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from ckptfix.runtime.devices.probe.report import ProbeReport
from ckptfix.storage.atomic import read_file, write_all

_VERSION = 1
"""Of the file's content and of what the plans exercise: raise it when a plan becomes stricter."""

_LARGEST = 1 << 20
"""Bytes. Ours have a few thousand."""


def location(identity: Mapping[str, Any]) -> Path | None:
    """Return where the report for these devices is kept; None without a home folder.

    A new boot, driver or torch takes the same file, so that old ones do not pile up.
    """
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # which the standard says to ignore
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            return None
        folder = os.path.join(home, ".cache")
    devices = json.dumps(
        [identity.get("type"), identity.get("devices"), identity.get("host")], sort_keys=True
    )
    return Path(folder) / "ckptfix" / f"peer-copies-{sha256(devices.encode()).hexdigest()[:16]}.json"


def load(identity: Mapping[str, Any]) -> ProbeReport | None:
    """Return the report that holds for exactly this identity, or None."""
    path = location(identity) if identity else None
    if path is None or not _is_ours(path):
        return None
    try:
        document = json.loads(read_file(path))
        report = ProbeReport.from_json(document["report"]) if document["version"] == _VERSION else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    same = report is not None and _plain(report.identity) == _plain(identity)
    return report if same else None


def store(report: ProbeReport) -> None:
    """Keep a report: whole or not at all, and readable for the user alone. One without an identity is not kept.

    A folder that cannot be written to gives a UserWarning; nothing else depends on it.
    """
    path = location(report.identity) if report.identity and report.pairs else None
    if path is None:
        return
    document = json.dumps({"version": _VERSION, "report": report.to_json()})
    try:
        os.makedirs(path.parent, mode=0o700, exist_ok=True)
        _replace(path, document.encode())
    except OSError as error:
        warnings.warn(f"{path}: the verdicts cannot be kept there: {error.strerror}", stacklevel=3)


def _replace(path: Path, data: bytes) -> None:
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".peer-copies-")  # mode 0600
    try:
        try:
            write_all(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _is_ours(path: Path) -> bool:
    """Return whether nobody but this user can have written the file, nor put it there."""
    try:
        file, folder = os.lstat(path), os.stat(path.parent)
    except OSError:
        return False
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
