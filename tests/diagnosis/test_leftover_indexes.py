"""Indexes and shards that a save left next to another complete save, by what each loader takes."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open

from ckptfix import Policy, check, latest_checkpoint, repair, salvage, undo
from ckptfix.errors import UsageError
from tests.diagnosis.test_families import values, write
from tests.diagnosis.test_odd_indexes import Diffusers, Library, Transformers
from tests.weight_loaders import REAL


def notes(path: Path) -> list[tuple[str, str, str]]:
    return [(one.severity.value, one.code, str(one)) for one in check(path).all_findings]


def saved_twice(library: Library, path: Path) -> Library:
    """Save a model in shards and another one in one file, as a script does that saves again."""
    library.new().save_pretrained(path, max_shard_size="1KB")
    torch.manual_seed(1)
    library.model = library.new()
    library.model.save_pretrained(path)
    return library


def only_note(path: Path, *, of: str) -> str:
    """Return the sentence of the only finding, about an index or a shard."""
    ((severity, code, sentence),) = notes(path)
    assert (severity, code) == ("note", of)
    return sentence


def is_equal(model: Any, other: Any) -> bool:
    state = other.state_dict()
    return all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def resumed_by_trainer(library: Library, path: Path) -> Any:
    from transformers import Trainer, TrainingArguments

    model = library.new()
    Trainer(
        model, TrainingArguments(str(path.with_name("run")), use_cpu=True)
    )._load_from_checkpoint(str(path))
    return model


def in_model(library: Library, path: Path) -> Any:
    model = library.new()
    accelerate.load_checkpoint_in_model(model, path)
    return model


def test_an_index_that_transformers_leaves_when_it_saves_one_file_is_a_note(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model"
    library = saved_twice(Transformers(), path)
    assert (path / "model.safetensors.index.json").exists()
    assert not [*path.glob("model-*")]
    assert is_equal(library.model, type(library.model).from_pretrained(path))
    assert is_equal(library.model, in_model(library, path))
    assert is_equal(library.model, resumed_by_trainer(library, path))
    sentence = only_note(path, of="index-mismatch")
    assert sentence.startswith("model.safetensors.index.json is left over from another save: ")
    assert sentence.endswith("; loaders use model.safetensors")
    (finding,) = check(path).all_findings
    index = path / "model.safetensors.index.json"
    assert finding.advice_at(str(path)) == (
        "if model.safetensors is the save that you want, set model.safetensors.index.json aside: "
        f"ckptfix repair {path} --keep model.safetensors"
    )
    assert check(path).status == 0
    assert repair(path, policy=Policy(families=frozenset({"model.safetensors"}))).status == 0
    assert not index.exists()
    assert notes(path) == []


def test_an_index_that_diffusers_leaves_stops_its_loads_until_it_is_deleted(
    tmp_path: Path,
) -> None:
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
        f"diffusers prefers it to {name} (which holds its {tensors} tensors), and fails"
    )
    (finding,) = check(path).all_findings
    assert finding.advice == (
        f"if {name} is the save that you want, set {index.name} aside: ckptfix repair DIR --keep "
        f"{name}"
    )
    report = salvage(path, tmp_path / "salvaged")
    assert not report.lost
    assert is_equal(library.model, type(library.model).from_pretrained(tmp_path / "salvaged"))
    assert repair(path, policy=Policy(families=frozenset({name}))).status == 0
    assert not index.exists()
    assert is_equal(library.model, type(library.model).from_pretrained(path))
    assert notes(path) == []


@pytest.mark.parametrize(
    ("name", "lost"), [("head.safetensors", 1), ("head-00001-of-00001.safetensors", 2)]
)
def test_a_file_of_a_script_is_not_advised_to_be_deleted_with_an_index(
    tmp_path: Path, name: str, lost: int
) -> None:
    two_saves(tmp_path, "model.safetensors", SAFE, lost)
    kept = [shard.name for shard in shards_of(tmp_path, SAFE) if shard.exists()]
    write(tmp_path / name, values(7, "a.weight"))
    (finding,) = check(tmp_path).all_findings
    assert (finding.severity.value, finding.code) == ("note", "index-mismatch")
    assert name not in finding.advice_at(str(tmp_path))
    assert all(shard in finding.advice for shard in kept)


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


@pytest.mark.parametrize(
    ("kind", "index", "damage"),
    [
        ("safetensors", INDEXES[0], without_shards),
        ("bin", INDEXES[1], without_shards),
        ("safetensors", INDEXES[0], with_one_shard),
        ("safetensors", INDEXES[1], cut),
    ],
)
def test_load_state_needs_no_index(
    tmp_path: Path, kind: str, index: str, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "checkpoint_0"
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(3, 4))
    accelerator.save_state(str(path), safe_serialization=kind == "safetensors")
    write(path / index, values(0, "weight", "bias"))
    damage(path)
    only_note(path, of="index-mismatch")
    assert latest_checkpoint(tmp_path) == path
    before = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state(str(path))
    assert torch.equal(model.weight, before)
    shutil.rmtree(tmp_path / "salvaged", ignore_errors=True)
    assert not salvage(path, tmp_path / "salvaged").lost


def lost_shards_next_to_bin(path: Path) -> Library:
    library = Transformers()
    library.new().save_pretrained(path, max_shard_size="1KB")
    without_shards(path)
    torch.save(library.model.state_dict(), path / "pytorch_model.bin")
    with pytest.raises(OSError, match="No such file or directory"):
        type(library.model).from_pretrained(path)
    return library


def test_an_index_of_safetensors_next_to_bin_stops_from_pretrained(tmp_path: Path) -> None:
    path = tmp_path / "model"
    library = lost_shards_next_to_bin(path)
    assert is_equal(library.model, in_model(library, path))
    ((severity, _, sentence),) = notes(path)
    assert severity == "error"
    assert "transformers prefers it to pytorch_model.bin (which holds its " in sentence
    (path / "model.safetensors.index.json").unlink()
    assert is_equal(library.model, type(library.model).from_pretrained(path))
    assert notes(path) == []


def test_the_trainer_resumes_from_bin_next_to_an_index_that_stops_from_pretrained(
    tmp_path: Path,
) -> None:
    path = tmp_path / "checkpoint-2"
    library = lost_shards_next_to_bin(path)
    (path / "trainer_state.json").write_text('{"global_step": 2, "log_history": []}')
    assert is_equal(library.model, resumed_by_trainer(library, path))
    ((severity, code, sentence),) = notes(path)
    assert (severity, code) == ("error", "index-mismatch")
    assert sentence.endswith(", and fails; the Trainer resumes from pytorch_model.bin")
    assert latest_checkpoint(tmp_path) == path
    # Without the file, it takes the index, too.
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(OSError, match="No such file or directory"):
        resumed_by_trainer(library, path)
    with pytest.raises(UsageError, match="no complete checkpoint"):
        latest_checkpoint(tmp_path)


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
    embedding = torch.zeros(8, 4)
    state = {"embed.weight": embedding, "body.weight": torch.zeros(64), "head.weight": embedding}
    save_torch_state_dict(state, tmp_path, max_shard_size=200, safe_serialization=False)
    assert len(shards_of(tmp_path, BIN)) == 2
    without_shards(tmp_path)
    save_torch_state_dict(state, tmp_path, shared_tensors_to_discard=["head.weight"])
    assert read_keys(tmp_path / "model.safetensors") == {"embed.weight", "body.weight"}
    assert [one[:2] for one in notes(tmp_path)] == [("note", "index-mismatch")]


def read_keys(file: Path) -> set[str]:
    with safe_open(file, "pt") as opened:
        return set(opened.keys())


@pytest.mark.parametrize(
    ("total", "held"),
    [(2, [0, 1]), (2, range(7)), (2, [0, 12]), (1, [0, 1]), (4, range(4, 14)), (7, [3])],
    ids=str,
)
def test_a_piece_of_a_small_model_does_not_replace_its_bin_shards(
    tmp_path: Path, total: int, held: Sequence[int]
) -> None:
    """``from_pretrained`` loads ``model.safetensors``, and all weights that it lacks are random."""
    keys = [f"layer.{number}.weight" for number in range(14)]
    shards = {
        key: f"pytorch_model-{1 + at * total // 14:05}-of-{total:05}.bin"
        for at, key in enumerate(keys)
    }
    (tmp_path / BIN).write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    write(tmp_path / "model.safetensors", values(1, *(keys[number] for number in held)))
    assert [one[:2] for one in notes(tmp_path)] == [("error", "missing-shard")]


@pytest.mark.parametrize(("kind", "suffix"), [(Transformers, ".safetensors"), (Diffusers, ".bin")])
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
        f"{folder.index.name} is missing, but its shards exist",
    )
    assert [str(model.path) for model in check(folder.path).understood.models] == [shard.name]
    assert repair(folder.path).status == 0
    assert library.is_loaded(folder)


# Next to a complete model in shards.

SAFE, BIN = INDEXES
OF_DIFFUSERS = tuple(
    f"diffusion_pytorch_model.{kind}.index.json" for kind in ("safetensors", "bin")
)
LOADED_FIRST = [(SAFE, BIN), OF_DIFFUSERS]


def shards_of(path: Path, index: str) -> list[Path]:
    return [
        path / name
        for name in sorted(set(json.loads((path / index).read_text())["weight_map"].values()))
    ]


def two_saves(path: Path, complete: str, left: str, lost: int) -> None:
    """Write a complete model in shards, and the index of another one of which this many of two
    shards are gone.
    """
    write(path / complete, values(3))
    write(path / left, values(5))
    for shard in shards_of(path, left)[:lost]:
        shard.unlink()


def library_of(index: str) -> str:
    return "diffusers" if index.startswith("diffusion") else "transformers"


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("pair", LOADED_FIRST, ids=" ".join)
def test_an_index_that_loaders_pass_over_for_shards_is_a_note(
    tmp_path: Path, pair: tuple[str, str], lost: int
) -> None:
    complete, left = pair
    two_saves(tmp_path, complete, left, lost)
    loader = library_of(complete)
    pytest.importorskip(loader)
    assert REAL[loader](tmp_path) == 3
    with pytest.raises(ValueError, match=r"more than one `\.index\.json` file"):
        REAL["load_checkpoint_in_model"](tmp_path)
    (tmp_path / "config.json").unlink()
    sentence = only_note(tmp_path, of="index-mismatch")
    assert sentence.startswith(f"{left} is left over from another save: {lost} listed shard")
    refusal = "load_checkpoint_in_model refuses a folder with two indexes"
    assert sentence.endswith(f"; loaders use {complete}; {refusal}")
    assert check(tmp_path).status == 0
    salvaged = tmp_path.with_name(f"{tmp_path.name}-salvaged")
    assert not salvage(tmp_path, salvaged).lost
    assert REAL["load_checkpoint_in_model"](salvaged) == REAL[loader](salvaged) == 3
    (tmp_path / left).unlink()
    for shard in tmp_path.glob("*bin"):
        shard.unlink()
    assert notes(tmp_path) == []
    assert REAL["load_checkpoint_in_model"](tmp_path) == 3


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("pair", LOADED_FIRST, ids=" ".join)
def test_an_index_that_a_loader_takes_before_complete_shards_is_an_error(
    tmp_path: Path, pair: tuple[str, str], lost: int
) -> None:
    left, complete = pair
    two_saves(tmp_path, complete, left, lost)
    loader = library_of(complete)
    pytest.importorskip(loader)
    with pytest.raises(FileNotFoundError):
        REAL[loader](tmp_path)
    (tmp_path / "config.json").unlink()
    ((severity, code, sentence),) = notes(tmp_path)
    assert (severity, code) == ("error", "index-mismatch")
    assert (
        f"{loader} prefers it to {complete} (whose shards hold its 2 tensors), and fails"
        in sentence
    )
    (tmp_path / left).unlink()
    assert REAL["load_checkpoint_in_model"](tmp_path) == 3
    if loader == "transformers":  # diffusers takes .bin shards with use_safetensors=False alone
        assert REAL[loader](tmp_path) == 3


def test_a_resume_takes_a_checkpoint_with_an_index_that_the_trainer_passes_over(
    tmp_path: Path,
) -> None:
    path = tmp_path / "checkpoint-2"
    library = Transformers()
    library.new().save_pretrained(path, max_shard_size="1KB")
    write(path / BIN, values(5))
    without = shards_of(path, BIN)
    (path / "trainer_state.json").write_text('{"global_step": 2, "log_history": []}')
    for shard in without:
        shard.unlink()
    assert is_equal(resumed_by_trainer(library, path), type(library.model).from_pretrained(path))
    assert latest_checkpoint(tmp_path) == path
    (path / SAFE).unlink()
    with pytest.raises(UsageError, match="no complete checkpoint"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", ["another model", "a lost shard", "a cut shard", "a cut index"])
def test_shards_are_missing_where_other_shards_may_not_replace_them(
    tmp_path: Path, damage: str
) -> None:
    two_saves(tmp_path, SAFE, BIN, 2)
    first, second = shards_of(tmp_path, SAFE)
    if damage == "another model":
        keys = [f"b.{number}.weight" for number in range(40)]
        write(tmp_path / BIN, values(5, *keys, "a.weight"))
        for shard in shards_of(tmp_path, BIN):
            shard.unlink()
        write(tmp_path / SAFE, values(3, "a.weight", "b.0.weight"))
    elif damage == "a lost shard":
        second.unlink()
    elif damage == "a cut shard":
        first.write_bytes(first.read_bytes()[:-1])
    else:
        (tmp_path / SAFE).write_bytes((tmp_path / SAFE).read_bytes()[:20])
    assert ("error", "missing-shard") in [one[:2] for one in notes(tmp_path)]


# Shards without an index.

COMPLETE = ["model.safetensors", SAFE, "pytorch_model.bin", BIN]


@pytest.mark.parametrize("complete", COMPLETE)
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_part_of_the_shards_of_another_save_is_a_warning(
    tmp_path: Path, complete: str, suffix: str
) -> None:
    write(tmp_path / complete, values(3))
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    shard = tmp_path / f"{stem}-00003-of-00003{suffix}"
    write(shard, values(5, "b.weight"))
    for loader in ("transformers", "load_checkpoint_in_model"):
        assert REAL[loader](tmp_path) == 3
    (tmp_path / "config.json").unlink()
    ((severity, code, sentence),) = notes(tmp_path)
    assert code == "stale-shard"
    is_next_to_its_index = complete.endswith(f"{suffix}.index.json")
    is_note = is_next_to_its_index and suffix == ".bin"
    assert severity == ("note" if is_note else "warning")
    if not is_next_to_its_index:
        assert sentence.endswith(f"loaders use {complete}")
    write(shard, values(5, "c.weight"))
    if is_next_to_its_index:
        # Nothing shows that c.weight is of the model: the index that lists all of the others is
        # complete.
        assert [one[:2] for one in notes(tmp_path)] == [("note", "stale-shard")]
    else:
        assert [one[:2] for one in notes(tmp_path)] == [("error", "missing-shard")]


@pytest.mark.parametrize("number", [3, 5])
@pytest.mark.parametrize("index", [SAFE, BIN, OF_DIFFUSERS[0]])
def test_a_shard_that_a_complete_index_does_not_list(
    tmp_path: Path, index: str, number: int
) -> None:
    write(tmp_path / index, values(3))
    first = shards_of(tmp_path, index)[0]
    shard = first.with_name(first.name.replace("00001-of-00002", "00003-of-00003"))
    write(shard, values(number, "b.weight"))
    loaders = ["load_checkpoint_in_model", library_of(index)]
    for loader in loaders:
        pytest.importorskip({"load_checkpoint_in_model": "accelerate"}.get(loader, loader))
        assert REAL[loader](tmp_path) == 3
    (tmp_path / "config.json").unlink()
    ((severity, code, sentence),) = notes(tmp_path)
    is_rival = number == 5 and index != BIN
    assert (severity, code) == ("warning" if is_rival else "note", "stale-shard")
    assert check(tmp_path).status == is_rival
    if is_rival:
        assert "with different values for 1 tensor of" in sentence
        assert "HuggingFaceStorageReader" in sentence
    else:
        expected = f"loaders that follow the index use {index}, which does not list it"
        assert sentence == f"{shard.name} is left over from another save: {expected}"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_shards_that_no_index_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import checkpoint

    new, old = values(3), values(5)
    write(tmp_path / SAFE, new)
    first, second = shards_of(tmp_path, SAFE)
    write(tmp_path / "old.safetensors", old)
    stale = tmp_path / "model-00001-of-00001.safetensors"
    (tmp_path / "old.safetensors").rename(stale)
    reader = checkpoint.HuggingFaceStorageReader(str(tmp_path))
    taken = {}
    for is_last in (False, True):
        rest = [str(first), str(second)]
        files = [*rest, str(stale)] if is_last else [str(stale), *rest]
        monkeypatch.setattr(reader.fs, "ls", lambda path, files=files: files)
        state = {key: torch.zeros_like(value) for key, value in new.items()}
        checkpoint.load(state, storage_reader=reader, no_dist=True)
        taken[is_last] = all(
            torch.equal(state[key], value) for key, value in (old if is_last else new).items()
        )
    assert taken == {False: True, True: True}
    ((severity, code, _),) = notes(tmp_path)
    assert (severity, code) == ("warning", "stale-shard")


def test_a_set_of_many_shards_is_one_finding(tmp_path: Path) -> None:
    keys = [f"h.{number}.weight" for number in range(9)]
    write(tmp_path / "model.safetensors", values(3, *keys))
    write(tmp_path / BIN, values(5, *keys))
    shards = shards_of(tmp_path, BIN)
    for gone in (tmp_path / BIN, *shards[:3]):
        gone.unlink()
    ((severity, code, sentence),) = notes(tmp_path)
    assert (severity, code) == ("warning", "stale-shard")
    assert sentence == (
        f"{shards[3].name} and 5 more shards belong to an incomplete save: other shards and their "
        "index are missing; loaders use model.safetensors"
    )
    # The advised repair was refused: "no finding says that its model is also stored".
    assert repair(tmp_path, policy=Policy(families=frozenset({"model.safetensors"}))).status == 0
    assert notes(tmp_path) == []


# Converted shards without an index, next to the index of the files from which they were converted.


def test_an_index_is_written_next_to_one_whose_shards_are_gone(tmp_path: Path) -> None:
    write(tmp_path / SAFE, values(3))
    write(tmp_path / BIN, values(3))
    (tmp_path / SAFE).unlink()
    for shard in shards_of(tmp_path, BIN):
        shard.unlink()
    assert ("error", "missing-shard") in [one[:2] for one in notes(tmp_path)]
    with pytest.raises(OSError, match="pytorch_model-00001"):
        REAL["load_checkpoint_in_model"](tmp_path)
    assert repair(tmp_path).status == 0
    sentence = only_note(tmp_path, of="index-mismatch")
    assert sentence.startswith(f"{BIN} is left over from another save: ")
    assert REAL["transformers"](tmp_path) == 3


# Shards under names for which no loader looks.


@pytest.mark.parametrize("number", [3, 5])
@pytest.mark.parametrize("index", [SAFE, BIN])
def test_a_copy_of_a_shard_next_to_its_model_is_not_a_lack(
    tmp_path: Path, index: str, number: int
) -> None:
    write(tmp_path / index, values(3))
    shard = shards_of(tmp_path, index)[1]
    copy = shard.with_name(f"Copy of {shard.name}")
    write(copy, values(number, "b.weight"))
    for loader in ("load_checkpoint_in_model", "transformers"):
        assert REAL[loader](tmp_path) == 3
    (tmp_path / "config.json").unlink()
    ((severity, code, _),) = notes(tmp_path)
    assert (severity, code) == (
        "warning" if number == 5 and index == SAFE else "note",
        "stale-shard",
    )
    # Of keys that the model lacks, nothing shows that it is a copy.
    write(copy, values(3, "c.weight"))
    assert [one[:2] for one in notes(tmp_path)] == [("error", "missing-shard")]
    # Without the model it is all that is left.
    for path in (tmp_path / index, *shards_of(tmp_path, index)):
        path.unlink()
    assert [one[:2] for one in notes(tmp_path)] == [("error", "missing-shard")]


# Files whose names end like that of an index.


def test_a_file_that_accelerate_takes_for_an_index_is_a_note(tmp_path: Path) -> None:
    write(tmp_path / SAFE, values(3))
    assert notes(tmp_path) == []
    foreign = tmp_path / "tokens.index.json"
    foreign.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ValueError, match="more than one"):
        REAL["load_checkpoint_in_model"](tmp_path)
    assert REAL["transformers"](tmp_path) == 3
    sentence = only_note(tmp_path, of="index-mismatch")
    assert sentence.startswith(
        "tokens.index.json: load_checkpoint_in_model treats every *.index.json as"
    )
    # Alone, too: the load succeeds, and leaves all weights random.
    (tmp_path / SAFE).unlink()
    assert REAL["load_checkpoint_in_model"](tmp_path) != 3
    assert ("note", "index-mismatch", sentence) in notes(tmp_path)
    assert repair(tmp_path).status == 0
    assert notes(tmp_path) == [("note", "index-mismatch", sentence)]
    foreign.unlink()
    assert REAL["load_checkpoint_in_model"](tmp_path) == 3


def test_such_a_file_next_to_one_file_of_weights_has_no_note(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", values(3))
    (tmp_path / "tokens.index.json").write_text("{}")
    assert REAL["load_checkpoint_in_model"](tmp_path) == 3
    assert notes(tmp_path) == []


def cuts(library: Library, path: Path, *sizes: int) -> list[Path]:
    """Save models with other weights, each in more shards than the last one."""
    folders = [path.with_name(f"{path.name}-{size}") for size in sizes]
    for number, (folder, size) in enumerate(zip(folders, sizes, strict=True)):
        torch.manual_seed(number)
        library.model = library.new()
        library.model.save_pretrained(folder, max_shard_size=size)
    return folders


@pytest.mark.parametrize("kind", [Transformers, Diffusers])
def test_an_index_of_another_save_over_a_complete_set_is_rebuilt_on_request(
    tmp_path: Path, kind: type[Library]
) -> None:
    """Its shards were missed, to be copied again, and salvage found nothing. The index may be the
    newer one, whose shards were lost.
    """
    library = kind()
    first, path = cuts(library, tmp_path / "model", 2500, 700)
    (index,) = path.glob("*.index.json")
    shutil.copy(first / index.name, index)
    before = index.read_bytes()
    (finding,) = check(path).all_findings
    assert (finding.code, finding.severity.value) == ("index-mismatch", "error")
    assert str(finding).startswith(f"{index.name} belongs to another save: it lists ")
    assert f"{len([*path.glob('*-of-*')])} intact shards hold all of its" in str(finding)
    salvaged = tmp_path / "salvaged"
    assert not salvage(path, salvaged).lost
    assert repair(path).steps == ()
    assert finding.option == "--allow index-mismatch"
    allowed = Policy(allow=frozenset({"index-mismatch"}))
    # Of the salvaged folder nothing but the shards is left, and the index is missing.
    for folder, policy in ((path, allowed), (salvaged, Policy())):
        assert repair(folder, policy=policy).status == 0
        assert notes(folder) == []
        assert is_equal(library.model, type(library.model).from_pretrained(folder))
    undo(path)
    assert index.read_bytes() == before


@pytest.mark.parametrize(
    "doubt", ["size", "key", "two sets", "download", "a shard", "a listed one"]
)
def test_an_index_that_may_be_right_is_not_rebuilt(tmp_path: Path, doubt: str) -> None:
    library = Transformers()
    first, second, path = cuts(library, tmp_path / "model", 2500, 1500, 700)
    (index,) = path.glob("*.index.json")
    document = json.loads((first / index.name).read_text())
    listed = sorted({*document["weight_map"].values()})
    shards = sorted(path.glob("*-of-*"))
    if doubt == "size":
        document["metadata"]["total_size"] //= 2
    elif doubt == "key":
        document["weight_map"]["model.layers.9.mlp.up_proj.weight"] = listed[0]
    elif doubt == "two sets":
        for shard in second.glob("*-of-*"):
            shutil.copy(shard, path)
    elif doubt == "download":
        (path / f"{listed[0]}.incomplete").write_bytes(b"cut")
    elif doubt == "a shard":
        shards[1].unlink()
    else:
        shutil.copy(first / listed[0], path)
    index.write_text(json.dumps(document))
    finding = next(one for one in check(path).all_findings if one.code == "missing-shard")
    assert repair(path).steps == ()
    is_named = doubt not in ("key", "a shard")
    assert (f"{shards[0].name} to {shards[-1].name}" in str(finding)) is is_named
    if not is_named:
        assert "copy the shard again" in finding.advice
        return
    assert f"move {index.name} and the shards of all other saves out" in finding.advice
    for path_of_another in {*path.iterdir()} - {*shards, path / "config.json"}:
        path_of_another.unlink()
    assert repair(path, policy=Policy(allow=frozenset({"index-mismatch"}))).status == 0
    assert is_equal(library.model, type(library.model).from_pretrained(path))


@pytest.mark.parametrize("kept", ["model.safetensors", "model.safetensors.index.json"])
def test_what_three_saves_left_is_two_warnings_and_one_choice(tmp_path: Path, kept: str) -> None:
    """Each of nine shards was a warning, and the choice of the file left the others without an
    index: a new finding, so nothing was changed.
    """
    library = Transformers()
    folders = cuts(library, tmp_path / "model", 700, 1500, 2500, 99999)
    folder = folders[1]
    for each in (folders[0], folders[2]):
        for shard in each.glob("*-of-*"):
            shutil.copy(shard, folder)
    shutil.copy(folders[3] / "model.safetensors", folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    shards, family = check(folder).all_findings
    assert (shards.code, family.code) == ("stale-shard", "stale-family")
    assert str(shards).startswith(
        "model-00001-of-00002.safetensors and 7 more shards are left over"
    )
    assert shards.advice.endswith("ckptfix repair DIR --keep model.safetensors.index.json")
    assert repair(folder, policy=Policy(families=frozenset({kept}))).status == 0
    assert notes(folder) == []
    save = folders[3 if kept == "model.safetensors" else 1]
    loaded = type(library.model).from_pretrained(folder)
    shutil.rmtree(tmp_path / "expected", ignore_errors=True)
    expected = shutil.copytree(
        save, tmp_path / "expected", ignore=shutil.ignore_patterns(".ckptfix", "*-of-00006*")
    )
    assert is_equal(loaded, type(library.model).from_pretrained(expected))
    undo(folder)
    assert {path: path.read_bytes() for path in before} == before


def test_left_over_shards_alone_are_set_aside(tmp_path: Path) -> None:
    library = Transformers()
    old, folder = cuts(library, tmp_path / "model", 700, 2500)
    for shard in old.glob("*-of-*"):
        shutil.copy(shard, folder)
    (finding,) = check(folder).all_findings
    assert finding.severity.value == "warning"
    policy = Policy(families=frozenset({"model.safetensors.index.json"}))
    assert repair(folder, policy=policy).status == 0
    assert notes(folder) == []
    assert is_equal(library.model, type(library.model).from_pretrained(folder))
