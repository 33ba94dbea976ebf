"""Train tiny models with stock accelerate under any strategy, and prove what a checkpoint makes of
a new run.

    python -m tests.conversion.state_training <<< "PROCESSES JOBS RESULTS"

forks so many processes of one gloo group, which do one job after another: JOBS has one JSON object
a line, and RESULTS gets one for each. Nothing of ckptfix is imported here. All runs see the same
batches, whatever the number of processes.

``make``: three steps with a strategy, saved by ``accelerator.save_state``: as it is, and altered in
three ways that no proof may overlook (``ALTERATIONS``). What the optimizers hold in memory at that
moment is written next to them, with the losses of the next three steps.

``prove``: a new run of a strategy loads a checkpoint with ``accelerator.load_state``. Weights,
masters, moments, steps and hyperparameters in its memory must be bitwise those of the source, by
fqn. Its next three losses, and its memory after them, are compared with those of a run into whose
memory the source's values are copied (the same strategy, so they must be equal in every bit), and
the losses with those of the source that trained on.
"""

import gc
import json
import logging
import os
import shutil
import sys
import time
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from importlib import import_module
from math import log2
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, InitProcessGroupKwargs
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from tests.conversion import fsdp1_memory
from tests.training.ranks import run_ranks

STRATEGIES = ("ddp", "fsdp", "fsdp-full", "zero1", "zero2", "zero3", "universal")
FSDP1 = ("fsdp1", "fsdp1-full", "fsdp1-flat", "fsdp1-flat-full")
"""FSDP's first version, by the same files; ``flat``: without ``use_orig_params``, so with flat
parameters.
"""

BY_TORCH = ("ddp", "fsdp", "fsdp-full", "fsdp-ranks", *FSDP1)
LOADERS = (*STRATEGIES, *FSDP1)
SOURCES = (*LOADERS, "fsdp-ranks")
"""``fsdp-ranks``: as ``use_dcp=False`` of accelerate saves, a file for each rank. ``load_state``
does not load it.
"""

CASES = (
    "llama-fp32", "llama-bf16", "bert-fp32", "bert-bf16", "two-fp32", "lora-fp32", "lora-bf16",
    "lorall-fp32", "nadam-fp32", "asgd-fp32", "plain-fp32", "plain-bf16", "llama-fp16", "bert-fp16",
)  # fmt: skip
"""Models and precision; ``two``: both models, with an optimizer each. DeepSpeed's engine takes one
model alone.

``lora``: Llama frozen, with the two small matrices of peft for each projection; ``lorall``: the
same, and the optimizer gets the frozen parameters, too, as in many scripts. ``nadam``, ``asgd``:
Llama with these optimizers. ``plain``: Llama with nothing frozen and one param group, as FSDP1 asks
for without ``use_orig_params``.
"""

ALTERATIONS = ("zeroed", "swapped", "changed")
"""Moments of zero; moments of two parameters of one shape swapped; hyperparameters changed."""

SWAPPED = {
    "llama": ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
    "bert": (
        "bert.encoder.layer.0.output.dense.weight",
        "bert.encoder.layer.1.output.dense.weight",
    ),
}
SWAPPED["nadam"] = SWAPPED["asgd"] = SWAPPED["plain"] = SWAPPED["llama"]
SWAPPED["lora"] = SWAPPED["lorall"] = (
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
    "base_model.model.model.layers.1.self_attn.v_proj.lora_A.default.weight",
)
FROZEN = {
    "llama": "model.layers.0.input_layernorm.weight",
    "bert": "bert.embeddings.LayerNorm.weight",
}
OPTIONS = (
    "lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "momentum_decay",
    "lambd", "alpha", "t0",
)  # fmt: skip
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "nadam": torch.optim.NAdam,
    "asgd": partial(torch.optim.ASGD, t0=1),  # averages from the second step on, not the millionth
}
MOMENTS = {"asgd": ("ax",)}
ADAM = ("exp_avg", "exp_avg_sq")
NUMBERS = {"nadam": ("step", "mu_product"), "asgd": ("step", "eta", "mu")}
"""The states that have one number for a parameter; of others ``step`` alone."""

