"""Optimizers that two processes save together, as stock accelerate and torch write them."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class Net(torch.nn.Module):  # type: ignore[misc]
    """Layers whose lengths two ranks share evenly and unevenly, one frozen, two tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.middle = torch.nn.Linear(4, 4)
        self.narrow = torch.nn.Linear(4, 1)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.norm(self.embed(ids)))
        return self.head(hidden).square().mean() + self.narrow(hidden).mean()


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the param groups that the Trainer makes: with decay and without."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
    ]


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, rank: int = 0, ranks: int = 1
) -> None:
    for step in range(2):
        ids = torch.arange(8).reshape(2, 4).add(step).remainder(6)
        model(ids[rank::ranks]).backward()
        optimizer.step()
        optimizer.zero_grad()


def full(value: Any) -> Any:
    """Return a tensor as the ranks have it together."""
    return value.full_tensor().clone() if hasattr(value, "full_tensor") else value


def in_memory(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the states of an optimizer by fqn, the groups, and the weights."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "states": {
            names[parameter]: {key: full(value) for key, value in state.items()}
            for parameter, state in optimizer.state.items()
        },
        "groups": [
            {**group, "params": [names[parameter] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ],
        "weights": {name: full(value) for name, value in model.state_dict().items()},
    }


def save_all(root: Path) -> None:
    """Save as one of two processes."""
    from accelerate import Accelerator
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    from tests.training.rank_cases import turn_on_fsdp

    warnings.simplefilter("ignore")
    accelerator = Accelerator(cpu=True)
    rank = dist.get_rank()

    def made(name: str, mesh: Any, **options: Any) -> tuple[Any, Any, Path]:
        model = Net()
        fully_shard(model, mesh=mesh, **options)
        optimizer = torch.optim.AdamW(groups(model), lr=0.01, betas=(0.8, 0.9))
        train(model, optimizer, rank=rank, ranks=2)
        seen = in_memory(model, optimizer)
        if rank == 0:
            (root / name).mkdir()
            torch.save(seen, root / f"{name}.expected")
        dist.barrier()
        return model, optimizer, root / name

    mesh = init_device_mesh("cpu", (2,))
    cut = {
        "shard_placement_fn": lambda one: Shard(1) if one.dim() > 1 and one.shape[1] == 4 else None
    }
    for name, state, over, options, extra in (
        ("full", "FULL_STATE_DICT", mesh, {}, {}),
        ("sharded", "SHARDED_STATE_DICT", mesh, {}, {}),
        ("tiled", "SHARDED_STATE_DICT", mesh, cut, {}),
        ("ranks", "SHARDED_STATE_DICT", mesh, {}, {"use_dcp": False}),
        ("tiled-ranks", "SHARDED_STATE_DICT", mesh, cut, {"use_dcp": False}),
        ("copies-ranks", "SHARDED_STATE_DICT", init_device_mesh("cpu", (2, 1), mesh_dim_names=("copy", "cut")), {},
         {"use_dcp": False}),
    ):  # fmt: skip
        turn_on_fsdp(accelerator, fsdp_version=2, state_dict_type=state)
        plugin = accelerator.state.fsdp_plugin
        model, optimizer, folder = made(name, over, **options)
        save_fsdp_model(plugin, accelerator, model, str(folder), 0, **extra)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder), 0, **extra)
        if name == "sharded":
            momentum = torch.optim.SGD(model.middle.parameters(), lr=0.5, momentum=0.9)
            train(model, momentum, rank=rank, ranks=2)
            save_fsdp_optimizer(plugin, accelerator, momentum, model, str(folder), 1)
            plain = torch.optim.SGD(model.middle.parameters(), lr=0.5)
            save_fsdp_optimizer(plugin, accelerator, plain, model, str(folder), 2)
    model, optimizer, folder = made("flattened", mesh)
    state = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    dcp.save({"optimizer": state}, storage_writer=dcp.FileSystemWriter(folder / "optimizer_0"))
    dist.destroy_process_group()


def save_fsdp1(root: Path) -> None:
    """Save FSDP1's sharded and local state dicts as one of two processes, each rank for itself."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def gathered(
        value: Any,
    ) -> Any:  # torch 2.13's own FULL_STATE_DICT mixes up moments on the CPU
        if isinstance(value, dict):
            return {key: gathered(one) for key, one in value.items()}
        if not hasattr(value, "local_shards"):
            return value
        complete = torch.empty(value.size()) if rank == 0 else None
        value.gather(0, complete)
        return complete

    model = FSDP(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    train(model, optimizer, rank=rank, ranks=2)
    for folder, kind in (
        ("sharded", StateDictType.SHARDED_STATE_DICT),
        ("local", StateDictType.LOCAL_STATE_DICT),
    ):
        (root / folder).mkdir(exist_ok=True)
        with FSDP.state_dict_type(model, kind):
            weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        name = "pytorch_model_fsdp" + ("_0" if folder == "sharded" else "")
        torch.save(weights, root / folder / f"{name}_rank{rank}.bin")
        torch.save(states, root / folder / f"optimizer_0_rank{rank}.bin")
        if folder == "sharded":
            seen = {"weights": gathered(dict(weights)), "states": gathered(states["state"])}
            if rank == 0:
                torch.save(seen, root / "expected")
    dist.destroy_process_group()


def on_meshes() -> dict[str, torch.Tensor]:
    """Return the tensors of ``save_meshes``, complete."""
    shapes = {
        "rows": [7, 3],
        "both": [7, 5],
        "twice": [9, 2],
        "first": [3, 2],
        "second": [2, 5],
        "copies": [3, 3],
    }
    shapes |= {"few": [1, 4], "line": [5], "partial": [2, 2], "thin": [5]}
    torch.manual_seed(1)
    return {name: torch.rand(shape) for name, shape in shapes.items()} | {"plain": torch.arange(3)}


def save_meshes(root: Path) -> None:
    """Save tensors that are cut over a mesh of two by two ranks, as one of four processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2))
    cut = {"rows": (Replicate(), Shard(0)), "both": (Shard(0), Shard(1)), "twice": (Shard(0), Shard(0)),
           "first": (Shard(0), Replicate()), "second": (Shard(1), Shard(0)), "copies": (Replicate(), Replicate()),
           "few": (Shard(0), Shard(1)), "line": (Shard(0), Shard(0))}  # fmt: skip
    state = on_meshes()
    found: dict[str, Any] = {
        name: distribute_tensor(state[name], mesh, how) for name, how in cut.items()
    }
    found["partial"] = DTensor.from_local(
        state["partial"], mesh, (Partial(), Replicate()), run_check=False
    )
    found["plain"] = state["plain"]
    found["thin"] = distribute_tensor(
        state["thin"], init_device_mesh("cpu", (4,)), [Shard(0)]
    )  # rank 3 has nothing
    torch.save(found, root / f"pytorch_model_fsdp_0_rank{dist.get_rank()}.bin")
    dist.destroy_process_group()
