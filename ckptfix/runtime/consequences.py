"""What the installed accelerate would do with an object that it is given again, for the guard's warning.

Versions differ: ``prepare_model`` of 1.15 returns a model that it marked, that of 1.12 registers it again. Optimizers,
schedulers and data loaders are recognised by 1.6 to 1.15 when ``prepare`` made them, and not when ``prepare_optimizer``
or the like did. The mark and the code are asked, not a version number.
"""

import inspect
from typing import Any

import accelerate
import torch
from accelerate import Accelerator

from ckptfix.runtime.held import levels

_MARK = "_is_accelerate_prepared"


def consequence(accelerator: Accelerator, verb: str, thing: Any) -> str:
    """Return in words what would come of the object being given to the stock ``verb`` once more."""
    if verb == "register_for_checkpointing":
        number = len(accelerator._custom_objects)
        return (
            f"save_state would write it again as custom_checkpoint_{number}.pkl, and a script that registers it once "
            "could not load the checkpoint"
        )
    if isinstance(thing, torch.nn.Module):
        return _of_model(accelerator, thing)
    if isinstance(thing, torch.optim.Optimizer):
        registry, what = accelerator._optimizers, "its state"
    elif isinstance(thing, torch.utils.data.DataLoader):
        return _of_dataloader(accelerator, thing)
    else:
        registry, what = accelerator._schedulers, "it"
    if _is_returned(thing, registry):
        return _HARMLESS.format(version=accelerate.__version__)
    stem = "optimizer" if what == "its state" else "scheduler"
    return f"save_state would write {what} again as {stem}_{len(registry)}.bin"


_HARMLESS = "accelerate {version} would return it as it is and save it once"


def _of_model(accelerator: Accelerator, model: Any) -> str:
    if _looks_at_marks() and _is_returned(model, accelerator._models):
        return _HARMLESS.format(version=accelerate.__version__)
    is_wrapped = accelerator.num_processes > 1 and len(list(levels(model))) > 1
    keys = ", its keys prefixed with 'module.'" if is_wrapped else ""
    return (
        f"save_state would write it again as model_{len(accelerator._models)}.safetensors{keys}, in twice the time and "
        "space, and runs could not load each other's checkpoints"
    )


def _of_dataloader(accelerator: Accelerator, loader: Any) -> str:
    from accelerate.data_loader import DataLoaderStateMixin

    from ckptfix.runtime.loading.states import has_sampler, is_stateful

    registry = accelerator._dataloaders
    if _is_returned(loader, registry):
        return _HARMLESS.format(version=accelerate.__version__)
    if isinstance(loader, DataLoaderStateMixin) and accelerator.num_processes > 1:
        return "its data would be divided among the processes a second time, and most of it never be seen"
    if is_stateful(loader) or getattr(accelerator.dataloader_config, "use_stateful_dataloader", False):
        return f"save_state would write its state again as dl_state_dict_{len(registry)}.bin"
    if has_sampler(loader):
        return f"save_state would write the state of its sampler again as sampler_{len(registry)}.bin"
    return "it would be registered a second time, and load_state look for a state of it at the wrong number"


def _is_returned(thing: Any, registry: list[Any]) -> bool:
    """Whether accelerate recognises a thing by its mark, and has it already."""
    return bool(getattr(thing, _MARK, False)) and any(one is thing for one in registry)


def _looks_at_marks() -> bool:
    """Whether this accelerate's ``prepare_model`` reads the mark: then the attribute's name is a constant in it."""
    return _MARK in inspect.unwrap(accelerate.Accelerator.prepare_model).__code__.co_consts
