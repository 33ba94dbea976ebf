"""A transformers model of a checkpoint, as ``from_pretrained`` builds and fills it. No remote code.

A checkpoint that transformers refuses is a failure, with its own words. Only where nobody says which class the weights
belong to is there no verdict.
"""

import copy
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from ckptfix.errors import CkptfixError
from ckptfix.runtime.devices.reload.building import Built, made_inputs, skip_keys_of, whole_blocks
from ckptfix.runtime.devices.reload.destinations import absent_siblings
from ckptfix.runtime.devices.reload.machine import free_memory, is_out_of_memory
from ckptfix.runtime.devices.reload.mapping import CPU
from ckptfix.runtime.devices.reload.pretrained_filling import filled_by_loader
from ckptfix.runtime.devices.reload.raising import ANYTHING, in_words, one_line
from ckptfix.runtime.devices.reload.stored import Weights
from ckptfix.wording import human_size, list_names

_UNMERGED = re.compile(
    r"^(?P<why>[^\n]*)\n\s*Error: [^\n]*destined for (?P<place>\S+?)\.? Ckpt", re.MULTILINE
)
"""The reason and the place in transformers' report of tensors that it could not merge."""


class NoModel(Exception):
    """Nothing says which class the weights belong to, or nothing that may be trusted; the message says why."""


class LoaderRefuses(Exception):
    """``from_pretrained`` raises on this checkpoint; the message quotes it and says what to do."""


def build_from_config(root: Path, found: Sequence[Weights]) -> Built:
    """Build the class that ``config.json`` names, when it is transformers' own, and load the weights as it would.

    Raises LoaderRefuses where ``from_pretrained`` raises, NoModel where no class is known or code from the folder would
    be needed, OperationError when a file cannot be read, OSError when config.json cannot.
    """
    text = _config_text(root)
    try:
        import transformers
    except ImportError:
        raise NoModel("transformers is not installed, so config.json builds nothing") from None
    given = _parsed(text)
    _ensure_transformers_config(given, transformers)
    with _captured_log() as log:
        config = _config(root, given, transformers)
        cls = _model_class(given, transformers)
        (weights,) = _ensure_one_model(given, found)
        _ensure_room(cls, config, weights)
        model, info = _loaded(cls, config, weights, log)
        _ensure_generation(model, root, transformers)
    filled = filled_by_loader(model, weights, info)
    weights.close()  # a file that cannot be mapped lies in memory while it is open
    return Built(
        model=model,
        what=f"{cls.__name__} from config.json",
        weights=weights,
        filled=filled,
        inputs=made_inputs(model),
        no_split=whole_blocks(model),
        skip_keys=skip_keys_of(model),
        beyond=tuple(_beyond(root, given)),
    )


def _config_text(root: Path) -> str:
    path = root / "config.json"
    if not path.is_file():
        raise NoModel("no --model, and no config.json next to the weights")
    return path.read_text(encoding="utf-8", errors="replace")


