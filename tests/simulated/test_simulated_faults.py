"""Each kind of fault does to the bytes what it says, on its ordered pair alone, and to the copies
it is meant for.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulated.library import Engine, Kind
from tests.simulated.simulator import Simulator

pytestmark = pytest.mark.simulated(3)

POISON = 0xCD


def sent(length: int, seed: int = 0) -> torch.Tensor:
    """Bytes in which neither 0 nor the poison occurs, on the first device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, POISON, (length,), dtype=torch.uint8, generator=generator).to("cuda:0")


def delivered(source: torch.Tensor) -> list[int]:
    arrived: list[int] = source.to("cuda:1").cpu().tolist()
    return arrived


def zeros(right: list[int]) -> list[int]:
    return [0] * len(right)


def unwritten(right: list[int]) -> list[int]:
    return [POISON] * len(right)


def partial(right: list[int]) -> list[int]:
    return right[: len(right) // 2] + [POISON] * (len(right) - len(right) // 2)


def pages(right: list[int]) -> list[int]:
    return [POISON if place // 4096 % 2 else value for place, value in enumerate(right)]


def bitflip(right: list[int]) -> list[int]:
    return [
        value ^ 0x10 if place == len(right) // 3 else value for place, value in enumerate(right)
    ]


def shift(right: list[int]) -> list[int]:
    return [POISON] * 16 + right[:-16]


def swap(right: list[int]) -> list[int]:
    half = len(right) // 2
    return right[len(right) - half :] + right[half : len(right) - half] + right[:half]


@pytest.mark.parametrize("length", [10_000, 10_001])
@pytest.mark.parametrize("expected", [zeros, unwritten, partial, pages, bitflip, shift, swap])
def test_what_arrives(
    simulator: Simulator, expected: Callable[[list[int]], list[int]], length: int
) -> None:
    source = sent(length)
    right = source.cpu().tolist()
    simulator.fault(0, 1, expected.__name__)
    assert delivered(source) == expected(right)
    assert delivered(source) != right
    assert source.cpu().tolist() == right, "the source is whole"


def test_stale_brings_what_the_pair_carried_before(simulator: Simulator) -> None:
    simulator.fault(0, 1, "stale")
    first, second = sent(100, seed=1), sent(150, seed=2)
    assert delivered(first) == [POISON] * 100
    before = first.cpu().tolist()
    assert delivered(second) == before + before[:50]
    assert delivered(first) == second.cpu().tolist()[:100]


@pytest.mark.parametrize("kind", [Kind.UNWRITTEN, Kind.PARTIAL, Kind.SHIFT])
def test_what_does_not_arrive_leaves_what_was_there(simulator: Simulator, kind: Kind) -> None:
    simulator.fault(0, 1, kind)
    target = torch.zeros(100, dtype=torch.uint8, device="cuda:1")
    target.copy_(sent(100))
    assert bool((target == 0).any())
    assert not bool((target == POISON).any())


def test_unwritten_memory_may_hold_the_right_bytes(simulator: Simulator) -> None:
    """Why "works after one hop through the CPU" was reported: the freed block is handed out
    again.
    """
    simulator.keep_freed_memory()
    simulator.fault(0, 1, "unwritten")
    source = sent(1000)
    del_me = source.cpu().to("cuda:1")
    del del_me
    assert delivered(source) == source.cpu().tolist()


@pytest.mark.parametrize(
    "kind", [None, *(kind for kind in Kind if kind not in (Kind.HANG, Kind.ERROR, Kind.ASSERT))]
)
def test_a_broadcast_copy_carries_every_element(simulator: Simulator, kind: Kind | None) -> None:
    if kind is not None:
        simulator.fault(0, 1, kind, page=512)
    row = torch.arange(1.0, 65.0, device="cuda:0")
    target = torch.zeros(64, 64, device="cuda:1").copy_(row)
    (copy,) = simulator.log()[0, 1]
    assert (copy.bytes, copy.engine, copy.fault) == (64 * 64 * 4, Engine.KERNEL, kind)
    right = row.cpu().expand(64, 64)
    # Its rows are alike, so nothing shows of halves that change places.
    assert torch.equal(target.cpu(), right) == (kind in (None, Kind.LATE, Kind.SWAP))


@pytest.mark.parametrize("length", [1, 2, 3, 17])
@pytest.mark.parametrize(
    "kind", ["zeros", "unwritten", "partial", "bitflip", "shift", "swap", "stale"]
)
def test_short_payloads(simulator: Simulator, kind: str, length: int) -> None:
    source = torch.arange(1, length + 1, dtype=torch.uint8, device="cuda:0")
    simulator.fault(0, 1, kind)
    assert (delivered(source) == source.cpu().tolist()) == (kind == "swap" and length == 1)
    assert source.new_empty(0).to("cuda:1").numel() == 0


@pytest.mark.parametrize(
    "kind", [kind for kind in Kind if kind not in (Kind.HANG, Kind.ERROR, Kind.ASSERT)]
)
def test_only_its_ordered_pair_is_faulty(simulator: Simulator, kind: Kind) -> None:
    simulator.fault(0, 1, kind)
    right = sent(10_000).cpu()
    for source in range(3):
        for destination in range(3):
            if (source, destination) != (0, 1):
                assert torch.equal(
                    right.to(f"cuda:{source}").to(f"cuda:{destination}").cpu(), right
                )
    right.to("cuda:0").to("cuda:1")
    faults = {pair: [copy.fault for copy in copies] for pair, copies in simulator.log().items()}
    assert faults.pop((0, 1)) == [kind]
    assert len(faults) == 5
    assert all(found == [None] for found in faults.values())


def test_late_arrives_before_some_kernel_of_the_destination(simulator: Simulator) -> None:
    simulator.fault(0, 1, "late", kernels=3)
    there = sent(100).to("cuda:1")
    assert simulator.late() == 1
    sent(1).add_(1)
    sums = [(there != POISON).sum() for _ in range(3)]  # a comparison and a sum: two kernels each
    assert [int(number.cpu()) for number in sums] == [0, 100, 100]
    assert simulator.late() == 0


@pytest.mark.parametrize(
    "waiting",
    [
        lambda there: torch.accelerator.synchronize(1),
        lambda there: torch.cuda.synchronize(1),
        lambda there: torch.accelerator.current_stream(1).synchronize(),
        lambda there: there.cpu(),
        lambda there: there[0].item(),
    ],
    ids=["accelerator", "cuda", "stream", "copy to the host", "item"],
)
def test_late_arrives_when_the_host_waits(
    simulator: Simulator, waiting: Callable[[Any], object]
) -> None:
    simulator.fault(0, 1, "late", kernels=100)
    source = sent(100)
    there = source.to("cuda:1")
    torch.accelerator.synchronize(0)
    assert simulator.late() == 1
    waiting(there)
    assert simulator.late() == 0
    assert torch.equal(there.cpu(), source.cpu())


def test_a_late_copy_arrives_unseen_by_a_dispatch_mode(simulator: Simulator) -> None:
    seen = []

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(operator))
            return operator(*args, **(kwargs or {}))

    simulator.fault(0, 1, "late", kernels=100)
    there = sent(100).to("cuda:1")
    with Mode():
        torch.accelerator.synchronize(1)
    assert simulator.late() == 0
    assert seen == []
    assert there.device.index == 1


def faulty(simulator: Simulator, copies: list[Callable[[], object]]) -> list[bool]:
    for copy in copies:
        copy()
    return [copy.fault is not None for copy in simulator.log()[0, 1]]


def test_every_nth(simulator: Simulator) -> None:
    simulator.fault(0, 1, "zeros", every=3)
    source = sent(10)
    assert faulty(simulator, [lambda: source.to("cuda:1")] * 7) == [False, False, True] * 2 + [
        False
    ]


def test_above_a_size(simulator: Simulator) -> None:
    simulator.fault(0, 1, "zeros", min_bytes=100, every=2)
    large, small = sent(100), sent(99)
    copies: list[Callable[[], object]] = [
        lambda: large.to("cuda:1"),
        lambda: small.to("cuda:1"),
    ] * 2
    assert faulty(simulator, copies) == [
        False,
        False,
        True,
        False,
    ], "only those that are large enough count"


def test_one_dtype(simulator: Simulator) -> None:
    simulator.fault(0, 1, "zeros", dtype=torch.float16)
    source = torch.ones(10, device="cuda:0")
    copies: list[Callable[[], object]] = [
        lambda: source.to("cuda:1"),
        lambda: source.half().to("cuda:1"),
        # Converted on the source device: half crosses the link.
        lambda: source.to("cuda:1", torch.float16),
    ]
    assert faulty(simulator, copies) == [False, True, True]


@pytest.mark.parametrize("engine", [Engine.MEMCPY, Engine.KERNEL])
def test_one_engine(simulator: Simulator, engine: Engine) -> None:
    simulator.fault(0, 1, "zeros", engine=engine)
    source = torch.ones(6, 6, device="cuda:0")
    copies: list[Callable[[], object]] = [
        lambda: source.to("cuda:1"),
        lambda: source.t().to("cuda:1"),  # dense, in another order on both sides
        lambda: source[:, ::2].to("cuda:1"),
        lambda: source.to("cuda:1", torch.float64),
    ]
    by_kernel = [False, False, True, True]
    assert faulty(simulator, copies) == [
        kernel == (engine is Engine.KERNEL) for kernel in by_kernel
    ]


def test_without_peer_access_all_copies_are_memcpys(simulator: Simulator) -> None:
    assert torch.cuda.can_device_access_peer(0, 1)
    simulator.peer_access(0, 1, False)
    assert not torch.cuda.can_device_access_peer(0, 1)
    assert torch.cuda.can_device_access_peer(1, 0)
    torch.ones(6, 6, device="cuda:0")[:, ::2].to("cuda:1", torch.float64)
    assert [(copy.engine, copy.bytes, copy.dtype) for copy in simulator.log()[0, 1]] == [
        (Engine.MEMCPY, 6 * 3 * 8, "float64")
    ]


def test_a_later_fault_takes_the_place_of_the_earlier(simulator: Simulator) -> None:
    simulator.fault(0, 1, "zeros")
    simulator.fault(0, 1, "bitflip", min_bytes=1000)
    source = sent(10)
    assert delivered(source) == source.cpu().tolist()


def test_an_error_is_raised_once(simulator: Simulator) -> None:
    simulator.fault(0, 1, "error", every=2)
    source = sent(10)
    source.to("cuda:1")
    with pytest.raises(torch.AcceleratorError, match="an illegal memory access"):
        source.to("cuda:1")
    assert delivered(source) == source.cpu().tolist()


def test_an_assert_takes_the_destination_down(simulator: Simulator) -> None:
    source, there = sent(10), torch.ones(2, device="cuda:1")
    simulator.fault(0, 1, "assert")
    touching: list[Callable[[], object]] = [
        lambda: source.to("cuda:1"),
        lambda: there + 1,
        lambda: there.cpu(),
        lambda: there.to("cuda:2"),
        lambda: torch.accelerator.synchronize(1),
    ]
    for work in touching:
        with pytest.raises(torch.AcceleratorError, match="device-side assert triggered"):
            work()
    assert source.to("cuda:2").device.index == 2
    simulator.clear()
    assert int((there + 1).sum()) == 4


def test_a_hang_ends_when_told(simulator: Simulator) -> None:
    simulator.fault(0, 1, "hang", seconds=0.2)
    source = sent(10)
    began = time.monotonic()
    assert delivered(source) == source.cpu().tolist()
    assert time.monotonic() - began >= 0.2


def test_a_hang_lasts_and_holds_only_its_thread(simulator: Simulator) -> None:
    simulator.fault(0, 1, "hang")
    source = sent(10)
    thread = threading.Thread(target=source.to, args=("cuda:1",))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert torch.equal(source.to("cuda:2").cpu(), source.cpu())
    simulator.clear()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((0, 0, "zeros"), {}, "no ordered pair of 3 devices"),
        ((0, 3, "zeros"), {}, "no ordered pair of 3 devices"),
        ((0, 1, "zero"), {}, "is not a valid Kind"),
        ((0, 1, "zeros"), {"engine": "dma"}, "is not a valid Engine"),
        ((0, 1, "zeros"), {"every": 0}, "every=0: at least 1"),
        ((0, 1, "zeros"), {"dtype": "float"}, "float: no type that the simulator knows"),
    ],
)
def test_faults_that_cannot_be_are_refused(
    simulator: Simulator, arguments: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        simulator.fault(*arguments, **options)
    assert sent(4).to("cuda:1").numel() == 4
