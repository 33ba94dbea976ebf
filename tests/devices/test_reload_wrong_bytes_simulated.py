"""Models that do not survive wrong bytes, and maps that send nothing: on simulated devices, each
has its line.

The probe is answered "healthy", so that the reload itself must find what it missed.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptfix.devices.probe.probe_report import PairReport, ProbeReport, Verdict
from ckptfix.devices.reload import dispatched as dispatching
from ckptfix.devices.reload import verifying
from ckptfix.devices.reload.filling import size_of
from ckptfix.devices.reload.reload_report import Outcome, ReloadReport, Subject
from ckptfix.devices.reload.verifying import verify_reload
from ckptfix.devices.torch_devices import ordered_pairs
from tests.devices import reload_models as models
from tests.devices.reload_models import Head, eights, save_model
from tests.devices.test_reload_values import Astray
from tests.simulated.models import mixtral
from tests.simulated.simulator import Simulator

pytestmark = pytest.mark.simulated(3)

TWO = {"first": 0, "last": 1}


@pytest.fixture(autouse=True)
def _probe_misses_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> ProbeReport:
        pairs = {
            pair: PairReport(pair=pair, verdict=Verdict.HEALTHY, seed=1) for pair in ordered_pairs()
        }
        return ProbeReport(pairs=pairs, seed=1)

    monkeypatch.setattr(verifying, "probe_peer_copies", probe)


def verified(tmp_path: Path, model: Any, **options: Any) -> ReloadReport:
    folder = tmp_path / "checkpoint"
    if not folder.exists():
        save_model(folder, model)
    options = {"device_map": TWO, "repeats": 3, "require_transfer_proof": True, **options}
    return verify_reload(folder, model=lambda: (model, eights()), **options)


def texts(report: ReloadReport, subject: Subject, outcome: Outcome) -> str:
    return "\n".join(
        proof.text
        for proof in report.proofs
        if proof.subject is subject and proof.outcome is outcome
    )


@pytest.mark.parametrize(
    ("make", "error"),
    [(models.Looking, "IndexError"), (models.Strict, "ValueError: an empty input")],
)
def test_what_a_model_raises_on_wrong_bytes_is_a_transfer_fault(
    simulator: Simulator, tmp_path: Path, make: Any, error: str
) -> None:
    assert verified(tmp_path, make()).status == 0
    simulator.fault(0, 1, "unwritten" if make is models.Looking else "zeros")
    report = verified(tmp_path, make())
    assert report.status == 1
    says = texts(report, Subject.SPLIT, Outcome.FAILED)
    assert f"transfer fault: direct run 1 raised {error}" in says
    assert "3 of 3 runs wrong; wrong when only this pair copies directly: 0 -> 1" in says
    assert texts(report, Subject.PLACEMENT, Outcome.FAILED) == ""
    assert texts(report, Subject.OUTPUTS, Outcome.PROVEN).endswith("equal in every bit"), (
        "staged is right"
    )
    assert [facts.pair for facts in report.pairs if facts.alone_wrong] == [(0, 1)]


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_what_only_later_runs_raise_leaves_the_comparison(
    simulator: Simulator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    """Runs of one pair alone come when the direct ones have been compared."""
    monkeypatch.setattr(models.Strict.Checked, "error", error)
    model = models.Strict()
    seen: list[int] = []

    def direct_runs_end_well(*_: Any) -> bool:
        seen.append(1)
        return len(seen) > 3

    monkeypatch.setattr(
        models.Strict.Checked,
        "forward",
        lambda self, x: _checked(self, x, direct_runs_end_well, error),
    )
    simulator.fault(0, 1, "zeros")
    report = verified(tmp_path, model)
    assert report.status == 1
    assert "3 of 3 runs with direct copies differ" in texts(report, Subject.SPLIT, Outcome.FAILED)
    assert "cannot be placed on" not in str(report)
    assert [facts.pair for facts in report.pairs if facts.alone_wrong] == [(0, 1)]


def _checked(layer: Any, x: torch.Tensor, is_late: Any, error: type[BaseException]) -> torch.Tensor:
    if not bool((x != 0).any()) and is_late():
        raise error("an empty input")
    return torch.nn.functional.linear(x, layer.weight, layer.bias)


def test_a_fault_in_a_tensor_of_an_object_is_found(simulator: Simulator, tmp_path: Path) -> None:
    assert verified(tmp_path, models.Opaque()).status == 0
    simulator.fault(0, 1, "zeros")
    assert "transfer fault" in texts(
        verified(tmp_path, models.Opaque()), Subject.SPLIT, Outcome.FAILED
    )


def test_outputs_without_tensors_leave_the_split_unproven(
    simulator: Simulator, tmp_path: Path
) -> None:
    report = verified(tmp_path, models.Empty())
    assert report.status == 1
    assert (
        texts(report, Subject.SPLIT, Outcome.PROVEN)
        == texts(report, Subject.OUTPUTS, Outcome.PROVEN)
        == ""
    )
    assert "the model was not run" in texts(report, Subject.SPLIT, Outcome.NOT_EXERCISED)
    assert [one.subject for one in report.unproven_transfers] == [Subject.SPLIT]


def test_a_map_without_an_accelerator_exercises_no_transfer(
    simulator: Simulator, tmp_path: Path
) -> None:
    report = verified(tmp_path, Head(), device_map={"": "cpu"})
    assert report.status == 1
    assert {one.subject for one in report.unproven_transfers} == {Subject.PLACEMENT}
    assert "places the model only on cpu" in texts(report, Subject.PLACEMENT, Outcome.NOT_EXERCISED)


def test_a_map_with_one_accelerator_exercises_no_split(
    simulator: Simulator, tmp_path: Path
) -> None:
    report = verified(tmp_path, Head(), device_map={"": 1})
    assert [one.subject for one in report.unproven_transfers] == [Subject.SPLIT]
    assert "only one accelerator, 1" in texts(report, Subject.SPLIT, Outcome.NOT_EXERCISED)


def test_without_a_class_no_direct_run_is_compared(simulator: Simulator, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "checkpoint", Head())
    report = verify_reload(folder, require_transfer_proof=True)
    assert report.status == 1
    assert [one.subject for one in report.unproven_transfers] == [Subject.SPLIT]
    assert "no model was run" in texts(report, Subject.SPLIT, Outcome.NOT_EXERCISED)


def test_a_misspelt_name_puts_nothing_on_its_device(simulator: Simulator, tmp_path: Path) -> None:
    report = verified(tmp_path, Head(), device_map={"frist": 1, "": 0})
    assert report.status == 1
    assert "'frist': not in Head (misspelled)" in texts(
        report, Subject.DEVICE_MAP, Outcome.NOT_EXERCISED
    )
    assert texts(report, Subject.OUTPUTS, Outcome.PROVEN).startswith("split over 0 == cuda:0 alone")
    assert {one.subject for one in report.unproven_transfers} == {
        Subject.DEVICE_MAP,
        Subject.SPLIT,
    }


def test_modules_without_a_tensor_run_where_the_map_says(
    simulator: Simulator, tmp_path: Path
) -> None:
    class Gated(Head):
        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.nn.ReLU()

        def between(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.gate(hidden)

    device_map = {"first": 0, "gate": 1, "last": 0}
    report = verified(tmp_path, Gated(), device_map=device_map)
    assert report.status == 0, str(report)
    assert "split over 0, 1 == staged" in texts(report, Subject.SPLIT, Outcome.PROVEN)
    simulator.fault(0, 1, "zeros")
    report = verified(tmp_path, Gated(), device_map=device_map)
    assert "directly: 0 -> 1;" in texts(report, Subject.SPLIT, Outcome.FAILED)


def vit() -> Any:
    """transformers 5 knows most of its tensors by other names than the file."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        image_size=8, patch_size=4, num_labels=3,
    )  # fmt: skip
    return ViTForImageClassification(config).eval()


