"""A file that is checked alone gets the verdict of its folder, or the check says that it did not
read the others.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from ckptfix import UsageError, check, repair
from ckptfix.checkpoint.roles import Role
from ckptfix.storage import stores
from tests.stores.servers import QUICK, upload_folder
from tests.test_golden import GOLDEN, REAL

NOT_READ = "other files of the folder"

OF_SEVERAL_FILES = {
    "conflicting-models", "doubled-model", "doubled-states", "entry-gap", "identical-models",
    "identical-states", "incomplete-tensor", "index-mismatch", "mismatched-moments",
    "missing-model", "mixed-saves", "related-models", "second-family", "shifted-entries",
    "stale-family", "stale-shard", "surplus-states", "unsaved-parameters",
}  # fmt: skip
"""Findings by a comparison with other files, which a check of one file does not read."""

PREFIXES = {"nested-prefix", "wrapper-prefix"}


@pytest.mark.parametrize(
    "case", [*GOLDEN, *REAL], ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_a_file_has_the_verdict_of_its_folder(case: Path) -> None:
    """The golden folders have an example of every finding."""
    folder = case / "checkpoint" if (case / "checkpoint").is_dir() else case
    report = check(folder)
    for component in report.folder.components:
        alone = check(folder / component.path)
        assert any(words.startswith(NOT_READ) for words in alone.not_checked)
        of_folder = {
            one.code: one.severity for one in report.findings if one.path == component.path
        }
        of_file = {one.code: one.severity for one in alone.findings if one.path == component.path}
        for finding in alone.findings:
            if finding.code == "nested-prefix" and "were not read" in str(finding):
                of_file["nested-prefix"] = of_folder.get("nested-prefix", finding.severity)
        if component.role is Role.WEIGHTS_INDEX:
            # A broken index is an index-mismatch where its shards are, as a repair can write it
            # again.
            assert bool(of_file) == (component.problem is not None)
        elif OF_SEVERAL_FILES.isdisjoint(of_folder):
            assert of_file == of_folder, component.path
        else:
            # A duplicate has its wrappers because of the other file.
            assert of_file.keys() - of_folder.keys() <= PREFIXES, component.path


def codes(path: Path) -> list[str]:
    return sorted(finding.code for finding in check(path).findings)


def pretrained(folder: Path, weights: Any) -> Path:
    """Save a model of transformers, and put ``weights`` in the place of its own."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=8))
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(weights(model.state_dict()), folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize(
    "weights",
    [lambda state: {"state_dict": state}, lambda state: {}],
    ids=["wrapped", "without tensors"],
)
def test_the_config_next_to_weights_counts(tmp_path: Path, weights: Any) -> None:
    folder = pretrained(tmp_path / "gpt2", weights)
    _, loading = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert "transformer.wte.weight" in loading["missing_keys"]
    assert codes(folder) == codes(folder / "pytorch_model.bin") == ["unknown-state"]
    for name in ("config.json", "generation_config.json"):
        (folder / name).unlink()
    assert codes(folder) == codes(folder / "pytorch_model.bin") == []


def test_the_file_of_the_trainer_next_to_weights_counts(tmp_path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.ones(2, 2)}}, tmp_path / "pytorch_model.bin")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 1, "log_history": []}))
    assert "unknown-state" in codes(tmp_path)
    assert codes(tmp_path / "pytorch_model.bin") == ["unknown-state"]


def test_the_states_next_to_weights_count(tmp_path: Path) -> None:
    """accelerate allows arrays of uint32 in what ``load_state`` loads; plain torch.load refuses
    them.
    """
    import numpy as np

    array: Any = np.arange(3, dtype=np.uint32)
    torch.save({"weight": torch.ones(2), "seed": array}, tmp_path / "pytorch_model.bin")
    assert codes(tmp_path / "pytorch_model.bin") == ["unloadable-pickle"]
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.bin")
    assert "unloadable-pickle" not in codes(tmp_path)
    assert codes(tmp_path / "pytorch_model.bin") == []


def test_an_average_is_not_renamed_where_its_model_was_not_read(tmp_path: Path) -> None:
    weights = {"fc.weight": torch.ones(2, 2), "fc.bias": torch.zeros(2)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    average = {f"module.module.{name}": tensor / 2 for name, tensor in weights.items()}
    torch.save(average, tmp_path / "ema.pt")
    before = (tmp_path / "ema.pt").read_bytes()
    assert "nested-prefix" not in codes(tmp_path)
    (finding,) = check(tmp_path / "ema.pt").findings
    assert (finding.code, finding.severity.value) == ("nested-prefix", "warning")
    assert "were not read" in str(finding)
    assert repair(tmp_path / "ema.pt").steps == ()
    assert (tmp_path / "ema.pt").read_bytes() == before
    (tmp_path / "model.safetensors").unlink()
    (finding,) = check(tmp_path / "ema.pt").findings
    assert finding.severity.value == "error"


@pytest.mark.parametrize("name", ["config.json", "trainer_state.json", "latest", "README.md"])
def test_a_text_file_is_wrong_usage_and_no_damage(tmp_path: Path, name: str) -> None:
    shutil.copytree(REAL[0] / "checkpoint", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / name
    path.write_text('{"model_type": "gpt2"}' if name.endswith(".json") else "global_step5\n")
    with pytest.raises(UsageError, match=r"next: ckptfix check .*/checkpoint$"):
        check(path)


def test_text_under_the_name_of_weights_is_damage(tmp_path: Path) -> None:
    for name in ("model.safetensors", "optimizer.bin", "mine.pt"):
        (tmp_path / name).write_text("{}")
        assert codes(tmp_path / name) == ["not-a-tensor-file"]
    for content in (b"version https://git-lfs.github.com/spec/v1\n", b"<html>404</html>", b""):
        (tmp_path / "weights").write_bytes(content)
        assert codes(tmp_path / "weights") == ["not-a-tensor-file"]


def test_a_file_in_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    pretrained(tmp_path / "gpt2", lambda state: {"state_dict": state})
    url = f"memory://{os.urandom(6).hex()}"
    upload_folder(tmp_path / "gpt2", url)
    report = check(f"{url}/pytorch_model.bin")
    assert [finding.code for finding in report.findings] == ["unknown-state"]
