"""What is sent: random in every bit, the same for the same seed, and finite where it is a
number.
"""

import pytest
import torch

from ckptfix.devices.probe import payload
from ckptfix.devices.probe.cases import FULL, QUICK, REPEATS, Case, Route, exact_size
from ckptfix.devices.probe.payload import Memory
from ckptfix.devices.probe.trials import Landing, _sent


def test_same_seed_same_bytes_and_other_seed_other_bytes() -> None:
    one, again, other = (payload.random_bytes(100_003, seed) for seed in (5, 5, 6))
    assert torch.equal(one, again)
    assert (one != other).float().mean() > 0.99
    assert payload.seed_of(1, "a", 2) == payload.seed_of(1, "a", 2) < 2**63
    assert (
        len(
            {
                payload.seed_of(seed, source, to)
                for seed in range(9)
                for source in range(9)
                for to in range(9)
            }
        )
        == 729
    )


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4097])
def test_every_bit_of_every_byte_varies(size: int) -> None:
    seen_or, seen_and = (
        torch.zeros(size, dtype=torch.uint8),
        torch.full((size,), 255, dtype=torch.uint8),
    )
    for seed in range(64):
        bits = payload.random_bytes(size, seed)
        seen_or |= bits
        seen_and &= bits
    assert bool((seen_or == 255).all()), "a bit that is always 0 hides one that is stuck at 0"
    assert bool((seen_and == 0).all())


@pytest.mark.parametrize("name", [name for name in payload.DTYPES if payload.known(name)])
def test_values_are_what_their_dtype_may_hold(name: str) -> None:
    elements = payload.random_bytes(1 << 16, 3).view(payload.dtype_of(name))
    payload.make_values(elements)
    bits = elements.view(torch.uint8)
    if name == "bool":
        assert set(bits.tolist()) == {0, 1}
    elif (elements.is_floating_point() or elements.is_complex()) and elements.element_size() > 1:
        assert bool(torch.isfinite(elements).all())
    else:
        assert bits.unique().numel() == 256


@pytest.mark.parametrize(
    ("size", "offset"), [(64, 0), (65, 0), (64, 3), (3, 0), ((33 << 20) + 5, 0)]
)
def test_comparing_finds_any_byte(size: int, offset: int) -> None:
    one = payload.random_bytes(size + offset, 1)[offset:]
    other = one.clone()
    assert payload.same(one, other)
    assert bool(payload.compared(one, other))
    for index in {0, size // 2, size - 1}:
        other[index] ^= 1
        assert not payload.same(one, other)
        assert not bool(payload.compared(one, other))
        other[index] ^= 1


@pytest.mark.parametrize(
    "case",
    [
        Case(route=Route.COPY, count=1001),
        Case(route=Route.TO, count=1001),
        Case(route=Route.TRANSPOSED, count=1002),
        Case(route=Route.STRIDED_DESTINATION, count=1001),
        Case(route=Route.STRIDED_DESTINATION, count=1001, dtype="bool"),
        Case(route=Route.STRIDED_SOURCE, count=1001, dtype="float16"),
        Case(route=Route.CONVERTING, count=1001, dtype="bfloat16", source_dtype="float32"),
        Case(route=Route.CONVERTING, count=1001, dtype="bool", source_dtype="int64"),
    ],
    ids=str,
)
def test_a_destination_holds_the_complement_of_what_will_arrive(case: Case) -> None:
    landing = Landing(case=case)
    sent = _sent(landing, 11, Memory())
    before, after = (landing.bytes_of(block).reshape(-1) for block in (sent.before, sent.after))
    assert before.numel() == case.size
    assert torch.equal(before, ~after)
    beside = (sent.before == sent.after).sum()
    assert int(beside) == landing.size - case.size, "what no copy may touch stays as it is"
    landing.view(sent.before).copy_(sent.source.view(landing.view(sent.before).shape))
    assert torch.equal(sent.before, sent.after), (
        "a copy that does what it should makes the one of the other"
    )


def test_plans_hold_what_known_faults_need() -> None:
    for plan in (QUICK, FULL):  # a sample proves nothing that was not proven before
        cases = [case for section in plan.sections for case in section.cases]
        for route in (Route.COPY, Route.STRIDED_SOURCE):
            assert (
                sum(case.route is route and case.size > 2 * 4096 for case in cases)
                >= REPEATS
                == 200
            )
        for by_kernel in (False, True):
            engine = [case for case in cases if (case.route in (Route.CONVERTING,)) is by_kernel]
            assert max(case.size for case in engine) > 32 << 20
        dtypes = {case.dtype for case in cases}
        assert dtypes == {name for name in payload.DTYPES if payload.known(name)}
        assert {case.route for case in cases} == set(Route)
    large = {
        case.size for section in FULL.sections for case in section.cases if case.size >= 64 << 20
    }
    assert large == {64 << 20, (64 << 20) + 13}
    assert QUICK.copies < FULL.copies


def test_sizes_in_words_are_exact() -> None:
    assert exact_size((64 << 20) + 13) == "64.0 MiB + 13 B"
    assert exact_size(64 << 20) == "64.0 MiB"
    assert exact_size(65541) == "64.0 KiB + 5 B"
    assert exact_size(7) == "7 B"
