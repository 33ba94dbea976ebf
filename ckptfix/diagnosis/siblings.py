"""The other checkpoints of a run, and the files that they have and one of them lacks."""

import os
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import NamedTuple

from ckptfix.checkpoint.filenames import (
    TRAINER_STATE,
    FileName,
    Role,
    describe_folder_name,
    family_of,
    is_one_of_several,
    name_of_trainer,
    parse_deepspeed_folder_name,
    parse_file_name,
    parse_folder_name,
    split_number,
)
from ckptfix.checkpoint.manifest import is_repaired, usable_manifest
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, PIPELINE
from ckptfix.checkpoint.neighbours import folders_next_to, names_next_to
from ckptfix.dataclass import dataclass
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.incomplete import (
    FewerRanks,
    IncompleteCheckpoint,
    LaterModel,
    LostModelFiles,
    LostPosition,
)
from ckptfix.errors import CkptfixError
from ckptfix.storage.reading import names_in, origin_of

_COMPARED = (Role.MODEL, Role.OPTIMIZER, Role.SCHEDULER, Role.GRAD_SCALER, Role.RNG_STATE, Role.CUSTOM)
"""Roles that every checkpoint of a run has; a checkpoint may rightly lack samplers and dataloaders."""

_NEXT_TO = (*_COMPARED, Role.DATALOADER)
"""Roles that are looked for next to a checkpoint. Without its state, ``load_state`` begins a dataloader again."""

Part = tuple[Role, int]
"""A role and the position of an entry, or the rank of a state of generators."""


class Names(NamedTuple):
    """The names in a checkpoint. ``parts``: as of ``parts_of``. ``folders``: names that may be of plain sub-folders.

    ``single``: positions of the models that ``load_state`` finds in one file.
    """

    parts: dict[Part, str]
    folders: frozenset[str] = frozenset()
    single: frozenset[int] = frozenset()
    is_pipeline: bool = False


class Sibling(NamedTuple):
    """A save next to a checkpoint. ``model_in``: as of ``model_files``, for one of its sub-folders."""

    name: str
    names: Names
    model_in: Callable[[str], frozenset[str]]

    @property
    def parts(self) -> dict[Part, str]:
        """Its parts."""
        return self.names.parts


@dataclass(frozen=True, slots=True)
class _Run:
    """The folders of one run in order of their numbers, the names in those listed, and the models in their folders."""

    folders: tuple[tuple[int, str], ...]
    names: dict[str, Names]
    models: dict[tuple[str, str], frozenset[str]]


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

    def around(self, folder: Path) -> tuple[list[Sibling], list[Sibling]]:
        """Return the nearest saves before a numbered checkpoint and after it, the nearest first."""
        named = split_number(folder.name)
        assert named is not None
        stem, number = named
        key = (folder.parent, stem)
        with self._lock:
            run = self._runs.pop(key, None) or _Run(tuple(sorted(self._names(folder, stem))), {}, {})
            self._runs[key] = run
            if len(self._runs) > _MOST_RUNS:
                self._runs.popitem(last=False)
            before = bisect_left(run.folders, number, key=lambda one: one[0])
            after = bisect_right(run.folders, number, key=lambda one: one[0])
            return (
                _saves(run, folder, run.folders[max(before - _FAR, 0) : before][::-1]),
                _saves(run, folder, run.folders[after : after + _FAR]),
            )

    def nearest(self, folder: Path) -> list[tuple[Sibling, bool]]:
        """Return the saves around a numbered checkpoint, and whether each is an earlier one.

        Those next to it come first, the earlier one before the later one.
        """
        before, after = self.around(folder)
        near = (*before[:1], *after[:1], *before[1:], *after[1:])
        return [(sibling, sibling in before) for sibling in near]

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


def next_to_it(count: int) -> str:
    """Return in words so many checkpoints next to one."""
    return "the checkpoint next to it" if count == 1 else f"{count} checkpoints next to it"


def _saves(run: _Run, folder: Path, near: Iterable[tuple[int, str]]) -> list[Sibling]:
    saves: list[Sibling] = []
    for _, name in near:
        if name not in run.names:
            names = Names({})
            with suppress(CkptfixError, OSError):
                names = names_of(map(PurePosixPath, sorted(names_next_to(folder, name))))
            # Most checkpoints of a run have equal names: 100,000 of them share one dict.
            last = next(reversed(run.names.values()), None)
            run.names[name] = last if last == names and last is not None else names
        if _is_save(run.names[name].parts):
            saves.append(Sibling(name, run.names[name], partial(_model_next_to, run, folder, name)))
        if len(saves) == _NEAR:
            break
    return saves


