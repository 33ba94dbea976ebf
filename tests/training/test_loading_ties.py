"""Loads of weights that had values of their own when they were saved, into a model that ties
them.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, init_empty_weights
from torch import nn

from ckptfix.training.loading.load_report import LoadError, LoadPolicy, LoadReport
from ckptfix.training.loading.load_state import load_checkpoint_tolerant, load_state_tolerant
from fixtures.models import Tied
from tests.training.loading_runs import make_run, reset, seeded

SAID = (
    "'embed.weight' and 'lm_head.weight' differ in the file but are one tensor of this run's "
    "model, 'lm_head.weight', which gets the values of 'lm_head.weight'"
)


def saved(folder: Path, *, is_equal: bool = False, **save: Any) -> tuple[torch.Tensor, Path]:
    """Save a model with a head of its own; return the head and the folder."""
    reset()
    model = seeded(Tied, 1)
    model.lm_head.weight = nn.Parameter(model.embed.weight.detach() + (not is_equal))
    make_run(model, optimizer=None).accelerator.save_state(str(folder), **save)
    reset()
    return model.lm_head.weight.detach().clone(), folder


def of_a_run(model: nn.Module, folder: Path, policy: LoadPolicy) -> LoadReport:
    accelerator = make_run(model, optimizer=None).accelerator
    return load_state_tolerant(accelerator, folder, policy=policy)


def alone(model: nn.Module, folder: Path, policy: LoadPolicy) -> LoadReport:
    return load_checkpoint_tolerant(model, folder, policy=policy)


Load = Callable[[nn.Module, Path, LoadPolicy], LoadReport]

loads = pytest.mark.parametrize(
    ("load", "save"),
    [
        (of_a_run, {}),
        (of_a_run, {"safe_serialization": False}),
        (alone, {}),
        (alone, {"max_shard_size": "300B"}),
    ],
    ids=["run", "run, bin", "alone", "alone, sharded"],
)


@loads
def test_different_values_for_one_parameter_are_a_failure(
    tmp_path: Path, load: Load, save: dict[str, Any]
) -> None:
    """The last one won, and the report said "restored"."""
    _, folder = saved(tmp_path / "c", **save)
    model = seeded(Tied, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(LoadError, match="nothing was modified") as error:
        load(model, folder, LoadPolicy())
    assert SAID in str(error.value)
    assert 'next: pass policy=LoadPolicy(models="partial")' in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@loads
@pytest.mark.parametrize("word", ["partial", "warn"])
def test_the_report_says_whose_values_a_tied_parameter_has(
    tmp_path: Path, load: Load, save: dict[str, Any], word: str
) -> None:
    head, folder = saved(tmp_path / "c", **save)
    model = seeded(Tied, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = load(model, folder, LoadPolicy(models=word, rng="ignore", step="ignore"))  # type: ignore[arg-type]
    (line,) = report.of("models")
    assert (line.status.value, line.reason) == ("adapted", SAID)
    assert f"{folder}: {line}" in [str(each.message) for each in caught]
    assert torch.equal(model.embed.weight, head)


@loads
def test_equal_values_for_one_parameter_are_restored(
    tmp_path: Path, load: Load, save: dict[str, Any]
) -> None:
    head, folder = saved(tmp_path / "c", is_equal=True, **save)
    model = seeded(Tied, 2)
    (line,) = load(model, folder, LoadPolicy()).of("models")
    assert (line.status.value, line.reason) == ("restored", "")
    assert torch.equal(model.embed.weight, head)


def test_values_that_become_equal_in_the_dtype_of_the_model_do_not_differ(tmp_path: Path) -> None:
    state = seeded(Tied, 1).state_dict()
    state["lm_head.weight"] = state["embed.weight"] + 1e-30
    state["embed.weight"] = state["embed.weight"].double()
    torch.save(state, tmp_path / "m.bin")
    (line,) = load_checkpoint_tolerant(seeded(Tied, 2), tmp_path / "m.bin")
    assert line.reason == "dtype float64 to float32"


class Three(nn.Module):  # type: ignore[misc]
    """One parameter under three names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = self.c = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("values", "pairs"),
    [((1, 2, 3), ("ac", "bc")), ((1, 1, 3), ("ac", "bc")), ((1, 3, 3), ("ac",)), ((3, 3, 3), ())],
)
def test_each_key_is_compared_with_the_one_that_the_tensor_has(
    tmp_path: Path, values: tuple[float, ...], pairs: tuple[str, ...]
) -> None:
    state = {
        name: torch.full((2,), float(value)) for name, value in zip("abc", values, strict=True)
    }
    torch.save(state, tmp_path / "m.bin")
    model = Three()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (line,) = load_checkpoint_tolerant(
            model,
            tmp_path / "m.bin",
            policy=LoadPolicy(models="partial"),  # type: ignore[arg-type]
        )
    assert line.reason.count("differ in the file") == len(pairs)
    assert all(f"{pair[0]!r} and {pair[1]!r} differ in the file" in line.reason for pair in pairs)
    assert model.a.tolist() == [3, 3]


class Halves(nn.Module):  # type: ignore[misc]
    """A buffer, and the second half of it under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(8))
        self.register_buffer("tail", self.whole[4:])


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_part_of_a_tensor_is_compared_with_that_part(tmp_path: Path, is_equal: bool) -> None:
    whole = torch.arange(8.0)
    torch.save({"whole": whole, "tail": whole[4:] + (not is_equal)}, tmp_path / "m.bin")
    model = Halves()
    if is_equal:
        assert load_checkpoint_tolerant(model, tmp_path / "m.bin").is_complete
        assert torch.equal(model.whole, whole)
        return
    with pytest.raises(LoadError, match="'whole' and 'tail' differ in the file"):
        load_checkpoint_tolerant(model, tmp_path / "m.bin")


def test_an_offloaded_model_is_compared_too(tmp_path: Path) -> None:
    _, folder = saved(tmp_path / "c")
    model = cpu_offload(seeded(Tied, 2), execution_device=torch.device("cpu"))
    with pytest.raises(LoadError, match="differ in the file"):
        load_checkpoint_tolerant(model, folder)


def test_a_model_without_memory_gets_both_values(tmp_path: Path) -> None:
    """A load makes a tensor for each key."""
    head, folder = saved(tmp_path / "c")
    with init_empty_weights():
        model = Tied()
    (line,) = load_checkpoint_tolerant(model, folder)
    assert line.status.value == "restored"
    assert torch.equal(model.lm_head.weight, head)
    assert not torch.equal(model.embed.weight, head)
