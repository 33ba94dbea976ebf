"""The guard in two processes on gloo: DistributedDataParallel and both kinds of FSDP, run once for
all tests here.
"""

import json
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from tests.training.loading_runs import reset
from tests.training.rank_cases import Ranks, run_cases

pytestmark = pytest.mark.slow


def of_one_process() -> tuple[Any, Any, Any]:
    """Return a stock accelerator, and its model and optimizer."""
    reset()
    torch.manual_seed(3)
    model = torch.nn.Linear(10, 2)
    accelerator = accelerate.Accelerator(cpu=True)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def values_of(model: Any) -> list[float]:
    values: list[float] = model.weight.detach().flatten().tolist()
    return values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of one process, for the ranks to load."""
    made = tmp_path_factory.mktemp("ranks")
    accelerator, model, optimizer = of_one_process()
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    accelerator.save_state(str(made / "one"))
    (made / "one.json").write_text(json.dumps(values_of(model)))
    reset()
    return made


@pytest.fixture(scope="module")
def seen(folder: Path) -> Ranks:
    return run_cases("tests.training.guard_ranks", folder)


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def rank(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


def test_without_the_guard_the_model_is_registered_twice(seen: Ranks, rank: int) -> None:
    assert seen["stock"][rank] == {"models": 2}


def test_the_wrapper_of_the_first_prepare_comes_back(seen: Ranks, rank: int) -> None:
    found = seen["again"][rank]
    assert len(found["same"]) == 12
    assert set(found["same"].values()) == {True}, found["same"]
    assert all(files == ["guard_ranks.py"] for files in found["warnings"].values()), found[
        "warnings"
    ]
    assert found["models"] == 1
    assert found["chain"] == ["DistributedDataParallel", "Counted"]
    assert found["gradients agree"]


def test_a_stale_flag_skips_no_preparation(seen: Ranks, rank: int) -> None:
    assert seen["stale_flag"][rank] == {
        "chain": ["DistributedDataParallel", "Counted"],
        "bf16": True,
        "models": 1,
        "gradients agree": True,
    }


def test_after_free_memory_it_is_prepared_anew(seen: Ranks, rank: int) -> None:
    assert seen["after_free_memory"][rank] == {
        "chain": ["DistributedDataParallel", "Counted"],
        "bf16": True,
        "models": 1,
        "optimizer": True,
        "gradients agree": True,
    }


def test_evaluation_first_and_training_later(seen: Ranks, rank: int) -> None:
    assert seen["evaluation_first"][rank] == {
        "before": ["Counted"],
        "chain": ["DistributedDataParallel", "Counted"],
        "models": 1,
        "gradients agree": True,
    }


def test_a_deepcopy_is_a_model_of_its_own(seen: Ranks, rank: int) -> None:
    expected = {"chain": ["DistributedDataParallel", "Counted"], "bf16": True, "models": 2}
    assert seen["deep_copy"][rank] == expected


def test_prepared_before_the_patch(seen: Ranks, rank: int) -> None:
    assert seen["prepared_before_the_patch"][rank] == {"same": [True, True], "models": 1}


def test_state_dict_is_called_once_and_checkpoints_fit_other_world_sizes(
    folder: Path, seen: Ranks, rank: int
) -> None:
    found = seen["saved_by_two"][rank]
    assert found["calls"] == [1, 1]
    weights = [name for name in found["files"] if name.startswith(("model", "optimizer"))]
    assert weights == ["model.safetensors", "optimizer.bin"]
    assert found["loaded"] == json.loads((folder / "one.json").read_text())
    accelerator, model, _ = of_one_process()
    accelerator.load_state(str(folder / "two"))
    loaded = values_of(model)
    assert loaded != found["loaded"]
    assert len(loaded) == 20


def test_fsdp1(seen: Ranks, rank: int) -> None:
    assert seen["fsdp1"][rank] == {
        "class": "FullyShardedDataParallel",
        "same": [True, True],
        "models": 1,
        "warnings": 2,
    }


def test_fsdp2(seen: Ranks, rank: int) -> None:
    assert seen["fsdp2"][rank] == {
        "class": "FSDPSequential",
        "same": [True, True, True, True],
        "models": 1,
        "optimizers": 2,
        "warnings": 2,
        "changed": [True, True, True, True],
        "refused": "Only one model is supported when using FSDP2",
    }
