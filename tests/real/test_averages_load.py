"""Healthy scripts with timm's and transformers' averages load the same values before and after the
default repair.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptfix import check, repair
from tests.real.averages import CASES
from tests.sampling import one_of
from tests.timm_library import needs_timm

ROOT = Path(__file__).resolve().parents[2]


def script(verb: str, folder: Path, processes: int) -> dict[str, Any]:
    """Run the script and return the digests by case."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(processes),
        ]
    done = subprocess.run(
        [*launcher, "-m", "tests.real.averages", verb, str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / f"{verb}.json").read_text())
    return found


@pytest.mark.slow
@needs_timm
@pytest.mark.parametrize("processes", one_of([1, 2]))
def test_an_average_loads_before_and_after_a_repair(tmp_path: Path, processes: int) -> None:
    saved = script("save", tmp_path, processes)
    assert list(saved) == list(CASES)
    shutil.copytree(tmp_path, tmp_path / "before")
    for case, is_trained in CASES.items():
        report = check(tmp_path / case)
        codes = {finding.code for finding in report.findings if finding.severity.value != "note"}
        assert codes == (set() if is_trained else {"identical-models"}), (case, str(report))
        receipt = repair(tmp_path / case)
        assert (receipt.steps, receipt.status) == ((), int(not is_trained)), case
    assert script("load", tmp_path / "before", processes) == saved
    assert script("load", tmp_path, processes) == saved
