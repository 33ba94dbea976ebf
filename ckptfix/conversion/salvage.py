"""Salvage of a damaged checkpoint: everything intact goes into a new folder, with a receipt of the
losses.
"""

import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.checkpoint.dcp import belongs, holds_dcp
from ckptfix.checkpoint.filenames import model_file, parse_file_name
from ckptfix.checkpoint.folder import CheckpointFolder, scan_folder
from ckptfix.checkpoint.manifest import REPORT
from ckptfix.checkpoint.model_files import ModelFiles, group_files
from ckptfix.conversion.proving import prove_copy, prove_model
from ckptfix.conversion.salvage_models import JudgedFolder, Models, absent, judge
from ckptfix.conversion.salvage_sources import Files, PartOfModel, SalvagePlan, Sealed
from ckptfix.conversion.streaming import Source, copy_file, write_file
from ckptfix.conversion.uploading import open_output
from ckptfix.diagnosis.check import check, resume_problem
from ckptfix.diagnosis.completeness import judge_bare
from ckptfix.diagnosis.file_damage import diagnose_deepspeed
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.diagnosis.findings.config_faults import MissingModel
from ckptfix.diagnosis.findings.damaged import FOLDER, MalformedFile, NotATensorFile
from ckptfix.diagnosis.findings.duplicates import EntryGap
from ckptfix.diagnosis.findings.incomplete import IncompleteCheckpoint, LostTag, MissingRank
from ckptfix.diagnosis.output import check_output
from ckptfix.diagnosis.target import Target, ensure_checkpoint, find_target
from ckptfix.errors import OperationError, UnsupportedFormat, UsageError
from ckptfix.reports import Serialized
from ckptfix.storage.atomic import create_file, sync_tree, umask
from ckptfix.storage.files import (
    AnyPath,
    Openable,
    is_dir,
    is_symlink,
    lexists,
    names_in,
    relative,
    stat_of,
    walk,
)
from ckptfix.storage.opened import takes_urls
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import (
    JOURNAL,
    MANIFEST,
    OF_FILES,
    command,
    listed_files,
    refused_files,
    shell_path,
)
from ckptfix.storage.staged import ensure_space, put_in_place, staging_for
from ckptfix.tensors.dcp_tensors import dcp_folders
from ckptfix.tensors.new_files import NewTensor, OutputFile, safetensors_files
from ckptfix.tensors.new_torch_files import torch_files
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.salvaging import Lost
from ckptfix.wording import (
    Brief,
    Line,
    Printable,
    collapse_layers,
    count_of,
    human_size,
    line,
    list_names,
    unchecked_line,
)

_SHOWN = 20


class SavedFile(Serialized, Struct, frozen=True, kw_only=True):
    """A new file. ``source``: where its tensors come from. ``names``: their keys, also ties;
    ``nbytes``: each once.
    """

    json_keys: ClassVar = "path source bytes=nbytes tensors=names"

    path: str
    source: str
    names: tuple[str, ...]
    nbytes: int


