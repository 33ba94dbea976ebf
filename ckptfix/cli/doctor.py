"""``ckptfix doctor``."""

import os

import click

from ckptfix.cli.report import Report
from ckptfix.cli.verb_options import PATH, Verb
from ckptfix.environment.doctor import doctor
from ckptfix.environment.facts.machine import parse_torch
from ckptfix.errors import OperationError, UsageError
from ckptfix.storage.paths import shell_path

_BUDGET = 30.0
_LONGEST = 86400.0
_SCRIPTS = (".py", ".ipynb")


@click.command(
    "doctor",
    cls=Verb,
    rare=["--budget", "--seed", "--in-process"],
    unfit=lambda params: "doctor examines only the machine that it runs on",
    examples=[
        ("ckptfix doctor", "Check this environment."),
        (
            "ckptfix doctor --launch 'torchrun --nproc_per_node 2 train.py'",
            "Also check a training script and the command that starts it.",
        ),
    ],
)
@click.argument("folder", metavar="[DIR]", required=False, type=PATH)
@click.option(
    "--script", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
    help="A training script or notebook. It is parsed, never executed.",
)  # fmt: skip
@click.option(
    "--launch", metavar="COMMAND",
    help="The command that starts training, in quotes. It is read, never run; the script is taken from it.",
)  # fmt: skip
@click.option(
    "--device-map", type=click.Path(exists=True, dir_okay=False), metavar="FILE.json",
    help="A device map to check against the keys and tied weights in DIR.",
)  # fmt: skip
@click.option(
    "--peer-copies", is_flag=True, help="Test the copies between all devices, and nothing else."
)
@click.option(
    "--budget", type=float, metavar="SECONDS",
    help=f"Time limit for the tests of --peer-copies.  [default: {_BUDGET:g}]",
)  # fmt: skip
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    metavar="N",
    help="Send the same bits as an earlier --peer-copies run.",
)
@click.option(
    "--in-process", is_flag=True,
    help="Query torch in this process. A broken driver can then crash or hang ckptfix.",
)  # fmt: skip
def doctor_command(
    folder: str | None,
    script: str | None,
    launch: str | None,
    device_map: str | None,
    peer_copies: bool,
    budget: float | None,
    seed: int | None,
    in_process: bool,
    report: Report,
) -> int:
    """Find problems with this machine, its libraries and a script.

    Explains why each problem matters and what to do. DIR: a checkpoint to examine as well.

    Changes nothing, except that --peer-copies stores its verdicts for
    dispatch_model(safe_transfers="auto").
    """
    if peer_copies:
        if folder or script or launch or device_map:
            raise UsageError(
                "--peer-copies tests only the copies; leave out DIR, --script, --launch and "
                "--device-map"
            )
        if budget is not None and not 0 < budget <= _LONGEST:
            raise UsageError(
                f"--budget {budget:g}: expected seconds, more than 0 and at most {_LONGEST:g}"
            )
        return _peer_copies(report, budget or _BUDGET, seed, in_process=in_process)
    if budget is not None or seed is not None:
        raise UsageError("--budget and --seed require --peer-copies")
    if folder and folder.endswith(_SCRIPTS) and os.path.isfile(folder):
        raise UsageError(
            f"{folder} is a training script, not a checkpoint; next: ckptfix doctor --script "
            f"{shell_path(folder)}"
        )
    diagnosis = doctor(
        folder, script=script, launch=launch, device_map=device_map, in_process=in_process
    )
    report.show(diagnosis.lines())
    return report.finish(diagnosis, diagnosis.status)


def _peer_copies(report: Report, budget: float, seed: int | None, *, in_process: bool) -> int:
    """Measure, print the matrix, and keep the verdicts."""
    from ckptfix.devices.environment_of_torch import look

    torch = parse_torch(look(in_process=in_process))
    if torch.problem:
        raise OperationError(
            f"P2P copies were not tested: {torch.problem}; for details: ckptfix doctor"
        )
    from ckptfix.devices.probe import probe_peer_copies, remember
    from ckptfix.devices.probe.probe_report import Verdict

    probed = probe_peer_copies(budget=budget, seed=seed, in_process=in_process)
    known = probed
    if probed.pairs:
        known = remember(probed)
    else:
        report.line("no pair of devices: nothing was tested, so nothing is proven", bold=True)
    for line in str(probed).splitlines():
        report.line(line)
    for pair in sorted(probed.with_verdict(Verdict.HEALTHY) & known.unproven):
        report.line(
            "earlier verdict, kept until a complete --peer-copies run finds the pair healthy: "
            f"{known.pairs[pair]}"
        )
    status = int(bool(probed.unproven))
    if status:
        seeded = f"ckptfix doctor --peer-copies --seed {probed.seed} --budget {budget:g}"
        report.line(
            'to do: use dispatch_model(model, device_map, safe_transfers="auto"), which copies '
            "these pairs through the host"
        )
        report.line(f"to repeat this test: {seeded}")
    return report.finish(probed.to_json(), status)
