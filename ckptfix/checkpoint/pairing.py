"""Two entries compared: pairs of their tensors, and the byte ranges that must agree for them to be
equal.

An entry is a file, or a DCP folder. Items of a DCP folder are compared as a unit, each a file of
``torch.save``: they contain no keys, so a model saved twice with other keys has equal items. Models
with different chunks are not compared.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import TypeVar

from msgspec import Struct

from ckptfix.checkpoint.dcp import DcpFolder
from ckptfix.checkpoint.folder import Component
from ckptfix.checkpoint.keys import KeyMap
from ckptfix.formats.dcp_metadata import DcpMetadata
from ckptfix.formats.dcp_rewrite import Steps, paths_of
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.tensor import TensorInfo
from ckptfix.formats.torch_file import TorchFile, content_hash, same_storages
from ckptfix.storage.comparing import (
    Digests,
    Run,
    first_difference,
    same_bytes_without_reading,
    sample_runs,
)
from ckptfix.storage.executor import THREADS, Executor
from ckptfix.storage.files import AnyPath
from ckptfix.storage.parallel import Progress
from ckptfix.storage.reading import open_reader
from ckptfix.wording import Brief

_Equality = TypeVar("_Equality")

Saved = Component | DcpFolder
"""Entry of a checkpoint: a file or a DCP folder."""

Files = tuple[PurePosixPath, PurePosixPath]
"""Pair of paths relative to the checkpoint: a file of the kept entry, and one of the other entry.
"""

STRUCTURE = "(structure)"
"""Result of ``first_unequal`` where all tensors are equal and the structure differs; not the key of
a tensor.
"""


class Pairing(Brief, Struct, frozen=True, kw_only=True):
    """Two entries with equal keys (once unwrapped), dtypes and shapes.

    ``runs``: the ranges of files that must agree for the two to be equal; None when the structures
    differ, so that no bytes can make the two equal.
    """

    kept: Saved
    other: Saved
    runs: Mapping[Files, tuple[Run, ...]] | None

    @property
    def size(self) -> int:
        """The number of bytes per entry that must agree."""
        return sum(run.length for runs in (self.runs or {}).values() for run in runs)


def pair_up(kept: Saved, other: Saved) -> Pairing | None:
    """Pair two entries tensor by tensor, or return None when keys, dtypes or shapes differ, or one
    is incomplete.

    Files without a state dict of their own (an optimizer) pair by the structure of the whole
    pickle.
    """
    if isinstance(kept, DcpFolder) or isinstance(other, DcpFolder):
        both_dcp = isinstance(kept, DcpFolder) and isinstance(other, DcpFolder)
        return _pair_dcp(kept, other) if both_dcp else None  # type: ignore[arg-type]
    left, right = _by_key(kept), _by_key(other)
    if left.keys() != right.keys() or any(
        (tensor.dtype, tensor.shape) != (right[fqn].dtype, right[fqn].shape)
        for fqn, tensor in left.items()
    ):
        return None
    if isinstance(kept.content, SafetensorsFile) and isinstance(other.content, SafetensorsFile):
        found = [_run(tensor, right[fqn]) for fqn, tensor in left.items()]
    elif isinstance(kept.content, TorchFile) and isinstance(other.content, TorchFile):
        storages = same_storages(
            kept.content, other.content, strip_wrappers(kept), strip_wrappers(other)
        )
        if storages is None:
            return Pairing(kept=kept, other=other, runs=None) if left else None
        found = [Run(one[0], two[0], one[1]) for one, two in storages]
    else:
        return None
    return Pairing(kept=kept, other=other, runs={(kept.path, other.path): _coalesce(found)})


def signature(entry: Saved) -> Hashable:
    """Return a value that is equal for any two entries that ``pair_up`` would pair; to compare only
    likely ones.
    """
    if isinstance(entry, DcpFolder):
        return entry.metadata and (
            frozenset(_unwrapped(entry, entry.metadata)),
            len(entry.metadata.stored),
        )
    names = frozenset((fqn, tensor.dtype, tensor.shape) for fqn, tensor in _by_key(entry).items())
    if not isinstance(entry.content, TorchFile):
        return names
    return names, tuple(sorted(length for _, length in entry.content.storage_ranges.values()))


def equal_entries(
    entries: Iterable[Component], compare: Callable[[Pairing], _Equality | None]
) -> Iterator[tuple[Component, Component, _Equality]]:
    """Yield each entry that equals an earlier one, the first such one, and what ``compare`` returns
    for the two.

    ``compare``: None when two paired entries differ. An entry that equals another one is never the
    original of a third.
    """
    signed = [(entry, (entry.role, signature(entry))) for entry in entries]
    alike = Counter(key for _, key in signed)
    known: dict[Hashable, list[Component]] = {}
    for entry, key in signed:
        if alike[key] == 1:
            continue
        # 256 optimizers with different moments took 32,640 comparisons without the hash.
        file = entry.content
        content = content_hash(file, strip_wrappers(entry)) if isinstance(file, TorchFile) else None
        originals = known.setdefault((key, content), [])
        for original in originals:
            pairing = pair_up(original, entry)
            equality = compare(pairing) if pairing is not None else None
            if equality is not None:
                yield original, entry, equality
                break
        else:
            originals.append(entry)


def first_unequal(
    root: AnyPath,
    pairing: Pairing,
    *,
    full: bool,
    progress: Progress | None = None,
    digests: dict[PurePosixPath, Digests] | None = None,
    other_root: AnyPath | None = None,
    executor: Executor = THREADS,
) -> str | None:
    """Return the first difference of two paired entries: a tensor's key, ``STRUCTURE``, or None
    when they are equal.

    ``full`` reads every byte; otherwise a few pages of several tensors. One file under two names
    is equal without a read. ``digests`` gets the digests of ranges read in full, by file of the
    kept entry. ``other_root``: the folder of the other entry, by default the same.
    """
    other_root = root if other_root is None else other_root
    if pairing.runs is None:
        return STRUCTURE
    shared: set[Files] = set()
    for quick in (True, False) if full else (True,):
        for files, runs in pairing.runs.items():
            if files in shared:
                continue
            with open_reader(root / files[0]) as one, open_reader(other_root / files[1]) as two:
                if same_bytes_without_reading(one, two, runs):
                    shared.add(files)
                    if progress is not None:
                        progress(2 * sum(run.length for run in runs))
                    continue
                difference = first_difference(
                    one,
                    two,
                    sample_runs(runs) if quick else runs,
                    progress=None if quick else progress,
                    digests=None if quick or digests is None else digests.setdefault(files[0], {}),
                    executor=THREADS if quick else executor,
                )
            if difference is not None:
                return _key_at(pairing.kept, files[0], difference.offset_a)
    return None


def differing_tensors(
    root: AnyPath, pairing: Pairing, *, full: bool, other_root: AnyPath | None = None
) -> Iterator[str]:
    """Yield the keys of tensors of two paired files that differ, as of ``unequal``.

    ``other_root``: the folder of the other file, by default the same.
    """
    twins = _by_key(pairing.other) if isinstance(pairing.other, Component) else {}
    ours = _by_key(pairing.kept) if isinstance(pairing.kept, Component) else {}
    pairs = ((tensor.fqn, tensor, twins[fqn]) for fqn, tensor in ours.items())
    twin_path = (root if other_root is None else other_root) / pairing.other.path
    return unequal(root / pairing.kept.path, twin_path, pairs, full=full, pages=4)


def unequal(
    first: AnyPath,
    second: AnyPath,
    pairs: Iterable[tuple[str, TensorInfo, TensorInfo]],
    *,
    full: bool,
    pages: int,
) -> Iterator[str]:
    """Yield the keys of tensors that differ in two files, but for those without one range of bytes.

    ``full`` reads every byte of them; otherwise ``pages`` pages of each are compared.
    """
    with open_reader(first) as reader, open_reader(second) as reader_of_twins:
        for fqn, tensor, twin in pairs:
            if tensor.data_offsets is None or twin.data_offsets is None:
                continue
            runs = (_run(tensor, twin),)
            if same_bytes_without_reading(reader, reader_of_twins, runs):
                continue
            some = runs if full else sample_runs(runs, pages=pages)
            if first_difference(reader, reader_of_twins, some) is not None:
                yield fqn


def _run(tensor: TensorInfo, twin: TensorInfo) -> Run:
    assert tensor.data_offsets is not None  # safetensors: always one range
    assert twin.data_offsets is not None
    begin, end = tensor.data_offsets
    return Run(begin, twin.data_offsets[0], end - begin)


def strip_wrappers(entry: Saved) -> KeyMap:
    """Return the map that removes every leading wrapper from the keys of an entry."""
    return KeyMap(remove=entry.chain)


def _by_key(component: Component) -> dict[str, TensorInfo]:
    rename = strip_wrappers(component)
    return {rename(tensor.fqn): tensor for tensor in component.tensors}


def _coalesce(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Join runs that are adjacent in both files: fewer, longer reads, and a shorter recipe."""
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


