"""How sizes and lists of names are written for people, in every message alike."""

import re
from collections.abc import Iterable
from typing import NamedTuple

_SHOWN = 3
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
_INVISIBLE = (*range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF)
_MARKUP = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;", ord('"'): "&quot;", ord("'"): "&#x27;"}
_ESCAPES = {
    **_MARKUP,
    **_CONTROL,
    **{code: f"\\u{code:04x}" for code in (*_INVISIBLE, *range(0xD800, 0xE000))},
}


class Layer(NamedTuple):
    """A name cut at the first number that stands alone in it, that of its layer; None for a name without."""

    before: str
    number: int | None
    after: str


def human_size(count: int) -> str:
    """Return a size for people: 1.5 GiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the last unit returns")


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun: 1 file, 2 files."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def layer_of(name: str) -> Layer:
    """Cut ``layers.3.mlp.weight`` into ``layers.``, 3 and ``.mlp.weight``."""
    match = re.search(r"\.(0|[1-9][0-9]{0,8})\.", name)
    return (
        Layer(name[: match.start(1)], int(match[1]), name[match.end(1) :]) if match else Layer(name, None, "")
    )


def collapse_layers(names: Iterable[str]) -> list[str]:
    """Collapse names that differ in one number only: ``layers.{0...31}.mlp.weight``. The order is kept."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, number, after = layer_of(name)
        numbers = groups.setdefault((before, after), [])
        if number is not None:
            numbers.append(number)
    return [before + _ranges(numbers) + after for (before, after), numbers in groups.items()]


def list_names(names: Iterable[str]) -> str:
    """Return names in one short line: layers collapsed, at most three, and how many more there are."""
    collapsed = collapse_layers(names)
    more = f" and {len(collapsed) - _SHOWN} more" if len(collapsed) > _SHOWN else ""
    return ", ".join(repr(name) for name in collapsed[:_SHOWN]) + more


def html_text(text: str) -> str:
    """Return text as HTML shows it; control and invisible characters become backslash escapes."""
    return text.translate(_ESCAPES)


def html_document(title: str, style: str, parts: Iterable[str]) -> str:
    """Return a whole HTML page: no script, nothing loaded from anywhere. ``title`` is text, ``parts`` are HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{html_text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _ranges(numbers: list[int]) -> str:
    if not numbers:
        return ""
    ordered = sorted(set(numbers))
    if len(ordered) == 1:
        return str(ordered[0])
    parts = []
    start = last = ordered[0]
    for number in [*ordered[1:], -1]:
        if number != last + 1:
            parts.append(str(start) if start == last else f"{start}...{last}")
            start = number
        last = number
    return "{" + ",".join(parts) + "}"
