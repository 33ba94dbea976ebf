"""Shards under other names than their index lists: named with the commands that bring them back."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix import check, repair, salvage
from tests.diagnosis.test_odd_indexes import (
    Diffusers,
    Folder,
    Library,
    Transformers,
    copy_of,
    folder,
    library,
    read,
    saved,
    write,
)

__all__ = ["folder", "library", "saved"]


def rename(folder: Folder, name: Callable[[str], str], *numbers: int) -> None:
    for number in numbers or (1, 2, 3):
        shard = folder.shard(number)
        shard.rename(folder.path / name(shard.name))


NAMES: dict[str, Callable[[str], str]] = {
    "another stem": lambda name: f"my{name}",
    "the stem of the other format": lambda name: f"pytorch_{name}",
    "another total": lambda name: name.replace("-of-00003", "-of-00004"),
    "a smaller total": lambda name: name.replace("-of-00003", "-of-00002"),
    "capitals": lambda name: name.replace("-of-", "-OF-"),
}


def findings(folder: Folder) -> list[Any]:
    return list(check(folder.path).all_findings)


@pytest.mark.parametrize(
    ("name", "kind", "suffix", "numbers"),
    [
        *((name, Transformers, ".safetensors", ()) for name in NAMES),
        ("another stem", Diffusers, ".bin", (1, 3)),
    ],
)
def test_renamed_shards_are_named_with_the_commands_that_rename_them(
    saved: Any,
    tmp_path: Path,
    kind: type[Library],
    suffix: str,
    name: str,
    numbers: tuple[int, ...],
) -> None:
    library, source = saved[kind, suffix]
    folder = copy_of(source, tmp_path / "model")
    rename(folder, NAMES[name], *numbers)
    assert not library.is_loaded(folder)
    (finding,) = findings(folder)
    assert finding.code == "missing-shard"
    assert not finding.is_salvageable
    before = sorted(path.name for path in folder.path.iterdir())
    assert repair(folder.path).status == 1
    assert sorted(path.name for path in folder.path.iterdir() if path.name != ".ckptfix") == before
    salvaged = salvage(folder.path, tmp_path / "salvaged")
    assert not salvaged.lost
    _, _, command = finding.advice_at(str(folder.path)).partition(": ")
    subprocess.run(command, shell=True, check=True)
    assert findings(folder) == []
    assert library.is_loaded(folder)


def test_a_size_in_the_index_that_the_other_shards_exceed_counts_for_nothing(
    library: Library, folder: Folder
) -> None:
    document = json.loads(folder.index.read_text())
    document["metadata"]["total_size"] = 1
    folder.index.write_text(json.dumps(document))
    assert library.is_loaded(folder)
    assert findings(folder) == []
    rename(folder, str.capitalize, 1)
    (finding,) = findings(folder)
    assert "; 'Model-00001-of-00003.safetensors' holds its " in str(finding)
    assert finding.advice_at(str(folder.path)).endswith(f" {folder.shard(1)}")


def test_the_sentence_about_several_renamed_shards(folder: Folder, tmp_path: Path) -> None:
    rename(folder, NAMES["another total"], 1, 2)
    folder.shard(3).unlink()
    (finding,) = findings(folder)
    assert str(finding).endswith(
        "; 'model-00001-of-00004.safetensors', 'model-00002-of-00004.safetensors' hold the "
        "tensors of 2 of the shards"
    )
    advice = finding.advice_at(str(folder.path))
    assert advice.startswith(
        f"rename the files: mv {folder.path}/model-00001-of-00004.safetensors "
    )
    assert advice.endswith("; copy the other shards again from their source")
    assert finding.is_salvageable
    # A store has no such command.
    assert finding.advice_at("s3://bucket/model").startswith(
        "rename 'model-00001-of-00004.safetensors' to model-"
    )
    lost = salvage(folder.path, tmp_path / "salvaged").lost
    assert {file for file, *_ in lost} == {folder.shard(3).name}


def test_no_index_is_written_under_a_name_of_which_another_index_has_the_keys(
    library: Library, folder: Folder
) -> None:
    """Two files with the keys of each missing shard: which of them was renamed is not clear."""
    for number in (1, 2, 3):
        shutil.copy(folder.shard(number), folder.path / f"my{folder.shard(number).name}")
    rename(folder, NAMES["the stem of the other format"])
    kinds = {(one.code, str(one.path)) for one in findings(folder)}
    names = ("mymodel.safetensors.index.json", "pytorch_model.safetensors.index.json")
    assert kinds == {
        ("missing-shard", folder.shard(1).name),
        *(("index-mismatch", name) for name in names),
    }
    assert repair(folder.path).status == 1
    assert not any((folder.path / name).exists() for name in names)
    for path in folder.path.glob("mymodel*"):
        path.unlink()
    (finding,) = findings(folder)
    subprocess.run(finding.advice_at(str(folder.path)).partition(": ")[2], shell=True, check=True)
    assert library.is_loaded(folder)


def test_an_index_is_written_of_shards_of_which_one_has_a_copy_of_all_tensors(
    library: Library, folder: Folder
) -> None:
    folder.index.unlink()
    write(folder.shard(3), {**read(folder.shard(3)), **read(folder.shard(1))})
    assert repair(folder.path).status == 0
    assert library.is_loaded(folder)
    assert [(one.code, str(one.path)) for one in findings(folder)] == [
        ("stale-shard", folder.shard(1).name)
    ]


def test_the_only_index_of_shards_of_any_name_is_written(library: Library, folder: Folder) -> None:
    """``load_checkpoint_in_model`` takes the only index of a folder."""
    (folder.path / "config.json").unlink()
    folder.index.unlink()
    rename(folder, NAMES["another stem"])
    assert repair(folder.path).status == 0
    (model,) = Library.loads(library, folder)
    assert library.is_equal(model)


def test_a_file_with_the_keys_of_the_missing_shards_of_two_indexes_is_not_named(
    folder: Folder,
) -> None:
    of_variant = folder.path / "model.safetensors.index.fp16.json"
    of_variant.write_text(folder.index.read_text().replace("-of-00003.", "-of-00003.fp16."))
    for number in (1, 3):
        variant = folder.path / folder.shard(number).name.replace("-of-00003.", "-of-00003.fp16.")
        write(variant, read(folder.shard(number)))
    folder.shard(2).rename(folder.path / "part.safetensors")
    missing = [one for one in findings(folder) if one.code == "missing-shard"]
    assert len(missing) == 2
    assert not any("holds" in str(one) for one in missing)


def moved_into(folder: Folder, where: str, *numbers: int) -> Path:
    """Move shards into a sub-folder."""
    inner = folder.path / where
    inner.mkdir()
    for number in numbers:
        folder.shard(number).rename(inner / folder.shard(number).name)
    return inner


@pytest.mark.parametrize(
    ("kind", "suffix", "numbers"),
    [(Transformers, ".safetensors", (1, 2, 3)), (Diffusers, ".bin", (2,))],
)
def test_shards_in_a_sub_folder_are_named(
    saved: Any, tmp_path: Path, kind: type[Library], suffix: str, numbers: tuple[int, ...]
) -> None:
    library, source = saved[kind, suffix]
    folder = copy_of(source, tmp_path / "model")
    moved_into(folder, "weights", *numbers)
    assert not library.is_loaded(folder)
    (finding,) = [one for one in findings(folder) if one.code == "missing-shard"]
    assert f"; 'weights/{folder.shard(numbers[0]).name}'" in str(finding)
    assert finding.advice.startswith("move 'weights/")
    assert finding.advice_at(str(folder.path)).startswith("move ")
    subprocess.run(finding.advice_at(str(folder.path)).partition(": ")[2], shell=True, check=True)
    assert library.is_loaded(folder)
    assert [one.code for one in findings(folder)] == []


@pytest.mark.parametrize(
    "what", ["its own index", "a config", "another key", "cut", "in two folders"]
)
def test_shards_of_another_model_in_a_sub_folder_are_not_named(folder: Folder, what: str) -> None:
    """The Trainer's last model has checkpoints below it, with shards of the same names and keys."""
    inner = moved_into(folder, "weights", 2)
    shard = inner / folder.shard(2).name
    if what == "its own index":
        shutil.copy(folder.index, inner)
    elif what == "a config":
        shutil.copy(folder.path / "config.json", inner)
    elif what == "another key":
        write(shard, {**read(shard), "more": torch.ones(1)})
    elif what == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        shutil.copytree(inner, folder.path / "more")
    missing = [one for one in findings(folder) if one.code == "missing-shard"]
    assert all(
        one.advice_at(str(folder.path)).startswith("copy the shard again") for one in missing
    )
    assert str(missing[0].path) == folder.shard(2).name


