"""Saved optimizers as their headers show them: in files of torch, in bundles, and in DCP
folders.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from msgspec import Struct, field

from ckptfix.checkpoint.dcp import FLATTENED, DcpFolder, optimizers_in
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.keys import WRAPPERS
from ckptfix.checkpoint.roles import Role
from ckptfix.errors import FormatError
from ckptfix.formats.dcp_metadata import DcpMetadata, DcpTensor, flattened_parts
from ckptfix.formats.dcp_rewrite import paths_of
from ckptfix.formats.pickle_tree import Node, Text, child, is_dict_like, items_of, pairs
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_pickle import is_optimizer
from ckptfix.formats.torch_tensors import (
    PickledStorage,
    PickledTensor,
    is_tensor,
    read_tensor,
    storages,
)
from ckptfix.storage.files import AnyPath
from ckptfix.tensors.dcp_tensors import DcpLayouts
from ckptfix.tensors.parameter_names import SHAPED
from ckptfix.tensors.single_files import torch_layout
from ckptfix.tensors.stored import Layout
from ckptfix.wording import Brief

Shape = tuple[int, ...]

COMMON_OPTIONS = frozenset((
    "lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "betas", "eps", "weight_decay", "amsgrad",
    "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay",
    "momentum", "dampening", "nesterov", "base_momentum", "max_momentum", "alpha", "centered",
    "lr_decay", "initial_accumulator_value", "rho", "momentum_decay", "lambd", "t0", "etas",
    "step_sizes", "params", "param_names",
))  # fmt: skip
"""Hyperparameters of torch's optimizers whose moments have the shape of their parameter, and of its
schedulers.

A param group with others belongs to an optimizer that may keep other shapes: Adafactor, GaLore,
Shampoo, 8 bit.
"""

_STATE, _GROUPS = "state", "param_groups"
_LAST_STEP = 1 << 53
"""A larger number in a pickle is not a step, and Python refuses to print one of more than 4300
digits.
"""


class SavedOptimizer(Brief, Struct, frozen=True, kw_only=True):
    """An optimizer as its headers show it. ``path``: of its file or folder. ``key``: the keys that
    lead to it in a file that holds more, "" for a file of one optimizer.

    ``groups``: the parameters of each param group; numbers as text, or keys. ``options``: the keys
    of the groups. ``states``: parameter -> state -> shape, None for another value than a plain
    tensor. ``step``: the last one, None where it is kept in tensors, as torch does since 1.12.
    ``is_named``: by keys. ``index``: its position. ``values``: the numbers and flags of each group,
    "" for others; empty for a DCP folder. ``names``: number -> key, where torch recorded it.
    ``has_strangers``: it numbers its parameters and keeps states under keys, or the other way
    round. ``tensors``: parameter -> state -> tensor, of those that are tensors. ``layout``: returns
    where the bytes of one are, with paths from the checkpoint; raises OperationError where they
    cannot be read.
    """

    path: PurePosixPath
    index: int
    is_named: bool
    options: frozenset[str]
    groups: tuple[tuple[str, ...], ...]
    states: Mapping[str, Mapping[str, Shape | None]]
    step: int | None = None
    values: tuple[Mapping[str, object], ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    has_strangers: bool = False
    key: str = ""
    tensors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    layout: Callable[[AnyPath, Any], Layout] | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether its hyperparameters are those of torch's own optimizers."""
        return self.options <= COMMON_OPTIONS

    @property
    def parameters(self) -> list[str]:
        """The parameters of all param groups."""
        return [name for group in self.groups for name in group]

    @property
    def shapes(self) -> dict[str, set[Shape]]:
        """The shapes of the states that have that of their parameter, by parameter."""
        return {
            name: {
                shape for state, shape in states.items() if state in SHAPED and shape is not None
            }
            for name, states in self.states.items()
        }


def saved_optimizers(
    folder: CheckpointFolder, sharded: Sequence[DcpFolder]
) -> Iterator[SavedOptimizer]:
    """Yield the optimizers of a scanned folder whose headers or metadata can be read."""
    for component in folder.components:
        is_one = component.role is Role.OPTIMIZER and component.name.rank is None
        if is_one and isinstance(component.content, TorchFile):
            root = component.content.tree.root
            if type(root) is Node and is_optimizer(root):
                yield from optimizers_in_file(component, component.content, [((), root)])
    for state in sharded:
        if state.metadata is not None:
            yield from optimizers_of(folder.root, state)


