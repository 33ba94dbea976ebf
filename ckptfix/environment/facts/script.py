"""A training script or notebook, read by its syntax tree and never executed.

In a cell of a notebook IPython's magics, shell commands and questions become Python statements on
the same lines, so that every line keeps its number. They are IPython's only at the begin of a
statement: in a text, or in brackets, ``%`` and ``!`` are Python's.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, field

from ckptfix.environment.facts.script_prepares import SourceLine, Uses
from ckptfix.environment.facts.script_resumes import Resuming
from ckptfix.environment.facts.script_scan import Scan

_RUNS_PYTHON = frozenset(
    {"time", "timeit", "capture", "prun", "memit", "mprun", "lprun", "debug", "snakeviz"}
)
"""Cell magics whose cell is Python in the notebook's own namespace."""

_AUTOMAGIC = re.compile(
    r"(?:pip|conda|mamba|uv|cd|ls|ll|cat|cp|mv|rm|mkdir|rmdir|pwd|man|less|more|matplotlib|load_ext|reload_ext|env|run|"
    r"pylab|config|who|whos|autoreload)(?:\s+[^\s=].*)?"
)
"""Magics without their sign, which IPython takes where a cell is one such line and is not Python.
"""

_TAKES_STATEMENT = re.compile(
    r"%(?:time|timeit|prun|memit)\b(?:\s+-\w+(?:[ =]\d+)?)*\s*(?P<code>.*)"
)
_ASSIGNS = re.compile(r"(?P<start>\s*[A-Za-z_][\w.,\[\]'\" *()]*?\s*=)\s*(?:!|%(?=[A-Za-z_]))")
_ASKS = re.compile(r"\s*(?:\?{1,2}\s*\S.*|[%\w.*\[\]'\"() =]+\?{1,2}\s*;?)")
_PROMPT = re.compile(r"(?:>>>|\.\.\.|In \[\d+\]:|\s*\.{3,}:)(?: |$)")
_STRING = re.compile(r"('''|\"\"\"|'|\")")


def python_of(cell: str) -> str | None:
    """Return a cell's Python, None for another cell: another language, a file to write."""
    lines = _without_prompts(cell.split("\n"))
    begin = next((place for place, line in enumerate(lines) if line.strip()), len(lines))
    while begin < len(lines) and lines[begin].lstrip().startswith("%%"):
        if re.split(r"\W", lines[begin].lstrip()[2:], maxsplit=1)[0] not in _RUNS_PYTHON:
            return None
        lines[begin] = ""
        begin = next((place for place, line in enumerate(lines) if line.strip()), len(lines))
    lines = _dedented(lines)
    text = "\n".join(lines)
    if _is_python(text):
        return text
    return "\n" * (len(lines) - 1) if _AUTOMAGIC.fullmatch(text.strip()) else _translated(lines)


def _translated(lines: list[str]) -> str:
    made: list[str] = []
    state = _State()
    place = 0
    while place < len(lines):
        line = lines[place]
        last = place
        statement = _statement(line) if state.is_free else None
        if statement is not None:
            while lines[last].rstrip().endswith("\\") and last + 1 < len(lines):
                last += 1
            made += [statement, *[""] * (last - place)]
        else:
            state.read(line)
            made.append(line)
        place = last + 1
    return "\n".join(made)


def _statement(line: str) -> str | None:
    """Return the Python that replaces a line of IPython, None for a line of Python."""
    text = line.lstrip()
    indent = line[: len(line) - len(text)]
    if "#" not in text and _ASKS.fullmatch(line):
        return f"{indent}pass"
    if timed := _TAKES_STATEMENT.match(text):
        return f"{indent}{timed['code'] or 'pass'}"
    if text.startswith(("%", "!")) or re.match(r"[,;/][A-Za-z_]", text):
        return f"{indent}pass"
    if assigned := _ASSIGNS.match(line):
        return f"{assigned['start']} None"
    return None


