"""Records that a checkpoint brings along, damaged by hand: every field of each, one by one.

Whatever a record says, the verbs end with an answer or a CkptfixError; an undo that is refused
touches nothing, and nothing outside the checkpoint is ever touched.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckptfix import CkptfixError, check, latest_checkpoint, repair, undo, verify
from ckptfix.checkpoint.manifest import Manifest, ManifestEntry
from ckptfix.storage.markers import UPLOAD, Begun, Commit, Uploaded
from ckptfix.storage.paths import COMMITTED, JOURNAL, MANIFEST, RECEIPT
from ckptfix.storage.stores import is_url, open_store
from tests.repairs.builders import snapshot
from tests.sampling import sampled

FIXTURES = Path(__file__).parents[1] / "fixtures" / "accelerate-1.15.0"
SOUND = FIXTURES / "clean-safetensors" / "checkpoint"
DOUBLED = FIXTURES / "student-teacher-wrapper-safetensors" / "checkpoint"
CHECKPOINT, EARLIER = "checkpoint_2", "checkpoint_1"
DIGEST = hashlib.sha256(b"").hexdigest()

TEXTS = ("", "\0", "\ud800", "../x", "/x", "x" * 300)
VALUES: tuple[object, ...] = (None, True, -1, 10**400, *TEXTS, [], {}, [None])
AS_WRITTEN = {"far": "1e400", "odd": "NaN"} | {
    f"deep {depth}": "[" * depth + "]" * depth for depth in (800, 100_000)
}
"""Values that json.dumps cannot write, or no other program would write as it does."""


class Placeholder(NamedTuple):
    """A value of ``AS_WRITTEN``."""

    name: str


Files = dict[str, bytes]


class Record(NamedTuple):
    """A record of a checkpoint: its file, and how its JSON lies in it.

    ``unpack`` returns the JSON texts in it; ``pack`` returns the file with one of them replaced.
    """

    path: str
    unpack: Callable[[bytes], list[bytes]]
    pack: Callable[[bytes, int, bytes], bytes]


def plain(path: str) -> Record:
    return Record(path, lambda data: [data], lambda _, __, text: text)


def of_lines(path: str) -> Record:
    def pack(data: bytes, index: int, text: bytes) -> bytes:
        lines = data.splitlines()
        return b"".join(line + b"\n" for line in (*lines[:index], text, *lines[index + 1 :]))

    return Record(path, bytes.splitlines, pack)


def sealed(path: str) -> Record:
    """A line with the sha256 of what follows, as another program can write it, too."""

    def unpack(data: bytes) -> list[bytes]:
        return [data.split(b"\n")[1]]

    def pack(data: bytes, _: int, text: bytes) -> bytes:
        rest = data.split(b"\n", 2)[2]
        is_in_store = f"{JOURNAL}/0001.objects" in path
        content = text + b"\n" + rest if is_in_store else text
        digest = hashlib.sha256(content).hexdigest().encode()
        return digest + b"\n" + text + b"\n" + rest

    return Record(path, unpack, pack)


ALONE = {
    "manifest": plain(MANIFEST), "upload": plain(UPLOAD), "commit marker": plain(COMMITTED),
    "losses": plain("salvage.json"), "receipt": plain(RECEIPT),
    "unfinished save": plain(f"{JOURNAL}/unfinished"),
}  # fmt: skip
DONE = f"{JOURNAL}/0001.done"
OF_A_REPAIR = {
    "plan": sealed(f"{DONE}/plan.json"), "steps": of_lines(f"{DONE}/steps"),
    "after": plain(f"{DONE}/after.json"), "samples": plain(f"{DONE}/samples.json"),
}  # fmt: skip
OBJECTS = f"{JOURNAL}/0001.objects"
OF_A_STORE = {
    "plan in a store": sealed(f"{OBJECTS}/plan"),
    "state in a store": sealed(f"{OBJECTS}/state.json"),
    "lock in a store": plain(f"{JOURNAL}/lock"),
}


def manifest_of(files: Files) -> bytes:
    sizes = {name: len(data) for name, data in files.items()}
    entry = partial(ManifestEntry, index=0, type="a.B", keys=DIGEST)
    return Manifest(
        versions={"torch": "2.9.0"}, world_size=2, step=7,
        models=(entry(file="model.safetensors", aliases={"b": "a"}, digests={"a": DIGEST}),),
        optimizers=(entry(file="optimizer.bin", models=(0,)),),
        schedulers=(entry(file="scheduler.bin", optimizer=0),),
        dataloaders=(entry(file="sampler.bin"),), custom=(entry(file="custom_checkpoint_0.pkl"),),
        files=sizes, sha256={"model.safetensors": DIGEST}, digests_of_save=True,
        range_size=300, ranges={"optimizer.bin": (DIGEST, DIGEST)},
    ).to_bytes()  # fmt: skip


def read_tree(root: Path) -> Files:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def record_of(name: str, files: Files) -> bytes:
    """Return a sound record of a checkpoint with these files."""
    sizes = {path: len(data) for path, data in files.items()}
    objects = {path: Uploaded(size, DIGEST, "e") for path, size in sizes.items()}
    lost = {"path": "model.safetensors", "name": "a", "why": "cut"}
    documents: dict[str, object] = {
        "losses": {"version": 1, "lost": [lost], "damaged": [lost]},
        "receipt": {"version": 1, "to": "safetensors", "files": {"model.safetensors": [636, 5]}},
        "unfinished save": ["model.safetensors", "optimizer.bin"],
    }
    if name == "manifest":
        return manifest_of(files)
    if name == "upload":
        return Begun("x", 1.0, "h", 1, sizes).to_bytes()
    if name == "commit marker":
        return Commit("x", 1.0, objects).to_bytes()
    return json.dumps(documents[name]).encode()


def write_tree(root: Path, files: Files) -> None:
    shutil.rmtree(root, ignore_errors=True)
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder and a store, each with a repair that can be undone."""
    folder = tmp_path_factory.mktemp("repaired") / CHECKPOINT
    files = read_tree(DOUBLED)
    write_tree(folder, {**files, MANIFEST: manifest_of(files)})
    url = f"memory://{os.urandom(6).hex()}/{CHECKPOINT}"
    put(url, read_tree(folder))
    assert repair(folder).transaction == 1
    assert repair(url, transfer=True).transaction == 1
    return folder, url


