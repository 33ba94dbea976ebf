"""Cells of notebooks: what IPython understands is no syntax error, and what Python says of the rest
keeps its line.
"""

import ast
import json
from pathlib import Path

import pytest

from ckptfix.environment.doctor import unchecked
from ckptfix.environment.facts.script import Script, python_of, read_script
from tests.environment.building import facts

CELLS = {
    "a command on several lines": (
        "!pip install \\\n    accelerate \\\n    torch\nx = 1",
        "pass\n\n\nx = 1",
    ),
    "help before": ("?print\n??obj", "pass\npass"),
    "a line magic": ("%matplotlib inline\nx = 1", "pass\nx = 1"),
    "in a block": ("if True:\n    !nvidia-smi\n    %cd x", "if True:\n    pass\n    pass"),
    "a timed cell": ("%%time\nx = 1", "\nx = 1"),
    "a captured, timed cell": ("%%capture out\n%%time\nx = 1", "\n\nx = 1"),
    "Python's own signs": (
        "x = a % b\ny = (1\n  % 2)\nz = 1 != 2",
        "x = a % b\ny = (1\n  % 2)\nz = 1 != 2",
    ),
    "signs in a text": ('x = """\n%s\n!important\n"""', 'x = """\n%s\n!important\n"""'),
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


@pytest.mark.parametrize("cell", ["def f(:", "x = = 1", "pip install a", "x = !ls", "print?"])
def test_a_cell_that_is_not_read_is_no_problem_of_the_notebook(tmp_path: Path, cell: str) -> None:
    """It may be IPython, which is not followed beyond the begin of a line."""
    read = notebook(tmp_path, cell, "from accelerate import Accelerator\nAccelerator()")
    assert read.problem == ""
    assert [words.partition(",")[0] for words in read.unread] == ["cell 1"]
    assert len(read.uses.made_early) == 1
    assert f"{read.path}: {read.unread[0]}" in unchecked(facts(script=read))


def test_a_notebook_with_all_of_them_is_read_to_its_end(tmp_path: Path) -> None:
    last = (
        "%%time\n!pip install \\\n  accelerate\nfrom accelerate import Accelerator\naccelerator = "
        "Accelerator()"
    )
    read = notebook(tmp_path, *(cell for cell, _ in CELLS.values()), last)
    assert (read.problem, read.unread) == ("", ())
    assert [place.where for place in read.uses.made_early] == [f"cell {len(CELLS) + 1}, line 5"]


def notebook(folder: Path, *sources: str) -> Script:
    cells = [{"cell_type": "code", "source": source} for source in sources]
    path = folder / "train.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    return read_script(str(path))
