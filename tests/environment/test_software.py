"""What is installed, read without importing or running any of it."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from ckptfix.environment.facts.installed import (
    find_command,
    find_source,
    read_accelerate,
    read_modules,
    read_software,
    release,
)

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a command named accelerate with this first line into a folder of this name; return the
    folder.
    """

    def make(folder: str, first: str) -> str:
        place = tmp_path / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "accelerate").write_text(f"{first}\nraise SystemExit('it was run')\n")
        (place / "accelerate").chmod(0o755)
        return str(place)

    return make


def test_the_command_of_this_python(write: Write) -> None:
    command = find_command("accelerate", write("bin", f"#!{sys.executable}"))
    assert command is not None
    assert (command.is_ours, command.interpreter) == (True, sys.executable)


def test_the_command_of_another_environment_with_its_version(write: Write, tmp_path: Path) -> None:
    search = write("other/bin", f"#!{tmp_path}/other/bin/python3")
    (tmp_path / "other/pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.9.18\n")
    command = find_command("accelerate", search)
    assert command is not None
    assert (command.is_ours, command.python) == (False, (3, 9, 18))


def test_the_command_by_env_and_a_name_with_a_version(write: Write) -> None:
    search = write("bin", "#!/usr/bin/env python3.8")
    python = Path(search) / "python3.8"
    python.write_text("")
    python.chmod(0o755)
    command = find_command("accelerate", search)
    assert command is not None
    assert (command.interpreter, command.python) == (str(python), (3, 8))


@pytest.mark.parametrize("first", ["#!/bin/sh", "\x7fELF", ""])
def test_a_wrapper_says_nothing_of_its_python(write: Write, first: str) -> None:
    command = find_command("accelerate", write("bin", first))
    assert command is not None
    assert (command.interpreter, command.is_ours) == ("", True)


def test_no_command(tmp_path: Path) -> None:
    assert find_command("accelerate", str(tmp_path)) is None


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("1.0rc1", (1, 0)), ("unknown", ()), ("", ())],
)
def test_versions(text: str, numbers: tuple[int, ...]) -> None:
    assert release(text) == numbers


def test_the_installed_accelerate_by_its_source() -> None:
    source = read_accelerate(find_source("accelerate"))
    assert {
        "Accelerator",
        "PartialState",
        "notebook_launcher",
        "utils",
        "DeepSpeedPlugin",
    } <= source.names
    assert "PartialSate" not in source.names
    assert source.options["num_processes"]
    assert source.options["config_file"]
    assert not source.options["multi_gpu"]
    assert not source.options["m"]


def test_modules_of_the_installed_accelerate_by_their_source() -> None:
    names = {
        "state.PartialState",
        "utils.modeling.x",
        "utils.DeepSpeedPlugin",
        "nothing.x",
        "Accelerator.prepare",
    }
    package = find_source("accelerate")
    source = replace(read_accelerate(package), modules=read_modules(package, names))
    assert source.modules.keys() == {"state", "utils", "utils.modeling"}
    for good in (
        *names - {"nothing.x"},
        "utils.modeling.find_tied_parameters",
        "utils.modeling",
        "state.os",
    ):
        assert (good == "utils.modeling.x") == bool(source.missing(good)), good
    assert source.missing("nothing.x") == "nothing"
    assert source.missing("state.PartialSate") == "state.PartialSate"
    assert source.missing("utils.nothing.more") == "utils.nothing"
    assert "PartialState" in source.known_beside("state.PartialSate")


def test_modules_whose_names_are_not_all_known(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("print 'old'\n")
    (tmp_path / "lazy.py").write_text("def __getattr__(name): ...\n")
    (tmp_path / "star.py").write_text("from .old import *\n")
    (tmp_path / "plain.py").write_text(
        "class A:\n    def __getattr__(self, name): ...\nfor b, c in []: ...\n"
    )
    found = read_modules(tmp_path, ["old.x", "lazy.x", "star.x", "plain.x"])
    assert {name: "*" in names for name, names in found.items()} == {
        "lazy": True, "old": True, "plain": False, "star": True,
    }  # fmt: skip
    assert {"A", "b", "c"} <= found["plain"]
    assert read_modules(None, ["a.b"]) == {}


def test_no_accelerate_is_an_empty_answer(tmp_path: Path) -> None:
    assert find_source("no-such-package-anywhere") is None
    for folder in (None, tmp_path):
        assert read_accelerate(folder).options == {}


def test_a_source_of_another_python_is_an_empty_answer(tmp_path: Path) -> None:
    (tmp_path / "commands").mkdir()
    (tmp_path / "commands/launch.py").write_text("print 'old'\n")
    assert read_accelerate(tmp_path).options == {}


def test_this_environment() -> None:
    software = read_software({"PATH": os.environ["PATH"]})
    assert software.python == sys.version_info[:3]
    assert {"torch", "accelerate", "ckptfix"} <= software.packages.keys()
    assert software.version("torch") >= (2, 4)
    assert software.version("no-such-package") == ()
