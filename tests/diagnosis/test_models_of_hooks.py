"""Models that hooks of diffusers' scripts save in sub-folders, against the optimizer and other
checkpoints of the run.

The load hook of the script decides what is damaged.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel

from ckptfix import check, latest_checkpoint, repair
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.errors import UsageError
from tests.diagnosis.test_configs_of_hooks import problems
from tests.diagnosis.test_older_saves import with_etags_of_bytes
from tests.stores.servers import upload_folder

WEIGHTS = "diffusion_pytorch_model.safetensors"
Tensors = dict[str, torch.Tensor]


def unet() -> Any:
    kind: Any = diffusers.UNet2DModel
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {
        "sample_size": 8,
        "block_out_channels": (4, 8),
        "norm_num_groups": 2,
        "layers_per_block": 1,
    }
    return kind(add_attention=False, **blocks, **sizes)


def text_encoder() -> Any:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=9,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=5,
        )
    )


def controlnet() -> Any:
    kind: Any = diffusers.ControlNetModel
    return kind(
        block_out_channels=(4, 8),
        down_block_types=("DownBlock2D",) * 2,
        norm_num_groups=2,
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=2,
        conditioning_embedding_out_channels=(4, 8),
    )


class Script:
    """A run with the hooks of ``train_text_to_image.py`` and ``train_dreambooth.py`` of diffusers
    0.42.

    ``frozen``: beginnings of the names of parameters that are not trained. ``options``: of
    ``save_pretrained``.
    """

    def __init__(
        self,
        *names: str,
        average: str = "",
        frozen: tuple[str, ...] = (),
        kind: Any = torch.optim.AdamW,
        optimizers: int = 1,
        pops: bool = True,
        **options: Any,
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True)
        makers: dict[str, Callable[[], Any]] = {
            "text_encoder": text_encoder,
            "controlnet": controlnet,
        }
        self.models = {name: makers.get(name, unet)() for name in names}
        self.options, self.average, self.pops = options, average, pops
        model = next(iter(self.models.values()))
        self.ema: Any = None
        if average:
            self.ema = EMAModel(
                model.parameters(), model_cls=type(model), model_config=model.config
            )
        for one in self.models.values():
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
        groups = [[model] for model in self.models.values()]
        groups = groups if optimizers > 1 else [list(self.models.values())]
        self.optimizers = [
            kind([p for model in group for p in model.parameters() if p.requires_grad])
            for group in groups
        ]
        self.accelerator.prepare(*self.models.values(), *self.optimizers)
        self.accelerator.register_save_state_pre_hook(self._save)
        self.accelerator.register_load_state_pre_hook(self._load)

    def step(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        if self.ema is not None:
            self.ema.step(next(iter(self.models.values())).parameters())

    def saved(self, folder: Path) -> Path:
        self.step()
        self.accelerator.save_state(str(folder))
        return folder

    def loads(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))
        self.step()

    def _save(self, models: list[Any], weights: list[Any], path: str) -> None:
        if self.ema is not None:
            self.ema.save_pretrained(os.path.join(path, self.average))
        for name, model in zip(self.models, models, strict=True):
            model.save_pretrained(os.path.join(path, name), **self.options)
        if self.pops:
            weights.clear()

    def _load(self, models: list[Any], path: str) -> None:
        if self.ema is not None:
            self.ema.load_state_dict(
                EMAModel.from_pretrained(
                    os.path.join(path, self.average), diffusers.UNet2DModel
                ).state_dict()
            )
        for name, model in zip(self.models, list(models), strict=True):
            loaded = type(model).from_pretrained(os.path.join(path, name))
            model.load_state_dict(loaded.state_dict())
        if self.pops:
            models.clear()


def unchecked(folder: Path) -> list[str]:
    return [words for words in check(folder).not_checked if "optimizer" in words]


HEALTHY: dict[str, Callable[[], Script]] = {
    "text to image": lambda: Script("unet"),
    "an average": lambda: Script("unet", average="unet_ema"),
    "an average under a name of its own": lambda: Script("unet", average="ema_model"),
    "shards": lambda: Script("unet", average="unet_ema", max_shard_size="5KB"),
    "pickles": lambda: Script("unet", safe_serialization=False),
    "ControlNet": lambda: Script("controlnet"),
    "a text encoder": lambda: Script("unet", "text_encoder"),
    "a text encoder and an average": lambda: Script("unet", "text_encoder", average="unet_ema"),
    "two networks": lambda: Script("unet", "discriminator", optimizers=2),
    "frozen weights": lambda: Script("unet", frozen=("conv_in", "down_blocks")),
    "a frozen text encoder": lambda: Script(
        "unet", "text_encoder", frozen=("text_model", "embeddings", "encoder")
    ),
    "SGD": lambda: Script("unet", kind=lambda parameters: torch.optim.SGD(parameters, 0.1)),
    "Adafactor": lambda: Script("unet", kind=torch.optim.Adafactor),
    "weights that the hook keeps": lambda: Script("unet", pops=False),
}


@pytest.mark.parametrize("kind", HEALTHY)
@pytest.mark.filterwarnings("ignore")
def test_models_of_hooks_are_healthy(kind: str, tmp_path: Path) -> None:
    script = HEALTHY[kind]()
    for step in (1, 2, 3):
        script.saved(tmp_path / f"run/checkpoint-{step}")
    HEALTHY[kind]().loads(tmp_path / "run/checkpoint-2")
    for folder in (tmp_path / "run").iterdir():
        assert problems(folder) == []
    shutil.copytree(tmp_path / "run/checkpoint-2", tmp_path / "alone/checkpoint-2")
    assert problems(tmp_path / "alone/checkpoint-2") == []


@pytest.mark.filterwarnings("ignore")
def test_gradient_checkpointing_is_healthy(tmp_path: Path) -> None:
    script = Script("unet")
    model = script.models["unet"]
    model.enable_gradient_checkpointing()
    model.train()
    script.accelerator.backward(model(torch.ones(1, 3, 8, 8), 1).sample.sum())
    folder = script.saved(tmp_path / "checkpoint-1")
    Script("unet").loads(folder)
    assert (problems(folder), unchecked(folder)) == ([], [])


def _changed(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def _without_a_key(tensors: Tensors) -> Tensors:
    return dict(list(tensors.items())[1:])


def _transposed(tensors: Tensors) -> Tensors:
    return {
        key: tensor.transpose(0, 1).contiguous() if tensor.ndim > 1 else tensor
        for key, tensor in tensors.items()
    }


def _prefixed(tensors: Tensors) -> Tensors:
    return {f"unet.{key}": tensor for key, tensor in tensors.items()}


def _refused(script: Script, folder: Path) -> None:
    with pytest.raises((OSError, RuntimeError, ValueError, NotImplementedError)):
        script.loads(folder)


@pytest.mark.parametrize("change", [_without_a_key, _transposed])
@pytest.mark.parametrize("others", [(), ("text_encoder",)])
@pytest.mark.filterwarnings("ignore")
def test_weights_contradict_the_optimizer(
    change: Callable[[Tensors], Tensors], others: tuple[str, ...], tmp_path: Path
) -> None:
    folder = Script("unet", *others).saved(tmp_path / "run/checkpoint-2")
    assert (problems(folder), unchecked(folder)) == ([], [])
    _changed(folder / "unet" / WEIGHTS, change)
    _refused(Script("unet", *others), folder)
    (problem,) = problems(folder)
    assert problem.startswith("optimizer.bin: ")
    assert check(folder).status == 1


@pytest.mark.parametrize("change", [_without_a_key, _transposed, _prefixed])
@pytest.mark.parametrize(
    "others", [("checkpoint-1",), ("checkpoint-3",), ("checkpoint-1", "checkpoint-3")]
)
@pytest.mark.filterwarnings("ignore")
def test_weights_contradict_the_checkpoints_next_to_it(
    change: Callable[[Tensors], Tensors], others: Iterable[str], tmp_path: Path
) -> None:
    script = Script("unet")
    for name in ("checkpoint-2", *others):
        script.saved(tmp_path / name)
    folder = tmp_path / "checkpoint-2"
    _changed(folder / "unet" / WEIGHTS, change)
    _refused(Script("unet"), folder)
    assert f"unet/{WEIGHTS}: it holds" in "".join(problems(folder))
    for name in others:
        assert problems(tmp_path / name) == []
    url = f"memory://{os.urandom(6).hex()}"
    for name in ("checkpoint-2", *others):
        upload_folder(tmp_path / name, f"{url}/{name}")
    if change is not _transposed:
        # Of a store sizes are compared, and the sizes are equal.
        assert f"unet/{WEIGHTS}: it holds" in "".join(problems(f"{url}/checkpoint-2"))


@pytest.mark.parametrize(
    "others",
    [("checkpoint-1", "checkpoint-3"), ("checkpoint-3", "checkpoint-4"), ("checkpoint-1",)],
)
@pytest.mark.filterwarnings("ignore")
def test_weights_of_a_lower_precision(others: Iterable[str], tmp_path: Path) -> None:
    script = Script("unet", "text_encoder", average="unet_ema")
    for name in ("checkpoint-2", *others):
        script.saved(tmp_path / name)
    folder = tmp_path / "checkpoint-2"
    _changed(
        folder / "unet_ema" / WEIGHTS,
        lambda tensors: {key: one.half() for key, one in tensors.items()},
    )
    # Its config has the new dtype.
    CLIPTextModel.from_pretrained(folder / "text_encoder").half().save_pretrained(
        folder / "text_encoder"
    )
    Script("unet", "text_encoder", average="unet_ema").loads(folder)
    severity = "warning" if list(others) == ["checkpoint-1", "checkpoint-3"] else "note"
    assert [(one.severity.value, str(one.path)) for one in check(folder).findings] == [
        (severity, "text_encoder/model.safetensors"), (severity, f"unet_ema/{WEIGHTS}")
    ]  # fmt: skip
    assert all(" tensors in F16" in str(one) for one in check(folder).findings)
    for name in others:
        assert problems(tmp_path / name) == []


class WithModule(Script):
    """A script that adds a module to ``unet`` in its second phase, which the config of diffusers
    does not have.
    """

    def __init__(self, *, is_trained: bool = True) -> None:
        super().__init__("unet")
        self.models["unet"].adapter = torch.nn.Linear(2, 3)
        if is_trained:
            self.optimizers[0].add_param_group(
                {"params": list(self.models["unet"].adapter.parameters())}
            )


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_the_newest_checkpoint_has_a_module_more(is_trained: bool, tmp_path: Path) -> None:
    script = Script("unet")
    for step in (1, 2):
        script.saved(tmp_path / f"checkpoint-{step}")
    folder = WithModule(is_trained=is_trained).saved(tmp_path / "checkpoint-3")
    report = check(folder)
    assert report.status == 0, problems(folder)
    assert [
        type(finding).__name__ for finding in report.all_findings if "unet/" in str(finding)
    ] == ["ChangedEntry"]
    assert latest_checkpoint(tmp_path) == folder
    # Between two others no script explains it.
    script.saved(tmp_path / "checkpoint-4")
    assert check(folder).status == 1


@pytest.mark.parametrize("change", [_without_a_key, _transposed, _prefixed])
@pytest.mark.filterwarnings("ignore")
def test_the_newest_checkpoint_lost_what_its_optimizer_has(
    change: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    script = Script("unet")
    for step in (1, 2, 3):
        script.saved(tmp_path / f"checkpoint-{step}")
    _changed(tmp_path / f"checkpoint-3/unet/{WEIGHTS}", change)
    _refused(Script("unet"), tmp_path / "checkpoint-3")
    assert f"unet/{WEIGHTS}: it holds" in "".join(problems(tmp_path / "checkpoint-3"))
    with pytest.warns(UserWarning, match="passed over checkpoint-3"):
        assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


@pytest.mark.parametrize("name", ["unet", "unet_ema"])
@pytest.mark.parametrize("change", [_without_a_key, _prefixed])
@pytest.mark.filterwarnings("ignore")
def test_an_average_and_its_model_have_different_keys(
    change: Callable[[Tensors], Tensors], name: str, tmp_path: Path
) -> None:
    folder = Script("unet", average="unet_ema").saved(tmp_path / "checkpoint-2")
    _changed(folder / name / WEIGHTS, change)
    _refused(Script("unet", average="unet_ema"), folder)
    assert f"{name}/{WEIGHTS}: it holds" in "".join(problems(folder))


@pytest.mark.parametrize("number", [4, 5])
@pytest.mark.parametrize("names", [("unet", "unet_ema"), ("unet_ema", "unet")])
@pytest.mark.filterwarnings("ignore")
def test_an_average_with_the_weights_of_its_model(
    number: int, names: tuple[str, str], tmp_path: Path
) -> None:
    """unet copied over unet_ema was clean. In the first save of EMAModel both are equal."""
    script = Script("unet", average="unet_ema")
    for saved in range(1, 6):
        script.saved(tmp_path / f"run/checkpoint-{saved}")
    source, target = names
    folder = tmp_path / f"run/checkpoint-{number}"
    shutil.copy(folder / source / WEIGHTS, folder / target / WEIGHTS)
    Script("unet", average="unet_ema").loads(folder)
    url = f"memory://{os.urandom(6).hex()}/run"
    upload_folder(tmp_path / "run", url)
    with_etags_of_bytes(url)
    for place in (folder, f"{url}/checkpoint-{number}"):
        (finding,) = check(place).findings
        count = {4: 3, 5: 2}[number]
        assert str(finding) == (
            f"unet_ema/{WEIGHTS}: it holds the weights of unet/ (expected an average that differs "
            f"from them, as in {count} neighbouring checkpoints)"
        )
        assert finding.severity is Severity.NOTE
        assert finding.differs
    others = [tmp_path / f"run/checkpoint-{saved}" for saved in range(1, 6) if saved != number]
    assert [problems(other) for other in others] == [[]] * 4


@pytest.mark.filterwarnings("ignore")
def test_a_lost_frozen_weight_is_not_checked(tmp_path: Path) -> None:
    script = Script("unet", frozen=("conv_in",))
    folder = script.saved(tmp_path / "checkpoint-2")
    _changed(
        folder / "unet" / WEIGHTS,
        lambda tensors: {k: v for k, v in tensors.items() if k != "conv_in.bias"},
    )
    _refused(Script("unet", frozen=("conv_in",)), folder)
    assert problems(folder) == []
    (words,) = unchecked(folder)
    assert words.startswith(
        "whether unet/ lost frozen weights: the optimizers have no moments for 1 of"
    )


@pytest.mark.filterwarnings("ignore")
def test_a_changed_model_of_a_new_config_is_healthy(tmp_path: Path) -> None:
    """As of a script whose next run has a larger model."""
    script = Script("unet")
    for step in (1, 2):
        script.saved(tmp_path / f"checkpoint-{step}")
    kind: Any = diffusers.UNet2DModel
    other = kind.from_config({**script.models["unet"].config, "layers_per_block": 2})
    torch.manual_seed(0)
    larger = Script("unet")
    larger.models["unet"] = other
    other.save_pretrained(tmp_path / "checkpoint-2/unet")
    optimizer = torch.optim.AdamW(other.parameters())
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "checkpoint-2/optimizer.bin")
    assert (
        json.loads((tmp_path / "checkpoint-2/unet/config.json").read_text())["layers_per_block"]
        == 2
    )
    assert [problem for problem in problems(tmp_path / "checkpoint-2") if "unet/" in problem] == []


def _exchange(folder: Path, first: str, second: str) -> None:
    (folder / first).rename(folder / "third")
    (folder / second).rename(folder / first)
    (folder / "third").rename(folder / second)


def _folders(folder: Path) -> None:
    _exchange(folder, "unet", "unet_ema")


def _configs(folder: Path) -> None:
    _exchange(folder, "unet/config.json", "unet_ema/config.json")


def _without_counters(folder: Path) -> None:
    path = folder / "unet_ema/config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps({key: value for key, value in config.items() if key != "optimization_step"})
    )


@pytest.mark.parametrize("change", [_folders, _configs, _without_counters])
@pytest.mark.parametrize("others", [(), ("checkpoint-1",), ("checkpoint-3",)])
@pytest.mark.filterwarnings("ignore")
def test_an_average_without_its_counters(
    change: Callable[[Path], None], others: Iterable[str], tmp_path: Path
) -> None:
    script = Script("unet", average="unet_ema")
    for name in ("checkpoint-2", *others):
        script.saved(tmp_path / name)
    folder = tmp_path / "checkpoint-2"
    assert problems(folder) == []
    change(folder)
    again = Script("unet", average="unet_ema")
    again.accelerator.load_state(str(folder))
    # Its average begins to count anew, without an error.
    assert again.ema.optimization_step == 0
    if change is _without_counters and not others:
        assert problems(folder) == []
        return
    (problem,) = problems(folder)
    assert problem.startswith("unet_ema/config.json: it holds no EMA counters (expected decay and")
    assert ("swapped with unet/config.json" in problem) is (change is not _without_counters)
    # No step repairs it, and the report of the repair says so, too.
    for receipt in (repair(folder, dry_run=True), repair(folder, output=tmp_path / "copy")):
        assert [str(finding) for finding in receipt.left] == [problem]
        assert (receipt.found, receipt.steps, receipt.status) == (receipt.left, (), 1)
    if not others:
        with pytest.raises(UsageError, match="no EMA counters"):
            latest_checkpoint(tmp_path)
    for name in others:
        assert problems(tmp_path / name) == []


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_began_with_an_average_is_healthy(tmp_path: Path) -> None:
    """diffusers keeps the counters of an exported average in the config of the model that it
    loads.
    """
    script = Script("unet", average="unet_ema")
    script.saved(tmp_path / "first/checkpoint-1")
    kind: Any = diffusers.UNet2DModel
    kind.from_pretrained(tmp_path / "first/checkpoint-1/unet_ema").save_pretrained(
        tmp_path / "model"
    )
    assert "optimization_step" in json.loads((tmp_path / "model/config.json").read_text())
    model = script.models["unet"]
    model.register_to_config(**kind.from_pretrained(tmp_path / "model").config)
    for step in (1, 2):
        script.saved(tmp_path / f"second/checkpoint-{step}")
        assert problems(tmp_path / f"second/checkpoint-{step}") == []


@pytest.mark.filterwarnings("ignore")
def test_an_average_that_a_script_computes_itself_is_healthy(tmp_path: Path) -> None:
    script = Script("unet")
    for step in (1, 2):
        folder = script.saved(tmp_path / f"checkpoint-{step}")
        shutil.copytree(folder / "unet", folder / "unet_ema")
        assert problems(folder) == []


@pytest.mark.parametrize("inner", ["unet", "copy"])
@pytest.mark.filterwarnings("ignore")
def test_a_model_one_level_too_deep(inner: str, tmp_path: Path) -> None:
    script = Script("unet", average="unet_ema")
    for step in (1, 2):
        folder = script.saved(tmp_path / f"checkpoint-{step}")
    (folder / "unet").rename(folder / "third")
    (folder / "unet").mkdir()
    (folder / "third").rename(folder / "unet" / inner)
    _refused(Script("unet", average="unet_ema"), folder)
    (problem,) = problems(folder)
    assert (
        "only this folder of the same name" if inner == "unet" else "unet/config.json"
    ) in problem
    assert [words for words in check(folder).not_checked if words.startswith("unet/ (")] == []
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
