"""``repair``: plan, show, journal, act, prove, commit; and the receipt of what was done."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import ClassVar

from ckptfix.checkpoint.filenames import FileName, FolderName, Role, parse_file_name, parse_folder_name
from ckptfix.checkpoint.keys import fitting
from ckptfix.checkpoint.pairing import Progress
from ckptfix.checkpoint.scan import fingerprint, scan_folder
from ckptfix.diagnosis.check import (
    CheckReport,
    interrupted,
    interrupted_inside,
    models_below,
    status_of,
    with_below,
)
from ckptfix.diagnosis.diagnose import Diagnosis, diagnose
from ckptfix.diagnosis.findings.base import Finding, finding_lines, salvage_lines
from ckptfix.diagnosis.findings.duplicates import IdenticalModels, IdenticalStates, NestedPrefix
from ckptfix.diagnosis.output import check_output, copy_checkpoint
from ckptfix.diagnosis.policy import Policy
from ckptfix.diagnosis.target import Target, ensure_checkpoint, find_target
from ckptfix.errors import ChangedError, OperationError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.repairs.editing import Compiled, compile_plan, free_space, space_needed
from ckptfix.repairs.manifest_edits import manifest_edits
from ckptfix.repairs.plan import Plan, make_plan
from ckptfix.repairs.proof import prove_repair
from ckptfix.repairs.steps import DropEntry, Renumber, RewriteNames, Safety, Step, Unplanned
from ckptfix.reports import Serialized
from ckptfix.storage.copying import supports_reflink
from ckptfix.storage.edits import Edit
from ckptfix.storage.journal import commit, recover
from ckptfix.storage.lock import folder_lock
from ckptfix.storage.paths import MANIFEST, command
from ckptfix.storage.transactions import transactions
from ckptfix.wording import Line, Printable, count_of, few, human_size, line, unchecked_line

# The receipt of a repair: its plan, what became of it, and how both read.


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


# ``repair``: plan, show, journal, act, prove, commit. The folder is the old one or the new one, never
# between.

OnPlan = Callable[[tuple[Step, ...], tuple[Unplanned, ...]], None]
"""Called with the steps and with what stays, before anything is touched."""


def repair(
    path: str | os.PathLike[str],
    *,
    policy: Policy | None = None,
    dry_run: bool = False,
    output: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    on_plan: OnPlan | None = None,
) -> Receipt:
    """Repair a checkpoint folder or file in place, or write a repaired copy to ``output``.

    Every byte of what is dropped is compared first. Changes are journaled in ``.ckptfix/`` inside the folder;
    ``undo`` takes them back. ``progress`` is called with byte counts, ``on_plan`` before anything is touched.

    Raises UsageError for a path or a policy that makes no sense, OperationError (LockedError, ChangedError,
    JournalError, RolledBackError) when it could not finish: the folder is then as it was. OSError when the folder
    cannot be read.
    """
    target = find_target(path)
    policy = policy or Policy()
    pending = interrupted(target)
    if inside := interrupted_inside(target):
        raise OperationError(f"{target.path}: {inside[0]}; {inside[0].advice_at(str(target.path))}")
    if output is not None:
        if pending:
            raise OperationError(f"{target.path}: {pending[0]}; {pending[0].advice}")
        return _repair_copy(target, Path(output), policy, dry_run, progress, on_plan)
    diagnosis, plan = _plan(target, policy, progress)
    if dry_run:
        return _dry_run(target, diagnosis, plan, policy, pending, on_plan)
    if plan.is_empty and not transactions(target.root):
        return _nothing_done(target, diagnosis, plan, policy, on_plan)
    with folder_lock(target.root):
        recovered = recover(target.root)
        if recovered is not None and recovered.rolled_back is not None:
            diagnosis, plan = _plan(target, policy, progress)
        shares_blocks = not plan.is_empty and supports_reflink(target.root)
        compiled = compile_plan(plan, new_files=policy.atomic or shares_blocks)
        edits = (*compiled.edits, *manifest_edits(plan.folder, compiled.steps, compiled.edits))
        _check_space(target.root, edits, shares_blocks)
        receipt = _apply(target, diagnosis, plan, compiled, edits, policy, progress, on_plan)
    if recovered is not None and recovered.rolled_back is not None:
        receipt = _replace(receipt, recovered=True)
    return receipt


def _plan(target: Target, policy: Policy, progress: Progress | None) -> tuple[Diagnosis, Plan]:
    with paused_gc():
        folder = scan_folder(target.root, target.only)
        if not transactions(target.root):
            ensure_checkpoint(folder)
        diagnosis = diagnose(folder, prove=True, drops=policy.drops, progress=progress)
        if diagnosis.unfinished:
            raise OperationError(
                f"{target.path}: nothing was changed: a repair reads every file first, and "
                f"{count_of(len(diagnosis.unfinished), 'file')} may not be read: {diagnosis.unfinished[0]}"
            )
        return diagnosis, make_plan(diagnosis, policy)


def _dry_run(
    target: Target,
    diagnosis: Diagnosis,
    plan: Plan,
    policy: Policy,
    pending: tuple[Finding, ...],
    on_plan: OnPlan | None,
) -> Receipt:
    compiled = compile_plan(plan, new_files=policy.atomic)
    stays = (*plan.unplanned, *compiled.refused)
    if on_plan is not None:
        on_plan(tuple(compiled.steps), stays)
    return Receipt(
        path=target.path,
        found=pending + diagnosis.findings,
        steps=tuple(compiled.steps),
        unplanned=stays,
        left=pending + diagnosis.findings,
        not_checked=diagnosis.not_checked,
        dry_run=True,
        below=tuple(models_below(diagnosis)),
    )


def _nothing_done(
    target: Target, diagnosis: Diagnosis, plan: Plan, policy: Policy, on_plan: OnPlan | None
) -> Receipt:
    if on_plan is not None:
        on_plan((), plan.unplanned)
    return Receipt(
        path=target.path,
        found=diagnosis.findings,
        steps=(),
        unplanned=plan.unplanned,
        left=_unanswered(diagnosis, policy),
        not_checked=diagnosis.not_checked,
        below=tuple(models_below(diagnosis)),
    )


def _apply(
    target: Target,
    diagnosis: Diagnosis,
    plan: Plan,
    compiled: Compiled,
    edits: tuple[Edit, ...],
    policy: Policy,
    progress: Progress | None,
    on_plan: OnPlan | None,
) -> Receipt:
    """Do the edits: those of the steps, and what the manifest needs to follow them."""
    stays = (*plan.unplanned, *compiled.refused)
    if on_plan is not None:
        on_plan(tuple(compiled.steps), stays)
    after = diagnosis
    number: int | None = None
    if compiled.edits:
        _check_unchanged(target.root, compiled)

        def verify() -> None:
            nonlocal after
            after = prove_repair(
                plan, tuple(compiled.steps), tuple(compiled.edits), stays, policy, diagnosis.verdicts
            )

        number = commit(
            target.root,
            edits,
            target=target.only or "",
            summary=[str(step) for step in compiled.steps],
            verify=verify,
            # Digests of the repaired files must go before those files do.
            watched=(PurePosixPath(MANIFEST),),
            digests=diagnosis.digests,
            progress=progress,
        )
    return Receipt(
        path=target.path,
        found=diagnosis.findings,
        steps=tuple(compiled.steps),
        unplanned=stays,
        left=_unanswered(after, policy),
        not_checked=after.not_checked,
        transaction=number,
        below=tuple(models_below(after)),
    )


def _unanswered(diagnosis: Diagnosis, policy: Policy) -> tuple[Finding, ...]:
    """Return the findings without those about equal entries of which the user said that they belong there."""
    answered = {
        entry.path
        for role, count in policy.keep.items()
        for entries in diagnosis.entries(role)
        if len(entries) == count
        for entry in entries
    }
    return tuple(
        finding
        for finding in diagnosis.findings
        if not (isinstance(finding, IdenticalModels | IdenticalStates) and finding.path in answered)
    )


def _check_unchanged(root: Path, compiled: Compiled) -> None:
    """Re-check every file that a step relies on: a job may have saved into the folder since the scan."""
    for step in compiled.steps:
        for path, was in step.before.items():
            try:
                now = fingerprint(root / path)
            except OSError as error:
                raise ChangedError(
                    f"{root / path}: {error.strerror} since it was read; nothing was changed"
                ) from None
            if now != was:
                raise ChangedError(
                    f"{root / path} changed while it was read: {was.size} bytes then, {now.size} now; nothing was "
                    f"changed; run ckptfix again when nothing writes to the folder"
                )


def _check_space(root: Path, edits: Sequence[Edit], shares_blocks: bool) -> None:
    need, free = space_needed(edits, shares_blocks=shares_blocks), free_space(root)
    if edits and need > free:
        raise OperationError(
            f"{root}: the repair needs {human_size(need)} of free space, {human_size(free)} are free on this disk; "
            f"nothing was changed; free some, then run it again"
        )


def _repair_copy(
    target: Target,
    output: Path,
    policy: Policy,
    dry_run: bool,
    progress: Progress | None,
    on_plan: OnPlan | None,
) -> Receipt:
    check_output(target, output)  # before every byte of a large model is compared
    diagnosis, plan = _plan(target, policy, progress)
    if dry_run:
        return _replace(_dry_run(target, diagnosis, plan, policy, (), on_plan), output=output)
    if on_plan is not None:
        compiled = compile_plan(plan, new_files=False)
        on_plan(tuple(compiled.steps), (*plan.unplanned, *compiled.refused))
    with copy_checkpoint(target, output, progress) as copy:
        receipt = repair(copy.path, policy=policy)
    below = tuple(_moved(report, copy.path, output) for report in receipt.below)
    return _replace(
        receipt, path=target.path, found=diagnosis.findings, transaction=None, output=output, below=below
    )


def _moved(report: CheckReport, source: Path, output: Path) -> CheckReport:
    """Return the report of a model below with the name that its folder has in the copy."""
    below = tuple(_moved(one, source, output) for one in report.below)
    return replace(report, path=output / report.path.relative_to(source), below=below)


def _replace(receipt: Receipt, **changes: object) -> Receipt:
    return replace(receipt, **changes)  # type: ignore[arg-type]
