"""Intact tensors of damaged models: shards, files and DCP folders."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.checkpoint.dcp import belongs
from ckptfix.checkpoint.entries import model_position
from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.manifest import REPORT
from ckptfix.checkpoint.model_files import ModelFiles, group_files
from ckptfix.checkpoint.rank_parts import parts_problem
from ckptfix.checkpoint.roles import Role
from ckptfix.conversion.salvage_sources import Files, PartOfModel, Sealed, TensorLocation, stems_of
from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.dcp_items import dcp_problems
from ckptfix.formats.dcp_metadata import METADATA_NAME, DcpMetadata, model_names
from ckptfix.formats.dcp_stream import StoredItem
from ckptfix.formats.safetensors_file import METADATA_KEY
from ckptfix.formats.torch_zip import crc_mismatches, read_zip
from ckptfix.storage.files import AnyPath, names_in, relative
from ckptfix.storage.parallel import Progress
from ckptfix.storage.reading import open_reader
from ckptfix.tensors.dcp_tensors import dcp_weights, intact_tensors, read_metadata_of
from ckptfix.tensors.hashing import TensorJob, hash_all
from ckptfix.tensors.salvaging import Lost, SavedDict, salvage_safetensors, salvage_torch
from ckptfix.tensors.stored import Contiguous, StoredTensor
from ckptfix.wording import Brief, count_of


def merge_shards(
    dicts: Sequence[tuple[str, SavedDict]], listed: Mapping[str, str]
) -> tuple[SavedDict, dict[str, str]]:
    """Return the state dict of shards, which come with their files' names, and key -> file of each
    copy.

    ``listed``: key -> its file by the index. A copy is in another file than the listed one, and is
    not saved. An unlisted key is saved when only one file holds it.
    """
    twice = _in_two(dicts, listed)
    tensors: dict[str, StoredTensor] = {}
    ties: dict[str, str] = {}
    lost: list[Lost] = []
    copies: dict[str, str] = {}
    for file, one in dicts:
        held = {tensor.fqn: tensor for tensor in one.tensors}
        first: dict[str, str] = {}  # a tensor of this file -> its first key that is read from here
        for name, kept in {**{name: name for name in held}, **one.ties}.items():
            if listed.get(name, file) != file:
                copies.setdefault(name, file)
            elif name in twice:
                lost.append(
                    Lost(
                        file,
                        name,
                        f"{' and '.join(twice[name])} hold it, and no index shows which is used",
                    )
                )
            elif first.setdefault(kept, name) == name:
                tensors[name] = held[kept]._replace(fqn=name)
            else:
                ties[name] = first[kept]
        lost += (
            gone for gone in one.lost if gone.name is None or listed.get(gone.name, file) == file
        )
    metadata = {key: text for _, one in dicts for key, text in one.metadata.items()}
    for file, one in dicts:
        for key in [key for key, text in one.metadata.items() if metadata.get(key, text) != text]:
            del metadata[key]
            reason = f"{key!r} differs between the files of the model"
            lost.append(Lost(file, METADATA_KEY, reason))
    whole = SavedDict(
        tensors=tuple(tensors.values()),
        ties=ties,
        versions={name: version for _, one in dicts for name, version in one.versions.items()},
        lost=tuple(_with_copy(gone, copies) for gone in lost),
        unchecked=frozenset(name for _, one in dicts for name in one.unchecked),
        metadata=metadata,
        damaged=tuple(
            damaged
            for file, one in dicts
            for damaged in one.damaged
            if listed.get(damaged.name or "", file) == file
        ),
        doubtful=tuple(
            doubt
            for file, one in dicts
            for doubt in one.doubtful
            if listed.get(doubt.name or "", file) == file
        ),
    )
    return whole, copies


def of_copy(name: str | None, copies: Mapping[str, str]) -> str:
    """Return where another copy of a lost tensor is, in words; "" when there is none."""
    file = copies.get(name or "")
    return f"; {file} holds another copy, possibly from another save" if file is not None else ""


def _in_two(
    dicts: Sequence[tuple[str, SavedDict]], listed: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return unlisted key -> the several files that hold it."""
    holders: dict[str, list[str]] = {}
    for file, one in dicts:
        gone = (lost.name for lost in one.lost if lost.name is not None)
        for name in (*(tensor.fqn for tensor in one.tensors), *one.ties, *gone):
            if name not in listed:
                holders.setdefault(name, []).append(file)
    return {name: files for name, files in holders.items() if len(files) > 1}


