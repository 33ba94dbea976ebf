"""Weights into a model: which names, shapes and dtypes differ, and which names are tied."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from accelerate.utils import find_tied_parameters, retie_parameters, set_module_tensor_to_device
from msgspec import Struct
from torch.nn.parameter import is_lazy

from ckptfix.checkpoint.keys import common_wrappers
from ckptfix.devices.reload.outputs import ANYTHING, host_bytes, in_words
from ckptfix.devices.reload.stored_weights import Weights
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.storage.paths import command
from ckptfix.wording import count_of, list_names

Ties = Sequence[Sequence[str]]
"""Groups of names that are one parameter."""

_EXTRA = "_extra_state"
"""Name of a module's ``get_extra_state`` in a state dict: of any type, and on no device map."""

_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
"""Bits of the largest whole number up to which a dtype has every one."""


class Filled(Struct, frozen=True, kw_only=True):
    """Contents that a model got from a file.

    ``names``: name in the model -> name in the file whose bytes it must hold.

    ``differences``: sentences, each a failure. ``converted``: names that are held in another, wider
    dtype. ``untied``: pairs of names that are one tensor in the model, with different bytes in the
    file. ``unproven``: sentences about tensors of the file that are not exactly one tensor of the
    model.
    """

    names: Mapping[str, str]
    differences: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    untied: tuple[tuple[str, str], ...] = ()
    unproven: tuple[str, ...] = ()


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state dict, the parameters and buffers themselves."""
    state = model.state_dict(keep_vars=True)
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name.rpartition(".")[2] != _EXTRA
    }


def size_of(model: Any) -> int:
    """Return the bytes of all tensors of a model, tied ones once."""
    return sum({id(value): value.nbytes for value in tensors_of(model).values()}.values())


def name_problems(model: Any, weights: Weights) -> list[str]:
    """Return in words which names and shapes of a file and a model differ; changes nothing."""
    state = tensors_of(model)
    names = _sources(state, find_tied_parameters(model), weights)
    missing = [name for name in state if name not in names]
    extra = _extra_states(model)
    unexpected = [name for name in weights.tensors if name not in state and name not in extra]
    problems = names_in_words(missing, unexpected, weights)
    shapes = [
        f"{ours!r} has shape {list(weights.tensors[theirs].shape)} in the file, "
        f"{list(state[ours].shape)} in the model"
        for ours, theirs in names.items()
        if not is_lazy(state[ours])
        and _has_whole_bytes(weights, theirs)
        and tuple(state[ours].shape) != weights.tensors[theirs].shape
    ]
    return problems + few(shapes, "shape")


def fill(model: Any, weights: Weights) -> Filled:
    """Copy every tensor of a file into the model's tensor of that name, one at a time.

    Tensors on the meta device get memory, lazy ones the file's shape. Raises OperationError when
    the file cannot be read.
    """
    state, ties = tensors_of(model), find_tied_parameters(model)
    names = _sources(state, ties, weights)
    differences = name_problems(model, weights)
    narrowed, refused, converted, filled = [], [], [], {}
    for ours, theirs in names.items():
        value, own = weights.read(theirs), state[ours]
        if is_lazy(own):
            own.materialize(value.shape)
        if value.shape != own.shape:
            continue
        if value.dtype != own.dtype and not holds(own.dtype, value.dtype):
            narrowed.append(narrowing(ours, value.dtype, own.dtype))
            continue
        try:
            _put(model, ours, own, value)
        except (
            ANYTHING
            # Memory that several elements share, as an expanded buffer has; classes of tensors.
        ) as error:
            refused.append(f"{ours!r} cannot be filled: {in_words(error)}")
            continue
        filled[ours] = theirs
        if value.dtype != own.dtype:
            converted.append(ours)
    for own in tensors_of(model).values():
        if is_lazy(own):
            own.materialize((0,))  # it is missing, and nothing here can ask for its shape
    refused += _fill_extra(model, weights)
    retie_parameters(model, ties)
    if left := [name for name, value in _all_tensors(model).items() if value.is_meta]:
        differences.append(
            f"{count_of(len(left), 'tensor')} ({list_names(left)}) stayed on the meta device: "
            "build the model outside of init_empty_weights, or without include_buffers"
        )
    return Filled(
        names=filled,
        differences=(*differences, *few(narrowed, "dtype"), *few(refused, "tensor")),
        converted=tuple(converted),
        untied=untied(ties, weights),
    )


def _put(model: Any, name: str, own: torch.Tensor, value: torch.Tensor) -> None:
    if own.is_meta:
        set_module_tensor_to_device(model, name, "cpu", value=value.to(own.dtype))
    else:
        with torch.no_grad():
            own.copy_(value)


def _fill_extra(model: Any, weights: Weights) -> list[str]:
    """Hand each module the extra state that the file has of it; return in words what they raise."""
    refused = []
    for name, module in _extra_states(model).items():
        if name in weights.tensors:
            value = weights.read(name).clone()
            try:
                module.set_extra_state(value)
            except ANYTHING as error:
                refused.append(f"{name!r} cannot be filled: {in_words(error)}")
    return refused


def _extra_states(model: Any) -> dict[str, Any]:
    """Return name in a state dict -> module, of the modules that keep an extra state."""
    own = torch.nn.Module.get_extra_state
    return {
        f"{name}.{_EXTRA}".removeprefix("."): module
        for name, module in model.named_modules()
        if getattr(type(module), "get_extra_state", own) is not own
    }


def narrowing(name: str, stored: torch.dtype, held: torch.dtype) -> str:
    """Return in words that a model holds a tensor in a dtype which loses some of the file's
    values.
    """
    return (
        f"{name!r} is {_short(stored)} in the file, {_short(held)} in the model: values are "
        "rounded or lost"
    )


def untied(ties: Ties, weights: Weights) -> tuple[tuple[str, str], ...]:
    """Return pairs of names that are tied in the model and differ in the file: the model can hold
    only one of them.
    """
    found = []
    for group in ties:
        stored = [name for name in group if name in weights.tensors]
        for name in stored[1:]:
            if not same_bytes(weights, stored[0], name):
                found.append((stored[0], name))
    return tuple(found)


def _sources(state: Mapping[str, torch.Tensor], ties: Ties, weights: Weights) -> dict[str, str]:
    """Return name in the model -> name in the file: its own, that of an alias, or of a name that it
    is tied to.
    """
    sources = {name: name for name in state if name in weights.tensors}
    sources.update(
        {
            name: kept
            for name, kept in weights.aliases.items()
            if name in state and name not in sources
        }
    )
    for group in ties:
        source = next((sources[name] for name in group if name in sources), None)
        if source is not None:
            sources.update({name: source for name in group if name not in sources})
    return sources


def names_in_words(
    missing: Sequence[str],
    unexpected: Sequence[str],
    weights: Weights,
    *,
    then: tuple[str, str] = ("", ""),
) -> list[str]:
    """Return in words that a file lacks keys of a model, and has others. ``then``: what a loader
    makes of either.
    """
    chain = common_wrappers(weights.tensors)
    prefix = "".join(f"{segment}." for segment in chain)
    if prefix and missing and {name.removeprefix(prefix) for name in unexpected} >= set(missing):
        return [
            f"every key in {weights.label} begins with {prefix!r}, but no key of the model "
            f"does, so nothing would be loaded; next: {command('repair', weights.root)} "
            "--keys bare"
        ]
    problems = []
    if missing:
        text = f"{count_of(len(missing), 'key')} of the model missing: {list_names(missing)}"
        problems.append(f"{text}{then[0]}")
    if unexpected:
        text = f"{count_of(len(unexpected), 'unexpected key')}: {list_names(unexpected)}"
        problems.append(f"{text}{then[1]}")
    return problems


def _all_tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def _has_whole_bytes(weights: Weights, name: str) -> bool:
    # torch packs two elements below a byte into one, and has another shape than the file.
    return DTYPE_BITS[weights.tensors[name].dtype] >= 8


def same_bytes(weights: Weights, one: str, other: str) -> bool:
    """Return whether two tensors of a file are equal in dtype, shape and every byte."""
    left, right = weights.tensors[one], weights.tensors[other]
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    pairs = zip(host_bytes(weights.read(one)), host_bytes(weights.read(other)), strict=True)
    return all(numpy.array_equal(a, b) for a, b in pairs)


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether every value of the other dtype is one of this dtype."""
    if dtype.is_floating_point and other.is_floating_point:
        wide, narrow = torch.finfo(dtype), torch.finfo(other)
        return bool(
            wide.eps <= narrow.eps
            and wide.max >= narrow.max
            and wide.smallest_normal * wide.eps <= narrow.smallest_normal * narrow.eps
        )
    if dtype.is_complex:
        return holds(dtype.to_real(), other.to_real() if other.is_complex else other)
    if dtype.is_floating_point and other is not torch.bool:
        return not other.is_complex and torch.iinfo(other).bits - other.is_signed <= _DIGITS.get(
            dtype, 0
        )
    return bool(torch.promote_types(dtype, other) == dtype)


def few(sentences: Sequence[str], what: str) -> list[str]:
    """Return the first two sentences, and how many more there are."""
    if len(sentences) <= 2:
        return list(sentences)
    return [*sentences[:2], f"and {count_of(len(sentences) - 2, f'more {what}')} differ"]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
