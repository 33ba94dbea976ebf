"""``ckptfix salvage``."""

import click

from ckptfix.cli.report import Report, interruptible
from ckptfix.cli.several_paths import state_after_writing
from ckptfix.cli.verb_options import PATH, Verb


@click.command(
    "salvage",
    cls=Verb,
    examples=[
        ("ckptfix salvage SRC DST", "Copy the intact tensors of SRC into the new folder DST."),
    ],
)
@click.argument("source", metavar="SRC", type=PATH)
@click.argument("output", metavar="DST", type=PATH)
@click.option(
    "--keep-damaged",
    is_flag=True,
    help=(
        "Also keep tensors that are complete but fail their checksum or their digest in the "
        "manifest."
    ),
)
def salvage_command(source: str, output: str, keep_damaged: bool, report: Report) -> int:
    """Recover the intact tensors of a damaged checkpoint.

    SRC: a file or a folder. DST: a new folder; its salvage.json lists what was lost.
    Exit status: 0 nothing was lost, 1 something was lost, 3 nothing could be recovered.
    """
    from ckptfix.conversion.salvage import salvage

    with (
        interruptible(state_after_writing(source, output)),
        report.progress(f"salvaging {source}") as progress,
    ):
        receipt = salvage(source, output, keep_damaged=keep_damaged, progress=progress)
    report.show(receipt.lines())
    return report.finish(receipt, receipt.status)
