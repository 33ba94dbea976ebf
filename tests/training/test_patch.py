"""``patch_accelerate``: every Accelerator of the process is guarded, and can be let go again."""

import gc
import inspect
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import ProjectConfiguration
from torch import nn

from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.errors import UsageError
from ckptfix.training import guard
from ckptfix.training.accelerator import Accelerator, patch_accelerate, unpatch_accelerate
from ckptfix.training.resuming import run_state


def sgd(model: nn.Module | None = None) -> torch.optim.Optimizer:
    return torch.optim.SGD((model or nn.Linear(2, 2)).parameters())


def assert_guarded(made: Any, given: Any, first: Any, match: str = r"prepare\(\)") -> Any:
    """Assert that a second prepare() warns once and returns the first result; return the warning."""
    with pytest.warns(UserWarning, match=match) as seen:
        assert made.prepare(given) is first
    assert len(seen) == 1
    return seen[0]


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """The patch is one for the whole process."""
    yield
    unpatch_accelerate()


def stock(**arguments: Any) -> accelerate.Accelerator:
    return accelerate.Accelerator(cpu=True, **arguments)


def methods() -> dict[str, object]:
    return {name: getattr(accelerate.Accelerator, name) for name in dir(accelerate.Accelerator)}


def test_stock_accelerators_are_guarded() -> None:
    patch_accelerate()
    made, optimizer = stock(), sgd()
    warning = assert_guarded(made, optimizer, made.prepare(optimizer))
    assert warning.filename == __file__
    assert len(made._optimizers) == 1


def test_schedulers_are_known_that_are_older_than_the_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_state, "_SCHEDULERS", weakref.WeakKeyDictionary())
    optimizer = sgd()
    made = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    gc.collect()
    made.append(torch.optim.lr_scheduler.StepLR(optimizer, 2))
    patch_accelerate()
    stock().prepare(optimizer)
    made.append(torch.optim.lr_scheduler.ConstantLR(optimizer))
    mine = [one for one in made if one in run_state._SCHEDULERS]
    assert mine == sorted(made, key=run_state._SCHEDULERS.__getitem__)


def test_idempotent_and_taken_back() -> None:
    before = methods()
    patch_accelerate()
    patched = methods()
    patch_accelerate()
    assert methods() == patched
    assert patched != before
    for _ in range(2):
        unpatch_accelerate()
        assert methods() == before
    made, optimizer = stock(), sgd()
    assert made.prepare(optimizer) is not made.prepare(optimizer)


def test_an_accelerator_made_before() -> None:
    made, optimizer = stock(), sgd()
    patch_accelerate()
    assert_guarded(made, optimizer, made.prepare(optimizer))


def test_what_was_prepared_before() -> None:
    made = stock()
    raw = nn.Linear(2, 2)
    optimizer = sgd(raw)
    loader: Any = torch.utils.data.DataLoader(range(4))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    first = made.prepare(raw, optimizer, scheduler, loader)
    patch_accelerate()
    for given in (raw, optimizer, scheduler, nn.DataParallel(raw), *first):
        with pytest.warns(UserWarning, match="before the guard was enabled"):
            made.prepare(given)
    assert [
        len(kind) for kind in (made._models, made._optimizers, made._schedulers, made._dataloaders)
    ] == [1] * 4


def test_saves_are_whole_and_the_newest_whole_one_is_loaded(tmp_path: Path) -> None:
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    made = stock(project_config=config)
    model = made.prepare(nn.Linear(2, 2))
    patch_accelerate()
    weights = []
    for _ in range(2):
        nn.init.normal_(model.weight)
        weights.append(model.weight.detach().clone())
        saved = made.save_state()
        assert read_manifest(saved) is not None
    (saved / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match="passed over checkpoint_1"):
        made.load_state()
    assert torch.equal(model.weight, weights[0])
    assert made.save_state().name == "checkpoint_2"


def test_no_double_warning_with_the_subclass() -> None:
    patch_accelerate()
    made = Accelerator(cpu=True)
    raw = made.prepare(nn.Linear(2, 2))
    assert_guarded(made, raw, raw)
    assert len(made._models) == 1
    strict = Accelerator(cpu=True, on_reprepare="raise")
    strict.prepare(raw)
    with pytest.raises(UsageError):
        strict.prepare(raw)


def test_subclasses_of_others_are_guarded_too() -> None:
    class Theirs(accelerate.Accelerator):  # type: ignore[misc]
        def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            return super().prepare_model(model, *args, **kwargs)

    patch_accelerate()
    made = Theirs(cpu=True)
    raw = made.prepare(nn.Linear(2, 2))
    for verb in (made.prepare, made.prepare_model):
        with pytest.warns(UserWarning, match=r"prepare\(\)") as seen:
            verb(raw)
        assert len(seen) == 1
    assert len(made._models) == 1


def test_a_second_call_changes_the_settings() -> None:
    patch_accelerate()
    made = stock()
    raw = made.prepare(nn.Linear(2, 2))
    patch_accelerate(on_reprepare="raise")
    with pytest.raises(UsageError):
        made.prepare(raw)
    patch_accelerate(on_reprepare="allow")
    made.prepare(raw)
    with pytest.raises(ValueError, match="sometimes"):
        patch_accelerate(on_reprepare="sometimes")


def test_the_patch_of_another_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_accelerate()
    ours, calls = accelerate.Accelerator.prepare, []

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return ours(self, *args, **kwargs)

    theirs.__wrapped__ = ours  # type: ignore[attr-defined]
    monkeypatch.setattr(accelerate.Accelerator, "prepare", theirs)
    unpatch_accelerate()
    assert accelerate.Accelerator.prepare is theirs
    made, optimizer, other = stock(), sgd(), sgd()
    assert made.prepare(optimizer) is not made.prepare(optimizer), "the guard is off"
    patch_accelerate()
    assert_guarded(made, other, made.prepare(other))
    assert len(calls) == 3  # the fourth is answered in front of it
    unpatch_accelerate()


def test_loss_backward_is_noticed_and_forgotten() -> None:
    patch_accelerate()
    made = stock(gradient_accumulation_steps=2)
    raw = nn.Linear(2, 2)
    model, optimizer = made.prepare(raw, sgd(raw))

    def step() -> None:
        for _ in range(2):
            with made.accumulate(model):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

    with pytest.warns(UserWarning, match="2 times too large"):
        step()
    unpatch_accelerate()
    patch_accelerate(check_backward=False)
    step()
    unpatch_accelerate()
    step()
    assert not optimizer.optimizer._optimizer_step_pre_hooks


def test_the_signatures_are_kept() -> None:
    before = {
        name: inspect.signature(getattr(accelerate.Accelerator, name))
        for name in ("prepare", "prepare_model")
    }
    patch_accelerate()
    for name, signature in before.items():
        assert inspect.signature(getattr(accelerate.Accelerator, name)) == signature
        assert inspect.signature(getattr(Accelerator, name)) == signature


def test_nothing_is_kept_alive() -> None:
    patch_accelerate()
    made = stock()
    made.prepare(nn.Linear(2, 2))
    assert len(guard.GUARDS) >= 1
    before = len(guard.GUARDS)
    del made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
    assert len(guard.GUARDS) < before
