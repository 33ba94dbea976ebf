"""Weights in sub-folders, as hooks of save_state and pipelines of diffusers have them: opened,
compared, migrated.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.conversion.migrate import migrate
from ckptfix.diagnosis.check import check
from ckptfix.diagnosis.policy import Keys, Policy
from ckptfix.errors import OperationError, UsageError
from ckptfix.repairs.repair import repair
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.verification.diff import diff
from ckptfix.verification.seal import seal
from ckptfix.verification.verify import verify
from tests.conversion.making import names_below

WEIGHTS = {"layer.weight": torch.arange(12.0).reshape(3, 4), "layer.bias": torch.ones(3)}
UNET = "unet/diffusion_pytorch_model.safetensors"


def save(path: Path, factor: float = 1.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: tensor * factor for name, tensor in WEIGHTS.items()}
    if path.suffix == ".safetensors":
        save_file(state, path, metadata={"format": "pt"})
    else:
        torch.save(state, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What ``save_state`` leaves when a hook saved two models by themselves, of equal names and
    shapes.
    """
    path = tmp_path / "src"
    path.mkdir()
    torch.save({"step": 1}, path / "random_states_0.pkl")
    torch.save({"state": {}, "param_groups": []}, path / "optimizer.bin")
    save(path / UNET)
    save(path / "unet_ema" / "diffusion_pytorch_model.safetensors", 0.5)
    for name in ("unet", "unet_ema"):
        (path / name / "config.json").write_text(
            json.dumps({"_diffusers_version": "0.42.1", "torch_dtype": "float32"})
        )
    return path


def labels(path: Path) -> list[str]:
    return [one.label for one in open_checkpoint(path).weights]


def test_models_below_are_those_of_the_checkpoint(folder: Path) -> None:
    assert labels(folder) == [UNET, "unet_ema/diffusion_pytorch_model.safetensors"]
    assert diff(folder, folder).status == 0
    assert "missing-model" not in [finding.code for finding in check(folder).findings]


@pytest.mark.parametrize("to", ["safetensors", "bin", "dcp"])
def test_they_are_migrated_where_they_are(folder: Path, tmp_path: Path, to: str) -> None:
    new = tmp_path / "new"
    receipt = migrate(folder, new, to=to)
    assert (receipt.left_out, receipt.verified) == ((), True)
    carried = {"random_states_0.pkl", "optimizer.bin", "unet/config.json", "unet_ema/config.json"}
    files = {
        "safetensors": {"diffusion_pytorch_model.safetensors"},
        "bin": {"diffusion_pytorch_model.bin"},
        "dcp": {"pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata"},
    }[to]
    assert names_below(new) == {
        *carried,
        *(f"{home}/{name}" for home in ("unet", "unet_ema") for name in files),
    }
    assert diff(folder, new).status == 0
    migrate(new, tmp_path / "back", to="safetensors")
    assert names_below(tmp_path / "back") == names_below(folder)
    assert diff(folder, tmp_path / "back").status == 0


def test_each_is_compared_with_that_of_its_own_folder(folder: Path, tmp_path: Path) -> None:
    migrate(folder, tmp_path / "new", to="bin")
    (tmp_path / "new" / "unet").rename(tmp_path / "new" / "kept")
    (tmp_path / "new" / "unet_ema").rename(tmp_path / "new" / "unet")
    (tmp_path / "new" / "kept").rename(tmp_path / "new" / "unet_ema")
    report = diff(folder, tmp_path / "new")
    assert report.status == 1
    pairs = [(model.a, model.b) for model in report.models]
    assert pairs[0] == (UNET, "unet/diffusion_pytorch_model.bin")


