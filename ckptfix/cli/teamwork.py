"""A verb in several processes: those of torchrun, accelerate launch or Slurm, or one by one as
tasks of a job array.
"""

import os
import shlex
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptfix.cli.report import Form, Interrupted, Report, put
from ckptfix.errors import CkptfixError, TeamError, UsageError
from ckptfix.storage.executor import THREADS, Executor, Remembering, Sharded
from ckptfix.storage.files import is_url
from ckptfix.storage.parallel import Share
from ckptfix.storage.paths import existing, shell_path
from ckptfix.storage.results import PartialResults, Request, default_folder, own_version
from ckptfix.wording import count_of, escape, human_size

if TYPE_CHECKING:
    from ckptfix.storage.launched_ranks import LaunchedRanks

_PLACES = ("RANK", "SLURM_PROCID")
"""Without one of these variables no launcher started this process, and nothing more is imported to
find out.
"""

_ONE_PROCESS = "next: run it in one process, without the launcher, or with CKPTFIX_TEAM=0"

TO_CONTINUE = "run the same command again to continue where this run stopped"


class Process:
    """This process of a command line: its report, and the ranks that it has joined, None alone."""

    def __init__(self, form: Form = Form.TEXT) -> None:
        self.report = Report(form)
        self.ranks: LaunchedRanks | None = None

    def leave(self, status: int) -> int:
        """Return the exit status of rank 0, on every rank. Everything must have been printed by
        now.
        """
        if self.ranks is None:
            return status
        if not self.ranks.leads:
            # Ctrl-C reaches rank 0, too, which says in what state it left the folder.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return self.ranks.finish(status)
        except TeamError:
            return status if self.ranks.leads else max(status, 3)


def share_options() -> list[click.Parameter]:
    """Return the options of a verb that several processes can share."""
    return [
        click.Option(
            ["--shard"], metavar="I/N",
            help="Do part I of N (I from 0 to N-1), without a network. The same command without --shard "
            "combines the results.",
        ),
        click.Option(
            ["--partial"], metavar="FOLDER", type=click.Path(file_okay=False),
            help="Keep results in FOLDER, so the next run can continue if this one is interrupted.",
        ),
    ]  # fmt: skip


def run_shared(
    verb: str, params: Mapping[str, Any], process: Process, shard: str | None, partial: str | None,
    work: Callable[[Executor], int], unfit: str,
) -> int:  # fmt: skip
    """Run a verb with the executor that it was started for; return its exit status.

    ``params``: the verb's own. ``unfit``: why its work has no shares, "" where it has.
    """
    report = process.report

    def say(words: str) -> None:
        report.put(f"ckptfix: {words}", err=True)

    place = _launched()
    if place is None and shard is None and not unfit and not report.quiet:
        _say_alone(say)
    paths = [str(path) for path in params.get("paths", ())]
    # The only verb that writes into a checkpoint anyway.
    is_lone_seal = partial is None and verb == "seal" and len(paths) == 1 and not is_url(paths[0])
    is_default = is_lone_seal and os.path.isdir(paths[0])
    folder = default_folder(Path(paths[0])) if is_default else None
    if unfit and (shard is not None or partial is not None):
        raise UsageError(f"{unfit}; leave out {'--shard' if shard is not None else '--partial'}")
    if unfit and place is not None:
        raise UsageError(f"{unfit}; {_ONE_PROCESS}")
    if partial is not None:
        if not partial or is_url(partial):
            raise UsageError(
                f"--partial {shell_path(partial)}: expected a local folder for the results"
            )
        folder = Path(partial)
        _ensure_outside(folder, verb, _paths(params))
    results = PartialResults(folder) if folder is not None else None
    if shard is not None:
        share = Share.parse(shard)
        if place is not None and share != (place.rank, place.total):
            raise UsageError(
                f"--shard {shard} in process {place.rank} of {place.total}: leave out --shard "
                f"under a launcher, or write --shard {place.share}"
            )
        return _run_share(verb, params, report, share, results, work)
    request = _request(verb, params)
    if place is None:
        old = results.request() if results is not None else None
        if results is not None and old is not None and old.shares and old.is_same(request):
            return _finish(Remembering(results, say, old.shares), work)
        if results is None or partial is None:
            return work(THREADS)
        results.begin(request)
        return _finish(Remembering(results, say), work)
    own = "" if is_default else f" --partial {shell_path(partial or 'FOLDER')}"
    words = f"{request.command}{own} --shard {place.share}"
    remedy = "run it again with --partial FOLDER, which keeps the results if it fails again"
    if results is not None:
        remedy = TO_CONTINUE
    share_words = f"start each process as a share: bash -c {shlex.quote(words)}"
    ranks = _joined(process, place, results, share_words, remedy, say)

    def begun(executor: Executor) -> int:
        if ranks.leads and results is not None:
            results.begin(request)
        return work(executor)

    with ranks.as_one():
        _ensure_alike(ranks, request)
    return _finish(ranks, begun)


