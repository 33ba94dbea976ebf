"""The command line: one module a verb; ``report`` alone prints."""

import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from shlex import quote
from typing import Any

import click
from click.shell_completion import CompletionItem

from ckptfix.cli.report import FAILURES, INTERRUPTED, Form, Report, ending_of
from ckptfix.cli.teamwork import Process
from ckptfix.cli.verb_options import asked_form
from ckptfix.errors import OperationError

_HELP = {"-h", "--help", "--version"}
_COMPLETE = "_CKPTFIX_COMPLETE"
_WIDEST = 120
"""Columns: help on a wider terminal is hard to read."""

_ALREADY = (
    b"ckptfix: still cleaning up after the first interrupt; interrupt again to leave that to the"
    b" next run\n"
)

VERBS: Mapping[str, Mapping[str, str]] = {
    "Verbs": {
        "check": "Find what is wrong with checkpoints.",
        "repair": "Repair checkpoints in place; every repair can be undone.",
        "undo": "Undo the last repair, or the seal after it, byte for byte.",
        "run": "Run a script with every Accelerator and Trainer guarded.",
        "verify": "Verify checksums, or test loading.",
        "diff": "Compare the weights and optimizers of two checkpoints.",
        "migrate": "Convert a checkpoint to another format or training strategy.",
        "prove-resume": "Prove that a killed run resumes bit for bit.",
        "doctor": "Find problems with this machine, its libraries and a script.",
    },
    "Storage and fleets": {
        "seal": "Write the checksums of checkpoints into their manifests.",
        "salvage": "Recover the intact tensors of a damaged checkpoint.",
        "upload": "Copy a complete checkpoint to an object store.",
        "scrub": "Check many checkpoints, and read all data over several nights.",
    },
    "Manual": {
        "explain": "Explain a finding: cause, cost, an example, and what to do.",
        "help": "Print a page of the manual, or the list of pages.",
    },
}
"""Group -> verb -> its summary, which is the first line of the verb's own help, too.

Written here, so that the help and the completion of a shell import no verb.
"""

_IN_LAST_LINES = "Manual"

_SUMMARIES = {verb: summary for group in VERBS.values() for verb, summary in group.items()}
_GONE = frozenset({"merge"})
"""Verbs of earlier versions, which say what to type now."""


class _Verbs(click.Group):
    """Imports a verb's module when it is asked for: `check` starts without what only `repair`
    needs.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _SUMMARIES.keys() | _GONE:
            return None
        module = cmd_name.replace("-", "_")
        command: click.Command = getattr(
            import_module(f"ckptfix.cli.{module}"), f"{module}_command"
        )
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb that comes first; where there is none, suggest what was meant."""
        first = args[0]
        is_verb = first in _SUMMARIES or first in _GONE
        if is_verb or first.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        if os.path.exists(first):
            raise click.UsageError(
                f"missing verb: {first!r} is a path; next: ckptfix check {quote(first)}",
                ctx,
            )
        close = get_close_matches(first.lower(), _SUMMARIES, 1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise click.UsageError(f"unknown verb {first!r}{meant}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs in groups, with their full summaries."""
        widest = max(map(len, _SUMMARIES))
        for group, verbs in VERBS.items():
            if group == _IN_LAST_LINES:
                continue
            with formatter.section(group):
                formatter.write_dl(
                    [(verb.ljust(widest), summary) for verb, summary in verbs.items()]
                )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups of verbs; the options are those of every program."""
        self.format_commands(ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the way to everything else: all of it fits a screen of 24 lines."""
        formatter.write_paragraph()
        formatter.write(
            "Exit: 0 no problems, 1 damage, 2 usage error, 3 not finished, 130 interrupted\n"
        )
        formatter.write(
            "Next: ckptfix VERB --help; ckptfix explain CODE (a finding); ckptfix help\n"
        )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a verb, or an option of the group."""
        verbs = [
            CompletionItem(verb, help=summary)
            for verb, summary in _SUMMARIES.items()
            if verb.startswith(incomplete)
        ]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; report a ``sys.exit`` in the user's code that it runs as a failure."""
        try:
            return super().invoke(ctx)
        except SystemExit as ended:
            raise OperationError(f"user code called sys.exit({ended.code!r})") from ended


@click.group(
    cls=_Verbs,
    subcommand_metavar="VERB [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _WIDEST},
)
@click.version_option(package_name="ckptfix")
def cli() -> None:
    """Find and repair silent damage in Hugging Face Accelerate checkpoints."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"]:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        _run_script(given)
        return
    # The process is short, and collecting among the millions of values of a large pickle takes
    # longer than parsing it.
    gc.disable()
    _interrupt_once()
    for stream in (sys.stdout, sys.stderr):
        # In a locale without UTF-8 a name must not end in a traceback.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    process = Process(asked_form(given))
    status = run(given, process)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a reader that went away
            stream.flush()
    status = process.leave(status)
    # Nothing is left to be done: freeing the values of 100,000 tensors one by one would take a
    # tenth of a second.
    os._exit(status)


def _interrupt_once() -> None:
    """Let the first interrupt end the work, and the second one not end the cleaning up after it; a
    third one does.
    """

    def begin(number: int, frame: object) -> None:
        signal.signal(number, go_on)
        raise KeyboardInterrupt

    def go_on(number: int, frame: object) -> None:
        signal.signal(number, signal.default_int_handler)
        with suppress(OSError):
            os.write(2, _ALREADY)  # not through a buffer: it may be in use just now

    # Ignored in the background of a shell.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, begin)


def _run_script(arguments: list[str]) -> None:
    """Run the user's own script: with the collector on, nothing of ours around it, and python's own
    way to end.
    """
    try:
        script = cli.main(args=arguments, prog_name="ckptfix", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    if callable(script):  # a number after --help
        script()


def run(arguments: Sequence[str], process: Process | None = None) -> int:
    """Run the command line and return its exit status; stdout gets the document that was asked for
    in any case.
    """
    process = process or Process(asked_form(arguments))
    report = process.report
    try:
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, {signal.SIGINT}
        )  # one that came during the imports (__main__)
        result = cli.main(
            args=list(arguments), prog_name="ckptfix", standalone_mode=False, obj=process
        )
        if isinstance(result, int):
            return result
        return _fail(
            f"{' '.join(arguments[:1])} ended without an exit status; this is a bug in ckptfix",
            3,
            report,
        )
    except SystemExit:
        # click's own way to end when the reader of its help has gone, or when it completed a line
        # for a shell. A verb does not end so: it prints with put().
        return 0 if _HELP.intersection(arguments) or _COMPLETE in os.environ else 3
    # A verb that had begun to write raises Interrupted.
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _fail("interrupted: nothing was changed", INTERRUPTED, report)
    except click.ClickException as error:
        if report.form is Form.TEXT:
            with suppress(BrokenPipeError):
                error.show()
            return error.exit_code
        return _fail(error.format_message(), error.exit_code, report)
    except FAILURES as error:
        return _fail(*ending_of(error), report)
    except Exception as error:  # python's own status would be 1, as of damage
        import traceback  # never needed, one hopes

        if report.form is Form.TEXT:
            report.put(traceback.format_exc().rstrip(), err=True)
        return _fail(*ending_of(error), report)


def _fail(message: str, status: int, report: Report) -> int:
    report.message(f"ckptfix: {message}")
    return report.finish({"error": message}, status)
