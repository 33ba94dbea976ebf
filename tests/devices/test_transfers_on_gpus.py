"""Safe transfers on real GPUs. One GPU: the pipeline's own streams, events and pinned memory. Two:
the whole.

On one GPU a copy cannot leave it: the pipeline then goes from the device to itself, each half on a
stream of its own.
"""

import threading
import timeit
from contextlib import suppress
from itertools import permutations
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

from ckptfix.devices import staged_copies
from ckptfix.devices.dispatching import dispatch_model, remove_safe_transfers
from ckptfix.devices.interception import Override
from ckptfix.devices.routing import TransferError, bypassed
from ckptfix.devices.staged_copies import PIECE, staged_copy
from ckptfix.devices.torch_devices import device, device_count, device_type, ordered_pairs
from ckptfix.devices.transfers import acquire, release, safe_transfers
from tests.devices.one_device import RoundTrip
from tests.simulated.simulator import running

REAL = 0 if running() is not None else device_count()
one = pytest.mark.skipif(REAL < 1, reason=f"{REAL} real accelerators here, 1 is needed")
two = pytest.mark.skipif(REAL < 2, reason=f"{REAL} real accelerators here, 2 are needed")

SIZES = (1, 4097, staged_copies.PIPELINED_FROM, PIECE, 3 * PIECE + 5)


