"""An object that refuses its state in the middle of a load: everything before it is taken back, or
is named.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ckptfix.training.loading import commit
from ckptfix.training.loading.draft import Draft
from ckptfix.training.loading.load_report import LoadError, LoadPolicy, LoadReport
from ckptfix.training.loading.load_state import (
    load_checkpoint_tolerant,
    load_here,
    load_state_tolerant,
)
from ckptfix.training.ranks import Ranks
from fixtures.models import ConvNorm, Tied, TwoLayer
from tests.training.loading_runs import Loader, Run, make_run, reset, seeded


class Counter:
    """A state that is changed in place, as lists and arrays often are."""

    def __init__(self, start: int = 0) -> None:
        self.values = [start, {"array": numpy.full(3, start), "nan": float("nan")}]
        self.tensor = torch.full((4,), float(start))
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self.values[:] = state["values"]
        self.tensor.copy_(state["tensor"])

    def seen(self) -> str:
        return repr((self.values, self.tensor.tolist(), self.loads))


class Refusing(Counter):
    """Takes half of its state, draws a random number, and refuses."""

    refuses = True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.random()
        numpy.random.rand()
        torch.rand(1)
        if not self.refuses:
            super().load_state_dict(state)
        self.values = state["values"]
        if self.refuses:
            raise KeyError("colour")


class Momentum(torch.optim.SGD):  # type: ignore[misc]
    """An optimizer with a load_state_dict of its own, which works in place."""

    refuses = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for old, new in zip(self.param_groups, state["param_groups"], strict=True):
            old["lr"] = new["lr"]
        if self.refuses:
            raise ValueError("no such optimizer")
        super().load_state_dict(state)


def made(seed: int, last: Any) -> tuple[Run, Callable[[], Any]]:
    """Return a run with one of everything, ``last`` its last object, and what shows all of its
    state.
    """
    run = make_run(
        seeded(TwoLayer, seed), seeded(Tied, seed + 1), seeded(ConvNorm, seed + 2), scheduler=True
    )
    run.models[0](torch.ones(2, 6)).sum().backward()
    run.optimizers[0].step()
    momentum = Momentum(run.models[0].parameters(), lr=0.1 * seed, momentum=0.9)
    run.accelerator._optimizers.append(momentum)
    run.optimizers.append(momentum)
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=float(seed))
    loader = Loader(seed)
    run.accelerator._dataloaders.append(loader)
    counter = Counter(seed)
    run.accelerator.register_for_checkpointing(counter, last)
    run.accelerator.step = seed

    def seen() -> Any:
        return (
            run.digest(),
            counter.seen(),
            last.seen(),
            loader.state,
            run.accelerator.scaler.state_dict(),
        )

    return run, seen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run, _ = made(1, Refusing(1))
    run.accelerator.save_state(str(tmp_path / "c"))
    reset()
    return tmp_path / "c"


def load(run: Run, folder: Path) -> LoadReport:
    return load_state_tolerant(run.accelerator, folder, policy=None)


UNDONE = "all changes were undone; nothing is modified"


def fails(work: Callable[[], object], said: str, *, is_undone: bool = True) -> str:
    """Expect an error of a load that was undone, or was not; return what it says."""
    with pytest.raises(LoadError, match=said) as caught:
        work()
    assert caught.value.modified == (not is_undone)
    assert (UNDONE in str(caught.value)) == is_undone
    return str(caught.value)


def test_everything_is_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = made(5, Refusing(5))
    before, kept = seen(), [optimizer.state for optimizer in run.optimizers]
    said = fails(
        lambda: load(run, folder),
        r"custom 1 \(Refusing\) could not load its state: KeyError: 'colour'",
    )
    assert 'next: pass policy=LoadPolicy(custom="ignore") to leave it unchanged' in said
    assert seen() == before
    assert all(one is other.state for one, other in zip(kept, run.optimizers, strict=True))
    assert run.models[1].embed.weight is run.models[1].lm_head.weight
    monkeypatch.setattr(Refusing, "refuses", False)
    assert load(run, folder).is_complete
    assert seen() != before


def test_a_load_on_some_ranks_only_is_undone_too_and_says_so(folder: Path) -> None:
    run, seen = made(5, Refusing(5))
    before = seen()
    fails(lambda: load_here(run.accelerator, folder, LoadPolicy()), UNDONE)
    assert seen() == before


def test_what_was_kept_for_the_way_back_changes_nothing_in_a_load_that_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    monkeypatch.setattr(Refusing, "refuses", False)
    for stock in (True, False):
        run, seen = made(5, Refusing(5))
        run.accelerator.load_state(str(folder)) if stock else load(run, folder)
        results.append(seen())
        reset()
    assert results[0] == results[1]


class Spoilt(Refusing):
    """Changes in place what it then refuses, whatever it is given: there is no way back to what it
    was.
    """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.append("spoilt")
        raise KeyError("colour")


def test_what_cannot_be_taken_back_is_named(folder: Path) -> None:
    run, seen = made(5, Spoilt(5))
    before = seen()
    said = r"custom 1 \(Spoilt\) could not be undone"
    assert "models 0" not in fails(lambda: load(run, folder), said, is_undone=False)
    assert seen()[:2] == before[:2]


class Shy(Refusing):
    """Has no state before it is given one."""

    given = False

    def state_dict(self) -> dict[str, Any]:
        if self.given:
            return super().state_dict()
        raise AttributeError("not loaded yet")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = True
        if self.refuses:
            raise KeyError("colour")


def test_an_object_without_a_state_of_its_own_yet(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = made(5, Shy(5))
    said = r"custom 1 \(Shy\) could not be undone"
    fails(lambda: load(run, folder), said, is_undone=False)
    monkeypatch.setattr(Refusing, "refuses", False)
    assert load(run, folder).is_complete


def test_an_optimizer_with_a_way_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = made(5, Counter(5))
    before = seen()
    monkeypatch.setattr(Momentum, "refuses", True)
    fails(lambda: load(run, folder), r"optimizers 3 \(Momentum\) could not load its state")
    monkeypatch.undo()
    assert seen() == before


class Own(TwoLayer):
    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(state, *args, **kwargs)
        raise RuntimeError("not mine after all")
        return result


def test_a_model_with_a_way_of_its_own(tmp_path: Path) -> None:
    run = make_run(seeded(TwoLayer, 1), seeded(TwoLayer, 2))
    run.accelerator.save_state(str(tmp_path / "c"))
    reset()
    run = make_run(seeded(TwoLayer, 8), seeded(Own, 9))
    before = run.digest()
    fails(lambda: load(run, tmp_path / "c"), r"models 1 \(Own\) could not load its state")
    assert run.digest() == before
    lone = seeded(Own, 9)
    fails(lambda: load_checkpoint_tolerant(lone, tmp_path / "c" / "model.safetensors"), UNDONE)
    assert torch.equal(lone.fc1.weight, run.models[1].fc1.weight)


def test_what_a_hook_did_is_taken_back_with_the_rest(folder: Path) -> None:
    run, seen = made(5, Refusing(5))
    run.accelerator.register_load_state_pre_hook(
        lambda models, path: models[0].fc1.weight.data.fill_(3.0)
    )
    before = seen()
    fails(lambda: load(run, folder), UNDONE)
    assert seen() == before


def with_scheduler(seed: int) -> Run:
    """Register a scheduler for checkpointing, as accelerate's documentation does."""
    run = make_run(seeded(TwoLayer, seed), scheduler=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizers[0], gamma=0.5)
    run.accelerator.register_for_checkpointing(scheduler)
    return run


