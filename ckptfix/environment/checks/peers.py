"""Causes of wrong copies between two devices, and settings that hide them.

NCCL checks nothing of a plain ``tensor.to("cuda:1")``: its settings steer its own transfers.
Sources: NCCL's user guide ("Environment Variables", and "Troubleshooting" on ACS and the IOMMU),
Linux ``iommu=`` in ``Documentation/admin-guide/kernel-parameters.txt``.
"""

from collections.abc import Iterator
from itertools import combinations

from ckptfix.environment.advice import ERROR, NOTE, WARNING, Said, say, topic
from ckptfix.environment.facts import Facts
from ckptfix.hardware import PciDevice
from ckptfix.wording import count_of

_PROBE = "ckptfix doctor --peer-copies"
_STAGE = (
    'use ckptfix.devices.dispatch_model(..., safe_transfers="auto"), which copies '
    "between such pairs through the host"
)


@topic(
    "pair-not-healthy",
    "the probe saw wrong or late data or a hang between two devices, or could not prove the pair "
    "correct",
    ERROR,
    WARNING,
)
def unhealthy(facts: Facts) -> Iterator[Said]:
    """Yield what the probe found before, on this very hardware."""
    for found in facts.torch.verdicts or ():
        if found.verdict != "healthy":
            yield say(
                pair_sentence(found.pair, found.verdict, found.kind),
                severity=WARNING if found.verdict == "inconclusive" else ERROR,
                evidence=("from the last run of the probe on this hardware, driver and boot",),
                fix=f"{_STAGE}; to test again: {_PROBE}",
            )


@topic(
    "pairs-unproven",
    "there are two or more devices, but the probe has not run on this hardware, driver and boot",
    NOTE,
)
def unproven(facts: Facts) -> Iterator[Said]:
    """Asked of those who could have an answer."""
    if facts.torch.count >= 2 and facts.torch.verdicts is None:
        yield say(
            f"copies between these {facts.torch.count} devices have not been tested",
            evidence=("no verdict is stored for this hardware, driver, boot and torch",),
            fix=_PROBE,
        )


@topic(
    "nccl-hides-peer-copies",
    "P2P copies are off for NCCL: training works, but `.to()` and `device_map` still use them",
    WARNING,
    NOTE,
)
def nccl_hides(facts: Facts) -> Iterator[Said]:
    """NCCL then goes through host memory, and shows nothing of what is wrong with the direct
    way.
    """
    for name, off, on in (
        ("NCCL_P2P_DISABLE", ("1",), None),
        ("NCCL_P2P_LEVEL", ("LOC", "0"), ("SYS", "5")),
    ):
        value = facts.variables.get(name)
        never = value is not None and value.upper() in off
        if value is None or (not never if on is None else value.upper() in on):
            continue
        what = "uses no P2P copies" if never else "uses P2P copies only between nearby GPUs"
        yield say(
            f"{name}={value}: NCCL {what}, but tensor.to(), device_map and generate() still use "
            "them",
            severity=WARNING if facts.torch.count >= 2 else NOTE,
            evidence=(f"{name}={value} in the environment",),
            fix=f"test whether these copies are correct: {_PROBE}; {_STAGE}",
        )


@topic(
    "iommu-translates",
    "the IOMMU translates the addresses that GPUs use: a known cause of wrong P2P copies and hangs",
    WARNING,
)
def iommu_translates(facts: Facts) -> Iterator[Said]:
    """Only where two GPUs depend on the bus: with direct links between all of them it is out of the
    way.
    """
    gpus = [gpu for gpu in facts.machine.bus.gpus if gpu.is_translated]
    if not _bus_pairs(facts, gpus):
        return
    options = facts.machine.boot_options("intel_iommu", "amd_iommu", "iommu", "pcie_acs_override")
    yield say(
        f"the IOMMU translates addresses for {count_of(len(gpus), 'GPU')}: P2P copies over PCI can "
        "be wrong or slow, or hang",
        evidence=(
            *(f"{gpu.address} is in an IOMMU group of type {gpu.iommu}" for gpu in gpus),
            f"booted with: {' '.join(options) or 'no IOMMU option'}",
        ),
        fix=(
            "boot with iommu=pt or, if nothing needs the IOMMU (VT-d, AMD-Vi), turn it off; then "
            f"run: {_PROBE}"
        ),
    )


@topic(
    "acs-redirects",
    "PCI bridges above the GPUs redirect peer traffic to the CPU (ACS): a known cause of hangs",
    WARNING,
)
def acs_redirects(facts: Facts) -> Iterator[Said]:
    """Yield advice on bridges whose registers could be read: as root."""
    bridges = facts.machine.bus.redirecting
    if not bridges or not _bus_pairs(facts, list(facts.machine.bus.gpus)):
        return
    yield say(
        f"ACS redirects peer traffic to the CPU at {count_of(len(bridges), 'PCI bridge')}",
        evidence=tuple(
            f"{bridge}: its ACS control enables request or completion redirect"
            for bridge in bridges
        ),
        fix=(
            f"sudo setpci -s {bridges[0]} ECAP_ACS+0x6.w=0000 for each bridge (until the next "
            f"boot), or turn ACS off in the BIOS; then run: {_PROBE}"
        ),
    )


@topic(
    "distant-pair",
    "the PCIe path between two GPUs crosses the CPU (PHB, NODE or SYS), where direct copies fail "
    "most often",
    NOTE,
)
def distant_pair(facts: Facts) -> Iterator[Said]:
    """A hint about causes, and no fault."""
    pairs = [
        frozenset((one.address, other.address))
        for one, other in _bus_pairs(facts, list(facts.machine.bus.gpus))
    ]
    far = {
        ends: way
        for ends, way in facts.machine.bus.distances.items()
        if way.passes_the_cpu and ends in pairs
    }
    if far:
        yield say(
            f"{count_of(len(far), 'GPU pair')} connected only through the CPU",
            evidence=tuple(
                f"{' and '.join(sorted(ends))}: {way.name}, {way.value}"
                for ends, way in far.items()
            ),
            fix=_PROBE,
        )


def pair_sentence(pair: tuple[int, int], verdict: str, kind: str) -> str:
    """Return what is to be said of an ordered pair that the probe did not find healthy."""
    source, destination = pair
    words = {
        "wrong": f"arrive wrong ({kind})" if kind else "arrive wrong",
        "hang": "hang",
        "inconclusive": "are not proven correct",
        "unusable": "cannot be tested",
    }
    return f"copies from device {source} to device {destination} {words.get(verdict, verdict)}"


def _bus_pairs(facts: Facts, gpus: list[PciDevice]) -> list[tuple[PciDevice, PciDevice]]:
    """Return the pairs of GPUs without a direct link, as far as that is known."""
    linked = facts.machine.bus.linked or frozenset()
    return [
        (one, other)
        for one, other in combinations(gpus, 2)
        if frozenset((one.address, other.address)) not in linked
    ]
