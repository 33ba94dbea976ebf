"""The verdict of a rule about a load."""

from pathlib import PurePosixPath
from typing import NamedTuple

from ckptfix.diagnosis.findings.base import Finding


class LoadVerdict(NamedTuple):
    """The findings about one load, and in words what was not checked.

    ``explained``: (class, file) of findings about a file alone that are a part of these.
    ``compared``: the configs whose sizes were compared with the tensors, or of which ``unchecked``
    says why not.
    """

    findings: tuple[Finding, ...] = ()
    unchecked: tuple[str, ...] = ()
    explained: frozenset[tuple[type[Finding], PurePosixPath]] = frozenset()
    compared: frozenset[str] = frozenset()
