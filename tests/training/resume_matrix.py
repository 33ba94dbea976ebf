"""Ways to save and resume a run: each is trained through, saving on the way, and resumed in
processes of its own.

``python -m tests.training.resume_matrix FOLDER [--stock] [NAME ...]`` runs them on two ranks, with
the guarded Accelerator or with stock accelerate, and prints for each the first step and state that
differ.
"""

import hashlib
import importlib
import itertools
import json
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
from accelerate.tracking import GeneralTracker
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ckptfix
from tests.training.ranks import run_ranks

skip_first_batches = accelerate.skip_first_batches  # imported before anything is guarded

SAMPLES, BATCH, EPOCHS = 40, 2, 3
PARTS = ("batch", "generators", "lr", "custom", "step", "scaler", "loss", "weights", "moments")


@dataclass(frozen=True)
class Variant:
    """A way to train, save and resume. ``at``: optimizer steps, or batches of an accumulation,
    before the save.
    """

    at: int
    shuffle: bool = False
    seedable: bool = False
    set_epoch: bool = False
    generator: bool = False
    resume: str = "skip"
    dropout: float = 0.0
    augment: str = ""
    workers: int = 0
    persistent: bool = False
    data: str = "map"
    dispatch: bool | None = None
    split: bool = False
    even: bool = True
    drop_last: bool = False
    samples: int = SAMPLES
    accumulate: int = 1
    sync: bool = True
    custom: bool = False
    scaler: bool = False
    hash_order: bool = False
    unprepared: bool = False
    in_loop: bool = False
    epoch_of_save: bool = False
    second: str = ""
    anew: bool = False
    optimizers: int = 1
    compiled: bool = False
    expect: str = ""
    is_cautious: bool = False
    # What draws random numbers, or makes them, while the run saves.
    hook: str = ""
    draws: str = ""
    model: str = "layers"
    tracker: bool = False
    save_model: bool = False
    safetensors: bool = True
    automatic: bool = False


V = Variant
FIRST = {
    "noshuf_end0": V(10),
    "noshuf_mid0": V(4),
    "noshuf_drop_mid0": V(4, dropout=0.5),
    "noshuf_drop_end0": V(10, dropout=0.5),
    "aug_mid0": V(4, augment="torch"),
    "aug_end0": V(10, augment="torch"),
    "shuf_mid0": V(4, shuffle=True),
    "shuf_end0": V(10, shuffle=True),
    "shuf_mid1": V(14, shuffle=True),
    "shuf_gen_mid1": V(14, shuffle=True, generator=True),
    "shuf_end_inloop0": V(10, shuffle=True, in_loop=True, epoch_of_save=True),
    "seed_mid0": V(4, shuffle=True, seedable=True),
    "seed_end0": V(10, shuffle=True, seedable=True),
    "seed_mid1": V(14, shuffle=True, seedable=True),
    "seed_mid1_setep": V(14, shuffle=True, seedable=True, set_epoch=True),
    "seed_drop_mid1_setep": V(14, shuffle=True, seedable=True, set_epoch=True, dropout=0.5),
    "cont_mid1_setep": V(14, shuffle=True, seedable=True, set_epoch=True, resume="continue"),
    "sf_noshuf_mid0": V(4, resume="stateful"),
    "sf_shuf_mid0": V(4, resume="stateful", shuffle=True),
    "sf_shuf_end0": V(10, resume="stateful", shuffle=True),
    "sf_shuf_mid1": V(14, resume="stateful", shuffle=True),
    "sf_seed_mid1": V(14, resume="stateful", shuffle=True, seedable=True),
    "sf_seed_mid1_setep": V(14, resume="stateful", shuffle=True, seedable=True, set_epoch=True),
    "sf_shuf_end_inloop0": V(10, resume="stateful", shuffle=True, in_loop=True),
    "sf_w2_mid0": V(4, resume="stateful", workers=2, is_cautious=True),
    "sf_w2_shuf_mid1": V(14, resume="stateful", shuffle=True, workers=2),
    "w2_shuf_mid1": V(14, shuffle=True, workers=2),
    "w2_aug_mid0": V(4, augment="torch", workers=2),
    "it_mid0": V(4, data="iterable"),
    "it_torch_mid1": V(14, data="iterable torch"),
    "it_gen_mid1": V(14, data="iterable generator"),
    "it_epoch_mid1": V(14, data="iterable epoch"),
    "it_sf_mid0": V(4, data="iterable", resume="stateful"),
    "it_sf_gen_mid1": V(14, data="iterable generator", resume="stateful"),
    "disp_mid0": V(4, dispatch=True),
    "disp_shuf_mid0": V(4, dispatch=True, shuffle=True),
    "disp_shuf_mid1": V(14, dispatch=True, shuffle=True),
    "disp_seed_mid1": V(14, dispatch=True, shuffle=True, seedable=True),
    "disp_sf_shuf_mid0": V(4, dispatch=True, shuffle=True, resume="stateful"),
    "disp_sf_noshuf_mid0": V(4, dispatch=True, resume="stateful"),
    "disp_it_mid0": V(4, dispatch=True, data="iterable"),
    "disp_split_mid0": V(4, dispatch=True, split=True),
    "accum4_end0": V(10, accumulate=4),
    "accum4_mid0_whole": V(4, accumulate=4),
    "accum4_mid0_cut": V(6, accumulate=4),
    "cust_rank": V(4, custom=True),
    "scaler": V(4, scaler=True),
    "paramorder": V(4, hash_order=True),
    "sched_unprepared": V(4, unprepared=True),
}
"""The 49 ways of which stock accelerate 1.15.0 resumes 4 exactly."""

