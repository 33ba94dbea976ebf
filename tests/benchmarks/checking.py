"""How long ``ckptfix check`` takes, from outside."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

from tests.benchmarks.making import measure
from tests.benchmarks.printing import show

FIXTURE = (
    Path(__file__).parents[2]
    / "fixtures"
    / "accelerate-1.15.0"
    / "wrapper-safetensors"
    / "checkpoint"
)


def check(folder: Path) -> None:
    """One folder against importing click and tqdm, both compiled; 100,000 tensors; 1,000
    folders.
    """
    ours, peer = [], []
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
    _seconds("-c", "import click, tqdm")
    _seconds("-m", "ckptfix", "check", str(FIXTURE))
    for _ in range(9):
        peer.append(_seconds("-c", "import click, tqdm"))
        ours.append(_seconds("-m", "ckptfix", "check", str(FIXTURE)))
    ratio = median(ours) / median(peer)
    show(
        "check one folder, against importing click and tqdm",
        f"{ratio:.2f}x ({median(ours) * 1e3:.0f} ms)",
        "< 2x",
        ratio < 2,
    )
    for kind, save in (
        ("safetensors", "from safetensors.torch import save_file as save"),
        ("torch zip", "from torch import save"),
    ):
        target = folder / kind.replace(" ", "-")
        target.mkdir()
        path = target / ("model.safetensors" if kind == "safetensors" else "pytorch_model.bin")
        measure(
            f"import torch\n{save}",
            "save({f'model.layers.{i // 9}.experts.{i % 9}.w': torch.zeros(1) for i in "
            f"range(100_000)}}, {str(path)!r})",
        )
        seconds = median(_seconds("-m", "ckptfix", "check", str(target)) for _ in range(3))
        show(f"check 100,000 tensors, {kind}", f"{seconds:.2f} s", "< 1 s", seconds < 1)
        shutil.rmtree(target)
    many = folder / "many"
    for number in range(1000):
        shutil.copytree(FIXTURE, many / str(number))
    seconds = _seconds("-m", "ckptfix", "check", "--recursive", str(many))
    show("check 1,000 folders in one call", f"{seconds:.2f} s", "< 5 s", seconds < 5)
    shutil.rmtree(many)


def _seconds(*arguments: str) -> float:
    begin = perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=False)
    return perf_counter() - begin
