"""Repairs of weights behind a prefix: proven by what ``from_pretrained`` loads, and undone byte for
byte.
"""

import json
from pathlib import Path

import pytest
import torch

from ckptfix import Policy, check, repair, undo
from ckptfix.cli import run
from tests.diagnosis.test_pretrained_models import PREFIXES, in_shards, saved
from tests.tiny_models import NAME, Tensors, load, tensors_of, write

pytestmark = pytest.mark.filterwarnings("ignore")


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(root.iterdir()) if path.is_file()}


def inside(tensors: Tensors) -> Tensors:
    """Each layer was compiled alone, and the model wrapped."""
    return {
        f"module.{key.replace('layers.0.', 'layers.0._orig_mod.')}": each
        for key, each in tensors.items()
    }


@pytest.mark.parametrize("prefix", [*PREFIXES, "module.base_model.model.", "inside"])
@pytest.mark.parametrize("form", ["one file", "shards", "torch"])
def test_prefixes(prefix: str, form: str, tmp_path: Path) -> None:
    tensors = saved(tmp_path)
    damaged = (
        inside(tensors)
        if prefix == "inside"
        else {f"{prefix}{key}": each for key, each in tensors.items()}
    )
    write(tmp_path, damaged)
    if form == "shards":
        in_shards(tmp_path, damaged)
    elif form == "torch":
        (tmp_path / NAME).unlink()
        torch.save(dict(damaged), tmp_path / "pytorch_model.bin")
    before = contents(tmp_path)
    assert load(tmp_path) != "complete"
    assert repair(tmp_path).status == 0
    assert load(tmp_path) == "complete"
    assert check(tmp_path).findings == ()
    undo(tmp_path)
    assert contents(tmp_path) == before


def test_half_of_the_keys(tmp_path: Path) -> None:
    tensors = saved(tmp_path)
    write(
        tmp_path,
        {f"{'module.' * (at % 2)}{key}": each for at, (key, each) in enumerate(tensors.items())},
    )
    assert load(tmp_path) == "10 random, 10 unused"
    assert repair(tmp_path).status == 0
    assert load(tmp_path) == "complete"


def test_keys_that_would_become_one_stay(tmp_path: Path) -> None:
    tensors = saved(tmp_path)
    write(tmp_path, {**tensors, **{f"module.{key}": each + 1 for key, each in tensors.items()}})
    before = contents(tmp_path)
    assert load(tmp_path) == "0 random, 21 unused"
    assert "dead-weights" not in {finding.code for finding in check(tmp_path).findings}
    receipt = repair(tmp_path)
    assert receipt.steps == ()
    assert contents(tmp_path) == before


def test_next_to_save_state_a_repair_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {f"module.{key}": each for key, each in saved(tmp_path).items()})
    torch.save({"step": 0, "random_state": (3, (1, 2), None)}, tmp_path / "random_states_0.pkl")
    assert repair(tmp_path).steps == ()
    run(["check", str(tmp_path)])
    said = capsys.readouterr().out
    assert "load_state finds these keys" in said
    assert "--allow dead-weights" in said
    repair(tmp_path, policy=Policy(allow=frozenset({"dead-weights"})))
    assert load(tmp_path) == "complete"


def test_a_folder_of_the_trainer(tmp_path: Path) -> None:
    write(tmp_path, {f"module.{key}": each for key, each in saved(tmp_path).items()})
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 1, "log_history": []}))
    assert repair(tmp_path).status == 0
    assert not any(key.startswith("module.") for key in tensors_of(tmp_path))
    assert load(tmp_path) == "complete"
