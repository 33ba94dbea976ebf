"""assign(): a law for all relations, and the cases that it is for."""

from hypothesis import given
from hypothesis import strategies as st

from ckptfix.training.loading.assignment import assign, best

Relation = list[list[bool]]


@st.composite
def relations(draw: st.DrawFn) -> tuple[Relation, int]:
    entries, targets = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    row = st.lists(st.booleans(), min_size=targets, max_size=targets)
    return draw(st.lists(row, min_size=entries, max_size=entries)), targets


@given(relations())
def test_every_pair_fits_and_no_entry_goes_twice(case: tuple[Relation, int]) -> None:
    relation, targets = case
    found = assign(relation, targets)
    assert all(relation[entry][target] for target, entry in found.pairs.items())
    assert len(set(found.pairs.values())) == len(found.pairs)
    assert not set(found.left) & set(found.pairs.values())
    if found.refusal is not None:
        assert not found.pairs
        assert not found.is_whole(targets)


@given(relations())
def test_what_goes_not_by_position_has_no_other_choice(case: tuple[Relation, int]) -> None:
    relation, targets = case
    found = assign(relation, targets)
    for target, entry in found.pairs.items():
        if target not in found.by_position:
            assert [row[target] for row in relation].count(True) == 1
            assert relation[entry].count(True) == 1


def test_alike_ones_keep_their_order() -> None:
    # entries: teacher, student, student; targets: student, student, teacher
    relation = [[False, False, True], [True, True, False], [True, True, False]]
    found = assign(relation, 3)
    assert found.pairs == {0: 1, 1: 2, 2: 0}
    assert found.by_position == {0, 1}


def test_an_entry_that_fits_loosely_is_not_left_over_in_silence() -> None:
    strict, loose = [[True], [False]], [[True], [True]]
    assert best([strict], loose, 1) is None
    found = best([strict], strict, 1)
    assert found is not None
    assert found.left == (1,)


def test_overlapping_fits_go_by_position_or_not_at_all() -> None:
    assert assign([[True, True], [False, True]], 2).pairs == {0: 0, 1: 1}
    assert assign([[False, True], [True, True]], 2).refusal == ((0, 1), (0, 1))
