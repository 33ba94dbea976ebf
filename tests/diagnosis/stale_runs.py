"""Little runs of the Trainer and of accelerate, in which no save has bytes of another, though weights
or optimizers of two may be equal.
"""

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.diagnosis.builders import new_accelerator
from tests.diagnosis.test_trainer_states import trainer_in, with_lora

Tensors = dict[str, torch.Tensor]

WEIGHTS, WEIGHTS_1 = "model.safetensors", "model_1.safetensors"
OPTIMIZER, OPTIMIZER_1, SCHEDULER = "optimizer.bin", "optimizer_1.bin", "scheduler.bin"
OF_TRAINER = "optimizer.pt"


def runs(output: Path, *, shards: bool = False, frozen: str = "-", **options: Any) -> Path:
    """Train four steps with the Trainer, and save after each.

    ``shards``: several files a save. ``frozen``: in the names of the parameters that stay.
    """
    given = {"lr_scheduler_type": "constant", "learning_rate": 1e-3, "max_grad_norm": 0.0}
    trainer = trainer_in(output, **{**given, **options})
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    save = trainer.model.save_pretrained
    if shards:
        trainer.model.save_pretrained = partial(_in_shards, save)
    trainer.args.save_steps = 1
    trainer.train()
    return output


def _in_shards(save: Callable[..., Any], *args: Any, **options: Any) -> None:
    save(*args, **{**options, "max_shard_size": "1KB"})


def net(width: int = 4, norm: Any = torch.nn.LayerNorm) -> torch.nn.Module:
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(16, 16), norm(16), torch.nn.ReLU(), linear(16, width))


def adam(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **options})


