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
    moments: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    options: list[dict[str, Any]] | None = None,
) -> None:
    """Write the files of all ranks. ``changed``: what the model states have instead.

    ``moments``: name -> state -> tensor, for every parameter; then the sub-groups are those of
    DeepSpeed, with the shapes of each. ``options``: of each group.
    """
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
                OrderedDict((name, tensor.shape) for name, tensor in group.items())
                for group in (groups if stage < 3 else sub_groups(groups, ranks, sub_group)[0])
            ],
            "frozen_param_shapes": OrderedDict(
                (name, tensor.shape) for name, tensor in frozen.items()
            ),
            "frozen_param_fragments": OrderedDict(fragments),
            "shared_params": dict(shared),
            "dp_world_size": ranks,
            "mp_world_size": 1,
            "epoch": 3,
            **(changed or {}),
        }
        of_rank = f"zero_pp_rank_{rank}_mp_rank_00"
        if stage == 3 or rank == 0:
            torch.save(
                states, folder / f"{of_rank if stage == 3 else 'mp_rank_00'}_model_states.pt"
            )
        optimizer = _partitions(groups, stage, rank, ranks, sub_group)
        if moments is not None:
            optimizer |= _optimizer(
                groups, stage, rank, ranks, sub_group, moments, options or [{} for _ in groups]
            )
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
        # DeepSpeed cuts no parameter, and lists the shapes by sub-groups, too (0.9 to 0.19).
        cut = [
            flat([share(tensor, rank, ranks) for tensor in group.values()])
            for group in sub_groups(groups, ranks, sub_group)[0]
        ]
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
    return {
        "zero_stage": stage,
        "partition_count": counts,
        "single_partition_of_fp32_groups": found,
    }


Group = dict[str, torch.Tensor]


def sub_groups(groups: list[Group], ranks: int, size: int) -> tuple[list[Group], list[list[int]]]:
    """Return the sub-groups of ZeRO-3, and the numbers of those that each group has
    (``stage3.py``).
    """
    made: list[Group] = []
    members: list[list[int]] = []
    for group in groups:
        members.append([])
        whole = sum(-(-tensor.numel() // ranks) for tensor in group.values())
        current: Group = {}
        filled = 0
        for name, tensor in group.items():
            current[name] = tensor
            filled += -(-tensor.numel() // ranks)
            if (
                (filled >= min(size, whole) and size < whole)
                or len(current) == len(group)
                or name == list(group)[-1]
            ):
                members[-1].append(len(made))
                made.append(current)
                current, filled = {}, 0
    return made, members


def _optimizer(
    groups: list[Group],
    stage: int,
    rank: int,
    ranks: int,
    sub_group: int,
    moments: Mapping[str, Mapping[str, torch.Tensor]],
    options: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return what the states of one rank have of the optimizer, of DeepSpeed's and PyTorch's
    own.
    """
    flats, members = (groups, [[number] for number in range(len(groups))])
    if stage == 3:
        flats, members = sub_groups(groups, ranks, sub_group)
    states: dict[int, dict[str, Any]] = {}
    for number, group in enumerate(flats):
        held: dict[str, list[torch.Tensor]] = {}
        for name in group:
            for state, tensor in moments[name].items():
                held.setdefault(state, []).append(tensor)
        states[number] = {}
        for state, tensors in held.items():
            if state == "step":
                states[number][state] = tensors[0].clone()
            elif stage == 3:
                states[number][state] = flat([share(tensor, rank, ranks) for tensor in tensors])
            else:  # with the padding
                whole = flat(tensors)
                padded = torch.cat([whole, torch.full((-whole.numel() % (2 * ranks),), 77.0)])
                states[number][state] = padded.chunk(ranks)[rank].clone()
    listed = [{**one, "params": inside} for one, inside in zip(options, members, strict=True)]
    base = {"state": states, "param_groups": listed}
    if stage < 3:
        return {"base_optimizer_state": base}
    whole_flats = [
        flat([share(tensor, rank, ranks) for tensor in group.values()]) for group in flats
    ]
    return {"optimizer_state_dict": base, "fp32_flat_groups": whole_flats}
