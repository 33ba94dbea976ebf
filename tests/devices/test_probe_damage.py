"""Kinds of damage, told from bytes alone: no device, simulated or real, is needed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptfix.devices.probe import payload
from ckptfix.devices.probe.payload import Damage, classify
from ckptfix.devices.probe.probe_report import Kind

SIZES = [4096 * 3 + 5, 65541, (1 << 20) + 1]


def sent_of(size: int, seed: int = 1) -> Any:
    return payload.random_bytes(size, seed)


def zeros(sent: Any) -> Any:
    return torch.zeros_like(sent)


def unwritten(sent: Any) -> Any:
    return ~sent


def second_half_missing(sent: Any) -> Any:
    arrived = ~sent
    arrived[: sent.numel() // 2] = sent[: sent.numel() // 2]
    return arrived


def second_half_zero(sent: Any) -> Any:
    arrived = sent.clone()
    arrived[sent.numel() // 2 :] = 0
    return arrived


def every_second_page_missing(sent: Any) -> Any:
    arrived = sent.clone()
    for start in range(4096, sent.numel(), 2 * 4096):
        arrived[start : start + 4096] = ~sent[start : start + 4096]
    return arrived


def every_second_page_zero(sent: Any) -> Any:
    arrived = sent.clone()
    for start in range(4096, sent.numel(), 2 * 4096):
        arrived[start : start + 4096] = 0
    return arrived


def bit_flip(sent: Any) -> Any:
    arrived = sent.clone()
    arrived[sent.numel() // 3] ^= 0x10
    return arrived


def shifted_on(sent: Any) -> Any:
    arrived = ~sent
    arrived[16:] = sent[:-16]
    return arrived


def shifted_back(sent: Any) -> Any:
    arrived = ~sent
    arrived[:-4096] = sent[4096:]
    return arrived


def swapped(sent: Any) -> Any:
    size, half = sent.numel(), sent.numel() // 2
    return torch.cat((sent[size - half :], sent[half : size - half], sent[:half]))


def garbage(sent: Any) -> Any:
    return payload.random_bytes(sent.numel(), 99)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (zeros, Kind.ZEROS),
        (unwritten, Kind.UNWRITTEN),
        (second_half_missing, Kind.PARTIAL),
        (second_half_zero, Kind.PARTIAL),
        (every_second_page_missing, Kind.HOLES),
        (every_second_page_zero, Kind.HOLES),
        (bit_flip, Kind.BIT_FLIP),
        (shifted_on, Kind.SHIFT),
        (shifted_back, Kind.SHIFT),
        (swapped, Kind.SWAP),
        (garbage, Kind.GARBAGE),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "value", None)),
)
def test_kinds_are_told_apart(damage: Callable[[Any], Any], kind: Kind, size: int) -> None:
    sent = sent_of(size)
    arrived = damage(sent)
    found = classify(arrived, sent, held=~sent, earlier=(sent_of(70001, 2),))
    assert found is not None
    assert found.kind is kind
    wrong = (arrived != sent).nonzero().flatten()
    assert found.first_offset == int(wrong[0])
    assert found.wrong_bytes == wrong.numel()


def test_equal_bytes_are_no_damage() -> None:
    sent = sent_of(4097)
    assert classify(sent.clone(), sent, held=~sent) is None


@pytest.mark.parametrize(("size", "before"), [(5000, 12000), (12000, 5000), (64, 64)])
def test_an_earlier_payload_is_known_again_whole_or_repeated(size: int, before: int) -> None:
    sent, earlier = sent_of(size), sent_of(before, 7)
    arrived = earlier.repeat(size // before + 1)[:size]
    found = classify(arrived, sent, held=~sent, earlier=(sent_of(9000, 3), earlier))
    assert found is not None
    assert found.kind is Kind.STALE


def test_without_knowing_what_was_held_nothing_is_called_not_written() -> None:
    sent = sent_of(4096)
    found = classify(~sent, sent)
    assert found is not None
    assert found.kind is Kind.GARBAGE


@pytest.mark.parametrize("size", range(1, 20))
@pytest.mark.parametrize(
    "damage", [zeros, unwritten, second_half_missing, bit_flip, swapped, garbage]
)
def test_small_payloads_are_judged_without_an_error(
    size: int, damage: Callable[[Any], Any]
) -> None:
    for seed in range(20):
        sent = sent_of(size, seed)
        arrived = damage(sent)
        found = classify(arrived, sent, held=~sent, earlier=(sent_of(size, seed + 100),))
        assert (found is None) == bool(torch.equal(arrived, sent))


def test_one_changed_byte_in_64_mib_is_found_where_it_is() -> None:
    sent = sent_of(64 << 20)
    arrived = sent.clone()
    arrived[54_321_987] ^= 1
    assert classify(arrived, sent, held=~sent) == Damage(
        kind=Kind.BIT_FLIP, first_offset=54_321_987, wrong_bytes=1
    )
