"""The guard in one process: what is held already is not prepared, nor registered, again."""

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from ckptfix.errors import UsageError
from tests.training.guard_making import accelerator, counts, model

WRAPPED_AGAIN: dict[str, Callable[[nn.Module], Any]] = {
    "itself": lambda module: module,
    "in DataParallel": nn.DataParallel,
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "compiled in DataParallel": lambda module: nn.DataParallel(
        torch.compile(module, backend="eager")
    ),
}


@pytest.mark.parametrize("again", WRAPPED_AGAIN)
@pytest.mark.parametrize("verb", ["prepare", "prepare_model"])
def test_a_model_is_prepared_once(verb: str, again: str) -> None:
    made = accelerator()
    first = made.prepare(model())
    with pytest.warns(UserWarning, match=r"prepare\(\)") as seen:
        second = getattr(made, verb)(WRAPPED_AGAIN[again](first))
    assert second is first
    assert len(seen) == 1
    assert counts(made) == (1, 0, 0, 0, 0)


def test_the_warning_names_the_line_that_called_and_what_would_come_of_it() -> None:
    made = accelerator()
    raw = model()
    first_line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    made.prepare(raw)
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="Linear") as seen:
        made.prepare(raw, raw)
    (warning,) = seen
    text = str(warning.message)
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert f"{__file__}:{line}" in text
    assert f"first at {__file__}:{first_line}" in text
    for part in (
        "save_state may write it a second time",
        "prepare()",
        "Linear",
    ):
        assert part in text


def test_every_call_warns_even_from_the_same_line() -> None:
    made = accelerator()
    raw = made.prepare(model())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            made.prepare(raw)
    assert len(seen) == 3


def test_twice_in_one_call() -> None:
    made = accelerator()
    raw, other = model(), model(1)
    optimizer = torch.optim.SGD(raw.parameters())
    with pytest.warns(UserWarning, match="Linear, SGD") as seen:
        a, b, x, c, y = made.prepare(raw, raw, optimizer, other, optimizer)
    assert len(seen) == 1
    assert a is b
    assert a is raw
    assert c is other
    assert x is y
    assert counts(made) == (2, 1, 0, 0, 0)


def test_a_model_and_a_wrapper_around_it_in_one_call() -> None:
    made = accelerator()
    raw = model()
    with pytest.warns(UserWarning, match=r"prepare\(\)"):
        a, b = made.prepare(raw, nn.DataParallel(raw))
    assert a is b is raw
    assert counts(made) == (1, 0, 0, 0, 0)


def test_optimizers_schedulers_and_loaders_are_prepared_once() -> None:
    made = accelerator()
    raw = model()
    optimizer = torch.optim.AdamW(raw.parameters())
    scheduler = StepLR(optimizer, 2)
    loader: Any = torch.utils.data.DataLoader(range(4))
    first = made.prepare(raw, optimizer, scheduler, loader)
    with pytest.warns(UserWarning, match="Linear, AdamW, StepLR, DataLoader") as seen:
        second = made.prepare(raw, optimizer, scheduler, loader)
    assert len(seen) == 1
    assert all(a is b for a, b in zip(first, second, strict=True))
    with pytest.warns(UserWarning, match="AcceleratedOptimizer"):
        third = made.prepare(*first)
    assert all(a is b for a, b in zip(first, third, strict=True))
    verbs = ("prepare_model", "prepare_optimizer", "prepare_scheduler", "prepare_data_loader")
    for verb, raw_one, prepared in zip(
        verbs, (raw, optimizer, scheduler, loader), first, strict=True
    ):
        with pytest.warns(UserWarning, match=rf"{verb}\(\)"):
            assert getattr(made, verb)(raw_one) is prepared
    assert counts(made) == (1, 1, 1, 1, 0)


def test_keyword_calls() -> None:
    made = accelerator()
    raw = model()
    optimizer = torch.optim.SGD(raw.parameters())
    first = made.prepare_model(model=raw, device_placement=False)
    wrapped = made.prepare_optimizer(optimizer=optimizer)
    with pytest.warns(UserWarning, match="prepare_model"):
        assert made.prepare_model(model=raw, device_placement=False) is first
    with pytest.warns(UserWarning, match="prepare_optimizer"):
        assert made.prepare_optimizer(optimizer=optimizer, device_placement=False) is wrapped
    loader: Any = torch.utils.data.DataLoader(range(4))
    sliced = made.prepare_data_loader(loader, False, lambda *a, **k: None)
    with pytest.warns(UserWarning, match="prepare_data_loader"):
        assert made.prepare_data_loader(data_loader=loader) is sliced
    assert counts(made) == (1, 1, 0, 1, 0)
    with pytest.raises(TypeError, match="model"):
        made.prepare_model()
    with pytest.raises(TypeError, match="loss"):
        made.backward()


