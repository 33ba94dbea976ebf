"""States that ``load_state`` does not find by their names: accelerate itself decides, for files and
for folders.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from safetensors.torch import load_file, save_file

from ckptfix import check, latest_checkpoint
from ckptfix.checkpoint.filenames import copied_state
from tests.diagnosis.builders import new_accelerator
from tests.diagnosis.test_wrong_states import Counter
from tests.sampling import sampled
from tests.stores.servers import upload_folder

Change = Callable[[Path], object]
STATES = (
    "model.safetensors", "model_1.safetensors", "optimizer.bin", "optimizer_1.bin", "scheduler.bin",
    "scheduler_1.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl",
)  # fmt: skip


class Run:
    """Two different models, each with its optimizer and scheduler, and two custom objects."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.models = [torch.nn.Linear(3, 2), torch.nn.Linear(2, 3)]
        optimizers = [
            torch.optim.AdamW(model.parameters(), lr=0.1 * (at + 1))
            for at, model in enumerate(self.models)
        ]
        schedulers = [
            torch.optim.lr_scheduler.StepLR(optimizer, 2 + at)
            for at, optimizer in enumerate(optimizers)
        ]
        self.accelerator = new_accelerator()
        self.accelerator.prepare(*self.models, *optimizers, *schedulers)
        counters = [Counter(), Counter()]
        self.accelerator.register_for_checkpointing(*counters)
        for model, optimizer, size in zip(self.models, optimizers, (3, 2), strict=True):
            model(torch.full((1, size), 0.5 * size)).sum().backward()
            optimizer.step()
        counters[1].count = 7


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
        (one.code, str(one))
        for one in findings
        if one.severity.value != "note" and one.code != "entry-gap"
    ]


def lacks(name: str, near: str) -> tuple[str, str]:
    """Return the finding about a state for which a file of nearly its name exists."""
    words = f"{name} is missing: {near!r} exists, but load_state does not look for that name"
    return "incomplete-checkpoint", words


def _nearly(name: str) -> list[str]:
    stem, suffix = name.rsplit(".", 1)
    return [
        name.upper(),
        name.capitalize(),
        f"{stem}.{suffix.upper()}",
        f"{stem} .{suffix}",
        stem,
        *(f"{name}{end}" for end in (" ", ".1", "~", ".bak", ".old", ".orig")),
        *(f"{stem}{end}.{suffix}" for end in (" (1)", "_old", "-backup", " - Copy (2)")),
    ]


@pytest.mark.parametrize(
    ("name", "near"), sampled([(name, near) for name in STATES for near in _nearly(name)])
)
def test_a_file_with_nearly_the_name_of_a_missing_state_is_told(
    folder: Path, name: str, near: str
) -> None:
    (folder / name).rename(folder / near)
    assert not is_loaded(folder)
    expected = lacks(name, near)
    # An optimizer without a model may be told, too.
    assert expected in problems(folder)
    (finding,) = (one for one in check(folder).findings if one.code == "incomplete-checkpoint")
    assert (
        finding.advice
        == f"if {near!r} is that file, rename it to {name}; otherwise copy {name} again, or "
        "ignore this if the script does not load it"
    )
    (folder / near).rename(folder / name)
    assert is_loaded(folder)
    assert check(folder).status == 0


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("model.safetensors", "pytorch_model.safetensors"),
        ("model_1.safetensors", "pytorch_model_1.safetensors"),
    ],
)
def test_a_stem_of_the_other_format_is_reported(folder: Path, name: str, near: str) -> None:
    (folder / name).rename(folder / near)
    assert not is_loaded(folder)
    assert lacks(name, near) in problems(folder)
    shutil.copy(folder / near, folder / name)
    assert is_loaded(folder)
    assert problems(folder) == []


@pytest.mark.parametrize(
    ("name", "is_empty"), [*((name, False) for name in STATES), ("optimizer.bin", True)]
)
def test_a_folder_by_the_name_of_a_state_is_an_error(
    folder: Path, name: str, is_empty: bool
) -> None:
    (folder / name).rename(folder.parent / "file")
    (folder / name).mkdir()
    if not is_empty:
        (folder.parent / "file").rename(folder / name / name)
    assert not is_loaded(folder)
    assert ("not-a-tensor-file", f"{name} is a folder") in problems(folder)


def _copied(name: str, to: str) -> Change:
    return lambda folder: shutil.copy(folder / name, folder / to)


