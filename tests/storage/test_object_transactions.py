"""Transactions on objects, killed, refused and raced at every request: every name is the old object
or the new one.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

import msgspec
import pytest

from ckptfix.errors import ChangedError, CkptfixError, JournalError, LockedError, OperationError
from ckptfix.storage import object_journal, stores
from ckptfix.storage.edits import Edit, Move, Remove, Replace
from ckptfix.storage.object_journal import (
    LOCK,
    Stage,
    found_transactions,
    read_state,
    store_lock,
    write_state,
)
from ckptfix.storage.recipes import ABSENT, KEPT, Literal, Range, Recipe
from ckptfix.storage.stores import ObjectInfo, ObjectRange, Store
from tests.sampling import is_exhaustive, sampled
from tests.storage.objects import backend_of, commit_edits, recover, undo
from tests.stores.simulated_s3 import (
    Cloud,
    KillAt,
    Killed,
    SimulatedStore,
    Stretch,
    cloud,
    digest,
    open_simulated,
    read,
    refusal,
)

__all__ = ["cloud"]

URL = "s3://simulated/run/checkpoint_7"
PREFIX = "run/checkpoint_7/"
MIB = 1 << 20
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = PurePosixPath("model.safetensors.index.json")
HEAD, NEW_HEAD = b"old header " * 100, b"new header, which is longer " * 100


def fill(cloud: Cloud) -> None:
    """Write two shards with an index, a duplicate, an entry to be moved, and what nothing
    changes.
    """
    for number, name in enumerate(SHARDS):
        cloud.write(PREFIX + name, (HEAD, Stretch(number, 0, 40 * MIB)), owner="a user")
    cloud.write(PREFIX + str(INDEX), b'{"old": 1}')
    cloud.write(PREFIX + "optimizer.bin", (b"optimizer", Stretch(7, 0, 9 * MIB)))
    cloud.write(PREFIX + "optimizer_1.bin", (b"OPTIMIZER", Stretch(7, 0, 9 * MIB), b"!"))
    cloud.write(PREFIX + "optimizer_2.bin", b"the last one")
    cloud.write(PREFIX + "states/.metadata", b"old metadata")
    cloud.write(PREFIX + "states/__0_0.distcp", (Stretch(9, 0, MIB),))
    cloud.write(PREFIX + ".ckptfix/manifest.json", b"old manifest")
    cloud.write("run/checkpoint_70/model.safetensors", b"a neighbour")


def anew(cloud: Cloud, *, is_encrypted: bool = False) -> None:
    """Make the bucket new. Its parts are small: in a sweep over hundreds of points megabytes take
    time, not sense.
    """
    cloud.__init__(1 << 12, is_encrypted=is_encrypted)  # type: ignore[misc]
    fill(cloud)


def edits() -> list[Edit]:
    """Rename in both shards, write their index, drop a duplicate, move the next entry to its
    place.
    """
    made: list[Edit] = []
    for name in SHARDS:
        path = PurePosixPath(name)
        made.append(
            Replace(
                path=path,
                content=Recipe(pieces=(Literal(NEW_HEAD), Range(path, len(HEAD), 40 * MIB))),
                previous=Recipe(pieces=(Literal(HEAD), Range(path, len(NEW_HEAD), 40 * MIB))),
            )
        )
    first, second, third = (PurePosixPath(f"optimizer{end}.bin") for end in ("", "_1", "_2"))
    back = Recipe(pieces=(Literal(b"OPTIMIZER"), Range(first, 9, 9 * MIB), Literal(b"!")))
    metadata, own = PurePosixPath("states/.metadata"), PurePosixPath("states/__ckptfix_0.distcp")
    manifest = PurePosixPath(".ckptfix/manifest.json")
    made += [
        Replace(
            path=INDEX,
            content=Recipe(pieces=(Literal(b'{"new": 2}'),)),
            previous=Recipe(pieces=(Literal(b'{"old": 1}'),)),
        ),
        Remove(path=second, previous=back),
        Move(source=third, target=second),
        Replace(path=own, content=Recipe(pieces=(Literal(b"new items"),)), previous=ABSENT),
        Replace(path=metadata, content=Recipe(pieces=(Literal(b"new metadata"),)), previous=KEPT),
        Replace(path=manifest, content=Recipe(pieces=(Literal(b"new manifest"),)), previous=KEPT),
    ]
    return made


def commit(
    store: Store, *, verify: Callable[[], None] = lambda: None, break_lock: bool = False
) -> int:
    infos = store.list()
    with store_lock(store, "repair", break_lock=break_lock) as lock:
        backend_of(store, lock).recover()
        return commit_edits(
            store,
            lock,
            edits(),
            listed=infos,
            indexes=[INDEX, PurePosixPath("states/.metadata")],
            prove=verify,
        )


@pytest.fixture
def store(cloud: Cloud) -> SimulatedStore:
    anew(cloud)
    return open_simulated(cloud, URL)


NEW = {
    PREFIX + SHARDS[0]: digest((NEW_HEAD, Stretch(0, 0, 40 * MIB))),
    PREFIX + SHARDS[1]: digest((NEW_HEAD, Stretch(1, 0, 40 * MIB))),
    PREFIX + str(INDEX): digest((b'{"new": 2}',)),
    PREFIX + "optimizer.bin": digest((b"optimizer", Stretch(7, 0, 9 * MIB))),
    PREFIX + "optimizer_1.bin": digest((b"the last one",)),
    PREFIX + "states/.metadata": digest((b"new metadata",)),
    PREFIX + "states/__ckptfix_0.distcp": digest((b"new items",)),
    PREFIX + "states/__0_0.distcp": digest((Stretch(9, 0, MIB),)),
    PREFIX + ".ckptfix/manifest.json": digest((b"new manifest",)),
    "run/checkpoint_70/model.safetensors": digest((b"a neighbour",)),
}


def old_names() -> dict[str, str]:
    fresh = Cloud()
    fill(fresh)
    return fresh.names()


def test_all_names_change_and_an_undo_restores_every_byte(
    cloud: Cloud, store: SimulatedStore
) -> None:
    before = {key: one.body for key, one in cloud.objects.items()}
    assert commit(store) == 1
    assert cloud.names() == NEW
    # Of what the recipes rebuild nothing is kept; what they do not know stays until the undo.
    assert cloud.journal() == [
        PREFIX + ".ckptfix/0001.objects/" + name
        for name in ("kept/6", "kept/7", "plan", "state.json")
    ]
    assert not cloud.uploads
    assert cloud.objects[PREFIX + SHARDS[0]].metadata["owner"] == "a user"
    undo(store)
    assert {key: digest(one.body) for key, one in cloud.objects.items()} == {
        key: digest(body) for key, body in before.items()
    }
    assert read(cloud.objects[PREFIX + "optimizer_1.bin"].body) == read(
        before[PREFIX + "optimizer_1.bin"]
    )
    assert cloud.objects[PREFIX + SHARDS[0]].metadata["owner"] == "a user"


def test_few_bytes_travel(cloud: Cloud) -> None:
    fill(cloud)
    store = open_simulated(cloud, URL)
    commit(store)
    # The first part of each shard has at least 5 MiB.
    assert store.traffic.down < 2 * 5.2 * MIB + (1 << 16)
    assert store.traffic.up < 2 * 5.2 * MIB + (1 << 16)


def test_two_repairs_are_undone_in_their_order(cloud: Cloud, store: SimulatedStore) -> None:
    before = cloud.names()
    commit(store)
    infos = store.list()
    path = PurePosixPath("states/__0_0.distcp")
    with store_lock(store, "repair") as lock:
        number = commit_edits(store, lock, [Remove(path=path, previous=KEPT)], listed=infos)
    assert number == 2
    assert PREFIX + str(path) not in cloud.objects
    undo(store, 2)
    assert cloud.names() == NEW
    undo(store, 1)
    assert cloud.names() == before
    assert cloud.journal() == []


def test_an_earlier_repair_waits_for_a_later_one(store: SimulatedStore) -> None:
    commit(store)
    path = PurePosixPath("optimizer.bin")
    with store_lock(store, "repair") as lock:
        commit_edits(store, lock, [Remove(path=path, previous=KEPT)], target="optimizer.bin")
    with pytest.raises(
        ChangedError, match=r"undo 2 first: ckptfix undo s3://simulated/run/checkpoint_7/opt"
    ):
        undo(store, 1)


def names_are_old_or_new(cloud: Cloud, old: dict[str, str]) -> None:
    for key, found in cloud.names().items():
        assert found in {old.get(key), NEW.get(key)}, f"{key} is half new"
    for key in old.keys() & NEW.keys():
        assert key in cloud.names(), f"{key} is gone"


def stage_of(store: Store, number: int) -> str | None:
    for found in found_transactions(store.list()):
        if found.number == number and found.has_begun:
            return read_state(store, found).stage.value
    return None


def requests_of(action: Callable[[SimulatedStore], object], *, undoing: bool) -> int:
    cloud = Cloud()
    anew(cloud)
    store = open_simulated(cloud, URL)
    if undoing:
        commit(store)
    before = cloud.requests
    action(store)
    return cloud.requests - before


def points(
    action: Callable[[SimulatedStore], object], *, undoing: bool
) -> Iterator[tuple[int, bool]]:
    count = requests_of(action, undoing=undoing)
    for at in sampled(range(1, count + 1)):
        yield at, False
        yield at, True


def test_the_copy_of_a_deleted_duplicate_goes_though_its_run_was_killed(
    cloud: Cloud, store: SimulatedStore
) -> None:
    duplicate = next(edit for edit in edits() if isinstance(edit, Remove))

    def strike(method: str, key: str, is_after: bool) -> None:
        if method == "delete_object" and "/kept/" in key:
            raise Killed

    cloud.strike = strike
    with suppress(Killed), store_lock(store, "repair") as lock:
        commit_edits(store, lock, [duplicate])
    cloud.strike = lambda method, key, is_after: None
    assert any("/kept/" in key for key in cloud.journal())
    recover(store)
    assert cloud.journal() == [
        PREFIX + ".ckptfix/0001.objects/" + name for name in ("plan", "state.json")
    ]
    undo(store)
    assert cloud.names() == old_names()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["repair", "undo"])
def test_killed_at_any_request_the_next_run_finishes_or_rolls_back(cloud: Cloud, verb: str) -> None:
    undoing = verb == "undo"
    action: Callable[[SimulatedStore], object] = undo if undoing else commit
    old = old_names()
    ends = set()
    for at, is_after in points(action, undoing=undoing):
        anew(cloud)
        store = open_simulated(cloud, URL)
        if undoing:
            commit(store)
        cloud.strike = KillAt(at, is_after=is_after)
        with suppress(Killed):
            action(store)
        cloud.strike = lambda method, key, is_after: None
        names_are_old_or_new(cloud, old)
        stage = stage_of(store, 2 if undoing else 1)
        if stage == "staging":
            assert cloud.names() == (NEW if undoing else old), "a name changed before the commit"
        recover(store)
        names = cloud.names()
        assert names in (
            old,
            NEW,
        ), f"a mixture after the next run ({verb}, request {at}, after: {is_after})"
        if not undoing:
            assert (names == NEW) == (stage in ("commit", "done")), (
                "rolled back after the commit, or finished before it"
            )
        ends.add(names == NEW)
        if names == old:
            assert cloud.journal() == []
            assert commit(store) == 1
        undo(store)
        assert cloud.names() == old
        assert cloud.journal() == []
    assert ends == {True, False}


@pytest.mark.slow
def test_killed_again_while_it_recovers(cloud: Cloud) -> None:
    """Killed in the middle of the names, and again at every request of the run that finishes
    them.
    """
    old = old_names()
    anew(cloud)
    store = open_simulated(cloud, URL)

    def broken() -> None:
        anew(cloud)
        placed = 0

        def strike(method: str, key: str, is_after: bool) -> None:
            nonlocal placed
            is_name = method == "complete_multipart_upload" and "/.ckptfix/" not in key
            placed += is_name and is_after
            if placed == 2:
                raise Killed

        cloud.strike = strike
        with suppress(Killed):
            commit(store)
        cloud.strike = lambda method, key, is_after: None

    broken()
    before = cloud.requests
    recover(store)
    assert cloud.names() == NEW
    for at in sampled(range(1, cloud.requests - before + 1)):
        for is_after in (False, True):
            broken()
            cloud.strike = KillAt(at, is_after=is_after)
            with suppress(Killed):
                recover(store)
            cloud.strike = lambda method, key, is_after: None
            names_are_old_or_new(cloud, old)
            recover(store)
            assert cloud.names() == NEW
            undo(store)
            assert cloud.names() == old
            assert cloud.journal() == []


def failure_of(action: Callable[[], object]) -> OperationError | None:
    try:
        action()
    except OperationError as error:
        return error
    return None


CONDITIONAL = {
    "put_object",
    "complete_multipart_upload",
    "upload_part_copy",
    "get_object",
    "delete_object",
}
FAULTS = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "409": (409, "ConditionalRequestConflict"),
    "412": (412, "PreconditionFailed"),
    "403": (403, "ExpiredToken"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("times", [1, 99])
def test_a_fault_at_any_request_leaves_no_mixture_behind(
    cloud: Cloud, fault: str, times: int
) -> None:
    old = old_names()
    finished = 0
    requests = requests_of(commit, undoing=False)
    assert requests > 60
    for at in sampled(range(1, requests + 1)):
        anew(cloud)
        store = open_simulated(cloud, URL)
        seen = 0

        def strike(method: str, key: str, is_after: bool, at: int = at) -> None:
            nonlocal seen
            if not is_after:
                seen += 1
                if at <= seen < at + times and (fault != "412" or method in CONDITIONAL):
                    raise refusal(*FAULTS[fault], method)

        cloud.strike = strike
        error = failure_of(lambda: commit(store))  # noqa: B023
        cloud.strike = lambda method, key, is_after: None
        assert error is None or "next" in str(error) or "nothing was changed" in str(error), error
        if error is not None and not isinstance(error, JournalError):
            # The last request lists the repaired folder.
            assert cloud.names() == (NEW if "is complete" in str(error) else old), error
        names_are_old_or_new(cloud, old)
        recover(store)
        assert cloud.names() in (old, NEW)
        finished += cloud.names() == NEW
    assert finished or times == 99
    if times == 1 and fault in ("500", "503", "409"):
        assert finished == len(sampled(range(1, requests + 1))), (
            "a fault that passes must not end the repair"
        )


@pytest.mark.parametrize("method", ["put_object", "complete_multipart_upload"])
def test_a_writer_right_after_a_write_is_noticed(cloud: Cloud, method: str) -> None:
    """The object of another program, though it has the same size, must not pass for the new one."""
    anew(cloud)
    store = open_simulated(cloud, URL)
    size = (8 << 12) if method == "complete_multipart_upload" else 10

    def strike(asked: str, key: str, is_after: bool) -> None:
        if asked == method and is_after:
            cloud.write(PREFIX + "a", b"x" * size)

    store.put("b", b"y" * size)
    info = store.stat("b")
    assert info is not None
    cloud.strike = strike
    pieces = [ObjectRange("b", 0, size, info.etag)] if size > 10 else [b"y" * size]
    with pytest.raises(ChangedError):
        store.compose("a", pieces, expected=stores.ABSENT)


@pytest.mark.parametrize("name", [SHARDS[0], "optimizer_1.bin"])
def test_an_object_that_another_program_deletes_during_the_commit_is_named(
    cloud: Cloud, store: SimulatedStore, name: str
) -> None:
    """S3 answers a condition on an object that has gone with 404, and not with 412."""

    def strike(method: str, key: str, is_after: bool) -> None:
        if method == "complete_multipart_upload" and not is_after and key == PREFIX + name:
            cloud.objects.pop(key, None)

    cloud.strike = strike
    with pytest.raises(
        JournalError, match=f"{name}: another program deleted this object"
    ) as caught:
        commit(store)
    assert "run the same command again to finish" in str(caught.value)


def test_a_conflict_that_ends_an_upload_is_no_success(cloud: Cloud, store: SimulatedStore) -> None:
    """S3 answers 409 while another program writes there; the upload is gone then, and what is there
    is not ours.
    """
    size = 8 << 12
    store.put("b", b"y" * size)
    info = store.stat("b")
    assert info is not None

    def strike(method: str, key: str, is_after: bool) -> None:
        if method == "complete_multipart_upload" and not is_after and cloud.uploads:
            cloud.uploads.clear()
            cloud.write(PREFIX + "a", b"x" * size)
            raise refusal(409, "ConditionalRequestConflict", method)

    cloud.strike = strike
    with pytest.raises(ChangedError, match="another program wrote this object"):
        store.compose("a", [ObjectRange("b", 0, size, info.etag)], expected=stores.ABSENT)
    assert store.read("a", 0, 1) == b"x"


def test_the_parts_of_killed_uploads_go(cloud: Cloud) -> None:
    """No listing shows them, and somebody pays for them; those of other programs stay."""
    anew(cloud)
    store = open_simulated(cloud, URL)
    store.ask("create_multipart_upload", Key=PREFIX + "optimizer.bin")

    def kill(method: str, key: str, is_after: bool) -> None:
        if method == "complete_multipart_upload" and "/new/" in key:
            cloud.strike = die
            raise Killed

    def die(method: str, key: str, is_after: bool) -> None:
        raise Killed

    cloud.strike = kill
    with pytest.raises(Killed):
        commit(store)
    cloud.strike = lambda method, key, is_after: None
    assert len(cloud.uploads) > 1
    recover(store)
    assert [one["key"] for one in cloud.uploads.values()] == [PREFIX + "optimizer.bin"]


@pytest.mark.slow
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_lost_answer_is_no_other_writer(cloud: Cloud, is_encrypted: bool) -> None:
    """The connection is cut after the server has done its work: at every request, the repair
    finishes.
    """
    for at in sampled(range(1, requests_of(commit, undoing=False) + 1)):
        anew(cloud, is_encrypted=is_encrypted)
        store = open_simulated(cloud, URL)
        seen = 0

        def strike(method: str, key: str, is_after: bool, at: int = at) -> None:
            nonlocal seen
            if is_after:
                seen += 1
                if seen == at:
                    raise ConnectionResetError("connection reset by peer")

        cloud.strike = strike
        commit(store)
        cloud.strike = lambda method, key, is_after: None
        assert cloud.names() == NEW
        undo(store)
        assert cloud.names() == old_names()
        assert cloud.journal() == []


@pytest.mark.slow
def test_another_writer_stops_the_repair_before_anything_is_changed(cloud: Cloud) -> None:
    """A job saves an object at any request before the commit: its bytes stay, and all others are as
    they were.
    """
    old = old_names()
    for at in sampled(range(1, requests_of(commit, undoing=False) + 1)):
        anew(cloud)
        store = open_simulated(cloud, URL)
        seen = 0

        def strike(method: str, key: str, is_after: bool, at: int = at) -> None:
            nonlocal seen
            seen += is_after
            if is_after and seen == at:
                cloud.write(PREFIX + SHARDS[1], b"a new save")

        cloud.strike = strike
        ours = digest((b"a new save",))
        error = failure_of(lambda: commit(store))  # noqa: B023
        if seen < at:  # what the server refuses has no answer after which something could happen
            assert error is None
            continue
        assert cloud.names()[PREFIX + SHARDS[1]] == ours, "the new save is lost"
        assert error is None or SHARDS[1] in str(error), error
        if error is not None and not isinstance(error, JournalError):
            assert cloud.names() == {**old, PREFIX + SHARDS[1]: ours}


def test_a_failed_proof_leaves_everything_as_it_was(cloud: Cloud, store: SimulatedStore) -> None:
    before = cloud.names()

    def fail() -> None:
        assert cloud.names() == before
        raise OperationError("the keys after the repair are not those of the plan")

    with pytest.raises(OperationError, match="nothing was changed"):
        commit(store, verify=fail)
    assert cloud.names() == before
    assert cloud.journal() == []


def test_one_repair_at_a_time(cloud: Cloud, store: SimulatedStore) -> None:
    other = open_simulated(cloud, URL)

    def race() -> None:
        with pytest.raises(LockedError, match=r"ckptfix repair by .* has held this lock"):
            commit(other)

    commit(store, verify=race)
    assert cloud.names() == NEW


def test_a_lock_that_is_taken_over_stops_its_old_owner(cloud: Cloud, store: SimulatedStore) -> None:
    """A run that was held for dead goes on, while another one has taken over, rolled back, and
    repaired.
    """
    other, numbers = open_simulated(cloud, URL), list[int]()
    with pytest.raises(JournalError, match="finishes this transaction or rolls it back"):
        commit(store, verify=lambda: numbers.append(commit(other, break_lock=True)))
    assert numbers == [1]
    assert cloud.names() == NEW
    assert not [key for key in cloud.journal() if "/new/" in key or key.endswith("lock")]
    undo(store)
    assert cloud.names() == old_names()


def test_a_lock_that_is_taken_over_stops_its_old_owner_between_two_names(
    cloud: Cloud, store: SimulatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its undo was finished meanwhile, and repaired again: some names are in the state again that
    it expects.
    """
    commit(store)
    was_taken: list[bool] = []

    def write(*arguments: Any) -> ObjectInfo:
        info = write_state(*arguments)
        if arguments[2].stage is Stage.COMMIT and not was_taken:
            was_taken.append(True)
            recover(open_simulated(cloud, URL))
            commit(open_simulated(cloud, URL))
        return info

    monkeypatch.setattr("ckptfix.storage.object_backend.write_state", write)
    with pytest.raises(
        LockedError, match=r"another run took over this lock.*; next: wait until the other run"
    ):
        undo(store)
    assert cloud.names() == NEW
    undo(store)
    assert cloud.names() == old_names()


