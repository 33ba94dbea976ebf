"""``ckptfix undo``."""

import click

from ckptfix.cli.report import Report
from ckptfix.operations.undo import undo
from ckptfix.storage.paths import shell_path
from ckptfix.wording import count_of


@click.command("undo")
@click.argument("path", type=click.Path(exists=True))
@click.option(
    "--force", is_flag=True, help="Accept files whose modification time changed, but not their content."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def undo_command(path: str, force: bool, as_json: bool) -> int:
    """Take the last repair of PATH back, byte for byte."""
    report = Report(as_json=as_json)
    with report.progress(f"undoing {path}") as progress:
        receipt = undo(path, force=force, progress=progress)
    what = "an interrupted run" if receipt.recovered else "the last repair"
    report.line(f"took back {what} of {path}:", bold=True)
    report.few([f"  undone: {step}" for step in receipt.steps], "steps")
    if receipt.remaining:
        report.line(
            f"{count_of(receipt.remaining, 'earlier repair')} can be undone: ckptfix undo {shell_path(path)}"
        )
    return report.finish(receipt.as_json(), receipt.status)
