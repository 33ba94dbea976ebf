"""Optimizers and schedulers that were saved twice with their models: which go, and when the user is
asked.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix import Policy, check, repair, undo
from ckptfix.checkpoint.roles import Role
from tests.repairs.builders import save_states, snapshot


class Pair:
    """A model and its optimizer, trained or not."""

    def __init__(
        self,
        seed: int,
        *,
        kind: str = "AdamW",
        named: bool = False,
        steps: int = 2,
        width: int = 3,
    ) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(width, 2)
        options = {"momentum": 0.9} if kind == "Momentum" else {}
        parameters = self.model.named_parameters() if named else self.model.parameters()
        self.optimizer = getattr(torch.optim, "SGD" if kind == "Momentum" else kind)(
            parameters, lr=0.1, **options
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=10 + seed)
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, width)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    @property
    def wrapped(self) -> torch.nn.Module:
        outer = torch.nn.Module()
        outer.module = self.model
        return outer


def codes(folder: Path) -> list[str]:
    return [finding.code for finding in check(folder).findings]


def loaded(folder: Path, stem: str) -> list[Any]:
    paths = sorted(folder.glob(f"{stem}*.bin"), key=lambda path: (len(path.name), path.name))
    return [torch.load(path, weights_only=True) for path in paths]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, torch.Tensor):
        return bool(torch.equal(left, right))
    return bool(left == right)


@pytest.mark.parametrize("order", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)])
@pytest.mark.parametrize("kind", ["AdamW", "Momentum"])
@pytest.mark.parametrize("named", [False, True])
def test_optimizers_go_with_their_models(
    tmp_path: Path, kind: str, named: bool, order: tuple[int, ...]
) -> None:
    """Left alone, load_state gives the second model's optimizer the state of the first, without a
    word.
    """
    pairs = [Pair(seed, kind=kind, named=named) for seed in range(2)]
    models = [state for pair in pairs for state in (pair.model, pair.wrapped)]
    optimizers = [pairs[number].optimizer for number in order]
    schedulers = [pairs[number].scheduler for number in order]
    folder = save_states(tmp_path / "c", models, optimizers, schedulers)
    before = snapshot(folder)
    assert codes(folder).count("doubled-states") == 4
    receipt = repair(folder)
    assert receipt.status == 0
    assert all(
        map(same, loaded(folder, "optimizer"), [pair.optimizer.state_dict() for pair in pairs])
    )
    assert all(
        map(same, loaded(folder, "scheduler"), [pair.scheduler.state_dict() for pair in pairs])
    )
    assert len(loaded(folder, "optimizer")) == len(loaded(folder, "scheduler")) == 2
    assert repair(folder).steps == ()
    undo(folder)
    assert snapshot(folder) == before


def test_two_optimizers_of_one_model_stay_two(tmp_path: Path) -> None:
    """Muon for the matrices, AdamW for the rest."""
    one = Pair(0)
    other = torch.optim.SGD([one.model.bias], lr=0.1, momentum=0.9)
    one.model(torch.ones(1, 3)).sum().backward()
    other.step()
    folder = save_states(
        tmp_path / "c", [one.model, one.wrapped], [one.optimizer, other, one.optimizer, other]
    )
    assert repair(folder).status == 0
    assert all(
        map(same, loaded(folder, "optimizer"), [one.optimizer.state_dict(), other.state_dict()])
    )
    plain = save_states(tmp_path / "d", [one.model], [one.optimizer, other])
    assert codes(plain) == []


def test_what_keeps_no_moments_is_asked_about(tmp_path: Path) -> None:
    """All states of plain SGD are equal: how many the script has, nobody can see."""
    pairs = [Pair(seed, kind="SGD") for seed in range(2)]
    models = [state for pair in pairs for state in (pair.model, pair.wrapped)]
    folder = save_states(
        tmp_path / "c", models, [pair.optimizer for pair in pairs for _ in range(2)]
    )
    assert codes(folder).count("identical-models") == 2
    assert repair(folder).steps == ()
    receipt = repair(folder, policy=Policy(keep={Role.MODEL: 2}))
    assert {finding.code for finding in receipt.left} == {"surplus-states"}
    assert len(loaded(folder, "pytorch_model")) == 2
    assert len(loaded(folder, "optimizer")) == 4
    receipt = repair(folder)
    assert (receipt.status, receipt.steps) == (1, ())
    (stay,) = receipt.unplanned
    assert stay.code == "surplus-states"
    assert "optimizer 1 from optimizer_1.bin" in stay.reason
    assert "--keep optimizers=N" in stay.reason
    assert repair(folder, policy=Policy(keep={Role.OPTIMIZER: 2})).status == 0
    assert len(loaded(folder, "optimizer")) == 2


def test_an_optimizer_of_no_model_that_remains_decides_nothing(tmp_path: Path) -> None:
    one, other = Pair(0), Pair(1, width=5)
    optimizers = [one.optimizer, other.optimizer, other.optimizer]
    folder = save_states(tmp_path / "c", [one.model, one.wrapped], optimizers, [one.scheduler])
    receipt = repair(folder)
    assert receipt.status == 1
    assert {finding.code for finding in receipt.left} == {"surplus-states", "unsaved-parameters"}
    assert len(loaded(folder, "optimizer")) == 3


def test_equal_moments_without_a_doubled_model_are_a_warning(tmp_path: Path) -> None:
    one, other = Pair(0), Pair(1)
    folder = save_states(
        tmp_path / "c", [one.model, other.model], [one.optimizer, one.optimizer, other.optimizer]
    )
    report = check(folder)
    assert [finding.code for finding in report.findings] == ["surplus-states"]
    assert report.status == 1
    assert repair(folder).status == 1
    assert len(loaded(folder, "optimizer")) == 3
    for code in ("identical-states", "surplus-states"):
        policy = Policy(keep={Role.OPTIMIZER: 2}, only=frozenset({code}))
        assert len(repair(folder, policy=policy, dry_run=True).steps) == 2
    assert repair(folder, policy=Policy(keep={Role.OPTIMIZER: 2})).status == 0
    assert same(loaded(folder, "optimizer")[1], other.optimizer.state_dict())


def test_states_stay_with_a_doubled_model_that_stays(tmp_path: Path) -> None:
    one = Pair(0)
    folder = save_states(
        tmp_path / "c", [one.model, one.wrapped], [one.optimizer] * 2, [one.scheduler]
    )
    receipt = repair(folder, policy=Policy(only=frozenset({"doubled-states"})))
    assert receipt.steps == ()
    assert "a duplicate model from the same save is kept" in receipt.unplanned[0].reason


@pytest.mark.parametrize(
    "kind", ["AdamW", "Momentum", "Adagrad", "RMSprop", "Adadelta", "Adafactor", "Rprop"]
)
def test_before_the_first_step_an_average_equals_its_model(tmp_path: Path, kind: str) -> None:
    folder = save_states(
        tmp_path / "c", [Pair(0).model, Pair(0).wrapped], [Pair(0, kind=kind, steps=0).optimizer]
    )
    assert codes(folder)[0] == "identical-models"
    assert repair(folder).steps == ()


@pytest.mark.parametrize("kind", ["AdamW", "Momentum", "Adagrad"])
def test_after_a_step_it_is_a_second_prepare(tmp_path: Path, kind: str) -> None:
    pair = Pair(0, kind=kind)
    folder = save_states(
        tmp_path / "c", [pair.model, pair.wrapped], [pair.optimizer], [pair.scheduler]
    )
    assert codes(folder) == ["doubled-model"]


def test_one_optimizer_without_a_step_leaves_the_average_of_its_model(tmp_path: Path) -> None:
    """A GAN that trains its discriminator first; the generator, of the same shapes, still equals
    its average.
    """
    first, later = Pair(0), Pair(1, steps=0)
    folder = save_states(
        tmp_path / "c",
        [first.model, later.model, later.wrapped],
        [first.optimizer, later.optimizer],
    )
    assert codes(folder)[0] == "identical-models"
    receipt = repair(folder)
    assert (receipt.status, receipt.steps) == (1, ())


def test_an_optimizer_that_cannot_be_read_may_be_untrained(tmp_path: Path) -> None:
    folder = save_states(
        tmp_path / "c", [Pair(0).model, Pair(0).wrapped], [Pair(0, steps=0).optimizer]
    )
    with open(folder / "optimizer.bin", "r+b") as file:
        file.truncate(900)
    assert codes(folder) == ["truncated-file", "identical-models", "wrapper-prefix"]
    assert repair(folder).steps == ()


def untrained(optimizer: Any, model: Any) -> Any:
    """Let an optimizer step with gradients of zeros, as before a discriminator begins."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("is_twice", [False, True])
