"""The manifest of a checkpoint (``.ckptfix/manifest.json``), the list of losses that ``salvage``
writes, and the receipt of ``migrate``.

A save writes the manifest last, so a folder whose manifest agrees with its files is complete; it
contains facts of the run, and digests. ``ckptfix seal`` adds digests, or writes a manifest that
holds nothing else. Stock accelerate never looks at it.
"""

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from msgspec import Struct, convert, field
from msgspec.structs import asdict

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.roles import Role
from ckptfix.errors import FormatError, JournalError
from ckptfix.storage.files import AnyPath, names_in, stat_of
from ckptfix.storage.journal import State, TransactionInfo, transactions
from ckptfix.storage.paths import JOURNAL, MANIFEST, RECEIPT, ensure_listed, is_inside, shell_path
from ckptfix.storage.reading import open_reader, read_start
from ckptfix.wording import count_of

VERSION = 1
MAX_MANIFEST = 256 << 20
"""Longest manifest that is read, in bytes; a tensor's digest takes about 120."""

_MOST_PROCESSES = 1 << 20
"""Most processes of a run; each has a file of random states, numbered by its rank."""

_MOST_ENTRIES = 1 << 20
"""Most entries of a kind; a file has the number of its entry in its name."""

_MOST = (1 << 63) - 1
"""Most steps of a run, and bytes of a range."""

_KINDS = ("models", "optimizers", "schedulers", "dataloaders", "custom")
"""The fields of a manifest that are lists of entries."""

_LINKS = ("models", "optimizer")
"""The fields of an entry that refer to others by position; written only where there are any."""

_SHA256 = re.compile(r"[0-9a-f]{64}")

RANGE = 1_000_000_000
"""Bytes of a range that has a digest of its own: OpenSSF Model Signing cuts files into shards of
this size.
"""


class ManifestEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One object that was saved: its file, its class as ``module.Class``, and for models a
    fingerprint of their keys.

    ``file``: for a model the label of ``tensors.opening``: a file, the index of its shards, the
    folder of a DCP checkpoint, or ``ckpt.pt['model']``. ``type``: "" when unknown. ``keys``:
    fingerprint of the names, dtypes and shapes, for optimizers of the shapes of their parameters;
    "" when unknown. ``aliases``: key that the file lacks -> key of the tensor with the same
    storage. ``digests``: tensor name -> sha256 (``tensors.stored``), only on request. ``models``:
    of an optimizer, the positions of the models whose parameters it holds; () when unknown.
    ``optimizer``: of a scheduler, the position of the one it drives.
    """

    index: int
    file: str
    type: str
    keys: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    models: tuple[int, ...] = ()
    optimizer: int | None = None


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of a save. ``files``: every file that the save wrote, relative, with its size in
    bytes.

    ``versions``: package -> version. ``step``: the accelerator's own counter of gradient
    accumulation steps. ``sha256``: every file that was sealed -> sha256 of the file, in hex, as the
    Hugging Face hub gives it for large files; "" for one that a repair changed since. ``ranges``:
    long file -> the sha256 of each ``range_size`` bytes of it, which many processes can take at
    once; such a file may have no sha256 of its own. A manifest that ``seal`` wrote has digests
    alone: no ``files``, and 0 for ``world_size`` and ``step``. ``digests_of_save``: the save itself
    took the ``sha256``; a file that came later does not count as a difference then.
    """

    versions: Mapping[str, str]
    world_size: int
    step: int
    models: tuple[ManifestEntry, ...] = ()
    optimizers: tuple[ManifestEntry, ...] = ()
    schedulers: tuple[ManifestEntry, ...] = ()
    dataloaders: tuple[ManifestEntry, ...] = ()
    custom: tuple[ManifestEntry, ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)
    digests_of_save: bool = False
    range_size: int = 0
    ranges: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_of_a_save(self) -> bool:
        """Return whether a save wrote it, and not ``seal``; only then are its files and its step
        those of a save.
        """
        return bool(self.files)

    @property
    def digests(self) -> dict[str, str]:
        """Every sealed file -> the digest that it is compared by: those of its ranges as one text,
        or its sha256.
        """
        return {**self.sha256, **{name: joined(digests) for name, digests in self.ranges.items()}}

    def to_bytes(self) -> bytes:
        """Return the manifest as it is stored."""
        # Not to_builtins(), which refuses a version that is a TorchVersion, not a plain str.
        document = asdict(self)
        document |= {kind: list(map(asdict, document[kind])) for kind in _KINDS}
        if not self.sha256:
            del document["sha256"]
        if not self.digests_of_save:
            del document["digests_of_save"]
        if not self.ranges:
            del document["range_size"], document["ranges"]
        for entry in (entry for kind in _KINDS for entry in document[kind]):
            for link in _LINKS:
                if entry[link] in ((), None):
                    del entry[link]
        return (
            json.dumps({"version": VERSION, **document}, indent=1, ensure_ascii=True) + "\n"
        ).encode()


