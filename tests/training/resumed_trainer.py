"""A transformers Trainer run with several ways to resume wrongly; it knows nothing of ckptfix.

    python resumed_trainer.py VARIANT FOLDER

VARIANT is JSON with the fields of ``TrainerVariant``. A run that finds a checkpoint goes on from
it.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class TrainerVariant:
    """What the run does. ``forget``: a file that is deleted from the checkpoint.

    ``turned``: the parameters have another order in a resumed run.
    """

    save: int = 4
    steps: int = 26
    augment: bool = False
    accumulate: int = 1
    ignore_skip: bool = False
    forget: str = ""
    workers: int = 0
    seedable: bool = True
    stream: str = ""  # sized, unsized
    turned: bool = False


class Config(PretrainedConfig):  # type: ignore[misc]
    model_type = "tiny"


class Model(PreTrainedModel):  # type: ignore[misc]
    config_class = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.drop, self.last = torch.nn.Dropout(0.3), torch.nn.Linear(4, 1)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        """Keep what torch initializes."""

    def forward(self, x: Any, at: Any = None) -> dict[str, Any]:
        return {"loss": self.last(self.drop(self.second(self.first(x)))).pow(2).mean()}


class Samples(Dataset):  # type: ignore[misc]
    def __init__(self, augment: bool) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return 32

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        noise = 0.1 * torch.rand(4) if self.augment else torch.zeros(4)
        return {"at": torch.tensor(at), "x": torch.linspace(0, 1, 4) + at / 32 + noise}


class Stream(IterableDataset):  # type: ignore[misc]
    """Samples in an order that comes from a generator of its own, another one in every epoch."""

    def __init__(self) -> None:
        self.order = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        samples = Samples(augment=False)
        return (samples[at] for at in torch.randperm(len(samples), generator=self.order).tolist())


class SizedStream(Stream):
    def __len__(self) -> int:
        return 32


class Forgets(TrainerCallback):  # type: ignore[misc]
    def __init__(self, variant: TrainerVariant) -> None:
        self.variant = variant

    def on_save(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        if self.variant.forget and state.global_step == self.variant.save:
            path = (
                Path(arguments.output_dir) / f"checkpoint-{state.global_step}" / self.variant.forget
            )
            path.unlink()


def train(variant: TrainerVariant, folder: Path) -> None:
    """Train, save every few steps, and go on from the last checkpoint of the folder."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(folder), max_steps=variant.steps, per_device_train_batch_size=2, save_strategy="steps",
        save_steps=variant.save, report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True,
        seed=3, gradient_accumulation_steps=variant.accumulate, learning_rate=1e-2,
        ignore_data_skip=variant.ignore_skip, remove_unused_columns=False,
        dataloader_num_workers=variant.workers,
        accelerator_config={"use_seedable_sampler": variant.seedable},
    )  # fmt: skip
    last = get_last_checkpoint(str(folder))
    model = Model(Config())
    parameters = list(model.parameters())
    if variant.turned and last is not None:
        parameters = [*parameters[2:4], *parameters[:2], *parameters[4:]]
    streams = {"sized": SizedStream, "unsized": Stream}
    trainer = Trainer(
        model,
        arguments,
        train_dataset=streams[variant.stream]() if variant.stream else Samples(variant.augment),
        callbacks=[Forgets(variant)],
        optimizers=(torch.optim.AdamW(parameters, lr=1e-2) if variant.turned else None, None),
    )
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    train(TrainerVariant(**json.loads(sys.argv[1])), Path(sys.argv[2]))
    os._exit(0)  # gloo's threads abort now and then at a usual exit
