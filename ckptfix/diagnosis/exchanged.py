"""Models and optimizers under the file name of another one, or of another run, and custom objects too many.

Accelerate numbers what a script prepares, in the order of the script. So nothing in a folder shows which model or
optimizer belongs under a number, and the checkpoints next to it do. Their headers are read where a file has another
size there: files of equal keys, shapes and dtypes have equal sizes in all saves of a run (measured with accelerate
1.15, safetensors 0.8 and torch 2.13).
"""

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.filenames import Role, split_number
from ckptfix.checkpoint.folder import CheckpointFolder, scan_folder
from ckptfix.checkpoint.manifest import usable_manifest
from ckptfix.checkpoint.neighbours import folder_next_to
from ckptfix.diagnosis.findings.inconsistent import ChangedEntry, MisplacedEntry
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, Shape, bare, saved_optimizers
from ckptfix.diagnosis.siblings import Siblings
from ckptfix.errors import CkptfixError
from ckptfix.storage.reading import origin_of
from ckptfix.wording import count_of

_ROLES = (Role.MODEL, Role.OPTIMIZER)


class _Entry(NamedTuple):
    """A model or an optimizer by its headers. ``shapes``: bare key -> shape; ``saved``: None for a model."""

    path: PurePosixPath
    shapes: dict[str, Shape]
    saved: SavedOptimizer | None

    def is_alike(self, entry: "_Entry") -> bool:
        """Return whether two entries can be of one model or optimizer. Moments that only one has decide nothing."""
        if self.saved is None or entry.saved is None:
            return self.shapes == entry.shapes
        have, expected = self.saved, entry.saved
        if have.options != expected.options or list(map(len, have.groups)) != list(map(len, expected.groups)):
            return False
        return all(
            shape == shape_there
            for name, states in have.states.items()
            for state, shape in states.items()
            if (shape_there := expected.states.get(name, {}).get(state)) is not None and shape is not None
        )

    def has_nothing_of(self, entry: "_Entry") -> bool:
        """Return whether a model is another one than that of an entry, and not a later form of it.

        A model that grew or was compiled has most of its keys or shapes, as has one with adapters.
        """
        shapes, expected = Counter(self.shapes.values()), Counter(entry.shapes.values())
        return self.shapes.items().isdisjoint(entry.shapes.items()) and (
            2 * (shapes & expected).total() < expected.total()
        )


class _Neighbour(NamedTuple):
    """A checkpoint with the same files as this one. ``is_in_order``: its optimizers fit the models of their numbers."""

    folder: CheckpointFolder
    is_earlier: bool
    is_in_order: bool


def diagnose_exchanged(
    folder: CheckpointFolder,
    siblings: Siblings,
    damaged: frozenset[PurePosixPath],
    *,
    home: Path | None = None,
) -> Iterator[MisplacedEntry]:
    """Yield the models and optimizers that the checkpoints next to this one have under other names, or not at all.

    Only several of them can be exchanged; that a single one fits is judged by the folder itself. ``damaged``: files
    with an error. ``home``: where its neighbours are, for a copy of another folder.
    """
    origin = Path(os.path.abspath(origin_of(home or folder.root)))
    if folder.only is not None or split_number(origin.name) is None:
        return
    lists = [
        components
        for role in _ROLES
        for components in folder.entries(role)
        if len(components) > 1 and damaged.isdisjoint(one.path for one in components)
    ]
    sizes = {one.path: one.size for components in lists for one in components}
    roles = {components[0].role for components in lists}
    near = _neighbours(origin, siblings, sizes, roles) if lists else []
    if not near or (len(near) == 1 and not near[0].is_in_order and _is_in_order(folder)):
        return
    for components in lists:
        paths = [one.path for one in components]
        own = _entries(folder, paths)
        known = [(one.is_earlier, entries) for one in near if (entries := _entries(one.folder, paths))]
        if own and known:
            yield from _misplaced(components[0].role, own, known)


def surplus_objects(
    folder: CheckpointFolder, siblings: Siblings, *, home: Path | None = None
) -> Iterator[MisplacedEntry]:
    """Yield the custom objects that no checkpoint next to this one has: ``load_state`` refuses a file too many.

    A script that registers one more has it in all later checkpoints, so that at an end of the run it is a note. So it
    is where they have none: the script may have registered objects in this save alone.
    ``home``: as of ``diagnose_exchanged``.
    """
    own = {one.name.index: one.path for one in folder.components if one.role is Role.CUSTOM}
    origin = Path(os.path.abspath(origin_of(home or folder.root)))
    manifest = usable_manifest(folder.root)
    if not own or split_number(origin.name) is None or (manifest is not None and manifest.is_of_a_save):
        return
    before, after = siblings.around(origin)
    near = [*before, *after]
    known = {index for sibling in near for role, index in sibling.parts if role is Role.CUSTOM}
    surplus = sorted(own.keys() - known)
    if near and surplus and known <= own.keys():
        yield (MisplacedEntry if before and after and known else ChangedEntry)(
            path=own[surplus[0]],
            holds="a custom object" if len(own) == 1 else f"one of {len(own)} custom objects",
            expected=f"{len(known) or 'none'}, as in {_in_words(len(near))}",
            effect="load_state counts these files and fails",
            remedy="move the file out of the folder if the save did not write it",
        )


