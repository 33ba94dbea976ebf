"""The names of a real run's parameters, whatever they come from: the save, a factory, or the class
of a config.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator as StockAccelerator
from safetensors.torch import save_model

import ckptfix
from ckptfix.checkpoint.run_states import parameter_names
from ckptfix.errors import OperationError, UsageError
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.optimizer_opening import open_optimizers
from ckptfix.tensors.optimizers import OptimizerState
from ckptfix.tensors.parameter_sources import Factory, name_optimizers
from tests.sampling import one_of

transformers = pytest.importorskip("transformers")

TINY: dict[str, Callable[[], Any]] = {
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64, tie_word_embeddings=True,
    ),
    "Qwen2ForCausalLM": lambda: transformers.Qwen2Config(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64, tie_word_embeddings=False,
    ),
    "BertForMaskedLM": lambda: transformers.BertConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=64,
    ),
    "GPT2LMHeadModel": lambda: transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32),
    "T5ForConditionalGeneration": lambda: transformers.T5Config(
        d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2, vocab_size=64
    ),
    "ViTForImageClassification": lambda: transformers.ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8
    ),
}  # fmt: skip
"""Classes of transformers -> a config of a model of some kilobytes."""


def decay_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the param groups that most scripts make: weight decay for matrices alone."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.dim() < 2], "weight_decay": 0.0},
    ]


def marked(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Make one step in which each parameter gets a gradient of its own; return name -> its first
    moment.
    """
    wanted = {}
    for place, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, float(place + 1))
            wanted[name] = (place + 1) * 0.1
    optimizer.step()
    return wanted


def held(state: OptimizerState, file: Path) -> dict[str, float]:
    """Return name -> the first number of its first moment, as the file has it."""
    stored = torch.load(file, weights_only=True)
    groups = [
        (name, number)
        for group, own in zip(state.groups, stored["param_groups"], strict=True)
        for name, number in zip(group.names, own["params"], strict=True)
    ]
    return {
        name: float(stored["state"][number]["exp_avg"].reshape(-1)[0])
        for name, number in groups
        if number in stored["state"]
    }


def check_named(root: Path, wanted: dict[str, float], **options: Any) -> OptimizerState:
    """Assert that each parameter gets the moments of its name."""
    (state,) = name_optimizers(
        root, open_optimizers(root), weights=open_checkpoint(root).weights, **options
    )
    assert state.is_named
    assert held(state, root / str(state.files[0])) == pytest.approx(wanted)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of(TINY))
def test_the_class_of_a_config_names_the_parameters_of_a_trainer_checkpoint(
    tmp_path: Path, name: str
) -> None:
    model = getattr(transformers, name)(TINY[name]())
    optimizer = torch.optim.AdamW(decay_groups(model))
    wanted = marked(model, optimizer)
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert check_named(tmp_path, wanted).model == 0


def small() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 3))


def partly_frozen() -> torch.nn.Module:
    model = small()
    model[1].requires_grad_(False)
    return model


def with_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = partly_frozen()
    return model, torch.optim.AdamW(decay_groups(model)[::-1])


