"""The report as one HTML page: no script, nothing loaded from anywhere, every name escaped."""

from collections.abc import Iterable, Mapping

from ckptfix.devices.reload.reload_report import Outcome, PairFacts, Proof, ReloadReport
from ckptfix.wording import collapse_layers, count_of, html_document, human_size
from ckptfix.wording import html_text as _text

_COLOURS = {
    Outcome.PROVEN: "#1a7f37",
    Outcome.TOLERANCE: "#9a6700",
    Outcome.FAILED: "#cf222e",
    Outcome.NOT_EXERCISED: "#6e7781",
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1f2328; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; } th, td { border: 1px solid #d0d7de; padding: .3rem .6rem; text-align: left; }
td, p { overflow-wrap: anywhere; vertical-align: top; }
.outcome { color: #fff; font-weight: 600; white-space: nowrap; }
.bar { background: #0969da; height: .8rem; min-width: 1px; } .track { width: 14rem; }
.cell { color: #fff; min-width: 7rem; } .self { background: #eaeef2; }
"""


def html_page(report: ReloadReport) -> str:
    """Return a whole HTML document that says what the report says."""
    verdict = _verdict(report)
    good = Outcome.NOT_EXERCISED if report.is_empty else Outcome.PROVEN
    colour = _COLOURS[Outcome.FAILED if report.status else good]
    title = f"ckptfix verify {report.path}"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p><strong style="color:{colour}">{_text(verdict)}</strong></p>',
        f"<p>{_text(_about(report))}</p>",
        "<h2>What was proven, and what was not exercised</h2>",
        _table(("outcome", "what"), map(_proof_row, report.proofs)),
        *_divergence(report),
        *_matrix(report),
        "<h2>Device map</h2>",
        f"<p>{_text(report.map_source)}</p>",
        _bytes_table(report.device_bytes),
        _map_table(report.device_map),
    ]
    return html_document(title, _STYLE, parts)


def damage_page(path: str, reason: str, findings: Iterable[tuple[str, str, str]]) -> str:
    """Return a page for a checkpoint of which no reload was proven. ``findings``: severity, code and sentence."""
    title = f"ckptfix verify {path}"
    rows = [f"<tr><td>{_text(level)}</td><td>{_text(code)}</td><td>{_text(says)}</td></tr>"
            for level, code, says in findings]  # fmt: skip
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p><strong style="color:{_COLOURS[Outcome.FAILED]}">{_text(reason)}</strong></p>',
        "<h2>What check found</h2>",
        _table(("severity", "code", "what"), rows),
    ]
    return html_document(title, _STYLE, parts)


def _verdict(report: ReloadReport) -> str:
    if report.is_empty and not report.status:
        return "nothing was exercised, and nothing is proven"
    if not report.status:
        return "no fault found in what was exercised"
    reasons = []
    if failed := sum(proof.outcome is Outcome.FAILED for proof in report.proofs):
        reasons.append(count_of(failed, "failed line"))
    if report.require_transfer_proof and report.unproven_transfers:
        many = count_of(len(report.unproven_transfers), "line")
        reasons.append(f"--require-transfer-proof, and {many} about transfers not exercised")
    return f"failed: {'; '.join(reasons)}"


def _about(report: ReloadReport) -> str:
    model = f"; model: {report.model}" if report.model else "; no model class"
    size = f"{count_of(report.tensors, 'tensor')}, {human_size(report.nbytes)}"
    return f"{size}; {report.machine}{model}; {count_of(report.repeats, 'run')} each way"


def _proof_row(proof: Proof) -> str:
    colour = _COLOURS[proof.outcome]
    label = _text(proof.outcome.value)
    return (
        f'<tr><td class="outcome" style="background:{colour}">{label}</td><td>{_text(proof.text)}</td></tr>'
    )


def _divergence(report: ReloadReport) -> Iterable[str]:
    if report.divergence is not None:
        yield "<h2>First divergence</h2>"
        yield f"<p>{_text(str(report.divergence))}</p>"


def _matrix(report: ReloadReport) -> Iterable[str]:
    if not report.pairs:
        return
    facts = {facts.pair: facts for facts in report.pairs}
    indexes = sorted({index for pair in facts for index in pair})
    yield "<h2>Copies between accelerators</h2>"
    yield "<p>Rows copy to columns. Green: what was sent arrived bit for bit; red: it did not; grey: not exercised.</p>"
    rows = []
    for source in indexes:
        cells = [_cell(facts.get((source, destination))) for destination in indexes]
        rows.append(f"<tr><th>from {source}</th>{''.join(cells)}</tr>")
    yield _table(("", *(f"to {index}" for index in indexes)), rows)


def _cell(facts: PairFacts | None) -> str:
    if facts is None:
        return '<td class="self"></td>'
    lines = [facts.outcome.value]
    if facts.probe is not None:
        lines.append(f"probe: {facts.probe} {facts.probe_kind}".rstrip())
    lines.append(f"{count_of(facts.hops, 'tensor')} sent, {facts.hops_wrong} wrong")
    if facts.moves:
        lines.append(f"{facts.moves} copies a forward pass")
    if facts.alone_runs:
        lines.append(f"alone: {facts.alone_wrong} of {facts.alone_runs} runs wrong")
    colour = _COLOURS[facts.outcome]
    return f'<td class="cell" style="background:{colour}">{"<br>".join(map(_text, lines))}</td>'


def _bytes_table(device_bytes: Mapping[str, int]) -> str:
    most = max(device_bytes.values(), default=0)
    rows = []
    for device, size in device_bytes.items():
        width = 100 * size / most if most else 0
        bar = f'<div class="bar" style="width:{width:.1f}%"></div>'
        rows.append(
            f'<tr><th>{_text(device)}</th><td>{human_size(size)}</td><td class="track">{bar}</td></tr>'
        )
    return _table(("device", "weights", ""), rows)


def _map_table(device_map: Mapping[str, str]) -> str:
    by_device: dict[str, list[str]] = {}
    for name, device in device_map.items():
        by_device.setdefault(device, []).append(
            f"{name}."
        )  # the number at the end of a block's name counts, too
    rows = []
    for device, names in by_device.items():
        shown = "<br>".join(
            _text(name.removesuffix(".") or "the whole model") for name in collapse_layers(names)
        )
        rows.append(f"<tr><th>{_text(device)}</th><td>{shown}</td></tr>")
    return _table(("device", "blocks"), rows)


def _table(heads: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{_text(text)}</th>" for text in heads)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n' + "\n".join(rows) + "\n</table></div>"
