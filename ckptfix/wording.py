"""How sizes and lists of names are written for people, in every message alike."""

import re
from collections.abc import Iterable

_SHOWN = 3


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


def collapse_layers(names: Iterable[str]) -> list[str]:
    """Collapse names that differ in one number only: ``layers.{0...31}.mlp.weight``. The order is kept."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = re.search(r"\.(0|[1-9][0-9]{0,8})\.", name)
        key = (name[: match.start(1)], name[match.end(1) :]) if match else (name, "")
        numbers = groups.setdefault(key, [])
        if match:
            numbers.append(int(match[1]))
    return [before + _ranges(numbers) + after for (before, after), numbers in groups.items()]


def list_names(names: Iterable[str]) -> str:
    """Return names in one short line: layers collapsed, at most three, and how many more there are."""
    collapsed = collapse_layers(names)
    more = f" and {len(collapsed) - _SHOWN} more" if len(collapsed) > _SHOWN else ""
    return ", ".join(repr(name) for name in collapsed[:_SHOWN]) + more


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
