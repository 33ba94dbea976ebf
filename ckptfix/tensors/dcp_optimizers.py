"""The optimizers in folders of torch.distributed.checkpoint (DCP), as FSDP saves them.

Facts from torch 2.13 (``distributed/checkpoint/_nested_dict.py``, ``state_dict.py``): the planner
makes an item of each tensor and of each other value under ``optimizer.state.<fqn>`` and
``optimizer.param_groups.<number>``; before 2.4 all param groups were one item. With
``flatten_optimizer_state_dict`` the keys of the state dict itself are ``state.<fqn>.<state>`` and
``param_groups.<fqn>.<hyperparameter>``, and the groups are lost: those whose hyperparameters are
equal are put together again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from msgspec.structs import replace

from ckptfix.checkpoint.dcp import flattened_optimizers, has_groups, optimizers_in
from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.dcp_items import dcp_problems, read_item
from ckptfix.formats.dcp_metadata import (
    METADATA_NAME,
    DcpMetadata,
    flattened_keys,
    flattened_names,
    flattened_parts,
)
from ckptfix.formats.dcp_rewrite import Steps, paths_of
from ckptfix.formats.dcp_stream import StoredItem
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.storage.files import AnyPath, FileReader
from ckptfix.storage.paths import command, unreadable
from ckptfix.storage.reading import open_reader
from ckptfix.tensors.dcp_tensors import DcpLayouts, read_metadata_of
from ckptfix.tensors.optimizer_files import (
    GROUPS,
    PARAMS,
    STATE,
    PickledValues,
    Unread,
    optimizer_state,
)
from ckptfix.tensors.optimizers import OptimizerState, Strategy
from ckptfix.tensors.stored import StoredTensor

_SMALL = 1 << 13  # bytes of an item that is remembered: those of one value are equal in every byte


@paused_gc()
def dcp_optimizers(root: AnyPath, where: PurePosixPath, index: int) -> tuple[OptimizerState, ...]:
    """Return the optimizers in a DCP folder, by its metadata, the headers of tensors, and the items
    of other values.

    Their positions follow ``index``. Raises OperationError when a part of one is missing or cannot
    be read, OSError.
    """
    folder = root / where
    metadata = read_metadata_of(folder)
    paths = paths_of(metadata)
    prefixes = [
        prefix for prefix in optimizers_in(paths.values()) if _is_complete(paths.values(), prefix)
    ]
    prefixes += [
        prefix for prefix in flattened_optimizers(paths.values()) if prefix not in prefixes
    ]
    found = []
    for number, prefix in enumerate(prefixes):
        mine = dict(_below(paths, prefix))
        found.append(
            _optimizer(folder, where, metadata, mine, prefix, index + number, len(prefixes) > 1)
        )
    return tuple(found)


def _is_complete(paths: Iterable[Steps], prefix: Steps) -> bool:
    """Return whether an optimizer has param groups: no loader takes moments alone."""
    depth = len(prefix)
    return has_groups(
        (path for path in paths if len(path) > depth and path[:depth] == prefix), depth
    )


def _below(paths: Mapping[str, Steps], prefix: Steps) -> Iterator[tuple[str, Steps]]:
    """Yield the items of the optimizer at ``prefix``, with the steps from there; what lies next to
    it is left out.
    """
    inside = {
        fqn: path[len(prefix) :] for fqn, path in paths.items() if path[: len(prefix)] == prefix
    }
    flattened = flattened_keys(path[0] for path in inside.values() if path)
    for fqn, path in inside.items():
        if path and (path[0] in flattened or path[0] in (STATE, GROUPS) or len(path) == 1):
            yield fqn, path


def _optimizer(
    folder: AnyPath,
    where: PurePosixPath,
    metadata: DcpMetadata,
    paths: Mapping[str, Steps],
    prefix: Steps,
    index: int,
    is_one_of_several: bool,
) -> OptimizerState:
    """Return one optimizer. ``paths``: fqn of each of its items -> steps below ``prefix``."""
    check = command("check", folder)
    for problem in dcp_problems(metadata):
        if problem.fqn in paths:
            raise OperationError(f"{folder}: {problem.fqn!r}: {problem.message}; next: {check}")
    tensors = [one for one in metadata.tensors if one.fqn in paths and one.dtype is not None]
    layouts = DcpLayouts(folder, metadata, tensors)
    values: dict[str, Any] = {
        one.fqn: StoredTensor(
            _dotted(paths[one.fqn]), one.dtype or "", one.shape, layouts.layout(one)
        )
        for one in tensors
    }
    for one in metadata.tensors:
        if one.fqn in paths and one.dtype is None:
            values[one.fqn] = Unread(f"a tensor of torch.{one.torch_dtype}")
    items = [metadata.stored[item.fqn, None] for item in metadata.items if item.fqn in paths]
    values |= _items(folder, items, paths)
    used = {item.path for (fqn, _), item in metadata.stored.items() if fqn in paths}
    label = str(where) if where.parts else folder.resolve().name
    try:
        return optimizer_state(
            _nested([(path, values[fqn]) for fqn, path in paths.items()]),
            label=label + ("".join(f"[{step!r}]" for step in prefix) if is_one_of_several else ""),
            index=index,
            files=tuple(where / name for name in sorted({METADATA_NAME, *map(str, used)})),
            strategy=Strategy.FSDP,
            checksums=layouts.checksums(),
        )
    except FormatError as error:
        raise OperationError(f"{folder}: {error}; next: {check}") from error


def _dotted(path: Steps) -> str:
    return ".".join(map(str, path))


def _items(
    folder: AnyPath, items: Sequence[StoredItem], paths: Mapping[str, Steps]
) -> Iterator[tuple[str, Any]]:
    """Yield the values that are not tensors, by the fqns of their items."""
    by_file: dict[PurePosixPath, list[StoredItem]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    known: dict[bytes, Any] = {}
    for name, group in by_file.items():
        path = folder / name
        try:
            with open_reader(path) as reader:
                for item in sorted(group, key=lambda one: one.offset):
                    yield item.fqn, _item(path, reader, item, _dotted(paths[item.fqn]), known)
        except FormatError as error:
            raise OperationError(f"{path}: {error}; next: {command('check', folder)}") from error
        except OSError as error:
            raise OperationError(f"{path}: {unreadable(path, error)}") from error


def _item(
    path: AnyPath, reader: FileReader, item: StoredItem, name: str, known: dict[bytes, Any]
) -> Any:
    data = (
        reader.read(item.offset, item.length)
        if item.length <= _SMALL and not item.transforms
        else b""
    )
    if data in known:
        return known[data]
    file = read_item(reader, item)
    ranges = {
        key: (item.offset + offset, length) for key, (offset, length) in file.storage_ranges.items()
    }
    value = PickledValues(path, replace(file, storage_ranges=ranges)).value(file.tree.root, name)
    if data and not ranges:
        known[data] = value
    return value


def _nested(values: Sequence[tuple[Steps, Any]]) -> Any:
    """Return the state dict of an optimizer that the planner took apart."""
    keys = flattened_keys(path[0] for path, _ in values)
    if keys:
        return _unflattened(
            [(str(path[0]), path[1:], value) for path, value in values if path[0] in keys]
        )
    root: dict[str | int, Any] = {}
    for path, value in values:
        _put(root, path, value)
    root.setdefault(STATE, {})  # a planner leaves out what has no items
    groups = root.get(GROUPS)
    if isinstance(groups, dict) and all(type(key) is int for key in groups):
        root[GROUPS] = [groups[number] for number in sorted(groups)]
    return root


def _put(into: dict[str | int, Any], path: Steps, value: Any) -> None:
    for step in path[:-1]:
        inner = into.setdefault(step, {})
        if not isinstance(inner, dict):
            raise FormatError(
                f"the item {_dotted(path)!r:.200} is inside {step!r:.80}, which is itself an item"
            )
        into = inner
    into[path[-1]] = value


def _unflattened(values: Sequence[tuple[str, Steps, Any]]) -> dict[str, Any]:
    """Return the state dict that ``flatten_optimizer_state_dict`` made keys of."""
    names = flattened_names(key for key, _, _ in values)
    known = frozenset(names)
    states: dict[str | int, Any] = {}
    options: dict[str, dict[str | int, Any]] = {name: {} for name in names}
    for key, rest, value in values:
        parts = flattened_parts(key, known)
        if parts is None:
            raise FormatError(f"{key!r:.200} does not belong to a parameter of any param group")
        begin, name, end = parts
        into = states.setdefault(name, {}) if begin == f"{STATE}." else options[name]
        _put(into, (end[1:], *rest), value)
    groups: list[dict[str, Any]] = []
    members: dict[str, list[str]] = {}
    for name in names:
        text = repr(sorted(options[name].items(), key=str))
        if text not in members:
            members[text] = []
            groups.append(
                {**{str(key): one for key, one in options[name].items()}, PARAMS: members[text]}
            )
        members[text].append(name)
    return {STATE: states, GROUPS: groups}