def _parsed(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoaderRefuses(f"config.json is not JSON: {error}; copy or write it again") from None
    if not isinstance(config, dict):
        kind = type(config).__name__
        raise LoaderRefuses(f"config.json holds a {kind}, and must hold an object; copy or write it again")
    return config


def _ensure_transformers_config(config: dict[str, Any], transformers: Any) -> None:
    """Raise NoModel for the ``config.json`` of another library: diffusers, timm, or the user's own settings."""
    marks = ("architectures", "transformers_version")
    model_type = config.get("model_type")
    known = isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING
    if not known and not any(mark in config for mark in marks):
        raise NoModel(f"config.json names no class of transformers (it has no {' and no '.join(marks)})")


def _config(root: Path, given: dict[str, Any], transformers: Any) -> Any:
    """Return what AutoConfig makes of ``config.json``, where no remote code is needed for it."""
    try:
        return transformers.AutoConfig.from_pretrained(
            str(root), trust_remote_code=False, local_files_only=True
        )
    except ANYTHING as error:
        if "auto_map" in given and given.get("model_type") not in transformers.CONFIG_MAPPING:
            raise NoModel("config.json needs code from the folder (auto_map), which is never run") from error
        step = (
            f"correct config.json, or install a transformers that knows it (here: {transformers.__version__})"
        )
        raise LoaderRefuses(f"{in_words(error)}; {step}") from error


def _model_class(given: dict[str, Any], transformers: Any) -> Any:
    names = given.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise NoModel("no --model, and config.json names no single architecture of transformers")
    cls: Any = getattr(transformers, names[0], None)
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        version = transformers.__version__
        raise NoModel(f"config.json names {names[0]!r}, which is not a model class of transformers {version}")
    return cls


def _ensure_one_model(given: dict[str, Any], found: Sequence[Weights]) -> Sequence[Weights]:
    if "quantization_config" in given:
        raise NoModel("config.json asks for quantized weights, which are not rebuilt here")
    if len(found) != 1:
        raise NoModel(f"config.json describes one model, here are {len(found)}; give the path of one file")
    return found


def _ensure_room(cls: Any, config: Any, weights: Weights) -> None:
    """Raise where the model does not fit into memory: missing and mismatched tensors are made at their full size.

    A config that lacks its sizes describes a model of 7 billion parameters, and the kernel would end the process.
    """
    try:
        own = copy.deepcopy(config)
        own._attn_implementation = "eager"  # a name of kernels would be looked for, and downloaded
        with torch.device("meta"):
            skeleton = cls(own)
        needs = 2 * sum(parameter.numel() for parameter in skeleton.parameters())
    except ANYTHING:
        return  # the loader itself will say why
    room = int(free_memory().get(CPU, 0))
    if not room or needs < room:
        return
    sizes = f"config.json describes a model of at least {human_size(needs)}"
    if needs > 4 * weights.nbytes:
        raise LoaderRefuses(
            f"{sizes}, and the file holds {human_size(weights.nbytes)}: this host has no memory for the random values "
            "that would fill the gap; correct the sizes in config.json"
        )
    raise NoModel(f"{sizes}, and this host has {human_size(room)} of memory free")


def _loaded(cls: Any, config: Any, weights: Weights, log: "_Log") -> tuple[Any, dict[str, Any]]:
    try:
        # Not from the folder: it could lead to other files, adapters and kernels. The class renames and merges
        # weights by itself; the tensors are read by us. No dtype: the one that every user's call gets. Mismatched
        # sizes are let through here, so that all of them can be named: they are failures in any case.
        model, info = cls.from_pretrained(
            None, config=config, state_dict={name: weights.read(name) for name in weights.tensors},
            output_loading_info=True, ignore_mismatched_sizes=True, local_files_only=True,
            trust_remote_code=False, attn_implementation="eager",
        )  # fmt: skip
        model.eval()
    except CkptfixError:
        raise
    except ANYTHING as error:  # a config's values are looked at by the model's own code
        if isinstance(error, MemoryError) or is_out_of_memory(error) or "allocate memory" in str(error):
            raise NoModel(
                f"{cls.__name__} does not fit into this host's memory: {in_words(error)}"
            ) from error
        if unmerged := _UNMERGED.search(log.text):
            raise LoaderRefuses(_unmerged(unmerged, weights)) from error
        step = "correct config.json, or the weights, until both are of one model"
        raise LoaderRefuses(f"{cls.__name__}: {in_words(error)}; {step}") from error
    return model, info


def _ensure_generation(model: Any, root: Path, transformers: Any) -> None:
    """Read ``generation_config.json`` as from_pretrained does, which passes over one that is not JSON."""
    if not model.can_generate() or not (root / "generation_config.json").is_file():
        return
    try:
        with suppress(OSError):
            transformers.GenerationConfig.from_pretrained(str(root), local_files_only=True)
    except ANYTHING as error:
        raise LoaderRefuses(f"generation_config.json: {in_words(error)}; correct it, or delete it") from error


def _unmerged(found: re.Match[str], weights: Weights) -> str:
    absent = absent_siblings(weights.tensors)
    lacks = f"; the file has no {list_names(absent)}" if absent else ""
    step = "copy the checkpoint again, or save it again from the run"
    return f"the tensors for {found['place']!r} do not fit together: {one_line(found['why'])}{lacks}; {step}"


def _beyond(root: Path, given: dict[str, Any]) -> Iterator[str]:
    """Yield in words what a user's own call of ``from_pretrained`` does, and this one does not."""
    asked = given.get("attn_implementation") or given.get("_attn_implementation")
    wants = f"config.json asks for {asked!r}" if asked else "from_pretrained chooses 'sdpa' or faster ones"
    yield f"other attention kernels: the model is built with attn_implementation='eager'; {wants}"
    if (root / "adapter_config.json").is_file():
        yield "adapter_config.json: with PEFT installed, from_pretrained loads the base model that it names first"
    if given.get("transformers_weights"):
        yield f"transformers_weights in config.json: from_pretrained loads {given['transformers_weights']!r} instead"


class _Log(logging.Handler):
    """Warnings that transformers writes, kept instead of printed: what they say is in the report."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.text += f"{record.getMessage()}\n"


@contextmanager
def _captured_log() -> Iterator[_Log]:
    """Keep transformers' bars and load reports off the terminal, and its warnings for the report."""
    from transformers.utils import logging as own

    logger, log = logging.getLogger("transformers"), _Log()
    level, bars = own.get_verbosity(), own.is_progress_bar_enabled()
    handlers, propagates = list(logger.handlers), logger.propagate
    own.set_verbosity(logging.WARNING)
    logger.handlers, logger.propagate = [log], False
    own.disable_progress_bar()
    try:
        yield log
    finally:
        logger.handlers, logger.propagate = handlers, propagates
        own.set_verbosity(level)
        if bars:
            own.enable_progress_bar()
