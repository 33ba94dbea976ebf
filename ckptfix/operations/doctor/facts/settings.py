"""Settings that change what accelerate, torch and NCCL do: environment variables, NCCL's files, accelerate's config.

Sources: ``accelerate/commands/config/config_args.py`` (1.0 to 1.15) for where the config lies and what it may hold;
NCCL's user guide, "Environment Variables", for its files.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

VARIABLES = (
    "ACCELERATE_CONFIG_FILE", "ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "HF_HOME", "XDG_CACHE_HOME",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
    "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_IB_DISABLE", "NCCL_CONF_FILE", "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "CC", "CXX", "CUDA_HOME", "CUDA_PATH",
)  # fmt: skip
"""The only variables that are read; their values appear in ``--json``."""

_MAX_FILE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclSetting:
    """A setting of NCCL, and where it stands: "the environment" or a path."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateConfig:
    """The config that ``accelerate launch`` would read.

    ``path``: where it looks. ``asked``: the path was given on the command line. ``exists``: a file is there.
    ``problem``: why it could not be read, "" when it could. ``values``: what it holds.
    """

    path: str
    asked: bool = False
    exists: bool = False
    problem: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def distributed_type(self) -> str:
        """The distributed type in upper case, "" when none is given."""
        return str(self.values.get("distributed_type", "")).upper()

    @property
    def processes_here(self) -> int | None:
        """How many processes it starts on this machine, None when it does not say."""
        total, machines = self.values.get("num_processes"), self.values.get("num_machines", 1)
        if not isinstance(total, int) or isinstance(total, bool) or total < 1:
            return None
        return max(total // machines, 1) if isinstance(machines, int) and machines > 0 else total


def read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``VARIABLES`` that are set."""
    return {name: environment[name] for name in VARIABLES if name in environment}


def read_nccl(environment: Mapping[str, str], *, root: Path = Path("/")) -> tuple[NcclSetting, ...]:
    """Return NCCL's settings about peer copies; of one that stands in several places, the one that counts.

    The environment goes before ``~/.nccl.conf`` (or ``NCCL_CONF_FILE``), and that before ``/etc/nccl.conf``.
    """
    found: dict[str, NcclSetting] = {}
    own = environment.get("NCCL_CONF_FILE") or os.path.join(environment.get("HOME", ""), ".nccl.conf")
    for path in (root / "etc" / "nccl.conf", Path(own)):
        for line in _lines(path):
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                name, value = name.strip(), value.strip()
                found[name] = NcclSetting(name=name, value=value, source=str(path))
    for name, value in environment.items():
        found[name] = NcclSetting(name=name, value=value, source="the environment")
    return tuple(found[name] for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL") if name in found)


def default_config_path(environment: Mapping[str, str]) -> str:
    """Return where accelerate looks for its config when none is given."""
    cache = environment.get("XDG_CACHE_HOME", os.path.join(environment.get("HOME", "~"), ".cache"))
    home = os.path.expanduser(environment.get("HF_HOME", os.path.join(cache, "huggingface")))
    return os.path.join(home, "accelerate", "default_config.yaml")


def read_config(environment: Mapping[str, str], given: str | None = None) -> AccelerateConfig:
    """Return accelerate's config: the one at ``given``, else the one that it finds by itself."""
    path = given if given is not None else default_config_path(environment)
    asked = given is not None
    if not os.path.isfile(path):
        return AccelerateConfig(path=path, asked=asked)
    values, problem = _parse(Path(path))
    return AccelerateConfig(path=path, asked=asked, exists=True, problem=problem, values=values)


def _parse(path: Path) -> tuple[Mapping[str, Any], str]:
    try:
        yaml = import_module("yaml")  # comes with accelerate, which cannot read the file without it either
    except ImportError:
        return {}, "PyYAML is not installed"
    try:
        if path.stat().st_size > _MAX_FILE:
            return {}, f"it has {path.stat().st_size} bytes, at most {_MAX_FILE} are read"
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return {}, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if not isinstance(values, dict):
        return {}, "it holds no settings"
    return {str(key): value for key, value in values.items()}, ""


def _lines(path: Path) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return [line.strip() for line in file.read(_MAX_FILE).splitlines()]
    except OSError:
        return []
