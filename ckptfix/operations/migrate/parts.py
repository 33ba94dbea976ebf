"""What the files of one checkpoint are called: the exact names that libraries write, and which model they are of.

A name that only looks like one of them is the user's own.
"""

import re
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import NOT_STATES, ModelName, Role, parse_file_name
from ckptfix.checkpoint.latest import UNFINISHED
from ckptfix.storage.lock import LOCK
from ckptfix.storage.paths import MANIFEST
from ckptfix.weights.deepspeed_files import is_deepspeed_file

_BESIDE = frozenset({
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "adapter_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "sentencepiece.bpe.model", "spiece.model", "vocab.json",
    "vocab.txt", "merges.txt", "chat_template.json", "chat_template.jinja", "model_index.json",
    "trainer_state.json", "latest", "zero_to_fp32.py", ".gitattributes", "LICENSE",
})  # fmt: skip
"""What transformers, peft, DeepSpeed and the hub put beside weights. A README.md is often written by hand."""

_DCP_DATA = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_DCP = re.compile(rf"(__[0-9]+)?\.metadata(\.tmp)?|{_DCP_DATA.pattern}")
"""The files of a DCP folder, and what a save leaves there that was cut short (torch 2.13, ``filesystem.py``)."""

_DEEPSPEED_ENDS = ("_model_states.pt", "-model_states.pt", "_optim_states.pt")

_OF_TRANSACTIONS = re.compile(
    r"(?:[0-9]{4}|[1-9][0-9]{4,})\.(?:building|pending|done)(?:/(?:plan\.json|literals|steps|steps\.new|after\.json|any-time|"
    r"[0-9]+\.(?:new|kept|trash|tail|part|copy)))?"
)

MODEL = ModelName("model")
"""The model of a checkpoint, as most libraries call it; that of DCP and DeepSpeed folders, too."""

PARTIAL = frozenset({"adapter_model", "diffusion_pytorch_model", "pytorch_lora_weights"})
"""What is not called a model by a library, and is none by another name."""


def family_of(name: str) -> ModelName | None:
    """Return which model a file holds weights of, by its name, or is the index of; None for all else."""
    parsed = parse_file_name(name)
    if parsed is None or is_beside_weights(name):
        return None
    return MODEL if is_of_deepspeed(name) else parsed.model


def needs_a_look(name: str) -> bool:
    """Whether a file is known for weights by its suffix alone, which files of other kinds have as well."""
    parsed = parse_file_name(name)
    return parsed is not None and parsed.role is Role.UNKNOWN and not is_of_deepspeed(name)


def is_beside_weights(name: str) -> bool:
    """Whether a library puts a file of this name beside weights."""
    return name in _BESIDE


def is_state(name: str) -> bool:
    """Whether ``save_state`` or the Trainer writes a state under this name: of an optimizer, of generators."""
    parsed = parse_file_name(name)
    return parsed is not None and parsed.role not in NOT_STATES


def is_of_dcp(name: str, *, data: bool = False) -> bool:
    """Whether torch.distributed.checkpoint calls a file so; ``data``: one that holds tensors."""
    return (_DCP_DATA if data else _DCP).fullmatch(name) is not None


def is_of_deepspeed(name: str) -> bool:
    """Whether DeepSpeed calls a file so."""
    return is_deepspeed_file(name) and name.endswith(_DEEPSPEED_ENDS)


def is_of_ckptfix(path: PurePosixPath) -> bool:
    """Whether ckptfix writes a file at a path in ``.ckptfix``, relative to that; or a folder, when it is empty."""
    own = (PurePosixPath(MANIFEST).name, LOCK, UNFINISHED, f"{UNFINISHED}.new")
    return str(path) in own or _OF_TRANSACTIONS.fullmatch(str(path)) is not None
