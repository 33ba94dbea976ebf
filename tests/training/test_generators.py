"""States of generators: captured, written, read and set again."""

import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ckptfix.devices.nested_values import (
    first_difference,
    from_plain,
    plain,
    set_state,
    state_of,
)
from ckptfix.training.resuming.generators import GeneratorStates, capture, generators_in, restore
from ckptfix.training.resuming.worker_states import ReportedBatch, Workers


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
