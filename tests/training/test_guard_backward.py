"""``loss.backward()`` where ``accelerator.backward(loss)`` had to divide or scale: one warning."""

import inspect
import warnings
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from ckptfix.training.accelerator import Accelerator


class Training:
    """One model and its optimizer."""

    def __init__(self, accelerator: Accelerator, optimizers: int = 1) -> None:
        self.accelerator = accelerator
        raw = nn.Linear(3, 1)
        given = [torch.optim.SGD(raw.parameters(), lr=0.1) for _ in range(optimizers)]
        self.model, *self.optimizers = accelerator.prepare(raw, *given)

    def step(self, *, rightly: bool, count: int = 1) -> None:
        for _ in range(count):
            with self.accelerator.accumulate(self.model):
                loss = self.model(torch.ones(1, 3)).sum()
                if rightly:
                    self.accelerator.backward(loss)
                else:
                    loss.backward()
                for optimizer in self.optimizers:
                    optimizer.step()
                for optimizer in self.optimizers:
                    optimizer.zero_grad()


def test_one_warning_that_names_the_line() -> None:
    training = Training(Accelerator(cpu=True, gradient_accumulation_steps=2))
    with pytest.warns(UserWarning, match=r"accelerator\.backward\(loss\)") as seen:
        training.step(rightly=False, count=6)
    (warning,) = seen
    lines, start = inspect.getsourcelines(Training.step)
    line = start + next(number for number, text in enumerate(lines) if "optimizer.step()" in text)
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert "2 times too large" in str(warning.message)
    assert "check_backward=False" in str(warning.message)


def test_nothing_is_said_of_correct_scripts() -> None:
    training = Training(Accelerator(cpu=True, gradient_accumulation_steps=2), optimizers=3)
    training.step(rightly=True, count=6)  # a warning is an error here


def test_nothing_is_said_where_nothing_is_lost() -> None:
    Training(Accelerator(cpu=True)).step(rightly=False, count=3)


def test_opt_out() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, check_backward=False)
    Training(accelerator).step(rightly=False, count=4)


def test_with_a_scaler() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    training = Training(accelerator)
    training.step(rightly=True, count=2)
    with pytest.warns(UserWarning, match="the loss was not scaled"):
        training.step(rightly=False)


def test_with_a_scaler_that_is_off() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
    Training(accelerator).step(rightly=False)


def test_a_step_without_gradients() -> None:
    training = Training(Accelerator(cpu=True, gradient_accumulation_steps=2))
    training.accelerator.gradient_state._set_sync_gradients(True)
    training.optimizers[0].step()


def test_two_accelerators_that_share_an_optimizer() -> None:
    first = Training(Accelerator(cpu=True, gradient_accumulation_steps=2))
    second = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer: Any = second.prepare(first.optimizers[0])
    for _ in range(2):
        with second.accumulate(first.model):
            second.backward(first.model(torch.ones(1, 3)).sum())
            optimizer.step()


def test_after_free_memory_the_optimizer_is_not_watched() -> None:
    training = Training(Accelerator(cpu=True, gradient_accumulation_steps=2))
    training.accelerator.free_memory()
    training.step(rightly=False, count=2)
    raw = training.optimizers[0].optimizer
    assert not raw._optimizer_step_pre_hooks


@pytest.mark.slow
def test_a_compiled_step() -> None:
    training = Training(Accelerator(cpu=True, gradient_accumulation_steps=2))
    raw = training.optimizers[0].optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own
        raw.step = torch.compile(raw.step, backend="eager")
        training.step(rightly=True, count=4)


def test_the_values_it_warns_of() -> None:
    """The symptom (accelerate#1990): gradients times the accumulation steps."""
    results = []
    for rightly in (True, False):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, check_backward=False)
        training = Training(accelerator)
        before = training.model.weight.detach().clone()
        training.step(rightly=rightly, count=4)
        results.append(training.model.weight.detach() - before)
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    assert torch.allclose(results[1], 4 * results[0])
