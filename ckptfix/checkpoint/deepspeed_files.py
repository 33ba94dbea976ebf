"""What DeepSpeed calls its files and folders, and which of them are there.

Facts from DeepSpeed 0.18 (``runtime/engine.py``): the states of a run are in a folder with a tag for its name, which
the file ``latest`` beside it holds; accelerate's tags are ``pytorch_model`` and ``pytorch_model_1``.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.errors import OperationError

BESIDE = (PurePosixPath("latest"), PurePosixPath("zero_to_fp32.py"))
"""What DeepSpeed puts beside its folders: the name of one, and a script that converts it."""

AGAIN = "next: copy all files of one save here again, or use another checkpoint"

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_?optim_states\.pt")
_LAYER = re.compile(r"layer_\d+-model.*\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank.*\.pt|expp_rank_.*\.pt")
_RANK = re.compile(r"(?<=zero_pp_rank_)\d+")
_ACCELERATE = re.compile(r"pytorch_model(?:_([1-9][0-9]{0,8}))?")
_LATEST = "latest"
_MAX_LATEST = 4096


class OtherKindError(OperationError):
    """A whole checkpoint of a kind that is not put together here."""


class MissingRankError(OperationError):
    """Ranks that saved a part, which is not there. ``path``: the first missing file; ``files``: how many there are."""

    def __init__(self, message: str, *, path: Path, rank: int, files: int) -> None:
        super().__init__(message)
        self.path = path
        self.rank = rank
        self.files = files


def deepspeed_folders(folder: CheckpointFolder) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield position and path of each DeepSpeed checkpoint in a scanned folder, or of the folder itself as ``.``."""
    return deepspeed_below(folder.root, folder.subfolders)


def deepspeed_below(root: Path, names: Collection[PurePosixPath]) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield position and path of each DeepSpeed checkpoint in a folder with sub-folders of these names.

    They are where accelerate puts them, else where the file ``latest`` of DeepSpeed says; ``.`` is the folder itself.
    """
    if _is_deepspeed(root):
        yield 0, PurePosixPath(".")
        return
    found = False
    for name in names:
        match = _ACCELERATE.fullmatch(str(name))
        if match and _is_deepspeed(root / name):
            found = True
            yield int(match[1] or 0), name
    if not found:
        tag = _latest(root)
        if tag in names and _is_deepspeed(root / tag):  # a plain name, so nothing outside
            yield 0, tag


def is_deepspeed_file(name: str) -> bool:
    """Whether DeepSpeed calls a file so that holds states of a model, of an optimizer, of a layer or an expert."""
    return any(kind.fullmatch(name) for kind in (_MODEL, _OPTIMIZER, _LAYER, _EXPERT))


def deepspeed_paths(root: Path, where: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yield the files of a DeepSpeed checkpoint."""
    yield from (where / name for name in sorted(os.listdir(root / where)) if is_deepspeed_file(name))


def _is_deepspeed(path: Path) -> bool:
    try:
        names = os.listdir(path)
    except OSError:
        return False
    return any(is_deepspeed_file(name) for name in names)


def _latest(root: Path) -> PurePosixPath:
    """Return what the file ``latest`` names, ``.`` when it cannot be read."""
    try:
        with open(root / _LATEST, "rb", opener=_open) as file:
            return PurePosixPath(file.read(_MAX_LATEST).decode().strip())
    except (OSError, UnicodeDecodeError):
        return PurePosixPath(".")


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedFiles:
    """The files of one checkpoint, rank -> name. ``by_rank``: every rank has model states of its own (ZeRO-3)."""

    folder: Path
    by_rank: bool
    models: Mapping[int, str]
    optimizers: Mapping[int, str]

    def ensure_ranks(self, saved: int | None) -> None:
        """Raise MissingRankError unless there is a file of every rank. ``saved``: how many there were, None: not known.

        Raises OperationError for ranks too many.
        """
        kinds = [("optimizer states", self.optimizers)] if self.optimizers or self.by_rank else []
        kinds += [("model states", self.models)] if self.by_rank else []
        for kind, ranks in kinds:
            have = len(ranks)
            wanted = saved or max(ranks, default=have - 1) + 1
            missing = [rank for rank in range(min(wanted, have + 1)) if rank not in ranks]
            if missing:
                other = (ranks or self.models)[min(ranks or self.models)]
                name = _RANK.sub(str(missing[0]), other)
                raise MissingRankError(
                    f"{self.folder}: files of {kind} of {have} ranks, {wanted} saved it; the first rank without one is "
                    f"{missing[0]}; {AGAIN}",
                    path=self.folder / (name if ranks else name.replace("model_states", "optim_states")),
                    rank=missing[0],
                    files=max(wanted - have, 1),
                )
            if have > wanted:
                raise OperationError(
                    f"{self.folder}: files of {kind} of {have} ranks, {wanted} saved it; {AGAIN}"
                )


def list_files(folder: Path) -> DeepSpeedFiles:
    """Return the files of a checkpoint by their names.

    Raises OtherKindError for kinds that are not read, OperationError for files of two saves.
    """
    whole: dict[int, str] = {}
    models: dict[int, str] = {}
    optimizers: dict[int, str] = {}
    parts: set[int] = set()
    names = sorted(os.listdir(folder))
    for name in names:
        if match := _MODEL.fullmatch(name):
            rank, part, into = match[1], match[2], whole if match[1] is None else models
        elif match := _OPTIMIZER.fullmatch(name):
            rank, part, into = match[1], match[2], optimizers
        else:
            continue
        parts.add(int(part))
        number = int(rank or 0)
        if int(part) == 0 and into.setdefault(number, name) != name:
            raise _mixed(folder, f"{into[number]} and {name} are both of rank {number}")
    _ensure_kind(folder, names, parts)
    if whole and models:
        raise _mixed(folder, f"{whole[0]} is of ZeRO-1 or 2, {models[min(models)]} of ZeRO-3")
    if not whole and not models:
        raise OperationError(
            f"{folder}: {len(optimizers)} files of optimizers and none of model states; {AGAIN}"
        )
    return DeepSpeedFiles(folder=folder, by_rank=bool(models), models=whole or models, optimizers=optimizers)


def _ensure_kind(folder: Path, names: Iterable[str], parts: Iterable[int]) -> None:
    """Raise OtherKindError for a model that is not only cut among the ranks of data parallelism."""
    layers = sum(_LAYER.fullmatch(name) is not None for name in names)
    experts = sum(_EXPERT.fullmatch(name) is not None for name in names)
    if layers:
        raise other_kind(folder, f"the model is cut into {layers} files of layers, for pipeline parallelism")
    if experts:
        raise other_kind(
            folder, f"{experts} files hold experts of a mixture, which only their ranks can put together"
        )
    if highest := max(parts, default=0):
        raise other_kind(folder, f"the model is cut into {highest + 1} parts, for tensor parallelism")
    if (folder / "zero").is_dir():
        raise other_kind(folder, "it is a universal checkpoint, which has a folder for each parameter")


def other_kind(folder: Path, why: str) -> OtherKindError:
    """Return the error for a kind that is not read."""
    return OtherKindError(
        f"{folder}: {why}; next: write its weights with the script that saved it, and give me those"
    )


def _mixed(folder: Path, why: str) -> OperationError:
    return OperationError(f"{folder}: {why}: two saves are mixed; {AGAIN}")
