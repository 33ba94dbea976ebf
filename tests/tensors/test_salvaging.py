"""Files cut at every class of byte, and mutated: what is salvaged is bit-equal, nothing whole is
missed, no crash.
"""

import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptfix.errors import ChangedError, FormatError
from ckptfix.formats.torch_file import TorchFile, read_torch_file
from ckptfix.formats.torch_partial import walk_records
from ckptfix.storage.reading import OpenFiles, open_reader
from ckptfix.tensors.salvaging import SavedDict, salvage_safetensors, salvage_torch
from ckptfix.tensors.stored import StoredTensor
from tests.sampling import examples

ZIP, LEGACY, SAFETENSORS = "zip", "legacy", "safetensors"


def tensors() -> "dict[str, Any]":
    torch.manual_seed(0)
    base = torch.randn(6, 5)
    flat = torch.arange(30, dtype=torch.int32)
    return {
        "a": base,
        "t": base.t(),
        "tied": base,
        "half": torch.randn(7).bfloat16(),
        "fp8": torch.randn(9).to(torch.float8_e4m3fn),
        "flat.0": flat[:10],
        "flat.1": flat[10:20],
        "flat.rows": flat[2::4],
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "complex": torch.randn(3, dtype=torch.complex64),
        "last": torch.arange(11),
    }


def raw(tensor: Any) -> bytes:
    return (
        bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        if tensor.numel()
        else b""
    )


class Files(dict[str, bytes]):
    """Whole files by their kind, with a repr that leaves a failure readable."""

    def __repr__(self) -> str:
        return "files"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("whole")
    torch.save(tensors(), folder / "model.bin")
    torch.save(tensors(), folder / "legacy.bin", _use_new_zipfile_serialization=False)
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors().items()},
        folder / "m.safetensors",
    )
    names = {ZIP: "model.bin", LEGACY: "legacy.bin", SAFETENSORS: "m.safetensors"}
    return Files({kind: (folder / name).read_bytes() for kind, name in names.items()})


def bytes_of(tensor: StoredTensor) -> bytes:
    with OpenFiles() as opened:
        return b"".join(
            bytes(block) for block in tensor.blocks(opened, memoryview(bytearray(1 << 16)))
        )


def salvaged(kind: str, path: Path, **options: Any) -> "tuple[SavedDict, ...]":
    return (salvage_safetensors(path),) if kind == SAFETENSORS else salvage_torch(path, **options)


def check_bytes(found: SavedDict) -> "set[str]":
    """Every salvaged tensor is that of the original; returns the names, those of ties too."""
    expected = tensors()
    for one in found.tensors:
        assert bytes_of(one) == raw(expected[one.fqn]), one.fqn
        assert one.shape == tuple(expected[one.fqn].shape)
    for name, kept in found.ties.items():
        assert raw(expected[name]) == raw(expected[kept])
    return {one.fqn for one in found.tensors} | set(found.ties)


def ends(kind: str, path: Path) -> "dict[str, int]":
    """Where the last byte of each tensor lies in a whole file, by the parsers for whole files."""
    expected = tensors()
    with open_reader(path) as reader:
        if kind == SAFETENSORS:
            from ckptfix.formats.safetensors_file import read_safetensors

            offsets = {
                one.fqn: one.data_offsets or (0, 0) for one in read_safetensors(reader).tensors
            }
            return {name: end if end > begin else 0 for name, (begin, end) in offsets.items()}
        file: TorchFile = read_torch_file(reader)
    found = {}
    for one in file.state_dicts[0].tensors:
        tensor = expected[one.fqn]
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        last = (
            (tensor.storage_offset() + reach + 1) * tensor.element_size() if tensor.numel() else 0
        )
        found[one.fqn] = file.storage_ranges[one.storage_key][0] + last if last else 0
    return found


