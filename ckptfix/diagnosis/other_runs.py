"""Two runs in one folder: a new run writes over the lowest numbers first, and the highest one is
left of an older run.

A resume takes the highest number. Times alone prove nothing, as ``cp -r`` and downloads write files
in any order. The Trainer's ``log_history`` does: it only grows, also over a resume
(``TrainerState`` of transformers 5.23), so that each checkpoint of a run has the entries of those
before it. A callback may drop old entries, and an evaluation may follow a save: only steps that
both have, or that lie between two of the later one, are compared. ``total_flos`` only grows, too,
with each step, and is saved and resumed without any log.

accelerate keeps no history. The step of an optimizer only grows, but in a run that went back to an
earlier checkpoint, or made a new optimizer. So does that of a scheduler, which is compared where no
optimizer counts its steps, as SGD. Times that rise with the steps, and not with the
numbers, show two folders that were exchanged; neither such a run nor a copy in any order has them.
A checkpoint with fewer steps and the bytes of an earlier one is an old backup, or the first save
after the run went back: that is told, and changes no choice.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from math import isfinite
from operator import itemgetter
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptfix.checkpoint.filenames import TRAINER_STATE, parse_file_name
from ckptfix.checkpoint.folder import scan_folder
from ckptfix.checkpoint.latest import Candidate, time_of
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.samples import (
    are_equal,
    are_equal_by_etags,
    optimizers_in,
    samples_of,
    weights_in,
)
from ckptfix.diagnosis.optimizer_values import steps_of
from ckptfix.diagnosis.saved_optimizers import saved_optimizers
from ckptfix.diagnosis.schedules import moves_of
from ckptfix.errors import CkptfixError
from ckptfix.formats.torch_file import TorchFile
from ckptfix.storage.files import AnyPath, StorePath, is_of_listing, names_in
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


_STATES = (Role.MODEL, Role.OPTIMIZER)
_MOST_STEPS = 16
"""Checkpoints whose steps are compared where the highest number has fewer than another."""


class OtherRun(NamedTuple):
    """A complete checkpoint with a lower number than the highest one, which need not be newer.

    ``proof``: what shows that, as a sentence about both. ``advice``: the next step. ``is_older``:
    it is told, and the highest number is taken: the other one was saved before, as the rest of a
    branch that was given up, or the run may have gone back. ``copied``: "a copy of" or "a link to"
    where the highest number is one of an earlier checkpoint, and ``advice`` is empty then: a second
    recommendation next to that of the run contradicted it. ``question``: what nothing decides, ""
    where there is a proof.
    """

    candidate: Candidate
    proof: str
    advice: str
    is_older: bool
    copied: str = ""
    question: str = ""


class History(NamedTuple):
    """History of a run as a checkpoint records it. ``entries``: step -> text of an entry -> its
    values.

    ``flos``: the floating point operations so far, 0 where they are not counted. ``steps``: those
    of each optimizer that counts them, in a folder of accelerate, or else of each scheduler.
    """

    entries: Mapping[int, Mapping[str, Mapping[str, Any]]]
    max_steps: int | None
    time: float | None
    flos: float = 0
    steps: Mapping[str, int] = MappingProxyType({})

    def has_more_steps(self, later: "History") -> bool:
        """Return whether each optimizer or scheduler that both have made more steps here than in a
        checkpoint with a higher number.
        """
        both = self.steps.keys() & later.steps.keys()
        return bool(both) and all(self.steps[path] > later.steps[path] for path in both)

    def most_steps(self, later: "History") -> int:
        """Return the most steps of what both count, which they must have in common."""
        return max(self.steps[path] for path in self.steps.keys() & later.steps.keys())


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
    if newer.steps:
        return _turned_back(best, newer, lower, look, read)

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
            words = f"{best.path.name} and {path.name} come from different runs ({proof})"
            if None in (candidate.time, best.time) or (candidate.time or 0) >= (best.time or 0):
                advice = "move the older run out of the folder"
                return OtherRun(candidate, words, advice, is_older=False)
            words += f", and {path.name} was saved earlier"
            advice = f"move {path.name} out of the folder"
            older = older or OtherRun(candidate, words, advice, is_older=True)
    return older


def _turned_back(
    best: Candidate,
    newest: History,
    lower: Sequence[tuple[int, AnyPath]],
    look: Callable[[AnyPath, int], Candidate],
    read: "Callable[[AnyPath], History | None]",
) -> OtherRun | None:
    """Return the complete checkpoint with the most steps where those of ``best`` are fewer: it was
    exchanged, has the bytes of an earlier one, or nothing shows why.
    """
    further: list[tuple[int, Candidate]] = []
    for place in sorted({0, _saved_last(lower)}):
        number, path = lower[place]
        history = read(path)
        if history is not None and history.has_more_steps(newest):
            candidate = look(path, number)
            if candidate.problem is None:
                further.append((history.most_steps(newest), candidate))
    if not further:
        return None
    steps, candidate = max(further, key=itemgetter(0))
    name, furthest = best.path.name, candidate.path.name
    own = newest.most_steps(newest)
    is_by_optimizer = Role.OPTIMIZER in map(_role_of, newest.steps)
    counter = "optimizer" if is_by_optimizer else "scheduler"
    words = f"{name} is at {counter} step {own}, {furthest} at step {steps}"
    nearest = [path for _, path in lower[:_MOST_STEPS]]
    if not isinstance(best.path, StorePath):
        histories = {path: history for path in nearest if (history := read(path)) is not None}
        if _are_dated_by_steps([newest, *histories.values()]):
            advice = "give swapped folders their original names"
            words += f", and {furthest} was saved later"
            return OtherRun(candidate, words, advice, is_older=False)
        nearest = [path for path, history in histories.items() if history.steps == newest.steps]
    equal = next((path.name for path in nearest if _is_copy(best.path, path)), None)
    if equal is None:
        question = (
            f"whether {name} ({counter} step {own}) is in the run of {furthest} (step {steps}): a "
            f"run that went back or began with a new {counter} looks like a different run"
        )
        return OtherRun(candidate, "", "", is_older=True, question=question)
    copied = "a link to" if best.path.is_symlink() else "a copy of"
    proof = (
        f"{words}: {name} is {copied} {equal}, as after restoring a backup, or in a run that went "
        "back to it"
    )
    return OtherRun(candidate, proof, "", is_older=True, copied=copied)


def _are_dated_by_steps(histories: Sequence[History]) -> bool:
    """Return whether the times of three checkpoints or more rise with their steps."""
    if len(histories) < 3 or len({frozenset(history.steps) for history in histories}) > 1:
        return False
    ordered = sorted(histories, key=lambda history: max(history.steps.values(), default=0))
    return all(
        later.has_more_steps(earlier) and 0 < (earlier.time or 0) < (later.time or 0)
        for earlier, later in pairwise(ordered)
    )


def _is_copy(checkpoint: AnyPath, earlier: AnyPath) -> bool:
    """Return whether the beginnings of all tensors in two checkpoints are equal; in a store,
    whether all files are, by what it lists: to read a header costs a request.
    """
    with (
        suppress(CkptfixError, OSError),
        opened_part(checkpoint) as root,
        opened_part(earlier) as there,
    ):
        if isinstance(root, StorePath):
            names = (PurePosixPath(name) for name in names_in(root) if _holds_state(name))
            return are_equal_by_etags(root, there, names) is True
        folder = scan_folder(root, wanted=lambda file: file.role in _STATES)
        samples = samples_of((*(weights_in(folder, ()) or ()), *(optimizers_in(folder, ()) or ())))
        return bool(samples) and are_equal(root, there, samples or ())
    return False


def _holds_state(name: str) -> bool:
    return _role_of(name) in _STATES


def _role_of(name: str) -> Role | None:
    parsed = parse_file_name(name)
    return parsed.role if parsed is not None else None


def _saved_last(lower: Sequence[tuple[int, AnyPath]]) -> int:
    """Return the place of the checkpoint that was saved last: most likely it is of the newest
    run.
    """
    if is_of_listing(lower[0][1].parent):
        return 0
    times = [time_of(path) or 0.0 for _, path in lower[:_MOST_TIMES]]
    return times.index(max(times))


def history_of(checkpoint: AnyPath, *, counts_steps: bool = False) -> History | None:
    """Return the history of a checkpoint, None without one that can be read.

    ``counts_steps``: also read the steps of optimizers in a store, where that may cost requests.
    """
    state: Any = None
    time = None
    with (
        suppress(CkptfixError, OSError, ValueError, RecursionError),
        opened_part(checkpoint) as place,
    ):
        time = time_of(place)
        if not (place / TRAINER_STATE).exists():
            is_cheap = counts_steps or not isinstance(place, StorePath)
            return History({}, None, time, steps=_steps_in(place) if is_cheap else {})
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


def _steps_in(root: AnyPath) -> dict[str, int]:
    folder = scan_folder(root, wanted=lambda file: file.role is Role.OPTIMIZER)
    counts = {str(saved.path): steps_of(root, saved) for saved in saved_optimizers(folder, ())}
    steps = {path: count for path, count in counts.items() if count}
    return steps or _moves_in(root)


def _moves_in(root: AnyPath) -> dict[str, int]:
    """Return the steps of the schedulers that were moved."""
    folder = scan_folder(root, wanted=lambda file: file.role is Role.SCHEDULER)
    return {
        str(component.path): moves
        for component in folder.components
        if isinstance(component.content, TorchFile)
        and (moves := moves_of(component.content.tree.root))
    }


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
            words = _difference(alone[0], others.values()) or "logged by only one of them"
            return f"step {step}: {words}{f'; {limits}' if limits else ''}"
    if lower.flos > higher.flos > 0:
        return (
            f"total_flos {lower.flos:.4g} and {higher.flos:.4g}, although it only "
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
