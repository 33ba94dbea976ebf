"""Prove ``check --load`` against real loads: ``python -m tests.benchmarks.loads [SECONDS [I/N]]``.

Every architecture of transformers that can be built small, kinds of PEFT adapters after real steps,
and models of diffusers are saved, healthy and with each of six damages. The library loads each
folder from its files; ``ask`` must name the same random, ignored and mismatched keys from headers
alone, and as many live tensors. The table also counts what plain ``check`` says, without torch.
SECONDS: no new architecture begins after them. The first class of each model type comes first, then
the second of each. I/N: part I of N, from 0 to N-1.
"""

import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto

from ckptfix import check
from ckptfix.checkpoint.folder import scan_folder
from ckptfix.checkpoint.load_inputs import Load, loads_of
from ckptfix.checkpoint.model_files import group_files
from ckptfix.devices.reload.oracle import ask
from ckptfix.diagnosis.loads.loaders import Asked
from ckptfix.diagnosis.loads.outcome import LoadOutcome
from tests.tiny_adapters import bert, gpt2, llama, mixtral, peft, t5, tied_llama
from tests.tiny_models import small

diffusers: Any = pytest.importorskip("diffusers")

Tensors = Mapping[str, torch.Tensor]

_LARGEST = 8_000_000
"""Parameters of a model that is still small: 119 classes have sizes of other names, and are left
out.
"""


class Subject(NamedTuple):
    """A healthy model. ``save``: into a folder, which it returns with a base model next to it where
    it needs one.

    ``real``: loads the folder from its files.
    """

    name: str
    library: str
    save: Callable[[Path], None]
    real: Callable[[Path], "Real"]


class Real(NamedTuple):
    """What a library says of a load from files. ``live``: keys of an adapter. ``refused``: its
    error.
    """

    missing: frozenset[str] = frozenset()
    unexpected: frozenset[str] = frozenset()
    mismatched: frozenset[str] = frozenset()
    live: frozenset[str] | None = None
    refused: str = ""

    def is_damaged(self, healthy: Tensors) -> bool:
        """Return whether the load is not the model that was saved. ``healthy``: tensors before the
        damage.
        """
        if self.live is not None and not self.live >= healthy.keys():
            return True
        return bool(self.missing or self.mismatched or self.refused)


# Subjects


def architectures() -> Iterator[tuple[str, type]]:
    """Yield model types with a class of each that the auto classes know, then with the next of
    each.
    """
    by_type: dict[str, dict[str, None]] = {}
    for name in dir(modeling_auto):
        if name.startswith("MODEL") and name.endswith("MAPPING_NAMES"):
            for kind, classes in getattr(modeling_auto, name).items():
                names = classes if isinstance(classes, tuple | list) else [classes]
                by_type.setdefault(kind, {}).update(dict.fromkeys(names))
    # A class with a head has more to lose than the base model.
    ordered = [
        [(kind, name) for name in sorted(names, key=lambda name: "For" not in name)]
        for kind, names in sorted(by_type.items())
    ]
    for row in zip_longest(*ordered):
        for kind, name in filter(None, row):
            cls = getattr(transformers, name, None)
            if cls is not None:
                yield kind, cls


def of_architecture(kind: str, cls: Any) -> Subject | None:
    """Return a small model of a class, None where the usual sizes do not make one."""
    try:
        config = transformers.CONFIG_MAPPING[kind]
        settings = small(config().to_dict())
        settings.pop("architectures", None)
        made = config.from_dict(settings)
        with torch.device("meta"):
            skeleton = cls._from_config(made, attn_implementation="eager")
        if sum(parameter.numel() for parameter in skeleton.parameters()) > _LARGEST:
            return None
        torch.manual_seed(0)
        model = cls._from_config(made, attn_implementation="eager")
    except Exception:
        return None
    return of_transformers(f"{cls.__name__} ({kind})", model)