class _State:
    """Scanner that knows if a line begins a statement: outside of brackets and texts, not after a
    backslash.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.quote = ""
        self.goes_on = False

    @property
    def is_free(self) -> bool:
        """Return whether the next line begins a statement."""
        return not (self.depth or self.quote or self.goes_on)

    def read(self, line: str) -> None:
        """Go over a line of Python."""
        place = 0
        while place < len(line):
            if self.quote:
                end = _end_of_text(line, place, self.quote)
                if end < 0:
                    break
                place, self.quote = end, ""
                continue
            if opened := _STRING.match(line, place):
                self.quote, place = opened[1], opened.end()
                continue
            sign = line[place]
            if sign == "#":
                break
            self.depth = max(0, self.depth + (sign in "([{") - (sign in ")]}"))
            place += 1
        if len(self.quote) == 1 and not line.endswith("\\"):
            self.quote = ""  # a text that does not end on its line: the parser will say so
        self.goes_on = not self.quote and line.endswith("\\")


def _end_of_text(line: str, place: int, quote: str) -> int:
    """Return the place behind the end of a text, -1 when it does not end on this line."""
    while place < len(line):
        if line[place] == "\\":
            place += 2
        elif line.startswith(quote, place):
            return place + len(quote)
        else:
            place += 1
    return -1


def _without_prompts(lines: list[str]) -> list[str]:
    """Take off the prompts of a session that was pasted."""
    first = next((line for line in lines if line.strip()), "")
    return [_PROMPT.sub("", line, count=1) for line in lines] if _PROMPT.match(first) else lines


def _dedented(lines: list[str]) -> list[str]:
    """Take off the indent of the first line, as IPython does."""
    first = next((line for line in lines if line.strip()), "")
    width = len(first) - len(first.lstrip())
    return (
        [line[min(width, len(line) - len(line.lstrip())) :] for line in lines] if width else lines
    )


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


_MAX_SOURCE = 16 << 20
_MAX_TEXT = 100


class Script(Struct, frozen=True, kw_only=True):
    """Actions of a script, as far as its text shows. ``problem``: why it, or a part of it, could
    not be read.
    """

    path: str
    uses: Uses
    resuming: Resuming = field(default_factory=Resuming)
    problem: str = ""


def read_script(path: str) -> Script:
    """Return what a ``.py`` file or an ``.ipynb`` notebook does.

    Raises OSError when the file cannot be read. Text that is not Python gives a Script with a
    problem.
    """
    source = Path(path)
    if source.stat().st_size > _MAX_SOURCE:
        return Script(
            path=path,
            uses=Uses(),
            problem=f"it has {source.stat().st_size} bytes, too many for a script",
        )
    data = source.read_bytes()
    scan = Scan()
    if source.suffix == ".ipynb":
        problem = _scan_notebook(scan, data)
    else:
        problem = _scan_text(scan, data, lambda line: f"line {line}", 0)
    return Script(path=path, problem=problem, uses=scan.uses(), resuming=scan.resuming())


def _scan_notebook(scan: Scan, data: bytes) -> str:
    """Scan the code cells of a notebook in their order; return what was wrong with the first bad
    one, or "".
    """
    try:
        cells = json.loads(data)["cells"]
        sources = [
            "".join(cell["source"]) if isinstance(cell["source"], list) else str(cell["source"])
            for cell in cells
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"no notebook: {type(error).__name__}: {error!s:.100}"
    problem = ""
    for number, text in enumerate(sources, 1):
        cell = python_of(text)
        if cell is not None:
            found = _scan_text(scan, cell.encode("utf-8", "replace"), _cell_label(number), number)
            problem = problem or found
    return problem


def _scan_text(scan: Scan, data: bytes, label: Callable[[int], str], unit: int) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the script's own odd escapes
            tree = ast.parse(data)
        lines = data.decode("utf-8", "replace").splitlines()
        scan.read(
            tree,
            lambda line: SourceLine(order=(unit, line), where=label(line), text=_line(lines, line)),
        )
    except SyntaxError as error:
        return f"{label(error.lineno or 1)}: {error.msg}"
    # Null bytes; nesting that no parser takes.
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error!s:.100}"
    return ""


def _cell_label(number: int) -> Callable[[int], str]:
    return lambda line: f"cell {number}, line {line}"


def _line(lines: list[str], number: int) -> str:
    text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