class SalvageReceipt(Printable, Serialized, Struct, frozen=True, kw_only=True):
    """The receipt of a salvage. ``saved``: new files. ``copied``: intact files. ``damaged``: kept
    on request.

    ``doubtful``: kept data without a checksum that ends in zeros, like a file whose end was not
    written before a crash, or like an untrained tensor; data of a file with missing or extra bytes;
    tensors of which another shard has other values; and other files that changed since they were
    sealed. ``left_out``: parts of the source that do not belong in a new folder, in words.
    ``not_checked``: in words. ``notes``: the names of the saved files, in words. ``unindexed``:
    folders in the new one whose shards lack the index that loaders need. ``absent``: the files
    among ``lost`` that the source lacks.
    """

    json_keys: ClassVar = (
        "source output saved copied lost doubtful damaged left_out notes next=next_steps "
        "not_checked"
    )

    source: str
    output: str
    saved: tuple[SavedFile, ...]
    copied: tuple[str, ...]
    lost: tuple[Lost, ...]
    doubtful: tuple[Lost, ...]
    damaged: tuple[Lost, ...]
    not_checked: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unindexed: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    @property
    def status(self) -> int:
        """Exit status: 0 when everything was intact, 1 when something is lost or damaged."""
        return int(bool(self.lost or self.damaged))

    @property
    def verdict(self) -> str:
        """The summary when nothing is lost, "" when something is."""
        if self.status:
            return ""
        is_proven = not (self.not_checked or self.doubtful or self.unindexed)
        return "everything was intact" if is_proven else "no losses found"

    @property
    def next_steps(self) -> tuple[str, ...]:
        """The steps before the new folder can be loaded, and what to do about losses."""
        repairs = (
            command("repair", self.output, "" if where == "." else where)
            for where in self.unindexed
        )
        if not self.lost:
            return tuple(repairs)
        load = "load_checkpoint_tolerant(model, FOLDER, policy=LoadPolicy(models='partial'))"
        rest = f", or load the recovered tensors with ckptfix.{load}" if self.saved else ""
        copies = (
            [f"copy {list_names(self.absent)} again into {shell_path(self.output)}"]
            if self.absent
            else []
        )
        return (*repairs, *copies, f"resume from another complete checkpoint of the run{rest}")

    @property
    def tensors(self) -> int:
        """The number of keys in the new files."""
        return sum(len(file.names) for file in self.saved)

    def lines(self) -> Iterator[Line]:
        """Yield the saved files, the losses with their reasons, and what was not checked."""
        yield line(f"salvaged {self.source} to {self.output}:", bold=True)
        for file in self.saved:
            # That is all of the source.
            origin = f", from {file.source}" if file.source != "." else ""
            size = f"{count_of(len(file.names), 'tensor')}, {human_size(file.nbytes)}"
            yield line(f"  {file.path}: {size}{origin}")
        if self.copied:
            yield line(f"  {count_of(len(self.copied), 'file')} copied unchanged")
        yield from _lost_lines("kept although damaged", self.damaged, "yellow")
        yield from _lost_lines("lost", self.lost, "red")
        yield from _lost_lines("kept, but possibly not as saved", self.doubtful, "yellow")
        yield from (line(f"left out: {words}") for words in self.left_out)
        yield from (line(f"note: {words}") for words in self.notes)
        if self.verdict:
            yield line(self.verdict, colour="green")
        yield from map(unchecked_line, self.not_checked)
        yield from (line(f"next: {step}") for step in self.next_steps)


def _lost_lines(what: str, every: tuple[Lost, ...], colour: str) -> Iterator[Line]:
    """Yield the losses; layers of one file with the same reason share a line."""
    if not every:
        return
    groups: dict[tuple[str, str], list[Lost]] = {}
    for one in every:
        groups.setdefault((one.file, one.reason), []).append(one)
    texts = []
    for group in groups.values():
        by_name = {one.name: one for one in group}
        texts += [str(one) for one in group if one.name is None]
        for name in collapse_layers(one.name for one in group if one.name is not None):
            texts.append(str(by_name.get(name, group[0]._replace(name=name, need=None, have=None))))
    yield line(f"{what}: {len(every)}", colour=colour, bold=True)
    yield from (line(f"  {text}") for text in texts[:_SHOWN])
    if len(texts) > _SHOWN:
        yield line(f"  and {len(texts) - _SHOWN} more lines; salvage.json and --json list all")


_VERSION = 1


class PlannedFile(Brief, Struct, frozen=True, kw_only=True):
    """A file to write, and key -> source of each of its tensors."""

    part: PartOfModel
    output: OutputFile
    sources: dict[str, Source]


