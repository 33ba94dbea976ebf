"""The receipt of a repair: its plan, what became of it, and how both read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import ClassVar

from ckptfix.checkpoint.filenames import FileName, FolderName, Role, parse_file_name, parse_folder_name
from ckptfix.checkpoint.keys import fitting
from ckptfix.operations.check import CheckReport, status_of, with_below
from ckptfix.operations.findings import Finding, NestedPrefix, finding_lines, salvage_lines
from ckptfix.operations.steps import DropEntry, Renumber, RewriteNames, Safety, Step, Unplanned
from ckptfix.reports import Serialized
from ckptfix.storage.paths import command
from ckptfix.wording import Line, Printable, count_of, few, line, unchecked_line


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Receipt(Printable, Serialized):
    """What a repair did.

    ``found`` are the findings before it, ``left`` those after it (in a dry run: what it would not touch is not
    told apart, so all). ``transaction`` is the number that ``undo`` takes back, None when nothing was changed.
    ``recovered``: an interrupted earlier run was rolled back first. ``below``: what ``check`` finds in the sub-folders
    that hold models of the checkpoint, such as ``unet``; each has a repair of its own.
    """

    json_keys: ClassVar = (
        "path status dry_run output recovered transaction found steps unplanned left=_left_now "
        "not_checked=_unchecked below? advice"
    )

    path: Path
    found: tuple[Finding, ...]
    steps: tuple[Step, ...]
    unplanned: tuple[Unplanned, ...]
    left: tuple[Finding, ...]
    not_checked: tuple[str, ...]
    transaction: int | None = None
    recovered: bool = False
    dry_run: bool = False
    output: Path | None = None
    below: tuple[CheckReport, ...] = ()

    @property
    def status(self) -> int:
        """Exit status: 0 when no error or warning is left and all that was asked for was done, else 1."""
        is_below = any(status_of(report.all_findings) for report in self.below)
        return int(status_of(self.left) or bool(self.unplanned) or is_below)

    @property
    def where(self) -> Path:
        """The checkpoint that was looked at last: the copy, once it is written."""
        return self.path if self.dry_run else self.output or self.path

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do before the script resumes, in words; empty where no entry was dropped."""
        return _before_resuming(self.steps, self.found)

    def lines(self) -> Iterator[Line]:
        """Yield the plan, what was done, what is left, and how to undo it."""
        yield from plan_lines(self.path, self.steps, self.unplanned)
        yield from self.outcome_lines()

    def outcome_lines(self) -> Iterator[Line]:
        """Yield what became of the plan: what was done, what is left, and how to undo it."""
        if self.recovered:
            yield line("an interrupted earlier run was rolled back first")
        if self.dry_run:
            yield line("dry run: nothing was changed")
        elif self.steps:
            where = self.output or self.path
            yield line(f"done and verified: {count_of(len(self.steps), 'step')} in {where}", colour="green")
        elif self.output is not None:
            yield line(f"an unchanged copy is in {self.output}")
        yield from finding_lines(self.left, str(self.where))
        yield from salvage_lines(self.left, str(self.path))
        for report in self.below:
            if report.status:
                yield from report.verdict_lines(is_below=True)
        if self.transaction is not None:
            yield line(f"to undo: {command('undo', self.path)}")
        yield from (line(words, colour="yellow") for words in self.advice)
        yield from map(unchecked_line, self._unchecked())

    def _left_now(self) -> list[dict[str, object]]:
        """Return what is left, with commands for the folder in which it is."""
        return [finding.as_json(str(self.output or self.path)) for finding in self.left]

    def _unchecked(self) -> tuple[str, ...]:
        return tuple(with_below(self.not_checked, self.where, self.below))


def plan_lines(path: Path | str, steps: tuple[Step, ...], stays: tuple[Unplanned, ...]) -> Iterator[Line]:
    """Yield what a repair of ``path`` will do, and what stays as it is, with the reason."""
    yield line(f"plan for {path}:" if steps else f"nothing that a repair would change in {path}", bold=True)
    for (_, codes, safety), group in groupby(steps, key=_kind):
        asked = " (asked for)" if safety is Safety.LOSSY else ""
        yield from few([f"  {step}  [{', '.join(codes)}]{asked}" for step in group], "steps like these")
    for _, same in groupby(stays, key=lambda stay: (stay.code, stay.reason)):
        yield from few([f"  not done: {stay}" for stay in same], "files that stay", colour="yellow")


def _kind(step: Step) -> tuple[type, tuple[str, ...], Safety]:
    return type(step.action), step.fixes, step.safety


def _before_resuming(steps: Sequence[Step], found: Sequence[Finding]) -> tuple[str, ...]:
    """Return what becomes of the script that registered an object twice, and what to do first."""
    last: dict[Role, FileName | FolderName] = {}
    dropped: set[Role] = set()
    for action in (step.action for step in steps):
        if not isinstance(action, DropEntry | Renumber):
            continue
        path = action.path if isinstance(action, DropEntry) else action.source
        name = parse_file_name(path.name) or parse_folder_name(path.name)
        if name is not None:
            # Later entries move down, so the highest number is the one that is gone.
            last[name.role] = max(last.get(name.role, name), name, key=lambda one: one.index)
            if isinstance(action, DropEntry):
                dropped.add(name.role)
    names = " and ".join(_looked_for(last[role]) for role in Role if role in dropped)
    if names:
        cause = "passed an object to prepare() twice"
        failure = f"looks for {names}, which a repaired folder does not hold, and load_state fails"
    else:
        return _before_loading(steps, found)
    return (
        f"the script {cause}: unchanged, it {failure}",
        "before you resume, prepare each object once, or start the script with: ckptfix run SCRIPT",
    )


def _before_loading(steps: Sequence[Step], found: Sequence[Finding]) -> tuple[str, ...]:
    """Return which script reads the keys that a repair took nested wrappers from, and when that was wrong."""
    targets = {
        key_map.insert
        for step in steps
        if NestedPrefix.code in step.fixes and isinstance(step.action, RewriteNames)
        for key_map in step.action.maps.values()
    }
    if not targets:
        return ()
    assumed = any(isinstance(one, NestedPrefix) and one.assumed for one in found)
    wrong = "; if a module of the model is itself called 'module', undo this repair" if assumed else ""
    return (
        f"the keys now fit {' or '.join(map(fitting, sorted(targets)))}; the script wrapped the model twice: "
        f"unchanged, it looks for the old keys, and loading fails{wrong}",
        "before you resume, wrap the model only so, or start the script with: ckptfix run SCRIPT",
    )


def _looked_for(name: FileName | FolderName) -> str:
    """Return the file that accelerate misses: of a model the last of the names that it tries."""
    if isinstance(name, FileName) and name.suffix == ".safetensors":
        return f"pytorch_model_{name.index}.bin"
    return str(name)
