"""The order of the work, the budget, and the verdicts, on a bench that does nothing but answer. No
device is needed.
"""

from collections import Counter
from collections.abc import Callable
from itertools import permutations

import pytest
from msgspec.structs import replace

from ckptfix.devices.probe.cases import FULL, PLANS, QUICK, SAMPLE, plan_for
from ckptfix.devices.probe.measuring import Run, summarise
from ckptfix.devices.probe.probe_report import STRICTEST, ProbeReport, Verdict
from ckptfix.devices.probe.schedule import Measurements, Schedule, _in_covering_order
from ckptfix.devices.probe.task import Ending, Failure, Task, TaskResult, Work
from ckptfix.devices.torch_devices import Machine
from ckptfix.errors import OperationError
from ckptfix.hardware import Pair


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ckptfix.devices.probe.schedule.time.monotonic", lambda: clock.now)
    return clock


class FakeBench:
    """Takes ``seconds`` for each task, and what ``answer`` says of it; DONE with 10 trials where it
    says nothing.
    """

    def __init__(
        self, clock: Clock, answer: Callable[[Task], TaskResult | None], seconds: float = 0.1
    ) -> None:
        self.starting = 0.0
        self.tasks: list[Task] = []
        self.given: list[float] = []
        self._clock = clock
        self._answer = answer
        self._seconds = seconds

    def machine(self) -> Machine:
        return Machine(names=("a", "b", "c"))

    def run(self, task: Task, seconds: float) -> TaskResult:
        self.tasks.append(task)
        self.given.append(seconds)
        self._clock.now += self._seconds
        return self._answer(task) or TaskResult(ending=Ending.DONE, trials=10)

    def close(self) -> None: ...


def failure(pair: Pair, kind: str = "zeros", size: int = 65541) -> Failure:
    return Failure(
        pair=pair, kind=kind, first_offset=5, wrong_bytes=9, size=size, case=f"copy_() of {size} B"
    )


def probe(
    clock: Clock,
    answer: Callable[[Task], TaskResult | None] = lambda task: None,
    *,
    count: int = 3,
    budget: float = 30.0,
    seconds: float = 0.1,
    again: int = 0,
    known: ProbeReport | None = None,
) -> tuple[ProbeReport, FakeBench, Measurements]:
    bench = FakeBench(clock, answer, seconds)
    plan = replace(plan_for(budget), again=again)
    pairs = tuple(permutations(range(count), 2))
    schedule = Schedule(bench, pairs, plan, budget=budget, seed=9, known=known)
    found = schedule.run()
    run = Run(
        plan=plan, budget=budget, seed=9, seconds=schedule.spent, starting=0.0, in_process=False
    )
    return summarise(run, bench.machine(), found), bench, found


def on(pair: Pair, work: Work, outcome: TaskResult) -> Callable[[Task], TaskResult | None]:
    return lambda task: outcome if pair in task.pairs and task.work is work else None


def test_everything_is_done_in_order_and_only_then_called_healthy(clock: Clock) -> None:
    report, bench, found = probe(clock)
    works = [task.work for task in bench.tasks]
    assert works[:3] == [Work.HOST] * 3, "no pair before all devices are proven"
    first = bench.tasks[3:9]
    assert {task.section for task in first} == {0}, (
        "all pairs get a first look before one is finished"
    )
    assert len({task.pairs for task in first}) == 6
    assert Counter(works) == {
        Work.HOST: 3,
        Work.SECTION: 6 * len(FULL.sections),
        Work.TOGETHER: 1,
        Work.CHAIN: 6,
    }
    assert {item.verdict for item in report.pairs.values()} == {Verdict.HEALTHY}
    assert report.unproven == frozenset()
    assert found.chains == found.triples == 6
    text = str(report)
    assert "6 chains through three devices" in text
    assert "NOT exercised: NCCL" in text, "what no probe of copies can show is always said"
    assert "healthy gpu" not in text.lower()
    assert "healthy device" not in text.lower()


