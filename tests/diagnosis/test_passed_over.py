"""What ``latest_checkpoint`` passes over, ``check`` explains: the two never contradict each
other.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptfix.checkpoint.latest import UNFINISHED, Candidate, problems_in
from ckptfix.diagnosis.check import check
from ckptfix.diagnosis.check_report import CLEAN
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.diagnosis.resumable import examine
from ckptfix.storage.markers import UPLOAD
from ckptfix.storage.paths import JOURNAL, MANIFEST
from tests.commanding import Said, said
from tests.diagnosis.test_completeness import FIXTURES, make, make_of_trainer
from tests.tensors.dcp_making import save

__all__ = ["said"]

GOLDEN = FIXTURES.parent / "golden"
SCHEDULER = FIXTURES / "custom-object" / "checkpoint" / "scheduler.bin"
Change = Callable[[Path], object]


def gone(*names: str) -> Change:
    def change(root: Path) -> None:
        for name in names:
            (root / name).unlink()

    return change


def written(name: str, text: str) -> Change:
    def change(root: Path) -> None:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)

    return change


def only(*names: str) -> Change:
    def change(root: Path) -> None:
        for path in root.iterdir():
            if path.name not in names:
                path.unlink()

    return change


def moved(name: str, to: str) -> Change:
    return lambda root: (root / name).rename(root / to)


def emptied_weights(root: Path) -> None:
    save_file({}, root / "model.safetensors", metadata={"format": "pt"})


def emptied_next_to_torch(root: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, root / "pytorch_model.bin")
    emptied_weights(root)


def nested_weights(root: Path) -> None:
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, root / "pytorch_model.bin")
    (root / "model.safetensors").unlink()


def lost_component(root: Path) -> None:
    (root / "model.safetensors").unlink()
    written("unet/config.json", '{"_class_name": "UNet2DModel"}')(root)
    shutil.copy(
        FIXTURES / "clean-safetensors" / "checkpoint" / "model.safetensors",
        root / "ema.safetensors",
    )
    moved("ema.safetensors", "unet_ema.gguf")(root)


OF_ACCELERATE: dict[str, tuple[Change, str]] = {
    "manifest": (written(MANIFEST, "{"), "manifest"),
    "unfinished": (written(f"{JOURNAL}/{UNFINISHED}", "[]"), "interrupted"),
    "upload": (written(UPLOAD, "{"), "upload"),
    "weights": (gone("model.safetensors"), "no model weights"),
    "weights and optimizer": (gone("model.safetensors", "optimizer.bin"), "no model weights"),
    "states of ranks alone": (
        only("random_states_0.pkl", "random_states_1.pkl"),
        "no model weights",
    ),
    "states of another rank alone": (only("random_states_1.pkl"), "no model weights"),
    "states of rank 0": (gone("random_states_0.pkl"), "no random_states_0.pkl"),
    "states of all ranks": (
        gone("random_states_0.pkl", "random_states_1.pkl"),
        "no random_states_0.pkl",
    ),
    "weights alone": (
        only("model.safetensors"),
        "only weights; a resume also needs random_states_0.pkl",
    ),
    "empty file": (written("optimizer.bin", ""), "is empty"),
    "cut file": (written("optimizer.bin", "PK\x03\x04"), "optimizer.bin"),
    "folder without metadata": (written("optimizer_0/__0_0.distcp", "x"), ".metadata"),
    "empty folder": (lambda root: (root / "optimizer_0").mkdir(), ".metadata"),
    "folder in a folder": (
        lambda root: save(
            root / "optimizer_0" / "optimizer_0", {"optimizer": {"x": torch.ones(4)}}
        ),
        ".metadata",
    ),
    "component": (lost_component, "unet/ has no weights"),
    "other state": (
        lambda root: shutil.copy(SCHEDULER, root / "optimizer.bin"),
        "optimizer.bin",
    ),
    "weights in a dict": (nested_weights, "pytorch_model.bin holds"),
    "weights without tensors": (emptied_next_to_torch, "no tensors"),
    "salvaged": (
        lambda root: shutil.copy(GOLDEN / "salvaged" / "checkpoint" / "salvage.json", root),
        "salvage",
    ),
}

OF_TRAINER: dict[str, tuple[Change, str]] = {
    "weights": (gone("model.safetensors"), "no model weights"),
    "states of ranks alone": (only("rng_state_0.pth", "rng_state_1.pth"), "no model weights"),
    "state": (gone("trainer_state.json"), "trainer_state.json"),
    "weights alone": (only("model.safetensors"), "trainer_state.json"),
    "weights and arguments": (
        only("model.safetensors", "training_args.bin"),
        "trainer_state.json",
    ),
    "step": (written("trainer_state.json", '{"global_step": 2}'), "global_step"),
    "cut state": (written("trainer_state.json", '{"global_'), "trainer_state.json"),
    "optimizer": (gone("optimizer.pt"), "scheduler.pt without optimizer.pt"),
    "config": (written("config.json", "{"), "config.json"),
    "hidden weights": (moved("model.safetensors", "model.fp16.safetensors"), "does not look for"),
    "hidden optimizer": (moved("optimizer.pt", "optimizer.bin"), "does not look for"),
    "weights without tensors": (emptied_weights, "no tensors"),
}


def cases() -> Iterator[Any]:
    for name, (change, words) in OF_ACCELERATE.items():
        yield pytest.param("checkpoint_5", change, words, id=f"accelerate: {name}")
    for name, (change, words) in OF_TRAINER.items():
        yield pytest.param("checkpoint-4", change, words, id=f"Trainer: {name}")


def made(root: Path) -> Path:
    root.parent.mkdir(exist_ok=True)
    return make_of_trainer(root) if root.name == "checkpoint-4" else make(root)


def explains(root: Path) -> None:
    """Assert that a check of a checkpoint that is passed over says why, and calls it anything but
    clean.
    """
    report = check(root, resumes=True)
    told = [finding for finding in report.findings if finding.severity is not Severity.NOTE]
    assert told or report.unfinished or report.not_resumable
    assert report.verdict != CLEAN


@pytest.mark.parametrize("name", ["checkpoint_5", "checkpoint-4"])
def test_a_complete_checkpoint(tmp_path: Path, name: str) -> None:
    root = made(tmp_path / "run" / name)
    assert examine(root, 5).problem is None
    report = check(root, resumes=True)
    assert (report.verdict, report.not_resumable) == (CLEAN, "")


@pytest.mark.parametrize(("name", "change", "words"), list(cases()))
def test_each_reason_is_explained(
    tmp_path: Path, said: Said, name: str, change: Change, words: str
) -> None:
    root = made(tmp_path / "run" / name)
    change(root)
    problem = examine(root, 5).problem
    assert problem is not None
    assert words in problem
    explains(root)
    _, out, _ = said("check", "-r", root.parent)
    assert f"no checkpoint to resume from: {name}: {problem}" in out
    assert "clean" not in out


@pytest.mark.parametrize("name", ["checkpoint_5", "checkpoint-4"])
@pytest.mark.parametrize("golden", sorted(path.name for path in GOLDEN.iterdir()))
def test_the_examples_of_all_findings(tmp_path: Path, golden: str, name: str) -> None:
    source = next(
        path for path in (GOLDEN / golden / "checkpoint", GOLDEN / golden) if path.is_dir()
    )
    root = Path(shutil.copytree(source, tmp_path / "run" / name, symlinks=True))
    if examine(root, 5).problem is not None:
        explains(root)


def test_a_run_of_exports_has_nothing_to_resume_from(tmp_path: Path, said: Said) -> None:
    """Of each model and adapter it said again what save_state writes near its end."""
    for number in range(4):
        root = tmp_path / "run" / f"checkpoint-{number}"
        root.mkdir(parents=True)
        model = root / ("model.safetensors" if number % 2 else "adapter_model.safetensors")
        save_file({"weight": torch.ones(2) * number}, model, {"format": "pt"})
        (root / ("config.json" if number % 2 else "adapter_config.json")).write_text("{}")
    last = said("check", "-r", tmp_path / "run")[1].splitlines()[-1]
    assert (
        last == f"{tmp_path}/run: no checkpoint to resume from: checkpoint-3, checkpoint-2, "
        "checkpoint-1, checkpoint-0: only weights; a resume also needs random_states_0.pkl "
        "(save_state) or trainer_state.json (Trainer)"
    )


def test_many_checkpoints_are_counted_and_each_problem_is_said_once() -> None:
    broken = [
        Candidate(
            path=Path(f"checkpoint-{number}"),
            number=number,
            problem=f"it is {'odd' if number % 2 else 'even'}",
        )
        for number in range(20)
    ]
    assert (
        problems_in(broken)
        == "checkpoint-0, checkpoint-2, checkpoint-4, checkpoint-6, checkpoint-8, and 5 more: it "
        "is even; checkpoint-1, checkpoint-3, checkpoint-5, checkpoint-7, checkpoint-9, and 5 "
        "more: it is odd"
    )


def test_the_summary_counts_them_apart(tmp_path: Path, said: Said) -> None:
    """It said "2 clean" and "no checkpoint to resume from"."""
    for number in (1, 2):
        root = (
            make(tmp_path / "run" / f"checkpoint_{number}", "clean-single-process")
            if number == 1
            else None
        )
        root = root or Path(
            shutil.copytree(tmp_path / "run" / "checkpoint_1", tmp_path / "run" / "checkpoint_2")
        )
        (root / "random_states_0.pkl").unlink(missing_ok=True)
    status, out, _ = said("check", "-r", tmp_path)
    assert status == 0
    assert "2 checkpoints: 2 not resumable" in out
    assert out.count("  not resumable: latest_checkpoint skips it: no random_states_0.pkl") == 2


def test_a_state_that_is_cut_where_check_does_not_read(tmp_path: Path, said: Said) -> None:
    """``check`` reads the first 64 KiB of ``trainer_state.json``, and ``latest_checkpoint`` all of
    it.
    """
    for number in (4, 6):
        root = make_of_trainer(tmp_path / f"checkpoint-{number}")
        history = '{"loss": 1.0}, ' * 8000 + ("{}]}" if number == 4 else "")
        (root / "trainer_state.json").write_text(
            f'{{"global_step": {number}, "log_history": [{history}'
        )
    _, out, _ = said("check", "-r", tmp_path)
    newest = "the newest candidate, but check found problems in checkpoint-4"
    assert f"resume from {tmp_path / 'checkpoint-4'}, {newest}" in out
    assert "; newer but incomplete: checkpoint-6: trainer_state.json: not JSON" in out
