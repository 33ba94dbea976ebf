"""``ckptfix verify``: digests, or with ``--device-map`` the proof of a reload."""

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckptfix.cli.annotations import Annotation
from ckptfix.cli.report import Form, Report, ensure_writable, publish
from ckptfix.cli.several_paths import run_each
from ckptfix.cli.verb_options import PATH, LocalFile, Verb, or_here
from ckptfix.diagnosis.check import check
from ckptfix.diagnosis.findings.base import Finding, Severity, finding_lines, salvage_lines
from ckptfix.errors import UsageError
from ckptfix.pages import html_document, html_lines
from ckptfix.storage.executor import Executor
from ckptfix.storage.files import StorePath, is_url
from ckptfix.storage.opened import errors_with_place, open_files, with_place
from ckptfix.storage.paths import command, shell_path
from ckptfix.storage.staged import staging_folder
from ckptfix.wording import Line, human_size, line

if TYPE_CHECKING:
    from ckptfix.verification.verify_report import VerifyReport


_R = TypeVar("_R")


def reload(
    report: Report, path: str, device_map: str, max_memory: str | None, model: str | None,
    repeats: int, require_transfer_proof: bool, html: str | None, *, data: bool = False,
    source: StorePath | None = None,
) -> int:  # fmt: skip
    """Prove a reload, print it, and return the exit status. ``html``: a file for the page, tried
    before all else.

    ``data``: before that, do all that ``verify --data`` does. ``source``: the folder in a store of
    which ``path`` is a copy.
    """

    def told(result: _R) -> _R:
        return result if source is None else with_place(result, Path(path), source)

    name = path if source is None else str(source)
    if html is not None:
        ensure_writable(report, html, (path,))
    if is_url(path):  # safetensors and torch open files by themselves
        with open_files(path) as place:
            from ckptfix.training.loading.fetching import as_listed, copied

            assert isinstance(place, StorePath)
            remote = as_listed(place)
            report.message(
                f"{path}: downloading {human_size(remote.nbytes)} to {staging_folder()} for the "
                "reload"
            )
            with (
                report.progress(f"downloading {path}") as progress,
                copied(remote, progress) as copy,
                errors_with_place(copy, place),
            ):
                return reload(
                    report, str(copy), device_map, max_memory, model, repeats,
                    require_transfer_proof, html, data=data, source=place,
                )  # fmt: skip
    document: dict[str, Any] = {"path": name, "findings": []}
    shown: list[Line] = []

    def show(lines: Iterable[Line]) -> None:
        before = len(shown)
        shown.extend(lines)
        report.show(shown[before:])

    data_status = 0
    if data:
        from ckptfix.verification.verify import verify

        with report.progress(f"reading {name}") as progress:
            verified = told(verify(path, data=True, progress=progress))
        show(verified.lines())
        document["data"] = verified.as_json()
        data_status = verified.status
        findings = verified.findings
    else:
        findings = told(check(path).all_findings)
    document["findings"] = [finding.as_json(name) for finding in findings]
    # Errors stop it. Warnings are said, and are no word about the reload: a Trainer's folder always
    # has one.
    serious = [finding for finding in findings if finding.severity is not Severity.NOTE]
    if not data:
        show(finding_lines(serious, name))
    if any(finding.severity is Severity.ERROR for finding in serious):
        show(_what_to_do(name, findings))
        document["reload"] = None
        status = max(1, data_status)
    else:
        gc.enable()  # a model is many cycles, and must go before the next one is dispatched
        from ckptfix.devices.reload.verifying import verify_reload

        # Stdout is for the result: a model of the user's that prints must not get into it.
        with report.progress(f"verifying {name}") as progress, redirect_stdout(sys.stderr):
            result = verify_reload(
                path, device_map=device_map, max_memory=max_memory, model=model, repeats=repeats,
                require_transfer_proof=require_transfer_proof, progress=progress,
            )  # fmt: skip
            result = told(result)
        show(result.lines())
        if data_status:
            words = "--data found problems; they are listed above the results of the reload"
            show([line(words, colour="red")])
        document["reload"] = result.as_json()
        status = max(data_status, result.status)
    if html is not None:
        page = html_document(f"ckptfix verify {name}", [html_lines(shown)])
        if problem := publish(report, html, page):
            return report.finish({**document, "error": problem}, 3)
    return report.finish(document, status)


