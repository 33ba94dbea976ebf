"""One probe, with a bench in place of the worker: whose devices are measured. No device is
needed.
"""

from typing import Any

import pytest

from ckptfix.devices.probe import measuring
from ckptfix.devices.probe.probe_report import Verdict
from ckptfix.devices.probe.task import Ending, Task, TaskResult
from ckptfix.devices.torch_devices import Machine

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
        return TaskResult(ending=Ending.DONE, trials=10)

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
    assert {(found.plan, found.blind) for found in report.pairs.values()} == {("quick", False)}


def test_what_hides_faults_is_noted_with_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setattr(measuring, "InProcess", lambda: Worker(machine("a", "b")))
    report = measuring.measure(PAIRS, budget=3.0, seed=1, in_process=True, here=HERE)
    assert all(found.blind for found in report.pairs.values())
    assert any("; no pair is remembered as healthy" in line for line in report.not_exercised)
