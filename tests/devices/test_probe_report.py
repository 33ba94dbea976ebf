"""What a report says, to people and as JSON. No device is needed."""

import json
import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

import ckptfix.devices.probe as probe
from ckptfix.devices.probe.probe_report import PairReport, ProbeReport, Verdict
from ckptfix.devices.probe.task import Ending, Failure, Task, TaskResult, Work
from ckptfix.devices.torch_devices import Machine


def report(*verdicts: tuple[int, int, Verdict], **changes: Any) -> ProbeReport:
    pairs = {
        (source, to): PairReport(pair=(source, to), verdict=verdict, seed=1, trials=5)
        for source, to, verdict in verdicts
    }
    return replace(ProbeReport(pairs=pairs, seed=1), **changes)


FOUND = report(
    (0, 1, Verdict.WRONG),
    (1, 0, Verdict.HEALTHY),
    devices=("A", "B"),
    exercised=("x",),
    not_exercised=("y",),
    hints=("z",),
    identity={"boot": "b"},
    seconds=1.25,
)


def test_json_and_back() -> None:
    assert ProbeReport.from_json(json.loads(json.dumps(FOUND.to_json()))) == FOUND


def test_verdicts_have_the_five_words() -> None:
    assert [verdict.value for verdict in Verdict] == [
        "healthy",
        "wrong",
        "hang",
        "inconclusive",
        "unusable",
    ]


@pytest.mark.parametrize(
    "verdict", [verdict for verdict in Verdict if verdict is not Verdict.HEALTHY]
)
def test_anything_but_healthy_is_unproven(verdict: Verdict) -> None:
    assert report((0, 1, verdict), (1, 0, Verdict.HEALTHY)).unproven == {(0, 1)}


def test_text_is_a_matrix_with_source_and_destination_apart() -> None:
    pair = PairReport(
        pair=(0, 1),
        verdict=Verdict.WRONG,
        kind="zeros",
        first_offset=0,
        seed=1,
        detail="6 of 6 copies",
    )
    text = str(replace(FOUND, pairs={**FOUND.pairs, (0, 1): pair}))
    lines = text.splitlines()
    assert lines[0].split() == ["from", "\\", "to", "0", "1"]
    assert lines[1].split() == ["0", "-", "zeros"]
    assert lines[2].split() == ["1", "healthy", "-"]
    assert "0 -> 1 wrong: zeros from byte 0; 6 of 6 copies" in lines
    assert {"exercised: x", "NOT exercised: y", "hint: z"} <= set(lines)


def test_repr_is_short_and_counts_verdicts() -> None:
    assert repr(FOUND) == "<ProbeReport 2 pairs: 1 wrong, 1 healthy>"
    assert repr(report()) == "<ProbeReport 0 pairs>"


def test_a_hang_is_not_said_twice() -> None:
    hung = PairReport(
        pair=(2, 0),
        verdict=Verdict.HANG,
        kind="hang",
        seed=1,
        detail="copy_(): did not end within 5.0 s",
    )
    assert str(hung) == "2 -> 0 hang; copy_(): did not end within 5.0 s"


def test_a_newer_report_of_some_pairs_renews_those() -> None:
    older = report((0, 1, Verdict.INCONCLUSIVE), (1, 0, Verdict.WRONG), exercised=("a", "b"))
    newer = report((0, 1, Verdict.HEALTHY), exercised=("b", "c"))
    both = older.renewed_by(newer)
    assert both.unproven == {(1, 0)}
    assert both.exercised == ("a", "b", "c")


def test_tasks_outcomes_and_machines_survive_the_pipe() -> None:
    task = Task(work=Work.CHAIN, pairs=((0, 1), (1, 2), (2, 0)), plan="full", seed=2**62, section=3)
    failure = Failure(pair=(0, 1), kind="late", first_offset=None, wrong_bytes=0, size=1, case="c")
    outcome = TaskResult(
        ending=Ending.RAISED,
        trials=3,
        failures=(failure,),
        stage="s",
        left_out=("a",),
        unpoisoned=2,
    )
    machine = Machine(
        names=("a",), pci=("",), peer_access={(0, 1): None, (1, 0): True}, identity={"a": 1}
    )
    assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
    assert TaskResult.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome
    assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine


def test_a_machine_without_two_devices_is_told_that_nothing_was_exercised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for count, seen in ((0, "no accelerator"), (1, "one device")):
        monkeypatch.setattr("ckptfix.devices.torch_devices.device_count", lambda count=count: count)
        found = probe.probe_peer_copies(seed=4)
        assert (found.pairs, found.exercised, found.seed) == ({}, (), 4)
        assert found.not_exercised == (
            f"copies between devices: torch sees {seen} on this machine",
        )
        assert found.unproven == probe.unproven_pairs() == frozenset()
        assert "NOT exercised" in str(found)


