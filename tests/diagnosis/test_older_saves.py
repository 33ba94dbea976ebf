"""Saves that a run went back to, averages at its end, and what a look at all saves costs."""

import os
import shutil
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix.checkpoint import neighbours
from ckptfix.cli import run
from tests.diagnosis.test_optimizer_states import save
from tests.diagnosis.test_stale_saves import (
    WEIGHTS,
    constant,
    copied,
    in_names,
    run_of_trainer,
    told,
    with_two_optimizers,
    write_save,
)
from tests.stores.servers import upload_folder

__all__ = ["constant", "in_names", "run_of_trainer"]


def test_the_run_is_resumed_from_the_save_between_the_two(
    run_of_trainer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(run_of_trainer, WEIGHTS, source=1, target=4)
    assert run(["check", "-r", str(run_of_trainer)]) == 1
    out = capsys.readouterr().out
    assert "Resume from checkpoint-3. If the script itself restored" in out
    last = f"the newest one without problems: {run_of_trainer}/checkpoint-3"
    assert out.splitlines()[-1].endswith(last)


@pytest.mark.filterwarnings("ignore")
def test_a_model_next_to_new_objects_of_the_script_is_found(tmp_path: Path) -> None:
    """Registered objects change in each save; the model differs from the save before, so it does,
    too.
    """
    output = with_two_optimizers(tmp_path)
    for number in range(1, 5):
        folder = output / f"checkpoint_{number}"
        (folder / "model_1.safetensors").unlink()
        (folder / "optimizer_1.bin").unlink()
        torch.save({"average": torch.full((8,), float(number))}, folder / "custom_checkpoint_0.pkl")
    shutil.copy(output / "checkpoint_1" / WEIGHTS, output / "checkpoint_3" / WEIGHTS)
    # A script may have restored its best weights.
    assert [severity for severity, _ in told(output / "checkpoint_3")] == ["note"]
    assert in_names(output).keys() == {"checkpoint_3"}


@pytest.mark.filterwarnings("ignore")
def test_an_older_optimizer_that_counts_no_steps_changes_the_checkpoint_to_resume_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The note said to resume from epoch_1 and was hidden, and the last line named epoch_2."""
    model = torch.nn.Linear(30, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for number in range(3):
        model(torch.rand(2, 30)).sum().backward()
        optimizer.step()
        write_save(tmp_path / f"epoch_{number}", model.state_dict(), optimizer)
    assert run(["check", "-r", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("epoch_2, the newest complete one")
    shutil.copy(tmp_path / "epoch_0" / "optimizer.bin", tmp_path / "epoch_2")
    assert run(["check", "-r", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "the files do not show which. Resume from epoch_1" in out
    assert "3 checkpoints: 1 with differences, 2 clean" in out
    assert out.splitlines()[-1] == (
        f"resume from {tmp_path}/epoch_2, the newest complete one, but epoch_2 differs from "
        f"its neighbours; the newest one without problems: {tmp_path}/epoch_1"
    )


def epochs(output: Path, last: Callable[[torch.Tensor], torch.Tensor], count: int = 3) -> Path:
    """Save after each of three epochs of five steps, and change the weights once more in the
    last.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 40)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for number in range(count):
        for _ in range(5 if number < count - 1 else 0):
            model(torch.rand(2, 30)).sum().backward()
            optimizer.step()
        weights = model.state_dict()
        if number == count - 1:
            weights = {key: last(value) for key, value in weights.items()}
        write_save(output / f"epoch_{number}", weights, optimizer)
    return output


def test_weights_that_a_script_changes_once_more_at_its_end_are_no_warning(tmp_path: Path) -> None:
    """An average that replaces the weights makes no step."""
    output = epochs(tmp_path, lambda value: value * 0.5)
    ((severity, words),) = told(output / "epoch_2")
    assert severity == "note"
    assert words.startswith("optimizer.bin: optimizer state of epoch_1 ")


def test_a_save_again_without_a_step_is_clean_but_for_the_note_about_a_copy(
    tmp_path: Path,
) -> None:
    output = epochs(tmp_path, lambda value: value)
    ((severity, words),) = told(output / "epoch_2")
    assert severity == "note"
    assert words.startswith(f"{WEIGHTS}: copy of epoch_1 ")