ENDED = ".ended"
STEPS = 3
SCALE, WINDOW = 1024.0, 4
"""Scale of the loss in fp16, and after how many steps it grows: the first one after the checkpoint.
"""
VOCABULARY, BATCH, LENGTH, ACCUMULATION = 67, 4, 9, 2

Model = dict[str, Any]
"""One model's part of a run's memory: ``weights``, ``states``, ``options`` (each by fqn), and
``scheduler``.
"""


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        tie_word_embeddings=True,
    )  # fmt: skip
    return _frozen(LlamaForCausalLM(config), "llama")


def bert() -> torch.nn.Module:
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    # accelerate puts the decoder into an FSDP2 unit of its own, and torch 2.13 refuses a bias that
    # another one shares. The embedding stays tied.
    del model.cls.predictions.bias
    return _frozen(model, "bert")


def _frozen(model: torch.nn.Module, kind: str) -> torch.nn.Module:
    """Freeze one norm among others of its shape; its values are exact in bf16, which has no master
    of it.
    """
    norm = model.get_parameter(FROZEN[kind])
    with torch.no_grad():
        norm.copy_(1 + torch.arange(norm.numel()) / 64)
    norm.requires_grad_(False)
    return model


def lora() -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    with warnings.catch_warnings():  # peft asks transformers 5 for an attribute by its old name
        warnings.simplefilter("ignore", FutureWarning)
        model = get_peft_model(
            llama(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
        )
    with torch.no_grad():
        for parameter in model.parameters():
            # The frozen ones have no masters in DeepSpeed's bf16.
            parameter.copy_(parameter.bfloat16())
    return model


def two() -> tuple[Any, ...]:
    """Return both models and their optimizers: nothing else says which model's parameters an
    optimizer has.
    """
    models = llama(), bert()
    return *models, *(torch.optim.AdamW(param_groups(model)) for model in models)


def plain() -> torch.nn.Module:
    return llama().requires_grad_(True)


BUILDERS = {
    "llama": llama, "bert": bert, "lora": lora, "lorall": lora, "nadam": llama, "asgd": llama,
    "plain": plain,
}  # fmt: skip


def with_optimizer(kind: str) -> tuple[Any, ...]:
    """Return a model and its optimizer.

    DeepSpeed does not keep which frozen parameters a script lists, and FSDP1's flat parameters have
    another order.
    """
    model = BUILDERS[kind]()
    return model, torch.optim.AdamW(param_groups(model, kind))


FACTORIES: dict[str, Callable[[], Any]] = {
    **BUILDERS, "two": two, "lorall": partial(with_optimizer, "lorall"),
    "plain": partial(with_optimizer, "plain"),
}  # fmt: skip
"""What ``migrate`` gets as the model of a case."""


def kinds(case: str) -> tuple[str, ...]:
    """Return the models of a case."""
    return ("llama", "bert") if case.startswith("two") else (case.split("-")[0],)


def param_groups(model: torch.nn.Module, kind: str = "") -> list[dict[str, Any]]:
    """Return the two groups of parameters that most scripts make: weight decay for matrices
    alone.
    """
    if kind in ("lorall", "plain"):
        return [{"params": list(model.parameters()), "weight_decay": 0.1}]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def trained_of(model: torch.nn.Module, parameters: list[Any]) -> list[str]:
    """Return the names of those of these parameters that are trained."""
    wanted = {id(one) for one in parameters if one.requires_grad}
    return [name for name, one in model.named_parameters() if id(one) in wanted]


class Run:
    """Models, optimizers and schedulers, as stock accelerate prepares them for a strategy."""

    precision = "fp32"
    is_fsdp1 = is_flat = False
    moments: tuple[str, ...] = ADAM
    numbers: tuple[str, ...] = ("step",)

    def __init__(self, strategy: str, case: str, *, stage: int = 2) -> None:
        """``stage``: that of DeepSpeed when it loads a universal checkpoint."""
        self.strategy, self.kinds = strategy, kinds(case)
        self.is_zero = strategy.startswith("zero") or strategy == "universal"
        self.is_fsdp1, self.is_flat = strategy in FSDP1, "-flat" in strategy
        self.stage = (
            int(strategy[4]) if strategy.startswith("zero") else stage if self.is_zero else 0
        )
        forget()
        models = [BUILDERS[kind]() for kind in self.kinds]
        self.groups = [
            [trained_of(model, group["params"]) for group in param_groups(model, kind)]
            for kind, model in zip(self.kinds, models, strict=True)
        ]
        self.moments = MOMENTS.get(self.kinds[0], ADAM)
        self.numbers = NUMBERS.get(self.kinds[0], ("step",))
        self.precision = case.rpartition("-")[2]
        self.accelerator = self._accelerator()
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        for kind, model in zip(self.kinds, models, strict=True):
            if self.strategy.startswith("fsdp"):
                self._switch_on_fsdp(self.accelerator, kind)
            if self.is_flat:
                model = self.accelerator.prepare(
                    model
                )  # else the optimizer would not know the flat parameters
            optimizer = OPTIMIZERS.get(kind, torch.optim.AdamW)(param_groups(model, kind), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda number: 1 / (1 + 0.1 * number)
            )
            prepared = self.accelerator.prepare(
                *(() if self.is_flat else (model,)), optimizer, scheduler
            )
            self.models.append(model if self.is_flat else prepared[0])
            self.optimizers.append(prepared[-2])
            self.schedulers.append(prepared[-1])

    def _accelerator(self) -> accelerate.Accelerator:
        shared: dict[str, Any] = {
            "step_scheduler_with_optimizer": False,  # else it counts steps of all processes
            "gradient_accumulation_steps": ACCUMULATION,
            "mixed_precision": "no" if self.precision == "fp32" else self.precision,
        }
        if not self.is_zero:
            found = accelerate.Accelerator(cpu=True, **shared)
            if self.precision == "fp16":  # accelerate switches it on for GPUs alone
                found.native_amp, found.scaler = (
                    True,
                    torch.amp.GradScaler("cpu", SCALE, growth_interval=WINDOW),
                )
            return found
        config = zero_config(
            self.stage, precision=self.precision, is_universal=self.strategy == "universal"
        )
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config)
        return accelerate.Accelerator(
            deepspeed_plugin=plugin,
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
            **shared,
        )

    def _switch_on_fsdp(self, found: accelerate.Accelerator, kind: str) -> None:
        """Do what accelerate does for GPUs alone, for one model: its plugin wraps layers of classes
        that exist.
        """
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1 if self.is_fsdp1 else 2,
            use_orig_params=not self.is_flat if self.is_fsdp1 else None,
            state_dict_type=(
                "FULL_STATE_DICT" if self.strategy.endswith("-full") else "SHARDED_STATE_DICT"
            ),
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["BertLayer" if kind == "bert" else "LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        if self.precision != "fp32":
            plugin.set_mixed_precision(self.precision)
        found.state.fsdp_plugin = plugin
        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = accelerate.DistributedType.FSDP
            # FSDP1 takes cpu:0 for another device.
            state._shared_state["device"] = torch.device("cpu")
        found.state.distributed_type = accelerate.DistributedType.FSDP

    def step(self, number: int) -> list[float]:
        """Train one step of ``ACCUMULATION`` batches, and return its loss by model."""
        accelerator = self.accelerator
        rank, world = accelerator.process_index, accelerator.num_processes
        mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        losses = torch.zeros(len(self.models), dtype=torch.float64)
        for batch in range(ACCUMULATION):
            generator = torch.Generator().manual_seed(2 * (number % 2) + batch)
            data = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)[mine]
            with accelerator.accumulate(*self.models):
                for index, model in enumerate(self.models):
                    loss = model(input_ids=data, labels=data).loss
                    losses[index] += loss.detach().double() / ACCUMULATION / world
                    accelerator.backward(loss)
                    self.optimizers[index].step()
                    if accelerator.sync_gradients:
                        self.schedulers[index].step()
                    self.optimizers[index].zero_grad()
        torch.distributed.all_reduce(losses)
        return [float(loss) for loss in losses]

    def steps(self, first: int) -> list[list[float]]:
        return [self.step(number) for number in range(first, first + STEPS)]

    # What is in memory, read and written through the strategy's own interfaces.

    def memory(self) -> list[Model]:
        """Return what the optimizers work with, by fqn; tensors in fp32."""
        found = []
        for index in range(len(self.models)):
            model: Model = {"weights": {}, "states": {}, "options": {}}
            owners = {
                name: number for number, group in enumerate(self.groups[index]) for name in group
            }
            for name, parameter in self._parameters(index):
                model["weights"][name] = self._weight(index, parameter)
                if name in owners:
                    model["options"][name] = self._options(index, owners[name])
                    model["states"][name] = self._state(index, owners[name], parameter)
            model["scheduler"] = {
                key: value for key, value in self.schedulers[index].scheduler.state_dict().items()
                if key in ("last_epoch", "_step_count", "base_lrs", "_last_lr")
            }  # fmt: skip
            model["scale"] = self.scale(index)
            found.append(model)
        return found

    def scale(self, index: int) -> tuple[float, int] | None:
        """Return the scale of the loss in fp16, and the steps without an overflow after which it
        grows.
        """
        if self.precision != "fp16":
            return None
        if not self.is_zero:
            scaler = self.accelerator.scaler
            return scaler.get_scale(), scaler.get_growth_interval() - scaler._get_growth_tracker()
        held = self.models[index].optimizer.loss_scaler
        done = held.cur_iter - held.last_overflow_iter - 1
        # DeepSpeed looks at what is done before it counts the step.
        return held.cur_scale, -done % held.scale_window + 1 if done else held.scale_window + 1

    def plant(self, memory: list[Model]) -> None:
        """Set the optimizers' memory to what another run held, without any file."""
        self.step(0)  # makes the states
        for index, model in enumerate(memory):
            owners = {
                name: number for number, group in enumerate(self.groups[index]) for name in group
            }
            for name, parameter in self._parameters(index):
                self._set_weight(index, parameter, model["weights"][name])
                if name in owners:
                    self.set_options(index, owners[name], model["options"][name])
                    for key in self.moments:
                        self.set_moment(
                            index, owners[name], parameter, key, model["states"][name][key]
                        )
                    for key in self.numbers:
                        self._set_number(
                            index, owners[name], parameter, key, model["states"][name][key]
                        )
            scheduler = self.schedulers[index].scheduler
            scheduler.load_state_dict(scheduler.state_dict() | model["scheduler"])
            if model["scale"] is not None:
                self._set_scale(index, *model["scale"])

    def _set_scale(self, index: int, scale: float, left: int) -> None:
        if self.is_zero:
            held = self.models[index].optimizer.loss_scaler
            held.cur_scale, held.cur_iter, held.last_overflow_iter = (
                scale,
                held.scale_window + 1 - left,
                -1,
            )
            return
        scaler = self.accelerator.scaler
        tracker = scaler.get_growth_interval() - left
        scaler.load_state_dict(scaler.state_dict() | {"scale": scale, "_growth_tracker": tracker})

    def alter(self, how: str, memory: list[Model]) -> None:
        """Alter what ``memory`` says of this run, so that no proof may accept it."""
        for index, kind in enumerate(self.kinds):
            for number, group in enumerate(self.groups[index]):
                options = dict(memory[index]["options"][group[0]])
                if how == "changed":
                    other = {"betas": (0.5, 0.9)} if "betas" in options else {"alpha": 0.5}
                    options |= {**other, "weight_decay": options["weight_decay"] + 0.25}
                self.set_options(index, number, options)
            first, second = SWAPPED[kind]
            instead = {first: second, second: first} if how == "swapped" else {}
            owners = {
                name: number for number, group in enumerate(self.groups[index]) for name in group
            }
            for name, parameter in self._parameters(index):
                for key in self.moments if name in owners else ():
                    value = memory[index]["states"][instead.get(name, name)][key]
                    value = torch.zeros_like(value) if how == "zeroed" else value
                    self.set_moment(index, owners[name], parameter, key, value)

    def _parameters(self, index: int) -> list[tuple[str, Any]]:
        model = self.models[index]
        if self.is_fsdp1:
            return list(fsdp1_memory.parameters_of(model).items())
        inner = model.module if self.is_zero else self.accelerator.unwrap_model(model)
        return list(inner.named_parameters())

    def _torch_optimizer(self, index: int) -> Any:
        """Return the optimizer of torch in all that accelerate and DeepSpeed put around it."""
        return (
            self.models[index].optimizer.optimizer
            if self.is_zero
            else self.optimizers[index].optimizer
        )

    def _group(self, index: int, number: int) -> dict[str, Any]:
        owner = self.models[index].optimizer if self.is_zero else self._torch_optimizer(index)
        group: dict[str, Any] = owner.param_groups[number]
        return group

    def _options(self, index: int, number: int) -> dict[str, Any]:
        group = self._group(index, number)
        found = {key: group[key] for key in OPTIONS if key in group}
        return found | ({"betas": tuple(found["betas"])} if "betas" in found else {})

    def set_options(self, index: int, number: int, options: dict[str, Any]) -> None:
        self._group(index, number).update(options)

    def _weight(self, index: int, parameter: Any) -> torch.Tensor:
        if self.is_fsdp1:
            return _whole(parameter.whole(self._torch_optimizer(index)))
        if not self.is_zero:
            return _whole(parameter)
        import deepspeed

        if parameter.requires_grad:
            return _whole(deepspeed.utils.safe_get_full_fp32_param(parameter))
        with deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
            return _whole(parameter)

    def _set_weight(self, index: int, parameter: Any, value: torch.Tensor) -> None:
        if self.is_fsdp1:
            parameter.assign(self._torch_optimizer(index), value)
            return
        if not self.is_zero:
            _assign(parameter, value)
            return
        import deepspeed

        if parameter.requires_grad and self.stage == 3:
            _set_partition(parameter, value, None)
        elif parameter.requires_grad:
            deepspeed.utils.safe_set_full_fp32_param(parameter, value)
        with deepspeed.zero.GatheredParameters(
            [parameter], modifier_rank=0, enabled=self.stage == 3
        ):
            parameter.data.copy_(value)

    def _state(self, index: int, number: int, parameter: Any) -> Model:
        if self.is_fsdp1:
            optimizer = self._torch_optimizer(index)
            return {key: parameter.whole(optimizer, key) for key in self.moments} | {
                key: parameter.number(optimizer, key) for key in self.numbers
            }
        if not self.is_zero:
            state = self._torch_optimizer(index).state.get(parameter, {})
            return {
                key: float(value) if key in self.numbers else _whole(value)
                for key, value in state.items()
            }
        found: Model = {key: self._moment(index, number, parameter, key) for key in self.moments}
        for key in self.numbers:
            every = {float(state[key]) for state in self._flat_states(index, number)}
            found[key] = every.pop() if len(every) == 1 else sorted(every)
        return found

    def _moment(self, index: int, number: int, parameter: Any, key: str) -> torch.Tensor:
        """Put a moment together from what each rank's optimizer steps with.

        ``safe_get_full_optimizer_state`` of ZeRO-1 and 2 knows the first param group alone:
        DeepSpeed 0.19.8 links the others' states before they exist.
        """
        if self.stage == 3:
            import deepspeed

            return _whole(deepspeed.utils.safe_get_full_optimizer_state(parameter, key))
        whole = torch.zeros(parameter.numel())
        fragment = self._fragment(index, number, parameter, key)
        if fragment is not None:
            mine, values = fragment
            whole[mine] = values
        torch.distributed.all_reduce(whole)
        return whole.view(parameter.shape)

    def _fragment(
        self, index: int, number: int, parameter: Any, key: str
    ) -> tuple[slice, torch.Tensor] | None:
        """Return this rank's elements of a parameter, and its moments of them, in ZeRO-1 or 2."""
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        (flat,) = self._flat_states(index, number)
        own, held = mapping.lp_fragment_address, mapping.hp_fragment_address
        return slice(own.start, own.start + own.numel), flat[key].narrow(0, held.start, held.numel)

    def _flat_states(self, index: int, number: int) -> list[Any]:
        """Return the states of the flat partitions that hold a group; in ZeRO-3 these may be
        several.
        """
        optimizer = self._torch_optimizer(index)
        if self.stage == 3:
            return [state for state in optimizer.state.values() if "step" in state]
        return [
            optimizer.state[self.models[index].optimizer.single_partition_of_fp32_groups[number]]
        ]

    def set_moment(
        self, index: int, number: int, parameter: Any, key: str, value: torch.Tensor
    ) -> None:
        if self.is_fsdp1:
            parameter.assign(self._torch_optimizer(index), value, key)
        elif not self.is_zero:
            _assign(self._torch_optimizer(index).state[parameter][key], value)
        elif self.stage == 3:
            _set_partition(parameter, value, key)
        elif (fragment := self._fragment(index, number, parameter, key)) is not None:
            mine, values = fragment
            values.copy_(value.flatten()[mine])

    def _set_number(self, index: int, number: int, parameter: Any, key: str, value: float) -> None:
        optimizer = self._torch_optimizer(index)
        owner = parameter.owner if self.is_fsdp1 else parameter
        states = self._flat_states(index, number) if self.is_zero else [optimizer.state[owner]]
        for state in states:
            if key not in state:  # FSDP1 has none where a rank has no element of a parameter
                continue
            if torch.is_tensor(state[key]):
                state[key].fill_(value)
            else:
                state[key] = value


