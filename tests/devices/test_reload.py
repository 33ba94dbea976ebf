"""``verify_reload`` on a machine without an accelerator: what it proves, what it refuses, what it
does not exercise.
"""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix import Keys, Policy, repair
from ckptfix.devices.reload import arrivals as placing
from ckptfix.devices.reload import stored_weights as stored
from ckptfix.devices.reload.reload_report import Outcome, ReloadReport, Subject
from ckptfix.devices.reload.verifying import verify_reload
from ckptfix.devices.torch_devices import device_count
from ckptfix.errors import ChangedError, UsageError
from tests.devices import reload_models
from tests.devices.reload_models import save_tied

pytestmark = pytest.mark.skipif(
    device_count() > 0, reason="these say what a machine without accelerator proves"
)

FIXTURES = Path(__file__).parents[2] / "fixtures"
REAL = sorted(path for version in FIXTURES.glob("accelerate-*") for path in version.iterdir())
MODELS = "tests.devices.reload_models"


def outcomes(report: ReloadReport, subject: Subject) -> list[Outcome]:
    return [proof.outcome for proof in report.proofs if proof.subject is subject]


def text_of(report: ReloadReport, subject: Subject, outcome: Outcome) -> str:
    return "\n".join(
        proof.text
        for proof in report.proofs
        if proof.subject is subject and proof.outcome is outcome
    )


