"""Objects that a store makes of parts: new bytes, and ranges of other objects that it copies by
itself.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ckptfix.errors import ChangedError
from ckptfix.storage.parallel import Progress
from ckptfix.storage.stores import (
    Abilities,
    Expected,
    ObjectInfo,
    ObjectRange,
    Piece,
    Refused,
    Store,
    together,
)

MIB = 1 << 20
_PART = 16 * MIB
"""Bytes of an uploaded part, unless the most parts of an object would not hold it."""

_COPIED = 1 << 30
"""Bytes of a copied part, unless the most parts of an object would not hold it: a store answers
within seconds.
"""

_PARTS_AT_ONCE = 8

MARK = "ckptfix"
"""Name of the user metadata that holds the mark of an object."""


class Part(NamedTuple):
    """One part of an object: a range that the store copies, or pieces that travel through this
    machine.
    """

    pieces: tuple[Piece, ...]
    is_copied: bool

    @property
    def length(self) -> int:
        """Its size in bytes."""
        return sum(map(_length, self.pieces))


class Upload(NamedTuple):
    """An object that is being made of parts. ``name``: what tells it from any other; ``words``: its
    properties.
    """

    key: str
    name: str
    words: Mapping[str, Any]


class ComposingStore(Store):
    """A store that makes an object of parts, complete or not at all, and copies ranges of others
    into them.
    """

    # Requests of such a store: a subclass has them.

    def _put_whole(self, key: str, data: bytes, expected: str | Expected) -> str:
        """Write an object, and return its ETag."""
        raise NotImplementedError

    def _begin(self, key: str, words: Mapping[str, Any]) -> Upload:
        raise NotImplementedError

    def _put_part(self, upload: Upload, number: int, data: bytes) -> str:
        """Send a part, and return the name by which ``_complete`` lists it."""
        raise NotImplementedError

    def _copy_part(self, upload: Upload, number: int, copied: ObjectRange) -> str:
        """Have the store copy a part. Raises Refused for another ETag, FileNotFoundError without an
        object.
        """
        raise NotImplementedError

    def _complete(self, upload: Upload, parts: Sequence[str], expected: str | Expected) -> str:
        """Put the parts together, and return the ETag of the object.

        An earlier attempt whose answer was lost is not a failure, and then the ETag is "".
        """
        raise NotImplementedError

    def _abort(self, upload: Upload) -> None:
        """Forget the parts of an upload that failed, where the store does not do so by itself."""

    def _words_of(self, like: str | None, mark: str) -> dict[str, Any]:
        """Return the properties of a new object: those that another one passes on, and its mark."""
        raise NotImplementedError

    # What they make.

    def _put(self, key: str, data: bytes, expected: str | Expected) -> ObjectInfo:
        try:
            etag = self._put_whole(key, data, expected)
        except Exception as error:
            # An earlier attempt may have arrived, whose answer was lost: then our own object is
            # what is there. Its bytes say so: not every ETag is a digest.
            if (
                not isinstance(self._judge(error), Refused)
                or (now := self._stat(key)) is None
                or now.size != len(data)
                or (data and self._read(key, 0, now.size, now.etag) != data)
            ):
                raise
            return now
        return self._written(key, len(data), etag)

    def _upload(
        self, key: str, path: Path, expected: str | Expected, progress: Progress | None
    ) -> ObjectInfo:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _PART:
                data = file.read()
                answer = self._put(key, data, expected)
                if progress:
                    progress(len(data))
                return answer
            step = max(_PART, -(-size // self.abilities.most_parts))

            def send(number: int, upload: Upload) -> str:
                begin = number * step
                length = min(step, size - begin)
                data = os.pread(file.fileno(), length, begin)
                if len(data) != length:
                    raise ChangedError(f"{path}: it became shorter while it was uploaded")
                name = self._persist(key, lambda: self._put_part(upload, number, data))
                if progress:
                    progress(length)
                return name

            return self._in_parts(key, size, -(-size // step), send, expected, {})

    def _compose(
        self,
        key: str,
        pieces: Sequence[Piece],
        expected: str | Expected,
        like: str | None,
        mark: str,
    ) -> ObjectInfo:
        parts = plan_parts(pieces, self.abilities)
        words = self._words_of(like, mark)

        def send(number: int, upload: Upload) -> str:
            part = parts[number]
            if not part.is_copied:
                data = b"".join(map(self._bytes_of, part.pieces))
                return self._persist(key, lambda: self._put_part(upload, number, data))
            [copied] = part.pieces
            assert isinstance(copied, ObjectRange)
            try:
                return self._persist(
                    key, lambda: self._copy_part(upload, number, copied), has_condition=True
                )
            except Refused:
                raise self._changed(copied.key, copied.etag, "while it was copied") from None
            except FileNotFoundError:
                raise ChangedError(
                    f"{self.name(copied.key)}: it was deleted while it was copied; next: run the "
                    "same command again"
                ) from None

        if len(parts) == 1 and not parts[0].is_copied and not words:
            return self._put(key, b"".join(map(self._bytes_of, parts[0].pieces)), expected)
        return self._in_parts(
            key, sum(part.length for part in parts), len(parts), send, expected, words
        )

    def _in_parts(
        self, key: str, size: int, count: int, send: Callable[[int, Upload], str],
        expected: str | Expected, words: Mapping[str, Any],
    ) -> ObjectInfo:  # fmt: skip
        """Write an object of parts, which ``send`` sends; the upload is aborted where one fails."""
        upload = self._persist(key, lambda: self._begin(key, words))
        parts = [""] * count
        try:

            def one(number: int) -> None:
                parts[number] = send(number, upload)

            together(range(count), one, _PARTS_AT_ONCE)
            etag = self._complete(upload, parts, expected)
        except BaseException:
            # Parts that stay behind cost money, and nobody sees them. The error that led here is
            # the one to report.
            with suppress(Exception):
                self._persist(key, lambda: self._abort(upload))
            raise
        return self._written(key, size, etag)

    def _bytes_of(self, piece: Piece) -> bytes:
        if isinstance(piece, bytes):
            return piece
        return self.read(piece.key, piece.offset, piece.length, etag=piece.etag or None)


def plan_parts(pieces: Sequence[Piece], abilities: Abilities) -> list[Part]:
    """Return the parts of an object, none but the last smaller than the store allows; few bytes
    travel.

    A range that follows less than a part of new bytes gives its first bytes to that part. Parts are
    as few as 10,000 of them hold.
    """
    pieces = [piece for piece in pieces if _length(piece)]
    total = sum(map(_length, pieces))
    least, most = abilities.least_part, abilities.most_parts // 2
    copied = min(max(_COPIED, -(-total // most)), abilities.most_copied)
    sent = max(_PART, -(-total // most))
    parts: list[Part] = []
    waiting: list[Piece] = []
    held = 0

    def flush() -> None:
        nonlocal held
        if waiting:
            parts.append(Part(tuple(waiting), is_copied=False))
            waiting.clear()
            held = 0

    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        rest: Piece | None = piece
        while rest is not None:
            length = _length(rest)
            can_copy = isinstance(rest, ObjectRange) and (held == 0 or held >= least)
            if can_copy and (length >= least or (is_last and (parts or held))):
                flush()
                take = length if length <= copied else copied
                if take < length and length - take < least and not is_last:
                    take = length - least  # what is left must be a part, too
                first, rest = _cut(rest, take)
                parts.append(Part((first,), is_copied=True))
                continue
            # to the bytes that travel: up to the smallest part before a range, and up to a full
            # part of new bytes
            wanted = (
                least - held
                if isinstance(rest, ObjectRange) and 0 < least - held <= length - least
                else sent - held
            )
            first, rest = _cut(rest, min(length, wanted))
            waiting.append(first)
            held += _length(first)
            if held >= sent:
                flush()
    flush()
    return parts or [Part((), is_copied=False)]


def _cut(piece: Piece, length: int) -> tuple[Piece, Piece | None]:
    if length == _length(piece):
        return piece, None
    if isinstance(piece, bytes):
        return piece[:length], piece[length:]
    return piece._replace(length=length), piece._replace(
        offset=piece.offset + length, length=piece.length - length
    )


def _length(piece: Piece) -> int:
    return len(piece) if isinstance(piece, bytes) else piece.length
