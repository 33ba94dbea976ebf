"""Azure on Azurite, where it is installed: conditions, blocks, lost answers, repair and undo."""

import base64
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptfix import CkptfixError, Policy, check, repair, seal, undo, verify
from ckptfix.errors import ChangedError, StoreError, UsageError
from ckptfix.storage import stores
from ckptfix.storage.azure import AzureStore
from ckptfix.storage.stores import ABSENT, ObjectInfo, ObjectRange, open_store
from tests.stores.azurite import azurite
from tests.stores.faults import Proxy
from tests.stores.servers import QUICK, objects_of, upload_folder

# adlfs leaves its sessions to the garbage collector.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MIB = 1 << 20
FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Proxy]]:
    with (
        pytest.MonkeyPatch.context() as patch,
        azurite(tmp_path_factory.mktemp("azurite"), patch) as running,
    ):
        yield running


@pytest.fixture
def proxy(server: tuple[str, Proxy], monkeypatch: pytest.MonkeyPatch) -> Proxy:
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    proxy = server[1]
    proxy.choose = lambda number, method, path: None
    proxy.asked.clear()
    return proxy


@pytest.fixture
def store(proxy: Proxy, request: pytest.FixtureRequest) -> AzureStore:
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:8]
    store = open_store(f"az://box/{name}/checkpoint")
    assert isinstance(store, AzureStore)
    return store


def test_conditions_hold(store: AzureStore, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(bytes(17 * MIB))
    first = store.put("a", b"one", expected=ABSENT)
    with pytest.raises(ChangedError, match="another program wrote"):
        store.put("a", b"two", expected=ABSENT)
    second = store.put("a", b"two", expected=first.etag)
    for write in (
        lambda: store.put("a", b"three", expected=first.etag),
        lambda: store.delete("a", expected=first.etag),
        lambda: store.compose("a", [b"three"], expected=first.etag),
        lambda: store.compose("a", [b"three"], expected=ABSENT),
        lambda: store.upload("a", large, expected=first.etag),
        lambda: store.upload("a", large, expected=ABSENT),
        lambda: store.read("a", 0, 3, etag=first.etag),
    ):
        with pytest.raises(ChangedError):
            write()
    assert store.read("a", 0, 3, etag=second.etag) == b"two"
    assert store.list() == {"a": second}
    assert store.stat("a") == second
    store.delete("a", expected=second.etag)
    assert store.stat("a") is None
    store.delete("a")
    with pytest.raises(ChangedError):
        store.delete("a", expected=second.etag)


def test_a_large_file_goes_up_in_blocks(store: AzureStore, tmp_path: Path, proxy: Proxy) -> None:
    path = tmp_path / "large"
    path.write_bytes(base64.b64encode(bytes(range(256)) * 1000) * 52)
    info = store.upload("large", path, expected=ABSENT)
    assert sum("comp=block&" in path for _, path in proxy.asked) == 2
    assert store.read("large", 0, info.size) == path.read_bytes()


def test_listings_come_in_pages_and_by_folders(
    store: AzureStore, monkeypatch: pytest.MonkeyPatch, proxy: Proxy
) -> None:
    monkeypatch.setattr("ckptfix.storage.azure._PAGE", 2)
    keys = ["a", "b/1", "b/2", "b/c/3", "d/4"]
    for key in keys:
        store.put(key, key.encode())
    store.ask("upload_blob", store._path("e"), data=b"", metadata={"hdi_isfolder": "true"})
    store.ask("upload_blob", store._path("b"), data=b"", metadata={"hdi_isfolder": "true"})
    assert {key: info.size for key, info in store.list().items()} == {key: len(key) for key in keys}
    assert store.list() == {key: store.stat(key) for key in keys}
    files, folders = store.children()
    assert (list(files), folders) == (["a"], ["b", "d", "e"])
    assert store.folders("b") == ["b/c"]
    assert sorted(store.list("b")) == ["b/1", "b/2", "b/c/3"]
    assert store.stat("b") is None


def test_pieces_travel_and_are_pinned(store: AzureStore) -> None:
    old = store.put("old #1 %41", bytes(range(256)) * 10)
    made = store.compose("new", [b"head", ObjectRange("old #1 %41", 3, 2000, old.etag), b"tail"])
    assert store.read("new", 0, made.size) == b"head" + (bytes(range(256)) * 10)[3:2003] + b"tail"
    assert store.compose("none", [b""], expected=ABSENT).size == 0
    store.put("old #1 %41", b"other bytes")
    with pytest.raises(ChangedError, match="changed while it was read"):
        store.compose("newer", [ObjectRange("old #1 %41", 0, 5, old.etag)])
    assert sorted(store.list()) == ["new", "none", "old #1 %41"]


def test_an_answer_that_was_lost_is_no_failure(
    store: AzureStore, tmp_path: Path, proxy: Proxy
) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(range(256)) * 70_000)
    lost: list[str] = []

    def choose(number: int, method: str, path: str) -> str | None:
        if method == "PUT" and path not in lost:
            lost.append(path)
            return "lost"
        return None

    proxy.choose = choose
    put = store.put("put", b"some bytes", expected=ABSENT)
    again = store.put("again", b"", expected=ABSENT)
    large = store.upload("large", path, expected=ABSENT)
    assert len(lost) == 5
    assert store.list() == {"again": again, "large": large, "put": put}
    assert store.read("large", 0, large.size) == path.read_bytes()


