"""What safe transfers cost: bandwidth of staging, and time of a forward. On real devices; without
any, it says so.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from time import perf_counter

from tests.benchmarks.printing import show

SIZE = 256 << 20
"""Bytes of one copy: some 10 ms, against which starting and waiting do not count."""

BLOCKS = 6
WIDTH = 1024


def transfer() -> None:
    """Print every figure that this machine's devices allow, and what is not measured."""
    import torch

    from ckptfix.devices.torch_devices import device_count, device_type

    there = device_count()
    if there == 0:
        print("transfers: no accelerator on this machine, nothing is measured")
        return
    if "tests.simulated.torch_cuda" in sys.modules:
        print("SIMULATED DEVICES: every figure below is of host memory, and says nothing of a GPU")
    print(f"transfers on {there} x {torch.get_device_module(device_type()).get_device_name(0)}")
    _same_device()
    if there < 2:
        print("transfers: one accelerator only, no pair of two is measured")
        return
    _pair()
    _forward()


def _same_device() -> None:
    """The pipeline from a device to itself: both ways over the one link at a time, against one way
    alone.
    """
    import torch

    from ckptfix.devices.torch_devices import device
    from tests.devices.one_device import RoundTrip

    source = torch.ones(SIZE, dtype=torch.uint8, device=device(0))
    target = torch.empty_like(source)
    trip = RoundTrip(device(0))
    pinned = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    to_host = _seconds(lambda: pinned.copy_(source, non_blocking=True))
    to_device = _seconds(lambda: target.copy_(pinned, non_blocking=True))
    print(f"  link, pinned memory: {_speed(to_host)} to the host, {_speed(to_device)} from it")
    pageable = _seconds(lambda: target.copy_(source.to("cpu")))
    staged = _seconds(partial(trip.copy, target, source))
    ratio = staged / max(to_host, to_device)
    show(
        "staged copy, against its slower half alone",
        f"{ratio:.2f}x ({_speed(staged)}; in pageable memory {_speed(pageable)})",
        "< 1.5x",
        ratio < 1.5,
    )


def _pair() -> None:
    """The whole of a safe copy, and what a direct one takes."""
    import torch

    from ckptfix.devices.torch_devices import device
    from ckptfix.devices.transfers import safe_transfers

    source = torch.ones(SIZE, dtype=torch.uint8, device=device(0))
    direct = _seconds(lambda: source.to(device(1)))
    with safe_transfers("always"):
        staged = _seconds(lambda: source.to(device(1)))
    print(f"  one copy of {SIZE >> 20} MiB: {_speed(staged)} staged, {_speed(direct)} direct")


def _forward() -> None:
    """A model over two devices: as accelerate has it, with nothing to stage, and with everything
    staged.
    """
    import accelerate
    import torch
    from torch import nn

    from ckptfix.devices.torch_devices import device
    from ckptfix.devices.transfers import safe_transfers

    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    model = accelerate.dispatch_model(layers, {str(number): number % 2 for number in range(BLOCKS)})
    batch = torch.ones(8, WIDTH, device=device(0))

    def run() -> None:
        with torch.no_grad():
            model(batch)

    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "as it is": nullcontext,
        "nothing to stage": lambda: safe_transfers("never"),
        "everything staged": lambda: safe_transfers("always"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(9):
        for name, way in ways.items():
            with way():
                seconds[name].append(_seconds(run, rounds=20))
    times = {name: median(found) for name, found in seconds.items()}
    ratio = times["nothing to stage"] / times["as it is"]
    show(
        f"forward, {BLOCKS} blocks, {BLOCKS} moves, no bad pair, against none of it",
        f"{ratio:.2f}x ({times['nothing to stage'] * 1e6:.0f} us)",
        "< 1.05x",
        ratio < 1.05,
    )
    staged = times["everything staged"] / times["as it is"]
    print(
        f"  the same, every move staged: {staged:.2f}x ({times['everything staged'] * 1e6:.0f} us)"
    )


def _seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """Return the median time of one call, to the end of what it queued on all devices."""
    import torch

    from ckptfix.devices.torch_devices import device_count, device_type

    module = torch.get_device_module(device_type())

    def synchronize() -> None:
        for index in range(device_count()):
            module.synchronize(index)

    work()
    found = []
    for _ in range(rounds):
        synchronize()
        begin = perf_counter()
        work()
        synchronize()
        found.append(perf_counter() - begin)
    return median(found)


def _speed(seconds: float) -> str:
    return f"{SIZE / seconds / 1e9:.1f} GB/s"


def main() -> None:
    """Measure on real devices, or, to try this file out, on simulated ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--simulated", type=int, metavar="N", help="simulate N devices: no figure means anything"
    )
    options = parser.parse_args()
    if options.simulated:
        from tests.simulated.simulator import simulate

        simulate(options.simulated)
    transfer()


if __name__ == "__main__":
    main()