_HARMLESS: dict[str, Change] = {
    "a copy of a model with a zero": _copied("model_1.safetensors", "model_01.safetensors"),
    "an export of the first model": _copied("model.safetensors", "model_02.safetensors"),
    "a second download": _copied("optimizer.bin", "optimizer (1).bin"),
    "a copy in capitals": _copied("scheduler.bin", "SCHEDULER.BIN"),
    "a number far beyond": _copied("optimizer.bin", "optimizer_007.bin"),
    "other random states": _copied("random_states_0.pkl", "random_states_00.pkl"),
    "a custom object in capitals": _copied("custom_checkpoint_0.pkl", "CUSTOM_CHECKPOINT_0.PKL"),
    "a folder of plots": lambda folder: (folder / "model_1").mkdir(),
    "notes without a suffix": lambda folder: (folder / "optimizer_1").write_text("x"),
    "notes": lambda folder: (folder / "optimizer_1.txt").write_text("x"),
}


@pytest.mark.parametrize("name", _HARMLESS)
def test_a_file_that_loads_do_not_need_is_no_finding(folder: Path, name: str) -> None:
    _HARMLESS[name](folder)
    assert is_loaded(folder)
    assert problems(folder) == []
    run = folder.rename(folder.parent / "checkpoint_1").parent
    assert latest_checkpoint(run) == run / "checkpoint_1"


@pytest.mark.parametrize("number", ["00", "01", "002"])
def test_a_custom_object_that_accelerate_counts_is_told(folder: Path, number: str) -> None:
    name = f"custom_checkpoint_{number}.pkl"
    shutil.copy(folder / "custom_checkpoint_0.pkl", folder / name)
    assert not is_loaded(folder)
    words = (
        f"custom_checkpoint_2.pkl is missing: load_state also counts {name!r}, and "
        "expects consecutive numbers"
    )
    assert problems(folder) == [("incomplete-checkpoint", words)]


def test_a_prefix_of_a_store_is_a_folder(folder: Path) -> None:
    (folder / "optimizer_1.bin").unlink()
    (folder / "optimizer_1.bin").mkdir()
    (folder / "optimizer_1.bin" / "data").write_bytes(b"x")
    (folder / "scheduler_1.bin").rename(folder / "scheduler_1 (1).bin")
    url = f"memory://{os.urandom(6).hex()}/checkpoint"
    upload_folder(folder, url)
    assert problems(url) == problems(folder)
    assert len(problems(url)) == 2


@pytest.mark.parametrize(
    "name",
    [
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "model.fp16.safetensors",
        "optimizer_0_rank0.bin",
        "pytorch_model_fsdp_0",
        "teacher.bin",
        "optimizer.pt",
        "rng_state_0.pth",
        *("model_old.txt", "x_model.safetensors", "my-optimizer.bin", "ema.pt", *STATES),
        *("model_01.safetensors", "optimizer_007.bin", "model_1_1.safetensors"),
    ],
)
def test_names_of_other_files(name: str) -> None:
    assert copied_state(name) is None


def test_a_name_in_the_grammar_is_kept(folder: Path) -> None:
    names: Any = [str(copied_state(near)) for name in STATES for near in _nearly(name)]
    assert names == [name for name in STATES for _ in _nearly(name)]


# Files that a script calls so.

OWN_FILES: dict[str, Callable[[Path], object]] = {
    "model_01.safetensors": lambda path: save_file({"student.weight": torch.ones(7)}, path),
    "model-1.safetensors": lambda path: save_file({"student.weight": torch.ones(7)}, path),
    "optimizer-1.bin": lambda path: torch.save({"state": {}, "param_groups": []}, path),
    "scheduler_01.bin": lambda path: torch.save({"last_epoch": 3, "_last_lr": [0.1]}, path),
    "Scaler.pt": lambda path: torch.save({"mean": torch.ones(3), "std": torch.ones(3)}, path),
    "Sampler.bin": lambda path: torch.save({"epoch": 3}, path),
}


class Small:
    """One model with its optimizer."""

    def __init__(self, model: Any = None, *, has_scaler: bool = False) -> None:
        self.accelerator = new_accelerator()
        model = torch.nn.Linear(3, 2) if model is None else model
        optimizer = torch.optim.AdamW(model.parameters())
        self.accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))
        if has_scaler:
            self.accelerator.scaler = torch.amp.GradScaler("cpu")
            self.accelerator.scaler.scale(torch.ones(()))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    def saved(self, folder: Path) -> Path:
        self.accelerator.save_state(str(folder))
        return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return Small().saved(tmp_path / "folder")