def sgd(model: torch.nn.Module, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


class Script:
    """A script of accelerate: models, each with its optimizer, and others that none trains.

    ``trained``: returns the places of the models that make steps before the save of a number.
    ``before_save``: is called with that number. ``moves``: schedules move with the steps.
    """

    def __init__(
        self,
        *models: torch.nn.Module,
        make: Callable[[torch.nn.Module], torch.optim.Optimizer] = adam,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        others: tuple[torch.nn.Module, ...] = (),
        trained: Callable[[int], tuple[int, ...]] = lambda number: (0, 1),
        before_save: Callable[["Script", int], object] = lambda script, number: None,
        steps: int = 2,
        moves: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.models = [*models, *others]
        self.optimizers = [make(model) for model in models]
        self.schedules = [schedule(optimizer) for optimizer in self.optimizers] if schedule else []
        self.trained, self.before_save, self.options = trained, before_save, options
        self.steps, self.moves = steps, moves

    def save(self, output: Path, *numbers: int) -> Path:
        """Make steps before each number, and save."""
        for number in numbers or (1, 2, 3, 4):
            for _ in range(self.steps):
                self.step(number)
            self.before_save(self, number)
            accelerator = new_accelerator()
            accelerator.prepare(*self.models, *self.optimizers, *self.schedules)
            accelerator.save_state(str(output / f"checkpoint_{number}"), **self.options)
        return output

    def step(self, number: int) -> None:
        """Train models for a step, and move their schedules."""
        for at in self.trained(number)[: len(self.optimizers)]:
            dtype = next(self.models[at].parameters()).dtype
            inputs = torch.randn(8, 16).to(dtype)
            self.models[at](inputs).float().square().mean().backward()
            self.optimizers[at].step()
            self.optimizers[at].zero_grad()
            if self.schedules and self.moves:
                self.schedules[at].step()


def of_two(output: Path, width: int = 8, **options: Any) -> Path:
    """Train a generator and a discriminator, each with its optimizer."""
    return Script(net(), net(width), **options).save(output)


def with_batch_norm(output: Path) -> Path:
    """Train a generator alone before the third save: its batches change the discriminator's
    averages.
    """
    models = net(), net(8, torch.nn.BatchNorm1d)
    return Script(
        *models,
        trained=lambda number: (0, 1) if number != 3 else (0,),
        before_save=lambda script, number: models[1](torch.randn(8, 16)),
    ).save(output)


def saved_by_hooks(output: Path) -> Path:
    """Save as hooks of diffusers do: the trained ``unet`` with its average, and a frozen ``vae``."""
    torch.manual_seed(0)
    unet, vae = torch.nn.Linear(30, 40), torch.nn.Linear(30, 20)
    optimizer = adam(unet)
    average = {key: value.clone() for key, value in unet.state_dict().items()}
    for number in range(1, 5):
        unet(torch.rand(2, 30)).sum().backward()
        optimizer.step()
        weights = unet.state_dict()
        average = {key: 0.9 * value + 0.1 * weights[key] for key, value in average.items()}
        folder = output / f"checkpoint_{number}"
        for name, tensors in {
            "unet": weights,
            "vae": vae.state_dict(),
            "unet_ema": average,
        }.items():
            save_model(folder / name, tensors, is_average=name == "unet_ema")
        torch.save(optimizer.state_dict(), folder / OPTIMIZER)
        torch.save({"step": number}, folder / "random_states_0.pkl")
    return output


UNET = "unet/diffusion_pytorch_model.safetensors"


def save_model(folder: Path, tensors: Tensors, *, is_average: bool) -> None:
    folder.mkdir(parents=True)
    save_file(tensors, folder / Path(UNET).name)
    of_average = {"decay": 0.9, "optimization_step": 4} if is_average else {}
    config = {"_class_name": "UNet2DModel", "_diffusers_version": "0.36.0", **of_average}
    (folder / "config.json").write_text(json.dumps(config))


def of_fsdp(output: Path) -> Path:
    model = net()
    optimizer = adam(model)
    for number in range(1, 5):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        folder = output / f"checkpoint_{number}"
        states = {"pytorch_model_fsdp_0": model.state_dict(), "optimizer_0": optimizer.state_dict()}
        for name, state in states.items():
            dcp.save({"state": state}, checkpoint_id=folder / name, no_dist=True)
        torch.save({}, folder / "random_states_0.pkl")
    return output


def of_lora(output: Path) -> Path:
    with_lora(trainer_in(output, learning_rate=1e-3)).train()
    return output


def of_norms(dtype: torch.dtype) -> Callable[[Path], Path]:
    """Train a norm, which begins with ones: in bfloat16 a step of 1e-3 changes none."""

    def train(output: Path) -> Path:
        norm = torch.nn.LayerNorm(16, bias=False).to(dtype)
        return Script(norm, make=partial(adam, weight_decay=0.0)).save(output)

    return train


RUNS: dict[str, Callable[[Path], Path]] = {
    "trainer": runs,
    "linear": partial(runs, lr_scheduler_type="linear"),
    "shards": partial(runs, shards=True),
    "lora": of_lora,
    "scheduled": lambda output: Script(net(), schedule=constant).save(output),
    "unscheduled": lambda output: Script(net()).save(output),
    "torch": lambda output: Script(net(), safe_serialization=False).save(output),
    "sgd": lambda output: Script(net(), make=sgd, schedule=constant).save(output),
    "momentum": lambda output: Script(
        net(), make=partial(sgd, momentum=0.9), schedule=constant
    ).save(output),
    "bf16": lambda output: Script(net().bfloat16(), make=partial(adam, lr=1e-5)).save(output),
    "norms": of_norms(torch.float32),
    "two": of_two,
    "two equal": partial(of_two, width=4),
    "two in torch": partial(of_two, safe_serialization=False),
    "batch norm": with_batch_norm,
    "hooks": saved_by_hooks,
    "fsdp": of_fsdp,
}


def with_skipped_steps(output: Path, *, moves_anyway: bool = False) -> Path:
    """Save as the Trainer does in fp16, whose scale of the gradients is too large for two of four
    steps. ``moves_anyway``: the script moves its schedule, too, when a step is skipped.
    """
    model = torch.nn.Linear(3, 1)
    optimizer = adam(model)
    schedule = constant(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for number in range(1, 5):
        loss = model(torch.ones(2, 3)).sum() * (float("inf") if number in (2, 3) else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if moves_anyway or scaler.get_scale() >= before:
            schedule.step()
        folder = output / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        save_file(model.state_dict(), folder / WEIGHTS)
        torch.save(optimizer.state_dict(), folder / OF_TRAINER)
        torch.save(schedule.state_dict(), folder / "scheduler.pt")
        torch.save(scaler.state_dict(), folder / "scaler.pt")
        torch.save(torch.get_rng_state(), folder / "rng_state.pth")
        state = {
            "global_step": number,
            "train_batch_size": 2,
            "stateful_callbacks": {"TrainerControl": {}},
        }
        (folder / "trainer_state.json").write_text(json.dumps(state))
    assert (output / "checkpoint-2" / WEIGHTS).read_bytes() == (
        output / "checkpoint-3" / WEIGHTS
    ).read_bytes()
    return output


def with_copies(output: Path) -> Path:
    """Copy checkpoints as people do: the best one, the last one, and a backup."""
    Script(net()).save(output)
    for name in ("checkpoint-best", "checkpoint_4-backup", "checkpoint_3.bak", "best"):
        shutil.copytree(output / "checkpoint_3", output / name)
    return output


def of_rows(output: Path, *, size: int, frozen: int, trained: bool = False) -> Path:
    """Train a row near the end of an embedding, next to a frozen norm. ``frozen``: one that the
    script sets back, as textual inversion does with all but the new token; it has moments.
    ``trained``: train another model, too.
    """
    table, norm = torch.nn.Embedding(size, 64), torch.nn.LayerNorm(64).requires_grad_(False)
    model, old = torch.nn.Sequential(table, norm), table.weight.data.clone()
    models = [model, net()] if trained else [model]
    optimizers = [adam(table, lr=1e-2, weight_decay=0.0), *map(adam, models[1:])]
    for number in range(1, 4):
        loss = model(torch.tensor([size - 20, frozen])).square().sum()
        sum((other(torch.randn(8, 16)).square().mean() for other in models[1:]), loss).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        table.weight.data[frozen] = old[frozen]
        accelerator = new_accelerator()
        accelerator.prepare(*models, *optimizers)
        accelerator.save_state(str(output / f"checkpoint_{number}"))
    return output


def best_again(first: int, last: int) -> Callable[[Script, int], object]:
    """Return what sets the first model back to the weights of a save before another one."""
    best: Tensors = {}

    def before_save(script: Script, number: int) -> None:
        if number == first:
            best.update(deepcopy(script.models[0].state_dict()))
        elif number == last:
            script.models[0].load_state_dict(best)

    return before_save


def follows(rate: float, every: int = 1) -> Callable[[Script, int], object]:
    """Return what moves the last model towards the first one."""

    def before_save(script: Script, number: int) -> None:
        if number % every == 0:
            first, *_, last = script.models
            for own, other in zip(last.parameters(), first.parameters(), strict=True):
                own.data.lerp_(other.data, rate)

    return before_save


def two_groups(output: Path, *, adafactor: bool = False) -> Path:
    """Train a part of a sharded model: the rest is in a param group at a rate of 0, or frozen."""
    from transformers.optimization import Adafactor

    trainer = trainer_in(output, lr_scheduler_type="constant", max_grad_norm=0.0)
    model = trainer.model
    if adafactor:
        # Its factors of a matrix have the shapes of norms.
        model.bert.embeddings.requires_grad_(False)
        own = [weight for weight in model.parameters() if weight.requires_grad]
        trainer.optimizer = Adafactor(own, lr=1e-3, relative_step=False, scale_parameter=False)
    else:
        groups = [{"params": [*model.bert.parameters()], "lr": 0.0}]
        trainer.optimizer = torch.optim.AdamW(
            [*groups, {"params": [*model.classifier.parameters()]}]
        )
    model.save_pretrained = partial(_in_shards, model.save_pretrained)
    trainer.args.save_steps = 1
    trainer.train()
    return output


def with_a_schedule_of_epochs(output: Path) -> Path:
    """Save after each second step, and again when the schedule has moved at the end of an epoch."""
    ends = (21, 41)
    return Script(
        net(),
        schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=5),
        moves=False,
        trained=lambda number: () if number in ends else (0,),
        before_save=lambda script, number: number in ends and script.schedules[0].step(),
    ).save(output, 10, 20, 21, 30, 40, 41)


def with_a_schedule_that_moves_after_the_save(output: Path) -> Path:
    """Train epochs at rates down to 0 and up again, each saved at the rate that it was trained
    at.
    """
    cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=2)
    script = Script(net(), schedule=cosine, moves=False)
    for number in range(4):
        script.save(output, number)
        script.schedules[0].step()
    assert torch.load(output / "checkpoint_2" / SCHEDULER)["_last_lr"] == [0.0]
    return output


def with_warm_up_from_a_save_before_it(output: Path) -> Path:
    """Save before the first step, too, which is made at a rate of 0."""

    def warm_up(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)

    script = Script(net(), schedule=warm_up, steps=1, trained=lambda number: (0,) if number else ())
    return script.save(output, 0, 1, 2, 3)


def with_a_registered_head(output: Path) -> Path:
    """Train a head outside of the prepared model, which is frozen."""
    encoder = torch.nn.Linear(32, 32).requires_grad_(False)
    # Its first layer has the shape of the encoder.
    head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 2))
    optimizer = adam(head)
    for number in range(1, 4):
        head(encoder(torch.rand(4, 32))).sum().backward()
        optimizer.step()
        accelerator = new_accelerator()
        accelerator.prepare(encoder, optimizer)
        accelerator.register_for_checkpointing(head)
        accelerator.save_state(str(output / f"checkpoint_{number}"))
    return output


