"""A verb in several processes: those of torchrun, accelerate launch or Slurm, or one by one as
tasks of a job array.
"""

import os
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptfix.cli import report as printing
from ckptfix.cli.report import Report
from ckptfix.errors import CkptfixError, TeamError, UsageError
from ckptfix.storage import teams
from ckptfix.storage.files import is_url
from ckptfix.storage.parallel import Share
from ckptfix.storage.partial_results import PartialResults, Request, default_folder, own_version
from ckptfix.storage.paths import existing, shell_path
from ckptfix.wording import count_of, escape, human_size

if TYPE_CHECKING:
    from ckptfix.storage.launched_ranks import LaunchedRanks

_PLACES = ("RANK", "SLURM_PROCID")
"""Without one of these variables no launcher started this process, and nothing more is imported to
find out.
"""

_ONE_PROCESS = "next: run it in one process, without the launcher, or with CKPTFIX_TEAM=0"

_team: "LaunchedRanks | None" = None
_remedy = ""
"""The next step when a process fails, in words that end its message."""


def share_options() -> list[click.Parameter]:
    """Return the options of a verb that several processes can share."""
    return [
        click.Option(
            ["--shard"], metavar="I/N",
            help="Do part I of N (I from 0 to N-1), without a network; the command without it ends the work.",
        ),
        click.Option(
            ["--partial"], metavar="FOLDER", type=click.Path(file_okay=False),
            help="Keep results there for the next run, if this run is interrupted.",
        ),
    ]  # fmt: skip


def run_shared(
    verb: str, params: Mapping[str, Any], report: Report, shard: str | None, partial: str | None,
    work: Callable[[], int], unfit: str,
) -> int:  # fmt: skip
    """Run a verb as what it was started as: alone, as a share, or in a team; return its exit
    status.

    ``params``: the verb's own. ``unfit``: why its work has no shares, "" where it
    has.
    """
    global _remedy
    place = _launched()
    if place is None and shard is None and not unfit and not report.quiet:
        _say_alone()
    paths = [str(path) for path in params.get("paths", ())]
    # The only verb that writes into a checkpoint anyway.
    is_lone_seal = partial is None and verb == "seal" and len(paths) == 1 and not is_url(paths[0])
    is_default = is_lone_seal and os.path.isdir(paths[0])
    default = default_folder(Path(paths[0])) if is_default else None
    if shard is None and partial is None and place is None:
        if default is None or not default.is_dir():
            return work()
        of_shares = PartialResults(default)
        old = of_shares.request()
        if old is None or not old.shares or not old.is_same(_request(verb, params)):
            return work()
        return _finish(of_shares, teams.Finisher(of_shares, old.shares, _say), work)
    if unfit:
        if shard is None and partial is None:
            raise UsageError(f"{unfit}; {_ONE_PROCESS}")
        raise UsageError(f"{unfit}; leave out {'--shard' if shard is not None else '--partial'}")
    if partial is not None and (not partial or is_url(partial)):
        raise UsageError(
            f"--partial {shell_path(partial)}: expected a folder of this machine for the results"
        )
    folder = Path(partial) if partial is not None else default
    if partial is not None:
        _ensure_outside(Path(partial), verb, _paths(params))
    if shard is not None:
        share = Share.parse(shard)
        if place is not None and share != (place.rank, place.total):
            raise UsageError(
                f"--shard {shard} in process {place.rank} of {place.total}: leave out --shard "
                f"under a launcher, or write --shard {place.share}"
            )
        return _run_share(verb, params, report, share, folder, work)
    results = PartialResults(folder) if folder is not None else None
    request = _request(verb, params)
    if place is None:
        assert results is not None
        old = results.request()
        if old is not None and old.shares and old.is_same(request):
            return _finish(results, teams.Finisher(results, old.shares, _say), work)
        results.begin(request)
        return _finish(results, teams.LoneWorker(results, _say), work)
    where = "" if default is not None else f" --partial {shell_path(partial or 'FOLDER')}"
    words = f"{_command(verb, params)}{where} --shard {place.share}"
    team = _joined(place, results, f"start each as a share: bash -c {shlex.quote(words)}")

    def begun() -> int:
        if team.leads and results is not None:
            results.begin(request)
        return work()

    done = "written" if verb == "migrate" else "read"
    _remedy = (
        f"the same command continues from what was {done}"
        if results is not None
        else f"run it again with --partial FOLDER, to keep what is {done}, should it fail again"
    )
    try:
        return _finish(results, team, begun, lambda: _ensure_alike(team, verb, params))
    except TeamError as error:
        raise _ended(team, error) from error


