"""One probe, with a bench in place of the worker: whose devices are measured, the order, the
budget and the verdicts. No device is needed.
"""

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

from ckptfix.devices.probe import measuring
from ckptfix.devices.probe.cases import PLAN
from ckptfix.devices.probe.probe_report import ProbeReport, Verdict
from ckptfix.devices.probe.trials import Failure, Kind
from ckptfix.devices.probe.worker import Ending, Task, TaskResult, Work
from ckptfix.devices.torch_devices import Machine
from ckptfix.errors import OperationError
from ckptfix.hardware import Pair

PAIRS = ((0, 1), (1, 0))


def machine(*uuids: str, **more: Any) -> Machine:
    devices = [{"name": "X", "uuid": uuid} for uuid in uuids]
    return Machine(
        names=("X",) * len(uuids),
        pci=("",) * len(uuids),
        identity={"boot": "b", "devices": devices, **more},
    )


class Worker:
    """Sees these devices, and finds every copy right."""

    starting = 0.0

    def __init__(self, seen: Machine) -> None:
        self._seen = seen

    def __call__(self, patience: float) -> "Worker":
        return self

    def machine(self) -> Machine:
        return self._seen

    def run(self, task: Task, seconds: float) -> TaskResult:
        return TaskResult(ending=Ending.DONE, steps=1, made={"small dense": 10})

    def close(self) -> None: ...


HERE = machine("a", "b")


@pytest.mark.parametrize(
    "seen",
    [
        machine("a", "b", "c"),
        machine("b", "a"),
        machine("a", "c"),
        machine("a", "b", torch="other"),
        Machine(names=("X", "X"), pci=("", "")),
        machine("a"),
    ],
    ids=["more", "another order", "another", "another torch", "nothing known", "fewer"],
)
def test_other_devices_than_those_of_this_process_prove_nothing_here(
    monkeypatch: pytest.MonkeyPatch, seen: Machine
) -> None:
    monkeypatch.setattr(measuring, "Watched", Worker(seen))
    report = measuring.measure(PAIRS, budget=3.0, seed=1, in_process=False, here=HERE)
    assert report.with_verdict(Verdict.INCONCLUSIVE) == set(PAIRS), str(report)
    assert report.identity == {}, "so that nothing is remembered of them, under either name"
    assert "the probe's worker sees" in report.pairs[0, 1].detail


@pytest.mark.parametrize(
    "here", [HERE, None], ids=["the same devices", "a process that uses none so far"]
)
def test_the_same_devices_do(monkeypatch: pytest.MonkeyPatch, here: Machine | None) -> None:
    monkeypatch.setattr(measuring, "Watched", Worker(machine("a", "b")))
    report = measuring.measure(PAIRS, budget=3.0, seed=1, in_process=False, here=here)
    assert report.with_verdict(Verdict.HEALTHY) == set(PAIRS)
    assert report.identity == HERE.identity


def test_where_faults_are_hidden_nothing_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setattr(measuring, "Runner", lambda: Worker(machine("a", "b")))
    report = measuring.measure(PAIRS, budget=3.0, seed=1, in_process=True, here=HERE)
    assert report.with_verdict(Verdict.INCONCLUSIVE) == frozenset(PAIRS)
    assert any("hides late ones" in line for line in report.not_exercised)


# ---- order, budget, verdicts

ALL = tuple(permutations(range(3), 2))


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ckptfix.devices.probe.measuring.time.monotonic", lambda: clock.now)
    return clock


class FakeBench:
    """Takes ``seconds`` for each task, and what ``answer`` says of it; DONE with 10 copies where it
    says nothing.
    """

    def __init__(
        self, clock: Clock, answer: Callable[[Task], TaskResult | None], seconds: float
    ) -> None:
        self.starting = 0.0
        self.tasks: list[Task] = []
        self._clock = clock
        self._answer = answer
        self._seconds = seconds

    def machine(self) -> Machine:
        return Machine(names=("a", "b", "c"))

    def run(self, task: Task, seconds: float) -> TaskResult:
        self.tasks.append(task)
        self._clock.now += self._seconds
        return self._answer(task) or TaskResult(
            ending=Ending.DONE, steps=1, made={"small dense": 10}
        )

    def close(self) -> None: ...


