"""The verb ``salvage``: everything intact in a damaged checkpoint goes into a new folder, with a list of losses."""

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.dcp import belongs, holds_dcp
from ckptfix.checkpoint.folder import CheckpointFolder, scan_folder
from ckptfix.checkpoint.groups import ModelFiles, group_files
from ckptfix.checkpoint.manifest import REPORT
from ckptfix.checkpoint.pairing import Progress
from ckptfix.conversion.salvage_models import JudgedFolder, Models, absent, judge
from ckptfix.conversion.salvage_receipt import SalvageReceipt, SavedFile, plan_file, write_salvage
from ckptfix.conversion.salvage_sources import Files, SalvagePlan, Sealed
from ckptfix.diagnosis.file_damage import diagnose_deepspeed
from ckptfix.diagnosis.findings.damaged import MalformedFile
from ckptfix.diagnosis.findings.incomplete import MissingRank
from ckptfix.diagnosis.output import check_output
from ckptfix.diagnosis.target import Target, ensure_checkpoint, find_target
from ckptfix.errors import OperationError, UsageError
from ckptfix.storage.paths import JOURNAL, MANIFEST, command, listed_files, refused_files, shell_path
from ckptfix.tensors.dcp_tensors import dcp_folders
from ckptfix.tensors.salvaging import Lost
from ckptfix.wording import count_of, list_names

_NO_CHECKSUMS = (
    "values without a checksum (safetensors, legacy torch files, pickles): flipped bits do not show"
)


def plan_salvage(target: Target, *, keep_damaged: bool, progress: Progress | None) -> SalvagePlan:
    """Look at every file of a checkpoint; reads what has a checksum, or a digest in the manifest beside it.

    Raises UsageError, OSError.
    """
    folder = scan_folder(target.root, target.only)
    if not any(dcp_folders(folder)):
        ensure_checkpoint(folder)
    if target.only is not None and target.only.endswith(".json"):
        raise UsageError(f"{target.path} is an index; give the folder {target.root}")
    found, sealed = SalvagePlan(folder.root), Sealed(target, progress)
    files = Files(found, sealed, keep_damaged, progress)
    models = Models(folder, files)
    models.sort()
    if target.only is None:
        _Folders(folder, files, models).sort()
        known = {one.file for one in found.lost}
        missing = (name for name in sealed.missing() if name not in known)
        found.lost += (Lost(name, None, "the manifest lists it, and it is not there") for name in missing)
        if (folder.root / JOURNAL).is_dir():
            found.leave_journal(PurePosixPath())
    if sealed.problem:
        found.not_checked.append(f"digests, as the manifest cannot be used: {sealed.problem}")
    if sealed.unequal and not sealed.equal:
        manifest = shell_path(folder.root / MANIFEST)
        found.advice = f"if the manifest is of an earlier save: rm {manifest}, and salvage again"
        found.not_checked.append(
            f"whether anything is damaged, as nothing is what was sealed; {found.advice}"
        )
    if found.unchecked:
        found.not_checked.append(_NO_CHECKSUMS)
    return found


