"""Models in parts: saved by torch's ``HuggingFaceStorageWriter`` in four processes, or file by
file, and loaded.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

NEVER_LOADED = -1.0
"""The value of every element before a load, which no saved tensor has."""


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


ROWS = {
    "rows": numbers(10, 3),
    "columns": numbers(3, 8),
    "few": numbers(2),
    "replicated": numbers(5),
    "plain": numbers(4),
    "scalar": torch.tensor(3.0),
    "zeros": torch.zeros(8, 2),
}
"""Cut among four ranks by rows or columns: unevenly, and down to a rank without any."""

GRID = {"grid": numbers(6, 4), "replicated.rows": numbers(8, 4), "rows.twice": numbers(8, 4)}
"""Cut on a mesh of two by two."""

GAP = {"rows": numbers(4, 2)}
"""Cut among ranks 0 and 2 alone, so that rank 1 saves no file."""

FILES = {"rows": 1, "columns": 2, "few": 2, "replicated": 1, "plain": 2, "scalar": 3, "zeros": 3}

SAVED = {"rows": ROWS, "mapped": ROWS, "grid": GRID, "gap": GAP, "consolidated/sharded": ROWS}
"""Folder that ``save_all`` writes -> the complete tensors."""


def save_all(root: Path) -> None:
    """Save as one of four processes."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    apart = DeviceMesh("cpu", [0, 2])
    cuts = {
        "rows": Shard(0),
        "columns": Shard(1),
        "few": Shard(0),
        "replicated": Replicate(),
        "zeros": Shard(0),
    }
    rows = {
        name: distribute_tensor(tensor, line, [cuts[name]]) if name in cuts else tensor
        for name, tensor in ROWS.items()
    }
    grids = {
        "grid": distribute_tensor(GRID["grid"], grid, [Shard(0), Shard(1)]),
        "replicated.rows": distribute_tensor(
            GRID["replicated.rows"], grid, [Replicate(), Shard(0)]
        ),
        "rows.twice": distribute_tensor(GRID["rows.twice"], grid, [Shard(0), Shard(0)]),
    }
    is_inside = dist.get_rank() in (0, 2)
    gap = {"rows": distribute_tensor(GAP["rows"], apart, [Shard(0)])} if is_inside else {}

    def save(
        name: str, state: Mapping[str, object], files: dict[str, int] | None, *, join: bool
    ) -> None:
        writer = HuggingFaceStorageWriter(
            str(root / name),
            fqn_to_index_mapping=files,
            save_distributed=True,
            enable_consolidation=join,
        )
        dcp.save(dict(state), storage_writer=writer)

    save("rows", rows, None, join=False)
    save("mapped", rows, FILES, join=False)
    save("grid", grids, None, join=False)
    save("gap", gap, None, join=False)
    save("consolidated", rows, FILES, join=True)
    dist.destroy_process_group()


Place = tuple[Sequence[int], torch.Tensor]
"""The first index of a part, and the part."""


def save_part(folder: Path, rank: int, parts: Mapping[str, Place]) -> Path:
    """Write the one file of a rank as torch does, and return its path."""
    folder.mkdir(exist_ok=True)
    path = folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
    places = {name: {"saved_offsets": list(offsets)} for name, (offsets, _) in parts.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
    save_file({name: part.clone() for name, (_, part) in parts.items()}, path, metadata=metadata)
    return path


def save_halves(folder: Path, tensors: Mapping[str, torch.Tensor]) -> list[Path]:
    """Write tensors that two ranks cut by rows, and return the files."""
    paths = []
    for rank in range(2):
        halves = {
            name: (rank * len(one.chunk(2)[0]), one.chunk(2)[rank]) for name, one in tensors.items()
        }
        parts = {
            name: ([begin, *([0] * (half.dim() - 1))], half)
            for name, (begin, half) in halves.items()
        }
        paths.append(save_part(folder, rank, parts))
    return paths


def loaded(folder: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what torch's reader loads in the place of these tensors. Raises CheckpointException
    when it refuses.
    """
    state = {name: torch.full_like(tensor, NEVER_LOADED) for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return state
