"""``ckptfix verify``."""

import gc
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptfix.cli.report import Report
from ckptfix.errors import UsageError
from ckptfix.operations.check import CheckReport, check
from ckptfix.operations.findings import Severity
from ckptfix.wording import collapse_layers, count_of, human_size

if TYPE_CHECKING:
    from ckptfix.runtime.devices.reload import ReloadReport

_COLOURS = {"proven": "green", "TOLERANCE": "yellow", "failed": "red", "not exercised": None}


@click.command("verify")
@click.argument("path", default=".", metavar="[DIR]", type=click.Path(exists=True))
@click.option(
    "--device-map", default="auto", show_default=True, metavar="MAP",
    help="auto, balanced, sequential, balanced_low_0, or a JSON file with a map.",
)  # fmt: skip
@click.option(
    "--max-memory", metavar="JSON", help='What a made map may use: \'{"0": "4GiB", "cpu": "8GiB"}\'.'
)
@click.option(
    "--model", metavar="MODULE:FACTORY",
    help="A function that returns the model, or (model, inputs). Without it: the class that config.json names.",
)  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=8, show_default=True, metavar="N",
              help="Runs of the split model each way.")  # fmt: skip
@click.option(
    "--require-transfer-proof", is_flag=True, help="Transfers that were not exercised count as failed."
)
@click.option(
    "--html", type=click.Path(dir_okay=False), metavar="FILE", help="Write the report as one HTML page."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify_command(
    path: str, device_map: str, max_memory: str | None, model: str | None, repeats: int,
    require_transfer_proof: bool, html: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Load the checkpoint in DIR onto a device map, and prove what arrives: bytes, names, transfers, outputs.

    What this machine cannot exercise is said, never counted as proven. --model runs your own code; the folder's never.
    """
    report = Report(as_json=as_json)
    if html is not None and not Path(html).absolute().parent.is_dir():
        raise UsageError(f"--html {html}: {Path(html).absolute().parent} is no folder")
    checked = check(path)
    document: dict[str, Any] = {"path": path, "findings": [one.as_json(path) for one in checked.findings]}
    # Errors stop it. Warnings are said, and are no word about the reload: a Trainer's folder always has one.
    serious = [one for one in checked.findings if one.severity is not Severity.NOTE]
    report.findings(serious, path)
    if any(one.severity is Severity.ERROR for one in serious):
        _say_what_to_do(report, path, checked)
        return report.finish({**document, "reload": None}, 1)
    gc.enable()  # a model is many cycles, and must go before the next one is dispatched
    from ckptfix.runtime.devices.reload import verify_reload

    # Stdout is for the result: a model of the user's that prints must not get into it.
    with report.progress(f"verifying {path}") as progress, redirect_stdout(sys.stderr):
        result = verify_reload(
            path, device_map=device_map, max_memory=max_memory, model=model, repeats=repeats,
            require_transfer_proof=require_transfer_proof, progress=progress,
        )  # fmt: skip
    print_reload(report, result)
    if html is not None:
        from ckptfix.runtime.devices.reload.page import html_page

        Path(html).write_text(html_page(result), encoding="utf-8")
        report.line(f"report: {html}")
    return report.finish({**document, "reload": result.as_json()}, result.status)


def _say_what_to_do(report: Report, path: str, checked: CheckReport) -> None:
    report.line("not exercised: the reload, because the checkpoint is damaged", bold=True)
    verb = "repair" if any(one.is_fixable for one in checked.findings) else "check"
    report.line(f"next: ckptfix {verb} {shlex.quote(path)}")


def print_reload(report: Report, result: "ReloadReport") -> None:
    """Print the map, the table of proofs, the matrix of pairs, and the verdict."""
    report.line(
        f"{result.path}: {count_of(result.tensors, 'tensor')}, {human_size(result.nbytes)}; {result.machine}",
        bold=True,
    )
    report.line(f"model: {result.model or 'no class'}; device map: {result.map_source}")
    by_device: dict[str, list[str]] = {}
    for name, device in result.device_map.items():
        by_device.setdefault(device, []).append(
            f"{name}."
        )  # the number at the end of a block's name counts, too
    for device, names in by_device.items():
        blocks = [name.removesuffix(".") or "the whole model" for name in collapse_layers(names)]
        size = human_size(result.device_bytes.get(device, 0))
        more = f" and {len(blocks) - 8} more" if len(blocks) > 8 else ""
        report.line(f"  {device}: {size}: {', '.join(blocks[:8])}{more}")
    for proof in result.proofs:
        label = proof.outcome.value.upper() if proof.outcome.value == "not exercised" else proof.outcome.value
        report.line(f"{label:>13}  {proof.text}", colour=_COLOURS[proof.outcome.value])
    _print_pairs(report, result)
    if result.status == 0:
        report.line("no fault found in what was exercised", colour="green")
    elif result.require_transfer_proof and result.unproven_transfers:
        count = count_of(len(result.unproven_transfers), "line")
        report.line(f"--require-transfer-proof: {count} about transfers above not exercised", colour="red")


def _print_pairs(report: Report, result: "ReloadReport") -> None:
    """Print one word for each ordered pair of accelerators: rows copy to columns."""
    if not result.pairs:
        return
    words = {facts.pair: facts.word for facts in result.pairs}
    indexes = sorted({index for pair in words for index in pair})
    width = max(9, *(len(word) + 2 for word in words.values()))
    report.line("from \\ to".ljust(11) + "".join(f"{index}".ljust(width) for index in indexes).rstrip())
    for source in indexes:
        cells = (words.get((source, index), "-").ljust(width) for index in indexes)
        report.line(f"{source}".ljust(11) + "".join(cells).rstrip())
