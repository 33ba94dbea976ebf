"""Costs of neighbours: a run of many checkpoints is listed once, and each is read once for all the
others.
"""

from collections import Counter
from pathlib import Path, PurePosixPath

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from ckptfix import check, latest_checkpoint
from ckptfix.checkpoint import folder, neighbours
from ckptfix.checkpoint.filenames import FileName
from ckptfix.checkpoint.neighbours import Siblings
from ckptfix.storage.files import folders_next_to

COUNT = 20


def saves(run: Path) -> list[Path]:
    """Save a run whose optimizer loses its moments after the first save."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.prepare(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    folders = [run / f"checkpoint_{number}" for number in range(COUNT)]
    for root in folders:
        accelerator.save_state(str(root))
        optimizer.state.clear()
    return folders


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the reads of the header of each file, and the lists of the run as "list"."""
    counts: Counter[str] = Counter()
    component = folder.scan_file

    def reading(root: Path, path: PurePosixPath, name: FileName) -> folder.Component:
        counts[f"{root.name}/{path}"] += 1
        return component(root, path, name)

    def listing(home: Path) -> list[str]:
        counts["list"] += 1
        return folders_next_to(home)

    monkeypatch.setattr(folder, "scan_file", reading)
    monkeypatch.setattr(neighbours, "folders_next_to", listing)
    return counts


def test_a_fleet_reads_each_checkpoint_once_for_its_neighbours(
    tmp_path: Path, reads: Counter[str]
) -> None:
    """Each of them listed the run, and read the first one again: 1,000 checkpoints cost 1,000 lists
    of 1,000 names.
    """
    folders = saves(tmp_path)
    siblings = Siblings([tmp_path], is_recursive=True)
    codes = [
        {finding.code for finding in check(root, siblings=siblings).findings} for root in folders
    ]
    assert ["missing-moments" in found for found in codes] == [False] + [True] * (COUNT - 1)
    assert reads["list"] == 1
    assert max(reads.values()) == 2, "once for its own findings, once for those of all others"


def test_latest_checkpoint_reads_each_header_twice_at_most(
    tmp_path: Path, reads: Counter[str]
) -> None:
    folders = saves(tmp_path)
    with pytest.warns(UserWarning, match="passed over"):
        assert latest_checkpoint(tmp_path) == folders[0]
    assert reads["list"] == 1
    assert max(reads.values()) == 2
    assert reads[f"checkpoint_{COUNT - 1}/optimizer.bin"] == 1