def test_a_failure_ends_the_work_on_its_pair_alone_and_names_it(clock: Clock) -> None:
    wrong = TaskResult(
        ending=Ending.DONE,
        trials=7,
        failures=(*[failure((1, 2), "zeros", 1)] * 3, failure((1, 2), "shift")),
    )
    report, bench, _ = probe(clock, on((1, 2), Work.SECTION, wrong))
    found = report.pairs[1, 2]
    assert (found.verdict, found.kind, found.first_offset) == (
        Verdict.WRONG,
        "shift",
        5,
    ), "1 byte tells no kind"
    assert (found.trials, found.failures, found.seed) == (7, 4, 9)
    assert report.unproven == {(1, 2)}
    assert sum(task.pairs == ((1, 2),) for task in bench.tasks) == 1
    assert all(
        (1, 2) not in task.pairs for task in bench.tasks if task.work in (Work.TOGETHER, Work.CHAIN)
    )
    assert "1 -> 2 wrong: shift from byte 5" in str(report)


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
    clock: Clock, ending: Ending, stage: str, message: str, verdict: Verdict, kind: str
) -> None:
    outcome = TaskResult(ending=ending, trials=3, stage=stage, message=message)
    report, _, _ = probe(clock, on((0, 1), Work.SECTION, outcome))
    found = report.pairs[0, 1]
    assert (found.verdict, found.kind) == (verdict, kind)
    assert message in found.detail
    assert report.unproven == {(0, 1)}


def test_a_device_that_fails_with_the_host_is_unusable_and_no_pair_is_blamed(clock: Clock) -> None:
    outcome = TaskResult(ending=Ending.DONE, unusable=2, message="device 2: 3 of 4.0 KiB are wrong")
    report, bench, _ = probe(clock, on((2, 2), Work.HOST, outcome))
    assert report.with_verdict(Verdict.UNUSABLE) == {pair for pair in report.pairs if 2 in pair}
    assert report.with_verdict(Verdict.HEALTHY) == {(0, 1), (1, 0)}
    assert not any(
        2 in pair for task in bench.tasks for pair in task.pairs if task.work is not Work.HOST
    )
    assert report.pairs[0, 2].detail == "device 2: 3 of 4.0 KiB are wrong"


def test_a_device_found_unusable_late_takes_back_what_its_pairs_had_proven(clock: Clock) -> None:
    outcome = TaskResult(ending=Ending.DONE, unusable=1, message="device 1: gives back other bytes")
    report, _, _ = probe(clock, on((2, 1), Work.SECTION, outcome))
    assert report.with_verdict(Verdict.UNUSABLE) == {pair for pair in report.pairs if 1 in pair}


@pytest.mark.parametrize("ending", [Ending.HUNG, Ending.RAISED, Ending.DIED])
def test_a_bad_end_of_several_pairs_leaves_none_of_them_proven(
    clock: Clock, ending: Ending
) -> None:
    outcome = TaskResult(ending=ending, stage="chain", message="no end")
    report, bench, _ = probe(clock, on((0, 1), Work.CHAIN, outcome))
    chains = [task for task in bench.tasks if task.work is Work.CHAIN and (0, 1) in task.pairs]
    assert len(chains) == 1, "the others with this pair would end badly, too"
    assert report.with_verdict(Verdict.INCONCLUSIVE) == set(chains[0].pairs)
    report, _, _ = probe(clock, on((0, 1), Work.TOGETHER, outcome))
    assert len(report.unproven) == 6


def test_the_budget_is_kept_and_what_it_left_out_is_said(clock: Clock) -> None:
    def slow(task: Task) -> TaskResult | None:
        clock.now += 1.0 if task.work is Work.SECTION and task.section else 0.0
        return None

    began = clock.now
    report, bench, _ = probe(clock, slow, budget=6.0)
    assert clock.now - began <= 6.0 + 1.1, "only the task under way may end after it"
    assert report.with_verdict(Verdict.HEALTHY) == {(0, 1)}, (
        "some are settled, where not all can be"
    )
    assert report.with_verdict(Verdict.INCONCLUSIVE) == set(report.pairs) - {(0, 1)}
    text = "\n".join(report.not_exercised)
    assert "the budget of 6 s was spent" in text
    assert "large copies of" in text
    assert not any(task.work is Work.CHAIN for task in bench.tasks), (
        "the next quick probe goes on with pairs"
    )
    assert all(seconds >= 0 for seconds in bench.given)
    _, bench, _ = probe(clock, slow, budget=12.0)
    assert any(task.work is Work.CHAIN for task in bench.tasks), (
        "the full plan keeps time for several pairs"
    )