class _Folders:
    """Sorting of all in a folder that is not one of its components."""

    def __init__(self, folder: CheckpointFolder, files: Files, models: Models) -> None:
        self._folder = folder
        self._root = folder.root
        self._files = files
        self._models = models
        self.found = files.found

    def sort(self) -> None:
        """Sort what is no component: other files, DCP folders, other folders."""
        inside = {where: index for index, where in dcp_folders(self._folder)}
        for where in sorted(inside):
            self._dcp(where, inside[where])
        others = [
            path for path in self._folder.strays if PurePosixPath(".") not in inside or not belongs(path.name)
        ]
        for path in self._folder.subfolders:
            if path in inside:
                continue
            others += self._below(path)
        self._deepspeed()
        taken = [path for path in others if self._is_file(path)]
        self.found.copied += taken
        sealed = self._files.sealed.files(taken)
        self.found.doubtful += (Lost(str(path), None, why) for path, why in sealed.items() if why)
        if len(taken) > len(sealed):
            many = count_of(len(taken) - len(sealed), "other file")
            self.found.not_checked.append(f"{many}, copied without a look")

    def _deepspeed(self) -> None:
        """Note the parts of ranks that the intact files of a DeepSpeed checkpoint lack."""
        lost = {one.file for one in self.found.lost}
        for state in diagnose_deepspeed(self._folder, data=False, progress=None):
            for one in state.findings:
                if isinstance(one, MissingRank | MalformedFile) and str(one.path) not in lost:
                    kind = "missing" if isinstance(one, MissingRank) else "malformed"
                    self.found.lost.append(Lost(str(one.path), None, f"{kind}: {one.detail}"))

    def _is_file(self, path: PurePosixPath) -> bool:
        if str(path) == REPORT:
            self.found.left_out.append(f"{REPORT} of the source, for the new one")
            return False
        try:
            if stat.S_ISREG(os.stat(self._root / path).st_mode):
                return True
            reason = "it is not a regular file"
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
            if JOURNAL in folders:
                folders.remove(JOURNAL)
                self.found.leave_journal(here)
            folders[:] = sorted(name for name in folders if not self._is_link(here / name))
            scanned = scan_folder(Path(root))
            before = len(self.found.lost)
            groups = group_files(scanned)
            for group in groups:
                self._kept(group, here)
            is_dcp = holds_dcp(Path(root))
            has_part = self._dcp_kept(here) if is_dcp else False
            if has_part or (len(self.found.lost) > before and self._models.has_part(groups, here)):
                advice = f"to recover what is intact: {command('salvage', Path(root))} NEW_FOLDER"
                self.found.lost[before:] = [
                    one._replace(reason=f"{one.reason}; {advice}") for one in self.found.lost[before:]
                ]
            yield from (here / path for path in scanned.strays if not (is_dcp and belongs(path.name)))

    def _is_link(self, path: PurePosixPath) -> bool:
        """Return whether a folder is a link, which counts as lost."""
        if not os.path.islink(self._root / path):
            return False
        self.found.lost.append(Lost(str(path), None, "it is a link to a folder, which is not followed"))
        return True

    def _kept(self, group: ModelFiles, here: PurePosixPath) -> None:
        """Copy the intact files of a group in another folder, and note the others."""
        index = group.index if group.index is not None and group.index.problem is None else None
        for member in (*group.members, *([index] if index is not None else ())):
            self._files.state(replace(member, path=here / member.path))
        if group.index_path is not None and index is None and group.is_whole and group.rivals == 1:
            self.found.unindexed.append(here / group.index_path)
        self.found.lost += [
            Lost(str(here / file), None, "missing; a part of the model was in it") for file in group.missing
        ]
        self.found.lost += [
            Lost(str(here / group.listed[name]), name, "the index promises it there")
            for name in absent(group)
            if group.listed[name] not in group.missing and group.is_whole
        ]

    def _dcp_kept(self, where: PurePosixPath) -> bool:
        """Copy a DCP folder in another folder when it is intact; return whether a part of its model could be saved."""
        judged = self._judged(where)
        if judged.reason:
            self.found.lost.append(Lost(str(where), None, judged.reason))
        else:
            self._copy_dcp(where, judged)
        return judged.found is not None and bool(judged.found.tensors)

    def _dcp(self, where: PurePosixPath, position: int) -> None:
        """Sort a DCP folder: copied when it is intact, else the intact tensors of its model go into one new file."""
        judged = self._judged(where)
        if where.parts:
            self.found.copied += self._others_of(where)
        if not judged.reason:
            self._copy_dcp(where, judged)
        elif judged.found is None:
            self.found.lost.append(Lost(str(where), None, judged.reason))
        else:
            stem = where.name or "model"
            self._models.add(str(where), stem, judged.found, set(), position=position, is_folder=True)
            if judged.unnamed:
                files = count_of(len(judged.unnamed), "file")
                self.found.left_out.append(
                    f"{files} in {where} that .metadata does not name: {list_names(judged.unnamed)}"
                )

    def _judged(self, where: PurePosixPath) -> JudgedFolder:
        files = self._files
        judged = judge(
            self._root, where, files.sealed, keep_damaged=files.keep_damaged, progress=files.progress
        )
        self.found.unchecked |= judged.unchecked
        return judged

    def _copy_dcp(self, where: PurePosixPath, judged: JudgedFolder) -> None:
        self.found.damaged += judged.damaged
        self.found.doubtful += judged.doubtful
        for name in sorted(os.listdir(self._root / where)):
            if belongs(name) and self._is_file(where / name):
                self.found.copy(where / name)

    def _others_of(self, where: PurePosixPath) -> Iterator[PurePosixPath]:
        """Yield the files in a DCP folder that are not its own, at any depth."""
        names = sorted(name for name in os.listdir(self._root / where) if not belongs(name))
        for name in names:
            if name == JOURNAL:
                self.found.leave_journal(where)
            elif os.path.isdir(self._root / where / name):
                yield from (path for path in self._below(where / name) if self._is_file(path))
            elif self._is_file(where / name):
                yield where / name


