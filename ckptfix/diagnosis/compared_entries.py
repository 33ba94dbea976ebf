"""A model or an optimizer of a checkpoint, as far as headers describe it, next to the same one of
another checkpoint.
"""

import re
from collections import Counter
from collections.abc import Mapping
from operator import eq
from pathlib import PurePosixPath
from typing import NamedTuple

from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, Shape, bare
from ckptfix.wording import count_of, list_names


class ComparedEntry(NamedTuple):
    """A model or an optimizer by its headers.

    ``keys``: key -> shape; ``shapes`` and ``dtypes``: by bare keys; ``saved``: None for a model.
    """

    path: PurePosixPath
    keys: dict[str, Shape]
    shapes: dict[str, Shape]
    dtypes: dict[str, str]
    saved: SavedOptimizer | None

    def is_alike(self, entry: "ComparedEntry") -> bool:
        """Return whether two entries can be of one model or optimizer. Moments that only one has
        decide nothing.
        """
        if self.saved is None or entry.saved is None:
            return self.shapes == entry.shapes and len(self.keys) == len(entry.keys)
        have, expected = self.saved, entry.saved
        if _lacking(have, expected) or sizes_of_groups(have) != sizes_of_groups(expected):
            return False
        if self.has_other_numbers(entry):
            return False
        return not self.is_of_other_variant(entry) and all(
            shape == shape_there
            for name, states in have.states.items()
            for state, shape in states.items()
            if (shape_there := expected.states.get(name, {}).get(state)) is not None
            and shape is not None
        )

    def has_other_numbers(self, entry: "ComparedEntry") -> bool:
        """Return whether param groups have the numbers of others: torch counts on from group to
        group, and loads by position.
        """
        if self.saved is None or entry.saved is None or self.saved.is_named or entry.saved.is_named:
            return False
        return [*map(frozenset, self.saved.groups)] != [*map(frozenset, entry.saved.groups)]

    def is_reordered(self, entry: "ComparedEntry") -> bool:
        """Return whether param groups count on in an entry, as torch numbers them, and not here."""
        if self.saved is None or entry.saved is None or not self.has_other_numbers(entry):
            return False
        return _counts_on(entry.saved) and not _counts_on(self.saved)

    def is_of_other_variant(self, entry: "ComparedEntry") -> bool:
        """Return whether one of two optimizers is AMSGrad and the other is not."""
        if self.saved is None or entry.saved is None:
            return False
        have, expected = _maxima(self.saved), _maxima(entry.saved)
        return bool(have and expected) and have.isdisjoint(expected)

    def is_of_other_class(self, entry: "ComparedEntry") -> bool:
        """Return whether two optimizers of as many parameters each have options that the other one
        lacks. A newer or older torch only adds options, or only lacks some.
        """
        if self.saved is None or entry.saved is None:
            return False
        return (
            bool(_lacking(self.saved, entry.saved))
            and bool(_lacking(entry.saved, self.saved))
            and sizes_of_groups(self.saved) == sizes_of_groups(entry.saved)
        )

    def has_nothing_of(self, entry: "ComparedEntry") -> bool:
        """Return whether a model is another one than that of an entry, and not a later form of it.

        A model that grew or was compiled has most of its keys or shapes, as has one with adapters.
        """
        shapes, expected = Counter(self.shapes.values()), Counter(entry.shapes.values())
        return self.shapes.items().isdisjoint(entry.shapes.items()) and (
            2 * (shapes & expected).total() < expected.total()
        )

    def is_of_another(self, entry: "ComparedEntry") -> bool:
        """Return whether a model cannot be a later form of an entry, whose parameters the same
        optimizer trains.

        It has the shapes and none of the keys; or no key ends as one of the entry, such as
        ``state.0.exp_avg``.
        """
        have, expected = ({_last(key) for key in model.shapes} for model in (self, entry))
        return self.shapes.keys().isdisjoint(entry.shapes) and (
            have.isdisjoint(expected)
            or Counter(self.shapes.values()) == Counter(entry.shapes.values())
        )

    def is_deeper(self, entry: "ComparedEntry") -> bool:
        """Return whether a model has all keys of an entry, and more layers, which the same
        optimizer cannot train: the model of another run. Or the script froze former heads, and
        began a new one.
        """
        if not entry.shapes.items() <= self.shapes.items():
            return False
        surplus = self.shapes.keys() - entry.shapes.keys()
        layers = {_DIGITS.sub("#", key) for key in entry.shapes}
        return bool(surplus) and all(
            _DIGITS.search(key) and _DIGITS.sub("#", key) in layers for key in surplus
        )

    def is_renamed(self, entry: "ComparedEntry") -> bool:
        """Return whether the names of some keys are all that differs, while the same optimizer
        trains their tensors: only a script that renamed its modules, and the keys of the checkpoint
        that it loaded, saves so.

        A newer torch renames what it parametrizes, as ``weight_g`` to
        ``parametrizations.weight.original0``, and loads both.
        """
        renamed, lost = self.shapes.keys() - entry.shapes.keys(), entry.shapes.keys() - self.shapes
        return (
            bool(renamed)
            and {key for key, _ in self.shapes.items() - entry.shapes.items()} == renamed
            and Counter(map(self.shapes.get, renamed)) == Counter(map(entry.shapes.get, lost))
            and not any("parametrizations" in key.split(".") for key in renamed)
        )

    def lost_part(self, entry: "ComparedEntry") -> str:
        """Return the key of a tensor that alone is missing of its module, "" where none is, or more
        differs than missing keys.

        A script that stops tracking the statistics of a BatchNorm drops two tensors of each.
        Integers do not count: libraries stop saving the indexes of positions, and torch makes up
        for ``num_batches_tracked``.
        """
        if not self.shapes.items() < entry.shapes.items():
            return ""
        modules = {key.rpartition(".")[0] for key in self.shapes}
        lost = [key for key in entry.shapes.keys() - self.shapes if is_float(entry.dtypes[key])]
        counts = Counter(key.rpartition(".")[0] for key in lost)
        alone = modules & {module for module, count in counts.items() if count == 1}
        return min((key for key in lost if key.rpartition(".")[0] in alone), default="")

    def is_shuffled(self, entry: "ComparedEntry") -> bool:
        """Return whether an optimizer has the groups and the moments of an entry, and gives them to
        others.
        """
        if (
            self.saved is None
            or entry.saved is None
            or sizes_of_groups(self.saved) != sizes_of_groups(entry.saved)
        ):
            return False
        have, expected = (
            Counter(tuple(sorted(known_shapes(states).items())) for states in saved.states.values())
            for saved in (self.saved, entry.saved)
        )
        return have == expected

    def is_partly_wrapped(self, entry: "ComparedEntry") -> bool:
        """Return whether some keys begin with a wrapper that none has in an entry: no save wraps a
        part of a model.
        """
        wrapped = sum(key.startswith("module.") for key in self.keys)
        # A model with "weight" may have gained a module of the name "module": "module.weight" is no
        # wrapped key then.
        is_distinct = len(self.keys) == len(self.shapes)
        return 0 < wrapped < len(self.keys) and entry.keys == entry.shapes and is_distinct

    def is_wrapped_unlike(self, entry: "ComparedEntry") -> bool:
        """Return whether wrappers in the keys are all that differs."""
        are_copies = all(self.shapes[bare(key)] == shape for key, shape in self.keys.items())
        return self.shapes == entry.shapes and self.keys != entry.keys and are_copies

    def difference(self, entry: "ComparedEntry") -> tuple[str, str]:
        """Return in words what this one has, and what the other entry of its number has."""
        wrapped = sorted(self.keys.keys() - entry.keys.keys())
        # A file may have a tensor both with and without a wrapper.
        if self.is_wrapped_unlike(entry) and wrapped:
            key_there = next(name for name in entry.keys if bare(name) == bare(wrapped[0]))
            words = f"{len(wrapped)} of {count_of(len(self.keys), 'key')}"
            return f"{words} with different wrappers, such as {wrapped[0]!r}", repr(key_there)
        if self.saved is None or entry.saved is None:
            if self.is_renamed(entry):
                renamed = sorted(self.shapes.keys() - entry.shapes.keys())
                words = f"{len(renamed)} of {count_of(len(self.keys), 'key')}"
                key = _most_alike(renamed[0], self.shapes, entry.shapes)
                return f"{words} under a different name, such as {renamed[0]!r}", repr(key)
            if lost := self.lost_part(entry):
                words = f"{count_of(len(self.keys), 'tensor')}, without {lost!r}"
                return words, count_of(len(entry.keys), "tensor")
            strange = len(self.keys.items() - entry.keys.items())
            words = f", {strange} of them with different keys or shapes" if strange else ""
            return f"{count_of(len(self.keys), 'tensor')}{words}", count_of(
                len(entry.keys), "tensor"
            )
        have, expected = self.saved, entry.saved
        if sizes_of_groups(have) != sizes_of_groups(expected):
            return _groups(have), _groups(expected)
        if lacking := _lacking(have, expected):
            return f"param groups without {list_names(lacking)}", "param groups with these options"
        if self.has_other_numbers(entry):
            return _numbers(have), _numbers(expected)
        if self.is_of_other_variant(entry):
            kept, left_out = "moments with max_exp_avg_sq", "moments without max_exp_avg_sq"
            return (kept, left_out) if True in _maxima(have) else (left_out, kept)
        count = sum(
            any(
                known_shapes(expected.states.get(name, {})).get(state, shape) != shape
                for state, shape in own
            )
            for name, own in (
                (name, known_shapes(states).items()) for name, states in have.states.items()
            )
        )
        return (
            f"moments of different shapes for {count_of(count, 'parameter')}",
            "the shapes of its parameters",
        )