def test_device_placement_goes_with_its_object() -> None:
    made = accelerator()
    raw, other = model(), model(1)
    made.prepare(raw)
    with pytest.warns(UserWarning, match=r"prepare\(\)"):
        assert made.prepare(raw, other, device_placement=[True, False]) == (raw, other)
    with pytest.raises(ValueError, match="2 elements"):
        made.prepare(raw, other, device_placement=[True])


def test_custom_objects_are_registered_once() -> None:
    made = accelerator()
    counter, equal = StepLR(torch.optim.SGD(model().parameters()), 1), model()
    made.register_for_checkpointing(counter)
    with pytest.warns(UserWarning, match=r"register_for_checkpointing\(\) at .*StepLR") as seen:
        made.register_for_checkpointing(counter, equal, equal)
    assert len(seen) == 1
    assert made._custom_objects == [counter, equal]
    with pytest.raises(ValueError, match="state_dict"):
        made.register_for_checkpointing(3)


def test_raise() -> None:
    made = accelerator(on_reprepare="raise")
    raw, other = made.prepare(model()), model(1)
    with pytest.raises(UsageError, match=r"prepare\(\)"):
        made.prepare(raw, other)
    with pytest.raises(UsageError, match="prepare_model"):
        made.prepare_model(raw)
    assert counts(made) == (1, 0, 0, 0, 0)
    counter = model()
    made.register_for_checkpointing(counter)
    with pytest.raises(UsageError, match="register_for_checkpointing"):
        made.register_for_checkpointing(counter)
    assert counts(made) == (1, 0, 0, 0, 1)


def test_allow_does_as_accelerate_does() -> None:
    made = accelerator(on_reprepare="allow")
    raw = model()
    optimizer = torch.optim.SGD(raw.parameters())
    a, b = made.prepare(optimizer), made.prepare(optimizer)
    assert a is not b
    assert counts(made) == (0, 2, 0, 0, 0)


def test_no_other_word_is_taken() -> None:
    with pytest.raises(ValueError, match="perhaps"):
        accelerator(on_reprepare="perhaps")


def test_equal_models_are_not_the_same_model() -> None:
    made = accelerator()
    student = model()
    teacher = copy.deepcopy(student)
    # Keeps a copy under the name of a wrapper.
    averaged = torch.optim.swa_utils.AveragedModel(student)
    prepared = made.prepare(student, teacher, averaged)
    assert [id(one) for one in prepared] == [id(student), id(teacher), id(averaged)]
    assert counts(made) == (3, 0, 0, 0, 0)
    assert made.prepare(copy.deepcopy(teacher)) not in (student, teacher)
    assert counts(made) == (4, 0, 0, 0, 0)


class AlwaysEqual:
    """Equal to everything, and not hashable."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_identity_not_equality() -> None:
    made = accelerator()
    made.register_for_checkpointing(AlwaysEqual(), AlwaysEqual())
    assert counts(made) == (0, 0, 0, 0, 2)


def test_a_model_with_a_child_called_module_is_no_wrapper() -> None:
    class Holder(nn.Module):  # type: ignore[misc]
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.module = inside

    made = accelerator()
    raw = model()
    holder = Holder(raw)
    assert made.prepare(raw, holder) == (raw, holder)
    assert counts(made) == (2, 0, 0, 0, 0)


def test_other_arguments_go_through() -> None:
    made = accelerator()
    raw = model()
    assert made.prepare(None, 3, "x", raw, None, 3) == (None, 3, "x", raw, None, 3)
    with pytest.warns(UserWarning, match="Linear"):
        assert made.prepare(None, raw) == (None, raw)
    assert made.prepare(None) is None
    assert counts(made) == (1, 0, 0, 0, 0)


def test_megatron_is_left_to_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """It builds models from a configuration; it cannot be run here, so only that nothing is changed
    is shown.
    """
    made = accelerator()
    raw = model()
    calls = []

    def prepare_megatron_lm(*given: Any) -> Any:
        calls.append(given)
        return given

    monkeypatch.setattr(made.state, "distributed_type", accelerate.DistributedType.MEGATRON_LM)
    monkeypatch.setattr(made, "_prepare_megatron_lm", prepare_megatron_lm)
    assert made.prepare(raw, raw) == (raw, raw)
    assert made.prepare(raw) is raw
    assert calls == [(raw, raw), (raw,)]


def test_one_model_for_deepspeed_stays_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    made = accelerator()

    def prepare_deepspeed(*given: Any) -> Any:
        made._models.append(given[0])
        return given

    monkeypatch.setattr(made.state, "distributed_type", accelerate.DistributedType.DEEPSPEED)
    monkeypatch.setattr(made, "_prepare_deepspeed", prepare_deepspeed)
    raw = model()
    with pytest.raises(AssertionError, match="multiple models"):
        made.prepare(raw, model(1))
    made.prepare(raw)
    with pytest.raises(AssertionError, match="multiple models"):
        made.prepare(raw, model(1))
    with pytest.warns(UserWarning, match=r"prepare\(\)"):
        assert made.prepare(raw, raw) == (raw, raw)
    assert counts(made) == (1, 0, 0, 0, 0)
