"""What ``check`` says of a source: damage is refused, as a new checkpoint would look whole; the rest is passed on."""

from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.folder import NameScope
from ckptfix.checkpoint.keys import collapse, common_wrappers, dotted, is_nested
from ckptfix.errors import OperationError, UsageError
from ckptfix.operations.check import check
from ckptfix.operations.diagnose.names import STATE_DICT
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
    NestedPrefix,
    NotATensorFile,
    Severity,
    TruncatedFile,
)
from ckptfix.operations.policy import Keys
from ckptfix.storage.paths import command
from ckptfix.weights.stored import Format, Weights
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


def passed_on(path: Path, weights: Sequence[Weights], keys: Keys | None) -> tuple[str, ...]:
    """Return in words what is wrong with a source and will be with its copy: doubled models, nested names.

    Models lie in sub-folders, too, into which ``check`` does not look from above.
    Raises OperationError for damage, UsageError where ``keys`` asks for a decision that nothing in the source decides.
    Checksums of records are compared while they are read, not here.
    """
    homes = sorted({PurePosixPath(), *(one.home for one in weights)})
    findings = {home: _findings(path / home) for home in homes}
    words = tuple(words for home in homes for words in _passed_on(path / home, findings[home]))
    if keys is Keys.AUTO:
        for one in weights:
            _ensure_decided(path, one, findings[one.home])
    return words


def _ensure_decided(path: Path, weights: Weights, findings: Iterable[Finding]) -> None:
    """Raise UsageError where every key has nested wrappers, and a repair of the source would not collapse them."""
    chain = common_wrappers([tensor.fqn for tensor in weights.tensors] + list(weights.ties))
    if not is_nested(chain):
        return
    scope = str(NameScope(weights.path, STATE_DICT, (), ()))
    for finding in findings:
        if (
            isinstance(finding, NestedPrefix)
            and finding.is_fixable
            and weights.home / finding.path in weights.files
            and (finding.scope == scope or weights.format is Format.DCP)
            and finding.target == collapse(chain)
        ):
            return
    raise UsageError(
        f"{weights.label}: every key begins with {dotted(chain)!r}, and nothing in {path} decides which wrappers the "
        f"script itself adds; nothing was written; next: give --keys bare for a model that is not wrapped, --keys ddp "
        f"for one in DistributedDataParallel, or leave --keys out"
    )


def _findings(path: Path) -> tuple[Finding, ...]:
    try:
        return check(path).findings
    except UsageError:
        return ()  # what ``check`` does not look into was read to find the tensors


def _passed_on(path: Path, findings: tuple[Finding, ...]) -> tuple[str, ...]:
    damage = [finding for finding in findings if isinstance(finding, _DAMAGE)]
    if damage:
        more = f" (and {count_of(len(damage) - 1, 'more finding')})" if len(damage) > 1 else ""
        raise OperationError(
            f"{path}: {damage[0].code}: {damage[0]}{more}; what is made of it would look intact; nothing was written; "
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
