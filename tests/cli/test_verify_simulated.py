"""``ckptfix verify`` as a command, with its own probe, on simulated devices."""

import json
from pathlib import Path

import pytest

from tests.devices.reload_models import save_transformer
from tests.html_pages import Page
from tests.sampling import one_of
from tests.simulated import requires_simulator
from tests.simulated.models import THREE
from tests.simulated.processes import start_simulated

pytestmark = [pytest.mark.slow, requires_simulator]

MODEL = "tests.devices.reload_models:split"


@pytest.mark.parametrize("fault", one_of([None, "zeros", "hang"]))
def test_the_command_finds_the_pair_on_simulated_devices(tmp_path: Path, fault: str | None) -> None:
    folder = save_transformer(tmp_path / "checkpoint")
    device_map, page = tmp_path / "map.json", tmp_path / "report.html"
    device_map.write_text(json.dumps(THREE))
    arguments = [
        "-m",
        "ckptfix",
        "verify",
        str(folder),
        "--device-map",
        str(device_map),
        "--model",
        MODEL,
    ]
    options = ["--repeats", "2", "--require-transfer-proof", "--html", str(page)]
    faults = {} if fault is None else {(0, 1): fault}
    done = start_simulated([*arguments, *options], 3, faults=faults)
    assert done.returncode == int(fault is not None), done.stdout + done.stderr
    assert "3 cuda devices (Simulated" in done.stdout, "a report of a simulation says so"
    parsed = Page(page.read_text())
    assert "from \\ to" in parsed.text
    if fault is None:
        assert "no fault found in what was exercised" in done.stdout
        assert "direct split over 0, 1, 2 == staged split" in done.stdout
    else:
        assert f"0 -> 1 {'hang' if fault == 'hang' else 'wrong: zeros'}" in done.stdout
        assert ("only this pair copies directly: 0 -> 1" in parsed.text) == (fault == "zeros")
