"""The journal of a checkpoint in an object store: its lock, and a record of each transaction.

A store cannot rename. So the state of a transaction is an object that changes by a conditional
write, and all other objects of transaction 7 lie below ``.ckptfix/0007.objects/``::

    state.json    "staging": nothing was touched; "commit": names are being replaced; "done": all are
    plan          a line with the sha256 of what follows, a line of JSON, and the literal bytes that it refers to
    new/3         the new object of change 3, until it is copied over its name
    kept/2        the copy of what edit 2 replaces or deletes

A run that was cut short is rolled back while it was staging, and finished from "commit" on.
"""

import getpass
import hashlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import PurePosixPath
from typing import Annotated, Any, NamedTuple, TypeVar

from msgspec import Meta, Struct, convert, field, to_builtins
from msgspec.structs import replace

from ckptfix.errors import ChangedError, CkptfixError, JournalError, LockedError, OperationError
from ckptfix.storage.folder_journal import path_of, text, time_of, whole
from ckptfix.storage.object_contents import Content, Source
from ckptfix.storage.paths import JOURNAL, check_path, shell_path
from ckptfix.storage.recipes import size_of
from ckptfix.storage.stores import ABSENT, Expected, ObjectInfo, Store, Whole
from ckptfix.wording import moment

LOCK = f"{JOURNAL}/lock"
"""Key of the lock."""

_FOLDER = re.compile(rf"{re.escape(JOURNAL)}/([0-9]{{4}}|[1-9][0-9]{{4,}})\.objects/(.+)")
_VERSION = 1
_MOST = 1 << 30
"""Largest plan or state that is read, in bytes."""


class Stage(Enum):
    """State of a transaction in ``state.json``: ``journal.State`` in other words."""

    STAGING = "staging"
    COMMIT = "commit"
    DONE = "done"


class Rank(Enum):
    """Order in which names change: indexes follow the files, the manifest everything."""

    DATA = 0
    INDEX = 1
    MANIFEST = 3


DELETIONS = 2
"""The turn of what is deleted."""


class Change(Struct, frozen=True, kw_only=True, array_like=True):
    """Change of a name. ``old``: its object, or None. ``size``: of the new one; None: none."""

    path: PurePosixPath
    old: ObjectInfo | None
    size: Whole | None
    rank: Rank = Rank.DATA

    @property
    def key(self) -> str:
        """The key of the name."""
        return str(self.path)

    @property
    def expected(self) -> str | Expected:
        """The state in which the name must be to be changed."""
        return ABSENT if self.old is None else self.old.etag

    @property
    def turn(self) -> int:
        """The turn of this change: what is deleted goes when no index lists it any more."""
        return DELETIONS if self.size is None else self.rank.value


class ObjectPlan(Struct, frozen=True, kw_only=True):
    """The plan of a transaction, which no later step changes.

    ``before``: what lay at each changed name, in ranges of the objects after it and of kept copies.
    ``sources``: the unchanged objects that it reads. ``undoes``: the number of the transaction that
    this one undoes, None for a repair.
    """

    id: str
    target: str
    summary: Any
    created: float
    undoes: Whole | None = None
    changes: tuple[Change, ...]
    before: Mapping[PurePosixPath, Content | None] = field(default_factory=dict)
    sources: Mapping[str, ObjectInfo] = field(default_factory=dict)

    @property
    def watched(self) -> tuple[PurePosixPath, ...]:
        """Every name whose change makes an undo refuse."""
        return (*(change.path for change in self.changes), *map(PurePosixPath, self.sources))

    def mark(self, index: int) -> str:
        """Return the mark that the object of a change carries, so that the next run knows it."""
        return f"{self.id}-{index}"


class ObjectState(Struct, frozen=True, kw_only=True, rename={"stage": "state"}):
    """The state of a transaction. ``plan``: the sha256 of its plan; ``new`` and ``kept``: its
    objects by number.

    ``after``: the objects at the changed names and at ``sources`` once it is done, None for none.
    ``undoes``: as in ``ObjectPlan``.
    """

    stage: Stage
    plan: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""
    new: Mapping[Whole, ObjectInfo] = field(default_factory=dict)
    kept: Mapping[Whole, ObjectInfo] = field(default_factory=dict)
    after: Mapping[str, ObjectInfo | None] = field(default_factory=dict)
    undoes: Whole | None = None


class Found(NamedTuple):
    """A transaction in a listing: its number, and its objects by their names in its folder."""

    number: int
    objects: dict[str, ObjectInfo]

    @property
    def has_begun(self) -> bool:
        """False without a state, as after an answer that came late to a run that was killed."""
        return "state.json" in self.objects


