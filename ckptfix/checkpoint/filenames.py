"""The grammar of file names: parse a name into its meaning, and format the meaning as a name again.

Every library's names are here, and only here:

- Accelerate's states (``utils/constants.py`` and ``checkpointing.py``, 1.0 to 1.15): entry 0 of a
  role has no number, entry i has ``_i``; custom objects are numbered from 0; RNG states are
  numbered by rank.
- The Trainer's states (``trainer.py`` of transformers 5).
- Weights of transformers, peft and diffusers, their variants (``model.fp16.safetensors``), their
  shards and indexes.
- The files and folders of DCP (``torch/distributed/checkpoint/filesystem.py`` of torch 2.13), and
  of DeepSpeed 0.18 (``runtime/engine.py``).
- The files of FSDP that each rank saves alone: ``optimizer_0_rank1.bin`` (``utils/fsdp_utils.py``
  of accelerate 1.15).
- The safetensors files in which torch saves each rank's parts of tensors,
  ``shard-00001-model-00001-of-00002.safetensors`` (``distributed/checkpoint/_hf_utils.py`` of torch
  2.13).
- ``run_state_0.pt``, in which the guarded Accelerator keeps what a rank needs to go on exactly.
- Folders that are one of several checkpoints: ``checkpoint_3``, ``checkpoint-500``, ``step_10``,
  ``epoch_2``.

``str()`` of a parsed name is the name again, and parsing the ``str()`` of a meaning gives that
meaning.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.checkpoint.rank_names import parse_deepspeed_name, parse_rank_file_name
from ckptfix.checkpoint.roles import NOT_STATES, NUMBER, OF_ONE_RANK, Role, is_of_macos

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pth.tar", ".th")
"""Every file with one of these suffixes is a component, whatever its name."""


class ModelName(NamedTuple):
    """A model by the name of its files, without numbers: ``variant`` is "fp16" of
    ``model.fp16.safetensors``.

    Files with one name and one index are one model, in any format and any number of shards.
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
"""The stems of libraries' weights, without a variant -> the model, whatever the format."""


