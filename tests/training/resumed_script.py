"""A training script with every way to save and resume, wrong ones too; it knows nothing of ckptfix.

    python resumed_script.py VARIANT FOLDER [--resume]

VARIANT is JSON with the fields of ``Variant``. The recorder tests call ``train`` in a process that
is running already.
"""

import contextlib
import copy
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset, IterableDataset

SAMPLES, BATCH = 32, 2


@dataclass
class Variant:
    """What the script does. ``save``: steps (batches) after which it saves; negative: after the
    loop of that epoch.
    """

    save: int = 4
    epochs: int = 3
    shuffle: bool = False
    seedable: bool = False
    set_epoch: bool = False
    skip: str = "skip"  # skip, continue, nothing, more
    stateful: bool = False
    workers: int = 0
    dispatch: bool | None = None
    iterable: str = ""  # plain, own
    dropout: float = 0.0
    augment: bool = False
    normalize: bool = False
    accumulate: int = 1
    scheduler: str = "prepared"  # prepared, raw, none
    schedule: str = "step"  # step, cosine, cycle, warm, sequence, plateau
    optimizer: str = "prepared"  # prepared, raw
    kind: str = "adamw"  # adamw, sgd, adagrad
    two: bool = False
    compiled: bool = False
    turns: bool = False
    loader: str = "prepared"  # prepared, raw
    order: str = "list"  # list, turned
    custom: str = ""  # own, same
    scaler: bool = False
    reseed: bool = False
    loads: str = "state"  # state, model, nothing
    draws: bool = False
    forget: str = ""
    clip: bool = False
    evaluate: bool = False
    late: bool = False
    zeros: bool = False
    direct: bool = False
    bf16: bool = False
    seeds: bool = True
    seed: int = 0
    local: bool = False
    epochs_more: int = 0
    unsteady: bool = False
    target: bool = False  # an average that nobody prepares, and that the loss uses
    transient: bool = False  # a buffer that no state_dict has
    gradients: str = "zeroed"  # zeroed, in turn (before each backward), left (after each step)


class Samples(Dataset):  # type: ignore[misc]
    def __init__(self, augment: bool) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        noise = 0.1 * torch.rand(4) if self.augment else torch.zeros(4)
        return {"at": torch.tensor(at), "x": torch.linspace(0, 1, 4) + at / SAMPLES + noise}


class Stream(IterableDataset):  # type: ignore[misc]
    def __init__(self, own: bool) -> None:
        self.generator = torch.Generator().manual_seed(3) if own else None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order = (
            torch.randperm(SAMPLES, generator=self.generator).tolist()
            if self.generator
            else range(SAMPLES)
        )
        for at in order:
            yield {"at": torch.tensor(at), "x": torch.linspace(0, 1, 4) + at / SAMPLES}


