"""The objects of a run that can be loaded into, and which tensor of a file is which tensor of a
model.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from ckptfix.checkpoint.entries import Shapes
from ckptfix.checkpoint.keys import (
    KeyMap,
    common_wrappers,
    inner_wrappers,
    without_private_wrappers,
)
from ckptfix.devices.offloaded import offloaded_ties
from ckptfix.training.loading.load_report import Mismatch
from ckptfix.training.prepared import innermost, levels
from ckptfix.wording import Brief, count_of, list_names


class Target(Struct, frozen=True, kw_only=True, eq=False):
    """One registered object. ``index``: its first position. ``thing``: as it is registered.
    ``inner``: unwrapped.
    """

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


class ModelTarget(Brief, Target, frozen=True, kw_only=True, eq=False):
    """A model. ``state``: its ``state_dict()``, called once. ``ties``: name -> names whose bytes
    cover its bytes.

    ``meta``: names of tensors on the meta device, which ``load_state_dict`` cannot fill.
    """

    state: Mapping[str, Any]
    ties: Mapping[str, frozenset[str]]
    meta: tuple[str, ...]


def distinct(things: Iterable[Any]) -> tuple[Target, ...]:
    """Return the registered objects, without those that are another one again or a wrapper of
    it.
    """
    found: dict[int, Target] = {}
    for index, thing in enumerate(things):
        inner = innermost(thing)
        found.setdefault(id(inner), Target(index=index, thing=thing, inner=inner))
    return tuple(found.values())


def model_targets(
    models: Iterable[Any], registered: Iterable[Any] | None = None
) -> tuple[ModelTarget, ...]:
    """Return models with what their ``state_dict()`` says. Calls ``state_dict`` once a model.

    ``registered``: all models of the run, when hooks took some away; positions are those among
    them.
    """
    known = {id(target.inner): target.index for target in distinct(registered or ())}
    return tuple(
        _model(target, known.get(id(target.inner), target.index)) for target in distinct(models)
    )


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
    """Return, for each tensor that shares its storage, the contiguous ones in which all of its
    bytes lie.
    """
    groups: dict[tuple[torch.device, int], list[tuple[str, int, int, bool]]] = {}
    for name, value in tensors.items():
        if value.device.type != "meta" and value.layout is torch.strided and value.numel():
            try:
                pointer = value.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):
                # Tensor subclasses without a storage of their own are never taken for tied.
                continue
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


class Fit(Struct, frozen=True, kw_only=True):
    """A map from the keys of a file to those of a model. ``is_exact``: they are the same, and in
    the same places.

    ``names``: name in the file -> name in the model. ``modules``: the map for ``_metadata``, which
    holds the names of modules. ``absent``: names of the model that the file lacks, and may lack,
    because they are tied to others.

    Of a partial fit: ``kept`` are names of the model that nothing fills, ``fresh`` those of them
    that the file lacks; ``unused`` are names of the file alone; ``mismatched`` are in both, and do
    not fit.
    """

    names: Mapping[str, str]
    modules: KeyMap
    absent: frozenset[str]
    kept: frozenset[str] = frozenset()
    unused: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Return whether no name changes."""
        return all(old == new for old, new in self.names.items())

    @property
    def is_in_full(self) -> bool:
        """Return whether every name of the file and of the model has its counterpart."""
        return not (self.kept or self.unused or self.mismatched)

    def fresh(self, target: ModelTarget) -> tuple[str, ...]:
        """Return the names of the model that the file does not have, in the model's order."""
        others = {one.key for one in self.mismatched}
        return tuple(name for name in target.state if name in self.kept and name not in others)


