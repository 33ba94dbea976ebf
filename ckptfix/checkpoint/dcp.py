"""DCP folders: their ``.metadata``, their files, and the places where keys of parameters appear."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.filenames import DcpPart, FolderName, parse_dcp_name
from ckptfix.checkpoint.folder import Fingerprint, NameScope, Problem
from ckptfix.checkpoint.keys import (
    KeyMap,
    common_wrappers,
    dotted,
    leading_wrappers,
    without_private_wrappers,
)
from ckptfix.formats.dcp_metadata import METADATA_NAME, DcpMetadata
from ckptfix.formats.dcp_names import (
    GROUPS_KEY,
    STATE_KEY,
    flattened_keys,
    flattened_names,
    flattened_parts,
    model_names,
)
from ckptfix.formats.dcp_rewrite import Steps, paths_of

# What a DCP folder is: what ``.metadata`` says, which files are there, and where names of parameters stand.
#
# Accelerate's FSDP saves ``pytorch_model_fsdp_<i>/`` and ``optimizer_<i>/`` (``utils/fsdp_utils.py``, 1.0
# to 1.15), each by ``torch.distributed.checkpoint``. Any other folder that holds such files counts as well,
# the checkpoint itself too.

METADATA_UNFINISHED = DcpPart.UNFINISHED_METADATA.value
"""What torch writes first, when all data is on disk, and renames to ``.metadata``."""

DATA_SUFFIX = DcpPart.DATA.value


class ShardFile(NamedTuple):
    """A file of a DCP folder. ``is_linked``: reached through a link, or one of several hard links."""

    fingerprint: Fingerprint
    is_linked: bool

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.fingerprint.size


class NamesInItem(NamedTuple):
    """Names that stand as values in a bytes item: DCP's name of the item, and each one's site (``Text``) and value."""

    fqn: str
    names: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedState:
    """One DCP folder. ``path`` is relative to the checkpoint; ``.`` is the checkpoint itself.

    ``name``: its number and role when it is called as Accelerate calls it. ``metadata``: None when it is not there or
    cannot be read (``problem``). ``files``: all regular files, by path from the checkpoint. ``scopes``: where names of
    parameters stand; the path of one leads there in the state dict that was saved. ``listed``: those of them that are a
    bytes item, by path and kind. ``unsafe``: file -> what its pickles can run. ``unread``: the bytes items that could
    not be read, any of which may hold names, and why. ``said``: every string in the other bytes items. ``broken``:
    file -> what is wrong with an item in it, ``unreadable``: file -> why it may not be read. ``siblings``: the DCP
    folders beside the checkpoint when it is one folder of Accelerate's itself.
    ``journals``: it has a journal of its own, of repairs that were made of it alone.
    """

    path: PurePosixPath
    name: FolderName | None
    is_linked: bool
    files: Mapping[PurePosixPath, ShardFile] = field(repr=False)
    metadata: DcpMetadata | None = field(default=None, repr=False)
    problem: Problem | None = None
    scopes: tuple[NameScope, ...] = ()
    listed: Mapping[tuple[tuple[str, ...], str], NamesInItem] = field(default_factory=dict, repr=False)
    unsafe: Mapping[PurePosixPath, tuple[str, ...]] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    said: frozenset[str] = field(default=frozenset(), repr=False)
    siblings: tuple[str, ...] = ()
    journals: bool = False
    broken: Mapping[PurePosixPath, str] = field(default_factory=dict)
    unreadable: Mapping[PurePosixPath, str] = field(default_factory=dict)

    @property
    def metadata_path(self) -> PurePosixPath:
        """Where its ``.metadata`` is, or should be."""
        return self.path / METADATA_NAME

    @property
    def size(self) -> int:
        """The bytes of all its files."""
        return sum(file.size for file in self.files.values())

    @property
    def model(self) -> NameScope | None:
        """The place of a model's names, None where no model is saved."""
        return next((scope for scope in self.scopes if scope.is_model), None)

    @property
    def chain(self) -> tuple[str, ...]:
        """The wrappers that every key of the model carries, () without a model."""
        return self.model.chain if self.model is not None else ()

    @property
    def own_ranks(self) -> tuple[PurePosixPath, ...]:
        """The metadata of single ranks, as a save without collectives leaves it."""
        return tuple(
            path for path in self.files if path.name.endswith(METADATA_NAME) and path.name != METADATA_NAME
        )

    @property
    def named(self) -> tuple[PurePosixPath, ...]:
        """Every file that ``.metadata`` says items are in, from the checkpoint."""
        return tuple(self.path / path for path in self.metadata.files) if self.metadata else ()

    @property
    def data(self) -> tuple[PurePosixPath, ...]:
        """Every file with data that is there, named or not."""
        return tuple(path for path in self.files if path.name.endswith(DATA_SUFFIX))


