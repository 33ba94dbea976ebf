"""A comparison as one HTML page with a heat map: layers down, parameters across, the colour the
relative norm.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from ckptfix.verification.diff_report import (
    DiffReport,
    OptimizerDiff,
    Outcome,
    Row,
    TensorDiff,
    rows,
)
from ckptfix.wording import collapse_layers, count_of, html_document, html_text, layer_of

_MOST_ROWS, _MOST_COLUMNS = 2000, 200
_LEVELS = 8  # of the relative norm, by powers of ten: 1 is 1e-7 or less, 8 more than 0.1
_RANK = {outcome: rank for rank, outcome in enumerate(Outcome)}
_SIGNS = {Outcome.ONLY_A: "A", Outcome.ONLY_B: "B", Outcome.SHAPE: "≠", Outcome.EQUAL: "="}

# Every class sets colour and background together, so that the text has its contrast in both modes.
_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --page: #ffffff; --line: #d0d7de; --bad: #b42318; --good: #1a7f37; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
       color: var(--text); background: var(--page); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } h3 { font-size: 1rem; }
h1, h2, h3, p, li { overflow-wrap: anywhere; }
table { border-collapse: collapse; }
th, td { border: 1px solid var(--line); padding: .2rem .5rem; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; } .figure { text-align: right; white-space: nowrap; }
.names { min-width: 12rem; } .kind { min-width: 6rem; }
.scroll { overflow-x: auto; } .map td { text-align: center; white-space: nowrap; font-size: .8rem; min-width: 2.6rem; }
.map th { font-weight: 500; font-size: .85rem; } .map thead th { vertical-align: bottom; }
.map [scope=row], .map thead th:first-child { position: sticky; left: 0; background: var(--page); }
.map [scope=row] { max-width: 60vw; overflow-wrap: anywhere; }
.map thead th span { writing-mode: vertical-rl; transform: rotate(180deg); white-space: nowrap; display: block;
       max-height: 18rem; overflow: hidden; text-overflow: ellipsis; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem; padding: 0; list-style: none; font-size: .8rem; }
.legend li { border: 1px solid var(--line); padding: .1rem .5rem; }
.bad { color: var(--bad); } .good { color: var(--good); }
.eq { background: #e3f3e8; color: #14532d; } .no { background: #e6defc; color: #35157f; }
.h0 { background: #f6f8fa; color: #1f2328; } .h1 { background: #fff7ec; color: #1f2328; }
.h2 { background: #fee8c8; color: #1f2328; } .h3 { background: #fdd49e; color: #1f2328; }
.h4 { background: #fdbb84; color: #1f2328; } .h5 { background: #fc8d59; color: #1f2328; }
.h6 { background: #ef6548; color: #000000; } .h7 { background: #c9291a; color: #ffffff; }
.h8 { background: #7f0000; color: #ffffff; }
@media (prefers-color-scheme: dark) {
:root { --text: #e6edf3; --page: #0d1117; --line: #3d444d; --bad: #ff8f86; --good: #56d364; }
.eq { background: #12291b; color: #8ddfa6; } .no { background: #2f2357; color: #d9ccff; }
.h0 { background: #21262d; color: #e6edf3; } .h1 { background: #2a1d16; color: #f0e6e0; }
.h2 { background: #41241a; color: #f6e9e2; } .h3 { background: #5c2c1b; color: #fbeee8; }
.h4 { background: #7c341a; color: #ffffff; } .h5 { background: #9c3e17; color: #ffffff; }
.h6 { background: #d1571b; color: #000000; } .h7 { background: #f08a3c; color: #000000; }
.h8 { background: #ffd08a; color: #000000; }
}
"""


def html_page(report: DiffReport) -> str:
    """Return the report as an HTML document."""
    verdict = report.verdict
    if report.tolerance is not None:
        verdict += (
            f" (relative tolerance {report.tolerance[0]:g}, absolute {report.tolerance[1]:g})"
        )
    parts = [
        "<h1>ckptfix diff</h1>",
        f"<p>A: {html_text(report.a)}<br>B: {html_text(report.b)}</p>",
        (
            "<p><strong "
            f'class="{"bad" if report.status else "good"}">{html_text(verdict)}</strong>: '
            f"{html_text(report.summary)}</p>"
        ),
        *([f"<p>{html_text(report.positions)}</p>"] if report.positions else []),
        _legend(),
    ]
    for model in report.models:
        names = f"; keys matched {model.names}" if model.names else ""
        parts += _section(
            f"{model.a or '(none)'} against {model.b or '(none)'}{names}", model.tensors
        )
    for optimizer in report.optimizers:
        parts += _section(optimizer.title, optimizer.tensors)
        parts += _values(optimizer)
    parts += [f"<p>{html_text(words)}</p>" for words in report.notes]
    if report.not_compared:
        items = "".join(f"<li>{html_text(words)}</li>" for words in report.not_compared)
        parts.append(f"<h2>Not compared</h2><ul>{items}</ul>")
    return html_document(f"ckptfix diff {report.a} {report.b}", _STYLE, parts)


