"""Checkpoint folders as the doctor sees them: what is refused, the names, the ties, the maps."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from ckptfix.environment.doctor import DoctorReport, diagnose_environment
from ckptfix.environment.facts import gather
from ckptfix.environment.facts.machine import Torch
from ckptfix.environment.facts.weights import DeviceMap, normal, parse_map, read_folder, read_map
from ckptfix.errors import UsageError
from ckptfix.hardware import Machine
from tests.environment.building import FIXTURES, facts
from tests.repairs.builders import write_safetensors


def diagnosis_of(folder: Path) -> DoctorReport:
    return diagnose_environment(facts(folder=read_folder(str(folder))))


@pytest.mark.parametrize("case", ["unloadable-pickle", "unloadable-pickle-class"])
def test_the_printed_line_lets_torch_load_the_file(case: str) -> None:
    """The line is run as it is printed, in a fresh list of safe globals."""
    folder = FIXTURES / "golden" / case / "checkpoint"
    found = [advice for advice in diagnosis_of(folder).advice if advice.code == "unloadable-pickle"]
    assert found
    for advice in found:
        name = advice.evidence[0].partition(":")[0]
        with torch.serialization.safe_globals([]), pytest.raises(Exception, match="weights_only"):
            torch.load(folder / name, weights_only=True)
        line = advice.fix.removeprefix("if you trust the file: ")
        assert "torch.serialization.add_safe_globals([" in line
        before = torch.serialization.get_safe_globals()
        try:
            exec(line, {})
            torch.load(folder / name, weights_only=True)
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def test_files_that_need_the_same_line_are_said_once(tmp_path: Path) -> None:
    source = FIXTURES / "golden/unloadable-pickle-class/checkpoint/train.pt"
    for name in ("a.pt", "b.pt", "c.pt"):
        shutil.copy(source, tmp_path / name)
    (advice,) = (
        advice for advice in diagnosis_of(tmp_path).advice if advice.code == "unloadable-pickle"
    )
    assert "2 more files" in advice.sentence
    assert len(advice.evidence) == 4


def test_unsafe_pickles_are_never_allowed() -> None:
    found = diagnosis_of(FIXTURES / "golden/unsafe-pickle/checkpoint").advice
    (advice,) = (advice for advice in found if advice.code == "unsafe-pickle")
    assert "add_safe_globals" not in advice.fix


@pytest.mark.parametrize(
    "name", ["clean-bin", "clean-safetensors", "clean-single-process", "clean-teacher-student"]
)
def test_healthy_folders_are_met_with_silence(name: str) -> None:
    diagnosis = diagnosis_of(FIXTURES / "accelerate-1.15.0" / name / "checkpoint")
    assert diagnosis.status == 0
    assert [advice.code for advice in diagnosis.advice] == ["no-accelerator"]


def test_ties_are_seen_in_one_storage(tmp_path: Path) -> None:
    look = read_folder(str(FIXTURES / "accelerate-1.15.0/tied-weights-bin/checkpoint"))
    assert look.names == ("embed.weight", "mixer.weight", "mixer.bias", "lm_head.weight")
    (tie,) = look.ties
    assert (tie.names, tie.is_proven) == (("embed.weight", "lm_head.weight"), True)


def test_ties_are_seen_in_a_header_and_wrappers_are_taken_off(tmp_path: Path) -> None:
    alias = {
        "format": "pt",
        "module.head.weight": "module.embed.weight",
        "note": "module.embed.weight of a poem",
    }
    tensors = {"module.embed.weight": b"1234", "module.mixer.weight": b"5678"}
    write_safetensors(tmp_path / "model.safetensors", tensors, metadata=alias)
    look = read_folder(str(tmp_path))
    assert look.names == ("embed.weight", "mixer.weight", "head.weight")
    assert [tie.names for tie in look.ties] == [("embed.weight", "head.weight")]


def test_a_missing_head_is_a_guess(tmp_path: Path) -> None:
    names = ("model.embed_tokens.weight", "model.layers.0.weight")
    write_safetensors(tmp_path / "model.safetensors", dict.fromkeys(names, b"1"))
    (tie,) = read_folder(str(tmp_path)).ties
    assert (tie.names, tie.is_proven) == (("model.embed_tokens.weight", "lm_head.weight"), False)
    write_safetensors(
        tmp_path / "model.safetensors", dict.fromkeys((*names, "lm_head.weight"), b"1")
    )
    assert read_folder(str(tmp_path)).ties == ()


def test_a_missing_embedding_is_a_guess_for_the_map_that_names_it() -> None:
    """As safetensors leaves one of two tied tensors out, and not always the head."""
    look = read_folder(str(FIXTURES / "accelerate-1.15.0/sharded-gpt2-nested/checkpoint"))
    assert "lm_head.weight" in look.names
    assert not any(name.endswith("wte.weight") for name in look.names)

    def codes(**entries: int) -> dict[str, str]:
        given = facts(folder=look, device_map=DeviceMap(source="map.json", entries=entries))
        return {advice.code: advice.severity.value for advice in diagnose_environment(given).advice}

    assert (
        codes(**{"transformer": 0, "transformer.wte": 0, "lm_head": 1})["device-map-splits-tie"]
        == "warning"
    )
    assert "device-map-splits-tie" not in codes(
        **{"transformer": 1, "transformer.wte": 0, "lm_head": 0}
    )
    assert "device-map-splits-tie" not in codes(**{"transformer": 0, "lm_head": 1})


def test_distinct_tensors_of_one_storage_are_no_tie(tmp_path: Path) -> None:
    whole = torch.arange(8.0)
    torch.save(
        {"a.weight": whole[:4], "b.weight": whole[4:], "c.weight": whole.view(2, 4)},
        tmp_path / "model.bin",
    )
    assert read_folder(str(tmp_path)).ties == ()


def test_the_names_of_all_shards_and_of_the_first_model(tmp_path: Path) -> None:
    look = read_folder(str(FIXTURES / "accelerate-1.15.0/sharded-gpt2/checkpoint"))
    assert look.model.endswith(".index.json")
    assert any(name.endswith("wte.weight") for name in look.names)
    look = read_folder(str(FIXTURES / "accelerate-1.15.0/clean-teacher-student/checkpoint"))
    assert look.model == "model.safetensors"


def test_a_folder_carries_its_own_map(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a.weight": b"1", "b.weight": b"2"})
    (tmp_path / "config.json").write_text(json.dumps({"hf_device_map": {"a": 0, "b": "disk"}}))
    found = gather(Torch(), Machine(), {}, folder=str(tmp_path)).device_map
    assert found is not None
    assert found.devices() == (0, "disk")
    assert "hf_device_map" in found.source


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"device_map": "auto"}', '{"device_map": {"a": null}}', "[" * 100_000]
)
def test_a_config_without_a_map_is_no_error(tmp_path: Path, text: str) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a.weight": b"1"})
    (tmp_path / "config.json").write_text(text)
    assert gather(Torch(), Machine(), {}, folder=str(tmp_path)).device_map is None


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no checkpoint files"):
        read_folder(str(tmp_path))


def test_what_could_not_be_read_is_listed(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    diagnosis = diagnosis_of(tmp_path)
    assert any(words.startswith("pytorch_model.bin: ") for words in diagnosis.not_checked)
    assert any("DCP" in words for words in diagnosis.not_checked)


@pytest.mark.parametrize(
    ("device", "same"),
    [(1, 1), ("cuda:1", 1), ("1", 1), ("cuda", 0), ("xpu:2", 2), ("cpu", "cpu"), ("disk", "disk")],
)
def test_spellings_of_a_device(device: "int | str", same: "int | str") -> None:
    assert normal(device) == same


def test_the_nearest_module_decides_as_in_accelerate() -> None:
    from accelerate.utils.modeling import _get_param_device

    entries: dict[str, int | str] = {
        "model": 0,
        "model.layers.1": 1,
        "model.layers.1.mlp.weight": "cpu",
    }
    found = DeviceMap(source="map", entries=entries)
    for name in (
        "model.layers.1.mlp.weight",
        "model.layers.1.mlp.bias",
        "model.layers.10.weight",
        "model.x",
    ):
        assert found.device_of(name) == _get_param_device(name, entries)
    assert found.device_of("lm_head.weight") is None
    assert DeviceMap(source="map", entries={"": 0}).device_of("lm_head.weight") == 0


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"a": true}', '{"a": 1.5}', '{"a": [0]}'])
def test_no_device_map(tmp_path: Path, text: str) -> None:
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(UsageError, match=r"map\.json"):
        read_map(str(tmp_path / "map.json"))
    assert parse_map("auto", "here") is None
