"""Train with transformers' Trainer, and prove what it makes of a checkpoint that was written for
another strategy.

The jobs of ``state_training`` for the Trainer, in one process: accelerate switches FSDP on for GPUs
alone, and here nothing can do it for the Trainer. ``make`` trains six steps and saves after three;
``prove`` resumes from there.
"""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.conversion.state_training import (
    BATCH,
    BUILDERS,
    LENGTH,
    STEPS,
    VOCABULARY,
    Model,
    Run,
    differences,
    forget,
    kinds,
    zero_config,
)

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
SAVED = f"checkpoint-{STEPS}"


class _Trainer(Trainer):  # type: ignore[misc]
    """Keeps the loss of each step, in all its digits."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[list[float]] = []

    def training_step(self, *values: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*values, **options)
        self.losses.append([float(loss)])
        return loss


class TrainerRun(Run):
    """What the Trainer makes of a model; its own param groups, with and without weight decay."""

    def __init__(self, strategy: str, case: str, output: Path) -> None:
        self.strategy, self.kinds = strategy, kinds(case)
        self.is_zero = strategy.startswith("zero")
        self.stage = int(strategy[4]) if self.is_zero else 0
        forget()
        model = BUILDERS[self.kinds[0]]()
        if self.is_zero:
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        arguments = TrainingArguments(
            output_dir=str(output), max_steps=2 * STEPS, save_steps=STEPS,
            per_device_train_batch_size=BATCH, learning_rate=1e-2, weight_decay=0.1,
            max_grad_norm=0.0, seed=1, report_to=[], disable_tqdm=True, use_cpu=not self.is_zero,
            deepspeed=zero_config(self.stage, accumulation=1) if self.is_zero else None,
            dataloader_pin_memory=False,
        )  # fmt: skip
        rows = torch.randint(
            0, VOCABULARY, (2 * STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(5)
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        self.trainer = _Trainer(model=model, args=arguments, train_dataset=data)
        decayed = set(self.trainer.get_decay_parameter_names(model))
        trained = [name for name, one in model.named_parameters() if one.requires_grad]
        self.groups = [
            [
                [name for name in trained if name in decayed],
                [name for name in trained if name not in decayed],
            ]
        ]
        self.accelerator = self.trainer.accelerator

    def train(self, checkpoint: str | None = None, *, alteration: str = "") -> list[Model]:
        """Train to the end, and return the memory after ``STEPS`` steps; ``alteration``: made
        then.
        """
        run, found = self, []

        class Callback(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, args: Any, state: Any, control: Any, **values: Any) -> None:
                if state.global_step == STEPS:
                    run.models = [run.trainer.model_wrapped if run.is_zero else run.trainer.model]
                    run.optimizers = [run.trainer.optimizer]
                    run.schedulers = [_Held(run.trainer.lr_scheduler)]
                    found.extend(run.memory())
                    if alteration:
                        run.alter(alteration, found)

        self.trainer.add_callback(Callback())
        self.trainer.train(resume_from_checkpoint=checkpoint)
        return found


class _Held:
    """A scheduler as accelerate holds it; outside of DeepSpeed the Trainer has the bare one."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = getattr(scheduler, "scheduler", scheduler)


def make(job: dict[str, Any]) -> dict[str, Any]:
    """Train and save: ``folder/STRATEGY/checkpoint-3``, and what was in memory then."""
    folder = Path(job["folder"], job["strategy"])
    run = TrainerRun(job["strategy"], job["case"], folder)
    memory = run.train()
    expected = {"memory": memory, "after": run.trainer.losses[STEPS:]}
    torch.save(expected, folder.with_suffix(".expected"))
    return {"losses": run.trainer.losses}


def prove(job: dict[str, Any]) -> dict[str, Any]:
    """Resume from a checkpoint; then again, and alter the memory once it is loaded, which no proof
    may overlook.
    """
    expected = torch.load(job["expected"], weights_only=False)
    found: dict[str, Any] = {"source": expected["after"], "altered": {}}
    for how in ("", *job["altered"]):
        run = TrainerRun(job["strategy"], job["case"], Path(job["folder"]))
        lines = differences(expected["memory"], run.train(job["checkpoint"], alteration=how))
        if how:
            found["altered"][how] = run.trainer.losses
        else:
            found |= {"differs": lines, "losses": run.trainer.losses}
    return found
