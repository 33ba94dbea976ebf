"""``ckptfix seal``."""

import click

from ckptfix.checkpoint.manifest import MANIFEST
from ckptfix.cli.report import Report
from ckptfix.cli.verdicts import print_differing
from ckptfix.operations.sealing.seal import SealReceipt, seal
from ckptfix.storage.paths import shell_path
from ckptfix.wording import count_of, human_size


@click.command("seal")
@click.argument("path", metavar="DIR", type=click.Path(exists=True))
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
    _print(report, receipt, path)
    return report.finish(receipt.as_json(), receipt.status)


def _print(report: Report, receipt: SealReceipt, path: str) -> None:
    report.findings(receipt.findings, path)
    print_differing(report, receipt.differing)
    where = shell_path(path)
    if not receipt.written:
        what = "differs from its manifest" if receipt.differing else "is damaged"
        verb = "verify" if receipt.differing else "check"
        report.line(f"{path} {what}: nothing was written", bold=True)
        report.line(f"next: ckptfix {verb} {where}, or, to seal it as it is: ckptfix seal --force {where}")
        return
    tensors = f" and {count_of(receipt.tensors, 'tensor')}" if receipt.tensors else ""
    size = human_size(receipt.nbytes)
    report.line(f"sealed {path}: {count_of(receipt.files, 'file')}{tensors}, {size}", bold=True)
    report.line(f"written: {MANIFEST}")
    for words in receipt.unreadable:
        report.line(f"not sealed: tensors of {words}")
    for words in receipt.special:
        report.line(f"not sealed: {words}")
    if receipt.transaction is not None:
        report.line(f"repairs can be undone here; this comes first: ckptfix undo {where}")
    report.line(f"next: ckptfix verify {where}")
