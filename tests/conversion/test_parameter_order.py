"""The order of a model's parameters, where a loader matches them by position."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import filesystem

import ckptfix
from ckptfix.errors import OperationError
from ckptfix.tensors.optimizer_opening import open_optimizers
from tests.conversion.state_making import Trained, assert_loads, assert_same, of_trainer, save_state


class Units(torch.nn.Module):  # type: ignore[misc]
    """A model whose names are not in alphabetical order, and all of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.block = torch.nn.Linear(4, 4, bias=False)
        self.last = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x)))


@pytest.mark.parametrize("after", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("before", ["fsdp", "fsdp-full"])
def test_an_order_that_is_not_the_models_is_refused_where_position_decides(
    tmp_path: Path, before: str, after: str
) -> None:
    torch.manual_seed(2)
    model = Units()
    # As FSDP1's flat parameters lie.
    by_units = [model.first.weight, model.last.weight, model.block.weight]
    optimizer = torch.optim.AdamW(by_units)
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    source = save_state(tmp_path / "source", before, (model, optimizer))
    with pytest.raises(
        OperationError, match=r"lists 'last\.weight' before 'block\.weight', but the model"
    ):
        ckptfix.migrate(source, tmp_path / "new", to=after, state="all")
    assert not (tmp_path / "new").exists()

    def new_run() -> Any:
        new = Units()
        return new, torch.optim.AdamW(new.parameters())

    ckptfix.migrate(source, tmp_path / "new", to=after, state="all", model=new_run)
    (state,) = open_optimizers(tmp_path / "new")
    if after == "ddp":
        found = torch.load(tmp_path / "new" / "optimizer.bin", weights_only=True)["state"]
        for number, parameter in enumerate(model.parameters()):
            assert_same(found[number], optimizer.state[parameter])
    else:
        assert state.groups[0].names == ("first.weight", "block.weight", "last.weight")
    with pytest.raises(OperationError, match="differ from those of the optimizer from --model"):
        ckptfix.migrate(
            source,
            tmp_path / "other",
            to=after,
            state="all",
            model=lambda: (model, torch.optim.AdamW([model.first.weight])),
        )
    universal = ckptfix.migrate(source, tmp_path / "universal", to="universal", state="all")
    assert universal.verified, "which DeepSpeed loads by name"


@pytest.mark.parametrize("after", ["ddp", "zero2", "zero3", "fsdp-full"])
def test_an_order_that_nothing_shows_is_named_as_not_checked(tmp_path: Path, after: str) -> None:
    """The symptom: FSDP1's order went to other parameters without a word where the model's was
    alphabetical.
    """
    torch.manual_seed(2)
    model = torch.nn.ModuleDict(
        {name: torch.nn.Linear(4, 4, bias=False) for name in ("embed", "layer", "norm")}
    )
    by_units = [model[name].weight for name in ("embed", "norm", "layer")]
    optimizer = torch.optim.AdamW(by_units)
    for one in by_units:
        one.grad = torch.randn(4, 4)
    optimizer.step()
    source = save_state(tmp_path / "source", "fsdp", (model, optimizer))
    receipt = ckptfix.migrate(source, tmp_path / "new", to=after, state="all")
    words = [
        one
        for one in receipt.not_checked
        if "the parameters of 'optimizer_0' are in the model's order" in one
    ]
    assert len(words) == (after != "fsdp-full"), "it goes by name"
    known = ckptfix.migrate(
        source,
        tmp_path / "known",
        to=after,
        state="all",
        model=lambda: (model, torch.optim.AdamW(model.parameters())),
    )
    assert not known.not_checked
    if after != "fsdp-full":
        with pytest.raises(
            OperationError,
            match=r"lists 'norm\.weight' before 'layer\.weight', but the model",
        ):
            ckptfix.migrate(source, tmp_path / "other", to=after, state="all", model=lambda: model)


def stepped(model: torch.nn.Module) -> Trained:
    """Return a model and its optimizer after a step with made-up gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def normalized() -> torch.nn.Module:
    """Return a model with an int64 buffer, which safetensors puts before the parameters."""
    return torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)
    )


def mixed() -> torch.nn.Module:
    """Return a model with a layer in bf16, which safetensors puts after the others."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].to(torch.bfloat16)
    return model


class Tied(torch.nn.Module):  # type: ignore[misc]
    """A model whose head has the weight of its embedding, under a name that comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.layer = torch.nn.Linear(4, 4)
        self.decoder = torch.nn.Linear(4, 5, bias=False)
        self.decoder.weight = self.embedding.weight


@pytest.mark.parametrize("between", ["fsdp", "fsdp-full"])
@pytest.mark.parametrize("after", ["ddp", "zero1", "zero3"])
def test_the_order_of_a_safetensors_file_is_not_taken_for_the_models(
    tmp_path: Path, between: str, after: str
) -> None:
    """The symptom: a model with BatchNorm went to FSDP, and its way back was refused."""
    run = stepped(normalized())
    source = save_state(tmp_path / "source", "ddp", run)
    ckptfix.migrate(source, tmp_path / "between", to=between, state="all", model=normalized)
    receipt = ckptfix.migrate(tmp_path / "between", tmp_path / "new", to=after, state="all")
    assert any("weights sorted by name do not show the order" in one for one in receipt.not_checked)
    if after == "ddp":
        assert_loads(tmp_path / "new", "ddp", run)


@pytest.mark.parametrize("options", [{}, {"dtype": "fp32"}], ids=["unchanged", "fp32"])
def test_parameters_of_two_dtypes_go_there_and_back(tmp_path: Path, options: Any) -> None:
    run = stepped(mixed())
    source = save_state(tmp_path / "source", "ddp", run)
    ckptfix.migrate(source, tmp_path / "between", to="fsdp", state="all", model=mixed, **options)
    receipt = ckptfix.migrate(tmp_path / "between", tmp_path / "new", to="ddp", state="all")
    assert any("weights sorted by name do not show the order" in one for one in receipt.not_checked)


@pytest.mark.parametrize("between", ["fsdp", "fsdp-full"])
def test_a_tied_name_that_was_added_goes_there_and_back(tmp_path: Path, between: str) -> None:
    model, optimizer = stepped(Tied())
    source = save_state(tmp_path / "source", "fsdp-full", (model, optimizer))
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    (source / "pytorch_model_fsdp.bin").unlink()
    (source / "optimizer.bin").unlink()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), source / "optimizer.bin")
    ckptfix.migrate(source, tmp_path / "between", to=between, state="all", model=Tied)
    ckptfix.migrate(tmp_path / "between", tmp_path / "new", to="ddp", state="all")
    found = torch.load(tmp_path / "new" / "optimizer.bin", weights_only=True)
    assert_same(found, optimizer.state_dict())


def test_shards_of_a_safetensors_model_go_there_and_back(tmp_path: Path) -> None:
    """The shards follow each other in the model's order, and each is sorted by name."""
    model, optimizer = stepped(torch.nn.ModuleDict({"z": torch.nn.Linear(4, 4), "a": normalized()}))
    source = of_trainer(tmp_path / "source", (model, optimizer))
    (source / "model.safetensors").unlink()
    shards = [model["z"].state_dict(prefix="z."), model["a"].state_dict(prefix="a.")]
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, source / name, {"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard.values())},
        "weight_map": {
            key: name for name, shard in zip(names, shards, strict=True) for key in shard
        },
    }
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    ckptfix.migrate(source, tmp_path / "between", to="fsdp", state="all", model=lambda: model)
    ckptfix.migrate(tmp_path / "between", tmp_path / "new", to="ddp", state="all")
    found = torch.load(tmp_path / "new" / "optimizer.pt", weights_only=True)
    assert_same(found, optimizer.state_dict())


@pytest.fixture
def written_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the items of a DCP folder as torch does where it has a GPU: the smallest first
    (``_OverlappingCpuLoader``).
    """

    def start(self: Any) -> None:
        self.items.sort(key=lambda item: item[0])

    monkeypatch.setattr(filesystem._SerialCpuLoader, "start_loading", start)


@pytest.mark.usefixtures("written_by_size")
def test_the_order_of_the_items_of_a_dcp_folder_is_not_the_models(tmp_path: Path) -> None:
    """The symptom: an FSDP save of a GPU was refused, as biases come first in its file."""
    run = stepped(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    source = save_state(tmp_path / "source", "fsdp", run)
    receipt = ckptfix.migrate(source, tmp_path / "new", to="ddp", state="all")
    assert_loads(tmp_path / "new", "ddp", run)
    assert not receipt.not_checked
