"""The probe on simulated devices, in their process: every fault of the simulator is found, and none
where there is none.
"""

from itertools import permutations
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from ckptfix.devices import probe
from ckptfix.devices.probe import measuring, probe_peer_copies, trials
from ckptfix.devices.probe.cases import PLAN, Case, Route
from ckptfix.devices.probe.measuring import measure
from ckptfix.devices.probe.probe_report import PairReport, ProbeReport, Verdict
from ckptfix.devices.probe.trials import Row, UnusableDevice, all_at_once, make_batch
from ckptfix.devices.probe.worker import Ending, Runner, Task, TaskResult, Work
from ckptfix.devices.torch_devices import this_machine
from ckptfix.devices.transfers import safe_transfers
from ckptfix.hardware import Pair
from tests.simulated.library import Engine, Kind
from tests.simulated.simulator import Simulator

pytestmark = pytest.mark.simulated(3, timeout=1800)

PLENTY = 1000.0
"""Seconds: on a busy machine too, the plan decides and not the clock."""

ALL = tuple(permutations(range(3), 2))
WORDS = {
    Kind.ZEROS: "zeros",
    Kind.UNWRITTEN: "not written",
    Kind.STALE: "other bytes",
    Kind.PARTIAL: "not written",
    Kind.PAGES: "not written",
    Kind.BITFLIP: "other bytes",
    Kind.SHIFT: "other bytes",
    Kind.SWAP: "other bytes",
    Kind.LATE: "late",
    Kind.ERROR: "error",
}
MEMCPY, KERNEL = Engine.MEMCPY, Engine.KERNEL
FILTERS: tuple[dict[str, Any], ...] = (
    {"every": 50},
    {"every": 150},
    {"every": 459},
    {"engine": MEMCPY},
    {"engine": KERNEL},
    {"engine": MEMCPY, "every": 459},
    {"engine": KERNEL, "every": 459},
    {"dtype": torch.float32, "every": 150},
    {"dtype": torch.int64},
    {"dtype": torch.float16, "engine": KERNEL},
    {"dtype": torch.bfloat16, "engine": KERNEL, "every": 150},
    {"min_bytes": 32_000_000},
    {"min_bytes": 64 << 20, "engine": MEMCPY},
    {"min_bytes": 64 << 20, "engine": KERNEL},
    {"min_bytes": 8 << 20, "engine": MEMCPY, "dtype": torch.float32},
    {"min_bytes": 8 << 20, "engine": KERNEL, "dtype": torch.float32},
    {"min_bytes": 8 << 20, "engine": MEMCPY, "dtype": torch.bfloat16},
    {"min_bytes": 8 << 20, "engine": KERNEL, "dtype": torch.bfloat16},
)


def name(value: Any) -> str | None:
    if isinstance(value, dict):
        return "-".join(f"{key}={getattr(item, 'value', item)}" for key, item in value.items())
    return value.value if isinstance(value, Kind) else None


class _Kept(Runner):
    """Keeps its row of bytes, and proves each device once: both take longer than most tests."""

    def run(self, task: Task, seconds: float) -> TaskResult:
        if task.work is not Work.HOST:
            return super().run(task, seconds)
        return proven.get(task.pairs) or proven.setdefault(task.pairs, super().run(task, seconds))

    def close(self) -> None: ...


proven: dict[tuple[Pair, ...], TaskResult] = {}


BENCH = _Kept()


