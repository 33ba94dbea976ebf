"""One catalogue: each code has a class, a golden folder, and a line in the README that says the same."""

import json
import re
from pathlib import Path

import pytest

from ckptfix.errors import UsageError
from ckptfix.operations.findings import CATALOGUE, CODES, Action, Finding
from ckptfix.operations.policy import Policy

ROOT = Path(__file__).parents[1]


def test_codes_are_unique_kebab_case() -> None:
    assert len(CODES) == len(CATALOGUE)
    for code in CODES:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)


@pytest.mark.parametrize("kind", CATALOGUE, ids=lambda kind: kind.code)
def test_the_readme_says_the_same(kind: type[Finding]) -> None:
    action = f"ask: `{kind.option}`" if kind.action is Action.ASK else kind.action.value
    row = f"| `{kind.code}` | {kind.severity.value} | {action} | {kind.meaning} |"
    assert row in (ROOT / "README.md").read_text()


def test_the_readme_has_no_other_codes() -> None:
    text = (ROOT / "README.md").read_text()
    table = text.split("| code | severity |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == set(CODES)


def test_every_code_has_a_golden_folder() -> None:
    cases = [json.loads(path.read_text())["code"] for path in ROOT.glob("fixtures/golden/*/case.json")]
    # A killed repair is made by the kill test, which checks the finding, too.
    assert set(cases) == set(CODES) - {"interrupted-repair"}


@pytest.mark.parametrize("kind", CATALOGUE, ids=lambda kind: kind.code)
def test_what_is_only_told_cannot_be_allowed(kind: type[Finding]) -> None:
    if kind.action is Action.TELL:
        with pytest.raises(UsageError, match=kind.code):
            Policy(allow=frozenset({kind.code}))
    else:
        Policy(allow=frozenset({kind.code}))
