"""Checkpoints of transformers' own Trainer through another strategy and back: it goes on bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import ckptfix

pytestmark = pytest.mark.slow


class Losses(TrainerCallback):  # type: ignore[misc]
    """The losses that a Trainer logs, by step."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:
            self.seen[state.global_step] = logs["loss"]


def run(folder: Path, resume: Path | None = None) -> dict[int, float]:
    """Train a small GPT-2 for six steps, or from a checkpoint on; return its losses."""
    torch.manual_seed(7)
    config = GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    tokens = torch.randint(0, 31, (24, 8), generator=torch.Generator().manual_seed(0))
    losses = Losses()
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=6,
            save_steps=3,
            logging_steps=1,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            weight_decay=0.1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=3,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[losses],
    )
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return losses.seen


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    folder = tmp_path_factory.mktemp("trainer")
    return folder / "checkpoint-3", run(folder)


@pytest.mark.parametrize("between", ["fsdp", "zero3"])
def test_the_trainer_goes_on(tmp_path: Path, expected: tuple[Path, dict[int, float]], between: str) -> None:
    checkpoint, losses = expected
    ckptfix.migrate(checkpoint, tmp_path / "between", to=between, state="all")  # names by config.json
    receipt = ckptfix.migrate(tmp_path / "between", tmp_path / "checkpoint-3", to="ddp", state="all")
    assert receipt.verified
    found = run(tmp_path / "again", tmp_path / "checkpoint-3")
    assert found == {step: loss for step, loss in losses.items() if step > 3}
