"""A reader who types the tutorial sees what it shows."""

import re
from pathlib import Path

import pytest

from tests.manual.tutorial import TUTORIAL, played

_SIZE = re.compile(r"(\d+\.\d) KiB")


@pytest.mark.slow
def test_the_tutorial_can_be_typed(tmp_path: Path) -> None:
    typed, written = played(tmp_path), TUTORIAL.read_text()
    assert _SIZE.sub("KiB", typed) == _SIZE.sub("KiB", written), (
        "to write it again: .venv/bin/python -m tests.manual.tutorial"
    )
    # A pickle of random states is a few bytes longer in some runs.
    assert sizes(typed) == pytest.approx(sizes(written), abs=1.0)


def sizes(text: str) -> list[float]:
    return [float(size) for size in _SIZE.findall(text)]
