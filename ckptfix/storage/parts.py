"""Parts that S3 makes an object of: new bytes, and ranges of other objects that it copies by itself."""

from collections.abc import Sequence
from typing import NamedTuple

from ckptfix.storage.stores import Abilities, ObjectRange, Piece

MIB = 1 << 20
PART = 16 * MIB
"""Bytes of an uploaded part, unless the most parts of an object would not hold it."""

_COPIED = 1 << 30
"""Bytes of a copied part, unless the most parts of an object would not hold it: a store answers
within seconds.
"""

MARK = "ckptfix"
"""Name of the user metadata that holds the mark of an object."""


class Part(NamedTuple):
    """One part: a range that the store copies, or pieces that travel through here."""

    pieces: tuple[Piece, ...]
    is_copied: bool

    @property
    def length(self) -> int:
        """Its size in bytes."""
        return sum(map(_length, self.pieces))


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
    sent = max(PART, -(-total // most))
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
