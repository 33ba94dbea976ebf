"""The interface of stores, on two real S3 servers and on memory://."""

import importlib
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptfix.errors import ChangedError, StoreError, UsageError
from ckptfix.storage import s3, stores
from ckptfix.storage.parts import MIB, plan_parts
from ckptfix.storage.s3 import S3Store
from ckptfix.storage.stores import ABSENT, Abilities, ObjectRange, Piece, Store, is_url, open_store
from tests.stores.servers import (
    QUICK,
    Server,
    bucket,
    free_port,
    ministack,
    ministack_process,
    moto,
    moto_process,
)
from tests.stores.simulated_s3 import Cloud, cloud, open_simulated, refusal

__all__ = ["bucket", "cloud", "ministack", "ministack_process", "moto", "moto_process"]


@pytest.fixture(params=["memory", "ministack", "moto"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A new prefix in each kind of store."""
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    if request.param == "memory":
        url = f"memory://{os.urandom(6).hex()}"
    else:
        server: Server = request.getfixturevalue(request.param)
        url = server.bucket()
    return open_store(f"{url}/run 1/ckpt")


def test_urls() -> None:
    assert is_url("s3://bucket/x")
    assert is_url("memory://x")
    assert not is_url("checkpoint")
    assert not is_url("s3:/bucket")
    assert not is_url(Path("s3://bucket"))


def test_what_is_no_store_is_refused() -> None:
    with pytest.raises(UsageError, match=r"expected one of s3://.*gs://"):
        open_store("ftp://host/x")
    with pytest.raises(UsageError, match="has no bucket"):
        open_store("s3:///x")
    for url in (
        "s3://bucket//run",
        "s3://bucket/run//ckpt",
        "s3://bucket/run/../ckpt",
        "memory://a/./b",
    ):
        with pytest.raises(
            UsageError, match=r"a path in a store cannot contain .*; next: correct the path"
        ):
            open_store(url)  # upload and save wrote there what check then refused to read
    for url in ("memory://b/\ud800", "memory://\udc80/x", "s3://b/run/\udfff"):
        with pytest.raises(UsageError, match="must be valid Unicode"):
            open_store(url)
    with pytest.raises(UsageError) as caught:
        open_store("s3://AKIAUSER:hunter2@bucket/x")
    assert "hunter2" not in str(caught.value)


def test_a_folder_of_a_prefix_is_a_prefix_with_the_same_connections(store: Store) -> None:
    for key in ("a/x", "a/b/y", "ab/z"):
        store.put(key, key.encode())
    folder = store.below("a")
    assert (folder.url, folder._files) == (f"{store.url}/a", store._files)
    listed = store.list()
    assert folder.list() == dict(folder.listed()) == {"x": listed["a/x"], "b/y": listed["a/b/y"]}
    assert dict(store.listed()) == listed
    assert folder.below("b").read("y", 0, 5, etag=listed["a/b/y"].etag) == b"a/b/y"
    assert folder.read_many([ObjectRange("x", 1, 2, listed["a/x"].etag)] * 3) == [b"/x"] * 3
    assert store.below("") is store


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(stores, "import_module", missing)
    with pytest.raises(UsageError, match=r"s3fs; next: pip install 'ckptfix\[s3\]'"):
        open_store("s3://bucket/x")
    monkeypatch.setattr(stores, "import_module", importlib.import_module)


def test_objects_are_written_listed_and_read(store: Store) -> None:
    keys = ["model.safetensors", "pytorch_model_fsdp_0/.metadata", "ä b%20#?.bin", "empty"]
    for number, key in enumerate(keys):
        info = store.put(key, bytes([number]) * number * 10)
        assert info.size == number * 10
    listed = store.list()
    assert sorted(listed) == sorted(keys[1:] + keys[:1])
    assert {key: info.size for key, info in listed.items()} == {
        key: 10 * number for number, key in enumerate(keys)
    }
    assert all(
        info.etag and info.modified_ns > 1_600_000_000_000_000_000 for info in listed.values()
    )
    assert {key: store.stat(key) for key in keys} | {} == {key: store.stat(key) for key in listed}
    assert [store.stat(key).etag for key in keys] == [listed[key].etag for key in keys]  # type: ignore[union-attr]
    assert store.stat("none") is None
    assert store.folders() == ["pytorch_model_fsdp_0"]
    assert list(store.list("pytorch_model_fsdp_0")) == ["pytorch_model_fsdp_0/.metadata"]
    assert store.list("pytorch_model_fsdp") == {}, (
        "a prefix is a folder, not the beginning of a name"
    )
    assert store.read("ä b%20#?.bin", 5, 10) == b"\2" * 10
    many = [ObjectRange(key, 0, info.size, info.etag) for key, info in listed.items()] * 20
    assert store.read_many(many) == [bytes([keys.index(one.key)]) * one.length for one in many]
    store.delete("empty")
    store.delete("empty")
    assert store.stat("empty") is None


def test_a_read_is_pinned_to_the_object_that_was_listed(store: Store) -> None:
    old = store.put("a", b"old bytes")
    new = store.put("a", b"new bytes")
    with pytest.raises(ChangedError, match=f"expected ETag {old.etag}, found ETag {new.etag}"):
        store.read("a", 0, 3, etag=old.etag)
    assert store.read("a", 0, 3, etag=new.etag) == b"new"
    store.delete("a")
    with pytest.raises(ChangedError, match=r"changed while it was read: .*found no object"):
        store.read("a", 0, 3, etag=new.etag)


def test_a_short_object_is_never_taken_for_the_range(store: Store) -> None:
    store.put("a", b"short")
    with pytest.raises(StoreError):
        store.read("a", 3, 10)


def test_conditions_hold(store: Store) -> None:
    first = store.put("a", b"one", expected=ABSENT)
    with pytest.raises(ChangedError, match="expected no object"):
        store.put("a", b"two", expected=ABSENT)
    second = store.put("a", b"two", expected=first.etag)
    with pytest.raises(ChangedError, match="another program wrote"):
        store.put("a", b"three", expected=first.etag)
    with pytest.raises(ChangedError):
        store.delete("a", expected=first.etag)
    assert store.read("a", 0, 3) == b"two"
    store.delete("a", expected=second.etag)
    assert store.stat("a") is None


def test_of_two_that_write_a_new_object_one_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw no object: two runs must not hold one lock. An attempt whose answer was lost is no
    other program.
    """
    store.put("lock", b"of another run")
    monkeypatch.setattr(type(store), "_stat", lambda self, key: None)
    with pytest.raises(ChangedError):
        store.put("lock", b"of this run", expected=ABSENT)
    monkeypatch.undo()
    if store.url.startswith("memory"):
        store.put("lock", b"of another run", expected=ABSENT)
    assert store.read("lock", 0, 14) == b"of another run"


def test_a_file_is_uploaded_in_parts(store: Store, tmp_path: Path) -> None:
    data = os.urandom(37 * MIB + 5)
    (tmp_path / "file").write_bytes(data)
    seen: list[int] = []
    info = store.upload("big", tmp_path / "file", expected=ABSENT, progress=seen.append)
    assert sum(seen) == info.size == len(data)
    assert store.read("big", 0, len(data), etag=info.etag) == data
    (tmp_path / "file").write_bytes(data[::-1])
    with pytest.raises(ChangedError):
        store.upload("big", tmp_path / "file", expected=ABSENT)


def test_an_object_is_composed_of_others(store: Store) -> None:
    data = os.urandom(18 * MIB + 77)
    old = store.put("old", data)
    pieces: list[Piece] = [
        b"new header",
        ObjectRange("old", 100, len(data) - 100, old.etag),
        b"and an end",
    ]
    before = store.traffic.up
    info = store.compose("new", pieces, expected=ABSENT)
    wanted = b"new header" + data[100:] + b"and an end"
    assert store.read("new", 0, info.size) == wanted
    if store.abilities.composes:
        assert store.traffic.up - before <= 5 * MIB + 100, (
            "what the server can copy does not travel"
        )
    small = store.compose("small", [b"ab", ObjectRange("old", 0, 3, old.etag)])
    assert store.read("small", 0, small.size) == b"ab" + data[:3]
    store.put("old", b"another")
    with pytest.raises(ChangedError, match="old"):
        store.compose("third", pieces)
    assert store.stat("third") is None


@pytest.mark.slow
def test_what_an_object_carries_is_passed_on(moto: Server) -> None:
    store = open_store(f"{moto.bucket()}/run")
    assert isinstance(store, S3Store)
    store.ask(
        "put_object", Key="run/a", Body=os.urandom(6 * MIB), Metadata={"owner": "me"},
        StorageClass="STANDARD_IA", ContentType="application/x-weights",
        Tagging="team=x&cost=a%20b",
    )  # fmt: skip
    info = store.stat("a")
    assert info is not None
    store.compose("b", [b"head", ObjectRange("a", 0, info.size, info.etag)], like="a")
    head = store.ask("head_object", Key="run/b")
    assert (head["Metadata"], head["ContentType"]) == ({"owner": "me"}, "application/x-weights")
    tags = store.ask("get_object_tagging", Key="run/b")["TagSet"]
    assert {one["Key"]: one["Value"] for one in tags} == {"team": "x", "cost": "a b"}


def test_a_listing_goes_on_over_its_pages(moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"{moto.bucket()}/many")
    stores.together([f"{n:05}" for n in range(25)], lambda key: store.put(key, b""), 8)
    monkeypatch.setattr(s3, "_KEYS", 10)
    before = store.traffic.requests
    assert len(store.list()) == 25
    assert store.traffic.requests - before == 3


def test_a_missing_bucket_is_named(ministack: Server) -> None:
    with pytest.raises(UsageError, match=r"s3://no-such-bucket-here does not exist"):
        open_store("s3://no-such-bucket-here/x").list()


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_with_an_unknown_code_is_one_of_the_credential(cloud: Cloud, status: int) -> None:
    """Servers other than Amazon's have codes of their own."""
    store = open_simulated(cloud, "s3://bucket/run")

    def strike(method: str, key: str, is_after: bool) -> None:
        raise refusal(status, "Unauthorized", "ListObjectsV2")

    cloud.strike = strike
    words = (
        r"run: Unauthorized: this credential is not allowed to do this \(ListObjectsV2\); "
        "next: aws sts get-caller-identity"
    )
    with pytest.raises(StoreError, match=words):
        store.list()


def test_an_address_in_the_place_of_a_bucket_is_named(
    ministack: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "for a server other than Amazon's: export AWS_ENDPOINT_URL_S3="
    with pytest.raises(UsageError, match=f"host:9000 is not a valid bucket name; next, {words}"):
        open_store("s3://host:9000/bucket").list()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(
        StoreError, match=f"Could not connect.*; {words}.*; next: run the same command again"
    ):
        open_store("s3://bucket/x").list()


S3_LIMITS = Abilities(composes=True, least_part=5 * MIB, most_copied=5 << 30, most_parts=10_000)


def _range(length: int, offset: int = 0) -> ObjectRange:
    return ObjectRange("k", offset, length, "e")


@pytest.mark.parametrize(
    ("pieces", "travels"),
    [
        ([b"h" * 100, _range(2 << 30)], 5 * MIB),
        ([b"h" * 100, _range(5 * MIB)], 5 * MIB + 100),
        ([b"h" * 100, _range(10 * MIB)], 5 * MIB),
        ([_range(3), _range(7 << 40)], 5 * MIB),
        ([b"h" * (20 * MIB), _range(1 << 30), b"t" * 10], 25 * MIB + 10),
        ([_range(6 * MIB), b"x", _range(2 * MIB), _range(9 * MIB), _range(1)], 5 * MIB),
        ([_range(1)], 1),
        ([b""], 0),
    ],
)
def test_parts_keep_the_limits_and_little_travels(pieces: list[Piece], travels: int) -> None:
    parts = plan_parts(pieces, S3_LIMITS)
    assert len(parts) <= S3_LIMITS.most_parts
    assert all(part.length >= 5 * MIB for part in parts[:-1])
    assert all(part.length <= 5 << 30 for part in parts)
    assert sum(part.length for part in parts if not part.is_copied) <= travels
    flat = [piece for part in parts for piece in part.pieces]
    assert _spelled(flat) == _spelled(pieces), "every byte, once and in its order"


@given(
    st.lists(
        st.one_of(
            st.binary(min_size=0, max_size=40).map(lambda data: data * 3),
            st.tuples(st.integers(0, 50), st.integers(1, 400)).map(
                lambda two: ObjectRange("a", two[0] * 1000, two[1], "e")
            ),
        ),
        max_size=12,
    )
)
@example([bytes(120), ObjectRange("a", 0, 30, "e"), b"end"])
def test_parts_of_any_pieces_keep_the_limits(pieces: list[Piece]) -> None:
    limits = Abilities(composes=True, least_part=50, most_copied=120, most_parts=10_000)
    parts = plan_parts(pieces, limits)
    assert all(part.length >= 50 for part in parts[:-1])
    assert all(part.length <= 120 for part in parts if part.is_copied)
    assert all(len(part.pieces) == 1 for part in parts if part.is_copied)
    flat = [piece for part in parts for piece in part.pieces]
    assert all(len(one) if isinstance(one, bytes) else one.length > 0 for one in flat)
    assert _spelled(flat) == _spelled(pieces)


def _spelled(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces with neighbours joined, so that cuts do not matter."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, bytes):
            if isinstance(last, bytes):
                found[-1] = last + piece
            elif piece:
                found.append(piece)
        elif (
            isinstance(last, ObjectRange)
            and last.key == piece.key
            and last.offset + last.length == piece.offset
        ):
            found[-1] = last._replace(length=last.length + piece.length)
        else:
            found.append(piece)
    return found
