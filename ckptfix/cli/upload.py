"""``ckptfix upload``."""

import click

from ckptfix.cli.report import Report, interruptible
from ckptfix.cli.several_paths import state_after_upload
from ckptfix.cli.verb_options import PATH, Verb


@click.command(
    "upload",
    cls=Verb,
    examples=[
        (
            "ckptfix upload FOLDER s3://bucket/run/checkpoint_7",
            "Copy FOLDER to a store, with the commit marker last.",
        ),
    ],
)
@click.argument("folder", metavar="FOLDER", type=PATH)
@click.argument("url", metavar="URL", type=PATH)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace what exists at URL, once the new checkpoint is fully uploaded.",
)
def upload_command(folder: str, url: str, overwrite: bool, report: Report) -> int:
    """Copy a complete checkpoint to an object store.

    FOLDER: a checkpoint, or the folder of a save whose upload failed. URL: for example
    s3://BUCKET/RUN/checkpoint_7. The commit marker is written last: without it, the uploaded files
    do not count as a checkpoint.
    """
    from ckptfix.conversion.uploading import upload

    around = interruptible(state_after_upload(folder, url))
    with around, report.progress(f"uploading {folder}") as progress:
        receipt = upload(folder, url, overwrite=overwrite, progress=progress)
    report.show(receipt.lines())
    return report.finish(receipt, receipt.status)
