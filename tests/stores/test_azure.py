"""Azure on Azurite, where it is installed: conditions, blocks, properties that are passed on,
repair and undo.

Azurite copies no blocks: the proxy of ``azurite`` stands in for it, and nothing else of the store
is simulated.
"""

import base64
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptfix import CkptfixError, Policy, check, repair, seal, undo, verify
from ckptfix.errors import ChangedError, StoreError, UsageError
from ckptfix.storage import stores
from ckptfix.storage.azure import AzureStore
from ckptfix.storage.stores import ABSENT, ObjectRange, open_store
from tests.stores.azurite import azurite
from tests.stores.faults import Proxy
from tests.stores.servers import QUICK, objects_of, upload_folder
from tests.stores.weights import write_model

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


def test_conditions_hold(store: AzureStore) -> None:
    first = store.put("a", b"one", expected=ABSENT)
    with pytest.raises(ChangedError, match="another program wrote"):
        store.put("a", b"two", expected=ABSENT)
    second = store.put("a", b"two", expected=first.etag)
    for write in (
        lambda: store.put("a", b"three", expected=first.etag),
        lambda: store.delete("a", expected=first.etag),
        lambda: store.compose("a", [b"three"], expected=first.etag, mark="m"),
        lambda: store.compose("a", [b"three"], expected=ABSENT, mark="m"),
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


def test_blocks_are_composed_and_pinned(store: AzureStore) -> None:
    old = store.put("old #1 %41", bytes(range(256)) * 10)
    made = store.compose(
        "new", [b"head", ObjectRange("old #1 %41", 3, 2000, old.etag), b"tail"], mark="7-0"
    )
    assert store.read("new", 0, made.size) == b"head" + (bytes(range(256)) * 10)[3:2003] + b"tail"
    assert (store.mark("new"), store.mark("old #1 %41")) == ("7-0", "")
    assert store.compose("none", [b""], expected=ABSENT, mark="7-1").size == 0
    store.put("old #1 %41", b"other bytes")
    with pytest.raises(ChangedError, match="another program wrote"):
        store.compose("newer", [ObjectRange("old #1 %41", 0, 5, old.etag)])
    store.delete("old #1 %41")
    with pytest.raises(ChangedError, match=r"deleted|found none"):
        store.compose("newer", [ObjectRange("old #1 %41", 0, 5, old.etag)])
    assert sorted(store.list()) == ["new", "none"]


def test_properties_are_passed_on(store: AzureStore) -> None:
    words: dict[str, Any] = {
        "settings": {"content_type": "application/x-weights", "cache_control": "no-store"}
    }
    words |= {"metadata": {"run": "seven"}, "tier": "Cool", "tags": {"owner": "me"}}
    path = store._path("model")
    store.ask("upload_blob", path, data=b"weights", **words)
    store.compose("model", [b"new ", ObjectRange("model", 0, 7, "")], like="model", mark="1-2")
    found = store.ask("get_blob_properties", path)
    assert found.metadata == {"run": "seven", "ckptfix": "1-2"}
    assert found.content_settings.content_type == "application/x-weights"
    assert found.content_settings.cache_control == "no-store"
    assert found.blob_tier == "Cool"
    assert store.ask("get_blob_tags", path) == {"owner": "me"}
    assert store.read("model", 0, 11) == b"new weights"


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


def test_an_answer_that_was_lost_is_no_failure(store: AzureStore, proxy: Proxy) -> None:
    old = store.put("old", b"old bytes")
    lost: list[str] = []

    def choose(number: int, method: str, path: str) -> str | None:
        if method == "PUT" and "comp=block&" not in path and path not in lost:
            lost.append(path)
            return "lost"
        return None

    proxy.choose = choose
    new = store.compose(
        "new", [b"x", ObjectRange("old", 0, 3, old.etag)], expected=ABSENT, mark="m"
    )
    put = store.put("put", b"some bytes", expected=ABSENT)
    assert len(lost) == 2
    assert store.list() == {"old": old, "new": new, "put": put}
    assert store.read("new", 0, 4) == b"xold"


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


def test_a_signature_of_the_user_copies_blocks(
    store: AzureStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from azure.storage.blob import ContainerSasPermissions, generate_container_sas

    from tests.stores.azurite import access

    words = access(ContainerSasPermissions, generate_container_sas)
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"BlobEndpoint={proxy.endpoint}/devstoreaccount1;SharedAccessSignature={words}",
    )
    other = open_store(store.url)
    assert isinstance(other, AzureStore)
    old = other.put("old", b"old bytes")
    other.compose("new", [b"x", ObjectRange("old", 0, 3, old.etag)])
    assert other.read("new", 0, 4) == b"xold"


def test_a_login_copies_blocks_with_its_token(store: AzureStore) -> None:
    class Credential:
        async def get_token(self, *scopes: str) -> Any:
            return SimpleNamespace(token="abc")

    client = SimpleNamespace(url="https://me.blob.core.windows.net/box/old")
    service = SimpleNamespace(credential=Credential(), get_blob_client=lambda *names: client)
    store._files = SimpleNamespace(service_client=service, loop=store._files.loop)
    assert store.readable("old") == (client.url, {"source_authorization": "Bearer abc"})


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
    receipt = repair(store.url, policy=policy)
    assert receipt.steps
    assert receipt.status == check(store.url).status
    undo(store.url)
    assert objects_of(store) == before


def test_only_the_header_travels(store: AzureStore, tmp_path: Path, proxy: Proxy) -> None:
    write_model(tmp_path / "model.safetensors", 23 * MIB)
    store.upload("model.safetensors", tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    copies: Any = proxy.stand_in
    for verb in (repair, undo):
        traffic, copied = stores.TRAFFIC, copies.nbytes
        requests, up, down = traffic.requests, traffic.up, traffic.down
        assert verb(store.url).steps
        requests, up, down = traffic.requests - requests, traffic.up - up, traffic.down - down
        print(
            f"{verb.__name__}: {requests} requests, {up} B up, {down} B down, "
            f"{copies.nbytes - copied} B copied"
        )
        assert copies.nbytes - copied > 2 * 23 * MIB
        assert max(up, down) < MIB // 2
    assert store.read("model.safetensors", 0, size) == (tmp_path / "model.safetensors").read_bytes()


def test_a_seal_and_a_verify(store: AzureStore) -> None:
    upload_folder(FIXTURES / "lone-nested-train" / "checkpoint", store.url)
    repair(store.url)
    seal(store.url)
    report = verify(store.url, data=True)
    assert (report.status, report.is_verified) == (0, True)


def test_a_repair_that_meets_another_writer_changes_nothing_of_it(store: AzureStore) -> None:
    upload_folder(FIXTURES / "lone-nested-train" / "checkpoint", store.url)
    before = objects_of(store)
    original, lock = AzureStore._complete, threading.Lock()
    done: list[str] = []

    def _complete(self: AzureStore, upload: Any, parts: Any, expected: Any) -> None:
        with lock:
            if not done:
                done.append("once")
                name = next(key for key in before if not key.startswith(".ckptfix"))
                for key in before:
                    if key != name:
                        continue
                    store.put(key, before[key] + b"!")
        original(self, upload, parts, expected)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AzureStore, "_complete", _complete)
        with pytest.raises(CkptfixError, match=r"nothing was changed|another program wrote"):
            repair(store.url)
    now = objects_of(store)
    assert {key for key in before if now[key] != before[key]} <= {next(iter(before))}