class FileName(Struct, frozen=True, kw_only=True):
    """A parsed name. ``stem`` and ``suffix`` belong to the family: files of one family are one list
    of entries.

    ``shard`` is (number, total), both from 1, for one file of a sharded model. ``rank`` is set for
    what each rank has for itself; both are set for a file of parts (``is_of_parts``). ``variant``
    is set where it follows the number of a shard, as diffusers wrote it before 0.30.
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
        """Return whether Accelerate finds this file by its position, so that a gap or a duplicate
        shifts others.
        """
        return self.role in NUMBERED and self.shard is None and not self.is_of_trainer

    @property
    def is_of_trainer(self) -> bool:
        """Return whether transformers' Trainer writes and reads this state, and ``load_state``
        never does.
        """
        return (self.stem, self.suffix) in _OF_TRAINER

    @property
    def is_of_accelerate(self) -> bool:
        """Return whether ``save_state`` writes a state under this name; of ``scaler.pt`` the
        Trainer does, too.
        """
        return self.role not in NOT_STATES and not self.is_of_trainer

    @property
    def is_of_save_state(self) -> bool:
        """Return whether only ``save_state`` writes it: it always leaves the random states of every
        rank.
        """
        return self.role is Role.RNG_STATE and not self.is_of_trainer

    @property
    def is_of_parts(self) -> bool:
        """Return whether torch's ``HuggingFaceStorageWriter`` saved one rank's parts of tensors
        here.
        """
        return self.shard is not None and self.rank is not None

    @property
    def is_state_file(self) -> bool:
        """Return whether a library reads a file by exactly this name: a state, or weights in one
        file.
        """
        is_weights = (
            self.role is not Role.WEIGHTS_INDEX and self.is_of_library and self.shard is None
        )
        return self.role not in NOT_STATES or is_weights

    @property
    def model(self) -> ModelName | None:
        """The model of this file or index, by its name; None for states."""
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
    def load_order(self) -> tuple[int, int] | None:
        """The position of this model or index for ``load_state``, and the rank of its name among
        those tried for one position; None for a file that ``load_state`` never reads.
        """
        if self.shard is not None or self.variant:
            return None
        if self.role is Role.MODEL and (self.stem, self.suffix) in LOADED_MODELS:
            return self.index, 2 * LOADED_MODELS.index((self.stem, self.suffix))
        if self.role is Role.WEIGHTS_INDEX and self.suffix.endswith(_INDEX_SUFFIX):
            listed = parse_file_name(self.stem + self.suffix.removesuffix(_INDEX_SUFFIX))
            if listed is not None and listed.role is Role.MODEL and listed.load_order is not None:
                position, rank = listed.load_order
                return position, rank + 1
        return None

    @property
    def is_of_library(self) -> bool:
        """Return whether a library writes weights, or their index, under this name, and finds them
        by it.
        """
        return (
            self.role in NOT_STATES
            and self.suffix != ""  # none for a file that was asked for by its name: model.onnx
            and self.suffix not in _SUFFIXES_OF_SCRIPTS
            and self.stem.partition(".")[0] in _LIBRARY_STEMS
        )

    @property
    def is_of_script(self) -> bool:
        """Return whether no library looks for a file of this name, so that a script or any program
        may write it.

        ``model.bin`` is of this kind: it holds the weights of CTranslate2, and no library for torch
        reads it.
        """
        name = str(self)
        return self.role is Role.UNKNOWN and not (
            (self.is_of_library and name != "model.bin")
            or name in _OF_DIFFUSERS
            or parse_deepspeed_name(name) is not None
            or parse_rank_file_name(name) is not None
        )

    @property
    def index_name(self) -> str:
        """The name of the index that lists this shard, as loaders look for it."""
        return self.index_names[0]

    @property
    def index_names(self) -> tuple[str, ...]:
        """The names that the index of this shard can have, of which loaders take the first.

        transformers never looks for the one that diffusers wrote before 0.30, and diffusers 0.42
        misses it where the path of the folder has a dot.
        """
        if not self.variant:
            return (index_name(self.stem, self.suffix),)
        of_old_diffusers = f"{self.stem}{self.suffix}.{self.variant}.index.json"
        if self.stem not in _LIBRARY_STEMS:
            return (of_old_diffusers,)
        return index_name(f"{self.stem}.{self.variant}", self.suffix), of_old_diffusers

    @property
    def family(self) -> tuple[Role, str, str]:
        """Files with the same family form one list of entries."""
        return (self.role, self.stem, self.suffix)

    def at(self, index: int) -> "FileName":
        """Return the name of another entry of the same family."""
        return replace(self, index=index)

    def of_rank(self, rank: int) -> "FileName":
        """Return the name of the file that another rank has for the same."""
        return replace(self, rank=rank)

    def __str__(self) -> str:
        if self.shard is not None:
            variant = f".{self.variant}" if self.variant else ""
            stem = self.stem if self.rank is None else self.stem.replace("*", f"{self.rank + 1:05}")
            return f"{stem}-{self.shard[0]:05}-of-{self.shard[1]:05}{variant}{self.suffix}"
        if self.rank is not None:
            return f"{self.stem}_{self.rank}{self.suffix}"
        if self.role is Role.CUSTOM or self.index:
            return f"{self.stem}_{self.index}{self.suffix}"
        return self.stem + self.suffix


NUMBERED = (
    Role.MODEL,
    Role.OPTIMIZER,
    Role.SCHEDULER,
    Role.SAMPLER,
    Role.DATALOADER,
    Role.CUSTOM,
)
"""Roles of the files that Accelerate numbers in the order of ``prepare`` and registration."""

LOADED_MODELS = (
    ("model", ".safetensors"),
    ("pytorch_model", ".bin"),
    ("pytorch_model_fsdp", ".bin"),
)
"""File names that ``load_state`` tries for the weights of a model, in order; a full FSDP save has
the last.
"""

FORMATS_OF_MODELS = LOADED_MODELS[:2]
"""Of these, it looks for both at each position anew (accelerate 1.0 to 1.15,
``load_accelerator_state``).
"""

Stems = Mapping[str, tuple[str, ...]]
"""Kind of weights -> the stems under which a loader looks for them, and for their index; the first
is the usual one.
"""

_OF_DIFFUSERS = ("learned_embeds.bin", "pytorch_custom_diffusion_weights.bin")
"""Files of parts of a model that diffusers finds by their names (``loaders`` of 0.42)."""

WEIGHT_KINDS = (".safetensors", ".bin")
STEMS_OF_LIBRARIES: Mapping[str, Stems] = {
    "transformers": {".safetensors": ("model",), ".bin": ("pytorch_model",)},
    "diffusers": dict.fromkeys(WEIGHT_KINDS, ("diffusion_pytorch_model",)),
    "peft": dict.fromkeys(WEIGHT_KINDS, ("adapter_model",)),
}
"""Library -> the stems that its ``from_pretrained`` looks for (transformers 5.23, diffusers 0.42,
PEFT 0.21).
"""

LORA = "pytorch_lora_weights"
"""Stem of the LoRA weights that ``save_lora_weights`` of diffusers' pipelines writes."""

