"""A training script or notebook, read by its syntax tree and never executed."""

import ast
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from ckptfix.environment.facts.script_scan import Scan
from ckptfix.environment.facts.script_uses import SourceLine, Uses
from ckptfix.wording import shortened

_RUNS_PYTHON = frozenset(
    {"time", "timeit", "capture", "prun", "memit", "mprun", "lprun", "debug", "snakeviz"}
)
"""Cell magics whose cell is Python in the notebook's own namespace."""

_OF_IPYTHON = re.compile(r"(\s*)[%!?]")


def python_of(cell: str) -> str | None:
    """Return a cell's Python, with a ``pass`` for each line that only IPython understands; None for
    a cell of another language, or a file to write.
    """
    lines = cell.split("\n")
    first = next((line.lstrip() for line in lines if line.strip()), "")
    if first.startswith("%%") and re.split(r"\W", first[2:], maxsplit=1)[0] not in _RUNS_PYTHON:
        return None
    if _is_python(cell):  # a "%" that begins a line is Python's in brackets, or in a text
        return cell
    goes_on = False
    for number, line in enumerate(lines):
        match = _OF_IPYTHON.match(line)
        if match or goes_on:
            goes_on = line.endswith("\\")
            lines[number] = (
                f"{match[1]}pass" if match and not line.lstrip().startswith("%%") else ""
            )
    return "\n".join(lines)


def _is_python(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


_MAX_SOURCE = 16 << 20
_MAX_TEXT = 100


class Script(Struct, frozen=True, kw_only=True):
    """Actions of a script, as far as its text shows. ``problem``: why it could not be read.
    ``unread``: the cells of a notebook that are not Python.
    """

    path: str
    uses: Uses
    problem: str = ""
    unread: tuple[str, ...] = ()


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
            problem=f"it is too large for a script: {source.stat().st_size} bytes",
        )
    data = source.read_bytes()
    scan = Scan()
    unread: tuple[str, ...] = ()
    if source.suffix == ".ipynb":
        problem, unread = _scan_notebook(scan, data)
    else:
        problem = _scan_text(scan, data, lambda line: f"line {line}", 0)
    return Script(path=path, problem=problem, unread=unread, uses=scan.uses())


def _scan_notebook(scan: Scan, data: bytes) -> tuple[str, tuple[str, ...]]:
    """Scan the code cells of a notebook in their order; return what is wrong with the file, or "",
    and with each cell that could not be read.
    """
    try:
        cells = json.loads(data)["cells"]
        sources = [
            "".join(cell["source"]) if isinstance(cell["source"], list) else str(cell["source"])
            for cell in cells
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"not a notebook: {type(error).__name__}: {error!s:.100}", ()
    problems = (
        _scan_text(scan, cell.encode("utf-8", "replace"), _cell_label(number), number)
        for number, text in enumerate(sources, 1)
        if (cell := python_of(text)) is not None
    )
    return "", tuple(filter(None, problems))


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
    return shortened(text, _MAX_TEXT)
