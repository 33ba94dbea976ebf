"""Evidence that a model was prepared twice: of training in an optimizer's pickle, and of other
checkpoints.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.optim import lr_scheduler

from ckptfix import Accelerator as GuardedAccelerator
from ckptfix import Policy, check, repair
from ckptfix.checkpoint import pairing, second_prepare
from ckptfix.checkpoint.folder import scan_folder
from ckptfix.checkpoint.neighbours import Siblings
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.second_prepare import Evidence, OptimizerFacts, read_optimizer
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.errors import ChangedError, OperationError, RolledBackError
from ckptfix.formats.torch_file import read_torch_file
from ckptfix.repairs.steps import DropEntry
from ckptfix.storage import comparing
from ckptfix.storage.reading import open_reader
from ckptfix.storage.stores import open_store
from tests.repairs.builders import save_states as save
from tests.repairs.builders import snapshot
from tests.repairs.refused import nobody_may_read


def facts(path: Path, value: object, *, legacy: bool = False) -> OptimizerFacts | None:
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    with open_reader(path) as reader:
        return read_optimizer(read_torch_file(reader), reader, PurePosixPath(path.name))


def has_moments(folder: Path) -> bool:
    return Evidence(scan_folder(folder), None, Siblings().of(folder)).has_moments(
        PurePosixPath("optimizer.bin")
    )


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("kind", "options", "shows"),
    [
        ("AdamW", {}, True),
        ("SGD", {"momentum": 0.9}, True),
        ("SGD", {}, False),  # it keeps nothing
        ("Adagrad", {"initial_accumulator_value": 0.1}, True),  # it has moments from the beginning
        ("RMSprop", {}, True),
        ("Adadelta", {}, True),
        ("ASGD", {}, False),  # its average is that of the weights
        ("Rprop", {}, True),  # its step sizes are not 0 from the beginning
    ],
)
@pytest.mark.parametrize("gradient", [0.0, -0.0, 1.0])
def test_gradients_show_in_the_moments(
    tmp_path: Path,
    kind: str,
    options: dict[str, float],
    shows: bool,
    gradient: float,
    legacy: bool,
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = getattr(torch.optim, kind)(model.named_parameters(), lr=0.1, **options)
    path = tmp_path / "optimizer.bin"
    fresh = facts(path, optimizer.state_dict(), legacy=legacy)
    assert fresh is not None
    assert fresh.names == ("weight", "bias")
    assert not has_moments(tmp_path)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    trained = facts(path, optimizer.state_dict(), legacy=legacy)
    assert trained is not None
    assert trained.is_without_states == (kind == "ASGD" or (kind == "SGD" and not options))
    if not trained.is_without_states:
        assert set(trained.shapes.elements()) == {(2, 3), (2,)}
    # A sum that begins above 0 shows the step, and not its gradient.
    assert has_moments(tmp_path) == (shows and (gradient != 0 or kind == "Adagrad"))


def test_another_dict_is_no_optimizer(tmp_path: Path) -> None:
    assert facts(tmp_path / "x.bin", {"state": 1}) is None
    assert facts(tmp_path / "x.bin", [1]) is None


class Net(torch.nn.Module):  # type: ignore[misc]  # torch is not followed, so nn.Module is Any
    """A model of two layers with seeded values."""

    def __init__(self, seed: int = 0, *, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = torch.nn.Linear(width, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def wrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return a module that holds a model as DistributedDataParallel does."""
    outer = torch.nn.Module()
    outer.module = model
    return outer


def adamw(*models: torch.nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for model in models for one in model.parameters()], lr=lr)


