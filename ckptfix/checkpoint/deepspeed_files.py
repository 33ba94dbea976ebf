"""Files of DeepSpeed checkpoints, and the check that no rank's file is missing.

Facts from DeepSpeed 0.18 (``runtime/engine.py``): the states of a run are in a folder named by a
tag, which is in the file ``latest`` next to it; accelerate's tags are ``pytorch_model`` and
``pytorch_model_1``.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.folder_names import parse_deepspeed_folder_name
from ckptfix.checkpoint.rank_names import DeepSpeedName, DeepSpeedPart, parse_deepspeed_name
from ckptfix.errors import OperationError
from ckptfix.storage.files import AnyPath, names_in, relative, walk
from ckptfix.storage.reading import read_start
from ckptfix.wording import count_of

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
"""Files next to DeepSpeed's folders that contain the tag of the newest one, or of the newest
universal one.
"""

BESIDE = tuple(
    map(PurePosixPath, (LATEST, LATEST_UNIVERSAL, "zero_to_fp32.py", "zero_to_torch.py"))
)
"""Files that DeepSpeed puts next to its folders: those with a tag, and conversion scripts."""

UNIVERSAL = PurePosixPath("zero")
"""The folder in a universal checkpoint that has a folder for each trained parameter."""

AGAIN = "next: copy all files again from one save, or use another checkpoint"

_STATE = ".pt"
STEP = re.compile("global_step[0-9]+")
"""Name of a folder of DeepSpeed, as the Trainer gives it."""

_ON_NVME = "offloaded_tensors"
_MAX_LATEST = 4096


class OtherKindError(OperationError):
    """Error for a complete checkpoint of a kind that ckptfix cannot merge."""


class MissingRankError(OperationError):
    """Error for ranks whose saved files are missing. ``path``: the first missing file; ``files``:
    the number of missing files.
    """

    def __init__(self, message: str, *, path: AnyPath, rank: int, files: int) -> None:
        super().__init__(message)
        self.path = path
        self.rank = rank
        self.files = files


def deepspeed_folders(folder: CheckpointFolder) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield position and path of each DeepSpeed checkpoint in a scanned folder, or of the folder
    itself as ``.``.
    """
    return deepspeed_below(folder.root, folder.subfolders)


def deepspeed_below(
    root: AnyPath, names: Collection[PurePosixPath]
) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield position and path of each DeepSpeed checkpoint in a folder with sub-folders of these
    names.

    Their place is accelerate's, else the one in DeepSpeed's file ``latest`` or
    ``latest_universal``, else the newest of DeepSpeed's own names, which a load without a tag does
    not find; ``.`` is the folder itself.
    """
    if _is_deepspeed(root):
        yield 0, PurePosixPath(".")
        return
    found = False
    for name in names:
        tag = parse_deepspeed_folder_name(str(name))
        if tag is not None and _is_deepspeed(root / name):
            found = True
            yield tag.index, name
    if found:
        return
    for file in (LATEST, LATEST_UNIVERSAL) if names else ():
        latest = _latest(root / file)
        if latest in names and _is_deepspeed(root / latest):  # a plain name, so nothing outside
            yield 0, latest
            return
    # Next to checkpoints of accelerate it is the folder of a run.
    if any(str(name).startswith(("checkpoint_", "checkpoint-")) for name in names):
        return
    steps = [name for name in names if STEP.fullmatch(str(name)) and _is_deepspeed(root / name)]
    if steps:
        yield 0, _newest(steps)


def _newest(tags: Collection[PurePosixPath]) -> PurePosixPath:
    return max(tags, key=lambda name: (len(str(name)), str(name)))


def tag_problem(folder: CheckpointFolder) -> tuple[PurePosixPath, str] | None:
    """Return a DeepSpeed checkpoint in a folder, and why a load without a tag does not find it: ""
    for no ``latest``.

    None if a load finds one. accelerate's ``load_state`` gives the tag, and never reads ``latest``.
    """
    tags = [
        name
        for name in folder.subfolders
        if (parse_deepspeed_folder_name(str(name)) or STEP.fullmatch(str(name)))
        and _is_deepspeed(folder.root / name)
    ]
    names = set(names_in(folder.root)) if tags else set()
    if not tags or LATEST_UNIVERSAL in names or any(map(is_deepspeed_file, names)):
        return None
    newest = _newest(tags)
    if LATEST not in names:
        return newest, ""
    try:
        text = (read_start(folder.root / LATEST, _MAX_LATEST) or b"").decode().strip()
    except PermissionError:
        return None
    except (OSError, UnicodeDecodeError):
        return newest, "it is not a text file"
    tag = PurePosixPath(text)
    if len(tag.parts) > 1 or (tag in folder.subfolders and _is_deepspeed(folder.root / tag)):
        return None
    return newest, (
        f"it points to {text!r:.200}, which is not a DeepSpeed folder" if text else "it is empty"
    )


def is_deepspeed_file(name: str) -> bool:
    """Return whether DeepSpeed keeps states of a model, optimizer, layer or expert in a file of
    this name.
    """
    return parse_deepspeed_name(name) is not None


def deepspeed_paths(root: AnyPath, where: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yield the files of a DeepSpeed checkpoint, of a universal one those below ``UNIVERSAL``
    too.
    """
    yield from (where / name for name in sorted(names_in(root / where)) if is_deepspeed_file(name))
    yield from universal_paths(root, where)


