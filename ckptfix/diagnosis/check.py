"""Check of a checkpoint for damage. Reads headers and a few pages of tensors; changes nothing."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.dcp import DcpFolder, holds_dcp, is_of_checkpoint
from ckptfix.checkpoint.downloads import half_downloads
from ckptfix.checkpoint.entries import all_state_dicts, model_entries
from ckptfix.checkpoint.filenames import (
    NOT_STATES,
    OF_ONE_RANK,
    Role,
    family_of,
)
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder, scan_folder
from ckptfix.checkpoint.latest import UNFINISHED as UNFINISHED_SAVE
from ckptfix.checkpoint.latest import cut_upload, incomplete
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, lists_models, may_hold_weights
from ckptfix.checkpoint.neighbours import Neighbours, Siblings
from ckptfix.diagnosis.completeness import STATES_ALONE, judge_bare
from ckptfix.diagnosis.dataloaders import exchanged_loaders
from ckptfix.diagnosis.diagnose import Diagnosis, diagnose
from ckptfix.diagnosis.exchanged import diagnose_exchanged, other_objects, surplus_objects
from ckptfix.diagnosis.file_damage import DeepSpeedState, LeftRecord
from ckptfix.diagnosis.findings.base import Finding, Resume, Severity, finding_lines, salvage_lines
from ckptfix.diagnosis.findings.damaged import InterruptedRepair
from ckptfix.diagnosis.findings.incomplete import (
    IncompleteCheckpoint,
    InterruptedSave,
    LeftoverSave,
    MissingFile,
    NestedCheckpoint,
    Salvaged,
    StagingFolder,
)
from ckptfix.diagnosis.findings.inconsistent import MismatchedRates
from ckptfix.diagnosis.findings.misplaced import RenamedState
from ckptfix.diagnosis.findings.weight_faults import MissingModel
from ckptfix.diagnosis.hook_models import HookModel, diagnose_hook_models
from ckptfix.diagnosis.left_out import OF_ONE_SAVE
from ckptfix.diagnosis.loads.outcome import LoadOutcome
from ckptfix.diagnosis.siblings import compared
from ckptfix.diagnosis.target import Target, ensure_checkpoint, find_target, nested_checkpoint
from ckptfix.diagnosis.understood import READ_BY_UNDERSTAND, Understood, understand
from ckptfix.diagnosis.unfinished_copies import half_downloaded, unmarked
from ckptfix.diagnosis.unread_shards import diagnose_unread_shards
from ckptfix.errors import CkptfixError, UsageError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.reports import Serialized, items
from ckptfix.storage.executor import THREADS, Executor
from ckptfix.storage.files import (
    AnyPath,
    Openable,
    absolute,
    folder_entries,
    is_dir,
    is_symlink,
    lexists,
    lies_in,
    names_in,
    relative,
    spared_below,
    sparing,
    unheld_below,
)
from ckptfix.storage.journal import State, is_elsewhere, transactions
from ckptfix.storage.opened import takes_urls
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import JOURNAL, command, described
from ckptfix.storage.staged import SAVING, holds_previous, is_needed, owner_of, target_of
from ckptfix.tensors.opening import model_folders
from ckptfix.wording import (
    Line,
    Printable,
    count_of,
    few,
    human_size,
    line,
    unchecked_line,
    unchecked_lines,
)

if TYPE_CHECKING:
    # A check without load=True must start quickly.
    from ckptfix.diagnosis.loads.loaders import Loaders

GENERIC = ("values of tensors", "checksums of ", "local headers of ", OF_ONE_SAVE)
"""Beginnings of the sentences about checks that no folder gets; reported once per run."""

_SPARED = (
    "local headers of records in torch zip files and .distcp files of a store; ckptfix check "
    "--data reads them"
)

_OF_FOLDER = ("other files next to it", "digests in ")
"""Beginnings of the sentences about other files of a folder, which do not matter for a model in a
sub-folder.
"""


_BY_A_LOAD = "ckptfix check --load"
"""The command in a sentence about what a load by the library shows."""

_DAMAGED, _WARNED, UNFINISHED, _BARE, _STAGING, _NOT_RESUMABLE, CLEAN = VERDICTS = (
    "damaged", "with warnings", "not finished", "without weights", "staging", "not resumable",
    "clean",
)  # fmt: skip
"""The verdicts on one of several checkpoints, the worst first."""


class CheckReport(Printable, Serialized, Struct, frozen=True, kw_only=True):
    """Report of ``check``.

    ``not_checked``: the omitted checks, in words. ``unfinished``: files that may not be read, which
    may be healthy or damaged, with the command that allows it. ``below``: the reports of the
    sub-folders that hold models of the checkpoint, such as ``unet``. ``not_resumable``: why
    ``latest_checkpoint`` passes over a numbered checkpoint, where no finding says it. ``load``: the
    answers of the libraries that load it, where they were asked.
    """

    json_keys: ClassVar = (
        "path status verdict counts understood components=_components sharded=_sharded "
        "deepspeed=_deepspeed findings not_checked below? unfinished not_resumable? load?=_load"
    )

    path: AnyPath
    folder: CheckpointFolder
    sharded: tuple[DcpFolder, ...]
    deepspeed: tuple[DeepSpeedState, ...]
    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...]
    unfinished: tuple[str, ...] = ()
    below: tuple["CheckReport", ...] = ()
    understood: Understood = field(default_factory=Understood)
    not_resumable: str = ""
    load: tuple[LoadOutcome, ...] = ()

    @property
    def status(self) -> int:
        """Exit status: 3 where a file may not be read, or no library says what it loads, else 1 for
        any error or warning, or a load that is not the model that was saved. Notes do not change
        it.
        """
        return max((self.known, *(outcome.status for outcome in self.all_load)))

    @property
    def known(self) -> int:
        """The status without the loads that no library answers for: they speak for no checkpoint
        and against none.
        """
        is_lost = any(outcome.status == 1 for outcome in self.all_load)
        return 3 if self.all_unfinished else max(status_of(self.all_findings), int(is_lost))

    @property
    def all_load(self) -> tuple[LoadOutcome, ...]:
        """The outcomes of the folder and of the models below, by their paths from the folder."""
        return self.load + tuple(
            outcome._replace(path=f"{relative(report.path, self.path)}/{outcome.path}")
            for report in self.below
            for outcome in report.all_load
        )

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """The findings of the folder and of the models below, by their paths from the folder."""
        return self.findings + tuple(
            replace(finding, path=relative(report.path, self.path) / finding.path)
            for report in self.below
            for finding in report.all_findings
        )

    @property
    def all_unfinished(self) -> tuple[str, ...]:
        """The unreadable files of the folder and of the models below, by paths from the folder."""
        return self.unfinished + tuple(
            f"{relative(report.path, self.path)}/{words}"
            for report in self.below
            for words in report.all_unfinished
        )

    @property
    def all_understood(self) -> Understood:
        """Facts about the folder and the models below, by their paths from the folder."""
        facts = self.understood
        for report in self.below:
            below = relative(report.path, self.path)
            facts = facts.joined(report.all_understood, below)
        return facts

    @property
    def verdict(self) -> str:
        """The verdict in a word: one of ``VERDICTS``, by which checkpoints are counted."""
        if self.status == 0:
            if any(isinstance(finding, LeftoverSave) for finding in self.findings):
                return _BARE
            if self.is_staging:
                return _STAGING
            return _NOT_RESUMABLE if self.not_resumable else CLEAN
        if any(finding.severity is Severity.ERROR for finding in self.all_findings):
            return _DAMAGED
        if any(outcome.status == 1 for outcome in self.all_load):
            return _DAMAGED
        return _WARNED if status_of(self.all_findings) else UNFINISHED

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of files, tensors and bytes that were read, of findings, and of what was not
        checked.
        """
        components = self.folder.components
        tensors = sum(
            len(component.tensors) for component in components if component.role not in OF_ONE_RANK
        )
        tensors += sum(
            len(state.metadata.tensors) for state in self.sharded if state.metadata is not None
        )
        tensors += sum(state.tensors for state in self.deepspeed if state.files)
        files = len(components) + sum(len(state.files) for state in self.sharded)
        files += sum(state.files for state in self.deepspeed)
        nbytes = sum(component.size for component in components)
        nbytes += sum(state.size for state in self.sharded) + sum(
            state.size for state in self.deepspeed
        )
        found = Counter(f"{finding.severity.value}s" for finding in self.findings)
        own = {
            "files": files, "tensors": tensors, "bytes": nbytes,
            **{f"{severity.value}s": found[f"{severity.value}s"] for severity in Severity},
        }  # fmt: skip
        inside = [report.counts for report in self.below]
        sums = {key: sum((own[key], *(counts[key] for counts in inside))) for key in own}
        return {**sums, "not_checked": len(self.not_checked)}

    def headline(self, *, with_codes: bool = False, is_below: bool = False) -> Line:
        """Return the verdict in a line. ``with_codes``: of the findings, where nothing else names
        them.

        ``is_below``: the numbers of findings alone, as the folder above has the verdict.
        """
        counts = self.counts
        codes = sorted({finding.code for finding in self.all_findings}) if with_codes else []
        after = f": {', '.join(codes)}" if codes else ""
        if self.is_staging:
            target = target_of(absolute(self.path)).name
            text = f"{self.path}: staging folder of {target}, not a checkpoint; not read{after}"
            return line(text, bold=True)
        found = [
            count_of(counts[f"{severity.value}s"], severity.value)
            for severity in Severity
            if counts[f"{severity.value}s"]
        ]
        of_loads = [outcome.headline for outcome in (self.load if is_below else self.all_load)]
        if self.all_unfinished:
            found.insert(0, "could not finish")
        elif not (counts["errors"] or counts["warnings"] or is_below or any(of_loads)):
            found.insert(0, "no error found")
        found += dict.fromkeys(filter(None, of_loads))
        is_lost = any(outcome.status == 1 for outcome in self.all_load)
        colour = "red" if counts["errors"] or is_lost else "yellow" if self.status else "green"
        numbers = "no files of a checkpoint"
        if counts["files"]:
            tensors, size = count_of(counts["tensors"], "tensor"), human_size(counts["bytes"])
            numbers = f"{count_of(counts['files'], 'file')}, {tensors}, {size}"
        return line(f"{self.path}: {', '.join(found)} ({numbers}){after}", colour=colour, bold=True)

    @property
    def is_staging(self) -> bool:
        """True for the staging folder of a save or another writer, in which nothing is read."""
        return any(isinstance(one, StagingFolder) and not one.path.parts for one in self.findings)

    def alone(self) -> "CheckReport":
        """Return the report without the folders below, where each checkpoint in them gets a report
        of its own.
        """
        below = tuple(
            f"{name}/ ({PLAIN_FOLDER}): not looked into"
            for name in self.folder.subfolders
            if not is_symlink(self.folder.root / name)
        )
        told = tuple(words for words in self.not_checked if not words.startswith(below))
        return replace(self, not_checked=told, below=())

    def lines(self, *, is_verbose: bool = False) -> Iterator[Line]:
        """Yield the verdict, the problems and what to do, what was understood, and what was not
        checked.

        ``is_verbose``: every model, and every sentence about what was not checked.
        """
        yield from self.verdict_lines()
        yield from self.all_understood.lines(is_verbose=is_verbose)
        details = "" if is_verbose else command("check", self.path, "", "-v")
        yield from unchecked_lines(self.not_checked, details=details)

    def unchecked(self) -> Iterator[Line]:
        """Yield every sentence about what was not checked, for a list of those about several
        checkpoints.
        """
        yield from map(unchecked_line, (*self.not_checked, *self.all_understood.problems))

    def verdict_lines(self, *, is_below: bool = False) -> Iterator[Line]:
        """Yield the verdict, the problems, and what to do. ``is_below``: as of ``headline``."""
        yield self.headline(is_below=is_below)
        yield from finding_lines(self.findings, str(self.path))
        if self.not_resumable:
            yield line(
                f"  not resumable: latest_checkpoint passes over it: {self.not_resumable}",
                colour="yellow",
            )
        for outcome in self.load:
            yield from outcome.lines()
        for report in self.below:
            if report.all_findings or report.all_unfinished or report.all_load:
                yield from report.verdict_lines(is_below=True)
        salvages = list(salvage_lines(self.findings, str(self.path)))
        if any(finding.is_fixable for finding in self.findings) and not self.unfinished:
            # A repair brings no data back, and can delete a duplicate: first what is intact gets
            # out.
            salvages.append(
                line(f"{'then' if salvages else 'next'}: {command('repair', self.path)}")
            )
        yield from unfinished_lines(self.unfinished)
        yield from salvages

    @property
    def _load(self) -> list[dict[str, object]]:
        return [{**outcome._asdict(), "status": outcome.status} for outcome in self.load]

    def _components(self) -> list[dict[str, object]]:
        keys = "path role index=name.index rank=name.rank bytes=size tensors=tensors.__len__"
        return [dict(items(component, keys)) for component in self.folder.components]

    def _sharded(self) -> list[dict[str, object]]:
        keys = "path bytes=size files=files.__len__"
        return [
            {
                **dict(items(state, keys)),
                "tensors": len(state.metadata.tensors) if state.metadata else 0,
            }
            for state in self.sharded
        ]

    def _deepspeed(self) -> list[dict[str, object]]:
        return [dict(items(state, "path bytes=size files tensors")) for state in self.deepspeed]


