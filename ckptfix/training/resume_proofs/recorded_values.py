"""Values of a process as a recorder writes them: exact text for small ones, a digest of samples for tensors."""

import gc
import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any

import torch

from ckptfix.checkpoint.keys import PRIVATE_WRAPPERS
from ckptfix.devices.nested_values import fingerprint
from ckptfix.training.resuming.generators import capture

SAMPLES = 64
"""Samples of a batch that get a digest of their own: enough to recognize the order of the data."""

_BLOCK = 4096
LEAST = 16 * _BLOCK
"""Bytes of a tensor up to which all of it is read."""

WHOLE_LEAF = 64 << 20
"""Bytes of a tensor of a batch up to which all of it is read."""


def is_zero(tensor: torch.Tensor) -> bool:
    """Return whether a dense tensor has zeros alone."""
    return tensor.layout is torch.strided and not tensor.any()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def digests_of_generators() -> dict[str, str]:
    """Return a digest of each random state of this process."""
    states = capture()
    found = {
        # 625 numbers, which take 40 ms one by one.
        "python": hashlib.sha1(repr(states.python).encode(), usedforsecurity=False).hexdigest(),
        "numpy": fingerprint(states.numpy),
        "torch": fingerprint(states.torch),
    }
    if states.device is not None:
        found[states.device[0]] = fingerprint(states.device[1])
    return {name: digest[:12] for name, digest in found.items()}


def number_of(tensor: torch.Tensor) -> str:
    """Return a tensor of one number as text, and any other as a digest."""
    local = local_part(tensor.detach())
    return repr(local.item()) if local.numel() == 1 else fingerprint(local)[:12]


def text_of(value: Any) -> str:
    """Return a short value as text, so that a message can show it, and any other as a digest."""
    if isinstance(value, torch.Tensor):
        return number_of(value)
    if value is None or isinstance(value, bool | int | float | str):
        return str(value) if isinstance(value, str) else repr(value)
    if (
        isinstance(value, list | tuple)
        and len(value) <= 4
        and all(isinstance(one, bool | int | float) for one in value)
    ):
        return ", ".join(map(repr, value))
    return fingerprint(value)[:12]


def sampled_digest(tensor: torch.Tensor, size: int) -> str:
    """Return a digest of evenly spaced blocks of a tensor and of the sum of all its bits, taken
    where it lies.
    """
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    blocks = max(size // _BLOCK, 2)
    starts = (
        torch.linspace(0, flat.numel() - _BLOCK, blocks, dtype=torch.float64).long().to(flat.device)
    )
    picked = flat[(starts[:, None] + torch.arange(_BLOCK, device=flat.device)[None, :]).reshape(-1)]
    width = next(
        kind
        for kind in (torch.int64, torch.int32, torch.int16, torch.uint8)
        if flat.numel() % kind.itemsize == 0 and flat.storage_offset() % kind.itemsize == 0
    )
    total = flat.view(width).sum(dtype=torch.int64)
    digest = hashlib.sha1(usedforsecurity=False)
    digest.update(repr((str(tensor.dtype), tuple(tensor.shape), int(total))).encode())
    digest.update(picked.cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def samplers_of(loader: Any) -> Iterator[Any]:
    """Yield the samplers of a dataloader, each followed by the one that it wraps."""
    one = loader
    for _ in range(6):
        inside = getattr(one, "batch_sampler", None)
        one = (
            getattr(one, "sampler", None) if inside is None else inside
        )  # a sampler's truth may be its length
        if one is None:
            return
        yield one


def name_of_tensor(name: str, model: int | None) -> str:
    """Return a parameter's name without what wrappers put into it."""
    parts = [one for one in name.removeprefix("module.").split(".") if one not in PRIVATE_WRAPPERS]
    return ".".join(parts) if model is None else f"{'.'.join(parts)} of model {model}"


def digests_of_unprepared(
    prepared: Collection[Any], known: Collection[int], digest: Callable[[Any], str]
) -> dict[str, str]:
    """Return the digests of the tensors of all other models of this process, by name.

    ``prepared``: the models that accelerate knows. ``known``: the identities of tensors that are
    compared or saved otherwise. ``digest``: of a tensor.
    """
    # type(), as isinstance asks proxies, and one whose object is gone raises.
    modules = [
        one
        for one in gc.get_objects()
        # A module that __new__ alone made, or without super().__init__(), has no tensors to list.
        if issubclass(type(one), torch.nn.Module) and "_modules" in vars(one)
    ]
    inside = {id(child) for module in modules for child in module.children()}
    inside |= {id(part) for model in prepared for part in model.modules()}
    alike: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for module in modules:
        named = chain(module.named_parameters(), module.named_buffers())
        if id(module) not in inside:
            tensors = {
                name: digest(one)
                for name, one in named
                if id(one) not in known and not torch.nn.parameter.is_lazy(one)
            }
            key = (type(module).__name__, *tensors)
            alike[key].append(tensors)
    # The collector lists models of one class in any order.
    return {
        f"{name} of {kind}{f' {at + 1}' if len(models) > 1 else ''}": value
        for (kind, *_), models in alike.items()
        for at, tensors in enumerate(sorted(models, key=lambda one: tuple(one.values())))
        for name, value in tensors.items()
    }
