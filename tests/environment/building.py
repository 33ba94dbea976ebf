"""Facts made by hand: a healthy environment, and changes to it."""

import textwrap
from itertools import combinations
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ckptfix.environment.facts import Facts
from ckptfix.environment.facts.installed import AccelerateSource, Command, Package, Software
from ckptfix.environment.facts.launch import AccelerateConfig, Launch, read_launch
from ckptfix.environment.facts.machine import Device, PairVerdict, Torch
from ckptfix.environment.facts.script import Script
from ckptfix.environment.facts.script_scan import Scan
from ckptfix.environment.facts.script_uses import SourceLine
from ckptfix.hardware import Bus, Distance, Machine, PciDevice

OPTIONS = {
    "config_file": True,
    "num_processes": True,
    "gpu_ids": True,
    "mixed_precision": True,
    "multi_gpu": False,
    "use_deepspeed": False,
    "use_fsdp": False,
    "no_python": False,
    "num_machines": True,
    "cpu": False,
    "debug": False,
    "module": False,
    "m": False,
}
ACCELERATE = AccelerateSource(
    names=frozenset({"Accelerator", "PartialState", "notebook_launcher", "state", "utils"}),
    modules={
        "state": frozenset({"AcceleratorState", "PartialState"}),
        "utils": frozenset({"DeepSpeedPlugin", "modeling", "set_seed"}),
        "utils.modeling": frozenset("*"),
    },
    options=OPTIONS,
)
PACKAGES = {
    "torch": Package(name="torch", version="2.13.0", requires_python=">=3.10"),
    "accelerate": Package(name="accelerate", version="1.15.0", requires_python=">=3.10.0"),
}
CONFIG = "/home/user/.cache/huggingface/accelerate/default_config.yaml"


def software(**changes: Any) -> Software:
    """A Python with torch and accelerate, a compiler, and its own command on the PATH."""
    given: dict[str, Any] = {
        "python": (3, 11, 7),
        "executable": "/env/bin/python",
        "packages": PACKAGES,
        "command": Command(
            path="/env/bin/accelerate", interpreter="/env/bin/python", python=(3, 11, 7)
        ),
        "next_to_python": "/env/bin/accelerate",
        "accelerate": ACCELERATE,
        "compilers": {"g++": "/usr/bin/g++"},
    }
    return Software(**{**given, **changes})


def gpu(number: int, **changes: Any) -> PciDevice:
    """An NVIDIA GPU."""
    given: dict[str, Any] = {
        "address": f"0000:{number + 1:02x}:00.0",
        "vendor": "NVIDIA",
        "name": "NVIDIA RTX 6000",
    }
    return PciDevice(**{**given, **changes})


def bus(count: int = 2, way: str = "PIX", **changes: Any) -> Bus:
    """So many GPUs on one bus, with this between any two of them."""
    gpus = tuple(gpu(number, **changes) for number in range(count))
    distances = {
        frozenset((one.address, other.address)): Distance[way]
        for one, other in combinations(gpus, 2)
    }
    return Bus(gpus=gpus, distances=distances)


def torch(count: int = 0, **changes: Any) -> Torch:
    """A torch that sees so many devices."""
    devices = tuple(
        Device(index=index, name="NVIDIA RTX 6000", pci=f"0000:{index + 1:02x}:00.0")
        for index in range(count)
    )
    given: dict[str, Any] = {
        "version": "2.13.0",
        "stage": "done",
        "builds": ("cuda 12.8",) if count else (),
        "kind": "cuda" if count else "",
        "devices": devices,
    }
    return Torch(**{**given, **changes})


def config(**values: Any) -> AccelerateConfig:
    """A config that is there, with these values."""
    return AccelerateConfig(path=CONFIG, exists=True, values=values)


def facts(count: int = 0, **changes: Any) -> Facts:
    """A healthy environment with so many GPUs: each is used, visible, and proven."""
    pairs = ((one, other) for one in range(count) for other in range(count) if one != other)
    given: dict[str, Any] = {
        "software": software(),
        "torch": torch(
            count, verdicts=tuple(PairVerdict(pair=pair, verdict="healthy") for pair in pairs)
        ),
        "machine": Machine(
            bus=Bus(gpus=tuple(gpu(number) for number in range(count))),
            device_nodes=count,
            driver="570.86.15",
        ),
        "config": config(
            compute_environment="LOCAL_MACHINE",
            distributed_type="MULTI_GPU" if count > 1 else "NO",
            num_processes=max(count, 1),
        ),
    }
    if not count:
        given["torch"] = torch()
    return Facts(**{**given, **changes})


def script(text: str) -> Script:
    """A script with this text."""
    import ast

    lines = textwrap.dedent(text).strip().splitlines()
    scan = Scan()
    tree = ast.parse("\n".join(lines))
    scan.read(
        tree,
        lambda line: SourceLine(
            order=(0, line), where=f"line {line}", text=lines[line - 1].strip()
        ),
    )
    return Script(path="train.py", uses=scan.uses())


def launch(command: str) -> Launch:
    """A command line, read with the options above."""
    return read_launch(command, OPTIONS)


def with_machine(given: Facts, **changes: Any) -> Facts:
    """The same environment on a machine that differs in these points."""
    return replace(given, machine=replace(given.machine, **changes))


def with_torch(given: Facts, **changes: Any) -> Facts:
    """The same environment with a torch that differs in these points."""
    return replace(given, torch=replace(given.torch, **changes))


def with_software(given: Facts, **changes: Any) -> Facts:
    """The same environment with software that differs in these points."""
    return replace(given, software=replace(given.software, **changes))


FIXTURES = Path(__file__).parents[2] / "fixtures"