def _with_copy(gone: Lost, copies: Mapping[str, str]) -> Lost:
    return gone._replace(reason=gone.reason + of_copy(gone.name, copies))


_STRANGE = re.compile(r"[^A-Za-z0-9._-]")
_LONGEST = 64  # characters of a key in the name of a file


class _RecoveredModel(Struct, frozen=True, kw_only=True):
    """Tensors recovered from one model's files.

    ``dicts``: each with its label in a manifest. ``unread``: files that cannot be read. ``copies``:
    key -> another file that holds it, besides the listed one.
    """

    dicts: tuple[tuple[str, SavedDict], ...]
    unread: Mapping[str, Lost]
    copies: Mapping[str, str]


class Models:
    """The models of a folder: intact ones are copied, intact tensors of the others go into new
    files.
    """

    def __init__(self, folder: CheckpointFolder, files: Files) -> None:
        """Share the notes of ``files``."""
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
        if group.is_in_parts:
            self._in_parts(group)
            return
        if group.replaced is not None:
            # No part of the model is lost: a file of a later save holds it. The index without its
            # shards is not copied.
            for member in group.members:
                self._files.state(member)
            return
        wrong = {
            member.path: problem
            for member in group.members
            if (problem := self._files.problem(member)) is not None
        }
        disputed = () if wrong else self.disputed(group.members)
        if wrong or group.missing or absent(group) or disputed:
            taken = self._judged(self._taken(group, wrong))
            self._part(group, taken)
            kept = {
                key
                for _, saved in taken.dicts
                for key in (*(tensor.fqn for tensor in saved.tensors), *saved.ties)
            }
            self._found.doubtful += [
                Lost(
                    group.listed[key],
                    key,
                    f"{taken.copies[key]} holds it with different values, which are left out "
                    "because the index points to this file",
                )
                for key in disputed
                if key in kept and key in taken.copies
            ]
        elif self._is_sealed(group):
            self._sealed_group(group)
        else:
            self._copy(group, proven=False)

    def disputed(self, members: Sequence[Component]) -> Sequence[str]:
        """Return the keys that several files of a model hold with different values.

        Loaders take the last file by name, whatever the index says, so a copy of all files would
        load what the index does not name. Files of ranks hold parts of one tensor under one key.
        """
        count = Counter(key for member in members for key in {info.fqn for info in member.tensors})
        if max(count.values(), default=0) < 2 or members[0].name.is_of_parts:
            return ()
        copies: list[tuple[str, StoredTensor]] = []
        for member in members:
            with suppress(FormatError, OSError):
                for saved in self._read(member):
                    held = {tensor.fqn: tensor for tensor in saved.tensors}
                    held |= {key: held[kept] for key, kept in saved.ties.items()}
                    copies += [(key, tensor) for key, tensor in held.items() if count[key] > 1]
        jobs = [TensorJob(tensor) for _, tensor in copies]
        digests: dict[str, set[str]] = {}
        hashes = hash_all(jobs, progress=self._files.progress)
        for (key, _), hashed in zip(copies, hashes, strict=True):
            digests.setdefault(key, set()).add(hashed.digest)
        return [key for key, each in digests.items() if len(each) > 1]

    def _in_parts(self, group: ModelFiles) -> None:
        """Sort the files of the ranks one by one: which tensors are complete is not certain without
        all of them.
        """
        for member in group.members:
            if why := parts_problem(member):
                self._found.lost.append(Lost(str(member.path), None, why))
            else:
                self._files.state(member)
        for tensor in group.parted_tensors if self._only is None else ():
            if tensor.problem:
                self._found.lost.append(
                    Lost(str(tensor.parts[0].file.path), tensor.fqn, tensor.problem)
                )

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
        """Plan a file for the intact tensors, under a name that no file but those in ``own`` has.

        ``position``: that of the model, None for files that ``load_state`` never reads. If another
        file holds the intact model, the new one gets a name that no loader looks for.
        """
        self._found.lost += found.lost
        if not found.tensors:
            return
        if (whole := self._whole_rival(position, own)) is not None:
            stem, is_folder = f"{stem}-salvaged", False
        stems = stems_of(stem, self._names - own, is_folder=is_folder)
        self._names |= {f"{stems.safetensors}.safetensors", f"{stems.torch}.bin"}
        self._found.damaged += found.damaged
        self._found.doubtful += (one for one in found.doubtful if one.name in found.unchecked)
        places: dict[PurePosixPath, list[TensorLocation]] = {}
        for one in found.tensors:
            if one.fqn in found.unchecked and isinstance(one.layout, Contiguous):
                for path, begin, length in one.layout.pieces:
                    where = relative(path, self._found.root)
                    places.setdefault(where, []).append(
                        TensorLocation(one.fqn, begin, begin + length)
                    )
        for where, runs in places.items():
            self._files.unchecked(where, runs)
        self._found.parts.append(PartOfModel(source=source, stems=stems, found=found))
        if whole is not None:
            self._found.notes.append(
                f"{source}: the salvaged part of its model gets a name that no loader looks for, "
                f"because {whole} has the complete model"
            )

    def _whole_rival(self, position: int | None, own: "set[str]") -> str | None:
        """Return the file with an intact model at this position that is not in ``own``; None
        without one.
        """
        if position is None:
            return None
        for group in self._groups:
            paths = [member.path for member in group.members]
            if model_position(group) != position or own.intersection(map(str, paths)):
                continue
            is_whole = group.is_whole and not absent(group)
            is_whole = is_whole and all(
                self._files.problem(member) is None for member in group.members
            )
            if is_whole and not any(self._sealed.files(paths).values()):
                return str(group.index_path or paths[0])
        return None

    def has_part(self, groups: Sequence[ModelFiles], here: PurePosixPath) -> bool:
        """Return whether any tensor of damaged models in the sub-folder ``here`` could be saved."""
        for group in groups:
            if any(member.role not in (Role.MODEL, Role.UNKNOWN) for member in group.members):
                continue
            members = [replace(member, path=here / member.path) for member in group.members]
            is_sound = all(self._files.problem(member) is None for member in members)
            if is_sound and not group.missing and not self.disputed(members):
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
        """Copy the index of shards, or note that they have none."""
        # An index that leads to this folder by other folders would make loaders of the copy read
        # the files here.
        if (
            group.read_index is not None
            and not group.read_index.leads_back
            and not group.gone
            and group.index_path is not None
        ):
            self._found.copy(group.index_path)
        elif group.index_path is not None and group.rivals == 1:
            self._found.unindexed.append(group.index_path)

    def _is_sealed(self, group: ModelFiles) -> bool:
        paths = [member.path for member in group.members]
        return bool(self._sealed.is_sealed(paths) or self._sealed.models(*_labels(group)))

    def _sealed_group(self, group: ModelFiles) -> None:
        """Sort sealed files of intact structure, by the digests of files, then by those of
        tensors.
        """
        of_files = self._sealed.files(member.path for member in group.members)
        differing = {path: why for path, why in of_files.items() if why}
        if len(of_files) == len(group.members) and not differing:
            self._copy(group, proven=True)
            return
        if not self._sealed.models(*_labels(group)):
            for member in group.members:
                if member.path in differing:
                    self._files.damaged(
                        member, Lost(str(member.path), None, differing[member.path])
                    )
                else:
                    self._files.whole(member, proven=member.path in of_files)
            self._copy_index(group)
            return
        taken = self._taken(group, {})
        judged = self._judged(taken)
        pairs = list(zip(taken.dicts, judged.dicts, strict=True))
        if taken.unread or any(
            len(one.tensors) > len(other.tensors) for (_, one), (_, other) in pairs
        ):
            self._part(group, judged)
            return
        self._copy(group, proven=not any(one.unchecked for _, one in judged.dicts))
        for _, one in judged.dicts:
            self._found.damaged += one.damaged
        if not any(one.damaged for _, one in judged.dicts):
            words = "but every sealed tensor of its model matches its digest"
            self._found.doubtful += [
                Lost(str(path), None, f"{why}, {words}") for path, why in differing.items()
            ]
        self._found.lost += self._unfound(group, judged)

    def _taken(self, group: ModelFiles, wrong: Mapping[PurePosixPath, Lost]) -> _RecoveredModel:
        """Recover the intact tensors from the files of a model."""
        dicts: list[tuple[str, SavedDict]] = []
        unread: dict[str, Lost] = {}
        for member in group.members:
            try:
                # A file with exactly the keys of a missing shard is that shard under another name.
                file = group.renamed.get(member.path, str(member.path))
                dicts += [(file, one) for one in self._read(member)]
            except (FormatError, OSError) as error:
                problem = wrong.get(member.path)
                reason = problem.reason if problem is not None else str(error)
                unread[str(member.path)] = Lost(str(member.path), None, reason)
        if len(group.members) > 1 or group.index_path is not None:
            whole, copies = merge_shards(dicts, group.listed)
            known = self._sealed.models(*_labels(group))
            return _RecoveredModel(
                dicts=((next(iter(known), ""), whole),), unread=unread, copies=copies
            )
        named = tuple(
            (file + "".join(f"[{step!r}]" for step in one.path), one) for file, one in dicts
        )
        return _RecoveredModel(dicts=named, unread=unread, copies={})

    def _judged(self, taken: _RecoveredModel) -> _RecoveredModel:
        """Return the recovered tensors; those that differ from their digest are left out, or noted
        as damaged.
        """
        keep = self._files.keep_damaged
        judged = tuple(
            (label, self._sealed.judged(one, self._sealed.digests(label), keep_damaged=keep))
            for label, one in taken.dicts
        )
        return _RecoveredModel(dicts=judged, unread=taken.unread, copies=taken.copies)

    def _part(self, group: ModelFiles, taken: _RecoveredModel) -> None:
        """Plan new files for the recovered tensors of a model, and note the losses."""
        self._found.lost += taken.unread.values()
        found = [one for _, one in taken.dicts]
        seen = _seen(found)
        for name, file in group.listed.items():
            if name not in seen:
                reason = (
                    "its file cannot be read"
                    if file in taken.unread
                    else "the index lists it in this file, but the file lacks it"
                )
                reason = "its file is missing" if file in group.missing else reason
                self._found.lost.append(Lost(file, name, reason + of_copy(name, taken.copies)))
        self._found.lost += [
            Lost(file, None, "missing; it is not known which tensors it held")
            for file in group.missing
            if file not in group.listed.values()
        ]
        self._found.lost += self._unfound(group, taken)
        own = {str(member.path) for member in group.members} | {str(group.index_path)}
        source = str(group.index_path or group.members[0].path)
        stem = _stem(group)
        for one in found:
            keys = (
                () if len(found) == 1 else (_STRANGE.sub("_", key)[:_LONGEST] for key in one.path)
            )
            position = model_position(group)
            self.add(source, "-".join((stem, *keys)), one, own, position=position, is_folder=False)

    def _unfound(self, group: ModelFiles, taken: _RecoveredModel) -> list[Lost]:
        """Return the keys that the manifest lists and no file holds; none for a shard that is
        salvaged alone.
        """
        if self._only is not None and group.index_path is not None:
            return []
        dicts = dict(taken.dicts)
        reason = (
            "its file cannot be read" if taken.unread else "listed in the manifest, but in no file"
        )
        return [
            Lost(label, name, reason)
            for label in self._sealed.models(*_labels(group))
            for name in sorted(self._sealed.expected(label))
            if name not in group.listed
            and name not in _seen([dicts[label]] if label in dicts else [])
        ]

    def _read(self, member: Component) -> tuple[SavedDict, ...]:
        path = self._found.root / member.path
        if member.name.suffix == ".safetensors":
            return (salvage_safetensors(path),)
        return salvage_torch(
            path, keep_damaged=self._files.keep_damaged, progress=self._files.progress
        )


