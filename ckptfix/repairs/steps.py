"""The steps of a repair as values that print themselves, and the draft in which a plan collects
them.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePosixPath
from typing import ClassVar

from msgspec import Struct

from ckptfix.checkpoint.keys import KeyMap, fitting
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.damaged import UnsafePickle
from ckptfix.diagnosis.findings.duplicates import (
    DoubledModel,
    NestedPrefix,
    UndecidedPrefix,
    WrapperPrefix,
)
from ckptfix.diagnosis.findings.incomplete import UndecidedNames
from ckptfix.diagnosis.policy import Keys, Policy
from ckptfix.lazy import once
from ckptfix.reports import Serialized
from ckptfix.storage.files import AnyPath, StorePath
from ckptfix.storage.paths import JOURNAL
from ckptfix.storage.reading import FileIdentity
from ckptfix.wording import count_of, human_size


class Safety(Enum):
    """Safety of a step. SAFE: applied by default. LOSSY: applied only when named, as only the user
    can judge it.
    """

    SAFE = "safe"
    LOSSY = "lossy"


class DropEntry(Struct, frozen=True, kw_only=True):
    """Removal of a duplicate file; the journal keeps the recipe that rebuilds it.

    Of a DCP folder all files are removed; the folder itself stays, and no loader reads an empty
    one.
    """

    path: PurePosixPath
    kept: PurePosixPath
    size: int
    is_folder: bool = False

    def __str__(self) -> str:
        what = f"all files of {self.path}/" if self.is_folder else str(self.path)
        empty = "; the empty folder stays" if self.is_folder else ""
        return f"delete {what} ({human_size(self.size)}; duplicate of {self.kept}){empty}"


class SetAside(Struct, frozen=True, kw_only=True):
    """Removal of the files that hold a model as no loader should take it; the journal keeps them.

    ``path``: the file or the index that loaders look for, ``files``: all of them, ``kept``: what
    loaders take after it.
    """

    path: PurePosixPath
    files: tuple[PurePosixPath, ...]
    kept: PurePosixPath
    size: int

    def __str__(self) -> str:
        more = len(self.files) - 1
        files = str(self.files[0]) + (f" and {count_of(more, 'more file')}" if more else "")
        return (
            f"set {files} aside ({human_size(self.size)}, kept in .ckptfix for undo); {self.kept} "
            "stays"
        )


class Trim(Struct, frozen=True, kw_only=True):
    """Cut of a file to the size of its own content."""

    path: PurePosixPath
    size: int
    extra: int

    def __str__(self) -> str:
        left = count_of(self.size, "byte")
        return f"trim {count_of(self.extra, 'byte')} off the end of {self.path}, leaving {left}"


class RewriteNames(Struct, frozen=True, kw_only=True):
    """Rename of keys in a file's header or pickle, or in the ``.metadata`` of a DCP folder; no
    tensor byte changes.

    ``maps``: (path to the dict, kind of place) -> key map. ``add_format``: add a missing
    safetensors "format". ``renames`` counts the names that change; ``example`` is one of them, old
    and new.
    """

    path: PurePosixPath
    maps: Mapping[tuple[tuple[str, ...], str], KeyMap]
    add_format: bool
    renames: int
    example: tuple[str, str] | None

    def __str__(self) -> str:
        if self.example is None:
            return f'add "format" to the header of {self.path}'
        old, new = self.example
        return f"rename {count_of(self.renames, 'key')} in {self.path}: {old!r} -> {new!r}"


class WriteIndex(Struct, frozen=True, kw_only=True):
    """New index that agrees with the headers. ``weight_map`` holds the keys after the repair."""

    path: PurePosixPath
    weight_map: Mapping[str, str]
    total_size: int
    exists: bool

    def __str__(self) -> str:
        verb = "rewrite" if self.exists else "write"
        return f"{verb} {self.path} from the headers: {count_of(len(self.weight_map), 'key')}"


class Renumber(Struct, frozen=True, kw_only=True):
    """Move of an entry, a file or all files of a DCP folder, to the position where the correct
    script looks for it.
    """

    source: PurePosixPath
    target: PurePosixPath

    def __str__(self) -> str:
        return f"move {self.source} to {self.target}"


StepAction = DropEntry | SetAside | Trim | RewriteNames | WriteIndex | Renumber


class Step(Serialized, Struct, frozen=True, kw_only=True):
    """One action, the codes it fixes, and the files it relies on as they were when it was planned.

    Steps of one ``bundle`` are done together or not at all, as the renames of all shards of a
    model; None: alone.
    """

    json_keys: ClassVar = "action=kind message=__str__ fixes safety files"

    action: StepAction
    fixes: tuple[str, ...]
    safety: Safety
    before: Mapping[PurePosixPath, FileIdentity]
    bundle: PurePosixPath | None = None

    def __str__(self) -> str:
        return str(self.action)

    @property
    def kind(self) -> str:
        """The name of the action, as JSON has it."""
        return type(self.action).__name__

    @property
    def files(self) -> tuple[PurePosixPath, ...]:
        """The files that the action relies on."""
        return tuple(self.before)


class Unplanned(Serialized, Struct, frozen=True, kw_only=True):
    """A finding that a repair leaves although its code was requested, with the reason.

    ``others``: further files that stay for it.
    """

    json_keys: ClassVar = "code path reason"

    code: str
    path: PurePosixPath
    reason: str
    others: tuple[PurePosixPath, ...] = ()

    @property
    def paths(self) -> tuple[PurePosixPath, ...]:
        """All files that stay as they are."""
        return self.path, *self.others

    def __str__(self) -> str:
        more = f" and {count_of(len(self.others), 'more file')}" if self.others else ""
        return f"{self.path}{more}: {self.code}: {self.reason}"


class Draft:
    """Plan of a repair, and its draft: the diagnosed case, the findings that may be repaired, the
    steps in the order in which they are applied, and the repairable findings that stay.
    """

    def __init__(self, case: Case, policy: Policy) -> None:
        """Start without steps."""
        self.case = case
        self.folder = case.folder
        self.groups = case.groups
        self.sharded = case.sharded
        self.states = {state.path: state for state in case.sharded}
        self.findings = tuple(finding for finding in case.findings if policy.wants(finding.code))
        self.unsafe = case.paths(UnsafePickle)
        self.doubles = {
            finding.path: finding.original
            for finding in case.findings
            if isinstance(finding, DoubledModel)
        }
        self.nested = {
            (finding.path, finding.scope)
            for finding in case.findings
            if isinstance(finding, NestedPrefix)
        }
        self.policy = policy
        self.counted = self._counted()
        """Duplicates that stay, as the user counts them among the script's models -> why."""
        for path in self.counted:
            del self.doubles[path]
        self.memberships = Counter(member.path for group in self.groups for member in group.members)
        self.components = {component.path: component for component in self.folder.components}
        self.steps: list[Step] = []
        self.unplanned: list[Unplanned] = []
        self._by_path: dict[PurePosixPath, list[Finding]] = {}
        for finding in self.findings:
            self._by_path.setdefault(finding.path, []).append(finding)

    @once
    def links(self) -> Mapping[PurePosixPath, frozenset[PurePosixPath]]:
        """The symbolic links below the folder (``links_below``)."""
        return links_below(self.folder.root)

    def _counted(self) -> dict[PurePosixPath, str]:
        want = self.policy.keep.get(Role.MODEL, 0)
        reasons: dict[PurePosixPath, str] = {}
        for entries in self.case.entries(Role.MODEL):
            doubles = [entry.path for entry in entries if entry.path in self.doubles]
            if len(entries) - len(doubles) < want:
                left = f"only {len(entries) - len(doubles)} of {len(entries)} would remain"
                reasons |= dict.fromkeys(
                    doubles, f"{count_of(want, 'model')} requested, but {left} without duplicates"
                )
        return reasons

    def files_of(self, path: PurePosixPath) -> tuple[PurePosixPath, ...]:
        """Return the files of an entry: itself, or all files of a DCP folder."""
        state = self.states.get(path)
        return (path,) if state is None else tuple(state.files)

    def findings_of(self, path: PurePosixPath) -> Sequence[Finding]:
        """Return the repairable findings about one file."""
        return self._by_path.get(path, ())

    def undecided(self, paths: Iterable[PurePosixPath]) -> str | None:
        """Return why the keys of these files stay, None where the evidence or an option decides
        about them.
        """
        policy = self.policy
        if policy.keys is not Keys.AUTO or WrapperPrefix.code in policy.allow:
            return None
        asking = [
            finding
            for path in paths
            for finding in self.findings_of(path)
            if isinstance(finding, UndecidedPrefix | UndecidedNames)
            if finding.code not in policy.allow and finding.chain != finding.target
        ]
        nested = next((finding for finding in asking if isinstance(finding, UndecidedPrefix)), None)
        if nested is not None:
            return (
                "the unchanged script would not find its keys after a rename; add --keys bare for "
                f"a bare model, or --allow {nested.code} for {fitting(nested.target)}"
            )
        if asking:
            return (
                "the unchanged script would not find its keys after a rename; if the model or the "
                f"optimizer was renamed by hand, add --allow {asking[0].code}"
            )
        return None

    def add(
        self,
        action: StepAction,
        code: str,
        safety: Safety,
        paths: Iterable[PurePosixPath],
        bundle: PurePosixPath | None = None,
    ) -> None:
        """Add a step that relies on the files ``paths`` as they are now."""
        scanned = self.case.scanned
        before = {path: scanned[path] for path in paths if path in scanned}
        self.steps.append(
            Step(action=action, fixes=(code,), safety=safety, before=before, bundle=bundle)
        )

    def stay(self, code: str, paths: Sequence[PurePosixPath], reason: str) -> None:
        """Note why a finding stays in all of these files."""
        self.unplanned.append(
            Unplanned(code=code, path=paths[0], reason=reason, others=tuple(paths[1:]))
        )