def plan_file(part: PartOfModel) -> PlannedFile:
    """Return the new file of a state dict: safetensors, or torch where safetensors lacks a dtype.

    Raises OperationError when neither can hold it.
    """
    found, stems = part.found, part.stems
    new = [NewTensor(one.fqn, one.dtype, one.shape, one.nbytes) for one in found.tensors]
    kinds: list[Callable[[], tuple[OutputFile, ...]]] = [
        lambda: safetensors_files(stems.safetensors, new, found.ties, metadata=found.metadata),
        lambda: torch_files(stems.torch, new, found.ties, versions=found.versions),
    ]
    refused = []
    for make in reversed(kinds) if stems.is_torch else kinds:
        try:
            (output,) = make()
        except UnsupportedFormat as error:
            refused.append(str(error))
        else:
            sources = {
                one.fqn: Source(made, one) for made, one in zip(new, found.tensors, strict=True)
            }
            return PlannedFile(part=part, output=output, sources=sources)
    raise OperationError(f"{part.source}: no file format can store it: {'; '.join(refused)}")


def write_salvage(
    found: SalvagePlan,
    files: Sequence[PlannedFile],
    output: Path,
    receipt: SalvageReceipt,
    progress: Progress | None,
) -> None:
    """Write every file and the report, prove them, and move them to ``output``; a failure leaves
    nothing behind.

    Raises OperationError when a written file differs from what was read, or too little space is
    left; OSError.
    """
    copied = sum(stat_of(found.root / path).st_size for path in found.copied)
    ensure_space(output, copied + sum(file.output.size for file in files))
    with staging_for(output) as staging:
        for path in found.copied:
            copy_file(found.root / path, staging.new / path, progress)
            prove_copy(found.root / path, staging.new / path, progress)
        for file in files:
            digests = write_file(
                staging.new / file.output.path,
                file.output,
                file.sources,
                progress=progress,
            )
            os.chmod(staging.new / file.output.path, 0o666 & ~umask())
            (weights,) = open_checkpoint(staging.new / file.output.path).weights
            prove_model(
                f"{output}: {file.output.path}",
                weights,
                sources=file.sources,
                ties=file.part.found.ties,
                digests=digests,
                progress=progress,
            )
        document = json.dumps({"version": _VERSION, **receipt.as_json()}, indent=1) + "\n"
        create_file(staging.new / REPORT, document.encode())
        os.chmod(staging.new, 0o777 & ~umask())
        sync_tree(staging.new)
        put_in_place(staging)


_NO_CHECKSUMS = (
    "values without a checksum (safetensors, legacy torch files, pickles): changed values are not "
    "detected"
)


def plan_salvage(target: Target, *, keep_damaged: bool, progress: Progress | None) -> SalvagePlan:
    """Plan a salvage; reads all bytes that have a checksum, or a digest in the manifest of the
    checkpoint.

    Raises UsageError, OperationError for a numbered checkpoint without weights, OSError.
    """
    folder = scan_folder(target.root, target.only)
    bare = judge_bare(folder, resume_problem)
    has_weights_below = bare is not None and any(
        getattr(finding, "below", ()) for finding in bare.findings
    )
    if bare is not None and not has_weights_below:
        reasons = [
            *(f"{finding}; {finding.advice}" for finding in bare.findings),
            *bare.unfinished,
        ]
        raise OperationError(f"{target.path}: nothing to salvage: {reasons[0]}")
    if not any(dcp_folders(folder)):
        ensure_checkpoint(folder, "salvage", " NEW_FOLDER")
    if target.only is not None and target.only.endswith(".json"):
        raise UsageError(f"{target.path} is an index; name its folder instead: {target.root}")
    found, sealed = SalvagePlan(folder.root), Sealed(target, progress)
    files = Files(found, sealed, keep_damaged, progress)
    models = Models(folder, files)
    models.sort()
    if target.only is None:
        _Folders(folder, files, models).sort()
        known = {one.file for one in found.lost}
        missing = (name for name in sealed.missing() if name not in known)
        found.lost += (Lost(name, None, "listed in the manifest, but missing") for name in missing)
        for lost in _absent(target):
            found.absent.append(lost.file)
            if lost.file not in {one.file for one in found.lost}:
                found.lost.append(lost)
        if (folder.root / JOURNAL).is_dir():
            found.leave_journal(PurePosixPath())
    if sealed.problem:
        found.not_checked.append(f"digests, because the manifest cannot be used: {sealed.problem}")
    if sealed.unequal and not sealed.equal:
        manifest = shell_path(folder.root / MANIFEST)
        found.advice = (
            f"if the manifest belongs to an earlier save: rm {manifest}, and salvage again"
        )
        found.not_checked.append(
            "whether anything is damaged, because nothing matches its digest in the manifest; "
            f"{found.advice}"
        )
    if found.unchecked:
        found.not_checked.append(_NO_CHECKSUMS)
    return found