def test_a_section_that_ran_out_of_time_proves_nothing(clock: Clock) -> None:
    report, _, _ = probe(
        clock, on((0, 2), Work.SECTION, TaskResult(ending=Ending.OUT_OF_TIME, trials=3))
    )
    assert report.unproven == {(0, 2)}
    assert report.pairs[0, 2].verdict is Verdict.INCONCLUSIVE
    assert "before time ran out" in report.pairs[0, 2].detail


def test_starting_a_worker_does_not_count(clock: Clock) -> None:
    def starts(task: Task) -> TaskResult | None:
        if len(bench_of.tasks) == 1:
            clock.now += 50.0
            bench_of.starting += 50.0
        return None

    bench_of = FakeBench(clock, starts)
    schedule = Schedule(bench_of, ((0, 1), (1, 0)), FULL, budget=30.0, seed=1)
    found = schedule.run()
    assert all(record.finished(FULL) for record in found.records.values())
    assert schedule.spent <= 30.1


def test_a_worker_that_does_not_start_any_more_leaves_the_rest_inconclusive(clock: Clock) -> None:
    def dies(task: Task) -> TaskResult | None:
        if task.pairs == ((1, 0),) and task.section == 1:
            raise OperationError("the worker could not be started")
        return None

    report, _, _ = probe(clock, dies, count=2)
    assert report.pairs[0, 1].verdict is Verdict.HEALTHY
    assert report.pairs[1, 0].verdict is Verdict.INCONCLUSIVE
    assert "the worker could not be started" in str(report)


def test_failures_of_chains_and_of_all_at_once_name_their_pair(clock: Clock) -> None:
    late = Failure(
        pair=(2, 0), kind="late", first_offset=None, wrong_bytes=0, size=40, case="chain"
    )
    outcome = TaskResult(ending=Ending.DONE, trials=1, failures=(late,))
    for work in (Work.CHAIN, Work.TOGETHER):
        report, _, _ = probe(clock, on((2, 0), work, outcome))
        assert report.unproven == {(2, 0)}
        assert report.pairs[2, 0].kind == "late"
        assert report.pairs[2, 0].first_offset is None


def test_chains_cover_all_pairs_first_and_depend_on_the_seed() -> None:
    pairs = tuple(permutations(range(5), 2))
    chains = list(_in_covering_order(pairs, seed=1))
    assert len(chains) == len(set(chains)) == 60
    assert all(hops[0][0] == hops[-1][1] and len(hops) == 3 for hops in chains)
    covered = {pair for hops in chains[:9] for pair in hops}
    assert covered == set(pairs)
    assert chains != list(_in_covering_order(pairs, seed=2))


def test_two_devices_have_chains_there_and_back() -> None:
    assert set(_in_covering_order(((0, 1), (1, 0)), 3)) == {((0, 1), (1, 0)), ((1, 0), (0, 1))}


def test_plan_follows_the_budget() -> None:
    assert plan_for(3.0) is QUICK
    assert plan_for(30.0) is FULL


def test_only_the_full_plan_may_take_damage_back() -> None:
    assert FULL.name == STRICTEST
    assert set(PLANS) == {FULL.name, QUICK.name, SAMPLE.name}
    assert FULL.copies > QUICK.copies > SAMPLE.copies
    assert FULL.sections[: len(QUICK.sections)] == QUICK.sections, (
        "the full plan finishes the quick one"
    )


def test_a_sections_name_stands_for_its_cases() -> None:
    """Progress is remembered by it."""
    sections = {section for plan in PLANS.values() for section in plan.sections}
    assert len({section.name for section in sections}) == len(sections)


# ---- on from where an earlier process ended