def unfinished_lines(unfinished: tuple[str, ...]) -> Iterator[Line]:
    """Yield a line for each file or folder that may not be read, so that nothing is known
    about it.
    """
    yield from few([f"could not finish: {words}" for words in unfinished], "files", colour="yellow")


@takes_urls("path", complete=False)
def check(
    path: Openable,
    *,
    data: bool = False,
    siblings: Siblings | Iterable[str | os.PathLike[str]] = (),
    resumes: bool = False,
    load: "bool | Loaders" = False,
    progress: Progress | None = None,
    left: list[LeftRecord] | None = None,
    executor: Executor = THREADS,
) -> CheckReport:
    """Find the problems of a checkpoint folder or file.

    Headers are read, and samples of tensor bytes where two entries look alike; ``data`` reads all
    bytes of those, and checks every checksum. The names in the checkpoints of the same run, next to
    this one, show what is missing here. ``siblings``: other checkpoints that may be of the run, for
    names that no library gives, such as ``x_3``; with them, tensors are compared with those of the
    checkpoint before. ``resumes``: also report why ``latest_checkpoint`` passes over it. ``load``:
    also ask transformers, PEFT or diffusers what they load, in a process of their own that reads no
    tensor; or the ``Loaders`` that ask them. ``progress`` is called with byte counts.
    ``left``: records whose CRC the caller compares itself are listed there, not read. ``executor``:
    shares the work of ``data``.

    Raises UsageError when no checkpoint is at ``path``, OSError when the folder cannot be read.
    """
    others = siblings if isinstance(siblings, Siblings) else list(siblings)
    grouped = others if isinstance(others, Siblings) else Siblings(others)
    target = find_target(path)
    checked = partial(
        _checked,
        target,
        grouped,
        data=data,
        resumes=resumes,
        of_run=bool(others),
        progress=progress,
        left=left,
        executor=executor,
    )
    if load is True:
        from ckptfix.diagnosis.loads.loaders import Loaders

        with Loaders() as loaders:
            return checked(loaders=loaders)
    return checked(loaders=load or None)


