"""Cells of notebooks: what IPython understands is no syntax error, and what Python says of the rest
keeps its line.
"""

import ast
import json
from pathlib import Path

import pytest

from ckptfix.environment.facts.script import python_of, read_script

CELLS = {
    "a shell command's output": ("x = !ls", "x = None"),
    "two names for it": ("a, b = !ls -l | head", "a, b = None"),
    "a magic's value": ("%timeit -o f()\nout = %timeit -o f()", "f()\nout = None"),
    "a command on several lines": (
        "!pip install \\\n    accelerate \\\n    torch\nx = 1",
        "pass\n\n\nx = 1",
    ),
    "a magic on several lines": ("%pip install \\\n  torch\nx = 1", "pass\n\nx = 1"),
    "help behind": ("print?\nobj.method??\nx = 1", "pass\npass\nx = 1"),
    "help before": ("?print\n??obj", "pass\npass"),
    "help about a magic": ("%time?", "pass"),
    "a wildcard": ("*int*?", "pass"),
    "a line magic": ("%matplotlib inline\nx = 1", "pass\nx = 1"),
    "in a block": ("if True:\n    !nvidia-smi\n    %cd x", "if True:\n    pass\n    pass"),
    "a timed statement": (
        "%time model = accelerator.prepare(model)",
        "model = accelerator.prepare(model)",
    ),
    "a timed cell": ("%%time\nx = 1", "\nx = 1"),
    "a captured, timed cell": ("%%capture out\n%%time\nx = 1", "\n\nx = 1"),
    "a session that was pasted": (
        ">>> x = 1\n>>> for i in x:\n...     y = 2",
        "x = 1\nfor i in x:\n    y = 2",
    ),
    "an indented cell": ("    x = 1\n    y = 2", "x = 1\ny = 2"),
    "a magic without its sign": ("pip install torch", ""),
    "quick calls": ("/f 1\n,g a b", "pass\npass"),
    "Python's own signs": (
        "x = a % b\ny = (1\n  % 2)\nz = 1 != 2",
        "x = a % b\ny = (1\n  % 2)\nz = 1 != 2",
    ),
    "signs in a text": ('x = """\n%s\n!important\n"""\n!ls', 'x = """\n%s\n!important\n"""\npass'),
    "signs in brackets": ("x = f(1\n % 2)\n!ls", "x = f(1\n % 2)\npass"),
    "signs behind a backslash": ("x = 5 \\\n% 3\n!ls", "x = 5 \\\n% 3\npass"),
    "a comment that asks": ("x = 1  # is it?\n!ls", "x = 1  # is it?\npass"),
}


@pytest.mark.parametrize("name", CELLS)
def test_what_ipython_understands_becomes_python_of_as_many_lines(name: str) -> None:
    cell, wanted = CELLS[name]
    made = python_of(cell)
    assert made is not None
    ast.parse(made)
    assert made.count("\n") == cell.count("\n")
    assert made == wanted


@pytest.mark.parametrize(
    "cell",
    [
        "%%bash\nfor i in *; do echo; done",
        "%%html\n<b>",
        "%%writefile a.py\nx = (",
        "\n%%javascript\nlet x",
    ],
)
def test_cells_of_other_languages_are_passed_over(cell: str) -> None:
    assert python_of(cell) is None


@pytest.mark.parametrize("cell", ["def f(:", "x = = 1", "pip install a\npip install b", "x = 1 +"])
def test_what_ipython_does_not_understand_either_stays_a_syntax_error(cell: str) -> None:
    made = python_of(cell)
    assert made is not None
    with pytest.raises(SyntaxError):
        ast.parse(made)


def test_a_notebook_with_all_of_them_is_read_to_its_end(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": cell} for cell, _ in CELLS.values()]
    last = (
        "%%time\n!pip install \\\n  accelerate\nfrom accelerate import Accelerator\naccelerator = "
        "Accelerator()"
    )
    cells.append({"cell_type": "code", "source": last})
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    found = read_script(str(path))
    assert found.problem == ""
    assert [place.where for place in found.uses.made_early] == [f"cell {len(cells)}, line 5"]
