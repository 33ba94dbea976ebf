"""``ckptfix seal``."""

import click

from ckptfix.cli.report import Report
from ckptfix.operations.sealing.seal import seal


@click.command("seal")
@click.argument("path", metavar="DIR", type=click.Path())
@click.option(
    "--force",
    is_flag=True,
    help="Seal a folder as it is, though it is damaged, or what its manifest lists is gone or changed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def seal_command(path: str, force: bool, as_json: bool) -> int:
    """Write the sha256 of every file and tensor of DIR into its manifest, for ckptfix verify to compare with."""
    report = Report(as_json=as_json)
    with report.progress(f"reading {path}") as progress:
        receipt = seal(path, force=force, progress=progress)
    report.show(receipt.lines())
    return report.finish(receipt.as_json(), receipt.status)