def _checked(
    target: Target,
    siblings: Siblings,
    *,
    scan: Callable[[], CheckpointFolder] | None = None,
    data: bool = False,
    resumes: bool = False,
    of_run: bool = False,
    loaders: "Loaders | None" = None,
    progress: Progress | None = None,
    left: list[LeftRecord] | None = None,
    executor: Executor = THREADS,
) -> CheckReport:
    """Return the report of ``check``.

    ``scan``: returns the folder, whose headers the caller needs, too. ``of_run``: compare tensors
    with those of the checkpoint before.
    """
    if target.only is None and (found := _staging(target.root, PurePosixPath(), rest=False)):
        nothing = CheckpointFolder(
            root=target.root, only=None, components=(), strays=(), subfolders={}
        )
        return CheckReport(
            path=target.path,
            folder=nothing,
            sharded=(),
            deepspeed=(),
            findings=(found,),
            not_checked=(),
        )
    spared = spared_below(target.root)
    with paused_gc(), nullcontext() if data else sparing(target.root):
        folder = scan() if scan is not None else scan_folder(target.root, target.only)
        pending = interrupted(target) + interrupted_inside(target)
        halves = tuple(half_downloads(target.root)) if target.only is None else ()
        bare = (
            judge_bare(folder, partial(resume_problem, siblings=siblings)) if not pending else None
        )
        near = siblings.of(target.root)
        if (
            bare is None
            and not pending
            and not any(unmarked(near) if target.only is None else ())
            and not halves
            and not (target.only is None and lists_models(target.root))
        ):
            if (inner := nested_checkpoint(folder)) is not None:
                report = check(
                    inner,
                    data=data,
                    siblings=siblings,
                    resumes=resumes,
                    load=loaders or False,
                    progress=progress,
                    left=left,
                    executor=executor,
                )
                misplaced = _nested(target.root, inner)
                return (
                    replace(report, findings=(*misplaced, *report.findings))
                    if misplaced
                    else report
                )
            ensure_checkpoint(folder)
        diagnosis = diagnose(
            folder,
            data=data,
            progress=progress,
            looked_at=READ_BY_UNDERSTAND,
            neighbours=near,
            left=left,
            executor=executor,
        )
    is_spared = spared_below(target.root) > spared
    lacking = (
        bare.beyond(diagnosis.findings)
        if bare is not None
        else missing_here(target, diagnosis, near)
    )
    below = tuple(
        models_below(
            diagnosis, data=data, loaders=loaders, progress=progress, left=left, executor=executor
        )
    )
    of_hooks = diagnose_hook_models(
        folder,
        diagnosis.sharded,
        diagnosis.optimizers,
        tuple(_hook_models(target.root, below)),
        near,
        diagnosis.findings,
        has_deepspeed=bool(diagnosis.deepspeed),
    )
    unheld, markers = _unheld(target, below)
    # What every check leaves out of weights is no news of a folder that has none, and should have
    # some.
    beside_the_point = (
        *(GENERIC if bare is not None else ()),
        *((STATES_ALONE,) if lacking else ()),
    )
    # With the models below, the same is said of the optimizer in other words, or it was compared.
    beside_the_point += ("whether optimizer",) if below and folder.is_save_state else ()
    omitted = [words for words in diagnosis.not_checked if not words.startswith(beside_the_point)]
    omitted += of_hooks.unchecked
    downloads = tuple(half_downloaded(target.root, halves, [report.path for report in below]))
    load: tuple[LoadOutcome, ...] = ()
    of_headers = diagnosis.findings
    if loaders is not None:
        is_asked_below = any(report.all_load for report in below) and not any(
            member.role in NOT_STATES for group in diagnosis.groups for member in group.members
        )
        load, of_headers = loaders.judged(
            folder, diagnosis.groups, of_headers, is_asked_below=is_asked_below
        )
        if not load and not is_asked_below:
            omitted.append("load by a library: none loads this folder")
        if load and not any(outcome.unchecked for outcome in load):
            omitted = [words for words in omitted if _BY_A_LOAD not in words]
        omitted += (f"{outcome.path}: {words}" for outcome in load for words in outcome.unknown)
        if any(not outcome.unchecked for outcome in load):
            omitted.append(
                "settings of configs that no tensor shows (numbers of heads, scales, dtypes)"
            )
    stale: Iterable[Finding] = ()
    if of_run:
        from ckptfix.diagnosis.stale_saves import diagnose_stale_saves

        stale = diagnose_stale_saves(folder, diagnosis.sharded, near, data=data)
    findings = (
        *pending,
        *lacking,
        *of_headers,
        *stale,
        *of_hooks.findings,
        *downloads,
        *_staging_inside(target),
    )
    return CheckReport(
        path=target.path,
        folder=folder,
        sharded=diagnosis.sharded,
        deepspeed=diagnosis.deepspeed,
        findings=findings,
        not_checked=(
            *with_below(tuple(omitted), target.path, below),
            *((_SPARED,) if is_spared else ()),
            *markers,
        ),
        unfinished=(
            *diagnosis.unfinished,
            *unheld,
            *(bare.unfinished if bare is not None else ()),
        ),
        below=below,
        understood=understand(diagnosis),
        not_resumable=_not_resumable(target, findings) if resumes else "",
        load=load,
    )


