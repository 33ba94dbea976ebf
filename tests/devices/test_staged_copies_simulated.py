"""Copies by way of the host on simulated devices whose direct ways are all broken: bits, strides,
kinds of tensor.
"""

import re
import threading
from collections.abc import Iterator
from itertools import permutations

import pytest
import torch

from ckptfix.devices import staged_copies
from ckptfix.devices.staged_copies import (
    PIECE,
    PIPELINED_FROM,
    Queue,
    release_slots,
    staged_copy,
)
from tests.simulated.simulator import Simulator

pytestmark = pytest.mark.simulated(3)

SMALL, LARGE = 1000, PIPELINED_FROM + 12


@pytest.fixture(autouse=True)
def broken(simulator: Simulator) -> Iterator[None]:
    """Every direct copy would show, and none may be left over."""
    for pair in permutations(range(3), 2):
        simulator.fault(*pair, "bitflip")
    yield
    assert simulator.count() == 0
    release_slots()


def same_bits(found: torch.Tensor, right: torch.Tensor) -> bool:
    assert found.dtype == right.dtype
    assert found.shape == right.shape
    flat = [
        tensor.resolve_conj().resolve_neg().contiguous().view(-1)
        for tensor in (found.cpu(), right.cpu())
    ]
    return bool(torch.equal(*(tensor.view(torch.uint8) for tensor in flat)))


def bits(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        7,
        PIPELINED_FROM - 1,
        PIPELINED_FROM,
        PIECE - 1,
        PIECE,
        PIECE + 1,
        2 * PIECE,
        5 * PIECE + 3,
    ],
)
def test_every_size_arrives(size: int) -> None:
    payload = bits(size)
    there = torch.full_like(payload, 7, device="cuda:1")
    staged_copy(there, payload.to("cuda:0"))
    assert same_bits(there, payload)


DTYPES = sorted(
    {
        dtype
        for name, dtype in vars(torch).items()
        if isinstance(dtype, torch.dtype)
        and re.fullmatch(r"(bfloat|float|u?int)(8(_\w+)?|16|32|64)", name)
    },
    key=str,
)


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.complex128, *DTYPES], ids=str)
def test_every_dtype_arrives_bit_for_bit(dtype: torch.dtype, size: int) -> None:
    count = size // 16 * 16
    payload = bits(count) % 2 if dtype is torch.bool else bits(count)
    payload = payload.view(dtype)
    here = payload.to("cuda:2")
    there = torch.empty_like(here, device="cuda:0")
    staged_copy(there, here)
    assert same_bits(there, payload)


LAYOUTS = {
    "transposed": lambda base: base.t(),
    "strided": lambda base: base[:, ::2],
    "offset": lambda base: base[3:, 5:],
    "dense behind an offset": lambda base: base[3:],
    "expanded": lambda base: base[:1].expand(base.shape[0], -1),
    "channels last": (
        lambda base: base.view(4, 8, -1, 16).contiguous(memory_format=torch.channels_last)
    ),
    "permuted": lambda base: base.view(4, 8, -1, 16).permute(2, 0, 3, 1),
    "one element wide": lambda base: base.view(-1, 1)[::1],
    "no dimensions": lambda base: base[0, 0],
}


