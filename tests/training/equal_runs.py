"""Training loops whose saves, evaluations and data draw random numbers: guarded, their losses are
those of stock.

    python -m tests.training.equal_runs FOLDER PROCESSES [NAME ...]

PROCESSES is a number, or several with commas. Each loop is run by stock accelerate, by
``patch_accelerate`` (which ``ckptfix run`` calls) and by the guarded Accelerator, and once more
killed after its first save and resumed. Prints one line of JSON for each: the ways in which it
went, and the first record of each way that is not that of stock. Trainers of transformers are run
with the patch.
"""

import hashlib
import importlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
from accelerate.tracking import GeneralTracker
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ckptfix
from ckptfix.training.accelerator import patch_accelerate, unpatch_accelerate
from tests.training.ranks import run_ranks

SAMPLES, BATCH, EPOCHS, WIDTH = 24, 2, 3, 8
FIRST_SAVE, LAST_SAVE = 4, 9
"""Steps after which a loop saves: with two processes an epoch has 6 steps, so that both are in the
middle of one.
"""


@dataclass(frozen=True)
class Loop:
    """A training loop. ``hook``: the save hook it registers; ``custom``: what its registered object
    draws.
    """

    hook: str = ""
    custom: str = ""
    model: str = "layers"
    dropout: float = 0.0
    augment: bool = False
    workers: int = 0
    accumulate: int = 1
    dispatch: bool | None = None
    stateful: bool = False
    seedable: bool = False
    iterable: bool = False
    scaler: bool = False
    two_models: bool = False
    tracker: bool = False
    save_model: bool = False
    evaluate: bool = False
    is_safetensors: bool = True
    is_automatic: bool = False


LOOPS = {
    "plain": Loop(),
    "dropout": Loop(dropout=0.5),
    "augmentation": Loop(augment=True, dropout=0.5),
    "workers": Loop(workers=2, augment=True, dropout=0.5),
    "accumulation": Loop(accumulate=4, dropout=0.5),
    "dispatcher": Loop(dispatch=True, dropout=0.5, hook="torch"),
    "stateful": Loop(stateful=True, dropout=0.5, hook="torch"),
    "seedable": Loop(seedable=True, augment=True, hook="torch"),
    "iterable": Loop(iterable=True, dropout=0.5, hook="torch"),
    "scaler": Loop(scaler=True, dropout=0.5, hook="torch"),
    "two models": Loop(two_models=True, dropout=0.5, hook="model"),
    "pickles": Loop(is_safetensors=False, dropout=0.5, hook="model"),
    "automatic names": Loop(is_automatic=True, augment=True, dropout=0.5, hook="model"),
    "ema": Loop(model="diffusers", hook="ema", dropout=0.5),
    "ema, workers": Loop(model="diffusers", hook="ema", workers=2, augment=True, accumulate=2),
    "hook of torch": Loop(hook="torch", augment=True, dropout=0.5),
    "hook of numpy": Loop(hook="numpy", augment=True),
    "hook of python": Loop(hook="python", augment=True),
    "hook that makes a model": Loop(hook="model", augment=True, dropout=0.5),
    "hook on the main process": Loop(hook="main", augment=True, dropout=0.5),
    "hook that seeds": Loop(hook="seeds", dropout=0.5, workers=2, augment=True),
    "hook that fails once": Loop(hook="fails", dropout=0.5, augment=True),
    "custom object": Loop(custom="torch", dropout=0.5, augment=True),
    "custom object and hook": Loop(custom="numpy", hook="torch", augment=True, accumulate=2),
    "tracker": Loop(tracker=True, dropout=0.5, hook="torch"),
    "save_model": Loop(save_model=True, dropout=0.5, hook="torch"),
    "evaluation": Loop(evaluate=True, dropout=0.5, hook="model"),
    "generation": Loop(model="gpt2", evaluate=True, dropout=0.1, hook="model"),
}
"""Loops of accelerate."""


