"""One catalogue: each code has a class, a golden folder, and a row of the manual that says the
same.
"""

import json
import re
from pathlib import Path

import pytest

from ckptfix import check
from ckptfix.cli.repair import repair_command
from ckptfix.diagnosis.findings.base import Action, Finding
from ckptfix.diagnosis.findings.catalogue import CATALOGUE, CODES
from ckptfix.diagnosis.policy import Policy
from ckptfix.errors import UsageError

ROOT = Path(__file__).parents[1]


def test_codes_are_unique_kebab_case() -> None:
    assert len(CODES) == len(CATALOGUE)
    for code in CODES:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)


@pytest.mark.parametrize("kind", CATALOGUE, ids=lambda kind: kind.code)
def test_the_manual_says_the_same(kind: type[Finding]) -> None:
    actions = {Action.FIX: "fix", Action.ASK: f"ask: `{kind.option}`", Action.TELL: "manual"}
    row = f"| `{kind.code}` | {kind.severity.value} | {actions[kind.action]} | {kind.meaning} |"
    assert row in (ROOT / "ckptfix/manual/codes.md").read_text()


def test_the_manual_has_no_other_codes() -> None:
    text = (ROOT / "ckptfix/manual/codes.md").read_text()
    table = text.split("| code | severity |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == set(CODES)


def test_every_code_has_a_golden_folder() -> None:
    cases = [
        json.loads(path.read_text())["code"] for path in ROOT.glob("fixtures/golden/*/case.json")
    ]
    # A killed repair is made by the kill test, which checks the finding, too. A stale save takes
    # two folders.
    assert set(cases) == set(CODES) - {"interrupted-repair", "stale-save"}


@pytest.mark.parametrize("kind", CATALOGUE, ids=lambda kind: kind.code)
def test_what_is_only_told_cannot_be_allowed(kind: type[Finding]) -> None:
    if kind.action is Action.TELL:
        with pytest.raises(UsageError, match=kind.code):
            Policy(allow=frozenset({kind.code}))
    else:
        Policy(allow=frozenset({kind.code}))


@pytest.mark.parametrize(
    "case", sorted(ROOT.glob("fixtures/golden/*/checkpoint")), ids=lambda path: path.parent.name
)
def test_every_finding_is_json_and_says_what_to_do(case: Path) -> None:
    for finding in check(case, data=True).findings:
        document = json.loads(json.dumps(finding.as_json("DIR")))
        assert document["code"] == finding.code
        assert document["severity"] == finding.severity.value
        assert document["action"] == finding.action.value
        assert document["path"] == str(finding.path)
        assert document["message"] == str(finding)
        assert str(finding.path) in str(finding)
        if finding.action is Action.ASK:
            assert finding.option.split()[0] in finding.advice
        elif finding.action is Action.TELL:
            assert finding.advice, "what cannot be repaired needs a next step"


def test_an_option_in_the_catalogue_is_one_of_the_command() -> None:
    options = {name for parameter in repair_command.params for name in parameter.opts}
    for kind in CATALOGUE:
        if kind.action is Action.ASK:
            assert kind.option.split()[0] in options
        else:
            assert kind.option == ""