def _what_to_do(path: str, findings: Sequence[Finding]) -> Iterator[Line]:
    """Yield what to do with a damaged checkpoint."""
    yield line("reload skipped: the checkpoint is damaged", bold=True)
    salvages = [*salvage_lines(findings, path)]
    if salvages:
        yield salvages[0]
    elif any(finding.is_fixable for finding in findings):
        yield line(f"next: ckptfix repair {shell_path(path)}")
    else:  # no command mends it, and check would only repeat it
        advice = (
            finding.advice_at(path) for finding in findings if finding.severity is Severity.ERROR
        )
        yield line(f"next: {next(filter(None, advice), 'load an older checkpoint')}")


_REPEATS = 8
_WORDS = {1: "with problems", 3: "not fully read", 0: "verified"}
_NOTHING = "without checksums"
_VALUES = "verified by values only"


def _unfit(params: Mapping[str, Any]) -> str:
    """Return why a reload is not proven by several processes, "" when none was asked for."""
    names = ("device_map", "max_memory", "repeats", "html", "require_transfer_proof")
    return (
        "the reload test uses the devices of one process"
        if any(params[name] for name in names)
        else ""
    )


@click.command(
    "verify",
    cls=Verb,
    rare=[
        "--certificate-chain",
        "--identity",
        "--identity-provider",
        "--trust-config",
        "--oms",
        "--max-memory",
        "--repeats",
        "--require-transfer-proof",
    ],
    shared=lambda params: _unfit(params),
    forms=[form for form in Form if form is not Form.JSONL],
    examples=[
        ("ckptfix verify CHECKPOINT", "Compare every file and tensor with the manifest."),
        (
            "ckptfix verify CHECKPOINT --data",
            "Also look for NaN, Inf and lost pages in the values.",
        ),
        (
            "ckptfix verify CHECKPOINT --signature model.sig --key key.pub",
            "Compare with the digests that the owner of a key signed.",
        ),
        (
            "ckptfix verify MODEL --device-map auto",
            "Load the model onto the devices, and verify what arrives.",
        ),
    ],
)
@click.argument("paths", nargs=-1, metavar="[DIR]...", type=PATH, callback=or_here)
@click.option(
    "--data", is_flag=True, help="Look for NaN, Inf and zeros in the values of all weights."
)
@click.option("--against", type=PATH, hidden=True)
@click.option(
    "--signature", "signatures", type=PATH, multiple=True, metavar="FILE",
    help="Compare with a signed OpenSSF Model Signing statement instead of the manifest. Name the signer with --key, "
    "--certificate-chain or --identity.",
)  # fmt: skip
@click.option(
    "--key",
    type=PATH,
    metavar="PUBLIC_KEY",
    help="The public key of the expected signer, in PEM.",
)
@click.option(
    "--certificate-chain", "certificates", type=PATH, multiple=True, metavar="FILE",
    help="A certificate, in PEM, to which the signer's certificate must chain.",
)  # fmt: skip
@click.option(
    "--identity",
    metavar="NAME",
    help="The expected signer's Sigstore identity, such as name@example.com.",
)
@click.option(
    "--identity-provider", metavar="URL", help="The OpenID provider that issued the identity."
)
@click.option(
    "--trust-config",
    type=PATH,
    metavar="FILE",
    help="Use the Sigstore instance that this file describes.",
)
@click.option(
    "--oms", "statements", type=PATH, multiple=True, metavar="FILE",
    help="Compare with a statement, signed or not, without verifying who signed it.",
)  # fmt: skip
@click.option(
    "--sha256sums", type=PATH, multiple=True, metavar="FILE",
    help="Compare with a list that sha256sum wrote. Without a manifest, SHA256SUMS in or next to DIR is used.",
)  # fmt: skip
@click.option(
    "--device-map", metavar="MAP",
    help="Test a reload instead: auto, balanced, sequential, balanced_low_0, or a JSON file with a map.",
)  # fmt: skip
@click.option(
    "--max-memory",
    metavar="JSON",
    help='Memory that an automatic map may use: \'{"0": "4GiB", "cpu": "8GiB"}\'.',
)
@click.option(
    "--model", metavar="MODULE:FACTORY",
    help="A function that returns the model, or (model, inputs). Default: the class that config.json names.",
)  # fmt: skip
@click.option(
    "--repeats", type=click.IntRange(min=1), metavar="N",
    help="Number of runs of the split model with direct and with staged copies (default: "
    f"{_REPEATS} of each; 1 without a GPU).",
)  # fmt: skip
@click.option(
    "--require-transfer-proof",
    is_flag=True,
    help="Treat transfers that were not exercised as failures.",
)
@click.option(
    "--html",
    type=LocalFile(dir_okay=False),
    metavar="FILE",
    help="Write the report as one HTML page.",
)
def verify_command(
    paths: tuple[str, ...], data: bool, against: str | None, signatures: tuple[str, ...],
    key: str | None, certificates: tuple[str, ...], identity: str | None,
    identity_provider: str | None, trust_config: str | None, statements: tuple[str, ...],
    sha256sums: tuple[str, ...], device_map: str | None, max_memory: str | None, model: str | None,
    repeats: int | None, require_transfer_proof: bool, html: str | None, report: Report,
    executor: Executor,
) -> int:  # fmt: skip
    """Verify checksums, or test loading.

    Checks each DIR (default: the current folder), and compares every file and tensor with the
    digests that seal wrote, with a signature, or with a list that sha256sum wrote. A download from
    the Hugging Face Hub needs none of these: its files are compared with the digests that the Hub
    client recorded. Nor does an upload: its commit marker has the digests.

    With --device-map or one of its options, loads DIR with that map instead, and checks bytes,
    keys, values, transfers and outputs. Anything this machine cannot test is listed as NOT
    exercised, never as proven. Your code in --model is run, code in the folder never. With --data
    as well, both are done.
    """
    if against is not None:
        options = () if model is None else ("--model", model)
        steps = (f"{command('diff', path, '', *options)} {shell_path(against)}" for path in paths)
        raise UsageError(f"--against was removed in 0.6.0; next: {'; '.join(steps)}")
    given = (device_map, max_memory, model, repeats)
    if any(option is not None for option in given) or require_transfer_proof:
        if signatures or statements or sha256sums:
            raise UsageError(
                "--signature, --oms and --sha256sums compare digests; the reload test (--device-map "
                "and its options) does not use them"
            )
        if len(paths) > 1:
            raise UsageError(
                f"--device-map tests one reload at a time: name one DIR instead of {len(paths)}"
            )
        if report.is_annotated:
            raise UsageError(
                f"--format {report.form.value}: the reload test prints only text or json"
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
            data=data,
        )
    if html is not None:
        raise UsageError("--html is for the reload test: add --device-map auto")
    from ckptfix.verification.signatures import Trust
    from ckptfix.verification.verify import verify

    whom = (key, certificates, identity, identity_provider, trust_config)
    trust = Trust(
        key=key, certificates=certificates, identity=identity, identity_provider=identity_provider,
        trust_config=trust_config,
    )  # fmt: skip

    def work(path: str) -> "VerifyReport":
        with report.progress(f"reading {path}") as progress:
            return verify(
                path, data=data, signatures=signatures, statements=statements,
                sha256sums=sha256sums, trust=trust if any(whom) else None, progress=progress,
                executor=executor,
            )  # fmt: skip

    def word(result: "VerifyReport") -> str:
        if result.status == 0 and result.no_digest:
            return _VALUES
        is_unsealed = not (result.is_damaged or result.unfinished or result.is_verified)
        return _NOTHING if is_unsealed else _WORDS[result.status]

    order = [*_WORDS.values(), _VALUES, _NOTHING]
    return run_each(
        report, paths, work, word=word, order=order, annotations=_annotations, executor=executor
    )


def _annotations(result: "VerifyReport") -> Iterator[Annotation]:
    """Yield the findings of the structure, what differs, what is wrong with values, and what was
    not verified.
    """
    from ckptfix.verification.verify_report import Kind

    for finding in result.findings:
        yield Annotation(finding.severity, str(finding), result.root / finding.path, finding.code)
    for item in result.differences:
        file = result.root / (item.name if item.kind is Kind.FILE else item.where)
        assert item.change is not None, "what differs has changed in some way"
        yield Annotation(Severity.ERROR, str(item), file, f"digest-{item.change.value}")
    if result.crossed:
        words = f"positions of models differ: {result.crossed}"
        yield Annotation(Severity.ERROR, words, result.path, "digest-crossed")
    for value in result.values:
        yield Annotation(value.severity, str(value), result.path, value.code)
    for words in result.unfinished:
        yield Annotation(Severity.ERROR, f"could not be read: {words}", result.path)
    if not result.is_verified:
        yield Annotation(Severity.ERROR, f"nothing was verified: {result.no_digest}", result.path)
