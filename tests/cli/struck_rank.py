"""``python struck_rank.py RANK UNITS HOW STORE ARGUMENTS``: run ckptfix, and end this rank after so
many units.

HOW: ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``interrupt`` (Ctrl-C), ``stop-in-repair``, ``error``
(of the disk), ``alone`` (an error of the disk while the other rank reads on), ``late`` (the other
reads on for some seconds), ``alike`` (the other meets the same error that much later), ``fault``
(of ckptfix), ``error-in-files``, ``late-in-files``, ``error-in-uploads``, ``change-in-the-end``
(UNITS: the look at the source that finds it), ``older`` (another version), ``none``. STORE: a
folder through which the ranks exchange bytes, so that they start without torch; ``torch`` for Gloo.
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
from ckptfix.errors import ChangedError, TeamError
from ckptfix.storage import launched_ranks, uploads
from ckptfix.storage.results import PartialResults
from ckptfix.training import rendezvous


class FolderGroup:
    """Processes that exchange bytes in files, as ``rendezvous`` does over Gloo."""

    def __init__(self, folder: Path, place: rendezvous.Launched) -> None:
        self.folder, self.rank, self.total = folder, place.rank, place.total
        self.timeout, self.step = float(os.environ.get("CKPTFIX_TEAM_TIMEOUT", 60)), 0
        self._write(f"pid-{self.rank}", str(os.getpid()).encode())

    def exchange(
        self, kind: int, data: bytes, patience: float | None = None
    ) -> list[tuple[int, bytes]] | None:
        """Return what each process gives."""
        self.step += 1
        self._write(f"{self.step}-{self.rank}", kind.to_bytes(8, "big") + data)
        end = time.monotonic() + (self.timeout if patience is None else patience)
        answers = []
        for rank in range(self.total):
            while not (path := self.folder / f"{self.step}-{rank}").exists():
                if self._has_ended(rank) and not path.exists():
                    raise TeamError("another process stopped before it was done")
                if time.monotonic() > end and patience is not None:
                    return None
                if time.monotonic() > end:
                    raise TeamError(f"another process did not respond for {self.timeout:g} s")
                time.sleep(0.002)
            answer = path.read_bytes()
            answers.append((int.from_bytes(answer[:8], "big"), answer[8:]))
        return answers

    def _has_ended(self, rank: int) -> bool:
        try:
            pid = (self.folder / f"pid-{rank}").read_text()
        except FileNotFoundError:  # it has not started
            return False
        try:
            return "(zombie)" in Path("/proc", pid, "status").read_text()
        except OSError:
            return True

    def _write(self, name: str, data: bytes) -> None:
        new = self.folder / f"new-{name}"
        new.write_bytes(data)
        new.rename(self.folder / name)


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
                    # The test lets this process go on.
                    Path(os.environ.get("STOPPED", os.devnull)).write_text(str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGSTOP)
                if how == "interrupt":
                    raise KeyboardInterrupt
                if how == "fault":
                    raise ValueError("a fault of ckptfix")
                if how in ("error", "alone", "late", "alike"):
                    raise OSError(errno.EIO, "Input/output error", "model.safetensors")
            done += 1
        elif how in ("late", "alike") and not done:
            done += 1
            time.sleep(4)
            if how == "alike":
                raise OSError(errno.EIO, "Input/output error", "model.safetensors")
        # Both ranks are at work when one of them ends.
        time.sleep(20 if how == "alone" and os.environ["RANK"] != rank else 0.02)
        add(self, *given, **options)


if how in (
    "alone",
    "late",
    "alike",
    "late-in-files",
):  # the other rank reads on when this one has failed
    setattr(launched_ranks, "_PATIENCE", 0.1)  # noqa: B010
if how in ("error-in-files", "late-in-files"):
    begin = NewFile.begin

    def begin_or_fail(self: NewFile, *given: Any) -> int:
        """Begin a file, or fail."""
        if os.environ["RANK"] == rank:
            raise OSError(errno.EIO, "Input/output error", "model.safetensors")
        if how == "late-in-files":
            time.sleep(4)
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
    setattr(  # noqa: B010
        rendezvous, "join", lambda place, remedy: FolderGroup(Path(store), place).exchange
    )
main(arguments)
