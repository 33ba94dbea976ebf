"""Every check on environments made by hand: it speaks where it must, and is silent where it must be."""

from dataclasses import replace
from pathlib import PurePosixPath

import pytest

from ckptfix.operations.doctor import diagnose_environment
from ckptfix.operations.doctor.facts import Facts
from ckptfix.operations.doctor.facts.accelerate_source import AccelerateSource
from ckptfix.operations.doctor.facts.devices import Device
from ckptfix.operations.doctor.facts.folder import Folder
from ckptfix.operations.doctor.facts.placement import DeviceMap
from ckptfix.operations.doctor.facts.settings import AccelerateConfig, NcclSetting
from ckptfix.operations.findings import UnloadablePickle
from tests.operations.doctor.building import (
    bus,
    config,
    facts,
    script,
    with_machine,
    with_software,
    with_torch,
)
from tests.operations.doctor.cases import CASES, Case
from tests.operations.doctor.cases.folders import UNLOADABLE
from tests.operations.doctor.cases.placement import TIED


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.name}".replace(" ", "-"))
def test_it_speaks_exactly_where_it_must(case: Case) -> None:
    found = [advice for advice in diagnose_environment(case.facts).advice if advice.code == case.code]
    assert [advice.severity for advice in found] == ([] if case.severity is None else [case.severity])
    for advice in found:
        assert advice.evidence
        assert all(advice.evidence), "an empty line is no evidence"
        assert advice.fix
        assert advice.as_json()["message"] == str(advice)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_healthy_environment_is_met_with_silence(count: int) -> None:
    diagnosis = diagnose_environment(facts(count))
    assert diagnosis.advice == ()
    assert diagnosis.status == 0


def test_a_machine_without_a_gpu_is_healthy_and_says_so() -> None:
    diagnosis = diagnose_environment(facts())
    assert [advice.code for advice in diagnosis.advice] == ["no-accelerator"]
    assert diagnosis.status == 0
    assert "no GPU" in diagnosis.summary
    assert "copies between devices: torch sees 0 devices" in diagnosis.not_checked


def said(code: str, given: Facts) -> str:
    """All that is said on a code: the sentence, the evidence, and what to do."""
    (advice,) = (advice for advice in diagnose_environment(given).advice if advice.code == code)
    return "\n".join((advice.sentence, *advice.evidence, advice.fix))


def nccl(name: str, value: str) -> Facts:
    return facts(2, nccl=(NcclSetting(name=name, value=value, source="/etc/nccl.conf"),))


def test_nccl_off_is_told_from_nccl_for_near_gpus() -> None:
    for given in (nccl("NCCL_P2P_DISABLE", "1"), nccl("NCCL_P2P_LEVEL", "loc"), nccl("NCCL_P2P_LEVEL", "0")):
        assert "uses no peer copies" in said("nccl-hides-peer-copies", given)
    assert "only between near GPUs" in said("nccl-hides-peer-copies", nccl("NCCL_P2P_LEVEL", "PIX"))
    assert "in /etc/nccl.conf" in said("nccl-hides-peer-copies", nccl("NCCL_P2P_LEVEL", "PIX"))


def test_the_kernels_options_are_evidence() -> None:
    given = with_machine(facts(2), bus=bus(iommu="DMA"), command_line="quiet intel_iommu=on")
    assert "booted with: intel_iommu=on" in said("iommu-translates", given)
    assert "no option about the IOMMU" in said("iommu-translates", with_machine(given, command_line="quiet"))


def test_a_split_tie_names_both_ends() -> None:
    given = facts(
        folder=TIED, device_map=DeviceMap(source="map.json", entries={"embed": 0, "head": "cuda:1"})
    )
    words = said("device-map-splits-tie", given)
    assert "embed.weight on 0, head.weight on 1" in words
    assert "map.json" in words


def test_offloaded_modules_are_named_and_others_are_not() -> None:
    given = facts(
        2,
        device_map=DeviceMap(
            source="map.json", entries={"embed": 0, "layers.0.a": "cpu", "layers.1.a": "cpu"}
        ),
    )
    words = said("device-map-offloads", given)
    assert "2 modules offloaded to cpu" in words
    assert "layers.{0...1}.a" in words
    assert "embed" not in words


