"""Checkpoints next to one as witnesses: files that it lacks, and files of other entries."""

from collections.abc import Collection, Iterator
from pathlib import PurePosixPath

from ckptfix.checkpoint.dcp import is_of_checkpoint
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.custom_objects import other_objects, surplus_objects
from ckptfix.diagnosis.dataloaders import exchanged_loaders
from ckptfix.diagnosis.exchanged import diagnose_exchanged
from ckptfix.diagnosis.findings.base import Finding, Severity
from ckptfix.diagnosis.findings.duplicates import (
    DoubledModel,
    IdenticalModels,
    NearlyEqualModels,
)
from ckptfix.diagnosis.findings.incomplete import IncompleteCheckpoint
from ckptfix.diagnosis.findings.inconsistent import MismatchedRates
from ckptfix.diagnosis.findings.misplaced import RenamedState
from ckptfix.diagnosis.findings.weight_faults import MissingModel
from ckptfix.diagnosis.other_configs import other_configs
from ckptfix.diagnosis.siblings import compared
from ckptfix.diagnosis.target import Target
from ckptfix.diagnosis.unfinished_copies import unmarked
from ckptfix.diagnosis.unread_shards import diagnose_unread_shards
from ckptfix.storage.files import AnyPath, lexists
from ckptfix.storage.journal import State, is_elsewhere, transactions


def missing_here(target: Target, case: Case) -> tuple[Finding, ...]:
    """Return the findings that the checkpoints next to one show: files that it lacks, and files of
    other entries.
    """
    folder, neighbours, findings = case.folder, case.neighbours, case.findings
    is_without_model = any(isinstance(one, MissingModel) and not one.model for one in findings)
    if target.only is not None:
        return ()
    marks = tuple(unmarked(neighbours))
    if is_without_model:
        return marks
    told = {name for finding in findings for name in _told_of(finding)}
    # Nothing shows whether a damaged model equals another one.
    may_be_doubled = any(
        isinstance(one, DoubledModel | IdenticalModels | NearlyEqualModels) for one in findings
    ) or any(one.role is Role.MODEL and one.problem for one in folder.components)
    missing = compared(case, told, may_be_doubled=may_be_doubled)
    damaged = frozenset(
        finding.path
        for finding in findings
        if finding.severity is Severity.ERROR or isinstance(finding, RenamedState)
    )
    # Their partners were reported with them.
    damaged |= {
        PurePosixPath(finding.exchanged_with)
        for finding in findings
        if isinstance(finding, RenamedState) and finding.exchanged_with
    }
    return (
        *marks,
        *missing,
        *_lost_since_repair(target.root, told),
        *diagnose_exchanged(
            case,
            damaged,
            is_contradicted=any(isinstance(finding, MismatchedRates) for finding in findings),
        ),
        *diagnose_unread_shards(case),
        *other_configs(folder, neighbours),
        *surplus_objects(case),
        # A damaged file is not compared.
        *(
            finding
            for finding in (*other_objects(case), *exchanged_loaders(folder, neighbours))
            if finding.path not in damaged
        ),
    )


def _lost_since_repair(root: AnyPath, told: Collection[str]) -> Iterator[IncompleteCheckpoint]:
    """Yield a finding for each file that a repair left here, as its journal says, and that is gone.

    ``told``: files of other findings.
    """
    left: dict[PurePosixPath, int] = {}
    for info in transactions(root):
        if info.state is State.DONE and not is_elsewhere(root, info):
            left |= dict.fromkeys(info.paths, info.number)
            for path in info.gone:
                left.pop(path, None)
    for path, number in left.items():
        if is_of_checkpoint(path.name) and str(path) not in told and not lexists(root / path):
            yield IncompleteCheckpoint(
                path=path, missing=(str(path),), known_by=f"repair {number} left it in the folder"
            )


def _told_of(finding: Finding) -> tuple[str, ...]:
    """Return the files of a finding."""
    missing = finding.missing if isinstance(finding, IncompleteCheckpoint) else ()
    return (str(finding.path), *missing)