def optimizers_in_file(
    component: Component, file: TorchFile, places: Iterable[tuple[tuple[str, ...], Node]]
) -> Iterator[SavedOptimizer]:
    """Yield the optimizers at these places of a file, but for those that are not a ``state_dict()``
    of torch's form.

    ``places``: the keys that lead to an optimizer, and its dict.
    """
    # A few bytes can refer to one long list again and again.
    left = len(file.tree.data)
    try:
        known = storages(file.tree)
    except FormatError:
        return  # another finding is about it
    for keys, node in places:
        try:
            reading = _Reading(node, known, left, file)
        except FormatError:
            continue
        left = reading.left
        yield reading.saved(component, ".".join(keys))


class _Reading:
    """One reading of an optimizer's dict, whose entries are taken from ``left``.

    Raises FormatError for params that are neither numbers nor keys, and where more entries are
    there than ``left``.
    """

    def __init__(
        self, node: Node, known: Mapping[str, PickledStorage], left: int, file: TorchFile
    ) -> None:
        self.left = left
        self._file = file
        self._tensors: dict[str, dict[str, PickledTensor]] = {}
        self._known = known
        self._groups: list[tuple[str, ...]] = []
        self._values: list[dict[str, object]] = []
        self._steps: list[int] = []
        self._names: dict[str, str] = {}
        self._states: dict[str, dict[str, Shape | None]] = {}
        self._has_strangers = False
        self._is_named = False
        for group in items_of(child(node, _GROUPS)):
            self._read_group(group)
        for key, state in pairs(child(node, _STATE)):
            name = _name(key)
            if name is not None:
                self._read_state(key, name, state)

    def saved(self, component: Component, key: str) -> SavedOptimizer:
        """Return the optimizer of this file and these keys."""
        return SavedOptimizer(
            path=component.path,
            key=key,
            index=component.name.index,
            is_named=self._is_named,
            options=frozenset(option for options in self._values for option in options),
            groups=tuple(self._groups),
            states=self._states,
            step=max(self._steps, default=None),
            values=tuple(self._values),
            names=self._names,
            has_strangers=self._has_strangers,
            tensors=self._tensors,
            layout=lambda root, tensor: torch_layout(root / component.path, self._file, tensor),
        )

    def _take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise FormatError("an optimizer has more entries than its file has bytes")

    def _read_group(self, group: Any) -> None:
        members = items_of(child(group, "params"))
        labels = items_of(child(group, "param_names"))
        values = {
            key.value: "" if isinstance(value, Node | tuple) else value
            for key, value in pairs(group)
            if type(key) is Text
        }
        self._take(len(members) + len(labels) + len(values))
        numbers = tuple(name for member in members if (name := _name(member)) is not None)
        if len(numbers) != len(members):
            raise FormatError("a param group has params that are neither numbers nor keys")
        self._is_named = self._is_named or any(type(member) is Text for member in members)
        self._groups.append(numbers)
        self._values.append(values)
        if len(labels) == len(members):
            pairs_of_names = zip(numbers, labels, strict=True)
            self._names.update(
                {number: label.value for number, label in pairs_of_names if type(label) is Text}
            )

    def _read_state(self, key: Any, name: str, state: Any) -> None:
        if not is_dict_like(state):
            return
        entries = {
            word.value: _tensor(word, value, self._known)
            for word, value in pairs(state)
            if type(word) is Text and value is not None
        }
        self._take(len(entries))
        if self._groups and (type(key) is Text) is not self._is_named:
            # A load leaves the state of an unknown key aside. Other libraries keep values of their
            # own there.
            self._has_strangers |= bool(entries)
            return
        step = child(state, "step")
        if type(step) is int and 0 <= step <= _LAST_STEP:
            self._steps.append(step)
        self._states[name] = {
            word: None if tensor is None else tensor.shape for word, tensor in entries.items()
        }
        self._tensors[name] = {
            word: tensor for word, tensor in entries.items() if tensor is not None
        }


