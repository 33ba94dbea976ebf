"""load_state_tolerant in two real processes: all ranks load, or none, and none waits for another
for ever.
"""

import pytest

from tests.training.rank_cases import Ranks, run_cases

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_cases("tests.training.loading_ranks", tmp_path_factory.mktemp("ranks"))


def test_a_healthy_folder_gives_what_stock_gives_on_every_rank(seen: Ranks) -> None:
    assert seen["as_stock"] == [{"same": True, "complete": True, "ranks": 2}] * 2


def test_a_doubled_folder_of_a_real_run(seen: Ranks) -> None:
    assert seen["doubled_fixture"] == [{"same": True}] * 2


def test_a_doubling_script_reads_a_healthy_folder(seen: Ranks) -> None:
    first, second = seen["doubling_script"]
    assert first == second
    assert first["models"] == 1
    assert first["complete"]


def test_a_rank_without_a_file_keeps_its_generators_and_gets_the_step(seen: Ranks) -> None:
    first, second = seen["one_rank_saved"]
    assert (first["rng"], first["step"], first["warnings"]) == ("restored", 2, 0)
    assert (second["rng"], second["step"], second["warnings"]) == ("skipped", 2, 1)
    assert "1 rank saved random states, this run has 2 ranks" in second["reason"]


@pytest.mark.parametrize(
    ("case", "own", "other"),
    [
        ("one_rank_fails", "does not exist", "rank 1 failed, so rank 0 stops too"),
        ("required_generators_of_one_rank", "random_states_1.pkl is missing", "rank 1 failed"),
        ("a_hook_of_one_rank_fails", "the hook cannot", "rank 1 failed"),
    ],
)
def test_one_ranks_failure_fails_all_and_modifies_nothing(
    seen: Ranks, case: str, own: str, other: str
) -> None:
    first, second = seen[case]
    assert own in second["error"]
    assert other in first["error"]
    assert own in first["error"]
    assert [first["same"], second["same"]] == [True, True]
    assert [first["modified"], second["modified"]] == [False, False]


def test_ranks_that_would_load_different_things_load_nothing(seen: Ranks) -> None:
    for rank in seen["ranks_that_see_other_folders"]:
        assert "rank 1 would load different data than rank 0" in rank["error"]
        assert rank["same"]


def test_ranks_that_see_other_saves_of_a_run_load_nothing(seen: Ranks) -> None:
    for rank in seen["ranks_that_see_other_saves"]:
        assert "rank 1 would load different data than rank 0: optimizers 0" in rank["error"]
        assert " at step 4 with learning rates [" in rank["error"]
        assert " at step 2 with learning rates [" in rank["error"]
        assert rank["same"]


def test_a_failure_after_the_agreement_is_taken_back_on_all(seen: Ranks) -> None:
    first, second = seen["an_object_of_one_rank_refuses"]
    assert "custom 0 (SampleCounter) could not load its state" in second["error"]
    assert "rank 1 failed" in first["error"]
    for rank in (first, second):
        assert "all changes were undone" in rank["error"]
        assert rank["same"]
        assert not rank["modified"]


def test_a_hook_on_one_rank_alone_hangs_nobody(seen: Ranks) -> None:
    assert seen["a_hook_on_one_rank_alone"] == [{"complete": True}] * 2


def test_fsdp_is_left_to_accelerate_and_said(seen: Ranks) -> None:
    for rank in seen["fully_sharded"]:
        assert rank["calls"]
        assert "by accelerator.load_state (FSDP)" in rank["report"]
        assert "custom_checkpoint_0.pkl needs posix.mkdir" in rank["error"]
        assert (
            "LoadPolicy(models='partial') is not supported with FSDP, where accelerate's own"
            in rank["in_part"]
        )


def test_both_ranks_load_what_matches(seen: Ranks) -> None:
    first, second = seen["in_part"]
    assert first == {
        "fresh": ["fresh.weight", "fresh.bias"],
        "untouched": True,
        "weights": True,
        "moments": True,
        "warnings": 1,
    }
    assert second == first | {"warnings": 0}


def test_ranks_that_would_load_different_keys_load_nothing(seen: Ranks) -> None:
    for rank in seen["in_part_on_one_rank_alone"]:
        assert "rank 1 would load different data than rank 0" in rank["error"]
        assert rank["same"]


def test_a_failure_of_one_rank_takes_a_partial_load_back_on_both(seen: Ranks) -> None:
    for rank in seen["in_part_and_an_object_of_one_rank_refuses"]:
        assert "all changes were undone" in rank["error"]
        assert rank["same"]
        assert not rank["modified"]
