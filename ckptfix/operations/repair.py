"""``repair``: plan, show, journal, act, prove, commit. The folder is the old one or the new one, never between."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.pairing import Progress
from ckptfix.checkpoint.scan import fingerprint, scan_folder
from ckptfix.errors import ChangedError, OperationError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.operations.check import CheckReport, interrupted, interrupted_inside, models_below
from ckptfix.operations.diagnose import Diagnosis, diagnose
from ckptfix.operations.editing import Compiled, compile_plan, free_space, space_needed
from ckptfix.operations.findings import Finding, IdenticalModels, IdenticalStates
from ckptfix.operations.output import check_output, copy_checkpoint
from ckptfix.operations.plan import Plan, make_plan
from ckptfix.operations.policy import Policy
from ckptfix.operations.proof import prove_repair
from ckptfix.operations.receipt import Receipt
from ckptfix.operations.sealing.following import manifest_edits
from ckptfix.operations.steps import Step, Unplanned
from ckptfix.operations.target import Target, ensure_checkpoint, find_target
from ckptfix.storage.copying import supports_reflink
from ckptfix.storage.edits import Edit
from ckptfix.storage.journal import commit, recover, transactions
from ckptfix.storage.lock import folder_lock
from ckptfix.storage.paths import MANIFEST
from ckptfix.wording import count_of, human_size

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


__all__ = ["OnPlan", "Receipt", "repair"]
