"""The catalogue of damage: every kind with its code, in the order of the manual.

It imports all kinds. A check of a folder without damage needs few of them, and must not import it:
that takes 10 ms.
"""

from collections.abc import Mapping

from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.config_faults import (
    DeadWeights,
    MismatchedConfig,
    MissingHead,
    MissingModel,
    QuantizationMismatch,
    UntiedWeights,
)
from ckptfix.diagnosis.findings.damaged import (
    CompressedRecord,
    CrcMismatch,
    InterruptedRepair,
    MalformedFile,
    NoFormatMetadata,
    NotATensorFile,
    TrailingBytes,
    TrainerPickle,
    TruncatedFile,
    UncheckedFile,
    UnloadablePickle,
    UnsafePickle,
)
from ckptfix.diagnosis.findings.duplicates import (
    ConflictingModels,
    DoubledModel,
    DoubledStates,
    EntryGap,
    IdenticalModels,
    IdenticalStates,
    NestedPrefix,
    RelatedModels,
    ShiftedEntries,
    SurplusStates,
    WrapperPrefix,
)
from ckptfix.diagnosis.findings.incomplete import (
    FlatParameters,
    IncompleteCheckpoint,
    IncompleteTensor,
    MismatchedNames,
    MissingFile,
    MissingRank,
)
from ckptfix.diagnosis.findings.inconsistent import (
    DeadScaler,
    InconsistentGroups,
    MismatchedMoments,
    MissingMoments,
    RoundedSteps,
    UnsavedParameters,
)
from ckptfix.diagnosis.findings.interrupted import InterruptedSave, Salvaged, StagingFolder
from ckptfix.diagnosis.findings.load_faults import (
    DeadAdapter,
    IncompleteAdapter,
    MismatchedAdapter,
    UntrainedAdapter,
)
from ckptfix.diagnosis.findings.misplaced import MixedSaves, UnknownState, WrongState
from ckptfix.diagnosis.findings.sharded import IndexMismatch, MissingShard, StaleShard, StrayShard
from ckptfix.diagnosis.findings.stale import StaleSave
from ckptfix.diagnosis.findings.stored_twice import SecondFamily, StaleFamily

CATALOGUE: tuple[type[Finding], ...] = (
    DoubledModel,
    IdenticalModels,
    ShiftedEntries,
    NestedPrefix,
    MismatchedNames,
    WrapperPrefix,
    RelatedModels,
    ConflictingModels,
    DoubledStates,
    SurplusStates,
    IdenticalStates,
    EntryGap,
    TruncatedFile,
    TrailingBytes,
    NotATensorFile,
    MalformedFile,
    MissingFile,
    IncompleteCheckpoint,
    MissingModel,
    MissingShard,
    IndexMismatch,
    StaleShard,
    StaleFamily,
    SecondFamily,
    InterruptedSave,
    Salvaged,
    MissingRank,
    IncompleteTensor,
    StrayShard,
    FlatParameters,
    DeadAdapter,
    IncompleteAdapter,
    MismatchedAdapter,
    UntrainedAdapter,
    DeadWeights,
    MismatchedConfig,
    UntiedWeights,
    MissingHead,
    QuantizationMismatch,
    WrongState,
    UnknownState,
    InconsistentGroups,
    MismatchedMoments,
    UnsavedParameters,
    MissingMoments,
    RoundedSteps,
    DeadScaler,
    MixedSaves,
    StaleSave,
    CrcMismatch,
    CompressedRecord,
    UncheckedFile,
    NoFormatMetadata,
    UnsafePickle,
    UnloadablePickle,
    TrainerPickle,
    InterruptedRepair,
    StagingFolder,
)
"""Every kind of damage, in the order of the manual's table. A test compares the two and the golden
folders.
"""

INCOMPLETE = (
    IncompleteTensor,
    InterruptedSave,
    MalformedFile,
    MissingRank,
    MissingShard,
    NotATensorFile,
    TruncatedFile,
)
"""Damage by which bytes are lost: no repair may cause it, and no copy may hide it."""

CODES: Mapping[str, type[Finding]] = {kind.code: kind for kind in CATALOGUE}
