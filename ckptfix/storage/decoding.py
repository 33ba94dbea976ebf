"""Take nothing on trust that was read from a journal: a checkpoint from elsewhere may bring one along."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from ckptfix.errors import JournalError, OperationError
from ckptfix.storage.fingerprints import Fingerprint
from ckptfix.storage.metadata import Metadata
from ckptfix.storage.paths import check_path, forget

LARGEST = (1 << 63) - 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


@contextmanager
def journal_errors(file: Path) -> Iterator[None]:
    """Turn whatever reading and decoding ``file`` raises into a JournalError: ROOT/.ckptfix/NUMBER.STATE/NAME."""
    try:
        yield
    except JournalError:
        raise
    except (
        OperationError,
        OSError,
        ValueError,
        ArithmeticError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        if isinstance(error, PermissionError):  # known to the reader by this cause
            raise JournalError(
                f"{file}: cannot be read: {error.strerror}; only the user who ran ckptfix here can go on with it"
            ) from error
        raise JournalError(f"{file}: cannot be read: {error}; {_advice(file)}") from error
    except RecursionError as error:
        raise JournalError(f"{file}: cannot be read: nested too deeply; {_advice(file)}") from error


def damaged(file: Path, against: str) -> JournalError:
    """Return the error for a file of a journal whose bytes are not those that were written."""
    return JournalError(f"{file}: damaged: its bytes do not match {against}; {_advice(file)}")


def _advice(file: Path) -> str:
    return forget(file.parent.parent.parent)


def whole(value: object, most: int = LARGEST, least: int = 0) -> int:
    """Return a whole number within bounds. Raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is not a whole number from {least} to {most}")
    return value


def text(value: object) -> str:
    """Return a string. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not a string")
    return value


def path_of(value: object) -> PurePosixPath:
    """Return a path that stays inside the folder. Raises ValueError, OperationError."""
    path = PurePosixPath(text(value))
    check_path(path)
    return path


def fingerprint_of(value: Any, *kinds: str) -> Fingerprint | None:
    """Return a fingerprint of one of these kinds, None for null. Raises ValueError, TypeError."""
    if value is None:
        return None
    found = Fingerprint(**value)
    if found.kind not in kinds:
        raise ValueError(f"{found.kind!r:.40} is none of {', '.join(kinds)}")
    whole(found.size)
    whole(found.mtime_ns, least=-LARGEST)
    if found.kind != "folder":
        sha256_of(found.sha256)
    return found


def metadata_of(value: Any) -> Metadata | None:
    """Return metadata, None for null. Raises ValueError, TypeError."""
    if value is None:
        return None
    found = Metadata(**value)
    whole(found.mode, 0o1777)
    owner_of(found.uid)
    owner_of(found.gid)
    whole(found.mtime_ns, least=-LARGEST)
    return found


def owner_of(value: object) -> int:
    """Return the number of a user or group, -1 for whoever it is. Raises ValueError."""
    return whole(value, (1 << 32) - 2, -1)


def sha256_of(value: object) -> str:
    """Return a sha256 in hexadecimal. Raises ValueError."""
    if not _SHA256.fullmatch(text(value)):
        raise ValueError(f"{value!r:.40} is not a sha256")
    return text(value)