def zero_config(
    stage: int,
    *,
    accumulation: int = ACCUMULATION,
    precision: str = "fp32",
    is_universal: bool = False,
) -> dict[str, Any]:
    """Return a configuration of DeepSpeed."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // torch.distributed.get_world_size(),
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,  # by default 1.0
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Small enough that ZeRO-3 cuts the matrices and keeps the norms whole.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "bf16": {"enabled": precision == "bf16"},
    }
    if precision == "fp16":
        config["fp16"] = {
            "enabled": True, "initial_scale_power": log2(SCALE), "loss_scale_window": WINDOW,
            "hysteresis": 1,
        }  # fmt: skip
    return config | ({"checkpoint": {"load_universal": True}} if is_universal else {})


def _whole(tensor: Any) -> torch.Tensor:
    """Return a copy of all elements in fp32, whoever holds them."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.to("cpu", torch.float32, copy=True)


def _assign(target: Any, value: torch.Tensor) -> None:
    with torch.no_grad():
        if hasattr(target, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value.to(target.dtype), target.device_mesh, target.placements)
        target.copy_(value)


def _set_partition(parameter: Any, value: torch.Tensor, key: str | None) -> None:
    """Set this rank's part of a master or a moment of ZeRO-3.

    ``safe_set_full_fp32_param`` fails for parameters that the ranks do not share evenly: it forgets
    the padding.
    """
    part, _ = parameter._z3_optimizer._get_fp32_opt_state_partition(parameter, False, key)
    whole = torch.zeros(part.numel() * torch.distributed.get_world_size())
    whole[: value.numel()] = value.flatten()
    begin = part.numel() * torch.distributed.get_rank()
    part.data.copy_(whole[begin : begin + part.numel()])


