"""Digests and checksums of the tensors in a file, taken while its bytes go by."""

import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

from ckptfix.errors import OperationError
from ckptfix.operations.migrate.filling import Source
from ckptfix.storage.paths import command
from ckptfix.storage.pieces import Piece
from ckptfix.weights.digests import digest_head
from ckptfix.weights.files.parts import Computed, Data, OutputFile


class Hasher:
    """Takes the bytes of a file from its beginning to its end, and fills in what is computed from them.

    ``digests``: tensor name -> digest, of those whose bytes have all gone by. ``sources``: by the names in the parts.
    ``with_sha256``: of the whole file, too. A CRC-32 that a source has is always compared.
    """

    def __init__(
        self, file: OutputFile, sources: Mapping[str, Source], *, with_digests: bool, with_sha256: bool
    ) -> None:
        self.digests: dict[str, str] = {}
        self._parts = file.parts
        self._needs_crc = file.needs_crc
        self._sources = sources
        self._with_digests = with_digests
        self._crcs: dict[str, int] = {}
        self._crc = 0
        self._digest: Any = None
        self._made = b""
        self._whole = hashlib.sha256() if with_sha256 else None

    def take(self, number: int, view: memoryview, done: int) -> None:
        """Take bytes of part ``number``, of which ``done`` went by before; for a computed part, write them.

        Raises OperationError when what is computed has another length than was planned, or the source is damaged.
        """
        part = self._parts[number]
        if isinstance(part, Data):
            self._take_tensor(part, view, done)
        elif isinstance(part, Computed):
            if done == 0:
                self._made = part.make(self._crcs)
                if len(self._made) != part.length:
                    raise OperationError(f"{part.length} bytes were planned, {len(self._made)} were made")
            view[:] = self._made[done : done + len(view)]
        if self._whole is not None:
            self._whole.update(view)

    @property
    def sha256(self) -> str:
        """The sha256 of what has gone by, "" when it was not asked for."""
        return self._whole.hexdigest() if self._whole is not None else ""

    def _take_tensor(self, part: Data, view: memoryview, done: int) -> None:
        is_last = done + len(view) == part.length
        source = self._sources[part.fqn]
        if self._needs_crc or source.crc is not None:
            self._crc = zlib.crc32(view, self._crc if done else 0)
            if is_last:
                self._crcs[part.fqn] = self._crc
                check_crc(source, self._crc)
        if not self._with_digests:
            return
        if done == 0:
            self._digest = hashlib.sha256(digest_head(source.new.dtype, source.new.shape))
        self._digest.update(view)
        if is_last:
            self.digests[part.fqn] = self._digest.hexdigest()


def check_crc(source: Source, found: int) -> None:
    """Raise OperationError when the bytes of a tensor have another CRC-32 than its old file says."""
    if source.crc is not None and source.crc != found and (piece := source.piece) is not None:
        raise damaged(piece, found, source.crc, source.stored.fqn)


def damaged(piece: Piece, found: int, written: int, fqn: str = "") -> OperationError:
    """Return the error of a stretch of a file that has another CRC-32 than was written with it."""
    what = repr(fqn) if fqn else f"the record at byte {piece.offset}"
    return OperationError(
        f"{piece.path}: {what} has the CRC-32 {found:08x}, {written:08x} was written: the file is damaged; next, to "
        f"recover what is intact: {command('salvage', piece.path)} NEW_FOLDER"
    )
