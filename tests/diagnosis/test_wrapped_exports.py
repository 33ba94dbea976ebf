"""Keys with wrappers in folders of transformers, whose ``from_pretrained`` makes a bare model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from ckptfix import check
from ckptfix.diagnosis.findings.duplicates import WrapperPrefix
from tests.tiny_models import reconfigure, tensors_of, tiny, write


def wrapped(root: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Save a model of transformers with a prefix before each key, and return its weights."""
    tiny("BertModel").save_pretrained(root)
    weights = tensors_of(root)
    write(root, {prefix + name: tensor for name, tensor in weights.items()})
    return weights


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_the_advice_does_not_call_keys_right_that_no_load_finds(
    prefix: str, tmp_path: Path
) -> None:
    """It was "right for the script that wrote it", and from_pretrained left all weights random."""
    weights = wrapped(tmp_path, prefix)
    loaded = AutoModel.from_pretrained(tmp_path).state_dict()
    matrices = [name for name, tensor in weights.items() if tensor.dim() == 2]
    assert not any(torch.equal(loaded[name], weights[name]) for name in matrices)
    # The keys of a known class are judged by the table.
    assert [finding.code for finding in check(tmp_path).findings] == ["dead-weights"]
    reconfigure(tmp_path, architectures=["MyModel"])
    (finding,) = check(tmp_path).findings
    assert isinstance(finding, WrapperPrefix)
    assert (
        finding.advice
        == "from_pretrained does not find these keys: it leaves their weights random or fails\n"
        "to remove the wrapper: ckptfix repair DIR --keys bare; ignore this if modules of the "
        "model itself have these names"
    )


def test_the_advice_for_a_folder_of_a_script(tmp_path: Path) -> None:
    wrapped(tmp_path, "module.")
    (tmp_path / "config.json").unlink()
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (finding,) = check(tmp_path).findings
    assert finding.advice.startswith("nothing to do for a script that wraps its model the same way")