def _name(value: Any) -> str | None:
    if type(value) is Text:
        return value.value
    return str(value) if type(value) is int and abs(value) < 1 << 31 else None


def _tensor(key: Text, value: Any, known: Mapping[str, Any]) -> PickledTensor | None:
    return read_tensor(key, value, known) if type(value) is Node and is_tensor(value) else None


def optimizers_of(root: AnyPath, state: DcpFolder) -> Iterator[SavedOptimizer]:
    """Yield the optimizers in a DCP folder whose metadata names their parameters."""
    metadata = state.metadata
    assert metadata is not None
    paths = paths_of(metadata)
    tensors = {tensor.fqn: tensor for tensor in metadata.tensors}
    found = {tuple(map(str, prefix)): _Parts() for prefix in optimizers_in(paths.values())}
    flattened = {
        scope.path: frozenset(scope.names) for scope in state.scopes if scope.kind == FLATTENED
    }
    for scope in state.scopes:
        depth = _depth(scope.path, found) if scope.kind == "params" else None
        if depth is not None:
            found[scope.path[:depth]].groups.append(scope.names)
    in_keys = {where: _Parts([tuple(names)]) for where, names in flattened.items()}
    for fqn, steps in paths.items() if found or in_keys else ():
        path = tuple(map(str, steps))
        if (depth := _depth(path, found)) is not None:
            parts, kind = found[path[:depth]], path[depth]
            if kind == _STATE and len(path) == depth + 3:
                parts.add(path[-2], path[-1], tensors.get(fqn))
            elif kind == _GROUPS:
                parts.options.add(path[depth + 2] if len(path) > depth + 2 else "")
        elif (
            path
            and path[:-1] in in_keys
            and (cut := flattened_parts(path[-1], flattened[path[:-1]]))
        ):
            begin, name, end = cut
            parts = in_keys[path[:-1]]
            if begin == f"{_STATE}.":
                parts.add(name, end[1:], tensors.get(fqn))
            else:
                parts.options.add(end[1:])
    for parts in (*found.values(), *in_keys.values()):
        yield SavedOptimizer(
            path=state.path,
            index=state.name.index if state.name is not None else 0,
            is_named=not all(map(str.isdecimal, parts.states)),
            options=frozenset(parts.options),
            groups=tuple(parts.groups),
            states=parts.states,
            tensors=parts.tensors,
            layout=partial(_dcp_layout, state.path, metadata),
        )


def _dcp_layout(
    path: PurePosixPath, metadata: DcpMetadata, root: AnyPath, tensor: DcpTensor
) -> Layout:
    return DcpLayouts(root / path, metadata, [tensor]).layout(tensor)


class _Parts:
    """The parts of one optimizer in a DCP folder, as far as they were met."""

    def __init__(self, groups: Iterable[tuple[str, ...]] = ()) -> None:
        self.groups = list(groups)
        self.states: dict[str, dict[str, Shape | None]] = {}
        self.tensors: dict[str, dict[str, DcpTensor]] = {}
        self.options: set[str] = set()

    def add(self, name: str, state: str, tensor: DcpTensor | None) -> None:
        """Add a state of a parameter. ``tensor``: None for another value."""
        self.states.setdefault(name, {})[state] = None if tensor is None else tensor.shape
        if tensor is not None:
            self.tensors.setdefault(name, {})[state] = tensor


def _depth(path: tuple[str, ...], found: Mapping[tuple[str, ...], _Parts]) -> int | None:
    """Return the number of steps of a path that lead to one of these optimizers, None where none
    do.

    An optimizer can lie in the state dict of another one, which wraps it: the inner one's parts are
    its own.
    """
    return next((depth for depth in reversed(range(len(path))) if path[:depth] in found), None)


def bare(name: str) -> str:
    """Return a key without its wrappers: private ones anywhere, those of ``prepare`` at its front.

    A user's own ``module`` at the front goes with them, in the weights as in the optimizer.
    """
    *path, last = name.split(".")
    kept = [segment for segment in path if segment not in WRAPPERS or segment == "module"]
    while kept and kept[0] == "module":
        del kept[0]
    return ".".join((*kept, last))
