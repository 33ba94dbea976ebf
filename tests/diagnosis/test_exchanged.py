"""Models and optimizers under the names of others: stock load_state refuses them, and runs that
changed stay silent.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file, save_file
from torch import nn

from ckptfix import Keys, Policy, check, latest_checkpoint, repair
from ckptfix.storage import stores
from tests.diagnosis.test_mixed_saves import exchange
from tests.stores.servers import upload_folder

Optimizer = Callable[..., torch.optim.Optimizer]


class Run:
    """A run of two networks: the first has three tensors more than the second."""

    def __init__(
        self, optimizer: Optimizer = torch.optim.AdamW, *, is_crossed: bool = False
    ) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True)
        first = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.models = [first, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))]
        self.optimizers = [optimizer(model.parameters(), lr=0.01) for model in self.models]
        self.accelerator.prepare(*self.models)
        self.accelerator.prepare(*(self.optimizers[::-1] if is_crossed else self.optimizers))

    def save(self, root: Path, *, safe: bool = True) -> Path:
        """Make a step of each network, and save."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            model(torch.rand(4, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        self.accelerator.save_state(str(root), safe_serialization=safe)
        return root


def saves(
    root: Path, run: Run, numbers: Sequence[int] = (1, 2, 3), *, safe: bool = True
) -> list[Path]:
    return [run.save(root / f"checkpoint_{number}", safe=safe) for number in numbers]


def is_refused(root: Path, optimizer: Optimizer = torch.optim.AdamW) -> bool:
    """Return whether a new run does not load a checkpoint, or fails in its next step."""
    run = Run(optimizer)
    try:
        run.accelerator.load_state(str(root))
        run.save(root.parent / "again")
    except (RuntimeError, ValueError):
        return True
    return False


def told(root: Path) -> list[tuple[str, str]]:
    """Return severity and sentence of each finding."""
    return [(finding.severity.value, str(finding)) for finding in check(root).findings]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin", "optimizer.bin"])
def test_two_files_with_each_others_names_are_told(
    kind: str, at: int, optimizer: Optimizer, tmp_path: Path
) -> None:
    folders = saves(tmp_path, Run(optimizer), safe=kind != "pytorch_model.bin")
    partner = kind.replace(".", "_1.")
    exchange(folders[at], kind, partner)
    assert is_refused(folders[at], optimizer)
    words = (
        f"{kind}: it holds the keys and shapes of {partner} (expected its own, as in 2 "
        "neighbouring checkpoints)"
    )
    if kind != "model.safetensors":
        # torch wrote its name into the file.
        noun = "an optimizer" if kind == "optimizer.bin" else "a model"
        words = f"{kind}: it holds {noun}, saved as {partner} (expected its own state)"
    assert told(folders[at]) == [("warning", f"{words}; swapped with {partner}")]
    assert [check(root).findings for root in folders if root != folders[at]] == [(), ()]


@pytest.mark.parametrize("kind", ["model.safetensors", "optimizer.bin"])
def test_one_checkpoint_next_to_it_is_enough(kind: str, tmp_path: Path) -> None:
    first, second = saves(tmp_path, Run(), (1, 2))
    alone = Path(shutil.copytree(first, tmp_path / "alone"))
    for root in (first, alone):
        exchange(root, kind, kind.replace(".", "_1."), is_recorded=False)
    assert [severity for severity, _ in told(first)] == ["warning"]
    assert told(second) == [], "its optimizers fit its models"
    assert told(alone) == [], "a script may prepare its objects in any order"


def test_a_script_that_prepares_its_optimizers_in_another_order_is_not_told(
    tmp_path: Path,
) -> None:
    folders = saves(tmp_path, Run(is_crossed=True))
    assert [told(root) for root in folders] == [[], [], []]


@pytest.mark.parametrize("is_without", [False, True])
def test_an_optimizer_with_amsgrad_between_two_without(is_without: bool, tmp_path: Path) -> None:
    """A load takes over the option, so that the run goes on with another optimizer."""
    amsgrad = partial(torch.optim.AdamW, amsgrad=True)
    kinds = (amsgrad, torch.optim.AdamW) if is_without else (torch.optim.AdamW, amsgrad)
    run, other = (Run(kind) for kind in kinds)
    folders = saves(tmp_path / "run", run)
    (strange,) = saves(tmp_path / "other", other, (2,))
    assert [told(root) for root in folders] == [[], [], []]
    shutil.copy(strange / "optimizer.bin", folders[1])
    words = ("moments with max_exp_avg_sq", "moments without max_exp_avg_sq")
    holds, expected = words[::-1] if is_without else words
    ((severity, sentence),) = told(folders[1])
    assert severity == "warning"
    assert sentence.startswith(f"optimizer.bin: it holds {holds} (expected {expected}, as in 2")
    assert [told(root) for root in (folders[0], folders[2])] == [[], []]
    run = Run(kinds[0])
    run.accelerator.load_state(str(folders[1]))
    assert run.optimizers[0].param_groups[0]["amsgrad"] is not is_without