MODEL_STEMS = ("model", "pytorch_model", "diffusion_pytorch_model")
"""Stems of the weights of complete models. The stems of adapters count only where an adapter is
looked for.
"""


def weights_names(library: str) -> tuple[str, ...]:
    """Return the names of a library's weights in one file, the preferred one first."""
    return tuple(
        f"{stem}{kind}" for kind, stems in STEMS_OF_LIBRARIES[library].items() for stem in stems
    )


# Never numbered; entry 0 has no number; every one has a number.
_LONE, _FROM_ONE, _FROM_ZERO = range(3)
_FAMILIES = {
    **dict.fromkeys(LOADED_MODELS, (Role.MODEL, _FROM_ONE)),
    ("optimizer", ".bin"): (Role.OPTIMIZER, _FROM_ONE),
    ("scheduler", ".bin"): (Role.SCHEDULER, _FROM_ONE),
    ("sampler", ".bin"): (Role.SAMPLER, _FROM_ONE),
    ("dl_state_dict", ".bin"): (Role.DATALOADER, _FROM_ONE),
    ("random_states", ".pkl"): (Role.RNG_STATE, _FROM_ZERO),
    ("custom_checkpoint", ".pkl"): (Role.CUSTOM, _FROM_ZERO),
    ("run_state", ".pt"): (Role.RUN_STATE, _FROM_ZERO),
    ("scaler", ".pt"): (Role.GRAD_SCALER, _LONE),
    ("optimizer", ".pt"): (Role.OPTIMIZER, _LONE),
    ("scheduler", ".pt"): (Role.SCHEDULER, _LONE),
    ("training_args", ".bin"): (Role.TRAINING_ARGUMENTS, _LONE),
    ("rng_state", ".pth"): (Role.RNG_STATE, None),  # with a number in a run of several processes
}
"""Stem and suffix of each state -> its role, and how its files are numbered."""

_OF_TRAINER = frozenset(
    {("optimizer", ".pt"), ("scheduler", ".pt"), ("training_args", ".bin"), ("rng_state", ".pth")}
)
"""States that only the Trainer saves. Its ``scaler.pt`` has the name of Accelerate's own."""


def under_name_of_trainer(lost: str, names: Collection[PurePosixPath]) -> str:
    """Return a file that may be a lost state of ``save_state``: one with the name that the Trainer
    gives to the first state of its kind, or "".
    """
    stem, _, suffix = lost.partition(".")
    under = f"{stem}.pt"
    is_state = suffix == "bin" and (stem, ".pt") in _OF_TRAINER
    return under if is_state and PurePosixPath(under) in names else ""


_ENTRY = re.compile(rf"(.+?)(?:_{NUMBER})?(\.safetensors|\.bin|\.pkl|\.pth?)", re.DOTALL)
_WORD = "[A-Za-z0-9_-]+"
_SHARD = re.compile(
    rf"(.+)-([0-9]{{5}})-of-([0-9]{{5}})(?:\.({_WORD}))?(\.safetensors|\.bin)", re.DOTALL
)  # model-00001-of-00002.safetensors, and .fp16.safetensors as diffusers wrote it before 0.30
_PARTS_STEM = "shard-*-model"
_PARTS = re.compile(
    r"shard-(?!00000)([0-9]{5})-model-([0-9]{5})-of-([0-9]{5})(\.safetensors)"
    # Shard-00001-model-00001-of-00002.safetensors: the parts that rank 0 has of the tensors in file
    # 1.
)
PARTS_LABEL = f"{_PARTS_STEM}-*.safetensors"
"""The name in messages of all files with parts of one model."""

