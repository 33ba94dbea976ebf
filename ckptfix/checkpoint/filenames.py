"""Accelerate's file-name grammar: parse a name into what it means, and format it back.

Source: ``accelerate/utils/constants.py`` and ``checkpointing.py`` (1.0 to 1.15). Entry 0 of a role has no number,
entry i has ``_i``; custom objects are numbered from 0; RNG states are numbered by rank.
"""

import re
from dataclasses import dataclass, replace
from enum import Enum


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
    WEIGHTS_INDEX = "weights index"
    UNKNOWN = "unknown"


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""Every file with one of these suffixes is a component, whatever its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileName:
    """A parsed name. ``stem`` and ``suffix`` belong to the family: files of one family are one list of entries.

    ``shard`` is (number, total), both from 1, for one file of a sharded model. ``rank`` is set for RNG states.
    """

    role: Role
    stem: str
    suffix: str
    index: int = 0
    rank: int | None = None
    shard: tuple[int, int] | None = None

    @property
    def is_numbered(self) -> bool:
        """Whether Accelerate finds this file by its position, so that a gap or a double shifts others."""
        return self.role in _NUMBERED and self.shard is None

    @property
    def family(self) -> tuple[Role, str, str]:
        """Files with the same family form one list of entries."""
        return (self.role, self.stem, self.suffix)

    def at(self, index: int) -> "FileName":
        """Return the name of another entry of the same family."""
        return replace(self, index=index)

    def __str__(self) -> str:
        if self.shard is not None:
            return f"{self.stem}-{self.shard[0]:05}-of-{self.shard[1]:05}{self.suffix}"
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
_SHARD = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(\.safetensors|\.bin)", re.DOTALL)
_INDEX = re.compile(
    r"(.+)((?:\.safetensors|\.bin)\.index(?:\.[A-Za-z0-9_-]+)?\.json)", re.DOTALL
)  # .index.fp16.json
_RNG = re.compile(rf"random_states_{_NUMBER}\.pkl")
_CUSTOM = re.compile(rf"custom_checkpoint_{_NUMBER}\.pkl")
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
    if match := _SHARD.fullmatch(name):
        return FileName(role=Role.MODEL, stem=match[1], suffix=match[4], shard=(int(match[2]), int(match[3])))
    if match := _INDEX.fullmatch(name):
        return FileName(role=Role.WEIGHTS_INDEX, stem=match[1], suffix=match[2])
    for suffix in WEIGHT_SUFFIXES:
        if name.endswith(suffix) and name != suffix:
            return FileName(role=Role.UNKNOWN, stem=name[: -len(suffix)], suffix=suffix)
    return None


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