def absent(group: ModelFiles) -> list[str]:
    """Return the names that the index lists and no file holds."""
    held = {tensor.fqn for member in group.members for tensor in member.tensors}
    held |= {name for member in group.members for scope in member.scopes for name in scope.names}
    return [name for name in group.listed if name not in held]


def _seen(found: "list[SavedDict]") -> "set[str | None]":
    names: set[str | None] = {
        name for one in found for name in (*(t.fqn for t in one.tensors), *one.ties)
    }
    return names | {lost.name for one in found for lost in one.lost}


def _labels(group: ModelFiles) -> tuple[str, ...]:
    """Return the labels that the model can have in a manifest."""
    alone = [str(member.path) for member in group.members] if len(group.members) == 1 else []
    return (*alone, *([str(group.index_path)] if group.index_path is not None else []))


def _stem(group: ModelFiles) -> str:
    if group.members and group.members[0].name.shard is None and group.index_path is None:
        return group.members[0].path.stem
    if group.members and group.members[0].name.shard is not None:
        return group.members[0].name.stem
    name = parse_file_name(group.index_path.name) if group.index_path is not None else None
    return name.stem if name is not None else "model"


_BESIDE = "it is not part of the model, and only the model is salvaged"


class JudgedFolder(Brief, Struct, frozen=True, kw_only=True):
    """A judged DCP folder.

    ``reason``: why it cannot be copied, "" if intact. ``found``: its intact tensors, if not.

    ``damaged``: damaged data that a copy keeps on request. ``doubtful``: files that changed since
    they were sealed, while all tensors of the model match. ``unchecked``: whether there are items
    without a checksum. ``unnamed``: files of a save that no item is in. ``advice``: the next step
    for a folder whose metadata cannot be used.
    """

    reason: str = ""
    found: SavedDict | None = None
    damaged: tuple[Lost, ...] = ()
    doubtful: tuple[Lost, ...] = ()
    unchecked: bool = False
    unnamed: tuple[str, ...] = ()
    advice: str = ""


