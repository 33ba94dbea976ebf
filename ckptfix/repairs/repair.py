"""Repair of a checkpoint, from the top to the bytes.

1. ``repair`` plans (``plan_repair``) and executes (``RepairPlan.execute``).
2. ``plan_repair`` first takes an interrupted run back, or in a store to its end
   (``Backend.recover``). Then ``_plan`` scans, diagnoses, chooses steps, and compiles them into
   edits of files; ``_plan`` changes nothing.
3. ``execute`` locks the checkpoint, recovers again, and hands the edits to
   ``storage.transactions.commit`` with a proof: the checkpoint is read once more as it will be.
4. ``commit`` makes the edits, calls the proof, and commits. A run that is killed leaves the old
   checkpoint, the new one, or a mixture that is known as such and that the next run ends:
   ``storage.transactions`` has the states, and who goes on from each.
5. The lock of a folder dies with its process. That of a store stays, and ``--break-lock`` takes it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from ckptfix.checkpoint.downloads import half_downloads
from ckptfix.checkpoint.folder import scan_folder
from ckptfix.checkpoint.latest import cut_upload
from ckptfix.checkpoint.neighbours import Neighbours
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.check import (
    interrupted,
    interrupted_inside,
    judge_surroundings,
    models_below,
    resume_problem,
)
from ckptfix.diagnosis.check_report import GENERIC, CheckReport
from ckptfix.diagnosis.completeness import judge_bare
from ckptfix.diagnosis.diagnose import diagnose
from ckptfix.diagnosis.file_damage import Reading
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.duplicates import (
    IdenticalModels,
    IdenticalStates,
)
from ckptfix.diagnosis.output import check_output, copy_checkpoint
from ckptfix.diagnosis.policy import Policy
from ckptfix.diagnosis.siblings import missing_here
from ckptfix.diagnosis.target import Target, ensure_checkpoint, find_target
from ckptfix.diagnosis.unresumable import STATES_ALONE
from ckptfix.errors import ChangedError, FileChangedError, OperationError, UsageError
from ckptfix.formats.dcp_metadata import METADATA_NAME
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.repairs.manifest_edits import manifest_edits
from ckptfix.repairs.plan import make_plan
from ckptfix.repairs.proof import prove_repair
from ckptfix.repairs.receipt import RepairReceipt, plan_lines
from ckptfix.repairs.steps import (
    Draft,
    RewriteNames,
    Step,
    StepAction,
    Unplanned,
    WriteIndex,
)
from ckptfix.repairs.steps_to_edits import Compiled, compile_plan, free_space, space_needed
from ckptfix.reports import plain
from ckptfix.storage.backends import carriage, ensure_in_place, locked
from ckptfix.storage.copying import supports_reflink
from ckptfix.storage.edits import Edit, edited_paths
from ckptfix.storage.files import (
    AnyPath,
    Openable,
    StorePath,
    etag_of,
    is_dir,
    is_file,
    is_symlink,
    is_url,
    lexists,
    local_path,
    on_disk,
    relative,
    store_of,
)
from ckptfix.storage.journal import transactions
from ckptfix.storage.opened import open_files, takes_urls
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import MANIFEST, command, shell_path
from ckptfix.storage.reading import ensure_unchanged, unchanged
from ckptfix.storage.transactions import Backend, TransactionPlan, commit
from ckptfix.wording import (
    Line,
    Printable,
    count_of,
    human_size,
    line,
)

_DIGITS = 12
"""Hex digits of a plan's digest: enough against chance, and short enough to read out."""


@takes_urls("path")
def repair(
    path: Openable,
    *,
    policy: Policy | None = None,
    dry_run: bool = False,
    output: str | os.PathLike[str] | None = None,
    transfer: bool = False,
    break_lock: bool = False,
    progress: Progress | None = None,
) -> RepairReceipt:
    """Plan a repair and execute it: ``plan_repair``, then ``RepairPlan.execute``, with the errors
    of both.

    ``dry_run``: change nothing, and return what would be done. ``transfer`` and ``break_lock``: as
    of ``execute``.
    """
    plan = plan_repair(
        path, policy, output=output, recover=not dry_run, break_lock=break_lock, progress=progress
    )
    if dry_run:
        return plan.preview()
    return plan.execute(transfer=transfer, break_lock=break_lock, progress=progress)


