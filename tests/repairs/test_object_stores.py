"""Repair and undo of checkpoints in object stores: the same objects as a repair of the same folder,
killed anywhere.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from ckptfix import CkptfixError, Policy, UsageError, check, repair, seal, undo, verify
from ckptfix.checkpoint.roles import Role
from ckptfix.cli import run as cli
from ckptfix.diagnosis.policy import Keys
from ckptfix.errors import ChangedError, JournalError, LockedError, OperationError
from ckptfix.repairs.receipt import RepairReceipt
from ckptfix.repairs.repair import plan_repair
from ckptfix.storage import object_copies, store_files, stores
from ckptfix.storage.files import StorePath
from ckptfix.storage.markers import UPLOAD, begun_now
from ckptfix.storage.paths import COMMITTED
from ckptfix.storage.stores import ObjectRange
from tests.checkpoint.test_second_prepare import of_twin_towers, run_of
from tests.sampling import one_of, sampled
from tests.stores.servers import objects_of, upload_folder
from tests.stores.simulated_s3 import Cloud, KillAt, Killed, cloud, open_simulated, read, refusal

__all__ = ["cloud"]

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"
URL = "s3://simulated/run/checkpoint_7"
PREFIX = "run/checkpoint_7/"

SCENARIOS = {
    "drop": ("wrapper-safetensors", Policy()),
    "drop and renumber": ("student-teacher-wrapper-bin", Policy()),
    "drop two and a zip": ("triple-bin", Policy()),
    "drop and renumber headers": ("student-teacher-wrapper-safetensors", Policy()),
    "a zip": ("lone-nested-train", Policy()),
    "rename": ("lone-nested-safetensors", Policy()),
    "rename shards and index": ("sharded-gpt2-nested", Policy()),
    "a DCP folder": ("../golden/nested-prefix-dcp", Policy(allow=frozenset({"nested-prefix"}))),
}
ADAPTER = {
    "keys of an adapter": ("../golden/dead-adapter-name", Policy()),
    "one of two families": (
        "../golden/stale-family-shards",
        Policy(families=frozenset({"model.safetensors"})),
    ),
    "keys for from_pretrained": ("../golden/dead-weights", Policy()),
}
Objects = dict[str, bytes]


def put(cloud: Cloud, folder: Path, *, is_encrypted: bool = False) -> Objects:
    """Make the bucket new, and upload a folder."""
    cloud.__init__(1 << 10, is_encrypted=is_encrypted)  # type: ignore[misc]
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            cloud.write(PREFIX + path.relative_to(folder).as_posix(), path.read_bytes())
    return objects(cloud)


def objects(cloud: Cloud) -> Objects:
    """Return every object of the checkpoint but those of the journal."""
    return {key.removeprefix(PREFIX): read(cloud.objects[key].body) for key in cloud.names()}


def files(folder: Path) -> Objects:
    """Return every file of a folder but those of the journal."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and (".ckptfix" not in path.parts or path.name == "manifest.json")
    }


