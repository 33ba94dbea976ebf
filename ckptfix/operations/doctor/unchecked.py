"""What was not looked at, in words: "not checked" is never shown as "ok"."""

from collections.abc import Iterator

from ckptfix.operations.doctor.facts import Facts
from ckptfix.wording import count_of


def unchecked(facts: Facts) -> tuple[str, ...]:
    """Return what the checks could not see or were not given."""
    return (*_not_given(facts), *_not_seen(facts), *_not_read(facts))


def _not_given(facts: Facts) -> Iterator[str]:
    if facts.script is None:
        yield "the training script (--script SCRIPT)"
    if facts.launch is None:
        yield "the command that starts it (--launch 'accelerate launch ...')"
    if facts.folder is None:
        yield "what weights_only refuses in a checkpoint (ckptfix doctor DIR)"
    if facts.device_map is None:
        yield "device maps (--device-map FILE)"
    elif facts.folder is None:
        yield f"{facts.device_map.source}: ties and names (ckptfix doctor DIR --device-map FILE)"


def _not_seen(facts: Facts) -> Iterator[str]:
    torch, machine = facts.torch, facts.machine
    if torch.problem:
        yield f"devices: {torch.problem}"
    elif torch.count < 2:
        yield f"copies between devices: torch sees {count_of(torch.count, 'device')}"
    elif torch.verdicts is None:
        yield "whether copies between devices are right (ckptfix doctor --peer-copies)"
    else:
        yield "copies between devices in this run: their verdicts are those of the last ckptfix doctor --peer-copies"
    if len(machine.bus.gpus) > 1 and machine.bus.hidden:
        yield f"ACS above {', '.join(machine.bus.hidden)}: only root may read it (sudo ckptfix doctor)"
    if machine.is_virtual and len(machine.bus.gpus) > 1:
        yield "IOMMU and ACS of the host: this is a virtual machine, and they do not show here"
    if len(machine.bus.gpus) > 1 and torch.linked is None:
        yield "direct links between GPUs (NVLink): nvidia-smi topo did not answer"
    if facts.device_map is not None and not torch.count:
        yield f"{facts.device_map.source}: whether its devices are there, for torch sees none here"


def _not_read(facts: Facts) -> Iterator[str]:
    software = facts.software
    if not software.requirements_read:
        yield "requirements of packages: the package 'packaging' is not installed"
    if software.command is not None and not software.command.interpreter:
        yield f"which Python {software.command.path} starts: its first line names none"
    if not software.accelerate.names and "accelerate" in software.packages:
        yield "names and options of accelerate: its source was not found"
    if facts.script is not None:
        yield "what the script's functions do when they are called, and what it imports"
        if facts.script.uses.options is None:
            yield "the script's own options: it does not read them with argparse or click alone"
    if facts.launch is not None and not facts.launch.is_accelerate:
        yield f"options of {facts.launch.launcher}: only those of accelerate launch are known"
    if facts.folder is not None and facts.folder.unread:
        yield from facts.folder.unread
