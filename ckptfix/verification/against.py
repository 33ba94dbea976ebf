"""``verify --against``: a comparison with another checkpoint as the items of a verification.

Files of one name and size are compared by their bytes, models and optimizers by ``compare``. Unlike
``diff``, it wants equal keys: a checkpoint whose keys have other wrappers is another one to its
loader.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.checkpoint.deepspeed_files import BESIDE
from ckptfix.checkpoint.latest import is_bare
from ckptfix.diagnosis.contents import Contents, TensorLocation, read_contents
from ckptfix.diagnosis.target import find_checkpoints, find_target
from ckptfix.errors import OperationError, UsageError
from ckptfix.storage.executor import Executor
from ckptfix.storage.files import AnyPath
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import MANIFEST, refusal, shell_path
from ckptfix.tensors.hashing import FileJob, Hashed, Job, TensorJob, hash_all
from ckptfix.tensors.stored import Format, StoredCheckpoint
from ckptfix.verification.compare import Compared, compare
from ckptfix.verification.diff_report import OptimizerDiff, TensorDiff
from ckptfix.verification.diff_report import Outcome as Found
from ckptfix.verification.digests import tensor_homes
from ckptfix.verification.matching import crossed, crossing, ties_in_words, uncrossed
from ckptfix.verification.optimizer_pairs import left_of, side_of
from ckptfix.verification.verify_report import Change, Item, Kind, Outcome, file_item
from ckptfix.wording import count_of, list_names


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

    A file of a model or an optimizer counts by its tensors and values. ``data``: scan the tensors
    of the first side, too. ``model``: makes the models of the run, for optimizers whose parameters
    are numbered.

    Raises UsageError when nothing is at ``path``, or no weights are on one side alone,
    OperationError when its weights cannot be read, or a file of either side changed meanwhile.
    """
    other = read_contents(find_target(path))
    both = (contents, other)
    for side in both:
        for label, why in side.unreadable.items():
            raise OperationError(f"{side.root / label} cannot be compared: {why}")
    if bool(contents.weights) != bool(other.weights):
        raise UsageError(_without_weights(other if contents.weights else contents))
    jobs: dict[tuple[bool, str | TensorLocation], Job] = {
        (side is contents, name): FileJob(side.root / name, side.files[name].size)
        for name in sorted(contents.files.keys() & other.files.keys())
        if contents.files[name].size == other.files[name].size
        for side in both
    }
    for weights in contents.weights if data else ():
        jobs |= {
            (True, TensorLocation(weights.label, tensor.fqn)): TensorJob(tensor, scan=True)
            for tensor in weights.tensors
        }
    read = hash_all(list(jobs.values()), progress=progress, executor=executor)
    results = dict(zip(jobs, read, strict=True))
    for (is_ours, key), one in results.items():
        if one.problem and not is_ours:
            raise OperationError(f"{other.root}: {key} {refusal(one.problem)}")
    same = {
        name
        for is_ours, name in results
        if is_ours
        and isinstance(name, str)
        and not results[True, name].problem
        and results[True, name].digest == results[False, name].digest
    }
    if executor.is_share:  # it does not know the digests of other shares
        same = set()
    called = str(contents.root), str(other.root)
    found = compare(
        *(
            side_of(StoredCheckpoint(root=side.root, only=side.only, weights=side.weights))
            for side in both
        ),
        model=model,
        called=called,
        same=same,
        progress=progress,
        executor=executor,
    )
    for side in both:
        side.check_unchanged()
    homes = tensor_homes(other) | tensor_homes(contents)
    tensors = [
        replace(item, where=homes.get(TensorLocation(item.where, item.name), item.where))
        for one in found.models
        for item in _tensors(one.diff.tensors, one.diff.a or one.diff.b or "", other.root)
    ]
    states = [
        item for one in found.optimizers for item in _states(one.diff, one.pair.values, other.root)
    ]
    return Comparison(
        items=(*_files(contents, other, results, same, found), *tensors, *states),
        hashed={key: one for (is_ours, key), one in results.items() if is_ours},
        not_checked=(*_told(contents, other, same, found, tensors), *found.not_paired),
        crossed=crossing(list(crossed(found.pairs)), *called),
        notes=tuple(
            words
            for one in found.models
            for words in ties_in_words(one.diff.ties, (one.diff.a, one.diff.b), *called)
        ),
    )


def _without_weights(side: Contents) -> str:
    """Say that a side has no weights, and which folders below it have."""
    below: list[str] = []
    try:
        if side.only is None:
            below = [str(one) for one in find_checkpoints(side.root) if not is_bare(one)]
    except UsageError:  # there is none
        pass
    where = f"; name a folder that has some, such as {list_names(below)}" if below else ""
    return f"{side.root / (side.only or '')} has no model weights{where}"


