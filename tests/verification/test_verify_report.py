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
        "x": ("replaced", "same"),
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
    assert judged({"a": "0", "b": "1", "c": "0"}, {"a": "1", "b": "0", "c": "0"}) == {
        "a": ("replaced", "b"),
        "b": ("changed", None),
        "c": ("match", None),
    }
    assert judged({"a": "0", "b": "1"}, {"a": "0", "b": "0"})["b"] == ("replaced", "a")
    assert judged({"a": "0", "b": "0", "c": "1"}, {"a": "0", "b": "0", "c": "0"})["c"] == (
        "changed",
        None,
    )


def test_zeros_tell_nothing() -> None:
    result = judge(
        {"zero": "0", "one": "1", "gone": "0b"},
        {"zero": "0", "one": "0", "new": "0b"},
        plain=["0", "0b"],
    )
    assert [(one.key, one.change, one.other) for one in result] == [
        ("zero", None, None),
        ("one", Change.CHANGED, None),
        ("gone", Change.MISSING, None),
        ("new", Change.EXTRA, None),
    ]
    swapped = judge({"zero": "0", "one": "1"}, {"zero": "1", "one": "0"}, plain=["0"])
    assert [one.change for one in swapped] == [Change.REPLACED, Change.CHANGED]


def test_one_digest_of_several_things_is_followed_by_the_names() -> None:
    """Zero biases of a model whose names got a wrapper, or that is in another file now."""
    result = judge(
        {"l.0.b": "0", "l.1.b": "0"}, {"module.l.0.b": "0", "module.l.1.b": "0"}, plain=["0"]
    )
    assert [(one.change, one.other) for one in result] == [
        (Change.RENAMED, "module.l.0.b"),
        (Change.RENAMED, "module.l.1.b"),
    ]
    back = judge(
        {"module.l.0.b": "0", "module.l.1.b": "0"}, {"l.0.b": "0", "l.1.b": "0"}, plain=["0"]
    )
    assert [one.other for one in back] == ["l.0.b", "l.1.b"]

    def name(key: str) -> str:
        return key.partition(":")[2]

    moved = judge({"f:b": "0", "f:c": "0"}, {"g:b": "0", "g:c": "0"}, name_of=name)
    assert [(one.change, one.other) for one in moved] == [
        (Change.MOVED, "g:b"),
        (Change.MOVED, "g:c"),
    ]
    tied = {"f:b": "0", "f:c": "0", "g:b": "1", "g:c": "1"}
    swapped = judge(tied, {key: "10"[int(digest)] for key, digest in tied.items()}, name_of=name)
    assert [(one.change, one.other) for one in swapped] == [
        (Change.SWAPPED, "g:b"),
        (Change.SWAPPED, "g:c"),
        (Change.SWAPPED, "f:b"),
        (Change.SWAPPED, "f:c"),
    ]


names = st.sampled_from("abcdef")
digests = st.sampled_from(["1", "2", "3", ""])


@given(st.dictionaries(names, digests.filter(bool)), st.dictionaries(names, digests))
def test_every_key_has_one_outcome_and_only_equal_ones_match(
    recorded: dict[str, str], found: dict[str, str]
) -> None:
    result: list[Judgement[str]] = judge(recorded, found)
    renamed = [one.other for one in result if one.change in (Change.RENAMED, Change.MOVED)]
    keys = Counter([*(one.key for one in result), *renamed])
    assert keys == Counter(recorded.keys() | found.keys())
    for one in result:
        assert (one.outcome is Outcome.MATCH) == (
            one.key in recorded and recorded[one.key] == found.get(one.key)
        )
        assert (one.change is not None) == (one.outcome is Outcome.DIFFER)