def fit(shapes: Shapes, target: ModelTarget) -> Fit | str:
    """Return how the names of an entry lead to those of a model, or in words why they do not.

    Names are tried as they are, then without the wrappers that are common to all, the model's own
    wrappers put in their place; private wrapper segments inside names are skipped on both sides.
    """
    as_is = {name: name for name in shapes}
    if as_is.keys() <= target.state.keys() and not _lacking(as_is, target)[0]:
        mapping, modules = as_is, KeyMap(remove=())
    else:
        bare = _without_wrappers(shapes, target)
        if isinstance(bare, str):
            return bare
        mapping, modules = bare
        lacking, _ = _lacking(mapping, target)
        if len(mapping) < len(shapes) or lacking:
            return _difference([name for name in shapes if name not in mapping], lacking)
    for name, ours in mapping.items():
        if mismatch := _mismatch(name, ours, shapes, target):
            return (
                f"{name!r} has shape {list(mismatch.file_shape)} in the file, "
                f"{list(mismatch.model_shape)} in the model"
            )
    return Fit(names=mapping, modules=modules, absent=_lacking(mapping, target)[1])


def partial_fit(shapes: Shapes, target: ModelTarget) -> Fit:
    """Return the fit of all keys that match in key and shape, under the names that ``fit``
    tries.
    """
    ways = [({name: name for name in shapes if name in target.state}, KeyMap(remove=()))]
    bare = _without_wrappers(shapes, target)
    if not isinstance(bare, str):
        ways.append(bare)
    fits = []
    for mapping, modules in ways:
        unused = tuple(name for name in shapes if name not in mapping)
        found = Fit(names=mapping, modules=modules, absent=frozenset(), unused=unused)
        wrong = [_mismatch(name, ours, shapes, target) for name, ours in mapping.items()]
        fits.append(without(found, [one for one in wrong if one is not None], target))
    return max(fits, key=lambda found: len(found.names))


def without(found: Fit, mismatched: Iterable[Mismatch], target: ModelTarget) -> Fit:
    """Return a fit without these names; what nothing fills then is kept as it is in the model."""
    wrong = (*found.mismatched, *mismatched)
    left = {one.name for one in wrong}
    names = {name: ours for name, ours in found.names.items() if name not in left}
    lacking, tied = _lacking(names, target)
    return replace(found, names=names, absent=tied, kept=frozenset(lacking), mismatched=wrong)


def _mismatch(name: str, ours: str, shapes: Shapes, target: ModelTarget) -> Mismatch | None:
    value, have = target.state[ours], shapes[name]
    if not isinstance(value, torch.Tensor) or have is None or tuple(value.shape) == have:
        return None
    return Mismatch(key=ours, name=name, file_shape=have, model_shape=tuple(value.shape))


def _without_wrappers(shapes: Shapes, target: ModelTarget) -> tuple[dict[str, str], KeyMap] | str:
    """Return name in the file -> name in the model of those that are equal without wrappers, and
    the map of modules.
    """
    bare_file, bare_model = _bare(shapes), _bare(target.state)
    if isinstance(bare_file, str) or isinstance(bare_model, str):
        return bare_file if isinstance(bare_file, str) else str(bare_model)
    mapping = {bare_file[name]: bare_model[name] for name in bare_file if name in bare_model}
    inner = inner_wrappers(shapes)
    remove, insert = _chain(shapes, inner), common_wrappers(target.state)
    return mapping, KeyMap(remove=remove, insert=insert, inner=inner)


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
            return f"{other!r} and {name!r} become the same key once wrappers are removed"
    return found


def _chain(names: Iterable[str], inner: bool) -> tuple[str, ...]:
    return common_wrappers([without_private_wrappers(name) for name in names] if inner else names)


def _difference(unknown: list[str], lacking: list[str]) -> str:
    parts = []
    if lacking:
        parts.append(f"{_keys_are(len(lacking))} missing from the file: {list_names(lacking)}")
    if unknown:
        parts.append(f"{_keys_are(len(unknown))} not in the model: {list_names(unknown)}")
    return "; ".join(parts)


def _keys_are(count: int) -> str:
    return f"{count_of(count, 'key')} {'is' if count == 1 else 'are'}"