@pytest.mark.parametrize("fault", ["cut", "500", "503", "late"])
def test_what_passes_is_tried_again(store: AzureStore, proxy: Proxy, fault: str) -> None:
    struck: set[tuple[str, str]] = set()

    def choose(number: int, method: str, path: str) -> str | None:
        where = (method, path.partition("sig=")[0])
        if where in struck:
            return None
        struck.add(where)
        return fault

    proxy.choose = choose
    if fault == "late":
        stores.PATIENCE = QUICK._replace(answer=0.4)
    old = store.put("old", b"old bytes", expected=ABSENT)
    store.compose("new", [b"x", ObjectRange("old", 0, 3, old.etag)], expected=ABSENT)
    assert store.read("new", 0, 4) == b"xold"
    assert sorted(store.list()) == ["new", "old"]
    store.delete("old", expected=old.etag)
    assert struck


def test_messages_lead_on_and_hold_no_key(
    store: AzureStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UsageError, match="container nobox does not exist; next: az storage container list"
    ):
        open_store("az://nobox/x").list()
    store.put("a", b"abc")
    with pytest.raises(StoreError, match="az://box/"):
        store.read("a", 5, 100)
    text = (
        "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey=c2VjcmV0c2VjcmV0;BlobEndpoint="
        f"{proxy.endpoint}/devstoreaccount1"
    )
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    with pytest.raises(StoreError, match="next: az storage account show") as caught:
        open_store("az://box/x").list()
    assert "c2VjcmV0" not in str(caught.value)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountKey=c2VjcmV0")
    with pytest.raises(StoreError, match="then: az login") as caught:
        open_store("az://box/x")
    assert "c2VjcmV0" not in str(caught.value)


@pytest.mark.parametrize(
    ("fixture", "policy"),
    [
        ("student-teacher-wrapper-safetensors", Policy()),
        ("sharded-gpt2-nested", Policy()),
        ("lone-nested-train", Policy()),
    ],
)
def test_every_byte_comes_back(store: AzureStore, fixture: str, policy: Policy) -> None:
    upload_folder(FIXTURES / fixture / "checkpoint", store.url)
    before = objects_of(store)
    with pytest.raises(
        UsageError, match=r"must be transferred: .*; nothing was changed; .*--transfer"
    ):
        repair(store.url, policy=policy)
    receipt = repair(store.url, policy=policy, transfer=True)
    assert receipt.steps
    assert receipt.status == check(store.url).status
    undo(store.url, transfer=True)
    assert objects_of(store) == before


def test_a_seal_and_a_verify(store: AzureStore) -> None:
    upload_folder(FIXTURES / "lone-nested-train" / "checkpoint", store.url)
    repair(store.url, transfer=True)
    seal(store.url)
    report = verify(store.url, data=True)
    assert (report.status, report.is_verified) == (0, True)


def test_a_repair_that_meets_another_writer_changes_nothing_of_it(store: AzureStore) -> None:
    upload_folder(FIXTURES / "lone-nested-train" / "checkpoint", store.url)
    before = objects_of(store)
    name = next(key for key in before if not key.startswith(".ckptfix"))
    place, lock = AzureStore._upload, threading.Lock()
    met: list[str] = []

    def _upload(self: AzureStore, key: str, *words: Any) -> ObjectInfo:
        with lock:
            if not met:
                met.append(key)
                store.put(name, before[name] + b"!")
        return place(self, key, *words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AzureStore, "_upload", _upload)
        with pytest.raises(CkptfixError, match=r"nothing was changed|another program wrote"):
            repair(store.url, transfer=True)
    assert met
    now = objects_of(store)
    assert now == {**before, name: before[name] + b"!"}