def read_manifest(folder: AnyPath) -> Manifest | None:
    """Return the manifest of a checkpoint, None when it has none.

    Raises FormatError for an invalid manifest, OSError when it cannot be read.
    """
    try:
        data = read_start(folder / MANIFEST, MAX_MANIFEST + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if data is None:
        raise FormatError(f"{folder / MANIFEST} is not a regular file")
    if len(data) > MAX_MANIFEST:
        raise FormatError(f"{folder / MANIFEST} has more than {MAX_MANIFEST} bytes")
    try:
        document = json.loads(data)
        if document.pop("version") != VERSION:
            raise FormatError(
                f"{folder / MANIFEST} has an unsupported version (expected {VERSION})"
            )
        if missing := [kind for kind in _KINDS if kind not in document]:
            raise KeyError(missing[0])
        manifest = convert(document, Manifest)
        _check(manifest)
    except FormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{folder / MANIFEST} cannot be understood: {error!r}") from None
    return manifest


def manifest_or_command(folder: AnyPath) -> Manifest | None:
    """Return the manifest as ``read_manifest`` does. The FormatError for an invalid one ends in the
    command to go on.
    """
    try:
        return read_manifest(folder)
    except FormatError as error:
        raise FormatError(
            f"{error}; to continue without it: rm {shell_path(folder / MANIFEST)}"
        ) from error


def usable_manifest(folder: AnyPath) -> Manifest | None:
    """Return the manifest of a checkpoint for uses that only add facts, such as names of tied
    weights. None without a manifest, and for an unreadable one: nothing is compared with it.
    """
    try:
        return read_manifest(folder)
    except (FormatError, OSError):
        return None


def joined(digests: Iterable[str]) -> str:
    """Return the digests of a file's ranges as one text that is compared and shown like a
    digest.
    """
    return "-".join(digests)


def key_fingerprint(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> str:
    """Return a sha256 over the (name, dtype, shape) of every tensor, in the order of the names."""
    digest = hashlib.sha256()
    for name, dtype, shape in sorted(tensors):
        digest.update(json.dumps([name, dtype, list(shape)]).encode() + b"\n")
    return digest.hexdigest()


class NotAsSaved(NamedTuple):
    """A file that is missing (``have`` is None), or has ``have`` bytes where the save wrote
    ``saved``.
    """

    name: str
    saved: int
    have: int | None

    def __str__(self) -> str:
        if self.have is None:
            return f"{self.name} is missing"
        return f"{self.name} has {count_of(self.have, 'byte')} (expected {self.saved}, as saved)"


def not_as_saved(folder: AnyPath, manifest: Manifest) -> Iterator[NotAsSaved]:
    """Yield the files of the save that are missing or have another size, none for a complete
    checkpoint. Other sealed files belong to the user and may be deleted: ``verify`` lists those.
    """
    for name, size in manifest.files.items():
        try:
            have: int | None = (folder / name).stat().st_size
        except OSError:
            have = None
        if have != size:
            yield NotAsSaved(name, size, have)


def missing_files(folder: AnyPath, manifest: Manifest) -> list[str]:
    """Return the files of ``not_as_saved`` in words."""
    return list(map(str, not_as_saved(folder, manifest)))


def is_repaired(folder: AnyPath) -> bool:
    """Return whether a checkpoint was repaired since its save, here or where it comes from. Raises
    OSError when its journal cannot be listed.
    """
    try:
        names = names_in(folder / JOURNAL)
    except (FileNotFoundError, NotADirectoryError):
        return False
    # Of objects only the state tells a repair from one that was begun.
    return any(name.endswith(".done") for name in names) or (
        any(name.endswith(".objects") for name in names) and bool(_repairs(folder))
    )


def taken_by_repairs(folder: AnyPath) -> frozenset[str] | None:
    """Return the files that repairs since the save took away, and the folders that lost their
    metadata to one; None where a journal cannot be read, as that of another user. Raises OSError.
    """
    taken = _names_of(_repairs(folder))[1]
    if not taken:
        return taken
    from ckptfix.formats.dcp_metadata import METADATA_NAME

    paths = map(PurePosixPath, taken)
    return taken | {str(path.parent) for path in paths if path.name == METADATA_NAME}


def unexplained(
    folder: AnyPath, lacking: Iterable[NotAsSaved], *, by_manifest: bool
) -> list[NotAsSaved]:
    """Return the files that no repair explains, of those that are not as they were saved. Raises
    OSError.

    ``by_manifest``: the manifest says so. Of repairs that kept it up to date it tells itself;
    versions before 0.5 left the sizes of the save in it.
    """
    lacking = list(lacking)
    if not lacking:
        return []
    changed, taken = _names_of(_repairs(folder, besides_manifest=by_manifest))
    if changed is None or taken is None:
        return []
    return [file for file in lacking if file.name not in (taken if file.have is None else changed)]


def has_stale_sizes(folder: AnyPath, manifest: Manifest) -> bool:
    """Return whether a repair changed files of the save and left their sizes in the manifest, as
    versions before 0.5 did. Raises OSError.
    """
    changed, _ = _names_of(_repairs(folder, besides_manifest=True))
    return changed is None or not changed.isdisjoint(manifest.files)


def _repairs(folder: AnyPath, *, besides_manifest: bool = False) -> list[TransactionInfo]:
    try:
        done = [info for info in transactions(folder) if info.state is State.DONE]
    except JournalError:  # a link or a file, which is no journal of ours
        return []
    own = PurePosixPath(MANIFEST)
    return [info for info in done if not (besides_manifest and own in info.paths)]


def _names_of(
    repairs: Iterable[TransactionInfo],
) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    """Return the names that repairs changed, and those that they took away."""
    changed: set[str] = set()
    taken: set[str] = set()
    for info in repairs:
        if info.foreign or info.problem:
            return None, None
        changed |= set(map(str, info.paths))
        taken = (taken - set(map(str, info.paths))) | set(map(str, info.gone))
    return frozenset(changed), frozenset(taken)


def _check_entry(entry: ManifestEntry) -> None:
    if not 0 <= entry.index <= _MOST_ENTRIES:
        raise ValueError(f"invalid entry number {entry.index!r:.40}")
    positions = [*entry.models, *([] if entry.optimizer is None else [entry.optimizer])]
    if not all(0 <= position <= _MOST_ENTRIES for position in positions):
        raise ValueError("a position is out of range")
    if len(set(entry.models)) != len(entry.models):
        raise ValueError("a position is listed twice")
    for name, digest in entry.digests.items():
        if not _SHA256.fullmatch(digest):
            raise ValueError(f"invalid sha256 of tensor {name!r}: {digest!r}")


def _check(manifest: Manifest) -> None:
    """Raise ValueError for values that no save writes; ``convert`` has checked their types."""
    for entry in (entry for kind in _KINDS for entry in getattr(manifest, kind)):
        _check_entry(entry)
    if not (0 <= manifest.world_size <= _MOST_PROCESSES and 0 <= manifest.step <= _MOST):
        raise ValueError(
            f"invalid world size {manifest.world_size!r:.40} or step {manifest.step!r:.40}"
        )
    for name, size in manifest.files.items():
        ensure_listed(name, size)
    for name, digest in manifest.sha256.items():
        if not (digest == "" or _SHA256.fullmatch(digest)) or not is_inside(name):
            raise ValueError(f"invalid file name or sha256: {name!r}, {digest!r}")
    if not bool(manifest.ranges) <= manifest.range_size <= _MOST:
        raise ValueError(f"invalid range size: {manifest.range_size!r:.40} bytes")
    for name, digests in manifest.ranges.items():
        if not digests or not all(map(_SHA256.fullmatch, digests)) or not is_inside(name):
            raise ValueError(
                f"invalid file name or range digests: {name!r}, {count_of(len(digests), 'range')}"
            )


REPORT = "salvage.json"
"""Name of the file in which a salvaged folder lists its losses."""

_VERSION = 1
_MAX_REPORT = 128 << 20
"""Longest report that is read, in bytes; the name of a tensor takes about 60."""


class Losses(NamedTuple):
    """The losses of a salvaged folder: ``tensors`` (or other values) of files, complete ``files``;
    and ``damaged`` objects that were kept all the same.
    """

    tensors: int
    files: int
    damaged: int

    def __str__(self) -> str:
        counts = [(self.tensors, "tensor"), (self.files, "file")]
        lost = " and ".join(count_of(number, noun) for number, noun in counts if number)
        objects = "tensor or file" if self.damaged == 1 else "tensors or files"
        kept = f"{self.damaged} damaged {objects} kept" if self.damaged else ""
        return ", ".join(filter(None, (f"{lost} lost" if lost else "", kept)))


def read_losses(folder: AnyPath) -> Losses | None:
    """Return the losses of a salvaged folder; None without losses, or when the folder was not
    salvaged.

    A ``salvage.json`` of another program is ignored. Raises OSError when the file cannot be read.
    """
    path = folder / REPORT
    try:
        status = stat_of(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_REPORT:
        return None
    with open_reader(path) as reader:
        data = reader.read(0, reader.size) if reader.size <= _MAX_REPORT else b""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        return None
    lost, damaged = document.get("lost"), document.get("damaged")
    if not isinstance(lost, list) or not isinstance(damaged, list) or not (lost or damaged):
        return None
    files = sum(isinstance(one, dict) and one.get("name") is None for one in lost)
    return Losses(tensors=len(lost) - files, files=files, damaged=len(damaged))


_MAX_RECEIPT = 64 << 20
"""Longest receipt of a migration that is read, in bytes; a file takes about 100."""


class Migrated(NamedTuple):
    """The gaps that a migration left on purpose.

    ``lacks_random_states``: it left out random states, which are those of other ranks.
    ``may_lack_keys``: safetensors files were migrated, which have one key of tied weights, to files
    of which a loader wants both.
    """

    lacks_random_states: bool = False
    may_lack_keys: bool = False


def read_migrated(folder: AnyPath) -> Migrated:
    """Return what the receipt of a folder says, no gap for a folder without a readable receipt."""
    try:
        data = read_start(folder / RECEIPT, _MAX_RECEIPT)
        document = json.loads(data or b"")
    except (OSError, ValueError, RecursionError):
        return Migrated()
    if not isinstance(document, dict):
        return Migrated()
    left_out = document.get("left_out")
    names = left_out if isinstance(left_out, list) else []
    parsed = [parse_file_name(name) for name in names if isinstance(name, str)]
    return Migrated(
        lacks_random_states=any(name and name.role is Role.RNG_STATE for name in parsed),
        may_lack_keys=document.get("may_lack_keys") is True,
    )
