"""Train two steps with FSDP2 on the CPU (gloo) in two processes, and save as ``FULL_STATE_DICT``.

    python -m tests.conversion.fsdp_full_run FOLDER

FOLDER gets what ``accelerator.save_state`` writes; FOLDER.json the digests of the whole weights in
memory. (FSDP1 of torch 2.13.0 ends in a segmentation fault when it gathers a full state dict of
parameters on the CPU.)
"""

import json
import sys
import warnings
from pathlib import Path

import accelerate
import torch
from accelerate.state import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fixtures.digests import tensor_digests
from tests.training.ranks import run_ranks


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3, bias=False)
    )


def work(folder: Path) -> None:
    warnings.simplefilter("ignore")
    accelerator = accelerate.Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
    accelerator.state.fsdp_plugin = plugin  # accelerate turns FSDP on for GPUs alone
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = accelerate.DistributedType.FSDP
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator._models.append(model)
    accelerator._optimizers.append(optimizer)
    accelerator.save_state(str(folder))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if accelerator.process_index == 0:
        folder.with_suffix(".json").write_text(json.dumps(tensor_digests(whole)))
    # A process that leaves first can break what the other still waits for.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(any(run_ranks(2, lambda _: work(Path(sys.argv[1])))))
