"""A folder of one model and one optimizer that are not those of its run: only the checkpoints next
to it show that.
"""

import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckptfix import latest_checkpoint
from ckptfix.checkpoint.neighbours import Siblings
from ckptfix.diagnosis.check import check
from ckptfix.diagnosis.findings.base import Resume
from tests.commanding import Said, said
from tests.diagnosis.builders import new_accelerator
from tests.diagnosis.test_resumable import Change, edited

__all__ = ["said"]

Tensors = dict[str, torch.Tensor]


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self, *, frozen: int = 0, extra: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)
        if extra:
            self.register_buffer("scale", torch.ones(1))
        for parameter in list(self.parameters())[:frozen]:
            parameter.requires_grad_(False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.first(batch))
        return result


class Run:
    """A run of one network."""

    def __init__(self, net: nn.Module | None = None, *, groups: int = 1) -> None:
        self.accelerator = new_accelerator()
        self.net = net or Net()
        trained = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        cut = len(trained) // groups
        parts = [trained[:cut], trained[cut:]] if groups == 2 else [trained]
        self.optimizer = torch.optim.AdamW([{"params": part} for part in parts], lr=0.01)
        self.accelerator.prepare(self.net, self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(torch.rand(5, 4)).sum().backward()
        self.optimizer.step()

    def save(self, root: Path) -> Path:
        self.step()
        self.accelerator.save_state(str(root))
        return root


def saves(root: Path, run: Run, numbers: tuple[int, ...] = (1, 2, 3)) -> list[Path]:
    return [run.save(root / f"checkpoint_{number}") for number in numbers]


def is_refused(root: Path) -> bool:
    """Return whether a new run does not load a checkpoint, or fails in its next step."""
    run = Run()
    try:
        run.accelerator.load_state(str(root))
        run.step()
    except (RuntimeError, ValueError, KeyError):
        return True
    return False


def of_model(change: Callable[[Tensors], Tensors]) -> Change:
    """Return a change of a checkpoint that changes the tensors of its model."""

    def write(root: Path) -> None:
        path = root / "model.safetensors"
        save_file(change(load_file(path)), path, {"format": "pt"})

    return write


def regroup(state: dict[str, Any]) -> None:
    first = state["param_groups"][0]
    state["param_groups"].append({**first, "params": first["params"][2:]})
    first["params"] = first["params"][:2]


def shrink(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].pop()
    state["state"].pop(3)


def shuffle(state: dict[str, Any]) -> None:
    moments = state["state"]
    moments[0], moments[1] = moments[1], moments[0]


WRONG: Mapping[str, Change] = {
    "every key renamed": of_model(lambda state: {f"body.{key}": state[key] for key in state}),
    "wrapped keys": of_model(lambda state: {f"module.{key}": state[key] for key in state}),
    # Both headers have the same length, and so have the files.
    "every key renamed, same size": of_model(
        lambda state: {key.swapcase(): state[key] for key in state}
    ),
    "moments of two parameters exchanged": edited(shuffle),
    "a tensor lost": of_model(
        lambda state: {key: state[key] for key in state if key != "last.bias"}
    ),
    "another shape": of_model(lambda state: {**state, "last.bias": torch.rand(7)}),
}
"""Changes of a file alone."""

POSSIBLE: Mapping[str, Change] = {
    "a tensor more": of_model(lambda state: {**state, "scale": torch.ones(1)}),
    "two param groups": edited(regroup),
    "a parameter fewer": edited(shrink),
}
"""Changes that a script can make on purpose: a buffer, other param groups, a frozen bias."""


class Normed(Net):
    """A network with tensors that no optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(batch)))
        return result


def severities(root: Path) -> set[str]:
    return {finding.severity.value for finding in check(root).findings}


@pytest.mark.parametrize("name", [*WRONG, *POSSIBLE])
def test_a_checkpoint_between_others_that_differs_from_all_is_not_clean(
    name: str, tmp_path: Path
) -> None:
    folders = saves(tmp_path, Run())
    {**WRONG, **POSSIBLE}[name](folders[1])
    assert is_refused(folders[1])
    assert "warning" in severities(folders[1])
    assert any(finding.resume is Resume.FAILS for finding in check(folders[1]).findings)
    assert [check(root).findings for root in (folders[0], folders[2])] == [(), ()]


@pytest.mark.parametrize("to", ["weights", "buffers", "statistics"])
def test_a_run_that_saves_other_keys_since_is_a_note_at_most(to: str, tmp_path: Path) -> None:
    """torch's parametrizations rename the keys of ``weight_norm``, and load both; libraries stopped
    to save indexes of positions. A script may normalize by each batch alone from some save on.
    """

    class Layer(Normed):
        def __init__(self, *, is_newer: bool) -> None:
            super().__init__()
            if to == "statistics":
                self.norm = nn.BatchNorm1d(3, track_running_stats=not is_newer)
            elif to == "buffers":
                ids = torch.arange(3)
                self.first.register_buffer("position_ids", ids, persistent=not is_newer)
            elif is_newer:
                torch.nn.utils.parametrizations.weight_norm(self.first)
            else:
                torch.nn.utils.weight_norm(self.first)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        folders = saves(tmp_path, Run(Layer(is_newer=False)))
    folders += saves(tmp_path, Run(Layer(is_newer=True)), (4,))
    assert severities(folders[3]) == {"note"}
    assert latest_checkpoint(tmp_path) == folders[3]


@pytest.mark.parametrize("name", POSSIBLE)
def test_the_newest_checkpoint_is_a_note_where_a_script_may_have_changed(
    name: str, tmp_path: Path
) -> None:
    folders = saves(tmp_path, Run())
    POSSIBLE[name](folders[2])
    assert is_refused(folders[2])
    assert severities(folders[2]) == {"note"}
    assert latest_checkpoint(tmp_path) == folders[2]


@pytest.mark.parametrize(
    "changed",
    [
        lambda: Run(Net(extra=True)),
        lambda: Run(Net(frozen=2)),
        lambda: Run(groups=2),
        lambda: Run(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))),
    ],
    ids=["a buffer", "frozen layers", "param groups", "another network"],
)
def test_a_script_that_changed_is_a_note_at_most(
    changed: Callable[[], Run], tmp_path: Path
) -> None:
    """The changed script goes on in the same folder; its first checkpoint differs from all before
    it.
    """
    folders = saves(tmp_path, Run())
    run = changed()
    for number in (4, 5, 6):
        folders += saves(tmp_path, run, (number,))
        assert set().union(*map(severities, folders)) <= {"note"}
        assert latest_checkpoint(tmp_path) == folders[-1]


def test_a_changed_script_that_begins_again_in_the_same_folder_is_a_note_at_most(
    tmp_path: Path,
) -> None:
    """Its checkpoints have lower numbers than the leftover ones of the old script, which it cannot
    load.
    """
    folders = saves(tmp_path, Run(), (1, 2, 3, 4))
    renamed = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for count, root in enumerate(folders, 1):
        shutil.rmtree(root)
        Run(renamed).save(root)
        assert set().union(*map(severities, folders[:count])) <= {"note"}


def test_unfreezing_within_a_run_is_a_note_at_most(tmp_path: Path) -> None:
    run = Run(Net(frozen=2))
    folders = saves(tmp_path, run)
    parameters = [one.requires_grad_() for one in run.net.parameters() if not one.requires_grad]
    run.optimizer.add_param_group({"params": parameters})
    for number in (4, 5, 6):
        folders += saves(tmp_path, run, (number,))
        assert set().union(*map(severities, folders)) <= {"note"}


def test_a_scheduler_that_adds_options_later_is_not_told(tmp_path: Path) -> None:
    run = Run()
    folders = saves(tmp_path, run)
    torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.1, total_steps=9)
    folders += saves(tmp_path, run, (4,))
    assert [check(root).findings for root in folders] == [()] * 4


def test_a_checkpoint_before_the_first_step_is_not_told(tmp_path: Path) -> None:
    run = Run()
    run.accelerator.save_state(str(tmp_path / "checkpoint_0"))
    folders = [tmp_path / "checkpoint_0", *saves(tmp_path, run)]
    assert [check(root).findings for root in folders] == [()] * 4


def _in_half(state: dict[str, Any]) -> None:
    for moments in state["state"].values():
        moments |= {name: value.half() for name, value in moments.items() if name != "step"}


HALVED: Mapping[str, tuple[Change, str]] = {
    "weights in F16": (
        of_model(
            lambda state: {
                key: tensor.half() if tensor.is_floating_point() else tensor
                for key, tensor in state.items()
            }
        ),
        "model.safetensors: it holds 8 tensors in F16 (expected F32",
    ),
    "moments in F16": (edited(_in_half), "optimizer.bin: it holds 12 tensors in F16 (expected F32"),
}
UNDECIDED: Mapping[str, tuple[Change, str]] = {
    "every key renamed": (
        WRONG["every key renamed"],
        "model.safetensors: it holds 9 tensors, 9 of them with different keys or shapes "
        "(expected 9 tensors",
    ),
    "a tensor more": (
        POSSIBLE["a tensor more"],
        "model.safetensors: it holds 10 tensors, 1 of them with different keys or shapes "
        "(expected 9 tensors",
    ),
    "two param groups": (
        POSSIBLE["two param groups"],
        "optimizer.bin: it holds 2 param groups with 6 parameters (2, 4) (expected 1 param "
        "group with 6 parameters",
    ),
    **HALVED,
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_the_later_of_two_checkpoints_that_differ_is_a_note(
    name: str, tmp_path: Path, said: Said
) -> None:
    """``total_limit=2`` keeps two: nothing shows which of them is wrong, and both were clean."""
    folders = saves(tmp_path, Run(Normed()), (1, 2))
    change, words = UNDECIDED[name]
    change(folders[1])
    assert check(folders[0]).findings == ()
    [finding] = [one for one in check(folders[1]).findings if one.code == "wrong-state"]
    assert (finding.severity.value, finding.differs) == ("note", True)
    assert str(finding) == f"{words}, as in checkpoint_1)"
    assert "resume from checkpoint_1, or copy both files again" in finding.advice
    assert latest_checkpoint(tmp_path) == folders[1]
    _, out, _ = said("check", "-r", tmp_path)
    assert f"the newest one without problems: {folders[0]}" in out


@pytest.mark.parametrize("name", UNDECIDED)
def test_a_change_of_the_earlier_of_two_checkpoints_is_a_note(name: str, tmp_path: Path) -> None:
    """Who resumes takes the later one: it is the one to compare with the script. Of two precisions
    the lower one is told, wherever it is.
    """
    folders = saves(tmp_path, Run(Normed()), (1, 2))
    UNDECIDED[name][0](folders[0])
    lower, told = (folders if name in HALVED else folders[::-1])[0], []
    for root in folders:
        told += [(one.code, root) for one in check(root).findings if one.differs]
    assert told == [("wrong-state", lower)]
    assert check(folders[1]).status == 0


def test_two_checkpoints_in_types_of_16_bits_are_told_once(tmp_path: Path) -> None:
    folders = saves(tmp_path, Run(), (1, 2))
    for root, dtype in zip(folders, (torch.float16, torch.bfloat16), strict=True):
        path = root / "model.safetensors"
        save_file({key: one.to(dtype) for key, one in load_file(path).items()}, path)
    (finding,) = [one for root in folders for one in check(root).findings if one.differs]
    assert str(finding).endswith("4 tensors in BF16 (expected F16, as in checkpoint_1)")


def test_two_runs_of_a_sweep_are_not_compared(tmp_path: Path) -> None:
    for name in UNDECIDED:
        folders = [Run(Normed()).save(tmp_path / name / f"run_{number}") for number in (1, 2)]
        UNDECIDED[name][0](folders[1])
        siblings = Siblings([tmp_path], is_recursive=True)
        for root in folders:
            found = check(root, siblings=siblings).findings
            assert not any(one.differs for one in found), (name, found)


@pytest.mark.parametrize("at", [0, 1])
def test_an_emptied_model_is_told_itself_whatever_the_only_neighbour_is(
    at: int, tmp_path: Path
) -> None:
    folders = saves(tmp_path, Run(), (1, 2))
    of_model(lambda state: {})(folders[at])
    assert [check(root).status for root in folders] == [int(at == 0), int(at == 1)]
    assert check(folders[1 - at]).findings == ()


class Sum(nn.Module):  # type: ignore[misc]
    """A layer with a part that is called ``module``, which may be new in a phase of the run."""

    def __init__(self, *, has_module: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))
        if has_module:
            self.module = nn.Linear(2, 2, bias=False).requires_grad_(False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch @ self.weight


@pytest.mark.parametrize("count", [1, 2])
def test_a_new_module_of_the_name_of_a_wrapper_is_a_note_at_most(
    tmp_path: Path, count: int
) -> None:
    saves(tmp_path, Run(Sum()), tuple(range(1, count + 1)))
    run = Run(Sum(has_module=True))
    newest = run.save(tmp_path / "checkpoint_9")
    assert load_file(newest / "model.safetensors").keys() == {"weight", "module.weight"}
    run.accelerator.load_state(str(newest))
    assert severities(newest) <= {"note"}
    assert latest_checkpoint(tmp_path) == newest


def test_a_new_module_is_told_between_checkpoints_without_it(tmp_path: Path) -> None:
    saves(tmp_path, Run(Sum()))
    middle = Run(Sum(has_module=True)).save(tmp_path / "checkpoint_2")
    with pytest.raises(RuntimeError, match="Unexpected key"):
        Run(Sum()).accelerator.load_state(str(middle))
    assert severities(middle) == {"warning"}


def _in_halves(state: Tensors) -> Tensors:
    return {key: tensor.bfloat16() for key, tensor in state.items()}


def _wrapped(state: Tensors) -> Tensors:
    return {f"module.{key}": tensor for key, tensor in state.items()}


@pytest.mark.parametrize("change", [_in_halves, _wrapped])
def test_runs_of_a_sweep_differ(change: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    folders = [Run().save(tmp_path / f"sweep/run_{number}") for number in range(1, 6)]
    of_one_run = [Run().save(tmp_path / f"run/ckpt_{number}") for number in range(1, 6)]
    siblings = Siblings([tmp_path], is_recursive=True)
    for changed in (folders[2], of_one_run[2]):
        of_model(change)(changed)
    assert [check(root, siblings=siblings).status for root in folders] == [0] * 5
    assert [check(root, siblings=siblings).status for root in of_one_run] == [0, 0, 1, 0, 0]