MORE = {
    "w2_aug_shuf_mid1": V(14, shuffle=True, augment="torch", workers=2),
    "w2_aug_odd": V(3, augment="all", workers=2),
    "w3_aug_first": V(1, augment="all", workers=3),
    "w2_aug_held": V(14, shuffle=True, augment="held", workers=2),
    "w2_aug_end0": V(10, augment="torch", workers=2),
    "w2_aug_end_inloop0": V(10, augment="torch", workers=2, in_loop=True),
    "w2_keep_aug_mid1": V(14, shuffle=True, augment="all", workers=2, persistent=True),
    "w2_keep_aug_end0": V(10, shuffle=True, augment="all", workers=2, persistent=True),
    "w2_keep_aug_mid0": V(3, shuffle=True, augment="held", workers=2, persistent=True),
    "w2_keep_cont_mid1": V(14, augment="all", workers=2, persistent=True, resume="continue"),
    "w2_aug_cont": V(4, augment="torch", workers=2, resume="continue"),
    "w2_aug_disp": V(4, augment="torch", workers=2, dispatch=True),
    "w2_aug_sf": V(14, augment="torch", workers=2, resume="stateful", shuffle=True),
    "w2_it_mid0": V(4, data="iterable torch", workers=2, dispatch=False),
    "w2_it_epoch": V(24, data="iterable epoch", workers=2, dispatch=False, set_epoch=True),
    "aug_all_mid1": V(14, shuffle=True, augment="all"),
    "aug_held_mid1": V(14, shuffle=True, augment="held"),
    "it_epoch_setep": V(14, data="iterable epoch", set_epoch=True),
    "it_shard_gen": V(14, data="iterable generator", dispatch=False),
    "it_shard_epoch": V(14, data="iterable epoch", dispatch=False, set_epoch=True),
    "it_rest": V(14, data="iterable torch", resume="rest"),
    "sf_inloop_setep": V(
        10, resume="stateful", shuffle=True, in_loop=True, epoch_of_save=True, set_epoch=True
    ),
    "sf_w2_shuf_mid0": V(4, resume="stateful", shuffle=True, workers=2, is_cautious=True),
    "sf_w2_aug_mid0": V(
        4,
        resume="stateful",
        augment="torch",
        workers=2,
        expect="generators of its workers are not known",
    ),
    "sf_first": V(1, resume="stateful", shuffle=True, dropout=0.5),
    "sf_end1": V(20, resume="stateful", shuffle=True, augment="torch"),
    "shuf_inloop": V(10, shuffle=True, in_loop=True, dropout=0.5),
    "shuf_first": V(1, shuffle=True, dropout=0.5),
    "cont_aug": V(4, shuffle=True, augment="all", dropout=0.5, resume="continue"),
    "cont_first": V(1, shuffle=True, augment="all", resume="continue"),
    "rest_mid1": V(14, shuffle=True, augment="torch", dropout=0.5, resume="rest"),
    "rest_end0": V(10, shuffle=True, dropout=0.5, resume="rest"),
    "rest_inloop": V(10, shuffle=True, dropout=0.5, resume="rest", in_loop=True),
    "rest_disp": V(14, shuffle=True, augment="torch", resume="rest", dispatch=True),
    "rest_sf": V(14, shuffle=True, resume="rest stateful"),
    "function_mid1": V(14, shuffle=True, augment="torch", dropout=0.5, resume="function"),
    "function_disp": V(4, shuffle=True, resume="function", dispatch=True),
    "disp_aug_mid1": V(14, shuffle=True, augment="all", dropout=0.5, dispatch=True),
    "disp_uneven": V(4, shuffle=True, samples=45, dispatch=True),
    "disp_end0": V(10, shuffle=True, augment="torch", dispatch=True),
    "uneven_mid1": V(15, shuffle=True, samples=45),
    "uneven_end0": V(12, shuffle=True, samples=45),
    "uneven_inloop": V(12, shuffle=True, samples=45, in_loop=True),
    "even_off": V(4, shuffle=True, samples=44, even=False),
    "drop_last": V(14, shuffle=True, samples=45, drop_last=True, augment="torch"),
    "split": V(14, shuffle=True, split=True, augment="torch"),
    "seed_aug": V(14, shuffle=True, seedable=True, augment="all", dropout=0.5),
    "seed_inloop": V(10, shuffle=True, seedable=True, in_loop=True),
    "seed_rest": V(14, shuffle=True, seedable=True, resume="rest"),
    "two_loaders": V(14, shuffle=True, augment="torch", second="zip"),
    "two_loaders_sf": V(14, shuffle=True, resume="stateful", second="zip"),
    "eval_between": V(14, shuffle=True, dropout=0.5, second="between"),
    "eval_between_end": V(10, shuffle=True, dropout=0.5, second="between"),
    "eval_within": V(14, shuffle=True, augment="torch", dropout=0.5, second="within"),
    "eval_sf": V(14, shuffle=True, dropout=0.5, second="between", resume="stateful"),
    "anew": V(14, shuffle=True, augment="torch", anew=True),
    "accum_cut_nosync": V(6, accumulate=4, sync=False, shuffle=True),
    "accum_end_nosync": V(10, accumulate=4, sync=False, shuffle=True),
    "accum_cut_drop": V(17, accumulate=4, shuffle=True, dropout=0.5),
    "scaler_accum": V(6, scaler=True, accumulate=4, dropout=0.5),
    "two_optimizers": V(14, shuffle=True, optimizers=2),
    "two_unprepared": V(4, optimizers=2, unprepared=True),
    "custom_mid1": V(14, shuffle=True, custom=True, dropout=0.5),
    "compiled": V(14, shuffle=True, dropout=0.5, compiled=True),
    "no_skip": V(4, shuffle=True, resume="none", expect="are used again"),
    "no_skip_first": V(1, shuffle=True, resume="none", expect="batch 1 of this pass is used again"),
    "wrong_count": V(4, shuffle=True, resume="one less", expect="the script skips to batch 4"),
}
"""What the 49 leave out. ``expect``: words of the warning where a script does not continue its run.

``is_cautious``: a warning that the run may differ, where it would only with augmentation.
"""

