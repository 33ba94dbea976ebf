"""Edits compiled from steps: the bytes of each file that change, and the bytes that undo the
change.

A rename in a DCP folder writes a new ``.metadata``, which atomically replaces the old one. An
optimizer's keys are in small items of its ``.distcp`` files, too: those are written to a new file
that the new ``.metadata`` points to, and the old ones stay where they are. So a reader finds the
old keys or the new ones, and no tensor's byte is touched.
"""

import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from msgspec import Struct, field

from ckptfix.checkpoint.dcp import DATA_SUFFIX, DcpFolder, new_paths
from ckptfix.checkpoint.folder import Component
from ckptfix.checkpoint.keys import KeyMap
from ckptfix.checkpoint.pairing import Files, Pairing, Saved, pair_up
from ckptfix.errors import FormatError, UnsupportedFormat
from ckptfix.formats.dcp_items import renamed_item
from ckptfix.formats.dcp_metadata import DcpMetadata
from ckptfix.formats.dcp_rewrite import ItemLocation, rewrite_metadata
from ckptfix.formats.dcp_stream import StoredItem
from ckptfix.formats.safetensors_file import (
    SafetensorsFile,
    WeightsIndex,
    format_index,
    looks_like_safetensors,
    pad_header,
    rename_header,
    same_phase_length,
)
from ckptfix.formats.torch_file import Appended, Patched, TorchFile
from ckptfix.formats.torch_pickle import name_lists
from ckptfix.repairs.steps import (
    Draft,
    DropEntry,
    Renumber,
    RewriteNames,
    SetAside,
    Step,
    StepAction,
    Trim,
    Unplanned,
    WriteIndex,
)
from ckptfix.storage.comparing import Run
from ckptfix.storage.edits import Append, Edit, Move, Patch, Remove, Replace, Truncate
from ckptfix.storage.files import AnyPath, exists, is_symlink, on_disk
from ckptfix.storage.reading import open_reader
from ckptfix.storage.recipes import ABSENT, KEPT, Literal, Range, Recipe, RecipePart

NEW_DATA = "__ckptfix_{}" + DATA_SUFFIX
"""Name of the file for rewritten items, with the first free number."""

_OWN = re.compile(r"__ckptfix_[0-9]+\.distcp")

BLOCK = 4096
"""Alignment that a new file keeps, so that file systems with reflinks can share the rest of its
blocks.
"""


class Compiled(Struct):
    """Edits in the order of their steps, and the impossible steps, each with the reason."""

    edits: list[Edit] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    refused: list[Unplanned] = field(default_factory=list)


def compile_plan(plan: Draft, *, new_files: bool) -> Compiled:
    """Turn a plan into edits. Nothing is written.

    ``new_files``: write new files instead of patching the old ones in place (``--atomic``, or a
    file system where that costs nothing). Linked files are always replaced.

    Raises OSError, and FormatError when a file changed since it was scanned.
    """
    trims = {
        step.action.path: step.action.size for step in plan.steps if isinstance(step.action, Trim)
    }
    writer = _Writer(plan, new_files, trims)
    edits: dict[int, list[Edit]] = {}
    refused: dict[int, Unplanned] = {}
    bundles: dict[PurePosixPath, str] = {}
    for number, step in enumerate(plan.steps):
        try:
            edits[number] = _edits(writer, step.action)
        except UnsupportedFormat as error:
            path = _path(step.action)
            refused[number] = Unplanned(code=step.fixes[0], path=path, reason=str(error))
            if step.bundle is not None:
                bundles[step.bundle] = f"{path} cannot be changed: {error}"
    for number, step in enumerate(plan.steps):
        if step.bundle in bundles and number not in refused:
            reason = bundles[step.bundle]
            refused[number] = Unplanned(code=step.fixes[0], path=_path(step.action), reason=reason)
    rewritten = {
        _path(step.action)
        for number, step in enumerate(plan.steps)
        if isinstance(step.action, RewriteNames) and number not in refused
    }
    compiled = Compiled(refused=list(refused.values()))
    for number, step in enumerate(plan.steps):
        if number in refused:
            continue
        # One file changes once: a rewrite of the same file trims as well.
        if not (isinstance(step.action, Trim) and step.action.path in rewritten):
            compiled.edits += edits[number]
        compiled.steps.append(step)
    return compiled


def _edits(writer: "_Writer", action: StepAction) -> list[Edit]:
    match action:
        case DropEntry():
            return writer.drop(action)
        case SetAside():
            return [Remove(path=path, previous=KEPT) for path in action.files]
        case Trim():
            return writer.change(writer.components[action.path], None)
        case RewriteNames():
            return writer.rewrite(action)
        case WriteIndex():
            return [writer.index(action)]
        case Renumber():
            return writer.move(action)


