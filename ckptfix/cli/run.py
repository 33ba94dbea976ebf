"""``ckptfix run``."""

import functools
from collections.abc import Callable

import click


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "--on-reprepare",
    type=click.Choice(["warn", "raise"]),
    default="warn",
    show_default=True,
    help="What to do when an object is given to prepare() again.",
)
@click.option("--no-check-backward", is_flag=True, help="Do not warn of loss.backward().")
@click.option(
    "--wait-for-ranks",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long save_state on the main process waits for the others before it saves alone.",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(
    on_reprepare: str,
    no_check_backward: bool,
    wait_for_ranks: float,
    script: str,
    arguments: tuple[str, ...],
) -> Callable[[], None]:
    """Run a training script as `python SCRIPT` does, with every Accelerator in it guarded.

    All that follows SCRIPT is the script's own. Under several processes:
    torchrun --nproc_per_node 2 --module ckptfix run SCRIPT, or accelerate launch -m ckptfix run SCRIPT.
    """
    from ckptfix.runtime.running import run_script

    # Returned, not called: the script runs outside of this command line, which would catch what it raises.
    return functools.partial(
        run_script,
        script,
        arguments,
        on_reprepare=on_reprepare,
        check_backward=not no_check_backward,
        wait_for_ranks=wait_for_ranks,
    )