def put(url: str, files: Files) -> None:
    store = open_store(url)
    for key in store.list():
        store.delete(key)
    for key, data in files.items():
        store.put(key, data)


def objects_of(url: str) -> Files:
    store = open_store(url)
    return {key: store.read(key, 0, info.size) for key, info in store.list().items()}


def damaged(value: Any) -> Iterator[Any]:
    """Yield a value with each of its fields replaced by each odd value, one by one, also with each
    of its keys replaced, and without each of its fields.
    """
    yield from (*VALUES, *map(Placeholder, AS_WRITTEN))
    if isinstance(value, dict):
        for key, inner in value.items():
            rest = {name: each for name, each in value.items() if name != key}
            yield rest
            yield from ({**rest, text: inner} for text in TEXTS)
            yield from ({**value, key: odd} for odd in damaged(inner))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield [*value[:index], *value[index + 1 :]]
            yield from ([*value[:index], odd, *value[index + 1 :]] for odd in damaged(inner))


def as_text(value: Any) -> bytes:
    def marked(value: Any) -> Any:
        if isinstance(value, Placeholder):
            return f"<{value.name}>"
        if isinstance(value, dict):
            return {key: marked(inner) for key, inner in value.items()}
        return [marked(inner) for inner in value] if isinstance(value, list) else value

    text = json.dumps(marked(value), separators=(",", ":"))
    for name, written in AS_WRITTEN.items():
        text = text.replace(f'"<{name}>"', written)
    return text.encode()