_DIGITS = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
"""Number of a layer in a key."""


def _most_alike(renamed: str, own: Mapping[str, Shape], there: Mapping[str, Shape]) -> str:
    """Return the key that a renamed one most likely had."""
    lost = sorted(key for key in there.keys() - own if there[key] == own[renamed])
    return max(lost, key=lambda key: sum(map(eq, key, renamed)))


def is_float(dtype: str) -> bool:
    """Return whether a dtype is one of floating point numbers."""
    return dtype.startswith(("F", "BF"))


def _last(key: str) -> str:
    return key.rpartition(".")[2]


_OF_SCHEDULERS = frozenset(
    (
        "initial_lr",
        "max_lr",
        "min_lr",
        "base_momentum",
        "max_momentum",
        "initial_momentum",
        "swa_lr",
    )
)
"""Options that schedulers of torch add to param groups. No step of an optimizer reads them."""


def _lacking(have: SavedOptimizer, expected: SavedOptimizer) -> list[str]:
    """Return the options that an optimizer lacks. A load keeps options too many, as a newer torch
    adds them.
    """
    return sorted(expected.options - have.options - _OF_SCHEDULERS)


def _maxima(saved: SavedOptimizer) -> set[bool]:
    """Return whether parameters with the moments of Adam have those of AMSGrad, too."""
    return {
        "max_exp_avg_sq" in states for states in saved.states.values() if "exp_avg_sq" in states
    }


def sizes_of_groups(saved: SavedOptimizer) -> list[int]:
    """Return the number of parameters in each param group."""
    return [len(group) for group in saved.groups]


def _groups(saved: SavedOptimizer) -> str:
    sizes = sizes_of_groups(saved)
    of_each = (
        ""
        if len(sizes) < 2
        else f" ({', '.join(map(str, sizes[:8]))}{', ...' if len(sizes) > 8 else ''})"
    )
    return (
        f"{count_of(len(sizes), 'param group')} with {count_of(sum(sizes), 'parameter')}{of_each}"
    )


def _counts_on(saved: SavedOptimizer) -> bool:
    numbers = [int(number) for group in saved.groups for number in sorted(group, key=int)]
    return numbers == sorted(numbers)


def _numbers(saved: SavedOptimizer) -> str:
    first = [group[0] for group in saved.groups if group]
    return (
        f"param groups that start at parameters {', '.join(first[:8])}"
        f"{', ...' if len(first) > 8 else ''}"
    )


def known_shapes(states: Mapping[str, Shape | None]) -> dict[str, Shape]:
    """Return the states of a parameter whose shapes are known."""
    return {state: shape for state, shape in states.items() if shape is not None}