def rank_of(path: PurePosixPath) -> int | None:
    """Return the rank that wrote a file of data, by its name; None for a name of another kind."""
    name = parse_dcp_name(path.name)
    return name.rank if name is not None and name.part is DcpPart.DATA else None


def holds_dcp(folder: Path) -> bool:
    """Whether a folder holds files of a DCP save. False for one that cannot be listed."""
    try:
        with os.scandir(folder) as listing:
            return any(belongs(entry.name) for entry in listing)
    except OSError:
        return False


def is_empty(folder: Path) -> bool:
    """Whether a folder holds nothing, as one whose files were dropped or moved. False for one that cannot be listed."""
    try:
        return not os.listdir(folder)
    except OSError:
        return False


def belongs(name: str) -> bool:
    """Whether a file of this name is one that a DCP save leaves."""
    return parse_dcp_name(name) is not None


# Where names of parameters stand in the metadata of a DCP folder: in state dicts, and in optimizers.

FLATTENED = "flattened optimizer"
"""The kind of a place where each key holds a name and what it says of it: ``state.<fqn>.exp_avg``."""

_EXTRA_STATE = "_extra_state"
"""The last segment of what ``Module.get_extra_state`` gives, any object, in a state dict."""


def name_scopes(metadata: DcpMetadata) -> Iterator[NameScope]:
    """Yield the places of names in the metadata: each dict of tensors, and the state of each optimizer."""
    paths = paths_of(metadata)
    optimizers = optimizers_in(paths.values())
    yield from _state_dicts(metadata, paths, optimizers)
    for prefix in optimizers:
        depth = len(prefix) + 1
        below = (
            path for path in paths.values() if len(path) > depth and path[:depth] == (*prefix, STATE_KEY)
        )
        yield name_scope((*prefix, STATE_KEY), "optimizer state", (path[depth] for path in below))
    for prefix, keys in _flattened(paths.values()).items():
        yield name_scope(prefix, FLATTENED, flattened_names(keys))


def unmatched_keys(metadata: DcpMetadata) -> Iterator[tuple[str, str]]:
    """Yield each item of a flattened optimizer whose key holds no name that a group has: DCP's name, and the key."""
    paths = paths_of(metadata)
    for prefix, keys in _flattened(paths.values()).items():
        known = frozenset(flattened_names(keys))
        unmatched = {key for key in keys if flattened_parts(key, known) is None}
        for fqn, path in paths.items() if unmatched else ():
            step = path[len(prefix)] if len(path) > len(prefix) else None
            if isinstance(step, str) and step in unmatched and path[: len(prefix)] == prefix:
                yield fqn, step


def _flattened(paths: Iterable[Steps]) -> dict[Steps, list[str]]:
    """Return the keys of each flattened optimizer, by the keys that lead to the dict that it is in."""
    every: dict[Steps, dict[str, None]] = {}
    for path in paths:
        for depth, step in enumerate(path):
            if isinstance(step, str) and "." in step:
                every.setdefault(path[:depth], {})[step] = None
    found = {prefix: flattened_keys(keys) for prefix, keys in every.items()}
    return {prefix: [key for key in every[prefix] if key in own] for prefix, own in found.items() if own}


def _state_dicts(
    metadata: DcpMetadata, paths: Mapping[str, Steps], optimizers: Iterable[Steps]
) -> Iterator[NameScope]:
    """Yield every dict with tensors in it that is no optimizer's, the model first.

    Tensors tell the wrappers, and the state of modules. Any other object beside them, such as a number of steps, is
    a name of the model only with the same wrappers: a script may put its own keys between those of a model.
    """
    model = model_names(metadata)
    own = {(*prefix, key) for prefix in optimizers for key in (STATE_KEY, GROUPS_KEY)}
    tensors: dict[Steps, list[str]] = {}
    others: dict[Steps, list[str]] = {}
    for fqns, found in (
        ([one.fqn for one in metadata.tensors], tensors),
        ([one.fqn for one in metadata.items], others),
    ):
        for fqn in fqns:
            path = paths[fqn]
            step = path[-1] if path else None
            if isinstance(step, str) and not any(path[:depth] in own for depth in range(1, len(path) + 1)):
                found.setdefault(path[:-1], []).append(step)
    first = model.prefix if model is not None else None
    for prefix in sorted(tensors, key=lambda prefix: prefix != first):
        beside = others.get(prefix, [])
        flattened = flattened_keys([*tensors[prefix], *beside])
        names = [name for name in tensors[prefix] if name not in flattened]
        objects = [name for name in beside if name not in flattened]
        names += [name for name in objects if name.rpartition(".")[2] == _EXTRA_STATE]
        begin = dotted(common_wrappers(names))
        names += [name for name in objects if begin and name.startswith(begin)]
        if names:
            yield name_scope(prefix, "state dict", names, is_model=prefix == first)