def forget() -> None:
    """Let the next Accelerator be of another strategy."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    gc.collect()


def differences(expected: list[Model], actual: list[Model]) -> list[str]:
    """Return what differs between two runs' memories, in any bit."""
    lines = []
    for index, (want, have) in enumerate(zip(expected, actual, strict=True)):
        for part in ("weights", "states", "options"):
            if want[part].keys() != have[part].keys():
                lines.append(
                    f"{index} {part}: other fqns: "
                    f"{sorted(want[part].keys() ^ have[part].keys())[:3]}"
                )
                continue
            for name, value in want[part].items():
                other = have[part][name]
                pairs = {"": (value, other)} if part == "weights" else _pairs(value, other)
                for key, pair in pairs.items():
                    if found := _difference(*pair):
                        lines.append(f"{index} {part} {name} {key}: {found}")
        for part in ("scheduler", "scale"):
            if want[part] != have[part]:
                lines.append(f"{index} {part}: {want[part]} != {have[part]}")
    return lines


def _pairs(expected: Model, found: Model) -> dict[str, tuple[Any, Any]]:
    keys = expected.keys() | found.keys()
    if (
        "initial_lr" not in expected or "initial_lr" not in found
    ):  # written by schedulers of some strategies alone
        keys -= {"initial_lr"}
    return {key: (expected.get(key), found.get(key)) for key in sorted(keys)}