@dataclass(frozen=True)
class TrainerRun:
    """A run of a Trainer. ``draws``: the method of a callback, or of the Trainer itself, that
    draws.

    ``at_end``: the first save is at the end of an epoch. ``resumes``: a resume goes on with the
    numbers of the uninterrupted run.
    """

    draws: str
    augment: bool = False
    workers: int = 0
    accumulate: int = 1
    at_end: bool = False
    resumes: bool = True


TRAINERS = {
    "Trainer, on_step_end": TrainerRun("on_step_end"),
    "Trainer, on_evaluate": TrainerRun("on_evaluate", augment=True),
    "Trainer, on_log": TrainerRun("on_log", accumulate=2),
    "Trainer, state": TrainerRun("state", augment=True),
    "Trainer, state at the end of an epoch": TrainerRun("state", augment=True, at_end=True),
    "Trainer, _save": TrainerRun("_save", augment=True, workers=2),
    # The checkpoint is complete, and in its place, when on_save is called: what is drawn there is
    # not in it.
    "Trainer, on_save": TrainerRun("on_save", resumes=False),
}
"""Trainers of transformers."""

IMPORTS = {
    "diffusers": "diffusers.training_utils",
    "gpt2": "transformers.models.gpt2.modeling_gpt2",
}


class Samples(Dataset):  # type: ignore[misc]
    def __init__(self, augment: bool) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        value = torch.linspace(0, 1, WIDTH) + index / SAMPLES
        if self.augment:
            value = (
                value
                + 0.1 * torch.rand(WIDTH)
                + 0.1 * random.random()
                + 0.1 * float(np.random.normal())
            )
        return value


class Stream(IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[torch.Tensor]:
        samples = Samples(augment=True)
        return (samples[index] for index in torch.randperm(SAMPLES).tolist())


class Counter:
    """A registered object that draws whenever it is asked for its state."""

    def __init__(self, kind: str) -> None:
        self.kind, self.steps = kind, 0

    def state_dict(self) -> dict[str, int]:
        DRAWS[self.kind]()
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Tracker(GeneralTracker):  # type: ignore[misc]
    """A tracker that draws which samples it logs."""

    name = "drawing"
    requires_logging_directory = False

    @property
    def tracker(self) -> None:
        return None

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        random.sample(range(100), 3)


DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(3).sum().item(),
    "numpy": lambda: float(np.random.normal()),
    "python": random.random,
    "model": lambda: torch.nn.Linear(WIDTH, WIDTH).weight.sum().item(),
    "seeds": lambda: float(torch.manual_seed(7).initial_seed()),
}


def diffusers_model() -> Any:
    """Return the class of a small model of diffusers, which EMAModel makes anew at every save."""
    diffusers: Any = importlib.import_module("diffusers")

    class Denoiser(diffusers.ModelMixin, diffusers.ConfigMixin):  # type: ignore[misc]
        @diffusers.configuration_utils.register_to_config  # type: ignore[untyped-decorator]
        def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
            self.drop = torch.nn.Dropout(dropout)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.last(self.drop(self.first(values)))

    return Denoiser


def ema_of_diffusers() -> Any:
    return importlib.import_module("diffusers.training_utils").EMAModel


def gpt2(dropout: float) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
                   **dict.fromkeys(names, dropout))
    )  # fmt: skip