def measured(*pairs: Pair, seed: int = 1, bench: Runner = BENCH, times: int = 1) -> ProbeReport:
    """Do all of the plan once in this process, for these pairs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "Runner", lambda: bench)
        return measure(pairs, budget=PLENTY, seed=seed, in_process=True, times=times)


def check_found(simulator: Simulator, kind: Kind, options: dict[str, Any]) -> PairReport:
    simulator.keep_freed_memory()
    simulator.fault(0, 1, kind, **options)
    found = measured((0, 1)).pairs[0, 1]
    assert (found.verdict, found.kind) == (Verdict.WRONG, WORDS[kind]), found
    assert found.failures
    assert (found.first_offset is None) == (kind in (Kind.LATE, Kind.ERROR))
    return found


@pytest.mark.parametrize("kind", WORDS, ids=name)
def test_every_fault_is_found_in_the_first_batch(simulator: Simulator, kind: Kind) -> None:
    assert check_found(simulator, kind, {}).trials <= 20, "each copy shows it"


@pytest.mark.parametrize("options", FILTERS, ids=name)
@pytest.mark.parametrize("kind", [Kind.BITFLIP, Kind.LATE], ids=name)
def test_a_fault_of_some_copies_is_found(
    simulator: Simulator, kind: Kind, options: dict[str, Any]
) -> None:
    """One bit, and bytes that only a kernel behind the copy sees."""
    found = check_found(simulator, kind, options)
    if "dtype" in options:
        assert str(options["dtype"]).removeprefix("torch.") in found.detail
    if options.get("min_bytes", 0) > 32 << 20:
        assert "64.0 MiB + 13 B" in found.detail


def test_healthy_copies_over_each_pair_give_no_false_alarm(simulator: Simulator) -> None:
    simulator.keep_freed_memory()
    report = measured(*ALL)
    assert {found.verdict for found in report.pairs.values()} == {Verdict.HEALTHY}, str(report)
    assert report.unproven == frozenset()
    assert {found.trials for found in report.pairs.values()} == {len(PLAN)}
    copies = simulator.log()
    assert all(len(copies[pair]) >= len(PLAN) for pair in ALL), "each is a copy over the link"
    engines = {pair: {copy.engine for copy in copies[pair]} for pair in ALL}
    assert set(map(frozenset, engines.values())) == {frozenset({MEMCPY, KERNEL})}
    said = " ".join(report.not_exercised)
    assert "faults in fewer than 0.96 % of small dense copies: 476 copies per healthy pair" in said
    assert "of small strided or converting copies: 473 copies per healthy pair" in said
    assert report.hints == (), "nothing is suspect"


@pytest.mark.parametrize("pair", [(0, 1), (2, 1)])
def test_only_the_faulty_direction_is_named(simulator: Simulator, pair: Pair) -> None:
    simulator.fault(*pair, Kind.STALE)
    report = measured(*ALL)
    assert report.unproven == {pair} == report.with_verdict(Verdict.WRONG)
    assert report.hints == ("known causes that this machine has: ckptfix doctor",)


def test_every_pair_faulty_in_another_way_is_told_apart(simulator: Simulator) -> None:
    kinds = (Kind.ZEROS, Kind.LATE, Kind.PAGES, Kind.SHIFT, Kind.BITFLIP, Kind.ERROR)
    for pair, kind in zip(ALL, kinds, strict=True):
        simulator.fault(*pair, kind)
    report = measured(*ALL)
    assert {pair: found.kind for pair, found in report.pairs.items()} == {
        pair: WORDS[kind] for pair, kind in zip(ALL, kinds, strict=True)
    }


def test_the_same_seed_repeats_the_same_bits(simulator: Simulator) -> None:
    def damage(seed: int) -> PairReport:
        simulator.clear()
        simulator.fault(0, 1, Kind.SWAP, every=50)
        bench = Runner()
        found = measured((0, 1), seed=seed, bench=bench).pairs[0, 1]
        return replace(found, began=0.0, measured=0.0)

    first = damage(5)
    assert damage(5) == first
    assert damage(6) != first


def test_repeats_of_the_plan_find_rarer_faults(simulator: Simulator) -> None:
    assert len(PLAN) < 1000
    simulator.fault(0, 1, Kind.ZEROS, every=1000)
    found = measured((0, 1), times=2).pairs[0, 1]
    assert (found.verdict, found.failures) == (Verdict.WRONG, 1)
    assert found.trials == 2 * len(PLAN)


def test_it_measures_past_installed_staging(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_REPEATED", 0)
    simulator.fault(1, 2, Kind.ZEROS)
    with safe_transfers("always") as held:
        there = torch.ones(9, device="cuda:1").to("cuda:2")
        assert bool(there.all()), "staged"
        before = held.counters()
        report = probe_peer_copies(budget=PLENTY, seed=1, in_process=True)
        assert held.counters() == before, "the probe's copies are its own"
    assert report.with_verdict(Verdict.WRONG) == {(1, 2)}
    assert any("in_process" in line for line in report.not_exercised)


def test_a_pair_without_peer_access_is_exercised_too(simulator: Simulator) -> None:
    simulator.peer_access(0, 1, False)
    simulator.fault(0, 1, Kind.PARTIAL, engine=MEMCPY, every=150)
    report = measured((0, 1), (1, 0))
    assert report.pairs[0, 1].verdict is Verdict.WRONG
    assert (report.pairs[0, 1].peer_access, report.pairs[1, 0].peer_access) == (False, True)
    assert report.pairs[1, 0].verdict is Verdict.HEALTHY


@pytest.mark.parametrize("kind", [kind for kind in WORDS if kind is not Kind.ERROR], ids=name)
def test_all_pairs_at_once_name_those_that_failed(simulator: Simulator, kind: Kind) -> None:
    row = Row(1, 2 << 20)
    said: list[str | None] = []
    assert all_at_once(ALL, row, 7, said.append) == []
    assert said == ["1.0 MiB with all 6 pairs at once", None]
    for pair in ((0, 1), (2, 1)):
        simulator.fault(*pair, kind)
    found = all_at_once(ALL, row, 8, said.append)
    assert {failure.pair for failure in found} == {(0, 1), (2, 1)}
    assert {failure.kind.value for failure in found} == {WORDS[kind]}


def test_a_fault_that_shows_only_with_all_pairs_at_once_is_found(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_AT_ONCE", 3 << 20)  # no other copy has between 2 and 8 MiB
    seen = all_at_once

    def broken(pairs: Any, *arguments: Any) -> Any:
        if len(pairs) == len(ALL):
            simulator.fault(2, 0, Kind.ZEROS)
        return seen(pairs, *arguments)

    monkeypatch.setattr("ckptfix.devices.probe.worker.all_at_once", broken)
    report = measured(*ALL)
    assert report.with_verdict(Verdict.WRONG) == {(2, 0)} == report.unproven
    assert "3.0 MiB with all 6 pairs at once" in report.pairs[2, 0].detail


def test_bytes_written_after_the_destination_are_seen(simulator: Simulator) -> None:
    class Overruns(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.copy_.default and [
                part.device.index for part in args[:2]
            ] == [1, 0]:
                whole = torch.empty(0, dtype=torch.uint8, device="cuda:1").set_(
                    args[0].untyped_storage()
                )
                whole[args[0].storage_offset() + 5000 + 3] ^= 1
            return made

    row = Row(1, 8 << 20)
    cases = [Case(route=Route.COPY, count=5000)] * 3
    assert make_batch(cases, (0, 1), row, 3, lambda stage: None) == []
    with Overruns():
        found = make_batch(cases, (0, 1), row, 3, lambda stage: None)
    assert [(failure.first_offset, failure.wrong_bytes) for failure in found] == [(5003, 1)] * 3


class HostLoses(TorchDispatchMode):  # type: ignore[misc]
    """Copies between the host and one device lose a byte of each page from ``least`` bytes on;
    ``up``: those to the device.
    """

    def __init__(self, index: int, *, up: bool, least: int = 0) -> None:
        super().__init__()
        self.index, self.up, self.least = index, up, least

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            to, source = args[0], args[1]
        elif func is torch.ops.aten._to_copy.default:
            to, source = made, args[0]
        else:
            return made
        far, near = (to, source) if self.up else (source, to)
        there = far.device == torch.device("cuda", self.index) and near.device.type == "cpu"
        if there and to.nbytes >= max(self.least, 1) and to.dtype is torch.uint8:
            to.view(-1)[::4096] ^= 1
        return made


@pytest.mark.parametrize("least", [0, 60_000, 20 << 20], ids=["all", "medium", "large"])
@pytest.mark.parametrize("up", [True, False], ids=["to the device", "from the device"])
def test_a_device_whose_own_round_trip_is_wrong_is_unusable_and_no_pair_is_blamed(
    simulator: Simulator, up: bool, least: int
) -> None:
    with HostLoses(2, up=up, least=least):
        report = measured((0, 1), (0, 2), (2, 1), bench=Runner())
    assert report.with_verdict(Verdict.UNUSABLE) == {(0, 2), (2, 1)}, str(report)
    assert report.with_verdict(Verdict.HEALTHY) == {(0, 1)}
    assert report.pairs[0, 2].detail.startswith("device 2: ")


def test_a_device_that_sends_nothing_back_is_unusable(simulator: Simulator) -> None:
    class Deaf(TorchDispatchMode):  # type: ignore[misc]
        """Reads of the host from device 1 leave its memory as it was, once it held the bytes."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.copy_.default and [part.device.type for part in args[:2]] == [
                "cpu",
                "cuda",
            ]:
                return args[0]
            return func(*args, **(kwargs or {}))

    row = Row(1, 1 << 20)
    assert sum(1 for _ in row.prove_host(1, lambda stage: None)) > 20
    with Deaf(), pytest.raises(UnusableDevice):
        for _ in row.prove_host(1, lambda stage: None):
            pass


