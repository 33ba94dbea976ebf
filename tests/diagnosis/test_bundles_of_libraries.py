"""Checkpoints of one file as well-known training scripts lay them out, with modules and optimizers
of torch.

Each healthy folder stays silent. Each with the optimizer of another model, which torch refuses, is
reported or listed as not compared.
"""

import argparse
import collections
import copy
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ckptfix import check
from ckptfix.diagnosis.findings.base import Severity

Make = Callable[..., Any]
Files = dict[str, Any]


class Run:
    """The optimizers of a script. ``spoil``: makes of a state that of another model."""

    def __init__(self, spoil: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> None:
        self._spoil = spoil

    def state(
        self, *modules: Any, make: Make = torch.optim.AdamW, **options: Any
    ) -> dict[str, Any]:
        """Return the state of an optimizer of these modules after a step."""
        parameters = [parameter for module in modules for parameter in module.parameters()]
        return self.state_of(make(parameters, **options))

    def state_of(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of this optimizer after a step."""
        _step(optimizer)
        state: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
        if self._spoil is None:
            return state
        spoiled = self._spoil(state)
        loaded = copy.deepcopy(optimizer)
        with pytest.raises((RuntimeError, ValueError)):
            _resume(loaded, copy.deepcopy(spoiled))
        return spoiled


def _resume(optimizer: Any, state: dict[str, Any]) -> None:
    optimizer.load_state_dict(state)
    _step(optimizer)


def _step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def _matrices(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        moments
        for moments in state["state"].values()
        if any(torch.is_tensor(value) and value.dim() > 1 for value in moments.values())
    ]


def _resize(moments: dict[str, Any], *, by: int) -> None:
    for name, value in moments.items():
        if torch.is_tensor(value) and value.dim() > 1:
            moments[name] = torch.zeros(value.shape[0] + by, *value.shape[1:])


def resized(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a model whose last layer has another size."""
    state = copy.deepcopy(state)
    _resize(_matrices(state)[-1], by=7)
    return state


def wider(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a model whose layers all have another size."""
    state = copy.deepcopy(state)
    for moments in _matrices(state):
        _resize(moments, by=13)
    return state


def deeper(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a model with more layers of each kind."""
    state = copy.deepcopy(state)
    group = state["param_groups"][-1]
    start = 1 + max(number for one in state["param_groups"] for number in one["params"])
    for number, moments in enumerate(3 * list(state["state"].values()), start):
        state["state"][number] = copy.deepcopy(moments)
        group["params"].append(number)
    return state


def text(width: int = 6, layers: int = 2, classes: int = 9) -> Any:
    """Return a small transformer."""
    blocks = [
        torch.nn.TransformerEncoderLayer(width, 2, 4 * width, batch_first=True)
        for _ in range(layers)
    ]
    return torch.nn.Sequential(
        collections.OrderedDict(
            embed=torch.nn.Embedding(classes, width),
            blocks=torch.nn.Sequential(*blocks),
            norm=torch.nn.LayerNorm(width),
            head=torch.nn.Linear(width, classes),
        )
    )


def images(*channels: int, classes: int = 5) -> Any:
    """Return a small network of convolutions."""
    layers = [
        torch.nn.Sequential(
            torch.nn.Conv2d(*sizes, 3), torch.nn.BatchNorm2d(sizes[1]), torch.nn.ReLU()
        )
        for sizes in itertools.pairwise(channels)
    ]
    return torch.nn.Sequential(
        collections.OrderedDict(
            layers=torch.nn.Sequential(*layers), fc=torch.nn.Linear(channels[-1], classes)
        )
    )


def mlp(*widths: int) -> Any:
    """Return layers with activations between them."""
    layers: list[Any] = []
    for sizes in itertools.pairwise(widths):
        layers += [torch.nn.Linear(*sizes), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])


def arrays(module: Any) -> dict[str, Any]:
    """Return a state dict of numpy arrays."""
    return {key: value.numpy() for key, value in module.state_dict().items()}


def groups(module: Any) -> list[dict[str, Any]]:
    """Return param groups with and without weight decay."""
    matrices = [one for one in module.parameters() if one.dim() > 1]
    vectors = [one for one in module.parameters() if one.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def nanogpt(run: Run) -> Files:
    model = text()
    model.head.weight = model.embed.weight
    optimizer = torch.optim.AdamW(groups(model), betas=(0.9, 0.95))
    return {
        "ckpt.pt": {
            "model": model.state_dict(),
            "optimizer": run.state_of(optimizer),
            "model_args": {"n_layer": 2, "bias": False},
            "iter_num": 2000,
            "best_val_loss": torch.tensor(1.5),
            "config": {"dataset": "shakespeare"},
        }
    }


def timm(run: Run) -> Files:
    model = images(3, 6, 8)
    return {
        "last.pth.tar": {
            "epoch": 3, "arch": "resnet50", "state_dict": model.state_dict(), "version": 2,
            "optimizer": run.state(model, make=torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
            "args": argparse.Namespace(lr=0.1), "amp_scaler": torch.amp.GradScaler("cpu").state_dict(),
            "state_dict_ema": copy.deepcopy(model).state_dict(), "metric": 71.2,
        }
    }  # fmt: skip


def detectron2(run: Run) -> Files:
    model = images(3, 6, 8)
    return {
        "model_0000999.pth": {
            "model": model.state_dict(),
            "optimizer": run.state(model, make=torch.optim.SGD, lr=0.1, momentum=0.9),
            "scheduler": {"last_epoch": 3, "_last_lr": [0.1]},
            "iteration": 999,
        },
        "last_checkpoint": None,
    }


def detectron2_of_arrays(run: Run) -> Files:
    model = images(3, 6, 8)
    return {
        "R-50.pth": {
            "model": arrays(model),
            "optimizer": run.state(model),
            "__author__": "third_party",
        }
    }


def mmengine(run: Run) -> Files:
    model = images(3, 6, 8)
    return {
        "epoch_1.pth": {
            "meta": {"epoch": 1, "iter": 10, "CLASSES": ("cat", "dog")},
            "state_dict": collections.OrderedDict((key, value.cpu()) for key, value in model.state_dict().items()),
            "optimizer": run.state(model, make=torch.optim.SGD, lr=0.1, momentum=0.9),
            "message_hub": {"log_scalars": {}}, "param_schedulers": [{"last_step": 3}],
        }
    }  # fmt: skip


def fairseq(run: Run) -> Files:
    model = text()
    return {
        "checkpoint_last.pt": {
            "args": argparse.Namespace(arch="transformer"), "cfg": {"model": {"_name": "transformer"}},
            "model": model.state_dict(), "criterion": None,
            "optimizer_history": [{"criterion_name": "CE", "optimizer_name": "FairseqAdam", "num_updates": 9}],
            "task_state": {}, "extra_state": {"train_iterator": {"epoch": 1}, "val_loss": 3.1},
            "last_optimizer_state": run.state(model, make=torch.optim.Adam, betas=(0.9, 0.98)),
        }
    }  # fmt: skip


def fairseq_of_half_precision(run: Run) -> Files:
    model = text()
    flat = torch.nn.ParameterList([torch.zeros(sum(one.numel() for one in model.parameters()))])
    run = Run()
    half = {key: value.half() for key, value in model.state_dict().items()}
    return {
        "checkpoint1.pt": {
            "model": half,
            "last_optimizer_state": run.state(flat, make=torch.optim.Adam),
        }
    }


def espnet(run: Run) -> Files:
    model = text()
    return {
        "checkpoint.pth": {
            "model": model.state_dict(), "reporter": {"epoch": 2, "stats": {}},
            "optimizers": [run.state(model)], "schedulers": [None], "scaler": None,
        },
        "2epoch.pth": model.state_dict(),
    }  # fmt: skip


def lightning(run: Run) -> Files:
    model = text()
    return {
        "epoch=1-step=20.ckpt": {
            "epoch": 1, "global_step": 20, "pytorch-lightning_version": "2.5.0",
            "state_dict": model.state_dict(), "loops": {"fit_loop": {"state_dict": {}}},
            "callbacks": {"ModelCheckpoint{}": {"best_k_models": {}}},
            "optimizer_states": [run.state(model)],
            "lr_schedulers": [{"last_epoch": 20, "_step_count": 21}], "hparams_name": "kwargs",
            "hyper_parameters": {"lr": 0.1},
        }
    }  # fmt: skip


def lightning_without_a_teacher(run: Run) -> Files:
    """A hook removes what is frozen, which the optimizer lists."""
    model = torch.nn.ModuleDict(
        {"student": text(), "teacher": text(width=8), "lpips": images(3, 4)}
    )
    for frozen in (model["teacher"], model["lpips"]):
        frozen.requires_grad_(False)
    weights = model.state_dict()
    for key in list(weights):
        if key.startswith(("teacher.", "lpips.")):
            del weights[key]
    return {
        "last.ckpt": {
            "state_dict": weights, "optimizer_states": [run.state(model)], "global_step": 20,
            "lr_schedulers": [],
        }
    }  # fmt: skip


def lightning_before_the_first_step(run: Run) -> Files:
    model = torch.nn.ModuleDict({"student": text(), "teacher": text(width=8)})
    weights = model.state_dict()
    for key in list(weights):
        if key.startswith("teacher."):
            del weights[key]
    fresh = torch.optim.AdamW(model.parameters()).state_dict()
    return {"last.ckpt": {"state_dict": weights, "optimizer_states": [fresh], "global_step": 0}}


def nemo(run: Run) -> Files:
    files = lightning(run)
    (bundle,) = files.values()
    bundle["callbacks"]["EMA"] = {
        "ema_weights": [one.clone() for one in bundle["state_dict"].values()]
    }
    return {"model--val_loss=1.00-epoch=1.ckpt": bundle}


def ignite(run: Run) -> Files:
    model = mlp(4, 8, 3)
    return {
        "checkpoint_20.pt": {
            "model": model.state_dict(), "optimizer": run.state(model),
            "trainer": {"epoch_length": 10},
        }
    }  # fmt: skip


def yolo(run: Run) -> Files:
    model = images(3, 6, 8)
    return {
        "last.pt": {
            "epoch": 3, "best_fitness": 0.5, "model": None, "ema": copy.deepcopy(model).half(), "updates": 30,
            "optimizer": run.state(model, make=torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
            "train_results": {"loss": [1.0, 2.0]}, "date": "2024",
        }
    }  # fmt: skip


def stylegan2_pytorch(run: Run) -> Files:
    generator, critic = mlp(8, 8, 8, 12), images(3, 6, 8)
    return {
        "010000.pt": {
            "g": generator.state_dict(), "d": critic.state_dict(), "g_ema": generator.state_dict(),
            "g_optim": run.state(generator, make=torch.optim.Adam),
            "d_optim": run.state(critic, make=torch.optim.Adam),
            "args": argparse.Namespace(size=256), "ada_aug_p": 0.0,
        }
    }  # fmt: skip


def average_alone(run: Run) -> Files:
    """Only the average of the generator is saved, with both optimizers."""
    generator, critic = mlp(8, 8, 8, 12), images(3, 6, 8)
    return {
        "ema.pt": {
            "g_ema": generator.state_dict(), "g_optim": run.state(generator),
            "d_optim": run.state(critic),
        }
    }  # fmt: skip


def dino(run: Run) -> Files:
    student, teacher = text(), text()
    student.head, teacher.head = torch.nn.Linear(6, 20), torch.nn.Linear(6, 20)
    loss = torch.nn.Module()
    loss.register_buffer("center", torch.zeros(1, 20))
    optimizer = torch.optim.AdamW(groups(student))
    return {
        "checkpoint.pth": {
            "student": torch.nn.DataParallel(student).state_dict(), "teacher": teacher.state_dict(),
            "optimizer": run.state_of(optimizer), "epoch": 3, "args": argparse.Namespace(lr=0.1),
            "dino_loss": loss.state_dict(), "fp16_scaler": torch.amp.GradScaler("cpu").state_dict(),
        }
    }  # fmt: skip


def mae(run: Run) -> Files:
    model = text()
    model.pos_embed = torch.nn.Parameter(torch.zeros(1, 5, 6), requires_grad=False)
    parts = [{**group, "lr_scale": 0.5} for group in groups(model)]
    return {
        "checkpoint-20.pth": {
            "model": model.state_dict(), "optimizer": run.state_of(torch.optim.AdamW(parts)),
            "epoch": 20, "scaler": torch.amp.GradScaler("cpu").state_dict(),
            "args": argparse.Namespace(lr=0.1),
        }
    }  # fmt: skip


def open_clip(run: Run) -> Files:
    model = torch.nn.ModuleDict({"visual": images(3, 6, 8), "transformer": text()})
    model.logit_scale = torch.nn.Parameter(torch.tensor(2.6))
    optimizer = torch.optim.AdamW(groups(model))
    return {
        f"epoch_{epoch}.pt": {
            "epoch": epoch, "name": "run", "state_dict": torch.nn.DataParallel(model).state_dict(),
            "optimizer": run.state_of(optimizer),
            "scaler": torch.amp.GradScaler("cpu").state_dict(),
        }
        for epoch in (1, 2)
    }  # fmt: skip


def guided_diffusion(run: Run) -> Files:
    model = images(3, 6, 8)
    weights = collections.OrderedDict(model.state_dict())
    return {
        "model010000.pt": weights, "ema_0.9999_010000.pt": weights,
        "opt010000.pt": run.state(model),
    }  # fmt: skip


def raft(run: Run) -> Files:
    model = images(3, 6, 8)
    return {
        "1000_raft.pth": torch.nn.DataParallel(model).state_dict(),
        "state.pth": {
            "optimizer": run.state(model),
            "scheduler": {"last_epoch": 2, "_last_lr": [0.1]},
            "step": 9,
        },
    }


def vits(run: Run) -> Files:
    generator, critic = text(), images(1, 6, 8)
    return {
        f"{name}_1000.pth": {
            "model": model.state_dict(), "iteration": 3, "optimizer": run.state(model),
            "learning_rate": 2e-4,
        }
        for name, model in (("G", generator), ("D", critic))
    }  # fmt: skip


def normed(*channels: int) -> Any:
    """Return convolutions with ``weight_norm``."""
    return torch.nn.Sequential(
        *(
            torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(*sizes, 3))
            for sizes in itertools.pairwise(channels)
        )
    )


def hifigan(run: Run) -> Files:
    """The optimizer of the generator is in the file of the discriminators."""
    generator, periods, scales = normed(8, 6, 4, 1), normed(1, 4, 8, 8), normed(1, 6, 8, 8)
    return {
        "g_00010000": {"generator": generator.state_dict()},
        "do_00010000": {
            "mpd": periods.state_dict(), "msd": scales.state_dict(),
            "optim_g": run.state(generator), "optim_d": run.state(periods, scales), "steps": 10000,
            "epoch": 3,
        },
        "g_00010000.pth": {"generator": generator.state_dict()},
        "do_00010000.pth": {
            "mpd": periods.state_dict(), "msd": scales.state_dict(),
            "optim_g": run.state(generator), "optim_d": run.state(periods, scales), "steps": 10000,
            "epoch": 3,
        },
    }  # fmt: skip


def without_weight_norm(run: Run) -> Files:
    """``weight_norm`` is folded into the weights before they are saved, and the optimizer has both
    parts.
    """
    model = normed(8, 6, 4, 1)
    state = run.state(model)
    for layer in model:
        torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    return {"vocoder.pt": {"generator": model.state_dict(), "optimizer": state}}


def without_old_weight_norm(run: Run) -> Files:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    for layer in model:
        with pytest.warns(FutureWarning, match="deprecated"):
            torch.nn.utils.weight_norm(layer)
    optimizer = torch.optim.AdamW(model.named_parameters())
    state = run.state_of(optimizer)
    for layer in model:
        torch.nn.utils.remove_weight_norm(layer)
    return {"vocoder.pt": {"generator": model.state_dict(), "optimizer": state}}


def tacotron(run: Run) -> Files:
    model = text()
    return {
        "checkpoint_1000": {"iteration": 1000, "state_dict": model.state_dict(), "optimizer": run.state(model)},
        "checkpoint_1000.pt": {
            "iteration": 1000, "state_dict": model.state_dict(), "learning_rate": 1e-3,
            "optimizer": run.state(model, make=torch.optim.Adam, weight_decay=1e-6),
        },
    }  # fmt: skip


def cyclegan(run: Run) -> Files:
    """Each network in its file, and all optimizers in one of them."""
    a, b, critics = images(3, 6, 8, 3), images(3, 6, 8, 3), [images(3, 7, 9), images(3, 7, 9)]
    return {
        "netG_A.pth": {
            "model": a.state_dict(),
            "optimizer_G": run.state(a, b),
            "optimizer_D": run.state(*critics),
        },
        "netG_B.pth": b.state_dict(),
        "netD_A.pth": critics[0].state_dict(),
        "netD_B.pth": critics[1].state_dict(),
    }


def actor_critic(run: Run) -> Files:
    """The weights are in other files."""
    actor, critic = mlp(17, 64, 64, 6), mlp(23, 64, 64, 1)
    statistics = {
        "mean": torch.zeros(17),
        "var": torch.ones(17),
        "covariance": torch.ones(17, 17),
        "count": 3.0,
    }
    return {
        "actor.pt": actor.state_dict(), "critic.pt": critic.state_dict(),
        "train_state.pt": {
            "actor_opt": run.state(actor, make=torch.optim.Adam),
            "critic_opt": run.state(critic, make=torch.optim.Adam),
            "obs_norm": statistics,
        },
    }  # fmt: skip


def value_and_policy(run: Run) -> Files:
    """The policy's weights are in another file, and differ from those of the value in the last
    layer alone.
    """
    policy, value = mlp(17, 64, 64, 6), mlp(17, 64, 64, 1)
    named = torch.optim.Adam(policy.named_parameters())
    return {
        "policy.pt": policy.state_dict(),
        "agent.pt": {
            "value": value.state_dict(), "value_opt": run.state(value),
            "policy_opt": run.state_of(named),
        },
    }  # fmt: skip


def soft_actor_critic(run: Run) -> Files:
    """A replay buffer and statistics of numpy next to the models."""
    actor, critics = mlp(17, 32, 6), [mlp(23, 32, 1), mlp(23, 32, 1)]
    log_alpha = torch.zeros(1, requires_grad=True)
    return {
        "sac.pt": {
            "actor": actor.state_dict(), "q1": critics[0].state_dict(), "q2": critics[1].state_dict(),
            "actor_optimizer": run.state(actor), "q_optimizer": run.state(*critics), "log_alpha": log_alpha.detach(),
            "alpha_optimizer": Run().state_of(torch.optim.Adam([log_alpha])),
            "replay_buffer": {
                "obs": numpy.zeros((100, 17), numpy.float32), "actions": torch.zeros(100, 6),
                "rewards": [0.0] * 100, "position": 10,
            },
            "obs_rms": {"mean": numpy.zeros(17), "var": numpy.ones(17), "count": numpy.float64(3)},
            "history": [[1.0, 2.0], [3.0, 4.0]], "rng": (random.getstate(), numpy.random.get_state()),
        }
    }  # fmt: skip


def modules_of_arrays(run: Run) -> Files:
    """The critic's weights are arrays next to the model, and a table's are a list of tensors."""
    actor, critic, table = mlp(17, 32, 6), mlp(23, 31, 1), mlp(9, 8, 7)
    return {
        "agent.pt": {
            "model": actor.state_dict(),
            "critic": [one.detach().numpy() for one in critic.parameters()],
            "table": [one.detach() for one in table.parameters()],
            "optimizer": run.state(actor, critic, table),
        }
    }  # fmt: skip


def arcface(run: Run) -> Files:
    """The head's weights are in another file."""
    backbone, head = images(3, 6, 8, 8, 12), torch.nn.Linear(12, 40, bias=False)
    backbone.layers[0].requires_grad_(False)
    return {
        "backbone.pt": {
            "state_dict": backbone.state_dict(),
            "optimizer": run.state(backbone, head, make=torch.optim.Adam),
        },
        "softmax_fc_gpu_0.pt": {"weight": head.weight.detach()},
    }


def face_of_parts(run: Run) -> Files:
    """The head's weights are in a sub-folder."""
    files = arcface(run)
    return {"backbone.pt": files["backbone.pt"], "heads/arcface.pt": files["softmax_fc_gpu_0.pt"]}


def trained_weights_alone(run: Run) -> Files:
    """Frozen layers are left out of the state dict, and the optimizer lists them."""
    model = text(layers=3)
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    weights = {key: value for key, value in model.state_dict().items() if key in trained}
    return {"step_100.pt": {"model": weights, "optimizer": run.state(model)}}


class Lora(torch.nn.Module):  # type: ignore[misc]
    """A frozen layer with an adapter."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_A = torch.nn.Linear(layer.in_features, 2, bias=False)
        self.lora_B = torch.nn.Linear(2, layer.out_features, bias=False)


def lora_and_head(run: Run) -> Files:
    """The adapter's weights are saved, and those of the head that is trained with it are not."""
    model = torch.nn.Sequential(
        Lora(torch.nn.Linear(8, 7)), Lora(torch.nn.Linear(7, 6)), torch.nn.Linear(6, 3)
    )
    weights = {key: value for key, value in model.state_dict().items() if "lora_" in key}
    return {"adapter.pt": {"lora": weights, "optimizer": run.state(model)}}


def merged_lora(run: Run) -> Files:
    model = torch.nn.Sequential(Lora(torch.nn.Linear(8, 7)), Lora(torch.nn.Linear(7, 6)))
    merged = torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.Linear(7, 6))
    return {"merged.pt": {"model": merged.state_dict(), "optimizer": run.state(model)}}


def megatron(run: Run) -> Files:
    model = text()
    inner = run.state(model, make=torch.optim.Adam)
    parts = {
        "embedding": model.embed.state_dict(),
        "encoder": model.blocks.state_dict(),
        "head": model.head.state_dict(),
    }
    return {
        "mp_rank_00/model_optim_rng.pt": {
            "args": argparse.Namespace(tensor_model_parallel_size=1), "checkpoint_version": 3.0, "iteration": 10,
            "model": {"language_model": {**parts, "norm": model.norm.state_dict()}},
            "optimizer": {
                "optimizer": inner,
                "grad_scaler": {"scale": torch.tensor([1.0]), "growth_tracker": 0},
                "fp32_from_fp16_params": [[one.detach() for one in model.parameters()]],
            },
            "opt_param_scheduler": {"max_lr": 0.1}, "rng_state": [{"torch_rng_state": torch.get_rng_state()}],
        }
    }  # fmt: skip


def torchtune(run: Run) -> Files:
    model = text()
    state = run.state(model)
    names = [name for name, _ in model.named_parameters()]
    named = {
        "state": {
            names[number] if number < len(names) else f"more.{number}": one
            for number, one in state["state"].items()
        },
        "param_groups": [
            {
                **group,
                "params": [
                    names[one] if one < len(names) else f"more.{one}" for one in group["params"]
                ],
            }
            for group in state["param_groups"]
        ],
    }
    return {
        "model.pt": model.state_dict(),
        "recipe_state.pt": {
            "optimizer": named,
            "epochs_run": 1,
            "seed": 3,
            "total_epochs": 3,
            "max_steps_per_epoch": None,
        },
    }


def k_diffusion(run: Run) -> Files:
    model = images(3, 6, 8)
    return {
        "model_00010000.pth": {
            "model": model.state_dict(), "model_ema": copy.deepcopy(model).state_dict(),
            "opt": run.state(model),
            "sched": {"last_epoch": 9, "_step_count": 10, "_last_lr": [0.1], "inv_gamma": 1.0},
            "ema_sched": {"power": 0.6, "last_epoch": 9}, "epoch": 1, "step": 9, "gns_stats": None,
            "ema_stats": {"loss": torch.tensor(0.1)}, "demo_gen": torch.get_rng_state(),
        }
    }  # fmt: skip


def whisper(run: Run) -> Files:
    model = text()
    model.embed.requires_grad_(False)
    return {
        f"step{step}.pt": {
            "model_state_dict": model.state_dict(), "optimizer_state_dict": run.state(model),
            "step": step, "dims": {"n_mels": 80}, "losses": [1.0, 2.0], "log": numpy.ones((9, 2)),
        }
        for step in (1, 2)
    }  # fmt: skip


def clean_rl(run: Run) -> Files:
    agent = torch.nn.ModuleDict({"critic": mlp(4, 64, 64, 1), "actor": mlp(4, 64, 64, 2)})
    return {
        "agent.pt": {
            "model_weights": agent.state_dict(),
            "optimizer": run.state(agent, make=torch.optim.Adam, eps=1e-5), "args": {"seed": 1},
        }
    }  # fmt: skip


def stable_baselines(run: Run) -> Files:
    policy = mlp(4, 64, 64, 2)
    return {
        "policy.pth": policy.state_dict(),
        "policy.optimizer.pth": run.state(policy, make=torch.optim.Adam),
    }


def sam(run: Run) -> Files:
    """The image encoder is frozen and left out, and the optimizer has the mask decoder alone."""
    encoder, decoder = text(width=8), text()
    model = torch.nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    return {
        "sam_latest.pth": {
            "model": model.state_dict(),
            "optimizer": run.state(decoder),
            "epoch": 3,
        }
    }


def dreambooth(run: Run) -> Files:
    """An optimizer of two models, of which one is in a folder of its own."""
    denoiser, encoder = text(layers=3), text(layers=1, classes=21)
    return {
        "train.pt": {"unet": denoiser.state_dict(), "optimizer": run.state(denoiser, encoder)},
        "text_encoder/pytorch_model.bin": encoder.state_dict(),
    }


FORMATS = (
    nanogpt, timm, detectron2, detectron2_of_arrays, mmengine, fairseq, fairseq_of_half_precision,
    espnet, lightning, lightning_without_a_teacher, lightning_before_the_first_step, nemo, ignite,
    yolo, stylegan2_pytorch, average_alone, dino, mae, open_clip, guided_diffusion, raft, vits,
    hifigan, without_weight_norm, without_old_weight_norm, tacotron, cyclegan, actor_critic,
    value_and_policy, soft_actor_critic, modules_of_arrays, arcface, face_of_parts,
    trained_weights_alone, lora_and_head, merged_lora, megatron, torchtune, k_diffusion, whisper,
    clean_rl, stable_baselines, sam, dreambooth,
)  # fmt: skip


REPORTED = {
    "resized": {
        nanogpt, timm, detectron2, detectron2_of_arrays, mmengine, fairseq, espnet, lightning, nemo,
        yolo, dino, open_clip, vits, cyclegan, value_and_policy, modules_of_arrays, arcface,
        trained_weights_alone, without_weight_norm, megatron, k_diffusion, whisper, clean_rl, sam,
        ignite, stylegan2_pytorch, average_alone, soft_actor_critic,
    },
    "deeper": {
        nanogpt, timm, detectron2, fairseq, lightning, nemo, ignite, stylegan2_pytorch,
        average_alone, dino, open_clip, vits, soft_actor_critic, modules_of_arrays, arcface,
        without_weight_norm, without_old_weight_norm, megatron, k_diffusion, whisper, clean_rl, sam,
    },
    "wider": set(),
}  # fmt: skip
"""Optimizers of another model that are reported. The others are listed as not compared.

Layers of another width leave too few equal shapes.
"""


def written(root: Path, files: Files) -> tuple[list[Path], list[Path]]:
    """Write the files of a run, and return those of torch and the folders that hold them."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.write_text("model_0000999.pth")
        else:
            torch.save(content, path)
    paths = [root / name for name, content in files.items() if content is not None]
    return paths, [*dict.fromkeys(path.parent for path in paths)]


def problems(target: Path) -> list[str]:
    """Return the warnings and errors, but for pickled classes, which ``weights_only`` refuses."""
    return [
        f"{one.code}: {one}"
        for one in check(target).all_findings
        if one.severity is not Severity.NOTE and "weights_only=True" not in str(one)
    ]


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_healthy(tmp_path: Path, write: Callable[[Run], Files]) -> None:
    paths, folders = written(tmp_path, write(Run()))
    for target in (*folders, *paths):
        assert problems(target) == [], target.name


def test_arrays_of_pickle_protocol_5_are_weights(tmp_path: Path) -> None:
    for spoil in (None, resized):
        (bundle,) = modules_of_arrays(Run(spoil)).values()
        torch.save(bundle, tmp_path / "agent.pt", pickle_protocol=5)
        assert bool(problems(tmp_path)) is (spoil is resized)


@pytest.mark.parametrize("spoil", [resized, wider, deeper], ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_the_optimizer_of_another_model(
    tmp_path: Path,
    write: Callable[[Run], Files],
    spoil: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    paths, folders = written(tmp_path, write(Run(spoil)))
    said = [words for folder in folders for words in problems(folder)]
    not_checked = [words for folder in folders for words in check(folder).not_checked]
    assert bool(said) is (write in REPORTED[spoil.__name__]), said
    assert said or any(words.startswith("optimizers inside ") for words in not_checked)
    # A file alone shows less than its folder.
    assert {words for path in paths for words in problems(path)} <= set(said)
