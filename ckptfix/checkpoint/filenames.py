"""The grammar of file names: parse a name into what it means, and format it back.

Accelerate's (``utils/constants.py`` and ``checkpointing.py``, 1.0 to 1.15): entry 0 of a role has no number, entry i
has ``_i``; custom objects are numbered from 0; RNG states are numbered by rank. The Trainer's states (``trainer.py`` of
transformers 5). And the names that transformers, peft and diffusers give to weights, to their variants
(``model.fp16.safetensors``), their shards and the indexes of those.
"""

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple


class Role(Enum):
    """What a component is for. The value is the word used in reports and in ``--keep``."""

    MODEL = "models"
    OPTIMIZER = "optimizers"
    SCHEDULER = "schedulers"
    SAMPLER = "samplers"
    DATALOADER = "dataloaders"
    GRAD_SCALER = "grad scaler"
    RNG_STATE = "rng states"
    CUSTOM = "custom"
    TRAINING_ARGUMENTS = "training arguments"
    WEIGHTS_INDEX = "weights index"
    UNKNOWN = "unknown"


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pth.tar", ".th")
"""Every file with one of these suffixes is a component, whatever its name."""

NOT_STATES = (Role.MODEL, Role.WEIGHTS_INDEX, Role.UNKNOWN)
"""Roles of files that may hold weights of a model. Every other role is a state that a library saves by that name."""


class ModelName(NamedTuple):
    """A model by the name of its files, without numbers: ``variant`` is "fp16" of ``model.fp16.safetensors``.

    Files of one name and one index are one model, in any format and in any number of shards.
    """

    stem: str
    variant: str = ""


_LIBRARY_STEMS = {
    "model": "model",
    "pytorch_model": "model",
    "pytorch_model_fsdp": "model",
    "adapter_model": "adapter_model",
    "pytorch_lora_weights": "pytorch_lora_weights",
    "diffusion_pytorch_model": "diffusion_pytorch_model",
}
"""What libraries call weights, without a variant -> the model that it is, whatever the format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileName:
    """A parsed name. ``stem`` and ``suffix`` belong to the family: files of one family are one list of entries.

    ``shard`` is (number, total), both from 1, for one file of a sharded model. ``rank`` is set for RNG states.
    ``variant`` is set where it follows the number of a shard, as diffusers wrote it before 0.30.
    """

    role: Role
    stem: str
    suffix: str
    index: int = 0
    rank: int | None = None
    shard: tuple[int, int] | None = None
    variant: str = ""

    @property
    def is_numbered(self) -> bool:
        """Whether Accelerate finds this file by its position, so that a gap or a double shifts others."""
        return self.role in _NUMBERED and self.shard is None and not self.is_of_trainer

    @property
    def is_of_trainer(self) -> bool:
        """Whether transformers' Trainer writes and reads this state, and ``load_state`` never does."""
        return (self.stem, self.suffix) in _OF_TRAINER

    @property
    def model(self) -> ModelName | None:
        """The model that this is a file or the index of, by its name; None for states."""
        if self.role not in NOT_STATES:
            return None
        stem, _, variant = self.stem.partition(".")
        if stem not in _LIBRARY_STEMS:
            return ModelName(self.stem)
        if self.role is Role.WEIGHTS_INDEX:
            of_index = _VARIANT_OF_INDEX.fullmatch(self.suffix)
            variant = variant or (of_index and (of_index[1] or of_index[2])) or ""
        return ModelName(_LIBRARY_STEMS[stem], variant or self.variant)

    @property
    def is_of_library(self) -> bool:
        """Whether a library writes weights, or their index, under this name, and finds them by it."""
        return (
            self.role in NOT_STATES
            and self.suffix not in _SUFFIXES_OF_SCRIPTS
            and self.stem.partition(".")[0] in _LIBRARY_STEMS
        )

    @property
    def index_name(self) -> str:
        """The name of the index that lists this shard."""
        if self.variant:
            return f"{self.stem}{self.suffix}.{self.variant}.index.json"
        return index_name(self.stem, self.suffix)

    @property
    def family(self) -> tuple[Role, str, str]:
        """Files with the same family form one list of entries."""
        return (self.role, self.stem, self.suffix)

    def at(self, index: int) -> "FileName":
        """Return the name of another entry of the same family."""
        return replace(self, index=index)

    def __str__(self) -> str:
        if self.shard is not None:
            variant = f".{self.variant}" if self.variant else ""
            return f"{self.stem}-{self.shard[0]:05}-of-{self.shard[1]:05}{variant}{self.suffix}"
        if self.rank is not None:
            return f"{self.stem}_{self.rank}{self.suffix}"
        if self.role is Role.CUSTOM or self.index:
            return f"{self.stem}_{self.index}{self.suffix}"
        return self.stem + self.suffix


