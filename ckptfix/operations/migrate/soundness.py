"""What ``check`` says of a source: damage is refused, as a new checkpoint would look whole; the rest is passed on."""

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from ckptfix.errors import OperationError, UsageError
from ckptfix.operations.check import check
from ckptfix.operations.findings import (
    CrcMismatch,
    Finding,
    FlatParameters,
    IncompleteTensor,
    IndexMismatch,
    InterruptedSave,
    MalformedFile,
    MissingRank,
    MissingShard,
    NotATensorFile,
    Severity,
    TruncatedFile,
)
from ckptfix.storage.paths import command
from ckptfix.wording import count_of

_DAMAGE = (
    CrcMismatch,
    FlatParameters,
    IncompleteTensor,
    IndexMismatch,
    InterruptedSave,
    MalformedFile,
    MissingRank,
    MissingShard,
    NotATensorFile,
    TruncatedFile,
)


def passed_on(path: Path, homes: Iterable[PurePosixPath]) -> tuple[str, ...]:
    """Return in words what is wrong with a source and will be with its copy: doubled models, nested names.

    ``homes``: the sub-folders in which models lie; ``check`` does not look into them from above.
    Raises OperationError for damage. Checksums of records are compared while they are read, not here.
    """
    places = [path, *(path / home for home in sorted(set(homes)) if home.parts)]
    return tuple(words for place in places for words in _passed_on(place))


def _passed_on(path: Path) -> tuple[str, ...]:
    try:
        findings = check(path).findings
    except UsageError:
        return ()  # what ``check`` does not look into was read to find the tensors
    damage = [finding for finding in findings if isinstance(finding, _DAMAGE)]
    if damage:
        more = f" (and {count_of(len(damage) - 1, 'more finding')})" if len(damage) > 1 else ""
        raise OperationError(
            f"{path}: {damage[0].code}: {damage[0]}{more}; what is made of it would look whole; nothing was written; "
            f"next: {_next(path, damage[0])}"
        )
    return tuple(
        f"the source has {finding.code}: {finding}; next: {command('check', path)}"
        for finding in findings
        if finding.severity is not Severity.NOTE
    )


def _next(path: Path, finding: Finding) -> str:
    if isinstance(finding, IndexMismatch):
        return command("repair", path)
    if isinstance(finding, FlatParameters):
        return "save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT in the run that wrote it"
    if finding.is_salvageable:
        return (
            f"{command('check', path)}, or, to recover what is intact: {command('salvage', path)} NEW_FOLDER"
        )
    return command("check", path)