@pytest.mark.parametrize(
    "name", ["{}.bak", "{}~", "{}.1", "{}.incomplete", "{}.tmp", "{upper}", "{upper}.BAK"]
)
def test_a_complete_shard_with_another_ending_is_named(
    library: Library, folder: Folder, name: str
) -> None:
    """In capitals the ending, too, was another: the shard was to be copied again."""
    near = name.format(folder.shard(2).name, upper=folder.shard(2).name.upper())
    rename(folder, lambda _: near, 2)
    # A download with all tensors is not an interrupted one, too, with advice to copy the file
    # again.
    (finding,) = findings(folder)
    assert finding.code == "missing-shard"
    assert finding.advice_at(str(folder.path)).startswith("rename ")
    assert not any(near in unchecked for unchecked in check(folder.path).not_checked)
    subprocess.run(finding.advice_at(str(folder.path)).partition(": ")[2], shell=True, check=True)
    assert library.is_loaded(folder)
    assert findings(folder) == []


def test_a_cut_download_of_a_shard_is_still_an_interrupted_one(folder: Folder) -> None:
    rename(folder, lambda name: f"{name}.crdownload", 2, 3)
    cut = folder.path / f"{folder.shard(3).name}.crdownload"
    cut.write_bytes(cut.read_bytes()[:-1])
    missing, interrupted = findings(folder)
    assert (missing.code, interrupted.code) == ("missing-shard", "interrupted-save")
    assert interrupted.path.name == cut.name
    assert "copy the other shards again" in missing.advice_at(str(folder.path))
