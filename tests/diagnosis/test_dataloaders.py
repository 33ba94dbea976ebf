"""States of stateful data loaders: stock load_state takes any, and the first batch fails or the
epoch begins anew.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ckptfix.diagnosis.check import check
from tests.diagnosis.builders import new_accelerator

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
        config = DataLoaderConfiguration(use_stateful_dataloader=True)
        self.accelerator = new_accelerator(dataloader_config=config)
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


BROKEN: dict[str, object] = {"an empty dict": {}, "None": None, "a list": [1, 2], "a number": 7}


@pytest.mark.parametrize("name", BROKEN)
def test_a_state_that_no_loader_of_torchdata_continues_from_is_a_warning(
    name: str, tmp_path: Path
) -> None:
    root = Run().save(tmp_path / "checkpoint_0")
    assert (outcome(root), told(root)) == ("continues", [])
    torch.save(BROKEN[name], root / LOADER)
    assert outcome(root) == ("anew" if name in ("an empty dict", "None") else "fails")
    assert [severity for severity, _ in told(root)] == ["warning"]
    assert told(root)[0][1].startswith(f"{LOADER}: it holds ")


def test_a_dict_that_a_loader_of_the_script_may_read_is_not_checked(tmp_path: Path) -> None:
    root = Run().save(tmp_path / "checkpoint_0")
    torch.save({"position": 3}, root / LOADER)
    assert told(root) == []
    assert f"{LOADER}: not a state of torchdata's StatefulDataLoader" in " ".join(
        check(root).not_checked
    )


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        *(({"is_iterable": True}, batches) for batches in (0, 1, 4)),
        ({"shuffle": True}, 1), ({"workers": 2}, 4),
    ],
)  # fmt: skip
def test_states_of_real_loaders_are_clean(
    options: dict[str, Any], batches: int, tmp_path: Path
) -> None:
    run = Run(**options)
    for number in range(2):
        root = run.save(tmp_path / f"checkpoint_{number}", batches=batches)
        assert told(root) == []
        told_of = [words for words in check(root).not_checked if "loader" in words]
        assert [words.partition(";")[0] for words in told_of] == [
            "number of workers of each data loader"
        ]
