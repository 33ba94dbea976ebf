"""What every verb prints, its JSON and its exit status are those of ``fixtures/transcripts``."""

import difflib

import pytest

pytest.importorskip(
    "botocore", reason="botocore is not installed: pip install 'ckptfix[test-stores]'"
)

from tests.golden_cases import CASES
from tests.golden_verbs import frozen, transcript


@pytest.mark.parametrize(
    ("verb", "name"), [(verb, name) for verb, cases in CASES.items() for name in cases]
)
def test_a_verb_says_what_it_said(verb: str, name: str) -> None:
    """Where the new words are right: ``python -m tests.golden_verbs``, and look at the diff."""
    before, now = frozen(verb)[name], transcript(CASES[verb][name])
    changed = difflib.unified_diff(
        before.splitlines(), now.splitlines(), "as frozen", "now", lineterm="", n=2
    )
    if before != now:
        pytest.fail("\n".join(changed), pytrace=False)


@pytest.mark.parametrize("verb", CASES)
def test_every_case_has_a_transcript_and_no_other_is_left(verb: str) -> None:
    assert list(frozen(verb)) == list(CASES[verb])
