"""The other checkpoints of a run, and the files that they have and one of them lacks."""

import os
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import NamedTuple

from ckptfix.checkpoint.filenames import (
    TRAINER_STATE,
    Role,
    family_of,
    name_of_trainer,
    parse_deepspeed_folder_name,
    parse_file_name,
    parse_folder_name,
    split_number,
)
from ckptfix.checkpoint.manifest import is_repaired, usable_manifest
from ckptfix.checkpoint.neighbours import folders_next_to, names_next_to
from ckptfix.dataclass import dataclass
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.incomplete import FewerRanks, IncompleteCheckpoint, LostPosition
from ckptfix.errors import CkptfixError
from ckptfix.storage.reading import names_in, origin_of

_COMPARED = (Role.MODEL, Role.OPTIMIZER, Role.SCHEDULER, Role.GRAD_SCALER, Role.RNG_STATE, Role.CUSTOM)
"""Roles that every checkpoint of a run has; a checkpoint may rightly lack samplers and dataloaders."""

_NEXT_TO = (*_COMPARED, Role.DATALOADER)
"""Roles that are looked for next to a checkpoint. Without its state, ``load_state`` begins a dataloader again."""

Part = tuple[Role, int]
"""A role and the position of an entry, or the rank of a state of generators."""


class _Sibling(NamedTuple):
    name: str
    parts: dict[Part, str]


@dataclass(frozen=True, slots=True)
class _Run:
    """The folders of one run in order of their numbers. ``parts``: those of each listed folder, by its name."""

    folders: tuple[tuple[int, str], ...]
    parts: dict[str, dict[Part, str]]


_MOST_RUNS = 32
"""Runs that are remembered, those used last: the checkpoints of one follow each other in a listing."""

_NEAR, _FAR = 2, 8
"""Saves that a checkpoint is compared with on either side, and folders that are listed to find them."""


