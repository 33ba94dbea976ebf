"""``ckptfix undo``."""

import click

from ckptfix.cli.report import Report
from ckptfix.cli.several_paths import run_each, state_after_undo
from ckptfix.cli.verb_options import BREAK_LOCK, PATH, TRANSFER, Verb
from ckptfix.repairs.undo import UndoReceipt, undo


@click.command(
    "undo",
    cls=Verb,
    examples=[
        ("ckptfix undo CHECKPOINT", "Undo the last repair of CHECKPOINT."),
    ],
)
@click.argument("paths", nargs=-1, required=True, type=PATH)
@click.option(
    "--force",
    is_flag=True,
    help=(
        "For journals of ckptfix 0.4.0 and for killed repairs: accept files with a new "
        "modification time but the same size, first bytes and last bytes."
    ),
)
@TRANSFER
@BREAK_LOCK
def undo_command(
    paths: tuple[str, ...], force: bool, transfer: bool, break_lock: bool, report: Report
) -> int:
    """Undo the last repair, or the seal after it, byte for byte."""

    def work(path: str) -> UndoReceipt:
        with report.progress(f"undoing {path}") as progress:
            return undo(
                path, force=force, transfer=transfer, break_lock=break_lock, progress=progress
            )

    return run_each(
        report,
        paths,
        work,
        word=lambda receipt: "undone",
        order=["undone"],
        state_after=state_after_undo,
    )