def test_equal_optimizers_of_discriminators_that_have_not_begun_stay(
    tmp_path: Path, is_twice: bool
) -> None:
    """Their moments are zeros, and so equal: the corrected script needs one for each model."""
    generator = Pair(0)
    critics = [Pair(seed, width=5, steps=0) for seed in (1, 2)]
    optimizers = [untrained(one.optimizer, one.model) for one in critics]
    models = [generator.model, generator.wrapped, *(one.model for one in critics)]
    own = [generator.optimizer] * (1 + is_twice)
    schedulers = [generator.scheduler] * (1 + is_twice) + [one.scheduler for one in critics]
    folder = save_states(tmp_path / "c", models, [*own, *optimizers], schedulers)
    receipt = repair(folder)
    assert receipt.status == 0
    assert len(loaded(folder, "pytorch_model")) == 3
    expected = [one.state_dict() for one in (generator.optimizer, *optimizers)]
    assert all(map(same, loaded(folder, "optimizer"), expected))
    assert len(loaded(folder, "optimizer")) == len(loaded(folder, "scheduler")) == 3


def test_two_optimizers_for_two_towers_stay(tmp_path: Path) -> None:
    """Towers that begin alike and see one batch have equal moments for as long as they train."""
    net = torch.nn.Module()
    net.left, net.right = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    outer = torch.nn.Module()
    outer.module = net
    optimizers = [torch.optim.AdamW(tower.parameters()) for tower in (net.left, net.right)]
    for tower, optimizer in zip((net.left, net.right), optimizers, strict=True):
        for parameter in tower.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    folder = save_states(tmp_path / "c", [net, outer], optimizers)
    receipt = repair(folder)
    assert receipt.status == 1
    assert [finding.code for finding in receipt.left] == ["surplus-states"]
    assert len(loaded(folder, "pytorch_model")) == 1
    assert len(loaded(folder, "optimizer")) == 2