def of_transformers(name: str, model: Any) -> Subject:
    """Return a model of transformers."""
    return Subject(name, "transformers", model.save_pretrained, partial(_really, type(model)))


def _really(cls: Any, folder: Path) -> Real:
    try:
        _, info = cls.from_pretrained(
            str(folder),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
        )
    except Exception as error:
        return Real(refused=str(error) or type(error).__name__)
    return Real(
        frozenset(info["missing_keys"]),
        frozenset(info["unexpected_keys"]),
        frozenset(key for key, *_ in info["mismatched_keys"]),
        refused="; ".join(map(str, info["error_msgs"])),
    )


_UNET = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}
_CROSS = {**_UNET, "cross_attention_dim": 8, "attention_head_dim": 4}
_DOWN, _UP = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
_TINY = {"num_attention_heads": 2, "attention_head_dim": 4, "in_channels": 8, "num_layers": 1}
_ENCODER = {"block_out_channels": (8,), "norm_num_groups": 4, "latent_channels": 4}

OF_DIFFUSERS: dict[str, dict[str, Any]] = {
    "UNet2DModel": {
        **_UNET, "sample_size": 8, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4,
    },
    "UNet2DConditionModel": {**_CROSS, "sample_size": 8, "down_block_types": _DOWN, "up_block_types": _UP},
    "ControlNetModel": {**_CROSS, "down_block_types": _DOWN, "conditioning_embedding_out_channels": (8, 8)},
    "AutoencoderKL": _ENCODER,
    "VQModel": _ENCODER,
    "AutoencoderTiny": {
        "encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8),
        "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1),
    },
    "Transformer2DModel": {**_TINY, "norm_num_groups": 4},
    "DiTTransformer2DModel": {**_TINY, "sample_size": 8, "norm_num_groups": 4},
    "PixArtTransformer2DModel": {
        **_TINY, "sample_size": 8, "cross_attention_dim": 8, "caption_channels": 8,
        "norm_num_groups": 4,
    },
    "SD3Transformer2DModel": {
        **_TINY, "sample_size": 8, "joint_attention_dim": 8, "caption_projection_dim": 8,
        "pooled_projection_dim": 8, "out_channels": 4,
    },
    "FluxTransformer2DModel": {
        **_TINY, "attention_head_dim": 8, "num_single_layers": 1, "joint_attention_dim": 8,
        "pooled_projection_dim": 8, "axes_dims_rope": (2, 2, 4),
    },
    # Its modules that stay in fp32 make diffusers load it in another way.
    "WanTransformer3DModel": {**_TINY, "attention_head_dim": 12, "text_dim": 8, "freq_dim": 8, "ffn_dim": 8},
    "MotionAdapter": {
        "block_out_channels": (8, 8), "motion_layers_per_block": 1, "motion_num_attention_heads": 2,
        "motion_norm_num_groups": 4,
    },
}  # fmt: skip


def of_diffusers(name: str) -> Subject:
    """Return a small model of diffusers."""
    cls = getattr(diffusers, name)

    def real(folder: Path) -> Real:
        # Without its shortcut over the meta device it names every mismatched tensor, and not the
        # first one.
        plain = {} if cls._keep_in_fp32_modules else {"low_cpu_mem_usage": False}
        try:
            _, info = cls.from_pretrained(
                str(folder), output_loading_info=True, ignore_mismatched_sizes=True, **plain
            )
        except Exception as error:
            return Real(refused=str(error))
        mismatched = frozenset(key for key, *_ in info["mismatched_keys"])
        return Real(frozenset(info["missing_keys"]), frozenset(info["unexpected_keys"]), mismatched)

    torch.manual_seed(0)
    return Subject(name, "diffusers", cls(**OF_DIFFUSERS[name]).save_pretrained, real)


_TWO = ["q_proj", "v_proj"]
_LORA = partial(peft.LoraConfig, r=4, target_modules=_TWO)
_VIRTUAL = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
_EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]

