"""``ckptfix run``."""

from collections.abc import Callable

import click

from ckptfix.cli.verb_options import AllHelp


@click.command("run", cls=AllHelp, context_settings={"allow_interspersed_args": False})
@click.option(
    "--on-reprepare",
    type=click.Choice(["warn", "raise"]),
    default="warn",
    show_default=True,
    help="What to do when an object is passed to prepare() again.",
)
@click.option("--no-check-backward", is_flag=True, help="Do not warn about loss.backward().")
@click.option(
    "--save-together",
    is_flag=True,
    help=(
        "Save together, with a barrier at the end, in scripts where every process calls save_state."
    ),
)
@click.option(
    "--save-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Fail a save that has waited SECONDS for other processes (default: 540).",
)
@click.option(
    "--missing-states",
    type=click.Choice(["require", "warn", "ignore"]),
    help=(
        "What a Trainer does when it resumes from a checkpoint without an optimizer, scheduler or "
        "random states (default: require)."
    ),
)
@click.option(
    "--no-check-saves",
    is_flag=True,
    help="Do not warn about saves that would load back differently.",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(
    on_reprepare: str,
    no_check_backward: bool,
    save_together: bool,
    save_timeout: float | None,
    missing_states: str | None,
    no_check_saves: bool,
    script: str,
    arguments: tuple[str, ...],
) -> Callable[[], None]:
    """Run a script with every Accelerator and Trainer guarded.

    Runs SCRIPT as `python SCRIPT` does. Everything after SCRIPT is passed to the script. With
    several processes: torchrun --nproc_per_node 2 --module ckptfix run SCRIPT, or accelerate launch
    -m ckptfix run SCRIPT.
    """
    from ckptfix.training.running import run_script
    from ckptfix.training.trainer.trainer_patch import patch_trainer

    def guard() -> None:
        from ckptfix.training.accelerator import patch_accelerate

        patch_accelerate(
            on_reprepare=on_reprepare,
            check_backward=not no_check_backward,
            save_together=save_together,
            save_timeout=save_timeout,
            check_saves=False if no_check_saves else None,
            missing_states=missing_states,
        )

    def start() -> None:
        # Before anything of transformers is imported: it imports accelerate while its Trainer is
        # half defined.
        patch_trainer()
        run_script(script, arguments, guard)

    # Returned, not called: the script runs outside of this command line, which would catch what it
    # raises.
    return start
