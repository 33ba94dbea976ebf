"""The Hugging Face hub, against a small one on this machine: reads, and one commit for a folder."""

import hashlib
from contextlib import suppress
from pathlib import Path

import pytest

from ckptfix import check, plan_repair, repair, seal, undo, verify
from ckptfix.conversion.uploading import upload
from ckptfix.errors import ChangedError, CkptfixError, OperationError, StoreError, UsageError
from ckptfix.storage.hub import HubStore
from ckptfix.storage.stores import ABSENT, ObjectRange, open_store, together
from ckptfix.storage.uploads import remove_checkpoint
from tests.sampling import sampled
from tests.stores.simulated_hub import LARGE, REPO, Hub, hub

__all__ = ["hub"]

# huggingface_hub sends files in a way that its client of HTTP calls old.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

ROOT = Path(__file__).parents[2] / "fixtures"
GOLDEN = ROOT / "golden" / "doubled-model" / "checkpoint"
FIXTURES = ROOT / "accelerate-1.15.0"
URL = f"hf://{REPO}/run/checkpoint_7"
BIG = bytes(range(256)) * 20


def fill(hub: Hub, folder: Path) -> None:
    """Commit a folder, as its user did."""
    files = {f"run/checkpoint_7/{path.relative_to(folder)}": path for path in folder.rglob("*")}
    hub.write({name: path.read_bytes() for name, path in files.items() if path.is_file()})


def below(hub: Hub) -> dict[str, bytes]:
    """Return the files of the checkpoint, but for the journal."""
    start = "run/checkpoint_7/"
    return {
        path.removeprefix(start): data
        for path, data in hub.tree.items()
        if path.startswith(start) and "/.ckptfix/0" not in path
    }


def names_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def store(hub: Hub) -> HubStore:
    store = open_store(URL)
    assert isinstance(store, HubStore)
    return store


def test_listings_and_ranges(hub: Hub, store: HubStore) -> None:
    files = {
        "run/checkpoint_7/a #1": b"small",
        "run/checkpoint_7/b/c/d.bin": BIG,
        "run/checkpoint_70/e": b"e",
    }
    hub.write({**files, "run/checkpoint_7/f": b"", "top": b"t"})
    assert {key: info.size for key, info in store.list().items()} == {
        "a #1": 5,
        "b/c/d.bin": len(BIG),
        "f": 0,
    }
    assert store.list()["b/c/d.bin"].etag == hashlib.sha256(BIG).hexdigest()
    assert {key: store.stat(key) for key in store.list()} == store.list()
    assert (store.stat("b"), store.stat("none"), open_store(f"{URL}/none").list()) == (
        None,
        None,
        {},
    )
    assert store.folders() == ["b"]
    assert open_store(f"hf://{REPO}").folders() == ["run"]
    assert open_store(f"hf://{REPO}/run").folders() == ["checkpoint_7", "checkpoint_70"]
    assert store.below("b").list() == {"c/d.bin": store.list()["b/c/d.bin"]}
    assert store.below("b/c").read("d.bin", 300, 1000) == BIG[300:1300]
    info = store.list()["b/c/d.bin"]
    assert store.read("b/c/d.bin", 300, 1000, etag=info.etag) == BIG[300:1300]
    assert store.read("a #1", 1, 3) == b"mal"
    hub.has_etags = False
    assert store.read("b/c/d.bin", 300, 1000, etag=info.etag) == BIG[300:1300]
    hub.has_etags = True
    hub.write({"run/checkpoint_7/b/c/d.bin": BIG + b"!"})
    for hub.has_etags in (False, True):
        with pytest.raises(ChangedError, match="changed while it was read"):
            store.read("b/c/d.bin", 300, 1000, etag=info.etag)
    old = list(hub.commits)[1]
    assert open_store(f"hf://{REPO}@{old}/run/checkpoint_7").list()["b/c/d.bin"] == info
    with pytest.raises(UsageError, match="never changes"):
        open_store(f"hf://{REPO}@{old}/run").put("a", b"a")


def test_a_write_is_a_commit_with_its_condition(hub: Hub, store: HubStore) -> None:
    first = store.put("a", b"one", expected=ABSENT)
    assert store.list() == {"a": first}
    with pytest.raises(ChangedError):
        store.put("a", b"two", expected=ABSENT)
    second = store.put("a", b"two" * LARGE, expected=first.etag)
    assert store.stat("a") == second
    with pytest.raises(ChangedError):
        store.delete("a", expected=first.etag)
    part = store.compose("c", [b"head", ObjectRange("a", 3, 9, second.etag)])
    assert store.list() == {"a": second, "c": part}
    assert store.read("c", 0, 13) == b"headtwotwotwo"
    store.delete("a", expected=second.etag)
    assert sorted(store.list()) == ["c"]
    assert len(hub.commits) == 1 + 4


def test_a_write_meets_a_commit_of_somebody_else(hub: Hub, store: HubStore) -> None:
    commits = 0

    def strike(method: str, path: str) -> None:
        nonlocal commits
        if "/commit/" in path:
            commits += 1
            if commits == 1:
                hub.write({"README": b"in between"})

    hub.strike = strike
    store.put("a", b"one", expected=ABSENT)
    assert hub.tree == {"README": b"in between", "run/checkpoint_7/a": b"one"}


def test_threads_that_write_by_themselves_make_a_commit_each(hub: Hub, store: HubStore) -> None:
    together(range(8), lambda number: store.put(f"{number}", b"one", expected=ABSENT))
    assert sorted(below(hub)) == [str(number) for number in range(8)]
    assert len(hub.commits) == 1 + 8


