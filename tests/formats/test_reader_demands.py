"""What torch's readers demand of a file: each fault is made by hand, and refused by them and by
ckptfix.
"""

import io
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix.diagnosis.check import check
from ckptfix.errors import FormatError
from ckptfix.formats.torch_zip import END, END64, LOCATOR
from tests.formats.making import model, parsed, saved

LEGACY = {"_use_new_zipfile_serialization": False}


def entry_of(data: bytes, name: str) -> int:
    """Return where the entry of a record begins in the central directory."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        start = archive.start_dir
    return data.index(f"archive{name}".encode(), start) - 46


def put(data: bytes, at: int, value: int, width: int) -> bytes:
    return data[:at] + value.to_bytes(width, "little") + data[at + width :]


def flagged(bit: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        at = entry_of(data, "/data/0") + 8
        return put(data, at, int.from_bytes(data[at : at + 2], "little") | bit, 2)

    return change


def in_entry(offset: int, value: int, width: int) -> Callable[[bytes], bytes]:
    return lambda data: put(data, entry_of(data, "/data/0") + offset, value, width)


def from_end(offset: int, value: int, width: int) -> Callable[[bytes], bytes]:
    return lambda data: put(data, len(data) - END.size - offset, value, width)


REFUSED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "encrypted": (flagged(0x1), "encrypted or a patch"),
    "a patch": (flagged(0x20), "encrypted or a patch"),
    "strongly encrypted": (flagged(0x40), "encrypted or a patch"),
    "masked": (flagged(0x2000), "encrypted or a patch"),
    "in another volume": (in_entry(34, 2, 2), "in volume 2"),
    "many volumes": (from_end(LOCATOR.size - 16, 2, 4), "one of 2 volumes"),
    "short end record": (from_end(LOCATOR.size + END64.size - 4, 43, 8), "too short"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_miniz_refuses_is_refused(tmp_path: Path, name: str) -> None:
    change, words = REFUSED[name]
    data = change(saved(model().state_dict()))
    with pytest.raises(RuntimeError, match="PytorchStreamReader failed"):
        torch.load(io.BytesIO(data))
    with pytest.raises(FormatError, match=words):
        parsed(tmp_path, data)


def test_a_record_that_is_marked_as_a_folder_is_refused(tmp_path: Path) -> None:
    data = in_entry(38, 0x10, 4)(saved({"a": torch.arange(1.0, 9.0)}))
    # torch reports nothing and gives whatever was in memory, so that only the attribute shows it.
    assert list(torch.load(io.BytesIO(data))) == ["a"]
    with pytest.raises(FormatError, match="marked as a folder"):
        parsed(tmp_path, data)


@pytest.mark.parametrize(
    "change",
    [
        in_entry(34, 1, 2),
        in_entry(6, 63, 2),
        in_entry(38, 0o100644 << 16, 4),
        in_entry(38, 0x20, 4),
    ],
    ids=["volume 1", "version needed", "mode of Unix", "attribute of MS-DOS"],
)
def test_what_other_writers_put_into_entries_is_read(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    data = change(saved(model().state_dict()))
    assert torch.load(io.BytesIO(data)).keys() == model().state_dict().keys()
    assert parsed(tmp_path, data).trailing == 0


def test_entries_of_folders_are_read(tmp_path: Path) -> None:
    """Info-ZIP writes them when a file was unpacked and packed again."""
    source, stream = zipfile.ZipFile(io.BytesIO(saved(model().state_dict()))), io.BytesIO()
    with zipfile.ZipFile(stream, "w") as target:
        for folder in ("archive/", "archive/data/"):
            entry = zipfile.ZipInfo(folder)
            entry.external_attr = 0o40755 << 16 | 0x10
            target.writestr(entry, b"")
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert torch.load(io.BytesIO(stream.getvalue())).keys() == model().state_dict().keys()
    assert parsed(tmp_path, stream.getvalue()).trailing == 0


@pytest.fixture
def without_checksums() -> Any:
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize(
    ("record", "text"), [(".storage_alignment", b"6!"), (".data/serialization_id", b"\xff" * 40)]
)
@pytest.mark.usefixtures("without_checksums")
def test_a_small_record_that_torch_cannot_read_is_refused(
    tmp_path: Path, record: str, text: bytes
) -> None:
    data = saved(model().state_dict())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = next(one for one in archive.infolist() if one.filename.endswith(record))
    extra = int.from_bytes(data[info.header_offset + 28 : info.header_offset + 30], "little")
    at = info.header_offset + 30 + len(info.filename) + extra
    data = data[:at] + text + data[at + len(text) :]
    with pytest.raises(ValueError, match=r"invalid literal for int|can't decode"):
        torch.load(io.BytesIO(data))
    with pytest.raises(FormatError, match=f"the record {record} is"):
        parsed(tmp_path, data)


FAULTS: dict[str, tuple[bytes, bytes, str]] = {
    "an argument less": (b"K\x00K\x04\x85", b"K\x00NN\x85", "64-bit ints, found None"),
    "an offset that is a string": (
        b"K\x00K\x04\x85",
        b"U\x00K\x04\x85",
        "expected a non-negative int, found a str",
    ),
    "a flag that is a number": (b"\x89", b"N", "expected a bool, found None"),
    "an unknown device": (b"cpu", b"cqu", "which is not a torch device"),
    "hooks that are a number": (b")R", b"NR", "arguments that are not a tuple"),
    "a call of a storage": (
        b"collections\nOrderedDict\n",
        b"torch\nFloatStorage\n",
        "as a function, but it is not one",
    ),
    "a call of a dtype": (
        b"collections\nOrderedDict\n",
        b"torch\nfloat32\n",
        "as a function, but it is not one",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_call_that_torch_cannot_make_is_refused_without_a_checksum(
    tmp_path: Path, name: str
) -> None:
    old, new, words = FAULTS[name]
    data = saved({"a": torch.arange(4.0)}, **LEGACY)
    assert old in data
    at = data.rindex(old)
    data = data[:at] + new + data[at + len(old) :]
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        torch.load(io.BytesIO(data))
    with pytest.raises(FormatError, match=words):
        parsed(tmp_path, data)


@pytest.mark.filterwarnings("ignore")  # quantized tensors are deprecated
def test_what_torch_writes_is_read_without_a_checksum(tmp_path: Path) -> None:
    """Each kind of object that torch pickles, in a file of which every call is compared with its
    function.
    """
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    with_attribute = torch.nn.Parameter(torch.ones(2))
    with_attribute.note = "kept"
    values = {
        "ordered": OrderedDict(a=1),
        "counter": Counter("aab"),
        "set": {1, 2},
        "complex": 1 + 2j,
        "bytes": b"\xff\x00",
        "bytearray": bytearray(b"xy"),
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "device 1": torch.device("cuda:1"),
        "dtype": torch.bfloat16,
        "layout": torch.strided,
        "parameter": parameter,
        "attribute": with_attribute,
        "empty": torch.empty(0, 3)[:, 1:],
        "scalar": torch.tensor(3.0),
        "strided": torch.arange(12.0).reshape(3, 4).t()[1:],
        "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": torch.empty(2, device="meta"),
        "keys": {(1, "a"): None, None: 2.5, True: [()]},
    }
    torch.serialization.set_crc32_options(False)
    try:
        for name, value in values.items():
            for options in ({}, LEGACY):
                data = saved({"value": value, "weight": torch.ones(2)}, **options)
                torch.load(io.BytesIO(data))
                assert parsed(tmp_path, data).trailing == 0, name
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (-1, (2, 3), (3, 1)),
        (0, (-2, 3), (3, 1)),
        (0, (2, 3), (-3, 1)),
        (0, (2, 3), (1,)),
        (0, (6,), (3, 1)),
    ],
)
def test_numbers_of_a_tensor_that_torch_refuses_are_damage(
    tmp_path: Path, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    class Made:
        def __reduce__(self) -> tuple[Any, ...]:
            storage = torch.arange(6.0).untyped_storage()
            typed = torch.storage.TypedStorage(
                wrap_storage=storage, dtype=torch.float32, _internal=True
            )
            return torch._utils._rebuild_tensor_v2, (
                typed,
                offset,
                size,
                stride,
                False,
                OrderedDict(),
            )

    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": Made()}, path)
    with pytest.raises(RuntimeError):
        torch.load(path, weights_only=True)
    report = check(path)
    assert [finding.code for finding in report.findings] == ["malformed-file"]
    assert report.status == 1


def test_an_untyped_storage_in_a_legacy_file_is_told(tmp_path: Path) -> None:
    data = saved({"a": torch.ones(2, dtype=torch.uint16)}, **LEGACY)
    with pytest.raises(AttributeError, match="has no attribute 'dtype'"):
        torch.load(io.BytesIO(data))
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    assert [one.code for one in check(tmp_path).findings] == ["unloadable-pickle"]


def test_a_value_that_belongs_to_nothing_is_refused(tmp_path: Path) -> None:
    data = saved({"a": torch.arange(4.0)}, **LEGACY)
    at = data.rindex(b"\x80\x02}q\0") + 2
    with pytest.raises(FormatError, match="leaves unused values on its stack"):
        parsed(tmp_path, data[:at] + b"N" + data[at:])
