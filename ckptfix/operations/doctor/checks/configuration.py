"""Accelerate's config: is there one, can it be read, and does it use the devices that are there."""

from collections.abc import Iterator

from ckptfix.operations.doctor.advice import Advice, Topic
from ckptfix.operations.doctor.facts import Facts
from ckptfix.operations.findings.base import Severity
from ckptfix.storage.paths import shell_path
from ckptfix.wording import count_of

NO_CONFIG = Topic(
    code="no-accelerate-config",
    severities=(Severity.WARNING, Severity.NOTE),
    meaning="accelerate finds no config: `python SCRIPT` is one process on one device, without a word",
)
CONFIG_MISSING = Topic(
    code="config-file-missing",
    severities=(Severity.ERROR, Severity.WARNING),
    meaning="`ACCELERATE_CONFIG_FILE` or `--config_file` names a file that is not there",
)
VARIABLE_IGNORED = Topic(
    code="config-variable-ignored",
    severities=(Severity.WARNING,),
    meaning="`ACCELERATE_CONFIG_FILE` is set, and the installed accelerate never reads it",
)
CONFIG_UNREADABLE = Topic(
    code="config-unreadable",
    severities=(Severity.ERROR,),
    meaning="accelerate's config is broken, lacks `distributed_type`, or holds keys that this version refuses",
)
IDLE_DEVICES = Topic(
    code="idle-devices",
    severities=(Severity.WARNING,),
    meaning="the config starts fewer processes than there are visible devices",
)
TOO_FEW_DEVICES = Topic(
    code="too-few-devices",
    severities=(Severity.WARNING,),
    meaning="the config starts more processes than there are visible devices: accelerate puts several on one",
)
OVERRIDDEN_DEVICES = Topic(
    code="overridden-devices",
    severities=(Severity.WARNING,),
    meaning="the config's `gpu_ids` replaces `CUDA_VISIBLE_DEVICES` in the processes that it starts",
)
TOPICS = (
    NO_CONFIG,
    CONFIG_MISSING,
    VARIABLE_IGNORED,
    CONFIG_UNREADABLE,
    IDLE_DEVICES,
    TOO_FEW_DEVICES,
    OVERRIDDEN_DEVICES,
)

_OLD_KEYS = frozenset({"fp16", "dynamo_backend"})  # accelerate still turns these into new ones
_SINGLE = ("NO", "")


def no_config(facts: Facts) -> Iterator[Advice]:
    """A script that is started with ``python`` then runs as one process; ``accelerate launch`` guesses and says so."""
    config, count = facts.config, facts.torch.count
    if config.exists or config.asked or not facts.software.packages.get("accelerate"):
        return
    if facts.launch is not None and (not facts.launch.is_accelerate or facts.launch.given("num_processes")):
        return  # the processes are counted on the command line
    idle = f", and {count_of(count - 1, 'device')} of {count} idle" if count > 1 else ""
    yield NO_CONFIG.advice(
        f"there is no Accelerate config: `python SCRIPT` is one process without a word{idle}",
        severity=Severity.WARNING if count > 1 else Severity.NOTE,
        evidence=(f"{config.path} is not there",),
        fix="accelerate config, or say it each time: accelerate launch --num_processes N SCRIPT",
    )


def config_missing(facts: Facts) -> Iterator[Advice]:
    """A path that leads nowhere."""
    config, variable = facts.config, facts.variables.get("ACCELERATE_CONFIG_FILE")
    if config.asked and not config.exists:
        yield CONFIG_MISSING.advice(
            f"--config_file {config.path} names no file: accelerate launch ends with FileNotFoundError",
            evidence=(f"{config.path} is not there",),
            fix=f"accelerate config --config_file {shell_path(config.path)}",
        )
    if variable is not None and not facts.config_variable_is_file:
        yield CONFIG_MISSING.advice(
            f"ACCELERATE_CONFIG_FILE={variable} names no file",
            severity=Severity.WARNING,
            evidence=(f"{variable or '(nothing)'} is not there", _reads(facts)),
            fix="unset ACCELERATE_CONFIG_FILE, and give the path: accelerate launch --config_file PATH SCRIPT",
        )


def variable_ignored(facts: Facts) -> Iterator[Advice]:
    """No accelerate from 1.0 to 1.15 looks at this variable; scripts that set it believe otherwise."""
    variable = facts.variables.get("ACCELERATE_CONFIG_FILE")
    if not variable or not facts.config_variable_is_file or facts.software.accelerate.reads_variable:
        return
    if not facts.software.accelerate.options or facts.config.path == variable:
        return
    yield VARIABLE_IGNORED.advice(
        f"ACCELERATE_CONFIG_FILE={variable} is set, but accelerate reads {facts.config.path}",
        evidence=(_reads(facts),),
        fix=f"accelerate launch --config_file {shell_path(variable)} SCRIPT",
    )


