"""The line of the user's script, for warnings: also of a script inside accelerate's package."""

import importlib.util
import os
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

import accelerate

from ckptfix.devices.callers import Line, calling_line

INSIDE = os.path.join(os.path.dirname(accelerate.__file__), "test_utils", "scripts", "train.py")
CALLS_AT_LINE_4 = "\n\ndef main():\n    prepare()\n\nmain()\n"


class Source(SourceFileLoader):
    """Runs a text as if it were in the file of this path."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self.text = text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, self.path, "exec")


def execute(name: str, path: str, text: str, **variables: Any) -> None:
    """Run a text as import and ``ckptfix run`` do: frames of importlib are between it and its
    caller.
    """
    loader = Source(name, path, text)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(variables)
    loader.exec_module(module)


def prepare_of_accelerate() -> Any:
    """Return a function in a file of accelerate's that returns the line of its caller."""
    variables: dict[str, Any] = {"calling_line": calling_line, "lines": []}
    code = "def prepare():\n    lines.append(calling_line())\n"
    exec(compile(code, accelerate.__file__, "exec"), variables)
    return variables


def test_a_script_inside_accelerate_is_named_by_its_own_line() -> None:
    library = prepare_of_accelerate()
    execute("__main__", INSIDE, CALLS_AT_LINE_4, prepare=library["prepare"])
    assert library["lines"] == [Line(INSIDE, 4)]


def test_a_module_of_accelerate_that_is_being_imported_is_not_the_user() -> None:
    library = prepare_of_accelerate()
    inner = {"prepare": library["prepare"]}
    execute(
        "train", "/home/user/train.py", "\nload()\n",
        load=_in_accelerate(lambda: execute("accelerate.scripts.train", INSIDE, CALLS_AT_LINE_4, **inner)),
    )  # fmt: skip
    assert library["lines"][0].path == __file__, (
        "the nearest code of no library, importlib's frames passed over"
    )


def _in_accelerate(function: Any) -> Any:
    variables: dict[str, Any] = {"function": function}
    exec(compile("def call():\n    function()\n", accelerate.__file__, "exec"), variables)
    return variables["call"]
