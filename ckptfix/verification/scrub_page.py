"""The verdicts of a fleet as one HTML page: a run a row, a checkpoint a cell; a click shows what
was found.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import groupby
from typing import Any

from ckptfix.diagnosis.check_report import CLEAN, VERDICTS
from ckptfix.verification.scrub_state import Look
from ckptfix.verification.verify_report import after_colon
from ckptfix.wording import count_of, html_document, html_text

_DAMAGED, _WARNED, *_ = VERDICTS
_CLASSES = {CLEAN: "clean", _DAMAGED: "damaged", _WARNED: "warned"}
"""The colour of each verdict; every other one says that something is not known."""

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --page: #ffffff; --line: #d0d7de; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem;
       color: var(--text); background: var(--page); }
h1 { font-size: 1.4rem; } h1, p, li, th { overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 500; vertical-align: top; padding: .3rem .6rem .3rem 0; width: 20rem; }
tr { border-bottom: 1px solid var(--line); }
.cells { display: flex; flex-wrap: wrap; gap: .2rem; padding: .3rem 0; }
.cell, .legend li { border: 1px solid var(--line); padding: .1rem .5rem; font-size: .8rem; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem; padding: 0; list-style: none; }
summary { cursor: pointer; } details[open] { flex-basis: 100%; }
.clean { background: #e3f3e8; color: #14532d; } .damaged { background: #c9291a; color: #ffffff; }
.warned { background: #fee8c8; color: #1f2328; } .unknown { background: #e6defc; color: #35157f; }
.old { border-style: dashed; border-width: 2px; }
@media (prefers-color-scheme: dark) {
:root { --text: #e6edf3; --page: #0d1117; --line: #3d444d; }
.clean { background: #12291b; color: #8ddfa6; } .damaged { background: #ff8f86; color: #000000; }
.warned { background: #5c2c1b; color: #fbeee8; } .unknown { background: #2f2357; color: #d9ccff; }
}
"""


def fleet_page(looks: Iterable[Look], begun: float, unknown: int) -> str:
    """Return the page. ``looks``: those of a run together; ``begun``: what was not seen since is
    marked.

    ``unknown``: how many more there are that no run has reached.
    """
    counts: dict[str, int] = {}
    rows = []
    for run, cells in groupby(looks, lambda look: look.place.rpartition("/")[0]):
        parts = []
        for look in sorted(cells, key=_in_order):
            verdict = str(look.verdict["verdict"])
            counts[verdict] = counts.get(verdict, 0) + 1
            parts.append(_cell(look, verdict, is_old=look.seen < begun))
        head = f'<th scope="row">{html_text(run)}</th>'
        rows.append(f'<tr>{head}<td><div class="cells">{"".join(parts)}</div></td></tr>')
    words = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    total = f"{count_of(sum(counts.values()), 'checkpoint')}: {words or 'none was checked'}"
    if unknown:
        total += f"; not shown, never reached by a run: {count_of(unknown, 'checkpoint')}"
    moment = datetime.fromtimestamp(begun).astimezone().isoformat(" ", "minutes")
    return html_document(
        "ckptfix scrub",
        _STYLE,
        [
            "<h1>ckptfix scrub</h1>",
            f"<p>{html_text(moment)}: {html_text(total)}</p>",
            _legend(),
            f"<table><tbody>{''.join(rows)}</tbody></table>",
        ],
    )


def _in_order(look: Look) -> list[Any]:
    """Return a key that puts checkpoint_10 behind checkpoint_9."""
    name = look.place.rpartition("/")[2]
    return [
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


def _legend() -> str:
    cells = [
        ("clean", "clean"),
        ("warned", _WARNED),
        ("damaged", "damaged"),
        (
            "unknown",
            (
                "not a complete checkpoint, or no verdict: without weights, staging, not finished "
                "or failed"
            ),
        ),
        ("old", "not checked in this run: verdict of an earlier run"),
    ]
    items = "".join(f'<li class="{css}">{html_text(text)}</li>' for css, text in cells)
    return f'<ul class="legend">{items}</ul><p>Click a verdict to see what was found.</p>'


def _cell(look: Look, verdict: str, *, is_old: bool) -> str:
    name = look.place.rpartition("/")[2]
    css = f"cell {_CLASSES.get(verdict, 'unknown')}{' old' if is_old else ''}"
    said = list(_said(look))
    about = html_text(f"{verdict}; {_about(look.verdict.get('data'))}")
    if not said:
        return f'<span class="{css}" title="{about}">{html_text(name)}</span>'
    items = "".join(f"<li>{html_text(words)}</li>" for words in said)
    return (
        f'<details class="{css}"><summary title="{about}">{html_text(name)}</summary>'
        f"<p>{html_text(look.place)}: {about}</p><ul>{items}</ul></details>"
    )


def _about(data: Mapping[str, Any] | None) -> str:
    """Return in words how much of the data was read so far."""
    if not data or not data["files"]:
        return "no digests, so the data cannot be checked"
    read = data["files"] - data["never"]
    since = f" since {str(data['oldest'])[:10]}" if read else ""
    return f"files with digests: {read} of {data['files']} read{since}"


def _said(look: Look) -> Iterator[str]:
    """Yield what was found, in words."""
    structure = look.verdict.get("structure", {})
    for one in structure.get("findings", ()):
        yield f"{one['severity']} {one['code']}: {one['message']}"
    for name, words in look.verdict.get("differences", {}).items():
        yield f"differs {name}: {after_colon(words)}"
    yield from (f"could not finish: {words}" for words in structure.get("unfinished", ()))
