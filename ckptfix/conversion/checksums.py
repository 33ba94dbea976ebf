"""Checksums and digests that are taken of the source's bytes on their way into new files, so that
none is read twice.

They are known by where the bytes are: what a writer calls them plays no part.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from ckptfix.errors import OperationError
from ckptfix.storage.files import AnyPath
from ckptfix.storage.paths import command
from ckptfix.storage.reading import Piece
from ckptfix.tensors.joined import Joined, Zeros
from ckptfix.tensors.stored import Contiguous, Layout, StoredTensor, digest_head


class Mark(NamedTuple):
    """The bytes of a source in which a wanted tensor lies, and its number among those wanted."""

    begin: int
    end: int
    number: int
    tensor: StoredTensor


class Digests:
    """Digests of tensors of the source, taken of their bytes on the way into new files.

    A tensor is known by its dtype, its shape and where its bytes are, as its own reader gives them:
    what a writer calls it plays no part. ``wanted``: without names. A tensor that no file takes in
    one stretch is not found.
    """

    def __init__(self, wanted: Iterable[StoredTensor]) -> None:
        # Tensors are numbered, as the hash of one is that of all of its pieces, and every look-up
        # takes it anew.
        self._numbers: dict[StoredTensor, int] = {}
        self._by_layout: dict[Layout, list[tuple[int, StoredTensor]]] = {}
        self._by_piece: dict[Piece, list[tuple[int, StoredTensor]]] = {}
        self._found: list[str] = []
        self._order: list[int] | None = None
        for one in wanted:
            number = self._numbers.setdefault(one, len(self._found))
            if number < len(self._found):
                continue
            self._found.append("")
            if not one.nbytes:
                self.add(one, hashlib.sha256(digest_head(one.dtype, one.shape)).hexdigest())
            elif isinstance(one.layout, Contiguous):
                self._by_piece.setdefault(one.layout.pieces[0], []).append((number, one))
            else:
                self._by_layout.setdefault(one.layout, []).append((number, one))

    def add(self, tensor: StoredTensor, digest: str) -> None:
        """Note the digest of a wanted tensor."""
        self._found[self._numbers[tensor]] = digest

    def passed(self, mark: Mark, digest: str) -> None:
        """Note the digest of the tensor of a mark; any thread may."""
        self._found[mark.number] = digest

    def of(self, tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
        """Return name -> digest of those tensors that were found."""
        numbers = {name: self._numbers.get(one._replace(fqn="")) for name, one in tensors.items()}
        return {
            name: self._found[number]
            for name, number in numbers.items()
            if number is not None and self._found[number]
        }

    def found(self, marks: Iterable[Mark]) -> list[tuple[int, str]]:
        """Return the digests of marks that have passed, by the place of each tensor, the same in
        every process.

        The order of ``wanted`` can differ, as sets went into it.
        """
        places = {number: place for place, number in enumerate(self._in_place())}
        return [(places[mark.number], self._found[mark.number]) for mark in marks]

    def take(self, found: Iterable[Sequence[Any]]) -> None:
        """Take what another process has found."""
        numbers = self._in_place()
        for place, digest in found:
            self._found[numbers[place]] = digest

    def _in_place(self) -> list[int]:
        if self._order is None:
            self._order = [self._numbers[one] for one in sorted(self._numbers, key=_place)]
        return self._order

    def marks(self, source: StoredTensor) -> list[Mark]:
        """Return the wanted tensors, not found so far, that lie complete in another one, by their
        first bytes.
        """
        if not self._numbers or not source.nbytes:
            return []
        if not isinstance(source.layout, Contiguous | Joined):
            number = self._numbers.get(source)
            return (
                []
                if number is None or self._found[number]
                else [Mark(0, source.nbytes, number, source)]
            )
        return sorted(self._inside(source.layout), key=lambda mark: mark.begin)

    def _inside(self, layout: Contiguous | Joined, start: int = 0) -> Iterator[Mark]:
        if isinstance(layout, Contiguous):
            pieces = layout.pieces
            begins = accumulate((piece.length for piece in pieces), initial=start)
            for at, (piece, begin) in enumerate(zip(pieces, begins, strict=False)):
                for number, one in self._by_piece.get(piece, ()):
                    assert isinstance(one.layout, Contiguous)
                    mine = one.layout.pieces
                    if not self._found[number] and pieces[at : at + len(mine)] == mine:
                        yield Mark(begin, begin + one.nbytes, number, one)
            return
        for part in layout.parts:
            if isinstance(part, Zeros):
                start += part.length
                continue
            inner, begin, end = part
            if isinstance(inner, Contiguous | Joined) and begin == 0:
                yield from (mark for mark in self._inside(inner, start) if mark.end <= start + end)
            for number, one in self._by_layout.get(inner, ()):
                if not self._found[number] and (begin, end) == (0, one.nbytes):
                    yield Mark(start, start + end, number, one)
            start += end - begin


def _place(tensor: StoredTensor) -> tuple[str, tuple[int, ...], str]:
    """Return what puts tensors into the same order in every process."""
    return tensor.dtype, tensor.shape, repr(tensor.layout)


class Checksums:
    """The CRC-32 of the records of the source's archives, compared with the bytes that pass.

    ``with_parts``: also note the CRC-32 of parts of records, of which ``left`` gives what is to be
    read yet.
    """

    def __init__(self, records: Mapping[Piece, int], *, with_parts: bool = False) -> None:
        self._left = dict(records)
        self._records = records
        self._numbers: dict[Piece, int] = {}
        self._parts: dict[Piece, dict[int, Part]] = {}
        self._in_file: dict[AnyPath, list[Piece]] = {}
        for record in sorted(records, key=lambda one: one.offset) if with_parts else ():
            self._in_file.setdefault(record.path, []).append(record)

    def record(self, piece: Piece) -> Piece | None:
        """Return the record that a piece is, or is a part of, None where its CRC-32 is of no
        use.
        """
        if piece in self._records:
            return piece
        others = self._in_file.get(piece.path, [])
        number = bisect_right(others, piece.offset, key=lambda one: one.offset) - 1
        if (
            number >= 0
            and piece.offset + piece.length <= others[number].offset + others[number].length
        ):
            return others[number]
        return None

    def passed(self, piece: Piece, crc: int, fqn: str = "") -> None:
        """Note the CRC-32 of a piece. Raises OperationError for a record that has another one; any
        thread may.
        """
        record = self.record(piece)
        if record == piece:
            if crc != self._records[piece]:
                raise damaged(piece, crc, self._records[piece], fqn)
            self._left.pop(piece, None)
        elif record is not None:
            parts = self._parts.setdefault(record, {})
            known = parts.get(piece.offset)
            if known is None or known.length < piece.length:
                parts[piece.offset] = Part(piece.length, crc)

    def found(
        self, passed: Iterable[tuple[Piece, int]]
    ) -> list[tuple[int, list[tuple[int, int, int]]]]:
        """Return the records of which pieces have passed, by number, with offset, length and CRC-32
        of their parts.

        A record that has passed complete has no parts.
        """
        found: list[tuple[int, list[tuple[int, int, int]]]] = []
        for piece, crc in passed:
            record = self.record(piece)
            if record is not None:
                part = [] if record == piece else [(piece.offset, piece.length, crc)]
                found.append((self._number(record), part))
        return found

    def _number(self, record: Piece) -> int:
        if not self._numbers:
            self._numbers.update((one, number) for number, one in enumerate(sorted(self._records)))
        return self._numbers[record]

    def take(self, found: Iterable[Sequence[Any]]) -> None:
        """Take what another process has found."""
        records = sorted(self._records)
        for number, parts in found:
            if not parts:
                self._left.pop(records[number], None)
            for offset, length, crc in parts:
                known = self._parts.setdefault(records[number], {})
                if offset not in known or known[offset].length < length:
                    known[offset] = Part(length, crc)

    def left(self) -> Iterator[tuple[Piece, int, Mapping[int, "Part"]]]:
        """Yield the records that did not pass complete, their CRC-32, and offset -> the part that
        passed.
        """
        for record, crc in self._left.items():
            yield record, crc, self._parts.get(record, {})


class Part(NamedTuple):
    """Bytes of a record, of this CRC-32."""

    length: int
    crc: int


def damaged(piece: Piece, found: int, written: int, fqn: str = "") -> OperationError:
    """Return the error about a piece of a file that does not match its recorded CRC-32."""
    what = repr(fqn) if fqn else f"the record at byte {piece.offset}"
    return OperationError(
        f"{piece.path}: CRC-32 mismatch in {what} (expected {written:08x}, found {found:08x}): the "
        f"file is damaged; next, to recover what is intact: {command('salvage', piece.path)} "
        "NEW_FOLDER"
    )


_POLYNOMIAL = 0xEDB88320
"""Of CRC-32, its bits in reverse, as zlib has it."""


def combined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two runs of bytes, one behind the other, by theirs. ``length``: of the
    second.
    """
    return _product(_shift(length), first) ^ second


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """Return x to the power of the bits in ``length`` bytes, modulo the polynomial."""
    power, bit = 1 << 31, 3
    while length:
        if length & 1:
            power = _product(_square(bit), power)
        length, bit = length >> 1, bit + 1
    return power


@cache
def _square(bit: int) -> int:
    """Return x to the power of 2**bit, modulo the polynomial."""
    return _product(_square(bit - 1), _square(bit - 1)) if bit else 1 << 30


def _product(one: int, other: int) -> int:
    """Return the product of two polynomials of CRC-32, as ``multmodp`` of zlib's ``crc32.c``
    does.
    """
    product = 0
    for place in range(31, -1, -1):
        if one >> place & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product
