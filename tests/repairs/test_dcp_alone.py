"""One folder of a checkpoint given alone, and the checkpoint around a folder that was."""

from pathlib import Path

import pytest

from ckptfix import Keys, Policy, check, repair, undo
from ckptfix.diagnosis.findings.damaged import InterruptedRepair
from ckptfix.errors import OperationError
from tests.repairs.dcp_folders import MODEL, ONCE, OPTIMIZER, copy, snapshot
from tests.storage.crash import Fault, points, strike

SECOND = "pytorch_model_fsdp_1"


@pytest.mark.parametrize("policy", [ONCE, Policy(keys=Keys.BARE)], ids=["once", "bare"])
@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
def test_a_folder_with_others_beside_it_keeps_its_names(
    tmp_path: Path, name: str, policy: Policy
) -> None:
    folder = copy(tmp_path, "fsdp2-nested")
    before = snapshot(folder)
    receipt = repair(folder / name, policy=policy)
    (stays,) = receipt.unplanned
    assert f"ckptfix repair {folder}" in stays.reason
    assert (receipt.transaction, receipt.status) == (None, 1)
    assert snapshot(folder) == before
    assert repair(folder, policy=policy).status == 0


def test_a_lone_folder_is_repaired(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-nested", keep=(MODEL,))
    assert repair(folder / MODEL, policy=ONCE).status == 0


def alone(folder: Path, name: str) -> Path:
    """Return a folder of a checkpoint, taken out of it, to be repaired by itself."""
    path = folder.parent / name
    (folder / name).rename(path)
    return path


@pytest.mark.slow
def test_a_repair_of_one_folder_that_was_killed_is_told_above(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-nested")
    own = alone(folder, MODEL)
    before = snapshot(own)

    def work() -> None:
        repair(own, policy=ONCE)

    total = len(points(work))
    undo(own)
    for at in range(total):
        strike(work, at, Fault.KILL_BEFORE)
        if any(isinstance(finding, InterruptedRepair) for finding in check(own).findings):
            break
    own.rename(folder / MODEL)
    (finding,) = (one for one in check(folder).findings if isinstance(one, InterruptedRepair))
    assert str(finding.path) == f"{MODEL}/.ckptfix"
    advice = f"ckptfix undo {folder}/{MODEL}"
    assert advice in finding.advice_at(str(folder))
    with pytest.raises(OperationError, match=advice):
        repair(folder)
    undo(folder / MODEL)
    assert {
        path: one for path, one in snapshot(folder / MODEL).items() if ".ckptfix" not in path
    } == before
    assert not any(isinstance(one, InterruptedRepair) for one in check(folder).findings)


@pytest.mark.parametrize("name", [SECOND, "pytorch_model_fsdp_2"])
def test_a_folder_with_a_journal_is_neither_dropped_nor_moved(tmp_path: Path, name: str) -> None:
    folder = copy(tmp_path, "fsdp2-doubled")
    own = alone(folder, name)
    before = snapshot(own)
    keys = Keys.BARE if name == SECOND else Keys.DDP
    assert repair(own, policy=Policy(keys=keys)).transaction is not None
    own.rename(folder / name)
    receipt = repair(folder, policy=Policy(allow=frozenset({"identical-models"})))
    assert receipt.steps == ()
    assert any("has its own journal" in one.reason for one in receipt.unplanned)
    undo(folder / name)
    assert snapshot(folder / name) == before
