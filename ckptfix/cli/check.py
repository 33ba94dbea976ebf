"""``ckptfix check``."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from threading import Event
from typing import TYPE_CHECKING

import click

from ckptfix.cli.annotations import Annotation
from ckptfix.cli.report import INTERRUPTED, Form, Report, ensure_writable, publish
from ckptfix.cli.several_paths import Below, check_verbosely, threads_for, visit
from ckptfix.cli.verb_options import PATH, LocalFile, Verb, or_here
from ckptfix.diagnosis.check import check
from ckptfix.diagnosis.check_report import CLEAN, DIFFERENT, VERDICTS, CheckReport
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.storage.executor import Executor
from ckptfix.storage.files import AnyPath, is_url
from ckptfix.storage.opened import opened_part
from ckptfix.storage.parallel import Control
from ckptfix.storage.paths import command
from ckptfix.wording import Line, line, unchecked_line

if TYPE_CHECKING:
    # A check of one checkpoint must start quickly.
    from ckptfix.cli.runs import Page, Runs
    from ckptfix.diagnosis.loads.loaders import Loaders


@click.command(
    "check",
    cls=Verb,
    shared=lambda params: "",
    forms=list(Form),
    quiet="Print only the paths that are not clean, one per line, quoted for xargs.",
    examples=[
        ("ckptfix check CHECKPOINT", "Find what is wrong with one checkpoint."),
        (
            "ckptfix check -r runs",
            "Check every checkpoint under runs, and name the one to resume from.",
        ),
        (
            "ckptfix check -r -0 runs | xargs -r0 ckptfix repair",
            "Repair every checkpoint that is not clean.",
        ),
    ],
)
@click.argument("paths", nargs=-1, type=PATH, callback=or_here)
@click.option(
    "--data",
    is_flag=True,
    help="Compare suspected duplicates byte by byte, and verify the checksums inside files.",
)
@click.option(
    "--load",
    "loads",
    is_flag=True,
    help=(
        "Ask the installed transformers, PEFT or diffusers what they would load. Reads no tensors "
        "and runs no remote code."
    ),
)
@click.option("--recursive", "-r", is_flag=True, help="Check every checkpoint folder under PATHS.")
@click.option(
    "--verbose",
    "-v",
    is_flag=True,
    help="List every model, and every skipped check with the command that runs it.",
)
@click.option(
    "--html",
    type=LocalFile(dir_okay=False),
    metavar="FILE",
    help="With -r: also write runs and checkpoints as one HTML page.",
)
@click.option(
    "--null",
    "-0",
    is_flag=True,
    help="Like --quiet, but print paths unquoted and NUL-terminated, for xargs -0.",
)
def check_command(
    paths: tuple[str, ...],
    data: bool,
    loads: bool,
    recursive: bool,
    verbose: bool,
    html: str | None,
    null: bool,
    report: Report,
    executor: Executor,
) -> int:
    """Find what is wrong with checkpoints.

    Reads headers and small samples of tensors, and changes nothing. PATHS defaults to the current
    folder.
    """
    report.quiet |= null
    if report.quiet and verbose:
        raise click.UsageError(
            f"--verbose and --{'null' if null else 'quiet'} contradict each other"
        )
    if html is not None:
        if not recursive:
            raise click.UsageError("--html shows the checkpoints of runs; add -r")
        ensure_writable(report, html, [path for path in paths if not is_url(path)])
    with ExitStack() as opened:
        loaders = opened.enter_context(_loaders(recursive)) if loads else None
        return _check_all(
            paths, data, loaders, recursive, verbose, html, null, report, opened, executor
        )


def _loaders(is_of_many: bool) -> "Loaders":
    from ckptfix.diagnosis.loads.loaders import Loaders

    return Loaders(is_of_many=is_of_many)


def _runs(places: Iterable[AnyPath]) -> "Runs":
    from ckptfix.cli.runs import Runs

    return Runs(places)


def _page() -> "Page":
    from ckptfix.cli.runs import Page

    return Page()


def _check_all(
    paths: tuple[str, ...],
    data: bool,
    loaders: "Loaders | None",
    recursive: bool,
    verbose: bool,
    html: str | None,
    null: bool,
    report: Report,
    opened: ExitStack,
    executor: Executor,
) -> int:
    below = Below(paths if recursive else (), opened, is_thrifty=not data)
    siblings = below.siblings()
    runs = _runs(below.places.values()) if recursive else None
    has_loaded = Event()
    unloaded = ""
    page = _page() if html is not None and executor.leads else None

    def look(place: str | AnyPath) -> CheckReport:
        return check(
            place,
            data=data,
            siblings=siblings if recursive else (),
            resumes=True,
            load=loaders or False,
            progress=control.go_on,
            executor=executor,
        )

    def work(path: str | AnyPath) -> CheckReport:
        if runs is None:
            return look(path)
        checkpoint = below.listed(path)
        runs.begin(checkpoint)
        with opened_part(checkpoint) as place:
            result = look(place)
            if result.all_load:
                has_loaded.set()
            doubted = filter(None, (finding.doubted for finding in result.all_findings))
            counts_saves = siblings.of(checkpoint).are_of_one_run and result.folder.is_save_state
            runs.end(
                checkpoint, place, result.known, doubted,
                differs=result.verdict == DIFFERENT, counts_saves=counts_saves,
            )  # fmt: skip
        # Models below have a report of their own there.
        return result.alone()

    def lines(result: CheckReport, is_alone: bool) -> Iterator[Line]:
        if page is not None:
            page.add(result)
        if report.quiet:
            if result.status:
                report.path(result.path, null=null)
        elif report.is_annotated:
            yield from result.unchecked()
        elif is_alone or verbose:
            yield from result.lines(is_verbose=verbose)
        elif result.verdict == CLEAN:
            yield result.headline(with_codes=True)
            yield from result.unchecked()
        else:
            yield from result.verdict_lines()
            yield from result.unchecked()

    def keep(document: Mapping[str, object]) -> None:
        if page is not None and "error" in document:
            page.add_failed(document)
        report.element("checkpoints", document)

    try:
        with report.progress(f"reading {' '.join(paths)}") as progress:
            control = Control(progress)
            batch = visit(
                report, below if recursive else paths, work, word=lambda result: result.verdict,
                lines=lines, keep=keep, annotations=_annotations,
                threads=1 if executor.has_units else threads_for(paths), stop=control.stop,
                executor=executor,
            )  # fmt: skip
    except KeyboardInterrupt:
        if not report.has_begun:
            raise
        return report.finish({"error": "interrupted: nothing was changed"}, INTERRUPTED)
    except Exception as error:
        return report.break_off(error)
    below.report_unheld(report, batch)
    if loaders is not None and recursive and not has_loaded.is_set() and batch.words:
        # Else the summary "2 clean" would answer what was asked for and not done.
        unloaded = (
            f"{' '.join(paths)}: --load tested nothing: it needs weights next to a config of "
            "transformers (with architectures), PEFT or diffusers"
        )
        report.message(f"ckptfix: {unloaded}")
        batch.status = max(batch.status, 3)
    if batch.is_of_many:
        options = ("--data",) * data + ("--load",) * (loaders is not None) + ("-r",) * recursive
        details = "" if verbose or report.is_annotated else check_verbosely(paths, *options)
        report.show(batch.lines(VERDICTS, details=details))
    summary: dict[str, object] = (
        {"summary": batch.summary(VERDICTS)} if report.form is Form.JSONL else {"checkpoints": ()}
    )
    if unloaded:
        summary["error"] = unloaded
    if runs is not None:
        answers = runs.answers() if executor.leads else []
        warnings = [
            f"{one.taken_instead}; next: move it out of the folder"
            for one in answers
            if one.taken_instead
        ]
        warnings += [one.other_run for one in answers if one.other_run]
        trackers = runs.tracker_problems() if executor.leads else []
        warnings += [
            f"{words}; a resume fails or starts from scratch; next: write the number of a complete "
            "checkpoint into the file"
            for words in trackers
        ]
        if trackers:
            summary["trackers"] = trackers
        report.show(line(words, colour="yellow") for words in warnings)
        report.show(unchecked_line(one.not_checked) for one in answers if one.not_checked)
        report.show(line(one.text) for one in answers)
        summary["resume"] = answers
        if html is not None and page is not None:
            problem = publish(report, html, page.text(answers))
            batch.status = max(batch.status, 3 * bool(problem))
        return report.finish(summary, batch.status or int(bool(warnings)))
    return report.finish(summary, batch.status)


def _annotations(result: CheckReport) -> Iterator[Annotation]:
    """Yield the findings of a checkpoint with what to do about each, and what may not be read."""
    for finding in result.all_findings:
        sentences = [str(finding), *finding.advice_at(str(result.path)).splitlines()]
        if finding.is_fixable:
            sentences.append(f"next: {command('repair', result.path)}")
        words = "; ".join(filter(None, sentences))
        yield Annotation(finding.severity, words, result.folder.root / finding.path, finding.code)
    for outcome in result.all_load:
        if outcome.status:
            words = "; ".join(str(text).strip() for text in outcome.lines())
            yield Annotation(Severity.ERROR, words, result.folder.root / outcome.path)
    for words in result.all_unfinished:
        yield Annotation(Severity.ERROR, f"could not finish: {words}", result.path)