def test_shards_and_their_index_stay_together(folder: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    migrate(folder, new, to="safetensors", max_shard_size=48)
    index = json.loads((new / "unet/diffusion_pytorch_model.safetensors.index.json").read_text())
    shards = {f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert set(index["weight_map"].values()) == shards
    assert shards <= {path.name for path in (new / "unet").iterdir()}
    assert diff(folder, new).status == 0


def test_a_new_dtype_is_written_into_the_config_of_each(folder: Path, tmp_path: Path) -> None:
    migrate(folder, tmp_path / "new", to="bin", dtype="bf16")
    for name in ("unet", "unet_ema"):
        config = json.loads((tmp_path / "new" / name / "config.json").read_text())
        assert config["torch_dtype"] == "bfloat16"


def test_models_of_the_same_class_beside_weights_of_the_folder(
    folder: Path, tmp_path: Path
) -> None:
    save(folder / "model.safetensors", 3.0)
    save(folder / "best" / "notes.pt", 2.0)  # no library finds this: not a model of the checkpoint
    assert labels(folder) == [
        "model.safetensors",
        UNET,
        "unet_ema/diffusion_pytorch_model.safetensors",
    ]
    migrate(folder, tmp_path / "new", to="bin")
    assert {
        "pytorch_model.bin",
        "unet/diffusion_pytorch_model.bin",
        "best/notes.pt",
    } <= names_below(tmp_path / "new")
    other = tmp_path / "other"
    migrate(tmp_path / "new", other, to="safetensors")
    save(other / UNET, 7.0)
    assert diff(folder, other).status == 1


@pytest.mark.parametrize("config", ["adapter_config.json", "config.json"])
def test_a_model_beside_weights_is_found_again_after_dcp(tmp_path: Path, config: str) -> None:
    """As PEFT has a second adapter in the folder of the first, and sentence-transformers a layer
    behind a model.
    """
    source, new = tmp_path / "src", tmp_path / "new"
    stem = "adapter_model" if config.startswith("adapter") else "model"
    for home, factor in ((source, 1.0), (source / "second", 2.0)):
        save(home / f"{stem}.safetensors", factor)
        (home / config).write_text("{}")
    migrate(source, new, to="dcp")
    assert labels(new) == ["pytorch_model_fsdp_0", "second/pytorch_model_fsdp_0"]
    assert diff(source, new).status == 0
    migrate(new, tmp_path / "back", to="safetensors")
    assert names_below(tmp_path / "back") == names_below(source)


def test_the_verdict_is_said_once(folder: Path) -> None:
    """A model below with a note had a verdict of its own, and the checkpoint the same again."""
    save_file(WEIGHTS, folder / UNET)  # without "format"
    assert str(check(folder)).count("no error found") == 1


def test_a_pipeline_of_diffusers(tmp_path: Path) -> None:
    source = tmp_path / "src"
    save(source / UNET)
    save(source / "text_encoder" / "model.safetensors", 2.0)
    for name in ("unet", "text_encoder"):
        (source / name / "config.json").write_text("{}")
    (source / "model_index.json").write_text("{}")
    (source / "scheduler").mkdir()
    (source / "scheduler" / "scheduler_config.json").write_text("{}")
    migrate(source, tmp_path / "new", to="bin")
    assert names_below(tmp_path / "new") == {
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/pytorch_model.bin",
        "unet/config.json",
        "unet/diffusion_pytorch_model.bin",
    }


@pytest.mark.parametrize("name", ["checkpoint-500", "checkpoint_0", "step_10", "epoch_2"])
def test_a_folder_of_checkpoints_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    source = tmp_path / "src"
    save(source / name / "model.safetensors")
    with pytest.raises(UsageError, match="--recursive"):
        migrate(source, tmp_path / "new", to="bin")
    save(source / "model.safetensors")
    (source / name / "config.json").write_text("{}")
    assert labels(source) == ["model.safetensors"]


@pytest.mark.parametrize("state", ["random_states_0.pkl", "optimizer.pt", "trainer_state.json"])
def test_a_checkpoint_inside_of_another_is_its_own(folder: Path, state: str) -> None:
    inner = folder / "last"
    save(inner / "model.safetensors")
    (inner / "config.json").write_text("{}")
    (inner / state).write_text("{}")
    assert "last/model.safetensors" not in labels(folder)


def test_a_link_to_a_folder_is_not_followed(folder: Path) -> None:
    (folder / "again").symlink_to("unet")
    (folder / "round").symlink_to(".")
    assert len(labels(folder)) == 2


def test_damage_below_is_damage(folder: Path, tmp_path: Path) -> None:
    path = folder / UNET
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    for act in (lambda: diff(folder, folder), lambda: migrate(folder, tmp_path / "new", to="bin")):
        with pytest.raises(
            OperationError, match=r"unet/diffusion_pytorch_model\.safetensors: truncated"
        ):
            act()
    (folder / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps(
            {"metadata": {}, "weight_map": dict.fromkeys([*WEIGHTS, "lost.weight"], path.name)}
        )
    )
    path.write_bytes(whole)
    with pytest.raises(OperationError, match="unet"):
        migrate(folder, tmp_path / "new", to="bin")
    assert not (tmp_path / "new").exists()


class TestCheck:
    """Looks into the models below, and gives the commands that mend them."""

    def test_sound_models_are_counted(self, folder: Path) -> None:
        report = check(folder)
        assert (report.status, report.all_findings) == (0, ())
        assert [one.path for one in report.below] == [folder / "unet", folder / "unet_ema"]
        (words,) = (words for words in report.not_checked if "unet" in words)
        assert words.startswith("unet/, unet_ema/ against the load hooks of the script")
        assert str(report).count("values of tensors") == 1
        assert f"  model      {UNET}: 2 tensors, F32, " in str(report)
        assert report.counts["files"] == 2 + len(report.folder.components), (
            "the models below are among the numbers"
        )

    def test_damage_is_found_from_above(self, folder: Path) -> None:
        path = folder / UNET
        path.write_bytes(path.read_bytes()[:-8])
        report = check(folder)
        assert report.status == 1
        assert [(one.code, str(one.path)) for one in report.all_findings] == [
            ("truncated-file", UNET)
        ]
        assert f"ckptfix salvage {folder / 'unet'} NEW_FOLDER" in str(report)
        assert "no error found" not in str(report)
        assert [one["path"] for one in report.as_json()["below"]] == [
            str(folder / "unet"),
            str(folder / "unet_ema"),
        ]
        assert not seal(folder).written
        assert verify(folder).status == 1

    def test_nested_names_are_repaired_where_they_are(self, folder: Path) -> None:
        nested = {f"module.module.{name}": tensor for name, tensor in WEIGHTS.items()}
        save_file(nested, folder / UNET, metadata={"format": "pt"})
        report = check(folder)
        assert report.status == 1
        assert f"next: ckptfix repair {folder / 'unet'}\n" in str(report)
        repair(folder / "unet")
        # One module. stays, and from_pretrained of the load hook does not find such keys.
        (note,) = check(folder / "unet").findings
        assert note.code == "wrapper-prefix"
        assert "from_pretrained does not find these keys" in note.advice
        repair(folder / "unet", policy=Policy(keys=Keys.BARE))
        assert check(folder).status == 0

    def test_other_folders_are_still_named(self, folder: Path) -> None:
        (folder / "logs").mkdir()
        (folder / "logs" / "run.txt").write_text("x")
        (said,) = [words for words in check(folder).not_checked if "logs" in words]
        assert said.startswith("logs/ (a folder): not looked into")


class TestSeal:
    """The tensors below have digests of their own."""

    def test_a_flipped_value_below_is_named(self, folder: Path) -> None:
        seal(folder)
        manifest = read_manifest(folder)
        assert manifest is not None
        assert UNET in [entry.file for entry in manifest.models]
        assert verify(folder, data=True).status == 0
        data = bytearray((folder / UNET).read_bytes())
        data[-1] ^= 1
        (folder / UNET).write_bytes(data)
        report = verify(folder)
        assert report.status == 1
        assert any(item.where == UNET and item.text for item in report.items)

    def test_values_below_are_looked_at(self, folder: Path) -> None:
        save(folder / UNET, float("nan"))
        assert "nonfinite" in [value.code for value in verify(folder, data=True).values]

    def test_a_model_below_does_not_take_the_place_of_the_first(self, folder: Path) -> None:
        save(folder / "model.safetensors", 3.0)
        seal(folder)
        assert verify(folder).status == 0
        manifest = read_manifest(folder)
        assert manifest is not None
        assert (
            next(entry.file for entry in manifest.models if entry.index == 0) == "model.safetensors"
        )

    def test_a_seal_from_before_they_were_looked_into_still_fits(self, folder: Path) -> None:
        """As ckptfix 0.4.0 sealed such a folder: the file has its digest, the tensors have none."""
        save(folder / "model.safetensors", 3.0)
        seal(folder)
        path = folder / ".ckptfix" / "manifest.json"
        document = json.loads(path.read_text())
        document["models"] = [entry for entry in document["models"] if "/" not in entry["file"]]
        path.write_text(json.dumps(document))
        assert verify(folder, data=True).status == 0
        data = bytearray((folder / UNET).read_bytes())
        data[-1] ^= 1
        (folder / UNET).write_bytes(data)
        assert verify(folder).status == 1

    def test_damage_below_leaves_the_others_to_compare(self, folder: Path) -> None:
        seal(folder)
        path = folder / UNET
        path.write_bytes(path.read_bytes()[:-8])
        report = verify(folder)
        assert report.status == 1
        assert any(
            item.where.startswith("unet_ema") and item.outcome.value == "match"
            for item in report.items
        )
