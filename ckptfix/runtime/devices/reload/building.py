"""The model of a checkpoint: from the user's factory, or from a transformers ``config.json``. No remote code."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import find_tied_parameters

from ckptfix.errors import CkptfixError, UsageError
from ckptfix.runtime.devices.reload.filling import (
    Filled,
    fill,
    holds,
    name_problems,
    names_by_prefix,
    narrowing,
    narrowings,
    tensors_of,
    untied,
)
from ckptfix.runtime.devices.reload.inputs import Inputs, given_inputs, transformers_inputs
from ckptfix.runtime.devices.reload.raising import ANYTHING, in_words
from ckptfix.runtime.devices.reload.stored import Weights
from ckptfix.wording import count_of, list_names

Factory = Callable[[], Any]
"""Returns a model, or (model, inputs): keyword arguments, a tuple of arguments, or one argument of its forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model with a checkpoint's weights, on the CPU. ``what``: its class, in words.

    ``inputs``: or in words why there are none. ``skip_keys``: arguments that stay where they are, as transformers asks.
    """

    model: Any
    what: str
    weights: Weights
    filled: Filled
    inputs: Inputs | str
    no_split: tuple[str, ...]
    skip_keys: tuple[str, ...] = ()


class NoModel(Exception):
    """Nothing says which class the weights belong to, or nothing that may be trusted; the message says why."""


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
        inputs=_made_inputs(model) if inputs is None else given_inputs(inputs),
        no_split=whole_blocks(model),
        skip_keys=_skip_keys(model),
    )


def build_from_config(root: Path, found: Sequence[Weights]) -> Built:
    """Build the class that ``config.json`` names, when it is transformers' own, and load the weights as it would.

    Raises NoModel in every other case, OperationError when a file cannot be read.
    """
    architecture = _architecture(root, found)
    try:
        import transformers
    except ImportError:
        raise NoModel("transformers is not installed, so config.json builds nothing") from None
    (weights,) = found
    cls: Any = getattr(transformers, architecture, None)
    if not _is_model_class(cls, transformers):
        raise NoModel(
            f"config.json names {architecture!r}, no class of transformers {transformers.__version__}"
        )
    try:
        with _quiet(transformers):
            config = transformers.AutoConfig.from_pretrained(
                str(root), trust_remote_code=False, local_files_only=True
            )
            # Not from the folder: it could lead to other files, adapters and kernels. The class renames and merges
            # weights by itself; the tensors are read by us. No dtype: the one that every user's call gets.
            model, info = cls.from_pretrained(
                None, config=config, state_dict={name: weights.read(name) for name in weights.tensors},
                output_loading_info=True, ignore_mismatched_sizes=True, local_files_only=True,
                trust_remote_code=False, attn_implementation="eager",
            )  # fmt: skip
            model.eval()
    except CkptfixError:
        raise
    except ANYTHING as error:  # a config's values are looked at by the model's own code
        raise NoModel(f"{architecture} cannot be built from config.json: {in_words(error)}") from error
    names, renamed = names_by_prefix(model, weights)
    converted, narrowed = _other_dtypes(model, names, weights)
    for name in narrowed:
        del names[name]
    tied_apart = untied(find_tied_parameters(model), weights)
    weights.close()  # a file that cannot be mapped lies in memory while it is open
    return Built(
        model=model,
        what=f"{architecture} from config.json",
        weights=weights,
        filled=Filled(
            names=names,
            differences=(*_of_loading(info), *narrowings(list(narrowed.values()))),
            converted=tuple(converted),
            untied=tied_apart,
            renamed=renamed,
        ),
        inputs=_made_inputs(model),
        no_split=whole_blocks(model),
        skip_keys=_skip_keys(model),
    )


def _other_dtypes(model: Any, names: Mapping[str, str], weights: Weights) -> tuple[list[str], dict[str, str]]:
    """Return the names that a model holds in a wider dtype than the file, and those in a narrower one, with words."""
    state = tensors_of(model)
    converted, narrowed = [], {}
    for ours, theirs in names.items():
        held, stored = state[ours].dtype, weights.read(theirs).dtype
        if held == stored:
            continue
        if holds(held, stored):
            converted.append(ours)
        else:
            narrowed[ours] = narrowing(ours, stored, held)
    return converted, narrowed


def _made_inputs(model: Any) -> Inputs | str:
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


def _architecture(root: Path, found: Sequence[Weights]) -> str:
    path = root / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise NoModel("no --model, and no config.json beside the weights") from None
    except (ValueError, RecursionError) as error:
        raise NoModel(f"config.json is no JSON: {error}") from None
    names = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise NoModel("no --model, and config.json names no single architecture of transformers")
    if "quantization_config" in config:
        raise NoModel("config.json asks for quantized weights, which are not rebuilt here")
    if len(found) != 1:
        raise NoModel(f"config.json describes one model, here are {len(found)}; give the path of one file")
    return str(names[0])


def _is_model_class(cls: object, transformers: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)


def _of_loading(info: dict[str, Any]) -> tuple[str, ...]:
    problems = []
    if missing := sorted(info.get("missing_keys", ())):
        problems.append(f"{count_of(len(missing), 'name')} of the model missing: {list_names(missing)}")
    if unexpected := sorted(info.get("unexpected_keys", ())):
        problems.append(f"{count_of(len(unexpected), 'unexpected name')}: {list_names(unexpected)}")
    for name, have, want in sorted(info.get("mismatched_keys", ())):
        problems.append(f"{name!r} has shape {list(have)} in the file, {list(want)} in the model")
    problems += [str(message) for message in info.get("error_msgs", ())]
    return tuple(problems)


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


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers' bars and load reports off the terminal: what they say is in the report."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _skip_keys(model: Any) -> tuple[str, ...]:
    named = getattr(model, "_skip_keys_device_placement", None) or ()
    return (named,) if isinstance(named, str) else tuple(sorted(named))