def plan_repair(
    path: Openable,
    policy: Policy | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    recover: bool = False,
    break_lock: bool = False,
    progress: Progress | None = None,
) -> "RepairPlan":
    """Plan the repair of a checkpoint folder or file in place, or of a copy that is written to
    ``output``.

    Every byte of what a step deletes is compared first; ``progress`` is called with byte counts.
    ``recover``: go on with an interrupted earlier run first, which is the only change; without it,
    ``execute`` does that and plans again. ``break_lock``: as of ``execute``.

    Raises UsageError for an invalid path or policy, OperationError for a folder that cannot be
    repaired now, OSError when it cannot be read.
    """
    with ExitStack() as opened:
        target = find_target(opened.enter_context(open_files(path)))
        plan = _planned(
            target,
            policy or Policy(),
            local_path(output),
            progress,
            recover=recover,
            break_lock=break_lock,
        )
        return replace(plan, opened=opened.pop_all())


def _planned(
    target: Target,
    policy: Policy,
    output: str | os.PathLike[str] | None,
    progress: Progress | None,
    *,
    recover: bool,
    break_lock: bool,
) -> "RepairPlan":
    """Plan where no earlier run is in the way, after it was ended if ``recover`` says so."""
    ensure_in_place(target.root, "repair")
    if inside := interrupted_inside(target):
        raise OperationError(f"{target.path}: {inside[0]}; {inside[0].advice_at(str(target.path))}")
    if output is not None:
        if pending := interrupted(target):
            raise OperationError(
                f"{target.path}: {pending[0]}; {pending[0].advice_at(str(target.path))}"
            )
        copy = output if isinstance(output, str) and is_url(output) else Path(output)
        _check_copy(target, copy)  # before every byte of a large model is compared
        return _plan(target, policy, copy, progress)
    if recover and interrupted(target):
        with locked(target.root, "repair", break_lock=break_lock) as backend:
            recovered = backend.recover()
            return replace(
                _plan(target, policy, None, progress),
                recovered=recovered is not None and recovered.has_changed,
                finished=recovered is not None and recovered.finished is not None,
                has_locked=True,
            )
    return _plan(target, policy, None, progress)


