"""Legacy files, plain pickles, tar: what is read, and the patch of the same length."""

import io
import os
import pickle
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix import check, salvage
from ckptfix.errors import FormatError, OperationError, TruncatedError, UnsupportedFormat
from ckptfix.formats import torch_file
from ckptfix.formats.torch_file import read_torch_file
from ckptfix.storage.files import FileReader
from tests.formats.making import Strip, edited, model, nested_state_dict, parsed, read, saved

LEGACY = {"_use_new_zipfile_serialization": False}


def test_a_patched_file_as_torch_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "legacy.pt"
    torch.save(nested_state_dict(), path, **LEGACY)
    size = path.stat().st_size
    path.write_bytes(edited(path, Strip("module.module.")))
    assert path.stat().st_size == size
    plain = model().state_dict()
    for weights_only in (True, False):
        loaded = torch.load(path, weights_only=weights_only)
        assert list(loaded) == list(plain)
        assert all(torch.equal(loaded[name], plain[name]) for name in plain)
        assert loaded._metadata == plain._metadata
    assert read(path).state_dicts[0].path == ()


@pytest.mark.parametrize("shorter", range(12))
def test_every_slack_but_one_and_three(tmp_path: Path, shorter: int) -> None:
    path = tmp_path / "legacy.pt"
    torch.save({"x" * 12 + "a": torch.ones(3)}, path, **LEGACY)
    if shorter in (1, 3):
        with pytest.raises(UnsupportedFormat, match=f"cannot shrink by {shorter} byte"):
            edited(path, Strip("x" * shorter))
        return
    path.write_bytes(edited(path, Strip("x" * shorter)))
    assert list(torch.load(path)) == ["x" * (12 - shorter) + "a"]


def test_growing_and_frames_are_refused(tmp_path: Path) -> None:
    class Longer(Strip):
        def __call__(self, fqn: str) -> str:
            return "longer." + fqn

    path = tmp_path / "legacy.pt"
    torch.save({"module.module.a": torch.ones(3)}, path, **LEGACY)
    with pytest.raises(UnsupportedFormat, match="7 bytes longer"):
        edited(path, Longer(""))
    torch.save({"module.module.a": torch.ones(3)}, path, pickle_protocol=4, **LEGACY)
    with pytest.raises(UnsupportedFormat, match="protocol 4"):
        edited(path, Strip("module."))


def test_trailing_bytes(tmp_path: Path) -> None:
    assert parsed(tmp_path, saved({"a": torch.ones(2)}, **LEGACY) + b"junk").trailing == 4


def test_every_truncation_is_a_format_error(tmp_path: Path) -> None:
    data = saved({"a": torch.ones(2), "b": torch.ones(3, dtype=torch.int8)}, **LEGACY)
    for length in range(len(data)):
        with pytest.raises(FormatError) as caught:
            parsed(tmp_path, data[:length])
        assert length < 20 or isinstance(caught.value, TruncatedError), length
    with pytest.raises(TruncatedError) as caught:
        parsed(tmp_path, data[:-1])
    assert (caught.value.have, caught.value.need) == (len(data) - 1, len(data))


@pytest.mark.slow
def test_every_byte_flip_parses_or_raises_format_error(tmp_path: Path) -> None:
    data = saved({"a": torch.ones(2)}, **LEGACY)
    path = tmp_path / "flip.bin"
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as stream:
        for place in range(len(data)):
            for flip in (0xFF, 0x01, 0x80):
                os.pwrite(stream.fileno(), bytes([data[place] ^ flip]), place)
                with suppress(FormatError):
                    read_torch_file(FileReader(stream.fileno(), len(data), path))
            os.pwrite(stream.fileno(), data[place : place + 1], place)


def test_pickles_longer_than_a_window(tmp_path: Path) -> None:
    value: dict[str, Any] = {
        f"module.module.layer.{index}.weight": torch.ones(1) for index in range(1500)
    }
    data = saved(value, **LEGACY)
    file = parsed(tmp_path, data)
    assert file.tree.end > torch_file._FIRST_WINDOW
    assert len(file.state_dicts[0].tensors) == 1500
    assert len(parsed(tmp_path, pickle.dumps(list(range(100_000)), 2)).tree.root.items) == 100_000


