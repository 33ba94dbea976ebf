"""Checkpoints as DeepSpeed lays them out, of any parameters, any number of ranks and any stage."""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.zeros(0)


def make_zero(
    folder: Path,
    groups: list[dict[str, torch.Tensor]],
    *,
    stage: int,
    ranks: int,
    frozen: Mapping[str, torch.Tensor] | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    shared: Mapping[str, str] | None = None,
    sub_group: int = 1 << 30,
    changed: Mapping[str, Any] | None = None,
) -> None:
    """Write the files of all ranks. ``changed``: what the model states have instead."""
    folder.mkdir(parents=True, exist_ok=True)
    frozen, buffers, shared = dict(frozen or {}), dict(buffers or {}), shared or {}
    trained = {name: tensor for group in groups for name, tensor in group.items()}
    whole = {name: tensor.to(torch.bfloat16) for name, tensor in trained.items()} | frozen
    for rank in range(ranks):
        if stage == 3:
            module = {name: torch.zeros(0, dtype=tensor.dtype) for name, tensor in whole.items()}
            fragments = {name: share(tensor, rank, ranks) for name, tensor in frozen.items()}
        else:
            module, fragments = whole, dict(frozen)
        module = OrderedDict(module | buffers)
        for name, kept in shared.items():
            module[name] = module[kept]
        states = {
            "module": module,
            "buffer_names": list(buffers),
            "param_shapes": [
                OrderedDict((name, tensor.shape) for name, tensor in group.items()) for group in groups
            ],
            "frozen_param_shapes": OrderedDict((name, tensor.shape) for name, tensor in frozen.items()),
            "frozen_param_fragments": OrderedDict(fragments),
            "shared_params": dict(shared),
            "dp_world_size": ranks,
            "mp_world_size": 1,
            "epoch": 3,
            **(changed or {}),
        }
        of_rank = f"zero_pp_rank_{rank}_mp_rank_00"
        if stage == 3 or rank == 0:
            torch.save(states, folder / f"{of_rank if stage == 3 else 'mp_rank_00'}_model_states.pt")
        optimizer = _partitions(groups, stage, rank, ranks, sub_group)
        torch.save({"optimizer_state_dict": optimizer}, folder / f"{of_rank}_optim_states.pt")


def share(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return the share of a rank under ZeRO-3, padded."""
    size = -(-tensor.numel() // ranks)
    padded = torch.cat(
        [tensor.reshape(-1), torch.full((size * ranks - tensor.numel(),), 77).to(tensor.dtype)]
    )
    return padded[rank * size : (rank + 1) * size].clone()


def _partitions(
    groups: list[dict[str, torch.Tensor]], stage: int, rank: int, ranks: int, sub_group: int
) -> dict[str, Any]:
    if stage == 3:
        shares = flat([share(tensor, rank, ranks) for group in groups for tensor in group.values()])
        cut = [one.clone() for one in shares.split(sub_group)] if shares.numel() else []
        return {"zero_stage": 3, "partition_count": ranks, "fp32_flat_groups": cut}
    found = []
    for group in groups:
        whole = flat(list(group.values()))
        step = 2 * ranks
        padding = -whole.numel() % step
        partitions = torch.cat([whole, torch.full((padding,), 77.0)]).chunk(ranks)
        mine = partitions[rank]
        if rank == ranks - 1:  # its padding is not saved
            mine = mine[: max(0, len(mine) - padding)]
        found.append(mine.clone())
    counts = [ranks] * len(groups)
    return {"zero_stage": stage, "partition_count": counts, "single_partition_of_fp32_groups": found}
