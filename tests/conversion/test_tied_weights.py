"""Ties in a complete state: one tensor where the new loader looks for one, both names where it
looks for both.
"""

from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.tensors.opening import open_checkpoint
from tests.conversion.state_making import (
    net,
    save_state,
    trained,
)


@pytest.mark.parametrize("after", ["ddp", "zero2"])
def test_a_tie_that_fsdp_saved_twice_is_one_tensor_again(tmp_path: Path, after: str) -> None:
    run = trained()
    source = save_state(tmp_path / "source", "fsdp-full", run)
    weights = torch.load(source / "pytorch_model_fsdp.bin", weights_only=True)
    weights |= {
        "head.weight": weights["2.weight"].clone(),
        "frozen.weight": weights["2.weight"] + 1,
    }
    torch.save(weights, source / "pytorch_model_fsdp.bin")
    ckptfix.migrate(source, tmp_path / "new", to=after, state="all")
    (opened,) = open_checkpoint(tmp_path / "new").weights
    assert opened.ties == {"head.weight": "2.weight"}
    assert "frozen.weight" in {tensor.fqn for tensor in opened.tensors}


@pytest.mark.parametrize("after", ["ddp", "zero3"])
def test_equal_constants_are_not_taken_for_a_tie(tmp_path: Path, after: str) -> None:
    source = save_state(tmp_path / "source", "fsdp-full", trained())
    weights = torch.load(source / "pytorch_model_fsdp.bin", weights_only=True)
    ones = torch.ones(6)  # norms in bf16 keep their ones at small learning rates
    torch.save(
        weights | {"1.weight": ones, "frozen.weight": ones.clone()},
        source / "pytorch_model_fsdp.bin",
    )
    receipt = ckptfix.migrate(source, tmp_path / "new", to=after, state="all")
    (opened,) = open_checkpoint(tmp_path / "new").weights
    assert not opened.ties
    assert not any("tie" in words for words in receipt.warnings)


def test_the_model_decides_what_is_tied(tmp_path: Path) -> None:
    model, optimizer = trained()
    source = save_state(tmp_path / "source", "fsdp-full", (model, optimizer))
    weights = torch.load(source / "pytorch_model_fsdp.bin", weights_only=True)
    copies = {
        f"target.{name}": value.clone() for name, value in weights.items()
    }  # synchronized before the save
    torch.save(weights | copies, source / "pytorch_model_fsdp.bin")
    receipt = ckptfix.migrate(source, tmp_path / "guessed", to="ddp", state="all")
    assert "byte-identical to '0.bias', '0.weight'" in receipt.warnings[0]
    model.target = net().requires_grad_(False)
    receipt = ckptfix.migrate(source, tmp_path / "new", to="ddp", state="all", model=lambda: model)
    assert not receipt.warnings
    (opened,) = open_checkpoint(tmp_path / "new").weights
    assert not opened.ties
    assert len(opened.tensors) == 2 * len(weights)


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("after", ["ddp", "zero3"])
def test_a_tie_of_frozen_weights_is_one_tensor_again(
    tmp_path: Path, after: str, with_model: bool
) -> None:
    """As of a model that is trained by small matrices alone: its embedding and head are in no
    optimizer.
    """
    run = trained()
    source = save_state(tmp_path / "source", "fsdp-full", run)
    weights = torch.load(source / "pytorch_model_fsdp.bin", weights_only=True)
    embedding = torch.randn(50, 40)
    torch.save(
        {"embed.weight": embedding, **weights, "head.weight": embedding.clone()},
        source / "pytorch_model_fsdp.bin",
    )

    def model() -> torch.nn.Module:
        made = net()
        made.embed = torch.nn.Embedding(50, 40)
        made.head = torch.nn.Linear(40, 50, bias=False)
        made.head.weight = made.embed.weight
        return made.requires_grad_(False)

    receipt = ckptfix.migrate(
        source,
        tmp_path / "new",
        to=after,
        state="all",
        model=model if with_model else None,
        frozen="embed",
    )
    (opened,) = open_checkpoint(tmp_path / "new").weights
    assert opened.ties == {"head.weight": "embed.weight"}
    said = [words for words in receipt.warnings if "written once, as tied weights" in words]
    assert len(said) == (not with_model)


def test_a_frozen_copy_of_frozen_weights_is_not_taken_for_ties(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "fsdp-full", trained())
    weights = torch.load(source / "pytorch_model_fsdp.bin", weights_only=True)
    base = {f"{name}.weight": torch.randn(4, 4) for name in ("first", "second")}
    copies = {f"reference.{name}": value.clone() for name, value in base.items()}
    torch.save({**weights, **base, **copies}, source / "pytorch_model_fsdp.bin")
    receipt = ckptfix.migrate(source, tmp_path / "new", to="ddp", state="all")
    assert not open_checkpoint(tmp_path / "new").weights[0].ties
    assert not any("tie" in words for words in receipt.warnings)
