"""Hooks that a script registered with ``register_load_state_pre_hook``: they load models themselves, or change them."""

from collections.abc import Sequence
from typing import Any

import torch

from ckptfix.runtime.loading.draft import Draft
from ckptfix.runtime.loading.policy import Part
from ckptfix.runtime.loading.report import ComponentReport, Status
from ckptfix.runtime.loading.targets import distinct


class Undo:
    """The parameters and buffers of all models before a hook ran, to take back what it did when the load fails.

    Their values are copied to the CPU. What a hook does to other objects, to submodules, and to weights that are kept
    offloaded, is not taken back.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        self._before: list[tuple[dict[str, Any], str, Any, torch.Tensor | None]] = []
        modules = {id(module): module for target in distinct(models) for module in target.thing.modules()}
        for module in modules.values():
            for registry in (module._parameters, module._buffers):
                self._before += [
                    (registry, name, tensor, _copied(tensor)) for name, tensor in registry.items()
                ]

    def restore(self) -> None:
        """Put every tensor back in its place, with its value."""
        with torch.no_grad():
            for registry, name, tensor, value in self._before:
                registry[name] = tensor
                if value is not None:
                    tensor.copy_(value)


def run_hooks(accelerator: Any, path: str, draft: Draft) -> list[Any]:
    """Call the hooks with the list of models, as ``load_state`` does, and return the models they left in it."""
    models = list(accelerator._models)
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(models, path)
    kept = {id(model) for model in models}
    for target in distinct(accelerator._models):
        if id(target.thing) not in kept:
            draft.others.append(
                ComponentReport(
                    part=Part.MODELS,
                    status=Status.RESTORED,
                    index=target.index,
                    what=target.what,
                    reason="by a hook of the script (register_load_state_pre_hook)",
                )
            )
    return models


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or tensor.device.type == "meta":
        return None
    return tensor.detach().to("cpu", copy=True)
