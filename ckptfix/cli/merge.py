"""``ckptfix merge``."""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import click

from ckptfix.checkpoint.folder import scan_folder
from ckptfix.cli.report import Report
from ckptfix.cli.verb_options import PATH, Verb
from ckptfix.diagnosis.target import ensure_checkpoint
from ckptfix.errors import UsageError
from ckptfix.storage import teams
from ckptfix.storage.files import is_url
from ckptfix.storage.partial_results import PartialResults, Request, default_folder
from ckptfix.storage.paths import JOURNAL, existing, shell_path

_SHARED = ("check", "diff", "migrate", "seal", "verify")
"""Verbs that have shares: a folder of results names one of them, and never a command of its own
making.
"""


@click.command(
    "merge",
    cls=Verb,
    examples=[
        (
            "ckptfix merge CHECKPOINT",
            "Write the manifest from the results of ckptfix seal CHECKPOINT --shard I/N.",
        ),
        (
            "ckptfix merge FOLDER",
            "End what ran with --partial FOLDER, such as ckptfix verify --shard I/N.",
        ),
    ],
)
@click.argument("path", metavar="DIR", type=PATH)
def merge_command(path: str, report: Report) -> int:
    """Combine the results of --shard runs.

    DIR is the folder of --partial, or the checkpoint that a seal had shares of. Names the shares
    that are missing; when all are there, it prints and writes what the verb does in one process,
    and removes their results.
    """
    if is_url(path):
        raise UsageError(
            f"{path}: results of shares lie in a folder of this machine, that of --partial"
        )
    # The verb runs in the working directory of the shares.
    existing(path)
    folder = Path(os.path.abspath(path))
    results = PartialResults(folder)
    request = results.request()
    if request is None:
        results = PartialResults(default_folder(folder))
        request = results.request()
    if request is None:
        # Without a checkpoint in it this command would end in an error, too.
        ensure_checkpoint(scan_folder(folder), "merge")
        raise UsageError(
            f"{path} holds no results of shares: none has run, or they are merged already; next: "
            f"ckptfix seal {shell_path(Path(path))} --shard 0/2"
        )
    if request.version:
        raise UsageError(
            f"{results.folder} holds results of another ckptfix: {request}; next: merge them with "
            f"that version, or begin again: rm -r {shell_path(results.folder)}"
        )
    if results.folder.parent.name == JOURNAL and not _is_of(request, results.folder.parent.parent):
        raise UsageError(
            f"{results.folder} holds results of another folder than this one, which was copied or "
            f"renamed since: {request}; next: rm -r {shell_path(results.folder)}, and start every "
            "share again"
        )
    if request.verb not in _SHARED:
        raise UsageError(
            f"{results.folder}: {request.verb!r} has no shares to merge; next: {request.command} "
            f"--partial {shell_path(results.folder)}"
        )
    verb = getattr(import_module(f"ckptfix.cli.{request.verb}"), f"{request.verb}_command")
    params = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in request.params.items()
    }
    here = os.getcwd()
    os.chdir(request.directory)
    team = teams.Merger(
        results,
        max(1, request.shares),
        lambda share: _command(request, results.folder, str(share), here),
    )
    call: Callable[..., int] = verb.callback
    with teams.working_in(team):
        status = call(**params, report=report)
    if status in (0, 1):
        results.remove()
    return status


def _is_of(request: Request, checkpoint: Path) -> bool:
    """Return whether a request is a seal of this checkpoint: only that one keeps its results
    there.
    """
    paths = request.params.get("paths")
    if request.verb != "seal" or not isinstance(paths, list) or len(paths) != 1:
        return False
    return os.path.realpath(Path(request.directory, str(paths[0]))) == os.path.realpath(checkpoint)


def _command(request: Request, folder: Path, share: str, here: str) -> str:
    """Return the command that does a share again, to be pasted in the folder ``here``."""
    own = tuple(request.params.get("paths") or ())
    default = len(own) == 1 and Path(os.path.abspath(default_folder(Path(own[0])))) == folder
    partial = "" if default else f" --partial {shell_path(folder)}"
    there = "" if here == request.directory else f"cd {shell_path(request.directory)} && "
    return f"{there}{request.command} --shard {share}{partial}"