def step(optimizer: torch.optim.Optimizer, *, scale: float = 1.0) -> None:
    """Make a step with gradients; the same ones for parameters of the same shape."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            torch.manual_seed(parameter.numel())
            parameter.grad = scale * torch.randn_like(parameter)
    optimizer.step()


def doubled(folder: Path) -> Path:
    net = Net()
    optimizer = adamw(net)
    step(optimizer)
    return save(folder, [net, wrap(net)], [optimizer])


def without_random_states(folder: Path) -> Path:
    for path in doubled(folder).glob("random_states_*"):
        path.unlink()
    return folder


def without_optimizer(folder: Path) -> Path:
    (doubled(folder) / "optimizer.bin").unlink()
    return folder


def scheduled(
    folder: Path,
    schedule: Callable[[torch.optim.Optimizer], Any],
    *,
    steps: int = 3,
    every: int = 1,
    kind: str = "AdamW",
    is_saved: bool = True,
) -> Path:
    """Save a model that was prepared twice, and a scheduler that moves after ``every`` so many
    steps.
    """
    net = Net()
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1, **options)
    scheduler = schedule(optimizer)
    for number in range(1, steps + 1):
        step(optimizer)
        if number % every == 0:
            # As accelerate moves it: once for each process.
            scheduler.step()
            scheduler.step()
    return save(folder, [net, wrap(net)], [optimizer], [scheduler] if is_saved else [])


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    from transformers import get_linear_schedule_with_warmup

    return get_linear_schedule_with_warmup(optimizer, 10, 100)


def warm_up_above_0(optimizer: torch.optim.Optimizer) -> Any:
    from transformers import get_constant_schedule_with_warmup

    return get_constant_schedule_with_warmup(optimizer, 0)


def waiting(epoch: int, delay: int) -> float:
    return float(epoch >= delay)


class Waiting:
    """A function of a script that leaves {} in the state, as those of transformers do."""

    def __call__(self, epoch: int) -> float:
        return float(epoch >= 6)


def of_function(function: Callable[[int], float]) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, function)


def of_sequence(first: Any, **options: Any) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [first(optimizer, **options), lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)],
        milestones=[6],
    )


class Delayed(lr_scheduler.LRScheduler):  # type: ignore[misc]  # torch is not followed, so LRScheduler is Any
    """A scheduler of the script's own, which holds the learning rate at 0 at first."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.delay = 6
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [rate * (self.last_epoch >= self.delay) for rate in self.base_lrs]


class WaitingWithoutAttributes(lr_scheduler.LRScheduler):  # type: ignore[misc]
    """A scheduler that leaves nothing in its state but the keys of every schedule."""

    def get_lr(self) -> list[float]:
        return [rate * (self.last_epoch >= 6) for rate in self.base_lrs]


def of_gradients(folder: Path, scale: float) -> Path:
    net = Net()
    optimizer = adamw(net)
    step(optimizer, scale=scale)
    return save(folder, [net, wrap(net)], [optimizer])


def of_dtype(folder: Path, first: torch.dtype, second: torch.dtype, *, lr: float = 0.1) -> Path:
    net = Net()
    net.first.to(first)
    net.second.to(second)
    optimizer = adamw(net, lr=lr)
    step(optimizer)
    return save(folder, [net, wrap(net)], [optimizer])


def of_plain_sgd(folder: Path) -> Path:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step(optimizer)
    return save(folder, [net, wrap(net)], [optimizer])


def beside_a_trained_net(folder: Path, one: torch.nn.Module, *, width: int = 3) -> Path:
    net = Net(1, width=width)
    optimizer = adamw(net)
    step(optimizer)
    return save(folder, [net, one, wrap(one)], [optimizer])


def empty(*shape: int) -> torch.nn.Module:
    module = torch.nn.Module()
    module.value = torch.nn.Parameter(torch.empty(shape))
    return module


def of_buffers() -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("mean", torch.ones(3))
    return module


def of_twin_towers(folder: Path, kind: str = "AdamW") -> Path:
    left, right = Net(), Net()
    optimizer = getattr(torch.optim, kind)([*left.parameters(), *right.parameters()], lr=0.1)
    step(optimizer)
    return save(folder, [left, wrap(right)], [optimizer])


def of_a_damaged_optimizer(folder: Path) -> Path:
    with open(doubled(folder) / "optimizer.bin", "r+b") as file:
        file.truncate(900)
    return folder


