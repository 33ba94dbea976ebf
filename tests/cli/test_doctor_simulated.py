"""``ckptfix doctor`` on simulated devices, each command line in a process of its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.simulated import requires_simulator
from tests.simulated.processes import Faults, start_simulated

pytestmark = [pytest.mark.slow, requires_simulator]


def doctor(
    home: Path, *arguments: str, count: int = 2, faults: Faults | None = None
) -> tuple[int, dict[str, Any]]:
    """Run the command; return its status and its JSON object. What is remembered lies under
    ``home``.
    """
    done = start_simulated(
        ["-m", "ckptfix", "doctor", *arguments, "--json"],
        count,
        faults=faults,
        environment={
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
            "HF_HOME": str(home / "hf"),
        },
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def codes(document: dict[str, Any]) -> dict[str, str]:
    return {advice["code"]: advice["severity"] for advice in document["advice"]}


def test_devices_are_seen(tmp_path: Path) -> None:
    status, document = doctor(tmp_path, count=3)
    assert status == int(set(codes(document).values()) != {"note"})
    assert len(document["environment"]["devices"]) == 3
    assert document["environment"]["accelerator"] == "cuda"
    assert codes(document)["no-accelerate-config"] == "note"
    (advice,) = (one for one in document["advice"] if one["code"] == "no-accelerate-config")
    assert "accelerate launch starts 3 processes here" in advice["message"]
    assert codes(document)["pairs-unproven"] == "note"
    assert (
        "whether copies between devices are correct (ckptfix doctor --peer-copies)"
        in document["not_checked"]
    )


def test_a_broken_pair_is_found_named_and_remembered(tmp_path: Path) -> None:
    status, document = doctor(
        tmp_path, "--peer-copies", "--budget", "4", "--seed", "7", faults={(1, 0): "zeros"}
    )
    assert status == 1
    verdicts = {tuple(found["pair"]): found["verdict"] for found in document["pairs"]}
    assert verdicts[1, 0] == "wrong"
    assert document["seed"] == 7
    status, document = doctor(tmp_path)
    assert status == 1
    unhealthy = [advice for advice in document["advice"] if advice["code"] == "pair-not-healthy"]
    assert any(
        "from device 1 to device 0 arrive wrong" in advice["message"] for advice in unhealthy
    )
    assert "pairs-unproven" not in codes(document)


def test_healthy_pairs_are_status_0_and_no_more_is_said(tmp_path: Path) -> None:
    status, document = doctor(tmp_path, "--peer-copies", "--budget", "25")
    assert {tuple(found["pair"]): found["verdict"] for found in document["pairs"]} == {
        (0, 1): "healthy",
        (1, 0): "healthy",
    }
    assert status == 0
    assert document["exercised"]


def test_the_matrix_for_people(tmp_path: Path) -> None:
    done = start_simulated(
        ["-m", "ckptfix", "doctor", "--peer-copies", "--budget", "4"],
        2,
        faults={(0, 1): "zeros"},
        environment={"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "from \\ to" in done.stdout
    assert "0 -> 1 wrong" in done.stdout
    assert "ckptfix doctor --peer-copies --seed " in done.stdout


def test_in_process_sees_the_same_devices(tmp_path: Path) -> None:
    _, document = doctor(tmp_path, "--in-process", count=2)
    assert len(document["environment"]["devices"]) == 2


def test_a_map_names_a_device_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(json.dumps({"model": 5, "lm_head": 0}))
    _, document = doctor(tmp_path, "--device-map", str(tmp_path / "map.json"))
    assert codes(document)["device-map-missing-device"] == "error"
