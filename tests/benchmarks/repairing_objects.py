"""Bytes over the wire, requests and seconds of a rename in an object, and of its undo: of 2 GiB on
a real server, and of 1 TB in a simulated store.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from ckptfix import repair, undo
from ckptfix.storage import store_files, stores
from ckptfix.storage.s3 import S3Store
from ckptfix.storage.stores import Store, open_store
from tests.benchmarks.printing import show
from tests.stores.servers import running, why_not
from tests.stores.simulated_s3 import Cloud, Stretch, open_simulated
from tests.stores.weights import header_of, write_model

LIMIT = 11 << 20
"""Bytes that one rename, or one undo, may send and receive together."""

MIB = 1 << 20


def repair_objects(folder: Path, size: int) -> None:
    """Measure a rename of every key of an object and its undo."""
    if reason := why_not("ministack"):
        print(f"object-repairs: not measured on a server: {reason}")
    else:
        _on_a_server(folder, size)
    _simulated(10**12)


def _on_a_server(folder: Path, size: int) -> None:
    write_model(folder / "model.safetensors", size)
    with running("ministack", folder) as server, mock.patch.dict(os.environ, server.variables):
        store = open_store(f"{server.bucket()}/checkpoint")
        store.upload("model.safetensors", folder / "model.safetensors")
        before = _sha256(store)
        (folder / "model.safetensors").unlink()
        name = f"{size / MIB:.0f} MiB on ministack"
        _measure(f"rename in {name}", lambda: repair(store.url))
        _measure(f"undo in {name}", lambda: undo(store.url))
        same = _sha256(store) == before and list(store.list()) == ["model.safetensors"]
        show(f"undo in {name}", "sha256 as before" if same else "ANOTHER sha256", "the same", same)


def _simulated(size: int) -> None:
    cloud = Cloud()
    cloud.write("checkpoint/model.safetensors", (header_of(size), Stretch(0, 0, size)))
    before = cloud.names()

    def opened(url: str) -> Store:
        return open_simulated(cloud, url)

    with (
        mock.patch.object(store_files, "open_store", opened),
        mock.patch.object(stores, "open_store", opened),
    ):
        name = f"{size / 1e12:.0f} TB (simulated store)"
        _measure(f"rename in {name}", lambda: repair("s3://simulated/checkpoint"))
        _measure(f"undo in {name}", lambda: undo("s3://simulated/checkpoint"))
    same = cloud.names() == before
    show(f"undo in {name}", "hash as before" if same else "ANOTHER hash", "the same", same)


def _measure(what: str, work: Callable[[], object]) -> None:
    with _opened_stores() as opened:
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
    up, down = (sum(getattr(one.traffic, name) for one in opened) for name in ("up", "down"))
    requests = sum(one.traffic.requests for one in opened)
    figure = (
        f"{up / MIB:.2f} MiB up, {down / MIB:.2f} MiB down, {requests} requests, {seconds:.1f} s"
    )
    show(what, figure, f"{LIMIT / MIB:.0f} MiB", up + down <= LIMIT)


@contextmanager
def _opened_stores() -> Iterator[list[S3Store]]:
    """Yield the list of the stores that are opened in the block, for their traffic."""
    opened: list[S3Store] = []
    original = S3Store.__init__

    def remembered(self: S3Store, url: str) -> None:
        original(self, url)
        opened.append(self)

    with mock.patch.object(S3Store, "__init__", remembered):
        yield opened


def _sha256(store: Store) -> str:
    digest, size = hashlib.sha256(), store.list()["model.safetensors"].size
    for offset in range(0, size, 16 * MIB):
        digest.update(store.read("model.safetensors", offset, min(16 * MIB, size - offset)))
    return digest.hexdigest()
