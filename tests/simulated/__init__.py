"""Simulated CUDA devices on the CPU build of torch: real tensors, links that can be made faulty, a
log of all copies.

Nothing here has seen a GPU: results are results of a simulation, and say so. Streams run at once,
so a missing wait cannot show; only a `late` fault can.

A test module whose tests all need devices runs as a whole in one simulated process (see hooks.py),
and its tests are ordinary tests. The process takes a few seconds to begin, so put many tests into
one module:

    pytestmark = pytest.mark.simulated(3)        # also memory= bytes of each device, timeout= seconds of the module

    def test_zeros(simulator: Simulator) -> None:           # healthy, and with an empty log, for each test
        simulator.fault(0, 1, "zeros")
        there = torch.ones(4, device="cuda:0").to("cuda:1")
        assert not there.any()
        assert simulator.count(0, 1) == 1                   # copies from device to device in the log
        (copy,) = simulator.log()[0, 1]                     # .bytes .engine .dtype .fault .non_blocking

    pytestmark = [pytest.mark.simulated(3), pytest.mark.usefixtures("each_accelerate")]   # with 1.6.0, too

Command lines, and code that ends badly, get a process each:

    @requires_simulator
    def test_doctor() -> None:
        done = start_simulated(["-m", "ckptfix", "doctor"], count=2, faults={(0, 1): "zeros"})     # CompletedProcess
        printed = run_simulated("import torch; print(torch.cuda.device_count())")                  # stdout, or it fails

Python processes that a simulated one starts simulate the same devices with the faults of that
moment, so a probe that works in subprocesses needs nothing (`python -I` and `-E` would hide them:
they ignore PYTHONPATH).

tests/simulated/models.py has models to split: `transformer`, `qwen2`, `gpt2` (tied), `t5`;
`logits_of`, `gradients_of`, `generated`. The right answer is that of one simulated device: plain
CPU differs in the last bits (up to 8e-7 in these), for other kernels run.

Kernels run on the CPU, and carry their arguments and results there through `aten::copy_`: an
override of it sees them, between device and host. The log does not have them.

Kinds of fault: zeros, unwritten (the destination keeps what it held), stale (this pair's payload of
the time before), partial (no second half), pages (no second page), bitflip, shift, swap (halves
exchanged), late; and hang, error (the call raises), assert (the call raises, and so does all that
touches the destination from then on). Filters: engine ("memcpy" or "kernel": as torch chooses,
strided and converting copies are kernels), dtype, min_bytes, every. See `Simulator.fault`,
`Simulator.peer_access` and `Simulator.keep_freed_memory`.
"""

from functools import cache
from typing import Any

import pytest

from tests.simulated.building import why_not
from tests.simulated.library import Engine, Kind
from tests.simulated.processes import Faults, run_simulated, start_simulated
from tests.simulated.simulator import HOST, Copy, Pair, Simulator, simulate

__all__ = [
    "HOST",
    "Copy",
    "Engine",
    "Faults",
    "Kind",
    "Pair",
    "Simulator",
    "requires_simulator",
    "run_simulated",
    "simulate",
    "start_simulated",
]

requires_simulator: pytest.MarkDecorator
"""For tests that start simulated processes themselves. Asking imports torch, so only those do."""


def __getattr__(name: str) -> Any:
    if name != "requires_simulator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _requires_simulator()


@cache
def _requires_simulator() -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(why_not()), reason=why_not())
