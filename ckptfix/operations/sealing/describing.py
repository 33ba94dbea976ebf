"""Judgements in words: which file or tensor, what happened to it, with both digests."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from typing_extensions import assert_never

from ckptfix.operations.sealing.contents import Place
from ckptfix.operations.sealing.hashing import Hashed
from ckptfix.operations.sealing.judging import Change, Judgement, Outcome
from ckptfix.operations.sealing.report import Item, Kind

_Elsewhere = Literal[Change.SWAPPED, Change.REPLACED, Change.MISSING, Change.EXTRA]

_TAIL = 64
"""So many zero bytes at the end of something that changed are called a tail of zeros."""


def describe_tensors(
    judgements: Iterable[Judgement[Place]],
    recorded: Mapping[Place, str],
    found: Mapping[Place, Hashed],
    homes: Mapping[Place, str],
    files: Mapping[str, Outcome],
) -> Iterator[Item]:
    """Yield an item for each judgement. ``homes``: the file that holds a tensor; ``files``: what is known of it."""
    for one in judgements:
        where = homes.get(one.key, one.key.label)
        have = found.get(one.key)
        change = _with_tail(one, have)
        text = ""
        if one.outcome is Outcome.NOT_CHECKED:
            text = f"cannot be read: {have.problem}" if have is not None and have.problem else ""
        elif change is not None:
            text = _tensor(change, one, recorded, have)
            if have is not None and change is not Change.EXTRA and files.get(where) is Outcome.DIFFER:
                text += f"; the digest of {where} differs, too"
        yield Item(
            kind=Kind.TENSOR, name=one.key.fqn, where=where, outcome=one.outcome, change=change, text=text,
            other="" if one.other is None else homes.get(one.other, one.other.label),
        )  # fmt: skip


def describe_files(
    judgements: Iterable[Judgement[str]],
    recorded: Mapping[str, str],
    found: Mapping[str, Hashed],
    sizes: Mapping[str, tuple[int, int | None]],
    whole: frozenset[str],
) -> Iterator[Item]:
    """Yield an item for each judgement.

    ``sizes``: path -> size now and size recorded, where known. ``whole``: files of which every tensor matches.
    """
    for one in judgements:
        have = found.get(one.key)
        change = _with_tail(one, have)
        text = ""
        if one.outcome is Outcome.NOT_CHECKED:
            text = f"cannot be read: {have.problem}" if have is not None and have.problem else ""
        elif change is not None:
            text = _file(change, one, recorded, have, sizes.get(one.key, (0, None)))
            if one.key in whole and change in (Change.CHANGED, Change.ZERO_TAIL):
                text += "; every tensor in it matches, so the difference is in its header or between tensors"
        yield Item(
            kind=Kind.FILE, name=one.key, where=one.key, outcome=one.outcome, change=change, text=text,
            other=one.other or "",
        )  # fmt: skip


def _with_tail(one: Judgement[Place] | Judgement[str], have: Hashed | None) -> Change | None:
    is_tail = one.change is Change.CHANGED and have is not None and have.zeros >= _TAIL
    return Change.ZERO_TAIL if is_tail else one.change


def _tensor(change: Change, one: Judgement[Place], recorded: Mapping[Place, str], have: Hashed | None) -> str:
    want = recorded.get(one.key, "")
    match change:
        case Change.CHANGED:
            return f"has other bytes than were recorded: {_digests(have, want)}"
        case Change.ZERO_TAIL:
            zeros = have.zeros if have is not None else 0
            return (
                f"has other bytes than were recorded, and its last {zeros} are zero: {_digests(have, want)}"
            )
        case Change.RENAMED:
            return f"renamed: what was recorded of it is now {one.other}"
        case Change.MOVED:
            return f"moved: it is now in {one.other.label if one.other is not None else '?'}"
        case _:
            return _elsewhere(change, one.other, _digests(have, want))


def _file(
    change: Change,
    one: Judgement[str],
    recorded: Mapping[str, str],
    have: Hashed | None,
    size: tuple[int, int | None],
) -> str:
    now, was = size
    want = recorded.get(one.key, "")
    sizes = f"has {now} bytes, {was} were recorded; " if was is not None and was != now else ""
    match change:
        case Change.CHANGED:
            return f"{sizes}differs: {_digests(have, want)}"
        case Change.ZERO_TAIL:
            zeros = have.zeros if have is not None else 0
            return f"{sizes}differs, and its last {zeros} bytes are zero: {_digests(have, want)}"
        case Change.RENAMED:
            return f"renamed: it is now {one.other}"
        case Change.MOVED:
            return f"moved: it is now {one.other}"
        case _:
            return _elsewhere(change, one.other, _digests(have, want))


def _elsewhere(change: _Elsewhere, other: object, digests: str) -> str:
    """Say what is the same for files and tensors: what came to stand in another's place, or in none."""
    match change:
        case Change.SWAPPED:
            return f"swapped with {other}: each holds what was recorded of the other"
        case Change.REPLACED:
            return f"holds what was recorded of {other}: {digests}"
        case Change.MISSING:
            return "is missing"
        case Change.EXTRA:
            return "is not in the manifest"
        case _:
            assert_never(change)


def _digests(have: Hashed | None, want: str) -> str:
    return f"sha256 {have.digest[:12] if have is not None else '?'}, was {want[:12]}"
