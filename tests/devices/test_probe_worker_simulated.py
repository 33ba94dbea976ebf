"""The probe in a process of its own, on simulated devices: faults that hang it, end it, or take a
device with them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.simulated import requires_simulator
from tests.simulated.processes import Faults, run_simulated, start_simulated

pytestmark = [pytest.mark.slow, requires_simulator]

PROBE = """
import json
from msgspec.structs import replace
from ckptfix.devices.probe import measuring
planned = measuring.plan_for
measuring.plan_for = lambda budget: replace(planned(budget), again=0)
from ckptfix.devices.probe import probe_peer_copies
print(json.dumps(probe_peer_copies(budget={budget}, seed={seed}).to_json()))
"""


def probed(
    *,
    budget: float = 600.0,
    seed: int = 1,
    count: int = 3,
    faults: Faults | None = None,
    **more: Any,
) -> Any:
    return json.loads(
        run_simulated(
            PROBE.format(budget=budget, seed=seed), count, faults=faults, timeout=900, **more
        )
    )


def verdicts(report: Mapping[str, Any]) -> dict[tuple[int, int], tuple[str, str]]:
    return {tuple(found["pair"]): (found["verdict"], found["kind"]) for found in report["pairs"]}


def test_healthy_simulated_devices_complete_the_full_plan() -> None:
    report = probed()
    assert set(verdicts(report).values()) == {("healthy", "")}, report
    assert all(found["trials"] > 500 for found in report["pairs"])
    assert any("full plan" in line for line in report["exercised"])
    assert any("6 ordered pairs at once" in line for line in report["exercised"])
    assert any("6 chains" in line for line in report["exercised"])
    assert not any("budget" in line for line in report["not_exercised"])
    assert report["hints"] == [], "nothing is suspect"
    assert report["starting"] > 0


def test_a_broken_pair_hangs_raises_or_takes_its_device_along_and_the_others_are_measured() -> None:
    faults: Faults = {
        (0, 1): "hang",
        (1, 2): "assert",
        (2, 0): {"kind": "error", "every": 50},
        (1, 0): {"kind": "zeros", "every": 150},
    }
    report = probed(budget=120.0, faults=faults)
    assert verdicts(report) == {
        (0, 1): ("hang", "hang"),
        (0, 2): ("healthy", ""),
        (1, 0): ("wrong", "zeros"),
        (1, 2): ("wrong", "error"),
        (2, 0): ("wrong", "error"),
        (2, 1): ("healthy", ""),
    }
    details = {tuple(found["pair"]): found["detail"] for found in report["pairs"]}
    assert "did not end within 20.0 s" in details[0, 1]
    assert "device-side assert triggered" in details[1, 2]


def test_a_copy_that_kills_the_process_is_a_crash_of_its_pair(tmp_path: Path) -> None:
    # What an abort inside the driver looks like: the process of the probe dies in a copy of 0 -> 1.
    (tmp_path / "aborting.py").write_text(
        "import os, torch\nfrom ckptfix.devices.probe import trials\nrun = "
        "trials.PairTrials.run\ndef run_or_abort(self, case, seed):\n    announce = "
        "self._announce\n    self._announce = lambda stage: (announce(stage), stage and self.pair "
        "== (0, 1) and os.abort())\n    try:\n        return run(self, case, seed)\n    "
        "finally:\n        self._announce = announce\ntrials.PairTrials.run = run_or_abort\n"
    )
    code = (
        "import sys\nfrom ckptfix.devices.probe import measuring\nmeasuring._BEGIN = "
        "measuring._BEGIN.replace('from ckptfix', 'import aborting; from ckptfix', "
        f"1)\nsys.path.append({str(tmp_path)!r})\n" + PROBE.format(budget=9.0, seed=1).strip()
    )
    found = verdicts(json.loads(run_simulated(code, 2)))
    assert found[0, 1] == ("wrong", "crash")
    assert found[1, 0][0] in ("healthy", "inconclusive")


def test_without_memory_pairs_are_inconclusive() -> None:
    report = probed(count=2, memory=40 << 20)
    assert {verdict for verdict, _ in verdicts(report).values()} == {"inconclusive"}
    details = [found["detail"] for found in report["pairs"]]
    assert all("no memory for " in detail and " free" in detail for detail in details), details


def test_auto_measures_in_one_process_and_the_next_one_reads(tmp_path: Path) -> None:
    code = """
    import ckptfix.devices.probe as probe
    from ckptfix.devices.probe import measuring
    from tests.simulated.simulator import running
    print(sorted(probe.unproven_pairs(budget=9.9)))
    measuring.measure = None
    print(sorted(probe.unproven_pairs()), probe.cached_report().pairs[0, 1].kind)
    """
    again = """
    import ckptfix.devices.probe as probe
    from ckptfix.devices.probe import measuring
    measuring.measure = None
    print(sorted(probe.unproven_pairs()), probe.cached_report().pairs[0, 1].kind)
    """
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    faults: Faults = {(0, 1): "stale"}
    assert run_simulated(code, 2, faults=faults, environment=environment, timeout=600).split("\n")[
        :2
    ] == [
        "[(0, 1)]",
        "[(0, 1)] stale",
    ]
    assert run_simulated(again, 2, environment=environment) == "[(0, 1)] stale\n"
    other = {**environment, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = start_simulated(
        ["-c", "import torch\n" + again.replace("    ", "")], 2, environment=other
    )
    assert done.returncode != 0, "another allocator is another key: it would measure"
    assert "NoneType" in done.stderr


def test_a_torch_without_accelerator_leaves_side_streams_out_and_says_so() -> None:
    code = """
    import json
    import torch
    import torch.cuda
    del torch.accelerator
    del torch.library.get_kernel
    from ckptfix.devices.probe import probe_peer_copies
    print(json.dumps(probe_peer_copies(budget=9.9, seed=1, in_process=True).to_json()))
    """
    report = json.loads(run_simulated(code, 2, faults={(0, 1): "zeros"}))
    assert verdicts(report)[0, 1] == ("wrong", "zeros")
    assert verdicts(report)[1, 0][0] in ("healthy", "inconclusive")
    assert "side streams: this torch has no torch.accelerator" in report["not_exercised"]


def test_one_simulated_device_has_nothing_to_exercise() -> None:
    report = probed(count=1)
    assert report["pairs"] == report["exercised"] == []
    assert "one device" in report["not_exercised"][0]


def test_of_simulated_pairs_at_once_the_one_that_failed_is_named() -> None:
    code = """
    from collections import defaultdict, deque
    from ckptfix.devices.probe.cases import QUICK
    from ckptfix.devices.probe.bulk import Row, run_large
    from ckptfix.devices.probe.payload import Memory
    from tests.simulated.simulator import running
    row, earlier, said = Row(34 << 20, 1), defaultdict(deque), []
    pairs, seeds = ((0, 1), (2, 3)), iter(range(99))
    for kind in (None, "partial", "late"):
        running().clear()
        if kind:
            running().fault(2, 3, kind)
        for case in QUICK.sections[-1].cases[:2]:
            found = run_large(case, pairs, row, (next(seeds), next(seeds)), Memory(), said.append, earlier.__getitem__)
            print(kind, [(failure.pair, failure.kind) for failure in found], said[-1])
    print(said[0], {pair: len(its) for pair, its in earlier.items()})
    """
    assert run_simulated(code, 4).splitlines() == [
        "None [] None",
        "None [] None",
        "partial [((2, 3), 'partial')] None",
        "partial [((2, 3), 'partial')] None",
        "late [((2, 3), 'late')] None",
        "late [((2, 3), 'late')] None",
        (
            "copy_() of 33.0 MiB + 13 B, uint8 over 2 pairs without a device in common {(0, 1): 6, "
            "(2, 3): 6}"
        ),
    ]
