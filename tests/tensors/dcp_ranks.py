"""DCP checkpoints that two processes save together: FSDP1, FSDP2, tensors cut along other
dimensions.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def net() -> torch.nn.Module:
    """Return a model whose parameters two ranks share unevenly, down to no element for one of
    them.
    """
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(5, 3),
        torch.nn.LayerNorm(3),
        torch.nn.Linear(3, 1),
        torch.nn.Linear(1, 3, bias=False),
    )
    layers.register_buffer("count", torch.tensor(7))
    return layers


def whole() -> dict[str, torch.Tensor]:
    """Return what the tensors of ``tiles`` are, whole."""
    return {
        "columns": torch.arange(35.0).reshape(5, 7),
        "rows": torch.arange(35).reshape(5, 7),
        "replicated": torch.arange(35.0).reshape(5, 7).to(torch.bfloat16),
        "transposed": torch.arange(35.0).reshape(7, 5).t(),
        "transposed.inside": torch.arange(35.0).reshape(1, 7, 5).transpose(1, 2),
        "inner": torch.arange(42.0).reshape(1, 1, 7, 6),
        "middle": torch.arange(42.0).reshape(2, 7, 3),
    }


def tiles(mesh: Any) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    state = whole()
    cut = {
        "columns": Shard(1),
        "rows": Shard(0),
        "replicated": Replicate(),
        "inner": Shard(2),
        "middle": Shard(1),
    }
    found = {name: distribute_tensor(state[name], mesh, [how]) for name, how in cut.items()}
    found["transposed"] = distribute_tensor(
        state["transposed"].t().contiguous(), mesh, [Shard(1)]
    ).t()
    inside = state["transposed.inside"].transpose(1, 2).contiguous()
    found["transposed.inside"] = distribute_tensor(inside, mesh, [Shard(2)]).transpose(1, 2)
    return found


def save_all(root: Path) -> None:
    """Save as one of two processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")

    def save(name: str, state: Any, **options: Any) -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(root / name, **options))

    mesh = init_device_mesh("cpu", (2,))
    model = net()
    fully_shard(model, mesh=mesh)
    save("fsdp2/pytorch_model_fsdp_0", {"model": model.state_dict()})
    save("each/pytorch_model_fsdp_0", {"model": model.state_dict()}, single_file_per_rank=False)
    save("tiles/pytorch_model_fsdp_0", {"model": tiles(mesh)})
    wrapped = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
        save("fsdp1/pytorch_model_fsdp_0", {"model": wrapped.state_dict()})
    dist.destroy_process_group()


def load_all(root: Path) -> None:
    """Load ``root`` as one of two processes, by torch into FSDP2 and by Accelerate into both kinds
    of FSDP.
    """
    from accelerate import Accelerator
    from accelerate.utils import load_fsdp_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    from tests.training.rank_cases import turn_on_fsdp

    warnings.simplefilter("ignore")
    accelerator = Accelerator(cpu=True)
    mesh = init_device_mesh("cpu", (2,))

    model = emptied()
    fully_shard(model, mesh=mesh)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=root / "pytorch_model_fsdp_0")
    model.load_state_dict(state["model"])
    same_as_saved(model)

    for version in (1, 2):
        turn_on_fsdp(accelerator, fsdp_version=version, state_dict_type="SHARDED_STATE_DICT")
        model = emptied()
        if version == 1:
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:
            fully_shard(model, mesh=mesh)
        load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(root), 0)
        if version == 1:
            with FullyShardedDataParallel.summon_full_params(model):
                same_as_saved(model.module)
        else:
            same_as_saved(model)
    dist.destroy_process_group()


def emptied() -> torch.nn.Module:
    model = net()
    for tensor in model.state_dict().values():
        tensor.zero_()
    return model


def same_as_saved(model: torch.nn.Module) -> None:
    saved = net().state_dict()
    loaded = model.state_dict()
    assert list(loaded) == list(saved)
    for name, tensor in loaded.items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(full, saved[name]), name
