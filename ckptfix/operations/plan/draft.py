"""What the planning of every kind of step shares: the folder, what may be repaired, and the steps so far."""

from collections.abc import Sequence
from pathlib import PurePosixPath

from ckptfix.checkpoint.folder import Component, Fingerprint
from ckptfix.operations.diagnose import Diagnosis
from ckptfix.operations.findings import Finding, UnsafePickle
from ckptfix.operations.policy import Policy
from ckptfix.operations.steps import Safety, Step, StepAction, Unplanned


class Draft:
    """A plan in the making: the modules of this package read the diagnosis here and add steps."""

    def __init__(self, diagnosis: Diagnosis, policy: Policy) -> None:
        """Start without steps."""
        self.folder = diagnosis.folder
        self.all_findings = diagnosis.findings
        self.findings = tuple(finding for finding in diagnosis.findings if policy.wants(finding.code))
        self.unsafe = {finding.path for finding in diagnosis.findings if isinstance(finding, UnsafePickle)}
        self.policy = policy
        self.components = {component.path: component for component in self.folder.components}
        self._by_path: dict[PurePosixPath, list[Finding]] = {}
        for finding in self.findings:
            self._by_path.setdefault(finding.path, []).append(finding)
        self.steps: list[Step] = []
        self.unplanned: list[Unplanned] = []

    def findings_of(self, path: PurePosixPath) -> Sequence[Finding]:
        """Return what may be repaired in one file."""
        return self._by_path.get(path, ())

    def add(
        self, action: StepAction, fixes: tuple[str, ...], safety: Safety, paths: tuple[PurePosixPath, ...]
    ) -> None:
        """Add a step that relies on the files ``paths`` as they are now."""
        before: dict[PurePosixPath, Fingerprint] = {
            path: self.components[path].fingerprint for path in paths if path in self.components
        }
        self.steps.append(Step(action=action, fixes=fixes, safety=safety, before=before))

    def stay(self, code: str, path: PurePosixPath, reason: str) -> None:
        """Say why something that could be repaired stays."""
        self.unplanned.append(Unplanned(code=code, path=path, reason=reason))


Family = tuple[str, str]
"""Stem and suffix: what all shards of one model share."""


def family_of(component: Component) -> Family | None:
    """Return the model that a shard is part of, None for a file that is no shard."""
    return (component.name.stem, component.name.suffix) if component.name.shard is not None else None
