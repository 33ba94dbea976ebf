"""Files with the number of ranks in their names, as verl saves them: a rank without one is
named.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from ckptfix import check
from ckptfix.checkpoint.rank_names import parse_world_rank_name
from ckptfix.cli import run

KINDS = ("model", "optim", "extra_state")


def save(root: Path, world_size: int, ranks: Iterable[int], kinds: Iterable[str] = KINDS) -> None:
    """Save what these ranks of verl save (``fsdp_checkpoint_manager.py`` of verl 0.7)."""
    for rank in ranks:
        parts = {
            "model": {"fc.weight": torch.rand(2, 3)},
            "optim": {
                "state": {"fc.weight": {"step": torch.tensor(4.0), "exp_avg": torch.rand(2, 3)}}
            },
            "extra_state": {
                "lr_scheduler": {"last_epoch": 4},
                "rng": {"cpu": torch.get_rng_state()},
            },
        }
        for kind in kinds:
            torch.save(parts[kind], root / f"{kind}_world_size_{world_size}_rank_{rank}.pt")


def merges(root: Path, world_size: int) -> bool:
    """Return whether all that verl's ``model_merger`` opens is there: a file of the model for each
    rank.
    """
    return all(
        (root / f"model_world_size_{world_size}_rank_{rank}.pt").exists()
        for rank in range(world_size)
    )


@pytest.mark.parametrize(
    ("world_size", "ranks", "named"),
    [
        (1, [0], ""),
        (2, [0, 1], ""),
        (2, [0], "rank 1 are"),
        (2, [1], "rank 0 are"),
        (8, [0, 1, 2, 4, 6, 7], "ranks 3 and 5 are"),
        (1000, [7], "999 ranks are"),
    ],
)
def test_every_rank_has_its_files(
    world_size: int, ranks: list[int], named: str, tmp_path: Path
) -> None:
    save(tmp_path, world_size, ranks)
    report = check(tmp_path)
    assert (report.status == 0) == merges(tmp_path, world_size) == (not named)
    assert [finding.code for finding in report.findings] == ["missing-rank"] * bool(named)
    assert named in "".join(map(str, report.findings))
    assert run(["check", "-r", str(tmp_path)]) == bool(named)


@pytest.mark.parametrize("kind", KINDS)
def test_the_missing_file_is_named(kind: str, tmp_path: Path) -> None:
    save(tmp_path, 4, range(4))
    (tmp_path / f"{kind}_world_size_4_rank_2.pt").unlink()
    (finding,) = check(tmp_path).findings
    assert (
        str(finding)
        == f"{kind}_world_size_4_rank_2.pt is missing: each of 4 ranks saved its own part, and "
        "files of rank 2 are missing"
    )


def test_a_kind_that_nobody_saved_is_not_missing(tmp_path: Path) -> None:
    save(tmp_path, 2, range(2), ["model"])
    assert check(tmp_path).status == 0


def test_files_left_by_another_number_of_ranks_are_not_missing(tmp_path: Path) -> None:
    save(tmp_path, 2, [0])
    save(tmp_path, 4, range(4))
    assert check(tmp_path).status == 0
    (tmp_path / "optim_world_size_4_rank_3.pt").unlink()
    assert check(tmp_path).status == 1


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("model_world_size_8_rank_3.pt", ("model", 8, 3, ".pt")),
        ("extra_state_world_size_1_rank_0.pth", ("extra_state", 1, 0, ".pth")),
        ("model_world_size_8_rank_8.pt", None),
        ("model_world_size_0_rank_0.pt", None),
        ("model_world_size_08_rank_1.pt", None),
        ("model_rank_0.pt", None),
        ("world_size_2_rank_0.pt", None),
    ],
)
def test_names(name: str, parsed: tuple[str, int, int, str] | None) -> None:
    meaning = parse_world_rank_name(name)
    assert meaning == parsed
    assert meaning is None or str(meaning) == name
