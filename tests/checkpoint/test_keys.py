"""Names and maps between them: what counts as a wrapper, and what a map may change."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptfix.checkpoint.keys import (
    WRAPPERS,
    KeyMap,
    collapse,
    collisions,
    common_wrappers,
    inner_wrappers,
    is_nested,
    leading_wrappers,
    shared_chain,
)

SEGMENTS = st.sampled_from(
    ["fc", "0", "weight", "modules", "my_module", "größe", "", *sorted(WRAPPERS)]
)
NAMES = st.lists(SEGMENTS, min_size=1, max_size=5).map(".".join)
CHAINS = st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=4).map(tuple)


def joined(chain: tuple[str, ...]) -> str:
    return "".join(f"{segment}." for segment in chain)


@pytest.mark.parametrize(
    ("fqn", "chain"),
    [
        ("module.fc.weight", ("module",)),
        ("module.module.weight", ("module", "module")),
        ("_orig_mod.module.weight", ("_orig_mod", "module")),
        ("_fsdp_wrapped_module._checkpoint_wrapped_module.w", ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")),
        ("module", ()),  # a parameter of that name: the last segment is never a wrapper
        ("module.module", ("module",)),
        ("modules.0.weight", ()),
        ("my_module.weight", ()),
        ("fc.module.weight", ()),
        ("", ()),
    ],
)  # fmt: skip
def test_wrappers_are_whole_segments_at_the_front(fqn: str, chain: tuple[str, ...]) -> None:
    assert leading_wrappers(fqn) == chain


@pytest.mark.parametrize(
    ("names", "chain"),
    [
        ([], ()),
        (["module.a", "module.b"], ("module",)),
        (["module.module.a", "module.b"], ("module",)),
        (["module.a", "module.module.b"], ("module",)),
        (["module.a", "b"], ()),
        (["module._orig_mod.a", "module.module.b"], ("module",)),
        (["module.a", "module"], ()),
    ],
)
def test_a_wrapper_is_what_every_name_carries(names: list[str], chain: tuple[str, ...]) -> None:
    assert common_wrappers(names) == chain


@given(st.lists(NAMES, max_size=6))
def test_the_shortcut_for_many_names_changes_nothing(names: list[str]) -> None:
    assert common_wrappers(names) == shared_chain(leading_wrappers(fqn) for fqn in names)
    assert common_wrappers(reversed(names)) == common_wrappers(names)


@given(st.lists(NAMES, max_size=5, unique=True), CHAINS)
def test_the_common_chain_can_always_be_taken_off(names: list[str], extra: tuple[str, ...]) -> None:
    """What the finding promises (a chain that all names carry) is what the map does: to all of
    them.
    """
    wrapped = [joined(extra) + fqn for fqn in names]
    strip = KeyMap(remove=common_wrappers(wrapped))
    assert [joined(strip.remove) + strip(fqn) for fqn in wrapped] == wrapped
    assert not collisions(wrapped, strip)
    assert common_wrappers(map(strip, wrapped)) == ()


@given(NAMES, CHAINS, CHAINS)
def test_a_map_replaces_the_chain_and_keeps_the_rest(
    fqn: str, remove: tuple[str, ...], insert: tuple[str, ...]
) -> None:
    key_map = KeyMap(remove=remove, insert=insert)
    assert key_map(joined(remove) + fqn) == joined(insert) + fqn
    if not fqn.startswith(joined(remove)):
        assert key_map(fqn) == fqn


@given(NAMES)
def test_inner_wrappers_go_and_a_last_segment_stays(fqn: str) -> None:
    new = KeyMap(remove=(), inner=True)(fqn)
    assert not inner_wrappers([new])
    assert new.split(".")[-1] == fqn.split(".")[-1]
    private = WRAPPERS - {"module"}
    kept = [segment for segment in fqn.split(".")[:-1] if segment not in private]
    assert new.split(".")[:-1] == kept
    assert (new == fqn) is not inner_wrappers([fqn])


def test_a_submodule_called_module_in_the_middle_is_no_wrapper() -> None:
    assert KeyMap(remove=("module",), inner=True)("module.enc.module.w") == "enc.module.w"
    assert not inner_wrappers(["enc.module.w", "enc._orig_mod"])


@given(CHAINS)
def test_collapse(chain: tuple[str, ...]) -> None:
    short = collapse(chain)
    assert set(short) == set(chain)
    assert not is_nested(short)
    assert collapse(short) == short
    assert is_nested(chain) is (short != chain)
    assert [chain.index(segment) for segment in short] == sorted(
        chain.index(segment) for segment in short
    )


@pytest.mark.parametrize(
    ("insert", "module", "new"),
    [
        (("module",), "", ""),
        (("module",), "module", "module"),
        (("module",), "module.module", "module"),
        (("module",), "module.module.fc", "module.fc"),
        ((), "", ""),
        ((), "module", ""),
        ((), "module.module", ""),
        ((), "module.module.fc", "fc"),
        ((), "other", "other"),
    ],
)
def test_names_of_modules_in_metadata(insert: tuple[str, ...], module: str, new: str) -> None:
    assert KeyMap(remove=("module", "module"), insert=insert).module(module) == new


@given(NAMES, CHAINS, CHAINS)
def test_a_module_follows_its_parameters(
    fqn: str, remove: tuple[str, ...], insert: tuple[str, ...]
) -> None:
    key_map = KeyMap(remove=remove, insert=insert)
    assume(not fqn.startswith("."))  # a module with an empty name cannot be told from the root
    module = (joined(remove) + fqn).rpartition(".")[0]
    assert key_map.module(module) == key_map(joined(remove) + fqn).rpartition(".")[0]


def test_collisions_name_both() -> None:
    names = ["a._orig_mod.w", "b", "a.w"]
    assert collisions(names, KeyMap(remove=(), inner=True)) == (("a._orig_mod.w", "a.w", "a.w"),)
