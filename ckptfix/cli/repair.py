"""``ckptfix repair``."""

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import PurePath

import click

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.roles import Role
from ckptfix.cli.report import Report
from ckptfix.cli.several_paths import (
    check_verbosely,
    run_each,
    state_after_repair,
    state_after_writing,
)
from ckptfix.cli.verb_options import BREAK_LOCK, PATH, TRANSFER, LocalFile, Verb
from ckptfix.diagnosis.policy import KEEPABLE, Keys, Policy
from ckptfix.errors import UsageError
from ckptfix.repairs.receipt import RepairReceipt
from ckptfix.repairs.repair import plan_repair
from ckptfix.repairs.saved_plans import SavedPlan, apply_command, read_plan, save_plan
from ckptfix.storage.opened import open_files
from ckptfix.wording import line

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


@click.command(
    "repair",
    cls=Verb,
    rare=["--atomic", "--adapter"],
    examples=[
        ("ckptfix repair --dry-run CHECKPOINT", "Show the plan; change nothing."),
        ("ckptfix repair CHECKPOINT", "Repair it in place; to undo: ckptfix undo CHECKPOINT."),
        ("ckptfix repair CHECKPOINT --output COPY", "Write a repaired copy."),
        (
            "ckptfix repair CHECKPOINT --plan-out FILE",
            "Save the plan; ckptfix repair --plan FILE applies it.",
        ),
    ],
)
@click.argument("paths", nargs=-1, type=PATH)
@click.option("--dry-run", is_flag=True, help="Show the plan and stop.")
@click.option(
    "--plan-out",
    type=LocalFile(),
    metavar="FILE",
    help="Show the plan, save it to FILE, and stop.",
)
@click.option(
    "--plan",
    "plan_file",
    type=PATH,
    metavar="FILE",
    help="Apply a saved plan, if nothing has changed.",
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
    plan_out: str | None,
    plan_file: str | None,
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
    _check_arguments(paths, output, plan_out)
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

    saved = (
        _read_plan(plan_file, paths, output, plan_out, policy) if plan_file is not None else None
    )
    if saved is not None:
        paths, output = (str(saved.path),), None if saved.output is None else str(saved.output)
    elif not paths:
        raise click.UsageError("Missing argument 'PATHS...'.")

    def work(path: str) -> RepairReceipt:
        with report.progress(f"reading {path}") as progress, ExitStack() as opened:
            recover = not (dry_run or plan_out)
            if saved is not None:
                plan = saved.plan(recover=recover, break_lock=break_lock, progress=progress)
            else:
                place = opened.enter_context(open_files(path))
                plan = plan_repair(
                    place,
                    policy,
                    output=output,
                    recover=recover,
                    break_lock=break_lock,
                    progress=progress,
                )
            report.show(plan.lines())
            if plan_out is not None and (plan.steps or plan.pending or output is not None):
                save_plan(plan, plan_out)
                report.show(
                    [line(f"plan saved to {plan_out}; to apply it: {apply_command(plan_out)}")]
                )
            elif plan_out is not None:
                report.show([line(f"{plan_out} was not written: the plan has no steps")])
            if dry_run or plan_out is not None:
                return plan.preview()
            return plan.execute(transfer=transfer, break_lock=break_lock, progress=progress)

    return run_each(
        report,
        paths,
        work,
        word=_word,
        order=list(_WORDS.values()),
        # Of several checkpoints each sentence is gathered, and told once at the end.
        lines=lambda receipt: receipt.outcome_lines(is_verbose=verbose or len(paths) > 1),
        details="" if verbose else check_verbosely(paths),
        state_after=(
            state_after_repair if output is None else partial(state_after_writing, output=output)
        ),
    )


def _check_arguments(paths: tuple[str, ...], output: str | None, plan_out: str | None) -> None:
    if output is not None and len(paths) > 1:
        raise UsageError(
            f"--output {output}: one folder cannot hold copies of {len(paths)} checkpoints; name "
            "one PATH, or leave out --output to repair them in place (every repair can be undone)"
        )
    if plan_out is not None and len(paths) > 1:
        raise UsageError(
            f"--plan-out {plan_out}: a plan covers one checkpoint, not {len(paths)}; name one PATH"
        )


def _read_plan(
    file: str, paths: tuple[str, ...], output: str | None, plan_out: str | None, policy: Policy
) -> SavedPlan:
    """Read the saved plan. Raises UsageError where the command line asks for anything that the plan
    decided.
    """
    if paths or output is not None or plan_out is not None or policy != Policy():
        raise UsageError(
            f"--plan {file}: the plan already names the checkpoint and what to repair; leave out "
            "PATHS and every option that changes the plan"
        )
    return read_plan(file)


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
