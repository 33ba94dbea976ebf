"""``ckptfix diff``."""

import click

from ckptfix.cli.report import Report, ensure_writable, publish
from ckptfix.cli.verb_options import PATH, LocalFile, Verb
from ckptfix.storage.executor import Executor


@click.command(
    "diff",
    cls=Verb,
    rare=["--rtol", "--atol"],
    shared=lambda params: "",
    examples=[
        ("ckptfix diff A B", "List the tensors that differ; the exit status is 1 if any do."),
        (
            "ckptfix diff A B --atol 1e-6 --html diff.html",
            "Ignore differences of up to 1e-6, and write a page with a heat map.",
        ),
    ],
)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option(
    "--rtol",
    type=float,
    metavar="R",
    help="Treat values as equal if |a - b| <= R * |a| (+ atol), in any dtype.",
)
@click.option(
    "--atol",
    type=float,
    metavar="D",
    help="Treat values as equal if |a - b| <= D (+ rtol), in any dtype.",
)
@click.option(
    "--model", metavar="MODULE:FACTORY",
    help="A function that returns the run's models: DDP optimizers store no parameter names, so "
    "the models supply them.",
)  # fmt: skip
@click.option("--all", "show_all", is_flag=True, help="Also list equal tensors.")
@click.option(
    "--html", type=LocalFile(dir_okay=False), metavar="FILE", help="Write a page with a heat map."
)
def diff_command(
    a: str, b: str, rtol: float | None, atol: float | None, model: str | None, show_all: bool,
    html: str | None, report: Report, executor: Executor,
) -> int:  # fmt: skip
    """Compare the weights and optimizers of two checkpoints.

    Lists every tensor, step and hyperparameter that differs between A and B.

    Exit status: 0 if everything compared is equal; 1 if something differs, or if equality is not
    proven because values of a model, or an optimizer that both have, cannot be compared.
    """
    if html is not None:
        ensure_writable(report, html, (a, b))
    from ckptfix.verification.diff import diff

    with report.progress(f"comparing {a} and {b}") as progress:
        result = diff(a, b, rtol=rtol, atol=atol, model=model, progress=progress, executor=executor)
    report.show(result.lines(show_all=show_all))
    if html is not None:
        from ckptfix.verification.diff_page import html_page

        if publish(report, html, html_page(result)):
            return report.finish(result, 3)
    return report.finish(result, result.status)
