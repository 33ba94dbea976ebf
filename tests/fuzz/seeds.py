"""Real small saves of every format that ckptfix reads: the fixtures, and what torch writes in this
process.

    python -m tests.fuzz.seeds FOLDER

writes them below a folder, each as ``FORMAT/NAME/``. It imports torch, which the process that runs
``check`` must not.
"""

import io
import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

FIXTURES = Path(__file__).parents[2] / "fixtures"


class Seed(NamedTuple):
    """A save: its format, its files by their paths, and the names of those that are changed."""

    format: str
    name: str
    files: dict[str, bytes]
    targets: tuple[str, ...]


_COPIED = {
    "safetensors": ("accelerate-1.15.0/lone-bare-safetensors",),
    "torch zip": (
        "accelerate-1.15.0/lone-bare-bin",
        "accelerate-1.15.0/clean-bin",
        "accelerate-1.15.0/clean-single-process",
    ),
    "index.json": ("accelerate-1.15.0/sharded-qwen2", "accelerate-1.12.0/sharded-qwen2-bin"),
    "DCP": ("dcp-2.13.0/fsdp2-clean",),
    "DeepSpeed": (
        "deepspeed-0.18.2/zero1",
        "deepspeed-0.18.2/zero1-bf16",
        "deepspeed-0.18.2/zero2",
        "deepspeed-0.18.2/zero3",
        "deepspeed-0.18.2/zero3-groups",
        "deepspeed-0.18.2/accelerate-zero2",
    ),
}
"""Format -> fixtures that real runs of two processes wrote."""

_BESIDE = ("latest", "run.json")


def read_seeds(folder: Path) -> list[Seed]:
    """Return the seeds below a folder, in an order that does not depend on the file system."""
    seeds = []
    for root in sorted(folder.glob("*/*")):
        files = {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }
        targets = tuple(name for name in files if Path(name).name not in _BESIDE)
        if root.parent.name == "index.json":
            targets = tuple(name for name in files if name.endswith(".index.json"))
        seeds.append(Seed(root.parent.name, root.name, files, targets))
    return seeds


def write_seeds(folder: Path) -> None:
    """Write every seed."""
    for kind, fixtures in _COPIED.items():
        for fixture in fixtures:
            shutil.copytree(
                FIXTURES / fixture / "checkpoint", folder / kind / fixture.replace("/", "-")
            )
    _write_made(folder)


def _write_made(folder: Path) -> None:
    import numpy
    import safetensors.torch
    import torch

    def put(kind: str, name: str, files: dict[str, bytes]) -> None:
        (folder / kind / name).mkdir(parents=True)
        for path, data in files.items():
            (folder / kind / name / path).write_bytes(data)

    def saved(value: Any, **options: Any) -> bytes:
        stream = io.BytesIO()
        torch.save(value, stream, **options)
        return stream.getvalue()

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)
    ).bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    net(torch.ones(6, 5, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    scheduler.step()
    weights, state = net.state_dict(), optimizer.state_dict()
    many = {
        f"layers.{n}.w": torch.full((n % 3, 2), n, dtype=kind)
        for n, kind in enumerate(_dtypes(torch))
    }
    put(
        "safetensors",
        "bfloat16",
        {"model.safetensors": safetensors.torch.save(dict(weights), {"format": "pt"})},
    )
    put(
        "safetensors",
        "dtypes",
        {"model.safetensors": safetensors.torch.save(many, {"format": "pt"})},
    )
    legacy = {"_use_new_zipfile_serialization": False}
    put(
        "torch zip",
        "bfloat16",
        {"pytorch_model.bin": saved(weights), "optimizer.bin": saved(state)},
    )
    put("torch zip", "dtypes", {"pytorch_model.bin": saved(many)})
    typed = {
        name: tensor
        for name, tensor in many.items()
        if tensor.dtype not in (torch.float8_e4m3fn, torch.uint16)
    }
    put("torch legacy", "dtypes", {"pytorch_model.bin": saved(typed, **legacy)})
    states = {
        "optimizer.bin": saved(state, **legacy),
        "scheduler.bin": saved(scheduler.state_dict(), **legacy),
    }
    put("torch legacy", "weights", {"pytorch_model.bin": saved(weights, **legacy), **states})
    # Without checksums a changed pickle is seen by its content alone.
    torch.serialization.set_crc32_options(False)
    put(
        "torch zip",
        "no-checksums",
        {"pytorch_model.bin": saved(weights), "optimizer.bin": saved(state)},
    )
    torch.serialization.set_crc32_options(True)
    put("torch zip", "written-by-zipfile", {"pytorch_model.bin": _repacked(saved(weights))})
    numbers = {
        "python": (3, tuple(range(625)), None),
        "numpy": ("MT19937", numpy.arange(624, dtype=numpy.uint32), 9, 0, 0.0),
        "cpu": torch.get_rng_state(),
    }
    put(
        "Trainer",
        "checkpoint-2",
        {
            "model.safetensors": safetensors.torch.save(dict(weights), {"format": "pt"}),
            "optimizer.pt": saved(state),
            "scheduler.pt": saved(scheduler.state_dict()),
            "rng_state.pth": saved(numbers),
            "trainer_state.json": (
                json.dumps({"global_step": 2, "log_history": [{"loss": 1.5}]}).encode()
            ),
        },
    )
    for name, files in _per_rank(torch, saved).items():
        put("FSDP per rank", name, files)


def _dtypes(torch: Any) -> list[Any]:
    names = (
        "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 "
        "float8_e4m3fn uint16"
    )
    return [getattr(torch, name) for name in names.split()]


def _repacked(data: bytes) -> bytes:
    """Return the same records in an archive of Python's ``zipfile``: without padding, descriptors
    and ZIP64.
    """
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(stream, "w") as target:
        for name in source.namelist():
            target.writestr(zipfile.ZipInfo(name), source.read(name))
    return stream.getvalue()


def _per_rank(torch: Any, saved: Any) -> dict[str, dict[str, bytes]]:
    """Return what FSDP2 writes with ``use_dcp=False``: each rank's parts as DTensors. The group is
    simulated.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    models: dict[str, bytes] = {}
    for rank in range(2):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        full = {
            name: torch.arange(float(rows * 3)).reshape(rows, 3)
            for name, rows in (("a.w", 4), ("b.w", 5))
        }
        parts = {
            name: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
            for name, value in full.items()
        }
        models[f"pytorch_model_fsdp_0_rank{rank}.bin"] = saved(parts)
        states = {
            n: {"step": torch.tensor(1.0), "exp_avg": part, "exp_avg_sq": part}
            for n, part in parts.items()
        }
        groups = [
            {
                "lr": 0.1,
                "betas": (0.9, 0.95),
                "eps": 1e-8,
                "weight_decay": 0.0,
                "params": list(parts),
            }
        ]
        models[f"optimizer_0_rank{rank}.bin"] = saved({"state": states, "param_groups": groups})
        torch.distributed.destroy_process_group()
    return {"fsdp2": models}


if __name__ == "__main__":
    write_seeds(Path(sys.argv[1]))
