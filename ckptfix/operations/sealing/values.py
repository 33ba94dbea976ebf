"""What the values of tensors say: NaN, Inf, weights of nothing but zeros, lost pages, LoRA that was never trained."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptfix.operations.findings import Severity
from ckptfix.operations.sealing.hashing import Hashed
from ckptfix.operations.sealing.lost import Lost, lost
from ckptfix.storage.pieces import OpenFiles
from ckptfix.weights.layouts import Contiguous
from ckptfix.weights.stored import StoredTensor
from ckptfix.wording import count_of, human_size, list_names

if TYPE_CHECKING:
    from ckptfix.weights.elements.pages import ZeroRun
    from ckptfix.weights.elements.scanning import Scan

_HONEST_ZERO = re.compile(
    r"(bias|beta|mask|running_mean|running_var|tracked|counter|count|step|offset|zero_point|cached?|shift)",
    re.IGNORECASE,
)
"""In the last part of a name: what is zero in many sound models, as biases are at first."""

_WEIGHT = re.compile(r"q?_?weight(_packed)?|kernel", re.IGNORECASE)
"""The last part of a name: integers that are a quantised weight. Others are zero in many sound models, as ids are."""

_MASK = re.compile(r"mask", re.IGNORECASE)
_LORA = re.compile(
    r"(^|[._])lora_?(A|B|up|down|embedding_A|embedding_B|magnitude_vector)([._]|$)", re.IGNORECASE
)
_LORA_ZERO = re.compile(r"(^|[._])lora_?(B|up|embedding_A)([._]|$)", re.IGNORECASE)
"""The matrix of the two that begins with zeros: of an embedding it is A, as PEFT has it (``reset_lora_parameters``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFinding:
    """Something about the values of a model. ``fqn``: the tensor, "" when it is about several."""

    code: str
    severity: Severity
    label: str
    fqn: str
    text: str

    def __str__(self) -> str:
        return f"{self.label}: {self.text}"

    def as_json(self) -> dict[str, object]:
        """Return the finding as JSON values."""
        return {
            "code": self.code,
            "severity": self.severity.value,
            "model": self.label,
            "tensor": self.fqn,
            "message": str(self),
        }


def judge_values(label: str, tensors: Sequence[tuple[StoredTensor, Hashed]]) -> Iterator[ValueFinding]:
    """Yield what is wrong with the values of one model, each tensor with its scan. Reads a few bytes more."""
    untrained = _untrained(tensors)
    if untrained:
        text = f"the LoRA was never trained: all of {list_names(untrained)} are zero"
        yield ValueFinding(code="untrained-lora", severity=Severity.WARNING, label=label, fqn="", text=text)
    with OpenFiles() as files:
        for tensor, hashed in tensors:
            for code, severity, text in _of_one(tensor, hashed, files, frozenset(untrained)):
                words = f"{tensor.fqn!r} ({tensor.dtype} {list(tensor.shape)}) {text}"
                yield ValueFinding(code=code, severity=severity, label=label, fqn=tensor.fqn, text=words)


def _of_one(
    tensor: StoredTensor, hashed: Hashed, files: OpenFiles, untrained: frozenset[str]
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
        is_mask = not scan.nan and _MASK.search(tensor.fqn.rpartition(".")[2]) is not None
        yield "nonfinite", Severity.NOTE if is_mask else Severity.WARNING, _nonfinite(scan)
    if scan.is_zero:
        if tensor.fqn not in untrained and _must_not_be_zero(tensor):
            yield "all-zero", Severity.WARNING, "is zero in every element"
        return
    if _MASK.search(tensor.fqn.rpartition(".")[2]):
        return
    may_be_zero = not _must_not_be_zero(tensor)
    found = {run: kind for run in scan.zero_runs or () if (kind := lost(tensor, run, files, may_be_zero))}
    for kind in Lost:
        runs = [run for run, of in found.items() if of is kind]
        if runs:
            size = human_size(sum(run.end - run.begin for run in runs))
            where = f"the first at {_place(tensor, runs[0])}, {count_of(len(runs), 'run')}"
            yield "zero-pages", Severity.WARNING, f"has {size} of zeros that {kind.value}, {where}"


def _place(tensor: StoredTensor, run: "ZeroRun") -> str:
    layout = tensor.layout
    if isinstance(layout, Contiguous) and run.piece in layout.pieces[:1]:
        return f"byte {run.begin} of it"
    return f"byte {run.piece.offset + run.begin} of {run.piece.path.name}"


def _nonfinite(scan: "Scan") -> str:
    firsts = [index for index in (scan.first_nan, scan.first_inf) if index is not None]
    counts = [text for count, text in ((scan.nan, f"{scan.nan} NaN"), (scan.inf, f"{scan.inf} Inf")) if count]
    return f"holds {' and '.join(counts)}, the first at index {min(firsts)}"


def _must_not_be_zero(tensor: StoredTensor) -> bool:
    from ckptfix.weights.elements.scanning import FLOATS

    name = tensor.fqn.rpartition(".")[2]
    if tensor.dtype in FLOATS:
        return _HONEST_ZERO.search(name) is None
    return tensor.dtype != "BOOL" and _WEIGHT.fullmatch(name) is not None


def _untrained(tensors: Iterable[tuple[StoredTensor, Hashed]]) -> list[str]:
    """Return the matrices of a LoRA that begin with zeros, when all of them are zero as before the first step."""
    found = [
        (tensor.fqn, hashed.scan.is_zero)
        for tensor, hashed in tensors
        if hashed.scan is not None and 0 not in tensor.shape and _LORA_ZERO.search(tensor.fqn)
    ]
    return [fqn for fqn, _ in found] if all(is_zero for _, is_zero in found) else []