class Run:
    """One run of a loop on one rank: ``mode`` is stock, patched or guarded."""

    def __init__(self, loop: Loop, folder: Path, mode: str) -> None:
        self.loop, self.folder = loop, folder
        self.records: list[str] = []
        self.fails_left = 0  # saves that the hook lets fail
        accelerate.state.AcceleratorState._reset_state(False)
        accelerate.state.GradientState._reset_state()
        kind = ckptfix.Accelerator if mode == "guarded" else accelerate.Accelerator
        self.accelerator = accelerator = kind(
            cpu=True,
            gradient_accumulation_steps=loop.accumulate,
            log_with=[Tracker()] if loop.tracker else None,
            dataloader_config=accelerate.DataLoaderConfiguration(
                use_stateful_dataloader=loop.stateful,
                use_seedable_sampler=loop.seedable,
                dispatch_batches=loop.dispatch,
            ),
            project_config=accelerate.utils.ProjectConfiguration(
                str(folder), automatic_checkpoint_naming=loop.is_automatic, total_limit=1
            ),
        )
        if loop.scaler:
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        if loop.tracker:
            accelerator.init_trackers("run")
        set_seed(3)
        models = [self.make_model() for _ in range(2 if loop.two_models else 1)]
        optimizer: Any = torch.optim.AdamW(
            [one for model in models for one in model.parameters()], lr=1e-2
        )
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        data: Any = Stream() if loop.iterable else Samples(loop.augment)
        options = {} if loop.iterable else {"shuffle": True}
        loader = DataLoader(data, batch_size=BATCH, num_workers=loop.workers, **options)
        self.loader, self.held_out, self.optimizer, self.scheduler, *self.models = (
            accelerator.prepare(
                loader, DataLoader(Samples(False), batch_size=BATCH), optimizer, scheduler, *models
            )
        )
        if loop.custom:
            accelerator.register_for_checkpointing(Counter(loop.custom))
        if loop.hook:
            accelerator.register_save_state_pre_hook(self.save_hook)
        if loop.hook == "ema":
            accelerator.register_load_state_pre_hook(self.load_hook)
        set_seed(11, device_specific=True)

    def make_model(self) -> Any:
        loop = self.loop
        if loop.model == "gpt2":
            return gpt2(loop.dropout)
        if loop.model == "diffusers":
            self.kind = diffusers_model()
            model = self.kind(dropout=loop.dropout)
            self.ema = ema_of_diffusers()(
                model.parameters(), decay=0.9, model_cls=self.kind, model_config=model.config
            )
            return model
        return torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.Dropout(loop.dropout),
            torch.nn.Linear(WIDTH, 1),
        )

    def save_hook(self, models: list[Any], weights: list[Any], output: str) -> None:
        hook, is_main = self.loop.hook, self.accelerator.is_main_process
        if hook == "ema" and is_main:  # as in train_unconditional.py of diffusers
            self.ema.save_pretrained(os.path.join(output, "unet_ema"))
            for model in models:
                model.save_pretrained(os.path.join(output, "unet"))
                weights.pop()
        elif hook == "main" and is_main:
            DRAWS["model"]()
        elif hook == "fails":
            DRAWS["torch"]()
            if self.fails_left:
                self.fails_left -= 1
                raise RuntimeError("this save fails")
        elif hook in DRAWS:
            DRAWS[hook]()

    def load_hook(self, models: list[Any], folder: str) -> None:
        self.ema.load_state_dict(
            ema_of_diffusers().from_pretrained(f"{folder}/unet_ema", self.kind).state_dict()
        )
        while models:
            model = models.pop()
            model.load_state_dict(self.kind.from_pretrained(folder, subfolder="unet").state_dict())

    def train(self, *, resume: bool, is_killed: bool) -> list[str]:
        """Train; return for each step the loss and the generators, and the weights at the end."""
        loop, accelerator = self.loop, self.accelerator
        step = 0
        self.fails_left = int(loop.hook == "fails" and not resume)
        if resume:
            step = FIRST_SAVE
            accelerator.load_state(None if loop.is_automatic else str(self.folder / "checkpoint"))
        length = SAMPLES // BATCH // accelerator.num_processes
        begin, used = divmod(step, length)
        for epoch in range(begin, EPOCHS):
            self.loader.set_epoch(epoch)
            rest = self.loader
            if epoch == begin and used and not loop.stateful:
                rest = accelerator.skip_first_batches(self.loader, used)
            for batch in rest:
                step += 1
                self.step(batch)
                if is_killed and step == FIRST_SAVE + 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step in (FIRST_SAVE, LAST_SAVE):
                    self.save()
            if loop.evaluate:
                self.evaluate()
        self.records.append(
            digest(*(one for model in self.models for one in model.state_dict().values()))
        )
        return self.records

    def step(self, batch: torch.Tensor) -> None:
        accelerator = self.accelerator
        before = generators()
        with accelerator.accumulate(*self.models):
            loss = sum(self.loss(model, batch) for model in self.models)
            accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        if self.loop.hook == "ema":
            self.ema.step(self.models[0].parameters())
        accelerator.log({"loss": loss.item()})
        self.records.append(f"{loss.item()!r} {before}")

    def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        if self.loop.model == "gpt2":
            tokens = (batch * 10).long().clamp(0, 49)
            return model(input_ids=tokens, labels=tokens).loss
        return model(batch).pow(2).mean()

    def evaluate(self) -> None:
        """Evaluate with numbers from the global generators, and a text that is drawn."""
        [model] = self.models
        model.eval()
        with torch.no_grad():
            for batch in self.held_out:
                self.loss(model, batch + 0.1 * torch.rand(WIDTH))
            if self.loop.model == "gpt2":
                tokens = self.accelerator.unwrap_model(model).generate(
                    torch.zeros(1, 2, dtype=torch.long), do_sample=True, max_new_tokens=4
                )
                self.records.append(f"{tokens.tolist()}")
        model.train()

    def save(self) -> None:
        accelerator, loop = self.accelerator, self.loop
        accelerator.wait_for_everyone()
        if loop.save_model:
            accelerator.save_model(self.models[0], str(self.folder / "model"))
        target = None if loop.is_automatic else str(self.folder / "checkpoint")
        for _ in range(1 + self.fails_left):
            try:
                accelerator.save_state(target, safe_serialization=loop.is_safetensors)
            except RuntimeError:
                assert loop.hook == "fails"
        accelerator.wait_for_everyone()


