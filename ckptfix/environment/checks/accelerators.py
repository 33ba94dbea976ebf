"""Torch, the driver, and which devices are seen."""

from collections.abc import Iterator

from ckptfix.environment.advice import ERROR, NOTE, WARNING, Said, say, topic
from ckptfix.environment.checks.configuration import SEVERAL, is_given, start_of
from ckptfix.environment.facts import Facts
from ckptfix.environment.facts.installed import release
from ckptfix.storage.paths import shell_path
from ckptfix.wording import count_of

_GOOD_DRIVER = "550.40.07"
_IMPORTING = ("start", "import")


@topic("torch-unusable", "torch is missing, or importing it fails, crashes or hangs", ERROR)
def torch_unusable(facts: Facts) -> Iterator[Said]:
    """Everything else needs it."""
    if facts.torch.problem and facts.torch.stage in _IMPORTING:
        yield say(
            f"torch cannot be used: {facts.torch.problem}",
            evidence=facts.torch.warnings or (f"import torch in {facts.software.executable}",),
            fix=(
                f'try: {shell_path(facts.software.executable)} -c "import torch"; if that fails, '
                "reinstall torch"
            ),
        )


@topic(
    "driver-unusable",
    "torch was built for GPUs but cannot use this machine's GPU, or crashes or hangs when it tries",
    ERROR,
)
def driver_unusable(facts: Facts) -> Iterator[Said]:
    """A driver that fails, crashes or hangs; or that torch does not find although it was built for
    it.
    """
    torch, gpus = facts.torch, facts.machine.bus.gpus
    found = (str(gpu) for gpu in gpus)
    node_words = f"/dev has {count_of(facts.machine.device_nodes, 'NVIDIA device file')}"
    evidence = (
        *torch.warnings,
        *found,
        f"NVIDIA driver: {facts.machine.driver or 'not loaded'}",
        node_words,
    )
    fix = (
        "run nvidia-smi (or rocm-smi); load or reinstall the driver; in a container, pass the "
        "GPUs (--gpus all)"
    )
    if torch.problem and torch.stage not in _IMPORTING:
        yield say(f"torch cannot query its devices: {torch.problem}", evidence=evidence, fix=fix)
    elif not torch.problem and torch.builds and gpus and not torch.count and not _hides_all(facts):
        yield say(
            f"torch was built for {', '.join(torch.builds)}, but can use 0 of "
            f"{count_of(len(gpus), 'GPU')}",
            evidence=evidence,
            fix=fix,
        )


@topic("cpu-only-torch", "this machine has a GPU, but torch is a CPU build", WARNING)
def cpu_only_torch(facts: Facts) -> Iterator[Said]:
    """The wheel from the wrong index."""
    gpus = facts.machine.bus.gpus
    if gpus and facts.torch.version and not facts.torch.builds and not facts.torch.problem:
        yield say(
            f"torch {facts.torch.version} is a CPU build, but this machine has "
            f"{count_of(len(gpus), 'GPU')}",
            evidence=tuple(str(gpu) for gpu in gpus),
            fix="install a build for the GPU: https://pytorch.org/get-started/locally",
        )


@topic("no-accelerator", "this machine has no GPU: nothing about devices could be tested", NOTE)
def no_accelerator(facts: Facts) -> Iterator[Said]:
    """Said, so that silence about devices is not taken for health."""
    if not facts.torch.count and not facts.torch.problem and not facts.machine.bus.gpus:
        build = ", ".join(facts.torch.builds) or "a CPU build"
        yield say(
            "torch has no GPU to use: settings were read, but no device was tested",
            evidence=(
                f"torch {facts.torch.version} ({build}) sees 0 devices",
                "no GPU on the PCI bus",
            ),
            fix="run this on the training machine",
        )


@topic(
    "visible-devices-broken",
    "`CUDA_VISIBLE_DEVICES` is empty, or names a device that does not exist; CUDA ignores that "
    "device and all after it",
    WARNING,
)
def visible_broken(facts: Facts) -> Iterator[Said]:
    """CUDA takes the entries up to the first that it does not know (programming guide, "Environment
    Variables").
    """
    value, there = facts.variables.get("CUDA_VISIBLE_DEVICES"), _present(facts)
    if value is None or not there:
        return
    entries = [entry.strip() for entry in value.split(",")]
    bad = next((entry for entry in entries if _is_wrong(entry, there)), None)
    twice = len(entries) != len(set(entries))
    if bad is None and not twice:
        return
    what = "lists a device twice"
    if bad is not None:
        what = f"names {bad!r}, which does not exist" if bad else "has an empty entry"
    yield say(
        f"CUDA_VISIBLE_DEVICES={value} {what}: torch sees {facts.torch.count} of "
        f"{count_of(there, 'GPU')}",
        evidence=tuple(str(gpu) for gpu in facts.machine.bus.gpus),
        fix=(
            f"export CUDA_VISIBLE_DEVICES={','.join(str(index) for index in range(there))}, or "
            "unset it"
        ),
    )


