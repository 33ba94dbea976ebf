"""Find pages of a file that hold nothing but zeros, inside the pieces that hold a tensor."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from ckptfix.storage.pieces import Piece

PAGE = 4096
"""Bytes that a file system writes, and loses, together."""

MOST_RUNS = 1000
"""Runs of zero pages that are remembered; more are counted only."""


class ZeroRun(NamedTuple):
    """Pages of zeros that follow each other in a piece of a file, from ``begin`` to ``end`` in bytes of the piece."""

    piece: Piece
    begin: int
    end: int


class PageSearch:
    """Takes the bytes of pieces, one after the other, in blocks of any length.

    ``pages``: how many pages of their files lie inside of a piece and are zero; ``runs``: where, the first 1000 runs.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pages = 0
        self.runs: list[ZeroRun] = []
        self._pieces = pieces
        self._number = 0
        self._done = 0
        self._is_open = False

    def feed(self, data: Any) -> None:
        """Look at the next bytes, an array of them."""
        while len(data) and self._number < len(self._pieces):
            left = self._pieces[self._number].length - self._done
            self._look(data[:left])
            data = data[left:]
            if self._done == self._pieces[self._number].length:
                self._number, self._done, self._is_open = self._number + 1, 0, False

    def _look(self, data: Any) -> None:
        """Find the pages of zeros that end in this part of a piece; one that is under way goes on in the next."""
        begin = self._done
        self._done += len(data)
        phase = (self._pieces[self._number].offset + begin) % PAGE
        skip = -phase % PAGE
        if phase:
            head = data[:skip]
            self._is_open = self._is_open and not head.any()
            if len(head) < skip:
                return
            if self._is_open:
                self._add(begin + skip - PAGE)
        pages = data[skip : skip + (len(data) - skip) // PAGE * PAGE].reshape(-1, PAGE)
        # Three bytes of a page say no at once for all but one in 16 million of random ones.
        likely = numpy.flatnonzero((pages[:, 0] | pages[:, PAGE // 2] | pages[:, -1]) == 0)
        for number in likely:
            if not pages[number].any():
                self._add(begin + skip + int(number) * PAGE)
        rest = data[skip + pages.size :]
        self._is_open = len(rest) > 0 and not rest.any()

    def _add(self, begin: int) -> None:
        self.pages += 1
        piece, last = self._pieces[self._number], self.runs[-1] if self.runs else None
        if last is not None and last.end == begin and last.piece is piece:
            self.runs[-1] = ZeroRun(piece, last.begin, begin + PAGE)
        elif len(self.runs) < MOST_RUNS:
            self.runs.append(ZeroRun(piece, begin, begin + PAGE))
