"""Two DCP folders side by side: do they hold the same names, and the same bytes?

What is compared is whole items, each a file of torch.save: names are in none of them, so that a model saved twice with
other names has equal items. Models that were cut otherwise are not compared.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.keys import KeyMap
from ckptfix.checkpoint.pairing import Progress, coalesce
from ckptfix.checkpoint.sharded import ShardedState
from ckptfix.formats.dcp_metadata import DcpMetadata
from ckptfix.formats.dcp_rewrite import Steps, paths_of
from ckptfix.storage.comparing import (
    Digests,
    Run,
    first_difference,
    same_bytes_without_reading,
    sample_runs,
)
from ckptfix.storage.reading import open_reader

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


def signature(state: ShardedState) -> Hashable:
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
