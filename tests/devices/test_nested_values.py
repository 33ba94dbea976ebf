"""Nested values: plain ones that come back bit for bit, and the first difference of two."""

import io
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import Struct

from ckptfix.devices.nested_values import fingerprint, first_difference, from_plain, leaves, plain


class Record(Struct):
    """A value of the script's: it would come back as a dictionary."""

    number: int


class Kept:
    """An object with a generator, and with itself."""

    def __init__(self) -> None:
        self.noise = np.random.default_rng(3)
        self.me = self


class Slotted:
    """An object without a ``__dict__``."""

    __slots__ = ("unset",)


def written_and_read(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


VALUES = [
    None,
    True,
    2**127 + 1,
    0.1,
    float("inf"),
    "text",
    (1, [2.5, {"a": torch.arange(3)}]),
    np.arange(6, dtype=np.uint32).reshape(2, 3),
    np.array(3.0),
    np.zeros((0, 4), dtype=np.int16),
    {"nested": {0: torch.ones(2, dtype=torch.bfloat16)}},
    np.random.default_rng(3).bit_generator.state,
    np.random.Generator(np.random.Philox(2)).bit_generator.state,
    {1, 2},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_values_come_back_bit_for_bit(value: Any) -> None:
    assert first_difference(value, from_plain(written_and_read(plain(value)))) is None


def test_numbers_of_numpy_and_ordered_dicts_come_back_as_plain_ones() -> None:
    value = OrderedDict(step=np.float64(0.5), losses=deque([1, 2]))
    again = from_plain(written_and_read(plain(value)))
    assert again == {"step": 0.5, "losses": [1, 2]}
    assert first_difference(value, again) is None
    for unknown in (Kept(), Record(1)):
        with pytest.raises(TypeError, match=f"{type(unknown).__name__} cannot be written"):
            plain({"x": unknown})


@pytest.mark.parametrize(
    ("a", "b", "path"),
    [
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}, None),
        ({"x": [1, 2]}, {"x": [1, 3]}, "x.1"),
        (
            {"x": {"exp_avg": torch.zeros(3)}},
            {"x": {"exp_avg": torch.tensor([0.0, -0.0, 0.0])}},
            "x.exp_avg",
        ),
        ({"x": torch.full((2,), float("nan"))}, {"x": torch.full((2,), float("nan"))}, None),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), ""),
        (torch.zeros(2, 1), torch.zeros(1, 2), ""),
        ({"a": 1}, {"a": 1, "b": 2}, "b"),
        ({"a": 1, "b": 2}, {"a": 1}, "b"),
        ([1, 2], (1, 2), ""),
        (1, 1.0, ""),
        (1, True, ""),
        ({"a": 1}, {"a": {"b": 1}}, "a"),
        (Slotted, Kept, ""),
    ],
)
def test_the_first_difference_is_named(a: Any, b: Any, path: str | None) -> None:
    assert first_difference(a, b) == path
    assert (fingerprint(a) == fingerprint(b)) is (path is None)


def test_a_value_that_holds_itself_has_a_fingerprint() -> None:
    holder, other = Kept(), Kept()
    assert fingerprint(holder) == fingerprint(other)
    other.noise.normal()
    assert first_difference(holder, other) == "noise.state.state.state"


def test_leaves_have_the_path_that_leads_to_them() -> None:
    value = {"images": [{"pixels": 1}, (2, None)], 3: {}, "name": "x"}
    assert dict(leaves(value)) == {
        "images[0].pixels": 1, "images[1][0]": 2, "images[1][1]": None, "name": "x",
    }  # fmt: skip
    assert list(leaves(5)) == [("", 5)]
