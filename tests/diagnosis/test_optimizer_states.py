"""Optimizers against themselves and the weights: each kind of damage is found, and no healthy
optimizer is blamed.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import save_file, save_model

import ckptfix
from ckptfix import check
from ckptfix.checkpoint.dcp import scan_dcp_folders
from ckptfix.checkpoint.folder import scan_folder
from ckptfix.diagnosis.optimizer_kinds import lacking_parts
from ckptfix.diagnosis.saved_optimizers import bare, optimizers_of

CODES = {"inconsistent-groups", "mismatched-moments", "unsaved-parameters", "missing-moments"}


def found(root: Path) -> list[str]:
    """Return the codes and sentences about optimizers."""
    report = check(root)
    return [f"{one.code}: {one}" for one in report.all_findings if one.code in CODES]


def net() -> Any:
    return torch.nn.Sequential(
        torch.nn.Embedding(11, 6),
        torch.nn.Linear(6, 5),
        torch.nn.LayerNorm(5),
        torch.nn.Linear(5, 3),
    )


def step(model: Any, optimizer: Any, times: int = 2) -> None:
    for _ in range(times):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()


def save(
    root: Path, models: list[Any], optimizers: list[Any], *, custom: tuple[Any, ...] = ()
) -> Path:
    """Save with stock accelerate."""
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(*models, *optimizers)
    accelerator.register_for_checkpointing(*custom)
    accelerator.save_state(str(root))
    return root


Make = Callable[[Any], Any]


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters())


def trained(root: Path, model: Any, make: Make = adamw, *, custom: tuple[Any, ...] = ()) -> Any:
    """Save a model after two steps of its optimizer, which is healthy; return the optimizer."""
    optimizer = make(model)
    step(model, optimizer)
    assert found(save(root, [model], [optimizer], custom=custom)) == []
    return optimizer


class OtherShapes(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer that keeps states of its own shapes, like those of other libraries."""

    def __init__(
        self, parameters: Any, make: Callable[[Any], dict[str, Any]], **options: Any
    ) -> None:
        super().__init__(parameters, {"lr": 0.1, **options})
        self._make = make

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter] = self._make(parameter)