@topic("hidden-devices", "`CUDA_VISIBLE_DEVICES` leaves out some of this machine's GPUs", NOTE)
def hidden_devices(facts: Facts) -> Iterator[Said]:
    """Meant, most of the time."""
    value, there = facts.variables.get("CUDA_VISIBLE_DEVICES"), _present(facts)
    if value is None or facts.torch.problem or not 0 < facts.torch.count < there:
        return
    yield say(
        f"torch sees {facts.torch.count} of {count_of(there, 'GPU')}: CUDA_VISIBLE_DEVICES={value}",
        evidence=tuple(
            f"device {device.index}: {device.name} {device.pci}" for device in facts.torch.devices
        ),
        fix="unset CUDA_VISIBLE_DEVICES to use all of them",
    )


@topic(
    "device-order",
    "torch numbers the GPUs differently from `nvidia-smi`: fastest first, not by PCI address",
    NOTE,
)
def device_order(facts: Facts) -> Iterator[Said]:
    """``CUDA_DEVICE_ORDER`` is FASTEST_FIRST unless it is set."""
    addresses = [device.pci.lower() for device in facts.torch.devices]
    if facts.variables.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or facts.variables.get(
        "CUDA_VISIBLE_DEVICES"
    ):
        return
    if all(addresses) and addresses != sorted(addresses):
        yield say(
            "torch numbers the GPUs in a different order than nvidia-smi and the PCI bus",
            evidence=tuple(
                f"device {device.index}: {device.name} {device.pci}"
                for device in facts.torch.devices
            ),
            fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


@topic(
    "old-driver-peer-copies",
    "RTX 40 GPUs with a driver before 550.40.07: P2P copies do not work, and Accelerate may "
    "refuse to start",
    WARNING,
)
def old_driver(facts: Facts) -> Iterator[Said]:
    """The check that accelerate makes (``utils/environment.py``), by the product's name and the
    driver's version.
    """
    driver = facts.machine.driver
    old = [device for device in facts.torch.devices if "RTX 40" in device.name]
    if not old or facts.torch.count < 2 or not driver or release(driver) >= release(_GOOD_DRIVER):
        return
    yield say(
        f"P2P copies do not work on {old[0].name} with driver {driver} (expected {_GOOD_DRIVER} "
        "or newer)",
        evidence=(f"NVIDIA driver {driver}", *_what_starts(facts)),
        fix=f"install driver {_GOOD_DRIVER} or newer, then run: ckptfix doctor --peer-copies",
    )


def _what_starts(facts: Facts) -> Iterator[str]:
    """Yield what becomes of training: by ``multi_gpu_launcher`` and ``PartialState`` of accelerate
    1.15.

    The launcher sets both variables where it starts several processes; ``PartialState`` raises on a
    CUDA device when one of them is not set, even in a single process.
    """
    variables = "NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1"
    raises = (
        "Accelerator() raises NotImplementedError; to start anyway: export "
        f"{variables.replace(' and', '')}"
    )
    start = start_of(facts)
    if {"NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"} <= facts.variables.keys():
        yield (
            "NCCL_P2P_DISABLE and NCCL_IB_DISABLE are set: training starts, and NCCL goes through "
            "host memory"
        )
    elif facts.launch is None:
        yield (
            f"accelerate launch with several processes sets {variables} itself, so training starts"
        )
        yield f"started in any other way, {raises}"
    elif start is not None and (start.count > 1 or any(is_given(facts, flag) for flag in SEVERAL)):
        yield (
            f"accelerate launch sets {variables} itself: training starts, and NCCL goes through "
            "host memory"
        )
    else:
        yield f"with this command, {raises}"
    yield "tensor.to() and device_map still copy directly, and the copies can be wrong"


def _present(facts: Facts) -> int:
    """Return how many NVIDIA GPUs this process could be given."""
    on_bus = sum(1 for gpu in facts.machine.bus.gpus if gpu.vendor == "NVIDIA")
    return min(on_bus, facts.machine.device_nodes) if facts.machine.device_nodes else on_bus


def _is_wrong(entry: str, there: int) -> bool:
    if entry.lstrip("+-").isdecimal():
        return not 0 <= int(entry) < there
    return not entry.startswith(("GPU-", "MIG-"))


def _hides_all(facts: Facts) -> bool:
    names = (
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
    )
    return any(name in facts.variables for name in names)