def no_room(value: Any) -> Any:
    raise MemoryError("no room")


def test_a_load_in_which_no_code_of_the_script_runs_copies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_scheduler(1)
    run.accelerator.save_state(str(tmp_path / "c"))
    copied: list[Any] = []
    monkeypatch.setattr(commit, "copied", copied.append)
    assert load(run, tmp_path / "c").is_complete
    assert copied == []


@pytest.mark.parametrize(
    ("state", "why"),
    [([1, 2], "not a scheduler state dict"), ({"samples": 3, "losses": []}, "it lacks")],
)
def test_a_scheduler_among_the_custom_objects_is_not_given_what_is_no_state_of_it(
    tmp_path: Path, state: object, why: str
) -> None:
    with_scheduler(1).accelerator.save_state(str(tmp_path / "c"))
    torch.save(state, tmp_path / "c" / "custom_checkpoint_0.pkl")
    reset()
    run = with_scheduler(2)
    before = run.digest()
    said = rf"custom 0 \(ExponentialLR\): .*{why}"
    with pytest.raises(LoadError, match=said) as caught:
        load(run, tmp_path / "c")
    assert run.digest() == before
    assert "nothing was modified" in str(caught.value)


def test_no_room_for_a_copy_stops_no_load_that_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "copied", no_room)
    run, _ = made(5, Refusing(5))
    with monkeypatch.context() as patch:
        patch.setattr(Refusing, "refuses", False)
        assert load(run, folder).is_complete
    said = r"models 0 \(TwoLayer\), .*, custom 1 \(Refusing\) could not be"
    fails(lambda: load(run, folder), said, is_undone=False)


@pytest.mark.parametrize("of_model", [True, False], ids=["model", "optimizer"])
def test_a_hook_of_torch_that_raises(tmp_path: Path, of_model: bool) -> None:
    run = make_run(seeded(TwoLayer, 1))
    run.accelerator.save_state(str(tmp_path / "c"))
    reset()
    run = make_run(seeded(TwoLayer, 5))

    def refuse(*_: Any) -> None:
        raise ValueError("not this one")

    before = run.digest()
    if of_model:
        run.models[0].fc2._register_load_state_dict_pre_hook(refuse)
    else:
        run.optimizers[0].register_load_state_dict_post_hook(refuse)
    fails(lambda: load(run, tmp_path / "c"), f"not this one; {UNDONE}")
    assert run.digest() == before


def test_a_failure_of_torch_itself_leaves_what_was_loaded_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(seeded(TwoLayer, 1))
    run.accelerator.save_state(str(tmp_path / "c"))

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory for the state")

    monkeypatch.setattr(torch.optim.AdamW, "__setstate__", out_of_memory)
    said = r"models 0 \(TwoLayer\), optimizers 0 \(AdamW\) could not be"
    fails(lambda: load(run, tmp_path / "c"), said, is_undone=False)


@pytest.mark.parametrize("is_undone", [True, False])
def test_what_hooks_modified_is_undone_when_a_commit_cannot_begin(
    tmp_path: Path, is_undone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "Everything was undone" was said of weights that hooks had changed."""
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    tensors = commit.Tensors([model])
    model.weight.data.zero_()
    monkeypatch.setattr(commit, "current_random", lambda: no_room(None))
    if not is_undone:
        monkeypatch.setattr(commit.Tensors, "restore", no_room)
    draft = Draft(path=tmp_path, policy=LoadPolicy())
    ending = UNDONE if is_undone else "the weights of the models could not be undone"
    fails(
        lambda: commit.commit_on_all(Ranks(None), draft, None, tensors), ending, is_undone=is_undone
    )
    assert torch.equal(model.weight, before) == is_undone
