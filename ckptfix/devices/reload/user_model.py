"""The model of a checkpoint as the user's factory builds it, and inputs for one forward pass."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import PurePath
from typing import Any

import torch
from accelerate.utils import recursively_apply
from msgspec import Struct, field

from ckptfix.devices.reload.filling import Filled, fill, name_problems, tensors_of
from ckptfix.devices.reload.outputs import ANYTHING, in_words, tensors_in
from ckptfix.devices.reload.stored_weights import Weights
from ckptfix.errors import CkptfixError, UsageError
from ckptfix.storage.paths import shell_path
from ckptfix.tensors.parameter_sources import in_types

SEED = 20_260_731
_BATCH, _LENGTH = 2, 12
_LARGEST_SIDE = 4096
"""Pixels of an image that is made; a config may say any number."""


class Inputs(Struct, frozen=True, kw_only=True):
    """Arguments of a model's forward. ``is_given``: by the factory; otherwise made, and it may not
    suit the model.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_given: bool = False


def given_inputs(given: Any) -> Inputs:
    """Return the inputs that a factory returned: a mapping of keyword arguments, a tuple or list,
    or one value.
    """
    if isinstance(given, Mapping):
        return Inputs(kwargs=dict(given), is_given=True)
    return Inputs(args=tuple(given) if isinstance(given, tuple | list) else (given,), is_given=True)


def fresh(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments that a forward pass may change: on the device where they are already, none
    would be copied.

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
    """Return inputs for a transformers model, or in words why none are made: only tokens and images
    are.
    """
    config = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    if config is None or name is None:
        return "the factory returned no inputs; make it return (model, inputs)"
    generator = torch.Generator().manual_seed(SEED)
    if name == "input_ids":
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        size = getattr(text, "vocab_size", None)
        if not isinstance(size, int) or size < 2:
            return "its config has no usable vocab_size to generate tokens from"
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
    return (
        f"it takes {name!r}, for which ckptfix cannot generate inputs; pass --model a factory "
        "that returns (model, inputs)"
    )


def _is_size(value: Any, most: int) -> bool:
    return isinstance(value, int) and 0 < value <= most


def _positions(config: Any) -> int:
    """Return how many tokens to make: fewer where the model has few positions."""
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    return min([_LENGTH, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])


def _tokens(config: Any, size: int, length: int, generator: torch.Generator) -> torch.Tensor:
    ids = torch.randint(size, (_BATCH, length), generator=generator)
    # A token that stands for an image or a sound asks for one; padding would be masked out of the
    # output.
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


Factory = Callable[[], Any]
"""Returns a model, or (model, inputs): keyword arguments, a tuple of arguments, or one argument of
its forward.
"""


class Built(Struct, frozen=True, kw_only=True):
    """A model with a checkpoint's weights, on the CPU. ``what``: its class, in words.

    ``inputs``: or in words why there are none. ``beyond``: what this way of building does not
    exercise, in words.
    """

    model: Any
    what: str
    weights: Weights
    filled: Filled
    inputs: Inputs | str
    beyond: tuple[str, ...] = ()

    @property
    def skip_keys(self) -> tuple[str, ...]:
        """The arguments that the model asks to leave on the device where they are."""
        named = getattr(self.model, "_skip_keys_device_placement", None) or ()
        return (named,) if isinstance(named, str) else tuple(sorted(named))

    @property
    def no_split(self) -> tuple[str, ...]:
        """The classes that a map must not split: those that the model names, else those of its
        lists of blocks.
        """
        named = getattr(self.model, "_no_split_modules", None) or {
            type(child).__name__
            for module in self.model.modules()
            if isinstance(module, torch.nn.ModuleList)
            for child in module
            if any(True for _ in child.children())
        }
        return tuple(sorted(named))


def build_from_factory(factory: str | Factory, found: Sequence[Weights]) -> Built:
    """Call a factory ("module:name", or the function itself) and fill its model with the weights
    that fit.

    Raises UsageError when there is no such factory, it raises or returns no model, or several
    models of the folder fit; OperationError when a file cannot be read.
    """
    called = import_factory(factory) if isinstance(factory, str) else factory
    shown = (
        factory
        if isinstance(factory, str)
        else getattr(factory, "__name__", type(factory).__name__)
    )
    try:
        with current_folder_on_path():
            made = called()
        model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, torch.nn.Module) or isinstance(inputs, torch.nn.Module):
            raise UsageError(
                f"the factory {shown} returned {in_types(made)}: expected one torch.nn.Module, or "
                "(model, inputs)"
            )
        model = (
            model.to("cpu") if not any(one.is_meta for one in tensors_of(model).values()) else model
        )
        model.eval()
    except CkptfixError:
        raise
    except ANYTHING as error:
        raise UsageError(f"the factory {shown} raised {in_words(error)}") from error
    weights = _fitting(model, found)
    filled = fill(model, weights)
    weights.close()  # a file that cannot be mapped lies in memory while it is open
    return Built(
        model=model,
        what=f"{type(model).__name__} from {shown}",
        weights=weights,
        filled=filled,
        inputs=made_inputs(model) if inputs is None else given_inputs(inputs),
    )


def made_inputs(model: Any) -> Inputs | str:
    """Return inputs made from a model's config, or in words why there are none."""
    try:
        return transformers_inputs(model)
    except ANYTHING as error:
        return f"could not generate inputs from its config: {in_words(error)}"


def _fitting(model: Any, found: Sequence[Weights]) -> Weights:
    """Return the weights whose names and shapes fit a model; the only ones there are in any
    case.
    """
    if len(found) == 1:
        return found[0]
    fits = [weights for weights in found if not name_problems(model, weights)]
    if len(fits) == 1:
        return fits[0]
    labels = ", ".join(str(weights.root / weights.label) for weights in fits or found)
    word = (
        f"{len(fits)} models of the checkpoint match"
        if fits
        else "no model of the checkpoint matches"
    )
    raise UsageError(f"{word} {type(model).__name__}; pass the path of one file: {labels}")


def import_factory(spec: str) -> Factory:
    """Return the factory that ``module:factory`` names. Raises UsageError where there is none."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise UsageError(f"--model {spec!r}: expected module:factory, such as mypkg.models:build")
    if "/" in module or module.endswith(".py"):
        file = PurePath(module)
        where = f" and set PYTHONPATH={shell_path(str(file.parent))}" if file.parent.parts else ""
        raise UsageError(
            f"--model {spec}: expected the name of a module, not of a file; next: pass --model "
            f"{file.stem}:{name}{where}"
        )
    try:
        with current_folder_on_path():
            value: Any = importlib.import_module(module)
            for step in name.split("."):
                value = getattr(value, step)
    except ANYTHING as error:  # importing runs the user's own code
        raise UsageError(f"--model {spec}: {in_words(error)}") from error
    if not callable(value):
        raise UsageError(f"--model {spec}: {name} is a {type(value).__name__}, not a function")
    factory: Factory = value
    return factory


@contextmanager
def current_folder_on_path() -> Iterator[None]:
    """Find modules in the current folder, as ``python -m`` does and an installed command does
    not.
    """
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
