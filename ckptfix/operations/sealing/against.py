"""Compare a checkpoint with another one of any format, whose tensors have the same names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.pairing import Progress
from ckptfix.errors import OperationError
from ckptfix.operations.sealing.contents import Contents, Place, read_contents
from ckptfix.operations.sealing.hashing import FileJob, Hashed, Job, TensorJob, first_place, hash_all
from ckptfix.operations.sealing.judging import Change, Outcome
from ckptfix.operations.sealing.report import Item, Kind
from ckptfix.operations.target import find_target
from ckptfix.weights.stored import StoredTensor, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An item for every file and tensor of either side, the results of the first side, and what was left out."""

    items: tuple[Item, ...]
    hashed: Mapping[str | Place, Hashed]
    not_checked: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Pair:
    """One model of each side; None where a side has no more."""

    ours: Weights | None
    theirs: Weights | None


def compare_with(contents: Contents, path: Path, *, data: bool, progress: Progress | None) -> Comparison:
    """Compare what was read of a checkpoint with the one at ``path``.

    Models are paired by position, tensors by name. Raises UsageError when nothing is at ``path``, OperationError when
    its weights cannot be read, or a file of either side changed meanwhile.
    """
    other = read_contents(find_target(path))
    for side in (contents, other):
        for label, why in side.unreadable.items():
            raise OperationError(f"{side.root / label} cannot be compared: {why}")
    pairs = [_Pair(*one) for one in zip_longest(contents.weights, other.weights)]
    alike = _same_names(contents, other)
    jobs: dict[tuple[bool, str | Place], Job] = {}
    for side, is_ours in ((contents, True), (other, False)):
        for name in alike:
            if contents.files[name].size == other.files[name].size:
                jobs[is_ours, name] = FileJob(side.root / name, side.files[name].size)
        for pair in pairs:
            own, foreign = (pair.ours, pair.theirs) if is_ours else (pair.theirs, pair.ours)
            wanted = _comparable(own, foreign)
            for tensor in own.tensors if own is not None else ():
                scan = data and is_ours
                if own is not None and (scan or tensor.fqn in wanted):
                    jobs[is_ours, Place(own.label, tensor.fqn)] = TensorJob(tensor, scan)
    results = dict(zip(jobs, hash_all(list(jobs.values()), progress=progress), strict=True))
    for side in (contents, other):
        side.check_unchanged()
    if bad := next((key for (is_ours, key), one in results.items() if one.problem and not is_ours), None):
        raise OperationError(f"{other.root}: {bad} cannot be read: {results[False, bad].problem}")
    files = list(_files(contents, other, alike, results))
    tensors = [item for pair in pairs for item in _tensors(contents, other, pair, results)]
    told = (
        ["the manifest; leave out --against"] if (contents.root / ".ckptfix/manifest.json").exists() else []
    )
    if tensors and all(item.change in (Change.MISSING, Change.EXTRA) for item in tensors):
        told.append(
            f"tensors under other names: no name is the same; next: ckptfix diff {contents.root} {path}"
        )
    ours = {key: one for (is_ours, key), one in results.items() if is_ours}
    return Comparison(items=(*files, *tensors), hashed=ours, not_checked=tuple(told))


def _same_names(contents: Contents, other: Contents) -> list[str]:
    return sorted(contents.files.keys() & other.files.keys())


def _comparable(own: Weights | None, foreign: Weights | None) -> set[str]:
    """Return the names in ``own.tensors`` that some tensor of the same dtype and shape is to be compared with."""
    if own is None or foreign is None:
        return set()
    there = foreign.named()
    found = set()
    for name, tensor in own.named().items():
        match = there.get(name)
        if match is not None and (match.dtype, match.shape) == (tensor.dtype, tensor.shape):
            found.add(own.ties.get(name, name))
    return found


def _files(
    contents: Contents,
    other: Contents,
    alike: list[str],
    results: Mapping[tuple[bool, str | Place], Hashed],
) -> Iterator[Item]:
    for name in alike:
        ours, theirs = results.get((True, name)), results.get((False, name))
        if ours is None or theirs is None:
            sizes = f"has {contents.files[name].size} bytes here, {other.files[name].size} there"
            yield _item(Kind.FILE, name, name, Outcome.DIFFER, Change.CHANGED, sizes)
        else:
            yield _compared(Kind.FILE, name, name, ours, theirs)
    compared = _compared_by_tensor(contents) | _compared_by_tensor(other)
    whole = contents.only is None and other.only is None  # of one file, its name says nothing
    for mine, yours, change, words in (
        (contents, other, Change.EXTRA, "is only here"),
        (other, contents, Change.MISSING, f"is only in {other.root}"),
    ):
        for name in sorted(mine.files.keys() - yours.files.keys()):
            if name in compared:
                text = f"{words}: its tensors are compared one by one"
                yield _item(Kind.FILE, name, name, Outcome.NOT_CHECKED, change, text)
            else:
                outcome = Outcome.DIFFER if whole else Outcome.NOT_CHECKED
                yield _item(Kind.FILE, name, name, outcome, change, words)


def _compared_by_tensor(contents: Contents) -> set[str]:
    """Return the files of the models, with their indexes: in another format or other shards there are others."""
    return {str(path) for weights in contents.weights for path in weights.files}


def _tensors(
    contents: Contents,
    other: Contents,
    pair: _Pair,
    results: Mapping[tuple[bool, str | Place], Hashed],
) -> Iterator[Item]:
    ours = pair.ours.named() if pair.ours is not None else {}
    theirs = pair.theirs.named() if pair.theirs is not None else {}
    for name, tensor in ours.items():
        where, match = _home(tensor, contents.root), theirs.get(name)
        if match is None:
            yield _item(Kind.TENSOR, name, where, Outcome.DIFFER, Change.EXTRA, "is only here")
        elif (tensor.dtype, tensor.shape) != (match.dtype, match.shape):
            text = f"is {_kind(tensor)} here, {_kind(match)} there"
            yield _item(Kind.TENSOR, name, where, Outcome.DIFFER, Change.CHANGED, text)
        else:
            assert pair.ours is not None
            assert pair.theirs is not None
            here = results[True, Place(pair.ours.label, pair.ours.ties.get(name, name))]
            there = results[False, Place(pair.theirs.label, pair.theirs.ties.get(name, name))]
            yield _compared(Kind.TENSOR, name, where, here, there)
    for name, tensor in theirs.items():
        if name not in ours:
            where = _home(tensor, other.root)
            text = f"is only in {other.root}"
            yield _item(Kind.TENSOR, name, where, Outcome.DIFFER, Change.MISSING, text)


def _compared(kind: Kind, name: str, where: str, ours: Hashed, theirs: Hashed) -> Item:
    if ours.problem:
        return _item(kind, name, where, Outcome.NOT_CHECKED, None, f"cannot be read: {ours.problem}")
    if ours.digest == theirs.digest:
        return _item(kind, name, where, Outcome.MATCH, None, "")
    text = f"differs: sha256 {ours.digest[:12]} here, {theirs.digest[:12]} there"
    return _item(kind, name, where, Outcome.DIFFER, Change.CHANGED, text)


def _item(kind: Kind, name: str, where: str, outcome: Outcome, change: Change | None, text: str) -> Item:
    return Item(kind=kind, name=name, where=where, outcome=outcome, change=change, text=text)


def _kind(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _home(tensor: StoredTensor, root: Path) -> str:
    path = first_place(tensor.layout)[0]
    return str(PurePosixPath(path.relative_to(root))) if path.name else ""
