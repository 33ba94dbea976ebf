"""Numpy arrays in files that are loaded with ``weights_only=True``: accelerate, transformers and
torch decide.
"""

import pickle
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import load
from transformers.trainer_pt_utils import safe_globals

from ckptfix import check
from ckptfix.diagnosis.findings.damaged import UnloadablePickle
from tests.diagnosis.builders import new_accelerator

KINDS = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "i8": "int64",
    "u8": "uint64",
    "?": "bool",
    "c16": "complex128",
    "U3": "str",
    "O": "object",
    "M8[s]": "datetime64",
    "i4,f8": "void",
}
READ_BY_ACCELERATE = (
    "pytorch_model.bin",
    "optimizer.bin",
    "scheduler.bin",
    "dl_state_dict.bin",
    "scaler.pt",
    "random_states_0.pkl",
)


class Table(torch.optim.lr_scheduler.LRScheduler):  # type: ignore[misc]
    """A scheduler of a script, whose state holds an array."""

    def __init__(self, optimizer: Any, dtype: str) -> None:
        self.table = np.linspace(1, 0, 10).astype(dtype)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return list(self.base_lrs)


def prepared(dtype: str) -> Accelerator:
    accelerator = new_accelerator()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accelerator.prepare(model, optimizer, Table(optimizer, dtype))
    return accelerator


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    prepared("u4").save_state(str(folder), safe_serialization=False)
    return folder


def unloadable(folder: Path) -> dict[str, Mapping[str, str]]:
    """Return the arrays of each file that ``check`` reports as not loadable."""
    report = check(folder)
    found = [finding for finding in report.findings if isinstance(finding, UnloadablePickle)]
    assert report.status == (1 if found else 0)
    return {str(finding.path): finding.arrays for finding in found}


@pytest.mark.parametrize("dtype", ["f8", "f4", "i8", "?", "u4", ">u4"])
def test_the_array_of_a_scheduler_is_reported_where_load_state_refuses_it(
    tmp_path: Path, dtype: str
) -> None:
    accelerator = prepared(dtype)
    accelerator.save_state(str(tmp_path))
    if dtype.endswith("u4"):
        accelerator.load_state(str(tmp_path))
        assert unloadable(tmp_path) == {}
        return
    with pytest.raises(pickle.UnpicklingError, match=r"numpy\.dtypes"):
        accelerator.load_state(str(tmp_path))
    assert unloadable(tmp_path) == {"scheduler.bin": {"table": KINDS[dtype]}}
    accelerator.load_state(str(tmp_path), load_kwargs={"weights_only": False})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("optimizer.bin", dtype) for dtype in KINDS),
        *((name, dtype) for name in READ_BY_ACCELERATE for dtype in ("f8", "u4")),
    ],
)
def test_accelerate_loads_arrays_of_uint32_alone(
    saved: Path, tmp_path: Path, name: str, dtype: str
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoint"))
    path = folder / name
    absent = torch.amp.GradScaler("cpu").state_dict() if name == "scaler.pt" else {"scale": 1.0}
    state = load(path, weights_only=False) if path.exists() else absent
    torch.save({**state, "own": [{"b": (np.zeros(3, dtype),)}]}, path)
    if dtype == "u4":
        load(path)
        assert name not in unloadable(folder)
        return
    with pytest.raises(pickle.UnpicklingError, match=r"numpy\.dtypes"):
        load(path)
    assert unloadable(folder)[name] == {"own.0.b.0": KINDS[dtype]}


def test_the_advice_makes_accelerate_load_the_arrays(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoint"))
    path = folder / "scheduler.bin"
    torch.save({**load(path), "x": np.zeros(3), "y": np.zeros((2, 2)), "z": np.ones(2, bool)}, path)
    (finding,) = (one for one in check(folder).findings if isinstance(one, UnloadablePickle))
    assert (
        str(finding)
        == "scheduler.bin holds numpy arrays: 'x' (float64), 'y' (float64) and 'z' (bool); "
        "load_state accepts only uint32 arrays, and refuses the file"
    )
    before = torch.serialization.get_safe_globals()
    try:
        exec(finding.remedy, {})
        assert load(path).keys() > {"x", "y", "z"}
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
    with pytest.raises(pickle.UnpicklingError):
        load(path)


def test_random_states_with_another_array_are_passed_in_silence(
    saved: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoint"))
    path = folder / "random_states_0.pkl"
    saved_state = load(path)
    torch.save({**saved_state, "own": np.zeros(3)}, path)
    accelerator = prepared("u4")
    torch.manual_seed(99)
    accelerator.load_state(str(folder))
    assert not torch.equal(torch.get_rng_state(), saved_state["torch_manual_seed"])
    assert [str(finding) for finding in check(folder).findings] == [
        "random_states_0.pkl holds a numpy array: 'own' (float64); "
        "load_state accepts only uint32 arrays, and restores no random states"
    ]


def test_custom_objects_may_hold_any_array(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoint"))
    torch.save({"x": np.zeros(3)}, folder / "custom_checkpoint_0.pkl")
    assert load(folder / "custom_checkpoint_0.pkl", weights_only=False).keys() == {"x"}
    assert unloadable(folder) == {}


def test_an_array_that_is_stored_once_has_both_keys(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoint"))
    array = np.zeros(3)
    torch.save({"a": array, "b": {1: array}, "c": array[:2]}, folder / "dl_state_dict.bin")
    assert unloadable(folder) == {"dl_state_dict.bin": {"a": "float64", "c": "float64"}}


@pytest.mark.parametrize(
    ("name", "dtype"), [("pytorch_model.bin", "f8"), ("model.fp16.bin", "u4"), ("net.pt", "u4")]
)
def test_weights_alone_may_hold_no_array(tmp_path: Path, name: str, dtype: str) -> None:
    torch.save({"a": torch.ones(2), "x": np.zeros(3, dtype)}, tmp_path / name)
    with pytest.raises(pickle.UnpicklingError, match="_reconstruct"):
        torch.load(tmp_path / name)
    assert list(unloadable(tmp_path)) == [name]


@pytest.mark.parametrize("dtype", ["f8", "i8", "u4"])
def test_random_states_of_the_trainer_may_hold_uint32_alone(tmp_path: Path, dtype: str) -> None:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    path = tmp_path / "rng_state.pth"
    torch.save({**state, "own": np.zeros(3, dtype)}, path)
    if dtype == "u4":
        with safe_globals():
            torch.load(path)
    else:
        with safe_globals(), pytest.raises(pickle.UnpicklingError, match=r"numpy\.dtypes"):
            torch.load(path)
    found = [one for one in check(tmp_path).findings if isinstance(one, UnloadablePickle)]
    assert [dict(one.arrays) for one in found] == ([] if dtype == "u4" else [{"own": KINDS[dtype]}])
