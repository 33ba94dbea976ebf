"""A guarded save that records digests can be verified, sealed, repaired, and saved over."""

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from ckptfix import LoadPolicy, load_state_tolerant, repair, seal, verify
from ckptfix.checkpoint.latest import incomplete
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.training.accelerator import Accelerator
from ckptfix.training.loading.load_report import Requirement
from ckptfix.training.saving.staged_saves import _was_saved
from ckptfix.verification.verify_report import Kind, Outcome
from tests.verification.sealed import flip, place, wrong


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Tied(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6, dtype=torch.bfloat16)
        self.second = torch.nn.Linear(6, 6, dtype=torch.bfloat16)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.tensor(3))


def save(folder: Path, *, safetensors: bool) -> Accelerator:
    accelerator = Accelerator(cpu=True, tensor_digests=True)
    model = Tied()
    prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(str(folder), safe_serialization=safetensors)
    del prepared
    return accelerator


@pytest.mark.parametrize("safetensors", [True, False])
def test_a_save_with_digests_verifies(tmp_path: Path, safetensors: bool) -> None:
    folder = tmp_path / "c"
    save(folder, safetensors=safetensors)
    report = verify(folder, data=True)
    assert report.status == 0
    tensors = report.count(Kind.TENSOR)
    assert tensors == {Outcome.MATCH: 5, Outcome.DIFFER: 0, Outcome.NOT_CHECKED: 0}
    manifest = read_manifest(folder)
    assert manifest is not None
    assert report.count(Kind.FILE) == {
        Outcome.MATCH: len(manifest.files),
        Outcome.DIFFER: 0,
        Outcome.NOT_CHECKED: 0,
    }
    assert report.is_verified
    keys = manifest.models[0].keys
    assert seal(folder).status == 0
    sealed = read_manifest(folder)
    assert sealed is not None
    assert sealed == replace(manifest, digests_of_save=False), "it was born sealed"
    assert sealed.models[0].keys == keys, "a tolerant load believes the entry by its keys"
    assert sealed.models[0].aliases == manifest.models[0].aliases
    assert sealed.optimizers == manifest.optimizers
    assert verify(folder).count(Kind.FILE)[Outcome.MATCH] == len(manifest.files)
    assert incomplete(folder) is None
    assert repair(folder).steps == ()
    piece = place(folder, "first.bias")
    flip(piece.path, piece.offset)
    assert set(wrong(verify(folder))) == {"first.bias", piece.path.name}


def test_a_file_that_another_process_adds_later_is_no_difference_and_a_model_is(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save(folder, safetensors=True)
    (folder / "random_states_1.pkl").write_bytes((folder / "random_states_0.pkl").read_bytes())
    (folder / "notes.txt").write_text("mine")
    assert verify(folder).status == 0
    (folder / "optimizer_1.bin").write_bytes((folder / "optimizer.bin").read_bytes())
    report = verify(folder)
    assert report.status == 1
    assert wrong(report)["optimizer_1.bin"] == ("extra", None)


@pytest.mark.slow
def test_a_save_of_two_processes_is_born_sealed(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    script = Path(__file__).with_name("digests_ranks.py")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1",
        f"--master_port={random.randrange(30000, 60000)}", str(script), str(folder),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    manifest = read_manifest(folder)
    assert manifest is not None
    assert {"random_states_0.pkl", "random_states_1.pkl", "model.safetensors"} <= manifest.files.keys()
    assert manifest.sha256.keys() == manifest.files.keys()
    report = verify(folder)
    assert report.status == 0
    assert report.count(Kind.FILE)[Outcome.MATCH] == len(manifest.files)
    assert not [path.name for path in folder.rglob(".ckptfix-digests-*")]


def test_a_save_into_a_sealed_folder_keeps_what_is_the_users(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    accelerator = save(folder, safetensors=True)
    (folder / "notes.txt").write_text("mine")
    seal(folder)
    accelerator.save_state(str(folder))
    assert (folder / "notes.txt").read_text() == "mine"
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.sha256.keys() == manifest.files.keys()
    assert verify(folder).status == 0
    other = tmp_path / "checkpoints" / "checkpoint_0"
    other.mkdir(parents=True)
    (other / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    seal(other)
    assert not _was_saved(other), "rotation removes what a save wrote, and a seal is no save"


def test_a_loaded_step_is_never_that_of_a_manifest_that_no_save_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    accelerator = save(folder, safetensors=True)
    (folder / ".ckptfix" / "manifest.json").unlink()
    (folder / "random_states_0.pkl").unlink()
    seal(folder)
    accelerator.step = 17
    with pytest.warns(UserWarning, match="step"):
        report = load_state_tolerant(accelerator, folder, policy=LoadPolicy(rng=Requirement.IGNORE))
    assert accelerator.step == 17
    assert "from the manifest" not in str(report)
