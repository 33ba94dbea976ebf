"""Check of a checkpoint for damage. Reads headers and a few pages of tensors; changes nothing."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from ckptfix.checkpoint.dcp import holds_dcp
from ckptfix.checkpoint.downloads import HalfDownload, half_downloads
from ckptfix.checkpoint.entries import all_state_dicts, model_entries
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder, scan_folder
from ckptfix.checkpoint.folder_names import family_of
from ckptfix.checkpoint.latest import UNFINISHED as UNFINISHED_SAVE
from ckptfix.checkpoint.latest import cut_upload, incomplete
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, lists_models, may_hold_weights
from ckptfix.checkpoint.neighbours import Siblings
from ckptfix.checkpoint.roles import NOT_STATES, Role
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.check_report import (
    GENERIC,
    CheckReport,
)
from ckptfix.diagnosis.completeness import OF_UPLOAD, judge_bare
from ckptfix.diagnosis.diagnose import diagnose
from ckptfix.diagnosis.file_damage import HEADERS, LeftRecord, Reading
from ckptfix.diagnosis.findings.base import Finding, Resume, Severity
from ckptfix.diagnosis.findings.config_faults import MissingModel
from ckptfix.diagnosis.findings.damaged import InterruptedRepair
from ckptfix.diagnosis.findings.incomplete import (
    IncompleteCheckpoint,
    MissingFile,
    NestedCheckpoint,
)
from ckptfix.diagnosis.findings.interrupted import (
    InterruptedSave,
    LeftoverSave,
    Salvaged,
    StagingFolder,
)
from ckptfix.diagnosis.hook_models import HookModel, diagnose_hook_models
from ckptfix.diagnosis.loads.outcome import LoadOutcome
from ckptfix.diagnosis.siblings import missing_here
from ckptfix.diagnosis.target import Target, ensure_checkpoint, find_target, nested_checkpoint
from ckptfix.diagnosis.understood import READ_BY_UNDERSTAND, understand
from ckptfix.diagnosis.unfinished_copies import half_downloaded, unmarked
from ckptfix.diagnosis.unresumable import STATES_ALONE
from ckptfix.errors import CkptfixError, UsageError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.storage.executor import THREADS, Executor
from ckptfix.storage.files import (
    AnyPath,
    Openable,
    absolute,
    folder_entries,
    is_dir,
    lies_in,
    names_in,
    relative,
    spared_below,
    sparing,
    unheld_below,
)
from ckptfix.storage.journal import is_elsewhere, transactions
from ckptfix.storage.opened import takes_urls
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import JOURNAL, described
from ckptfix.storage.staged import SAVING, holds_previous, is_needed, owner_of
from ckptfix.tensors.opening import model_folders

if TYPE_CHECKING:
    # A check without load=True must start quickly.
    from ckptfix.diagnosis.loads.loaders import Loaders

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
        Reading(data, progress, left, executor),
        resumes=resumes,
        of_run=bool(others),
    )
    if load is True:
        from ckptfix.diagnosis.loads.loaders import Loaders

        with Loaders() as loaders:
            return checked(loaders=loaders)
    return checked(loaders=load or None)


def _checked(
    target: Target,
    siblings: Siblings,
    reading: Reading = HEADERS,
    *,
    scan: Callable[[], CheckpointFolder] | None = None,
    resumes: bool = False,
    of_run: bool = False,
    loaders: "Loaders | None" = None,
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
    with paused_gc(), nullcontext() if reading.data else sparing(target.root):
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
                    siblings=siblings,
                    resumes=resumes,
                    load=loaders or False,
                    **reading._asdict(),
                )
                misplaced = _nested(target.root, inner)
                return (
                    replace(report, findings=(*misplaced, *report.findings))
                    if misplaced
                    else report
                )
            ensure_checkpoint(folder)
        case = diagnose(Case(folder, reading, looked_at=READ_BY_UNDERSTAND, neighbours=near))
    is_spared = spared_below(target.root) > spared
    lacking = bare.beyond(case.findings) if bare is not None else missing_here(target, case)
    below = tuple(models_below(case, reading, loaders=loaders))
    around = list(judge_surroundings(target, case, below, halves))
    unheld, markers = _unheld(target, below)
    # What every check leaves out of weights is no news of a folder that has none, and should have
    # some.
    beside_the_point = (
        *(GENERIC if bare is not None else ()),
        *((STATES_ALONE,) if lacking else ()),
    )
    # With the models below, the same is said of the optimizer in other words, or it was compared.
    beside_the_point += ("whether optimizer",) if below and folder.is_save_state else ()
    omitted = [words for words in case.not_checked if not words.startswith(beside_the_point)]
    omitted += (words for words in around if isinstance(words, str))
    # Of many topics only the first few are printed.
    omitted.sort(key=lambda words: not words.startswith(OF_UPLOAD))
    load: tuple[LoadOutcome, ...] = ()
    of_headers = tuple(case.findings)
    if loaders is not None:
        is_asked_below = any(report.all_load for report in below) and not any(
            member.role in NOT_STATES for group in case.groups for member in group.members
        )
        load, of_headers = loaders.judged(
            folder, case.groups, of_headers, is_asked_below=is_asked_below
        )
        if not load and not is_asked_below:
            omitted.append("load by a library: no library loads this folder")
        if load and not any(outcome.unchecked for outcome in load):
            omitted = [words for words in omitted if _BY_A_LOAD not in words]
        omitted += (f"{outcome.path}: {words}" for outcome in load for words in outcome.unknown)
        if any(not outcome.unchecked and outcome.components is None for outcome in load):
            omitted.append("config settings that no tensor shows (number of heads, scales, dtypes)")
    stale: Iterable[Finding] = ()
    if of_run:
        from ckptfix.diagnosis.stale_saves import diagnose_stale_saves

        stale = diagnose_stale_saves(folder, case.sharded, near, data=reading.data)
    findings = (
        *pending,
        *lacking,
        *of_headers,
        *stale,
        *(finding for finding in around if not isinstance(finding, str)),
    )
    return CheckReport(
        path=target.path,
        folder=folder,
        sharded=case.sharded,
        deepspeed=case.deepspeed,
        findings=findings,
        not_checked=(
            *with_below(tuple(omitted), target.path, below),
            *((_SPARED,) if is_spared else ()),
            *markers,
        ),
        unfinished=(
            *case.unfinished,
            *unheld,
            *(bare.unfinished if bare is not None else ()),
        ),
        below=below,
        understood=understand(case),
        not_resumable=_not_resumable(target, findings) if resumes else "",
        load=load,
    )


def judge_surroundings(
    target: Target,
    case: Case,
    below: tuple[CheckReport, ...],
    halves: tuple[HalfDownload, ...],
) -> Iterator[Finding | str]:
    """Yield findings that a folder has together with the models below it and the rests inside of
    it, and in words what was not compared.
    """
    yield from diagnose_hook_models(case, tuple(_hook_models(target.root, below)))
    yield from half_downloaded(target.root, halves, [report.path for report in below])
    yield from _staging_inside(target)


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


def models_below(
    case: Case, reading: Reading = HEADERS, *, loaders: "Loaders | None" = None
) -> Iterator[CheckReport]:
    """Yield the reports of the models in sub-folders. Raises OSError."""
    folder = case.folder
    if folder.only is not None or PLAIN_FOLDER not in folder.subfolders.values():
        return
    models = [
        state for state in case.sharded if state.name is None or state.name.role is Role.MODEL
    ]
    has_weights = bool(
        models or case.deepspeed or model_entries(folder, None) or all_state_dicts(folder)
    )
    for where in model_folders(folder, has_weights=has_weights):
        # What a folder without weights lacks is told by the one above: its config may be that of a
        # tokenizer.
        if not may_hold_weights(folder.root / where):
            continue
        with suppress(UsageError):  # it holds no file of a checkpoint
            yield check(folder.root / where, load=loaders or False, **reading._asdict())


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
