"""Two processes resume from a repaired DCP checkpoint by accelerate's own loaders, into a model
that is not wrapped.
"""

import json
import warnings
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptfix import Keys, repair
from fixtures.digests import tensor_digests
from fixtures.make_dcp import net, wrapped
from tests.repairs.dcp_folders import FIXTURES, copy, renaming
from tests.training.rank_cases import turn_on_fsdp
from tests.training.ranks import run_ranks


def resume(folder: Path, wraps: int) -> None:
    """Load as one of two processes, and compare all values with those of the run that saved."""
    warnings.simplefilter("ignore")
    accelerator = accelerate.Accelerator(cpu=True)
    turn_on_fsdp(accelerator, fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    plugin = accelerator.state.fsdp_plugin
    model = net(5)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    outer = wrapped(model, wraps)
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1, momentum=0.9)
    load_fsdp_model(plugin, accelerator, outer, str(folder), 0)
    load_fsdp_optimizer(plugin, accelerator, optimizer, outer, str(folder), 0)
    state, optim = get_state_dict(outer, optimizer, options=StateDictOptions(full_state_dict=True))
    run = json.loads((FIXTURES / "fsdp2-nested" / "run.json").read_text())
    prefix = "module." * wraps
    assert tensor_digests(state) == {prefix + name: one for name, one in run["models"]["0"].items()}
    moments = {name: tensor_digests(values) for name, values in optim["state"].items()}
    assert moments == {prefix + name: one for name, one in run["optimizer"].items()}


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "wraps"), [(Keys.BARE, 0), (Keys.AUTO, 1), (None, 0)])
def test_a_run_resumes_only_from_the_repaired_one(
    tmp_path: Path, keys: Keys | None, wraps: int
) -> None:
    folder = copy(tmp_path, "fsdp2-nested")
    if keys is not None:
        repair(folder, policy=renaming(keys))
    statuses = run_ranks(2, lambda rank: resume(folder, wraps))
    assert all(status == 0 for status in statuses) is (keys is not None)
