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
from safetensors.torch import load_file, save_file
from torch import nn

from ckptfix import Keys, Policy, check, repair
from ckptfix.storage import stores
from tests.diagnosis.builders import new_accelerator
from tests.diagnosis.test_mixed_saves import exchange
from tests.stores.servers import upload_folder

Optimizer = Callable[..., torch.optim.Optimizer]


class Run:
    """A run of two networks: the first has three tensors more than the second."""

    def __init__(
        self, optimizer: Optimizer = torch.optim.AdamW, *, is_crossed: bool = False
    ) -> None:
        self.accelerator = new_accelerator()
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


@pytest.mark.parametrize(
    ("kind", "at", "optimizer"),
    [
        *(("model.safetensors", at, torch.optim.AdamW) for at in range(3)),
        *(("optimizer.bin", at, torch.optim.AdamW) for at in range(3)),
        ("optimizer.bin", 1, torch.optim.SGD),
        ("pytorch_model.bin", 1, torch.optim.AdamW),
    ],
)
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
def test_of_two_checkpoints_the_later_one_has_a_note(kind: str, tmp_path: Path) -> None:
    first, second = saves(tmp_path, Run(), (1, 2))
    alone = Path(shutil.copytree(first, tmp_path / "alone"))
    for root in (first, alone):
        exchange(root, kind, kind.replace(".", "_1."), is_recorded=False)
    assert told(first) == []
    assert [severity for severity, _ in told(second)] == ["note"], "either may be wrong"
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
    ((severity, sentence),) = told(folders[1])
    assert severity == "warning"
    assert sentence == (
        "optimizer.bin: it holds different moments for 6 parameters (expected the moments of its "
        "parameters, as in 2 neighbouring checkpoints)"
    )
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


def of_groups(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.AdamW:
    every = list(parameters)
    return torch.optim.AdamW([{"params": every[:2]}, {"params": every[2:]}], lr=lr)


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


@pytest.mark.parametrize(
    ("change", "at"), [(foreign, 0), (foreign, 1), (foreign, 2), (lambda state: {}, 2)]
)
def test_the_model_of_another_run_is_told(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], at: int, tmp_path: Path
) -> None:
    root = saves(tmp_path, Run())[at]
    rewrite(root, change)
    assert is_refused(root)
    # No script goes on with the optimizer of another model.
    assert told(root)[0][0] == "warning"
    assert "(expected 4 tensors, as in 2 neighbouring checkpoints)" in told(root)[0][1]


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
    ("wrapper", "holds"),
    [
        ("module.", "keys that begin with 'module.' (expected no wrapper"),
        ("_orig_mod.", "keys that begin with '_orig_mod.' (expected no wrapper"),
        ("", "4 tensors, 2 of them with different keys or shapes (expected 4 tensors"),
    ],
)
def test_other_wrappers_than_before_and_after_are_told(
    wrapper: str, holds: str, tmp_path: Path
) -> None:
    root = saves(tmp_path, Run())[1]
    if wrapper:
        rewrite(root, lambda state: {f"{wrapper}{key}": state[key] for key in state})
    else:
        rewrite(
            root,
            lambda state: {
                f"module.{key}" if key.startswith("0") else key: state[key] for key in state
            },
        )
    assert is_refused(root)
    [finding] = [finding for finding in check(root).findings if finding.code == "wrong-state"]
    assert finding.severity.value == "warning"
    assert (
        str(finding) == f"model_1.safetensors: it holds {holds}, as in 2 neighbouring checkpoints)"
    )
    if wrapper:
        assert "ckptfix repair DIR --keys bare" in finding.advice
        repair(root, policy=Policy(keys=Keys.BARE))
        assert check(root).status == 0
        assert not is_refused(root)


def test_wrappers_that_only_the_newest_checkpoint_has_are_a_note(tmp_path: Path) -> None:
    """A person overwrote a model with the state dict of its DDP wrapper: ``check -r`` named the
    folder as clean, and ``load_state`` refused it.
    """
    root = saves(tmp_path, Run())[-1]
    rewrite(root, lambda state: {f"module.{key}": state[key] for key in state})
    assert is_refused(root)
    [finding] = [finding for finding in check(root).findings if finding.code == "wrong-state"]
    assert finding.severity.value == "note"
    assert str(finding) == (
        "model_1.safetensors: it holds keys that begin with 'module.' (expected no wrapper, as in 2 "
        "neighbouring checkpoints)"
    )


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
    severities = ["warning" if at == 1 else "note"]
    assert [severity for severity, _ in told(folders[at])] == severities
    for root in folders[:at] + folders[at + 1 :]:
        rewrite(root, lambda state: {**state, "module.0.bias": state["0.bias"].clone()})
    rewrite(folders[at], lambda state: {key: state[key] for key in state if key != "module.0.bias"})
    assert [severity for severity, _ in told(folders[at])] == severities


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
        self.accelerator = new_accelerator()
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


def test_a_checkpoint_before_the_first_step_shows_no_class_of_an_optimizer(tmp_path: Path) -> None:
    """An optimizer of SGD next to it was healthy, and the one of the run had the note."""
    run, another = OneModel(torch.optim.AdamW), OneModel(partial(torch.optim.SGD, momentum=0.9))
    run.accelerator.save_state(str(tmp_path / "checkpoint_0"))
    roots = [run.save(tmp_path / f"checkpoint_{number}") for number in (1, 2)]
    strange = another.save(tmp_path / "another")
    shutil.copy(strange / "optimizer.bin", roots[0])
    assert [severity for severity, _ in told(roots[0])] == ["warning"]
    assert told(roots[1]) == []


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
