"""Rewriting: identity is byte-identical, a rename changes exactly the strings asked for."""

import io
import pickle
import pickletools
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ckptfix.errors import FormatError, UnsupportedFormat
from ckptfix.formats.pickle_rewrite import rewrite
from ckptfix.formats.pickle_stream import parse
from ckptfix.formats.pickle_tree import pairs, same_tree
from tests.formats.test_pickle_stream import PROTOCOLS, VALUES
from tests.sampling import examples

NAMES = st.sampled_from(
    [
        "a",
        "b",
        "module.a",
        "module.module.b",
        "ü",
        "\n'\"\\",
        "x" * 300,
        "",
        "\ud800",
        "日本",
        "\0\r\x1a",
    ]
)


def keys_renamed(data: bytes, new: dict[str, str]) -> bytes:
    tree = parse(data)
    return rewrite(
        tree, {key.site: new[key.value] for key, _ in pairs(tree.root) if key.value in new}
    )


@given(VALUES, PROTOCOLS)
def test_identity_is_byte_identical(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    tree = parse(data)
    assert rewrite(tree, {}) == data
    assert rewrite(tree, {text.site: text.value for text in tree.texts}) == data


@settings(max_examples=examples(200))
@given(
    st.dictionaries(
        NAMES, NAMES | st.integers() | st.lists(NAMES, max_size=3), min_size=1, max_size=6
    ),
    PROTOCOLS,
    st.dictionaries(NAMES, NAMES, max_size=5),
)
def test_renaming_keys_changes_keys_only(
    value: dict[str, Any], protocol: int, new: dict[str, str]
) -> None:
    expected = [(new.get(key, key), item) for key, item in value.items()]
    data = keys_renamed(pickle.dumps(value, protocol), new)
    assert [(key.value, None) for key, _ in pairs(parse(data).root)] == [
        (key, None) for key, _ in expected
    ]
    assert pickle.loads(data) == dict(expected)


@given(VALUES, PROTOCOLS, st.randoms(use_true_random=False), st.text(max_size=300))
def test_any_single_push_can_be_changed_alone(
    value: Any, protocol: int, random: Any, new: str
) -> None:
    tree = parse(pickle.dumps(value, protocol))
    if not tree.texts:
        return
    text = random.choice(tree.texts)
    try:
        data = rewrite(tree, {text.site: new})
    except FormatError:
        # The site was part of a global's name, which must not change.
        named = {part for name in tree.globals for part in name}
        event("refused")
        if text.value not in named:
            raise
        return
    changed = [t.value for t in parse(data).texts]
    assert changed == [new if t.site == text.site else t.value for t in tree.texts]


SHARED = "module.shared"


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value",
    [
        {SHARED: SHARED},
        {SHARED: [SHARED, {SHARED: SHARED}]},
        {"first": SHARED, SHARED: 1, "last": SHARED},
        {"copy": {SHARED: 1}, SHARED: (SHARED, SHARED)},
        {SHARED: b"module.shared", 1: "module.sharedx"},
        {SHARED: "x" * 70000, "tail": SHARED},
    ],
)
def test_a_shared_string_changes_only_where_it_is_a_key(
    value: dict[Any, Any], protocol: int
) -> None:
    data = keys_renamed_of_text(pickle.dumps(value, protocol), SHARED, "shared")
    expected = {"shared" if key == SHARED else key: item for key, item in value.items()}
    assert pickle.loads(data) == expected
    old = {op.name for op, _, _ in pickletools.genops(pickle.dumps(value, protocol))}
    added = {op.name for op, _, _ in pickletools.genops(data)} - old
    assert added <= {"BINUNICODE"}
    if protocol >= 4:
        pickle._Unpickler(io.BytesIO(data)).load()  # checks the frames


def keys_renamed_of_text(data: bytes, old: str, new: str) -> bytes:
    tree = parse(data)
    sites = {key.site: new for key, _ in pairs(tree.root) if getattr(key, "value", None) == old}
    return rewrite(tree, sites)


