"""The processes that ``accelerate launch`` starts on this machine, by its own rules.

Source: ``_validate_launch_command`` and ``launch_command`` in ``accelerate/commands/launch.py`` (1.0 to 1.15), measured
with 1.15.0. Several processes take a distributed type, or a flag for one: ``--num_processes`` alone starts one, unless
there is no config and torch sees several devices.
"""

from dataclasses import dataclass

from ckptfix.operations.doctor.facts import Facts

SEVERAL = ("multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
"""Options that make the launcher start as many processes as it is asked for."""

_OTHER_MACHINES = ("tpu", "tpu_use_cluster")
_TYPES = ("MULTI_", "DEEPSPEED", "FSDP", "MEGATRON")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How training starts on this machine. ``count``: of processes. ``asked``: how many the numbers ask for.

    ``machines``: on how many it starts. ``why``: what makes it one process although more are asked for.
    """

    count: int
    asked: int
    machines: int = 1
    why: str = ""


def start_of(facts: Facts) -> Start | None:
    """Return what ``accelerate launch`` starts here, with the command's options or none; None where it is not known."""
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
        given_number(facts, "num_machines") or (has_config and _config_number(facts, "num_machines")) or 1
    )
    if total is None:
        total = 1 if config.distributed_type in ("NO", "FALSE") else None
    if total is None:
        return None  # accelerate launch ends with an error
    here = max(total // machines, 1)
    why = _why_one(facts, has_config, total)
    return Start(count=1 if why else here, asked=here, machines=machines, why=why)


def is_given(facts: Facts, option: str) -> bool:
    """Whether the command gives an option of the launcher."""
    return facts.launch is not None and facts.launch.given(option) is not None


def given_number(facts: Facts, option: str) -> int | None:
    """Return the positive number that an option of the launcher was given, None without one."""
    given = facts.launch.given(option) if facts.launch is not None else None
    return int(given) if given and given.isdecimal() and int(given) else None


def _config_number(facts: Facts, name: str) -> int | None:
    value = facts.config.values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _why_one(facts: Facts, has_config: bool, total: int) -> str:
    """Return why the launcher starts one process whatever the numbers say, "" where it starts as many as they say."""
    mpi = facts.config.values.get("mpirun_config") if has_config else None
    if is_given(facts, "mpirun_hostfile") or (isinstance(mpi, dict) and mpi.get("mpirun_hostfile")):
        return ""
    if is_given(facts, "cpu"):
        return "--cpu starts one process"
    if any(is_given(facts, flag) for flag in SEVERAL):
        return ""
    kind = facts.config.distributed_type
    if has_config:
        is_several = kind.startswith(_TYPES) and kind != "MULTI_CPU"
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
