"""Downloads that were cut short: each program's temporary name, and the library itself where it
gives the name.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub._local_folder import get_local_download_paths
from s3transfer.utils import OSUtils  # type: ignore[import-untyped]

from ckptfix import check, latest_checkpoint
from ckptfix.errors import UsageError
from ckptfix.wording import human_size
from tests.diagnosis.test_hidden_files import exports, is_loaded  # noqa: F401
from tests.diagnosis.test_misnamed import Small
from tests.stores.servers import upload_folder


def _after(ending: str) -> Callable[[Path], Path]:
    return lambda file: file.with_name(file.name + ending)


def _safari(file: Path) -> Path:
    """A folder with the file, and a list of properties."""
    folder = file.with_name(f"{file.name}.download")
    folder.mkdir()
    (folder / "Info.plist").write_text("<plist/>")
    return folder / file.name


def _boto(file: Path) -> Path:
    names = (Path(OSUtils().get_temp_filename(str(file))) for _ in range(100))
    return next(name for name in names if not name.name.rpartition(".")[2].isdigit())


def _hub(file: Path) -> Path:
    paths: Any = get_local_download_paths(file.parent, file.name)
    paths.lock_path.touch()
    return Path(paths.incomplete_path("0123abcd"))


DOWNLOADS: dict[str, Callable[[Path], Path]] = {
    "Chrome": _after(".crdownload"),
    "Firefox": _after(".part"),
    "Internet Explorer, or rclone": _after(".partial"),
    "rclone": _after(".1a2b3c4d.partial"),
    "Opera": _after(".opdownload"),
    "Safari": _safari,
    "uTorrent": _after(".!ut"),
    "qBittorrent": _after(".!qB"),
    "BitComet": _after(".bc!"),
    "WinSCP": _after(".filepart"),
    "MinIO": _after(".part.minio"),
    "gsutil": _after("_.gstmp"),
    "boto3": _boto,
    "rsync": lambda file: file.with_name(f".{file.name}.a8XkQ1"),
    "an atomic writer": _after(".tmp"),
    "huggingface_hub": _hub,
    "the cache of huggingface_hub": _after(".incomplete"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Small().saved(tmp_path_factory.mktemp("saved") / "checkpoint_0")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run/checkpoint_0"))


def _cut(file: Path, to: Path) -> None:
    data = file.read_bytes()
    file.unlink()
    to.write_bytes(data[: len(data) // 2])


def problems(folder: Path | str) -> list[str]:
    return [
        str(finding)
        for finding in check(folder).all_findings
        if finding.severity.value != "note" and finding.code == "interrupted-save"
    ]


def told(program: str, part: Path, folder: Path, name: str) -> str:
    where = part.relative_to(folder)
    if program == "huggingface_hub":
        return (
            f"{name} was not downloaded completely: {where} has {human_size(part.stat().st_size)} "
            "of it"
        )
    return f"{where}: left over from an interrupted save or copy; {name} is missing"


SOME = ("Chrome", "Safari", "huggingface_hub")


@pytest.mark.parametrize(
    ("program", "name"),
    [
        *((program, "optimizer.bin") for program in DOWNLOADS),
        *((program, name) for program in SOME for name in ("model.safetensors", "scheduler.bin")),
    ],
)
def test_the_download_of_a_state_was_cut_short(folder: Path, program: str, name: str) -> None:
    assert problems(folder) == []
    part = DOWNLOADS[program](folder / name)
    _cut(folder / name, part)
    with pytest.raises(OSError, match=r"[Nn]o such|not found|does not exist|doesn't exist"):
        Small().accelerator.load_state(str(folder))
    shown = part.parent if program == "Safari" else part
    assert problems(folder) == [told(program, shown, folder, name)]
    with pytest.raises(UsageError, match=r"is missing|no model weights|not downloaded completely"):
        latest_checkpoint(folder.parent)


@pytest.mark.parametrize("program", [*SOME, "aria2"])
def test_a_download_of_a_store_is_named(folder: Path, program: str) -> None:
    _cut(
        folder / "optimizer.bin",
        (DOWNLOADS | {"aria2": _after(".aria2")})[program](folder / "optimizer.bin"),
    )
    url = f"memory://{os.urandom(6).hex()}/checkpoint"
    upload_folder(folder, url)
    assert problems(url) == problems(folder) != []


LEFT_ALONE = [name for name in DOWNLOADS if name not in ("Firefox", "rsync", "an atomic writer")]


@pytest.mark.parametrize("program", [name for name in LEFT_ALONE if "cache" not in name])
def test_a_download_next_to_its_file_is_left_over(folder: Path, program: str) -> None:
    DOWNLOADS[program](folder / "optimizer.bin").write_bytes(b"half")
    Small().accelerator.load_state(str(folder))
    assert check(folder).status == 0


def test_aria2_gives_a_file_its_name_before_it_is_complete(folder: Path) -> None:
    (folder / "optimizer.bin.aria2").write_bytes(b"\0\1")
    assert problems(folder) == ["optimizer.bin.aria2: left over from an interrupted save or copy"]


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.20240101",
        "notes.crdownload",
        "photo.download",
        "deadbeef",
        "model.cafebabe",
        "optimizer.bin.backup",
        "Unconfirmed 123456.crdownload",
        "optimizer.bin.md5",
        "optimizer.bin.sha256",
    ],
)
def test_other_files_are_no_downloads(folder: Path, name: str) -> None:
    """A folder may hold downloads of anything else, and copies with the date of a day."""
    (folder / name).write_bytes(b"half")
    assert check(folder).status == 0


@pytest.mark.parametrize(
    ("program", "library"),
    [
        *(
            (name, "transformers")
            for name in DOWNLOADS
            if name not in ("rsync", "an atomic writer")
        ),
        *((name, library) for name in SOME for library in ("diffusers", "peft")),
    ],
)
def test_the_download_of_a_config_was_cut_short(
    exports: Mapping[str, Path],  # noqa: F811
    tmp_path: Path,
    program: str,
    library: str,
) -> None:
    folder = Path(shutil.copytree(exports[library], tmp_path / "export"))
    name = "adapter_config.json" if library == "peft" else "config.json"
    part = DOWNLOADS[program](folder / name)
    _cut(folder / name, part)
    assert not is_loaded(folder, library, exports["transformers"])
    shown = part.parent if program == "Safari" else part
    assert problems(folder) == [told(program, shown, folder, name)]
