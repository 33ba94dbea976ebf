"""A training script or notebook, read by its syntax tree and never executed."""

import ast
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptfix.operations.doctor.facts.notebook import python_of
from ckptfix.operations.doctor.facts.script_scan import Scan
from ckptfix.operations.doctor.facts.script_uses import Place, Uses

_MAX_SOURCE = 16 << 20
_MAX_TEXT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a script does, as far as its text shows. ``problem``: why it, or a part of it, could not be read."""

    path: str
    uses: Uses
    problem: str = ""


def read_script(path: str) -> Script:
    """Return what a ``.py`` file or an ``.ipynb`` notebook does.

    Raises OSError when the file cannot be read. Text that is no Python gives a Script with a problem.
    """
    source = Path(path)
    if source.stat().st_size > _MAX_SOURCE:
        return Script(
            path=path, uses=Uses(), problem=f"it has {source.stat().st_size} bytes, too many for a script"
        )
    data = source.read_bytes()
    scan = Scan()
    if source.suffix == ".ipynb":
        return Script(path=path, problem=_scan_notebook(scan, data), uses=scan.uses())
    problem = _scan_text(scan, data, lambda line: f"line {line}", 0)
    return Script(path=path, problem=problem, uses=scan.uses())


def _scan_notebook(scan: Scan, data: bytes) -> str:
    """Scan the code cells of a notebook in their order; return what was wrong with the first bad one, or ""."""
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
        scan.read(tree, lambda line: Place(order=(unit, line), where=label(line), text=_line(lines, line)))
    except SyntaxError as error:
        return f"{label(error.lineno or 1)}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nesting that no parser takes
        return f"{type(error).__name__}: {error!s:.100}"
    return ""


def _cell_label(number: int) -> Callable[[int], str]:
    return lambda line: f"cell {number}, line {line}"


def _line(lines: list[str], number: int) -> str:
    text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
