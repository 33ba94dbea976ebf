"""``ckptfix salvage``."""

import click

from ckptfix.cli.endings import interruptible
from ckptfix.cli.interrupts import state_after_writing
from ckptfix.cli.report import Report


@click.command("salvage")
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("output", metavar="DST", type=click.Path())
@click.option(
    "--keep-damaged",
    is_flag=True,
    help="Keep what is all there but fails its checksum or its digest in the manifest, too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def salvage_command(source: str, output: str, keep_damaged: bool, as_json: bool) -> int:
    """Write what is whole of a damaged checkpoint SRC, a file or a folder, into the new folder DST.

    DST/salvage.json lists what is lost. Exit status: 0 nothing is, 1 something is, 3 nothing could be saved.
    """
    from ckptfix.operations.salvage import salvage

    report = Report(as_json=as_json)
    with (
        interruptible(state_after_writing(source, output)),
        report.progress(f"salvaging {source}") as progress,
    ):
        receipt = salvage(source, output, keep_damaged=keep_damaged, progress=progress)
    report.show(receipt.lines())
    return report.finish(receipt.as_json(), receipt.status)
