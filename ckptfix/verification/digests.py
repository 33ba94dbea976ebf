"""Every file and tensor of a checkpoint compared with its manifest, and the differences in
words.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Literal

from typing_extensions import assert_never

from ckptfix.diagnosis.contents import Contents, Recorded, TensorLocation
from ckptfix.storage.files import relative
from ckptfix.storage.paths import command, refusal
from ckptfix.tensors.hashing import Hashed, first_place
from ckptfix.verification.verify_report import (
    Change,
    Item,
    Judgement,
    Kind,
    Outcome,
    file_item,
    judge,
)

_Elsewhere = Literal[Change.SWAPPED, Change.REPLACED, Change.MISSING, Change.EXTRA]

_SHOWN = 3
"""Ranges of a file that a message names."""

_TAIL = 64
"""Zero bytes at the end of something that changed, from which on they are called a tail of zeros.
"""


def describe_tensors(
    judgements: Iterable[Judgement[TensorLocation]],
    recorded: Mapping[TensorLocation, str],
    found: Mapping[TensorLocation, Hashed],
    homes: Mapping[TensorLocation, str],
    files: Mapping[str, Outcome],
    source: str,
) -> Iterator[Item]:
    """Yield an item for each judgement. ``homes``: the file that holds a tensor; ``files``: what is
    known of it.

    ``source``: what has the digests.
    """
    for one in judgements:
        where = homes.get(one.key, one.key.label)
        have = found.get(one.key)
        change = _with_tail(one, have)
        text = ""
        if one.outcome is Outcome.NOT_CHECKED:
            text = _unread(have)
        elif change is not None:
            text = _tensor(change, one, recorded, have, source)
            if (
                have is not None
                and change is not Change.EXTRA
                and files.get(where) is Outcome.DIFFER
            ):
                text += f"; the digest of {where} also differs"
        yield Item(
            kind=Kind.TENSOR, name=one.key.fqn, where=where, outcome=one.outcome, change=change,
            text=text, other="" if one.other is None else homes.get(one.other, one.other.label),
        )  # fmt: skip


def describe_files(
    judgements: Iterable[Judgement[str]],
    recorded: Mapping[str, str],
    found: Mapping[str, Hashed],
    sizes: Mapping[str, tuple[int, int | None]],
    intact: frozenset[str],
) -> Iterator[Item]:
    """Yield an item for each judgement.

    ``sizes``: path -> size now and size recorded, where known. ``intact``: files of which every
    tensor matches.
    """
    for one in judgements:
        have = found.get(one.key)
        change = _with_tail(one, have)
        text = ""
        if one.outcome is Outcome.NOT_CHECKED:
            text = _unread(have)
        elif change is not None:
            text = _file_text(change, one, recorded, have, sizes.get(one.key, (0, None)))
            if one.key in intact and change in (Change.CHANGED, Change.ZERO_TAIL):
                text += (
                    "; every tensor in it matches, so the difference is in its header or between "
                    "tensors"
                )
        yield Item(
            kind=Kind.FILE, name=one.key, where=one.key, outcome=one.outcome, change=change,
            text=text, other=one.other or "",
        )  # fmt: skip


def _unread(have: Hashed | None) -> str:
    return refusal(have.problem) if have is not None and have.problem else ""


def _with_tail(
    one: Judgement[TensorLocation] | Judgement[str], have: Hashed | None
) -> Change | None:
    is_tail = one.change is Change.CHANGED and have is not None and have.zeros >= _TAIL
    return Change.ZERO_TAIL if is_tail else one.change


def _tensor(
    change: Change,
    one: Judgement[TensorLocation],
    recorded: Mapping[TensorLocation, str],
    have: Hashed | None,
    source: str,
) -> str:
    want = recorded.get(one.key, "")
    match change:
        case Change.CHANGED:
            return f"changed: {_digests(have, want)}"
        case Change.ZERO_TAIL:
            zeros = have.zeros if have is not None else 0
            return f"changed, and its last {zeros} bytes are zero: {_digests(have, want)}"
        case Change.RENAMED:
            return f"renamed to {one.other}"
        case Change.MOVED:
            return f"moved to {one.other.label if one.other is not None else '?'}"
        case _:
            return _elsewhere(change, one.other, _digests(have, want), source)


def _file_text(
    change: Change,
    one: Judgement[str],
    recorded: Mapping[str, str],
    have: Hashed | None,
    size: tuple[int, int | None],
) -> str:
    now, was = size
    want = recorded.get(one.key, "")
    sizes = f"has {now} bytes, expected {was}; " if was is not None and was != now else ""
    match change:
        case Change.CHANGED:
            return f"{sizes}differs: {_digests(have, want)}"
        case Change.ZERO_TAIL:
            zeros = have.zeros if have is not None else 0
            return f"{sizes}differs, and its last {zeros} bytes are zero: {_digests(have, want)}"
        case Change.RENAMED:
            return f"renamed to {one.other}"
        case Change.MOVED:
            return f"moved to {one.other}"
        case _:
            return _elsewhere(change, one.other, _digests(have, want), "the manifest")


def _elsewhere(change: _Elsewhere, other: object, digests: str, source: str) -> str:
    """Describe what is the same for files and tensors: one in another's place, one missing, or one
    more.
    """
    match change:
        case Change.SWAPPED:
            return f"swapped with {other}: each has the content recorded for the other"
        case Change.REPLACED:
            return f"has the content recorded for {other}: {digests}"
        case Change.MISSING:
            return "is missing"
        case Change.EXTRA:
            return f"is not in {source}"
        case _:
            assert_never(change)


def _digests(have: Hashed | None, want: str) -> str:
    if "-" in want and have is not None:
        return _ranges(have.digest.split("-"), want.split("-"))
    name = "sha256" if len(want) == 64 else "git blob id"
    return f"{name} {have.digest[:12] if have is not None else '?'}, was {want[:12]}"


def _ranges(have: list[str], want: list[str]) -> str:
    """Name the ranges of a file that differ from what was recorded."""
    numbers = [number for number, pair in enumerate(zip_longest(have, want)) if len(set(pair)) > 1]
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    named = ", ".join(map(str, numbers[:_SHOWN])) + more
    return f"{'range' if len(numbers) == 1 else 'ranges'} {named} of {len(want)}, counted from 0"


_NO_DIGEST = "no digest was recorded"


def compare(
    contents: Contents, recorded: Recorded, hashed: Mapping[str | TensorLocation, Hashed]
) -> Iterator[Item]:
    """Yield an item for every file and every tensor that is there or was recorded."""
    digests = recorded.digests(contents.weights, contents.unreadable)
    places = named_results(contents, hashed)
    tensors = list(_tensor_judgements(contents, recorded, digests, places))
    homes = tensor_homes(contents)
    intact = _intact_files(tensors, homes)
    files = list(_file_items(contents, recorded, hashed, intact))
    yield from files
    outcomes = {item.name: item.outcome for item in files}
    yield from (
        item if item.outcome is not Outcome.NOT_CHECKED or item.text else _no_digest(item)
        for item in describe_tensors(
            tensors, digests, places, homes, outcomes, recorded.tensor_source
        )
    )
    for place, why in recorded.lost(contents):
        text = refusal(why)
        yield Item(
            kind=Kind.TENSOR,
            name=place.fqn,
            where=place.label,
            outcome=Outcome.NOT_CHECKED,
            text=text,
        )


def named_results(
    contents: Contents, hashed: Mapping[str | TensorLocation, Hashed]
) -> dict[TensorLocation, Hashed]:
    """Return what became of every tensor by every name that it has."""
    return {
        TensorLocation(weights.label, name): hashed[kept]
        for weights in contents.weights
        for name in weights.named()
        for kept in (TensorLocation(weights.label, weights.ties.get(name, name)),)
        if kept in hashed
    }


def _no_digest(item: Item) -> Item:
    return Item(
        kind=item.kind,
        name=item.name,
        where=item.where,
        outcome=Outcome.NOT_CHECKED,
        text=_NO_DIGEST,
    )


def _tensor_judgements(
    contents: Contents,
    recorded: Recorded,
    digests: Mapping[TensorLocation, str],
    places: Mapping[TensorLocation, Hashed],
) -> Iterator[Judgement[TensorLocation]]:
    unknown: frozenset[str] = frozenset()
    if digests:
        unknown = _unrecorded(contents, recorded)
        found = {place: one for place, one in places.items() if place.label not in unknown}
        digests_found = {place: one.digest for place, one in found.items()}
        zeros = _zeros(contents, found) if digests_found != digests else set()
        yield from judge(digests, digests_found, name_of=_fqn, plain=zeros)
    for weights in contents.weights:
        if not digests or weights.label in unknown:
            yield from (
                Judgement(TensorLocation(weights.label, name), Outcome.NOT_CHECKED)
                for name in weights.named()
            )


def _unrecorded(contents: Contents, recorded: Recorded) -> frozenset[str]:
    """Return the models whose files were there and which were not taken for models when digests
    were recorded.

    As by ckptfix before 0.5.0, which did not look into sub-folders: their tensors have not come
    since.
    """
    if contents.only is not None:
        return frozenset()  # a shard goes by the entry of its model
    known = recorded.sha256.keys() | recorded.sizes.keys()
    return frozenset(
        weights.label
        for weights in contents.weights
        if weights.label not in recorded.tensors and known.issuperset(map(str, weights.files))
    )


def _fqn(place: TensorLocation) -> str:
    return place.fqn


def _file_name(path: str) -> str:
    return PurePosixPath(path).name


def _zeros(contents: Contents, found: Mapping[TensorLocation, Hashed]) -> set[str]:
    """Return the digests of the tensors that are zero in every byte."""
    return {
        one.digest
        for weights in contents.weights
        for name, tensor in weights.named().items()
        for one in (found.get(TensorLocation(weights.label, name)),)
        if one is not None and one.digest and one.zeros >= tensor.nbytes
    }


def _file_items(
    contents: Contents,
    recorded: Recorded,
    hashed: Mapping[str | TensorLocation, Hashed],
    intact: frozenset[str],
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
    yield from describe_files(known, recorded.sha256, found, sizes, intact)
    told = {one.key for one in known} | {
        one.other for one in known if one.change in (Change.RENAMED, Change.MOVED)
    }
    for name in sorted((contents.files.keys() | recorded.sizes.keys() | recorded.repaired) - told):
        yield file_without_digest(name, contents, recorded)
    for name, why in contents.special.items():
        if name not in told and name not in recorded.sizes:
            differs, text = recorded.special(name, why)
            outcome, change = (
                (Outcome.DIFFER, Change.EXTRA) if differs else (Outcome.NOT_CHECKED, None)
            )
            yield file_item(name, outcome, change, text)


def file_without_digest(name: str, contents: Contents, recorded: Recorded) -> Item:
    """Return the item of a file whose bytes are not compared: by its size, and by whether it was
    recorded at all.
    """
    state, size = contents.files.get(name), recorded.sizes.get(name)
    if state is None:
        size_of = f"; it had {size} bytes when it was saved" if size is not None else ""
        return file_item(name, Outcome.DIFFER, Change.MISSING, f"is missing{size_of}")
    if size is not None and state.size != size:
        return file_item(
            name, Outcome.DIFFER, Change.CHANGED, f"has {state.size} bytes, expected {size}"
        )
    if name in recorded.repaired:
        text = f"{_NO_DIGEST} since a repair changed it; next: {command('seal', contents.root)}"
        return file_item(name, Outcome.NOT_CHECKED, None, text)
    if size is not None:
        return file_item(
            name, Outcome.NOT_CHECKED, None, f"{_NO_DIGEST}, only its size, which matches"
        )
    if recorded.manifest is None:
        return file_item(name, Outcome.NOT_CHECKED, None, _NO_DIGEST)
    differs, text = recorded.unlisted(name)
    return file_item(name, Outcome.DIFFER if differs else Outcome.NOT_CHECKED, Change.EXTRA, text)


def tensor_homes(contents: Contents) -> dict[TensorLocation, str]:
    """Return the file that each tensor begins in, relative to the checkpoint."""
    homes = {}
    for weights in contents.weights:
        for tensor in weights.tensors:
            path = first_place(tensor.layout)[0]
            homes[TensorLocation(weights.label, tensor.fqn)] = (
                str(relative(path, contents.root)) if path.name else weights.label
            )
        homes |= {
            TensorLocation(weights.label, name): homes[TensorLocation(weights.label, kept)]
            for name, kept in weights.ties.items()
        }
    return homes


def _intact_files(
    judgements: Iterable[Judgement[TensorLocation]], homes: Mapping[TensorLocation, str]
) -> frozenset[str]:
    """Return the files that hold tensors, all of which match."""
    outcomes: dict[str, set[Outcome]] = {}
    for one in judgements:
        outcomes.setdefault(homes.get(one.key, one.key.label), set()).add(one.outcome)
    return frozenset(name for name, found in outcomes.items() if found == {Outcome.MATCH})
