"""Runs of a transformers Trainer, each killed at another file operation of a save and then resumed.

    python -m tests.training.trainer_kills FOLDER PROCESSES RANK [STAGE]

Prints one line of JSON for each point at which RANK was killed, and one for a run that was not.
STAGE is that of DeepSpeed's ZeRO, which then has model and optimizer. transformers is imported
once; every run is a fork, so that hundreds of them take seconds each and not a start of torch. An
ordinary run of the tests strikes three points of its share, other ones each time.
"""

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install ckptfix[transformers]"
)
import transformers as transformers  # for the tests of Trainers, which are skipped here without it
import transformers.trainer
import transformers.trainer_utils
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from ckptfix.training.ranks import Ranks
from tests.sampling import is_exhaustive, sampled
from tests.training.killing import Steps
from tests.training.ranks import run_ranks

STEPS, EVERY, ARMED = 8, 2, 6
"""Steps of a run, steps between two saves, and the save in which processes are killed: old ones are
removed then.
"""


class Tokens(torch.utils.data.Dataset):  # type: ignore[misc]
    """``augment``: each sample is drawn with random numbers, as crops and noise are."""

    def __init__(self, augment: bool = False) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
        if self.augment:
            tokens[torch.randint(0, 8, (2,))] = torch.randint(0, 50, (2,))
        return {"input_ids": tokens, "labels": tokens}


def build(output: Path, callbacks: list[Any], *, augment: bool = False, **arguments: Any) -> Any:
    shape = dict.fromkeys(("bos_token_id", "eos_token_id"), 0) | {
        "vocab_size": 50, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2
    }  # fmt: skip
    set_seed(0)
    given = {
        "output_dir": str(output), "max_steps": STEPS, "save_steps": EVERY, "logging_steps": 1,
        "use_cpu": True, "report_to": [], "per_device_train_batch_size": 2, "save_total_limit": 2,
        "disable_tqdm": True, **arguments,
    }  # fmt: skip
    return Trainer(
        model=GPT2LMHeadModel(GPT2Config(**shape)),
        args=TrainingArguments(**given),
        train_dataset=Tokens(augment),
        eval_dataset=[Tokens()[index] for index in range(2)],
        callbacks=callbacks,
    )