@pytest.mark.parametrize(("index", "up"), [(0, True), (1, True), (1, False)])
def test_a_host_path_that_fails_only_now_is_not_the_pairs_fault(
    simulator: Simulator, index: int, up: bool
) -> None:
    case = Case(route=Route.COPY, count=5000)
    with HostLoses(index, up=up), pytest.raises(UnusableDevice) as caught:
        make_batch([case], (0, 1), Row(1, 8 << 20), 1, lambda stage: None)
    assert caught.value.index == index


def test_round_trips_before_an_error_are_counted(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned = Row.poisoned
    left = iter((True, True))

    def busy(self: Row, *arguments: Any) -> Any:
        if not next(left, False):
            raise RuntimeError("CUDA error: busy or unavailable")
        return poisoned(self, *arguments)

    monkeypatch.setattr(Row, "poisoned", busy)
    for done in (2, 0):
        outcome = Runner().run(Task(work=Work.HOST, pairs=((0, 0),), seed=1), 100.0)
        assert (outcome.ending, outcome.steps) == (Ending.RAISED, done)
        assert outcome.stage.startswith("host round trip")


@pytest.mark.parametrize(
    ("says", "ending"), [("CUDA out of memory", Ending.NO_MEMORY), ("no", Ending.RAISED)]
)
def test_failures_before_an_error_are_not_forgotten(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, says: str, ending: Ending
) -> None:
    wrong = trials.Failure(pair=(0, 1), kind=trials.Kind.ZEROS, case="copy")
    answers = iter(([], [wrong]))

    def batch(*arguments: Any) -> Any:
        try:
            return next(answers)
        except StopIteration:
            raise RuntimeError(says) from None

    monkeypatch.setattr("ckptfix.devices.probe.worker.make_batch", batch)
    outcome = Runner().run(Task(work=Work.PAIR, pairs=((0, 1),), seed=1), 100.0)
    assert (outcome.ending, outcome.steps, outcome.failures) == (ending, 2, [wrong])
    assert says in outcome.message


def test_a_lost_device_proves_nothing_about_pairs_not_yet_measured(simulator: Simulator) -> None:
    simulator.fault(0, 1, Kind.ASSERT)
    report = measured(*ALL)
    assert (report.pairs[0, 1].verdict, report.pairs[0, 1].kind) == (Verdict.WRONG, "error")
    assert not report.with_verdict(Verdict.HEALTHY) & {pair for pair in ALL if 1 in pair}
    assert report.with_verdict(Verdict.HEALTHY) == {(0, 2), (2, 0)}


def test_a_budget_too_short_leaves_pairs_inconclusive_and_says_what_was_left_out(
    simulator: Simulator,
) -> None:
    report = probe_peer_copies(budget=0.05, seed=1, in_process=True)
    assert report.with_verdict(Verdict.INCONCLUSIVE) == set(ALL) == report.unproven
    assert any("the budget of 0.05 s was spent" in line for line in report.not_exercised)


def test_the_identity_tells_these_devices_from_others(simulator: Simulator) -> None:
    machine = this_machine()
    assert len({device["uuid"] for device in machine.identity["devices"]}) == 3
    assert machine.identity["torch"] == torch.__version__
    assert machine.pci[0].endswith(":00.0")
    assert machine.peer_access == dict.fromkeys(ALL, True)


def test_in_little_memory_nothing_is_proven_and_the_device_is_named(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights fill the devices where a model was loaded before anybody asked."""
    there = Row.on

    def on(self: Row, index: int) -> Any:
        if index == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 65 MiB")
        return there(self, index)

    monkeypatch.setattr(Row, "on", on)
    report = measured(*ALL, bench=Runner())
    assert report.with_verdict(Verdict.HEALTHY) == {(0, 2), (2, 0)}
    assert report.with_verdict(Verdict.INCONCLUSIVE) == {pair for pair in ALL if 1 in pair}
    found = report.pairs[0, 1]
    assert "no memory for " in found.detail
    assert "Tried to allocate 65 MiB" in found.detail
    assert "doctor --peer-copies" in found.detail
