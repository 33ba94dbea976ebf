"""The probe on simulated devices, in their process: every kind of fault is found, and none where
there is none.
"""

from collections import deque
from itertools import permutations
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from ckptfix.devices.probe import bulk as large
from ckptfix.devices.probe import bulk as together
from ckptfix.devices.probe import measuring, probe_peer_copies
from ckptfix.devices.probe.bulk import Row, run_batch
from ckptfix.devices.probe.cases import FULL, QUICK, SAMPLE, Case, Plan, Route
from ckptfix.devices.probe.measuring import Run, measure, summarise
from ckptfix.devices.probe.payload import Memory
from ckptfix.devices.probe.probe_report import PairReport, ProbeReport, Verdict
from ckptfix.devices.probe.schedule import Schedule
from ckptfix.devices.probe.task import Ending, Failure, Task, Work
from ckptfix.devices.probe.trials import PairTrials, UnusableDevice
from ckptfix.devices.probe.worker import InProcess, Runner
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
    Kind.STALE: "stale",
    Kind.PARTIAL: "partial",
    Kind.PAGES: "holes",
    Kind.BITFLIP: "bit flip",
    Kind.SHIFT: "shift",
    Kind.SWAP: "swap",
    Kind.LATE: "late",
    Kind.ERROR: "error",
}
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"every": 50},
    {"every": 150},
    {"min_bytes": 32_000_000},
    {"engine": Engine.MEMCPY},
    {"engine": Engine.KERNEL},
    {"engine": Engine.MEMCPY, "every": 150},
    {"engine": Engine.KERNEL, "every": 150},
    {"dtype": torch.float32},
    {"dtype": torch.complex128},
    {"dtype": torch.bfloat16, "engine": Engine.KERNEL},
    {"dtype": torch.float8_e5m2, "engine": Engine.MEMCPY},
)


def name(value: Any) -> str | None:
    if isinstance(value, dict):
        return (
            "-".join(f"{key}={getattr(item, 'value', item)}" for key, item in value.items())
            or "always"
        )
    return (
        value.value if isinstance(value, Kind) else value.name if isinstance(value, Plan) else None
    )


def measured(plan: Plan, *pairs: Pair, seed: int = 1) -> ProbeReport:
    """Do all of a plan once in this process, for these pairs."""
    plan = replace(plan, again=0)
    bench = InProcess()
    schedule = Schedule(bench, pairs, plan, budget=PLENTY, seed=seed)
    found = schedule.run()
    run = Run(plan=plan, budget=PLENTY, seed=seed, seconds=0.0, starting=0.0, in_process=True)
    bench.close()
    return summarise(run, bench.machine(), found)


PLANNED = [(QUICK, options) for options in FILTERS] + [(FULL, options) for options in FILTERS[:3]]
"""The full plan holds the quick one's cases: it is enough to see that it finds what needs many of
them.
"""


@pytest.mark.parametrize(("plan", "options"), PLANNED, ids=name)
@pytest.mark.parametrize("kind", WORDS, ids=name)
def test_every_fault_is_found_and_named(
    simulator: Simulator, kind: Kind, options: dict[str, Any], plan: Plan
) -> None:
    simulator.keep_freed_memory()
    simulator.fault(0, 1, kind, **options)
    found = measured(plan, (0, 1)).pairs[0, 1]
    assert (found.verdict, found.kind) == (Verdict.WRONG, WORDS[kind]), found
    assert found.failures
    if not options:
        assert found.trials <= 20, "each copy shows it, not only a large one or one in a chain"
    if kind not in (Kind.LATE, Kind.ERROR):
        assert found.first_offset is not None


@pytest.mark.parametrize("engine", [Engine.MEMCPY, Engine.KERNEL])
@pytest.mark.parametrize("kind", [Kind.SHIFT, Kind.LATE], ids=name)
def test_a_fault_of_large_copies_by_one_engine_is_found(
    simulator: Simulator, kind: Kind, engine: Engine
) -> None:
    simulator.fault(0, 1, kind, min_bytes=32 << 20, engine=engine)
    found = measured(QUICK, (0, 1)).pairs[0, 1]
    assert (found.verdict, found.kind, found.failures) == (Verdict.WRONG, WORDS[kind], 1), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("engine", [Engine.MEMCPY, Engine.KERNEL])
