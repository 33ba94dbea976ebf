"""States under the name of another file: torch writes into each file the name that it was saved
under.
"""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.optim import lr_scheduler

from ckptfix import check, latest_checkpoint
from ckptfix.errors import UsageError
from tests.diagnosis.test_wrong_states import (
    CUSTOM,
    OPTIMIZER,
    RANDOM,
    SCALER,
    SCHEDULER,
    Counter,
    Run,
    exchanged,
    healthy,
    root,
)
from tests.stores.servers import upload_folder

__all__ = ["healthy", "root"]


class Generators:
    """An object of a script that keeps its own random states, as accelerate does."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": 3,
            "random_state": random.getstate(),
            "numpy_random_seed": numpy.random.get_state(),
            "torch_manual_seed": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["random_state"])


def layer() -> Any:
    return torch.nn.Linear(2, 2)


def optimizer() -> Any:
    return torch.optim.Adam(layer().parameters())


REGISTERED: dict[str, Callable[[], Any]] = {
    "a counter": Counter,
    "a module": layer,
    "an optimizer": optimizer,
    "a scheduler": lambda: lr_scheduler.StepLR(optimizer(), 2),
    "random states": Generators,
}


def run(*objects: Any) -> Run:
    made = Run(custom=objects[0])
    made.accelerator.register_for_checkpointing(*objects[1:]) if objects[1:] else None
    return made


def loads_as_saved(root: Path, *objects: Any) -> bool:
    """Return whether new objects have the states of the saved ones after ``load_state``."""
    made = run(*(type(one)() if isinstance(one, Counter) else one for one in objects))
    for number, one in enumerate(objects):
        if isinstance(one, Counter):
            made.accelerator._custom_objects[number].count = -1
    try:
        made.accelerator.load_state(str(root))
    except (KeyError, RuntimeError, ValueError, TypeError, AttributeError):
        return False
    return all(
        made.accelerator._custom_objects[number].count == one.count
        for number, one in enumerate(objects)
        if isinstance(one, Counter)
    )


def told(root: Path) -> list[tuple[str, str, str]]:
    """Return code, severity and sentence of each finding."""
    report = check(root)
    return [(finding.code, finding.severity.value, str(finding)) for finding in report.all_findings]


@pytest.fixture(scope="module", params=REGISTERED)
def registered(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    root = tmp_path_factory.mktemp("registered") / "checkpoint_0"
    Run(custom=REGISTERED[request.param]()).save(root)
    assert told(root) == []
    return request.param, root


@pytest.mark.parametrize("name", [RANDOM, OPTIMIZER, SCHEDULER, SCALER])
def test_a_state_that_was_copied_over_a_custom_object_is_told(
    name: str, registered: tuple[str, Path], tmp_path: Path
) -> None:
    words, saved = registered
    root = Path(shutil.copytree(saved, tmp_path / "checkpoint_0"))
    shutil.copy(root / name, root / CUSTOM)
    ((code, severity, sentence),) = told(root)
    assert (code, severity) == ("wrong-state", "error")
    assert sentence.startswith(f"{CUSTOM}: it holds ")
    assert sentence.endswith(f", saved as {name} (expected a custom object)")
    if words == "a counter":
        assert not loads_as_saved(root, Counter())


@pytest.mark.parametrize("name", [SCHEDULER, RANDOM])
def test_a_custom_object_that_was_copied_over_a_state_is_told(name: str, root: Path) -> None:
    shutil.copy(root / CUSTOM, root / name)
    ((_, severity, sentence),) = told(root)
    assert sentence.startswith(f"{name}: it holds ")
    assert severity in ("error", "warning")


def test_a_scheduler_and_a_custom_object_that_were_exchanged_are_told(root: Path) -> None:
    exchanged(root, SCHEDULER, CUSTOM)
    ((code, severity, sentence),) = told(root)
    assert (code, severity) == ("wrong-state", "error")
    assert sentence.endswith(f"; swapped with {SCHEDULER}")


def test_a_module_that_was_exported_under_the_name_of_a_model_is_healthy(tmp_path: Path) -> None:
    made = Run(custom=layer())
    made.accelerator._models.clear()
    root = made.save(tmp_path / "checkpoint_0")
    shutil.copy(root / CUSTOM, root / "pytorch_model.bin")
    assert [code for code, _, _ in told(root) if code == "wrong-state"] == []


@pytest.mark.parametrize("is_exchanged", [False, True])
def test_one_custom_object_under_the_name_of_another_is_a_warning(
    is_exchanged: bool, tmp_path: Path
) -> None:
    first, second = Counter(), Counter()
    first.count, second.count = 1, 2
    root = run(first, second).save(tmp_path / "checkpoint_0")
    assert told(root) == []
    assert loads_as_saved(root, first, second)
    if is_exchanged:
        exchanged(root, CUSTOM, "custom_checkpoint_1.pkl")
    else:
        shutil.copy(root / CUSTOM, root / "custom_checkpoint_1.pkl")
    assert not loads_as_saved(root, first, second)
    (sentence,) = (sentence for code, severity, sentence in told(root) if severity == "warning")
    assert "it holds a custom object, saved as custom_checkpoint_" in sentence
    assert ("; swapped with custom_checkpoint_" in sentence) is is_exchanged
    with pytest.raises(UsageError, match="saved as custom_checkpoint_"):
        latest_checkpoint(tmp_path)


def test_objects_that_moved_up_are_healthy(tmp_path: Path) -> None:
    """A script that no longer registers its first object needs the files of the others under the
    numbers before.
    """
    first, second, third = Counter(), Counter(), Counter()
    first.count, second.count, third.count = 1, 2, 3
    root = run(first, second, third).save(tmp_path / "checkpoint_0")
    for number in (1, 2):
        (root / f"custom_checkpoint_{number}.pkl").replace(
            root / f"custom_checkpoint_{number - 1}.pkl"
        )
    assert loads_as_saved(root, second, third)
    assert told(root) == []


def test_a_scheduler_that_was_registered_before_is_healthy(tmp_path: Path) -> None:
    """A script that prepares the scheduler which it registered before needs it under another
    name.
    """
    made = Run()
    made.accelerator._schedulers.clear()
    made.accelerator._custom_objects[:] = [made.scheduler.scheduler]
    root = made.save(tmp_path / "checkpoint_0")
    (root / CUSTOM).rename(root / SCHEDULER)
    again = Run(steps=0)
    again.accelerator._custom_objects.clear()
    again.accelerator.load_state(str(root))
    assert again.scheduler.scheduler.last_epoch == 3
    assert told(root) == []


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of three checkpoints without schedulers."""
    runs = tmp_path_factory.mktemp("counted")
    for number in range(1, 4):
        made = run(Counter())
        made.accelerator._custom_objects[0].count = number
        made.accelerator._schedulers.clear()
        made.accelerator.scaler = None
        made.save(runs / f"checkpoint_{number}")
    return runs