@pytest.mark.parametrize("rows", [64, 2048], ids=["small", "pipelined"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_arrives_with_the_strides_of_to(
    simulator: Simulator, layout: str, rows: int
) -> None:
    base = torch.randn(rows, 256, device="cuda:0")
    source = LAYOUTS[layout](base)
    expected = source.cpu()
    simulator.clear()  # torch's own strides, from a direct copy
    strides = source.to("cuda:1").stride()
    simulator.clear()
    there = torch.empty_like(source, device="cuda:1")
    staged_copy(there, source)
    assert there.stride() == strides
    assert same_bits(there, expected)


@pytest.mark.parametrize("rows", [64, 2048], ids=["small", "pipelined"])
def test_what_copy_does_beyond_bytes(rows: int) -> None:
    host = torch.randn(rows, 256) * 1000
    source = host.to("cuda:0")
    converted = torch.zeros(rows, 256, dtype=torch.int32, device="cuda:1")
    staged_copy(converted, source)
    assert same_bits(converted, host.to(torch.int32))
    turned = torch.zeros(256, rows, device="cuda:1")
    staged_copy(turned.t(), source)
    assert same_bits(turned, host.t().contiguous())
    wide = torch.zeros(3, rows, 256, device="cuda:1")
    staged_copy(wide, source)
    assert same_bits(wide, host.expand(3, -1, -1).contiguous())
    part = torch.zeros(rows, 512, device="cuda:1")
    staged_copy(part[:, ::2], source)
    assert same_bits(part[:, ::2], host)
    assert not part[:, 1::2].any()
    with pytest.raises(RuntimeError, match=r"must match|expand"):
        staged_copy(torch.zeros(5, 7, device="cuda:1"), source)


@pytest.mark.parametrize("rows", [64, 2048], ids=["small", "pipelined"])
def test_lazy_conjugates_and_negatives(rows: int) -> None:
    host = torch.randn(rows, 256, dtype=torch.complex64)
    for lazy in (
        host.to("cuda:0").conj(),
        host.to("cuda:0").conj().imag,
        host.to("cuda:0").mT.conj(),
    ):
        assert lazy.is_conj() or lazy.is_neg()
        there = torch.empty(lazy.shape, dtype=lazy.dtype, device="cuda:1")
        staged_copy(there, lazy)
        assert same_bits(there, lazy.cpu().resolve_conj().resolve_neg())
    into, as_torch_does = torch.zeros(2, rows, 256, dtype=torch.complex64, device="cuda:1")
    staged_copy(into.conj(), host.to("cuda:0"))
    as_torch_does.conj().copy_(host.to("cuda:1"))
    assert same_bits(into, as_torch_does)


def test_two_slots_of_pinned_memory_for_each_pair_that_copied() -> None:
    assert not staged_copies._rings
    for _ in range(3):
        staged_copy(
            torch.empty(3 * PIECE, dtype=torch.uint8, device="cuda:1"),
            bits(3 * PIECE).to("cuda:0"),
        )
    assert {pair: ring.memory.shape for pair, ring in staged_copies._rings.items()} == {
        (0, 1): (2, PIECE)
    }
    release_slots()
    assert not staged_copies._rings


def test_without_pinned_memory_it_still_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(staged_copies, "_Ring", refuse)
    payload = bits(PIECE + 1)
    there = torch.empty_like(payload, device="cuda:1")
    staged_copy(there, payload.to("cuda:0"))
    assert same_bits(there, payload)


def test_a_torch_without_streams_for_every_accelerator_copies_piece_by_piece(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch, "accelerator")
    payload = bits(PIECE + 1)
    there = torch.empty_like(payload, device="cuda:1")
    staged_copy(there, payload.to("cuda:0"))
    assert same_bits(there, payload)
    assert not staged_copies._rings


def test_the_current_streams_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated streams run at once, so what is on which of them shows only here."""
    recorded = []

    class Event:
        def __init__(self, where: torch.device) -> None:
            self.where = where

        def record(self, stream: torch.Stream) -> None:
            recorded.append((self.where.index, stream))

    monkeypatch.setattr(torch, "Event", Event)
    before = torch.accelerator.current_stream(1)
    side = torch.Stream("cuda:1")
    torch.accelerator.set_stream(side)
    try:
        source, there = torch.zeros(4, device="cuda:0"), torch.zeros(4, device="cuda:1")
        engine = staged_copies._Streams(torch.empty(2, 16), there, source)
        engine.mark(Queue.SOURCE)
        engine.mark(Queue.DESTINATION)
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(0)
    assert recorded == [(0, torch.accelerator.current_stream(0)), (1, side)]
    assert side != before


def test_slots_of_an_interrupted_copy_are_never_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = torch.empty(3 * PIECE, dtype=torch.uint8, device="cuda:1")
    source = bits(3 * PIECE).to("cuda:0")
    staged_copy(there, source)
    before = staged_copies._rings[0, 1]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(staged_copies._Streams, "to_device", interrupt)
        with pytest.raises(KeyboardInterrupt):
            staged_copy(there, source)
    assert (0, 1) not in staged_copies._rings
    staged_copy(there, source)
    assert staged_copies._rings[0, 1] is not before
    assert not staged_copies._rings[0, 1].lock.locked()


def on_the_host(simulator: Simulator) -> list[tuple[int, str]]:
    """Return bytes and dtype of each copy to the host and from it."""
    return [(copy.bytes, copy.dtype) for copies in simulator.host_log().values() for copy in copies]


def test_a_thread_that_finds_the_slots_taken_neither_waits_nor_takes_host_memory_for_all(
    simulator: Simulator,
) -> None:
    payload = bits(3 * PIECE + 1)
    source = payload.to("cuda:0")
    staged_copy(torch.empty_like(payload, device="cuda:1"), source)
    there = torch.empty_like(payload, device="cuda:1")
    simulator.clear_log()
    with staged_copies._rings[0, 1].lock:
        staged_copy(there, source)
    assert max(on_the_host(simulator)) == (
        PIECE,
        "uint8",
    ), "0.4.0 took pageable memory of any size"
    assert same_bits(there, payload)
    strided = torch.zeros(2, payload.numel(), dtype=torch.uint8, device="cuda:1").t()
    with staged_copies._rings[0, 1].lock:
        staged_copy(strided[:, 0], source)
    assert same_bits(strided[:, 0], payload)
    assert not strided[:, 1].any()


@pytest.mark.parametrize("count", [100, LARGE], ids=["small", "pipelined"])
@pytest.mark.parametrize(
    "dtypes", [("float32", "int32"), ("float64", "bfloat16"), ("bfloat16", "float32")]
)
def test_the_source_device_converts_whatever_the_size(
    simulator: Simulator, dtypes: tuple[str, str], count: int
) -> None:
    """CPU and GPU convert NaN and values out of range differently: one rule, which is that of
    torch's own copy.
    """
    source_dtype, dtype = (getattr(torch, name) for name in dtypes)
    host = torch.randn(count).to(source_dtype) * 100
    source, there = host.to("cuda:0"), torch.zeros(count, dtype=dtype, device="cuda:1")
    simulator.clear_log()
    staged_copy(there, source)
    assert {name for _, name in on_the_host(simulator)} <= {dtypes[1], "uint8"}
    assert same_bits(there, host.to(dtype))


REPEATING = {
    "expanded": lambda base: base[:1].expand(2048, -1),
    "expanded over strides": lambda base: base[:1, ::2].expand(2048, -1),
    "expanded inside": lambda base: base[:, :1].expand(-1, 4096),
    "overlapping windows": lambda base: base.view(-1).unfold(0, 4096, 3),
    "expanded conjugate": lambda base: torch.complex(base, base).conj()[:1].expand(2048, -1),
}


@pytest.mark.parametrize("layout", REPEATING)
def test_what_repeats_its_memory_crosses_once(simulator: Simulator, layout: str) -> None:
    base = torch.randn(64, 256, device="cuda:0")
    source = REPEATING[layout](base)
    expected = source.cpu().resolve_conj()
    there = torch.zeros(source.shape, dtype=source.dtype, device="cuda:1")
    other = torch.zeros(source.shape, dtype=torch.complex128, device="cuda:1")
    simulator.clear_log()
    staged_copy(there, source)
    assert max(on_the_host(simulator))[0] <= 2 * base.nbytes < source.nbytes // 4
    assert same_bits(there, expected)
    staged_copy(other, source)
    assert same_bits(other, expected.to(torch.complex128))


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_is_laid_out_on_the_destination_in_the_end_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A consumer may wait for the source's stream alone, as torch's own copy lets it."""
    waited = []
    wait_for_mark, wait = staged_copies._Streams.wait, staged_copies._wait_for

    def reached(self: staged_copies._Streams, mark: torch.Event) -> None:
        waited.append(mark)
        wait_for_mark(self, mark)

    def awaited(where: torch.device) -> None:
        waited.append(where)
        wait(where)

    monkeypatch.setattr(staged_copies._Streams, "wait", reached)
    monkeypatch.setattr(staged_copies, "_wait_for", awaited)
    there = torch.zeros(size, 2, dtype=torch.uint8, device="cuda:1")
    staged_copy(there[:, 0], bits(size).to("cuda:0"))
    assert waited
    assert same_bits(there[:, 0], there[:, 0].cpu())


def test_many_threads_at_once() -> None:
    wrong: list[int] = []

    def copy(number: int) -> None:
        payload = bits(2 * PIECE + number)
        for _ in range(4):
            there = torch.empty_like(payload, device="cuda:1")
            staged_copy(there, payload.to("cuda:0"))
            if not same_bits(there, payload):
                wrong.append(number)

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