def _path(action: StepAction) -> PurePosixPath:
    return action.source if isinstance(action, Renumber) else action.path


class _Writer:
    """Makes the edits of one plan."""

    def __init__(self, plan: Draft, new_files: bool, trims: dict[PurePosixPath, int]) -> None:
        self.root = plan.folder.root
        self.components = {component.path: component for component in plan.folder.components}
        self.states = {state.path: state for state in plan.sharded}
        self.by_metadata = {state.metadata_path: state for state in plan.sharded}
        self.entries: dict[PurePosixPath, Saved] = {**self.components, **self.states}
        self.made: dict[PurePosixPath, list[PurePosixPath]] = {}
        """Folder -> files that a rename adds to this DCP folder."""
        self.gone: set[PurePosixPath] = set()
        self.new_files = new_files
        self.trims = trims

    def drop(self, action: DropEntry) -> list[Edit]:
        """Return the edits that remove every file of a duplicate. Raises FormatError when it no
        longer is one.
        """
        dropped, kept = self.entries[action.path], self.entries[action.kept]
        pairing = pair_up(kept, dropped)
        if pairing is None or pairing.runs is None:
            raise FormatError(f"{action.path} no longer has the keys of {action.kept}")
        return [
            Remove(
                path=path,
                previous=(
                    KEPT
                    if file.is_linked
                    or path in self.by_metadata
                    or self._is_elsewhere(pairing, path)
                    else self._recipe(pairing.runs, path)
                ),
            )
            for path, file in dropped.files.items()
        ]

    def _is_elsewhere(self, pairing: Pairing, path: PurePosixPath) -> bool:
        """Return whether the kept bytes of a file are outside of the checkpoint, where anyone may
        delete them.
        """
        kept = pairing.kept
        return is_symlink(self.root / kept.path) or (
            isinstance(kept, DcpFolder)
            and any(kept.files[file].is_linked for file, twin in pairing.runs or () if twin == path)
        )

    def _recipe(self, runs: Mapping[Files, tuple[Run, ...]], path: PurePosixPath) -> Recipe:
        """Return the recipe that rebuilds a file of the duplicate from ranges of the files that
        stay.
        """
        ranges = [
            (run, kept)
            for (kept, twin), runs_of_file in runs.items()
            if twin == path
            for run in runs_of_file
        ]
        pieces: list[RecipePart] = []
        position = 0
        with open_reader(self.root / path) as reader:
            for run, kept in sorted(ranges, key=lambda pair: pair[0].offset_b):
                if run.offset_b < position:
                    # Two storages, or two keys, may share bytes; they are in the recipe already.
                    continue
                if run.offset_b > position:
                    pieces.append(Literal(reader.read(position, run.offset_b - position)))
                pieces.append(Range(kept, run.offset_a, run.length))
                position = run.offset_b + run.length
            if position < reader.size:
                pieces.append(Literal(reader.read(position, reader.size - position)))
        return Recipe.like(self.root / path, tuple(pieces))

    def move(self, action: Renumber) -> list[Edit]:
        """Return the edits that move a file, or every file of a folder into an existing, empty
        folder.
        """
        entry = self.entries[action.source]
        files = [path for path in entry.files if path not in self.gone] + self.made.get(
            action.source, []
        )
        return [
            Move(source=path, target=action.target / path.relative_to(action.source))
            for path in files
        ]

    def rewrite(self, action: RewriteNames) -> list[Edit]:
        """Return the edits that rename. Raises UnsupportedFormat with the reason when they cannot
        be made.
        """
        if (state := self.by_metadata.get(action.path)) is not None:
            return self._rewrite_dcp(state, action)
        component = self.components[action.path]
        content = component.content
        if isinstance(content, SafetensorsFile):
            return self._rewrite_safetensors(component, content, action)
        if not isinstance(content, TorchFile):
            raise UnsupportedFormat("ckptfix cannot rename keys in a file of this format")
        if content.trailing and action.path not in self.trims:
            raise UnsupportedFormat(
                "it has trailing bytes; add --allow trailing-bytes to cut them off"
            )
        new_names: dict[int, str] = {}
        for names in name_lists(content.tree):
            is_metadata = names.kind == "metadata"
            key_map = action.maps.get((names.path, "state dict" if is_metadata else names.kind))
            if key_map is not None:
                rename: Callable[[str], str] = key_map.module if is_metadata else key_map
                new_names |= {site: rename(fqn) for fqn, site in names.names if rename(fqn) != fqn}
        with open_reader(self.root / action.path) as reader:
            return self.change(component, content.edit(reader, new_names))

    def _rewrite_safetensors(
        self, component: Component, content: SafetensorsFile, action: RewriteNames
    ) -> list[Edit]:
        key_map = action.maps.get(((), "state dict"), KeyMap(remove=()))
        header = rename_header(content, key_map, add_format=action.add_format)
        room = len(content.raw)
        if len(header) > room and action.renames:
            plain = rename_header(content, key_map)  # "format" is added only if it costs nothing
            header = plain if len(plain) <= room else header
        if len(header) <= room and not (self.new_files or component.is_linked):
            return self.change(component, Patched(8, content.raw, pad_header(header, room)))
        length = same_phase_length(header, room, BLOCK)
        head = struct.pack("<Q", length) + pad_header(header, length)
        old_head = struct.pack("<Q", room) + content.raw
        end = self.trims.get(component.path, component.size)
        path = component.path
        pieces = (Literal(head), Range(path, content.data_start, end - content.data_start))
        back: list[RecipePart] = [
            Literal(old_head),
            Range(path, len(head), end - content.data_start),
        ]
        if end < component.size:
            with open_reader(self.root / path) as reader:
                back.append(Literal(reader.read(end, component.size - end)))
        return [self._replace(component, pieces, tuple(back))]

    def _rewrite_dcp(self, state: DcpFolder, action: RewriteNames) -> list[Edit]:
        metadata = self._metadata(state)
        self._check_no_names_in_data(state, metadata)
        edits: list[Edit] = []
        places: dict[str, ItemLocation] = {}
        items = list(self._renamed_items(state, metadata, action.maps))
        if items:
            name = self._free_name(state)
            data = b""
            for item, new in items:
                places[item.fqn] = ItemLocation(name.relative_to(state.path), len(data), len(new))
                data += new
            like = self.root / state.path / items[0][0].path
            edits.append(
                Replace(path=name, content=Recipe.like(like, (Literal(data),)), previous=ABSENT)
            )
            self.made.setdefault(state.path, []).append(name)
        renamed = rewrite_metadata(metadata, new_paths(state, metadata, action.maps), places)
        content = Recipe.like(self.root / action.path, (Literal(renamed.data),))
        edits.append(Replace(path=action.path, content=content, previous=KEPT))
        for path in _superseded(state, metadata, places):
            edits.append(Remove(path=path, previous=KEPT))
            self.gone.add(path)
        return edits

    def _metadata(self, state: DcpFolder) -> DcpMetadata:
        """Return the metadata that the plan is based on. Raises FormatError when the file changed
        since.
        """
        assert state.metadata is not None  # a folder without metadata has no keys to change
        with open_reader(self.root / state.metadata_path) as reader:
            data = reader.read(0, reader.size)
        if data[: state.metadata.tree.end] != state.metadata.tree.data:
            raise FormatError(f"{state.metadata_path} changed since it was read")
        return state.metadata

    def _check_no_names_in_data(self, state: DcpFolder, metadata: DcpMetadata) -> None:
        for name, items in metadata.items_by_file().items():
            path = state.path / name
            file, item = (
                state.files.get(path),
                next((item for item in items if item.offsets is not None), None),
            )
            if file is None or item is None or item.offset + 9 > file.size:
                continue
            with open_reader(self.root / path) as reader:
                if looks_like_safetensors(reader.read(item.offset, 9)):
                    raise UnsupportedFormat(
                        f"{path} contains safetensors, whose headers also have the old keys"
                    )

    def _renamed_items(
        self,
        state: DcpFolder,
        metadata: DcpMetadata,
        maps: Mapping[tuple[tuple[str, ...], str], KeyMap],
    ) -> Iterator[tuple[StoredItem, bytes]]:
        """Yield the items whose keys change, each with its new bytes."""
        changes: dict[str, dict[int, str]] = {}  # one item can hold keys in several places
        for key, place in state.listed.items():
            key_map = maps.get(key)
            if key_map is not None:
                names = {site: key_map(name) for site, name in place.names if key_map(name) != name}
                changes.setdefault(place.fqn, {}).update(names)
        for fqn, names in changes.items():
            item = metadata.stored[fqn, None]
            if names:
                with open_reader(self.root / state.path / item.path) as reader:
                    yield item, renamed_item(reader, item, names)

    def _free_name(self, state: DcpFolder) -> PurePosixPath:
        number = 0
        while state.path / NEW_DATA.format(number) in state.files:
            number += 1
        return state.path / NEW_DATA.format(number)

    def change(self, component: Component, edit: Patched | Appended | None) -> list[Edit]:
        """Trim a file if its step asks for that, and patch it or append to it."""
        path, size = component.path, component.size
        end = self.trims.get(path, size)
        if not (self.new_files or component.is_linked):
            edits: list[Edit] = []
            if end < size:
                edits.append(Truncate(path=path, old_size=size, new_size=end))
            if isinstance(edit, Patched):
                edits.append(Patch(path=path, offset=edit.offset, old=edit.old, new=edit.new))
            elif isinstance(edit, Appended):
                edits.append(Append(path=path, old_size=end, data=edit.data, tail=edit.tail))
            return edits
        with open_reader(self.root / path) as reader:
            cut = reader.read(end, size - end)
        pieces: tuple[RecipePart, ...]
        back: tuple[RecipePart, ...]
        if isinstance(edit, Patched):
            after = edit.offset + len(edit.new)
            before_and_after = (Range(path, 0, edit.offset), Range(path, after, end - after))
            pieces = (before_and_after[0], Literal(edit.new), before_and_after[1])
            back = (before_and_after[0], Literal(edit.old), before_and_after[1], Literal(cut))
        elif isinstance(edit, Appended):
            pieces = (Range(path, 0, end), Literal(edit.data))
            back = (Range(path, 0, end), Literal(cut))
        else:
            pieces, back = (Range(path, 0, end),), (Range(path, 0, end), Literal(cut))
        return [self._replace(component, pieces, back)]

    def index(self, action: WriteIndex) -> Edit:
        component = self.components.get(action.path)
        old = component.content if component is not None else None
        data = format_index(
            old if isinstance(old, WeightsIndex) else None, action.weight_map, action.total_size
        )
        pieces = (Literal(data),)
        # A broken link, as where the hub's cache has lost a blob, has no bytes, mode or owner.
        if component is None or not exists(self.root / action.path):
            previous = ABSENT if component is None else KEPT
            shard = self.root / next(iter(action.weight_map.values()))
            content = Recipe.like(shard, pieces)
            return Replace(path=action.path, content=content, previous=previous)
        with open_reader(self.root / action.path) as reader:
            return self._replace(component, pieces, (Literal(reader.read(0, reader.size)),))

    def _replace(
        self, component: Component, pieces: tuple[RecipePart, ...], back: tuple[RecipePart, ...]
    ) -> Replace:
        full = self.root / component.path
        previous = KEPT if component.is_linked else Recipe.like(full, _not_empty(back))
        return Replace(
            path=component.path, content=Recipe.like(full, _not_empty(pieces)), previous=previous
        )


