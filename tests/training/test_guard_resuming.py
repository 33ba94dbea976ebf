"""The script that doubled its checkpoint resumes under the guard, from the folder as it is and from
the repaired one.

The folders are those of ``fixtures``: real runs of two accelerate versions on two processes, with
what they had in memory.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ckptfix import Keys, Policy, check, repair
from ckptfix.training.accelerator import patch_accelerate
from fixtures.digests import state_digest, tensor_digests
from fixtures.models import SampleCounter
from fixtures.scenarios import SCENARIOS, ModelUse, SaveState
from fixtures.train import Session, add_model, train
from tests.training.loading_runs import reset
from tests.training.ranks import run_ranks

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = [
    (version, one)
    for one in SCENARIOS
    if isinstance(one, SaveState) and one.processes == 2
    for version in one.versions
]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]


def session_of(scenario: SaveState) -> Session:
    """Build and prepare what the script of a fixture does, with other values than were saved."""
    reset()
    session = Session(accelerate.Accelerator(cpu=True))
    for use in scenario.models:
        add_model(session, use, with_scheduler=scenario.scheduler)
    if scenario.custom_registrations:
        session.custom.append(SampleCounter())
        for _ in range(scenario.custom_registrations):
            session.accelerator.register_for_checkpointing(session.custom[0])
    for model in session.plain:
        for parameter in model.parameters():
            parameter.data.fill_(0.5)
    return session


def in_memory(session: Session) -> dict[str, Any]:
    """Return what ``run.json`` records of a run."""
    return {
        "models": [tensor_digests(model.state_dict()) for model in session.plain],
        "optimizers": [state_digest(optimizer.state_dict()) for _, optimizer in session.optimizers],
        "schedulers": [json.dumps(scheduler.state_dict()) for _, scheduler in session.schedulers],
        "custom": [json.dumps(item.state_dict()) for item in session.custom],
    }


def saved(folder: Path) -> dict[str, Any]:
    run = json.loads((folder / "run.json").read_text())
    return {
        "models": [model["tensors"] for model in run["models"]],
        "optimizers": [one["digest"] for one in run["optimizers"]],
        "schedulers": [json.dumps(one["state"]) for one in run["schedulers"]],
        "custom": [json.dumps(one["state"]) for one in run["custom"]],
    }


def copies(tmp_path: Path, policy: Policy | None) -> list[tuple[SaveState, Path, dict[str, Any]]]:
    """Copy every fixture, and repair the copies when there is a policy."""
    found = []
    for version, scenario in CASES:
        source = FIXTURES / f"accelerate-{version}" / scenario.name
        target = tmp_path / version / scenario.name
        shutil.copytree(source / "checkpoint", target)
        if policy is not None:
            repair(target, policy=policy)
        found.append((scenario, target, saved(source)))
    return found


@pytest.mark.parametrize(
    "policy",
    [None, Policy(), Policy(keys=Keys.BARE), Policy(keys=Keys.DDP)],
    ids=["as it is", "repaired", "keys bare", "keys ddp"],
)
def test_the_doubling_script_resumes_under_the_guard(tmp_path: Path, policy: Policy | None) -> None:
    cases = copies(tmp_path, policy)

    def work(rank: int) -> None:
        wrong = []
        patch_accelerate()
        warnings.simplefilter("ignore")
        for scenario, target, expected in cases:
            name = target.relative_to(tmp_path)
            session = session_of(scenario)
            try:
                session.accelerator.load_state(str(target))
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")
                continue
            found = in_memory(session)
            wrong += [f"{name}: {part}" for part in found if found[part] != expected[part]]
        assert not wrong, "\n".join(wrong)

    assert run_ranks(2, work, patience=120) == [0, 0]


TWICE = ModelUse(prepares=2, form="raw", optimizer_prepares=2)
TRAINED = [
    SaveState(
        name="two pairs",
        models=(TWICE, replace(TWICE, seed=2)),
        scheduler=True,
        custom_registrations=2,
    ),
    SaveState(
        name="first of three", models=(TWICE, ModelUse(seed=2), ModelUse(seed=3)), scheduler=True
    ),
    SaveState(
        name="wrapper",
        models=(ModelUse(prepares=2), ModelUse(seed=2, prepares=3), ModelUse(seed=3)),
    ),
    SaveState(
        name="own DDP", models=(ModelUse(before="ddp", prepares=2), ModelUse(seed=2, before="ddp"))
    ),
]
"""Runs in which duplicates come before models and optimizers of the same shapes."""


@pytest.mark.parametrize(
    "policy", [None, Policy(), Policy(keys=Keys.BARE)], ids=["as it is", "repaired", "bare"]
)
def test_trained_unguarded_and_resumed_under_the_guard(
    tmp_path: Path, policy: Policy | None
) -> None:
    def run(rank: int) -> None:
        warnings.simplefilter("ignore")
        for scenario in TRAINED:
            session = session_of(scenario)
            train(session)
            session.accelerator.save_state(str(tmp_path / scenario.name))
            if rank == 0:
                (tmp_path / f"{scenario.name}.json").write_text(json.dumps(in_memory(session)))

    def resume(rank: int) -> None:
        patch_accelerate()
        wrong = []
        for scenario in TRAINED:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                session = session_of(scenario)
                seen.clear()
                session.accelerator.load_state(str(tmp_path / scenario.name))
            found = in_memory(session)
            expected = json.loads((tmp_path / f"{scenario.name}.json").read_text())
            wrong += [f"{scenario.name}: {part}" for part in found if found[part] != expected[part]]
            if policy is None:
                words = map(str, (one.message for one in seen))
                (said,) = (one for one in words if "Loaded by content instead" in one)
                assert " skipped: duplicate of " in said
                assert __file__ == seen[0].filename
        assert not wrong, wrong

    assert run_ranks(2, run) == [0, 0]
    for scenario in TRAINED if policy is not None else ():
        repair(tmp_path / scenario.name, policy=policy)
    assert run_ranks(2, resume) == [0, 0]


class Holder(torch.nn.Module):  # type: ignore[misc]  # torch is not followed, so nn.Module is Any
    """A wrapper of the script's own, whose only child is called ``module``."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, data: Any) -> Any:
        return self.module(data)


