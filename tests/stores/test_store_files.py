"""Prefixes of stores: what is listed and read of them, and what they refuse."""

import json
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptfix import check, diff, migrate, repair, salvage, seal, verify
from ckptfix.cli import run
from ckptfix.cli.several_paths import state_after_seal
from ckptfix.errors import ChangedError, ClosedError, OperationError, StoreError, UsageError
from ckptfix.storage import stores
from ckptfix.storage.comparing import Run, fingerprint, first_difference
from ckptfix.storage.files import AnyPath, StorePath, folders_in, names_in, walk
from ckptfix.storage.markers import UPLOAD, begun_now
from ckptfix.storage.opened import opened_part
from ckptfix.storage.reading import OpenFiles, open_reader, read_start
from ckptfix.storage.store_files import open_prefix
from ckptfix.storage.stores import open_store
from ckptfix.training.loading.fetching import as_listed, copied
from tests.stores.servers import QUICK, bucket, ministack, ministack_process

__all__ = ["bucket", "ministack", "ministack_process"]

CASE = Path(__file__).parents[2] / "fixtures" / "golden" / "doubled-model" / "checkpoint"


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new prefix in the memory of this process."""
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    return f"memory://{os.urandom(6).hex()}/run"


def uploaded(url: str, folder: Path = CASE) -> str:
    store = open_store(url)
    for path in folder.iterdir():
        store.put(path.name, path.read_bytes())
    return url


def test_a_prefix_has_names_sizes_and_times(url: str) -> None:
    store = open_store(url)
    info = store.put("unet/model.safetensors", b"x" * 1000)
    place = open_prefix(url)
    path = place / "unet" / "model.safetensors"
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (1000, info.modified_ns)
    assert (path.is_file(), path.is_dir(), path.parent.is_dir()) == (True, False, True)
    assert (names_in(place), names_in(path.parent)) == (["unet"], ["model.safetensors"])
    assert [str(folder) for folder, _, _ in walk(place)] == [url, f"{url}/unet"]
    assert (path.info, (place / "none").info) == (info, None)
    assert str(path) == f"{url}/unet/model.safetensors"
    with pytest.raises(FileNotFoundError):
        (place / "none").stat()


@pytest.mark.parametrize("size", [0, 1, 16 << 10, (64 << 10) + 1, (12 << 20) + 777])
@pytest.mark.parametrize("name", ["a.safetensors", "a.bin"])
def test_every_range_is_read_as_it_is(url: str, name: str, size: int) -> None:
    data = random.Random(size).randbytes(size)
    open_store(url).put(name, data)
    path = open_prefix(url) / name
    chance = random.Random(7)
    with open_reader(path) as reader, OpenFiles() as files:
        assert reader.size == size
        assert reader.read(0, size) == data
        for _ in range(60):
            begin = chance.randrange(size + 1)
            length = min(size - begin, chance.choice([0, 1, 100, 70_000, 5 << 20]))
            assert reader.read(begin, length) == data[begin : begin + length]
            view = memoryview(bytearray(length))
            files.fill(view, path, begin)
            assert view == data[begin : begin + length]
            window = reader.window(begin, length)
            assert (
                window.read(length // 2, length - length // 2)
                == data[begin + length // 2 : begin + length]
            )
        with pytest.raises(ChangedError, match="changed while it was read"):
            files.fill(memoryview(bytearray(2)), path, size - 1)
    assert read_start(path, 10) == data[:10]


def test_threads_read_one_object_at_many_places(url: str) -> None:
    data = random.Random(1).randbytes(9 << 20)
    store = open_store(url)
    store.put("a.bin", data)
    store.put("b.bin", data[:-1] + b"?" if data[-1:] != b"?" else data[:-1] + b"!")
    place = open_prefix(url)
    with open_reader(place / "a.bin") as one, open_reader(place / "b.bin") as other:
        found = first_difference(one, other, [Run(0, 0, len(data))], threads=4)
    assert found is not None
    assert found.offset_a == len(data) - 1


def test_a_fingerprint_is_that_of_the_file(url: str, tmp_path: Path) -> None:
    data = os.urandom(300_000)
    info = open_store(url).put("a", data)
    (tmp_path / "a").write_bytes(data)
    os.utime(tmp_path / "a", ns=(info.modified_ns, info.modified_ns))
    assert fingerprint(open_prefix(url) / "a") == fingerprint(tmp_path / "a")


@pytest.mark.parametrize(
    "touch",
    [
        open,
        os.stat,
        os.fspath,
        os.listdir,
        os.scandir,
        os.path.exists,
        os.path.abspath,
        Path,
        shutil.rmtree,
        lambda path: os.open(path, os.O_RDONLY),
        lambda path: os.rename(path, "new"),
        lambda path: shutil.copy(path, "/dev/null"),
        lambda path: tempfile.mkstemp(dir=path),
    ],
)
def test_no_function_of_the_system_takes_a_path_in_a_store(
    url: str, touch: Callable[[Any], object]
) -> None:
    """It would look for a file of that name on this machine."""
    open_store(url).put("a.bin", b"data")
    place = open_prefix(url)
    with pytest.raises(OperationError, match="next: download the checkpoint first"):
        touch(place / "a.bin")
    with pytest.raises(OperationError, match="next: download"):
        place.files.raise_failure()


def test_a_refusal_that_is_swallowed_ends_the_verb_still(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No `except` on the way may turn a failure of the store, or a refused read of a hole, into "no
    error".
    """
    uploaded(url)
    module = import_module("ckptfix.diagnosis.check")

    def careless(folder: Path, only: str | None = None) -> object:
        with suppress(OperationError):
            os.stat(folder / "model.safetensors")
        return scan(folder, only)

    scan = module.scan_folder
    monkeypatch.setattr(module, "scan_folder", careless)
    with pytest.raises(
        OperationError, match=f"{url}/model.safetensors: this command can only open files on this"
    ):
        check(url)


