"""A transformers Trainer run with several ways to resume wrongly; it knows nothing of ckptfix.

    python resumed_trainer.py VARIANT FOLDER

VARIANT is JSON with the fields of ``TrainerVariant``. A run that finds a checkpoint goes on from it.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class TrainerVariant:
    """What the run does. ``forget``: a file that is deleted from the checkpoint."""

    save: int = 4
    steps: int = 26
    augment: bool = False
    accumulate: int = 1
    ignore_skip: bool = False
    forget: str = ""


class Config(PretrainedConfig):  # type: ignore[misc]
    model_type = "tiny"


class Model(PreTrainedModel):  # type: ignore[misc]
    config_class = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first, self.drop, self.last = torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        """Keep what torch initializes."""

    def forward(self, x: Any, at: Any = None) -> dict[str, Any]:
        return {"loss": self.last(self.drop(self.first(x))).pow(2).mean()}


class Samples(Dataset):  # type: ignore[misc]
    def __init__(self, augment: bool) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return 32

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        noise = 0.1 * torch.rand(4) if self.augment else torch.zeros(4)
        return {"at": torch.tensor(at), "x": torch.linspace(0, 1, 4) + at / 32 + noise}


class Forgets(TrainerCallback):  # type: ignore[misc]
    def __init__(self, variant: TrainerVariant) -> None:
        self.variant = variant

    def on_save(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        if self.variant.forget and state.global_step == self.variant.save:
            path = Path(arguments.output_dir) / f"checkpoint-{state.global_step}" / self.variant.forget
            path.unlink()


def train(variant: TrainerVariant, folder: Path) -> None:
    """Train, save every few steps, and go on from the last checkpoint of the folder."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(folder), max_steps=variant.steps, per_device_train_batch_size=2, save_strategy="steps",
        save_steps=variant.save, report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True, seed=3,
        gradient_accumulation_steps=variant.accumulate, learning_rate=1e-2, ignore_data_skip=variant.ignore_skip,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(
        Model(Config()), arguments, train_dataset=Samples(variant.augment), callbacks=[Forgets(variant)]
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))


if __name__ == "__main__":
    train(TrainerVariant(**json.loads(sys.argv[1])), Path(sys.argv[2]))
    os._exit(0)  # gloo's threads abort now and then at a usual exit
