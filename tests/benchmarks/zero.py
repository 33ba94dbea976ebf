"""A DeepSpeed ZeRO-2 checkpoint to safetensors in fp32, against the script that DeepSpeed leaves
beside it.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from tests.benchmarks.making import measure, names
from tests.benchmarks.printing import show

_RANKS = 2

_WRITE = """
import math
from collections import OrderedDict
trained = {names!r}
each, ranks = {each}, {ranks}
flat = torch.randn(each * len(trained))  # each a multiple of 4, so that nothing is padded
half = flat.bfloat16()
module = OrderedDict((name, half[number * each :][:each]) for number, name in enumerate(trained))
shapes = OrderedDict((name, torch.Size([each])) for name in trained)
config = {{"zero_optimization": {{"stage": 2}}, "bf16": {{"enabled": True}}}}
torch.save({{
    "module": module, "buffer_names": [], "optimizer": None, "param_shapes": [shapes],
    "frozen_param_shapes": OrderedDict(), "shared_params": {{}}, "frozen_param_fragments": OrderedDict(),
    "lr_scheduler": None, "data_sampler": None, "random_ltd": None, "sparse_tensor_module_names": set(),
    "skipped_steps": 0, "global_steps": 2, "global_samples": 16, "dp_world_size": ranks, "mp_world_size": 1,
    "ds_config": config, "ds_version": "0.18.2",
}}, "{folder}/mp_rank_00_model_states.pt")
for rank, part in enumerate(flat.chunk(ranks)):
    state = {{"step": torch.tensor(2.0), "exp_avg": part * 0.1, "exp_avg_sq": part.square()}}
    torch.save({{
        "optimizer_state_dict": {{
            "dynamic_loss_scale": False, "overflow": False, "clip_grad": 0.0,
            "base_optimizer_state": {{"state": {{0: state}}, "param_groups": [{{"lr": 0.1, "params": [0]}}]}},
            "single_partition_of_fp32_groups": [part.clone()], "zero_stage": 2, "group_paddings": [0],
            "partition_count": [ranks], "ds_version": "0.18.2",
        }},
        "ds_config": config, "ds_version": "0.18.2",
    }}, f"{folder}/bf16_zero_pp_rank_{{rank}}_mp_rank_00_optim_states.pt")
import os; os.sync()
"""
"""The keys are those that DeepSpeed 0.18.2 wrote, without the objects of its own classes."""


def zero(folder: Path, size: int, rounds: int) -> None:
    """Convert ``size`` bytes of fp32 parameters of two ranks, proved and not; then the peer, if it
    is there.
    """
    source, out = folder / "zero", folder / "zero-out"
    tag = source / "pytorch_model"
    tag.mkdir(parents=True)
    (source / "latest").write_text(tag.name)
    trained = names("")
    measure(
        "import torch",
        _WRITE.format(names=trained, each=size // len(trained) // 16 * 4, ranks=_RANKS, folder=tag),
    )
    ours = {
        verify: _timed(
            out,
            "from ckptfix.conversion.migrate import migrate",
            f"migrate({str(source)!r}, {str(out)!r}, to='safetensors', verify={verify})",
            rounds,
        )
        for verify in (False, True)
    }
    what = f"migrate ZeRO-2 to safetensors, {size >> 20} MiB in fp32"
    for verify, (seconds, peak) in ours.items():
        words = "with its proof" if verify else "without its proof"
        figure = f"{peak / 1e6:.0f} MB above start-up, {seconds:.2f} s {words}"
        show(what, figure, "< 300 MB", peak < 300e6)
    if find_spec("deepspeed") is None:
        print(f"{what}: DeepSpeed's zero_to_fp32 was not measured: deepspeed is not installed")
    else:
        _against_deepspeed(source, out, ours, rounds)
    shutil.rmtree(source)


def _against_deepspeed(
    source: Path, out: Path, ours: dict[bool, tuple[float, float]], rounds: int
) -> None:
    """Print how long DeepSpeed's own conversion takes, to files that are as durable."""
    seconds, peak = _timed(
        out,
        "import os, warnings, logging; warnings.simplefilter('ignore'); logging.disable()\n"
        "os.environ['DS_ACCELERATOR'] = 'cpu'\n"
        "import pathlib; from ckptfix.storage.atomic import sync_tree\n"
        "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict",
        f"convert_zero_checkpoint_to_fp32_state_dict({str(source)!r}, {str(out)!r}, "
        f"safe_serialization=True)\nsync_tree(pathlib.Path({str(out)!r}))",
        rounds,
    )
    for verify, (mine, _) in ours.items():
        words = ", proved," if verify else ","
        ratio = seconds / mine
        show(
            f"migrate ZeRO-2 to safetensors{words} against zero_to_fp32",
            f"{ratio:.2f}x (it takes {seconds:.2f} s, {peak / 1e6:.0f} MB)",
            "> 1x",
            ratio > 1,
        )


def _timed(out: Path, imports: str, body: str, rounds: int) -> tuple[float, float]:
    """Return the median of the seconds, and the highest peak of memory above start-up, in bytes."""
    times, peaks = [], []
    for _ in range(rounds):
        used = measure(imports, body)
        times.append(used["seconds"])
        peaks.append(used["peak"] - used["start"])
        shutil.rmtree(out)
    return median(times), max(peaks)
