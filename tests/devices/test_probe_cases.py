"""The plan of the probe, and the bytes of its copies. No device is needed."""

from collections import Counter

import pytest
import torch

from ckptfix.devices.probe.cases import BATCHES, LARGE, PLAN, REPEATS, Case, Route, exact_size
from ckptfix.devices.probe.trials import Kind, Row, _count_wrong, _judged, _laid_out, landing

PAIR = (0, 1)


def test_the_plan_finds_a_fault_of_one_percent_with_99_percent() -> None:
    assert 1 - (1 - 0.01) ** REPEATS >= 0.99
    made = Counter(case.kind for case in PLAN)
    assert min(made["small dense"], made["small strided or converting"]) >= REPEATS
    assert {case.route for case in PLAN} == set(Route)
    large = {(case.kind, case.dtype) for case in PLAN if case.size >= LARGE}
    assert len(large) == 8, "four dtypes by both engines"
    for kind in ("large dense", "large strided or converting"):
        assert any(case.size > 64 << 20 for case in PLAN if case.kind == kind)


@pytest.mark.parametrize("engine", [Route.COPY, Route.STRIDED_SOURCE])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "bfloat16"])
def test_a_fault_of_every_150th_copy_of_one_dtype_by_one_engine_is_met(
    engine: Route, dtype: str
) -> None:
    assert sum((case.route, case.dtype) == (engine, dtype) for case in PLAN) >= 150


def test_batches_are_the_plan_in_its_order() -> None:
    assert tuple(case for batch in BATCHES for case in batch) == PLAN
    assert all(len(batch) == 1 for batch in BATCHES if batch[0].size >= LARGE)
    assert max(sum(case.slot for case in batch) for batch in BATCHES if len(batch) > 1) <= 3 << 20


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("dtype", ["uint8", "float32", "bfloat16", "float16", "int64"])
def test_a_copy_writes_all_of_its_landing_and_poison_is_its_complement(
    route: Route, dtype: str
) -> None:
    if route is Route.CONVERTING and dtype != "uint8":
        return
    case = Case(route=route, count=999, dtype=dtype)
    row = Row(1, 1 << 16)
    block = row.complement[: case.slot].clone()
    untouched = torch.ones(case.slot, dtype=torch.bool)
    landing(case, untouched.view(torch.uint8)).zero_()
    landing(case, block).copy_(_laid_out(case, landing(case, row.bytes)))
    changed = block == row.bytes[: case.slot]
    assert torch.equal(changed, ~untouched), "each byte of the payload was wrong before"
    assert int(changed.sum()) == case.size
    assert torch.isfinite(landing(case, row.bytes).double()).all()


def test_another_seed_is_another_row() -> None:
    one, again, two = (Row(seed, 1 << 16).bytes for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert int((one != two).sum()) > one.numel() // 2


@pytest.mark.parametrize("size", [1, 7, 8, 9, 4096, 65541])
@pytest.mark.parametrize("offset", [0, 1, -1])
def test_comparing_counts_any_byte(size: int, offset: int) -> None:
    sent = torch.zeros(size, dtype=torch.uint8)
    arrived = sent.clone()
    assert _count_wrong(arrived, sent) == 0
    arrived[offset if size > 1 else 0] ^= 1
    assert _count_wrong(arrived, sent) == 1


def test_four_kinds_of_damage() -> None:
    row = Row(1, 1 << 16)
    sent, poison = row.bytes[:5000], row.complement[:5000]

    def judged(arrived: torch.Tensor, in_time: bool = True) -> tuple[Kind, int | None] | None:
        failure = _judged(PAIR, "copy", arrived, sent, poison, in_time)
        return None if failure is None else (failure.kind, failure.first_offset)

    half = torch.cat((sent[:2500], poison[2500:]))
    assert judged(sent.clone()) is None
    assert judged(sent.clone(), in_time=False) == (Kind.LATE, None)
    assert judged(torch.zeros_like(sent)) == (Kind.ZEROS, int((sent != 0).to(torch.uint8).argmax()))
    assert judged(poison.clone()) == (Kind.UNWRITTEN, 0)
    assert judged(half, in_time=False) == (Kind.UNWRITTEN, 2500)
    assert judged(sent.roll(16)) == (Kind.OTHER, 0)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (13, "13 B"),
        (1024, "1.0 KiB"),
        (4 * 4096 + 5, "16.0 KiB + 5 B"),
        ((64 << 20) + 13, "64.0 MiB + 13 B"),
    ],
)
def test_sizes_in_words_are_exact(size: int, words: str) -> None:
    assert exact_size(size) == words