def _request(verb: str, params: Mapping[str, Any], shares: int = 0) -> Request:
    return Request(verb, dict(params), os.getcwd(), shares, _words(params))


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
                f"--partial {shell_path(folder)} lies in {shell_path(path)}, where its files would "
                "count as those of a checkpoint; next: name a folder elsewhere"
            )


def run_by_one(verb: str, params: Mapping[str, Any], work: Callable[[], int], unfit: str) -> int:
    """Run a verb whose work is not shared: the first process of a team does it, the others end with
    its status.

    ``params``: the verb's own. ``unfit``: why one process must not do it for all, "" where it may.
    """
    global _remedy
    place = _launched()
    if place is None:
        return work()
    if unfit:
        raise UsageError(f"{unfit}; {_ONE_PROCESS}")
    team = _joined(place, None, "run it in one process, without the launcher")
    _remedy = f"CKPTFIX_TEAM=0 {_command(verb, params)}"
    try:
        with teams.working_in(team), teams.as_one():
            _ensure_alike(team, verb, params)
    except TeamError as error:
        raise _ended(team, error) from error
    return work() if team.leads else 0  # in the end, the others wait for the leader's status


def _joined(place: Any, results: PartialResults | None, remedy: str) -> "LaunchedRanks":
    """Join the ranks that were started with this process; from then on rank 0 alone prints.

    ``remedy``: the next step where they cannot meet.
    """
    global _team
    from ckptfix.storage.launched_ranks import LaunchedRanks
    from ckptfix.training.rendezvous import ensure_joinable, join

    if place.rank:
        printing.mute()
    ensure_joinable(place, remedy)
    group = join(place, _timeout())
    _team = LaunchedRanks(
        place.rank, place.total, group.exchange, here=place.here, partial=results, say=_say
    )
    return _team


def _ended(team: "LaunchedRanks", error: TeamError) -> TeamError:
    """Return the error with its next step. A rank prints it itself where the others do not know it,
    and the traceback of a fault of ckptfix.
    """
    cause = error.__cause__
    is_fault = cause is not None and not isinstance(cause, CkptfixError | OSError)
    if team.is_lost or is_fault:
        printing.unmute()
    if is_fault:
        import traceback  # never needed, one hopes

        printing.put("".join(traceback.format_exception(cause)).rstrip(), err=True)
    return TeamError(_with_next(error))


def _ensure_alike(team: "LaunchedRanks", verb: str, params: Mapping[str, Any]) -> None:
    """Find out whether all were started with the same command, and see the same files. Raises
    OperationError.
    """
    mine, version = _command(verb, params), own_version()
    team.ensure_same(
        version,
        lambda leader, theirs: (
            f"runs another version of ckptfix than {leader}: {version} (expected {theirs}); next: "
            "install one version on all nodes"
        ),
    )
    team.ensure_same(
        mine,
        lambda leader, theirs: (
            f"runs another command than {leader}: {mine} (expected {theirs}); {_ONE_PROCESS}"
        ),
    )
    if not params.get("recursive"):  # many checkpoints are compared one by one
        from ckptfix.storage.launched_ranks import ensure_same_files

        ensure_same_files(_paths(params))


def _command(verb: str, params: Mapping[str, Any]) -> str:
    return shlex.join(["ckptfix", verb, *_words(params)])


def _with_next(error: TeamError) -> str:
    return str(error) if "; next: " in str(error) else f"{error}; next: {_remedy}"


def _sources(params: Mapping[str, Any]) -> list[Path]:
    """Return the paths that must exist before a verb begins."""
    return _paths({name: value for name, value in params.items() if name != "dst"})


def _paths(params: Mapping[str, Any]) -> list[Path]:
    """Return the paths that a verb reads, URLs left out."""
    read = [
        parameter
        for parameter in click.get_current_context().command.params
        if isinstance(parameter.type, click.Path)
    ]
    names = [
        str(parameter.name)
        for parameter in read
        if isinstance(parameter, click.Argument) or parameter.name == "against"
    ]
    values = [params.get(name) or () for name in names]
    given = [
        str(path)
        for value in values
        for path in (value if isinstance(value, list | tuple) else [value])
    ]
    return [Path(path) for path in given if not is_url(path)]