def cuts(data: bytes) -> Iterator[int]:
    """Yield offsets of every class of byte: around the beginnings of records, descriptors and the
    directory's parts.
    """
    interesting = {0, 1, 4, 7, 8, 9, 30, len(data) - 1}
    for mark in (b"PK\3\4", b"PK\7\x08"):
        at = data.find(mark)
        while at >= 0:
            interesting |= {at - 1, at, at + 1, at + 15, at + 16, at + 31}
            at = data.find(mark, at + 1)
    for mark in (b"PK\1\2", b"PK\6\6", b"PK\6\7", b"PK\5\6"):
        at = data.find(mark)
        interesting |= {at - 1, at, at + 1, at + 12}
    yield from sorted(interesting & set(range(len(data))))


def check_cut(kind: str, data: bytes, cut: int, folder: Path, limits: "dict[str, int]") -> bool:
    """Cut a file and salvage it: exactly what ends before the cut is there. False: nothing can be
    read at all.
    """
    path = folder / ("cut.safetensors" if kind == SAFETENSORS else "cut.bin")
    path.write_bytes(data[:cut])
    try:
        (found,) = salvaged(kind, path)
    except FormatError:
        return False
    whole = {name for name, end in limits.items() if end <= cut}
    assert check_bytes(found) == whole, f"cut at {cut}"
    lost = {one.name: one for one in found.lost}
    assert lost.keys() == limits.keys() - whole
    for one in lost.values():
        assert one.need is not None
        assert one.have is not None
        assert 0 <= one.have < one.need
    return True


@pytest.mark.parametrize("kind", [ZIP, LEGACY, SAFETENSORS])
def test_cut_at_every_class_of_byte(kind: str, files: Files, tmp_path: Path) -> None:
    data = files[kind]
    whole = tmp_path / ("whole.safetensors" if kind == SAFETENSORS else "whole.bin")
    whole.write_bytes(data)
    limits = ends(kind, whole)
    readable = [check_cut(kind, data, cut, tmp_path, limits) for cut in cuts(data)]
    assert readable == sorted(readable), (
        "once the names are whole, they are read at every later cut"
    )
    first = min(end for end in limits.values() if end)
    for end in {*limits.values(), first - 1}:
        for cut in (end - 1, end, end + 1):
            if first <= cut <= len(data):
                assert check_cut(kind, data, cut, tmp_path, limits)


@settings(
    max_examples=examples(80),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), kind=st.sampled_from([ZIP, LEGACY, SAFETENSORS]))
def test_cut_anywhere(data: Any, kind: str, files: Files, tmp_path: Path) -> None:
    whole = tmp_path / ("whole.safetensors" if kind == SAFETENSORS else "whole.bin")
    whole.write_bytes(files[kind])
    cut = data.draw(st.integers(0, len(files[kind])))
    limits = ends(kind, whole)
    if not check_cut(kind, files[kind], cut, tmp_path, limits):
        assert cut < min(end for end in limits.values() if end)


@settings(
    max_examples=examples(250),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), kind=st.sampled_from([ZIP, LEGACY, SAFETENSORS]), keep=st.booleans())
def test_mutated_files_never_crash(
    data: Any, kind: str, keep: bool, files: Files, tmp_path: Path
) -> None:
    content = bytearray(files[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        change = data.draw(st.sampled_from(["flip", "fill", "remove", "insert", "cut"]))
        many = data.draw(st.integers(1, 64))
        if change == "flip" and at < len(content):
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "fill":
            content[at : at + many] = bytes([data.draw(st.sampled_from([0, 255]))]) * len(
                content[at : at + many]
            )
        elif change == "remove":
            del content[at : at + many]
        elif change == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=16))
        elif change == "cut":
            del content[at:]
    path = tmp_path / ("mutated.safetensors" if kind == SAFETENSORS else "mutated.bin")
    path.write_bytes(content)
    try:
        dicts = (
            salvaged(kind, path, keep_damaged=keep) if kind != SAFETENSORS else salvaged(kind, path)
        )
    except FormatError:
        return
    for found in dicts:
        for one in found.tensors:
            try:
                assert len(bytes_of(one)) == one.nbytes
            except ChangedError as error:  # an expanded tensor needs no more than its storage has
                raise AssertionError(f"{one.fqn} is not wholly in the file") from error