def digest(*values: Any) -> str:
    sha1 = hashlib.sha1(usedforsecurity=False)
    for value in values:
        is_tensor = isinstance(value, torch.Tensor)
        sha1.update(
            value.detach().contiguous().numpy().tobytes() if is_tensor else repr(value).encode()
        )
    return sha1.hexdigest()[:10]


def generators() -> str:
    """Return a digest of the states of the global generators."""
    return digest(torch.get_rng_state(), random.getstate(), repr(np.random.get_state(legacy=False)))


def train_loop(name: str, folder: Path, mode: str, *, resume: bool, is_killed: bool) -> list[str]:
    """Run a loop on this rank, and return what its steps were."""
    if mode == "patched":
        patch_accelerate()
    try:
        return Run(LOOPS[name], folder, mode).train(resume=resume, is_killed=is_killed)
    finally:
        unpatch_accelerate()


def train_trainer(
    name: str, folder: Path, mode: str, *, resume: bool, is_killed: bool
) -> list[str]:
    """Run a Trainer on this rank, and return what its steps were."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState

    variant, records = TRAINERS[name], []
    first = first_save(name, int(os.environ["WORLD_SIZE"]))

    def draw(*_: Any, **__: Any) -> None:
        DRAWS["model"](), DRAWS["numpy"]()

    class Draws(TrainerCallback, ExportableState):  # type: ignore[misc]
        def on_step_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            records.append(generators())
            if is_killed and state.global_step == first + 2:
                os.kill(os.getpid(), signal.SIGKILL)

        def state(self) -> dict[str, Any]:
            if variant.draws == "state":
                draw()
            return {"args": {}, "attributes": {}}

    class Saves(Trainer):  # type: ignore[misc]
        def _save(self, *arguments: Any, **options: Any) -> None:
            if variant.draws == "_save":
                draw()
            super()._save(*arguments, **options)

    if variant.draws.startswith("on_"):
        setattr(Draws, variant.draws, draw)
    accelerate.state.AcceleratorState._reset_state(False)
    accelerate.state.GradientState._reset_state()
    if mode == "patched":
        patch_accelerate()
    try:
        set_seed(3)
        arguments = TrainingArguments(
            str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH,
            save_strategy="steps", save_steps=first, eval_strategy="steps", eval_steps=3,
            report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True,
            gradient_accumulation_steps=variant.accumulate, dataloader_num_workers=variant.workers,
            save_total_limit=2,
        )  # fmt: skip
        trainer = Saves(gpt2(0.1), arguments, train_dataset=Tokens(variant.augment), eval_dataset=Tokens(False),
                        callbacks=[Draws()])  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=True if resume else None)
    finally:
        unpatch_accelerate()
    losses = [repr(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    begin = first if resume else 0  # a resumed run has the losses of the first one, too
    return [
        *map(" ".join, zip(losses[begin:], records, strict=True)),
        digest(*trainer.model.state_dict().values()),
    ]


def first_save(name: str, processes: int) -> int:
    """Return the step of the first save."""
    is_at_end = name in TRAINERS and TRAINERS[name].at_end
    return SAMPLES // BATCH // processes if is_at_end else FIRST_SAVE


class Tokens(Samples):
    def __getitem__(self, index: int) -> Any:
        tokens = (10 * super().__getitem__(index)).long().clamp(0, 49)
        return {"input_ids": tokens, "labels": tokens}


def compare(name: str, folder: Path, processes: int) -> dict[str, Any]:
    """Run a loop or a Trainer in every way, and return what differs from stock."""
    train = train_loop if name in LOOPS else train_trainer
    # Once, in the process that all others are forked from: an import takes seconds.
    if library := IMPORTS.get(LOOPS[name].model if name in LOOPS else "gpt2"):
        importlib.import_module(library)
    modes = ["stock", "patched", "guarded"] if name in LOOPS else ["stock", "patched"]
    is_automatic = name in LOOPS and LOOPS[name].is_automatic
    mode = "guarded" if is_automatic else random.choice(modes[1:])

    def work(rank: int, ways: dict[str, str]) -> None:
        for way, how in ways.items():
            checkpoints = folder / ("killed" if way == "resumed" else way)
            records = train(
                name, checkpoints, how, resume=way == "resumed", is_killed=way == "killed"
            )
            (folder / f"{way}.{rank}.json").write_text(json.dumps(records))

    parts = {
        "through": {one: one for one in modes},
        "killed": {"killed": mode},
        "resumed": {"resumed": mode},
    }
    statuses = {
        part: run_ranks(processes, partial(work, ways=ways)) for part, ways in parts.items()
    }
    differences = {}
    for rank in range(processes) if not any(statuses["through"] + statuses["resumed"]) else ():
        ways = [*modes, "resumed"]
        stock, *others = (json.loads((folder / f"{way}.{rank}.json").read_text()) for way in ways)
        for way, records in zip(ways[1:], others, strict=True):
            wanted = stock[first_save(name, processes) :] if way == "resumed" else stock
            if records != wanted:
                same = [one == two for one, two in zip(wanted, records, strict=False)]
                differences[f"{way}, rank {rank}"] = f"record {same.index(False)} of {len(wanted)}"
    return {"name": name, "mode": mode, "statuses": statuses, "differences": differences}


def main(folder: Path, counts: list[int], *names: str) -> None:
    """Run loops and Trainers on so many processes, and print what differs."""
    for name in names or (*LOOPS, *TRAINERS):
        for processes in counts:
            place = folder / name.replace(" ", "-") / str(processes)
            place.mkdir(parents=True)
            line = {"processes": processes, **compare(name, place, processes)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(int, sys.argv[2].split(","))), *sys.argv[3:])
