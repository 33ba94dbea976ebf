"""Ties in a complete state that goes to another strategy: parameters that are one tensor under two names.

safetensors files keep one of the names, and so do optimizers. FSDP saves both as tensors and looks for both, DeepSpeed
keeps one tensor and the other name. The run's model says what is tied; without it, equal bytes suggest it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.storage.reading import OpenFiles
from ckptfix.tensors.hashing import TensorJob, hash_all
from ckptfix.tensors.optimizers import OptimizerState
from ckptfix.tensors.stored import StoredTensor, Weights
from ckptfix.wording import list_names

Ties = Sequence[tuple[int, str, str]]
"""Position of a model, and the two names of one of its parameters."""


def with_lost_ties(weights: Weights, ties: Ties) -> Weights:
    """Return weights with the names of tied tensors that safetensors files leave out, which FSDP and ZeRO look for."""
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
    """Return weights in which a tie that was saved as two tensors is one again, and what that rests on, in words.

    ``ties``: those of the run's model, None where no model is known. Then a tensor of no optimizer is taken for a tie
    of a trained one that is equal in every byte, unless all its elements are the same.
    """
    trained = {
        name
        for one in optimizers
        if one.model in (None, weights.index)
        for group in one.groups
        for name in group.names
    }
    if ties is not None:
        return _joined(weights, _equal(weights, trained, set(map(frozenset, _of(weights, ties))))), ""
    found = _equal(weights, trained, None)
    tensors = weights.named()
    found = {name: kept for name, kept in found.items() if not _is_constant(tensors[name])}
    if not found:
        return weights, ""
    return _joined(weights, found), (
        f"{weights.label}: {list_names(sorted(found))}: in no optimizer, and equal in every byte to "
        f"{list_names(sorted(set(found.values())))}: written once, as a tie; next, where the script does not tie them: "
        "--model MODULE:FACTORY"
    )


def _of(weights: Weights, ties: Ties) -> list[tuple[str, str]]:
    """Return the two names of each tie of one model."""
    return [pair for model, *pair in ties if model == weights.index]  # type: ignore[misc]


def _equal(
    weights: Weights, trained: Collection[str], pairs: Collection[frozenset[str]] | None
) -> dict[str, str]:
    """Return the names of tensors that are not trained -> those of trained ones with equal bytes.

    ``pairs``: the only ones that are looked at, None for any.
    """
    kinds: dict[tuple[str, tuple[int, ...]], tuple[list[StoredTensor], list[StoredTensor]]] = {}
    paired = None if pairs is None else {name for pair in pairs for name in pair}
    for tensor in weights.tensors:
        if tensor.nbytes and (paired is None or tensor.fqn in paired):
            both = kinds.setdefault((tensor.dtype, tensor.shape), ([], []))
            both[tensor.fqn in trained].append(tensor)
    asked = [one for others, own in kinds.values() if others and own for one in (*others, *own)]
    read = hash_all([TensorJob(one) for one in asked])
    digests = {tensor.fqn: one.digest for tensor, one in zip(asked, read, strict=True) if one.digest}
    equal: dict[str, list[str]] = {}
    for name in digests:
        if name in trained:
            equal.setdefault(digests[name], []).append(name)
    found: dict[str, str] = {}
    for name in digests:
        for kept in equal.get(digests[name], ()) if name not in trained else ():
            if pairs is None or frozenset((name, kept)) in pairs:
                found.setdefault(name, kept)
    return found


def _is_constant(tensor: StoredTensor) -> bool:
    """Return whether all elements of a tensor are the same, as in norms and biases that no step changed yet."""
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
