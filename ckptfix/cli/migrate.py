"""``ckptfix migrate``."""

import click

from ckptfix.cli.report import Report, interruptible
from ckptfix.cli.several_paths import state_after_writing
from ckptfix.cli.teamwork import TO_CONTINUE
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
            "Write the complete training state for FSDP with 4 processes.",
        ),
    ],
)
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH)
@click.option(
    "--to",
    required=True,
    type=click.Choice([target.value for target in (*TARGETS, *Strategy)]),
    help="The target format or, with --state all, the target strategy.",
)
@click.option("--state", type=click.Choice(STATES), default=WEIGHTS,
              help="weights: only the models (the default); all: also optimizers and everything else.")  # fmt: skip
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    metavar="N",
    help=(
        "With --state all: the number of processes that will load DST (default: as many as saved "
        "SRC)."
    ),
)
@click.option(
    "--model",
    metavar="MODULE:FACTORY",
    help=(
        "With --state all: a function that returns the run's model, for checkpoints that do not "
        "name the optimizer's parameters."
    ),
)
@click.option(
    "--frozen",
    metavar="REGEX",
    help="With --state all: the names of parameters that are in no optimizer.",
)
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    help=(
        "Maximum size of the tensors in one file, such as 5GB (the default, except for save_state "
        "folders)."
    ),
)
@click.option("--keys", type=click.Choice([keys.value for keys in Keys]),
              help="auto: collapse nested wrappers; bare: strip all; ddp: keep exactly one 'module.'.")  # fmt: skip
@click.option(
    "--dtype",
    type=click.Choice([*FLOATS, ORIGINAL]),
    help=(
        "Convert floating-point tensors. original: DeepSpeed tensors in the training dtype, not in "
        "fp32."
    ),
)
@click.option(
    "--drop-opaque",
    is_flag=True,
    help="Leave out values that are not tensors, such as extra states.",
)
@click.option("--no-verify", is_flag=True, help="Do not read DST back to verify it.")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace DST once the new folder is complete; only if migrate wrote DST.",
)
@click.option(
    "--allow-damage",
    is_flag=True,
    help="Migrate SRC even if it needs a repair; DST will have the same errors.",
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
    """Convert a checkpoint to another format or training strategy.

    DST appears once it is complete, or not at all. SRC is not changed.
    """
    if is_url(local_path(dst)) and executor.partial is not None:
        raise UsageError(
            f"--partial keeps its files on a disk, next to DST, but {escape(dst)} is a URL; next: "
            f"migrate to a folder, then run: ckptfix upload FOLDER {shell_path(dst)}"
        )
    describe = state_after_writing(src, dst)
    continues = f"; {TO_CONTINUE}" if executor.partial is not None else ""
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
