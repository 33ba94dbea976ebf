"""Ties in a complete state that goes to another strategy: parameters that are one tensor under two
names.

safetensors files keep one of the names, and so do optimizers. FSDP saves both as tensors and looks
for both, DeepSpeed keeps one tensor and the other name. The run's model says what is tied; without
it, equal bytes suggest it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.storage.reading import OpenFiles
from ckptfix.tensors.hashing import TensorJob, hash_all
from ckptfix.tensors.optimizers import OptimizerState
from ckptfix.tensors.stored import StoredTensor, Weights
from ckptfix.wording import list_names

_BEGIN = 1 << 12
"""Bytes by which different tensors of one shape are told apart, most of them."""

Ties = Sequence[tuple[int, str, str]]
"""Position of a model, and the two names of one of its parameters."""


def with_lost_ties(weights: Weights, ties: Ties) -> Weights:
    """Return weights with the names of tied tensors that safetensors files leave out, which FSDP
    and ZeRO look for.
    """
    held = weights.named()
    kept = {tensor.fqn for tensor in weights.tensors}
    lost = {}
    for pair in _of(weights, ties):
        there = [name for name in pair if name in held]
        if len(there) == 1:
            missing = next(name for name in pair if name not in held)
            lost[missing] = there[0] if there[0] in kept else weights.ties[there[0]]
    return replace(weights, ties={**weights.ties, **lost}) if lost else weights


def with_ties_joined(
    weights: Weights, optimizers: Iterable[OptimizerState], ties: Ties | None
) -> tuple[Weights, str]:
    """Return weights in which a tie that was saved as two tensors is one again, and what that rests
    on, in words.

    ``ties``: those of the run's model, None where no model is known. Then a tensor of no optimizer
    is taken for a tie of another one that is equal in every byte, unless all its elements are the
    same: the trained one stays, else the first. Frozen ones are taken for a tie where there is one
    alone.
    """
    trained = {
        name
        for one in optimizers
        if one.model in (None, weights.index)
        for group in one.groups
        for name in group.names
    }
    if ties is not None:
        return _joined(weights, _equal(weights, trained, dict(_of(weights, ties)))), ""
    found = _equal(weights, trained, None)
    tensors = weights.named()
    found = {name: kept for name, kept in found.items() if not _is_constant(tensors[name])}
    of_frozen = {kept for kept in found.values() if kept not in trained}
    if len(of_frozen) > 1:  # a copy of a model, not the tie of its embeddings
        found = {name: kept for name, kept in found.items() if kept in trained}
    if not found:
        return weights, ""
    return (
        _joined(weights, found),
        (
            f"{weights.label}: {list_names(sorted(found))}: in no optimizer and byte-identical to "
            f"{list_names(sorted(set(found.values())))}, so written once, as tied weights; next, "
            "if the script does not tie them: --model MODULE:FACTORY"
        ),
    )


def _of(weights: Weights, ties: Ties) -> list[tuple[str, str]]:
    """Return the two names of each tie of one model."""
    return [pair for model, *pair in ties if model == weights.index]  # type: ignore[misc]


def _equal(
    weights: Weights, trained: Collection[str], pairs: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the names of tensors that are not trained -> those of others with equal bytes, trained
    ones if there are.

    ``pairs``: other name -> first name of the only ones that are looked at, None for any.
    """
    members = None if pairs is None else {*pairs, *pairs.values()}
    found: dict[str, str] = {}
    for names in _alike([one for one in weights.tensors if members is None or one.fqn in members]):
        own = [name for name in names if name in trained]
        for name in names:
            if name in trained:
                continue
            if pairs is None:
                kept = (own or names)[0]
            else:
                tied = {pairs.get(name, name)} | {
                    other for other, first in pairs.items() if first == name
                }
                kept = next((one for one in own if one in tied), pairs.get(name, name))
            if kept != name and kept in names:
                found[name] = kept
    return {name: found.get(kept, kept) for name, kept in found.items()}


def _alike(tensors: Sequence[StoredTensor]) -> Iterator[list[str]]:
    """Yield the names of tensors that are equal in every byte, where there are several; only those
    that begin alike are read completely.
    """
    begins: dict[tuple[str, tuple[int, ...], bytes], list[StoredTensor]] = {}
    kinds = Counter((one.dtype, one.shape) for one in tensors)
    with OpenFiles() as files:
        for one in tensors:
            if one.nbytes and kinds[one.dtype, one.shape] > 1:
                begins.setdefault((one.dtype, one.shape, _begin(one, files)), []).append(one)
    asked = [one for several in begins.values() if len(several) > 1 for one in several]
    equal: dict[str, list[str]] = {}
    for tensor, hashed in zip(asked, hash_all([TensorJob(one) for one in asked]), strict=True):
        if hashed.digest:
            equal.setdefault(hashed.digest, []).append(tensor.fqn)
    yield from (names for names in equal.values() if len(names) > 1)


def _begin(tensor: StoredTensor, files: OpenFiles) -> bytes:
    """Return the first bytes of a tensor."""
    found = b""
    for block in tensor.blocks(files, memoryview(bytearray(1 << 16))):
        found += block[:_BEGIN]
        if len(found) >= _BEGIN:
            break
    return found[:_BEGIN]


def _is_constant(tensor: StoredTensor) -> bool:
    """Return whether all elements of a tensor are the same, as in norms and biases that no step
    changed yet.
    """
    width = max(DTYPE_BITS[tensor.dtype] // 8, 1)
    first = b""
    with OpenFiles() as files:
        for block in tensor.blocks(files, memoryview(bytearray(1 << 16))):
            first = first or bytes(block[:width])
            if bytes(block) != first * (len(block) // width):
                return False
    return True


def _joined(weights: Weights, found: Mapping[str, str]) -> Weights:
    """Return weights in which each of these names is a tie of its other name, and no tensor."""
    if not found:
        return weights
    return replace(
        weights,
        tensors=tuple(tensor for tensor in weights.tensors if tensor.fqn not in found),
        ties={**{other: found.get(kept, kept) for other, kept in weights.ties.items()}, **found},
    )