def turn_on_deepspeed(stage: int) -> dict[str, Any]:
    """Turn on DeepSpeed for this process, which runs on the CPU; return the arguments of a Trainer
    that uses it.
    """
    from accelerate import PartialState

    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "false"}
    PartialState(backend="gloo")  # without it, each process on a CPU is taken for the only one
    settings = {
        "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    configured = {"use_configured_state": True}
    return {
        "deepspeed": settings,
        "use_cpu": False,
        "accelerator_config": configured,
        "optim": "adamw_torch",
    }


def weights_of(model: Any, stage: int) -> dict[str, Any]:
    """Return a model's weights as lists; those of ZeRO-3 are gathered, which all processes take
    part in.
    """
    if stage < 3:
        return {name: value.tolist() for name, value in model.state_dict().items()}
    with sys.modules["deepspeed"].zero.GatheredParameters(list(model.parameters())):
        return {name: value.detach().tolist() for name, value in model.named_parameters()}


def on_any_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    """Read for the CPU whatever number transformers 4.44 gives it in a distributed run: torch knows
    no cpu:0.
    """

    def loading(file: Any, map_location: Any = None, **options: Any) -> Any:
        is_cpu = isinstance(map_location, torch.device) and map_location.type == "cpu"
        return load(file, map_location="cpu" if is_cpu else map_location, **options)

    return loading


def losses(trainer: Any) -> dict[str, Any]:
    return {
        str(entry["step"]): entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    }


class Arms(TrainerCallback):  # type: ignore[misc]
    """Begins to count file operations when the save comes in which a process is killed, and ends
    after it.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.armed = state.global_step == ARMED

    def on_save(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.armed = False


def run(
    output: Path, result: Path | None, *, guard: bool, resume: bool, kill_at: int | None,
    victim: int, stage: int = 0,
) -> None:  # fmt: skip
    """Train in this process, and write what it saw."""
    transformers.logging.set_verbosity_error()
    if guard:
        from ckptfix import patch_accelerate

        patch_accelerate()
    rank = int(os.environ.get("RANK", "0"))
    steps = Steps(str(output), kill_at if rank == victim else None)
    # It writes without an audit event, and so does safetensors.
    torch.save = steps.around(torch.save)
    torch.load = on_any_cpu(torch.load)
    transformers.modeling_utils.safe_save_file = steps.around(
        transformers.modeling_utils.safe_save_file
    )
    if guard:  # killed before and after each meeting of the processes, too
        Ranks.agree = steps.around(Ranks.agree)  # type: ignore[method-assign]
        Ranks.on_main = steps.around(Ranks.on_main)  # type: ignore[method-assign]
    settings = turn_on_deepspeed(stage) if stage else {}
    trainer = build(
        output, [Arms(steps)], augment=True, eval_strategy="steps", eval_steps=3, **settings
    )
    trainer.train(resume_from_checkpoint=True if resume else None)
    if result is not None:
        seen = {
            "losses": losses(trainer),
            "weights": weights_of(trainer.model, stage),
            "count": steps.count,
        }
        result.with_name(f"{result.name}.{rank}").write_text(json.dumps(seen))
    if trainer.args.world_size > 1:
        torch.distributed.barrier()


def in_processes(processes: int, work: Callable[[], None], log: Path) -> list[int]:
    """Run work in forked processes of one run, and return their wait statuses. What they print goes
    to a file.
    """

    def logged(rank: int) -> None:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if processes == 1:
            for name in (
                "RANK",
                "LOCAL_RANK",
                "WORLD_SIZE",
                "LOCAL_WORLD_SIZE",
                "MASTER_ADDR",
                "MASTER_PORT",
                "TORCHELASTIC_USE_AGENT_STORE",
                "TORCHELASTIC_RESTART_COUNT",
            ):
                del os.environ[name]
        work()

    return run_ranks(processes, logged, patience=120)


def read(result: Path, processes: int) -> list[Any]:
    return [
        json.loads(result.with_name(f"{result.name}.{rank}").read_text())
        for rank in range(processes)
    ]


def main(folder: Path, processes: int, victim: int, stage: int = 0) -> None:
    from ckptfix.checkpoint.latest import candidates

    if stage:
        import_module("deepspeed")
        # Compiled at its first use.
        vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None

    def train(output: Path, result: Path | None = None, *, guard: bool = True, resume: bool = False,
              kill_at: int | None = None) -> list[int]:  # fmt: skip
        return in_processes(
            processes,
            lambda: run(
                output,
                result,
                guard=guard,
                resume=resume,
                kill_at=kill_at,
                victim=victim,
                stage=stage,
            ),
            folder / "log",
        )

    folder.mkdir(parents=True, exist_ok=True)
    assert train(folder / "stock", folder / "stock.json", guard=False) == [0] * processes, (
        folder / "log"
    ).read_text()
    expected = read(folder / "stock.json", processes)
    assert train(folder / "whole", folder / "whole.json") == [0] * processes, (
        folder / "log"
    ).read_text()
    whole = read(folder / "whole.json", processes)
    steps = whole[victim]["count"]
    names = sorted(path.name for path in (folder / "whole").iterdir())
    print(json.dumps({"steps": steps, "names": names, "as stock": strip(whole) == strip(expected),
                      "transformers": transformers.__version__}), flush=True)  # fmt: skip
    points = sampled(range(steps))
    # A point takes two runs of a Trainer.
    every = 1 if is_exhaustive() else max(1, len(points) // 3)
    for point in points[random.randrange(every) :: every]:
        output = folder / f"killed-{point}"
        statuses = train(output, kill_at=point)
        found = candidates(output, "checkpoint-{}")
        line: dict[str, Any] = {
            "point": point,
            "killed": statuses[victim] == signal.SIGKILL,
            "problems": {one.path.name: one.problem for one in found if one.problem},
            "newest": found[0].number if found else None,
        }
        result = folder / f"resumed-{point}"
        line["resumed"] = train(output, result, resume=True) == [0] * processes
        line["same"] = line["resumed"] and strip(read(result, processes)) == strip(expected)
        line["left"] = [
            path.name for path in output.iterdir() if not path.name.startswith("checkpoint-")
        ]
        line["after"] = sorted(
            path.name for path in output.iterdir() if path.name not in line["left"]
        )
        print(json.dumps(line), flush=True)
        shutil.rmtree(output)


def strip(seen: list[Any]) -> list[Any]:
    return [{"losses": one["losses"], "weights": one["weights"]} for one in seen]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
