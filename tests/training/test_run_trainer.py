"""A transformers Trainer under ``ckptfix run``, on two processes: saved, killed, resumed.

The guarded runs call ``evaluate()`` before ``train()``. With accelerate 1.15.0 alone that leaves a
flag on the model, and training then goes without DistributedDataParallel: each process for itself.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptfix import latest_checkpoint

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def train(folder: Path, arguments: str, *guard: str) -> subprocess.CompletedProcess[str]:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    script = [str(ROOT / "tests/training/trainer_script.py"), str(folder), *arguments.split()]
    return subprocess.run(
        [*launcher, *guard, *script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        timeout=280,
    )


def seen(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2)]


def test_saved_killed_and_resumed(tmp_path: Path) -> None:
    pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install ckptfix[transformers]"
    )
    plain, guarded = tmp_path / "plain", tmp_path / "guarded"
    plain.mkdir()
    guarded.mkdir()
    done = train(plain, "0")
    assert done.returncode == 0, done.stderr[-3000:]
    guard = ("--module", "ckptfix", "run")
    killed = train(guarded, "5 evaluate", *guard)
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stderr or "-9" in killed.stderr
    assert {path.name for path in (guarded / "output").iterdir()} >= {
        "checkpoint-2",
        "checkpoint-4",
    }
    assert latest_checkpoint(guarded / "output").name == "checkpoint-4"
    resumed = train(guarded, "0 evaluate", *guard)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert latest_checkpoint(guarded / "output").name == "checkpoint-8"
    for expected, found in zip(seen(plain), seen(guarded), strict=True):
        assert not expected["guarded"]
        assert found["guarded"]
        assert found["resumed from"] == "checkpoint-4"
        assert found["wrapped"] == expected["wrapped"] == "DistributedDataParallel"
        assert (found["models"], found["optimizers"]) == (1, 1)
        assert found["losses"] == expected["losses"], (
            "with those of the first four steps, which the checkpoint keeps"
        )
        assert found["after"] == expected["after"]
    for run in (killed, resumed):
        assert "UserWarning: prepare" not in run.stderr, "nothing is wrong with Trainer"
        assert "did not come from accelerator.backward" not in run.stderr
