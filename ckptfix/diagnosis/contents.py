"""Files and tensors that a checkpoint holds, and those that its manifest recorded."""

import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.dcp import DATA_SUFFIX
from ckptfix.checkpoint.downloads import OF_THE_CLIENT
from ckptfix.checkpoint.entries import Entry, all_state_dicts, model_entries, single_entry
from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.folder import PLAIN_FOLDER, scan_folder
from ckptfix.checkpoint.folder_names import parse_folder_name
from ckptfix.checkpoint.manifest import (
    Manifest,
    ManifestEntry,
    key_fingerprint,
    manifest_or_command,
    usable_manifest,
)
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG
from ckptfix.checkpoint.roles import NOT_STATES, Role
from ckptfix.diagnosis.target import Target
from ckptfix.errors import ChangedError, FormatError, OperationError, UsageError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.storage.files import AnyPath, absolute, stat_of
from ckptfix.storage.paths import list_folder
from ckptfix.tensors.hashing import WHOLE, Scheme
from ckptfix.tensors.opening import model_folders, open_checkpoint
from ckptfix.tensors.single_files import file_weights
from ckptfix.tensors.stored import Format, Weights
from ckptfix.wording import Brief


class FileState(NamedTuple):
    """A regular file as it was when it was listed: size in bytes, time in nanoseconds."""

    size: int
    mtime_ns: int


class TensorLocation(NamedTuple):
    """Label of the model that holds a tensor, and its key there."""

    label: str
    fqn: str

    def __str__(self) -> str:
        return f"{self.fqn!r} in {self.label}"