class Counts:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Counting(torch.nn.Module):  # type: ignore[misc]
    """Adds a number that grows with each batch, and that no ``state_dict`` has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


def train(variant: Variant, folder: Path, *, resume: bool) -> None:
    """Train, save where the variant says so, and go on from what the folder holds if asked to."""
    v = variant
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=v.accumulate,
        mixed_precision="bf16" if v.bf16 else "no",
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=v.seedable,
            use_stateful_dataloader=v.stateful,
            dispatch_batches=v.dispatch,
        ),
    )
    if v.scaler:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    torch.manual_seed(v.seed)
    if v.seeds:
        set_seed(v.seed)
    if v.unsteady:
        torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    norm = torch.nn.BatchNorm1d(8) if v.normalize else torch.nn.Identity()
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(4, 8),
        norm,
        torch.nn.Dropout(v.dropout),
        torch.nn.Linear(8, 8),
        torch.nn.Linear(8, 8),
        Counting() if v.transient else torch.nn.Identity(),
    )
    target = copy.deepcopy(model) if v.target else None
    parameters = list(model.parameters())
    if v.order == "turned" and resume:
        # The two layers of one shape change places, as they may where the order comes from a set.
        parameters[-4:] = [*parameters[-2:], *parameters[-4:-2]]
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    own = {"momentum": 0.9} if v.kind == "sgd" else {}
    halves = [parameters[:2], parameters[2:]] if v.two else [parameters]
    optimizers: list[Any] = [kinds[v.kind](half, lr=1e-2, **own) for half in halves]
    schedules = {
        "step": lambda one: torch.optim.lr_scheduler.StepLR(one, 3, 0.5),
        "cosine": lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, 40),
        "cycle": lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 1e-2, total_steps=100),
        "warm": lambda one: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(one, 5),
        "sequence": lambda one: torch.optim.lr_scheduler.SequentialLR(
            one,
            [
                torch.optim.lr_scheduler.LinearLR(one, 0.1, total_iters=4),
                torch.optim.lr_scheduler.ExponentialLR(one, 0.9),
            ],
            milestones=[4],
        ),
        "plateau": lambda one: torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=2),
    }
    schedulers: list[Any] = (
        [schedules[v.schedule](one) for one in optimizers] if v.scheduler != "none" else []
    )
    set_seed(7 + v.seed, device_specific=True) if v.seeds else None
    data = Stream(v.iterable == "own") if v.iterable else Samples(v.augment)
    how = {} if v.iterable else {"shuffle": v.shuffle}
    loader: Any = DataLoader(data, batch_size=BATCH, num_workers=v.workers, **how)
    evaluation: Any = DataLoader(Samples(False), batch_size=BATCH)
    model = accelerator.prepare(torch.compile(model, backend="eager") if v.compiled else model)
    if v.loader == "prepared":
        loader, evaluation = accelerator.prepare(loader, evaluation)
    if v.optimizer == "prepared":
        optimizers = [accelerator.prepare(one) for one in optimizers]
    if v.scheduler == "prepared":
        schedulers = [accelerator.prepare(one) for one in schedulers]
    rank = accelerator.process_index
    counts = Counts(10 + rank if v.custom == "own" else 10)
    if v.custom:
        accelerator.register_for_checkpointing(counts)
    length = SAMPLES // BATCH // accelerator.num_processes
    step = epoch = skip = 0
    checkpoint = folder / "checkpoint"
    if resume:
        if v.loads == "state":
            accelerator.load_state(str(checkpoint))
        elif v.loads == "model":
            accelerator.unwrap_model(model).load_state_dict(torch.load(checkpoint / "own.pt"))
        step = int((checkpoint / "step").read_text())
        epoch, skip = divmod(step, length)
        if v.draws:
            torch.rand(3)

    def save() -> None:
        accelerator.wait_for_everyone()
        accelerator.save_state(str(checkpoint), safe_serialization=False)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            torch.save(accelerator.unwrap_model(model).state_dict(), checkpoint / "own.pt")
            (checkpoint / "step").write_text(str(step))
            if v.forget:
                (checkpoint / v.forget).unlink()
        accelerator.wait_for_everyone()

    for number in range(epoch, v.epochs + (v.epochs_more if resume else 0)):
        if v.set_epoch:
            loader.set_epoch(number)
        batches = loader
        passed = skip if v.skip == "continue" else 0
        if skip and v.skip in ("skip", "more"):
            batches = accelerator.skip_first_batches(loader, skip + (v.skip == "more"))
        skip = 0
        for batch in batches:
            if passed:
                passed -= 1
                continue
            if v.reseed:
                seed = 1000 * step + rank + v.seed
                torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
            for one in optimizers if v.gradients in ("in turn", "left") else ():
                # Each backward leaves gradients of the other half, too, as in a GAN.
                if v.gradients == "in turn":
                    one.zero_grad()
                accelerator.backward(model(batch["x"]).pow(2).mean())
                one.step()
                if v.gradients == "left":
                    one.zero_grad()
            with accelerator.accumulate(model) if v.accumulate > 1 else contextlib.nullcontext():
                if v.gradients != "zeroed":
                    step += 1
                    if step == v.save:
                        save()
                    continue
                loss = model(batch["x"]).pow(2).mean()
                if target is not None:
                    loss = loss + (model(batch["x"]) - target(batch["x"]).detach()).pow(2).mean()
                    with torch.no_grad():
                        for mean, one in zip(
                            target.parameters(),
                            accelerator.unwrap_model(model).parameters(),
                            strict=True,
                        ):
                            mean.lerp_(one, 0.1)
                loss.backward() if v.direct else accelerator.backward(loss)
                if v.clip:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                for one in optimizers:
                    one.step()
                    if v.turns and one is not optimizers[-1]:
                        accelerator.backward(model(batch["x"]).abs().mean())
                shared = (
                    accelerator.reduce(loss.detach(), "mean")
                    if v.schedule == "plateau"
                    else loss.detach()
                )
                for one in schedulers:
                    (
                        one.step(float(loss.detach() if v.local else shared))
                        if v.schedule == "plateau"
                        else one.step()
                    )
                for one in optimizers:
                    one.zero_grad(set_to_none=not v.zeros)
            step += 1
            if step == v.save:
                save()
        if v.evaluate:
            model.eval()
            for batch in evaluation:
                with torch.no_grad():
                    model(batch["x"])
            model.train()
        if v.save < 0 and number == -v.save - 1:
            save()
            if v.late:
                list(evaluation)


if __name__ == "__main__":
    train(Variant(**json.loads(sys.argv[1])), Path(sys.argv[2]), resume="--resume" in sys.argv)
    os._exit(0)  # gloo's threads abort now and then at a usual exit
