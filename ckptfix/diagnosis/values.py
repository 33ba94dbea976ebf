"""Damage in the values of tensors: NaN, Inf, weights of zeros, lost pages, a LoRA that was never
trained.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from functools import cache
from math import prod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from msgspec import Struct

from ckptfix.checkpoint.dcp import scan_dcp_folders
from ckptfix.checkpoint.folder import PLAIN_FOLDER, Component, scan_folder
from ckptfix.checkpoint.folder_names import parse_folder_name
from ckptfix.checkpoint.keys import is_flat_name
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.trainer_folders import trainer_progress
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.errors import ChangedError
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_file import TorchFile
from ckptfix.reports import Serialized
from ckptfix.storage.files import AnyPath, absolute, stat_of
from ckptfix.storage.reading import OpenFiles, Piece
from ckptfix.tensors.hashing import Hashed
from ckptfix.tensors.stored import Contiguous, StoredTensor
from ckptfix.wording import count_of, human_size, layer_of, list_names

if TYPE_CHECKING:
    from ckptfix.tensors.scanning import Scan, ZeroRun


_NEAR = 16
"""Bytes next to a run of zeros that show if the zeros go on, as in a row of zeros, or if a page
ends there.
"""


class _Lost(Enum):
    """Signs that zeros were never written. The value continues the words "zeros that"."""

    PAGES = "start and end on disk page boundaries"
    ROWS = "start inside a row and fill other rows"
    END = "fill the rest of the tensor"


def _lost(
    tensor: StoredTensor, run: "ZeroRun", files: OpenFiles, may_be_zero: bool
) -> _Lost | None:
    """Return the sign that a run of zero pages was lost; None for zeros that a model may have.

    ``may_be_zero``: a tensor of that key and dtype is intentionally all zero in many models.
    """
    try:
        if _is_torn(tensor, run, files, may_be_zero):
            return _Lost.PAGES
        return _is_cut(tensor, run, files, may_be_zero)
    except (OSError, ChangedError):
        return None


def _is_torn(tensor: StoredTensor, run: "ZeroRun", files: OpenFiles, may_be_zero: bool) -> bool:
    """Return whether zeros end where a page ends, as in a page that was never written.

    An intentional row of zeros goes beyond. Where the tensor, or its part in that file, begins or
    ends inside of a page, its zeros reach that far.
    """
    from ckptfix.tensors.scanning import PAGE

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
        # The first rows, as that of a padding token, in a tensor that begins where a page does.
        return False
    if to_end and row and row % PAGE == 0 == begin % row:
        # The last rows, as those of a padded vocabulary, in a tensor whose rows begin where pages do.
        return False
    return (from_start or any(before[-_NEAR:])) and (to_end or any(after[:_NEAR]))


def _is_cut(
    tensor: StoredTensor, run: "ZeroRun", files: OpenFiles, may_be_zero: bool
) -> _Lost | None:
    """Say whether zeros begin or end where no row does, as those of a cut file that was made long
    again.

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
        return _Lost.END if end == tensor.nbytes else None
    if end - begin < 2 * row or begin % row == 0 or (end % row == 0 and end != tensor.nbytes):
        return None  # less than one whole row, or what rows are made of
    above = max(0, begin - row)
    left = begin // row * row  # the end of the row above
    return _Lost.ROWS if any(_read(files, run.piece, above, left)) else None


_LEAST_TAIL = 16
"""Elements: fewer zeros at the end of a tensor may be values, as of a weight that was pruned."""

_MOST_BEFORE = 1 << 16
"""Bytes before a tail that are looked at."""


_TABLE = re.compile(
    r"emb|wpe|wte|pos|tok|vocab|shared|decoder|table|book|memory|bank|queue|buffer|proto|cent|lora"
    r"|(?<![^\W_])(heads?|output\w*|classifier|predictions?|score)(?![^\W_])",
    re.IGNORECASE,
)
"""In the key of a tensor whose last rows may have no use: those of tokens, positions or classes
that do not exist, or of a memory that is not full.
"""


class _Tail(NamedTuple):
    """Zeros at the end of a tensor: ``size`` bytes, from byte ``begin`` of it.

    ``after``: tensors behind it in its file, which are all zero.
    """

    begin: int
    size: int
    after: int