@pytest.mark.parametrize("kind", [Kind.ZEROS, Kind.PARTIAL, Kind.LATE], ids=name)
def test_a_fault_of_large_tensors_of_a_models_dtype_is_found(
    simulator: Simulator, kind: Kind, engine: Engine, dtype: torch.dtype
) -> None:
    simulator.fault(0, 1, kind, min_bytes=8 << 20, engine=engine, dtype=dtype)
    found = measured(QUICK, (0, 1)).pairs[0, 1]
    assert (found.verdict, found.kind, found.failures) == (Verdict.WRONG, WORDS[kind], 1), found
    assert str(dtype).removeprefix("torch.") in found.detail


@pytest.mark.parametrize("kind", [Kind.ZEROS, Kind.STALE, Kind.LATE], ids=name)
def test_a_fault_from_64_mib_on_is_found_by_the_full_plan(simulator: Simulator, kind: Kind) -> None:
    simulator.fault(0, 1, kind, min_bytes=64 << 20)
    found = measured(FULL, (0, 1)).pairs[0, 1]
    assert (found.verdict, found.kind) == (Verdict.WRONG, WORDS[kind]), found
    assert "64.0 MiB" in found.detail


@pytest.mark.parametrize("keeps", [False, True], ids=["fresh memory", "memory used again"])
def test_a_thousand_healthy_copies_over_each_pair_give_no_false_alarm(
    simulator: Simulator, keeps: bool
) -> None:
    simulator.keep_freed_memory(keeps)
    report = measured(FULL, *ALL, seed=1 + keeps)
    assert {found.verdict for found in report.pairs.values()} == {Verdict.HEALTHY}, str(report)
    assert report.unproven == frozenset()
    trials = {pair: found.trials for pair, found in report.pairs.items()}
    assert min(trials.values()) >= 1000
    copies = simulator.log()
    assert all(len(copies[pair]) >= trials[pair] for pair in ALL), (
        "each trial is a copy over the link"
    )
    engines = {pair: {copy.engine for copy in copies[pair]} for pair in ALL}
    assert set(map(frozenset, engines.values())) == {frozenset({Engine.MEMCPY, Engine.KERNEL})}
    if keeps:
        assert not any("poison" in line for line in report.not_exercised)


@pytest.mark.parametrize("source", range(3))
@pytest.mark.parametrize("destination", range(3))
def test_only_the_faulty_direction_is_named(
    simulator: Simulator, source: int, destination: int
) -> None:
    if source == destination:
        return
    simulator.fault(source, destination, Kind.STALE)
    report = measured(QUICK, *ALL)
    assert report.unproven == {(source, destination)} == report.with_verdict(Verdict.WRONG)


def test_every_pair_faulty_in_another_way_is_told_apart(simulator: Simulator) -> None:
    kinds = dict(
        zip(
            ALL,
            (Kind.ZEROS, Kind.LATE, Kind.PAGES, Kind.SHIFT, Kind.BITFLIP, Kind.SWAP),
            strict=True,
        )
    )
    for pair, kind in kinds.items():
        simulator.fault(*pair, kind)
    report = measured(QUICK, *ALL)
    assert {pair: found.kind for pair, found in report.pairs.items()} == {
        pair: WORDS[kind] for pair, kind in kinds.items()
    }


def test_the_same_seed_repeats_the_same_bits(simulator: Simulator) -> None:
    def damage(seed: int) -> PairReport:
        simulator.clear()
        simulator.fault(0, 1, Kind.STALE, every=50)
        return replace(measured(QUICK, (0, 1), seed=seed).pairs[0, 1], began=0.0, measured=0.0)

    assert damage(5) == damage(5)
    assert damage(5) != damage(6)


def test_it_measures_past_installed_staging(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "plan_for", lambda budget: replace(QUICK, again=0))
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
    simulator.fault(0, 1, Kind.PARTIAL, engine=Engine.MEMCPY, every=150)
    report = measured(QUICK, (0, 1), (1, 0))
    assert report.pairs[0, 1].verdict is Verdict.WRONG
    assert (report.pairs[0, 1].peer_access, report.pairs[1, 0].peer_access) == (False, True)
    assert report.pairs[1, 0].verdict is Verdict.HEALTHY


