"""Small training scripts, and what runs them: save, load, and print the digests of what a script
then has in memory.

    torchrun --nproc_per_node 2 -m tests.real.scripts JOBS.json

Each process writes the results of all jobs into JOBS.json.RANK. One pair of processes works through
many jobs, as importing torch takes longer than all of them together. ckptfix has no part here.
"""

import copy
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fixtures.digests import state_digest, tensor_digests
from fixtures.models import SampleCounter, TwoLayer


class Run:
    """One run of a script: its objects as the script made them, its losses, and what it does after
    each step.
    """

    def __init__(self, seed: int, *, is_corrected: bool) -> None:
        self.accelerator = Accelerator()
        self.is_corrected = is_corrected
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.custom: list[SampleCounter] = []
        self.losses: list[Callable[[torch.Tensor], torch.Tensor]] = []
        self.after: list[Callable[[int], Any]] = []
        self.steps = 0
        self._handles: list[Any] = []
        torch.manual_seed(seed)

    def model(self, model: nn.Module) -> Any:
        """Return a model that the script passes to prepare(), as prepare() returns it."""
        self.models.append(model)
        # Without a gradient nothing wraps it: on GPUs prepare() does this by itself, on CPUs it
        # raises.
        is_frozen = not any(one.requires_grad for one in model.parameters())
        return (
            self.accelerator.prepare_model(model, evaluation_mode=True)
            if is_frozen
            else self.accelerator.prepare(model)
        )

    def again(self, prepared: Any) -> Any:
        """Return what a second prepare() makes of an object; the corrected script has none."""
        return prepared if self.is_corrected else self.accelerator.prepare(prepared)

    def doubled(self, model: nn.Module) -> Any:
        """Return a model that the uncorrected script passes to prepare() twice."""
        return self.again(self.model(model))

    def optimizer(self, optimizer: torch.optim.Optimizer, *, twice: bool = False) -> None:
        """Prepare an optimizer; ``twice``: the uncorrected script passes the same one again."""
        self.optimizers.append(optimizer)
        self._handles.append(self.accelerator.prepare(optimizer))
        if twice:
            self.again(optimizer)

    def adamw(self, *models: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
        """Prepare one AdamW over the parameters of all these models."""
        optimizer = torch.optim.AdamW(
            [one for model in models for one in model.parameters()], lr=lr
        )
        self.optimizer(optimizer)
        return optimizer

    def scheduler(self, scheduler: Any, *, twice: bool = False, every: int = 1) -> None:
        """Prepare a scheduler, which moves after ``every`` so many steps; ``twice``: pass the same
        one again.
        """
        self.schedulers.append(scheduler)
        pacer = self.accelerator.prepare(scheduler)
        self.after.append(lambda step: pacer.step() if step % every == 0 else None)
        if twice:
            self.again(scheduler)

    def paced(self, kind: Callable[..., Any], *given: Any, every: int = 1, **options: Any) -> None:
        """Prepare a scheduler of this kind for the last optimizer."""
        self.scheduler(kind(self.optimizers[-1], *given, **options), every=every)

    def train(self, *models: Any, scale: float = 1.0) -> None:
        """Add the loss of each model on the batch of the step; a ``scale`` of 0 makes gradients of
        zeros.
        """
        self.losses += [partial(loss_of, model, scale) for model in models]

    def step(self) -> None:
        """Make one step; each process has its own batches."""
        self.steps += 1
        generator = torch.Generator().manual_seed(10 * self.steps + self.accelerator.process_index)
        batch = torch.randn(4, 6, generator=generator)
        for handle in self._handles:
            handle.zero_grad()
        for loss in self.losses:
            self.accelerator.backward(loss(batch))
        for handle in self._handles:
            handle.step()
        for counter in self.custom:
            counter.samples += 4
        for work in self.after:
            work(self.steps)

    def digests(self) -> dict[str, Any]:
        """Return everything that load_state restores, models tensor by tensor."""
        return {
            "models": [tensor_digests(model.state_dict()) for model in self.models],
            "optimizers": [state_digest(optimizer.state_dict()) for optimizer in self.optimizers],
            "schedulers": [state_digest(scheduler.state_dict()) for scheduler in self.schedulers],
            "custom": [counter.state_dict() for counter in self.custom],
        }


Script = Callable[[Run], Any]


def loss_of(model: Any, scale: float, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = scale * model(batch).pow(2).mean()
    return loss


class Wrap(nn.Module):  # type: ignore[misc]  # torch is not followed, so nn.Module is Any
    """A module of the script's own that holds another as ``module``, as DistributedDataParallel
    does.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class LossWrapper(Wrap):
    """A model and its loss in one module, as scripts write it that run both in
    DistributedDataParallel.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x).pow(2)


class Critic(TwoLayer):
    """The other network of a GAN: its first layer is wider, so that its shapes are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 10), nn.Linear(10, 3)


class Towers(nn.Module):  # type: ignore[misc]  # torch is not followed, so nn.Module is Any
    """A model of two towers that begin with equal weights, as siamese networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.left = TwoLayer()
        self.right = copy.deepcopy(self.left)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


class Adapted(nn.Module):  # type: ignore[misc]  # torch is not followed, so nn.Module is Any
    """A frozen layer with two LoRA adapters; every B begins with zeros, so that the first gradient
    of every A is 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.lora_A = nn.ModuleList(nn.Linear(6, 2, bias=False) for _ in range(2))
        self.lora_B = nn.ModuleList(nn.Linear(2, 6, bias=False) for _ in range(2))
        for layer in self.lora_B:
            nn.init.zeros_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapters = zip(self.lora_A, self.lora_B, (1, 2), strict=True)
        return self.base(x) + sum(scale * second(first(x)) for first, second, scale in adapters)


class Normaliser(nn.Module):  # type: ignore[misc]  # torch is not followed, so nn.Module is Any
    """Running statistics of observations; it has buffers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean += 0.1
        return x - self.mean


class Parameters(nn.Module):  # type: ignore[misc]  # torch is not followed, so nn.Module is Any
    """A module of one parameter that is not trained."""

    def __init__(self, tensor: torch.Tensor, *, is_trained: bool = False) -> None:
        super().__init__()
        self.value = nn.Parameter(tensor, requires_grad=is_trained)


def two(run: Run, first: nn.Module, second: nn.Module) -> None:
    """Train a model with its optimizer beside two others, the second of which is held by a
    wrapper.
    """
    net = TwoLayer()
    run.train(run.model(net))
    run.adamw(net)
    run.model(first)
    run.model(Wrap(second))


def trained(
    run: Run, optimizer: Callable[[Any], torch.optim.Optimizer], *, twice: bool = False
) -> None:
    """Train a doubled model with one optimizer."""
    net = TwoLayer()
    run.train(run.doubled(net))
    run.optimizer(optimizer(net.parameters()), twice=twice)


def average(
    run: Run, decay: Callable[[int], float], optimizer: Callable[[Any], Any], *, scale: float = 1.0
) -> None:
    """Train a model beside an average of it in a DistributedDataParallel of its own."""
    net = TwoLayer()
    run.train(run.model(net), scale=scale)
    run.optimizer(optimizer(net.parameters()))
    mean = copy.deepcopy(net)
    run.model(DistributedDataParallel(mean))

    def update(step: int) -> None:
        with torch.no_grad():
            for old, new in zip(mean.parameters(), net.parameters(), strict=True):
                # lerp(old, new, 1) may differ from new in the last bit.
                old.copy_(new if decay(step) == 0 else old.lerp(new, 1 - decay(step)))

    run.after.append(update)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def gan_before_its_discriminators(run: Run, kind: type[TwoLayer] = Critic) -> None:
    net, critics = TwoLayer(), [kind(), kind()]
    generator = run.doubled(net)
    discriminators = [run.model(critic) for critic in critics]
    for model in (net, *critics):
        run.adamw(model)
    run.train(generator)
    # Their loss counts nothing yet, but their optimizers step.
    run.train(*discriminators, scale=0)


def gan_of_one_class_before_its_discriminators(run: Run) -> None:
    gan_before_its_discriminators(run, TwoLayer)


def gan_with_schedulers_before_its_discriminators(run: Run) -> None:
    gan_before_its_discriminators(run)
    for optimizer in run.optimizers:
        run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5))


