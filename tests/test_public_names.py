"""Public names: where they live, that importing a package costs nothing, and what moved since
0.4.
"""

import ast
import importlib
import inspect
import pydoc
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import fields

import ckptfix
import ckptfix.devices
import ckptfix.training

CHECKPOINT = Path(__file__).parents[1] / "fixtures" / "golden" / "unsafe-pickle" / "checkpoint"
PACKAGES = [ckptfix, ckptfix.training, ckptfix.devices]
VERBS = [
    "check",
    "plan_repair",
    "repair",
    "undo",
    "seal",
    "verify",
    "diff",
    "migrate",
    "salvage",
    "doctor",
]
MOVED = [
    (name, f"ckptfix.{room}", name)
    for room, names in ckptfix._MOVED.items()
    for name in names.split()
] + [("Receipt", "ckptfix", "RepairReceipt")]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_there_under_its_own_name(package: ModuleType) -> None:
    assert sorted(package.__all__) == dir(package)
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_type_checkers_see_the_same_names(package: Any) -> None:
    tree = ast.parse(inspect.getsource(package))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (str(node.module), alias.asname)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    resolved = {
        (f"{package.__name__}.{module}", name)
        for module, names in package._MODULES.items()
        for name in names.split()
    }
    assert seen == resolved


@pytest.mark.parametrize("package", PACKAGES)
def test_help_shows_every_public_name(package: Any) -> None:
    """Of a Struct it evaluates the types of all fields; one that was imported for type checkers
    alone ended ``help(ckptfix)`` in a NameError.
    """
    for name in package.__all__:
        value = getattr(package, name)
        assert pydoc.render_doc(value)
        if isinstance(value, type) and issubclass(value, Struct):
            assert {field.name for field in fields(value)} == set(value.__struct_fields__)


def test_every_verb_is_a_function_of_the_package() -> None:
    for verb in VERBS:
        assert inspect.isfunction(getattr(ckptfix, verb))


@pytest.mark.parametrize(("name", "home", "current"), MOVED)
def test_a_name_that_moved_still_works_and_warns_at_the_callers_line(
    name: str, home: str, current: str
) -> None:
    assert name not in dir(ckptfix)
    for _ in range(2):  # each use warns: the value is not kept
        with pytest.warns(DeprecationWarning, match=rf": from {home} import {current}$") as caught:
            value = getattr(ckptfix, name)
        assert caught[0].filename == __file__
    assert value is getattr(importlib.import_module(home), current)


def test_from_import_of_a_name_that_moved_warns_at_the_callers_line() -> None:
    with pytest.warns(DeprecationWarning, match="from ckptfix.devices import Verdict") as caught:
        from ckptfix import Verdict
    assert {warning.filename for warning in caught} == {__file__}
    assert Verdict is ckptfix.devices.Verdict


def test_public_names_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ckptfix.__all__:
            getattr(ckptfix, name)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_importing_a_package_imports_nothing_else(package: ModuleType) -> None:
    code = f"import sys, {package.__name__}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("ckptfix")}
    assert ours <= {"ckptfix", "ckptfix.lazy", package.__name__}
    assert not {"torch", "accelerate", "numpy", "click"} & set(done.stdout.split())


def test_doctor_returns_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptfix.devices import environment_of_torch

    asked = []

    def look(*, in_process: bool) -> dict[str, Any]:
        asked.append(in_process)
        return {"version": "2.13.0", "stage": "done", "problem": ""}

    monkeypatch.setattr(environment_of_torch, "look", look)
    report = ckptfix.doctor(CHECKPOINT, script=Path(__file__), in_process=True)
    assert asked == [True]
    assert isinstance(report, ckptfix.DoctorReport)
    assert report.status == 1
    assert "unsafe-pickle" in {advice.code for advice in report.advice}
    assert report.as_json().keys() == {"advice", "not_checked", "environment"}
    assert str(report).startswith(report.summary)
