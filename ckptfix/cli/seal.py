"""``ckptfix seal``."""

import click

from ckptfix.cli.report import Report
from ckptfix.cli.several_paths import run_each, state_after_seal
from ckptfix.cli.verb_options import Verb
from ckptfix.verification.seal import SealReceipt, seal


@click.command(
    "seal",
    cls=Verb,
    examples=[
        ("ckptfix seal CHECKPOINT", "Write the manifest; ckptfix verify CHECKPOINT compares with it later."),
    ],
)
@click.argument("paths", nargs=-1, required=True, metavar="DIR...", type=click.Path())
@click.option(
    "--force",
    is_flag=True,
    help="Seal a folder as it is, though it is damaged, or what its manifest lists is gone or changed.",
)
def seal_command(paths: tuple[str, ...], force: bool, report: Report) -> int:
    """Write the checksums of checkpoints into their manifests.

    The manifest of each DIR gets the sha256 of every file and tensor, for ckptfix verify to compare with.
    """

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
