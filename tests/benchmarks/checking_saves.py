"""What the check of a guarded save adds to it: ``--part check-saves``."""

import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from ckptfix.training.accelerator import Accelerator, patch_accelerate, unpatch_accelerate
from ckptfix.training.saving import checked_saves
from ckptfix.wording import count_of
from tests.benchmarks.printing import show

_MOST = 0.005
_SAVES = 12
_SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 32, "num_attention_heads": 4,
    "vocab_size": 1000,
}  # fmt: skip


def check_saves(folder: Path) -> None:
    """Print the median times of the check of a save after the first one, and of the save with it.

    The processor's time of the check is next to it: on a busy machine most of the time is a wait
    for a core.
    """
    patch_accelerate()
    seconds: list[float] = []
    used: list[float] = []
    check = checked_saves._check

    def timed(*args: Any) -> None:
        begin, cpu = perf_counter(), thread_time()
        try:
            check(*args)
        finally:
            seconds.append(perf_counter() - begin)
            used.append(thread_time() - cpu)

    checked_saves._check = timed  # type: ignore[assignment]
    try:
        accelerator = Accelerator(cpu=True)
        base = LlamaForCausalLM(LlamaConfig(**_SIZES))
        small, large = (
            get_peft_model(
                LlamaForCausalLM(LlamaConfig(**_SIZES)), LoraConfig(r=8, target_modules=targets)
            )
            for targets in (["q_proj", "v_proj"], "all-linear")
        )
        optimizers: list[Any] = []
        for model in (base, small, large):
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = accelerator.prepare(torch.optim.AdamW(trained))
            for parameter in trained:
                parameter.grad = torch.ones_like(parameter)
            optimizers.append(optimizer)
        accelerator.prepare(base)
        adapter, shards = folder / "adapter", folder / "shards"
        kinds: dict[str, tuple[Path, int, Callable[[], Any]]] = {
            "an adapter of 128 tensors": (adapter, 1, lambda: small.save_pretrained(str(adapter))),
            "an adapter of 448 tensors": (adapter, 2, lambda: large.save_pretrained(str(adapter))),
            "8 shards of 291 tensors": (
                shards,
                0,
                lambda: base.save_pretrained(shards, max_shard_size="12MB"),
            ),
            "save_state of 291 tensors": (
                folder / "c",
                0,
                lambda: accelerator.save_state(str(folder / "c")),
            ),
        }
        for what, (place, trained_by, save) in kinds.items():
            whole, checks, cpu = [], [], []
            for number in range(_SAVES):
                optimizers[trained_by].step()
                seconds.clear()
                used.clear()
                begin = perf_counter()
                save()
                if number:
                    whole.append(perf_counter() - begin)
                    checks.append(sum(seconds))
                    cpu.append(sum(used))
            files = len(list(place.glob("*.safetensors")))
            shutil.rmtree(place)
            figure = (
                f"{1000 * median(checks):.1f} ms, {1000 * median(cpu):.1f} ms of processor time, "
                f"in {1000 * median(whole):.0f} ms ({count_of(files, 'file')})"
            )
            show(f"check of a save, {what}", figure, "<= 5 ms", median(checks) <= _MOST)
    finally:
        checked_saves._check = check
        unpatch_accelerate()
