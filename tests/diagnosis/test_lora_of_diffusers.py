"""LoRA of diffusers against the load: what a stock pipeline brings to life of each damaged file,
and healthy files of every writer.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from diffusers import utils as diffusers_utils
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel

from ckptfix import check
from ckptfix.checkpoint.load_inputs import Load
from ckptfix.cli import run
from ckptfix.diagnosis.findings.base import Action, Finding
from ckptfix.diagnosis.loads.lora_of_pipelines import judge_lora
from ckptfix.formats.tensor import TensorInfo
from tests.diagnosis.builders import new_accelerator, verdict

peft: Any = pytest.importorskip("peft", reason="only PEFT makes the LoRA that diffusers saves")
pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHTS = "pytorch_lora_weights.safetensors"
PIPELINE: Any = diffusers.StableDiffusion3Pipeline
OF_UNET: Any = diffusers.StableDiffusionPipeline
UTILS: Any = diffusers_utils
Tensors = dict[str, torch.Tensor]
Change = Callable[[str], str]


def unet() -> Any:
    torch.manual_seed(0)
    kind: Any = diffusers.UNet2DConditionModel
    return kind(
        sample_size=8, layers_per_block=1, block_out_channels=(4,), norm_num_groups=2,
        down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=4, attention_head_dim=2,
    )  # fmt: skip


def transformer() -> Any:
    torch.manual_seed(0)
    kind: Any = diffusers.SD3Transformer2DModel
    return kind(
        sample_size=8, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=4,
        num_attention_heads=2, caption_projection_dim=8, joint_attention_dim=8,
        pooled_projection_dim=8,
    )  # fmt: skip


def text_encoder() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    return CLIPTextModel(CLIPTextConfig(vocab_size=9, num_attention_heads=1, **sizes))


TARGETS = ["to_q", "to_k", "q_proj", "k_proj"]
MODELS = {"unet": unet, "transformer": transformer, "text_encoder": text_encoder}


def trained(component: str) -> Any:
    """Return the model of a component with LoRA that is not zero."""
    model = MODELS[component]()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False))
    return model


def of(component: str) -> Tensors:
    return dict(peft.get_peft_model_state_dict(trained(component)))


def saved(folder: Path, **layers: Tensors) -> Path:
    """Save LoRA as the pipelines do. ``layers``: component -> its tensors."""
    pipeline = OF_UNET if "unet" in layers else PIPELINE
    pipeline.save_lora_weights(folder, **{f"{name}_lora_layers": it for name, it in layers.items()})
    return folder


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    tensors = change(load_file(folder / WEIGHTS))
    contiguous = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    save_file(contiguous, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def renamed(folder: Path, change: Change) -> Path:
    return rewrite(folder, lambda tensors: {change(key): it for key, it in tensors.items()})


def _norm(model: Any) -> float:
    return float(sum(it.abs().sum() for key, it in model.named_parameters() if ".lora_B." in key))


def live(folder: Path, component: str) -> float | str:
    """Return what stock diffusers brings to life in a component, 1 for all of it, or its error."""
    model = MODELS[component.removesuffix("_2")]()
    try:
        if component == "unet":
            state, alphas = OF_UNET.lora_state_dict(folder)
            OF_UNET.load_lora_into_unet(state, alphas, model)
        elif component == "transformer":
            PIPELINE.load_lora_into_transformer(PIPELINE.lora_state_dict(folder), model)
        else:
            state = PIPELINE.lora_state_dict(folder)
            PIPELINE.load_lora_into_text_encoder(state, None, model, prefix=component)
    except (ValueError, IndexError, KeyError) as error:
        return type(error).__name__
    return round(_norm(model) / _norm(trained(component.removesuffix("_2"))), 3)


def unchecked(folder: Path) -> str:
    (words,) = (it for it in check(folder).not_checked if "against its pipeline" in it)
    return words


def compiled(component: str, folder: Path) -> Path:
    """Save LoRA of a compiled model as a script does that forgets to unwrap it."""
    model = torch.compile(trained(component), backend="eager")
    layers = dict(peft.get_peft_model_state_dict(model))
    assert all(key.startswith("_orig_mod.") for key in layers)
    return saved(folder, **{component: layers})


@pytest.mark.parametrize("component", MODELS)
def test_lora_of_a_compiled_model(component: str, tmp_path: Path) -> None:
    folder = compiled(component, tmp_path)
    loaded = live(folder, component)
    assert loaded == ("IndexError" if component == "text_encoder" else 0)
    (finding,) = check(folder).findings
    assert verdict(folder) == [("dead-adapter", "error")]
    assert ("without an error" in str(finding)) == (loaded == 0)
    assert "keep_torch_compile=False" in finding.advice
    assert run(["repair", str(folder)]) == 0
    assert live(folder, component) == 1
    assert verdict(folder) == []
    assert run(["undo", str(folder)]) == 0
    assert verdict(folder) == [("dead-adapter", "error")]


def prefixed(layers: Tensors, prefix: str) -> Tensors:
    return {f"{prefix}{key}": tensor for key, tensor in layers.items()}


def is_repaired(folder: Path, component: str) -> bool:
    assert run(["repair", str(folder)]) == 0
    return (live(folder, component), verdict(folder)) == (1, [])


WRAPPERS = ["module.", "base_model.model.", "_orig_mod.module.", "_fsdp_wrapped_module."]


@pytest.mark.parametrize(
    ("component", "wrapper"),
    [*(("unet", wrapper) for wrapper in WRAPPERS), *((name, "module.") for name in MODELS)],
)
def test_lora_behind_a_wrapper(wrapper: str, component: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, **{component: prefixed(of(component), wrapper)})
    # NoMatchingPeftModuleError of PEFT 0.21 is a ValueError, as which older ones raise it.
    assert str(live(folder, component)).endswith("Error")
    assert verdict(folder) == [("dead-adapter", "error")]
    assert "without an error" not in str(check(folder).findings[0])
    assert is_repaired(folder, component)


DEEPER: dict[str, tuple[str, Change]] = {
    "blocks": ("transformer", lambda key: key.replace("_blocks.0.", "_blocks.0._orig_mod.")),
    "layers": ("text_encoder", lambda key: key.replace("layers.0.", "layers.0._orig_mod.")),
    "checkpointed": ("unet", lambda key: key.replace("s.0.", "s.0._checkpoint_wrapped_module.")),
    "attentions": ("unet", lambda key: key.replace("attn1.", "attn1._orig_mod.")),
}  # fmt: skip


@pytest.mark.parametrize("kind", DEEPER)
def test_wrappers_inside_of_keys(kind: str, tmp_path: Path) -> None:
    component, change = DEEPER[kind]
    folder = renamed(saved(tmp_path, **{component: of(component)}), change)
    loaded = live(folder, component)
    assert loaded != 1
    assert verdict(folder) == [("dead-adapter", "error")]
    assert ("without an error" in str(check(folder).findings[0])) == isinstance(loaded, float)
    assert is_repaired(folder, component)


def without_component(key: str) -> str:
    return key.partition(".")[2]


FOREIGN: dict[str, Change] = {
    "no component": without_component,
    "PEFT": lambda key: f"base_model.model.{without_component(key)}",
    "another component": lambda key: f"transformer.{without_component(key)}",
    "a compiled model without one": lambda key: f"_orig_mod.{without_component(key)}",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_keys_without_the_component(kind: str, tmp_path: Path) -> None:
    folder = renamed(saved(tmp_path, unet=of("unet")), FOREIGN[kind])
    assert live(folder, "unet") == 0
    (finding,) = check(folder).findings
    may_be_of_model = kind == "no component"
    severity = "warning" if may_be_of_model else "error"
    assert (finding.code, finding.severity.value) == ("dead-adapter", severity)
    assert "without an error" in str(finding)
    assert ("load_lora_adapter" if may_be_of_model else "belong to the unet") in finding.advice
    assert run(["repair", str(folder)]) == 1
    assert live(folder, "unet") == 0
    assert run(["repair", str(folder), "--allow", "dead-adapter"]) == 0
    assert (live(folder, "unet"), verdict(folder)) == (1, [])


def test_blocks_of_a_transformer_without_the_component(tmp_path: Path) -> None:
    folder = renamed(saved(tmp_path, transformer=of("transformer")), without_component)
    assert live(folder, "transformer") == 0
    assert verdict(folder) == [("dead-adapter", "warning")]


def test_one_of_several_components_is_wrapped(tmp_path: Path) -> None:
    layers = prefixed(of("transformer"), "module.")
    folder = saved(tmp_path, transformer=layers, text_encoder=of("text_encoder"))
    assert live(folder, "text_encoder") == 1
    assert "fails on 4 of 8 tensors" in str(check(folder).findings[0])
    assert run(["repair", str(folder)]) == 0
    assert (live(folder, "transformer"), live(folder, "text_encoder")) == (1, 1)


def test_two_wrapped_components_need_another_save(tmp_path: Path) -> None:
    names = ("transformer", "text_encoder")
    folder = saved(tmp_path, **{name: prefixed(of(name), "module.") for name in names})
    before = (folder / WEIGHTS).read_bytes()
    (finding,) = check(folder).findings
    assert "by one rule" in finding.advice
    assert (finding.severity.value, finding.is_fixable) == ("error", False)
    assert run(["repair", str(folder)]) == 1
    assert (folder / WEIGHTS).read_bytes() == before


def kohya(tensors: Tensors) -> Tensors:
    """Return LoRA of a UNet under the keys of kohya's scripts."""
    result: Tensors = {}
    halves = {".lora_A.weight": ".lora_down.weight", ".lora_B.weight": ".lora_up.weight"}
    for key, tensor in tensors.items():
        module, dot, name = key.removeprefix("unet.").partition(".lora_")
        place = f"lora_unet_{module.replace('.', '_')}"
        result[place + halves[dot + name]] = tensor
        result[f"{place}.alpha"] = torch.tensor(2.0)
    return result