_INDEX = re.compile(
    rf"(.+)((?:\.safetensors|\.bin)(?:\.index(?:\.{_WORD})?|\.{_WORD}\.index)\.json)", re.DOTALL
)  # .index.fp16.json, and .fp16.index.json as diffusers wrote it before 0.30
_VARIANT_OF_INDEX = re.compile(
    rf"(?:\.safetensors|\.bin)(?:\.index\.({_WORD})|\.({_WORD})\.index)\.json"
)
_INDEX_SUFFIX = ".index.json"
_SUFFIXES_OF_SCRIPTS = (".pt", ".pth", ".ckpt", ".pth.tar", ".th")


def parse_file_name(name: str) -> FileName | None:
    """Return the meaning of a file name, None for a file outside of checkpoints."""
    if is_of_macos(name):
        return None
    if (match := _ENTRY.fullmatch(name)) and (family := _FAMILIES.get((match[1], match[3]))):
        role, numbering = family
        number = None if match[2] is None else int(match[2])
        if (
            numbering is None
            or (numbering == _LONE and number is None)
            or (numbering == _FROM_ONE and number != 0)
            or (numbering == _FROM_ZERO and number is not None)
        ):
            if role in OF_ONE_RANK:
                return FileName(role=role, stem=match[1], suffix=match[3], rank=number)
            return FileName(role=role, stem=match[1], suffix=match[3], index=number or 0)
    if match := _PARTS.fullmatch(name):
        rank, number, total = (int(digits) for digits in match.groups()[:3])
        return FileName(
            role=Role.MODEL,
            stem=_PARTS_STEM,
            suffix=match[4],
            rank=rank - 1,
            shard=(number, total),
        )
    if match := _SHARD.fullmatch(name):
        shard = (int(match[2]), int(match[3]))
        return FileName(
            role=Role.MODEL, stem=match[1], suffix=match[5], shard=shard, variant=match[4] or ""
        )
    if match := _INDEX.fullmatch(name):
        return FileName(role=Role.WEIGHTS_INDEX, stem=match[1], suffix=match[2])
    for suffix in WEIGHT_SUFFIXES:
        if name.endswith(suffix) and name != suffix:
            return FileName(role=Role.UNKNOWN, stem=name[: -len(suffix)], suffix=suffix)
    return None


def is_file_of_parts(name: str) -> bool:
    """Return whether a file of this name has one rank's parts of tensors, as
    ``FileName.is_of_parts`` says.
    """
    parsed = parse_file_name(name)
    return parsed is not None and parsed.is_of_parts


_MARKS_OF_COPIES = re.compile(
    r"[\s_-]*\((?:[a-z0-9\s_]*copy[0-9\s_]*|[0-9]{1,2})\)"
    r"|[\s._-]+(?:copy|old|backup|bak|orig|tmp|new)(?![a-z0-9])"
    r"|\s+(?:[0-9]{1,2}(?=\.|$))?"
    r"|(?:\.[0-9]{1,2}|~)$"
)
"""Marks of copies: of browsers (`` (1)``), file managers (`` - Copy (2)``, ``(another copy)``), wget
(``.1``), editors (``~``) and people (``_old``, ``.bak``).
"""

NUMBER_ALONE = re.compile(r"-[0-9]{1,2}(?=\.[a-z]+$)")
"""The mark of Safari's second download, which may have a meaning for a script:
``model-1.safetensors`` may be of an epoch.
"""


def without_marks(name: str) -> str:
    """Return a name in small letters, and without the marks of a copy: ``optimizer.bin`` for
    ``Optimizer (1).bin``.
    """
    return _MARKS_OF_COPIES.sub("", name.casefold())


