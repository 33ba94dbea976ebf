"""States of generators: captured, written, read and set again; and the first difference of two
states.
"""

import io
import random
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import Struct
from torch.utils.data import DataLoader

from ckptfix.training.resuming.generators import (
    GeneratorStates,
    capture,
    fingerprint,
    first_difference,
    from_plain,
    generators_in,
    plain,
    restore,
    set_state,
    state_of,
)
from ckptfix.training.resuming.worker_states import ReportedBatch, Workers


class Record(Struct):
    """A value of the script's: it would come back as a dictionary."""

    number: int


def written_and_read(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def draws() -> tuple[float, float, float, float]:
    return random.gauss(0, 1), random.random(), float(np.random.normal()), float(torch.rand(1))


def test_global_generators_go_on_where_they_were() -> None:
    before = capture()
    random.gauss(0, 1)
    np.random.normal()  # each keeps a second normal number for the next call
    states = capture()
    expected = draws()
    assert draws() != expected
    restore(GeneratorStates.from_plain(written_and_read(states.as_plain())))
    assert draws() == expected
    restore(before)
    assert first_difference(before, capture()) is None


def test_the_generators_of_workers_are_those_before_the_next_batch() -> None:
    """Workers have made batches that the script has not got."""
    base, workers = DataLoader(list(range(12)), num_workers=2), Workers()
    with workers.reporting(base, 0, 1, states=None):
        pass
    for number in range(6):
        workers.unwrap(ReportedBatch(None, {"worker": number % 2, "after": number}), number)
    for number, expected in ((4, {0: 2, 1: 3}), (5, {0: 4, 1: 3}), (6, {0: 4, 1: 5})):
        states = workers.within(base, number)
        assert states is not None
        assert {worker: told["after"] for worker, told in states.states.items()} == expected


def test_what_is_not_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match="random number generators"):
        GeneratorStates.from_plain({"python": (3,)})


class Wrapped:
    def __init__(self) -> None:
        self.noise = np.random.default_rng(3)
        self.items = list(range(10_000))


class Slotted:
    __slots__ = ("old", "unset")

    def __init__(self) -> None:
        self.old = np.random.RandomState(5)


class Holder:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)
        self.dataset = Wrapped()
        self.transforms: list[Any] = [Slotted(), {"flip": random.Random(4)}]
        self.again = self.generator
        self.system = random.SystemRandom()
        self.me = self


def test_generators_of_a_dataset_and_of_what_it_wraps_are_found() -> None:
    holder = Holder()
    slotted, flipping = holder.transforms[0], holder.transforms[1]["flip"]
    found = dict(generators_in(holder))
    assert set(found) == {"generator", "dataset.noise", "transforms.0.old", "transforms.1.flip"}
    states = {path: plain(state_of(one)) for path, one in found.items()}

    def draw() -> tuple[float, ...]:
        return (
            float(torch.rand(1, generator=holder.generator)),
            float(holder.dataset.noise.normal()),
            float(slotted.old.normal()),
            flipping.random(),
        )

    expected = draw()
    for path, state in written_and_read(states).items():
        set_state(found[path], from_plain(state))
    assert draw() == expected


def test_the_search_for_generators_is_bounded() -> None:
    deep: Any = random.Random(1)
    for _ in range(50):
        deep = [deep]
    assert generators_in(deep) == []
    many = [[Wrapped() for _ in range(60)] for _ in range(60)]
    assert 0 < len(generators_in(many)) <= 400
    assert generators_in(None) == generators_in(3) == []


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
    for unknown in (Holder(), Record(1)):
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
        (Slotted, Holder, ""),
    ],
)
def test_the_first_difference_is_named(a: Any, b: Any, path: str | None) -> None:
    assert first_difference(a, b) == path
    assert (fingerprint(a) == fingerprint(b)) is (path is None)


def test_a_value_that_holds_itself_has_a_fingerprint() -> None:
    holder, other = Holder(), Holder()
    assert fingerprint(holder) == fingerprint(other)
    other.dataset.noise.normal()
    assert first_difference(holder, other) == "dataset.noise.state.state.state"