def save(root: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    wanted = marked(model, optimizer)
    save_model(model, str(root / "model.safetensors"))
    torch.save(optimizer.state_dict(), root / "optimizer.bin")
    return wanted


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module in the current folder with the factories of this file."""
    text = Path(__file__).read_text()
    begin = text.index("def decay_groups")
    parts = [
        text[begin : text.index("def marked")],
        text[text.index("def small") : text.index("def save")],
    ]
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "own_models.py").write_text(
        "import torch\nfrom typing import Any\n\n\n"
        + "".join(parts)
        + "def reading():\n    model = partly_frozen()\n    model[0].weight.sum().item()\n    "
        "return model\n\n\n" + "def broken():\n    raise RuntimeError('no GPU here')\n"
    )
    monkeypatch.chdir(folder)
    return "own_models"


@pytest.mark.parametrize(
    "options", [{"model": partly_frozen}, {"frozen": r"^1\."}, {"model": with_optimizer}]
)
def test_frozen_parameters_are_told_by_the_model_or_a_regex(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = partly_frozen()
    groups = decay_groups(model)
    optimizer = torch.optim.AdamW(
        groups[::-1] if options.get("model") is with_optimizer else groups
    )
    wanted = save(tmp_path, model, optimizer)
    check_named(tmp_path, wanted, **{"model": small, **options})


@pytest.mark.slow
def test_a_factory_of_a_module_is_asked_in_a_process_of_its_own(
    tmp_path: Path, module: str
) -> None:
    model = partly_frozen()
    wanted = save(tmp_path, model, torch.optim.AdamW(decay_groups(model)))
    for factory in ("partly_frozen", "reading"):  # the second cannot be built on the meta device
        check_named(tmp_path, wanted, model=f"{module}:{factory}")
    optimizer = torch.optim.AdamW(decay_groups(model)[::-1])
    check_named(tmp_path, save(tmp_path, model, optimizer), model=f"{module}:with_optimizer")
    assert module not in sys.modules
    states = open_optimizers(tmp_path)
    with pytest.raises(
        UsageError, match=f"the factory {module}:broken raised RuntimeError: no GPU here"
    ):
        name_optimizers(tmp_path, states, model=f"{module}:broken")
    with pytest.raises(UsageError, match="expected module:factory"):
        name_optimizers(tmp_path, states, model="own_models")
    with pytest.raises(
        OperationError, match=r"no --model, and no config\.json .*; help: name the model"
    ):
        name_optimizers(tmp_path, states)


def test_a_factory_returns_a_model_and_optimizers_of_its_parameters(tmp_path: Path) -> None:
    model = small()
    save(tmp_path, model, torch.optim.AdamW(model.parameters()))
    states = open_optimizers(tmp_path)

    def nothing() -> int:
        return 3

    def stranger() -> Any:
        return small(), torch.optim.SGD(small().parameters())

    def smaller() -> Any:
        one = small()
        return one, torch.optim.SGD(one[0].parameters())

    def nested() -> Any:
        one = small()
        return (one, "inputs"), [torch.optim.AdamW(one.parameters())]

    name_optimizers(tmp_path, states, model=nested)
    expected: list[tuple[Factory, type[Exception], str]] = [
        (nothing, UsageError, "the factory nothing returned int, not a torch.nn.Module"),
        (
            stranger,
            UsageError,
            "an optimizer with parameters that are not in any of the returned models",
        ),
        (smaller, OperationError, r"its param groups have \[6\] parameters \(expected \[2\]\)"),
    ]
    for factory, error, words in expected:
        with pytest.raises(error, match=words):
            name_optimizers(tmp_path, states, model=factory)
    with pytest.raises(UsageError, match=r"--frozen '\(' is not a regular expression"):
        name_optimizers(tmp_path, states, model=small, frozen="(")


def two_models() -> Any:
    return small(), torch.nn.Linear(5, 5)


def test_an_optimizer_of_the_second_model_is_named_by_its_keys(tmp_path: Path) -> None:
    first, second = two_models()
    for number, model in enumerate((first, second)):
        suffix = f"_{number}" if number else ""
        save_model(model, str(tmp_path / f"model{suffix}.safetensors"))
        optimizer = torch.optim.AdamW(model.parameters())
        marked(model, optimizer)
        torch.save(optimizer.state_dict(), tmp_path / f"optimizer{suffix}.bin")
    states = name_optimizers(tmp_path, open_optimizers(tmp_path), model=two_models)
    assert [state.model for state in states] == [0, 1]
    assert [state.groups[0].names[0] for state in states] == ["0.weight", "weight"]


def test_an_optimizer_of_two_models_is_refused(tmp_path: Path) -> None:
    first, second = two_models()
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    for model in (first, second):
        marked(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    with pytest.raises(OperationError, match="it has parameters of models 0, 1"):
        name_optimizers(tmp_path, open_optimizers(tmp_path), model=two_models)


def test_names_that_torch_saves_with_the_groups_are_taken(tmp_path: Path) -> None:
    model = partly_frozen()
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    try:
        optimizer = torch.optim.AdamW(named[::-1])
    except (TypeError, ValueError):
        pytest.skip("torch before 2.6 takes no named parameters")
    wanted = save(tmp_path, model, optimizer)
    check_named(tmp_path, wanted)


def test_names_without_a_model_are_those_of_the_model_that_has_them(tmp_path: Path) -> None:
    first, second = two_models()
    for number, model in enumerate((first, second)):
        save_model(model, str(tmp_path / f"model{'_1' * number}.safetensors"))
    optimizer = torch.optim.AdamW(second.named_parameters())
    wanted = marked(second, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    assert check_named(tmp_path, wanted).model == 1
    save_model(second, str(tmp_path / "model.safetensors"))
    with pytest.raises(
        OperationError, match=r"no --model, and no config\.json"
    ):  # both models have such names
        check_named(tmp_path, wanted)


class Holder(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """A model of which one part is called as the wrapper of DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.module = small()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(value)
        return result


@pytest.mark.parametrize("make", [partly_frozen, Holder])
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_run_state_of_a_guarded_save_names_them_exactly(
    tmp_path: Path, make: Callable[[], torch.nn.Module], wrapped: bool
) -> None:
    accelerator = ckptfix.Accelerator(cpu=True)
    model = make()
    optimizer = torch.optim.AdamW(decay_groups(model)[::-1])
    if wrapped:
        wrapper = torch.nn.DataParallel(model)
        model = wrapper
    accelerator.prepare(model, optimizer)
    wanted = marked(model, optimizer)
    root = tmp_path / "checkpoint"
    accelerator.save_state(str(root))
    found = parameter_names(root, "optimizer.bin", 0)
    assert found is not None
    bare = {
        name.removeprefix("module.") if wrapped else name: value for name, value in wanted.items()
    }
    keys = open_checkpoint(root).weights[0].named()
    state = check_named(root, bare if bare.keys() <= keys.keys() else wanted)
    assert {name for group in state.groups for name in group.names} <= keys.keys()


def test_the_run_state_of_an_older_save_is_not_believed(tmp_path: Path) -> None:
    accelerator = ckptfix.Accelerator(cpu=True)
    model = partly_frozen()
    optimizer = torch.optim.AdamW(decay_groups(model))
    accelerator.prepare(model, optimizer)
    marked(model, optimizer)
    root = tmp_path / "checkpoint"
    accelerator.save_state(str(root))
    assert parameter_names(root, "optimizer.bin", 0) is not None
    assert parameter_names(root, "optimizer.bin", 1) is None
    StockAccelerator.save_state(accelerator, str(tmp_path / "other"))
    other = torch.optim.AdamW(model.parameters())
    torch.save(other.state_dict(), root / "optimizer.bin")
    assert parameter_names(root, "optimizer.bin", 0) is None
    (root / "run_state_0.pt").write_bytes(b"no pickle")
    assert parameter_names(root, "optimizer.bin", 0) is None
    (root / "run_state_0.pt").unlink()
    assert parameter_names(root, "optimizer.bin", 0) is None