class Contents(Brief, Struct, frozen=True, kw_only=True):
    """Contents of a checkpoint. ``files``: every regular file by its relative path, except
    ckptfix's own.

    ``only``: the name of a single requested file. ``unreadable``: label of a model -> why some of
    its tensors cannot be found; the others are in ``weights``. ``unsupported``: the same for intact
    files of a kind that is not read. ``special``: links that lead nowhere or in a circle, pipes and
    the like, with the reason why they are not in ``files``. ``journals``: ckptfix's own folders in
    sub-folders.
    """

    root: AnyPath
    files: Mapping[str, FileState]
    only: str | None = None
    special: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[Weights, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)
    journals: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of all files in bytes."""
        return sum(state.size for state in self.files.values())

    def beside(self) -> list[str]:
        """Return the files that ``weights`` does not cover although their names are those of
        weights, in order.

        Examples are a model in a second format, and weights in folders below; states of optimizers
        are not included.
        """
        used = {str(path) for one in self.weights for path in one.files}
        used |= self.unsupported.keys()
        return sorted(
            name for name in self.files if name not in used and _names_weights(PurePosixPath(name))
        )

    def check_unchanged(self) -> None:
        """Raise ChangedError when a file changed since it was listed: digests would mix two
        states.
        """
        for name, was in self.files.items():
            try:
                status = stat_of(self.root / name)
            except OSError as error:
                raise ChangedError(
                    f"{self.root / name} changed after the folder was listed: {error.strerror}"
                ) from None
            if (status.st_size, status.st_mtime_ns) != was:
                raise ChangedError(
                    f"{self.root / name} changed while it was read (from {was.size} to "
                    f"{status.st_size} bytes); run again when nothing writes to the folder"
                )


def read_contents(target: Target) -> Contents:
    """Return the contents of a path. Reads no tensor; notes models that cannot be read. Raises
    OSError.
    """
    listed, journals = (
        list_folder(target.root) if target.only is None else ({target.only: None}, ())
    )
    files: dict[str, FileState] = {}
    special: dict[str, str] = {}
    for path, why in listed.items():
        if why is not None:
            special[path] = why
            continue
        try:
            status = stat_of(target.root / path)
        except OSError:
            special[path] = "is a broken symbolic link"
            continue
        if stat.S_ISREG(status.st_mode):
            files[path] = FileState(status.st_size, status.st_mtime_ns)
        else:
            special[path] = "is not a regular file"
    weights, unreadable, unsupported = _weights(target)
    weights = tuple(replace(one, label=lasting_label(one, target.root)) for one in weights)
    return Contents(
        root=target.root,
        files=files,
        only=target.only,
        special=special,
        weights=weights,
        unreadable=unreadable,
        unsupported=unsupported,
        journals=journals,
    )


@paused_gc()
def _weights(target: Target) -> tuple[tuple[Weights, ...], dict[str, str], dict[str, str]]:
    """Return the models, label -> reason of those that cannot be read completely, and the same of
    unsupported files.

    Unsupported files are of a kind that is not read; nothing shows that they are damaged.
    """
    try:
        return (*open_checkpoint(target.path).weights, *_adapter_on_top(target)), {}, {}
    except UsageError:
        folder = scan_folder(target.root, target.only)
        found_unsupported = {
            str(one.path): one.problem.message
            for one in folder.components
            if one.problem is not None and one.is_unsupported
        }
        return (), {}, found_unsupported
    except OperationError:  # the other models can be compared, and the readable part of this one
        folder = scan_folder(target.root, target.only)
    found: list[Weights] = []
    unreadable: dict[str, str] = {}
    unsupported: dict[str, str] = {}
    for entry in model_entries(folder, usable_manifest(target.root)) or all_state_dicts(folder):
        if entry.problem and all(member.is_unsupported for member in entry.members):
            unsupported[_whole_label(target.root, entry)] = entry.problem
            continue
        try:
            if entry.problem:
                raise OperationError(entry.problem)
            found.append(file_weights(target.root, entry))
        except OperationError as error:
            label = entry.label if target.only is not None else _whole_label(target.root, entry)
            found += _readable_part(target.root, entry, label)
            # A shard that was named is the only file to look at.
            if target.only is None or not found:
                unreadable[label] = str(error)
    for path in model_folders(folder, has_weights=bool(found or unreadable)):
        inside, *others = _weights(Target(target.root / path, None))
        found += (one.below(path) for one in inside)
        for told, more in zip((unreadable, unsupported), others, strict=True):
            told.update({f"{path}/{label}": why for label, why in more.items()})
    for path, kind in folder.subfolders.items():
        if kind != PLAIN_FOLDER:
            try:
                found += (
                    replace(one, label=str(path), files=tuple(path / file for file in one.files))
                    for one in open_checkpoint(target.root / path).weights
                )
            except (OperationError, UsageError) as error:
                unreadable[str(path)] = str(error)
    return tuple(found), unreadable, unsupported


def _adapter_on_top(target: Target) -> Iterator[Weights]:
    """Yield the adapter next to a model: ``from_pretrained`` of transformers puts it on the
    model.
    """
    if target.only is None and all((target.root / name).exists() for name in (CONFIG, ADAPTER)):
        folder = scan_folder(target.root, wanted=lambda file: file.stem == "adapter_model")
        for entry in all_state_dicts(folder):
            with suppress(OperationError):
                yield file_weights(target.root, entry)


def lasting_label(weights: Weights, root: AnyPath) -> str:
    """Return the label of a model: "." for a folder that is the checkpoint itself, as the folder
    may be renamed.
    """
    names = {"", root.name, absolute(root).name, root.resolve().name}
    name, bracket, rest = weights.label.partition("[")
    is_folder = weights.format in (Format.DCP, Format.DEEPSPEED)
    if is_folder and name in names and not (name and (root / name).is_dir()):
        return f".{bracket}{rest}"
    return weights.label


def _whole_label(root: AnyPath, entry: Entry) -> str:
    """Return the label of a model as with all of its files: a lone shard would give its own
    name.
    """
    name = entry.members[0].name if entry.members else None
    if name is None or name.shard is None or name.is_of_parts:
        return entry.label
    existing = (index for index in name.index_names if (root / index).exists())
    return next(existing, name.index_name)


def _readable_part(root: AnyPath, entry: Entry, label: str) -> list[Weights]:
    """Return the tensors in the readable files of a model."""
    parts = []
    for member in entry.members:
        if member.problem is None and member.whole is not None and not member.name.is_of_parts:
            with suppress(OperationError):
                parts.append(file_weights(root, single_entry(member)))
    if not parts:
        return []
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    return [replace(parts[0], label=label, index=entry.index, tensors=tensors)]


def _names_weights(path: PurePosixPath) -> bool:
    """Return whether a file holds weights, by its name and its folder's name."""
    folder = parse_folder_name(path.parent.name)
    if folder is not None and folder.role is not Role.MODEL:
        return False
    name = parse_file_name(path.name)
    if name is None:
        return path.suffix == DATA_SUFFIX
    return name.role in (Role.MODEL, Role.UNKNOWN)


def readable_manifest(root: AnyPath) -> Manifest | None:
    """Return the manifest of a folder. Raises OperationError, with the command to go on, for an
    invalid one.
    """
    try:
        return manifest_or_command(root)
    except FormatError as error:
        raise OperationError(str(error)) from error


