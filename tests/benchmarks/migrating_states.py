"""A complete training state to every other strategy, against copying the same bytes, and against
the peers that do it.

``ds_to_universal`` is the script of DeepSpeed, ``dcp_to_torch_save`` and ``torch_save_to_dcp``
those of torch.
"""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from tests.benchmarks.making import measure, names
from tests.benchmarks.migrating import against_peers, copied_in
from tests.benchmarks.printing import show

_PROCESSES = 2
_STRATEGIES = ("ddp", "fsdp", "fsdp-full", "zero1", "zero2", "zero3", "universal")
_LIMIT = 300e6
_DEEPSPEED = Path(__file__).parents[2] / ".venv" / "deepspeed"

_WRITE = """
names, rows = {names!r}, {rows}
state = {{name: torch.randn(rows, 64) for name in names}}
moments = {{
    name: {{"step": torch.tensor(2.0), "exp_avg": one * 0.1, "exp_avg_sq": one.square()}}
    for name, one in state.items()
}}
options = dict(lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, amsgrad=False, maximize=False, foreach=None,
               capturable=False, differentiable=False, fused=None, decoupled_weight_decay=True)
torch.save(state, "{folder}/pytorch_model_fsdp.bin")
torch.save({{"state": moments, "param_groups": [options | {{"params": names}}]}}, "{folder}/optimizer.bin")
for rank in range({processes}):
    torch.save({{"step": 2}}, f"{folder}/random_states_{{rank}}.pkl")
import os; os.sync()
"""

_UNIVERSAL = """
from argparse import Namespace
from deepspeed.checkpoint import ds_to_universal
"""


def migrate_states(folder: Path, size: int, rounds: int) -> None:
    """Print speed and memory of every pair from and to one strategy of each kind. ``size``: bytes
    of the weights.
    """
    source = folder / "state"
    source.mkdir()
    rows = size // len(names("")) // 4 // 64
    measure(
        "import torch",
        _WRITE.format(names=names(""), rows=rows, folder=source, processes=_PROCESSES),
    )
    made = {"fsdp-full": source}
    for strategy in ("fsdp", "zero2"):
        made[strategy] = folder / strategy
        _ours(source, made[strategy], strategy, "verify=False")
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    print(f"{nbytes >> 20} MiB of weights and moments, {_PROCESSES} processes")
    ours: dict[tuple[str, str], float] = {}
    for name, path in made.items():
        for strategy in _STRATEGIES:
            if strategy != name:
                ours[name, strategy] = _pair(folder, path, name, strategy, nbytes, rounds)
    _peers(folder, made, ours, rounds)
    for path in made.values():
        shutil.rmtree(path)


def _pair(folder: Path, path: Path, source: str, to: str, size: int, rounds: int) -> float:
    """Print what one conversion takes, and return its seconds without a proof.

    It is compared with ``cp`` and ``sync`` of the source, and of the new folder, which can have
    more bytes and files.
    """
    target, copy = folder / "new", folder / "copy"
    seconds: dict[str, list[float]] = {
        "cp": [],
        "cp new": [],
        "sums": [],
        "plain": [],
        "proved": [],
    }
    cpu: dict[bool, list[float]] = {False: [], True: []}
    peak = 0.0
    for _ in range(rounds):
        seconds["cp"].append(copied_in(path, copy))
        for verify, name in ((False, "plain"), (True, "proved")):
            used = _ours(path, target, to, f"verify={verify}")
            seconds[name].append(used["seconds"])
            cpu[verify].append(used["cpu"])
            peak = max(peak, used["peak"] - used["start"])
            seconds["sums" if verify else "cp new"].append(
                copied_in(target, copy, with_sums=verify)
            )
            shutil.rmtree(target)
    took = {name: median(times) for name, times in seconds.items()}
    what = f"state of {source} to {to}"
    for peer, ours, words in (
        ("cp", "plain", "against cp, sync"),
        ("cp new", "plain", "against cp, sync of the new folder"),
        ("sums", "proved", "with its proof, against cp, sync, sha256 of both"),
    ):
        ratio = took[peer] / took[ours]
        speed = f"{ratio:.2f}x ({size / took[ours] / 1e9:.2f} GB/s)"
        show(f"{what}, {words}", speed, ">= 0.8x", ratio >= 0.8)
    show(f"{what}, memory", f"{peak / 1e6:.0f} MB above start-up", "< 300 MB", peak < _LIMIT)
    times = (
        f"{min(cpu[verify]):.2f} s {words}"
        for verify, words in ((False, "without"), (True, "with"))
    )
    print(
        f"{what}, processor time: {', '.join(times)} its proof, with a load of "
        f"{os.getloadavg()[0]:.0f}"
    )
    return took["plain"]


def _peers(
    folder: Path, made: dict[str, Path], ours: dict[tuple[str, str], float], rounds: int
) -> None:
    """Print what others take for a part of the same work, to files that are as durable."""
    out = folder / "peer"
    optimizer, shards = made["fsdp-full"] / "optimizer.bin", made["fsdp"] / "optimizer_0"
    torch = "from torch.distributed.checkpoint import format_utils"
    cases = [
        (
            "torch_save_to_dcp (of the optimizer alone)",
            ("fsdp-full", "fsdp"),
            torch,
            f"format_utils.torch_save_to_dcp({str(optimizer)!r}, {str(out)!r})",
        ),
        (
            "dcp_to_torch_save (of the optimizer alone)",
            ("fsdp", "fsdp-full"),
            torch,
            f"format_utils.dcp_to_torch_save({str(shards)!r}, '{out}/optimizer.bin')",
        ),
    ]
    if find_spec("deepspeed") or _DEEPSPEED.is_dir():
        os.environ |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(_DEEPSPEED)}
        options = "num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True"
        body = (
            f"ds_to_universal.main(Namespace(input_folder='{made['zero2']}/pytorch_model', "
            f"output_folder='{out}/pytorch_model', inject_missing_state=True, {options}))"
        )
        cases.append(("DeepSpeed's ds_to_universal", ("zero2", "universal"), _UNIVERSAL, body))
    against_peers("state of", cases, ours, out, rounds)


def _ours(source: Path, target: Path, to: str, options: str) -> dict[str, float]:
    return measure(
        "from ckptfix.conversion.migrate import migrate",
        f"migrate({str(source)!r}, {str(target)!r}, to={to!r}, state='all', "
        f"processes={_PROCESSES}, {options})",
    )
