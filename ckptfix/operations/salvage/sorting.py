"""Sort what a damaged checkpoint holds into what is copied, what is taken apart, and what is lost (``found``)."""

import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.filenames import Role, parse_file_name
from ckptfix.checkpoint.folder import CheckpointFolder, Component, ProblemKind
from ckptfix.checkpoint.groups import ModelFiles, group_files
from ckptfix.checkpoint.pairing import Progress
from ckptfix.checkpoint.scan import scan_folder
from ckptfix.checkpoint.sharded import belongs, holds_dcp
from ckptfix.errors import FormatError, UsageError
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.torch_file import TorchFile, crc_mismatches
from ckptfix.formats.torch_zip import TorchZip
from ckptfix.operations.salvage.dcp import JudgedFolder, judge
from ckptfix.operations.salvage.found import REPORT, PartOfModel, Sorted
from ckptfix.operations.salvage.joining import joined, of_copy
from ckptfix.operations.target import Target, ensure_checkpoint
from ckptfix.storage.paths import JOURNAL
from ckptfix.storage.reading import open_reader
from ckptfix.weights.layouts import Contiguous
from ckptfix.weights.salvaging import BEHIND, Lost, SavedDict, salvage_safetensors, salvage_torch
from ckptfix.weights.sharded import dcp_folders
from ckptfix.weights.zero_ends import Place, zero_ends

_STRANGE = re.compile(r"[^A-Za-z0-9._-]")
_LONGEST = 64  # characters of a key in the name of a file
_NO_CHECKSUMS = (
    "values without a checksum (safetensors, legacy torch files, pickles): flipped bits do not show"
)


def sort_out(target: Target, *, keep_damaged: bool, progress: Progress | None) -> Sorted:
    """Look at every file of a checkpoint; reads what has a checksum. Raises UsageError, OSError."""
    folder = scan_folder(target.root, target.only)
    if not any(dcp_folders(folder)):
        ensure_checkpoint(folder)
    if target.only is not None and target.only.endswith(".json"):
        raise UsageError(f"{target.path} is an index; give the folder {target.root}")
    sorting = _Sorting(folder, keep_damaged, progress)
    for group in group_files(folder):
        sorting.group(group)
    if target.only is None:
        sorting.folders()
    found = sorting.found
    if found.unchecked:
        found.not_checked.append(_NO_CHECKSUMS)
    return found