class Recorded:
    """Records of a manifest about a folder, or about a single requested file in it.

    ``sha256``: file -> its digest, or those of its ranges as one text. ``repaired``: files that
    were sealed and changed by a repair since. ``source``, ``tensor_source``: what has the records
    of files and of tensors, in messages.
    """

    source = "the manifest"
    tensor_source = "the manifest"

    def __init__(self, manifest: Manifest | None, target: Target) -> None:
        self.manifest = manifest
        self.is_sealed = (
            manifest is not None and bool(manifest.digests) and not manifest.digests_of_save
        )
        models = manifest.models if manifest is not None else ()
        entries = [entry for entry in models if not _is_state(entry.file)]
        self.tensors: dict[str, Mapping[str, str]] = {
            entry.file: _by_every_name(entry) for entry in entries
        }
        by_the_save = manifest is not None and manifest.is_of_a_save  # others read the headers
        self.aliases = {
            entry.file: (entry.aliases.keys() if by_the_save else set()) - entry.digests.keys()
            for entry in entries
        }
        self.sha256 = manifest.digests if manifest is not None else {}
        self._ranged = manifest.ranges.keys() if manifest is not None else set()
        self._by_ranges = (
            Scheme(shard_size=manifest.range_size)
            if manifest is not None and self._ranged
            else WHOLE
        )
        self.sizes = dict(manifest.files) if manifest is not None else {}
        self.only = target.only
        if self.only is not None:
            self.sha256 = {name: value for name, value in self.sha256.items() if name == self.only}
            self.sizes = {name: value for name, value in self.sizes.items() if name == self.only}
        self.repaired = {name for name, digest in self.sha256.items() if not digest}
        self.sha256 = {name: digest for name, digest in self.sha256.items() if digest}

    def scheme_of(self, name: str, size: int) -> Scheme:
        """Return how a file is hashed to be compared: as it was when it was recorded.

        One that was not may have been a recorded one before a rename: it is hashed as one of its
        size is.
        """
        size_of_range = self._by_ranges.shard_size or size
        is_ranged = name in self._ranged or (name not in self.sha256 and size > size_of_range)
        return self._by_ranges if is_ranged else WHOLE

    def digests(
        self, weights: Iterable[Weights], unreadable: Iterable[str]
    ) -> dict[TensorLocation, str]:
        """Return the digests of tensors that can be compared: those of readable models."""
        if self.only is None:
            lost = tuple(unreadable)
            readable = {
                TensorLocation(one.label, fqn) for one in weights if lost for fqn in one.named()
            }
            return {
                place: digest
                for label, digests in self.tensors.items()
                for is_lost in (any(label == one or label.startswith(f"{one}[") for one in lost),)
                for fqn, digest in digests.items()
                for place in (TensorLocation(label, fqn),)
                if not is_lost or place in readable
            }
        found: dict[TensorLocation, str] = {}
        for one in weights:
            if one.label in self.tensors:
                # Only the manifest of the folder lists it.
                absent = self.aliases[one.label] - one.ties.keys()
                found |= {
                    TensorLocation(one.label, fqn): digest
                    for fqn, digest in self.tensors[one.label].items()
                    if fqn not in absent
                }
                continue
            for label, digests in self.tensors.items():  # a shard, which the model's entry covers
                if label.endswith(".json"):
                    names = digests.keys() & one.named().keys()
                    found |= {TensorLocation(one.label, fqn): digests[fqn] for fqn in names}
        return found

    def unlisted(self, name: str) -> tuple[bool, str]:
        """Return whether a file that is not recorded is a difference, and the words for it."""
        if name.startswith(f"{OF_THE_CLIENT}/"):
            return False, "is a file of the Hugging Face Hub client, which no loader reads"
        return self.is_sealed or changes_a_load(name), f"is not in {self.source}"

    def special(self, name: str, why: str) -> tuple[bool, str]:
        """Return whether what is not a file, and not recorded, is a difference, and the words for
        it.
        """
        return False, why  # seal wrote the manifest all the same

    def lost(self, contents: Contents) -> Iterator[tuple[TensorLocation, str]]:
        """Yield the tensors with a digest that cannot be found, as their model is unreadable, with
        the reason.
        """
        known = self.digests(contents.weights, contents.unreadable) if contents.unreadable else {}
        for label, why in contents.unreadable.items():
            for entry, digests in self.tensors.items():
                if entry == label or entry.startswith(f"{label}["):
                    places = (TensorLocation(entry, fqn) for fqn in digests)
                    yield from ((place, why) for place in places if place not in known)


def sealed_entry(
    old: ManifestEntry | None, weights: Weights, digests: Mapping[str, str]
) -> ManifestEntry:
    """Return the entry of a model with the digests of its tensors. ``old``: what a save has
    recorded of it.
    """
    # Only safetensors files leave out the other names of a tie; the key fingerprint is over those
    # that are in the file.
    is_apart = weights.format is Format.SAFETENSORS
    held = {tensor.fqn: tensor for tensor in weights.tensors} if is_apart else weights.named()
    keys = key_fingerprint((name, tensor.dtype, tensor.shape) for name, tensor in held.items())
    if old is None:
        old = ManifestEntry(index=weights.index, file=weights.label, type="")
    return replace(
        old,
        keys=keys,
        digests={name: digests[weights.ties.get(name, name)] for name in held},
        aliases=dict(weights.ties) if is_apart else {},
    )


def changes_a_load(name: str) -> bool:
    """Return whether a file that no save listed is read by ``load_state``.

    Other processes add their random states and run states late.
    """
    parsed = parse_file_name(name)
    if parsed is None or parsed.is_of_trainer:
        return False
    return parsed.role not in (Role.RNG_STATE, Role.RUN_STATE, Role.UNKNOWN)


def _is_state(label: str) -> bool:
    """Return whether an entry for a model is a state by its name, such as ``rng_state.pth`` in
    seals before 0.5.0.

    The manifest has the digest of its file, too.
    """
    name = parse_file_name(label.partition("[")[0])
    return name is not None and name.role not in NOT_STATES


def _by_every_name(entry: ManifestEntry) -> dict[str, str]:
    """Return the digests of a model, also under tied keys that its file lacks."""
    digests = entry.digests
    return {name: digests[kept] for name, kept in entry.aliases.items() if kept in digests} | dict(
        digests
    )