def lost(*parts: str, modules: int = 99) -> Callable[[Tensors], Tensors]:
    """Return what leaves out keys with these parts, of so many modules."""

    def change(tensors: Tensors) -> Tensors:
        chosen = [key for key in tensors if any(part in key for part in parts)][:modules]
        return {key: tensor for key, tensor in tensors.items() if key not in chosen}

    return change


HALVES = {
    "all of A": (lost("lora_A"), "without an error"),
    "all of B": (lost("lora_B"), "fails"),
    "one A": (lost("lora_A", modules=1), "without an error"),
    "one B": (lost("lora_B", modules=1), "without an error"),
    "kohya's down": (lambda it: lost("lora_down", modules=1)(kohya(it)), "fails"),
    "kohya's up": (lambda it: lost("lora_up")(kohya(it)), "fails"),
    "kohya's alpha alone": (lambda it: lost("to_q.lora")(kohya(it)), "fails"),
}


@pytest.mark.parametrize("kind", HALVES)
def test_one_of_two_matrices(kind: str, tmp_path: Path) -> None:
    change, effect = HALVES[kind]
    healthy = saved(tmp_path / "healthy", unet=of("unet"))
    folder = rewrite(saved(tmp_path / "damaged", unet=of("unet")), change)
    loaded = live(folder, "unet")
    if effect == "fails":
        assert str(loaded).endswith("Error")
    else:
        # A new A is random, so that B alone makes another model of it.
        assert len(load_file(folder / WEIGHTS)) < len(load_file(healthy / WEIGHTS))
        assert loaded == (1 if "A" in kind else pytest.approx(0.95, abs=0.04))
    assert verdict(folder) == [("incomplete-adapter", "error")]
    assert effect in str(check(folder).findings[0])


