"""A transformers Trainer that is killed at every file of a save goes on from a complete checkpoint,
to the same end.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed_library import NO_DEEPSPEED, has_deepspeed, variables
from tests.sampling import one_of
from tests.training.rank_cases import ROOT, run_python

OLDEST = ROOT / ".venv/transformers-4.44"
"""Where the oldest transformers that is supported was installed; without it the tests of it are
skipped.
"""

pytestmark = pytest.mark.slow

ADAPTED = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
"""transformers 4.44 does not read its own random states with torch 2.6 and later, which has this
switch for it.
"""


def sweep(
    folder: Path, processes: int, victim: int, environment: dict[str, str], stage: int = 0
) -> list[dict[str, Any]]:
    printed = run_python(
        *("-W", "ignore", "-m", "tests.training.trainer_kills", str(folder)),
        *map(str, (processes, victim, stage)),
        variables={"HF_HUB_OFFLINE": "1", **environment},
        timeout=3000,
    )
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("version", "processes", "victim"),
    one_of(
        (version, *ranks) for version in ("newest", "oldest") for ranks in ((1, 0), (2, 0), (2, 1))
    ),
)
def test_killed_at_any_file(tmp_path: Path, version: str, processes: int, victim: int) -> None:
    pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install ckptfix[transformers]"
    )
    environment = {}
    if version == "oldest":
        if not OLDEST.is_dir():
            pytest.skip(
                f"no {OLDEST}: transformers 4.44.2 is installed there by the README's test command"
            )
        environment = {**ADAPTED, "PYTHONPATH": str(OLDEST)}
    first, *killed = sweep(tmp_path, processes, victim, environment)
    assert first["transformers"].startswith("4.44.") == (version == "oldest")
    assert first["steps"] > (60 if victim == 0 else 12)
    resumed_from_complete_ones(first, killed)


def resumed_from_complete_ones(first: dict[str, Any], killed: list[dict[str, Any]]) -> None:
    assert first["names"] == ["checkpoint-6", "checkpoint-8"]
    assert first["as stock"], "the losses and weights of a run without ckptfix"
    assert killed
    for one in killed:
        assert one["killed"]
        assert one["problems"] == {}, "a killed save leaves nothing that looks like a checkpoint"
        assert one["newest"] in (4, 6)
        assert one["same"], (
            "it resumed, and has the losses and weights of the run that was not killed"
        )
        assert one["after"] == first["names"]
        assert one["left"] == [], "the next save removes what the killed one left"


DEEPSPEED = [(stage, victim) for stage in (2, 3) for victim in (0, 1)]


@pytest.mark.skipif(not has_deepspeed(), reason=NO_DEEPSPEED)
@pytest.mark.parametrize(("stage", "victim"), one_of(DEEPSPEED))
def test_killed_at_any_file_under_deepspeed(tmp_path: Path, stage: int, victim: int) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    first, *killed = sweep(tmp_path, 2, victim, variables(), stage)
    assert first["steps"] > (60 if victim == 0 else 12)
    resumed_from_complete_ones(first, killed)
