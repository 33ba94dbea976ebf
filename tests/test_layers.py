"""The layers, read off the syntax tree: imports point down, and nothing outside runtime/ needs torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ckptfix

PACKAGE = Path(__file__).parents[1] / "ckptfix"
MODULES = sorted(PACKAGE.rglob("*.py"))
BELOW = {
    "storage": {"storage"},
    "formats": {"formats", "storage"},
    "checkpoint": {"checkpoint", "formats", "storage"},
    "weights": {"weights", "checkpoint", "formats", "storage"},
    "operations": {"operations", "weights", "checkpoint", "formats", "storage"},
    "runtime": {"runtime", "weights", "checkpoint", "formats", "storage"},
    "manual": {"manual"},
    "cli": {"cli", "manual", "operations", "runtime", "weights", "checkpoint", "formats", "storage"},
}
HEAVY = {"torch", "accelerate", "numpy", "transformers"}
NUMBERS = PACKAGE / "weights" / "elements"
"""The one place outside runtime/ that looks at numbers; imported where it is needed."""

EXECUTES = {"pickle", "marshal", "shelve", "runpy"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_point_down() -> None:
    for path in MODULES:
        check_imports(path)


def check_imports(path: Path) -> None:
    layer = path.relative_to(PACKAGE).parts[0]
    for name in imports(path):
        parts = name.split(".") if "." in name else [name, "__init__"]
        if (
            parts[0] == "ckptfix"
            and layer in BELOW
            and parts[1] not in ("errors", "reports", "wording", "__init__")
        ):
            assert parts[1] in BELOW[layer], (
                f"{path}: {layer} may not import {name}: it would know what is above it"
            )
        if layer != "runtime":
            is_numbers = path.parent == NUMBERS and parts[0] == "numpy"
            assert parts[0] not in HEAVY or is_numbers, (
                f"{path}: {name}: torch takes a second to import, and a broken driver must not stop a repair"
            )
            assert not name.startswith("safetensors.torch"), f"{path}: {name} imports torch"
        assert parts[0] not in EXECUTES, (
            f"{path}: {name} can run what a file says; pickles are read by their opcodes"
        )


def test_modules_stay_small_and_are_named_for_what_they_hold() -> None:
    for path in MODULES:
        assert len(path.read_text().splitlines()) <= 350, f"split {path}: a module should be read in one go"
        assert path.stem not in {"utils", "helpers", "common", "core", "manager"}, path


def test_only_report_prints() -> None:
    for path in MODULES:
        calls = [node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
        prints = any(isinstance(call, ast.Name) and call.id == "print" for call in calls)
        assert not prints, f"{path.name} prints"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["-c", "import ckptfix; ckptfix.check"], ["-m", "ckptfix", "check", "fixtures"]]
)
def test_no_torch_is_imported(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        check=False,
    )
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert any(name.startswith("ckptfix") for name in loaded)
    assert not loaded & {"torch", "accelerate", "numpy"}


def test_errors_know_nothing_of_the_package() -> None:
    names = list(imports(PACKAGE / "errors.py"))
    assert not [name for name in names if name.startswith("ckptfix")], "every layer imports errors: a circle"


def test_nothing_is_evaluated() -> None:
    for path in MODULES:
        called = {
            node.func.id
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not called & {"eval", "exec", "compile", "__import__"}, (
            f"{path}: text of a file could become code"
        )


def test_every_layer_is_known() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(BELOW), "a new layer needs a place in the order, or its imports go unchecked"


def test_public_names() -> None:
    assert sorted(ckptfix.__all__) == dir(ckptfix)
    for name in ckptfix.__all__:
        assert getattr(ckptfix, name).__name__ == name
    with pytest.raises(AttributeError):
        ckptfix.no_such_name  # noqa: B018
