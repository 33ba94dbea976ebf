"""Every source of migrate in every format: the same bytes by digest, and read back by the
stock loaders.
"""

import json
import os
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptfix import migrate
from ckptfix.conversion.migrate import MigrateReceipt
from ckptfix.tensors.opening import open_checkpoint
from fixtures.digests import tensor_digests
from tests.conversion.making import FORMATS, digests
from tests.tensors.dcp_making import save as save_dcp
from tests.tensors.writing import torch_digest

ROOT = Path(__file__).parents[2]
DEEPSPEED = ROOT / "fixtures" / "deepspeed-0.18.2"
State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Net(nn.Module):  # type: ignore[misc]
    """Has a tie, buffers of two dtypes, and a parameter without a dimension."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(9, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(1.5 + seed))
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight


class Source(NamedTuple):
    """What is migrated, and the state dicts of its models."""

    path: Path
    states: list[State]


def of(seed: int = 0) -> State:
    state: State = Net(seed).state_dict()
    return state


def untied(seed: int = 0) -> State:
    return {name: value.clone() for name, value in of(seed).items()}


def one_safetensors(folder: Path) -> Source:
    save_file(untied(), folder / "model.safetensors", metadata={"format": "pt"})
    return Source(folder / "model.safetensors", [untied()])


def shards(folder: Path, *, safe: bool) -> Source:
    (folder / "a").mkdir()
    save_torch_state_dict(untied(), folder / "a", max_shard_size=100, safe_serialization=safe)
    assert len(list((folder / "a").iterdir())) > 3
    return Source(folder / "a", [untied()])


def torch_file(folder: Path, name: str) -> Source:
    torch.save(of(), folder / name)
    return Source(folder / name, [of()])


def fsdp_full(folder: Path) -> Source:
    """As ``save_fsdp_model`` and ``save_fsdp_optimizer`` of accelerate write it with
    ``FULL_STATE_DICT``.
    """
    (folder / "a").mkdir()
    for number, suffix in enumerate(("", "_1")):
        torch.save(of(number), folder / "a" / f"pytorch_model_fsdp{suffix}.bin")
        optimizer = {
            "state": {"scale": {"exp_avg": torch.ones(())}},
            "param_groups": [{"params": ["scale"]}],
        }
        torch.save(optimizer, folder / "a" / f"optimizer{suffix}.bin")
    torch.save({}, folder / "a" / "random_states_0.pkl")
    return Source(folder / "a", [of(0), of(1)])


def plain_dict(folder: Path) -> Source:
    optimizer = torch.optim.AdamW(Net().parameters())
    torch.save({"model": of(), "optimizer": optimizer.state_dict(), "epoch": 3}, folder / "ckpt.pt")
    return Source(folder / "ckpt.pt", [of()])


def lightning(folder: Path) -> Source:
    """The keys that ``trainer.save_checkpoint`` of Lightning 2 writes."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    (model.scale * model.embed.weight.sum()).backward()
    optimizer.step()
    state = OrderedDict(
        ("net." + name, value.detach().clone()) for name, value in model.state_dict().items()
    )
    state["net.head.weight"] = state["net.embed.weight"]
    document = {
        "epoch": 1,
        "global_step": 20,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": state,
        "loops": {
            "fit_loop": {
                "state_dict": {},
                "epoch_progress": {"total": {"ready": 2, "completed": 1}},
            }
        },
        "callbacks": {
            "ModelCheckpoint{'monitor': None}": {
                "best_model_score": torch.tensor(0.25),
                "best_model_path": "x",
            }
        },
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 1e-3},
    }
    torch.save(document, folder / "last.ckpt")
    return Source(folder / "last.ckpt", [dict(state)])


def dcp_alone(folder: Path) -> Source:
    save_dcp(folder / "a", {"model": of()})
    return Source(folder / "a", [of()])


def dcp_of_accelerate(folder: Path) -> Source:
    for number in (0, 1):
        save_dcp(folder / "a" / f"pytorch_model_fsdp_{number}", {"model": of(number)})
    torch.save({}, folder / "a" / "random_states_0.pkl")
    return Source(folder / "a", [of(0), of(1)])


def save_state(folder: Path, *, safe: bool) -> Source:
    accelerator = Accelerator(cpu=True)
    models = [Net(0), Net(1)]
    prepared = accelerator.prepare(
        *models, *(torch.optim.AdamW(one.parameters()) for one in models)
    )
    assert len(prepared) == 4
    accelerator.save_state(str(folder / "a"), safe_serialization=safe)
    # Of tied weights accelerate leaves all but one name out of a safetensors file.
    left = {"head.weight"} if safe else set()
    states = [{k: v for k, v in one.state_dict().items() if k not in left} for one in models]
    return Source(folder / "a", states)


def pretrained(folder: Path) -> Source:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=19, n_positions=8))
    model.save_pretrained(folder / "a", max_shard_size="4KB")
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    return Source(folder / "a", [state])  # the head is tied, and transformers saves it once


