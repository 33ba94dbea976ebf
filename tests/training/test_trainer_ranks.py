"""A transformers Trainer on two processes: one fails, nodes have disks of their own, the model is
sharded.

They are forked, which hangs now and then once the process has trained (and other tests train in
it): so a process that has done nothing else runs them.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix.checkpoint.folder_names import TRAINER
from ckptfix.checkpoint.latest import candidates
from ckptfix.errors import OperationError, UsageError
from ckptfix.training.accelerator import patch_accelerate
from tests.training.rank_cases import turn_on_fsdp
from tests.training.ranks import run_ranks
from tests.training.test_saving import own_disk
from tests.training.trainer_kills import build, losses

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PATIENCE = 200.0
ALONE = "CKPTFIX_TESTS_ALONE"
in_own_process = pytest.mark.skipif(
    not os.environ.get(ALONE), reason="runs in a process of its own"
)


@pytest.mark.skipif(bool(os.environ.get(ALONE)), reason="this is that process")
def test_all_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--numprocesses=0", __file__],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, ALONE: "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def on_two(work: Callable[[int], None]) -> None:
    def guarded(rank: int) -> None:
        patch_accelerate()
        work(rank)

    assert run_ranks(2, guarded, patience=PATIENCE) == [0, 0]


@in_own_process
@pytest.mark.parametrize("failing", [0, 1])
def test_one_process_that_fails_ends_the_save_of_all(tmp_path: Path, failing: int) -> None:
    def work(rank: int) -> None:
        trainer = build(tmp_path, [])
        trainer.train()
        before = sorted(map(str, tmp_path.rglob("*")))
        if rank == failing:

            def fails(folder: str) -> None:
                raise OSError(28, "No space left on device")

            trainer._save_rng_state = fails
        trainer.state.global_step = 10
        with pytest.raises(OSError, match="No space left"):
            trainer._save_checkpoint(trainer.model, None)
        torch.distributed.barrier()
        assert sorted(map(str, tmp_path.rglob("*"))) == before

    on_two(work)


@in_own_process
def test_one_process_that_does_not_save_is_named(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        patch_accelerate(save_timeout=2)
        trainer = build(tmp_path, [], save_strategy="no")
        trainer.train()
        if rank == 0:
            with pytest.raises(
                OperationError, match=r"Trainer's save has waited 2 s for 1 process \(rank 1\)"
            ):
                trainer._save_checkpoint(trainer.model, None)
        torch.distributed.barrier()
        assert not list(tmp_path.glob("*"))

    on_two(work)


@in_own_process
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_nodes_with_disks_of_their_own(tmp_path: Path, each: bool) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    def work(rank: int) -> None:
        # Each is the first process of its node.
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        if rank == 1 and not own_disk(disk):
            (tmp_path / "not allowed").touch()
        trainer = build(disk, [], save_on_each_node=each)
        trainer.train()
        if (tmp_path / "not allowed").exists():
            return
        assert names(disk) == ["checkpoint-6", "checkpoint-8"]
        checkpoint = disk / "checkpoint-8"
        assert [one.problem for one in candidates(disk, TRAINER)] == [None, None]
        assert (checkpoint / f"rng_state_{rank}.pth").exists()
        assert not (checkpoint / f"rng_state_{1 - rank}.pth").exists()
        assert (checkpoint / "optimizer.pt").exists() == (rank == 0 or each)
        if not each:
            assert (checkpoint / "model.safetensors").exists() == (rank == 0)
            with pytest.raises(UsageError, match="no model weights on this disk"):
                build(disk, []).train(resume_from_checkpoint=True)
            return
        for name in names(disk):  # transformers 5.23 writes no weights on the second node
            weights = tmp_path / f"{name}.safetensors"
            if rank == 0:
                shutil.copy(disk / name / "model.safetensors", weights)
            torch.distributed.barrier()
            shutil.copy(weights, disk / name / "model.safetensors")
        if rank == 1:
            (checkpoint / "optimizer.pt").unlink()
        resumed = build(disk, [], save_on_each_node=True)
        resumed.train(resume_from_checkpoint=True)
        assert losses(resumed) == losses(trainer)
        assert (checkpoint / "optimizer.pt").exists(), (
            "checkpoint-6 was taken, and this one was saved again"
        )

    on_two(work)
    if (tmp_path / "not allowed").exists():
        pytest.skip("no mount namespace for this user")


@in_own_process
def test_processes_resume_from_one_checkpoint(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        build(tmp_path, []).train()
        with pytest.raises(UsageError, match="rank 0: checkpoint-6, rank 1: checkpoint-8"):
            build(tmp_path, []).train(
                resume_from_checkpoint=str(tmp_path / f"checkpoint-{6 + 2 * rank}")
            )
        torch.distributed.barrier()
        if rank == 0:
            (tmp_path / "checkpoint-8/rng_state_1.pth").unlink()
            shutil.rmtree(tmp_path / "checkpoint-8/.ckptfix")
        torch.distributed.barrier()
        said = "chose checkpoint-6 and passed over checkpoint-8: rng_state_1.pth is missing"
        expected = pytest.warns(UserWarning, match=said) if rank == 0 else contextlib.nullcontext()
        with expected:
            build(tmp_path, []).train(resume_from_checkpoint=True)

    on_two(work)


@in_own_process
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_fsdp(tmp_path: Path, kind: str) -> None:
    def trained(folder: Path, resume: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        trainer = build(folder, [], augment=True, save_total_limit=None, max_grad_norm=0.0)
        turn_on_fsdp(trainer.accelerator, fsdp_version=2, state_dict_type=kind)
        trainer.is_fsdp_enabled = True
        trainer.train(resume_from_checkpoint=resume)
        return losses(trainer)

    def work(rank: int) -> None:
        expected = trained(tmp_path, resume=False)
        torch.distributed.barrier()
        assert [one.problem for one in candidates(tmp_path, TRAINER)] == [None] * 4
        there = names(tmp_path / "checkpoint-6")
        assert ("optimizer_0" in there) == (kind == "SHARDED_STATE_DICT")
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(tmp_path / "checkpoint-8")
        torch.distributed.barrier()
        assert trained(tmp_path, resume=True) == expected

    on_two(work)