class RepairPlan(Printable, Struct, frozen=True, kw_only=True):
    """Steps that repair a checkpoint, from ``plan_repair``. Nothing is changed before ``execute``.

    ``missing``: the findings about files that the checkpoints next to it have. ``draft``: the state
    that was planned for, with the steps. ``shares_blocks``: new files share the blocks of the old
    ones. ``pending``: the findings about an interrupted run, which ``execute`` rolls back first, or
    in a store finishes. ``recovered``: one was rolled back before planning, or in a store
    ``finished``. ``has_locked``: that was under the lock. ``output``: the folder for a repaired
    copy. ``carriage``: of a checkpoint in a store the bytes to travel, in words. ``opened``: closed
    by ``execute``, where the plan was made for a URL.
    """

    target: Target
    policy: Policy
    output: Path | str | None
    missing: tuple[Finding, ...]
    draft: Draft
    compiled: Compiled
    shares_blocks: bool
    pending: tuple[Finding, ...]
    recovered: bool
    finished: bool = False
    has_locked: bool = False
    carriage: str | None = None
    opened: ExitStack | None = None

    @property
    def path(self) -> AnyPath:
        """The checkpoint, or the file, that was planned for."""
        return self.target.path

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps in their order."""
        return tuple(self.compiled.steps)

    @property
    def unplanned(self) -> tuple[Unplanned, ...]:
        """The repairable findings that stay, with the reasons."""
        return (*self.draft.unplanned, *self.compiled.refused)

    @property
    def digest(self) -> str:
        """Digest of the files that the plan depends on, the policy, the output, the steps in full,
        and the findings that stay.

        A plan with the same digest does the same to the same files. A file counts by its size and
        modification time, an object by its size and ETag.
        """
        root = self.target.root
        # Without inodes, which change when a file system is mounted again, and without messages,
        # which change from release to release.
        content = {
            "files": {
                str(path): (status.size, etag_of(root / path) or status.mtime_ns)
                for path, status in self.draft.case.scanned.items()
            },
            "policy": self.policy,
            "output": self.output,
            "steps": [(step.kind, step.action, step.fixes, step.safety) for step in self.steps],
            "unplanned": [(finding.code, finding.paths) for finding in self.unplanned],
        }
        text = json.dumps(_in_full(content), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]

    def lines(self) -> Iterator[Line]:
        """Yield the steps, and the findings that stay, with the reasons."""
        yield from plan_lines(self.path, self.steps, self.unplanned)
        if self.carriage is not None:
            yield line(f"between this machine and the store: {self.carriage}")
            if self.output is None:
                copy = f"{command('repair', self.path)} --output URL_OF_A_COPY"
                yield line(
                    "objects are renamed one by one; if the checkpoint is in use, repair a copy: "
                    f"{copy}"
                )

    def preview(self) -> RepairReceipt:
        """Return the receipt of a dry run."""
        receipt = self._receipt(self.draft.case)
        found = self.pending + receipt.found
        # After the rollback of an interrupted run, the plan is a different one.
        digest = "" if self.pending else self.digest
        return replace(
            receipt, found=found, left=found, dry_run=True, digest=digest, output=self.output
        )

    def execute(
        self, *, transfer: bool = False, break_lock: bool = False, progress: Progress | None = None
    ) -> RepairReceipt:
        """Do the steps, prove the result, and commit.

        Changes are journaled in ``.ckptfix/`` inside the folder; ``undo`` undoes them. In a store
        that cannot cut parts out of objects, ``transfer`` lets their bytes go through this machine;
        ``break_lock`` takes over the lock of a run that was killed. ``progress`` is called with
        byte counts.

        Raises ChangedError when a file changed since planning, other OperationErrors (LockedError,
        RolledBackError) when it could not finish: the folder is then as it was. After JournalError
        it may be partly changed, and the next run rolls back, or in a store finishes. The plan of a
        URL is executed once: UsageError after that.
        """
        if isinstance(root := self.target.root, StorePath) and root.files.is_closed:
            raise UsageError(
                f"{self.path}: this plan was already executed, so the objects may have changed; "
                "next: call plan_repair again"
            )
        with self.opened or nullcontext():
            if isinstance(self.output, str):
                return self._execute_in_store(self.output, progress, transfer=transfer)
            if self.output is not None:
                return self._execute_on_copy(self.output, progress)
            if not self.draft.steps and not transactions(root):
                return self._receipt(self.draft.case)
            # The lock of a killed run was broken before the plan: one that is there now is not it.
            with locked(root, "repair", break_lock=break_lock and not self.has_locked) as backend:
                recovered = backend.recover()
                if recovered is None or not recovered.has_changed:
                    return self._apply(backend, progress, transfer=transfer)
                again = _plan(self.target, self.policy, None, progress)
                receipt = again._apply(backend, progress, transfer=transfer)
                return replace(receipt, recovered=True, finished=recovered.finished is not None)

    def _execute_on_copy(self, output: Path, progress: Progress | None) -> RepairReceipt:
        with _undisturbed(self.path):
            ensure_unchanged(self.target.root, self.draft.case.scanned)
        with copy_checkpoint(self.target, output, progress) as copy:
            # The neighbours of the source are evidence, not those of the place where the copy is
            # made.
            receipt = _plan(
                copy, self.policy, None, None, neighbours=self.draft.case.neighbours
            ).execute()
        below = tuple(_moved(report, copy.path, output) for report in receipt.below)
        return replace(
            receipt,
            path=self.path,
            found=self._receipt(self.draft.case).found,
            transaction=None,
            output=output,
            below=below,
        )

    def _execute_in_store(
        self, output: str, progress: Progress | None, *, transfer: bool
    ) -> RepairReceipt:
        """Let the store write a repaired copy below another prefix."""
        from ckptfix.storage.object_copies import copy_repaired

        root = self.target.root
        assert isinstance(root, StorePath)
        _ensure_uploaded(self.target)
        edits = (*self.compiled.edits, *self._manifest_edits(self.compiled))
        after = self.draft.case

        def verify() -> None:
            nonlocal after
            after = self._proven(self.compiled)

        copy_repaired(
            root.files, output, edits,
            indexes=self._indexes, verify=verify, transfer=transfer, progress=progress,
        )  # fmt: skip
        return replace(self._receipt(after), output=output)

    @property
    def _indexes(self) -> tuple[PurePosixPath, ...]:
        """The files that list others and are changed by a step."""
        return tuple(filter(None, (_listing(step.action) for step in self.steps)))

    def _manifest_edits(self, compiled: Compiled) -> Sequence[Edit]:
        return manifest_edits(self.draft.folder, compiled.steps, compiled.edits)

    def _proven(self, compiled: Compiled) -> Case:
        return prove_repair(self.draft, self.steps, tuple(compiled.edits), self.unplanned)

    def _apply(
        self, backend: Backend, progress: Progress | None, *, transfer: bool
    ) -> RepairReceipt:
        """Do the edits of the steps and of the manifest."""
        root = self.target.root
        compiled = self.compiled
        if not compiled.edits:
            return self._receipt(self.draft.case)
        edits = (*compiled.edits, *self._manifest_edits(compiled))
        if isinstance(root, StorePath):
            _ensure_uploaded(self.target)
        else:
            _check_space(root, edits, self.shares_blocks)
        with _undisturbed(self.path):
            ensure_unchanged(root, self.draft.case.scanned)
        after = self.draft.case

        def prove() -> None:
            nonlocal after
            after = self._proven(compiled)

        plan = TransactionPlan(
            edits=edits,
            target=self.target.only or "",
            summary=[str(step) for step in self.steps],
            known=self.draft.case.scanned,
            # Digests of the repaired files must go before those files do.
            watched=(PurePosixPath(MANIFEST),),
            digests=self.draft.case.digests,
            indexes=self._indexes,
        )
        number = commit(backend, plan, prove, transfer=transfer, progress=progress)
        return replace(self._receipt(after), transaction=number)

    def _receipt(self, after: Case) -> RepairReceipt:
        # A repair drops the duplicates that the checkpoints next to it still have.
        missing = self.missing
        if after is not self.draft.case:
            missing = missing_here(self.target, after)
        below = tuple(models_below(after))
        halves = tuple(half_downloads(self.target.root)) if self.target.only is None else ()
        around = [
            finding
            for finding in judge_surroundings(self.target, after, below, halves)
            if isinstance(finding, Finding)
        ]
        return RepairReceipt(
            path=self.path,
            found=(*self.missing, *self.draft.case.findings, *around),
            steps=self.steps,
            unplanned=self.unplanned,
            left=(*missing, *_unanswered(after, self.policy), *around),
            not_checked=tuple(
                words for words in after.not_checked if not (missing and words == STATES_ALONE)
            ),
            recovered=self.recovered,
            finished=self.finished,
            below=below,
        )


def _plan(
    target: Target,
    policy: Policy,
    output: Path | str | None,
    progress: Progress | None,
    *,
    neighbours: Neighbours | None = None,
) -> "RepairPlan":
    with paused_gc(), _undisturbed(target.path):
        folder = scan_folder(target.root, target.only)
        has_journal = bool(transactions(target.root))
        bare = judge_bare(folder, resume_problem) if not has_journal else None
        if bare is not None and bare.unfinished:
            raise OperationError(f"{target.path}: nothing was changed: {bare.unfinished[0]}")
        if (bare is None or output is not None) and not has_journal:
            ensure_checkpoint(folder, "repair")
        case = diagnose(
            Case(
                folder,
                Reading(progress=progress),
                prove=True,
                drops=policy.drops,
                neighbours=neighbours,
            )
        )
        if case.unfinished:
            raise OperationError(
                f"{target.path}: nothing was changed: a repair must read every file first, but "
                f"ckptfix cannot read {count_of(len(case.unfinished), 'file')}: "
                f"{case.unfinished[0]}"
            )
        if bare is not None:
            case.findings[:0] = bare.beyond(case.findings)
            case.not_checked = [
                words for words in case.not_checked if not words.startswith(GENERIC)
            ]
        with unchanged(target.root, case.scanned):
            draft = make_plan(case, policy)
            # No object can be changed in place.
            in_store = store_of(target.root) is not None
            shares_blocks = (
                bool(draft.steps) and not in_store and supports_reflink(on_disk(target.root))
            )
            compiled = compile_plan(draft, new_files=policy.atomic or in_store or shares_blocks)
            _ensure_ordinary(target.root, compiled.edits)
        return RepairPlan(
            target=target,
            policy=policy,
            output=output,
            missing=missing_here(target, case) if bare is None else (),
            draft=draft,
            compiled=compiled,
            shares_blocks=shares_blocks,
            pending=interrupted(target),
            recovered=False,
            carriage=carriage(target.root, compiled.edits, is_copy=isinstance(output, str)),
        )


def _in_full(value: object) -> Any:
    """Return a value as JSON values, with every field of the structs in it."""
    if isinstance(value, Mapping):
        return {str(key): _in_full(item) for key, item in value.items()}
    if isinstance(value, Struct):
        return _in_full(asdict(value))
    if isinstance(value, tuple | list):
        return [_in_full(item) for item in value]
    return sorted(value) if isinstance(value, frozenset) else plain(value)


def _ensure_ordinary(root: AnyPath, edits: Sequence[Edit]) -> None:
    """Raise OperationError for a FIFO, a socket or a device that an edit moves: it has no bytes of
    its own to compare.
    """
    for path in (root / name for edit in edits for name in edited_paths(edit)):
        if lexists(path) and not (is_file(path) or is_dir(path) or is_symlink(path)):
            raise OperationError(
                f"{path}: not a regular file, so a repair cannot move it; nothing was changed; "
                f"next: rm {shell_path(path)}, and copy the file again from its source"
            )


def _ensure_uploaded(target: Target) -> None:
    """Raise UsageError for a checkpoint in a store whose upload has not ended.

    It may still be under way, and fail where a name is another one than it wrote. A copy would get
    a commit marker.
    """
    if (why := cut_upload(target.root)) is not None:
        raise UsageError(
            f"{target.path}: {why}; nothing was changed; next, if you still have the folder that "
            f"the save wrote: ckptfix upload FOLDER {shell_path(target.root)}, or, to recover "
            f"what is there: {command('salvage', target.root)} NEW_FOLDER"
        )


def _check_copy(target: Target, output: Path | str) -> None:
    """Raise UsageError when a repaired copy cannot be written to ``output``."""
    store = store_of(target.root)
    if isinstance(output, Path):
        if store is not None:
            raise UsageError(
                f"{output} is a local path, but a repair never downloads a URL; next: "
                "choose a prefix of the same bucket, or download the checkpoint first"
            )
        check_output(target, output)
    elif store is None:
        raise UsageError(
            f"{output} is a URL, but {target.path} is not; next: repair the checkpoint, then "
            "upload it"
        )
    elif target.only is not None:
        raise UsageError(
            f"{target.path} is a single object, but only a folder can be repaired into a copy; "
            "next: repair the object in place, or name its folder"
        )
    else:
        from ckptfix.storage.object_copies import check_free, places_of

        places_of(store.url, output)
        check_free(output)


def _listing(action: StepAction) -> PurePosixPath | None:
    """Return the file that an action writes and that lists other files, None for any other."""
    if isinstance(action, WriteIndex):
        return action.path
    return (
        action.path
        if isinstance(action, RewriteNames) and action.path.name == METADATA_NAME
        else None
    )


@contextmanager
def _undisturbed(path: AnyPath) -> Iterator[None]:
    """Say next to the name of a file that changed in this block that nothing was changed, and what
    to type next.
    """
    try:
        yield
    except FileChangedError as error:
        again = command("repair", path)
        raise ChangedError(
            f"{error.problem}; nothing was changed; next: wait until the save has ended, then: "
            f"{again}"
        ) from error


def _unanswered(case: Case, policy: Policy) -> tuple[Finding, ...]:
    """Return the findings without those about equal entries that the user declared intentional."""
    answered = {
        entry.path
        for role, count in policy.keep.items()
        for entries in case.entries(role)
        if len(entries) == count
        for entry in entries
    }
    return tuple(
        finding
        for finding in case.findings
        if not (isinstance(finding, IdenticalModels | IdenticalStates) and finding.path in answered)
    )


def _check_space(root: AnyPath, edits: Sequence[Edit], shares_blocks: bool) -> None:
    free, block = free_space(root)
    need = space_needed(edits, shares_blocks=shares_blocks, block=block)
    if edits and need > free:
        raise OperationError(
            f"{root}: the repair needs {human_size(need)} of free space, but only "
            f"{human_size(free)} is free on this disk; nothing was changed; free some space, "
            "then run the repair again"
        )


def _moved(report: CheckReport, source: AnyPath, output: AnyPath) -> CheckReport:
    """Return the report of a model in a sub-folder, with the name of that folder in the copy."""
    below = tuple(_moved(one, source, output) for one in report.below)
    return replace(report, path=output / relative(report.path, source), below=below)
