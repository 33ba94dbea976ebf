"""Every file and tensor of a checkpoint compared with its manifest, and the differences in
words.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import PurePosixPath

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
from ckptfix.wording import first_few

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
        change, text = _described(one, have, recorded.get(one.key, ""), "changed", source)
        if (
            one.change not in (None, Change.EXTRA)
            and have is not None
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
        change, text = _described(
            one, found.get(one.key), recorded.get(one.key, ""), "differs", "the manifest"
        )
        if one.change is Change.CHANGED:
            now, was = sizes.get(one.key, (0, None))
            if was is not None and was != now:
                text = f"has {now} bytes, expected {was}; {text}"
            if one.key in intact:
                text += (
                    "; every tensor in it matches, so the difference is in its header or between "
                    "tensors"
                )
        yield Item(
            kind=Kind.FILE, name=one.key, where=one.key, outcome=one.outcome, change=change,
            text=text, other=one.other or "",
        )  # fmt: skip


def _described(
    one: Judgement[TensorLocation] | Judgement[str],
    have: Hashed | None,
    want: str,
    verb: str,
    source: str,
) -> tuple[Change | None, str]:
    """Return what happened, and the sentence for it, "" for a match. ``source``: what has the
    digests.
    """
    if one.outcome is Outcome.NOT_CHECKED:
        return one.change, refusal(have.problem) if have is not None and have.problem else ""
    if one.change is Change.CHANGED and have is not None:
        if have.zeros < _TAIL:
            return one.change, f"{verb}: {_digests(have, want)}"
        tail = f"{verb}, and its last {have.zeros} bytes are zero: {_digests(have, want)}"
        return Change.ZERO_TAIL, tail
    words = {
        None: "",
        Change.SWAPPED: f"swapped with {one.other}: each has the content recorded for the other",
        Change.RENAMED: f"renamed to {one.other}",
        Change.MISSING: "is missing",
        Change.EXTRA: f"is not in {source}",
    }
    return one.change, words[one.change]


def _digests(have: Hashed, want: str) -> str:
    """Return both digests in words, or the numbers of the ranges of a file that differ."""
    if "-" not in want:
        name = "sha256" if len(want) == 64 else "git blob id"
        return f"{name} {have.digest[:12]}, was {want[:12]}"
    ranges = want.split("-")
    pairs = zip_longest(have.digest.split("-"), ranges)
    numbers = [number for number, pair in enumerate(pairs) if len(set(pair)) > 1]
    noun = "range" if len(numbers) == 1 else "ranges"
    return f"{noun} {first_few(numbers)} of {len(ranges)}, counted from 0"


_NO_DIGEST = "no digest was recorded"


def compare(
    contents: Contents, recorded: Recorded, hashed: Mapping[str | TensorLocation, Hashed]
) -> Iterator[Item]:
    """Yield an item for every file and every tensor that is there or was recorded."""
    digests = recorded.digests(contents.weights, contents.unreadable)
    places = named_results(contents, hashed)
    tensors = list(_tensor_judgements(contents, recorded, digests, places))
    homes = _tensor_homes(contents)
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
        yield from judge(digests, digests_found, name_of=lambda place: place.fqn)
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
    digests = {name: one.digest for name, one in found.items()}
    judged = judge(recorded.sha256, digests, name_of=lambda path: PurePosixPath(path).name)
    known = [one for one in judged if one.change is not Change.EXTRA]
    yield from describe_files(known, recorded.sha256, found, sizes, intact)
    told = {one.key for one in known} | {one.other for one in known}
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


def _tensor_homes(contents: Contents) -> dict[TensorLocation, str]:
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