def test_a_run_that_turns_amsgrad_on_is_not_told(tmp_path: Path) -> None:
    run = Run()
    folders = saves(tmp_path, run, (1, 2))
    for group in (group for optimizer in run.optimizers for group in optimizer.param_groups):
        group["amsgrad"] = True
    for states in (each for optimizer in run.optimizers for each in optimizer.state.values()):
        states["max_exp_avg_sq"] = torch.zeros_like(states["exp_avg_sq"])
    folders += saves(tmp_path, run, (3, 4))
    assert [told(root) for root in folders if "warning" in str(told(root))] == []


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_moments_under_the_numbers_of_others_are_told(
    at: int, is_sorted: bool, tmp_path: Path
) -> None:
    """In the order of the file they are as in the checkpoints next to it."""
    folder = saves(tmp_path, Run())[at]
    saved = torch.load(folder / "optimizer.bin")
    states = {(number + 2) % 6: state for number, state in saved["state"].items()}
    saved["state"] = dict(sorted(states.items())) if is_sorted else states
    torch.save(saved, folder / "optimizer.bin")
    assert is_refused(folder)
    (finding,) = (each for each in check(folder).findings if each.path.name == "optimizer.bin")
    assert finding.code == "wrong-state"
    assert "moments of different shapes for 5 parameters" in str(finding)
    for healthy in tmp_path.glob("checkpoint_*"):
        assert healthy == folder or not told(healthy)


