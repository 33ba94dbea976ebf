"""``ckptfix repair``."""

import click

from ckptfix.checkpoint.filenames import Role
from ckptfix.cli.report import Report
from ckptfix.errors import UsageError
from ckptfix.operations.policy import KEEPABLE, Keys, Policy
from ckptfix.operations.receipt import plan_lines
from ckptfix.operations.repair import repair
from ckptfix.operations.steps import Step, Unplanned


@click.command("repair")
@click.argument("path", type=click.Path())
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
        report.show(plan_lines(path, steps, stays))

    with report.progress(f"reading {path}") as progress:
        receipt = repair(
            path, policy=policy, dry_run=dry_run, output=output, progress=progress, on_plan=show_plan
        )
    report.show(receipt.outcome_lines())
    return report.finish(receipt.as_json(), receipt.status)


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
