"""Sizes, lists of names and lines of text for people: the same in every message, on a terminal and
in ``str()``.
"""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from reprlib import Repr
from typing import ClassVar, NamedTuple

_SHOWN = 3
_TOPICS = 5
_TOPIC = re.compile(r"(?:(?P<file>[^ :]*[./][^ :]*): )?(?:(?<!\w)'[^']*'(?!\w)|(?![;:,] | \().)*")
"""A sentence about what was not checked begins with its topic: next to a file what is about it."""
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


class Layer(NamedTuple):
    """A key cut at its first segment that is a number, that of its layer. ``number``: None for a
    key without one.
    """

    before: str
    number: int | None
    after: str


class Span(NamedTuple):
    """Text in one style. ``colour``: a name that ANSI terminals have, None for their own."""

    text: str
    colour: str | None = None
    bold: bool = False


class Line(NamedTuple):
    """One line of a report. ``str()`` is its plain text, in which nothing moves the cursor of a
    terminal.

    ``unchecked``: the words of a line about what was not checked, "" for every other line.
    """

    spans: tuple[Span, ...]
    unchecked: str = ""

    def __str__(self) -> str:
        return escape("".join(span.text for span in self.spans))


def shortened(text: str, most: int) -> str:
    """Return a text, or the first ``most`` characters of a longer one with dots behind them."""
    return text if len(text) <= most else f"{text[:most]}..."


class _Short(Repr):
    """``repr()`` of the first bytes alone: of 50 MB it took 190 MB."""

    def repr_bytes(self, value: bytes, level: int) -> str:
        first = self.maxstring // 4  # a byte can take four characters
        return f"{value[:first]!r}{'...' if len(value) > first else ''}"


_SHORT = _Short()
_SHORT.maxother = _SHORT.maxstring = 100


class Brief:
    """Base of every value that may hold a whole checkpoint: ``repr()`` cuts its fields short."""

    __slots__ = ()
    __struct_fields__: ClassVar[tuple[str, ...]]

    def __repr__(self) -> str:
        shown = (f"{name}={_SHORT.repr(getattr(self, name))}" for name in self.__struct_fields__)
        return f"{type(self).__name__}({', '.join(shown)})"


class Printable:
    """Base of every report and receipt: a verb prints its ``lines()``, and ``str()`` is the same as
    plain text.

    ``repr()`` is the first of them and the exit status: a debugger or a notebook must not show
    100,000 tensors.
    """

    __slots__ = ()

    def lines(self) -> Iterator[Line]:
        """Yield what a person should read, line by line."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines()))

    def __repr__(self) -> str:
        headline = str(next(self.lines(), "")).removesuffix(":")
        status = getattr(self, "status", None)
        return f"<{type(self).__name__} {headline}{'' if status is None else f'; status {status}'}>"


def line(text: str, *, colour: str | None = None, bold: bool = False) -> Line:
    """Return a line in one style."""
    return Line((Span(text, colour, bold),))


def unchecked_line(words: str) -> Line:
    """Return the line about something that was not checked."""
    return Line((Span(f"not checked: {words}"),), words)


def unchecked_lines(sentences: Sequence[str], *, details: str = "") -> Iterator[Line]:
    """Yield what was not checked: every sentence, or the topics of several in one line.

    ``details``: the command that prints every sentence, "" where this one does.
    """
    if not details or len(sentences) < 2:
        yield from map(unchecked_line, sentences)
        return
    begins = (_TOPIC.match(words) for words in sentences)
    topics = [*dict.fromkeys(begin[0] for begin in begins if begin is not None)]
    more = f" and {len(topics) - _TOPICS} more" if len(topics) > _TOPICS else ""
    yield unchecked_line(f"{', '.join(topics[:_TOPICS])}{more}; for details: {details}")


def few(lines: Sequence[str], what: str, *, colour: str | None = None) -> Iterator[Line]:
    """Yield lines that say the same of many things: only the first few, and how many more there
    are.
    """
    shown = lines if len(lines) <= _SHOWN + 1 else lines[:_SHOWN]
    yield from (line(text, colour=colour) for text in shown)
    if len(shown) < len(lines):
        yield line(f"  and {len(lines) - len(shown)} more {what}; --json lists all", colour=colour)


def escape(text: str) -> str:
    """Make text from a file safe to print: control and invisible characters become backslash
    escapes.

    A byte of a file's name that is not UTF-8 becomes ``\\xff``.
    """
    return _UNPRINTABLE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte that it could not decode
        return f"\\x{code - 0xDC00:02x}"
    return match[0].encode("unicode_escape", "surrogatepass").decode()


def human_size(count: int) -> str:
    """Return a size for people: 1.5 GiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the last unit returns")


def moment(nanoseconds: int) -> str:
    """Return a modification time as people read it, to the nanosecond."""
    seconds = time.localtime(nanoseconds // 10**9)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', seconds)}.{nanoseconds % 10**9:09}"


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun: 1 file, 2 files, 2 processes."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def layer_of(name: str) -> Layer:
    """Cut ``layers.3.mlp.weight`` into ``layers.``, 3 and ``.mlp.weight``."""
    match = re.search(r"\.(0|[1-9][0-9]{0,8})\.", name)
    return (
        Layer(name[: match.start(1)], int(match[1]), name[match.end(1) :])
        if match
        else Layer(name, None, "")
    )


def collapse_layers(names: Iterable[str]) -> list[str]:
    """Collapse names that differ in one number only: ``layers.{0...31}.mlp.weight``. The order is
    kept.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, number, after = layer_of(name)
        numbers = groups.setdefault((before, after), [])
        if number is not None:
            numbers.append(number)
    return [before + _ranges(numbers) + after for (before, after), numbers in groups.items()]


def list_names(names: Iterable[str]) -> str:
    """Return names in one short line: layers collapsed, at most three, and how many more there
    are.
    """
    return first_few([repr(name) for name in collapse_layers(names)])


def first_few(things: Sequence[object], most: int = _SHOWN) -> str:
    """Return the first of several things in one short line, and how many more there are."""
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return ", ".join(map(str, things[:most])) + more


def series(words: Sequence[str]) -> str:
    """Return words as a sentence lists them: "A", "A and B", "A, B and C"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


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
