"""``ckptfix check``."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from ckptfix.checkpoint.folder import PLAIN_FOLDER
from ckptfix.cli.annotations import Annotation
from ckptfix.cli.report import FAILURES, INTERRUPTED, Form, Report
from ckptfix.cli.several_paths import visit
from ckptfix.cli.verb_options import Verb
from ckptfix.diagnosis.check import CheckReport, check
from ckptfix.diagnosis.completeness import Siblings
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.diagnosis.findings.incomplete import StagingFolder
from ckptfix.diagnosis.target import find_checkpoints
from ckptfix.storage import teams
from ckptfix.storage.doors import opened, watched
from ckptfix.storage.parallel import Control
from ckptfix.storage.paths import command
from ckptfix.storage.reading import unheld_below
from ckptfix.wording import Line, count_of, line, unchecked_line

_DAMAGED, _WARNED, _UNFINISHED, _STAGING, _CLEAN = _ORDER = (
    "damaged", "with warnings", "not finished", "staging", "clean",
)  # fmt: skip

_THREADS = 4


@click.command(
    "check",
    cls=Verb,
    shared=lambda params: "",
    forms=list(Form),
    quiet="Print only the paths that are not clean, one a line, quoted where xargs needs it.",
    examples=[
        ("ckptfix check CHECKPOINT", "Find what is wrong with one checkpoint."),
        ("ckptfix check -r runs", "Check every checkpoint below runs; the last line counts them."),
        ("ckptfix check -r -0 runs | xargs -r0 ckptfix repair", "Repair every checkpoint that is not clean."),
    ],
)
@click.argument("paths", nargs=-1, required=True, type=click.Path())
@click.option("--data", is_flag=True, help="Read every byte of look-alikes and check every checksum.")
@click.option("--recursive", "-r", is_flag=True, help="Check every checkpoint folder below PATHS.")
@click.option(
    "--null",
    "-0",
    is_flag=True,
    help="As --quiet, each path unquoted and with a NUL behind it: for xargs -0.",
)
def check_command(paths: tuple[str, ...], data: bool, recursive: bool, null: bool, report: Report) -> int:
    """Find what is wrong with checkpoints.

    Reads headers and small samples of tensors; changes nothing.
    """
    report.quiet |= null
    with ExitStack() as images:
        return _check_all(paths, data, recursive, null, report, images)


def _check_all(
    paths: tuple[str, ...], data: bool, recursive: bool, null: bool, report: Report, images: ExitStack
) -> int:
    failures: dict[str, Exception] = {}
    places: dict[str, Path] = {}
    for path in paths if recursive else ():
        try:
            places[path] = images.enter_context(opened(path, complete=False, watches=False))
        except FAILURES as error:
            if len(paths) == 1:
                raise
            failures[path] = error
    unheld = [one for place in places.values() for one in unheld_below(place) if one.size]

    def targets() -> Iterator[str]:
        for path in paths:
            if path not in places:
                yield path
                continue
            try:
                for place in find_checkpoints(places[path]):
                    unheld[:] = (
                        one for one in unheld if not one.home.is_relative_to(place)
                    )  # it reports them
                    yield str(place)
            except FAILURES as error:
                failures[path] = error
                yield path

    siblings = Siblings(places.values(), is_recursive=True)

    def work(path: str) -> CheckReport:
        if path in failures:
            raise failures.pop(path)
        with watched(path):
            result = check(path, data=data, siblings=siblings, progress=control.go_on)
        if recursive:  # models below have a report of their own
            result = replace(result, not_checked=tuple(_unless_below(result)), below=())
        return result

    def lines(result: CheckReport, is_alone: bool) -> Iterator[Line]:
        if not report.quiet:
            yield from result.lines() if is_alone or _word(result) != _CLEAN else _in_one_line(result)
        elif result.status:
            report.path(result.path, null=null)

    try:
        with report.progress(f"reading {' '.join(paths)}") as progress:
            control = Control(progress)
            batch = visit(
                report, targets(), work, word=_word, keep=partial(report.element, "checkpoints"), lines=lines,
                annotations=_annotations, threads=1 if teams.current() is not None else _THREADS,
                stop=control.stop,
            )  # fmt: skip
    except KeyboardInterrupt:
        if not report.has_begun:
            raise
        return report.finish({"error": "interrupted: nothing was changed"}, INTERRUPTED)
    for one in unheld:
        report.message(f"ckptfix: {one.home}: could not finish: {one.key!r}: {one}")
        batch.status = max(batch.status, 3)
    if batch.is_of_many:
        report.show(batch.lines(_ORDER))
    summary = {"summary": batch.summary(_ORDER)} if report.form is Form.JSONL else {"checkpoints": ()}
    return report.finish(summary, batch.status)


def _annotations(result: CheckReport) -> Iterator[Annotation]:
    """Yield the findings of a checkpoint with what to do about each, and what may not be read."""
    for finding in result.all_findings:
        sentences = [str(finding), finding.advice_at(str(result.path))]
        if finding.is_fixable:
            sentences.append(f"next: {command('repair', result.path)}")
        words = "; ".join(filter(None, sentences))
        yield Annotation(finding.severity, words, result.folder.root / finding.path, finding.code)
    for words in result.all_unfinished:
        yield Annotation(Severity.ERROR, f"could not finish: {words}", result.path)


def _word(result: CheckReport) -> str:
    if result.status == 0:
        return _STAGING if _is_staging(result) else _CLEAN
    if result.status == 3:
        return _UNFINISHED
    is_damaged = any(finding.severity is Severity.ERROR for finding in result.all_findings)
    return _DAMAGED if is_damaged else _WARNED


def _is_staging(result: CheckReport) -> bool:
    return any(isinstance(one, StagingFolder) and not one.path.parts for one in result.findings)


def _in_one_line(result: CheckReport) -> Iterator[Line]:
    """Yield one line about a checkpoint without errors and warnings, and what was not checked of it."""
    codes = sorted({finding.code for finding in result.all_findings})
    notes = f"; {count_of(len(result.all_findings), 'note')}: {', '.join(codes)}" if codes else ""
    yield line(f"{result.path}: {result.counts}: no error found{notes}")
    yield from map(unchecked_line, result.not_checked)


def _unless_below(result: CheckReport) -> Iterator[str]:
    """Yield what was not checked, without the folders into which ``--recursive`` looks: all but links."""
    below = tuple(
        f"{name}/ ({PLAIN_FOLDER}): not looked into"
        for name in result.folder.subfolders
        if not os.path.islink(result.folder.root / name)
    )
    return (words for words in result.not_checked if not words.startswith(below))