def _files(
    contents: Contents,
    other: Contents,
    results: Mapping[tuple[bool, str | TensorLocation], Hashed],
    same: Collection[str],
    found: Compared,
) -> Iterator[Item]:
    """Yield the item of each file of either side."""
    ours, theirs = _files_of_models(contents), _files_of_models(other)
    for pair, _ in found.optimizers:
        for own, files in ((ours, pair.a.files), (theirs, pair.b.files)):
            # A file that holds more than what was compared, and has a namesake, counts by all of
            # its bytes.
            own.update(
                str(file)
                for file in files
                if not (pair.notes and {str(file)} <= contents.files.keys() & other.files.keys())
            )
    for name in sorted(contents.files.keys() & other.files.keys()):
        mine, other_one = results.get((True, name)), results.get((False, name))
        if name in same:
            yield file_item(name, Outcome.MATCH, None, "")
        elif mine is not None and mine.problem:
            yield file_item(name, Outcome.NOT_CHECKED, None, refusal(mine.problem))
        elif name in ours and name in theirs:
            text = "differs; only its tensors are compared, one by one"
            yield file_item(name, Outcome.NOT_CHECKED, Change.CHANGED, text)
        elif mine is not None and other_one is not None:
            text = f"differs: sha256 {mine.digest[:12]} ({other_one.digest[:12]} in {other.root})"
            yield file_item(name, Outcome.DIFFER, Change.CHANGED, text)
        else:
            sizes = contents.files[name].size, other.files[name].size
            text = f"has {sizes[0]} bytes ({sizes[1]} in {other.root})"
            yield file_item(name, Outcome.DIFFER, Change.CHANGED, text)
    whole = contents.only is None and other.only is None  # of one file, its name says nothing
    for names, change, words in (
        (contents.files.keys() - other.files.keys(), Change.EXTRA, f"is not in {other.root}"),
        (other.files.keys() - contents.files.keys(), Change.MISSING, f"is only in {other.root}"),
    ):
        for name in sorted(names):
            if name in ours or name in theirs:
                text = f"{words}; its tensors are compared one by one"
                yield file_item(name, Outcome.NOT_CHECKED, change, text)
            else:
                outcome = Outcome.DIFFER if whole else Outcome.NOT_CHECKED
                yield file_item(name, outcome, change, words)


def _files_of_models(contents: Contents) -> set[str]:
    """Return the files of the models, with their indexes: in another format or other shards there
    are others.
    """
    found = {str(path) for weights in contents.weights for path in weights.files}
    is_deepspeed = any(weights.format is Format.DEEPSPEED for weights in contents.weights)
    return found | set(map(str, BESIDE)) if is_deepspeed else found


def _tensors(tensors: Iterable[TensorDiff], where: str, other: AnyPath) -> Iterator[Item]:
    """Yield an item for each tensor. ``where``: the model or the optimizer that has it."""
    for one in tensors:
        change, text = _difference(one, other)
        outcome = Outcome.MATCH if change is None else Outcome.DIFFER
        yield Item(Kind.TENSOR, one.a or one.b or one.name, where, outcome, change, text)


def _difference(one: TensorDiff, other: AnyPath) -> tuple[Change | None, str]:
    kinds = [f"{one.dtype_a} {list(one.shape_a or ())}", f"{one.dtype_b} {list(one.shape_b or ())}"]
    if one.outcome is Found.ONLY_A:
        return Change.EXTRA, f"is not in {other}"
    if one.outcome is Found.ONLY_B:
        return Change.MISSING, f"is only in {other}"
    if one.outcome in (Found.SHAPE, Found.DTYPE):
        return Change.CHANGED, f"is {kinds[0]} ({kinds[1]} in {other})"
    if one.outcome is Found.VALUES:
        figures = (
            f"{one.tally.differing} of {one.tally.elements} elements" if one.tally else "bytes"
        )
        return Change.CHANGED, f"differs: {figures}"
    if one.a != one.b:
        return Change.RENAMED, f"is called {one.b} in {other}"
    return None, ""


def _states(found: OptimizerDiff, values: Iterable[str], other: AnyPath) -> Iterator[Item]:
    """Yield the items of two optimizers: of each moment, and of each hyperparameter or step."""
    for item in _tensors(found.tensors, found.a, other):
        # Parameters are matched whatever a strategy calls them.
        if item.change is Change.RENAMED:
            yield Item(Kind.TENSOR, item.name, item.where, Outcome.MATCH)
        else:
            yield item
    differing = {one.name for one in found.differences}
    for name in values:
        if name not in differing:
            yield Item(Kind.VALUE, name, found.a, Outcome.MATCH)
    for one in found.differences:
        a, b = ("not set" if value is None else value for value in (one.a, one.b))
        of = f"{count_of(len(one.parameters), 'parameter')}: {list_names(one.parameters)}"
        text = f"is {a} ({b} in {other}) for {of}"
        yield Item(Kind.VALUE, one.name, found.a, Outcome.DIFFER, Change.CHANGED, text)


def _told(
    contents: Contents,
    other: Contents,
    same: Collection[str],
    found: Compared,
    tensors: Collection[Item],
) -> Iterator[str]:
    """Yield in words what was not compared, and what was compared although it may not belong
    together.
    """
    if (contents.root / MANIFEST).exists():
        yield "the manifest; to compare with it, leave out --against"
    for here, there in uncrossed(found.pairs):
        yield (
            f"positions of models: {here.label} was compared with {other.root / there.label}, "
            "because their keys match or no other model remained"
        )
    of_optimizers = {
        file for pair, _ in found.optimizers for file in (*pair.a.files, *pair.b.files)
    }
    for side in (contents, other):
        for weights in side.weights:
            if set(map(str, weights.files)) <= set(same):
                continue
            where = weights.label if side is contents else side.root / weights.label
            if left := left_of(weights, of_optimizers):
                yield f"other entries of {where}: {list_names(left)}"
            if weights.opaque and side is other:  # of this side it is said whatever is compared
                yield f"values in {where} that are not plain tensors: {list_names(weights.opaque)}"
    if tensors and all(
        item.change in (Change.MISSING, Change.EXTRA, Change.RENAMED) for item in tensors
    ):
        sides = " ".join(shell_path(side.root / (side.only or "")) for side in (contents, other))
        yield f"tensors under different keys: the sides share no key; next: ckptfix diff {sides}"
    for pair, _ in found.optimizers:
        if not {str(file) for file in (*pair.a.files, *pair.b.files)} <= set(same):
            yield from (f"{pair.a.label}: {words}" for words in (pair.words,) if words)
            yield from pair.notes