def _legend() -> str:
    cells = [("eq", "= bytes equal"), ("h0", "0 different bytes, equal values")]
    cells += [(f"h{level}", f"up to 1e{level - _LEVELS}") for level in range(1, _LEVELS)]
    cells += [
        (f"h{_LEVELS}", "more than 0.1"),
        (f"h{_LEVELS}", "! NaN or Inf among the differing elements"),
    ]
    cells += [
        ("no", "A only in A"),
        ("no", "B only in B"),
        ("no", "≠ different shape, or a dtype smaller than a byte"),
    ]
    items = "".join(f'<li class="{css}">{html_text(text)}</li>' for css, text in cells)
    words = (
        "Numbers and colours show the relative norm ||a - b|| / ||a|| of each tensor. Meaning of "
        "the cells:"
    )
    return f'<p>{html_text(words)}</p><ul class="legend">{items}</ul>'


def _section(title: str, tensors: Sequence[TensorDiff]) -> Iterator[str]:
    yield f"<h2>{html_text(title)}</h2>"
    layered: dict[str, list[tuple[int, str, TensorDiff]]] = {}
    plain: list[TensorDiff] = []
    for one in tensors:
        before, number, after = layer_of(one.name)
        if number is None:
            plain.append(one)
        else:
            # Experts of one layer share a column: their cell shows the worst of them.
            kind = re.sub(r"\.\d+(?=\.)", ".*", after)
            layered.setdefault(before, []).append((number, kind[1:], one))
    for before, cells in layered.items():
        yield from _layers(before, cells)
    if plain:
        yield from _plain(plain)
    yield from _differences(tensors)


def _values(optimizer: OptimizerDiff) -> Iterator[str]:
    """Yield the steps and hyperparameters that differ, and how many were compared."""
    yield f"<p>{html_text(optimizer.values_in_words)}</p>"
    if optimizer.differences:
        items = "".join(
            f"<li>{html_text(str(one))}</li>" for one in optimizer.differences[:_MOST_ROWS]
        )
        yield f"<ul>{items}</ul>"
    if len(optimizer.differences) > _MOST_ROWS:
        yield (
            f"<p>not shown: {count_of(len(optimizer.differences) - _MOST_ROWS, 'value')}; --json "
            "lists all</p>"
        )