@pytest.mark.parametrize(
    ("count", "at", "is_stored"), [(2, 1, False), (2, 2, False), (3, 2, False), (3, 2, True)]
)
@pytest.mark.parametrize("name", [SCHEDULER, "custom_checkpoint_1.pkl"])
def test_a_file_renamed_in_one_of_several_checkpoints_is_told_there_alone(
    name: str, count: int, at: int, is_stored: bool, counted: Path, tmp_path: Path
) -> None:
    """The other of two was told to lack the new name, and to hold a file too many."""
    runs = tmp_path / "run"
    for number in range(1, count + 1):
        shutil.copytree(counted / f"checkpoint_{number}", runs / f"checkpoint_{number}")
    root = runs / f"checkpoint_{at}"
    (root / CUSTOM).rename(root / name)
    place: Any = f"memory://{os.urandom(6).hex()}/run" if is_stored else runs
    if is_stored:
        upload_folder(runs, place)
    for number in range(1, count + 1):
        at_number = f"{place}/checkpoint_{number}"
        findings = [one for one in check(at_number).findings if one.code == "incomplete-checkpoint"]
        expected = [f"{CUSTOM} is missing"] if number == at else []
        assert [str(one).partition(":")[0] for one in findings] == expected, number
        for finding in findings:
            assert str(finding).endswith(f"; {name} was saved under this name")
            assert finding.advice.startswith(f"if {name!r} is that file, rename it to {CUSTOM}; ")
        if number != at:
            assert not [one for one in check(at_number).findings if one.code == "wrong-state"]


def test_random_states_in_a_custom_object_are_judged_by_the_name_they_were_saved_under(
    root: Path,
) -> None:
    states = torch.load(root / RANDOM, weights_only=False)
    with (root / CUSTOM).open("wb") as stream:
        torch.save(states, stream)
    ((code, severity, sentence),) = told(root)
    assert (code, severity) == ("unknown-state", "warning")
    assert sentence == f"{CUSTOM}: it holds accelerate's random states (expected a custom object)"
    torch.save(
        {key: value for key, value in states.items() if key != "step"}, root / "made_by_hand"
    )
    (root / "made_by_hand").rename(root / CUSTOM)
    assert told(root) == []


def test_random_states_of_another_checkpoint_are_told(root: Path, tmp_path: Path) -> None:
    torch.save(torch.load(root / RANDOM, weights_only=False), tmp_path / "random_states_4.pkl")
    (tmp_path / "random_states_4.pkl").rename(root / CUSTOM)
    ((code, severity, _),) = told(root)
    assert (code, severity) == ("wrong-state", "error")


def test_random_states_that_other_processes_were_given_are_noted(root: Path) -> None:
    shutil.copy(root / RANDOM, root / "random_states_1.pkl")
    assert [(code, severity) for code, severity, _ in told(root)] == [("wrong-state", "note")]


@pytest.mark.parametrize("kind", ["optimizer", "scheduler"])
def test_two_states_of_one_kind_that_were_exchanged_load_and_are_told(
    kind: str, tmp_path: Path
) -> None:
    """The networks are of one class, so that no shape and no key shows it."""
    made = Run()
    second = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    adam = torch.optim.AdamW(second.parameters(), lr=0.1)
    made.accelerator.prepare(second, adam, lr_scheduler.StepLR(adam, 2))
    second(torch.ones(2, 3)).sum().backward()
    adam.step()
    root = made.save(tmp_path / "checkpoint_0")
    assert told(root) == []
    exchanged(root, f"{kind}.bin", f"{kind}_1.bin")
    made.accelerator.load_state(str(root))
    (sentence,) = (sentence for _, severity, sentence in told(root) if severity == "warning")
    assert (
        sentence == f"{kind}.bin: it holds {'an' if kind == 'optimizer' else 'a'} {kind}, saved "
        f"as {kind}_1.bin (expected its own state); swapped with {kind}_1.bin"
    )
