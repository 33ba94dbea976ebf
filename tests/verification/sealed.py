"""Small sealed checkpoints of every kind, and damage to them."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from ckptfix import VerifyReport, seal
from ckptfix.storage.files import AnyPath, on_disk
from ckptfix.storage.reading import Piece
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.stored import Contiguous
from ckptfix.verification.verify_report import Outcome

Summary = dict[str, tuple[str, str | None]]


def state(count: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        f"layers.{number}.weight": torch.randn(16, 24, generator=generator)
        for number in range(count)
    }


def make_safetensors(folder: Path) -> Path:
    save_file(state(), folder / "model.safetensors", {"format": "pt"})
    return folder


def make_bin(folder: Path) -> Path:
    torch.save(state(), folder / "pytorch_model.bin")
    return folder


def make_sharded(folder: Path) -> Path:
    names = list(state())
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:2], names[2:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: state()[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 4 * 16 * 24 * 4}, "weight_map": weight_map})
    )
    return folder


def make_dict(folder: Path) -> Path:
    torch.save({"model": state(), "epoch": 3}, folder / "train.pt")
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "safetensors": make_safetensors,
    "bin": make_bin,
    "sharded": make_sharded,
    "dict": make_dict,
}


def sealed(folder: Path, kind: str) -> Path:
    folder.mkdir(exist_ok=True)
    KINDS[kind](folder)
    (folder / "README.md").write_text("a model")
    receipt = seal(folder)
    assert receipt.status == 0
    assert receipt.tensors == 4
    return folder


def place(folder: Path, fqn: str) -> Piece:
    """Return where a tensor's bytes are."""
    for weights in open_checkpoint(folder).weights:
        for tensor in weights.tensors:
            if tensor.fqn == fqn:
                assert isinstance(tensor.layout, Contiguous)
                return tensor.layout.pieces[0]
    raise KeyError(fqn)


def flip(path: AnyPath, offset: int) -> None:
    with on_disk(path).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def wrong(report: VerifyReport) -> Summary:
    """Return what does not match: name -> what happened, and the file of a tensor."""
    return {
        item.name: (
            item.change.value if item.change else item.outcome.value,
            item.where if item.where != item.name else None,
        )
        for item in report.items
        if item.outcome is not Outcome.MATCH
    }
