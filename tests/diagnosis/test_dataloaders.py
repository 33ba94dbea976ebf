"""States of stateful data loaders: stock load_state takes any, and the first batch fails or the
epoch begins anew.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ckptfix.checkpoint.neighbours import Siblings
from ckptfix.diagnosis.check import check
from tests.diagnosis.test_mixed_saves import exchange

pytest.importorskip("torchdata")
pytestmark = pytest.mark.filterwarnings("ignore")

LOADER, WITH_WORKER = "dl_state_dict.bin", "dl_state_dict_1.bin"


class Numbers(IterableDataset[int]):  # type: ignore[misc]
    def __iter__(self) -> Any:
        return iter(range(8))


class Run:
    """A run with a loader without workers, and one with a worker."""

    def __init__(
        self, *, shuffle: bool = False, is_iterable: bool = False, workers: int = 1
    ) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        config = DataLoaderConfiguration(use_stateful_dataloader=True)
        self.accelerator = Accelerator(cpu=True, dataloader_config=config)
        model = nn.Linear(2, 1)
        data: Any = Numbers() if is_iterable else list(range(8))
        self.loaders = [
            DataLoader(data, batch_size=2, shuffle=shuffle, num_workers=count)
            for count in (0, workers)
        ]
        self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.loaders = list(self.accelerator.prepare(*self.loaders))

    def save(self, root: Path, *, batches: int = 1) -> Path:
        for loader in self.loaders:
            batch = iter(loader)
            for _ in range(batches):
                next(batch, None)
        self.accelerator.save_state(str(root))
        return root


def outcome(root: Path) -> str:
    """Return what a new run does with a checkpoint: it "continues", begins "anew" or "fails"."""
    run = Run()
    run.accelerator.load_state(str(root))
    try:
        first = [next(iter(loader)).tolist() for loader in run.loaders]
    except Exception:
        return "fails"
    return "continues" if [0, 1] not in first else "anew"


def told(root: Path) -> list[tuple[str, str]]:
    return [(finding.severity.value, str(finding)) for finding in check(root).findings]


def without(*path: str) -> Callable[[dict[str, Any]], object]:
    def change(state: dict[str, Any]) -> object:
        part = state
        for key in path[:-1]:
            part = part[key]
        del part[path[-1]]
        return state

    return change


BROKEN: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "an empty dict": (LOADER, lambda state: {}),
    "None": (LOADER, lambda state: None),
    "a list": (LOADER, lambda state: [1, 2]),
    "a number": (LOADER, lambda state: 7),
    "no position": (LOADER, without("_num_yielded")),
    "no sampler": (LOADER, without("_sampler_iter_yielded")),
    "no seed": (LOADER, without("_shared_seed")),
    "no dataset": (LOADER, without("dataset_state")),
    "no end": (LOADER, without("_iterator_finished")),
    "a position in words": (LOADER, lambda state: {**state, "_sampler_iter_yielded": "one"}),
    "no steps": (WITH_WORKER, without("_steps_since_snapshot")),
    "no snapshot": (WITH_WORKER, without("_snapshot")),
    "no main snapshot": (WITH_WORKER, without("_snapshot", "_main_snapshot")),
    "no step": (WITH_WORKER, without("_snapshot", "_snapshot_step")),
    "no workers": (WITH_WORKER, without("_snapshot", "_main_snapshot", "_num_workers")),
    "no base seed": (WITH_WORKER, without("_snapshot", "_main_snapshot", "_base_seed")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_state_that_no_loader_of_torchdata_continues_from_is_a_warning(
    name: str, tmp_path: Path
) -> None:
    root = Run().save(tmp_path / "checkpoint_0")
    assert (outcome(root), told(root)) == ("continues", [])
    file, change = BROKEN[name]
    torch.save(change(torch.load(root / file, weights_only=False)), root / file)
    assert outcome(root) == ("anew" if name in ("an empty dict", "None") else "fails")
    assert [severity for severity, _ in told(root)] == ["warning"]
    assert told(root)[0][1].startswith(f"{file}: it holds ")


def test_a_dict_that_a_loader_of_the_script_may_read_is_not_checked(tmp_path: Path) -> None:
    root = Run().save(tmp_path / "checkpoint_0")
    torch.save({"position": 3}, root / LOADER)
    assert told(root) == []
    assert f"{LOADER}: not a state of torchdata's StatefulDataLoader" in " ".join(
        check(root).not_checked
    )


@pytest.mark.parametrize("batches", [0, 1, 4])
@pytest.mark.parametrize("options", [{"shuffle": True}, {"is_iterable": True}, {"workers": 2}])
def test_states_of_real_loaders_are_clean(
    options: dict[str, Any], batches: int, tmp_path: Path
) -> None:
    run = Run(**options)
    for number in range(2):
        root = run.save(tmp_path / f"checkpoint_{number}", batches=batches)
        assert told(root) == []
        assert not any("dl_state_dict" in words for words in check(root).not_checked)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_two_loaders_with_each_others_states_are_a_warning(at: int, tmp_path: Path) -> None:
    root = Run().save(tmp_path / "checkpoint_0")
    folders = [
        root,
        *(Path(shutil.copytree(root, tmp_path / f"checkpoint_{number}")) for number in (1, 2)),
    ]
    exchange(folders[at], LOADER, WITH_WORKER, is_recorded=False)
    assert outcome(folders[at]) == "fails"
    words = (
        "it holds the state of a data loader with 1 worker (expected 0 workers, as in 2 "
        "neighbouring checkpoints)"
    )
    assert told(folders[at]) == [("warning", f"{LOADER}: {words}; swapped with {WITH_WORKER}")]
    assert [told(folder) for folder in folders if folder != folders[at]] == [[], []]


@pytest.mark.parametrize(("at", "severity"), [(0, "note"), (1, "warning"), (2, "note")])
def test_another_number_of_workers_is_a_note_at_an_end_of_the_run(
    at: int, severity: str, tmp_path: Path
) -> None:
    root = Run().save(tmp_path / "checkpoint_0")
    folders = [
        root,
        *(Path(shutil.copytree(root, tmp_path / f"checkpoint_{number}")) for number in (1, 2)),
    ]
    shutil.rmtree(folders[at])
    Run(workers=2).save(folders[at])
    assert outcome(folders[at]) == "fails"
    assert [words for words, _ in told(folders[at])] == [severity]


def test_another_number_of_workers_in_a_run_of_a_sweep_is_a_note(tmp_path: Path) -> None:
    folders = [Run(workers=1 + number % 2).save(tmp_path / f"run_{number}") for number in (2, 3, 4)]
    siblings = Siblings([tmp_path], is_recursive=True)
    assert [check(folder, siblings=siblings).status for folder in folders] == [0, 0, 0]
    of_one_run = [
        Path(shutil.copytree(one, tmp_path / f"step_{number}"))
        for number, one in enumerate(folders)
    ]
    assert [check(folder, siblings=siblings).status for folder in of_one_run] == [0, 1, 0]