@pytest.mark.parametrize("name", OWN_FILES)
def test_a_file_that_every_save_of_a_script_has_stops_no_resume(tmp_path: Path, name: str) -> None:
    for number in (1, 2, 3):
        folder = Small().saved(tmp_path / f"run/checkpoint_{number}")
        OWN_FILES[name](folder / name)
        Small().accelerator.load_state(str(folder))
    for folder in (tmp_path / "run").iterdir():
        assert problems(folder) == []
    assert latest_checkpoint(tmp_path / "run") == tmp_path / "run/checkpoint_3"


@pytest.mark.parametrize("name", OWN_FILES)
def test_a_file_of_a_script_without_neighbours_is_no_finding(small: Path, name: str) -> None:
    OWN_FILES[name](small / name)
    Small().accelerator.load_state(str(small))
    assert problems(small) == []


@pytest.mark.parametrize("name", ["model_1.safetensors", "optimizer_1.bin", "scheduler_1.bin"])
def test_a_name_that_the_checkpoints_next_to_it_have_is_missing(
    saved: Path, tmp_path: Path, name: str
) -> None:
    """All three states of the second model are renamed, so that the folder alone shows nothing."""
    for number in (1, 2, 3):
        folder = Path(shutil.copytree(saved, tmp_path / f"run/checkpoint_{number}"))
    assert latest_checkpoint(folder.parent) == folder
    for state in ("model_1.safetensors", "optimizer_1.bin", "scheduler_1.bin"):
        (folder / state).rename(folder / state.replace("_1", "_1 (1)"))
    assert not is_loaded(folder)
    assert lacks(name, name.replace("_1", "_1 (1)")) in problems(folder)
    with pytest.warns(UserWarning, match="passed over checkpoint_3"):
        assert latest_checkpoint(folder.parent) == folder.parent / "checkpoint_2"


def test_a_scaler_under_another_name_is_missing(tmp_path: Path) -> None:
    folder = Small(has_scaler=True).saved(tmp_path / "folder")
    assert problems(folder) == []
    (folder / "scaler.pt").rename(folder / "Scaler.pt")
    with pytest.raises(FileNotFoundError, match=r"scaler\.pt"):
        Small(has_scaler=True).accelerator.load_state(str(folder))
    assert problems(folder) == [lacks("scaler.pt", "Scaler.pt")]


@pytest.mark.parametrize("name", ["optimizer.bin", "random_states_0.pkl"])
def test_a_state_under_another_name_is_missed_once(small: Path, name: str) -> None:
    """scheduler.bin implies an optimizer, and random_states_1.pkl a first process: a second warning
    said that the file is gone, or to ignore it.
    """
    shutil.copy(small / "random_states_0.pkl", small / "random_states_1.pkl")
    (small / name).rename(small / name.capitalize())
    assert problems(small) == [lacks(name, name.capitalize())]


def test_weights_for_fsdp_in_a_run_without_it(tmp_path: Path) -> None:
    """Its optimizer numbers its parameters, as FSDP never does."""
    for number in (1, 2):
        folder = Small().saved(tmp_path / f"run/checkpoint_{number}")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model_fsdp.bin")
    Small().accelerator.load_state(str(folder))
    assert problems(folder) == []
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        Small().accelerator.load_state(str(folder))
    words = (
        "model.safetensors is missing: pytorch_model_fsdp.bin exists, but load_state reads it "
        "only with FSDP, and optimizer.bin comes from a run without FSDP"
    )
    assert problems(folder) == [("incomplete-checkpoint", words)]
    with pytest.warns(UserWarning, match="passed over checkpoint_2"):
        assert latest_checkpoint(folder.parent) == folder.parent / "checkpoint_1"
    # As FSDP saves it.
    optimizer = torch.load(folder / "optimizer.bin")
    keys = ["weight", "bias"]
    optimizer["state"] = {keys[at]: state for at, state in optimizer["state"].items()}
    optimizer["param_groups"][0]["params"] = keys
    torch.save(optimizer, folder / "optimizer.bin")
    assert problems(folder) == []


def test_a_second_model_that_was_set_aside_is_not_missed(small: Path) -> None:
    """As somebody does who had prepared a model twice."""
    shutil.copy(small / "model.safetensors", small / "model_1.safetensors.bak")
    Small().accelerator.load_state(str(small))
    assert problems(small) == []


# All files of a second model, or of a folder, with the mark of a browser or a file manager.

MARKS = (
    "-1", " (1)", " copy", " - Copy", " - Copy (2)", " copy 2", " (copy)", " (another copy)", " 2",
)  # fmt: skip
SECOND = ("model_1.safetensors", "optimizer_1.bin", "scheduler_1.bin")


