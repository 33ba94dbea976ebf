"""What a source says of its own bytes, its manifest and its archives, compared with what is read of it."""

import hashlib
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptfix.checkpoint.manifest import Manifest, read_manifest
from ckptfix.errors import FormatError, OperationError
from ckptfix.operations.migrate.filling import Stopped
from ckptfix.operations.migrate.hashing import damaged
from ckptfix.operations.migrate.planning import MigrationPlan, PlannedModel
from ckptfix.operations.sealing.contents import lasting_label
from ckptfix.storage.paths import command
from ckptfix.storage.pieces import OpenFiles, Piece, page_buffer
from ckptfix.weights.stored import Weights
from ckptfix.wording import count_of

_BLOCK = 1 << 20


class Recorded:
    """What the manifest beside a source says: tensor -> digest, of each model, and file -> sha256."""

    def __init__(self, plan: MigrationPlan) -> None:
        manifest = _manifest(plan.source.root)
        self._plan = plan
        self._sha256 = dict(manifest.sha256) if manifest is not None else {}
        by_label = {entry.file: entry.digests for entry in manifest.models} if manifest is not None else {}
        self._digests = tuple(
            dict(_by_new_name(old, model, by_label.get(lasting_label(old, plan.source.root), {})))
            for old, model in zip(plan.source.weights, plan.models, strict=True)
        )

    @property
    def has_digests(self) -> bool:
        """Whether it says anything of a tensor that is migrated."""
        return any(self._digests)

    def not_checked(self) -> Iterator[str]:
        """Yield in words what it speaks of and is not compared."""
        converted = sum(
            model.sources[name].convert is not None
            for model, recorded in zip(self._plan.models, self._digests, strict=True)
            for name in recorded
        )
        if converted:
            yield (
                f"that {count_of(converted, 'tensor')} whose dtype changes were as their manifest says; next: "
                f"{command('verify', self._plan.source.root)}"
            )

    def compare(self, digests: tuple[Mapping[str, str], ...]) -> None:
        """Raise OperationError naming a tensor that was read and is not what was recorded."""
        for model, recorded, read in zip(self._plan.models, self._digests, digests, strict=True):
            for name, (old, digest) in recorded.items():
                if model.sources[name].convert is None and read[name] != digest:
                    self._raise(f"{model.label}: {old!r}")

    def compare_file(self, name: str, sha256: str) -> None:
        """Raise OperationError when a file that was carried over is not what was recorded."""
        if self._sha256.get(name, sha256) != sha256:
            self._raise(name)

    def speaks_of(self, name: str) -> bool:
        """Whether it has the sha256 of a file."""
        return name in self._sha256

    def _raise(self, what: str) -> None:
        root = self._plan.source.root
        raise OperationError(
            f"{root}: {what} has other bytes than its manifest says: damaged, or changed since; nothing was written; "
            f"next: {command('verify', root)}, or, if it is as it should be: {command('seal', root, '', '--force')}"
        )


def _manifest(root: Path) -> Manifest | None:
    try:
        return read_manifest(root)
    except (FormatError, OSError):
        return None  # the receipt says so


def _by_new_name(
    old: Weights, model: PlannedModel, recorded: Mapping[str, str]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield new name -> old name and digest, of each tensor that the manifest speaks of; their order stays."""
    for before, after in zip(old.tensors, model.weights.tensors, strict=False) if recorded else ():
        if before.fqn in recorded:
            yield after.fqn, (before.fqn, recorded[before.fqn])


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
