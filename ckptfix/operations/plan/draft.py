"""What the planning of every kind of step shares: the folder, what may be repaired, and the steps so far."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import Fingerprint
from ckptfix.operations.diagnose import Diagnosis
from ckptfix.operations.diagnose.entries import Numbered
from ckptfix.operations.findings import DoubledModel, Finding, NestedPrefix, UnsafePickle
from ckptfix.operations.policy import Policy
from ckptfix.operations.steps import Safety, Step, StepAction, Unplanned


class Draft:
    """A plan in the making: the modules of this package read the diagnosis here and add steps."""

    def __init__(self, diagnosis: Diagnosis, policy: Policy) -> None:
        """Start without steps."""
        self._diagnosis = diagnosis
        self.folder = diagnosis.folder
        self.groups = diagnosis.groups
        self.sharded = diagnosis.sharded
        self.states = {state.path: state for state in diagnosis.sharded}
        self.all_findings = diagnosis.findings
        self.findings = tuple(finding for finding in diagnosis.findings if policy.wants(finding.code))
        self.unsafe = {finding.path for finding in diagnosis.findings if isinstance(finding, UnsafePickle)}
        self.doubles = {
            finding.path: finding.original
            for finding in diagnosis.findings
            if isinstance(finding, DoubledModel)
        }
        self.nested = {
            (finding.path, finding.scope)
            for finding in diagnosis.findings
            if isinstance(finding, NestedPrefix)
        }
        self.links = diagnosis.links
        self.policy = policy
        self.counted = self._counted()
        """Duplicates that stay, as the user counts them among the script's models -> why."""
        for path in self.counted:
            del self.doubles[path]
        self.memberships = Counter(member.path for group in self.groups for member in group.members)
        self.components = {component.path: component for component in self.folder.components}
        self._fingerprints = {path: component.fingerprint for path, component in self.components.items()}
        self._fingerprints |= {
            path: file.fingerprint for state in self.sharded for path, file in state.files.items()
        }
        self.steps: list[Step] = []
        self.unplanned: list[Unplanned] = []
        self._by_path: dict[PurePosixPath, list[Finding]] = {}
        for finding in self.findings:
            self._by_path.setdefault(finding.path, []).append(finding)

    def entries(self, role: Role) -> tuple[Sequence[Numbered], ...]:
        """Return the lists of numbered entries of a role (``Diagnosis.entries``)."""
        return self._diagnosis.entries(role)

    def _counted(self) -> dict[PurePosixPath, str]:
        want = self.policy.keep.get(Role.MODEL, 0)
        reasons: dict[PurePosixPath, str] = {}
        for entries in self.entries(Role.MODEL):
            doubles = [entry.path for entry in entries if entry.path in self.doubles]
            if len(entries) - len(doubles) < want:
                left = f"{len(entries) - len(doubles)} would remain of {len(entries)}"
                reasons |= dict.fromkeys(doubles, f"{want} models asked for, without duplicates {left}")
        return reasons

    def files_of(self, path: PurePosixPath) -> tuple[PurePosixPath, ...]:
        """Return the files of an entry: itself, or all files of a DCP folder."""
        state = self.states.get(path)
        return (path,) if state is None else tuple(state.files)

    def findings_of(self, path: PurePosixPath) -> Sequence[Finding]:
        """Return what may be repaired in one file."""
        return self._by_path.get(path, ())

    def add(
        self,
        action: StepAction,
        code: str,
        safety: Safety,
        paths: Iterable[PurePosixPath],
        bundle: PurePosixPath | None = None,
    ) -> None:
        """Add a step that relies on the files ``paths`` as they are now."""
        before: dict[PurePosixPath, Fingerprint] = {
            path: self._fingerprints[path] for path in paths if path in self._fingerprints
        }
        self.steps.append(Step(action=action, fixes=(code,), safety=safety, before=before, bundle=bundle))

    def stay(self, code: str, paths: Sequence[PurePosixPath], reason: str) -> None:
        """Say why something that was to be repaired stays, in all of these files."""
        self.unplanned.append(Unplanned(code=code, path=paths[0], reason=reason, others=tuple(paths[1:])))
