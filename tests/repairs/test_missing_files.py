"""A file that only the checkpoints next to a folder have: ``repair`` and ``seal`` tell it as
``check`` does.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfix import repair, seal, verify
from tests.commanding import Said, said
from tests.diagnosis.test_completeness import make

__all__ = ["said"]

FINDING = "optimizer.bin is missing: 2 of 2 neighbouring checkpoints have it"


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """Return the newest of three checkpoints of a run, without the optimizer that the others
    have.
    """
    for number in (1, 2, 3):
        make(tmp_path / "run" / f"checkpoint_{number}")
        root = tmp_path / "run" / f"checkpoint_{number}"
    (root / "optimizer.bin").unlink()
    return root


def test_a_repair_tells_what_check_tells(newest: Path, said: Said) -> None:
    """It printed "nothing to repair" and exited with 0."""
    assert said("check", newest)[0] == 1
    for options in ((), ("--dry-run",)):
        status, out, _ = said("repair", newest, *options)
        assert status == 1
        assert f"nothing to repair in {newest}" in out
        assert FINDING in out
        assert "copy it again, or resume from a complete checkpoint" in out


def test_a_copy_is_judged_by_the_checkpoints_next_to_its_source(
    newest: Path, tmp_path: Path
) -> None:
    receipt = repair(newest, output=tmp_path / "copy")
    assert [str(finding) for finding in receipt.left] == [FINDING]
    assert receipt.status == 1


@pytest.mark.parametrize("place", [None, "copy"])
def test_what_a_repair_drops_is_not_missing(tmp_path: Path, place: str | None) -> None:
    """The checkpoints next to it still have the duplicates."""
    for number in (1, 2, 3):
        root = make(tmp_path / "run" / f"checkpoint_{number}", "wrapper-safetensors")
    receipt = repair(root, output=None if place is None else tmp_path / place)
    assert receipt.steps
    assert receipt.left == ()
    assert receipt.status == 0


def with_forced(root: Path) -> None:
    assert seal(root, force=True).written


def with_the_file(root: Path) -> None:
    shutil.copy(root.parent / "checkpoint_2" / "optimizer.bin", root)
    assert seal(root).written


@pytest.mark.parametrize(("change", "status"), [(with_forced, 1), (with_the_file, 0)])
def test_a_seal_and_the_verify_after_it_agree(
    newest: Path, said: Said, change: Callable[[Path], None], status: int
) -> None:
    """It sealed the folder with status 0 and advised ``verify``, which then exited with 1."""
    result, out, _ = said("seal", newest)
    assert result == 1
    assert f"{newest} is incomplete: nothing was written" in out
    assert FINDING in out
    assert "seal refuses a damaged or incomplete folder" in said("verify", newest)[1]
    change(newest)
    assert verify(newest).status == status


def test_a_seal_with_a_warning_says_that_verify_repeats_it(tmp_path: Path, said: Said) -> None:
    root = make(tmp_path / "checkpoint", without=["random_states_0.pkl"])
    status, out, _ = said("seal", root)
    assert status == 0
    assert (
        f"verify also reports these findings and exits with status 1\nnext: ckptfix verify {root}\n"
        in out
    )
    assert verify(root).status == 1
