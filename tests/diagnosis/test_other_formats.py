"""Sound files of other programs next to a checkpoint: not checked, and never damage. Under a
loader's name they are.
"""

import hashlib
import io
import pickle
import re
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckptfix.conversion.migrate import migrate
from ckptfix.diagnosis.check import check
from ckptfix.errors import UsageError
from ckptfix.verification.diff import diff
from ckptfix.verification.seal import seal
from ckptfix.verification.verify import verify
from tests.tiny_models import load, tiny

WEIGHTS = {"weight": torch.arange(6.0).reshape(2, 3)}


def npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, a=np.ones(3), b=np.zeros(2))


def npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.ones(3))


def gguf(path: Path) -> None:
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(64))


def onnx(path: Path) -> None:
    path.write_bytes(b"\x08\x08\x12\x07pytorch\x1a\x052.5.0:" + bytes(64))


def torch_export(path: Path) -> None:
    """Write an archive that is called inside as those of ``torch.export.save`` (torch 2.13)."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in (
            "data/weights/weight_0",
            "models/model.json",
            "archive_format",
            "version",
            "byteorder",
        ):
            archive.writestr(f"prog/{name}", "x")


def torch_export_before_2_7(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("version", "serialized_exported_program.json", "serialized_state_dict.pt"):
            archive.writestr(name, "x")


def keras(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")


OTHERS: tuple[tuple[Callable[[Path], None], str], ...] = (
    (npz, "numpy npz archive"),
    (npy, "numpy array"),
    (gguf, "GGUF model"),
    (onnx, "ONNX model"),
    (torch_export, "torch.export program"),
    (torch_export_before_2_7, "torch.export program"),
    (keras, "zip archive from another program"),
)


def torchscript(path: Path) -> None:
    """Write an archive as ``torch.jit.save`` does: with code beside the state."""
    buffer = io.BytesIO()
    torch.save(WEIGHTS, buffer)
    with zipfile.ZipFile(buffer) as saved, zipfile.ZipFile(path, "w") as archive:
        for name in saved.namelist():
            archive.writestr("archive/" + name.partition("/")[2], saved.read(name))
        archive.writestr("archive/code/__torch__.py", "")
        archive.writestr("archive/constants.pkl", b"\x80\2).")


def tar(path: Path) -> None:
    """Write an archive as torch.save did before 0.4."""
    with tarfile.open(path, "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            archive.addfile(tarfile.TarInfo(name))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    save_file(WEIGHTS, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("make", "words", "name"),
    [
        *((make, words, "exported.bin") for make, words in OTHERS),
        (npz, "numpy npz archive", "exported.pt"), (npz, "numpy npz archive", "exported.pth.tar"),
    ],
)  # fmt: skip
def test_it_is_not_checked_and_said_once(
    folder: Path, make: Callable[[Path], None], words: str, name: str
) -> None:
    make(folder / name)
    report = check(folder)
    assert (report.findings, report.status) == ((), 0)
    (said,) = [line for line in report.not_checked if name in line]
    assert f"{name}: a" in said
    assert f"{words}, not a format that ckptfix reads" in said
    seal(folder)
    for data in (False, True):
        verified = verify(folder, data=data)
        assert verified.status == 0
        assert len([line for line in verified.not_checked if name in line]) == 1
    assert diff(folder, folder).status == 0


@pytest.mark.parametrize(
    ("make", "words", "name"),
    [
        *((make, words, "exported.other") for make, words in OTHERS),
        *((onnx, "ONNX model", name) for name in ("model.onnx", "model.gguf", "pytorch_model.pt2")),
    ],
)
def test_asked_for_alone_there_is_nothing_to_check(
    tmp_path: Path, make: Callable[[Path], None], words: str, name: str
) -> None:
    """No suffix of a loader: "model.onnx" is what exporters write, not a library's name for
    weights.
    """
    path = tmp_path / name
    make(path)
    with pytest.raises(
        UsageError, match=rf"{re.escape(name)} is an? {words}, not a format that ckptfix reads"
    ):
        check(path)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((make, "pytorch_model.bin") for make, _ in OTHERS),
        (gguf, "adapter_model.bin"), (gguf, "student.safetensors"),
    ],
)  # fmt: skip
def test_under_the_name_of_weights_it_is_damage(
    folder: Path, make: Callable[[Path], None], name: str
) -> None:
    make(folder / name)
    if name == "adapter_model.bin":
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    report = check(folder)
    assert report.status == 1
    assert {str(finding.path) for finding in report.findings} == {name}


@pytest.mark.parametrize("name", ["student.pt", "student.bin", "student.th"])
def test_weights_under_another_name_are_still_found_out(folder: Path, name: str) -> None:
    shutil.copyfile(folder / "model.safetensors", folder / name)
    (finding,) = check(folder).findings
    assert (finding.code, str(finding.path)) == ("not-a-tensor-file", name)


def test_cut_weights_and_a_cut_archive_are_still_damage(folder: Path) -> None:
    for name, make in (("student.pt", None), ("arrays.pt", npz)):
        if make is None:
            torch.save(WEIGHTS, folder / name)
        else:
            make(folder / name)
        (folder / name).write_bytes((folder / name).read_bytes()[:-30])
    assert {str(finding.path) for finding in check(folder).findings} == {"student.pt", "arrays.pt"}


def test_an_archive_of_torch_that_lost_its_pickle_is_damage(folder: Path) -> None:
    torch.save(WEIGHTS, folder / "student.pt")
    with (
        zipfile.ZipFile(folder / "student.pt") as saved,
        zipfile.ZipFile(folder / "cut.pt", "w") as archive,
    ):
        for name in saved.namelist():
            if not name.endswith("data.pkl"):
                archive.writestr(name, saved.read(name))
    (finding,) = check(folder).findings
    assert (finding.code, str(finding.path)) == ("malformed-file", "cut.pt")


class TestTarFiles:
    """``.pth.tar`` and ``.th`` are what torch.save wrote, in most cases: the content says it."""

    @pytest.mark.parametrize("name", ["epoch_3.pth.tar", "best.th"])
    def test_a_folder_with_only_such_a_file_is_a_checkpoint(
        self, tmp_path: Path, name: str
    ) -> None:
        torch.save({"epoch": 3, "state_dict": WEIGHTS}, tmp_path / name)
        assert check(tmp_path).status == 0
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        (finding,) = check(tmp_path).findings
        assert finding.code == "truncated-file"

    def test_a_legacy_file_is_read(self, tmp_path: Path) -> None:
        torch.save(WEIGHTS, tmp_path / "old.pth.tar", _use_new_zipfile_serialization=False)
        report = check(tmp_path)
        assert (report.status, len(report.folder.components[0].tensors)) == (0, 1)

    def test_a_tar_archive_is_not_checked(self, folder: Path) -> None:
        tar(folder / "older.pth.tar")
        report = check(folder)
        assert (report.findings, report.status) == ((), 0)
        (said,) = [line for line in report.not_checked if "older.pth.tar" in line]
        assert "a tar archive" in said


class TestTorchScript:
    """Its file has a digest like any other; that its tensors are not read is no failure."""

    def test_sealed_it_matches(self, tmp_path: Path) -> None:
        torchscript(tmp_path / "model.pt")
        receipt = seal(tmp_path)
        assert receipt.unreadable == (
            "model.pt: a TorchScript archive, which contains code as well as state",
        )
        for data in (False, True):
            report = verify(tmp_path, data=data)
            assert (report.status, report.unfinished) == (0, ())
            assert len([line for line in report.not_checked if "model.pt" in line]) == 1

    def test_a_flipped_byte_is_found(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        torchscript(path)
        seal(tmp_path)
        assert verify(tmp_path, data=True).status == 0
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        assert verify(tmp_path).status == 1

    def test_next_to_weights_it_stops_nothing(self, tmp_path: Path) -> None:
        source = tmp_path / "src"
        source.mkdir()
        torchscript(source / "scripted.pt")
        torch.save(WEIGHTS, source / "student.pt")
        assert diff(source, source).status == 0
        migrate(source, tmp_path / "new", to="safetensors")
        new = {path.name for path in (tmp_path / "new").iterdir() if path.is_file()}
        assert new == {"scripted.pt", "student.safetensors"}

    def test_alone_it_is_named(self, tmp_path: Path) -> None:
        torchscript(tmp_path / "model.pt")
        for path in (tmp_path, tmp_path / "model.pt"):
            with pytest.raises(
                UsageError,
                match=r"has no model weights; not read: model\.pt: a TorchScript",
            ):
                diff(path, path)


NOISE = hashlib.shake_128(b"weights").digest(5000)
CT2 = struct.pack("<IH", 6, 12) + b"WhisperSpec\0" + NOISE
OTHER_RUNTIMES: dict[str, tuple[dict[str, bytes], str]] = {
    "CTranslate2": (
        {"model.bin": CT2, "config.json": b'{"suppress_ids": [1]}', "vocabulary.json": b"[]"},
        "a CTranslate2 model",
    ),
    "OpenVINO": (
        {"openvino_model.bin": NOISE, "openvino_model.xml": b"<net/>"},
        "not a torch file",
    ),
    "whisper.cpp": ({"ggml-base.bin": b"lmgg" + NOISE}, "a GGML model"),
    "mindspore": ({"mindspore_model.ckpt": NOISE}, "not a torch file"),
    "TensorFlow Lite in a .bin": ({"detect.bin": b"\x1c\0\0\0TFL3" + NOISE}, "TensorFlow Lite"),
    "onnxruntime in a .bin": ({"detect.bin": b"\x1c\0\0\0ORTM" + NOISE}, "onnxruntime"),
    "weights of darknet": ({"yolo.pth": b"\0\0\0\0\2\0\0\0\5\0\0\0" + NOISE}, "not a torch file"),
}


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize("runtime", OTHER_RUNTIMES)
def test_weights_of_another_runtime_are_not_checked(
    tmp_path: Path, runtime: str, has_weights: bool
) -> None:
    files, words = OTHER_RUNTIMES[runtime]
    if has_weights:
        tiny("BertModel").save_pretrained(tmp_path)
    for name, data in files.items():
        if name != "config.json" or not has_weights:
            (tmp_path / name).write_bytes(data)
    if has_weights:
        assert load(tmp_path) == "complete"
    elif "config.json" not in files:
        (tmp_path / "config.json").write_text(
            '{"architectures": ["BertModel"], "transformers_version": "5.23.0"}'
        )
    report = check(tmp_path)
    assert (report.findings, report.status) == ((), 0)
    name = next(iter(files))
    assert any(name in line and words in line for line in report.not_checked)


@pytest.mark.parametrize("name", ["model.bin", "ema.pt", "ema.pth", "last.ckpt", "last.pth.tar"])
def test_noise_under_a_name_of_a_script_is_not_checked(folder: Path, name: str) -> None:
    (folder / name).write_bytes(NOISE)
    report = check(folder)
    assert (report.findings, report.status) == ((), 0)
    assert f"{name}: not a torch file, and no library looks for this name" in report.not_checked


def without_ends(data: bytes) -> bytes:
    """Take away the magic, the name of the first record and the end: the pickle of a tensor is
    left.
    """
    end = data.index(b"torch._utils\n_rebuild_") + 40
    return b"P" + bytes(7) + data[1:30] + data[45:end]


def with_a_wrong_byte(place: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + bytes([data[place] ^ 0x80]) + data[place + 1 : 24]


CUT_ZIPS: dict[str, Callable[[bytes], bytes]] = {
    "without its ends": without_ends,
    **{f"a wrong byte at {place}": with_a_wrong_byte(place) for place in range(4)},
    "in another order": lambda data: data[6:12] + data[:6] + data[12:15],
}


@pytest.mark.parametrize("damage", CUT_ZIPS)
def test_a_few_bytes_of_a_torch_zip_are_damage(folder: Path, damage: str) -> None:
    torch.save({"weight": torch.ones(2, 2)}, folder / "model.bin")
    data = (folder / "model.bin").read_bytes()
    (folder / "model.bin").write_bytes(CUT_ZIPS[damage](data))
    with pytest.raises(pickle.UnpicklingError):
        torch.load(folder / "model.bin", weights_only=True)
    assert check(folder).status == 1


def test_raw_numbers_may_begin_with_zeros(folder: Path) -> None:
    (folder / "openvino_model.bin").write_bytes(bytes(3000) + NOISE)
    assert check(folder).status == 0


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin", "adapter_model.bin", "student.safetensors", "optimizer.pt",
        "scaler.pt", "mp_rank_00_model_states.pt", "optimizer_0_rank1.bin",
        "pytorch_model_fsdp.bin", "rng_state_0.pth", "learned_embeds.bin",
    ],
)  # fmt: skip
def test_noise_under_the_name_of_a_loader_is_damage(folder: Path, name: str) -> None:
    (folder / name).write_bytes(NOISE)
    assert (name, 1) in {(str(one.path), check(folder).status) for one in check(folder).findings}


@pytest.mark.parametrize("name", ["model.bin", "ema.pt", "ema.pth", "last.ckpt", "last.pth.tar"])
def test_a_damaged_torch_file_under_a_name_of_a_script_is_damage(folder: Path, name: str) -> None:
    torch.save({"weight": torch.ones(3000)}, folder / name)
    assert check(folder).status == 0
    data = (folder / name).read_bytes()
    for damaged in (
        data[:5000],
        b"N" + data[1:5000],
        bytes(len(data)),
        bytes(4096) + data[4096:],
        NOISE[:4096] + data[4096:],
        data[:4096] + bytes(len(data) - 4096),
        b"",
        b"version https://git-lfs.github.com/spec/v1\n",
        b"<!doctype html><html></html>",
    ):
        (folder / name).write_bytes(damaged)
        with pytest.raises((OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError)):
            torch.load(folder / name, weights_only=True)
        assert name in {str(finding.path) for finding in check(folder).findings}


@pytest.mark.parametrize(
    "name",
    [
        "rust_model.ot", "model.tflite", "saved_model.pb", "model.engine", "model.keras",
        "model.ckpt.index", "model.pdparams", "model.mlmodel", "model.pte", "model.ggml",
        "openvino_model.bin", "weight.bin",
    ],
)  # fmt: skip
def test_a_config_next_to_weights_of_another_runtime_lacks_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3}')
    assert "missing-model" in {finding.code for finding in check(tmp_path).findings}
    (tmp_path / name).write_bytes(NOISE)
    if name.endswith(".bin"):
        assert check(tmp_path).status == 0
        return
    with pytest.raises(UsageError, match="has no checkpoint files"):
        check(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
def test_what_torch_itself_writes_for_other_loaders(folder: Path) -> None:
    model = torch.nn.Linear(2, 2)
    torch.export.save(torch.export.export(model, (torch.zeros(1, 2),)), folder / "exported.pt2")
    shutil.copyfile(folder / "exported.pt2", folder / "exported.pt")
    torch.jit.save(torch.jit.trace(model, torch.zeros(1, 2)), folder / "scripted.pt")
    report = check(folder)
    assert report.findings == ()
    assert [line for line in report.not_checked if line.startswith(("exported", "scripted"))] == [
        "exported.pt: a torch.export program, not a format that ckptfix reads",
        "scripted.pt: a TorchScript archive, which contains code as well as state",
    ]
    seal(folder)
    assert verify(folder, data=True).status == 0


@pytest.mark.parametrize(
    ("make", "suffix", "reader"),
    [
        (gguf, ".gguf", "llama.cpp"),
        (onnx, ".onnx", "onnxruntime"),
        (npy, ".npy", "numpy.load"),
        (torchscript, ".ts", "torch.jit.load"),
        (tar, ".tar", "torch.load(FILE, weights_only=False)"),
    ],
)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "custom_checkpoint_0.pkl"])
def test_under_a_loaders_name_the_advice_names_what_reads_it(
    folder: Path, make: Callable[[Path], None], suffix: str, reader: str, name: str
) -> None:
    make(folder / name)
    report = check(folder)
    (finding,) = [one for one in report.findings if one.code == "not-a-tensor-file"]
    stem = name.partition(".")[0]
    assert f"rename the file to {stem}{suffix}, and read it with" in finding.advice
    assert reader in finding.advice
    assert "salvage" not in str(report)
