"""Accelerate's config."""

from msgspec.structs import replace

from ckptfix.environment.facts.launch import AccelerateConfig
from tests.environment.building import (
    CONFIG,
    config,
    facts,
    launch,
    script,
    with_software,
    with_torch,
)
from tests.environment.cases.case import ERROR, NOTE, WARNING, Case

NO_CONFIG = AccelerateConfig(path=CONFIG)
MAKES_ACCELERATOR = "from accelerate import Accelerator, notebook_launcher\nAccelerator()\n"
LAUNCHES = "notebook_launcher(train, num_processes=4)\n"

BROKEN = replace(config(), values={}, problem="ScannerError", is_broken=True)

CONFIGURATION = (
    Case(
        "unusable-launch-file",
        "no config",
        facts(
            launch=launch("accelerate launch --config_file nope.yaml train.py"),
            config=AccelerateConfig(path="nope.yaml", asked=True),
            missing={"--config_file": "nope.yaml"},
        ),
        ERROR,
    ),
    Case(
        "unusable-launch-file",
        "no script",
        facts(launch=launch("accelerate launch nope.py"), missing={"": "nope.py"}),
        ERROR,
    ),
    Case(
        "unusable-launch-file",
        "a broken config",
        facts(launch=launch("accelerate launch train.py"), config=BROKEN),
        ERROR,
    ),
    Case("unusable-launch-file", "a broken config, no command", facts(config=BROKEN), WARNING),
    *(
        Case(
            "unusable-launch-file",
            command,
            facts(launch=launch(command), config=BROKEN),
            None,
        )
        for command in (
            "accelerate launch --cpu train.py",
            "torchrun --nproc_per_node 2 train.py",
            "python train.py",
        )
    ),
    Case(
        "unusable-launch-file",
        "a broken config that --cpu does not replace",
        facts(
            launch=launch("accelerate launch --cpu --config_file a.yaml train.py"),
            config=replace(BROKEN, asked=True),
        ),
        ERROR,
    ),
    Case(
        "unusable-launch-file",
        "a config that only ckptfix cannot read",
        facts(
            launch=launch("accelerate launch train.py"),
            config=replace(BROKEN, problem="it is too large", is_broken=False),
        ),
        None,
    ),
    Case("no-accelerate-config", "no GPU", facts(config=NO_CONFIG), NOTE),
    Case("no-accelerate-config", "two GPUs", facts(2, config=NO_CONFIG), NOTE),
    Case("no-accelerate-config", "there", facts(2), None),
    Case(
        "no-accelerate-config",
        "counted on the command line",
        facts(2, config=NO_CONFIG, launch=launch("accelerate launch --num_processes 2 train.py")),
        None,
    ),
    Case(
        "no-accelerate-config",
        "torchrun",
        facts(2, config=NO_CONFIG, launch=launch("torchrun train.py")),
        None,
    ),
    Case(
        "idle-devices",
        "one process of four",
        facts(4, config=config(distributed_type="NO")),
        WARNING,
    ),
    Case(
        "idle-devices",
        "cpu",
        facts(2, config=config(distributed_type="MULTI_GPU", use_cpu=True)),
        WARNING,
    ),
    Case(
        "idle-devices",
        "meant: a list of ids",
        facts(4, config=config(distributed_type="MULTI_GPU", num_processes=2, gpu_ids="0,1")),
        None,
    ),
    Case("idle-devices", "all used", facts(4), None),
    Case(
        "idle-devices",
        "counted on the command line",
        facts(
            4,
            config=config(distributed_type="NO"),
            launch=launch("accelerate launch --num_processes=4 train.py"),
        ),
        None,  # processes-not-started says it
    ),
    Case(
        "idle-devices",
        "python starts one process, whatever the config says",
        facts(4, launch=launch("python train.py"), script=script(MAKES_ACCELERATOR)),
        WARNING,
    ),
    Case(
        "idle-devices",
        "python, and a script that launches processes itself",
        facts(4, launch=launch("python train.py"), script=script(MAKES_ACCELERATOR + LAUNCHES)),
        None,
    ),
    Case(
        "idle-devices",
        "python, and a model on a device map",
        facts(
            4,
            launch=launch("python train.py"),
            script=script(MAKES_ACCELERATOR + "m(device_map='auto')"),
        ),
        None,
    ),
    Case(
        "idle-devices",
        "a module of Python's",
        facts(
            4,
            launch=launch("python -m torch.distributed.run --nproc_per_node 4 train.py"),
            script=script(MAKES_ACCELERATOR),
        ),
        None,
    ),
    Case(
        "idle-devices",
        "no config: as many as there are devices",
        facts(4, config=NO_CONFIG, launch=launch("accelerate launch train.py")),
        None,
    ),
    *(
        Case(
            "processes-not-started",
            command,
            facts(count, config=given, launch=launch(command)),
            WARNING,
        )
        for count, given, command in (
            (4, config(distributed_type="NO"), "accelerate launch --num_processes 4 train.py"),
            (
                4,
                config(distributed_type=False, num_processes=1),
                "accelerate launch --num_processes 4 train.py",
            ),
            (0, NO_CONFIG, "accelerate launch --num_processes 2 train.py"),
            (1, NO_CONFIG, "accelerate launch --num_processes 2 train.py"),
            (0, NO_CONFIG, "accelerate launch --cpu --num_processes 2 train.py"),
            (
                0,
                config(distributed_type="MULTI_CPU", num_processes=2),
                "accelerate launch train.py",
            ),
        )
    ),
    Case(
        "processes-not-started",
        "by the config alone",
        facts(4, config=config(distributed_type="NO", num_processes=4)),
        WARNING,
    ),
    *(
        Case(
            "processes-not-started",
            command,
            facts(count, config=given, launch=launch(command)),
            None,
        )
        for count, given, command in (
            (
                4,
                config(distributed_type="NO"),
                "accelerate launch --multi_gpu --num_processes 4 train.py",
            ),
            (
                4,
                config(distributed_type="NO"),
                "accelerate launch --use_deepspeed --num_processes 4 train.py",
            ),
            (4, config(distributed_type="NO"), "accelerate launch --multi_gpu train.py"),
            (4, config(distributed_type="NO"), "accelerate launch train.py"),
            (4, config(distributed_type="FSDP", num_processes=4), "accelerate launch train.py"),
            (2, NO_CONFIG, "accelerate launch train.py"),
            (2, NO_CONFIG, "accelerate launch --num_processes 2 train.py"),
            (4, NO_CONFIG, "accelerate launch --num_machines 2 --num_processes 8 train.py"),
            (4, config(distributed_type="NO"), "torchrun --nproc_per_node 4 train.py"),
            (0, config(distributed_type="XLA", num_processes=8), "accelerate launch train.py"),
            (
                0,
                config(
                    distributed_type="MULTI_CPU",
                    num_processes=2,
                    mpirun_config={"mpirun_hostfile": "hosts"},
                ),
                "accelerate launch train.py",
            ),
        )
    ),
    Case(
        "idle-devices",
        "one process by --multi_gpu alone",
        facts(
            4,
            config=config(distributed_type="NO", num_processes=1),
            launch=launch("accelerate launch --multi_gpu a.py"),
        ),
        WARNING,
    ),
    Case(
        "too-few-devices",
        "eight on two",
        facts(2, config=config(distributed_type="MULTI_GPU", num_processes=8)),
        WARNING,
    ),
    Case(
        "too-few-devices",
        "two on none",
        facts(0, config=config(distributed_type="MULTI_GPU", num_processes=2)),
        WARNING,
    ),
    Case(
        "too-few-devices",
        "eight on two machines",
        facts(4, config=config(distributed_type="MULTI_GPU", num_processes=8, num_machines=2)),
        None,
    ),
    *(
        Case("too-few-devices", command, facts(4, config=given, launch=launch(command)), None)
        for given in (config(distributed_type="MULTI_GPU", num_processes=4), NO_CONFIG)
        for command in (
            "accelerate launch --num_machines 2 --num_processes 8 a.py",
            "accelerate launch --cpu --num_processes 8 a.py",
        )
    ),
    Case(
        "too-few-devices",
        "eight on the command line, two machines in the config",
        facts(
            4,
            config=config(distributed_type="MULTI_GPU", num_processes=4, num_machines=2),
            launch=launch("accelerate launch --num_processes 8 a.py"),
        ),
        None,
    ),
    Case(
        "too-few-devices",
        "eight in the config, one machine on the command line",
        facts(
            4,
            config=config(distributed_type="MULTI_GPU", num_processes=8, num_machines=2),
            launch=launch("accelerate launch --num_machines 1 a.py"),
        ),
        WARNING,
    ),
    Case(
        "too-few-devices",
        "sixteen on two machines",
        facts(4, launch=launch("accelerate launch --num_machines 2 --num_processes 16 a.py")),
        WARNING,
    ),
    Case(
        "too-few-devices",
        "on CPUs",
        facts(0, config=config(distributed_type="MULTI_CPU", num_processes=8)),
        None,
    ),
    Case(
        "overridden-devices",
        "config",
        facts(2, config=config(gpu_ids="0,1"), variables={"CUDA_VISIBLE_DEVICES": "2,3"}),
        WARNING,
    ),
    Case(
        "overridden-devices",
        "command line",
        facts(
            2,
            variables={"CUDA_VISIBLE_DEVICES": "2"},
            launch=launch("accelerate launch --gpu_ids 1 train.py"),
        ),
        WARNING,
    ),
    Case(
        "overridden-devices",
        "all",
        facts(2, config=config(gpu_ids="all"), variables={"CUDA_VISIBLE_DEVICES": "2,3"}),
        None,
    ),
    Case(
        "no-accelerate-config",
        "asked for another",
        facts(2, config=replace(NO_CONFIG, asked=True)),
        None,
    ),
    Case(
        "no-accelerate-config",
        "no accelerate",
        with_software(facts(2, config=NO_CONFIG), packages={}),
        None,
    ),
    Case(
        "no-accelerate-config",
        "not counted on the command line",
        facts(2, config=NO_CONFIG, launch=launch("accelerate launch train.py")),
        NOTE,
    ),
    Case(
        "idle-devices",
        "meant: a list of ids on the command line",
        facts(4, launch=launch("accelerate launch --gpu_ids 0,1 --num_processes 2 a.py")),
        None,
    ),
    Case(
        "idle-devices",
        "a list of other length on the command line",
        facts(
            4,
            config=config(distributed_type="MULTI_GPU", num_processes=2, gpu_ids="0,1"),
            launch=launch("accelerate launch --gpu_ids 0,1,2 a.py"),
        ),
        WARNING,
    ),
    Case(
        "idle-devices",
        "meant: --cpu",
        facts(
            4, config=config(distributed_type="NO"), launch=launch("accelerate launch --cpu a.py")
        ),
        None,
    ),
    Case("idle-devices", "no config", facts(4, config=NO_CONFIG), None),
    Case(
        "idle-devices",
        "a broken config",
        facts(4, config=replace(config(), problem="ScannerError")),
        None,
    ),
    Case(
        "idle-devices",
        "torchrun",
        facts(4, config=config(distributed_type="NO"), launch=launch("torchrun a.py")),
        None,
    ),
    Case("idle-devices", "not said", facts(4, config=config(distributed_type="MULTI_GPU")), None),
    Case(
        "idle-devices",
        "a list of other length",
        facts(4, config=config(distributed_type="MULTI_GPU", num_processes=2, gpu_ids="0,1,2")),
        WARNING,
    ),
    Case(
        "too-few-devices",
        "one process on none",
        facts(0, config=config(distributed_type="NO")),
        None,
    ),
    Case(
        "too-few-devices", "not said", facts(0, config=config(distributed_type="MULTI_GPU")), None
    ),
    Case(
        "too-few-devices",
        "devices not known",
        with_torch(
            facts(0, config=config(distributed_type="MULTI_GPU", num_processes=2)),
            problem="killed",
        ),
        None,
    ),
    Case(
        "too-few-devices",
        "cpu by config",
        facts(
            1,
            config=config(distributed_type="MULTI_GPU", use_cpu=True),
            launch=launch("accelerate launch --num_processes 4 a.py"),
        ),
        None,
    ),
    Case("overridden-devices", "not set", facts(2, config=config(gpu_ids="0,1")), None),
    Case(
        "overridden-devices",
        "the same",
        facts(2, config=config(gpu_ids="0,1"), variables={"CUDA_VISIBLE_DEVICES": "0,1"}),
        None,
    ),
    Case(
        "overridden-devices",
        "null",
        facts(2, config=config(gpu_ids=None), variables={"CUDA_VISIBLE_DEVICES": "0,1"}),
        None,
    ),
    Case(
        "overridden-devices",
        "all on the command line",
        facts(
            2,
            config=config(gpu_ids="0,1"),
            variables={"CUDA_VISIBLE_DEVICES": "2,3"},
            launch=launch("accelerate launch --gpu_ids all a.py"),
        ),
        None,
    ),
    Case("no-accelerate-config", "one GPU", facts(1, config=NO_CONFIG), NOTE),
)
