"""Comparison of a checkpoint with another one of any format, whose tensors have the same keys."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from ckptfix.checkpoint.deepspeed_files import BESIDE
from ckptfix.checkpoint.latest import is_bare
from ckptfix.diagnosis.contents import Contents, TensorLocation, read_contents
from ckptfix.diagnosis.target import find_checkpoints, find_target
from ckptfix.errors import OperationError, UsageError
from ckptfix.storage.executor import Executor
from ckptfix.storage.files import AnyPath, relative
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import MANIFEST, refusal, shell_path
from ckptfix.tensors.hashing import FileJob, Hashed, Job, TensorJob, first_place, hash_all
from ckptfix.tensors.stored import Format, StoredCheckpoint, StoredTensor, Weights
from ckptfix.verification.matching import (
    Matched,
    TiedKey,
    crossed,
    crossing,
    moved,
    pair_models,
    tied_keys,
    ties_in_words,
)
from ckptfix.verification.optimizer_pairs import (
    OptimizerPair,
    Side,
    left_of,
    pair_optimizers,
    side_of,
)
from ckptfix.verification.verify_report import Change, Item, Kind, Outcome, file_item
from ckptfix.wording import count_of, list_names

_BY_TENSOR = "differs; only its tensors are compared, one by one"


class Comparison(Struct, frozen=True, kw_only=True):
    """An item for every file and tensor of either side, the results of the first side, and what was
    left out.

    ``crossed``: models in each other's place, in words, "" when none do. ``notes``: what counts as
    no difference, in words.
    """

    items: tuple[Item, ...]
    hashed: Mapping[str | TensorLocation, Hashed]
    not_checked: tuple[str, ...]
    crossed: str = ""
    notes: tuple[str, ...] = ()


class _Pair(Struct, frozen=True):
    """One model of each side; None where a side has no more."""

    ours: Weights | None
    theirs: Weights | None

    def ties(self) -> tuple[TiedKey, ...]:
        """Return the keys that only one side has, of tensors that both sides have."""
        ours = self.ours.named() if self.ours is not None else {}
        theirs = self.theirs.named() if self.theirs is not None else {}
        matched = [
            Matched(name=name, a=name if name in ours else None, b=name if name in theirs else None)
            for name in dict.fromkeys([*ours, *theirs])
        ]
        return tied_keys(matched, self.ours, self.theirs)


def compare_with(
    contents: Contents,
    path: AnyPath,
    *,
    data: bool,
    model: str | None = None,
    progress: Progress | None,
    executor: Executor,
) -> Comparison:
    """Compare what was read of a checkpoint with the one at ``path``.

    Models are paired as ``pair_models`` does, tensors by name, optimizers as ``pair_optimizers``
    does; a file of a model or an optimizer counts by its tensors and values. ``model``: makes the
    models of the run, for optimizers whose parameters are numbered.

    Raises UsageError when nothing is at ``path``, or no weights are on one side alone,
    OperationError when its weights cannot be read, or a file of either side changed meanwhile.
    """
    other = read_contents(find_target(path))
    for side in (contents, other):
        for label, why in side.unreadable.items():
            raise OperationError(f"{side.root / label} cannot be compared: {why}")
    if bool(contents.weights) != bool(other.weights):
        raise UsageError(_without_weights(other if contents.weights else contents))
    pairs = [_Pair(*one) for one in pair_models(contents.weights, other.weights)]
    optimizers, unpaired, _ = pair_optimizers(
        *map(_side, (contents, other)), model=model, called=(str(contents.root), str(other.root))
    )
    alike = _same_names(contents, other)
    jobs: dict[tuple[bool, str | TensorLocation], Job] = {}
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
                    jobs[is_ours, TensorLocation(own.label, tensor.fqn)] = TensorJob(tensor, scan)
    for optimizer in optimizers:
        for one in optimizer.matched:
            for is_ours, state in zip((True, False), optimizer.of(one), strict=True):
                if state is not None and _are_comparable(*optimizer.of(one)):
                    jobs[is_ours, _location(optimizer, one)] = TensorJob(state)
    results = dict(
        zip(jobs, hash_all(list(jobs.values()), progress=progress, executor=executor), strict=True)
    )
    for side in (contents, other):
        side.check_unchanged()
    if bad := next(
        (key for (is_ours, key), one in results.items() if one.problem and not is_ours), None
    ):
        raise OperationError(f"{other.root}: {bad} {refusal(results[False, bad].problem)}")
    files = list(_files(contents, other, alike, results, optimizers))
    tensors: list[Item] = []
    notes: list[str] = []
    for pair in pairs:
        ties = pair.ties()
        names = {tie.name for tie in ties}
        tensors += [
            item for item in _tensors(contents, other, pair, results) if item.name not in names
        ]
        labels = [
            weights.label if weights is not None else None for weights in (pair.ours, pair.theirs)
        ]
        notes += ties_in_words(ties, labels, str(contents.root), str(other.root))
    told = list(_told(contents, other, pairs, files, tensors, optimizers))
    told += [*unpaired, *(words for optimizer in optimizers for words in _notes(optimizer, files))]
    states = [
        item for optimizer in optimizers for item in _states(contents, other, optimizer, results)
    ]
    swapped = list(crossed((pair.ours, pair.theirs) for pair in pairs))
    ours = {key: one for (is_ours, key), one in results.items() if is_ours}
    return Comparison(
        items=(*files, *tensors, *states),
        hashed=ours,
        not_checked=tuple(told),
        crossed=crossing(swapped, str(contents.root), str(other.root)),
        notes=tuple(notes),
    )


def _told(
    contents: Contents,
    other: Contents,
    pairs: list[_Pair],
    files: list[Item],
    tensors: list[Item],
    optimizers: Sequence[OptimizerPair],
) -> Iterator[str]:
    """Yield in words what was not compared, and what was compared although it may not belong
    together.
    """
    if (contents.root / MANIFEST).exists():
        yield "the manifest; to compare with it, leave out --against"
    both = [(pair.ours, pair.theirs) for pair in pairs]
    swapped = {id(one) for one, _ in crossed(both)}
    for here, there in moved(both):
        if id(here) not in swapped:
            compared = f"{here.label} was compared with {other.root / there.label}"
            yield (
                f"positions of models: {compared}, because their keys match or no other model "
                "remained"
            )
    yield from _beside_tensors(contents, other, files, optimizers)
    if tensors and all(item.change in (Change.MISSING, Change.EXTRA) for item in tensors):
        sides = " ".join(shell_path(side.root / (side.only or "")) for side in (contents, other))
        yield f"tensors under different keys: the sides share no key; next: ckptfix diff {sides}"


def _without_weights(side: Contents) -> str:
    """Say that a side has no weights, and which folders below it have."""
    found = [str(one) for one in _below(side.root)] if side.only is None else []
    where = f"; name a folder that has some, such as {list_names(found)}" if found else ""
    return f"{side.root / (side.only or '')} has no model weights{where}"


def _below(root: AnyPath) -> Iterator[AnyPath]:
    try:
        yield from (one for one in find_checkpoints(root) if one != root and not is_bare(one))
    except UsageError:  # there is none
        return


def _same_names(contents: Contents, other: Contents) -> list[str]:
    return sorted(contents.files.keys() & other.files.keys())


def _comparable(own: Weights | None, foreign: Weights | None) -> set[str]:
    """Return the names in ``own.tensors`` that some tensor of the same dtype and shape is to be
    compared with.
    """
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
    results: Mapping[tuple[bool, str | TensorLocation], Hashed],
    optimizers: Iterable[OptimizerPair],
) -> Iterator[Item]:
    of_models, of_others = _compared_by_tensor(contents), _compared_by_tensor(other)
    for optimizer in optimizers:
        for own, files in ((of_models, optimizer.a.files), (of_others, optimizer.b.files)):
            # A file that holds more than what was compared, and has a namesake, counts by all of
            # its bytes.
            own.update(str(file) for file in files if not (optimizer.notes and str(file) in alike))
    for name in alike:
        item = _same_name(name, contents, other, results)
        if item.change is not None and name in of_models and name in of_others:
            yield file_item(name, Outcome.NOT_CHECKED, item.change, _BY_TENSOR)
        else:
            yield item
    compared = of_models | of_others
    whole = contents.only is None and other.only is None  # of one file, its name says nothing
    for mine, yours, change, words in (
        (contents, other, Change.EXTRA, f"is not in {other.root}"),
        (other, contents, Change.MISSING, f"is only in {other.root}"),
    ):
        for name in sorted(mine.files.keys() - yours.files.keys()):
            if name in compared:
                text = f"{words}; its tensors are compared one by one"
                yield file_item(name, Outcome.NOT_CHECKED, change, text)
            else:
                outcome = Outcome.DIFFER if whole else Outcome.NOT_CHECKED
                yield file_item(name, outcome, change, words)


def _same_name(
    name: str,
    contents: Contents,
    other: Contents,
    results: Mapping[tuple[bool, str | TensorLocation], Hashed],
) -> Item:
    """Return the item of a file that both sides have, by its bytes."""
    ours, theirs = results.get((True, name)), results.get((False, name))
    if ours is not None and theirs is not None:
        return _compared(Kind.FILE, name, name, ours, theirs, other.root)
    sizes = f"has {contents.files[name].size} bytes ({other.files[name].size} in {other.root})"
    return file_item(name, Outcome.DIFFER, Change.CHANGED, sizes)


def _beside_tensors(
    contents: Contents, other: Contents, files: Iterable[Item], optimizers: Iterable[OptimizerPair]
) -> Iterator[str]:
    """Yield in words what lies next to the tensors in files of the models that are not the same in
    every byte.
    """
    same = {item.name for item in files if item.outcome is Outcome.MATCH}
    of_optimizers = {
        file for pair in optimizers for state in (pair.a, pair.b) for file in state.files
    }
    for side in (contents, other):
        for weights in side.weights:
            where = weights.label if side is contents else side.root / weights.label
            if same.issuperset(map(str, weights.files)):
                continue
            if left := left_of(weights, of_optimizers):
                yield f"other entries of {where}: {list_names(left)}"
            if weights.opaque and side is other:  # of this side it is said whatever is compared
                yield f"values in {where} that are not plain tensors: {list_names(weights.opaque)}"


def _compared_by_tensor(contents: Contents) -> set[str]:
    """Return the files of the models, with their indexes: in another format or other shards there
    are others.
    """
    found = {str(path) for weights in contents.weights for path in weights.files}
    is_deepspeed = any(weights.format is Format.DEEPSPEED for weights in contents.weights)
    return found | set(map(str, BESIDE)) if is_deepspeed else found


def _tensors(
    contents: Contents,
    other: Contents,
    pair: _Pair,
    results: Mapping[tuple[bool, str | TensorLocation], Hashed],
) -> Iterator[Item]:
    ours = pair.ours.named() if pair.ours is not None else {}
    theirs = pair.theirs.named() if pair.theirs is not None else {}
    for name, tensor in ours.items():
        where, match = _home(tensor, contents.root), theirs.get(name)
        if match is None:
            text = f"is not in {other.root}"
            yield Item(Kind.TENSOR, name, where, Outcome.DIFFER, Change.EXTRA, text)
        elif (tensor.dtype, tensor.shape) != (match.dtype, match.shape):
            text = f"is {_kind(tensor)} ({_kind(match)} in {other.root})"
            yield Item(Kind.TENSOR, name, where, Outcome.DIFFER, Change.CHANGED, text)
        else:
            assert pair.ours is not None
            assert pair.theirs is not None
            here = results[True, TensorLocation(pair.ours.label, pair.ours.ties.get(name, name))]
            there = results[
                False, TensorLocation(pair.theirs.label, pair.theirs.ties.get(name, name))
            ]
            yield _compared(Kind.TENSOR, name, where, here, there, other.root)
    for name, tensor in theirs.items():
        if name not in ours:
            where = _home(tensor, other.root)
            text = f"is only in {other.root}"
            yield Item(Kind.TENSOR, name, where, Outcome.DIFFER, Change.MISSING, text)


def _side(contents: Contents) -> Side:
    return side_of(
        StoredCheckpoint(root=contents.root, only=contents.only, weights=contents.weights)
    )


def _location(optimizer: OptimizerPair, one: Matched) -> TensorLocation:
    return TensorLocation(f"optimizer {optimizer.a.label}", one.name)


def _are_comparable(ours: StoredTensor | None, theirs: StoredTensor | None) -> bool:
    return (
        ours is not None
        and theirs is not None
        and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    )


def _notes(optimizer: OptimizerPair, files: Iterable[Item]) -> Iterator[str]:
    """Yield in words what was not compared of two optimizers, unless their files are the same in
    every byte.
    """
    same = {item.name for item in files if item.outcome is Outcome.MATCH}
    if not same.issuperset(map(str, (*optimizer.a.files, *optimizer.b.files))):
        yield from (f"{optimizer.a.label}: {words}" for words in (optimizer.words,) if words)
        yield from optimizer.notes


def _states(
    contents: Contents,
    other: Contents,
    optimizer: OptimizerPair,
    results: Mapping[tuple[bool, str | TensorLocation], Hashed],
) -> Iterator[Item]:
    """Yield the items of two optimizers: of each moment, and of each hyperparameter or step."""
    for one in optimizer.matched:
        ours, theirs = optimizer.of(one)
        if ours is None or theirs is None:
            side = other if ours is None else contents
            tensor = theirs if ours is None else ours
            assert tensor is not None, "of one side at least"
            text = f"is {'only' if ours is None else 'not'} in {other.root}"
            change = Change.MISSING if ours is None else Change.EXTRA
            yield Item(
                Kind.TENSOR, one.name, _home(tensor, side.root), Outcome.DIFFER, change, text
            )
        elif not _are_comparable(ours, theirs):
            text = f"is {_kind(ours)} ({_kind(theirs)} in {other.root})"
            where = _home(ours, contents.root)
            yield Item(Kind.TENSOR, one.name, where, Outcome.DIFFER, Change.CHANGED, text)
        else:
            here, there = (results[is_ours, _location(optimizer, one)] for is_ours in (True, False))
            where = _home(ours, contents.root)
            yield _compared(Kind.TENSOR, one.name, where, here, there, other.root)
    differing = {one.name for one in optimizer.differences}
    for name in optimizer.values:
        if name not in differing:
            yield Item(Kind.VALUE, name, optimizer.a.label, Outcome.MATCH)
    for found in optimizer.differences:
        of = f"for {count_of(len(found.names), 'parameter')}: {list_names(found.names)}"
        a, b = ("not set" if value is None else value for value in (found.a, found.b))
        text = f"is {a} ({b} in {other.root}) {of}"
        yield Item(Kind.VALUE, found.name, optimizer.a.label, Outcome.DIFFER, Change.CHANGED, text)


def _compared(
    kind: Kind, name: str, where: str, ours: Hashed, theirs: Hashed, other: AnyPath
) -> Item:
    if ours.problem:
        return Item(kind, name, where, Outcome.NOT_CHECKED, None, refusal(ours.problem))
    if ours.digest == theirs.digest:
        return Item(kind, name, where, Outcome.MATCH, None, "")
    text = f"differs: sha256 {ours.digest[:12]} ({theirs.digest[:12]} in {other})"
    return Item(kind, name, where, Outcome.DIFFER, Change.CHANGED, text)


def _kind(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _home(tensor: StoredTensor, root: AnyPath) -> str:
    path = first_place(tensor.layout)[0]
    return str(relative(path, root)) if path.name else ""