def _absent(target: Target) -> Iterator[Lost]:
    """Yield the files that a folder lacks, as ``check`` finds by its other files and the
    checkpoints next to it.
    """
    try:
        findings = check(target.root).findings
    except UsageError:  # files of DeepSpeed alone, whose missing ranks are lost already
        return
    for finding in findings:
        names: Sequence[str] = ()
        reason = ""
        if isinstance(finding, EntryGap):
            names, reason = [str(finding.missing)], f"missing, although {finding.path} exists"
        elif (
            isinstance(finding, IncompleteCheckpoint)
            and finding.severity is not Severity.NOTE
            # The tag of DeepSpeed names a folder, and can be written anew.
            and not isinstance(finding, LostTag)
            and not finding.problem
        ):
            names, reason = finding.missing, f"missing: {finding.known_by}"
        elif isinstance(finding, MissingModel):
            wanted = finding.wanted.partition(" ")[0] or str(model_file(".safetensors"))
            names = [finding.component or str(finding.path.parent / wanted)]
            reason = str(finding)
        for name in names:
            if not lexists(target.root / name):
                yield Lost(name, None, reason)


class _Folders:
    """Sorting of the files and folders that are not components of the checkpoint."""

    def __init__(self, folder: CheckpointFolder, files: Files, models: Models) -> None:
        self._folder = folder
        self._root = folder.root
        self._files = files
        self._models = models
        self.found = files.found

    def sort(self) -> None:
        """Sort other files, DCP folders and other folders."""
        inside = {where: index for index, where in dcp_folders(self._folder)}
        for where in sorted(inside):
            self._dcp(where, inside[where])
        others = [
            path
            for path in self._folder.strays
            if PurePosixPath(".") not in inside or not belongs(path.name)
        ]
        for path in self._folder.subfolders:
            if path in inside:
                continue
            name = parse_file_name(path.name)
            if name is not None and name.is_state_file:
                self.found.lost.append(Lost(str(path), None, f"not a tensor file: {FOLDER}"))
            others += self._below(path)
        self._deepspeed()
        taken = [path for path in others if self._is_file(path)]
        self.found.copied += taken
        sealed = self._files.sealed.files(taken)
        self.found.doubtful += (Lost(str(path), None, why) for path, why in sealed.items() if why)
        if len(taken) > len(sealed):
            many = count_of(len(taken) - len(sealed), "other file")
            self.found.not_checked.append(f"{many}, copied unchecked")

    def _deepspeed(self) -> None:
        """Note the missing parts of ranks of a DeepSpeed checkpoint whose files are intact, and the
        folders under the names of files.
        """
        lost = {one.file for one in self.found.lost}
        for state in diagnose_deepspeed(self._folder):
            for finding in state.findings:
                match finding:
                    case MissingRank():
                        reason = f"missing: {finding.detail}"
                    case MalformedFile():
                        reason = f"malformed: {finding.detail}"
                    case NotATensorFile(content=content) if content == FOLDER:
                        reason = f"not a tensor file: {FOLDER}"
                    case _:
                        continue
                if str(finding.path) not in lost:
                    self.found.lost.append(Lost(str(finding.path), None, reason))

    def _is_file(self, path: PurePosixPath) -> bool:
        if str(path) == REPORT:
            self.found.left_out.append(f"{REPORT} of the source; the new folder gets its own")
            return False
        if path.name in OF_FILES:
            self.found.left_out.append(
                f"{path}: describes the old files; to write one for the new files: ckptfix seal"
            )
            return False
        try:
            if stat.S_ISREG(stat_of(self._root / path).st_mode):
                return True
            reason = "it is not a regular file"
        except OSError as error:
            reason = f"it cannot be read: {error.strerror or error}"
        self.found.lost.append(Lost(str(path), None, reason))
        return False

    def _below(self, where: PurePosixPath) -> Iterator[PurePosixPath]:
        """Sort the files below a folder as complete files, and yield those of no known kind;
        follows no link.
        """
        if self._is_link(where):
            return
        for root, folders, _ in walk(self._root / where):
            here = relative(root, self._root)
            if JOURNAL in folders:
                folders.remove(JOURNAL)
                self.found.leave_journal(here)
            folders[:] = sorted(name for name in folders if not self._is_link(here / name))
            scanned = scan_folder(root)
            before = len(self.found.lost)
            groups = group_files(scanned)
            for group in groups:
                self._kept(group, here)
            is_dcp = holds_dcp(root)
            has_part = self._dcp_kept(here) if is_dcp else False
            if has_part or (len(self.found.lost) > before and self._models.has_part(groups, here)):
                advice = f"to recover what is intact: {command('salvage', root)} NEW_FOLDER"
                self.found.lost[before:] = [
                    one._replace(reason=f"{one.reason}; {advice}")
                    for one in self.found.lost[before:]
                ]
            yield from (
                here / path for path in scanned.strays if not (is_dcp and belongs(path.name))
            )

    def _is_link(self, path: PurePosixPath) -> bool:
        """Return whether a folder is a link, which counts as lost."""
        if not is_symlink(self._root / path):
            return False
        self.found.lost.append(
            Lost(
                str(path),
                None,
                "it is a link to a folder, and salvage does not follow links to folders",
            )
        )
        return True

    def _kept(self, group: ModelFiles, here: PurePosixPath) -> None:
        """Copy the intact files of a group in another folder, and note the others."""
        read = group.read_index if group.replaced is None else None
        is_of_files = read is not None and not read.leads_back and not group.gone
        index = group.index if is_of_files else None
        for member in (*group.members, *([index] if index is not None else ())):
            self._files.state(replace(member, path=here / member.path))
        if group.replaced is not None:
            return
        if group.index_path is not None and index is None and group.is_whole and group.rivals == 1:
            self.found.unindexed.append(here / group.index_path)
        self.found.lost += [
            Lost(str(here / file), None, "missing; it held a part of the model")
            for file in group.missing
        ]
        self.found.lost += [
            Lost(
                str(here / group.listed[name]),
                name,
                "the index lists it in this file, but the file lacks it",
            )
            for name in absent(group)
            if group.listed[name] not in group.missing and group.is_whole
        ]
        words = (
            "two files store it with different values, and loaders use the last one; copied "
            "unchanged"
        )
        members = [replace(member, path=here / member.path) for member in group.members]
        self.found.lost += [
            Lost(str(here / group.listed.get(key, group.label)), key, words)
            for key in (self._models.disputed(members) if group.is_whole else ())
        ]

    def _dcp_kept(self, where: PurePosixPath) -> bool:
        """Copy an intact DCP folder in another folder; return whether a part of its model could be
        saved.
        """
        judged = self._judged(where)
        if judged.reason:
            self.found.lost.append(Lost(str(where), None, judged.reason))
        else:
            self._copy_dcp(where, judged)
        return judged.found is not None and bool(judged.found.tensors)

    def _dcp(self, where: PurePosixPath, position: int) -> None:
        """Sort a DCP folder: copy it when it is intact, else put the intact tensors of its model
        into a new file.
        """
        judged = self._judged(where)
        if where.parts:
            self.found.copied += self._others_of(where)
        if not judged.reason:
            self._copy_dcp(where, judged)
        elif judged.found is None:
            self.found.lost.append(Lost(str(where), None, judged.reason))
            self.found.advice = self.found.advice or judged.advice
        else:
            stem = where.name or "model"
            self._models.add(
                str(where), stem, judged.found, set(), position=position, is_folder=True
            )
            if judged.unnamed:
                files = count_of(len(judged.unnamed), "file")
                self.found.left_out.append(
                    f"{files} in {where} that .metadata does not list: {list_names(judged.unnamed)}"
                )

    def _judged(self, where: PurePosixPath) -> JudgedFolder:
        files = self._files
        judged = judge(
            self._root,
            where,
            files.sealed,
            keep_damaged=files.keep_damaged,
            progress=files.progress,
        )
        self.found.unchecked |= judged.unchecked
        return judged

    def _copy_dcp(self, where: PurePosixPath, judged: JudgedFolder) -> None:
        self.found.damaged += judged.damaged
        self.found.doubtful += judged.doubtful
        for name in sorted(names_in(self._root / where)):
            if belongs(name) and self._is_file(where / name):
                self.found.copy(where / name)

    def _others_of(self, where: PurePosixPath) -> Iterator[PurePosixPath]:
        """Yield the files in a DCP folder that are not its own, at any depth."""
        names = sorted(name for name in names_in(self._root / where) if not belongs(name))
        for name in names:
            if name == JOURNAL:
                self.found.leave_journal(where)
            elif is_dir(self._root / where / name):
                yield from (path for path in self._below(where / name) if self._is_file(path))
            elif self._is_file(where / name):
                yield where / name


