"""Proof that a repair of DCP folders changed names and nothing else (``proof``).

Every chunk must be of the same dtype and shape, at the same bytes of the same file, under its mapped name; of the files
with data none may be written, but for the new one that holds the lists of names.
"""

from collections.abc import Iterable, Mapping, Set
from pathlib import PurePosixPath

from ckptfix.checkpoint.keys import KeyMap
from ckptfix.checkpoint.sharded import ShardedState
from ckptfix.errors import OperationError
from ckptfix.formats.dcp_metadata import DcpMetadata
from ckptfix.formats.dcp_rewrite import paths_of
from ckptfix.operations.sharded_editing import new_paths
from ckptfix.operations.steps import DropEntry, Renumber, RewriteNames, Step
from ckptfix.storage.edits import Append, Edit, Patch, Remove, Replace, Truncate
from ckptfix.storage.recipes import Absent

PlaceMaps = Mapping[tuple[tuple[str, ...], str], KeyMap]


def prove_sharded(
    before: Iterable[ShardedState],
    after: Iterable[ShardedState],
    steps: Iterable[Step],
    edits: Iterable[Edit],
) -> None:
    """Compare the folders before and after the edits of these steps. Raises OperationError with what is wrong."""
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
            why = "it is not there" if new is None or new.problem is None else new.problem.message
            raise OperationError(f"{state.path} after the repair: {why}")
        own = maps.get(state.metadata_path, {})
        allowed = {state.metadata_path} if own else set()
        if changed := sorted(str(path) for path in (written & state.files.keys()) - allowed):
            raise OperationError(f"the repair wrote to {changed[0]}, which holds tensors")
        _prove_files(state, new, allowed | removed)
        if state.metadata is not None and new.metadata is not None:
            _prove_names(state, new, own)
            _prove_items(state, state.metadata, new.metadata, own)
        elif (state.metadata is None) != (new.metadata is None):
            raise OperationError(f"{state.metadata_path} after the repair: it is not what it was")
    left = {moved.get(state.path, state.path) for state in before if state.path not in dropped}
    if more := sorted(str(path) for path in found.keys() - left):
        raise OperationError(f"after the repair {more[0]} still holds files of a save")


def _written(edits: Iterable[Edit]) -> Iterable[PurePosixPath]:
    """Yield the files whose bytes change and that were there."""
    for edit in edits:
        is_new = isinstance(edit, Replace) and isinstance(edit.previous, Absent)
        if isinstance(edit, Patch | Append | Truncate | Replace) and not is_new:
            yield edit.path


def _prove_files(old: ShardedState, new: ShardedState, touched: Set[PurePosixPath]) -> None:
    """Every file but those that an edit replaced or removed is the file that it was, also behind a symbolic link."""
    for path, file in old.files.items():
        if path in touched:
            continue
        now = new.files.get(new.path / path.relative_to(old.path))
        if now is None or now.fingerprint != file.fingerprint:
            what = "is not there" if now is None else "is another file"
            raise OperationError(f"{path} {what} after the repair")


def _prove_names(old: ShardedState, new: ShardedState, maps: PlaceMaps) -> None:
    def renamed(path: tuple[str, ...], kind: str, names: Iterable[str]) -> list[str]:
        key_map = maps.get((path, kind))
        return [key_map(name) if key_map is not None else name for name in names]

    want = [(scope.path, scope.kind, renamed(scope.path, scope.kind, scope.names)) for scope in old.scopes]
    have = [(scope.path, scope.kind, list(scope.names)) for scope in new.scopes]
    if sorted(want) != sorted(have):
        raise OperationError(f"{old.metadata_path}: the names after the repair are not those of the plan")
    for place, item in old.listed.items():
        listed = new.listed.get(place)
        if listed is None or [name for _, name in listed.names] != renamed(
            *place, (name for _, name in item.names)
        ):
            raise OperationError(f"{old.metadata_path}: the names in {item.fqn!r} are not those of the plan")


def _prove_items(old: ShardedState, was: DcpMetadata, now: DcpMetadata, maps: PlaceMaps) -> None:
    changed = new_paths(old, was, maps)
    fqns = {path: fqn for fqn, path in paths_of(now).items()}
    names = {fqn: fqns.get(changed.get(fqn, path)) for fqn, path in paths_of(was).items()}
    if len(was.stored) != len(now.stored) or len(names) != len(fqns) or None in names.values():
        raise OperationError(f"{old.metadata_path}: after the repair it lists other items")
    tensors = {one.fqn: one for one in now.tensors}
    for one in was.tensors:
        twin = tensors.get(names[one.fqn] or "")
        if twin is None or one[1:-1] != twin[1:-1]:  # all but the name and its site
            raise OperationError(f"{old.metadata_path}: {one.fqn!r} is another tensor after the repair")
    rewritten = {item.fqn for place, item in old.listed.items() if place in maps}
    for (fqn, offsets), item in was.stored.items():
        place = now.stored.get((names.get(fqn) or fqn, offsets))
        if fqn in rewritten and offsets is None:
            continue  # its names were looked at
        if place is None or item[1:-1] != place[1:-1]:
            raise OperationError(f"{old.metadata_path}: {fqn!r} lies elsewhere after the repair")