@pytest.mark.parametrize("fault", ["cut", "lost", "503"])
def test_a_commit_whose_request_or_answer_was_lost(hub: Hub, fault: str) -> None:
    struck: list[str] = []

    def strike(method: str, path: str) -> str | None:
        if "/commit/" in path and not struck:
            struck.append(path)
            return fault
        return None

    hub.strike = strike
    upload(GOLDEN, URL)
    assert struck
    assert {name for name in below(hub) if not name.startswith(".ckptfix/")} == names_of(GOLDEN)
    assert len(hub.titles) == 2


def test_messages_lead_on(hub: Hub, store: HubStore) -> None:
    for url, words in {
        "hf://me": "has no repository",
        "hf://datasets/me": "has no repository",
        "hf://buckets/me/run": "has no repository",
        "hf://me/none/x": "hf auth login",
        f"hf://{REPO}@none/x": "choose an existing one",
    }.items():
        with pytest.raises(UsageError, match=words):
            open_store(url).list()
    for status, words in {
        "401": "next: hf auth login",
        "403": "next: hf auth login, with a token that has write access",
        "400": "ckptfix help stores",
    }.items():
        hub.strike = lambda method, path, status=status: status if "/commit/" in path else None  # type: ignore[misc]
        with pytest.raises(StoreError, match=words) as caught:
            store.put("a", b"one")
        assert "hf_secret" not in str(caught.value)
    hub.strike = lambda method, path: "503" if "/commit/" in path else None
    with pytest.raises(StoreError, match=r"failed to answer 5 times .*503"):
        store.put("a", b"one")
    hub.ignored.add("a")
    with pytest.raises(UsageError, match="gitignore"):
        store.put("a", b"one")


def test_a_checkpoint_is_read(hub: Hub) -> None:
    fill(hub, GOLDEN)
    assert str(check(URL, data=True)).replace(URL, str(GOLDEN)) == str(check(GOLDEN, data=True))
    assert str(verify(URL, data=True)).replace(URL, str(GOLDEN)) == str(verify(GOLDEN, data=True))


def test_nothing_is_repaired_in_place(hub: Hub, tmp_path: Path) -> None:
    fill(hub, FIXTURES / "lone-nested-train" / "checkpoint")
    before = hub.tree
    for change in (repair, undo, plan_repair):
        with pytest.raises(
            UsageError, match=r"does not change files on the hub; next: hf download"
        ):
            change(URL)
    assert hub.tree == before


def test_an_upload_meets_other_commits(hub: Hub) -> None:
    commits: list[str] = []

    def meet(files: dict[str, bytes | None]) -> None:
        def strike(method: str, path: str) -> None:
            if "/commit/" in path and not commits:
                commits.append(path)
                hub.write(files)

        commits.clear()
        hub.strike = strike

    # Of another folder: the same commit is made on top of it.
    meet({"README": b"in between"})
    upload(GOLDEN, URL)
    assert {name for name in below(hub) if not name.startswith(".ckptfix/")} == names_of(GOLDEN)
    # Of a file that the upload replaces: nothing is changed.
    meet({"run/checkpoint_7/model.safetensors": b"by another program"})
    with pytest.raises(OperationError, match="another commit was made meanwhile"):
        upload(FIXTURES / "lone-nested-train" / "checkpoint", URL, overwrite=True)
    assert hub.titles[-1] == "by hand"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "lost", "500", "403"])
def test_an_upload_whose_hub_fails_from_a_request_on_is_whole_or_not_there(
    hub: Hub, fault: str
) -> None:
    asked = len(hub.asked)
    upload(GOLDEN, URL)
    count, ends = len(hub.asked) - asked, set()
    for at in sampled(range(1, count + 1)):
        hub.write(dict.fromkeys(hub.tree))
        start = len(hub.asked)
        hub.strike = lambda method, path, last=start + at: fault if len(hub.asked) >= last else None  # type: ignore[misc]
        with suppress(CkptfixError):
            upload(GOLDEN, URL)
        hub.strike = lambda method, path: None
        left = {name for name in below(hub) if not name.startswith(".ckptfix/")}
        assert left in (set(), names_of(GOLDEN))
        ends.add(bool(left))
        assert not left or check(URL).findings == check(GOLDEN).findings
    assert False in ends


def test_seal_and_upload(hub: Hub) -> None:
    fill(hub, FIXTURES / "sharded-gpt2" / "checkpoint")
    assert seal(URL).written
    assert verify(URL, data=True).is_verified
    assert len(hub.titles) == 3
    other = f"hf://{REPO}/other/checkpoint_1"
    upload(FIXTURES / "sharded-gpt2-nested" / "checkpoint", other)
    assert len(hub.titles) == 4
    assert "other/checkpoint_1/.ckptfix/committed.json" in hub.tree
    assert check(other).findings == check(FIXTURES / "sharded-gpt2-nested" / "checkpoint").findings
    with pytest.raises(UsageError, match="--overwrite"):
        upload(GOLDEN, other)
    upload(GOLDEN, other, overwrite=True)
    assert len(hub.titles) == 5
    names = {
        path.removeprefix("other/checkpoint_1/") for path in hub.tree if path.startswith("other/")
    }
    assert {name for name in names if not name.startswith(".ckptfix/")} == names_of(GOLDEN)
    remove_checkpoint(open_store(other))
    assert not any(path.startswith("other/") for path in hub.tree)
    assert len(hub.titles) == 6