def variants(record: Record, data: bytes) -> Iterator[bytes]:
    """Yield the file of a record with each damage of ``damaged``."""
    for index, text in enumerate(record.unpack(data)):
        for value in damaged(json.loads(text)):
            yield record.pack(data, index, as_text(value))


def failures(
    run: str, data: bytes, record: Record, restore: Callable[[], None], now: Callable[[], Files]
) -> Iterator[str]:
    """Yield in words what the verbs make of a damaged record, where that is a fault of theirs.

    ``restore`` writes the checkpoint with the damaged record, ``now`` reads it.
    """
    checkpoint = f"{run}/{CHECKPOINT}"
    verbs: dict[str, Callable[[], object]] = {
        "check": lambda: json.dumps(check(checkpoint, resumes=True).as_json()),
        "latest_checkpoint": lambda: latest_checkpoint(run),
        "verify": lambda: json.dumps(verify(checkpoint).as_json()),
        "undo": lambda: undo(checkpoint, transfer=is_url(run)),
    }
    restore()
    before = now()
    for name, verb in verbs.items():
        what = f"{name}, {record.path}: {data[:200]!r}"
        try:
            verb()
        except CkptfixError:
            if now() != before:
                yield f"{what}: something was changed"
                restore()
        except Exception as error:  # what a user would see as a traceback
            yield f"{what}: {error!r:.200}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*ALONE, *OF_A_REPAIR])
def test_in_a_folder_no_field_of_a_record_is_a_traceback(
    tmp_path: Path, repaired: tuple[Path, str], name: str
) -> None:
    run = tmp_path / "run"
    write_tree(run / EARLIER, read_tree(SOUND))
    record, files = sound(name, repaired)
    faults: list[str] = []
    around = snapshot(run / EARLIER)
    for data in sampled(variants(record, files[record.path])):
        damage = {**files, record.path: data}
        restore = partial(write_tree, run / CHECKPOINT, damage)
        now = partial(without_lock, run / CHECKPOINT)
        faults += failures(str(run), data, record, restore, now)
        assert snapshot(run / EARLIER) == around
        assert os.listdir(tmp_path) == ["run"]
    assert not faults, "\n".join(faults[:20])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*ALONE, *OF_A_STORE])
def test_in_a_store_no_field_of_a_record_is_a_traceback(
    repaired: tuple[Path, str], name: str
) -> None:
    bucket = f"memory://{os.urandom(6).hex()}"
    run = f"{bucket}/run"
    put(f"{run}/{EARLIER}", read_tree(SOUND))
    record, files = sound(name, repaired)
    faults: list[str] = []
    around = objects_of(f"{run}/{EARLIER}")
    for data in sampled(variants(record, files[record.path])):
        damage = {**files, record.path: data}
        restore = partial(put, f"{run}/{CHECKPOINT}", damage)
        faults += failures(run, data, record, restore, partial(objects_of, f"{run}/{CHECKPOINT}"))
        assert objects_of(f"{run}/{EARLIER}") == around
        assert {key.partition("/")[0] for key in objects_of(bucket)} == {"run"}
    assert not faults, "\n".join(faults[:20])


def sound(name: str, repaired: tuple[Path, str]) -> tuple[Record, Files]:
    """Return a record, and the files of a checkpoint that brings it along undamaged."""
    if name in ALONE:
        files = read_tree(SOUND)
        return ALONE[name], {**files, ALONE[name].path: record_of(name, files)}
    folder, url = repaired
    if name in OF_A_REPAIR:
        return OF_A_REPAIR[name], read_tree(folder)
    files = objects_of(url)
    if name == "lock in a store":
        held = {"token": "x", "user": "u", "host": "h", "pid": 1, "verb": "repair", "since": 1.0}
        files[OF_A_STORE[name].path] = json.dumps(held).encode()
    return OF_A_STORE[name], files


def without_lock(folder: Path) -> Files:
    """Return the files of a folder, without the lock, which a verb may leave."""
    return {name: data for name, data in snapshot(folder).items() if name != f"{JOURNAL}/lock"}