def is_replacing(store: Store, listed: Mapping[str, ObjectInfo]) -> bool:
    """Return whether the names of a checkpoint are being replaced, or a run was killed then; they
    may be a mixture.

    A state that cannot be read may be that one. Raises StoreError, ChangedError.
    """
    try:
        states = [read_state(store, one) for one in found_transactions(listed) if one.has_begun]
    except JournalError:
        return True
    return any(state.stage is Stage.COMMIT for state in states)


def folder(number: int) -> str:
    """Return the prefix of the objects of a transaction."""
    return f"{JOURNAL}/{number:04}.objects"


def found_transactions(listed: Mapping[str, ObjectInfo]) -> list[Found]:
    """Return the transactions in a listing of a store, oldest first."""
    found: dict[int, Found] = {}
    for key, info in listed.items():
        if match := _FOLDER.fullmatch(key):
            number = int(match[1])
            found.setdefault(number, Found(number, {})).objects[match[2]] = info
    return [found[number] for number in sorted(found)]


def forget_objects(store: Store, number: int) -> str:
    """Return the advice that always works: delete the objects of the transaction."""
    return f"to keep the objects as they are now: {store.removal(folder(number))}"


def write_state(
    store: Store, number: int, state: ObjectState, expected: str | Expected
) -> ObjectInfo:
    """Write the state over ``expected``. Raises ChangedError when a run went on with it."""
    body = {
        "version": _VERSION,
        **to_builtins(state, str_keys=True),
        # Two runs that write the same state must not pass for each other.
        "token": secrets.token_hex(8),
    }
    return store.put(f"{folder(number)}/state.json", _sealed(body), expected=expected)


def read_state(store: Store, found: Found) -> ObjectState:
    """Read the state of a transaction. Raises JournalError when it is damaged."""
    key = f"{folder(found.number)}/state.json"
    with _journal_errors(store, key, found.number):
        body, _ = _opened(store, key, found.objects["state.json"])
        state = _typed(body, ObjectState)
        for name in state.after:
            _ensure_key(name, found.number)
        return state


def write_plan(store: Store, number: int, plan: ObjectPlan) -> str:
    """Write the plan of a new transaction, and return its sha256."""
    literals = bytearray()
    body = {
        "version": _VERSION,
        **to_builtins(replace(plan, before={}), enc_hook=str),
        "before": [
            [str(path), _encode(content, literals)] for path, content in plan.before.items()
        ],
    }
    data = _sealed(body, bytes(literals))
    store.put(f"{folder(number)}/plan", data, expected=ABSENT)
    return hashlib.sha256(data).hexdigest()


def read_plan(store: Store, found: Found, state: ObjectState) -> ObjectPlan:
    """Read the plan of this state. Raises JournalError when it is damaged."""
    key = f"{folder(found.number)}/plan"
    with _journal_errors(store, key, found.number):
        if "plan" not in found.objects:
            raise ValueError("it is missing")
        body, literals = _opened(store, key, found.objects["plan"], state.plan)
        contents = _decode_before(body["before"], literals, found.number)
        plan = replace(_typed({**body, "before": {}}, ObjectPlan), before=contents)
        for name in plan.sources:
            _ensure_key(name, found.number)
        time_of(plan.created)
        if plan.target:
            path_of(plan.target)
        paths = [change.path for change in plan.changes]
        if len(set(paths)) != len(paths):
            raise ValueError("it changes the same name twice")
        for change in plan.changes:
            before = plan.before.get(change.path)
            if change.old is None or before is None or size_of(before) == change.old.size:
                continue
            raise ValueError(
                f"it restores {size_of(before)} bytes of {change.path}, not {change.old.size}"
            )
        if plan.before and set(plan.before) != set(paths):
            raise ValueError("it cannot restore every name")
        return plan


def _decode_before(
    before: list[Any], literals: bytes, number: int
) -> dict[PurePosixPath, Content | None]:
    position = 0

    def piece_of(piece: Any) -> bytes | Source:
        nonlocal position
        if isinstance(piece, list):
            key, offset, length = piece
            _ensure_key(text(key), number)
            return Source(key, whole(offset), whole(length))
        start, position = position, position + whole(piece)
        if position > len(literals):
            raise ValueError(f"it needs {position} literal bytes, but there are {len(literals)}")
        return literals[start:position]

    return {
        path_of(path): None if content is None else tuple(map(piece_of, content))
        for path, content in before
    }


def _encode(content: Content | None, literals: bytearray) -> list[Any] | None:
    if content is None:
        return None
    encoded: list[Any] = []
    for piece in content:
        if isinstance(piece, bytes):
            literals += piece
            encoded.append(len(piece))
        else:
            encoded.append(list(piece))
    return encoded


_Record = TypeVar("_Record", ObjectPlan, ObjectState)


