"""Why an entry is neither dropped nor moved although it could be."""

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from ckptfix.operations.diagnose.entries import Numbered
from ckptfix.operations.plan.draft import Draft
from ckptfix.wording import list_names


def drop_objection(draft: Draft, path: PurePosixPath) -> str | None:
    """Return why an entry must not go, with the moves of the entries behind it; None when nothing is against it."""
    state = draft.states.get(path)
    if not draft.unsafe.isdisjoint(draft.files_of(path)):
        return "a file with an unsafe pickle is never edited"
    if state is not None and state.is_linked:
        return "it is a symbolic link to a folder: repair that folder"
    if state is not None:
        others = sorted(str(file) for file in state.files.keys() - {*state.named, state.metadata_path})
        if others:
            return f"it also holds {list_names(others)}, which its .metadata does not name"
    behind = [other for other in _family(draft, path) if other != path]
    return (
        _own_journal(draft, (path, *behind))
        or _linked(draft, behind)
        or _needed(draft, (path, *behind), path)
    )


def move_objection(draft: Draft, entries: Sequence[Numbered]) -> str | None:
    """Return why none of these entries may move, None when nothing is against it."""
    paths = [entry.path for entry in entries]
    return _own_journal(draft, paths) or _linked(draft, paths) or _needed(draft, paths, None)


def _family(draft: Draft, path: PurePosixPath) -> tuple[PurePosixPath, ...]:
    """Return an entry and those behind it, which move when it goes."""
    for role in {entry.role for entry in draft.folder.components} | {
        state.name.role for state in draft.states.values() if state.name is not None
    }:
        for entries in draft.entries(role):
            own = next((entry.name.index for entry in entries if entry.path == path), None)
            if own is not None:
                return tuple(entry.path for entry in entries if entry.name.index >= own)
    return (path,)


def _own_journal(draft: Draft, paths: Iterable[PurePosixPath]) -> str | None:
    """An undo in a folder that was repaired alone must find the folder where it was."""
    for path in paths:
        state = draft.states.get(path)
        if state is not None and state.journals:
            return f"{path} was repaired alone and has a journal of its own: undo that, or delete {path}/.ckptfix"
    return None


def _linked(draft: Draft, paths: Iterable[PurePosixPath]) -> str | None:
    for path in paths:
        state = draft.states.get(path)
        if state is not None and state.is_linked:
            return f"{path} would have to move, and is a symbolic link to a folder"
    return None


def _needed(draft: Draft, paths: Sequence[PurePosixPath], dropped: PurePosixPath | None) -> str | None:
    """Return which symbolic link leads to one of these entries, and would lead nowhere without it."""
    gone = {file for path in paths for file in draft.files_of(path)} | set(paths)
    for link, places in draft.links.items():
        if dropped is not None and (link == dropped or dropped in link.parents):
            continue  # it goes, too
        if needed := sorted(places & gone):
            return f"{link} is a symbolic link to {needed[0]}, which would no longer be there"
    return None
