"""The place in a transformers model of each tensor of a file: renamed, merged with others, or left out.

transformers 5 keeps its table of renamings and merges at the model that it loaded. Without that table (transformers 4)
a tensor has a place where a name differs by the base model's prefix at most.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import find_tied_parameters

from ckptfix.runtime.devices.reload.filling import tensors_of
from ckptfix.runtime.devices.reload.stored import Weights

_NUMBER = re.compile(r"(?<![0-9A-Za-z_])[0-9]+(?![0-9A-Za-z_])")


@dataclass(slots=True, kw_only=True)
class Destinations:
    """The places of a file's tensors in a model. Keys of the model -> keys of the file, unless said otherwise.

    ``names``: one tensor alone. ``merged``: several that the loader puts together, or one that it cuts; ``listed``:
    those of them that are a list by number, one tensor for each expert. ``crowded``: key of the file whose place
    another tensor of the file took -> that place. ``left_out``: keys of the file without a place -> what transformers
    calls them. ``unknown``: keys of the file of which this transformers does not say where they went.
    """

    names: dict[str, str] = field(default_factory=dict)
    merged: dict[str, list[str]] = field(default_factory=dict)
    listed: set[str] = field(default_factory=set)
    crowded: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def misnumbered(self) -> list[str]:
        """Return the places whose tensors, one for each expert, are not numbered from 0 on: each expert moves up."""
        return [
            place for place in self.merged if place in self.listed and not _is_numbered(self.merged[place])
        ]


def destinations(model: Any, weights: Weights) -> Destinations:
    """Return the place of every tensor of a file in a model that transformers has loaded."""
    state = tensors_of(model)
    found = _by_prefix(model, state, weights)
    table = getattr(model, "_weight_conversions", None)
    if table is not None:
        # Another transformers has other names for its table.
        with suppress(ImportError, AttributeError, TypeError, ValueError):
            found = _by_table(model, state, weights, table)
    for group in find_tied_parameters(model):
        source = next((found.names[name] for name in group if name in found.names), None)
        if source is not None:
            found.names.update({name: source for name in group if name not in found.names})
    return found


def _by_table(
    model: Any, state: Mapping[str, torch.Tensor], weights: Weights, table: Iterable[Any]
) -> Destinations:
    """Rename each key as transformers did; of two tensors for one place it takes the first in natural order."""
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = list(table)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix = model.base_model_prefix
    found = Destinations()
    for key in sorted(weights.tensors, key=dot_natural_key):
        place, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if place not in state and key in state:
            place, pattern = rename_source_key(key, [], [], prefix, state)
        if place not in state:
            found.left_out[key] = place
        elif pattern is not None:
            found.merged.setdefault(place, []).append(key)
            if ".*." in pattern:
                found.listed.add(place)
        elif place in found.names:
            found.crowded[key] = place
        else:
            found.names[place] = key
    return found


def _by_prefix(model: Any, state: Mapping[str, torch.Tensor], weights: Weights) -> Destinations:
    """Find places by name alone: a base model's file loads into a model with a head, and the other way round."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found = Destinations()
    for name in weights.tensors:
        tries = (name, prefix + name, name.removeprefix(prefix))
        ours = next((one for one in tries if one in state), None)
        if ours is None:
            found.unknown.append(name)
        elif ours in found.names:
            found.crowded[name] = ours
        else:
            found.names[ours] = name
    return found


def absent_siblings(keys: Iterable[str]) -> list[str]:
    """Return keys that a file lacks where its other numbered parts have them: ``experts.1.w1`` of ``experts.0.w1``.

    Only the innermost of several numbers counts: layers may differ from each other, experts of one layer may not.
    """
    parts: dict[str, dict[int, set[str]]] = {}
    for key in keys:
        numbers = list(_NUMBER.finditer(key))
        if len(numbers) > 1:
            before, number, after = key[: numbers[-1].start()], numbers[-1], key[numbers[-1].end() :]
            parts.setdefault(before, {}).setdefault(int(number[0]), set()).add(after)
    absent = []
    for before, by_number in parts.items():
        every = set.union(*by_number.values())
        absent += [
            f"{before}{number}{after}"
            for number in range(max(by_number) + 1)
            for after in sorted(every - by_number.get(number, set()))
        ]
    return absent


def _is_numbered(keys: Iterable[str]) -> bool:
    """Whether keys that differ in one number have the numbers from 0 on; True for keys that differ in other ways."""
    families: dict[tuple[str, ...], set[int]] = {}
    cut = [(_NUMBER.split(key), [int(number) for number in _NUMBER.findall(key)]) for key in keys]
    lengths = {len(numbers) for _, numbers in cut}
    if len(lengths) != 1 or not max(lengths):
        return True
    varying = [place for place in range(max(lengths)) if len({numbers[place] for _, numbers in cut}) > 1]
    if len(varying) != 1:
        return True
    for texts, numbers in cut:
        families.setdefault(tuple(texts), set()).add(numbers[varying[0]])
    return all(found == set(range(len(found))) for found in families.values())