def _layers(before: str, cells: Sequence[tuple[int, str, TensorDiff]]) -> Iterator[str]:
    grid: dict[int, dict[str, list[TensorDiff]]] = {}
    for number, kind, one in cells:
        grid.setdefault(number, {}).setdefault(kind, []).append(one)
    kinds = list(dict.fromkeys(kind for _, kind, _ in cells))
    shown, left = sorted(grid)[:_MOST_ROWS], max(0, len(grid) - _MOST_ROWS)
    names = [html_text(kind) for kind in kinds[:_MOST_COLUMNS]]
    heads = "".join(f'<th scope="col" title="{name}"><span>{name}</span></th>' for name in names)
    body = []
    for number in shown:
        row = "".join(_cell(grid[number].get(kind, [])) for kind in kinds[:_MOST_COLUMNS])
        body.append(f'<tr><th scope="row">{number}</th>{row}</tr>')
    yield f"<h3>{html_text(before)}*</h3>"
    yield (
        '<div class="scroll"><table class="map"><thead><tr><th scope="col">layer</th>'
        f"{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )
    if left or len(kinds) > _MOST_COLUMNS:
        columns = max(0, len(kinds) - _MOST_COLUMNS)
        yield f"<p>not shown: {count_of(left, 'layer')}, {count_of(columns, 'parameter')}</p>"


def _plain(tensors: Sequence[TensorDiff]) -> Iterator[str]:
    yield "<h3>outside the layers</h3>"
    body = [
        f'<tr><th scope="row">{html_text(one.name)}</th>{_cell([one])}</tr>'
        for one in tensors[:_MOST_ROWS]
    ]
    yield f'<div class="scroll"><table class="map"><tbody>{"".join(body)}</tbody></table></div>'
    if len(tensors) > _MOST_ROWS:
        yield f"<p>not shown: {count_of(len(tensors) - _MOST_ROWS, 'tensor')}</p>"


def _cell(tensors: Sequence[TensorDiff]) -> str:
    """Return the cell of one tensor, or of several: that of the worst."""
    if not tensors:
        return "<td></td>"
    worst = min(tensors, key=lambda one: (_RANK[one.outcome], -_relative(one)))
    text = _SIGNS.get(worst.outcome) or _figure(_relative(worst))
    if worst.tally is None and worst.outcome in (Outcome.VALUES, Outcome.DTYPE):
        text = "≠"  # numbers of less than a byte
    elif worst.tally is not None and worst.tally.apart:
        text = f"{text}!" if _relative(worst) else "!"
    title = _about(worst)
    if len(tensors) > 1:
        title = f"the worst of {len(tensors)}: {title}"
    return f'<td class="{_class(worst)}" title="{html_text(title)}">{html_text(text)}</td>'


def _class(one: TensorDiff) -> str:
    if one.outcome is Outcome.EQUAL:
        return "eq"
    if one.tally is None:
        return "no"
    relative = one.tally.relative
    if relative == 0:
        return "h8" if one.tally.apart else "h0"
    return f"h{max(1, min(_LEVELS, math.ceil(math.log10(relative)) + 8 if math.isfinite(relative) else _LEVELS))}"


def _about(one: TensorDiff) -> str:
    words = [f"{one.name}: {one.outcome.value}"]
    if one.a is not None and one.b is not None and one.a != one.b:
        words.append(f"{one.a} in A, {one.b} in B")
    words.append(Row(outcome=one.outcome, names=one.name, tensors=(one,)).kind)
    if one.tally is not None:
        found = one.tally
        words.append(f"relative norm {found.relative:.3g}, max abs {found.largest:.3g}")
        words.append(f"{found.differing} of {count_of(found.elements, 'element')} differ")
        if found.nan_a + found.nan_b + found.inf_a + found.inf_b:
            words.append(
                f"NaN {found.nan_a} in A, {found.nan_b} in B; "
                f"Inf {found.inf_a} in A, {found.inf_b} in B"
            )
    return "; ".join(words)


def _differences(tensors: Sequence[TensorDiff]) -> Iterator[str]:
    found = rows(one for one in tensors if one.outcome is not Outcome.EQUAL)
    if not found:
        return
    heads = (
        "outcome",
        "tensors",
        "dtype and shape",
        "max abs",
        "relative norm",
        "differing",
        "NaN or Inf",
    )
    body = "".join(map(_difference, found[:_MOST_ROWS]))
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    yield "<h3>differences</h3>"
    yield (
        "<div "
        f'class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
    if len(found) > _MOST_ROWS:
        names = collapse_layers(row.names for row in found[_MOST_ROWS:])
        yield f"<p>not shown: {count_of(len(names), 'row')}; --json lists all</p>"


def _difference(row: Row) -> str:
    figures: Iterable[str] = ("", "", "", "")
    if row.elements:
        share = f"{row.differing} of {row.elements}"
        figures = (f"{row.largest:.3g}", f"{row.relative:.3g}", share, str(row.apart or ""))
    cells = "".join(f'<td class="figure">{text}</td>' for text in figures)
    texts = (row.outcome.value, row.names, row.kind)
    classes = ("outcome", "names", "kind")
    words = (
        f'<td class="{css}">{html_text(text)}</td>'
        for css, text in zip(classes, texts, strict=True)
    )
    return f"<tr>{''.join(words)}{cells}</tr>"


def _relative(one: TensorDiff) -> float:
    return one.tally.relative if one.tally is not None else 0.0


def _figure(relative: float) -> str:
    """Return a relative norm in few characters: 3e-5, 0.25, 31."""
    if relative == 0 or math.isinf(relative):
        return "0" if relative == 0 else "∞"
    if 0.1 <= relative < 1000:
        return (
            f"{relative:.2f}"
            if relative < 1
            else f"{relative:.2g}"
            if relative < 10
            else f"{relative:.0f}"
        )
    mantissa, exponent = f"{relative:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
