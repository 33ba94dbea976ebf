"""A small hub on the loopback address: repositories in memory, with the requests that reading and
committing need.

Repository and tree, files by ranges, the question how a file is stored, LFS uploads, and commits
with their parent. It answers as huggingface.co documents and as ``huggingface_hub`` expects; it is
no server of Hugging Face.
"""

import base64
import hashlib
import importlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from msgspec import Struct

from ckptfix.storage import stores
from tests.stores.servers import QUICK

PAGE = 3  # entries of a page of a tree
LARGE = 2000  # bytes of a file that git does not hold
REPO = "me/run"

Strike = Callable[[str, str], str | None]
"""Takes method and path of a request; returns a status to answer with, "cut" before or "lost" after
it is done.
"""


class File(Struct, frozen=True):
    """One file of a commit."""

    data: bytes
    is_large: bool

    @property
    def oid(self) -> str:
        """The id that git gives it, or its pointer."""
        data = self.data
        if self.is_large:
            sha256 = hashlib.sha256(data).hexdigest()
            data = (
                f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize "
                f"{len(data)}\n".encode()
            )
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def etag(self) -> str:
        """The ETag of the hub: the sha256 of a large file."""
        return hashlib.sha256(self.data).hexdigest() if self.is_large else self.oid


Tree = dict[str, File]


