"""``ckptfix check``."""

import click

from ckptfix.cli.report import Report
from ckptfix.operations.check import CheckReport, check
from ckptfix.operations.target import find_checkpoints
from ckptfix.wording import human_size


@click.command("check")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--data", is_flag=True, help="Read every byte of look-alikes and check every checksum.")
@click.option("--recursive", "-r", is_flag=True, help="Check every checkpoint folder below PATHS.")
@click.option("--quiet", "-q", is_flag=True, help="Print only folders with errors or warnings.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check_command(paths: tuple[str, ...], data: bool, recursive: bool, quiet: bool, as_json: bool) -> int:
    """Say what is wrong with checkpoints. Reads headers and small samples; changes nothing."""
    report = Report(as_json=as_json)
    targets = [found for path in paths for found in find_checkpoints(path)] if recursive else list(paths)
    results = []
    for target in targets:
        with report.progress(f"reading {target}") as progress:
            result = check(target, data=data, progress=progress)
        results.append(result)
        if not (quiet and result.status == 0):
            print_check(report, result)
    if recursive and not targets:
        report.line("no checkpoint found")
    status = max((result.status for result in results), default=0)
    return report.finish({"checkpoints": [result.as_json() for result in results]}, status)


def print_check(report: Report, result: CheckReport) -> None:
    """Print what is wrong with one checkpoint, and what was not looked at."""
    components = result.folder.components
    tensors = sum(len(component.tensors) for component in components)
    size = human_size(sum(component.size for component in components))
    report.line(f"{result.path}: {len(components)} files, {tensors} tensors, {size}", bold=True)
    report.findings(result.findings, str(result.path))
    fixable = any(finding.action.value == "fix" for finding in result.findings) and result.status
    if not components:
        report.line("nothing in it is part of a checkpoint", colour="yellow")
    elif result.status == 0:
        report.line("no error found in what was checked", colour="green")
    if fixable:
        report.line(f"next: ckptfix repair {result.path}")
    for words in result.not_checked:
        report.line(f"not checked: {words}")