def storage_of(data: bytes, name: str, path: Path) -> "tuple[int, int]":
    path.write_bytes(data)
    with open_reader(path) as reader:
        file = read_torch_file(reader)
    (key,) = {one.storage_key for one in file.state_dicts[0].tensors if one.fqn == name}
    return file.storage_ranges[key]


@pytest.mark.parametrize("cut", [False, True])
def test_a_flipped_bit_is_found_by_the_checksum(files: Files, tmp_path: Path, cut: bool) -> None:
    path = tmp_path / "x.bin"
    content = bytearray(files[ZIP])
    begin, length = storage_of(bytes(content), "flat.0", path)
    content[begin + length - 1] ^= 4
    if cut:
        del content[content.index(b"PK\1\2") + 20 :]
    path.write_bytes(content)
    (found,) = salvage_torch(path)
    assert check_bytes(found) == tensors().keys() - {"flat.0", "flat.1", "flat.rows"}
    assert all("CRC-32" in one.reason and one.have == one.need for one in found.lost)
    (kept,) = salvage_torch(path, keep_damaged=True)
    assert {one.fqn for one in kept.tensors} | set(kept.ties) == tensors().keys()
    assert {one.name for one in kept.damaged} == {"flat.0", "flat.1", "flat.rows"}
    assert not kept.lost


def test_a_flipped_bit_in_the_names_leaves_nothing_to_believe(files: Files, tmp_path: Path) -> None:
    content = bytearray(files[ZIP])
    content[content.index(b"scalar")] ^= 1
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    (found,) = salvage_torch(path)
    assert not found.tensors
    assert all("data.pkl" in one.reason for one in found.lost)
    assert (
        len(salvage_torch(path, keep_damaged=True)[0].tensors) == len(tensors()) - 1
    )  # a tie is no tensor of its own


