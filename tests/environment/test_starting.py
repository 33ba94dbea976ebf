"""How many processes start: compared with what the installed ``accelerate launch`` decides
itself.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ckptfix.environment.checks.configuration import start_of
from ckptfix.environment.facts.installed import read_software
from ckptfix.environment.facts.launch import (
    AccelerateConfig,
    read_config,
    read_launch,
)
from tests.environment.building import facts

CONFIGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "single": {"distributed_type": "NO", "num_processes": 1},
    "single without a number": {"distributed_type": "NO"},
    "single in YAML": {"distributed_type": False, "num_processes": 1},
    "single with a number": {"distributed_type": "NO", "num_processes": 4},
    "two": {"distributed_type": "MULTI_GPU", "num_processes": 2},
    "two machines": {"distributed_type": "MULTI_GPU", "num_processes": 8, "num_machines": 2},
    "sharded": {"distributed_type": "FSDP", "num_processes": 2, "num_machines": 1},
    "CPUs": {"distributed_type": "MULTI_CPU", "num_processes": 2, "num_machines": 1, "use_cpu": True},
    "by MPI": {
        "distributed_type": "MULTI_CPU", "num_processes": 4, "num_machines": 2, "use_cpu": True,
        "mpirun_config": {"mpirun_hostfile": "hosts"},
    },
    "GPUs as CPUs": {"distributed_type": "MULTI_GPU", "num_processes": 2, "num_machines": 1, "use_cpu": True},
    "no number": {"distributed_type": "MULTI_GPU", "num_machines": 1},
}  # fmt: skip
OPTIONS = (
    "", "--num_processes 2", "--multi_gpu", "--multi_gpu --num_processes 2", "--cpu",
    "--cpu --num_processes 2", "--num_processes 8 --num_machines 2", "--use_fsdp --num_processes 2",
    "--gpu_ids all",
)  # fmt: skip


@pytest.fixture(scope="module")
def software() -> Any:
    return read_software({})


def really_started(command: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Return how many processes the installed launcher would start on a machine with so many GPUs,
    None for none.
    """
    import torch
    from accelerate.commands import launch as launcher

    started: list[int] = []

    def several(args: Any) -> None:
        started.append(max(int(args.num_processes) // int(args.num_machines or 1), 1))

    def single(args: Any) -> None:
        is_mpi = getattr(args, "mpirun_hostfile", None) is not None
        started.append(int(args.num_processes) // int(args.num_machines) if is_mpi else 1)

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: devices)
        patch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        patch.setattr(launcher, "multi_gpu_launcher", several)
        patch.setattr(launcher, "simple_launcher", single)
        patch.setattr(launcher, "default_config_file", "/nowhere/default_config.yaml")
        try:
            launcher.launch_command(
                launcher.launch_command_parser().parse_args(command.split()[2:])
            )
        except ValueError:
            return None
    return started[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_launcher_starts_as_many_as_is_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, software: Any
) -> None:
    values, path = CONFIGS[name], tmp_path / "own.json"
    if values is not None:
        path.write_text(json.dumps({"compute_environment": "LOCAL_MACHINE", **values}))
    for options, devices in product(OPTIONS, (0, 1, 2, 4)):
        own = f"--config_file {path} " if values is not None else ""
        command = f"accelerate launch {own}{options} train.py"
        config = (
            read_config({}, str(path))
            if own
            else AccelerateConfig(path="/nowhere/default_config.yaml")
        )
        launch = read_launch(command, software.accelerate.options)
        start = start_of(facts(devices, launch=launch, config=config))
        really = really_started(command, devices, monkeypatch)
        assert (start.count if start is not None else None) == really, (
            f"{command} with {devices} devices"
        )