def test_a_plain_pickle_is_read_and_not_edited(tmp_path: Path) -> None:
    path = tmp_path / "plain.pkl"
    path.write_bytes(pickle.dumps({"module.a": 1}, 4) + b"more")
    file = read(path)
    assert (file.kind, file.trailing, file.state_dicts) == ("a plain pickle", 4, ())
    with pytest.raises(UnsupportedFormat, match="plain pickle"):
        edited(path, Strip("module."))


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "old.tar"
    with tarfile.open(path, "w") as archive:
        (tmp_path / "storages").write_bytes(b"x")
        archive.add(tmp_path / "storages", "storages")
    with pytest.raises(UnsupportedFormat, match="tar"):
        read(path)
    for data in (
        b"",
        b"P",
        b"hello",
        bytes(1000),
        b"\x80",
        b"\x80\x02",
        b"{}",
        b"PK\3\4",
        b"PK\5\6" + bytes(18),
    ):
        with pytest.raises(FormatError):
            parsed(tmp_path, data)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"M\xe9\x03.\x80", b"M\xe8\x03.\x80", "version 1000"),
        (b"\x02\0\0\0\0\0\0\0\0\0\x80?", b"\x03\0\0\0\0\0\0\0\0\0\x80?", "has 3 elements"),
        (b"\x80\x02]q\x00", b"\x80\x02Nq\x00", "reads|stack|cannot|list"),
    ],
)
def test_contradictions(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    data = saved({"a": torch.ones(2)}, **LEGACY)
    assert old in data
    with pytest.raises(FormatError, match=message):
        parsed(tmp_path, data.replace(old, new))


def test_a_file_of_a_big_endian_machine_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    """torch writes the numbers of legacy files as little-endian on every machine, and ignores the
    recorded order.
    """
    data = saved({"a": torch.arange(3.0)}, **LEGACY)
    big = data.replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89")
    assert big != data
    assert torch.equal(torch.load(io.BytesIO(big))["a"], torch.arange(3.0))
    assert parsed(tmp_path, big).storage_ranges == parsed(tmp_path, data).storage_ranges
    broken = big.replace(b"cpuq", b"cpu\0")
    with pytest.raises(pickle.UnpicklingError, match="Unsupported operand 0"):
        torch.load(io.BytesIO(broken))
    with pytest.raises(FormatError) as raised:
        parsed(tmp_path, broken)
    assert not isinstance(raised.value, UnsupportedFormat)


def test_globals_hidden_in_the_pickles_around_the_object_are_listed(tmp_path: Path) -> None:
    data = saved({"a": torch.ones(2)}, **LEGACY)
    hidden = data.replace(b"little_endianq\x02\x88", b"little_endianq\x02cos\nsystem\n0\x88")
    assert ("os", "system") in parsed(tmp_path, hidden).tree.globals


MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."


@pytest.mark.parametrize(
    "version",
    [
        b")" + b"\x85" * 5000,
        b")" + b"q\0h\0\x86" * 40,
        b"\x8b\x00\x10\0\0" + b"\x7f" * 4096,
        b"(" * 10 + b"]" * 10 + b"l" * 10,
    ],
    ids=["deep", "doubled 40 times", "long integer", "lists"],
)
def test_a_version_that_cannot_be_printed(tmp_path: Path, version: bytes) -> None:
    begin = time.process_time()
    with pytest.raises(FormatError, match=r"version <(tuple|int|Node)> \(expected 1001"):
        parsed(tmp_path, MAGIC + b"\x80\x02" + version + b".")
    assert time.process_time() - begin < 20


def test_what_weights_only_refuses_in_the_pickles_around_the_object(tmp_path: Path) -> None:
    assert parsed(tmp_path, saved({"a": torch.ones(2)}, **LEGACY)).tree.refused_opcodes == ()
    data = saved({"a": torch.ones(2)}, **LEGACY)
    hidden = data.replace(b"little_endianq\x02\x88", b"little_endianq\x02N0\x88")
    assert parsed(tmp_path, hidden).tree.refused_opcodes == ("POP",)


class Outer:
    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(3, 2)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "mine.pt", "custom_checkpoint_0.pkl", "optimizer.bin"]
)
@pytest.mark.parametrize("make", [model, Outer.Net, lambda: {"model": model(), "epoch": 1}])
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_a_module_is_judged_as_its_zip_form_is(tmp_path: Path, name: str, make: Any) -> None:
    """A legacy save puts the source of each module's class next to the class."""
    zipped, legacy = tmp_path / "zip" / name, tmp_path / "legacy" / name
    for path, options in ((zipped, {}), (legacy, LEGACY)):
        path.parent.mkdir()
        torch.save(make(), path, **options)
        torch.load(path, weights_only=False)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(path, weights_only=True)
    of_zip, of_legacy = (
        [(finding.code, getattr(finding, "globals", ())) for finding in check(path).findings]
        for path in (zipped, legacy)
    )
    assert of_legacy == of_zip
    assert (
        of_zip == []
        if name.startswith("custom")
        else [code for code, _ in of_zip] == ["unloadable-pickle"]
    )