DRAWING = {
    "plain": V(4, shuffle=True),
    "dropout": V(4, shuffle=True, dropout=0.5),
    "augmentation": V(4, shuffle=True, augment="all", dropout=0.5),
    "workers": V(4, shuffle=True, workers=2, augment="all", dropout=0.5),
    "accumulation": V(4, shuffle=True, accumulate=4, dropout=0.5),
    "dispatcher": V(4, shuffle=True, dispatch=True, dropout=0.5, hook="torch"),
    "stateful": V(4, shuffle=True, resume="stateful", dropout=0.5, hook="torch"),
    "seedable": V(4, shuffle=True, seedable=True, augment="all", hook="torch"),
    "iterable": V(4, data="iterable torch", dropout=0.5, hook="torch"),
    "scaler": V(4, shuffle=True, scaler=True, dropout=0.5, hook="torch"),
    "pickles": V(4, shuffle=True, safetensors=False, dropout=0.5, hook="model"),
    "automatic names": V(4, shuffle=True, automatic=True, augment="all", dropout=0.5, hook="model"),
    "ema": V(4, shuffle=True, model="diffusers", hook="ema", dropout=0.5),
    "ema, workers": V(
        4, shuffle=True, model="diffusers", hook="ema", workers=2, augment="all", accumulate=2
    ),
    "hook of torch": V(4, shuffle=True, hook="torch", augment="all", dropout=0.5),
    "hook of numpy": V(4, shuffle=True, hook="numpy", augment="all"),
    "hook of python": V(4, shuffle=True, hook="python", augment="all"),
    "hook that makes a model": V(4, shuffle=True, hook="model", augment="all", dropout=0.5),
    "hook on the main process": V(4, shuffle=True, hook="main", augment="all", dropout=0.5),
    "hook that seeds": V(4, shuffle=True, hook="seeds", dropout=0.5, workers=2, augment="all"),
    "hook that fails once": V(4, shuffle=True, hook="fails", dropout=0.5, augment="all"),
    "custom object": V(4, shuffle=True, draws="torch", dropout=0.5, augment="all"),
    "custom object and hook": V(
        4, shuffle=True, draws="numpy", hook="torch", augment="all", accumulate=2
    ),
    "tracker": V(4, shuffle=True, tracker=True, dropout=0.5, hook="torch"),
    "save_model": V(4, shuffle=True, save_model=True, dropout=0.5, hook="torch"),
    "evaluation": V(4, shuffle=True, second="between", dropout=0.5, hook="model"),
    "generation": V(4, shuffle=True, model="gpt2", second="between", dropout=0.1, hook="model"),
}
"""Runs whose saves, evaluations or objects draw random numbers: ``equal_runs`` compares them with
those of stock accelerate, and resumes them.
"""

