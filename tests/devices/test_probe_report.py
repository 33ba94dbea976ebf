"""What a report says, to people and as JSON. No device is needed."""

import json
from typing import Any

import pytest
from msgspec import convert, to_builtins
from msgspec.structs import replace

import ckptfix.devices.probe as probe
from ckptfix.devices.probe.probe_report import PairReport, ProbeReport, Verdict, seconds_since_boot
from ckptfix.devices.probe.trials import Failure, Kind
from ckptfix.devices.probe.worker import Ending, Task, TaskResult, Work
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
    older = report((0, 1, Verdict.INCONCLUSIVE), (1, 0, Verdict.WRONG))
    assert older.renewed_by(report((0, 1, Verdict.HEALTHY))).unproven == {(1, 0)}


def test_json_has_the_keys_of_0_5_0() -> None:
    pair = PairReport(pair=(0, 1), verdict=Verdict.HEALTHY, seed=1, made={"small dense": 3})
    document = ProbeReport(pairs={(0, 1): pair}, seed=1, hosts={0: 2.0}).to_json()
    assert set(document) == {
        "pairs",
        "seed",
        "seconds",
        "starting",
        "devices",
        "exercised",
        "not_exercised",
        "hints",
        "identity",
        "hosts",
    }
    (written,) = document["pairs"]
    assert set(written) >= {
        "pair",
        "verdict",
        "kind",
        "first_offset",
        "trials",
        "failures",
        "seed",
        "detail",
        "peer_access",
        "plan",
        "blind",
        "done",
        "tried",
        "began",
        "measured",
    }
    assert written["tried"] == {"1": written["done"]} == {"1": {"small dense": 3}}
    assert document["hosts"] == [[0, 2.0]]


def test_tasks_results_and_machines_survive_the_pipe() -> None:
    task = Task(work=Work.TOGETHER, pairs=((0, 1), (1, 2), (2, 0)), seed=2**62, round=3)
    failure = Failure(pair=(0, 1), kind=Kind.LATE, case="c")
    result = TaskResult(
        ending=Ending.RAISED, made={"x": 3}, failures=[failure], stage="s", left_out=["a"]
    )
    machine = Machine(
        names=("a",), pci=("",), peer_access={(0, 1): None, (1, 0): True}, identity={"a": 1}
    )
    assert convert(json.loads(json.dumps(to_builtins(task))), Task) == task
    assert convert(json.loads(json.dumps(to_builtins(result))), TaskResult) == result
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


