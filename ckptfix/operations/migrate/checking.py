"""What a source says of its own bytes, its manifest and its archives, compared with what is read of it."""

import hashlib
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ckptfix.checkpoint.manifest import Manifest
from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.torch_zip import crc_mismatches, read_zip
from ckptfix.operations.migrate.filling import Stopped, stopping
from ckptfix.operations.migrate.hashing import damaged
from ckptfix.operations.migrate.planning import MigrationPlan, PlannedModel
from ckptfix.operations.sealing import recorded as sealing
from ckptfix.operations.sealing.contents import lasting_label
from ckptfix.operations.target import Target
from ckptfix.storage.paths import command
from ckptfix.storage.pieces import OpenFiles, Piece, page_buffer
from ckptfix.storage.reading import open_reader
from ckptfix.wording import count_of

_BLOCK = 1 << 20
_ZIP = b"PK\3\4"
_OTHER_BYTES = "has other bytes than its manifest says"


class Recorded:
    """What the manifest beside a source says: tensor -> digest, of each model, and file -> sha256.

    Raises OperationError when its names are not those of the tensors that are there.
    """

    def __init__(self, plan: MigrationPlan, manifest: Manifest | None) -> None:
        root = plan.source.root
        self._plan = plan
        self._has_other_dtypes = plan.options.original
        recorded = sealing.Recorded(manifest, Target(root, plan.source.only))
        self._sha256 = recorded.sha256
        labelled = [replace(one, label=lasting_label(one, root)) for one in plan.source.weights]
        self._digests: list[dict[str, str]] = [{} for _ in labelled]
        number = {one.label: position for position, one in enumerate(labelled)}
        for place, digest in recorded.digests(labelled, ()).items():
            if place.label not in number:
                self._raise(f"{place.label} is in its manifest, and not there any more")
            self._digests[number[place.label]][place.fqn] = digest
        for one, digests in zip(labelled, self._digests, strict=True):
            for name in sorted(digests.keys() ^ one.named().keys()) if digests else ():
                what = "in its manifest, and not there any more" if name in digests else "not in its manifest"
                self._raise(f"{one.label}: {name!r} is {what}")

    @property
    def has_digests(self) -> bool:
        """Whether it says anything of a tensor that is migrated."""
        return any(self._digests) and not self._has_other_dtypes

    def not_checked(self) -> Iterator[str]:
        """Yield in words what it speaks of and is not compared."""
        converted = sum(
            model.sources[new].convert is not None or self._has_other_dtypes
            for model, digests in zip(self._plan.models, self._digests, strict=True)
            for old, new in _new_names(model).items()
            if old in digests
        )
        if converted:
            yield (
                f"that {count_of(converted, 'tensor')} whose dtype changes were as their manifest says; next: "
                f"{command('verify', self._plan.source.root)}"
            )

    def compare(self, digests: tuple[Mapping[str, str], ...]) -> None:
        """Raise OperationError naming a tensor that was read and is not what was recorded."""
        for model, recorded, read in zip(
            self._plan.models, self._digests, digests if self.has_digests else (), strict=self.has_digests
        ):
            new = _new_names(model)
            for name, digest in recorded.items():
                source = new[model.before.ties.get(name, name)]
                if model.sources[source].convert is None and read[source] != digest:
                    self._raise(f"{model.label}: {name!r} {_OTHER_BYTES}")

    def compare_file(self, name: str, sha256: str) -> None:
        """Raise OperationError when a file that was carried over is not what was recorded."""
        if self._sha256.get(name, sha256) != sha256:
            self._raise(f"{name} {_OTHER_BYTES}")

    def speaks_of(self, name: str) -> bool:
        """Whether it has the sha256 of a file."""
        return name in self._sha256

    def _raise(self, what: str) -> None:
        root = self._plan.source.root
        raise OperationError(
            f"{root}: {what}: damaged, or changed since; nothing was written; "
            f"next: {command('verify', root)}, or, if it is as it should be: {command('seal', root, '', '--force')}"
        )


def _new_names(model: PlannedModel) -> dict[str, str]:
    """Return old name -> new name of the tensors of a model; behind them may stand copies of ties."""
    pairs = zip(model.before.tensors, model.weights.tensors, strict=False)
    return {before.fqn: after.fqn for before, after in pairs}


def loose_records(model: PlannedModel) -> Iterator[tuple[Piece, int]]:
    """Yield the records of an archive, with their CRC-32, that no tensor is read from as a whole and unconverted."""
    whole = {source.piece for source in model.sources.values()}
    yield from ((piece, crc) for piece, crc in model.weights.checksums.items() if piece not in whole)


def check_record(piece: Piece, crc: int, stop: threading.Event) -> None:
    """Read a record. Raises OperationError when it has another CRC-32, OSError, ``Stopped``."""
    found = 0
    with OpenFiles() as files:
        for block in files.blocks((piece,), page_buffer(min(_BLOCK, piece.length))):
            if stop.is_set():
                raise Stopped
            found = zlib.crc32(block, found)
    if found != crc:
        raise damaged(piece, found, crc)


def check_archive(path: Path, stop: threading.Event) -> None:
    """Read a file that is carried over, if it is a zip file of torch.

    Raises OperationError when a record has another CRC-32, OSError, ``Stopped``.
    """
    with open_reader(path) as reader:
        if reader.size < len(_ZIP) or reader.read(0, len(_ZIP)) != _ZIP:
            return
        try:
            archive = read_zip(reader)
        except FormatError:
            return  # some other archive, as custom objects may be
        for record in crc_mismatches(archive, reader, every_record=True, progress=stopping(stop)):
            raise OperationError(
                f"{path}: the record {record.name!r} does not have its CRC-32 {record.crc:08x}: the file is damaged; "
                f"nothing was written; next: {command('check', path, '', '--data')}"
            )


def sha256_of(path: Path, stop: threading.Event) -> str:
    """Return the sha256 of a file, in hex. Raises OSError, ``Stopped``."""
    digest = hashlib.sha256()
    buffer = page_buffer(_BLOCK)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while count := os.readv(fd, [buffer]):
            if stop.is_set():
                raise Stopped
            digest.update(buffer[:count])
    finally:
        os.close(fd)
    return digest.hexdigest()
