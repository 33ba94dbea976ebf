"""The catalogue of damage: one class a kind, with a stable code, a severity and its numbers.

A finding is a value. ``str(finding)`` is the sentence a person reads; ``advice`` is what to do about it.
"""

from collections.abc import Mapping

from ckptfix.operations.findings.base import (
    Action,
    Finding,
    Severity,
    finding_lines,
    labelled,
    salvage_lines,
)
from ckptfix.operations.findings.entries import (
    ConflictingModels,
    DoubledModel,
    EntryGap,
    IdenticalModels,
    IdenticalStates,
    NestedPrefix,
    ShiftedEntries,
    WrapperPrefix,
)
from ckptfix.operations.findings.files import (
    CrcMismatch,
    IndexMismatch,
    InterruptedRepair,
    MalformedFile,
    MissingShard,
    NoFormatMetadata,
    NotATensorFile,
    StaleShard,
    TrailingBytes,
    TruncatedFile,
)
from ckptfix.operations.findings.pickles import TrainerPickle, UnloadablePickle, UnsafePickle
from ckptfix.operations.findings.saves import MissingFile, MissingModel, Salvaged, StagingFolder
from ckptfix.operations.findings.sharded import (
    FlatParameters,
    IncompleteTensor,
    InterruptedSave,
    MismatchedNames,
    MissingRank,
    StrayShard,
)

CATALOGUE: tuple[type[Finding], ...] = (
    DoubledModel,
    IdenticalModels,
    ShiftedEntries,
    NestedPrefix,
    MismatchedNames,
    WrapperPrefix,
    ConflictingModels,
    IdenticalStates,
    EntryGap,
    TruncatedFile,
    TrailingBytes,
    NotATensorFile,
    MalformedFile,
    MissingFile,
    MissingModel,
    MissingShard,
    IndexMismatch,
    StaleShard,
    InterruptedSave,
    Salvaged,
    MissingRank,
    IncompleteTensor,
    StrayShard,
    FlatParameters,
    CrcMismatch,
    NoFormatMetadata,
    UnsafePickle,
    UnloadablePickle,
    TrainerPickle,
    InterruptedRepair,
    StagingFolder,
)
"""Every kind of damage, in the order of the README's table. A test compares the two and the golden folders."""

CODES: Mapping[str, type[Finding]] = {kind.code: kind for kind in CATALOGUE}

__all__ = [
    "CATALOGUE",
    "CODES",
    "Action",
    "ConflictingModels",
    "CrcMismatch",
    "DoubledModel",
    "EntryGap",
    "Finding",
    "FlatParameters",
    "IdenticalModels",
    "IdenticalStates",
    "IncompleteTensor",
    "IndexMismatch",
    "InterruptedRepair",
    "InterruptedSave",
    "MalformedFile",
    "MismatchedNames",
    "MissingFile",
    "MissingModel",
    "MissingRank",
    "MissingShard",
    "NestedPrefix",
    "NoFormatMetadata",
    "NotATensorFile",
    "Salvaged",
    "Severity",
    "ShiftedEntries",
    "StagingFolder",
    "StaleShard",
    "StrayShard",
    "TrailingBytes",
    "TrainerPickle",
    "TruncatedFile",
    "UnloadablePickle",
    "UnsafePickle",
    "WrapperPrefix",
    "finding_lines",
    "labelled",
    "salvage_lines",
]
