"""``ckptfix diff``."""

import click

from ckptfix.cli.pages import ensure_writable, write_page
from ckptfix.cli.report import Report


@click.command("diff")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
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
    if not as_json:  # the table of 100,000 tensors takes a second
        report.show(result.lines(show_all=show_all))
    if html is not None:
        from ckptfix.operations.diff.page import html_page

        write_page(html, html_page(result))
        report.line(f"page: {html}")
    return report.finish(result.as_json(iter), result.status)
