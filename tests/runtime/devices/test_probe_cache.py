"""The remembered report: private, whole, and never believed for other hardware. No device is needed."""

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptfix.runtime.devices.probe import cache
from ckptfix.runtime.devices.probe.report import PairReport, ProbeReport, Verdict

IDENTITY = {
    "type": "cuda",
    "devices": [{"name": "X", "uuid": "u0", "pci": "0000:01:00.0", "memory": 1}, {"name": "X", "uuid": "u1"}],
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
            pair=(0, 1), verdict=Verdict.WRONG, kind="late", trials=7, failures=2, seed=3, detail="d\x1b[0m"
        ),
        PairReport(
            pair=(1, 0), verdict=Verdict.HEALTHY, trials=600, seed=3, first_offset=None, peer_access=True
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
    (path,) = home.iterdir()
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
    cache.store(report(identity={**IDENTITY, "boot": "later", "torch": "3"}))
    assert len(list(home.iterdir())) == 1
    assert cache.load(IDENTITY) is None


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
        b'{"version": 1}',
        b'{"version": 1, "report": {}}',
        b'{"version": 1, "report": []}',
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


def test_another_version_is_no_file(home: Path) -> None:
    cache.store(report())
    document = json.loads(kept(home).read_text())
    kept(home).write_text(json.dumps({**document, "version": 2}))
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
def test_what_others_could_have_written_is_not_believed(home: Path, tamper: Callable[[Path], None]) -> None:
    cache.store(report())
    tamper(kept(home))
    assert cache.load(IDENTITY) is None


def test_the_file_of_another_user_is_not_believed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store(report())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cache.load(IDENTITY) is None


def test_a_write_that_fails_leaves_the_old_file_whole_and_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(report())
    monkeypatch.setattr("ckptfix.runtime.devices.probe.cache.write_all", _no_space)
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
