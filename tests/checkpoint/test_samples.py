"""Samples of two saves: each tensor that differs in its first page is noticed, and few bytes are
read.
"""

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckptfix.checkpoint.dcp import scan_dcp_folders
from ckptfix.checkpoint.folder import scan_folder
from ckptfix.checkpoint.samples import (
    Piece,
    are_equal,
    digest_of,
    optimizers_in,
    samples_of,
    weights_in,
)

Tensors = dict[str, torch.Tensor]


def tensors(value: float = 0.0) -> Tensors:
    return {"base.weight": torch.ones(40, 40), "head.weight": torch.full((3, 5), value)}


def in_safetensors(folder: Path, state: Tensors) -> None:
    save_file(state, folder / "model.safetensors")


def in_torch_file(folder: Path, state: Tensors) -> None:
    torch.save(state, folder / "pytorch_model.bin")


def of_a_script(folder: Path, state: Tensors) -> None:
    torch.save({"model": state, "epoch": 3}, folder / "last.pt")


def below(folder: Path, state: Tensors) -> None:
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    (folder / "unet").mkdir()
    save_file(state, folder / "unet/diffusion_pytorch_model.safetensors")


def in_dcp(folder: Path, state: Tensors) -> None:
    dcp.save(state, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", [in_safetensors, in_torch_file, of_a_script, below, in_dcp])
def test_equal_weights_have_equal_samples_in_every_format(
    save: Callable[[Path, Tensors], Any], tmp_path: Path
) -> None:
    roots = {}
    for name, value in (("before", 1.0), ("same", 1.0), ("changed", 2.0)):
        roots[name] = tmp_path / name
        roots[name].mkdir()
        save(roots[name], tensors(value))
    folder = scan_folder(roots["before"])
    pieces = weights_in(folder, scan_dcp_folders(folder))
    assert pieces
    some = samples_of(pieces)
    assert some
    assert are_equal(roots["before"], roots["same"], some)
    assert not are_equal(roots["before"], roots["changed"], some)
    digests = {name: digest_of(root, some) for name, root in roots.items()}
    assert digests["before"] == digests["same"] != digests["changed"]


def test_tensors_of_a_registered_object_follow_the_weights(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "custom_checkpoint_0.pkl")
    assert weights_in(scan_folder(tmp_path), ()) == ()
    in_safetensors(tmp_path, tensors())
    assert [piece.path.name for piece in weights_in(scan_folder(tmp_path), ()) or ()] == [
        *["model.safetensors"] * 2,
        "custom_checkpoint_0.pkl",
    ]


def deepspeed(folder: Path) -> None:
    (folder / "pytorch_model").mkdir()
    torch.save({}, folder / "pytorch_model/mp_rank_00_model_states.pt")


def other_library(folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF")


def broken(folder: Path) -> None:
    (folder / "model_1.safetensors").write_bytes(b"")


@pytest.mark.parametrize("add", [deepspeed, other_library, broken])
def test_weights_that_are_not_compared_leave_the_question_open(
    add: Callable[[Path], Any], tmp_path: Path
) -> None:
    in_safetensors(tmp_path, tensors())
    assert weights_in(scan_folder(tmp_path), ())
    add(tmp_path)
    assert weights_in(scan_folder(tmp_path), ()) is None


def test_optimizers_are_compared_without_the_weights(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        (tmp_path / name).mkdir()
        in_safetensors(tmp_path / name, tensors(float(ord(name))))
        state = {0: {"step": torch.tensor(3.0), "exp_avg": torch.full((2,), value)}}
        torch.save(
            {"state": state, "param_groups": [{"params": [0]}]}, tmp_path / name / "optimizer.bin"
        )
    pieces = optimizers_in(scan_folder(tmp_path / "a"), ())
    some = samples_of(pieces or ())
    assert some
    assert [are_equal(tmp_path / "a", tmp_path / name, some) for name in "bc"] == [True, False]


@pytest.mark.parametrize(
    ("count", "length"), [(1, 1 << 30), (300, 8192), (9217, 64), (16384, 4096), (3, 2), (2, 0)]
)
def test_samples_of_a_folder_have_one_mebibyte_at_most(count: int, length: int) -> None:
    some = samples_of(pieces_of(count, length))
    assert some is not None
    assert sum(piece.length for piece in some) <= 1 << 20
    assert len(some) == (count if length else 0)


@pytest.mark.parametrize(
    ("pieces", "most"), [((16385, 4096), 1 << 20), ((100_000, 1), 1 << 20), ((4097, 64), 1 << 18)]
)
def test_more_tensors_are_not_compared(pieces: tuple[int, int], most: int) -> None:
    """None may be left out: in a frozen mixture of experts the head alone is trained."""
    assert samples_of(pieces_of(*pieces), most) is None


def pieces_of(count: int, length: int) -> list[Piece]:
    return [Piece(PurePosixPath(f"{number}"), 0, length) for number in range(count)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changed", [0, 1, 2, 3])
def test_samples_of_dcp_are_of_the_tensors(changed: int, tmp_path: Path) -> None:
    """Each item begins with 704 bytes of a zip file, which are those of the last save."""
    shapes = [(400,), (24, 24), (5,), (64, 64)]
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        tensors = {
            f"{number}": torch.full(shape, value if number == changed else 0.0)
            for number, shape in enumerate(shapes)
        }
        in_dcp(tmp_path / name, tensors)
    pieces = weights_in(folder := scan_folder(tmp_path / "a"), scan_dcp_folders(folder))
    assert pieces
    for most in (8000, 1 << 20):
        some = samples_of(pieces, most)
        assert some
        assert sum(piece.length for piece in some) <= most
        assert [are_equal(tmp_path / "a", tmp_path / name, some) for name in "bc"] == [True, False]
    assert samples_of(pieces, 4700) is None
