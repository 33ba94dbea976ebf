"""Proof, after the edits and before they are committed, that a repair did what it planned and nothing else.

No tensor byte is read for it: every kept tensor must have the dtype and the shape that it had, under its mapped
name, and its bytes must lie where no edit wrote, or in a range that an edit copied from where they were.
"""

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.folder import CheckpointFolder, Component, NameScope
from ckptfix.checkpoint.keys import KeyMap
from ckptfix.checkpoint.scan import scan_folder
from ckptfix.errors import OperationError
from ckptfix.operations.diagnose import Diagnosis, Verdicts, diagnose
from ckptfix.operations.findings import (
    DoubledModel,
    IncompleteTensor,
    InterruptedSave,
    MalformedFile,
    MissingRank,
    MissingShard,
    NotATensorFile,
    TruncatedFile,
)
from ckptfix.operations.plan import Plan, make_plan
from ckptfix.operations.policy import Policy
from ckptfix.operations.sharded_proof import prove_sharded
from ckptfix.operations.steps import DropEntry, Renumber, RewriteNames, Step, Unplanned
from ckptfix.storage.edits import Append, Edit, Patch, Replace, Truncate
from ckptfix.storage.recipes import Range

_BROKEN = (
    IncompleteTensor,
    InterruptedSave,
    MalformedFile,
    MissingRank,
    MissingShard,
    NotATensorFile,
    TruncatedFile,
)
"""What no repair makes of a file."""


