"""Roles of files in a checkpoint, and the parts that their names share."""

import re
from enum import Enum


class Role(Enum):
    """Purpose of a component. The value is the word in reports and in ``--keep``."""

    MODEL = "models"
    OPTIMIZER = "optimizers"
    SCHEDULER = "schedulers"
    SAMPLER = "samplers"
    DATALOADER = "dataloaders"
    GRAD_SCALER = "grad scaler"
    RNG_STATE = "rng states"
    CUSTOM = "custom"
    RUN_STATE = "run states"
    TRAINING_ARGUMENTS = "training arguments"
    WEIGHTS_INDEX = "weights index"
    UNKNOWN = "unknown"


OF_ONE_RANK = (Role.RNG_STATE, Role.RUN_STATE)
"""Roles of files that each rank has for itself."""

NOT_STATES = (Role.MODEL, Role.WEIGHTS_INDEX, Role.UNKNOWN)
"""Roles of files that may hold weights of a model. Every other role is a state that a library saves
by that name.
"""

# As Accelerate formats it: "model_01" has another author.
NUMBER = r"(0|[1-9][0-9]{0,8})"

_OF_MACOS = "._"
"""Beginning of the files in which macOS keeps attributes of another file, in archives and on
foreign file systems.
"""

_FOUND_BY_ENDING = re.compile(
    r"\._(pytorch_lora_weights|shard-[0-9]{5}-model-.*)\.safetensors", re.DOTALL
)
"""Those that a loader reads as weights, because it lists a folder and compares endings:
``load_lora_weights`` of diffusers 0.42, and ``HuggingFaceStorageReader`` of torch 2.13.
"""


def is_of_macos(name: str) -> bool:
    """Return whether a name is that of an AppleDouble file of macOS, which no loader reads."""
    return name.startswith(_OF_MACOS) and not _FOUND_BY_ENDING.fullmatch(name)
