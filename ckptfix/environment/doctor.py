"""``doctor``: the verdict of all checks on an environment, and the list of what was not checked."""

import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from msgspec import Struct

from ckptfix.diagnosis.findings.base import Severity
from ckptfix.environment.advice import Advice, Topic
from ckptfix.environment.checks import (
    accelerators,
    configuration,
    folders,
    peers,
    scripts,
    software,
)
from ckptfix.environment.facts import Facts, gather
from ckptfix.environment.facts.launch import VARIABLES, script_of, variables_of
from ckptfix.environment.facts.machine import parse_torch
from ckptfix.hardware import read_machine
from ckptfix.reports import Serialized
from ckptfix.wording import Line, Printable, count_of, line, unchecked_line

TOPICS: tuple[Topic, ...] = tuple(
    value
    for subject in (software, configuration, accelerators, peers, scripts, folders)
    for value in vars(subject).values()
    if isinstance(value, Topic)
)
CODES: Mapping[str, Topic] = {topic.code: topic for topic in TOPICS}


def unchecked(facts: Facts) -> tuple[str, ...]:
    """Return what the checks could not see or were not given."""
    return (*_not_given(facts), *_not_seen(facts), *_not_read(facts))


def _not_given(facts: Facts) -> Iterator[str]:
    if facts.script is None:
        yield "the training script (--script SCRIPT)"
    if facts.launch is None:
        yield "the command that starts training (--launch 'accelerate launch ...')"
    if facts.folder is None:
        yield "checkpoint files that weights_only refuses (ckptfix doctor DIR)"
    if facts.device_map is None:
        yield "device maps (--device-map FILE)"
    elif facts.folder is None:
        yield (
            f"{facts.device_map.source}: tied weights and keys (ckptfix doctor DIR --device-map "
            "FILE)"
        )


def _not_seen(facts: Facts) -> Iterator[str]:
    torch, machine = facts.torch, facts.machine
    if torch.problem:
        yield f"devices: {torch.problem}"
    elif torch.count < 2:
        yield f"copies between devices: torch sees {count_of(torch.count, 'device')}"
    elif torch.verdicts is None:
        yield "whether copies between devices are correct (ckptfix doctor --peer-copies)"
    else:
        yield (
            "copies between devices in this run: the verdicts are from the last ckptfix doctor "
            "--peer-copies"
        )
    if len(machine.bus.gpus) > 1 and machine.bus.hidden:
        yield (
            f"ACS above {', '.join(machine.bus.hidden)}: only root may read it (sudo ckptfix "
            "doctor)"
        )
    if machine.is_virtual and len(machine.bus.gpus) > 1:
        yield "IOMMU and ACS of the host: not visible from this virtual machine"
    if len(machine.bus.gpus) > 1 and machine.bus.linked is None:
        yield "direct links between GPUs (NVLink): nvidia-smi topo did not answer"
    if facts.device_map is not None and not torch.count:
        yield f"{facts.device_map.source}: whether its devices exist, because torch sees none"


def _not_read(facts: Facts) -> Iterator[str]:
    software = facts.software
    config = facts.config
    if config.problem or (config.asked and not config.exists):
        problem = config.problem or "does not exist"
        yield f"the number of processes that start: {config.path}: {problem}"
    if software.command is not None and not software.command.interpreter:
        yield f"the Python that {software.command.path} starts: the file's first line names none"
    if not software.accelerate.names and "accelerate" in software.packages:
        yield "names and options of accelerate: its source was not found"
    if facts.script is not None:
        yield "effects of the script's imports, and of its functions when they are called"
        yield from (f"{facts.script.path}: {cell}" for cell in facts.script.unread)
        if facts.script.uses.options is None:
            yield "the script's own options: it also reads options without argparse and click"
    if facts.launch is not None and not facts.launch.is_accelerate:
        yield f"options of {facts.launch.launcher}: only those of accelerate launch are known"
    if facts.folder is not None and facts.folder.unread:
        yield from facts.folder.unread


_GRAVEST_FIRST = tuple(Severity)


