"""The guard in two processes on gloo: DistributedDataParallel and both kinds of FSDP, run once for all tests here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE_PROCESS = """
import accelerate, sys, torch
torch.manual_seed(3)
model = torch.nn.Linear(10, 2)
accelerator = accelerate.Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
action, folder = sys.argv[1:]
if action == "save":
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    accelerator.save_state(folder)
else:
    accelerator.load_state(folder)
print(model.weight.detach().flatten().tolist())
"""

pytestmark = pytest.mark.slow


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case of `guard_ranks.py`, seen by both ranks; and a checkpoint of one process beside them."""
    made = tmp_path_factory.mktemp("ranks")
    (made / "one.json").write_text(run("-c", ONE_PROCESS, "save", str(made / "one")))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    run(*launcher, "-m", "tests.runtime.guard_ranks", str(made))
    return made


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def rank(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


def seen(folder: Path, case: str, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{case}-{rank}.json").read_text())
    assert "error" not in found, found["error"]
    return found


def test_without_the_guard_the_model_is_registered_twice(folder: Path, rank: int) -> None:
    assert seen(folder, "stock", rank) == {"models": 2}


def test_the_wrapper_of_the_first_prepare_comes_back(folder: Path, rank: int) -> None:
    found = seen(folder, "again", rank)
    assert len(found["same"]) == 12
    assert set(found["same"].values()) == {True}, found["same"]
    assert all(files == ["guard_ranks.py"] for files in found["warnings"].values()), found["warnings"]
    assert found["models"] == 1
    assert found["chain"] == ["DistributedDataParallel", "Counted"]
    assert found["gradients agree"]


def test_a_stale_flag_skips_no_preparation(folder: Path, rank: int) -> None:
    assert seen(folder, "stale_flag", rank) == {
        "chain": ["DistributedDataParallel", "Counted"],
        "bf16": True,
        "models": 1,
        "gradients agree": True,
    }


def test_after_free_memory_it_is_prepared_anew(folder: Path, rank: int) -> None:
    assert seen(folder, "after_free_memory", rank) == {
        "chain": ["DistributedDataParallel", "Counted"],
        "bf16": True,
        "models": 1,
        "optimizer": True,
        "gradients agree": True,
    }


def test_evaluation_first_and_training_later(folder: Path, rank: int) -> None:
    assert seen(folder, "evaluation_first", rank) == {
        "before": ["Counted"],
        "chain": ["DistributedDataParallel", "Counted"],
        "models": 1,
        "gradients agree": True,
    }


def test_a_deepcopy_is_a_model_of_its_own(folder: Path, rank: int) -> None:
    expected = {"chain": ["DistributedDataParallel", "Counted"], "bf16": True, "models": 2}
    assert seen(folder, "deep_copy", rank) == expected


def test_prepared_before_the_patch(folder: Path, rank: int) -> None:
    assert seen(folder, "prepared_before_the_patch", rank) == {"same": [True, True], "models": 1}


def test_state_dict_is_called_once_and_checkpoints_fit_other_world_sizes(folder: Path, rank: int) -> None:
    found = seen(folder, "saved_by_two", rank)
    assert found["calls"] == [1, 1]
    weights = [name for name in found["files"] if name.startswith(("model", "optimizer"))]
    assert weights == ["model.safetensors", "optimizer.bin"]
    assert found["loaded"] == json.loads((folder / "one.json").read_text())
    loaded = json.loads(run("-c", ONE_PROCESS, "load", str(folder / "two")))
    assert loaded != found["loaded"]
    assert len(loaded) == 20


def test_fsdp1(folder: Path, rank: int) -> None:
    assert seen(folder, "fsdp1", rank) == {
        "class": "FullyShardedDataParallel",
        "same": [True, True],
        "models": 1,
        "warnings": 2,
    }


def test_fsdp2(folder: Path, rank: int) -> None:
    assert seen(folder, "fsdp2", rank) == {
        "class": "FSDPSequential",
        "same": [True, True, True, True],
        "models": 1,
        "optimizers": 2,
        "warnings": 2,
        "changed": [True, True, True, True],
        "refused": "Only one model is supported when using FSDP2",
    }
