"""A migration that is killed, runs out of space or meets something in its way: DST is there whole
or not at all.
"""

import errno
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from ckptfix import ChangedError, OperationError, UsageError, migrate
from ckptfix.cli import run
from ckptfix.conversion import producing, streaming
from ckptfix.conversion.proving import prove_copies
from ckptfix.storage import staged
from ckptfix.storage.executor import Remembering
from ckptfix.storage.results import PartialResults
from ckptfix.tensors.stored import StoredTensor
from tests.conversion.making import digests_at, names_below
from tests.storage.crash import Fault, Outcome, points, strike

STRIPES = 3


def write_model(path: Path, tensors: int = 3, each: int = 4096, fill: int = 1) -> None:
    """Write a safetensors file without torch: children that are forked need none."""
    header = {
        f"w{number}": {
            "dtype": "U8",
            "shape": [each],
            "data_offsets": [number * each, (number + 1) * each],
        }
        for number in range(tensors)
    }
    raw = json.dumps(header).encode()
    data = hashlib.shake_128(bytes([fill])).digest(1 << 12) * (tensors * each // 4096)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "work" / "a"
    folder.mkdir(parents=True)
    write_model(folder / "model.safetensors")
    write_model(folder / "model_1.safetensors", fill=2)
    (folder / "random_states_0.pkl").write_bytes(b"\x80\x02}.")
    (folder / "notes.txt").write_text("mine")
    return folder


def whole(folder: Path, to: str = "bin") -> bool:
    """Whether a folder is the migrated source: its files are proven in other tests."""
    expected = {"pytorch_model.bin", "pytorch_model_1.bin"} | {"random_states_0.pkl", "notes.txt"}
    if names_below(folder) != expected:
        return False
    before = folder.parent / "a"
    return all(
        digests_at(folder / f"pytorch_model{end}.bin")
        == digests_at(before / f"model{end}.safetensors")
        for end in ("", "_1")
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names_below(folder)}


def each_point(action: Callable[[], None], undo: Callable[[], None], kind: str = "") -> list[int]:
    """Return the numbers of the changing calls of an action, a third of them and every one of the
    last.
    """
    names = points(action)
    undo()
    chosen = [number for number, name in enumerate(names) if not kind or name == kind]
    assert len(chosen) > 3
    return [
        number
        for place, number in enumerate(chosen)
        if place % STRIPES == 0 or place > len(chosen) - 12
    ]


def whole_migration(source: Path) -> tuple[Path, Callable[[], None], Callable[[], None]]:
    """Return the target of a migration, what migrates to it, and what removes it again."""
    target = source.parent / "b"

    def action() -> None:
        migrate(source, target, to="bin")

    return target, action, lambda: shutil.rmtree(target)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault.KILL_BEFORE, Fault.KILL_AFTER, Fault.TORN])
def test_killed_at_any_point_it_is_there_whole_or_not_at_all(source: Path, fault: Fault) -> None:
    before = contents(source)
    target, action, undo = whole_migration(source)
    seen = set()
    for at in each_point(action, undo):
        outcome, _ = strike(action, at, fault)
        there = target.exists()
        seen.add((outcome, there))
        assert outcome is not Outcome.RAISED
        assert not there or whole(target), f"a half result at call {at}"
        assert contents(source) == before
        if there:
            undo()
        migrate(source, target, to="bin")
        assert whole(target)
        assert sorted(os.listdir(source.parent)) == [
            "a",
            "b",
        ], "what a dead run left goes with the next one"
        undo()
    assert {(Outcome.KILLED, False), (Outcome.KILLED, True)} <= seen


@pytest.mark.slow
@pytest.mark.parametrize("exchanges", [True, False])
def test_killed_while_it_overwrites_the_old_or_the_new_one_is_there(
    source: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = source.parent / "b"
    if not exchanges:
        monkeypatch.setattr(staged, "exchange", lambda one, other: False)

    write_model(source.parent.parent / "other.safetensors", fill=9)
    migrate(
        source.parent.parent / "other.safetensors",
        source.parent.parent / "earlier",
        to="safetensors",
    )

    def old() -> None:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source.parent.parent / "earlier", target)

    def action() -> None:
        migrate(source, target, to="bin", overwrite=True)

    old()
    for at in each_point(action, old)[-16:]:
        assert strike(action, at, Fault.KILL_AFTER)[0] is not Outcome.RAISED
        if exchanges:
            assert names_below(target) == {"model.safetensors"} or whole(target)
        with staged.staging_for(target):  # as the next run begins
            assert names_below(target) == {"model.safetensors"} or whole(target)
        assert sorted(os.listdir(source.parent)) == ["a", "b"]
        old()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EIO])
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_failing_disk_leaves_nothing_behind(source: Path, fault: Fault, call: str) -> None:
    before = contents(source)
    target, action, undo = whole_migration(source)
    failed = 0
    for at in each_point(action, undo, call):
        outcome, error = strike(action, at, fault)
        failed += outcome is Outcome.RAISED
        assert outcome is Outcome.FINISHED or error in ("OSError", "OperationError")
        assert contents(source) == before
        if (
            outcome is Outcome.FINISHED or target.exists()
        ):  # the probe for reflinks; what makes the name durable
            assert whole(target)
            undo()
        assert os.listdir(source.parent) == ["a"]
    assert (
        failed >= 1
    )  # threads write, so the calls come in another order each time, and a point may miss its call


