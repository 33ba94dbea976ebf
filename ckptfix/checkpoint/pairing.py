"""Two components compared: do they hold the same keys, and the same bytes?"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.dcp import ShardedState
from ckptfix.checkpoint.folder import Component
from ckptfix.checkpoint.keys import KeyMap
from ckptfix.formats.dcp_metadata import DcpMetadata
from ckptfix.formats.dcp_rewrite import Steps, paths_of
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.tensor import TensorInfo
from ckptfix.formats.torch_file import TorchFile, same_storages
from ckptfix.storage.comparing import Digests, Run, first_difference, same_bytes_without_reading, sample_runs
from ckptfix.storage.reading import open_reader

# Two components side by side: do they hold the same names, and the same bytes?

Progress = Callable[[int], None]
"""Called with a number of bytes each time that many more have been read."""

STRUCTURE = "(structure)"
"""The answer of ``first_unequal`` where no tensor differs but what is around them: no name of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Two components with equal names (once unwrapped), dtypes and shapes.

    ``runs`` are the byte ranges, offset in ``kept`` and offset in ``other``, that must agree for the two to be
    equal; None when their structures already differ, so that no bytes can make them equal.
    """

    kept: Component
    other: Component
    runs: tuple[Run, ...] | None


def pair_up(kept: Component, other: Component) -> Pairing | None:
    """Pair two components tensor by tensor, or return None when names, dtypes or shapes differ.

    Files without a state dict of their own (an optimizer) pair by the structure of the whole pickle.
    """
    if isinstance(kept.content, SafetensorsFile) and isinstance(other.content, SafetensorsFile):
        return _pair_safetensors(kept, other)
    if isinstance(kept.content, TorchFile) and isinstance(other.content, TorchFile):
        return _pair_torch(kept, other)
    return None


def signature(component: Component) -> Hashable:
    """Return a value that is equal for any two components that ``pair_up`` would pair; to compare only likely ones."""
    names = frozenset((fqn, tensor.dtype, tensor.shape) for fqn, tensor in _by_name(component).items())
    if not isinstance(component.content, TorchFile):
        return names
    return names, tuple(sorted(length for _, length in component.content.storage_ranges.values()))


def first_unequal(
    root: Path,
    pairing: Pairing,
    *,
    full: bool,
    progress: Progress | None = None,
    digests: Digests | None = None,
) -> str | None:
    """Return where two paired components first differ: a tensor's name, ``STRUCTURE``, or None when they are equal.

    ``full`` reads every byte; otherwise a few pages of several tensors. One file under two names, or the same
    blocks of a file system with reflinks, are equal without a read. ``digests`` gets those of what was read in full.
    """
    if pairing.runs is None:
        return STRUCTURE
    with open_reader(root / pairing.kept.path) as one, open_reader(root / pairing.other.path) as two:
        if same_bytes_without_reading(one.fd, two.fd, pairing.runs):
            if progress is not None:
                progress(2 * sum(run.length for run in pairing.runs))
            return None
        difference = first_difference(one.fd, two.fd, sample_runs(pairing.runs))
        if difference is None and full:
            difference = first_difference(one.fd, two.fd, pairing.runs, progress=progress, digests=digests)
    return None if difference is None else _tensor_at(pairing.kept, difference.offset_a)


def strip_wrappers(component: Component) -> KeyMap:
    """Return the map that takes every leading wrapper off the names of a component."""
    scope = component.whole
    return KeyMap(remove=scope.chain if scope else ())


def _pair_safetensors(kept: Component, other: Component) -> Pairing | None:
    left, right = _by_name(kept), _by_name(other)
    if left.keys() != right.keys():
        return None
    runs: list[Run] = []
    for fqn, tensor in left.items():
        twin = right[fqn]
        if (tensor.dtype, tensor.shape) != (twin.dtype, twin.shape):
            return None
        assert tensor.data_offsets is not None  # safetensors: always one range
        assert twin.data_offsets is not None
        begin, end = tensor.data_offsets
        runs.append(Run(begin, twin.data_offsets[0], end - begin))
    return Pairing(kept=kept, other=other, runs=coalesce(runs))


def _pair_torch(kept: Component, other: Component) -> Pairing | None:
    left, right = _by_name(kept), _by_name(other)
    if left.keys() != right.keys() or any(
        (tensor.dtype, tensor.shape) != (right[fqn].dtype, right[fqn].shape) for fqn, tensor in left.items()
    ):
        return None
    assert isinstance(kept.content, TorchFile)
    assert isinstance(other.content, TorchFile)
    storages = same_storages(kept.content, other.content, strip_wrappers(kept), strip_wrappers(other))
    if storages is None:
        return Pairing(kept=kept, other=other, runs=None) if left else None
    runs = [Run(one[0], two[0], one[1]) for one, two in storages]
    return Pairing(kept=kept, other=other, runs=coalesce(runs))


def _by_name(component: Component) -> dict[str, TensorInfo]:
    rename = strip_wrappers(component)
    return {rename(tensor.fqn): tensor for tensor in component.tensors}


def coalesce(runs: list[Run]) -> tuple[Run, ...]:
    """Join runs that are neighbours in both files: fewer, longer reads, and a shorter recipe."""
    joined: list[Run] = []
    for run in sorted(runs):
        if run.length == 0:
            continue
        last = joined[-1] if joined else None
        if (
            last
            and last.offset_a + last.length == run.offset_a
            and last.offset_b + last.length == run.offset_b
        ):
            joined[-1] = Run(last.offset_a, last.offset_b, last.length + run.length)
        else:
            joined.append(run)
    return tuple(joined)


def _tensor_at(component: Component, offset: int) -> str:
    for tensor in component.tensors:
        if tensor.data_offsets and tensor.data_offsets[0] <= offset < tensor.data_offsets[1]:
            return tensor.fqn
    return f"(byte {offset})"


# Two DCP folders side by side: do they hold the same names, and the same bytes?
#
# What is compared is whole items, each a file of torch.save: names are in none of them, so that a model
# saved twice with other names has equal items. Models that were cut otherwise are not compared.

Files = tuple[PurePosixPath, PurePosixPath]
"""A file of the folder that is kept, and one of the other folder; both from the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedPairing:
    """Two folders with equal names (once unwrapped), dtypes, shapes and chunks.

    ``runs``: which ranges of which files must agree for the two to be equal.
    """

    kept: ShardedState
    other: ShardedState
    runs: Mapping[Files, tuple[Run, ...]] = field(repr=False)

    @property
    def size(self) -> int:
        """The bytes of one of the two that must agree."""
        return sum(run.length for runs in self.runs.values() for run in runs)


