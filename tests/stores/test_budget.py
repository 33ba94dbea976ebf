"""What a check of a large checkpoint in a store costs: at most 3 requests and 1 MiB a shard."""

import os
from pathlib import Path
from zipfile import ZipFile

import pytest

from ckptfix import check
from ckptfix.formats.torch_zip import read_records
from ckptfix.storage import stores
from ckptfix.storage.files import spared_below, sparing
from ckptfix.storage.reading import open_reader
from ckptfix.storage.store_files import open_prefix
from ckptfix.storage.stores import open_store
from tests.benchmarks.storing import SHARDS, counted, safetensors_shards, torch_shards
from tests.stores.servers import bucket, ministack, ministack_process

__all__ = ["bucket", "ministack", "ministack_process"]


@pytest.mark.slow
@pytest.mark.parametrize("make", [safetensors_shards, torch_shards])
@pytest.mark.parametrize("where", ["memory", "s3"])
def test_200_shards(where: str, make: object, request: pytest.FixtureRequest) -> None:
    top = (
        f"memory://{os.urandom(6).hex()}"
        if where == "memory"
        else request.getfixturevalue("bucket")
    )
    url = f"{top}/checkpoint"
    store = open_store(url)
    files = dict(make(SHARDS, 600_000 if where == "memory" else 200_000))  # type: ignore[operator]
    stores.together(sorted(files), lambda key: store.put(key, files[key]), 8)
    before = stores.TRAFFIC.requests, stores.TRAFFIC.down
    with counted() as reads:
        report = check(url)
    requests, down = stores.TRAFFIC.requests - before[0], stores.TRAFFIC.down - before[1]
    assert report.status == 0, str(report)
    assert len(report.folder.components) == SHARDS + 1
    assert len(reads) == SHARDS + 1, "every shard was read"
    # of safetensors the beginning alone, of a torch file both ends, of the index all of it
    shards = (one for key, one in reads.items() if not key.endswith(".json"))
    assert max(one[0] for one in shards) <= (1 if make is safetensors_shards else 2)
    assert max(one[0] for one in reads.values()) <= 3
    assert max(one[1] for key, one in reads.items()) <= 1 << 20
    assert down <= SHARDS * 450_000
    if where == "s3":
        assert requests <= 1 + 3 * (SHARDS + 1)


def test_positions_by_the_directory_are_those_of_the_local_headers(tmp_path: Path) -> None:
    """A check of a store reads no local header that lies far off: what it goes by instead must be
    the same.
    """
    import torch

    sizes = [1, 63, 64, 5000, 70_001, 300_000, 17, 123_457]
    torch.save(
        {f"layer.{n}.{'x' * n}": torch.rand(size) for n, size in enumerate(sizes)},
        tmp_path / "a.bin",
    )
    url = f"memory://{os.urandom(6).hex()}/run"
    open_store(url).put("a.bin", (tmp_path / "a.bin").read_bytes())
    with open_reader(tmp_path / "a.bin") as reader:
        wanted = read_records(reader)
    place = open_prefix(url)
    try:
        with sparing(place), open_reader(place / "a.bin") as reader:
            assert read_records(reader) == wanted
        assert spared_below(place) > 0
        with open_reader(place / "a.bin") as reader:
            assert read_records(reader) == wanted
    finally:
        place.files.close()


def test_what_a_sparing_check_leaves_out_is_said_and_found_with_data() -> None:
    import io

    import torch

    buffer = io.BytesIO()
    torch.save({f"layer.{n}": torch.rand(200_000) for n in range(6)}, buffer)
    data = bytearray(buffer.getvalue())
    with ZipFile(buffer) as archive:
        at = next(
            one.header_offset for one in archive.infolist() if one.filename.endswith("data/3")
        )
    data[at : at + 4] = b"\0\0\0\0"
    url = f"memory://{os.urandom(6).hex()}/run"
    open_store(url).put("pytorch_model.bin", bytes(data))
    said = check(url)
    assert said.status == 0
    assert [words for words in said.not_checked if words.startswith("local headers of records")]
    full = check(url, data=True)
    assert full.status == 1
    assert "contradicts the zip directory" in str(full)
    assert not [words for words in full.not_checked if words.startswith("local headers of records")]
