"""Files that macOS leaves next to others in archives and on foreign file systems, against the
loaders of the folder.
"""

import importlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptfix import check, latest_checkpoint
from tests.commanding import Said, said
from tests.diagnosis.builders import new_accelerator, small_unet
from tests.tensors.parts_making import loaded, save_part

__all__ = ["said"]

diffusers: Any = pytest.importorskip("diffusers")

APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(4072)


def copied(root: Path) -> None:
    """Leave what a copy from macOS leaves for each file below a folder."""
    for folder, _, names in list(os.walk(root)):
        for name in names:
            Path(folder, f"._{name}").write_bytes(APPLE_DOUBLE)
        Path(folder, ".DS_Store").write_bytes(b"\x00\x00\x00\x01Bud1" + bytes(90))


def of_save_state(root: Path) -> Callable[[], object]:
    accelerator = new_accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.prepare(torch.optim.AdamW(model.parameters()))
    accelerator.save_state(str(root))
    return lambda: accelerator.load_state(str(root))


def of_pipeline(root: Path) -> Callable[[], object]:
    diffusers.DDPMPipeline(unet=small_unet(), scheduler=diffusers.DDPMScheduler()).save_pretrained(
        root
    )
    return lambda: diffusers.DDPMPipeline.from_pretrained(root)


def of_dcp(root: Path) -> Callable[[], object]:
    state = {"weight": torch.ones(2)}
    dcp.save(state, checkpoint_id=root, no_dist=True)
    return lambda: dcp.load(state, checkpoint_id=root, no_dist=True)


@pytest.mark.parametrize("make", [of_save_state, of_pipeline, of_dcp])
@pytest.mark.filterwarnings("ignore")
def test_files_that_no_loader_reads_are_no_damage(
    make: Callable[[Path], Callable[[], object]], tmp_path: Path, said: Said
) -> None:
    """Each file was called ``not-a-tensor-file``, and the newest checkpoint was passed over."""
    root = tmp_path / "checkpoint_1"
    load = make(root)
    shutil.copytree(root, tmp_path / "checkpoint_2")
    copied(root)
    load()
    assert said("check", root)[0] == 0
    assert not [finding for finding in check(root).findings if finding.path.name.startswith("._")]
    if make is of_save_state:
        shutil.rmtree(tmp_path / "checkpoint_2")
        assert latest_checkpoint(tmp_path) == root


def test_a_lost_file_is_lost_though_macos_left_its_attributes(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    load = of_save_state(root)
    copied(root)
    (root / "model.safetensors").unlink()
    with pytest.raises(OSError, match="model"):
        load()
    assert check(root).status == 1


def test_the_folder_of_an_archive_is_no_checkpoint(tmp_path: Path, said: Said) -> None:
    """``__MACOSX`` of a zip archive has all attributes, and none of the files."""
    of_pipeline(tmp_path / "pipeline")
    shutil.copytree(tmp_path / "pipeline", tmp_path / "__MACOSX")
    for path in (tmp_path / "__MACOSX").rglob("*.*"):
        path.unlink()
        path.with_name(f"._{path.name}").write_bytes(APPLE_DOUBLE)
    status, out, _ = said("check", "-r", tmp_path)
    assert status == 0
    assert "__MACOSX" not in out


def test_a_file_of_macos_is_named_where_it_is_asked_for(tmp_path: Path, said: Said) -> None:
    of_save_state(tmp_path)
    copied(tmp_path)
    for name in ("._model.safetensors", "._optimizer.bin"):
        status, _, err = said("check", tmp_path / name)
        assert status == 2
        assert "a macOS AppleDouble file" in err


def test_a_reader_that_lists_the_folder_fails(tmp_path: Path) -> None:
    """torch's ``HuggingFaceStorageReader`` opens every ``.safetensors`` file."""
    tensors = {"weight": torch.ones(2, 2)}
    save_part(tmp_path, 0, {"weight": ([0, 0], tensors["weight"])})
    loaded(tmp_path, tensors)
    assert check(tmp_path).status == 0
    copied(tmp_path)
    with pytest.raises(CheckpointException):
        loaded(tmp_path, tensors)
    assert check(tmp_path).status == 1


def test_a_lora_of_diffusers_that_is_found_by_its_ending(tmp_path: Path) -> None:
    """``load_lora_weights`` takes the first file that the system lists."""
    name = "pytorch_lora_weights.safetensors"
    state = {"unet.q.lora_A.weight": torch.ones(2, 2), "unet.q.lora_B.weight": torch.ones(2, 2)}
    save_file(state, tmp_path / name)
    assert check(tmp_path).status == 0
    copied(tmp_path)
    lora_base = importlib.import_module("diffusers.loaders.lora_base")
    assert lora_base._best_guess_weight_name(tmp_path) in (name, f"._{name}")
    assert check(tmp_path).status == 1
