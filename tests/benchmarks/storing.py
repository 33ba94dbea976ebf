"""Requests, bytes and seconds of a ``check`` of a checkpoint in an object store, on an S3 server of
this machine.
"""

import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep
from unittest import mock

from ckptfix import check
from ckptfix.storage import stores
from ckptfix.storage.s3 import S3Store
from ckptfix.storage.stores import ObjectRange, Store, open_store
from ckptfix.wording import human_size
from tests.benchmarks.printing import show
from tests.stores.faults import proxied
from tests.stores.servers import running, why_not

SHARDS = 200
_TENSORS = 24
DELAY = 0.03
"""Seconds that each request takes longer, as of a store that is not on this machine."""


def shard_of(number: int, nbytes: int) -> tuple[bytes, list[str]]:
    """Return a safetensors file of about so many bytes, and its keys."""
    each = nbytes // _TENSORS // 4 * 4
    names = [f"model.layers.{number}.experts.{index}.down_proj.weight" for index in range(_TENSORS)]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for index, name in enumerate(names):
        offsets = [index * each, (index + 1) * each]
        header[name] = {"dtype": "F32", "shape": [each // 4], "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # No zeros: a file of zeros is what a crash leaves behind.
    return struct.pack("<Q", len(text)) + text + os.urandom(1) * (each * _TENSORS), names


def safetensors_shards(count: int, nbytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a model in shards, the index last."""
    places: dict[str, str] = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        data, keys = shard_of(number, nbytes)
        places |= dict.fromkeys(keys, name)
        yield name, data
    yield (
        "model.safetensors.index.json",
        json.dumps({"metadata": {}, "weight_map": places}).encode(),
    )


def torch_shards(count: int, nbytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a model in shards that ``torch.save`` wrote, the index last."""
    import io

    import torch

    places: dict[str, str] = {}
    for number in range(count):
        name = f"pytorch_model-{number + 1:05}-of-{count:05}.bin"
        keys = [
            f"model.layers.{number}.experts.{index}.down_proj.weight" for index in range(_TENSORS)
        ]
        buffer = io.BytesIO()
        torch.save({key: torch.rand(nbytes // _TENSORS // 4) for key in keys}, buffer)
        places |= dict.fromkeys(keys, name)
        yield name, buffer.getvalue()
    yield (
        "pytorch_model.bin.index.json",
        json.dumps({"metadata": {}, "weight_map": places}).encode(),
    )


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """Yield key -> requests and bytes of the reads in the block."""
    found: dict[str, list[int]] = {}
    read, of_s3 = Store.read, S3Store._words_to_read

    def count(key: str, length: int) -> None:
        one = found.setdefault(key, [0, 0])
        one[0] += 1
        one[1] += length

    def reading(
        self: Store, key: str, offset: int, length: int, *, etag: str | None = None
    ) -> bytes:
        if not isinstance(self, S3Store):
            count(key, length)
        return read(self, key, offset, length, etag=etag)

    def reading_of_s3(
        self: S3Store, key: str, offset: int, length: int, etag: str
    ) -> dict[str, object]:
        count(key, length)
        return of_s3(self, key, offset, length, etag)

    with (
        mock.patch.object(Store, "read", reading),
        mock.patch.object(S3Store, "_words_to_read", reading_of_s3),
    ):
        yield found


def store_checks(quick: bool) -> None:
    """``check`` of 200 shards, against listing them, reading their headers alone, and downloading
    them.
    """
    if reason := why_not("ministack"):
        print(f"stores: skipped: {reason}")
        return
    nbytes = (1 if quick else 4) << 20
    with tempfile.TemporaryDirectory() as name, running("ministack", Path(name)) as server:
        os.environ.update(server.variables)
        bucket = server.bucket()
        with proxied(server.endpoint) as proxy:
            os.environ["AWS_ENDPOINT_URL_S3"] = proxy.endpoint
            proxy.choose = lambda number, method, path: sleep(DELAY)
            for kind, make in (("safetensors", safetensors_shards), ("torch zip", torch_shards)):
                _measure(kind, f"{bucket}/{kind.replace(' ', '-')}", dict(make(SHARDS, nbytes)))


def _measure(kind: str, url: str, files: Mapping[str, bytes]) -> None:
    store = open_store(url)
    stores.together(sorted(files), lambda key: store.put(key, files[key]), 16)
    check(url)  # compiles, and opens connections
    begin = perf_counter()
    listed = open_store(url).list()
    listing = perf_counter() - begin
    begin = perf_counter()
    open_store(url).read_many(
        [ObjectRange(key, 0, min(info.size, 1 << 16), info.etag) for key, info in listed.items()]
    )
    headers = perf_counter() - begin
    begin = perf_counter()
    for key, info in listed.items():
        store.read_many(
            [
                ObjectRange(key, at, min(4 << 20, info.size - at), info.etag)
                for at in range(0, info.size, 4 << 20)
            ]
        )
    download = perf_counter() - begin
    before = stores.TRAFFIC.requests, stores.TRAFFIC.down
    begin = perf_counter()
    with counted() as reads:
        report = check(url)
    seconds = perf_counter() - begin
    assert report.status == 0, str(report)
    requests, down = stores.TRAFFIC.requests - before[0], stores.TRAFFIC.down - before[1]
    total = sum(info.size for info in listed.values())
    most = max(one[0] for one in reads.values())
    largest = max(one[1] for key, one in reads.items() if not key.endswith(".json"))
    what = f"check {SHARDS} shards, {kind}"
    show(
        f"{what}: requests of the shard with most",
        f"{most} ({requests} in all)",
        "<= 3",
        most <= 3,
    )
    show(
        f"{what}: bytes of the largest reads",
        f"{human_size(largest)} ({human_size(down)} of {human_size(total)})",
        "<= 1 MiB",
        largest <= 1 << 20,
    )
    ideal = listing + headers
    show(
        f"{what}: against listing and reading 64 KiB each",
        f"{seconds / ideal:.2f}x ({seconds:.2f} s; listing {listing:.2f} s, headers "
        f"{headers:.2f} s)",
        "< 3x",
        seconds < 3 * ideal,
    )
    show(
        f"{what}: against downloading one after another",
        f"{seconds / download:.3f}x ({download:.1f} s)",
        "< 1x",
        seconds < download,
    )


if __name__ == "__main__":
    store_checks(quick=True)