def towers_with_own_optimizers(run: Run) -> None:
    net = Towers()
    run.train(run.doubled(net))
    run.adamw(net.left)
    run.adamw(net.right)


def lora_adapters_at_step_1(run: Run) -> None:
    net = Adapted()
    run.train(run.doubled(net))
    for first, second in zip(net.lora_A, net.lora_B, strict=True):
        run.adamw(first)
        run.adamw(second)


def twin_towers_of_one_optimizer(run: Run) -> None:
    left = TwoLayer()
    right = Wrap(copy.deepcopy(left))
    run.train(run.model(left), run.model(right))
    run.adamw(left, right)


def normalisers(run: Run) -> None:
    first, second = Normaliser(), Normaliser()
    two(run, first, second)
    run.after.append(lambda step: [normaliser(torch.ones(6)) for normaliser in (first, second)])


def backbone_beside_its_extractor(run: Run) -> None:
    backbone, head = TwoLayer().requires_grad_(False), nn.Linear(3, 2)
    features = run.model(backbone)
    run.model(Wrap(backbone))
    trained_head = run.model(head)
    run.losses.append(lambda batch: trained_head(features(batch)).pow(2).mean())
    run.adamw(head)


def backbone_beside_its_extractor_and_a_like_head(run: Run) -> None:
    # The shapes of the head are those of the first layer of the backbone.
    backbone, head = TwoLayer().requires_grad_(False), nn.Linear(6, 8)
    run.model(backbone)
    run.model(Wrap(backbone))
    run.train(run.model(head))
    run.adamw(head)


