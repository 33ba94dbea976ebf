"""A comparison as one HTML page with a heat map: layers down, parameters across, the colour the
relative norm.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from ckptfix.pages import html_document, html_legend, html_list, html_table, html_text
from ckptfix.verification.diff_report import (
    DiffReport,
    OptimizerDiff,
    Outcome,
    Row,
    TensorDiff,
    rows,
)
from ckptfix.wording import collapse_layers, count_of, layer_of

_MOST_ROWS, _MOST_COLUMNS = 2000, 200
_LEVELS = 8  # of the relative norm, by powers of ten: 1 is 1e-7 or less, 8 more than 0.1
_RANK = {outcome: rank for rank, outcome in enumerate(Outcome)}
_SIGNS = {Outcome.ONLY_A: "A", Outcome.ONLY_B: "B", Outcome.SHAPE: "≠", Outcome.EQUAL: "="}


def html_page(report: DiffReport) -> str:
    """Return the report as an HTML document."""
    verdict = report.verdict
    if report.tolerance is not None:
        verdict += (
            f" (relative tolerance {report.tolerance[0]:g}, absolute {report.tolerance[1]:g})"
        )
    parts = [
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
        parts.append(f"<h2>Not compared</h2>{html_list(report.not_compared)}")
    return html_document(f"ckptfix diff {report.a} {report.b}", parts)


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
    words = (
        "Numbers and colours show the relative norm ||a - b|| / ||a|| of each tensor. Meaning of "
        "the cells:"
    )
    return f"<p>{html_text(words)}</p>{html_legend(cells)}"


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
        yield html_list(map(str, optimizer.differences[:_MOST_ROWS]))
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
        body.append(f'<th scope="row">{number}</th>{row}')
    yield f"<h3>{html_text(before)}*</h3>"
    yield html_table("map", ('<th scope="col">layer</th>', heads), body)
    if left or len(kinds) > _MOST_COLUMNS:
        columns = max(0, len(kinds) - _MOST_COLUMNS)
        yield f"<p>not shown: {count_of(left, 'layer')}, {count_of(columns, 'parameter')}</p>"


def _plain(tensors: Sequence[TensorDiff]) -> Iterator[str]:
    yield "<h3>outside the layers</h3>"
    shown = tensors[:_MOST_ROWS]
    body = (f'<th scope="row">{html_text(one.name)}</th>{_cell([one])}' for one in shown)
    yield html_table("map", (), body)
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
    yield "<h3>differences</h3>"
    head = (f'<th scope="col">{text}</th>' for text in heads)
    yield html_table("rows", head, map(_difference, found[:_MOST_ROWS]))
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
    return f"{''.join(words)}{cells}"


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