def _model_next_to(run: _Run, folder: Path, name: str, below: str) -> frozenset[str]:
    """Return the files of a model in a sub-folder of a checkpoint next to a folder; it is listed once."""
    key = name, below
    if key not in run.models:
        files: Iterable[str] = ()
        with suppress(CkptfixError, OSError):
            files = names_next_to(folder, f"{name}/{below}")
        run.models[key] = model_files(files)
    return run.models[key]


def names_of(names: Iterable[PurePosixPath]) -> Names:
    """Return the names in a checkpoint. A listing does not say which are folders: those of models have no dot."""
    names = tuple(names)
    folders = frozenset(
        path.name
        for path in names
        if "." not in path.name
        and describe_folder_name(path.name) is None
        and not is_one_of_several(path.name)
    )
    parsed = (parse_file_name(path.name) for path in names)
    single = frozenset(name.index for name in parsed if name is not None and is_loaded_model(name))
    return Names(parts_of(names, _NEXT_TO), folders, single, is_pipeline=PurePosixPath(PIPELINE) in names)


def is_loaded_model(name: FileName) -> bool:
    """Return whether ``load_state`` reads the weights of a model from a file of this name."""
    return name.role is Role.MODEL and name.load_order is not None


def model_files(names: Iterable[str]) -> frozenset[str]:
    """Return the configs and the weights by which a library finds a model in a folder; of shards the index alone.

    A folder without such weights holds no model, whatever else is in it: a tokenizer has configs, too.
    """
    parsed = {name: parse_file_name(name) for name in names}
    weights = {name for name, file in parsed.items() if file is not None and file.is_of_library}
    whole = {name for name in weights if (file := parsed[name]) is not None and file.shard is None}
    return frozenset((whole or weights) | (_CONFIGS & parsed.keys())) if weights else frozenset()


_CONFIGS = {CONFIG, ADAPTER}


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
    alone lacks all that any checkpoint near it has. Models in sub-folders: ``_lost_from_folders``.
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

    if not is_of_others:
        yield from _lost_from_folders(folder, names, before, after, known)
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


def _lost_from_folders(
    root: Path,
    names: Iterable[PurePosixPath],
    before: Sequence[Sibling],
    after: Sequence[Sibling],
    known: Collection[str],
) -> Iterator[Finding]:
    """Yield the files of models in sub-folders that a checkpoint lacks, and that all those next to it have.

    Hooks of diffusers' scripts save ``unet/`` and ``unet_ema/`` so. A folder that exists without its weights or its
    config was cut. One that is missing in the newest checkpoint may be of a model that the script no longer saves, in
    the oldest of one that it saves since. Pipelines that a script saves now and then show nothing.
    """
    own = names_of(names)
    near = [*before, *after]
    is_of_trainer = PurePosixPath(TRAINER_STATE) in names
    if any(save.names.is_pipeline and not own.is_pipeline for save in near):
        return
    is_newest, is_oldest = not after, not before
    for below in sorted(frozenset.intersection(*(save.names.folders for save in near))):
        if any(name.startswith(f"{below}/") for name in known):
            continue
        is_there = os.path.isdir(root / below)
        files = frozenset(path.name for path in _names(root / below)) if is_there else frozenset()
        weights = bool(model_files(files))
        # Most folders end here: those next to them are not listed.
        if files and weights is not _CONFIGS.isdisjoint(files):
            continue
        models = [save.model_in(below) for save in near]
        if not all(models):
            continue
        lost = frozenset.intersection(*models) & _CONFIGS - files
        if not weights:
            lost |= models[0] - _CONFIGS
        if not lost:
            continue
        is_needed = is_there or _is_needed(root, below, own)
        kind = LaterModel if is_oldest and not (is_needed or is_newest) else LostModelFiles
        yield kind(
            path=PurePosixPath(below, min(lost)),
            missing=tuple(f"{below}/{name}" for name in sorted(lost)),
            known_by=f"{len(near)} of {len(near)} checkpoints next to it have {'it' if len(lost) == 1 else 'them'}",
            of_trainer=is_of_trainer,
            may_be_dropped=is_newest and not is_needed,
        )


def _is_needed(root: Path, below: str, own: Names) -> bool:
    """Return whether other files of a checkpoint show that the model of a missing sub-folder was saved.

    Its average does, or an optimizer without a model.
    """
    models = {name for name in own.folders if model_files(path.name for path in _names(root / name))}
    if any(name != _without_average(name) == below for name in models):
        return True
    count = sum(name == _without_average(name) for name in models)
    roles = Counter(role for role, _ in own.parts)
    is_average = below != _without_average(below)
    return not is_average and roles[Role.OPTIMIZER] == count + roles[Role.MODEL] + 1


def _without_average(name: str) -> str:
    """Return the name of the folder of the model of which a folder has the average, as diffusers' scripts call them."""
    return "_".join(word for word in name.split("_") if word != "ema")


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