def of_a_generator_that_waits(folder: Path, *, is_first: bool) -> Path:
    """Save a generator without gradients yet, its average, and a critic of its class, with the
    optimizers of both.
    """
    generator, critic = Net(), Net(1)
    optimizers = [adamw(generator), adamw(critic)]
    step(optimizers[0], scale=0.0)
    step(optimizers[1])
    return save(
        folder, [generator, wrap(generator), critic], optimizers if is_first else optimizers[::-1]
    )


def of_a_head_with_shapes_of_its_backbone(folder: Path) -> Path:
    backbone, head = Net(), torch.nn.Linear(3, 4)
    optimizer = adamw(head)
    step(optimizer)
    return save(folder, [backbone, wrap(backbone), head], [optimizer])


@pytest.mark.parametrize(
    ("make", "doubt"),
    [
        (without_random_states, "no file shows how many processes saved them"),
        (without_optimizer, "no optimizer proves that the steps moved the model"),
        (lambda folder: of_gradients(folder, 0.0), "no optimizer proves"),
        (lambda folder: of_dtype(folder, torch.bfloat16, torch.bfloat16), "no optimizer proves"),
        (lambda folder: of_dtype(folder, torch.float16, torch.float16), "no optimizer proves"),
        (
            lambda folder: of_dtype(folder, torch.float32, torch.float32, lr=1e-8),
            "no optimizer proves",
        ),
        (of_plain_sgd, "no optimizer proves"),
        (lambda folder: of_a_generator_that_waits(folder, is_first=True), "no optimizer proves"),
        (lambda folder: of_a_generator_that_waits(folder, is_first=False), "no optimizer proves"),
        (of_a_head_with_shapes_of_its_backbone, "no optimizer proves"),
        (of_a_damaged_optimizer, "the step count of optimizer.bin cannot be read"),
        (of_twin_towers, "optimizer.bin has parameters of both models"),
        (
            lambda folder: of_twin_towers(folder, "SGD"),
            "optimizer.bin has parameters of both models",
        ),
        (
            lambda folder: beside_a_trained_net(folder, empty(0, 3)),
            "they hold no data to compare",
        ),
        (lambda folder: beside_a_trained_net(folder, of_buffers()), "no optimizer proves"),
        (lambda folder: beside_a_trained_net(folder, empty()), "no optimizer proves"),
        (lambda folder: beside_a_trained_net(folder, torch.nn.LayerNorm(3)), "no optimizer proves"),
        (lambda folder: beside_a_trained_net(folder, Net(2)), "no optimizer proves"),
        (lambda folder: beside_a_trained_net(folder, Net(2), width=5), "no optimizer proves"),
    ],
)
def test_without_positive_evidence_equal_models_are_asked_about(
    tmp_path: Path, make: Callable[[Path], Path], doubt: str
) -> None:
    folder = make(tmp_path / "checkpoint")
    identical = [one for one in check(folder).findings if one.code == "identical-models"]
    assert len(identical) == 1
    assert doubt in identical[0].advice
    assert not [one for one in check(folder).findings if one.code == "doubled-model"]
    receipt = repair(folder)
    assert (receipt.status, receipt.steps) == (1, ())


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (of_function(lambda epoch: 0.0), {}),
        (of_function(lambda epoch: float(epoch >= 6)), {}),
        (of_function(lambda epoch: 1.0), {"is_saved": False}),
        (warm_up, {}),
        (warm_up, {"steps": 1}),
        (warm_up, {"every": 3}),
        (of_function(partial(waiting, delay=6)), {}),
        (of_function(Waiting()), {}),
        (partial(lr_scheduler.LinearLR, start_factor=1e-9, total_iters=4), {"steps": 1}),
        (
            partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=100, div_factor=float("inf")),
            {},
        ),
        (WaitingWithoutAttributes, {}),
        (of_sequence(lr_scheduler.ConstantLR, factor=0, total_iters=10), {}),
        (of_sequence(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.0), {}),
        (partial(lr_scheduler.CyclicLR, base_lr=0.0, max_lr=1.0, cycle_momentum=False), {}),
        (Delayed, {}),
    ],
)
def test_a_schedule_may_have_held_the_learning_rate_at_0(
    tmp_path: Path, schedule: Callable[[Any], Any], options: dict[str, Any], kind: str
) -> None:
    folder = scheduled(tmp_path / "checkpoint", schedule, kind=kind, **options)
    assert "no optimizer proves that the steps moved the model" in verdict(folder)[1]
    assert repair(folder).steps == ()


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (of_function(lambda epoch: 1.0), {"every": 5}),
        (warm_up_above_0, {"every": 5}),
        (partial(lr_scheduler.StepLR, step_size=1), {}),
        (partial(lr_scheduler.StepLR, step_size=1), {"every": 3}),
        (partial(lr_scheduler.MultiStepLR, milestones=[1, 2]), {}),
        (partial(lr_scheduler.ExponentialLR, gamma=0.9), {}),
        (partial(lr_scheduler.ConstantLR, factor=0.1), {}),
        (partial(lr_scheduler.LinearLR, total_iters=100), {}),
        (partial(lr_scheduler.PolynomialLR, total_iters=100), {}),
        (partial(lr_scheduler.CosineAnnealingLR, T_max=100), {}),
        (partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=4), {}),
        (partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=100), {}),
        (of_sequence(lr_scheduler.LinearLR), {}),
    ],
)
def test_a_schedule_that_begins_above_0_is_no_reason_to_ask(
    tmp_path: Path, schedule: Callable[[Any], Any], options: dict[str, Any], kind: str
) -> None:
    folder = scheduled(tmp_path / "checkpoint", schedule, kind=kind, **options)
    assert verdict(folder)[0] == "doubled-model"
    assert repair(folder).status == 0


