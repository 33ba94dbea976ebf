"""A transformers Trainer run, which knows nothing of ckptfix: train, die at a step, resume.

    torchrun --nproc_per_node 2 trainer_script.py FOLDER STEP [evaluate]

STEP is the step at which rank 1 is killed; 0 is never. A run that finds a checkpoint goes on from
it. `evaluate` is called before training when asked for: it prepares the model for evaluation only.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

folder, death = Path(sys.argv[1]), int(sys.argv[2])


class Dies(TrainerCallback):  # type: ignore[misc]
    def on_step_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == death > 0 and arguments.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Tokens(torch.utils.data.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


SHAPE = dict.fromkeys(("bos_token_id", "eos_token_id"), 0) | {
    "vocab_size": 50, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2
}  # fmt: skip

set_seed(0)
trainer = Trainer(
    model=GPT2LMHeadModel(GPT2Config(**SHAPE)),
    args=TrainingArguments(
        output_dir=str(folder / "output"), max_steps=8, save_steps=2, logging_steps=1, use_cpu=True,
        report_to="none", per_device_train_batch_size=2, gradient_accumulation_steps=2,
        save_total_limit=2, disable_tqdm=True,
    ),
    train_dataset=Tokens(),
    eval_dataset=Tokens(),
    callbacks=[Dies()],
)  # fmt: skip
if "evaluate" in sys.argv:
    trainer.evaluate()
set_seed(0)  # the same for all, whatever was done before
last = (
    get_last_checkpoint(trainer.args.output_dir) if Path(trainer.args.output_dir).is_dir() else None
)
trainer.train(resume_from_checkpoint=last)
losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
seen = {
    "resumed from": last and Path(last).name,
    "wrapped": type(trainer.model_wrapped).__name__,
    "models": len(trainer.accelerator._models),
    "optimizers": len(trainer.accelerator._optimizers),
    "guarded": hasattr(type(trainer.accelerator).prepare, "__wrapped__"),
    "losses": losses,
    "after": trainer.evaluate()["eval_loss"],
}
(folder / f"seen-{trainer.args.process_index}.json").write_text(json.dumps(seen))
trainer.accelerator.wait_for_everyone()
# At a usual exit gloo's threads abort now and then ("terminate called without an active exception",
# torch 2.13, with ckptfix and without): that is not what is tested.
os._exit(0)