MATRIX: dict[str, dict[str, Callable[[Path], Source]]] = {
    "safetensors, single or shards": {
        "single": one_safetensors,
        "shards": lambda folder: shards(folder, safe=True),
    },
    "`.bin`, `.pt`, `.pth`, `.ckpt`, single or shards; FSDP full (`pytorch_model_fsdp.bin`)": {
        ".bin": lambda folder: torch_file(folder, "pytorch_model.bin"),
        ".pt": lambda folder: torch_file(folder, "weights.pt"),
        ".pth": lambda folder: torch_file(folder, "weights.pth"),
        ".ckpt": lambda folder: torch_file(folder, "weights.ckpt"),
        "shards": lambda folder: shards(folder, safe=False),
        "FSDP full": fsdp_full,
    },
    "training dict (its models)": {"torch.save": plain_dict, "Lightning": lightning},
    "DCP folder (`pytorch_model_fsdp_<i>/`, or alone)": {
        "alone": dcp_alone,
        "accelerate": dcp_of_accelerate,
    },
    # test_deepspeed_cells.
    "DeepSpeed ZeRO-1, 2, 3 and universal (fp32; `original` for 1 and 2)": {},
    # test_optimizer_opening.
    "FSDP without DCP, a file for each rank (`pytorch_model_fsdp_<i>_rank<r>.bin`)": {},
    "`save_state` folder as a whole": {
        "safetensors": lambda folder: save_state(folder, safe=True),
        "bin": lambda folder: save_state(folder, safe=False),
    },
    "`from_pretrained` folder": {"shards": pretrained},
}
"""Source -> its variants."""

CELLS = [
    pytest.param(make, to, id=f"{row.split(',')[0].split(' (')[0]}: {variant} to {to}")
    for row, variants in MATRIX.items()
    for variant, make in variants.items()
    for to in FORMATS
]


def stock(root: Path, to: str, index: int) -> State:
    """Return a model of a migrated folder as the stock loader of its format reads it, files merged
    by their index.
    """
    suffix = f"_{index}" if index else ""
    if to == "dcp":
        where = root / f"pytorch_model_fsdp_{index}"
        target = root.parent / "stock.pt"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(where if where.is_dir() else root, target)
        found: State = torch.load(target, weights_only=True)["model"]
        return found
    name = f"model{suffix}.safetensors" if to == "safetensors" else f"pytorch_model{suffix}.bin"
    index_path = root / f"{name}.index.json"
    names = {name}
    if index_path.exists():
        names = set(json.loads(index_path.read_text())["weight_map"].values())
    read = load_file if to == "safetensors" else lambda path: torch.load(path, weights_only=True)
    merged: State = {}
    for one in names:
        merged |= read(root / one)
    return merged


def assert_same(root: Path, to: str, receipt: MigrateReceipt, states: list[State]) -> None:
    """By digest as ckptfix reads it, by value as others do; safetensors files hold a tie once."""
    opened = open_checkpoint(root).weights
    assert receipt.verified
    assert len(opened) == len(states)
    for number, (weights, state) in enumerate(zip(opened, states, strict=True)):
        assert digests(weights) == {name: torch_digest(value) for name, value in state.items()}
        found = stock(root, to, number)
        left = set(weights.ties) if to == "safetensors" else set()
        assert found.keys() == state.keys() - left
        assert tensor_digests(found) == tensor_digests({name: state[name] for name in found})
        for name, kept in weights.ties.items() if to == "bin" else ():
            assert (
                found[name].untyped_storage().data_ptr() == found[kept].untyped_storage().data_ptr()
            )


@pytest.mark.parametrize(("make", "to"), CELLS)
def test_cell(make: Callable[[Path], Source], to: str, tmp_path: Path) -> None:
    source = make(tmp_path)
    receipt = migrate(source.path, tmp_path / "new", to=to)
    assert_same(tmp_path / "new", to, receipt, source.states)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    "name", ["zero1", "zero2", "zero3", "zero1-bf16", "accelerate-zero2", "accelerate-zero3"]
)
def test_deepspeed_cells(name: str, to: str, tmp_path: Path) -> None:
    run = json.loads((DEEPSPEED / name / "run.json").read_text())
    for which in ("fp32", "original"):
        if which == "original" and "zero3" in name:
            continue
        dtype = "original" if which == "original" else None
        migrate(DEEPSPEED / name / "checkpoint", tmp_path / which, to=to, dtype=dtype)
        found = stock(tmp_path / which, to, 0)
        left = {"head.weight"} if to == "safetensors" else set()
        assert tensor_digests(found) == {
            name: one for name, one in run[which].items() if name not in left
        }


@pytest.mark.parametrize("to", FORMATS)
def test_what_lightning_keeps_beside_the_model_is_named(tmp_path: Path, to: str) -> None:
    receipt = migrate(lightning(tmp_path).path, tmp_path / "new", to=to)
    (left,) = receipt.left_out
    assert left.what.startswith("last.ckpt: ")
    assert "'optimizer_states'" in left.what or "more" in left.what
    assert [one.label for one in receipt.models] == ["last.ckpt['state_dict']"]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that two processes with FSDP2 saved, whole weights in one file."""
    folder = tmp_path_factory.mktemp("fsdp") / "saved"
    done = subprocess.run(
        [sys.executable, "-m", "tests.conversion.fsdp_full_run", str(folder)],
        capture_output=True, text=True, cwd=ROOT, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
def test_fsdp_full_as_accelerate_saved_it(full: Path, to: str, tmp_path: Path) -> None:
    assert (full / "pytorch_model_fsdp.bin").is_file()
    recorded: dict[str, Any] = json.loads(full.with_suffix(".json").read_text())
    receipt = migrate(full, tmp_path / "new", to=to)
    assert set(receipt.carried) == {"optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"}
    state = torch.load(full / "pytorch_model_fsdp.bin", weights_only=True)
    assert tensor_digests(state) == recorded
    assert_same(tmp_path / "new", to, receipt, [state])