def _hook_models(root: AnyPath, below: Iterable[CheckReport]) -> Iterator[HookModel]:
    """Yield the models in sub-folders at any depth, by their paths from a folder."""
    for report in below:
        yield HookModel(relative(report.path, root), report.folder, report.findings)
        yield from _hook_models(root, report.below)


def _nested(outer: AnyPath, inner: AnyPath) -> tuple[NestedCheckpoint, ...]:
    """Return the finding about a checkpoint in a folder of its own name, none in a folder of
    another name.
    """
    if absolute(outer).name != inner.name:
        return ()
    return (NestedCheckpoint(path=PurePosixPath(), missing=(), known_by="", outer=str(outer)),)


def missing_here(
    target: Target, diagnosis: Diagnosis, neighbours: Neighbours
) -> tuple[Finding, ...]:
    """Return the findings that the checkpoints next to one show: files that it lacks, and files of
    other entries.
    """
    is_without_model = any(
        isinstance(one, MissingModel) and not one.model for one in diagnosis.findings
    )
    if target.only is not None:
        return ()
    marks = tuple(unmarked(neighbours))
    if is_without_model:
        return marks
    told = {name for finding in diagnosis.findings for name in _told_of(finding)}
    missing = compared(target.root, neighbours, told)
    damaged = frozenset(
        finding.path
        for finding in diagnosis.findings
        if finding.severity is Severity.ERROR or isinstance(finding, RenamedState)
    )
    # Their partners were reported with them.
    damaged |= {
        PurePosixPath(finding.exchanged_with)
        for finding in diagnosis.findings
        if isinstance(finding, RenamedState) and finding.exchanged_with
    }
    folder = diagnosis.folder
    return (
        *marks,
        *missing,
        *_lost_since_repair(target.root, told),
        *diagnose_unread_shards(folder, neighbours),
        *diagnose_exchanged(
            folder,
            neighbours,
            damaged,
            is_contradicted=any(
                isinstance(finding, MismatchedRates) for finding in diagnosis.findings
            ),
        ),
        *surplus_objects(folder, neighbours),
        *(
            finding
            for finding in (
                *other_objects(folder, neighbours),
                *exchanged_loaders(folder, neighbours),
            )
            if finding.path not in damaged
        ),
    )