@pytest.mark.parametrize(
    "make",
    [
        doubled,
        lambda folder: of_gradients(folder, 1e-20),
        # The steps of the second layer show in fp32.
        lambda folder: of_dtype(folder, torch.bfloat16, torch.float32),
        lambda folder: of_dtype(folder, torch.float64, torch.float64),
    ],
)
def test_positive_evidence_is_enough(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path / "checkpoint")
    assert [one.code for one in check(folder).findings] == ["doubled-model"]
    assert repair(folder).status == 0
    assert not (folder / "pytorch_model_1.bin").exists()


def run_of(folder: Path, *, is_copy: bool, kind: str = "AdamW") -> list[Path]:
    """Save three checkpoints of a model that is prepared twice, or whose copy is made anew at the
    third step.
    """
    net, copy = Net(), Net(7)
    options = {} if kind == "SGD" else {"weight_decay": 0.0}
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1, **options)
    folders = []
    for number in (5, 10, 15):
        step(optimizer)
        if number == 15:
            copy.load_state_dict(net.state_dict())
        second = copy if is_copy else net
        folders.append(save(folder / f"checkpoint-{number}", [net, wrap(second)], [optimizer]))
    return folders


def verdict(folder: Path | str) -> tuple[str, str]:
    """Return the code and the advice of the finding about the models."""
    return next(
        (one.code, one.advice)
        for one in check(folder).findings
        if one.code in ("doubled-model", "identical-models")
    )