def test_what_was_done_is_not_done_again_and_what_was_begun_goes_on(clock: Clock) -> None:
    def slow(task: Task) -> TaskResult | None:
        if task.work is Work.SECTION and task.section == 1:
            clock.now += 2.0
            return TaskResult(
                ending=Ending.OUT_OF_TIME,
                trials=40,
                done=task.start + 40,
                tried={"small dense": 40},
            )
        return None

    first, _, _ = probe(clock, slow, budget=5.0)
    assert len(first.with_verdict(Verdict.INCONCLUSIVE)) == 6
    begun = {pair for pair, found in first.pairs.items() if found.done.get("repeats") == 40}
    assert begun
    assert set(first.hosts) == {0, 1, 2}
    second, bench, _ = probe(clock, budget=9.0, known=first)
    assert Work.HOST not in {task.work for task in bench.tasks}, (
        "one proof of each device, not one a process"
    )
    assert {task.pairs[0] for task in bench.tasks if task.start == 40} == begun
    assert bench.tasks[0].pairs[0] in begun, "those that are nearest to their end come first"
    assert not any(task.section == 0 and task.work is Work.SECTION for task in bench.tasks)
    assert second.unproven == frozenset()
    pair = min(begun)
    assert second.pairs[pair].trials > first.pairs[pair].trials
    assert second.pairs[pair].trials_by_kind()["small dense"] == 40


def test_every_quick_probe_brings_a_healthy_host_of_eight_devices_nearer_to_its_end(
    clock: Clock,
) -> None:
    """0.4.0 began anew in each process: 3 s never settled one of 56 pairs."""
    known: ProbeReport | None = None
    left = 56
    for _ in range(20):
        found, _, _ = probe(clock, count=8, budget=3.0, known=known)
        known = found if known is None else known.renewed_by(found)
        assert len(known.unproven) <= left
        left = len(known.unproven)
        if not left:
            break
    assert not left


def test_pairs_without_a_device_in_common_make_their_large_copies_at_once(clock: Clock) -> None:
    report, bench, _ = probe(clock, count=4, seconds=0.001)
    large = [number for number, section in enumerate(FULL.sections) if section.is_large]
    waves = [
        task.pairs for task in bench.tasks if task.work is Work.SECTION and task.section in large
    ]
    assert len(waves) == 6 * len(large)
    assert all(
        len({index for pair in wave for index in pair}) == 2 * len(wave) == 4 for wave in waves
    )
    others = [
        task for task in bench.tasks if task.work is Work.SECTION and task.section not in large
    ]
    assert all(len(task.pairs) == 1 for task in others)
    assert report.unproven == frozenset()


@pytest.mark.parametrize("ending", [Ending.HUNG, Ending.RAISED, Ending.DIED, Ending.NO_MEMORY])
def test_of_pairs_that_end_badly_at_once_each_answers_for_itself(
    clock: Clock, ending: Ending
) -> None:
    outcome = TaskResult(ending=ending, stage="copy_() of 64 MiB", message="no end")
    large = QUICK.sections.index(next(section for section in QUICK.sections if section.is_large))
    report, _, _ = probe(
        clock,
        lambda task: outcome if (0, 1) in task.pairs and task.section == large else None,
        count=4,
        seconds=0.001,
    )
    assert report.unproven == {(0, 1)}


@pytest.mark.parametrize("unusable", [-1, 2])
def test_a_wrong_copy_counts_even_where_another_pair_ends_the_task(
    clock: Clock, unusable: int
) -> None:
    """A rare fault: the pair's next copies, alone, are all right."""
    ending = Ending.NO_MEMORY if unusable < 0 else Ending.DONE
    outcome = TaskResult(
        ending=ending, trials=4, failures=(failure((0, 1)),), unusable=unusable, message="x"
    )
    report, _, _ = probe(
        clock, lambda task: outcome if len(task.pairs) == 2 and task.work is Work.SECTION else None,
        count=4, seconds=0.001,
    )  # fmt: skip
    assert (report.pairs[0, 1].verdict, report.pairs[0, 1].kind) == (Verdict.WRONG, "zeros")
    assert report.pairs[0, 1].trials > 4
    assert report.pairs[1, 0].verdict is Verdict.HEALTHY