def _difference(expected: Any, found: Any) -> str:
    if not torch.is_tensor(expected) or not torch.is_tensor(found):
        return (
            ""
            if type(expected) is type(found) and expected == found
            else f"{expected!r} != {found!r}"
        )
    if expected.shape != found.shape:
        return f"{tuple(expected.shape)} != {tuple(found.shape)}"
    unequal = expected.view(torch.int32) != found.view(torch.int32)
    worst = (expected - found).abs().max()
    return (
        f"{int(unequal.sum())} of {expected.numel()} elements, up to {worst:.3g}"
        if unequal.any()
        else ""
    )


# The jobs.


def save(run: Run, folder: Path) -> None:
    """Save as ``accelerator.save_state`` does, with FSDP's files for each rank where the strategy
    has them.
    """
    accelerator = run.accelerator
    with fsdp1_memory.gathering_on_the_cpu() if run.is_fsdp1 else nullcontext():
        accelerator.save_state(str(folder))
    if run.strategy != "fsdp-ranks":
        return
    accelerator.wait_for_everyone()
    plugin = accelerator.state.fsdp_plugin
    for index, (model, optimizer) in enumerate(zip(run.models, run.optimizers, strict=True)):
        if accelerator.is_main_process:
            shutil.rmtree(folder / f"pytorch_model_fsdp_{index}")
            shutil.rmtree(folder / f"optimizer_{index}")
        save_fsdp_model(plugin, accelerator, model, str(folder), index, use_dcp=False)
        save_fsdp_optimizer(
            plugin, accelerator, optimizer, model, str(folder), index, use_dcp=False
        )