OF_PEFT: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "LoRA": (llama, _LORA),
    "LoRA of a causal model": (llama, partial(_LORA, task_type="CAUSAL_LM")),
    "DoRA": (llama, partial(_LORA, use_dora=True)),
    "rsLoRA": (llama, partial(_LORA, use_rslora=True)),
    "PiSSA": (llama, partial(_LORA, init_lora_weights="pissa")),
    "OLoRA": (llama, partial(_LORA, init_lora_weights="olora")),
    "biases": (llama, partial(_LORA, lora_bias=True)),
    "biases of the model": (bert, partial(_LORA, target_modules=["query"], bias="all")),
    "ranks": (llama, partial(_LORA, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 4})),
    "all-linear": (llama, partial(_LORA, target_modules="all-linear")),
    "a regex": (llama, partial(_LORA, target_modules=r".*\.q_proj")),
    "one layer": (llama, partial(_LORA, layers_to_transform=[1])),
    "embeddings": (llama, partial(_LORA, target_modules=["embed_tokens", "q_proj"])),
    "heads": (llama, partial(_LORA, modules_to_save=["lm_head", "embed_tokens"])),
    "tied heads": (tied_llama, partial(_LORA, modules_to_save=["lm_head", "embed_tokens"])),
    "a classifier": (bert, partial(_LORA, target_modules=["query"], task_type="SEQ_CLS")),
    "tokens": (llama, partial(_LORA, trainable_token_indices=[0, 1])),
    "Conv1D": (gpt2, partial(_LORA, target_modules=["c_attn"], fan_in_fan_out=True)),
    "an encoder and a decoder": (t5, partial(_LORA, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")),
    "experts": (mixtral, partial(_LORA, target_modules=["q_proj"], target_parameters=_EXPERTS)),
    "replicated layers": (llama, partial(_LORA, layer_replication=[(0, 2), (1, 2)])),
    "LoHa": (llama, partial(peft.LoHaConfig, r=4, target_modules=_TWO)),
    "LoKr": (llama, partial(peft.LoKrConfig, r=2, target_modules=_TWO)),
    "IA3": (llama, partial(peft.IA3Config, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "AdaLoRA": (llama, partial(peft.AdaLoraConfig, init_r=4, target_r=2, total_step=100, target_modules=_TWO)),
    "VeRA": (llama, partial(peft.VeraConfig, r=4, target_modules=_TWO)),
    "VeRA without projections": (
        llama, partial(peft.VeraConfig, r=4, target_modules=_TWO, save_projection=False),
    ),
    "OFT": (llama, partial(peft.OFTConfig, oft_block_size=4, target_modules=_TWO)),
    "BOFT": (llama, partial(peft.BOFTConfig, boft_block_size=4, target_modules=_TWO)),
    "HRA": (llama, partial(peft.HRAConfig, r=4, target_modules=_TWO)),
    "FourierFT": (llama, partial(peft.FourierFTConfig, n_frequency=8, target_modules=_TWO)),
    "VBLoRA": (llama, partial(peft.VBLoRAConfig, r=4, vector_length=4, num_vectors=8, target_modules=_TWO)),
    "Lily": (llama, partial(peft.LilyConfig, r=4, target_modules=_TWO)),
    "RandLora": (llama, partial(peft.RandLoraConfig, r=4, target_modules=_TWO)),
    "norms": (llama, partial(peft.LNTuningConfig, target_modules=["input_layernorm"])),
    "prompts": (llama, partial(peft.PromptTuningConfig, **_VIRTUAL)),
    "prefixes": (llama, partial(peft.PrefixTuningConfig, **_VIRTUAL)),
    "an encoder of prompts": (llama, partial(peft.PromptEncoderConfig, **_VIRTUAL, encoder_hidden_size=8)),
}  # fmt: skip


def of_peft(name: str) -> Subject:
    """Return an adapter after two real steps, next to its base model."""
    make, settings = OF_PEFT[name]
    torch.manual_seed(0)

    def save(folder: Path) -> None:
        home = folder.parent / "base"
        make().save_pretrained(home)
        base = type(make()).from_pretrained(home)
        base.config.decoder_start_token_id = 0
        model = peft.get_peft_model(base, settings())
        optimizer = torch.optim.SGD(
            [each for each in model.parameters() if each.requires_grad], lr=0.1
        )
        tokens = torch.tensor([[1, 2, 3, 4]])
        labels = torch.tensor([0]) if make is bert else tokens
        for _ in range(2):
            model(input_ids=tokens, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(str(folder))

    def real(folder: Path) -> Real:
        tensors = load_file(folder / "adapter_model.safetensors")
        base = type(make()).from_pretrained(folder.parent / "base")
        try:
            loaded = peft.get_peft_model_state_dict(
                peft.PeftModel.from_pretrained(base, str(folder))
            )
        except (RuntimeError, KeyError, ValueError) as error:
            return Real(refused=str(error))
        live = {
            key for key, each in tensors.items() if key in loaded and torch.equal(loaded[key], each)
        }
        return Real(live=frozenset(live))

    return Subject(name, "peft", save, real)


# Damages


def _middle(tensors: Tensors) -> str:
    return sorted(tensors)[len(tensors) // 2]


def _reshaped(tensors: Tensors) -> Tensors:
    key = max(sorted(tensors), key=lambda key: tensors[key].numel())
    shape = [size + 1 for size in tensors[key].shape]
    return {**tensors, key: torch.ones(shape, dtype=tensors[key].dtype)}


DAMAGES: dict[str, Callable[[Tensors], Tensors]] = {
    "healthy": lambda tensors: tensors,
    "a key renamed": lambda tensors: {
        f"renamed.{key}" if key == _middle(tensors) else key: each for key, each in tensors.items()
    },
    "a key dropped": lambda tensors: {
        key: each for key, each in tensors.items() if key != _middle(tensors)
    },
    "a key added": lambda tensors: {**tensors, "added.weight": torch.ones(2)},
    "a key reshaped": _reshaped,
    "a prefix": lambda tensors: {f"module.{key}": each for key, each in tensors.items()},
    "a tie broken": lambda tensors: tensors,
}


def _untied(folder: Path) -> bool:
    """Write into the config that nothing is tied; return whether something was."""
    path = folder / "config.json"
    if not path.exists():
        return False
    text = path.read_text()
    path.write_text(text.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    return path.read_text() != text


# Proof


class Row(NamedTuple):
    """The answers about one folder. ``plain``: of the torch-free half: told, not checked, silent or
    right.
    """

    library: str
    damage: str
    name: str
    agrees: bool
    plain: str
    words: str


def load_of(folder: Path) -> Load:
    """Return the load of a folder, as ``check --load`` hands it to the library."""
    scanned = scan_folder(folder)
    return next(loads_of(scanned, group_files(scanned), as_listed=True))


def asked(load: Load) -> Asked:
    """Return a load as the child gets it."""
    tensors = {key: (each.dtype, each.shape) for key, each in load.tensors.items()}
    return Asked(load.library, load.path.name, load.configs, tensors)


def agrees(outcome: LoadOutcome, real: Real, tensors: Tensors) -> bool:
    """Return whether the outcome from headers is that of the load from files."""
    if outcome.unchecked:
        return False
    if real.refused:
        return outcome.status == 1
    if real.live is not None:
        ours = outcome.tensors - len(outcome.unexpected) - len(outcome.dead)
        return outcome.live == ours == len(real.live) and bool(outcome.status) == real.is_damaged(
            tensors
        )
    return (
        not outcome.refused
        and set(outcome.missing) == real.missing
        and set(outcome.unexpected) == real.unexpected
        and {mismatch.key for mismatch in outcome.mismatched} == real.mismatched
    )


def damaged(subject: Subject, damage: str, folder: Path) -> Tensors | None:
    """Save a model with a damage, and return its tensors before it; None where it has no tie that
    could break.
    """
    folder.mkdir(parents=True)
    subject.save(folder)
    return _damage(damage, folder)


def _damage(damage: str, folder: Path) -> Tensors | None:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    if damage == "a tie broken" and not _untied(folder):
        return None
    changed = DAMAGES[damage](tensors)
    save_file({key: each.contiguous() for key, each in changed.items()}, path, {"format": "pt"})
    return dict(tensors)


def rows(subject: Subject) -> Iterator[Row]:
    """Yield the answers about a model, healthy and with each damage."""
    with tempfile.TemporaryDirectory() as where:
        Path(where, "saved").mkdir()
        subject.save(Path(where, "saved"))
        for damage in DAMAGES:
            folder = Path(where, damage)
            shutil.copytree(Path(where, "saved"), folder)
            tensors = _damage(damage, folder)
            if tensors is None:
                continue
            real = subject.real(folder)
            outcome = ask(asked(load_of(folder)))
            report = check(folder)
            is_damaged = real.is_damaged(tensors)
            unasked = any(_UNCHECKED in words for words in report.not_checked)
            plain = (
                "right"
                if bool(report.status) == is_damaged
                else "not checked"
                if unasked
                else "silent"
            )
            if report.status and not is_damaged:
                plain = "false alarm"
            is_right = agrees(outcome, real, tensors)
            words = "" if is_right else f"{real} / {outcome}"[:1500]
            if plain in ("silent", "false alarm"):
                words += f" {plain}: {[finding.code for finding in report.findings]}"
            yield Row(subject.library, damage, subject.name, is_right, plain, words)


_UNCHECKED = "check --load"
"""The command in each sentence that says that a load was not checked, or not all of it."""


def subjects(number: int, parts: int) -> Iterator[Subject]:
    """Yield every model of a part."""
    makers: Iterator[Callable[[], Subject | None]] = chain(
        (partial(of_peft, name) for name in OF_PEFT),
        (partial(of_diffusers, name) for name in OF_DIFFUSERS),
        (partial(of_architecture, kind, cls) for kind, cls in architectures()),
    )
    for maker in islice(makers, number, None, parts):
        subject = maker()
        if subject is not None:
            yield subject


def main() -> None:
    """Print the table, and every disagreement."""
    seconds, part = [*sys.argv[1:], *("inf", "0/1")[len(sys.argv) - 1 :]]
    end = time.monotonic() + float(seconds)
    number, parts = map(int, part.split("/"))
    counts: Counter[tuple[str, str, str]] = Counter()
    names: Counter[str] = Counter()
    for subject in subjects(number, parts):
        if time.monotonic() > end:
            break
        try:
            answers = [*rows(subject)]
        except Exception as error:
            # The library does not save or load its own model: bart's head has another shape than
            # its config says.
            _say(f"left out: {subject.name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        names[subject.library] += 1
        for row in answers:
            counts[row.library, row.damage, "folders"] += 1
            counts[row.library, row.damage, "agrees"] += row.agrees
            counts[row.library, row.damage, row.plain] += 1
            if row.words:
                _say(f"{row.name}, {row.damage}: {row.words}")
    columns = ("folders", "agrees", "right", "not checked", "silent", "false alarm")
    _say(f"{', '.join(f'{count} models of {library}' for library, count in names.items())}")
    _say(
        "library, damage: folders; --load as the real load; plain check: right, not checked, "
        "silent, false alarm"
    )
    for library, damage, _ in dict.fromkeys((*key[:2], "") for key in counts):
        numbers = "  ".join(f"{counts[library, damage, column]:5}" for column in columns)
        _say(f"{library:12} {damage:15} {numbers}")


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    main()
