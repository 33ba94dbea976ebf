"""The state of a scrub: what was looked at and read when, and what came of it, in a file of SQLite.

SQLite makes it whole after a kill, and keeps no more than a few pages of it in memory.
"""

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from time import monotonic, time
from typing import Any, NamedTuple

from ckptfix.errors import OperationError, UsageError

_APPLICATION, _VERSION = 0x636B7066, 1  # "ckpf"
_SECONDS = 1.0
"""Time after which results are written: a kill loses what came in it, and 100,000 results are not
as many writes.
"""

_TABLES = """
CREATE TABLE checkpoints (
    place TEXT PRIMARY KEY, scope TEXT NOT NULL, seen REAL NOT NULL, looked REAL NOT NULL, fingerprint TEXT NOT NULL,
    verdict TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE files (
    place TEXT NOT NULL, name TEXT NOT NULL, fingerprint TEXT NOT NULL, read REAL NOT NULL, problem TEXT NOT NULL,
    PRIMARY KEY (place, name)
) WITHOUT ROWID;
CREATE TABLE rounds (
    scope TEXT NOT NULL, subset TEXT NOT NULL, begun REAL NOT NULL, ended REAL, PRIMARY KEY (scope, subset)
) WITHOUT ROWID;
"""

_LOOK = "place, seen, looked, fingerprint, verdict"


class Look(NamedTuple):
    """The last look at a checkpoint. ``fingerprint``: of its files at that time; ``seen``: when it
    was last listed.
    """

    place: str
    seen: float
    looked: float
    fingerprint: str
    verdict: Mapping[str, Any]


class Reading(NamedTuple):
    """The last reading of a file. ``fingerprint``: of the file and of its digest; ``problem``: ""
    where it matched.
    """

    fingerprint: str
    read: float
    problem: str


def default_state(shard: str) -> Path:
    """Return where the state is without ``--state``: each share of a job array has a file of its
    own.
    """
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(
        os.path.expanduser("~"), ".local", "state"
    )
    return Path(home, "ckptfix", f"scrub{f'-{shard}'.replace('/', '-of-') if shard else ''}.sqlite")


