"""Zip archives laid out as torch does, beyond 4 GiB too, and anywhere in a larger file."""

import io
import os
import struct
import zipfile
import zlib
from pathlib import Path

import pytest

from ckptfix.formats.torch_zip import read_end, read_zip
from ckptfix.storage.reading import open_reader
from ckptfix.storage.recipes import Literal
from ckptfix.tensors.new_files import Computed, Data, Part
from ckptfix.tensors.new_torch_files import NewRecord, zip_parts

GIB = 1 << 30
U32 = 0xFFFFFFFF


def crc_of_zeros(length: int) -> int:
    """Return the CRC-32 of so many zeros without taking time for each."""
    crc, block = 0, bytes(1 << 20)
    for _ in range(length >> 20):
        crc = zlib.crc32(block, crc)
    return zlib.crc32(bytes(length & 0xFFFFF), crc)


def written(parts: tuple[Part, ...], sources: dict[str, bytes]) -> bytes:
    crcs = {fqn: zlib.crc32(data) for fqn, data in sources.items()}
    data = bytearray()
    for part in parts:
        match part:
            case Literal(literal):
                made = literal
            case Data(fqn):
                made = sources[fqn]
            case Computed(_, make):
                made = make(crcs)
        assert len(made) == part.length
        data += made
    return bytes(data)


def sparse(path: Path, parts: tuple[Part, ...], crcs: dict[str, int]) -> None:
    """Write an archive whose tensors are zeros, as holes."""
    with open(path, "wb") as file:
        for part in parts:
            match part:
                case Data():
                    file.seek(part.length, os.SEEK_CUR)
                case Literal(literal):
                    file.write(literal)
                case Computed(_, make):
                    file.write(make(crcs))
        assert file.tell() == sum(part.length for part in parts)


def test_every_record_is_there_aligned_and_right() -> None:
    sources = {"one": os.urandom(1000), "none": b"", "two": b"\1"}
    parts = tuple(
        zip_parts(
            [
                NewRecord("archive/data.pkl", Literal(b"a pickle")),
                NewRecord("archive/ünicode", Literal(b"")),
                *(
                    NewRecord(f"archive/data/{name}", Data(name, len(data)))
                    for name, data in sources.items()
                ),
                NewRecord("archive/id", Computed(8, lambda crcs: b"%08x" % crcs["one"])),
            ]
        )
    )
    data = written(parts, sources)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/one") == sources["one"]
        assert archive.read("archive/id") == b"%08x" % zlib.crc32(sources["one"])
        assert archive.read("archive/ünicode") == archive.read("archive/data/none") == b""
        assert {info.CRC for info in archive.infolist() if info.file_size == 0} == {0}


def test_an_archive_can_stand_anywhere_in_a_file(tmp_path: Path) -> None:
    parts = tuple(
        zip_parts(
            [
                NewRecord("archive/data.pkl", Literal(b"\x80\2N.")),
                NewRecord("archive/x", Data("x", 3)),
            ]
        )
    )
    data = written(parts, {"x": b"abc"})
    path = tmp_path / "items.distcp"
    path.write_bytes(b"another item" + data + b"one more")
    with open_reader(path) as reader:
        archive = read_zip(reader.window(12, len(data)))
    assert [(record.name, record.data_offset % 64) for record in archive.records] == [
        ("archive/data.pkl", 0),
        ("archive/x", 0),
    ]
    assert archive.trailing == 0


@pytest.mark.parametrize("size", [U32 - 1, U32, 4 * GIB, 4 * GIB + 12345])
def test_records_and_offsets_from_4_gib_on(tmp_path: Path, size: int) -> None:
    parts = tuple(
        zip_parts(
            [
                NewRecord("m/data.pkl", Literal(b"\x80\2N.")),
                NewRecord("m/data/0", Data("huge", size)),
                NewRecord("m/data/1", Data("small", 8)),
                NewRecord("m/empty", Literal(b"")),
            ]
        )
    )
    path = tmp_path / "huge.bin"
    crcs = {"huge": 0x12345678, "small": crc_of_zeros(8)}
    sparse(path, parts, crcs)
    with zipfile.ZipFile(path) as archive, open_reader(path) as reader:
        infos = {info.filename: info for info in archive.infolist()}
        records = {record.name: record for record in read_zip(reader).records}
        assert infos["m/data/0"].file_size == records["m/data/0"].size == size
        assert infos["m/data/0"].CRC == 0x12345678
        assert archive.read("m/data/1") == bytes(8)
        for name, record in records.items():
            assert record.header_offset == infos[name].header_offset
            assert record.data_offset % 64 == 0
        huge, small, empty = records["m/data/0"], records["m/data/1"], records["m/empty"]
        wide = size >= U32
        descriptor = reader.read(
            huge.data_offset + size, small.header_offset - huge.data_offset - size
        )
        expected = struct.pack("<IQQ" if wide else "<III", 0x12345678, size, size)
        assert descriptor == b"PK\7\x08" + expected
        # A record that begins beyond 4 GiB has 64-bit sizes in its descriptor, however small it is.
        assert small.header_offset >= U32
        assert reader.read(small.data_offset + 8, empty.header_offset - small.data_offset - 8) == (
            b"PK\7\x08" + struct.pack("<IQQ", crcs["small"], 8, 8)
        )
        header = reader.read(small.header_offset, small.data_offset - small.header_offset)
        assert header[30:].startswith(
            b"m/data/1" + struct.pack("<HHQ", 1, 8, small.header_offset) + b"FB"
        )


@pytest.mark.slow
def test_torch_reads_a_file_beyond_4_gib(tmp_path: Path) -> None:
    import torch

    from ckptfix.tensors.new_files import NewTensor
    from ckptfix.tensors.new_torch_files import torch_files

    size = 4 * GIB + 64
    tensors = [
        NewTensor("a", "U8", (10,), 10),
        NewTensor("huge", "U8", (size,), size),
        NewTensor("z", "I64", (3,), 24),
    ]
    (file,) = torch_files("model", tensors, {})
    path = tmp_path / "model.bin"
    sparse(path, file.parts, {tensor.fqn: 0 for tensor in tensors})
    with open(path, "r+b") as raw, open_reader(path) as reader:
        records = {record.name: record for record in read_zip(reader).records}
        raw.seek(records["model/data/1"].data_offset + size - 1)
        raw.write(b"\7")
        raw.seek(records["model/data/2"].data_offset)
        raw.write(struct.pack("<qqq", 1, 2, 3))
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert (int(loaded["huge"][-1]), int(loaded["huge"][-2]), loaded["z"].tolist()) == (
        7,
        0,
        [1, 2, 3],
    )
    assert loaded["a"].tolist() == [0] * 10


@pytest.mark.slow
def test_more_records_than_16_bits_count(tmp_path: Path) -> None:
    parts = tuple(zip_parts(NewRecord(f"m/{number}", Literal(b"")) for number in range(66_000)))
    path = tmp_path / "many.zip"
    path.write_bytes(written(parts, {}))
    with zipfile.ZipFile(path) as archive, open_reader(path) as reader:
        assert len(archive.infolist()) == 66_000
        assert read_end(reader).entries == 66_000  # which compares the two end records
