"""Names that a library looks for: adapters, variants, shards and the Trainer's states keep them in
every folder.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.conversion.migrate import migrate
from ckptfix.conversion.salvage import salvage
from ckptfix.diagnosis.check import check
from ckptfix.errors import UsageError
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.verification.diff import diff
from ckptfix.verification.seal import seal
from ckptfix.verification.verify import verify
from tests.conversion.making import names_below
from tests.repairs.builders import TRAINER_RANDOM_STATES

WEIGHTS = {"layer.weight": torch.arange(12.0).reshape(3, 4), "layer.bias": torch.ones(3)}
STATES = (
    "rng_state.pth",
    "rng_state_0.pth",
    "optimizer.pt",
    "scheduler.pt",
    "training_args.bin",
    "scaler.pt",
)


def write(path: Path) -> None:
    if path.name.endswith(".safetensors"):
        save_file(WEIGHTS, path, metadata={"format": "pt"})
    else:
        torch.save(WEIGHTS, path)


def write_shards(folder: Path, first: str, second: str, index: str) -> None:
    for name, fqn in ((first, "layer.weight"), (second, "layer.bias")):
        if name.endswith(".safetensors"):
            save_file({fqn: WEIGHTS[fqn]}, folder / name, metadata={"format": "pt"})
        else:
            torch.save({fqn: WEIGHTS[fqn]}, folder / name)
    document = {"metadata": {}, "weight_map": {"layer.weight": first, "layer.bias": second}}
    (folder / index).write_text(json.dumps(document))


@pytest.fixture(params=["save_state", "Trainer", "weights"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder that is known for one of a library's by the states in it."""
    path = tmp_path / "src"
    path.mkdir()
    if request.param == "save_state":
        torch.save({"step": 1}, path / "random_states_0.pkl")
        torch.save({"state": {}, "param_groups": []}, path / "optimizer.bin")
    elif request.param == "Trainer":
        write_trainer_states(path)
    return path


def write_trainer_states(path: Path) -> None:
    """Write what the Trainer keeps beside a model: the states of generators hold tensors and
    objects of numpy.
    """
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    for name in ("rng_state.pth", "rng_state_0.pth"):
        torch.save(states, path / name)
    moments = {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(3)}}
    torch.save({"state": moments, "param_groups": [{"params": [0]}]}, path / "optimizer.pt")
    torch.save({"last_epoch": 1, "base_lrs": torch.ones(2)}, path / "scheduler.pt")
    scaler = torch.amp.GradScaler("cpu").state_dict() | {"scale": torch.tensor(1.0)}
    torch.save(scaler, path / "scaler.pt")
    torch.save({"output_dir": "x", "noise": torch.ones(2)}, path / "training_args.bin")
    (path / "trainer_state.json").write_text('{"global_step": 2}')


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adapter_model.safetensors", "adapter_model.bin"),
        ("adapter_model.bin", "adapter_model.safetensors"),
        ("pytorch_lora_weights.safetensors", "pytorch_lora_weights.bin"),
        ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"),
        ("diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.fp16.bin"),
        ("diffusion_pytorch_model.ema.bin", "diffusion_pytorch_model.ema.safetensors"),
        ("model.fp16.safetensors", "pytorch_model.fp16.bin"),
        ("pytorch_model.fp16.bin", "model.fp16.safetensors"),
        ("model.safetensors", "pytorch_model.bin"),
        ("student.pt", "student.safetensors"),
        ("epoch3.pth.tar", "epoch3.safetensors"),
        ("epoch3.th", "epoch3.safetensors"),
    ],
)
def test_weights_keep_the_name_that_their_library_looks_for(
    folder: Path, tmp_path: Path, name: str, expected: str
) -> None:
    write(folder / name)
    others = {path.name for path in folder.iterdir()} - {name}
    new = tmp_path / "new"
    migrate(folder, new, to="bin" if expected.endswith(".bin") else "safetensors")
    assert names_below(new) == {expected, *others}
    report = diff(folder, new)
    assert report.status == 0
    assert not [words for words in report.not_compared if "positions of models" in words]
    if name.endswith((".safetensors", ".bin")):
        migrate(new, tmp_path / "back", to="safetensors" if expected.endswith(".bin") else "bin")
        assert names_below(tmp_path / "back") == {name, *others}


