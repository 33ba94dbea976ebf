"""From a scanned folder to findings. Reads tensor bytes only where two entries agree in names, dtypes and shapes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import CheckpointFolder, ProblemKind
from ckptfix.checkpoint.groups import ModelFiles, group_files
from ckptfix.checkpoint.pairing import Pairing, Progress, first_unequal
from ckptfix.formats.torch_file import TorchFile
from ckptfix.operations.diagnose.entries import Verdict, diagnose_entries
from ckptfix.operations.diagnose.files import diagnose_files
from ckptfix.operations.diagnose.names import diagnose_names
from ckptfix.operations.diagnose.shards import diagnose_shards
from ckptfix.operations.findings import CATALOGUE, DoubledModel, Finding, IndexMismatch
from ckptfix.wording import count_of

Verdicts = Mapping[tuple[PurePosixPath, PurePosixPath], Verdict]
"""(kept file, other file) -> how they compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found in a folder, most severe first, and what was not looked at, in words."""

    folder: CheckpointFolder
    groups: tuple[ModelFiles, ...]
    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...]
    verdicts: Verdicts


def diagnose(
    folder: CheckpointFolder,
    *,
    prove: bool = False,
    data: bool = False,
    drops: Iterable[Role] = (),
    known: Verdicts | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Find every kind of damage in a scanned folder.

    By default bytes of look-alikes are sampled. ``prove`` reads every byte of what would be dropped (``repair``),
    ``data`` every byte of every look-alike and of every record with a CRC (``check --data``). ``drops`` names the
    roles of which equal entries are to be dropped. ``known``: comparisons made already, which hold still.
    ``progress`` is called with byte counts.

    Raises OSError when a file that could be scanned can no longer be read.
    """

    verdicts: dict[tuple[PurePosixPath, PurePosixPath], Verdict] = {}

    def compare(pairing: Pairing, must_prove: bool) -> Verdict:
        pair, full = (pairing.kept.path, pairing.other.path), data or (prove and must_prove)
        verdict = (known or {}).get(pair)
        if verdict is None or (full and not verdict.full and verdict.difference is None):
            difference = first_unequal(folder.root, pairing, full=full, progress=progress)
            verdict = Verdict(difference, full)
        verdicts[pair] = verdict
        return verdict

    findings = diagnose_entries(folder, compare, frozenset(drops))
    doubled = frozenset(finding.path for finding in findings if isinstance(finding, DoubledModel))
    groups = group_files(folder)
    findings += diagnose_names(folder, groups, doubled)
    shards = diagnose_shards(groups) if folder.only is None else []
    rebuilt = {
        finding.path for finding in shards if isinstance(finding, IndexMismatch) and finding.is_fixable
    }
    findings += shards
    findings += diagnose_files(folder, data=data, progress=progress, explained=frozenset(rebuilt))
    order = {kind: position for position, kind in enumerate(CATALOGUE)}
    severities = ("error", "warning", "note")
    findings.sort(
        key=lambda finding: (
            severities.index(finding.severity.value),
            order[type(finding)],
            str(finding.path),
        )
    )
    return Diagnosis(
        folder=folder,
        groups=groups,
        findings=tuple(findings),
        not_checked=_not_checked(folder, findings, data=data),
        verdicts=verdicts,
    )


def _not_checked(folder: CheckpointFolder, findings: list[Finding], *, data: bool) -> tuple[str, ...]:
    words = [f"{path}/ ({kind}): not looked into" for path, kind in folder.subfolders.items()]
    words += [
        f"{component.path}: {component.problem.message}"
        for component in folder.components
        if component.problem is not None and component.problem.kind is ProblemKind.UNSUPPORTED
    ]
    sampled = sum(1 for finding in findings if getattr(finding, "sampled", False))
    if sampled:
        comparisons = "1 comparison" if sampled == 1 else f"{sampled} comparisons"
        words.append(f"{comparisons} read samples only; --data reads every byte")
    words.append("values of tensors (NaN, zeros, flipped bits)")
    if not data and any(isinstance(component.content, TorchFile) for component in folder.components):
        words.append("checksums of tensor records in torch zip files (--data checks them)")
    if folder.strays and folder.only is None:
        words.append(f"{count_of(len(folder.strays), 'file')} of no checkpoint beside it")
    return tuple(words)


__all__ = ["Diagnosis", "diagnose"]