def config_unreadable(facts: Facts) -> Iterator[Advice]:
    """What ``accelerate launch`` ends with, before the script starts."""
    config = facts.config
    if not config.exists:
        return
    known = facts.software.accelerate.config_fields
    strange = sorted(config.values.keys() - known - _OLD_KEYS) if known else []
    is_cluster = str(config.values.get("compute_environment", "LOCAL_MACHINE")).upper() == "LOCAL_MACHINE"
    if config.problem:
        reason = f"cannot be read: {config.problem}"
    elif "distributed_type" not in config.values:
        reason = "has no distributed_type"
    elif strange and is_cluster:
        reason = (
            f"holds {count_of(len(strange), 'key')} that this accelerate refuses: {', '.join(strange[:5])}"
        )
    else:
        return
    yield CONFIG_UNREADABLE.advice(
        f"{config.path} {reason}",
        evidence=(
            f"accelerate {_version(facts)}: accelerate launch ends with an error before the script starts",
        ),
        fix="accelerate config update, or write it again: accelerate config",
    )


def idle_devices(facts: Facts) -> Iterator[Advice]:
    """Fewer processes than devices, without a list that says which."""
    used, count = _processes(facts), facts.torch.count
    listed = _listed(facts)
    if used is None or used >= count or (listed != "all" and len(listed.split(",")) == used):
        return
    yield IDLE_DEVICES.advice(
        f"{used} of {count_of(count, 'visible device')} used: the other {count - used} stay idle",
        evidence=_config_evidence(facts),
        fix=f"accelerate launch --num_processes {count} SCRIPT, or accelerate config",
    )


def too_few_devices(facts: Facts) -> Iterator[Advice]:
    """``PartialState.set_device`` takes the process's number modulo the number of devices (accelerate 1.15)."""
    used, count = _processes(facts), facts.torch.count
    wants_devices = facts.config.distributed_type.startswith(("MULTI_", "DEEPSPEED", "FSDP", "MEGATRON"))
    if used is None or used <= count or facts.torch.problem or (count == 0 and not wants_devices):
        return
    if facts.config.distributed_type == "MULTI_CPU" or _on_cpu(facts):
        return
    what = "no device" if count == 0 else count_of(count, "device")
    yield TOO_FEW_DEVICES.advice(
        f"{used} processes are to run on this machine, and {what} can be used",
        evidence=_config_evidence(facts),
        fix=f"accelerate launch --num_processes {max(count, 1)} SCRIPT, or make the other devices visible",
    )


def overridden_devices(facts: Facts) -> Iterator[Advice]:
    """``accelerate launch`` sets the variable itself when the config lists devices."""
    listed, visible = _listed(facts), facts.variables.get("CUDA_VISIBLE_DEVICES")
    if visible is None or listed in ("all", visible):
        return
    yield OVERRIDDEN_DEVICES.advice(
        f"CUDA_VISIBLE_DEVICES={visible} here, but accelerate launch sets it to gpu_ids: {listed}",
        evidence=_config_evidence(facts),
        fix="set one of the two: --gpu_ids all keeps CUDA_VISIBLE_DEVICES",
    )


def _processes(facts: Facts) -> int | None:
    """Return how many processes ``accelerate launch`` starts on this machine, None when nothing says.

    ``--num_processes`` and ``num_processes`` count those of all machines (``_validate_launch_command``).
    """
    launch, config = facts.launch, facts.config
    if launch is not None and (not launch.is_accelerate or launch.given("cpu") is not None):
        return None  # --cpu is no oversight: who writes it wants no device
    total, machines = _number(facts, "num_processes"), _number(facts, "num_machines")
    if total is not None:
        asked = machines if machines is not None else config.values.get("num_machines", 1)
        return max(total // asked, 1) if isinstance(asked, int) and asked > 0 else total
    if not config.exists or config.problem:
        return None
    if config.values.get("use_cpu"):
        return 0
    if config.distributed_type in _SINGLE:
        return 1
    everywhere = config.values.get("num_processes")
    if machines and isinstance(everywhere, int):
        return max(everywhere // machines, 1)
    return config.processes_here


def _number(facts: Facts, option: str) -> int | None:
    """Return the positive number that an option of the launcher was given, None without one."""
    given = facts.launch.given(option) if facts.launch is not None else None
    return int(given) if given and given.isdecimal() and int(given) else None


def _on_cpu(facts: Facts) -> bool:
    is_asked = facts.launch is not None and facts.launch.given("cpu") is not None
    return is_asked or bool(facts.config.values.get("use_cpu"))


def _listed(facts: Facts) -> str:
    """Return the devices that the launcher lists: of the command line, else of the config; "all" without a list."""
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


def _reads(facts: Facts) -> str:
    if not facts.software.accelerate.options:
        return "accelerate's own source was not found"
    reads = "reads" if facts.software.accelerate.reads_variable else "does not read"
    where = f"it looks at --config_file, then {facts.config.path}"
    return f"accelerate {_version(facts)} {reads} ACCELERATE_CONFIG_FILE; {where}"


def _version(facts: Facts) -> str:
    package = facts.software.packages.get("accelerate")
    return package.version if package is not None else "(not installed)"


CHECKS = (
    no_config,
    config_missing,
    variable_ignored,
    config_unreadable,
    idle_devices,
    too_few_devices,
    overridden_devices,
)
