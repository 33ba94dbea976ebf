"""The form of a verb: its own options, the options that every verb has, and examples at the end of
its help.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import click

from ckptfix.cli.report import COLOUR, Form
from ckptfix.cli.teamwork import Process, run_by_one, run_shared, share_options
from ckptfix.storage.executor import Executor
from ckptfix.storage.files import is_url
from ckptfix.wording import escape

Example = tuple[str, str]
"""A command to paste, and what it does."""

_QUIET = "Print only failures; the exit status gives the result."


_HELP = {"-h", "--help"}
ALL_OPTIONS = "ckptfix: all options"
"""Key in the ``meta`` of a context whose help lists the rare options, too."""

_RARE = ("--format", "--color", "--shard", "--partial", "--transfer", "--break-lock")
"""Options of several verbs that few people need."""


class CheckpointPath(click.Path):
    """Type of an argument that names a checkpoint, a file or a URL. The shell completes paths.

    Click refuses a folder that may not be read as wrong usage, and looks for a file that is called
    as the URL; the verb names its owner, its mode and the chmod that helps.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the text as it is."""
        return value


PATH = CheckpointPath()

TRANSFER = click.option(
    "--transfer",
    is_flag=True,
    help=(
        "For URLs: copy data through this machine if the store cannot copy parts of objects. Also "
        "write to a server that ignores conditional writes; nothing else may write there meanwhile."
    ),
)
BREAK_LOCK = click.option(
    "--break-lock", is_flag=True, help="For URLs: take over the lock of a run that was killed."
)


def or_here(ctx: click.Context, param: click.Parameter, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths of a command line, by default the working folder."""
    return paths or (".",)


class LocalFile(click.Path):
    """Type of an option that names a file to write; a URL would become a folder called ``s3:``
    here.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Fails for a URL."""
        if is_url(value):
            self.fail(f"{escape(value)} is a URL: expected a local file", param, ctx)
        return super().convert(value, param, ctx)


class AllHelp(click.Command):
    """Command whose ``--help`` takes ``--all``, which also lists the rare options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. ``--help --all`` lists every option."""
        # Only in front: behind a script they are its own.
        if "--all" in args[:2] and not _HELP.isdisjoint(args[:2]):
            args = ["--help"]
            ctx.meta[ALL_OPTIONS] = True
        return super().parse_args(ctx, args)


class Verb(AllHelp):
    """Give a verb its ``report``, made of the options that say what is printed and how.

    ``examples``: the end of its help. ``forms``: the formats that it has. ``quiet``: the help of
    its ``--quiet``. ``shared``: several processes can share its work; it returns why the work of
    these parameters has no shares, or "". ``unfit``: of any other verb, why the first of several
    processes must not do the work of all, or "". ``rare``: options that the help lists with
    ``--all`` only.
    """

    def __init__(
        self,
        name: str | None,
        *,
        examples: Sequence[Example] = (),
        forms: Sequence[Form] = (Form.TEXT, Form.JSON),
        quiet: str = _QUIET,
        shared: Callable[[Mapping[str, Any]], str] | None = None,
        unfit: Callable[[Mapping[str, Any]], str] = lambda params: "",
        rare: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        self.examples = tuple(examples)
        self.rare = {*rare, *_RARE}
        self.shared, self.unfit = shared, unfit
        if shared is not None:
            self.params += share_options()
        self.common: tuple[click.Parameter, ...] = (
            click.Option(["--quiet", "-q"], is_flag=True, help=quiet),
            click.Option(
                ["--format", "form"], type=click.Choice([form.value for form in forms]),
                default=Form.TEXT.value, help="Print the result in this format.  [default: text]",
            ),
            click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object; same as --format json."),
            COLOUR,
        )  # fmt: skip
        self.params += self.common

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb with its report in place of the options that it is made of."""
        as_json, form, quiet = (ctx.params.pop(name) for name in ("as_json", "form", "quiet"))
        if as_json and form not in (Form.TEXT.value, Form.JSON.value):
            raise click.UsageError(f"--json and --format {form} contradict each other", ctx)
        process = ctx.ensure_object(Process)
        report = process.report
        report.form, report.quiet = Form.JSON if as_json else Form(form), quiet
        invoke = super().invoke
        if self.shared is None:
            own = dict(ctx.params)
            ctx.params["report"] = report
            return run_by_one(str(self.name), own, process, lambda: invoke(ctx), self.unfit(own))
        shard, partial = (ctx.params.pop(name, None) for name in ("shard", "partial"))
        own = dict(ctx.params)
        ctx.params["report"] = report

        def work(executor: Executor) -> int:
            ctx.params["executor"] = executor
            return int(invoke(ctx))

        return run_shared(str(self.name), own, process, shard, partial, work, self.shared(own))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of this verb, then those of every verb, so that the first can be found;
        the rare ones only if they are asked for.
        """
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        rare = [option for option in options if not self.rare.isdisjoint(option.opts)]
        own = [option for option in options if option not in (*rare, *self.common)]
        common = [option for option in self.common if option not in rare]
        for title, listed in (
            ("Options", [*own[:-1], *common, *own[-1:]]),
            ("More options", rare if ALL_OPTIONS in ctx.meta else []),
        ):
            records = [option.get_help_record(ctx) for option in listed]
            if records:
                with formatter.section(title):
                    formatter.write_dl([record for record in records if record is not None])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, and how to see the rare options."""
        write_examples(formatter, self.examples)
        if ALL_OPTIONS not in ctx.meta:
            formatter.write_paragraph()
            formatter.write_text(f"More options: {ctx.command_path} --help --all")


def write_examples(formatter: click.HelpFormatter, examples: Sequence[Example]) -> None:
    """Write each example on a line of its own, that can be pasted, and below it what it does."""
    if not examples:
        return
    with formatter.section("Examples"):
        for command, meaning in examples:
            formatter.write(f"{'':>{formatter.current_indent}}{command}\n")
            with formatter.indentation(), formatter.indentation():
                formatter.write_text(meaning)


def asked_form(arguments: Sequence[str]) -> Form:
    """Return the format that a command line asks for, before it is parsed: it may be one that
    cannot be.

    What follows ``--`` belongs to a script, or is a path.
    """
    arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--json" in arguments:
        return Form.JSON
    named = [value for option, value in pairwise(arguments) if option == "--format"]
    named += [
        argument.removeprefix("--format=")
        for argument in arguments
        if argument.startswith("--format=")
    ]
    return next((form for form in Form if form.value in named), Form.TEXT)