class DoctorReport(Printable, Serialized, Struct, frozen=True, kw_only=True):
    """Report of the doctor: advice, the gravest first. ``not_checked``: in words, what was not
    looked at.
    """

    json_keys: ClassVar = "advice not_checked environment"

    facts: Facts
    advice: tuple[Advice, ...]
    not_checked: tuple[str, ...]

    @property
    def status(self) -> int:
        """Exit status: 1 for any error or warning, 0 otherwise. Notes change nothing."""
        return int(any(advice.severity is not Severity.NOTE for advice in self.advice))

    @property
    def summary(self) -> str:
        """The environment in one line."""
        software, torch = self.facts.software, self.facts.torch
        versions = [
            f"{name} "
            f"{software.packages[name].version if name in software.packages else 'not installed'}"
            for name in ("torch", "accelerate")
        ]
        python = ".".join(str(part) for part in software.python)
        if torch.problem:
            seen = "devices not known"
        elif not torch.count:
            seen = "no GPU"
        else:
            names = sorted({device.name for device in torch.devices})
            seen = f"{torch.count} x {', '.join(names)} ({torch.kind})"
        return f"Python {python}, {', '.join(versions)}, {seen}"

    def lines(self) -> Iterator[Line]:
        """Yield the environment, each advice with its evidence and what to do, and what was not
        looked at.
        """
        yield line(self.summary, bold=True)
        for advice in self.advice:
            yield from advice.lines()
        if self.status == 0:
            yield line("no problems found in what was checked", colour="green")
        yield from map(unchecked_line, self.not_checked)

    def environment(self) -> dict[str, object]:
        """Return the facts that say which environment this is, for JSON."""
        facts = self.facts
        return {
            "python": ".".join(str(part) for part in facts.software.python),
            "executable": facts.software.executable,
            "packages": {
                name: package.version for name, package in facts.software.packages.items()
            },
            "accelerate_config": facts.config.path if facts.config.exists else None,
            "variables": dict(facts.variables),
            "builds": list(facts.torch.builds),
            "accelerator": facts.torch.kind or None,
            "devices": [
                {
                    "index": device.index,
                    "name": device.name,
                    "pci": device.pci,
                    "bytes": device.memory,
                }
                for device in facts.torch.devices
            ],
            "driver": facts.machine.driver or None,
        }


def doctor(
    path: str | os.PathLike[str] | None = None,
    *,
    script: str | os.PathLike[str] | None = None,
    launch: str | None = None,
    device_map: str | os.PathLike[str] | None = None,
    in_process: bool = False,
) -> DoctorReport:
    """Find problems of this environment, and of the checkpoint, script, command or device map that
    is named.

    ``launch`` is the command that starts training: it is read, never run, and names the script
    where ``script`` does not. torch is asked in a process of its own, which a broken driver may
    crash; ``in_process`` asks it here. Nothing is changed. Raises UsageError for what makes no
    sense, OSError for what cannot be read.
    """
    said = _asked(variables_of(launch) if launch is not None else {}, in_process=in_process)
    facts = gather(
        parse_torch(said),
        read_machine(),
        os.environ,
        folder=_text(path),
        script=_text(script) or (script_of(launch) if launch else None),
        launch=launch,
        device_map=_text(device_map),
    )
    return diagnose_environment(facts)


def _asked(variables: Mapping[str, str], *, in_process: bool) -> dict[str, Any]:
    """Ask torch under the variables of the command that is asked about: they may hide devices."""
    from ckptfix.devices.environment_of_torch import look

    set_here = {name: value for name, value in variables.items() if name in VARIABLES}
    before = {name: os.environ.get(name) for name in set_here}
    os.environ.update(set_here)
    try:
        return look(in_process=in_process)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _text(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)


def diagnose_environment(facts: Facts) -> DoctorReport:
    """Run every check on these facts."""
    advice = [found for topic in TOPICS for found in topic.advice(facts)]
    advice.sort(key=lambda found: _GRAVEST_FIRST.index(found.severity))
    return DoctorReport(facts=facts, advice=tuple(advice), not_checked=unchecked(facts))