@pytest.mark.parametrize("to", ["safetensors", "bin"])
@pytest.mark.parametrize(
    ("first", "second", "index", "stem"),
    [
        (
            "model.fp16-00001-of-00002.safetensors",
            "model.fp16-00002-of-00002.safetensors",
            "model.safetensors.index.fp16.json",
            {"safetensors": "model.fp16", "bin": "pytorch_model.fp16"},
        ),
        (
            "diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
            "diffusion_pytorch_model.fp16-00002-of-00002.safetensors",
            "diffusion_pytorch_model.safetensors.index.fp16.json",
            {"safetensors": "diffusion_pytorch_model.fp16", "bin": "diffusion_pytorch_model.fp16"},
        ),
        (
            "diffusion_pytorch_model-00001-of-00002.fp16.safetensors",
            "diffusion_pytorch_model-00002-of-00002.fp16.safetensors",
            "diffusion_pytorch_model.safetensors.fp16.index.json",
            {"safetensors": "diffusion_pytorch_model.fp16", "bin": "diffusion_pytorch_model.fp16"},
        ),
        (
            "diffusion_pytorch_model-00001-of-00002.bin",
            "diffusion_pytorch_model-00002-of-00002.bin",
            "diffusion_pytorch_model.bin.index.json",
            {"safetensors": "diffusion_pytorch_model", "bin": "diffusion_pytorch_model"},
        ),
    ],
)
def test_shards_of_a_variant_stay_shards_of_that_variant(
    folder: Path,
    tmp_path: Path,
    to: str,
    first: str,
    second: str,
    index: str,
    stem: dict[str, str],
) -> None:
    write_shards(folder, first, second, index)
    # The Trainer looks for no variant, and for no name of diffusers.
    lost = ["incomplete-checkpoint"] if (folder / "trainer_state.json").exists() else []
    codes = [finding.code for finding in check(folder).findings if finding.code != "trainer-pickle"]
    assert codes == lost
    others = {path.name for path in folder.iterdir()} - {first, second, index}
    new = tmp_path / "new"
    migrate(folder, new, to=to, max_shard_size=48)
    base, _, variant = stem[to].partition(".")
    suffix = {"safetensors": ".safetensors", "bin": ".bin"}[to]
    new_index = f"{base}{suffix}.index.{variant}.json" if variant else f"{base}{suffix}.index.json"
    shards = {f"{stem[to]}-0000{number}-of-00002{suffix}" for number in (1, 2)}
    assert names_below(new) == {*shards, new_index, *others}
    assert set(json.loads((new / new_index).read_text())["weight_map"].values()) == shards
    assert diff(folder, new).status == 0


@pytest.mark.parametrize("missing", ["first", "second"])
def test_a_shard_of_a_variant_that_is_gone_is_named(tmp_path: Path, missing: str) -> None:
    first, second = (
        f"diffusion_pytorch_model-0000{number}-of-00002.fp16.safetensors" for number in (1, 2)
    )
    write_shards(tmp_path, first, second, "diffusion_pytorch_model.safetensors.fp16.index.json")
    gone = first if missing == "first" else second
    (tmp_path / gone).unlink()
    (finding,) = check(tmp_path).findings
    assert (finding.code, str(finding.path)) == ("missing-shard", gone)


def test_an_adapter_stays_one_file(folder: Path, tmp_path: Path) -> None:
    write(folder / "adapter_model.safetensors")
    with pytest.raises(UsageError, match="PEFT reads one file"):
        migrate(folder, tmp_path / "new", to="bin", max_shard_size=16)


def test_a_lone_adapter_keeps_its_name_in_a_new_folder(tmp_path: Path) -> None:
    write(tmp_path / "adapter_model.safetensors")
    migrate(tmp_path / "adapter_model.safetensors", tmp_path / "new", to="bin")
    assert names_below(tmp_path / "new") == {"adapter_model.bin"}


def test_of_one_adapter_in_two_formats_the_one_is_read_that_is_loaded(
    folder: Path, tmp_path: Path
) -> None:
    write(folder / "adapter_model.safetensors")
    torch.save({"layer.weight": torch.zeros(3, 4)}, folder / "adapter_model.bin")
    migrate(folder, tmp_path / "new", to="bin")
    assert diff(folder, tmp_path / "new").status == 0
    left = migrate(folder, tmp_path / "other", to="safetensors").left_out
    assert [one.what for one in left] == ["adapter_model.bin"]


