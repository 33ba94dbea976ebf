"""The objects of a run that can be loaded into, and which tensor of a file is which tensor of a model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptfix.checkpoint.entries import Shapes
from ckptfix.checkpoint.keys import KeyMap, common_wrappers, inner_wrappers, without_private_wrappers
from ckptfix.runtime.held import innermost, levels
from ckptfix.runtime.loading.offloaded import offloaded_ties
from ckptfix.wording import list_names


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
        inner = innermost(thing)
        found.setdefault(id(inner), Target(index=index, thing=thing, inner=inner))
    return tuple(found.values())


def model_targets(models: Iterable[Any], registered: Iterable[Any] | None = None) -> tuple[ModelTarget, ...]:
    """Return models with what their ``state_dict()`` says. Calls ``state_dict`` once a model.

    ``registered``: all models of the run, when hooks took some away; positions are those among them.
    """
    known = {id(target.inner): target.index for target in distinct(registered or ())}
    return tuple(_model(target, known.get(id(target.inner), target.index)) for target in distinct(models))


def _model(target: Target, index: int) -> ModelTarget:
    state = target.thing.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    meta = tuple(name for name, value in tensors.items() if value.device.type == "meta")
    return ModelTarget(
        index=index,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How the names of a file lead to those of a model. ``is_exact``: they are the same, and in the same places.

    ``names``: name in the file -> name in the model. ``modules``: the map for ``_metadata``, which holds the names of
    modules. ``absent``: names of the model that the file lacks, and may lack, because they are tied to others.
    """

    names: Mapping[str, str]
    modules: KeyMap
    absent: frozenset[str]

    @property
    def is_exact(self) -> bool:
        """Whether no name changes."""
        return all(old == new for old, new in self.names.items())


def fit(shapes: Shapes, target: ModelTarget) -> Fit | str:
    """Return how the names of an entry lead to those of a model, or in words why they do not.

    Names are tried as they are, then without the wrappers that are common to all, the model's own wrappers put in
    their place; private wrapper segments inside names are skipped on both sides.
    """
    as_is = {name: name for name in shapes}
    if as_is.keys() <= target.state.keys() and not _lacking(as_is, target)[0]:
        mapping, modules = as_is, KeyMap(remove=())
    else:
        bare_file, bare_model = _bare(shapes), _bare(target.state)
        if isinstance(bare_file, str) or isinstance(bare_model, str):
            return bare_file if isinstance(bare_file, str) else str(bare_model)
        unknown = [bare_file[name] for name in bare_file if name not in bare_model]
        mapping = {bare_file[name]: bare_model[name] for name in bare_file if name in bare_model}
        lacking, _ = _lacking(mapping, target)
        if unknown or lacking:
            return _difference(unknown, lacking)
        inner = inner_wrappers(shapes)
        modules = KeyMap(remove=_chain(shapes, inner), insert=common_wrappers(target.state), inner=inner)
    for name, ours in mapping.items():
        value = target.state[ours]
        have = shapes[name]
        if isinstance(value, torch.Tensor) and have is not None and tuple(value.shape) != have:
            return f"{name!r} has the shape {list(have)} in the file, {list(value.shape)} in the model"
    return Fit(names=mapping, modules=modules, absent=_lacking(mapping, target)[1])


def _lacking(mapping: Mapping[str, str], target: ModelTarget) -> tuple[list[str], frozenset[str]]:
    """Return the names of the model that nothing fills, and those that a tied name fills."""
    filled = set(mapping.values())
    missing = [name for name in target.state if name not in filled]
    tied = frozenset(name for name in missing if target.ties.get(name, frozenset()) & filled)
    return [name for name in missing if name not in tied], tied


def _bare(names: Iterable[str]) -> dict[str, str] | str:
    """Return bare name -> name, or in words which two names would become one."""
    names = tuple(names)
    inner = inner_wrappers(names)
    strip = KeyMap(remove=_chain(names, inner), inner=inner)
    found: dict[str, str] = {}
    for name in names:
        other = found.setdefault(strip(name), name)
        if other != name:
            return f"{other!r} and {name!r} are one name once wrappers are taken off"
    return found


def _chain(names: Iterable[str], inner: bool) -> tuple[str, ...]:
    return common_wrappers([without_private_wrappers(name) for name in names] if inner else names)


def _difference(unknown: list[str], lacking: list[str]) -> str:
    parts = []
    if lacking:
        parts.append(f"it lacks {len(lacking)} of the model's names: {list_names(lacking)}")
    if unknown:
        parts.append(f"{len(unknown)} of its names the model does not have: {list_names(unknown)}")
    return "; ".join(parts)