def test_a_folder_of_very_many_entries_is_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evidence matches each optimizer with each model for each duplicate: 600 of each would
    take hours.
    """
    *_, last = run_of(tmp_path / "run", is_copy=False)
    assert verdict(last)[0] == "doubled-model"
    # Two models and an optimizer.
    monkeypatch.setattr(second_prepare, "MAX_ENTRIES", 2)
    code, advice = verdict(last)
    assert code == "identical-models"
    assert "more than 2 models and optimizers, too many to match" in advice
    assert repair(last).steps == ()


def test_a_copy_differs_in_another_checkpoint_of_the_run(tmp_path: Path) -> None:
    *_, last = run_of(tmp_path / "run", is_copy=True)
    code, advice = verdict(last)
    assert code == "identical-models"
    assert "they differ in checkpoint-5" in advice or "they differ in checkpoint-10" in advice
    assert repair(last).steps == ()
    # The neighbours of the source count, not those of the place of the copy.
    assert repair(last, output=tmp_path / "elsewhere-3").steps == ()
    alone = tmp_path / "alone" / "checkpoint-15"
    alone.parent.mkdir()
    last.rename(alone)
    assert verdict(alone)[0] == "doubled-model"
    assert "EMA" in verdict(alone)[1]
    assert "ckptfix undo" in verdict(alone)[1]


def test_a_model_prepared_twice_is_equal_in_all_of_them(tmp_path: Path) -> None:
    folders = run_of(tmp_path, is_copy=False)
    assert [verdict(folder)[0] for folder in folders] == ["doubled-model"] * 3
    # Whatever is repaired first, and though the repaired ones have no second entry any more.
    assert [repair(folder).status for folder in (folders[1], folders[2], folders[0])] == [0, 0, 0]


def test_plain_sgd_moves_the_values_between_two_checkpoints(tmp_path: Path) -> None:
    folders = run_of(tmp_path, is_copy=False, kind="SGD")
    expected = ["identical-models", "doubled-model", "doubled-model"]
    assert [verdict(folder)[0] for folder in folders] == expected
    for folder in reversed(folders[1:]):
        assert repair(folder).status == 0
    assert verdict(folders[0])[0] == "identical-models"
    assert check(folders[2]).status == 0


def test_a_repair_changes_no_verdict_by_another_number(tmp_path: Path) -> None:
    """After the first duplicate is gone, the copy has another number than in the other
    checkpoints.
    """
    folders = []
    net, copied, copy = Net(0), Net(1, width=5), Net(9, width=5)
    optimizers = [adamw(net), adamw(copied)]
    for number in (5, 10):
        for optimizer in optimizers:
            step(optimizer)
        if number == 10:
            copy.load_state_dict(copied.state_dict())
        models = [net, wrap(net), copied, wrap(copy)]
        folders.append(save(tmp_path / f"checkpoint_{number}", models, optimizers))
    receipt = repair(folders[1])
    dropped = [
        str(step.action.path) for step in receipt.steps if isinstance(step.action, DropEntry)
    ]
    assert dropped == ["pytorch_model_1.bin"]
    assert (folders[1] / "pytorch_model_2.bin").exists()
    assert repair(folders[1]).steps == ()
    assert verdict(folders[1])[0] == "identical-models"


def beside_its_average(folder: Path, number: int, *, is_corrected: bool = False) -> Path:
    """Save a model, itself again but for a corrected script, and its average in a wrapper that
    calls it ``module``.
    """
    net, average = Net(), Net(7)
    optimizer = adamw(net)
    for _ in range(number):
        step(optimizer)
        for old, new in zip(average.parameters(), net.parameters(), strict=True):
            old.data.lerp_(new.data, 0.5)
    models = [net, wrap(average)] if is_corrected else [net, wrap(net), wrap(average)]
    return save(folder / f"epoch_{number}", models, [optimizer])


def test_an_average_next_to_it_is_not_the_duplicate(tmp_path: Path) -> None:
    """It has the keys of the duplicate: each of two such checkpoints called the other one the proof
    of a copy.
    """
    folders = [beside_its_average(tmp_path, number) for number in (1, 2, 3)]
    assert [verdict(folder)[0] for folder in folders] == ["doubled-model"] * 3
    assert [repair(folder).status for folder in (folders[1], folders[2], folders[0])] == [0, 0, 0]
    for folder in folders:
        assert len([*folder.glob("pytorch_model*")]) == 2
        assert check(folder).status == 0


def test_the_average_is_the_only_second_entry_of_a_corrected_script(tmp_path: Path) -> None:
    """Two checkpoints with both entries show which one is equal. A single one shows nothing."""
    folders = [beside_its_average(tmp_path / "run", number) for number in (1, 2)]
    beside_its_average(tmp_path / "run", 3, is_corrected=True)
    assert [verdict(folder)[0] for folder in folders] == ["doubled-model"] * 2
    lone = beside_its_average(tmp_path / "lone", 2)
    beside_its_average(tmp_path / "lone", 3, is_corrected=True)
    code, advice = verdict(lone)
    assert code == "identical-models"
    assert (
        "because they may differ in epoch_3, which has a different number of such models" in advice
    )


def test_a_copy_that_the_script_made_before_it_trained_is_a_note(tmp_path: Path) -> None:
    """A target network at step 0 was a warning, and asked its owner how many models there are.

    A teacher whose file was overwritten by that of its student is a warning: they differed before.
    """
    net, target = Net(), Net()
    optimizer = adamw(net)
    folders = []
    for number in range(3):
        folders.append(save(tmp_path / f"epoch_{number}", [net, target], [optimizer]))
        step(optimizer)
    (finding,) = [one for one in check(folders[0]).findings if one.code == "identical-models"]
    assert finding.severity is Severity.NOTE
    assert str(finding).endswith(("; they differ in epoch_1", "; they differ in epoch_2"))
    assert "ignore this if the script copies one model into the other" in finding.advice
    assert repair(folders[0]).steps == ()
    for folder in folders[1:]:
        before = [one.code for one in check(folder).findings]
        assert "identical-models" not in before
        (folder / "pytorch_model_1.bin").write_bytes((folder / "pytorch_model.bin").read_bytes())
        (finding,) = [one for one in check(folder).findings if one.code == "identical-models"]
        assert finding.severity is (Severity.NOTE if folder == folders[1] else Severity.WARNING)


def test_a_target_network_next_to_an_average_differs_elsewhere(tmp_path: Path) -> None:
    """A third model with the same keys hides no copy, whichever file is gone next to it."""
    net, target, average = Net(), Net(7), Net(9)
    optimizer = adamw(net)
    folders = []
    for number in (1, 2):
        step(optimizer)
        if number == 2:
            target.load_state_dict(net.state_dict())
        models = [net, wrap(target), wrap(average)]
        folders.append(save(tmp_path / f"epoch_{number}", models, [optimizer]))
    assert verdict(folders[1])[0] == "identical-models"
    assert "because they differ in epoch_1" in verdict(folders[1])[1]
    (folders[0] / "pytorch_model_2.bin").unlink()
    assert "because they may differ in epoch_1" in verdict(folders[1])[1]
    assert repair(folders[1]).steps == ()


def test_a_target_network_that_was_apart_before_the_average_began(tmp_path: Path) -> None:
    """Two checkpoints with both show the target equal, and the one before them shows it apart: the
    default repair deleted it.
    """
    net, target, average = Net(), Net(7), Net(9)
    optimizer = adamw(net)
    folders = []
    for number in (1, 2, 3):
        step(optimizer)
        if number > 1:
            target.load_state_dict(net.state_dict())
        models = [net, wrap(target)] + [wrap(average)] * (number > 1)
        folders.append(save(tmp_path / f"epoch_{number}", models, [optimizer]))
    code, advice = verdict(folders[2])
    assert code == "identical-models"
    assert (
        "because they may differ in epoch_1, which has a different number of such models" in advice
    )
    assert repair(folders[2]).steps == ()


def test_a_copy_is_not_exonerated_by_the_duplicate_that_is_gone(tmp_path: Path) -> None:
    """Nothing shows which of two entries with equal keys a repair left there."""
    net, copied, copy = Net(0), Net(1), Net(9)
    optimizers = [adamw(net), adamw(copied)]
    folders = []
    for number in (1, 2):
        step(optimizers[0])
        step(optimizers[1], scale=0.5)
        if number == 2:
            copy.load_state_dict(copied.state_dict())
        models = [net, wrap(net), copied, wrap(copy)]
        folders.append(save(tmp_path / f"epoch_{number}", models, optimizers))
    assert repair(folders[0]).status == 0
    assert (folders[0] / "pytorch_model_2.bin").exists()
    assert not (folders[0] / "pytorch_model_3.bin").exists()
    assert repair(folders[1]).steps == ()
    doubts = [one.advice for one in check(folders[1]).findings if one.code == "identical-models"]
    assert len(doubts) == 2
    assert all("because they may differ in epoch_1" in doubt for doubt in doubts)


def test_in_a_store_the_other_checkpoints_count_too(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}-{id(tmp_path)}/run"
    for is_copy in (True, False):
        folders = run_of(tmp_path / str(is_copy), is_copy=is_copy)
        for folder in folders:
            store = open_store(f"{url}-{is_copy}/{folder.name}")
            for path in folder.iterdir():
                store.put(path.name, path.read_bytes())
        code = "identical-models" if is_copy else "doubled-model"
        last = f"{url}-{is_copy}/checkpoint-15"
        assert verdict(last) == (code, verdict(folders[-1])[1])
        assert [step.fixes for step in repair(last, dry_run=True).steps] == [("doubled-model",)] * (
            not is_copy
        )


def test_what_may_not_be_read_softens_no_verdict(tmp_path: Path) -> None:
    for name in ("optimizer.bin", "random_states_1.pkl", "scheduler.bin"):
        folder = doubled(tmp_path / name)
        torch.save({"last_epoch": 1}, folder / "scheduler.bin")
        assert check(folder).status == 1
        with nobody_may_read(folder / name):
            report = check(folder)
            assert [one.code for one in report.findings] == ["doubled-model"]
            assert report.status == 3
            with pytest.raises(OperationError, match="but ckptfix cannot read 1 file: "):
                repair(folder)


def test_a_plan_that_would_add_a_finding_is_rolled_back(tmp_path: Path) -> None:
    """The optimizer of two towers would have parameters that no weights of the checkpoint belong
    to.
    """
    folder = of_twin_towers(tmp_path / "checkpoint")
    before = snapshot(folder)
    with pytest.raises(RolledBackError, match=r"the repair caused a new finding: optimizer\.bin"):
        repair(folder, policy=Policy(keep={Role.MODEL: 1}))
    assert snapshot(folder) == before
    with pytest.raises(OperationError, match=r"the repair caused a new finding: optimizer\.bin"):
        repair(folder, policy=Policy(keep={Role.MODEL: 1}), output=tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_save_that_lands_during_a_repair_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = doubled(tmp_path / "checkpoint")
    before = snapshot(folder)
    real = comparing.first_difference

    def saving(*args: Any, **kwargs: Any) -> Any:
        (folder / "pytorch_model_1.bin").write_bytes(b"")
        return real(*args, **kwargs)

    monkeypatch.setattr(pairing, "first_difference", saving)
    with pytest.raises(ChangedError) as error:
        repair(folder)
    assert f"{folder / 'pytorch_model_1.bin'} changed while it was read" in str(error.value)
    assert "next: wait until the save has ended, then: ckptfix repair" in str(error.value)
    assert snapshot(folder) == {**before, "pytorch_model_1.bin": b""}


@pytest.mark.parametrize(
    ("kind", "is_apart_first", "statuses"),
    [
        (Accelerator, False, [1, 1, 1]),
        (GuardedAccelerator, False, [0, 0, 0]),
        # A model that differed before may be a copied file.
        (GuardedAccelerator, True, [0, 1, 1]),
    ],
)
def test_a_guarded_save_records_that_a_target_network_is_a_model(
    tmp_path: Path, kind: type[Accelerator], is_apart_first: bool, statuses: list[int]
) -> None:
    """A hard update before each save made every checkpoint of a run a warning. Its files are those
    of a model that was prepared twice (accelerate 1.12, one process): only a record decides.
    """
    accelerator = kind(cpu=True)
    net, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net, target, optimizer = accelerator.prepare(net, target, optimizer)
    folders = [tmp_path / f"checkpoint_{number}" for number in range(3)]
    for number, folder in enumerate(folders):
        accelerator.backward(net(torch.ones(1, 3)).sum())
        optimizer.step()
        if number or not is_apart_first:
            target.load_state_dict(net.state_dict())
        accelerator.save_state(str(folder))
    assert [check(folder).status for folder in folders] == statuses
    assert [repair(folder).steps for folder in folders] == [()] * 3