def copy_beside_a_trained_model_of_its_class(run: Run) -> None:
    average(run, lambda step: 0.0, sgd)
    net = TwoLayer()
    run.train(run.model(net))
    run.adamw(net)


def average_of_a_generator_that_waits(run: Run) -> None:
    average(run, lambda step: 0.0, adamw, scale=0)
    critic = TwoLayer()
    run.train(run.model(critic))
    run.adamw(critic)


def average_of_a_generator_that_waits_for_the_first_optimizer(run: Run) -> None:
    critic = TwoLayer()
    run.adamw(critic)
    average(run, lambda step: 0.0, adamw, scale=0)
    run.train(run.model(critic))


def model_beside_its_loss(run: Run) -> None:
    net = TwoLayer()
    run.model(net)
    run.train(run.model(LossWrapper(net)))
    run.adamw(net)


def student(run: Run, dtype: torch.dtype, lr: float) -> None:
    """Train a student, held by a wrapper, beside the frozen reference from which it begins."""
    reference = TwoLayer().to(dtype)
    net = copy.deepcopy(reference)
    run.model(reference.requires_grad_(False))
    model = run.model(Wrap(net))
    run.losses.append(lambda batch: model(batch.to(dtype)).float().pow(2).mean())
    run.adamw(net, lr=lr)


def average_until_an_unsaved_schedule_begins(run: Run) -> None:
    average(run, lambda step: 0.99, adamw)
    pace = torch.optim.lr_scheduler.LambdaLR(run.optimizers[0], lambda epoch: float(epoch >= 3))
    run.after.append(lambda step: pace.step())


def average_with_copied_buffers_during_warm_up(run: Run) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    run.train(run.model(net))
    run.adamw(net)
    mean = copy.deepcopy(net)
    run.model(DistributedDataParallel(mean))
    # The parameters stay as they are; every step changes the buffers of both.
    run.scheduler(
        torch.optim.lr_scheduler.LambdaLR(run.optimizers[0], lambda epoch: float(epoch > 20))
    )
    run.after.append(lambda step: mean.load_state_dict(net.state_dict()))


def no_optimizer_copy(run: Run) -> None:
    net = TwoLayer()
    run.model(net)
    run.model(DistributedDataParallel(copy.deepcopy(net)))


def student_and_teacher_both_twice(run: Run) -> None:
    trained(run, adamw)
    run.doubled(TwoLayer())


def two_students_twice(run: Run) -> None:
    trained(run, adamw)
    trained(run, adamw)


def student_in_wrappers_twice(run: Run) -> None:
    trained(run, adamw)
    net = Wrap(Wrap(TwoLayer()))
    run.train(run.doubled(net))
    run.adamw(net)


def prepared_three_times(run: Run) -> None:
    net = TwoLayer()
    run.train(run.again(run.doubled(net)))
    run.adamw(net)


def pairs_twice(run: Run) -> None:
    for _ in range(2):
        trained(run, adamw, twice=True)
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizers[-1], step_size=2, gamma=0.5)
        run.scheduler(scheduler, twice=True)


def batch_norm_with_optimizer_twice(run: Run) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    run.train(run.doubled(net))
    run.optimizer(adamw(net.parameters()), twice=True)


def batch_norm_by_sgd(run: Run) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    run.train(run.doubled(net))
    run.optimizer(sgd(net.parameters()))


def tied_weights_with_optimizer_twice(run: Run) -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    run.train(run.doubled(net))
    run.optimizer(adamw(net.parameters()), twice=True)


