"""The objects of a run that can be loaded into, each once, however often the registry holds it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptfix.runtime.held import levels
from ckptfix.runtime.loading.offloaded import offloaded_ties


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """One registered object. ``index``: its first position. ``thing``: as it is registered. ``inner``: unwrapped."""

    index: int
    thing: Any
    inner: Any

    @property
    def what(self) -> str:
        """The class of the unwrapped object, for messages."""
        return type(self.inner).__name__

    @property
    def types(self) -> frozenset[str]:
        """Full class names of the object at every wrapper level, as a manifest may name it."""
        kinds = {type(level) for level in levels(self.thing)} | {type(self.inner)}
        return frozenset(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelTarget(Target):
    """A model. ``state``: its ``state_dict()``, called once. ``ties``: name -> names whose bytes cover its bytes.

    ``meta``: names of tensors on the meta device, which ``load_state_dict`` cannot fill.
    """

    state: Mapping[str, Any]
    ties: Mapping[str, frozenset[str]] = field(repr=False)
    meta: tuple[str, ...] = field(repr=False)


def distinct(things: Iterable[Any]) -> tuple[Target, ...]:
    """Return the registered objects, without those that are another one again or a wrapper of it."""
    found: dict[int, Target] = {}
    for index, thing in enumerate(things):
        inner = list(levels(thing))[-1]
        found.setdefault(id(inner), Target(index=index, thing=thing, inner=inner))
    return tuple(found.values())


def model_targets(models: Iterable[Any]) -> tuple[ModelTarget, ...]:
    """Return the registered models with what their ``state_dict()`` says. Calls ``state_dict`` once a model."""
    return tuple(_model(target) for target in distinct(models))


def _model(target: Target) -> ModelTarget:
    state = target.thing.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    meta = tuple(name for name, value in tensors.items() if value.device.type == "meta")
    return ModelTarget(
        index=target.index,
        thing=target.thing,
        inner=target.inner,
        state=state,
        ties={**_shared(tensors), **offloaded_ties(target.thing, meta)},
        meta=meta,
    )


def _shared(tensors: Mapping[str, torch.Tensor]) -> dict[str, frozenset[str]]:
    """Return, for each tensor that shares its storage, the contiguous ones in which all of its bytes lie."""
    groups: dict[tuple[torch.device, int], list[tuple[str, int, int, bool]]] = {}
    for name, value in tensors.items():
        if value.device.type != "meta" and value.layout is torch.strided and value.numel():
            try:
                pointer = value.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):
                continue  # tensor subclasses without a storage of their own are never taken for tied
            if pointer:
                begin, end = _extent(value)
                groups.setdefault((value.device, pointer), []).append(
                    (name, begin, end, value.is_contiguous())
                )
    ties = {}
    for group in groups.values():
        for name, begin, end, _ in group if len(group) > 1 else ():
            covering = frozenset(
                other for other, first, last, whole in group
                if other != name and whole and first <= begin and end <= last
            )  # fmt: skip
            if covering:
                ties[name] = covering
    return ties


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return begin and end, in bytes within the storage, of what a tensor touches."""
    width = tensor.element_size()
    begin = tensor.storage_offset() * width
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return begin, begin + (last + 1) * width