Probed = Callable[..., tuple[ProbeReport, FakeBench]]


@pytest.fixture
def probed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Probed:
    def probe(
        answer: Callable[[Task], TaskResult | None] = lambda task: None,
        *,
        budget: float = 7.0,
        seconds: float = 0.1,
        times: int = 1,
    ) -> tuple[ProbeReport, FakeBench]:
        bench = FakeBench(clock, answer, seconds)
        monkeypatch.setattr(measuring, "Watched", lambda patience: bench)
        report = measuring.measure(ALL, budget=budget, seed=9, in_process=False, times=times)
        return report, bench

    return probe


def on(pair: Pair, work: Work, outcome: TaskResult) -> Callable[[Task], TaskResult | None]:
    return lambda task: outcome if pair in task.pairs and task.work is work else None


def test_devices_come_first_then_each_pair_then_all_at_once(probed: Probed) -> None:
    report, bench = probed()
    works = [task.work for task in bench.tasks]
    assert works == [Work.HOST] * 3 + [Work.PAIR] * 6 + [Work.TOGETHER]
    assert [task.pairs for task in bench.tasks[3:9]] == [(pair,) for pair in ALL]
    assert report.unproven == frozenset()
    text = str(report)
    assert "6 ordered pairs at once" in text
    assert "NOT exercised: NCCL" in text, "what no probe of copies can show is always said"
    assert "healthy gpu" not in text.lower()
    assert "healthy device" not in text.lower()


@pytest.mark.parametrize("times", [0, 1, 4])
def test_the_plan_is_repeated_with_other_bits(probed: Probed, times: int) -> None:
    report, bench = probed(budget=30.0, times=times)
    times = max(times, 1)
    rounds = [task.round for task in bench.tasks if task.work is Work.PAIR]
    assert rounds == [number for number in range(times) for _ in ALL]
    assert {found.made["small dense"] for found in report.pairs.values()} == {10 * times}
    assert f"{10 * times} copies per healthy pair" in str(report)


def test_repeats_end_at_half_of_the_budget(probed: Probed) -> None:
    _, bench = probed(budget=30.0, seconds=1.0, times=4)
    assert len(bench.tasks) == 3 + 6 + 1 + 5


def test_wrong_copies_end_the_work_on_their_pair_alone_and_name_it(probed: Probed) -> None:
    few = Failure(pair=(1, 2), kind=Kind.ZEROS, first_offset=0, wrong_bytes=1, case="to()")
    many = Failure(pair=(1, 2), kind=Kind.OTHER, first_offset=5, wrong_bytes=9, case="copy_()")
    wrong = TaskResult(ending=Ending.DONE, made={"x": 7}, failures=[few, many, few])
    report, bench = probed(on((1, 2), Work.PAIR, wrong), budget=30.0, times=4)
    found = report.pairs[1, 2]
    assert (found.verdict, found.kind, found.first_offset) == (Verdict.WRONG, "other bytes", 5)
    assert (found.trials, found.failures, found.seed) == (7, 3, 9)
    assert report.unproven == {(1, 2)}
    assert sum((1, 2) in task.pairs for task in bench.tasks) == 1, "neither at once, nor again"
    assert "1 -> 2 wrong: other bytes from byte 5; 3 of 7 copies wrong, such as copy_()" in str(
        report
    )