@pytest.fixture
def bucket(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    for module in (stores, store_files, object_copies):
        monkeypatch.setattr(module, "open_store", lambda url: open_simulated(cloud, url))
    yield cloud
    cloud.strike = lambda method, key, is_after: None


@pytest.mark.parametrize("name", SCENARIOS | ADAPTER)
def test_a_repair_in_a_store_is_that_of_the_folder(
    bucket: Cloud, tmp_path: Path, name: str
) -> None:
    fixture, policy = (SCENARIOS | ADAPTER)[name]
    old = put(bucket, FIXTURES / fixture / "checkpoint")
    shutil.copytree(FIXTURES / fixture / "checkpoint", tmp_path / "checkpoint_7")
    here = repair(
        tmp_path / "checkpoint_7",
        policy=Policy(allow=policy.allow, families=policy.families, atomic=True),
    )
    there = repair(URL, policy=policy)
    assert here.steps
    assert objects(bucket) == files(tmp_path / "checkpoint_7")
    assert list(map(str, there.steps)) == list(map(str, here.steps))
    assert there.transaction == 1
    assert f"to undo: ckptfix undo {URL}" in str(there)
    again = repair(URL)
    assert not again.steps
    assert check(URL).status == check(tmp_path / "checkpoint_7").status
    undone = undo(URL)
    assert list(undone.steps) == list(map(str, here.steps))
    assert objects(bucket) == old
    assert bucket.journal() == []
    with pytest.raises(UsageError, match="there is no repair to undo"):
        undo(URL)


GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"
ALLOWED = {
    "allow": frozenset(
        {"trailing-bytes", "index-mismatch", "wrapper-prefix", "entry-gap", "shifted-entries"}
    )
}
POLICIES = {"plain": {}, "bare": {"keys": Keys.BARE}, "all": ALLOWED}


@pytest.mark.parametrize("case", sampled(sorted(path.name for path in GOLDEN.iterdir())))
@pytest.mark.parametrize("policy", POLICIES)
def test_every_golden_folder_is_repaired_as_on_a_disk(
    bucket: Cloud, tmp_path: Path, case: str, policy: str
) -> None:
    """The same objects, findings and words, DCP folders included; or the same refusal; and every
    byte back.
    """
    folder = tmp_path / "checkpoint_7"
    shutil.copytree(GOLDEN / case / "checkpoint", folder)
    old = put(bucket, folder)
    here: object
    there: object
    try:
        here = repair(folder, policy=Policy(atomic=True, **POLICIES[policy]))  # type: ignore[arg-type]
    except CkptfixError as error:
        here = type(error)
    try:
        there = repair(URL, policy=Policy(**POLICIES[policy]))  # type: ignore[arg-type]
    except CkptfixError as error:
        there = type(error)
    assert objects(bucket) == files(folder)
    if not isinstance(here, RepairReceipt) or not isinstance(there, RepairReceipt):
        assert there == here
        return
    assert list(map(str, there.steps)) == list(map(str, here.steps))
    assert sorted(one.code for one in there.left) == sorted(one.code for one in here.left)
    assert there.status == here.status
    if here.transaction is not None:
        undo(URL)
    assert objects(bucket) == old
    assert bucket.journal() == [] or here.transaction is None


def test_one_object_is_repaired_and_the_manifest_follows(bucket: Cloud) -> None:
    old = put(bucket, FIXTURES / "lone-nested-safetensors" / "checkpoint")
    name = next(name for name in old if name.endswith(".safetensors"))
    receipt = repair(f"{URL}/{name}")
    assert len(receipt.steps) == 1
    changed = {key for key, data in objects(bucket).items() if data != old.get(key)}
    assert changed == {name}
    undo(f"{URL}/{name}")
    assert objects(bucket) == old


def test_the_plan_of_a_dry_run_is_applied_or_refused(
    bucket: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    old = put(bucket, FIXTURES / "lone-nested-safetensors" / "checkpoint")
    receipt = repair(URL, dry_run=True)
    assert receipt.steps
    bucket.write(f"{PREFIX}model.safetensors", old["model.safetensors"])
    assert cli(["repair", URL, "--dry-run"]) == 1
    command = f"ckptfix repair {URL} --expect {receipt.digest}"
    assert capsys.readouterr().out.endswith(f"to apply exactly this plan: {command}\n")
    assert objects(bucket) == old
    assert bucket.journal() == []
    changed = bytearray(old["model.safetensors"])
    changed[-1] ^= 1
    bucket.write(f"{PREFIX}model.safetensors", bytes(changed))
    assert cli(command.split()[1:]) == 3, "an object of the same size"
    assert f"next: ckptfix repair {URL} --dry-run" in capsys.readouterr().err
    assert objects(bucket) == {**old, "model.safetensors": bytes(changed)}
    assert bucket.journal() == []
    bucket.write(f"{PREFIX}model.safetensors", old["model.safetensors"])
    assert cli([*command.split()[1:], "-q"]) == 0
    assert objects(bucket) != old
    assert cli(["undo", URL, "-q"]) == 0
    assert objects(bucket) == old


def test_the_plan_says_which_bytes_travel(
    bucket: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    put(bucket, FIXTURES / "lone-nested-safetensors" / "checkpoint")
    assert cli(["repair", URL, "--dry-run"]) == 1
    assert "between this machine and the store:" in capsys.readouterr().out
    plan = plan_repair(URL)
    assert plan.execute().transaction == 1
    assert "and the store copies" not in str(plan)
    with pytest.raises(
        UsageError, match=f"^{URL}: this plan was already executed.*call plan_repair again"
    ):
        plan.execute()


def test_a_repair_does_not_act_on_what_could_not_be_read(bucket: Cloud) -> None:
    """The failure was caught on its way while the repair was planned, by whoever read something
    unimportant.
    """
    old = put(bucket, FIXTURES / "lone-nested-safetensors" / "checkpoint")
    plan = plan_repair(URL)
    root = plan.target.root
    assert isinstance(root, StorePath)
    bucket.strike = lambda method, key, is_after: strike(method)

    def strike(method: str) -> None:
        raise refusal(403, "AccessDenied", method)

    with suppress(CkptfixError):
        root.files.read_many([ObjectRange("model.safetensors", 0, 8, "")])
    bucket.strike = lambda method, key, is_after: None
    with pytest.raises(CkptfixError, match=r"is not allowed to do this.*nothing was changed"):
        plan.execute()
    assert objects(bucket) == old
    assert bucket.journal() == []


def test_a_repair_from_before_an_upload_is_in_the_way_of_no_undo(
    bucket: Cloud, tmp_path: Path
) -> None:
    # Two repairs of the folder; the second one of a checkpoint that was damaged again.
    for _ in range(2):
        shutil.copytree(
            FIXTURES / "lone-nested-safetensors" / "checkpoint",
            tmp_path / "new",
            dirs_exist_ok=True,
        )
        repair(tmp_path / "new")
    old = put(bucket, tmp_path / "new")
    assert repair(URL, policy=Policy(keys=Keys.BARE)).transaction == 1
    undo(URL)
    assert objects(bucket) == old
    with pytest.raises(
        UsageError, match=r"changed the folder before the upload.*next: ckptfix undo FOLDER"
    ):
        undo(URL)
    assert objects(bucket) == old


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of(SCENARIOS))
@pytest.mark.parametrize("verb", ["repair", "undo"])
def test_killed_at_any_request_it_is_old_or_new(bucket: Cloud, name: str, verb: str) -> None:
    fixture, policy = SCENARIOS[name]
    action: Callable[..., object] = partial(repair, policy=policy) if verb == "repair" else undo

    def fresh() -> Objects:
        old = put(bucket, FIXTURES / fixture / "checkpoint")
        if verb == "undo":
            repair(URL, policy=policy)
        return old

    old = fresh()
    before = bucket.requests
    action(URL)
    count = bucket.requests - before
    put(bucket, FIXTURES / fixture / "checkpoint")
    repair(URL, policy=policy)
    new = objects(bucket)
    ends = set()
    for at in sampled(range(1, count + 1)):
        for is_after in (False, True):
            fresh()
            bucket.strike = KillAt(at, is_after=is_after)
            with suppress(Killed):
                action(URL)
            bucket.strike = lambda method, key, is_after: None
            for key, data in objects(bucket).items():
                assert data in (old.get(key), new.get(key)), f"{key} is half new"
            # What is there is named, the next run finishes or rolls back, and then all is as if
            # nothing had happened.
            with suppress(CkptfixError):
                check(URL)
            repair(URL, policy=policy, break_lock=True)
            assert objects(bucket) == new
            ends.add(bool(bucket.journal()))
            undo(URL)
            assert objects(bucket) == old, f"{verb} killed at request {at}, after it: {is_after}"
            assert bucket.journal() == []
    assert ends == {True}


COPY = "s3://simulated/run/repaired_7"
COPIED = "run/repaired_7/"


def copied(cloud: Cloud) -> Objects:
    """Return every object of the copy but the records of its upload."""
    found = {
        key.removeprefix(COPIED): one
        for key, one in cloud.objects.items()
        if key.startswith(COPIED)
    }
    return {key: read(one.body) for key, one in found.items() if key not in (UPLOAD, COMMITTED)}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_repaired_copy_is_proven_before_its_marker(
    bucket: Cloud, tmp_path: Path, name: str
) -> None:
    fixture, policy = SCENARIOS[name]
    put(bucket, FIXTURES / fixture / "checkpoint")
    shutil.copytree(FIXTURES / fixture / "checkpoint", tmp_path / "checkpoint_7")
    here = repair(tmp_path / "checkpoint_7", policy=Policy(allow=policy.allow, atomic=True))
    before = dict(bucket.objects)
    receipt = repair(URL, policy=policy, output=COPY)
    assert receipt.transaction is None
    assert f"in {COPY}" in str(receipt)
    assert receipt.status == here.status
    assert copied(bucket) == files(tmp_path / "checkpoint_7")
    assert {key: one for key, one in bucket.objects.items() if key.startswith(PREFIX)} == before
    assert COPIED + COMMITTED in bucket.objects
    assert check(COPY).status == check(tmp_path / "checkpoint_7").status
    with pytest.raises(UsageError, match="name an empty prefix"):
        repair(URL, policy=policy, output=COPY)


def test_a_copy_that_was_killed_has_no_marker(bucket: Cloud) -> None:
    folder = FIXTURES / "sharded-gpt2-nested" / "checkpoint"
    put(bucket, folder)
    before = bucket.requests
    repair(URL, output=COPY)
    complete = copied(bucket)
    for at in sampled(range(1, bucket.requests - before + 1)):
        old = put(bucket, folder)
        bucket.strike = KillAt(at, is_after=bool(at % 2))
        with suppress(Killed):
            repair(URL, output=COPY)
        bucket.strike = lambda method, key, is_after: None
        assert objects(bucket).items() >= old.items()
        if COPIED + COMMITTED in bucket.objects:
            assert copied(bucket) == complete
        elif copied(bucket):
            assert COPIED + UPLOAD in bucket.objects
            with pytest.raises(UsageError, match=r"objects?; next: name an empty prefix$"):
                repair(URL, output=COPY)


@pytest.mark.parametrize("output", [None, f"{URL}-copy"])
def test_a_checkpoint_whose_upload_has_not_ended_is_not_repaired(
    bucket: Cloud, output: str | None
) -> None:
    """The upload may be under way, and would fail; and a copy would get the marker that the upload
    lacks.
    """
    put(bucket, FIXTURES / "wrapper-safetensors" / "checkpoint")
    bucket.write(
        f"{PREFIX}{UPLOAD}", begun_now("7", {"model.safetensors": 636, "late.bin": 1}).to_bytes()
    )
    before = dict(bucket.objects)
    with pytest.raises(
        UsageError, match=rf"1 of 2 files arrived.*nothing was changed; next.* FOLDER {URL}, or"
    ):
        repair(URL, output=output)
    assert bucket.objects == before


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("s3://other/run/repaired_7", "a store can only copy within one bucket"),
        (
            f"{URL}/inside",
            f"/inside overlaps the source; next: name another prefix, such as {URL}-repaired",
        ),
        ("s3://simulated/run", "/run overlaps the source"),
        (f"{URL}/", f"{URL} overlaps the source"),
        ("repaired_7", "repaired_7 is a local path"),
    ],
)
def test_a_copy_elsewhere_is_refused(bucket: Cloud, output: str, why: str) -> None:
    put(bucket, FIXTURES / "lone-nested-safetensors" / "checkpoint")
    before = dict(bucket.objects)
    with pytest.raises(UsageError, match=why):
        repair(URL, output=output)
    assert bucket.objects == before


