"""Accelerate's config, and the processes that ``accelerate launch`` starts with it.

Source: ``_validate_launch_command`` and ``launch_command`` in ``accelerate/commands/launch.py``
(1.0 to 1.15), measured with 1.15.0. Several processes take a distributed type, or a flag for one:
``--num_processes`` alone starts one, unless there is no config and torch sees several devices.
"""

from collections.abc import Iterator

from msgspec import Struct

from ckptfix.environment.advice import ERROR, NOTE, WARNING, Said, say, topic
from ckptfix.environment.facts import Facts
from ckptfix.storage.paths import shell_path
from ckptfix.wording import count_of

SEVERAL = ("multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
"""Options that make the launcher start as many processes as it is asked for."""

_OTHER_MACHINES = ("tpu", "tpu_use_cluster")
_SEVERAL = ("MULTI_", "DEEPSPEED", "FSDP", "MEGATRON")


class Start(Struct, frozen=True, kw_only=True):
    """Start of training on this machine. ``count``: processes here. ``asked``: processes that the
    numbers ask for.

    ``machines``: machines on which it starts. ``why``: the reason for one process although more are
    asked for.
    """

    count: int
    asked: int
    machines: int = 1
    why: str = ""


def start_of(facts: Facts) -> Start | None:
    """Return what ``accelerate launch`` starts here, with the command's options or none; None where
    it is not known.
    """
    launch, config = facts.launch, facts.config
    if launch is not None and not launch.is_accelerate:
        return None
    has_config = config.asked or (config.exists and not is_given(facts, "cpu"))
    if any(is_given(facts, flag) for flag in _OTHER_MACHINES) or config.distributed_type == "XLA":
        return None
    if has_config and (not config.exists or config.problem or _is_sagemaker(facts)):
        return None
    if not has_config and facts.torch.problem:
        return None  # the number of devices decides
    total = given_number(facts, "num_processes") or (
        _config_number(facts, "num_processes") if has_config else max(facts.torch.count, 1)
    )
    machines = (
        given_number(facts, "num_machines")
        or (has_config and _config_number(facts, "num_machines"))
        or 1
    )
    if total is None:
        total = 1 if config.distributed_type in ("NO", "FALSE") else None
    if total is None:
        return None  # accelerate launch ends with an error
    here = max(total // machines, 1)
    why = _why_one(facts, has_config, total)
    return Start(count=1 if why else here, asked=here, machines=machines, why=why)


def is_given(facts: Facts, option: str) -> bool:
    """Return whether the command gives an option of the launcher."""
    return facts.launch is not None and facts.launch.given(option) is not None


def given_number(facts: Facts, option: str) -> int | None:
    """Return the positive number that an option of the launcher was given, None without one."""
    given = facts.launch.given(option) if facts.launch is not None else None
    return int(given) if given and given.isdecimal() and int(given) else None


def _config_number(facts: Facts, name: str) -> int | None:
    value = facts.config.values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _why_one(facts: Facts, has_config: bool, total: int) -> str:
    """Return why the launcher starts one process whatever the numbers say, "" where it starts as
    many as they say.
    """
    mpi = facts.config.values.get("mpirun_config") if has_config else None
    if is_given(facts, "mpirun_hostfile") or (isinstance(mpi, dict) and mpi.get("mpirun_hostfile")):
        return ""
    if is_given(facts, "cpu"):
        return "--cpu starts one process"
    if any(is_given(facts, flag) for flag in SEVERAL):
        return ""
    kind = facts.config.distributed_type
    if has_config:
        is_several = kind.startswith(_SEVERAL) and kind != "MULTI_CPU"
        return (
            ""
            if is_several
            else f"distributed_type is {'NO' if kind == 'FALSE' else kind} in {facts.config.path}"
        )
    if total > 1 and facts.torch.count > 1:
        return ""
    devices = "no device" if not facts.torch.count else "1 device"
    return f"there is no config, and torch sees {devices}"


def _is_sagemaker(facts: Facts) -> bool:
    return str(facts.config.values.get("compute_environment", "")).upper() == "AMAZON_SAGEMAKER"


@topic(
    "no-accelerate-config",
    "accelerate finds no config: `accelerate launch` starts one process per device, `python "
    "SCRIPT` only one",
    NOTE,
)
def no_config(facts: Facts) -> Iterator[Said]:
    """``accelerate launch`` then counts the devices and says so; ``python`` starts one process, and
    never reads it.
    """
    config, count = facts.config, facts.torch.count
    if config.exists or config.asked or not facts.software.packages.get("accelerate"):
        return
    if facts.launch is not None and (
        not facts.launch.is_accelerate or facts.launch.given("num_processes")
    ):
        return  # the processes are counted on the command line
    start = start_of(facts)
    many = f" {count_of(start.count, 'process')}" if start else " one process per device"
    yield say(
        f"there is no Accelerate config: accelerate launch starts{many} here, and `python "
        "SCRIPT` starts one",
        evidence=(f"{config.path} does not exist", f"torch sees {count_of(count, 'device')}"),
        fix=(
            "accelerate config, or pass it each time: accelerate launch "
            f"{'--multi_gpu --num_processes N ' if count > 1 else '--num_processes 1 '}SCRIPT"
        ),
    )


@topic(
    "unusable-launch-file",
    "the config or the script of the launch command does not exist, or accelerate cannot use the "
    "config: the launch fails",
    ERROR,
    WARNING,
)
def unusable_file(facts: Facts) -> Iterator[Said]:
    """``load_config_from_file`` and Python raise before the script's first line."""
    launch, config = facts.launch, facts.config
    command = (" ".join(launch.words),) if launch is not None else ()
    if path := facts.missing.get("--config_file"):
        yield say(
            f"{path} does not exist: accelerate launch ends with FileNotFoundError",
            evidence=command,
            fix=f"correct --config_file, or: accelerate config --config_file {shell_path(path)}",
        )
    is_remote = config.values.get("tpu_use_cluster") or _is_sagemaker(facts)
    if (script := facts.missing.get("")) and not is_remote:
        yield say(
            f"{script} does not exist: Python cannot start it",
            evidence=command,
            fix="correct the path of the script, or start the command in the folder that it is "
            "relative to",
        )
    is_read = launch is None or (
        launch.is_plain and launch.is_accelerate and (config.asked or not is_given(facts, "cpu"))
    )
    problem = config.problem if config.is_broken else ""
    if config.exists and not config.problem and not config.distributed_type:
        problem = "it has no distributed_type"
    if problem and is_read:
        yield say(
            f"accelerate launch cannot use its config {config.path}: {problem}",
            severity=WARNING if launch is None else ERROR,
            evidence=(f"{config.path}: {problem}", *command),
            fix="correct the file, or write a new one: accelerate config --config_file "
            f"{shell_path(config.path)}",
        )


@topic(
    "idle-devices",
    "the command or the config starts fewer processes than there are visible devices",
    WARNING,
)
def idle_devices(facts: Facts) -> Iterator[Said]:
    """Fewer processes than devices, without a list that says which."""
    used, count, start = _used(facts), facts.torch.count, start_of(facts)
    listed = _listed(facts)
    if used is None or used >= count or (listed != "all" and len(listed.split(",")) == used):
        return
    if start is not None and start.asked > start.count:
        return  # said by not_started
    if _is_python(facts):
        reason, fix = ": python starts one process and reads no config", "accelerate launch"
    elif _on_cpu(facts):
        reason, fix = (
            ": use_cpu is set",
            "accelerate config (without use_cpu), then run: accelerate launch",
        )
    else:
        reason, fix = "", "accelerate launch"
    flag = (
        "--multi_gpu " if facts.config.distributed_type in ("NO", "FALSE", "MULTI_CPU", "") else ""
    )
    yield say(
        f"{used} of {count_of(count, 'visible device')} used, {count - used} idle{reason}",
        evidence=_config_evidence(facts),
        fix=(
            f"{fix} {flag}--num_processes {count * (start.machines if start else 1)} SCRIPT, or "
            "accelerate config"
        ),
    )


@topic(
    "processes-not-started",
    "`num_processes` asks for several processes, but without `--multi_gpu` `accelerate launch` "
    "starts one",
    WARNING,
)
def not_started(facts: Facts) -> Iterator[Said]:
    """``--num_processes`` alone does not make a run distributed."""
    start = start_of(facts)
    if start is None or start.asked <= start.count:
        return
    number = start.asked
    on_cpu = _on_cpu(facts) or not facts.torch.count
    fix = f"ACCELERATE_USE_CPU=true torchrun --nproc_per_node {number} SCRIPT" if on_cpu else ""
    yield say(
        f"{number} processes requested, but accelerate launch starts 1: {start.why}",
        evidence=_config_evidence(facts),
        fix=fix
        or f"accelerate launch --multi_gpu --num_processes {number * start.machines} SCRIPT, or accelerate config",
    )


@topic(
    "too-few-devices",
    "the config starts more processes than there are visible devices: accelerate puts several "
    "processes on one device",
    WARNING,
)
def too_few_devices(facts: Facts) -> Iterator[Said]:
    """``PartialState.set_device`` takes the process's number modulo the number of devices
    (accelerate 1.15).
    """
    start, count = start_of(facts), facts.torch.count
    if start is None or start.count <= count or facts.torch.problem or _on_cpu(facts):
        return
    if count == 0 and start.count == 1:
        return
    what = "no device" if count == 0 else f"only {count_of(count, 'device')}"
    yield say(
        f"{_processes(start.count)} will run on this machine, but torch can use {what}",
        evidence=_config_evidence(facts),
        fix=(
            f"accelerate launch --num_processes {max(count, 1) * start.machines} SCRIPT, "
            "or make the other devices visible"
        ),
    )


@topic(
    "overridden-devices",
    "the config's `gpu_ids` replaces `CUDA_VISIBLE_DEVICES` in the launched processes",
    WARNING,
)
def overridden_devices(facts: Facts) -> Iterator[Said]:
    """``accelerate launch`` sets the variable itself when the config lists devices."""
    listed, visible = _listed(facts), facts.variables.get("CUDA_VISIBLE_DEVICES")
    if visible is None or listed in ("all", visible):
        return
    yield say(
        f"CUDA_VISIBLE_DEVICES={visible}, but accelerate launch replaces it with gpu_ids: {listed}",
        evidence=_config_evidence(facts),
        fix="set only one of the two; --gpu_ids all keeps CUDA_VISIBLE_DEVICES",
    )


def _used(facts: Facts) -> int | None:
    """Return how many devices the processes of this machine use, None when nothing says."""
    if _is_python(facts):
        return 1
    if is_given(facts, "cpu") or (facts.launch is not None and not facts.launch.is_accelerate):
        return None  # --cpu is no oversight: who writes it wants no device
    if facts.config.values.get("use_cpu"):
        return 0
    start = start_of(facts)
    return (
        start.count
        if start is not None and (facts.config.exists or facts.launch is not None)
        else None
    )


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _is_python(facts: Facts) -> bool:
    """Return whether ``python SCRIPT`` starts a script that makes an Accelerator, and nothing else
    uses devices.
    """
    uses = facts.script.uses if facts.script is not None else None
    if facts.launch is None or not facts.launch.is_python or uses is None:
        return False
    return bool(uses.accelerators) and not uses.launches and not uses.device_maps


def _on_cpu(facts: Facts) -> bool:
    return is_given(facts, "cpu") or bool(facts.config.values.get("use_cpu"))


def _listed(facts: Facts) -> str:
    """Return the devices that the launcher lists: of the command line, else of the config; "all"
    without a list.
    """
    given = facts.launch.given("gpu_ids") if facts.launch is not None else None
    listed = given if given is not None else facts.config.values.get("gpu_ids")
    return "all" if listed is None else str(listed)


def _config_evidence(facts: Facts) -> tuple[str, ...]:
    shown = ("distributed_type", "num_processes", "num_machines", "gpu_ids", "use_cpu")
    values = ", ".join(
        f"{name}: {facts.config.values[name]}" for name in shown if name in facts.config.values
    )
    evidence = [f"{facts.config.path}: {values}"] if facts.config.exists else []
    if facts.launch is not None:
        evidence.append(" ".join(facts.launch.words))
    if (visible := facts.variables.get("CUDA_VISIBLE_DEVICES")) is not None:
        evidence.append(f"CUDA_VISIBLE_DEVICES={visible}")
    return (*evidence, f"torch sees {count_of(facts.torch.count, 'device')}")
