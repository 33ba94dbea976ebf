"""``ckptfix prove-resume``."""

import shlex
from pathlib import Path

import click

from ckptfix.cli.report import Report, ensure_writable, publish
from ckptfix.cli.verb_options import LocalFile, Verb
from ckptfix.errors import UsageError


@click.command(
    "prove-resume",
    cls=Verb,
    rare=["--timeout", "--keep"],
    unfit=lambda params: "prove-resume starts COMMAND itself, so the launcher belongs in COMMAND",
    context_settings={"allow_interspersed_args": False},
    examples=[
        (
            (
                "ckptfix prove-resume --resume-args '--resume {checkpoint}' -- train.py "
                "--output_dir {dir}"
            ),
            (
                "Kill the script after its first save, resume it, and compare it with an "
                "uninterrupted run."
            ),
        ),
        (
            (
                "ckptfix prove-resume --steps 40 --save-at 10 -- torchrun --nproc_per_node 2 "
                "train.py --out {dir}"
            ),
            "The same with two processes, for a script that finds its last checkpoint itself.",
        ),
    ],
)
@click.option(
    "--resume-args", metavar="ARGS", default="",
    help="Extra arguments for the resumed run, in quotes. {checkpoint} is replaced by the saved folder.",
)  # fmt: skip
@click.option(
    "--save-at", type=click.IntRange(min=1), default=1, metavar="STEP", show_default=True,
    help="Kill the run after its first save at this optimizer step or later.",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(min=2), metavar="N",
    help="End every run after optimizer step N.  [default: when the script ends]",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="DIR",
    help="The output folder of the script, if COMMAND cannot contain {dir}. It must not exist yet.",
)  # fmt: skip
@click.option(
    "--guard",
    is_flag=True,
    help="Guard every Accelerator and Trainer in the script, as ckptfix run does.",
)
@click.option(
    "--keep", type=click.Path(path_type=Path), metavar="DIR",
    help="Keep everything that the runs write (output, checkpoints, records) in DIR.",
)  # fmt: skip
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="Fail if a run takes longer.",
)  # fmt: skip
@click.option(
    "--html",
    type=LocalFile(dir_okay=False),
    metavar="FILE",
    help="Write a page that shows all states at every step.",
)
@click.argument("command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def prove_resume_command(
    resume_args: str,
    save_at: int,
    steps: int | None,
    output: Path | None,
    guard: bool,
    keep: Path | None,
    timeout: float | None,
    html: str | None,
    command: tuple[str, ...],
    report: Report,
) -> int:
    """Prove that a killed run resumes bit for bit.

    Runs COMMAND unchanged: killed after a save, resumed, and uninterrupted. {dir} in COMMAND
    becomes a separate output folder for each run. Compares batches, losses, gradients, weights,
    moments, learning rates, schedulers, scaler and generators of every step and rank. Reports the
    first difference and its cause.

    Exit status: 0 exact, 1 not exact, 2 not deterministic even without a resume (or wrong usage),
    3 a run failed.
    """
    if html is not None:
        ensure_writable(report, html, [str(output)] if output is not None else [])
    from ckptfix.training.resume_proofs.resume_proof import Request, prove_resume

    try:
        resume_arguments = shlex.split(resume_args)
    except ValueError as error:
        raise UsageError(f"--resume-args {resume_args!r}: {error}") from error
    request = Request(command, resume_arguments, save_at, steps, output, keep, guard, timeout)
    result = prove_resume(request, lambda words: None if report.quiet else report.message(words))
    report.show(result.lines())
    if html is not None:
        from ckptfix.training.resume_proofs.certificate import html_page

        if publish(report, html, html_page(result)):
            return report.finish(result, 3)
    return report.finish(result, result.status)