def copied_state(name: str) -> FileName | None:
    """Return the state of ``save_state`` of which a file is a copy by its name, so that
    ``load_state`` never finds the file; None for any other name.

    ``load_state`` looks for two pairs of stem and suffix: ``pytorch_model.safetensors`` is neither.
    """
    known = parse_file_name(name)
    if known is not None and known.role is not Role.UNKNOWN:
        return None
    plain = NUMBER_ALONE.sub("", without_marks(name))
    if plain.endswith(".safetensors"):
        plain = plain.removeprefix("pytorch_")
    # A copy may lose its suffix, and each stem has one suffix alone.
    suffixes = ("",) if "." in plain else (".safetensors", ".bin", ".pkl", ".pt")
    for meant in filter(None, (parse_file_name(plain + suffix) for suffix in suffixes)):
        is_known = meant.role is not Role.UNKNOWN and meant.is_state_file
        if is_known and not meant.is_of_trainer:
            return meant
    return None


def names_weights(name: str) -> bool:
    """Return whether a file is of weights by its name: one that a library or a script gives to a
    model, or a shard.
    """
    parsed = parse_file_name(name)
    return (
        parsed is not None and parsed.role in NOT_STATES and parsed.role is not Role.WEIGHTS_INDEX
    )


def index_name(stem: str, suffix: str) -> str:
    """Return the name of the index of shards; that of ``model.fp16`` is
    ``model.safetensors.index.fp16.json``.
    """
    base, _, variant = stem.partition(".")
    if base in _LIBRARY_STEMS and variant:
        return f"{base}{suffix}.index.{variant}.json"
    return f"{stem}{suffix}.index.json"


def model_file(suffix: str, index: int = 0) -> FileName:
    """Return the name under which ``load_state`` looks for a model, ``.safetensors`` or
    ``.bin``.
    """
    stem = next(stem for stem, ending in LOADED_MODELS if ending == suffix)
    return FileName(role=Role.MODEL, stem=stem, suffix=suffix, index=index)


def shard_name(stem: str, suffix: str, number: int, total: int) -> str:
    """Return the name of shard ``number``, from 1, of a model in ``total`` files."""
    return str(FileName(role=Role.MODEL, stem=stem, suffix=suffix, shard=(number, total)))


def random_states_name(rank: int) -> str:
    """Return the name of the file in which ``save_state`` keeps the RNG states of a rank."""
    return str(FileName(role=Role.RNG_STATE, stem="random_states", suffix=".pkl", rank=rank))


def run_state_name(rank: int) -> str:
    """Return the name of the file in which the guarded Accelerator keeps what a rank needs to go on
    exactly.
    """
    return str(FileName(role=Role.RUN_STATE, stem="run_state", suffix=".pt", rank=rank))


TRAINER_STATE = "trainer_state.json"
"""The file that transformers' Trainer writes last; it holds the step."""


_COPYING = re.compile(r"\.(.+)\.[A-Za-z0-9]{6}|(.+)\.(?:part|incomplete|tmp)", re.DOTALL)
"""Temporary names of interrupted copies: ``.NAME.XXXXXX`` of rsync, and the suffixes of downloads
and atomic writers.
"""

_DOWNLOADING = re.compile(
    r"(.+?)\.(?:aria2|bc!|crdownload|download|filepart|opdownload|part\.minio|!qB|!ut|(?:[0-9a-f]{8}\.)?partial)"
    r"|(.+)_\.gstmp|(.+)\.(?=[0-9]*[A-Fa-f])[0-9A-Fa-f]{8}",
    re.DOTALL,
)
"""Temporary names of downloads: by browsers, aria2, torrents, WinSCP and rclone; and by the clients
of object stores.

Those are gsutil's ``NAME_.gstmp``, and ``NAME.6eB15D0c`` of boto3 and the AWS client.
``NAME.download`` is a folder of Safari. aria2 gives the file its name at once, and ``NAME.aria2``
exists until all of it is there.
"""


def copied_name(name: str) -> str:
    """Return the name that the file of an unfinished copy was to get, "" if it has no temporary
    name.
    """
    return _intended(_COPYING, name)


def downloaded_name(name: str) -> str:
    """Return the same of an unfinished download."""
    return _intended(_DOWNLOADING, name)


def _intended(pattern: re.Pattern[str], name: str) -> str:
    match = pattern.fullmatch(name)
    return next(filter(None, match.groups()), "") if match else ""
