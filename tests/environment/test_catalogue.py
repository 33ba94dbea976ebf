"""One catalogue: each code has tests that trigger it and tests that do not, and a row in the
manual.
"""

import re
from pathlib import Path

import pytest

from ckptfix.diagnosis.findings.base import Severity
from ckptfix.diagnosis.findings.catalogue import CODES as FINDINGS
from ckptfix.environment.advice import MAX_EVIDENCE, Said, Topic, say, topic
from ckptfix.environment.doctor import CODES, TOPICS
from tests.environment.building import facts
from tests.environment.cases import CASES

PAGE = Path(__file__).parents[2] / "ckptfix/manual/codes.md"


def test_codes_are_unique_kebab_case() -> None:
    assert len(CODES) == len(TOPICS)
    for code in CODES:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.code)
def test_every_severity_is_triggered_and_silence_is_tested(topic: Topic) -> None:
    seen = {case.severity for case in CASES if case.code == topic.code}
    assert seen == {*topic.severities, None}


def test_no_case_is_of_an_unknown_code() -> None:
    assert {case.code for case in CASES} == set(CODES)


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.code)
def test_the_manual_says_the_same(topic: Topic) -> None:
    assert topic.row in PAGE.read_text()


def test_a_code_that_check_has_too_means_the_same() -> None:
    for code in CODES.keys() & FINDINGS.keys():
        assert CODES[code].meaning == FINDINGS[code].meaning
        assert CODES[code].severities[0] is FINDINGS[code].severity


def topic_that_says(*said: Said) -> Topic:
    return topic("a", "b", Severity.NOTE)(lambda facts: said)


def test_a_topic_refuses_severities_that_it_does_not_announce() -> None:
    told = topic_that_says(say("c", evidence=("d",), fix="e", severity=Severity.ERROR))
    with pytest.raises(ValueError, match="cannot have severity error"):
        list(told.advice(facts()))


def test_long_evidence_is_cut_and_says_so() -> None:
    (advice,) = topic_that_says(say("c", evidence=tuple("x" * 20), fix="d")).advice(facts())
    assert len(advice.evidence) == MAX_EVIDENCE
    assert advice.evidence[-1] == f"and {20 - MAX_EVIDENCE + 1} more like these"