@pytest.mark.parametrize("component", MODELS)
def test_one_of_two_matrices_of_former_names(component: str, tmp_path: Path) -> None:
    layers = of(component)
    if component != "transformer":
        layers = UTILS.convert_state_dict_to_diffusers(layers)
    folder = rewrite(saved(tmp_path, **{component: layers}), lost(".up.", "lora_B"))
    assert live(folder, component) == "IndexError"
    assert verdict(folder) == [("incomplete-adapter", "error")]


def test_no_tensors(tmp_path: Path) -> None:
    folder = rewrite(saved(tmp_path, unet=of("unet")), lambda _: {})
    assert live(folder, "unet") == 0
    assert verdict(folder) == [("incomplete-adapter", "error")]


def test_lost_modules_are_not_checked(tmp_path: Path) -> None:
    folder = rewrite(saved(tmp_path, unet=of("unet")), lost("up_blocks"))
    assert 0 < float(live(folder, "unet")) < 1
    assert verdict(folder) == []
    assert "whether every module has tensors" in unchecked(folder)


def _old(key: str) -> str:
    """Return a key as diffusers before 0.26 saved it."""
    for name in ("to_q", "to_k"):
        for half, former in (("lora_A", "down"), ("lora_B", "up")):
            key = key.replace(f".{name}.{half}.", f".processor.{name}_lora.{former}.")
    return key


