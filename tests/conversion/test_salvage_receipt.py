"""The receipt of a salvage names all that it leaves out, and the commands that it gives work when
they are typed.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptfix import OperationError, UsageError, diff, migrate, repair
from ckptfix.conversion.salvage import SalvageReceipt, salvage
from ckptfix.tensors.opening import open_checkpoint
from tests.repairs.dcp_folders import copy
from tests.tensors import dcp_making
from tests.verification.sealed import flip, make_sharded, state


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {
        "salvage.json"
    }


def cut(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


def lost(receipt: SalvageReceipt) -> "dict[str, str]":
    return {one.name or one.file: one.reason for one in receipt.lost}


def test_an_optimizer_folder_without_a_rank_is_left_out_as_a_whole_and_that_is_said(
    tmp_path: Path,
) -> None:
    source = copy(tmp_path, "fsdp2-clean")
    (source / "optimizer_0" / "__1_0.distcp").unlink()
    receipt = salvage(source, tmp_path / "new")
    assert not (tmp_path / "new" / "optimizer_0").exists()
    (reason,) = lost(receipt).values()
    items = len(dcp_making_items(source / "optimizer_0"))
    assert reason.startswith(
        f"nothing in it is salvaged ({items} items), because not every item is intact: "
    )
    assert "ckptfix salvage" not in reason, "nothing can be saved there"
    with pytest.raises(OperationError, match="nothing can be salvaged"):
        salvage(source / "optimizer_0", tmp_path / "other")


def dcp_making_items(folder: Path) -> "list[str]":
    from torch.distributed.checkpoint import FileSystemReader

    return list(FileSystemReader(folder).read_metadata().state_dict_metadata)


def test_a_folder_below_of_which_a_part_can_be_saved_says_how(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "unet").mkdir(parents=True)
    save_file({"a": torch.ones(2)}, source / "model.safetensors")
    save_file(state(), source / "unet" / "model.safetensors")
    cut(source / "unet" / "model.safetensors", 10)
    (reason,) = lost(salvage(source, tmp_path / "new")).values()
    words = reason.partition("to recover what is intact: ")[2]
    assert words == f"ckptfix salvage {source / 'unet'} NEW_FOLDER"
    assert salvage(source / "unet", tmp_path / "part").tensors == 3


def test_a_bad_item_beside_the_model_names_all_that_is_left_out(tmp_path: Path) -> None:
    saved = {"model": state(), "optim": {"lr": torch.tensor(0.1), "m": torch.ones(4)}, "epoch": 3}
    source = tmp_path / "source"
    dcp_making.save(source, saved)
    (source / "__9_0.distcp").write_bytes(b"of another save")
    path = source / "__0_0.distcp"
    flip(path, path.read_bytes().index(bytes(torch.tensor(0.1).numpy().data)))
    receipt = salvage(source, tmp_path / "new")
    assert lost(receipt).keys() == {"optim.lr", "optim.m", "epoch"}
    assert receipt.left_out == ("1 file in . that .metadata does not list: '__9_0.distcp'",)
    assert files(tmp_path / "new") == {"model.safetensors"}


def test_other_files_in_a_dcp_folder_that_is_not_whole_are_copied(tmp_path: Path) -> None:
    source = copy(tmp_path, "fsdp2-clean")
    model = source / "pytorch_model_fsdp_0"
    (model / "notes.txt").write_text("of mine")
    (model / ".ckptfix").mkdir()
    (model / ".ckptfix" / "manifest.json").write_text("{}")
    largest = max(model.glob("*.distcp"), key=lambda path: path.stat().st_size)
    cut(largest, largest.stat().st_size // 2)
    receipt = salvage(source, tmp_path / "new")
    assert (tmp_path / "new" / "pytorch_model_fsdp_0" / "notes.txt").read_text() == "of mine"
    assert not list((tmp_path / "new").rglob(".ckptfix"))
    assert (
        "pytorch_model_fsdp_0/.ckptfix: it describes the source, not the new folder"
        in receipt.left_out
    )


@pytest.mark.parametrize("damage", ["missing", "broken"])
@pytest.mark.parametrize("where", ["", "text_encoder"])
def test_whole_shards_without_an_index_are_sent_to_repair(
    tmp_path: Path, damage: str, where: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    if where:
        save_file({"a": torch.ones(2)}, source / "model.safetensors")
    (source / where).mkdir(exist_ok=True)
    make_sharded(source / where)
    index = source / where / "model.safetensors.index.json"
    index.unlink() if damage == "missing" else index.write_text("{")
    new = tmp_path / "new"
    receipt = salvage(source, new)
    assert receipt.next_steps == (f"ckptfix repair {new / where}",)
    assert (receipt.status, receipt.verdict) == (0, "no losses found")
    assert len(receipt.left_out) == (damage == "broken")
    assert receipt.as_json()["next"] == list(receipt.next_steps)
    assert repair(new / where).status == 0
    assert open_checkpoint(new / where).weights[0].named().keys() == state().keys()
    make_sharded(source / where)
    assert salvage(source, tmp_path / "whole").next_steps == ()


def whole_and_part(source: Path, whole: str, part: str) -> None:
    source.mkdir()
    for name in (whole, part):
        if name.endswith(".bin"):
            torch.save(state(), source / name)
        else:
            save_file(state(), source / name, {"format": "pt"})
    cut(source / part, 1000)


@pytest.mark.parametrize(
    ("whole", "part", "name"),
    [
        ("pytorch_model.bin", "model.safetensors", "model-salvaged.safetensors"),
        ("pytorch_model_1.bin", "model_1.safetensors", "model_1-salvaged.safetensors"),
        ("model.safetensors", "pytorch_model.bin", "pytorch_model-salvaged.safetensors"),
    ],
)
def test_a_part_never_stands_where_loaders_take_it_for_the_whole(
    tmp_path: Path, whole: str, part: str, name: str
) -> None:
    whole_and_part(tmp_path / "source", whole, part)
    receipt = salvage(tmp_path / "source", tmp_path / "new")
    assert files(tmp_path / "new") == {whole, name}
    assert receipt.notes == (
        (
            f"{part}: the salvaged part of its model gets a name that no loader looks for, because "
            f"{whole} has the complete model"
        ),
    )
    (weights,) = open_checkpoint(tmp_path / "new").weights
    assert weights.label == whole
    assert diff(tmp_path / "new", tmp_path / "source" / whole).status == 0


def test_a_part_keeps_the_name_of_loaders_beside_other_models_and_other_parts(
    tmp_path: Path,
) -> None:
    whole_and_part(tmp_path / "one", "pytorch_model_1.bin", "model.safetensors")
    assert "model.safetensors" in files(salvaged(tmp_path / "one"))
    whole_and_part(tmp_path / "two", "pytorch_model.bin", "model.safetensors")
    cut(tmp_path / "two" / "pytorch_model.bin", 3000)
    assert "model.safetensors" in files(salvaged(tmp_path / "two"))


def test_a_part_of_a_dcp_folder_beside_a_whole_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    dcp_making.save(source / "pytorch_model_fsdp_0", {"model": state()})
    torch.save(state(), source / "pytorch_model.bin")
    torch.save({}, source / "random_states_0.pkl")
    cut(source / "pytorch_model_fsdp_0" / "__0_0.distcp", 3000)
    receipt = salvage(source, tmp_path / "new")
    assert "pytorch_model_fsdp_0-salvaged.safetensors" in files(tmp_path / "new")
    assert receipt.notes
    assert open_checkpoint(tmp_path / "new").weights[0].label == "pytorch_model.bin"


def salvaged(source: Path) -> Path:
    new = source.with_name(f"{source.name}-new")
    assert salvage(source, new).status == 1
    return new


def test_a_folder_of_checkpoints_is_sent_to_a_command_that_works(tmp_path: Path) -> None:
    for number in (2, 4):
        folder = tmp_path / "trainer" / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        save_file(state(), folder / "model.safetensors")
    words = f"next: ckptfix check --recursive {tmp_path / 'trainer'}$"
    with pytest.raises(UsageError, match=words):
        diff(tmp_path / "trainer", tmp_path / "trainer")
    with pytest.raises(UsageError, match=words):
        migrate(tmp_path / "trainer", tmp_path / "new", to="bin")
    shutil.rmtree(tmp_path / "trainer" / "checkpoint-2")
    shutil.rmtree(tmp_path / "trainer" / "checkpoint-4")
    with pytest.raises(UsageError, match=r"has no model weights: the folder is empty$"):
        diff(tmp_path / "trainer", tmp_path / "trainer")


def words(path: Path) -> "dict[str, str]":
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def test_the_words_in_a_header_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file(state(), source / "model.safetensors", {"format": "pt", "step": "12", "lr": "0.1"})
    cut(source / "model.safetensors", 10)
    salvage(source, tmp_path / "new")
    assert words(tmp_path / "new" / "model.safetensors") == {
        "format": "pt",
        "step": "12",
        "lr": "0.1",
    }


def test_words_that_shards_do_not_agree_on_are_lost(tmp_path: Path) -> None:
    source = make_sharded(folder(tmp_path / "source"))
    for number, name in enumerate(sorted(source.glob("*.safetensors"))):
        save_file(load_file(name), name, {"format": "pt", "run": "a", "step": str(number)})
    cut(source / "model-00002-of-00002.safetensors", 10)
    receipt = salvage(source, tmp_path / "new")
    assert words(tmp_path / "new" / "model.safetensors") == {"format": "pt", "run": "a"}
    assert lost(receipt)["__metadata__"] == "'step' differs between the files of the model"


def folder(path: Path) -> Path:
    path.mkdir()
    return path