@pytest.mark.parametrize(("budget", "times"), [(30.0, 4), (60.0, 8), (7.0, 0)])
def test_a_larger_budget_repeats_the_plan_and_auto_makes_it_once(
    two_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch, budget: float, times: int
) -> None:
    asked: list[int] = []

    def measured(pairs: Any, *, times: int = 1, **options: Any) -> ProbeReport:
        asked.append(times)
        return report((0, 1, Verdict.HEALTHY), (1, 0, Verdict.HEALTHY))

    monkeypatch.setattr("ckptfix.devices.probe.measuring.measure", measured)
    probe.probe_peer_copies(budget=budget)
    probe.unproven_pairs(budget=budget)
    assert asked == [times, 1]


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
def test_damage_that_cannot_be_kept_is_not_forgotten_for_an_older_report(
    two_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe finds damage on a full disk, where an undecided report lies."""
    undecided = report((0, 1, Verdict.INCONCLUSIVE), (1, 0, Verdict.HEALTHY), identity=two_devices)
    probe.remember(undecided)
    measured = Measured(report((0, 1, Verdict.WRONG), identity=two_devices))
    monkeypatch.setattr("ckptfix.devices.probe.measuring.measure", measured)

    def full(path: Any, data: bytes, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(probe.cache, "create_file", full)
    assert [probe.unproven_pairs() for _ in range(3)] == [{(0, 1)}] * 3
    known = probe.cached_report()
    assert known is not None
    assert known.pairs[0, 1].verdict is Verdict.WRONG


def test_what_another_rank_measured_meanwhile_is_taken_undecided_or_not(
    two_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one waited for the lock; to measure again would take as long, and find as little."""
    locked = probe.cache.locked

    def after_another(identity: Any) -> Any:
        now = seconds_since_boot() + 1.0
        pairs = {
            key: PairReport(pair=key, verdict=verdict, seed=1, measured=now)
            for key, verdict in (((0, 1), Verdict.INCONCLUSIVE), ((1, 0), Verdict.HEALTHY))
        }
        probe.cache.store(ProbeReport(pairs=pairs, seed=1, identity=two_devices))
        return locked(identity)

    monkeypatch.setattr(probe.cache, "locked", after_another)
    measured = Measured()
    monkeypatch.setattr("ckptfix.devices.probe.measuring.measure", measured)
    assert [probe.unproven_pairs() for _ in range(2)] == [{(0, 1)}] * 2
    assert measured.asked == []


def test_what_another_process_decides_meanwhile_is_known_here(
    two_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    undecided = report(
        (0, 1, Verdict.INCONCLUSIVE), (1, 0, Verdict.INCONCLUSIVE), identity=two_devices
    )
    monkeypatch.setattr("ckptfix.devices.probe.measuring.measure", Measured(undecided))
    assert probe.unproven_pairs() == {(0, 1), (1, 0)}
    doctors = report((0, 1, Verdict.HEALTHY), (1, 0, Verdict.WRONG), identity=two_devices)
    probe.remember(doctors)
    assert probe.unproven_pairs() == {(1, 0)}
    assert probe.cached_report() == doctors


def test_remembering_says_what_is_known_then(two_devices: dict[str, Any]) -> None:
    damage = PairReport(pair=(0, 1), verdict=Verdict.WRONG, seed=1, measured=9.0)
    probe.remember(ProbeReport(pairs={(0, 1): damage}, seed=1, identity=two_devices))
    weaker = report((0, 1, Verdict.HEALTHY), (1, 0, Verdict.HEALTHY), identity=two_devices)
    assert probe.remember(weaker).unproven == {(0, 1)}
    nowhere = replace(weaker, identity={})
    assert probe.remember(nowhere) == nowhere


# ---- what several probes found


def one(verdict: Verdict, **more: Any) -> PairReport:
    return PairReport(pair=(0, 1), verdict=verdict, seed=1, **more)


HEALTHY = one(Verdict.HEALTHY, began=5.0, measured=10.0)
DAMAGE = one(Verdict.WRONG, kind="zeros", began=80.0, measured=90.0)


@pytest.mark.parametrize(
    ("older", "newer", "newer_holds"),
    [
        (HEALTHY, one(Verdict.INCONCLUSIVE), False),
        (HEALTHY, one(Verdict.UNUSABLE), True),
        (HEALTHY, DAMAGE, True),
        (one(Verdict.INCONCLUSIVE), HEALTHY, True),
        (one(Verdict.INCONCLUSIVE, detail="a"), one(Verdict.INCONCLUSIVE), True),
        (one(Verdict.UNUSABLE), one(Verdict.INCONCLUSIVE), True),
        (DAMAGE, one(Verdict.INCONCLUSIVE, began=95.0), False),
        (DAMAGE, one(Verdict.UNUSABLE, began=95.0), False),
        (DAMAGE, one(Verdict.HEALTHY, began=85.0, measured=120.0), False),
        (DAMAGE, one(Verdict.HEALTHY, began=90.0, measured=120.0), True),
        (DAMAGE, one(Verdict.HANG, measured=120.0), True),
        (one(Verdict.HEALTHY, began=85.0, measured=99.0), DAMAGE, True),
    ],
)
def test_damage_stays_until_a_later_probe_finds_none_and_proof_until_damage(
    older: PairReport, newer: PairReport, newer_holds: bool
) -> None:
    assert newer.over(older) is (newer if newer_holds else older)