def test_idle_devices_are_counted_and_the_config_is_named() -> None:
    words = said("idle-devices", facts(4, config=config(distributed_type="NO", num_processes=1)))
    assert "1 of 4 visible devices used: the other 3 stay idle" in words
    assert "distributed_type: NO, num_processes: 1" in words
    assert "--num_processes 4" in words


def test_paths_in_commands_are_quoted() -> None:
    given = facts(variables={"ACCELERATE_CONFIG_FILE": "/a b/c.yaml"}, config_variable_is_file=True)
    assert "--config_file '/a b/c.yaml'" in said("config-variable-ignored", given)


def test_the_name_that_was_meant_is_said() -> None:
    words = said("unknown-accelerate-name", facts(script=script("from accelerate import PartialSate")))
    assert "did you mean PartialState?" in words
    assert "line 1: from accelerate import PartialSate" in words
    words = said("unknown-accelerate-name", facts(script=script("from accelerate.state import PartialSate")))
    assert "accelerate.state has no PartialSate; did you mean PartialState?" in words


def test_an_old_driver_with_and_without_what_accelerate_asks_for() -> None:
    devices = tuple(Device(index=index, name="NVIDIA GeForce RTX 4090") for index in range(2))
    given = with_machine(with_torch(facts(2), devices=devices), driver="535.161.08")
    assert "raises NotImplementedError" in said("old-driver-peer-copies", given)
    half = replace(given, variables={"NCCL_P2P_DISABLE": "1"})
    assert "raises NotImplementedError" in said("old-driver-peer-copies", half)
    both = replace(given, variables={"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"})
    assert "with them set it trains" in said("old-driver-peer-copies", both)


def test_what_is_wrong_with_the_visible_devices_is_said() -> None:
    for value, words in (
        ("", "is empty"),
        ("1,1", "holds a device twice"),
        ("0,7", "names '7'"),
        ("x", "names 'x'"),
    ):
        given = facts(2, variables={"CUDA_VISIBLE_DEVICES": value})
        assert words in said("visible-devices-broken", given)


def test_the_build_of_torch_is_said() -> None:
    assert "(a CPU build)" in said("no-accelerator", facts())
    assert "(cuda 12.8)" in said("no-accelerator", with_torch(facts(), builds=("cuda 12.8",)))


def test_what_was_found_of_compilers_is_said() -> None:
    assert "found on the PATH: no compiler" in said("no-compiler", with_software(facts(), compilers={}))
    words = said("no-compiler", with_software(facts(), compilers={"gcc": "/usr/bin/gcc"}))
    assert "found on the PATH: gcc" in words
    assert "a C++ compiler" in words


def test_idle_devices_without_a_config_are_counted() -> None:
    given = facts(4, config=AccelerateConfig(path="/nowhere"))
    assert "3 devices of 4 idle" in said("no-accelerate-config", given)
    assert "idle" not in said("no-accelerate-config", facts(1, config=AccelerateConfig(path="/nowhere")))


def test_no_device_is_said_in_words() -> None:
    many = config(distributed_type="MULTI_GPU", num_processes=2)
    assert "and no device can be used" in said("too-few-devices", facts(0, config=many))
    assert "and 1 device can be used" in said("too-few-devices", facts(1, config=many))


def test_what_accelerate_reads_is_evidence() -> None:
    given = facts(variables={"ACCELERATE_CONFIG_FILE": "/nowhere", "CUDA_VISIBLE_DEVICES": "0"})
    assert "accelerate 1.15.0 does not read ACCELERATE_CONFIG_FILE" in said("config-file-missing", given)
    blind = with_software(given, accelerate=AccelerateSource())
    assert "accelerate's own source was not found" in said("config-file-missing", blind)


def test_one_refused_file_is_told_from_several_and_a_plain_pickle_is_called_so() -> None:
    words = said("unloadable-pickle", facts(folder=Folder(path="ckpt", refused=(UNLOADABLE,))))
    assert "train.pt: pkg.Settings" in words
    assert "more files" not in words
    plain = UnloadablePickle(path=PurePosixPath("a.bin"), globals=(), remedy="", plain=True)
    assert "a.bin: a plain pickle" in said(
        "unloadable-pickle", facts(folder=Folder(path="ckpt", refused=(plain,)))
    )


def test_an_empty_variable_names_nothing() -> None:
    assert "(nothing) is not there" in said(
        "config-file-missing", facts(variables={"ACCELERATE_CONFIG_FILE": ""})
    )