def make(job: dict[str, Any]) -> dict[str, Any]:
    """Train, save, and write what was in memory: ``folder/STRATEGY`` and one folder for each
    alteration.
    """
    folder, strategy = Path(job["folder"]), job["strategy"]
    run = Run(strategy, job["case"])
    before = run.steps(0)
    memory = run.memory()
    save(run, folder / strategy)
    for how in ALTERATIONS if job.get("altered", True) else ():
        run.alter(how, memory)
        save(run, folder / f"{strategy}-{how}")
    run.alter("", memory)
    assert not differences(memory, run.memory())
    after = run.steps(STEPS)
    if run.accelerator.is_main_process:
        torch.save(
            {"memory": memory, "before": before, "after": after}, folder / f"{strategy}.expected"
        )
    return {"losses": before + after}


def make_universal(job: dict[str, Any]) -> dict[str, Any]:
    """Let DeepSpeed's own script turn ZeRO checkpoints into universal ones."""
    folder, origin = Path(job["folder"]), job["origin"]
    if torch.distributed.get_rank() == 0:
        from deepspeed.checkpoint.ds_to_universal import main

        for suffix in ("", *(f"-{how}" for how in ALTERATIONS if job.get("altered", True))):
            source, target = folder / f"{origin}{suffix}", folder / f"universal{suffix}"
            ignored = shutil.ignore_patterns("pytorch_model", "latest", "zero_to_fp32.py")
            shutil.copytree(source, target, ignore=ignored)
            main(
                Namespace(
                    input_folder=str(source / "pytorch_model"),
                    output_folder=str(target / "pytorch_model"), num_extract_workers=1,
                    num_merge_workers=1, keep_temp_folder=False, strict=True,
                    inject_missing_state=True,
                )
            )  # fmt: skip
        shutil.copy(folder / f"{origin}.expected", folder / "universal.expected")
    return {}


