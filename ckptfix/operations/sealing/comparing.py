"""Every file and tensor of a checkpoint beside what its manifest recorded."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import Role, parse_file_name
from ckptfix.operations.sealing.contents import Contents, Place
from ckptfix.operations.sealing.describing import describe_files, describe_tensors
from ckptfix.operations.sealing.hashing import Hashed, first_place
from ckptfix.operations.sealing.judging import Change, Judgement, Outcome, judge
from ckptfix.operations.sealing.recorded import Recorded
from ckptfix.operations.sealing.report import Item, Kind
from ckptfix.storage.paths import command

_NO_DIGEST = "no digest was recorded"


def compare(contents: Contents, recorded: Recorded, hashed: Mapping[str | Place, Hashed]) -> Iterator[Item]:
    """Yield an item for every file and every tensor that is there or was recorded."""
    tensors = list(_tensor_judgements(contents, recorded, hashed))
    homes = tensor_homes(contents)
    whole = _whole_files(tensors, homes)
    files = list(_file_items(contents, recorded, hashed, whole))
    yield from files
    outcomes = {item.name: item.outcome for item in files}
    digests = recorded.digests(contents.weights, contents.unreadable)
    places = named_results(contents, hashed)
    yield from (
        item if item.outcome is not Outcome.NOT_CHECKED or item.text else _no_digest(item)
        for item in describe_tensors(tensors, digests, places, homes, outcomes)
    )
    for place, why in recorded.lost(contents):
        text = f"cannot be read: {why}"
        yield Item(
            kind=Kind.TENSOR, name=place.fqn, where=place.label, outcome=Outcome.NOT_CHECKED, text=text
        )


def named_results(contents: Contents, hashed: Mapping[str | Place, Hashed]) -> dict[Place, Hashed]:
    """Return what became of every tensor by every name that it has."""
    return {
        Place(weights.label, name): hashed[kept]
        for weights in contents.weights
        for name in weights.named()
        for kept in (Place(weights.label, weights.ties.get(name, name)),)
        if kept in hashed
    }


def _no_digest(item: Item) -> Item:
    return Item(
        kind=item.kind, name=item.name, where=item.where, outcome=Outcome.NOT_CHECKED, text=_NO_DIGEST
    )


def _tensor_judgements(
    contents: Contents, recorded: Recorded, hashed: Mapping[str | Place, Hashed]
) -> Iterator[Judgement[Place]]:
    digests = recorded.digests(contents.weights, contents.unreadable)
    unknown: frozenset[str] = frozenset()
    if digests:
        unknown = _unrecorded(contents, recorded)
        found = {
            place: one for place, one in named_results(contents, hashed).items() if place.label not in unknown
        }
        digests_found = {place: one.digest for place, one in found.items()}
        zeros = _zeros(contents, found) if digests_found != digests else set()
        yield from judge(digests, digests_found, name_of=_fqn, plain=zeros)
    for weights in contents.weights:
        if not digests or weights.label in unknown:
            yield from (
                Judgement(Place(weights.label, name), Outcome.NOT_CHECKED) for name in weights.named()
            )


def _unrecorded(contents: Contents, recorded: Recorded) -> frozenset[str]:
    """Return the models whose files were there and which were not taken for models when digests were recorded.

    As by ckptfix before 0.5.0, which did not look into sub-folders: their tensors have not come since.
    """
    if contents.only is not None:
        return frozenset()  # a shard goes by the entry of its model
    known = recorded.sha256.keys() | recorded.sizes.keys()
    return frozenset(
        weights.label
        for weights in contents.weights
        if weights.label not in recorded.tensors and known.issuperset(map(str, weights.files))
    )


def _fqn(place: Place) -> str:
    return place.fqn


def _file_name(path: str) -> str:
    return PurePosixPath(path).name


def _zeros(contents: Contents, found: Mapping[Place, Hashed]) -> set[str]:
    """Return the digests of the tensors that are zero in every byte."""
    return {
        one.digest
        for weights in contents.weights
        for name, tensor in weights.named().items()
        for one in (found.get(Place(weights.label, name)),)
        if one is not None and one.digest and one.zeros >= tensor.nbytes
    }


def _file_items(
    contents: Contents, recorded: Recorded, hashed: Mapping[str | Place, Hashed], whole: frozenset[str]
) -> Iterator[Item]:
    found = {
        key: one
        for key, one in hashed.items()
        if isinstance(key, str) and (key in recorded.sha256 or key not in recorded.sizes)
    }
    sizes = {name: (state.size, recorded.sizes.get(name)) for name, state in contents.files.items()}
    empty = {one.digest for name, one in found.items() if one.zeros >= contents.files[name].size}
    digests = {name: one.digest for name, one in found.items()}
    judged = judge(recorded.sha256, digests, name_of=_file_name, plain=empty)
    known = [one for one in judged if one.change is not Change.EXTRA]
    yield from describe_files(known, recorded.sha256, found, sizes, whole)
    told = {one.key for one in known} | {
        one.other for one in known if one.change in (Change.RENAMED, Change.MOVED)
    }
    for name in sorted((contents.files.keys() | recorded.sizes.keys() | recorded.repaired) - told):
        yield _file_without_digest(name, contents, recorded)
    for name, why in contents.special.items():
        if name not in told and name not in recorded.sizes:
            yield _file(name, Outcome.NOT_CHECKED, None, why)


def _file_without_digest(name: str, contents: Contents, recorded: Recorded) -> Item:
    state, size = contents.files.get(name), recorded.sizes.get(name)
    if state is None:
        size_of = f"; {size} bytes were saved" if size is not None else ""
        return _file(name, Outcome.DIFFER, Change.MISSING, f"is missing{size_of}")
    if size is not None and state.size != size:
        return _file(name, Outcome.DIFFER, Change.CHANGED, f"has {state.size} bytes, {size} were saved")
    if name in recorded.repaired:
        text = f"{_NO_DIGEST} since a repair changed it; next: {command('seal', contents.root)}"
        return _file(name, Outcome.NOT_CHECKED, None, text)
    if size is not None:
        return _file(name, Outcome.NOT_CHECKED, None, f"{_NO_DIGEST}, only its size, which is the same")
    if recorded.manifest is None:
        return _file(name, Outcome.NOT_CHECKED, None, _NO_DIGEST)
    outcome = Outcome.DIFFER if recorded.is_sealed or _changes_a_load(name) else Outcome.NOT_CHECKED
    return _file(name, outcome, Change.EXTRA, "is not in the manifest")


def _changes_a_load(name: str) -> bool:
    """Whether a file that no save listed is read by ``load_state``. Other processes add their random states late."""
    parsed = parse_file_name(name)
    if parsed is None or parsed.is_of_trainer:
        return False
    return parsed.role not in (Role.RNG_STATE, Role.UNKNOWN)


def _file(name: str, outcome: Outcome, change: Change | None, text: str) -> Item:
    return Item(kind=Kind.FILE, name=name, where=name, outcome=outcome, change=change, text=text)


def tensor_homes(contents: Contents) -> dict[Place, str]:
    """Return the file that each tensor begins in, relative to the checkpoint."""
    homes = {}
    for weights in contents.weights:
        for tensor in weights.tensors:
            path = first_place(tensor.layout)[0]
            homes[Place(weights.label, tensor.fqn)] = (
                str(path.relative_to(contents.root)) if path.name else weights.label
            )
        homes |= {
            Place(weights.label, name): homes[Place(weights.label, kept)]
            for name, kept in weights.ties.items()
        }
    return homes


def _whole_files(judgements: Iterable[Judgement[Place]], homes: Mapping[Place, str]) -> frozenset[str]:
    """Return the files that hold tensors, all of which match."""
    outcomes: dict[str, set[Outcome]] = {}
    for one in judgements:
        outcomes.setdefault(homes.get(one.key, one.key.label), set()).add(one.outcome)
    return frozenset(name for name, found in outcomes.items() if found == {Outcome.MATCH})