def named_parameters(run: Run) -> None:
    net = TwoLayer()
    model = run.doubled(net)
    run.train(model)
    run.optimizer(adamw(model.named_parameters()))


def frozen_layer(run: Run) -> None:
    net = TwoLayer()
    net.fc1.requires_grad_(False)
    run.train(run.doubled(net))
    run.adamw(net.fc2)


def twin_towers_with_own_optimizers(run: Run) -> None:
    left = TwoLayer()
    right = copy.deepcopy(left)
    run.train(run.model(left), run.model(DistributedDataParallel(right)))
    run.adamw(left)
    run.adamw(right)


def bf16(run: Run) -> None:
    net = TwoLayer().to(torch.bfloat16)
    model = run.doubled(net)
    run.losses.append(lambda batch: model(batch.to(torch.bfloat16)).float().pow(2).mean())
    run.adamw(net)


def two_groups(run: Run) -> None:
    net = TwoLayer()
    run.train(run.doubled(net))
    groups: Sequence[Any] = (
        {"params": net.fc1.parameters()},
        {"params": net.fc2.parameters(), "lr": 0.1},
    )
    run.optimizer(torch.optim.Adam(groups, lr=0.01))


def with_custom_objects(run: Run) -> None:
    trained(run, adamw)
    run.custom += [SampleCounter(), SampleCounter()]
    run.accelerator.register_for_checkpointing(*run.custom)


def gan_in_training(run: Run) -> None:
    net, critic = TwoLayer(), Critic()
    run.train(run.doubled(net), run.doubled(critic))
    run.adamw(net)
    run.adamw(critic)


LambdaLR, StepLR = torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.StepLR
ConstantLR, LinearLR = torch.optim.lr_scheduler.ConstantLR, torch.optim.lr_scheduler.LinearLR


def sequence(optimizer: Any, first: Callable[..., Any], until: int) -> Any:
    """Return a schedule that begins with another one."""
    moves = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [first(optimizer), moves], [until])


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    """Return the schedule of most scripts, whose function is a partial() that leaves {} in the
    state.
    """
    from transformers import get_linear_schedule_with_warmup

    return get_linear_schedule_with_warmup(optimizer, 4, 100)


def from_step(number: int, epoch: int) -> float:
    """Return a learning rate that is 0 until a step."""
    return float(epoch >= number)


def paced(
    begin: Script, kind: Callable[..., Any], *given: Any, every: int = 1, **options: Any
) -> Script:
    """Return a script that begins like another one, and has a scheduler."""

    def script(run: Run) -> None:
        begin(run)
        run.paced(kind, *given, every=every, **options)

    return script


def of_adamw(run: Run) -> None:
    trained(run, adamw)


def beside_an_average(run: Run) -> None:
    average(run, lambda step: 0.99, adamw)


def student_and_teacher(run: Run) -> None:
    trained(run, adamw)
    run.model(TwoLayer())


def student_and_teacher_with_optimizer_twice(run: Run) -> None:
    trained(run, adamw, twice=True)
    run.model(TwoLayer())


def with_scheduler_twice(run: Run) -> None:
    trained(run, adamw)
    run.scheduler(StepLR(run.optimizers[0], step_size=2, gamma=0.5), twice=True)


def bare_and_wrapped_without_training(run: Run) -> None:
    net = TwoLayer().requires_grad_(False)
    two(run, net, net)


