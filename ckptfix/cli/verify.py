"""``ckptfix verify``: digests, or with ``--device-map`` the proof of a reload."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ckptfix.cli.annotations import Annotation
from ckptfix.cli.reloading import reload
from ckptfix.cli.report import Form, Report
from ckptfix.cli.several import run_each
from ckptfix.cli.verb import Verb
from ckptfix.errors import UsageError
from ckptfix.operations.findings import Severity

if TYPE_CHECKING:
    from ckptfix.operations.sealing.report import VerifyReport

_REPEATS = 8
_WORDS = {1: "with problems", 3: "not read completely", 0: "verified"}
_NOTHING = "without a digest"


@click.command(
    "verify",
    cls=Verb,
    forms=list(Form),
    examples=[
        ("ckptfix verify CHECKPOINT", "Compare every file and tensor with the manifest."),
        ("ckptfix verify CHECKPOINT --data", "Look for NaN, Inf and lost pages in the values, too."),
        ("ckptfix verify COPY --against CHECKPOINT", "Compare with another checkpoint instead."),
        (
            "ckptfix verify MODEL --device-map auto",
            "Load the model onto the devices, and prove what arrives.",
        ),
    ],
)
@click.argument("paths", nargs=-1, metavar="[DIR]...", type=click.Path())
@click.option("--data", is_flag=True, help="Look for NaN, Inf and zeros in the values of all weights.")
@click.option(
    "--against", type=click.Path(), metavar="OTHER",
    help="Compare with another checkpoint, of any format, instead of the manifest.",
)  # fmt: skip
@click.option(
    "--device-map", metavar="MAP",
    help="Prove a reload instead: auto, balanced, sequential, balanced_low_0, or a JSON file with a map.",
)  # fmt: skip
@click.option(
    "--max-memory", metavar="JSON", help='What a made map may use: \'{"0": "4GiB", "cpu": "8GiB"}\'.'
)
@click.option(
    "--model", metavar="MODULE:FACTORY",
    help="A function that returns the model, or (model, inputs). Without it: the class that config.json names.",
)  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), metavar="N",
              help=f"Runs of the split model each way: {_REPEATS} unless said.")  # fmt: skip
@click.option(
    "--require-transfer-proof", is_flag=True, help="Transfers that were not exercised count as failed."
)
@click.option(
    "--html", type=click.Path(dir_okay=False), metavar="FILE", help="Write the report as one HTML page."
)
def verify_command(
    paths: tuple[str, ...], data: bool, against: str | None, device_map: str | None, max_memory: str | None,
    model: str | None, repeats: int | None, require_transfer_proof: bool, html: str | None, report: Report,
) -> int:  # fmt: skip
    """Compare checkpoints with their manifests, or prove a reload.

    Checks each DIR (or this folder), and compares every file and tensor with the digests that seal wrote.

    With --device-map, or an option that belongs to it, load it onto a device map instead and prove what arrives: bytes,
    names, transfers, outputs. What this machine cannot exercise is said, never counted as proven. --model runs your own
    code; the folder's never.
    """
    paths = paths or (".",)
    given = (device_map, max_memory, model, repeats)
    if any(one is not None for one in given) or require_transfer_proof:
        if data or against is not None:
            raise UsageError(
                "--data and --against compare digests, and have no part in the proof of a reload"
            )
        if len(paths) > 1:
            raise UsageError(
                f"--device-map proves one reload at a time: give one DIR instead of {len(paths)}"
            )
        if report.is_annotated:
            raise UsageError(
                f"--format {report.form.value}: the proof of a reload is printed as text or json"
            )
        return reload(
            report,
            paths[0],
            device_map or "auto",
            max_memory,
            model,
            repeats or _REPEATS,
            require_transfer_proof,
            html,
        )
    if html is not None:
        raise UsageError("--html is for the proof of a reload: add --device-map auto")
    from ckptfix.operations.sealing.verify import verify

    def work(path: str) -> "VerifyReport":
        with report.progress(f"reading {path}") as progress:
            return verify(path, data=data, against=against, progress=progress)

    def word(result: "VerifyReport") -> str:
        return _WORDS[result.status] if result.is_damaged or result.is_verified else _NOTHING

    order = [*_WORDS.values(), _NOTHING]
    return run_each(report, paths, work, word=word, order=order, annotations=_annotations)


def _annotations(result: "VerifyReport") -> Iterator[Annotation]:
    """Yield the findings of the structure, what differs, what is wrong with values, and what was not verified."""
    from ckptfix.operations.sealing.report import Kind

    root = result.path.parent if result.path.is_file() else result.path
    for finding in result.findings:
        yield Annotation(finding.severity, str(finding), root / finding.path, finding.code)
    for item in result.differences:
        file = root / (item.name if item.kind is Kind.FILE else item.where)
        change = "differs" if item.change is None else item.change.value
        yield Annotation(Severity.ERROR, str(item), file, f"digest-{change}")
    if result.crossed:
        words = f"positions of models differ: {result.crossed}"
        yield Annotation(Severity.ERROR, words, result.path, "digest-crossed")
    for value in result.values:
        yield Annotation(value.severity, str(value), result.path, value.code)
    for words in result.unfinished:
        yield Annotation(Severity.ERROR, f"could not be read: {words}", result.path)
    if not result.is_verified:
        yield Annotation(Severity.ERROR, f"nothing was verified: {result.no_digest}", result.path)
