"""``latest_checkpoint`` takes what ``load_state`` loads and the next step goes on from, as
``check`` says.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from safetensors.torch import load_file, save_file

from ckptfix import check, latest_checkpoint
from ckptfix.checkpoint.latest import time_of
from ckptfix.diagnosis.resumable import choose, examine
from tests.commanding import Said, said
from tests.diagnosis.builders import new_accelerator
from tests.diagnosis.test_passed_over import gone
from tests.diagnosis.test_wrong_states import exchanged

__all__ = ["said"]

Change = Callable[[Path], object]


def prepared() -> tuple[Accelerator, list[Any], list[Any]]:
    """Return the objects of a script with a generator and a discriminator."""
    torch.manual_seed(0)
    accelerator = new_accelerator()
    models = [torch.nn.Linear(4, 3), torch.nn.Linear(5, 2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 5) for one in optimizers]
    objects = accelerator.prepare(*models, *optimizers, *schedulers)
    return accelerator, list(objects[:2]), list(objects[2:])


def step(models: list[Any], rest: list[Any]) -> None:
    for model, optimizer, scheduler in zip(models, rest[:2], rest[2:], strict=True):
        model(torch.ones(2, model.in_features)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("saved") / "run"
    accelerator, models, rest = prepared()
    for number in (1, 2, 3):
        step(models, rest)
        accelerator.save_state(str(run / f"checkpoint_{number}"))
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def resumes(checkpoint: Path) -> bool:
    """Return whether stock accelerate loads a checkpoint and makes the next step."""
    accelerator, models, rest = prepared()
    with suppress(Exception):
        accelerator.load_state(str(checkpoint))
        step(models, rest)
        return True
    return False


def folder(name: str) -> Change:
    def change(root: Path) -> None:
        (root / name).unlink()
        (root / name).mkdir()
        (root / name / "data").touch()

    return change


def edited(change: Callable[[dict[str, Any]], object]) -> Change:
    def edit(root: Path) -> None:
        state = torch.load(root / "optimizer.bin")
        change(state)
        torch.save(state, root / "optimizer.bin")

    return edit


def to_sgd(state: dict[str, Any]) -> None:
    state["param_groups"] = [{"lr": 0.1, "momentum": 0.9, "params": [0, 1]}]
    for states in state["state"].values():
        states.clear()
        states["momentum_buffer"] = torch.ones(5)


def flipped(root: Path) -> None:
    data = (root / "optimizer.bin").read_bytes()
    (root / "optimizer.bin").write_bytes(data.replace(b"exp_avg_sq", b"exp_avg_sx"))


def without_bias(root: Path) -> None:
    state = load_file(root / "model.safetensors")
    del state["bias"]
    save_file(state, root / "model.safetensors", metadata={"format": "pt"})


def emptied(root: Path) -> None:
    for name in ("model.safetensors", "model_1.safetensors"):
        save_file({}, root / name, metadata={"format": "pt"})


def after(path: Path) -> None:
    """Append more than the 64 KiB in which torch looks for the end of a zip archive."""
    path.write_bytes(path.read_bytes() + bytes(70_000))


REFUSED: dict[str, Change] = {
    "first model and optimizer": gone("model.safetensors", "optimizer.bin"),
    "first model": gone("model.safetensors"),
    "last model": gone("model_1.safetensors"),
    "first optimizer": gone("optimizer.bin"),
    "last optimizer": gone("optimizer_1.bin"),
    "all optimizers": gone("optimizer.bin", "optimizer_1.bin"),
    "optimizer in a folder": folder("optimizer.bin"),
    "renamed optimizer": (
        lambda root: (root / "optimizer_1.bin").rename(root / "optimizer_1 (1).bin")
    ),
    "group without lr": edited(lambda state: state["param_groups"][0].pop("lr")),
    "moment": edited(lambda state: state["state"][0].pop("exp_avg")),
    "flipped bytes": flipped,
    "empty weights": emptied,
    "model of another shape": lambda root: save_file(
        {"weight": torch.ones(7, 4), "bias": torch.ones(7)}, root / "model.safetensors"
    ),
    "model without a key": lambda root: save_file(
        {"weight": torch.ones(3, 4)}, root / "model.safetensors"
    ),
    "moments of another shape": edited(
        lambda state: state["state"][0].update(exp_avg=torch.ones(9), exp_avg_sq=torch.ones(9))
    ),
    "optimizer of another class": edited(to_sgd),
    "cut optimizer": lambda root: os.truncate(root / "optimizer.bin", 900),
    "bytes after an optimizer": lambda root: after(root / "optimizer.bin"),
    "bytes after weights": lambda root: after(root / "model.safetensors"),
    "exchanged models": lambda root: exchanged(root, "model.safetensors", "model_1.safetensors"),
    "first model over the second": lambda root: shutil.copy(
        root / "model.safetensors", root / "model_1.safetensors"
    ),
    "newest model without a key": without_bias,
}

LOADED: dict[str, Change] = {
    "nothing": lambda root: None,
    "random states of another rank": lambda root: shutil.copy(
        root / "random_states_0.pkl", root / "random_states_1.pkl"
    ),
    "note of a user": lambda root: (root / "notes.txt").write_text("good"),
    "tokens of a script": lambda root: (root / "tokens.bin").write_bytes(bytes(range(1, 250)) * 9),
    "words of a script": lambda root: (root / "vocab.bin").write_text("the\nof\nand\n"),
    "cut average of a script": (
        lambda root: (root / "ema.pt").write_bytes((root / "optimizer.bin").read_bytes()[:900])
    ),
    "zeros of a script": lambda root: (root / "mask.bin").write_bytes(bytes(999)),
    "bytes after random states": lambda root: after(root / "random_states_0.pkl"),
    "a few bytes after an optimizer": (
        lambda root: (root / "optimizer.bin").write_bytes(
            (root / "optimizer.bin").read_bytes() + bytes(9)
        )
    ),
    "left copy": lambda root: shutil.copy(root / "optimizer.bin", root / "optimizer.bin.tmp"),
}


def cases() -> Iterator[Any]:
    yield from (pytest.param(change, False, id=name) for name, change in REFUSED.items())
    yield from (pytest.param(change, True, id=name) for name, change in LOADED.items())


@pytest.mark.parametrize(("change", "is_loaded"), list(cases()))
@pytest.mark.filterwarnings("ignore:.*passed over")
def test_the_loader_the_check_and_the_choice_agree(
    run: Path, said: Said, change: Change, is_loaded: bool
) -> None:
    """A folder with 2 errors of ``check`` was "the newest complete one" of
    ``latest_checkpoint``.
    """
    newest = run / "checkpoint_3"
    change(newest)
    assert resumes(newest) is is_loaded
    expected = newest if is_loaded else run / "checkpoint_2"
    assert latest_checkpoint(run) == expected
    assert is_loaded or check(newest).status == 1
    _, out, _ = said("check", "-r", run)
    answer = out.splitlines()[-1]
    has_problems = f"check found problems in {expected.name}" in answer
    kind = "candidate" if has_problems else "complete one"
    assert f"resume from {expected}, the newest {kind}" in out


def test_a_module_that_no_save_of_a_script_has(run: Path) -> None:
    """Each checkpoint of it has the warning, and loads."""
    for number in (1, 2, 3):
        edited(lambda state: state["state"].update({2: {**state["state"][0]}}))(
            run / f"checkpoint_{number}"
        )
        edited(lambda state: state["param_groups"][0]["params"].append(2))(
            run / f"checkpoint_{number}"
        )
    codes = [{finding.code for finding in check(root).findings} for root in run.iterdir()]
    assert all("unsaved-parameters" in found for found in codes)
    assert latest_checkpoint(run) == run / "checkpoint_3"
    # The only checkpoint is the best one.
    for number in (1, 2):
        shutil.rmtree(run / f"checkpoint_{number}")
    assert latest_checkpoint(run) == run / "checkpoint_3"


def test_a_file_of_a_script_that_is_the_only_model(run: Path) -> None:
    """Hooks of the script then save and load it: a cut one ends the resume."""
    for number in (1, 2, 3):
        root = run / f"checkpoint_{number}"
        (root / "model_1.safetensors").unlink()
        (root / "model.safetensors").unlink()
        torch.save(torch.nn.Linear(4, 3).state_dict(), root / "net.pt")
    assert latest_checkpoint(run) == run / "checkpoint_3"
    os.truncate(run / "checkpoint_3" / "net.pt", 900)
    with pytest.warns(UserWarning, match="passed over checkpoint_3"):
        assert latest_checkpoint(run) == run / "checkpoint_2"


def test_a_file_of_a_script_that_is_no_file_of_torch(run: Path, said: Said) -> None:
    tokens = run / "checkpoint_3" / "tokens.bin"
    tokens.write_bytes(bytes(range(1, 250)) * 9)
    assert check(run / "checkpoint_3").status == 0
    words = "not a torch file, and no library looks for this name"
    assert f"tokens.bin: {words}" in check(run / "checkpoint_3").not_checked
    status, _, error = said("check", tokens)
    assert (status, f"{tokens} is {words}" in error) == (2, True)
    for name in ("pytorch_model.bin", "adapter_model.bin", "optimizer_2.bin"):
        shutil.copy(tokens, run / "checkpoint_3" / name)
        report = check(run / "checkpoint_3")
        assert "not-a-tensor-file" in {finding.code for finding in report.findings}
        (run / "checkpoint_3" / name).unlink()


def test_a_duplicate_that_every_checkpoint_of_its_script_has(tmp_path: Path) -> None:
    """The unchanged script prepares its model twice, and loads both: a resume must not refuse the
    run.
    """
    source = Path("fixtures/accelerate-1.15.0/wrapper-safetensors/checkpoint")
    for number in (1, 2):
        shutil.copytree(source, tmp_path / f"checkpoint_{number}")
    assert "doubled-model" in {
        finding.code for finding in check(tmp_path / "checkpoint_2").findings
    }
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint_2"


@pytest.mark.parametrize(
    "names",
    [
        ("scheduler_1.bin",),
        ("scheduler.bin", "scheduler_1.bin"),
        ("optimizer_1.bin", "scheduler_1.bin", "model_1.safetensors"),
    ],
)
def test_a_script_that_dropped_an_object_loses_no_save(run: Path, names: tuple[str, ...]) -> None:
    """The first checkpoint without it was passed over, so that the run resumed from the objects of
    the old script.
    """
    for number in (4, 5, 6):
        root = run / f"checkpoint_{number}"
        accelerator, _, _ = prepared()
        for kind, objects in (
            ("model", accelerator._models),
            ("optimizer", accelerator._optimizers),
            ("scheduler", accelerator._schedulers),
        ):
            del objects[2 - sum(name.startswith(kind) for name in names) :]
        for optimizer in accelerator._optimizers:
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        accelerator.save_state(str(root))
        assert {path.name for path in (run / "checkpoint_3").iterdir()} - {
            path.name for path in root.iterdir()
        } == {*names}
        accelerator.load_state(str(root))
        choice = choose(run)
        assert choice is not None
        assert choice.best is not None
        assert choice.best.number == number
        if number == 4:
            # A lost file would look the same.
            assert check(root).status == 1
    assert check(run / "checkpoint_5").status == 0


def test_a_file_of_the_trainer_that_it_starts_anew(tmp_path: Path) -> None:
    """The Trainer resumes without its optimizer: ``--missing-states`` of the guard decides, not the
    choice.
    """
    from tests.diagnosis.test_completeness import make_of_trainer

    for number in (2, 4, 6):
        root = make_of_trainer(tmp_path / f"checkpoint-{number}")
        state = (root / "trainer_state.json").read_text()
        (root / "trainer_state.json").write_text(
            state.replace('"global_step": 4', f'"global_step": {number}')
        )
    gone("optimizer.pt", "scheduler.pt")(tmp_path / "checkpoint-6")
    assert check(tmp_path / "checkpoint-6").status == 1
    assert examine(tmp_path / "checkpoint-6", 6).problem is None


def prepared_loader() -> tuple[Accelerator, Any]:
    """Return a script with a dataloader whose position is saved."""
    settings = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = new_accelerator(dataloader_config=settings)
    accelerator.prepare(torch.nn.Linear(1, 1))
    loader = accelerator.prepare(
        torch.utils.data.DataLoader(torch.arange(8.0).unsqueeze(1), batch_size=1)
    )
    return accelerator, loader


@pytest.mark.filterwarnings("ignore:.*set_vital")
def test_a_position_of_a_dataloader_is_a_note(tmp_path: Path) -> None:
    """``load_state`` succeeds, and the epoch begins again: nothing was told."""
    accelerator, loader = prepared_loader()
    batches = iter(loader)
    for number in (1, 2, 3):
        next(batches)
        accelerator.save_state(str(tmp_path / f"checkpoint_{number}"))
    newest = tmp_path / "checkpoint_3"
    assert check(newest).findings == ()
    gone("dl_state_dict.bin")(newest)
    accelerator, loader = prepared_loader()
    accelerator.load_state(str(newest))
    assert len(list(loader)) == 8
    report = check(newest)
    (finding,) = report.findings
    assert str(finding) == "dl_state_dict.bin is missing: 2 of 2 neighbouring checkpoints have it"
    assert "the epoch starts over" in finding.advice
    assert report.status == 0
    assert latest_checkpoint(tmp_path) == newest


def plain_dcp(folder: Path) -> None:
    """Save a model as a script of its own does, without accelerate."""
    with catch_warnings():
        simplefilter("ignore")
        dcp.save({"model": torch.nn.Linear(3, 2).state_dict()}, checkpoint_id=folder)


def test_a_run_of_plain_dcp_folders(tmp_path: Path, said: Said) -> None:
    for number in (1, 2, 3):
        plain_dcp(tmp_path / f"step_{number}")
    assert latest_checkpoint(tmp_path) == tmp_path / "step_3"
    os.unlink(tmp_path / "step_3" / ".metadata")
    with pytest.warns(UserWarning, match="passed over step_3"):
        assert latest_checkpoint(tmp_path) == tmp_path / "step_2"
    os.unlink(next((tmp_path / "step_2").glob("*.distcp")))
    with pytest.warns(UserWarning, match="step_2: __0_0.distcp: every file of rank 0 is missing"):
        assert latest_checkpoint(tmp_path) == tmp_path / "step_1"
    assert said("check", "-r", tmp_path)[0] == 1
    assert "resume from" in said("check", "-r", tmp_path)[1].splitlines()[-1]


def test_a_repair_of_a_plain_dcp_folder_leaves_the_time_of_its_save(tmp_path: Path) -> None:
    folder = tmp_path / "step_1"
    plain_dcp(folder)
    for path in folder.iterdir():
        os.utime(path, (1000, 1000))
    os.utime(folder / ".metadata")
    assert time_of(folder) == 1000


@pytest.mark.parametrize("name", ["checkpoint-{}", "checkpoint_{}"])
def test_neither_accelerate_nor_the_trainer_resumes_from_a_plain_dcp_folder(
    name: str, tmp_path: Path
) -> None:
    for number in (1, 2):
        plain_dcp(tmp_path / name.format(number))
    report = check(tmp_path / name.format(2), resumes=True)
    assert (report.status, "dcp.load reads but load_state" in report.not_resumable) == (0, True)