class _Sorting:
    """One look at a folder."""

    def __init__(self, folder: CheckpointFolder, keep_damaged: bool, progress: Progress | None) -> None:
        self._folder = folder
        self._root = folder.root
        self._keep_damaged = keep_damaged
        self._progress = progress
        self._names = {str(one.path) for one in folder.components} | set(map(str, folder.strays))
        self._names |= set(map(str, folder.subfolders)) | {REPORT}
        self.found = Sorted(folder.root)

    def group(self, group: ModelFiles) -> None:
        """Sort the files of one state dict, or a file of another kind."""
        if any(member.role not in (Role.MODEL, Role.UNKNOWN) for member in group.members):
            for member in group.members:
                self._state(member)
            return
        wrong = {member.path: problem for member in group.members if (problem := self._problem(member))}
        if not wrong and not group.missing and not _absent(group):
            for member in group.members:
                self._whole(member)
            if group.index is not None and group.index.problem is None and group.index_path is not None:
                self.found.copy(group.index_path)
            return
        self._part(group, wrong)

    def folders(self) -> None:
        """Sort what is no component: other files, DCP folders, other folders."""
        inside = {where for _, where in dcp_folders(self._folder)}
        for where in sorted(inside):
            self._dcp(where)
        others = [
            path for path in self._folder.strays if PurePosixPath(".") not in inside or not belongs(path.name)
        ]
        for path in self._folder.subfolders:
            if path in inside:
                continue
            others += self._below(path)
        taken = [path for path in others if self._is_file(path)]
        self.found.copied += taken
        if taken:
            self.found.not_checked.append(f"{len(taken)} other files, copied as they are")

    def _is_file(self, path: PurePosixPath) -> bool:
        if str(path) == REPORT:
            self.found.not_checked.append(f"{REPORT} of the source, which is left out for the new one")
            return False
        try:
            if stat.S_ISREG(os.stat(self._root / path).st_mode):
                return True
            reason = "it is no regular file"
        except OSError as error:
            reason = f"it cannot be read: {error.strerror or error}"
        self.found.lost.append(Lost(str(path), None, reason))
        return False

    def _below(self, where: PurePosixPath) -> Iterator[PurePosixPath]:
        """Sort the files below a folder, taking none of them apart, and yield those of no kind; no link is followed."""
        if self._is_link(where):
            return
        for root, folders, _ in os.walk(self._root / where):
            here = PurePosixPath(os.path.relpath(root, self._root))
            folders[:] = sorted(
                name for name in folders if name != JOURNAL and not self._is_link(here / name)
            )
            scanned = scan_folder(Path(root))
            before = len(self.found.lost)
            for group in group_files(scanned):
                self._kept(group, here)
            is_dcp = holds_dcp(Path(root))
            if is_dcp:
                self._dcp_kept(here)
            advice = f"to get out what is whole: ckptfix salvage {shlex.quote(root)} NEW_FOLDER"
            self.found.lost[before:] = [
                one._replace(reason=f"{one.reason}; {advice}") for one in self.found.lost[before:]
            ]
            yield from (here / path for path in scanned.strays if not (is_dcp and belongs(path.name)))

    def _is_link(self, path: PurePosixPath) -> bool:
        """Whether a folder is a link, which counts as lost."""
        if not os.path.islink(self._root / path):
            return False
        self.found.lost.append(Lost(str(path), None, "it is a link to a folder, which is not followed"))
        return True

    def _kept(self, group: ModelFiles, here: PurePosixPath) -> None:
        """Copy those files of a group in another folder that are whole, and note what is not."""
        index = group.index if group.index is not None and group.index.problem is None else None
        for member in (*group.members, *([index] if index is not None else ())):
            self._state(replace(member, path=here / member.path))
        self.found.lost += [
            Lost(str(here / file), None, "missing; a part of the model was in it") for file in group.missing
        ]
        self.found.lost += [
            Lost(str(here / group.listed[name]), name, "the index promises it there")
            for name in _absent(group)
            if group.listed[name] not in group.missing and group.is_whole
        ]

    def _dcp_kept(self, where: PurePosixPath) -> None:
        """Copy a DCP folder in another folder when it is whole."""
        judged = judge(self._root, where, keep_damaged=self._keep_damaged, progress=self._progress)
        self.found.unchecked |= judged.unchecked
        if judged.reason:
            self.found.lost.append(Lost(str(where), None, judged.reason))
        else:
            self._copy_dcp(where, judged)

    def _state(self, member: Component) -> None:
        """Sort a file that is no model: it is copied whole, or lost."""
        problem = self._problem(member)
        if problem is None:
            self._whole(member)
        elif self._keep_damaged and member.problem is None:
            self.found.copy(member.path)
            self.found.damaged.append(problem)
        else:
            self.found.lost.append(problem)

    def _whole(self, member: Component) -> None:
        self.found.copy(member.path)
        if not _has_checksums(member):
            places = (
                Place(one.fqn, *one.data_offsets) for one in member.tensors if one.data_offsets is not None
            )
            self._unchecked(member.path, places)
        if member.problem is not None:
            self.found.not_checked.append(f"{member.path}, copied as it is: {member.problem.message}")

    def _problem(self, member: Component) -> Lost | None:
        """Return what is wrong with a file, None for a whole one, and for one of a kind that is not read."""
        if isinstance(member.content, SafetensorsFile) and member.content.trailing:
            return Lost(str(member.path), None, f"{member.content.trailing} {BEHIND}")
        if member.problem is not None:
            if member.problem.kind is ProblemKind.UNSUPPORTED:
                return None
            message = f"{member.problem.kind.value}: {member.problem.message}"
            return Lost(str(member.path), None, message, member.problem.need, _have(member))
        if not isinstance(member.content, TorchFile):
            return None
        with open_reader(self._root / member.path) as reader:
            wrong = [
                name
                for name, _ in crc_mismatches(
                    member.content, reader, every_record=True, progress=self._progress
                )
            ]
        if not wrong:
            return None
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return Lost(str(member.path), None, f"the record {wrong[0]!r}{more} does not have its CRC-32")

    def _part(self, group: ModelFiles, wrong: Mapping[PurePosixPath, Lost]) -> None:
        """Take the whole tensors out of the files of a model, and note what is lost."""
        dicts: list[tuple[str, SavedDict]] = []
        unread: dict[str, Lost] = {}
        for member in group.members:
            try:
                dicts += [(str(member.path), one) for one in self._read(member)]
            except (FormatError, OSError) as error:
                problem = wrong.get(member.path)
                reason = problem.reason if problem is not None else str(error)
                unread[str(member.path)] = Lost(str(member.path), None, reason)
        self.found.lost += unread.values()
        found = [one for _, one in dicts]
        copies: dict[str, str] = {}
        if len(group.members) > 1 or group.index_path is not None:
            whole, copies = joined(dicts, group.listed)
            found = [whole]
        seen = {name for one in found for name in (*(t.fqn for t in one.tensors), *one.ties)}
        seen |= {lost.name for one in found for lost in one.lost if lost.name is not None}
        for name, file in group.listed.items():
            if name not in seen:
                reason = "its file cannot be read" if file in unread else "the index promises it there"
                reason = "its file is missing" if file in group.missing else reason
                self.found.lost.append(Lost(file, name, reason + of_copy(name, copies)))
        self.found.lost += [
            Lost(file, None, "missing; which tensors were in it is not known")
            for file in group.missing
            if file not in group.listed.values()
        ]
        own = {str(member.path) for member in group.members} | {str(group.index_path)}
        source = str(group.index_path or group.members[0].path)
        stem = _stem(group)
        for one in found:
            keys = () if len(found) == 1 else (_STRANGE.sub("_", key)[:_LONGEST] for key in one.path)
            self._add(source, "-".join((stem, *keys)), one, own)

    def _unchecked(self, path: PurePosixPath, places: Iterable[Place]) -> None:
        """Note what is kept of a file that has no checksums, and which of its tensors end in zeros."""
        self.found.unchecked = True
        for name, zeros in zero_ends(self._root / path, places).items():
            self.found.doubtful.append(Lost(str(path), name, f"it ends in {zeros} bytes of zeros"))

    def _read(self, member: Component) -> tuple[SavedDict, ...]:
        path = self._root / member.path
        if member.name.suffix == ".safetensors":
            return (salvage_safetensors(path),)
        return salvage_torch(path, keep_damaged=self._keep_damaged, progress=self._progress)

    def _add(self, source: str, stem: str, found: SavedDict, own: "set[str]") -> None:
        """Plan a file for what is whole; its name is new among those that are there already."""
        self.found.lost += found.lost
        if not found.tensors:
            return
        free = stem
        while any(f"{free}{suffix}" in self._names - own for suffix in (".safetensors", ".bin")):
            free += "-salvaged"
        self._names |= {f"{free}.safetensors", f"{free}.bin"}
        self.found.damaged += found.damaged
        places: dict[PurePosixPath, list[Place]] = {}
        for one in found.tensors:
            if one.fqn in found.unchecked and isinstance(one.layout, Contiguous):
                for path, begin, length in one.layout.pieces:
                    where = PurePosixPath(os.path.relpath(path, self._root))
                    places.setdefault(where, []).append(Place(one.fqn, begin, begin + length))
        for where, runs in places.items():
            self._unchecked(where, runs)
        self.found.parts.append(PartOfModel(source=source, stem=free, found=found))

    def _dcp(self, where: PurePosixPath) -> None:
        """Sort a DCP folder: copied when all of it is whole, else what is whole of its model in one new file."""
        judged = judge(self._root, where, keep_damaged=self._keep_damaged, progress=self._progress)
        self.found.unchecked |= judged.unchecked
        if not judged.reason:
            self._copy_dcp(where, judged)
            if where.parts:
                self.found.copied += self._others_of(where)
        elif judged.found is None:
            self.found.lost.append(Lost(str(where), None, judged.reason))
        else:
            self._add(str(where), where.name or "model", judged.found, set())

    def _copy_dcp(self, where: PurePosixPath, judged: JudgedFolder) -> None:
        self.found.damaged += judged.damaged
        for name in sorted(os.listdir(self._root / where)):
            if belongs(name) and self._is_file(where / name):
                self.found.copy(where / name)

    def _others_of(self, where: PurePosixPath) -> Iterator[PurePosixPath]:
        """Yield what lies in a DCP folder beside its own files, at any depth."""
        names = sorted(name for name in os.listdir(self._root / where) if not belongs(name))
        for name in names:
            if os.path.isdir(self._root / where / name):
                yield from (path for path in self._below(where / name) if self._is_file(path))
            elif self._is_file(where / name):
                yield where / name


def _has_checksums(member: Component) -> bool:
    """Whether every record of a file has a checksum, or it holds nothing whose values could change unseen."""
    if isinstance(member.content, TorchFile):
        container = member.content.container
        return isinstance(container, TorchZip) and all(one.crc or not one.size for one in container.records)
    return not isinstance(member.content, SafetensorsFile)


def _absent(group: ModelFiles) -> list[str]:
    """Return the names that the index lists and no file holds."""
    held = {tensor.fqn for member in group.members for tensor in member.tensors}
    held |= {name for member in group.members for scope in member.scopes for name in scope.names}
    return [name for name in group.listed if name not in held]


def _stem(group: ModelFiles) -> str:
    if group.members and group.members[0].name.shard is None and group.index_path is None:
        return group.members[0].path.stem
    if group.members and group.members[0].name.shard is not None:
        return group.members[0].name.stem
    name = parse_file_name(group.index_path.name) if group.index_path is not None else None
    return name.stem if name is not None else "model"


def _have(member: Component) -> int | None:
    return member.problem.have if member.problem is not None and member.problem.need is not None else None