HALVES: dict[str, Any] = {"step_size": 2, "gamma": 0.5}
SCRIPTS: dict[str, Script] = {
    "empty_tensors": lambda run: two(
        run, Parameters(torch.empty(0, 6)), Parameters(torch.empty(0, 6))
    ),
    "one_frozen_parameter": lambda run: two(
        run, Parameters(torch.ones(())), Parameters(torch.ones(()))
    ),
    "fresh_layer_norms": lambda run: two(run, nn.LayerNorm(6), nn.LayerNorm(6)),
    "reference_beside_its_bf16_student": lambda run: student(run, torch.bfloat16, 1e-6),
    "reference_beside_its_slow_student": lambda run: student(run, torch.float32, 1e-12),
    "reference_beside_a_student_that_waits": paced(
        lambda run: student(run, torch.float32, 0.01), LambdaLR, lambda epoch: float(epoch >= 6)
    ),
    # Averages during a warm-up, in which the learning rate was 0.
    "average_during_warm_up": paced(beside_an_average, LambdaLR, lambda epoch: 0.1 * (epoch > 20)),
    "average_after_the_first_step_of_a_warm_up": paced(
        beside_an_average, LambdaLR, lambda epoch: epoch / 20
    ),
    "average_after_the_first_epoch_of_a_warm_up": paced(beside_an_average, warm_up, every=3),
    "average_until_a_delay_ends": paced(
        beside_an_average, LambdaLR, lambda epoch: float(epoch >= 6)
    ),
    "average_until_a_partial_ends": paced(beside_an_average, LambdaLR, partial(from_step, 6)),
    "average_until_a_sequence_begins": paced(
        beside_an_average, sequence, partial(ConstantLR, factor=0, total_iters=10), 6
    ),
    # Other copies and averages.
    "average_without_gradients": lambda run: average(run, lambda step: 0.0, adamw, scale=0),
    "sgd_copy": lambda run: average(run, lambda step: 0.0, sgd),
    "slow_average": beside_an_average,
    # Synchronised every third step.
    "target_network": lambda run: average(run, lambda step: 0.0 if step % 3 == 0 else 1.0, adamw),
    "average_after_a_hard_copy": lambda run: average(
        run, lambda step: 0.0 if step <= 3 else 0.99, adamw
    ),
    # A model that is prepared twice.
    "no_optimizer_doubled": lambda run: run.doubled(TwoLayer()),
    "sgd_doubled": lambda run: trained(run, sgd),
    "momentum": lambda run: trained(run, partial(torch.optim.SGD, lr=0.01, momentum=0.9)),
    "rmsprop": lambda run: trained(run, partial(torch.optim.RMSprop, lr=0.01)),
    "adagrad": lambda run: trained(run, partial(torch.optim.Adagrad, lr=0.01)),
    "adamw_doubled": of_adamw,
    "with_optimizer_twice": lambda run: trained(run, adamw, twice=True),
    "with_scheduler": paced(of_adamw, StepLR, **HALVES),
    "with_scheduler_of_epochs": paced(of_adamw, StepLR, **HALVES, every=3),
    "with_warm_up": paced(of_adamw, warm_up),
    "with_a_sequence": paced(of_adamw, sequence, partial(LinearLR, total_iters=3), 3),
    "with_a_function": paced(of_adamw, LambdaLR, lambda epoch: 0.99**epoch),
    "with_a_function_of_epochs": paced(of_adamw, LambdaLR, lambda epoch: 0.9**epoch, every=5),
    "at_the_end_of_a_schedule": paced(of_adamw, LambdaLR, lambda epoch: float(epoch < 4)),
}
"""Scripts of a line. Every other one is a function of this module."""


def script_of(name: str) -> Script:
    script: Script = SCRIPTS.get(name) or globals()[name]
    return script


def save(job: dict[str, Any]) -> dict[str, Any]:
    """Train, and save after each step that the job names; ``resumed``: the last save is of a run
    that resumed.
    """
    script = script_of(job["script"])
    run = Run(seed=1, is_corrected=False)
    script(run)
    digests: dict[str, Any] = {}
    checkpoint = Path()
    for step in job["steps"]:
        if job["resumed"] and digests:
            steps, run = run.steps, Run(seed=2, is_corrected=False)
            script(run)
            run.accelerator.load_state(str(checkpoint))
            run.steps = steps
        while run.steps < step:
            run.step()
        checkpoint = Path(job["folder"]) / f"checkpoint-{step}"
        run.accelerator.save_state(str(checkpoint), safe_serialization=job["safe"])
        run.accelerator.wait_for_everyone()
        digests[checkpoint.name] = run.digests()
    return digests


def load(job: dict[str, Any]) -> dict[str, Any]:
    """Load every checkpoint of the folder into a new run; return what the run then has, or why it
    has nothing.
    """
    results: dict[str, Any] = {}
    for checkpoint in sorted(Path(job["folder"]).glob("checkpoint-*")):
        run = Run(seed=3, is_corrected=job["is_corrected"])
        script_of(job["script"])(run)
        with torch.no_grad():
            for tensor in (each for model in run.models for each in model.state_dict().values()):
                # The seed alone leaves layers that begin with zeros and ones as they were saved.
                tensor += 1
        try:
            run.accelerator.load_state(str(checkpoint))
        except Exception as error:
            results[checkpoint.name] = f"{type(error).__name__}: {error}"
            continue
        results[checkpoint.name] = run.digests()
    return results


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    results = [save(job) if "steps" in job else load(job) for job in jobs]
    rank = Accelerator().process_index
    Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps(results), encoding="utf-8")
    # At a usual exit gloo's threads abort ("terminate called without an active exception").
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