def test_a_lock_is_named_with_its_owner_age_and_command(
    cloud: Cloud, store: SimulatedStore
) -> None:
    cloud.strike = KillAt(12, is_after=True)
    with suppress(Killed):
        commit(store)
    cloud.strike = lambda method, key, is_after: None
    body = json.loads(read(cloud.objects[PREFIX + LOCK].body))
    body["since"] -= 7300
    cloud.write(PREFIX + LOCK, json.dumps(body).encode())
    with pytest.raises(LockedError) as caught:
        commit(store)
    words = str(caught.value)
    assert f"repair by {body['user']} on {body['host']} (process {body['pid']})" in words
    assert "has held this lock since 20" in words
    assert f"ckptfix repair --break-lock {URL}" in words
    assert commit(store, break_lock=True) == 1


@pytest.mark.parametrize("name", [SHARDS[0], "optimizer.bin", "optimizer_2.bin"])
def test_an_undo_refuses_after_another_write(
    cloud: Cloud, store: SimulatedStore, name: str
) -> None:
    commit(store)
    cloud.write(PREFIX + name, b"a new save")
    before = cloud.names()
    with pytest.raises(ChangedError, match="nothing was undone"):
        undo(store)
    assert cloud.names() == before


@pytest.mark.parametrize("name", ["plan", "state.json"])
def test_no_field_of_a_journal_is_taken_for_another_type(
    cloud: Cloud, store: SimulatedStore, name: str
) -> None:
    """Its sha256 is right: another program can have written it."""
    commit(store)
    (found,) = object_journal.found_transactions(store.list(".ckptfix"))
    key = f"{PREFIX}.ckptfix/0001.objects/{name}"
    head, _, literals = read(cloud.objects[key].body).partition(b"\n")[2].partition(b"\n")
    body = json.loads(head)
    fields = sorted(body.keys() - {"token", "version"})
    assert fields == sorted(
        (
            object_journal.ObjectPlan if name == "plan" else object_journal.ObjectState
        ).__struct_encode_fields__
    )

    def read_with(body: dict[str, Any]) -> object:
        cloud.write(key, object_journal._sealed(body, literals))
        here = object_journal.found_transactions(store.list(".ckptfix"))[0]
        if name == "state.json":
            return object_journal.read_state(store, here)
        # The state names the sha256 of its plan.
        state = object_journal.read_state(store, found)
        return object_journal.read_plan(store, here, msgspec.structs.replace(state, plan=""))

    assert read_with(body)
    for field in fields:
        with pytest.raises(JournalError, match="cannot be read"):
            read_with({each: value for each, value in body.items() if each != field})
        for value in (-1, 1 << 70, 1.5, True, "text", None, [None], {"../x": [0, "", 0]}):
            # A summary is any value, and JSON has one kind of numbers.
            is_right = field == "summary" or (field == "created" and type(value) is int)
            if is_right or (
                type(value) is type(body[field]) and not isinstance(value, list | dict)
            ):
                continue
            with pytest.raises(JournalError, match="cannot be read"):
                read_with({**body, field: value})


