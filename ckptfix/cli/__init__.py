"""The command line: one module a verb; ``report`` alone prints."""

import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

from ckptfix.cli.endings import FAILURES, INTERRUPTED, ending_of
from ckptfix.cli.report import JSON_VERSION, json_text, put
from ckptfix.cli.terminal import COLOUR
from ckptfix.errors import OperationError
from ckptfix.wording import escape

_HELP = {"-h", "--help", "--version"}

_ALREADY = b"ckptfix: interrupted already, and cleaning up; interrupt again to leave that to the next run\n"


class _Verbs(click.Group):
    """Imports a verb's module when it is asked for: `check` starts without what only `repair` needs."""

    verbs = ("check", "diff", "doctor", "migrate", "repair", "run", "salvage", "seal", "undo", "verify")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.verbs:
            return None
        command: click.Command = getattr(import_module(f"ckptfix.cli.{cmd_name}"), f"{cmd_name}_command")
        if cmd_name == "run":  # prints nothing of its own, and what follows the script is the script's
            return command
        command = copy(command)
        command.params = [*command.params, COLOUR]
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; a ``sys.exit`` in code of the user's that it runs is no verb's way to end."""
        try:
            return super().invoke(ctx)
        except SystemExit as ended:
            raise OperationError(f"code that was run called sys.exit({ended.code!r})") from ended


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ckptfix")
def cli() -> None:
    """Find and repair what is silently wrong with Hugging Face Accelerate checkpoints.

    Exit status: 0 nothing wrong or all repaired, 1 damage found or left, 2 wrong usage, 3 could not finish (the
    folder is as it was), 130 interrupted (the next run recovers). Of several paths, the highest.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"]:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        _run_script(given)
        return
    # The process is short, and collecting among the millions of values of a large pickle takes longer than parsing it.
    gc.disable()
    _interrupt_once()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # in a locale without UTF-8 a name must not end in a traceback
            stream.reconfigure(errors="backslashreplace")
    status = run(given)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a reader that went away
            stream.flush()
    # Nothing is left to be done: freeing the values of 100,000 tensors one by one would take a tenth of a second.
    os._exit(status)


def _interrupt_once() -> None:
    """Let the first interrupt end the work, and the second one not end the cleaning up after it; a third one does."""

    def begin(number: int, frame: object) -> None:
        signal.signal(number, go_on)
        raise KeyboardInterrupt

    def go_on(number: int, frame: object) -> None:
        signal.signal(number, signal.default_int_handler)
        with suppress(OSError):
            os.write(2, _ALREADY)  # not through a buffer: it may be in use just now

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in the background of a shell
        signal.signal(signal.SIGINT, begin)


def _run_script(arguments: list[str]) -> None:
    """Run the user's own script: with the collector on, nothing of ours around it, and python's own way to end."""
    try:
        script = cli.main(args=arguments, prog_name="ckptfix", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    if callable(script):  # a number after --help
        script()


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit status; with ``--json`` stdout gets one object, whatever happens."""
    as_json = "--json" in arguments
    try:
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, {signal.SIGINT}
        )  # one that came during the imports (__main__)
        result = cli.main(args=list(arguments), prog_name="ckptfix", standalone_mode=False)
        if isinstance(result, int):
            return result
        return _fail(
            f"{' '.join(arguments[:1])} ended without a status; this is a fault of ckptfix", 3, as_json
        )
    except SystemExit:
        # click's own way to end when the reader of its help has gone. A verb does not end so: it prints with put().
        return 0 if _HELP.intersection(arguments) else 3
    except (click.exceptions.Abort, KeyboardInterrupt):  # a verb that had begun to write raises Interrupted
        return _fail("interrupted: nothing was changed", INTERRUPTED, as_json)
    except click.ClickException as error:
        if not as_json:
            with suppress(BrokenPipeError):
                error.show()
            return error.exit_code
        return _fail(error.format_message(), error.exit_code, as_json)
    except FAILURES as error:
        return _fail(*ending_of(error), as_json)


def _fail(message: str, status: int, as_json: bool) -> int:
    if as_json:
        put(json_text({"version": JSON_VERSION, "error": message, "status": status}))
    else:
        put(f"ckptfix: {escape(message)}", err=True)
    return status
