"""The manifest of a checkpoint: what the run that saved it knew, in ``.ckptfix/manifest.json``.

It is written last, so a folder whose manifest agrees with its files is whole. Stock accelerate never looks at it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckptfix.errors import FormatError
from ckptfix.storage.paths import JOURNAL

MANIFEST = f"{JOURNAL}/manifest.json"
"""Where the manifest is, relative to the checkpoint."""

VERSION = 1
MAX_MANIFEST = 256 << 20
"""Longest manifest that is read, in bytes; a tensor's digest takes about 120."""

_KINDS = ("models", "optimizers", "schedulers", "dataloaders", "custom")
"""The fields of a manifest that are lists of entries."""

_LINKS = ("models", "optimizer")
"""The fields of an entry that name others by position; written only where there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """One object that was saved: its file, its class as ``module.Class``, and for models what their names are.

    ``keys``: fingerprint of the names, dtypes and shapes, for optimizers of the shapes of their parameters; "" when not
    known. ``aliases``: name that is not in the file -> name of the tensor it shares its storage with. ``digests``:
    tensor name -> sha256, only when asked for. ``models``: of an optimizer, the positions of the models whose
    parameters it holds; () when none is known. ``optimizer``: of a scheduler, the position of the one it drives.
    """

    index: int
    file: str
    type: str
    keys: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    models: tuple[int, ...] = ()
    optimizer: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a save recorded. ``files``: every file of the checkpoint, relative, with its size in bytes.

    ``versions``: package -> version. ``step``: the accelerator's own counter of gradient accumulation steps.
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

    def to_bytes(self) -> bytes:
        """Return the manifest as it is stored."""
        document = asdict(self)
        for entry in (entry for kind in _KINDS for entry in document[kind]):
            for link in _LINKS:
                if entry[link] in ((), None):
                    del entry[link]
        return (json.dumps({"version": VERSION, **document}, indent=1, ensure_ascii=True) + "\n").encode()


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, None when it has none.

    Raises FormatError when there is one that cannot be understood, OSError when it cannot be read.
    """
    try:
        with (folder / MANIFEST).open("rb") as file:
            data = file.read(MAX_MANIFEST + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(data) > MAX_MANIFEST:
        raise FormatError(f"{folder / MANIFEST} has more than {MAX_MANIFEST} bytes")
    try:
        document = json.loads(data)
        if document.pop("version") != VERSION:
            raise FormatError(f"{folder / MANIFEST} is of another version than {VERSION}")
        for kind in _KINDS:
            document[kind] = tuple(_entry(value) for value in document[kind])
        manifest = Manifest(**document)
        _check(manifest)
    except FormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{folder / MANIFEST} cannot be understood: {error!r}") from None
    return manifest


def key_fingerprint(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> str:
    """Return a sha256 over the (name, dtype, shape) of every tensor, in the order of the names."""
    digest = hashlib.sha256()
    for name, dtype, shape in sorted(tensors):
        digest.update(json.dumps([name, dtype, list(shape)]).encode() + b"\n")
    return digest.hexdigest()


def missing_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return in words which files are not there as the manifest says, an empty list for a whole checkpoint."""
    wrong = []
    for name, size in manifest.files.items():
        try:
            have = (folder / name).stat().st_size
        except OSError:
            wrong.append(f"{name} is missing")
            continue
        if have != size:
            wrong.append(f"{name} has {have} bytes, {size} were saved")
    return wrong


def _entry(value: Any) -> ManifestEntry:
    links = value.get("models", [])
    if not isinstance(links, list):
        raise TypeError("the models of an entry are a list")
    entry = ManifestEntry(**{**value, "models": tuple(links)})
    positions = [*entry.models, *([] if entry.optimizer is None else [entry.optimizer])]
    if not all(type(position) is int and position >= 0 for position in positions):
        raise TypeError("a position that is none")
    if len(set(entry.models)) != len(entry.models):
        raise ValueError("a position twice")
    if type(entry.index) is not int or not all(
        type(text) is str for text in (entry.file, entry.type, entry.keys)
    ):
        raise TypeError("an entry of the wrong type")
    for mapping in (entry.aliases, entry.digests):
        if not all(type(key) is str and type(text) is str for key, text in mapping.items()):
            raise TypeError("names of the wrong type")
    return entry


def _check(manifest: Manifest) -> None:
    if type(manifest.world_size) is not int or type(manifest.step) is not int:
        raise TypeError("world_size and step are numbers")
    for name, size in manifest.files.items():
        if type(size) is not int or name.startswith("/") or ".." in name.split("/"):
            raise TypeError(f"a file {name!r} of {size!r} bytes")