def _lost_tails(
    tensors: Sequence[tuple[StoredTensor, Hashed]], files: OpenFiles
) -> Iterator[tuple[str, _Tail]]:
    """Yield the tensors in which the zeros begin that go on to the end of the file, as where its
    last bytes were lost.

    Each zero tensor behind it may be meant, such as a bias; zeros inside of its last row are not.
    Complete rows of zeros are judged by their number, where the file itself ends with them.
    """
    of_files: dict[AnyPath, list[tuple[StoredTensor, Piece, Scan]]] = {}
    for tensor, hashed in tensors:
        pieces = tensor.layout.pieces if isinstance(tensor.layout, Contiguous) else ()
        if len(pieces) == 1 and hashed.scan is not None and pieces[0].length:
            of_files.setdefault(pieces[0].path, []).append((tensor, pieces[0], hashed.scan))
    for inside in of_files.values():
        inside.sort(key=lambda each: each[1].offset)
        place = next((at for at in reversed(range(len(inside))) if not inside[at][2].is_zero), None)
        if place is None:
            continue
        tensor, piece, scan = inside[place]
        after = [each[0] for each in inside[place + 1 :]]
        last = inside[-1][1]
        if not _must_not_be_zero(tensor) or _is_mask(tensor.fqn):
            continue
        with suppress(OSError, ChangedError):
            is_end = last.offset + last.length == stat_of(last.path).st_size
            is_followed = any(map(_must_not_be_zero, after))
            begin = _tail_in(tensor, piece, scan, files, is_followed, is_end)
            if begin is not None:
                yield tensor.fqn, _Tail(begin, piece.length - begin, len(after))


