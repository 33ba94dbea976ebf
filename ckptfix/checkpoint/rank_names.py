"""Names of files that each rank saves: those of FSDP, DCP and DeepSpeed."""

import re
from enum import Enum
from typing import NamedTuple

from msgspec import Struct

from ckptfix.checkpoint.folder_names import FSDP_MODEL
from ckptfix.checkpoint.roles import NUMBER, Role, is_of_macos


class RankFileName(Struct, frozen=True, kw_only=True):
    """The parsed name of a file in which one rank saved its part of a model or optimizer: FSDP
    without DCP.

    Entry 0 has its number in the name, but for FSDP1's local state dicts of a model.
    """

    role: Role
    index: int
    rank: int
    stem: str
    is_local: bool = False

    def __str__(self) -> str:
        return f"{self.stem}{'' if self.is_local else f'_{self.index}'}_rank{self.rank}.bin"


_RANK_FILE = re.compile(rf"({FSDP_MODEL}|optimizer)(?:_{NUMBER})?_rank{NUMBER}\.bin")


def parse_rank_file_name(name: str) -> RankFileName | None:
    """Return the meaning of the name of a file that one rank saved alone, None for any other."""
    match = _RANK_FILE.fullmatch(name)
    if match is None or (match[1] == "optimizer" and match[2] is None):
        return None
    role = Role.OPTIMIZER if match[1] == "optimizer" else Role.MODEL
    index = int(match[2] or 0)
    return RankFileName(
        role=role, index=index, rank=int(match[3]), stem=match[1], is_local=match[2] is None
    )


class WorldRankName(NamedTuple):
    """The parsed name of a file in which one of ``world_size`` ranks saved its part:
    ``model_world_size_8_rank_0.pt``.

    verl saves ``model``, ``optim`` and ``extra_state`` so
    (``utils/checkpoint/fsdp_checkpoint_manager.py``), and others use the same form.
    """

    stem: str
    world_size: int
    rank: int
    suffix: str

    def __str__(self) -> str:
        return f"{self.stem}_world_size_{self.world_size}_rank_{self.rank}{self.suffix}"


_WORLD_RANK = re.compile(rf"(.+)_world_size_{NUMBER}_rank_{NUMBER}(\.pth?)")


def parse_world_rank_name(name: str) -> WorldRankName | None:
    """Return the meaning of the name of a file of one of several ranks, None for any other."""
    match = _WORLD_RANK.fullmatch(name)
    if match is None or int(match[3]) >= int(match[2]):
        return None
    return WorldRankName(match[1], int(match[2]), int(match[3]), match[4])


class DcpPart(Enum):
    """Kinds of files in a DCP folder; the value is the ending of their names."""

    METADATA = ".metadata"
    UNFINISHED_METADATA = ".metadata.tmp"
    DATA = ".distcp"


class DcpFileName(Struct, frozen=True, kw_only=True):
    """The parsed name of a file in a DCP folder.

    ``rank``: the process that wrote it; None for the metadata of all ranks. ``number``: counts a
    rank's data files. ``stem``: the beginning of a data file's name when torch itself would not use
    that name, else "".
    """

    part: DcpPart
    rank: int | None = None
    number: int = 0
    stem: str = ""

    def __str__(self) -> str:
        if self.stem or self.rank is None:
            return self.stem + self.part.value
        number = f"_{self.number}" if self.part is DcpPart.DATA else ""
        return f"__{self.rank}{number}{self.part.value}"


_DCP_METADATA = re.compile(rf"(?:__{NUMBER})?(\.metadata(?:\.tmp)?)")
_DCP_DATA = re.compile(rf"__{NUMBER}_{NUMBER}\.distcp")


def parse_dcp_name(name: str) -> DcpFileName | None:
    """Return the meaning of the name of a file in a DCP folder, None for a file that no save of DCP
    leaves there.
    """
    if is_of_macos(name):
        return None
    if match := _DCP_METADATA.fullmatch(name):
        return DcpFileName(part=DcpPart(match[2]), rank=None if match[1] is None else int(match[1]))
    if match := _DCP_DATA.fullmatch(name):
        return DcpFileName(part=DcpPart.DATA, rank=int(match[1]), number=int(match[2]))
    stem = name.removesuffix(DcpPart.DATA.value)
    return DcpFileName(part=DcpPart.DATA, stem=stem) if stem and stem != name else None


class DeepSpeedPart(Enum):
    """Content of a DeepSpeed file; the value is its word in messages."""

    MODEL = "model states"
    OPTIMIZER = "optimizer states"
    LAYER = "layers"
    EXPERT = "experts"


class DeepSpeedName(Struct, frozen=True, kw_only=True):
    """The parsed name of a file of DeepSpeed.

    ``rank``: among the processes of data parallelism; None for model states that are not cut among
    them (ZeRO-1, 2). ``model_rank``: among those of tensor parallelism. ``before`` and ``between``
    differ between versions and dtypes: ``bf16_`` in front, ``_`` before "optim_states". ``other``:
    the name of a layer's or expert's file.
    """

    part: DeepSpeedPart
    rank: int | None = None
    model_rank: int = 0
    before: str = ""
    between: str = "_"
    other: str = ""

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"zero_pp_rank_{self.rank}_"
        kind = "model_states" if self.part is DeepSpeedPart.MODEL else "optim_states"
        return (
            self.other or f"{self.before}{rank}mp_rank_{self.model_rank:02}{self.between}{kind}.pt"
        )


_DEEPSPEED_FILE = re.compile(
    r"(bf16_)?(?:zero_pp_rank_([0-9]{1,6})_)?mp_rank_([0-9]{1,6})(?:_(model)|(_?)optim)_states\.pt"
)
_LAYER = re.compile(r"layer_[0-9]+-model.*\.pt")
_EXPERT = re.compile(r"(?:layer_[0-9]+_)?expert_[0-9]+_mp_rank.*\.pt|expp_rank_.*\.pt")


def parse_deepspeed_name(name: str) -> DeepSpeedName | None:
    """Return the meaning of the name of a file that DeepSpeed keeps states in, None for any
    other.
    """
    if match := _DEEPSPEED_FILE.fullmatch(name):
        before, rank, model_rank, is_model, between = match.groups()
        if (before and is_model) or (rank is None and not is_model):
            return None
        return DeepSpeedName(
            part=DeepSpeedPart.MODEL if is_model else DeepSpeedPart.OPTIMIZER,
            rank=None if rank is None else int(rank),
            model_rank=int(model_rank),
            before=before or "",
            between="_" if is_model else between,
        )
    if _LAYER.fullmatch(name):
        return DeepSpeedName(part=DeepSpeedPart.LAYER, other=name)
    return DeepSpeedName(part=DeepSpeedPart.EXPERT, other=name) if _EXPERT.fullmatch(name) else None