@pytest.mark.parametrize("kind", [kind for kind in WORDS if kind is not Kind.ERROR], ids=name)
@pytest.mark.parametrize("hop", range(3))
def test_a_chain_names_the_hop_that_failed(simulator: Simulator, kind: Kind, hop: int) -> None:
    hops = ((0, 1), (1, 2), (2, 0))
    said: list[str | None] = []
    assert together.chain(hops, 12296, 7, said.append) == ()
    assert said == ["12.0 KiB + 8 B through the chain 0 -> 1 -> 2 -> 0", None]
    simulator.fault(*hops[hop], kind)
    (failure,) = together.chain(hops, 12296, 8, said.append)
    assert (failure.pair, failure.kind) == (
        hops[hop],
        "garbage" if kind is Kind.STALE else WORDS[kind],
    )


@pytest.mark.parametrize("kind", [kind for kind in WORDS if kind is not Kind.ERROR], ids=name)
def test_all_pairs_at_once_name_those_that_failed(simulator: Simulator, kind: Kind) -> None:
    assert together.all_at_once(ALL, 0, 7, lambda stage: None) == ()
    for pair in ((0, 1), (2, 1)):
        simulator.fault(*pair, kind)
    found = together.all_at_once(ALL, 1, 7, lambda stage: None)
    assert {failure.pair for failure in found} == {(0, 1), (2, 1)}
    assert {failure.kind for failure in found} == {"garbage" if kind is Kind.STALE else WORDS[kind]}


def test_bytes_written_beside_the_destination_are_seen(simulator: Simulator) -> None:
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
                whole[-3:] ^= 1
            return made

    trials = PairTrials((0, 1), Memory(), deque(), lambda stage: None)
    case = Case(route=Route.COPY, count=5000)
    assert trials.run(case, 1) is None
    row = Row(8 << 20, 1)
    batched = (case, replace(case, count=4999), case)
    assert run_batch(batched, (0, 1), row, 3, Memory(), lambda stage: None, deque(), 6) == ()
    with Overruns():
        failure = trials.run(case, 2)
        last = run_batch(batched, (0, 1), row, 3, Memory(), lambda stage: None, deque(), 6)
    assert [(found.kind, found.wrong_bytes) for found in last] == [("outside", 3)]
    assert failure is not None
    assert (failure.kind, failure.first_offset, failure.wrong_bytes) == (
        "outside",
        None,
        3,
    ), "no byte of the payload"