ALL = FIRST | MORE | DRAWING


class Mapped(Dataset):  # type: ignore[misc]
    def __init__(self, samples: int, augment: str) -> None:
        self.samples, self.augment = samples, augment
        self.noise = [
            torch.Generator().manual_seed(8),
            np.random.default_rng(9),
            random.Random(10),
        ]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        value = torch.full((8,), index / self.samples)
        if self.augment in ("torch", "all"):
            value = value + 0.1 * torch.rand(8)
        if self.augment == "all":
            value = value + 0.1 * random.random() + 0.1 * float(np.random.normal())
        if self.augment == "held":
            first, second, third = self.noise
            value = value + 0.1 * torch.rand(8, generator=first)
            value = value + 0.1 * float(second.normal()) + 0.1 * third.random()
        return index, value


class Streamed(IterableDataset):  # type: ignore[misc]
    def __init__(self, kind: str) -> None:
        self.kind = kind
        if kind == "generator":
            self.generator = torch.Generator().manual_seed(3)

    def order(self) -> Any:
        if self.kind == "generator":
            return torch.randperm(SAMPLES, generator=self.generator).tolist()
        return (torch.randperm(SAMPLES) if self.kind == "torch" else torch.arange(SAMPLES)).tolist()

    def __iter__(self) -> Iterator[Any]:
        for index in self.order():
            yield index, torch.full((8,), index / SAMPLES)


class StreamedByEpoch(Streamed):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> Any:
        return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class Custom:
    """A registered object; it draws whenever it is asked for its state, if it is told to."""

    def __init__(self, rank: int, draws: str) -> None:
        self.rank, self.draws = rank, draws
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        if self.draws:
            DRAWS[self.draws]()
        return {"rank": self.rank, "steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rank, self.steps = state["rank"], state["steps"]


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
    "model": lambda: torch.nn.Linear(8, 8).weight.sum().item(),
    "seeds": lambda: float(torch.manual_seed(7).initial_seed()),
}


def diffusers_model() -> Any:
    """Return the class of a small model of diffusers, which EMAModel makes anew at every save."""
    diffusers: Any = importlib.import_module("diffusers")

    class Denoiser(diffusers.ModelMixin, diffusers.ConfigMixin):  # type: ignore[misc]
        @diffusers.configuration_utils.register_to_config  # type: ignore[untyped-decorator]
        def __init__(self, dropout: float = 0.0) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
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


