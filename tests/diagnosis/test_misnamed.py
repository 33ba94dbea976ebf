"""States that ``load_state`` does not find by their names: accelerate itself decides, for files and for folders."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from ckptfix import check
from ckptfix.checkpoint.filenames import nearly_state
from tests.sampling import sampled
from tests.stores.servers import upload_folder

Change = Callable[[Path], object]
STATES = (
    *("model.safetensors", "model_1.safetensors", "optimizer.bin", "optimizer_1.bin", "scheduler.bin"),
    *("scheduler_1.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl"),
)


class Number:
    """A custom object."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Run:
    """Two different models, each with its optimizer and scheduler, and two custom objects."""

    def __init__(self) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        assert PartialState._shared_state == {}
        torch.manual_seed(0)
        self.models = [torch.nn.Linear(3, 2), torch.nn.Linear(2, 3)]
        optimizers = [
            torch.optim.AdamW(model.parameters(), lr=0.1 * (at + 1)) for at, model in enumerate(self.models)
        ]
        schedulers = [
            torch.optim.lr_scheduler.StepLR(optimizer, 2 + at) for at, optimizer in enumerate(optimizers)
        ]
        self.accelerator = Accelerator(cpu=True)
        self.accelerator.prepare(*self.models, *optimizers, *schedulers)
        self.numbers = [Number(), Number()]
        self.accelerator.register_for_checkpointing(*self.numbers)
        for model, optimizer, size in zip(self.models, optimizers, (3, 2), strict=True):
            model(torch.full((1, size), 0.5 * size)).sum().backward()
            optimizer.step()
        self.numbers[1].value = 7


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    Run().accelerator.save_state(str(folder))
    assert sorted(path.name for path in folder.iterdir()) == sorted(STATES)
    assert check(folder).status == 0
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def is_loaded(folder: Path) -> bool:
    """Return whether ``load_state`` restores everything, the random states, too."""
    run = Run()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    try:
        run.accelerator.load_state(str(folder))
    except (OSError, RuntimeError):
        return False
    return not torch.equal(before, torch.get_rng_state())


def problems(folder: Path | str) -> list[tuple[str, str]]:
    findings = check(folder).findings
    return [
        (one.code, str(one)) for one in findings if one.severity.value != "note" and one.code != "entry-gap"
    ]


def _renamed(old: str, new: str) -> Change:
    return lambda folder: (folder / old).rename(folder / new)


def _numbers(name: str) -> list[str]:
    stem, suffix = name.rsplit(".", 1)
    plain, _, number = stem.rpartition("_")
    if not number.isdigit():
        return [f"{stem}_0.{suffix}", f"{stem}-0.{suffix}", f"{stem}_00.{suffix}"]
    return [f"{plain}_0{number}.{suffix}", f"{plain}-{number}.{suffix}", f"{plain}_-{number}.{suffix}"]


def _nearly(name: str) -> list[str]:
    stem, suffix = name.rsplit(".", 1)
    return [
        *(name.upper(), name.capitalize(), f"{stem}.{suffix.upper()}", f"{stem} .{suffix}", f"{name} "),
        *(f"{stem} (1).{suffix}", f"{name}.1", *_numbers(name)),
    ]


@pytest.mark.parametrize(
    ("name", "near"), sampled([(name, near) for name in STATES for near in _nearly(name)])
)
def test_a_file_with_nearly_the_name_of_a_missing_state_is_told(folder: Path, name: str, near: str) -> None:
    (folder / name).rename(folder / near)
    assert not is_loaded(folder)
    words = f"{near!r} is there, and load_state does not look for that name"
    if (
        name.startswith("custom")
        and near.startswith("custom_checkpoint_0")
        and near.endswith(".pkl")
        and " " not in near
    ):
        words = f"load_state counts {near!r}, and looks for the numbers in turn"
    # An optimizer without a model may be told, too.
    assert ("incomplete-checkpoint", f"{name} is missing: {words}") in problems(folder)
    (finding,) = (one for one in check(folder).findings if one.code == "incomplete-checkpoint")
    assert finding.advice == (
        f"if {near!r} is that file, rename it to {name}; else copy {name} again, or move {near!r} out of the folder if "
        f"nothing loads {name}"
    )
    (folder / near).rename(folder / name)
    assert is_loaded(folder)
    assert check(folder).status == 0


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("model.safetensors", "pytorch_model.safetensors"),
        ("model_1.safetensors", "pytorch_model_1.safetensors"),
        ("random_states_0.pkl", "random_states.pkl"),
    ],
)
def test_a_stem_of_the_other_format_or_no_rank_is_reported(folder: Path, name: str, near: str) -> None:
    (folder / name).rename(folder / near)
    assert not is_loaded(folder)
    words = f"{name} is missing: {near!r} is there, and load_state does not look for that name"
    assert ("incomplete-checkpoint", words) in problems(folder)
    shutil.copy(folder / near, folder / name)
    assert is_loaded(folder)
    assert problems(folder) == []


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("is_empty", [True, False])
def test_a_folder_by_the_name_of_a_state_is_an_error(folder: Path, name: str, is_empty: bool) -> None:
    (folder / name).rename(folder.parent / "file")
    (folder / name).mkdir()
    if not is_empty:
        (folder.parent / "file").rename(folder / name / name)
    assert not is_loaded(folder)
    assert ("not-a-tensor-file", f"{name} is a folder") in problems(folder)


