"""``ckptfix migrate``."""

import click

from ckptfix.cli.report import Report, interruptible
from ckptfix.cli.several_paths import state_after_writing
from ckptfix.cli.verb_options import PATH, Verb
from ckptfix.conversion.migrate import migrate
from ckptfix.conversion.migration_plan import FLOATS, ORIGINAL, STATES, TARGETS, WEIGHTS
from ckptfix.diagnosis.policy import Keys
from ckptfix.errors import UsageError
from ckptfix.storage.executor import Executor
from ckptfix.storage.files import is_url, local_path
from ckptfix.storage.paths import shell_path
from ckptfix.tensors.optimizers import Strategy
from ckptfix.wording import escape


@click.command(
    "migrate",
    cls=Verb,
    rare=["--frozen", "--drop-opaque", "--max-shard-size", "--no-verify"],
    shared=lambda params: "",
    examples=[
        (
            "ckptfix migrate SRC DST --to safetensors",
            "Write the tensors of SRC as safetensors files.",
        ),
        ("ckptfix migrate SRC DST --to dcp --dry-run", "Show what would be written."),
        (
            "ckptfix migrate SRC DST --state all --to fsdp --processes 4",
            "Write the complete state for FSDP in 4 processes.",
        ),
    ],
)
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH)
@click.option(
    "--to",
    required=True,
    type=click.Choice([target.value for target in (*TARGETS, *Strategy)]),
    help="The new format; with --state all: the new strategy.",
)
@click.option("--state", type=click.Choice(STATES), default=WEIGHTS,
              help="weights: the models (the default); all: optimizers and everything else, too.")  # fmt: skip
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --state all: how many will load it (default: as many as saved it).",
)
@click.option(
    "--model",
    metavar="MODULE:FACTORY",
    help=(
        "With --state all: the run's model, where the checkpoint does not name its optimizer's "
        "parameters."
    ),
)
@click.option(
    "--frozen",
    metavar="REGEX",
    help="With --state all: names of parameters that no optimizer has.",
)
@click.option("--max-shard-size", metavar="SIZE",
              help="Bytes of tensors in a file, such as 5GB (the default, but for folders of save_state).")  # fmt: skip
@click.option("--keys", type=click.Choice([keys.value for keys in Keys]),
              help="auto: collapse nested wrappers; bare: strip all; ddp: leave exactly one 'module.'.")  # fmt: skip
@click.option("--dtype", type=click.Choice([*FLOATS, ORIGINAL]),
              help="Convert floating point tensors; original: DeepSpeed's as in training, not in fp32.")  # fmt: skip
@click.option(
    "--drop-opaque",
    is_flag=True,
    help="Leave out values that are not tensors, such as extra states.",
)
@click.option("--no-verify", is_flag=True, help="Do not read everything back.")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace a folder that migrate wrote, once the new one is complete.",
)
@click.option(
    "--allow-damage",
    is_flag=True,
    help="Migrate SRC although a repair is known; DST has the same errors.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan and stop.")
def migrate_command(
    src: str,
    dst: str,
    to: str,
    state: str,
    processes: int | None,
    model: str | None,
    frozen: str | None,
    max_shard_size: str | None,
    keys: str | None,
    dtype: str | None,
    drop_opaque: bool,
    no_verify: bool,
    overwrite: bool,
    allow_damage: bool,
    dry_run: bool,
    report: Report,
    executor: Executor,
) -> int:
    """Write a checkpoint in another format, or for another strategy.

    DST appears when it is complete, or not at all; SRC stays as it is.
    """
    if is_url(local_path(dst)) and executor.partial is not None:
        raise UsageError(
            f"--partial keeps files next to DST, on a disk, and {escape(dst)} is a URL; next: "
            f"migrate to a folder, and then: ckptfix upload FOLDER {shell_path(dst)}"
        )
    describe = state_after_writing(src, dst)
    continues = (
        "; the same command continues from what was written" if executor.partial is not None else ""
    )
    with (
        interruptible(lambda: f"{describe()}{continues}"),
        report.progress(f"migrating {src}") as progress,
    ):
        receipt = migrate(
            src,
            dst,
            to=to,
            state=state,
            processes=processes,
            model=model,
            frozen=frozen,
            max_shard_size=max_shard_size,
            keys=keys,
            dtype=dtype,
            drop_opaque=drop_opaque,
            verify=not no_verify,
            overwrite=overwrite,
            allow_damage=allow_damage,
            dry_run=dry_run,
            progress=progress,
            executor=executor,
            on_plan=lambda plan: report.show(plan.plan_lines()),
        )
    report.show(receipt.outcome_lines())
    return report.finish(receipt, receipt.status)
