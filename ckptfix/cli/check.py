"""``ckptfix check``."""

import os
from collections.abc import Iterator
from dataclasses import replace

import click

from ckptfix.checkpoint.folder import PLAIN_FOLDER
from ckptfix.cli.report import Report
from ckptfix.errors import CkptfixError, UsageError
from ckptfix.operations.check import CheckReport, check
from ckptfix.operations.target import find_checkpoints


@click.command("check")
@click.argument("paths", nargs=-1, required=True, type=click.Path())
@click.option("--data", is_flag=True, help="Read every byte of look-alikes and check every checksum.")
@click.option("--recursive", "-r", is_flag=True, help="Check every checkpoint folder below PATHS.")
@click.option("--quiet", "-q", is_flag=True, help="Print only folders with errors or warnings.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check_command(paths: tuple[str, ...], data: bool, recursive: bool, quiet: bool, as_json: bool) -> int:
    """Say what is wrong with checkpoints. Reads headers and small samples; changes nothing."""
    report = Report(as_json=as_json)
    targets = [found for path in paths for found in find_checkpoints(path)] if recursive else list(paths)
    documents: list[dict[str, object]] = []
    worst = 0
    for target in targets:
        try:
            with report.progress(f"reading {target}") as progress:
                result = check(target, data=data, progress=progress)
                if recursive:
                    result = replace(result, not_checked=tuple(_unless_below(result)))
        except (CkptfixError, OSError) as error:
            if len(targets) == 1:
                raise
            status = 2 if isinstance(error, UsageError) else 3  # and go on: the other folders have answers
            report.message(f"ckptfix: {error}")
            documents.append({"path": str(target), "status": status, "error": str(error)})
        else:
            status = result.status
            documents.append(result.as_json())
            if not (quiet and status == 0):
                report.show(result.lines())
        worst = max(worst, status)
    return report.finish({"checkpoints": documents}, worst)


def _unless_below(result: CheckReport) -> Iterator[str]:
    """Yield what was not checked, without the folders into which ``--recursive`` looks: all but links."""
    below = {
        f"{name}/ ({PLAIN_FOLDER}): not looked into"
        for name in result.folder.subfolders
        if not os.path.islink(result.folder.root / name)
    }
    return (words for words in result.not_checked if words not in below)
