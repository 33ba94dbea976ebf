"""Facts for the checks, gathered once: every check is a pure function of one ``Facts`` value.

Nothing here imports torch, accelerate or the user's code, and nothing is run. What torch says is
passed in by ``devices``.
"""

from collections.abc import Mapping
from msgspec import Struct, field

from ckptfix.environment.facts.installed import Software, read_software, with_modules
from ckptfix.environment.facts.launch import (
    AccelerateConfig,
    Launch,
    missing_script,
    read_config,
    read_launch,
    read_variables,
    variables_of,
)
from ckptfix.environment.facts.machine import Torch
from ckptfix.environment.facts.script import Script, read_script
from ckptfix.environment.facts.weights import DeviceMap, Folder, parse_map, read_folder, read_map
from ckptfix.hardware import Machine


class Facts(Struct, frozen=True, kw_only=True):
    """Facts of an environment. None: not asked for. ``missing``: option -> file of the command that
    does not exist; the script has the option "".
    """

    software: Software
    torch: Torch = field(default_factory=Torch)
    machine: Machine = field(default_factory=Machine)
    variables: Mapping[str, str] = field(default_factory=dict)
    config: AccelerateConfig = field(default_factory=lambda: AccelerateConfig(path=""))
    script: Script | None = None
    launch: Launch | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    folder: Folder | None = None
    device_map: DeviceMap | None = None

    @property
    def is_guarded(self) -> bool:
        """Return whether the script's Accelerator is that of ckptfix, by its imports or by the
        command.
        """
        words = "" if self.launch is None else f" {' '.join(self.launch.words)} "
        return " ckptfix run " in words or (self.script is not None and self.script.uses.is_guarded)


def gather(
    torch: Torch,
    machine: Machine,
    environment: Mapping[str, str],
    *,
    folder: str | None = None,
    script: str | None = None,
    launch: str | None = None,
    device_map: str | None = None,
) -> Facts:
    """Gather the facts of this machine, and of what is named. ``torch``: as it reported itself.

    Raises UsageError for what makes no sense, OSError for what cannot be read.
    """
    if launch is not None:
        environment = {**environment, **variables_of(launch)}
    software = read_software(environment)
    command = read_launch(launch, software.accelerate.options) if launch is not None else None
    looked = read_folder(folder) if folder is not None else None
    read = read_script(script) if script is not None else None
    if read is not None:
        software = with_modules(software, {name for name, _ in read.uses.taken})
    config = read_config(environment, command.given("config_file") if command is not None else None)
    return Facts(
        software=software,
        torch=torch,
        machine=machine,
        variables=read_variables(environment),
        config=config,
        script=read,
        launch=command,
        missing=_missing(command, config) if command is not None else {},
        folder=looked,
        device_map=read_map(device_map) if device_map is not None else _own_map(looked),
    )


def _missing(launch: Launch, config: AccelerateConfig) -> dict[str, str]:
    found = {"": missing_script(launch)}
    if config.asked and not config.exists and launch.is_plain and not launch.unknown:
        found["--config_file"] = config.path
    return {option: path for option, path in found.items() if path}


def _own_map(folder: Folder | None) -> DeviceMap | None:
    """Return the device map that a folder's ``config.json`` carries, None without one."""
    if folder is None or folder.config is None:
        return None
    for name in ("hf_device_map", "device_map"):
        if (
            found := parse_map(folder.config.get(name), f"{name} of {folder.path}/config.json")
        ) is not None:
            return found
    return None
