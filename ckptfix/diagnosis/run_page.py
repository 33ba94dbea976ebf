"""Runs and fleets as one HTML page, for ``check -r --html`` and ``scrub --html``: a run a row, time
from left to right, a checkpoint a cell. A click shows what was found, and what to type.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import groupby
from typing import NamedTuple

from ckptfix.diagnosis.check_report import CLEAN, DIFFERENT, VERDICTS
from ckptfix.pages import html_document, html_legend, html_lines, html_table, html_text
from ckptfix.wording import Line, count_of, human_size

_DAMAGED, _WARNED, *_ = VERDICTS
_CLASSES = {CLEAN: "clean", DIFFERENT: "warned", _DAMAGED: "damaged", _WARNED: "warned"}
"""The colour of each verdict; every other one says that something is not known."""

_LEGEND = (
    ("clean", "clean"),
    ("warned", f"{_WARNED}, or {DIFFERENT}"),
    ("damaged", "damaged"),
    (
        "unknown",
        "not a complete checkpoint (no weights, staging), or no verdict (not finished, failed)",
    ),
    ("newest", "the checkpoint to resume from"),
)
_OLD = ("old", "not checked in this run: verdict of an earlier run")


class Cell(NamedTuple):
    """A checkpoint on the page.

    ``nbytes``: of the files that were read, 0 where that is not known. ``about``: what a pointer at
    the cell shows next to the verdict. ``lines``: what was found. ``is_old``: an earlier run of the
    verb has looked at it.
    """

    place: str
    verdict: str
    nbytes: int = 0
    about: str = ""
    lines: tuple[Line, ...] = ()
    is_old: bool = False


class Answer(NamedTuple):
    """The answer for one run, in words. ``newest``: the checkpoint to resume from, "" where there
    is none.
    """

    text: str
    newest: str


def run_page(
    verb: str, moment: float, cells: Iterable[Cell], answers: Mapping[str, Answer], more: str = ""
) -> str:
    """Return the page. ``cells``: those of a run one after another. ``answers``: of runs, by their
    place. ``more``: words behind the counts.
    """
    rows: list[str] = []
    counts: Counter[str] = Counter()
    is_any_old = False
    for run, of_run in groupby(cells, run_place):
        shown = list(of_run)
        counts.update(cell.verdict for cell in shown)
        is_any_old |= any(cell.is_old for cell in shown)
        rows.append(_row(run, shown, answers.get(run, Answer("", ""))))
    words = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    total = f"{count_of(sum(counts.values()), 'checkpoint')}: {words or 'none was checked'}"
    at = datetime.fromtimestamp(moment).astimezone().isoformat(" ", "minutes")
    return html_document(
        f"ckptfix {verb}",
        [
            f"<p>{html_text(f'{at}: {total}{more}')}</p>",
            html_legend([*_LEGEND, _OLD] if is_any_old else _LEGEND),
            "<p>Click a checkpoint to see what was found.</p>",
            html_table("runs", (), rows),
        ],
    )


def run_place(cell: Cell) -> str:
    """Return the place of the run of a checkpoint."""
    return cell.place.rpartition("/")[0] or "."


def _row(run: str, cells: list[Cell], answer: Answer) -> str:
    said = f"<small>{html_text(answer.text)}</small>" if answer.text else ""
    shown = "".join(
        _cell(cell, is_newest=cell.place == answer.newest) for cell in sorted(cells, key=_in_order)
    )
    return f'<th scope="row">{html_text(run)}{said}</th><td><div class="cells">{shown}</div></td>'


def _in_order(cell: Cell) -> list[tuple[int, int, str]]:
    """Return a key that puts checkpoint_10 behind checkpoint_9."""
    name = cell.place.rpartition("/")[2]
    return [
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


def _cell(cell: Cell, *, is_newest: bool) -> str:
    css = " ".join(_classes(cell, is_newest))
    about = html_text("; ".join(filter(None, (cell.verdict, cell.about))))
    size = f"<small>{human_size(cell.nbytes)}</small>" if cell.nbytes else ""
    name = f"{html_text(cell.place.rpartition('/')[2])}{size}"
    if not cell.lines:
        return f'<span class="{css}" title="{about}">{name}</span>'
    return (
        f'<details class="{css}"><summary title="{about}">{name}</summary>'
        f'<div class="said"><p>{html_text(cell.place)}: {about}</p>{html_lines(cell.lines)}</div>'
        "</details>"
    )


def _classes(cell: Cell, is_newest: bool) -> Iterator[str]:
    yield "cell"
    yield _CLASSES.get(cell.verdict, "unknown")
    if cell.is_old:
        yield "old"
    if is_newest:
        yield "newest"
