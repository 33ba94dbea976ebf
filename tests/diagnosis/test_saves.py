"""A checkpoint as a whole: what the save wrote and is gone, what a cut copy leaves, and what
salvage could not save.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptfix import OperationError, check, repair, salvage, seal, verify
from ckptfix.checkpoint.latest import incomplete
from ckptfix.checkpoint.manifest import Manifest, read_losses
from ckptfix.diagnosis.findings.base import Finding, Severity
from ckptfix.diagnosis.findings.config_faults import MissingModel
from ckptfix.diagnosis.findings.incomplete import MissingFile
from ckptfix.diagnosis.findings.interrupted import InterruptedSave, Salvaged
from ckptfix.diagnosis.left_out import OF_ONE_SAVE
from ckptfix.diagnosis.unfinished_copies import is_unfinished
from ckptfix.storage.paths import MANIFEST
from tests.repairs.builders import write_safetensors
from tests.repairs.dcp_folders import MODEL, OPTIMIZER
from tests.repairs.dcp_folders import copy as copy_sharded

FIXTURES = Path(__file__).parents[2] / "fixtures"
CLEAN = FIXTURES / "accelerate-1.15.0" / "clean-single-process" / "checkpoint"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CLEAN, tmp_path / "c"))


def save_manifest(folder: Path, **more: object) -> Manifest:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    manifest = Manifest(versions={}, world_size=1, step=0, files=sizes, **more)  # type: ignore[arg-type]
    (folder / MANIFEST).parent.mkdir(exist_ok=True)
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return manifest


def found(folder: Path) -> list[str]:
    return [finding.code for finding in check(folder).findings]


def only(folder: Path) -> Finding:
    (finding,) = check(folder).findings
    return finding


def test_a_file_of_the_save_that_is_gone_or_of_another_size_is_an_error(folder: Path) -> None:
    save_manifest(folder)
    assert check(folder).findings == ()
    (folder / "optimizer.bin").unlink()
    finding = only(folder)
    assert isinstance(finding, MissingFile)
    assert (finding.saved, finding.have) == (5091, None)
    assert str(finding) == "optimizer.bin is missing; the save wrote 5091 bytes"
    assert repair(folder).status == check(folder).status == verify(folder).status == 1
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.bin")
    size = (folder / "optimizer.bin").stat().st_size
    assert str(only(folder)) == f"optimizer.bin has {size} bytes; the save wrote 5091 bytes"
    shutil.copyfile(CLEAN / "random_states_0.pkl", folder / "optimizer.bin")
    assert only(folder).code == "wrong-state", "it explains the other size"


def test_a_file_that_is_cut_is_said_once(folder: Path) -> None:
    save_manifest(folder)
    os.truncate(folder / "model.safetensors", 600)
    assert found(folder) == ["truncated-file"]


def test_a_lone_file_is_compared_with_the_manifest_of_its_folder(folder: Path) -> None:
    save_manifest(folder)
    (folder / "optimizer.bin").unlink()
    assert found(folder / "model.safetensors") == []
    write_safetensors(folder / "model.safetensors", {"a": b"another save"})
    assert found(folder / "model.safetensors") == ["missing-file"]


def test_the_manifest_of_a_repaired_folder_is_not_relied_on(folder: Path) -> None:
    save_manifest(folder)
    (folder / ".ckptfix" / "0001.done").mkdir()
    (folder / "optimizer.bin").unlink()
    report = check(folder)
    assert [finding.code for finding in report.findings if isinstance(finding, MissingFile)] == []
    assert any("a repair has changed some of them" in words for words in report.not_checked)


def test_a_repair_and_its_undo_lose_no_file(tmp_path: Path) -> None:
    source = FIXTURES / "accelerate-1.15.0" / "wrapper-safetensors" / "checkpoint"
    folder = Path(shutil.copytree(source, tmp_path / "c"))
    save_manifest(folder)
    assert repair(folder, output=tmp_path / "other").status == 0
    assert repair(folder).status == 0
    for repaired in (folder, tmp_path / "other"):
        assert found(repaired) == []


def is_about_digests(words: str) -> bool:
    """Return whether a sentence is about digests, other than as what would prove one save."""
    return "digests" in words and not words.startswith(OF_ONE_SAVE)


def test_digests_are_left_to_verify(folder: Path) -> None:
    assert not any(is_about_digests(words) for words in check(folder).not_checked)
    seal(folder)
    (folder / "optimizer.bin").unlink()
    report = check(folder)
    assert [finding.code for finding in report.findings] == ["incomplete-checkpoint"]
    assert f"digests in .ckptfix/manifest.json; next: ckptfix verify {folder}" in report.not_checked
    verified = verify(folder)
    assert verified.status == 1
    assert not any(is_about_digests(words) for words in verified.not_checked)


def test_a_manifest_that_says_nothing_is_named(folder: Path) -> None:
    save_manifest(folder)
    folder = folder.rename(folder.with_name("checkpoint_1"))
    (folder / MANIFEST).write_text("{")
    with pytest.raises(OperationError) as refused:
        verify(folder)
    words = str(refused.value)
    assert words.endswith(f"; to continue without it: rm {folder / MANIFEST}")
    report = check(folder, resumes=True)
    assert f"the files of the save: {words}" in report.not_checked
    assert report.not_resumable == words


def test_what_salvage_lost_is_said_until_it_is_there_again(folder: Path, tmp_path: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 5)
    assert salvage(folder, tmp_path / "new").status == 1
    finding = only(tmp_path / "new")
    assert isinstance(finding, Salvaged)
    assert (finding.tensors, finding.files, finding.damaged) == (1, 0, 0)
    assert finding.severity is Severity.WARNING
    assert "1 tensor lost" in str(finding)
    assert incomplete(tmp_path / "new") == "it was salvaged: 1 tensor lost"
    (tmp_path / "new" / "salvage.json").unlink()
    assert [str(one) for one in check(tmp_path / "new").findings] == [
        "optimizer.bin: moments of shape [3, 8], which no weights have (4 parameters in the "
        "optimizer, 3 weight tensors)"
    ]
    assert incomplete(tmp_path / "new") is None


def test_a_salvage_without_losses_is_whole(folder: Path, tmp_path: Path) -> None:
    assert salvage(folder, tmp_path / "new").status == 0
    assert check(tmp_path / "new").findings == ()
    assert incomplete(tmp_path / "new") is None


def test_a_later_save_into_a_salvaged_folder_counts(folder: Path) -> None:
    (folder / "salvage.json").write_text(
        json.dumps({"version": 1, "lost": [{"name": None}], "damaged": []})
    )
    assert found(folder) == ["salvaged"]
    save_manifest(folder)
    assert found(folder) == []
    assert incomplete(folder) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[" * 100_000,
        "[]",
        "3",
        '{"version": 2, "lost": [1], "damaged": []}',
        '{"version": 1, "lost": 7, "damaged": []}',
        '{"version": 1, "lost": [1]}',
        '{"version": 1, "lost": [], "damaged": []}',
        '{"version": ' + "9" * 5000 + "}",
        "\\ud800",
    ],
)
def test_a_report_of_somebody_else_says_nothing(folder: Path, content: str) -> None:
    (folder / "salvage.json").write_text(content)
    assert check(folder).findings == ()
    assert incomplete(folder) is None


def test_a_hostile_report_is_counted_and_no_more(tmp_path: Path) -> None:
    lost = [1, None, {"name": None}, {"name": 5}, {}]
    (tmp_path / "salvage.json").write_text(
        json.dumps({"version": 1, "lost": lost, "damaged": ["x"]})
    )
    losses = read_losses(tmp_path)
    assert losses is not None
    assert str(losses) == "3 tensors and 2 files lost, 1 damaged tensor or file kept"


def test_a_report_that_is_no_file_or_far_too_long_is_not_read(folder: Path) -> None:
    os.mkfifo(folder / "salvage.json")
    assert check(folder).findings == ()
    (folder / "salvage.json").unlink()
    (folder / "salvage.json").touch()
    os.truncate(folder / "salvage.json", 1 << 40)
    assert check(folder).findings == ()


def cut(name: str, count: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - count)


def index_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    weight_map = {"a": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (
            cut("model.safetensors", 5),
            r"model\.safetensors: the last tensor ends at byte 636, but the file has only 631 bytes",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(bytes(636)),
            r"model\.safetensors: zeros instead of a header",
        ),
        (
            lambda folder: write_safetensors(
                folder / "model.safetensors", {"a": b"1"}, tail=b"xyz"
            ),
            r"model\.safetensors: 3 bytes after its end",
        ),
        (
            index_alone,
            (
                r"model-00001-of-00002\.safetensors is missing, but"
                r" model\.safetensors\.index\.json lists it"
            ),
        ),
    ],
)
def test_a_stock_folder_with_damaged_weights_is_not_whole(
    folder: Path, damage: Callable[[Path], None], why: str
) -> None:
    assert incomplete(folder) is None
    damage(folder)
    assert why.replace("\\", "") in str(incomplete(folder))


def test_a_link_to_nothing_is_not_whole(folder: Path) -> None:
    (folder / "optimizer.bin").unlink()
    (folder / "optimizer.bin").symlink_to("gone")
    assert "optimizer.bin" in str(incomplete(folder))


def test_states_of_an_optimizer_without_a_model(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    finding = only(folder)
    assert isinstance(finding, MissingModel)
    assert str(finding.path) == "optimizer.bin"
    assert check(folder).status == 1
    assert found(folder / "optimizer.bin") == []


@pytest.mark.parametrize(
    "name",
    [
        "unet/diffusion_pytorch_model.safetensors", "a/b/c/weights.pt", "ema.pth", "weights.npz",
        "model.pth.tar", "best.th", "program.pt2", "unet/model.pth.tar", "unet/x.msgpack",
    ],
)  # fmt: skip
def test_weights_that_a_hook_of_the_script_saved_are_a_model(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder.parent / "kept")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder.parent / "kept", folder / name)
    assert "missing-model" not in found(folder)


CONFIGS = {
    "diffusers": (
        "config.json",
        {"_class_name": "UNet2DModel"},
        "UNet2DModel",
        "diffusion_pytorch_model.safetensors",
    ),
    "peft": (
        "adapter_config.json",
        {"peft_type": "LORA"},
        "a PEFT adapter (LORA)",
        "adapter_model.safetensors",
    ),
    "transformers": (
        "config.json",
        {"architectures": ["BertModel"], "model_type": "bert"},
        "BertModel",
        "model.safetensors",
    ),
}


@pytest.mark.parametrize("library", CONFIGS)
def test_a_config_below_without_its_weights(folder: Path, library: str) -> None:
    """``unet/`` of a hook lost its weights, and ``unet_ema/`` is intact."""
    name, config, model, weights = CONFIGS[library]
    (folder / "model.safetensors").unlink()
    for below in ("unet", "unet_ema"):
        (folder / below).mkdir()
        (folder / below / name).write_text(json.dumps(config))
        shutil.copyfile(CLEAN / "model.safetensors", folder / below / weights)
    assert check(folder).findings == ()
    (folder / "unet" / weights).unlink()
    report = check(folder)
    (finding,) = report.findings
    assert isinstance(finding, MissingModel)
    assert (str(finding.path), finding.model, report.status) == (f"unet/{name}", model, 1)
    assert (
        f"unet/ has no weights: {name} describes {model}, which cannot be loaded (expected "
        in str(finding)
    )


@pytest.mark.parametrize(
    ("name", "config", "others"),
    [
        ("scheduler_config.json", {"_class_name": "DDPMScheduler"}, ()),
        ("preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"}, ()),
        ("config.json", {"_class_name": "VaeImageProcessor"}, ()),
        ("config.json", {"architectures": ["BertModel"]}, ("tokenizer_config.json", "vocab.txt")),
        ("config.json", {"model_type": "bert"}, ()),
        ("config.json", ["_class_name"], ()),
        ("adapter_config.json", {"r": 4}, ()),
    ],
)
def test_a_config_that_needs_no_weights(
    folder: Path, name: str, config: object, others: tuple[str, ...]
) -> None:
    (folder / "unet").mkdir()
    (folder / "unet" / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel"}))
    (folder / "model.safetensors").rename(folder / "unet" / "diffusion_pytorch_model.safetensors")
    (folder / "other").mkdir()
    for one in (name, *others):
        (folder / "other" / one).write_text(json.dumps(config))
    assert check(folder).findings == ()
    (folder / "other" / "config.json").write_bytes(b"\x00" * 9)
    assert check(folder).findings == ()


def test_a_config_below_may_describe_the_weights_of_the_checkpoint(folder: Path) -> None:
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    assert check(folder).findings == ()


def test_states_of_the_trainer_are_no_model(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for name in ("rng_state.pth", "rng_state_3.pth", "training_args.bin", "scheduler.pt"):
        shutil.copyfile(folder / "random_states_0.pkl", folder / name)
    assert "missing-model" in found(folder)


def test_a_sharded_optimizer_without_its_model(tmp_path: Path) -> None:
    folder = copy_sharded(tmp_path, "fsdp2-clean", keep=(OPTIMIZER,))
    assert str(only(folder).path) == OPTIMIZER
    assert (
        check(copy_sharded(tmp_path / "both", "fsdp2-clean", keep=(OPTIMIZER, MODEL))).findings
        == ()
    )
    assert check(folder / OPTIMIZER).findings == ()


@pytest.mark.parametrize(
    "name",
    [
        ".model.safetensors.a8XkQ1", ".tmpa8XkQ1", "model.safetensors.part",
        "pytorch_model.bin.incomplete", "optimizer.bin.tmp", ".__0_0.distcp.a8XkQ1",
        "..metadata.a8XkQ1", ".random_states_0.pkl.ZZZZZZ",
    ],
)  # fmt: skip
def test_what_a_cut_copy_left_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"half")
    finding = only(folder)
    assert isinstance(finding, InterruptedSave)
    wanted = {
        "pytorch_model.bin.incomplete": "pytorch_model.bin",
        ".__0_0.distcp.a8XkQ1": "__0_0.distcp",
    }
    wanted["..metadata.a8XkQ1"] = ".metadata"
    missing = f"; {wanted[name]} is missing" if name in wanted else ""
    assert str(finding) == f"{name}: left over from an interrupted save or copy{missing}"
    assert not any(name in words for words in check(folder).not_checked)


@pytest.mark.parametrize(
    "name",
    [
        ".metadata.tmp", "notes.tmp", ".tmp", "model.safetensors", ".gitignore", ".tmpabc",
        "model.part", "x.tmp.txt",
    ],
)  # fmt: skip
def test_other_names_are_none_that_a_cut_copy_leaves(name: str) -> None:
    assert not is_unfinished(name)


def test_what_a_cut_copy_left_in_a_sharded_folder_is_named(tmp_path: Path) -> None:
    folder = copy_sharded(tmp_path, "fsdp2-clean", keep=(MODEL,))
    (folder / MODEL / ".__1_0.distcp.a8XkQ1").write_bytes(b"half")
    assert str(only(folder).path) == f"{MODEL}/.__1_0.distcp.a8XkQ1"