def bits(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


# ---- one GPU


@one
@pytest.mark.parametrize("size", SIZES)
def test_the_pipeline_from_a_device_to_itself(size: int) -> None:
    payload = bits(size)
    source = payload.to(device(0))
    trip = RoundTrip(device(0))
    for _ in range(5):
        there = torch.zeros_like(source)
        trip.copy(there, source)
        assert torch.equal(there.cpu(), payload)


@one
def test_slots_are_pinned() -> None:
    assert staged_copies._Ring().memory.is_pinned()


@one
def test_the_pipeline_keeps_the_order_of_its_streams() -> None:
    """A producer that takes its time is waited for, and the source may be overwritten right behind
    the copy.
    """
    size = 4 * PIECE
    trip = RoundTrip(device(0))
    busy = torch.randn(2048, 2048, device=device(0))
    for value in range(1, 20):
        source = torch.zeros(size, dtype=torch.uint8, device=device(0))
        there = torch.full_like(source, 255)
        for _ in range(20):
            busy = busy @ busy * 1e-3
        source.fill_(value)
        trip.copy(there, source)
        source.fill_(200)
        found = there.clone()
        there.fill_(100)
        assert bool((found == value).all())


@one
def test_the_override_is_asked_for_nothing_on_one_device() -> None:
    asked: list[Any] = []

    def ask(*arguments: Any) -> bool:
        asked.append(arguments)
        return False

    override = Override(ask)
    try:
        here = torch.arange(10, device=device(0))
        assert torch.equal(here.clone().cpu(), torch.arange(10))
        assert here.to(torch.float32).sum() == 45
    finally:
        override.remove()
    assert not asked
    assert torch.equal(here.clone().cpu(), torch.arange(10))


@one
def test_a_kernel_of_its_own_is_the_only_trace() -> None:
    name = torch._C._dispatch_key_for_device(device_type())
    before = repr(torch.library.get_kernel("aten::copy_", name))
    override = Override(lambda *_: False)
    assert repr(torch.library.get_kernel("aten::copy_", name)) != before
    override.remove()
    assert repr(torch.library.get_kernel("aten::copy_", name)) == before


@one
def test_lazy_conjugates_as_destination() -> None:
    host = torch.randn(1000, dtype=torch.complex64)
    into = torch.zeros(1000, dtype=torch.complex64, device=device(0))
    into.conj().copy_(host)
    assert torch.equal(into.cpu(), host.conj().resolve_conj())


@one
def test_a_consumer_on_the_sources_stream_finds_the_copy_complete() -> None:
    """torch's own copy orders both current streams, and a program may wait for the source's
    alone.
    """
    size = 4 * PIECE
    trip = RoundTrip(device(0))
    before = torch.accelerator.current_stream()
    for value in range(1, 20):
        source = torch.full((size,), value, dtype=torch.uint8, device=device(0))
        there = torch.full_like(source, 255)
        trip.copy(there, source, join=False)
        torch.accelerator.set_stream(trip.side)
        try:
            found = there == value
        finally:
            torch.accelerator.set_stream(before)
        trip.side.synchronize()
        assert bool(found.all())


@one
@pytest.mark.parametrize("count", [1000, 1 << 20], ids=["small", "pipelined"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64, torch.float16], ids=str)
def test_what_is_sent_is_converted_on_the_device(dtype: torch.dtype, count: int) -> None:
    """Not on the CPU, which makes other integers of NaN, infinity and values out of range."""
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e9, -3e9, 300.5, -7.5, 1e30])
    source = odd.repeat(count // 8).to(device(0))
    sent = staged_copies._sendable(source, dtype)
    assert sent.device == source.device
    assert torch.equal(sent.view(torch.uint8), source.to(dtype).view(torch.uint8))


@one
def test_copies_on_one_device_pay_little() -> None:
    """Measured, and bounded generously: the interpreter alone costs 1 to 2 us."""
    one_end, other = torch.ones(4, device=device(0)), torch.zeros(4, device=device(0))

    def seconds() -> float:
        return min(timeit.repeat(lambda: other.copy_(one_end), number=2000, repeat=5)) / 2000

    before = seconds()
    override = Override(lambda *_: False)
    try:
        assert seconds() - before < 20e-6
    finally:
        override.remove()


# ---- two GPUs


@two
@pytest.mark.parametrize("count", [1000, 1 << 20], ids=["small", "pipelined"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64, torch.float16], ids=str)
def test_conversions_are_those_of_a_direct_copy(dtype: torch.dtype, count: int) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e9, -3e9, 300.5, -7.5, 1e30])
    source = odd.repeat(count // 8).to(device(0))
    staged = torch.zeros(source.numel(), dtype=dtype, device=device(1))
    staged_copy(staged, source)
    assert torch.equal(staged.cpu().view(torch.uint8), source.to(dtype).cpu().view(torch.uint8))


@two
def test_an_expanded_source_is_not_made_on_its_device() -> None:
    source = torch.arange(256.0, device=device(0)).expand(1 << 20, 256)  # 1 GiB if it were made
    there = torch.empty(1 << 20, 256, device=device(1))
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.max_memory_allocated(0)
    staged_copy(there, source)
    assert torch.cuda.max_memory_allocated(0) - before < 1 << 20
    assert bool((there == there[0]).all())
    assert torch.equal(there[0].cpu(), torch.arange(256.0))


@two
def test_threads_on_one_pair_arrive_and_take_bounded_host_memory() -> None:
    payloads = [bits(3 * PIECE + number) for number in range(4)]
    found: dict[int, torch.Tensor] = {}

    def copy(number: int) -> None:
        there = torch.zeros_like(payloads[number], device=device(1))
        staged_copy(there, payloads[number].to(device(0)))
        found[number] = there.cpu()

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert all(torch.equal(found[number], payload) for number, payload in enumerate(payloads))


@two
def test_a_strided_copy_is_counted_once_with_and_without_peer_access() -> None:
    held = acquire("always", holder="a test")
    try:
        with bypassed():
            before = held.counters()[0, 1].direct
            torch.zeros(64, 64, device=device(1))[:, ::2].copy_(
                torch.ones(64, 64, device=device(0))[:, ::2]
            )
        assert held.counters()[0, 1].direct == before + 1
    finally:
        release(held)


@two
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pair", ordered_pairs(REAL) or ((0, 1),))
def test_staged_copies_arrive(pair: tuple[int, int], size: int) -> None:
    payload = bits(size)
    source = payload.to(device(pair[0]))
    there = torch.zeros_like(payload, device=device(pair[1]))
    staged_copy(there, source)
    assert torch.equal(there.cpu(), payload)


@two
def test_nothing_goes_directly() -> None:
    with safe_transfers("always") as held:
        payload = bits(3 * PIECE)
        for source, destination in permutations(range(REAL), 2):
            there = payload.to(device(source)).to(device(destination))
            assert torch.equal(there.cpu(), payload)
        small, large = torch.zeros(3, device=device(1)), torch.zeros(PIECE, device=device(1))
        torch._foreach_copy_(
            [small, large], [torch.ones(3, device=device(0)), torch.ones(PIECE, device=device(0))]
        )
        assert small.sum() == 3
        assert large.sum() == PIECE
        counted = held.counters()
    assert all(count.staged > 0 and count.direct == 0 for count in counted.values())


@two
def test_a_split_model_with_side_streams() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    batch = torch.randn(1024, 512)
    right = accelerate.dispatch_model(layers, {"": 0}, force_hooks=True)(batch).cpu()
    accelerate.hooks.remove_hook_from_module(layers, recurse=True)
    held = acquire("never", holder="a test")
    model = dispatch_model(
        layers, {str(number): number % 2 for number in range(6)}, safe_transfers="always"
    )
    stream = torch.cuda.Stream(0) if device_type() == "cuda" else None
    if stream is not None:
        with torch.cuda.stream(stream):
            torch.testing.assert_close(model(batch).cpu(), right)
    out = model(batch)
    torch.testing.assert_close(out.cpu(), right)
    out.sum().backward()
    assert held.counters()[1, 0].staged > 0
    assert sum(count.direct for count in held.counters().values()) == 0
    remove_safe_transfers(model)


@two
@pytest.mark.skipif(device_type() != "cuda", reason="CUDA graphs are CUDA's")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_inside_of_a_graph_capture_it_raises() -> None:
    source = torch.ones(4, device=device(0))
    there = torch.zeros(4, device=device(1))
    held = acquire("always", holder="a test")
    try:
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(TransferError, match="graph capture"), torch.cuda.graph(graph):
            there.copy_(source)
    finally:
        release(held)


@two
@pytest.mark.skipif(device_type() != "cuda", reason="CUDA graphs are CUDA's")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_inside_of_a_capture_on_a_stream_that_is_not_current_it_is_right_or_explained() -> None:
    source = torch.ones(4, device=device(0))
    there = torch.zeros(4, device=device(1))
    held = acquire("always", holder="a test")
    try:
        explained = False
        graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream(0)
        # CUDA may give the capture up.
        with suppress(RuntimeError), torch.cuda.graph(graph), torch.cuda.stream(aside):
            try:
                there.copy_(source)
            except TransferError as error:
                explained = "graph capture" in str(error)
        assert explained or torch.equal(there.cpu(), source.cpu())
    finally:
        release(held)