def test_a_run_that_goes_back_to_an_older_save_is_clean(tmp_path: Path) -> None:
    """A resume from epoch 0 saves it again, and trains on."""
    output = epochs(tmp_path, lambda value: value, count=4)
    shutil.rmtree(output / "epoch_3")
    shutil.copytree(output / "epoch_0", output / "epoch_3")
    assert in_names(output) == {}


def with_etags_of_bytes(url: str) -> None:
    """Date the objects of ``memory://`` by their bytes: the time is the ETag there."""
    for key, file in fsspec.filesystem("memory").store.items():
        if key.startswith(url.removeprefix("memory:/")):
            seconds = 1.8e9 + crc32(file.getvalue()) / 1e6
            file.created = datetime.fromtimestamp(seconds, timezone.utc)


@pytest.mark.filterwarnings("ignore")
def test_a_store_is_compared_without_more_requests(tmp_path: Path) -> None:
    """The ETags of all checkpoints are in its listing."""
    from ckptfix.storage.stores import Store

    output = with_two_optimizers(tmp_path)
    read = Store.read
    requests: list[str] = []

    def counting(store: Store, key: str, *args: Any, **options: Any) -> bytes:
        requests.append(key)
        return read(store, key, *args, **options)

    def requests_of_check() -> int:
        url = f"memory://{os.urandom(6).hex()}/run"
        upload_folder(output, url)
        with_etags_of_bytes(url)
        requests.clear()
        with patch.object(Store, "read", counting):
            assert run(["check", "-r", url]) == 0
        return len(requests)

    with patch.object(neighbours.Neighbours, "with_same_samples", return_value=()):
        expected = requests_of_check()
    assert requests_of_check() == expected
    shutil.copy(output / "checkpoint_1" / WEIGHTS, output / "checkpoint_4" / WEIGHTS)
    # Moments and steps of the two checkpoints are read.
    assert expected < requests_of_check() <= expected + 24


@pytest.mark.filterwarnings("ignore")
def test_each_file_of_a_healthy_run_is_sampled_once(tmp_path: Path) -> None:
    """Many checkpoints cost as many reads each as few do."""
    output = tmp_path / "run"
    weights = {"w": torch.zeros(64), "frozen": torch.ones(64)}
    counts: list[int] = []
    for number in range(1, 41):
        folder = output / f"checkpoint_{number}"
        folder.mkdir(parents=True)
        save_file({**weights, "w": torch.full((64,), float(number))}, folder / WEIGHTS)
        torch.save({"step": number}, folder / "random_states_0.pkl")
        if number in (20, 40):
            # Threads sample: a counter lost 4 of 40.
            with patch.object(neighbours, "sample_of", wraps=neighbours.sample_of) as sampled:
                assert run(["check", "-r", str(output)]) == 0
            counts.append(len(sampled.mock_calls))
    assert counts[1] <= 2.2 * counts[0] <= 2.2 * 2 * 20
    assert load_file(folder / WEIGHTS)["w"][0] == 40


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("target", [2, 3])
def test_an_old_model_of_two_that_sgd_trains_is_a_note(
    tmp_path: Path, target: int, is_frozen: bool
) -> None:
    """SGD without momentum keeps nothing that shows what it trains: one of two was clean."""
    models = [torch.nn.Linear(6, 6), torch.nn.Linear(6, 4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedulers = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.9) for optimizer in optimizers]
    for number in range(4):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            if not (is_frozen and model is models[0]):
                optimizer.zero_grad()
                model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            scheduler.step()
        save(tmp_path / f"checkpoint_{number}", models, [*optimizers, *schedulers])
    if is_frozen:
        assert stale_saves(tmp_path) == {}
        return
    weights = tmp_path / f"checkpoint_{target}/{WEIGHTS}"
    shutil.copy(tmp_path / f"checkpoint_{target - 1}/{WEIGHTS}", weights)
    ((name, ((severity, words),)),) = stale_saves(tmp_path).items()
    assert (name, severity) == (f"checkpoint_{target}", "note")
    assert words.startswith(f"{WEIGHTS}: weights as in checkpoint_{target - 1} (expected different")


def stale_saves(output: Path) -> dict[str, list[tuple[str, str]]]:
    """Return the findings about old files, without those about equal states of SGD."""
    every = {
        name: [told for told in found if "same state" not in told[1]]
        for name, found in in_names(output).items()
    }
    return {name: found for name, found in every.items() if found}