class Hub:
    """A hub with one repository. ``commits``: the trees by commit, oldest first; ``titles``: their
    first lines.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.commits: dict[str, Tree] = {}
        self.titles: list[str] = []
        self.large: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.ignored: set[str] = set()
        self.has_etags = True
        self.strike: Strike = lambda method, path: None
        self.sent = 0
        self.write({}, "begin")

    @property
    def head(self) -> str:
        """The last commit."""
        return next(reversed(self.commits))

    @property
    def tree(self) -> dict[str, bytes]:
        """Every file of the last commit."""
        return {path: file.data for path, file in self.commits[self.head].items()}

    def write(self, files: dict[str, bytes | None], title: str = "by hand") -> None:
        """Make a commit, as another program does."""
        with self.lock:
            tree = dict(self.commits[self.head]) if self.commits else {}
            for path, data in files.items():
                tree.pop(path, None)
                if data is not None:
                    tree[path] = self.file(path, data)
            self._add(tree, title)

    def file(self, path: str, data: bytes) -> File:
        """Return a file as the hub stores it: the tensors of a checkpoint, and what is long, are
        large.
        """
        is_large = bool(data) and (len(data) > LARGE or path.endswith((".safetensors", ".bin")))
        if is_large:
            self.large[hashlib.sha256(data).hexdigest()] = data
        return File(data, is_large)

    def _add(self, tree: Tree, title: str) -> str:
        name = hashlib.sha1(f"{len(self.commits)} {title}".encode()).hexdigest()
        self.commits[name] = dict(sorted(tree.items()))
        self.titles.append(title)
        return name

    def at(self, revision: str) -> Tree | None:
        """Return the tree of a branch or commit."""
        return self.commits.get(self.head if revision == "main" else revision)

    def answer(self, method: str, path: str, headers: Any, body: bytes, endpoint: str) -> "Answer":
        """Return the answer to a request."""
        place = urlsplit(path)
        with self.lock:
            for pattern, name in _ROUTES:
                match = re.fullmatch(pattern, place.path)
                if match and method == name.partition("_")[0].upper():
                    found: Answer = getattr(self, f"_on_{name}")(
                        *map(unquote, match.groups()), headers=headers, body=body,
                        endpoint=endpoint, query=parse_qs(place.query),
                    )  # fmt: skip
                    return found
        code = "RepoNotFound" if REPO not in place.path else "EntryNotFound"
        return _refusal(404, code)

    def _on_get_revision(self, revision: str, **words: Any) -> "Answer":
        if self.at(revision) is None:
            return _refusal(404, "RevisionNotFound")
        sha = self.head if revision == "main" else revision
        return _json({"id": REPO, "sha": sha, "siblings": []})

    def _on_get_tree(
        self, revision: str, below: str, *, query: Any, endpoint: str, **words: Any
    ) -> "Answer":
        tree = self.at(revision)
        if tree is None:
            return _refusal(404, "RevisionNotFound")
        start = f"{below.strip('/')}/" if below.strip("/") else ""
        found: dict[str, Any] = {}
        for path, file in tree.items():
            if not path.startswith(start):
                continue
            parts = path[len(start) :].split("/")
            is_deep = query["recursive"] == ["true"]
            for number in range(1, len(parts) if is_deep else min(2, len(parts))):
                folder = start + "/".join(parts[:number])
                found[folder] = {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0}
            if is_deep or len(parts) == 1:
                found[path] = _entry(path, file)
        if start and not found:
            return _refusal(404, "EntryNotFound")
        begin = int(query.get("cursor", ["0"])[0])
        every = list(found.values())
        answer = _json(every[begin : begin + PAGE])
        if begin + PAGE < len(every):
            more = f"recursive={query['recursive'][0]}&expand=false&cursor={begin + PAGE}"
            link = f'<{endpoint}/api/models/{REPO}/tree/{revision}{below}?{more}>; rel="next"'
            answer.headers["Link"] = link
        return answer

    def _on_post_paths(self, revision: str, *, body: bytes, **words: Any) -> "Answer":
        tree = self.at(revision)
        if tree is None:
            return _refusal(404, "RevisionNotFound")
        paths = parse_qs(body.decode())["paths"]
        return _json([_entry(path, tree[path]) for path in paths if path in tree])

    def _on_get_file(
        self, revision: str, path: str, *, headers: Any, endpoint: str, **words: Any
    ) -> "Answer":
        tree = self.at(revision)
        if tree is None or path not in tree:
            return _refusal(404, "EntryNotFound" if tree is not None else "RevisionNotFound")
        file = tree[path]
        if not self.has_etags:
            return _part(file.data, headers, {})
        told = {"X-Repo-Commit": self.head if revision == "main" else revision}
        if file.is_large:
            told |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.data))}
            # The address of another host: the client follows a relative one, and loses the commit.
            told["Location"] = f"{endpoint.replace('127.0.0.1', 'localhost')}/cdn/{file.etag}"
            return Answer(302, b"", told)
        return _part(file.data, headers, told | {"ETag": f'"{file.oid}"'})

    def _on_get_cdn(self, sha256: str, *, headers: Any, **words: Any) -> "Answer":
        return _part(self.large[sha256], headers, {"ETag": '"of the cdn"'})

    def _on_post_preupload(self, revision: str, *, body: bytes, **words: Any) -> "Answer":
        found = []
        for one in json.loads(body)["files"]:
            is_large = one["size"] > LARGE or one["path"].endswith((".safetensors", ".bin"))
            ignored = one["path"].rpartition("/")[2] in self.ignored
            mode = "lfs" if is_large else "regular"
            found.append({"path": one["path"], "uploadMode": mode, "shouldIgnore": ignored})
        return _json({"files": found})

    def _on_post_batch(self, *, body: bytes, endpoint: str, **words: Any) -> "Answer":
        objects = []
        for one in json.loads(body)["objects"]:
            known = one["oid"] in self.large
            action = (
                {} if known else {"actions": {"upload": {"href": f"{endpoint}/lfs/{one['oid']}"}}}
            )
            objects.append({"oid": one["oid"], "size": one["size"], **action})
        return _json({"transfer": "basic", "objects": objects})

    def _on_put_large(self, sha256: str, *, body: bytes, **words: Any) -> "Answer":
        assert hashlib.sha256(body).hexdigest() == sha256
        self.large[sha256] = body
        self.sent += len(body)
        return Answer(200, b"", {})

    def _on_post_commit(
        self, revision: str, *, body: bytes, endpoint: str, **words: Any
    ) -> "Answer":
        [header, *operations] = [json.loads(line) for line in body.splitlines()]
        parent = header["value"].get("parentCommit")
        if parent is not None and parent != self.head:
            return _refusal(412, "")
        tree = dict(self.commits[self.head])
        for one in operations:
            value, path = one["value"], one["value"]["path"]
            if one["key"] == "deletedFile":
                assert path in tree
                del tree[path]
        for one in operations:
            value, path = one["value"], one["value"]["path"]
            if one["key"] == "lfsFile":
                tree[path] = File(self.large[value["oid"]], is_large=True)
            elif one["key"] == "file":
                tree[path] = File(base64.b64decode(value["content"]), is_large=False)
                self.sent += len(value["content"])
        name = self._add(tree, header["value"]["summary"])
        url = f"{endpoint}/{REPO}/commit/{name}"
        return _json({"success": True, "commitOid": name, "commitUrl": url, "hookOutput": ""})


_ROUTES = [
    (rf"/api/models/{REPO}/revision/([^/]+)", "get_revision"),
    (rf"/api/models/{REPO}/tree/([^/]+)((?:/.*)?)", "get_tree"),
    (rf"/api/models/{REPO}/paths-info/([^/]+)", "post_paths"),
    (rf"/{REPO}/resolve/([^/]+)/(.+)", "get_file"),
    (r"/cdn/(.+)", "get_cdn"),
    (rf"/api/models/{REPO}/preupload/([^/]+)", "post_preupload"),
    (rf"/{REPO}\.git/info/lfs/objects/batch", "post_batch"),
    (r"/lfs/(.+)", "put_large"),
    (rf"/api/models/{REPO}/commit/([^/]+)", "post_commit"),
]


class Answer(Struct, frozen=True):
    """Answer to a request."""

    status: int
    data: bytes
    headers: dict[str, str]


def _json(value: object) -> Answer:
    return Answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _refusal(status: int, code: str) -> Answer:
    return Answer(
        status, b"{}", {"X-Error-Code": code, "Content-Type": "application/json"} if code else {}
    )


def _part(data: bytes, headers: Any, told: dict[str, str]) -> Answer:
    span = headers.get("Range")
    if span is None:
        return Answer(200, data, told)
    begin, _, end = span.removeprefix("bytes=").partition("-")
    return Answer(206, data[int(begin) : int(end) + 1], told)


def _entry(path: str, file: File) -> dict[str, Any]:
    large = {"oid": file.etag, "size": len(file.data), "pointerSize": 130}
    lfs = {"lfs": large} if file.is_large else {}
    return {"type": "file", "path": path, "oid": file.oid, "size": len(file.data), **lfs}


@contextmanager
def running() -> Iterator[tuple[Hub, str]]:
    """Run a hub; yield it and its address."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30
        # Head and body in one packet, or the client's system waits 40 ms for the second.
        wbufsize = -1
        disable_nagle_algorithm = True

        def log_message(self, *arguments: object) -> None:
            pass

        def serve(self) -> None:
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                body = b""
                while size := int(self.rfile.readline().strip(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.asked.append((self.command, self.path))
            fault = hub.strike(self.command, self.path)
            if fault == "cut":
                self.close_connection = True
                return
            if fault is not None and fault.isdigit():
                answer = _refusal(int(fault), "")
            else:
                method = "GET" if self.command == "HEAD" else self.command
                answer = hub.answer(method, self.path, self.headers, body, endpoint)
            if fault == "lost":
                self.close_connection = True
                return
            self.send_response_only(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.data)))
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(b"" if self.command == "HEAD" else answer.data)

        do_GET = do_HEAD = do_POST = do_PUT = serve

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that has given up

    server = Server(("127.0.0.1", 0), Handler)
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield hub, endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with an empty repository, which this process finds as its endpoint."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with running() as (hub, endpoint):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        place = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", place)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        http = importlib.import_module("huggingface_hub.utils._http")
        monkeypatch.setattr(
            http, "time", SimpleNamespace(sleep=lambda seconds: None, time=time.time)
        )
        monkeypatch.setattr(stores, "PATIENCE", QUICK)
        yield hub