@pytest.mark.parametrize("budget", [0, -1, float("inf"), float("nan")])
def test_a_budget_that_means_nothing_is_refused(budget: float) -> None:
    with pytest.raises(ValueError, match="budget="):
        probe.probe_peer_copies(budget=budget)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="seed="):
        probe.probe_peer_copies(seed=seed)


class Measured:
    """Stands in for the measuring: notes what was asked for, and answers."""

    def __init__(self, *answers: ProbeReport) -> None:
        self.asked: list[tuple[tuple[int, int], ...]] = []
        self.here: list[Machine | None] = []
        self._answers = list(answers)

    def __call__(self, pairs: Any, **options: Any) -> ProbeReport:
        self.asked.append(tuple(pairs))
        self.here.append(options["here"])
        return self._answers.pop(0)


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_measured_here", {})


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> dict[str, Any]:
    identity = {"boot": "b", "devices": [{"uuid": "1"}, {"uuid": "2"}]}
    machine = Machine(names=("a", "b"), identity=identity)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    another_process(monkeypatch)
    monkeypatch.setattr("ckptfix.devices.torch_devices.device_count", lambda: 2)
    monkeypatch.setattr("ckptfix.devices.torch_devices.this_machine", lambda: machine)
    return identity


def test_auto_measures_once_then_reads_and_again_only_what_was_not_decided(
    two_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = report((0, 1, Verdict.INCONCLUSIVE), (1, 0, Verdict.WRONG), identity=two_devices)
    second = report((0, 1, Verdict.HEALTHY), identity=two_devices)
    measured = Measured(first, second)
    monkeypatch.setattr("ckptfix.devices.probe.measuring.measure", measured)
    assert probe.unproven_pairs() == {(0, 1), (1, 0)}
    assert probe.unproven_pairs() == {(0, 1), (1, 0)}, "a process measures once"
    for _ in range(2):
        another_process(monkeypatch)
        assert probe.unproven_pairs() == {(1, 0)}
    assert measured.asked == [((0, 1), (1, 0)), ((0, 1),)]
    assert [here and here.identity for here in measured.here] == [two_devices] * 2, (
        "on the devices of this process"
    )
    found = probe.cached_report()
    assert found is not None
    assert found.pairs[0, 1].verdict is Verdict.HEALTHY


def test_asking_for_a_probe_measures_whatever_is_remembered(
    two_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = report((0, 1, Verdict.HEALTHY), (1, 0, Verdict.HEALTHY), identity=two_devices)
    probe.remember(known)
    assert probe.unproven_pairs() == frozenset()
    measured = Measured(
        report((0, 1, Verdict.WRONG), (1, 0, Verdict.HEALTHY), identity=two_devices)
    )
    monkeypatch.setattr("ckptfix.devices.probe.measuring.measure", measured)
    assert probe.probe_peer_copies().unproven == {(0, 1)}
    assert probe.unproven_pairs() == frozenset(), "a probe does not remember by itself"


def test_devices_that_cannot_be_told_from_others_are_measured_in_each_process(
    two_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptfix.devices.torch_devices.this_machine", Machine)
    healthy = report((0, 1, Verdict.HEALTHY), (1, 0, Verdict.HEALTHY))
    measured = Measured(healthy, healthy)
    monkeypatch.setattr("ckptfix.devices.probe.measuring.measure", measured)
    for _ in range(2):
        another_process(monkeypatch)
        assert probe.unproven_pairs() == probe.unproven_pairs() == frozenset()
    assert len(measured.asked) == 2


def test_a_pair_that_nothing_is_known_of_is_measured_and_unproven_until_then(
    two_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report of fewer pairs than there are, of two devices where three are now, said that the
    rest is healthy.
    """
    probe.remember(report((0, 1, Verdict.HEALTHY), identity=two_devices))
    measured = Measured(ProbeReport(pairs={}, seed=1, identity=two_devices))
    monkeypatch.setattr("ckptfix.devices.probe.measuring.measure", measured)
    assert probe.unproven_pairs() == {(1, 0)}
    assert measured.asked == [((1, 0),)]


@pytest.mark.filterwarnings("ignore:.*cannot save the probe's verdicts")
def test_without_a_place_to_remember_a_process_measures_once(
    two_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = report((0, 1, Verdict.WRONG), (1, 0, Verdict.HEALTHY), identity=two_devices)
    measured = Measured(found)
    monkeypatch.setattr("ckptfix.devices.probe.measuring.measure", measured)
    assert [probe.unproven_pairs() for _ in range(3)] == [{(0, 1)}] * 3
    assert probe.cached_report() == found


@pytest.mark.filterwarnings("ignore:.*cannot save the probe's verdicts")
def test_damage_that_cannot_be_kept_is_not_forgotten_for_an_older_proof(
    two_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daily look finds damage on a full disk."""
    now = 1000.0 + DAY
    monkeypatch.setattr("ckptfix.devices.probe.seconds_since_boot", lambda: now)
    pairs = {
        key: replace(one(Verdict.HEALTHY, plan="full", began=970.0, measured=1000.0), pair=key)
        for key in ((0, 1), (1, 0))
    }
    probe.remember(ProbeReport(pairs=pairs, seed=1, identity=two_devices))
    wrong = {(0, 1): one(Verdict.WRONG, 2, "sample", kind="zeros", began=now - 1.0, measured=now)}
    measured = Measured(ProbeReport(pairs=wrong, seed=2, identity=two_devices))
    monkeypatch.setattr("ckptfix.devices.probe.measuring.measure", measured)

    def full(path: Any, data: bytes) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(probe.cache, "_write", full)
    assert [probe.unproven_pairs() for _ in range(3)] == [{(0, 1)}] * 3
    known = probe.cached_report()
    assert known is not None
    assert known.unproven == {(0, 1)}


def test_what_another_process_decides_meanwhile_is_known_here(
    two_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    undecided = report(
        (0, 1, Verdict.INCONCLUSIVE), (1, 0, Verdict.INCONCLUSIVE), identity=two_devices
    )
    monkeypatch.setattr("ckptfix.devices.probe.measuring.measure", Measured(undecided))
    assert probe.unproven_pairs() == {(0, 1), (1, 0)}
    doctors = report((0, 1, Verdict.HEALTHY), (1, 0, Verdict.WRONG), identity=two_devices)
    probe.cache.store(doctors)
    assert probe.unproven_pairs() == {(1, 0)}
    assert probe.cached_report() == doctors


def test_remembering_says_what_is_known_then(two_devices: dict[str, Any]) -> None:
    probe.remember(report((0, 1, Verdict.WRONG), identity=two_devices))
    weaker = report((0, 1, Verdict.HEALTHY), (1, 0, Verdict.HEALTHY), identity=two_devices)
    assert probe.remember(weaker).unproven == {(0, 1)}
    nowhere = replace(weaker, identity={})
    assert probe.remember(nowhere) == nowhere


# ---- what several processes found


def one(verdict: Verdict, seed: int = 1, plan: str = "quick", **more: Any) -> PairReport:
    return PairReport(pair=(0, 1), verdict=verdict, seed=seed, plan=plan, **more)


@pytest.mark.parametrize("plan", ["quick", "full", "sample"])
@pytest.mark.parametrize("blind", [False, True])
def test_an_inconclusive_probe_takes_nothing_back(plan: str, blind: bool) -> None:
    healthy = one(Verdict.HEALTHY, done={"a": 3}, measured=5.0)
    later = one(Verdict.INCONCLUSIVE, 2, plan, blind=blind, measured=9.0, detail="no memory")
    known = later.over(healthy)
    assert known is not None
    assert (known.verdict, known.measured, known.plan) == (Verdict.HEALTHY, 5.0, "quick")


proving = st.builds(
    one,
    st.sampled_from([Verdict.HEALTHY, Verdict.INCONCLUSIVE]),
    st.integers(1, 3),
    st.sampled_from(["quick", "full"]),
    done=st.dictionaries(st.sampled_from("abc"), st.integers(1, 9)),
    tried=st.dictionaries(
        st.sampled_from("123"),
        st.dictionaries(st.just("small dense"), st.integers(1, 9)),
        max_size=2,
    ),
    measured=st.floats(0.0, 10.0),
)


@given(st.lists(proving, min_size=1, max_size=4), st.randoms())
def test_evidence_adds_up_in_any_order_and_once(reports: list[PairReport], lot: Any) -> None:
    def together(some: list[PairReport]) -> PairReport:
        known: PairReport | None = None
        for report in some:
            known = report.over(known)
        assert known is not None
        return known

    def facts(report: PairReport) -> Any:
        return report.verdict, report.plan, report.done, report.trials_by_kind(), report.tried

    shuffled = [*reports, lot.choice(reports)]
    lot.shuffle(shuffled)
    assert facts(together(shuffled)) == facts(together(reports))
    best = together(reports)
    assert (best.verdict is Verdict.HEALTHY) == any(it.verdict is Verdict.HEALTHY for it in reports)
    for name in best.done:
        assert best.done[name] == max(it.done.get(name, 0) for it in reports)


timed = st.builds(
    lambda verdict, plan, began, lasted: one(
        verdict, plan=plan, began=began, measured=began + lasted
    ),
    st.sampled_from([Verdict.HEALTHY, Verdict.WRONG, Verdict.HANG, Verdict.INCONCLUSIVE]),
    st.sampled_from(["quick", "full"]),
    st.sampled_from([2.0, 4.0, 6.0, 8.0]),
    st.sampled_from([1.0, 3.0, 5.0]),
)


@given(st.lists(timed, min_size=1, max_size=5), st.randoms())
@example(
    [
        one(Verdict.WRONG, began=6.0, measured=9.0),
        one(Verdict.HANG, began=2.0, measured=3.0),
        one(Verdict.HEALTHY, plan="full", began=4.0, measured=5.0),
    ],
    random.Random(5),
)
def test_no_order_of_taking_in_hides_damage_that_is_newer_than_every_proof(
    reports: list[PairReport], lot: Any
) -> None:
    shuffled = list(reports)
    lot.shuffle(shuffled)
    known: PairReport | None = None
    for report in shuffled:
        known = report.over(known)
    assert known is not None
    proofs = [it.began for it in reports if (it.verdict, it.plan) == (Verdict.HEALTHY, "full")]
    newest = max(
        (it.measured for it in reports if it.verdict in (Verdict.WRONG, Verdict.HANG)), default=0.0
    )
    if newest > max(proofs, default=0.0):
        assert known.verdict in (Verdict.WRONG, Verdict.HANG)
    else:
        assert (known.verdict is Verdict.HEALTHY) == any(
            it.verdict is Verdict.HEALTHY for it in reports
        )


def test_a_sample_renews_what_was_proven_and_proves_nothing() -> None:
    healthy = one(Verdict.HEALTHY, measured=5.0, done={"a": 3})
    sample = one(Verdict.HEALTHY, 2, "sample", measured=9.0)
    renewed = sample.over(healthy)
    assert renewed is not None
    assert (renewed.plan, renewed.measured, renewed.done) == ("quick", 9.0, {"a": 3})
    begun = one(Verdict.INCONCLUSIVE, measured=5.0)
    for older in (None, one(Verdict.WRONG), one(Verdict.UNUSABLE)):
        assert sample.over(older) is older
    known = sample.over(begun)
    assert known is not None
    assert known.verdict is Verdict.INCONCLUSIVE
    wrong = one(Verdict.WRONG, 2, "sample", kind="zeros")
    assert wrong.over(healthy) is wrong


DAY = 24 * 3600.0


def test_healthy_pairs_are_looked_at_again_after_a_day_by_one_process(
    two_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("ckptfix.devices.probe.seconds_since_boot", lambda: now[0])
    pairs = {
        (0, 1): one(Verdict.HEALTHY, measured=now[0]),
        (1, 0): replace(one(Verdict.HEALTHY, measured=now[0] - 9.0), pair=(1, 0)),
    }
    probe.remember(ProbeReport(pairs=pairs, seed=1, identity=two_devices))
    sampled = {
        pair: replace(found, plan="sample", seed=2, measured=1000.0 + DAY)
        for pair, found in pairs.items()
    }
    answer = ProbeReport(pairs=sampled, seed=2, identity=two_devices)
    later = {
        (0, 1): replace(sampled[0, 1], measured=1000.0 + 2 * DAY),
        (1, 0): replace(sampled[1, 0], verdict=Verdict.WRONG),
    }
    measured = Measured(answer, replace(answer, pairs=later))
    monkeypatch.setattr("ckptfix.devices.probe.measuring.measure", measured)
    assert probe.unproven_pairs() == frozenset()
    assert measured.asked == [], "not yet"
    now[0] += DAY
    with probe.cache.only_one(two_devices):
        assert probe.unproven_pairs() == frozenset()
        assert measured.asked == [], "another process does it"
    assert probe.unproven_pairs() == frozenset()
    assert measured.asked == [((1, 0), (0, 1))], "the oldest first"
    another_process(monkeypatch)
    assert probe.unproven_pairs() == frozenset()
    assert len(measured.asked) == 1, "it is remembered when"
    now[0] += DAY
    assert probe.unproven_pairs() == {(1, 0)}, "a wrong copy counts"
    another_process(monkeypatch)
    assert probe.unproven_pairs() == {(1, 0)}


def test_a_report_of_the_future_is_old(
    two_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock of another namespace: what cannot be compared is looked at."""
    monkeypatch.setattr("ckptfix.devices.probe.seconds_since_boot", lambda: 5.0)
    pairs = {
        (0, 1): one(Verdict.HEALTHY, measured=900.0),
        (1, 0): replace(one(Verdict.HEALTHY), pair=(1, 0)),
    }
    known = ProbeReport(pairs=pairs, seed=1, identity=two_devices)
    assert probe._healthy_for_long(known) == [(0, 1)]
