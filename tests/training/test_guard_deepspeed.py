"""The guard with DeepSpeed: one engine, one optimizer, and its own rule of one model stays.

In one process only: accelerate takes every process for the only one when DeepSpeed runs without a
GPU.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckptfix import verify
from ckptfix.verification.verify_report import Kind, Outcome
from tests.deepspeed_library import NO_DEEPSPEED, WITHOUT_COMPILER, has_deepspeed, variables
from tests.verification.sealed import flip

ROOT = Path(__file__).resolve().parents[2]
STAGES = (1, 3)
SCRIPT = f"""
import json, sys, warnings
from pathlib import Path
import torch, torch._dynamo, deepspeed
{WITHOUT_COMPILER}
from accelerate.utils import DeepSpeedPlugin
from ckptfix.training.accelerator import Accelerator
from tests.training.killing import in_child

def train(stage, folder):
    config = {{
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "zero_allow_untested_optimizer": True,
        "zero_optimization": {{"stage": stage}}, "zero_force_ds_cpu_optimizer": False,
    }}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), tensor_digests=True)
    raw = torch.nn.Linear(10, 2)
    optimizer = torch.optim.AdamW(raw.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    first = accelerator.prepare(raw, optimizer, scheduler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second = accelerator.prepare(raw, optimizer, scheduler)
        third = accelerator.prepare(*first)
        fourth = accelerator.prepare(raw)
    try:
        accelerator.prepare(first[0], torch.nn.Linear(1, 1))
        refused = ""
    except AssertionError as error:
        refused = str(error)
    accelerator.backward(first[0](torch.ones(1, 10)).sum())
    first[1].step()
    accelerator.save_state(folder / "c")
    (folder / "seen.json").write_text(json.dumps({{
        "kind": accelerator.distributed_type.value,
        "class": type(first[0]).__name__,
        "same": [all(a is b for a, b in zip(first, again)) for again in (second, third, (fourth,))],
        "counts": [len(accelerator._models), len(accelerator._optimizers), len(accelerator._schedulers)],
        "warnings": sum("prepare()" in str(one.message) for one in caught),
        "refused": refused,
    }}))

for stage in {STAGES}:
    assert in_child(lambda: train(stage, Path(sys.argv[1], str(stage)))) == 0
"""
"""Trains with each stage in a process of its own, which is forked: an import of DeepSpeed takes
seconds.
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_deepspeed(), reason=NO_DEEPSPEED),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each stage, with what its process has seen and saved."""
    folder = tmp_path_factory.mktemp("stages")
    for stage in STAGES:
        (folder / str(stage)).mkdir()
    alone = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        # Port 0: any that is free.
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        capture_output=True, text=True, cwd=ROOT, timeout=400,
        env={**variables(), **alone, "ACCELERATE_USE_DEEPSPEED": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed(stage: int, trained: Path) -> None:
    folder = trained / str(stage)
    assert json.loads((folder / "seen.json").read_text()) == {
        "kind": "DEEPSPEED",
        "class": "DeepSpeedEngine",
        "same": [True, True, True],
        "counts": [1, 1, 1],
        "warnings": 3,
        "refused": (
            "You can't use same `Accelerator()` instance with multiple models when using DeepSpeed"
        ),
    }
    report = verify(folder / "c")
    tensors = {one.name: one.outcome for one in report.items if one.kind is Kind.TENSOR}
    assert tensors == {"weight": Outcome.MATCH, "bias": Outcome.MATCH}, "it was born sealed"
    (states,) = (folder / "c").glob("pytorch_model/*optim_states.pt")
    flip(states, states.stat().st_size // 2)
    assert verify(folder / "c").status == 1
