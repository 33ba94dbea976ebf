"""What happened to each thing, from digests alone."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ckptfix.verification.verify_report import Change, Judgement, Outcome, judge


def judged(recorded: dict[str, str], found: dict[str, str]) -> dict[str, tuple[str, str | None]]:
    return {
        one.key: (one.outcome.value if one.change is None else one.change.value, one.other)
        for one in judge(recorded, found)
    }


def test_each_change_is_named() -> None:
    recorded = {
        "same": "1",
        "flip": "2",
        "a": "3",
        "b": "4",
        "old": "5",
        "gone": "6",
        "dark": "7",
        "x": "8",
    }
    found = {
        "same": "1",
        "flip": "?",
        "a": "4",
        "b": "3",
        "new": "5",
        "dark": "",
        "more": "9",
        "x": "1",
    }
    assert judged(recorded, found) == {
        "same": ("match", None),
        "flip": ("changed", None),
        "a": ("swapped", "b"),
        "b": ("swapped", "a"),
        "old": ("renamed", "new"),
        "gone": ("missing", None),
        "dark": ("not checked", None),
        "x": ("changed", None),
        "more": ("extra", None),
    }


def test_a_digest_of_several_things_tells_nothing_of_where_one_went() -> None:
    assert judged({"a": "0", "b": "0", "c": "0"}, {"x": "0", "y": "0"}) == {
        "a": ("missing", None),
        "b": ("missing", None),
        "c": ("missing", None),
        "x": ("extra", None),
        "y": ("extra", None),
    }


def test_a_digest_of_several_things_shows_no_swap() -> None:
    assert judged({"a": "0", "b": "1", "c": "0"}, {"a": "1", "b": "0", "c": "0"}) == {
        "a": ("changed", None),
        "b": ("changed", None),
        "c": ("match", None),
    }


def test_what_is_in_another_file_now_goes_by_its_name() -> None:
    """Zero biases of a model, all of one digest."""
    moved = judge(
        {"f:b": "0", "f:c": "0"},
        {"g:b": "0", "g:c": "0"},
        name_of=lambda key: key.partition(":")[2],
    )
    assert [(one.change, one.other) for one in moved] == [
        (Change.RENAMED, "g:b"),
        (Change.RENAMED, "g:c"),
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
