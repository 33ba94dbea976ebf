"""``ckptfix salvage``."""

from typing import TYPE_CHECKING

import click

from ckptfix.cli.report import Report
from ckptfix.wording import collapse_layers, count_of, human_size

if TYPE_CHECKING:
    from ckptfix.operations.salvage import SalvageReceipt
    from ckptfix.weights.salvaging import Lost

_SHOWN = 20


@click.command("salvage")
@click.argument("source", metavar="SRC", type=click.Path(exists=True))
@click.argument("output", metavar="DST", type=click.Path())
@click.option(
    "--keep-damaged",
    is_flag=True,
    help="Keep what is all there but fails its checksum or its digest in the manifest, too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def salvage_command(source: str, output: str, keep_damaged: bool, as_json: bool) -> int:
    """Write what is whole of a damaged checkpoint SRC, a file or a folder, into the new folder DST.

    DST/salvage.json lists what is lost. Exit status: 0 nothing is, 1 something is, 3 nothing could be saved.
    """
    from ckptfix.operations.salvage import salvage

    report = Report(as_json=as_json)
    with report.progress(f"salvaging {source}") as progress:
        receipt = salvage(source, output, keep_damaged=keep_damaged, progress=progress)
    print_salvage(report, receipt)
    return report.finish(receipt.as_json(), receipt.status)


def print_salvage(report: Report, receipt: "SalvageReceipt") -> None:
    """Print what was saved, what is lost and why, and what was not checked."""
    report.line(f"salvaged {receipt.source} to {receipt.output}:", bold=True)
    for file in receipt.saved:
        size = human_size(file.nbytes)
        origin = f", from {file.source}" if file.source != "." else ""  # that is all of the source
        report.line(f"  {file.path}: {count_of(len(file.names), 'tensor')}, {size}{origin}")
    if receipt.copied:
        report.line(f"  {count_of(len(receipt.copied), 'file')} copied as they are")
    _print_lost(report, "kept although damaged", receipt.damaged, "yellow")
    _print_lost(report, "lost", receipt.lost, "red")
    _print_lost(report, "kept, but it may not be what was written", receipt.doubtful, "yellow")
    for words in receipt.left_out:
        report.line(f"left out: {words}")
    for words in receipt.notes:
        report.line(f"note: {words}")
    if receipt.verdict:
        report.line(receipt.verdict, colour="green")
    for words in receipt.not_checked:
        report.line(f"not checked: {words}")
    for step in receipt.next_steps:
        report.line(f"next: {step}")


def _print_lost(report: Report, what: str, every: "tuple[Lost, ...]", colour: str) -> None:
    """Print what is lost, layers of one file with one reason in one line."""
    if not every:
        return
    groups: dict[tuple[str, str], list[Lost]] = {}
    for one in every:
        groups.setdefault((one.file, one.reason), []).append(one)
    lines = []
    for group in groups.values():
        by_name = {one.name: one for one in group}
        lines += [str(one) for one in group if one.name is None]
        for name in collapse_layers(one.name for one in group if one.name is not None):
            lines.append(str(by_name.get(name, group[0]._replace(name=name, need=None, have=None))))
    report.line(f"{what}: {len(every)}", colour=colour, bold=True)
    for line in lines[:_SHOWN]:
        report.line(f"  {line}")
    if len(lines) > _SHOWN:
        report.line(f"  and {len(lines) - _SHOWN} more lines; salvage.json and --json list all")
