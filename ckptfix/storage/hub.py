"""The Hugging Face hub: reads by ranges, and a folder that is uploaded as one commit, or not at all.

Every write is a commit whose parent is the one that was read: the hub refuses it when anybody else
committed in between. So nothing is changed in place there, and there is no journal; the history of
the repository has what was before. Endpoint and token are those of ``huggingface_hub``:
``HF_ENDPOINT``, ``HF_TOKEN``, ``hf auth login``.
"""

import hashlib
import re
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote

from ckptfix.errors import ChangedError, StoreError, UsageError
from ckptfix.storage import stores
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import shell_path
from ckptfix.storage.stores import (
    Abilities,
    Expected,
    ObjectInfo,
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
    """New bytes of a path, and the operation of ``huggingface_hub`` that adds them.

    ``stamp``: size and time of the file that is added, before it was hashed.
    """

    info: ObjectInfo
    operation: Any
    stamp: tuple[int, int] | None = None


_turns: dict[tuple[str, ...], threading.RLock] = {}
"""One thread at a time makes a commit of a branch: of two at once the hub refuses one."""


class _Failed(Exception):
    """An answer of the hub that is none of success."""

    def __init__(self, response: Any) -> None:
        super().__init__(
            f"{response.status_code} {response.headers.get('x-error-message', '')}".strip()
        )
        self.response = response


class HubStore(Store):
    """One folder of a repository of the hub, at one of its branches, tags or commits."""

    abilities: ClassVar[Abilities] = Abilities(conditions=True, in_place=False)

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
                f"{self.name()} has no repository (expected hf://USER/MODEL/PATH or "
                "hf://datasets/USER/NAME/PATH)"
            )
        self._type = (match[1] or "models").removesuffix("s")
        self._repo, self._branch = match[2], match[3] or "main"
        api = HfApi()
        where = (api.endpoint, self._type, self._repo, self._branch)
        self._turn = _turns.setdefault(where, threading.RLock())
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
        head = self._persist(below, self._head)
        for path, info in self._tree(self._path(below.rstrip("/")), head, deep=deep):
            if info is not None:
                yield path[start:], info
            elif not deep:
                yield f"{path[start:]}/", None

    def _stat(self, key: str) -> ObjectInfo | None:
        path = self._path(key)
        return self._infos([path], self._branch).get(path)

    def _read(self, key: str, offset: int, length: int, etag: str) -> bytes:
        path, revision = self._path(key), self._branch
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

    # Writes: each is a commit.

    def _put(self, key: str, data: bytes | Path, expected: str | Expected) -> ObjectInfo:
        new = self._added(key, data)
        self._commit(f"ckptfix: {self._path(key)}", {key: new}, {key: expected})
        return new.info

    def _upload(
        self, key: str, path: Path, expected: str | Expected, progress: Progress | None
    ) -> ObjectInfo:
        info = self._put(key, path, expected)
        if progress:
            progress(info.size)
        return info

    def _delete(self, key: str, expected: str | Expected) -> None:
        self._commit(f"ckptfix: {self._path(key)}", {key: None}, {key: expected})

    def replace_all(
        self,
        title: str,
        files: Mapping[str, Path],
        gone: Iterable[str],
        records: Callable[[Mapping[str, tuple[ObjectInfo, str]]], Mapping[str, bytes]],
        seen: Mapping[str, str],
    ) -> None:
        """Make one commit that adds files and takes others away.

        ``records``: makes the rest of what it adds from the facts about every file, and its sha256.
        ``seen``: the ETags of what was there. Raises ChangedError when something else is there now,
        or somebody commits at the same time: then nothing was changed.
        """
        new = {key: self._added(key, path) for key, path in files.items()}
        facts = {
            key: (one.info, one.operation.upload_info.sha256.hex()) for key, one in new.items()
        }
        more = {key: self._added(key, data) for key, data in records(facts).items()}
        changes: dict[str, _New | None] = {**new, **more, **dict.fromkeys(gone)}
        expected = {key: seen.get(key, stores.ABSENT) for key in changes}
        try:
            self._persist("", lambda: self._commit(title, changes, expected), has_condition=True)
        except Refused:
            raise ChangedError(
                f"{self.name()}: another commit was made meanwhile, so nothing was changed; next: "
                "wait until nobody commits there, then run the same command again"
            ) from None

    def _added(self, key: str, source: bytes | Path) -> _New:
        """Return what adds bytes or a file, with the ETag that they will have: the hub says whether
        it stores them as a large file.
        """
        from huggingface_hub import CommitOperationAdd

        path = self._path(key)
        stamp = _stamp(source) if isinstance(source, Path) else None
        adding = CommitOperationAdd(path, str(source) if isinstance(source, Path) else source)
        sample, size = b64encode(adding.upload_info.sample).decode(), adding.upload_info.size
        asked = {"files": [{"path": path, "sample": sample, "size": size}]}
        address = f"preupload/{quote(self._branch, safe='')}"
        answer = self._persist(key, lambda: self._ask("post", address, json=asked)).json()
        if answer["files"][0].get("shouldIgnore"):
            raise UsageError(
                f"{self.name(key)}: the repository's .gitignore excludes this file, so nothing was "
                "changed; next: remove its line from .gitignore"
            )
        if answer["files"][0]["uploadMode"] == "lfs" and size > 0:
            return _New(ObjectInfo(size, adding.upload_info.sha256.hex(), 0), adding, stamp)
        with adding.as_file() as file:
            data = b"blob %d\0" % size + file.read()
        etag = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        return _New(ObjectInfo(size, etag, 0), adding, stamp)

    def _commit(
        self,
        title: str,
        changes: Mapping[str, _New | None],
        expected: Mapping[str, str | Expected],
    ) -> None:
        """Make a commit; nothing to do for changes that leave every path as it was.

        Raises Refused where a path is not as expected, Temporary where somebody else committed
        first.
        """
        from huggingface_hub import CommitOperationDelete

        if _COMMIT.fullmatch(self._branch):
            raise UsageError(
                f"{self.name()} names a commit, which never changes; next: name a branch"
            )
        paths = {self._path(key): new for key, new in sorted(changes.items())}
        with self._turn:
            parent = self._head()
            before = self._infos(list(paths), parent)
            for key, state in expected.items():
                now = before.get(self._path(key))
                if state is not stores.ANY and (
                    now is not None if state is stores.ABSENT else now is None or now.etag != state
                ):
                    raise Refused
            changed = {
                path: new
                for path, new in paths.items()
                if (None if new is None else new.info) != before.get(path)
            }
            operations = [
                CommitOperationDelete(path, is_folder=False) if new is None else new.operation
                for path, new in changed.items()
            ]
            for new in filter(None, changed.values()):
                source = new.operation.path_or_fileobj
                if new.stamp is not None and _stamp(Path(source)) != new.stamp:
                    raise ChangedError(
                        f"{source} changed while it was uploaded; nothing was changed"
                    )
                self.traffic.add(up=new.info.size, requests=0)
            if operations:
                self._send(title, operations, parent, changed)

    def _send(
        self, title: str, operations: Sequence[Any], parent: str, changed: Mapping[str, _New | None]
    ) -> None:
        self.traffic.add()
        try:
            with _quiet():
                self._files.create_commit(
                    self._repo, operations, commit_message=title, repo_type=self._type,
                    revision=self._branch, parent_commit=parent,
                )  # fmt: skip
        except Exception as error:
            # An earlier attempt may have arrived, whose answer was lost: then every path is as it
            # should be.
            now = self._infos(list(changed), self._branch)
            if now == {path: new.info for path, new in changed.items() if new is not None}:
                return
            if isinstance(self._judge(error), Refused):
                raise Temporary(f"another commit was made since {parent[:10]}") from error
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
                f"the repository {escape(self._repo)} does not exist, or this token cannot see it; "
                "next: hf auth login"
            )
        if code == "RevisionNotFound":
            return UsageError(
                f"{escape(self._repo)} has no branch, tag or commit {escape(self._branch)}; next: "
                "choose an existing one"
            )
        if code == "GatedRepo":
            return StoreError(f"{escape(self._repo)} is gated; next: request access on its page")
        if status == 404:
            return FileNotFoundError(code)
        if status == 401:
            return StoreError(
                "the token is missing, unknown to the hub, or expired; next: hf auth login"
            )
        if status == 403:
            return StoreError(
                "this token is not allowed to do this; next: hf auth login, with a token that has "
                "write access"
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


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


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
