"""Azure's and Google's stores, on emulators where they are installed: reading, and whole objects
written.

``npm install azurite`` and ``pip install adlfs``; ``pip install gcsfs gcp-storage-emulator``.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfix import check, verify
from ckptfix.errors import ChangedError, StoreError
from ckptfix.storage import stores
from ckptfix.storage.stores import ABSENT, open_store
from tests.stores.azurite import azurite
from tests.stores.servers import QUICK, free_port, missing, started, upload_folder

CASE = Path(__file__).parents[2] / "fixtures" / "golden" / "doubled-model" / "checkpoint"
# adlfs leaves its sessions to the garbage collector.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with azurite(tmp_path, monkeypatch) as (url, _):
        yield url


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if lacking := missing("gcsfs", "gcp_storage_emulator"):
        pytest.skip(f"{lacking} is not installed: pip install gcsfs gcp-storage-emulator")
    if (
        "experimental"
        in str(getattr(importlib.import_module("gcsfs"), "GCSFileSystem", "")).lower()
    ):
        pytest.skip(
            "gcsfs asks for the kind of a bucket by gRPC: export "
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=false"
        )
    port = free_port()
    start = "from gcp_storage_emulator.__main__ import main; main()"
    command = [
        sys.executable,
        "-c",
        start,
        "start",
        "--host=127.0.0.1",
        f"--port={port}",
        "--in-memory",
    ]
    with started([*command, "--default-bucket=box"], port, tmp_path) as endpoint:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        import fsspec.config

        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        yield "gs://box"


@pytest.fixture(params=["azure", "google"])
def top(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    url: str = request.getfixturevalue(request.param)
    return url


def test_a_checkpoint_is_read(top: str) -> None:
    url = f"{top}/run/checkpoint"
    store = upload_folder(CASE, url)
    assert {key: info.size for key, info in store.list().items()} == {
        path.name: path.stat().st_size for path in CASE.iterdir()
    }
    assert {key: store.stat(key) for key in store.list()} == store.list()
    assert open_store(f"{top}/run").folders() == ["checkpoint"]
    assert str(check(url, data=True)).replace(url, str(CASE)) == str(check(CASE, data=True))
    assert str(verify(url, data=True)).replace(url, str(CASE)) == str(verify(CASE, data=True))


def test_another_object_is_noticed(top: str) -> None:
    store = open_store(f"{top}/x")
    old = store.put("a", b"old bytes")
    store.put("a", b"new bytes")
    with pytest.raises(ChangedError, match="changed while it was read"):
        store.read("a", 0, 3, etag=old.etag)
    with pytest.raises(ChangedError):
        store.put("a", b"x", expected=ABSENT)
    with pytest.raises(StoreError):
        store.read("a", 5, 100)
    store.delete("a")
    assert store.stat("a") is None
