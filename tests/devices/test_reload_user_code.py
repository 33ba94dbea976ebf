"""Models and factories that end the process, raise, or hold what no copy fills: an answer each
time, never a crash.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix.devices.reload import dispatched as planning
from ckptfix.devices.reload.device_maps import MOST, read_max_memory
from ckptfix.devices.reload.reload_report import Outcome, Subject
from ckptfix.devices.reload.verifying import verify_reload
from ckptfix.devices.torch_devices import device_count
from ckptfix.errors import UsageError
from tests.devices import reload_models as models
from tests.devices.reload_models import Head, eights, save_model
from tests.devices.test_reload import outcomes, text_of

pytestmark = pytest.mark.skipif(
    device_count() > 0, reason="these say what a machine without accelerator proves"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "checkpoint", Head())


def returning(model: Any, inputs: Any = None) -> Callable[[], Any]:
    return lambda: (model, eights() if inputs is None else inputs)


def test_a_factory_that_ends_the_process_is_wrong_usage(folder: Path) -> None:
    def leaving() -> Any:
        sys.exit(0)

    with pytest.raises(UsageError, match="the factory leaving raised SystemExit: 0"):
        verify_reload(folder, model=leaving)


def test_a_module_that_ends_the_process_is_wrong_usage(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving_module.py").write_text("import sys\ndef build(): ...\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="SystemExit: 0"):
        verify_reload(folder, model="leaving_module:build")


def test_a_forward_pass_that_ends_the_process_failed(folder: Path) -> None:
    report = verify_reload(folder, model=returning(models.Leaving()))
    assert report.status == 1
    assert "the model fails on cpu with the factory's inputs: SystemExit: 0" in text_of(
        report, Subject.OUTPUTS, Outcome.FAILED
    )


def test_a_forward_pass_that_ends_the_process_on_the_map_only_failed(folder: Path) -> None:
    class Later(Head):
        def after(self, output: torch.Tensor) -> Any:
            if hasattr(self, "_hf_hook"):
                raise SystemExit(0)
            return output

    report = verify_reload(folder, model=returning(Later()), device_map={"": "disk"})
    assert report.status == 1
    assert "does not run on this map: SystemExit: 0" in text_of(
        report, Subject.OUTPUTS, Outcome.FAILED
    )


def test_a_buffer_that_cannot_be_filled_is_a_difference(tmp_path: Path) -> None:
    state = {**Head().state_dict(), "mask": torch.ones(3, 8)}
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(state, str(folder / "model.safetensors"))
    report = verify_reload(folder, model=returning(models.Expanded()))
    assert report.status == 1
    assert "'mask' cannot be filled: RuntimeError" in text_of(report, Subject.NAMES, Outcome.FAILED)


def test_lazy_layers_take_the_shape_of_the_file(folder: Path) -> None:
    report = verify_reload(folder, model=returning(models.Lazy()))
    assert report.status == 0, str(report)
    assert outcomes(report, Subject.NAMES) == [Outcome.PROVEN]
    assert outcomes(report, Subject.OUTPUTS) == [Outcome.PROVEN]


def test_lazy_layers_that_the_file_has_not_are_missing(folder: Path) -> None:
    path = str(folder / "model.safetensors")
    save_file({name: value for name, value in load_file(path).items() if "last" not in name}, path)
    report = verify_reload(folder, model=returning(models.Lazy()))
    assert report.status == 1
    assert "2 keys of the model missing" in text_of(report, Subject.NAMES, Outcome.FAILED)


def test_an_extra_state_that_is_no_tensor_costs_the_disk_only(folder: Path) -> None:
    report = verify_reload(folder, model=returning(models.Remembering()))
    assert report.status == 0, str(report)
    assert "the model cannot be placed on disk: " in text_of(
        report, Subject.PLACEMENT, Outcome.NOT_EXERCISED
    )
    report = verify_reload(folder, model=returning(models.Remembering()), device_map={"": "disk"})
    assert report.status == 1
    assert "the model cannot be placed on disk: " in text_of(
        report, Subject.PLACEMENT, Outcome.FAILED
    )


def test_an_extra_state_of_a_tensor_goes_to_its_module(tmp_path: Path) -> None:
    model = models.Counting()
    model.scale = 3.0
    folder = save_model(tmp_path / "checkpoint", model)
    got = models.Counting()
    report = verify_reload(folder, model=returning(got))
    assert got.scale == 3.0
    assert outcomes(report, Subject.NAMES) == [Outcome.PROVEN], str(report)
    assert report.status == 0, str(report)


@pytest.mark.parametrize("text", ['{"0": "1e400GB"}', '{"0": 1e400}'])
def test_endless_memory_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        read_max_memory(text)


def test_more_memory_than_there_is_anywhere_is_all(folder: Path) -> None:
    assert read_max_memory({"cpu": 10**400}) == {"cpu": MOST}
    report = verify_reload(folder, max_memory={"cpu": 10**400, 0: 0}, model=returning(Head()))
    assert report.status == 0, str(report)


def test_a_model_of_which_accelerate_makes_no_map_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> Any:
        raise KeyError("layers.0")

    monkeypatch.setattr(planning, "map_model", refuses)
    report = verify_reload(folder, max_memory={"cpu": 100}, model=returning(Head()))
    assert report.status == 1
    assert "accelerate cannot infer a map for Head: KeyError" in text_of(
        report, Subject.DEVICE_MAP, Outcome.FAILED
    )


def test_inputs_that_the_forward_pass_changes_are_new_in_every_run(folder: Path) -> None:
    given = eights() * 255
    report = verify_reload(folder, model=returning(models.Changing(), {"x": given}))
    assert report.status == 0, str(report)
    assert outcomes(report, Subject.OUTPUTS) == [Outcome.PROVEN], str(report)
    assert torch.equal(given, eights() * 255), "the user's own tensor stays"


def test_objects_among_the_inputs_are_new_in_every_run(folder: Path) -> None:
    class Growing(Head):
        def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
            cache.values.append(x)
            return super().forward(x) + len(cache.values)

    class Cache:
        def __init__(self) -> None:
            self.values = [torch.ones(1)]

    cache = Cache()
    report = verify_reload(folder, model=returning(Growing(), {"x": eights(), "cache": cache}))
    assert outcomes(report, Subject.OUTPUTS) == [Outcome.PROVEN], str(report)
    assert len(cache.values) == 1


def test_inputs_that_cannot_be_copied_are_handed_on(folder: Path) -> None:
    import threading

    class Locking(Head):
        def forward(self, x: torch.Tensor, lock: Any = None) -> Any:
            with lock:
                return super().forward(x.mul_(0.5))

    report = verify_reload(
        folder, model=returning(Locking(), {"x": eights(), "lock": threading.Lock()})
    )
    assert outcomes(report, Subject.OUTPUTS) == [Outcome.PROVEN], str(report)