def test_weights_of_another_model_beside_are_carried(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    write(source / "model.safetensors")
    write(source / "adapter_model.safetensors")
    write_shards(
        source,
        "model.fp16-00001-of-00002.safetensors",
        "model.fp16-00002-of-00002.safetensors",
        "model.safetensors.index.fp16.json",
    )
    migrate(source, tmp_path / "new", to="bin")
    names = {path.name for path in source.iterdir()} - {"model.safetensors"}
    assert names_below(tmp_path / "new") == {"pytorch_model.bin", *names}


def test_an_adapter_gets_its_name_back_from_a_dcp_folder(folder: Path, tmp_path: Path) -> None:
    write(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "POLY"}')
    migrate(folder, tmp_path / "dcp", to="dcp")
    migrate(tmp_path / "dcp", tmp_path / "back", to="safetensors")
    back = names_below(tmp_path / "back")
    assert back == {path.name for path in folder.iterdir()}


class TestStatesOfTheTrainer:
    """They are never a model, for no command."""

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        path = tmp_path / "checkpoint-2"
        path.mkdir()
        write_trainer_states(path)
        write(path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text('{"peft_type": "POLY"}')
        return path

    def test_they_are_no_weights(self, checkpoint: Path) -> None:
        assert [one.label for one in open_checkpoint(checkpoint).weights] == [
            "adapter_model.safetensors"
        ]

    def test_identical_folders_are_equal(self, checkpoint: Path) -> None:
        report = diff(checkpoint, checkpoint)
        assert (report.verdict, report.status) == ("equal in what was compared", 0)

    @pytest.mark.parametrize("to", ["safetensors", "bin", "dcp"])
    def test_migrate_copies_them(self, checkpoint: Path, tmp_path: Path, to: str) -> None:
        receipt = migrate(checkpoint, tmp_path / "new", to=to)
        assert receipt.left_out == ()
        for name in STATES:
            assert (tmp_path / "new" / name).read_bytes() == (checkpoint / name).read_bytes()

    def test_seal_and_verify_take_digests_of_their_files(self, checkpoint: Path) -> None:
        assert seal(checkpoint).tensors == 2
        assert verify(checkpoint, data=True).status == 0
        manifest = read_manifest(checkpoint)
        assert manifest is not None
        assert [entry.file for entry in manifest.models] == ["adapter_model.safetensors"]
        data = bytearray((checkpoint / "rng_state.pth").read_bytes())
        data[len(data) // 2] ^= 1
        (checkpoint / "rng_state.pth").write_bytes(data)
        assert verify(checkpoint).status == 1

    def test_salvage_copies_them(self, checkpoint: Path, tmp_path: Path) -> None:
        path = checkpoint / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-4])
        salvage(checkpoint, tmp_path / "new")
        for name in STATES:
            assert (tmp_path / "new" / name).read_bytes() == (checkpoint / name).read_bytes()

    def test_alone_they_are_nothing_to_migrate(self, checkpoint: Path, tmp_path: Path) -> None:
        (checkpoint / "adapter_model.safetensors").unlink()
        with pytest.raises(UsageError, match="has no model weights"):
            migrate(checkpoint, tmp_path / "new", to="bin")
        with pytest.raises(UsageError, match="has no model weights"):
            migrate(checkpoint / "rng_state.pth", tmp_path / "new", to="bin")


def test_a_seal_that_had_states_as_a_model_still_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ckptfix 0.4.0 sealed the folder of a Trainer."""
    write(tmp_path / "adapter_model.safetensors")
    (tmp_path / "rng_state.pth").write_bytes(TRAINER_RANDOM_STATES)
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 1, "_last_lr": [0.1]}, tmp_path / "scheduler.pt")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 2}')
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "POLY"}')
    seal(tmp_path)
    path = tmp_path / ".ckptfix" / "manifest.json"
    document = json.loads(path.read_text())
    entry = dict(document["models"][0])
    entry |= {"index": 1, "file": "rng_state.pth", "digests": {"cpu": "0" * 64}}
    document["models"].append(entry)
    path.write_text(json.dumps(document))
    assert verify(tmp_path).status == 0


def test_diff_names_the_command_for_an_adapter_next_to_the_model(tmp_path: Path) -> None:
    """The adapters of two saves differ, and "equal" was said with their name behind "and 2
    more".
    """
    for side, factor in (("a", 1.0), ("b", 2.0)):
        (tmp_path / side).mkdir()
        write(tmp_path / side / "model.safetensors")
        adapter = tmp_path / side / "adapter_model.safetensors"
        save_file({name: factor * value for name, value in WEIGHTS.items()}, adapter)
    a, b = tmp_path / "a", tmp_path / "b"
    report = diff(a, b)
    command = f"ckptfix diff {a / 'adapter_model.safetensors'} {b / 'adapter_model.safetensors'}"
    assert any(f"to compare them: {command}" in words for words in report.not_compared)
    assert diff(a / "adapter_model.safetensors", b / "adapter_model.safetensors").status == 1


def test_saves_of_one_model_are_no_two_models_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("epoch=3.ckpt", "last.ckpt"):
        weights = torch.nn.Linear(2, 2).state_dict()
        torch.save({"state_dict": weights, "epoch": 3}, tmp_path / "a" / name)
    with pytest.raises(UsageError, match=r"epoch=3\.ckpt.* and last\.ckpt.* have the same keys"):
        migrate(tmp_path / "a", tmp_path / "b", to="dcp")
    migrate(tmp_path / "a" / "last.ckpt", tmp_path / "b", to="dcp")
    migrate(tmp_path / "a", tmp_path / "c", to="safetensors")
    assert {"epoch=3.safetensors", "last.safetensors"} <= names_below(tmp_path / "c")