def prove(job: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint and its altered ones into a run of ``strategy``, and say what differs."""
    expected = torch.load(job["expected"], weights_only=False)
    memory = expected["memory"]
    run = Run(job["strategy"], job["case"], stage=job.get("stage", 2))
    if job["strategy"] in ("ddp", "fsdp1", "fsdp1-flat"):
        # DDP arranges its buckets after the first backward pass, and sums over more than two
        # processes depend on them. Of FSDP1's sharded state dicts accelerate 1.15.0 loads no
        # moments into an optimizer that has none.
        run.steps(STEPS)
    run.accelerator.load_state(job["checkpoint"])
    found: dict[str, Any] = {
        "differs": differences(memory, run.memory()),
        "source": expected["after"],
    }
    found["losses"], after = run.steps(STEPS), run.memory()
    run.plant(memory)
    found["planted"] = differences(memory, run.memory())
    found["control"], control = run.steps(STEPS), run.memory()
    found["trained"] = differences(control, after)
    found["altered"] = {}
    for how, checkpoint in job.get("altered", {}).items():
        run.accelerator.load_state(checkpoint)
        lines = differences(memory, run.memory())
        losses = run.steps(STEPS)
        trained = differences(control, run.memory())
        found["altered"][how] = {"differs": lines[:9], "losses": losses, "trained": trained[:9]}
    return found


def _with_trainer(name: str, job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = getattr(import_module("tests.conversion.trainer_jobs"), name)(job)
    return found


JOBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "make": make,
    "universal": make_universal,
    "prove": prove,
    "make-trainer": partial(_with_trainer, "make"),
    "prove-trainer": partial(_with_trainer, "prove"),
}


def work(rank: int, jobs: list[dict[str, Any]], results: Path) -> None:
    """Do all jobs as one of the processes. The first of them writes the results; a job that fails
    fails alone.
    """
    for part in ("deepspeed", "DeepSpeed"):
        logging.getLogger(part).setLevel(logging.ERROR)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    for job in jobs:
        begin = time.perf_counter()
        with _quiet():
            try:
                result = JOBS[job["do"]](job)
            except Exception as error:
                result = {
                    "error": f"{type(error).__name__}: {error}",
                    "trace": traceback.format_exc(),
                }
                traceback.print_exc()  # another process may wait for this one in vain
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, result)
        if rank == 0:
            failed = next((one for one in every if "error" in one), None)
            chosen = failed or max(every, key=lambda one: len(one.get("differs", ())))
            line = json.dumps({"job": job, "seconds": time.perf_counter() - begin, **chosen})
            with results.open("a") as file:
                file.write(line + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def serve() -> None:
    """Run one group of ranks after another: what all of them import takes seconds, and is there
    when they are forked.

    A line of the standard input is one group: PROCESSES JOBS RESULTS. A file next to RESULTS says
    that it has ended.
    """
    os.environ.pop("WORLD_SIZE", None)
    while words := sys.stdin.readline().split():
        processes, jobs, results = int(words[0]), Path(words[1]), Path(words[2])
        listed = [json.loads(line) for line in jobs.read_text().splitlines()]
        if not all(job.get("strategy", "zero") in BY_TORCH for job in listed):
            _import_deepspeed()
        run_ranks(processes, partial(work, jobs=listed, results=results), patience=3600)
        results.with_suffix(ENDED).touch()


def _import_deepspeed() -> None:
    accelerator = import_module("deepspeed").accelerator.get_accelerator()
    # The name deepspeed.comm.torch is torch itself. Nothing is compiled.
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
    # DeepSpeed refuses fp16 on a CPU whose oneDNN has no fast kernels for it. PyTorch has others.
    type(accelerator).is_fp16_supported = lambda _: True


if __name__ == "__main__":
    serve()