def test_allowed_classes_do_not_help_a_legacy_module(tmp_path: Path) -> None:
    path = tmp_path / "mine.pt"
    torch.save(torch.nn.Linear(2, 2), path, **LEGACY)
    with (
        torch.serialization.safe_globals([torch.nn.Linear, getattr, set]),
        pytest.raises(pickle.UnpicklingError, match="persistent_load"),
    ):
        torch.load(path, weights_only=True)
    (finding,) = check(path).findings
    assert "BINPERSID of a module's class" in str(finding)
    assert "add_safe_globals" not in finding.advice


class Hostile:
    """A class with a source that is not one, or a function in its place."""

    def __init__(self, *pid: Any) -> None:
        self.pid = pid


@pytest.mark.parametrize(
    ("pid", "error"),
    [
        (("module", torch.nn.Linear, 1, "source"), "not text"),
        (("module", torch.nn.Linear, "file", b"source"), "not text"),
        (("module", torch._utils._rebuild_tensor_v2, None, None), "persistent id"),
        (("module", 5, None, None), "persistent id"),
        (("modules", torch.nn.Linear, None, None), "persistent id"),
        (("module", torch.nn.Linear, None), "persistent id"),
    ],
)
def test_ids_that_no_save_writes(tmp_path: Path, pid: tuple[Any, ...], error: str) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return value.pid if isinstance(value, Hostile) else None

    buffer = io.BytesIO()
    values: list[Any] = [
        torch_file.MAGIC_NUMBER,
        torch_file.PROTOCOL_VERSION,
        {},
        [Hostile(*pid)],
        [],
    ]
    for value in values:
        Pickler(buffer, protocol=2).dump(value)
    with pytest.raises(FormatError, match=error):
        parsed(tmp_path, buffer.getvalue())


def test_a_hidden_call_of_a_legacy_file_is_unsafe(tmp_path: Path) -> None:
    path = tmp_path / "custom_checkpoint_0.pkl"
    torch.save(torch.nn.Linear(2, 2), path, **LEGACY)
    path.write_bytes(
        path.read_bytes().replace(b"ctorch.nn.modules.linear\nLinear\n", b"cos\nsystem\n")
    )
    assert [finding.code for finding in check(path).findings] == ["unsafe-pickle"]


def test_the_tensors_of_a_legacy_dict_with_a_module(tmp_path: Path) -> None:
    path = tmp_path / "mine.pt"
    torch.save(
        {"state_dict": {"fc.weight": torch.ones(2, 3)}, "net": torch.nn.Linear(2, 2)},
        path,
        **LEGACY,
    )
    assert [tensor.fqn for one in read(path).state_dicts for tensor in one.tensors] == ["fc.weight"]


@pytest.mark.parametrize("old", [b"_rebuild_tensor_v2", b"torch._utils", b"FloatStorage"])
@pytest.mark.parametrize("cut", [0, 4])
def test_a_global_that_lost_a_byte_is_damage(tmp_path: Path, old: bytes, cut: int) -> None:
    """It was a warning that advised weights_only=False, which fails too, and salvage lost nothing."""
    path = tmp_path / "ckpt.pt"
    torch.save({"a": torch.ones(3), "b": torch.ones(2)}, path, **LEGACY)
    path.write_bytes(path.read_bytes().replace(old, old[:cut] + old[cut + 1 :]))
    for weights_only in (True, False):
        with pytest.raises((pickle.UnpicklingError, AttributeError, ImportError)):
            torch.load(path, weights_only=weights_only)
    (finding,) = check(path).findings
    assert finding.code == "malformed-file"
    with pytest.raises(OperationError):
        salvage(path, tmp_path / "out")