def that_goes_on_with_sgd(output: Path) -> Path:
    """Train with Adam, and then with an optimizer that keeps no states."""
    model = net()
    optimizers = [adam(model), sgd(model)]
    for number in range(1, 5):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizers[number > 2].step()
        accelerator = new_accelerator()
        accelerator.prepare(model, *optimizers)
        accelerator.save_state(str(output / f"checkpoint_{number}"))
    return output


def script(*widths: int, **options: Any) -> Callable[[Path], Path]:
    """Return what trains models of these widths, and saves five times."""
    return lambda output: Script(*map(net, widths or (4,)), **options).save(output, 1, 2, 3, 4, 5)


def untrained(**options: Any) -> torch.nn.Module:
    return net(**options).requires_grad_(False)


_IN_TURNS: dict[str, Any] = {"trained": lambda number: (number % 2,)}
_LATE: dict[str, Any] = {"trained": lambda number: (0, 1) if number > 2 else (0,)}

HEALTHY: dict[str, Callable[[Path], Path]] = {
    "the Trainer at a rate of 0": partial(runs, learning_rate=0.0),
    "warm-up": partial(runs, lr_scheduler_type="linear", warmup_steps=2),
    "until a rate of 0": partial(runs, lr_scheduler_type="linear", warmup_steps=1),
    "weights alone": partial(runs, save_only_model=True),
    "frozen base": partial(runs, frozen="bert"),
    "shards, frozen base": partial(runs, shards=True, frozen="bert"),
    "shards, frozen embeddings": partial(runs, shards=True, frozen="embeddings"),
    "shards, frozen attention": partial(runs, shards=True, frozen="attention"),
    "shards at a rate of 0": partial(runs, shards=True, lr_scheduler_type="linear", warmup_steps=2),
    "shards, one group at a rate of 0": two_groups,
    "shards, Adafactor": partial(two_groups, adafactor=True),
    "a rate of 0": script(make=partial(adam, lr=0.0), schedule=constant),
    "bf16": script(make=lambda model: adam(model.bfloat16(), lr=1e-5)),
    "skipped steps": with_skipped_steps,
    "skipped steps, moved schedule": partial(with_skipped_steps, moves_anyway=True),
    "early stopping": script(before_save=best_again(2, 5), schedule=constant),
    "early stopping of a generator": script(4, 8, before_save=best_again(2, 5)),
    "rows at the end": partial(of_rows, size=2000, frozen=1999),
    "textual inversion": partial(of_rows, size=500, frozen=0),
    "textual inversion next to a model": partial(of_rows, size=500, frozen=0, trained=True),
    "textual inversion, large": partial(of_rows, size=5000, frozen=0),
    "a frozen model": script(
        schedule=constant,
        moves=False,
        trained=lambda number: (),
        before_save=lambda script, number: script.schedules[0].step(),
    ),
    "SGD": script(make=sgd, schedule=constant),
    "momentum": script(make=partial(sgd, momentum=0.9), schedule=constant),
    "SGD in turns": script(4, 8, make=sgd, schedule=constant, **_IN_TURNS),
    "in turns": script(4, 8, **_IN_TURNS),
    "in turns, equal, with schedules": script(4, 4, schedule=constant, **_IN_TURNS),
    "a late discriminator": script(4, 8, **_LATE),
    "an average": script(others=(untrained(),), before_save=follows(0.1)),
    "a late average": script(others=(untrained(),), before_save=follows(0.1, every=3)),
    "a target network": script(others=(untrained(),), before_save=follows(1.0, every=2)),
    "a frozen teacher": script(others=(untrained(),)),
    **{
        make.__name__: make
        for make in (
            with_copies, with_a_registered_head, with_a_schedule_of_epochs,
            with_a_schedule_that_moves_after_the_save, with_warm_up_from_a_save_before_it,
            that_goes_on_with_sgd,
        )
    },
}  # fmt: skip
