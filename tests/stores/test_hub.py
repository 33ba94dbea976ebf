"""The Hugging Face hub, against a small one on this machine: reads at one commit, and one commit
for many writes.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfix import check, repair, seal, undo, verify
from ckptfix.conversion.uploading import upload
from ckptfix.errors import ChangedError, CkptfixError, StoreError, UsageError
from ckptfix.storage.hub import HubStore
from ckptfix.storage.stores import ABSENT, ObjectRange, open_store, together
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
    whole = store.compose("b", [ObjectRange("a", 0, second.size, second.etag)])
    part = store.compose("c", [b"head", ObjectRange("a", 3, 9, second.etag)])
    assert store.list() == {"a": second, "b": whole, "c": part}
    assert store.read("c", 0, 13) == b"headtwotwotwo"
    store.delete("a", expected=second.etag)
    assert sorted(store.list()) == ["b", "c"]
    assert len(hub.commits) == 1 + 5


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


def test_commits_of_two_threads_wait_for_each_other(hub: Hub, store: HubStore) -> None:
    def work(number: int) -> None:
        with store.atomically(f"{number}"):
            store.put(f"{number}/a", b"one", expected=ABSENT)
            store.put(f"{number}/b", b"two", expected=ABSENT)

    together(range(4), work)
    assert len(below(hub)) == 8
    assert sorted(hub.titles) == ["0", "1", "2", "3", "begin"]


def test_many_writes_are_one_commit_or_none(hub: Hub, store: HubStore) -> None:
    hub.write({"run/checkpoint_7/old": BIG})
    with store.atomically("many"):
        store.put("a", b"one")
        store.compose("new", [ObjectRange("old", 0, len(BIG), "")])
        store.delete("old")
        store.put("lock", b"mine")
        store.delete("lock")
        assert sorted(store.list()) == ["a", "new"]
        assert list(open_store(URL).list()) == ["old"]  # who opens it anew reads what is committed
        assert store.read("new", 1, 5) == BIG[1:6]
        store.put("b/c", b"below")
        assert store.below("b").read("c", 1, 3) == b"elo"
        store.below("b").delete("c")
        assert store.children() == (store.list(), [])
        assert len(hub.commits) == 2
    assert len(hub.commits) == 3
    assert below(hub) == {"a": b"one", "new": BIG}
    assert hub.sent < LARGE  # the hub copies a complete large file by itself

    def attempt(then: Callable[[], object]) -> None:
        with store.atomically("none"):
            store.put("b", b"two")
            then()

    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 // 0)
    with pytest.raises(ChangedError, match="another commit came"):
        attempt(lambda: hub.write({"README": b"in between"}))
    assert below(hub) == {"a": b"one", "new": BIG}


@pytest.mark.parametrize("fault", ["cut", "lost", "503"])
def test_a_commit_whose_request_or_answer_was_lost(hub: Hub, store: HubStore, fault: str) -> None:
    struck: list[str] = []

    def strike(method: str, path: str) -> str | None:
        if "/commit/" in path and not struck:
            struck.append(path)
            return fault
        return None

    hub.strike = strike
    with store.atomically("many"):
        store.put("a", b"one", expected=ABSENT)
        store.put("b", b"two", expected=ABSENT)
    assert struck
    assert below(hub) == {"a": b"one", "b": b"two"}
    assert hub.titles == ["begin", "many"]


def test_messages_lead_on(hub: Hub, store: HubStore) -> None:
    for url, words in {
        "hf://me": "names no repository",
        "hf://datasets/me": "names no repository",
        "hf://buckets/me/run": "names no repository",
        "hf://me/none/x": "hf auth login",
        f"hf://{REPO}@none/x": "name another one",
    }.items():
        with pytest.raises(UsageError, match=words):
            open_store(url).list()
    for status, words in {
        "401": "next: hf auth login",
        "403": "may write",
        "400": "ckptfix help stores",
    }.items():
        hub.strike = lambda method, path, status=status: status if "/commit/" in path else None  # type: ignore[misc]
        with pytest.raises(StoreError, match=words) as caught:
            store.put("a", b"one")
        assert "nothing was changed" in str(caught.value)
        assert "hf_secret" not in str(caught.value)
    hub.strike = lambda method, path: "503" if "/commit/" in path else None
    with pytest.raises(StoreError, match="no file changed, or all of them in one commit"):
        store.put("a", b"one")
    hub.ignored.add("a")
    with pytest.raises(UsageError, match="gitignore"):
        store.put("a", b"one")


def test_a_checkpoint_is_read(hub: Hub) -> None:
    fill(hub, GOLDEN)
    assert str(check(URL, data=True)).replace(URL, str(GOLDEN)) == str(check(GOLDEN, data=True))
    assert str(verify(URL, data=True)).replace(URL, str(GOLDEN)) == str(verify(GOLDEN, data=True))


@pytest.mark.parametrize(
    "fixture", ["student-teacher-wrapper-safetensors", "sharded-gpt2-nested", "lone-nested-train"]
)
def test_a_repair_is_one_commit_and_its_undo_another(hub: Hub, fixture: str) -> None:
    fill(hub, FIXTURES / fixture / "checkpoint")
    before = hub.tree
    receipt = repair(URL, transfer=True)
    assert receipt.steps
    assert receipt.status == check(URL).status
    assert len(hub.commits) == 3
    assert below(hub) != before
    undo(URL, transfer=True)
    assert hub.tree == before
    assert hub.titles == ["begin", "by hand", "ckptfix repair", "ckptfix undo"]


def test_a_repair_that_moves_and_deletes_sends_no_tensors(hub: Hub) -> None:
    fill(hub, GOLDEN)
    before = hub.tree
    receipt = repair(URL)
    assert receipt.steps
    assert len(hub.commits) == 3
    assert hub.sent < 20_000
    undo(URL, transfer=True)
    assert hub.tree == before


def test_bytes_that_must_travel_are_asked_for(hub: Hub) -> None:
    fill(hub, FIXTURES / "lone-nested-train" / "checkpoint")
    with pytest.raises(
        UsageError, match=r"must travel: .* down and .* up; nothing was changed; .*--transfer"
    ):
        repair(URL)
    with pytest.raises(UsageError, match="make a branch"):
        repair(URL, output=f"hf://{REPO}/run/copy", transfer=True)
    assert len(hub.commits) == 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "lost", "500", "403"])
def test_a_repair_whose_hub_fails_from_a_request_on_is_whole_or_not_there(
    hub: Hub, fault: str
) -> None:
    fill(hub, FIXTURES / "lone-nested-train" / "checkpoint")
    before = hub.tree
    asked = len(hub.asked)
    repair(URL, transfer=True)
    after = below(hub)
    count = len(hub.asked) - asked
    undo(URL, transfer=True)
    assert hub.tree == before
    ends = set()
    for at in sampled(range(1, count + 1)):
        start = len(hub.asked)
        hub.strike = lambda method, path, last=start + at: fault if len(hub.asked) >= last else None  # type: ignore[misc]
        words = ""
        try:
            repair(URL, transfer=True)
        except CkptfixError as error:
            words = str(error)
        hub.strike = lambda method, path: None
        ends.add(hub.tree == before)
        if hub.tree == before:
            assert words
            assert "complete" not in words
            continue
        assert below(hub) == after
        assert "nothing was changed" not in words
        undo(URL, transfer=True)
        assert hub.tree == before
    assert True in ends
    assert repair(URL, transfer=True).steps


def test_a_repair_that_meets_another_commit_changes_nothing(hub: Hub) -> None:
    fill(hub, FIXTURES / "lone-nested-train" / "checkpoint")
    hub.strike = lambda method, path: (
        hub.write({"README": b"in between"}) if "/commit/" in path else None
    )
    with pytest.raises(
        ChangedError, match=r"another commit came since .* nothing was changed; next: "
    ):
        repair(URL, transfer=True)
    assert hub.titles == ["begin", "by hand", "by hand"]


def test_seal_and_upload_are_one_commit_each(hub: Hub, tmp_path: Path) -> None:
    fill(hub, FIXTURES / "lone-nested-train" / "checkpoint")
    repair(URL, transfer=True)
    assert seal(URL).written
    assert verify(URL, data=True).is_verified
    assert hub.titles[3:] == ["ckptfix seal"]
    other = f"hf://{REPO}/other/checkpoint_1"
    upload(FIXTURES / "sharded-gpt2-nested" / "checkpoint", other)
    assert len(hub.titles) == 5
    assert "other/checkpoint_1/.ckptfix/committed.json" in hub.tree
    assert check(other).findings == check(FIXTURES / "sharded-gpt2-nested" / "checkpoint").findings
    with pytest.raises(UsageError, match="--overwrite"):
        upload(GOLDEN, other)
    upload(GOLDEN, other, overwrite=True)
    assert len(hub.titles) == 6
    names = {
        path.removeprefix("other/checkpoint_1/") for path in hub.tree if path.startswith("other/")
    }
    files = {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*") if path.is_file()}
    assert {name for name in names if not name.startswith(".ckptfix/")} == files