def judge(
    root: AnyPath,
    where: PurePosixPath,
    sealed: Sealed,
    *,
    keep_damaged: bool,
    progress: Progress | None,
) -> JudgedFolder:
    """Judge every item of a DCP folder; reads the bytes that have a checksum, or a digest in the
    manifest.
    """
    folder = root / where
    try:
        metadata = read_metadata_of(folder)
    except OperationError as error:
        reason, _, advice = str(error).partition("; next: ")
        return JudgedFolder(reason=reason, advice=advice)
    items = _Items(folder, metadata, progress)
    own = [where / name for name in sorted(names_in(folder)) if belongs(name)]
    of_files = sealed.files(path for path in own if (root / path).is_file())
    unlike = tuple(Lost(str(path), None, why) for path, why in of_files.items() if why)
    model = model_names(metadata)
    digests = {
        name: one for found in sealed.models(str(where)).values() for name, one in found.items()
    }
    unchecked = items.unchecked and not (len(of_files) == len(own) and not unlike)
    if model is None or (unlike and not digests):  # the item is unknown
        reason = items.reason(keep_damaged) or (
            "" if keep_damaged or not unlike else str(unlike[0])
        )
        if reason:
            many = count_of(len(metadata.tensors) + len(metadata.items), "item")
            reason = (
                f"nothing in it is salvaged ({many}), because not every item is intact: {reason}"
            )
        damaged = (*items.kept(str(where)), *unlike) if keep_damaged else ()
        return JudgedFolder(reason=reason, damaged=damaged, unchecked=unchecked)
    if unlike or len(of_files) < len(own):
        changed = sealed.changed(digests, intact_tensors(folder)[0]) if digests else {}
        items.changed |= {
            fqn: changed[name] for fqn, name in model.names.items() if name in changed
        }
        unchecked &= not digests.keys() >= set(model.names.values())
    reason = items.reason(keep_damaged)
    if not reason:
        try:
            dcp_weights(root, where, 0)
        except OperationError as error:
            reason = _said(error)
    wrong = items.wrong(keep_damaged)
    return JudgedFolder(
        reason=reason,
        found=_whole_part(folder, str(where), metadata, wrong, items.changed) if reason else None,
        damaged=items.kept(str(where)) if keep_damaged else (),
        doubtful=unlike if not items.changed else (),
        unchecked=unchecked,
        unnamed=tuple(
            str(path.relative_to(where))
            for path in own
            if not _is_used(path.relative_to(where), metadata)
        ),
    )


