"""The ``format`` in the header of safetensors files: what accelerate's loaders refuse is told, and
nothing else is.
"""

from pathlib import Path

import accelerate
import pytest
import torch
from safetensors.torch import load_model, save_file

from ckptfix import check, repair
from ckptfix.diagnosis.policy import Policy

METADATA = {
    "pt": {"format": "pt"},
    "none at all": None,
    "other metadata": {"own": "1"},
    **{name: {"format": name} for name in ("tf", "flax", "mlx", "np", "PT", "")},
}


def refused(path: Path) -> bool:
    load_model(torch.nn.Linear(2, 2), path)
    try:
        accelerate.load_checkpoint_in_model(torch.nn.Linear(2, 2), str(path))
    except (OSError, ValueError):
        return True
    return False


@pytest.mark.parametrize("name", METADATA)
def test_what_load_checkpoint_in_model_refuses_is_told(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file(torch.nn.Linear(2, 2).state_dict(), path, metadata=METADATA[name])
    codes = [finding.code for finding in check(path).findings]
    # transformers before 5 refuses a header without any metadata, too.
    assert codes == (["no-format-metadata"] if refused(path) or name == "none at all" else [])
    before = path.read_bytes()
    repair(tmp_path, policy=Policy(allow=frozenset({"no-format-metadata"})))
    if "format" in (METADATA[name] or {}):
        assert path.read_bytes() == before
    else:
        assert not refused(path)
        assert check(path).findings == ()