def _marked(name: str, mark: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    return f"{stem}{mark}.{suffix}"


@pytest.mark.parametrize(("names", "mark"), [(SECOND, "-1"), *((STATES, mark) for mark in MARKS)])
def test_all_files_have_the_mark_of_a_copy(folder: Path, names: tuple[str, ...], mark: str) -> None:
    for name in names:
        (folder / name).rename(folder / _marked(name, mark))
    assert not is_loaded(folder)
    assert problems(folder) == [lacks(name, _marked(name, mark)) for name in sorted(names)]
    for name in names:
        (folder / _marked(name, mark)).rename(folder / name)
    assert is_loaded(folder)
    assert problems(folder) == []


@pytest.mark.parametrize("mark", MARKS)
def test_copies_next_to_their_files_are_not_missed(folder: Path, mark: str) -> None:
    for name in STATES:
        if not name.startswith("custom"):
            shutil.copy(folder / name, folder / _marked(name, mark))
    assert is_loaded(folder)
    assert problems(folder) == []


@pytest.mark.parametrize("mark", ["-1", " copy", "_1"])
def test_own_files_of_a_script_with_marks_are_no_finding(small: Path, mark: str) -> None:
    """As a copy of a model before it is deleted, or the states of one step of an epoch."""
    shutil.copy(small / "model.safetensors", small / f"model_1{mark}.safetensors")
    Small().accelerator.load_state(str(small))
    assert problems(small) == []
    if mark == "_1":
        shutil.copy(small / "optimizer.bin", small / "optimizer_1_1.bin")
        Small().accelerator.load_state(str(small))
        assert problems(small) == []


@pytest.mark.parametrize("name", ["model-1.safetensors", "optimizer-1.bin"])
def test_a_script_that_saves_an_object_itself_by_a_number(tmp_path: Path, name: str) -> None:
    """It prepares only the other one."""
    accelerator = new_accelerator()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    folder = tmp_path / "folder"
    accelerator.prepare(model if name.startswith("optimizer") else optimizer)
    accelerator.save_state(str(folder))
    if name.startswith("model"):
        save_file(model.state_dict(), folder / name)
    else:
        torch.save(optimizer.state_dict(), folder / name)
    accelerator.load_state(str(folder))
    assert problems(folder) == []


def test_several_copies_are_listed(small: Path) -> None:
    (small / "optimizer.bin").rename(small / "optimizer (1).bin")
    shutil.copy(small / "optimizer (1).bin", small / "optimizer.bin.bak")
    words = (
        "optimizer.bin is missing: 'optimizer (1).bin', 'optimizer.bin.bak' exist, but "
        "load_state does not look for those names"
    )
    assert problems(small) == [("incomplete-checkpoint", words)]


def test_a_copy_of_a_sampler_is_told(small: Path) -> None:
    sampler = SeedableRandomSampler(range(3), data_seed=1)
    torch.save(sampler, small / "sampler.bin.bak")
    assert problems(small) == [lacks("sampler.bin", "sampler.bin.bak")]
    torch.save({"epoch": 3}, small / "sampler.bin.bak")
    assert problems(small) == []


def test_a_copy_of_other_content_is_not_the_missing_file(small: Path) -> None:
    shutil.copy(small / "scheduler.bin", small / "optimizer (1).bin")
    (small / "optimizer.bin").unlink()
    words = "optimizer.bin is missing: scheduler.bin shows that the run had an optimizer"
    assert problems(small) == [("incomplete-checkpoint", words)]


def test_the_only_file_with_content_of_a_missing_state_is_named(small: Path) -> None:
    """No name shows it: the scheduler shows that an optimizer is missing."""
    (small / "optimizer.bin").rename(small / "adam.bin")
    (finding,) = check(small).findings
    assert str(finding).startswith("optimizer.bin is missing: scheduler.bin shows")
    assert finding.advice.startswith("if 'adam.bin' is that file, rename it to optimizer.bin")
    shutil.copy(small / "adam.bin", small / "second.bin")
    (finding,) = check(small).findings
    assert "'adam.bin'" not in finding.advice


def test_weights_that_only_the_script_loads_are_listed_as_not_checked(small: Path) -> None:
    torch.save(load_file(small / "model.safetensors"), small / "pytorch_model.pt")
    (small / "model.safetensors").unlink()
    assert problems(small) == []
    words = (
        "models: load_state does not look for 'pytorch_model.pt' and fails in a script that "
        "needs model.safetensors"
    )
    assert words in check(small).not_checked
