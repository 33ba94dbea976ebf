"""Files of a save further back than the one before: only the neighbour was compared, and a file of
two saves back was clean.
"""

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

from ckptfix import check
from ckptfix.checkpoint import neighbours
from ckptfix.cli import run
from tests.diagnosis.test_optimizer_states import save
from tests.diagnosis.test_stale_saves import (
    OPTIMIZER,
    SCHEDULER,
    WEIGHTS,
    constant,
    copied,
    run_of_trainer,
    saved_by_hooks,
    sharded_runs,
    told,
    with_two_optimizers,
)
from tests.stores.servers import upload_folder

__all__ = ["constant", "run_of_trainer"]

OPTIONS = pytest.mark.parametrize("options", [{}, {"data": True}], ids=["samples", "data"])


def in_names(output: Path) -> dict[str, list[tuple[str, str]]]:
    """Return the findings about each checkpoint that has any."""
    every = {folder.name: told(folder) for folder in sorted(output.iterdir())}
    return {name: findings for name, findings in every.items() if findings}


@OPTIONS
@pytest.mark.parametrize(("source", "target"), [(1, 3), (1, 4), (2, 4)])
def test_weights_of_an_older_save_are_a_warning(
    run_of_trainer: Path, source: int, target: int, options: dict[str, Any]
) -> None:
    folder = copied(run_of_trainer, WEIGHTS, source=source, target=target)
    ((severity, words),) = told(folder, **options)
    assert severity == "warning"
    assert words.startswith(
        f"{WEIGHTS}: weights as in checkpoint-{source} (expected different values: step in "
        f"{OPTIMIZER} went from {source} to {target} at a learning rate of 0.001)"
    )
    assert in_names(run_of_trainer).keys() == {folder.name}


def test_the_run_is_resumed_from_the_save_between_the_two(
    run_of_trainer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(run_of_trainer, WEIGHTS, source=1, target=4)
    assert run(["check", "-r", str(run_of_trainer)]) == 1
    out = capsys.readouterr().out
    assert "Resume from checkpoint-3. If the script itself restored" in out
    last = f"the newest one without problems: {run_of_trainer}/checkpoint-3"
    assert out.splitlines()[-1].endswith(last)


@OPTIONS
@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (1, 3, "optimizer state of checkpoint-1 (expected new values: last_epoch in"),
        (2, 4, "optimizer state of checkpoint-2 (expected new values: last_epoch in"),
        (3, 1, "optimizer state of checkpoint-3, a later save: its step 3 matches last_epoch in"),
        (4, 1, "optimizer state of checkpoint-4, a later save: its step 4 matches last_epoch in"),
    ],
)
def test_an_optimizer_of_a_save_further_away_is_told_where_it_is_wrong(
    run_of_trainer: Path, source: int, target: int, words: str, options: dict[str, Any]
) -> None:
    folder = copied(run_of_trainer, OPTIMIZER, source=source, target=target)
    ((severity, sentence),) = told(folder, **options)
    assert severity == "warning"
    assert sentence.startswith(f"{OPTIMIZER}: {words} {SCHEDULER}")
    assert in_names(run_of_trainer).keys() == {folder.name}


