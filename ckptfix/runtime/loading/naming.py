"""Which tensor of a file is which tensor of a model: names with their wrappers taken off on both sides."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ckptfix.checkpoint.keys import KeyMap, common_wrappers, inner_wrappers, without_private_wrappers
from ckptfix.runtime.loading.entries import Shapes
from ckptfix.runtime.loading.targets import ModelTarget
from ckptfix.wording import list_names


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
