"""``ckptfix undo``."""

import click

from ckptfix.cli.interrupts import state_after_undo
from ckptfix.cli.report import Report
from ckptfix.cli.several import run_each
from ckptfix.operations.undo import UndoReceipt, undo


@click.command("undo")
@click.argument("paths", nargs=-1, required=True, type=click.Path())
@click.option(
    "--force",
    is_flag=True,
    help="For journals of ckptfix 0.4.0, and killed repairs: accept files whose time changed, not their size or ends.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def undo_command(paths: tuple[str, ...], force: bool, as_json: bool) -> int:
    """Undo the last repair of each of PATHS, byte for byte."""
    report = Report(as_json=as_json)

    def work(path: str) -> UndoReceipt:
        with report.progress(f"undoing {path}") as progress:
            return undo(path, force=force, progress=progress)

    return run_each(
        report, paths, work, word=lambda receipt: "undone", order=["undone"], state_after=state_after_undo
    )