@pytest.mark.parametrize("ending", [Ending.HUNG, Ending.RAISED, Ending.DIED])
@pytest.mark.parametrize("taken", [0.001, 60.0])
@pytest.mark.parametrize("again", [0, 1])
def test_pairs_that_end_badly_only_together_are_not_proven(
    clock: Clock, ending: Ending, taken: float, again: int
) -> None:
    """Alone each of them works, or there was no time to see it (60 s)."""
    outcome = TaskResult(ending=ending, stage="copy_() of 64 MiB over 2 pairs", message="no end")

    def ends(task: Task) -> TaskResult | None:
        if task.work is not Work.SECTION or len(task.pairs) == 1 or (0, 1) not in task.pairs:
            return None
        if task.again < again:
            return None
        clock.now += taken
        return outcome

    report, _, _ = probe(clock, ends, count=4, seconds=0.001, again=again)
    assert {(0, 1), (2, 3)} <= report.with_verdict(Verdict.INCONCLUSIVE)
    assert "over 2 pairs: no end" in report.pairs[0, 1].detail
    if again:
        assert report.unproven == {(0, 1), (2, 3)}


def test_a_probe_that_makes_no_copy_proves_nothing(clock: Clock) -> None:
    """All sections are done, but the pairs copied wrong or hung at once; then no worker starts any
    more.
    """
    bad = TaskResult(
        ending=Ending.DIED, stage="1 MiB with all pairs at once", message="killed by SIGABRT"
    )
    first, _, _ = probe(clock, lambda task: bad if task.work is Work.TOGETHER else None)
    assert first.unproven == set(first.pairs)

    def ended(task: Task) -> TaskResult:
        raise OperationError("the worker could not be started")

    second, _, _ = probe(clock, ended, known=first)
    assert second.unproven == set(first.pairs)
    assert "the worker could not be started" in second.pairs[0, 1].detail
    assert {found.verdict for found in first.renewed_by(second).pairs.values()} == {
        Verdict.INCONCLUSIVE
    }


def test_what_time_is_left_goes_to_more_large_copies_with_other_bits(clock: Clock) -> None:
    def counted(task: Task) -> TaskResult | None:
        if task.work is not Work.SECTION or not FULL.sections[task.section].is_large:
            return None
        return TaskResult(ending=Ending.DONE, trials=6, tried={"large dense": 1})

    report, bench, _ = probe(clock, counted, count=2, seconds=0.001, again=20)
    assert {task.again for task in bench.tasks} == set(range(21))
    assert {found.trials_by_kind()["large dense"] for found in report.pairs.values()} == {42}
    text = "\n".join(report.not_exercised)
    assert "faults in fewer than 10 % of large dense copies: 42 copies per healthy pair" in text
    assert "rarer than one copy" not in text


@pytest.mark.parametrize(
    ("ending", "trials", "message"),
    [
        (Ending.RAISED, 0, "CUDA error: all CUDA-capable devices are busy or unavailable"),
        (Ending.HUNG, 0, "did not end within 5.0 s"),
        (Ending.DIED, 0, "killed by SIGSEGV"),
        (Ending.DIED, 20, "killed by SIGKILL"),
    ],
)
def test_a_device_that_never_answered_or_was_taken_away_is_not_decided(
    clock: Clock, ending: Ending, trials: int, message: str
) -> None:
    """Another process may have it for itself: that is of this moment, and must be asked again."""
    outcome = TaskResult(
        ending=ending, trials=trials, stage="host round trip of 1 B", message=message
    )
    report, _, _ = probe(clock, on((2, 2), Work.HOST, outcome))
    assert report.with_verdict(Verdict.INCONCLUSIVE) == {pair for pair in report.pairs if 2 in pair}
    assert report.with_verdict(Verdict.HEALTHY) == {(0, 1), (1, 0)}
    assert message in report.pairs[0, 2].detail
    assert "probe_peer_copies(in_process=True)" in report.pairs[0, 2].detail


@pytest.mark.parametrize("ending", [Ending.RAISED, Ending.HUNG, Ending.DIED])
def test_a_device_that_fails_after_it_answered_is_unusable(clock: Clock, ending: Ending) -> None:
    outcome = TaskResult(
        ending=ending, trials=1, stage="host round trip of 4.0 KiB", message="no end"
    )
    report, _, _ = probe(clock, on((2, 2), Work.HOST, outcome))
    assert report.with_verdict(Verdict.UNUSABLE) == {pair for pair in report.pairs if 2 in pair}
    assert report.pairs[0, 2].detail == "device 2: host round trip of 4.0 KiB: no end"