def eight_bit(parameter: Any) -> dict[str, Any]:
    """Return states like those of bitsandbytes."""
    blocks = -(-parameter.numel() // 256)
    return {
        "step": 1,
        **{f"state{n}": torch.zeros(parameter.shape, dtype=torch.uint8) for n in (1, 2)},
        **{f"qmap{n}": torch.zeros(256) for n in (1, 2)},
        **{f"absmax{n}": torch.zeros(blocks) for n in (1, 2)},
    }


def preconditioned(parameter: Any) -> dict[str, Any]:
    """Return states like those of Shampoo."""
    sides = [torch.eye(length) for length in parameter.shape]
    return {
        "step": torch.tensor(1.0),
        "preconditioners": sides,
        "momentum_buffer": torch.zeros(parameter.numel()),
    }


def low_rank(parameter: Any) -> dict[str, Any]:
    """Return states like those of GaLore."""
    shape = (2, parameter.shape[1]) if parameter.dim() == 2 else parameter.shape
    return {"step": 1, "exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape)}


def lion(parameter: Any) -> dict[str, Any]:
    return {"exp_avg": torch.zeros_like(parameter)}


def foreign(make: Callable[[Any], dict[str, Any]], **options: Any) -> Make:
    return lambda model: OtherShapes(model.parameters(), make, **options)


# Those of torch are healthy in test_optimizer_steps.py, each with its damages.
HEALTHY: dict[str, Make] = {
    "reversed": lambda model: torch.optim.AdamW(list(model.parameters())[::-1]),
    "transformers": lambda model: transformers.optimization.Adafactor(model.parameters()),
    "bitsandbytes": foreign(eight_bit, betas=(0.9, 0.999), eps=1e-8, alpha=0.0, t_alpha=None),
    "shampoo": foreign(preconditioned, update_freq=1, momentum=0.9),
    "galore": foreign(low_rank, betas=(0.9, 0.999), eps=1e-6, rank=2, update_proj_gap=200),
    "lion": foreign(lion, betas=(0.9, 0.99), weight_decay=0.0),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_optimizers_of_other_forms_and_libraries_are_healthy(tmp_path: Path, name: str) -> None:
    trained(tmp_path / "checkpoint", net(), HEALTHY[name])


def test_two_models_with_an_optimizer_each_or_one_for_both_are_healthy(tmp_path: Path) -> None:
    models = [net(), torch.nn.Linear(7, 2)]
    optimizers = list(map(adamw, models))
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)
    assert found(save(tmp_path / "checkpoint", models, optimizers)) == []
    optimizer = adamw(torch.nn.ModuleList(models))
    for model in models:
        step(model, optimizer)
    assert found(save(tmp_path / "one", models, [optimizer])) == []


def test_an_ema_and_a_loss_with_weights_that_are_registered_are_healthy(tmp_path: Path) -> None:
    model, loss = net(), torch.nn.Bilinear(4, 9, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
    step(model, optimizer)
    step(loss, optimizer)
    assert found(save(tmp_path / "checkpoint", [model], [optimizer], custom=(average, loss))) == []


class Kept:
    """An object of a script that keeps a value."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def state_dict(self) -> Any:
        """Return the value."""
        return self.kept

    def load_state_dict(self, state: Any) -> None:
        """Take a value."""
        self.kept = state


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("pytorch_model.bin", None),
        ("model.safetensors", {"n": 3, "t": torch.zeros(3), "name": "a", "more": {"k": [1, 2]}}),
    ],
)
def test_a_model_that_lost_its_tensors_is_told_next_to_a_custom_object(
    name: str, kept: Any, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoint"
    trained(root, net(), custom=(Kept(kept),) if kept else ())
    (root / "model.safetensors").unlink()
    if name == "pytorch_model.bin":
        torch.save({}, root / name)
    else:
        save_file({}, root / name, {"format": "pt"})
    assert found(root) == [
        f"unsaved-parameters: optimizer.bin: 7 parameters, but {name} has no tensors"
    ]
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(net())
    with pytest.raises(RuntimeError, match="Missing key"):
        accelerator.load_state(str(root))


def test_the_state_of_a_custom_object_in_place_of_a_model_is_told(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    trained(root, net(), custom=(Kept({"n": 3, "t": torch.zeros(3)}),))
    (root / "model.safetensors").unlink()
    shutil.copy(root / "custom_checkpoint_0.pkl", root / "pytorch_model.bin")
    assert [words.partition(":")[0] for words in found(root)] == ["unsaved-parameters"]


def mlp(width: int) -> Any:
    return torch.nn.Sequential(
        torch.nn.Linear(4, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.Linear(width, 3, bias=False),
    )


def averages(model: Any) -> dict[str, Any]:
    """Return custom objects with an average of a model, in forms of scripts and libraries."""
    state = {key: value.clone() for key, value in model.state_dict().items()}
    return {
        "parameters": Kept(
            {"decay": 0.9, "shadow": {key: state[key] for key, _ in model.named_parameters()}}
        ),
        "with buffers": Kept({"steps": 3, "ema": {"model": state}}),
        "of torch": torch.optim.swa_utils.AveragedModel(model),
    }


@pytest.mark.parametrize(
    ("damage", "form", "count"),
    [
        *(("of another run", form, 1) for form in ("parameters", "with buffers", "of torch")),
        ("without a tensor", "parameters", 1),
        ("of another run", "with buffers", 2),
    ],
)
def test_a_model_of_another_run_is_told_next_to_an_average(
    damage: str, form: str, count: int, tmp_path: Path
) -> None:
    models = [mlp(6), mlp(5)][:count]
    optimizers = list(map(adamw, models))
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)
    root = save(tmp_path / "checkpoint", models, optimizers, custom=(averages(models[0])[form],))
    assert found(root) == []
    strange = {key: value.clone() for key, value in mlp(7).state_dict().items()}
    if damage == "without a tensor":
        strange = {
            key: value.clone() for key, value in models[0].state_dict().items() if key != "2.weight"
        }
    save_file(strange, root / "model.safetensors", {"format": "pt"})
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(mlp(6))
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing key"):
        accelerator.load_state(str(root))
    assert [words.partition(":")[0] for words in found(root)] == ["unsaved-parameters"]


@pytest.mark.parametrize("extra", ["logit_scale", "head.weight"])
def test_the_parameters_of_an_optimizer_in_a_custom_object_are_healthy(
    extra: str, tmp_path: Path
) -> None:
    """A script keeps all of them there, with one that is in no model, and restores them from
    there.
    """
    model, scale = mlp(6), torch.nn.Parameter(torch.ones(9))
    optimizer = torch.optim.AdamW([*model.parameters(), scale])
    scale.grad = torch.ones(9)
    step(model, optimizer)
    kept = Kept({"step": 3, "params": {**model.state_dict(), extra: scale.detach()}})
    root = save(tmp_path / "checkpoint", [model], [optimizer], custom=(kept,))
    accelerator = accelerate.Accelerator(cpu=True)
    fresh = mlp(6)
    accelerator.prepare(
        fresh, torch.optim.AdamW([*fresh.parameters(), torch.nn.Parameter(torch.ones(9))])
    )
    accelerator.register_for_checkpointing(Kept({}))
    accelerator.load_state(str(root))
    assert found(root) == []
    # The same keys show that the model is of another run.
    save_file(mlp(7).state_dict(), root / "model.safetensors", {"format": "pt"})
    torch.save({"params": model.state_dict()}, root / "custom_checkpoint_0.pkl")
    assert [words.partition(":")[0] for words in found(root)] == ["unsaved-parameters"]


def test_networks_with_the_keys_of_the_model_in_a_custom_object_are_healthy(
    tmp_path: Path,
) -> None:
    """One optimizer trains all of them, or each has its own, and only the first is prepared."""
    models = [mlp(6), mlp(5), mlp(7)]
    kept = Kept(
        {"nets": {str(number): model.state_dict() for number, model in enumerate(models[1:])}}
    )
    optimizer = adamw(torch.nn.ModuleList(models))
    step(torch.nn.ModuleList(models), optimizer)
    assert found(save(tmp_path / "one", models[:1], [optimizer], custom=(kept,))) == []
    optimizers = list(map(adamw, models))
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)
    assert found(save(tmp_path / "each", models[:1], optimizers, custom=(kept,))) == []
    # A teacher that is prepared, and a student that is registered and trained.
    step(models[1], optimizers[1])
    assert found(save(tmp_path / "student", models[:1], optimizers[1:2], custom=(models[1],))) == []


@pytest.mark.parametrize("form", ["list", "list next to a tensor", "numpy", "dict of dicts"])
def test_weights_in_a_custom_object_of_any_form_are_healthy(form: str, tmp_path: Path) -> None:
    model, loss = net(), torch.nn.Bilinear(4, 9, 2)
    weights = [one.detach() for one in loss.parameters()]
    kept = {
        "list": {"weights": weights, "n": 3},
        "list next to a tensor": {"weights": weights, "t": torch.zeros(3)},
        "numpy": {"weights": [one.numpy() for one in weights], "t": torch.zeros(3)},
        "dict of dicts": {"n": 3, "loss": {"state": loss.state_dict()}},
    }[form]
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
    step(model, optimizer)
    step(loss, optimizer)
    assert found(save(tmp_path / "checkpoint", [model], [optimizer], custom=(Kept(kept),))) == []


def test_adapters_alone_in_the_groups_are_healthy(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(net(), peft.LoraConfig(r=2, target_modules=["1", "3"]))
    trained(
        tmp_path / "checkpoint",
        model,
        lambda model: torch.optim.AdamW([one for one in model.parameters() if one.requires_grad]),
    )


def test_frozen_and_unused_parameters_in_a_group_are_a_note(tmp_path: Path) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = adamw(model)
    step(model, optimizer)
    root = save(tmp_path / "checkpoint", [model], [optimizer])
    assert found(root) == [
        "missing-moments: optimizer.bin: 1 of 7 parameters has no moments (parameter 0)"
    ]
    assert check(root).status == 0


def test_weights_that_a_hook_saves_elsewhere_are_not_missed(tmp_path: Path) -> None:
    model, other = net(), torch.nn.Linear(9, 9)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    step(model, optimizer)
    step(other, optimizer)
    root = save(tmp_path / "checkpoint", [model], [optimizer])
    (words,) = found(root)
    assert (
        words == "unsaved-parameters: optimizer.bin: moments of shapes [9], [9, 9], which no "
        "weights have (9 parameters in the optimizer, 7 weight tensors)"
    )
    assert (
        check(root)
        .findings[0]
        .advice.startswith("the optimizer may train a module that was not prepared")
    )
    torch.save(other.state_dict(), root / "other.pt")
    assert found(root) == []
    (root / "other.pt").unlink()
    (root / "other").mkdir()
    torch.save(other.state_dict(), root / "other" / "weights.bin")
    assert found(root) == []


class WithFrozenLoss(torch.nn.Module):  # type: ignore[misc]
    """A model that leaves the frozen network of its loss out of its state dict, as those with
    ``@remove_vgg``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        self.vgg = torch.nn.Linear(2, 2).requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state: Any = super().state_dict(*args, **kwargs)
        return {key: value for key, value in state.items() if not key.startswith("vgg.")}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        vgg = {f"vgg.{key}": value for key, value in self.vgg.state_dict().items()}
        return super().load_state_dict({**state, **vgg}, *args, **kwargs)


def test_a_frozen_part_that_the_state_dict_leaves_out_is_a_note(tmp_path: Path) -> None:
    model = WithFrozenLoss()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    root = save(tmp_path / "checkpoint", [model], [optimizer])
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    accelerator.load_state(str(root))
    step(model, optimizer)
    words = "9 parameters, 2 of them without moments, but the checkpoint has 7 weight tensors"
    assert f"unsaved-parameters: optimizer.bin: {words}" in found(root)
    assert check(root).status == 0
    # As many parameters, and a moment for each.
    model.vgg.requires_grad_(True)
    step(model, optimizer)
    torch.save(optimizer.state_dict(), root / "optimizer.bin")
    assert check(root).status == 1
    # Before its first step nothing shows which parameters are frozen.
    torch.save(torch.optim.AdamW(model.parameters()).state_dict(), root / "optimizer.bin")
    assert check(root).status == 1


def test_an_optimizer_of_a_larger_model_with_frozen_layers_stays_a_warning(tmp_path: Path) -> None:
    """The layers that train have other shapes than the weights, or more of them."""
    for trained in (torch.nn.Linear(4, 7), torch.nn.Linear(4, 3)):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3), trained)
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        root = save(tmp_path / str(trained.out_features), [model[:2]], [optimizer])
        assert check(root).status == 1


def test_more_parameters_than_tensors_are_of_another_model(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = adamw(model)
    step(model, optimizer)
    root = save(tmp_path / "checkpoint", [model[:2]], [optimizer])
    assert found(root) == [
        "unsaved-parameters: optimizer.bin: 6 parameters, but the checkpoint has 4 weight tensors"
    ]


def save_optimizer_of(model: Any, root: Path) -> None:
    """Save an optimizer in the place of that of another model."""
    optimizer = adamw(model)
    step(model, optimizer)
    torch.save(optimizer.state_dict(), root / "optimizer.bin")


@pytest.mark.parametrize("is_named", [False, True])
def test_an_optimizer_of_another_model_is_first_said_to_be_of_another_run(
    tmp_path: Path, is_named: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = adamw(model)
    root = save(tmp_path / "checkpoint", [model], [optimizer])
    save_optimizer_of(torch.nn.Linear(7, 3), root)
    if is_named:
        rewrite(
            root / "optimizer.bin",
            lambda state: name_parameters(state, ["head.weight", "head.bias"]),
        )
    else:
        with pytest.raises(ValueError, match="parameter group"):
            optimizer.load_state_dict(torch.load(root / "optimizer.bin"))
    assert found(root) == [
        "unsaved-parameters: optimizer.bin: does not match the weights (expected parameters for "
        "4 weight tensors of shapes [2], [2, 3], [3] and 1 more; found 2 parameters of shapes "
        "[3], [3, 7])"
    ]
    torch.save(model.state_dict(), root / "pytorch_model.bin")
    assert "parameters for 4 weight tensors" in found(root)[0]
    (root / "pytorch_model.bin").unlink()
    advice = check(root).findings[0].advice
    assert advice.startswith(
        "the optimizer may belong to another run, and load_state or the next optimizer step then "
        "fails: "
    )
    assert "prepare()" in advice
    # As many parameters as tensors: the load itself succeeds.
    save_optimizer_of(torch.nn.Sequential(torch.nn.Linear(9, 8), torch.nn.Linear(8, 7)), root)
    optimizer.load_state_dict(torch.load(root / "optimizer.bin"))
    assert "the first optimizer step after the load then fails" in check(root).findings[0].advice
    with pytest.raises(RuntimeError):
        step(model, optimizer)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    def of_two_groups(model: Any) -> Any:
        wide = [one for one in model.parameters() if one.dim() > 1]
        flat = [one for one in model.parameters() if one.dim() == 1]
        return torch.optim.AdamW([{"params": wide}, {"params": flat}])

    trained(tmp_path / "checkpoint", net(), of_two_groups)
    return tmp_path / "checkpoint"


def name_parameters(state: dict[str, Any], names: list[str]) -> None:
    """Name the parameters as FSDP's full state dicts do."""
    state["state"] = {names[number]: one for number, one in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [names[number] for number in group["params"]]


NAMES = ["0.weight", "1.weight", "3.weight", "1.bias", "2.weight", "2.bias", "3.bias"]


@pytest.mark.parametrize(
    "name",
    [
        *("{}", "module.{}", "_fsdp_wrapped_module.{}", "_orig_mod.module.{}"),
        # An adapter is saved under other names.
        "base_model.{}.lora_A.default.weight",
    ],
)
def test_names_of_fsdp_are_found_in_the_weights(checkpoint: Path, name: str) -> None:
    names = list(map(name.format, NAMES))
    rewrite(checkpoint / "optimizer.bin", lambda state: name_parameters(state, names))
    assert found(checkpoint) == []


def test_names_that_the_weights_lack(checkpoint: Path) -> None:
    names = [*NAMES[:-1], "3.offset"]
    rewrite(checkpoint / "optimizer.bin", lambda state: name_parameters(state, names))
    assert found(checkpoint) == [
        "unsaved-parameters: optimizer.bin: 1 of 7 parameters has no weights in the checkpoint: "
        "'3.offset'"
    ]


def test_moments_of_another_shape_by_name(checkpoint: Path) -> None:
    def turn(state: dict[str, Any]) -> None:
        name_parameters(state, NAMES)
        for one in ("exp_avg", "exp_avg_sq"):
            state["state"]["1.weight"][one] = torch.zeros(6, 5)

    rewrite(checkpoint / "optimizer.bin", turn)
    assert found(checkpoint) == [
        "mismatched-moments: optimizer.bin: the moments of '1.weight' have shape [6, 5] "
        "(expected [5, 6], the shape of its weights)"
    ]
    rewrite(checkpoint / "optimizer.bin", lambda state: state["param_groups"][0].update(rank=4))
    assert found(checkpoint) == []


def test_a_guarded_save_has_the_names_of_numbered_parameters(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    accelerator = ckptfix.Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    root = tmp_path / "checkpoint"
    accelerator.save_state(str(root))
    assert found(root) == []
    other = net()
    other[3] = torch.nn.Linear(5, 4)
    shutil.copytree(root, tmp_path / "other")
    save_model(other, str(tmp_path / "other" / "model.safetensors"))
    assert found(tmp_path / "other") == [
        "mismatched-moments: optimizer.bin: the moments of '3.weight' have shape [3, 5] "
        "(expected [4, 5], the shape of its weights; 1 more parameter)"
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flattened", [False, True])
def test_dcp_folders_are_compared_by_their_metadata(tmp_path: Path, flattened: bool) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    def write(model: Any, optimizer: Any, root: Path) -> Path:
        save(root, [model], [optimizer])
        (root / "model.safetensors").unlink()
        (root / "optimizer.bin").unlink()
        options = StateDictOptions(flatten_optimizer_state_dict=flattened)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        for name, content in (
            ("pytorch_model_fsdp_0", {"model": model.state_dict()}),
            ("optimizer_0", {"optimizer": state}),
        ):
            dcp.save(content, storage_writer=dcp.FileSystemWriter(root / name), no_dist=True)
        return root

    model = net()
    optimizer = adamw(model)
    step(model, optimizer)
    root = write(model, optimizer, tmp_path / "checkpoint")
    assert found(root) == []
    shutil.rmtree(root / "pytorch_model_fsdp_0")
    other = net()
    other[3] = torch.nn.Linear(5, 4, bias=False)
    write(other, adamw(other), tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "pytorch_model_fsdp_0", root / "pytorch_model_fsdp_0")
    assert found(root) == [
        (
            "mismatched-moments: optimizer_0: the moments of '3.weight' have shape [3, 5] "
            "(expected [4, 5], the shape of its weights)"
        ),
        (
            "unsaved-parameters: optimizer_0: 1 of 7 parameters has no weights in the checkpoint: "
            "'3.bias'"
        ),
    ]


def test_a_trainer_checkpoint_is_not_judged_by_shapes(tmp_path: Path) -> None:
    """Transformers merges and splits weights when it loads and saves: moments are of the merged
    ones.
    """
    save_optimizer_of(torch.nn.Linear(6, 8), tmp_path)
    (tmp_path / "optimizer.bin").rename(tmp_path / "optimizer.pt")
    halves = {f"experts.{half}.weight": torch.ones(4, 6) for half in range(2)}
    save_file(halves, str(tmp_path / "model.safetensors"), {"format": "pt"})
    torch.save({"python": 1}, tmp_path / "rng_state.pth")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3}')
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("module.module.a.b", "a.b"),
        ("a.module.b", "a.module.b"),
        ("a._checkpoint_wrapped_module.b", "a.b"),
        ("module.module", "module"),
        ("_orig_mod.module.weight", "weight"),
    ],
)
def test_names_without_wrappers(name: str, expected: str) -> None:
    assert bare(name) == expected


def test_one_list_that_many_groups_refer_to_ends_the_look_soon(tmp_path: Path) -> None:
    group = {"lr": 0.1, "params": list(range(20_000))}
    moments = {f"state{number}": torch.zeros(()) for number in range(2_000)}
    content = {"state": dict.fromkeys(range(10000), moments), "param_groups": [group] * 20_000}
    torch.save(content, tmp_path / "optimizer.bin")
    begin = time.process_time()
    assert found(tmp_path) == []
    assert time.process_time() - begin < 10


def test_a_group_of_a_dcp_folder_with_a_parameter_without_moments(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    shutil.copytree("fixtures/dcp-2.13.0/fsdp2-clean/checkpoint", root)
    (state,) = (
        one for one in scan_dcp_folders(scan_folder(root)) if one.path.name == "optimizer_0"
    )
    (optimizer,) = optimizers_of(root, state)
    assert optimizer.is_named
    assert optimizer.is_plain
    assert [sorted(group) for group in optimizer.groups] == [sorted(optimizer.states)]
    lacking = replace(optimizer, states=dict(list(optimizer.states.items())[1:]))
    (finding,) = lacking_parts(lacking)
    assert str(finding) == "optimizer_0: 1 of 5 parameters has no moments (parameter '0.weight')"


class Temperature(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, log_alpha: torch.nn.Parameter) -> None:
        super().__init__()
        self.log_alpha = log_alpha


@pytest.mark.parametrize("is_registered", [False, True])
@pytest.mark.parametrize("shape", [(1,), ()])
def test_a_bare_parameter_is_named_as_what_it_is(
    tmp_path: Path, shape: tuple[int, ...], is_registered: bool
) -> None:
    """SAC trains ``log_alpha`` with an optimizer of its own. load_state restores the moments, and
    not the value.
    """
    accelerator = accelerate.Accelerator(cpu=True)
    actor, log_alpha = torch.nn.Linear(4, 2), torch.nn.Parameter(torch.zeros(shape))
    if is_registered:
        accelerator.register_for_checkpointing(Temperature(log_alpha))
    optimizers = torch.optim.Adam(actor.parameters()), torch.optim.Adam([log_alpha])
    actor, *prepared = accelerator.prepare(actor, *optimizers)
    accelerator.backward(actor(torch.ones(3, 4)).sum() * log_alpha.exp().sum())
    for optimizer in prepared:
        optimizer.step()
    accelerator.save_state(str(tmp_path / "checkpoint"))
    trained = log_alpha.detach().clone()
    with torch.no_grad():
        log_alpha.zero_()
    accelerator.load_state(str(tmp_path / "checkpoint"))
    assert torch.equal(log_alpha, trained) == is_registered
    findings = check(tmp_path / "checkpoint").findings
    assert [finding.code for finding in findings] == (
        [] if is_registered else ["unsaved-parameters"]
    )
    for finding in findings:
        assert finding.advice.startswith(
            "this may be a bare nn.Parameter, such as SAC's log_alpha. It belongs to no model"
        )
        assert "accelerator.register_for_checkpointing()" in finding.advice
        assert "ValueError" not in finding.advice
