"""``ckptfix repair``."""

from functools import partial

import click

from ckptfix.checkpoint.filenames import Role
from ckptfix.cli.interrupts import state_after_repair, state_after_writing
from ckptfix.cli.report import Report
from ckptfix.cli.several import run_each
from ckptfix.cli.verb import Verb
from ckptfix.diagnosis.policy import KEEPABLE, Keys, Policy
from ckptfix.errors import UsageError
from ckptfix.repairs.repair import Receipt, plan_lines, repair
from ckptfix.repairs.steps import Step, Unplanned

_WORDS: dict[object, str] = {
    (1, False): "left damaged",
    (1, True): "repaired in part",
    "dry": "to repair",
    (0, True): "repaired",
    (0, False): "without damage",
}
"""(exit status, whether anything was done) -> what became of a checkpoint, for the summary of several."""


@click.command(
    "repair",
    cls=Verb,
    examples=[
        ("ckptfix repair --dry-run CHECKPOINT", "Show the plan; change nothing."),
        ("ckptfix repair CHECKPOINT", "Repair it in place; to undo: ckptfix undo CHECKPOINT."),
        ("ckptfix repair CHECKPOINT --output COPY", "Write a repaired copy."),
    ],
)
@click.argument("paths", nargs=-1, required=True, type=click.Path())
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
def repair_command(
    paths: tuple[str, ...],
    dry_run: bool,
    output: str | None,
    atomic: bool,
    models: int | None,
    keep: tuple[str, ...],
    keys: str,
    only: tuple[str, ...],
    allow: tuple[str, ...],
    report: Report,
) -> int:
    """Repair checkpoints in place; every repair can be undone.

    Shows the plan, writes a journal, and proves the result. `ckptfix undo PATH` restores every byte.
    """
    if output is not None and len(paths) > 1:
        raise UsageError(
            f"--output {output}: one folder cannot hold the copies of {len(paths)} checkpoints; give one PATH, "
            "or repair all of them in place: ckptfix undo gives every byte back"
        )
    policy = Policy(
        keep=_keep(models, keep),
        keys=Keys(keys),
        only=frozenset(only),
        allow=frozenset(allow),
        atomic=atomic,
    )

    def work(path: str) -> Receipt:
        def show_plan(steps: tuple[Step, ...], stays: tuple[Unplanned, ...]) -> None:
            report.show(plan_lines(path, steps, stays))

        with report.progress(f"reading {path}") as progress:
            return repair(
                path, policy=policy, dry_run=dry_run, output=output, progress=progress, on_plan=show_plan
            )

    return run_each(
        report,
        paths,
        work,
        word=_word,
        order=list(_WORDS.values()),
        lines=Receipt.outcome_lines,
        state_after=state_after_repair if output is None else partial(state_after_writing, output=output),
    )


def _word(receipt: Receipt) -> str:
    return _WORDS["dry" if receipt.dry_run and receipt.steps else (receipt.status, bool(receipt.steps))]


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
