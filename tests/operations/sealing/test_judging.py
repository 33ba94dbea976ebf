"""What happened to each thing, from digests alone."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ckptfix.operations.sealing.judging import Change, Judgement, Outcome, judge


def judged(recorded: dict[str, str], found: dict[str, str]) -> dict[str, tuple[str, str | None]]:
    return {
        one.key: (one.outcome.value if one.change is None else one.change.value, one.other)
        for one in judge(recorded, found)
    }


def test_each_change_is_named() -> None:
    recorded = {"same": "1", "flip": "2", "a": "3", "b": "4", "old": "5", "gone": "6", "dark": "7", "x": "8"}
    found = {"same": "1", "flip": "?", "a": "4", "b": "3", "new": "5", "dark": "", "more": "9", "x": "1"}
    assert judged(recorded, found) == {
        "same": ("match", None),
        "flip": ("changed", None),
        "a": ("swapped", "b"),
        "b": ("swapped", "a"),
        "old": ("renamed", "new"),
        "gone": ("missing", None),
        "dark": ("not checked", None),
        "x": ("replaced", "same"),
        "more": ("extra", None),
    }


def test_things_with_one_digest_are_renamed_one_by_one() -> None:
    result = judge({"a": "0", "b": "0", "c": "0"}, {"x": "0", "y": "0"})
    assert [(one.change, one.other) for one in result] == [
        (Change.RENAMED, "x"),
        (Change.RENAMED, "y"),
        (Change.MISSING, None),
    ]


names = st.sampled_from("abcdef")
digests = st.sampled_from(["1", "2", "3", ""])


@given(st.dictionaries(names, digests.filter(bool)), st.dictionaries(names, digests))
def test_every_key_has_one_outcome_and_only_equal_ones_match(
    recorded: dict[str, str], found: dict[str, str]
) -> None:
    result: list[Judgement[str]] = judge(recorded, found)
    renamed = [one.other for one in result if one.change is Change.RENAMED]
    keys = Counter([*(one.key for one in result), *renamed])
    assert keys == Counter(recorded.keys() | found.keys())
    for one in result:
        assert (one.outcome is Outcome.MATCH) == (
            one.key in recorded and recorded[one.key] == found.get(one.key)
        )
        assert (one.change is not None) == (one.outcome is Outcome.DIFFER)
