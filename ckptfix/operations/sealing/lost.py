"""Which zeros inside of a tensor were lost on the way to the disk, and which a model honestly has."""

from enum import Enum
from math import prod
from typing import TYPE_CHECKING

from ckptfix.errors import ChangedError
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.storage.pieces import OpenFiles, Piece
from ckptfix.weights.layouts import Contiguous
from ckptfix.weights.stored import StoredTensor

if TYPE_CHECKING:
    from ckptfix.weights.elements.pages import ZeroRun

_NEAR = 16
"""Bytes beside a run of zeros that tell whether the zeros go on, as in a row that is zero, or a page ends there."""


class Lost(Enum):
    """How zeros show that they were not written. The value goes on after "zeros that"."""

    PAGES = "begin and end with a page of the disk"
    ROWS = "begin inside of one row and fill others"
    END = "fill it from there to its end"


def lost(tensor: StoredTensor, run: "ZeroRun", files: OpenFiles, may_be_zero: bool) -> Lost | None:
    """Say how a run of zero pages shows that its bytes were lost; None for zeros that a model may have.

    ``may_be_zero``: a tensor of that name and dtype honestly is zero as a whole in many models.
    """
    try:
        if _is_torn(tensor, run, files, may_be_zero):
            return Lost.PAGES
        return _is_cut(tensor, run, files, may_be_zero)
    except (OSError, ChangedError):
        return None


def _is_torn(tensor: StoredTensor, run: "ZeroRun", files: OpenFiles, may_be_zero: bool) -> bool:
    """Whether zeros end where a page ends, as in a page that was never written. An honest row of zeros goes beyond.

    Where the tensor, or its part in that file, begins or ends inside of a page, its zeros reach that far.
    """
    from ckptfix.weights.elements.pages import PAGE

    piece, begin, end = run
    rest = piece.length - end
    before = _read(files, piece, 0 if begin < PAGE else begin - _NEAR, begin)
    after = _read(files, piece, end, end + (rest if rest < PAGE else _NEAR))
    from_start = begin < PAGE and not any(before)
    to_end = rest < PAGE and not any(after)
    if from_start and to_end:
        return not may_be_zero  # all that one file holds of it
    row = tensor.nbytes // tensor.shape[0] if len(tensor.shape) > 1 else 0
    if from_start and row >= PAGE and end % row == 0 and any(after[:1]):
        return False  # the first rows, as that of a padding token, in a tensor that begins where a page does
    return (from_start or any(before[-_NEAR:])) and (to_end or any(after[:_NEAR]))


def _is_cut(tensor: StoredTensor, run: "ZeroRun", files: OpenFiles, may_be_zero: bool) -> Lost | None:
    """Say whether zeros begin or end where no row does, as those of a cut file that was made long again.

    Rows that are zero begin and end as rows; columns that are zero are zero in the row above, too.
    """
    layout = tensor.layout
    if not isinstance(layout, Contiguous) or layout.pieces != (run.piece,) or may_be_zero:
        return None
    width = max(1, DTYPE_BITS[tensor.dtype] // 8)
    row = width * prod(tensor.shape[-1:])
    begin, end = _exact(files, run, width)
    if begin == 0:
        return None
    if len(tensor.shape) < 2 or row == tensor.nbytes:
        return Lost.END if end == tensor.nbytes else None
    if end - begin < 2 * row or begin % row == 0 or (end % row == 0 and end != tensor.nbytes):
        return None  # less than one whole row, or what rows are made of
    above = max(0, begin - row)
    left = begin // row * row  # the end of the row above
    return Lost.ROWS if any(_read(files, run.piece, above, left)) else None


def _exact(files: OpenFiles, run: "ZeroRun", width: int) -> tuple[int, int]:
    """Return where the zeros around a run of zero pages begin and end, in bytes of the piece, in whole elements."""
    from ckptfix.weights.elements.pages import PAGE

    piece, begin, end = run
    before = _read(files, piece, max(0, begin - PAGE), begin)
    after = _read(files, piece, end, min(piece.length, end + PAGE))
    begin -= len(before) - len(before.rstrip(b"\0"))
    end += len(after) - len(after.lstrip(b"\0"))
    return -(-begin // width) * width, end // width * width


def _read(files: OpenFiles, piece: Piece, begin: int, end: int) -> bytes:
    data = bytearray(end - begin)
    if data:
        files.fill(memoryview(data), piece.path, piece.offset + begin)
    return bytes(data)
