"""``ckptfix check``."""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, ClassVar

import click

from ckptfix.checkpoint.completion_markers import run_of, tracker_problem
from ckptfix.checkpoint.filenames import family_of
from ckptfix.checkpoint.latest import Candidate, judge, numbered, taken_instead, time_of
from ckptfix.checkpoint.neighbours import Siblings
from ckptfix.cli.annotations import Annotation
from ckptfix.cli.report import FAILURES, INTERRUPTED, Form, Report, ending_of
from ckptfix.cli.several_paths import Below, check_verbosely, threads_for, visit
from ckptfix.cli.verb_options import PATH, Verb
from ckptfix.dataclass import dataclass
from ckptfix.diagnosis.check import CLEAN, VERDICTS, CheckReport, check
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.diagnosis.other_runs import DAY, History, OtherRun, days_between, history_of
from ckptfix.diagnosis.resumable import choose, examine
from ckptfix.errors import CkptfixError
from ckptfix.reports import Serialized
from ckptfix.storage import teams
from ckptfix.storage.doors import made
from ckptfix.storage.parallel import Control
from ckptfix.storage.paths import command
from ckptfix.wording import Line, line, series

if TYPE_CHECKING:
    # A check without --load must start quickly.
    from ckptfix.diagnosis.loads.outcome import Loaders


@click.command(
    "check",
    cls=Verb,
    shared=lambda params: "",
    forms=list(Form),
    quiet="Print only the paths that are not clean, one a line, quoted where xargs needs it.",
    examples=[
        ("ckptfix check CHECKPOINT", "Find what is wrong with one checkpoint."),
        ("ckptfix check -r runs", "Check every checkpoint below runs, and name the one to resume from."),
        ("ckptfix check -r -0 runs | xargs -r0 ckptfix repair", "Repair every checkpoint that is not clean."),
    ],
)
@click.argument("paths", nargs=-1, required=True, type=PATH)
@click.option(
    "--data", is_flag=True, help="Read every byte of look-alikes, and compare the checksums inside of files."
)
@click.option(
    "--load",
    "loads",
    is_flag=True,
    help="Ask the installed transformers, PEFT or diffusers what they load. Reads no tensor, runs no remote code.",
)
@click.option("--recursive", "-r", is_flag=True, help="Check every checkpoint folder below PATHS.")
@click.option(
    "--verbose",
    "-v",
    is_flag=True,
    help="List every model, and everything that was not checked with the command that checks it.",
)
@click.option(
    "--null",
    "-0",
    is_flag=True,
    help="As --quiet, each path unquoted and with a NUL behind it: for xargs -0.",
)
def check_command(
    paths: tuple[str, ...],
    data: bool,
    loads: bool,
    recursive: bool,
    verbose: bool,
    null: bool,
    report: Report,
) -> int:
    """Find what is wrong with checkpoints.

    Reads headers and small samples of tensors; changes nothing.
    """
    report.quiet |= null
    if report.quiet and verbose:
        raise click.UsageError(f"--verbose and --{'null' if null else 'quiet'} contradict each other")
    with ExitStack() as images:
        loaders = images.enter_context(_loaders(recursive)) if loads else None
        return _check_all(paths, data, loaders, recursive, verbose, null, report, images)


def _loaders(is_of_many: bool) -> "Loaders":
    from ckptfix.diagnosis.loads.outcome import Loaders

    return Loaders(is_of_many=is_of_many)