def _finish(
    results: PartialResults | None, team: teams.Team, work: Callable[[], int],
    prepare: Callable[[], object] = lambda: None,
) -> int:  # fmt: skip
    try:
        with _kept_after_an_interrupt(results), teams.working_in(team):
            with teams.as_one():
                prepare()
            with teams.as_one():
                status = work()
    finally:
        if results is not None:
            results.close()
    if results is not None and team.leads and status in (0, 1):
        results.remove()
    return status


def _run_share(
    verb: str,
    params: Mapping[str, Any],
    report: Report,
    share: Share,
    folder: Path | None,
    work: Callable[[], int],
) -> int:
    if folder is None:
        raise UsageError(
            f"--shard {share}: where do the results go? add --partial FOLDER, the same for every "
            "share"
        )
    results = PartialResults(folder)
    for path in _sources(params):  # a slip must not make the folder one of another command
        existing(path)
    request = _request(verb, params, share.total)
    results.begin(request)
    team = teams.LoneShare(share, results)
    printing.mute()
    try:
        with _kept_after_an_interrupt(results), teams.working_in(team):
            work()
    finally:
        printing.unmute()
        results.close()
    resumed = f", {team.resumed} of them by an earlier run" if team.resumed else ""
    report.line(
        f"share {share}: {count_of(team.units, 'unit')}, {human_size(team.nbytes)}{resumed}",
        bold=True,
    )
    report.line(f"written: {folder}")
    if team.unread:
        report.line(
            f"could not be read: {count_of(team.unread, 'unit')}; run this share again, or let the "
            "last command try"
        )
    report.line(f"next, when all shares have ended: {end_of(request, folder)}")
    document = {
        "path": str(folder), "share": str(share), "units": team.units, "resumed": team.resumed,
        "bytes": team.nbytes, "unread": team.unread,
    }  # fmt: skip
    return report.finish(document, 3 if team.unread else 0)


def end_of(request: Request, folder: Path) -> str:
    """Return the command that ends the work of shares, in the folder where they were started."""
    own = [*(request.params.get("paths") or ())]
    is_default = len(own) == 1 and Path(os.path.abspath(default_folder(Path(own[0])))) == Path(
        os.path.abspath(folder)
    )
    return f"{request.command}{'' if is_default else f' --partial {shell_path(folder)}'}"


def leave(status: int) -> int:
    """Leave the team, if there is one; return the leader's exit status. Everything must have been
    printed by now.
    """
    if _team is None:
        return status
    if not _team.leads:
        # Ctrl-C reaches the leader, too, which says in what state it left the folder.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return _team.finish(status)
    except TeamError as error:
        if _team.leads or status > 1:
            return status
        printing.unmute()
        _say(escape(_with_next(error)))
        return 3


def _words(params: Mapping[str, Any]) -> list[str]:
    """Return what to paste after the verb that is running, for these parameters of it."""
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


def _say_alone() -> None:
    """Say that a process works alone though a launcher started several: a shell script may be
    between the two.
    """
    if not any(name in os.environ for name in _PLACES):
        return
    from ckptfix.training.rendezvous import SWITCH, left_alone

    if (place := left_alone(os.environ)) is not None:
        _say(
            f"works alone, as the process that started it has the same rank ({place.rank} of "
            f"{place.total}); for {place.total} processes that share the work: export {SWITCH}=1; "
            f"for one: export {SWITCH}=0"
        )


@contextmanager
def _kept_after_an_interrupt(results: PartialResults | None) -> Iterator[None]:
    """Say after an interrupt of a verb that only reads what the next run does with the results."""
    try:
        yield
    except KeyboardInterrupt:
        if results is None:
            raise
        words = "interrupted: nothing was changed; the same command continues from what was read"
        raise printing.Interrupted(words) from None


def _timeout() -> float:
    from ckptfix.storage.launched_ranks import TIMEOUT, TIMEOUT_VARIABLE

    text = os.environ.get(TIMEOUT_VARIABLE) or str(TIMEOUT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 1e7:  # timedelta holds it, and Gloo's milliseconds in 32 bits do not
        raise UsageError(f"{TIMEOUT_VARIABLE}={text}: expected a number of seconds above 0")
    return seconds


def _say(words: str) -> None:
    printing.put(f"ckptfix: {words}", err=True)
