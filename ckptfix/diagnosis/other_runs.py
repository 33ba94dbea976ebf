"""Two runs in one folder: a new run writes over the lowest numbers first, and the highest one is
left of an older run.

A resume takes the highest number. Times alone prove nothing, as ``cp -r`` and downloads write files
in any order. The Trainer's ``log_history`` does: it only grows, also over a resume
(``TrainerState`` of transformers 5.23), so that each checkpoint of a run has the entries of those
before it. A callback may drop old entries, and an evaluation may follow a save: only steps that
both have, or that lie between two of the later one, are compared. ``total_flos`` only grows, too,
with each step, and is saved and resumed without any log.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any, NamedTuple

from ckptfix.checkpoint.filenames import TRAINER_STATE
from ckptfix.checkpoint.latest import Candidate, time_of
from ckptfix.errors import CkptfixError
from ckptfix.storage.files import AnyPath, is_of_listing
from ckptfix.storage.opened import opened_part
from ckptfix.storage.reading import read_start
from ckptfix.wording import count_of

DAY = 86400
"""Seconds after which the time of a save contradicts its number: copies of a folder are made within
hours.
"""

_MOST_TIMES = 256
_MOST_INCOMPLETE = 8
_MOST_STATE = 32 << 20
"""A longer ``trainer_state.json`` is not read: its history has a million lines."""


class OtherRun(NamedTuple):
    """The newest complete checkpoint of another run than that with the highest number, and what
    proves that.

    ``is_older``: by the time of its save, too, as the rest of a branch that was given up.
    """

    candidate: Candidate
    proof: str
    is_older: bool


class History(NamedTuple):
    """History of a run as a checkpoint records it. ``entries``: step -> text of an entry -> its
    values.

    ``flos``: the floating point operations so far, 0 where they are not counted.
    """

    entries: Mapping[int, Mapping[str, Mapping[str, Any]]]
    max_steps: int | None
    time: float | None
    flos: float = 0


def other_run(
    best: Candidate,
    lower: Sequence[tuple[int, AnyPath]],
    look: Callable[[AnyPath, int], Candidate],
    read: "Callable[[AnyPath], History | None]",
) -> OtherRun | None:
    """Return the newest complete checkpoint of another run than ``best``, None where nothing proves
    two runs.

    Before those that are older than ``best`` come those that are not.

    ``lower``: the numbers below that of ``best``, the highest first. Up to three of them are
    compared: the highest, the lowest, and the one that was saved last; then as few as it takes to
    find the highest one of the other run. ``read``: returns the history of a checkpoint.
    """
    newer = read(best.path) if lower else None
    if newer is None:
        return None

    def proof_at(place: int) -> str:
        history = read(lower[place][1])
        return _contradiction(history, newer) if history is not None else ""

    places = sorted({0, len(lower) - 1, _saved_last(lower)})
    proofs = {place: proof_at(place) for place in places}
    place = next((place for place in places if proofs[place]), None)
    if place is None:
        return None
    same = max((known for known in places if known < place), default=-1)
    while place - same > 1:
        middle = (place + same) // 2
        if proof_at(middle):
            place = middle
        else:
            same = middle
    older: OtherRun | None = None
    for at in range(place, min(place + _MOST_INCOMPLETE, len(lower))):
        # One that is incomplete proves nothing about those below it: they may be of the run of
        # ``best``.
        if not (proof := proof_at(at)):
            continue
        number, path = lower[at]
        candidate = look(path, number)
        if candidate.problem is None:
            is_older = None not in (candidate.time, best.time) and (candidate.time or 0) < (
                best.time or 0
            )
            if not is_older:
                return OtherRun(candidate, proof, is_older)
            older = older or OtherRun(candidate, proof, is_older)
    return older


def _saved_last(lower: Sequence[tuple[int, AnyPath]]) -> int:
    """Return the place of the checkpoint that was saved last: most likely it is of the newest
    run.
    """
    if is_of_listing(lower[0][1].parent):
        return 0
    times = [time_of(path) or 0.0 for _, path in lower[:_MOST_TIMES]]
    return times.index(max(times))


def history_of(checkpoint: AnyPath) -> History | None:
    """Return the history of a checkpoint of the Trainer, None without one that can be read."""
    state: Any = None
    time = None
    with (
        suppress(CkptfixError, OSError, ValueError, RecursionError),
        opened_part(checkpoint) as place,
    ):
        time = time_of(place)
        data = read_start(place / TRAINER_STATE, _MOST_STATE)
        state = json.loads(data) if data is not None and len(data) < _MOST_STATE else None
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        return None
    entries: dict[int, dict[str, Mapping[str, Any]]] = {}
    with suppress(RecursionError):
        for entry in history:
            step = entry.get("step") if isinstance(entry, dict) else None
            if type(step) is int:
                entries.setdefault(step, {})[json.dumps(entry, sort_keys=True)] = entry
    max_steps, flos = state.get("max_steps"), state.get("total_flos")
    return History(
        entries,
        max_steps if type(max_steps) is int else None,
        time,
        flos if isinstance(flos, float) and isfinite(flos) else 0,
    )


def _contradiction(lower: History, higher: History) -> str:
    """Return what proves that two checkpoints are of two runs, "" where nothing does."""
    first, last = min(higher.entries, default=0), max(higher.entries, default=-1)
    limits = ""
    if None not in (lower.max_steps, higher.max_steps) and lower.max_steps != higher.max_steps:
        limits = f"max_steps {lower.max_steps} and {higher.max_steps}"
    for step, entries in sorted(lower.entries.items()):
        if not first <= step <= last:
            continue
        others = higher.entries.get(step, {})
        alone = [entry for text, entry in entries.items() if text not in others]
        if alone:
            words = _difference(alone[0], others.values()) or "logged by one of them alone"
            return f"step {step}: {words}{f'; {limits}' if limits else ''}"
    if lower.flos > higher.flos > 0:
        return (
            f"total_flos {lower.flos:.4g} and {higher.flos:.4g}, which only "
            f"grows{f'; {limits}' if limits else ''}"
        )
    # A run whose max_steps was raised goes on with higher numbers, saved later.
    if (
        limits
        and lower.time is not None
        and higher.time is not None
        and lower.time - higher.time > DAY
    ):
        return (
            f"{limits}, and the lower number was saved {days_between(higher.time, lower.time)} "
            "later"
        )
    return ""


def _difference(entry: Mapping[str, Any], others: Any) -> str:
    """Return the first value in which an entry differs from one with the same keys, "" where there
    is none.
    """
    for other in others:
        if entry.keys() == other.keys():
            keys = sorted(entry, key=lambda key: (key != "loss", key))
            key = next((key for key in keys if repr(entry[key]) != repr(other[key])), "")
            return f"{key} {entry[key]!r:.40} and {other[key]!r:.40}" if key else ""
    return ""


def days_between(earlier: float, later: float) -> str:
    """Return in words how many days lie between two times."""
    return count_of(int((later - earlier) // DAY), "day")