def _tail_in(
    tensor: StoredTensor,
    piece: Piece,
    scan: "Scan",
    files: OpenFiles,
    is_followed: bool,
    is_end: bool,
) -> int | None:
    """Return where the zeros at the end of a tensor begin, None where they may be values of a
    model.

    ``is_followed``: by a tensor of zeros that no model means. Without it, a vector may be padded.
    ``is_end``: the zeros reach the end of the file.
    """
    from ckptfix.tensors.scanning import PAGE

    width = max(1, DTYPE_BITS[tensor.dtype] // 8)
    runs = scan.zero_runs or ()
    if runs and piece.length - runs[-1].end < PAGE:
        begin, end = _exact(files, runs[-1], width)
        if end != piece.length:
            return None
    else:
        last = _read(files, piece, max(0, piece.length - 2 * PAGE), piece.length)
        begin = -(-(piece.length - len(last) + len(last.rstrip(b"\0"))) // width) * width
    size = piece.length - begin
    lengths = [length for length in tensor.shape if length > 1] or [1]
    row = width * lengths[-1]
    is_flat = len(lengths) < 2 or begin < row
    if (
        size < _LEAST_TAIL * width
        or (is_flat and not is_followed)
        or (
            not is_flat
            and begin % row == 0
            and not (is_end and _are_lost_rows(tensor, piece, begin, row, is_followed))
        )
    ):
        return None
    before = _read(files, piece, max(0, begin - min(size, _MOST_BEFORE)), begin)
    # Columns that are zero are zero in the row above, too.
    above = b"" if is_flat else _read(files, piece, begin - row, begin // row * row)
    are_values = len(before) >= _LEAST_TAIL * width and all(
        16 * _zeros_in(data, width) <= len(data) // width for data in (before, above)
    )
    return begin if are_values else None


def _are_lost_rows(
    tensor: StoredTensor, piece: Piece, begin: int, row: int, is_followed: bool
) -> bool:
    """Return whether rows of zeros at the end of a file were lost, by where and how many they are.

    A page begins with one of 512 rows by chance. A table may have rows without a use; of other
    weights no model leaves more than half.
    """
    from ckptfix.tensors.scanning import PAGE

    if row % PAGE and (piece.offset + begin) % PAGE == 0:
        return True
    size = piece.length - begin
    is_most = size >= PAGE and 2 * size > piece.length
    return (is_most or is_followed) and _TABLE.search(tensor.fqn) is None


def _zeros_in(data: bytes, width: int) -> int:
    zero = bytes(width)
    return sum(data[at : at + width] == zero for at in range(0, len(data), width))


def _exact(files: OpenFiles, run: "ZeroRun", width: int) -> tuple[int, int]:
    """Return where the zeros around a run of zero pages begin and end, in bytes of the piece, in
    whole elements.
    """
    from ckptfix.tensors.scanning import PAGE

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


_MAY_BE_ZERO = re.compile(
    r"(bias|beta|mask|running_mean|running_var|tracked|counter|count|step|offset|zero_point|cached?|shift)",
    re.IGNORECASE,
)
"""In the last part of a name: what is zero in many sound models, as biases are at first."""

_WEIGHT = re.compile(r"q?_?weight(_packed)?|kernel", re.IGNORECASE)
"""The last part of a name: integers that are a quantised weight. Others are zero in many sound
models, as ids are.
"""

_SCALAR = 8
"""Bytes of one number: the optimizer's file may keep its learning rate as a tensor before any step.
"""

_COUNTERPARTS = 3
"""In so many other layers a tensor must have values before one of zeros is taken for lost."""

_MASK = re.compile(r"mask", re.IGNORECASE)
_SQUARES = re.compile(r"(?<![^\W_])(exp_avg_sq|square_avg)(?![^\W_])")
"""In the name of a moment whose root the next step takes: Adam's and RMSprop's, with ``max_`` and
Adafactor's ``_row`` and ``_col``.
"""
_LORA = re.compile(
    r"(^|[._])lora_?(A|B|up|down|embedding_A|embedding_B|magnitude_vector)([._]|$)", re.IGNORECASE
)
_LORA_ZERO = re.compile(r"(^|[._])lora_?(B|up|embedding_A)([._]|$)", re.IGNORECASE)
"""The matrix of the two that begins with zeros: of an embedding it is A, as PEFT has it
(``reset_lora_parameters``).
"""


_COPY = "copy the file again from its source, or resume from an older checkpoint"
ADVICE = {
    "nonfinite": (
        "resume from a checkpoint saved before the NaN or Inf appeared; if this is a copy and its "
        "source has no NaN or Inf, copy the file again"
    ),
    "large-values": (
        f"{_COPY}; if the source has these numbers too, they were saved before the copy from the "
        "device had finished, or the training diverged"
    ),
    "zero-pages": _COPY,
    "all-zero": f"{_COPY}; ignore this if the script initializes these weights to zero",
    "empty-tensor": (
        "save again with accelerator.save_state, which gathers the values of all ranks"
    ),
    "untrained-lora": (
        "check that the optimizer gets the LoRA parameters, then train and save again"
    ),
}
"""The code of a finding about values -> what to do: no repair mends values."""


class ValueFinding(Serialized, Struct, frozen=True, kw_only=True):
    """Something about the values of a model. ``fqn``: the tensor, "" when it is about several."""

    json_keys: ClassVar = "code severity model=label tensor=fqn message=__str__"

    code: str
    severity: Severity
    label: str
    fqn: str
    text: str

    def __str__(self) -> str:
        return f"{self.label}: {self.text}"


def trained_for(root: AnyPath, least: int = 0) -> int:
    """Return the steps that the weights in a folder were trained for, 1 where its optimizer does
    not count them.

    ``least``: what is known without the files.

    Many models begin with weights of zeros: the norms of Gemma, the zero convolutions of
    ControlNet. After a step they have other values. The optimizer may be next to the folder of a
    model.
    """
    from ckptfix.diagnosis.optimizer_values import trained_steps
    from ckptfix.diagnosis.saved_optimizers import saved_optimizers

    step = trainer_progress(root).step
    folder = parse_folder_name(absolute(root).name)
    if folder is not None and folder.role is Role.MODEL:
        root = absolute(root).parent
    found = scan_folder(root, wanted=lambda name: name.role is Role.OPTIMIZER)
    steps = trained_steps(root, step, tuple(saved_optimizers(found, scan_dcp_folders(found))))
    has_folder = any(
        kind != PLAIN_FOLDER
        and (name := parse_folder_name(path.name))
        and name.role is Role.OPTIMIZER
        for path, kind in found.subfolders.items()
    )
    return max(steps, least, bool(step) or has_folder or any(map(_has_moments, found.components)))


def _has_moments(component: Component) -> bool:
    """Return whether the file of an optimizer holds more than the options that it was made with, or
    cannot be read.
    """
    if not isinstance(component.content, TorchFile):
        return True
    return any(length > _SCALAR for _, length in component.content.storage_ranges.values())


def judge_values(
    label: str,
    tensors: Sequence[tuple[StoredTensor, Hashed]],
    steps: Callable[[], int] = int,
) -> Iterator[ValueFinding]:
    """Yield what is wrong with the values of one model, each tensor with its scan. Reads a few
    bytes more.

    ``steps``: as of ``trained_for``, asked for only where some are zero.
    """
    from ckptfix.diagnosis.optimizer_values import FEW_STEPS

    untrained = _untrained(tensors)
    lone = _zero_alone(tensors)
    steps = cache(steps)
    if untrained:
        text = f"the LoRA was never trained: only zeros in {list_names(untrained)}"
        severity = Severity.WARNING if steps() > FEW_STEPS else Severity.NOTE
        yield ValueFinding(code="untrained-lora", severity=severity, label=label, fqn="", text=text)
    with OpenFiles() as files:
        tails = dict(_lost_tails(tensors, files))
        for tensor, hashed in tensors:
            if hashed.scan is not None and hashed.scan.is_zero and 0 not in tensor.shape:
                if tensor.fqn not in untrained and (found := _of_zeros(tensor, lone, steps)):
                    severity, text = found
                    words = (
                        f"{tensor.fqn!r} ({tensor.dtype} {list(tensor.shape)}) is zero in every "
                        f"element{text}"
                    )
                    yield ValueFinding(
                        code="all-zero", severity=severity, label=label, fqn=tensor.fqn, text=words
                    )
                continue
            for code, severity, text in _of_one(tensor, hashed, files, tails.get(tensor.fqn)):
                words = f"{tensor.fqn!r} ({tensor.dtype} {list(tensor.shape)}) {text}"
                yield ValueFinding(
                    code=code, severity=severity, label=label, fqn=tensor.fqn, text=words
                )


def _is_mask(fqn: str) -> bool:
    """Return whether a tensor is a mask by its name: Inf and runs of zeros in it are intended, NaN
    is not.
    """
    return _MASK.search(fqn.rpartition(".")[2]) is not None


def judge_moment(label: str, tensor: StoredTensor, hashed: Hashed) -> Iterator[ValueFinding]:
    """Yield a finding where a moment, or another tensor of an optimizer, holds NaN or Inf, or will
    make it.
    """
    scan = hashed.scan
    if scan is None:
        return
    problem = _nonfinite(scan) if scan.nan or scan.inf else ""
    if not problem and scan.is_negative and _SQUARES.search(tensor.fqn):
        problem = (
            "holds negative numbers, although it is a mean of squares: its square root is NaN, and "
            "so is the weight after the next step"
        )
    if not problem and scan.is_negative and tensor.fqn.startswith("step of "):
        problem = (
            "is negative: the next step of Adam divides by 0 or takes the root of a negative number"
        )
    if problem:
        words = f"{tensor.fqn!r} ({tensor.dtype} {list(tensor.shape)}) {problem}"
        yield ValueFinding(
            code="nonfinite", severity=Severity.WARNING, label=label, fqn=tensor.fqn, text=words
        )


def _zero_alone(tensors: Sequence[tuple[StoredTensor, Hashed]]) -> dict[str, int]:
    """Return the tensors of zeros of which most other layers have one with other values -> how many
    do.
    """
    groups: dict[tuple[str, str, tuple[int, ...]], tuple[list[str], list[str]]] = {}
    for tensor, hashed in tensors:
        before, number, after = layer_of(tensor.fqn)
        # "layers.3.mlp.weight" has counterparts; those of "net.4.weight" in a Sequential are other
        # things.
        if hashed.scan is None or number is None or after.count(".") < 2:
            continue
        group = groups.setdefault((before, after, tensor.shape), ([], []))
        group[hashed.scan.is_zero].append(tensor.fqn)
    return {
        fqn: len(others)
        for others, zeros in groups.values()
        if len(others) >= _COUNTERPARTS and len(others) > len(zeros)
        for fqn in zeros
    }


def _of_zeros(
    tensor: StoredTensor, lone: dict[str, int], steps: Callable[[], int]
) -> tuple[Severity, str] | None:
    """Return how bad it is that a tensor is zero, and why; None where that is what the model's
    class makes.
    """
    from ckptfix.tensors.scanning import FLOATS

    if not _must_not_be_zero(tensor):
        return None
    if others := lone.get(tensor.fqn):
        return Severity.WARNING, f", unlike in {count_of(others, 'other layer')}"
    if tensor.dtype not in FLOATS:  # a quantised weight: no class makes one of zeros
        return Severity.WARNING, ""
    if _LORA_ZERO.search(tensor.fqn):
        return Severity.WARNING, ", but the LoRA of other layers was trained"
    if len(tensor.shape) <= 1 and not is_flat_name(
        tensor.fqn
    ):  # of a norm, or a scale, which may begin with zeros
        return None
    if steps():
        return Severity.WARNING, ", although the optimizer took steps"
    return (
        Severity.NOTE,
        ", as some models initialize it; its folder records no optimizer step",
    )


def _of_one(
    tensor: StoredTensor, hashed: Hashed, files: OpenFiles, tail: _Tail | None
) -> Iterator[tuple[str, Severity, str]]:
    scan = hashed.scan
    if 0 in tensor.shape:
        is_lora = _LORA.search(tensor.fqn) is not None
        severity = Severity.WARNING if is_lora else Severity.NOTE
        why = ": saved while its values were on another rank" if is_lora else ""
        yield "empty-tensor", severity, f"has no elements{why}"
    if scan is None:
        return
    if scan.nan or scan.inf:
        is_meant = not scan.nan and _is_mask(tensor.fqn)
        yield "nonfinite", Severity.NOTE if is_meant else Severity.WARNING, _nonfinite(scan)
    if scan.is_zero or _is_mask(tensor.fqn):
        return
    may_be_zero = not _must_not_be_zero(tensor)
    # A constant stands for minus infinity in some models. Vectors may be physical quantities of a
    # normalization.
    if (
        scan.largest != scan.least_large
        and not may_be_zero
        and prod(tensor.shape) > max(tensor.shape, default=1)
    ):
        words = (
            f"holds {count_of(scan.large, 'number')} of 1e20 or more, whose squares are infinite "
            "in float32"
        )
        yield "large-values", Severity.WARNING, words
    found = {
        run: kind
        for run in scan.zero_runs or ()
        if (kind := _lost(tensor, run, files, may_be_zero))
    }
    for kind in _Lost:
        runs = [run for run, of in found.items() if of is kind]
        if runs:
            size = human_size(sum(run.end - run.begin for run in runs))
            where = f"the first at {_place(tensor, runs[0])}, {count_of(len(runs), 'run')}"
            yield "zero-pages", Severity.WARNING, f"has {size} of zeros that {kind.value}, {where}"
    if tail is not None and not found:
        size, rest = human_size(tail.size), count_of(tail.after, "tensor")
        follow = (
            f", and {rest} after it in the file {'is' if tail.after == 1 else 'are'} zero"
            * bool(tail.after)
        )
        words = f"has {size} of zeros that {_Lost.END.value}, from byte {tail.begin} on{follow}"
        yield "zero-pages", Severity.WARNING, words


def _place(tensor: StoredTensor, run: "ZeroRun") -> str:
    layout = tensor.layout
    if isinstance(layout, Contiguous) and run.piece in layout.pieces[:1]:
        return f"byte {run.begin} of the tensor"
    return f"byte {run.piece.offset + run.begin} of {run.piece.path.name}"


def _nonfinite(scan: "Scan") -> str:
    firsts = [index for index in (scan.first_nan, scan.first_inf) if index is not None]
    counts = [
        text
        for count, text in ((scan.nan, f"{scan.nan} NaN"), (scan.inf, f"{scan.inf} Inf"))
        if count
    ]
    return f"holds {' and '.join(counts)}, the first at index {min(firsts)}"


def _must_not_be_zero(tensor: StoredTensor) -> bool:
    from ckptfix.tensors.scanning import FLOATS

    name = tensor.fqn.rpartition(".")[2]
    if tensor.dtype in FLOATS:
        return _MAY_BE_ZERO.search(name) is None
    return tensor.dtype != "BOOL" and _WEIGHT.fullmatch(name) is not None


def _untrained(tensors: Iterable[tuple[StoredTensor, Hashed]]) -> list[str]:
    """Return the matrices of a LoRA that begin with zeros, when all of them are zero as before the
    first step.
    """
    found = [
        (tensor.fqn, hashed.scan.is_zero)
        for tensor, hashed in tensors
        if hashed.scan is not None and 0 not in tensor.shape and _LORA_ZERO.search(tensor.fqn)
    ]
    return [fqn for fqn, _ in found] if all(is_zero for _, is_zero in found) else []