def _is_used(path: PurePosixPath, metadata: DcpMetadata) -> bool:
    return path.name == METADATA_NAME or path in metadata.files


def _whole_part(
    folder: AnyPath,
    where: str,
    metadata: DcpMetadata,
    wrong: "dict[str, str]",
    changed: "dict[str, str]",
) -> SavedDict:
    """Return the intact tensors of the model; the rest is lost, as the new file holds only the
    model.
    """
    model = model_names(metadata)
    assert model is not None, "it was looked for"
    tensors, lost = intact_tensors(folder)
    by_name = {name: fqn for fqn, name in model.names.items()}
    wrong = wrong.copy()
    for tensor in metadata.tensors:
        if 0 in tensor.shape:  # no byte of its item is needed
            wrong.pop(tensor.fqn, None)
    lost |= {name: wrong[fqn] for name, fqn in by_name.items() if fqn in wrong and name not in lost}
    every = (*(tensor.fqn for tensor in metadata.tensors), *(item.fqn for item in metadata.items))
    beside = {fqn: wrong.get(fqn, _BESIDE) for fqn in every if fqn not in model.names}
    kept = tuple(tensor for tensor in tensors if tensor.fqn not in lost)
    return SavedDict(
        tensors=kept,
        lost=tuple(Lost(where, name, words) for name, words in (*lost.items(), *beside.items())),
        damaged=tuple(
            Lost(where, one.fqn, changed[by_name[one.fqn]])
            for one in kept
            if by_name[one.fqn] in changed
        ),
    )


