"""Real S3 servers for tests, on the loopback address alone.

Ministack holds conditions and checksums, moto the least size of parts.

They are processes, started when a test first asks for one, and ended with the run. Tests that need
one are skipped by name where it, or s3fs, is not installed.
"""

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec import Struct

from ckptfix.storage import stores
from ckptfix.storage.stores import Patience, Store, open_store

KEYS = {
    "AWS_ACCESS_KEY_ID": "ckptfix-test",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
"""The credentials of the tests, in place of the user's own."""

FAR = 0.03
"""Seconds after which ``ministack-far`` begins to answer, as a store in another building does."""

_FAR = f"""
import asyncio
from ministack import app as server

async def far(scope, receive, send, near=server.app):
    await asyncio.sleep({FAR})
    await near(scope, receive, send)

server.app = far
server.main()
"""

QUICK = Patience(attempts=5, first_wait=0.01, longest_wait=0.05, connect=5.0, answer=5.0)
_PROGRAMS = {
    "ministack": ("ministack", "from ministack.app import main; main()", ()),
    "ministack-far": ("ministack", _FAR, ()),
    "moto": ("moto", "from moto.server import main; main()", ("-H", "127.0.0.1", "-p", "{port}")),
}
"""Server -> the module that must be there, how it starts, and its arguments."""

_START = 60.0  # seconds


class Server(Struct, frozen=True):
    """A running server. ``endpoint``: its address. ``variables``: the environment in which a
    process finds it.
    """

    name: str
    endpoint: str

    @property
    def variables(self) -> dict[str, str]:
        return {**KEYS, "AWS_ENDPOINT_URL_S3": self.endpoint}

    def bucket(self) -> str:
        """Make a bucket, and return its URL."""
        name = f"b{uuid.uuid4().hex[:12]}"
        store = open_store(f"s3://{name}")
        store.ask("create_bucket")  # type: ignore[attr-defined]
        return f"s3://{name}"


def free_port() -> int:
    """Return a port of the loopback address on which nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def why_not(name: str) -> str | None:
    """Return why a server cannot be started here, None where it can."""
    for module in ("s3fs", _PROGRAMS[name][0]):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install -e '.[test]'"
    return None


@contextmanager
def running(name: str, folder: Path) -> Iterator[Server]:
    """Start a server, wait until it answers, and end it."""
    _, program, arguments = _PROGRAMS[name]
    port = free_port()
    given = [argument.format(port=port) for argument in arguments]
    variables = {**os.environ, **KEYS, "BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port)}
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *given],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder, env=variables,
        )  # fmt: skip
    try:
        _wait(process, port, log)
        yield Server(name, f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    began = time.monotonic()
    while time.monotonic() - began < _START:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {log.read_text(errors='replace')[-2000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5):
                return
        except urllib.error.HTTPError:
            return  # it answers, if only that nobody may look
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(
        f"the server did not answer within {_START:.0f} s: "
        f"{log.read_text(errors='replace')[-2000:]}"
    )


def _server(name: str, factory: pytest.TempPathFactory) -> Iterator[Server]:
    if reason := why_not(name):
        pytest.skip(reason)
    with running(name, factory.mktemp(name)) as server:
        yield server


@pytest.fixture(scope="session")
def ministack_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _server("ministack", tmp_path_factory)


@pytest.fixture(scope="session")
def moto_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _server("moto", tmp_path_factory)


def _chosen(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    for name in (
        "AWS_PROFILE",
        "AWS_SESSION_TOKEN",
        "AWS_ENDPOINT_URL",
        "HTTP_PROXY",
        "http_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    return server


@pytest.fixture
def ministack(ministack_process: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Ministack, which this process finds in its environment: conditions and checksums hold."""
    return _chosen(ministack_process, monkeypatch)


@pytest.fixture
def moto(moto_process: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Moto, which this process finds in its environment: parts have at least 5 MiB."""
    return _chosen(moto_process, monkeypatch)


@pytest.fixture
def bucket(ministack: Server) -> str:
    """URL of a new bucket of ministack."""
    return ministack.bucket()


@contextmanager
def started(command: Sequence[str], port: int, folder: Path) -> Iterator[str]:
    """Start a server of another store than S3, wait until it answers, and yield its address."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder
        )
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.1)
            else:
                break
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()  # Azurite waits for its clients, and all that it has is in memory
        process.wait()


def missing(*modules: str) -> str:
    """Return the names of those modules that are not installed."""
    return ", ".join(module for module in modules if importlib.util.find_spec(module) is None)


def upload_folder(folder: Path, url: str) -> Store:
    """Upload all files below a folder, and return the store of the URL."""
    store = open_store(url)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    stores.together(
        files, lambda path: store.put(str(path.relative_to(folder)), path.read_bytes()), 16
    )
    return store


def objects_of(store: Store) -> Mapping[str, bytes]:
    """Return every object with its bytes."""
    return {key: store.read(key, 0, info.size) for key, info in store.list().items()}