class Span(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file after the repair are those from ``source`` on of the file before it."""

    begin: int
    end: int
    source: int


def prove_repair(
    plan: Plan,
    steps: tuple[Step, ...],
    edits: tuple[Edit, ...],
    stays: tuple[Unplanned, ...],
    policy: Policy,
    verdicts: Verdicts,
) -> Diagnosis:
    """Scan the folder again and prove the repair. Returns the new diagnosis; raises OperationError with what is wrong.

    ``verdicts``: the comparisons made before the repair; it changed no tensor, so they hold still.
    """
    before = plan.folder
    after = scan_folder(before.root, before.only)
    _prove_tensors(before, after, steps, edits)
    moved = {step.action.source: step.action.target for step in steps if isinstance(step.action, Renumber)}
    dropped = {step.action.path for step in steps if isinstance(step.action, DropEntry)}
    known = {
        (moved.get(kept, kept), moved.get(other, other)): verdict
        for (kept, other), verdict in verdicts.items()
        if kept not in dropped and other not in dropped
    }
    diagnosis = diagnose(after, known=known)
    prove_sharded(plan.sharded, diagnosis.sharded, steps, edits)
    _prove_no_new_damage(plan, diagnosis, moved)
    _prove_nothing_left(diagnosis, {_moved(path, moved) for stay in stays for path in stay.paths}, policy)
    return diagnosis


def _moved(path: PurePosixPath, moved: Mapping[PurePosixPath, PurePosixPath]) -> PurePosixPath:
    """Return where a file is after the moves, of which one may be of its folder."""
    return moved[path.parent] / path.name if path.parent in moved else moved.get(path, path)


def _prove_tensors(
    before: CheckpointFolder, after: CheckpointFolder, steps: tuple[Step, ...], edits: tuple[Edit, ...]
) -> None:
    actions = [step.action for step in steps]
    dropped = {action.path for action in actions if isinstance(action, DropEntry)}
    moved = {action.source: action.target for action in actions if isinstance(action, Renumber)}
    maps = {action.path: action.maps for action in actions if isinstance(action, RewriteNames)}
    found = {component.path: component for component in after.components}
    spans = _spans(before, edits)
    for component in before.components:
        if component.path in dropped or component.problem is not None:
            continue
        new = found.get(moved.get(component.path, component.path))
        if new is None or new.problem is not None:
            why = new.problem.message if new is not None and new.problem is not None else "it is not there"
            raise OperationError(f"{component.path} after the repair: {why}")
        _prove_component(component, new, maps.get(component.path, {}), spans.get(component.path))
    expected = {moved.get(component.path, component.path) for component in before.components} - {
        path for path in dropped if path not in moved.values()
    }
    if gone := sorted(str(path) for path in expected - found.keys()):
        raise OperationError(f"after the repair these files are missing: {', '.join(gone)}")


def _prove_component(
    old: Component,
    new: Component,
    maps: Mapping[tuple[tuple[str, ...], str], KeyMap],
    spans: tuple[Span, ...] | None,
) -> None:
    _prove_names(old, new, maps)
    if len(old.tensors) != len(new.tensors):
        raise OperationError(
            f"{old.path} had {len(old.tensors)} tensors, after the repair {len(new.tensors)}"
        )
    for was, now in zip(old.tensors, new.tensors, strict=True):
        if (was.dtype, was.shape) != (now.dtype, now.shape):
            raise OperationError(
                f"{old.path}: {was.fqn!r} was {was.dtype} {was.shape}, now {now.dtype} {now.shape}"
            )
        if was.data_offsets is None or now.data_offsets is None:
            if was.data_offsets != now.data_offsets:
                raise OperationError(f"{old.path}: the bytes of {was.fqn!r} moved out of one range")
            continue
        if not _is_same_range(was.data_offsets, now.data_offsets, spans):
            raise OperationError(f"{old.path}: the bytes of {was.fqn!r} are not where the repair left them")


def _prove_names(old: Component, new: Component, maps: Mapping[tuple[tuple[str, ...], str], KeyMap]) -> None:
    """Names may change by the key map of their place only, and keep their order."""

    def renamed(scope: NameScope) -> list[str]:
        key_map = maps.get((scope.path, scope.kind))
        return [key_map(fqn) for fqn in scope.names] if key_map is not None else list(scope.names)

    want = [(scope.path, scope.kind, renamed(scope)) for scope in old.scopes]
    have = [(scope.path, scope.kind, list(scope.names)) for scope in new.scopes]
    if want != have:
        raise OperationError(f"{old.path}: the names after the repair are not those of the plan")


def _is_same_range(was: tuple[int, int], now: tuple[int, int], spans: tuple[Span, ...] | None) -> bool:
    if was[0] == was[1]:
        return now[0] == now[1]
    if spans is None:
        return was == now
    return any(
        span.begin <= now[0] and now[1] <= span.end and now[0] - span.begin + span.source == was[0]
        for span in spans
    ) and (now[1] - now[0] == was[1] - was[0])


def _spans(before: CheckpointFolder, edits: tuple[Edit, ...]) -> dict[PurePosixPath, tuple[Span, ...]]:
    """Return, for every edited file, which of its bytes are old ones and where they were."""
    sizes = {component.path: component.size for component in before.components}
    spans: dict[PurePosixPath, tuple[Span, ...]] = {}
    for edit in edits:
        match edit:
            case Patch():
                known = spans.get(edit.path, (Span(0, sizes[edit.path], 0),))
                spans[edit.path] = _without(known, edit.offset, edit.offset + len(edit.new))
            case Append():
                known = spans.get(edit.path, (Span(0, sizes[edit.path], 0),))
                spans[edit.path] = _without(known, edit.old_size, edit.old_size + len(edit.data))
            case Truncate():
                known = spans.get(edit.path, (Span(0, sizes[edit.path], 0),))
                spans[edit.path] = _without(known, edit.new_size, edit.old_size)
            case Replace():
                spans[edit.path] = tuple(_recipe_spans(edit))
            case _:
                pass  # removals and moves write no bytes
    return spans


def _without(spans: tuple[Span, ...], begin: int, end: int) -> tuple[Span, ...]:
    kept = []
    for span in spans:
        if span.begin < min(begin, span.end):
            kept.append(Span(span.begin, min(begin, span.end), span.source))
        if max(end, span.begin) < span.end:
            start = max(end, span.begin)
            kept.append(Span(start, span.end, span.source + start - span.begin))
    return tuple(kept)


def _recipe_spans(edit: Replace) -> Iterable[Span]:
    position = 0
    for piece in edit.content.pieces:
        if isinstance(piece, Range) and piece.path == edit.path:
            yield Span(position, position + piece.length, piece.offset)
        position += piece.length


def _prove_no_new_damage(
    plan: Plan, diagnosis: Diagnosis, moved: Mapping[PurePosixPath, PurePosixPath]
) -> None:
    """No file may be broken or missing that was not so before."""
    known = {(finding.code, _moved(finding.path, moved)) for finding in plan.findings}
    for finding in diagnosis.findings:
        if isinstance(finding, _BROKEN) and (finding.code, finding.path) not in known:
            raise OperationError(f"after the repair: {finding}")


def _prove_nothing_left(diagnosis: Diagnosis, stays: set[PurePosixPath], policy: Policy) -> None:
    """A second repair must find nothing to do, except about files of which this one said that they stay."""
    plan = make_plan(diagnosis, policy)
    asked = {path for stay in plan.unplanned if stay.code == DoubledModel.code for path in stay.paths}
    doubles = [
        finding
        for finding in diagnosis.findings
        if isinstance(finding, DoubledModel)
        and policy.wants(finding.code)
        and finding.path not in asked
        and not stays & {finding.path, finding.original}
    ]
    surprises = [step for step in plan.steps if not stays & set(step.before)]
    if doubles or surprises:
        raise OperationError(f"after the repair there is still something to do: {(doubles or surprises)[0]}")