_MAX_HOPS = 40
"""Limit of the links that Linux follows for one path (path_resolution(7)); more count as a loop."""


def links_below(root: AnyPath) -> Mapping[PurePosixPath, frozenset[PurePosixPath]]:
    """Return every symbolic link below a folder, with the places in the folder that it leads to or
    through.

    The journal is left out, as are folders behind links and those that cannot be listed.
    """
    if isinstance(root, StorePath):
        return {}
    real = os.path.realpath(root)
    found: dict[PurePosixPath, frozenset[PurePosixPath]] = {}
    for current, folders, files in os.walk(root):
        if JOURNAL in folders:
            folders.remove(JOURNAL)
        for name in (*folders, *files):
            full = os.path.join(current, name)
            if os.path.islink(full):
                path = PurePosixPath(os.path.relpath(full, root))
                found[path] = frozenset(_inside(real, _places(full)))
    return found


def _inside(real: str, places: Iterator[str]) -> Iterator[PurePosixPath]:
    for place in places:
        if place.startswith(real.rstrip("/") + "/"):
            yield PurePosixPath(os.path.relpath(place, real))


def _places(link: str) -> Iterator[str]:
    """Yield the place of each further link on the way, and the end of it."""
    here = link
    for _ in range(_MAX_HOPS):
        try:
            target = os.path.join(os.path.dirname(here), os.readlink(here)).rstrip("/")
        except OSError:
            return  # not a link: the end of the way, or a missing file
        folder, name = os.path.split(target)
        is_step = name in ("", ".", "..")
        here = os.path.realpath(target) if is_step else os.path.join(os.path.realpath(folder), name)
        yield here