def _check_all(
    paths: tuple[str, ...],
    data: bool,
    loaders: "Loaders | None",
    recursive: bool,
    verbose: bool,
    null: bool,
    report: Report,
    images: ExitStack,
) -> int:
    below = Below(paths if recursive else (), images)
    siblings = Siblings(below.places.values(), is_recursive=True)
    runs = Runs(below.places.values())

    def work(path: str) -> CheckReport:
        below.ensure_listed(path)
        runs.begin(Path(path))
        with made(path) as place:
            near = siblings if recursive else ()
            result = check(
                place,
                data=data,
                siblings=near,
                resumes=True,
                load=loaders or False,
                progress=control.go_on,
            )
            runs.end(Path(path), Path(place), result.known)
        if recursive:  # models below have a report of their own
            result = result.alone()
        return result

    def lines(result: CheckReport, is_alone: bool) -> Iterator[Line]:
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

    try:
        with report.progress(f"reading {' '.join(paths)}") as progress:
            control = Control(progress)
            batch = visit(
                report, below if recursive else paths, work, word=lambda result: result.verdict, lines=lines,
                keep=partial(report.element, "checkpoints"), annotations=_annotations,
                threads=1 if teams.current() is not None else threads_for(paths), stop=control.stop,
            )  # fmt: skip
    except KeyboardInterrupt:
        if not report.has_begun:
            raise
        return report.finish({"error": "interrupted: nothing was changed"}, INTERRUPTED)
    except Exception as error:
        return report.break_off(error)
    below.report_unheld(report, batch)
    if batch.is_of_many:
        options = ("--data",) * data + ("--load",) * (loaders is not None) + ("-r",) * recursive
        details = "" if verbose or report.is_annotated else check_verbosely(paths, *options)
        report.show(batch.lines(VERDICTS, details=details))
    summary: dict[str, object] = (
        {"summary": batch.summary(VERDICTS)} if report.form is Form.JSONL else {"checkpoints": ()}
    )
    if recursive:
        answers = runs.answers() if teams.leads() else []
        warnings = [
            f"{one.taken_instead}; next: move it out of the folder" for one in answers if one.taken_instead
        ]
        warnings += [one.other_run for one in answers if one.other_run]
        trackers = runs.tracker_problems() if teams.leads() else []
        warnings += [
            f"{words}; a resume fails or begins anew; next: write the number of a complete checkpoint into the file"
            for words in trackers
        ]
        if trackers:
            summary["trackers"] = trackers
        report.show(line(words, colour="yellow") for words in warnings)
        report.show(line(one.text) for one in answers)
        summary["resume"] = answers
        return report.finish(summary, batch.status or int(bool(warnings)))
    return report.finish(summary, batch.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Serialized):
    """The checkpoint of one run folder to resume from, as ``latest_checkpoint`` chooses it; None where it finds none.

    ``problem``: why there is none, or what speaks against it. ``clean``: the newest complete one in which check found
    no problem, where that is another one. ``passed_over``: incomplete ones that are newer. ``taken_instead``: another
    entry of the folder that stock ``load_state()`` takes, or for which it fails, in words. ``unexplained``: the
    incomplete ones in which check found nothing, each with what it lacks. ``other_run``: what shows that the highest
    number is of an older run, in words.
    """

    json_keys: ClassVar = "run checkpoint problem clean? passed_over taken_instead? other_run?"

    run: Path
    checkpoint: Path | None
    problem: str = ""
    clean: Path | None = None
    passed_over: tuple[str, ...] = ()
    taken_instead: str = ""
    unexplained: tuple[str, ...] = ()
    other_run: str = ""

    @property
    def text(self) -> str:
        """The answer as a sentence."""
        if self.checkpoint is None:
            return f"{self.run}: no checkpoint to resume from: {self.problem}"
        but = f", {self.problem}" if self.problem else ""
        if self.clean is not None:
            but += f"; the newest one without problems: {self.clean}"
        if self.unexplained:
            but += f"; newer, and not complete: {'; '.join(self.unexplained)}"
        return f"resume from {self.checkpoint}, the newest complete one{but}"


