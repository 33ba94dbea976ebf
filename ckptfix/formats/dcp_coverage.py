"""Do the chunks of a DCP checkpoint make up its tensors, and are all of them stored?"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from ckptfix.formats.dcp_metadata import Chunk, DcpMetadata, DcpTensor

MAX_COMPARISONS = 10_000_000
"""Most pairs of chunks of one checkpoint that are compared; a grid of 32 x 32 chunks takes 32,000."""


class DcpProblem(NamedTuple):
    """What is wrong with one item of a checkpoint, in words."""

    fqn: str
    message: str


def dcp_problems(metadata: DcpMetadata) -> Iterator[DcpProblem]:
    """Yield every item that the metadata alone shows to be incomplete, or to be saved twice."""
    budget = _Budget()
    for tensor in metadata.tensors:
        absent = [chunk for chunk in tensor.chunks if (tensor.fqn, chunk.offsets) not in metadata.stored]
        if absent:
            yield DcpProblem(
                tensor.fqn,
                f"{len(absent)} of its {len(tensor.chunks)} chunks are stored in no file, the first at "
                f"{list(absent[0].offsets)}",
            )
        problem = _coverage_problem(tensor, budget)
        if problem:
            yield DcpProblem(tensor.fqn, problem)
    for item in metadata.items:
        if (item.fqn, None) not in metadata.stored:
            yield DcpProblem(item.fqn, "it is stored in no file")


def coverage_problem(tensor: DcpTensor) -> str | None:
    """Return how the chunks fail to make up the tensor: a gap, an overlap; None when they do."""
    return _coverage_problem(tensor, _Budget())


class _Budget:
    """How many pairs may still be compared."""

    def __init__(self) -> None:
        self.left = MAX_COMPARISONS


def _coverage_problem(tensor: DcpTensor, budget: _Budget) -> str | None:
    # A rank without a part of a tensor may have written a chunk without elements, several ranks the same one.
    chunks = [chunk for chunk in tensor.chunks if 0 not in chunk.lengths]
    whole = prod(tensor.shape)
    axis = _cut(tensor.shape, chunks)
    chunks.sort(key=lambda chunk: chunk.offsets[axis : axis + 1])
    both = _overlap(chunks, axis, budget)
    if both is not None:
        one, other = both
        return (
            f"its chunk at {list(one.offsets)} of {list(one.lengths)} and the one at {list(other.offsets)} of "
            f"{list(other.lengths)} overlap"
        )
    if budget.left < 0:
        return f"its {len(tensor.chunks)} chunks lie so that they are not compared, which no torch makes"
    covered = sum(prod(chunk.lengths) for chunk in chunks)
    if covered == whole:
        return None
    return f"{whole - covered} of its {whole} elements are in no chunk{_gap(tensor.shape, chunks, axis)}"


def _cut(shape: tuple[int, ...], chunks: list[Chunk]) -> int:
    """Return the dimension along which the chunks begin at most places."""
    counts = [len({chunk.offsets[axis] for chunk in chunks}) for axis in range(len(shape))]
    return counts.index(max(counts)) if counts else 0


def _overlap(chunks: list[Chunk], axis: int, budget: _Budget) -> tuple[Chunk, Chunk] | None:
    """Return two chunks, sorted along an axis, that have an element in common."""
    for number, one in enumerate(chunks):
        end = one.offsets[axis] + one.lengths[axis] if one.offsets else 1
        for following in range(number + 1, len(chunks)):
            other = chunks[following]
            if other.offsets and other.offsets[axis] >= end:
                break
            budget.left -= 1
            if budget.left < 0:
                return None
            if _meet(one, other):
                return one, other
    return None


def _meet(one: Chunk, other: Chunk) -> bool:
    return all(
        begin < other_begin + other_length and other_begin < begin + length
        for begin, length, other_begin, other_length in zip(*one, *other, strict=True)
    )


def _gap(shape: tuple[int, ...], chunks: list[Chunk], axis: int) -> str:
    """Return where the first gap is, of a tensor that is cut along one dimension; "" for any other."""
    full = (*shape[:axis], *shape[axis + 1 :])
    if any((*chunk.lengths[:axis], *chunk.lengths[axis + 1 :]) != full for chunk in chunks) or not shape:
        return ""
    end = 0
    for chunk in chunks:
        if chunk.offsets[axis] > end:
            break
        end = chunk.offsets[axis] + chunk.lengths[axis]
    following = min(
        (chunk.offsets[axis] for chunk in chunks if chunk.offsets[axis] > end), default=shape[axis]
    )
    return f": {end} to {following} of {shape[axis]} along dimension {axis}"