def digest(*values: Any) -> str:
    found = hashlib.sha1()
    for value in values:
        is_tensor = isinstance(value, torch.Tensor)
        found.update(
            value.detach().contiguous().numpy().tobytes() if is_tensor else repr(value).encode()
        )
    return found.hexdigest()[:10]


def generators() -> str:
    return digest(torch.get_rng_state(), random.getstate(), repr(np.random.get_state(legacy=False)))


class Run:
    """One run of a variant on one rank; ``resumes``: from what the other one saved."""

    def __init__(self, name: str, folder: Path, *, resumes: bool, stock: bool) -> None:
        self.variant = v = ALL[name]
        self.folder = folder / name
        self.resumes = resumes
        # Saves that the hook lets fail.
        self.fails_left = int(v.hook == "fails" and not resumes)
        accelerate.state.AcceleratorState._reset_state(False)
        accelerate.state.GradientState._reset_state()
        kind = accelerate.Accelerator if stock else ckptfix.Accelerator
        plugin = accelerate.utils.GradientAccumulationPlugin(
            num_steps=v.accumulate, sync_with_dataloader=v.sync
        )
        self.accelerator = kind(
            cpu=True,
            gradient_accumulation_plugin=plugin,
            dataloader_config=accelerate.DataLoaderConfiguration(
                use_seedable_sampler=v.seedable,
                use_stateful_dataloader="stateful" in v.resume,
                dispatch_batches=v.dispatch,
                split_batches=v.split,
                even_batches=v.even,
            ),
            dynamo_backend="eager" if v.compiled else None,
            log_with=[Tracker()] if v.tracker else None,
            project_config=accelerate.utils.ProjectConfiguration(
                str(self.folder), automatic_checkpoint_naming=v.automatic
            ),
        )
        if v.tracker:
            self.accelerator.init_trackers("run")
        if v.scaler:
            self.accelerator.scaler = torch.amp.GradScaler(
                "cpu", init_scale=1024.0, growth_interval=3
            )
        set_seed(1)
        self.prepare()
        set_seed(100 + self.accelerator.process_index)

    def loader(self, samples: int = 0) -> Any:
        v = self.variant
        data: Any = Mapped(samples or v.samples, v.augment)
        options: dict[str, Any] = {"shuffle": v.shuffle}
        if v.data != "map":
            kind = v.data.partition(" ")[2]
            data = StreamedByEpoch(kind) if kind == "epoch" else Streamed(kind)
            options = {}
        if v.generator:
            options["generator"] = torch.Generator().manual_seed(7)
        if v.persistent:
            options["persistent_workers"] = True
        size = BATCH * (2 if v.split else 1)
        return DataLoader(
            data, batch_size=size, num_workers=v.workers, drop_last=v.drop_last, **options
        )

    def make_model(self) -> Any:
        v = self.variant
        if v.model == "gpt2":
            return gpt2(v.dropout)
        if v.model == "diffusers":
            self.kind = diffusers_model()
            model = self.kind(dropout=v.dropout)
            self.ema = ema_of_diffusers()(
                model.parameters(), decay=0.9, model_cls=self.kind, model_config=model.config
            )
            return model
        return torch.nn.Sequential(
            torch.nn.Linear(8, 8),
            torch.nn.Dropout(v.dropout),
            torch.nn.Linear(8, 8),
            torch.nn.Linear(8, 1),
        )

    def prepare(self) -> None:
        v, accelerator = self.variant, self.accelerator
        layers = self.make_model()
        self.parameters = dict(layers.named_parameters())
        names = list(set(self.parameters)) if v.hash_order else list(self.parameters)
        parts = [names[0::2], names[1::2]] if v.optimizers == 2 else [names]
        raw = [
            torch.optim.AdamW([self.parameters[name] for name in part], lr=1e-2) for part in parts
        ]
        self.raw = raw
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(one, lambda step, n=number: 1 / (1 + n + step))
            for number, one in enumerate(raw)
        ]
        set_seed(5, device_specific=True)
        self.loaders = [self.loader()]
        if v.second:
            self.loaders.append(self.loader(SAMPLES if v.second == "zip" else 12))
        self.loaders = [accelerator.prepare(one) for one in self.loaders]
        self.model = accelerator.prepare(layers)
        self.optimizers = [accelerator.prepare(one) for one in raw]
        self.schedulers = self.schedules
        if not v.unprepared:
            self.schedulers = [accelerator.prepare(one) for one in self.schedules]
        self.custom = Custom(accelerator.process_index, v.draws)
        if v.custom or v.draws:
            accelerator.register_for_checkpointing(self.custom)
        if v.hook:
            accelerator.register_save_state_pre_hook(self.save_hook)
        if v.hook == "ema":
            accelerator.register_load_state_pre_hook(self.load_hook)

    def save_hook(self, models: list[Any], weights: list[Any], output: str) -> None:
        hook, is_main = self.variant.hook, self.accelerator.is_main_process
        if hook == "ema" and is_main:  # as in train_unconditional.py of diffusers
            self.ema.save_pretrained(f"{output}/unet_ema")
            for model in models:
                model.save_pretrained(f"{output}/unet")
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
        ema = ema_of_diffusers().from_pretrained(f"{folder}/unet_ema", self.kind)
        self.ema.load_state_dict(ema.state_dict())
        while models:
            saved = self.kind.from_pretrained(folder, subfolder="unet")
            models.pop().load_state_dict(saved.state_dict())

    def run(self) -> dict[int, Any]:
        v, accelerator = self.variant, self.accelerator
        self.steps: dict[int, Any] = {}
        length = (
            len(self.loaders[0]) if v.data == "map" else SAMPLES // (2 * BATCH) * max(1, v.workers)
        )
        step = first = used = 0
        if self.resumes:
            accelerator.load_state(self.target)
            step = v.at
            first, used = divmod(v.at, length)
            if v.epoch_of_save:
                first, used = 0, length
        for epoch in range(first, EPOCHS):
            if v.anew and epoch:
                self.loaders[0] = accelerator.prepare(self.loader())
            if v.set_epoch:
                self.loaders[0].set_epoch(epoch)
            passed_over = used if v.resume == "continue" else 0
            for batch in self.rest(used):
                if passed_over:
                    passed_over -= 1
                    continue
                step += 1
                self.train(step, epoch, batch)
                if step == v.at and not self.resumes and (step % length or v.in_loop):
                    self.save()
            used = 0
            if v.second == "between":
                self.evaluate()
            if step == v.at and not step % length and not self.resumes and not v.in_loop:
                self.save()
        accelerator.free_memory()
        return self.steps

    def rest(self, used: int) -> Any:
        loader, how = self.loaders[0], self.variant.resume
        if "rest" in how and self.resumes:
            loader = self.accelerator.resume_dataloader(loader)
        elif used and how == "skip":
            loader = self.accelerator.skip_first_batches(loader, used)
        elif used and how == "one less":
            loader = self.accelerator.skip_first_batches(loader, used - 1)
        elif used and how == "function":
            loader = skip_first_batches(loader, used)
        if self.variant.second != "zip":
            return loader
        other = self.loaders[1]
        if used and how == "skip":
            other = self.accelerator.skip_first_batches(other, used)
        return zip(loader, other, strict=True)

    def train(self, step: int, epoch: int, batch: Any) -> None:
        v, accelerator = self.variant, self.accelerator
        (ids, values), *others = batch if v.second == "zip" else [batch]
        before = generators()
        with accelerator.accumulate(self.model):
            loss = self.loss(values) + next(iter(self.parameters.values())).abs().mean()
            for other in others:
                loss = loss + self.loss(other[1])
            accelerator.backward(loss)
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        self.custom.steps += 1
        if v.hook == "ema":
            self.ema.step(self.model.parameters())
        accelerator.log({"loss": loss.item()})
        moments = [
            one
            for optimizer in self.raw
            for name in self.parameters.values()
            for _, one in sorted(optimizer.state.get(name, {}).items())
        ]
        self.steps[step] = {
            "ids": ids.tolist(),
            "batch": digest(ids, values, *(part for other in others for part in other)),
            "generators": before,
            "loss": loss.item(),
            "weights": digest(*self.parameters.values()),
            "moments": digest(*moments),
            "lr": [one.get_last_lr() for one in self.schedules],
            "step": accelerator.step,
            "custom": [self.custom.rank, self.custom.steps] if v.custom else [],
            "scaler": accelerator.scaler.state_dict() if v.scaler else {},
        }
        if v.second == "within" and step % 3 == 0:
            self.evaluate()

    def loss(self, values: torch.Tensor) -> torch.Tensor:
        if self.variant.model == "gpt2":
            tokens = (values * 10).long().clamp(0, 49)
            return self.model(input_ids=tokens, labels=tokens).loss
        return self.model(values).pow(2).mean()

    def evaluate(self) -> None:
        """Evaluate; the runs that draw do so with numbers from the global generators, too."""
        self.model.eval()
        with torch.no_grad():
            for _, values in self.loaders[1]:
                self.loss(values + 0.1 * torch.rand(8) if self.variant.hook else values)
            if self.variant.model == "gpt2":
                self.accelerator.unwrap_model(self.model).generate(
                    torch.zeros(1, 2, dtype=torch.long), do_sample=True, max_new_tokens=4
                )
        self.model.train()

    @property
    def target(self) -> str | None:
        return None if self.variant.automatic else str(self.folder)

    def save(self) -> None:
        v, accelerator = self.variant, self.accelerator
        accelerator.wait_for_everyone()
        if v.save_model:
            accelerator.save_model(self.model, f"{self.folder}-model")
        for _ in range(1 + self.fails_left):
            try:
                accelerator.save_state(self.target, safe_serialization=v.safetensors)
            except RuntimeError:
                assert v.hook == "fails"
        accelerator.wait_for_everyone()


