"""Receipt of a repair: its plan, the outcome, and what to do before the script resumes, in words."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import PurePosixPath
from typing import ClassVar

from msgspec import Struct

from ckptfix.checkpoint.filenames import FileName, model_file, parse_file_name
from ckptfix.checkpoint.folder_names import FolderName, parse_folder_name
from ckptfix.checkpoint.keys import fitting
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.check import with_below
from ckptfix.diagnosis.check_report import CheckReport, status_of
from ckptfix.diagnosis.findings.base import Finding, finding_lines, salvage_lines
from ckptfix.diagnosis.findings.config_faults import DeadWeights
from ckptfix.diagnosis.findings.duplicates import (
    DoubledModel,
    NestedPrefix,
)
from ckptfix.diagnosis.findings.load_faults import DeadAdapter
from ckptfix.diagnosis.findings.stored_twice import StoredTwice
from ckptfix.repairs.steps import (
    DropEntry,
    Renumber,
    RewriteNames,
    Safety,
    Step,
    Unplanned,
)
from ckptfix.reports import Serialized
from ckptfix.storage.files import (
    AnyPath,
)
from ckptfix.storage.paths import command, shell_path
from ckptfix.wording import (
    Line,
    Printable,
    count_of,
    few,
    line,
    series,
    unchecked_lines,
)


class RepairReceipt(Printable, Serialized, Struct, frozen=True, kw_only=True):
    """Receipt of a repair: its plan, and the outcome.

    ``found``: the findings before it; ``left``: those after it, in a dry run all of them.
    ``transaction``: the number that ``undo`` undoes, None when nothing was changed. ``recovered``:
    an interrupted run was rolled back first, or in a store ``finished``. ``digest``: of a dry run
    that of its plan, "" where an interrupted run is to be rolled back first. ``below``: the reports
    of the sub-folders that hold models of the checkpoint, such as ``unet``; each has a repair of
    its own.
    """

    json_keys: ClassVar = (
        "path status dry_run digest? output recovered transaction found steps unplanned "
        "left=_left_now not_checked=_unchecked below? advice"
    )

    path: AnyPath
    found: tuple[Finding, ...]
    steps: tuple[Step, ...]
    unplanned: tuple[Unplanned, ...]
    left: tuple[Finding, ...]
    not_checked: tuple[str, ...]
    transaction: int | None = None
    recovered: bool = False
    finished: bool = False
    dry_run: bool = False
    digest: str = ""
    output: AnyPath | str | None = None
    below: tuple[CheckReport, ...] = ()

    @property
    def status(self) -> int:
        """Exit status: 0 when no error or warning is left and every requested repair was done, else
        1.
        """
        is_below = any(status_of(report.all_findings) for report in self.below)
        return int(status_of(self.left) or bool(self.unplanned) or is_below)

    @property
    def where(self) -> AnyPath | str:
        """The checkpoint that was checked last: the copy, once it is written."""
        return self.path if self.dry_run else self.output or self.path

    @property
    def advice(self) -> tuple[str, ...]:
        """The steps before the script resumes, and when the repair is wrong, in words; mostly
        empty.
        """
        advice = _before_resuming(self.steps, self.found, self.left)
        fixed = {code for step in self.steps for code in step.fixes}
        if fixed & {DeadAdapter.code, DeadWeights.code}:
            advice = (
                *advice,
                (
                    "undo this repair if a script loads the file itself with "
                    "load_state_dict: that script needs the old keys, and strict=False hides "
                    "that they are missing"
                ),
            )
        # Before a repair the finding says so, and a repaired copy has nothing to undo.
        if self.transaction is not None and DoubledModel.code in fixed:
            return (
                *advice,
                (
                    "undo the repair if the script prepares an identical model on purpose (a loss "
                    "wrapper, an EMA)"
                ),
            )
        return advice

    def lines(self) -> Iterator[Line]:
        """Yield the plan, the outcome, the findings that are left, and the command to undo."""
        yield from plan_lines(self.path, self.steps, self.unplanned)
        yield from self.outcome_lines()

    def outcome_lines(self, *, is_verbose: bool = False) -> Iterator[Line]:
        """Yield the outcome, the findings that are left, and the command to undo.

        ``is_verbose``: every sentence about what was not checked.
        """
        if self.recovered:
            yield line(
                f"an interrupted earlier run was {'finished' if self.finished else 'rolled back'} "
                "first"
            )
        if self.dry_run:
            yield line("dry run: nothing was changed")
        elif self.steps:
            where = self.output or self.path
            yield line(
                f"done and verified: {count_of(len(self.steps), 'step')} in {where}",
                colour="green",
            )
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
        details = "" if is_verbose else f"ckptfix check -v {shell_path(self.where)}"
        yield from unchecked_lines(self._unchecked(), details=details)

    def _left_now(self) -> list[dict[str, object]]:
        """Return the findings that are left, with commands for their folder."""
        return [finding.as_json(str(self.output or self.path)) for finding in self.left]

    def _unchecked(self) -> tuple[str, ...]:
        # Of a copy in a store the sub-folders, which nothing changes, were checked at their source.
        where = self.path if isinstance(self.where, str) else self.where
        return tuple(with_below(self.not_checked, where, self.below))


Receipt = RepairReceipt
"""The name of ``RepairReceipt`` in ckptfix 0.4."""


def plan_lines(
    path: AnyPath | str, steps: tuple[Step, ...], stays: tuple[Unplanned, ...]
) -> Iterator[Line]:
    """Yield the steps of a repair of ``path``, and the findings that stay, with the reasons."""
    yield line(f"plan for {path}:" if steps else f"nothing to repair in {path}", bold=True)
    for (_, codes, safety), group in groupby(steps, key=_kind):
        asked = " (asked for)" if safety is Safety.LOSSY else ""
        yield from few(
            [f"  {step}  [{', '.join(codes)}]{asked}" for step in group], "steps like these"
        )
    for _, same in groupby(stays, key=lambda stay: (stay.code, stay.reason)):
        yield from few(
            [f"  not repaired: {stay}" for stay in same], "files like these", colour="yellow"
        )


def _kind(step: Step) -> tuple[type, tuple[str, ...], Safety]:
    return type(step.action), step.fixes, step.safety


_OF_A_SECOND_PREPARE = {"doubled-model", "doubled-states", "surplus-states"}


def _before_resuming(
    steps: Sequence[Step], found: Sequence[Finding], left: Sequence[Finding]
) -> tuple[str, ...]:
    """Return the advice for a script that registered an object twice: it fails until it is
    fixed.

    ``left``: the findings after the repair, which name files that are loaded instead of others.
    """
    last: dict[Role, FileName | FolderName] = {}
    dropped: dict[Role, set[int]] = {}
    moved: list[tuple[int, PurePosixPath]] = []
    for action in (step.action for step in steps):
        if not isinstance(action, DropEntry | Renumber):
            continue
        path = action.path if isinstance(action, DropEntry) else action.source
        name = parse_file_name(path.name) or parse_folder_name(path.name)
        if name is not None:
            last[name.role] = max(last.get(name.role, name), name, key=lambda one: one.index)
            if isinstance(action, DropEntry):
                dropped.setdefault(name.role, set()).add(name.index)
            elif name.role is Role.MODEL:
                moved.append((name.index, action.target))
    if not dropped:
        return _before_loading(steps, found)
    if moved and Role.MODEL in dropped:
        # Models are loaded first and in order, so that this comes before a missing file.
        path = min(moved)[1]
        twice = (one for one in left if isinstance(one, StoredTwice) and one.path == path)
        failure = f"finds the wrong model in {next((one.preferred for one in twice), path)}"
    else:
        # Later entries move down, so that the highest numbers are missing. load_state misses the
        # first of these.
        missing = [
            _looked_for(last[role].at(last[role].index + 1 - len(dropped[role])))
            for role in Role
            if role in dropped
        ]
        failure = f"looks for {series(missing)}, which a repaired folder does not have"
    drops = [step for step in steps if isinstance(step.action, DropEntry)]
    if _OF_A_SECOND_PREPARE.isdisjoint(code for step in drops for code in step.fixes):
        # The user asked for it: an average, perhaps, that nobody prepared twice.
        return (
            f"a script that still prepares the deleted objects {failure}, and load_state fails",
        )
    return (
        (
            f"the script passed an object to prepare() twice: until that is fixed, it {failure}, "
            "and load_state fails"
        ),
        (
            "before you resume, prepare each object once, or start the script with: ckptfix run "
            "SCRIPT"
        ),
    )


def _before_loading(steps: Sequence[Step], found: Sequence[Finding]) -> tuple[str, ...]:
    """Return the advice after a repair removed nested wrappers: the models that load the keys, and
    when to undo.
    """
    targets = {
        key_map.insert
        for step in steps
        if NestedPrefix.code in step.fixes and isinstance(step.action, RewriteNames)
        for key_map in step.action.maps.values()
    }
    if not targets:
        return ()
    assumed = any(isinstance(one, NestedPrefix) and one.assumed for one in found)
    wrong = (
        "; if a module of the model is itself named 'module', undo this repair" if assumed else ""
    )
    return (
        (
            f"the keys now match {' or '.join(map(fitting, sorted(targets)))}; the script "
            "wrapped the model twice: until that is fixed, it looks for the old keys, and "
            f"loading fails{wrong}"
        ),
        (
            "before you resume, make the model of the script match these keys, or start the "
            "script with: ckptfix run SCRIPT"
        ),
    )


def _looked_for(name: FileName | FolderName) -> str:
    """Return the file that accelerate reports as missing: of a model the last of the names that it
    tries.
    """
    if isinstance(name, FileName) and name.suffix == ".safetensors":
        return str(model_file(".bin", name.index))
    return str(name)
