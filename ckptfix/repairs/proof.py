"""Proof, after the edits and before they are committed, that a repair did what it planned and
nothing else.

No tensor byte is read for it: every kept tensor must have its old dtype and shape, under its mapped
key, its bytes must be where no edit wrote, or in a range that an edit copied from where they were.
Of the data files of DCP folders none may be written, but for the new one that holds the lists of
keys.
"""

from collections.abc import Iterable, Mapping, Set
from itertools import permutations
from pathlib import PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.dcp import DcpFolder, new_paths
from ckptfix.checkpoint.folder import CheckpointFolder, Component, NameScope, scan_folder
from ckptfix.checkpoint.keys import KeyMap
from ckptfix.diagnosis.case import Case, Verdict, Verdicts
from ckptfix.diagnosis.diagnose import diagnose
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.duplicates import DoubledModel, NestedPrefix, WrapperPrefix
from ckptfix.diagnosis.findings.sharded import LeftoverIndex, MissingShard, StaleShard
from ckptfix.errors import OperationError
from ckptfix.formats.dcp_metadata import DcpMetadata
from ckptfix.formats.dcp_rewrite import paths_of
from ckptfix.repairs.plan import make_plan
from ckptfix.repairs.steps import (
    Draft,
    DropEntry,
    Renumber,
    RewriteNames,
    SetAside,
    Step,
    Unplanned,
    WriteIndex,
)
from ckptfix.storage.edits import Append, Edit, Patch, Remove, Replace, Truncate
from ckptfix.storage.recipes import Absent, Range
from ckptfix.wording import count_of

PlaceMaps = Mapping[tuple[tuple[str, ...], str], KeyMap]
"""(path, kind) of a place of keys -> its key map."""