def salvage(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    keep_damaged: bool = False,
    progress: Progress | None = None,
) -> SalvageReceipt:
    """Write what is intact in a damaged file or folder into the new folder ``output``, with ``salvage.json``.

    A tensor is intact when all its bytes are in the file where its header says, and have the digest that the manifest
    of the source has for them, if it has one; none is guessed. Intact files are copied unchanged.
    ``keep_damaged``: keep what is all there but does not have its checksum or digest, too. ``progress`` gets bytes read
    and written. The new folder is complete and proven, or absent.

    Raises UsageError for paths that make no sense, OperationError when nothing can be saved or too little space is
    left, OSError.
    """
    target, new = find_target(source), Path(output)
    check_output(target, new)
    names = listed_files(target.root) if target.only is None else (target.only,)
    for why in refused_files(target.root / name for name in names):
        raise OperationError(f"{why}; a file that may not be read is not lost; nothing was written")
    found = plan_salvage(target, keep_damaged=keep_damaged, progress=progress)
    if not found.parts and not found.components:
        raise OperationError(_nothing(target.path, found))
    files = [plan_file(part) for part in found.parts]
    receipt = SalvageReceipt(
        source=os.fspath(source),
        output=os.fspath(output),
        saved=tuple(
            SavedFile(
                path=str(file.output.path),
                source=part.source,
                names=(*(tensor.fqn for tensor in part.found.tensors), *part.found.ties),
                nbytes=sum(tensor.nbytes for tensor in part.found.tensors),
            )
            for part, file in zip(found.parts, files, strict=True)
        ),
        copied=tuple(map(str, found.copied)),
        lost=tuple(found.lost),
        doubtful=tuple(found.doubtful),
        damaged=tuple(found.damaged),
        left_out=tuple(found.left_out),
        notes=tuple(found.notes),
        unindexed=tuple(dict.fromkeys(str(index.parent) for index in found.unindexed)),
        not_checked=tuple(found.not_checked),
    )
    write_salvage(found, files, new, receipt, progress)
    return receipt


def _nothing(path: Path, found: SalvagePlan) -> str:
    """Say why nothing can be saved."""
    reasons = [str(lost) for lost in found.lost[:3]]
    more = f"; and {len(found.lost) - 3} more" if len(found.lost) > 3 else ""
    return f"{path}: nothing can be saved: {'; '.join(reasons) or 'it holds no tensor'}{more}; next: " + (
        found.advice or command("check", path)
    )
