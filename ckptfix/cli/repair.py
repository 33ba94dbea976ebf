"""``ckptfix repair``."""

from itertools import groupby

import click

from ckptfix.checkpoint.filenames import Role
from ckptfix.cli.report import Report
from ckptfix.errors import UsageError
from ckptfix.operations.policy import KEEPABLE, Keys, Policy
from ckptfix.operations.repair import Receipt, repair
from ckptfix.operations.steps import Safety, Step, Unplanned
from ckptfix.storage.paths import command
from ckptfix.wording import count_of


@click.command("repair")
@click.argument("path", type=click.Path(exists=True))
@click.option("--dry-run", is_flag=True, help="Show the plan and stop.")
@click.option(
    "--output", type=click.Path(), metavar="DST", help="Write a repaired copy to DST; leave PATH alone."
)
@click.option(
    "--atomic", is_flag=True, help="Write new files instead of patching: for folders a job may be reading."
)
@click.option(
    "--models", type=int, metavar="N", help="The script has N models: drop proven copies beyond that."
)
@click.option("--keep", multiple=True, metavar="ROLE=N", help=f"The same for {', '.join(KEEPABLE)}.")
@click.option("--keys", type=click.Choice([keys.value for keys in Keys]), default=Keys.AUTO.value, show_default=True,
              help="auto: collapse nested wrappers; bare: strip all; ddp: leave exactly one 'module.'.")  # fmt: skip
@click.option("--only", multiple=True, metavar="CODE", help="Repair findings of this code alone.")
@click.option("--allow", multiple=True, metavar="CODE", help="Repair findings of this code, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def repair_command(
    path: str,
    dry_run: bool,
    output: str | None,
    atomic: bool,
    models: int | None,
    keep: tuple[str, ...],
    keys: str,
    only: tuple[str, ...],
    allow: tuple[str, ...],
    as_json: bool,
) -> int:
    """Repair a checkpoint in place, journaled: `ckptfix undo PATH` gives every byte back."""
    report = Report(as_json=as_json)
    policy = Policy(
        keep=_keep(models, keep),
        keys=Keys(keys),
        only=frozenset(only),
        allow=frozenset(allow),
        atomic=atomic,
    )

    def show_plan(steps: tuple[Step, ...], stays: tuple[Unplanned, ...]) -> None:
        report.line(
            f"plan for {path}:" if steps else f"nothing that a repair would change in {path}", bold=True
        )
        for (_, codes, safety), group in groupby(steps, key=_kind):
            asked = " (asked for)" if safety is Safety.LOSSY else ""
            report.few([f"  {step}  [{', '.join(codes)}]{asked}" for step in group], "steps like these")
        for _, same in groupby(stays, key=lambda stay: (stay.code, stay.reason)):
            report.few([f"  not done: {stay}" for stay in same], "files that stay", colour="yellow")

    with report.progress(f"reading {path}") as progress:
        receipt = repair(
            path, policy=policy, dry_run=dry_run, output=output, progress=progress, on_plan=show_plan
        )
    print_receipt(report, receipt)
    return report.finish(receipt.as_json(), receipt.status)


def print_receipt(report: Report, receipt: Receipt) -> None:
    """Print what was done, what is left, and how to take it back."""
    if receipt.recovered:
        report.message("an interrupted earlier run was rolled back first")
    if receipt.dry_run:
        report.line("dry run: nothing was changed")
    elif receipt.steps:
        where = receipt.output or receipt.path
        report.line(f"done and verified: {count_of(len(receipt.steps), 'step')} in {where}", colour="green")
    elif receipt.output is not None:
        report.line(f"an unchanged copy is in {receipt.output}")
    at = str(receipt.path if receipt.dry_run else receipt.output or receipt.path)
    report.findings(receipt.left, at)
    report.salvage(receipt.left, str(receipt.path))
    if receipt.transaction is not None:
        report.line(f"to take it back: {command('undo', receipt.path)}")
    for words in receipt.advice:
        report.line(words, colour="yellow")
    for words in receipt.not_checked:
        report.line(f"not checked: {words}")


def _kind(step: Step) -> tuple[type, tuple[str, ...], Safety]:
    return type(step.action), step.fixes, step.safety


def _keep(models: int | None, keep: tuple[str, ...]) -> dict[Role, int]:
    counts: dict[Role, int] = {}
    for item in keep:
        name, _, count = item.partition("=")
        if name not in KEEPABLE or not count.isdecimal():
            raise UsageError(f"--keep {item}: write ROLE=N with a role out of {', '.join(KEEPABLE)}")
        counts[KEEPABLE[name]] = int(count)
    if models is not None and counts.setdefault(Role.MODEL, models) != models:
        raise UsageError(f"--models {models} and --keep models={counts[Role.MODEL]} contradict each other")
    return counts