@pytest.mark.parametrize("name", ["plan", "state.json"])
def test_a_damaged_journal_is_named(cloud: Cloud, store: SimulatedStore, name: str) -> None:
    commit(store)
    key = f"{PREFIX}.ckptfix/0001.objects/{name}"
    data = read(cloud.objects[key].body)
    for at in (0, 70, len(data) // 2, len(data) - 1):
        cloud.write(key, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(JournalError, match=r"aws s3 rm --recursive .*0001\.objects/"):
            undo(store)
    assert cloud.names() == NEW


def test_an_undo_that_would_restore_other_bytes_is_refused_before_anything(
    cloud: Cloud, store: SimulatedStore
) -> None:
    path = PurePosixPath(SHARDS[0])
    wrong = Replace(
        path=path,
        content=Recipe(pieces=(Literal(NEW_HEAD), Range(path, len(HEAD), 40 * MIB))),
        previous=Recipe(pieces=(Literal(HEAD[::-1]), Range(path, len(NEW_HEAD), 40 * MIB))),
    )
    shifted = Replace(
        path=path,
        content=Recipe(pieces=(Literal(NEW_HEAD), Range(path, len(HEAD), 40 * MIB))),
        previous=Recipe(
            pieces=(Literal(HEAD), Range(path, len(NEW_HEAD) + 1, 40 * MIB - 1), Literal(b"x"))
        ),
    )
    infos = store.list()
    for edit in (wrong, shifted):
        with store_lock(store, "repair") as lock, pytest.raises(OperationError, match="restore"):
            commit_edits(store, lock, [edit], listed=infos)
    assert cloud.names() == old_names()
    assert cloud.journal() == []


def test_every_exhaustive_point_is_one_request() -> None:
    """The sweeps above see every request: a repair of nine names sends this many."""
    assert 60 < requests_of(commit, undoing=False) < 200
    assert isinstance(is_exhaustive(), bool)
    assert issubclass(LockedError, CkptfixError)


def test_an_index_follows_its_files_and_the_manifest_everything(
    cloud: Cloud, store: SimulatedStore
) -> None:
    order: list[str] = []

    def strike(method: str, key: str, is_after: bool) -> None:
        is_name = "/.ckptfix/" not in key or key.endswith("manifest.json")
        if is_after and is_name and method in ("complete_multipart_upload", "delete_object"):
            order.append(key.removeprefix(PREFIX))

    def ranks(names: list[str]) -> list[int]:
        late = {
            str(INDEX): 1,
            "states/.metadata": 1,
            "optimizer_2.bin": 2,
            ".ckptfix/manifest.json": 3,
        }
        return [late.get(name, 0) for name in names]

    cloud.strike = strike
    commit(store)
    assert len(order) == 8
    assert ranks(order) == sorted(ranks(order))
    order.clear()
    undo(store)
    back = {
        "states/__ckptfix_0.distcp": 2,
        "optimizer_2.bin": 0,
        str(INDEX): 1,
        "states/.metadata": 1,
    }
    found = [3 if name.endswith("manifest.json") else back.get(name, 0) for name in order]
    assert found == sorted(found)


def test_a_writer_during_the_proof_stops_the_repair_before_the_commit(
    cloud: Cloud, store: SimulatedStore
) -> None:
    before = cloud.names()
    with pytest.raises(ChangedError, match="nothing was changed"):
        commit(store, verify=lambda: cloud.write(PREFIX + SHARDS[1], b"a new save"))
    assert cloud.names() == {**before, PREFIX + SHARDS[1]: digest((b"a new save",))}
    assert cloud.journal() == []


@pytest.mark.parametrize(
    "name", [SHARDS[0], "optimizer_1.bin", "optimizer_2.bin", "states/__ckptfix_0.distcp"]
)
def test_an_object_that_another_program_wrote_after_the_commit_is_left_alone(
    cloud: Cloud, store: SimulatedStore, name: str
) -> None:
    """Killed right after the commit; then a job writes an object of the very size that the new one
    has.
    """

    def strike(method: str, key: str, is_after: bool) -> None:
        if is_after and stage_of(open_simulated(quiet, URL), 1) == "commit":
            raise Killed

    quiet = Cloud()
    quiet.objects = cloud.objects
    cloud.strike = strike
    with suppress(Killed):
        commit(store)
    cloud.strike = lambda method, key, is_after: None
    assert cloud.names() == old_names()
    sizes = {
        SHARDS[0]: len(NEW_HEAD) + 40 * MIB,
        "optimizer_1.bin": 12,
        "states/__ckptfix_0.distcp": 9,
    }
    cloud.write(PREFIX + name, (Stretch(99, 0, sizes.get(name, 12)),))
    foreign = cloud.names()[PREFIX + name]
    for _ in range(2):
        with pytest.raises(JournalError, match="another program wrote this object") as caught:
            recover(store)
        assert name in str(caught.value)
        assert "aws s3 rm --recursive" in str(caught.value)
        assert cloud.names()[PREFIX + name] == foreign


def killed_after_the_commit(cloud: Cloud, store: SimulatedStore, edits: list[Edit]) -> None:
    quiet = Cloud()
    quiet.objects = cloud.objects

    def strike(method: str, key: str, is_after: bool) -> None:
        if is_after and stage_of(open_simulated(quiet, URL), 1) == "commit":
            raise Killed

    cloud.strike = strike
    with suppress(Killed), store_lock(store, "repair") as lock:
        commit_edits(store, lock, edits)
    cloud.strike = lambda method, key, is_after: None
    assert cloud.names() == old_names()


def test_nothing_is_deleted_once_the_original_of_a_duplicate_has_changed(
    cloud: Cloud, store: SimulatedStore
) -> None:
    """The duplicate has the only copy of these bytes then."""
    duplicate = next(edit for edit in edits() if isinstance(edit, Remove))
    killed_after_the_commit(cloud, store, [duplicate])
    before = cloud.objects[PREFIX + "optimizer.bin"]
    cloud.write(PREFIX + "optimizer.bin", b"of a new save")
    for _ in range(2):
        with pytest.raises(JournalError, match=r"optimizer\.bin: .* nothing was deleted"):
            recover(store)
        assert cloud.names()[PREFIX + "optimizer_1.bin"] == old_names()[PREFIX + "optimizer_1.bin"]
        assert any("/kept/" in key for key in cloud.journal())
    cloud.objects[PREFIX + "optimizer.bin"] = before
    assert recover(store) == 1
    assert PREFIX + "optimizer_1.bin" not in cloud.names()
    undo(store)
    assert cloud.names() == old_names()


def test_a_recovery_whose_lock_is_taken_over_stops(cloud: Cloud, store: SimulatedStore) -> None:
    killed_after_the_commit(cloud, store, edits())
    with store_lock(store, "repair", break_lock=True) as lock:
        cloud.write(PREFIX + LOCK, b"another run")
        with pytest.raises(LockedError):
            backend_of(store, lock).recover()
    assert cloud.names() == old_names()