@takes_urls("source")
def salvage(
    source: Openable,
    output: str | os.PathLike[str],
    *,
    keep_damaged: bool = False,
    progress: Progress | None = None,
) -> SalvageReceipt:
    """Write the intact parts of a damaged file or folder into the new folder ``output``, with
    ``salvage.json``.

    A tensor is intact when all its bytes are in the file where its header says, and match the
    digest in the manifest of the source, if it has one; no byte is guessed. Intact files are copied
    unchanged. ``keep_damaged``: also keep data of full length that does not match its checksum or
    digest. ``progress`` gets bytes read and written. The new folder is complete and proven, or
    absent.

    Raises UsageError for invalid paths, OperationError when nothing can be saved or too little
    space is left, OSError.
    """
    with open_output(output) as new:
        target = find_target(source)
        check_output(target, new.path)
        names = listed_files(target.root) if target.only is None else (target.only,)
        for why in refused_files(target.root / name for name in names):
            raise OperationError(
                f"{why}; nothing was written, because a file that only lacks read permission is "
                "not lost"
            )
        found = plan_salvage(target, keep_damaged=keep_damaged, progress=progress)
        if not found.parts and not found.components:
            raise OperationError(_nothing(target.path, found))
        files = [plan_file(part) for part in found.parts]
        receipt = SalvageReceipt(
            source=str(source),
            output=new.name,
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
            absent=tuple(dict.fromkeys(found.absent)),
            doubtful=tuple(found.doubtful),
            damaged=tuple(found.damaged),
            left_out=tuple(found.left_out),
            notes=tuple(found.notes),
            unindexed=tuple(dict.fromkeys(str(index.parent) for index in found.unindexed)),
            not_checked=tuple(found.not_checked),
        )
        write_salvage(found, files, new.path, receipt, progress)
        return receipt


def _nothing(path: AnyPath, found: SalvagePlan) -> str:
    """Return the error that nothing can be saved, with the reasons."""
    reasons = [str(lost) for lost in found.lost[:3]]
    more = f"; and {len(found.lost) - 3} more" if len(found.lost) > 3 else ""
    return (
        f"{path}: nothing can be salvaged: {'; '.join(reasons) or 'it has no tensors'}{more}; "
        "next: " + (found.advice or command("check", path))
    )