def test_a_copy_whose_source_is_written_meanwhile_is_removed(bucket: Cloud) -> None:
    old = put(bucket, FIXTURES / "sharded-gpt2-nested" / "checkpoint")
    name = next(name for name in old if name.endswith(".safetensors"))

    def strike(method: str, key: str, is_after: bool) -> None:
        if key == COPIED + UPLOAD and is_after and method == "put_object":
            bucket.write(PREFIX + name, b"a new save")

    bucket.strike = strike
    with pytest.raises(ChangedError, match="is empty"):
        repair(URL, output=COPY)
    assert not copied(bucket)


def test_what_was_cut_short_is_named_and_finished(
    bucket: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    old = put(bucket, FIXTURES / "sharded-gpt2-nested" / "checkpoint")
    names = 0

    def strike(method: str, key: str, is_after: bool) -> None:
        nonlocal names
        names += method == "complete_multipart_upload" and "/.ckptfix/" not in key and is_after
        if names:
            raise Killed

    bucket.strike = strike
    with suppress(Killed):
        repair(URL)
    bucket.strike = lambda method, key, is_after: None
    assert objects(bucket) != old
    report = check(URL)
    assert [one.code for one in report.findings].count("interrupted-repair") == 1
    assert cli(["check", "-r", URL.rpartition("/")[0], "--json"]) == 1
    (one,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [one["code"] for one in one["findings"]].count("interrupted-repair") == 1
    assert cli(["repair", URL]) == 3
    said = capsys.readouterr()
    assert f"ckptfix repair --break-lock {URL}" in said.err
    assert cli(["repair", URL, "--output", f"{URL}-copy"]) == 3
    assert f"to finish it: ckptfix repair {URL} (or ckptfix undo {URL}," in capsys.readouterr().err
    assert cli(["undo", URL, "--break-lock"]) == 0
    assert objects(bucket) == old


def test_the_journal_of_a_folder_that_was_uploaded_is_not_taken_for_one_of_objects(
    bucket: Cloud,
) -> None:
    put(bucket, FIXTURES / "lone-nested-safetensors" / "checkpoint")
    bucket.write(f"{PREFIX}.ckptfix/0001.pending/plan.json", b"of a folder")
    before = objects(bucket)
    assert "interrupted-repair" in [one.code for one in check(URL).findings]
    for verb in (repair, undo):
        with pytest.raises(JournalError, match="download the checkpoint, run ckptfix undo there"):
            verb(URL)
    assert objects(bucket) == before


@pytest.mark.parametrize("is_committed", [False, True])
def test_after_ctrl_c_the_message_names_the_state(
    bucket: Cloud, capsys: pytest.CaptureFixture[str], is_committed: bool
) -> None:
    old = put(bucket, FIXTURES / "sharded-gpt2-nested" / "checkpoint")
    interrupted = False

    def strike(method: str, key: str, is_after: bool) -> None:
        nonlocal interrupted
        is_name = "/.ckptfix/" not in key
        if (
            method == "complete_multipart_upload"
            and is_after
            and is_name == is_committed
            and not interrupted
        ):
            interrupted = True
            raise KeyboardInterrupt

    bucket.strike = strike
    assert cli(["repair", URL]) == 130
    said = capsys.readouterr().err
    if is_committed:
        assert f"run ckptfix repair {URL} again to finish" in said
        assert cli(["repair", URL]) == 0
        assert "an interrupted earlier run was finished first" in capsys.readouterr().out
        undo(URL)
    else:
        assert f"{URL} is unchanged" in said
    assert objects(bucket) == old
    assert bucket.journal() == []


@pytest.mark.parametrize("verb", ["repair", "undo"])
def test_ctrl_c_at_any_request_names_the_state_that_is_true(
    bucket: Cloud, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """As when the interrupt comes with the answer to the commit: the journal is then ahead of what
    the run knows.
    """
    fixture = FIXTURES / "lone-nested-safetensors" / "checkpoint"

    def fresh() -> Objects:
        old = put(bucket, fixture)
        if verb == "undo":
            repair(URL)
        return old

    old = fresh()
    first = bucket.requests
    assert cli([verb, URL]) == 0
    count = bucket.requests - first
    put(bucket, fixture)
    repair(URL)
    new = objects(bucket)
    before, after = (old, new) if verb == "repair" else (new, old)
    for at in sampled(range(1, count + 1)):
        for is_after in (False, True):
            fresh()
            capsys.readouterr()
            seen = 0

            def strike(method: str, key: str, done: bool) -> None:
                nonlocal seen
                seen += done == is_after  # noqa: B023
                if seen == at and done == is_after:  # noqa: B023
                    seen += 1
                    raise KeyboardInterrupt

            bucket.strike = strike
            status = cli([verb, URL])
            bucket.strike = lambda method, key, is_after: None
            said = capsys.readouterr().err
            where = f"{verb} interrupted at request {at}, after it: {is_after}: {said}"
            if seen < at:  # what the store refuses has no answer after which something could happen
                continue
            assert status == 130, where
            assert "interrupted: " in said, where
            if f"{URL} is unchanged" in said or "nothing was changed" in said:
                assert objects(bucket) == before, where
                assert cli([verb, URL]) == 0, where  # no lock is left
                assert objects(bucket) == after, where
            elif f"run ckptfix {verb} {URL} again to finish" in said:
                assert cli([verb, URL]) == 0, where
                assert objects(bucket) == after, where
            else:
                assert "is fully repaired" in said or "is undone" in said, where
                assert objects(bucket) == after, where


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a store of fsspec, which cannot compose, and empty it at the end."""
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    yield "memory://run/checkpoint_7"
    fsspec.filesystem("memory").store.clear()


def test_without_part_copies_the_bytes_travel_where_that_is_asked_for(
    memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = upload_folder(FIXTURES / "student-teacher-wrapper-safetensors" / "checkpoint", memory)
    before = objects_of(store)
    assert cli(["repair", memory]) == 2
    said = capsys.readouterr()
    assert "cannot copy parts of objects" in said.err
    assert "the same command with --transfer" in said.err
    assert "could overwrite what another program writes meanwhile" in said.err
    assert objects_of(store) == before
    assert cli(["repair", memory, "--transfer"]) == 0
    assert objects_of(store) != before
    with pytest.raises(UsageError, match="--transfer"):
        undo(memory)
    undo(memory, transfer=True)
    assert objects_of(store) == before
    copy = "memory://run/repaired_7"
    with pytest.raises(UsageError, match="--transfer") as refused:
        repair(memory, output=copy)
    assert str(plan_repair(memory, output=copy).carriage) in str(refused.value)
    repair(memory, output=copy, transfer=True)
    assert not repair(copy).steps
    assert objects_of(store) == before


@pytest.mark.slow
def test_an_undo_that_lost_the_store_is_never_two(bucket: Cloud) -> None:
    """Whoever runs it again, as the message says, must not lose the earlier repair, too."""

    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    second = len(header).to_bytes(8, "little") + header + b"1"
    policy = Policy(allow=frozenset({"no-format-metadata"}))

    def fresh() -> Objects:
        put(bucket, FIXTURES / "lone-nested-safetensors" / "checkpoint")
        repair(URL)
        bucket.write(f"{PREFIX}second.safetensors", second)
        old = objects(bucket)
        assert repair(URL, policy=policy).transaction == 2
        return old

    old = fresh()
    start = bucket.requests
    assert undo(URL).remaining == 1
    for at in sampled(range(1, bucket.requests - start + 1)):
        fresh()
        left = at

        def strike(method: str, key: str, is_after: bool) -> None:
            nonlocal left
            left -= not is_after
            if left <= 0 and not is_after:
                raise refusal(403, "AccessDenied", method)

        bucket.strike = strike
        words = ""
        try:
            undo(URL)
        except CkptfixError as error:
            words = str(error)
        bucket.strike = lambda method, key, is_after: None
        if words and "is complete" not in words:
            assert undo(URL, break_lock=True).remaining == 1, (
                f"refused from request {at} on: {words}"
            )
        assert objects(bucket) == old, f"refused from request {at} on: {words}"


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("name", ["rename", "drop and renumber"])
def test_a_repaired_checkpoint_is_sealed_and_undone_step_by_step(
    bucket: Cloud, capsys: pytest.CaptureFixture[str], name: str, is_encrypted: bool
) -> None:
    """Each undo restores the bytes before its step, also where every write gives an object another
    ETag.
    """
    old = put(bucket, FIXTURES / SCENARIOS[name][0] / "checkpoint", is_encrypted=is_encrypted)
    assert repair(URL).transaction == 1
    repaired = objects(bucket)
    receipt = seal(URL, oms=True)
    assert receipt.transaction == 2
    assert f"to undo this seal (undo it before any earlier repair): ckptfix undo {URL}" in str(
        receipt
    )
    assert verify(URL).status == 0
    sealed = objects(bucket)
    assert seal(URL, oms=True).transaction is None, "nothing is new"
    assert objects(bucket) == sealed
    bucket.write(f"{PREFIX}notes.txt", b"added later")
    assert seal(URL).transaction == 3
    assert undo(URL).remaining == 2
    assert objects(bucket) == {**sealed, "notes.txt": b"added later"}
    assert undo(URL).remaining == 1
    assert objects(bucket) == {**repaired, "notes.txt": b"added later"}
    assert undo(URL).remaining == 0
    assert objects(bucket) == {**old, "notes.txt": b"added later"}
    assert bucket.journal() == []


@pytest.mark.slow
def test_killed_at_any_request_a_seal_and_its_undo_leave_the_way_to_the_next_undo(
    bucket: Cloud,
) -> None:
    def fresh() -> tuple[Objects, Objects]:
        old = put(bucket, FIXTURES / "lone-nested-safetensors" / "checkpoint", is_encrypted=True)
        repair(URL)
        return old, objects(bucket)

    def count(action: Callable[[], object]) -> int:
        start = bucket.requests
        action()
        return bucket.requests - start

    fresh()
    counts = {"seal": count(lambda: seal(URL)), "undo": count(lambda: undo(URL))}
    for verb, is_after in ((verb, is_after) for verb in counts for is_after in (False, True)):
        for at in sampled(range(1, counts[verb] + 1)):
            old, repaired = fresh()
            if verb == "undo":
                seal(URL)
            bucket.strike = KillAt(at, is_after=is_after)
            with suppress(Killed):
                seal(URL) if verb == "seal" else undo(URL)
            bucket.strike = lambda method, key, is_after: None
            repair(URL, break_lock=True)  # finishes, or rolls back
            while (left := undo(URL).remaining) is not None and left:
                assert objects(bucket) == repaired, (verb, at, is_after)
            assert objects(bucket) == old, (verb, at, is_after)
            assert bucket.journal() == []


def test_the_lock_of_a_seal_is_broken_by_a_command_that_exists(bucket: Cloud) -> None:
    put(bucket, FIXTURES / "lone-nested-safetensors" / "checkpoint")
    bucket.strike = KillAt(6, is_after=True)
    with suppress(Killed):
        seal(URL, force=True)
    bucket.strike = lambda method, key, is_after: None
    with pytest.raises(LockedError, match=f"ckptfix repair --break-lock {URL}"):
        seal(URL, force=True)


def test_a_seal_after_a_repair_where_the_bytes_travelled(memory: str) -> None:
    store = upload_folder(FIXTURES / "lone-nested-safetensors" / "checkpoint", memory)
    before = objects_of(store)
    repair(memory, transfer=True)
    assert seal(memory).transaction == 2
    assert verify(memory).status == 0
    assert undo(memory, transfer=True).remaining == 1
    assert undo(memory, transfer=True).remaining == 0
    assert objects_of(store) == before


def test_a_plan_that_would_add_a_finding_changes_no_object(bucket: Cloud, tmp_path: Path) -> None:
    old = put(bucket, of_twin_towers(tmp_path / "checkpoint"))
    keys = set(bucket.names())
    policy = Policy(keep={Role.MODEL: 1})
    for output in (None, "s3://simulated/run/copy"):
        with pytest.raises(
            OperationError, match=r"the repair caused a new finding: optimizer\.bin"
        ):
            repair(URL, policy=policy, output=output)
        assert objects(bucket) == old
        assert set(bucket.names()) == keys


def test_neighbours_below_the_same_prefix_are_evidence(
    bucket: Cloud, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checked alone, by the listing of the run, and by a repair, which downloads none of them."""
    for is_copy, code in ((True, "identical-models"), (False, "doubled-model")):
        bucket.__init__(1 << 10)  # type: ignore[misc]
        for folder in run_of(tmp_path / str(is_copy), is_copy=is_copy):
            for path in folder.iterdir():
                bucket.write(f"run/{folder.name}/{path.name}", path.read_bytes())
        last = "s3://simulated/run/checkpoint-15"
        assert code in [finding.code for finding in check(last).findings]
        capsys.readouterr()
        assert cli(["check", "--recursive", "s3://simulated/run"]) == 1
        assert capsys.readouterr().out.count(code) == (1 if is_copy else 3)
        assert len(repair(last).steps) == (not is_copy)