class HostLoses(TorchDispatchMode):  # type: ignore[misc]
    """Copies between the host and one device lose a byte from ``least`` bytes on; ``up``: those to
    the device.
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
            to.view(-1)[-1] ^= 1
        return made


@pytest.mark.parametrize("least", [0, 60_000, 20 << 20], ids=["all", "medium", "large"])
@pytest.mark.parametrize("up", [True, False], ids=["to the device", "from the device"])
def test_a_device_whose_own_round_trip_is_wrong_is_unusable_and_no_pair_is_blamed(
    simulator: Simulator, up: bool, least: int
) -> None:
    with HostLoses(2, up=up, least=least):
        report = measured(QUICK, *ALL)
    assert report.with_verdict(Verdict.UNUSABLE) == {pair for pair in ALL if 2 in pair}, str(report)
    assert report.with_verdict(Verdict.HEALTHY) == {(0, 1), (1, 0)}
    assert report.pairs[0, 2].detail.startswith("device 2: ")


@pytest.mark.parametrize(("index", "up"), [(0, True), (1, True), (1, False)])
def test_a_host_path_that_fails_only_now_is_not_the_pairs_fault(
    simulator: Simulator, index: int, up: bool
) -> None:
    with HostLoses(index, up=up), pytest.raises(UnusableDevice) as caught:
        PairTrials((0, 1), Memory(), deque(), lambda stage: None).run(
            Case(route=Route.COPY, count=5000), 1
        )
    assert caught.value.index == index


def test_round_trips_before_an_error_are_counted(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = iter((True, True, True, True))  # two for each round trip
    upload = Memory.upload

    def busy(self: Memory, *arguments: Any) -> Any:
        if not next(uploads, False):
            raise RuntimeError("CUDA error: busy or unavailable")
        return upload(self, *arguments)

    monkeypatch.setattr(Memory, "upload", busy)
    for done in (2, 0):
        outcome = Runner().run(Task(work=Work.HOST, pairs=((0, 0),), plan="quick", seed=1), 100.0)
        assert (outcome.ending, outcome.trials) == (Ending.RAISED, done)
        assert outcome.stage.startswith("host round trip")


def test_a_lost_device_is_not_one_that_takes_no_dtype(simulator: Simulator) -> None:
    simulator.fault(0, 1, Kind.ASSERT)
    with pytest.raises(RuntimeError):
        torch.ones(3, device="cuda:0").to("cuda:1")
    with pytest.raises(RuntimeError, match="assert"):
        Runner()._takes(1, "float16")


@pytest.mark.parametrize(
    ("says", "ending"), [("CUDA out of memory", Ending.NO_MEMORY), ("no", Ending.RAISED)]
)
def test_failures_before_an_error_are_not_forgotten(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, says: str, ending: Ending
) -> None:
    wrong = Failure(pair=(0, 1), kind="zeros", first_offset=0, wrong_bytes=1, size=1, case="copy")
    answers = iter((None, wrong))

    def run(self: PairTrials, case: Case, seed: int) -> Failure | None:
        try:
            return next(answers)
        except StopIteration:
            raise RuntimeError(says) from None

    monkeypatch.setattr(PairTrials, "run", run)
    outcome = Runner().run(Task(work=Work.SECTION, pairs=((0, 1),), plan="quick", seed=1), 100.0)
    assert (outcome.ending, outcome.trials, outcome.failures) == (ending, 2, (wrong,))
    assert says in outcome.message


def test_a_lost_device_proves_nothing_about_pairs_not_yet_measured(simulator: Simulator) -> None:
    simulator.fault(0, 1, Kind.ASSERT)
    report = measured(QUICK, *ALL)
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


# ---- several processes, and little memory


def test_a_budget_too_short_for_all_settles_in_a_few_probes(simulator: Simulator) -> None:
    """Each goes on where the one before ended, and none makes less of what is known."""
    known: ProbeReport | None = None
    done = -1
    for _ in range(60):
        found = measure(ALL, budget=0.7, seed=len(ALL) + done, in_process=True, known=known)
        known = found if known is None else known.renewed_by(found)
        before, done = done, sum(sum(its.done.values()) for its in known.pairs.values())
        if not known.unproven:
            break
        assert done >= before
    assert known is not None
    assert known.with_verdict(Verdict.HEALTHY) == set(ALL), str(known)
    counts = {tuple(sorted(its.trials_by_kind())) for its in known.pairs.values()}
    assert counts == {
        tuple(
            sorted(
                f"{size} {engine}"
                for size in ("small", "medium", "large")
                for engine in ("dense", "strided or converting")
            )
        )
    }


def test_a_fault_that_began_meanwhile_is_found_by_a_sample(simulator: Simulator) -> None:
    known = measured(QUICK, *ALL)
    assert known.unproven == frozenset()
    simulator.fault(1, 2, Kind.ZEROS, min_bytes=32 << 20)
    found = measure(ALL, budget=PLENTY, seed=3, in_process=True, sample=True)
    assert {its.plan for its in found.pairs.values()} == {SAMPLE.name}
    assert known.renewed_by(found).unproven == {(1, 2)}


def test_in_little_memory_small_copies_are_made_and_the_large_ones_named(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights fill the devices where a model was loaded before anybody asked."""
    monkeypatch.setattr(large, "free_memory", lambda index: (64 << 20) if index == 1 else (8 << 30))
    report = measured(QUICK, *ALL)
    assert report.with_verdict(Verdict.HEALTHY) == {(0, 2), (2, 0)}
    assert report.with_verdict(Verdict.INCONCLUSIVE) == {pair for pair in ALL if 1 in pair}
    found = report.pairs[0, 1]
    assert found.done["repeats"] == 400
    assert found.done["large copies"] == 0
    assert (
        "no memory for copies of 33.0 MiB + 13 B: device 1 has only 64.0 MiB of free memory"
        in found.detail
    )
    assert "doctor --peer-copies" in found.detail
    monkeypatch.undo()
    monkeypatch.setattr(measuring, "plan_for", lambda budget: replace(QUICK, again=0))
    again = measure(ALL, budget=PLENTY, seed=3, in_process=True, known=report)
    assert report.renewed_by(again).unproven == frozenset(), "the next probe makes them"