class Runs:
    """The run folders below several places. Several threads check their checkpoints one by one.

    What is kept of a run are its folder and the names of its checkpoints that are not clean: a fleet may have 100,000.
    """

    def __init__(self, places: Iterable[Path]) -> None:
        self._places = frozenset(os.path.abspath(place) for place in places)
        self._unclean: dict[Path, set[str]] = {}
        self._runs: dict[Path, None] = {}
        self._newest: dict[Path, frozenset[Path]] = {}
        self._compared: dict[Path, frozenset[Path]] = {}
        self._histories: dict[Path, History | None] = {}
        self._known: dict[Path, Candidate] = {}
        self._saved_last: dict[tuple[Path, str], tuple[float, int, str]] = {}
        self._lock = Lock()

    def begin(self, path: Path) -> None:
        """Remember a checkpoint of a run, which is not clean before ``end`` says so."""
        home = run_of(path)
        with self._lock:
            self._runs[home] = None
        run = Path(os.path.abspath(path.parent))
        if family_of(path.name) is not None and not self._places.isdisjoint(map(str, (run, *run.parents))):
            with self._lock:
                self._unclean.setdefault(path.parent, set()).add(path.name)

    def end(self, path: Path, place: Path, status: int) -> None:
        """Take the exit status of a checkpoint. ``place``: the folder that was made of it where a store has it.

        There the newest one is looked at now, and the histories that ``other_run`` compares first are read: what was
        read of these checkpoints is in memory still, and costs no second request.
        """
        run, family = path.parent, family_of(path.name)
        time = time_of(place)
        with self._lock:
            if run not in self._unclean or family is None:
                return
            if time is not None:
                key, saved = (run, family[0]), (time, family[1], path.name)
                self._saved_last[key] = max(saved, self._saved_last.get(key, saved))
            if not status:
                self._unclean[run].discard(path.name)
            if place == path:
                return
            if run not in self._newest:
                families = numbered(run).values()
                self._newest[run] = frozenset(folders[0][1] for folders in families)
                self._compared[run] = frozenset(
                    folders[place][1] for folders in families for place in (0, min(1, len(folders) - 1), -1)
                )
            is_newest, is_compared = path in self._newest[run], path in self._compared[run]
        if is_compared:
            self._histories[path] = history_of(place)
        if is_newest:
            look = examine if status else judge
            self._known[path] = replace(look(place, family[1]), path=path)

    def tracker_problems(self) -> list[str]:
        """Return in words what is wrong with the trackers of the runs, as of ``tracker_problem``."""
        problems = []
        for run in self._runs:
            with suppress(CkptfixError, OSError):
                if words := tracker_problem(run):
                    problems.append(f"{run}: {words}")
        return problems

    def answers(self) -> list[Resume]:
        """Return the answer for each run, by the function behind ``latest_checkpoint``."""
        answers = []
        for run in self._unclean:
            taken = ""
            # stock accelerate loads from a disk alone
            with suppress(OSError):
                taken = taken_instead(run)
            answers.append(replace(self._answer(run), taken_instead=taken))
        return answers

    def _answer(self, run: Path) -> Resume:
        def look(path: Path, number: int) -> Candidate:
            # Of a checkpoint in which check found nothing, the rest is told by its names and headers.
            is_clean = path.name not in self._unclean[run] and not path.is_symlink()
            return self._known.get(path) or (judge if is_clean else examine)(path, number)

        def look_for_clean(path: Path, number: int) -> Candidate:
            if path.name in self._unclean[run]:
                return Candidate(path=path, number=number, problem="check found problems")
            return look(path, number)

        def read(path: Path) -> History | None:
            return self._histories[path] if path in self._histories else history_of(path)

        try:
            choice = choose(run, look=look, read=read)
        except FAILURES as error:
            return Resume(run=run, checkpoint=None, problem=ending_of(error).message)
        if choice is None:
            return Resume(run=run, checkpoint=None, problem="its checkpoints are gone")
        passed_over = tuple(one.path.name for one in choice.passed_over)
        if choice.best is None:
            problem = "; ".join(f"{one.path.name}: {one.problem}" for one in choice.passed_over[:3])
            problem += f"; and {len(passed_over) - 3} more" if len(passed_over) > 3 else ""
            names = series([one.path.name for one in choice.rivals])
            if choice.proof:
                problem = f"{names} are complete, and of two runs"
                words = f"{run}: {names} are of two runs ({choice.proof}); next: move the older run out of the folder"
                return Resume(
                    run=run, checkpoint=None, problem=problem, passed_over=passed_over, other_run=words
                )
            if choice.rivals:
                problem = f"{names} are complete, and their times do not say which is newer"
            return Resume(run=run, checkpoint=None, problem=problem, passed_over=passed_over)
        best, problem = choice.best.path, ""
        clean: Path | None = None
        if best.name in self._unclean[run]:
            problem = "but check found problems in it (see above)"
            other = choose(run, look=look_for_clean, read=read)
            clean = other.best.path if other is not None and other.best is not None else None
        elif best.is_symlink():
            problem = "but it is a symbolic link, which check -r does not follow"
        unexplained = tuple(
            f"{one.path.name}: {one.problem}"
            for one in choice.passed_over
            if one.path.name not in self._unclean[run]
        )
        return Resume(
            run=run, checkpoint=best, problem=problem, clean=clean, passed_over=passed_over,
            unexplained=unexplained[:3],
            other_run=_abandoned(run, best, choice.abandoned) or self._saved_later(run, choice.best),
        )  # fmt: skip

    def _saved_later(self, run: Path, best: Candidate) -> str:
        """Return in words that a lower number was saved days after the highest one, "" where none was."""
        family = family_of(best.path.name)
        saved = self._saved_last.get((run, family[0])) if family is not None else None
        if saved is None or best.time is None or saved[1] >= best.number or saved[0] - best.time <= DAY:
            return ""
        return (
            f"{run}: {saved[2]} was saved {days_between(best.time, saved[0])} after {best.path.name}, which may be of "
            "an older run; next: move the older run out of the folder, or ignore this if the files were copied"
        )


def _abandoned(run: Path, best: Path, other: OtherRun | None) -> str:
    """Return in words that an older checkpoint is of another run, "" where none is."""
    if other is None:
        return ""
    name = other.candidate.path.name
    return (
        f"{run}: {best.name} and {name} are of two runs ({other.proof}), and {name} was saved before; next: move "
        f"{name} out of the folder"
    )


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
