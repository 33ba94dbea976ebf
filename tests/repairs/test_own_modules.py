"""DCP folders of healthy scripts whose model has a module called ``module``: a repair asks before
it renames.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from ckptfix import Keys, Policy, check, repair, undo
from ckptfix.diagnosis.findings.base import Action, Severity
from tests.repairs.dcp_folders import MODEL, ONCE, OPTIMIZER, snapshot
from tests.repairs.dcp_runs import Wrapper
from tests.training.ranks import run_ranks

RENAMED = Policy(allow=frozenset({"mismatched-names"}))
BARE = Policy(keys=Keys.BARE)


class Script:
    """A model of which the modules called ``module`` are its own, and an optimizer that made a
    step.

    ``holders``: their number. ``is_ddp``: in DistributedDataParallel.
    """

    def __init__(self, holders: int, *, is_ddp: bool, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        self.whole = self.net
        for _ in range(holders):
            self.whole = Wrapper(self.whole)
        self.model = DistributedDataParallel(self.whole) if is_ddp else self.whole
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.net.state_dict().values()]


State = Callable[[Script], dict[str, Any]]


def as_it_is(script: Script) -> dict[str, Any]:
    return {"model": script.model.state_dict(), "optimizer": script.optimizer.state_dict()}


def flat(script: Script) -> dict[str, Any]:
    state: dict[str, Any] = script.model.state_dict()
    return state


def average(script: Script) -> dict[str, Any]:
    return {"ema": {f"module.{name}": tensor for name, tensor in script.model.state_dict().items()}}


def by_torch(script: Script) -> dict[str, Any]:
    model, optimizer = get_state_dict(script.model, script.optimizer)
    return {"model": model, "optim": optimizer}


def inner_model(script: Script) -> dict[str, Any]:
    """Save the weights of the net alone, and the optimizer as the whole model names its
    parameters.
    """
    optimizer = get_optimizer_state_dict(script.whole, script.optimizer)
    return {"model": script.net.state_dict(), "optimizer": optimizer}


def inner_optimizer(script: Script) -> dict[str, Any]:
    optimizer = get_optimizer_state_dict(script.net, script.optimizer)
    return {"model": script.model.state_dict(), "optimizer": optimizer}


def ddp_and_bare(script: Script) -> dict[str, Any]:
    optimizer = get_optimizer_state_dict(script.model, script.optimizer)
    return {"model": script.model.state_dict(), "optimizer": optimizer}


@pytest.fixture
def one_process() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def written(folder: Path, state: dict[str, Any], *, is_split: bool) -> None:
    """Save into one folder, or into two with the names of Accelerate."""
    for below, part in parts(folder, state, is_split=is_split):
        dcp.save(part, checkpoint_id=below)


def parts(
    folder: Path, state: dict[str, Any], *, is_split: bool
) -> list[tuple[Path, dict[str, Any]]]:
    if not is_split:
        return [(folder, state)]
    return [
        (folder / MODEL, {"model": state["model"]}),
        (folder / OPTIMIZER, {"optimizer": state["optimizer"]}),
    ]


def loads(folder: Path, script: Script, state: State, *, is_split: bool) -> bool:
    """Return whether the script finds each key that it looks for."""
    try:
        for below, part in parts(folder, state(script), is_split=is_split):
            dcp.load(part, checkpoint_id=below)
    except dcp.api.CheckpointException as error:
        if "Missing key in checkpoint state_dict" not in str(error):
            raise
        return False
    return True


@pytest.mark.parametrize(
    ("state", "holders", "is_ddp", "is_split"),
    [
        (as_it_is, 1, True, False),
        (as_it_is, 1, True, True),
        (as_it_is, 2, False, False),
        (flat, 1, True, False),
        (average, 0, True, False),
        (by_torch, 2, True, False),
        (inner_model, 1, False, False),
        (inner_model, 2, True, True),
        (inner_optimizer, 1, True, False),
        (inner_optimizer, 1, True, True),
        (ddp_and_bare, 0, True, True),
        (ddp_and_bare, 0, True, False),
    ],
)
@pytest.mark.usefixtures("one_process")
def test_a_script_still_loads_after_the_default_repair(
    tmp_path: Path, state: State, holders: int, is_ddp: bool, is_split: bool
) -> None:
    saving = Script(holders, is_ddp=is_ddp)
    written(tmp_path, state(saving), is_split=is_split)
    loading = Script(holders, is_ddp=is_ddp, seed=1)
    assert loads(tmp_path, loading, state, is_split=is_split)
    for one in check(tmp_path).findings:
        assert one.severity in (Severity.WARNING, Severity.NOTE), one
        assert one.action is not Action.FIX, one
    before = snapshot(tmp_path)
    receipt = repair(tmp_path)
    assert (receipt.steps, snapshot(tmp_path)) == ((), before)
    assert loads(tmp_path, loading, state, is_split=is_split)


@pytest.mark.usefixtures("one_process")
def test_a_corrected_script_loads_what_the_options_rename(tmp_path: Path) -> None:
    """``DDP(DDP(net))`` looks as ``DDP(Holder(net))``: the user says which of them it was."""
    saving = Script(1, is_ddp=True)
    written(tmp_path, as_it_is(saving), is_split=False)
    for policy, is_ddp in ((ONCE, True), (BARE, False)):
        corrected = Script(0, is_ddp=is_ddp, seed=1)
        assert not loads(tmp_path, corrected, as_it_is, is_split=False)
        assert repair(tmp_path, policy=policy).status == 0
        assert loads(tmp_path, corrected, as_it_is, is_split=False)
        assert all(map(torch.equal, corrected.weights(), saving.weights()))
        undo(tmp_path)
        assert loads(tmp_path, Script(1, is_ddp=True), as_it_is, is_split=False)


@pytest.mark.usefixtures("one_process")
def test_a_script_that_lets_torch_name_both_loads_what_the_option_renames(tmp_path: Path) -> None:
    """``ddp.state_dict()`` next to ``get_optimizer_state_dict``: bare, both are as
    ``get_state_dict`` names them.
    """
    saving = Script(0, is_ddp=True)
    written(tmp_path, ddp_and_bare(saving), is_split=True)
    found = [one for one in check(tmp_path).findings if one.code == "mismatched-names"]
    assert {(one.severity, one.action) for one in found} == {(Severity.WARNING, Action.ASK)}
    (stay,) = repair(tmp_path).unplanned
    assert (stay.code, "--allow mismatched-names" in stay.reason) == ("mismatched-names", True)
    assert repair(tmp_path, policy=BARE).status == 0

    corrected = Script(0, is_ddp=True, seed=1)
    model, optimizer = get_state_dict(corrected.model, corrected.optimizer)
    dcp.load(held := {"model": model}, checkpoint_id=tmp_path / MODEL)
    dcp.load(kept := {"optimizer": optimizer}, checkpoint_id=tmp_path / OPTIMIZER)
    set_model_state_dict(corrected.model, held["model"])
    set_optimizer_state_dict(corrected.model, corrected.optimizer, kept["optimizer"])
    assert all(map(torch.equal, corrected.weights(), saving.weights()))
    undo(tmp_path)
    assert repair(tmp_path, policy=RENAMED).status == 0
    assert loads(
        tmp_path,
        Script(1, is_ddp=False),
        lambda script: {
            "model": script.model.state_dict(),
            "optimizer": get_optimizer_state_dict(script.model, script.optimizer),
        },
        is_split=True,
    )


@pytest.mark.slow
def test_two_processes_of_ddp_and_fsdp_still_load(tmp_path: Path) -> None:
    """``save_fsdp_model`` and ``dcp.save``, in two processes; afterwards by scripts of the bare
    model.
    """
    accelerated, plain = tmp_path / "accelerated", tmp_path / "plain"

    def save(rank: int) -> None:
        dist.init_process_group("gloo")
        written(plain, as_it_is(Script(1, is_ddp=True)), is_split=False)
        _fsdp(accelerated, 2, is_save=True)

    def load(rank: int) -> None:
        dist.init_process_group("gloo")
        assert loads(plain, Script(1, is_ddp=True, seed=1), as_it_is, is_split=False)
        _fsdp(accelerated, 2, is_save=False)

    def load_bare(rank: int) -> None:
        dist.init_process_group("gloo")
        bare = Script(0, is_ddp=False, seed=1)
        assert loads(
            plain, bare, lambda script: {"model": get_model_state_dict(script.net)}, is_split=False
        )
        _fsdp(accelerated, 0, is_save=False)

    assert run_ranks(2, save) == [0, 0]
    assert run_ranks(2, load) == [0, 0]
    # No model is prepared twice for FSDP. Of the other save only the script knows how it wrapped
    # its model.
    for folder, severity in ((accelerated, Severity.NOTE), (plain, Severity.WARNING)):
        found = [one for one in check(folder).findings if one.code == "nested-prefix"]
        assert {(one.severity, one.action) for one in found} == {(severity, Action.ASK)}
        assert all(
            "saved by 2 processes" in str(one) for one in found if severity is Severity.WARNING
        )
        assert repair(folder).steps == ()
    assert run_ranks(2, load) == [0, 0]
    assert [repair(folder, policy=BARE).status for folder in (accelerated, plain)] == [0, 0]
    assert run_ranks(2, load_bare) == [0, 0]


def _fsdp(folder: Path, holders: int, *, is_save: bool) -> None:
    """Save or load by accelerate's own functions, with FSDP2."""
    import accelerate
    from accelerate.state import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import (
        load_fsdp_model,
        load_fsdp_optimizer,
        save_fsdp_model,
        save_fsdp_optimizer,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    accelerator = accelerate.Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    accelerator.state.fsdp_plugin = plugin  # accelerate turns FSDP on for GPUs alone
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = accelerate.DistributedType.FSDP
    script = Script(holders, is_ddp=False, seed=0 if is_save else 1)
    fully_shard(script.whole, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(script.whole.parameters())
    for parameter in script.whole.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    if is_save:
        folder.mkdir(exist_ok=True)
        save_fsdp_model(plugin, accelerator, script.whole, str(folder))
        save_fsdp_optimizer(plugin, accelerator, optimizer, script.whole, str(folder))
    load_fsdp_model(plugin, accelerator, script.whole, str(folder))
    load_fsdp_optimizer(plugin, accelerator, optimizer, script.whole, str(folder))
