"""``ckptfix scrub``."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from time import monotonic, time

import click

from ckptfix.cli.report import INTERRUPTED, Form, Report, ensure_writable, publish
from ckptfix.cli.runs import newest_sound
from ckptfix.cli.several_paths import Batch, Below, place_named, threads_for, visit
from ckptfix.cli.verb_options import PATH, LocalFile, Verb
from ckptfix.diagnosis.check_report import CLEAN, DIFFERENT
from ckptfix.diagnosis.run_page import Answer, run_page
from ckptfix.storage.files import AnyPath, absolute, is_url
from ckptfix.storage.parallel import Control, Share
from ckptfix.verification.scrub import (
    ORDER,
    Scrub,
    ScrubResult,
    cell_of,
    moment,
    parse_duration,
    parse_subset,
)
from ckptfix.verification.scrub_state import State, default_state
from ckptfix.wording import Line, count_of, escape, line


@click.command(
    "scrub",
    cls=Verb,
    rare=["--state"],
    unfit=lambda params: (
        "scrub divides a fleet among processes only with --shard I/N; each share has its own state "
        "file and report"
    ),
    forms=[Form.TEXT, Form.JSON, Form.JSONL],
    quiet="Print only the paths that are not clean, one per line, quoted for xargs.",
    examples=[
        (
            "ckptfix scrub runs",
            "Check every checkpoint under runs, and compare all data that has digests.",
        ),
        (
            "ckptfix scrub runs --read-data-subset 5%",
            "Read a twentieth of the data each night, and all of it in 20 nights.",
        ),
        (
            "ckptfix scrub s3://bucket/runs --max-duration 6h",
            "Stop after 6 hours; the next run continues.",
        ),
    ],
)
@click.argument("paths", nargs=-1, required=True, metavar="PATH_OR_URL...", type=PATH)
@click.option(
    "--read-data-subset", "subset", default="100%", metavar="P%|I/N", show_default=True,
    help=(
        "Read only this share of the files that have digests. P%: the next P% of them each "
        "night; 0%: none."
    ),
)  # fmt: skip
@click.option(
    "--max-duration",
    metavar="TIME",
    help="Start no new file after this time, such as 6h; the next run continues from there.",
)
@click.option(
    "--max-age", metavar="TIME",
    help="Skip what is unchanged and was checked or read within this time, such as 30d.",
)  # fmt: skip
@click.option(
    "--state", "state_file", type=LocalFile(dir_okay=False), metavar="FILE",
    help="Where to record what was checked and read.  [default: ~/.local/state/ckptfix/scrub.sqlite]",
)  # fmt: skip
@click.option(
    "--shard", metavar="I/N", help="Check only this share of the checkpoints: 0/N to N-1/N."
)
@click.option(
    "--html",
    type=LocalFile(dir_okay=False),
    metavar="FILE",
    help="Write all verdicts as one HTML page.",
)
def scrub_command(
    paths: tuple[str, ...], subset: str, max_duration: str | None, max_age: str | None,
    state_file: str | None, shard: str | None, html: str | None, report: Report,
) -> int:  # fmt: skip
    """Check many checkpoints, and read all data over several nights.

    Checks every checkpoint as check does, and compares part of the files with the digests that seal
    wrote. A state file records what was read and when. Each run continues where the last one
    stopped; --max-age skips what is unchanged. No checkpoint is changed.
    """
    until = (
        monotonic() + parse_duration(max_duration, "--max-duration")
        if max_duration
        else float("inf")
    )
    age = parse_duration(max_age, "--max-age") if max_age else None
    subsets = parse_subset(subset)
    share = Share.parse(shard) if shard is not None else None
    if html is not None:
        ensure_writable(report, html, [path for path in paths if not is_url(path)])
    roots = sorted({escape(place_named(path)) for path in paths})
    scope = json.dumps([roots, str(share or "")])
    file = Path(state_file) if state_file is not None else default_state(str(share or ""))
    with closing(State(file)) as state, ExitStack() as opened:
        chosen, begun = state.begin(scope, [str(one) for one in subsets] or ["none"])
        below = Below(paths, opened)
        with report.progress(f"reading {' '.join(paths)}") as progress:
            control = Control(progress)
            scrub = Scrub(
                state=state, scope=scope,
                subset=next((one for one in subsets if str(one) == chosen), None),
                since=begun if age is None else time() - age, until=until, progress=control.go_on,
                siblings=below.siblings(),
            )  # fmt: skip
            return _scrub(
                scrub, below, share, report, html, begun, threads_for(paths), control.stop
            )


def _scrub(
    scrub: Scrub, below: Below, share: Share | None, report: Report, html: str | None, begun: float,
    threads: int, stop: Callable[[], None],
) -> int:  # fmt: skip
    now = time()

    def work(path: str | AnyPath) -> ScrubResult:
        return scrub.look(below.listed(path))

    def lines(result: ScrubResult, is_alone: bool) -> Iterator[Line]:
        if not report.quiet:
            is_said = not result.is_kept or result.status
            yield from result.lines() if is_said else result.unchecked_lines()
        elif result.status:
            report.path(result.path, null=False)

    targets = (
        path
        for path in below
        if share is None or isinstance(path, str) or share.holds(escape(str(absolute(path))))
    )
    try:
        batch = visit(
            report, targets, work, word=lambda result: result.verdict, lines=lines, threads=threads,
            keep=partial(report.element, "checkpoints"), stop=stop,
        )  # fmt: skip
    except KeyboardInterrupt:
        words = "interrupted: nothing was changed; to continue, run the same command again"
        if not report.has_begun:
            report.message(f"ckptfix: {words}")
        return report.finish({"error": words}, INTERRUPTED)
    except Exception as error:
        return report.break_off(error)
    below.report_unheld(report, batch)
    gone = 0
    if not scrub.is_late:  # what could not be listed is not gone
        forget = 0.0 if below.failures else begun
        gone = scrub.state.end(scrub.scope, str(scrub.subset or "none"), forget)
    report.show(_summary(scrub, batch, gone, share))
    if html is not None:
        problem = publish(report, html, _page(scrub, now))
        batch.status = max(batch.status, 3 * bool(problem))
    listed = {} if report.form is Form.JSONL else {"checkpoints": ()}
    summary = {
        **listed,
        "summary": {
            **batch.summary(ORDER), "kept": scrub.kept, "unknown": scrub.unknown, "gone": gone,
            "without_digests": scrub.without_digests,
            "complete": not scrub.is_late and not scrub.total.due and not below.failures,
            "subset": str(scrub.subset or "none"), "since": moment(scrub.since),
            "data": scrub.total.as_json(),
        }
    }  # fmt: skip
    return report.finish(summary, batch.status)


def _page(scrub: Scrub, begun: float) -> str:
    """Return the page: every checkpoint that this or an earlier run has seen."""
    more = ""
    if scrub.unknown:
        many = count_of(scrub.unknown, "checkpoint")
        more = f"; not yet checked by any run, so not shown: {many}"
    names: defaultdict[str, dict[object, set[str]]] = defaultdict(
        lambda: {CLEAN: set(), DIFFERENT: set()}
    )
    for look in scrub.state.looks(scrub.scope):
        run, _, name = look.place.rpartition("/")
        names[run].get(look.verdict["verdict"], set[str]()).add(name)
    # One that differs may load with a changed script alone.
    answers = {
        run: Answer("", newest_sound(run, those[CLEAN]) or newest_sound(run, those[DIFFERENT]))
        for run, those in names.items()
    }
    cells = (cell_of(look, begun) for look in scrub.state.looks(scrub.scope))
    return run_page("scrub", begun, cells, answers, more)


def _summary(scrub: Scrub, batch: Batch, gone: int, share: Share | None) -> Iterator[Line]:
    """Yield what was not looked at and not read, in numbers, and how many checkpoints came to
    what.
    """
    since = moment(scrub.since)[:16].replace("T", " ")
    if scrub.kept:
        many = count_of(scrub.kept, "checkpoint")
        yield line(f"skipped: {many}, unchanged, and checked after {since}")
    if gone:
        yield line(f"gone since the last run: {count_of(gone, 'checkpoint')}")
    if scrub.without_digests:
        yield line(
            f"{count_of(scrub.without_digests, 'checkpoint')} without checksums; to write them: "
            "ckptfix seal CHECKPOINT"
        )
    if share is not None and not batch.words:
        why = "the path of a checkpoint decides its share"
        yield line(f"nothing to do: share {share} has no checkpoints ({why})")
    if scrub.total.files:
        part = (
            f"subset {scrub.subset}: "
            if scrub.subset is not None and scrub.subset.total > 1
            else ""
        )
        yield line(f"data: {part}{scrub.total}")
    if scrub.is_late:
        left = count_of(batch.words["not reached"], "checkpoint")
        left += f" ({scrub.unknown} never checked)" if scrub.unknown else ""
        left += (
            f", {count_of(scrub.total.due, 'file')} of other checkpoints" if scrub.total.due else ""
        )
        yield line(
            f"time limit reached; remaining: {left}; to continue, run the same command again"
        )
    yield from batch.lines(ORDER)