def name_scope(prefix: Steps, kind: str, steps: Iterable[str | int], *, is_model: bool = False) -> NameScope:
    """Return the place of these names, each once; numbers are none."""
    names = tuple(dict.fromkeys(step for step in steps if type(step) is str))
    if kind != "state dict" and all(map(str.isdecimal, names)):
        names = ()  # the numbers of Optimizer.state_dict(), which DCP makes strings of
    return NameScope(tuple(map(str, prefix)), kind, names, common_wrappers(names), is_model)


def optimizers_in(paths: Iterable[Steps]) -> tuple[Steps, ...]:
    """Return the keys that lead to each state dict of an optimizer: where nothing but its two keys is.

    ``state`` is also what a script calls anything: a dict of models, what a sampler knows. So without a list of groups
    beside it, it must hold a dict for each name, and the names must be those of a model, or look like some.
    """
    every = list(paths)
    found: dict[Steps, list[Steps]] = {}
    for path in every:
        for depth, step in enumerate(path[:-1]):
            if step in (STATE_KEY, GROUPS_KEY):
                found[path[:depth]] = []
    for path in every if found else ():
        for depth in range(len(path)):
            if (below := found.get(path[:depth])) is not None:
                below.append(path)
    known = _Leaves(every)
    accepted: dict[Steps, None] = {}
    for prefix in sorted(found, key=len):
        depth, below = len(prefix), found[prefix]
        if (
            {path[depth] for path in below} <= {STATE_KEY, GROUPS_KEY}
            # In an optimizer it is what a parameter is called.
            and not any(prefix[:shorter] in accepted for shorter in range(depth))
            and (_has_groups(below, depth) or known.is_state(below, depth + 1))
        ):
            accepted[prefix] = None
    return tuple(prefix for prefix in found if prefix in accepted)


def _has_groups(below: Iterable[Steps], depth: int) -> bool:
    """Whether there is a list of groups, or all of them in one item."""
    return any(
        path[depth] == GROUPS_KEY and (len(path) == depth + 1 or type(path[depth + 1]) is int)
        for path in below
    )


class _Leaves:
    """How often each key of an item stands in all dicts, without its wrappers."""

    def __init__(self, every: Iterable[Steps]) -> None:
        self._every = every
        self._count: Counter[str] | None = None  # few folders need it

    def is_state(self, state: list[Steps], depth: int) -> bool:
        """Whether these paths, with a name of a parameter at ``depth``, are an optimizer's, with no groups beside."""
        if any(len(path) < depth + 2 or path[depth - 1] != STATE_KEY for path in state):
            return False  # a value by itself, as the epoch of a sampler
        names = {str(path[depth]) for path in state}
        if all(map(str.isdecimal, names)):
            return True
        if self._count is None:
            self._count = self._counted(self._every)
        every, own = self._count, self._counted(state)
        if any("." in key and count > own[key] for key, count in every.items()):
            return all(every[real] > own[real] for real in map(_real, names))  # of a model beside it
        return all("." in name for name in names) and all(
            len(path) == depth + 2 and "." not in str(path[-1]) for path in state
        )

    @staticmethod
    def _counted(paths: Iterable[Steps]) -> Counter[str]:
        return Counter(_real(path[-1]) for path in paths if path and isinstance(path[-1], str))


def _real(name: str) -> str:
    """Return a name without wrappers, as far as one can tell from it alone."""
    name = without_private_wrappers(name)
    return name[len(dotted(leading_wrappers(name))) :]


def new_paths(
    state: ShardedState, metadata: DcpMetadata, maps: Mapping[tuple[tuple[str, ...], str], KeyMap]
) -> dict[str, Steps]:
    """Return the paths of items that a rename changes: in each place of keys one step is the key of a parameter, or
    holds one.

    Other keys next to those of a model stay: they are the user's own.
    """
    places = [
        (scope, len(scope.path), _new_steps(scope, maps[scope.path, scope.kind]))
        for scope in state.scopes
        if (scope.path, scope.kind) in maps and (scope.path, scope.kind) not in state.listed
    ]
    found: dict[str, Steps] = {}
    for fqn, path in paths_of(metadata).items():
        for scope, depth, new_step in places:
            step = path[depth] if len(path) > depth else None
            if isinstance(step, str) and tuple(map(str, path[:depth])) == scope.path:
                new = new_step(step)
                if new is not None:
                    if new != step:
                        found[fqn] = (*path[:depth], new, *path[depth + 1 :])
                    break
    return found


def _new_steps(scope: NameScope, key_map: KeyMap) -> Callable[[str], str | None]:
    """Return what gives the new key for one in a place of names; None for a key that is of something else."""
    names = frozenset(scope.names)

    def of_name(step: str) -> str | None:
        return key_map(step) if step in names else None

    def of_flattened(step: str) -> str | None:
        parts = flattened_parts(step, names)
        return None if parts is None else parts[0] + key_map(parts[1]) + parts[2]

    return of_flattened if scope.kind == FLATTENED else of_name