def test_a_full_disk_is_seen_before_anything_is_written(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(source)
    values = list(real)
    values[4] = 1  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    with pytest.raises(
        OperationError,
        match=r"b: needs [0-9.]+ KiB of free space, but only 4\.0 KiB is free on this disk",
    ):
        migrate(source, source.parent / "b", to="bin")
    assert os.listdir(source.parent) == ["a"]


@pytest.mark.parametrize("name", ["model.safetensors", "notes.txt"])
def test_a_disk_that_fills_up_meanwhile_is_named(
    source: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(f"/new/{name}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    size = "[0-9.]+ [KMGT]?i?B"
    words = (
        rf"b: .* {size} more needed, {size} free: '.*/new/{name}'; .* needs [0-9]+ bytes "
        r".* in total"
    )
    with pytest.raises(
        OperationError,
        match=f"{words}; nothing was written there; next: free up space on that disk",
    ):
        migrate(source, source.parent / "b", to="safetensors")
    assert os.listdir(source.parent) == ["a"]


@pytest.mark.parametrize(
    ("given", "where", "words"),
    [
        ("a", "a", "is the source of the migration"),
        ("a", "a/b", "is inside the source of the migration"),
        ("a/model.safetensors", "a", "is inside .*; choose another path"),
        ("a", "c/b", r"/c does not exist; next: mkdir -p \S*/c$"),
        ("a", "c/d/b", r"/c/d does not exist; next: mkdir -p \S*/c/d$"),
        ("a", "a/model.safetensors/b", "model.safetensors is not a folder"),
        ("a", "a/..", "name the folder itself"),
    ],
)
def test_places_that_make_no_sense(source: Path, given: str, where: str, words: str) -> None:
    before = contents(source)
    with pytest.raises(UsageError, match=words):
        migrate(source.parent / given, source.parent / where, to="bin", overwrite=True)
    assert contents(source) == before


def test_what_comes_to_dst_meanwhile_stays(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = source.parent / "b"
    real = producing.produce

    def slow(*args: object, **kwargs: object) -> object:
        target.mkdir()
        (target / "theirs").write_text("x")
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("ckptfix.conversion.migrate.produce", slow)
    with pytest.raises(ChangedError, match="was created meanwhile"):
        migrate(source, target, to="bin")
    assert names_below(target) == {"theirs"}
    assert sorted(os.listdir(source.parent)) == ["a", "b"]


def test_a_file_that_comes_to_dst_meanwhile_stays(source: Path) -> None:
    target = source.parent / "b.bin"

    def write(count: int) -> None:
        target.write_text("theirs")

    with pytest.raises(ChangedError, match="was created meanwhile"):
        migrate(source / "model.safetensors", target, to="bin", progress=write)
    assert target.read_text() == "theirs"
    assert sorted(os.listdir(source.parent)) == ["a", "b.bin"]


def test_in_a_folder_of_checkpoints_nothing_is_staged(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = source.parent / "checkpoints"
    checkpoints.mkdir()
    seen = []
    real = producing.produce

    def look(*args: object, **kwargs: object) -> object:
        seen.append(os.listdir(checkpoints))
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("ckptfix.conversion.migrate.produce", look)
    migrate(source, checkpoints / "checkpoint_3", to="bin")
    assert seen == [[]]
    assert os.listdir(checkpoints) == ["checkpoint_3"]


def test_a_folder_that_a_living_run_writes_is_left_alone(source: Path) -> None:
    target = source.parent / "b"
    with staged.staging_for(target) as living:
        migrate(source, target, to="bin")
        assert living.new.is_dir()
    assert sorted(os.listdir(source.parent)) == ["a", "b"]


def test_a_bit_that_flips_on_the_way_is_found(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptfix.storage.atomic import write_all as real

    def flip(fd: int, data: memoryview, offset: int) -> None:
        damaged = bytearray(data)
        damaged[-700] ^= 4
        real(fd, memoryview(damaged), offset)

    monkeypatch.setattr(streaming, "write_all", flip)
    with pytest.raises(OperationError, match=r"'w2' differs from what was read from the source"):
        migrate(source / "model.safetensors", source.parent / "b.safetensors", to="safetensors")
    assert os.listdir(source.parent) == ["a"]
    receipt = migrate(
        source / "model.safetensors",
        source.parent / "b.safetensors",
        to="safetensors",
        verify=False,
    )
    assert not receipt.verified
    assert "--no-verify" in receipt.not_checked[0]


def test_a_source_that_becomes_shorter_is_an_error(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = producing.produce

    def cut(*args: object, **kwargs: object) -> object:
        os.truncate(source / "model_1.safetensors", 5000)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("ckptfix.conversion.migrate.produce", cut)
    with pytest.raises(
        ChangedError, match=r"model_1\.safetensors changed while it was read.*found 5000"
    ):
        migrate(source, source.parent / "b", to="bin")
    assert os.listdir(source.parent) == ["a"]


def test_a_carried_file_that_changes_is_found(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = producing.produce

    def change(*args: object, **kwargs: object) -> object:
        result = real(*args, **kwargs)  # type: ignore[arg-type]
        (source / "notes.txt").write_text("MINE")
        return result

    monkeypatch.setattr("ckptfix.conversion.migrate.produce", change)
    with pytest.raises(OperationError, match=r"notes\.txt differs from its copy from byte 0 on"):
        migrate(source, source.parent / "b", to="bin")
    assert os.listdir(source.parent) == ["a"]


@pytest.mark.parametrize(("text", "byte"), [("MINE", 0), ("minE", 3)])
def test_a_copy_of_another_run_is_proven_again(tmp_path: Path, text: str, byte: int) -> None:
    """The run before proved its copy; this one copied once more, on a disk that is failing."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    executor = Remembering(PartialResults(tmp_path / "partial"), lambda words: None)
    prove_copies(one, other, [PurePosixPath("notes.txt")], None, executor)
    (other / "notes.txt").write_text(text)
    with pytest.raises(OperationError, match=rf"notes\.txt differs .* from byte {byte} on"):
        prove_copies(one, other, [PurePosixPath("notes.txt")], None, executor)


def test_a_new_file_that_somebody_changed_meanwhile_is_written_again(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is noted: a run that believed the note would leave the file out."""
    work = source.parent
    arguments = [
        "migrate", str(source / "model.safetensors"), str(work / "b"), "--to", "safetensors",
        "--max-shard-size", "4KB", "--partial", str(work / "partial"),
    ]  # fmt: skip

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ckptfix.conversion.migrate.prove_model", interrupt)
        assert run(arguments) == 130
    (index,) = work.glob(".ckptfix-*/new/model.safetensors.index.json")
    expected = index.read_bytes()
    index.write_bytes(expected + b" ")
    assert run(arguments) == 0
    assert (work / "b" / index.name).read_bytes() == expected
    assert sorted(os.listdir(work)) == ["a", "b"]


def test_a_read_only_place_is_an_error(source: Path) -> None:
    with pytest.raises(OSError, match="/sys/kernel/"):
        migrate(source, "/sys/kernel/b", to="bin")


def big(source: Path) -> Path:
    path = source / "model.safetensors"
    write_model(path, tensors=4, each=12 << 20)
    return path


def test_permissions_are_those_of_the_source(source: Path) -> None:
    os.chmod(source / "model.safetensors", 0o600)
    os.chmod(source, 0o750)
    migrate(source, source.parent / "b", to="bin")
    assert (source.parent / "b" / "pytorch_model.bin").stat().st_mode & 0o777 == 0o600
    assert (source.parent / "b" / "pytorch_model_1.bin").stat().st_mode & 0o777 == 0o644
    assert (source.parent / "b").stat().st_mode & 0o777 == 0o750


def test_permissions_of_folders_that_are_carried(source: Path) -> None:
    modes = {"sub": 0o700, "sub/deep": 0o750, "empty": 0o711}
    for name in modes:
        (source / name).mkdir()
    (source / "sub" / "deep" / "x").write_text("x")
    for name, mode in modes.items():
        os.chmod(source / name, mode)
    migrate(source, source.parent / "b", to="bin")
    assert {name: (source.parent / "b" / name).stat().st_mode & 0o7777 for name in modes} == modes


@pytest.mark.parametrize("named", ["b", "b.bin"])
def test_a_model_in_a_private_folder_stays_private(source: Path, named: str) -> None:
    folder = source.parent / "c"
    inner = folder / "pytorch_model_fsdp_0" if named == "b" else folder
    folder.mkdir()
    migrate(source / "model.safetensors", inner, to="dcp")
    for path in filter(Path.is_file, inner.iterdir()):
        os.chmod(path, 0o644)
    os.chmod(inner, 0o710)
    migrate(folder, source.parent / named, to="bin")
    (new,) = source.parent.glob("b*/*.bin") if named == "b" else (source.parent / named,)
    assert new.stat().st_mode & 0o777 == 0o640


def test_progress_counts_what_is_written_and_what_is_read_back(source: Path) -> None:
    counts: list[int] = []
    receipt = migrate(source, source.parent / "b", to="bin", progress=counts.append)
    tensors = sum(model.nbytes for model in receipt.models)
    carried = 2 * sum((source / name).stat().st_size for name in receipt.carried)
    new = sum(
        (source.parent / "b" / f"pytorch_model{end}.bin").stat().st_size for end in ("", "_1")
    )
    assert sum(counts) == new + tensors + carried + sum(
        (source / name).stat().st_size for name in receipt.carried
    )


def test_the_threads_end_when_the_user_interrupts(source: Path) -> None:
    path = big(source)
    before = threading.active_count()

    def interrupt(count: int) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        migrate(path, source.parent / "b.bin", to="bin", progress=interrupt)
    assert threading.active_count() == before
    assert os.listdir(source.parent) == ["a"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_interrupted(source: Path, number: signal.Signals) -> None:
    path = big(source)
    target = source.parent / "b.bin"
    command = [
        sys.executable,
        "-m",
        "ckptfix",
        "migrate",
        str(path),
        str(target),
        "--to",
        "bin",
        "--json",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    while process.poll() is None and not list(source.parent.glob(".ckptfix-writing*/new/b.bin")):
        time.sleep(0.001)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    if process.returncode == 0:  # it was faster
        assert digests_at(target) == digests_at(path)
        return
    assert not target.exists() or digests_at(target) == digests_at(path)
    if number is signal.SIGINT:
        assert process.returncode == 130
        assert json.loads(output)["status"] == 130
        assert os.listdir(source.parent) == ["a"]
    target.unlink(missing_ok=True)
    migrate(path, target, to="bin")
    assert sorted(os.listdir(source.parent)) == ["a", "b.bin"]


def test_tensors_larger_than_a_buffer(source: Path) -> None:
    path = big(source)
    for to, suffix in (("bin", ".bin"), ("safetensors", ".safetensors"), ("dcp", "")):
        migrate(path, source.parent / f"b{suffix}", to=to)
        assert digests_at(source.parent / f"b{suffix}") == digests_at(path)


def test_a_layout_that_gives_too_little_is_found(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defence against a reader that is wrong: sizes are counted."""

    class Short:
        def blocks(self, files: object, buffer: memoryview) -> list[memoryview]:
            return [buffer[:16]]

    real = streaming.Source

    def short(new: object, stored: StoredTensor, convert: object = None) -> object:
        return real(new, stored._replace(layout=Short()), None)  # type: ignore[arg-type]

    monkeypatch.setattr("ckptfix.conversion.migration_plan.Source", short)
    with pytest.raises(
        OperationError,
        match=r"the tensor 'w0' has the wrong size \(expected 4096 bytes, found 16\)",
    ):
        migrate(source / "model.safetensors", source.parent / "b.bin", to="bin")
    assert os.listdir(source.parent) == ["a"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(source: Path) -> None:
    code = """
import sys
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
from ckptfix.conversion.migrate import migrate
before = peak()
migrate(sys.argv[1], sys.argv[2], to="bin")
print(peak() - before)
"""
    path = source / "model.safetensors"
    write_model(path, tensors=2, each=40 << 20)
    command = [sys.executable, "-c", code, str(path), str(source.parent / "b.bin")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 60 << 10, (
        "KiB: 32 MiB of buffers, and what python takes; the file has 80 MiB"
    )


@pytest.mark.parametrize("harm", ["lost", "longer"])
def test_the_proof_asks_for_the_index_too(
    source: Path, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards whose index was gone were called done and verified."""
    real = producing.produce

    def harmed(plan: Any, folder: Path, *args: Any, **kwargs: Any) -> Any:
        result = real(plan, folder, *args, **kwargs)
        index = folder / "model.safetensors.index.json"
        if harm == "lost":
            index.unlink()
        else:
            index.write_bytes(index.read_bytes() + b" ")
        return result

    monkeypatch.setattr("ckptfix.conversion.migrate.produce", harmed)
    file, new = source / "model.safetensors", source.with_name("new")
    with pytest.raises(OperationError, match=r"model\.safetensors\.index\.json: it (is|has) "):
        migrate(file, new, to="safetensors", max_shard_size="10KB")
    assert not new.exists()
