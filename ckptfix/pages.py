"""The HTML pages of ``--html``: one template and one stylesheet. A page runs no script and loads
nothing, so that it can be mailed, printed and opened on a cluster without a network.
"""

from collections.abc import Iterable

from ckptfix.wording import Line, Span

_CONTROL = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)
}
_INVISIBLE = (*range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF)
_MARKUP = {
    ord("&"): "&amp;",
    ord("<"): "&lt;",
    ord(">"): "&gt;",
    ord('"'): "&quot;",
    ord("'"): "&#x27;",
}
_ESCAPES = {
    **_MARKUP,
    **_CONTROL,
    **{code: f"\\u{code:04x}" for code in (*_INVISIBLE, *range(0xD800, 0xE000))},
}

# Colours are set in pairs, text and background, so that both keep their contrast in both modes.
_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --page: #ffffff; --line: #d0d7de; --bad: #b42318; --good: #1a7f37;
       --warn: #9a6700; --info: #0969da; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem;
       color: var(--text); background: var(--page); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } h3 { font-size: 1rem; }
h1, h2, h3, p, li, dd, pre, th { overflow-wrap: anywhere; }
pre { white-space: pre-wrap; }
table { border-collapse: collapse; } .scroll { overflow-x: auto; }
th, td { border: 1px solid var(--line); padding: .2rem .5rem; text-align: left; vertical-align: top; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem; padding: 0; list-style: none; font-size: .8rem; }
.legend li { border: 1px solid var(--line); padding: .1rem .5rem; }
:focus-visible { outline: 3px solid var(--info); outline-offset: 1px; }
.good, .green { color: var(--good); } .bad, .red { color: var(--bad); }
.yellow { color: var(--warn); } .cyan { color: var(--info); } .bold { font-weight: 600; }
.figure { text-align: right; white-space: nowrap; } .names { min-width: 12rem; } .kind { min-width: 6rem; }
.map td { text-align: center; white-space: nowrap; font-size: .8rem; min-width: 2.6rem; }
.map th { font-weight: 500; font-size: .85rem; } .map thead th { vertical-align: bottom; }
.map [scope=row], .map thead th:first-child { position: sticky; left: 0; background: var(--page); }
.map [scope=row] { max-width: 60vw; }
.map thead th span { writing-mode: vertical-rl; transform: rotate(180deg); white-space: nowrap; display: block;
       max-height: 18rem; overflow: hidden; text-overflow: ellipsis; }
.steps th, .steps td { padding: .1rem .3rem; min-width: 1.4rem; font-size: .8rem; text-align: center; }
.steps [scope=row] { text-align: left; white-space: nowrap; }
.first { outline: 3px solid var(--bad); outline-offset: -3px; font-weight: 700; }
.runs { width: 100%; } .runs th, .runs td { border-width: 0 0 1px; padding: .3rem .6rem .3rem 0; }
.runs th { width: 20rem; font-weight: 500; } .runs th small { display: block; font-weight: 400; }
.cells { display: flex; flex-wrap: wrap; gap: .2rem; align-items: flex-start; }
.cell { border: 1px solid var(--line); padding: .1rem .5rem; font-size: .8rem; }
.cell small { display: block; font-weight: 400; }
.said { color: var(--text); background: var(--page); font-weight: 400;
       margin: .2rem -.5rem -.1rem; padding: .3rem .5rem; }
.said p, .said pre { margin: 0; }
summary { cursor: pointer; } details[open] { flex-basis: 100%; }
.old { border-style: dashed; border-width: 2px; } .newest { outline: 3px solid var(--good); font-weight: 700; }
.clean, .eq { background: #e3f3e8; color: #14532d; } .damaged { background: #c9291a; color: #ffffff; }
.warned { background: #fee8c8; color: #1f2328; } .unknown, .no { background: #e6defc; color: #35157f; }
.apart { background: #fbd5cf; color: #7f1d1d; }
.h0 { background: #f6f8fa; color: #1f2328; } .h1 { background: #fff7ec; color: #1f2328; }
.h2 { background: #fee8c8; color: #1f2328; } .h3 { background: #fdd49e; color: #1f2328; }
.h4 { background: #fdbb84; color: #1f2328; } .h5 { background: #fc8d59; color: #1f2328; }
.h6 { background: #ef6548; color: #000000; } .h7 { background: #c9291a; color: #ffffff; }
.h8 { background: #7f0000; color: #ffffff; }
@media (prefers-color-scheme: dark) {
:root { --text: #e6edf3; --page: #0d1117; --line: #3d444d; --bad: #ff8f86; --good: #56d364; --warn: #d29922;
       --info: #58a6ff; }
.clean, .eq { background: #12291b; color: #8ddfa6; } .damaged { background: #ff8f86; color: #000000; }
.warned { background: #5c2c1b; color: #fbeee8; } .unknown, .no { background: #2f2357; color: #d9ccff; }
.apart { background: #4c1512; color: #ffc9c2; }
.h0 { background: #21262d; color: #e6edf3; } .h1 { background: #2a1d16; color: #f0e6e0; }
.h2 { background: #41241a; color: #f6e9e2; } .h3 { background: #5c2c1b; color: #fbeee8; }
.h4 { background: #7c341a; color: #ffffff; } .h5 { background: #9c3e17; color: #ffffff; }
.h6 { background: #d1571b; color: #000000; } .h7 { background: #f08a3c; color: #000000; }
.h8 { background: #ffd08a; color: #000000; }
}
@media (max-width: 40rem) { .runs, .runs tbody, .runs tr, .runs th, .runs td { display: block; width: auto; } }
@media print {
body { max-width: none; margin: 0; } .cell, .map td, .steps td { print-color-adjust: exact; }
details::details-content { content-visibility: visible; display: block; } .scroll { overflow: visible; }
}
"""


def html_text(text: str) -> str:
    """Return text as HTML shows it; control and invisible characters become backslash escapes."""
    return text.translate(_ESCAPES)


def html_document(title: str, parts: Iterable[str]) -> str:
    """Return a whole HTML page. ``title`` is text, "ckptfix VERB PLACE"; ``parts`` are HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
        "'unsafe-inline'\">\n"
        f"<title>{html_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html_text(title)}</h1>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def html_lines(lines: Iterable[Line]) -> str:
    """Return printed lines as HTML, in their colours."""
    text = "\n".join("".join(map(_span, line.spans)) for line in lines)
    return f"<pre>{text}</pre>"


def html_list(texts: Iterable[str]) -> str:
    """Return texts as a list."""
    return f"<ul>{''.join(f'<li>{html_text(text)}</li>' for text in texts)}</ul>"


def html_legend(cells: Iterable[tuple[str, str]]) -> str:
    """Return the legend of a page: the class and the meaning of each kind of cell."""
    items = "".join(f'<li class="{css}">{html_text(text)}</li>' for css, text in cells)
    return f'<ul class="legend">{items}</ul>'


def html_table(css: str, heads: Iterable[str], rows: Iterable[str]) -> str:
    """Return a table that scrolls by itself, with the keyboard too. ``heads`` and ``rows``: HTML of
    the cells in each row.
    """
    head = "".join(heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table class="{css}">'
        + (f"<thead><tr>{head}</tr></thead>" if head else "")
        + f"<tbody>{body}</tbody></table></div>"
    )


def _span(span: Span) -> str:
    classes = " ".join(filter(None, (span.colour, "bold" if span.bold else "")))
    text = html_text(span.text)
    return f'<span class="{classes}">{text}</span>' if classes else text
