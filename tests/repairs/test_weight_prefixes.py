"""Repairs of weights behind a prefix: proven by what ``from_pretrained`` loads, and undone byte for
byte.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptfix import Policy, check, latest_checkpoint, repair, undo
from ckptfix.checkpoint.folder_names import TRAINER
from ckptfix.cli import run
from tests.diagnosis.test_pretrained_models import PREFIXES, in_shards, saved
from tests.diagnosis.test_trainer_neighbours import Begin
from tests.diagnosis.test_trainer_states import trainer_in
from tests.tiny_models import NAME, Tensors, load, tiny, write

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
    assert "load_state needs these keys" in said
    assert "--allow dead-weights" in said
    repair(tmp_path, policy=Policy(allow=frozenset({"dead-weights"})))
    assert load(tmp_path) == "complete"


WRAPPED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "compiled": (lambda model: torch.compile(model, backend="eager"), "note"),
    "in DataParallel": (torch.nn.DataParallel, "error"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_a_trainer_of_a_wrapped_model_resumes_after_a_default_repair(
    name: str, tmp_path: Path
) -> None:
    """The Trainer loads with ``strict=False``: after a rename it would begin with random weights,
    and say nothing.
    """
    wrap, severity = WRAPPED[name]
    run = tmp_path / "run"

    def begins_with(checkpoint: Path | None) -> Tensors:
        of_bare, begin = trainer_in(run, remove_unused_columns=False), Begin()
        trainer = type(of_bare)(
            wrap(of_bare.model),
            of_bare.args,
            train_dataset=of_bare.train_dataset,
            callbacks=[begin],
        )
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        return begin.weights

    begins_with(None)
    root = run / "checkpoint-4"
    weights, before = load_file(root / NAME), contents(root)
    assert [
        finding.severity.value for finding in check(root).findings if finding.code == "dead-weights"
    ] == [severity]
    assert latest_checkpoint(run, pattern=TRAINER) == root
    assert repair(root).steps == ()
    assert contents(root) == before
    begun = begins_with(root)
    assert all(torch.equal(begun[key], each) for key, each in weights.items())
    assert load(root) == "25 random, 25 unused"
    repair(root, policy=Policy(allow=frozenset({"dead-weights"})))
    assert load(root) == "complete"


@pytest.mark.parametrize("file", ["optimizer.pt", "optimizer.bin", "progress.pt"])
def test_a_script_that_wraps_its_model_resumes_after_a_default_repair(
    file: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    (tmp_path / NAME).unlink()
    model = torch.nn.DataParallel(tiny("LlamaForCausalLM"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(1, 2, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    state = optimizer.state_dict()
    torch.save({"optimizer": state, "step": 1} if file == "progress.pt" else state, tmp_path / file)
    assert load(tmp_path) == "21 random, 21 unused"
    (finding,) = (each for each in check(tmp_path).findings if each.code == "dead-weights")
    assert (finding.severity.value, finding.action.value) == ("note", "ask")
    assert "a script that wraps its model needs these keys to resume" in finding.advice
    assert repair(tmp_path).steps == ()
    torch.nn.DataParallel(tiny("LlamaForCausalLM")).load_state_dict(
        torch.load(tmp_path / "pytorch_model.bin")
    )
    repair(tmp_path, policy=Policy(allow=frozenset({"dead-weights"})))
    assert load(tmp_path) == "complete"
