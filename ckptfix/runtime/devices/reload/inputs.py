"""Inputs for one forward pass of a model: the factory's own, or made from a transformers config, from a fixed seed."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import recursively_apply

from ckptfix.runtime.devices.reload.outputs import tensors_in
from ckptfix.runtime.devices.reload.raising import ANYTHING

SEED = 20_260_731
_BATCH, _LENGTH = 2, 12
_LARGEST_SIDE = 4096
"""Pixels of an image that is made; a config may say any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the model is called with. ``is_given``: by the factory; otherwise made, and it may not suit the model."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_given: bool = False


def given_inputs(given: Any) -> Inputs:
    """Return the inputs that a factory returned: a mapping of keyword arguments, a tuple or list, or one value."""
    if isinstance(given, Mapping):
        return Inputs(kwargs=dict(given), is_given=True)
    return Inputs(args=tuple(given) if isinstance(given, tuple | list) else (given,), is_given=True)


def fresh(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments that a forward pass may change: on the device where they are already, none would be copied.

    Raises whatever the user's own objects raise when they are copied.
    """
    given = (inputs.args, dict(inputs.kwargs))
    copied: dict[int, Any] = {
        id(value): value.detach().clone().requires_grad_(value.requires_grad)
        for _, value in tensors_in(given)
    }
    try:
        return deepcopy(given, copied)
    except ANYTHING:  # a lock, a file, a generator: it can only be handed on as it is
        changed: tuple[tuple[Any, ...], dict[str, Any]] = recursively_apply(
            lambda value: copied.get(id(value), value), given
        )
        return changed


def transformers_inputs(model: Any) -> Inputs | str:
    """Return inputs for a transformers model, or in words why none are made: only tokens and images are."""
    config = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    if config is None or name is None:
        return "the factory returned no inputs; let it return (model, inputs)"
    generator = torch.Generator().manual_seed(SEED)
    if name == "input_ids":
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        size = getattr(text, "vocab_size", None)
        if not isinstance(size, int) or size < 2:
            return "its config says no vocab_size, from which tokens could be made"
        positions = _positions(text)
        ids = _tokens(config, size, positions, generator)
        made = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False):
            made["decoder_input_ids"] = _tokens(config, size, positions, generator)
        return Inputs(kwargs=made)
    if name == "pixel_values":
        vision = getattr(config, "vision_config", None) or config
        side, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
        if _is_size(side, _LARGEST_SIDE) and _is_size(channels, 64):
            pixels = torch.randn(1, channels, side, side, generator=generator)
            return Inputs(kwargs={"pixel_values": pixels.to(model.dtype)})
    return f"it takes {name!r}, for which no inputs are made; give --model a factory that returns (model, inputs)"


def _is_size(value: Any, most: int) -> bool:
    return isinstance(value, int) and 0 < value <= most


def _positions(config: Any) -> int:
    """Return how many tokens to make: fewer where the model has few positions."""
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    return min([_LENGTH, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])


def _tokens(config: Any, size: int, length: int, generator: torch.Generator) -> torch.Tensor:
    ids = torch.randint(size, (_BATCH, length), generator=generator)
    # A token that stands for an image or a sound asks for one; padding would be masked out of the output.
    special = {
        value
        for part in (config, getattr(config, "text_config", None))
        for name, value in (vars(part) if part is not None else {}).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    plain = next((token for token in range(size) if token not in special), 0)
    for token in special:
        ids[ids == token] = plain
    return ids