def run_all(
    folder: Path, names: list[str], *, resumes: bool, stock: bool, ranks: int = 2
) -> list[int]:
    """Run variants on two ranks, and write of each rank what its steps were."""

    def work(rank: int) -> None:
        for name in names:
            found: dict[str, Any] = {"steps": {}, "error": "", "warned": []}
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    found["steps"] = Run(name, folder, resumes=resumes, stock=stock).run()
                except Exception:
                    found["error"] = traceback.format_exc()
            found["warned"] = [str(one.message) for one in warned if "ckptfix" in str(one.message) or "bit-exact" in
                               str(one.message) or "batch" in str(one.message)]  # fmt: skip
            path = folder / f"{name}.{'resumed' if resumes else 'through'}.{rank}.json"
            path.write_text(json.dumps(found))

    return run_ranks(ranks, work, patience=60 + 8.0 * len(names))


def first_difference(folder: Path, name: str, rank: int) -> str:
    """Return the first step and state in which a resumed run differs, "" where it continues bit for
    bit.
    """
    through, resumed = (
        json.loads((folder / f"{name}.{phase}.{rank}.json").read_text())
        for phase in ("through", "resumed")
    )
    for phase in (through, resumed):
        if phase["error"]:
            return str(phase["error"].strip().splitlines()[-1])
    at = ALL[name].at
    expected = {int(step): values for step, values in through["steps"].items() if int(step) > at}
    found = {int(step): values for step, values in resumed["steps"].items()}
    for step in sorted(expected):
        if step not in found:
            return f"step {step}: missing"
        for part in PARTS:
            if expected[step][part] != found[step][part]:
                shown = "ids" if part == "batch" else part
                return f"step {step}: {part}: {expected[step][shown]} != {found[step][shown]}"
    return f"{len(found) - len(expected)} steps too many" if len(found) > len(expected) else ""


def warned(folder: Path, name: str, rank: int) -> list[str]:
    """Return the warnings of a resumed run."""
    return list(json.loads((folder / f"{name}.resumed.{rank}.json").read_text())["warned"])


def main() -> None:
    stock = "--stock" in sys.argv
    folder, *names = [one for one in sys.argv[1:] if not one.startswith("--")]
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    names = names or [*FIRST, *MORE]
    for resumes in (False, True):
        print(run_all(root, names, resumes=resumes, stock=stock))
    exact = 0
    for name in names:
        differences = [first_difference(root, name, rank) for rank in range(2)]
        exact += not any(differences)
        said = list(
            dict.fromkeys(itertools.chain(*(warned(root, name, rank) for rank in range(2))))
        )
        print(
            f"{name:22} "
            f"{'exact' if not any(differences) else ' | '.join(dict.fromkeys(differences))} "
            f"{said or ''}"
        )
    print(f"{exact} of {len(names)} exact")


if __name__ == "__main__":
    main()