def _lost_since_repair(root: AnyPath, told: Collection[str]) -> Iterator[IncompleteCheckpoint]:
    """Yield a finding for each file that a repair left here, as its journal says, and that is gone.

    ``told``: files of other findings.
    """
    left: dict[PurePosixPath, int] = {}
    for info in transactions(root):
        if info.state is State.DONE and not is_elsewhere(root, info):
            left |= dict.fromkeys(info.paths, info.number)
            for path in info.gone:
                left.pop(path, None)
    for path, number in left.items():
        if is_of_checkpoint(path.name) and str(path) not in told and not lexists(root / path):
            yield IncompleteCheckpoint(
                path=path, missing=(str(path),), known_by=f"repair {number} left it here"
            )


def _not_resumable(target: Target, findings: Iterable[Finding]) -> str:
    """Return why ``latest_checkpoint`` passes over a numbered checkpoint, "" where a finding says
    it, or it does not.

    Of a damaged file there is a finding.
    """
    name = absolute(target.root).name
    if target.only is not None or family_of(name) is None or any(map(_says_why, findings)):
        return ""
    return incomplete(target.root, reads_files=False) or ""


class _Judgement(NamedTuple):
    """The answer whether a run resumes from a checkpoint.

    ``problem``: why not, None where it does. ``doubts``: findings that stop it, unless the script
    saves so each time. ``codes``: of all findings, with their paths.
    """

    problem: str | None
    doubts: tuple[Finding, ...] = ()
    codes: frozenset[tuple[str, PurePosixPath]] = frozenset()


