"""The probe in a process of its own, on simulated devices: faults that hang it, end it, or take a
device with them; and several ranks that ask at once.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.simulated import requires_simulator
from tests.simulated.processes import Faults, run_simulated, start_simulated, variables

pytestmark = [pytest.mark.slow, requires_simulator]

PROBE = """
import json
from ckptfix.devices import probe
probe._REPEATED = 0
print(json.dumps(probe.probe_peer_copies(budget={budget}, seed={seed}).to_json()))
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


def test_a_broken_pair_hangs_raises_or_takes_its_device_along_and_the_others_are_measured() -> None:
    faults: Faults = {
        (0, 1): "hang",
        (1, 2): "assert",
        (2, 0): {"kind": "error", "every": 50},
        (1, 0): {"kind": "zeros", "every": 150},
    }
    report = probed(budget=60.0, faults=faults)
    assert verdicts(report) == {
        (0, 1): ("hang", "hang"),
        (0, 2): ("healthy", ""),
        (1, 0): ("wrong", "zeros"),
        (1, 2): ("wrong", "error"),
        (2, 0): ("wrong", "error"),
        (2, 1): ("healthy", ""),
    }
    details = {tuple(found["pair"]): found["detail"] for found in report["pairs"]}
    assert "did not end within 10.0 s" in details[0, 1]
    assert "device-side assert triggered" in details[1, 2]
    assert any("2 ordered pairs at once" in line for line in report["exercised"])
    assert report["starting"] > 0


def test_a_copy_that_kills_the_process_is_a_crash_of_its_pair(tmp_path: Path) -> None:
    # What an abort inside the driver looks like: the process of the probe dies in a copy of 0 -> 1.
    (tmp_path / "aborting.py").write_text(
        "import os\nfrom ckptfix.devices.probe import worker\nmake = worker.make_batch\n"
        "def make_or_abort(cases, pair, row, seed, announce):\n"
        "    ends = lambda stage: (announce(stage), stage and pair == (0, 1) and os.abort())\n"
        "    return make(cases, pair, row, seed, ends)\n"
        "worker.make_batch = make_or_abort\n"
    )
    code = (
        "from ckptfix.devices.probe import measuring\nimport sys\n"
        "command = measuring.worker_command\nmeasuring.worker_command = lambda: "
        "[part.replace('from ckptfix', 'import aborting; from ckptfix') for part in command()]\n"
        f"sys.path.append({str(tmp_path)!r})\n" + PROBE.format(budget=120.0, seed=1).strip()
    )
    found = verdicts(json.loads(run_simulated(code, 2)))
    assert found == {(0, 1): ("wrong", "crash"), (1, 0): ("healthy", "")}


def test_without_memory_pairs_are_inconclusive() -> None:
    report = probed(count=2, memory=40 << 20)
    assert {verdict for verdict, _ in verdicts(report).values()} == {"inconclusive"}
    details = [found["detail"] for found in report["pairs"]]
    assert all("no memory for " in detail and "out of memory" in detail for detail in details)


RANK = """
import sys
import ckptfix.devices.probe as probe
from ckptfix.devices.probe import measuring
measure = measuring.measure
def noted(*arguments, **options):
    print("measured")
    return measure(*arguments, **options)
measuring.measure = noted
print(sorted(probe.unproven_pairs(budget=600.0)), sorted(probe.unproven_pairs()))
"""


def test_of_ranks_that_ask_at_once_one_measures_and_all_know(tmp_path: Path) -> None:
    """They wait at its lock; a later process reads, and one with another allocator measures."""
    environment = {
        **variables(2, faults={(0, 1): "stale"}),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    printed = []
    for rank in ranks:
        with rank:
            assert rank.stdout is not None
            printed.append(rank.stdout.read().split("\n"))
    assert sorted(line for lines in printed for line in lines if line) == [
        "[(0, 1)] [(0, 1)]",
        "[(0, 1)] [(0, 1)]",
        "measured",
    ]
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    assert run_simulated(RANK, 2, environment=cache) == "[(0, 1)] [(0, 1)]\n"
    other = {**cache, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = start_simulated(["-c", "import torch\n" + RANK], 2, environment=other)
    assert done.stdout == "measured\n[] []\n", "its links are healthy now"
    assert {name.rpartition(".")[2] for name in os.listdir(tmp_path / "ckptfix")} == {
        "json",
        "lock",
    }


def test_a_torch_without_accelerator_leaves_side_streams_out_and_says_so() -> None:
    code = """
    import json
    import torch
    import torch.cuda
    del torch.accelerator
    del torch.library.get_kernel
    from ckptfix.devices import probe
    probe._REPEATED = 0
    print(json.dumps(probe.probe_peer_copies(budget=600.0, seed=1, in_process=True).to_json()))
    """
    report = json.loads(run_simulated(code, 2, faults={(0, 1): "zeros"}))
    assert verdicts(report) == {(0, 1): ("wrong", "zeros"), (1, 0): ("healthy", "")}
    assert "side streams: this torch has no torch.accelerator" in report["not_exercised"]


def test_one_simulated_device_has_nothing_to_exercise() -> None:
    report = probed(count=1)
    assert report["pairs"] == report["exercised"] == []
    assert "one device" in report["not_exercised"][0]
