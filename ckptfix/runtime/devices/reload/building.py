"""The model of a checkpoint, as the proofs use it, and how the user's own factory builds it."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ckptfix.errors import CkptfixError, UsageError
from ckptfix.runtime.devices.reload.filling import (
    Filled,
    fill,
    name_problems,
    tensors_of,
)
from ckptfix.runtime.devices.reload.inputs import Inputs, given_inputs, transformers_inputs
from ckptfix.runtime.devices.reload.raising import ANYTHING, in_words
from ckptfix.runtime.devices.reload.stored import Weights

Factory = Callable[[], Any]
"""Returns a model, or (model, inputs): keyword arguments, a tuple of arguments, or one argument of its forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model with a checkpoint's weights, on the CPU. ``what``: its class, in words.

    ``inputs``: or in words why there are none. ``skip_keys``: arguments that stay where they are, as transformers asks.
    ``beyond``: what this way of building does not exercise, in words.
    """

    model: Any
    what: str
    weights: Weights
    filled: Filled
    inputs: Inputs | str
    no_split: tuple[str, ...]
    skip_keys: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ()


def build_from_factory(factory: str | Factory, found: Sequence[Weights]) -> Built:
    """Call a factory ("module:name", or the function itself) and fill its model with the weights that fit.

    Raises UsageError when there is no such factory, it raises or returns no model, or several models of the folder
    fit; OperationError when a file cannot be read.
    """
    called = _imported(factory) if isinstance(factory, str) else factory
    shown = factory if isinstance(factory, str) else getattr(factory, "__name__", type(factory).__name__)
    try:
        with _current_folder_on_path():
            made = called()
        model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"the factory {shown} returned {type(model).__name__}, no torch.nn.Module")
        model = model.to("cpu") if not any(one.is_meta for one in tensors_of(model).values()) else model
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
        no_split=whole_blocks(model),
        skip_keys=skip_keys_of(model),
    )


def made_inputs(model: Any) -> Inputs | str:
    """Return inputs made from a model's config, or in words why there are none."""
    try:
        return transformers_inputs(model)
    except ANYTHING as error:
        return f"no inputs could be made from its config: {in_words(error)}"


def whole_blocks(model: Any) -> tuple[str, ...]:
    """Return the classes that a map must not split: those that the model names, else those of its lists of blocks."""
    named = getattr(model, "_no_split_modules", None)
    if named:
        return tuple(sorted(named))
    classes = {
        type(child).__name__
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList)
        for child in module
        if any(True for _ in child.children())
    }
    return tuple(sorted(classes))


def _fitting(model: Any, found: Sequence[Weights]) -> Weights:
    """Return the weights whose names and shapes fit a model; the only ones there are in any case."""
    if len(found) == 1:
        return found[0]
    fits = [weights for weights in found if not name_problems(model, weights)]
    if len(fits) == 1:
        return fits[0]
    labels = ", ".join(str(weights.root / weights.label) for weights in fits or found)
    word = f"{len(fits)} models of the checkpoint fit" if fits else "no model of the checkpoint fits"
    raise UsageError(f"{word} {type(model).__name__}; give the path of one file: {labels}")


def _imported(spec: str) -> Factory:
    module, _, name = spec.partition(":")
    if not module or not name:
        raise UsageError(f"--model {spec!r}: write module:factory, as in mypkg.models:build")
    try:
        with _current_folder_on_path():
            value: Any = importlib.import_module(module)
            for step in name.split("."):
                value = getattr(value, step)
    except ANYTHING as error:  # importing runs the user's own code
        raise UsageError(f"--model {spec}: {in_words(error)}") from error
    if not callable(value):
        raise UsageError(f"--model {spec}: {name} is a {type(value).__name__}, no function")
    factory: Factory = value
    return factory


@contextmanager
def _current_folder_on_path() -> Iterator[None]:
    """Find modules beside the user, as ``python -m`` does and an installed command does not."""
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def skip_keys_of(model: Any) -> tuple[str, ...]:
    """Return the arguments that a model asks to leave on the device where they are."""
    named = getattr(model, "_skip_keys_device_placement", None) or ()
    return (named,) if isinstance(named, str) else tuple(sorted(named))