class Span(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file after the repair are those from ``source`` on of the
    file before it.
    """

    begin: int
    end: int
    source: int


def prove_repair(
    plan: Draft,
    steps: tuple[Step, ...],
    edits: tuple[Edit, ...],
    stays: tuple[Unplanned, ...],
) -> Case:
    """Scan the folder again and prove the repair. Returns the new case; raises OperationError with
    what is wrong.
    """
    before = plan.folder
    after = scan_folder(before.root, before.only)
    _prove_tensors(before, after, steps, edits)
    moved = {
        step.action.source: step.action.target
        for step in steps
        if isinstance(step.action, Renumber)
    }
    dropped = {step.action.path for step in steps if isinstance(step.action, DropEntry)}
    # The repair changed no tensor, so the comparisons made before it hold still.
    known = _known(plan.case.verdicts, moved, dropped)
    case = diagnose(Case(after, known=known, neighbours=plan.case.neighbours))
    _prove_dcp_folders(plan.sharded, case.sharded, steps, edits)
    _prove_no_new_finding(plan, case, steps, moved)
    _prove_nothing_left(
        make_plan(case, plan.policy),
        {_moved(path, moved) for stay in stays for path in stay.paths},
    )
    return case


def _known(
    verdicts: Verdicts, moved: Mapping[PurePosixPath, PurePosixPath], dropped: Set[PurePosixPath]
) -> Verdicts:
    """Return the comparisons of the entries that stay, in both directions and for every pair of
    equal entries.

    After a rename another one of several equal models can have the fewest wrappers, and count as
    the original.
    """
    known: dict[tuple[PurePosixPath, PurePosixPath], Verdict] = {}
    equal: dict[PurePosixPath, frozenset[PurePosixPath]] = {}
    for (kept, other), verdict in verdicts.items():
        known[kept, other] = known[other, kept] = verdict
        if verdict.full and verdict.difference is None:
            joined = equal.get(kept, frozenset()) | equal.get(other, frozenset()) | {kept, other}
            equal |= dict.fromkeys(joined, joined)
    for joined in set(equal.values()):
        known |= dict.fromkeys(permutations(joined, 2), Verdict(None, full=True))
    return {
        (moved.get(kept, kept), moved.get(other, other)): verdict
        for (kept, other), verdict in known.items()
        if kept not in dropped and other not in dropped
    }


def _moved(path: PurePosixPath, moved: Mapping[PurePosixPath, PurePosixPath]) -> PurePosixPath:
    """Return the path of a file after the moves, which may include one of its folder."""
    return moved[path.parent] / path.name if path.parent in moved else moved.get(path, path)


def _prove_tensors(
    before: CheckpointFolder,
    after: CheckpointFolder,
    steps: tuple[Step, ...],
    edits: tuple[Edit, ...],
) -> None:
    actions = [step.action for step in steps]
    dropped = {action.path for action in actions if isinstance(action, DropEntry)}
    dropped.update(
        path for action in actions if isinstance(action, SetAside) for path in action.files
    )
    moved = {action.source: action.target for action in actions if isinstance(action, Renumber)}
    maps = {action.path: action.maps for action in actions if isinstance(action, RewriteNames)}
    found = {component.path: component for component in after.components}
    spans = _spans(before, edits)
    for component in before.components:
        if component.path in dropped or component.problem is not None:
            continue
        new = found.get(moved.get(component.path, component.path))
        if new is None or new.problem is not None:
            why = new.problem.message if new is not None and new.problem is not None else "missing"
            raise OperationError(f"{component.path}: {why} (after the repair)")
        _prove_component(component, new, maps.get(component.path, {}), spans.get(component.path))
    expected = {moved.get(component.path, component.path) for component in before.components} - {
        path for path in dropped if path not in moved.values()
    }
    if gone := sorted(str(path) for path in expected - found.keys()):
        raise OperationError(f"files missing after the repair: {', '.join(gone)}")


def _prove_component(
    old: Component,
    new: Component,
    maps: PlaceMaps,
    spans: tuple[Span, ...] | None,
) -> None:
    _prove_names(old, new, maps)
    if len(old.tensors) != len(new.tensors):
        raise OperationError(
            f"{old.path}: {count_of(len(new.tensors), 'tensor')} after the repair (expected "
            f"{len(old.tensors)})"
        )
    for was, now in zip(old.tensors, new.tensors, strict=True):
        if (was.dtype, was.shape) != (now.dtype, now.shape):
            raise OperationError(
                f"{old.path}: {was.fqn!r} was {was.dtype} {was.shape}, now {now.dtype} {now.shape}"
            )
        if was.data_offsets is None or now.data_offsets is None:
            if was.data_offsets != now.data_offsets:
                raise OperationError(f"{old.path}: the byte range of {was.fqn!r} changed")
            continue
        if not _is_same_range(was.data_offsets, now.data_offsets, spans):
            raise OperationError(
                f"{old.path}: the bytes of {was.fqn!r} are not at the expected offsets after the "
                "repair"
            )


def _prove_names(old: Component, new: Component, maps: PlaceMaps) -> None:
    """Prove that keys changed by the key map of their place alone, and kept their order."""
    if _places(old.scopes, maps) != _places(new.scopes, {}):
        raise OperationError(f"{old.path}: the keys after the repair differ from the plan")


def _places(
    scopes: Iterable[NameScope], maps: PlaceMaps
) -> list[tuple[tuple[str, ...], str, list[str]]]:
    """Return the places of keys with the keys that they have after a repair by these maps."""
    return [
        (one.path, one.kind, _renamed(one.names, maps.get((one.path, one.kind)))) for one in scopes
    ]


def _renamed(names: Iterable[str], key_map: KeyMap | None) -> list[str]:
    return list(names if key_map is None else map(key_map, names))


def _is_same_range(
    was: tuple[int, int], now: tuple[int, int], spans: tuple[Span, ...] | None
) -> bool:
    if was[0] == was[1]:
        return now[0] == now[1]
    if spans is None:
        return was == now
    return any(
        span.begin <= now[0] and now[1] <= span.end and now[0] - span.begin + span.source == was[0]
        for span in spans
    ) and (now[1] - now[0] == was[1] - was[0])


def _spans(
    before: CheckpointFolder, edits: tuple[Edit, ...]
) -> dict[PurePosixPath, tuple[Span, ...]]:
    """Return the old bytes in every edited file, and where they were."""
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


def _prove_no_new_finding(
    plan: Draft,
    case: Case,
    steps: Iterable[Step],
    moved: Mapping[PurePosixPath, PurePosixPath],
) -> None:
    """Raise OperationError when a file has a finding of a kind that it did not have before.

    Only these notes may come: that about keys in a wrapper, with a rename to such keys; that about
    a left-over shard, with a new index that places its keys in another shard, which holds equal
    values; and that about an index whose shards are gone, with a new index that loaders take
    before. A finding about two files counts for both: after a rename the other one can have fewer
    wrappers, and be the original.
    """
    known = {
        (_kind(finding), _moved(path, moved))
        for finding in plan.case.findings
        for path in (*finding.about, getattr(finding, "original", finding.path))
    }
    renames = any(isinstance(step.action, RewriteNames) for step in steps)
    written = {path for step in steps for path in _new_index(step)}
    lacking = {
        finding.named_by for finding in plan.case.findings if isinstance(finding, MissingShard)
    }
    for finding in case.findings:
        is_known = all((_kind(finding), path) in known for path in finding.about)
        is_of_rename = renames and isinstance(finding, WrapperPrefix)
        is_of_index = type(finding) is StaleShard and finding.index in written
        # An index without shards was an error; with a new index before it, it is left over.
        is_of_index |= (
            isinstance(finding, LeftoverIndex)
            and finding.file in written
            and str(finding.path) in lacking
        )
        if not (is_known or is_of_rename or is_of_index):
            raise OperationError(f"the repair caused a new finding: {finding}")


def _kind(finding: Finding) -> type:
    """Return the class from which the findings of one kind derive, also those of another severity.

    Findings about the wrappers of a file are one kind: which of them it has depends on the names in
    other files.
    """
    if isinstance(finding, NestedPrefix | WrapperPrefix):
        return NestedPrefix
    return next(kind for kind in type(finding).__mro__ if Finding in kind.__bases__)


def _prove_nothing_left(plan: Draft, stays: set[PurePosixPath]) -> None:
    """Raise OperationError when the plan of a second repair would change files other than those
    that this one left on purpose.
    """
    asked = {
        path for stay in plan.unplanned if stay.code == DoubledModel.code for path in stay.paths
    }
    doubles = [
        finding
        for finding in plan.findings
        if isinstance(finding, DoubledModel)
        and finding.path not in asked
        and not stays & {finding.path, finding.original}
    ]
    surprises = [step for step in plan.steps if not stays & {*step.before, *_new_index(step)}]
    if doubles or surprises:
        raise OperationError(f"the repair left something to repair: {(doubles or surprises)[0]}")


def _new_index(step: Step) -> Iterable[PurePosixPath]:
    """Return the path of the index that a step writes; a missing one is not among the files it
    relies on.
    """
    return (step.action.path,) if isinstance(step.action, WriteIndex) else ()


def _prove_dcp_folders(
    before: Iterable[DcpFolder],
    after: Iterable[DcpFolder],
    steps: Iterable[Step],
    edits: Iterable[Edit],
) -> None:
    """Compare the folders before and after the edits of these steps. Raises OperationError with
    what is wrong.
    """
    actions = [step.action for step in steps]
    dropped = {action.path for action in actions if isinstance(action, DropEntry)}
    moved = {action.source: action.target for action in actions if isinstance(action, Renumber)}
    maps = {action.path: action.maps for action in actions if isinstance(action, RewriteNames)}
    found = {state.path: state for state in after}
    edits = tuple(edits)
    written = set(_written(edits))
    removed = {edit.path for edit in edits if isinstance(edit, Remove)}
    for state in before:
        if state.path in dropped:
            continue
        new = found.get(moved.get(state.path, state.path))
        if new is None or new.problem != state.problem:
            why = "missing" if new is None or new.problem is None else new.problem.message
            raise OperationError(f"{state.path}: {why} (after the repair)")
        own = maps.get(state.metadata_path, {})
        allowed = {state.metadata_path} if own else set()
        if changed := sorted(str(path) for path in (written & state.files.keys()) - allowed):
            raise OperationError(f"the repair wrote to {changed[0]}, which holds tensors")
        _prove_files(state, new, allowed | removed)
        if state.metadata is not None and new.metadata is not None:
            _prove_dcp_names(state, new, own)
            _prove_items(state, state.metadata, new.metadata, own)
        elif (state.metadata is None) != (new.metadata is None):
            raise OperationError(
                f"{state.metadata_path} changed, but no step of the repair changes it"
            )
    left = {moved.get(state.path, state.path) for state in before if state.path not in dropped}
    if more := sorted(str(path) for path in found.keys() - left):
        raise OperationError(f"after the repair {more[0]} still holds files of a save")


def _written(edits: Iterable[Edit]) -> Iterable[PurePosixPath]:
    """Yield the existing files whose bytes change."""
    for edit in edits:
        is_new = isinstance(edit, Replace) and isinstance(edit.previous, Absent)
        if isinstance(edit, Patch | Append | Truncate | Replace) and not is_new:
            yield edit.path


def _prove_files(old: DcpFolder, new: DcpFolder, touched: Set[PurePosixPath]) -> None:
    """Raise OperationError unless every file without an edit is unchanged, also behind a symbolic
    link.
    """
    for path, file in old.files.items():
        if path in touched:
            continue
        now = new.files.get(new.path / path.relative_to(old.path))
        if now is None or now.fingerprint != file.fingerprint:
            what = "is missing" if now is None else "is a different file"
            raise OperationError(f"{path} {what} after the repair")


def _prove_dcp_names(old: DcpFolder, new: DcpFolder, maps: PlaceMaps) -> None:
    if sorted(_places(old.scopes, maps)) != sorted(_places(new.scopes, {})):
        raise OperationError(f"{old.metadata_path}: the keys after the repair differ from the plan")
    for place, item in old.listed.items():
        listed = new.listed.get(place)
        want = _renamed((name for _, name in item.names), maps.get(place))
        if listed is None or [name for _, name in listed.names] != want:
            raise OperationError(
                f"{old.metadata_path}: the keys in {item.fqn!r} differ from the plan"
            )


def _prove_items(old: DcpFolder, was: DcpMetadata, now: DcpMetadata, maps: PlaceMaps) -> None:
    changed = new_paths(old, was, maps)
    fqns = {path: fqn for fqn, path in paths_of(now).items()}
    names = {fqn: fqns.get(changed.get(fqn, path)) for fqn, path in paths_of(was).items()}
    if len(was.stored) != len(now.stored) or len(names) != len(fqns) or None in names.values():
        raise OperationError(f"{old.metadata_path}: lists different items after the repair")
    tensors = {one.fqn: one for one in now.tensors}
    for one in was.tensors:
        twin = tensors.get(names[one.fqn] or "")
        if twin is None or one[1:-1] != twin[1:-1]:  # all fields but the name and its site
            raise OperationError(
                f"{old.metadata_path}: {one.fqn!r} is a different tensor after the repair"
            )
    rewritten = {item.fqn for place, item in old.listed.items() if place in maps}
    for (fqn, offsets), item in was.stored.items():
        place = now.stored.get((names.get(fqn) or fqn, offsets))
        if fqn in rewritten and offsets is None:
            continue  # its names were compared above
        if place is None or item[1:-1] != place[1:-1]:
            raise OperationError(
                f"{old.metadata_path}: {fqn!r} has a different location after the repair"
            )
