"""The remembered report: private, whole, and never believed for other hardware. No device is
needed.
"""

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ckptfix.devices.probe import cache
from ckptfix.devices.probe.probe_report import PairReport, ProbeReport, Verdict

IDENTITY = {
    "type": "cuda",
    "devices": [
        {"name": "X", "uuid": "u0", "pci": "0000:01:00.0", "memory": 1},
        {"name": "X", "uuid": "u1"},
    ],
    "drivers": {"nvidia": "560.35.03 ABC"},
    "boot": "b",
    "host": "h",
    "torch": "2.13.0",
    "runtime": ["13.0"],
    "allocator": {},
    "backend": "native",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ckptfix"


def report(**changes: Any) -> ProbeReport:
    pairs = (
        PairReport(
            pair=(0, 1),
            verdict=Verdict.WRONG,
            kind="late",
            trials=7,
            failures=2,
            seed=3,
            detail="d\x1b[0m",
        ),
        PairReport(
            pair=(1, 0),
            verdict=Verdict.HEALTHY,
            trials=600,
            seed=3,
            first_offset=None,
            peer_access=True,
        ),
    )
    made = ProbeReport(
        pairs={pair.pair: pair for pair in pairs},
        seed=3,
        seconds=1.5,
        starting=2.25,
        devices=("X", "X"),
        exercised=("a",),
        not_exercised=("b",),
        hints=("c",),
        identity=IDENTITY,
    )
    return replace(made, **changes)


def kept(home: Path) -> Path:
    (path,) = home.glob("*.json")
    return path


def test_what_is_stored_is_loaded_and_only_the_user_can_read_it(home: Path) -> None:
    before = os.umask(0)
    try:
        cache.store(report())
    finally:
        os.umask(before)
    assert cache.load(IDENTITY) == report()
    assert stat.S_IMODE(kept(home).stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "change",
    [
        {"drivers": {"nvidia": "570.00 ABC"}},
        {"boot": "later"},
        {"torch": "2.14.0"},
        {"allocator": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
        {"backend": "cudaMallocAsync"},
        {"devices": [{"name": "X", "uuid": "u0"}, {"name": "X", "uuid": "u2"}]},
        {"devices": IDENTITY["devices"][::-1]},  # type: ignore[index]
        {"host": "other"},
        {"runtime": []},
        {"more": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_change_of_the_key_makes_it_unknown(home: Path, change: dict[str, Any]) -> None:
    cache.store(report())
    assert cache.load(IDENTITY) is not None
    assert cache.load({**IDENTITY, **change}) is None


def test_a_file_moved_to_the_place_of_other_devices_is_not_believed(home: Path) -> None:
    cache.store(report())
    other = {**IDENTITY, "devices": [{"uuid": "u8"}, {"uuid": "u9"}]}
    place = cache.location(other)
    assert place is not None
    kept(home).rename(place)
    assert cache.load(other) is None


def test_a_new_boot_takes_the_same_file(home: Path) -> None:
    cache.store(report())
    cache.store(report(identity={**IDENTITY, "boot": "later", "drivers": {"nvidia": "570"}}))
    assert len(list(home.iterdir())) == 1
    assert cache.load(IDENTITY) is None


@pytest.mark.parametrize("setting", ["torch", "allocator", "backend", "runtime"])
def test_jobs_with_other_settings_keep_what_the_other_one_knows(home: Path, setting: str) -> None:
    """Training with expandable segments and evaluation without them took turns, and never settled a
    pair.
    """
    other = {**IDENTITY, setting: "another"}
    cache.store(report())
    cache.store(report(identity=other))
    assert cache.load(IDENTITY) == report()
    assert cache.load(other) == report(identity=other)


def test_nothing_is_kept_or_found_without_an_identity(home: Path) -> None:
    cache.store(report(identity={}))
    assert not home.exists()
    assert cache.load({}) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"version": 5}',
        b'{"version": 5, "report": {}}',
        b'{"version": 5, "report": []}',
        b"[" * 100_000,
        b"x" * (2 << 20),
    ],
    ids=range(10),
)
def test_a_damaged_file_is_no_file(home: Path, content: bytes) -> None:
    cache.store(report())
    kept(home).write_bytes(content)
    assert cache.load(IDENTITY) is None


@pytest.mark.parametrize("where", ["verdict", "pair", "trials"])
def test_a_value_out_of_place_is_no_file(home: Path, where: str) -> None:
    cache.store(report())
    document = json.loads(kept(home).read_text())
    document["report"]["pairs"][0][where] = "sound"
    kept(home).write_text(json.dumps(document))
    assert cache.load(IDENTITY) is None


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN"])
def test_a_number_without_bounds_is_no_file(home: Path, number: str) -> None:
    cache.store(report())
    text = kept(home).read_text()
    kept(home).write_text(text.replace('"seed": 3', f'"seed": {number}', 1))
    assert kept(home).read_text() != text
    assert cache.load(IDENTITY) is None


def test_another_version_is_no_file(home: Path) -> None:
    cache.store(report())
    document = json.loads(kept(home).read_text())
    kept(home).write_text(json.dumps({**document, "version": 1}))
    assert cache.load(IDENTITY) is None


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def readable_by_all(path: Path) -> None:
    path.chmod(0o644)


def in_an_open_folder(path: Path) -> None:
    path.parent.chmod(0o777)


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


@pytest.mark.parametrize(
    "tamper",
    [open_to_all, readable_by_all, in_an_open_folder, a_link, a_fifo, a_folder],
    ids=lambda f: f.__name__,
)
def test_what_others_could_have_written_is_not_believed(
    home: Path, tamper: Callable[[Path], None]
) -> None:
    cache.store(report())
    tamper(kept(home))
    assert cache.load(IDENTITY) is None


def test_the_file_of_another_user_is_not_believed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(report())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cache.load(IDENTITY) is None


def test_a_write_that_fails_leaves_the_old_file_whole_and_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(report())
    monkeypatch.setattr("ckptfix.storage.atomic.write_all", _no_space)
    with pytest.warns(UserWarning, match="No space left"):
        cache.store(report(seed=4))
    assert cache.load(IDENTITY) == report()
    assert len(list(home.iterdir())) == 1


def _no_space(fd: int, data: bytes, offset: int) -> None:
    os.write(fd, data[:10])
    raise OSError(28, "No space left on device")


def test_place_follows_the_standard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/folder")
    path = cache.location(IDENTITY)
    assert path is not None
    assert path.parent == tmp_path / ".cache" / "ckptfix"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.location(IDENTITY) == path
    monkeypatch.setenv("HOME", "no/absolute/path")
    assert cache.location(IDENTITY) is None
    cache.store(report())
    assert cache.load(IDENTITY) is None


def pair(verdict: Verdict, index: int = 0, **more: Any) -> PairReport:
    return PairReport(pair=(index, 1 - index), verdict=verdict, seed=3, **more)


def probed(*pairs: PairReport) -> ProbeReport:
    return report(pairs={found.pair: found for found in pairs})


def known() -> dict[tuple[int, int], PairReport]:
    found = cache.load(IDENTITY)
    return {} if found is None else dict(found.pairs)


def test_damage_is_known_until_a_later_probe_finds_none(home: Path) -> None:
    damage = pair(Verdict.WRONG, kind="late", measured=9.0)
    cache.store(probed(damage))
    cache.store(probed(pair(Verdict.HEALTHY, began=5.0)))
    assert known() == {(0, 1): damage}
    cache.store(probed(pair(Verdict.HEALTHY, began=10.0)))
    assert known()[0, 1].verdict is Verdict.HEALTHY
    assert len(list(home.iterdir())) == 1


def test_what_is_known_of_other_pairs_stays(home: Path) -> None:
    cache.store(probed(pair(Verdict.HEALTHY)))
    cache.store(probed(pair(Verdict.INCONCLUSIVE, 1)))
    assert {key: found.verdict for key, found in known().items()} == {
        (0, 1): Verdict.HEALTHY,
        (1, 0): Verdict.INCONCLUSIVE,
    }


def test_what_a_killed_process_left_is_replaced(home: Path) -> None:
    cache.store(report())
    kept(home).with_suffix(".new").write_bytes(b"half")
    cache.store(report(seed=4))
    assert cache.load(IDENTITY) == report(seed=4)
    assert len(list(home.iterdir())) == 1


def test_a_folder_that_others_can_write_to_is_said(home: Path) -> None:
    home.mkdir(parents=True)
    home.chmod(0o770)
    words = f"verdicts are ignored, because other users can write.*chmod go-w {home}"
    with pytest.warns(UserWarning, match=words) as said:
        cache.store(report())
    assert cache.load(IDENTITY) is None
    assert len(said) == 1
    home.chmod(0o700)
    cache.store(report())
    assert cache.load(IDENTITY) == report()


STORING = """
import sys
from ckptfix.devices.probe import remember
from ckptfix.devices.probe.probe_report import PairReport, ProbeReport, Verdict
number, identity = int(sys.argv[1]), eval(sys.argv[2])
for step in range(30):
    pair = (number, 10 + step)
    found = PairReport(pair=pair, verdict=Verdict.HEALTHY, seed=number)
    remember(ProbeReport(pairs={pair: found}, seed=number, identity=identity))
    print(step, flush=True)
"""


@pytest.mark.slow
def test_processes_that_store_at_once_and_are_killed_lose_nothing_of_each_other(
    home: Path,
) -> None:
    """Each tells after which step it has stored: that much, and of a killed one at most a step
    more, is known.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", STORING, str(number), repr(IDENTITY)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    told = dict.fromkeys(range(3), 0)
    for number, process in enumerate(processes):
        with process:
            assert process.stdout is not None
            if number == 1:
                process.stdout.readline()
                process.kill()
                told[number] = 1
            told[number] += len(process.stdout.read().split())
    assert told[0] == told[2] == 30
    for number, steps in told.items():
        assert steps <= sum(source == number for source, _ in known()) <= steps + 1


def test_others_wait_for_the_lock_and_get_it_when_its_holder_dies(home: Path) -> None:
    code = (
        "import sys, time\nfrom ckptfix.devices.probe import cache\n"
        f"with cache.locked({IDENTITY!r}):\n    print('held', flush=True)\n    time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        entered = threading.Event()

        def enter() -> None:
            with cache.locked(IDENTITY):
                entered.set()

        waiting = threading.Thread(target=enter)
        waiting.start()
        assert not entered.wait(0.3)
        holder.kill()
        waiting.join(30)
    assert entered.is_set()


def test_a_holder_that_hangs_is_not_waited_for_without_end(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_PATIENCE", 0.2)
    with cache.locked(IDENTITY), cache.locked(IDENTITY):
        cache.store(report())
    assert cache.load(IDENTITY) == report()


def test_without_an_identity_or_a_folder_nobody_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with cache.locked({}):
        pass
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with cache.locked(IDENTITY):
        pass
