"""Every check on environments made by hand: it speaks where it must, and is silent where it must
be.
"""

from pathlib import PurePosixPath

import pytest
from msgspec.structs import replace

from ckptfix.diagnosis.findings.damaged import UnloadablePickle
from ckptfix.environment.doctor import diagnose_environment
from ckptfix.environment.facts import Facts
from ckptfix.environment.facts.installed import find_source
from ckptfix.environment.facts.launch import AccelerateConfig
from ckptfix.environment.facts.machine import Device
from ckptfix.environment.facts.script import Script
from ckptfix.environment.facts.script_uses import Uses
from ckptfix.environment.facts.weights import DeviceMap, Folder
from tests.environment.building import (
    bus,
    config,
    facts,
    launch,
    script,
    with_machine,
    with_software,
    with_torch,
)
from tests.environment.cases import CASES
from tests.environment.cases.case import Case
from tests.environment.cases.folders import UNLOADABLE
from tests.environment.cases.placement import TIED


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.code}-{case.name}".replace(" ", "-")
)
def test_it_speaks_exactly_where_it_must(case: Case) -> None:
    found = [
        advice for advice in diagnose_environment(case.facts).advice if advice.code == case.code
    ]
    assert [advice.severity for advice in found] == (
        [] if case.severity is None else [case.severity]
    )
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
    return facts(2, variables={name: value})


def test_nccl_off_is_told_from_nccl_for_near_gpus() -> None:
    for given in (
        nccl("NCCL_P2P_DISABLE", "1"),
        nccl("NCCL_P2P_LEVEL", "loc"),
        nccl("NCCL_P2P_LEVEL", "0"),
    ):
        assert "uses no P2P copies" in said("nccl-hides-peer-copies", given)
    assert "only between nearby GPUs" in said(
        "nccl-hides-peer-copies", nccl("NCCL_P2P_LEVEL", "PIX")
    )


def test_the_kernels_options_are_evidence() -> None:
    given = with_machine(facts(2), bus=bus(iommu="DMA"), command_line="quiet intel_iommu=on")
    assert "booted with: intel_iommu=on" in said("iommu-translates", given)
    assert "no IOMMU option" in said("iommu-translates", with_machine(given, command_line="quiet"))


def test_a_split_tie_names_both_ends() -> None:
    given = facts(
        folder=TIED,
        device_map=DeviceMap(source="map.json", entries={"embed": 0, "head": "cuda:1"}),
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
    assert "1 of 4 visible devices used, 3 idle" in words
    assert "distributed_type: NO, num_processes: 1" in words
    assert "--num_processes 4" in words


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("my run.py", "python -m py_compile 'my run.py'"),
        ("a b.ipynb", "open 'a b.ipynb' in Jupyter and correct it"),
    ],
)
def test_a_notebook_is_not_given_to_the_compiler(path: str, fix: str) -> None:
    """Its JSON compiles as Python, so that the command found no fault."""
    broken = Script(path=path, uses=Uses(), problem="cell 10, line 3: invalid syntax")
    (advice,) = (
        one for one in diagnose_environment(facts(script=broken)).advice if "python" in one.code
    )
    assert advice.fix == fix


def test_the_name_that_was_meant_is_said() -> None:
    words = said(
        "unknown-accelerate-name", facts(script=script("from accelerate import PartialSate"))
    )
    assert "did you mean PartialState?" in words
    assert "line 1: from accelerate import PartialSate" in words
    words = said(
        "unknown-accelerate-name", facts(script=script("from accelerate.state import PartialSate"))
    )
    assert "accelerate.state has no PartialSate; did you mean PartialState?" in words


def test_an_old_driver_by_how_the_script_is_started() -> None:
    """As ``multi_gpu_launcher`` and ``PartialState`` of accelerate do; a test below reads their
    source.
    """
    devices = tuple(Device(index=index, name="NVIDIA GeForce RTX 4090") for index in range(2))
    given = with_machine(with_torch(facts(2), devices=devices), driver="535.161.08")
    one = replace(given, config=config(distributed_type="NO", num_processes=1))
    raises, sets = (
        "raises NotImplementedError",
        "sets NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 itself",
    )
    for facts_now, said_of_it in (
        (given, (sets, f"started in any other way, Accelerator() {raises}")),
        (replace(given, launch=launch("accelerate launch train.py")), (sets,)),
        (replace(given, launch=launch("accelerate launch --num_processes 1 train.py")), (raises,)),
        (replace(one, launch=launch("accelerate launch train.py")), (raises,)),
        (
            replace(one, launch=launch("accelerate launch --multi_gpu --num_processes 2 train.py")),
            (sets,),
        ),
        (replace(given, launch=launch("torchrun train.py")), (raises,)),
        (replace(given, launch=launch("python train.py")), (raises,)),
        (
            replace(given, variables={"NCCL_P2P_DISABLE": "1"}, launch=launch("torchrun a.py")),
            (raises,),
        ),
    ):
        words = said("old-driver-peer-copies", facts_now)
        for part in (*said_of_it, "tensor.to() and device_map still copy directly"):
            assert part in words
        assert (raises in words) == any(raises in part for part in said_of_it)
    both = replace(given, variables={"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"})
    assert "are set: training starts" in said("old-driver-peer-copies", both)


