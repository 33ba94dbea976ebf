"""The verdict of a rule about a load."""

from typing import NamedTuple

from ckptfix.diagnosis.findings.base import Finding


class LoadVerdict(NamedTuple):
    """The findings about one load, and in words what was not checked."""

    findings: tuple[Finding, ...] = ()
    unchecked: tuple[str, ...] = ()
