"""Small files of torch.save, made for a test."""

import io
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckptfix.formats.torch_file import Appended, Patched, TorchFile, read_torch_file
from ckptfix.formats.torch_pickle import name_lists
from ckptfix.storage.reading import open_reader


class Strip:
    """A map that takes a leading prefix such as ``module.module.`` off."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def __call__(self, fqn: str) -> str:
        return fqn.removeprefix(self.prefix)

    def module(self, name: str) -> str:
        return (
            (name + ".").removeprefix(self.prefix)[:-1]
            if not self.prefix.startswith(name + ".")
            else ""
        )


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(3, 4))
    net[2].weight = net[0].weight  # tied
    return net


def wrapped(net: torch.nn.Module, depth: int) -> torch.nn.Module:
    for _ in range(depth):
        outer = torch.nn.Module()
        outer.module = net
        net = outer
    return net


def saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def nested_state_dict(depth: int = 2) -> OrderedDict[str, Any]:
    state: OrderedDict[str, Any] = wrapped(model(), depth).state_dict()
    return state


def read(path: Path) -> TorchFile:
    with open_reader(path) as reader:
        return read_torch_file(reader)


def parsed(folder: Path, data: bytes) -> TorchFile:
    path = folder / "parsed.bin"
    path.write_bytes(data)
    return read(path)


def new_names(file: TorchFile, strip: Strip) -> dict[int, str]:
    result: dict[int, str] = {}
    for place in name_lists(file.tree):
        rename: Callable[[str], str] = strip.module if place.kind == "metadata" else strip
        result |= {site: rename(name) for name, site in place.names}
    return result


def edited(path: Path, strip: Strip) -> bytes:
    """Return the file with its names stripped."""
    data = path.read_bytes()
    with open_reader(path) as reader:
        file = read_torch_file(reader)
        edit = file.edit(reader, new_names(file, strip))
    if isinstance(edit, Appended):
        assert 0 < edit.tail < len(edit.data)
        return data[: len(data) - file.trailing] + edit.data
    assert isinstance(edit, Patched)
    assert data[edit.offset : edit.offset + len(edit.old)] == edit.old
    return data[: edit.offset] + edit.new + data[edit.offset + len(edit.new) :]