def unwrapped(state: ShardedState) -> dict[Steps, str]:
    """Return each item's keys without the wrappers that all names of the model carry, with DCP's name of it."""
    assert state.metadata is not None
    scope = state.model
    depth = len(scope.path) if scope is not None else 0
    strip = KeyMap(remove=scope.chain if scope is not None else ())
    found: dict[Steps, str] = {}
    for fqn, path in paths_of(state.metadata).items():
        step = path[depth] if len(path) > depth else None
        is_model = scope is not None and tuple(map(str, path[:depth])) == scope.path
        if is_model and isinstance(step, str):
            path = (*path[:depth], strip(step), *path[depth + 1 :])
        found[path] = fqn
    return found


def dcp_signature(state: ShardedState) -> Hashable:
    """Return a value that is equal for any two that ``pair_sharded`` would pair; to compare only likely ones."""
    return frozenset(unwrapped(state)), len(state.metadata.stored) if state.metadata is not None else 0


def pair_sharded(kept: ShardedState, other: ShardedState) -> ShardedPairing | None:
    """Pair two folders item by item, None when they differ by their metadata or one of them is not whole."""
    if kept.metadata is None or other.metadata is None or kept.model is None or other.model is None:
        return None
    left, right = unwrapped(kept), unwrapped(other)
    if left.keys() != right.keys() or not _is_whole(kept) or not _is_whole(other):
        return None
    here, there = _tensors(kept.metadata), _tensors(other.metadata)
    names = {left[path]: right[path] for path in left}
    if any(here.get(one) != there.get(two) for one, two in names.items()):
        return None
    runs: dict[Files, list[Run]] = {}
    if len(kept.metadata.stored) != len(other.metadata.stored):
        return None
    for (fqn, offsets), item in kept.metadata.stored.items():
        twin = other.metadata.stored.get((names.get(fqn, fqn), offsets))
        if twin is None or (item.length, item.transforms) != (twin.length, twin.transforms):
            return None
        runs.setdefault((item.path, twin.path), []).append(Run(item.offset, twin.offset, item.length))
    return ShardedPairing(
        kept=kept,
        other=other,
        runs={(kept.path / one, other.path / two): coalesce(found) for (one, two), found in runs.items()},
    )


def _is_whole(state: ShardedState) -> bool:
    assert state.metadata is not None
    return all(
        (file := state.files.get(state.path / path)) is not None
        and all(item.offset + item.length <= file.size for item in items)
        for path, items in state.metadata.items_by_file().items()
    )


def _tensors(metadata: DcpMetadata) -> dict[str, object]:
    return {one.fqn: (one.torch_dtype, one.shape, sorted(one.chunks)) for one in metadata.tensors}


def first_unequal_item(
    root: Path,
    pairing: ShardedPairing,
    *,
    full: bool,
    progress: Progress | None = None,
    digests: dict[PurePosixPath, Digests] | None = None,
) -> str | None:
    """Return the name of an item that differs, None when all are equal.

    ``full`` reads every byte; otherwise a few pages of each file. ``digests`` gets those of what was read in full, by
    file of the folder that is kept.
    """
    for quick in (True, False) if full else (True,):
        for (path, other), runs in pairing.runs.items():
            with open_reader(root / path) as one, open_reader(root / other) as two:
                if same_bytes_without_reading(one.fd, two.fd, runs):
                    if progress is not None and not quick:
                        progress(2 * sum(run.length for run in runs))
                    continue
                difference = first_difference(
                    one.fd,
                    two.fd,
                    sample_runs(runs) if quick else runs,
                    progress=None if quick else progress,
                    digests=None if quick or digests is None else digests.setdefault(path, {}),
                )
            if difference is not None:
                return _item_at(pairing.kept, path, difference.offset_a)
    return None


def _item_at(state: ShardedState, path: PurePosixPath, offset: int) -> str:
    assert state.metadata is not None
    for item in state.metadata.stored.values():
        if state.path / item.path == path and item.offset <= offset < item.offset + item.length:
            return item.fqn
    return f"(byte {offset} of {path})"