def _key_at(entry: Saved, path: PurePosixPath, offset: int) -> str:
    if isinstance(entry, Component):
        ranges = ((one.fqn, *one.data_offsets) for one in entry.tensors if one.data_offsets)
    else:
        items = entry.metadata.stored.values() if entry.metadata is not None else ()
        ranges = (
            (item.fqn, item.offset, item.offset + item.length)
            for item in items
            if entry.path / item.path == path
        )
    return next(
        (fqn for fqn, begin, end in ranges if begin <= offset < end), f"(byte {offset} of {path})"
    )


def _pair_dcp(kept: DcpFolder, other: DcpFolder) -> Pairing | None:
    one, two = kept.metadata, other.metadata
    if one is None or two is None or kept.model is None or other.model is None:
        return None
    left, right = _unwrapped(kept, one), _unwrapped(other, two)
    if left.keys() != right.keys() or not _is_complete(kept, one) or not _is_complete(other, two):
        return None
    here, there = _tensors(one), _tensors(two)
    names = {left[path]: right[path] for path in left}
    if any(here.get(first) != there.get(second) for first, second in names.items()):
        return None
    if len(one.stored) != len(two.stored):
        return None
    runs: dict[Files, list[Run]] = {}
    for (fqn, offsets), item in one.stored.items():
        twin = two.stored.get((names.get(fqn, fqn), offsets))
        if twin is None or (item.length, item.transforms) != (twin.length, twin.transforms):
            return None
        files = kept.path / item.path, other.path / twin.path
        runs.setdefault(files, []).append(Run(item.offset, twin.offset, item.length))
    return Pairing(
        kept=kept, other=other, runs={files: _coalesce(found) for files, found in runs.items()}
    )


def _unwrapped(state: DcpFolder, metadata: DcpMetadata) -> dict[Steps, str]:
    """Return each item's path without the wrappers that all keys of the model carry, with DCP's
    name of it.
    """
    scope = state.model
    depth = len(scope.path) if scope is not None else 0
    strip = strip_wrappers(state)
    found: dict[Steps, str] = {}
    for fqn, path in paths_of(metadata).items():
        step = path[depth] if len(path) > depth else None
        is_model = scope is not None and tuple(map(str, path[:depth])) == scope.path
        if is_model and isinstance(step, str):
            path = (*path[:depth], strip(step), *path[depth + 1 :])
        found[path] = fqn
    return found


def _is_complete(state: DcpFolder, metadata: DcpMetadata) -> bool:
    return all(
        (file := state.files.get(state.path / path)) is not None
        and all(item.offset + item.length <= file.size for item in items)
        for path, items in metadata.items_by_file().items()
    )


def _tensors(metadata: DcpMetadata) -> dict[str, object]:
    return {one.fqn: (one.torch_dtype, one.shape, sorted(one.chunks)) for one in metadata.tensors}