class Siblings:
    """Checkpoints grouped by run: those of a run lie in one folder, and differ in one number of the name.

    Names that libraries give to checkpoints are looked up in the folder that holds them. Others count as a run among
    ``paths``: the checkpoints, or with ``is_recursive`` the folders below which each is one. Each folder is listed
    once. Several threads may ask.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]] = (), *, is_recursive: bool = False) -> None:
        self._paths: defaultdict[tuple[Path, str], list[tuple[int, str]]] = defaultdict(list)
        given = dict.fromkeys(map(Path, paths))
        for path in given:
            if named := split_number(path.name):
                stem, number = named
                self._paths[path.parent, stem].append((number, path.name))
        self._above = frozenset(given) if is_recursive else frozenset()
        self._runs: OrderedDict[tuple[Path, str], _Run] = OrderedDict()
        self._problems: dict[Path, str | None] = {}
        self._lock = Lock()

    def once(self, problem_of: Callable[[Path], str | None]) -> Callable[[Path], str | None]:
        """Return a function that looks at each checkpoint once: each bare one of a run asks about the same others."""

        def look(checkpoint: Path) -> str | None:
            # Without a lock: its holder would wait for the threads that wait for the lock. Two may look at once.
            if checkpoint not in self._problems:
                self._problems[checkpoint] = problem_of(checkpoint)
            return self._problems[checkpoint]

        return look

    def around(self, folder: Path) -> tuple[list[_Sibling], list[_Sibling]]:
        """Return the nearest saves before a numbered checkpoint and after it, the nearest first."""
        named = split_number(folder.name)
        assert named is not None
        stem, number = named
        key = (folder.parent, stem)
        with self._lock:
            run = self._runs.pop(key, None) or _Run(tuple(sorted(self._names(folder, stem))), {})
            self._runs[key] = run
            if len(self._runs) > _MOST_RUNS:
                self._runs.popitem(last=False)
            before = bisect_left(run.folders, number, key=lambda one: one[0])
            after = bisect_right(run.folders, number, key=lambda one: one[0])
            return (
                _saves(run, folder, run.folders[max(before - _FAR, 0) : before][::-1]),
                _saves(run, folder, run.folders[after : after + _FAR]),
            )

    def _names(self, folder: Path, stem: str) -> Iterable[tuple[int, str]]:
        """Return number and name of each checkpoint of a run."""
        parent = folder.parent
        if family_of(folder.name) is None and self._above.isdisjoint((parent, *parent.parents)):
            return self._paths[parent, stem]
        # Whoever reads a checkpoint may not be allowed to list the folder above it.
        with suppress(CkptfixError, OSError):
            return [
                (parts[1], name)
                for name in folders_next_to(folder)
                if (parts := split_number(name)) and parts[0] == stem
            ]
        return ()


def _saves(run: _Run, folder: Path, near: Iterable[tuple[int, str]]) -> list[_Sibling]:
    saves: list[_Sibling] = []
    for _, name in near:
        if name not in run.parts:
            parts: dict[Part, str] = {}
            with suppress(CkptfixError, OSError):
                parts = parts_of(map(PurePosixPath, sorted(names_next_to(folder, name))), _NEXT_TO)
            # Most checkpoints of a run have equal names: 100,000 of them share one dict.
            last = next(reversed(run.parts.values()), None)
            run.parts[name] = last if last == parts and last is not None else parts
        if _is_save(run.parts[name]):
            saves.append(_Sibling(name, run.parts[name]))
        if len(saves) == _NEAR:
            break
    return saves


def compared(
    folder: Path, siblings: Siblings, known: Collection[str], *, home: Path | None = None
) -> Iterator[Finding]:
    """Yield the parts that a checkpoint lacks and the checkpoints next to it have.

    ``known``: files that were reported already. ``home``: where its neighbours are, for a copy of another folder.
    A folder whose save recorded its files is not compared.
    Between others, one of the nearest on either side must have the part: a script that gains or loses an object changes
    all that follow. The newest and the oldest are compared with the two next to them, and both must have it.
    States of a rank count as missing when both neighbours have them: a run may go on with fewer processes. If only one
    neighbour exists, as for the newest checkpoint, they are a note. A folder with random states of other ranks than 0
    alone lacks all that any checkpoint near it has.
    """
    manifest = usable_manifest(folder)
    origin = Path(os.path.abspath(origin_of(home or folder)))
    if split_number(origin.name) is None or (manifest is not None and manifest.is_of_a_save):
        return
    before, after = siblings.around(origin)
    near = (*before, *after)
    if not near:
        return
    # Its duplicates are gone on purpose: they would count as missing as long as its neighbours have theirs.
    is_shortened = is_repaired(folder)
    names = _names(folder)
    own = parts_of(names, _NEXT_TO)
    # A run that changed to DeepSpeed has its model and optimizer in one folder.
    for path in names:
        if (tag := parse_deepspeed_folder_name(path.name)) is not None:
            own |= {(role, tag.index): path.name for role in (Role.MODEL, Role.OPTIMIZER)}
    # Each rank writes its own random states, while the main process still writes the rest: a killed save leaves them
    # alone. So does a node with a disk of its own, where no checkpoint of the run has files of rank 0.
    is_of_others = bool(own) and all(role is Role.RNG_STATE and rank for role, rank in own)

    def is_expected(part: Part) -> bool:
        role, index = part
        if role is Role.RNG_STATE and not all(part in save.parts for save in (*before[:1], *after[:1])):
            return False
        if is_shortened and index > 0:
            return False
        if is_of_others:
            return True
        if before and after:
            return all(any(part in save.parts for save in side) for side in (before, after))
        return all(part in save.parts for save in near)

    examples = {part: name for save in near for part, name in save.parts.items()}
    missing = [part for part in sorted(examples.keys() - own.keys(), key=_order) if is_expected(part)]
    # A neighbour may have shards where another finding names one file.
    reported = {part for part in parts_of(map(PurePosixPath, known)) if part[0] is Role.MODEL}
    missing = [part for part in missing if part not in reported]
    is_first_or_last = not (before and after) and _is_save(own) and not is_of_others
    unsure = [part for part in missing if is_first_or_last and part[0] is Role.RNG_STATE]
    begun = [part for part in missing if part[0] is Role.DATALOADER]
    sure = [part for part in missing if part not in (*unsure, *begun)]
    hidden = {part: under for part in sure if (under := under_name_of_trainer(examples[part], names))}
    alone = tuple((IncompleteCheckpoint, [part]) for part in hidden)
    for kind, lost in (
        *alone,
        (IncompleteCheckpoint, [part for part in sure if part not in hidden]),
        (FewerRanks, unsure),
        (LostPosition, begun),
    ):
        files = tuple(examples[part] for part in lost if examples[part] not in known)
        if files:
            having = sum(all(part in save.parts for part in lost) for save in near)
            yield kind(
                path=PurePosixPath(files[0]),
                missing=files,
                known_by=f"{having} of {len(near)} checkpoints next to it have {'it' if len(files) == 1 else 'them'}",
                of_trainer=PurePosixPath(TRAINER_STATE) in names,
                misnamed=hidden.get(lost[0], ""),
                may_be_dropped=is_first_or_last
                and lost[0] not in hidden
                and not any(_is_shown(part, own, examples) for part in lost),
            )


def _is_shown(lost: Part, own: Collection[Part], near: Collection[Part]) -> bool:
    """Return whether the other files of a complete save show that it had a part, which checkpoints next to it have.

    A later entry of the role shows it, and so does an optimizer without its model, or a model or a scheduler without
    its optimizer. ``save_state`` writes custom objects last, so that a killed save lacks them.
    """
    role, index = lost
    have, expected = (Counter(part[0] for part in parts) for parts in (own, near))
    if role is Role.CUSTOM or any(part[0] is role and part[1] > index for part in own):
        return True
    return any(
        have[more] > have[role] and expected[more] <= expected[role] for more in _SHOWN_BY.get(role, ())
    )


_SHOWN_BY = {Role.MODEL: (Role.OPTIMIZER,), Role.OPTIMIZER: (Role.MODEL, Role.SCHEDULER)}


def under_name_of_trainer(lost: str, names: Collection[PurePosixPath]) -> str:
    """Return a file that may be a lost state of ``save_state``: one with the name that the Trainer gives it, or ""."""
    under = name_of_trainer(lost)
    return under if PurePosixPath(under) in names else ""


def _is_save(parts: Collection[Part]) -> bool:
    return any(role is Role.RNG_STATE for role, _ in parts)


def parts_of(names: Iterable[PurePosixPath], roles: Collection[Role] = _COMPARED) -> dict[Part, str]:
    """Return the parts of a checkpoint, each with its first file or folder.

    ``load_state`` never reads a file with a name of the Trainer: next to random states of accelerate it is a script's.
    """
    parsed = [(path, parse_file_name(path.name)) for path in names]
    is_save_state = any(name is not None and name.is_of_save_state for _, name in parsed)
    found: dict[Part, str] = {}
    for path, name in parsed:
        if is_save_state and name is not None and name.is_of_trainer:
            continue
        if name is not None and name.role in roles:
            part = (name.role, name.rank if name.rank is not None else name.index)
        elif name is not None and name.role is Role.WEIGHTS_INDEX:
            part = (Role.MODEL, 0)
        elif (folder := parse_folder_name(path.name)) is not None:
            part = (folder.role, folder.index)
        else:
            continue
        found.setdefault(part, path.name)
    return found


def _names(folder: Path) -> list[PurePosixPath]:
    try:
        return [PurePosixPath(name) for name in sorted(names_in(folder))]
    except OSError:
        return []


def _order(part: Part) -> tuple[int, int]:
    return _NEXT_TO.index(part[0]), part[1]