def resume_problem(checkpoint: AnyPath, *, siblings: Siblings | None = None) -> str | None:
    """Return why no run resumes from a checkpoint, None for one that ``latest_checkpoint`` takes.

    It is incomplete, or ``check`` finds in it what makes the load or the next step fail. Reads
    headers, not the data. ``siblings``: what is known of other checkpoints.
    """
    siblings = siblings or Siblings()
    own = _judgement(checkpoint, siblings)
    if own.problem is not None or not own.doubts:
        return own.problem
    for neighbour in siblings.of(checkpoint).spread():
        if neighbour.is_earlier:
            with suppress(CkptfixError, OSError), neighbour.opened() as folder:
                before = _judgement(folder, siblings)
                if before.problem is None:
                    new = (
                        doubt
                        for doubt in own.doubts
                        if (doubt.code, doubt.path) not in before.codes
                    )
                    return next(map(str, new), None)
    return None


def _judgement(checkpoint: AnyPath, siblings: Siblings) -> _Judgement:
    scan = cache(partial(scan_folder, checkpoint))

    def judge() -> _Judgement:
        problem = incomplete(checkpoint, scan=scan)
        if problem is not None:
            return _Judgement(problem)
        try:
            report = _checked(find_target(checkpoint), siblings, scan=scan)
        except (CkptfixError, OSError) as error:
            return _Judgement(described(error))
        findings = report.findings
        return _Judgement(
            problem=next(_stopping(report), None),
            doubts=tuple(finding for finding in findings if finding.resume is Resume.FAILS_IF_NEW),
            codes=frozenset((finding.code, finding.path) for finding in findings),
        )

    return siblings.once(siblings.of(checkpoint), judge)


