"""A checkpoint of transformers' own Trainer through FSDP and back: it goes on bit for bit."""

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


def test_the_trainer_goes_on(tmp_path: Path) -> None:
    """The names of parameters are those of the class in ``config.json``."""
    losses = run(tmp_path / "trained")
    between = tmp_path / "between"
    ckptfix.migrate(tmp_path / "trained" / "checkpoint-3", between, to="fsdp", state="all")
    receipt = ckptfix.migrate(between, tmp_path / "checkpoint-3", to="ddp", state="all")
    assert receipt.verified
    found = run(tmp_path / "again", tmp_path / "checkpoint-3")
    assert found == {step: loss for step, loss in losses.items() if step > 3}
