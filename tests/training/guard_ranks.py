"""The cases of the guard in two processes, for `test_guard_ranks.py`."""

import copy
import warnings
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckptfix.training.accelerator import Accelerator, patch_accelerate, unpatch_accelerate
from tests.training.loading_runs import reset
from tests.training.rank_cases import Seen, case, turn_on_fsdp


class Counted(nn.Linear):  # type: ignore[misc]
    """Counts its state_dict calls."""

    calls = 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().state_dict(*args, **kwargs)


def model(seed: int = 0) -> Counted:
    torch.manual_seed(seed)
    return Counted(10, 2)


def chain(module: Any) -> list[str]:
    """Return the class names from the outermost wrapper to the model."""
    names = [type(module).__name__]
    while isinstance(
        module, DataParallel | DistributedDataParallel | torch._dynamo.OptimizedModule
    ):
        module = (
            module._orig_mod if isinstance(module, torch._dynamo.OptimizedModule) else module.module
        )
        names.append(type(module).__name__)
    return names


def gradients_agree(accelerator: Any, prepared: Any) -> bool:
    """Whether a backward pass with other data on each rank leaves the same gradients on both."""
    prepared(torch.full((1, 10), 1.0 + accelerator.process_index)).sum().backward()
    everyone = accelerator.gather(next(iter(prepared.parameters())).grad.flatten()[None])
    return bool((everyone[0] == everyone[-1]).all())


def bf16(module: Any) -> bool:
    result = module(torch.full((1, 10), 1.2345678))
    return bool((result.to(torch.bfloat16).to(torch.float32) == result).all())


@case
def stock(_: Path) -> Seen:
    accelerator = accelerate.Accelerator(cpu=True)
    raw = model()
    accelerator.prepare(raw)
    accelerator.prepare(raw)
    return {"models": len(accelerator._models)}


@case
def again(_: Path) -> Seen:
    accelerator = Accelerator(cpu=True)
    raw = model()
    first = accelerator.prepare(raw)
    forms = {
        "raw": raw,
        "prepared": first,
        "own DDP": DistributedDataParallel(raw),
        "DDP around the prepared": DistributedDataParallel(first),
        "DataParallel": DataParallel(raw),
        "compiled": torch.compile(first, backend="eager"),
    }
    seen: Seen = {"same": {}, "warnings": {}}
    for name, form in forms.items():
        for verb in ("prepare", "prepare_model"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                seen["same"][f"{name}: {verb}"] = getattr(accelerator, verb)(form) is first
            seen["warnings"][f"{name}: {verb}"] = [Path(one.filename).name for one in caught]
    del forms
    return seen | {
        "models": len(accelerator._models),
        "chain": chain(first),
        "gradients agree": gradients_agree(accelerator, first),
    }


@case
def stale_flag(_: Path) -> Seen:
    first = accelerate.Accelerator(cpu=True)
    prepared = first.prepare(model())
    reset()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    second = accelerator.prepare(prepared)
    return {
        "chain": chain(second),
        "bf16": bf16(second),
        "models": len(accelerator._models),
        "gradients agree": gradients_agree(accelerator, second),
    }


@case
def after_free_memory(_: Path) -> Seen:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    raw = model()
    optimizer = torch.optim.SGD(raw.parameters())
    first = accelerator.prepare(raw, optimizer)
    accelerator.free_memory()
    second, again = accelerator.prepare(*first)
    return {
        "chain": chain(second),
        "bf16": bf16(second),
        "models": len(accelerator._models),
        "optimizer": again.optimizer is optimizer,
        "gradients agree": gradients_agree(accelerator, second),
    }


@case
def evaluation_first(_: Path) -> Seen:
    accelerator = Accelerator(cpu=True)
    raw = model()
    evaluated = accelerator.prepare_model(raw, evaluation_mode=True)
    trained = accelerator.prepare(raw)
    return {
        "before": chain(evaluated),
        "chain": chain(trained),
        "models": len(accelerator._models),
        "gradients agree": gradients_agree(accelerator, trained),
    }


@case
def deep_copy(_: Path) -> Seen:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    first = accelerator.prepare(model())
    twin = accelerator.prepare(copy.deepcopy(first.module))
    return {"chain": chain(twin), "bf16": bf16(twin), "models": len(accelerator._models)}


@case
def prepared_before_the_patch(_: Path) -> Seen:
    accelerator = accelerate.Accelerator(cpu=True)
    raw = model()
    first = accelerator.prepare(raw)
    patch_accelerate()
    try:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            same = [accelerator.prepare(form) is first for form in (raw, first)]
    finally:
        unpatch_accelerate()
    return {"same": same, "models": len(accelerator._models)}


@case
def saved_by_two(folder: Path) -> Seen:
    """Save here; and load what one process saved."""
    accelerator = Accelerator(cpu=True)
    raw = model(7)
    optimizer = torch.optim.AdamW(raw.parameters())
    first, prepared = accelerator.prepare(raw, optimizer)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        accelerator.prepare(raw, optimizer, first, prepared)
    gradients_agree(accelerator, first)
    prepared.step()
    raw.calls = 0
    accelerator.save_state(str(folder / "two"))
    accelerator.wait_for_everyone()
    saving, raw.calls = raw.calls, 0
    accelerator.load_state(str(folder / "two"))
    loading = raw.calls
    accelerator.load_state(str(folder / "one"))
    return {
        "calls": [saving, loading],
        "files": sorted(path.name for path in (folder / "two").iterdir()),
        "loaded": raw.weight.detach().flatten().tolist(),
    }


def fully_sharded(version: int) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True)
    turn_on_fsdp(accelerator, fsdp_version=version)
    return accelerator, nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 2))


@case
def fsdp1(_: Path) -> Seen:
    accelerator, raw = fully_sharded(1)
    first = accelerator.prepare(raw)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    prepared = accelerator.prepare(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [accelerator.prepare(first, prepared), accelerator.prepare(raw, optimizer)]
    first(torch.ones(1, 10)).sum().backward()
    prepared.step()
    return {
        "class": type(first).__name__,
        "same": [a is first and b is prepared for a, b in results],
        "models": len(accelerator._models),
        "warnings": sum("prepare()" in str(one.message) for one in caught),
    }


@case
def fsdp2(_: Path) -> Seen:
    accelerator, raw = fully_sharded(2)
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    first, prepared = accelerator.prepare(raw, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        a, b = accelerator.prepare(first, prepared)
        other = torch.optim.AdamW(first.parameters(), lr=0.1)
        c, d = accelerator.prepare(first, other)
    before = [parameter.full_tensor().clone() for parameter in first.parameters()]
    first(torch.ones(1, 10)).sum().backward()
    d.step()
    changed = [
        bool((a != b.full_tensor()).any()) for a, b in zip(before, first.parameters(), strict=True)
    ]
    try:
        accelerator.prepare(first, nn.Linear(1, 1), optimizer)
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {
        "class": type(first).__name__,
        "same": [a is first, b is prepared, c is first, d.optimizer is other],
        "models": len(accelerator._models),
        "optimizers": len(accelerator._optimizers),
        "warnings": sum("prepare()" in str(one.message) for one in caught),
        "changed": changed,
        "refused": refused,
    }
