"""``ckptfix diff``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ckptfix.cli.pages import ensure_writable, write_page
from ckptfix.cli.report import Report
from ckptfix.wording import count_of

if TYPE_CHECKING:
    from ckptfix.operations.diff import DiffReport, ModelDiff
    from ckptfix.operations.diff.table import Row

_HEADS = ("outcome", "tensors", "dtype and shape", "max abs", "rel. norm", "differing")
_MOST_ROWS = 100
_WIDEST = 60
"""Columns wider than this are not padded for: one long name must not push all figures off the screen."""


@click.command("diff")
@click.argument("a", type=click.Path(exists=True))
@click.argument("b", type=click.Path(exists=True))
@click.option(
    "--rtol", type=float, metavar="R", help="Count |a - b| <= R * |a| (+ atol) as equal, any dtype."
)
@click.option("--atol", type=float, metavar="D", help="Count |a - b| <= D (+ rtol) as equal, any dtype.")
@click.option("--all", "show_all", is_flag=True, help="List equal tensors, too.")
@click.option("--html", type=click.Path(dir_okay=False), metavar="FILE", help="Write a page with a heat map.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with every tensor.")
def diff_command(
    a: str, b: str, rtol: float | None, atol: float | None, show_all: bool, html: str | None, as_json: bool
) -> int:
    """Compare the weights of the checkpoints A and B, of any formats, tensor by tensor.

    Exit status: 0 equal, 1 different, or values in a model that cannot be compared.
    """
    report = Report(as_json=as_json)
    if html is not None:
        ensure_writable(html, (a, b))
    from ckptfix.operations.diff import diff

    with report.progress(f"comparing {a} and {b}") as progress:
        result = diff(a, b, rtol=rtol, atol=atol, progress=progress)
    print_diff(report, result, show_all=show_all)
    if html is not None:
        from ckptfix.operations.diff.page import html_page

        write_page(html, html_page(result))
        report.line(f"page: {html}")
    return report.finish(result.as_json(iter), result.status)


def print_diff(report: Report, result: "DiffReport", *, show_all: bool) -> None:
    """Print what differs in each model, the verdict, and what was not compared."""
    if report.as_json:
        return
    report.line(f"A: {result.a}", bold=True)
    report.line(f"B: {result.b}", bold=True)
    for model in result.models:
        _print_model(report, model, show_all)
    if result.tolerance is not None:
        report.line(f"tolerance: |a - b| <= {result.tolerance[1]:g} + {result.tolerance[0]:g} * |a|")
    report.line(f"{result.verdict}: {result.summary}", colour="red" if result.status else "green")
    if result.positions:
        report.line(result.positions, colour="red")
    for words in result.notes:
        report.line(f"note: {words}")
    for words in result.not_compared:
        report.line(f"not compared: {words}")


def _print_model(report: Report, model: "ModelDiff", show_all: bool) -> None:
    from ckptfix.operations.diff.report import Outcome
    from ckptfix.operations.diff.table import rows

    names = f"; names matched {model.names}" if model.names else ""
    report.line(f"{model.a or '(none)'} against {model.b or '(none)'}{names}:", bold=True)
    found = rows(one for one in model.tensors if show_all or one.outcome is not Outcome.EQUAL)
    shown = found if show_all else found[:_MOST_ROWS]
    if not model.tensors:
        report.line("  no tensor that can be compared")
    elif shown:
        _print_table(report, [_HEADS, *map(_cells, shown)])
    else:
        report.line(f"  {count_of(len(model.tensors), 'tensor')}, bytes equal")
    if len(shown) < len(found):
        report.line(f"  and {len(found) - len(shown)} more rows; --all or --json lists them")


def _print_table(report: Report, table: Sequence[Sequence[str]]) -> None:
    widths = [min(_WIDEST, max(map(len, column))) for column in zip(*table, strict=True)]
    for cells in table:
        padded = (text.ljust(width) for text, width in zip(cells, widths, strict=True))
        report.line(f"  {'  '.join(padded)}".rstrip())


def _cells(row: "Row") -> tuple[str, ...]:
    if not row.elements:
        return row.outcome.value, row.names, row.kind, "", "", ""
    apart = f", {row.apart} of them NaN or Inf" if row.apart else ""
    share = f"{row.differing} of {row.elements}{apart}"
    return row.outcome.value, row.names, row.kind, f"{row.largest:.3g}", f"{row.relative:.3g}", share
