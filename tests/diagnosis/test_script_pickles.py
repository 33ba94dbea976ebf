"""Plain pickles of a script: no library looks for them, and ``pickle.load`` reads what
``torch.load`` refuses.
"""

import datetime
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptfix import check, latest_checkpoint
from tests.diagnosis.test_misnamed import Small

VALUES: Mapping[str, Any] = {
    "arrays": {"mean": np.ones(3), "std": np.full(3, 2.0)},
    "numbers": OrderedDict(mean=1.5, std=2.0),
    "a list of words": ["a", "b"],
    "a class": datetime.timedelta(seconds=3),
}


def verdicts(folder: Path) -> list[tuple[str, str]]:
    return [(finding.severity.value, finding.code) for finding in check(folder).findings]


def _run_of_a_script(folder: Path) -> Path:
    folder.mkdir()
    torch.save({"weight": torch.ones(2, 2)}, folder / "net.pt")
    return folder


@pytest.mark.parametrize("name", ["scaler.bin", "scaler.pt", "vocabulary.bin", "stats.pt"])
@pytest.mark.parametrize("value", VALUES)
def test_a_pickle_of_a_script_is_at_most_a_note(tmp_path: Path, name: str, value: str) -> None:
    folder = _run_of_a_script(tmp_path / "folder")
    (folder / name).write_bytes(pickle.dumps(VALUES[value]))
    assert pickle.loads((folder / name).read_bytes()) is not None
    assert verdicts(folder) == [("note", "unloadable-pickle")]
    assert check(folder).status == 0
    (finding,) = check(folder).findings
    assert finding.advice.startswith("nothing to do if the script reads it with pickle.load")


@pytest.mark.parametrize("value", VALUES)
def test_it_may_be_next_to_states_of_accelerate(tmp_path: Path, value: str) -> None:
    folder = Small().saved(tmp_path / "run/checkpoint_0")
    (folder / "scaler.bin").write_bytes(pickle.dumps(VALUES[value]))
    Small().accelerator.load_state(str(folder))
    assert check(folder).status == 0
    assert latest_checkpoint(folder.parent) == folder


def test_accelerate_reads_scaler_pt_of_its_own_folder(tmp_path: Path) -> None:
    folder = Small(has_scaler=True).saved(tmp_path / "folder")
    (folder / "scaler.pt").write_bytes(pickle.dumps(VALUES["arrays"], protocol=2))
    with pytest.raises(pickle.UnpicklingError):
        Small(has_scaler=True).accelerator.load_state(str(folder))
    assert ("warning", "unloadable-pickle") in verdicts(folder)


def test_the_trainer_reads_scaler_pt_of_its_own_folder(tmp_path: Path) -> None:
    folder = _run_of_a_script(tmp_path / "folder")
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({}, folder / name)
    (folder / "scaler.pt").write_bytes(pickle.dumps(VALUES["numbers"]))
    assert ("warning", "unloadable-pickle") in verdicts(folder)


def _only_the_pickle(path: Path) -> None:
    """As somebody leaves it who unpacked a file of ``torch.save``."""
    torch.save({"weight": torch.ones(2, 2)}, path)
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        data = archive.read(name)
    path.write_bytes(data)
    with pytest.raises(pickle.UnpicklingError, match="persistent"):
        pickle.loads(data)


def _without_the_magic(path: Path) -> None:
    torch.save({"weight": torch.ones(2, 2)}, path, _use_new_zipfile_serialization=False)
    data = bytearray(path.read_bytes())
    data[5] ^= 1  # in the magic number, so that the rest follows a pickle of another number
    path.write_bytes(data)
    with pytest.raises(RuntimeError, match="magic"):
        torch.load(path, weights_only=False)


@pytest.mark.parametrize("damage", [_only_the_pickle, _without_the_magic])
def test_a_damaged_file_of_torch_is_no_pickle_of_a_script(tmp_path: Path, damage: Any) -> None:
    folder = _run_of_a_script(tmp_path / "folder")
    damage(folder / "model.pt")
    assert check(folder).status == 1
