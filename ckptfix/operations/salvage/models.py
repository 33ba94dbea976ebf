"""Sort the models of a folder: whole ones are copied, of the others the whole tensors go into new files."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from ckptfix.checkpoint.entries import model_position
from ckptfix.checkpoint.filenames import Role, parse_file_name
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.groups import ModelFiles, group_files
from ckptfix.checkpoint.salvaged import REPORT
from ckptfix.errors import FormatError
from ckptfix.operations.salvage.files import Files
from ckptfix.operations.salvage.found import PartOfModel
from ckptfix.operations.salvage.joining import joined, of_copy
from ckptfix.operations.salvage.naming import stems_of
from ckptfix.weights.layouts import Contiguous
from ckptfix.weights.salvaging import Lost, SavedDict, salvage_safetensors, salvage_torch
from ckptfix.weights.zero_ends import Place

_STRANGE = re.compile(r"[^A-Za-z0-9._-]")
_LONGEST = 64  # characters of a key in the name of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """What was taken out of the files of a model.

    ``dicts``: each with what it is called in a manifest. ``unread``: files that cannot be read. ``copies``: name ->
    another file than the index lists that holds it, too.
    """

    dicts: tuple[tuple[str, SavedDict], ...]
    unread: Mapping[str, Lost]
    copies: Mapping[str, str]


class Models:
    """One look at the models of a folder."""

    def __init__(self, folder: CheckpointFolder, files: Files) -> None:
        """Note what is found where ``files`` notes it."""
        self._files = files
        self._found = files.found
        self._sealed = files.sealed
        self._only = folder.only
        self._groups = group_files(folder)
        self._names = {str(one.path) for one in folder.components} | set(map(str, folder.strays))
        self._names |= set(map(str, folder.subfolders)) | {REPORT}

    def sort(self) -> None:
        """Sort every file of the folder."""
        for group in self._groups:
            self.group(group)

    def group(self, group: ModelFiles) -> None:
        """Sort the files of one state dict, or a file of another kind."""
        if any(member.role not in (Role.MODEL, Role.UNKNOWN) for member in group.members):
            for member in group.members:
                self._files.state(member)
            return
        wrong = {
            member.path: problem
            for member in group.members
            if (problem := self._files.problem(member)) is not None
        }
        if wrong or group.missing or absent(group):
            self._part(group, self._judged(self._taken(group, wrong)))
        elif self._is_sealed(group):
            self._sealed_group(group)
        else:
            self._copy(group, proven=False)

    def add(
        self,
        source: str,
        stem: str,
        found: SavedDict,
        own: "set[str]",
        *,
        position: int | None,
        is_folder: bool,
    ) -> None:
        """Plan a file for what is whole; its name is new among those that are there already, but for ``own``.

        ``position``: that of the model, None for files that ``load_state`` never reads. Where another file of the model
        is whole, the new one gets a name that no loader looks for.
        """
        self._found.lost += found.lost
        if not found.tensors:
            return
        if (whole := self._whole_rival(position, own)) is not None:
            stem, is_folder = f"{stem}-salvaged", False
        stems = stems_of(stem, self._names - own, is_folder=is_folder)
        self._names |= {f"{stems.safetensors}.safetensors", f"{stems.torch}.bin"}
        self._found.damaged += found.damaged
        places: dict[PurePosixPath, list[Place]] = {}
        for one in found.tensors:
            if one.fqn in found.unchecked and isinstance(one.layout, Contiguous):
                for path, begin, length in one.layout.pieces:
                    where = PurePosixPath(os.path.relpath(path, self._found.root))
                    places.setdefault(where, []).append(Place(one.fqn, begin, begin + length))
        for where, runs in places.items():
            self._files.unchecked(where, runs)
        self._found.parts.append(PartOfModel(source=source, stems=stems, found=found))
        if whole is not None:
            words = "holds a part of a model, and has a name that no loader looks for, as the model is complete in"
            self._found.notes.append(f"what is saved of {source} {words} {whole}")

    def _whole_rival(self, position: int | None, own: "set[str]") -> str | None:
        """Return what holds a whole model at this position, in files that are not ``own``; None for nothing."""
        if position is None:
            return None
        for group in self._groups:
            paths = [member.path for member in group.members]
            if model_position(group) != position or own.intersection(map(str, paths)):
                continue
            is_whole = group.is_whole and not absent(group)
            is_whole = is_whole and all(self._files.problem(member) is None for member in group.members)
            if is_whole and not any(self._sealed.files(paths).values()):
                return str(group.index_path or paths[0])
        return None

    def has_part(self, groups: Sequence[ModelFiles], here: PurePosixPath) -> bool:
        """Whether a tensor could be saved of models that are not whole, in the folder ``here`` of this one."""
        for group in groups:
            if any(member.role not in (Role.MODEL, Role.UNKNOWN) for member in group.members):
                continue
            members = [replace(member, path=here / member.path) for member in group.members]
            if not group.missing and all(self._files.problem(member) is None for member in members):
                continue
            for member in members:
                with suppress(FormatError, OSError):
                    if any(one.tensors for one in self._read(member)):
                        return True
        return False

    def _copy(self, group: ModelFiles, *, proven: bool) -> None:
        for member in group.members:
            self._files.whole(member, proven=proven)
        self._copy_index(group)

    def _copy_index(self, group: ModelFiles) -> None:
        """Copy the index of shards, or note that they are without one."""
        if group.index is not None and group.index.problem is None and group.index_path is not None:
            self._found.copy(group.index_path)
        elif group.index_path is not None and group.rivals == 1:
            self._found.unindexed.append(group.index_path)

    def _is_sealed(self, group: ModelFiles) -> bool:
        paths = [member.path for member in group.members]
        return bool(self._sealed.is_sealed(paths) or self._sealed.models(*_labels(group)))

    def _sealed_group(self, group: ModelFiles) -> None:
        """Sort files that are whole by their structure, and were sealed: by the digests of files, then of tensors."""
        of_files = self._sealed.files(member.path for member in group.members)
        differing = {path: why for path, why in of_files.items() if why}
        if len(of_files) == len(group.members) and not differing:
            self._copy(group, proven=True)
            return
        if not self._sealed.models(*_labels(group)):
            for member in group.members:
                if member.path in differing:
                    self._files.damaged(member, Lost(str(member.path), None, differing[member.path]))
                else:
                    self._files.whole(member, proven=member.path in of_files)
            self._copy_index(group)
            return
        taken = self._taken(group, {})
        judged = self._judged(taken)
        pairs = list(zip(taken.dicts, judged.dicts, strict=True))
        if taken.unread or any(len(one.tensors) > len(other.tensors) for (_, one), (_, other) in pairs):
            self._part(group, judged)
            return
        self._copy(group, proven=not any(one.unchecked for _, one in judged.dicts))
        for _, one in judged.dicts:
            self._found.damaged += one.damaged
        if not any(one.damaged for _, one in judged.dicts):
            words = "but every tensor of its model that was sealed has its own"
            self._found.doubtful += [
                Lost(str(path), None, f"{why}, {words}") for path, why in differing.items()
            ]
        self._found.lost += self._unfound(group, judged)

    def _taken(self, group: ModelFiles, wrong: Mapping[PurePosixPath, Lost]) -> _Taken:
        """Take the whole tensors out of the files of a model."""
        dicts: list[tuple[str, SavedDict]] = []
        unread: dict[str, Lost] = {}
        for member in group.members:
            try:
                dicts += [(str(member.path), one) for one in self._read(member)]
            except (FormatError, OSError) as error:
                problem = wrong.get(member.path)
                reason = problem.reason if problem is not None else str(error)
                unread[str(member.path)] = Lost(str(member.path), None, reason)
        if len(group.members) > 1 or group.index_path is not None:
            whole, copies = joined(dicts, group.listed)
            known = self._sealed.models(*_labels(group))
            return _Taken(dicts=((next(iter(known), ""), whole),), unread=unread, copies=copies)
        named = tuple((file + "".join(f"[{step!r}]" for step in one.path), one) for file, one in dicts)
        return _Taken(dicts=named, unread=unread, copies={})

    def _judged(self, taken: _Taken) -> _Taken:
        """Return what was taken without what differs from its digest in the manifest, or with that as damaged."""
        keep = self._files.keep_damaged
        judged = tuple(
            (label, self._sealed.judged(one, self._sealed.digests(label), keep_damaged=keep))
            for label, one in taken.dicts
        )
        return _Taken(dicts=judged, unread=taken.unread, copies=taken.copies)

    def _part(self, group: ModelFiles, taken: _Taken) -> None:
        """Plan new files for what was taken out of a model, and note what is lost."""
        self._found.lost += taken.unread.values()
        found = [one for _, one in taken.dicts]
        seen = _seen(found)
        for name, file in group.listed.items():
            if name not in seen:
                reason = "its file cannot be read" if file in taken.unread else "the index promises it there"
                reason = "its file is missing" if file in group.missing else reason
                self._found.lost.append(Lost(file, name, reason + of_copy(name, taken.copies)))
        self._found.lost += [
            Lost(file, None, "missing; which tensors were in it is not known")
            for file in group.missing
            if file not in group.listed.values()
        ]
        self._found.lost += self._unfound(group, taken)
        own = {str(member.path) for member in group.members} | {str(group.index_path)}
        source = str(group.index_path or group.members[0].path)
        stem = _stem(group)
        for one in found:
            keys = () if len(found) == 1 else (_STRANGE.sub("_", key)[:_LONGEST] for key in one.path)
            position = model_position(group)
            self.add(source, "-".join((stem, *keys)), one, own, position=position, is_folder=False)

    def _unfound(self, group: ModelFiles, taken: _Taken) -> list[Lost]:
        """Return what the manifest lists and no file holds; of a shard that was asked for alone nothing is."""
        if self._only is not None and group.index_path is not None:
            return []
        dicts = dict(taken.dicts)
        reason = "its file cannot be read" if taken.unread else "the manifest lists it, and no file holds it"
        return [
            Lost(label, name, reason)
            for label in self._sealed.models(*_labels(group))
            for name in sorted(self._sealed.expected(label))
            if name not in group.listed and name not in _seen([dicts[label]] if label in dicts else [])
        ]

    def _read(self, member: Component) -> tuple[SavedDict, ...]:
        path = self._found.root / member.path
        if member.name.suffix == ".safetensors":
            return (salvage_safetensors(path),)
        return salvage_torch(path, keep_damaged=self._files.keep_damaged, progress=self._files.progress)


def absent(group: ModelFiles) -> list[str]:
    """Return the names that the index lists and no file holds."""
    held = {tensor.fqn for member in group.members for tensor in member.tensors}
    held |= {name for member in group.members for scope in member.scopes for name in scope.names}
    return [name for name in group.listed if name not in held]


def _seen(found: "list[SavedDict]") -> "set[str | None]":
    names: set[str | None] = {name for one in found for name in (*(t.fqn for t in one.tensors), *one.ties)}
    return names | {lost.name for one in found for lost in one.lost}


def _labels(group: ModelFiles) -> tuple[str, ...]:
    """Return what the model can be called in a manifest."""
    alone = [str(member.path) for member in group.members] if len(group.members) == 1 else []
    return (*alone, *([str(group.index_path)] if group.index_path is not None else []))


def _stem(group: ModelFiles) -> str:
    if group.members and group.members[0].name.shard is None and group.index_path is None:
        return group.members[0].path.stem
    if group.members and group.members[0].name.shard is not None:
        return group.members[0].name.stem
    name = parse_file_name(group.index_path.name) if group.index_path is not None else None
    return name.stem if name is not None else "model"
