"""Files by which other libraries mark a complete save, and the files that name the newest one.

- ``metadata.pkl`` of torch_checkpointing, without which torchtitan passes over a step
  (torchtitan#4191), ``.complete`` of speculators (#739), and ``.rank_0_complete`` of each rank of
  cosmos-rl (#550): each is written last. Scripts give files the same names: only next to files as
  that library writes them is one a mark, and never in a folder with states of accelerate or the
  Trainer.
- ``latest_checkpointed_iteration.txt`` of Megatron-LM, verl and slime: a number, or ``release``.
"""

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import NamedTuple

from ckptfix.checkpoint.filenames import TRAINER_STATE, names_weights, parse_file_name
from ckptfix.checkpoint.folder_names import split_number
from ckptfix.checkpoint.neighbours import Neighbours
from ckptfix.checkpoint.rank_names import parse_dcp_name
from ckptfix.checkpoint.roles import NOT_STATES
from ckptfix.errors import CkptfixError
from ckptfix.storage.files import AnyPath, folders_in, is_file, is_of_listing, names_in
from ckptfix.storage.reading import read_start

_METADATA = "metadata.pkl"
_OF_SAVE = frozenset((_METADATA, ".complete"))
_NUMBERED_BY_RANK = re.compile(r"_[0-9]{1,9}(?:[._]|$)")
_OF_RANK = re.compile(r"\.rank_([0-9]{1,9})_complete")

TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_MOST = 64


class MissingMarker(NamedTuple):
    """A marker that a checkpoint lacks. ``known_by``: a checkpoint of the run that has it.

    ``is_certain``: False where the library may write it since a later version alone, or for more
    ranks.
    """

    name: str
    known_by: str
    is_certain: bool


def missing_marker(near: Neighbours) -> MissingMarker | None:
    """Return the marker that a checkpoint lacks and one next to it has, None where none does.

    Of a folder without a number the numbered folder around it counts, if its files are of ranks:
    cosmos-rl saves to ``step_20/policy``. Speculators calls the folders ``0``, ``1`` and so on, as
    data sets do theirs.
    """
    home, below = near.home, ""
    own: Collection[str] = ()
    with suppress(CkptfixError, OSError):
        own = names_in(home)
    if _is_of_accelerate(own) or (home.name.isdecimal() and not any(map(_is_of_checkpoint, own))):
        return None
    if split_number(home.name) is None:
        if not any("rank_" in name for name in own):
            return None
        near, below = near.siblings.of(home.parent), f"/{home.name}"
    before = [neighbour for neighbour in near.folders() if neighbour.is_before]
    after = [neighbour for neighbour in near.folders() if not neighbour.is_before]
    # The nearest earlier one comes first: a resume takes it.
    folders = [
        neighbour
        for neighbour in (*reversed(before), *after)
        if neighbour.is_of_same_run or neighbour.name.isdecimal()
    ]
    marked: dict[str, frozenset[str]] = {}
    for neighbour in folders:
        names: Iterable[str] = neighbour.names.every
        if below:
            names = ()
            with suppress(CkptfixError, OSError):
                names = names_in(near.home.parent / f"{neighbour.name}{below}")
        if markers := _markers(names):
            marked[neighbour.name] = markers
    there = _markers(own)
    lost = {marker: name for name in reversed(marked) for marker in marked[name] - there}
    if not lost:
        return None
    marker = min(lost, key=lambda marker: (marker not in _OF_SAVE, marker))
    earlier = [neighbour.name for neighbour in folders if neighbour.is_before]
    is_certain = not earlier or not marked.keys().isdisjoint(earlier)
    rank = _OF_RANK.fullmatch(marker)
    # A run may go on with fewer ranks: then the others left no file.
    if (
        rank is not None
        and there
        and not any(re.search(rf"rank_?{rank[1]}\D", name) for name in own)
    ):
        is_certain = False
    return MissingMarker(marker, lost[marker], is_certain)


def _markers(names: Iterable[str]) -> frozenset[str]:
    names = frozenset(names)
    if _is_of_accelerate(names):
        return frozenset()
    markers = frozenset(name for name in names if name in _OF_SAVE or _OF_RANK.fullmatch(name))
    rest = names - markers
    if not any(map(_NUMBERED_BY_RANK.search, rest)):
        markers -= {_METADATA}
    return markers if any(map(_is_of_checkpoint, rest)) else frozenset()


def _is_of_accelerate(names: Collection[str]) -> bool:
    """Return whether accelerate or the Trainer wrote a state among these names: both mark a
    complete save otherwise.
    """
    parsed = map(parse_file_name, names)
    return TRAINER_STATE in names or any(
        name is not None and name.role not in NOT_STATES for name in parsed
    )


def _is_of_checkpoint(name: str) -> bool:
    return names_weights(name) or parse_dcp_name(name) is not None


def run_of(checkpoint: AnyPath) -> AnyPath:
    """Return the folder of the run of a checkpoint, which may be one level below a numbered
    folder.
    """
    return next(
        (
            path.parent
            for path in (checkpoint, checkpoint.parent)
            if split_number(path.name) is not None
        ),
        checkpoint.parent,
    )


def tracker_problem(run: AnyPath) -> str:
    """Return what is wrong with the tracker of a run, in words; "" where it is right, or there is
    none.

    Raises CkptfixError, OSError.
    """
    if is_of_listing(run) and not is_file(run / TRACKER):
        return ""
    try:
        text = (read_start(run / TRACKER, _MOST) or b"").decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    folders = folders_in(run)
    if text == _RELEASE or not (text.isdecimal() and text.isascii()):
        is_known = text == _RELEASE or not text
        if not is_known or text in folders:
            return ""
        return f"{TRACKER} names {text}, which does not exist" if text else f"{TRACKER} is empty"
    numbers = {number[1]: name for name in folders if (number := split_number(name)) is not None}
    if not numbers or int(text) in numbers:
        return ""
    return (
        f"{TRACKER} names {text} (expected the number of an existing checkpoint, such as "
        f"{numbers[max(numbers)]})"
    )