def of_groups(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.AdamW:
    every = list(parameters)
    return torch.optim.AdamW([{"params": every[:2]}, {"params": every[2:]}], lr=lr)


@pytest.mark.parametrize("optimizer", ["optimizer.bin", "optimizer_1.bin"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_param_groups_in_another_order_are_told(at: int, optimizer: str, tmp_path: Path) -> None:
    """Where they have as many parameters, torch gives each the moments of another one. The second
    network has two of two.
    """
    folder = saves(tmp_path, Run(of_groups))[at]
    saved = torch.load(folder / optimizer)
    saved["param_groups"].reverse()
    torch.save(saved, folder / optimizer)
    (finding,) = check(folder).findings
    is_refused_by_torch = optimizer == "optimizer.bin"
    words = (
        "2 param groups with 6 parameters (4, 2) (expected 2 param groups with 6 parameters (2, 4)"
        if is_refused_by_torch
        else "param groups that start at parameters 2, 0 (expected param groups that start at"
    )
    assert f"{optimizer}: it holds {words}" in str(finding)
    assert finding.severity.value == "warning"
    assert is_refused(folder, of_groups)
    healthy = [path for path in tmp_path.glob("checkpoint_*") if path != folder]
    assert [told(path) for path in healthy] == [[], []]
    # torch counts on from group to group: one checkpoint next to it is enough.
    shutil.rmtree(healthy.pop())
    assert [severity for severity, _ in told(folder)] == ["warning"]
    assert told(*healthy) == []


def test_numbers_in_the_order_of_the_module_are_healthy_in_every_checkpoint(tmp_path: Path) -> None:
    """FSDP's rekey_optim_state_dict leaves them, where the head is the first group."""
    folders = saves(tmp_path, Run(of_groups))
    for folder in folders:
        for optimizer in ("optimizer.bin", "optimizer_1.bin"):
            saved = torch.load(folder / optimizer)
            numbers = [group["params"] for group in saved["param_groups"]]
            places = {number: place for place, number in enumerate(numbers[1] + numbers[0])}
            for group in saved["param_groups"]:
                group["params"] = [places[number] for number in group["params"]]
            saved["state"] = {places[key]: states for key, states in saved["state"].items()}
            torch.save(saved, folder / optimizer)
    assert [told(folder) for folder in folders] == [[], [], []]


def test_parameters_that_are_trained_later_than_the_rest_are_not_told(tmp_path: Path) -> None:
    """torch keeps their states behind all others."""
    run = Run()
    frozen = list(run.models[0].parameters())[:2]
    for parameter in frozen:
        parameter.requires_grad = False
    run.save(tmp_path / "checkpoint_0")
    for parameter in frozen:
        parameter.requires_grad = True
    folders = saves(tmp_path, run)
    states = torch.load(folders[-1] / "optimizer.bin")["state"]
    assert list(states) != sorted(states)
    assert [told(folder) for folder in folders] == [[], [], []]


@pytest.mark.parametrize("kind", ["model.safetensors", "optimizer.bin"])
def test_a_file_that_was_copied_over_another_is_told(kind: str, tmp_path: Path) -> None:
    _, root, _ = saves(tmp_path, Run())
    partner = kind.replace(".", "_1.")
    shutil.copy(root / kind, root / partner)
    assert is_refused(root)
    assert f"{partner}: it holds the " in told(root)[0][1]


def rewrite(
    root: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """Change the tensors of the second model."""
    path = root / "model_1.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def grown(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a network that got a frozen head."""
    return {**state, "head.weight": torch.rand(1, 1), "head.bias": torch.rand(1)}


def deeper(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a network of another run with a layer more."""
    return {**state, "2.weight": torch.rand(1, 1), "2.bias": torch.rand(1)}


def adapted(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a network as PEFT wraps it."""
    wrapped = {
        f"base_model.model.{key.replace('.', '.base_layer.')}": value
        for key, value in state.items()
    }
    return {**wrapped, "base_model.model.0.lora_A.default.weight": torch.rand(2, 2)}


def compiled(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a network as torch.compile wraps it."""
    return {f"_orig_mod.{key}": value for key, value in state.items()}


def foreign(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a network of another run."""
    return {"encoder.weight": torch.rand(5, 5), "encoder.bias": torch.rand(5)}


@pytest.mark.parametrize("change", [foreign, lambda state: {}])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_model_of_another_run_is_told(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], at: int, tmp_path: Path
) -> None:
    root = saves(tmp_path, Run())[at]
    rewrite(root, change)
    assert is_refused(root)
    assert told(root)[0][0] == "warning"
    assert "(expected 4 tensors, as in 2 neighbouring checkpoints)" in told(root)[0][1]


def moments(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return moments under the keys of an optimizer."""
    return {
        f"state.{key[0]}.{name}_of_{key[2:]}": torch.rand_like(state[key])
        for key in state
        for name in ("exp_avg", "exp_avg_sq")
    }


def test_the_newest_model_with_keys_of_another_kind_is_passed_over(tmp_path: Path) -> None:
    """The optimizer next to it still has the parameters of the model of the run."""
    folders = saves(tmp_path, Run())
    rewrite(folders[-1], moments)
    assert [severity for severity, _ in told(folders[-1])] == ["warning"]
    with pytest.warns(UserWarning, match="passed over"):
        assert latest_checkpoint(tmp_path) == folders[-2]


def test_the_newest_model_with_more_layers_than_its_optimizer_trains_is_told(
    tmp_path: Path,
) -> None:
    """It is of another run. Or the script froze its first head and trains another one with the same
    shapes: then a resume from it is right.
    """
    folders = saves(tmp_path, Run())
    rewrite(folders[-1], deeper)
    assert [severity for severity, _ in told(folders[-1])] == ["warning"]
    assert latest_checkpoint(tmp_path) == folders[-1]


@pytest.mark.parametrize("change", [grown, adapted])
def test_a_model_that_changed_is_a_note_at_most(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """The newest checkpoint is the first one with the change, and then those before it are the last
    ones without.
    """
    folders = saves(tmp_path, Run(), (1, 2, 3, 4, 5))
    for changed in folders[:0:-1]:
        rewrite(changed, change)
        severities = {severity for root in folders for severity, words in told(root)}
        assert severities <= {"note"}


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        (
            lambda key: f"module.{key}",
            "4 of 4 keys with different wrappers, such as 'module.0.bias' (expected '0.bias'",
        ),
        (
            lambda key: f"_orig_mod.{key}",
            "4 of 4 keys with different wrappers, such as '_orig_mod.0.bias' (expected '0.bias'",
        ),
        (
            lambda key: f"module.{key}" if key.startswith("0") else key,
            "2 of 4 keys with different wrappers, such as 'module.0.bias' (expected '0.bias'",
        ),
        (
            lambda key: key.replace("1.bias", "1._orig_mod.bias"),
            "1 of 4 keys with different wrappers, such as '1._orig_mod.bias' (expected '1.bias'",
        ),
    ],
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_other_wrappers_than_in_the_checkpoints_next_to_it_are_told(
    change: Callable[[str], str], holds: str, at: int, tmp_path: Path
) -> None:
    root = saves(tmp_path, Run())[at]
    rewrite(root, lambda state: {change(key): value for key, value in state.items()})
    assert is_refused(root)
    [finding] = [finding for finding in check(root).findings if finding.code == "wrong-state"]
    assert finding.severity.value == "warning"
    assert (
        str(finding) == f"model_1.safetensors: it holds {holds}, as in 2 neighbouring checkpoints)"
    )
    if "ckptfix repair DIR --keys bare" in finding.advice:
        repair(root, policy=Policy(keys=Keys.BARE))
        assert check(root).status == 0
        assert not is_refused(root)
    else:
        assert holds.startswith("2 of 4 keys with different wrappers, such as 'module.0.bias'")


@pytest.mark.parametrize("at", [0, 1])
def test_wrappers_on_some_keys_are_told_by_one_checkpoint_next_to_it(
    at: int, tmp_path: Path
) -> None:
    folders = saves(tmp_path, Run(), (1, 2))
    rewrite(
        folders[at],
        lambda state: {
            f"module.{key}" if key[0] == "0" else key: value for key, value in state.items()
        },
    )
    assert is_refused(folders[at])
    assert [severity for severity, _ in told(folders[at])] == ["warning"]
    assert told(folders[1 - at]) == []


@pytest.mark.parametrize("at", [0, 1])
def test_one_of_two_models_that_changed_is_told_of_the_later_checkpoint_alone(
    at: int, tmp_path: Path
) -> None:
    """Both checkpoints had the note, so that ``check -r`` named none that is clean."""
    folders = saves(tmp_path, Run(), (1, 2))
    rewrite(folders[at], grown)
    assert is_refused(folders[at])
    assert [[severity for severity, _ in told(root)] for root in folders] == [[], ["note"]]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_tensor_with_and_without_a_wrapper_is_told_where_it_differs(
    at: int, tmp_path: Path
) -> None:
    folders = saves(tmp_path, Run())
    rewrite(folders[at], lambda state: {**state, "module.0.bias": state["0.bias"].clone()})
    assert is_refused(folders[at])
    assert [severity for severity, _ in told(folders[at])] == ["warning"]
    for root in folders[:at] + folders[at + 1 :]:
        rewrite(root, lambda state: {**state, "module.0.bias": state["0.bias"].clone()})
    rewrite(folders[at], lambda state: {key: state[key] for key in state if key != "module.0.bias"})
    assert [severity for severity, _ in told(folders[at])] == ["warning"]


def test_a_model_that_was_compiled_later_is_told_for_its_first_save_alone(tmp_path: Path) -> None:
    """Stock accelerate does not load the checkpoint before it, so that only a conversion explains
    it.
    """
    folders = saves(tmp_path, Run(), (1, 2, 3, 4))
    for root in folders[2:]:
        rewrite(root, compiled)
    assert is_refused(folders[2])
    assert {finding.code for root in folders for finding in check(root).findings} == {
        "wrapper-prefix"
    }


def test_wrappers_that_a_repair_removed_before_are_not_told(tmp_path: Path) -> None:
    folders = saves(tmp_path, Run())
    for root in folders:
        rewrite(root, compiled)
    for root in folders[:2]:
        repair(root, policy=Policy(keys=Keys.BARE))
    assert {finding.code for root in folders for finding in check(root).findings} == {
        "wrapper-prefix"
    }


def test_parameters_that_an_optimizer_gets_later_are_not_told(tmp_path: Path) -> None:
    run = Run()
    folders = saves(tmp_path, run, (1, 2))
    run.optimizers[1].add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    folders += saves(tmp_path, run, (3,))
    assert all("exchanged" not in words for root in folders for _, words in told(root))


def test_a_checkpoint_in_a_store_is_compared_for_two_requests(tmp_path: Path) -> None:
    folders = saves(tmp_path, Run())
    url = f"memory://{os.urandom(6).hex()}"
    upload_folder(tmp_path, url)
    before = stores.TRAFFIC.requests
    assert check(f"{url}/checkpoint_2").findings == ()
    healthy = stores.TRAFFIC.requests - before
    exchange(folders[1], "model.safetensors", "model_1.safetensors")
    upload_folder(folders[1], f"{url}/checkpoint_2")
    assert told(folders[1]) == [
        (one.severity.value, str(one)) for one in check(f"{url}/checkpoint_2").findings
    ]
    assert healthy < 20


def of_lbfgs(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(parameters, lr, max_iter=3)


class OneModel:
    """A run of one network, which makes a step before each save."""

    def __init__(self, optimizer: Callable[..., Any]) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.accelerator.prepare(self.model, self.optimizer)

    def step(self) -> None:
        def loss() -> torch.Tensor:
            self.optimizer.zero_grad()
            # Adafactor of transformers calls it without gradients.
            with torch.enable_grad():
                value: torch.Tensor = self.model(torch.rand(4, 4)).square().mean()
                value.backward()
            return value

        self.optimizer.step(loss)

    def save(self, root: Path) -> Path:
        self.step()
        self.accelerator.save_state(str(root))
        return root

    def load(self, root: Path) -> None:
        self.accelerator.load_state(str(root))
        self.step()


ADAFACTOR = partial(transformers.optimization.Adafactor, scale_parameter=False, relative_step=False)


@pytest.mark.parametrize("optimizer", [ADAFACTOR, torch.optim.Adafactor, of_lbfgs])
def test_an_optimizer_of_another_class_is_told_whatever_moments_its_run_keeps(
    optimizer: Callable[..., Any], tmp_path: Path
) -> None:
    """Moments that have no shape of a weight made each of its neighbours count as damaged."""
    run = OneModel(optimizer)
    roots = [run.save(tmp_path / f"checkpoint_{number}") for number in range(3)]
    assert [told(root) for root in roots] == [[], [], []]
    another = OneModel(torch.optim.AdamW).save(tmp_path / "another")
    shutil.copy(another / "optimizer.bin", roots[1])
    with pytest.raises((KeyError, TypeError)):
        OneModel(optimizer).load(roots[1])
    ((severity, sentence),) = told(roots[1])
    assert severity == "warning"
    assert sentence.startswith("optimizer.bin: it holds param groups without ")


@pytest.mark.parametrize(("file", "dtype"), [("model.safetensors", "I8"), ("optimizer.bin", "F16")])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_what_loads_rounded_between_two_checkpoints_is_told(
    file: str, dtype: str, optimizer: Callable[..., Any], tmp_path: Path
) -> None:
    run = OneModel(optimizer)
    roots = [run.save(tmp_path / f"checkpoint_{number}") for number in range(3)]
    path = roots[1] / file
    if file == "model.safetensors":
        weights = {key: value.mul(9).to(torch.int8) for key, value in load_file(path).items()}
        save_file(weights, path, metadata={"format": "pt"})
    else:
        state = torch.load(path)
        for states in state["state"].values():
            states |= {name: value.half() for name, value in states.items() if name != "step"}
        torch.save(state, path)
    OneModel(optimizer).load(roots[1])
    words = [sentence for severity, sentence in told(roots[1]) if severity == "warning"]
    assert any(
        f" in {dtype} (expected F32, as in 2 neighbouring checkpoints)" in sentence
        for sentence in words
    )
    assert [told(root) for root in (roots[0], roots[2])] == [[], []]


@pytest.mark.parametrize("is_crossed", [False, True])
def test_a_lone_save_names_optimizers_that_fit_the_model_of_another_number(
    is_crossed: bool, tmp_path: Path
) -> None:
    """A script may cross its optimizers: only the one that saved it knows."""
    root = Run(is_crossed=is_crossed).save(tmp_path / "checkpoint")
    words = [
        "whether optimizer.bin belongs to model.safetensors: its moments have the shapes of "
        "'model_1.safetensors'",
        "whether optimizer_1.bin belongs to model_1.safetensors: its moments have the shapes of "
        "'model.safetensors'",
    ]

    def named() -> list[str]:
        said = check(root).not_checked
        return [one.partition(", as if")[0] for one in said if " belongs to " in one]

    assert named() == (words if is_crossed else [])
    if not is_crossed:
        exchange(root, "model.safetensors", "model_1.safetensors")
        assert is_refused(root)
        assert named() == words
