"""Nothing is proven of nothing: no tensor, no element, no room, a name that stands for nothing."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptfix.devices.probe.probe_report import PairReport, ProbeReport, Verdict
from ckptfix.devices.reload.arrivals import Tally
from ckptfix.devices.reload.reload_report import Accelerators, Outcome, Subject
from ckptfix.devices.reload.verifying import judge_pairs, verify_reload
from ckptfix.devices.torch_devices import device_count
from ckptfix.hardware import Pair
from tests.devices.reload_models import Head, eights, save_model
from tests.devices.test_reload import outcomes, text_of

on_a_cpu = pytest.mark.skipif(
    device_count() > 0, reason="these say what a machine without accelerator proves"
)


@on_a_cpu
@pytest.mark.parametrize("model", [None, torch.nn.ReLU])
def test_a_file_without_a_tensor_proves_nothing(tmp_path: Path, model: Any) -> None:
    save_file({}, str(tmp_path / "model.safetensors"))
    report = verify_reload(tmp_path, model=model)
    assert not [proof for proof in report.proofs if proof.outcome is Outcome.PROVEN], str(report)
    assert "there are no tensors to place" in text_of(
        report, Subject.DEVICE_MAP, Outcome.NOT_EXERCISED
    )
    assert Subject.DEVICE_MAP in {proof.subject for proof in report.unproven_transfers}


def test_tensors_without_an_element_prove_nothing() -> None:
    tally = Tally(subject=Subject.PLACEMENT, what="there and back", is_transfer=True)
    tally.arrived(0)
    (proof,) = tally.proofs()
    assert proof.outcome is Outcome.NOT_EXERCISED
    assert "all empty" in proof.text
    tally.arrived(4)
    assert [one.outcome for one in tally.proofs()] == [Outcome.PROVEN]


@pytest.mark.parametrize("answered", [[], [(0, 1)]])
def test_pairs_that_the_probe_left_out_are_not_proven(answered: list[Pair]) -> None:
    pairs = {pair: PairReport(pair=pair, verdict=Verdict.HEALTHY, seed=1) for pair in answered}
    machine = Accelerators(accelerator="cuda", names=("Card", "Card"))
    (proof,) = judge_pairs(machine, ProbeReport(pairs=pairs, seed=1))
    assert proof.outcome is Outcome.NOT_EXERCISED
    assert "1 -> 0" in proof.text


@on_a_cpu
@pytest.mark.parametrize("free", [63, 10])
def test_no_room_for_a_tensor_is_found_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """A file that is mapped ends the process with SIGBUS where the disk is full."""
    folder = save_model(tmp_path / "checkpoint", Head())
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    for device_map in ("auto", {"": "disk"}):
        report = verify_reload(folder, device_map=device_map)
        assert report.status == 0, str(report)
        says = text_of(report, Subject.DISK_OFFLOAD, Outcome.NOT_EXERCISED)
        assert f"{2 if free == 63 else 4} tensors" in says
        assert "set TMPDIR" in says


@on_a_cpu
def test_room_is_asked_for_what_the_model_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "checkpoint", Head().half())
    usage = shutil.disk_usage(tmp_path)._replace(
        free=400
    )  # more than the file has, less than the model in float32
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    report = verify_reload(folder, model=lambda: (Head(), eights()))
    says = text_of(report, Subject.DISK_OFFLOAD, Outcome.NOT_EXERCISED)
    assert "the model offloaded to disk: not enough space in" in says
    assert "(576 B needed)" in says


@on_a_cpu
@pytest.mark.parametrize("model", [None, lambda: (Head(), eights())])
def test_a_name_of_the_map_that_stands_for_nothing_is_said(tmp_path: Path, model: Any) -> None:
    folder = save_model(tmp_path / "checkpoint", Head())
    report = verify_reload(folder, device_map={"frist": 1, "": "cpu"}, model=model)
    assert report.status == 0
    says = text_of(report, Subject.DEVICE_MAP, Outcome.NOT_EXERCISED)
    assert "1 name in the map without effect" in says
    assert "'frist'" in says
    assert "no device 1" not in str(report), "nothing is on it"
    assert Subject.DEVICE_MAP in {proof.subject for proof in report.unproven_transfers}
    report = verify_reload(folder, device_map={"first": "cpu", "last": "cpu"}, model=model)
    assert outcomes(report, Subject.DEVICE_MAP) == [Outcome.PROVEN]