HEALTHY: dict[str, tuple[tuple[str, ...], Callable[[Path], Path]]] = {
    "UNet": (("unet",), lambda path: saved(path, unet=of("unet"))),
    "former names": (
        ("unet",), lambda path: saved(path, unet=UTILS.convert_state_dict_to_diffusers(of("unet"))),
    ),
    "oldest names": (("unet",), lambda path: renamed(saved(path, unet=of("unet")), _old)),
    "kohya": (("unet",), lambda path: rewrite(saved(path, unet=of("unet")), kohya)),
    "transformer and text encoders": (
        ("transformer", "text_encoder", "text_encoder_2"),
        lambda path: saved(
            path, transformer=of("transformer"), text_encoder=of("text_encoder"),
            text_encoder_2=of("text_encoder"),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_lora(kind: str, tmp_path: Path) -> None:
    components, save = HEALTHY[kind]
    folder = save(tmp_path)
    assert [live(folder, component) for component in components] == [1] * len(components)
    assert verdict(folder) == []
    assert "whether every module has tensors" in unchecked(folder)
    assert run(["check", str(folder)]) == 0


def test_lora_of_a_model_itself(tmp_path: Path) -> None:
    trained("unet").save_lora_adapter(tmp_path)
    assert live(tmp_path, "unet") == 0
    model = unet()
    model.load_lora_adapter(tmp_path, prefix=None, use_safetensors=True)
    assert _norm(model) == pytest.approx(_norm(trained("unet")))
    assert verdict(tmp_path) == []
    assert "load_lora_adapter with prefix=None" in unchecked(tmp_path)


class Judged(NamedTuple):
    findings: list[Finding]
    unchecked: list[str]


def judged(*keys: str, metadata: dict[str, str] | None = None, states: str = "") -> Judged:
    path: Any = Path(WEIGHTS)
    load = Load(
        path=path, library="diffusers", configs={}, is_lora=True, metadata=metadata or {},
        tensors={key: TensorInfo(key, "F32", (2, 2), None) for key in keys}, states_of=states,
    )  # fmt: skip
    said = list(judge_lora(load))
    return Judged(
        [item for item in said if isinstance(item, Finding)],
        [item for item in said if isinstance(item, str)],
    )


def pair(module: str) -> tuple[str, str]:
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def kohya_pair(module: str) -> tuple[str, str]:
    return f"{module}.lora_down.weight", f"{module}.lora_up.weight"


OF_SD3 = "transformer_blocks.0.attn.to_q"
CONVERTED = {
    "ComfyUI": pair("diffusion_model.blocks.0.self_attn.q"),
    "Flux of fal": pair("base_model.model.double_blocks.0.img_attn.qkv"),
    "Flux.2 of PEFT": pair(f"base_model.model.{OF_SD3}"),
    "ERNIE of PEFT": pair("base_model.model.layers.0.self_attention.to_q"),
    "MiniMax": pair("blocks.0.attn.qkv"),
    "Qwen": (*pair(OF_SD3), f"{OF_SD3}.alpha"),
    "a named adapter": tuple(key.replace(".weight", ".default.weight") for key in pair(OF_SD3)),
    "xlabs": tuple(
        f"double_blocks.0.processor.qkv_lora1.{half}.weight" for half in ("down", "up")
    ),
    "Hunyuan": pair("double_blocks.0.img_attn_qkv"),
    "LoKr": (f"{OF_SD3}.lokr_w1", f"{OF_SD3}.lokr_w2"),
    "lora_transformer_": kohya_pair("lora_transformer_blocks_0_attn_to_q"),
    "BFL": (*pair("double_blocks.0.img_attn.proj"), "double_blocks.0.norm.query_norm.scale"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONVERTED)
def test_keys_that_some_pipeline_converts(kind: str) -> None:
    result = judged(*CONVERTED[kind])
    assert result.findings == []
    (words,) = result.unchecked
    assert "whether it converts keys such as" in words


OF_KOHYA = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
PLAIN = {
    "cascade": pair("prior.down_blocks.0.0.attention.to_q"),
    "Wan": (*pair("transformer.blocks.0.attn1.to_q"), *pair("transformer_2.blocks.0.attn1.to_q")),
    "LTX": (*pair("transformer.transformer_blocks.0.attn1.to_q"), *pair("connectors.video.to_q")),
    "biases": (*pair("transformer.proj_out"), "transformer.proj_out.lora_B.bias"),
    "DoRA": (*pair("unet.mid_block.to_q"), "unet.mid_block.to_q.lora_magnitude_vector"),
    "kohya": (*kohya_pair(OF_KOHYA), f"{OF_KOHYA}.alpha"),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLAIN)
def test_keys_of_components(kind: str) -> None:
    result = judged(*PLAIN[kind])
    assert result.findings == []
    assert "converts" not in result.unchecked[0]


@pytest.mark.parametrize("states", ["save_state", "script", "Trainer"])
def test_a_script_may_load_keys_without_a_component(states: str) -> None:
    result = judged(*pair("down_blocks.0.to_q"), states=states)
    assert result.findings == []
    assert "load_lora_weights of a pipeline leaves them out" in result.unchecked[0]


def test_settings_of_a_pipeline_are_no_excuse() -> None:
    settings = {"lora_adapter_metadata": json.dumps({"unet.peft_type": "LORA", "unet.r": 2})}
    (finding,) = judged(*pair("down_blocks.0.to_q"), metadata=settings).findings
    assert finding.severity.value == "error"


def test_a_wrapper_before_keys_of_another_program(tmp_path: Path) -> None:
    (finding,) = judged(*pair("diffusion_model._orig_mod.blocks.0.q")).findings
    assert "expected keys like 'diffusion_model.blocks.0.q.lora_A.weight'" in str(finding)
    assert "does not load 2 of 2 tensors" in str(finding)


def _findings_of_hooks(folder: Path) -> list[Finding]:
    return [each for each in check(folder).findings if each.code == "dead-adapter"]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_lora_that_a_hook_saves(is_compiled: bool, tmp_path: Path) -> None:
    """A compiled model is a warning in ``save_state``: its load hook may look for these keys."""
    accelerator = new_accelerator()
    model = trained("unet").requires_grad_(False)
    parameters = [each for key, each in model.named_parameters() if "lora_" in key]
    optimizer = torch.optim.AdamW([each.requires_grad_() for each in parameters])
    wrapped: Any = torch.compile(model, backend="eager") if is_compiled else model
    wrapped, optimizer = accelerator.prepare(wrapped, optimizer)

    def save(models: list[Any], weights: list[Any], path: str) -> None:
        saved(Path(path), unet=dict(peft.get_peft_model_state_dict(models[0])))
        weights.clear()

    accelerator.register_save_state_pre_hook(save)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    accelerator.save_state(str(tmp_path))
    assert live(tmp_path, "unet") == (0 if is_compiled else pytest.approx(1, abs=0.05))
    severities = [each.severity.value for each in _findings_of_hooks(tmp_path)]
    assert severities == (["warning"] if is_compiled else [])
    assert "whether every module has tensors" in unchecked(tmp_path)
    if is_compiled:
        assert "load hook of the script" in _findings_of_hooks(tmp_path)[0].advice
        assert run(["repair", str(tmp_path), "--allow", "dead-adapter"]) == 0
        assert live(tmp_path, "unet") == pytest.approx(1, abs=0.05)


def test_states_of_a_script_next_to_it(tmp_path: Path) -> None:
    folder = compiled("unet", tmp_path)
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    assert ("dead-adapter", "warning") in verdict(folder)


def test_keys_of_attention_processors_are_those_of_another_load(tmp_path: Path) -> None:
    """diffusers of 2023 saved LoRA so, for ``load_attn_procs`` of a UNet."""
    before = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.processor.to_q_lora"
    tensors = {f"{before}.down.weight": torch.ones(4, 8), f"{before}.up.weight": torch.ones(8, 4)}
    save_file(tensors, tmp_path / "pytorch_lora_weights.safetensors", {"format": "pt"})
    report = check(tmp_path)
    assert report.findings == ()
    assert any("converts keys such as" in words for words in report.not_checked)


def test_keys_with_the_name_of_the_adapter(tmp_path: Path) -> None:
    """``state_dict()`` of a model has them, and PEFT adds the name again."""
    folder = renamed(
        saved(tmp_path, unet=of("unet")), lambda key: key.replace(".weight", ".default.weight")
    )
    assert live(folder, "unet") == 0
    assert verdict(folder) == [("dead-adapter", "error")]
    assert is_repaired(folder, "unet")


def test_two_keys_that_a_repair_would_give_one_name() -> None:
    """A finding must not promise a repair that is refused."""
    (finding,) = judged(*pair("unet.mid_block.q"), *pair("unet._orig_mod.mid_block.q")).findings
    assert finding.action is Action.TELL
    assert "ckptfix repair" not in finding.advice
