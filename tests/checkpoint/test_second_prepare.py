"""Facts about training in an optimizer's pickle."""

from pathlib import Path

import pytest
import torch

from ckptfix.checkpoint.second_prepare import OptimizerFacts, read_optimizer
from ckptfix.formats.torch_file import read_torch_file
from ckptfix.storage.reading import open_reader


def facts(path: Path, value: object, *, legacy: bool = False) -> OptimizerFacts | None:
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    with open_reader(path) as reader:
        return read_optimizer(read_torch_file(reader), reader)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("kind", "options", "before", "after"),
    [
        ("AdamW", {}, False, True),
        ("SGD", {"momentum": 0.9}, False, True),
        ("SGD", {}, None, None),
        ("Adagrad", {}, False, True),  # it has moments from the beginning
        ("RMSprop", {}, False, True),
        ("Adadelta", {}, False, True),
        ("ASGD", {}, False, True),
    ],
)
def test_steps_show_in_the_moments(
    tmp_path: Path,
    kind: str,
    options: dict[str, float],
    before: bool | None,
    after: bool | None,
    legacy: bool,
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = getattr(torch.optim, kind)(model.named_parameters(), lr=0.1, **options)
    path = tmp_path / "optimizer.bin"
    fresh = facts(path, optimizer.state_dict(), legacy=legacy)
    assert fresh is not None
    assert (fresh.has_stepped, fresh.names) == (before, ("weight", "bias"))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    trained = facts(path, optimizer.state_dict(), legacy=legacy)
    assert trained is not None
    assert (trained.has_stepped, trained.shapes) == (after, ((2, 3), (2,)) if after else ())


def test_another_dict_is_no_optimizer(tmp_path: Path) -> None:
    assert facts(tmp_path / "x.bin", {"state": 1}) is None
    assert facts(tmp_path / "x.bin", [1]) is None