def run_by_one(
    verb: str, params: Mapping[str, Any], process: Process, work: Callable[[], Any], unfit: str
) -> Any:
    """Run a verb whose work is not shared: rank 0 does it, and the others end with its status.

    ``params``: the verb's own. ``unfit``: why one process must not do it for all, "" where it may.
    """
    place = _launched()
    if place is None:
        return work()
    if unfit:
        raise UsageError(f"{unfit}; {_ONE_PROCESS}")
    request = _request(verb, params)
    remedy = f"CKPTFIX_TEAM=0 {request.command}"
    ranks = _joined(process, place, None, "run it in one process, without the launcher", remedy)
    with ranks.as_one():
        _ensure_alike(ranks, request)
    return work() if ranks.leads else 0  # in the end, the others wait for the leader's status


def _request(verb: str, params: Mapping[str, Any], shares: int = 0) -> Request:
    return Request(verb, dict(params), os.getcwd(), shares, words_of(params))


def _ensure_outside(folder: Path, verb: str, paths: Iterable[Path]) -> None:
    """Raise UsageError for results in a folder that the verb works on: they would be sealed, copied
    or missed there.
    """
    real = os.path.realpath(folder)
    for path in paths:
        if verb == "seal" and real == os.path.realpath(default_folder(path)):
            continue
        if os.path.commonpath([real, root := os.path.realpath(path)]) == root:
            raise UsageError(
                f"--partial {shell_path(folder)} is inside {shell_path(path)}, where its files "
                "would count as part of the checkpoint; next: choose a folder outside it"
            )


def _joined(
    process: Process,
    place: Any,
    results: PartialResults | None,
    apart: str,
    remedy: str,
    say: Callable[[str], None] = lambda words: None,
) -> "LaunchedRanks":
    """Join the ranks that were started with this process; from then on rank 0 alone prints.

    ``apart``: the next step where they cannot meet; ``remedy``: the one after a failure.
    """
    from ckptfix.storage.launched_ranks import LaunchedRanks
    from ckptfix.training.rendezvous import join

    process.report.is_silent = place.rank > 0
    try:
        exchange = join(place, apart)
    except TeamError as error:  # nobody knows whether rank 0 is there to print it
        if place.rank:
            _shout(TeamError(str(error)))
        raise
    process.ranks = LaunchedRanks(
        place.rank, place.total, exchange, partial=results, say=say, shout=_shout, remedy=remedy
    )
    return process.ranks


def _shout(error: TeamError) -> None:
    """Print an error though rank 0 prints for all, with the traceback of a fault of ckptfix."""
    put(f"ckptfix: {escape(str(error))}", err=True)
    cause = error.__cause__
    if cause is not None and not isinstance(cause, CkptfixError | OSError):
        import traceback  # never needed, one hopes

        put("".join(traceback.format_exception(cause)), err=True)


def _ensure_alike(ranks: "LaunchedRanks", request: Request) -> None:
    """Find out whether all were started with the same command, and see the same files. Raises
    OperationError.
    """
    version, command = own_version(), request.command
    ranks.ensure_same(
        lambda: version,
        lambda leader, theirs: (
            f"runs a different version of ckptfix than {leader}: {version} (expected {theirs}); "
            "next: install the same version on all nodes"
        ),
    )
    ranks.ensure_same(
        lambda: command,
        lambda leader, theirs: (
            f"runs a different command than {leader}: {command} (expected {theirs}); {_ONE_PROCESS}"
        ),
    )
    if not request.params.get("recursive"):  # many checkpoints are compared one by one
        from ckptfix.storage.launched_ranks import ensure_same_files

        ensure_same_files(ranks, _paths(request.params))