def _in_words(count: int) -> str:
    return "the checkpoint next to it" if count == 1 else f"{count} checkpoints next to it"


def _neighbours(
    origin: Path, siblings: Siblings, sizes: Mapping[PurePosixPath, int], roles: Collection[Role]
) -> list[_Neighbour]:
    """Return the nearest checkpoints with just these files, none where one has all of them in the same sizes."""
    before, after = siblings.around(origin)
    near = []
    for sibling in (*before[:1], *after[:1], *before[1:], *after[1:]):
        files = {PurePosixPath(file) for (role, _), file in sibling.parts.items() if role in roles}
        if files != sizes.keys():
            continue
        with suppress(CkptfixError, OSError), folder_next_to(origin, sibling.name) as root:
            if all(os.stat(root / path).st_size == size for path, size in sizes.items()):
                return []
            there = scan_folder(root, wanted=lambda file: file.role in _ROLES)
            near.append(_Neighbour(there, sibling in before, _is_in_order(there)))
    return near


def _entries(folder: CheckpointFolder, paths: Collection[PurePosixPath]) -> list[_Entry]:
    """Return the models or optimizers in these files, none where one cannot be read."""
    saved = {one.path: one for one in saved_optimizers(folder, ())}
    entries = [
        _Entry(one.path, {bare(tensor.fqn): tensor.shape for tensor in one.tensors}, saved.get(one.path))
        for one in folder.components
        if one.path in paths and one.problem is None and (one.role is Role.MODEL or one.path in saved)
    ]
    return entries if len(entries) == len(paths) else []


def _is_in_order(folder: CheckpointFolder) -> bool:
    """Return whether the moments of each optimizer have shapes of the model of the same number."""
    shapes = {
        one.name.index: Counter(tensor.shape for tensor in one.tensors)
        for one in folder.components
        if one.role is Role.MODEL
    }
    return all(
        Counter(shape for states in one.states.values() for shape in {*states.values()} - {None, ()})
        <= shapes.get(one.index, Counter())
        for one in saved_optimizers(folder, ())
    )


def _misplaced(
    role: Role, own: Sequence[_Entry], near: Sequence[tuple[bool, Sequence[_Entry]]]
) -> Iterator[MisplacedEntry]:
    """Yield the entries that differ from those of their number in all of these checkpoints, which agree.

    ``near``: of each whether it is an earlier one, and its entries.
    """
    known_by = _in_words(len(near))
    is_between = len({is_earlier for is_earlier, _ in near}) == 2
    effect = "load_state or the next optimizer step fails" if role is Role.OPTIMIZER else "load_state fails"
    for number, entry in enumerate(own):
        expected = near[0][1][number]
        agree = all(expected.is_alike(there[number]) for _, there in near)
        if not agree or any(entry.is_alike(there[number]) for _, there in near):
            continue
        places = [
            place for place in range(len(own)) if all(entry.is_alike(there[place]) for _, there in near)
        ]
        exchanged = [place for place in places if own[place].is_alike(expected)]
        if exchanged and exchanged[0] < number:
            # It was reported with the other file.
            continue
        if places:
            partner = own[(exchanged or places)[0]].path
            what = "parameters" if role is Role.OPTIMIZER else "keys and shapes"
            yield MisplacedEntry(
                path=entry.path,
                holds=f"the {what} of {partner}",
                expected=f"its own, as in {known_by}",
                effect=effect,
                exchanged_with=str(partner) if exchanged else "",
            )
        elif role is Role.MODEL:
            is_other = len(near) > 1 and (is_between or entry.has_nothing_of(expected))
            strange = len(entry.shapes.items() - expected.shapes.items())
            words = f", {strange} of them with other keys or shapes" if strange else ""
            yield (MisplacedEntry if is_other else ChangedEntry)(
                path=entry.path,
                holds=f"{count_of(len(entry.shapes), 'tensor')}{words}",
                expected=f"{count_of(len(expected.shapes), 'tensor')}, as in {known_by}",
                effect=effect,
            )
