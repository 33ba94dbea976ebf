"""``ckptfix merge`` of 0.5.0, which only says what to type now."""

import os
from pathlib import Path

import click

from ckptfix.cli.report import Report
from ckptfix.cli.teamwork import end_of
from ckptfix.cli.verb_options import PATH, Verb
from ckptfix.errors import UsageError
from ckptfix.storage.files import is_url
from ckptfix.storage.paths import shell_path
from ckptfix.storage.results import PartialResults, default_folder


@click.command("merge", cls=Verb, hidden=True)
@click.argument("path", metavar="DIR", type=PATH)
def merge_command(path: str, report: Report) -> int:
    """Print the command that combines the results of shares: the same one without --shard."""
    step = "run the same command as for the shares, without --shard"
    for folder in (Path(path), default_folder(Path(path))) if not is_url(path) else ():
        if (request := PartialResults(folder).request()) is not None:
            here = request.directory == os.getcwd()
            there = "" if here else f"cd {shell_path(request.directory)} && "
            step = f"{there}{end_of(request, Path(os.path.abspath(folder)))}"
            break
    raise UsageError(f"merge was removed in 0.6.0; to combine the results of the shares: {step}")
