"""A reader who types the tutorial sees what it shows."""

from pathlib import Path

import pytest

from tests.manual.tutorial import TUTORIAL, played


@pytest.mark.slow
def test_the_tutorial_can_be_typed(tmp_path: Path) -> None:
    assert played(tmp_path) == TUTORIAL.read_text(), (
        "to write it again: .venv/bin/python -m tests.manual.tutorial"
    )