def corrupt_after_dispatch(monkeypatch: pytest.MonkeyPatch, hurt: str) -> None:
    """Have one parameter change where it was dispatched to."""
    dispatch = vars(dispatching)["dispatch_model"]

    def damaged(dispatched: Any, *given: Any, **options: Any) -> Any:
        there = dispatch(dispatched, *given, **options)
        with torch.no_grad():
            there.get_parameter(hurt).view(-1)[5] += 1
        return there

    monkeypatch.setattr(dispatching, "dispatch_model", damaged)


def test_tensors_that_a_loader_renames_are_compared_with_the_file(
    simulator: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vit()
    model.save_pretrained(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    if set(stored) == set(model.state_dict()):
        pytest.skip("this transformers renames none of them")
    options: dict[str, Any] = {
        "device_map": "balanced",
        "repeats": 2,
        "require_transfer_proof": True,
    }
    report = verify_reload(tmp_path / "model", **options)
    assert report.status == 0, str(report)
    assert f"-> host: {len(stored)} tensors" in texts(report, Subject.PLACEMENT, Outcome.PROVEN)
    assert sum(report.device_bytes.values()) == size_of(model)
    hurt = next(name for name in model.state_dict() if name.endswith("2.layernorm_before.weight"))
    corrupt_after_dispatch(monkeypatch, hurt)
    report = verify_reload(tmp_path / "model", **options)
    assert report.status == 1
    assert f"'{hurt}': on " in texts(report, Subject.PLACEMENT, Outcome.FAILED)


def test_tensors_that_a_loader_merges_are_compared_with_the_loaded_model(
    simulator: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {
        "device_map": "balanced",
        "repeats": 2,
    }  # the simulated cuda cannot run its experts
    report = verify_reload(tmp_path / "model", **options)
    assert report.status == 0, str(report)
    proven = texts(report, Subject.PLACEMENT, Outcome.PROVEN)
    assert "-> host: 4 tensors" in proven
    assert "loaded model -> " in proven
    assert "24 tensors of the file" in texts(report, Subject.PLACEMENT, Outcome.NOT_EXERCISED)
    hurt = "model.layers.1.mlp.experts.down_proj"
    corrupt_after_dispatch(monkeypatch, hurt)
    report = verify_reload(tmp_path / "model", **options)
    assert report.status == 1
    says = texts(report, Subject.PLACEMENT, Outcome.FAILED)
    assert f"'{hurt}': on " in says
    assert "bytes differ from the loaded model" in says


def test_a_disk_without_room_leaves_the_map_unproven(
    simulator: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    report = verified(tmp_path, Head(), device_map={"first": 0, "last": "disk"})
    assert report.status == 1
    assert Subject.DISK_OFFLOAD in {one.subject for one in report.unproven_transfers}


def test_a_nan_in_a_weight_names_the_module_on_the_devices_of_a_split(
    simulator: Simulator, tmp_path: Path
) -> None:
    model = Head()
    with torch.no_grad():
        model.last.weight[0, 0] = float("nan")
    report = verified(tmp_path, model)
    assert report.status == 1
    assert "holds 1 NaN" in texts(report, Subject.VALUES, Outcome.FAILED)
    text = texts(report, Subject.OUTPUTS, Outcome.FAILED)
    assert text.startswith("the output on cuda:0 alone contains NaN: 2 of 16 numbers in output")
    assert text.endswith("NaN first appears in the output of 'last' (Linear)")
    assert texts(report, Subject.SPLIT, Outcome.PROVEN), "the copies deliver the same NaN"
    assert report.ran == 3


def test_a_nan_of_the_split_alone_names_its_module(simulator: Simulator, tmp_path: Path) -> None:
    report = verified(tmp_path, Astray())
    assert report.status == 1
    text = texts(report, Subject.OUTPUTS, Outcome.FAILED)
    assert text.startswith(
        "the split over 0, 1 differs from cuda:0 alone by more than different kernels explain"
    )
    assert text.endswith(
        "NaN first appears in the output of 'last' (Linear), whose input already contains NaN"
    )


def test_a_transfer_fault_ends_with_the_probe_and_the_way_around_it(
    simulator: Simulator, tmp_path: Path
) -> None:
    verified(tmp_path, Head())
    simulator.fault(0, 1, "zeros")
    report = verified(tmp_path, Head())
    assert report.verdict.startswith("the reload is not proven: ")
    assert "split" in report.verdict
    (step,) = report.next_steps
    assert step.startswith(
        "ckptfix doctor --peer-copies; until the copies are correct: dispatch_model("
    )
