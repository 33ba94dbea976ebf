"""What a forward pass returned: every tensor is found, and nothing is proven of none."""

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix.devices.reload.outputs import (
    deviation,
    equal_bits,
    is_empty,
    output_tensors,
    tensors_in,
)
from ckptfix.devices.reload.reload_report import Outcome, Subject
from ckptfix.devices.reload.verifying import verify_reload
from ckptfix.devices.torch_devices import device_count
from tests.devices import reload_models as models
from tests.devices.reload_models import Head, eights, save_model
from tests.devices.test_reload import outcomes, text_of


@pytest.mark.skipif(
    device_count() > 0, reason="these say what a machine without accelerator proves"
)
def test_an_output_without_a_tensor_proves_nothing(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "checkpoint", Head())
    report = verify_reload(folder, model=lambda: (models.Empty(), eights()))
    assert report.status == 0, str(report)
    assert outcomes(report, Subject.OUTPUTS) == [Outcome.NOT_EXERCISED]
    assert "returns no tensor with elements" in text_of(
        report, Subject.OUTPUTS, Outcome.NOT_EXERCISED
    )


class Result:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def test_tensors_are_found_in_objects_of_any_class() -> None:
    inner = Result(deep=torch.ones(1))
    inner.itself = inner  # type: ignore[attr-defined]
    found = {place for place, _ in tensors_in(Result(logits=torch.ones(2), more=[inner], name="x"))}
    assert found == {"output.logits", "output.more[0].deep"}
    assert list(tensors_in(Result(model=torch.nn.Linear(2, 2), kind=Result, inputs=torch))) == []


def test_nothing_and_empty_tensors_are_empty() -> None:
    assert is_empty({})
    assert is_empty(output_tensors([torch.ones(0), "text", 3]))
    assert not is_empty(output_tensors(torch.ones(1)))


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "conjugated": lambda: torch.tensor([1 + 2j]).conj(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says of each that it is new or going
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_other_layouts_are_compared_by_their_parts(layout: str) -> None:
    one, other = output_tensors(LAYOUTS[layout]()), output_tensors(LAYOUTS[layout]())
    assert not is_empty(one)
    assert equal_bits(one, other)
    place = list(other)[-1]
    other[place] = torch.zeros_like(other[place])
    assert not equal_bits(one, other)
    assert deviation(one, other).difference > 0


@pytest.mark.parametrize(
    ("left", "right", "is_equal"),
    [("nan", "2", False), ("nan", "inf", False), ("inf", "-inf", False), ("nan", "nan", True)],
)
def test_what_is_not_finite_is_far_from_all_but_itself(
    left: str, right: str, is_equal: bool
) -> None:
    near, far = torch.tensor([1.0, float(left)]), torch.tensor([1 + 1e-6, float(right)])
    assert deviation({"a": near}, {"a": far}).is_within is is_equal


def test_complex_outputs_have_a_distance() -> None:
    one = torch.tensor([1 + 2j])
    assert deviation({"a": one}, {"a": one * (1 + 1e-6)}).is_within
    assert not deviation({"a": one}, {"a": one * 2}).is_within
    assert deviation({"a": one}, {"a": one.to(torch.complex128)}).difference == inf
