"""Weights files that hold something else: what loaders refuse or leave random is found, and no
model is blamed.
"""

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckptfix import OperationError, check, latest_checkpoint, migrate, salvage, seal
from ckptfix.storage import stores
from tests.commanding import Said, said
from tests.sampling import sampled
from tests.stores.servers import QUICK, upload_folder

__all__ = ["said"]

CODES = ("wrong-state", "unknown-state")
WEIGHTS = "pytorch_model.bin"


def net() -> Any:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def saved_by_accelerate(root: Path, model: Any = None) -> Path:
    """Save a model with an optimizer, a scheduler and random states, as ``save_state`` does."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = net() if model is None else model
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters or [nn.Parameter(torch.ones(1))], lr=0.1)
    model, optimizer, _ = accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)
    )
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    accelerator.save_state(str(root), safe_serialization=False)
    return root


def told(root: Path) -> list[str]:
    report = check(root)
    findings = [finding for finding in report.all_findings if finding.code in CODES]
    assert report.status == 1 or not findings
    return [f"{finding.code}: {finding}" for finding in findings]


def refusal(root: Path, model: Any = None) -> str:
    """Return the name of the error of stock accelerate on loading into a new model, "" without
    one.
    """
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(net() if model is None else model)
    optimizer = torch.optim.AdamW(list(model.parameters()) or [nn.Parameter(torch.ones(1))], lr=0.1)
    accelerator.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    try:
        accelerator.load_state(str(root))
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = saved_by_accelerate(tmp_path_factory.mktemp("healthy") / "checkpoint_1")
    assert told(root) == []
    assert refusal(root) == ""
    return root


@pytest.fixture
def root(healthy: Path, tmp_path: Path) -> Path:
    """Return a healthy checkpoint to damage."""
    return Path(shutil.copytree(healthy, tmp_path / "checkpoint_1"))


def replaced(**values: Any) -> Callable[[Any, Path], Any]:
    return lambda state, root: {
        **state,
        **{name.replace("_", "."): value for name, value in values.items()},
    }


CONTENTS: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "a wrapped state dict": (lambda state, root: {"state_dict": state}, "a dict with a state dict under 'state_dict'"),
    "a training dict": (
        lambda state,
        root: {"model": state, "epoch": 1, "optimizer": torch.load(root / "optimizer.bin")},
        "a dict with a state dict under 'model'",
    ),
    "two state dicts": (
        lambda state, root: {"model": state, "ema": dict(state)},
        "a dict with state dicts under 'model', 'ema'",
    ),
    "a dict for each module": (
        lambda state, root: {"0": {"weight": state["0.weight"], "bias": state["0.bias"]}},
        "a dict with a state dict under '0'",
    ),
    "a deeper dict": (lambda state, root: {"a": {"b": state}}, "a dict whose values are not tensors"),
    "a list": (lambda state, root: [state], "a list"),
    "a tensor": (lambda state, root: torch.ones(3), "a tensor"),
    "nothing": (lambda state, root: None, "None"),
    "a number": (lambda state, root: 3, "a number"),
    "a string": (lambda state, root: "model.safetensors", "a string"),
    "a counter": (lambda state, root: {"count": 3}, "a dict whose values are not tensors"),
    "a key of int": (lambda state, root: {**state, 3: torch.ones(1)}, "a dict with a key that is not a string"),
    "a key of None": (lambda state, root: {**state, None: torch.ones(1)}, "a dict with a key that is not a string"),
    "a key of a tuple": (
        lambda state, root: {**state, ("a",): torch.ones(1)},
        "a dict with a key that is not a string",
    ),
    "weights of None": (replaced(**{"0_weight": None}), "None under '0.weight'"),
    "weights of a string": (replaced(**{"0_weight": "x"}), "a string under '0.weight'"),
    "weights of a number": (replaced(**{"0_weight": 1.0}), "a number under '0.weight'"),
    "weights of a list": (replaced(**{"0_weight": [1.0]}), "a list under '0.weight'"),
    "arrays of numpy": (
        lambda state, root: {key: value.numpy() for key, value in state.items()},
        "a numpy array under '0.weight'",
    ),
    "an optimizer": (lambda state, root: torch.load(root / "optimizer.bin"), "an optimizer's state"),
    "a scheduler": (lambda state, root: torch.load(root / "scheduler.bin"), "a scheduler's state"),
    "random states": (
        lambda state, root: torch.load(root / "random_states_0.pkl", weights_only=False),
        "accelerate's random states",
    ),
    "one meta tensor": (
        lambda state, root: {**state, "0.weight": state["0.weight"].to("meta")},
        "1 tensor on the meta device, without values",
    ),
    "meta tensors": (
        lambda state, root: {key: value.to("meta") for key, value in state.items()},
        "7 tensors on the meta device, without values",
    ),
}  # fmt: skip

KNOWN = ("an optimizer", "a scheduler", "random states", "one meta tensor", "meta tensors")


@pytest.mark.parametrize("content", sampled(list(CONTENTS)))
def test_a_save_state_whose_weights_no_module_loads_has_a_finding_and_is_passed_over(
    content: str, root: Path, healthy: Path, tmp_path: Path
) -> None:
    make, words = CONTENTS[content]
    torch.save(make(torch.load(root / WEIGHTS), root), root / WEIGHTS)
    assert refusal(root)
    (sentence,) = told(root)
    code = "wrong-state" if content in KNOWN else "unknown-state"
    assert sentence.startswith(f"{code}: {WEIGHTS}: it holds {words}")
    assert sentence.endswith("(expected a model's weights)")
    older = Path(shutil.copytree(healthy, tmp_path / "checkpoint_0"))
    with pytest.warns(UserWarning, match=r"pytorch_model.bin holds .*, not a model's weights"):
        assert latest_checkpoint(tmp_path) == older


def test_the_state_dict_in_a_dict_is_named_with_the_way_to_save_it(root: Path) -> None:
    state = torch.load(root / WEIGHTS)
    torch.save({"epoch": 1, "net": state}, root / WEIGHTS)
    (finding,) = (finding for finding in check(root).all_findings if finding.code in CODES)
    assert "torch.save() only the value under 'net'" in finding.advice
    # load_state takes the safetensors file.
    save_file(state, root / "model.safetensors")
    assert not refusal(root)
    assert latest_checkpoint(root.parent) == root


def test_exchanged_weights_and_optimizer_name_each_other(root: Path) -> None:
    (root / WEIGHTS).rename(root / "third")
    (root / "optimizer.bin").rename(root / WEIGHTS)
    (root / "third").rename(root / "optimizer.bin")
    assert refusal(root)
    assert sorted(sentence.rpartition("; ")[2] for sentence in told(root)) == [
        "swapped with optimizer.bin",
        "swapped with pytorch_model.bin",
    ]


def test_latest_passes_over_a_file_without_tensors_that_hides_the_weights(
    root: Path, tmp_path: Path
) -> None:
    older = Path(shutil.copytree(root, tmp_path / "checkpoint_0"))
    save_file({}, root / "model.safetensors")
    assert refusal(root)
    with pytest.warns(
        UserWarning, match=r"model.safetensors holds no tensors, but its model has some"
    ):
        assert latest_checkpoint(tmp_path) == older
    save_file(torch.load(root / WEIGHTS), root / "model.safetensors")
    torch.save({}, root / WEIGHTS)
    assert not refusal(root)
    assert latest_checkpoint(tmp_path) == root


# tensors without numbers


def test_the_state_dict_of_an_offloaded_model_has_no_numbers(tmp_path: Path) -> None:
    model = net()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    torch.save(model.state_dict(), tmp_path / WEIGHTS)
    with pytest.raises(RuntimeError, match="meta"):
        net().load_state_dict(torch.load(tmp_path / WEIGHTS))
    (finding,) = check(tmp_path).all_findings
    assert (finding.code, check(tmp_path).status) == ("wrong-state", 1)
    assert "accelerator.get_state_dict(model)" in finding.advice
    shutil.rmtree(tmp_path)
    accelerate.Accelerator(cpu=True).save_model(model, str(tmp_path), safe_serialization=False)
    assert told(tmp_path) == []
    net().load_state_dict(torch.load(tmp_path / WEIGHTS))


META = "on the meta device, without values (expected"
BUNDLES: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "alone": (lambda model, optimizer: model, [f"it holds 7 tensors {META} a model's weights)"]),
    "in a dict": (
        lambda model, optimizer: {"nets": {"g": model}, "epoch": 3},
        [f"nets.g: it holds 7 tensors {META} a model's weights)"],
    ),
    "one tensor of many": (
        lambda model, optimizer: {"model": {**net().state_dict(), "0.weight": model["0.weight"]}},
        [f"model: it holds 1 tensor {META} a model's weights)"],
    ),
    "moments": (
        lambda model, optimizer: {"model": net().state_dict(), "optimizer": optimizer},
        [f"optimizer: it holds 1 tensor {META} an optimizer's state)"],
    ),
    "nothing": (lambda model, optimizer: {"model": net().state_dict(), "epoch": 3}, []),
}


@pytest.mark.parametrize("name", ["weights.pt", "epoch_3.ckpt", "custom_checkpoint_0.pkl"])
@pytest.mark.parametrize("case", BUNDLES)
def test_states_without_numbers_are_found_under_any_name(
    case: str, name: str, tmp_path: Path
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.rand(2, 3)).sum().backward()
    optimizer.step()
    moments = optimizer.state_dict()
    moments["state"][0]["momentum_buffer"] = moments["state"][0]["momentum_buffer"].to("meta")
    weights = {key: value.to("meta") for key, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="meta tensor"):
        net().load_state_dict(weights)
    make, sentences = BUNDLES[case]
    torch.save(make(weights, moments), tmp_path / name)
    assert told(tmp_path) == [f"unknown-state: {name}: {words}" for words in sentences]
    assert check(tmp_path / name).status == check(tmp_path).status == bool(sentences)


def test_moments_on_the_meta_device_are_found(root: Path) -> None:
    state = torch.load(root / "optimizer.bin")
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].to("meta")
    torch.save(state, root / "optimizer.bin")
    assert refusal(root) == "NotImplementedError"
    assert told(root) == [
        "wrong-state: optimizer.bin: it holds 1 tensor on the meta device, without values "
        "(expected an optimizer's state)"
    ]


# healthy models


class WithExtra(nn.Module):  # type: ignore[misc]
    """A module with an extra state, which may be anything."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(2, 2), extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class WithCounter(nn.Module):  # type: ignore[misc]
    """Saves the number of its steps next to its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.steps = 7

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {**super().state_dict(*args, **options), "step": self.steps}

    def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
        self.steps = state["step"]
        weights = {key: value for key, value in state.items() if key != "step"}
        return super().load_state_dict(weights, *args, **options)


class WithHook(nn.Linear):  # type: ignore[misc]
    """A module that adds a number, a name and a pair to its state dict, as quantized modules do."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update(
            {f"{prefix}format": "row", f"{prefix}pair": (torch.ones(1), None), f"{prefix}bits": 8}
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        for name in ("format", "pair", "bits"):
            state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class Named(nn.Module):  # type: ignore[misc]
    """A module whose parameters are called as the keys of other states are."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(2)))


class Loss(nn.Module):  # type: ignore[misc]
    """A module without a tensor."""


MODELS: dict[str, Callable[[], Any]] = {
    "layers": net,
    "a bare parameter": lambda: Named("scale"),
    "names of an optimizer": lambda: Named("state", "param_groups"),
    "names of a scaler": lambda: Named("scale", "growth_factor", "backoff_factor", "growth_interval"),
    "names of wrappers": lambda: Named("model", "module"),
    "an extra dict": lambda: WithExtra({"state": {}, "param_groups": []}),
    "an extra None": lambda: nn.Sequential(WithExtra(None)),
    "an extra tensor": lambda: WithExtra(torch.ones(2)),
    "hooks": lambda: nn.Sequential(WithHook()),
    "no tensor": Loss,
    "an integer buffer": lambda: nn.BatchNorm1d(3),
    "no bias": lambda: nn.Linear(2, 2, bias=False),
    "one scalar": lambda: nn.PReLU(),
}  # fmt: skip


@pytest.mark.parametrize("model", sampled(list(MODELS)))
def test_no_model_is_blamed(model: str, tmp_path: Path) -> None:
    root = saved_by_accelerate(tmp_path / "checkpoint_0", MODELS[model]())
    assert refusal(root, MODELS[model]()) == ""
    assert told(root) == []


@pytest.mark.parametrize("is_safe", [True, False])
def test_a_model_without_a_tensor_and_an_optimizer_is_listed_as_not_checked(
    tmp_path: Path, is_safe: bool
) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(str(tmp_path), safe_serialization=is_safe)
    assert not [one for one in check(tmp_path).not_checked if "lost its tensors" in one]
    if is_safe:
        save_file({}, tmp_path / "model.safetensors", {"format": "pt"})
    else:
        torch.save({}, tmp_path / WEIGHTS)
    with pytest.raises(RuntimeError, match="Missing key"):
        accelerator.load_state(str(tmp_path))
    report = check(tmp_path)
    assert report.status == 0
    assert [one for one in report.not_checked if "lost its tensors" in one]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_quantized_model_of_torch_is_not_blamed(root: Path) -> None:
    import torch.ao.nn.quantized as quantized

    model = nn.Sequential(quantized.Conv2d(1, 1, 1, bias=False), quantized.Linear(2, 2))
    state = model.state_dict()
    assert any(not isinstance(value, torch.Tensor) for value in state.values())
    torch.save(state, root / WEIGHTS)
    assert told(root) == []


def test_files_of_a_script_may_hold_anything(tmp_path: Path) -> None:
    state = net().state_dict()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "layers": 2}))
    for name in (WEIGHTS, "net.pt", "ema.pt", "pytorch_lora_weights.bin", "training_args.bin"):
        torch.save({"model": state, "epoch": 1}, tmp_path / name)
    assert told(tmp_path) == []


def test_free_names_in_a_save_state_may_hold_anything(root: Path) -> None:
    state = net().state_dict()
    of_torch = ("ema.pt", "net.bin", "model.bin", "model.pt", "pytorch_lora_weights.bin")
    for name in (*of_torch, "mp_rank_00_model_states.pt"):
        torch.save({"model": state, "module": state, "epoch": 1}, root / name)
    assert told(root) == []


# transformers


def bert(**values: Any) -> Any:
    from transformers import BertConfig, BertModel

    sizes = {"vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    return BertModel(BertConfig(**sizes, intermediate_size=4, max_position_embeddings=4, **values))


def pretrained(root: Path) -> dict[str, Any]:
    model = bert()
    model.save_pretrained(root)
    return dict(model.state_dict())


def weights_after_load(root: Path, state: dict[str, Any]) -> str:
    """Load with transformers: "right", "random", or the name of the error."""
    from transformers import BertModel

    try:
        loaded = BertModel.from_pretrained(root).state_dict()
    except Exception as error:
        return type(error).__name__
    return "right" if all(torch.equal(loaded[name], state[name]) for name in state) else "random"


PRETRAINED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a wrapped state dict": (lambda state: {"state_dict": state}, "random"),
    "a training dict": (lambda state: {"model_state_dict": state, "epoch": 1}, "random"),
    "an empty dict": (lambda state: {}, "random"),
    "an empty ordered dict": (lambda state: OrderedDict(), "random"),
    "a list": (lambda state: [state], "ValueError"),
    "nothing": (lambda state: None, "TypeError"),
    "meta tensors": (
        lambda state: {name: value.to("meta") for name, value in state.items()},
        "NotImplementedError",
    ),
}


@pytest.mark.parametrize("content", PRETRAINED)
def test_a_pretrained_folder_that_loads_random_weights_has_a_finding(
    content: str, tmp_path: Path
) -> None:
    state = pretrained(tmp_path)
    assert told(tmp_path) == []
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / WEIGHTS)
    assert (told(tmp_path), weights_after_load(tmp_path, state)) == ([], "right")
    make, result = PRETRAINED[content]
    torch.save(make(state), tmp_path / WEIGHTS)
    assert weights_after_load(tmp_path, state) == result
    assert len(told(tmp_path)) == 1


def test_a_file_without_a_tensor_hides_intact_shards(tmp_path: Path) -> None:
    state = pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(whole)
    files = {
        name: f"model-{1 + number % 2:05}-of-00002.safetensors" for number, name in enumerate(names)
    }
    for file in set(files.values()):
        part = {name: whole[name] for name in names if files[name] == file}
        save_file(part, tmp_path / file, metadata={"format": "pt"})
    size = sum(value.nbytes for value in whole.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (told(tmp_path), weights_after_load(tmp_path, state)) == ([], "right")
    save_file({}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert weights_after_load(tmp_path, state) == "random"
    assert len(told(tmp_path)) == 1
    (tmp_path / "config.json").unlink()
    assert len(told(tmp_path)) == 1, "the shards have its tensors"


# the other commands, and stores


@pytest.mark.parametrize(
    "content", ["an optimizer", "meta tensors", "a wrapped state dict", "a list"]
)
def test_no_command_calls_a_wrong_weights_file_intact(
    content: str, root: Path, tmp_path: Path
) -> None:
    make, words = CONTENTS[content]
    torch.save(make(torch.load(root / WEIGHTS), root), root / WEIGHTS)
    receipt = salvage(root, tmp_path / "new")
    assert receipt.verdict != "everything was intact"
    noted = receipt.lost if content in KNOWN else receipt.doubtful
    assert [(lost.file, lost.reason) for lost in noted if words in lost.reason] == [
        (WEIGHTS, f"it holds {words}, not a model's weights; copied unchanged")
    ]
    assert (tmp_path / "new" / WEIGHTS).read_bytes() == (root / WEIGHTS).read_bytes()
    with pytest.raises(OperationError):
        migrate(root, tmp_path / "migrated", to="safetensors")
    if content in KNOWN:
        assert receipt.status == 1
        assert seal(root).status == 1
        assert not (root / ".ckptfix").exists()


def test_a_store_says_the_same(said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    pretrained(tmp_path / "folder")
    save_file({}, tmp_path / "folder" / "model.safetensors", metadata={"format": "pt"})
    torch.save({"model": net().state_dict()}, tmp_path / "folder" / WEIGHTS)
    url = f"memory://{os.urandom(6).hex()}"
    upload_folder(tmp_path / "folder", url)
    (status, local, _), (status_of_store, remote, _) = (
        said("check", tmp_path / "folder"),
        said("check", url),
    )
    assert status == status_of_store == 1
    sentences = [line for line in local.splitlines() if "unknown-state" in line]
    assert len(sentences) == 2
    assert [line for line in remote.splitlines() if "unknown-state" in line] == sentences


OF_SCRIPTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "under a key": (lambda state: {"model": state, "step": 3}, "whether a script reads"),
    "a list": (lambda state: [state], "whether a script reads"),
    "pairs": (lambda state: list(state.items()), "whether a script reads"),
    "numbers as keys": (lambda state: dict(enumerate(state.values())), "whether a script reads"),
    "a tensor": (lambda state: torch.ones(3), "whether a script reads"),
    "nothing": (lambda state: {}, f"whether {WEIGHTS} lost its tensors"),
    "sparse": (
        lambda state: {"0.weight": torch.eye(3).to_sparse()},
        f"values of {WEIGHTS} that are not plain tensors: '0.weight'",
    ),
}


@pytest.mark.parametrize("name", OF_SCRIPTS)
def test_weights_alone_that_no_library_loads_are_named(name: str, tmp_path: Path) -> None:
    """A script may read them itself. accelerate leaves the model random, or fails."""
    make, words = OF_SCRIPTS[name]
    torch.save(make(net().state_dict()), tmp_path / WEIGHTS)
    report = check(tmp_path)
    assert report.status == 0
    assert any(line.startswith(words) for line in report.not_checked)
    torch.save(net().state_dict(), tmp_path / WEIGHTS)
    assert not any(WEIGHTS in line for line in check(tmp_path).not_checked)
