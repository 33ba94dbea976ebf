"""``ckptfix migrate``."""

import click

from ckptfix.cli.report import Report
from ckptfix.operations.migrate import MigrateReceipt, migrate
from ckptfix.operations.migrate.options import FLOATS, ORIGINAL, TARGETS
from ckptfix.operations.policy import Keys
from ckptfix.wording import count_of, human_size


@click.command("migrate")
@click.argument("src", type=click.Path(exists=True))
@click.argument("dst", type=click.Path())
@click.option(
    "--to", required=True, type=click.Choice([target.value for target in TARGETS]), help="The new format."
)
@click.option("--max-shard-size", metavar="SIZE",
              help="Bytes of tensors in a file, such as 5GB (the default, but for folders of save_state).")  # fmt: skip
@click.option("--keys", type=click.Choice([keys.value for keys in Keys]),
              help="auto: collapse nested wrappers; bare: strip all; ddp: leave exactly one 'module.'.")  # fmt: skip
@click.option("--dtype", type=click.Choice([*FLOATS, ORIGINAL]),
              help="Convert floating point tensors; original: DeepSpeed's as in training, not in fp32.")  # fmt: skip
@click.option(
    "--drop-opaque", is_flag=True, help="Leave out values that are no tensors, such as extra states."
)
@click.option("--no-verify", is_flag=True, help="Do not read everything back.")
@click.option(
    "--overwrite", is_flag=True, help="Replace the checkpoint or file at DST once the new one is whole."
)
@click.option("--dry-run", is_flag=True, help="Show the plan and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def migrate_command(
    src: str,
    dst: str,
    to: str,
    max_shard_size: str | None,
    keys: str | None,
    dtype: str | None,
    drop_opaque: bool,
    no_verify: bool,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Write the checkpoint SRC in another format to DST, which is there whole or not at all; SRC stays as it is."""
    report = Report(as_json=as_json)
    with report.progress(f"migrating {src}") as progress:
        receipt = migrate(
            src,
            dst,
            to=to,
            max_shard_size=max_shard_size,
            keys=keys,
            dtype=dtype,
            drop_opaque=drop_opaque,
            verify=not no_verify,
            overwrite=overwrite,
            dry_run=dry_run,
            progress=progress,
            on_plan=lambda plan: print_plan(report, plan),
        )
    print_receipt(report, receipt)
    return report.finish(receipt.as_json(), receipt.status)


def print_plan(report: Report, plan: MigrateReceipt) -> None:
    """Print what becomes of each model and of every other file."""
    report.line(f"plan for {plan.path}:", bold=True)
    for model in plan.models:
        ties = f" and {count_of(model.ties, 'tie')}" if model.ties else ""
        size = human_size(model.nbytes)
        report.line(
            f"  {model.label}: {count_of(model.tensors, 'tensor')}{ties}, {size} -> {_files(model.files)}"
        )
    if plan.carried:
        report.line(f"  carried over: {_files(plan.carried, 'file')}")
    if plan.rewritten:
        report.line(f"  with the new dtype: {_files(plan.rewritten)}")
    if plan.removed:
        what = plan.output if plan.removed == (".",) else _files(plan.removed, "file")
        report.line(f"  to be replaced in {plan.output}: {what}", colour="yellow")
    report.few(
        [f"  not carried over: {one.what}: {one.reason}" for one in plan.left_out],
        "that are not carried over",
        colour="yellow",
    )


def print_receipt(report: Report, receipt: MigrateReceipt) -> None:
    """Print what was done, and what was not looked at."""
    what = (
        f"{count_of(len(receipt.models), 'model')}, {human_size(receipt.bytes_to_write)} in {receipt.output}"
    )
    if receipt.dry_run:
        report.line(f"dry run: nothing was written; it would be {what}")
    elif receipt.verified:
        report.line(f"done and verified: {what}", colour="green")
    else:
        report.line(f"done: {what}", colour="green")
    for words in receipt.warnings:
        report.line(f"warning: {words}", colour="yellow")
    for words in receipt.not_checked:
        report.line(f"not checked: {words}")


def _files(names: tuple[str, ...], noun: str = "") -> str:
    """Return a few names in words: one, the first and the last of many, and how many there are."""
    if len(names) == 1:
        return names[0]
    many = f"{count_of(len(names), noun or 'file')}, {names[0]}"
    return f"{many} and {names[-1]}" if len(names) == 2 else f"{many} to {names[-1]}"