class State:
    """The state in one file. Any thread may use it."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it.

        Raises UsageError when it is another file, OperationError when it cannot be used now.
        """
        self._path = path
        self._lock = Lock()
        self._waiting: list[tuple[str, tuple[object, ...]]] = []
        self._written = monotonic()
        self._begun = 0.0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--state {path}: cannot create its folder: {error.strerror}; name another file"
            ) from None
        with self._used():
            self._file = sqlite3.connect(
                path, timeout=60, isolation_level=None, check_same_thread=False
            )
        try:
            with self._used():
                # Two that begin at once do not both make the tables.
                self._file.execute("BEGIN IMMEDIATE")
                self._make()
                self._file.execute("COMMIT")
        except BaseException:
            self._file.close()
            raise

    def _make(self) -> None:
        """Make the tables of a new file. Raises UsageError for a file of another kind or
        version.
        """
        ((application,),) = self._file.execute("PRAGMA application_id")
        ((version,),) = self._file.execute("PRAGMA user_version")
        if (application, version) == (_APPLICATION, _VERSION):
            return
        if application or self._file.execute("SELECT 1 FROM sqlite_master").fetchone():
            kind = (
                f"state version {version}, expected {_VERSION}"
                if application == _APPLICATION
                else "a database of another program"
            )
            raise UsageError(
                f"--state {self._path}: not a scrub state of this ckptfix ({kind}); name another "
                "file"
            )
        for one in _TABLES.strip().split(";\n"):
            self._file.execute(one)
        self._file.execute(f"PRAGMA application_id = {_APPLICATION}")
        self._file.execute(f"PRAGMA user_version = {_VERSION}")

    @contextmanager
    def _used(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:  # locked, a full disk, no permission
            raise OperationError(
                f"--state {self._path} cannot be used: {error}; next: free disk space, wait for "
                "the other scrub, or name another file"
            ) from None
        except sqlite3.DatabaseError as error:
            raise UsageError(
                f"--state {self._path} cannot be used: {error}; name another file"
            ) from None

    def close(self) -> None:
        """Write what waits, and close the file. Raises OperationError when it cannot be written."""
        with self._lock:
            try:
                self._write()
            finally:
                self._file.close()

    def last(self, place: str) -> Look | None:
        """Return the last look at a checkpoint."""
        found = self._rows(f"SELECT {_LOOK} FROM checkpoints WHERE place = ?", place)
        return next((_look(row) for row in found), None)

    def looks(self, scope: str) -> Iterator[Look]:
        """Yield all looks, those in one folder together."""
        folder = "rtrim(place, replace(place, '/', ''))"
        with self._lock, self._used():
            self._write()
            rows = self._file.execute(
                f"SELECT {_LOOK} FROM checkpoints WHERE scope = ? ORDER BY {folder}, place",
                (scope,),
            )
        yield from map(_look, rows)

    def readings(self, place: str) -> dict[str, Reading]:
        """Return the last readings of the files of a checkpoint, by name."""
        found = self._rows(
            "SELECT name, fingerprint, read, problem FROM files WHERE place = ?", place
        )
        return {name: Reading(*rest) for name, *rest in found}

    def keep(
        self, scope: str, look: Look, readings: Mapping[str, Reading], gone: Sequence[str] = ()
    ) -> None:
        """Keep a look at a checkpoint, and what was read of it. ``gone``: names that it has no
        longer.
        """
        verdict = json.dumps(look.verdict)
        with self._lock:
            self._waiting.append(
                (
                    "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)",
                    # not before the round, where the clock was set back: ``end`` would forget it
                    (
                        look.place,
                        scope,
                        max(look.seen, self._begun),
                        look.looked,
                        look.fingerprint,
                        verdict,
                    ),
                )
            )
            for name in gone:
                self._waiting.append(
                    ("DELETE FROM files WHERE place = ? AND name = ?", (look.place, name))
                )
            for name, one in readings.items():
                self._waiting.append(
                    (
                        "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)",
                        (look.place, name, *one),
                    )
                )
            if monotonic() - self._written >= _SECONDS:
                self._write()

    def begin(self, scope: str, subsets: Sequence[str]) -> tuple[str, float]:
        """Return the subset to read now, and when its round began: one that was not ended goes on.

        Otherwise the subset begins that was read longest ago. Times to come are those of a clock
        that was wrong: such a round begins anew, and such a subset would be read no more.
        """
        now = time()
        rows = self._rows("SELECT subset, begun, ended FROM rounds WHERE scope = ?", scope)
        rounds = {
            subset: (begun, ended)
            for subset, begun, ended in rows
            if subset in subsets and max(begun, ended or 0.0) <= now
        }
        open_ones = [subset for subset, (_, ended) in rounds.items() if ended is None]
        if open_ones:
            self._begun = rounds[open_ones[0]][0]
            return open_ones[0], self._begun
        subset = min(subsets, key=lambda one: rounds.get(one, (0.0, 0.0))[1])
        self._begun = now
        with self._lock:
            self._waiting.append(
                ("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, NULL)", (scope, subset, now))
            )
            self._write()
        return subset, now

    def end(self, scope: str, subset: str, since: float) -> int:
        """Note that a round has ended. Forget the checkpoints not seen since a time, and return how
        many these are.
        """
        gone = "FROM checkpoints WHERE scope = ? AND seen < ?"
        with self._lock, self._used():
            self._write()
            ((count,),) = self._file.execute(f"SELECT count(*) {gone}", (scope, since))
            self._waiting += [
                (f"DELETE FROM files WHERE place IN (SELECT place {gone})", (scope, since)),
                (f"DELETE {gone}", (scope, since)),
                (
                    "UPDATE rounds SET ended = ? WHERE scope = ? AND subset = ?",
                    (time(), scope, subset),
                ),
            ]
            self._write()
        return int(count)

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._lock, self._used():
            return self._file.execute(query, values).fetchall()

    def _write(self) -> None:
        """Write all that waits, or nothing of it. The lock is held."""
        if self._waiting:
            with self._used():
                self._file.execute("BEGIN IMMEDIATE")
                try:
                    for one, values in self._waiting:
                        self._file.execute(one, values)
                    self._file.execute("COMMIT")
                except BaseException:
                    if self._file.in_transaction:
                        self._file.execute("ROLLBACK")
                    raise
            self._waiting.clear()
        self._written = monotonic()


def _look(row: Sequence[Any]) -> Look:
    place, seen, looked, fingerprint, verdict = row
    return Look(place, seen, looked, fingerprint, json.loads(verdict))