_HARMLESS: dict[str, Change] = {
    "a copy of a model with a zero": lambda folder: shutil.copy(
        folder / "model_1.safetensors", folder / "model_01.safetensors"
    ),
    "an export of the first model": lambda folder: shutil.copy(
        folder / "model.safetensors", folder / "model_02.safetensors"
    ),
    "a second download": lambda folder: shutil.copy(folder / "optimizer.bin", folder / "optimizer (1).bin"),
    "a copy in capitals": lambda folder: shutil.copy(folder / "scheduler.bin", folder / "SCHEDULER.BIN"),
    "a number far beyond": lambda folder: shutil.copy(folder / "optimizer.bin", folder / "optimizer_007.bin"),
    "other random states": lambda folder: shutil.copy(
        folder / "random_states_0.pkl", folder / "random_states_00.pkl"
    ),
    "a custom object in capitals": lambda folder: shutil.copy(
        folder / "custom_checkpoint_0.pkl", folder / "CUSTOM_CHECKPOINT_0.PKL"
    ),
    "a folder of plots": lambda folder: (folder / "model_1").mkdir(),
    "notes": lambda folder: (folder / "optimizer_1.txt").write_text("x"),
}


@pytest.mark.parametrize("name", _HARMLESS)
def test_a_file_that_loads_do_not_need_is_no_finding(folder: Path, name: str) -> None:
    _HARMLESS[name](folder)
    assert is_loaded(folder)
    assert problems(folder) == []


@pytest.mark.parametrize("number", ["00", "01", "002"])
def test_a_custom_object_that_accelerate_counts_is_told(folder: Path, number: str) -> None:
    name = f"custom_checkpoint_{number}.pkl"
    shutil.copy(folder / "custom_checkpoint_0.pkl", folder / name)
    assert not is_loaded(folder)
    words = (
        f"custom_checkpoint_2.pkl is missing: load_state counts {name!r}, and looks for the numbers in turn"
    )
    assert problems(folder) == [("incomplete-checkpoint", words)]


def test_a_prefix_of_a_store_is_a_folder(folder: Path) -> None:
    (folder / "optimizer_1.bin").unlink()
    (folder / "optimizer_1.bin").mkdir()
    (folder / "optimizer_1.bin" / "data").write_bytes(b"x")
    (folder / "scheduler_1.bin").rename(folder / "scheduler_01.bin")
    url = f"memory://{os.urandom(6).hex()}/checkpoint"
    upload_folder(folder, url)
    assert problems(url) == problems(folder)
    assert len(problems(url)) == 2


@pytest.mark.parametrize(
    "name",
    [
        *("model-00001-of-00002.safetensors", "model.safetensors.index.json", "model.fp16.safetensors"),
        *("optimizer_0_rank0.bin", "pytorch_model_fsdp_0", "teacher.bin", "optimizer.pt", "rng_state_0.pth"),
        *("model_01.txt", "x_model_01.safetensors", "my-optimizer.bin", "ema.pt", *STATES),
    ],
)
def test_names_of_other_files(name: str) -> None:
    assert nearly_state(name) is None


def test_a_name_in_the_grammar_is_kept(folder: Path) -> None:
    names: Any = [str(nearly_state(near)) for name in STATES for near in _nearly(name)]
    assert names == [name for name in STATES for _ in _nearly(name)]
