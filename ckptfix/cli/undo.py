"""``ckptfix undo``."""

import click

from ckptfix.cli.report import Report
from ckptfix.operations.undo import undo


@click.command("undo")
@click.argument("path", type=click.Path())
@click.option(
    "--force",
    is_flag=True,
    help="For journals of ckptfix 0.4.0, and killed repairs: accept files whose time changed, not their size or ends.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def undo_command(path: str, force: bool, as_json: bool) -> int:
    """Undo the last repair of PATH, byte for byte."""
    report = Report(as_json=as_json)
    with report.progress(f"undoing {path}") as progress:
        receipt = undo(path, force=force, progress=progress)
    report.show(receipt.lines())
    return report.finish(receipt.as_json(), receipt.status)
