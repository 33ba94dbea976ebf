"""The common interface, and how long 100,000 tensors take."""

import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix.errors import FormatError
from ckptfix.formats.torch_file import read_torch_file, same_storages
from ckptfix.formats.torch_pickle import name_lists, tensor_infos
from ckptfix.storage.reading import open_reader
from tests.formats.making import (
    Strip,
    edited,
    model,
    nested_state_dict,
    new_names,
    parsed,
    read,
    saved,
    wrapped,
)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


def test_a_hostile_file_is_read_and_edited_without_running_it(tmp_path: Path) -> None:
    path = tmp_path / "hostile.bin"
    torch.save({"model": nested_state_dict(), "evil": Hostile()}, path)
    assert ("posix", "abort") in read(path).tree.globals
    path.write_bytes(edited(path, Strip("module.module.")))
    assert name_lists(read(path).tree)[0].names[0][0] == "0.weight"


def test_a_training_dict_keeps_every_value(tmp_path: Path) -> None:
    net = wrapped(model(), 2)
    optimizer = torch.optim.AdamW(net.named_parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    value = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "note": "module.module.0.weight",
    }
    path = tmp_path / "train.pt"
    torch.save(value, path)
    path.write_bytes(edited(path, Strip("module.module.")))
    loaded = torch.load(path)
    assert list(loaded["model"]) == list(model().state_dict())
    assert loaded["note"] == "module.module.0.weight"
    names = [name for name, _ in model().named_parameters()]
    assert loaded["optimizer"]["param_groups"][0]["param_names"] == names
    again = torch.optim.AdamW(model().named_parameters())
    again.load_state_dict(loaded["optimizer"])


def test_the_edit_refuses_a_file_that_changed(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save(nested_state_dict(), path)
    file = read(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"module.module.0.bias", b"module.module.0.BIAS"))
    with open_reader(path) as reader, pytest.raises(FormatError, match="has changed since"):
        file.edit(reader, new_names(file, Strip("module.")))


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_ranges_to_compare(tmp_path: Path, options: dict[str, Any]) -> None:
    one, other = (saved(nested_state_dict(depth), **options) for depth in (0, 2))
    files = parsed(tmp_path, one), parsed(tmp_path, other)
    ranges = same_storages(*files, Strip(""), Strip("module.module."))
    assert ranges is not None
    for (begin, length), (begin_other, length_other) in ranges:
        assert length == length_other
        assert one[begin : begin + length] == other[begin_other : begin_other + length]
    assert same_storages(*files, Strip(""), Strip("module.")) is None


def test_tensors_of_a_storage(tmp_path: Path) -> None:
    file = parsed(tmp_path, saved(model().state_dict()))
    assert [tensor.fqn for tensor in file.tensors_of("0")] == ["0.weight", "2.weight"]
    assert file.tensors_of("99") == ()


@pytest.mark.slow
def test_time_of_many_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = 20_000
    value = OrderedDict(
        (f"module.module.layers.{index // 9}.experts.{index % 9}.weight", torch.empty(2, 2))
        for index in range(count)
    )
    path = tmp_path / "many.bin"
    torch.save(value, path)
    begin = time.perf_counter()
    with open_reader(path) as reader:
        file = read_torch_file(reader)
    parsed_at = time.perf_counter()
    assert len(tensor_infos(file)) == len(name_lists(file.tree)[0].names) == count
    with capsys.disabled():
        listed = time.perf_counter()
        print(
            f"\n{count} tensors: read {parsed_at - begin:.3f} s, listed {listed - parsed_at:.3f} s"
        )
