"""From steps to edits: which bytes of which file change, and what undoes it."""

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.folder import Component
from ckptfix.checkpoint.keys import KeyMap
from ckptfix.checkpoint.pairing import pair_up
from ckptfix.errors import FormatError, UnsupportedFormat
from ckptfix.formats.safetensors_file import (
    SafetensorsFile,
    WeightsIndex,
    format_index,
    pad_header,
    rename_header,
    same_phase_length,
)
from ckptfix.formats.torch_file import Appended, Patched, TorchFile
from ckptfix.formats.torch_pickle import name_lists
from ckptfix.repairs.dcp_editing import ShardedWriter
from ckptfix.repairs.plan import Plan
from ckptfix.repairs.steps import (
    DropEntry,
    Renumber,
    RewriteNames,
    Step,
    StepAction,
    Trim,
    Unplanned,
    WriteIndex,
)
from ckptfix.storage.edits import Append, Edit, Move, Patch, Remove, Replace, Truncate
from ckptfix.storage.reading import open_reader
from ckptfix.storage.recipes import ABSENT, KEPT, Literal, Range, Recipe, RecipePart

BLOCK = 4096
"""Phase that a new file keeps, so that file systems with reflinks can share the rest of its blocks."""


@dataclass(slots=True)
class Compiled:
    """Edits in the order of their steps, and the steps that turned out impossible, with the reason."""

    edits: list[Edit] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    refused: list[Unplanned] = field(default_factory=list)


def compile_plan(plan: Plan, *, new_files: bool) -> Compiled:
    """Turn a plan into edits. Nothing is written.

    ``new_files``: replace whole files instead of patching them in place (``--atomic``, or a file system where that
    costs nothing). Linked files are always replaced.

    Raises OSError, and FormatError when a file is no longer what it was when it was scanned.
    """
    trims = {step.action.path: step.action.size for step in plan.steps if isinstance(step.action, Trim)}
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
            return writer.sharded.drop(action) if action.is_folder else writer.drop(action)
        case Trim():
            return writer.change(writer.component(action.path), None)
        case RewriteNames():
            is_sharded = writer.sharded.has(action.path)
            return writer.sharded.rewrite(action) if is_sharded else writer.rewrite(action)
        case WriteIndex():
            return [writer.index(action)]
        case Renumber():
            if writer.sharded.has(action.source):
                return writer.sharded.move(action)
            return [Move(source=action.source, target=action.target)]


def _path(action: StepAction) -> PurePosixPath:
    return action.source if isinstance(action, Renumber) else action.path


class _Writer:
    """Makes the edits of one plan."""

    def __init__(self, plan: Plan, new_files: bool, trims: dict[PurePosixPath, int]) -> None:
        self.root = plan.folder.root
        self.sharded = ShardedWriter(plan.folder.root, plan.sharded)
        self.components = {component.path: component for component in plan.folder.components}
        self.new_files = new_files
        self.trims = trims

    def component(self, path: PurePosixPath) -> Component:
        return self.components[path]

    def drop(self, action: DropEntry) -> list[Edit]:
        dropped, kept = self.component(action.path), self.component(action.kept)
        if dropped.is_linked or (self.root / kept.path).is_symlink():  # what is elsewhere may go any time
            return [Remove(path=action.path, previous=KEPT)]
        pairing = pair_up(kept, dropped)
        if pairing is None or pairing.runs is None:
            raise FormatError(f"{action.path} no longer has the names of {action.kept}")
        pieces: list[RecipePart] = []
        position = 0
        with open_reader(self.root / action.path) as reader:
            for run in sorted(pairing.runs, key=lambda run: run.offset_b):
                if run.offset_b < position:
                    continue  # two storages may share a record; its bytes are in the recipe already
                if run.offset_b > position:
                    pieces.append(Literal(reader.read(position, run.offset_b - position)))
                pieces.append(Range(action.kept, run.offset_a, run.length))
                position = run.offset_b + run.length
            if position < reader.size:
                pieces.append(Literal(reader.read(position, reader.size - position)))
        return [Remove(path=action.path, previous=Recipe.like(self.root / action.path, tuple(pieces)))]

    def rewrite(self, action: RewriteNames) -> list[Edit]:
        component = self.component(action.path)
        content = component.content
        if isinstance(content, SafetensorsFile):
            return self._rewrite_safetensors(component, content, action)
        assert isinstance(content, TorchFile)  # nothing else has names
        if content.trailing and action.path not in self.trims:
            raise UnsupportedFormat("bytes follow its end; add --allow trailing-bytes to cut them off")
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
            plain = rename_header(content, key_map)  # "format" is a gift only while it costs nothing
            header = plain if len(plain) <= room else header
        if len(header) <= room and not (self.new_files or component.is_linked):
            return self.change(component, Patched(8, content.raw, pad_header(header, room)))
        length = same_phase_length(header, room, BLOCK)
        head = struct.pack("<Q", length) + pad_header(header, length)
        old_head = struct.pack("<Q", room) + content.raw
        end = self.trims.get(component.path, component.size)
        path = component.path
        pieces = (Literal(head), Range(path, content.data_start, end - content.data_start))
        back: list[RecipePart] = [Literal(old_head), Range(path, len(head), end - content.data_start)]
        if end < component.size:
            with open_reader(self.root / path) as reader:
                back.append(Literal(reader.read(end, component.size - end)))
        return [self._replace(component, pieces, tuple(back))]

    def change(self, component: Component, edit: Patched | Appended | None) -> list[Edit]:
        """Trim a file where that was asked for, and patch it or append to it."""
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
        if component is None:
            model = self.root / next(iter(action.weight_map.values()))
            return Replace(path=action.path, content=Recipe.like(model, pieces), previous=ABSENT)
        with open_reader(self.root / action.path) as reader:
            return self._replace(component, pieces, (Literal(reader.read(0, reader.size)),))

    def _replace(
        self, component: Component, pieces: tuple[RecipePart, ...], back: tuple[RecipePart, ...]
    ) -> Replace:
        full = self.root / component.path
        previous = KEPT if component.is_linked else Recipe.like(full, _not_empty(back))
        return Replace(path=component.path, content=Recipe.like(full, _not_empty(pieces)), previous=previous)


def space_needed(edits: Sequence[Edit], *, shares_blocks: bool) -> int:
    """Return an upper bound of the bytes that a transaction needs on disk, journal and new files together.

    ``shares_blocks``: the file system lets a new file share the blocks that it copies.
    """
    total = 1 << 20
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


def free_space(root: Path) -> int:
    """Return the bytes that this user may still write to the file system of ``root``."""
    status = os.statvfs(root)
    return status.f_bavail * status.f_frsize


def _literal_size(recipe: object) -> int:
    if not isinstance(recipe, Recipe):
        return 0
    return sum(len(piece.data) for piece in recipe.pieces if isinstance(piece, Literal))


def _not_empty(pieces: tuple[RecipePart, ...]) -> tuple[RecipePart, ...]:
    return tuple(piece for piece in pieces if (piece.data if isinstance(piece, Literal) else piece.length))