def copied(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.copytree(FIXTURES / "accelerate-1.15.0" / name / "checkpoint", folder)
    return folder


@pytest.mark.parametrize("real", REAL, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_repaired_folder_is_proven_as_far_as_a_cpu_can(tmp_path: Path, real: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(real / "checkpoint", folder)
    repair(folder)
    report = verify_reload(folder)
    assert report.status == 0, str(report)
    assert outcomes(report, Subject.FILE_BYTES) == [Outcome.PROVEN]
    assert outcomes(report, Subject.DISK_OFFLOAD) == [Outcome.PROVEN]
    assert set(outcomes(report, Subject.DEVICE_MAP)) == {Outcome.PROVEN}
    assert outcomes(report, Subject.OUTPUTS) == [Outcome.NOT_EXERCISED]
    assert text_of(report, Subject.PEER_PROBE, Outcome.NOT_EXERCISED).startswith(
        "any device transfer"
    )
    assert sum(report.device_bytes.values()) == report.nbytes


@pytest.mark.parametrize("factory", ["two_layer", "two_layer_alone"])
def test_transfers_that_were_not_exercised_fail_only_when_asked(
    tmp_path: Path, factory: str
) -> None:
    folder = copied(tmp_path, "clean-safetensors")
    model = f"{MODELS}:{factory}"
    assert verify_reload(folder, model=model).status == 0
    report = verify_reload(folder, model=model, require_transfer_proof=True)
    assert report.status == 1
    assert [proof.subject for proof in report.unproven_transfers] == [Subject.PEER_PROBE]


@pytest.mark.parametrize(
    ("name", "factory"),
    [
        ("clean-safetensors", "two_layer"),
        ("clean-bin", "two_layer"),
        ("wrapper-bin", "two_layer"),
        ("wrapper-safetensors", "two_layer"),
        ("batchnorm", "conv_norm"),
        ("tied-weights-bin", "tied"),
        ("tied-weights-safetensors", "tied"),
        ("lone-nested-legacy", "two_layer"),
        ("lone-nested-train", "two_layer"),
    ],
)
def test_a_repaired_folder_fills_its_model(tmp_path: Path, name: str, factory: str) -> None:
    folder = copied(tmp_path, name)
    repair(folder, policy=Policy(keys=Keys.BARE))
    report = verify_reload(folder, model=f"{MODELS}:{factory}")
    assert report.status == 0, str(report)
    assert outcomes(report, Subject.NAMES) == [Outcome.PROVEN]
    assert outcomes(report, Subject.PLACEMENT) == [Outcome.PROVEN, Outcome.PROVEN]
    assert outcomes(report, Subject.OUTPUTS) == [Outcome.PROVEN]
    assert "backward passes" in text_of(report, Subject.BEYOND, Outcome.NOT_EXERCISED)
    if "tied" in name:
        assert outcomes(report, Subject.TIES) == [Outcome.PROVEN]


def test_a_factory_may_be_the_function_itself(tmp_path: Path) -> None:
    report = verify_reload(copied(tmp_path, "clean-bin"), model=reload_models.two_layer)
    assert report.model == "TwoLayer from two_layer"
    assert report.status == 0


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    path = folder / "model.safetensors"
    state = load_file(str(path))
    change(state)
    save_file(state, str(path), metadata={"format": "pt"})
    return folder


def drop(state: dict[str, Any]) -> None:
    del state["fc2.bias"]


def add(state: dict[str, Any]) -> None:
    state["fc3.bias"] = torch.ones(2)


def reshape(state: dict[str, Any]) -> None:
    state["fc2.bias"] = torch.ones(4)


def widen(state: dict[str, Any]) -> None:
    state["fc2.bias"] = torch.ones(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop, "1 key of the model missing: 'fc2.bias'"),
        (add, "1 unexpected key: 'fc3.bias'"),
        (reshape, "'fc2.bias' has shape [4] in the file, [3] in the model"),
        (widen, "'fc2.bias' is float64 in the file, float32 in the model"),
    ],
)
def test_names_shapes_and_dtypes_that_differ_fail(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    folder = changed(copied(tmp_path, "clean-safetensors"), change)
    assert verify_reload(folder).status == 0, "without a class nobody can know"
    report = verify_reload(folder, model=f"{MODELS}:two_layer")
    assert report.status == 1
    assert says in text_of(report, Subject.NAMES, Outcome.FAILED)
    assert "do not fill the model" in text_of(report, Subject.OUTPUTS, Outcome.NOT_EXERCISED)


def test_a_wider_dtype_is_exact_and_said(tmp_path: Path) -> None:
    def halve(state: dict[str, Any]) -> None:
        state.update({name: value.half() for name, value in state.items()})

    folder = changed(copied(tmp_path, "clean-safetensors"), halve)
    report = verify_reload(folder, model=f"{MODELS}:two_layer")
    assert report.status == 0
    assert "4 kept in another dtype" in text_of(report, Subject.NAMES, Outcome.PROVEN)
    narrow = verify_reload(copied(tmp_path / "other", "clean-safetensors"), model=f"{MODELS}:half")
    assert narrow.status == 1
    assert "is float32 in the file, float16 in the model" in text_of(
        narrow, Subject.NAMES, Outcome.FAILED
    )


def test_wrapped_names_are_one_sentence_with_the_next_command(tmp_path: Path) -> None:
    folder = copied(tmp_path, "single-level-safetensors")
    report = verify_reload(folder, model=f"{MODELS}:two_layer")
    says = text_of(report, Subject.NAMES, Outcome.FAILED)
    assert "every key in model.safetensors begins with 'module.'" in says
    assert says.endswith(f"next: ckptfix repair {folder} --keys bare")


def test_tied_names_with_other_bytes_are_lost_weights(tmp_path: Path) -> None:
    folder = save_tied(tmp_path / "checkpoint", suffix=".bin")
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    torch.save(state, folder / "pytorch_model.bin")
    report = verify_reload(folder, model=f"{MODELS}:tied")
    assert report.status == 1
    assert "'embed.weight' and 'lm_head.weight' are one tensor" in text_of(
        report, Subject.TIES, Outcome.FAILED
    )


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("model", [None, f"{MODELS}:tied"])
def test_a_map_that_splits_tied_weights_is_refused(
    tmp_path: Path, suffix: str, model: str | None
) -> None:
    folder = save_tied(tmp_path / "checkpoint", suffix=suffix)
    device_map = {"embed": "cpu", "mixer": "cpu", "lm_head": "disk"}
    report = verify_reload(folder, device_map=device_map, model=model)
    if model is None and suffix == ".safetensors":
        assert report.status == 0, "the file names only one of the two"
        return
    assert report.status == 1
    says = text_of(report, Subject.TIES, Outcome.FAILED)
    assert "'embed.weight' is on cpu and 'lm_head.weight' on disk" in says
    assert verify_reload(folder, device_map={"": "disk"}, model=model).status == 0


def test_a_made_map_keeps_tied_weights_together(tmp_path: Path) -> None:
    folder = save_tied(tmp_path / "checkpoint", suffix=".bin")
    report = verify_reload(folder, max_memory={0: 300, 1: 300, "cpu": 300})
    assert report.device_map["lm_head"] == report.device_map["embed"] != report.device_map["mixer"]
    assert outcomes(report, Subject.TIES) == [Outcome.PROVEN]
    assert report.nbytes - sum(report.device_bytes.values()) == 0


def test_a_made_map_keeps_numbered_modules_whole(tmp_path: Path) -> None:
    """The names decide, also those that ``add_module`` refuses, as ``type``."""
    blocks = [f"layers.{number}" for number in range(12)]
    names = [f"{block}.{part}.weight" for block in blocks for part in ("up", "down")]
    names += ["embed.weight", "type.weight", "a", "b..c"]
    save_file({name: torch.ones(8) for name in names}, str(tmp_path / "model.safetensors"))
    report = verify_reload(tmp_path, device_map="sequential", max_memory={0: 500, "cpu": 5000})
    places = [report.device_map[block] for block in blocks]
    assert places == sorted(places), "on device 0 the first ones, then on the host"
    assert set(places) == {"0", "cpu"}
    assert "covers every tensor: 28 names" in text_of(report, Subject.DEVICE_MAP, Outcome.PROVEN)


def test_a_name_that_is_empty_is_mapped(tmp_path: Path) -> None:
    save_file({"": torch.ones(8), "a.w": torch.ones(8)}, str(tmp_path / "model.safetensors"))
    report = verify_reload(tmp_path, max_memory={"cpu": 40})
    assert "covers every tensor: 2 names" in text_of(report, Subject.DEVICE_MAP, Outcome.PROVEN)


def test_a_map_that_forgets_tensors_is_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path, "clean-safetensors")
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"fc1": "cpu", "fc2.weight": "cpu"}))
    for model in (None, f"{MODELS}:two_layer"):
        report = verify_reload(folder, device_map=path, model=model)
        assert report.status == 1
        assert "no device to 1 tensor: 'fc2.bias'" in text_of(
            report, Subject.DEVICE_MAP, Outcome.FAILED
        )