def test_the_installed_accelerate_sets_the_variables_in_its_launchers_and_asks_for_them_in_its_state() -> (
    None
):
    package = find_source("accelerate")
    assert package is not None
    launcher = (package / "commands" / "launch.py").read_text()
    body = launcher[
        launcher.index("def multi_gpu_launcher") : launcher.index("def deepspeed_launcher")
    ]
    assert 'current_env["NCCL_P2P_DISABLE"] = "1"' in body
    simple = launcher[
        launcher.index("def simple_launcher") : launcher.index("def multi_gpu_launcher")
    ]
    assert "NCCL" not in simple
    assert "raise NotImplementedError" in (package / "state.py").read_text()


def test_what_is_wrong_with_the_visible_devices_is_said() -> None:
    for value, words in (
        ("", "has an empty entry"),
        ("1,1", "lists a device twice"),
        ("0,7", "names '7'"),
        ("x", "names 'x'"),
    ):
        given = facts(2, variables={"CUDA_VISIBLE_DEVICES": value})
        assert words in said("visible-devices-broken", given)


def test_the_build_of_torch_is_said() -> None:
    assert "(a CPU build)" in said("no-accelerator", facts())
    assert "(cuda 12.8)" in said("no-accelerator", with_torch(facts(), builds=("cuda 12.8",)))


def test_what_was_found_of_compilers_is_said() -> None:
    assert "found on the PATH: no compiler" in said(
        "no-compiler", with_software(facts(), compilers={})
    )
    words = said("no-compiler", with_software(facts(), compilers={"gcc": "/usr/bin/gcc"}))
    assert "found on the PATH: gcc" in words
    assert "a C++ compiler" in words


def test_without_a_config_the_launcher_starts_a_process_for_each_device() -> None:
    given = facts(4, config=AccelerateConfig(path="/nowhere"))
    assert "accelerate launch starts 4 processes here, and `python SCRIPT` starts one" in said(
        "no-accelerate-config", given
    )
    assert "starts 1 process here" in said(
        "no-accelerate-config", facts(config=AccelerateConfig(path="/nowhere"))
    )


def test_the_advice_starts_as_many_processes_as_it_says() -> None:
    """``--num_processes`` alone starts one process where the config says NO."""
    one = facts(4, config=config(distributed_type="NO", num_processes=1))
    assert "accelerate launch --multi_gpu --num_processes 4 SCRIPT" in said("idle-devices", one)
    some = facts(4, config=config(distributed_type="MULTI_GPU", num_processes=2))
    assert "accelerate launch --num_processes 4 SCRIPT" in said("idle-devices", some)
    nodes = facts(8, config=config(distributed_type="MULTI_GPU", num_processes=8, num_machines=2))
    assert "4 of 8 visible devices used" in said("idle-devices", nodes)
    assert "--num_processes 16 SCRIPT" in said("idle-devices", nodes)
    alone = facts(
        launch=launch("accelerate launch --num_processes 2 a.py"),
        config=AccelerateConfig(path="/no"),
    )
    assert "accelerate launch starts 1: there is no config, and torch sees no device" in said(
        "processes-not-started", alone
    )
    assert "torchrun --nproc_per_node 2 SCRIPT" in said("processes-not-started", alone)


def test_a_model_prepared_twice_is_named_with_both_lines() -> None:
    text = (
        "from accelerate import Accelerator\na = Accelerator()\nnet = a.prepare(net)\nnet = "
        "a.prepare(net)"
    )
    words = said("prepared-twice", facts(script=script(text)))
    assert "passes net to prepare() twice" in words
    assert "line 3: net = a.prepare(net)\nline 4: net = a.prepare(net)" in words
    assert "ckptfix run SCRIPT" in words


def test_no_device_is_said_in_words() -> None:
    many = config(distributed_type="MULTI_GPU", num_processes=2)
    assert "but torch can use no device" in said("too-few-devices", facts(0, config=many))
    assert "but torch can use only 1 device" in said("too-few-devices", facts(1, config=many))


def test_one_refused_file_is_told_from_several_and_a_plain_pickle_is_called_so() -> None:
    words = said("unloadable-pickle", facts(folder=Folder(path="ckpt", refused=(UNLOADABLE,))))
    assert "train.pt: pkg.Settings" in words
    assert "more file" not in words
    plain = UnloadablePickle(path=PurePosixPath("a.bin"), globals=(), remedy="", plain=True)
    assert "a.bin: a plain pickle" in said(
        "unloadable-pickle", facts(folder=Folder(path="ckpt", refused=(plain,)))
    )
