"""A scan: every file becomes a component or a stray, and none stops the rest."""

import gc
import os
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath

import pytest

from ckptfix.checkpoint.folder import ProblemKind, scan_folder
from ckptfix.checkpoint.roles import Role
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.storage.files import FileReader
from ckptfix.storage.reading import identity, open_reader
from tests.repairs.builders import write_safetensors

P = PurePosixPath
WEIGHTS = {"module.a": b"1", "module.b": b"23"}
SHARD = "-00001-of-00001.safetensors"


def test_roles_strays_and_folders(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", WEIGHTS)
    write_safetensors(tmp_path / "ema.safetensors", WEIGHTS)
    (tmp_path / "random_states_0.pkl").write_bytes(b"\x80\x02}.")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / ".ckptfix").mkdir()
    (tmp_path / ".ckptfix" / "model.safetensors").write_bytes(b"")
    folder = scan_folder(tmp_path)
    assert {str(component.path): component.role for component in folder.components} == {
        "ema.safetensors": Role.UNKNOWN,
        "model.safetensors": Role.MODEL,
        "random_states_0.pkl": Role.RNG_STATE,
    }
    assert folder.strays == (P("notes.txt"),)
    assert list(folder.subfolders) == [P("pytorch_model_fsdp_0"), P("runs")]
    assert folder.is_save_state
    assert not any(component.problem for component in folder.components)


def test_tensors_and_the_chain_that_all_carry(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", WEIGHTS)
    (component,) = scan_folder(tmp_path).components
    data = (tmp_path / "model.safetensors").read_bytes()
    found = {
        tensor.fqn: data[slice(*(tensor.data_offsets or (0, 0)))] for tensor in component.tensors
    }
    assert found == WEIGHTS
    assert component.whole is not None
    assert component.whole.chain == ("module",)
    assert component.size == len(data)
    assert component.fingerprint == identity(tmp_path / "model.safetensors")


def test_one_file_alone(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model_1.safetensors"):
        write_safetensors(tmp_path / name, WEIGHTS)
    (tmp_path / "strange").write_bytes(b"x")
    folder = scan_folder(tmp_path, "model_1.safetensors")
    assert [str(component.path) for component in folder.components] == ["model_1.safetensors"]
    # Asked for by name, so it is looked at.
    (strange,) = scan_folder(tmp_path, "strange").components
    assert (strange.role, strange.problem is not None) == (Role.UNKNOWN, True)


def test_files_that_are_not_wanted_are_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(3):
        (tmp_path / f"random_states_{rank}.pkl").write_bytes(b"\x80\x02}.")
    write_safetensors(tmp_path / "model.safetensors", WEIGHTS)
    (tmp_path / "notes.txt").write_text("mine")
    opened = []

    def opening(path: Path) -> AbstractContextManager[FileReader]:
        opened.append(path.name)
        return open_reader(path)

    monkeypatch.setattr("ckptfix.checkpoint.folder.open_reader", opening)
    folder = scan_folder(tmp_path, wanted=lambda name: name.rank in (None, 1))
    assert sorted(opened) == ["model.safetensors", "random_states_1.pkl"]
    assert [str(component.path) for component in folder.components] == sorted(opened)
    assert folder.strays == (P("notes.txt"),)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("model.safetensors", b"", ProblemKind.NOT_A_TENSOR_FILE),
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0{}", ProblemKind.TRUNCATED),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0{]", ProblemKind.MALFORMED),
        (
            "model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\n",
            ProblemKind.NOT_A_TENSOR_FILE,
        ),
        ("model.bin", b"\x80\x02}q", ProblemKind.TRUNCATED),
        ("model.bin", b"PK\x03\x04", ProblemKind.TRUNCATED),
        ("model.bin", b"<!doctype html>", ProblemKind.NOT_A_TENSOR_FILE),
        ("model.bin", b"\x02\0\0\0\0\0\0\0{}", ProblemKind.NOT_A_TENSOR_FILE),
        ("model.safetensors.index.json", b"{}", ProblemKind.MALFORMED),
    ],
)
def test_a_broken_file_is_a_component_with_a_problem(
    tmp_path: Path, name: str, content: bytes, kind: ProblemKind
) -> None:
    (tmp_path / name).write_bytes(content)
    write_safetensors(tmp_path / f"whole{SHARD}", WEIGHTS)
    broken, whole = scan_folder(tmp_path).components
    assert broken.problem is not None
    assert (broken.problem.kind, broken.tensors, broken.size) == (kind, (), len(content))
    assert whole.problem is None


def test_what_cannot_be_opened_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "model.bin").symlink_to("nowhere")
    os.mkfifo(tmp_path / "model.safetensors")
    (tmp_path / "optimizer.bin").symlink_to("optimizer.bin")
    kinds = {
        str(component.path): component.problem for component in scan_folder(tmp_path).components
    }
    assert all(kinds.values())
    assert len(kinds) == 3


def test_links_are_noticed(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", WEIGHTS)
    write_safetensors(tmp_path / "b.safetensors", WEIGHTS)
    (tmp_path / "c.safetensors").symlink_to("a.safetensors")
    (tmp_path / "d.safetensors").hardlink_to(tmp_path / "b.safetensors")
    linked = {
        str(component.path): component.is_linked for component in scan_folder(tmp_path).components
    }
    assert linked == {
        "a.safetensors": False,
        "b.safetensors": True,
        "c.safetensors": True,
        "d.safetensors": True,
    }


def test_entries_are_ordered_by_number(tmp_path: Path) -> None:
    for number in (10, 2, 1, 0):
        write_safetensors(tmp_path / f"model{f'_{number}' if number else ''}.safetensors", WEIGHTS)
    (entries,) = scan_folder(tmp_path).entries(Role.MODEL)
    assert [entry.name.index for entry in entries] == [0, 1, 2, 10]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        scan_folder(tmp_path / "nowhere")


def test_the_collector_is_as_it_was(tmp_path: Path) -> None:
    assert gc.isenabled()
    scan_folder(tmp_path)
    assert gc.isenabled()
    gc.disable()
    try:
        with paused_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
