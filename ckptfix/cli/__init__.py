"""The command line: one module a verb; ``report`` alone prints."""

import gc
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import click

from ckptfix.cli.report import JSON_VERSION, escape
from ckptfix.errors import CkptfixError, OperationError, UsageError

_INTERRUPTED = (
    "interrupted; the folder is as it was, or repaired as a whole, or the next repair or undo takes it back first: "
    "ckptfix check says which"
)

_INTERRUPTED_BESIDE = (
    "interrupted; SRC is as it was, and nothing was written at DST, or it is there as a whole"
)


class _Verbs(click.Group):
    """Imports a verb's module when it is asked for: `check` starts without what only `repair` needs."""

    verbs = ("check", "diff", "doctor", "migrate", "repair", "run", "salvage", "seal", "undo", "verify")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.verbs:
            return None
        command: click.Command = getattr(import_module(f"ckptfix.cli.{cmd_name}"), f"{cmd_name}_command")
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
    folder is as it was), 130 interrupted (the next run recovers).
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"]:
        _run_script(given)
        return
    # The process is short, and collecting among the millions of values of a large pickle takes longer than parsing it.
    gc.disable()
    status = run(given)
    with suppress(OSError):  # a reader that went away
        sys.stdout.flush()
        sys.stderr.flush()
    # Nothing is left to be done: freeing the values of 100,000 tensors one by one would take a tenth of a second.
    os._exit(status)


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
        result = cli.main(args=list(arguments), prog_name="ckptfix", standalone_mode=False)
        if isinstance(result, int):
            return result
        return _fail(
            f"{' '.join(arguments[:1])} ended without a status; this is a fault of ckptfix", 3, as_json
        )
    except SystemExit:
        return 1  # click's own way to end when whoever reads has gone: there is nobody to tell
    except (click.exceptions.Abort, KeyboardInterrupt):
        beside = list(arguments[:1]) in (["migrate"], ["salvage"])
        return _fail(_INTERRUPTED_BESIDE if beside else _INTERRUPTED, 130, as_json)
    except click.ClickException as error:
        if not as_json:
            error.show()
            return error.exit_code
        return _fail(error.format_message(), error.exit_code, as_json)
    except UsageError as error:
        return _fail(str(error), 2, as_json)
    except (CkptfixError, OSError) as error:
        return _fail(str(error), 3, as_json)
    except MemoryError:
        return _fail("out of memory; nothing was changed", 3, as_json)


def _fail(message: str, status: int, as_json: bool) -> int:
    if as_json:
        click.echo(json.dumps({"version": JSON_VERSION, "error": message, "status": status}))
    else:
        click.echo(f"ckptfix: {escape(message)}", err=True)
    return status