def _paths(params: Mapping[str, Any], *, is_of_output: bool = True) -> list[Path]:
    """Return the paths that a verb reads, URLs left out. ``is_of_output``: with the new one."""
    paths: list[Any] = []
    for parameter in click.get_current_context().command.params:
        is_read = isinstance(parameter, click.Argument) and (
            is_of_output or parameter.name != "dst"
        )
        if isinstance(parameter.type, click.Path) and is_read:
            value = params.get(str(parameter.name)) or ()
            paths += value if isinstance(value, list | tuple) else [value]
    return [Path(path) for path in map(str, paths) if not is_url(path)]


def _finish(executor: Executor, work: Callable[[Executor], int]) -> int:
    """Do the work, and remove the results once it is done, or if there are none."""
    results, status = executor.partial, None
    try:
        with executor.as_one():
            status = work(executor)
    except KeyboardInterrupt:
        if results is None:
            raise
        # A verb that writes has said in which state it left the folder.
        words = f"interrupted: nothing was changed; {TO_CONTINUE}"
        raise Interrupted(words) from None
    finally:
        if results is not None:
            results.close()
            # A run that was refused has no results, so its request alone would stay.
            if executor.leads and (status in (0, 1) or results.oldest() is None):
                results.remove()
    return status


def _run_share(
    verb: str,
    params: Mapping[str, Any],
    report: Report,
    share: Share,
    results: PartialResults | None,
    work: Callable[[Executor], int],
) -> int:
    if results is None:
        raise UsageError(
            f"--shard {share}: the results need a folder; add --partial FOLDER, the same for every "
            "share"
        )
    # A slip must not make the folder one of another command.
    for path in _paths(params, is_of_output=False):
        existing(path)
    request = _request(verb, params, share.total)
    results.begin(request)
    executor = Sharded(share, results)
    report.is_silent = True
    try:
        _finish(executor, work)
    finally:
        report.is_silent = False
    resumed = f" ({executor.resumed} from an earlier run)" if executor.resumed else ""
    size = human_size(executor.nbytes)
    report.line(f"share {share}: {count_of(executor.units, 'unit')}{resumed}, {size}", bold=True)
    report.line(f"written: {results.folder}")
    if executor.unread:
        report.line(
            f"could not be read: {count_of(executor.unread, 'unit')}; run this share again, or "
            "let the final command read the rest"
        )
    report.line(f"next, when all shares are done: {end_of(request, results.folder)}")
    document = {
        "path": str(results.folder), "share": str(share), "units": executor.units,
        "resumed": executor.resumed, "bytes": executor.nbytes, "unread": executor.unread,
    }  # fmt: skip
    return report.finish(document, 3 if executor.unread else 0)


def end_of(request: Request, folder: Path) -> str:
    """Return the command that ends the work of shares, in the folder where they were started."""
    own = [*(request.params.get("paths") or ())]
    is_default = len(own) == 1 and Path(os.path.abspath(default_folder(Path(own[0])))) == Path(
        os.path.abspath(folder)
    )
    return f"{request.command}{'' if is_default else f' --partial {shell_path(folder)}'}"


def words_of(params: Mapping[str, Any]) -> list[str]:
    """Return the words to paste after the verb that is running, for these parameters of it."""
    words: list[str] = []
    for parameter in click.get_current_context().command.params:
        value = params.get(str(parameter.name))
        if value is None or value is False:
            continue
        values = map(str, value if isinstance(value, list | tuple) else [value])
        if isinstance(parameter, click.Argument):
            words += values
        elif value is True:
            words.append(max(parameter.opts, key=len))
        else:
            words += [word for text in values for word in (max(parameter.opts, key=len), text)]
    return words


def _launched() -> Any:
    if not any(name in os.environ for name in _PLACES):
        return None
    from ckptfix.training.rendezvous import launched

    return launched(os.environ)


def _say_alone(say: Callable[[str], None]) -> None:
    """Say that a process works alone though a launcher started several: a shell script may be
    between the two.
    """
    if not any(name in os.environ for name in _PLACES):
        return
    from ckptfix.training.rendezvous import SWITCH, left_alone

    if (place := left_alone(os.environ)) is not None:
        say(
            f"working alone, because the parent process has the same rank ({place.rank} of "
            f"{place.total}); to share the work among {place.total} processes: export {SWITCH}=1; "
            f"to work alone without this message: export {SWITCH}=0"
        )