def _stopping(report: CheckReport, where: str = "", *, is_of_hook: bool = False) -> Iterator[str]:
    """Yield in words the findings of a folder and of the models below it that stop a resume.

    ``where``: the beginning of the sentence, for a folder below. ``is_of_hook``: it is a model
    below a folder of ``save_state``. Only a hook of the script reads it, and ``from_pretrained``
    fails where its config cannot be read, and where the model is one level too deep. Next to
    weights that a library reads, nothing loads a file under a name of the script's own, such as
    ``tokens.bin``. Alone it may be the model, which a hook of the script loads.
    """
    folder = report.folder
    has_weights = any(
        one.name.is_of_library or one.role in (Role.MODEL, Role.WEIGHTS_INDEX)
        for one in folder.components
    ) or any(kind != PLAIN_FOLDER for kind in folder.subfolders.values())
    unread = {
        one.path
        for one in folder.components
        if one.role is Role.UNKNOWN and not one.name.is_of_library
    }
    for finding in report.findings:
        is_config = isinstance(finding, IncompleteCheckpoint) and str(finding.path) in (
            CONFIG,
            ADAPTER,
        )
        is_read = not (has_weights and finding.path in unread)
        is_deeper = isinstance(finding, NestedCheckpoint)
        if (finding.resume is Resume.FAILS and is_read) or (
            is_of_hook and (is_config or is_deeper)
        ):
            yield f"{where}{finding}"
    for below in report.below:
        inside = f"{relative(below.path, report.path)}/: "
        yield from _stopping(
            below, f"{where}{inside}", is_of_hook=is_of_hook or folder.is_save_state
        )


def _says_why(finding: Finding) -> bool:
    """Return whether a finding says what a folder lacks to resume from it."""
    return isinstance(finding, _OF_A_FOLDER) and (
        finding.severity is not Severity.NOTE or isinstance(finding, LeftoverSave)
    )


_OF_A_FOLDER = (
    IncompleteCheckpoint, InterruptedRepair, InterruptedSave, MissingFile, MissingModel, Salvaged,
)  # fmt: skip


def _unheld(target: Target, below: tuple[CheckReport, ...]) -> tuple[list[str], list[str]]:
    """Return in words the objects of a store that no folder can hold: those with bytes, and those
    without any.
    """
    solid: list[str] = []
    empty: list[str] = []
    for one in unheld_below(target.root) if target.only is None else ():
        if any(lies_in(one.home, report.path) for report in below):
            continue
        (solid if one.size else empty).append(f"{one.key!r}: {one}")
    return solid, empty


def _told_of(finding: Finding) -> tuple[str, ...]:
    """Return the files of a finding."""
    missing = finding.missing if isinstance(finding, IncompleteCheckpoint) else ()
    return (str(finding.path), *missing)