def test_memo_chains_keep_the_value_each_get_had() -> None:
    # literal -> memo 0; GET 0 renamed, memoized again as 1; GET 1 keeps the old value, GET 0 too
    data = b"(X\x01\0\0\0aq\x00h\x00q\x01h\x01h\x00t."
    tree = parse(data)
    sites = [text.site for text in tree.texts]
    assert pickle.loads(rewrite(tree, {sites[1]: "new"})) == ("a", "new", "a", "a")
    assert pickle.loads(rewrite(tree, {sites[0]: "new"})) == ("new", "a", "a", "a")
    assert pickle.loads(rewrite(tree, {sites[1]: "new", sites[2]: "new"})) == (
        "a",
        "new",
        "new",
        "a",
    )


def test_python_2_strings_stay_strings_of_python_2() -> None:
    data = b"}(U\x08module.aK\x01S'module.b'\nK\x02T\x08\0\0\0module.cK\x03u."
    new = keys_renamed(data, {f"module.{char}": char for char in "abc"})
    assert new == b"}(U\x01aK\x01S'b'\nK\x02U\x01cK\x03u."


def test_a_string_used_twice_by_dup_is_refused() -> None:
    tree = parse(b"(X\x01\0\0\0a2t.")
    with pytest.raises(UnsupportedFormat, match="DUP"):
        rewrite(tree, {tree.texts[0].site: "b"})
    assert rewrite(tree, {}) == tree.data


@pytest.mark.parametrize("sites", [{0: "x"}, {9999: "x"}, {-1: "x"}])
def test_a_site_that_pushes_no_string_is_refused(sites: dict[int, str]) -> None:
    with pytest.raises(FormatError, match="no string is pushed"):
        rewrite(parse(pickle.dumps({"a": 1}, 2)), sites)


def test_a_name_of_a_global_is_never_changed() -> None:
    tree = parse(pickle.dumps(OrderedDict, 4))
    with pytest.raises(FormatError):
        rewrite(tree, {tree.texts[0].site: "os"})


def test_leftovers_are_refused() -> None:
    with pytest.raises(UnsupportedFormat, match="stack"):
        rewrite(parse(b"NN."), {})


@given(VALUES, VALUES, PROTOCOLS)
def test_same_tree_is_equality_of_values(one: Any, other: Any, protocol: int) -> None:
    first, second = pickle.dumps(one, protocol), pickle.dumps(other, protocol)
    assert same_tree(parse(first), parse(first), {})
    if first != second and one != other:
        assert not same_tree(parse(first), parse(second), {})


def test_sharing_is_part_of_the_tree() -> None:
    inner: list[Any] = []
    assert not same_tree(parse(pickle.dumps([inner, inner])), parse(pickle.dumps([[], []])), {})
    assert not same_tree(parse(pickle.dumps([[], []])), parse(pickle.dumps([inner, inner])), {})
    loop: list[Any] = []
    loop.append(loop)
    assert same_tree(parse(pickle.dumps(loop)), parse(pickle.dumps(loop)), {})


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (0.0, -0.0), (1, 1.0), (0, None), (b"", ""), ((), [])]
)
def test_values_that_only_python_calls_equal_differ(one: Any, other: Any) -> None:
    assert not same_tree(parse(pickle.dumps(one)), parse(pickle.dumps(other)), {})
    assert same_tree(parse(pickle.dumps(float("nan"))), parse(pickle.dumps(float("nan"))), {})


@pytest.mark.slow
def test_bombs_and_deep_trees_are_compared_in_linear_time() -> None:
    bomb = parse(b"N\x85q\x00" + b"0h\x00h\x00\x86q\x00" * 3000 + b".")
    assert same_tree(bomb, parse(bomb.data), {})
    deep = parse(b"]" * 100_000 + b"a" * 99_999 + b".")
    assert rewrite(deep, {}) == deep.data