HOSTILE = {
    "a//b.bin": "it contains an empty name",
    "../up.bin": "it contains '..', which leads to another folder",
    "x/./y.bin": "it contains '.', which leads to another folder",
    f"{'n' * 256}.bin": "it contains a name of 260 bytes (a file name can have at most 255)",
    "model.safetensors/part": "",  # and so the object model.safetensors has no place
    "nul\0.bin": "it has a NUL byte",
    "slash/": "it ends in a slash",
}


def test_keys_that_no_folder_can_hold_are_named(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    uploaded(url)
    store = open_store(url)
    for key in HOSTILE:
        store._files.store[f"{store._base}/{key}"] = store._files.store[
            f"{store._base}/optimizer.bin"
        ]
    report = check(url)
    assert report.status != 0
    for key, why in HOSTILE.items():
        said = next((words for words in report.unfinished if repr(key) in words), "")
        assert why in said, key
        assert ("whose key cannot be a file path" in said) == bool(why), key
    assert any(
        "'model.safetensors': " in words and "other keys" in words for words in report.unfinished
    )
    for verb in (verify, lambda url: diff(url, CASE), lambda url: salvage(url, "new")):
        with pytest.raises(
            StoreError, match=f"{url}: 7 objects with a key that cannot be a file path"
        ):
            verb(url)
    assert run(["check", "-r", url]) != 0
    assert "'a//b.bin'" in capsys.readouterr().out


@pytest.mark.slow
def test_a_server_has_such_keys(bucket: str) -> None:
    url = uploaded(f"{bucket}/run")
    store = open_store(url)
    for key in ("a//b.bin", "model.safetensors/part", "logs/", "full/"):
        store.put(key, b"" if key == "logs/" else b"data")
    report = check(url)
    assert sorted(words.partition(":")[0] for words in report.unfinished) == [
        "'a//b.bin'",
        "'full/'",
        "'model.safetensors'",
    ]
    assert any(words.startswith("'logs/': an empty object") for words in report.not_checked)
    with pytest.raises(StoreError, match="3 objects with a key that cannot be a file path"):
        verify(url)


def test_an_object_of_no_checkpoint_is_no_success(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(uploaded(f"{url}/one"))
    assert run(["check", "-r", url]) == 1
    above = store._base.removesuffix("/one")
    store._files.store[f"{above}/lost//model.bin"] = store._files.store[
        f"{store._base}/optimizer.bin"
    ]
    capsys.readouterr()
    assert run(["check", "-r", url]) == 3
    assert (
        f"{url}/lost: could not finish: 'lost//model.bin': an object of" in capsys.readouterr().err
    )


def test_an_empty_marker_of_a_folder_is_named_and_no_failure(url: str) -> None:
    uploaded(url)
    store = open_store(url)
    store._files.pipe_file(f"{store._base}/notes", b"")
    store._files.store[f"{store._base}/logs/"] = store._files.store.pop(f"{store._base}/notes")
    report = check(url)
    assert not report.unfinished
    assert any(
        "'logs/': an empty object, which some programs use to mark a folder" in words
        for words in report.not_checked
    )
    assert verify(url).status == verify(CASE).status


def test_a_checkpoint_without_checksums_ends_with_status_3_in_a_store_too(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(url)
    for path in (
        CASE.parents[2] / "accelerate-1.15.0" / "clean-safetensors" / "checkpoint"
    ).iterdir():
        store.put(path.name, path.read_bytes())
    assert run(["verify", url]) == 3
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"nothing was verified: there is no manifest; next: ckptfix seal {url}"
    assert run(["seal", url]) == 0
    assert run(["verify", url]) == 0


def test_what_is_not_there_is_said(url: str) -> None:
    with pytest.raises(UsageError, match=f"{url}/none does not exist"):
        check(f"{url}/none")
    with pytest.raises(UsageError, match="a path in a store cannot contain"):
        check(f"{url}//x")


def test_one_object_is_checked_as_one_file(url: str) -> None:
    uploaded(url)
    report = check(f"{url}/model.safetensors")
    assert [str(one.path) for one in report.folder.components] == ["model.safetensors"]
    assert str(report).startswith(f"{url}/model.safetensors: no error found (1 file, 4 tensors")
    assert report.as_json()["path"] == f"{url}/model.safetensors"
    with pytest.raises(UsageError, match=f"{url}/random_states_9.pkl does not exist"):
        check(f"{url}/random_states_9.pkl")


def test_a_file_url_is_a_path(url: str) -> None:
    assert check(f"file://{CASE}").as_json() == check(CASE).as_json()


def test_a_url_of_a_file_is_a_path_where_a_verb_writes(tmp_path: Path) -> None:
    migrate(f"file://{CASE}", f"file://{tmp_path}/new", to="bin", allow_damage=True)
    assert check(tmp_path / "new").folder.components
    repair(CASE, output=f"file://{tmp_path}/repaired")
    assert check(tmp_path / "repaired").status == 0


def test_a_relative_name_with_a_colon_is_no_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CASE, tmp_path / "s3:")
    assert check("s3:").status == 1


def test_sarif_and_github_name_the_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    uploaded(url)
    assert run(["check", url, "--format", "sarif"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    places = [
        one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        for one in found["results"]
        if "locations" in one
    ]
    assert f"{url}/model_1.safetensors" in places
    assert run(["check", url, "--format", "github"]) == 1
    assert f"file={url.replace(':', '%3A')}/model_1.safetensors" in capsys.readouterr().out
    assert run(["check", "-q", url]) == 1
    assert capsys.readouterr().out == f"{url}\n"
    assert run(["check", "-0", url]) == 1
    assert capsys.readouterr().out == f"{url}\0"


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_copy_is_complete_and_goes_at_the_end(url: str, is_begun: bool) -> None:
    """A reload is proven without a commit marker, too, as after ``aws s3 cp``."""
    store = open_store(uploaded(url))
    if is_begun:
        store.put(UPLOAD, begun_now("ab", {"model.safetensors": 5}).to_bytes())
    with copied(as_listed(open_prefix(url))) as copy:
        assert (copy / UPLOAD).exists() is is_begun
        assert {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()} == {
            path.name: path.read_bytes() for path in CASE.iterdir()
        }
        assert check(copy).status == 1
    assert not copy.exists()
    with copied(as_listed(open_prefix(f"{url}/model.safetensors"))) as copy:
        assert [path.name for path in copy.parent.iterdir()] == ["model.safetensors"]
        assert copy.read_bytes() == (CASE / "model.safetensors").read_bytes()
        assert copy.stat().st_mtime_ns == store.list()["model.safetensors"].modified_ns


def test_a_path_below_a_url_that_is_closed_is_not_missing(url: str) -> None:
    place = open_prefix(uploaded(url))
    place.files.close()
    for look in (lambda: (place / "model.safetensors").is_file(), lambda: names_in(place)):
        with pytest.raises(ClosedError, match="no longer open"):
            look()


def test_a_part_of_a_listing_is_read_alone(url: str) -> None:
    """Its neighbours are in the listing, and a failure is one of the part."""
    for name in ("one", "two", "two/more/one"):
        uploaded(f"{url}/{name}")
    place = open_prefix(url, lists=True)
    with opened_part(place / "one") as one:
        assert isinstance(one, StorePath)
        assert read_start(one / "model.safetensors", 8) == read_start(
            place / "two" / "model.safetensors", 8
        )
        assert one.parent / "two" == place / "two"
        assert folders_in(one.parent) == ["one", "two"]
    with pytest.raises(ClosedError, match="no longer open"):
        read_start(one / "model.safetensors", 8)
    with opened_part(place / "two") as two:
        assert names_in(two / "more") == ["one"]
    with pytest.raises(StoreError, match="fails"), opened_part(place / "one") as one:
        _fail(one)
    with opened_part(CASE) as same:
        assert same == CASE


def _fail(path: AnyPath) -> None:
    assert isinstance(path, StorePath)
    path.files.failures.append(StoreError("it fails"))


def test_a_folder_next_to_a_url_is_listed_when_it_is_opened(url: str) -> None:
    for name in ("one", "two"):
        uploaded(f"{url}/{name}")
    place = open_prefix(f"{url}/one")
    assert not (place.parent / "two").exists()
    assert folders_in(place.parent) == ["one", "two"]
    assert "model.safetensors" in names_in(place.parent / "two")
    with opened_part(place.parent / "two") as two:
        assert (two / "model.safetensors").is_file()


def test_without_room_nothing_is_downloaded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded(url)
    place = open_prefix(url)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    with pytest.raises(
        OperationError, match=r"not enough space in .* needed, 1 B free.*export CKPTFIX_STAGING"
    ):
        copied(as_listed(place)).__enter__()


def test_threads_may_check_at_once(url: str) -> None:
    uploaded(url)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(str(check(url)))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert len(set(found)) == 1


def test_two_families_in_a_store_are_compared(url: str, tmp_path: Path) -> None:
    for case in ("stale-family", "second-family"):
        folder = CASE.parents[1] / case / "checkpoint"
        uploaded(f"{url}/{case}", folder)
        for data in (False, True):
            (there,) = check(f"{url}/{case}", data=data).findings
            assert there == check(folder, data=data).findings[0]
            assert there.code == case


def test_a_migration_reads_from_a_store(url: str, tmp_path: Path) -> None:
    uploaded(url)
    with pytest.raises(
        OperationError,
        match=rf"^{url}: doubled-model: .*next: ckptfix repair {url}, or copy the error too: "
        r"--allow-damage$",
    ):
        migrate(url, tmp_path / "far", to="bin")
    assert not (tmp_path / "far").exists()
    migrate(url, tmp_path / "far", to="bin", allow_damage=True)
    migrate(CASE, tmp_path / "near", to="bin", allow_damage=True)
    names = {path.relative_to(tmp_path / "near") for path in (tmp_path / "near").rglob("*.bin")}
    assert names
    assert all(
        (tmp_path / "far" / name).read_bytes() == (tmp_path / "near" / name).read_bytes()
        for name in names
    )


@pytest.mark.slow
def test_a_reload_is_proven_of_a_copy_and_says_what_it_downloads(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = CASE.parents[2] / "accelerate-1.15.0" / "clean-safetensors" / "checkpoint"
    store = open_store(url)
    for path in folder.iterdir():
        store.put(path.name, path.read_bytes())
    arguments = [
        "--device-map",
        "auto",
        "--model",
        "tests.devices.reload_models:two_layer",
        "--json",
    ]
    status = run(["verify", str(folder), *arguments])
    wanted = json.loads(capsys.readouterr().out)
    assert run(["verify", url, *arguments]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == url
    assert found["reload"].keys() == wanted["reload"].keys()
    assert found["findings"] == json.loads(json.dumps(wanted["findings"]).replace(str(folder), url))
    assert run(["verify", str(folder), "--data", *arguments]) == status
    wanted = json.loads(capsys.readouterr().out)
    assert run(["verify", url, "--data", *arguments]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["data"] == json.loads(json.dumps(wanted["data"]).replace(str(folder), url))
    assert found["reload"]["verdict"] == "no fault found in what was exercised"
    run(["verify", url, "--data", *arguments[:-1]])
    out, err = capsys.readouterr()
    assert f"{url}: downloading " in err
    assert tempfile.gettempdir() not in out


def test_an_interrupt_of_a_seal_says_whether_the_url_is_sealed(url: str) -> None:
    """A file of that name was looked for on this machine, so that every URL was "unchanged"."""
    uploaded(url, CASE.parents[2] / "accelerate-1.15.0" / "clean-safetensors" / "checkpoint")
    describe = state_after_seal(url)
    assert describe() == f"{url} is unchanged"
    assert seal(url).written
    assert describe() == f"{url} is sealed; next: ckptfix verify {url}"