def test_a_tail_of_zeros_is_no_tensor(files: Files, tmp_path: Path) -> None:
    """A file that was allocated and never written to its end: bytes are there, and are not the
    tensor's.
    """
    path = tmp_path / "x.bin"
    content = files[ZIP]
    begin, length = storage_of(content, "flat.0", path)
    path.write_bytes(content[: begin + length // 2] + bytes(len(content) - begin - length // 2))
    (found,) = salvage_torch(path)
    assert check_bytes(found) == {"a", "t", "tied", "half", "fp8", "empty"}
    assert any("the data descriptor of" in one.reason for one in found.lost)


def test_a_storage_of_another_length_than_its_object_says(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    content = bytearray(files[LEGACY])
    begin, _ = storage_of(bytes(content), "half", path)
    content[begin - 8] ^= 2  # the number of elements before a storage of a legacy file
    path.write_bytes(content)
    (found,) = salvage_torch(path)
    assert check_bytes(found) == tensors().keys() - {"half"}
    assert "begins with a length of 5 elements, but the saved object says 7" in found.lost[0].reason
    (kept,) = salvage_torch(path, keep_damaged=True)
    assert [one.name for one in kept.damaged] == ["half"]


def test_a_damaged_local_header_loses_one_storage_when_the_directory_is_there(
    files: Files, tmp_path: Path
) -> None:
    path = tmp_path / "x.bin"
    content = bytearray(files[ZIP])
    begin, _ = storage_of(bytes(content), "half", path)
    header = content.rindex(b"PK\3\4", 0, begin)
    content[header : header + 20] = bytes(20)
    path.write_bytes(content)
    (found,) = salvage_torch(path)
    assert check_bytes(found) == tensors().keys() - {"half"}
    assert "no local header" in found.lost[0].reason


def test_without_checksums_nothing_is_refused(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensors(), tmp_path / "x.bin")
    finally:
        torch.serialization.set_crc32_options(True)
    data = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes(data[: data.index(b"PK\1\2")])
    (found,) = salvage_torch(tmp_path / "x.bin")
    assert check_bytes(found) == tensors().keys()
    assert not found.lost


def test_a_zip_of_another_writer_has_sizes_in_its_headers(files: Files, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(files[ZIP])
    with (
        zipfile.ZipFile(tmp_path / "x.bin") as old,
        zipfile.ZipFile(tmp_path / "y.bin", "w") as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    data = (tmp_path / "y.bin").read_bytes()
    (tmp_path / "y.bin").write_bytes(data[: data.index(b"PK\1\2") + 5])
    (found,) = salvage_torch(tmp_path / "y.bin")
    assert check_bytes(found) == tensors().keys()


def test_descriptors_of_64_bits(tmp_path: Path) -> None:
    def record(name: bytes, data: bytes) -> bytes:
        head = struct.pack("<4s5H3I2H", b"PK\3\4", 0, 8, 0, 0, 0, 0, 0, 0, len(name), 0)
        return head + name + data + struct.pack("<4sI2Q", b"PK\7\x08", 77, len(data), len(data))

    path = tmp_path / "x"
    path.write_bytes(record(b"x/data/0", b"0123456789") + record(b"x/data/1", b"abc"))
    with open_reader(path) as reader:
        found, why = walk_records(reader, lambda name, begin: 10 if name.endswith("0") else 3)
        assert [(one.name, one.length, one.crc, one.problem) for one in found] == [
            ("x/data/0", 10, 77, ""),
            ("x/data/1", 3, 77, ""),
        ]
        assert "ends at byte" in why
        found, _ = walk_records(reader, lambda name, begin: 9)
        assert "the data descriptor of" in found[0].problem


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "neither"),
        (b"<html>", "neither"),
        (b"PK\3\4", "no intact data.pkl"),
        (b"PK\3\4" + bytes(60), "no intact data.pkl"),
        (b"\x80\x02K\x01.", "plain pickle"),
    ],
)
def test_what_holds_no_names(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(FormatError, match=why):
        salvage_torch(tmp_path / "x.bin")


def test_a_training_dict(tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 30)
    moments = {0: {"exp_avg": torch.ones(30, 30)}, 1: {"exp_avg": torch.ones(30)}}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save({"epoch": 3, "model": model.state_dict(), "optimizer": optimizer}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(data[: len(data) * 2 // 3])
    (found,) = salvage_torch(tmp_path / "x.pt")
    assert found.path == ("model",)
    assert [one.fqn for one in found.tensors] == ["weight", "bias"]
    assert [bytes_of(one) for one in found.tensors] == [
        raw(p.detach()) for p in (model.weight, model.bias)
    ]
    assert {one.name for one in found.lost} == {"epoch", "optimizer"}
    assert found.versions == {"": 1}


def test_ties_of_safetensors_follow_what_they_are_tied_to(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(
        {"a": torch.ones(4), "b": torch.ones(4)},
        path,
        metadata={"m.a": "a", "m.b": "b", "format": "pt"},
    )
    path.write_bytes(path.read_bytes()[:-1])
    found = salvage_safetensors(path)
    assert dict(found.ties) == {"m.a": "a"}
    assert {one.name for one in found.lost} == {"b", "m.b"}


def test_more_records_than_torch_writes(tmp_path: Path) -> None:
    def header(name: bytes) -> bytes:
        return struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0) + name

    path = tmp_path / "x"
    path.write_bytes(header(b"a") * 5000)
    with open_reader(path) as reader:
        found, why = walk_records(reader, lambda name, begin: None)
        assert len(found) == 2
        assert "the record 'a' appears again at byte 31" in why
    path.write_bytes(b"".join(header(b"%d" % number) for number in range(5000)))
    with open_reader(path) as reader:
        found, why = walk_records(reader, lambda name, begin: None)
        assert len(found) == 1025
        assert "more than 1024 records" in why
        found, _ = walk_records(reader, lambda name, begin: 0)
        assert len(found) == 5000, "those that the pickle speaks of are as many as it says"