@OPTIONS
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [WEIGHTS, "model_1.safetensors", "optimizer_1.bin"])
def test_one_file_among_several_of_an_older_save_is_found(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    output = with_two_optimizers(tmp_path)
    shutil.copy(output / "checkpoint_1" / name, output / "checkpoint_4" / name)
    ((severity, sentence),) = told(output / "checkpoint_4", **options)
    # A script may have gone back to the best weights of a model.
    assert severity == ("note" if name.startswith("model") else "warning")
    assert sentence.startswith(f"{name}: ")
    assert "checkpoint_1 (expected" in sentence
    assert in_names(output).keys() == {"checkpoint_4"}


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
@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (1, 2, "optimizer state of checkpoint_1 (expected new values: the weights differ)"),
        (2, 3, "optimizer state of checkpoint_2 (expected new values: the weights differ)"),
        (1, 4, "optimizer state of checkpoint_1 (expected new values: the weights differ)"),
        (
            3,
            2,
            "optimizer state of checkpoint_3, a later save: its step 3 matches the number in the",
        ),
        (
            4,
            1,
            "optimizer state of checkpoint_4, a later save: its step 4 matches the number in the",
        ),
    ],
)
def test_all_optimizers_of_another_save_are_found(
    source: int, target: int, words: str, tmp_path: Path
) -> None:
    """With their schedulers, or without any, no counter is left that moved: the weights differ, and
    the steps do not fit the numbers.
    """
    output = with_two_optimizers(tmp_path)
    for name in ("optimizer.bin", "optimizer_1.bin"):
        shutil.copy(output / f"checkpoint_{source}" / name, output / f"checkpoint_{target}")
    ((severity, sentence),) = told(output / f"checkpoint_{target}")
    assert severity == "warning"
    assert words in sentence
    assert in_names(output).keys() == {f"checkpoint_{target}"}


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
        folder = tmp_path / f"epoch_{number}"
        folder.mkdir()
        save_file(model.state_dict(), folder / WEIGHTS)
        torch.save(optimizer.state_dict(), folder / "optimizer.bin")
        torch.save({"step": number}, folder / "random_states_0.pkl")
    assert run(["check", "-r", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("epoch_2, the newest complete one")
    shutil.copy(tmp_path / "epoch_0" / "optimizer.bin", tmp_path / "epoch_2")
    assert run(["check", "-r", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "the files do not show which. Resume from epoch_1" in out
    assert "3 checkpoints: 1 with differences, 2 clean" in out
    assert out.splitlines()[-1] == (
        f"resume from {tmp_path}/epoch_2, the newest complete one, which differs from its "
        f"neighbours (see above); the newest one without problems: {tmp_path}/epoch_1"
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
        folder = output / f"epoch_{number}"
        folder.mkdir(parents=True)
        weights = model.state_dict()
        if number == count - 1:
            weights = {key: last(value) for key, value in weights.items()}
        save_file(weights, folder / WEIGHTS)
        torch.save(optimizer.state_dict(), folder / "optimizer.bin")
        torch.save({"step": number}, folder / "random_states_0.pkl")
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("numbers", "target"), [((2, 3, 4), 3), ((1, 2, 3), 3)])
def test_the_first_pair_of_models_in_sub_folders_is_compared_with_the_save_after_it(
    numbers: tuple[int, ...], target: int, tmp_path: Path
) -> None:
    """Two alone do not show that the model changes, so that it was a note."""
    output = saved_by_hooks(tmp_path, numbers=numbers)
    name = "unet/diffusion_pytorch_model.safetensors"
    shutil.copy(output / "checkpoint_2" / name, output / f"checkpoint_{target}" / name)
    ((severity, words),) = told(output / f"checkpoint_{target}")
    assert severity == "warning"
    assert words.startswith(f"{name}: weights as in checkpoint_2 ")


@pytest.mark.filterwarnings("ignore")
def test_a_model_in_a_sub_folder_of_an_older_save_is_found(tmp_path: Path) -> None:
    output = saved_by_hooks(tmp_path)
    name = "unet/diffusion_pytorch_model.safetensors"
    shutil.copy(output / "checkpoint_1" / name, output / "checkpoint_4" / name)
    assert [severity for severity, _ in told(output / "checkpoint_4")] == ["note"]
    assert in_names(output).keys() == {"checkpoint_4"}


@pytest.mark.filterwarnings("ignore")
def test_shards_of_an_older_save_are_one_finding(tmp_path: Path) -> None:
    output = sharded_runs(tmp_path / "run")
    _, *names = sorted(path.name for path in (output / "checkpoint-1").glob("model-*.safetensors"))
    folder = copied(output, *names[:2], source=1, target=3)
    ((severity, words),) = told(folder)
    assert severity == "warning"
    assert words.startswith(f"{names[0]} and {names[1]}: weights as in checkpoint-1 ")
    findings = check(folder, siblings=output.iterdir()).findings
    (finding,) = (finding for finding in findings if finding.code == "stale-save")
    assert "copy these files of both again from their source, or resume from" in finding.advice


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
