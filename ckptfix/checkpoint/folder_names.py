"""Names of folders: those of DCP and DeepSpeed in a checkpoint, and the numbered checkpoints of a run."""

import re

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.checkpoint.roles import NUMBER, Role


class FolderName(Struct, frozen=True, kw_only=True):
    """Parsed name of a folder with one entry of a checkpoint: a DCP folder of FSDP, or one of
    DeepSpeed.

    Entry 0 has its number in the name of a DCP folder, and none in that of DeepSpeed's.
    """

    role: Role
    stem: str
    index: int

    @property
    def is_deepspeed(self) -> bool:
        """Return whether this is the folder, with accelerate's tag for its name, in which DeepSpeed
        saves.
        """
        return self.stem == _TAG

    def at(self, index: int) -> "FolderName":
        """Return the name of another entry of the same family."""
        return replace(self, index=index)

    def __str__(self) -> str:
        return self.stem if self.is_deepspeed and not self.index else f"{self.stem}_{self.index}"


_TAG = "pytorch_model"
FSDP_MODEL = "pytorch_model_fsdp"
_DCP_FOLDER = re.compile(rf"({FSDP_MODEL}|optimizer)_{NUMBER}")
_DEEPSPEED_FOLDER = re.compile(rf"{_TAG}(?:_([1-9][0-9]{{0,8}}))?")


def parse_folder_name(name: str) -> FolderName | None:
    """Return the meaning of the name of a DCP folder, None for any other."""
    match = _DCP_FOLDER.fullmatch(name)
    if match is None:
        return None
    role = Role.OPTIMIZER if match[1] == "optimizer" else Role.MODEL
    return FolderName(role=role, stem=match[1], index=int(match[2]))


def parse_deepspeed_folder_name(name: str) -> FolderName | None:
    """Return the meaning of the name of a DeepSpeed folder of accelerate, None for any other."""
    match = _DEEPSPEED_FOLDER.fullmatch(name)
    return FolderName(role=Role.MODEL, stem=_TAG, index=int(match[1] or 0)) if match else None


def dcp_model_folder(index: int) -> FolderName:
    """Return the name of the DCP folder in which FSDP keeps a model."""
    return FolderName(role=Role.MODEL, stem=FSDP_MODEL, index=index)


def describe_folder_name(name: str) -> str | None:
    """Describe a sub-folder of a checkpoint by its name; None for a name that Accelerate never
    writes.
    """
    if parse_folder_name(name) is not None:
        return "a torch.distributed.checkpoint (DCP) folder"
    return "a DeepSpeed folder" if parse_deepspeed_folder_name(name) is not None else None


ACCELERATE = "checkpoint_{}"
"""Names of folders that ``save_state`` numbers itself (accelerate 1.0 to 1.15). ``{}`` is the
number.
"""

TRAINER = "checkpoint-{}"
"""Names of the checkpoint folders of transformers' Trainer."""

FAMILIES = (ACCELERATE, TRAINER, "step_{}", "epoch_{}")
"""Names of checkpoint folders of the Trainer, of diffusers' scripts and of accelerate's examples.
"""

_ONE_OF_SEVERAL = re.compile(r"(checkpoint|step|epoch)[-_]?[0-9]+")


def checkpoint_number(name: str, pattern: str = ACCELERATE) -> int | None:
    """Return the number in the name of a checkpoint, None for any other name. ``{}`` in the pattern
    is the number.

    accelerate and the Trainer order folders by the number, with zeros in front, too:
    ``checkpoint_008`` is after ``checkpoint_4``.
    """
    before, _, after = pattern.partition("{}")
    match = re.fullmatch(f"{re.escape(before)}([0-9]+){re.escape(after)}", name)
    return int(match[1]) if match else None


_NUMBER_AT_END = re.compile(r"(.*?)([0-9]+)", re.DOTALL)


def split_number(name: str) -> tuple[str, int] | None:
    """Return a name without the number at its end, and the number; None for a name without one.

    The checkpoints of a run share the first part, whatever a script calls them.
    """
    match = _NUMBER_AT_END.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def family_of(name: str) -> tuple[str, int] | None:
    """Return the pattern of ``FAMILIES`` and the number of a checkpoint's name, None for any other
    name.
    """
    numbers = ((pattern, checkpoint_number(name, pattern)) for pattern in FAMILIES)
    return next(((pattern, number) for pattern, number in numbers if number is not None), None)


def is_one_of_several(name: str) -> bool:
    """Return whether scripts give this name to one checkpoint in a folder of checkpoints."""
    return _ONE_OF_SEVERAL.fullmatch(name) is not None


_COUNTED = re.compile(
    r"(?:^|.*[^a-z])(?:global)?(?:checkpoint|chkpt|ckpt|snapshot|save|step|epoch|ep|episode|round|update|iteration|iter"
    r"|it)s?[-_=. ]*",
    re.DOTALL | re.IGNORECASE,
)


def counts_saves(before: str) -> bool:
    """Return whether a number after this text counts the saves of one run, as in ``epoch=`` or
    ``global_step``.

    A number of ``run_``, ``fold_``, ``seed``, ``client_`` or ``stage`` may tell one run from
    another.
    """
    return _COUNTED.fullmatch(before) is not None


_OF_RUNS = re.compile(
    r"(?:^|.*[^a-z])(?:run|exp|experiment|trial|fold|split|cv|seed|repeat|replica|config|cfg|sweep|version|ver|v"
    r"|agent|member|student|teacher|rank|worker|client|node|host|gpu|device|job|task|stage|phase|part"
    r"|site|group)s?[-_=. ]*",
    re.DOTALL | re.IGNORECASE,
)


def tells_runs_apart(before: str) -> bool:
    """Return whether a number after this text tells runs, models or machines apart, which may have
    different objects.
    """
    return _OF_RUNS.fullmatch(before) is not None
