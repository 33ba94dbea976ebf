"""A reader who types the tutorial sees what it shows."""

import re
from pathlib import Path

import pytest

from tests.manual.tutorial import TUTORIAL, played


@pytest.mark.slow
def test_the_tutorial_can_be_typed(tmp_path: Path) -> None:
    assert rounded(played(tmp_path)) == rounded(TUTORIAL.read_text()), (
        "to write it again: .venv/bin/python -m tests.manual.tutorial"
    )


def rounded(text: str) -> str:
    """Return a text with sizes in whole KiB: a pickle of random states is a few bytes longer in some runs."""
    return re.sub(r"(\d+)\.\d KiB", r"\1 KiB", text)