def models_below(
    diagnosis: Diagnosis,
    *,
    data: bool = False,
    loaders: "Loaders | None" = None,
    progress: Progress | None = None,
    left: list[LeftRecord] | None = None,
    executor: Executor = THREADS,
) -> Iterator[CheckReport]:
    """Yield the reports of the models in sub-folders. Raises OSError."""
    folder = diagnosis.folder
    if folder.only is not None or PLAIN_FOLDER not in folder.subfolders.values():
        return
    models = [
        state for state in diagnosis.sharded if state.name is None or state.name.role is Role.MODEL
    ]
    has_weights = bool(
        models or diagnosis.deepspeed or model_entries(folder, None) or all_state_dicts(folder)
    )
    for where in model_folders(folder, has_weights=has_weights):
        # What a folder without weights lacks is told by the one above: its config may be that of a
        # tokenizer.
        if not may_hold_weights(folder.root / where):
            continue
        with suppress(UsageError):  # it holds no file of a checkpoint
            yield check(
                folder.root / where,
                data=data,
                load=loaders or False,
                progress=progress,
                left=left,
                executor=executor,
            )


def with_below(
    own: tuple[str, ...], path: AnyPath, below: tuple[CheckReport, ...]
) -> Iterator[str]:
    """Yield in words what was not checked, each once; sentences about a file in a sub-folder name
    the folder.
    """
    inside = {relative(report.path, path): report.not_checked for report in below}
    folders = {folder for where in inside for folder in (where, *where.parents)}
    looked_into = tuple(f"{folder}/ ({PLAIN_FOLDER}): " for folder in folders)
    told = [words for words in own if not words.startswith(looked_into)]
    yield from told
    generic = {words for said in inside.values() for words in said if words.startswith(GENERIC)}
    yield from sorted(generic.difference(told))
    for where, said in inside.items():
        yield from (
            f"{where}/{words}" for words in said if not words.startswith((*GENERIC, *_OF_FOLDER))
        )


def _staging_inside(target: Target) -> tuple[Finding, ...]:
    """Return a finding for each staging folder in the journal of a checkpoint, for saves that go
    file by file.
    """
    journal = target.root / JOURNAL
    names = sorted(names_in(journal)) if target.only is None and journal.is_dir() else []
    is_mixed = (journal / UNFINISHED_SAVE).exists() or cut_upload(target.root) is not None
    found = (
        _staging(journal / name, PurePosixPath(JOURNAL, name), rest=is_mixed) for name in names
    )
    return tuple(finding for finding in found if finding is not None)


def _staging(folder: AnyPath, path: PurePosixPath, *, rest: bool) -> Finding | None:
    """Return the finding about a staging folder, None for any other folder."""
    folder = absolute(folder)
    owner = owner_of(folder)
    if owner is None:
        return None
    return StagingFolder(
        path=path,
        is_running=owner.is_running,
        pid=owner.pid,
        host=owner.host,
        same_machine=owner.is_same_machine,
        is_rest=rest or is_needed(folder),
        of="save" if folder.name.startswith(SAVING) else "migrate, salvage or repair",
        holds_previous=holds_previous(folder),
    )


def interrupted(target: Target) -> tuple[Finding, ...]:
    """Return a finding for each transaction that a killed repair or undo left behind."""
    return _pending(target.root, PurePosixPath())


def interrupted_inside(target: Target) -> tuple[Finding, ...]:
    """Return a finding for each transaction that was left behind in a DCP folder of a
    checkpoint.
    """
    if target.only is not None:
        return ()
    with folder_entries(target.root) as listing:
        names = sorted(entry.name for entry in listing if entry.name != JOURNAL)
    return tuple(
        finding
        for name in names
        if is_dir(target.root / name / JOURNAL) and holds_dcp(target.root / name)
        for finding in _pending(target.root / name, PurePosixPath(name))
    )


def _pending(folder: AnyPath, path: PurePosixPath) -> tuple[Finding, ...]:
    return tuple(
        InterruptedRepair(
            path=path / JOURNAL,
            transaction=transaction.number,
            in_store=transaction.in_store,
            elsewhere=is_elsewhere(folder, transaction),
        )
        for transaction in transactions(folder)
        if transaction.is_interrupted
    )


def status_of(findings: tuple[Finding, ...]) -> int:
    """Return 1 when any finding is an error or a warning, else 0."""
    return int(any(finding.severity is not Severity.NOTE for finding in findings))
