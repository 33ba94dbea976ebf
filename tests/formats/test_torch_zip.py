"""Torch zip files: hostile numbers, checksums, and the appended edit as every reader sees it."""

import io
import os
import struct
import threading
import time
import zipfile
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix.errors import ChangedError, FormatError, TruncatedError, UnsupportedFormat
from ckptfix.formats import torch_zip
from ckptfix.formats.torch_file import crc_mismatches, read_torch_file
from ckptfix.formats.torch_pickle import tensor_infos
from ckptfix.storage.files import FileReader
from ckptfix.storage.reading import open_reader
from tests.formats.making import (
    Strip,
    edited,
    model,
    nested_state_dict,
    new_names,
    parsed,
    read,
    saved,
)

STRIP = Strip("module.module.")


def check(path: Path, expected: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
    for options in ({}, {"mmap": True}, {"weights_only": False}):
        loaded = torch.load(path, **options)
        assert list(loaded) == list(expected)
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
        if metadata is not None:
            assert loaded._metadata == metadata
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_records_and_offsets(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    torch.save(nested_state_dict(), path)
    data = path.read_bytes()
    with open_reader(path) as reader:
        archive = torch_zip.read_zip(reader)
    with zipfile.ZipFile(path) as other:
        assert [record.name for record in archive.records] == other.namelist()
        for record in archive.records:
            assert data[record.data_offset : record.data_offset + record.size] == other.read(
                record.name
            )
            assert record.crc == other.getinfo(record.name).CRC
    assert (archive.root, archive.trailing, archive.end) == ("x", 0, len(data))


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_edit_as_torch_and_zipfile_read_it(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "model.bin"
    state = nested_state_dict()
    torch.save(state, path, pickle_protocol=protocol)
    old = path.read_bytes()
    new = edited(path, STRIP)
    assert new.startswith(old)
    path.write_bytes(new)
    plain = model().state_dict()
    if protocol == 2:
        check(path, dict(plain), plain._metadata)
    loaded = torch.load(path, weights_only=False)
    assert list(loaded) == list(plain)
    assert loaded["0.weight"].data_ptr() == loaded["2.weight"].data_ptr()  # still tied
    assert edited(path, STRIP)[: len(new)] == new


def test_storage_offsets_can_still_be_computed(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save(nested_state_dict(), path)
    path.write_bytes(edited(path, STRIP))
    with torch.utils.serialization.config.patch("load.calculate_storage_offsets", True):
        check(path, dict(model().state_dict()))


def test_edits_of_edits_grow_by_one_record_and_directory(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save(nested_state_dict(3), path)
    sizes = [path.stat().st_size]
    for prefix in ("module.", "module.", "module."):
        path.write_bytes(edited(path, Strip(prefix)))
        sizes.append(path.stat().st_size)
    growth = [after - before for before, after in pairwise(sizes)]
    assert max(growth) <= growth[0] + torch_zip.ALIGNMENT
    check(path, dict(model().state_dict()))


def test_trailing_bytes_are_counted_and_not_part_of_an_edit(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save(nested_state_dict(), path)
    clean = edited(path, STRIP)
    with path.open("ab") as stream:
        stream.write(bytes(1000))
    assert read(path).trailing == 1000
    assert edited(path, STRIP) == clean


def test_every_truncation_says_so(tmp_path: Path) -> None:
    data = saved({"a": torch.ones(2)})
    for length in range(4, len(data)):
        with pytest.raises(FormatError):
            parsed(tmp_path, data[:length])
    with pytest.raises(TruncatedError, match=rf"byte {len(data) - 30}") as caught:
        parsed(tmp_path, data[:-30])
    assert caught.value.have == len(data) - 30
    with pytest.raises(TruncatedError) as caught:
        parsed(tmp_path, data[:-1])
    assert caught.value.need == len(data)


@pytest.mark.slow
def test_every_byte_flip_parses_or_raises_format_error(tmp_path: Path) -> None:
    data = bytearray(saved({"a": torch.ones(2)}))
    path = tmp_path / "flip.bin"
    path.write_bytes(data)
    begin = time.process_time()
    with path.open("r+b", buffering=0) as stream:
        for place in range(len(data)):
            for flip in (0xFF, 0x01):
                os.pwrite(stream.fileno(), bytes([data[place] ^ flip]), place)
                with suppress(FormatError):
                    file = read_torch_file(FileReader(stream.fileno(), len(data), path))
                    list(
                        crc_mismatches(
                            file, FileReader(stream.fileno(), len(data), path), every_record=True
                        )
                    )
            os.pwrite(stream.fileno(), bytes([data[place]]), place)
    assert time.process_time() - begin < 20


def damaged(entry: int, offset: int, value: bytes, data: bytes | None = None) -> bytes:
    """Overwrite a field in the directory entry of a record."""
    data = data or saved({"a": torch.ones(2)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        position = archive.start_dir
    for _ in range(entry):
        lengths = struct.unpack_from("<3H", data, position + 28)
        position += 46 + sum(lengths)
    return data[: position + offset] + value + data[position + offset + len(value) :]


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"XXXX", "broken"),
        (8, b"\x01\x00", "encrypted"),
        (10, b"\x63\x00", "method 99"),
        (20, b"\x00\x00\x00\x7f" * 2, "ends at byte"),
        (20, b"\xff\xff\xff\xff", "ZIP64"),
        (24, b"\x01\x00\x00\x00", "stored"),
        (42, b"\xf0\xff\xff\x7f", "overlaps"),
        (42, b"\x01\x00\x00\x00", "overlaps|contradicts"),
        (28, b"\xff\xff", "broken"),
        (46, b"/tmp/x/a", "point outside its folder"),
        (46, b"../x/dat", "point outside its folder"),
        (46, b"a\\b/data", "point outside its folder"),
        (46, b"a\x00b/data", "point outside its folder"),
        (46, b"\xff\xfe\xfd\xfc", "UTF-8"),
        (46, b"archivf/data.pkl", "contradicts"),
    ],
)
def test_hostile_directories(tmp_path: Path, offset: int, value: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parsed(tmp_path, damaged(0, offset, value))


def ends(data: bytes, **fields: int) -> bytes:
    """Overwrite numbers in the ZIP64 end record and in the old one alike."""
    layout = {
        "here": (24, 8, 8, 2),
        "count": (32, 8, 10, 2),
        "size": (40, 8, 12, 4),
        "offset": (48, 8, 16, 4),
    }
    out = bytearray(data)
    for name, value in fields.items():
        wide, wide_size, narrow, narrow_size = layout[name]
        limit = (1 << 8 * narrow_size) - 1
        out[-98 + wide : -98 + wide + wide_size] = value.to_bytes(wide_size, "little")
        out[-22 + narrow : -22 + narrow + narrow_size] = min(value, limit).to_bytes(
            narrow_size, "little"
        )
    return bytes(out)


@pytest.mark.parametrize(
    "fields",
    [
        {"count": 2**63, "here": 2**63}, {"size": 2**63}, {"offset": 2**63},
        {"count": 0, "here": 0}, {"size": 0}, {"offset": 0}, {"count": 3, "here": 3}, {"count": 5},
        {"size": 2**64 - 1, "offset": 2},
    ],
)  # fmt: skip
def test_end_records_that_lie(tmp_path: Path, fields: dict[str, int]) -> None:
    with pytest.raises(FormatError):
        parsed(tmp_path, ends(saved({"a": torch.ones(2)}), **fields))


def test_end_records_that_disagree(tmp_path: Path) -> None:
    data = bytearray(saved({"a": torch.ones(2)}))
    data[-22 + 16] ^= 1
    with pytest.raises(FormatError, match="disagree"):
        parsed(tmp_path, bytes(data))


def rezipped(
    data: bytes, *, skip: str = "", add: dict[str, bytes] | None = None, method: int = 0
) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in old.namelist():
            if not skip or not name.endswith(skip):
                new.writestr(name, (add or {}).get(name, old.read(name)))
        for name in set(add or {}) - set(old.namelist()):
            new.writestr(name, (add or {})[name])
    return out.getvalue()


def test_files_of_another_zip_writer(tmp_path: Path) -> None:
    data = rezipped(saved(nested_state_dict()))
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    path.write_bytes(edited(path, STRIP))
    check(path, dict(model().state_dict()))


def test_other_kinds_of_archive(tmp_path: Path) -> None:
    data = saved({"a": torch.ones(2)})
    with pytest.raises(FormatError, match=r"no data\.pkl"):
        parsed(tmp_path, rezipped(data, skip="data.pkl"))
    with pytest.raises(FormatError, match="'0' needs 8 bytes but has no record"):
        parsed(tmp_path, rezipped(data, skip="data/0"))
    with pytest.raises(FormatError, match="has a record of 4 bytes"):
        parsed(tmp_path, rezipped(data, add={"archive/data/0": b"1234"}))
    with pytest.raises(UnsupportedFormat, match="big-endian"):
        parsed(tmp_path, rezipped(data, add={"archive/byteorder": b"big"}))
    with pytest.raises(UnsupportedFormat, match="TorchScript"):
        parsed(tmp_path, rezipped(data, add={"archive/constants.pkl": b""}))
    for changed, says in (
        (rezipped(data, skip="version"), "no record 'version'"),
        (rezipped(data, add={"archive/version": b"11\n"}), "version is b'11"),
        (rezipped(data, add={"archive/version": b"0"}), "version is b'0'"),
        (rezipped(data, add={"archive/.data/version": b"\0\0"}), "version is b"),
        (rezipped(data, add={"archive/byteorder": b"grr"}), "byteorder is b'grr'"),
        (rezipped(data, add={"other/data": b"1"}), "'other/data' is not in archive/"),
        (
            rezipped(data, add={"archive/data/0": bytes(24)}),
            "needs 8 bytes but has a record of 24 bytes",
        ),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            torch.load(io.BytesIO(changed), weights_only=True)
        with pytest.raises(FormatError, match=says):
            parsed(tmp_path, changed)
    for changed in (rezipped(data, skip="byteorder"), rezipped(data, skip="serialization_id")):
        assert torch.load(io.BytesIO(changed), weights_only=True)["a"].tolist() == [1, 1]
        assert parsed(tmp_path, changed)
    twice = io.BytesIO(data)
    with zipfile.ZipFile(twice, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data.pkl", b"N.")
    with pytest.raises(FormatError, match="two records of the same name"):
        parsed(tmp_path, twice.getvalue())


def test_compressed_records_are_read_but_not_edited(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(rezipped(saved(nested_state_dict()), method=zipfile.ZIP_DEFLATED))
    file = read(path)
    assert [tensor.fqn for tensor in file.state_dicts[0].tensors] == list(nested_state_dict())
    assert {info.data_offsets for info in tensor_infos(file)} == {None}
    with pytest.raises(UnsupportedFormat, match="compressed"):
        edited(path, STRIP)


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    packed = rezipped(
        saved({"a": 1}), add={"archive/data.pkl": bytes(1 << 22)}, method=zipfile.ZIP_DEFLATED
    )
    with pytest.raises(FormatError, match="unpack to 5 bytes"):
        parsed(tmp_path, damaged(0, 24, b"\x05\x00\x00\x00", packed))


def test_crc(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save({"a": torch.ones(3 << 19), "b": torch.ones(2)}, path)
    file = read(path)
    begin, _ = file.storage_ranges["0"]
    with path.open("r+b") as stream:
        stream.seek(begin + 5_000_000)
        stream.write(b"!")
    seen: list[int] = []
    with open_reader(path) as reader:
        assert list(crc_mismatches(file, reader, every_record=False)) == []
        assert list(crc_mismatches(file, reader, every_record=True, progress=seen.append)) == [
            ("model/data/0", "0")
        ]
    assert sum(seen) > 6 << 20
    assert max(seen) <= 1 << 20


def test_no_crc_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        torch.save(nested_state_dict(), path)
    finally:
        torch.serialization.set_crc32_options(before)
    with open_reader(path) as reader:
        assert list(crc_mismatches(read(path), reader, every_record=True)) == []


def test_an_edit_beyond_4_gib(tmp_path: Path) -> None:
    """A real archive, its records moved behind a hole of 5 GiB: all offsets need ZIP64."""
    data = saved(nested_state_dict())
    hole = 5 << 30
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        start, infos = archive.start_dir, archive.infolist()
    directory = b""
    for info in infos:
        name, size = info.filename.encode(), info.file_size
        extra = struct.pack("<HHQ", 1, 8, hole + info.header_offset)
        head = (
            b"PK\1\2",
            45,
            45,
            0x800,
            0,
            0,
            0,
            info.CRC,
            size,
            size,
            len(name),
            len(extra),
            0,
            0,
            0,
            0,
        )
        directory += struct.pack("<4s6H3I5HI", *head) + b"\xff" * 4 + name + extra
    tail = torch_zip.end_records(hole + start, len(directory), len(infos))
    path = tmp_path / "model.bin"
    with path.open("wb") as stream:
        stream.write(b"PK\3\4")  # what a reader looks for first
        stream.seek(hole)
        stream.write(data[:start] + directory + tail)
    with open_reader(path) as reader:
        file = read_torch_file(reader)
        edit = file.edit(reader, new_names(file, STRIP))
    assert isinstance(edit, torch_zip.AppendedBytes)
    with path.open("ab") as stream:
        stream.write(edit.data)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.getinfo("archive/data.pkl").header_offset > hole
    loaded = torch.load(path, mmap=True)
    plain = model().state_dict()
    assert list(loaded) == list(plain)
    assert all(torch.equal(loaded[name], plain[name]) for name in plain)


def zipped(*records: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in records:
            archive.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize(
    "names",
    [
        ("archive/data.pkl", "archive/DATA.PKL"),
        ("archive/DATA.PKL", "archive/data.pkl"),
        ("archive/data.pkl", "ARCHIVE/data.pkl"),
        ("archive/data.pkl", "archive/data/a", "archive/data/A"),
        ("archive/data.pkl", "archive/ByteOrder"),
        ("archive/data.pkl", "archive/Constants.pkl"),
        ("archive/Data.pkl",),
    ],
)
def test_a_name_that_torch_finds_without_regard_to_case_is_refused(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    with pytest.raises(FormatError, match=r"case|no data\.pkl"):
        parsed(
            tmp_path,
            zipped(*[(name, b"3" if "version" in name else b"\x80\x02}.") for name in names]),
        )


def test_case_counts_only_for_a_to_z(tmp_path: Path) -> None:
    names = (
        "archive/data.pkl",
        "archive/version",
        "archive/data/\u00e9",
        "archive/data/\u00c9",
        "archive/other/Data.pkl",
    )
    assert (
        parsed(
            tmp_path,
            zipped(*[(name, b"3" if "version" in name else b"\x80\x02}.") for name in names]),
        ).kind
        == "a torch zip file"
    )


def test_headers_around_the_directory(tmp_path: Path) -> None:
    """One record is said to begin just before the directory, one behind it: no read may end between
    them.
    """
    body = bytes(100)

    def entry(name: bytes, offset: int) -> bytes:
        head = (b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0, 0, 0, 0, 0, offset)
        return struct.pack("<4s6H3I5H2I", *head) + name

    for offsets in ((90, 1100), (1100, 90), (90, 100), (90, 95)):
        directory = entry(b"archive/data.pkl", offsets[0]) + entry(b"archive/x", offsets[1])
        end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2, 2, len(directory), len(body), 0)
        with pytest.raises(FormatError, match="overlaps"):
            parsed(tmp_path, b"PK\3\4" + body[4:] + directory + end)


@pytest.mark.parametrize("zeros", [70_000, 1 << 20, (3 << 20) + 5])
def test_zeros_behind_the_end_are_trailing_bytes_however_many(tmp_path: Path, zeros: int) -> None:
    data = saved({"a": torch.ones(2)})
    file = parsed(tmp_path, data + bytes(zeros))
    assert file.trailing == zeros
    assert [tensor.fqn for tensor in file.state_dicts[0].tensors] == ["a"]


@pytest.mark.parametrize(
    "junk", [70_000, *((1 << 20) - near for near in (-1, 0, 21, 22, 41, 42, 43)), (3 << 20) + 5]
)
def test_other_bytes_behind_the_end_are_trailing_bytes_further_than_torch_looks(
    tmp_path: Path, junk: int
) -> None:
    data = saved({"a": torch.ones(2)})
    noise = b"PK\5\6 is no end record" + bytes(range(256)) * (junk // 256 + 1)
    file = parsed(tmp_path, data + noise[:junk])
    assert file.trailing == junk
    assert [tensor.fqn for tensor in file.state_dicts[0].tensors] == ["a"]
    with pytest.raises(RuntimeError, match="central directory"):
        torch.load(io.BytesIO(data + noise[:junk]))


def test_without_an_end_record_both_causes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = saved({"a": torch.ones(2)})
    with pytest.raises(
        TruncatedError, match=r"last 16 MiB: it was cut off at byte .* or other data follows"
    ):
        parsed(tmp_path, data + b"x" * (17 << 20))
    # A file that was searched from end to end: it said "in its last 16 MiB" of 300 bytes.
    with pytest.raises(
        TruncatedError, match=r"no end record: the file was cut off at byte 300 or earlier$"
    ):
        parsed(tmp_path, data[:300])
    with pytest.raises(
        TruncatedError, match=r"the last 70000 of .* bytes are zeros, so the write was probably"
    ):
        parsed(tmp_path, data[:-100] + bytes(70_000))
    monkeypatch.setattr("ckptfix.formats.torch_zip.MAX_ZEROS", 1 << 20)
    with pytest.raises(TruncatedError, match="are zeros"):
        parsed(tmp_path, data + bytes(17 << 20))


def test_a_packed_pickle_is_unpacked_only_if_it_is_small(tmp_path: Path) -> None:
    pickled = b"\x80\x02B" + struct.pack("<I", 17 << 20) + bytes(17 << 20) + b"."
    data = rezipped(saved({"a": 1}), add={"archive/data.pkl": pickled}, method=zipfile.ZIP_DEFLATED)
    assert len(data) < 100_000
    with pytest.raises(UnsupportedFormat, match=r"compressed record .* over the limit of 16777216"):
        parsed(tmp_path, data)


def test_checksums_of_many_large_records(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    torch.save(
        {str(number): torch.full((1 << 19,), float(number + 1)) for number in range(8)}, path
    )
    before = threading.enumerate()
    with open_reader(path) as reader, path.open("r+b") as stream:
        file = read_torch_file(reader)
        assert list(crc_mismatches(file, reader, every_record=True)) == []
        assert isinstance(file.container, torch_zip.TorchZip)
        places = torch_zip.storage_records(file.container)
        for key in ("6", "2"):
            stream.seek(places[key].data_offset + places[key].size - 1)
            stream.write(b"\x77")
        stream.flush()
        seen: list[int] = []
        found = list(crc_mismatches(file, reader, every_record=True, progress=seen.append))
        assert found == [("x/data/2", "2"), ("x/data/6", "6")]
        assert sum(seen) > 16 << 20
        first = crc_mismatches(file, reader, every_record=True)
        assert next(first) == ("x/data/2", "2")
        del first  # nobody wants the rest
        assert threading.enumerate() == before
        stream.truncate(places["5"].data_offset)
        with pytest.raises(ChangedError, match="changed while it was read"):
            list(crc_mismatches(file, reader, every_record=True))