@pytest.mark.parametrize(
    ("ending", "stage", "message", "verdict", "kind"),
    [
        (Ending.HUNG, "copy_() of 1 B", "no end", Verdict.HANG, "hang"),
        (Ending.RAISED, "copy_() of 1 B", "AcceleratorError: 700", Verdict.WRONG, "error"),
        (Ending.DIED, "copy_() of 1 B", "killed by SIGABRT", Verdict.WRONG, "crash"),
        (Ending.DIED, "copy_() of 1 B", "killed by SIGKILL", Verdict.INCONCLUSIVE, ""),
        (Ending.HUNG, "", "no end", Verdict.INCONCLUSIVE, ""),
        (Ending.RAISED, "", "RuntimeError: x", Verdict.INCONCLUSIVE, ""),
        (Ending.NO_MEMORY, "copy_() of 1 B", "out of memory", Verdict.INCONCLUSIVE, ""),
    ],
)
def test_a_bad_end_is_the_pairs_only_in_a_copy_of_it(
    probed: Probed, ending: Ending, stage: str, message: str, verdict: Verdict, kind: str
) -> None:
    outcome = TaskResult(ending=ending, stage=stage, message=message)
    report, _ = probed(on((0, 1), Work.PAIR, outcome))
    found = report.pairs[0, 1]
    assert (found.verdict, found.kind) == (verdict, kind)
    assert message in found.detail
    assert report.unproven == {(0, 1)}


def test_a_device_that_fails_with_the_host_is_unusable_and_no_pair_is_blamed(
    probed: Probed,
) -> None:
    outcome = TaskResult(ending=Ending.DONE, unusable=2, message="device 2: 3 of 4.0 KiB are wrong")
    report, bench = probed(on((2, 2), Work.HOST, outcome))
    assert report.with_verdict(Verdict.UNUSABLE) == {pair for pair in ALL if 2 in pair}
    assert report.with_verdict(Verdict.HEALTHY) == {(0, 1), (1, 0)}
    assert not any(
        2 in pair for task in bench.tasks for pair in task.pairs if task.work is not Work.HOST
    )
    assert report.pairs[0, 2].detail == "device 2: 3 of 4.0 KiB are wrong"
    assert set(report.hosts) == {0, 1}


def test_a_device_found_unusable_late_takes_back_what_its_pairs_had_proven(probed: Probed) -> None:
    outcome = TaskResult(ending=Ending.DONE, unusable=1, message="device 1: gives back other bytes")
    report, _ = probed(on((2, 1), Work.PAIR, outcome))
    assert report.with_verdict(Verdict.UNUSABLE) == {pair for pair in ALL if 1 in pair}


@pytest.mark.parametrize(
    ("ending", "steps", "verdict"),
    [
        (Ending.RAISED, 0, Verdict.INCONCLUSIVE),
        (Ending.DIED, 0, Verdict.INCONCLUSIVE),
        (Ending.RAISED, 4, Verdict.UNUSABLE),
        (Ending.HUNG, 4, Verdict.UNUSABLE),
        (Ending.NO_MEMORY, 4, Verdict.INCONCLUSIVE),
    ],
)
def test_a_device_that_never_answered_is_not_decided_and_one_that_stopped_is_unusable(
    probed: Probed, ending: Ending, steps: int, verdict: Verdict
) -> None:
    outcome = TaskResult(ending=ending, steps=steps, stage="host round trip", message="busy")
    report, _ = probed(on((1, 1), Work.HOST, outcome))
    assert report.with_verdict(verdict) == {pair for pair in ALL if 1 in pair}
    assert "busy" in report.pairs[0, 1].detail
    advises = "in_process=True" in report.pairs[0, 1].detail
    assert advises == (steps == 0), "another process may have it for itself"


@pytest.mark.parametrize("ending", [Ending.HUNG, Ending.RAISED, Ending.DIED])
def test_a_bad_end_of_several_pairs_leaves_none_of_them_proven(
    probed: Probed, ending: Ending
) -> None:
    outcome = TaskResult(ending=ending, stage="all at once", message="no end")
    report, _ = probed(on((0, 1), Work.TOGETHER, outcome))
    assert report.with_verdict(Verdict.INCONCLUSIVE) == set(ALL)
    assert report.pairs[2, 0].detail == "all at once: no end"


def test_a_wrong_copy_of_several_pairs_names_its_own(probed: Probed) -> None:
    late = Failure(pair=(2, 0), kind=Kind.LATE, case="all at once")
    outcome = TaskResult(ending=Ending.DONE, failures=[late])
    report, _ = probed(on((0, 1), Work.TOGETHER, outcome))
    assert report.with_verdict(Verdict.WRONG) == {(2, 0)} == report.unproven
    assert report.pairs[2, 0].kind == "late"


