"""``ckptfix seal``."""

import click

from ckptfix.cli.interrupts import state_after_seal
from ckptfix.cli.report import Report
from ckptfix.cli.several import run_each
from ckptfix.operations.sealing.seal import SealReceipt, seal


@click.command("seal")
@click.argument("paths", nargs=-1, required=True, metavar="DIR...", type=click.Path())
@click.option(
    "--force",
    is_flag=True,
    help="Seal a folder as it is, though it is damaged, or what its manifest lists is gone or changed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def seal_command(paths: tuple[str, ...], force: bool, as_json: bool) -> int:
    """Write the sha256 of every file and tensor of each DIR into its manifest, for ckptfix verify to compare with."""
    report = Report(as_json=as_json)

    def work(path: str) -> SealReceipt:
        with report.progress(f"reading {path}") as progress:
            return seal(path, force=force, progress=progress)

    return run_each(
        report,
        paths,
        work,
        word=lambda receipt: "sealed" if receipt.written else "refused",
        order=["refused", "sealed"],
        state_after=state_after_seal,
    )
