"""The other checkpoints of a run, next to one of them on this machine or in a store.

Each folder is listed once, and its files are read once, however many checkpoints are compared with
it.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from operator import attrgetter, itemgetter
from pathlib import Path, PurePosixPath
from threading import RLock
from typing import NamedTuple, TypeVar, cast

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.filenames import FileName, parse_file_name
from ckptfix.checkpoint.folder import CheckpointFolder, scan_folder
from ckptfix.checkpoint.folder_names import (
    counts_saves,
    describe_folder_name,
    family_of,
    is_one_of_several,
    parse_folder_name,
    split_number,
    tells_runs_apart,
)
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, PIPELINE
from ckptfix.checkpoint.roles import Role
from ckptfix.errors import CkptfixError
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_zip import TorchZip
from ckptfix.storage.files import (
    AnyPath,
    Openable,
    StorePath,
    absolute,
    folders_next_to,
    names_in,
)
from ckptfix.storage.opened import opened_part

COMPARED = (
    Role.MODEL,
    Role.OPTIMIZER,
    Role.SCHEDULER,
    Role.GRAD_SCALER,
    Role.RNG_STATE,
    Role.CUSTOM,
)
"""Roles that every checkpoint of a run has; a checkpoint may rightly lack samplers and dataloaders.
"""

NEXT_TO = (*COMPARED, Role.DATALOADER)
"""Roles that are looked for next to a checkpoint. Without its state, ``load_state`` begins a
dataloader again.
"""

CONFIGS = frozenset((CONFIG, ADAPTER))

Part = tuple[Role, int]
"""A role and the position of an entry, or the rank of a state of generators."""


class Names(NamedTuple):
    """The names in a checkpoint. ``parts``: as of ``parts_of``. ``folders``: names that may be of
    plain sub-folders.

    ``single``: positions of the models that ``load_state`` finds in one file.
    """

    every: frozenset[str]
    parts: dict[Part, str]
    folders: frozenset[str]
    single: frozenset[int]

    @property
    def is_save(self) -> bool:
        """True where random states are among the names: a save ends with them."""
        return any(role is Role.RNG_STATE for role, _ in self.parts)

    @property
    def is_of_save_state(self) -> bool:
        """True where ``save_state`` wrote the files."""
        return any(
            (name := parse_file_name(file)) is not None and name.is_of_save_state
            for file in self.every
        )

    @property
    def is_pipeline(self) -> bool:
        """True for a pipeline of diffusers."""
        return PIPELINE in self.every


def names_of(names: Iterable[str]) -> Names:
    """Return the names in a checkpoint. A listing does not say which are folders: those of models
    have no dot.
    """
    every = frozenset(names)
    folders = frozenset(
        name
        for name in every
        if "." not in name and describe_folder_name(name) is None and not is_one_of_several(name)
    )
    parsed = map(parse_file_name, every)
    single = frozenset(name.index for name in parsed if name is not None and is_loaded_model(name))
    return Names(every, parts_of(map(PurePosixPath, sorted(every)), NEXT_TO), folders, single)


def is_loaded_model(name: FileName) -> bool:
    """Return whether ``load_state`` reads the weights of a model from a file of this name."""
    return name.role is Role.MODEL and name.load_order is not None


def model_files(names: Iterable[str]) -> frozenset[str]:
    """Return the configs and the weights by which a library finds a model in a folder; of shards
    the index alone.

    A folder without such weights holds no model, whatever else is in it: a tokenizer has configs,
    too.
    """
    parsed = {name: parse_file_name(name) for name in names}
    weights = {name for name, file in parsed.items() if file is not None and file.is_of_library}
    whole = {name for name in weights if (file := parsed[name]) is not None and file.shard is None}
    return frozenset((whole or weights) | (CONFIGS & parsed.keys())) if weights else frozenset()


def parts_of(names: Iterable[PurePosixPath], roles: Collection[Role] = COMPARED) -> dict[Part, str]:
    """Return the parts of a checkpoint, each with its first file or folder.

    ``load_state`` never reads a file with a name of the Trainer: next to random states of
    accelerate it is a script's.
    """
    parsed = [(path, parse_file_name(path.name)) for path in names]
    is_save_state = any(name is not None and name.is_of_save_state for _, name in parsed)
    parts: dict[Part, str] = {}
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
        parts.setdefault(part, path.name)
    return parts


NAMED_INSIDE = (Role.OPTIMIZER, Role.SCHEDULER, Role.GRAD_SCALER, Role.CUSTOM)
"""Roles of files that have the name inside under which they were saved."""

_SUFFIXES = (".bin", ".pt", ".pkl")


def renamed_states(folder: CheckpointFolder) -> dict[str, str]:
    """Return the files of ``save_state`` that somebody renamed, each with the name under which it
    was saved.

    ``torch.save`` names the folder in its zip file after the file, and the name stays (torch 2.13).
    A file under its old name shows that the other one is a copy.
    """
    names = {path.name for path in (*(file.path for file in folder.components), *folder.strays)}
    renamed: dict[str, str] = {}
    for file in folder.components:
        content = file.content
        if (
            file.role not in NAMED_INSIDE
            or not isinstance(content, TorchFile)
            or not isinstance(content.container, TorchZip)
            or content.container.root == file.path.stem
        ):
            continue
        former = [f"{content.container.root}{suffix}" for suffix in _SUFFIXES]
        states = [name for name in former if _is_of_save_state(name)]
        if states and names.isdisjoint(states):
            renamed[file.path.name] = states[0]
    return renamed


def _is_of_save_state(name: str) -> bool:
    parsed = parse_file_name(name)
    return parsed is not None and parsed.role in NAMED_INSIDE and not parsed.is_of_trainer


def are_on_both_sides(are_earlier: Iterable[bool]) -> bool:
    """Return whether there are earlier saves and later ones: no change of the script differs from
    all of them.
    """
    return len(set(are_earlier)) == 2


def next_to_it(count: int) -> str:
    """Return in words so many checkpoints next to one."""
    return "the neighbouring checkpoint" if count == 1 else f"{count} neighbouring checkpoints"


def neighbours_have(count: int, total: int) -> str:
    """Return in words so many of the checkpoints next to one, and the verb after them."""
    if total == 1:
        return f"{next_to_it(total)} has"
    return f"{count} of {next_to_it(total)} {'has' if count == 1 else 'have'}"


Numbered = tuple[int, str]
"""The number of a checkpoint, and its name."""

_MOST_RUNS = 32
"""Runs that are remembered, those used last: the checkpoints of one follow each other in a listing.
"""

_MOST_SCANS = 8
"""Checkpoints of a run whose headers are remembered, those used last: that of an optimizer can have
10 MB.
"""

_NEAR, _FAR = 2, 8
"""Checkpoints that one is compared with on either side, and folders that are listed to find saves
among them.
"""


class _Run(Struct, frozen=True, eq=False):
    """The checkpoints of a run in order of their numbers, and what was read of them.

    ``home``: one of them. ``listed``: all in its folder; ``compared``: those that are surely of one
    run. ``counts_saves``: the numbers count its saves, None where the names do not tell: ``r_1``
    and ``r_2`` may be two runs.
    """

    home: AnyPath
    listed: Sequence[Numbered]
    compared: Sequence[Numbered]
    counts_saves: bool | None = False
    names: dict[str, Names] = field(default_factory=dict)
    models: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    scans: OrderedDict[str, dict[Role, CheckpointFolder]] = field(default_factory=OrderedDict)
    lock: RLock = field(default_factory=RLock)


class Neighbour(Struct, frozen=True, eq=False):
    """A checkpoint of the run of another one. What is read of it is remembered.

    ``is_before``: by its number.
    """

    run: _Run
    name: str
    is_before: bool

    @property
    def is_earlier(self) -> bool:
        """True where the number counts saves: ``run_1`` and ``run_2`` may be two runs."""
        return self.is_before and self.is_of_same_run

    @property
    def is_of_same_run(self) -> bool:
        """True where the number in its name counts saves."""
        return bool(self.run.counts_saves)

    @property
    def names(self) -> Names:
        """The names in it, none where it cannot be listed."""
        known = self.run.names
        with self.run.lock:
            if self.name not in known:
                listed: Iterable[str] = ()
                with suppress(CkptfixError, OSError):
                    listed = names_in(self.run.home.parent / self.name)
                names = names_of(listed)
                # Most checkpoints of a run have equal names: 100,000 of them share one dict.
                last = next(reversed(known.values()), names)
                known[self.name] = last if last == names else names
            return known[self.name]

    @property
    def parts(self) -> dict[Part, str]:
        """Its parts, as of ``parts_of``."""
        return self.names.parts

    def parts_as_saved(self, own: Collection[Part]) -> dict[Part, str]:
        """Return its parts by the names under which its states were saved, for a checkpoint with
        ``own`` parts.

        It opens files, where each of the two has what the other lacks: only then a file may have
        been renamed. The parts by the present names where these cannot be read.
        """
        theirs, mine = (
            {part for part in parts if part[0] in NAMED_INSIDE} for parts in (self.parts, own)
        )
        if theirs - mine and mine - theirs:
            with suppress(CkptfixError, OSError), self.opened() as root:
                renamed = renamed_states(self.scan(*NAMED_INSIDE, root=root))
                names = sorted(renamed.get(name, name) for name in self.names.every)
                return parts_of(map(PurePosixPath, names), NEXT_TO)
        return self.parts

    def model_in(self, below: str) -> frozenset[str]:
        """Return the files of a model in a sub-folder, as of ``model_files``."""
        key = self.name, below
        with self.run.lock:
            if key not in self.run.models:
                names: Iterable[str] = ()
                with suppress(CkptfixError, OSError):
                    names = names_in(self.run.home.parent / self.name / below)
                self.run.models[key] = model_files(names)
            return self.run.models[key]

    @contextmanager
    def opened(self) -> Iterator[AnyPath]:
        """Yield its folder. That of a store exists until the end of the block. Raises
        CkptfixError.
        """
        with opened_part(self.run.home.parent / self.name) as folder:
            yield folder

    def scan(self, *roles: Role, root: AnyPath | None = None) -> CheckpointFolder:
        """Return the headers of its files of these roles. ``root``: its folder, where it is open
        already.

        Raises CkptfixError, OSError.
        """
        scans = self.run.scans
        with self.run.lock:
            known = scans.pop(self.name, {})
            scans[self.name] = known
            if len(scans) > _MOST_SCANS:
                scans.popitem(last=False)
        unread = [role for role in roles if role not in known]
        if unread:
            # Without the lock: reads of a store wait until all threads wait for one. Two may scan
            # at once.
            with self.opened() if root is None else nullcontext(root) as folder:
                scan = scan_folder(folder, wanted=lambda file: file.role in unread)
            for role in unread:
                of_role = tuple(
                    component for component in scan.components if component.role is role
                )
                known[role] = replace(scan, components=of_role)
        components = (component for role in roles for component in known[role].components)
        return replace(
            known[roles[0]],
            # Where it was read may be closed by now, as each checkpoint of a listing is.
            root=self.run.home.parent / self.name if root is None else root,
            components=tuple(sorted(components, key=attrgetter("path"))),
        )


def scanned(
    near: Iterable[Neighbour], *roles: Role
) -> Iterator[tuple[Neighbour, CheckpointFolder]]:
    """Yield checkpoints with their files of these roles, without those that cannot be read: a run
    may delete one.
    """
    for neighbour in near:
        with suppress(CkptfixError, OSError):
            yield neighbour, neighbour.scan(*roles)


_Judgement = TypeVar("_Judgement")


class Siblings:
    """Checkpoints grouped by run: those of a run lie in one folder, and differ in one number of the
    name.

    Names that libraries give to checkpoints are looked up in the folder that holds them. Others
    count as a run among ``paths``: the checkpoints, or with ``is_recursive`` the folders below
    which each is one. There, ``is_one_run`` decides where the names do not tell. Several threads
    may ask.
    """

    def __init__(
        self,
        paths: Iterable[Openable] = (),
        *,
        is_recursive: bool = False,
        is_one_run: Callable[[Iterable[Neighbour]], bool] = lambda saves: False,
    ) -> None:
        self._paths: defaultdict[tuple[AnyPath, str], list[Numbered]] = defaultdict(list)
        self._is_one_run = is_one_run
        # "check -r runs/a" compared nothing: a checkpoint is looked up by its absolute path.
        every = dict.fromkeys(
            absolute(path if isinstance(path, StorePath) else Path(path)) for path in paths
        )
        for path in every:
            if named := split_number(path.name):
                stem, number = named
                self._paths[path.parent, stem].append((number, path.name))
        self._above = frozenset(every) if is_recursive else frozenset()
        self._runs: OrderedDict[tuple[AnyPath, str], _Run] = OrderedDict()
        self._judged: dict[AnyPath, object] = {}
        self._lock = RLock()

    def of(self, folder: AnyPath) -> "Neighbours":
        """Return the checkpoints next to a folder."""
        return Neighbours(self, absolute(folder))

    def once(self, near: "Neighbours", judge: Callable[[], _Judgement]) -> _Judgement:
        """Return the judgement on a checkpoint, made once: each bare one of a run asks about the
        same others.
        """
        # Without a lock: its holder would wait for the threads that wait for the lock. Two may
        # judge at once.
        if near.home not in self._judged:
            self._judged[near.home] = judge()
        return cast(_Judgement, self._judged[near.home])

    def run_of(self, home: AnyPath) -> _Run:
        """Return the run of a checkpoint, an empty one where its name has no number."""
        named = split_number(home.name)
        if named is None:
            return _Run(home, (), ())
        stem, _ = named
        key = home.parent, stem
        with self._lock:
            run = self._runs.pop(key, None) or self._listed(home, stem)
            self._keep(key, run)
        if run.counts_saves is None:
            # Without the lock, as in ``once``.
            saves = (Neighbour(run, name, is_before=False) for _, name in run.listed)
            is_one = self._is_one_run(saves)
            run = replace(run, counts_saves=is_one, compared=run.listed if is_one else run.compared)
            with self._lock:
                self._keep(key, run)
        return run

    def _keep(self, key: tuple[AnyPath, str], run: _Run) -> None:
        self._runs[key] = run
        if len(self._runs) > _MOST_RUNS:
            self._runs.popitem(last=False)

    def _listed(self, home: AnyPath, stem: str) -> _Run:
        listed: list[Numbered] = []
        # Whoever reads a checkpoint may not be allowed to list the folder above it.
        with suppress(CkptfixError, OSError):
            numbered = ((split_number(name), name) for name in folders_next_to(home))
            listed = sorted(
                (parts[1], name) for parts, name in numbered if parts and parts[0] == stem
            )
        above = home.parent
        is_below = not self._above.isdisjoint((above, *above.parents))
        counts: bool | None = counts_saves(stem)
        if family_of(home.name) is not None or (counts and is_below):
            return _Run(home, listed, listed, counts)
        if tells_runs_apart(stem):
            return _Run(home, listed, ())
        is_undecided = is_below and len(listed) > 1 and not counts
        return _Run(
            home, listed, sorted(self._paths[above, stem]), None if is_undecided else counts
        )


class Neighbours:
    """The other checkpoints of the run of one. ``home``: its folder; that of the source for a
    copy.
    """

    def __init__(self, siblings: Siblings, home: AnyPath) -> None:
        self.siblings = siblings
        self.home = home

    @property
    def are_of_one_run(self) -> bool:
        """True where the numbers in their names count the saves of a run."""
        return bool(self.siblings.run_of(self.home).counts_saves)

    def saves(self) -> tuple[list[Neighbour], list[Neighbour]]:
        """Return the nearest saves before the checkpoint and after it, the nearest first."""
        run = self.siblings.run_of(self.home)
        before, after = self._sides(run.compared)
        earlier, later = (
            (Neighbour(run, run.compared[place][1], place in before) for place in places)
            for places in (before[: -_FAR - 1 : -1], after[:_FAR])
        )
        return _nearest_saves(earlier), _nearest_saves(later)

    def nearest(self) -> list[Neighbour]:
        """Return these saves: those next to the checkpoint first, the earlier one before the later
        one.
        """
        before, after = self.saves()
        return [*before[:1], *after[:1], *before[1:], *after[1:]]

    def before(self) -> Neighbour | None:
        """Return the folder before the checkpoint, whatever it holds; None where the numbers may be
        of other runs.
        """
        return self._next_to(is_before=True)

    def after(self) -> Neighbour | None:
        """Return the folder after the checkpoint in the same way."""
        return self._next_to(is_before=False)

    def _next_to(self, *, is_before: bool) -> Neighbour | None:
        run = self.siblings.run_of(self.home)
        before, after = self._sides(run.listed)
        places = before[-1:] if is_before else after[:1]
        nearest = next((Neighbour(run, run.listed[place][1], is_before) for place in places), None)
        return nearest if nearest is not None and nearest.is_of_same_run else None

    def folders(self) -> list[Neighbour]:
        """Return the folders next to the checkpoint, two on either side, whatever they hold."""
        run = self.siblings.run_of(self.home)
        before, after = self._sides(run.listed)
        places = (*before[-_NEAR:], *after[:_NEAR])
        return [Neighbour(run, run.listed[place][1], place in before) for place in places]

    def spread(self) -> list[Neighbour]:
        """Return up to four folders, whatever they hold: the two next to the checkpoint, the first
        and the last.
        """
        run = self.siblings.run_of(self.home)
        before, after = self._sides(run.listed)
        places = dict.fromkeys((*before[-1:], *after[:1], *before[:1], *after[-1:]))
        return [Neighbour(run, run.listed[place][1], place in before) for place in places]

    def _sides(self, numbered: Sequence[Numbered]) -> tuple[range, range]:
        """Return the places of the checkpoints before this one, and of those after it."""
        _, number = split_number(self.home.name) or ("", 0)
        before = bisect_left(numbered, number, key=itemgetter(0))
        after = bisect_right(numbered, number, key=itemgetter(0))
        return range(before), range(after, len(numbered))


def _nearest_saves(near: Iterable[Neighbour]) -> list[Neighbour]:
    return list(islice((neighbour for neighbour in near if neighbour.names.is_save), _NEAR))