def universal_paths(root: AnyPath, where: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yield the files with the states of parameters in a universal checkpoint, nothing for any
    other.
    """
    top = root / where / UNIVERSAL
    for folder, names, files in walk(top):
        names.sort()
        inside = relative(folder, root)
        yield from (inside / name for name in sorted(files) if name.endswith(_STATE))


def _is_deepspeed(path: AnyPath) -> bool:
    try:
        return any(map(is_deepspeed_file, names_in(path)))
    except OSError:
        return False


def _latest(path: AnyPath) -> PurePosixPath:
    """Return the folder named in a file, ``.`` when the file cannot be read."""
    try:
        return PurePosixPath((read_start(path, _MAX_LATEST) or b"").decode().strip())
    except (OSError, UnicodeDecodeError):
        return PurePosixPath(".")


class DeepSpeedFiles(Struct, frozen=True, kw_only=True):
    """Files of one checkpoint, rank -> name. ``by_rank``: every rank has its own model states
    (ZeRO-3).

    ``is_universal``: the states of each trained parameter are in a folder of their own below
    ``UNIVERSAL``.
    """

    folder: AnyPath
    by_rank: bool
    is_universal: bool
    models: Mapping[int, str]
    optimizers: Mapping[int, str]

    def ensure_ranks(self, saved: int | None, prefix: str | None = None) -> None:
        """Raise MissingRankError unless there is a file of every rank. ``saved``: the number of
        ranks at the save, None when unknown.

        ``prefix``: how the names of the optimizer's files begin, None unless the run saved such
        files for sure. Raises OperationError for ranks too many.
        """
        is_partitioned = self.by_rank or prefix is not None
        has_optimizers = bool(self.optimizers) or (is_partitioned and not self.is_universal)
        kinds = [(DeepSpeedPart.OPTIMIZER, self.optimizers)] if has_optimizers else []
        kinds += [(DeepSpeedPart.MODEL, self.models)] if self.by_rank else []
        for part, ranks in kinds:
            have = len(ranks)
            wanted = saved or max(ranks, default=have - 1) + 1
            missing = [rank for rank in range(min(wanted, have + 1)) if rank not in ranks]
            if not missing and have <= wanted:
                continue
            problem = (
                f"{self.folder}: {count_of(have, 'file')} of {part.value} (expected {wanted}, one "
                "per rank); "
            )
            if not missing:
                raise OperationError(problem + AGAIN)
            known = parse_deepspeed_name((ranks or self.models)[min(ranks or self.models)])
            assert known is not None, "list_files accepted the name"
            before = known.before if ranks else prefix or ""
            name = replace(known, part=part, rank=missing[0], before=before)
            kept = ""
            if not ranks and not self.by_rank:
                kept = f"; {self.models[0]} still has the weights, in the dtype of training"
            raise MissingRankError(
                f"{problem}first missing rank: {missing[0]}{kept}; {AGAIN}",
                path=self.folder / str(name),
                rank=missing[0],
                files=max(wanted - have, 1),
            )


def list_files(folder: AnyPath) -> DeepSpeedFiles:
    """Return the files of a checkpoint by their names.

    Raises OtherKindError for kinds that are not read, OperationError for files of two saves.
    """
    uncut: dict[int, str] = {}
    models: dict[int, str] = {}
    optimizers: dict[int, str] = {}
    found = {
        file: name
        for file in sorted(names_in(folder))
        if (name := parse_deepspeed_name(file)) is not None
    }
    _ensure_kind(folder, found.values())
    for file, name in found.items():
        into = (
            optimizers
            if name.part is DeepSpeedPart.OPTIMIZER
            else uncut
            if name.rank is None
            else models
        )
        rank = name.rank or 0
        if into.setdefault(rank, file) != file:
            raise _mixed(folder, f"{into[rank]} and {file} both belong to rank {rank}")
    is_universal = not optimizers and (folder / UNIVERSAL).is_dir()
    if uncut and models and not is_universal:
        raise _mixed(
            folder, f"{uncut[0]} is from ZeRO-1 or ZeRO-2, but {models[min(models)]} is from ZeRO-3"
        )
    if not uncut and not models:
        raise OperationError(
            f"{folder}: {count_of(len(optimizers), 'optimizer file')}, but no model states; {AGAIN}"
        )
    return DeepSpeedFiles(
        folder=folder,
        by_rank=bool(models) and not uncut,
        is_universal=is_universal,
        models=uncut or models,
        optimizers=optimizers,
    )


def _ensure_kind(folder: AnyPath, names: Collection[DeepSpeedName]) -> None:
    """Raise OtherKindError for a model that is cut by more than data parallelism."""
    parts = Counter(name.part for name in names)
    if layers := parts[DeepSpeedPart.LAYER]:
        raise other_kind(
            folder,
            f"the model is split into {count_of(layers, 'layer file')} for pipeline parallelism",
        )
    if experts := parts[DeepSpeedPart.EXPERT]:
        raise other_kind(
            folder,
            f"its MoE experts are in {count_of(experts, 'file')}, which only the ranks that saved "
            "them can merge",
        )
    if (folder / _ON_NVME).is_dir():
        raise other_kind(
            folder,
            "the optimizer and the fp32 weights were offloaded to NVMe, in DeepSpeed's swap files "
            f"({_ON_NVME}/)",
        )
    if highest := max((name.model_rank for name in names), default=0):
        raise other_kind(
            folder, f"the model is split into {highest + 1} parts for tensor parallelism"
        )


def other_kind(folder: AnyPath, why: str) -> OtherKindError:
    """Return the error for a kind that is not read."""
    return OtherKindError(
        f"{folder}: {why}; next: export the weights with the script that saved them, and use the "
        "exported files"
    )


def _mixed(folder: AnyPath, why: str) -> OperationError:
    return OperationError(f"{folder}: {why}: the files come from two saves; {AGAIN}")