@pytest.mark.parametrize("model", [None, f"{MODELS}:two_layer"])
def test_devices_that_are_not_here_are_not_exercised(tmp_path: Path, model: str | None) -> None:
    folder = copied(tmp_path, "clean-safetensors")
    report = verify_reload(folder, device_map={"fc1": 0, "fc2": 1}, model=model)
    assert report.status == 0
    says = text_of(report, Subject.PLACEMENT, Outcome.NOT_EXERCISED)
    assert "this machine has no device 0, which the map uses: 2 tensors not placed" in says
    assert "this machine has no device 1, which the map uses: 2 tensors not placed" in says
    assert report.device_bytes == {"0": 224, "1": 108}
    assert (
        verify_reload(folder, device_map={"fc1": 0, "fc2": 1}, require_transfer_proof=True).status
        == 1
    )


@pytest.mark.parametrize("spread", ["auto", "balanced", "sequential", "balanced_low_0"])
@pytest.mark.parametrize("model", [None, f"{MODELS}:two_layer"])
def test_weights_beyond_the_memory_go_to_the_disk_and_come_back(
    tmp_path: Path, spread: str, model: str | None
) -> None:
    folder = copied(tmp_path, "clean-bin")
    report = verify_reload(folder, device_map=spread, max_memory='{"cpu": 240}', model=model)
    assert report.status == 0, str(report)
    assert "disk" in report.device_map.values()
    if model is not None:
        assert "disk == cpu alone" in text_of(report, Subject.OUTPUTS, Outcome.PROVEN)


def test_a_library_that_reads_wrong_bytes_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: stored.Weights, fqn: str) -> torch.Tensor:
        value = right(self, fqn).clone()
        if fqn == "fc1.bias":
            value.view(torch.uint8)[9] ^= 1
        return value

    right = stored.Weights.read
    folder = copied(tmp_path, "clean-safetensors")
    monkeypatch.setattr(stored.Weights, "read", wrong)
    report = verify_reload(folder)
    assert report.status == 1
    assert "1 of 4 tensors differ: 'fc1.bias': byte 9 is" in text_of(
        report, Subject.FILE_BYTES, Outcome.FAILED
    )
    report = verify_reload(folder, model=f"{MODELS}:two_layer")
    assert "'fc1.bias': on cpu: byte 9" in text_of(report, Subject.PLACEMENT, Outcome.FAILED)


def test_an_offload_that_changes_bytes_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        placing, "load_offloaded_weight", lambda path, info: torch.zeros(info["shape"])
    )
    report = verify_reload(copied(tmp_path, "clean-safetensors"))
    assert report.status == 1
    assert "4 of 4 tensors differ" in text_of(report, Subject.DISK_OFFLOAD, Outcome.FAILED)


def test_what_cannot_be_offloaded_is_not_exercised_unless_the_map_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise TypeError("Got unsupported ScalarType Float8_e4m3fn")  # as accelerate 1.6.0 says

    monkeypatch.setattr(placing, "offload_weight", refused)
    folder = copied(tmp_path, "clean-safetensors")
    report = verify_reload(folder)
    assert report.status == 0
    assert "4 tensors" in text_of(report, Subject.DISK_OFFLOAD, Outcome.NOT_EXERCISED)
    report = verify_reload(folder, device_map={"": "disk"})
    assert report.status == 1
    assert "Float8_e4m3fn" in text_of(report, Subject.DISK_OFFLOAD, Outcome.FAILED)


