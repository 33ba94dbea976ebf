"""What the guard lets through: a stale flag, a copy or a failed call never stands for a
preparation.
"""

import copy
import gc
import warnings
import weakref
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import find_executable_batch_size
from torch import nn

from ckptfix.training.guard import guard_of
from tests.training.guard_making import accelerator, computes_in_bf16, counts, model


def test_autocast_is_there_after_another_accelerator() -> None:
    other = accelerate.Accelerator(cpu=True)  # not guarded: it leaves its flag
    raw = other.prepare(model())
    AcceleratorState._reset_state(True)
    made = accelerator(mixed_precision="bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert computes_in_bf16(made.prepare(raw))
    assert counts(made) == (1, 0, 0, 0, 0)


def test_autocast_is_gone_where_it_is_not_asked_for() -> None:
    raw = accelerator(mixed_precision="bf16").prepare(model())
    assert computes_in_bf16(raw)
    AcceleratorState._reset_state(True)
    assert not computes_in_bf16(accelerator().prepare(raw))


def test_autocast_is_there_after_a_deepcopy() -> None:
    made = accelerator(mixed_precision="bf16")
    raw = made.prepare(model())
    twin = made.prepare(copy.deepcopy(raw))
    assert twin is not raw
    assert computes_in_bf16(raw)
    assert computes_in_bf16(twin)
    assert counts(made) == (2, 0, 0, 0, 0)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
    assert not twin(torch.ones(1, 10)).any(), "the copy computes with the weights of the original"


def test_prepared_anew_after_free_memory() -> None:
    made = accelerator(mixed_precision="bf16")
    raw = model()
    optimizer = torch.optim.SGD(raw.parameters())
    first = made.prepare(raw, optimizer)
    made.free_memory()
    assert counts(made) == (0, 0, 0, 0, 0)
    second = made.prepare(*first)
    assert counts(made) == (1, 1, 0, 0, 0)
    assert computes_in_bf16(second[0])
    assert second[1].optimizer is optimizer
    made.clear()
    made.prepare(raw, optimizer)
    assert counts(made) == (1, 1, 0, 0, 0)


def test_a_compiled_model_stays_compiled_when_it_is_prepared_anew() -> None:
    made = accelerator(mixed_precision="bf16")
    raw = made.prepare(model())
    made.free_memory()
    compiled = torch.compile(raw, backend="eager")
    assert made.prepare(compiled) is compiled
    assert computes_in_bf16(compiled)


def test_what_accelerate_compiled_is_compiled_once() -> None:
    made = accelerator(dynamo_backend="eager")
    raw = model()
    first = made.prepare(raw)
    assert type(first).__name__ == "OptimizedModule"
    for again in (raw, first):
        with pytest.warns(UserWarning, match=r"prepare\(\)"):
            assert made.prepare(again) is first
    made.free_memory()
    second = made.prepare(first)
    assert second._orig_mod is raw
    assert counts(made) == (1, 0, 0, 0, 0)


def test_forward_that_others_replaced_is_left_alone() -> None:
    made = accelerator(mixed_precision="bf16")
    raw = made.prepare(model())
    made.free_memory()
    theirs = raw.forward
    raw.forward = lambda *given: theirs(*given) * 0
    assert not made.prepare(raw)(torch.ones(1, 10)).any()


def test_evaluation_first_and_training_later() -> None:
    made = accelerator(mixed_precision="bf16")
    raw, teacher = model(), model(1)
    made.prepare_model(raw, evaluation_mode=True)
    made.prepare(teacher)
    trained = made.prepare(raw)
    assert computes_in_bf16(trained)
    assert counts(made) == (2, 0, 0, 0, 0)
    with pytest.warns(UserWarning, match="prepare_model"):
        assert made.prepare_model(raw, None, True) is trained
    assert counts(made) == (2, 0, 0, 0, 0)


@pytest.mark.slow
def test_run_again_with_a_smaller_batch() -> None:
    made = accelerator()
    raw = model()
    optimizer = torch.optim.SGD(raw.parameters())
    sizes = []

    @find_executable_batch_size(starting_batch_size=8)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> Any:
        made.free_memory()
        prepared = made.prepare(raw, optimizer)
        sizes.append(batch_size)
        if batch_size > 2:
            raise RuntimeError("CUDA out of memory.")
        return prepared

    train()
    assert len(sizes) > 1
    assert counts(made) == (1, 1, 0, 0, 0)


def test_run_again_without_freeing_memory() -> None:
    made = accelerator()
    raw = model()
    first = made.prepare(raw)
    with pytest.warns(UserWarning, match=r"prepare\(\)"):
        assert made.prepare(raw) is first
    assert counts(made) == (1, 0, 0, 0, 0)


def test_a_call_that_fails_registers_nothing() -> None:
    class Refuses(nn.Linear):  # type: ignore[misc]
        refuses = True

        def to(self, *args: Any, **kwargs: Any) -> Any:
            if self.refuses:
                raise RuntimeError("out of memory")
            return super().to(*args, **kwargs)

    made = accelerator(mixed_precision="bf16")
    first, other = Refuses(10, 2), model()
    with pytest.raises(RuntimeError, match="out of memory"):
        made.prepare(other, first)
    assert counts(made) == (0, 0, 0, 0, 0)
    first.refuses = False
    made.prepare(other, first)
    assert counts(made) == (2, 0, 0, 0, 0)
    assert computes_in_bf16(first)


def test_registries_emptied_by_hand() -> None:
    made = accelerator()
    raw = model()
    made.prepare(raw)
    made._models.clear()
    made.prepare(raw)
    assert counts(made) == (1, 0, 0, 0, 0)


def test_the_guard_keeps_nothing_alive_that_was_let_go() -> None:
    made = accelerator()
    raw = model()
    alive = weakref.ref(raw)
    made.prepare(raw)
    made._models.clear()
    del raw
    made.prepare(model(1))  # any guarded call looks at the registries
    gc.collect()
    assert alive() is None
    raw = model()
    alive = weakref.ref(raw)
    made.prepare(raw)
    del raw
    made.free_memory()
    assert alive() is None


def test_an_accelerator_is_not_kept_alive() -> None:
    made = accelerator()
    made.prepare(model())
    alive = weakref.ref(guard_of(made))
    del made
    gc.collect()
    assert alive() is None