_NUMBERED = (Role.MODEL, Role.OPTIMIZER, Role.SCHEDULER, Role.SAMPLER, Role.DATALOADER, Role.CUSTOM)
_FAMILIES = (
    ("model", ".safetensors", Role.MODEL),
    ("pytorch_model", ".bin", Role.MODEL),
    ("pytorch_model_fsdp", ".bin", Role.MODEL),
    ("optimizer", ".bin", Role.OPTIMIZER),
    ("scheduler", ".bin", Role.SCHEDULER),
    ("sampler", ".bin", Role.SAMPLER),
    ("dl_state_dict", ".bin", Role.DATALOADER),
)
_NUMBER = r"(0|[1-9][0-9]{0,8})"  # as Accelerate formats it: "model_01" is somebody else's name
_WORD = "[A-Za-z0-9_-]+"
_SHARD = re.compile(
    rf"(.+)-([0-9]{{5}})-of-([0-9]{{5}})(?:\.({_WORD}))?(\.safetensors|\.bin)", re.DOTALL
)  # model-00001-of-00002.safetensors, and .fp16.safetensors as diffusers wrote it before 0.30
_INDEX = re.compile(
    rf"(.+)((?:\.safetensors|\.bin)(?:\.index(?:\.{_WORD})?|\.{_WORD}\.index)\.json)", re.DOTALL
)  # .index.fp16.json, and .fp16.index.json as diffusers wrote it before 0.30
_VARIANT_OF_INDEX = re.compile(rf"(?:\.safetensors|\.bin)(?:\.index\.({_WORD})|\.({_WORD})\.index)\.json")
_SUFFIXES_OF_SCRIPTS = (".pt", ".pth", ".ckpt", ".pth.tar", ".th")
_RNG = re.compile(rf"random_states_{_NUMBER}\.pkl")
_TRAINER_RNG = re.compile(rf"rng_state_{_NUMBER}\.pth")
_CUSTOM = re.compile(rf"custom_checkpoint_{_NUMBER}\.pkl")
_OF_TRAINER = {
    ("optimizer", ".pt"): Role.OPTIMIZER,
    ("scheduler", ".pt"): Role.SCHEDULER,
    ("training_args", ".bin"): Role.TRAINING_ARGUMENTS,
    ("rng_state", ".pth"): Role.RNG_STATE,
}
"""Stem and suffix -> role of what only the Trainer saves. Its ``scaler.pt`` is called as Accelerate's own."""

_ENTRIES = tuple(
    (re.compile(rf"{stem}(?:_([1-9][0-9]{{0,8}}))?{re.escape(suffix)}"), stem, suffix, role)
    for stem, suffix, role in _FAMILIES
)


def parse_file_name(name: str) -> FileName | None:
    """Return what a file name means, or None for a file that is no part of a checkpoint.

    ``str()`` of the result is the name again (a tested law), except for roles without a grammar.
    """
    for pattern, stem, suffix, role in _ENTRIES:
        if match := pattern.fullmatch(name):
            return FileName(role=role, stem=stem, suffix=suffix, index=int(match[1] or 0))
    if match := _RNG.fullmatch(name):
        return FileName(role=Role.RNG_STATE, stem="random_states", suffix=".pkl", rank=int(match[1]))
    if match := _CUSTOM.fullmatch(name):
        return FileName(role=Role.CUSTOM, stem="custom_checkpoint", suffix=".pkl", index=int(match[1]))
    if name == "scaler.pt":
        return FileName(role=Role.GRAD_SCALER, stem="scaler", suffix=".pt")
    for (stem, suffix), role in _OF_TRAINER.items():
        if name == stem + suffix:
            return FileName(role=role, stem=stem, suffix=suffix)
    if match := _TRAINER_RNG.fullmatch(name):
        return FileName(role=Role.RNG_STATE, stem="rng_state", suffix=".pth", rank=int(match[1]))
    if match := _SHARD.fullmatch(name):
        shard = (int(match[2]), int(match[3]))
        return FileName(role=Role.MODEL, stem=match[1], suffix=match[5], shard=shard, variant=match[4] or "")
    if match := _INDEX.fullmatch(name):
        return FileName(role=Role.WEIGHTS_INDEX, stem=match[1], suffix=match[2])
    for suffix in WEIGHT_SUFFIXES:
        if name.endswith(suffix) and name != suffix:
            return FileName(role=Role.UNKNOWN, stem=name[: -len(suffix)], suffix=suffix)
    return None


def index_name(stem: str, suffix: str) -> str:
    """Return the name of the index of shards; that of ``model.fp16`` is ``model.safetensors.index.fp16.json``."""
    base, _, variant = stem.partition(".")
    if base in _LIBRARY_STEMS and variant:
        return f"{base}{suffix}.index.{variant}.json"
    return f"{stem}{suffix}.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderName:
    """The parsed name of a DCP folder of Accelerate's FSDP; entry 0 has its number, too."""

    role: Role
    stem: str
    index: int

    def at(self, index: int) -> "FolderName":
        """Return the name of another entry of the same family."""
        return replace(self, index=index)

    def __str__(self) -> str:
        return f"{self.stem}_{self.index}"


_DCP_FOLDER = re.compile(rf"(pytorch_model_fsdp|optimizer)_{_NUMBER}")


def parse_folder_name(name: str) -> FolderName | None:
    """Return what the name of a DCP folder means, None for any other. ``str()`` of the result is the name again."""
    match = _DCP_FOLDER.fullmatch(name)
    if match is None:
        return None
    role = Role.OPTIMIZER if match[1] == "optimizer" else Role.MODEL
    return FolderName(role=role, stem=match[1], index=int(match[2]))


_FOLDERS = (
    (
        re.compile(r"pytorch_model_fsdp_[0-9]+|optimizer_[0-9]+"),
        "a torch.distributed.checkpoint (DCP) folder",
    ),
    (re.compile(r"pytorch_model(_[0-9]+)?"), "a DeepSpeed folder"),
)


def describe_folder_name(name: str) -> str | None:
    """Return what a sub-folder of a checkpoint is when Accelerate writes such a one, else None."""
    return next((words for pattern, words in _FOLDERS if pattern.fullmatch(name)), None)
