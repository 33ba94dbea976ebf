"""``python struck_rank.py RANK UNITS HOW STORE ARGUMENTS``: run ckptfix, and end this rank after so
many units.

HOW: ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``interrupt`` (Ctrl-C), ``stop-in-repair``, ``error``
(of the disk), ``error-in-files``, ``error-in-uploads``, ``change-in-the-end`` (UNITS: the look at
the source that finds it), ``older`` (another version), ``none``. STORE: a folder that is the store
of the team, so that its processes start without torch; ``torch`` for torch's.
"""

import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ckptfix.cli import main, repair, teamwork
from ckptfix.conversion.sources import Watch
from ckptfix.conversion.streaming import NewFile
from ckptfix.diagnosis.contents import Contents
from ckptfix.errors import ChangedError
from ckptfix.storage import joined_team, uploads
from ckptfix.storage.partial_results import PartialResults
from ckptfix.training import rendezvous


class FolderStore:
    """A store whose keys are files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        new = self.folder / f"{os.getpid()}-{os.urandom(4).hex()}"
        new.write_bytes(value)
        new.rename(self._path(key))

    def get(self, key: str) -> bytes:
        """Return the value of a key."""
        return self._path(key).read_bytes()

    def add(self, key: str, amount: int) -> int:
        """Add to a number: it is the length of a file."""
        with open(self._path(key), "ab") as file:
            file.write(b"+" * amount)
            return file.tell()

    def check(self, keys: list[str]) -> bool:
        """Return whether these keys are there."""
        return all(self._path(key).exists() for key in keys)

    def _path(self, key: str) -> Path:
        return self.folder / key.replace("/", "-")


rank, units, how, store, *arguments = sys.argv[1:]
add = PartialResults.add
done = 0
one_by_one = threading.Lock()


def add_and_end(self: PartialResults, *given: Any, **options: Any) -> None:
    """Add a result, or end."""
    global done
    with one_by_one:  # a result that another thread is about to add would be lost, too
        if os.environ["RANK"] == rank:
            if done == int(units):
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if how == "interrupt":
                    raise KeyboardInterrupt
                if how == "error":
                    raise OSError(errno.EIO, "Input/output error", "model.safetensors")
            done += 1
        time.sleep(0.02)  # both ranks are at work when one of them ends
        add(self, *given, **options)


if how == "error":
    joined_team._LINGERS = (
        3600.0  # the leader ends because the other rank says that it ends, not after some seconds
    )
if how == "error-in-files":
    begin = NewFile.begin

    def begin_or_fail(self: NewFile, *given: Any) -> int:
        """Begin a file, or fail."""
        if os.environ["RANK"] == rank:
            raise OSError(errno.EIO, "Input/output error", "model.safetensors")
        return begin(self, *given)

    NewFile.begin = begin_or_fail  # type: ignore[assignment,method-assign]
elif how == "change-in-the-end" and os.environ["RANK"] == rank:
    looks = 0

    def see_a_change(*given: Any) -> None:
        """See in the last look that a file has changed; the leader has looked by then."""
        global looks
        looks += 1
        if looks == int(units):
            time.sleep(1)
            raise ChangedError("model.safetensors changed while it was read")

    Contents.check_unchanged = see_a_change  # type: ignore[assignment,method-assign]
    Watch.check = see_a_change  # type: ignore[assignment,method-assign]
elif how == "older" and os.environ["RANK"] == rank:
    setattr(teamwork, "own_version", lambda: "0.4.9")  # noqa: B010
elif how == "error-in-uploads":

    def fail(*given: Any, **options: Any) -> None:
        """Fail to upload."""
        raise OSError(errno.EIO, "Input/output error", "model.safetensors")

    if os.environ["RANK"] == rank:
        uploads.send = fail  # type: ignore[assignment]
elif how == "stop-in-repair":

    def stop(*given: Any, **options: Any) -> None:
        """Stop, before a plan is made."""
        os.kill(os.getpid(), signal.SIGSTOP)

    setattr(repair, "plan_repair", stop)  # noqa: B010
elif how != "none":
    PartialResults.add = add_and_end  # type: ignore[method-assign]
if store != "torch":
    rendezvous.join = lambda place, timeout: FolderStore(Path(store))
main(arguments)