def test_without_memory_for_several_pairs_those_that_are_proven_stay_so(probed: Probed) -> None:
    outcome = TaskResult(ending=Ending.NO_MEMORY, message="device 1 has only 1 B")
    report, _ = probed(on((0, 1), Work.TOGETHER, outcome))
    assert report.unproven == frozenset()
    assert any("device 1 has only 1 B" in line for line in report.not_exercised)


def test_the_budget_is_kept_and_what_it_left_out_is_said(probed: Probed) -> None:
    """Pairs that were completed are proven, and make copies at once; the others are not."""
    report, bench = probed(seconds=1.4)
    assert [task.work for task in bench.tasks] == [Work.HOST] * 3 + [Work.PAIR] * 2 + [
        Work.TOGETHER
    ]
    assert report.with_verdict(Verdict.HEALTHY) == set(ALL[:2])
    assert report.with_verdict(Verdict.INCONCLUSIVE) == set(ALL[2:])
    detail = f"only 0 of {len(PLAN)} copies within the budget of 7 s"
    assert {report.pairs[pair].detail for pair in ALL[2:]} == {detail}
    assert any("the budget of 7 s was spent" in line for line in report.not_exercised)


def test_a_plan_that_ran_out_of_time_proves_nothing(probed: Probed) -> None:
    outcome = TaskResult(ending=Ending.OUT_OF_TIME, made={"small dense": 4})
    report, _ = probed(on((0, 1), Work.PAIR, outcome))
    assert report.pairs[0, 1].verdict is Verdict.INCONCLUSIVE
    assert report.pairs[0, 1].detail.startswith(f"only 4 of {len(PLAN)} copies")
    assert report.pairs[0, 1].detail.endswith("all correct")


def test_what_a_repeat_leaves_undone_takes_nothing_back(probed: Probed) -> None:
    def again(task: Task) -> TaskResult | None:
        endings = {1: Ending.OUT_OF_TIME, 2: Ending.NO_MEMORY}
        return TaskResult(ending=endings[task.round]) if task.round in endings else None

    report, _ = probed(again, budget=30.0, times=4)
    assert report.unproven == frozenset()


def test_a_wrong_copy_in_a_repeat_counts(probed: Probed) -> None:
    wrong = Failure(pair=(0, 1), kind=Kind.ZEROS, first_offset=0, wrong_bytes=9, case="copy_()")
    report, _ = probed(
        lambda task: (
            TaskResult(ending=Ending.DONE, failures=[wrong])
            if task.round == 2 and task.pairs == ((0, 1),)
            else None
        ),
        budget=30.0,
        times=4,
    )
    assert report.unproven == {(0, 1)}


def test_starting_a_worker_does_not_count(probed: Probed, clock: Clock) -> None:
    started: list[float] = []

    def start_anew(task: Task) -> None:
        if not started:
            started.append(100.0)
            clock.now += 100.0

    class Starting(FakeBench):
        @property
        def starting(self) -> float:
            return sum(started)

        @starting.setter
        def starting(self, seconds: float) -> None: ...

    bench = Starting(clock, start_anew, 0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "Watched", lambda patience: bench)
        report = measuring.measure(ALL, budget=7.0, seed=9, in_process=False)
    assert report.unproven == frozenset()
    assert report.seconds == pytest.approx(1.0)


def test_a_worker_that_does_not_start_any_more_leaves_the_rest_inconclusive(
    probed: Probed,
) -> None:
    def gone(task: Task) -> None:
        if task.pairs == ((1, 0),):
            raise OperationError("the probe's worker could not be started: no memory")

    report, _ = probed(gone)
    assert report.with_verdict(Verdict.HEALTHY) == {(0, 1), (0, 2)}
    assert report.with_verdict(Verdict.INCONCLUSIVE) == set(ALL[2:])
    assert report.not_exercised[0].startswith("the probe's worker could not be started")