OWN_WRAPPERS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "two DDP": (DistributedDataParallel, DistributedDataParallel),
    "two holders": (Holder, Holder),
    "an average of DDP": (DistributedDataParallel, Holder),
}


@pytest.mark.parametrize("keys", [None, Keys.AUTO, Keys.BARE], ids=["as it is", "repaired", "bare"])
def test_a_script_with_nested_wrappers_of_its_own_resumes(
    tmp_path: Path, keys: Keys | None
) -> None:
    """After the default repair the unchanged script loads without the guard, too."""

    def prepared(wrappers: tuple[Callable[[Any], Any], ...], value: float) -> tuple[Any, Any]:
        reset()
        accelerator = accelerate.Accelerator(cpu=True)
        net = torch.nn.Linear(3, 2)
        for parameter in net.parameters():
            parameter.data.fill_(value)
        model: Any = net
        for wrapper in wrappers:
            model = wrapper(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accelerator.prepare(model, torch.optim.AdamW(net.parameters()))
        return accelerator, net

    def run(rank: int) -> None:
        for name, wrappers in OWN_WRAPPERS.items():
            accelerator, _ = prepared(wrappers, 0.25)
            accelerator.save_state(str(tmp_path / name))

    def resume(rank: int) -> None:
        for is_guarded in (False, True) if keys is not Keys.BARE else (True,):
            if is_guarded:
                patch_accelerate()
            for name, wrappers in OWN_WRAPPERS.items():
                accelerator, net = prepared(wrappers, 0.5)
                with warnings.catch_warnings():
                    # It says so where the keys are other ones.
                    warnings.simplefilter("ignore" if keys is Keys.BARE else "error")
                    accelerator.load_state(str(tmp_path / name))
                is_loaded = all(bool((one == 0.25).all()) for one in net.parameters())
                assert is_loaded, (name, is_guarded)

    assert run_ranks(2, run) == [0, 0]
    for name in OWN_WRAPPERS:
        found = {one.code: one.action.value for one in check(tmp_path / name).findings}
        assert found["nested-prefix"] == "ask", (name, found)
        if keys is not None:
            repair(tmp_path / name, policy=Policy(keys=keys))
    assert run_ranks(2, resume) == [0, 0]
