"""The Hugging Face hub: reads by ranges at one commit, and writes that become one commit, or none.

Inside ``atomically`` every write is an operation that waits, and the store and those below it see
it. At the end all of them are sent as one commit whose parent is the commit that was read: the hub
refuses it when anybody else committed in between. A write outside is a commit of its own. Endpoint
and token are those of ``huggingface_hub``: ``HF_ENDPOINT``, ``HF_TOKEN``, ``hf auth login``.
"""

import hashlib
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote

from ckptfix.errors import ChangedError, StoreError, UsageError
from ckptfix.storage import staged, stores
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import shell_path
from ckptfix.storage.stores import (
    Abilities,
    Composition,
    Expected,
    ObjectInfo,
    ObjectRange,
    Piece,
    Refused,
    Store,
    Temporary,
    seconds_to_read,
)
from ckptfix.wording import escape

_URL = re.compile(
    r"hf://(?:(models|datasets|spaces)/)?([^/@]+/[^/@]+)(?:@(refs/(?:convert/[^/]+|pr/\d+)|[^/]+))?(?:/(.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PATHS = 500  # of one request


class _New(NamedTuple):
    """New bytes of a path, and the operation that writes them: an addition, or a copy of what
    another path has in the commit that was read.

    ``stamp``: the file that is added, with its size and time before it was hashed.
    """

    info: ObjectInfo
    operation: Any
    stamp: tuple[Path, int, int] | None = None


class _Commit(NamedTuple):
    """The next commit of a repository. ``changes``: the new bytes by path, None for a path that
    goes. ``listed``: the paths below a folder in the commit that was read. ``folder``: for files.
    """

    parent: str
    folder: Path
    changes: dict[str, _New | None]
    listed: dict[str, dict[str, ObjectInfo]]
    lock: threading.RLock


_turns: dict[tuple[str, ...], threading.RLock] = {}
"""One thread at a time makes a commit of a branch; the threads that it starts only add to it."""


class _Failed(Exception):
    """An answer of the hub that is none of success."""

    def __init__(self, response: Any) -> None:
        super().__init__(
            f"{response.status_code} {response.headers.get('x-error-message', '')}".strip()
        )
        self.response = response


class _Overtaken(Temporary):
    """Somebody else committed first: a single write is done again, and a commit of many is not."""


class HubStore(Store):
    """One folder of a repository of the hub, at one of its branches, tags or commits."""

    abilities: ClassVar[Abilities] = Abilities(conditions=True, atomic=True)

    def _opened(self) -> tuple[Any, str]:
        from huggingface_hub import HfApi

        match = _URL.fullmatch(self.url)
        if match is None or match[2].partition("/")[0] in (
            "models",
            "datasets",
            "spaces",
            "buckets",
        ):
            raise UsageError(
                f"{self.name()} names no repository: expected hf://USER/MODEL/PATH, or "
                "hf://datasets/USER/NAME/PATH"
            )
        self._type = (match[1] or "models").removesuffix("s")
        self._repo, self._branch = match[2], match[3] or "main"
        api = HfApi()
        where = (api.endpoint, self._type, self._repo, self._branch)
        self._turn = _turns.setdefault(where, threading.RLock())
        self._open: list[_Commit] = []  # the one that writes add to; stores below share the list
        return api, match[4] or ""

    def removal(self, below: str = "") -> str:
        """Return the command that deletes every object in a folder."""
        words = f"hf repos delete-files {self._repo} {shell_path(f'{self._path(below)}/*')}"
        words += f" --type {self._type}" if self._type != "model" else ""
        return words + (f" --revision {shell_path(self._branch)}" if self._branch != "main" else "")

    # Requests.

    def _ask(self, method: str, address: str, *, seconds: float | None = None, **words: Any) -> Any:
        utils: Any = import_module("huggingface_hub.utils")
        if not address.startswith("http"):
            address = f"{self._files.endpoint}/api/{self._type}s/{self._repo}/{address}"
        headers = utils.build_hf_headers(token=self._files.token) | words.pop("headers", {})
        self.traffic.add()
        response = getattr(utils.get_session(), method)(
            address, headers=headers, timeout=seconds or stores.PATIENCE.answer, **words
        )
        if response.status_code >= 400:
            raise _Failed(response)
        return response

    def _head(self) -> str:
        """Return the commit that the branch is at."""
        return str(self._ask("get", f"revision/{quote(self._branch, safe='')}").json()["sha"])

    def _tree(
        self, path: str, commit: str, *, deep: bool
    ) -> Iterator[tuple[str, ObjectInfo | None]]:
        """Yield the paths below a folder at a commit, with None for a folder in it."""
        below = f"/{quote(path, safe='')}" if path else ""
        address = f"tree/{commit}{below}?recursive={str(deep).lower()}&expand=false"
        while address:
            try:
                page = self._persist(path, partial(self._ask, "get", address), has_condition=True)
            except FileNotFoundError:
                return
            for one in page.json():
                yield one["path"], _info(one) if one["type"] == "file" else None
            address = page.links.get("next", {}).get("url", "")

    def _infos(self, paths: Sequence[str], revision: str) -> dict[str, ObjectInfo]:
        """Return the facts about those of the paths that are files at a revision."""
        found = {}
        for begin in range(0, len(paths), _PATHS):
            words = {"paths": list(paths[begin : begin + _PATHS]), "expand": "false"}
            for one in self._ask(
                "post", f"paths-info/{quote(revision, safe='')}", data=words
            ).json():
                if one["type"] == "file":
                    found[one["path"]] = _info(one)
        return found

    def _list(self, below: str, *, deep: bool) -> Iterator[tuple[str, ObjectInfo | None]]:
        start = len(self._base) + 1 if self._base else 0
        commit = self._current()
        if commit is None:
            head = self._persist(below, self._head)
            for path, info in self._tree(self._path(below.rstrip("/")), head, deep=deep):
                if info is not None:
                    yield path[start:], info
                elif not deep:
                    yield f"{path[start:]}/", None
            return
        folders = set()
        for key, info in self._now(commit).items():
            if not key.startswith(below):
                continue
            name, slash, _ = key[len(below) :].partition("/")
            if deep or not slash:
                yield key, info
            elif name not in folders:
                folders.add(name)
                yield f"{below}{name}/", None

    def _listed(self, commit: _Commit) -> dict[str, ObjectInfo]:
        """Return every path below the prefix in the commit that was read."""
        with commit.lock:
            if self._base not in commit.listed:
                tree = self._tree(self._base, commit.parent, deep=True)
                commit.listed[self._base] = {path: info for path, info in tree if info is not None}
            return commit.listed[self._base]

    def _now(self, commit: _Commit) -> dict[str, ObjectInfo]:
        """Return every object below the prefix, as the next commit has it."""
        before = f"{self._base}/" if self._base else ""
        now = dict(self._listed(commit))
        for path, new in dict(commit.changes).items():
            now.pop(path, None)
            if new is not None and path.startswith(before):
                now[path] = new.info
        return {path[len(before) :]: info for path, info in now.items()}

    def _stat(self, key: str) -> ObjectInfo | None:
        path, commit = self._path(key), self._current()
        if commit is None:
            return self._infos([path], self._branch).get(path)
        if path in commit.changes:
            new = commit.changes[path]
            return None if new is None else new.info
        return (
            self._listed(commit).get(path) if key else self._infos([path], commit.parent).get(path)
        )

    def _read(self, key: str, offset: int, length: int, etag: str) -> bytes:
        path, commit = self._path(key), self._current()
        if commit is None or path not in commit.changes:
            return self._get(
                path, self._branch if commit is None else commit.parent, offset, length, etag
            )
        new = commit.changes[path]
        if new is None:
            raise FileNotFoundError(key)
        if etag and new.info.etag != etag:
            raise Refused
        if not _is_added(new):
            return self._get(new.operation.src_path_in_repo, commit.parent, offset, length, etag)
        with new.operation.as_file() as file:
            file.seek(offset)
            data: bytes = file.read(length)
            return data

    def _get(self, path: str, revision: str, offset: int, length: int, etag: str) -> bytes:
        kind = "" if self._type == "model" else f"{self._type}s/"
        where = f"{kind}{self._repo}/resolve/{quote(revision, safe='')}/{quote(path)}"
        span = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        response = self._ask(
            "get", f"{self._files.endpoint}/{where}", headers=span, seconds=seconds_to_read(length)
        )
        data: bytes = response.content
        self.traffic.add(down=len(data), requests=0)
        if etag and _etag_of(response) != etag:
            # A cache in between may name another ETag, or none: what is there after the read was
            # there during it.
            now = self._infos([path], revision).get(path)
            if now is None or now.etag != etag:
                raise Refused
        return data[:length] if response.status_code == 206 else data[offset : offset + length]

    # Writes: changes of the next commit.

    def _put(self, key: str, data: bytes, expected: str | Expected) -> ObjectInfo:
        with self._changing(key) as commit:
            return self._change(commit, key, self._added(key, data), expected)

    def _upload(
        self, key: str, path: Path, expected: str | Expected, progress: Progress | None
    ) -> ObjectInfo:
        with self._changing(key) as commit:
            info = self._change(commit, key, self._added(key, path), expected)
            if progress:
                progress(info.size)
            return info

    def _compose(self, key: str, made: Composition) -> ObjectInfo:
        with self._changing(key) as commit:
            return self._change(
                commit, key, self._composed(commit, key, made.pieces), made.expected
            )

    def _composed(self, commit: _Commit, key: str, pieces: Sequence[Piece]) -> _New:
        """Return an object of pieces: a complete one as it is, any other in a file of this
        machine.
        """
        from huggingface_hub import CommitOperationCopy

        if len(pieces) == 1 and isinstance(one := pieces[0], ObjectRange):
            path, now = self._path(one.key), self._stat(one.key)
            if (
                now is not None
                and (one.offset, one.length) == (0, now.size)
                and one.etag in ("", now.etag)
            ):
                made = commit.changes.get(path)
                if made is not None and _is_added(made):
                    return self._added(key, made)
                if len(now.etag) == 64:  # a large file: the hub copies it by its sha256
                    source = made.operation.src_path_in_repo if made is not None else path
                    words: dict[str, Any] = {"src_revision": commit.parent}
                    return _New(now, CommitOperationCopy(source, self._path(key), **words))
        file = commit.folder / secrets.token_hex(8)
        with file.open("xb") as out:
            self._bring(pieces, out)
        return self._added(key, file)

    def _delete(self, key: str, expected: str | Expected) -> None:
        with self._changing(key) as commit:
            self._change(commit, key, None, expected)

    def _change(
        self, commit: _Commit, key: str, new: _New | None, expected: str | Expected
    ) -> ObjectInfo:
        with commit.lock:
            self._ensure(key, expected)
            commit.changes[self._path(key)] = new
        return new.info if new is not None else ObjectInfo(0, "", 0)

    def _added(self, key: str, source: bytes | Path | _New) -> _New:
        """Return what adds bytes, a file, or the bytes of another addition, with the ETag that they
        will have: the hub says whether it stores them as a large file.
        """
        from huggingface_hub import CommitOperationAdd

        path, stamp = self._path(key), None
        if isinstance(source, _New):  # it is not hashed anew
            adding, stamp = copy(source.operation), source.stamp
            adding.path_in_repo = path
        elif isinstance(source, Path):
            stamp = _stamp(source)
            adding = CommitOperationAdd(path, str(source))
        else:
            adding = CommitOperationAdd(path, source)
        sample, size = b64encode(adding.upload_info.sample).decode(), adding.upload_info.size
        asked = {"files": [{"path": path, "sample": sample, "size": size}]}
        address = f"preupload/{quote(self._branch, safe='')}"
        answer = self._persist(key, lambda: self._ask("post", address, json=asked)).json()
        if answer["files"][0].get("shouldIgnore"):
            raise UsageError(
                f"{self.name(key)}: the .gitignore of the repository keeps this file out of "
                "commits, so nothing was changed; next: take its line out of .gitignore"
            )
        if answer["files"][0]["uploadMode"] == "lfs" and size > 0:
            return _New(ObjectInfo(size, adding.upload_info.sha256.hex(), 0), adding, stamp)
        with adding.as_file() as file:
            data = b"blob %d\0" % size + file.read()
        etag = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        return _New(ObjectInfo(size, etag, 0), adding, stamp)

    # Commits.

    @contextmanager
    def _changing(self, key: str) -> Iterator[_Commit]:
        """Yield the commit that is being made; otherwise one of this write alone."""
        if _COMMIT.fullmatch(self._branch):
            raise UsageError(
                f"{self.name()} names a commit, which never changes; next: name a branch"
            )
        if (commit := self._current()) is not None:
            yield commit
            return
        with self._turn, self._made(f"ckptfix: {self._path(key)}") as commit:
            yield commit

    def _current(self) -> _Commit | None:
        """Return the commit that writes add to, None where each of them is one."""
        return self._open[0] if self._open else None

    @contextmanager
    def atomically(self, title: str) -> Iterator[None]:
        """Send all writes of the block as one commit at its end; none of them when an error ends
        it.

        Raises ChangedError when somebody else committed since it began: then nothing was changed.
        """
        try:
            with self._turn:
                if self._open:  # of this thread
                    yield
                    return
                with self._made(title) as commit:
                    self._open.append(commit)
                    try:
                        yield
                    finally:
                        self._open.clear()
        except _Overtaken as error:
            raise ChangedError(
                f"{self.name()}: {error}, so nothing was changed; next: when nobody commits there, "
                "run the same command again"
            ) from error

    @contextmanager
    def _made(self, title: str) -> Iterator[_Commit]:
        parent = Path(os.path.realpath(tempfile.gettempdir()))
        staged.sweep(parent)  # what killed runs left
        folder = parent / staged.temporary_name(Path("hub"))
        try:
            commit = _Commit(self._persist("", self._head), folder, {}, {}, threading.RLock())
            folder.mkdir(mode=0o700)
            yield commit
            self._send(commit, title)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            staged.release(folder)

    def _send(self, commit: _Commit, title: str) -> None:
        """Make the commit; nothing to do for changes that leave every path as it was."""
        paths = sorted(commit.changes)
        before = self._persist("", lambda: self._infos(paths, commit.parent))
        changes = {
            path: new
            for path, new in sorted(commit.changes.items())
            if (None if new is None else new.info) != before.get(path)
        }
        if not changes:
            return
        for new in changes.values():
            if new is not None and new.stamp is not None and _stamp(new.stamp[0]) != new.stamp:
                raise ChangedError(
                    f"{new.stamp[0]} changed while it was uploaded; nothing was changed"
                )
        try:
            self._persist("", lambda: self._commit(commit, changes, title), has_condition=True)
        except Refused:
            raise _Overtaken(f"another commit came since {commit.parent[:10]}") from None
        except (StoreError, UsageError) as error:
            is_unknown = error.__cause__ is not None and isinstance(
                self._judge(error.__cause__) if isinstance(error.__cause__, Exception) else None,
                Temporary,
            )
            words = (
                "no file changed, or all of them in one commit"
                if is_unknown
                else "nothing was changed"
            )
            raise type(error)(f"{error}; {words}") from error

    def _commit(self, commit: _Commit, changes: Mapping[str, _New | None], title: str) -> None:
        from huggingface_hub import CommitOperationDelete

        operations: list[Any] = []
        for path, new in changes.items():
            if new is None:
                operations.append(CommitOperationDelete(path, is_folder=False))
            else:
                operations.append(new.operation)
                self.traffic.add(up=new.info.size * _is_added(new), requests=0)
        self.traffic.add()
        try:
            with _quiet():
                self._files.create_commit(
                    self._repo, operations, commit_message=title, repo_type=self._type,
                    revision=self._branch, parent_commit=commit.parent,
                )  # fmt: skip
        except Exception:
            # An earlier attempt may have arrived, whose answer was lost: then every path is as it
            # should be.
            now = self._infos(list(changes), self._branch)
            wanted = {path: new.info for path, new in changes.items() if new is not None}
            if now != wanted:
                raise

    def _judge(self, error: Exception) -> Exception | None:
        if type(error).__name__ == "OfflineModeIsEnabled":
            return StoreError("HF_HUB_OFFLINE forbids requests; next: unset HF_HUB_OFFLINE")
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
            return self._judge(error.__cause__)  # of an upload of one file
        response = getattr(error, "response", None)
        if response is None:
            return super()._judge(error)
        status, code = response.status_code, response.headers.get("x-error-code", "")
        if status == 412:
            return Refused()
        if status in (408, 409, 429) or status >= 500:
            return Temporary(f"{status} {code}".strip())
        if code == "RepoNotFound":
            return UsageError(
                f"the repository {escape(self._repo)} does not exist, or this token may not see "
                "it; next: hf auth login"
            )
        if code == "RevisionNotFound":
            return UsageError(
                f"{escape(self._repo)} has no branch, tag or commit {escape(self._branch)}; next: "
                "name another one"
            )
        if code == "GatedRepo":
            return StoreError(f"{escape(self._repo)} is gated; next: ask for access on its page")
        if status == 404:
            return FileNotFoundError(code)
        if status == 401:
            return StoreError("the hub knows no token, or it has expired; next: hf auth login")
        if status == 403:
            return StoreError(
                "this token may not do that; next: hf auth login, with a token that may write"
            )
        said = escape(" ".join(response.headers.get("x-error-message", "").split()))
        return StoreError(f"{status} {said}".strip() + "; next: ckptfix help stores")


@contextmanager
def _quiet() -> Iterator[None]:
    """Let the library draw bars of what it uploads only where a person looks at them."""
    utils: Any = import_module("huggingface_hub.utils")
    if sys.stderr.isatty() or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _stamp(file: Path) -> tuple[Path, int, int]:
    status = file.stat()
    return file, status.st_size, status.st_mtime_ns


def _is_added(new: _New) -> bool:
    """Return whether bytes come from this machine; the hub copies all others by itself."""
    return hasattr(new.operation, "as_file")


def _info(one: Mapping[str, Any]) -> ObjectInfo:
    """Return the facts about a file; its ETag is the sha256 of a large file, the id of git of any
    other.
    """
    large = one.get("lfs")
    return ObjectInfo(one["size"], str(large["oid"] if large else one["oid"]), 0)


def _etag_of(response: Any) -> str:
    """Return the ETag that the hub names, before it sends the client on to where the bytes lie."""
    answers: Iterable[Any] = (*response.history, response)
    for one in answers:
        if etag := one.headers.get("x-linked-etag"):
            return str(etag).strip('"')
    named = [
        one.headers["etag"]
        for one in answers
        if "x-repo-commit" in one.headers and "etag" in one.headers
    ]
    return str(named[0]).removeprefix("W/").strip('"') if named else ""