def test_a_tensors_name_never_becomes_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "checkpoint"
    folder.mkdir(parents=True)
    name = "../../../../../../" + str(tmp_path / "escaped")
    save_file({name: torch.ones(3)}, str(folder / "model.safetensors"), metadata={"format": "pt"})
    assert verify_reload(folder).status == 0
    assert {path.name for path in tmp_path.rglob("*")} == {"in", "checkpoint", "model.safetensors"}


def test_unreadable_weights_fail_with_the_next_command(tmp_path: Path) -> None:
    folder = copied(tmp_path, "clean-safetensors")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    report = verify_reload(folder)
    assert report.status == 1
    assert f"next: ckptfix check {folder}" in text_of(report, Subject.FILE_BYTES, Outcome.FAILED)


def test_a_file_that_changes_meanwhile_is_no_proof(tmp_path: Path) -> None:
    folder = copied(tmp_path, "clean-safetensors")

    def replaced(count: int) -> None:
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())

    with pytest.raises(ChangedError, match="changed during verification"):
        verify_reload(folder, progress=replaced)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nothing", "expected module:factory"),
        ("no_such_module_at_all:build", "ModuleNotFoundError"),
        (f"{MODELS}:none_such", "AttributeError"),
        (f"{MODELS}:Path.cwd.__name__", "a str, not a function"),
        (f"{MODELS}:no_model", "returned dict: expected one torch.nn.Module, or"),
        (f"{MODELS}:two_models", r"returned \(Linear, Linear\): expected one torch.nn.Module"),
        ("src/models.py:build", "next: pass --model models:build and set PYTHONPATH=src$"),
        ("models.py:build", "next: pass --model models:build$"),
        (f"{MODELS}:broken", "raised RuntimeError: no data here"),
    ],
)
def test_factories_that_are_none(tmp_path: Path, model: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        verify_reload(copied(tmp_path, "clean-safetensors"), model=model)


def test_the_factorys_own_inputs_must_suit_its_model(tmp_path: Path) -> None:
    report = verify_reload(copied(tmp_path, "clean-safetensors"), model=f"{MODELS}:wrong_inputs")
    assert report.status == 1
    assert "the factory's inputs: RuntimeError" in text_of(report, Subject.OUTPUTS, Outcome.FAILED)


def test_without_inputs_the_outputs_are_not_exercised(tmp_path: Path) -> None:
    report = verify_reload(copied(tmp_path, "clean-safetensors"), model=f"{MODELS}:two_layer_alone")
    assert report.status == 0
    assert "make it return (model, inputs)" in text_of(
        report, Subject.OUTPUTS, Outcome.NOT_EXERCISED
    )


def test_of_several_models_the_one_that_fits_is_taken(tmp_path: Path) -> None:
    folder = copied(tmp_path, "clean-teacher-student")
    with pytest.raises(UsageError, match=r"2 models of the checkpoint match .*model_1.safetensors"):
        verify_reload(folder, model=f"{MODELS}:two_layer")
    assert verify_reload(folder / "model_1.safetensors", model=f"{MODELS}:two_layer").status == 0
    with pytest.raises(UsageError, match="no model of the checkpoint matches Tied"):
        verify_reload(folder, model=f"{MODELS}:tied")
    with pytest.raises(UsageError, match="maps one model, but there are 2"):
        verify_reload(folder, device_map={"": "cpu"})


def test_random_numbers_are_the_same_in_every_run_and_the_processs_own_stay(
    tmp_path: Path,
) -> None:
    (tmp_path / "checkpoint").mkdir()
    save_file({"weight": torch.ones(3)}, str(tmp_path / "checkpoint" / "model.safetensors"))
    before = torch.random.get_rng_state()
    report = verify_reload(tmp_path / "checkpoint", model=reload_models.drawing)
    assert outcomes(report, Subject.OUTPUTS) == [Outcome.PROVEN], str(report)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_limits_are_for_maps_that_are_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_memory limits a map that accelerate infers"):
        verify_reload(
            copied(tmp_path, "clean-safetensors"), device_map={"": 0}, max_memory={0: "1GiB"}
        )


def test_no_room_on_the_disk_is_not_exercised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    report = verify_reload(copied(tmp_path, "clean-safetensors"), model=f"{MODELS}:two_layer")
    assert report.status == 0
    says = text_of(report, Subject.DISK_OFFLOAD, Outcome.NOT_EXERCISED)
    assert re.search(r"not enough space in \S+ \(332 B needed\)", says)


def test_repeats_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        verify_reload(copied(tmp_path, "clean-safetensors"), repeats=0)


def test_nothing_is_left_behind_and_nothing_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(tmp_path, "clean-bin")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verify_reload(folder, model=f"{MODELS}:two_layer")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert list((tmp_path / "tmp").iterdir()) == []
