"""The table of versions in the manual, the oldest versions in ``pyproject.toml``, and the wheel."""

import re
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from tests import version_steps
from tests.versions import LIBRARIES, ROOT, ROWS, STEPS, build_wheel, oldest, table

RESULT = re.compile(rf"all|not tested: .+|(?:(?:{'|'.join(STEPS)})(?:, )?)+")


def test_the_manual_has_each_row_with_its_result() -> None:
    lines = table().splitlines()[2:]
    assert len(lines) == len(ROWS)
    for line, row in zip(lines, ROWS, strict=True):
        assert line.startswith(row.cells)
        assert RESULT.fullmatch(line.removeprefix(row.cells).strip(" |"))


def test_the_oldest_versions_are_those_that_were_tested() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (row,) = [row for row in ROWS if row.is_oldest]
    tested = {name: getattr(row, name) for name in LIBRARIES}
    assert f'requires-python = ">={row.python}"' in text
    stated = {**oldest(), **dict(re.findall(r'"(transformers|peft)>=([\d.]+)"', text))}
    assert tested.keys() <= stated.keys()
    for name, version in tested.items():
        assert Version(version) == Version(stated[name]), name


def test_every_step_exists() -> None:
    assert all(callable(getattr(version_steps, step)) for step in STEPS)


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    # Newer Pythons install none into an environment, and older ones need `wheel`.
    pytest.importorskip("setuptools", minversion="70.1")
    wheel = build_wheel(tmp_path, "--no-build-isolation")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        needs = re.findall(r"Requires-Dist: ([\w-]+)[^;\n]*\n", archive.read(metadata).decode())
    files = (path for path in (ROOT / "ckptfix").rglob("*") if path.is_file())
    assert names == {
        str(path.relative_to(ROOT)) for path in files if path.parent.name != "__pycache__"
    }
    assert {"ckptfix/py.typed", "ckptfix/checkpoint/architectures.bin"} < names
    assert "ckptfix/manual/limits.md" in names
    assert set(needs) == oldest().keys()
