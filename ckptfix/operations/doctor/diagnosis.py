"""What all checks together say of an environment."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ckptfix.operations.doctor.advice import Advice
from ckptfix.operations.doctor.catalogue import CHECKS
from ckptfix.operations.doctor.facts import Facts
from ckptfix.operations.doctor.unchecked import unchecked
from ckptfix.operations.findings.base import Severity
from ckptfix.reports import Serialized
from ckptfix.wording import Line, Printable, line, unchecked_line

_GRAVEST_FIRST = tuple(Severity)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diagnosis(Printable, Serialized):
    """What the doctor says, the gravest first. ``not_checked``: in words, what was not looked at."""

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
            f"{name} {software.packages[name].version if name in software.packages else 'not installed'}"
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
        """Yield the environment, each advice with its evidence and what to do, and what was not looked at."""
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
            "packages": {name: package.version for name, package in facts.software.packages.items()},
            "accelerate_config": facts.config.path if facts.config.exists else None,
            "variables": dict(facts.variables),
            "builds": list(facts.torch.builds),
            "accelerator": facts.torch.kind or None,
            "devices": [
                {"index": device.index, "name": device.name, "pci": device.pci, "bytes": device.memory}
                for device in facts.torch.devices
            ],
            "driver": facts.machine.driver or None,
        }


def diagnose_environment(facts: Facts) -> Diagnosis:
    """Run every check on these facts."""
    advice = [found for check in CHECKS for found in check(facts)]
    advice.sort(key=lambda found: _GRAVEST_FIRST.index(found.severity))
    return Diagnosis(facts=facts, advice=tuple(advice), not_checked=unchecked(facts))