class _Items:
    """Problems of items: name -> words. ``gone``: missing. ``changed``: another checksum or
    digest.
    """

    def __init__(self, folder: AnyPath, metadata: DcpMetadata, progress: Progress | None) -> None:
        self.gone = {problem.fqn: problem.message for problem in dcp_problems(metadata)}
        self.changed: dict[str, str] = {}
        self.unchecked = False
        by_file: dict[PurePosixPath, list[StoredItem]] = {}
        for item in metadata.stored.values():
            by_file.setdefault(item.path, []).append(item)
        for path, items in sorted(by_file.items()):
            try:
                for item, problem, is_there in self._of_file(folder / path, items, progress):
                    (self.changed if is_there else self.gone).setdefault(
                        item.fqn, f"{path}: {problem}"
                    )
            except OSError as error:
                words = (
                    f"{path}, which holds parts of it, cannot be read: {error.strerror or error}"
                )
                self.gone |= {item.fqn: words for item in items if item.fqn not in self.gone}

    def wrong(self, keep_damaged: bool) -> dict[str, str]:
        """Return the problems of items that must not be kept."""
        return self.gone if keep_damaged else {**self.changed, **self.gone}

    def reason(self, keep_damaged: bool) -> str:
        """Return why the folder cannot be copied as it is, "" when it can."""
        return next((f"{fqn!r}: {words}" for fqn, words in self.wrong(keep_damaged).items()), "")

    def kept(self, where: str) -> tuple[Lost, ...]:
        """Return the damaged items that a copy keeps."""
        return tuple(Lost(where, fqn, words) for fqn, words in self.changed.items())

    def _of_file(
        self, path: AnyPath, items: "list[StoredItem]", progress: Progress | None
    ) -> Iterator[tuple[StoredItem, str, bool]]:
        """Yield the damaged items, why, and whether all their bytes are there."""
        with open_reader(path) as reader:
            for item in sorted(items, key=lambda one: one.offset):
                end = item.offset + item.length
                if end > reader.size:
                    yield (
                        item,
                        f"too short (expected at least {end} bytes, found {reader.size})",
                        False,
                    )
                    continue
                window = reader.window(item.offset, item.length)
                if item.transforms or window.read(0, min(4, item.length)) != b"PK\3\4":
                    self.unchecked = True
                    continue
                try:
                    archive = read_zip(window)
                    self.unchecked |= not all(
                        record.crc or not record.size for record in archive.records
                    )
                    wrong = next(
                        crc_mismatches(archive, window, every_record=True, progress=progress), None
                    )
                except FormatError as error:
                    yield item, f"the item at byte {item.offset}: {error}", False
                    continue
                if wrong is not None:
                    yield (
                        item,
                        f"CRC-32 mismatch in the record {wrong.name!r} at byte {item.offset}",
                        True,
                    )


def _said(error: OperationError) -> str:
    return str(error).partition("; next:")[0]
