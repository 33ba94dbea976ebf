"""``ckptfix repair``."""

import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import PurePath

import click
from click.core import ParameterSource

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.roles import Role
from ckptfix.cli.report import Report
from ckptfix.cli.several_paths import (
    check_verbosely,
    run_each,
    state_after_repair,
    state_after_writing,
)
from ckptfix.cli.teamwork import words_of
from ckptfix.cli.verb_options import BREAK_LOCK, PATH, TRANSFER, Verb
from ckptfix.diagnosis.policy import KEEPABLE, Keys, Policy
from ckptfix.errors import ChangedError, UsageError
from ckptfix.repairs.receipt import RepairReceipt
from ckptfix.repairs.repair import RepairPlan, plan_repair
from ckptfix.storage.files import AnyPath
from ckptfix.storage.opened import open_files
from ckptfix.storage.paths import command
from ckptfix.wording import Line, line

_WORDS: dict[object, str] = {
    (1, False): "still damaged",
    (1, True): "partly repaired",
    "dry": "to repair",
    (0, True): "repaired",
    (0, False): "undamaged",
}
"""(exit status, whether anything was done) -> what became of a checkpoint, for the summary of
several.
"""


def _refuse_plan_file(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Raise UsageError for an option of 0.5.0, which wrote or read a file."""
    if value is not None:
        raise UsageError(
            "--plan and --plan-out were removed in 0.6.0: --expect DIGEST applies the plan of a "
            "dry run; for the whole command: ckptfix repair PATH --dry-run"
        )


@click.command(
    "repair",
    cls=Verb,
    rare=["--atomic", "--adapter"],
    examples=[
        ("ckptfix repair --dry-run CHECKPOINT", "Show the plan; change nothing."),
        ("ckptfix repair CHECKPOINT", "Repair it in place; to undo: ckptfix undo CHECKPOINT."),
        ("ckptfix repair CHECKPOINT --output COPY", "Write a repaired copy."),
        (
            "ckptfix repair CHECKPOINT --expect DIGEST",
            "Repair it only if the plan is still that of the dry run.",
        ),
    ],
)
@click.argument("paths", nargs=-1, required=True, type=PATH)
@click.option("--dry-run", is_flag=True, help="Show the plan, print its digest, and stop.")
@click.option(
    "--expect",
    metavar="DIGEST",
    help="Repair only if the plan has this digest, which --dry-run prints.",
)
@click.option(
    "--plan-out",
    "--plan",
    hidden=True,
    expose_value=False,
    is_eager=True,
    callback=_refuse_plan_file,
)
@click.option(
    "--output", type=PATH, metavar="DST", help="Write a repaired copy to DST; leave PATH alone."
)
@click.option(
    "--atomic",
    is_flag=True,
    help="Write new files instead of patching: safe while a job reads the folder.",
)
@click.option(
    "--models",
    type=int,
    metavar="N",
    help="The script has N models: delete proven duplicates beyond that.",
)
@click.option(
    "--keep",
    multiple=True,
    metavar="ROLE=N|FILE",
    help=(
        f"ROLE=N: like --models N, for {', '.join(KEEPABLE)}. FILE: keep this file or index of a "
        "model that is stored twice."
    ),
)
@click.option("--keys", type=click.Choice([keys.value for keys in Keys]), default=Keys.AUTO.value, show_default=True,
              help="auto: collapse nested wrappers; bare: strip all; ddp: keep exactly one 'module.'.")  # fmt: skip
@click.option(
    "--adapter",
    default="",
    metavar="NAME",
    help="If a file holds several adapters, keep this one for PEFT.",
)
@click.option("--only", multiple=True, metavar="CODE", help="Repair only findings with this code.")
@click.option("--allow", multiple=True, metavar="CODE", help="Also repair findings with this code.")
@click.option(
    "--verbose",
    "-v",
    is_flag=True,
    help="List every skipped check with the command that runs it.",
)
@TRANSFER
@BREAK_LOCK
def repair_command(
    paths: tuple[str, ...],
    dry_run: bool,
    expect: str | None,
    output: str | None,
    atomic: bool,
    models: int | None,
    keep: tuple[str, ...],
    keys: str,
    adapter: str,
    only: tuple[str, ...],
    allow: tuple[str, ...],
    verbose: bool,
    transfer: bool,
    break_lock: bool,
    report: Report,
) -> int:
    """Repair checkpoints in place; every repair can be undone.

    Shows the plan, writes a journal, and proves the result. `ckptfix undo PATH` restores every
    byte.
    """
    _check_arguments(paths, output, expect)
    files = frozenset(
        item for item in keep if "=" not in item and parse_file_name(PurePath(item).name)
    )
    policy = Policy(
        keep=_keep(models, [item for item in keep if item not in files]),
        keys=Keys(keys),
        only=frozenset(only),
        allow=frozenset(allow),
        atomic=atomic,
        adapter=adapter,
        families=files,
    )

    options = _options_of(click.get_current_context())

    def work(path: str) -> RepairReceipt:
        with report.progress(f"reading {path}") as progress, ExitStack() as opened:
            plan = plan_repair(
                opened.enter_context(open_files(path)),
                policy,
                output=output,
                recover=not dry_run,
                break_lock=break_lock,
                progress=progress,
            )
            if expect is not None:
                _ensure_expected(plan, expect, options)
            report.show(plan.lines())
            if dry_run:
                return plan.preview()
            return plan.execute(transfer=transfer, break_lock=break_lock, progress=progress)

    def lines(receipt: RepairReceipt) -> Iterator[Line]:
        # Of several checkpoints each sentence is gathered, and told once at the end.
        yield from receipt.outcome_lines(is_verbose=verbose or len(paths) > 1)
        if receipt.digest and len(paths) == 1 and (receipt.steps or output is not None):
            apply = _command(receipt.path, options, "--expect", receipt.digest)
            yield line(f"to apply exactly this plan: {apply}")

    return run_each(
        report,
        paths,
        work,
        word=_word,
        order=list(_WORDS.values()),
        lines=lines,
        details="" if verbose else check_verbosely(paths),
        state_after=(
            state_after_repair if output is None else partial(state_after_writing, output=output)
        ),
    )


def _check_arguments(paths: tuple[str, ...], output: str | None, expect: str | None) -> None:
    if output is not None and len(paths) > 1:
        raise UsageError(
            f"--output {output}: one folder cannot hold copies of {len(paths)} checkpoints; name "
            "one PATH, or leave out --output to repair them in place (every repair can be undone)"
        )
    if expect is None:
        return
    if not re.fullmatch("[0-9a-f]{12}", expect):
        raise UsageError(
            f"--expect {expect}: not the digest of a plan (expected 12 hex digits, as --dry-run "
            "prints them)"
        )
    if len(paths) > 1:
        raise UsageError(
            f"--expect {expect}: a plan covers one checkpoint, not {len(paths)}; name one PATH"
        )


def _options_of(context: click.Context) -> list[str]:
    """Return the options of this command line that another run needs for the same plan."""
    return words_of(
        {
            name: value
            for name, value in context.params.items()
            if name not in {"paths", "dry_run", "expect"}
            and context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        }
    )


def _command(path: AnyPath, options: list[str], *more: str) -> str:
    return f"{command('repair', path)} {shlex.join([*options, *more])}"


def _ensure_expected(plan: RepairPlan, expect: str, options: list[str]) -> None:
    """Raise ChangedError where the plan is not the one of the dry run."""
    digest = plan.digest
    if digest == expect:
        return
    done = "nothing was changed"
    if plan.recovered:
        ended = "finished" if plan.finished else "rolled back"
        done = f"an interrupted earlier run was {ended}; nothing else was changed"
    raise ChangedError(
        f"{plan.path}: the folder or the plan has changed since the dry run (expected digest "
        f"{expect}, found {digest}); {done}; next: {_command(plan.path, options, '--dry-run')}"
    )


def _word(receipt: RepairReceipt) -> str:
    return _WORDS[
        "dry" if receipt.dry_run and receipt.steps else (receipt.status, bool(receipt.steps))
    ]


def _keep(models: int | None, keep: Iterable[str]) -> dict[Role, int]:
    counts: dict[Role, int] = {}
    for item in keep:
        name, _, count = item.partition("=")
        if name not in KEEPABLE or not count.isdecimal():
            raise UsageError(
                f"--keep {item}: expected ROLE=N (ROLE: {', '.join(KEEPABLE)}) or the name of a "
                "file"
            )
        counts[KEEPABLE[name]] = int(count)
    if models is not None and counts.setdefault(Role.MODEL, models) != models:
        raise UsageError(
            f"--models {models} and --keep models={counts[Role.MODEL]} contradict each other"
        )
    return counts