_BLOCKS, _BLOCKS_PER_EDIT = 12, 2
"""Blocks of the files and folders of a journal, and of what it says of an edit. One of a header
takes 10 in all, nine edits of small files 13.
"""


def space_needed(edits: Sequence[Edit], *, shares_blocks: bool, block: int) -> int:
    """Return an upper bound of the bytes that a transaction needs on disk, journal and new files
    together.

    ``shares_blocks``: the file system lets a new file share the blocks that it copies. ``block``:
    the smallest number of bytes that it gives a file.
    """
    total = block * (_BLOCKS + _BLOCKS_PER_EDIT * len(edits))
    for edit in edits:
        match edit:
            case Patch():
                total += 2 * len(edit.old)
            case Append():
                total += len(edit.data)
            case Truncate():
                total += edit.old_size - edit.new_size
            case Replace():
                copied = 0 if shares_blocks else edit.content.size
                total += copied + 2 * _literal_size(edit.content) + _literal_size(edit.previous)
            case Remove():
                total += _literal_size(edit.previous)
            case Move():
                pass
    return total


def free_space(root: AnyPath) -> tuple[int, int]:
    """Return the bytes that this user may still write to the file system of ``root``, and those of
    a block.
    """
    status = os.statvfs(on_disk(root))
    return status.f_bavail * status.f_frsize, status.f_frsize


def _literal_size(recipe: object) -> int:
    if not isinstance(recipe, Recipe):
        return 0
    return sum(len(piece.data) for piece in recipe.pieces if isinstance(piece, Literal))


def _not_empty(pieces: tuple[RecipePart, ...]) -> tuple[RecipePart, ...]:
    return tuple(
        piece for piece in pieces if (piece.data if isinstance(piece, Literal) else piece.length)
    )


def _superseded(
    state: DcpFolder, metadata: DcpMetadata, places: Mapping[str, ItemLocation]
) -> Iterator[PurePosixPath]:
    """Yield the files of an earlier repair whose items have all moved to new files."""
    for name, items in metadata.items_by_file().items():
        path = state.path / name
        is_own = path in state.files and _OWN.fullmatch(path.name)
        if is_own and all(item.offsets is None and item.fqn in places for item in items):
            yield path