def _typed(body: Mapping[str, object], kind: type[_Record]) -> _Record:
    """Return a record with all its fields. Raises ValueError, OperationError."""
    if missing := [name for name in kind.__struct_encode_fields__ if name not in body]:
        raise ValueError(f"it has no field {missing[0]!r}")
    return convert(body, kind, str_keys=True, dec_hook=lambda _, value: path_of(value))


def _ensure_key(key: str, number: int) -> None:
    """Raise ValueError or OperationError for an object that a transaction may not read."""
    if not re.fullmatch(rf"{re.escape(folder(number))}/kept/[0-9]+", key):
        check_path(PurePosixPath(key))


def _sealed(body: Mapping[str, object], literals: bytes = b"") -> bytes:
    data = json.dumps(body, separators=(",", ":")).encode() + b"\n" + literals
    return hashlib.sha256(data).hexdigest().encode() + b"\n" + data


def _opened(
    store: Store, key: str, info: ObjectInfo, sha256: str = ""
) -> tuple[dict[str, Any], bytes]:
    if info.size > _MOST:
        raise ValueError(f"it has {info.size} bytes (at most {_MOST} are read)")
    data = store.read(key, 0, info.size, etag=info.etag)
    digest, _, content = data.partition(b"\n")
    if hashlib.sha256(content).hexdigest().encode() != digest:
        raise ValueError("its bytes do not match its own sha256")
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError("it is not the plan of this transaction")
    line, _, literals = content.partition(b"\n")
    body = json.loads(line)
    if body["version"] != _VERSION:
        raise ValueError(f"another version of ckptfix wrote it (format {body['version']!r:.20})")
    return body, literals


@contextmanager
def _journal_errors(store: Store, key: str, number: int) -> Iterator[None]:
    try:
        yield
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise JournalError(
            f"{store.name(key)}: cannot be read: {error}; {forget_objects(store, number)}"
        ) from error
    except OperationError as error:
        if isinstance(error, JournalError) or type(error) is not OperationError:
            raise
        raise JournalError(
            f"{store.name(key)}: cannot be read: {error}; {forget_objects(store, number)}"
        ) from error


class StoreLock:
    """The lock of a checkpoint in a store, as long as no other run takes it over."""

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        self._store = store
        self._etag = info.etag

    def check(self) -> None:
        """Raise LockedError when another run took the lock over."""
        now = self._store.stat(LOCK)
        if now is None or now.etag != self._etag:
            raise LockedError(
                f"{self._store.name(LOCK)}: another run took over this lock, so this run stopped; "
                "next: wait until the other run has ended"
            )

    def release(self) -> None:
        """Delete the lock; one that another run took over stays."""
        self._store.delete(LOCK, expected=self._etag)


@contextmanager
def store_lock(store: Store, verb: str, *, break_lock: bool = False) -> Iterator[StoreLock]:
    """Hold the lock of a checkpoint in a store; readers do not need it.

    A run that is killed leaves its lock, and only the user can know that it will not go on:
    ``break_lock`` takes over whatever lock is there. Raises LockedError with its owner, its age and
    the command.
    """
    data = json.dumps(
        {
            "token": secrets.token_hex(16),
            "user": _user(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "verb": verb,
            "since": time.time(),
        }
    ).encode()
    try:
        held = store.stat(LOCK) if break_lock else None
        info = store.put(LOCK, data, expected=ABSENT if held is None else held.etag)
    except ChangedError as error:
        raise _locked(store, verb) from error
    except KeyboardInterrupt:
        # The store may have the lock already, and every later run would wait for its owner.
        with suppress(CkptfixError):
            found = store.stat(LOCK)
            if found is not None and store.read(LOCK, 0, found.size) == data:
                store.delete(LOCK, expected=found.etag)
        raise
    lock = StoreLock(store, info)
    try:
        yield lock
    finally:
        # Where the store no longer answers, the next run names this lock, its age and the command.
        with suppress(CkptfixError):
            lock.release()


def _locked(store: Store, verb: str) -> LockedError:
    owner = "another run"
    since = ""
    unreadable = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError)
    with suppress(CkptfixError, *unreadable):
        info = store.stat(LOCK)
        size = info.size if info is not None else 0  # released meanwhile
        body = json.loads(store.read(LOCK, 0, min(size, 1 << 16)))
        what = f"ckptfix {body['verb']}"
        owner = f"{what} by {body['user']} on {body['host']} (process {int(body['pid'])})"
        since = f" since {moment(int(float(body['since']) * 1e9))}"
    breaking = "undo" if verb == "undo" else "repair"  # the verbs that have the option
    return LockedError(
        f"{store.name(LOCK)}: {owner} has held this lock{since}; next: wait until it has ended; if "
        f"it was killed and cannot continue: ckptfix {breaking} --break-lock "
        f"{shell_path(store.url)}"
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no name in a container
        return f"user {os.getuid()}"
