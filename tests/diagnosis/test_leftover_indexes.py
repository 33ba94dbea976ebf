"""Indexes that a save left next to the file of a later save, which diffusers alone takes; and a shard without one."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from ckptfix import check, latest_checkpoint, repair, salvage
from tests.diagnosis.test_families import values, write
from tests.diagnosis.test_odd_indexes import OLDEST, Diffusers, Library, Transformers


def notes(path: Path) -> list[tuple[str, str, str]]:
    return [(one.severity.value, one.code, str(one)) for one in check(path).all_findings]


def saved_twice(library: Library, path: Path) -> Library:
    """Save a model in shards and another one in one file, as a script does that saves again."""
    library.new().save_pretrained(path, max_shard_size="1KB")
    torch.manual_seed(1)
    library.model = library.new()
    library.model.save_pretrained(path)
    return library


def is_equal(model: Any, other: Any) -> bool:
    state = other.state_dict()
    return all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def resumed_by_trainer(library: Library, path: Path) -> Any:
    from transformers import Trainer, TrainingArguments

    model = library.new()
    Trainer(model, TrainingArguments(str(path.with_name("run")), use_cpu=True))._load_from_checkpoint(
        str(path)
    )
    return model


def in_model(library: Library, path: Path) -> Any:
    model = library.new()
    accelerate.load_checkpoint_in_model(model, path)
    return model


def test_an_index_that_transformers_leaves_when_it_saves_one_file_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "model"
    library = saved_twice(Transformers(), path)
    assert (path / "model.safetensors.index.json").exists()
    assert not [*path.glob("model-*")]
    assert is_equal(library.model, type(library.model).from_pretrained(path))
    assert is_equal(library.model, in_model(library, path))
    assert is_equal(library.model, resumed_by_trainer(library, path))
    ((severity, code, sentence),) = notes(path)
    assert (severity, code) == ("note", "index-mismatch")
    assert sentence.startswith("model.safetensors.index.json is left over from another save: ")
    assert sentence.endswith("; loaders take model.safetensors")
    (finding,) = check(path).all_findings
    index = path / "model.safetensors.index.json"
    assert finding.advice_at(str(path)) == f"if model.safetensors is the save that you want: rm {index}"
    assert check(path).status == 0
    index.unlink()
    assert notes(path) == []


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.exists(), reason="needs the oldest transformers: see README.md")
def test_the_oldest_transformers_takes_the_file_too(tmp_path: Path) -> None:
    path = tmp_path / "model"
    library = saved_twice(Transformers(), path)
    torch.save(library.model.state_dict(), tmp_path / "expected.pt")
    script = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from transformers import LlamaForCausalLM
model = LlamaForCausalLM.from_pretrained(sys.argv[3]).state_dict()
assert all(torch.equal(model[key], tensor) for key, tensor in torch.load(sys.argv[2]).items())
"""
    subprocess.run(
        [sys.executable, "-c", script, str(OLDEST), str(tmp_path / "expected.pt"), str(path)], check=True
    )


def test_an_index_that_diffusers_leaves_stops_its_loads_until_it_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "unet"
    library = saved_twice(Diffusers(), path)
    name = "diffusion_pytorch_model.safetensors"
    index = path / f"{name}.index.json"
    with pytest.raises(OSError, match="does not appear to have a file named"):
        type(library.model).from_pretrained(path)
    ((severity, code, sentence),) = notes(path)
    assert (severity, code) == ("error", "index-mismatch")
    tensors = len(library.model.state_dict())
    assert sentence.endswith(
        f"diffusers takes it before {name}, which holds its {tensors} tensors, and fails"
    )
    (finding,) = check(path).all_findings
    assert finding.advice_at(str(path)) == f"if {name} is the save that you want: rm {index}"
    assert finding.advice == f"if {name} is the save that you want: delete {index.name}"
    report = salvage(path, tmp_path / "salvaged")
    assert not report.lost
    assert is_equal(library.model, type(library.model).from_pretrained(tmp_path / "salvaged"))
    index.unlink()
    assert is_equal(library.model, type(library.model).from_pretrained(path))
    assert notes(path) == []


INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def without_shards(path: Path) -> None:
    for shard in path.glob("*-of-*"):
        shard.unlink()


def with_one_shard(path: Path) -> None:
    next(iter(sorted(path.glob("*-00002-of-*")))).unlink()


def cut(path: Path) -> None:
    without_shards(path)
    (index,) = path.glob("*.index.json")
    index.write_bytes(index.read_bytes()[:20])


@pytest.mark.parametrize("damage", [without_shards, with_one_shard, cut])
@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_load_state_needs_no_index(
    tmp_path: Path, kind: str, index: str, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "checkpoint_0"
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(3, 4))
    accelerator.save_state(str(path), safe_serialization=kind == "safetensors")
    write(path / index, values(0, "weight", "bias"))
    damage(path)
    ((severity, code, sentence),) = notes(path)
    assert (severity, code) == ("note", "index-mismatch"), sentence
    assert latest_checkpoint(tmp_path) == path
    before = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state(str(path))
    assert torch.equal(model.weight, before)
    shutil.rmtree(tmp_path / "salvaged", ignore_errors=True)
    assert not salvage(path, tmp_path / "salvaged").lost


def test_an_index_of_safetensors_next_to_bin_stops_from_pretrained(tmp_path: Path) -> None:
    path = tmp_path / "model"
    library = Transformers()
    library.new().save_pretrained(path, max_shard_size="1KB")
    without_shards(path)
    torch.save(library.model.state_dict(), path / "pytorch_model.bin")
    with pytest.raises(OSError, match="No such file or directory"):
        type(library.model).from_pretrained(path)
    assert is_equal(library.model, in_model(library, path))
    ((severity, _, sentence),) = notes(path)
    assert severity == "error"
    assert "transformers takes it before pytorch_model.bin, which holds its " in sentence
    (path / "model.safetensors.index.json").unlink()
    assert is_equal(library.model, type(library.model).from_pretrained(path))
    assert notes(path) == []


@pytest.mark.parametrize("what", ["a part of the keys", "cut", "not a state dict", "another model"])
def test_shards_are_missing_where_the_file_may_not_replace_them(tmp_path: Path, what: str) -> None:
    name = "pytorch_model.bin" if what == "not a state dict" else "model.safetensors"
    write(tmp_path / "model.safetensors.index.json", values(0, "a.weight", "b.weight"))
    without_shards(tmp_path)
    if what == "not a state dict":
        torch.save({"model": values(1), "step": 3}, tmp_path / name)
    elif what == "another model":
        write(tmp_path / "diffusion_pytorch_model.safetensors", values(1))
    else:
        write(tmp_path / name, values(1, *(["a.weight"] if what == "a part of the keys" else [])))
    if what == "cut":
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
    assert ("error", "missing-shard") in [one[:2] for one in notes(tmp_path)]


def test_an_index_of_bin_lists_tied_weights_that_safetensors_leaves_out(tmp_path: Path) -> None:
    write(tmp_path / "pytorch_model.bin.index.json", values(0, "embed.weight", "head.weight"))
    without_shards(tmp_path)
    write(tmp_path / "model.safetensors", values(1, "embed.weight"))
    assert [one[:2] for one in notes(tmp_path)] == [("note", "index-mismatch")]


@pytest.mark.parametrize("kind", [Transformers, Diffusers])
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_no_loader_finds_a_single_shard_without_its_index(
    tmp_path: Path, kind: type[Library], suffix: str
) -> None:
    library = kind()
    folder = library.save(tmp_path / "model", suffix)
    tensors = {key: tensor.clone() for key, tensor in library.model.state_dict().items()}
    for path in (folder.index, *map(folder.shard, (1, 2, 3))):
        path.unlink()
    shard = folder.path / f"{folder.stem}-00001-of-00001{suffix}"
    write(shard, tensors)
    assert not library.is_loaded(folder)
    finding, *_ = check(folder.path).findings
    assert (finding.code, str(finding)) == (
        "index-mismatch",
        f"{folder.index.name} is missing, its shards are there",
    )
    assert [str(model.path) for model in check(folder.path).understood.models] == [shard.name]
    assert repair(folder.path).status == 0
    assert library.is_loaded(folder)
